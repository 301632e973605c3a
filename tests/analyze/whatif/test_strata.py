"""Who is tried, what each counts for, and how far off shares are: against crowds of which everything is known."""

from __future__ import annotations

import math
import random

import pandas as pd
import pytest

from flowctl.analyze.whatif.trials import CALM, CUT, PEAK, TROUBLED, Stratum, drawn, errors, weighted

COST_S = 40.0


def crowd(calm, cut, troubled, seed=0):
    chance = random.Random(seed)
    kinds = ["calm"] * calm + ["cut"] * cut + ["slow"] * troubled
    chance.shuffle(kinds)
    rows = [
        {
            "picked": chance.getrandbits(63) - (1 << 62),
            "node": "n",
            "conn_id": number,
            "at": 0,
            "ended_us": 0 if kind == "calm" else round(COST_S * 1e6),
            "close_reason": "stuck" if kind == "cut" else "peer closed",
        }
        for number, kind in enumerate(kinds)
    ]
    return pd.DataFrame(rows), kinds


def test_drawn_when_trouble_is_long_bounds_the_seconds_and_takes_the_smallest_hashes():
    heads, kinds = crowd(500, 40, 60)
    found, strata = drawn(heads, 30.0, 700.0)
    assert strata == {CALM: Stratum(500, 500), CUT: Stratum(40, 5), TROUBLED: Stratum(60, 8)}
    for stratum, kind in ((CUT, "cut"), (TROUBLED, "slow")):
        least = heads[[one == kind for one in kinds]]["picked"].nsmallest(strata[stratum].tried)
        assert set(found[found["stratum"] == stratum]["picked"]) == set(least)
    assert {name: part.tried for name, part in drawn(heads, 30.0, 1.0)[1].items()} == {CALM: 500, CUT: 2, TROUBLED: 2}
    assert all(part.size == part.tried for part in drawn(heads, 30.0, math.inf)[1].values())


def test_weighted_when_part_was_tried_counts_for_all():
    sums = {CALM: {(0, "viewers"): 90}, CUT: {(0, "viewers"): 2, (0, "disconnected"): 1, (0, PEAK): 7}}
    strata = {CALM: Stratum(90, 90), CUT: Stratum(10, 2)}
    assert weighted(sums, strata) == {(0, "viewers"): 100, (0, "disconnected"): 5, (0, PEAK): 7}


@pytest.mark.parametrize(("cut_by_new", "new_cuts"), [(0.1, 0.02), (0.5, 0.3), (0.9, 0.0)])
def test_errors_when_a_full_trial_is_known_cover_it(cut_by_new, new_cuts):
    calm, cut, troubled, missed, mean_error = 1800, 90, 110, [0, 0], 0.0
    chance = random.Random(7)
    by_new = {CUT: [chance.random() < cut_by_new for _ in range(cut)]}
    by_new[TROUBLED] = [chance.random() < new_cuts for _ in range(troubled)]
    total, rounds = calm + cut + troubled, 600
    truth = sum(map(sum, by_new.values())) / total
    for _ in range(rounds):
        sums = {CALM: {(-1, "viewers"): calm}}
        strata = {CALM: Stratum(calm, calm), CUT: Stratum(cut, 4), TROUBLED: Stratum(troubled, 4)}
        for stratum, was_cut in ((CUT, True), (TROUBLED, False)):
            found = chance.sample(by_new[stratum], 4)
            sums[stratum] = {
                (0, "viewers"): 4, (1, "viewers"): 4, (0, "disconnected"): 4 * was_cut,
                (1, "disconnected"): sum(found), (1, "saved"): sum(was_cut and not one for one in found),
                (1, "lost"): sum(one and not was_cut for one in found),
            }  # fmt: skip
        share = weighted(sums, strata).get((1, "disconnected"), 0) / total
        of_recorded, of_change = errors(1, sums, strata, total)
        missed[0] += abs(share - truth) > 2 * of_recorded
        missed[1] += abs((share - cut / total) - (truth - cut / total)) > 2 * of_change
        mean_error += of_recorded / rounds
    assert max(missed) <= rounds / 10
    at_random = 0.5 / math.sqrt(143)  # which had 13 in trouble, and twice the seconds
    assert mean_error < at_random / 2


def test_errors_when_all_were_tried_are_of_chance_alone():
    sums = {CUT: {(0, "viewers"): 400, (1, "viewers"): 400, (1, "saved"): 6}}
    of_recorded, of_change = errors(1, sums, {CUT: Stratum(400, 400)}, 400)
    assert of_recorded == 0
    assert 6 / 400 / of_change == pytest.approx(math.sqrt(6), rel=0.01)
