"""What many connections were given, sent and spared, taken together: the counts of a stream, and of a process.

A total is a sum of snapshots of Senders, so what holds for each of them holds for it: accepted = sent + dropped +
queued, per class. Connections that have gone are summed up once, when they go; those that are there are asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from flowctl.core.flow.counts import NO_COUNTS, Counts, shared, total
from flowctl.core.sending.figures import SenderStatistics
from flowctl.reasons import DropReason
from flowctl.receiver import ReceiverStatistics

_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})
_Times = tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowTotals:
    """Sums over several connections; add two with ``+``, take an earlier one of the same connections off with ``-``.

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
    time_in_states_s: _Times = (0.0, 0.0, 0.0, 0.0)
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
        """Dropped messages of all classes and reasons."""
        return sum(counts.total_messages for counts in self.dropped.values())

    @property
    def conserved(self) -> bool:
        """Whether accepted = sent + dropped + queued holds for every class."""
        return self.accepted == self.sent + total(self.dropped.values()) + self.queued

    def settled(self) -> FlowTotals:
        """Return this without what is still queued: as if it had not been offered yet."""
        return replace(self, accepted=self.accepted - self.queued, queued=NO_COUNTS)

    def baseline(self) -> FlowTotals:
        """Return what to take off later figures of the same connections, to have what came after."""
        # Every viewer keeps one: what is equal for all, or empty, is one object for all.
        accepted, sent = self.accepted - self.queued, shared(self.sent)
        return replace(
            self,
            connections=0,
            accepted=sent if accepted == sent else accepted,
            sent=sent,
            queued=NO_COUNTS,
            dropped=self.dropped or _NOTHING,
            input_pauses=self.input_pauses or _NOTHING,
        )

    def __add__(self, other: FlowTotals) -> FlowTotals:
        return self._with(other, 1)

    def __sub__(self, earlier: FlowTotals) -> FlowTotals:
        """Return what has come since `earlier`; the longest stall stays that of the whole time."""
        return self._with(earlier, -1)

    def _with(self, other: FlowTotals, sign: int) -> FlowTotals:
        dropped = {
            reason: _combine(self.dropped.get(reason, NO_COUNTS), other.dropped.get(reason, NO_COUNTS), sign)
            for reason in [*self.dropped, *(reason for reason in other.dropped if reason not in self.dropped)]
        }
        pauses = {
            name: self.input_pauses.get(name, 0) + sign * other.input_pauses.get(name, 0)
            for name in [*self.input_pauses, *(name for name in other.input_pauses if name not in self.input_pauses)]
        }
        mine, others = self.time_in_states_s, other.time_in_states_s
        return FlowTotals(
            connections=self.connections + sign * other.connections,
            accepted=_combine(self.accepted, other.accepted, sign),
            sent=_combine(self.sent, other.sent, sign),
            dropped={reason: counts for reason, counts in dropped.items() if counts.total_messages},
            queued=_combine(self.queued, other.queued, sign),
            time_in_states_s=(
                mine[0] + sign * others[0],
                mine[1] + sign * others[1],
                mine[2] + sign * others[2],
                mine[3] + sign * others[3],
            ),
            transitions=self.transitions + sign * other.transitions,
            recoveries=self.recoveries + sign * other.recoveries,
            restarts=self.restarts + sign * other.restarts,
            key_waits_expired=self.key_waits_expired + sign * other.key_waits_expired,
            sends_after_close=self.sends_after_close + sign * other.sends_after_close,
            bytes_sent=self.bytes_sent + sign * other.bytes_sent,
            longest_stall_s=max(self.longest_stall_s, other.longest_stall_s),
            bytes_in=self.bytes_in + sign * other.bytes_in,
            input_pauses={name: count for name, count in pauses.items() if count},
            input_paused_s=self.input_paused_s + sign * other.input_paused_s,
        )


def _combine(mine: Counts, others: Counts, sign: int) -> Counts:
    return mine + others if sign > 0 else mine - others


NO_FLOW: Final = FlowTotals()


def totals_of(sender: SenderStatistics, receiver: ReceiverStatistics) -> FlowTotals:
    return FlowTotals(
        connections=1,
        accepted=sender.accepted,
        sent=sender.sent,
        dropped=dict(sender.dropped),
        queued=sender.queued,
        time_in_states_s=sender.time_in_states_s,
        transitions=sender.transitions,
        recoveries=sender.recoveries,
        restarts=sender.restarts,
        key_waits_expired=sender.key_waits_expired,
        sends_after_close=sender.sends_after_close,
        bytes_sent=sender.bytes_sent,
        longest_stall_s=sender.longest_stall_s,
        bytes_in=receiver.bytes_in,
        input_pauses=dict(receiver.pauses),
        input_paused_s=receiver.paused_s,
    )
