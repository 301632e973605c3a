"""When tags are due: signed clock arithmetic, loops with continuing timestamps, ends."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.state import MessageClass
from flowctl.errors import ConfigError
from flowctl.flv import TAG_AUDIO, TAG_SCRIPT, TAG_VIDEO, FlvTag
from flowctl.wire.client.pace import MediaClock, Timeline
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.wire import signed_difference

CONFIG = SyntheticSource(width=64, height=64).headers()[1]
END = b"\x17\x02\x00\x00\x00"
META = FlvTag(TAG_SCRIPT, 0, b"\x02\x00\x0aonMetaData\x03\x00\x00\x09")


@pytest.mark.parametrize(
    ("timestamps", "covered_ms"),
    [
        ([], 0),
        ([700], 0),
        ([0, 33, 21, 67], 67),  # audio and video are interleaved
        ([0xFFFFFFF0, 0x10], 32),  # the clock wraps
        ([5000, 6000, 0, 500], 1500),  # another publisher's clock
        ([0, 0x7FFFFFFF, 0xFFFFFFFE], 0xFFFFFFFE),  # longer than half of the clock
    ],
)
def test_media_clock_when_frames_come(timestamps, covered_ms):
    clock = MediaClock()
    for timestamp in timestamps:
        clock.count_frame(timestamp)
    assert clock.covered_ms == covered_ms


def key(timestamp):
    return FlvTag(TAG_VIDEO, timestamp, b"\x17\x01\x00\x00\x00\x00\x00\x00\x02\x65\x88")


def inter(timestamp):
    return FlvTag(TAG_VIDEO, timestamp, b"\x27\x01\x00\x00\x00\x00\x00\x00\x02\x41\x9a")


def audio(timestamp):
    return FlvTag(TAG_AUDIO, timestamp, b"\xaf\x01\x21")


def due(timeline, count=None):
    return [(timed.tag.type_id, timed.due_ms) for timed in itertools.islice(timeline, count)]


@given(st.integers(0, 2**32 - 1), st.integers(-(2**31), 2**31 - 1))
@settings(max_examples=200, deadline=None)
def test_signed_difference_when_the_clock_wraps(start, step):
    assert signed_difference((start + step) % 2**32, start) == step


def test_due_when_the_clock_wraps_in_the_middle():
    source = [key(2**32 - 40), inter(0), inter(40)]
    assert due(Timeline(source)) == [(TAG_VIDEO, 0), (TAG_VIDEO, 40), (TAG_VIDEO, 80)]


def test_due_when_metadata_has_another_clock():
    source = [META, key(5_000_000), inter(5_000_040)]
    assert due(Timeline(source)) == [(TAG_SCRIPT, 0), (TAG_VIDEO, 0), (TAG_VIDEO, 40)]


def test_loop_when_tracks_end_at_different_times():
    source = [META, CONFIG, key(0), audio(0), audio(20), inter(40), audio(40), FlvTag(TAG_VIDEO, 40, END)]
    timeline = Timeline(source, loop=True)
    tags = [(timed.tag.type_id, timed.tag.timestamp) for timed in itertools.islice(timeline, 12)]
    first = [(18, 0), (9, 0), (9, 0), (8, 0), (8, 20), (9, 40), (8, 40)]
    assert tags == [*first, (9, 80), (8, 80), (8, 100), (9, 120), (8, 120)]


def test_loop_when_headers_repeat():
    changed = CONFIG._replace(timestamp=80, payload=CONFIG.payload[:-1] + b"\x21")
    source = [META, CONFIG, key(0), inter(40), changed, key(80)]
    classes = [timed.message_class for timed in itertools.islice(Timeline(source, loop=True), 12)]
    header, key_frame, other = MessageClass.HEADER, MessageClass.KEY, MessageClass.INTER
    assert classes[:6] == [header, header, key_frame, other, header, key_frame]
    assert classes[6:] == [header, key_frame, other, header, key_frame, header]


def test_loop_when_there_is_one_frame():
    """A loop of a single frame moves on in time: it is no endless burst."""
    times = [timed.due_ms for timed in itertools.islice(Timeline([key(7)], loop=True), 4)]
    assert times == sorted(set(times))


@pytest.mark.parametrize("times", [[0] * 100, [1000, 0], [0, 1000, 0], [5, 2**31, 7], [0, 2**32 - 1]])
def test_duration_when_timestamps_stand_still_or_run_back_is_come_to_by_a_loop(times):
    source = [key(time) for time in times]
    found = [timed.due_ms for timed in itertools.islice(Timeline(source, loop=True, duration_s=1), 3000)]
    assert len(found) < 3000
    rounds = [found[begin : begin + len(times)] for begin in range(0, len(found), len(times))]
    assert all(after[0] > max(before) for before, after in itertools.pairwise(rounds))


def test_loop_when_there_is_no_media():
    assert due(Timeline([META], loop=True)) == [(TAG_SCRIPT, 0)]


def test_loop_when_the_source_is_an_iterator():
    with pytest.raises(ConfigError, match="only once"):
        Timeline(iter([key(0)]), loop=True)


def test_duration_when_it_ends_inside_a_round():
    source = [key(0), inter(40), inter(80)]
    assert due(Timeline(source, loop=True, duration_s=0.16))[-1] == (TAG_VIDEO, 120)


@given(st.integers(0, 2**32 - 1), st.sampled_from([24.0, 29.97, 60.0]))
@settings(max_examples=30, deadline=None)
def test_timestamps_when_a_synthetic_source_starts_anywhere(start, fps):
    source = SyntheticSource(start_timestamp=start, fps=fps, width=64, height=64)
    timed = list(itertools.islice(Timeline(source), 40))
    assert [item.tag for item in timed] == list(itertools.islice(source, 40))
    times = [item.due_ms for item in timed]
    assert times[0] == 0
    assert times == sorted(times)
