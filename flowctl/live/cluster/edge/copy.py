"""The copy of one stream at an edge: what is to be fetched for it, and what goes on to the viewers.

Messages come in two ways. Segments are fetched by diffusion; frames are followed from one source, where the edge is
told to. Both go through a `Splice`, and what comes out of it is published (`Sink`), so viewers get each message once.

Followed frames are cut as an origin cuts them. A segment of ours that has the hash of one that was announced is that
one: so it is known where in the publication the followed source stands, though its server may have moved the stream on
its timeline; and what was followed is not fetched, but is offered to others. Another source of the same stream is known
by its first picture, where that has gone out before. While frames come, announced segments are held: neither fetched
nor acknowledged. When they stop coming, what is missing is fetched. Where something else was followed than was
announced for its place, that is fetched too, and shows whether the source, or the way to it, changes octets.

One publication goes out at a time (`Publications`). Two timelines are one publication where both have the same content
at the same time, however far the clocks of origins are apart; two that one origin announced are two. Another encoder
that uses the same name at another origin is held, a few seconds of it, for as long as the first one lives, which it
does while an origin announces more of it. Then the next one goes out at once, and what nobody has is not waited for.

And where something comes and nothing goes out for long, all that was announced stands before what has gone out, or
before a beginning that nobody has: the copy then begins anew with what there is.

Everything belongs to one thread, that of the node's loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import structlog

from flowctl.core.flow.state import MessageClass
from flowctl.errors import LimitExceededError, LocalProtocolError
from flowctl.live.cluster.edge.outlet import Outlet
from flowctl.live.cluster.edge.publications import NOWHERE, Announcer, Publications
from flowctl.live.cluster.follow import Sink
from flowctl.live.cluster.segments.cutter import TIMELINE_S, CutSegment, Cutter
from flowctl.live.cluster.segments.segment import (
    Frame,
    Header,
    Position,
    Segment,
    SegmentId,
    Sequel,
    decode_body,
    following,
    object_of,
    segment_of,
)
from flowctl.live.cluster.segments.splice import Gap, PublicationStart, Splice, SplicedHeaders
from flowctl.live.cluster.segments.window import SegmentPool
from flowctl.nodes.diffusion.objects import PeerId
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.wire import CLOCK_MASK

_log: Final = structlog.get_logger("flowctl.cluster")
SETTLE_S: Final = 0.3
"""Time after the first announcement of a stream in which others are collected: they come oldest first, and the newest
is where to begin."""
WAIT_S: Final = 4.0
"""Time for which a missing segment is waited for: an origin that does not answer takes up to 2 s of it."""
LIVE_S: Final = 1.0
"""Silence after which a followed source may be dead: segments are fetched from then on."""
HOLD_S: Final = 5.0
"""Time for which a segment is held while its frames are followed, or while another publication goes out; after it the
segment is another encoder's, and not fetched."""
JOIN_S: Final = 5.0
"""Most time between the announcements of one segment by two origins that proves that both have one publication although
their clocks differ. A stream that is published again, octet for octet, comes later."""
BACK_S: Final = 2.0
"""Time before the end of the last publication from which announcements of the next one count: origins announce one
after the other. Of an encoder that has been there for longer, viewers would get all that was held at once."""
SECOND_S: Final = 1.0
"""Time for which a segment known by two names, from origins whose clocks differ, is asked for by the first one."""
ENDED_S: Final = 3.0
"""Time for which the end of a publication is kept back: an origin may have more, or the publisher may return."""
GONE_S: Final = 10.0
"""Silence after which viewers are told that the stream has ended: twice as long as any segment takes. Where something
came and nothing has gone out for this time, the copy begins anew."""
HELD_BYTES: Final = 64 << 20
"""Octets of one stream that may wait behind a missing segment."""
APART_MS: Final = 200
"""Most distance between the timelines of one publication at two servers: each measures the pause before it."""
_MOST_ANNOUNCED: Final = 512
DOUBT_S: Final = 0.5
"""Time by which the announcement of a followed segment may come after another one at its place."""
_MOST_OWN_SEGMENTS: Final = 32
"""Followed segments whose hashes are remembered until they are announced."""
_MOST_UNPLACED_MESSAGES: Final = 8192
"""Messages of a followed source that wait until their place is known: a long group of pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStatistics:
    """One stream of an edge at one moment."""

    stream: str
    published: bool
    following: bool  #: whether frames come by RTMP
    last_segment: str  #: the newest one that was announced. Empty: none.
    messages: int
    fetched: int  #: segments that came by diffusion
    adopted: int  #: segments that were followed and need not be fetched
    repeated: int  #: messages that came more than once
    gaps: int  #: times that something was missing for good
    waiting_bytes: int  #: octets of messages behind something that is missing


class _Mapping(NamedTuple):
    """Where a followed source stands: the shift of its segments' times, and their timeline."""

    timeline: int
    shift_ms: int

    def of(self, position: Position) -> Position:
        return Position(self.timeline, max(position.start_ms + self.shift_ms, 0), position.part)


