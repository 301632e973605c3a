"""Paces: what they allow over time, by a clock that the tests move."""

from __future__ import annotations

import pytest

from flowctl.loadtest.paces import UNLIMITED, Constant, RatePace, RhythmPace, Sawtooth, StallPace, Trace, parse_trace


def read_for(pace, seconds, *, start=0.0, available=1 << 40):
    """Read as a viewer would, all that is allowed whenever it is; return the bytes."""
    now, taken = start, 0
    while now < start + seconds:
        allowed = pace.allowance(now)
        if allowed:
            count = min(allowed, available)
            pace.took(count, now)
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
    """What is read in 60 s is the rate, give or take the two bursts at both ends."""
    taken = read_for(RatePace(Constant(rate), 5.0), 60.0, start=5.0)
    burst = max(rate / 8 * 0.05, 512)
    assert rate / 8 * 60 == pytest.approx(taken, abs=2 * burst)


def test_rate_when_the_reader_was_away_allows_one_burst_only():
    """Time in which nothing was read is not made up for."""
    pace = RatePace(Constant(8_000_000), 0.0)
    assert pace.allowance(100.0) == 50_000


def test_rate_when_more_was_taken_than_allowed_goes_into_debt():
    """What was read too much is waited for."""
    pace = RatePace(Constant(8_000), 0.0)
    pace.took(5_512, 0.0)
    assert pace.allowance(4.9) == 0
    assert pace.allowance(5.2) > 0


def test_sawtooth_when_a_period_has_passed_falls_back():
    """The rate rises evenly within the period and begins again."""
    saw = Sawtooth(100_000, 300_000, 10.0)
    assert [saw.at(second) for second in (0.0, 5.0, 10.0, 17.5)] == [100_000, 200_000, 100_000, 250_000]


def test_sawtooth_when_read_for_whole_periods_gives_the_mean():
    """Over whole periods the mean of both rates is read."""
    taken = read_for(RatePace(Sawtooth(100_000, 900_000, 4.0), 0.0), 40.0)
    assert pytest.approx(taken, rel=0.02) == 500_000 / 8 * 40


def test_trace_when_its_end_is_reached_begins_again():
    """Each rate holds until the next; the last one as long as the one before it."""
    trace = Trace([(0.0, 1e6), (2.0, 0.0), (3.0, 3e6)], 4.0)
    assert [trace.at(second) for second in (0.0, 1.9, 2.5, 3.5, 4.1)] == [1e6, 1e6, 0.0, 3e6, 1e6]
    assert trace.mean_rate == pytest.approx(5e6 / 4)


def test_trace_when_its_rate_is_0_for_a_while_reads_nothing_then():
    """A rate of 0 is waited through, however long it lasts."""
    taken = read_for(RatePace(Trace([(0.0, 800_000), (1.0, 0.0)], 2.0), 0.0), 20.0)
    assert pytest.approx(taken, rel=0.15) == 800_000 / 8 * 10


def test_rhythm_when_it_is_off_wakes_at_the_next_on():
    """Reading is unlimited while on, and not allowed while off."""
    pace = RhythmPace(2.0, 3.0, 10.0)
    assert [pace.allowance(now) for now in (10.0, 11.9, 12.0, 14.9, 15.0)] == [UNLIMITED, UNLIMITED, 0, 0, UNLIMITED]
    assert pace.wake_at(13.0) == pytest.approx(15.0)


def test_stall_when_its_moment_has_come_never_reads_again():
    """There is no time at which to look again."""
    pace = StallPace(3.0)
    assert pace.allowance(2.9) == UNLIMITED
    assert 0 == pace.allowance(3.0) == pace.allowance(1e9)
    assert pace.wake_at(3.0) is None


def test_parse_trace_when_the_file_has_a_head_and_comments_skips_them():
    """A first line of names and lines with # are no steps."""
    trace = parse_trace("seconds,bit_rate\n# morning\n0, 1000000\n\n1.5,250000\n")
    assert [trace.at(second) for second in (0, 1.5, 2.9, 3.0)] == [1_000_000, 250_000, 250_000, 1_000_000]


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
    """Errors name the line and the rule."""
    with pytest.raises(ValueError, match=what):
        parse_trace(text)
