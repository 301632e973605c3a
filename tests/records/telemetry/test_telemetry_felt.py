"""What samples say of one connection, summed up: the rules, each on samples whose answer is known beforehand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.counts import NO_FIGURES
from flowctl.core.sending.blame import Blame
from flowctl.records.telemetry.felt import STALL_MS, SampleSums, shows_trouble
from flowctl.records.telemetry.sampling import NOTHING, SampledCondition, sums

ERROR = 1 / 64
LOST = (0, 0, 0, 3, 0, 0, 0, *(0,) * 7)
"""Three inter frames dropped."""


def slow(delay_ms=0.0, ms=1000.0, **values):
    return SampledCondition(ms, **{"state": "OVERLOADED", "viewer_delay_ms": delay_ms, **values})


def felt(*samples, sampled_ms=None, target_ms=0.0):
    """Return the columns of samples, (condition, happened) each, one after the other."""
    made, whole_ms = SampleSums(), 0.0
    for condition, happened in samples:
        whole_ms += condition.interval_ms
        made.add_sample(condition, happened, target_ms)
    return made.columns(whole_ms if sampled_ms is None else sampled_ms)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1.0, 60_000.0), st.integers(1, 3000)), min_size=1, max_size=40), st.integers(0, 9999)
)
def test_quantiles_when_samples_have_any_length_are_off_by_two_percent_at_most(samples, calm_ms):
    whole = sum(ms for _, ms in samples) + calm_ms
    found = felt(*((slow(delay, float(ms)), NOTHING) for delay, ms in samples), sampled_ms=float(whole))
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        delays = sorted([*samples, (0.0, calm_ms)])
        passed = itertools.accumulate(ms for _, ms in delays)
        exact = next(delay for (delay, _), ms in zip(delays, passed, strict=True) if ms >= share * whole)
        assert found[f"delay_{name}_ms"] == pytest.approx(exact, rel=ERROR + 1e-6, abs=1e-3)
    assert found["delay_max_ms"] == max(delay for delay, _ in samples)
    assert found["delay_mean_ms"] == pytest.approx(sum(delay * ms for delay, ms in samples) / whole)


def test_late_when_above_the_target_counts_the_whole_interval():
    samples = [(slow(900.0), NOTHING), (slow(1600.0, 500.0), NOTHING), (slow(5000.0), NOTHING)]
    assert felt(*samples, target_ms=1500.0)["late_ms"] == 1500.0
    assert felt(*samples)["late_ms"] == 0.0


def test_stall_when_several_samples_see_it_is_one():
    stalls = [400.0, 1400.0, 2400.0, 0.0, 700.0]
    found = felt(*((slow(stalled_ms=stalled), NOTHING) for stalled in stalls))
    assert (found["stall_count"], found["stall_ms"]) == (2, 1000.0 + 1000.0 + 700.0)
    assert felt((slow(stalled_ms=STALL_MS - 1), NOTHING))["stall_count"] == 0


def test_trouble_when_ready_and_without_some_pictures_is_trouble():
    samples = [slow(), SampledCondition(300.0, picture_share=0.9), SampledCondition(200.0)]
    assert felt(*((condition, NOTHING) for condition in samples))["trouble_ms"] == 1300.0


def test_line_when_measured_tells_what_it_carried_and_what_was_published():
    accepted = sums(0, (*(0,) * 7, 10, 20, 30, 40, 50, 0, 0), NO_FIGURES, NO_FIGURES)
    samples = [slow(drain_bytes_per_s=4000.0, ms=500.0), slow(), SampledCondition(1000.0, drain_bytes_per_s=9.0)]
    found = felt(*((condition, accepted) for condition in samples))
    assert (found["line_bytes"], found["line_stream_bytes"]) == (2000, 150)


def test_lag_when_somebody_is_to_blame_counts_the_time_for_them_whatever_the_thread_does():
    made = SampleSums()
    blames = [Blame.NOBODY, Blame.PEER_LINE, Blame.PEER_LINE, Blame.SERVER_LOOP, Blame.PUBLISHER_BURST, Blame.POLICY]
    for number, blamed in enumerate(blames):
        made.add_sample(slow(ms=100.0 * (number + 1), strained=True, thread_busy=0.95), NOTHING, 0.0, blamed=blamed)
    found = made.columns(2100.0)
    assert (found["lag_ms"], found["lag_server_ms"], found["lag_burst_ms"]) == (2000.0, 400.0, 500.0)


def test_drops_when_nothing_forced_them_are_counted_apart():
    lost = sums(0, NO_FIGURES, NO_FIGURES, LOST)
    assert felt((SampledCondition(1000.0), lost))["unforced_drops"] == 3
    assert felt((slow(), lost), (SampledCondition(1000.0, stalled_ms=10.0), lost))["unforced_drops"] == 0


def test_sample_when_its_connection_kept_up_tells_nothing():
    assert not shows_trouble(SampledCondition(1000.0, viewer_delay_ms=None), NOTHING)
    odd = [{"state": "OVERLOADED"}, {"picture_share": 0.99}, {"stalled_ms": 1.0}, {"viewer_delay_ms": 1.0}]
    assert all(shows_trouble(SampledCondition(1000.0, **values), NOTHING) for values in odd)
    assert shows_trouble(SampledCondition(1000.0), sums(0, NO_FIGURES, NO_FIGURES, LOST))
