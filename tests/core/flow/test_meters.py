"""What a peer takes (drain rate), how far behind it is (delay, acknowledgements), and what pictures it gets."""

from __future__ import annotations

import pytest

from flowctl.core.flow.meters import STALL_S, DelayMeter, DrainMeter, PictureMeter, Trail


def feed(meter, began, seconds, rate, *, waited=True, total=0, every_s=0.1):
    for tick in range(round(seconds / every_s) + 1):
        meter.sample(began + tick * every_s, total + int(rate * tick * every_s), waited=waited)
    return total + int(rate * seconds)


def test_rate_when_something_waits_is_what_is_taken():
    meter = DrainMeter()
    assert meter.rate is None
    feed(meter, 0.0, 10.0, 3000)
    assert meter.rate == pytest.approx(3000)
    assert meter.known(10.0) == pytest.approx(3000)
    assert meter.waited_s == pytest.approx(10.0)


def test_steady_rate_is_that_of_some_seconds_kept_while_nothing_waits_and_lost_in_a_stall():
    meter, now, taken = DrainMeter(), 0.0, 0
    for at in range(120):  # as behind losses: nothing is acknowledged, then all at once
        now, taken = at / 5, taken + (0 if at % 4 == 1 else 400 if at % 4 == 2 else 200)
        meter.sample(now, taken, waited=True)
        assert meter.steady == 0 if now < 0.9 else now < 4 or 950 < meter.steady < 1050
    meter.sample(now + 30, taken, waited=False)
    assert meter.known(now + 30) is None
    assert 950 < meter.steady < 1050
    meter.sample(now + 30.1, taken, waited=True)
    meter.sample(now + 34, taken + 10, waited=True)
    assert meter.steady == 0


def test_rate_when_nothing_waits_is_not_measured():
    meter = DrainMeter()
    feed(meter, 0.0, 10.0, 3000, waited=False)
    assert meter.rate is None
    assert meter.waited_s == 0.0


def test_rate_when_nothing_has_waited_for_250_ms_is_not_known_any_more():
    meter = DrainMeter()
    total = feed(meter, 0.0, 5.0, 3000)
    feed(meter, 5.1, 0.1, 3000, waited=False, total=total)
    assert meter.known(5.2) == pytest.approx(3000)
    assert meter.known(5.3) is None
    assert meter.rate == pytest.approx(3000)


def test_rate_when_the_link_changes_follows_within_a_second():
    meter = DrainMeter()
    total = feed(meter, 0.0, 20.0, 9000)
    feed(meter, 20.0, 1.3, 3000, total=total)
    assert meter.rate == pytest.approx(3000, rel=0.05)


@pytest.mark.parametrize("lump_s", [0.2, 0.5, 0.7])
def test_rate_when_a_receiver_reads_in_lumps_is_right_after_each(lump_s):
    meter = DrainMeter()
    for tick in range(1001):
        now = tick / 100
        lumps = int(now / lump_s + 1e-9)
        meter.sample(now, int(30_000 * lumps * lump_s), waited=True)
        if tick > 300 and now - lumps * lump_s < 0.005:
            assert meter.known(now) == pytest.approx(30_000, rel=0.1)


def test_stalled_when_nothing_is_taken_begins_after_its_time_and_ends_with_the_next_byte():
    meter = DrainMeter()
    total = feed(meter, 0.0, 5.0, 3000)
    feed(meter, 5.0, STALL_S - 0.5, 0, total=total)
    assert not meter.stalled(5.0 + STALL_S - 0.5)
    assert meter.known(7.0) < 1500
    feed(meter, 5.0 + STALL_S, 20.0, 0, total=total)
    assert meter.stalled(28.0)
    meter.sample(30.0, total + 1500, waited=True)
    assert not meter.stalled(30.0)


def told(*totals, every_s=1.0, written=None):
    """Return a meter that was told these totals, one each `every_s` seconds, and the time of the last."""
    meter = DelayMeter()
    for number, total in enumerate(totals):
        meter.peer_acknowledged(number * every_s, total, written or total)
    return meter, (len(totals) - 1) * every_s


def test_acknowledgements_when_an_application_lags_show_what_its_kernel_hides():
    assert DelayMeter().untaken_bytes(0.0, 100_000, 0) == 0
    meter, now = told(10_000, 20_000, 30_000)
    assert meter.untaken_bytes(now, 30_000, 0) == 0
    assert meter.untaken_bytes(now, 40_000, 0) == 0, "one step may have been read and not been reported"
    assert meter.untaken_bytes(now, 80_000, 0) == 40_000
    assert meter.untaken_bytes(now, 80_000, 50_000) == 50_000, "what the kernel holds counts in any case"
    meter.peer_acknowledged(now, 5_000, 80_000)
    assert meter.untaken_bytes(now, 80_000, 0) == 40_000, "a report that goes back counts for nothing"


@pytest.mark.parametrize("every_s", [0.1, 1.0, 5.0, 30.0])
def test_acknowledgements_when_they_stop_are_believed_for_twice_their_usual_time(every_s):
    meter, now = told(10_000, 20_000, 30_000, every_s=every_s)
    believed_s = max(2 * every_s, 2.0)
    assert meter.untaken_bytes(now + believed_s - 0.01, 80_000, 1000) == 40_000
    assert meter.untaken_bytes(now + believed_s + 0.01, 80_000, 1000) == 1000
    meter.peer_acknowledged(now + 100, 40_000, 80_000)
    assert meter.untaken_bytes(now + 100, 90_000, 1000) == 40_000


