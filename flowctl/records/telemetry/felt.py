"""What samples say of one connection, summed up while they are made: delay, stalls, what its line carried (pure).

A viewer that keeps up has no such sums: its delay counts as 0. Delays are kept as time per bucket: a quantile is the
middle of its bucket, 1.6 % off at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final

from flowctl.core.flow.histogram import bounds_of, bucket_of
from flowctl.core.flow.state import CLASS_COUNT, SendState
from flowctl.core.sending.blame import Blame
from flowctl.records.telemetry.sampling import SampledCondition
from flowctl.records.telemetry.schema import Row

STALL_MS: Final = 500.0
"""Time without progress, while something waits, that is a stall: players buffer about a second."""
_DELAY_BITS: Final = 6
"""Precision of delay buckets, in bits; delays are in microseconds, and one below 1 ms counts as 0."""
_QUANTILES: Final = (("delay_p50_ms", 0.5), ("delay_p95_ms", 0.95), ("delay_p99_ms", 0.99))
_READY: Final = SendState.READY.name
_ACCEPTED_BYTES: Final = slice(1 + CLASS_COUNT, 1 + 2 * CLASS_COUNT)
_DROPPED_MESSAGES: Final = slice(1 + 4 * CLASS_COUNT, 1 + 5 * CLASS_COUNT)


def shows_trouble(condition: SampledCondition, happened: Row) -> bool:
    """Return whether a sample shows more than a viewer that keeps up."""
    delay_ms, share = condition.viewer_delay_ms, condition.picture_share
    calm = condition.state == _READY and share >= 1 and not condition.stalled_ms and (delay_ms or 0.0) < 1
    return not calm or any(happened[_DROPPED_MESSAGES])


@dataclass(slots=True)
class SampleSums:
    """Sums over the samples that show trouble of one connection, by column. The sampler's thread."""

    ms: float = 0.0  # time that they are about; what else was sampled passed without delay
    delay_max_ms: float = 0.0
    late_ms: float = 0.0
    stall_count: int = 0
    stall_ms: float = 0.0
    trouble_ms: float = 0.0
    line_bytes: int = 0
    line_stream_bytes: int = 0
    lag_ms: float = 0.0
    lag_server_ms: float = 0.0
    lag_burst_ms: float = 0.0
    unforced_drops: int = 0
    _ms_sum: float = 0.0
    _delays_ms: dict[int, float] = field(default_factory=dict)  # time by bucket

    def add_sample(
        self,
        condition: SampledCondition,
        happened: Row,
        target_ms: float,
        cached_bytes: int = 0,
        blamed: Blame = Blame.NOBODY,
    ) -> None:
        ms, delay_ms, stalled_ms = condition.interval_ms, condition.viewer_delay_ms or 0.0, condition.stalled_ms
        bucket = bucket_of(int(delay_ms * 1000), _DELAY_BITS) if delay_ms >= 1 else 0
        accepted = sum(happened[_ACCEPTED_BYTES]) - cached_bytes
        self.ms += ms
        self._ms_sum += delay_ms * ms
        self._delays_ms[bucket] = self._delays_ms.get(bucket, 0.0) + ms
        self.delay_max_ms = max(self.delay_max_ms, delay_ms)
        if target_ms and delay_ms > target_ms:
            self.late_ms += ms
        if stalled_ms >= STALL_MS:
            self.stall_ms += min(stalled_ms, ms)
            self.stall_count += stalled_ms < STALL_MS + ms  # it passes the mark in one of the samples that see it
        if blamed is not Blame.NOBODY:  # for the whole lag so far
            self.lag_ms += ms
            self.lag_server_ms += ms * (blamed is Blame.SERVER_LOOP)
            self.lag_burst_ms += ms * (blamed is Blame.PUBLISHER_BURST)
        if condition.state != _READY or condition.picture_share < 1:
            self.trouble_ms += ms
            if condition.drain_bytes_per_s is not None:
                self.line_bytes += int(condition.drain_bytes_per_s * ms / 1000)
                self.line_stream_bytes += accepted
        elif not stalled_ms:
            self.unforced_drops += sum(happened[_DROPPED_MESSAGES])

    def columns(self, sampled_ms: float) -> dict[str, Any]:
        sums: dict[str, Any] = {name: getattr(self, name) for name in _SUMS}
        whole_ms = max(sampled_ms, self.ms)
        times = {**self._delays_ms, 0: self._delays_ms.get(0, 0.0) + whole_ms - self.ms}
        for name, share in _QUANTILES:
            passed_ms = 0.0
            for bucket in sorted(times):
                passed_ms += times[bucket]
                if passed_ms >= share * whole_ms:
                    sums[name] = min(sum(bounds_of(bucket, _DELAY_BITS)) / 2000, self.delay_max_ms) if bucket else 0.0
                    break
        return sums | {"delay_mean_ms": self._ms_sum / whole_ms if whole_ms else 0.0}


_SUMS: Final = tuple(item.name for item in fields(SampleSums) if item.name != "ms" and not item.name.startswith("_"))
NO_SAMPLE_SUMS: Final = SampleSums().columns(0.0)
