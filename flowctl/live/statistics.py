"""Snapshots of the live server: what the demo, the tests and the command line show."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowctl.core.flow.state import SendState
from flowctl.core.sending.figures import SenderStatistics
from flowctl.core.server.totals import NO_FLOW, FlowTotals
from flowctl.live.judging.budget import NO_BUDGET, BudgetStatistics
from flowctl.reasons import CloseReason


@dataclass(frozen=True, slots=True)
class ViewerStatistics:
    """One viewer of a stream.

    Args:
        why: the state in one line: axis, value, limit, since when, who is to blame.
        totals: what it was sent and spared since it began to play this stream.
        viewer_delay_ms: how far behind it is: the age of the oldest that it has not taken, here or in the kernel.
        work_s: time that its input has taken of its thread, in seconds.
        protocol: over which it plays: ``rtmp``, ``http-flv`` or ``ws-flv``.
    """

    number: int
    peer: tuple[str, int]
    user_agent: str
    state: SendState
    why: str
    sender: SenderStatistics
    input_pauses: dict[str, int]
    connected_s: float
    totals: FlowTotals = NO_FLOW
    viewer_delay_ms: float = 0.0
    work_s: float = 0.0
    protocol: str = "rtmp"


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSummary:
    """Sums over all streams, cheap enough for each second.

    Args:
        states: number of viewers per state, READY first.
        worst_delay_ms: of the viewers that lag, at their last samples.
        dropped_messages: dropped for the viewers that are there; an episode of drops counts when it is in the ledger.
        returns: times one of them was brought back to live.
        budget: memory held for slow viewers, and who gave way.
    """

    streams: int
    states: tuple[int, int, int, int]
    missing_pictures: int
    least_picture_share: float
    worst_delay_ms: float
    dropped_messages: int
    returns: int
    budget: BudgetStatistics


@dataclass(frozen=True, slots=True)
class EndedViewer:
    """A viewer that has gone.

    Args:
        details: axis, value and limit, or what else there is to say.
    """

    number: int
    peer: tuple[str, int]
    stream: str
    reason: CloseReason
    details: str
    sender: SenderStatistics
    connected_s: float


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """One stream.

    Args:
        publisher: address and port. None: nobody publishes here.
        states: number of viewers per state, READY first.
        before_key_count: frames not passed on because the publisher had not sent a key frame yet.
        totals: what all viewers were sent and spared, those that have gone included.
        held_bytes: what its logs hold, counted once however many viewers wait for it.
        follows: the server that it is followed from, in words. Empty: it is published here, or not at all.
    """

    name: str
    publisher: tuple[str, int] | None
    media: str
    standby: int
    messages_in: tuple[int, ...]
    bytes_in: int
    states: tuple[int, int, int, int]
    viewers: list[ViewerStatistics] = field(default_factory=list)
    before_key_count: int = 0
    totals: FlowTotals = NO_FLOW
    missing_pictures: int = 0
    held_bytes: int = 0
    follows: str = ""


@dataclass(frozen=True, slots=True)
class HubStatistics:
    """The whole live server.

    Args:
        ended: the last viewers that have gone, oldest first.
        closed: connections ended so far, by reason.
        limits_hit: limits that ended connections, refused requests or slowed input down, by name.
        totals: what all viewers of all streams were sent and spared, those that have gone included.
        budget: memory held for slow viewers, and who gave way.
    """

    streams: dict[str, StreamStatistics]
    ended: list[EndedViewer]
    closed: dict[CloseReason, int]
    limits_hit: dict[str, int]
    totals: FlowTotals = NO_FLOW
    budget: BudgetStatistics = NO_BUDGET
