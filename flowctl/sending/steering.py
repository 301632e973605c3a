"""What a Sender does about a slow peer beyond its states: samples, lateness, return to live, forecast, under the lock.

A *sample* (delay and drain rate) is taken about twice a second of a peer that was refused something by the kernel, on
its own timer, and of healthy ones by whoever sweeps over them (`Sender.sample_delay`). With each write to a viewer that
lags, what the kernel holds is asked for too: that and the drain rate tell what would reach it too late and is left out,
and how much the kernel is given ahead. A peer that stalled is brought back to live when the kernel takes something
again. See `flowctl.flow.timing`, `flowctl.flow.drain` and `flowctl.flow.forecast` for the rules.
"""

from __future__ import annotations

from typing import TypedDict

from flowctl.flow.forecast import Forecast, time_to_hard
from flowctl.flow.ledger import LedgerEntry, LedgerKind
from flowctl.flow.policy import Thin
from flowctl.flow.state import CLASS_COUNT, SendState
from flowctl.flow.timing import Timing, ahead_bytes, most_wait_s, target_s
from flowctl.flow.trouble import HEALTHY_MS, Trouble
from flowctl.sending.core import SenderCore
from flowctl.sending.types import AgeSource, Glance
from flowctl.units import format_size


class SteeringFigures(TypedDict, total=False):
    """What `SenderStatistics` has of a peer in trouble; the defaults there are right for every other."""

    picture_share: float
    waited_s: float
    delay_ms: float
    drain_bytes_per_s: float | None
    forecast: Forecast | None
    returns: int
    delay_removed_ms: float


