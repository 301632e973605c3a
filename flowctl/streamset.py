"""A set of renditions: stream logs with one content, each viewer of which follows the largest that its line carries.

Theory of operation. Each *rendition* is a stream log with its fan-outs. A viewer of the set follows one of them, as any
viewer does. Where its `RenditionRule` chooses another, the viewer's Sender is given a guide, which it asks at each key
frame: does the other log have the same one? Then it goes on there, with the headers of that rendition first and with no
sound missing or twice (`core.outgoing.splice`). A key frame of the other log that is a moment late is waited for. Where
key frames do not meet, it goes on before any picture at which the other log's last key frame is not far back.

A *watch* for each poll group looks at viewers that lag or are not in the largest rendition, and has their rules choose.
Who keeps up in the largest is a member of a cohort as in any log, and is not looked at.

A rendition that is removed, or has had no key frame for a while, is left at once: its viewers go on in the nearest one,
behind the last picture that they were sent. What its group has before that is needed to decode the rest, and goes out
in no time; a line that is too slow for it hears the sound, and sees pictures from the next key frame on.

An example of ten lines is in docs/renditions.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from flowctl.core.fanout.following import Fanouts, Follower, FollowPlace
from flowctl.core.fanout.pacing import DEFAULT_FLUSH_INTERVAL_S
from flowctl.core.flow.renditionbook import RenditionBook
from flowctl.core.flow.renditions import ENDED, FIRST, Choice, RenditionRule
from flowctl.core.flow.state import VIDEO_CLASSES, MessageClass
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.outgoing.backlog import Item
from flowctl.core.outgoing.splice import (
    MOST_SOUND,
    MediaTimes,
    Splice,
    apart_ms,
    new_headers,
    next_sound,
    raise_times,
    splice,
)
from flowctl.core.outgoing.streamlog import Entry, StreamLog
from flowctl.core.sending.contract import Hop
from flowctl.core.sending.figures import LineLook
from flowctl.core.sending.looks import LOOK_S, RenditionLooks
from flowctl.errors import LocalProtocolError
from flowctl.pollgroup import PollGroup
from flowctl.sender import Sender

_TOGETHER_S: Final = 0.005
"""Looks that are due so soon are made at once: each round goes through all viewers that are looked at."""
_KEPT_S: Final = 8.0
"""For how long a log keeps its key frames: a viewer is as far behind as that at most, with the usual limits."""
_MEET_MS: Final = 20
"""Largest difference of the times of key frames that are the same one: half of a picture at 25 a second."""
_MEET_PUBLISHED_MS: Final = 100
"""The same for the times of publication, which one encoder's outputs reach one after the other."""
_HOLD_S: Final = 0.5
"""How long the same key frame of another log is waited for: encoders of one source need unequal times for it."""
_SILENT_GROUPS: Final = 2
_SILENT_S: Final = 1.0
"""A rendition has stopped when there was no key frame for so many groups of pictures and seconds."""
_MOST_LEFT: Final = 8
"""Renditions that were removed and are remembered: viewers leave one within 250 ms, if it is not put again before."""
_OWN: Final = "the publisher's own, until its line is known"
_LATELY: Final = 2
"""Key frames of a rendition by which it is told whether they meet those of another."""
_SHORT_SHARE: Final = 0.9
_SHORT_S: Final = 0.25
"""Share of the largest rendition's rate below which a line is too short for it, once so much waits."""
_LATE_SHARE: Final = 0.5
"""Share of the target delay behind which it is so whatever is measured."""
_SHORT_FOR_S: Final = 1.0
"""How long it has to be so: a viewer that comes is behind until it has the group that is cached."""
_CARRIED_S: Final = 3.0
"""How long it counts what a line was seen to carry: viewers that lag are looked at a few times a second."""
_CROSS_MS: Final = 400
"""How long before the picture that comes next the other log's key frame may be, where they do not meet: what lies
between goes out twice."""
_AT_ONCE_S: Final = 1.0
"""How long a line may need for what a viewer is sent at once where its rendition has ended, else it waits for the next
group: about as long as that is away on average."""
_AUDIO: Final = MessageClass.AUDIO
_KEY: Final = MessageClass.KEY


