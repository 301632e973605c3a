"""Figures of a load run: percentiles, scopes, and what they are made of."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_kit import some_run, viewer

from flowctl.load.results.figures import FIGURES, RunFigures, format_value, in_scope, quantile, weighted_quantiles
from flowctl.load.results.result import PeerKind


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.floats(0.001, 1))
@settings(max_examples=300, deadline=None)
def test_quantile_when_taken_is_the_smallest_that_covers_the_share(values, share):
    ordered = sorted(values)
    found = quantile(ordered, share)
    covered = sum(value <= found for value in ordered)
    assert found in ordered
    assert covered >= share * len(ordered) - 1e-6
    below = [value for value in ordered if value < found]
    assert not below or sum(value <= below[-1] for value in ordered) < share * len(ordered) + 1e-6


@given(st.lists(st.tuples(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 5)), max_size=5))
@settings(max_examples=200, deadline=None)
def test_weighted_quantiles_when_taken_are_those_of_the_repeated_values(samples):
    shares = (0.25, 0.5, 0.75, 1.0)
    repeated = sorted(value for values, weight in samples for value in values * weight)
    expected = [quantile(repeated, share) for share in shares] if repeated else []
    assert expected == weighted_quantiles(samples, shares)


def test_quantile_when_there_is_nothing_is_none():
    assert quantile([], 0.5) is None
    assert weighted_quantiles([([], 1.0)], (0.5,)) == []


@pytest.mark.parametrize(
    ("scope", "profiles"),
    [
        ("healthy", {"healthy"}),
        ("slow", {"slow@1M", "stall@2s"}),
        ("slow@1M", {"slow@1M"}),
        ("stall", {"stall@2s"}),
        ("viewers", {"healthy", "churn@3s", "slow@1M", "stall@2s"}),
        ("all", {"healthy", "churn@3s", "slow@1M", "stall@2s", "B04", "publisher"}),
        ("hostile", {"B04"}),
        ("b04", {"B04"}),
        ("nobody", set()),
    ],
)
def test_scope_when_named_means_these_profiles(scope, profiles):
    kinds = {
        "healthy": PeerKind.HEALTHY,
        "churn@3s": PeerKind.HEALTHY,
        "slow@1M": PeerKind.SLOW,
        "stall@2s": PeerKind.SLOW,
        "B04": PeerKind.HOSTILE,
        "publisher": PeerKind.PUBLISHER,
    }
    assert profiles == {name for name, kind in kinds.items() if in_scope(scope, name, kind, kinds)}


def test_figures_when_taken_of_a_known_run():
    figures = RunFigures(some_run())
    assert figures.value("connections") == 50
    assert figures.value("connections", "all") == 53
    assert figures.value("cut") == 4
    assert figures.value("cut_share", "stall") == 1.0
    assert figures.value("missing", "slow@200k") == sum(300 + number + 10 for number in range(40, 46))
    assert figures.value("connect_max_ms", "healthy") == pytest.approx(1 + 0.01 * 39)
    assert figures.value("max_ms", "healthy") == 99.0
    assert figures.value("rss_growth_kb") == pytest.approx((60_300_000 - 59_000_000) / 1000)
    assert figures.value("rss_kb_per_viewer") == pytest.approx(1300 / 50)
    assert figures.value("server_cpu_percent") == 14.0
    assert figures.value("missing", "B04") is None


def test_cut_when_some_cannot_tell_is_of_the_others():
    peers = [
        viewer(0, "stall", PeerKind.SLOW, cut=True),
        viewer(1, "healthy", PeerKind.HEALTHY),
        viewer(2, "vanish", PeerKind.SLOW, cut=None),
        viewer(3, "vanish", PeerKind.SLOW, cut=None),
    ]
    figures = RunFigures(some_run(peers=peers))
    assert (figures.value("cut"), figures.value("cut_share")) == (1.0, 0.5)
    assert (figures.value("cut", "slow"), figures.value("cut_share", "slow")) == (1.0, 1.0)
    assert (figures.value("cut", "vanish"), figures.value("cut_share", "vanish")) == (None, None)


def test_rate_when_peers_were_there_for_less_than_a_second_is_not_measured():
    peers = [viewer(0, "half-close", PeerKind.SLOW, started_s=1.0, ended_s=1.01)]
    peers.append(viewer(1, "healthy", PeerKind.HEALTHY, started_s=1.0, ended_s=2.0, wire_bytes=125_000))
    figures = RunFigures(some_run(peers=peers))
    assert figures.value("kbit_s", "half-close") is None
    assert figures.value("kbit_s", "healthy") == pytest.approx(1000.0)


def test_processor_time_when_viewers_stay_for_different_times():
    peers = [
        viewer(0, "healthy", PeerKind.HEALTHY, started_s=0.0, ended_s=10.0),
        viewer(1, "healthy", PeerKind.HEALTHY, started_s=5.0, ended_s=None),
        viewer(2, "healthy", PeerKind.HEALTHY, connect_s=None, ended_s=30.0),
        viewer(3, "B04", PeerKind.HOSTILE, started_s=0.0, ended_s=30.0),
    ]
    figures = RunFigures(some_run(peers=peers, server_cpu_s=0.7, duration_s=30.0))
    assert figures.value("cpu_us_per_viewer_s") == pytest.approx(0.7e6 / (10 + 25))


def test_delay_when_profiles_have_unequal_numbers_of_frames():
    peers = [
        viewer(0, "healthy", PeerKind.HEALTHY, delays=9900),
        viewer(1, "slow@1M", PeerKind.SLOW, delays=100),
    ]
    run = some_run(peers=peers, delays_ms={"healthy": [10.0] * 100, "slow@1M": [1000.0] * 100})
    figures = RunFigures(run)
    assert figures.value("p95_ms") == 10.0
    assert figures.value("p99_ms") == 10.0
    assert figures.value("p95_ms", "slow") == 1000.0


@pytest.mark.parametrize("name", FIGURES)
def test_figures_when_listed_are_of_one_kind_and_named_by_their_unit(name):
    figure = FIGURES[name]
    assert (figure.of_crowd is None) is not (figure.of_run is None)
    if figure.unit in {"ms", "s", "us"}:
        assert f"_{figure.unit}" in name or name == "cpu_us_per_viewer_s"
    assert figure.meaning


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (None, "ms", "-"),
        (12.34, "ms", "12.3 ms"),
        (0.0123, "share", "1.23%"),
        (1.0, "share", "100.0%"),
        (1234.0, "count", "1,234"),
        (26_000.0, "kB", "26.0 MB"),
        (7.25, "kB", "7.2 kB"),
        (99.6, "percent", "100 %"),
        (math.pi, "s", "3.1 s"),
    ],
)
def test_value_when_shown_has_its_unit(value, unit, shown):
    assert format_value(value, unit) == shown
