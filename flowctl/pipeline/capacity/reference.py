"""What a node of the reference machine took, for a node that was not measured: figures of docs/benchmarks.md (pure).

These are the lines of flowctl in the table *Comparison: cost against delay* of that document: one poll group on one
thread of a virtual AMD EPYC with two cores that carried the crowd too, loopback, H.264 at 30 frames per second and AAC,
measured on 2026-11-21 with ``python bench compare``. Absolute figures moved by a third between hours on that
very machine, and another one differs by more: they answer "thousands or tens of thousands", and an operator who
wants more measures (``flowctl load --server-pid``, ``python bench capacity``).
"""

from __future__ import annotations

from typing import Final

from flowctl.pipeline.capacity.model import Measurement

MACHINE: Final = "AMD EPYC, 2 cores with the crowd on them, Python 3.11, loopback; docs/benchmarks.md of 2026-11-21"
"""What the figures are of, for the reader of an answer."""

IDLE_MEMORY_BYTES: Final = 46_500_000
"""Of the server without viewers: of the 53.7 MB of the soak with 1000 viewers of 600 kbit/s, 7.2 MB are theirs."""

FIGURES: Final = (
    # viewers, bit rate, us per viewer and second, delay p99 in ms, bytes of memory per viewer
    (100, 600_000, 635, 26, 7_800),
    (1_000, 600_000, 234, 42, 7_200),
    (4_000, 600_000, 183, 42, 6_900),
    (100, 2_500_000, 605, 31, 11_200),
    (1_000, 2_500_000, 242, 40, 9_500),
    (4_000, 2_500_000, 207, 92, 9_400),
)
"""Of viewers that all keep up. A hundred cost more each because they are flushed sooner."""


def reference() -> list[Measurement]:
    """Return the figures as measurements, in order of bit rate and viewers."""
    return [
        Measurement(
            viewers=viewers,
            bit_rate=bit_rate,
            cpu_us_per_s=us * viewers,
            memory_bytes=IDLE_MEMORY_BYTES + each_bytes * viewers,
            idle_memory_bytes=IDLE_MEMORY_BYTES,
            p99_ms=p99_ms,
        )
        for viewers, bit_rate, us, p99_ms, each_bytes in FIGURES
    ]