@dataclass(eq=False, slots=True)
class _Rendition:
    name: str
    fanouts: Fanouts
    sound: int  # sound messages in its log when it was put into the set, where the others had what they had
    ended_at: int | None = None  # sound messages that it had, by the count of the set, when it was removed
    last_ms: int | None = None  # media time of its last picture then
    waits_until: float | None = None  # until when its viewers wait for what the others have not sent yet, then
    expected: float = 0.0  # bytes per second, until they are measured; 0: nobody knows

    @property
    def log(self) -> StreamLog:
        return self.fanouts.log

    def heard(self, place: Entry) -> int:
        """Return the sound messages before `place`, by a count that all renditions of the set share."""
        return place.counts[_AUDIO] - self.sound

    def silent(self, now: float) -> bool:
        log = self.log
        return bool(log.gop_bytes) and now - log.gop.started_at > _SILENT_GROUPS * log.gop_duration_s + _SILENT_S


class StreamSet:
    """Stream logs with one content in several sizes, each of whose viewers follows the one that fits its line.

    All logs get the same sound messages, in the same order. A viewer changes over at key frames that two logs have at
    the same time.

    Args:
        time_of: returns the media time of a message in milliseconds; it is called under locks and must only look.
            None: the time of publication tells which key frames are the same.
        at_change: says of a header of the rendition that is entered whether a viewer gets it who has had the headers of
            another; under locks, too. None: each that differs.
        shown_at: the same for when a picture is shown that is not shown at its media time. None: all are.
        retime: returns a picture's message with another media time, and another one at which it is shown; under locks,
            too. None: viewers change over only where two logs have a key frame at the same time; else anywhere.
        flush_interval_s: of the fan-outs that the set makes, in seconds.
    """

    def __init__(
        self,
        *,
        time_of: Callable[[bytes], int] | None = None,
        shown_at: Callable[[bytes], int] | None = None,
        retime: Callable[[bytes, int, int], bytes] | None = None,
        at_change: Callable[[bytes], bool] | None = None,
        flush_interval_s: float = DEFAULT_FLUSH_INTERVAL_S,
    ) -> None:
        self._time_of = time_of
        self._times = None
        if time_of is not None and retime is not None:
            self._times = MediaTimes(time_of, shown_at or time_of, retime)
        self._at_change = at_change
        self._flush_interval_s = flush_interval_s
        self._lock = OwnedLock()
        self._renditions: dict[str, _Rendition] = {}  # read by any thread: replaced whole, under the lock
        self._left: dict[str, _Rendition] = {}  # those that were removed last; guarded by _lock
        self._starts: dict[str, Entry] = {}  # where those begin that were put lately; replaced whole, under the lock
        self._heard = 0  # sound messages of those that were removed, by the count of the set; guarded by _lock
        self._watches: dict[PollGroup, _Watch] = {}  # guarded by _lock
        self.begins_in = ""  # rendition in which viewers begin, as long as it is there; empty: the smallest
        # What lines carry whose viewers are not well served, and when that was seen; only with `begins_in`.
        self._carried: dict[SetPlace, tuple[float, float | None]] = {}
        # What `cross` found last: viewers at one picture share the messages. The watches empty it, for it holds a log.
        self.crossing: tuple[tuple[object, ...], Splice | Entry | None] | None = None
        self._resumed: tuple[tuple[object, ...], Splice | Entry] | None = None  # what `resume` found last, likewise

    def put(self, name: str, log: StreamLog | Fanouts, *, expected: float = 0.0) -> None:
        """Add a rendition, or put another log in the place of one. Any thread.

        Meanwhile nothing may be appended to any log of the set: what sound they had up to now is not compared. A log
        that is put again is given the sound that it has missed, for its viewers may still be in it.

        Args:
            name: for rules and operators.
            log: the log, or its fan-outs.
            expected: bytes per second that count until they are measured; 0: none are known.
        """
        fanouts = log if isinstance(log, Fanouts) else Fanouts(log, flush_interval_s=self._flush_interval_s)
        fanouts.log.keep_keys(_KEPT_S)
        with self._lock:
            tail = fanouts.log.tail
            # As many messages as the others have heard since they were put.
            heard = max([self._heard, *(item.heard(item.log.tail) for item in self._renditions.values())])
            rendition = self._renditions.get(name) or self._left.get(name)
            missed: tuple[Item, ...] = ()
            if rendition is not None and log in (rendition.log, rendition.fanouts):
                count = heard - rendition.heard(tail)
                missed = self.find_sound(rendition.heard(tail), count)
                if len(missed) < count:  # then places before this one say nothing of what was heard
                    fanouts.log.drop_cache()
                rendition.sound = tail.counts[_AUDIO] + len(missed) - heard
                rendition.ended_at = rendition.last_ms = rendition.waits_until = None
            else:
                if rendition is not None and rendition.ended_at is None:
                    self._end_locked(rendition)
                rendition = _Rendition(name, fanouts, tail.counts[_AUDIO] - heard)
                if self._watches:
                    self._starts = {**self._starts, name: tail}
            rendition.expected = expected
            self._left.pop(name, None)
            self._renditions = {**self._renditions, name: rendition}
        for _, wire, since in missed:
            fanouts.log.append(wire, _AUDIO, since)

    def remove(self, name: str) -> None:
        """Remove a rendition: its viewers go on in the nearest one. Any thread; harmless where there is none."""
        with self._lock:
            left = dict(self._renditions)
            gone = left.pop(name, None)
            self._renditions = left
            if gone is not None:
                self._end_locked(gone)

    def _end_locked(self, gone: _Rendition) -> None:
        gone.ended_at, gone.last_ms = gone.heard(gone.log.tail), self._last_ms(gone)
        gone.log.keep_keys(0)
        self._heard = max(self._heard, gone.ended_at)
        self._left[gone.name] = gone
        for name in [*self._left][:-_MOST_LEFT]:
            del self._left[name]

    def view(self, connection: Follower, *, since: float | None = None) -> SetPlace:
        """Have a connection follow the set. The connection's thread.

        Args:
            connection: follows no log yet.
            since: begin with the first key frame from this time on that is kept, in seconds. None: with the last one.

        Raises:
            LocalProtocolError: the connection follows a log already, or the set is empty.
        """
        return SetPlace(connection, self, since)

    def rates(self, now: float | None = None) -> dict[str, float]:
        """Return bytes per second of each rendition whose rate is known, smallest first. Any thread.

        Args:
            now: leave out those that have stopped by this time, in seconds. None: all.
        """
        rates = {
            name: item.log.rates.bytes_per_s or item.expected
            for name, item in self._renditions.items()
            if (item.log.rates.bytes_per_s or item.expected) and (now is None or not item.silent(now))
        }
        return dict(sorted(rates.items(), key=lambda rate: rate[1]))

    def carried(self, now: float) -> list[float | None]:
        """Return bytes per second of lines that do not carry the largest rendition. None: not known. Any thread."""
        found = [(place, *seen) for place, seen in list(self._carried.items())]
        for place, at, _ in found:
            if now - at > _CARRIED_S:
                self._carried.pop(place, None)
        return [carried for _, at, carried in found if now - at <= _CARRIED_S]

    def note_carried(self, place: SetPlace, now: float, carried: float | None) -> None:
        if self.begins_in:
            self._carried[place] = now, carried

    def forget_carried(self, place: SetPlace) -> None:
        self._carried.pop(place, None)

    def order(self) -> list[str]:
        """Return the names of all renditions, smallest first. Any thread."""
        found = self._renditions.values()
        rates = [(item.log.rates.bytes_per_s, item.name) for item in found]
        sizes = [(item.log.tail.offset, item.name) for item in found]  # in the first seconds no rate is known
        return [name for _, name in sorted(rates if all(rate for rate, _ in rates) else sizes)]

    # -- for places and watches

    def begin(self, now: float) -> dict[str, float]:
        """Return the rates that a viewer begins by; in the first seconds only their order says something."""
        going = [item for item in self._renditions.values() if not item.silent(now)]
        shown = [item for item in going if item.log.keys] or going
        sizes = [(item.log.tail.offset, item.name) for item in shown]
        return self.rates(now) or {name: float(size) for size, name in sorted(sizes)}

    def find_sound(self, heard: int, count: int) -> tuple[Item, ...]:
        """Return the next `count` sound messages behind `heard` ones, from a log that has kept them; or none."""
        for item in self._renditions.values() if 0 < count <= MOST_SOUND else ():
            entry = next((key for key in reversed(self.starts_in(item)) if item.heard(key) <= heard), None)
            known = 0 if entry is None else heard - item.heard(entry)
            if entry is not None and len(found := next_sound(entry, known + count)) == known + count:
                return found[known:]
        return ()

    def starts_in(self, rendition: _Rendition) -> tuple[Entry, ...]:
        """Return where a viewer can go on in a rendition: key frames, and where it began if it was put lately."""
        began = self._starts.get(rendition.name)
        return (() if began is None else (began,)) + (rendition.log.keys or (rendition.log.tail,))

    def forget_starts(self, now: float) -> None:
        """Let go of where logs begin that were put long ago: it holds all that came since."""
        if self._starts:
            with self._lock:
                kept = {
                    name: entry
                    for name, entry in self._starts.items()
                    if entry.next is None or now - entry.enqueued_at <= _KEPT_S
                }
                self._starts = kept

    def forget_ways(self) -> None:
        """Let go of what `cross` and `resume` found, which holds logs."""
        self.crossing = self._resumed = None

    def find(self, name: str) -> _Rendition | None:
        return self._renditions.get(name)

    def watch(self, group: PollGroup) -> _Watch:
        with self._lock:
            watch = self._watches.get(group)
            if watch is None:
                watch = self._watches[group] = _Watch(self, group)
            return watch

    def forget_watch(self, group: PollGroup) -> None:
        with self._lock:
            self._watches.pop(group, None)
            if not self._watches:
                self._starts = {}

    def meet(self, key: Entry, left: _Rendition, entered: _Rendition, now: float) -> Entry | float | None:
        """Return the key frame of `entered` that is the same as `key` of `left`.

        Returns:
            Until when it is waited for, in seconds, where it may still come; None: there is none.
        """
        keys = entered.log.keys
        twin = self._twin(key, keys)
        if twin is not None:
            return twin
        until = key.enqueued_at + _HOLD_S
        if not keys or now >= until or self._apart(keys[-1], key) > 0:
            return None
        before = [other for other in left.log.keys if other.sequence < key.sequence]
        return until if any(self._twin(other, keys) for other in before[-_LATELY:]) else None

    def crosses(self, left: _Rendition, entered: _Rendition) -> bool:
        """Return whether to change over at any picture, for key frames have not met lately."""
        keys = entered.log.keys
        return self._times is not None and not any(self._twin(key, keys) for key in left.log.keys[-_LATELY:])

    def cross(
        self, picture: Entry, left: _Rendition, entered: _Rendition, shown_ms: int | None
    ) -> Splice | Entry | None:
        """Return how a viewer goes on in `entered` before a picture of `left`.

        Args:
            picture: comes next.
            left: rendition that is left.
            entered: rendition that is entered.
            shown_ms: media time of the last picture that was sent. None: not known.

        Returns:
            None: there is no key frame of `entered` just before. The key frame: what follows it is not published yet.
        """
        times = self._times
        if times is None or shown_ms is None:
            return None
        asked = (left, entered, picture.sequence, shown_ms, entered.log.tail.sequence)
        crossing = self.crossing
        if crossing is not None and crossing[0] == asked:
            return crossing[1]
        near = (key for key in reversed(entered.log.keys) if -_CROSS_MS <= self._apart(key, picture) <= 0)
        key = next(near, None)
        found = key and splice(picture, key, left.heard(picture) - entered.heard(key))
        way = (found and raise_times(found, shown_ms, times)) or key
        self.crossing = (asked, way)
        return way

    def resume(self, place: Entry, left: _Rendition, entered: _Rendition, most_bytes: float) -> Splice | Entry | None:
        """Return how a viewer at `place` of a rendition that has ended goes on within a group of `entered`.

        Returns:
            None: there is no key frame of it that is not behind what was sent last, or more than `most_bytes` since.
            The key frame: what comes next is not published yet.
        """
        times = self._times
        entry: Entry | None = place
        while entry is not None and entry.message_class not in VIDEO_CLASSES:
            entry = entry.next
        if times is None:
            return None
        shown_ms = times.time_of(entry.wire) - 1 if entry is not None else self._last_ms(left)
        if shown_ms is None:
            return None
        keys = reversed(entered.log.keys)
        key = next((key for key in keys if apart_ms(times.time_of(key.wire), shown_ms) <= _MEET_PUBLISHED_MS), None)
        if key is None or entered.log.tail.offset - key.offset > most_bytes:
            return None
        asked = (left, entered, place.sequence, shown_ms, entered.log.tail.sequence)
        if self._resumed is not None and self._resumed[0] == asked:
            return self._resumed[1]
        missed = entered.heard(key) - left.heard(place)
        missing = self.find_missing(place, left, missed)
        found = splice(place, key, -missed) if missed < 0 else Splice((*new_headers(place, key), *missing), key)
        way = (found and raise_times(found, shown_ms, times, in_order=True)) or key
        self._resumed = (asked, way)
        return way

    def find_missing(self, place: Entry, left: _Rendition, count: int) -> tuple[Item, ...]:
        """Return `count` sound messages from `place` on, of which the log that was left may have but a part."""
        heard = left.heard(place)
        missing = next_sound(place, count if left.ended_at is None else min(count, left.ended_at - heard))
        return missing + self.find_sound(heard + len(missing), count - len(missing))

    def _last_ms(self, left: _Rendition) -> int | None:
        """Return the media time of the last picture of a rendition. None: not known."""
        entry, last = left.log.keys[-1] if left.log.keys else left.log.cached, None
        while entry is not None:
            last, entry = (entry if entry.message_class in VIDEO_CLASSES else last), entry.next
        return left.last_ms if last is None or self._time_of is None else self._time_of(last.wire)

    def wanted(self, prefix: tuple[Item, ...]) -> tuple[Item, ...]:
        wanted = self._at_change
        if wanted is None:
            return prefix
        return tuple(item for item in prefix if item[0] is not MessageClass.HEADER or wanted(item[1]))

    def time_of(self, picture: Entry) -> int | None:
        return None if self._time_of is None else self._time_of(picture.wire)

    def _twin(self, key: Entry, keys: tuple[Entry, ...]) -> Entry | None:
        """Return the one of `keys` that is the same as `key`; it is looked for from the newest on, where it mostly is.

        Each viewer that may change over asks this, at each key frame, and there may be many of both.
        """
        nearest, most_ms = None, float(_MEET_MS if self._time_of is not None else _MEET_PUBLISHED_MS)
        for other in reversed(keys):
            apart_ms = self._apart(other, key)
            if abs(apart_ms) <= most_ms:
                nearest, most_ms = other, abs(apart_ms)
            elif apart_ms < 0:
                break
        return nearest

    def _apart(self, one: Entry, other: Entry) -> float:
        """Return by how many milliseconds `one` is later than `other`."""
        if self._time_of is None:
            return (one.enqueued_at - other.enqueued_at) * 1000
        return apart_ms(self._time_of(one.wire), self._time_of(other.wire))


