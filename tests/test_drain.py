"""The drain rate of a peer, and what an application's acknowledgements say of its delay."""

from __future__ import annotations

import pytest

from flowctl.drain import STALL_S, DelayMeter, DrainMeter
from flowctl.trouble import Trouble


def feed(meter, began, seconds, rate, *, waited=True, total=0, every_s=0.1):
    """Sample a peer that takes `rate` bytes a second; return the total."""
    for tick in range(round(seconds / every_s) + 1):
        meter.sample(began + tick * every_s, total + int(rate * tick * every_s), waited=waited)
    return total + int(rate * seconds)


def test_rate_when_something_waits_is_what_is_taken():
    """While there is always something to take, the rate is that of the link."""
    meter = DrainMeter()
    assert meter.rate is None
    feed(meter, 0.0, 10.0, 3000)
    assert meter.rate == pytest.approx(3000)
    assert meter.known(10.0) == pytest.approx(3000)
    assert meter.waited_s == pytest.approx(10.0)


def test_rate_when_nothing_waits_is_not_measured():
    """A peer that takes all there is says nothing about what it could take."""
    meter = DrainMeter()
    feed(meter, 0.0, 10.0, 3000, waited=False)
    assert meter.rate is None
    assert meter.waited_s == 0.0


def test_rate_when_nothing_has_waited_for_250_ms_is_not_known_any_more():
    """What was measured last is told, but is no evidence: a peer that may be fast is not judged by it."""
    meter = DrainMeter()
    total = feed(meter, 0.0, 5.0, 3000)
    feed(meter, 5.1, 0.1, 3000, waited=False, total=total)
    assert meter.known(5.2) == pytest.approx(3000)
    assert meter.known(5.3) is None
    assert meter.rate == pytest.approx(3000)


def test_rate_when_the_link_changes_follows_within_a_second():
    """Only the last second counts."""
    meter = DrainMeter()
    total = feed(meter, 0.0, 20.0, 9000)
    feed(meter, 20.0, 1.3, 3000, total=total)
    assert meter.rate == pytest.approx(3000, rel=0.05)


@pytest.mark.parametrize("lump_s", [0.2, 0.5, 0.7])
def test_rate_when_a_receiver_reads_in_lumps_is_right_after_each(lump_s):
    """A window that opens twice in a second does not make the rate jump between nothing and much."""
    meter = DrainMeter()
    for tick in range(1001):
        now = tick / 100
        lumps = int(now / lump_s + 1e-9)
        meter.sample(now, int(30_000 * lumps * lump_s), waited=True)
        if tick > 300 and now - lumps * lump_s < 0.005:
            assert meter.known(now) == pytest.approx(30_000, rel=0.1)


def test_stalled_when_nothing_is_taken_begins_after_its_time_and_ends_with_the_next_byte():
    """A peer that takes nothing becomes slower and slower, and is stalled after `STALL_S`."""
    meter = DrainMeter()
    total = feed(meter, 0.0, 5.0, 3000)
    feed(meter, 5.0, STALL_S - 0.5, 0, total=total)
    assert not meter.stalled(5.0 + STALL_S - 0.5)
    assert meter.known(7.0) < 1500
    feed(meter, 5.0 + STALL_S, 20.0, 0, total=total)
    assert meter.stalled(28.0)
    meter.sample(30.0, total + 1500, waited=True)
    assert not meter.stalled(30.0)


def test_acknowledgements_when_an_application_lags_show_what_its_kernel_hides():
    """The peer's kernel has taken everything, its application 40 kB less: that is part of the delay."""
    meter = DelayMeter()
    assert meter.unread_bytes(100_000) == 0
    for total in (10_000, 20_000, 30_000):
        meter.peer_acknowledged(total)
    assert meter.unread_bytes(30_000) == 0
    assert meter.unread_bytes(40_000) == 0, "one step may have been read and not been reported"
    assert meter.unread_bytes(80_000) == 40_000
    meter.peer_acknowledged(5_000)
    assert meter.unread_bytes(80_000) == 40_000, "a report that goes back counts for nothing"


def test_acknowledgements_when_they_stop_are_believed_no_more():
    """No receive buffer is as large as what a client that stopped acknowledging seems to have in it."""
    meter = DelayMeter()
    for total in (10_000, 20_000, 30_000):
        meter.peer_acknowledged(total)
    assert meter.unread_bytes(100_000_000) == 0


def test_delay_when_an_application_reads_slowly_counts_what_it_has_not_read():
    """With nothing queued and nothing in our kernel, an application 2 s behind has a delay of about 2 s."""
    meter = DelayMeter()
    for second in range(30):
        meter.peer_acknowledged(1000 * second)
        delay_ms = meter.sample(float(second), 0, 1000 * second + 3000, 0)
    assert delay_ms == pytest.approx(2000, rel=0.1)


def test_age_when_one_sample_is_high_is_that_of_the_other():
    """One big frame on its way at the moment of a sample makes nobody old; two in a row do."""
    trouble = Trouble()
    for second in range(10):
        trouble.sample(float(second), 0, 1000 * second, 0)
    trouble.sample(10.0, 0, 15_000, 5000)
    assert trouble.delay_ms > 1000
    assert trouble.age_ms == 0.0
    trouble.sample(11.0, 0, 16_000, 5000)
    assert trouble.age_ms > 1000
    assert trouble.harmless
