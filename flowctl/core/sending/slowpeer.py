"""What a Sender knows of a peer that does not keep up, and what follows from it (pure).

Theory of operation. A `SlowPeer` is made at the first EAGAIN, so that peers that keep up cost nothing. A *sample*
(delay and drain rate) is taken about twice a second, on the Sender's timer, and with each write to a viewer that lags:
what the kernel holds and the drain rate tell what would reach it too late and is left out (`core.flow.timing`), and
how much the kernel is given *ahead*. A peer that is too far behind is to be brought back to live. The Sender asks, and
does what it is told: there is no lock, no clock and no socket here.

See `flowctl.core.flow.meters` and `flowctl.core.flow.timing` for the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import add, sub
from typing import Final

from flowctl.core.flow.counts import Counts
from flowctl.core.flow.ledger import LedgerEntry, LedgerKind, difference
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.meters import LEAST_SAMPLE_S, DelayMeter, DrainMeter, PictureMeter, Trail
from flowctl.core.flow.state import CLASS_COUNT, Load
from flowctl.core.flow.timing import (
    EVEN_PACE_S,
    EVEN_RATIO,
    EVEN_S,
    LONGEST_PACE_S,
    MOST_AHEAD_BYTES,
    MOST_TARGET_S,
    PACE_SHARE,
    Forecast,
    Timing,
    ahead_bytes,
    carries,
    most_held_s,
    most_wait_s,
    target_s,
    time_to_hard,
)
from flowctl.core.outgoing.backlog import Backlog
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.blame import Lag
from flowctl.core.sending.settings import AgeSource, SenderSettings
from flowctl.reasons import DropReason
from flowctl.units import format_size

HEALTHY_MS: Final = 500.0
"""Delay below which a peer is not measured any further, unless something else is wrong."""
_SMOOTHING: Final = 0.3
"""Weight of the newest fill rate."""
_LAGGING_HOLD_S: Final = 2.0
"""A peer counts as lagging for this long (or two groups of pictures) after its last left-out picture, even if it has
taken everything. It is written to with the cohort meanwhile, so this costs nothing."""
_TIMER_TOLERANCE_S: Final = 0.001
"""Tolerance for timers that fire early."""
_LUMPY_S: Final = 2.0
"""Time for which a line that ran dry between two turns is served when the kernel asks: it takes in lumps."""
_ALONE_S: Final = 1.0
"""Time after a left-out picture for which a viewer that has taken everything is not written to with others: on a line
of 80 % it would leave them again sooner, and to come and go costs as much as two turns."""
_AT_ONCE_S: Final = 0.02
"""Time from a write to the kernel's question for more in which most of that was taken by a peer that has room for it:
its line is not what holds it, so it is given as much as at a rate that is not known, and not in many small parts."""
_PROMPT_S: Final = 0.05
"""Longest time from a kernel's question to the turn that it leads to, for that to be no lateness of ours."""
_SAMPLES_IN_TURNS: Final = 10
"""Of a viewer that has its turns, only each tenth sample is taken: a turn measures what it needs by itself."""
_NEVER: Final = float("-inf")


