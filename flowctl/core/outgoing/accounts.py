"""What one viewer of a log was offered, and what of it was dropped (pure).

The log counts its messages, so what a viewer was offered up to a place is a subtraction. Kept here is from where it
counts, and what the log does not know of: messages that are no entries of it, and what was dropped for which reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, sub
from typing import Final

from flowctl.core.flow.counts import Figures, Tally
from flowctl.core.flow.policy import DROPPABLE_MASK
from flowctl.core.flow.state import CLASS_COUNT, MessageClass
from flowctl.core.outgoing.streamlog import Entry
from flowctl.reasons import DropReason

_HEADER: Final = MessageClass.HEADER
_KEY: Final = MessageClass.KEY
PICTURES: Final = (_KEY, MessageClass.INTER, MessageClass.DISPOSABLE)


class LogAccount:
    """The account of one cursor, which begins at `start`. Not thread-safe: its Sender's lock guards it."""

    __slots__ = ("_base_counts", "_base_sizes", "_dropped", "_extra")

    def __init__(self, start: Entry) -> None:
        self._base_counts, self._base_sizes = start.counts, start.sizes  # those of the entry, which all share
        self._extra: Tally | None = None  # messages that are no entries: the restart messages
        self._dropped: dict[DropReason, Tally] | None = None

    def passed(self, entry: Entry) -> Figures:
        """Return what of the log was offered up to `entry`."""
        return tuple(map(sub, (*entry.counts, *entry.sizes), (*self._base_counts, *self._base_sizes)))

    def count_from(self, entry: Entry, passed: Sequence[int]) -> None:
        """Count on from `entry`, where so much of this log, or of others, was offered before."""
        base = tuple(map(sub, (*entry.counts, *entry.sizes), passed))
        self._base_counts, self._base_sizes = base[:CLASS_COUNT], base[CLASS_COUNT:]

    @property
    def extra(self) -> Tally:
        """What was offered and is no entry of the log."""
        if self._extra is None:
            self._extra = Tally()
        return self._extra

    def offer_headers(self, wires: Sequence[bytes]) -> None:
        for wire in wires:
            self.extra.add(_HEADER, len(wire))

    def lose_headers(self, wires: Sequence[bytes], reason: DropReason) -> None:
        for wire in wires:
            self.lost(reason).add(_HEADER, len(wire))

    def lost(self, reason: DropReason) -> Tally:
        """Return the tally of what was dropped for `reason`, to be added to."""
        dropped = self._dropped
        if dropped is None:
            dropped = self._dropped = {}
        tally = dropped.get(reason)
        if tally is None:
            tally = dropped[reason] = Tally()
        return tally

    def balance(self, tail: Entry) -> tuple[Figures, dict[DropReason, Figures]]:
        """Return (accepted, dropped by reason) up to `tail`."""
        accepted = self.passed(tail)
        if self._extra is not None:
            accepted = tuple(map(add, accepted, self._extra))
        return accepted, {reason: tuple(tally) for reason, tally in self._dropped.items()} if self._dropped else {}

    @property
    def late(self) -> int:
        tally = self._dropped.get(DropReason.LATE) if self._dropped is not None else None
        return 0 if tally is None else sum(tally[:CLASS_COUNT])

    def pictures(self, entry: Entry, mask: int) -> tuple[int, int]:
        """Return (pictures that were published up to `entry` since joining, those of them that were not sent).

        Of a viewer that wants no pictures, whose policy refuses `mask`, there are none. One that is refused everything,
        as while a hard limit is held, is no such viewer.
        """
        if mask >> _KEY & 1 and mask != DROPPABLE_MASK:
            return 0, 0
        counts, base = entry.counts, self._base_counts
        passed = sum(counts[item] - base[item] for item in PICTURES)
        return passed, sum(tally[item] for tally in (self._dropped or {}).values() for item in PICTURES)
