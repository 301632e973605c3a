"""The closed loop, what it consists of: one crowd, that comes twice, and the limits that it meets first.

The crowd is one of the load tester, each peer with an address of its own of 127.0.0.0/8, the same both times; so a
score per address means something, and "the same viewer" does too. It has viewers that keep up, honest viewers on links
that pause or swing, and abusers: who begins messages on chunk streams without end, who floods control messages, who
nests values thousands deep, who sends chunks of one octet.

The limits of the first run are too tight on purpose: a viewer whose oldest frame waits for longer than a second is cut,
and a link that rests for 3 s does just that to it, though it would have caught up. That is the mistake that the
records are to show, and the analysis to mend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flowctl.core.flow.limits import Limits
from flowctl.core.flow.limitsfile import LimitsFile
from flowctl.demo.runner import check_bounds, crowd_plan
from flowctl.load.plan import LoadPlan

BIT_RATE: Final = 2_000_000
RAMP_S: Final = 2.0

TIGHT_SOFT: Final = "512KiB,1024,1s"
TIGHT_HARD: Final = TIGHT_SOFT
"""Too tight, on purpose, see above: no room between the two, so nobody is thinned before being cut."""

PAUSING: Final = "pause@4s/3s/64KiB"
"""A link that rests: longer than the first limits allow, shorter than any sensible ones."""
RESTING: Final = "pause@4s/700ms/64KiB"
"""The same, shorter than the first limits allow: such viewers tell of their links for the whole run."""
SWINGING: Final = "sawtooth@500k-6M/6s"
"""A mobile link."""
ABUSES: Final = ("B05", "B17", "B08", "B02")
"""Chunk streams without end, control flood, nesting, chunks of one octet: what no sound client does even once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopPlan:
    """The whole demonstration."""

    duration_s: float = 15.0  # how long the crowd stays each time, 8 to 600 s
    healthy: int = 20
    slow: int = 4  # number of honest viewers of each kind of bad link, 1 to 50
    abusers: int = 1

    def __post_init__(self) -> None:
        check_bounds(self, duration_s=(8, 600), healthy=(2, 500), slow=(1, 50), abusers=(1, 10))

    @property
    def limits(self) -> LimitsFile:
        return LimitsFile(
            limits=Limits.parse(TIGHT_SOFT, TIGHT_HARD),
            objective="none: too tight on purpose, to be found out",
        )

    def load_plan(self, url: str, server_pid: int) -> LoadPlan:
        """Return the load run; the same each time but for what the system chooses."""
        crowd = {"healthy": self.healthy, PAUSING: self.slow, RESTING: self.slow, SWINGING: self.slow}
        crowd |= dict.fromkeys(ABUSES, self.abusers)
        return crowd_plan(
            url,
            crowd,
            bit_rate=BIT_RATE,
            ramp_s=RAMP_S,
            duration_s=self.duration_s,
            server_pid=server_pid,
            command="flowctl demo --pipeline",
        )