_Content = tuple[bytes, int, int, Sequel, int]


def _content_of(name: SegmentId) -> _Content:
    """Return all parts of an id except the place.

    What we offer under an id that somebody has announced has to be what the id says, and not only have its hash: others
    would take us for the liar.
    """
    behind_ms = name.next_ms - name.position.start_ms if name.then is Sequel.KEY else 0
    return name.digest, name.size_bytes, name.count, name.then, behind_ms


_Key = tuple[Position, _Content]
"""A segment, by the number of its publication."""


@dataclass(slots=True)
class _AnnouncedSegment:
    """A segment that was announced."""

    name: SegmentId  #: the name of its first announcement, known to others
    at: float
    here: bool = False


class StreamCopy:
    """One stream of an edge, put together from segments and followed frames. A `Sink` of the follow."""

    def __init__(
        self,
        name: str,
        pool: SegmentPool,
        sink: Sink,
        clock: Callable[[], float],
        *,
        follows: bool = False,
    ) -> None:
        self.name: Final = name
        self.follows: Final = follows
        self._pool = pool
        self._outlet: Final = Outlet(name, sink)
        self._clock = clock
        self._splice = Splice(wait_s=WAIT_S, most_bytes=HELD_BYTES)
        self._announced: OrderedDict[_Key, _AnnouncedSegment] = OrderedDict()
        self._publications: Final = Publications()
        self._successor: int | None = None  # the publication that is next, once this one has gone out
        self._warned = False  # clocks of origins differ, which was told
        self._first_at: float | None = None  # when the first segment was announced
        self._start: Position | None = None  # where to begin
        self._live_at = float("-inf")  # when the last frame was followed
        self._brought_at = float("inf")  # likewise, or when this source was begun with
        self._came_at = clock()
        self._stuck_at: float | None = None  # something has come since, and nothing has gone out
        # What is followed: cut as origins cut, not placed yet, and what was cut, by hash
        self._cutter: Cutter | None = None
        self._mapping: _Mapping | None = None
        self._before: _Mapping | None = None  # of the source before this one
        self._from_key = False  # frames before the next key frame have no place
        self._unplaced: list[Callable[[], None]] = []
        self._own: OrderedDict[tuple[_Content, Position], tuple[bytes, float]] = OrderedDict()
        self.flawed = False  #: what the followed source sends is not what origins have, whose hashes prove it
        self._sound = False  # only headers of the source differ from those that were announced
        self._proven = False  # that the mapping holds was seen by a hash, or by a picture
        self._over: int | None = None  # the followed source is past this timeline: its publication has ended
        self._fetched = self._adopted = 0

    # -- what origins have

    def note_announced(self, peer: PeerId, name: SegmentId) -> None:
        now = self._clock()
        announcer = self._publications.announcers.setdefault(peer, Announcer())
        key = self._key(name)
        if key not in self._announced:
            self._join_same(name, announcer, now)
            key = self._key(name)
        number = key[0].timeline
        self._publications.note_announced(announcer, number, now, ended=name.then is Sequel.END)
        if key not in self._announced:
            self._note(key, name, now)
            if self._behind(key[0], now) and self._is_stuck(now):
                self._begin_anew(now)
                self._note(key, name, now)
        self._choose_successor(now)

    def forget_peer(self, peer: PeerId) -> None:
        if self._publications.announcers.pop(peer, None) is not None:
            self._choose_successor(self._clock())
            self._flush()

    def _key(self, name: SegmentId) -> _Key:
        number = self._publications.number_of(name.position.timeline, (self._current, self._successor))
        return name.position._replace(timeline=number), _content_of(name)

    def known_as(self, name: SegmentId) -> SegmentId:
        """Return the name under which a segment is kept and offered: that of its first announcement."""
        heard = self._announced.get(self._key(name))
        return name if heard is None else heard.name

    @property
    def _current(self) -> int | None:
        place = self._start if self._splice.cursor is None else self._splice.cursor[0]
        return None if place is None else place.timeline

    def _choose_successor(self, now: float) -> None:
        current = self._current
        if current is None or self._publications.lives(current, now):
            return
        if self._successor is None or self._successor == current or not self._publications.lives(self._successor, now):
            best = self._publications.best(now, but=current)
            if best is None:
                return
            if best < current:
                self._rename(best, best := self._publications.next_number())
            self._successor = best
            starts = [
                (heard.at, place)
                for (place, _), heard in self._announced.items()
                if place.timeline == best and not place.part
            ]
            if starts:
                late = [place for at, place in starts if now - at <= BACK_S]
                self._splice.go_on_at(min(late) if late else max(place for _, place in starts))

    # -- what is wanted, asked by diffusion

    def wants(self, name: SegmentId) -> bool:
        key, now = self._key(name), self._clock()
        heard = self._announced.get(key)
        if heard is None or heard.here:
            return False
        if self._doubted(key) is not None:
            return True
        if self._behind(key[0], now):
            return False
        return not ((self._flows(now) or self._is_apart(key[0].timeline)) and now - heard.at > HOLD_S)

    def ready(self, name: SegmentId) -> bool:
        key, now = self._key(name), self._clock()
        position, heard = key[0], self._announced.get(key)
        if self._splice.cursor is None and self._start is None and not self._settle(now):
            return False
        if heard is not None and self._doubted(key) is not None:
            return now - heard.at > DOUBT_S
        if heard is None or self._is_apart(position.timeline) or self._behind(position, now):
            return False
        if heard.name != name and now - heard.at < SECOND_S:
            return False
        if not self._flows(now):
            return True
        missing = self._splice.missing()
        return missing is not None and missing[0] <= position < missing[1]

    def _doubted(self, key: _Key) -> tuple[_Content, Position] | None:
        """Return what was followed where another segment was announced. None: nothing that is known to stand there."""
        mapping = self._mapping
        if mapping is None or self._sound or self.flawed or not self._own:
            return None
        if not self._proven and len({announcer.number for announcer in self._publications.announcers.values()}) > 1:
            return None  # it may be of another encoder
        place, content = key
        return next((own for own in self._own if own[0] != content and mapping.of(own[1]) == place), None)

    def _hold_against(self, own: tuple[_Content, Position], segment: Segment) -> None:
        body, _ = self._own.pop(own)
        followed = decode_body(body, 0)[1]
        pairs = list(zip(followed, segment.frames, strict=False))  # the source may have ended sooner
        self.flawed = any(mine[::2] != true[::2] for mine, true in pairs)
        self._sound = not self.flawed and len(followed) == len(segment.frames)

    def known_for_s(self, name: SegmentId) -> float:
        heard = self._announced.get(self._key(name))
        return 0.0 if heard is None else self._clock() - heard.at

    def _is_apart(self, number: int) -> bool:
        return self._current is not None and number not in (self._current, self._successor)

    def _behind(self, position: Position, now: float) -> bool:
        """Whether a segment comes too late, or stands before the beginning."""
        if self._is_apart(position.timeline) and self._publications.lives(position.timeline, now):
            return False
        return self._splice.is_past(position) or (self._start is not None and position < self._start)

    def _join_same(self, name: SegmentId, announcer: Announcer, now: float) -> None:
        """Learn from a segment that was announced with another timeline too that the two are one publication."""
        (timeline, *place), content = name.position, _content_of(name)
        number = self._publications.number_of(timeline)
        for (other, same), heard in reversed(self._announced.items()):
            if same != content or [*other[1:]] != place or other.timeline == number:
                continue
            apart = abs(heard.name.position.timeline - timeline)
            live = now - heard.at <= JOIN_S and self._publications.lives(other.timeline, now)
            if apart > 1 and (other.timeline in announcer.numbers or not live):
                continue
            if apart > 1 and not self._warned:
                self._warned = True
                hint = "set the clocks of the origins; until then it shows from the content that they have the same"
                _log.warning("clocks of origins differ", stream=self.name, by_s=apart * TIMELINE_S, hint=hint)
            if self._current == number:
                self._rename(other.timeline, number)
            else:
                self._rename(number, other.timeline)
            return

    def _rename(self, number: int, to: int) -> None:
        """Call a publication by another number from now on: by one that it has too, or by a later one."""
        self._publications.rename(number, to)
        announced, self._announced = self._announced, OrderedDict()
        for heard in announced.values():
            same = self._announced.setdefault(self._key(heard.name), heard)
            same.here = same.here or heard.here
        self._splice.rename(number, to, 0)
        if self._start is not None and self._start.timeline == number:
            self._start = self._start._replace(timeline=to)
        if self._mapping is not None and self._mapping.timeline == number:
            self._mapping = self._mapping._replace(timeline=to)
        if self._before is not None and self._before.timeline == number:
            self._before = self._before._replace(timeline=to)
        self._over = to if self._over == number else self._over
        self._successor = to if self._successor == number else self._successor

    def _is_stuck(self, now: float) -> bool:
        """Note that something has come that does not go out; return whether that has been so for too long."""
        if self._stuck_at is None:
            self._stuck_at = now
        return now - self._stuck_at > GONE_S

    def _begin_anew(self, now: float) -> None:
        """Begin with what is announced, or followed, from now on: nothing of it was behind what has gone out."""
        _log.warning("stream begins anew", stream=self.name, why=f"nothing fitted for {GONE_S:g} s")
        before, self._splice = self._splice, Splice(wait_s=WAIT_S, most_bytes=HELD_BYTES)
        self._splice.repeated_count, self._splice.gap_count = before.repeated_count, before.gap_count + 1
        self._announced.clear()
        self._own.clear()
        self._first_at = self._start = self._mapping = self._before = self._stuck_at = self._successor = None
        self._proven = False
        self.gap(now)

    def _note(self, key: _Key, name: SegmentId, now: float) -> None:
        self._announced[key] = _AnnouncedSegment(name, now, here=self._pool.has(name))
        if len(self._announced) > _MOST_ANNOUNCED:
            self._announced.popitem(last=False)
        if self._first_at is None:
            self._first_at = now
        cutter = self._cutter
        if cutter is not None and cutter.position is not None and cutter.frames:
            self._compare(key[0], name, cutter.position, cutter.frames[0])
        self._look_for_own(key)

    def _look_for_own(self, key: _Key) -> None:
        """Look whether a segment that was announced is one that was followed; pictures may repeat, and so hashes."""
        place, content = key
        positions = [position for same, position in self._own if same == content]
        mapping = self._mapping
        here = [position for position in positions if mapping is not None and mapping.of(position) == place]
        if here or self._may_be(place):
            for position in (here or positions)[-1:]:
                self._match(position, self._own[content, position][0], key)

    def _may_be(self, position: Position) -> bool:
        """Whether what is followed may stand at a place other than that where it was thought to stand."""
        if self._over is not None and position.timeline <= self._over:
            return False
        return not self._proven or self._mapping is None or position.timeline > self._mapping.timeline

    def _settle(self, now: float) -> bool:
        if self.follows and now - self._came_at < LIVE_S:
            return False  # the followed source comes first
        if self._first_at is None or now - self._first_at < SETTLE_S:
            return False
        best = self._publications.best(now)
        starts = [
            place
            for (place, _), heard in self._announced.items()
            if not (place.part or heard.here) and best in (None, place.timeline)
        ]
        self._start = max(starts, default=None)
        return bool(starts)

    def _flows(self, now: float) -> bool:
        """Whether what goes out is followed, and not behind it, and it is known where it stands."""
        cutter, mapping = self._cutter, self._mapping
        if mapping is None or cutter is None or self._is_apart(mapping.timeline) or now - self._live_at >= LIVE_S:
            return False
        return cutter.position is None or not self._splice.is_past(mapping.of(cutter.position))

    # -- what comes

    def segment(self, segment: Segment) -> None:
        key = self._key(segment.id)
        segment = replace(segment, id=replace(segment.id, position=key[0]))
        if key in self._announced:
            self._announced[key].here = True
        own = self._doubted(key)
        if own is not None:
            self._hold_against(own, segment)
        self._fetched += 1
        self._came_at = self._clock()
        if self._splice.cursor is None and self._start is not None and segment.id.position >= self._start:
            self._splice.start(self._start)
        self._splice.add_segment(segment)
        self._flush()

    def begin(self, now: float) -> None:
        del now
        self._cutter, self._unplaced = Cutter(self.name, NOWHERE), []
        self._before, self._mapping = self._mapping or self._before, None
        self._from_key = self._proven = self.flawed = self._sound = False
        self._own.clear()

    def gap(self, now: float) -> None:
        """Note that something is missing between two connections: what follows has no place before a key frame."""
        del now
        if self._cutter is not None:
            headers = self._cutter.known_headers
            self._cutter, self._unplaced = Cutter(self.name, NOWHERE), []
            for type_id, payload in headers:
                self._cutter.add(type_id, 0, payload, MessageClass.HEADER)
            self._from_key = True

    def take(self, type_id: int, timestamp: int, payload: bytes, now: float) -> None:
        self._live_at = self._brought_at = self._came_at = now
        message_class = inspect(type_id, payload).message_class
        if self._cutter is None:
            self.begin(now)
        cutter = self._cutter
        assert cutter is not None  # noqa: S101 - `begin` has made it
        if self._from_key and message_class is not MessageClass.HEADER:
            if message_class is not MessageClass.KEY and cutter.has_video:
                return
            self._from_key = False
        timeline = cutter.timeline
        for cut in cutter.add(type_id, timestamp, payload, message_class):
            self._place(partial(self._end_part, cut))
            self._own_segment(cut)
        if cutter.timeline != timeline:  # its clock has jumped back: another publication
            self._end_publication()
            self._before, self._mapping, self._unplaced, self._proven = self._mapping or self._before, None, [], False
        if cutter.position is not None and cutter.frames and cutter.frames[-1].payload is payload:
            position, index, frame = cutter.position, len(cutter.frames) - 1, cutter.frames[-1]
            headers = cutter.headers
            if self._mapping is None and index == 0:
                self._guess(position, frame)
            self._place(lambda: self._add(position, index, frame, headers))
        messages = self._outlet.message_count
        self._flush()
        if self._outlet.message_count == messages and message_class is not MessageClass.HEADER and self._is_stuck(now):
            self._begin_anew(now)

    def _guess(self, position: Position, frame: Frame) -> None:
        """Say where a source stands whose first picture came: as one that is known, or anywhere while nothing is."""
        if self._splice.cursor is None and self._start is None:
            best = self._publications.best(self._clock())
            newest = max((place.timeline for place, _ in self._announced), default=NOWHERE)
            self._mapping = _Mapping(newest if best is None else best, 0)
            return
        shift_ms = 0 if self._before is None else self._before.shift_ms
        places = [item for item in self._splice.beginning_with(frame) if self._may_be(item)]
        pictured, most_ms = bool(places), CLOCK_MASK
        if not places:  # begun since: where an announced segment says that the next one begins
            follow = (
                following(place, heard.name.then, heard.name.next_ms) for (place, _), heard in self._announced.items()
            )
            # What has gone out may be another encoder's whose clock was the same: its hash will tell.
            places = [item for item in follow if item and self._may_be(item) and not self._splice.is_past(item)]
            most_ms = APART_MS
        # Pictures may be alike: the one where the source before it would have had it.
        same = min(places, key=lambda item: abs(item.start_ms - position.start_ms - shift_ms), default=None)
        if same is not None and abs(same.start_ms - position.start_ms - shift_ms) <= most_ms:
            self._settle_at(_Mapping(same.timeline, same.start_ms - position.start_ms))
            self._proven = pictured

    def _compare(self, place: Position, name: SegmentId, position: Position, frame: Frame) -> None:
        """Look whether a segment that was announced says where the open one stands, if that is not known yet."""
        if self._mapping is None:
            self._guess(position, frame)
        elif self._mapping.timeline == NOWHERE:
            behind = name.next
            if position.start_ms in (place.start_ms, behind and behind.start_ms):
                self._settle_at(_Mapping(place.timeline, 0))

    def _settle_at(self, found: _Mapping) -> None:
        before, self._mapping = self._mapping, found
        if before is None:
            self._place_held()
        elif before != found:
            shift_ms = found.shift_ms - before.shift_ms
            if self._splice.rename(before.timeline, found.timeline, shift_ms):
                self._outlet.moved_ms -= shift_ms  # viewers saw it begin: their clock goes on

    def _place(self, step: Callable[[], None]) -> None:
        """Do what needs to know where the followed source stands, now or as soon as that is known, and goes out."""
        self._place_held()
        if self._is_placed:
            step()
        elif len(self._unplaced) < _MOST_UNPLACED_MESSAGES:
            self._unplaced.append(step)

    def _place_held(self) -> None:
        if self._is_placed:
            steps, self._unplaced = self._unplaced, []
            for step in steps:
                step()

    @property
    def _is_placed(self) -> bool:
        return self._mapping is not None and not self._is_apart(self._mapping.timeline)

    def _add(self, position: Position, index: int, frame: Frame, headers: tuple[Header, ...]) -> None:
        mapping = self._mapping
        if mapping is not None:
            shifted = frame._replace(timestamp=frame.timestamp + mapping.shift_ms & CLOCK_MASK)
            self._splice.add(mapping.of(position), index, shifted, headers)

    def _end_part(self, cut: CutSegment) -> None:
        mapping, behind = self._mapping, cut.next
        if mapping is not None:
            next_part = None if behind is None else mapping.of(behind)
            self._splice.end_part(mapping.of(cut.position), len(cut.frames), next_part)

    def _own_segment(self, cut: CutSegment) -> None:
        try:
            name, body = segment_of(cut.stream, cut.position, cut.headers, cut.frames, cut.then, cut.next_ms)
        except (LimitExceededError, LocalProtocolError):
            return
        self._own[_content_of(name), cut.position] = body, self._clock()
        if len(self._own) > _MOST_OWN_SEGMENTS:
            self._own.popitem(last=False)
        same = [key for key in self._announced if key[1] == _content_of(name)]
        here = [key for key in same if self._mapping and key[0] == self._mapping.of(cut.position)]
        # Pictures repeat: what has gone out may only look like it, and the one that is meant be announced in a moment.
        ahead = [key for key in same if self._may_be(key[0]) and not self._repeats(key[0])]
        for known in (here or ahead)[-1:]:
            self._match(cut.position, body, known)

    def _repeats(self, position: Position) -> bool:
        """Whether what stands there may only look like what is followed: it has gone out, of the same publication."""
        last = self._over if self._mapping is None else self._mapping.timeline
        return self._splice.is_past(position) and not (last and position.timeline > last)

    def _match_late(self, now: float) -> None:
        """Take what was announced before it was followed, where nothing that was announced since is the same."""
        for (content, position), (body, cut_at) in tuple(self._own.items()):
            if self._proven or now - cut_at < LIVE_S:
                return
            same = [key for key in self._announced if key[1] == content]
            match = max((key for key in same if self._may_be(key[0])), default=None)
            if match is not None:
                self._match(position, body, match)

    def _match(self, position: Position, body: bytes, key: _Key) -> None:
        """Learn that what was followed at `position` is a segment that was announced."""
        (place, content), heard = key, self._announced[key]
        thought = place if self._mapping is None else self._mapping.of(position)
        if thought.timeline != place.timeline and any(other == thought for other, _ in self._announced):
            self._mapping = None  # there another encoder's stands, whose clock was the same
        self._settle_at(_Mapping(place.timeline, place.start_ms - position.start_ms))
        self._proven = heard.here = True
        name = heard.name
        self._adopted += self._pool.put(name, object_of(name, body))
        self._splice.end_part(place, name.count, following(place, name.then, name.next_ms))
        if self._splice.lacks(place) and not self._is_apart(place.timeline):  # its messages came when they seemed past
            segment = Segment.decode(object_of(name, body))
            self._splice.add_segment(replace(segment, id=replace(name, position=place)))
            self._flush()
        self._own.pop((content, position), None)

    def end(self, why: str) -> None:
        del why
        if self._cutter is not None:
            for cut in self._cutter.close():
                self._own_segment(cut)
        self._cutter, self._unplaced, self._live_at = None, [], float("-inf")
        self._end_publication()

    def _end_publication(self) -> None:
        if self._mapping is not None and self._mapping.timeline != NOWHERE:
            self._over = self._mapping.timeline

    def lose_source(self) -> None:
        """Fetch what is missing, for the followed source is gone, until another one is followed."""
        self._live_at, self._over, self._brought_at = float("-inf"), None, self._clock()

    def overtaken(self, now: float) -> bool:
        """Whether the followed source is silent while others have announced what it has not brought."""
        number, cursor = self._current, self._splice.cursor
        apart = number is not None and self._publications.lives(number, now)
        announced = [
            (place, heard) for (place, _), heard in self._announced.items() if not (apart and place.timeline != number)
        ]
        if self._flows(now) or not announced:
            return False
        if apart and self._mapping is not None and not self._is_placed and now - self._live_at < LIVE_S:
            return True  # what comes is another encoder's
        last = announced[-1][1]
        if last.name.next is not None and last.at - self._brought_at > LIVE_S:
            return True  # though it was fetched: others have what is new sooner
        newest, heard = max(announced, key=lambda item: item[0])
        return now - heard.at > LIVE_S and (cursor is None or newest > cursor[0])

    # -- what goes out

    def tick(self, now: float) -> None:
        self._choose_successor(now)
        self._match_late(now)
        due = self._splice.next_deadline()
        if due is not None and now >= due:
            self._flush()
        silent_s = now - self._came_at
        if self._outlet.begun and (silent_s > GONE_S or (self._splice.ended and silent_s > ENDED_S)):
            self._outlet.end("its publisher has gone" if self._splice.ended else "nothing has come any more")

    def close(self, why: str) -> None:
        self._outlet.end(why)

    def _flush(self) -> None:
        now = self._clock()
        for item in self._splice.take_ready(now, hopeless=self._is_hopeless(now)):
            match item:
                case Frame():
                    self._stuck_at = None
                    self._outlet.publish(item, now)
                case SplicedHeaders():
                    self._outlet.due = item.headers
                case PublicationStart():
                    self._outlet.moved_ms = 0
                    self._outlet.begin(now)
                case Gap():
                    _log.warning("messages missing", stream=self.name, at=str(item.position), to=str(item.to))

    def _is_hopeless(self, now: float) -> bool:
        """Whether there is another publication, and all that connected origins have of this one has come."""
        current, cursor = self._current, self._splice.cursor
        if (
            self._successor in (None, current)
            or current is None
            or cursor is None
            or self._publications.lives(current, now)
        ):
            return False
        return not self._publications.is_had(current) or not any(
            place.timeline == current and place >= cursor[0] and not heard.here
            for (place, _), heard in self._announced.items()
        )

    def statistics(self) -> CopyStatistics:
        newest = next(reversed(self._announced.values()), None)
        return CopyStatistics(
            stream=self.name,
            published=self._outlet.begun,
            following=self._flows(self._clock()),
            last_segment="" if newest is None else str(newest.name),
            messages=self._outlet.message_count,
            fetched=self._fetched,
            adopted=self._adopted,
            repeated=self._splice.repeated_count,
            gaps=self._splice.gap_count,
            waiting_bytes=self._splice.held_bytes,
        )
