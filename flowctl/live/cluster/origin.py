"""An origin: cuts the streams of a live server into segments, keeps the last ones, and offers them to edges.

How it works. The hub hands each message that it passes on to `Origin.message`, on the publisher's thread and under the
stream's lock: there it is put into the open segment of its stream, which is an append. A segment that is complete is
written, hashed and kept on the thread of the origin, which serves the edges by object diffusion as well. So one that
asks for much slows down other edges, and no viewer.

What an edge may have is what a player with its proof may play (`EdgeGuard`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, Final

import structlog

from flowctl.core.flow.limits import NO_LIMITS
from flowctl.core.flow.state import MessageClass
from flowctl.core.outcomes.bucket import TokenBucket
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.listener import shown
from flowctl.core.server.server import Server
from flowctl.core.text.addresses import join_host_port
from flowctl.errors import (
    ClosedError,
    ConfigError,
    FlowctlError,
    LimitExceededError,
    LocalProtocolError,
    RemoteProtocolError,
)
from flowctl.live.access.request import LiveRequest
from flowctl.live.access.rules import KEY_PARAMETERS
from flowctl.live.cluster.redirect import EdgeBook
from flowctl.live.cluster.segments.cutter import CutSegment, Cutter, timeline_at
from flowctl.live.cluster.segments.segment import ID_BYTES, OBJECT_BYTES
from flowctl.live.cluster.segments.window import SegmentPool, WindowLimits
from flowctl.live.publishing import HubSink
from flowctl.live.server import LiveServer, RefusalLog
from flowctl.live.strays import SILENT
from flowctl.live.stream import StreamMember
from flowctl.nodes.diffusion.diffusion import ObjectDiffusion
from flowctl.nodes.diffusion.policy import Policy
from flowctl.nodes.diffusion.streams.tcp import StreamSession
from flowctl.pollgroup import PollGroup
from flowctl.wire.rtmp.url import Query, RtmpUrl, parse_query

_log: Final = structlog.get_logger("flowctl.cluster")
POLICY: Final = Policy(
    max_num_objects_outstanding=2000,
    max_num_ids_req=1000,
    max_num_objects_inflight_per_peer=256,
    target_object_redundancy=1,
    max_object_id_bytes=ID_BYTES,
    max_object_size_bytes=OBJECT_BYTES,
)
"""Limits of all nodes: what one side announces the other has to accept. Windows are by what a round trip of 0.3 s
brings of a thousand streams, whose ids take 100 octets each. How many segments a peer is asked for at a time is decided
by its channels (`live.cluster.edge.gate`), which grow with what it answers in a round trip: a slow one has few, and
segments come from others."""
TLS: Final = "tls://"
_REFUSED_HINT: Final = (
    "limits per address (--per-address, --new-per-address) are for edges too, unless one has proven that it is one"
)
_KEY_HINT: Final = (
    "make a key: flowctl key make FILE --for edge; its edge gives it behind the origin: ?key= and the key"
)
_PENDING_BYTES: Final = 64 << 20
"""Octets of complete segments that may wait for the origin's thread: more means that it does not run."""
_SMALL_BYTES: Final = 131_072
_SMALL_PER_S: Final = 10.0
_SMALL_AT_ONCE: Final = 100
"""Segments of less than `_SMALL_BYTES` that are kept of one stream at once. Each costs every edge work, be it wanted or
not, and streams are cut by the publisher's clock: one that leaps would fill the announcements of all streams. Encoders
make two a second; ten minutes that are sent at ten times their speed are no leap."""
_MOST_TIMELINES: Final = 10_000
"""Streams whose last timeline is remembered."""
_FAREWELL_S: Final = 0.2
_END_WAIT_S: Final = 2.0
"""Time for which the end of a node is waited for: nothing that is under way is worth more."""
_KNOWN_AFTER_S: Final = 0.5
"""Time after which who has connected is told of: whose key is wrong is refused by then."""
_PROOF: Final = "proof"
"""Code of the error that a proof is none."""
_STALLED_EDGE_S: Final = 10.0
"""Time after which an edge whose connection takes nothing is cut."""


