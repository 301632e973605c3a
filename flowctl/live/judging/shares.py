"""How the viewers of a stream are doing, as a signal: how many are in each state, and what they see of it (pure).

A publisher, or an application, that knows that a third of its viewers cannot take what it sends can send less. A
`ViewerShares` is one such count. `is_worth_telling` decides which are told: none while the
shares stay within a band around what was told last (so a viewer that goes back and forth makes no noise), not more
often than at an interval, and the last word within a bounded time even where the change is small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flowctl.core.flow.state import SendState
from flowctl.errors import ConfigError

STATE_COUNT: Final = len(SendState)


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewerShares:
    """The viewers of one stream at one moment.

    Args:
        stream: ``app/stream``.
        at: time in seconds on the server's clock.
        viewers: number of viewers.
        states: of them, by send state (index: `SendState`).
        missing_pictures: of them, those that do not get all of the pictures.
        picture_share: share of the pictures of the last 20 s that they get, on average, 0..1.
        worst_delay_ms: how far behind the last of them is, at its last sample.
    """

    stream: str
    at: float
    viewers: int
    states: tuple[int, ...] = (0,) * STATE_COUNT
    missing_pictures: int = 0
    picture_share: float = 1.0
    worst_delay_ms: float = 0.0

    def in_state(self, state: SendState) -> float:
        return self.states[state] / self.viewers if self.viewers else 0.0

    @property
    def missing_share(self) -> float:
        return self.missing_pictures / self.viewers if self.viewers else 0.0

    def distance(self, other: ViewerShares) -> float:
        """Return by how much the share that differs most differs, 0..1."""
        pairs = [(self.in_state(item), other.in_state(item)) for item in SendState]
        pairs += [(self.missing_share, other.missing_share), (self.picture_share, other.picture_share)]
        return max(abs(mine - theirs) for mine, theirs in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareSettings:
    """When a count of viewers is worth telling.

    Args:
        interval_s: least time between two reports, in seconds.
        change: by how much a share has to differ from what was told last, above 0 and at most 1.
        settle_s: after this time a smaller difference is told too, so that the last word is right.
        repeat_s: tell it again after this time even if nothing has changed. 0: never.

    Raises:
        ConfigError: a value is out of range.
    """

    interval_s: float = 1.0
    change: float = 0.05
    settle_s: float = 10.0
    repeat_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("interval_s", "settle_s", "repeat_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be 0 or more seconds")
        if not 0 < self.change <= 1:
            raise ConfigError(f"change is {self.change}, it must be above 0 and at most 1")


def is_worth_telling(shares: ViewerShares, told: ViewerShares | None, settings: ShareSettings) -> bool:
    """Return whether a subscriber is to be told of `shares`; `told`: the shares it was told last, None: none yet."""
    if told is None:
        return shares.viewers > 0
    waited_s = shares.at - told.at
    if waited_s < settings.interval_s:
        return False
    if settings.repeat_s and waited_s >= settings.repeat_s:
        return True
    if bool(shares.viewers) != bool(told.viewers) or shares.distance(told) >= settings.change:
        return True
    same = (shares.viewers, shares.states) == (told.viewers, told.states) and not shares.distance(told)
    return not same and waited_s >= settings.settle_s
