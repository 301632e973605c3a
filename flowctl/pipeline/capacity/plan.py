"""How many origins and edges a crowd takes, and whether the nodes that are there would do (pure).

A fleet has two kinds of node. *Origins* take the publishers' streams; *edges* fetch streams from origins and serve
viewers. One node of either kind may die at any time (N-1): what is left must carry all viewers within the busy share
that was asked for, and while all live, a share of each is kept free (`headroom`). So `v` viewers on nodes that carry
`c` each take::

    max(ceil(v / (c * (1 - headroom))), ceil(v / c) + 1)

A stream at an edge is not free: the origin serves one more viewer, the edge itself, and the edge has to read it, which
is taken for another viewer's cost (`FOLLOWER_VIEWERS`). It is *worth following* where more viewers than that watch it
at one edge; viewers of other streams are cheaper at the origins. Where two origins, which there must be, carry all
viewers by themselves with one dead, there are no edges.

What is assumed: that the wanted crowd shares its streams as the recorded crowd did at its peak, that edges get equal
shares, and that all nodes carry what the model says of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

FOLLOWER_VIEWERS: Final = 2.0
"""What it costs to have a stream at an edge, in viewers: one at the origin, and one at the edge for reading it."""
LEAST_ORIGINS: Final = 2
"""With one origin its death would be everybody's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlan:
    """Nodes for a crowd.

    Args:
        viewers: of the crowd.
        carries_viewers: that one node carries at the busy share that was asked for.
        origins: nodes that take publishers and serve edges.
        edges: nodes that serve viewers of streams worth following; 0: the origins carry all.
        streams: watched at the recorded peak.
        streams_followed: of them worth following at each edge.
        edge_viewers: viewers of these.
        origin_viewers: the rest, which the origins serve, and a viewer per edge and followed stream.
        edge_load: of what an edge carries, the share in use while all live. None: there are no edges.
        edge_load_one_down: the same while one is dead.
        origin_load: of what an origin carries, the share in use while all live.
        origin_load_one_down: the same while one is dead.
    """

    viewers: int
    carries_viewers: int
    origins: int
    edges: int
    streams: int
    streams_followed: int
    edge_viewers: int
    origin_viewers: int
    edge_load: float | None
    edge_load_one_down: float | None
    origin_load: float
    origin_load_one_down: float

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON takes them."""
        return asdict(self)


def nodes_for(viewers: float, carries: float, headroom: float) -> int:
    """Return how many nodes serve `viewers` with `headroom` kept free, and without it when one has died; 0 for 0."""
    if viewers <= 0:
        return 0
    return max(math.ceil(viewers / (carries * (1 - headroom))), math.ceil(viewers / carries) + 1)


def plan_of(viewers: int, carries: int, headroom: float, shares: Sequence[float]) -> FleetPlan:
    """Return the nodes that a crowd takes.

    Args:
        viewers: 1 and more.
        carries: viewers that one node carries, 1 and more.
        headroom: share of each node that is kept free while all live, 0 to less than 1.
        shares: of the recorded viewers at their peak, by stream; together at most 1. What is missing to 1 is of streams
            that are too small to be listed, and not followed.
    """
    if nodes_for(viewers, carries, headroom) <= LEAST_ORIGINS:
        return _planned(viewers, carries, LEAST_ORIGINS, 0, shares, [], 0, viewers)
    edges = nodes_for(viewers, carries, headroom)
    followed = [share for share in shares if viewers * share / edges > FOLLOWER_VIEWERS]
    edge_viewers = min(viewers, math.ceil(round(viewers * sum(followed), 6)))
    # What an edge reads is taken from what it carries; each followed stream has more viewers there than it costs, so
    # that never takes more than half of it.
    room = carries - len(followed)
    edges = nodes_for(edge_viewers, room, headroom)
    origin_viewers = viewers - edge_viewers + edges * len(followed)
    origins = max(LEAST_ORIGINS, nodes_for(origin_viewers, carries, headroom))
    return _planned(viewers, carries, origins, edges, shares, followed, edge_viewers, origin_viewers)


def _planned(
    viewers: int,
    carries: int,
    origins: int,
    edges: int,
    shares: Sequence[float],
    followed: Sequence[float],
    edge_viewers: int,
    origin_viewers: int,
) -> FleetPlan:
    def edge_load(nodes: int) -> float | None:
        return None if not edges else round((edge_viewers / nodes + len(followed)) / carries, 4)

    return FleetPlan(
        viewers=viewers,
        carries_viewers=carries,
        origins=origins,
        edges=edges,
        streams=len(shares),
        streams_followed=len(followed),
        edge_viewers=edge_viewers,
        origin_viewers=origin_viewers,
        edge_load=edge_load(edges),
        edge_load_one_down=edge_load(edges - 1),
        origin_load=round(origin_viewers / origins / carries, 4),
        origin_load_one_down=round(origin_viewers / (origins - 1) / carries, 4),
    )


def present_of(nodes: Sequence[Mapping[str, Any]], viewers: int) -> dict[str, Any]:
    """Return what the recorded nodes carry together, and whether that is enough for `viewers` when the largest dies.

    Args:
        nodes: rows of ``capacity_nodes``; at least one.
        viewers: wanted.
    """
    carried = sorted(int(node["carries_viewers"]) for node in nodes if node["carries_viewers"] is not None)
    if not carried:
        return {"nodes": len(nodes)}
    one_down = sum(carried[:-1])
    fullest = max(nodes, key=lambda node: (node["load_peak"], node["node"]))
    return {
        "nodes": len(nodes),
        "carry_viewers": sum(carried),
        "carry_viewers_one_down": one_down,
        "enough_with_one_down": one_down >= viewers,
        "short_viewers": max(0, viewers - one_down),
        "fullest_node": fullest["node"],
        "fullest_load": round(fullest["load_peak"], 4),
    }


def answer_of(
    plan: FleetPlan | None, seen: Mapping[str, Any], present: Mapping[str, Any], places: Sequence[Mapping[str, Any]]
) -> str:
    """Return the answer for a fleet in words: how many and of which kind, where, what is there, how sure that is.

    Args:
        plan: None: no size of a node keeps what was asked for.
        seen: `viewers_recorded`, `viewers_peak`, `recorded_s`, `assumed_share`, `carries_from`.
        present: of `present_of`.
        places: rows of ``capacity_places``, the largest first.
    """
    said = [_nodes_text(plan), *_place_texts(plan, places)]
    if plan is not None:
        fullest = f"{present['fullest_node']} was the fullest at {present['fullest_load']:.0%} of what it carries"
        enough = "enough" if present["enough_with_one_down"] else f"{present['short_viewers']} viewers short"
        said.append(
            f"The {present['nodes']} recorded {'node' if present['nodes'] == 1 else 'nodes'} carry"
            f" {present['carry_viewers']} viewers, {present['carry_viewers_one_down']} with the largest dead: {enough};"
            f" {fullest}."
        )
    said.append(
        f"SEEN: {seen['viewers_recorded']} viewers in {seen['recorded_s']:.0f} s, {seen['viewers_peak']:g} at once."
        f" ASSUMED: {seen['assumed_share']:.1%} of the crowd, to be like them; what a node carries is from"
        f" {_FROM[str(seen['carries_from'])]}."
    )
    return " ".join(said)


_FROM: Final = {
    "records": "these records",
    "measurements": "the measurements given",
    "reference": "the REFERENCE MACHINE, NOT YOURS",
}


def _nodes_text(plan: FleetPlan | None) -> str:
    if plan is None:
        return "How many nodes is not known: no size of a node that was tried keeps what was asked for."
    if not plan.edges:
        why = "" if plan.origins == LEAST_ORIGINS else " (no stream has viewers enough to be worth following)"
        return (
            f"{plan.viewers} viewers need {plan.origins} origins and no edge{why}, any one of which may die: they are"
            f" {plan.origin_load:.0%} full, {plan.origin_load_one_down:.0%} with one dead."
        )
    return (
        f"{plan.viewers} viewers need {plan.edges} edges and {plan.origins} origins, any one of which may die: edges"
        f" are {plan.edge_load:.0%} full, {plan.edge_load_one_down:.0%} with one dead; origins {plan.origin_load:.0%}"
        f" and {plan.origin_load_one_down:.0%}. Edges follow {plan.streams_followed} of {plan.streams} streams, with"
        f" {plan.edge_viewers} viewers"
        f"{'' if plan.streams_followed == plan.streams else '; the others have too few per edge to be worth it'}."
    )


_MOST_PLACES_TOLD: Final = 3


def _place_texts(plan: FleetPlan | None, places: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return where edges go, as far as the records tell."""
    known = [place for place in places if place["place_from"] != "unknown"]
    if plan is None or not plan.edges:
        return []
    own = [place for place in known if place["own_edges"]]
    if not own:
        return ["Where: no network or region fills an edge by itself."]
    told = ", ".join(f"{place['own_edges']} at {place['place']}" for place in own[:_MOST_PLACES_TOLD])
    more = len(own) - _MOST_PLACES_TOLD
    regions = any(place["place_from"] == "region" for place in known)
    hint = "" if regions else " Records know networks, not where these are: name them with --regions."
    return [f"Where: {told}{f', and {more} more places' if more > 0 else ''}; the rest anywhere.{hint}"]