class SetPlace(FollowPlace):
    """A connection's place among the viewers of a set; made by `StreamSet.view`. The connection's thread.

    Attributes:
        looks: what its rule was told, and what it chose.
        book: in which renditions it was, also before this place.
    """

    __slots__ = ("_everywhere", "_rendition", "_set", "_short_since", "_shown_ms", "book", "looks")

    def __init__(self, connection: Follower, streams: StreamSet, since: float | None = None) -> None:
        now = connection.sender.host.now()
        self.looks: Final = RenditionLooks(RenditionRule(now))
        self._set = streams
        rates = streams.begin(now) or streams.begin(0.0)  # where all have stopped, one of them
        first = self.looks.rule.first(rates) if rates else None
        if (own := streams.find(streams.begins_in)) is not None and not own.silent(now):
            first = Choice(own.name, _OWN)
        rendition = None if first is None else streams.find(first.name)
        if first is None or rendition is None:
            raise LocalProtocolError("a set without renditions cannot be followed", hint="call put() first")
        self._rendition = rendition
        self._everywhere = False  # whether to change over at any picture
        self._short_since: float | None = None  # since when the line is too short for the largest. None: it is not.
        self._shown_ms: int | None = None  # then: media time of the last picture at which it did not
        log = rendition.log
        start, waits = log.key_since(since), log.has_video
        if start is not None:
            super().__init__(connection, rendition.fanouts, start=start, prefix=start.gop.restart)
        else:
            super().__init__(connection, rendition.fanouts, prefix=() if waits else log.headers, wait_for_key=waits)
        if connection.renditions is None:
            connection.renditions = RenditionBook()
        self.book: Final = connection.renditions
        self.book.enter(now, first.name, first.why, streams.order)
        if connection.group is not None:
            self._watch(connection.group)

    @property
    def rendition(self) -> str:
        """The name of the rendition that is followed."""
        return self._rendition.name

    def follows(self, rendition: _Rendition | None) -> bool:
        return self._rendition is rendition

    @property
    def rule(self) -> RenditionRule:
        """What chooses."""
        return self.looks.rule

    def leave(self) -> None:
        self._unwatch()
        super().leave()

    def enter(self, group: PollGroup) -> None:
        super().enter(group)
        self._watch(group)

    def end(self) -> None:
        if self.connection.place is self:
            self._unwatch()
            super().end()
            self._set.forget_carried(self)
            self.book.leave(self.connection.sender.host.now())

    def _watch(self, group: PollGroup) -> None:
        now = self.connection.sender.host.now()
        self.look(now, {})  # where the first burst begins
        self._set.watch(group).add(self)

    def _unwatch(self) -> None:
        group = self.connection.group
        if group is not None:
            self._set.watch(group).remove(self)

    # -- for the watch

    def look(self, now: float, rates: dict[str, float]) -> None:
        """Look at the viewer, and see that it goes on as its rule chooses."""
        sender, rendition, looks = self.connection.sender, self._rendition, self.looks
        if sender.following is None or sender.closed:
            looks.next_at = now + LOOK_S
            return
        removed = self._set.find(rendition.name) is not rendition
        ended = removed or rendition.silent(now)
        if ended and not rates:
            rates = self._set.begin(now) or (self._set.begin(0.0) if removed else {})  # for the sound
        present, window_bytes = "" if ended else rendition.name, self.connection.window_bytes()
        seen = sender.line_look()
        looks.look(now, seen, rates, present, rendition.log, window_bytes)
        if self._set.begins_in:
            self._note_carried(now, seen, rates, present)
        if looks.rule.why_not_up and self.book.why == FIRST:
            self.book.why = looks.rule.why_not_up
        if looks.choice is None:
            if sender.guided:
                sender.set_guide(None)
        elif ended:
            looks.choice = Choice(looks.choice.name, ENDED)  # it may have been chosen before, for another reason
            self._go_on(now, seen)
        elif (entered := self._set.find(looks.choice.name)) is not None:
            everywhere = self._set.crosses(rendition, entered)
            if not sender.guided or everywhere != self._everywhere:
                self._everywhere, self._shown_ms = everywhere, None
                sender.set_guide(self, everywhere=everywhere)

    def _note_carried(self, now: float, seen: LineLook, rates: dict[str, float], present: str) -> None:
        """Tell the set what the line carries, if that is too little for the largest rendition."""
        largest = max(rates.values(), default=0.0)
        if rates.get(present, largest) < largest:
            evidence = self.rule.line.evidence(now)
            if evidence is None or evidence < largest:
                self._set.note_carried(self, now, rates.get(present) if evidence is None else evidence)
            return
        slow = seen.drain is not None and seen.drain < _SHORT_SHARE * largest and seen.delay_s >= _SHORT_S
        if not (seen.lagging and (slow or seen.delay_s > _LATE_SHARE * seen.target_s)):
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since >= _SHORT_FOR_S:
            self._set.note_carried(self, now, seen.drain)

    def choose_log(self, key: Entry) -> Hop | float | None:
        """Say whether to go on in the chosen rendition at `key`; see `flowctl.core.sending.contract.Guide`."""
        choice, left, group = self.looks.choice, self._rendition, self.connection.group
        entered = None if choice is None else self._set.find(choice.name)
        if entered is None or group is None or entered is left:
            return None
        now = self.connection.sender.host.now()
        found = self._find_way(key, left, entered, now)
        if isinstance(found, Splice):
            prefix = self._set.wanted(found.prefix)
            return self._hop(group, entered, now)._replace(start=found.start, prefix=prefix)
        if found is not None and now < found:
            return found
        if self._everywhere:
            self._shown_ms = self._set.time_of(key)
        return None

    def _find_way(self, key: Entry, left: _Rendition, entered: _Rendition, now: float) -> Splice | float | None:
        """Return how to go on in `entered` before `key`; until when to wait; None: not there."""
        twin = self._set.meet(key, left, entered, now) if key.message_class is _KEY else None
        if isinstance(twin, float):
            return twin
        if twin is not None:
            found: Splice | Entry | None = splice(key, twin, left.heard(key) - entered.heard(twin)) or twin
        else:
            found = self._set.cross(key, left, entered, self._shown_ms)
        return key.enqueued_at + _HOLD_S if isinstance(found, Entry) else found  # the rest is on its way

    def _go_on(self, now: float, seen: LineLook) -> None:
        """Leave a rendition that has ended, at the same sound and behind the last picture that was sent."""
        choice, left, group = self.looks.choice, self._rendition, self.connection.group
        entered = None if choice is None else self._set.find(choice.name)
        place = self.connection.sender.account(rows=False).entry
        if entered is None or group is None or place is None:
            return
        way = self._set.resume(place, left, entered, self._at_once_bytes(left, now, seen))
        if isinstance(way, Entry):
            left.waits_until = left.waits_until or now + _HOLD_S
            if now < left.waits_until:
                self.looks.next_at = now + _TOGETHER_S
                return
        if entered.log.ended:  # asked last: it may end meanwhile
            return  # what is followed tells of the end
        waits = not isinstance(way, Splice)
        way = (
            way._replace(prefix=self._set.wanted(way.prefix))
            if isinstance(way, Splice)
            else self._next_group(place, left, entered)
        )
        hop = self._hop(group, entered, now)
        self.connection.sender.switch(hop._replace(start=way.start, prefix=way.prefix, wait_for_key=waits))

    def _next_group(self, place: Entry, left: _Rendition, entered: _Rendition) -> Splice:
        """Return where the same sound goes on; pictures come with the next key frame."""
        heard = left.heard(place)
        keys = self._set.starts_in(entered)
        start = next((key for key in reversed(keys) if entered.heard(key) <= heard), keys[0])
        while start.next is not None and entered.heard(start) < heard:
            start = start.next
        # What was published before the other log's oldest key frame.
        return Splice(self._set.find_missing(place, left, entered.heard(start) - heard), start)

    def _at_once_bytes(self, left: _Rendition, now: float, seen: LineLook) -> float:
        """Return how much the line takes at once before its viewer is behind by half of the target delay."""
        evidence = self.rule.line.evidence(now) or 0.0
        line = max(evidence, 0.0 if seen.lagging else left.log.rates.bytes_per_s)
        return line * (min(_LATE_SHARE * seen.target_s, _AT_ONCE_S) - seen.delay_s)

    def _hop(self, group: PollGroup, entered: _Rendition, now: float) -> Hop:
        """Note that the viewer goes on in `entered`; return the way there."""
        left, looks, rates = self._rendition, self.looks, self._set.rates()
        cohort = entered.fanouts.on(group)
        group.call_soon(left.fanouts.release, group)
        why = "" if looks.choice is None else looks.choice.why
        stayed_s = now - self.book.since
        failed = looks.rule.switched(now, entered.name, rates)
        words = self.book.switch(now, entered.name, why, failed=failed)
        self._rendition, self.fanouts, looks.choice = entered, entered.fanouts, None
        return Hop(cohort, entered.log.tail, why=words, stayed_s=stayed_s)


