"""Missing frames found by stamps or timestamps, and the pace of slow readers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.errors import ConfigError
from flowctl.wire.client.measure import GapFinder
from flowctl.wire.client.player import PlayProfile
from flowctl.wire.client.throttle import MAX_RATE, MIN_RATE, Constant, RatePace, read_size, receive_buffer


@given(st.sets(st.integers(1, 398)), st.sampled_from([24.0, 25.0, 29.97, 30.0, 46.875, 60.0]))
@settings(max_examples=150, deadline=None)
def test_gaps_when_frames_are_left_out(left_out, fps):
    # The step must have been seen before something is missing, as it is behind a key frame.
    left_out = {index for index in left_out if index > 4}
    finder, there = GapFinder(), [index for index in range(400) if index not in left_out]
    missing = [finder.missing_before((2**32 - 1000 + round(index * 1000 / fps)) % 2**32) for index in there]
    assert sum(missing) == len(left_out)
    gaps = sum(after - before > 1 for before, after in itertools.pairwise(there))
    assert sum(map(bool, missing)) == gaps


def test_gaps_when_timestamps_stand_still_or_go_back():
    finder = GapFinder()
    assert [finder.missing_before(timestamp) for timestamp in (0, 40, 40, 20, 60, 100)] == [0] * 6


@given(st.integers(MIN_RATE, 10_000_000), st.lists(st.tuples(st.integers(1, 65_536), st.floats(0, 2)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_pace_when_reads_wait_as_told(rate, reads):
    pace, now, taken = RatePace(Constant(rate), 0.0), 0.0, 0
    for size, later in reads:
        while not pace.allowance(now):
            now = pace.wake_at(now)
        assert taken <= now * rate / 8 + 1e-6 * (taken + 1)
        taken += size
        pace.note_read(size, now)
        now += later


@given(st.integers(MIN_RATE, MAX_RATE))
@settings(max_examples=100, deadline=None)
def test_buffers_when_a_rate_is_to_show_within_a_second(rate):
    hidden = 2 * receive_buffer(rate) + read_size(rate)
    assert hidden <= 2 * 256 * 1024 + 64 * 1024
    if rate >= 200_000:
        assert hidden <= rate / 8 / 2


@pytest.mark.parametrize(
    "settings_", [{"rate": 1}, {"stall_after_s": -1.0}, {"resume_after_s": float("nan")}, {"pings_per_s": -1}]
)
def test_profile_when_a_value_is_out_of_range(settings_):
    with pytest.raises(ConfigError, match=next(iter(settings_))):
        PlayProfile(**settings_)
