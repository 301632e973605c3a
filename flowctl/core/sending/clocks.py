"""What goes on by time alone: when a Sender has to be looked at next, and what has taken too long (pure)."""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

from flowctl.core.sending.settings import SenderSettings
from flowctl.reasons import CloseReason

JOIN_CHECK_S: Final = 0.5
"""How often a joiner's load is compared: shorter than any group of pictures, longer than several flushes."""
KEY_POLL_S: Final = 0.25
"""How often a blocked viewer that waits for a key frame is looked after; the log's growth does it sooner."""


class Clocks(NamedTuple):
    """When each of a Sender's clocks has run down, in seconds as of its host; inf: that one does not run.

    Attributes:
        stuck_at: the kernel has taken nothing for too long though there was something to take.
        soft_at: it has been at or above SOFT_LIMIT for too long.
        rises_at: the age of what is queued may reach its next mark.
        looks_at: something else may have changed: the load of a joiner, or a key frame has come.
        held_until: it no longer counts as one that lags because pictures were left out lately.
    """

    closes_at: float = inf
    stuck_at: float = inf
    soft_at: float = inf
    rises_at: float = inf
    looks_at: float = inf
    held_until: float = inf
    samples_at: float = inf

    @property
    def next_at(self) -> float:
        """The earliest time at which something could change by time alone; inf: nothing does."""
        return min(self)

    def overdue(self, now: float, settings: SenderSettings, *, waits: bool) -> tuple[CloseReason, str] | None:
        """Return what has taken too long, as reason and details of the end. None: nothing has."""
        if waits and now >= self.closes_at:
            limit = settings.close_deadline_s
            return CloseReason.STUCK, f"not everything was taken within {limit:g} s after closing began"
        if now >= self.stuck_at:
            limit = settings.stuck_s
            stalled_s = now - self.stuck_at + limit
            return CloseReason.STUCK, f"the kernel took nothing for {stalled_s:.1f} s, the limit is {limit:g} s"
        if now >= self.soft_at:
            limit = settings.soft_too_long_s
            soft_s = now - self.soft_at + limit
            return CloseReason.SOFT_TOO_LONG, f"at or above SOFT_LIMIT for {soft_s:.1f} s, the limit is {limit:g} s"
        return None
