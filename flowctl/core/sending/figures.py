"""What a Sender tells of itself: figures inside, in flat rows, for samplers; counts outside, in statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from flowctl.core.flow.counts import NO_COUNTS, NO_FIGURES, Counts, Figures
from flowctl.core.flow.state import EMPTY_LOAD, Load, SendState
from flowctl.core.flow.timing import Forecast
from flowctl.core.outgoing.streamlog import Entry, StreamLog
from flowctl.core.sending.blame import Blame
from flowctl.reasons import CloseReason, DropReason


class Account(NamedTuple):
    """How a Sender stands at one instant, for callers that look at thousands of them: see `Sender.account`."""

    state: SendState = SendState.READY
    picture_share: float = 1.0
    delay_ms: float = 0.0  # the age of the oldest that the peer has not taken, here or in the kernel; 0: it keeps up
    lagging: bool = False  # something was left over at the last write: the kernel had enough to do since
    noted: bool = False  # its ledger has entries; if not, nothing was ever done to the peer
    bytes_sent: int = 0  # wire bytes that the kernel has taken
    pulse: int | None = 0
    entry: Entry | None = None  # where it stands in the followed log
    own_bytes: int = 0  # queued for this peer alone: all that is not read from the log
    own_messages: int = 0
    load: Load = EMPTY_LOAD  # this and what follows are there where rows were asked for
    stalled_s: float = 0.0
    drain_bytes_per_s: float | None = None  # what the peer takes when there is always something; None: not measured
    accepted: Figures = NO_FIGURES
    sent: Figures = NO_FIGURES  # what the kernel took completely
    dropped: Figures = NO_FIGURES
    idle: bool = True
    # (log, where it stands, its end) of a member of a cohort: its figures are of that instant. None: it is none, or the
    # cohort went on meanwhile.
    cohort: tuple[StreamLog, Entry, Entry] | None = None
    joined_at: float = 0.0  # when it began to follow its log
    cached_bytes: int = 0  # of `accepted`, what that gave it of what was published before
    blamed: Blame = Blame.NOBODY  # for the lag that it is in; not told without rows


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderStatistics:
    """A snapshot of one Sender. accepted = sent + dropped + queued holds per class.

    Args:
        state: present state.
        since: when it was entered, in seconds on the Sender's clock.
        load: what is queued, on three axes.
        accepted: what was offered while open, by class.
        sent: what the kernel has taken completely.
        dropped: what was refused or thrown away, by reason.
        queued: what is left, a message in flight included.
        time_in_states_s: seconds in READY, OVERLOADED, SOFT_LIMIT and HARD_LIMIT.
        transitions: number of edges.
        recoveries: edges back to READY.
        longest_stall_s: longest time in which the kernel took nothing while something was queued.
        sends_after_close: messages refused because the Sender was closed.
        restarts: times the peer was brought to a key frame after a loss.
        key_waits_expired: times no key frame came in time.
        bytes_sent: wire bytes that the kernel took.
        close_reason: why the Sender was closed. None while it is open.
        picture_share: share of the pictures of the last 20 s that were sent, 0 to 1.
        waited_s: seconds in which something waited for the peer and its rate was measured: its line was used.
        delay_ms: how far behind the peer was at the last sample: the age of the oldest that it had not taken, here or
            in the kernel; 0 where it was never sampled, or has kept up since.
        drain_bytes_per_s: what the peer takes when there is always something to take. None: not measured.
        forecast: when the hard limit will be reached at the present fill and drain rate. None: never.
        returns: times old media were skipped because the peer was behind live.
        delay_removed_ms: delay that skipping and thinning took away, summed up.
        stalled_s: for how long the kernel has taken nothing while something is queued; 0 while it takes.
    """

    state: SendState
    since: float
    load: Load = EMPTY_LOAD
    accepted: Counts = NO_COUNTS
    sent: Counts = NO_COUNTS
    dropped: dict[DropReason, Counts] = field(default_factory=dict)
    queued: Counts = NO_COUNTS
    time_in_states_s: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    transitions: int = 0
    recoveries: int = 0
    longest_stall_s: float = 0.0
    sends_after_close: int = 0
    restarts: int = 0
    key_waits_expired: int = 0
    bytes_sent: int = 0
    close_reason: CloseReason | None = None
    picture_share: float = 1.0
    waited_s: float = 0.0
    delay_ms: float = 0.0
    drain_bytes_per_s: float | None = None
    forecast: Forecast | None = None
    returns: int = 0
    delay_removed_ms: float = 0.0
    stalled_s: float = 0.0

    @property
    def dropped_messages(self) -> int:
        """Dropped messages of all classes and reasons."""
        return sum(counts.total_messages for counts in self.dropped.values())
