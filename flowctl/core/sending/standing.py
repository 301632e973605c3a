"""Where a viewer of a stream log stands with the fan-out that serves it: one field, and the table of its legal steps.

A viewer comes to a fan-out to be served from its own cursor: it is QUEUED for a turn. In its turn it is SERVED: it has
been offered all that there was. If the kernel took everything and nothing is refused for it, it enters the COHORT,
where it is written to with its squad; if the kernel refused something it is REFUSED until that takes more; otherwise
it is queued again, at once or with the next round. A member that the kernel refuses something, or that has to be
treated alone, leaves the cohort and is QUEUED.
"""

from __future__ import annotations

import enum
from typing import Final

from flowctl.errors import InternalError


class Standing(enum.IntEnum):
    """Where a viewer stands. An IntEnum, because its members are hashed in C: a step is taken in every turn."""

    GONE = 0  #: no fan-out serves it
    QUEUED = 1  #: its turn is to come
    SERVED = 2  #: it has had its turn; the next one comes with the next round, or when it asks for it
    REFUSED = 3  #: the kernel refused something; its turn comes when the kernel takes more
    COHORT = 4  #: written to with its squad


STEPS: Final = {
    (Standing.GONE, Standing.QUEUED): "it comes",
    (Standing.QUEUED, Standing.SERVED): "its turn",
    (Standing.QUEUED, Standing.COHORT): "it has taken everything (what-if, which has no turns)",
    (Standing.SERVED, Standing.QUEUED): "more to write, the next round, or the kernel takes more",
    (Standing.SERVED, Standing.REFUSED): "EAGAIN",
    (Standing.SERVED, Standing.COHORT): "it has taken everything",
    (Standing.REFUSED, Standing.QUEUED): "the kernel takes more",
    (Standing.COHORT, Standing.QUEUED): "EAGAIN, or it is to be treated alone",
    **{(old, Standing.GONE): "it goes" for old in Standing if old},
}
"""The legal steps, from where and to where, and what causes them."""


def step(old: Standing, new: Standing) -> Standing:
    """Return `new`, where a viewer that stands at `old` may go."""
    if (old, new) not in STEPS:
        raise InternalError(f"a viewer that is {old.name} cannot become {new.name}")
    return new
