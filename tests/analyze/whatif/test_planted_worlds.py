"""The loop is closed over planted worlds: what is advised is set, and what was promised comes."""

from __future__ import annotations

import functools
import math
import random
from typing import NamedTuple

import pytest
from planted_worlds import World, recorded, truth, viewer

from flowctl.analyze.options import WhatifOptions
from flowctl.analyze.whatif.grid import DEFAULT_IN_FORCE, default_grid
from flowctl.analyze.whatif.job import advise, has_room, promised, stream_needs
from flowctl.analyze.whatif.survival import Length, Survival, drawn_again
from flowctl.core.flow.limits import Limits
from flowctl.records.flight.whatif.types import Choice

WORLDS = (
    World("short", lambda chance: chance.expovariate(1 / 1.5) + 0.3, every_s=8, share=0.6),
    World("long", lambda chance: chance.expovariate(1 / 4) + 0.5, every_s=15, share=0.5),
    World("of two lengths", lambda chance: 1.5 if chance.random() < 0.7 else 6.0, every_s=10, share=0.5),
    World("some for good", lambda chance: 2.0 if chance.random() < 0.8 else 1000.0, every_s=10, share=0.5),
    World("slow lines", lambda chance: chance.expovariate(1), every_s=6, share=0.5, rate=1.1),
)
TIGHT = Choice(limits=Limits.parse("256KiB,0,1s", "512KiB,0,2s"))
MIDDLING = Choice(limits=Limits.parse("1MiB,0,2s", "2MiB,0,4s"))
ALL = 10**9
NOW_S = WhatifOptions(budget_s=0.1)


def crowd(world, seed, count=40):
    chance = random.Random(f"{world.name} {seed}")
    return [viewer(world, chance) for _ in range(count)]


def within(row, name, value, slack=0.0):
    return row[f"{name}_low"] * (1 - slack) <= value <= row[f"{name}_high"] * (1 + slack)


class Closed(NamedTuple):
    """What became of advice that was set."""

    kept: dict[str, bool]  # whether each figure came within its range
    known: bool
    fewer: int  # viewers cut
    worse: list[str]


@functools.cache
def closed(world):
    """Close the loop over a world; each of them has a test of its own, for it takes its time."""
    found_all = []
    for number, present in enumerate((TIGHT, MIDDLING, TIGHT, MIDDLING)):
        people = crowd(world, number, 24)
        grid = default_grid(present)[:10:3] + default_grid(present)[7:9]
        found = advise(recorded(people, present), grid, WhatifOptions(), trials=ALL)
        row = found.pick.row
        before, after = truth(people, present), truth(people, grid[row["choice_id"]])
        kept = {
            "disconnected": within(row, "disconnected", after.cut),
            "dropped_share": within(row, "dropped_share", after.dropped_share),
            "delay_p95_ms": within(row, "delay_p95_ms", after.delay_p95_ms, slack=0.13),
        }
        less = after.cut > before.cut or after.missed_share > before.missed_share + 0.01
        less |= after.late_p95_ms > before.late_p95_ms * 1.3
        worse = [f"{number}: {before} -> {after}, {found.pick.why}"] * (found.pick.known and less)
        known = bool(found.pick.known and not row["in_force"])
        found_all.append(Closed(kept, known, before.cut - after.cut, worse))
    return found_all


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_advice_when_it_is_set_in_a_planted_world_makes_nothing_worse(world):
    assert [one.worse for one in closed(world) if one.worse] == []


def test_advice_when_it_is_set_in_planted_worlds_keeps_its_promises():
    loops = [one for world in WORLDS for one in closed(world)]
    for name in loops[0].kept:
        assert sum(one.kept[name] for one in loops) >= 0.9 * len(loops), name
    assert sum(one.known for one in loops) >= 8  # a rule that always said "keep" would keep all its promises
    assert sum(one.fewer for one in loops) >= 50


def test_advice_when_what_is_in_force_cuts_nobody_is_to_keep_it():
    world = WORLDS[4]._replace(every_s=30)
    wide = Choice(limits=Limits.parse("4MiB,0,8s", "8MiB,0,16s"))
    for seed in range(3):
        people = crowd(world, seed)
        found = advise(recorded(people, wide), default_grid(wide), WhatifOptions(), trials=ALL)
        assert found.pick.row["in_force"], found.pick.why
        assert found.pick.why.startswith("keep what is in force")


def test_advice_when_few_were_in_trouble_is_not_known():
    """Three that all gain may be chance; what was drawn again from one differs in nothing."""
    for count in (1, 3):
        people = crowd(WORLDS[0]._replace(share=1.0), 0, count)
        found = advise(recorded(people, TIGHT), default_grid(TIGHT)[:3], WhatifOptions(), trials=ALL)
        assert (found.pick.row["in_force"], found.pick.known) == (True, False)
        assert f"{count} of {count} recorded viewers in trouble" in found.pick.why


def test_cuts_of_what_is_in_force_when_recorded_under_it_are_counted_and_else_a_range():
    """An hour after the limits were changed, nobody was recorded under them."""
    people = crowd(WORLDS[1], 2)
    for present in (TIGHT, MIDDLING):
        rows = advise(recorded(people, TIGHT), [present, TIGHT], NOW_S, trials=ALL).rows
        cut = truth(people, present).cut
        assert ({rows[0]["disconnected_low"], rows[0]["disconnected_high"]} == {cut}) == (present == TIGHT)
        assert within(rows[0], "disconnected", cut)
    assert advise(recorded(people, TIGHT), [TIGHT], NOW_S, trials=1).rows[0]["disconnected"] == truth(people, TIGHT).cut


