"""The hub: streams by name, who publishes and who views them, and the rules between publishers.

All methods may be called from any thread; the lock guards names and membership, never the media path. What the hub
has to tell a member it does through the member's own thread (`Member.on_thread`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

import structlog

from flowctl.connection import Connection
from flowctl.core.fanout.fanout import Fanout
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.sending.settings import AgeSource
from flowctl.core.text.addresses import address_key, address_of
from flowctl.errors import BusyError, LimitExceededError
from flowctl.live.config import LiveConfig, SecondPublisher
from flowctl.live.gate import AccessGate, Visits
from flowctl.live.namebook import ClaimVerdict, NameBook, NameRules, Owner
from flowctl.live.observer import Observer
from flowctl.live.oversight.oversight import Oversight
from flowctl.live.renditions.sets import RenditionSets
from flowctl.live.settings.levels import Role
from flowctl.live.strays import Strays
from flowctl.live.stream import Stream, StreamMember, StreamTap

_log: Final = structlog.get_logger("flowctl.live")
_NOBODY: Final = Owner("")
_SILENT_S: Final = 1.0
"""Silence after which a publisher counts as away when its owner asks for the name again: encoders send sound or picture
many times a second."""
_LEAST_TOLD_S: Final = 1.0
"""Shortest time between two ends of a stream that its viewers are told, and so between two beginnings: sooner, the name
is kept as within the grace time, and a publisher that is back goes on where it stopped."""
_TURN_S: Final = 0.5
"""Where names are decided elsewhere: time for the next publisher, here or there, before viewers are told of the end."""
MOST_STREAMS: Final = 10_000
"""Streams that are published or waited for at a time, far more than one process can serve. Names cost memory, and
players may wait for any number of them."""


class Viewer(StreamMember, Protocol):
    """A viewer as the hub sees it."""

    def stream_ended(self, stream: Stream) -> None:
        """The publisher has gone for good."""

    def stream_published(self, stream: Stream) -> None:
        """The stream is published (again)."""

    def renditions_changed(self, stream: Stream) -> None:
        """The stream has become, or is no longer, one of renditions, or others are there than before."""

    @property
    def connection(self) -> Connection:
        """Its connection."""


class Publisher(StreamMember, Protocol):
    """A publisher as the hub sees it."""

    def publish_replaced(self, stream: Stream) -> None:
        """Another publisher has taken the name."""


def line_fields(connection: Connection, stream: str) -> dict[str, Any]:
    return {"stream": stream, "peer": address_of(connection.peer), "connection": connection.number}


class Right(enum.Enum):
    """By what right a name is published."""

    ASKS = "asks"  #: the rules of this server say who has the name
    STANDS_BY = "stands by"  #: it was decided elsewhere that it waits for its turn
    GRANTED = "granted"  #: it was decided elsewhere, and the one that has the name here loses it
    FOLLOWS = "follows"  #: a copy from another server, which takes the name from no publisher of this one
    COMPOSES = "composes"  #: made of other streams; takes no name, and gives way to their owner or a proved right


_DECIDED: Final = {
    Right.ASKS: None,
    Right.STANDS_BY: ClaimVerdict.STANDS_BY,
    Right.GRANTED: ClaimVerdict.GRANTED,
    Right.FOLLOWS: ClaimVerdict.GRANTED,
    Right.COMPOSES: ClaimVerdict.GRANTED,
}


class Claim(Protocol):
    """A name that was asked for."""

    def cancel(self) -> None:
        """Give it back, or want it no more. Any thread."""


class NameAuthority(Protocol):
    """Decides which publisher has a name where several servers serve as one. Any thread."""

    def claim(self, name: str, number: int, owner: Owner, answer: Callable[[str | None], None]) -> Claim:
        """Ask for a name on behalf of connection `number`.

        `answer` is told the refusal, None for none, on any thread, at once or soon; not after `Claim.cancel`.
        """

    def right(self, name: str, number: int) -> Right:
        """Return by what right the connection, which was not refused, publishes now."""

    def entered(self, name: str, number: int) -> None:
        """The publication was entered: decisions made about it meanwhile can be carried out."""

    def left(self, name: str, number: int, *, grace: bool) -> None:
        """The publication has ended; `grace`: its connection broke, so that its owner may be back soon."""


class Hub:
    """Streams by name."""

    def __init__(
        self,
        config: LiveConfig,
        clock: Callable[[], float],
        call_later: Callable[..., Any],
        age_from: AgeSource = AgeSource.QUEUE,
    ) -> None:
        self.config = config  # the settings in force; replaced as a whole, see `LiveConfig.at` for those of a stream
        self._clock = clock
        self._call_later = call_later
        self._lock = OwnedLock()
        self._streams: dict[str, Stream] = {}  # guarded by _lock
        self._viewers: dict[StreamMember, Viewer] = {}  # guarded by _lock
        self._book: NameBook[Publisher] = NameBook(self._rules)  # guarded by _lock
        self._copies: set[Publisher] = set()  # publishers of other servers' streams; guarded by _lock
        # publishers of what is made of other streams, and whose these are; guarded by _lock
        self._composed: dict[Publisher, Owner] = {}
        # the set of which a stream may be a member, by publisher and name: what it was asked about; guarded by _lock
        self._faces: dict[tuple[StreamMember, str], str] = {}
        self._limits_hit: dict[str, int] = {}  # guarded by _lock
        self.gate: Final = AccessGate(lambda: self.config)  # decides who may connect, publish and play
        self.visits: Final = Visits(self.gate, clock, call_later)  # plays that are fetched file by file
        self.strays: Final = Strays(clock, call_later)  # connections of probes and scanners
        self.observers: tuple[Observer, ...] = ()  # replaced as a whole
        self.oversight: Final = Oversight(config, clock, call_later, self.streams, age_from)
        self.renditions: Final = RenditionSets(
            lambda: self.config,
            clock,
            self.streams,
            may_join=self._may_join,
            is_alone=self._is_alone,
            publish=self._compose,
            unpublish=lambda stream, publisher: self.unpublish(stream, publisher, grace=False),
            call_later=call_later,
            tell=self._tell_renditions,
        )
        # Set before the first connection, if at all:
        self.taker: StreamTap | None = None  # takes what is published
        self.names: NameAuthority | None = None  # decides who has a name, with other servers
        # Chooses the edge that a viewer is sent to, by its scheme, who it is where it fetches files, and its network.
        self.edge_for: Callable[[str, bytes | None, str], str | None] | None = None
        self.leaving = False  # another server takes the place of this one; assigned once
        self.demand: Callable[[str], None] | None = None  # told of the first and last viewer of a stream, on any thread
        # Told of streams that begin or end, or may have other settings or renditions than before, on any thread.
        self.published: tuple[Callable[[str], None], ...] = ()

    def _rules(self, name: str) -> NameRules:
        config = self.config.at(name, Role.PUBLISHER)
        return NameRules(config.second_publisher, config.return_grace_s, config.publishers_per_address)

    def configure(self, config: LiveConfig) -> None:
        """Take other settings, for streams that are there too; sessions are told by the server. Any thread."""
        self.config = config
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.configure(config.at(stream.name))
            self._tell_published(stream)
        self.oversight.configure(config)

    def _tell_published(self, stream: Stream) -> None:
        for told in self.published:
            told(stream.name)

    # -- publishers

    def publish(
        self,
        name: str,
        publisher: Publisher,
        owner: Owner | None = None,
        *,
        right: Right = Right.ASKS,
        face: str | None = None,
    ) -> Stream:
        """Enter `publisher` for the stream `name`; `face`: the only set of which that may be a member, "" for none.

        Who owned it and has fallen silent, or has lost its connection without our having noticed, is replaced by its
        owner's next publish at once; and while it may be back, nobody else gets the name.
        """
        now = self._clock()
        with self._lock:
            existing = self._streams.get(name)
            if existing is None:
                self._check_room_locked()
            holder = self._book.holder_of(name)
            if right is Right.FOLLOWS and not self._copies.issuperset(filter(None, [holder])):
                raise BusyError(f"stream {name} is being published here")
            if right is Right.COMPOSES and (holder is not None or self._book.is_kept_for_owner(name)):
                raise BusyError(f"stream {name} is published by itself")
            silent = existing is None or now - existing.media_at >= _SILENT_S
            owner = owner or Owner(address_key(publisher.peer[0]))
            whose = None if holder is None else self._composed.get(holder)
            verdict, rival = self._book.claim(
                name,
                publisher,
                _NOBODY if right is Right.COMPOSES else owner,  # its members count for the address
                silent=silent,
                decided=_DECIDED[right],
                # A copy gives way to a publisher of this server, as what is made of other streams does.
                yields=(whose is not None and (whose.is_same(owner) or self._proves(name)))
                or (holder in self._copies and (silent or self._proves(name))),
            )
            if right is Right.FOLLOWS:
                self._copies.add(publisher)
            elif right is Right.COMPOSES:
                self._composed[publisher] = owner
            if face is not None:
                self._faces[publisher, name] = face
            stream = self._stream_locked(name, now)
            if verdict is ClaimVerdict.STANDS_BY:
                stream.stand_by(publisher)
                return stream
            waiting = self._begin_locked(stream, publisher, now)
        self._tell_begun(stream, rival, waiting)
        return stream

    def _begin_locked(self, stream: Stream, publisher: Publisher, now: float) -> list[Viewer]:
        """Let `publisher`'s messages count from now on; return the viewers who were told that the stream had ended."""
        announce = stream.ended
        waiting = [self._viewers[item] for item in stream.viewers] if announce else []
        stream.ended = False
        stream.take_over(publisher, now, announce=announce, batched=publisher in self._copies)
        return waiting

    def _compose(self, name: str, publisher: Publisher, member: Stream) -> Stream:
        """Publish what is made of other streams here, unless names are decided elsewhere, where it would be unknown."""
        if self.names is not None:
            raise BusyError(f"stream {name} cannot be made here: its name is decided elsewhere")
        with self._lock:
            owner, first = self._owner_of_locked(member.name), member.publisher
        if owner is None:  # else the name would be nobody's, and refused to the owner of the members too
            raise BusyError(f"stream {member.name} has gone meanwhile")
        stream = self.publish(name, publisher, owner, right=Right.COMPOSES)
        if isinstance(connection := getattr(first, "connection", None), Connection):  # else it is a copy
            for observer in self.observers:
                observer.set_published(connection, name)
        return stream

    def _proves(self, name: str) -> bool:
        """Return whether who publishes under a name has proved the right to that very name, as no stranger can."""
        hooks = self.gate.hooks
        closed = not self.config.at(name, Role.PUBLISHER).access.open_to_all("publish")
        return closed or (hooks is not None and bool(hooks.decides["publish"]))

    def _owner_of_locked(self, member: str) -> Owner | None:
        """Return whose a stream is; what a command of ours makes of another one is of that one's owner."""
        self._lock.assert_owned()
        return self._book.owner_of(self.config.made_from(member) or member)

    def _may_join(self, publisher: Publisher, member: str) -> bool:
        """Return whether a stream has the owner of what is made of others, or of a name that anybody may take."""
        with self._lock:
            whose, owner = self._composed.get(publisher), self._owner_of_locked(member)
            anybodys = self._rules(member).policy is SecondPublisher.REPLACE
            return anybodys or (whose is not None and owner is not None and whose.is_same(owner))

    def _is_alone(self, stream: Stream) -> bool:
        publisher = stream.publisher
        with self._lock:
            face = None if publisher is None else self._faces.get((publisher, stream.name))
        return face is not None and face != self.renditions.face_of(stream.name)

    def _tell_begun(self, stream: Stream, rival: Publisher | None, waiting: Iterable[Viewer]) -> None:
        self.renditions.look(stream)
        self._tell_published(stream)
        if rival is not None:
            rival.on_thread(rival.publish_replaced, stream)
        for viewer in waiting:
            viewer.on_thread(viewer.stream_published, stream)

    def promote(self, name: str, number: int) -> None:
        now = self._clock()
        with self._lock:
            entry, stream = self._book.entries.get(name), self._streams.get(name)
            publishers = [] if entry is None else [item for item in entry.standby if item.number == number]
            if stream is None or not publishers:
                return
            rival = self._book.promote(name, publishers[0])
            waiting = self._begin_locked(stream, publishers[0], now)
        self._tell_begun(stream, rival, waiting)

    def revoke(self, name: str, number: int) -> None:
        """Tell a publisher that another one has taken its name. Harmless if there is none."""
        with self._lock:
            entry, stream = self._book.entries.get(name), self._streams.get(name)
            publishers = () if entry is None else (entry.holder, *entry.standby)
        for publisher in publishers:
            if publisher is not None and publisher.number == number and stream is not None:
                publisher.on_thread(publisher.publish_replaced, stream)

    def silent(self, name: str) -> bool:
        with self._lock:
            stream = self._streams.get(name)
            if stream is None or stream.publisher is None:
                return True
            return self._clock() - stream.media_at >= _SILENT_S

    def restart(self, stream: Stream, publisher: Publisher) -> None:
        """Let the timeline of the publisher that counts begin anew; that of the viewers goes on. Harmless for another.

        The headers that it sent before are forgotten.
        """
        with self._lock:
            if stream.publisher is publisher:
                stream.take_over(publisher, self._clock(), batched=publisher in self._copies)
        self.renditions.look(stream)

    def unpublish(self, stream: Stream, publisher: Publisher, *, grace: bool) -> None:
        """Take `publisher` out; a standby takes over, or the viewers are told, after the grace time or at once.

        Where another server takes the place of this one, a publisher that ends in order may be on its way there.
        """
        now = self._clock()
        grace = grace or self.leaving
        waiting: list[Viewer] = []
        with self._lock:
            copy = publisher in self._copies or publisher in self._composed
            self._copies.discard(publisher)
            self._composed.pop(publisher, None)
            self._faces.pop((publisher, stream.name), None)
            stream.stand_down(publisher)
            least_s = self._wait_before_end_locked(stream, now)
            freed = self._book.release(
                stream.name, publisher, now, grace=grace, least_s=least_s, turns=self.names is None
            )
            if freed is not None and freed.following is not None:
                waiting = self._begin_locked(stream, freed.following, now)
            elif freed is not None:
                stream.take_over(None, now)
                if not (stream.viewers or stream.links):
                    stream.drop_caches()  # nobody is spared a break, so all that is kept is the name
            takeovers = stream.takeovers
        if self.names is not None and not copy:
            self.names.left(stream.name, publisher.number, grace=grace)
        if self.demand is not None and not copy:
            self.demand(stream.name)  # it may be published elsewhere now
        self._tell_begun(stream, None, waiting)
        if freed is not None and freed.kept_s > 0:
            self._call_later(freed.kept_s, self._end, stream, takeovers)
        elif freed is not None and freed.following is None:
            self._end(stream, takeovers)

    def _wait_before_end_locked(self, stream: Stream, now: float) -> float:
        """Return for how long the end of a stream is not told yet in any case, in seconds; 0: it is told at once."""
        self._lock.assert_owned()
        if not (stream.viewers or stream.links):
            return 0.0
        # Each end and each beginning is told to all viewers, and a publisher may come and go many times a second.
        told_s = stream.ended_at + _LEAST_TOLD_S - now
        return max(0.0, told_s, 0.0 if self.names is None else _TURN_S)

    def _end(self, stream: Stream, takeovers: int) -> None:
        """Tell the viewers that the publisher has gone, unless one is there again, or was and has a time of its own."""
        with self._lock:
            if stream.publisher is not None or stream.ended or stream.takeovers != takeovers:
                return
            self._book.free_name(stream.name)
            stream.ended, stream.ended_at = True, self._clock()
            stream.end(stream.ended_at)
            viewers = [self._viewers[item] for item in stream.viewers]
            self._forget_if_idle_locked(stream)
        self.renditions.look(stream)
        self._tell_published(stream)
        for viewer in viewers:
            viewer.on_thread(viewer.stream_ended, stream)

    # -- viewers

    def _tell_renditions(self, stream: Stream) -> None:
        with self._lock:
            viewers = [self._viewers[item] for item in stream.viewers]
        for viewer in viewers:
            viewer.on_thread(viewer.renditions_changed, stream)
        self._tell_published(stream)

    def view(self, name: str, viewer: Viewer) -> Stream:
        """Enter `viewer` for the stream `name`, which it may have to wait for (see `Stream.ended`)."""
        with self._lock:
            stream = self._stream_locked(name, self._clock())
            first = not stream.viewers
            stream.viewers[viewer] = None
            self._viewers[viewer] = viewer
        if first and self.demand is not None:
            self.demand(name)
        return stream

    def leave(self, stream: Stream, viewer: Viewer) -> None:
        with self._lock:
            if viewer in stream.viewers:
                del stream.viewers[viewer]
                del self._viewers[viewer]
            last = not stream.viewers
            self._forget_if_idle_locked(stream)
        if last and self.demand is not None:
            self.demand(stream.name)

    def is_viewed(self, name: str) -> bool:
        """Return whether somebody views the stream, or waits for it; other servers that follow it do not count."""
        with self._lock:
            stream = self._streams.get(name)
            return stream is not None and bool(stream.viewers)

    def renditions_viewed(self, name: str) -> set[str]:
        """Return in which renditions of a stream its viewers are."""
        with self._lock:
            stream = self._streams.get(name)
            viewers = [] if stream is None else [self._viewers[item] for item in stream.viewers]
        books = (viewer.connection.renditions for viewer in viewers)
        return {book.name for book in books if book is not None}

    def link(self, name: str, link: object) -> Stream:
        with self._lock:
            stream = self._stream_locked(name, self._clock())
            stream.links.add(link)
            return stream

    def unlink(self, stream: Stream, link: object) -> None:
        with self._lock:
            stream.links.discard(link)
            self._forget_if_idle_locked(stream)

    def is_published(self, name: str) -> bool:
        with self._lock:
            stream = self._streams.get(name)
            return stream is not None and not stream.ended

    def note_unwritten(self, name: str, why: Mapping[str, str]) -> None:
        """Note what of a stream is to be recorded, or written as HLS, and is not: by kind, with the reason."""
        with self._lock:
            stream = self._streams.get(name)
            publisher = None if stream is None else stream.publisher
            if stream is None:
                return
            before, stream.unwritten = stream.unwritten, why
        hooks = self.gate.hooks
        if hooks is not None and publisher is not None:
            for kind in sorted(before.keys() ^ why.keys()):
                hooks.note_unwritten(publisher.number, name, kind, why.get(kind, ""))

    def has_publisher(self, name: str) -> bool:
        """Return whether a publisher of this server's own has the name; a copy of another server's stream has none."""
        with self._lock:
            holder = self._book.holder_of(name)
            return holder is not None and holder not in self._copies

    def publisher_of(self, name: str) -> tuple[str, int] | None:
        """Return the publisher's address and port, for the log. None: the stream has none."""
        with self._lock:
            stream = self._streams.get(name)
            publisher = None if stream is None else stream.publisher
            return None if publisher is None else publisher.peer

    # -- books

    def _stream_locked(self, name: str, now: float) -> Stream:
        stream = self._streams.get(name)
        if stream is None:
            self._check_room_locked()
            tap = None if self.gate.hooks is None else self.gate.hooks.tap
            config, on_tracks = self.config.at(name), self.renditions.of_tracks
            stream = self._streams[name] = Stream(name, config, now, tap, self.taker, on_tracks=on_tracks)
        return stream

    def _check_room_locked(self) -> None:
        if len(self._streams) >= MOST_STREAMS:
            raise LimitExceededError("streams", len(self._streams) + 1, MOST_STREAMS)

    def _forget_if_idle_locked(self, stream: Stream) -> None:
        idle = stream.publisher is None and stream.ended
        idle = idle and not (stream.viewers or stream.links or stream.standby)
        if idle and self._streams.get(stream.name) is stream:
            del self._streams[stream.name]

    def add_observer(self, observer: Observer) -> None:
        """Tell `observer` too from now on; of connections that are open it may hear anything first."""
        with self._lock:
            self.observers = (*self.observers, observer)

    def limit_hit(self, limit: str) -> None:
        """Count a limit that has ended a connection, refused a request or slowed input down."""
        with self._lock:
            self._limits_hit[limit] = self._limits_hit.get(limit, 0) + 1

    def refused(self, what: str, connection: Connection, stream: str, error: LimitExceededError) -> None:
        """Count, log and tell the observers of a request refused because of a limit. The connection's thread."""
        self.limit_hit(error.limit)
        _log.warning(
            what, **line_fields(connection, stream), limit=error.limit, value=error.value, maximum=error.maximum
        )
        for observer in self.observers:
            observer.limit_hit(connection, error.limit, error.value, error.maximum, connection.now())

    @property
    def limits_hit(self) -> dict[str, int]:
        """How often limits have ended connections, refused requests or slowed input down, by name. Any thread."""
        with self._lock:
            return dict(self._limits_hit)

    def find_stream(self, name: str) -> Stream | None:
        with self._lock:
            return self._streams.get(name)

    def streams(self) -> dict[Stream, int]:
        with self._lock:
            return {stream: len(stream.viewers) for stream in self._streams.values()}

    def viewing(self) -> list[tuple[str, Viewer]]:
        with self._lock:
            return [(name, self._viewers[item]) for name, stream in self._streams.items() for item in stream.viewers]

    def fanouts(self) -> Iterator[Fanout]:
        for stream in self.streams():
            for wire in stream.wires:
                if not wire.for_links:
                    yield from wire.fanouts.active
