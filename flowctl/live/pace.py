"""Gathering figures of thousands of viewers without holding up their streams.

Each time that a poll group comes back from a system call, it has to wait for a thread that computes: until that rests,
or for the whole switch interval of the interpreter, 5 ms. A round of a thousand viewers makes a thousand system calls.
So a thread that gathers figures rests after a fraction of a millisecond.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

_WORK_S: Final = 0.0003
"""How long figures are gathered at a time: a few viewers."""
_REST_S: Final = 0.001
"""Long enough for a group to make some tens of system calls."""

_T = TypeVar("_T")


class Pace:
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


def _on_a_loop() -> bool:
    """Return whether a loop runs on this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