@dataclass(eq=False, slots=True)
class SlowPeer:
    """Meters and counts of one peer. Not thread-safe: its Sender's lock guards it."""

    settings: SenderSettings
    trail: Trail = field(default_factory=lambda: Trail(0, 0.0))
    delay: DelayMeter = field(default_factory=DelayMeter)
    drain: DrainMeter = field(default_factory=DrainMeter)
    lag: Lag = field(default_factory=Lag)  # what the present lag is made of
    pictures: PictureMeter = field(default_factory=PictureMeter)
    last_share: float = 1.0  # share of the pictures in the log that was followed last; asked for after the end
    delay_ms: float = 0.0
    behind_ms: float = 0.0  # age of the oldest message that it had not taken, at the last sample
    behind_max_ms: float = 0.0  # the largest of these since the open episode of drops began
    pace_s: float = 0.0  # time up to the next turn that it needs; 0: its rate is not known
    dry: bool = False  # the kernel had run dry at the last measurement, with more to come: we were late
    waited: bool = False  # something has waited for the peer ever since the last sample of the drain rate
    ahead_bytes: int = 0  # how much the kernel takes ahead, as it was told; 0: as usual
    _allowed_bytes: int = 0  # the part of that which the kernel was not given yet
    _acknowledged: int = 0  # what the peer had taken when that was last told
    _timing: Timing | None = None  # what is late, as of the last write
    _timing_for: tuple[object, ...] = ()  # what that follows from, beside rate and time
    _lumpy_until: float = _NEVER  # until when its turns come when the kernel asks: their pace let it run dry
    _asked_at: float = _NEVER  # when the kernel last asked for more
    _given_at: float = _NEVER  # when it was last given something
    _even_rate: float = 0.0  # the rate has stayed close to this one
    _even_since: float = inf
    told: bool = False  # whether the kernel has ever told of something that it holds
    returns: int = 0  # times old media were skipped
    delay_removed_ms: float = 0.0  # what skipping and thinning took off the age of the queue
    _cutting: bool = False  # something was left out for being late since the peer last kept up
    _late: int = 0  # messages of the followed log that were left out, at the last write
    _left_out_at: float = _NEVER  # when it was last seen to leave something out
    _sampled_at: float = _NEVER  # time of the last sample
    # Time of the last sample that was acted on: the timer counts from here, so that statistics of another thread,
    # which only measure, cannot keep the peer from being looked at.
    _acted_at: float = _NEVER
    _before_ms: float = 0.0  # the delay at the sample before
    _kept_bytes: int = 0  # what was written or is queued, at the last sample
    _fill_bytes_per_s: float = 0.0  # what is added to the queue and kept, for a peer that follows no log

    @property
    def by_delay(self) -> bool:
        return self.settings.age_from is AgeSource.DELAY

    # -- samples

    def due(self, now: float, *, in_turn: bool = False) -> bool:
        """Return whether it is time for a sample: seldom for one that has its turns and is not steered by samples."""
        wait_s = self.settings.sample_s
        if in_turn and not self.settings.steers:
            wait_s *= _SAMPLES_IN_TURNS
        return now - self._acted_at >= wait_s - _TIMER_TOLERANCE_S

    def asked_too_soon(self, now: float) -> bool:
        """Return whether a sample would disturb the rhythm of the meters: then the last answer is given again."""
        return now - self._sampled_at < self.settings.sample_s - _TIMER_TOLERANCE_S

    def next_sample_at(self, now: float) -> float:
        return max(self._acted_at, now - self.settings.sample_s) + self.settings.sample_s

    def sample(
        self,
        now: float,
        queued_bytes: int,
        written_bytes: int,
        kernel_bytes: int,
        queue_age_ms: float = 0.0,
        log_rate: float = 0.0,
    ) -> None:
        kept, seconds = queued_bytes + written_bytes, now - self._sampled_at
        if kept >= self._kept_bytes and seconds > 0:  # else something was thrown away
            self._fill_bytes_per_s += _SMOOTHING * ((kept - self._kept_bytes) / seconds - self._fill_bytes_per_s)
        self._kept_bytes = kept
        if seconds >= LEAST_SAMPLE_S:  # else both would be of the same moment
            self._before_ms = self.delay_ms
        self.delay_ms = self.delay.sample(now, queued_bytes, written_bytes, kernel_bytes)
        self.trail.note(written_bytes, now - queue_age_ms / 1000)
        behind_ms = self.behind(now, written_bytes, kernel_bytes)
        self.behind_ms = queue_age_ms if behind_ms is None else behind_ms
        self.behind_max_ms = max(self.behind_max_ms, self.behind_ms)
        self.trail.forget(written_bytes - self.delay.untaken_bytes(now, written_bytes, kernel_bytes))
        self.measure(now, written_bytes, kernel_bytes, log_rate)
        self._sampled_at = now

    def behind(self, now: float, written_bytes: int, kernel_bytes: int) -> float | None:
        """Return the age of the oldest data that was written and not taken, in ms; arguments as of `sample`.

        It is no older than the connection. None: it has taken all, so that the oldest is the first of our own queue.
        """
        untaken = self.delay.untaken_bytes(now, written_bytes, kernel_bytes)
        if untaken <= 0:
            return None
        return max(now - self.trail.since(written_bytes - untaken, written_bytes, now), 0.0) * 1000

    def why_return(self, now: float, queue_age_ms: float) -> str | None:
        """Judge the last sample: return why the peer is to be brought back to live. None: it is not."""
        self._acted_at = now
        behind_ms, limit_ms = max(self.age_ms, queue_age_ms), self.settings.return_delay_s * 1000
        too_far = 0 < limit_ms <= behind_ms and not self.drain.stalled(now)
        return f"{behind_ms / 1000:.1f} s behind" if too_far else None

    def note_return(self, now: float, removed_ms: float, cause: str) -> LedgerEntry:
        """Note that skipping old media made the queue younger by `removed_ms`; return the ledger's entry."""
        self.returns += 1
        self.delay_removed_ms += removed_ms
        why = f"returned to live: {removed_ms / 1000:.1f} s of delay removed; {cause}"
        return LedgerEntry(LedgerKind.RETURN, now, why, delay_removed_ms=removed_ms)

    # -- what a viewer that lags is given

    def measure(
        self,
        now: float,
        written_bytes: int,
        kernel_bytes: int,
        log_rate: float = 0.0,
        *,
        strained: bool = False,
    ) -> float | None:
        """Measure the drain rate, with a write, and note how much more the kernel may be given.

        Args:
            now: in seconds.
            written_bytes: to the kernel, in all.
            kernel_bytes: of these, what the peer has not taken.
            log_rate: of the followed log, in bytes per second. 0: not known.
            strained: our thread had no room lately.

        Returns:
            The rate in bytes per second. None: it is not known.

        A kernel that has run dry says nothing of the line, unless it asked for more just now: for how long it was dry,
        for a turn of ours that was late, is not known. One that never tells what it holds does not run dry, and is
        offered all that it is to have ahead each time.
        """
        acknowledged = written_bytes - kernel_bytes
        self.told = self.told or kernel_bytes > 0
        dry = self.told and not kernel_bytes
        if dry and self.waited:
            self._lumpy_until = now + _LUMPY_S
            dry = now - self._asked_at > _PROMPT_S or strained
        self.dry = dry and self.waited
        self.lag.note(now, acknowledged, log_rate, waited=self.waited, dry=self.dry)
        taken, self._acknowledged = acknowledged - self._acknowledged, acknowledged
        self._allowed_bytes = min(self._allowed_bytes + taken, self.ahead_bytes) if self.told else self.ahead_bytes
        if self.told and taken > kernel_bytes and 0 <= self._asked_at - self._given_at < _AT_ONCE_S:
            self._allowed_bytes = max(self.ahead_bytes, ahead_bytes(log_rate))
        return self.drain.sample(now, acknowledged, waited=self.waited and not dry)

    def pace_anew(self, rate: float | None, log_rate: float, fill_bytes: int = 0, *, held: bool = True) -> None:
        """Settle how much the kernel is given ahead of a peer, and how often.

        Args:
            rate: at which it takes. None: not known, so it is as last measured while the kernel holds something, or
                that of the log; or any, where the kernel had run dry.
            log_rate: of the followed log. Both in bytes per second.
            fill_bytes: what the kernel is given ahead of a viewer that keeps up. 0: as usual.
            held: whether the kernel holds something.
        """
        at = self.drain.sampled_at
        if rate is not None and (
            self._even_since > at or not self._even_rate <= rate * EVEN_RATIO <= self._even_rate * EVEN_RATIO**2
        ):
            self._even_rate, self._even_since = rate, at
        even = at - self._even_since >= EVEN_S and not carries(self._even_rate, log_rate)
        taken = rate or (self.drain.rate if held or not self.told else None)
        if taken is None and self.dry:
            ahead = fill_bytes or MOST_AHEAD_BYTES
        else:
            ahead = ahead_bytes(taken or log_rate, even=even)
        if at < self._lumpy_until and not even:  # what it takes at once is not to wait for two turns of ours
            ahead = min(ahead * 3 // 2, MOST_AHEAD_BYTES)
        self.pace_s = min(PACE_SHARE * ahead / taken, EVEN_PACE_S if even else LONGEST_PACE_S) if taken else 0.0
        if not 6 * self.ahead_bytes <= 10 * ahead <= 16 * self.ahead_bytes:
            self._allowed_bytes += ahead - self.ahead_bytes
            self.ahead_bytes = ahead

    def keeps_pace(self, now: float) -> bool:
        """Return whether it takes so evenly that its kernel is not empty before its next turn."""
        return self.pace_s > 0 and self.drain.takes(now) and now >= self._lumpy_until

    def timing(
        self, now: float, rate: float, held_bytes: int, log: StreamLog, limits: Limits, patience: Sequence[float]
    ) -> Timing:
        carried = carries(rate, log.bytes_per_s)
        asked = (limits, patience, log, log.rates.due, log.gop_duration_s, log.sounds, carried)
        timing = self._timing
        if timing is None or asked != self._timing_for:
            target = target_s(limits.target_delay_ms, log.gop_duration_s)
            messages_per_s = log.rates.messages_per_s
            most_s = most_wait_s(limits, log.rates.bytes_per_s, messages_per_s)
            # Of whole groups: it is for key frames. Where they are is not known where the kernel tells nothing.
            held_s = most_held_s(limits, log.bytes_per_s, messages_per_s) if self.told else 0.0
            timing = Timing(now, rate, held_bytes, target, patience, most_s, held_s, carried=carried, sound=log.sounds)
            self._timing, self._timing_for = timing, asked
        timing.tell(now, rate, held_bytes, self.drain.steady)
        return timing

    def forget_timing(self) -> None:
        self._timing, self._timing_for = None, ()

    def budget_bytes(self, most_bytes: int) -> int:
        """Return how much the kernel may be given now; 0 where it has all it is to have."""
        return min(most_bytes, max(self._allowed_bytes, 0)) if self.ahead_bytes else most_bytes

    def note_given(self, written_bytes: int, *, full: bool) -> bool:
        """Account for a write; return whether the kernel has got all it is to have for now. `full`: it refused some."""
        if not self.ahead_bytes:
            return False
        self._allowed_bytes = 0 if full else self._allowed_bytes - written_bytes
        if written_bytes:
            self._given_at = self.drain.sampled_at
        return self._allowed_bytes <= 0

    def kernel_asked(self, now: float) -> None:
        self._allowed_bytes, self._asked_at = self.ahead_bytes, now

    def note_late(self, now: float, late: int) -> LedgerEntry | None:
        """Note how many messages of the followed log were left out for being late so far."""
        more, first = late > self._late, not self._cutting  # fewer than before: another log is followed
        self._late = late
        if more:
            self._left_out_at = now
            self._cutting = True
        if not (more and first):
            return None
        rate = format_size(int(self.drain.rate or 0))
        return LedgerEntry(LedgerKind.LATE, now, f"pictures would be late; it takes {rate}/s")

    def held_until(self, gop_s: float) -> float:
        """Return until when this peer counts as lagging although all is taken, because pictures were left out lately.

        It is served whole meanwhile, and its kernel takes no more ahead than before. READY would say that it keeps up.
        """
        return self._left_out_at + min(max(_LAGGING_HOLD_S, 2 * gop_s), 2 * MOST_TARGET_S)

    def cut_lately(self, now: float) -> bool:
        return now - self._left_out_at < _ALONE_S

    def note_keeping_up(self) -> bool:
        """Note that it lags no longer; return whether the kernel is to be told that it takes as usual again."""
        self._cutting, self.lag, self._even_since = False, Lag(), inf
        paced, self.ahead_bytes = self.ahead_bytes, 0
        return paced > 0

    # -- what it is

    @property
    def age_ms(self) -> float:
        """The delay as an age: the smaller of the last two samples, so that one big frame under way is no trouble."""
        return min(self.delay_ms, self._before_ms)

    def load_with_delay(self, load: Load) -> Load:
        age_ms = self.age_ms
        return Load(load.size_bytes, load.messages, age_ms) if self.by_delay and age_ms > load.age_ms else load

    def load_when_served(self, load: Load, own: Backlog, now: float) -> Load:
        """Return `load` with the age that counts for a viewer that gets what its line carries.

        What would be late is left out for it. So what is old is on its way, or waits behind what is: by our choice, or
        because the kernel was given that before the viewer lagged. Only a time in which it took nothing is its own. Its
        own messages, which are never left out, are counted as old as they are, up to the time that they take themselves
        at a rate without a pause.
        """
        age_ms = (now - self.drain.taken_at) * 1000
        if len(own) and self.drain.rate and self.drain.flows(now) and (since := own.oldest_at) is not None:
            age_ms = max(age_ms, min(now - since, own.size_bytes / self.drain.rate) * 1000)
        return Load(load.size_bytes, load.messages, min(load.age_ms, age_ms))

    @property
    def harmless(self) -> bool:
        """Whether nothing was done to the peer: nothing left out, skipped or thinned."""
        return not (self.returns or self.delay_removed_ms or self._left_out_at > _NEVER)

    @property
    def healthy(self) -> bool:
        """Whether it need not be measured: it is hardly behind, and its application reports nothing."""
        return self.delay_ms < HEALTHY_MS and not (self.by_delay and self.delay.has_reports)

    def forecast(
        self,
        now: float,
        load: Load,
        limits: Limits,
        per_second: tuple[Sequence[float], Sequence[float]] | None,
        refused_mask: int,
    ) -> Forecast | None:
        """Return when the hard limit will be reached if all goes on as now; None: never, or the rate is not known."""
        drain = 0.0 if self.drain.stalled(now) else self.drain.rate
        if drain is None:
            return None
        if per_second is not None:
            kept = [item for item in range(CLASS_COUNT) if not refused_mask >> item & 1]
            messages_per_s, bytes_per_s = (sum(rates[item] for item in kept) for rates in per_second)
        else:
            bytes_per_s = self._fill_bytes_per_s
            messages_per_s = bytes_per_s * load.messages / load.size_bytes if load.size_bytes else 0.0
        return time_to_hard(
            load,
            limits,
            fill_bytes_per_s=bytes_per_s,
            fill_messages_per_s=messages_per_s,
            drain_bytes_per_s=drain,
        )

    def remarks(self, queued_bytes: int, share: float, stream_bytes_per_s: float | None, behind_ms: float) -> list[str]:
        delay_ms, rate = self.delay.with_queue(queued_bytes), self.drain.rate
        if stream_bytes_per_s is not None and rate is not None and (share < 1 or delay_ms >= HEALTHY_MS):
            of = f" of {format_size(int(stream_bytes_per_s))}" if stream_bytes_per_s else ""
            pictures = f"{share:.0%} of the pictures, " if share < 1 else ""  # a log of values has none
            return [f"takes {format_size(int(rate))}/s{of}", f"{pictures}{behind_ms / 1000:.1f} s behind"]
        if delay_ms >= HEALTHY_MS:
            return [f"at its rate the peer needs {delay_ms / 1000:.1f} s for what waits"]
        return []


def healthy_delay_ms(kernel_bytes: int, bytes_per_s: float) -> float | None:
    """Return the delay of a peer that keeps up, in ms. None: it is to be measured."""
    if not kernel_bytes:
        return 0.0
    if bytes_per_s and kernel_bytes * 1000 < HEALTHY_MS * bytes_per_s:
        return kernel_bytes * 1000 / bytes_per_s
    return None


Pictures = tuple[int, int]
"""Pictures of the followed log up to the viewer's place, and those of them that were not sent: `LogCursor.pictures`."""


class DropEpisode:
    """One episode of drops: from the first message that is refused until everything is accepted again.

    It holds what there was when it began. Not thread-safe: its Sender's lock guards it.
    """

    __slots__ = ("_at", "_delay_removed_ms", "_dropped", "_pictures", "_waited_s")

    def __init__(
        self, now: float, dropped: dict[DropReason, Counts], pictures: Pictures, slow: SlowPeer | None
    ) -> None:
        self._at = now
        self._dropped = dropped
        self._pictures = pictures  # less those of the logs that were followed since and are not any more
        self._delay_removed_ms = self._waited_s = 0.0
        if slow is not None:
            self._delay_removed_ms, self._waited_s = slow.delay_removed_ms, slow.drain.waited_s
            slow.behind_max_ms = slow.behind_ms

    def leave_log(self, pictures: Pictures) -> None:
        """Keep the pictures of a log that is about to be left; the next one counts from 0."""
        published, lost = map(sub, self._pictures, pictures)
        self._pictures = published, lost

    def skip(self, before: Pictures, after: Pictures) -> None:
        """Leave out the step that the counts make where a viewer wants no pictures, or wants them again."""
        published, lost = map(add, self._pictures, map(sub, after, before))
        self._pictures = published, lost

    def end(
        self, now: float, dropped: dict[DropReason, Counts], pictures: Pictures, slow: SlowPeer | None
    ) -> LedgerEntry | None:
        """Return the one entry of the ledger for all of it; arguments as of now. None: nothing was dropped."""
        lost = difference(dropped, self._dropped)
        if not lost:
            return None
        duration_s = now - self._at
        published, missed = map(sub, pictures, self._pictures)
        share = 1 - missed / published if published > 0 else 1.0
        entry = LedgerEntry(LedgerKind.DROPS, now, "", dropped=lost, duration_s=duration_s, picture_share=share)
        if slow is None:
            return entry
        line = (slow.drain.waited_s - self._waited_s) / duration_s if duration_s > 0 else 0.0
        return replace(
            entry,
            delay_removed_ms=slow.delay_removed_ms - self._delay_removed_ms,
            delay_max_ms=slow.behind_max_ms,
            line_share=min(line, 1.0),
        )
