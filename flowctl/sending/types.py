"""What a Sender takes and gives: results, settings, statistics, and what it needs of its surroundings."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from flowctl.errors import ConfigError
from flowctl.fieldtypes import check_fields
from flowctl.flow.counts import NO_COUNTS, Counts, Figures
from flowctl.flow.forecast import Forecast
from flowctl.flow.state import EMPTY_LOAD, Load, SendState, StateChange
from flowctl.outgoing.streamlog import Entry, StreamLog
from flowctl.reasons import CloseReason, DropReason

if TYPE_CHECKING:
    from flowctl.sender import Sender


class SendOutcome(enum.Enum):
    """What became of a message: it will be sent, the policy refused it, or the Sender is closed."""

    ACCEPTED = "accepted"
    DROPPED = "dropped"
    CLOSED = "closed"


class SendResult(NamedTuple):
    """What `Sender.send` returns, so that a caller need not race the callback.

    Attributes:
        outcome: what became of the message.
        state: the Sender's state after it.
    """

    outcome: SendOutcome
    state: SendState


class Frontend(Protocol):
    """The application's end of a Sender."""

    def send_state_changed(self, state: SendState, change: StateChange) -> None:
        """Note one edge.

        Called once per edge, in order, under the Sender's lock, from whichever thread caused it. Must not block and
        must not call a Sender, this one or another: that raises `ReentryError`. Pausing a Receiver is allowed; anything
        else that is to be done with the connection is scheduled on its Registration. What it raises is contained, and
        reported when the lock is released.
        """


class CohortLike(Protocol):
    """What a Sender needs of the fan-out that writes a log to viewers who keep up (see `flowctl.fanout.fanout`)."""

    @property
    def log(self) -> StreamLog:
        """The log that is fanned out."""

    def add(self, sender: Sender) -> None:
        """Serve `sender` from its own cursor until it has caught up. Owning thread."""

    def left(self, sender: Sender) -> None:
        """Serve a member from its own cursor from now on. Owning thread."""

    def runnable(self, sender: Sender) -> None:
        """Serve `sender` in its turn: the kernel takes more again, or it has more to write. Owning thread."""

    def remove(self, sender: Sender) -> None:
        """Serve `sender` no longer. Owning thread."""

    def limits_changed(self, sender: Sender) -> None:
        """The limits of `sender` are new. Owning thread."""


class SenderHost(Protocol):
    """What a Sender needs of the thread that owns it; a `Connection` is one."""

    def now(self) -> float:
        """Return the time in seconds."""

    def wrote(self, size_bytes: int) -> None:
        """Count what the kernel has taken; writes of a cohort are counted by its fan-out. The writing thread."""

    def request_flush(self) -> None:
        """Call `Sender.flush` soon on the owning thread. Any thread; idempotent while pending."""

    def want_writable(self, wanted: bool) -> None:  # noqa: FBT001 - one flag, named by the method
        """Call, or stop calling, `Sender.writable` when the kernel can take more. Owning thread, or any in tests."""

    def set_deadline(self, when: float) -> None:
        """Call `Sender.tick` at `when` or, if asked for an earlier time before, already then. Any thread."""

    def terminate(self, reason: CloseReason, details: str) -> None:
        """End the connection soon, on the owning thread. Any thread; the first reason counts."""

    def in_thread(self) -> bool:
        """Return whether the caller is on the owning thread."""

    def handler_failed(self, where: str, error: BaseException) -> None:
        """Log that a handler or policy of the application raised. Any thread, no lock held."""

    def ledger_grew(self) -> None:
        """Take note that `Sender.unread_ledger` has something. Any thread; must only schedule."""

    def kernel_bytes(self) -> int:
        """Return what the kernel has taken and the peer has not acknowledged; 0 where that cannot be told."""

    def limit_unsent(self, size_bytes: int) -> None:
        """Have the kernel take no more than about `size_bytes` ahead of what it sends; 0: as usual. Owning thread."""

    def strained(self) -> bool:
        """Return whether the owning thread had no room a moment ago: a peer that seems slow may not be. Any thread."""