class _Watch:
    """Looks at the viewers of a set on one poll group that lag or are not in the largest rendition. Its thread."""

    def __init__(self, streams: StreamSet, group: PollGroup) -> None:
        self._set = streams
        self._group = group
        self._places: dict[Sender, SetPlace] = {}
        self._looked_at: set[SetPlace] = set()  # those that are not in the largest, or are about to leave it
        self._largest: _Rendition | None = None  # not by name: another log may be put in its place
        self._armed = False

    def add(self, place: SetPlace) -> None:
        self._places[place.connection.sender] = place
        self._looked_at.add(place)
        if not self._armed:
            self._armed = True
            self._group.call_later(0.0, self._look)

    def remove(self, place: SetPlace) -> None:
        self._places.pop(place.connection.sender, None)
        self._looked_at.discard(place)
        if not self._places:
            self._set.forget_watch(self._group)

    def _look(self) -> None:
        self._armed = False
        self._set.forget_ways()
        if not self._places:
            return
        now = self._group.clock()
        self._set.forget_starts(now)
        rates = self._set.rates(now)
        largest = self._set.find([*rates][-1]) if rates else None
        if largest is not self._largest:
            self._largest = largest
            self._looked_at.update(self._places.values())
        lagging = set() if largest is None else {*largest.fanouts.lagging(self._group)}
        looked_at = self._looked_at.union(filter(None, map(self._places.get, lagging)))
        for place in looked_at:
            if now + _TOGETHER_S >= place.looks.next_at:
                self._look_at(place, now, rates)
        self._looked_at = {
            place
            for place in looked_at
            if not place.follows(largest) or place.looks.choice is not None or place.connection.sender in lagging
        }
        next_at = min((place.looks.next_at for place in self._looked_at), default=now + LOOK_S)
        self._armed = True
        self._group.call_later(min(max(next_at - now, _TOGETHER_S), LOOK_S), self._look)

    @staticmethod
    def _look_at(place: SetPlace, now: float, rates: dict[str, float]) -> None:
        try:
            place.look(now, rates)
        except Exception as error:  # noqa: BLE001 - a fault in one viewer must not keep the others where they are
            place.looks.next_at = now + LOOK_S
            place.connection.sender.host.handler_failed("look", error)
