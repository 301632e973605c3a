"""The lock that knows its owner."""

from __future__ import annotations

import threading

import pytest

from flowctl.core.loop.locks import OwnedLock
from flowctl.errors import InternalError


def test_assert_owned_when_held_by_this_thread_passes():
    lock = OwnedLock()
    assert not lock.owned()
    with lock:
        assert lock.owned()
        lock.assert_owned()
    assert not lock.owned()


def test_assert_owned_when_not_held_raises():
    with pytest.raises(InternalError):
        OwnedLock().assert_owned()


def test_assert_owned_when_held_by_another_thread_raises():
    lock = OwnedLock()
    seen = []
    with lock:
        thread = threading.Thread(target=lambda: seen.append(lock.owned()))
        thread.start()
        thread.join(10)
    assert seen == [False]


def test_with_when_held_by_another_thread_excludes():
    lock = OwnedLock()
    total = [0]

    def add() -> None:
        for _ in range(5000):
            with lock:
                value = total[0]
                total[0] = value + 1

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert total == [15000]


def test_exit_when_the_block_raises_releases():
    lock = OwnedLock()
    with pytest.raises(ValueError, match="x"), lock:
        raise ValueError("x")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(lock.acquire(blocking=False)))
    thread.start()
    thread.join(10)
    assert seen == [True]
