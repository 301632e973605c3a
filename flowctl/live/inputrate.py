"""How many messages one connection may send: a rate with a burst, kept as a single moment in time (pure).

Theory of operation. Each message moves the moment up to which the peer has used its allowance by ``1 / rate`` seconds
(the generic cell rate algorithm of ITU-T I.371: the state of a leaky bucket without a bucket). The moment is never
behind now, so silence is saved up for no longer than the burst; where it is more than the burst ahead of now, reading
stops until it is not. What is not read waits in the kernel, so TCP slows the sender down and nothing is lost. Who goes
on all the same, until the whole burst could not be saved up once in `WorkLimits.cut_after_s`, is cut.
"""

from __future__ import annotations

from typing import Final

from flowctl.core.loop.work import Overrun
from flowctl.errors import LimitExceededError

BURST_S: Final = 2.0
"""Size of a burst, in seconds of the rate: encoders that reconnect, and players of files, send what they have."""

LONGEST_PAUSE_S: Final = 1.0
"""Longest pause, in seconds. While input is held the server sees neither the peer's end nor its other limits; rates so
low that one turn is worth more than that are exceeded instead."""

SINGLE_MESSAGES: Final = 4
"""Messages in a read up to which it is not counted: counting costs more than so few messages do, and viewers, who never
send more at a time, are spared the object."""

FULL_BYTES: Final = 120
"""Mean size of the messages of a read, headers included, from which on each counts as one message."""

_MOST_WEIGHT: Final = 10.0
"""Largest weight of a message; one below `FULL_BYTES` weighs more in proportion: encoders send 50 a second at most,
AAC's silence in 14 octets, and a flood leaves megabytes, minutes of work, in the kernels of both ends."""


def weight_of(messages: int, size_bytes: int) -> float:
    if size_bytes >= FULL_BYTES * messages:
        return messages
    return messages * min(_MOST_WEIGHT, max(1.0, FULL_BYTES * messages / max(1, size_bytes)))


class InputRate:
    """The messages of one connection."""

    __slots__ = ("_cut_after_s", "_limit", "_per_second", "_slowed_at", "_used_until")

    def __init__(self, limit: str, per_second: float, cut_after_s: float, now: float) -> None:
        self._limit: Final = limit
        self._per_second: Final = per_second
        self._cut_after_s: Final = cut_after_s
        self._used_until = now
        self._slowed_at: float | None = None  # an episode goes on until the whole burst has been saved up again

    def count(self, messages: float, now: float) -> Overrun | None:
        """Count `messages` (0 or more) read now; return what follows if that is too much. None: nothing does."""
        if self._used_until <= now:
            self._used_until, self._slowed_at = now, None
        self._used_until += messages / self._per_second
        ahead_s = self._used_until - now - BURST_S
        if ahead_s <= 0:
            return None
        if ahead_s > LONGEST_PAUSE_S:
            ahead_s = LONGEST_PAUSE_S
            self._used_until = now + BURST_S + ahead_s
        begins = self._slowed_at is None
        since = self._slowed_at = now if self._slowed_at is None else self._slowed_at
        ends = bool(self._cut_after_s) and now - since >= self._cut_after_s
        message = f"{self._limit}: more than {self._per_second:g} a second after a burst of {BURST_S:g} s"
        if ends:
            message += f", and slowed for {now - since:.1f} s"
        error = LimitExceededError(self._limit, messages, self._per_second, message)
        return Overrun(error, now + ahead_s, begins, ends)
