"""The ledger of a connection: every change of state, episode of drops, pause and close, with its cause, bounded."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from flowctl.counts import Counts
from flowctl.flow import StateChange
from flowctl.ladder import Move
from flowctl.reasons import CloseReason, DropReason

LEDGER_ENTRIES: Final = 64
"""Entries kept per connection; older ones are forgotten, their number is not."""


class LedgerKind(enum.Enum):
    """What an entry is about."""

    STATE = "state"
    DROPS = "drops"
    PAUSE = "pause"
    RESUME = "resume"
    LIMITS = "limits"
    STEP = "step"
    RETURN = "return"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One thing that was done to a peer, and why.

    Args:
        kind: what it is about.
        at: time in seconds on the Sender's clock.
        why: one line: cause, axis, value, limit.
        change: the edge, for STATE.
        dropped: what an episode of drops took, by reason, for DROPS.
        duration_s: length of the episode, for DROPS and RESUME; 0 for the others.
        reason: why the connection ended, for CLOSE.
        delay_removed_ms: by how much what waits became younger, for DROPS and RETURN; 0 for the others.
        move: the change of the ladder's step, for STEP.
    """

    kind: LedgerKind
    at: float
    why: str
    change: StateChange | None = None
    dropped: dict[DropReason, Counts] | None = None
    duration_s: float = 0.0
    reason: CloseReason | None = None
    delay_removed_ms: float = 0.0
    move: Move | None = None


class Ledger:
    """The last entries of one connection. Not thread-safe: its Sender's lock guards it."""

    __slots__ = ("_entries", "_unread", "forgotten")

    def __init__(self) -> None:
        self._entries: list[LedgerEntry] = []  # a deque is 760 bytes however few there are
        self._unread = 0
        self.forgotten = 0

    def add(self, entry: LedgerEntry) -> None:
        """Append one entry, forgetting the oldest where the ledger is full."""
        if len(self._entries) >= LEDGER_ENTRIES:
            del self._entries[0]
            self.forgotten += 1
        self._entries.append(entry)
        self._unread = min(self._unread + 1, LEDGER_ENTRIES)

    def entries(self) -> tuple[LedgerEntry, ...]:
        """Return all entries kept, oldest first."""
        return tuple(self._entries)

    def unread(self) -> tuple[LedgerEntry, ...]:
        """Return the entries added since the last call, oldest first."""
        count, self._unread = self._unread, 0
        return tuple(self._entries)[-count:] if count else ()


def describe_change(change: StateChange) -> str:
    """Return cause, axis, value and limit of an edge in one line."""
    if change.axis is None or change.value is None:
        return change.cause.value.replace("_", " ")
    return f"{change.cause.value.replace('_', ' ')}: {change.axis.value} {change.value:.0f}, limit {change.limit}"


def describe_drops(lost: dict[DropReason, Counts]) -> str:
    """Return what was dropped, by reason and class, in one line."""
    parts = []
    for reason, counts in lost.items():
        what = ", ".join(f"{count} {name}" for name, count in counts.by_name().items())
        parts.append(f"{reason.value}: {what}")
    return "; ".join(parts)


def difference(after: dict[DropReason, Counts], before: dict[DropReason, Counts]) -> dict[DropReason, Counts]:
    """Return what was dropped between two accounts, by reason, without the reasons that stayed as they were."""
    result = {}
    for reason, counts in after.items():
        delta = counts - before[reason] if reason in before else counts
        if delta.total_messages:
            result[reason] = delta
    return result
