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

What else is left out is decided elsewhere, and done here: where a queue becomes shorter at once
(`core.outgoing.thinning`), and what of a viewer that lags would arrive too late (`core.outgoing.lateness`).

*Joining*: a new viewer is given the GOP cache at once. What it was given so does not count against its limits while
its load falls or its age is below the low mark, and nothing is dropped for it meanwhile.

Threads: its Sender's lock guards it, but the log may grow meanwhile, and key frames appear, on the publisher's
thread. Each method therefore reads the tail once, and a key frame that is waited for is passed in `settle` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import Final

from flowctl.core.flow.counts import Balance, Tally, add_by_reason
from flowctl.core.flow.policy import BROKEN_MASK
from flowctl.core.flow.state import CLASS_COUNT, MessageClass
from flowctl.core.flow.timing import Timing
from flowctl.core.outgoing.accounts import PICTURES, LogAccount
from flowctl.core.outgoing.backlog import NO_MESSAGES, Item, MessageQueue
from flowctl.core.outgoing.latest import Value
from flowctl.core.outgoing.refusals import KeyWait, Refusals, Refused, frames_before
from flowctl.core.outgoing.streamlog import Entry, Gop, Place, StreamLog
from flowctl.core.outgoing.waiting import WaitingValues
from flowctl.reasons import DropReason

_CONTROL: Final = MessageClass.CONTROL
_HEADER: Final = MessageClass.HEADER
_KEY: Final = MessageClass.KEY
_INTER: Final = MessageClass.INTER
_KEY_BIT: Final = 1 << _KEY
_INTER_BIT: Final = 1 << _INTER
_NO_VALUES: Final[Iterator[Value]] = iter(())

_PINNED_BYTES: Final = 1024 * 1024
_PINNED_RATIO: Final = 4
"""Least ratio of the log's bytes that a queue spans to its own size for it to be copied out of the log (`compact`)."""
_ENTRY_BYTES: Final = 512
"""Memory of an entry beside its message: two tuples of seven and nine slots, measured: 447 bytes."""


@dataclass(eq=False, slots=True)
class Crossroads:
    """Before each key frame a viewer may go on in another log: its cursor stops there for its guide to be asked."""

    everywhere: bool = False  # or before any picture
    passed: int = -1  # sequence of the last picture at which it stayed in its log
    waits: bool = False  # whether the guide is to be asked again

    def lie_at(self, entry: Entry) -> bool:
        at = entry.message_class
        return (at is _KEY or (self.everywhere and at in PICTURES)) and entry.sequence != self.passed


