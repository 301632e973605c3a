"""Gathering figures of thousands of viewers without holding up their streams.

Each time that a poll group comes back from a system call, it has to wait for a thread that computes: until that rests,
or for the whole switch interval of the interpreter, 5 ms. A round of a thousand viewers makes a thousand system calls.
So a thread that gathers figures rests after a fraction of a millisecond.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

_WORK_S: Final = 0.0003
"""Time of gathering figures between two rests: a few viewers."""
_REST_S: Final = 0.001
"""Length of a rest: a group makes some tens of system calls in it."""

_MOST_REST_S: Final = 30.0
"""Longest rest of a thread that keeps within its share, whatever it has used."""

_T = TypeVar("_T")


class RestingPace:
    """Goes over viewers with rests in between; without rests on the thread of a loop, where others wait for the end."""

    def __init__(self) -> None:
        self._rests = not _on_a_loop()
        self._since = time.perf_counter()

    def over(self, items: Iterable[_T]) -> Iterator[_T]:
        """Iterate over `items`; the rests come after an item has been dealt with."""
        for item in items:
            yield item
            if self._rests and time.perf_counter() - self._since >= _WORK_S:
                time.sleep(_REST_S)
                self._since = time.perf_counter()


@dataclass(kw_only=True, slots=True)
class CpuShare:
    """Keeps what threads of observers use within a share of what the whole process uses (pure)."""

    share: float  # share of the processor time of the process, 0 to 1
    least: float  # share of a core that is allowed in any case
    credit_s: float  # for how long what was not used is saved up
    debt_s: float = 0.0  # processor time that was used beyond what was allowed, in seconds; below 0: saved up

    def rest_s(self, used_s: float, process_s: float, wall_s: float) -> float:
        """Enter the time used since the last call; return the seconds to rest before the share allows more."""
        allowed_s = max(self.share * process_s, self.least * wall_s)
        per_s = allowed_s / wall_s if wall_s > 0 else self.least
        self.debt_s = max(self.debt_s + used_s - allowed_s, -self.credit_s * per_s)
        return min(max(self.debt_s / per_s, 0.0), _MOST_REST_S)


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
