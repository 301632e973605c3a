"""Objectives, the Pareto front, and the grid of choices: text in, one choice out, the same every time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.analyze.whatif.grid import DEFAULT_IN_FORCE, default_grid, parse_grid, scaled
from flowctl.analyze.whatif.recommend import (
    HONEST_TOLERANCE,
    mark_front,
    parse_objective,
    recommend,
    without_gain,
)
from flowctl.core.flow.limits import HardPolicy
from flowctl.errors import ConfigError


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
    pick = recommend(rows, "disconnects<=1% then delay_p95")
    assert pick.row["choice_id"] == 2
    assert pick.kept


def test_recommend_when_no_choice_keeps_the_bound_takes_the_closest_and_says_so():
    pick = recommend([row(0, 0.5), row(1, 0.3), row(2, 0.4)], "disconnects<=1%")
    assert pick.row["choice_id"] == 1
    assert not pick.kept
    assert pick.why.startswith("NO choice")


def test_recommend_when_all_are_equal_leaves_what_is_in_force():
    for objective in ("balanced", "delay_p95", "key_share, memory_peak<=1MiB"):
        assert recommend([row(2), row(1), row(0)], objective).row["choice_id"] == 0


def test_recommend_when_balanced_says_why_against_what_is_in_force():
    rows = [row(0, 0.01, 100.0, 1000), row(1, 0.01, 40.0, 1000), row(2, 0.0095, 100.0, 1000)]
    assert recommend(rows, "balanced").why == (
        "they cut 1.00% of honest viewers (those in force 1.00%), and none of 3 choices cuts more than 0.1 points "
        "less; of the 3 that cut as few they have the least delay, memory and lost key frames, all in all: 20% less "
        "than those in force"
    )
    assert recommend(rows[:1], "balanced").why.endswith("all in all, and are in force already")


def test_recommend_when_balanced_halves_honest_cuts_for_any_delay():
    assert recommend([row(0, 0.2, 100.0), row(1, 0.1, 150.0)], "balanced").row["choice_id"] == 1


def test_recommend_when_there_is_no_gain_changes_nothing():
    rows = [row(0, 0.1, 100.0, 1000), row(1, 0.1, 90.0, 950), row(2, 0.1, 60.0, 1000)]
    assert recommend(rows[:2], "balanced").row is rows[0]
    assert recommend(rows, "balanced").row is rows[2]
    rows = [row(number, cut / 50, honest_disconnected=cut) for number, cut in ((0, 5), (1, 2))]
    pick = recommend(rows, "balanced")
    assert pick.row is rows[1]
    assert without_gain(pick, rows[0], 4) is None
    assert without_gain(pick, rows[0], 5).row is rows[0]
    assert without_gain(pick, rows[0], 5).why.startswith("change nothing: ")


@pytest.mark.parametrize("objective", ["balanced", "memory_peak", "delay_p95<=50ms then memory_peak"])
def test_recommend_when_nobody_was_cut_never_doubles_what_is_left_out(objective):
    present, doubled = row(0, 0.0, 1000.0, 10**6, dropped_share=0.1), row(1, 0.0, 40.0, 10**4, dropped_share=0.21)
    assert recommend([present, doubled], objective).row is present
    assert recommend([present | {"dropped_share": 0.0}, doubled], objective).row["in_force"]
    spares = row(2, 0.0, 45.0, 10**5, dropped_share=0.1)
    assert recommend([present, doubled, spares], objective).row is spares


def tight_and_wider():
    """Return choices around limits that are far too tight: what is in force cuts 9 % of honest viewers, others none."""
    return [
        row(0, 0.09, 300.0, 200_000, key_share=0.97),  # tight limits hold little, and so seem cheap
        row(1, 0.09, 280.0, 150_000, key_share=0.96),
        row(2, 0.0, 2_600.0, 1_400_000, key_share=0.93),
        row(3, 0.0, 2_400.0, 1_900_000, key_share=0.93),
        row(4, 0.0, 2_500.0, 5_800_000, key_share=0.98),
        row(5, 0.03, 900.0, 700_000, key_share=0.95),
    ]


def test_recommend_when_balanced_never_cuts_more_honest_viewers_for_memory_or_delay():
    pick = recommend(tight_and_wider(), "balanced")
    assert pick.row["choice_id"] == 2  # the least memory of the three without cuts; the others gain little by more
    assert pick.why == (
        "they cut 0.00% of honest viewers (those in force 9.00%), and none of 6 choices cuts fewer; of the 3 that cut "
        "as few they have the least delay, memory and lost key frames, all in all"
    )


def test_recommend_when_balanced_for_the_closed_loop_takes_limits_that_cut_nobody_honest():
    rows = tight_and_wider()
    by_hand, by_default = recommend(rows, "honest_disconnects then delay_p95"), recommend(rows, "balanced")
    assert by_hand.row["honest_disconnected_share"] == by_default.row["honest_disconnected_share"] == 0
    assert by_default.row["delay_p95_ms"] <= 1.1 * by_hand.row["delay_p95_ms"]


def test_recommend_when_balanced_and_cuts_differ_by_less_than_the_tolerance_weighs_the_rest():
    rows = [row(0, 0.002, 300.0, 9_000_000), row(1, 0.0, 300.0, 9_000_000), row(2, 0.0008, 30.0, 90_000)]
    assert recommend(rows, "balanced").row["choice_id"] == 2
    rows[0] = row(0, 0.0005, 300.0, 9_000_000)  # but never more than in force
    assert recommend(rows, "balanced").row["choice_id"] == 1


@given(
    shares=st.lists(st.sampled_from([0.0, 0.0005, 0.002, 0.09, 1.0]), min_size=1, max_size=8),
    data=st.data(),
)
def test_recommend_when_balanced_is_at_the_least_of_honest_cuts_whatever_the_rest(shares, data):
    wide = st.floats(0, 1e9)
    rows = [row(number, share, data.draw(wide), data.draw(wide)) for number, share in enumerate(shares)]
    chosen = recommend(rows, "balanced").row["honest_disconnected_share"]
    assert chosen <= min(shares) + HONEST_TOLERANCE
    assert chosen <= shares[0]


def test_front_when_a_choice_is_beaten_in_all_leaves_it_out():
    rows = [row(0, 0.1, 100.0), row(1, 0.2, 100.0), row(2, 0.3, 50.0), row(3, 0.1, 100.0)]
    assert mark_front(rows) == [True, False, True, True]


@pytest.mark.parametrize("text", ["", "speed", "delay_p95<=", "disconnects<=few", "delay_p95 and then memory_peak"])
def test_objective_when_it_is_not_understood_is_an_error(text):
    with pytest.raises(ConfigError, match="objective"):
        parse_objective(text)


def test_grid_when_none_is_given_has_about_fifty_choices_with_the_present_first():
    choices = default_grid(DEFAULT_IN_FORCE)
    assert 45 <= len(choices) <= 55
    assert choices[0] == DEFAULT_IN_FORCE
    assert len(set(choices)) == len(choices)


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
