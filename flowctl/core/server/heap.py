"""The heap of the C library (glibc), which keeps what was freed between what is in use, however much that is.

A crowd that came and went leaves hundreds of MiB in it: each thread has a heap of its own, of which only the end is
given back by itself. Where the library is another one, nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

TRIM_S: Final = 30.0
"""Time between two trims of a server's heap: it takes a millisecond, or 10 where 100 MiB are to be given back."""
_M_ARENA_MAX: Final = -8
_HEAPS: Final = 4
"""Heaps of the C library: it makes one for each thread, up to eight per core, and each keeps what it had once."""


def trim_heap() -> None:
    """Give the system what the heap has free. Any thread; one that allocates meanwhile may have to wait."""
    with contextlib.suppress(AttributeError):  # there is no such function but in glibc
        ctypes.CDLL(None).malloc_trim(0)


def use_few_heaps() -> None:
    """Have all threads share few heaps; for a process that begins, and has many."""
    with contextlib.suppress(AttributeError):  # as above
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _HEAPS)
