"""Time to the hard limit, and the bit rates it rests on."""

from __future__ import annotations

import pytest

from flowctl.core.flow.forecast import time_to_hard
from flowctl.core.flow.limits import NO_LIMITS, Axis, AxisLimits, Limits
from flowctl.core.flow.rates import ClassRates
from flowctl.core.flow.state import Load

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