class Steering(SenderCore):
    """The part of a Sender that measures and steers; see the module."""

    __slots__ = ()

    # -- samples

    def _sample_due_locked(self, now: float) -> bool:
        trouble = self._trouble
        return trouble is not None and now - trouble.acted_at >= self._settings.sample_s - 0.001

    def _timing_locked(self, trouble: Trouble, now: float) -> Timing | None:
        """Measure what a viewer that lags takes, and return by what its messages are late; None: nothing is.

        Nothing is while its rate is not known, and while it is our own thread that is late.
        """
        cursor, host = self._outbox.cursor, self._host
        written, kernel_bytes = self._bytes_sent_locked(), host.kernel_bytes()
        drain = trouble.drain
        drain.sample(now, written - kernel_bytes, waited=trouble.waited)
        rate = drain.known(now)
        if cursor is None or (rate is None and not cursor.log.rates.bytes_per_s):
            return None
        # With no rate measured, it may be as high as that of the stream.
        ahead = ahead_bytes(cursor.log.rates.bytes_per_s if rate is None else rate)
        if not 3 * trouble.ahead_bytes <= 4 * ahead <= 5 * trouble.ahead_bytes:
            trouble.allowed_bytes += ahead - trouble.ahead_bytes
            trouble.ahead_bytes = ahead
            host.limit_unsent(ahead)
        self._open_episode_locked(now)
        if rate is None or host.strained():
            return None
        held_bytes = trouble.delay.untaken_bytes(now, written, kernel_bytes)
        limits, rates = self._core.limits, cursor.log.rates
        target = target_s(limits.target_delay_ms, cursor.log.gop_duration_s)
        most_s = most_wait_s(limits, rates.bytes_per_s, rates.messages_per_s)
        return Timing(now, rate, held_bytes, target, self._patience_locked(), most_s)

    def _sample_locked(self, now: float, kernel_bytes: int | None = None) -> None:
        """Take a sample of a peer in trouble and do what follows from it."""
        trouble = self._trouble
        if trouble is None or self._close_reason is not None:
            return
        foreign = self._foreign_locked()
        if not foreign and self._host.strained():
            trouble.acted_at = now  # it is our thread that is late, and what it measures is itself
            return
        if foreign and now - trouble.sampled_at < self._settings.sample_s - 0.001:
            return  # who asks more often gets the same answer: the meters keep their rhythm
        self._measure_locked(trouble, now, self._host.kernel_bytes() if kernel_bytes is None else kernel_bytes)
        if not foreign:  # what follows happens on the owning thread
            trouble.acted_at = now
            self._act_on_sample_locked(trouble, now)
        if (
            self._core.state is SendState.READY
            and trouble.harmless
            and trouble.delay_ms < HEALTHY_MS
            and not (self._aged_by_delay and trouble.delay.told)
        ):
            self._trouble = None

    def _act_on_sample_locked(self, trouble: Trouble, now: float) -> None:
        settings = self._settings
        behind_ms, limit_ms = max(trouble.age_ms, self._age_ms_locked(now)), settings.return_delay_s * 1000
        if limit_ms and behind_ms >= limit_ms and self._core.would_block and not trouble.drain.stalled(now):
            self._return_locked(now, f"{behind_ms / 1000:.1f} s behind")
        soft = self._core.state is SendState.SOFT_LIMIT and self._judges_pictures_locked(self._mask)
        if soft and self._thin_for_locked(SendState.SOFT_LIMIT, now):
            # It has stalled since it got there, or more has come.
            self._settle_locked(self._core.dropped(self._counted_locked(now), now), now)

    def _measure_locked(self, trouble: Trouble, now: float, kernel_bytes: int) -> None:
        queued_bytes = self._queued_bytes_locked(now)
        trouble.sample(now, queued_bytes, self._bytes_sent_locked(), kernel_bytes)
        self._note_pictures_locked(trouble, now)

    def _queued_bytes_locked(self, now: float) -> int:
        """Return what waits here for the peer, without the overhead that limits count."""
        load = self._load_locked(now)
        return load.size_bytes - load.messages * self._core.limits.overhead_bytes

    def _sample_healthy_locked(self, now: float, kernel_bytes: int) -> float:
        """Return the delay of a peer that is in no trouble, in ms; begin to measure it where that is worth it."""
        cursor = self._outbox.cursor
        rate = cursor.log.rates.bytes_per_s if cursor is not None and self._member else 0.0
        # A member takes at least what is published, so this is the most that it can be behind.
        if not kernel_bytes or (rate and kernel_bytes * 1000 < HEALTHY_MS * rate):
            return kernel_bytes * 1000 / rate if kernel_bytes else 0.0
        trouble = self._trouble = Trouble()
        self._measure_locked(trouble, now, kernel_bytes)
        return trouble.delay_ms

    @property
    def _aged_by_delay(self) -> bool:
        return self._settings.age_from is AgeSource.DELAY

    def _age_ms_locked(self, now: float) -> float:
        return max(now - self._oldest_locked(now), 0.0) * 1000

    def _stream_rates_locked(self, now: float) -> tuple[list[float], list[float]] | None:
        cursor = self._outbox.cursor
        if cursor is None:
            return None
        tail = cursor.log.tail
        return cursor.log.rates.per_second(now, tail.counts, tail.sizes)

    # -- return to live

    def _return_after_stall_locked(self, now: float) -> None:
        """Skip what became old while the kernel took nothing, if that was for long; it takes something again."""
        stalled_s = self._stalled_s_locked(now)
        if 0 < self._settings.return_after_s <= stalled_s and self._close_reason is None:
            self._return_locked(now, f"the kernel had taken nothing for {stalled_s:.1f} s")

    def _return_locked(self, now: float, cause: str) -> None:
        """Go to the newest key frame of the followed log, if there is one ahead, and say what that brought."""
        trouble, cursor = self._trouble, self._outbox.cursor
        if trouble is None or cursor is None or self._member or self._closing:
            return
        before = self._oldest_locked(now)
        self._open_episode_locked(now)
        skipped = self._outbox.skip_to_live(self._core.limits, now)
        self._apply_mask_locked(now)  # a joiner is none any more: from now on it is judged by the picture
        if not skipped:
            return
        removed_ms = max(self._oldest_locked(now) - before, 0.0) * 1000
        trouble.returns += 1
        trouble.delay_removed_ms += removed_ms
        why = f"returned to live: {removed_ms / 1000:.1f} s of delay removed; {cause}"
        self._note_locked(LedgerEntry(LedgerKind.RETURN, now, why, delay_removed_ms=removed_ms))
        self._settle_locked(self._core.dropped(self._counted_locked(now), now), now)

    def _relieve_locked(self, now: float, cause: str) -> None:
        """Skip to the newest key frame of the followed log; where that frees nothing, drop what may be dropped."""
        self._lock.assert_owned()
        cursor = self._outbox.cursor
        if cursor is None or self._member or self._closing:
            return
        before = cursor.entry
        if self._trouble is None:
            self._trouble = Trouble()
        self._return_locked(now, cause)
        if self._close_reason is None and cursor.entry is before:
            self._thin_request_locked(Thin.DROPPABLE, now)

    # -- the forecast

    def _forecast_locked(self, now: float) -> Forecast | None:
        """Return when the hard limit will be reached if all goes on as now; None: never, or nothing is known."""
        trouble, core = self._trouble, self._core
        if trouble is None or not core.would_block or not self._open_locked():
            return None
        stalled = trouble.drain.stalled(now)
        drain = 0.0 if stalled else trouble.drain.rate
        if drain is None or (not stalled and self._judges_pictures_locked(self._mask)):
            return None  # not known; or what its line cannot carry is left out, and its queue does not grow
        load = self._counted_locked(now)
        per_second = self._stream_rates_locked(now)
        if per_second is not None:
            kept = [item for item in range(CLASS_COUNT) if not self._mask >> item & 1]
            messages_per_s = sum(per_second[0][item] for item in kept)
            bytes_per_s = sum(per_second[1][item] for item in kept)
        else:
            bytes_per_s = trouble.fill_bytes_per_s
            messages_per_s = bytes_per_s * load.messages / load.size_bytes if load.size_bytes else 0.0
        return time_to_hard(
            load,
            core.limits,
            fill_bytes_per_s=bytes_per_s,
            fill_messages_per_s=messages_per_s,
            drain_bytes_per_s=drain,
        )

    def _remarks_locked(self, now: float) -> list[str]:
        """Return what is told of shares, samples and forecast, for `why`."""
        trouble, cursor = self._trouble, self._outbox.cursor
        if trouble is None:
            return []
        remarks = []
        # Most is asked right after something was thrown away that the last sample saw.
        delay_ms = trouble.delay.with_queue(self._queued_bytes_locked(now))
        rate, share = trouble.drain.rate, self._picture_share_locked()
        if cursor is not None and self._core.would_block and rate is not None and (share < 1 or delay_ms >= HEALTHY_MS):
            needed = cursor.log.rates.bytes_per_s
            of = f" of {format_size(int(needed))}" if needed else ""
            remarks.append(f"takes {format_size(int(rate))}/s{of}")
            remarks.append(f"{share:.0%} of the pictures, {delay_ms / 1000:.1f} s behind")
        elif delay_ms >= HEALTHY_MS:
            remarks.append(f"at its rate the peer needs {delay_ms / 1000:.1f} s for what waits")
        forecast = self._forecast_locked(now)
        if forecast is not None:
            remarks.append(f"the hard limit ({forecast.axis.value}) is {forecast.seconds:.0f} s away")
        return remarks

    def _glance_locked(self) -> Glance:
        trouble, cursor = self._trouble, self._outbox.cursor
        own_bytes, own_messages = self._outbox.own
        return Glance(
            state=self._core.state,
            picture_share=self._picture_share_locked(),
            entry=None if cursor is None else cursor.entry,
            own_bytes=own_bytes,
            own_messages=own_messages,
            bytes_sent=self._bytes_sent_locked(),
            transitions=self._core.transitions,
            delay_ms=0.0 if trouble is None else trouble.delay_ms,
            lagging=self._lagging and not self._member,
            joining=self._joining_locked(),
        )

    def _figures_locked(self, now: float) -> SteeringFigures:
        """Return what statistics say about all this."""
        trouble = self._trouble
        if trouble is None:
            return {}
        return {
            "picture_share": self._picture_share_locked(),
            "waited_s": trouble.drain.waited_s,
            "delay_ms": trouble.delay_ms,
            "drain_bytes_per_s": trouble.drain.rate,
            "forecast": self._forecast_locked(now),
            "returns": trouble.returns,
            "delay_removed_ms": trouble.delay_removed_ms,
        }
