"""Connections of all workers, in total and by address, in memory that they share (pure, but for the memory).

Each worker has a region that it alone writes and all read: a total, and a count-min sketch of its connections by
address (Cormode and Muthukrishnan 2005), whose cells are chosen by a hash with a secret key, so that nobody can choose
addresses that meet another's. A sketch never says too little. With as many addresses as it has columns it says one too
many for one address in six, with a third of them for one in two hundred. What the others have is the sum of what their
regions say.

A connection is counted first and looked at then, so that of two workers that admit at the same moment at least one sees
the other: a limit is never exceeded. The supervisor clears the region of a worker that has ended.
"""

from __future__ import annotations

import hashlib
import mmap
from typing import Final

_ROWS: Final = 4
_COLUMNS: Final = 1 << 16
"""Cells of each row: a worker's region takes a megabyte if all of it is used, and unused pages take none."""
_CELL: Final = 4
_HEAD_BYTES: Final = 16
"""Octets before the cells, of which the first one is the total."""
REGION_BYTES: Final = (_HEAD_BYTES + _ROWS * _COLUMNS * _CELL + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
"""Octets of one worker's region, whole pages."""


class WorkerCounts:
    """The connection counts of all workers, as one worker sees them; the caller has a lock.

    Args:
        memory: the regions of all, one after the other.
        own: index of the own region.
        count: of workers.
        key: secret of the hash, the same in all; 16 octets or more.
    """

    def __init__(self, memory: memoryview, own: int, count: int, key: bytes) -> None:
        self._key: Final = key
        self.processes: Final = count
        regions = [memory[at * REGION_BYTES : (at + 1) * REGION_BYTES].cast("I") for at in range(count)]
        self._own: Final = regions.pop(own)
        self._others: Final = regions

    def enter(self, address: str) -> tuple[int, int]:
        """Count a connection here; return how many the others have, in total and of this address at most."""
        cells = self._cells(address)
        own = self._own
        own[0] += 1
        for cell in cells:
            own[cell] += 1
        total = of_address = 0
        for region in self._others:
            if region[0]:
                total += region[0]
                of_address += min(region[cell] for cell in cells)
        return total, of_address

    def leave(self, address: str) -> None:
        own = self._own
        own[0] -= 1
        for cell in self._cells(address):
            own[cell] -= 1

    def _cells(self, address: str) -> tuple[int, ...]:
        digest = hashlib.blake2b(address.encode(), key=self._key, digest_size=2 * _ROWS).digest()
        first = _HEAD_BYTES // _CELL
        return tuple(
            first + row * _COLUMNS + int.from_bytes(digest[2 * row : 2 * row + 2], "little") for row in range(_ROWS)
        )


def clear(memory: memoryview, index: int) -> None:
    memory[index * REGION_BYTES : (index + 1) * REGION_BYTES] = bytes(REGION_BYTES)
