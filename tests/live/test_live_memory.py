"""What a viewer costs in memory: the objects that only its connection reaches, counted, without sockets."""

from __future__ import annotations

import gc
import logging
import sys
import types

import pytest
from live_kit import World, audio, inter, key

from flowctl.core.fanout.cohort import Squad
from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.ledger import LEDGER_ENTRIES
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.state import SendState
from flowctl.core.outgoing.streamlog import Entry, StreamLog
from flowctl.core.sending.settings import SenderSettings
from flowctl.live.config import LiveConfig
from flowctl.live.hub import Hub
from flowctl.live.session import LiveSession
from flowctl.live.stream import Stream
from flowctl.testing.driving import HandGroup, MemoryWire
from flowctl.wire.streams.wirelog import WireLog

LOG = logging.getLogger("memory")
HEALTHY_BYTES = 7_000
"""Most that a viewer may have of its own: 4.8 kB when this was written. With the kernel's page of Python's allocator,
tables of the group and the log it has to stay below 10 kB of resident memory (docs/benchmarks.md)."""
STALLED_BYTES = HEALTHY_BYTES + 4_600
"""Most that a viewer that takes nothing may have of its own, with a full ledger: 11.5 kB, of which 36 bytes say what
joining gave it, so that this is told as no burst of the publisher, 150 what its lag is made of, for the blame, and 72
since when its line takes evenly: that saves a third of its turns."""

SHARED = (
    *(types.ModuleType, type, types.FunctionType, types.CodeType, types.BuiltinFunctionType),
    *(HandGroup, Hub, Stream, StreamLog, WireLog, Fanout, Squad, Entry, LiveConfig, MemoryWire, World),
)
"""What viewers have in common, and what stands for the kernel here: not looked into."""


def reached(root) -> dict[int, object]:
    """Return all that `root` refers to, directly or not, by id."""
    found, left = {id(root): root}, [root]
    while left:
        for item in gc.get_referents(left.pop()):
            if id(item) not in found and not isinstance(item, SHARED):
                found[id(item)] = item
                left.append(item)
    return found


def own(viewer, others) -> list[object]:
    """Return what only `viewer` refers to."""
    shared = {ident for other in others for ident in reached(other.connection)}
    return [item for ident, item in reached(viewer.connection).items() if ident not in shared]


def size_of(items) -> int:
    """Return the bytes of `items`; a table by type goes to the log, where a failure shows it."""
    sizes: dict[str, list[int]] = {}
    for item in items:
        sizes.setdefault(type(item).__qualname__, []).append(sys.getsizeof(item))
    for name, found in sorted(sizes.items(), key=lambda pair: -sum(pair[1])):
        LOG.info("%6d bytes in %3d of %s", sum(found), len(found), name)
    return sum(map(sum, sizes.values()))


def frames(publisher, count, *, since=0) -> None:
    """Publish frames of 2.5 Mbit/s, one group of pictures per second."""
    for number in range(since, since + count):
        publisher.video(number * 40, (inter if number % 25 else key)(b"%d" % number, 12_000))
        publisher.audio(number * 40, audio(b"%d" % number))


@pytest.fixture
def world():
    # Nobody is cut for being stuck: what a viewer costs that is not there any more would say nothing.
    settings = SenderSettings(stuck_s=0, soft_too_long_s=0)
    world = World(limits=Limits.parse("2MiB,2048,4s", "40MiB,40960,80s"), sender=settings)
    yield world
    assert world.group.failures == []


def test_memory_when_a_viewer_keeps_up_is_small(world):
    publisher = world.publisher()
    frames(publisher, 30)
    viewers = [world.player() for _ in range(3)]
    frames(publisher, 30, since=30)
    before = size_of(own(viewers[0], viewers[1:]))
    assert HEALTHY_BYTES / 2 < before < HEALTHY_BYTES, "with nothing of its own it would be measured wrongly"
    frames(publisher, 200, since=60)
    assert size_of(own(viewers[0], viewers[1:])) < before + 300  # numbers that have become longer


def test_memory_when_a_viewer_is_stalled_does_not_grow_with_its_queue(world):
    """Who takes nothing costs no more the longer that lasts: what waits for it is the log's."""
    publisher = world.publisher()
    frames(publisher, 30)
    healthy, *stalled = [world.player() for _ in range(4)]
    for viewer in stalled:
        viewer.reads = False
        viewer.wire.room = 0
    frames(publisher, 50, since=30)
    assert {viewer.state for viewer in stalled} == {SendState.OVERLOADED}
    sender = stalled[0].connection.sender
    for round_number in range(6):
        frames(publisher, 60, since=80 + 60 * round_number)
        size = size_of(own(stalled[0], [healthy, *stalled[1:]]))
        assert HEALTHY_BYTES / 2 < size < STALLED_BYTES
    assert len(sender.ledger()) == LEDGER_ENTRIES, "its ledger is full, or this shows nothing"
    assert sender.statistics().close_reason is None


def test_memory_when_a_viewer_recovers_is_small_again(world):
    publisher = world.publisher()
    frames(publisher, 30)
    viewers = [world.player() for _ in range(3)]
    for viewer in viewers:
        viewer.wire.room = 0
    frames(publisher, 30, since=30)
    for viewer in viewers:
        viewer.wire.room = None
    world.run(1.0)
    frames(publisher, 30, since=60)
    world.run(8.0)  # pictures were left out: it lags for two groups more
    assert {viewer.state for viewer in viewers} == {SendState.READY}
    assert size_of(own(viewers[0], viewers[1:])) < HEALTHY_BYTES + 3_000


def test_memory_when_many_have_come_and_gone_keeps_nothing_of_them(world):
    publisher = world.publisher()
    frames(publisher, 30)
    for _ in range(5):
        leaver = world.player()
        leaver.leave()
        world.peers.remove(leaver)
        world.gone.clear()
    del leaver
    gc.collect()
    left = [item for item in gc.get_objects() if isinstance(item, LiveSession) and item._hub is world.hub]
    assert left == [publisher.live]
