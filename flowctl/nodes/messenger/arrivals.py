"""What arrives from one peer (pure): what is new, what was there before, and what has to wait for another.

Theory of operation. A message counts as seen when its handler has run, not before: until then it is *being handled*,
and the same message arriving again is neither handed on nor acknowledged. A handler that fails leaves no trace, so the
sender's next attempt is handled.

Numbers are per incarnation of the sender. One that was not met before is the sender's new life: what was seen of the
old one is forgotten, and what still arrives from it is dropped. Where the new life has taken over messages of the one
that was met, what was seen of those stays; numbers above are forgotten all the same: a sender whose store is an old
copy gives them to other messages, and must not hear that these were received. A peer that announces nothing has
incarnation 0 for ever; it counts all its messages together, ours counts those to us
(`flowctl.nodes.messenger.seen.WhenFull`). As it is not told when another one has its identity, a life that one comes in
between of goes on where it was.

An ordered message is held back until the one that it names was handled, or until the sender says that it will not come;
and while another one is being handled. One that comes after a later one was begun has been given up: it is dropped.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from flowctl.nodes.messenger.seen import NumberVerdict, SeenNumbers, WhenFull
from flowctl.nodes.messenger.wire import Extension

MAX_HELD: Final = 4096
"""Ordered messages of one peer that are held back at most: the window of a sender."""
MAX_HELD_BYTES: Final = 16 << 20
"""Octets of the messages held back for one peer, with `HELD_COST_BYTES` for each."""
MAX_HELD_BYTES_OF_ALL: Final = 256 << 20
"""Octets held back for all peers of a messenger: a peer with many names has `MAX_HELD_BYTES` for each."""
HELD_COST_BYTES: Final = 512
"""Memory that a message held back takes beside its octets: it may have none."""
MOST_RETIRED: Final = 4
"""Earlier incarnations of a peer that are remembered, so that their late messages are known."""


class ArrivalVerdict(enum.Enum):
    HANDLE = "handle"  #: hand it on, then call `note_handled` or `note_failed`
    SEEN = "seen"  #: seen before: acknowledge it again
    WAIT = "wait"  #: being handled, or held back: nothing
    STALE = "stale"  #: of an earlier life of its sender: nothing
    OLD = "old"  #: below what is remembered, or out of order for it was given up: nothing
    FULL = "full"  #: nothing, it will come again


@dataclass(slots=True, eq=False)
class Arrived:
    incarnation: int
    message_id: int
    extension: Extension | None
    size_bytes: int
    item: Any  #: what the owner hands on

    @property
    def number(self) -> int:
        """The number by which the message is known: its sequence, or its id where it has no extension."""
        return self.message_id if self.extension is None else self.extension.sequence


@dataclass(slots=True, eq=False)
class HeldRoom:
    """Room for the messages that are held back, of all peers of a messenger."""

    left_bytes: int = MAX_HELD_BYTES_OF_ALL


class _Aside(NamedTuple):
    """What was seen of a life, while a peer that announces nothing has its identity."""

    incarnation: int
    ids: SeenNumbers
    sequences: SeenNumbers
    ordered: int


@dataclass(slots=True, eq=False)
class Arrivals:
    """What arrived from one peer."""

    _room: HeldRoom = field(default_factory=HeldRoom)
    incarnation: int | None = None  #: of the peer's present life; None: nothing has arrived
    _retired: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_RETIRED))
    _handling: dict[tuple[int, bool, int], Arrived] = field(default_factory=dict)
    _held: dict[int, Arrived] = field(default_factory=dict)  #: by the sequence that each waits for
    _held_bytes: int = 0
    _released: list[Arrived] = field(default_factory=list)
    _gap_closed: bool = False
    _aside: _Aside | None = None
    _ids: SeenNumbers = field(init=False)
    _sequences: SeenNumbers = field(init=False)
    _ordered: int = 0  #: the highest sequence of those that were begun in order
    _ordered_now: int = 0  #: the one of them that is being handled

    def __post_init__(self) -> None:
        self._begin_incarnation(None)

    def restore(
        self, incarnation: int, ids: list[tuple[int, int]], sequences: list[tuple[int, int]], old_below: int = 0
    ) -> None:
        """Begin with what an earlier life of ours saw of `incarnation`, as runs: first and last of each, ascending.

        `old_below` are the ids that were forgotten.
        """
        self._begin_incarnation(incarnation)
        self._ids.restore(ids, old_below)
        self._sequences.restore(sequences)

    def arrive(self, arrived: Arrived, taken_over: int = 0) -> ArrivalVerdict:
        """Decide what is done with a message; call `take_released` afterwards.

        `taken_over` is what the sender says of the life that is known here, if it has begun another (`Life.earlier`).
        """
        if arrived.incarnation != self.incarnation:
            aside = self._aside
            if aside is not None and arrived.incarnation != aside.incarnation:
                aside = None
            if aside is None and arrived.incarnation in self._retired:
                return ArrivalVerdict.STALE
            self._aside = None
            if self.incarnation:
                self._retired.append(self.incarnation)
                if not arrived.incarnation:
                    self._aside = _Aside(self.incarnation, self._ids, self._sequences, self._ordered)
            if aside is not None:
                self._go_on_with(aside)
            elif taken_over:
                self._take_over(arrived.incarnation, taken_over)
            else:
                self._begin_incarnation(arrived.incarnation)
        extension = arrived.extension
        if extension is None:
            return self._judge(arrived, self._ids.judge(arrived.message_id))
        if self._sequences.settle(extension.floor):
            self._gap_closed = True
            self._floor_raised(extension.floor)
        verdict = self._judge(arrived, self._sequences.judge(extension.sequence))
        return self._in_order(arrived, extension) if verdict is ArrivalVerdict.HANDLE else verdict

    def note_handled(self, arrived: Arrived) -> bool:
        """Note that its handler has run. False: do not acknowledge, for its sender has begun a new life."""
        self._handling.pop(_slot(arrived), None)
        aside = self._aside
        if arrived.incarnation != self.incarnation:
            if aside is not None and arrived.incarnation == aside.incarnation:
                (aside.ids if arrived.extension is None else aside.sequences).first_time(arrived.number)
            return False
        (self._ids if arrived.extension is None else self._sequences).first_time(arrived.number)
        if arrived.extension is not None:
            self._end_ordered(arrived)
            if self._held:
                self._release_after(arrived.extension.sequence)
        return True

    def note_failed(self, arrived: Arrived) -> None:
        self._handling.pop(_slot(arrived), None)
        self._end_ordered(arrived)

    def take_released(self) -> list[Arrived]:
        """Return the messages that are held back no more, in order; treat each as if it had just arrived."""
        released, self._released = self._released, []
        return released

    @property
    def floor(self) -> int:
        """The sequence below which the peer has settled all its messages."""
        return self._sequences.floor

    @property
    def old_below(self) -> int:
        """The id below which ids were forgotten, for there were too many gaps."""
        return self._ids.floor

    def gap_closed(self) -> bool:
        """Return whether the floor was raised over numbers that were not seen, since the last call."""
        closed, self._gap_closed = self._gap_closed, False
        return closed

    @property
    def gap_count(self) -> int:
        return len(self._ids.gaps) + len(self._sequences.gaps)

    @property
    def idle(self) -> bool:
        return not (self._handling or self._held)

    @property
    def is_handling(self) -> bool:
        return bool(self._handling)

    def drop_held(self) -> None:
        """Drop what is held back: it was not acknowledged, and comes again."""
        self._held.clear()
        self._room.left_bytes += self._held_bytes
        self._held_bytes = 0

    # --- inner steps ---------------------------------------------------------------------------------------------

    def _begin_incarnation(self, incarnation: int | None) -> None:
        self.incarnation = incarnation
        self._ids = SeenNumbers(WhenFull.FORGET)
        self._sequences = SeenNumbers(WhenFull.REFUSE)
        self._sequences.settle(1)  # they begin with 1
        self.drop_held()
        self._ordered = self._ordered_now = 0

    def _go_on_with(self, aside: _Aside) -> None:
        self._begin_incarnation(aside.incarnation)
        self._retired.remove(aside.incarnation)
        self._ids, self._sequences, self._ordered = aside.ids, aside.sequences, aside.ordered
        if (aside.incarnation, False, aside.ordered) in self._handling:
            self._ordered_now = aside.ordered

    def _take_over(self, incarnation: int, end: int) -> None:
        """Go on with a new life of the peer, which has the messages of the old one below `end`, and only those."""
        before, self.incarnation = self.incarnation, incarnation
        self._ids.forget_from(end)
        self._sequences.forget_from(end + 1)
        self.drop_held()
        self._ordered = self._ordered if self._ordered <= end else 0
        self._ordered_now = self._ordered_now if self._ordered_now <= end else 0
        handling, self._handling = self._handling.values(), {}
        for arrived in handling:
            if arrived.incarnation == before and arrived.number < end + (arrived.extension is not None):
                arrived.incarnation = incarnation
            self._handling[_slot(arrived)] = arrived

    def _judge(self, arrived: Arrived, verdict: NumberVerdict) -> ArrivalVerdict:
        if verdict is NumberVerdict.NEW:
            slot = _slot(arrived)
            if slot in self._handling:
                return ArrivalVerdict.WAIT
            self._handling[slot] = arrived
            return ArrivalVerdict.HANDLE
        return ArrivalVerdict[verdict.name]

    def _in_order(self, arrived: Arrived, extension: Extension) -> ArrivalVerdict:
        """Begin a new message now, or hold it back."""
        sequence, after = extension.sequence, extension.after
        if not after:
            return ArrivalVerdict.HANDLE
        if sequence > self._ordered:
            before = self._ordered_now or (after if after != sequence and self._must_wait(after) else 0)
            if not before:
                self._ordered = self._ordered_now = sequence
                return ArrivalVerdict.HANDLE
            del self._handling[_slot(arrived)]
            return self._hold(arrived, before)
        if sequence == self._ordered:  # its handler failed
            self._ordered_now = sequence
            return ArrivalVerdict.HANDLE
        del self._handling[_slot(arrived)]
        return ArrivalVerdict.OLD

    def _end_ordered(self, arrived: Arrived) -> None:
        extension = arrived.extension
        if extension and extension.sequence == self._ordered_now and arrived.incarnation == self.incarnation:
            self._ordered_now = 0

    def _must_wait(self, after: int) -> bool:
        return after >= self._sequences.floor and self._sequences.judge(after) is not NumberVerdict.SEEN

    def _hold(self, arrived: Arrived, after: int) -> ArrivalVerdict:
        if after in self._held:
            return ArrivalVerdict.WAIT
        cost_bytes = arrived.size_bytes + HELD_COST_BYTES
        # What a peer has held back it leaves to others once more.
        if len(self._held) >= MAX_HELD or self._held_bytes + cost_bytes > min(MAX_HELD_BYTES, self._room.left_bytes):
            return ArrivalVerdict.FULL
        self._held[after] = arrived
        self._held_bytes += cost_bytes
        self._room.left_bytes -= cost_bytes
        return ArrivalVerdict.WAIT

    def _release_after(self, after: int) -> None:
        held = self._held.pop(after, None)
        if held is not None:
            cost_bytes = held.size_bytes + HELD_COST_BYTES
            self._held_bytes -= cost_bytes
            self._room.left_bytes += cost_bytes
            new = self._judge(held, self._sequences.judge(held.number)) is ArrivalVerdict.HANDLE
            if new and held.extension is not None and self._in_order(held, held.extension) is ArrivalVerdict.HANDLE:
                self._released.append(held)

    def _floor_raised(self, floor: int) -> None:
        """Release what waits for a message that will not come; a message given up itself is not new any more."""
        for after in [after for after in self._held if after < floor]:
            self._release_after(after)


def _slot(arrived: Arrived) -> tuple[int, bool, int]:
    return arrived.incarnation, arrived.extension is None, arrived.number
