"""Objectives, the Pareto front, and the grid of choices: text in, one choice out, the same every time."""

from __future__ import annotations

import pytest

from flowctl.analyze.whatif.estimates import JUDGED, Estimate
from flowctl.analyze.whatif.grid import DEFAULT_IN_FORCE, default_grid, parse_grid, scaled
from flowctl.analyze.whatif.recommend import (
    mark_front,
    parse_objective,
    recommend,
)
from flowctl.core.flow.limits import HardPolicy, Limits
from flowctl.errors import ConfigError
from flowctl.live.config import LiveConfig
from flowctl.records.flight.whatif.types import Choice


def row(number, disconnects=0.0, delay=100.0, memory=1000, **columns):
    figures = {
        "choice_id": number,
        "in_force": number == 0,
        "disconnected_share": disconnects,
        "honest_disconnected_share": disconnects,
        "memory_peak_bytes": memory,
        "memory_mean_bytes": memory / 2,
        "dropped_share": 0.1,
        "stall_share": 0.0,
        "key_share": 0.9,
    }
    delays = {f"delay_{name}_ms": delay for name in ("p50", "p95", "p99", "max")}
    return {**figures, **delays, **columns}


def test_recommend_when_a_bound_is_given_orders_what_keeps_it():
    rows = [row(0, 0.05, 10.0), row(1, 0.01, 300.0), row(2, 0.005, 200.0)]
    pick = recommend(rows, [], "disconnects<=1% then delay_p95", 20)
    assert pick.row["choice_id"] == 2
    assert pick.kept


def test_recommend_when_no_choice_keeps_the_bound_takes_the_closest_and_says_so():
    pick = recommend([row(0, 0.5), row(1, 0.3), row(2, 0.4)], [], "disconnects<=1%", 20)
    assert pick.row["choice_id"] == 1
    assert not pick.kept
    assert pick.why.startswith("NO choice")


def estimate(low, high=None, on_time=(False, False)):
    """Return what a choice changes at both ends, each (change, error) by measure; what is not named does not change."""
    still = dict.fromkeys(JUDGED, (0.0, 0.0))
    return Estimate({}, *[(0.0, 0.0)] * 4, (still | low, still | (low if high is None else high)), on_time)


PRESENT = row(0), estimate({})


def advice(*others):
    rows, found = zip(PRESENT, *others, strict=True)
    return recommend(rows, found, "balanced", 20)


def test_recommend_when_nothing_gains_more_than_its_error_keeps_what_is_in_force():
    pick = advice((row(1, memory=1), estimate({})), (row(2), estimate({"cut": (-0.1, 0.2), "delay": (-0.05, 0.0)})))
    assert (pick.row["choice_id"], pick.known) == (0, True)
    assert pick.why.startswith("keep what is in force: ")
    assert recommend([row(0)], [PRESENT[1]], "balanced", 20).row["in_force"]


@pytest.mark.parametrize("name", JUDGED)
def test_recommend_when_anything_gets_worse_at_either_end_advises_another(name):
    much = {"cut": (-0.5, 0.1), "missed": (-0.3, 0.1)}
    worse = much | {name: (0.2, 0.3)}
    for ends in ((worse, much), (much, worse), (worse, worse)):
        assert advice((row(1), estimate(*ends))).row["in_force"]
    assert advice((row(1), estimate(worse)), (row(2), estimate({"cut": (-0.2, 0.1)}))).row["choice_id"] == 2


def test_recommend_when_fewer_are_cut_for_a_delay_within_the_target_advises_it():
    """What arrives in the target delay is on time for the server too; for pictures alone nobody pays with delay."""
    fewer, later = {"cut": (-0.3, 0.1)}, {"late": (0.4, 0.2), "delay": (0.5, 0.2)}
    ends = (fewer, later | {"missed": (-0.04, 0.02)})
    assert not advice((row(1), estimate(*ends, on_time=(False, True)))).known
    assert not advice((row(1), estimate(*ends))).known  # a look for an hour costs no more than that
    assert advice((row(1), estimate(fewer | later, on_time=(True, True)))).row["choice_id"] == 1
    assert advice((row(1), estimate(fewer | later))).row["in_force"]
    assert advice((row(1), estimate(ends[1], on_time=(True, True)))).row["in_force"]


