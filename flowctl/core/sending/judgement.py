"""What a Sender judges its peer by: what counts as load, whether it lags, what is late, and what time alone changes.

Theory of operation. The Sender tells the `Judgement` what has happened (written, refused, all taken, a turn, a tick, a
sample), with what it has asked its host: the time, what the kernel holds, whether our thread had no room, when most
viewers had stopped. It gets back what follows from it: how much of what is queued counts against the limits, whether
what is late is left out by the picture (so that the state need not refuse pictures), by what a message is late, whether
a joiner is slow, since when the kernel has taken nothing, and when to look again. The Sender does that to queue, kernel
and state. Here is no lock, no clock and no host; every field is set by the methods here alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from operator import sub
from typing import Final, NamedTuple

from flowctl.core.flow.limits import OFF_MARK, Limits
from flowctl.core.flow.meters import SHARE_WINDOW_S, Trail
from flowctl.core.flow.sharedstall import SURE_S, StallSpan
from flowctl.core.flow.state import EMPTY_LOAD, FlowCore, Load, MessageClass, SendState
from flowctl.core.flow.timing import CUT_PACE_S, ENDLESS, Forecast, Timing, crowded, target_s
from flowctl.core.outgoing.outbox import Outbox
from flowctl.core.sending.blame import LATE_S, Blame, Lag, blame, explain
from flowctl.core.sending.contract import STEPS, Standing
from flowctl.core.sending.settings import AgeSource, SenderSettings
from flowctl.core.sending.slowpeer import HEALTHY_MS, SlowPeer, healthy_delay_ms
from flowctl.errors import InternalError
from flowctl.reasons import CloseReason, DropReason
from flowctl.units import format_count

JOIN_CHECK_S: Final = 0.5
"""Time between two comparisons of a joiner's load: shorter than a group of pictures, longer than several flushes."""
_LOOK_S: Final = 1.0
"""Time between two looks at a blocked viewer that waits for a key frame: one that comes has its fan-out look at once,
so that what this finds is a wait that has lasted too long. And from when a viewer comes into the cohort behind the
others to where it counts as one that keeps up: with each that comes and goes it would be said that it does."""


class Clocks(NamedTuple):
    """The times at which a Sender's clocks run out, in seconds as of its host; inf: that one does not run."""

    closes_at: float = inf
    stuck_at: float = inf  # the kernel has taken nothing for too long though there was something to take
    soft_at: float = inf  # when it will have been at or above SOFT_LIMIT for too long
    rises_at: float = inf  # the age of what is queued may reach its next mark
    looks_at: float = inf  # something else may have changed: the load of a joiner, or a key frame has come
    held_until: float = inf  # it no longer counts as one that lags because pictures were left out lately
    samples_at: float = inf

    @property
    def next_at(self) -> float:
        return min(self)

    def run_out(self, now: float) -> bool:
        """Return whether it is to be ended, unless most viewers had stopped meanwhile."""
        return self.stuck_at <= now or self.soft_at <= now

    def overdue(self, now: float, settings: SenderSettings, *, waits: bool) -> tuple[CloseReason, str] | None:
        """Return what has taken too long, as reason and details of the end. None: nothing has."""
        if waits and now >= self.closes_at:
            limit = settings.close_deadline_s
            return CloseReason.STUCK, f"not everything was taken within {limit:g} s after closing began"
        if now >= self.stuck_at:
            limit = settings.stuck_s
            stalled_s = now - self.stuck_at + limit
            return CloseReason.STUCK, f"it took nothing for {stalled_s:.1f} s, the limit is {limit:g} s"
        if now >= self.soft_at:
            limit = settings.soft_too_long_s
            soft_s = now - self.soft_at + limit
            return CloseReason.SOFT_TOO_LONG, f"at or above SOFT_LIMIT for {soft_s:.1f} s, the limit is {limit:g} s"
        return None


_COHORT: Final = Standing.COHORT
_NO_OFFER: Final = (-inf, 0.0)
_JOIN_GRACE_S: Final = 2.0
"""Time in which a joiner's load is not judged where the age axis is off: half of the usual soft mark of age."""
_LOOK_BYTES: Final = 512 * 1024
_LOOK_MESSAGES: Final = 1024
"""Growth of a log, in messages, after which a lagging viewer is looked at even where it can reach no limit: what it
holds of the log is to be copied out in time (`LogCursor.compact`), and without limits, timers and video nothing else
would come."""


