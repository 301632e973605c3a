"""What a heap has free between what is in use is given back."""

from __future__ import annotations

import ctypes
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from flowctl.core.server import heap

BLOCK_BYTES, BLOCKS = 64 << 10, 1600


def resident_bytes():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is none that keeps it")
def test_heap_when_much_was_freed_between_what_is_in_use_is_given_back():
    """On a thread, as a crowd of a server: 100 MiB in blocks, each with a few octets behind it that stay."""
    lib = ctypes.CDLL(None)
    lib.malloc.restype, lib.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    found = []

    def crowd():
        before = resident_bytes()
        blocks, rest = zip(*((lib.malloc(BLOCK_BYTES), lib.malloc(64)) for _ in range(BLOCKS)), strict=True)
        for block in blocks:
            ctypes.memset(block, 1, BLOCK_BYTES)
        for block in blocks:
            lib.free(block)
        kept = resident_bytes() - before
        heap.trim_heap()
        found.extend((kept, resident_bytes() - before))
        for block in rest:
            lib.free(block)

    thread = Thread(target=crowd)
    thread.start()
    thread.join()
    kept, left = found
    assert kept > BLOCKS * BLOCK_BYTES * 0.8
    assert left < BLOCKS * BLOCK_BYTES * 0.3


@pytest.mark.parametrize("knows", [True, False])
def test_heap_when_the_c_library_knows_no_such_functions_is_left_as_it_is(monkeypatch, knows):
    calls = []
    library = SimpleNamespace(malloc_trim=calls.append, mallopt=lambda *values: calls.append(values))
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: library if knows else SimpleNamespace())
    heap.trim_heap()
    heap.use_few_heaps()
    assert calls == ([0, (heap._M_ARENA_MAX, heap._HEAPS)] if knows else [])
