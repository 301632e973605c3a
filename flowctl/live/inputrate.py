"""How many messages one connection may send: a rate with a burst, kept as a single moment in time (pure).

Theory of operation. Each message moves the moment up to which the peer has used its allowance by ``1 / rate`` seconds
(the generic cell rate algorithm of ITU-T I.371: the state of a leaky bucket without a bucket). The moment is never
behind now, so silence is saved up for no longer than the burst; where it is more than the burst ahead of now, reading
stops until it is not. What is not read waits in the kernel, so TCP slows the sender down and nothing is lost.
"""

from __future__ import annotations

from typing import Final

BURST_S: Final = 2.0
"""How much of the rate may come at once: encoders that reconnect, and players of files, send what they have."""

LONGEST_PAUSE_S: Final = 1.0
"""Longest pause, in seconds. While input is held nobody sees the peer's end, nor looks at its other limits; rates so
low that one turn is worth more than that are exceeded instead."""

SINGLE_MESSAGES: Final = 4
"""Reads with no more than this need no count: they cost more than their messages do, and viewers, who never send more
at a time, are spared the object."""


class InputRate:
    """The messages of one connection.

    Args:
        per_second: rate allowed, more than 0.
        now: seconds.

    Attributes:
        resumes_at: when reading goes on, in seconds. None: it is not held.
    """

    __slots__ = ("_per_second", "_slowed", "_used_until", "resumes_at")

    def __init__(self, per_second: float, now: float) -> None:
        self._per_second: Final = per_second
        self._used_until = now
        self._slowed = False  # an episode goes on until the whole burst has been saved up again
        self.resumes_at: float | None = None

    def count(self, messages: int, now: float) -> bool:
        """Count `messages` (0 or more) read now; return whether an episode of slowing down begins with them.

        Sets `resumes_at` where reading is to stop.
        """
        if self._used_until <= now:
            self._used_until = now
            self._slowed = False
        self._used_until += messages / self._per_second
        ahead_s = self._used_until - now - BURST_S
        if ahead_s <= 0:
            return False
        if ahead_s > LONGEST_PAUSE_S:
            ahead_s = LONGEST_PAUSE_S
            self._used_until = now + BURST_S + ahead_s
        self.resumes_at = now + ahead_s
        begins = not self._slowed
        self._slowed = True
        return begins

    def resume(self, now: float) -> bool:
        """Return whether reading goes on, and clear `resumes_at` then; False also where it was not held."""
        if self.resumes_at is None or now < self.resumes_at:
            return False
        self.resumes_at = None
        return True