@dataclass(eq=False, slots=True)
class Judgement:
    """What is known of one peer, and what follows from it. Not thread-safe: its Sender's lock guards it."""

    core: FlowCore  # the state, shared with the Sender
    outbox: Outbox  # what is queued, shared with the Sender
    settings: SenderSettings
    progress_at: float  # when the kernel last took something, or began to refuse
    patience: tuple[float, ...] = ENDLESS  # the drop policy's, by class
    mask: int = 0  # classes refused in the present state
    # All but control and headers are refused, for the hard limit is held; then (messages, wire bytes) of these that
    # were queued when that began.
    held: tuple[int, int] | None = None
    stands: Standing = Standing.GONE  # where it stands with its fan-out
    blocked: bool = False  # the last write met EAGAIN and the kernel has not called back
    lagging: bool = False  # the last write left something
    closing: bool = False  # nothing more is accepted
    closes_at: float = inf  # when what is queued must have been sent
    ended_at: float = inf  # when the Sender ended
    armed_at: float = 0.0  # the tick that was last asked for; what can come before it asks for another
    slow: SlowPeer | None = None  # what is known of a slow peer; None: it was never slow, or lost nothing by it
    _longest_stall_s: float = 0.0
    _skipped_at: float = -inf  # when it last went on at a key frame with its cohort
    _offered: tuple[float, float] = _NO_OFFER  # when the kernel was last offered something, and how old that was
    _joined_check: tuple[float, int] | None = None  # (time, load) of a joiner's last check

    # -- what has happened

    def stand_at(self, new: Standing) -> None:
        if (self.stands, new) not in STEPS:
            raise InternalError(f"a viewer that is {self.stands.name} cannot become {new.name}")
        self.stands = new

    def meet_kernel_anew(self) -> None:
        """Forget that the kernel refused something: it is offered more, or the owning thread is to meet EAGAIN."""
        self.blocked = False

    def kernel_asked(self, now: float) -> None:
        self.blocked = False
        if self.slow is not None:
            self.slow.kernel_asked(now)

    def refused(self, now: float, *, written: int) -> None:
        """A write met EAGAIN. A stall begins with the first that is refused, not with the last that was taken."""
        if not written and not self.waits():
            self.progress_at = now
        self.blocked = self.lagging = True

    def left_over(self) -> None:
        self.lagging = True

    def taken_at_once(self, now: float) -> None:
        """What was sent was taken, by a peer that is in no trouble and follows no log."""
        self.progress_at = now

    def turned_plainly(self, *, refused: bool) -> None:
        """A turn of a viewer that lags on has ended in EAGAIN, or with all taken for now."""
        slow = self.slow
        if slow is not None:
            slow.waited = refused
            if refused:
                self.blocked = self.lagging = True
            else:
                slow.behind_ms = 0.0

    def waits_for_us(self) -> None:
        """It waits before a key frame, or for its cohort: no sign of a slow peer, nor of the rate at which it takes."""
        if self.slow is not None:
            self.slow.waited = False

    def leaves_log(self, now: float) -> None:
        slow = self.slow
        if slow is not None:
            slow.last_share = self.picture_share(now)
            slow.pictures.forget()

    def thinned(self, now: float, oldest_before: float) -> None:
        """What was queued was thrown away, the oldest that waited then perhaps too."""
        removed_ms = (self.oldest(now) - oldest_before) * 1000
        if removed_ms > 0:
            self.known_slow(now).delay_removed_ms += removed_ms

    def policy_set(self, patience: tuple[float, ...]) -> None:
        self.patience = patience

    def settings_set(self, settings: SenderSettings) -> None:
        """Go by other times and budgets; what is measured with stays as it was made with."""
        was = self.settings
        self.settings = replace(
            settings, age_from=was.age_from, sample_s=was.sample_s, return_delay_s=was.return_delay_s
        )

    def refuses(self, mask: int) -> bool:
        """Note which classes are refused from now on; return whether that is new."""
        if self.core.state is not SendState.HARD_LIMIT:
            self.held = None
        elif self.held is None:
            self.held = self.undroppable
        changed, self.mask = mask != self.mask, mask
        return changed

    def closes(self, closes_at: float = inf) -> None:
        """Nothing more is accepted, and what is queued must have been sent by then."""
        self.closing, self.closes_at = True, min(self.closes_at, closes_at)

    def ended(self, now: float) -> None:
        self.closing = True
        self.progress(now)
        self.ended_at = now

    def armed(self, when: float) -> None:
        """A tick was asked for; 0: it has come."""
        self.armed_at = when

    # -- what is queued, and since when

    def load(self, now: float) -> Load:
        return self.outbox.load(now, self.core.limits.overhead_bytes)

    def counted(self, now: float, limits: Limits | None = None, *, refused: bool | None = None) -> Load:
        """Return the load that counts against the limits.

        What was queued or published since the last write has not been offered to the kernel yet: it is no sign of a
        slow peer and does not count, or a burst would cost a peer messages that its link has room for. What EAGAIN
        has left behind counts, with all that follows, until everything is taken. What joining gave does not count. For
        a joiner, age does not count either, nor where what is late is left out, while the peer takes something
        (`SlowPeer.load_when_served`). Where it is old, see `excused`.
        """
        if self.core.would_block if refused is None else refused:
            limits = limits or self.core.limits
            load = self.outbox.counted(now, limits, log=self.stands is not _COHORT, progress_at=self.progress_at)
        else:
            load = EMPTY_LOAD
        slow = self.slow
        if slow is None:
            return load
        joining = self.joining
        if not joining:
            load = slow.load_with_delay(load)
        if load.age_ms and (joining or self.judges_pictures(self.mask)):
            load = slow.load_when_served(load, self.outbox.backlog, now)
        return load

    def excused(self, load: Load, now: float, span: StallSpan | None) -> Load:
        """Return `load` without the time in which most viewers had stopped."""
        age_ms = load.age_ms - self.shared_stall_s(span, now - load.age_ms / 1000, now) * 1000
        return Load(load.size_bytes, load.messages, age_ms)

    def far_load(self, now: float) -> tuple[int, int, float] | None:
        """Return a load no less than that of a viewer that lags, as of `Load`, if that is far from all marks.

        There is no need to look closer then. All that lies between its place and the end of the log is counted, refused
        or not. None: it is not so far.
        """
        cursor, slow, outbox, core = self.outbox.cursor, self.slow, self.outbox, self.core
        if cursor is None or slow is None or slow.by_delay or len(outbox.backlog):
            return None
        if not self.judges_pictures(self.mask):
            return None
        size_bytes, messages = cursor.span
        messages += 1
        size_bytes += outbox.inflight_bytes + messages * core.limits.overhead_bytes
        age_ms = (now - slow.drain.taken_at) * 1000
        return (size_bytes, messages, age_ms) if core.far_from(size_bytes, messages, age_ms) else None

    def queued_bytes(self, load: Load) -> int:
        return load.size_bytes - load.messages * self.core.limits.overhead_bytes

    @property
    def bytes_sent(self) -> int:
        cursor = self.outbox.cursor
        return self.outbox.bytes_sent + (cursor.entry.offset if self.stands is _COHORT and cursor is not None else 0)

    @property
    def empty(self) -> bool:
        """Whether the Sender has nothing to write: the log of a member is written by the cohort."""
        return self.outbox.empty(with_log=self.stands is not _COHORT)

    def oldest(self, now: float) -> float:
        """Return since when the oldest message that is not in flight waits; `now` if none waits."""
        cursor, since = self.outbox.cursor, self.outbox.backlog.oldest_at
        oldest = cursor.oldest_at() if cursor is not None else None
        return min(now if oldest is None else oldest, now if since is None else since)

    @property
    def undroppable(self) -> tuple[int, int]:
        """(messages, wire bytes) of what is queued and not refused by anything: control and headers."""
        queued = self.outbox.accounts()[2]
        kept = (MessageClass.CONTROL, MessageClass.HEADER)
        return sum(queued.messages[item] for item in kept), sum(queued.sizes_bytes[item] for item in kept)

    def control_over(self) -> str | None:
        """Return by how much the control lane is over its limit, in words. None: it is not."""
        backlog, settings = self.outbox.backlog, self.settings
        size_bytes, messages = backlog.control.size_bytes, len(backlog.control)
        if size_bytes <= settings.control_bytes and messages <= settings.control_messages:
            return None
        return (
            f"control lane holds {size_bytes} bytes in {messages} messages, "
            f"the limit is {settings.control_bytes} bytes, {settings.control_messages} messages"
        )

    def held_over(self) -> str | None:
        """Return by how much a held hard limit let in more headers than the control lane may hold. None: it did not.

        Nothing else bounds them then: they are never refused, so that a peer that recovers can decode what comes.
        """
        if self.held is None:
            return None
        messages, size_bytes = map(sub, self.undroppable, self.held)
        settings = self.settings
        if messages <= settings.control_messages and size_bytes <= settings.control_bytes:
            return None
        return (
            f"since the hard limit is held, {size_bytes} bytes in {messages} headers and control messages wait, "
            f"the limit is {settings.control_bytes} bytes, {settings.control_messages} messages"
        )

    @property
    def reach(self) -> tuple[int, int] | None:
        """How far the followed log reaches, for `crossing_from`. None: no limit can be reached by its growth."""
        cursor = self.outbox.cursor
        return None if cursor is None or not self.lagging else cursor.log.reach

    def crossing_from(self, reach: tuple[int, int], load: Load) -> tuple[int, int]:
        """At which reach of the log to look again: where the next limit can be reached, or before.

        The reach is read before the load: what is published meanwhile makes the answer too early, never too late.
        """
        size_bytes, messages = self.core.room(load)
        return reach[0] + min(size_bytes, _LOOK_BYTES), reach[1] + min(messages, _LOOK_MESSAGES)

    # -- a peer that takes nothing

    def waits(self) -> bool:
        """Return whether the kernel owes us progress: something waits, here or with it, that it did not take.

        Not for a viewer that counts as one that lags because pictures were left out lately, and has taken all.
        """
        slow = self.slow
        return self.core.would_block and (self.blocked or slow is None or slow.waited)

    def progress(self, now: float) -> None:
        if self.waits():
            self._longest_stall_s = max(self._longest_stall_s, now - self.progress_at)
        self.progress_at = now
        cursor = self.outbox.cursor
        if cursor is not None and cursor.log.latest is not None:
            cursor.served_at = now

    def stalled_since(self, now: float) -> float:
        """Return since when the kernel has taken nothing while something was queued, in seconds; `now` for not at all.

        No longer than the oldest queued message has waited: before that there was nothing to take. But while a log is
        followed there always is: thinning may empty our queue, and the kernel still holds what it was given.
        """
        cursor = self.outbox.cursor
        if self.core.would_block and cursor is not None:
            if not self.waits():
                return now
            since = max(self.progress_at, cursor.joined_at)  # a stall from before does not count against a new log
            slow = self.slow
            # A kernel that was told to take less ahead may take nothing for as long as it sends what it has; and a few
            # bytes at a time, each time it is asked, of what no peer takes.
            if slow is not None and slow.ahead_bytes:
                since = max(cursor.joined_at, slow.drain.waits_since(now))
            return since
        load = self.load(now)
        return max(self.progress_at, now - load.age_ms / 1000) if load.messages else now

    def stalled_s(self, now: float) -> float:
        return now - self.stalled_since(now) if self.core.would_block else 0.0

    def longest_stall_s(self, now: float) -> float:
        return max(self._longest_stall_s, self.stalled_s(now))

    def shared_stall_s(self, span: StallSpan | None, since: float, now: float) -> float:
        """Return how much of the time since then is of the `span` in which most viewers had stopped.

        None of them is judged by that time. It is 0 for one that follows no log, or had stopped before, or by itself.
        """
        if span is None or self.outbox.cursor is None or self.stalled_since(now) < span.began - SURE_S:
            return 0.0
        return max(span.ended - max(since, span.began), 0.0)

    # -- a peer that lags

    def lags(self) -> bool:
        """Return whether it lags behind a log that it follows, and limits and policy leave out what is late."""
        cursor = self.outbox.cursor
        return (
            self.core.would_block
            and self.core.limits.target_delay_ms != 0
            and cursor is not None
            and cursor.joining_to is None
            and not self.closing
            and self.patience != ENDLESS
        )

    def judges_pictures(self, refused: int) -> bool:
        """Return whether what is late is left out, by the picture, so that the state need not refuse pictures.

        Not where key frames are among the classes that are `refused`: none would end a cut, so nothing is cut.
        """
        return not refused >> MessageClass.KEY & 1 and self.lags() and self.patience[MessageClass.INTER] < inf

    def lagging_peer(self, now: float) -> SlowPeer | None:
        """Return the peer, if it lags and takes something meanwhile: then what is late may be left out of its queue."""
        slow = self.slow
        if slow is None or not self.lags() or slow.drain.stalled(now):
            return None
        return slow

    def nears_hard(self, load: Load, now: float) -> bool:
        """Return whether a queue nears its hard marks though what is late is left out: `core.flow.timing.crowded`."""
        return (
            crowded(self.core.limits, load)
            and self.core.state is not SendState.HARD_LIMIT
            and not (self.slow is not None and self.slow.drain.stalled(now))
        )

    def timing(self, slow: SlowPeer, now: float, kernel_bytes: int, *, strained: bool) -> Timing | None:
        """Measure what a viewer that lags takes, and return by what its messages are late; None: nothing is.

        Nothing is while its rate is not known, and while it has stalled. How much the kernel is to take ahead is in
        `slow.ahead_bytes` then. `strained` counts where the kernel holds nothing.
        """
        cursor = self.outbox.cursor
        written = self.bytes_sent
        log_rate = 0.0 if cursor is None else cursor.log.rates.bytes_per_s
        rate = slow.measure(now, written, kernel_bytes, log_rate, strained=strained)
        if cursor is None or (rate is None and not log_rate):
            return None
        slow.pace_anew(rate, log_rate, cursor.log.fill_bytes, held=kernel_bytes > 0)
        if rate is None or slow.drain.stalled(now):
            slow.forget_timing()
            return None
        if self._joined_check is not None and 0 < cursor.log.bytes_per_s <= rate:
            return None  # it has never had all, takes more than is published, and catches up without losing any
        held_bytes = slow.delay.untaken_bytes(now, written, kernel_bytes)
        return slow.timing(now, rate, held_bytes, cursor.log, self.core.limits, self.patience)

    def far_behind(self, now: float) -> bool:
        """Return whether the oldest that waits is older than what is waited for."""
        cursor = self.outbox.cursor
        return cursor is not None and cursor.joining_to is None and self.too_late(now - self.oldest(now))

    def too_late(self, late_s: float) -> bool:
        """Return whether what is `late_s` seconds late is left out for this viewer where that is needed."""
        cursor, target_ms = self.outbox.cursor, self.core.limits.target_delay_ms
        if cursor is None or target_ms == 0 or self.patience == ENDLESS:
            return False
        return late_s > target_s(target_ms, cursor.log.gop_duration_s)

    def skipped(self, now: float, late_s: float) -> None:
        """Note that it went on at a key frame with its cohort, and so `late_s` seconds later media."""
        self._skipped_at = now
        self.known_slow(now).note_return(now, late_s * 1000, "with its cohort")

    def _skipped_lately(self, now: float) -> bool:
        return now - self._skipped_at < SHARE_WINDOW_S  # as long as the share of pictures counts it

    def turn_at(self, now: float) -> float:
        """Return when a viewer is to have its next turn; 0: in the next round, inf: when the kernel asks."""
        slow = self.slow
        if not self.core.would_block or (self.outbox.waits_at_crossroads and not self.blocked):
            return 0.0
        if slow is None or not self.lags():
            return inf if self.blocked else 0.0
        if not self.blocked:
            return now + CUT_PACE_S
        return now + slow.pace_s if slow.keeps_pace(now) else inf

    def known_slow(self, now: float) -> SlowPeer:
        """Return what is known of a slow peer; there is something from now on."""
        if self.slow is None:
            # What was written before anybody noted it came at the rate of the log.
            cursor, written = self.outbox.cursor, self.bytes_sent
            began_at = now - sum(self.core.time_in_states(now)) if cursor is None else cursor.joined_at
            rate = 0.0 if cursor is None else cursor.log.rates.bytes_per_s
            trail = Trail(written - rate * (now - began_at) if rate else 0, began_at)
            trail.note(written, now)
            self.slow = SlowPeer(self.settings, trail)
        return self.slow

    def note_offer(self, now: float) -> None:
        """Note, before a write that may begin a lag, how old the oldest is that waits; what joining gives always is."""
        if (self.slow is None or self.slow.lag.began_at is None) and now - self._offered[0] >= LATE_S:
            self._offered = now, 0.0 if self.joining else now - self.oldest(now)

    def note_waiting(self, slow: SlowPeer, now: float, kernel_bytes: int, *, strained: bool) -> None:
        """Note that something waits for the peer after a write: from now on, what it takes tells its rate."""
        acknowledged = self.bytes_sent - kernel_bytes
        if slow.drain.sampled_at < now:  # else it was before the write
            slow.drain.sample(now, acknowledged, waited=False)
        slow.waited = True
        cursor = self.outbox.cursor
        if slow.lag.began_at is None and cursor is not None:
            offered_at, waited_s = self._offered
            waited_s = waited_s if now - offered_at < LATE_S else 0.0
            slow.lag.begin(now, acknowledged, cursor.log.rates.bytes_per_s, waited_s, strained=strained)
            self._offered = _NO_OFFER  # of no use any more, and memory of each viewer that lags

    def sample(self, slow: SlowPeer, now: float, kernel_bytes: int) -> None:
        load = self.load(now)
        queued_bytes = self.outbox.load(now, 0, values=False).size_bytes  # values are not what it has to catch up with
        self.note_key(slow)
        log_rate = 0.0 if self.outbox.cursor is None else self.outbox.cursor.log.rates.bytes_per_s
        slow.sample(now, queued_bytes, self.bytes_sent, kernel_bytes, load.age_ms, log_rate)
        self.note_pictures(slow, now)

    def sample_healthy(self, now: float, kernel_bytes: int) -> float:
        """Return the delay of a peer that is in no trouble, in ms; begin to measure it where that is worth it."""
        cursor = self.outbox.cursor
        rate = cursor.log.rates.bytes_per_s if cursor is not None and self.stands is _COHORT else 0.0
        delay_ms = healthy_delay_ms(kernel_bytes, rate)
        if delay_ms is not None:
            return delay_ms
        slow = self.known_slow(now)
        self.sample(slow, now, kernel_bytes)
        return slow.behind_ms

    @property
    def measured(self) -> bool:
        """Whether it matters what the kernel holds: a slow peer is known, and has not ended."""
        return self.slow is not None and self.ended_at == inf

    def behind_ms(self, now: float, kernel_bytes: int) -> float:
        """Return the age of the oldest data that a slow peer has not taken, in ms, else 0; once ended, as last sampled.

        `kernel_bytes` counts for one that is `measured`.
        """
        slow = self.slow
        if slow is None or self.ended_at < inf:
            return 0.0 if slow is None else slow.behind_ms
        self.note_key(slow)
        behind_ms = slow.behind(now, self.bytes_sent, kernel_bytes)
        return self.load(now).age_ms if behind_ms is None else behind_ms

    def note_key(self, slow: SlowPeer) -> None:
        """Mark the newest key frame on the trail of a member, whose writes mark nothing: many bytes of one moment."""
        cursor = self.outbox.cursor
        if cursor is None or self.stands is not _COHORT:
            return
        entry, gop = cursor.entry, cursor.entry.gop
        if entry.offset > gop.offset:
            place = self.bytes_sent - entry.offset + gop.offset
            slow.trail.note(place, gop.started_at)
            slow.trail.note(place + gop.key_bytes, gop.started_at)

    def held_until(self, slow: SlowPeer) -> float:
        """Return until when this peer counts as lagging although all is taken."""
        cursor = self.outbox.cursor
        return 0.0 if cursor is None or self.closing else slow.held_until(cursor.log.gop_duration_s)

    def cut_lately(self, now: float) -> bool:
        """Return whether pictures were left out a moment ago: it is likely to lag again at once, and stays alone."""
        return self.slow is not None and self.slow.cut_lately(now)

    def forget_slow(self) -> None:
        """Give back what was measured of a peer that is well again and lost nothing."""
        slow = self.slow
        if slow is not None and self.core.state is SendState.READY and slow.harmless and slow.healthy:
            self.slow = None

    def lag(self, now: float, kernel_bytes: int) -> Lag | None:
        """Return what the present lag is made of, the time since the last measurement included."""
        slow, cursor = self.slow, self.outbox.cursor
        if slow is None or cursor is None or self.ended_at < inf:
            return None if slow is None else slow.lag
        lag, dry = replace(slow.lag), slow.told and not kernel_bytes
        lag.note(now, self.bytes_sent - kernel_bytes, cursor.log.rates.bytes_per_s, waited=slow.waited, dry=dry)
        return lag

    def blamed(self, load: Load, now: float, kernel_bytes: int) -> Blame:
        """Return who is to blame for the present load."""
        skipped = self._skipped_lately(now)
        if self.core.state is SendState.READY and not skipped:
            return Blame.NOBODY
        lag = self.lag(now, kernel_bytes)
        stalled_s = self.stalled_s(now)
        return blame(self.core, load, lag, largest_bytes=self._largest_bytes, stalled_s=stalled_s, skipped=skipped)

    def forecast(self, now: float, counted: Load) -> Forecast | None:
        """Return when the hard limit will be reached if all goes on as now; None: never, or nothing is known."""
        slow, core, cursor = self.slow, self.core, self.outbox.cursor
        if slow is None or not core.would_block or self.ended_at < inf:
            return None
        if not slow.drain.stalled(now) and self.judges_pictures(self.mask):
            return None  # what its line cannot carry is left out, and its queue does not grow
        per_second = None
        if cursor is not None:
            tail = cursor.chain.tail  # values with a key take the place of others
            per_second = cursor.chain.rates.per_second(now, tail.counts, tail.sizes)
        return slow.forecast(now, counted, core.limits, per_second, self.mask)

    def remarks(self, now: float, counted: Load, kernel_bytes: int) -> list[str]:
        slow, cursor = self.slow, self.outbox.cursor
        if slow is None:
            return []
        needed = cursor.log.rates.bytes_per_s if cursor is not None and self.core.would_block else None
        queued_bytes = self.queued_bytes(self.load(now))
        remarks = slow.remarks(queued_bytes, self.picture_share(now), needed, self.behind_ms(now, kernel_bytes))
        forecast = self.forecast(now, counted)
        if forecast is not None and self.core.state is not SendState.HARD_LIMIT:
            axis = forecast.axis.value.removesuffix("_ms")
            remarks.append(f"the hard limit ({axis}) is {forecast.seconds:.0f} s away")
        return remarks

    def why(
        self,
        now: float,
        counted: Load,
        kernel_bytes: int,
        span: StallSpan | None,
        closed: CloseReason | None,
        details: str,
    ) -> str:
        """Explain the present state in one line. `closed` and `details`: its end, if it is over."""
        remarks = self.remarks(now, counted, kernel_bytes)
        if self.core.would_block and self.shared_stall_s(span, self.stalled_since(now), now):
            remarks.append("most viewers stopped when it did: a shared line")
        superseded = self.outbox.dropped().get(DropReason.SUPERSEDED)
        if superseded is not None:
            remarks.append(f"{format_count(superseded.total_messages, 'value')} superseded by newer ones")
        return explain(
            self.core,
            self.load(now),
            now,
            self.lag(now, kernel_bytes),
            largest_bytes=self._largest_bytes,
            joining=self.joining,
            waiting_for_key=self.outbox.waiting_for_key,
            stalled_s=self.stalled_s(now),
            skipped=self._skipped_lately(now),
            remarks=remarks,
            close_reason=closed,
            details=details,
        )

    @property
    def _largest_bytes(self) -> int:
        return 0 if self.outbox.cursor is None else self.outbox.cursor.log.largest_bytes

    def pictures(self) -> tuple[int, int]:
        cursor = self.outbox.cursor
        return (0, 0) if cursor is None else cursor.pictures()

    def picture_share(self, now: float) -> float:
        """Return the share of the pictures of the last 20 s that were sent, 0 to 1; once ended, as at the end."""
        slow, cursor = self.slow, self.outbox.cursor
        if slow is None or cursor is None:
            return slow.last_share if slow is not None and self.ended_at < inf else 1.0
        return slow.pictures.share(now, *cursor.pictures())

    def note_pictures(self, slow: SlowPeer, now: float) -> None:
        """Note the pictures of the last seconds, after a write that left something: no timer need do it."""
        cursor = self.outbox.cursor
        if cursor is not None and slow.pictures.due(now, cursor.joined_at):
            slow.pictures.note(now, *cursor.pictures(), cursor.joined_at)

    # -- a joiner

    @property
    def joining(self) -> bool:
        cursor = self.outbox.cursor
        return cursor is not None and self.stands is not _COHORT and cursor.joining_to is not None

    def joined(self) -> None:
        self._joined_check = None

    def ends_joining(self, now: float) -> bool:
        """Return whether joining is over: the cache is taken, or the joiner is old enough and its load stays."""
        cursor = self.outbox.cursor
        if cursor is None or cursor.joining_to is None:
            return False
        age_limits = self.core.limits.age_ms
        grace_s = (age_limits.low or 0) / 1000 if age_limits.on else _JOIN_GRACE_S
        load = self.outbox.joining_load_bytes
        checked = self._joined_check
        slow = False
        if checked is None or now - cursor.joined_at <= grace_s:
            self._joined_check = (now, load)
        elif now - checked[0] >= JOIN_CHECK_S:
            self._joined_check = (now, load)
            slow = load >= checked[1]
        return slow or (self.lagging and self.outbox.cache_taken)

    def counts_as_lagging(self, now: float) -> bool:
        """Everything is taken: return whether it lags all the same, for pictures were left out a moment ago."""
        self.progress(now)
        slow = self.slow
        if slow is None:
            return False
        slow.waited, slow.behind_ms = False, 0.0
        return now < self.held_until(slow)

    def keeps_up(self) -> bool:
        """Everything is taken, and it lags no longer; return whether the kernel is to take as usual again."""
        slow = self.slow
        paced = slow is not None and slow.note_keeping_up()
        self.lagging = False
        self._forget_joining()
        if slow is not None and slow.harmless and not slow.by_delay:
            self.slow = None
        return paced

    def _forget_joining(self) -> None:
        """Give back what was measured of a joiner while it took the cache, if it went well.

        The kernel refuses nearly every joiner something, as the cache comes at once. That is no sign of a slow link,
        and must not cost a healthy viewer meters and timers.
        """
        joined, self._joined_check = self._joined_check is not None, None
        slow = self.slow
        if (
            joined
            and slow is not None
            and slow.harmless
            and (slow.healthy or not slow.by_delay)
            and self.core.state < SendState.SOFT_LIMIT
        ):
            self.slow = None

    # -- times

    def clocks(self, now: float, load: Load, span: StallSpan | None = None) -> Clocks:
        """Return when what runs out does.

        Args:
            now: in seconds.
            load: what counts.
            span: when most viewers had stopped; counts for what has run out.
        """
        settings, core, outbox, slow = self.settings, self.core, self.outbox, self.slow
        stuck_at = soft_at = rises_at = looks_at = held_until = samples_at = inf
        if core.would_block:
            cursor = outbox.cursor
            age_mark = core.marks_above(load)[2]
            if age_mark < OFF_MARK and (cursor is not None or load.messages):
                # A viewer of a log also where thinning has emptied the queue: what comes next is as old in that time,
                # and a single message makes no look at a viewer. Without a log, the next message that is queued asks
                # for this by itself. A delay does not grow by waiting, only by the next sample.
                least_ms = 1.0 if settings.age_from is AgeSource.QUEUE else 50.0
                rises_at = now + max(age_mark - load.age_ms, least_ms) / 1000
            if settings.stuck_s and (cursor is not None or self.load(now).messages):
                since = self.stalled_since(now)
                stuck_at = since + settings.stuck_s
                if stuck_at <= now:
                    stuck_at += self.shared_stall_s(span, since, now)
            if cursor is not None and cursor.joining_to is not None:
                looks_at = now + JOIN_CHECK_S
            elif outbox.waiting_for_key:
                looks_at = now + _LOOK_S
            if slow is not None and (until := self.held_until(slow)) > now:
                held_until = until
            elif self.stands is _COHORT:
                looks_at = now + _LOOK_S
        if settings.soft_too_long_s and core.slow_since is not None:
            soft_at = core.slow_since + settings.soft_too_long_s
            if soft_at <= now:
                soft_at += self.shared_stall_s(span, core.slow_since, now)
        if slow is not None and (
            (core.would_block and (settings.steers or (core.state >= SendState.SOFT_LIMIT and self.lags())))
            or (slow.by_delay and (slow.delay_ms >= HEALTHY_MS or core.state >= SendState.SOFT_LIMIT))
        ):
            samples_at = slow.next_sample_at(now)
        return Clocks(self.closes_at, stuck_at, soft_at, rises_at, looks_at, held_until, samples_at)

    def overdue(self, clocks: Clocks, now: float) -> tuple[CloseReason, str] | None:
        return clocks.overdue(now, self.settings, waits=self.blocked or not self.empty)
