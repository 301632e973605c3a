"""Lateness: target delay, patience, what is late; forecast of the hard limit; rates of a stream."""

from __future__ import annotations

from math import inf

import pytest

from flowctl.core.flow.limits import NO_LIMITS, Axis, AxisLimits, Limits, parse_target_delay, target_marks
from flowctl.core.flow.policy import AudioFirst, KeepAll, LivePolicy, PicturesFirst, patience_of
from flowctl.core.flow.state import Load, MessageClass
from flowctl.core.flow.timing import (
    ENDLESS,
    LEAST_AHEAD_BYTES,
    MOST_AHEAD_BYTES,
    Timing,
    ahead_bytes,
    crowded,
    most_held_s,
    most_wait_s,
    target_s,
    time_to_hard,
)
from flowctl.core.outgoing.streamlog import ClassRates
from flowctl.errors import ConfigError

CONTROL, HEADER, KEY, INTER, DISPOSABLE, AUDIO, DATA = MessageClass


@pytest.mark.parametrize(
    ("set_ms", "gop_s", "expected"),
    [
        (None, 0.0, 1.5),
        (None, 1.0, 1.5),
        (None, 2.0, 1.5),
        (None, 4.0, 3.0),
        (None, 10.0, 4.0),
        (800, 4.0, 0.8),
        (0, 4.0, 0),
    ],
)
def test_target_is_three_quarters_of_a_group_between_its_bounds_unless_it_is_set(set_ms, gop_s, expected):
    assert target_s(set_ms, gop_s) == expected


@pytest.mark.parametrize(("rate", "expected"), [(100_000, 30_000), (1000, LEAST_AHEAD_BYTES), (1e9, MOST_AHEAD_BYTES)])
def test_kernel_is_given_300_ms_ahead_between_its_bounds(rate, expected):
    assert ahead_bytes(rate) == expected


def timing(policy=None, *, rate=100_000, held=0, target=1.0):
    return Timing(10.0, rate, held, target, patience_of(policy or LivePolicy()))


def test_message_is_late_when_age_and_what_goes_before_it_exceed_the_target():
    assert not timing(held=40_000).late(INTER, 10_000, 9.6, 9_999)
    assert timing(held=40_000).late(INTER, 10_000, 9.6, 10_001)


def test_disposable_frames_are_late_at_half_of_the_target_and_sound_at_twice():
    at = timing(held=60_000)
    assert at.late(DISPOSABLE, 0, 10.0, 0)
    assert not at.late(INTER, 0, 10.0, 0)
    assert timing(held=150_000).late(INTER, 0, 10.0, 0)
    assert not timing(held=150_000).late(AUDIO, 0, 10.0, 0)
    assert timing(held=210_000).late(AUDIO, 0, 10.0, 0)


def test_what_comes_with_a_key_frame_that_takes_long_is_waited_for_as_long_and_disposable_frames_half_as_long():
    at = timing()  # the key frame takes 0.8 s, pictures are waited for 1 s and sound 2 s
    assert [at.late(INTER, 0, 10.0 - late_s, 0, 80_000) for late_s in (1.1, 1.15)] == [False, True]
    assert [at.late(DISPOSABLE, 0, 10.0 - late_s, 0, 80_000) for late_s in (0.55, 0.58)] == [False, True]


@pytest.mark.parametrize("item", [INTER, DISPOSABLE])
@pytest.mark.parametrize(("held", "key_since"), [(350_000, 8.0), (0, 5.0)])
def test_pictures_behind_a_key_frame_that_takes_longer_than_they_wait_are_late_where_they_fall_behind_that(
    held, key_since, item
):
    """The key frame takes 4 s, and is on its way, or has gone. What is behind it was published within 2 s."""
    at = timing(held=held)
    assert at.large(400_000)
    assert not at.large(99_000)
    behind = (400_000, 50_000, key_since)
    assert not at.late(item, 0, 7.0, 0, *behind, 2.0)
    assert [at.late(item, size, 7.0, 0, *behind, 0.3) for size in (4_000, 6_000)] == [False, True]  # a quarter of 1 s
    assert at.late(item, 0, 7.0, 0, *behind, 60.0)  # long after it
    assert at.late(KEY, 0, 8.5, 0, *behind, 2.0)


def test_sound_behind_a_key_frame_that_takes_longer_than_pictures_wait_may_be_as_late_as_that():
    at = timing()  # the key frame takes 4 s, and has begun 1 s late at most
    found = [at.late(AUDIO, 0, 10.0 - late_s, 0, 400_000, 50_000, 3.0, 2.0) for late_s in (5.3, 5.4)]
    assert found == [False, True]
    assert at.late(AUDIO, 0, 10.0 - 5.3, 0, 400_000, 50_000, 3.0, 10.1)  # long after it


def test_nothing_waits_behind_a_key_frame_that_takes_longer_than_the_queue_holds():
    for held_s, waits in ((3.1, True), (2.9, False)):
        at = Timing(10.0, 100_000, 200_000, 1.0, patience_of(LivePolicy()), held_s=held_s)
        assert at.late(AUDIO, 1000, 9.0, 0, 300_000, 0, 9.0, 0.0) is not waits


