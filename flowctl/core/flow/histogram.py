"""Delays counted in buckets: small, quick to add to, and exact to merge (pure).

As HdrHistogram (Gil Tene): a value is cut to its `bits` highest bits, so that a bucket is at most 1 / 2^(bits - 1) of
its values wide, and below 2^bits every value has a bucket of its own. The load tester counts microseconds with 7 bits
(1.6 %), records of viewers with 6, what-if milliseconds with 4. Only buckets that are in use exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

MAX_US: Final = 1 << 42
"""Largest value, 50 days in microseconds; larger ones are counted as this."""


def bucket_of(value: int, bits: int = 7) -> int:
    """Return the bucket of a value; negative ones, from clocks that differ a little, are 0."""
    if value < 1 << bits:
        return max(value, 0)
    value = min(value, MAX_US)
    shift = value.bit_length() - bits
    return (shift << (bits - 1)) + (value >> shift)


def bounds_of(bucket: int, bits: int = 7) -> tuple[int, int]:
    """Return the lowest value of a bucket and the lowest above it."""
    if bucket < 1 << bits:
        return bucket, bucket + 1
    shift = (bucket >> (bits - 1)) - 1
    low = (bucket - (shift << (bits - 1))) << shift
    return low, low + (1 << shift)


@dataclass(slots=True)
class DelayHistogram:
    """Counts of delays, by bucket of their microseconds. Not thread-safe."""

    buckets: dict[int, int] = field(default_factory=dict)  # bucket -> count. Hot paths add to it themselves.
    max_us: int = 0  # the largest value so far

    def add(self, value_us: int) -> None:
        bucket = bucket_of(value_us)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.max_us = max(self.max_us, value_us)

    def merge(self, other: DelayHistogram) -> None:
        mine = self.buckets
        for bucket, count in other.buckets.items():
            mine[bucket] = mine.get(bucket, 0) + count
        self.max_us = max(self.max_us, other.max_us)

    @property
    def count(self) -> int:
        return sum(self.buckets.values())

    @property
    def mean_ms(self) -> float | None:
        """The mean in ms, as exact as the buckets. None: there are none."""
        middles = ((sum(bounds_of(bucket)) / 2, count) for bucket, count in self.buckets.items())
        total = sum(min(middle, self.max_us) * count for middle, count in middles)
        return total / self.count / 1000 if self.buckets else None

    def percentile_ms(self, share: float) -> float | None:
        """Return the value in ms that a share (0 to 1) of the counted ones does not exceed. None: there are none."""
        total = self.count
        if not total:
            return None
        rank = max(share * total, 1.0)
        below = 0
        for bucket in sorted(self.buckets):
            count = self.buckets[bucket]
            if below + count >= rank:
                low, high = bounds_of(bucket)
                return min(low + (high - low) * (rank - below) / count, float(self.max_us)) / 1000
            below += count
        return self.max_us / 1000

    def sample_ms(self, most: int) -> list[float]:
        """Return at most `most` values in ms, sorted, spread evenly over the ranks of what was counted."""
        total = self.count
        samples = min(total, most)
        values: list[float] = []
        steps = self._steps()
        below, low, high, count = 0, 0, 0, 0
        for index in range(samples):
            rank = (index + 0.5) * total / samples
            while rank > below + count:
                below += count
                low, high, count = next(steps)
            values.append(round(min(low + (high - low) * (rank - below) / count, float(self.max_us)) / 1000, 3))
        return values

    def _steps(self) -> Iterator[tuple[int, int, int]]:
        for bucket in sorted(self.buckets):
            yield (*bounds_of(bucket), self.buckets[bucket])

    def as_list(self) -> list[int]:
        """Return [largest, bucket, count, bucket, count, ...], short in JSON."""
        flat = [self.max_us]
        for pair in self.buckets.items():
            flat += pair
        return flat

    @classmethod
    def from_list(cls, flat: list[int]) -> DelayHistogram:
        return cls(dict(zip(flat[1::2], flat[2::2], strict=True)), flat[0] if flat else 0)
