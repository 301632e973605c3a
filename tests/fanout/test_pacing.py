"""Pacing of flushes: from cost to interval, with hysteresis, and the figures of rounds."""

from __future__ import annotations

import itertools

import pytest

from flowctl.core.fanout.pacing import ROUND_BOUNDS_MS, ROUND_SHARE, Pacing, RoundMeter


def settled(cost_s, *, busy=0.0, ceiling_s=0.04, pacing=None, rounds=2000):
    pacing = pacing or Pacing(ceiling_s)
    now = 0.0
    for _ in range(rounds):
        now += max(pacing.interval_s, 0.01)
        pacing.round_ended(cost_s, busy, now)
    return pacing


@pytest.mark.parametrize(
    ("viewers", "interval_ms"),
    [(1, 0), (9, 0), (20, 5), (40, 10), (60, 15), (80, 20), (150, 30), (1000, 40), (4000, 40)],
)
def test_interval_when_rounds_cost_10_us_a_viewer_grows_with_their_number(viewers, interval_ms):
    assert settled(viewers * 10e-6).interval_s == pytest.approx(interval_ms / 1000)


@pytest.mark.parametrize("cost_us", [1, 50, 200, 300, 800, 1500, 3000, 50_000])
@pytest.mark.parametrize("busy", [0.0, 0.3, 0.5, 0.7])
def test_interval_when_below_the_ceiling_keeps_rounds_within_their_share(cost_us, busy):
    pacing = settled(cost_us / 1e6, busy=busy)
    assert 0 <= pacing.interval_s <= 0.04
    if 0 < pacing.interval_s < 0.04:
        assert cost_us / 1e6 / pacing.interval_s <= ROUND_SHARE * 1.001


def test_interval_when_the_thread_is_busy_is_the_ceiling():
    assert settled(50e-6, busy=0.2).interval_s == 0
    assert settled(50e-6, busy=0.9).interval_s == 0.04


def test_interval_when_cost_rises_is_longer_at_once_and_shorter_only_after_a_while():
    pacing = settled(50e-6)
    for _ in range(20):
        pacing.round_ended(0.01, 0.1, 100.0)
    assert pacing.interval_s == 0.04
    seen, now = [], 100.0
    while now < 120:
        now += 0.04
        pacing.round_ended(50e-6, 0.1, now)
        if not seen or seen[-1][1] != pacing.interval_s:
            seen.append((now, pacing.interval_s))
    assert [interval for _, interval in seen] == pytest.approx([0.04, 0.03, 0.02, 0.015, 0.01, 0.005, 0.0])
    assert all(after[0] - before[0] >= 2 for before, after in itertools.pairwise(seen))


def test_interval_when_cost_swings_about_a_step_does_not():
    pacing = settled(0.95e-3)
    intervals = [pacing.interval_s]
    for number in range(5000):
        pacing.round_ended(1.1e-3 if number // 20 % 2 else 0.9e-3, 0.1, 100 + number * 0.04)
        intervals.append(pacing.interval_s)
    assert sum(before != after for before, after in itertools.pairwise(intervals)) <= 1


def test_interval_when_a_key_frame_costs_ten_times_does_not_move():
    pacing = Pacing(0.04)
    intervals = set()
    for number in range(1000):
        pacing.round_ended(500e-6 if number % 60 == 59 else 50e-6, 0.1, number * 0.03)
        intervals.add(pacing.interval_s)
    assert intervals == {0.0}


def test_interval_when_not_adaptive_or_zero_stays():
    fixed, none = Pacing(0.04, adaptive=False), Pacing(0.0)
    for pacing in (fixed, none):
        settled(1e-6, pacing=pacing)
        settled(0.1, busy=1.0, pacing=pacing)
    assert (fixed.interval_s, none.interval_s) == (0.04, 0.0)


def test_rounds_when_counted_are_in_the_class_of_their_duration():
    meter = RoundMeter()
    for took_ms in (0.2, 1.0, 1.1, 30, 50, 51, 1000):
        meter.round(took_ms / 1000)
    meter.turn(0.003)
    meter.turn(0.001)
    assert dict(zip([*ROUND_BOUNDS_MS, None], meter.by_duration, strict=True)) == {
        1: 2,
        2: 1,
        5: 0,
        10: 0,
        20: 0,
        50: 2,
        100: 1,
        None: 1,
    }
    assert (meter.rounds, meter.longest_round_s) == (7, 1.0)
    assert (meter.turns, meter.longest_turn_s) == (2, 0.003)