def test_whether_a_large_key_frame_is_waited_for_goes_by_the_rate_of_some_seconds():
    """That of the last second falls to a half each time that a packet is lost in a deep queue."""
    at = Timing(10.0, 100_000, 600_000, 1.0, patience_of(LivePolicy()), held_s=10.0)
    for rate, steady, late in ((100_000, 0, False), (50_000, 100_000, False), (50_000, 50_000, True)):
        at.tell(10.0, rate, 600_000, steady)
        assert at.late(INTER, 1000, 9.0, 0, 700_000, 0, 9.0, 0.1) is late


@pytest.mark.parametrize("item", [CONTROL, HEADER])
def test_headers_and_control_messages_are_never_late(item):
    for policy in (LivePolicy(), AudioFirst(), PicturesFirst(), KeepAll()):
        assert not timing(policy, held=10**9).late(item, 10**6, 0.0, 0)


@pytest.mark.parametrize(
    ("soft", "hard", "rates", "expected"),
    [
        ("0,0", "0,0", (1e6, 100.0), None),
        ("2MiB,0,4s", "4MiB,0,8s", (0.0, 0.0), 6.4),  # the age alone, while no rate is known
        ("0,0", "1MB,0", (90_400.0, 100.0), 8.0),  # with 96 bytes a message
        ("0,0", "0,1000", (1e6, 100.0), 8.0),
        ("1MiB,100,1s", "0,0,0", (1e6, 100.0), None),  # soft marks end nobody's connection
    ],
)
def test_nothing_is_waited_for_longer_than_the_hard_marks_hold(soft, hard, rates, expected):
    most_s = most_wait_s(Limits.parse(soft, hard), *rates)
    assert most_s > 1e6 if expected is None else most_s == pytest.approx(expected)
    huge = Limits(size=AxisLimits(hard=10**400), age_ms=AxisLimits(hard=10**400))
    assert most_wait_s(huge, *rates) > 1e6


def test_large_key_frames_are_waited_for_by_what_bytes_and_messages_hold_until_the_queue_is_crowded():
    assert most_held_s(Limits.parse("1MB,0,2s", "1MB,0,5s"), 90_400.0, 100.0) == pytest.approx(9.0)
    assert most_held_s(Limits.parse("0,1000,2s", "0,1000,5s"), 0.0, 100.0) == pytest.approx(9.0)
    assert most_held_s(Limits.parse("0,1000,2s", "0,1000,4s"), 0.0, 100.0) == pytest.approx(8.0)  # twice the age


def test_bound_when_it_is_below_the_target_holds_for_pictures_and_sound_alike():
    at = Timing(10.0, 100_000, 0, 4.0, patience_of(LivePolicy()), 1.0)
    for item in (INTER, KEY, AUDIO):
        assert not at.late(item, 99_000, 10.0, 0)
        assert at.late(item, 101_000, 10.0, 0)
    assert not Timing(10.0, 100_000, 0, 4.0, patience_of(AudioFirst()), 1.0).late(AUDIO, 10**9, 10.0, 0)


def test_policies_when_asked_for_their_order_say_who_gives_way():
    assert (timing().key_firm, timing().sound_last) == (False, True)
    assert (timing(AudioFirst()).key_firm, timing(AudioFirst()).sound_last) == (True, True)
    assert not timing(AudioFirst(), held=10**9).late(AUDIO, 1, 0.0, 0)
    assert (timing(PicturesFirst()).key_firm, timing(PicturesFirst()).sound_last) == (False, False)
    assert patience_of(KeepAll()) == ENDLESS == (inf,) * 7


@pytest.mark.parametrize(("text", "expected"), [("auto", None), ("off", 0), ("0", 0), ("1500ms", 1500), ("2s", 2000)])
def test_target_delay_when_written_as_text_is_read(text, expected):
    assert parse_target_delay(text, "x") == expected
    limits = Limits(target_delay_ms=expected)
    assert parse_target_delay(target_marks(limits), "x") == expected


def test_target_delay_when_it_is_none_of_these_is_refused_with_a_hint():
    with pytest.raises(ConfigError, match="x") as caught:
        parse_target_delay("soon", "x")
    assert "auto" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["0.4ms", "1000000h"])
def test_target_delay_when_out_of_range_is_refused_with_the_range(text):
    with pytest.raises(ConfigError, match="must be 1ms to 1h"):
        parse_target_delay(text, "x")


def test_target_delay_when_negative_is_refused():
    with pytest.raises(ConfigError, match="target_delay_ms is -1"):
        Limits(target_delay_ms=-1)


@pytest.mark.parametrize("target_ms", [3_600_001, 10**400])
def test_target_delay_when_longer_than_an_hour_is_refused(target_ms):
    Limits(target_delay_ms=3_600_000)
    with pytest.raises(ConfigError, match="target_delay_ms is more than 3600000"):
        Limits(target_delay_ms=target_ms)


