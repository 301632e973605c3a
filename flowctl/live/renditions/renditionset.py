"""A set of renditions of one content: its members, the logs made of them, and the places of viewers in it.

How it works. Viewers ask for the *face*, a stream of the hub such as `live/show`. Its *members* are tracks of one
publication, or streams such as `live/show_720`. For each there is a `Stream` of its own, not in the hub's books: the
rendition. It has the pictures of its member, and the sound of the set, which is that of one member (`CommonSound`).
So each rendition has its logs, one per wire format, and the logs of one format and one codec are a `StreamSet`, in
which each viewer is led from one to another. A member joins with its first key frame, and leaves when its publisher
goes; while it is the last one it stays. One that has left gets no more sound, so that its viewers go on in another from
the moment at which they were.

The face of streams has no publisher of its own: the set publishes there what its largest member shows (`Lead`), for
those who know nothing of renditions. That of tracks is the publication itself, as it comes.

Threads: what members pass on comes on the threads of their publishers, under the locks of their streams; the set's lock
makes it one order, and only under it is anything appended to a rendition. Renditions and the face of streams are
members of nothing, so their locks come behind.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import structlog

from flowctl.connection import Connection
from flowctl.core.fanout.following import FollowPlace
from flowctl.core.flow.state import VIDEO_CLASSES, MessageClass
from flowctl.core.loop.locks import OwnedLock
from flowctl.errors import LimitExceededError, LocalProtocolError
from flowctl.live.config import LiveConfig
from flowctl.live.renditions.clocks import MemberClock, SetClock
from flowctl.live.renditions.lead import Lead
from flowctl.live.renditions.sound import CommonSound, Sound
from flowctl.live.settings.renditions import MOST_RENDITIONS
from flowctl.live.stream import CLOCKED, GIVEN_WIRES, Stream
from flowctl.streamset import StreamSet
from flowctl.wire.rtmp.media.composition import with_composition
from flowctl.wire.rtmp.media.media import MediaInfo
from flowctl.wire.rtmp.media.parameters import with_parameter_sets
from flowctl.wire.rtmp.media.size import read_size
from flowctl.wire.rtmp.wire import CLOCK_MASK, TYPE_AUDIO, TYPE_VIDEO
from flowctl.wire.streams.wirelog import HEADER_BYTES, KeptHeaders, RtmpChunks, WireFormat, WireLog

_log: Final = structlog.get_logger("flowctl.live")
_STALE_S: Final = 10.0
"""Time without a picture after which the place of a track is another one's, where there are too many."""
_LEAST_JOINED_S: Final = 1.0
"""Shortest time between two joins of a member: each is told to all viewers."""
_LEAST_MOVED_S: Final = 1.0
"""Shortest time between two lines on the clock of a member: publishers may have it jump with each message."""
_ALONE_S: Final = 2.0
"""Time with sound and without a picture after which a set is one of sound alone: its viewers follow the face."""
_GATHER_S: Final = 0.5
"""How long viewers that wait for a set wait for its smallest member once another is there: the outputs of one encoder
begin within that, in any order, and a slow line would have the largest for a group or two."""
_MEASURE_S: Final = 2.0
"""The same where it is published: its clock is being measured, up to a key frame."""
_SPARE_S: Final = 0.05
"""Time behind that at which they look again: timers may be a little early."""
_ENHANCED: Final = b"\x80"  # or more, in the first octet
SOURCE: Final = "source"
"""Name of a publication itself in the set that it makes with the steps of a ladder."""
_KEYS: Final = 32
"""Key frames of a publication that are remembered, by which a step of a ladder is put beside it."""
_LOOKS_PER_CACHE: Final = 16
"""Looks at what all GOP caches hold while as much comes as one may have."""