def test_figures_of_equal_choices_when_one_is_in_force_are_equal_but_for_cuts():
    """What is advised is told beside what is in force: by the same trials."""
    same = Choice(limits=TIGHT.limits, soft_too_long_s=59.0)
    one, other = advise(recorded(crowd(WORLDS[1], 2), TIGHT), [TIGHT, same], NOW_S, trials=ALL).rows
    for name in ("delay_p95_ms", "dropped_share", "missed_share", "join_ms", "memory_peak_bytes"):
        assert one[name] == other[name], name


def test_limits_when_off_promise_no_delay_without_end():
    off = Choice(limits=Limits.parse("0,0,0", "0,0,0"), stuck_s=0.0)
    rows = advise(recorded(crowd(WORLDS[1], 2), TIGHT), [TIGHT, off], NOW_S, trials=ALL).rows
    assert rows[1]["delay_p95_ms_high"] <= 1000 * WhatifOptions().extend_s


def test_advice_when_no_stall_of_such_length_ever_ended_is_to_widen_and_look():
    world = World("each of six seconds", lambda _: 6.0, every_s=10, share=0.5)
    found = advise(recorded(crowd(world, 0), TIGHT), default_grid(TIGHT), WhatifOptions(), trials=ALL)
    row = found.pick.row
    assert not found.pick.known
    assert "widen the limits to these for an hour" in found.pick.why
    assert (row["disconnected_low"], row["in_force"]) == (0, False)
    assert row["disconnected_high"] >= found.rows[0]["disconnected"] - 1
    # An hour later stalls of that length were seen to end, and how many come back is known.
    wide = next(one for one in default_grid(TIGHT) if str(one) == row["choice"])
    people = crowd(world, 1)
    looked = advise(recorded(people, wide), [wide, TIGHT], WhatifOptions(), trials=ALL)
    assert within(looked.rows[1], "disconnected", truth(people, TIGHT).cut)


def test_advice_when_lines_are_dead_for_good_stops_to_widen_when_nobody_would_have_waited():
    """Else each hour would ask for wider limits than the last, which keep the dead for minutes and all they queue."""
    world = World("dead", lambda _: 1e9, every_s=20, share=0.4)
    present, rounds = MIDDLING, 0
    while True:
        chance = random.Random(f"dead {rounds}")
        people = [viewer(world, chance, seconds=120.0) for _ in range(24)]
        found = advise(recorded(people, present), default_grid(present), WhatifOptions(), trials=ALL)
        if found.pick.row["in_force"]:
            break
        rounds += 1
        present = default_grid(present)[found.pick.row["choice_id"]]
        assert rounds <= 4, present
    assert found.pick.known
    assert found.rows[0]["disconnected"] > 0
    assert present.limits.age_ms.hard <= 60_000
    assert rounds >= 1  # up to there, nobody knows


def test_advice_when_time_is_short_is_of_whom_it_tried_and_says_how_far_off_it_may_be():
    people = crowd(WORLDS[0], 0)
    seen = recorded(people, TIGHT)
    few, again, all_ = (advise(seen, [TIGHT, MIDDLING], NOW_S, trials=count) for count in (6, 6, ALL))
    assert few.rows == again.rows
    assert (few.made, few.tried) == (6, 6)
    assert all_.made == all_.wanted > 20
    spans = [one.rows[1]["disconnected_high"] - one.rows[1]["disconnected_low"] for one in (few, all_)]
    assert spans[0] > spans[1]
    assert within(few.rows[1], "disconnected", truth(people, MIDDLING).cut)
    timed = advise(seen, [TIGHT, MIDDLING], NOW_S)
    assert 1 <= timed.made <= timed.wanted
    assert f"of {len(people)} cut" in promised(timed.rows[1])


def test_room_when_a_hard_mark_holds_less_than_its_wait_is_never_advised():
    needs = stream_needs(recorded(crowd(WORLDS[4], 0, 3), TIGHT))
    assert needs[0] == pytest.approx(20_000, rel=0.1)
    assert has_room(DEFAULT_IN_FORCE, needs)
    least = math.ceil(needs[0] * 1.5 / 0.8) + 100 * 60
    for size, enough in ((least, True), (least // 2, False)):
        assert has_room(Choice(limits=Limits.parse(f"{size // 2},0,8s", f"{size},0,16s")), needs) is enough
    assert has_room(Choice(limits=Limits.parse("1,0", "2,0", target_delay_ms=0)), needs)


def test_survival_when_lengths_were_cut_short_is_that_of_kaplan_and_meier():
    lengths = [Length(1, whole=True), Length(2, whole=False), Length(3, whole=True), Length(4, whole=False)]
    known = Survival(lengths)  # 3/4 are longer than 1, 3/8 longer than 3, and of longer ones nothing is known
    assert known.longest == 3
    assert known.rest(0.0, 0.9) == 1
    assert known.rest(0.0, 0.5) == 3
    assert known.rest(0.0, 0.3) is None
    assert known.rest(2.5, 0.6) == 0.5
    assert known.rest(2.5, 0.4) is None
    assert known.rest(3.0, 0.5) is None
    assert Survival([]).rest(1.0, 0.5) is None
    assert drawn_again([], 3).longest == 0


def test_survival_when_tight_limits_cut_half_of_the_stalls_finds_the_share_that_is_longer():
    chance = random.Random(4)
    whole = [chance.expovariate(1 / 3) for _ in range(4000)]
    patience = [chance.uniform(1, 8) for _ in whole]
    known = Survival([Length(min(a, b), a <= b) for a, b in zip(whole, patience, strict=True)])
    rests = [known.rest(2.0, chance.random()) for _ in range(4000)]
    longer = sum(rest is None or rest > 3.0 for rest in rests) / len(rests)
    assert longer == pytest.approx(math.exp(-1), abs=0.05)
