"""A store: turns of a loop on the disk, and who is told of it when, with a loop that is run by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import pytest

from flowctl.errors import ClosedError, ConfigError, LocalProtocolError, StoreError
from flowctl.nodes.messenger.store import MIN_STORE_BYTES, MessageStore

WAIT_S = 20.0


class Turns:
    """Stands in for the loop: what is posted is run by `until`, on the thread of the test."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Callable[..., object], tuple]] = SimpleQueue()

    def post(self, callback: Callable[..., object], *args: object) -> None:
        self.queue.put((callback, args))

    def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            callback, args = self.queue.get(timeout=WAIT_S)
            callback(*args)


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def test_changes_when_of_one_turn_are_one_commit(turns, path):
    store = MessageStore(path, turns.post)
    told: list[tuple[int, int]] = []
    for number in range(100):
        store.add(number, b"a", number, b"x", lambda _, number=number: told.append((number, threading.get_ident())))
    assert (store.waiting_count, told) == (100, [])
    turns.until(lambda: len(told) == 100)
    assert [(number, threading.get_ident()) for number in range(100)] == told
    assert (store.commit_count, store.waiting_count) == (1, 0)
    assert store.close()


def test_changes_when_the_disk_is_slow_share_the_next_commit(turns, path):
    store = MessageStore(path, turns.post)
    goes_on, told = threading.Event(), []
    store.mark(b"a", 1, 0, told.append, lambda _: goes_on.wait(WAIT_S))
    callback, args = turns.queue.get(timeout=WAIT_S)
    callback(*args)
    for number in range(1, 51):
        store.mark(b"a", 1, number, told.append)
    assert told == []
    goes_on.set()
    turns.until(lambda: len(told) == 51)
    assert (store.commit_count, told) == (2, [None] * 51)
    store.close()
    again = MessageStore(path, turns.post)
    assert again.seen() == [(b"a", 1, 0, 50)]
    again.close()


def test_store_when_closed_has_written_what_waited_and_takes_no_more(turns, path):
    store = MessageStore(path, turns.post)
    told: list[Exception | None] = []
    store.add(0, b"a", 0, b"x", told.append)
    assert store.close()
    assert store.close()
    while not turns.queue.empty():
        callback, args = turns.queue.get()
        callback(*args)
    assert told == []
    with pytest.raises(ClosedError):
        store.add(1, b"a", 1, b"x", told.append)
    again = MessageStore(path, turns.post)
    assert [item.message_id for item in again.pending()] == [0]
    assert again.close()


def test_callbacks_when_one_raises_reach_the_others(turns, path):
    store = MessageStore(path, turns.post)
    told: list[Exception | None] = []

    def raises(_: Exception | None) -> None:
        raise ValueError("mine")

    store.mark(b"a", 1, 0, raises)
    store.mark(b"a", 1, 1, told.append)
    with pytest.raises(ValueError, match="mine"):
        turns.until(lambda: bool(told))
    turns.until(lambda: bool(told))
    assert told == [None]
    store.close()


def test_removals_when_they_could_not_be_written_are_tried_with_the_next_change(turns, path):
    store = MessageStore(path, turns.post)
    told: list[Exception | None] = []
    store.add(0, b"a", 0, b"x", told.append)
    turns.until(lambda: len(told) == 1)

    def ends(transaction) -> None:
        transaction.execute("SELECT 1").connection.rollback()

    store.remove(0)
    store.mark(b"a", 1, 0, told.append, ends)
    turns.until(lambda: len(told) == 2)
    assert isinstance(told[1], StoreError)
    assert store.waiting_count == 1
    store.mark(b"a", 1, 0, told.append)
    turns.until(lambda: len(told) == 3)
    assert store.close()
    again = MessageStore(path, turns.post)
    assert list(again.pending()) == []
    again.close()


@pytest.mark.parametrize("number", [-1, 2**63, 2**64 - 1])
def test_numbers_when_sqlite_cannot_keep_them_are_refused_at_once(turns, path, number):
    store = MessageStore(path, turns.post)
    for ask in (
        lambda: store.mark(b"a", number, 0, lambda _: None),
        lambda: store.mark(b"a", 0, number, lambda _: None),
        lambda: store.add(number, b"a", 0, b"", lambda _: None),
        lambda: store.forget(b"a", number),
    ):
        with pytest.raises(LocalProtocolError):
            ask()
    assert store.waiting_count == 0
    store.close()


def test_size_when_too_small_for_any_use_is_refused(turns, path):
    with pytest.raises(ConfigError, match=f"max_store_bytes.*{MIN_STORE_BYTES}"):
        MessageStore(path, turns.post, max_bytes=1000)
    assert not path.exists()