@dataclass(eq=False, slots=True)
class Rendition:
    """A member of a set, and the stream that is made of it."""

    name: str
    rank: int  # 0: the largest of them, as far as names say it
    stream: Stream
    picture_at: float
    clock: MemberClock | None  # None: it is a track, whose publication has one clock
    moves: int = 0  # of the clock, that were logged, and when they were last
    moved_at: float = float("-inf")
    takeovers: int = 0  # changes of its stream's publisher, as far as its clock knows
    codec: str = ""  # of its pictures; empty: none has come
    enhanced: bool = False  # its pictures are those of Enhanced RTMP, or of H.264, which all read
    joined: bool = False  # viewers may be in it
    joins_at: float = float("-inf")  # when it may join again
    forgotten: bool = False  # it is of no set any more
    expected: float = 0.0  # bytes per second that it is to take; 0: not known
    behind_ms: int = 0  # of a step: by so much its timestamps are behind those of the same pictures
    size: tuple[int, int] | None = None  # width and height; None: not known
    sequence_header: bytes = b""  # of its pictures, as it came last
    # what its member needs at the start, for the face
    headers: KeptHeaders[tuple[int, bytes, MediaInfo]] = field(default_factory=KeptHeaders)


class RenditionFacts(NamedTuple):
    """What is told of a rendition."""

    name: str
    codec: str  # of its pictures, as FourCC; empty: none has come
    size: tuple[int, int] | None  # width and height; None: not known
    bytes_per_s: float  # on the wire, sound included; 0: not known
    joined: bool  # viewers may be in it
    clock: str  # how its times are made those of the set; empty: as they are, being a track
    key: str  # see `Stream.rendition_key`


@dataclass(eq=False, slots=True)
class _Format:
    """The set in one wire format."""

    wire_format: WireFormat
    viewers: int = 0
    wires: dict[Rendition, WireLog] = field(default_factory=dict)
    by_codecs: dict[frozenset[str], StreamSet] = field(default_factory=dict)  # of one codec, or of those a player takes


@dataclass(eq=False, slots=True)
class Seat:
    """A viewer's place in a set; to be given up with `leave`."""

    renditions: RenditionSet
    place: FollowPlace
    form: _Format
    rendition: Rendition | None  # the one that was asked for. None: whichever fits.
    codecs: frozenset[str]

    @property
    def ended(self) -> bool:
        """Whether nothing will come here any more. Any thread."""
        return not self.renditions.serves(self)

    @property
    def published(self) -> bool:
        """What the logs here last told their players. Any thread."""
        return not self.renditions.told_end

    def leave(self) -> None:
        """Stop following. The connection's thread."""
        self.place.end()
        self.renditions.leave(self)


