"""What the demonstration consists of: its stream, its limits, its crowd, and what is expected of each kind of viewer.

The crowd is one of the load tester (`flowctl.load`), each peer with an address of its own, by which the server's
account of it is found. The limits are smaller than a server's usual ones, so that everything happens within half a
minute; how they act is the same. The three slow viewers read 85 %, half and a fifth of the stream, and see nearly so
many of its pictures, the last one a key frame now and then. A fourth one reads half of the largest stream of a set,
from which the server chooses, and sees all pictures, smaller. A missing half of 1.6 Mbit/s takes a second or two to
show: it has to fill what the kernel hides (128 KiB of unsent bytes).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from flowctl.core.flow.limits import Limits
from flowctl.demo.runner import check_bounds, crowd_plan
from flowctl.errors import ConfigError
from flowctl.load.crowd import source_address
from flowctl.load.plan import LoadPlan

BIT_RATE: Final = 1_600_000
"""Bit rate of the stream, sound included."""

SLOW_SHARES: Final = (0.85, 0.5, 0.2)
"""Shares of the stream's bit rate that the slow viewers read."""

RENDITIONS: Final = {"_720": (BIT_RATE, 1280, 720), "_480": (700_000, 854, 480), "_360": (400_000, 640, 360)}
"""Endings of the streams of the set, and their bit rate, width and height."""

SET_SHARE: Final = 0.5
"""Share of the stream's bit rate that the viewer of the set reads."""
SET_LABEL: Final = f"set {SET_SHARE:.0%}"

ATTACK: Final = "B17"
"""Profile of the attackers: it acknowledges without reading, and floods with pings without reading the answers."""

DEFAULT_SOFT: Final = "512KiB,1024,3s"
DEFAULT_HARD: Final = "2MiB,4096,5s"

_RAMP_S: Final = 1.5
"""Time in which the viewers join, one after the other, so that they meet the middle of a group of pictures."""


_STALL_BUFFER: Final = "64KiB"
"""Receive buffer of the viewer that stalls: one that grows by itself takes half a minute of this stream."""


class ViewerKind(enum.Enum):
    """The kind of a viewer, which says what is expected of it."""

    HEALTHY = "healthy"
    SLOW = "slow"
    STALLED = "stalled"
    HOSTILE = "hostile"


@dataclass(frozen=True, slots=True)
class ViewerPlan:
    """One viewer."""

    label: str
    kind: ViewerKind
    profile: str  # how it behaves, as the load tester calls it
    number: int

    @property
    def host(self) -> str:
        return source_address(self.number)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoPlan:
    """Settings of the demonstration."""

    duration_s: float = 24.0
    healthy: int = 20
    # share of the bit rate that each slow viewer reads, each above 0 and below 1
    slow_shares: tuple[float, ...] = SLOW_SHARES
    stall_after_s: float = 3.0  # when the stalling viewer stops reading, from its first frame
    soft: str = DEFAULT_SOFT  # soft limits of the server, as ``bytes,messages,age``
    hard: str = DEFAULT_HARD
    stuck_s: float = 10.0  # after which time without progress a viewer is cut; 0 is never

    def __post_init__(self) -> None:
        check_bounds(self, duration_s=(4, 600), healthy=(1, 500), stall_after_s=(0, 600))
        if not all(0 < share < 1 for share in self.slow_shares):
            raise ConfigError(f"slow_shares is {self.slow_shares}, each must be between 0 and 1")
        Limits.parse(self.soft, self.hard)

    @property
    def limits(self) -> Limits:
        return Limits.parse(self.soft, self.hard)

    def _crowd(self) -> dict[str, tuple[ViewerKind, str, int]]:
        """Return kind, label and number of viewers of each profile of the load tester."""
        crowd = {"healthy": (ViewerKind.HEALTHY, "healthy", self.healthy)}
        for share in self.slow_shares:
            crowd[f"slow@{round(BIT_RATE * share / 1000)}k"] = (ViewerKind.SLOW, f"slow {share:.0%}", 1)
        crowd[f"stall@{round(self.stall_after_s * 1000)}ms/{_STALL_BUFFER}"] = (ViewerKind.STALLED, "stalled", 1)
        crowd[ATTACK] = (ViewerKind.HOSTILE, "hostile", 1)
        return crowd

    def load_plan(self, url: str) -> LoadPlan:
        """Return the load run that is the crowd and the publisher of the demonstration."""
        return crowd_plan(
            url,
            {profile: count for profile, (_, _, count) in self._crowd().items()},
            bit_rate=BIT_RATE,
            ramp_s=_RAMP_S,
            duration_s=self.duration_s,
            command="flowctl demo",
        )

    def set_plan(self, url: str) -> LoadPlan:
        """Return the load run that is the viewer of the set; its name in the results is `set_profile`."""
        return LoadPlan(
            url=url, profiles={self._set_manner: 1}, measure_every=1, workers=1, duration_s=_RAMP_S + self.duration_s
        )

    @property
    def _set_manner(self) -> str:
        return f"slow@{round(BIT_RATE * SET_SHARE / 1000)}k"

    @property
    def set_profile(self) -> str:
        return f"{self._set_manner} of the set"

    @property
    def compared(self) -> dict[str, str]:
        """The viewers that are shown side by side, as label and profile of the load tester."""
        return {
            label: profile
            for profile, (kind, label, _) in self._crowd().items()
            if kind in (ViewerKind.HEALTHY, ViewerKind.SLOW)
        } | {SET_LABEL: self.set_profile}

    def viewers(self, load: LoadPlan) -> list[ViewerPlan]:
        """Return all viewers of `load_plan`: the healthy ones first, then in the order in which they are listed."""
        crowd = self._crowd()
        orders = sorted(load.assignments(1), key=lambda order: (list(crowd).index(order.profile), order.number))
        plans = []
        for order in orders:
            kind, label, count = crowd[order.profile]
            name = label if count == 1 and kind is not ViewerKind.HEALTHY else f"{label} {order.index + 1}"
            plans.append(ViewerPlan(name, kind, order.profile, order.number))
        return plans
