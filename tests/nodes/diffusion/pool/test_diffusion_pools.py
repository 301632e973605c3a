"""Pools: order, bounds, what was evicted, and files that survive."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
import tempfile

import pytest

from flowctl.errors import ConfigError, StoreError
from flowctl.nodes.diffusion.diffusion import ObjectDiffusion
from flowctl.nodes.diffusion.pool import files as files_module
from flowctl.nodes.diffusion.pool.files import FilePool
from flowctl.nodes.diffusion.pool.memory import MemoryPool
from flowctl.nodes.diffusion.pool.pool import sha256_of
from flowctl.nodes.diffusion.streams.memory import memory_pair


def name(data):
    found, slash, _ = data.partition(b"/")
    if not slash:
        raise ValueError("no slash")
    return found


def objects(*names, size=10):
    return {item: item + b"/" + bytes(size - len(item) - 1) for item in names}


def ids_after(pool, ticket, limit=100):
    return [entry.object_id for entry in pool.objects_after(ticket, limit)]


def test_pool_when_read_by_ticket_gives_objects_in_the_order_they_came():
    pool = MemoryPool(identify=name)
    pool.add(objects(b"c", b"a"))
    pool.add(objects(b"b", b"a"))
    assert ids_after(pool, 0) == [b"c", b"a", b"b"]
    first, second = pool.objects_after(0, 2)
    assert first.ticket < second.ticket
    assert ids_after(pool, second.ticket) == [b"b"]
    assert ids_after(pool, pool.objects_after(0, 9)[-1].ticket) == []


def test_pool_when_full_evicts_the_oldest_and_remembers_it():
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
    pool = MemoryPool(identify=name, max_bytes=30)
    pool.add(objects(b"a"))
    assert pool.add(objects(b"big", size=31)) == {}
    assert ids_after(pool, 0) == [b"a"]
    assert pool.has_object(b"big")


def test_entry_when_held_can_be_read_after_its_eviction():
    pool = MemoryPool(identify=name, max_bytes=10)
    pool.add(objects(b"a"))
    (entry,) = pool.objects_after(0, 1)
    pool.add(objects(b"b"))
    assert objects(b"a")[b"a"] == entry.read()


def test_pool_when_an_object_is_invalid_says_why_and_takes_the_others():
    pool = MemoryPool(identify=name, validate=lambda object_id, _: "bad signature" if object_id == b"b" else None)
    assert asyncio.run(pool.add_objects(objects(b"a", b"b", b"c"))) == {b"b": "bad signature"}
    assert ids_after(pool, 0) == [b"a", b"c"]
    assert not pool.has_object(b"b")


@pytest.mark.parametrize(
    ("object_id", "data", "words"),
    [(b"x", b"data", "has not the id"), (b"x", "text", "is a str"), (b"x", bytearray(b"data"), "is a bytearray")],
)
def test_pool_when_given_what_peers_would_not_take_says_so(object_id, data, words, tmp_path):
    """A node that announced it would be disconnected by all of its peers."""
    pool = MemoryPool()
    with pytest.raises(ConfigError, match=words):
        pool.add({pool.object_id(b"good"): b"good", object_id: data})
    assert not len(pool)
    with FilePool(tmp_path) as files:
        with pytest.raises(ConfigError, match=words):
            asyncio.run(files.add({files.object_id(b"good"): b"good", object_id: data}))
        assert not len(files)
        assert asyncio.run(files.add({files.object_id(b"good"): b"good"})) == {}
        assert ids_after(files, 0) == [files.object_id(b"good")]


def test_watchers_when_objects_came_are_told_once_until_they_leave():
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
    with pytest.raises(ConfigError):
        MemoryPool(**bounds)


# -- in files


def file_pool(folder, **arguments):
    return FilePool(folder, **({"identify": name} | arguments))


def add(pool, *names, size=10):
    return asyncio.run(pool.add_objects(objects(*names, size=size)))


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def test_files_when_the_process_begins_anew_are_the_pool_it_had(tmp_path):
    with file_pool(tmp_path) as pool:
        add(pool, b"c", b"a", b"b")
        last = pool.objects_after(0, 9)[-1].ticket
    (tmp_path / "00000000000000ff.part").write_bytes(b"half")
    (tmp_path / "00000000000000aa.object").write_bytes(b"FDO1 cut")
    (tmp_path / "none.object").write_bytes(b"")
    damaged = tmp_path / f"{2:016x}.object"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with file_pool(tmp_path) as pool:
        assert ids_after(pool, 0) == [b"c", b"b"]
        assert asyncio.run(pool.get(b"b")) == objects(b"b")[b"b"]
        assert asyncio.run(pool.get(b"a")) is None
        assert not pool.has_object(b"a")
        add(pool, b"a")
        assert ids_after(pool, last) == [b"a"]
        assert len(files(tmp_path)) == 3


def test_files_when_bounded_go_with_the_oldest_objects(tmp_path):
    with file_pool(tmp_path, max_bytes=30) as pool:
        assert add(pool, b"a", b"b", b"c", b"d") == {}
        assert add(pool, b"big", size=31) == {}
        assert ids_after(pool, 0) == [b"b", b"c", b"d"]
        assert len(files(tmp_path)) == 3
        assert pool.has_object(b"a")
        assert pool.has_object(b"big")
    with file_pool(tmp_path, max_objects=1) as pool:
        assert (ids_after(pool, 0), pool.size_bytes) == ([b"d"], 10)
        assert len(files(tmp_path)) == 1


def test_file_when_its_entry_is_held_stays_until_it_is_let_go(tmp_path):
    with file_pool(tmp_path, max_objects=1) as pool:
        add(pool, b"a")
        held = pool.objects_after(0, 9)
        add(pool, b"b")
        assert len(files(tmp_path)) == 2
        assert asyncio.run(pool.read_objects(held)) == [objects(b"a")[b"a"]]
        held.clear()
        assert files(tmp_path) == [f"{2:016x}.object"]


def test_file_when_damaged_or_gone_is_told_by_reading(tmp_path):
    with file_pool(tmp_path) as pool:
        add(pool, b"a", b"b")
        first, second = pool.objects_after(0, 9)
        first.path.write_bytes(first.path.read_bytes().replace(b"a/", b"x/"))
        second.path.unlink()
        for entry, code in ((first, "damaged"), (second, "path")):
            with pytest.raises(StoreError) as caught:
                asyncio.run(pool.read_objects([entry]))
            assert caught.value.code == code


def test_folder_when_another_uses_it_is_refused(tmp_path):
    with file_pool(tmp_path):
        with pytest.raises(StoreError) as caught:
            file_pool(tmp_path)
        assert caught.value.code == "busy"
    file_pool(tmp_path).close()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError):
        file_pool(tmp_path / "file")


def test_disk_when_full_makes_the_oldest_objects_go_and_is_no_fault_of_a_peer(tmp_path, monkeypatch):
    room, write = 25, files_module._write

    def full(path, object_id, data):
        used = sum(pool._shelf.get(item).size_bytes for item in ids_after(pool, 0))
        if used + len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, object_id, data)

    monkeypatch.setattr(files_module, "_write", full)
    with file_pool(tmp_path) as pool:
        assert add(pool, b"a", b"b", b"c") == {}
        assert ids_after(pool, 0) == [b"b", b"c"]
        assert add(pool, b"big", size=26) == {}
        assert (ids_after(pool, 0), pool.lost_count) == ([], 1)
        assert pool.has_object(b"big")
        add(pool, b"d")
        assert ids_after(pool, 0) == [b"d"]
        assert len(files(tmp_path)) == 1

        def broken(path, object_id, data):
            raise OSError(errno.EIO, "I/O error")

        monkeypatch.setattr(files_module, "_write", broken)
        with pytest.raises(StoreError, match="I/O error"):
            add(pool, b"e")


KILLED = """
import asyncio, os, sys
from flowctl.nodes.diffusion.pool import files
write, count = files._write, 0
def dies(path, object_id, data):
    global count
    count += 1
    if count == 5:
        path.with_suffix(".part").write_bytes(data[:3])
        os.kill(os.getpid(), 9)
    write(path, object_id, data)
