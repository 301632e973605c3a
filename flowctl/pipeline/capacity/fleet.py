"""How many nodes a crowd takes with any one of them dead, and what the recorded ones carry.

Theory of operation. *Origins* take the publishers' streams, *edges* fetch them and serve viewers. `v` viewers on nodes
that carry `c` take ``max(ceil(v / (c * (1 - headroom))), ceil(v / c) + 1)`` of a kind: any one may die. A stream at an
edge costs `FOLLOWER_VIEWERS`; it is worth following where more watch it there. Assumed is that the wanted crowd shares
its streams as the recorded one did, that edges get equal shares, and that all nodes carry what the model says of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pandas as pd

from flowctl.pipeline.capacity.loads import WINDOW_S
from flowctl.pipeline.capacity.node import Measurement

FOLLOWER_VIEWERS: Final = 2.0
"""What a stream at an edge costs, in viewers: one at the origin, and one at the edge for reading it."""
LEAST_ORIGINS: Final = 2
"""With one origin its death would be everybody's."""
Plan = dict[str, Any]
Carries = tuple[int | None, str, bool]
"""Viewers that a node carries, from what that is known, and whether it may be more."""

NODE_COLUMNS: Final[dict[str, str]] = {
    "node": "string", "carries_viewers": "bigint", "carries_from": "string", "carries_at_least": "boolean",
    **dict.fromkeys(("viewers_peak", "load_peak", "viewers_mean", "recorded_s", "bit_rate", "busy_peak"), "double"),
    "trouble_share": "double",
}  # fmt: skip
"""Contract of ``capacity_nodes``. Grain: one node. `load_peak`: `viewers_peak` of `carries_viewers`. `bit_rate`: of one
viewer. `recorded_s`: of windows with viewers."""
STREAM_COLUMNS: Final[dict[str, str]] = {
    **dict.fromkeys(("app", "stream", "node"), "string"),
    **dict.fromkeys(("viewers_peak", "viewers_mean", "watched_s", "bit_rate"), "double"),
    "worth_following": "boolean", "saved_bit_rate": "double",
}  # fmt: skip
"""Contract of ``capacity_streams``. Grain: one stream at one node. `viewers_mean`: while anybody watched. Worth
following: on average more viewers than a follower costs. `saved_bit_rate`: what an origin sends less then."""


def nodes_for(viewers: float, carries: float, headroom: float) -> int:
    """Return how many nodes serve `viewers` with `headroom` kept free, and without it when one has died; 0 for 0."""
    return max(math.ceil(viewers / (carries * (1 - headroom))), math.ceil(viewers / carries) + 1) if viewers > 0 else 0


def plan_of(viewers: int, carries: int, headroom: float, shares: Sequence[float]) -> Plan:
    """Return the nodes that a crowd takes.

    Args:
        viewers: 1 and more.
        carries: viewers that one node carries, 1 and more.
        headroom: share of each node that is kept free while all live, 0 to less than 1.
        shares: of the recorded viewers, by stream; together at most 1. What is missing to 1 is not followed.

    Returns:
        How many of what (edges 0: the origins carry all, loads of edges are None then); `origin_viewers`: edges among
        them; loads: of what a node carries, with one dead too (`_one_down`).
    """
    edges, followed, edge_viewers, origins = 0, list[float](), 0, LEAST_ORIGINS
    # Where two origins carry all, one of them dead, there are no edges.
    if (wanted := nodes_for(viewers, carries, headroom)) > LEAST_ORIGINS:
        followed = [share for share in shares if viewers * share / wanted > FOLLOWER_VIEWERS]
        edge_viewers = min(viewers, math.ceil(round(viewers * sum(followed), 6)))
        # What an edge reads is taken from what it carries: less than half, as each has more viewers than it costs.
        edges = nodes_for(edge_viewers, carries - len(followed), headroom)
        origins = max(origins, nodes_for(viewers - edge_viewers + edges * len(followed), carries, headroom))
    origin_viewers = viewers - edge_viewers + edges * len(followed)
    plan: Plan = {
        "viewers": viewers, "carries_viewers": carries, "origins": origins, "edges": edges, "streams": len(shares),
        "streams_followed": len(followed), "edge_viewers": edge_viewers, "origin_viewers": origin_viewers,
    }  # fmt: skip
    kinds = ("edge", edge_viewers, edges, len(followed)), ("origin", origin_viewers, origins, 0)
    for kind, served, nodes, read in kinds:
        for down, left in (("", nodes), ("_one_down", nodes - 1)):
            plan[f"{kind}_load{down}"] = round((served / left + read) / carries, 4) if left > 0 else None
    return plan


def measured(loads: pd.DataFrame) -> list[Measurement]:
    """Return what was recorded of nodes as crowds, one for each step of a tenth more viewers."""
    sums = loads[loads["step"] >= 0].groupby("step")[["windows", "ms", "accepted", "trouble_ms", "busy_ppm"]].sum()
    return [
        Measurement(
            viewers=round(row.ms / row.windows / (WINDOW_S * 1000)),
            bit_rate=row.accepted * 8000 / row.ms,
            cpu_us_per_s=row.busy_ppm / row.windows,
            slow_share=min(row.trouble_ms / row.ms, 1.0),
        )
        for row in sums.itertuples()
    ]


