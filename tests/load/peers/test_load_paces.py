"""Paces: what they allow over time, by a clock that the tests move."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.load.peers.paces import UNLIMITED, RhythmPace, Sawtooth, Trace, parse_trace
from flowctl.wire.client.throttle import Constant, RatePace

PACKET = 1400


def lump(rate):
    return max(rate / 8 * 0.005, PACKET)


def read_for(pace, seconds, *, start=0.0, available=1 << 40):
    """Read as a viewer would, all that is allowed whenever it is; return the bytes."""
    now, taken = start, 0
    while now < start + seconds:
        allowed = pace.allowance(now)
        if allowed:
            count = min(allowed, available)
            pace.note_read(count, now)
            taken += count
            continue
        when = pace.wake_at(now)
        if when is None:
            break
        assert when > now
        now = when
    return taken


@pytest.mark.parametrize("rate", [1_000, 64_000, 200_000, 10_000_000])
def test_rate_when_constant_is_kept_over_time(rate):
    taken = read_for(RatePace(Constant(rate), 5.0), 60.0, start=5.0)
    assert rate / 8 * 60 == pytest.approx(taken, abs=lump(rate) + 1)


@pytest.mark.parametrize("rate", [64_000, 1_275_000, 2_375_000, 20_000_000])
def test_rate_when_something_always_waits_is_read_evenly(rate):
    pace, now, most, taken = RatePace(Constant(rate), 0.0), 0.0, 0, 0
    while now < 10.0:
        count = pace.allowance(now)
        most = max(most, count)
        taken += count
        pace.note_read(count, now)
        now = pace.wake_at(now)
    assert most <= lump(rate) + 1
    assert taken == pytest.approx(rate / 8 * 10, abs=2 * lump(rate))


@given(st.lists(st.floats(0.0, 0.3), min_size=1, max_size=50), st.integers(4_000, 60_000))
@settings(max_examples=100, deadline=None)
def test_rate_when_the_clock_is_late_loses_nothing_of_a_line_that_had_something_to_carry(lateness, buffered):
    """Woken late, the reader gets what the line has carried meanwhile, though its buffer has to be filled again."""
    rate = 1_200_000
    pace, now, taken = RatePace(Constant(rate), 0.0), 0.0, 0
    pace.note_read(0, now)  # all that there was is read: the line is busy
    for late in lateness:
        now = pace.wake_at(now) + late
        allowed, count = pace.allowance(now), 0
        while count < allowed:
            now += 0.001  # the sender has filled the buffer again
            allowed = pace.allowance(now)
            count = min(allowed, buffered)
            pace.note_read(count, now)
            taken += count
    # What was carried by now is read, but for what came in the last moment.
    assert taken == pytest.approx(now * rate / 8, abs=lump(rate) + 1)


def test_rate_when_nothing_came_allows_one_lump_only():
    pace = RatePace(Constant(8_000_000), 0.0)
    assert pace.allowance(100.0) == 5_000
    pace.note_read(1_000, 100.0)
    assert pace.allowance(200.0) == 5_000
    pace.note_read(5_000, 200.0)
    pace.note_read(0, 200.0)
    assert pace.allowance(201.0) == 1_000_000, "there was more when it last looked"
    pace.note_read(0, 201.0)
    assert pace.allowance(300.0) == 5_000, "it looked, and there was nothing"


@pytest.mark.parametrize(
    "rate", [Constant(9e5), Sawtooth(1e5, 9e5, 3.0), Trace([(0.0, 1e6), (2.0, 0.0), (3.0, 3e6)], 4.0)]
)
def test_carried_when_the_rate_changes_is_its_sum_over_time(rate):
    step = 0.001
    total = sum(rate.rate_at((index + 0.5) * step) * step for index in range(17_300))
    assert rate.carried_bits(17.3) == pytest.approx(total, rel=1e-4)


def test_rate_when_more_was_taken_than_allowed_goes_into_debt():
    pace = RatePace(Constant(8_000), 0.0)
    pace.note_read(5_000, 0.0)
    assert pace.allowance(4.9) == 0
    assert pace.allowance(5.2) > 0


def test_sawtooth_when_a_period_has_passed_falls_back():
    saw = Sawtooth(100_000, 300_000, 10.0)
    assert [saw.rate_at(second) for second in (0.0, 5.0, 10.0, 17.5)] == [100_000, 200_000, 100_000, 250_000]


def test_sawtooth_when_read_for_whole_periods_gives_the_mean():
    taken = read_for(RatePace(Sawtooth(100_000, 900_000, 4.0), 0.0), 40.0)
    assert pytest.approx(taken, rel=0.02) == 500_000 / 8 * 40


def test_trace_when_its_end_is_reached_begins_again():
    trace = Trace([(0.0, 1e6), (2.0, 0.0), (3.0, 3e6)], 4.0)
    assert [trace.rate_at(second) for second in (0.0, 1.9, 2.5, 3.5, 4.1)] == [1e6, 1e6, 0.0, 3e6, 1e6]
    assert trace.mean_rate == pytest.approx(5e6 / 4)


def test_trace_when_its_rate_is_0_for_a_while_reads_nothing_then():
    taken = read_for(RatePace(Trace([(0.0, 800_000), (1.0, 0.0)], 2.0), 0.0), 20.0)
    assert pytest.approx(taken, rel=0.02) == 800_000 / 8 * 10


def test_rhythm_when_it_is_off_wakes_at_the_next_on():
    pace = RhythmPace(2.0, 3.0, 10.0)
    assert [pace.allowance(now) for now in (10.0, 11.9, 12.0, 14.9, 15.0)] == [UNLIMITED, UNLIMITED, 0, 0, UNLIMITED]
    assert pace.wake_at(13.0) == pytest.approx(15.0)


def test_parse_trace_when_the_file_has_a_head_and_comments_skips_them():
    trace = parse_trace("seconds,bit_rate\n# morning\n0, 1000000\n\n1.5,250000\n")
    assert [trace.rate_at(second) for second in (0, 1.5, 2.9, 3.0)] == [1_000_000, 250_000, 250_000, 1_000_000]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no line"),
        ("seconds,bit_rate\n", "no line"),
        ("0,1000\nfoo,bar", "line 2"),
        ("1,5000", "from 0"),
        ("0,5000\n0,5000", "must rise"),
        ("0,nan", "a rate is"),
        ("0,5000\nnan,5000", "must rise"),
        ("0,12", "a rate is"),
        ("0,0\n1,0", "all rates are 0"),
        ("0,5000,7", "no line"),
        ("0,5000\n1,2,3", "line 2"),
    ],
)
def test_parse_trace_when_the_text_is_wrong_says_where(text, what):
    with pytest.raises(ValueError, match=what):
        parse_trace(text)
