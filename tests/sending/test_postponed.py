"""Calls that are put off until a lock is released."""

from __future__ import annotations

import threading

from flowctl.core.loop.locks import OwnedLock
from flowctl.core.sending.postponed import PostponedCalls


def test_calls_when_the_lock_is_held_wait_for_its_outermost_holder():
    lock, calls, owned = OwnedLock(), PostponedCalls(), []
    with lock:
        calls.append(lambda: owned.append(lock.owned()))
        calls.run(lock)
        assert owned == []
    calls.run(lock)
    assert owned == [False]
    assert not calls


def test_calls_when_one_puts_off_another_are_made_one_after_the_other():
    lock, calls, done = OwnedLock(), PostponedCalls(), []

    def first():
        calls.append(lambda: done.append("second"))
        calls.run(lock)
        done.append("first")

    calls.append(first)
    calls.run(lock)
    assert done == ["first", "second"]


def test_calls_when_one_raises_are_made_all_the_same(caplog):
    lock, calls, done = OwnedLock(), PostponedCalls(), []
    calls.extend([lambda: 1 / 0, lambda: done.append("other")])
    calls.run(lock)
    assert done == ["other"]
    assert "a hook of the application failed" in caplog.text


def test_calls_when_another_thread_makes_some_meanwhile_are_still_one_after_the_other():
    lock, calls, done = OwnedLock(), PostponedCalls(), []

    def first():
        other = threading.Thread(target=calls.run, args=(lock,))
        other.start()
        other.join(10)
        calls.append(lambda: done.append("second"))
        calls.run(lock)
        done.append("first")

    calls.append(first)
    calls.run(lock)
    assert done == ["first", "second"]