def segment_server(server: LiveServer, address: str, serve: Callable[[StreamSession], None]) -> Server:
    """Return what listens for nodes that fetch segments, on one thread, which the node that offers them lives on."""
    host, colon, port = address.removeprefix(TLS).rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65_536):
        raise ConfigError(
            f"{address.removeprefix(TLS)!r:.100} is no address of an origin",
            hint="write host:port, for example 10.0.0.5:1936",
        )
    handed = server.config.listen_fds.get("origin", (None,))
    tls = server.certificate if address.startswith(TLS) else None
    if tls is None and address.startswith(TLS):
        raise ConfigError("origin: TLS needs a certificate", hint="name its files: tls_certificate and tls_key")
    return Server(
        lambda: StreamSession(serve),
        host.removeprefix("[").removesuffix("]"),
        int(port),
        limits=NO_LIMITS,
        settings=SenderSettings(stuck_s=_STALLED_EDGE_S),
        group_count=1,
        on_error=server.hub.oversight.report,
        rebalance=False,
        admission=server.config.admission,
        on_refused=RefusalLog("edge refused", server.clock, hint=_REFUSED_HINT).tell,
        listen_fd=handed[0],
        name="origin",
        tls=tls,
        nodes=server.nodes,
    )


def finish(work: Coroutine[Any, Any, None], group: PollGroup, deadline_s: float) -> None:
    """Run the end of something on a group's thread, and wait for it for a while; the group may have ended already."""
    try:
        future = asyncio.run_coroutine_threadsafe(work, group.loop)
    except (ClosedError, LocalProtocolError, RuntimeError):
        work.close()
        return
    with contextlib.suppress(TimeoutError, CancelledError, FlowctlError):
        future.result(min(max(deadline_s, _FAREWELL_S), _END_WAIT_S))


class EdgeGuard:
    """A `ServerChecks` of diffusion for one edge; on the thread of the origin.

    An edge says its proof when it connects, in the words of an address: ``key=...``, or another that players bring. Of
    the streams that a player with that proof may not play it is told nothing. One with a key, or a web token, that is
    made for edges (``edge``) may have the streams that it is for, and is one of us: while it is connected its address
    is neither punished nor held to limits per address, though it plays many streams there. HTTP hooks and those of the
    application are not asked: they are asked about viewers, at each node.
    """

    def __init__(self, server: LiveServer, peer: tuple[str, int], number: int, book: EdgeBook) -> None:
        self._server = server
        self._peer = peer
        self._number = number
        self._book = book
        self._raw = ""
        self._query = Query()
        self._refused = False  # which was told
        self._ignored = False  # likewise, of what it tells of itself
        self._trusted = False

    def prove(self, proof: bytes) -> None:
        try:
            self._raw = proof.decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError("the proof of an edge is no text", code=_PROOF) from error
        self._query = parse_query(self._raw)
        keys, tried = self._server.config.access.keys, [self._query.get(name, "") for name in KEY_PARAMETERS]
        if any(tried):
            uses = set() if keys is None else keys.uses(tried)
            if not uses:
                raise RemoteProtocolError("the key of an edge is none that this server has", code=_PROOF)
            if "edge" in uses:
                self._trust()

    def tell(self, words: bytes) -> None:
        """Enter what an edge tells of itself: viewers may be sent there, so it has to be one of us."""
        if self._trusted:
            self._book.take_report(words, self._number)
        elif not self._ignored:
            self._ignored = True
            _log.warning(
                "edge is named to no viewer", peer=self._peer[0], why="it has no key for edges", hint=_KEY_HINT
            )

    def allows(self, topic: str) -> bool:
        app, _, stream = topic.rpartition("/")
        request = LiveRequest(
            kind="play",
            connection=self._number,
            peer=self._peer,
            url=RtmpUrl(app=app, stream=stream, raw_query=self._raw, query=self._query),
            protocol="segments",
        )
        gate = self._server.hub.gate
        access = gate.access(request)
        if access.is_edge(request):
            self._trust()
            return access.check_network(request) is None
        refusal = gate.check(request)
        if refusal is not None and not self._refused:
            self._refused = True
            _log.warning(
                "edge may not have a stream", peer=self._peer[0], stream=topic, why=str(refusal), hint=_KEY_HINT
            )
        return refusal is None

    def _trust(self) -> None:
        if not self._trusted:
            self._trusted = True
            self._server.nodes.enter(self._peer[0])

    def left(self) -> None:
        self._book.forget_connection(self._number)
        if self._trusted:
            self._server.nodes.leave(self._peer[0])