class AgeSource(enum.Enum):
    """What the age axis of the limits measures: the oldest queued message, or that and the delay of the viewer."""

    QUEUE = "queue"
    DELAY = "delay"


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderSettings:
    """Times and budgets of a Sender; 0 turns a time off.

    Args:
        stuck_s: close when the kernel took nothing for this long while something is queued, or a log is followed.
        soft_too_long_s: close after this long at or above SOFT_LIMIT without a break.
        close_deadline_s: after `close_after_flush`, abort when this has passed. Turned off together with `stuck_s`, a
            peer that does not read is never closed.
        control_bytes: limit of the control lane; beyond it the connection is closed.
        control_messages: the same in messages.
        turn_bytes: how much one connection writes before others get their turn.
        turn_messages: the same in messages, a message in flight included; at most IOV_MAX (1024), which is what one
            system call takes.
        join_grace_s: how long a joiner is not judged on its age where the age axis is off.
        return_after_s: when the kernel takes something again after so long, go to the newest key frame of the
            followed log instead of sending what is old. 0: send everything.
        return_delay_s: the same whenever a peer that takes something is so far behind. 0: never.
        age_from: whether the age axis is the age of the queue, or the larger of that and the sampled delay.
        sample_s: time between two samples of a peer that is in trouble (delay, rate).
    """

    stuck_s: float = 15.0
    soft_too_long_s: float = 60.0
    close_deadline_s: float = 5.0
    control_bytes: int = 256 * 1024
    control_messages: int = 1024
    turn_bytes: int = 256 * 1024
    turn_messages: int = 512
    join_grace_s: float = 2.0
    return_after_s: float = 0.0
    return_delay_s: float = 0.0
    age_from: AgeSource = AgeSource.QUEUE
    sample_s: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self)
        times = "stuck_s soft_too_long_s close_deadline_s join_grace_s return_after_s return_delay_s"
        for name in times.split():
            if not getattr(self, name) >= 0:  # NaN is neither
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be 0 (off) or more seconds")
        for name in ("control_bytes", "control_messages", "turn_bytes", "turn_messages", "sample_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be more than 0")
        if self.turn_messages > 1024:
            raise ConfigError(f"turn_messages is {self.turn_messages}, one system call takes at most 1024 (IOV_MAX)")

    @property
    def steers(self) -> bool:
        """Whether a peer in trouble has to be sampled on a timer."""
        return self.age_from is AgeSource.DELAY or self.return_delay_s > 0


class Glance(NamedTuple):
    """What is cheap to tell of a Sender, for who looks at many of them a few times a second.

    Attributes:
        state: present state.
        picture_share: share of the pictures of the last 20 s that were sent, 0 to 1.
        entry: where it stands in the followed log. None: it follows none.
        own_bytes: bytes queued for this peer alone: all that is not read from the log.
        own_messages: the same in messages.
        bytes_sent: wire bytes that the kernel has taken.
        transitions: edges of the state so far.
        delay_ms: how far behind the peer was at the last sample.
        lagging: whether something was left over at the last write, so that the kernel had enough to do since.
        joining: whether it is still taking the GOP cache, and not judged on that.
    """

    state: SendState
    picture_share: float
    entry: Entry | None
    own_bytes: int
    own_messages: int
    bytes_sent: int
    transitions: int
    delay_ms: float
    lagging: bool
    joining: bool


class Account(NamedTuple):
    """What a sampler asks of a Sender, all of one instant.

    Attributes:
        now: the instant, in seconds on the Sender's clock.
        accepted: figures by class: what it was offered.
        sent: the same: what the kernel took completely.
        dropped: the same: what was not sent, for whatever reason.
        bytes_sent: wire bytes that the kernel took.
        idle: whether nothing is queued.
        state: present state.
        picture_share: share of the pictures of the last 20 s that were sent, 0 to 1.
        load: what is queued, on three axes.
        stalled_s: for how long the kernel has taken nothing while something is queued.
        drain_bytes_per_s: what the peer takes when there is always something to take. None: not measured.
        delay_ms: how far behind the peer was at the last sample.
        lagging: whether something was left over at the last write.
        standing: see `SenderState.standing`.
        log: that of `standing`. None: it is no member of a cohort.
        pulse: see `SenderState.pulse`.
    """

    now: float
    accepted: Figures
    sent: Figures
    dropped: Figures
    bytes_sent: int
    idle: bool
    state: SendState
    picture_share: float
    load: Load
    stalled_s: float
    drain_bytes_per_s: float | None
    delay_ms: float
    lagging: bool
    standing: tuple[Entry, Entry] | None
    log: StreamLog | None
    pulse: int | None


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
        delay_ms: how far behind the peer was at the last sample; 0 where it was never sampled.
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
