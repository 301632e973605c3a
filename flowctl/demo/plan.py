"""What the demonstration consists of: its source, its limits, its viewers, and what is expected of each kind.

The limits are smaller than a server's usual ones, so that everything happens within half a minute; how they act is the
same. The three slow viewers meet three steps of the drop policy: who reads four fifths of the stream gets by without
the frames that no other frame needs, who reads half skips to key frames from time to time, and who reads a fifth lives
on key frames and sound. A missing half of 1.6 Mbit/s takes about 3 s to show: it has to fill what the kernel hides
(128 KiB of unsent bytes, a quarter of a second of receive buffer) before it fills 256 KiB of queue.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flowctl.client.player import PlayProfile
from flowctl.errors import ConfigError
from flowctl.limits import Limits
from flowctl.media.sample import SampleRecipe

RECIPE: Final = SampleRecipe(seconds=10.0, gop_s=2.0, video_bit_rate=1_500_000, audio_bit_rate=96_000, b_frames=2)
"""A short recording with everything that real ones have: B-frames that may be left out, and sound."""

SLOW_SHARES: Final = (0.8, 0.5, 0.2)
"""What the slow viewers read, as shares of the stream's bit rate."""

DEFAULT_SOFT: Final = "256KiB,1024,2s"
DEFAULT_HARD: Final = "2MiB,4096,5s"

CACHE_VARIABLE: Final = "FLOWCTL_CACHE"


class Kind(enum.Enum):
    """What a viewer is like, and so what is expected."""

    HEALTHY = "healthy"
    SLOW = "slow"
    STALLED = "stalled"
    FLOODING = "flooding"


@dataclass(frozen=True, slots=True)
class ViewerPlan:
    """One viewer.

    Args:
        label: its name in table and report.
        kind: what it is like.
        profile: how it behaves.
    """

    label: str
    kind: Kind
    profile: PlayProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoPlan:
    """The whole demonstration.

    Args:
        duration_s: media time that is published once all viewers are there, 4 to 600 s.
        healthy: number of healthy viewers, 1 to 500.
        slow_shares: share of the bit rate that each slow viewer reads, each above 0 and below 1.
        stall_after_s: when the stalling viewer stops reading, from its first message.
        pings_per_s: what the flooding viewer sends.
        soft: soft limits of the server, as ``bytes,messages,age``.
        hard: its hard limits.
        stuck_s: after which time without progress a viewer is cut; 0 is never.
        synthetic: whether to publish the synthetic source instead of a recording.

    Raises:
        ConfigError: a value is out of range.
    """

    duration_s: float = 24.0
    healthy: int = 20
    slow_shares: tuple[float, ...] = SLOW_SHARES
    stall_after_s: float = 3.0
    pings_per_s: int = 500
    soft: str = DEFAULT_SOFT
    hard: str = DEFAULT_HARD
    stuck_s: float = 10.0
    synthetic: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (("duration_s", 4, 600), ("healthy", 1, 500), ("stall_after_s", 0, 600)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} is {getattr(self, name):g}, it must be {low} to {high}")
        if not all(0 < share < 1 for share in self.slow_shares):
            raise ConfigError(f"slow_shares is {self.slow_shares}, each must be between 0 and 1")
        Limits.parse(self.soft, self.hard)

    @property
    def limits(self) -> Limits:
        """The server's limits."""
        return Limits.parse(self.soft, self.hard)

    def viewers(self, bit_rate: int) -> list[ViewerPlan]:
        """Return all viewers of a stream of `bit_rate` bits per second."""
        return [
            *(ViewerPlan(f"healthy {index + 1}", Kind.HEALTHY, PlayProfile()) for index in range(self.healthy)),
            *(
                ViewerPlan(f"slow {share:.0%}", Kind.SLOW, PlayProfile(rate=round(bit_rate * share)))
                for share in self.slow_shares
            ),
            ViewerPlan("stalled", Kind.STALLED, PlayProfile(stall_after_s=self.stall_after_s)),
            ViewerPlan("flooding", Kind.FLOODING, PlayProfile(pings_per_s=self.pings_per_s)),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for the process that runs the clients."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DemoPlan:
        """Return the plan that `as_dict` described."""
        return cls(**{**values, "slow_shares": tuple(values["slow_shares"])})


def cache_directory() -> Path:
    """Return where recordings are kept: FLOWCTL_CACHE, or the user's cache, or ``.demo`` here if there is no home."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        directory = Path(base) if base else Path.home() / ".cache"
        (directory / "flowctl").mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return Path(".demo")
    return directory / "flowctl"