def test_acknowledgements_when_a_viewer_reads_slower_and_slower_are_believed():
    meter, now, gap_s = DelayMeter(), 0.0, 1.0
    for total in range(50_000, 1_000_000, 50_000):
        assert total < 200_000 or meter.untaken_bytes(now, total + 200_000, 0) > 190_000
        meter.peer_acknowledged(now, total, total + 150_000 if total > 50_000 else total)
        now, gap_s = now + gap_s, gap_s * 1.5


def test_acknowledgements_when_one_comes_late_are_soon_judged_as_before():
    meter, now = told(10_000, 20_000, 30_000)
    now += 60
    for total in range(800_000, 1_100_000, 10_000):
        now += 1
        meter.peer_acknowledged(now, total, total)
    assert meter.untaken_bytes(now, 1_150_000, 0) == 50_000
    assert meter.untaken_bytes(now + 3, 1_150_000, 0) == 0


def test_acknowledgements_when_more_is_missing_than_a_receive_buffer_holds_are_not_believed():
    """Receive buffers end at 6 MiB: what is missing beyond that and what our kernel holds, nobody has unread."""
    most = 6 * 1024 * 1024
    meter, now = told(10_000, 20_000, 30_000)
    assert meter.untaken_bytes(now, 40_000 + most, 0) == most
    assert meter.untaken_bytes(now, 40_001 + most, 0) == 0
    assert meter.untaken_bytes(now, 40_001 + most, 1) == most + 1


@pytest.mark.parametrize("short", [0.0, 0.003, 0.015, 0.02])
def test_acknowledgements_when_they_leave_out_headers_make_no_delay(short):
    meter = DelayMeter()
    for second in range(7200):
        written = 200_000 * (second + 1)
        meter.peer_acknowledged(float(second), int(written * (1 - short)), written)
        assert meter.untaken_bytes(float(second), written, 0) == 0
    assert meter.untaken_bytes(7200.0, written + 1_200_000, 0) == pytest.approx(1_000_000, abs=60_000)


def test_delay_when_an_application_reads_slowly_counts_what_it_has_not_read():
    meter = DelayMeter()
    for second in range(30):
        meter.peer_acknowledged(float(second), 1000 * second, 1000 * second + (0 if second == 1 else 3000))
        delay_ms = meter.sample(float(second), 0, 1000 * second + 3000, 0)
    assert delay_ms == pytest.approx(2000, rel=0.1)


@pytest.mark.parametrize("step_s", [1, 7])
def test_delay_when_the_reports_stop_or_come_in_large_steps_is_by_what_the_kernel_takes(step_s):
    meter = DelayMeter()
    for tick in range(240):
        now, written = tick / 2, 1000 * tick  # bytes, 2000 a second
        if now < 60 and tick % (2 * step_s) == 0 and written:
            meter.peer_acknowledged(now, max(written - 20_000, 1), written)
        delay_ms = meter.sample(now, 4000, written, 1000)
        assert not 30 < now < 60 or 2490 <= delay_ms <= 12_500
    assert delay_ms == pytest.approx(2500, rel=0.01)


def test_share_when_the_viewer_wanted_no_pictures_is_of_those_since():
    meter = PictureMeter()
    meter.note(0.0, 100, 0, -5.0)
    meter.note(2.0, 0, 0, -5.0)
    meter.note(4.0, 220, 120, -5.0)
    assert meter.share(6.0, 280, 150) == 0.5


def test_share_when_a_viewer_begins_to_lag_counts_what_it_was_sent_before():
    meter = PictureMeter()
    meter.note(10.0, 300, 0, 0.0)
    assert meter.share(11.0, 330, 30) == 1 - 30 / 330
    for second in (15, 20, 25, 30):
        meter.note(float(second), 30 * second, 15 * (second - 10), 0.0)
    assert meter.share(20.0, 600, 150) == 0.75
    assert meter.share(30.0, 900, 300) == 0.5
    assert meter.share(31.0, 930, 315) == 0.5


def test_trail_between_two_marks_runs_with_the_bytes():
    trail = Trail(-1000, 5.0)
    trail.note(1000, 15.0)
    assert [trail.since(place, 2000, 18.0) for place in (-2000, 0, 500, 1000, 1500)] == [5.0, 10.0, 12.5, 15.0, 16.5]


def test_trail_when_nothing_was_to_be_written_for_a_while_has_a_step_there():
    trail = Trail(0, 1.0)
    for place, since in ((0, 1.0), (100, 2.0), (100, 9.0), (50, 3.0), (200, 9.5)):
        trail.note(place, since)
    assert [trail.since(place, 300, 10.0) for place in (0, 50, 99, 100, 150)] == [1.0, 1.5, 1.99, 9.0, 9.25]
    trail.forget(100)
    assert trail.since(100, 300, 10.0) == 9.0


def test_trail_when_there_are_too_many_marks_keeps_the_newest_exact():
    trail = Trail(0, 0.0)
    for place in range(1, 100_001):
        trail.note(place, place / 1000)
    assert trail.since(99_999, 100_001, 101.0) == 99.999
    for place in range(0, 100_000, 997):
        assert trail.since(place, 100_001, 101.0) == pytest.approx(place / 1000)
    assert len(trail._places) <= 64


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
