"""What the demonstration of a cluster consists of: its origins, edges and viewers, and when what happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flowctl.demo.runner import check_bounds

BIT_RATE: Final = 1_600_000
STREAM: Final = "demo/cluster"
KEY_INTERVAL_S: Final = 1.0
"""A segment is as long, and so an edge by segments that much behind."""
SLOW_RATE: Final = 100_000.0
"""Bytes per second on the line to the slow origin: half of the stream."""
ORIGIN_A: Final = "origin A"
ORIGIN_B: Final = "origin B"
SLOW: Final = "origin C (slow)"
LIAR: Final = "origin D (lies)"
FOLLOWING: Final = "edge 1 (follows)"
BY_SEGMENTS: Final = "edge 2 (segments)"
DIRECT: Final = "an origin, directly"
"""Where a viewer is to compare with."""
ORIGINS: Final = (ORIGIN_A, ORIGIN_B, SLOW, LIAR)
EDGES: Final = (FOLLOWING, BY_SEGMENTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPlan:
    """The whole demonstration."""

    duration_s: float = 24.0
    viewers: int = 4
    kill_share: float = 0.5  # of the stream, after which the origin is killed that the first edge follows then

    def __post_init__(self) -> None:
        check_bounds(self, duration_s=(12, 300), viewers=(1, 100), kill_share=(0.2, 0.8))

    @property
    def kill_s(self) -> float:
        """When the origin is killed, from the first frame on."""
        return self.duration_s * self.kill_share