class Offering:
    """Serves the segments of a pool by diffusion; on the thread of its loop."""

    def __init__(self, diffusion: ObjectDiffusion, server: LiveServer, book: EdgeBook) -> None:
        self._diffusion = diffusion
        self._book = book
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def edges(self) -> int:
        return len(self._tasks)

    @property
    def sent_bytes(self) -> int:
        """Octets that edges were sent so far."""
        return self._diffusion.served_bytes

    def serve(self, session: StreamSession) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(session))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await self._diffusion.close(_FAREWELL_S)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, session: StreamSession) -> None:
        peer = join_host_port(*session.connection.peer)
        why, code = "it has finished", ""
        telling = asyncio.get_running_loop().call_later(_KNOWN_AFTER_S, self._tell_connected, session, peer)
        guard = EdgeGuard(self._server, session.connection.peer, session.connection.number, self._book)
        try:
            await self._diffusion.serve(session, guard)
        except (FlowctlError, OSError) as error:
            why, code = str(error), getattr(error, "code", "")
        finally:
            was_told = asyncio.get_running_loop().time() >= telling.when() and session.connection.receiver.bytes_in
            telling.cancel()
            guard.left()
        kind = (why if code else "it was gone at once") if session.connection.receiver.bytes_in else SILENT
        if was_told or self._server.hub.strays.is_first(session.connection.peer[0], "segments", kind):
            if code == _PROOF:  # it comes again and again
                _log.warning("edge refused", peer=peer, why=why, hint=_KEY_HINT)
            else:
                _log.info("edge gone", peer=peer, why=why)

    def _tell_connected(self, session: StreamSession, peer: str) -> None:
        if session.connection.receiver.bytes_in:  # no probe
            _log.info("edge connected", peer=peer)


