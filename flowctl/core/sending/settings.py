"""Times and budgets of a Sender."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError


class AgeSource(enum.Enum):
    """What the age axis of the limits measures: the oldest queued message, or that and the delay of the viewer."""

    QUEUE = "queue"
    DELAY = "delay"


LIVE_RETURN_AFTER_S: Final = 3.0
"""`SenderSettings.return_after_s` of a live server: media that old are worth less than being live again. Any other
server sends everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderSettings:
    """Times and budgets of a Sender; 0 turns a time off.

    Args:
        stuck_s: close when the peer took nothing for this long while something is queued, or a log is followed.
        soft_too_long_s: close after this long at or above SOFT_LIMIT without a break.
        close_deadline_s: after `close_after_flush`, abort when this has passed. Turned off together with `stuck_s`, a
            peer that does not read is never closed.
        control_bytes: limit of the control lane; beyond it the connection is closed.
        control_messages: the same in messages.
        turn_bytes: how much one connection writes before others get their turn.
        turn_messages: the same in messages, a message in flight included; at most IOV_MAX (1024), which is what one
            system call takes.
        return_after_s: when the kernel takes something again after so long, go to the newest key frame of the
            followed log instead of sending what is old. 0: send everything.
        return_delay_s: the same whenever a peer that takes something is so far behind. 0: never.
        age_from: whether the age axis is the age of the queue, or the larger of that and the sampled delay.
        sample_s: time between two samples of a peer that is in trouble (delay, rate).
    """

    stuck_s: float = 15.0
    soft_too_long_s: float = 60.0
    close_deadline_s: float = 5.0
    control_bytes: int = 256 * 1024
    control_messages: int = 1024
    turn_bytes: int = 256 * 1024
    turn_messages: int = 512
    return_after_s: float = 0.0
    return_delay_s: float = 0.0
    age_from: AgeSource = AgeSource.QUEUE
    sample_s: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self)
        times = "stuck_s soft_too_long_s close_deadline_s return_after_s return_delay_s"
        for name in times.split():
            if not getattr(self, name) >= 0:  # NaN is neither
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be 0 (off) or more seconds")
        for name in ("control_bytes", "control_messages", "turn_bytes", "turn_messages", "sample_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be more than 0")
        if self.turn_messages > 1024:
            raise ConfigError(f"turn_messages is {self.turn_messages}, one system call takes at most 1024 (IOV_MAX)")

    @property
    def steers(self) -> bool:
        """Whether a peer in trouble has to be sampled on a timer."""
        return self.age_from is AgeSource.DELAY or self.return_delay_s > 0
