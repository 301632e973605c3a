"""Pools: order, bounds, what was evicted, and files that survive."""

from __future__ import annotations

import asyncio

import pytest

from flowctl.diffusion.pool.memory import MemoryPool
from flowctl.errors import ConfigError


def name(data):
    """Let objects be their own ids in front of a slash."""
    found, slash, _ = data.partition(b"/")
    if not slash:
        raise ValueError("no slash")
    return found


def objects(*names, size=10):
    return {item: item + b"/" + bytes(size - len(item) - 1) for item in names}


def ids_after(pool, ticket, limit=100):
    return [entry.object_id for entry in pool.objects_after(ticket, limit)]


def test_pool_when_read_by_ticket_gives_objects_in_the_order_they_came():
    """Tickets rise; a reader goes on where it was, sees each object once, and nothing when there is nothing new."""
    pool = MemoryPool(identify=name)
    pool.add(objects(b"c", b"a"))
    pool.add(objects(b"b", b"a"))
    assert ids_after(pool, 0) == [b"c", b"a", b"b"]
    first, second = pool.objects_after(0, 2)
    assert first.ticket < second.ticket
    assert ids_after(pool, second.ticket) == [b"b"]
    assert ids_after(pool, pool.objects_after(0, 9)[-1].ticket) == []


def test_pool_when_full_evicts_the_oldest_and_remembers_it():
    """Bounds hold by bytes and by number; what was evicted need not be fetched again, but is not here."""
    pool = MemoryPool(identify=name, max_bytes=30, max_objects=10)
    pool.add(objects(b"a", b"b", b"c", b"d"))
    assert ids_after(pool, 0) == [b"b", b"c", b"d"]
    assert (len(pool), pool.size_bytes) == (3, 30)
    assert pool.has_object(b"a")
    assert pool.get(b"a") is None
    by_number = MemoryPool(identify=name, max_objects=2)
    by_number.add(objects(b"a", b"b", b"c", b"d", b"e"))
    assert ids_after(by_number, 0) == [b"d", b"e"]
    assert [by_number.has_object(item) for item in (b"a", b"b", b"c")] == [False, True, True]


def test_pool_when_an_object_is_larger_than_all_of_it_passes_it_by():
    """An object that no eviction makes room for is not kept, costs no other its place, and is not wanted again."""
    pool = MemoryPool(identify=name, max_bytes=30)
    pool.add(objects(b"a"))
    assert pool.add(objects(b"big", size=31)) == {}
    assert ids_after(pool, 0) == [b"a"]
    assert pool.has_object(b"big")


def test_entry_when_held_can_be_read_after_its_eviction():
    """Who has announced an object can send it, also when the pool has evicted it meanwhile."""
    pool = MemoryPool(identify=name, max_bytes=10)
    pool.add(objects(b"a"))
    (entry,) = pool.objects_after(0, 1)
    pool.add(objects(b"b"))
    assert objects(b"a")[b"a"] == entry.read()


def test_pool_when_an_object_is_invalid_says_why_and_takes_the_others():
    """What `validate` finds wrong is told by id, and is not in the pool."""
    pool = MemoryPool(identify=name, validate=lambda object_id, _: "bad signature" if object_id == b"b" else None)
    assert asyncio.run(pool.add_objects(objects(b"a", b"b", b"c"))) == {b"b": "bad signature"}
    assert ids_after(pool, 0) == [b"a", b"c"]
    assert not pool.has_object(b"b")


def test_watchers_when_objects_came_are_told_once_until_they_leave():
    """One call for each addition of something new; none for what was here already, and none after leaving."""
    pool, told = MemoryPool(identify=name), []
    unwatch = pool.watch(lambda: told.append(1))
    pool.add(objects(b"a", b"b"))
    pool.add(objects(b"a"))
    assert told == [1]
    unwatch()
    unwatch()
    pool.add(objects(b"c"))
    assert told == [1]


@pytest.mark.parametrize("bounds", [{"max_bytes": 0}, {"max_objects": 0}])
def test_pool_when_a_bound_is_below_one_is_not_made(bounds):
    """A pool that can hold nothing is a mistake in the configuration."""
    with pytest.raises(ConfigError):
        MemoryPool(**bounds)
