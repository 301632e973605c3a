"""An edge: a live server whose streams come from origins, or from other edges.

Theory of operation. The edge subscribes at all of its origins to the streams that are wanted, is told of their
segments, and fetches them by object diffusion; each request takes a channel of the one scheduler of the node. A stream
is wanted while viewers are there, and for a while after that, or when it fits a pattern that was given, or when the
settings want it recorded or written as HLS. What comes is
put together per stream (`StreamCopy`) and published in the hub of the server, whose viewers know no difference.

Where the edge is told to follow, the frames of each wanted stream come from one origin by RTMP. When that one is lost,
what is missing comes as segments from the others, and the next one is followed.

An edge offers what it has, as an origin does, where it is given an address for that.

All of it lives on one thread of its own; publishing is what a publisher's thread would do.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from itertools import chain, count
from operator import itemgetter
from random import Random
from typing import Any, Final

import structlog

from flowctl.core.loop.trust import client_context, secured_later
from flowctl.core.outcomes.backoff import Backoff
from flowctl.core.server.listener import shown
from flowctl.core.text.addresses import bracketed, join_host_port
from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ClosedError, ConfigError, LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.live.cluster.edge.copy import CopyStatistics, StreamCopy
from flowctl.live.cluster.edge.discovery import Lookup, OriginName, OriginWatch, parse_server
from flowctl.live.cluster.edge.gate import SchedulerGate
from flowctl.live.cluster.edge.planner import EdgePlanner
from flowctl.live.cluster.edge.upstream import OriginAddress, Upstream, UpstreamState, UpstreamStatistics
from flowctl.live.cluster.follow import FollowState, Inflow, Source, StreamFollower
from flowctl.live.cluster.media.watch import order_of
from flowctl.live.cluster.origin import POLICY, Cutting, Offering, finish, keep, segment_server
from flowctl.live.cluster.redirect import SCHEMES, TELL_S, EdgeBook, EdgeReport, bases_of
from flowctl.live.cluster.segments.cutter import CutSegment
from flowctl.live.cluster.segments.segment import NAME_BYTES, Segment, SegmentId
from flowctl.live.cluster.segments.window import SegmentPool, WindowLimits
from flowctl.live.publishing import HubSink
from flowctl.live.server import LiveServer
from flowctl.nodes.diffusion.diffusion import ObjectDiffusion
from flowctl.nodes.diffusion.objects import PeerId
from flowctl.nodes.diffusion.outbound import MOST_PATTERNS, check_pattern
from flowctl.nodes.diffusion.streams.tcp import StreamSession, connect_stream
from flowctl.pollgroup import PollGroup
from flowctl.wire.rtmp.url import NAMES_HINT, RtmpUrl, fits_names

_log: Final = structlog.get_logger("flowctl.cluster")
TICK_S: Final = 0.1
"""Time between two checks which streams are wanted, and whether a followed source has gone."""
LINGER_S: Final = 10.0
"""Time for which a stream is wanted after its last viewer has left: players that reconnect find it."""
MOST_STREAMS: Final = 1000
"""Streams that are copied at a time."""
_MOST_UNANNOUNCED: Final = 8
"""Streams followed at a time that no origin has announced. One that has just begun is announced some seconds later, and
each costs a connection to an origin, which lets one address have few: viewers can ask for any names."""
_LOOKED_FOR_S: Final = 2.0
"""Time without an announcement by any origin after which a stream makes room for another one."""
_NEVER: Final = Backoff(first_s=3600.0, most_s=3600.0)
"""Pause of a follow before it tries its source again: never, for the edge goes on with the next source at once."""
_SLOW_START_S: Final = 2.0
"""Time in which a new source must bring something; then the next one is tried, if others have the stream."""
_ROUND_BACKOFF: Final = Backoff(first_s=0.1, factor=2.0, most_s=3.0)
"""Pause between two rounds through all sources of a stream."""
HEAD_START_S: Final = 0.2
"""Time that others have to announce a segment before a slow origin is asked for it."""
_SLOWER_S: Final = 0.02
_PROBE_S: Final = 30.0
"""Time after which a slow origin that was not asked is asked like the others: it may have become quick."""
FLAWED_S: Final = 60.0
"""Time for which a source is not followed whose frames differ from what origins have: as long as a liar is banned."""
MOST_UPSTREAMS: Final = 128
"""Origins that are connected at a time, with those that no name stands for any more but that still serve."""
_EXPIRE_TICKS: Final = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeConfig:
    """Settings of an edge beside those of its server."""

    origins: tuple[OriginAddress | OriginName, ...]
    dns: str = ""  #: server of DNS, ``address`` or ``address:port``. Empty: those of the system.
    follow: bool = False  #: whether frames come from one origin by RTMP; segments then only repair
    streams: tuple[str, ...] = ()  #: patterns of streams that are wanted without viewers, with ``*`` and ``?``
    public: tuple[
        str, ...
    ] = ()  #: where viewers reach it: a host, or addresses like ``rtmp://host:port``. Empty: not told.
    redundancy: int = 1  #: number of origins that each segment is fetched from, 1 to 8
    window: WindowLimits = dataclasses.field(default_factory=WindowLimits)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.origins:
            raise ConfigError("an edge has no origins", hint="give one or more, like 10.0.0.5:1936")
        if len(set(self.origins)) != len(self.origins):
            raise ConfigError("an edge has an origin twice", hint="name each of them once")
        parse_server(self.dns)
        try:
            bases_of([item if "://" in item else f"rtmp://{bracketed(item)}" for item in self.public])
        except ValueError as error:
            hint = "write a host, or addresses: edge.example, or https://edge.example and rtmp://edge.example"
            raise ConfigError(f"public: {error}", hint=hint) from error
        if len(self.streams) > MOST_PATTERNS:
            raise ConfigError(
                f"{len(self.streams)} patterns of streams are given, origins take {MOST_PATTERNS}",
                hint="a pattern may stand for many streams, as live/* does",
            )
        for pattern in self.streams:
            if not fits_names(pattern):
                raise ConfigError(f"{pattern!r:.100} fits no stream", hint=NAMES_HINT)
            try:
                check_pattern(pattern)
            except LimitExceededError as error:
                raise ConfigError(f"{pattern!r:.100} is no pattern of streams: {error}") from error
        if not 1 <= self.redundancy <= 8:
            raise ConfigError(f"redundancy is {self.redundancy}, it must be 1 to 8")


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeStatistics:
    """An edge at one moment."""

    address: str | None  #: where other edges fetch from this one
    edges: int
    sent_bytes: int  #: octets that these edges were sent
    known_streams: int
    kept_bytes: int
    received_bytes: int  #: octets of all objects that came, copies and refused ones included
    followed: dict[str, str]  #: the origin whose frames are followed, by stream
    origins: list[UpstreamStatistics]
    copies: list[CopyStatistics]


class _Following:
    """Follows one stream from one of several sources at a time."""

    def __init__(
        self, copy: StreamCopy, upstreams: list[Upstream], group: PollGroup, rng: Random, inflow: Inflow | None
    ) -> None:
        self._copy = copy
        self._inflow = inflow
        self._upstreams = upstreams
        self._group = group
        self._rng = rng
        self._next = rng.randrange(max(len(upstreams), 1))  # edges do not all begin with the same
        self._tries = 0  # since frames came last
        self._again_at = 0.0
        self._since = 0.0
        self._follow: StreamFollower | None = None
        self._told: set[tuple[str, str]] = set()  # sources and why they were lost, since frames came last
        self._flawed: dict[str, float] = {}  # when sources were found to send what is not the stream
        self.source = ""

    def tick(self, now: float) -> None:
        if self._follow is not None:
            statistics = self._follow.statistics()
            if statistics.state is FollowState.RUNNING:
                self._tries = 0
                self._told.clear()
            if self._goes_on(statistics.state, now):
                return
            if self._copy.flawed:
                self._flawed[self.source] = now
                hint = "its segments are looked at as ever; see what changes bytes on the way of RTMP"
                why = "its frames are not what origins announce"
                _log.error("followed origin is wrong", stream=self._copy.name, source=self.source, why=why, hint=hint)
            elif (statistics.source, statistics.why) not in self._told:  # once: it is tried again every few seconds
                self._told.add((statistics.source, statistics.why))
                _log.warning("follow lost", stream=self._copy.name, source=statistics.source, why=statistics.why)
            self.stop()
            self._copy.lose_source()
            self._tries += 1
            count = max(len(self._upstreams), 1)
            if self._tries >= count:
                self._again_at = now + _ROUND_BACKOFF.delay_s(self._tries // count, self._rng)
        if now >= self._again_at:
            self._begin(now)

    def _goes_on(self, state: FollowState, now: float) -> bool:
        """Whether the source is to be kept: it brings frames, or may soon, or no other source has more."""
        if self._copy.flawed:
            return False
        if state in (FollowState.CONNECTING, FollowState.WAITING) and now - self._since < _SLOW_START_S:
            return True
        return state in (FollowState.RUNNING, FollowState.WAITING) and not self._copy.overtaken(now)

    def _begin(self, now: float) -> None:
        for _ in self._upstreams:
            upstream = self._upstreams[self._next % len(self._upstreams)]
            self._next += 1
            flawed_s = now - self._flawed.get(str(upstream.address), float("-inf"))
            if upstream.named and upstream.state is not UpstreamState.BANNED and flawed_s > FLAWED_S:
                break
        else:
            return
        origin = upstream.address
        try:
            url = origin.url(self._copy.name)
        except (RemoteProtocolError, ConfigError):
            return  # a name that this server's viewers may ask for, and we cannot; or its key's file is gone
        self.source, self._since = str(origin), now
        self._follow = StreamFollower(
            Source(url, host=origin.host), self._copy, self._group, backoff=_NEVER, rng=self._rng, inflow=self._inflow
        )
        self._follow.start()

    @property
    def running(self) -> bool:
        return self._follow is not None and self._follow.statistics().state is FollowState.RUNNING

    def stop(self) -> None:
        if self._follow is not None:
            self._follow.abandon()
        self._follow = None


class _WantedCopy:
    """A stream that is wanted here: its copy, and the follow that brings frames."""

    def __init__(self, copy: StreamCopy, following: _Following | None, now: float) -> None:
        self.copy: Final = copy
        self.following: Final = following
        self.wanted_at = self.since = now
        self.announced = False  # by an origin

    @property
    def is_somewhere(self) -> bool:
        return self.announced or self.is_followed

    @property
    def is_followed(self) -> bool:
        return self.following is not None and self.following.running


def _has_segments(stream: str) -> bool:
    try:
        return len(stream.encode()) <= NAME_BYTES
    except UnicodeEncodeError:
        return False


def _look_later(name: str) -> None:
    """Do nothing: with each tick an edge looks at what is viewed, and finds it at its origins alone."""


class Edge:
    """Makes a live server an edge; a companion of it."""

    def __init__(self, server: LiveServer, config: EdgeConfig, *, offer: str = "", rng: Random | None = None) -> None:
        self._server = server
        self._hub: Final = server.hub
        self._config = config
        self._clock = server.clock
        self._rng = rng or Random()
        self._listener = segment_server(server, offer, self._serve) if offer else None
        self._group = (
            PollGroup("flowctl-edge", on_error=server.hub.oversight.report)
            if self._listener is None
            else self._listener.groups.groups[0]
        )
        self._wanted: dict[str, _WantedCopy] = {}
        self.pool: Final = SegmentPool(
            config.window, server.clock, wants=self._wants, known_as=self._known_as, on_segment=self._came
        )
        self.gate: Final = SchedulerGate(server.clock, self._rng)
        self._planner = EdgePlanner(self._ready, lambda: bool(self._wanted), self._best_s)
        self._diffusion: ObjectDiffusion | None = None
        self._offering: Offering | None = None
        self._upstreams: list[Upstream] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._given: Final = [item for item in config.origins if isinstance(item, OriginAddress)]
        names = [item for item in config.origins if isinstance(item, OriginName)]
        find = Lookup(parse_server(config.dns), self._rng.getrandbits(32)).find
        self._watches: Final = [OriginWatch(item, find, self._tell_found, Random()) for item in names]
        self._found: dict[OriginName, list[OriginAddress]] = {}  # what DNS said last of each name
        self._slow: set[str] = set()  # connections to origins that answer much later than others
        self._ticks = 0
        self._book: Final = EdgeBook(server.clock)  # edges of this one
        self._name: Final = f"{self._rng.getrandbits(64):016x}"
        self._numbers: Final = count()  # of its reports
        self._bases: dict[str, str] = {}  # where viewers reach it, by scheme
        self._tell_at = 0.0
        self._drains = False  # which was told
        self._stopping = False
        self.title: Final = "edge"
        self.bound: list[str] = []  #: nothing that operators could call
        if self._listener is not None:
            server.hub.taker = Cutting(self._hand_over)
            server.on_handover.append(self._listener.stop_accepting)
        if server.hub.demand is None:
            server.hub.demand = _look_later

    # -- life

    @property
    def offers(self) -> str:
        return "" if self._listener is None else shown(*self._listener.address)

    @property
    def sockets(self) -> list[tuple[str, socket.socket]]:
        return [] if self._listener is None else [(item.name, item.sock) for item in self._listener.listeners]

    def start(self) -> None:
        if self._listener is not None:
            self._listener.start()
        else:
            self._group.start()
        self._group.call_soon(self._begin)

    def _begin(self) -> None:
        self._diffusion_of_loop()
        self._bases = self._public_bases()
        self._use_origins()
        for watch in self._watches:
            watch.start()
        self._task(self._run())
        _log.info("edge started", origins=[str(item) for item in self._config.origins], follow=self._config.follow)

    def _diffusion_of_loop(self) -> ObjectDiffusion:
        if self._diffusion is None:
            policy = replace(POLICY, target_object_redundancy=self._config.redundancy)
            diffusion = self._diffusion = ObjectDiffusion(
                self.pool,
                policy=policy,
                planner=self._planner,
                gate=self.gate,
                clock=self._clock,
                rng=self._rng,
                on_announced=self._announced,
            )
            written = (self._server.config.asked_for(what).patterns for what in ("record", "hls"))
            diffusion.subscribe(*self._config.streams, *chain(*written))
            self.gate.opened = diffusion.gate_opened
            self._offering = Offering(diffusion, self._server, self._book)
        return self._diffusion

    def _tell_found(self, name: OriginName, origins: list[OriginAddress]) -> None:
        """Use what a name stands for now. A watch's thread."""
        with contextlib.suppress(ClosedError, LocalProtocolError):
            self._group.call_soon(self._use_found, name, origins)

    def _use_found(self, name: OriginName, origins: list[OriginAddress]) -> None:
        self._found[name] = origins
        self._use_origins()

    def _use_origins(self) -> None:
        """Fetch from all origins that are given or found, and from others no longer than they serve."""
        if self._stopping:
            return
        origins = dict.fromkeys(self._given + [item for found in self._found.values() for item in found])
        present = [item for item in self._upstreams if item.state is not UpstreamState.ENDED]
        for upstream in present:
            upstream.named = upstream.address in origins
            origins.pop(upstream.address, None)
        most = max(MOST_UPSTREAMS, len(self._given))
        unnamed = [item for item in present if not item.named]
        for upstream in unnamed[: max(len(present) + len(origins) - most, 0)]:
            upstream.cut()
        for address in list(origins)[: max(most - len(self._upstreams), 0)]:  # the others at the next look
            upstream = Upstream(
                address, self._connect, self._diffusion_of_loop(), self.gate, self._clock, self._rng, self._gone
            )
            self._upstreams.append(upstream)
            upstream.task = self._task(upstream.run())
            upstream.task.add_done_callback(partial(self._ended, upstream))

    def _ended(self, upstream: Upstream, _task: asyncio.Task[None]) -> None:
        self._upstreams.remove(upstream)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._group.report("edge", error)

    def stop(self, deadline_s: float) -> None:
        finish(self._end(), self._group, deadline_s)
        if self._listener is not None:
            self._listener.stop(deadline_s)
        else:
            self._group.stop(deadline_s)

    async def _end(self) -> None:
        self._stopping = True
        for watch in self._watches:
            watch.stop()
        for wanted in self._wanted.values():
            if wanted.following is not None:
                wanted.following.stop()
            wanted.copy.close("the edge ends")
        self._wanted.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._offering is not None:
            await self._offering.close()
        self.gate.stop()

    async def _connect(self, address: OriginAddress) -> StreamSession:
        host = address.name or address.host
        # Made anew each time: the file of authorities may have been renewed.
        wrap = partial(secured_later, host=host, context=client_context()) if address.tls else None
        session = await connect_stream(self._group, (address.host, address.port), wrap=wrap)
        self._tell_at = 0.0  # this origin has been told nothing
        return session

    def _serve(self, session: StreamSession) -> None:
        self._diffusion_of_loop()
        if self._offering is not None:
            self._offering.serve(session)

    def _hand_over(self, cut: CutSegment) -> None:
        with contextlib.suppress(ClosedError, LocalProtocolError):
            self._group.call_soon(keep, self.pool, cut)

    # -- what is wanted

    def _announced(self, peer: PeerId, object_ids: Sequence[bytes]) -> None:
        for object_id in object_ids:
            name = self.pool.name_of(object_id)
            if name is None:
                continue
            wanted = self._wanted.get(name.stream)
            if wanted is None and self._is_asked_for(name.stream):
                wanted = self._want(name.stream)
            if wanted is not None:
                if not wanted.announced:  # not before: viewers ask for any names
                    _log.info("stream wanted", stream=name.stream)
                wanted.announced = True
                wanted.copy.note_announced(peer, name)

    def _gone(self, peer: PeerId) -> None:
        for wanted in self._wanted.values():
            wanted.copy.forget_peer(peer)

    def _wants(self, name: SegmentId) -> bool:
        wanted = self._wanted.get(name.stream)
        return wanted is not None and wanted.copy.wants(name)

    def _known_as(self, name: SegmentId) -> SegmentId:
        wanted = self._wanted.get(name.stream)
        return name if wanted is None else wanted.copy.known_as(name)

    def _is_asked_for(self, stream: str) -> bool:
        given = any(fnmatchcase(stream, pattern) for pattern in self._config.streams)
        return given or order_of(self._hub.config, stream).writes

    def _want(self, stream: str) -> _WantedCopy | None:
        now = self._clock()
        if self._stopping or (len(self._wanted) >= MOST_STREAMS and not self._make_room(now)):
            return None
        source = Source(RtmpUrl(stream=stream), node="segments")
        sink = HubSink(self._hub, stream, source, alone=True)
        copy = StreamCopy(stream, self.pool, sink, self._clock, follows=self._config.follow)
        inflow = None if self._server.recording is None else Inflow(self._server.recording.sessions, stream)
        following = _Following(copy, self._upstreams, self._group, self._rng, inflow) if self._config.follow else None
        wanted = self._wanted[stream] = _WantedCopy(copy, following, now)
        if self._diffusion is not None and not self._is_asked_for(stream) and _has_segments(stream):
            self._diffusion.subscribe(escape(stream))
        return wanted

    def _make_room(self, now: float) -> bool:
        """Drop a stream that no origin has announced in time; return whether there was one."""
        for name, wanted in self._wanted.items():
            if not wanted.is_somewhere and now - wanted.since > _LOOKED_FOR_S:
                self._let_go(name, "there are too many")
                return True
        return False

    def _ready(self, peer: PeerId, object_id: bytes) -> bool:
        """Whether a segment is to be fetched from a peer now; from a slow one not before the others can have it."""
        name = self.pool.name_of(object_id)
        wanted = None if name is None else self._wanted.get(name.stream)
        if name is None or wanted is None or not wanted.copy.ready(name):
            return False
        return peer not in self._slow or wanted.copy.known_for_s(name) >= HEAD_START_S

    def _best_s(self) -> float | None:
        """Return how long the best origin takes for a request, in seconds. None: not known."""
        latencies = (origin.meter.latency_s for origin in self._upstreams if origin.state is UpstreamState.FETCHING)
        return min((latency_s for latency_s in latencies if latency_s is not None), default=None)

    def _prefer(self, now: float) -> None:
        """Ask origins much slower than the best one only for what others do not have; now and then, try them."""
        measured = {peer: peer.meter.latency_s for peer in self._upstreams if peer.state is UpstreamState.FETCHING}
        best_s = min((latency_s for latency_s in measured.values() if latency_s is not None), default=0.0)
        self._slow = {
            origin.peer
            for origin, latency_s in measured.items()
            if latency_s is not None and latency_s > 2 * best_s + _SLOWER_S and now - origin.meter.asked_at < _PROBE_S
        }
        if self._diffusion is not None:
            self._diffusion.last.clear()
            self._diffusion.last.update(self._slow)

    def _came(self, segment: Segment) -> None:
        self._planner.note_arrival()
        wanted = self._wanted.get(segment.id.stream)
        if wanted is not None:
            wanted.copy.segment(segment)

    async def _run(self) -> None:
        while True:
            try:
                self._tick(self._clock())
            except Exception as error:  # noqa: BLE001 - of one look; the next may do better
                self._group.report("edge", error)
            await asyncio.sleep(TICK_S)

    def _tick(self, now: float) -> None:
        self.gate.tick()
        self._prefer(now)
        self._tell_of_edges(now)
        viewed = {stream.name for stream, viewers in self._hub.streams().items() if viewers}
        for name in viewed:
            if name not in self._wanted and self._hub.publisher_of(name) is None:
                self._want(name)
        unannounced = 0
        for name, wanted in tuple(self._wanted.items()):
            if name in viewed or self._is_asked_for(name):
                wanted.wanted_at = now
            elif now - wanted.wanted_at > LINGER_S:
                self._let_go(name, "nobody views it any more")
                continue
            if wanted.following is not None:
                unannounced += not wanted.is_somewhere
                if unannounced <= _MOST_UNANNOUNCED or wanted.is_somewhere:
                    wanted.following.tick(now)
                else:
                    wanted.following.stop()
            wanted.copy.tick(now)
        self._ticks += 1
        if self._ticks % _EXPIRE_TICKS == 0:
            self.pool.expire()

    # -- where viewers may be sent

    def _public_bases(self) -> dict[str, str]:
        listening = [(item.name, item.address[1]) for item in self._server.listeners]
        found = [item for item in self._config.public if "://" in item]
        for host in self._config.public:
            if "://" not in host:
                found += [f"{scheme}://{join_host_port(host, port)}" for scheme, port in listening if scheme in SCHEMES]
        return bases_of(found)

    def _tell_of_edges(self, now: float) -> None:
        """Tell origins where viewers may be sent: here, and to edges of this one."""
        drains = self._server.drains_for_s is not None
        changed = drains is not self._drains or self._book.take_lost()
        if self._diffusion is None or (now < self._tell_at and not changed):
            return
        self._tell_at, self._drains = now + TELL_S, drains
        own = None
        if self._bases:
            own = EdgeReport(
                name=self._name,
                number=next(self._numbers),
                bases=self._bases,
                hls=self._server.config.hls_place is not None,
                connections=self._server.admission.connections,
                most=self._server.admission.most,
                drains=drains,
                made_at=now,
            )
        words = self._book.words_of_all(own)
        if words:
            self._diffusion.tell(*words)

    def _let_go(self, name: str, why: str) -> None:
        wanted = self._wanted.pop(name)
        if self._diffusion is not None:
            self._diffusion.subscribe(escape(name), wanted=False)
        if wanted.following is not None:
            wanted.following.stop()
        wanted.copy.close(why)
        if wanted.announced:
            _log.info("stream not wanted any more", stream=name, why=why)

    # -- figures

    def statistics(self) -> EdgeStatistics:
        """Any thread; figures may be a step apart."""
        copied = sorted(self._wanted.items(), key=itemgetter(0))
        return EdgeStatistics(
            address=self.offers or None,
            edges=0 if self._offering is None else self._offering.edges,
            sent_bytes=0 if self._offering is None else self._offering.sent_bytes,
            known_streams=sum(item.announced for _, item in copied),
            kept_bytes=self.pool.size_bytes,
            received_bytes=0 if self._diffusion is None else self._diffusion.statistics().bytes_received,
            followed={name: item.following.source for name, item in copied if item.is_followed and item.following},
            origins=[item.statistics() for item in self._upstreams],
            copies=[item.copy.statistics() for _, item in copied],
        )

    def figures(self) -> dict[str, Any]:
        """Return the same for operators, as JSON. Any thread."""
        return dataclasses.asdict(self.statistics())
