"""A viewer's place in a stream log: what is queued for it, what it is spared, and where it starts again (pure).

Theory of operation. The cursor stands at the entry to be handed over next. What lies between it and the log's tail is
the viewer's queue, less what is refused. Refusals are a few *gates* (see `core.outgoing.refusals`), so the queue by
class is a subtraction of totals per gate, whatever its length; entries are looked at one by one only when they are
handed over. What goes out before the entry at the cursor (restart messages, control messages of a part that was
skipped) waits in a queue of *copies*.

A loss that breaks references (a key or inter frame) puts the cursor into *key wait*: inter frames are refused until
the next key frame of the log, before which the viewer gets the restart messages (metadata, codec configuration). The
wait ends without a key frame after `KEY_WAIT_S`, a minute after a cut, or two groups of pictures, whichever is longest;
that is counted.

*Leading pictures* of an open GOP refer to ones from before its key frame. Who goes on at that key frame after a loss
is not sent them.

*Lateness*: of a viewer that lags, what would arrive too late is left out when it comes next (`core.flow.timing`): a
picture with the rest of its group, which is a key wait.

*Joining*: a new viewer is given the GOP cache at once. What it was given so does not count against its limits while
its load falls or its age is below the low mark, and nothing is dropped for it meanwhile.

Threads: its Sender's lock guards it, but the log may grow meanwhile, and key frames appear, on the publisher's
thread. Each method therefore reads the tail once, and a key frame that is waited for is passed in `_settle` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import Final, NamedTuple

from flowctl.core.flow.counts import Balance, Tally, add_by_reason
from flowctl.core.flow.policy import BROKEN_MASK, DROPPABLE_MASK, Headroom
from flowctl.core.flow.state import CLASS_COUNT, MessageClass
from flowctl.core.flow.timing import Timing
from flowctl.core.outgoing.backlog import Item, MessageQueue
from flowctl.core.outgoing.latest import Value
from flowctl.core.outgoing.refusals import KeyWait, Refusals, Refused, frames_before
from flowctl.core.outgoing.streamlog import Entry, Gop, Place, StreamLog
from flowctl.reasons import DropReason

_CONTROL: Final = MessageClass.CONTROL
_HEADER: Final = MessageClass.HEADER
_KEY: Final = MessageClass.KEY
_INTER: Final = MessageClass.INTER
_AUDIO: Final = MessageClass.AUDIO
_PICTURES: Final = (_KEY, _INTER, MessageClass.DISPOSABLE)
_KEY_BIT: Final = 1 << _KEY
_INTER_BIT: Final = 1 << _INTER
_ALL_BUT_KEY: Final = DROPPABLE_MASK & ~_KEY_BIT
_ALL_BUT_KEY_AND_AUDIO: Final = _ALL_BUT_KEY & ~(1 << _AUDIO)

_CUT_WAIT_S: Final = 60.0
"""Time for which the next key frame is waited for after a cut: encoders in their default state make groups of up to 50
s (250 pictures, the default of x264, of a camera with 5 a second), and what goes out without one cannot be decoded."""
_PINNED_BYTES: Final = 1024 * 1024
_PINNED_RATIO: Final = 4
"""Least ratio of the log's bytes that a queue spans to its own size for it to be copied out of the log (`compact`)."""
_NEAR_MESSAGES: Final = 64
"""Messages ahead in which a picture is sought that could be left out for sound: more than come between two."""
_ENTRY_BYTES: Final = 512
"""Memory of an entry beside its message: two tuples of seven and nine slots, measured: 447 bytes."""


@dataclass(eq=False, slots=True)
class Crossroads:
    """A viewer may go on in another log at the next key frame: its cursor stops before each, to be told what to do."""

    everywhere: bool = False  # or at any picture
    passed: int = -1  # sequence of the last picture at which it went on in its log
    holds: bool = False  # whether it waits there to be told

    def stops(self, entry: Entry) -> bool:
        at = entry.message_class
        return (at is _KEY or (self.everywhere and at in _PICTURES)) and entry.sequence != self.passed


class HandedValue(NamedTuple):
    """A value among the messages that `peek` returned, without them: the kernel may take none of these for hours."""

    at: int  # its index among the messages
    sequence: int
    size_bytes: int  # as it counts while it waits
    saved_bytes: int  # by which it is shorter in the form of a twin
    key: str


class Gathered(NamedTuple):
    """What comes next of a log, for a plain turn."""

    wires: list[bytes]
    size_bytes: int  # of them, and what was ahead
    copied: int  # of them, those that are not entries of the log
    end: Entry  # the entry behind them
    marks: list[tuple[int, float]]  # (bytes before a place among them, since when what is there has waited)