class Origin:
    """The origin of one live server; a companion and the taker of its hub."""

    def __init__(
        self,
        server: LiveServer,
        address: str,
        *,
        window: WindowLimits | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._wall_clock = wall_clock
        self._window: Final = window or WindowLimits()
        self._server = server
        self._listener = segment_server(server, address, self._serve)
        self._group: Final = self._listener.groups.groups[0]
        self._offering: Offering | None = None
        self._cutting: Final = Cutting(self._hand_over, wall_clock)
        self.pool: Final = SegmentPool(self._window, server.clock)  #: what is kept
        self.book: Final = EdgeBook(server.clock)  #: edges that viewers may be sent to
        server.hub.edge_for = self.book.choose
        self._pending_bytes = 0
        self._sweeps = False  # a look for what is too old is due
        self.lost = 0  #: segments that were not kept because the origin's thread did not run
        self.title: Final = "origin"
        self.bound: list[str] = []
        server.hub.taker = self._cutting

    @property
    def offers(self) -> str:
        return shown(*self._listener.address)

    @property
    def sockets(self) -> list[tuple[str, socket.socket]]:
        return [(item.name, item.sock) for item in self._listener.listeners]

    def start(self) -> None:
        self._listener.start()
        _log.info("origin started", address=self.offers)

    def stop(self, deadline_s: float) -> None:
        if self._offering is not None:
            finish(self._offering.close(), self._group, deadline_s)
        self._listener.stop(deadline_s)

    def figures(self) -> dict[str, Any]:
        """Return figures for operators. Any thread; they may be a step apart."""
        return {
            "address": self.offers,
            "edges": 0 if self._offering is None else self._offering.edges,
            "sent_bytes": 0 if self._offering is None else self._offering.sent_bytes,
            "segments": len(self.pool),
            "kept_bytes": self.pool.size_bytes,
            "lost": self.lost,
            "refused": self._cutting.refused,
            "redirects": self.book.figures(),
        }

    def _serve(self, session: StreamSession) -> None:
        if self._offering is None:
            self._offering = Offering(ObjectDiffusion(self.pool, policy=POLICY), self._server, self.book)
        self._offering.serve(session)

    def _hand_over(self, cut: CutSegment) -> None:
        """Have a segment kept by our thread. Any thread; the stream's lock is held."""
        size = sum(len(frame.payload) for frame in cut.frames)
        if self._pending_bytes + size > _PENDING_BYTES:
            self.lost += 1
            return
        self._pending_bytes += size
        with contextlib.suppress(ClosedError, LocalProtocolError):  # it has stopped, or not begun
            self._group.call_soon(self._keep, cut, size)

    def _keep(self, cut: CutSegment, size: int) -> None:
        self._pending_bytes -= size
        keep(self.pool, cut)
        if not self._sweeps:
            self._sweeps = True
            self._group.call_later(self._window.stream_s / 4, self._sweep)

    def _sweep(self) -> None:
        """Remove segments that are too old, also after the last publication: what is over is offered to no edge."""
        self.pool.expire()
        self._sweeps = len(self.pool) > 0
        if self._sweeps:
            self._group.call_later(self._window.stream_s / 4, self._sweep)


def keep(pool: SegmentPool, cut: CutSegment) -> None:
    try:
        pool.put(*cut.write())
    except (LimitExceededError, LocalProtocolError) as error:
        _log.warning("segment not kept", stream=cut.stream, why=str(error), hint=error.hint)


class Cutting:
    """Cuts what is published at a live server; attached to its hub. Copies of other servers' streams are left out."""

    def __init__(
        self,
        hand_over: Callable[[CutSegment], None],
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hand_over = hand_over
        self._wall_clock = wall_clock
        self._clock = clock
        # By stream. Calls for one stream come one after the other, and each touches its own entry only.
        self._publications: dict[str, _Publication] = {}
        self._timelines: OrderedDict[str, int] = OrderedDict()
        self.refused = 0  #: messages that were too large for a segment, and segments that came too fast

    def took_over(self, name: str, publisher: StreamMember | None) -> None:
        ended = self._publications.pop(name, None)
        if ended is not None:
            self._complete(ended, ended.cutter.close())
            if ended.cutter.timeline:
                self._timelines[name] = ended.cutter.timeline
                if len(self._timelines) > _MOST_TIMELINES:
                    self._timelines.popitem(last=False)
        if publisher is not None and not isinstance(publisher, HubSink):
            pace = TokenBucket(_SMALL_AT_ONCE, self._clock())
            self._publications[name] = _Publication(Cutter(name, 0), self._timelines.get(name), pace)

    def message(self, name: str, message_class: MessageClass, type_id: int, timestamp: int, payload: bytes) -> None:
        publication = self._publications.get(name)
        if publication is None:
            return
        cutter = publication.cutter
        if not cutter.timeline and message_class is not MessageClass.HEADER:
            cutter.timeline = timeline_at(self._wall_clock(), timestamp, publication.before)
        refused = cutter.refused
        done = cutter.add(type_id, timestamp, payload, message_class)
        if done:
            self._complete(publication, done)
        if cutter.refused > refused:
            self.refused += 1
            if not refused:
                _log.warning("message too large for a segment", stream=name, size_bytes=len(payload))

    def _complete(self, publication: _Publication, cuts: list[CutSegment]) -> None:
        for cut in cuts:
            small = sum(len(frame.payload) for frame in cut.frames) < _SMALL_BYTES
            if not small or publication.pace.take_tokens(_SMALL_PER_S, _SMALL_AT_ONCE, self._clock()):
                self._hand_over(cut)
                continue
            self.refused += 1
            if not publication.leaps:
                publication.leaps = True
                hint = "its clock leaps, or it is sent much faster than it plays: viewers at edges miss parts of it"
                _log.warning("segments come too fast", stream=cut.stream, most_per_s=_SMALL_PER_S, hint=hint)


@dataclass(slots=True)
class _Publication:
    """A publication that is being cut."""

    cutter: Cutter
    before: int | None
    pace: TokenBucket
    leaps: bool = False  #: they came too fast, which was told
