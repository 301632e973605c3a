"""A viewer's place in a stream log: what is queued for it, what it is spared, and where it starts again (pure).

Theory of operation. The cursor stands at the entry to be handed over next. What lies between it and the log's tail is
the viewer's queue, less what its policy refuses. Refusals are kept as a few *gates*: from a sequence number on, a bit
mask of refused classes and the reason. The queue by class is then a subtraction of totals per gate, whatever its
length. Only a viewer that lags has gates; entries are looked at one by one only when they are handed over.

A loss that breaks references (an inter frame) puts the cursor into *key wait*: inter frames are refused until the
next key frame of the log, before which the viewer gets the restart messages (metadata, codec configuration). The wait
ends without a key frame after `KEY_WAIT_S` or two groups of pictures, whichever is longer; that is counted.

*Joining*: a new viewer is given the GOP cache at once. What it was given so does not count against its limits while
its load falls or its age is below the low mark, and nothing is dropped for it meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from flowctl.counts import Counts, Tally
from flowctl.flow import CLASS_COUNT, MessageClass
from flowctl.policy import BROKEN_MASK, DROPPABLE_MASK, Room
from flowctl.reasons import DropReason
from flowctl.streamlog import Entry, Gop, StreamLog, subtract

KEY_WAIT_S: Final = 10.0
"""Shortest time after which waiting for a key frame is given up."""

_CONTROL: Final = MessageClass.CONTROL
_HEADER: Final = MessageClass.HEADER
_INTER_BIT: Final = 1 << MessageClass.INTER
_KEY_AND_AUDIO_REFUSED: Final = DROPPABLE_MASK & ~(1 << MessageClass.AUDIO | 1 << MessageClass.KEY)


class Gate:
    """From `start` on, messages of the classes in `mask` are refused for `reason`.

    `restart` holds messages to hand over right before `start`.
    """

    __slots__ = ("mask", "reason", "restart", "start")

    def __init__(self, start: Entry, mask: int, reason: DropReason, restart: tuple[bytes, ...] = ()) -> None:
        self.start = start
        self.mask = mask
        self.reason = reason
        self.restart = restart


class LogCursor:
    """One viewer's position in one log. Not thread-safe: its Sender's lock guards it.

    Args:
        log: the log to follow.
        start: the entry to begin with. None: the tail, that is with what is published next.
        prefix: wire messages to hand over first (the restart messages of `start`); counted as HEADER.
        now: time in seconds; a message is at most as old for this viewer as its joining.
        wait_for_key: refuse video until the next key frame (a viewer that joins between key frames).
    """

    __slots__ = (
        "_base_counts",
        "_base_sizes",
        "_dropped",
        "_extra",
        "_gates",
        "_prefix",
        "_wait_gop",
        "_wait_mask",
        "_wait_since",
        "entry",
        "joined_at",
        "joining_to",
        "key_waits_expired",
        "log",
        "mask",
        "restarts",
        "stop",
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
        self.log = log
        self.entry = tail if start is None else start
        self.joined_at = now
        self.joining_to: Entry | None = tail  # the cache ends here; None once joining is over
        self.stop: Entry | None = None  # where to end: nothing published after is for this viewer
        self.mask = 0  # what the policy refuses in the present state
        self.restarts = 0
        self.key_waits_expired = 0
        self._base_counts = self.entry.counts
        self._base_sizes = self.entry.sizes
        self._gates: list[Gate] = []
        self._prefix: deque[tuple[MessageClass, bytes, float]] | None = None
        self._extra: Tally | None = None  # messages that are not entries: the restart messages
        self._dropped: dict[DropReason, Tally] = {}
        self._wait_gop: Gop | None = None
        self._wait_mask = 0
        self._wait_since = 0.0
        if prefix:
            self._offer_restart(prefix)
            self._prefix = deque((_HEADER, wire, now) for wire in prefix)
        if wait_for_key:
            self._wait(self.entry, BROKEN_MASK, DropReason.KEY_WAIT, now)

    # -- the queue

    def load(self) -> tuple[int, int]:
        """Return (wire bytes, messages) that are queued and not refused."""
        tail = self._tail()
        size = tail.offset - self.entry.offset
        messages = tail.sequence - self.entry.sequence
        if self._gates:
            for counts, sizes, _ in self._refused_ahead(tail):
                size -= sum(sizes)
                messages -= sum(counts)
            for gate in self._gates:
                size += sum(map(len, gate.restart))
                messages += len(gate.restart)
        if self._prefix:
            size += sum(len(item[1]) for item in self._prefix)
            messages += len(self._prefix)
        return size, messages

    def allowance(self) -> tuple[int, int]:
        """Return (bytes, messages) of the load that joining gave and that do not count against the limits."""
        end = self.joining_to
        if end is None or end.offset <= self.entry.offset:
            return 0, 0
        return end.offset - self.entry.offset, end.sequence - self.entry.sequence

    def oldest_at(self) -> float | None:
        """Return since when the oldest queued message waits for this viewer, in seconds. None: nothing is queued."""
        self._skip_refused()
        if self._prefix:
            return self._prefix[0][2]
        entry = self.entry
        return None if entry is self._tail() else max(entry.enqueued_at, self.joined_at)

    def oldest_counted_at(self) -> float | None:
        """As `oldest_at`, but leaving out what joining gave."""
        end = self.joining_to
        if end is None or end.sequence <= self.entry.sequence:
            return self.oldest_at()
        return None if end.next is None else max(end.enqueued_at, self.joined_at)

    @property
    def caught_up(self) -> bool:
        """Whether nothing is queued, now that refused messages are stepped over."""
        self._skip_refused()
        return self.entry is self._tail() and not self._prefix

    @property
    def plain(self) -> bool:
        """Whether this viewer takes every message from here on, so that it can be served together with others."""
        return not self.mask and self._wait_gop is None and self.joining_to is None and not self._gates

    def peek(self, most: int, budget_bytes: int) -> list[tuple[MessageClass, bytes, float]]:
        """Return the next messages to send as (class, wire, enqueued at): at most `most`, none after `budget_bytes`."""
        self._skip_refused()
        items: list[tuple[MessageClass, bytes, float]] = []
        size = 0
        for item in self._prefix or ():
            items.append(item)
            size += len(item[1])
        entry, tail = self.entry, self._tail()
        gates = self._gates
        stops = {id(gate.start) for gate in gates if gate.restart}
        while len(items) < most and size < budget_bytes:
            following = entry.next
            if following is None or entry is tail or id(entry) in stops:
                break  # at a stop the restart messages go first; the next call finds them
            if not gates or not self._mask_at(entry) >> entry.message_class & 1:
                items.append((entry.message_class, entry.wire, entry.enqueued_at))
                size += len(entry.wire)
            entry = following
        return items

    def take(self, count: int) -> None:
        """Move past the first `count` messages that `peek` returned: they are sent, or in flight."""
        prefix = self._prefix
        while prefix and count:
            prefix.popleft()
            count -= 1
        if prefix is not None and not prefix:
            self._prefix = None
        while count:
            self._skip_refused()
            following = self.entry.next
            if following is None:  # cannot happen while `count` is what peek returned
                raise AssertionError("took more messages than the log holds")
            self.entry = following
            count -= 1
        self._skip_refused()

    # -- refusing

    def refuse(self, mask: int, reason: DropReason, now: float) -> None:
        """From the log's tail on, refuse the classes in `mask`; 0 accepts everything again.

        Refusing inter frames breaks the references of what follows: they stay refused until the next key frame.
        While joining, nothing is refused; `end_joining` makes up for it.
        """
        self.mask = mask
        if self.joining_to is not None:
            return
        if mask & _INTER_BIT and self._wait_gop is None and self.log.has_video:
            self._wait(self.log.tail, mask, reason, now)
        elif self._wait_gop is not None:
            self._open_gate(self.log.tail, mask | self._wait_mask, DropReason.KEY_WAIT)
        else:
            self._open_gate(self.log.tail, mask, reason)

    def end_joining(self, reason: DropReason, now: float) -> None:
        """Stop treating the load as a joiner's; what the present state refuses is refused from now on."""
        self.joining_to = None
        if self.mask:
            self.refuse(self.mask, reason, now)

    def poll(self, now: float) -> bool:
        """Notice a key frame that was waited for, or that the wait has lasted too long; return whether it ended."""
        gop = self._wait_gop
        if gop is None:
            return False
        following = gop.next
        if following is not None:
            while self.mask & _INTER_BIT and following.next is not None:
                following = following.next  # only key frames get through: the newest is the one to have
            self._resume_at(following, now)
            return True
        if now - self._wait_since >= max(KEY_WAIT_S, 2 * self.log.gop_duration_s):
            self.key_waits_expired += 1
            self._wait_gop = None
            self._open_gate(self.log.tail, self.mask & ~BROKEN_MASK, DropReason.REFUSED, self.log.gop.restart)
            return True
        return False

    @property
    def waiting_for_key(self) -> bool:
        """Whether inter frames are refused until the next key frame."""
        return self._wait_gop is not None

    # -- thinning

    def thin_to_key_frame(self, room: Room, now: float) -> None:
        """Skip to a key frame so that what stays fits.

        That is the first key frame from which on everything fits; else the newest one with its audio alone; else the
        next one to be published, with nothing before it. Without video, the oldest messages go.

        Args:
            room: what may stay queued.
            now: time in seconds.
        """
        if not self.log.has_video:
            self._thin_oldest(room)
            return
        tail = self._tail()
        newest: Gop | None = None
        gop = self._next_gop()
        while gop is not None and gop.key is not None:
            key = newest_key = gop.key
            newest = gop
            if room.fits(tail.offset - key.offset, tail.sequence - key.sequence, key.enqueued_at):
                self._jump(gop, DropReason.THINNED)
                return
            gop = gop.next
        if newest is not None and self._key_and_audio_fit(newest_key, room):
            self._jump(newest, DropReason.THINNED)
            self._gates = []
            self._wait(newest_key, _KEY_AND_AUDIO_REFUSED, DropReason.THINNED, now, gop=newest)
        else:
            self._drop_up_to(tail, DropReason.THINNED)
            self._wait(tail, DROPPABLE_MASK, DropReason.KEY_WAIT, now)

    def drop_droppable(self, reason: DropReason, now: float) -> None:
        """Drop all of the queue that may be dropped; a lost frame leads to waiting for the next key frame."""
        tail = self._tail()
        lost = subtract(tail.counts, self.entry.counts)
        broken = bool(lost[MessageClass.KEY] or lost[MessageClass.INTER])
        self._drop_up_to(tail, reason, keep_headers=not broken)
        if broken:
            self._wait(tail, BROKEN_MASK, DropReason.KEY_WAIT, now)

    def drop_everything(self, reason: DropReason) -> None:
        """Drop the whole queue, whatever its class: the connection is over."""
        self._drop_up_to(self._tail(), reason)
        for message_class, wire, _ in self._prefix or ():
            self._tally(reason).add(message_class, len(wire))
        for gate in self._gates:
            gate.restart = ()
        self._prefix = None

    # -- accounts

    def accepted(self) -> Counts:
        """Everything this viewer was offered: entries since it joined, and restart messages."""
        tail = self._tail()
        counts = subtract(tail.counts, self._base_counts)
        sizes = subtract(tail.sizes, self._base_sizes)
        own = Counts(tuple(counts), tuple(sizes))
        return own + self._extra.frozen() if self._extra else own

    def dropped(self) -> dict[DropReason, Counts]:
        """What was refused or thrown away, by reason, including what is refused ahead of the cursor."""
        result = {reason: tally.frozen() for reason, tally in self._dropped.items()}
        for counts, sizes, reason in self._refused_ahead(self._tail()):
            refused = Counts(tuple(counts), tuple(sizes))
            result[reason] = result[reason] + refused if reason in result else refused
        return result

    def queued(self) -> Counts:
        """What is queued and not refused."""
        tally = Tally()
        tail = self._tail()
        tally.add_all(subtract(tail.counts, self.entry.counts), subtract(tail.sizes, self.entry.sizes))
        for counts, sizes, _ in self._refused_ahead(tail):
            tally.add_all([-item for item in counts], [-item for item in sizes])
        for message_class, wire, _ in self._prefix or ():
            tally.add(message_class, len(wire))
        for gate in self._gates:
            for wire in gate.restart:
                tally.add(_HEADER, len(wire))
        return tally.frozen()

    # -- inside

    def _tail(self) -> Entry:
        return self.stop or self.log.tail

    def _offer_restart(self, wires: tuple[bytes, ...]) -> None:
        """Count restart messages as offered; they are not entries of the log."""
        if self._extra is None:
            self._extra = Tally()
        for wire in wires:
            self._extra.add(_HEADER, len(wire))

    def _push(self, message_class: MessageClass, wire: bytes, entry: Entry) -> None:
        """Hand `wire` over before anything else; it is as old as `entry`."""
        if self._prefix is None:
            self._prefix = deque()
        since = entry.enqueued_at if entry.next is not None else self.log.gop.started_at
        self._prefix.append((message_class, wire, max(since, self.joined_at)))

    def _tally(self, reason: DropReason) -> Tally:
        tally = self._dropped.get(reason)
        if tally is None:
            tally = self._dropped[reason] = Tally()
        return tally

    def _open_gate(self, start: Entry, mask: int, reason: DropReason, restart: tuple[bytes, ...] = ()) -> None:
        gates = self._gates
        if restart:
            self._offer_restart(restart)
        if gates and gates[-1].start is start:
            restart = gates[-1].restart + restart
            gates.pop()
        if restart or (gates[-1].mask if gates else 0) != mask:
            gates.append(Gate(start, mask, reason, restart))

    def _wait(self, start: Entry, mask: int, reason: DropReason, now: float, *, gop: Gop | None = None) -> None:
        """Refuse `mask` from `start` until the key frame after `gop` (None: after the group that is open now)."""
        if self._wait_gop is None:
            self._wait_since = now
        self._wait_gop = gop or self.log.gop
        self._wait_mask = mask | BROKEN_MASK
        self._open_gate(start, mask | BROKEN_MASK, reason)

    def _resume_at(self, gop: Gop, now: float) -> None:
        """The key frame of `gop` ends the wait: accept what the state allows from it on."""
        self._wait_gop = None
        key = _key_of(gop)
        if self.mask & _INTER_BIT:
            # Still too slow for more than key frames: the newest replaces what is queued, and the wait goes on.
            self._jump(gop, DropReason.THINNED)
            self._gates = []
            self._wait(key, self.mask, DropReason.KEY_WAIT, now, gop=gop)
            return
        # Sound that was let through before the key frame is left in its place; the restart messages wait at the gate.
        self._gates = [gate for gate in self._gates if gate.start.sequence < key.sequence]
        self._open_gate(key, self.mask, DropReason.REFUSED, gop.restart)

    def _mask_at(self, entry: Entry) -> int:
        mask = 0
        for gate in self._gates:
            if gate.start.sequence > entry.sequence:
                break
            mask = gate.mask
        return mask

    def _refused_ahead(self, end: Entry) -> list[tuple[list[int], list[int], DropReason]]:
        """Return (messages by class, bytes by class, reason) per gate between the cursor and `end`."""
        gates = self._gates
        result = []
        for index, gate in enumerate(gates):
            start = gate.start if gate.start.sequence > self.entry.sequence else self.entry
            stop = gates[index + 1].start if index + 1 < len(gates) else end
            stop = stop if stop.sequence < end.sequence else end
            if not gate.mask or stop.sequence <= start.sequence:
                continue
            counts, sizes = subtract(stop.counts, start.counts), subtract(stop.sizes, start.sizes)
            for item in range(CLASS_COUNT):
                if not gate.mask >> item & 1:
                    counts[item] = sizes[item] = 0
            result.append((counts, sizes, gate.reason))
        return result

    def _skip_refused(self) -> None:
        """Step over refused entries at the cursor, and forget gates that lie behind it."""
        gates = self._gates
        while gates:
            entry = self.entry
            while len(gates) > 1 and gates[1].start.sequence <= entry.sequence:
                self._pass_gate(gates.pop(0))
            gate = gates[0]
            if gate.start.sequence > entry.sequence:
                return
            self._pass_gate(gate)
            if not gate.mask:
                if len(gates) > 1:
                    return
                gates.clear()
                return
            following = entry.next
            if following is None or entry is self.stop or not gate.mask >> entry.message_class & 1:
                return
            self._tally(gate.reason).add(entry.message_class, len(entry.wire))
            self.entry = following

    def _pass_gate(self, gate: Gate) -> None:
        """The cursor is at or behind `gate`: its restart messages are due."""
        for wire in gate.restart:
            self._push(_HEADER, wire, gate.start)
        gate.restart = ()

    def _next_gop(self) -> Gop | None:
        """The first group whose key frame is at or after the cursor."""
        entry = self.entry
        if entry.next is not None and entry.message_class is MessageClass.KEY:
            return entry.gop
        return entry.gop.next

    def _key_and_audio_fit(self, key: Entry, room: Room) -> bool:
        tail = self._tail()
        audio_bytes = tail.sizes[MessageClass.AUDIO] - key.sizes[MessageClass.AUDIO]
        audio_messages = tail.counts[MessageClass.AUDIO] - key.counts[MessageClass.AUDIO]
        return room.fits(len(key.wire) + audio_bytes, 1 + audio_messages, key.enqueued_at)

    def _drop_up_to(self, end: Entry, reason: DropReason, *, keep_headers: bool = False) -> None:
        """Move the cursor to `end`, counting what lies between as dropped.

        Control messages between are kept, in order. So are headers where no restart will bring newer ones; otherwise
        they count as dropped, being superseded.
        """
        start = self.entry
        if end.sequence <= start.sequence:
            return
        counts, sizes = subtract(end.counts, start.counts), subtract(end.sizes, start.sizes)
        for refused_counts, refused_sizes, why in self._refused_ahead(end):
            self._tally(why).add_all(refused_counts, refused_sizes)
            counts = [a - b for a, b in zip(counts, refused_counts, strict=True)]
            sizes = [a - b for a, b in zip(sizes, refused_sizes, strict=True)]
        kept = (_CONTROL, _HEADER) if keep_headers else (_CONTROL,)
        if any(counts[item] for item in kept):
            entry = start
            while entry is not end and entry.next is not None:
                if entry.message_class in kept:
                    self._push(entry.message_class, entry.wire, entry)
                entry = entry.next
            for item in kept:
                counts[item] = sizes[item] = 0
        self._tally(reason).add_all(counts, sizes)
        mask = self._mask_at(end)
        for gate in self._gates:
            if gate.restart and gate.start.sequence <= end.sequence:
                self._tally(reason).add_all(*_header_totals(gate.restart))
                gate.restart = ()
        behind = [gate for gate in self._gates if gate.start.sequence > end.sequence]
        self._gates = ([Gate(end, mask, DropReason.REFUSED)] if mask else []) + behind
        self.entry = end

    def _jump(self, gop: Gop, reason: DropReason) -> None:
        """Go to the key frame of `gop`, its restart messages first; nothing to do where the cursor is there already."""
        key = _key_of(gop)
        if key.sequence > self.entry.sequence:
            self._drop_up_to(key, reason)
            self.restarts += 1
            self._offer_restart(gop.restart)
            for wire in gop.restart:
                self._push(_HEADER, wire, key)

    def _thin_oldest(self, room: Room) -> None:
        tail = self._tail()
        entry = self.entry
        while (
            entry is not tail
            and entry.next is not None
            and not room.fits(tail.offset - entry.offset, tail.sequence - entry.sequence, entry.enqueued_at)
        ):
            entry = entry.next
        self._drop_up_to(entry, DropReason.THINNED, keep_headers=True)


def _key_of(gop: Gop) -> Entry:
    """The key frame of a group that is not the nameless one at the beginning of a log."""
    if gop.key is None:
        raise AssertionError("only the first group of a log has no key frame")
    return gop.key


def _header_totals(wires: tuple[bytes, ...]) -> tuple[list[int], list[int]]:
    counts, sizes = [0] * CLASS_COUNT, [0] * CLASS_COUNT
    counts[_HEADER] = len(wires)
    sizes[_HEADER] = sum(len(wire) for wire in wires)
    return counts, sizes
