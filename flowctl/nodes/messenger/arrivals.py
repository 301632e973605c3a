"""What arrives from one peer (pure): what is new, what was there before, and what has to wait for another.

Theory of operation. A message counts as seen when its handler has run, not before: until then it is *being handled*,
and the same message arriving again is neither handed on nor acknowledged. A handler that fails leaves no trace, so the
sender's next attempt is handled.

Numbers are per incarnation of the sender. One that was not met before is the sender's new life: what was seen of the
old one is forgotten, and what still arrives from it is dropped. A peer that announces nothing has incarnation 0 for
ever; it counts all its messages together, ours counts those to us (`flowctl.nodes.messenger.seen.AtMost`).

An ordered message is held back until the one that it names was handled, or until the sender says that it will not come;
and while another one is being handled. One that comes after a later one was begun has been given up: it is dropped.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from flowctl.nodes.messenger.seen import AtMost, NumberVerdict, SeenNumbers
from flowctl.nodes.messenger.wire import Extension

MAX_HELD: Final = 4096
"""Ordered messages of one peer held back: the window of a sender."""
MAX_HELD_BYTES: Final = 16 << 20
"""Octets of them, with what each costs beside its own."""
MAX_HELD_BYTES_OF_ALL: Final = 256 << 20
"""Octets of those of all peers of a messenger: a peer that comes under many names has as many times the above."""
HELD_COST_BYTES: Final = 512
"""What a message that is held back costs beside its octets: it may have none."""
RETIRED: Final = 4
"""Earlier incarnations of a peer whose late messages are known."""


class Fate(enum.Enum):
    HANDLE = "handle"  #: hand it on, then call `applied` or `failed`
    AGAIN = "again"  #: seen before: acknowledge it again
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
        """What it is known by: its sequence, or its id where there is none."""
        return self.message_id if self.extension is None else self.extension.sequence


@dataclass(slots=True, eq=False)
class HeldRoom:
    """Room for the messages that are held back, of all peers of a messenger."""

    left_bytes: int = MAX_HELD_BYTES_OF_ALL


@dataclass(slots=True, eq=False)
class Arrivals:
    """What arrived from one peer."""

    _room: HeldRoom = field(default_factory=HeldRoom)
    incarnation: int | None = None  #: of the peer's present life; None: nothing has arrived
    _retired: deque[int] = field(default_factory=lambda: deque(maxlen=RETIRED))
    _handling: set[tuple[int, bool, int]] = field(default_factory=set)
    _held: dict[int, Arrived] = field(default_factory=dict)  #: by the sequence that each waits for
    _held_bytes: int = 0
    _released: list[Arrived] = field(default_factory=list)
    _gap_closed: bool = False
    _ids: SeenNumbers = field(init=False)
    _sequences: SeenNumbers = field(init=False)
    _ordered: int = 0  #: the highest sequence of those that were begun in order
    _ordered_now: int = 0  #: the one of them that is being handled

    def __post_init__(self) -> None:
        self._begin(None)

    def restore(
        self, incarnation: int, ids: list[tuple[int, int]], sequences: list[tuple[int, int]], old_below: int = 0
    ) -> None:
        """Begin with what an earlier life of ours saw of `incarnation`, as runs: first and last of each, ascending.

        `old_below` are the ids that were forgotten.
        """
        self._begin(incarnation)
        self._ids.restore(ids, old_below)
        self._sequences.restore(sequences)

    def arrive(self, arrived: Arrived) -> Fate:
        """Tell what is to be done with a message; afterwards see `take_released`."""
        if arrived.incarnation != self.incarnation:
            if arrived.incarnation in self._retired:
                return Fate.STALE
            if self.incarnation:
                self._retired.append(self.incarnation)
            self._begin(arrived.incarnation)
        extension = arrived.extension
        if extension is None:
            return self._judge(arrived, self._ids.look(arrived.message_id))
        if self._sequences.settle(extension.floor):
            self._gap_closed = True
            self._floor_raised(extension.floor)
        fate = self._judge(arrived, self._sequences.look(extension.sequence))
        return self._in_order(arrived, extension) if fate is Fate.HANDLE else fate

    def applied(self, arrived: Arrived) -> bool:
        """Its handler has run: it is seen from now on. False: do not acknowledge, its sender has begun a new life."""
        self._handling.discard(_slot(arrived))
        if arrived.incarnation != self.incarnation:
            return False
        (self._ids if arrived.extension is None else self._sequences).first_time(arrived.number)
        if arrived.extension is not None:
            self._end_ordered(arrived)
            if self._held:
                self._let_go(arrived.extension.sequence)
        return True

    def failed(self, arrived: Arrived) -> None:
        self._handling.discard(_slot(arrived))
        self._end_ordered(arrived)

    def take_released(self) -> list[Arrived]:
        """Return what is held back no more, in order; each is to be handled as if it had just arrived."""
        released, self._released = self._released, []
        return released

    @property
    def floor(self) -> int:
        """Sequences below this are done with, as the peer says."""
        return self._sequences.floor

    @property
    def old_below(self) -> int:
        """Ids below this were forgotten, for there were too many gaps."""
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

    def _begin(self, incarnation: int | None) -> None:
        self.incarnation = incarnation
        self._ids = SeenNumbers(AtMost.FORGET)
        self._sequences = SeenNumbers(AtMost.REFUSE)
        self._sequences.settle(1)  # they begin with 1
        self.drop_held()
        self._ordered = self._ordered_now = 0

    def _judge(self, arrived: Arrived, verdict: NumberVerdict) -> Fate:
        if verdict is NumberVerdict.NEW:
            slot = _slot(arrived)
            if slot in self._handling:
                return Fate.WAIT
            self._handling.add(slot)
            return Fate.HANDLE
        return {NumberVerdict.SEEN: Fate.AGAIN, NumberVerdict.OLD: Fate.OLD, NumberVerdict.FULL: Fate.FULL}[verdict]

    def _in_order(self, arrived: Arrived, extension: Extension) -> Fate:
        """Begin a new message now, or hold it back."""
        sequence, after = extension.sequence, extension.after
        if not after:
            return Fate.HANDLE
        if sequence > self._ordered:
            before = self._ordered_now or (after if after != sequence and self._must_wait(after) else 0)
            if not before:
                self._ordered = self._ordered_now = sequence
                return Fate.HANDLE
            self._handling.discard(_slot(arrived))
            return self._hold(arrived, before)
        if sequence == self._ordered:  # its handler failed
            self._ordered_now = sequence
            return Fate.HANDLE
        self._handling.discard(_slot(arrived))
        return Fate.OLD

    def _end_ordered(self, arrived: Arrived) -> None:
        extension = arrived.extension
        if extension and extension.sequence == self._ordered_now and arrived.incarnation == self.incarnation:
            self._ordered_now = 0

    def _must_wait(self, after: int) -> bool:
        return after >= self._sequences.floor and self._sequences.look(after) is not NumberVerdict.SEEN

    def _hold(self, arrived: Arrived, after: int) -> Fate:
        if after in self._held:
            return Fate.WAIT
        cost_bytes = arrived.size_bytes + HELD_COST_BYTES
        # What a peer has held back it leaves to others once more.
        if len(self._held) >= MAX_HELD or self._held_bytes + cost_bytes > min(MAX_HELD_BYTES, self._room.left_bytes):
            return Fate.FULL
        self._held[after] = arrived
        self._held_bytes += cost_bytes
        self._room.left_bytes -= cost_bytes
        return Fate.WAIT

    def _let_go(self, after: int) -> None:
        found = self._held.pop(after, None)
        if found is not None:
            cost_bytes = found.size_bytes + HELD_COST_BYTES
            self._held_bytes -= cost_bytes
            self._room.left_bytes += cost_bytes
            new = self._judge(found, self._sequences.look(found.number)) is Fate.HANDLE
            if new and found.extension is not None and self._in_order(found, found.extension) is Fate.HANDLE:
                self._released.append(found)

    def _floor_raised(self, floor: int) -> None:
        """Let go what waits for a message that will not come; what is given up itself is new no more."""
        for after in [after for after in self._held if after < floor]:
            self._let_go(after)


def _slot(arrived: Arrived) -> tuple[int, bool, int]:
    return arrived.incarnation, arrived.extension is None, arrived.number
