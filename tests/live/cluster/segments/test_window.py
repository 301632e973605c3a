"""What a node keeps of its streams, what it offers, and what counts as here already."""

from __future__ import annotations

import asyncio

import pytest
from segment_kit import cut, movie

from flowctl.errors import ConfigError
from flowctl.live.cluster.segments.segment import object_of
from flowctl.live.cluster.segments.window import SegmentPool, WindowLimits
from flowctl.testing import ManualClock


def pool(
    clock: ManualClock | None = None, wants=lambda name: True, known_as=None, on_segment=None, **limits
) -> SegmentPool:
    return SegmentPool(
        WindowLimits(**limits), clock or ManualClock(), wants=wants, known_as=known_as, on_segment=on_segment
    )


def add(target: SegmentPool, *found) -> dict[bytes, str]:
    return dict(asyncio.run(target.add_objects({item.id.encode(): item.data for item in found})))


def test_segments_when_added_are_offered_in_their_order():
    target, found = pool(), cut(movie(4))
    told = []
    unwatch = target.watch(lambda: told.append(len(target)))
    assert not target.has_object(found[0].id.encode())
    assert add(target, *found[:3]) == {}
    assert target.has_object(found[0].id.encode())
    assert [item.read() for item in target.objects_after(0, 2)] == [item.data for item in found[:2]]
    assert [item.object_id for item in target.objects_after(2, 9)] == [found[2].id.encode()]
    unwatch()
    add(target, found[3])
    assert told == [1, 2, 3]


def test_segment_when_it_lies_is_rejected_and_not_had():
    target, (first, second) = pool(), cut(movie(2))
    lie = {first.id.encode(): object_of(first.id, b"x" * first.id.size_bytes), second.id.encode(): second.data}
    rejected = asyncio.run(target.add_objects(lie))
    assert list(rejected) == [first.id.encode()]
    assert "not the one it names" in rejected[first.id.encode()]
    assert not target.has_object(first.id.encode())
    assert len(target) == 1


def test_segment_when_true_is_handed_on_once():
    heard = []
    target, (first, _) = pool(on_segment=heard.append), cut(movie(2))
    add(target, first)
    add(target, first)
    assert [item.id for item in heard] == [first.id]


def test_segment_when_nobody_wants_it_counts_as_here_until_somebody_does():
    """So it is acknowledged and never fetched."""
    wanted: list[str] = []
    target, (first, _) = pool(wants=lambda name: name.stream in wanted), cut(movie(2))
    assert target.has_object(first.id.encode())
    wanted.append("live/cam")
    assert not target.has_object(first.id.encode())


def test_id_when_it_is_none_counts_as_here():
    target = pool()
    assert target.has_object(b"nonsense")
    assert target.name_of(b"nonsense") is None


def test_segment_when_it_has_two_names_is_kept_and_offered_by_one():
    """Of origins whose clocks differ: those behind this node see one publication."""
    first, second = cut(movie(1))[0], cut(movie(1), timeline=360)[0]
    target = pool(known_as=lambda name: first.id)
    add(target, second)
    assert [(item.id, item.data) for item in target.streams.get("live/cam", ())] == [(first.id, first.data)]
    assert target.has_object(second.id.encode())
    add(target, first)
    assert len(target) == 1


def test_object_when_it_is_none_has_no_id():
    with pytest.raises(ValueError, match="no id"):
        pool().object_id(b"")


def test_window_when_over_its_octets_lets_the_oldest_go():
    found, others = cut(movie(4)), cut(movie(4), stream="live/other")
    size = len(found[0].data)
    target = pool(stream_bytes=size * 2 + size // 2, total_bytes=size * 4)
    add(target, *found)
    assert [item.id.position.start_ms for item in target.streams.get("live/cam", ())] == [2000, 3000]
    add(target, *others[:2])
    assert len(target) <= 4
    assert target.size_bytes <= size * 4
    assert target.has_object(found[0].id.encode())
    assert sum(map(len, target.streams.values())) == len(target)


def test_window_when_time_passes_lets_what_is_old_go():
    clock = ManualClock()
    target, found = pool(clock, stream_s=10.0), cut(movie(3))
    add(target, found[0])
    clock.advance(6.0)
    add(target, found[1])
    clock.advance(5.0)
    target.expire()
    assert [item.id for item in target.streams.get("live/cam", ())] == [found[1].id]
    clock.advance(9.0)
    target.expire()
    assert (target.streams, target.size_bytes, len(target)) == ({}, 0, 0)
    assert target.has_object(found[0].id.encode())


@pytest.mark.parametrize("name", ["stream_s", "stream_bytes", "total_bytes"])
def test_limits_when_not_positive_are_refused(name):
    with pytest.raises(ConfigError, match=name):
        WindowLimits(**{name: 0})


def test_segments_when_there_are_many_streams_go_oldest_first_and_none_else_is_looked_at():
    """What it costs to keep one does not grow with the number of streams, and time takes those of all streams."""
    clock = ManualClock()
    target, looked = pool(clock, stream_s=10.0), []
    for stream in range(50):
        for item in cut(movie(1), stream=f"live/{stream}"):
            target.put(item.id, item.data)
        clock.advance(0.1)
    target._evict = lambda stream, evict=target._evict: (looked.append(stream), evict(stream))
    clock.advance(6.05)
    target.expire()
    assert looked == [f"live/{stream}" for stream in range(11)]
    assert list(target.streams) == [f"live/{stream}" for stream in range(11, 50)]