def test_recommend_when_several_gain_takes_fewest_cut_then_least_missed_and_memory_last():
    better = {"cut": (-0.2, 0.05), "missed": (-0.1, 0.01)}
    rows = [(row(1), estimate({"cut": (-0.3, 0.05)})), (row(2), estimate(better))]
    assert advice(*rows).row["choice_id"] == 1
    rows = [(row(1), estimate({"cut": (-0.2, 0.05)})), (row(2, memory=9000), estimate(better))]
    assert advice(*rows).row["choice_id"] == 2
    rows = [(row(1, memory=9000), estimate(better)), (row(2, memory=100), estimate(better))]
    assert advice(*rows).row["choice_id"] == 2
    assert "better in honest viewers cut and pictures and sound missed" in advice(*rows).why


def test_recommend_when_only_what_nobody_has_seen_would_tell_says_to_widen_and_look():
    unsure = row(1), estimate({"cut": (-0.5, 0.1)}, {"delay": (-0.2, 0.1)})
    pick = advice(unsure)
    assert (pick.row["choice_id"], pick.known) == (1, False)
    assert pick.why.startswith("not known: ")
    assert advice(unsure, (row(2), estimate({"cut": (-0.1, 0.05)}))).row["choice_id"] == 2


def test_front_when_a_choice_is_beaten_in_all_leaves_it_out():
    rows = [row(0, 0.1, 100.0), row(1, 0.2, 100.0), row(2, 0.3, 50.0), row(3, 0.1, 100.0)]
    assert mark_front(rows) == [True, False, True, True]


@pytest.mark.parametrize("text", ["", "speed", "delay_p95<=", "disconnects<=few", "delay_p95 and then memory_peak"])
def test_objective_when_it_is_not_understood_is_an_error(text):
    with pytest.raises(ConfigError, match="objective"):
        parse_objective(text)


def test_grid_when_none_is_given_has_the_defaults_and_what_is_much_wider():
    tight = Choice(limits=Limits.parse("256KiB,0,1s", "512KiB,0,2s"), stuck_s=5.0)
    choices = default_grid(tight)
    assert choices[0] == tight
    assert DEFAULT_IN_FORCE in choices
    assert 15 <= len(choices) == len(set(choices)) <= 20
    assert {choice.limits.age_ms.hard for choice in choices} >= {2_000, 4_000, 8_000}
    assert {choice.stuck_s for choice in choices} >= {5.0, 15.0, 20.0, 30.0}
    assert DEFAULT_IN_FORCE.limits == LiveConfig().limits


def test_grid_when_read_from_a_file_is_every_combination():
    text = 'soft = ["1MiB,1024,2s", "2MiB,2048"]\nhard = ["3x"]\ntarget_delay = ["auto", "off"]\nhard_policy = "hold"\n'
    choices = parse_grid(text, "g.toml", DEFAULT_IN_FORCE)
    assert len(choices) == 5
    assert {3 * 1024, 3 * 2048} == {choice.limits.messages.hard for choice in choices[1:]}
    assert {HardPolicy.HOLD} == {choice.limits.hard_policy for choice in choices[1:]}


def test_grid_when_it_has_sets_tries_each_and_the_stream_as_it_was():
    text = 'renditions = ["", "2.5M, 500k", "1.2M"]\ntarget_delay = "off"\n'
    found = [choice.renditions for choice in parse_grid(text, "g.toml", DEFAULT_IN_FORCE)]
    assert found == [(), (), (500_000, 2_500_000), (1_200_000,)]
    assert "renditions of 500 kbit/s and 2.50 Mbit/s" in str(parse_grid(text, "g.toml", DEFAULT_IN_FORCE)[2])


@pytest.mark.parametrize(
    "text",
    [
        "soft = 3",
        'renditions = ["big"]',
        'renditions = ["1M,1M"]',
        "softer = []",
        'hard = ["0x"]',
        'policy = ["fast"]',
        "stuck_s = [-1]",
        "stuck_s = []",
        "=",
        "",
    ],
)
def test_grid_when_it_is_wrong_names_the_file(text):
    if not text:
        assert parse_grid(text, "g.toml", DEFAULT_IN_FORCE) == [DEFAULT_IN_FORCE]
        return
    with pytest.raises(ConfigError, match=r"^g\.toml: "):
        parse_grid(text, "g.toml", DEFAULT_IN_FORCE)


def test_scaled_when_marks_are_tiny_keeps_their_order():
    limits = scaled(DEFAULT_IN_FORCE.limits, load=0.001, age=0.001)
    for axis in (limits.size, limits.messages, limits.age_ms):
        assert axis.low < axis.soft <= axis.hard
