"""How long what was cut short would have gone on: lengths of which some are known to be longer only (pure).

A stall that ended by itself has a length. One that a close cut short, or the end of the records, was longer than what
was seen of it: leaving it out, or taking what was seen for its length, makes stalls too short where limits are tight.
Kaplan and Meier ("Nonparametric Estimation from Incomplete Observations", 1958): of those that had come as far as each
known length, the share that went on is known, and how many go on for longer than any time is the product of these.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence
from typing import NamedTuple


class Length(NamedTuple):
    """One length in seconds."""

    seconds: float
    whole: bool  # it ended by itself; False: it was longer


class Survival:
    """The share that is longer than a length, of lengths some of which were cut short."""

    def __init__(self, lengths: Sequence[Length]) -> None:
        self._ended: list[float] = []  # lengths that ended
        self._longer: list[float] = []  # minus the share that is longer than each
        at_risk, share = len(lengths), 1.0
        for seconds, whole in sorted(lengths, key=lambda length: (length.seconds, not length.whole)):
            if whole:
                share *= 1 - 1 / at_risk
                self._ended.append(seconds)
                self._longer.append(-share)
            at_risk -= 1

    @property
    def longest(self) -> float:
        """The longest that ended; 0: none did."""
        return self._ended[-1] if self._ended else 0.0

    def rest(self, seen: float, chance: float) -> float | None:
        """Return how much longer one lasts of which `seen` seconds are over, for a chance of 0 to 1; None: not known.

        What is longer than all that ended is not known.
        """
        over = bisect.bisect_right(self._ended, seen)
        alive = self._longer[over - 1] if over else -1.0
        end = bisect.bisect_left(self._longer, chance * alive, over)
        return self._ended[end] - seen if end < len(self._ended) else None


def drawn_again(lengths: Sequence[Length], number: int) -> Survival:
    """Return what as many lengths tell that were drawn from these: each draw differs as another crowd would."""
    return Survival(random.Random(number).choices(lengths, k=len(lengths)) if lengths else ())
