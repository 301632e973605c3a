"""The drain rate of a peer, and what an application's acknowledgements say of its delay."""

from __future__ import annotations

import pytest

from flowctl.drain import STALL_S, DelayMeter, DrainMeter
from flowctl.trouble import Trouble


def feed(meter, began, seconds, rate, *, full=True, kernel=100_000, total=0):
    """Sample every half second a peer that takes `rate` bytes a second; return the total."""
    for tick in range(round(seconds * 2) + 1):
        meter.sample(began + tick / 2, total + int(rate * tick / 2), kernel, full=full)
    return total + int(rate * seconds)


def test_rate_when_the_kernel_is_full_is_what_is_taken():
    """While there is always something to take, the rate is that of the link."""
    meter = DrainMeter()
    assert meter.rate is None
    feed(meter, 0.0, 10.0, 3000)
    assert meter.rate == pytest.approx(3000)
    assert meter.measured_at == 10.0


def test_rate_when_the_kernel_runs_empty_is_not_measured():
    """A peer that takes all there is says nothing about what it could take."""
    meter = DrainMeter()
    feed(meter, 0.0, 10.0, 3000, full=False, kernel=0)
    assert meter.rate is None


def test_rate_when_some_of_the_old_is_left_in_the_kernel_is_measured_without_a_refusal():
    """What the kernel held and still holds shows that the link was busy all the time."""
    meter = DrainMeter()
    feed(meter, 0.0, 10.0, 3000, full=False, kernel=2000)
    assert meter.rate == pytest.approx(3000)
    other = DrainMeter()
    feed(other, 0.0, 10.0, 3000, full=False, kernel=1500)
    assert other.rate is None, "all that was there went out: it may have waited for more"


def test_rate_when_the_link_changes_follows_in_seconds():
    """Old times fade: after ten seconds the rate is that of now."""
    meter = DrainMeter()
    total = feed(meter, 0.0, 20.0, 9000)
    feed(meter, 20.0, 10.0, 3000, total=total)
    assert meter.rate == pytest.approx(3000, rel=0.2)


def test_rate_when_a_receiver_reads_in_lumps_is_their_average():
    """A window that opens once in two seconds does not make the rate jump between nothing and much."""
    meter = DrainMeter()
    for tick in range(41):
        meter.sample(tick / 2, 60_000 * (tick // 4), 100_000, full=True)
    assert meter.rate == pytest.approx(30_000, rel=0.15)


def test_stalled_when_nothing_is_taken_begins_after_its_time_and_ends_with_the_next_byte():
    """A peer that takes nothing is stalled after `STALL_S`, and a pause does not lower its rate."""
    meter = DrainMeter()
    total = feed(meter, 0.0, 5.0, 3000)
    feed(meter, 5.0, STALL_S - 0.5, 0, total=total)
    assert not meter.stalled(5.0 + STALL_S - 0.5)
    feed(meter, 5.0 + STALL_S, 20.0, 0, total=total)
    assert meter.stalled(28.0)
    assert meter.rate == pytest.approx(3000)
    meter.sample(30.0, total + 1500, 100_000, full=True)
    assert not meter.stalled(30.0)
    assert meter.rate is None, "after a pause it may be another link"


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
    trouble = Trouble(None, 0.0)
    for second in range(10):
        trouble.sample(float(second), 0, 1000 * second, 0, full=False)
    trouble.sample(10.0, 0, 15_000, 5000, full=False)
    assert trouble.delay_ms > 1000
    assert trouble.age_ms == 0.0
    trouble.sample(11.0, 0, 16_000, 5000, full=False)
    assert trouble.age_ms > 1000
    assert trouble.blank
