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