class LogCursor:
    """One viewer's position in one log. Not thread-safe: its Sender's lock guards it.

    The log may grow meanwhile, on the publisher's thread: each method reads the tail once, after the place.

    Attributes:
        chain: the log whose entries it stands at: the followed one, but see `core.outgoing.conflation`.
        place: where it stands; shared with the cohort while in one.
        joined_at: when it began to follow the log, in seconds.
        served_at: when it last got something; set by the judgement, read where values of keys wait.
        joining_to: where what joining gave ends. None: joining is over.
        cached_bytes: what joining gave, of what was published before: wire bytes.
        crossroads: where it may go on in another log. None: it stays in this one.
        mask: what the policy refuses in the present state, as bits by `MessageClass`.
        restarts: times it was brought to a key frame after a loss.
        key_waits_expired: times no key frame came in time.
    """

    __slots__ = (
        "_base_counts",
        "_base_sizes",
        "_copies",
        "_dropped",
        "_extra",
        "_refusals",
        "_stop",
        "_wait",
        "_went_on",
        "cached_bytes",
        "chain",
        "crossroads",
        "joined_at",
        "joining_to",
        "key_waits_expired",
        "log",
        "mask",
        "place",
        "restarts",
        "served_at",
    )

    def __init__(
        self,
        log: StreamLog,
        *,
        now: float,
        start: Entry | None = None,
        prefix: tuple[bytes, ...] = (),
        wait_for_key: bool = False,
    ) -> None:
        tail = log.tail
        start = start or tail
        self.log = self.chain = log
        self.place = Place(start)
        self.joined_at = self.served_at = now
        self.joining_to: Entry | None = tail
        self.cached_bytes = tail.offset - start.offset
        self.mask = 0
        self.crossroads: Crossroads | None = None
        self.restarts = 0
        self.key_waits_expired = 0
        self._stop: Entry | None = None  # where to end: nothing published after is for this viewer
        self._base_counts = start.counts
        self._base_sizes = start.sizes
        # Sequences of the key frames at which it went on after a loss, until a picture behind their leading ones comes.
        self._went_on: tuple[int, ...] = ()
        # The rest is made when first needed: most viewers never lag.
        self._wait: KeyWait | None = None
        self._refusals: Refusals | None = None
        self._copies: MessageQueue[Item] | None = None
        self._extra: Tally | None = None  # messages that are not entries: the restart messages
        self._dropped: dict[DropReason, Tally] | None = None
        if prefix:
            self._offer_restart(prefix)
            for wire in prefix:
                self._push_copy(_HEADER, wire, now)
        if wait_for_key:
            self._wait = KeyWait(start, now, lost=True)
            self._refuse_from(start, BROKEN_MASK, DropReason.KEY_WAIT, now)

    # -- the queue

    @property
    def entry(self) -> Entry:
        return self.place.entry

    @property
    def copied(self) -> tuple[int, int]:
        """(wire bytes, messages) of the copies: what is queued but not read from the log."""
        copies = self._copies
        return (0, 0) if copies is None else (copies.size_bytes, len(copies))

    @property
    def span(self) -> tuple[int, int]:
        """(wire bytes, messages) up to the end of the log, refused or not: no less than what is queued."""
        entry, tail, copies = self.place.entry, self._tail(), self._copies
        size, messages = tail.offset - entry.offset, tail.sequence - entry.sequence
        return (size, messages) if copies is None else (size + copies.size_bytes, messages + len(copies))

    def load(self) -> tuple[int, int]:
        """Return (wire bytes, messages) that are queued and not refused."""
        return self._load_between(self.place.entry, self._tail())

    def bounded(self) -> tuple[int, int]:
        """Return what of the load limits are for: all but the values of keys, which are not this viewer's alone."""
        return self._load_between(self.place.entry, self._tail())

    def _load_between(self, entry: Entry, end: Entry) -> tuple[int, int]:
        size, messages = end.offset - entry.offset, end.sequence - entry.sequence
        refusals, copies = self._refusals, self._copies
        if refusals is not None:
            refused_size, refused_messages = refusals.load_between(entry, self._refused_until(end))
            restarts = refusals.restarts() if refusals.ahead else ()
            size += sum(map(len, restarts)) - refused_size
            messages += len(restarts) - refused_messages
        if copies is not None:
            size += copies.size_bytes
            messages += len(copies)
        return size, messages

    def allowance(self) -> tuple[int, int]:
        """Return (bytes, messages) of the load that joining gave and that do not count against the limits."""
        end, entry = self.joining_to, self.place.entry
        return (0, 0) if end is None or end.sequence < entry.sequence else self._load_between(entry, end)

    def oldest_at(self) -> float | None:
        """Return since when the oldest queued message waits for this viewer, in seconds. None: nothing is queued."""
        self._settle()
        if self._copies is not None:
            return self._copies.oldest_at
        entry = self.place.entry
        return None if entry is self._tail() else max(entry.enqueued_at, self.joined_at)

    def oldest_counted_at(self) -> float | None:
        end = self.joining_to
        if end is None or end.sequence < self.place.entry.sequence:
            return self.oldest_at()
        return None if end is self._tail() else max(end.enqueued_at, self.joined_at)

    @property
    def values_wait(self) -> bool:
        """Whether values of keys wait: they are as old as the time in which this viewer got nothing."""
        return False

    @property
    def cache_taken(self) -> bool:
        end = self.joining_to
        return end is None or (end.sequence <= self.place.entry.sequence and self._copies is None)

    @property
    def caught_up(self) -> bool:
        """Whether nothing is queued, now that refused messages are stepped over."""
        self._settle()
        return self.place.entry is self._tail() and self._copies is None

    @property
    def plain(self) -> bool:
        """Whether this viewer takes every message from here on, so that it can be served together with others."""
        return (
            not self.mask
            and self._wait is None
            and self.joining_to is None
            and self._refusals is None
            and not self._went_on
            and (self.crossroads is None or not self.crossroads.everywhere)
        )

    @property
    def refuses(self) -> bool:
        """Whether anything is refused, here or ahead: only then does asking for the queue move this cursor."""
        return self._refusals is not None

    # -- in the cohort and out of it

    def stands_at(self, entry: Entry) -> bool:
        """Whether nothing is queued before `entry`, and all from there on."""
        return self.caught_up and self.place.entry is entry

    def enter(self, place: Place) -> None:
        """Share `place`, which is where this viewer stands; its own would hold the log from here on."""
        self.place = place

    def stand_alone(self) -> None:
        """Go on alone from where the cohort stood and what it wrote."""

    # -- handing over

    def peek(self, most: int, budget_bytes: int, timing: Timing | None = None) -> list[Item]:
        """Return the next messages to send as (class, wire, since): at most `most`, none after `budget_bytes`.

        What is returned ends before a place where something else comes first (restart messages), and before a message
        that would be late; ask again then. What is late and comes next is left out for good.
        """
        return self._peek_beside(iter(()), [], most, budget_bytes, timing)

    def _peek_beside(
        self,
        values: Iterator[Value],
        places: list[HandedValue],
        most: int,
        budget_bytes: int,
        timing: Timing | None,
    ) -> list[Item]:
        """Return the next messages as `peek` does, and `values` in their `places` among them."""
        self._settle()
        self._leave_out_leading()
        if timing is not None:
            timing = self._leave_out(timing)
        crossroads = self.crossroads
        if crossroads is not None and self.undecided() is not None:
            return []  # not its restart messages either: those of another log may come in their place
        items: list[Item] = []
        size = 0
        for item in self._copies or ():
            if len(items) >= most or size >= budget_bytes:
                return items
            items.append(item)
            size += len(item[1])
        entry, tail, joined_at = self.place.entry, self._tail(), self.joined_at
        refusals = self._refusals
        mask, ahead = (refusals.mask, iter(refusals.ahead)) if refusals is not None else (0, iter(()))
        gate, value = next(ahead, None), next(values, None)
        while len(items) < most and size < budget_bytes:
            if value is not None and value.after <= entry.sequence:
                items.append(self._hand_value(value, len(items), places))
                size += len(items[-1][1])
                value = next(values, None)
                continue
            if entry is tail:
                break
            if gate is not None and entry is gate.start:
                if gate.restart:
                    break
                mask, gate = gate.mask, next(ahead, None)
            following = entry.next
            if following is None or self._awaited(entry) or (crossroads is not None and crossroads.stops(entry)):
                break
            if not mask >> entry.message_class & 1:
                if self._went_on and self._leads(entry):
                    break
                if timing is not None and items and self._is_late(entry, timing, size):
                    break
                items.append((entry.message_class, entry.wire, max(entry.enqueued_at, joined_at)))
                size += len(entry.wire)
            entry = following
        return items

    def _hand_value(self, value: Value, index: int, places: list[HandedValue]) -> Item:
        twin = value.twin if self.log.transform is not None else None
        wire, plain_bytes = twin or value.wire, len(value.wire)
        places.append(HandedValue(index, value.sequence, plain_bytes, plain_bytes - len(wire), value.key))
        return MessageClass.DATA, wire, max(value.since, self.served_at)

    def gather(self, budget_bytes: int, timing: Timing | None, ahead_bytes: int = 0) -> Gathered | None:
        """Return what `peek` would, behind `ahead_bytes` of a message in flight, for plain turns.

        Returns:
            None: something is to be decided first: about a gate, leading pictures, a crossroads, or what would be late.
        """
        entry, copies = self.place.entry, self._copies
        if self._wait is not None and entry.message_class is _KEY and entry.next is not None:
            self._settle()  # it is waited for
            copies = self._copies
        refusals, mask = self._refusals, 0
        if self._went_on or self.crossroads is not None or self.joining_to is not None:
            return None
        if refusals is not None:
            if refusals.ahead:
                return None
            mask = refusals.here.mask
        wires = [] if copies is None else [item[1] for item in copies]
        if copies is not None and copies.tally[_HEADER] != len(wires):
            return None
        copied, size = len(wires), ahead_bytes + sum(map(len, wires))
        tail, joined_at = self._stop or self.chain.tail, self.joined_at
        since = max(entry.enqueued_at, joined_at)
        marks, late = [(ahead_bytes, since)], False
        if timing is not None:
            due, per_byte = timing.due, timing.seconds_per_byte
            moment = timing.now + timing.held_bytes * per_byte
        while entry is not tail and size < budget_bytes and (following := entry.next) is not None:
            message_class = entry.message_class
            if message_class is _KEY and self._wait is not None:
                break  # from here on more is accepted, once this stands here
            if not mask >> message_class & 1:
                wire, waited_from = entry.wire, max(entry.enqueued_at, joined_at)
                end = size + len(wire)
                if timing is not None and moment - waited_from + end * per_byte > due[message_class]:
                    late = timing.late(message_class, len(wire), waited_from, size, entry.gop.key_bytes)
                if late:
                    break
                if message_class is _KEY:
                    marks += (size, since), (size, waited_from), (end, waited_from)
                wires.append(wire)
                size, since = end, waited_from
            entry = following
        if len(wires) == copied and (late or copied):
            return None  # restart messages go with their key frame
        marks.append((size, since))
        return Gathered(wires, size, copied, entry, marks)

    def pass_gathered(self, gathered: Gathered) -> None:
        """Move to the entry behind what was gathered: all of it is sent."""
        refusals, place = self._refusals, self.place
        if gathered.copied:
            self._copies = None
        for figures, reason in () if refusals is None else refusals.here_between(place.entry, gathered.end):
            self._tally(reason).add_figures(figures)
        place.entry = gathered.end
        self._settle()

    def pass_messages(self, count: int) -> None:
        """Move past the first `count` messages that `peek` returned: they are sent, or in flight."""
        if self._copies is not None:
            count -= self._copies.pass_messages(count)
            self._copies = self._copies or None
        place = self.place
        while count:
            if self._refusals is not None:
                self._settle()
            following = place.entry.next
            if following is None:  # cannot happen while `count` is what peek returned
                raise AssertionError("took more messages than the log holds")
            place.entry = following
            count -= 1
        if self._refusals is not None:
            self._settle()

    # -- another log in place of this one

    def undecided(self) -> Entry | None:
        """Return the key frame, or picture, that comes next, if it is still to be decided in which log to go on."""
        self._settle()
        entry, crossroads, copies = self.place.entry, self.crossroads, self._copies
        if (
            crossroads is None
            or entry.next is None
            or not crossroads.stops(entry)
            or (copies is not None and copies.tally[_CONTROL] + copies.tally[_HEADER] != len(copies))
        ):
            return None
        return entry

    def switch(
        self, log: StreamLog, start: Entry, prefix: Sequence[Item], now: float, *, wait_for_key: bool = False
    ) -> None:
        """Go on in `log` at `start`, behind `prefix`, instead of with what is queued of the present log.

        The accounts go on: what was queued is not dropped, but was never for this viewer. What the state refuses is
        refused from `start` on. A wait for a key frame ends, unless one is to begin: `start` is a key frame, or follows
        one that is in `prefix`.
        """
        entry, tail, refusals, copies = self.place.entry, self._tail(), self._refusals, self._copies
        passed = Tally(map(sub, (*entry.counts, *entry.sizes), (*self._base_counts, *self._base_sizes)))
        extra = self._extra = self._extra or Tally()
        if refusals is not None:
            for figures, why in self._refused(entry, tail):  # it stays lost: counts of what was dropped never fall
                self._tally(why).add_figures(figures)
                passed.add_figures(figures)
            for wire in refusals.restarts():
                extra.subtract(_HEADER, len(wire))
        if copies is not None:
            superseded = Tally()
            # Before a key frame there is none; else sound among them comes before `start`, and is still to be sent.
            kept = (_CONTROL, _AUDIO) if wait_for_key else (_CONTROL,)
            copies.drop(lambda item: item[0] not in kept, superseded)
            extra.subtract_figures(superseded)
            self._copies = copies or None
        base = tuple(map(sub, (*start.counts, *start.sizes), passed))
        self._base_counts, self._base_sizes = base[:CLASS_COUNT], base[CLASS_COUNT:]
        self.log = self.chain = log
        self.place, self.joining_to = Place(start), None
        self._wait = self._refusals = None
        self._went_on = (start.gop.key_sequence,)
        mask = self.mask
        self._accept_from(start, mask, DropReason.REFUSED, (), now)
        if wait_for_key or mask & (_KEY_BIT | _INTER_BIT):
            lost = wait_for_key or mask & _KEY_BIT or any(item[0] is _KEY for item in prefix)  # with what is behind it
            wait = self._wait = KeyWait(start, now, lost=True) if lost else KeyWait.after(start)
            self._refuse_from(start, wait.mask, wait.reason, now)
        for message_class, wire, since in prefix:
            if not mask >> message_class & 1:
                extra.add(message_class, len(wire))
                self._push_copy(message_class, wire, since)

    def compact(self) -> None:
        """Copy what is queued out of the log where that lets much more of the log go.

        A viewer that is refused nearly everything (HARD_LIMIT held, a policy that drops all while overloaded) would
        keep all that is published behind the few messages it still has to get.
        """
        refusals = self._refusals
        if refusals is None or self.joining_to is not None:
            return
        tail, entry = self._tail(), self.place.entry
        span = tail.offset - entry.offset + (tail.sequence - entry.sequence) * _ENTRY_BYTES
        size, messages = self._load_between(entry, tail)
        if span <= _PINNED_BYTES or span <= _PINNED_RATIO * (size + messages * _ENTRY_BYTES):
            return
        self._copy_out(tail.sequence)

    def _copy_out(self, end: int) -> None:
        """Copy what is queued before message number `end` out of the log."""
        self._settle()
        while (entry := self.place.entry).sequence < end and entry.next is not None:
            if self._spoilt(entry):
                self._pass_by(entry, entry.next, DropReason.KEY_WAIT)
            else:
                self._push_copy(entry.message_class, entry.wire, entry.enqueued_at)
                self.place.entry = entry.next
            self._settle()

    # -- what comes too late

    def _leave_out(self, timing: Timing) -> Timing | None:
        """Leave out what comes next and would be late, a key frame with the restart messages that are for it alone.

        Returns:
            By what the rest is late. None: no key frame would end a cut, so nothing is left out.
        """
        if self._cut_would_not_end:
            return None
        while (entry := self.place.entry) is not self._tail() and entry.next is not None:
            item, copies, ahead = entry.message_class, self._copies, self.copied[0]
            if not self._is_late(entry, timing, ahead):
                break
            if item is _INTER:
                self._cut_from(KeyWait(entry, timing.now, lost=True), entry, timing.now)
            elif item is _KEY:
                if not (timing.key_firm or entry.gop.next_key is not None or self._delays_sound(entry, timing, ahead)):
                    break  # nothing could stand in for it
                if copies is not None and self._restarts_at(entry, copies):
                    # Else what comes with every key frame would take the line from those that are in time.
                    self._drop_copies(DropReason.LATE, kept=())
                self._pass_by(entry, entry.next)
                self._cut_from(KeyWait.after(entry), self.place.entry, timing.now)
            elif item is MessageClass.DISPOSABLE or not timing.sound_last or self._without_pictures(timing, ahead):
                self._pass_by(entry, entry.next)
            else:
                break
            self._settle()
            self._leave_out_leading()
        return timing

    def _leads(self, entry: Entry) -> bool:
        """Whether `entry`, which comes next, is to be left out as a leading picture; else it is noted that it comes."""
        if self._spoilt(entry):
            return True
        self._note_picture(entry)
        return False

    def _spoilt(self, entry: Entry) -> bool:
        """Whether `entry` is a leading picture, and this viewer went on at the key frame before it."""
        key_sequence = entry.gop.key_sequence
        return entry.leading and entry.sequence > key_sequence and key_sequence in self._went_on

    def _leave_out_leading(self) -> None:
        """Leave out the leading pictures that come next and cannot be decoded."""
        while self._went_on and self._copies is None:
            entry, key_sequence = self.place.entry, self._went_on[0]
            if entry is self._tail() or entry.next is None or entry.gop.key_sequence < key_sequence:
                return
            if entry.gop.key_sequence > key_sequence:
                self._went_on = self._went_on[1:]
            elif self._spoilt(entry):
                self._pass_by(entry, entry.next, DropReason.KEY_WAIT)
                self._settle()
            else:
                self._note_picture(entry)
                return

    def _note_picture(self, entry: Entry) -> None:
        """Remember that `entry` comes, which is not left out: no leading ones come behind other pictures."""
        if entry.message_class in (_INTER, MessageClass.DISPOSABLE) and self._went_on[-1] <= entry.gop.key_sequence:
            self._went_on = ()

    def cut_behind(self, timing: Timing) -> bool:
        """Leave out the rest of the open group from where it would be late behind all that waits; return whether any.

        Sooner than when it comes next: for a queue that nears its limit while a large message is on its way.
        """
        refusals, entry, tail = self._refusals, self.place.entry, self._tail()
        if (
            self._cut_would_not_end
            or self._wait is not None
            or entry.gop is not tail.gop
            or (refusals is not None and refusals.ahead)
        ):
            return False
        ahead = self.copied[0]
        while entry is not tail and entry.next is not None:
            message_class = entry.message_class
            if not self.mask >> message_class & 1:
                if message_class is _INTER and self._is_late(entry, timing, ahead):
                    self._cut_from(KeyWait(entry, timing.now, lost=True), entry, timing.now)
                    return True
                ahead += len(entry.wire)
            entry = entry.next
        return False

    @property
    def _cut_would_not_end(self) -> bool:
        """Whether no key frame would end a cut: then nothing is left out."""
        return self.joining_to is not None or self._stop is not None or bool(self.mask & _KEY_BIT)

    def _cut_from(self, wait: KeyWait, start: Entry, now: float) -> None:
        """Leave out the rest of a group of pictures from `start` on, whatever else is refused meanwhile."""
        wait.lost, wait.least_s, wait.reason = True, _CUT_WAIT_S, DropReason.LATE
        self._wait_from(wait, start, BROKEN_MASK, DropReason.LATE, now)

    @staticmethod
    def _restarts_at(entry: Entry, copies: MessageQueue[Item]) -> bool:
        """Whether `entry` is a key frame and the copies are just its restart messages."""
        restart = entry.gop.restart
        return (
            entry.message_class is _KEY
            and len(copies) == len(restart)
            and all(item[1] is wire for item, wire in zip(copies, restart, strict=True))
        )

    def _is_late(self, entry: Entry, timing: Timing, ahead_bytes: int, as_class: MessageClass | None = None) -> bool:
        """Whether `entry`, or a message of class `as_class` in its place, would be late behind `ahead_bytes`."""
        since = max(entry.enqueued_at, self.joined_at)
        as_class = entry.message_class if as_class is None else as_class
        return timing.late(as_class, len(entry.wire), since, ahead_bytes, entry.gop.key_bytes)

    def _delays_sound(self, key: Entry, timing: Timing, ahead_bytes: int) -> bool:
        """Whether sound is kept longest and a key frame is so late that the sound after it would be left out too."""
        return (
            timing.sound_last
            and not self.mask >> _AUDIO & 1
            and self._is_late(key, timing, ahead_bytes, _AUDIO)
            and self.log.sounds
        )

    def _pass_by(self, entry: Entry, following: Entry, reason: DropReason = DropReason.LATE) -> None:
        self._tally(reason).add(entry.message_class, len(entry.wire))
        self.place.entry = following

    def _without_pictures(self, timing: Timing, ahead_bytes: int) -> bool:
        """Whether no picture comes next that could be left out in the place of sound, or that is late as well."""
        refusals = self._refusals
        if not self.log.has_video or (refusals is not None and refusals.mask & _INTER_BIT):
            return True
        # A stream that has had pictures may have none any more: a camera is off, or one picture stands for a radio.
        tail, entry = self._tail(), self.place.entry
        if any(tail.counts[item] != entry.counts[item] for item in _PICTURES):
            return self._next_picture_late(timing, ahead_bytes)
        rates = self.log.rates.per_second(timing.now, tail.counts, tail.sizes)
        return rates is not None and not any(rates[0][item] for item in _PICTURES)

    def _next_picture_late(self, timing: Timing, ahead_bytes: int) -> bool:
        """Whether the next picture would be late even if it came now, or waits behind much sound."""
        entry: Entry | None = self.place.entry
        for _ in range(_NEAR_MESSAGES):
            if entry is None:
                return False
            message_class = entry.message_class
            if message_class in _PICTURES:
                return self._is_late(entry, timing, ahead_bytes, _INTER if message_class is _KEY else message_class)
            entry = entry.next
        return True

    # -- accounts

    def balance(self) -> Balance:
        """Return (accepted, dropped by reason, queued) of one instant; what is refused ahead counts as dropped."""
        entry, tail = self.place.entry, self._tail()
        end = (*tail.counts, *tail.sizes)
        accepted = tuple(map(sub, end, (*self._base_counts, *self._base_sizes)))
        queued = tuple(map(sub, end, (*entry.counts, *entry.sizes)))
        if self._extra is not None:
            accepted = tuple(map(add, accepted, self._extra))
        dropped = {reason: tuple(tally) for reason, tally in self._dropped.items()} if self._dropped else {}
        if self._copies is not None:
            queued = tuple(map(add, queued, self._copies.tally))
        if self._refusals is not None:
            waiting = Tally(queued)
            for figures, reason in self._refused(entry, tail):
                waiting.subtract_figures(figures)
                add_by_reason(dropped, {reason: figures})
            for wire in self._refusals.restarts():
                waiting.add(_HEADER, len(wire))
            queued = tuple(waiting)
        return accepted, dropped, queued

    @property
    def late(self) -> int:
        tally = self._dropped.get(DropReason.LATE) if self._dropped is not None else None
        return 0 if tally is None else sum(tally[:CLASS_COUNT])

    def pictures(self) -> tuple[int, int]:
        """Return (pictures that were published up to the place since joining, those of them that were not sent).

        Of a viewer that wants no pictures there are none. One that is refused everything, as while a hard limit is
        held, is no such viewer.
        """
        if self.mask & _KEY_BIT and self.mask != DROPPABLE_MASK:
            return 0, 0
        counts, base = self.place.entry.counts, self._base_counts
        passed = sum(counts[item] - base[item] for item in _PICTURES)
        return passed, sum(tally[item] for tally in (self._dropped or {}).values() for item in _PICTURES)

    # -- refusing

    def refuse(self, mask: int, reason: DropReason, now: float) -> None:
        """From the log's tail on, refuse the classes in `mask`; 0 accepts everything again.

        Where frames that others refer to are lost by it, they stay refused until the next key frame. While joining,
        nothing is refused; `end_joining` makes up for it.
        """
        if self._wait is not None:
            self.poll(now)  # under the mask that was in force up to here
        breaks = bool(mask & (_KEY_BIT | _INTER_BIT))
        if self._wait is not None and not breaks and self.mask & (_KEY_BIT | _INTER_BIT):
            # Until now it was the policy that kept frames back, so that giving up would not have brought one.
            self._wait.since = now
        self.mask = mask
        if self.joining_to is not None or self._stop is not None:
            return
        tail, wait = self.chain.tail, self._wait
        if wait is None:
            if breaks:
                self._wait = KeyWait(tail, now, lost=False)
                mask |= self._wait.mask
            self._accept_from(tail, mask, reason, (), now)
        elif not breaks and not wait.broken_at(tail):
            self._wait = None
            self._accept_from(tail, mask, reason, (), now)
        else:
            self._accept_from(tail, wait.mask, wait.reason, (), now)
            self._refuse_from(tail, mask, reason, now)

    def end_joining(self, reason: DropReason, now: float) -> None:
        """Stop treating the load as a joiner's; what the present state refuses is refused from now on."""
        self.joining_to = None
        if self.mask:
            self.refuse(self.mask, reason, now)

    def poll(self, now: float, *, replace: bool = False) -> bool:
        """Notice a key frame that was waited for, or that the wait has lasted too long; return whether it ended."""
        wait = self._wait
        if wait is None or self._stop is not None:
            return False
        if self.mask & _KEY_BIT:
            # Nothing can end the wait while key frames are refused as well, and it must not hold the log meanwhile.
            wait.rebase(self.chain.tail)
            return False
        inter = bool(self.mask & _INTER_BIT)
        ended = False
        while wait is not None and (key := wait.key) is not None:
            while inter and replace and key.gop.next_key is not None:
                key = key.gop.next_key
            if inter and replace:
                wait.lost = wait.lost or self._holds_frames(key)
                self._drop_up_to(key, DropReason.THINNED)
            self._resume_at(key)
            wait, ended = self._wait, True
        if wait is None or inter or now - wait.since < max(wait.least_s, 2 * self.log.gop_duration_s):
            return ended
        self._wait = None
        self.key_waits_expired += 1
        self._accept_from(self.chain.tail, self.mask, DropReason.REFUSED, self.log.headers, now)
        return True

    @property
    def waiting_for_key(self) -> bool:
        """Whether frames were lost and inter frames are refused until the next key frame."""
        return self._wait is not None and self._wait.broken_at(self._tail())

    # -- thinning

    def thin_to_key_frame(self, room: Headroom, now: float, reason: DropReason = DropReason.THINNED) -> None:
        """Skip to a key frame so that what stays fits.

        That is the first key frame from which on everything fits; else the newest one with its audio alone; else the
        next one to be published, with nothing before it. Without video, the oldest messages go.
        """
        self.poll(now)
        if self._sound_only:
            self._thin_oldest(room, reason)
            return
        entry, tail = self.place.entry, self._tail()
        newest: Entry | None = None
        key = entry if entry.gop.key_sequence == entry.sequence else entry.gop.next_key
        while key is not None and key.sequence < tail.sequence:
            newest = key
            if room.fits(tail.offset - key.offset, tail.sequence - key.sequence, key.enqueued_at):
                self._jump_to_key(key, reason)
                return
            key = key.gop.next_key
        if newest is not None and _key_and_audio_fit(newest, tail, room):
            self._jump_to_key(newest, reason)
            self._wait_from(KeyWait.after(newest), newest, _ALL_BUT_KEY_AND_AUDIO, reason, now)
        else:
            self._drop_all_droppable(tail, reason, _ALL_BUT_KEY, now)

    def skip_to_live(self, room: Headroom, now: float) -> bool:
        """Go to the newest key frame, its restart messages first; return whether there was one ahead.

        Where no key frame would get through, the oldest messages go instead, until what is left fits `room`.
        """
        if self.joining_to is not None:
            self.end_joining(DropReason.REFUSED, now)
        self.poll(now)
        start, tail = self.place.entry, self._tail()
        if self._sound_only:
            self._thin_oldest(room, DropReason.RETURNED)
            return self.place.entry is not start
        if self.mask & _KEY_BIT:
            return False  # nothing newer will be handed over; what is queued from before is all that there is
        newest: Entry | None = None
        key = start.gop.next_key
        while key is not None and key.sequence < tail.sequence:
            newest, key = key, key.gop.next_key
        if newest is None:
            return False
        self._jump_to_key(newest, DropReason.RETURNED)
        return True

    def skip_to_next_key(self, now: float) -> bool:
        """Go on with the next key frame that is published, and take nothing before it; return whether that is so."""
        if self.joining_to is not None:
            self.end_joining(DropReason.REFUSED, now)
        self.poll(now)
        if self._sound_only or self.mask & _KEY_BIT:
            return False
        self._drop_all_droppable(self._tail(), DropReason.RETURNED, _ALL_BUT_KEY, now)
        return True

    @property
    def _sound_only(self) -> bool:
        """Whether no frame will be handed over, from the cursor to the log's end: there is none, or all are refused."""
        refusals, copies = self._refusals, self._copies
        if not self.log.has_video:
            return True
        return (
            refusals is not None
            and bool(refusals.mask & _KEY_BIT)
            and all(gate.mask & _KEY_BIT for gate in refusals.ahead)
            and (copies is None or not (copies.tally[_KEY] or copies.tally[_INTER]))
        )

    def drop_droppable(self, reason: DropReason, now: float) -> None:
        """Drop all of the queue that may be dropped; a lost frame leads to waiting for the next key frame."""
        self._drop_all_droppable(self._tail(), reason, BROKEN_MASK, now)

    # -- the end

    def finish(self, now: float) -> None:
        """Take nothing that is published from now on; what is queued stays."""
        self.crossroads = None
        if self._stop is None:
            tail = self.chain.tail
            self.poll(now)  # a key frame that came already is still for this viewer
            self._end_at(tail, DropReason.THINNED)
            # The end links to all that is published from now on, for as long as the peer takes to read the rest.
            self._copy_out(tail.sequence)
            self._stop = self.place.entry = Entry(tail.sequence, tail.offset, tail.counts, tail.sizes, Gop(-1, (), 0.0))
            if self.joining_to is not None:
                self.joining_to = self._stop

    def drop_everything(self, reason: DropReason) -> None:
        """Drop the whole queue, whatever its class, and take nothing more: the viewer leaves."""
        self._end_at(self._tail(), reason)
        self._drop_up_to(self._tail(), reason, kept=())

    def _end_at(self, tail: Entry, reason: DropReason) -> None:
        self._stop = tail
        self._wait = None
        if self._refusals is not None:
            for gate in self._refusals.cut(tail.sequence):
                self._count_lost_restart(gate.restart, reason)

    # -- inside: places

    def _settle(self) -> None:
        """Step over refused entries at the cursor; a key frame that is waited for ends the wait here."""
        refusals = self._refusals
        if refusals is None:
            return
        place = self.place
        while True:
            self._pass_gates()
            if refusals.open_wide and self._wait is None:
                self._refusals = None
                return
            start, tail, mask = place.entry, self._tail(), refusals.mask
            until = refusals.ahead[0].start if refusals.ahead else tail
            wait = None if self.mask & _KEY_BIT else self._wait
            entry, awaited = start, False
            while entry is not until and (following := entry.next) is not None:
                if wait is not None and entry.message_class is _KEY and entry.sequence >= wait.start:
                    awaited = True
                    break
                if not mask >> entry.message_class & 1:
                    break
                entry = following
            if entry is not start:
                for figures, reason in refusals.here_between(start, entry):
                    self._tally(reason).add_figures(figures)
                place.entry = entry
            if awaited:
                self._resume_at(entry)
            elif entry is not until or not refusals.ahead:
                return

    def _awaited(self, entry: Entry) -> bool:
        """Whether `entry`, which is complete, is a key frame that ends the wait."""
        wait = self._wait
        return (
            wait is not None
            and entry.message_class is _KEY
            and entry.sequence >= wait.start
            and not self.mask & _KEY_BIT
        )

    def _resume_at(self, key: Entry) -> None:
        """`key`, which is not behind the cursor, ends the wait: from it on, accept what the state allows.

        Sound that was let through before it is left in its place; the restart messages go in front of it.
        """
        inter = self.mask & _INTER_BIT
        broken = self._wait is None or self._wait.broken_at(key)
        if broken and key.leading:
            self._went_on = (*self._went_on, key.sequence)
        self._wait = KeyWait.after(key) if inter else None
        mask, restart = self.mask | (BROKEN_MASK if inter else 0), key.gop.restart if broken else ()
        for gate in self._refusals.cut(key.sequence) if self._refusals is not None else ():
            if gate.start is key and gate.restart:
                # The wait before this one ended here too, and its restart messages are not out yet.
                broken, restart = False, ()
                self._accept_from(key, mask, DropReason.REFUSED, gate.restart, gate.since, offered=True)
            else:
                self._count_lost_restart(gate.restart, DropReason.THINNED)
        self.restarts += broken
        self._accept_from(key, mask, DropReason.REFUSED, restart, key.enqueued_at)

    def _jump_to_key(self, key: Entry, reason: DropReason) -> None:
        """Go to `key`, its restart messages first; do nothing where the cursor stands there already."""
        copies = self._copies
        if key is self.place.entry and (
            copies is None or copies.tally[_CONTROL] + copies.tally[_HEADER] == len(copies)
        ):
            return
        due = self._refusals is not None and any(gate.start is key and gate.restart for gate in self._refusals.ahead)
        self._drop_up_to(key, reason)
        self._went_on = (key.sequence,) if key.leading else ()
        self.restarts += 1
        if not due:
            self._offer_restart(key.gop.restart)
            for wire in key.gop.restart:
                self._push_copy(_HEADER, wire, key.enqueued_at)

    def _tail(self) -> Entry:
        return self._stop or self.chain.tail

    def _pass_gates(self) -> None:
        """Put in force what is refused from the reached gates on, and hand over their restart messages."""
        refusals = self._refusals
        if refusals is not None and refusals.ahead:
            for gate in refusals.arrive(self.place.entry.sequence):
                for wire in gate.restart:
                    self._push_copy(_HEADER, wire, gate.since)

    # -- inside: dropping

    def _drop_all_droppable(self, tail: Entry, reason: DropReason, meanwhile: int, now: float) -> None:
        """Drop the queue up to `tail`; where that broke references, wait for a key frame and refuse `meanwhile`."""
        lost = self._holds_frames(tail)
        self._drop_up_to(tail, reason, kept=(_CONTROL,) if lost else (_CONTROL, _HEADER))
        if lost or self._wait is not None:
            wait = KeyWait(tail, now, lost=lost or self.waiting_for_key)
            self._wait_from(wait, tail, meanwhile, DropReason.KEY_WAIT, now)

    def _holds_frames(self, end: Entry) -> bool:
        """Whether frames that others may refer to are among the copies, or lie between the cursor and `end`."""
        copied = self._copies is not None and bool(self._copies.tally[_KEY] or self._copies.tally[_INTER])
        return copied or frames_before(end) > frames_before(self.place.entry)

    def _thin_oldest(self, room: Headroom, reason: DropReason) -> None:
        tail, entry, copies = self._tail(), self.place.entry, self._copies
        size, messages = (copies.size_bytes, len(copies)) if copies is not None else (0, 0)
        since = copies.oldest_at if copies is not None else entry.enqueued_at
        if room.fits(size + tail.offset - entry.offset, messages + tail.sequence - entry.sequence, since):
            return
        while (
            entry is not tail
            and entry.next is not None
            and not room.fits(tail.offset - entry.offset, tail.sequence - entry.sequence, entry.enqueued_at)
        ):
            entry = entry.next
        self._drop_up_to(entry, reason, kept=(_CONTROL, _HEADER))

    def _drop_up_to(self, end: Entry, reason: DropReason, *, kept: tuple[MessageClass, ...] = (_CONTROL,)) -> None:
        """Move the cursor to `end`, counting what lies between, and the copies, as dropped.

        Messages of classes in `kept` are copied, in order: control messages always, headers where no restart will
        bring newer ones; otherwise those count as dropped, being superseded.
        """
        self._drop_copies(reason, kept)
        start = self.place.entry
        if end.sequence > start.sequence:
            lost = Tally(map(sub, (*end.counts, *end.sizes), (*start.counts, *start.sizes)))
            for figures, why in self._refused(start, end):
                self._tally(why).add_figures(figures)
                lost.subtract_figures(figures)
            self._walk_to(end, reason, kept, keep_any=any(lost[item] for item in kept))
            for item in kept:
                lost[item] = lost[item + CLASS_COUNT] = 0
            self._tally(reason).add_figures(lost)
        self._pass_gates()

    def _drop_copies(self, reason: DropReason, kept: tuple[MessageClass, ...]) -> None:
        if self._copies is not None:
            self._copies.drop(lambda item: item[0] not in kept, self._tally(reason))
            self._copies = self._copies or None

    def _walk_to(self, end: Entry, reason: DropReason, kept: tuple[MessageClass, ...], *, keep_any: bool) -> None:
        """Move the cursor to `end`; entries of classes in `kept`, if there are any, are copied."""
        refusals, place = self._refusals, self.place
        steps = keep_any or (refusals is not None and any(gate.restart for gate in refusals.ahead))
        while steps and place.entry is not end:
            entry = place.entry
            for gate in refusals.arrive(entry.sequence) if refusals is not None else ():
                if _HEADER in kept:
                    for wire in gate.restart:
                        self._push_copy(_HEADER, wire, gate.since)
                else:
                    self._count_lost_restart(gate.restart, reason)
            if entry.message_class in kept:
                self._push_copy(entry.message_class, entry.wire, entry.enqueued_at)
            if entry.next is None:
                raise AssertionError("walked past the log's end")
            place.entry = entry.next
        place.entry = end

    # -- inside: refusing and counting

    def _wait_from(self, wait: KeyWait, start: Entry, mask: int, reason: DropReason, now: float) -> None:
        """Wait for a key frame as `wait` says, refusing `mask` from `start` on meanwhile."""
        if self._stop is not None:
            return
        wait.since = now
        if self._wait is not None:
            wait.since = self._wait.since
            wait.lost = wait.lost or self._wait.lost
            mask |= self._wait.mask
        wait.mask = mask | BROKEN_MASK
        self._wait = wait
        self._refuse_from(start, mask | BROKEN_MASK, reason, now)

    def _refused(self, start: Entry, end: Entry) -> list[Refused]:
        """Return what is refused between two places."""
        return [] if self._refusals is None else self._refusals.between(start, self._refused_until(end))

    def _refused_until(self, end: Entry) -> Entry:
        """Return `end`, or the key frame before it that ends the wait.

        That may have been published already: counts must not fall.
        """
        wait = self._wait
        key = None if wait is None or self.mask & _KEY_BIT else wait.key
        return end if key is None or key.sequence >= end.sequence else key

    def _accept_from(
        self,
        start: Entry,
        mask: int,
        reason: DropReason,
        restart: tuple[bytes, ...],
        now: float,
        *,
        offered: bool = False,
    ) -> None:
        """From `start` on, where no gate lies behind, refuse just `mask`; hand `restart` over before it."""
        if not offered:
            self._offer_restart(restart)
        if self._refusals is None:
            if not mask and not restart:
                return
            self._refusals = Refusals()
        self._refusals.add(start, mask, reason, restart, now)
        self._pass_gates()

    def _refuse_from(self, start: Entry, mask: int, reason: DropReason, now: float) -> None:
        """From `start` on, refuse `mask` as well as what is refused already."""
        if self._refusals is None:
            self._refusals = Refusals()
        self._refusals.tighten(start, self.place.entry, mask, reason, now)

    def _offer_restart(self, wires: tuple[bytes, ...]) -> None:
        """Count restart messages as offered; they are not entries of the log."""
        if wires and self._extra is None:
            self._extra = Tally()
        for wire in wires:
            if self._extra is not None:
                self._extra.add(_HEADER, len(wire))

    def _count_lost_restart(self, wires: tuple[bytes, ...], reason: DropReason) -> None:
        for wire in wires:
            self._tally(reason).add(_HEADER, len(wire))

    def _push_copy(self, message_class: MessageClass, wire: bytes, since: float) -> None:
        """Hand `wire` over before the entry at the cursor."""
        if self._copies is None:
            self._copies = MessageQueue()
        self._copies.push((message_class, wire, max(since, self.joined_at)))

    def _tally(self, reason: DropReason) -> Tally:
        if self._dropped is None:
            self._dropped = {}
        return self._dropped.setdefault(reason, Tally())


def _key_and_audio_fit(key: Entry, tail: Entry, room: Headroom) -> bool:
    audio_bytes = tail.sizes[_AUDIO] - key.sizes[_AUDIO]
    audio_messages = tail.counts[_AUDIO] - key.counts[_AUDIO]
    return room.fits(len(key.wire) + audio_bytes, 1 + audio_messages, key.enqueued_at)