class RenditionSet:
    """The set behind one name.

    Args:
        name: of the face.
        config: gives that of the face.
        changed: told, on any thread and under locks, that viewers may have to find a place anew, and how many seconds
            later; must not call back.
        smallest: rank of the smallest member that there may be. None: not known.
        of_tracks: whether it is made of the tracks of a publication, which is the face itself.
        ladder: whether it is that publication and steps that are made of it here.
    """

    def __init__(
        self,
        name: str,
        config: Callable[[], LiveConfig],
        changed: Callable[[RenditionSet, float], None],
        *,
        smallest: int | None = None,
        of_tracks: bool,
        ladder: bool = False,
    ) -> None:
        self.name: Final = name
        self.of_tracks: Final = of_tracks
        self.ladder: Final = ladder
        # When each key frame of the publication is shown and is to be decoded, of a ladder; guarded by _lock
        self._shown: deque[tuple[int, int]] = deque(maxlen=_KEYS)
        self.peer: tuple[str, int] = ("renditions", 0)  # it is a publisher
        self.number: Final = 0
        self.on_replaced: Callable[[], None] | None = None
        self.face: Stream | None = None  # that it publishes, or whose tracks it has; set once, before members
        self.untold = False  # whether viewers have still to be told of the last change, and when they were last
        self.told_at = float("-inf")
        self._changed: Final = changed
        self._smallest: Final = smallest
        self._began_at: float | None = None  # when the first one joined; guarded by _lock
        self._lock = OwnedLock()
        self._config: Final = config
        self._ended = False  # guarded by _lock
        self._renditions: list[Rendition] = []  # largest first; guarded by _lock
        self._gone: deque[Rendition] = deque()  # forgotten last: who is still there hears of the end; guarded by _lock
        self._formats: dict[str, _Format] = {}  # guarded by _lock
        self._clocks = SetClock()  # guarded by _lock
        self._sound = CommonSound()  # guarded by _lock
        self._lead = Lead()  # guarded by _lock
        # Added to the times of the set, so that those of the face go on. None: the first frame will show it; guarded by
        # _lock
        self._shift: int | None = None
        self._first_sound_at: float | None = None  # since a rendition left last; guarded by _lock
        self._sound_alone = False  # whether there is sound and no picture; guarded by _lock
        self._unlooked_bytes = 0  # came since the last look at the caches; guarded by _lock
        self._told_full = False  # guarded by _lock

    # -- a publisher of the face

    def on_thread(self, callback: Callable[..., Any], *args: Any) -> None:
        callback(*args)

    def publish_replaced(self, stream: Stream) -> None:
        """Somebody publishes under the name itself."""
        del stream
        if self.on_replaced is not None:
            self.on_replaced()

    def show(self, face: Stream) -> None:
        """Be the set of `face` from now on."""
        with self._lock:
            self.face = face
            self._note_renditions_locked()

    # -- members

    def add(self, name: str, rank: int, now: float, *, expected: float = 0.0) -> Rendition | None:
        """Enter a member; `expected`: bytes per second of a step. None: there are too many."""
        with self._lock:
            if len(self._renditions) >= MOST_RENDITIONS and not self._drop_stale_locked(now):
                if not self._told_full:
                    self._told_full = True
                    _log.warning("rendition left out", stream=self.name, rendition=name, most=MOST_RENDITIONS)
                return None
            stream = Stream(self.name, self._config(), now, rendition=name)
            stream.ended = False
            stream.take_over(self, now)
            rendition = Rendition(name, rank, stream, now, None if self.of_tracks else self._clocks.join(name))
            rendition.expected = expected
            self._renditions = sorted([*self._renditions, rendition], key=lambda item: item.rank)
            self._note_renditions_locked()
            for item in self._formats.values():
                item.wires[rendition] = _joined(stream, item.wire_format)
            return rendition

    def restart(self, rendition: Rendition) -> None:
        """Measure the clock of a member anew: another publisher sends it now."""
        with self._lock:
            if rendition in self._renditions and rendition.clock is not None:
                rendition.clock = self._clocks.join(rendition.name)

    def withdraw(self, rendition: Rendition, now: float, *, gone: bool) -> None:
        """Let viewers go on in others, its publisher being away, unless it is the last one; `gone`: for good."""
        with self._lock:
            if rendition not in self._renditions:
                return
            self._lead.withdraw(rendition.rank)
            self._publish_sound_locked(self._sound.withdraw(rendition.rank, now), now)
            if rendition.joined and (gone or any(item.joined for item in self._renditions if item is not rendition)):
                self._part_locked(rendition)
            if rendition.clock is not None:
                self._clocks.leave(rendition.name)
            if gone:
                self._forget_locked(rendition)

    def _drop_stale_locked(self, now: float) -> bool:
        self._lock.assert_owned()
        stale = min(self._renditions, key=lambda item: item.picture_at)
        if now - stale.picture_at <= _STALE_S:
            return False
        if stale.joined:
            self._part_locked(stale)
        self._forget_locked(stale)
        return True

    def _forget_locked(self, rendition: Rendition) -> None:
        self._lock.assert_owned()
        rendition.forgotten = True
        self._renditions = [item for item in self._renditions if item is not rendition]
        rendition.stream.drop_caches()
        self._gone.append(rendition)
        if len(self._gone) > MOST_RENDITIONS:
            oldest = self._gone.popleft()
            for item in self._formats.values():
                if (wire := item.wires.pop(oldest, None)) is not None:
                    oldest.stream.leave(wire)
        self._note_renditions_locked()

    def _note_renditions_locked(self) -> None:
        self._lock.assert_owned()
        if self.face is not None:
            self.face.renditions = tuple(item.stream for item in (*self._renditions, *self._gone))

    def end(self) -> None:
        """Serve nobody any more; viewers stay where they are until they are told of what follows. Any thread."""
        with self._lock:
            self._ended = True

    # -- what members send

    def accept(
        self, rendition: Rendition, type_id: int, timestamp: int, payload: bytes, info: MediaInfo, now: float
    ) -> None:
        """Pass on one message of a member, which has one track."""
        with self._lock:
            if self._ended or rendition not in self._renditions:
                return
            at = self._time_locked(rendition, timestamp, info, now)
            if at is None:
                return
            timestamp = at
            if self.ladder and info.kind == "video":
                timestamp, payload = self._beside_locked(rendition, timestamp, payload, info)
            if type_id == TYPE_AUDIO:
                self._publish_sound_locked(self._sound.offer(rendition.rank, Sound(timestamp, payload, info), now), now)
            elif info.message_class in VIDEO_CLASSES:
                self._accept_picture_locked(rendition, timestamp, payload, info, now)
            elif info.message_class is MessageClass.HEADER:
                self._accept_header_locked(rendition, type_id, timestamp, payload, info, now)
            elif type_id == TYPE_VIDEO:
                self._pass_on(rendition.stream, type_id, timestamp, payload, info, now)
            elif rendition.rank == self._lead.rank:
                self._publish_all_locked(type_id, timestamp, payload, info, now)
            self._count_locked(len(payload))

    def accept_common(
        self, track: int, type_id: int, timestamp: int, payload: bytes, info: MediaInfo, now: float
    ) -> None:
        """Pass on to all renditions a message of a publication with tracks that is none of pictures."""
        with self._lock:
            if self._ended:
                return
            if type_id == TYPE_AUDIO:
                self._publish_sound_locked(self._sound.offer(track, Sound(timestamp, payload, info), now), now)
            else:
                self._publish_all_locked(type_id, timestamp, payload, info, now)
            self._count_locked(0)

    def _beside_locked(
        self, rendition: Rendition, timestamp: int, payload: bytes, info: MediaInfo
    ) -> tuple[int, bytes]:
        """Return a picture of a step with the timestamp that the same one has in the publication.

        A step has no pictures out of order, so that its timestamps say when each is shown; those of the publication say
        when it is decoded, which is earlier. The difference goes into the composition time (FLV, E.4.3.1).
        """
        self._lock.assert_owned()
        ahead_ms = info.composition_ms or 0
        if info.message_class is MessageClass.KEY:
            shown = (timestamp + ahead_ms) & CLOCK_MASK
            if not rendition.expected:
                self._shown.append((shown, ahead_ms))
            else:
                rendition.behind_ms = next((ms for at, ms in self._shown if at == shown), rendition.behind_ms)
        if not rendition.expected or not rendition.behind_ms:
            return timestamp, payload
        payload = with_composition(payload, info, ahead_ms + rendition.behind_ms) or payload
        return (timestamp - rendition.behind_ms) & CLOCK_MASK, payload

    def _time_locked(self, rendition: Rendition, timestamp: int, info: MediaInfo, now: float) -> int | None:
        """Return the time of a message in the set, on the timeline of the face. None: it is not known yet."""
        self._lock.assert_owned()
        clock = rendition.clock
        if clock is None:
            return timestamp
        if info.message_class in CLOCKED:
            at = clock.map(timestamp, now, key=info.message_class is MessageClass.KEY)
            if clock.moves != rendition.moves and now - rendition.moved_at >= _LEAST_MOVED_S:
                rendition.moves, rendition.moved_at = clock.moves, now
                _log.info("rendition's clock", stream=self.name, rendition=rendition.name, times=clock.why)
            if at is None:
                return None
            if self._shift is None and self.face is not None:
                self._shift = self.face.begin_clock(at, now)
        else:
            at = clock.last_ms
        return (at + (self._shift or 0)) & CLOCK_MASK

    def _pass_on(
        self, stream: Stream, type_id: int, timestamp: int, payload: bytes, info: MediaInfo, now: float
    ) -> None:
        with contextlib.suppress(LimitExceededError):  # a header that is not kept: the publisher is told by its stream
            stream.publish(self, type_id, timestamp, payload, now, info)

    def _publish_all_locked(self, type_id: int, timestamp: int, payload: bytes, info: MediaInfo, now: float) -> None:
        self._lock.assert_owned()
        self._unlooked_bytes += len(payload) * len(self._renditions)
        for rendition in self._renditions:
            if rendition.joined:
                self._pass_on(rendition.stream, type_id, timestamp, payload, info, now)
        self._show_locked(type_id, timestamp, payload, info, now)

    def _publish_sound_locked(self, sounds: Sequence[Sound], now: float) -> None:
        if not sounds:
            return
        if self._first_sound_at is None:
            self._first_sound_at = now
        alone = now - self._first_sound_at > _ALONE_S and not any(item.joined for item in self._renditions)
        if alone is not self._sound_alone:
            self._sound_alone = alone
            self._changed(self, 0.0)
        for sound in sounds:
            self._publish_all_locked(TYPE_AUDIO, sound.timestamp, sound.payload, sound.info, now)

    def _show_locked(self, type_id: int, timestamp: int, payload: bytes, info: MediaInfo, now: float) -> None:
        """Publish in the face, where that is ours."""
        self._lock.assert_owned()
        if self.face is not None and not self.of_tracks:
            published = (timestamp - (self._shift or 0)) & CLOCK_MASK  # it adds the shift itself
            self._pass_on(self.face, type_id, published, payload, info, now)

    def _accept_header_locked(
        self, rendition: Rendition, type_id: int, timestamp: int, payload: bytes, info: MediaInfo, now: float
    ) -> None:
        if not self.of_tracks:
            with contextlib.suppress(LimitExceededError):
                rendition.headers.keep(info.sticky_key, len(payload), (type_id, payload, info))
        if type_id == TYPE_VIDEO and info.packet == "sequence_header":
            rendition.sequence_header = payload if len(payload) <= HEADER_BYTES else b""
            rendition.size = read_size(payload) if info.codec == "avc1" else None
        self._pass_on(rendition.stream, type_id, timestamp, payload, info, now)
        if rendition.rank == self._lead.rank:
            self._show_locked(type_id, timestamp, payload, info, now)

    def _accept_picture_locked(
        self, rendition: Rendition, timestamp: int, payload: bytes, info: MediaInfo, now: float
    ) -> None:
        key = info.message_class is MessageClass.KEY
        if key:  # players that go on from another rendition take parameter sets from there
            payload = with_parameter_sets(payload, rendition.sequence_header)
        rendition.picture_at = now
        if key and rendition.joined and rendition.codec != info.codec:
            self._part_locked(rendition)
        joins = key and not rendition.joined and now >= rendition.joins_at
        for sound in self._sound.headers if joins else ():
            self._pass_on(rendition.stream, TYPE_AUDIO, sound.timestamp, sound.payload, sound.info, now)
        self._pass_on(rendition.stream, TYPE_VIDEO, timestamp, payload, info, now)
        if joins:
            self._join_locked(rendition, info.codec, now)
        before = self._lead.rank
        if self._lead.offer(rendition.rank, timestamp, now, key=key):
            if rendition.rank != before:
                _log.info("rendition shown", stream=self.name, rendition=rendition.name)
                for type_id, header, header_info in rendition.headers.values:
                    self._show_locked(type_id, timestamp, header, header_info, now)
            self._show_locked(TYPE_VIDEO, timestamp, payload, info, now)

    def _count_locked(self, size_bytes: int) -> None:
        """Count what came, and see that all renditions together keep no more of groups than one stream may."""
        self._lock.assert_owned()
        self._unlooked_bytes += size_bytes
        most_bytes = self._config().cache.size_bytes
        if self._unlooked_bytes * _LOOKS_PER_CACHE <= most_bytes:
            return
        self._unlooked_bytes = 0
        sizes = {item: max(map(_cached_bytes, item.stream.wires), default=0) for item in self._renditions}
        while sum(sizes.values()) > most_bytes:
            largest = max(sizes, key=lambda item: sizes[item])
            del sizes[largest]
            largest.stream.drop_caches()

    # -- which renditions viewers may be in

    def _join_locked(self, rendition: Rendition, codec: str, now: float) -> None:
        """Let viewers into a rendition that has a key frame, from others of its codec."""
        self._lock.assert_owned()
        rendition.joined, rendition.codec, rendition.joins_at = True, codec, now + _LEAST_JOINED_S
        rendition.enhanced = codec == "avc1" or rendition.sequence_header[:1] >= _ENHANCED
        for item in self._formats.values():
            self._put_locked(item, rendition)
        _log.info("rendition joined", stream=self.name, rendition=rendition.name, codec=codec)
        if self._began_at is None:
            self._began_at = now
            for wait_s in (_GATHER_S, _MEASURE_S) if self._smallest is not None else ():
                self._changed(self, wait_s + _SPARE_S)
        self._changed(self, 0.0)

    def _part_locked(self, rendition: Rendition) -> None:
        self._lock.assert_owned()
        rendition.joined, self._first_sound_at = False, None
        for item in self._formats.values():
            for codecs, stream_set in list(item.by_codecs.items()):
                if _fits(rendition, codecs):
                    stream_set.remove(rendition.name)
                if not any(other.joined and _fits(other, codecs) for other in self._renditions):
                    del item.by_codecs[codecs]  # publishers may invent codecs
        _log.info("rendition left", stream=self.name, rendition=rendition.name)
        self._changed(self, 0.0)

    def _put_locked(self, item: _Format, rendition: Rendition) -> None:
        self._lock.assert_owned()
        self._set_locked(item, frozenset({rendition.codec}))
        for codecs, stream_set in item.by_codecs.items():
            if _fits(rendition, codecs):
                stream_set.put(rendition.name, item.wires[rendition].fanouts, expected=rendition.expected)

    def _set_locked(self, item: _Format, codecs: frozenset[str]) -> StreamSet:
        """Return the set of logs of some codecs, made when first asked for, then without logs."""
        self._lock.assert_owned()
        stream_set = item.by_codecs.get(codecs)
        if stream_set is None:
            form = item.wire_format  # at a change players make another stream of metadata
            stream_set = item.by_codecs[codecs] = StreamSet(
                time_of=form.time_of, shown_at=form.shown_at, retime=form.retime, at_change=form.is_media
            )
            stream_set.begins_in = SOURCE if self.ladder else ""
        return stream_set

    def _choices_locked(self, item: _Format, codec: str, codecs: frozenset[str]) -> frozenset[str]:
        """Return the codecs among which a player is led that begins in `codec`, and says that it takes `codecs`.

        Those that it says, though there may be others later; else that one alone.
        """
        self._lock.assert_owned()
        fitting = [other for other in self._renditions if other.joined and _fits(other, codecs)]
        if len(codecs) < 2 or all(other.codec != codec for other in fitting):
            return frozenset({codec})
        if codecs not in item.by_codecs:
            stream_set = self._set_locked(item, codecs)
            for other in fitting:
                stream_set.put(other.name, item.wires[other].fanouts, expected=other.expected)
        return codecs

    def _format_locked(self, wire_format: WireFormat) -> _Format:
        self._lock.assert_owned()
        item = self._formats.get(wire_format.name)
        if item is None:
            item = self._formats[wire_format.name] = _Format(wire_format)
            for rendition in self._renditions:
                item.wires[rendition] = _joined(rendition.stream, wire_format)
                if rendition.joined:
                    self._put_locked(item, rendition)
        return item

    # -- viewers

    def view(
        self,
        connection: Connection,
        wire_format: WireFormat,
        *,
        track: int | None = None,
        codecs: frozenset[str] = frozenset(),
        since: float | None = None,
    ) -> Seat | None:
        """Follow the set; `track`: that one alone; `codecs`: that the player takes; `since`: see `StreamSet.view`.

        None: there is nothing to follow yet, `changed` tells. The connection's thread.
        """
        with self._lock:
            found = Counter(item.codec for item in self._renditions if item.joined)
            wanted = None if track is None else self._find_locked(f"track{track}")
            if (
                self._ended
                or not found
                or self._gathers_locked(connection.now())
                or (track is not None and (wanted is None or not wanted.joined))
            ):
                return None
            item = self._format_locked(wire_format)
            item.viewers += 1
            # Most renditions of one codec are most to choose from; of two alike, that of the larger one.
            codec = found.most_common(1)[0][0] if wanted is None else wanted.codec
            choices = self._choices_locked(item, codec, codecs if wanted is None else frozenset())
            stream_set, wire = item.by_codecs[choices], None if wanted is None else item.wires[wanted]
        try:
            if wanted is None or wire is None:
                place: FollowPlace = stream_set.view(connection, since=since)
            else:
                key = wire.log.key_since(since)
                start, prefix, wait = (key, key.gop.restart, False) if key else wanted.stream.start_place(wire)
                place = FollowPlace(connection, wire.fanouts, start=start, prefix=prefix, wait_for_key=wait)
        except BaseException as error:
            self._leave_format(item)
            if isinstance(error, LocalProtocolError) and connection.place is None:  # the last one has left meanwhile
                return None
            raise
        return Seat(self, place, item, wanted, choices)

    def _gathers_locked(self, now: float) -> bool:
        """Return whether viewers still wait for the smallest member, which may have begun with the others."""
        self._lock.assert_owned()
        if self._smallest is None or self._began_at is None or now - self._began_at >= _MEASURE_S:
            return False
        found = [item.joined for item in self._renditions if item.rank == self._smallest]
        return not any(found) and (bool(found) or now - self._began_at < _GATHER_S)

    def begin_format(self, wire_format: WireFormat) -> Callable[[], None]:
        """Make logs in a format for a viewer to come, who begins `since` now; what is returned gives them up."""
        with self._lock:
            item = self._format_locked(wire_format)
            item.viewers += 1
        return partial(self._leave_format, item)

    def _find_locked(self, name: str) -> Rendition | None:
        return next((item for item in self._renditions if item.name == name), None)

    @property
    def told_end(self) -> bool:
        """Whether the viewers in the logs of the set were told of its end."""
        with self._lock:
            return any(item.stream.ended for item in (*self._renditions, *self._gone))

    @property
    def sound_alone(self) -> bool:
        """Whether members send sound and no pictures, so that there is nothing to choose: the face has it all."""
        with self._lock:
            return self._sound_alone

    def serves(self, seat: Seat) -> bool:
        """Return whether something can still come where `seat` is."""
        with self._lock:
            if self._ended:
                return False
            if seat.rendition is not None:
                return seat.rendition in self._renditions
            return any(item.joined and _fits(item, seat.codecs) for item in self._renditions)

    def leave(self, seat: Seat) -> None:
        self._leave_format(seat.form)

    def _leave_format(self, item: _Format) -> None:
        with self._lock:
            item.viewers -= 1
            if not item.viewers:
                del self._formats[item.wire_format.name]
                for rendition, wire in item.wires.items():
                    for stream_set in item.by_codecs.values():
                        stream_set.remove(rendition.name)
                    rendition.stream.leave(wire)

    def carried(self, now: float) -> list[float | None]:
        """Return what lines are seen to carry whose viewers are not well served by what there is, bytes per second.

        None: one that carries too little for it, nobody knows how much. Any thread.
        """
        with self._lock:
            sets = [stream_set for item in self._formats.values() for stream_set in item.by_codecs.values()]
        return [found for stream_set in sets for found in stream_set.carried(now)]

    def rate_of(self, name: str) -> float:
        """Return bytes per second of a rendition; 0: not known. Any thread."""
        return next((item.bytes_per_s for item in self.renditions() if item.name == name), 0.0)

    def renditions(self) -> list[RenditionFacts]:
        """Return what is told of each rendition, the largest first. Any thread."""
        with self._lock:
            found = list(self._renditions)
        return [
            RenditionFacts(
                item.name,
                item.codec,
                item.size,
                max((wire.log.bytes_per_s for wire in item.stream.wires), default=0.0),
                item.joined,
                "" if item.clock is None else item.clock.why,
                item.stream.rendition_key,
            )
            for item in found
        ]


def _fits(rendition: Rendition, codecs: frozenset[str]) -> bool:
    """Return whether viewers who take `codecs` may be in a rendition."""
    return rendition.codec in codecs and (rendition.enhanced or len(codecs) == 1)


def _joined(stream: Stream, wire_format: WireFormat) -> WireLog:
    """Return the log of a rendition in a format; ids that players make up are limited where they join the face."""
    if isinstance(wire_format, RtmpChunks) and wire_format.msid <= GIVEN_WIRES:
        return stream.join(wire_format.msid)
    return stream.join_format(wire_format)


def _cached_bytes(wire: WireLog) -> int:
    start = wire.log.cached
    return 0 if start is None else wire.log.tail.offset - start.offset
