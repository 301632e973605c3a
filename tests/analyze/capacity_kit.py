"""Crowds that were measured on the machine of docs/benchmarks.md: healthy viewers that all keep up."""

from __future__ import annotations

from flowctl.analyze.capacity.node import Measurement

IDLE_BYTES = 46_500_000
FIGURES = (
    # viewers, bit rate, us per viewer and second, delay p99 in ms, bytes of memory per viewer
    (100, 600_000, 635, 26, 7_800),
    (1_000, 600_000, 234, 42, 7_200),
    (4_000, 600_000, 183, 42, 6_900),
    (100, 2_500_000, 605, 31, 11_200),
    (1_000, 2_500_000, 242, 40, 9_500),
    (4_000, 2_500_000, 207, 92, 9_400),
)
MEASURED = [
    Measurement(viewers=n, bit_rate=rate, cpu_us_per_s=us * n, memory_bytes=IDLE_BYTES + each * n,
                idle_memory_bytes=IDLE_BYTES, p99_ms=p99_ms)
    for n, rate, us, p99_ms, each in FIGURES
]  # fmt: skip