files._write = dies
pool = files.FilePool(sys.argv[1])
asyncio.run(pool.add_objects({files.sha256_of(data): data for number in range(9) for data in [b"%d" % number]}))
"""


def test_files_when_the_process_is_killed_while_it_writes_are_whole_objects(tmp_path):
    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False, timeout=20)
    assert ended.returncode == -9
    with FilePool(tmp_path) as pool:
        entries = pool.objects_after(0, 99)
        assert [entry.read() for entry in entries] == [b"0", b"1", b"2", b"3"]
        assert len(files(tmp_path)) == 4


def test_files_when_fetched_from_another_node_are_served_on():
    made = {sha256_of(data): data for number in range(30) for data in [b"%d" % number * 1000]}

    async def run(folder):
        origin, end = MemoryPool(), MemoryPool()
        origin.add(made)
        with FilePool(folder) as middle:
            async with ObjectDiffusion(origin) as one, ObjectDiffusion(middle) as two, ObjectDiffusion(end) as three:
                tasks = []
                for server, client in ((one, two), (two, three)):
                    ours, theirs = memory_pair()
                    tasks += [
                        asyncio.ensure_future(server.serve(ours)),
                        asyncio.ensure_future(client.fetch_from(theirs, "peer")),
                    ]
                grown = asyncio.Event()
                end.watch(grown.set)
                while len(end) < len(made):
                    grown.clear()
                    await asyncio.wait_for(grown.wait(), 20)
            await asyncio.gather(*tasks)
        assert all(end.get(object_id) == data for object_id, data in made.items())

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(folder))


def test_folder_when_a_link_takes_its_place_is_not_followed(tmp_path):
    folder, elsewhere = tmp_path / "pool", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with file_pool(folder) as pool:
        add(pool, b"a")
        folder.rename(tmp_path / "moved")
        folder.symlink_to(elsewhere)
        with pytest.raises(StoreError, match="is a link"):
            add(pool, b"b")
    assert files(elsewhere) == []
