"""Delay of a peer as one number."""

from __future__ import annotations

import pytest

from flowctl.core.flow.meters import DelayMeter


def test_sample_when_nothing_waits_is_zero():
    meter = DelayMeter()
    assert meter.sample(0.0, 0, 0, 0) == 0.0
    assert meter.sample(1.0, 0, 1000, 0) == 0.0


def test_sample_when_the_peer_takes_steadily_is_what_waits_over_its_rate():
    meter = DelayMeter()
    for second in range(20):
        delay_ms = meter.sample(float(second), 2000, 1000 * second + 1000, 1000)
    assert delay_ms == pytest.approx(3000.0)


def test_sample_when_the_peer_stops_grows_with_time():
    meter = DelayMeter()
    meter.sample(0.0, 0, 0, 0)
    before = meter.sample(1.0, 1000, 2000, 1000)
    after = [meter.sample(1.0 + second, 1000, 2000, 1000) for second in (1, 2, 3)]
    assert before == pytest.approx(2000.0)
    assert after == [pytest.approx(3000.0), pytest.approx(4000.0), pytest.approx(5000.0)]


def test_sample_when_repeated_at_once_does_not_disturb_the_rate():
    meter = DelayMeter()
    meter.sample(0.0, 0, 0, 0)
    first = meter.sample(1.0, 500, 1500, 500)
    assert meter.sample(1.001, 500, 1500, 500) == first
