"""What many connections were given, sent and spared, taken together: the counts of a stream, and of a process.

A total is a sum of snapshots of Senders, so what holds for each of them holds for it: accepted = sent + dropped +
queued, per class. Connections that have gone are summed up once, when they go; those that are there are asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from flowctl.core.flow.counts import NO_COUNTS, Counts, total
from flowctl.core.sending.figures import SenderStatistics
from flowctl.reasons import DropReason
from flowctl.receiver import ReceiverStatistics


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowTotals:
    """Sums over several connections; add two with ``+``.

    Args:
        connections: how many are summed up.
        accepted: what was offered while open, by class.
        sent: what the kernel has taken completely.
        dropped: what was refused or thrown away, by reason and class.
        queued: what is left.
        time_in_states_s: seconds in READY, OVERLOADED, SOFT_LIMIT and HARD_LIMIT.
        transitions: edges of the send states.
        recoveries: edges back to READY.
        restarts: times a peer was brought to a key frame after a loss.
        key_waits_expired: times no key frame came in time.
        sends_after_close: messages refused because the connection was closed.
        bytes_sent: wire bytes that the kernel took.
        longest_stall_s: longest time in which the kernel took nothing of one of them while something was queued.
        bytes_in: bytes read.
        input_pauses: how often input was paused, by reason.
        input_paused_s: seconds in which input was paused.
    """

    connections: int = 0
    accepted: Counts = NO_COUNTS
    sent: Counts = NO_COUNTS
    dropped: Mapping[DropReason, Counts] = field(default_factory=dict)
    queued: Counts = NO_COUNTS
    time_in_states_s: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    transitions: int = 0
    recoveries: int = 0
    restarts: int = 0
    key_waits_expired: int = 0
    sends_after_close: int = 0
    bytes_sent: int = 0
    longest_stall_s: float = 0.0
    bytes_in: int = 0
    input_pauses: Mapping[str, int] = field(default_factory=dict)
    input_paused_s: float = 0.0

    @property
    def dropped_messages(self) -> int:
        return sum(counts.total_messages for counts in self.dropped.values())

    @property
    def conserved(self) -> bool:
        """Whether accepted = sent + dropped + queued holds for every class."""
        return self.accepted == self.sent + total(self.dropped.values()) + self.queued

    def __add__(self, other: FlowTotals) -> FlowTotals:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _NUMBERS}
        states = zip(self.time_in_states_s, other.time_in_states_s, strict=True)
        return FlowTotals(
            **sums,
            dropped=_added(self.dropped, other.dropped, NO_COUNTS),
            input_pauses=_added(self.input_pauses, other.input_pauses, 0),
            time_in_states_s=tuple(one + more for one, more in states),
            longest_stall_s=max(self.longest_stall_s, other.longest_stall_s),
        )


_OTHERS: Final = frozenset({"dropped", "input_pauses", "time_in_states_s", "longest_stall_s"})
_NUMBERS: Final = tuple(item.name for item in fields(FlowTotals) if item.name not in _OTHERS)
_OF_SENDER: Final = tuple({item.name for item in fields(FlowTotals)} & {item.name for item in fields(SenderStatistics)})
NO_FLOW: Final = FlowTotals()


def _added(mine: Mapping[Any, Any], others: Mapping[Any, Any], nothing: Any) -> dict[Any, Any]:
    return {name: mine.get(name, nothing) + others.get(name, nothing) for name in {**mine, **others}}


def totals_of(sender: SenderStatistics, receiver: ReceiverStatistics) -> FlowTotals:
    return FlowTotals(
        connections=1,
        bytes_in=receiver.bytes_in,
        input_pauses=receiver.pauses,
        input_paused_s=receiver.paused_s,
        **{name: getattr(sender, name) for name in _OF_SENDER},
    )