class LogCursor:
    """One viewer's position in one log. Not thread-safe: its Sender's lock guards it.

    The log may grow meanwhile, on the publisher's thread: each method reads the tail once, after the place.

    Attributes:
        account: what was offered and dropped.
        chain: the log whose entries it stands at: the followed one, but see `core.outgoing.conflation`.
        place: where it stands; shared with the cohort while in one.
        joined_at: when it began to follow the log, in seconds.
        served_at: when it last got something; kept where its log has keys, by the judgement.
        joining_to: where what joining gave ends. None: joining is over.
        cached_bytes: what joining gave, of what was published before: wire bytes.
        crossroads: where it may go on in another log. None: it stays in this one.
        copies: what goes out before the entry at the cursor.
        mask: what the policy refuses in the present state, as bits by `MessageClass`.
        refusals: what is refused from where on. None: nothing.
        wait: the key wait. None: none.
        values: the values of keys that wait. None: it is in the cohort, or its log has no keys.
        restarts: times it was brought to a key frame after a loss.
        behind: `Gop.key` of the last key frame of its log that was handed over to it alone. None: that of the group. It
            is not the group, which would hold the log from there on.
        leading: sequences of the key frames at which it went on after a loss, until their leading pictures are past.
        key_waits_expired: times no key frame came in time.
    """

    __slots__ = (
        *("leading", "_stop", "account", "cached_bytes", "chain", "copies", "crossroads", "joined_at", "joining_to"),
        *("behind", "key_waits_expired", "log", "mask", "place", "refusals", "restarts", "wait"),
    )

    # Of a log with keys: slots of `core.outgoing.conflation`, so that others do without their memory.
    served_at: float = 0.0
    values: WaitingValues | None = None

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
        self.account = LogAccount(start)
        self.joined_at = now
        self.joining_to: Entry | None = tail
        self.cached_bytes = tail.offset - start.offset
        self.mask = 0
        self.restarts = 0
        self.key_waits_expired = 0
        self.behind: tuple[int, int, float] | None = None
        self._stop: Entry | None = None  # where to end: nothing published after is for this viewer
        # The rest is made when first needed: most viewers never lag.
        self.crossroads: Crossroads | None = None
        self.wait: KeyWait | None = None
        self.refusals: Refusals | None = None
        self.copies: MessageQueue[Item] = NO_MESSAGES
        self.leading: tuple[int, ...] = ()
        if prefix:
            self.account.offer_headers(prefix)
            self._push_headers(prefix, now)
        if wait_for_key:
            self.wait = KeyWait(start, now, lost=True)
            self.refuse_from(start, BROKEN_MASK, DropReason.KEY_WAIT, now)

    # -- the queue

    @property
    def entry(self) -> Entry:
        return self.place.entry

    @property
    def tail(self) -> Entry:
        """Where what is for this viewer ends."""
        return self._stop or self.chain.tail

    @property
    def copied(self) -> tuple[int, int]:
        """(wire bytes, messages) of the copies: what is queued but not read from the log."""
        return self.copies.size_bytes, len(self.copies)

    @property
    def span(self) -> tuple[int, int]:
        """(wire bytes, messages) up to the end of the log, refused or not: no less than what is queued."""
        entry, tail, copies = self.place.entry, self._stop or self.chain.tail, self.copies
        size, messages = tail.offset - entry.offset, tail.sequence - entry.sequence
        return (size, messages) if copies is NO_MESSAGES else (size + copies.size_bytes, messages + len(copies))

    def load(self) -> tuple[int, int]:
        """Return (wire bytes, messages) that are queued and not refused."""
        if self.values is None:
            return self._load_between(self.place.entry, self.tail)
        end, (messages, size) = self.values.waiting()
        own_size, own_messages = self._load_between(self.place.entry, end)
        return own_size + size, own_messages + messages

    def bounded(self) -> tuple[int, int]:
        """Return what of the load limits are for: all but the values of keys, which are not this viewer's alone."""
        if self._stop is not None and self.log.latest is not None:
            return 0, 0  # at the end they are among the copies, and what waits then only becomes less
        return self._load_between(self.place.entry, self.tail)

    def counted(self, progress_at: float) -> tuple[int, int, float | None]:
        """Return what is `bounded`, less what joining gave, and since when the oldest of it waits. None: nothing does.

        Values of keys are as old as the time in which this viewer got nothing, which began at `progress_at`.
        """
        if self._stop is not None and self.log.latest is not None:
            return 0, 0, progress_at if self.copies else None
        end = self.joining_to
        if end is None or end.sequence < self.place.entry.sequence:
            since = self.oldest_at()
            size, messages = self._load_between(self.place.entry, self.tail)
        else:
            entry, tail = self.place.entry, self.tail
            size, messages = map(sub, self._load_between(entry, tail), self._load_between(entry, end))
            size, messages = max(size, 0), max(messages, 0)
            since = None if end is tail else max(end.enqueued_at, self.joined_at)
        if self.values:
            since = progress_at if since is None else min(since, progress_at)
        return size, messages, since

    def _load_between(self, entry: Entry, end: Entry) -> tuple[int, int]:
        size, messages = end.offset - entry.offset, end.sequence - entry.sequence
        refusals, copies = self.refusals, self.copies
        if copies is not NO_MESSAGES:
            size += copies.size_bytes
            messages += len(copies)
        if refusals is not None:
            refused_size, refused_messages = refusals.load_between(entry, self._refused_until(end))
            restarts = refusals.restarts() if refusals.ahead else ()
            size += sum(map(len, restarts)) - refused_size
            messages += len(restarts) - refused_messages
        return size, messages

    def oldest_at(self) -> float | None:
        """Return since when the oldest queued message waits for this viewer, in seconds. None: nothing is queued."""
        self.settle()
        entry, since = self.place.entry, None
        if self.copies is not NO_MESSAGES:
            since = self.copies.oldest_at
        elif entry is not self.tail:
            since = max(entry.enqueued_at, self.joined_at)
        return since if self.values is None else self.values.oldest_at(self.served_at, since)

    @property
    def cache_taken(self) -> bool:
        end = self.joining_to
        return end is None or (
            end.sequence <= self.place.entry.sequence
            and not self.copies
            and (self.values is None or not self.values.given)
        )

    @property
    def caught_up(self) -> bool:
        """Whether nothing is queued, now that refused messages are stepped over."""
        self.settle()
        return self.place.entry is self.tail and not self.copies and not self.values

    @property
    def plain(self) -> bool:
        """Whether this viewer takes every message from here on, so that it can be served together with others."""
        return (
            not self.mask
            and self.wait is None
            and self.joining_to is None
            and self.refusals is None
            and not self.leading
            and (self.crossroads is None or not self.crossroads.everywhere)
        )

    # -- in the cohort and out of it

    def stands_at(self, entry: Entry) -> bool:
        """Whether nothing is queued before `entry`, and all from there on."""
        return self.caught_up and self.place.entry is entry

    def enter(self, place: Place) -> None:
        """Share `place`, which is where this viewer stands; its own would hold the log from here on."""
        self.place, self.behind = place, None

    def stand_alone(self) -> None:
        """Go on alone from where the cohort stood and what it wrote."""

    # -- handing over

    def peek(self, most: int, budget_bytes: int, timing: Timing | None = None) -> list[Item]:
        """Return the next messages to send as (class, wire, since): at most `most`, none after `budget_bytes`.

        What is returned ends before a place where something else comes first (restart messages), and before a message
        behind the first one that would be late; ask again then.
        """
        if timing is None:  # else `peek_in_time` has done so
            self.settle()
            self.leave_out_leading()
        crossroads, values, served_at = self.crossroads, self.values, self.served_at
        if crossroads is not None and self.at_crossroads() is not None:
            return []  # not its restart messages either: those of another log may come in their place
        tail, waiting, most = (self.tail, _NO_VALUES, most) if values is None else values.begin(most)
        items, size = self.copies.peek(most, budget_bytes) if self.copies is not NO_MESSAGES else ([], 0)
        entry, joined_at, refusals = self.place.entry, self.joined_at, self.refusals
        mask, ahead = (refusals.here.mask, iter(refusals.ahead)) if refusals is not None else (0, iter(()))
        gate, value = next(ahead, None), next(waiting, None)
        if timing is not None:
            due, per_byte = timing.due, timing.seconds_per_byte
            moment = timing.now + timing.held_bytes * per_byte
        while len(items) < most and size < budget_bytes:
            if value is not None and value.after <= entry.sequence and values is not None:
                items.append(values.hand(value, len(items), served_at))
                size += len(items[-1][1])
                value = next(waiting, None)
                continue
            if entry is tail:
                break
            if gate is not None and entry is gate.start:
                if gate.restart:
                    break
                mask, gate = gate.refusal.mask, next(ahead, None)
            following = entry.next
            message_class = entry.message_class
            if (
                following is None
                or (message_class is _KEY and self.wait is not None and self._awaited(entry))
                or (crossroads is not None and crossroads.lie_at(entry))
            ):
                break
            if not mask >> message_class & 1:
                if self.leading and self._leads(entry):
                    break
                wire, since = entry.wire, max(entry.enqueued_at, joined_at)
                end = size + len(wire)
                if (
                    timing is not None
                    and moment - since + end * per_byte > due[message_class]
                    and items
                    and timing.late(message_class, len(wire), since, size, *self.key_before(entry))
                ):
                    break
                if message_class is _KEY:
                    self.behind = entry.gop.key
                items.append((message_class, wire, since))
                size = end
            entry = following
        return items

    def key_before(self, entry: Entry) -> tuple[int, int, float, float]:
        """Return what `Timing.late` asks of the key frame before `entry`: the last that was handed over."""
        key_bytes, end, began = self.behind or entry.gop.key
        return key_bytes, entry.offset - end, max(began, self.joined_at), entry.enqueued_at - began

    def _move_to(self, end: Entry) -> None:
        """Move on to `end`, past what is sent, and what is refused between."""
        if self.refusals is not None:
            self.lose_refused(self.place.entry, end)
        self.place.entry = end

    def pass_messages(self, count: int) -> None:
        """Move past the first `count` messages that `peek` just returned: they are sent, or in flight."""
        if self.values is not None:
            count -= self.values.pass_messages(count)
        if self.copies is not NO_MESSAGES:
            count -= self.copies.pass_messages(count)
            self.copies = self.copies or NO_MESSAGES
        while count:
            refusals, entry = self.refusals, self.place.entry
            mask = 0 if refusals is None else refusals.here.mask
            until = refusals.ahead[0].start if refusals is not None and refusals.ahead else None
            while count and entry is not until:
                if entry.next is None:  # cannot happen while `count` is what peek returned
                    raise AssertionError("took more messages than the log holds")
                count -= not mask >> entry.message_class & 1
                entry = entry.next
            self._move_to(entry)
            if count:
                self.settle()
        self.settle()

    def settle(self) -> None:
        """Step over refused entries at the cursor; a key frame that is waited for ends the wait here."""
        refusals = self.refusals
        if refusals is None:
            return
        place = self.place
        while True:
            if refusals.ahead:
                self._pass_gates()
            mask = refusals.here.mask
            if not mask and not refusals.ahead and self.wait is None:
                self.refusals = None
                return
            start = entry = place.entry
            until = refusals.ahead[0].start if refusals.ahead else self.tail
            awaited = False
            while entry is not until and (following := entry.next) is not None:
                if entry.message_class is _KEY and (awaited := self._awaited(entry)):
                    break
                if not mask >> entry.message_class & 1:
                    break
                entry = following
            if entry is not start:
                self._move_to(entry)
            if awaited:
                self._resume_at(entry)
            elif entry is not until or not refusals.ahead:
                return

    def pass_by(self, reason: DropReason) -> None:
        """Leave out the message that comes next."""
        entry = self.place.entry
        self.account.lost(reason).add(entry.message_class, len(entry.wire))
        self.place.entry = entry.next or entry

    def leave_out_leading(self) -> None:
        """Leave out the leading pictures that come next and cannot be decoded."""
        while self.leading and not self.copies:
            entry = self.place.entry
            if entry is self.tail or entry.next is None:
                return
            if entry.gop.key_sequence > self.leading[0]:
                self.leading = self.leading[1:]
            elif not self._leads(entry):
                return
            else:
                self.pass_by(DropReason.KEY_WAIT)
                self.settle()

    def _leads(self, entry: Entry) -> bool:
        """Whether `entry`, which comes next, is to be left out as a leading picture; else it is noted that it comes."""
        if self._spoilt(entry):
            return True
        # No leading ones come behind other pictures.
        if entry.message_class in (_INTER, MessageClass.DISPOSABLE) and self.leading[-1] <= entry.gop.key_sequence:
            self.leading = ()
        return False

    def _spoilt(self, entry: Entry) -> bool:
        """Whether `entry` is a leading picture, and this viewer went on at the key frame before it."""
        key_sequence = entry.gop.key_sequence
        return entry.leading and entry.sequence > key_sequence and key_sequence in self.leading

    # -- another log in place of this one

    def at_crossroads(self) -> Entry | None:
        """Return the key frame, or picture, that comes next, if it is still to be decided in which log to go on."""
        self.settle()
        entry, crossroads = self.place.entry, self.crossroads
        if crossroads is None or entry.next is None or not crossroads.lie_at(entry) or not self._only_headers_first():
            return None
        return entry

    def _only_headers_first(self) -> bool:
        """Whether nothing but headers and control messages goes out before the entry at the cursor."""
        copies = self.copies
        return copies.tally[_CONTROL] + copies.tally[_HEADER] == len(copies)

    # -- copies: what goes out before the entry at the cursor

    def push_copy(self, message_class: MessageClass, wire: bytes, since: float) -> None:
        """Hand `wire` over before the entry at the cursor."""
        self.copies = self.copies or MessageQueue()
        self.copies.push((message_class, wire, max(since, self.joined_at)))

    def _push_headers(self, wires: Sequence[bytes], since: float) -> None:
        for wire in wires:
            self.push_copy(_HEADER, wire, since)

    def drop_copies(self, reason: DropReason, kept: tuple[MessageClass, ...]) -> None:
        if self.copies:
            self.copies.drop(lambda item: item[0] not in kept, self.account.lost(reason))
            self.copies = self.copies or NO_MESSAGES

    def compact(self) -> None:
        """Copy what is queued out of the log where that lets much more of the log go.

        A viewer that is refused nearly everything (HARD_LIMIT held, a policy that drops all while overloaded) would
        keep all that is published behind the few messages it still has to get.
        """
        if self.refusals is None or self.joining_to is not None:
            return
        tail, entry = self.tail, self.place.entry
        span = tail.offset - entry.offset + (tail.sequence - entry.sequence) * _ENTRY_BYTES
        size, messages = self._load_between(entry, tail)
        if span > max(_PINNED_BYTES, _PINNED_RATIO * (size + messages * _ENTRY_BYTES)):
            self.copy_out(tail.sequence)

    def copy_out(self, end: int) -> None:
        """Copy what is queued before message number `end` out of the log."""
        self.settle()
        while (entry := self.place.entry).sequence < end and entry.next is not None:
            if self._spoilt(entry):
                self.pass_by(DropReason.KEY_WAIT)
            else:
                self.push_copy(entry.message_class, entry.wire, entry.enqueued_at)
                self.place.entry = entry.next
            self.settle()

    # -- accounts

    def balance(self) -> Balance:
        """Return (accepted, dropped by reason, queued) of one instant; what is refused ahead counts as dropped."""
        entry, values, refusals = self.place.entry, self.values, self.refusals
        tail, *of_values = (self.tail,) if values is None else values.balance()
        accepted, dropped = self.account.balance(tail)
        queued = tuple(map(sub, (*tail.counts, *tail.sizes), (*entry.counts, *entry.sizes)))
        if self.copies is not NO_MESSAGES:
            queued = tuple(map(add, queued, self.copies.tally))
        if refusals is not None:
            waiting = Tally(queued)
            for figures, reason in self._refused(entry, tail):
                waiting.subtract_figures(figures)
                add_by_reason(dropped, {reason: figures})
            for wire in refusals.restarts():
                waiting.add(_HEADER, len(wire))
            queued = tuple(waiting)
        if of_values:
            offered, superseded, waits = of_values
            accepted, queued = tuple(map(add, accepted, offered)), tuple(map(add, queued, waits))
            add_by_reason(dropped, {DropReason.SUPERSEDED: superseded})
        return accepted, dropped, queued

    def pictures(self) -> tuple[int, int]:
        """Return (pictures that were published up to the place since joining, those of them that were not sent)."""
        return self.account.pictures(self.place.entry, self.mask)

    # -- refusing

    def refuse(self, mask: int, reason: DropReason, now: float) -> None:
        """From the log's tail on, refuse the classes in `mask`; 0 accepts everything again.

        Where frames that others refer to are lost by it, they stay refused until the next key frame. While joining,
        nothing is refused; `end_joining` makes up for it.
        """
        if self.wait is not None:
            self.poll(now)  # under the mask that was in force up to here
        breaks = bool(mask & (_KEY_BIT | _INTER_BIT))
        if self.wait is not None and not breaks and self.mask & (_KEY_BIT | _INTER_BIT):
            # Until now it was the policy that kept frames back, so that giving up would not have brought one.
            self.wait.since = now
        self.mask = mask
        if self.joining_to is not None or self._stop is not None:
            return
        tail, wait = self.chain.tail, self.wait
        if wait is not None and (breaks or wait.broken_at(tail)):
            self.accept_from(tail, wait.mask, wait.reason, (), now)
            self.refuse_from(tail, mask, reason, now)
        else:
            self.wait = KeyWait(tail, now, lost=False) if breaks else None
            self.accept_from(tail, mask | (BROKEN_MASK if breaks else 0), reason, (), now)

    def end_joining(self, reason: DropReason, now: float) -> None:
        """Stop treating the load as a joiner's; what the present state refuses is refused from now on."""
        self.joining_to = None
        if self.mask:
            self.refuse(self.mask, reason, now)

    def poll(self, now: float, *, replace: bool = False) -> bool:
        """Notice a key frame that was waited for, or that the wait has lasted too long; return whether it ended."""
        wait = self.wait
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
                wait.lost = wait.lost or self.holds_frames(key)
                self.drop_up_to(key, DropReason.THINNED)
            self._resume_at(key)
            wait, ended = self.wait, True
        if not self.waited_too_long(now):
            return ended
        self.wait = None
        self.key_waits_expired += 1
        self.accept_from(self.chain.tail, self.mask, DropReason.REFUSED, self.log.headers, now)
        return True

    def waited_too_long(self, now: float) -> bool:
        """Whether `poll` would end the key wait without a key frame."""
        wait = self.wait
        if wait is None or self.mask & (_KEY_BIT | _INTER_BIT):  # where these are refused none would end it
            return False
        return now - wait.since >= max(wait.least_s, 2 * self.log.gop_duration_s)

    @property
    def waiting_for_key(self) -> bool:
        """Whether frames were lost and inter frames are refused until the next key frame."""
        return self.wait is not None and self.wait.broken_at(self.tail)

    @property
    def cuts_end(self) -> bool:
        """Whether a key frame would end a cut; else nothing is left out."""
        return self.joining_to is None and self._stop is None and not self.mask & _KEY_BIT

    def wait_from(self, wait: KeyWait, start: Entry, mask: int, reason: DropReason, now: float) -> None:
        """Wait for a key frame as `wait` says, refusing `mask` from `start` on, and what the wait before refused."""
        if self._stop is None:
            before, self.wait, wait.since = self.wait, wait, now
            if before is not None:
                wait.since, wait.lost, mask = before.since, wait.lost or before.lost, mask | before.mask
            wait.mask = mask | BROKEN_MASK
            self.refuse_from(start, wait.mask, reason, now)

    # -- dropping

    def go_on_at(self, key: Entry | None, reason: DropReason, now: float, meanwhile: int = 0) -> None:
        """Drop what lies before `key`, hand its restart messages over; refuse `meanwhile` from there up to the next.

        Args:
            key: a key frame; where the cursor stands there already, nothing is dropped. None: the next one that is
                published, which is waited for where frames that others may refer to were dropped.
            reason: why.
            now: time in seconds.
            meanwhile: classes, as bits. 0: none, but what is refused anyway.
        """
        if key is None:
            tail = self.tail
            lost = self.holds_frames(tail)
            self.drop_up_to(tail, reason, kept=(_CONTROL,) if lost else (_CONTROL, _HEADER))
            if lost or self.wait is not None:
                wait = KeyWait(tail, now, lost=lost or self.waiting_for_key)
                self.wait_from(wait, tail, meanwhile, DropReason.KEY_WAIT, now)
            return
        if key is not self.place.entry or not self._only_headers_first():
            due = self.refusals is not None and self.refusals.restarts_at(key)
            self.drop_up_to(key, reason)
            self.leading = (key.sequence,) if key.leading else ()
            self.restarts += 1
            if not due:
                self.account.offer_headers(key.gop.restart)
                self._push_headers(key.gop.restart, key.enqueued_at)
        if meanwhile:
            self.wait_from(KeyWait.after(key), key, meanwhile, reason, now)

    def holds_frames(self, end: Entry) -> bool:
        """Whether frames that others may refer to are among the copies, or lie between the cursor and `end`."""
        tally = self.copies.tally
        return bool(tally[_KEY] or tally[_INTER]) or frames_before(end) > frames_before(self.place.entry)

    def drop_up_to(self, end: Entry, reason: DropReason, *, kept: tuple[MessageClass, ...] = (_CONTROL,)) -> None:
        """Move the cursor to `end`, counting what lies between, and the copies, as dropped.

        Messages of classes in `kept` are copied, in order: control messages always, headers where no restart will
        bring newer ones; otherwise those count as dropped, being superseded.
        """
        self.drop_copies(reason, kept)
        place, refusals, start = self.place, self.refusals, self.place.entry
        if end.sequence > start.sequence:
            lost = Tally(map(sub, (*end.counts, *end.sizes), (*start.counts, *start.sizes)))
            for figures, _ in self.lose_refused(start, end):
                lost.subtract_figures(figures)
            steps = any(lost[item] for item in kept) or (refusals is not None and refusals.restarts())
            while steps and (entry := place.entry) is not end:
                for gate in refusals.arrive(entry.sequence) if refusals is not None else ():
                    if _HEADER in kept:
                        self._push_headers(gate.restart, gate.since)
                    else:
                        self.account.lose_headers(gate.restart, reason)
                if entry.message_class in kept:
                    self.push_copy(entry.message_class, entry.wire, entry.enqueued_at)
                place.entry = entry.next or end
            place.entry = end
            for item in kept:
                lost[item] = lost[item + CLASS_COUNT] = 0
            self.account.lost(reason).add_figures(lost)
        self._pass_gates()

    # -- the end

    def finish(self, now: float) -> None:
        """Take nothing that is published from now on; what is queued stays."""
        self.crossroads = None
        if self._stop is None:
            tail = self.chain.tail
            self.poll(now)  # a key frame that came already is still for this viewer
            self._end_at(tail, DropReason.THINNED)
            # The end links to all that is published from now on, for as long as the peer takes to read the rest.
            self.copy_out(tail.sequence)
            self._stop = self.place.entry = Entry(tail.sequence, tail.offset, tail.counts, tail.sizes, Gop(-1, (), 0.0))
            if self.joining_to is not None:
                self.joining_to = self._stop

    def drop_everything(self, reason: DropReason) -> None:
        """Drop the whole queue, whatever its class, and take nothing more: the viewer leaves."""
        self._end_at(self.tail, reason)
        self.drop_up_to(self.tail, reason, kept=())

    def _end_at(self, tail: Entry, reason: DropReason) -> None:
        self._stop, self.wait = tail, None
        if self.refusals is not None:
            for gate in self.refusals.cut(tail.sequence):
                self.account.lose_headers(gate.restart, reason)

    # -- inside: what is refused

    def _awaited(self, entry: Entry) -> bool:
        """Whether `entry`, which is a complete key frame, ends the wait."""
        wait = self.wait
        return wait is not None and entry.sequence >= wait.start and not self.mask & _KEY_BIT

    def _resume_at(self, key: Entry) -> None:
        """`key`, which is not behind the cursor, ends the wait: from it on, accept what the state allows.

        Sound that was let through before it is left in its place; the restart messages go in front of it.
        """
        refusals, inter = self.refusals, self.mask & _INTER_BIT
        # Not where the wait before this one ended here too, and its restart messages are not out yet.
        due = refusals is not None and refusals.restarts_at(key)
        broken = not due and (self.wait is None or self.wait.broken_at(key))
        # In order, and none that lies behind: key frames beyond this one are not gone on at after all.
        passed = self.place.entry.gop.key_sequence
        self.leading = tuple(item for item in self.leading if passed <= item <= key.sequence)
        if broken and key.leading and key.sequence not in self.leading:
            self.leading = (*self.leading, key.sequence)
        self.wait = KeyWait.after(key) if inter else None
        self.restarts += broken
        for gate in refusals.cut(key.sequence + 1) if refusals is not None else ():
            self.account.lose_headers(gate.restart, DropReason.THINNED)
        mask, restart = self.mask | (BROKEN_MASK if inter else 0), key.gop.restart if broken else ()
        self.accept_from(key, mask, DropReason.REFUSED, restart, key.enqueued_at)

    def _pass_gates(self) -> None:
        """Put in force what is refused from the reached gates on, and hand over their restart messages."""
        refusals = self.refusals
        if refusals is not None and refusals.ahead:
            for gate in refusals.arrive(self.place.entry.sequence):
                self._push_headers(gate.restart, gate.since)

    def _refused(self, start: Entry, end: Entry) -> Sequence[Refused]:
        """Return what is refused between two places."""
        return () if self.refusals is None else self.refusals.between(start, self._refused_until(end))

    def _refused_until(self, end: Entry) -> Entry:
        """Return `end`, or the key frame before it that ends the wait.

        That may have been published already: counts must not fall.
        """
        key = None if self.wait is None or self.mask & _KEY_BIT else self.wait.key
        return end if key is None or key.sequence >= end.sequence else key

    def lose_refused(self, start: Entry, end: Entry) -> Sequence[Refused]:
        """Count what is refused between two places as dropped; return what it is."""
        refused = self._refused(start, end)
        for figures, reason in refused:
            self.account.lost(reason).add_figures(figures)
        return refused

    def accept_from(self, start: Entry, mask: int, reason: DropReason, restart: tuple[bytes, ...], now: float) -> None:
        """From `start` on, where no gate lies behind, refuse just `mask`; hand `restart` over before it."""
        self.account.offer_headers(restart)
        if self.refusals is None:
            if not mask and not restart:
                return
            self.refusals = Refusals()
        self.refusals.add(start, mask, reason, restart, now)
        self._pass_gates()

    def refuse_from(self, start: Entry, mask: int, reason: DropReason, now: float) -> None:
        """From `start` on, refuse `mask` as well as what is refused already."""
        if self.refusals is None:
            self.refusals = Refusals()
        self.refusals.tighten(start, self.place.entry, mask, reason, now)
