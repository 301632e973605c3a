"""The plan for a fleet: how many nodes a crowd takes, which streams edges follow, computed by hand beside it."""

from __future__ import annotations

import pandas as pd
import pytest

from flowctl.pipeline.capacity.fleet import FOLLOWER_VIEWERS, nodes_for, plan_of, present_of, words_of


@pytest.mark.parametrize(
    ("viewers", "carries", "headroom", "nodes"),
    [
        (0, 100, 0.2, 0),
        (1, 100, 0.2, 2),  # one would do, and its death would be everybody's
        (100, 100, 0.2, 2),  # 100 / 80 is two; with one dead the other has 100
        (101, 100, 0.2, 3),  # two dead minus one would have 101 for 100
        (800, 100, 0.2, 10),  # headroom decides: 800 / 80, with one dead 800 / 9 is 89
        (800, 100, 0.0, 9),  # N-1 decides: 800 / 100, and one more
        (450, 100, 0.5, 9),
    ],
)
def test_nodes_for_when_asked_keeps_headroom_and_one_spare(viewers, carries, headroom, nodes):
    """The larger of what the headroom and what the death of one takes."""
    assert nodes_for(viewers, carries, headroom) == nodes


def test_nodes_for_when_one_dies_leaves_nobody_without_room():
    """Whatever is asked, the nodes that are left carry all, and all of them keep the headroom."""
    for viewers in (1, 7, 99, 100, 101, 1_234, 99_999):
        for carries in (1, 3, 100, 2_400):
            for headroom in (0.0, 0.2, 0.5, 0.9):
                nodes = nodes_for(viewers, carries, headroom)
                assert viewers <= (nodes - 1) * carries
                assert viewers <= nodes * carries * (1 - headroom) * 1.000001


def test_plan_when_two_origins_carry_all_has_no_edge():
    """A crowd that one node carries takes two origins, so that either may die, and no edge."""
    plan = plan_of(150, 200, 0.2, [0.5, 0.5])
    assert (plan["origins"], plan["edges"], plan["edge_load"], plan["streams_followed"]) == (2, 0, None, 0)
    assert (plan["origin_load"], plan["origin_load_one_down"]) == (0.375, 0.75)


def test_plan_when_a_crowd_needs_edges_follows_what_is_worth_it():
    """910 viewers at 200 a node: 6 edges; a stream of 10 has 1.7 viewers at each and stays at the origins.

    By hand: 910 / 160 is 6 edges. A stream of 900 has 150 viewers at each, one of 10 has 1.7, less than a follower
    costs. An edge that reads one stream has room for 199, so 900 / (199 * 0.8) is 6. Origins serve 10 viewers and 6
    edges: two, so that one may die.
    """
    plan = plan_of(910, 200, 0.2, [900 / 910, 10 / 910])
    assert (plan["edges"], plan["origins"], plan["streams"], plan["streams_followed"]) == (6, 2, 2, 1)
    assert (plan["edge_viewers"], plan["origin_viewers"]) == (900, 16)
    assert (plan["edge_load"], plan["edge_load_one_down"]) == (0.755, 0.905)  # 151 and 181 of 200
    assert (plan["origin_load"], plan["origin_load_one_down"]) == (0.04, 0.08)


def test_plan_when_no_stream_is_worth_following_is_of_origins_alone():
    """A thousand streams of one viewer each: an edge would cost more than it saves."""
    plan = plan_of(1_000, 100, 0.0, [0.001] * 1_000)
    assert (plan["edges"], plan["origins"], plan["edge_viewers"], plan["origin_viewers"]) == (0, 11, 0, 1_000)
    said = " ".join(words_of(plan, SEEN, present_of(nodes_of(100), 1_000)))
    assert "0 edges and 11 origins" in said
    assert "0 of 1000 streams are worth following at edges" in said


def test_plan_when_streams_are_many_leaves_edges_room():
    """However a crowd is spread, what edges read never takes more than half of them, and one of them may die."""
    for streams in (1, 3, 40, 300):
        for viewers in (500, 5_000, 100_000):
            plan = plan_of(viewers, 240, 0.2, [1 / streams] * streams)
            if plan["edges"]:
                assert plan["edge_viewers"] / plan["edges"] > FOLLOWER_VIEWERS * plan["streams_followed"] * 0.5
                assert plan["streams_followed"] < 240 / 2
                assert plan["edge_load"] <= 0.8 + 0.2 * plan["streams_followed"] / 240 + 1e-3
                assert plan["edge_load_one_down"] <= 1.0001
            assert plan["origin_load_one_down"] <= 1.0001


SEEN = {
    "viewers_peak": 9.1,
    "watched_hours": 40.5,
    "recorded_s": 600.0,
    "assumed_share": 0.99,
    "carries_from": "reference",
}


def nodes_of(*carries):
    return pd.DataFrame({"carries_viewers": carries})


def test_present_when_the_largest_dies_is_what_the_others_carry():
    """Of nodes of 1000, 400 and 300 viewers 700 are left when the largest dies."""
    found = {"nodes": 3, "carry_viewers": 1_700, "carry_viewers_one_down": 700}
    assert present_of(nodes_of(400, 1_000, 300), 800) == {**found, "short_viewers": 100}
    assert present_of(nodes_of(400, 1_000, 300), 700) == {**found, "short_viewers": 0}


def test_answer_when_said_begins_with_nodes_and_ends_with_how_sure_it_is():
    """How many and of which kind, what is there, then what was seen and what is assumed."""
    plan = plan_of(910, 200, 0.2, [900 / 910, 10 / 910])
    said = " ".join(words_of(plan, SEEN, present_of(nodes_of(200, 200), 910)))
    assert said.startswith("910 viewers need 6 edges and 2 origins, any one of which may die: origins are 4% full, 8%")
    assert "edges 76% and 90%. 1 of 2 streams are worth following at edges." in said
    assert "Nodes recorded: 2, which carry 400 viewers, with the largest dead 200: 710 viewers short." in said
    assert said.endswith(
        "SEEN: 9.1 viewers at once, 40.5 hours watched in 600 s. ASSUMED: 99.0% of the crowd, to be like them; what a"
        " node carries is from the REFERENCE MACHINE, NOT YOURS."
    )


def test_answer_when_no_node_keeps_what_was_asked_for_says_so():
    """Without a size of a node there is no number of nodes, and none is made up."""
    said = " ".join(words_of(None, SEEN, present_of(nodes_of(None), 910)))
    assert said.startswith("How many nodes is not known: no node keeps what was asked for.")