def _sums(loads: pd.DataFrame, kind: str, *keys: str) -> pd.DataFrame:
    """Return hours of a kind added up, with what is said of all kinds alike."""
    add = dict.fromkeys(("windows", "ms", "accepted", "trouble_ms"), "sum")
    rows = loads[loads["kind"] == kind].groupby(list(keys), dropna=False)
    found = rows.agg({**add, "peak_ms": "max", "peak_busy_ppm": "max"}).reset_index()
    watched_s = found["windows"] * float(WINDOW_S)
    return found.assign(
        viewers_peak=found["peak_ms"] / (WINDOW_S * 1000),
        viewers_mean=found["ms"] / watched_s / 1000,
        watched_s=watched_s,
        recorded_s=watched_s,
        bit_rate=found["accepted"] * 8000 / found["ms"],
        trouble_share=found["trouble_ms"] / found["ms"],
        busy_peak=found["peak_busy_ppm"] / 1e6,
    )


def nodes_table(loads: pd.DataFrame, carries: Callable[[list[Measurement]], Carries]) -> pd.DataFrame:
    """Return ``capacity_nodes``; `carries` says what a node carries, given its own crowds."""
    found = _sums(loads, "node", "node")
    told = [carries(measured(loads[loads["node"] == node])) for node in found["node"]]
    found[["carries_viewers", "carries_from", "carries_at_least"]] = told
    return found.assign(load_peak=found["viewers_peak"] / found["carries_viewers"].astype("Float64"))


def streams_table(loads: pd.DataFrame) -> pd.DataFrame:
    """Return ``capacity_streams``."""
    found = _sums(loads, "stream", "app", "stream", "node")
    saved = (found["viewers_mean"] - 1).clip(lower=0) * found["bit_rate"]
    return found.assign(worth_following=found["viewers_mean"] > FOLLOWER_VIEWERS, saved_bit_rate=saved)


def fleet_of(
    loads: pd.DataFrame, nodes: pd.DataFrame, streams: pd.DataFrame, best: Carries, viewers: int, headroom: float
) -> Plan:
    """Return the answer in words, the plan for `viewers` on nodes of `best`, what is there and what was seen.

    `loads` are rows of the part, some of viewers; `nodes` and `streams` the tables made of them.
    """
    whole = loads[loads["kind"] == "fleet"].sort_values(["peak_ms", "date", "hour"])
    busiest = loads[loads["kind"] == "stream"].merge(whole[["date", "hour"]].tail(1))  # the hour of the peak
    watched = busiest.groupby(["app", "stream"], dropna=False)["ms"].sum()
    peak = whole["peak_ms"].iloc[-1] / (WINDOW_S * 1000)
    plan = plan_of(viewers, best[0], headroom, sorted(watched / watched.sum(), reverse=True)) if best[0] else None
    seen = {
        "viewers_peak": round(peak, 1),
        "watched_hours": round(whole["ms"].sum() / 3.6e6, 3),
        "recorded_s": float(nodes["recorded_s"].max()),
        "assumed_share": round(max(0.0, 1 - peak / viewers), 4),
        "streams_worth_following": int(streams["worth_following"].sum()),
        "carries_from": best[1],
    }
    present = present_of(nodes, viewers)
    return {"answer": " ".join(words_of(plan, seen, present)), "plan": plan, "present": present, "seen": seen}


def present_of(nodes: pd.DataFrame, viewers: int) -> dict[str, Any]:
    """Return what the recorded nodes carry together, and how many of `viewers` are too many when the largest dies."""
    carry = nodes["carries_viewers"].fillna(0).astype(int)
    found = {"nodes": len(carry), "carry_viewers": int(carry.sum())}
    left = found["carry_viewers_one_down"] = int(carry.sum() - carry.max())
    return found | {"short_viewers": max(0, viewers - left)}


def words_of(plan: Plan | None, seen: Plan, present: Plan) -> Iterator[str]:
    """Yield the sentences of the answer for a fleet: how many nodes, what is there, how sure that is."""
    if plan is None:
        yield "How many nodes is not known: no node keeps what was asked for."
    else:
        yield f"{plan['viewers']} viewers need {plan['edges']} edges and {plan['origins']} origins, any one of which"
        yield f"may die: origins are {plan['origin_load']:.0%} full, {plan['origin_load_one_down']:.0%} with one dead;"
        if plan["edges"]:
            yield f"edges {plan['edge_load']:.0%} and {plan['edge_load_one_down']:.0%}."
        yield f"{plan['streams_followed']} of {plan['streams']} streams are worth following at edges."
        yield f"Nodes recorded: {present['nodes']}, which carry {present['carry_viewers']} viewers, with the largest"
        yield f"dead {present['carry_viewers_one_down']}: {present['short_viewers']} viewers short."
    source = "REFERENCE MACHINE, NOT YOURS" if seen["carries_from"] == "reference" else seen["carries_from"]
    yield f"SEEN: {seen['viewers_peak']:g} viewers at once, {seen['watched_hours']:g} hours watched in"
    yield f"{seen['recorded_s']:.0f} s. ASSUMED: {seen['assumed_share']:.1%} of the crowd, to be like them; what a node"
    yield f"carries is from the {source}."
