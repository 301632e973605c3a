"""What a Sender tells of itself: figures inside, in flat rows, for samplers; counts outside, in statistics (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from operator import sub
from typing import Final, NamedTuple

from flowctl.core.flow.counts import NO_COUNTS, NO_FIGURES, Counts, Figures, total
from flowctl.core.flow.state import EMPTY_LOAD, Load, SendState
from flowctl.core.flow.timing import Forecast, target_s
from flowctl.core.outgoing.streamlog import Entry, StreamLog
from flowctl.core.sending.blame import Blame
from flowctl.core.sending.contract import Standing
from flowctl.core.sending.judgement import Judgement
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.sending.slowpeer import SlowPeer
from flowctl.reasons import CloseReason, DropReason

_COHORT: Final = Standing.COHORT
_KEEPS_UP: Final = SlowPeer(SenderSettings())
"""Measurements of a peer that has never been slow, only to be read."""


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


class LineLook(NamedTuple):
    """What a Sender knows of the line to its peer; what follows `waiting_bytes` only of a peer that is slow."""

    written_bytes: int  # to the kernel, since the connection began
    waiting_bytes: int  # of these, what the peer has not acknowledged
    lagging: bool = False
    drain: float | None = None  # bytes per second that it takes, if that is known now
    delay_s: float = 0.0  # age of the oldest that it has not taken
    target_s: float = inf  # the target delay
    key_sequence: int = -1  # key frame of the group in which it stands
    lost_pictures: int = 0  # pictures that it was not sent, since it came


def account_of(judgement: Judgement, now: float, kernel_bytes: int, *, noted: bool, rows: bool) -> Account:
    """Return how a Sender stands.

    Args:
        judgement: its own.
        now: in seconds.
        kernel_bytes: what the kernel holds; counts for a peer that is measured.
        noted: its ledger has entries.
        rows: whether load, figures by class and place in the cohort are wanted too.
    """
    core, outbox, slow = judgement.core, judgement.outbox, judgement.slow
    member = judgement.stands is _COHORT
    load, stalled_s = EMPTY_LOAD, 0.0
    if rows:
        load = outbox.load(now, core.limits.overhead_bytes)  # first: it moves past what is refused
        if core.would_block:
            stalled_s = judgement.stalled_s(now)
    cursor = outbox.cursor
    entry = None if cursor is None else cursor.entry
    accepted = sent = dropped = queued = NO_FIGURES
    cohort = None
    bytes_sent = outbox.bytes_sent
    if member and entry is not None:
        bytes_sent += entry.offset
    if rows:
        # A cohort moves its members without our lock: before the figures, and again after them.
        tail = cursor.log.tail if cursor is not None and member else None
        accepted, dropped, queued = outbox.figures()
        sent = tuple(map(sub, map(sub, accepted, queued), dropped))
        if tail is not None and cursor is not None and cursor.entry is entry and cursor.log.tail is tail:
            cohort = (cursor.log, cursor.entry, tail)
    return Account(
        core.state,
        1.0 if slow is None else judgement.picture_share(now),
        0.0 if slow is None else judgement.behind_ms(now, kernel_bytes),
        judgement.lagging and not member,
        noted,
        bytes_sent,
        outbox.bytes_sent if slow is None else None,
        entry,
        *outbox.own,
        load,
        stalled_s,
        None if slow is None else slow.drain.rate,
        accepted,
        sent,
        dropped,
        not any(queued),
        cohort,
        *((0.0, 0) if cursor is None else (cursor.joined_at, cursor.cached_bytes)),
        judgement.blamed(load, now, kernel_bytes) if rows else Blame.NOBODY,
    )


def statistics_of(
    judgement: Judgement,
    now: float,
    counted: Load,
    kernel_bytes: int,
    *,
    sends_after_close: int,
    close_reason: CloseReason | None,
) -> SenderStatistics:
    """Return a snapshot of a Sender; arguments as of `account_of`, and `counted`: what counts against its limits."""
    core, outbox, slow = judgement.core, judgement.outbox, judgement.slow or _KEEPS_UP
    load = judgement.load(now)  # first: it moves the cursor past what is refused
    accepted, dropped, queued = outbox.accounts()
    return SenderStatistics(
        state=core.state,
        since=core.since,
        load=load,
        accepted=accepted,
        sent=accepted - queued - total(dropped.values()),
        dropped=dropped,
        queued=queued,
        time_in_states_s=core.time_in_states(now),
        transitions=core.transitions,
        recoveries=core.recoveries,
        stalled_s=judgement.stalled_s(now),
        longest_stall_s=judgement.longest_stall_s(now),
        sends_after_close=sends_after_close,
        restarts=outbox.restarts,
        key_waits_expired=outbox.key_waits_expired,
        bytes_sent=judgement.bytes_sent,
        close_reason=close_reason,
        picture_share=judgement.picture_share(now),
        waited_s=slow.drain.waited_s,
        delay_ms=judgement.behind_ms(now, kernel_bytes),
        drain_bytes_per_s=slow.drain.rate,
        forecast=judgement.forecast(now, counted),
        returns=slow.returns,
        delay_removed_ms=slow.delay_removed_ms,
    )


def line_look_of(judgement: Judgement, now: float, kernel_bytes: int) -> LineLook:
    """Return what is known now of the line to a peer; arguments as of `account_of`."""
    written, slow, cursor = judgement.bytes_sent, judgement.slow, judgement.outbox.cursor
    if slow is None or cursor is None:
        return LineLook(written, kernel_bytes)
    return LineLook(
        written,
        kernel_bytes,
        lagging=judgement.lagging and judgement.stands is not _COHORT,
        drain=slow.drain.known(now),
        delay_s=(slow.behind(now, written, kernel_bytes) or judgement.load(now).age_ms) / 1000,
        target_s=target_s(judgement.core.limits.target_delay_ms, cursor.log.gop_duration_s),
        key_sequence=cursor.entry.gop.key_sequence,
        lost_pictures=cursor.pictures()[1],
    )