@pytest.mark.parametrize("wait", [None, float("nan"), -1, 0, "2", True, -inf])
def test_patience_when_it_is_no_number_above_zero_is_refused_in_words(wait):
    class Odd(LivePolicy):
        def patience(self, message_class):
            return wait

    with pytest.raises(ConfigError, match=r"Odd.patience\(KEY\) is .*, it must be a number above 0"):
        patience_of(Odd())


def test_patience_when_it_is_a_huge_number_has_no_end():
    class Endless(LivePolicy):
        def patience(self, message_class):
            return 10**400

    assert patience_of(Endless()) == ENDLESS


@pytest.mark.parametrize(
    ("hard", "load", "expected"),
    [
        ("4MiB,4096,8s", Load(3_600_000, 100, 7999.0), False),  # what is waited for, and age is no burst
        ("4MiB,4096,8s", Load(3_800_000, 100, 0.0), True),
        ("4MiB,4096,8s", Load(0, 3687, 0.0), True),
        ("0,0", Load(1 << 40, 1 << 20, 0.0), False),  # no hard mark, no end
    ],
)
def test_queue_is_crowded_from_nine_tenths_of_a_hard_mark_on_where_there_is_a_soft_one(hard, load, expected):
    assert crowded(Limits.parse("2MiB,2048,4s", hard), load) is expected
    assert not crowded(Limits.parse("0,0", hard), load)


LIMITS = Limits(
    size=AxisLimits(soft=1000, hard=10_000),
    messages=AxisLimits(soft=100, hard=1000),
    age_ms=AxisLimits(soft=1000, hard=20_000),
    overhead_bytes=0,
)


def forecast(load, drain, *, limits=LIMITS, fill=1000.0, messages=10.0):
    return time_to_hard(load, limits, fill_bytes_per_s=fill, fill_messages_per_s=messages, drain_bytes_per_s=drain)


def test_forecast_when_nothing_drains_is_the_first_axis_to_get_there():
    assert forecast(Load(1000, 10, 0.0), 0.0) == (9.0, Axis.BYTES)
    assert forecast(Load(1000, 10, 12_000.0), 0.0) == (8.0, Axis.AGE)
    assert forecast(Load(1000, 980, 0.0), 0.0) == (2.0, Axis.MESSAGES)


def test_forecast_when_a_part_drains_is_further_away():
    found = forecast(Load(1000, 10, 15_000.0), 800.0)
    assert found is not None
    assert (found.seconds, found.axis) == (pytest.approx(25.0), Axis.AGE)


def test_forecast_when_the_peer_keeps_up_or_limits_are_off_is_never():
    assert forecast(Load(9000, 900, 19_000.0), 1000.0) is None
    assert forecast(Load(9000, 900, 19_000.0), 2000.0) is None
    assert forecast(Load(9000, 900, 19_000.0), 0.0, limits=NO_LIMITS) is None
    assert forecast(Load(), 0.0, fill=0.0, messages=0.0) is None


def test_forecast_when_the_mark_is_passed_is_now():
    assert forecast(Load(10_000, 1, 0.0), 5000.0) == (0.0, Axis.BYTES)


def test_forecast_when_messages_have_overhead_counts_it():
    limits = Limits(size=AxisLimits(soft=1000, hard=10_000), overhead_bytes=100)
    assert forecast(Load(), 0.0, limits=limits) == (5.0, Axis.BYTES)


def feed(rates, began, seconds, per_second, total=0):
    """Note totals as a log does, at ten messages a second; return the last."""
    for tick in range(round(seconds * 10) + 1):
        now = began + tick / 10
        if now >= rates.due:
            rates.note(now, (total // 100,), (total,))
        total += per_second // 10
    return total


def test_rates_when_a_stream_runs_are_its_bytes_and_messages_per_second():
    rates = ClassRates()
    assert rates.per_second(0.0, (0,), (0,)) is None
    total = feed(rates, 0.0, 2.0, 1000)
    assert rates.per_second(2.0, (20,), (total,)) is None
    total = feed(rates, 2.1, 10.0, 1000, total)
    found = rates.per_second(12.1, (total // 100,), (total,))
    assert found is not None
    assert found[1] == [pytest.approx(1000, rel=0.05)]
    assert found[0] == [pytest.approx(10, rel=0.1)]
    assert rates.bytes_per_s == pytest.approx(1000, rel=0.1)


def test_rates_when_a_stream_changes_follow_within_their_window():
    rates = ClassRates()
    total = feed(rates, 0.0, 30.0, 1000)
    total = feed(rates, 30.1, 13.0, 9000, total)
    found = rates.per_second(43.1, (0,), (total,))
    assert found is not None
    assert found[1] == [pytest.approx(9000, rel=0.05)]


def test_rates_when_a_stream_pauses_begin_anew():
    rates = ClassRates()
    total = feed(rates, 0.0, 10.0, 1000)
    rates.note(100.0, (0,), (total,))
    assert rates.per_second(100.5, (0,), (total,)) is None
    assert rates.bytes_per_s == 0.0
