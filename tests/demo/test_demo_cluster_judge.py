"""What the demonstration of a cluster says of a viewer: every frame once, in order, unchanged; how late, how long."""

from __future__ import annotations

import pytest

from flowctl.demo.cluster.frames import DueFrames, SeenFrame, delay_line, judge, recovered_s
from flowctl.wire.media.stamp import read_stamp
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_VIDEO

COUNT = 300
"""Pictures, 40 ms apart."""


def published(count=COUNT):
    return {(TYPE_VIDEO, number): number * 7 for number in range(count)}


def came(numbers, delay_ms=50, **later):
    """Return frames that came `delay_ms` behind their time, those of `later` (n12=...) so many ms instead."""
    delays = {int(name[1:]): value for name, value in later.items()}
    return [
        SeenFrame(TYPE_VIDEO, number, number * 7, number * 40, number * 40_000,
             number * 40_000 + delays.get(number, delay_ms) * 1000)
        for number in numbers
    ]  # fmt: skip


def test_judge_when_all_came_once_is_whole():
    found = judge("a", came(range(20, COUNT)), published())
    assert found.whole
    assert (found.frames, found.lost, found.delay_p50_ms, found.delay_p99_ms) == (COUNT - 20, 0, 50.0, 50.0)
    assert found.longest_pause_s == pytest.approx(0.04)
    assert found.recovered_s is None


@pytest.mark.parametrize(
    ("seen", "field", "count"),
    [
        (came([*range(100), *range(103, COUNT)]), "lost", 3),
        (came(range(COUNT - 5)), "lost", 5),  # the last ones never came
        (came([*range(100), 99, 98, *range(100, COUNT)]), "doubled", 2),
        (came([*range(100), 101, 100, *range(102, COUNT)]), "disordered", 1),
        ([item._replace(checksum=1) if item.number == 5 else item for item in came(range(COUNT))], "changed", 1),
    ],
)
def test_judge_when_something_is_wrong_counts_it(seen, field, count):
    found = judge("a", seen, published())
    assert getattr(found, field) == count
    assert not found.whole


def test_judge_when_nothing_came_is_not_whole():
    found = judge("a", [], published(), event_us=1)
    assert (found.frames, found.lost, found.whole, found.delay_p50_ms) == (0, 0, False, None)


def test_judge_when_a_track_is_missing_counts_it_from_its_begin():
    sound = {(TYPE_AUDIO, number): 1 for number in range(10)}
    assert judge("a", came(range(COUNT)), {**published(), **sound}).lost == 10


def test_recovered_when_frames_were_late_after_an_event_is_when_the_last_of_them_came():
    event_us = 135 * 40_000
    late = {f"n{number}": 450 for number in range(150, 161)}
    seen = sorted(came(range(COUNT), **late), key=lambda item: item.came_us)
    assert recovered_s(seen, event_us) == pytest.approx((160 * 40_000 + 450_000 - event_us) / 1e6)
    found = judge("a", seen, published(), event_us)
    assert found.recovered_s == recovered_s(seen, event_us)
    assert found.longest_pause_s < 0.5


def test_recovered_when_nothing_was_late_is_zero():
    assert recovered_s(came(range(COUNT)), 200 * 40_000) == 0.0
    assert recovered_s(came(range(COUNT), n150=500, n250=550), 200 * 40_000) == 0.0
    # Long before the event is not usual any more, and long after it is of something else.
    assert recovered_s(came(range(COUNT), n60=500, n230=550), 200 * 40_000) == pytest.approx(1.75)
    assert recovered_s(came(range(COUNT), n290=550), 200 * 40_000) == 0.0


def test_recovered_when_new_frames_came_late_is_that_beyond_the_usual_delay():
    late = {f"n{number}": max(50, 250 - (number - 200) * 40) for number in range(200, 206)}
    assert recovered_s(came(range(COUNT), **late), 200 * 40_000) == pytest.approx(0.25)
    slight = {f"n{number}": 140 for number in range(200, 203)}
    assert recovered_s(came(range(COUNT), **slight), 200 * 40_000) == pytest.approx(0.09)


def test_delay_line_when_drawn_has_the_worst_of_each_step():
    line = delay_line(came(range(COUNT), n101=90), 0)
    assert line[0][0] >= 2.0
    assert dict(line)[4.0] == 90.0
    assert {delay for at, delay in line if at != 4.0} == {50.0}


def test_frames_when_iterated_twice_are_the_same_octets_and_remembered():
    frames = DueFrames(SyntheticSource(video_bit_rate=500_000), 1.0)
    assert frames.begun_us is None
    assert list(frames) == []
    assert [frames.begin(now) for now in (5.0, 6.0)] == [5.0, 5.0]
    one, two = list(frames), list(frames)
    assert one == two
    stamps = [read_stamp(tag.payload) for tag in one if tag.type_id == TYPE_VIDEO]
    numbers = [found for found in stamps if found is not None]
    assert [number for number, _ in numbers] == list(range(30))
    assert all(abs(at_us - frames.begun_us - number * 1e6 / 30) < 1_001 for number, at_us in numbers)
    assert len(frames.checksums) == sum(read_stamp(tag.payload) is not None for tag in one)
