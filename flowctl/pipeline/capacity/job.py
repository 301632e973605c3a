"""``capacity``: how many viewers a node carries, and how many nodes a crowd takes with any one of them dead.

Theory of operation. A node model (`flowctl.pipeline.capacity.node`) is fitted to measurements: a file of them, where
one is given; else what was recorded of the servers' threads, where crowds were large enough to say something; else the
reference machine, and the answer begins with saying so. Then the wanted crowd is simulated on nodes of several sizes:
the answer is the largest at which 95 % of the nodes stay below the wanted busy share, and delay and memory of the
model keep their bounds. How sure that is: twice the model's residual gives the range, and the largest measured
crowd is predicted from the others, with that error beside the answer. What was not measured is null.

The fleet (`flowctl.pipeline.capacity.loads` says what it was loaded with): *origins* take the publishers' streams,
*edges* fetch them and serve viewers. `v` viewers on nodes that carry `c` take
``max(ceil(v / (c * (1 - headroom))), ceil(v / c) + 1)`` of a kind: any one may die. A stream at an edge costs
`FOLLOWER_VIEWERS`; it is worth following where more watch it there. Assumed is that the wanted crowd shares its streams
as the recorded one did, that edges get equal shares, and that all nodes carry what the model says of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pandas as pd

from flowctl.addresses import Network, parse_network
from flowctl.errors import ConfigError
from flowctl.pipeline.capacity.loads import LOADS, UNKNOWN, WINDOW_S
from flowctl.pipeline.capacity.node import (
    MACHINE,
    MOST_REACH,
    SLOW_MORE,
    Measurement,
    NodeModel,
    fit,
    held_out_error,
    parse_measurements,
    reference,
    why_weak,
)
from flowctl.pipeline.job import Answer, Job, Parts
from flowctl.units import format_bit_rate, format_size

SHARES: Final = (*(0.5 + 0.7 * number / 11 for number in range(12)), 0.94, 0.96, 0.98, 1.0, 1.02)
"""Sizes of a node that are tried, of what the model alone gives."""
MOST_NODES: Final = 100
MOST_SIMULATED: Final = 2_000_000
"""Viewers simulated per size: enough for a quantile of their nodes, in a tenth of a second."""
QUEUE_S: Final = 2.0
"""Of a stream, so much waits for slow viewers: all hold the same log, and the low mark of age lets that stay."""
FOLLOWER_VIEWERS: Final = 2.0
"""What a stream at an edge costs, in viewers: one at the origin, and one at the edge for reading it."""
LEAST_ORIGINS: Final = 2
"""With one origin its death would be everybody's."""
MOST_PLACES: Final = 1_000
Plan = dict[str, Any]
MOST_REGIONS: Final = 200
"""Networks in a file of regions: each is a comparison in one expression of Spark, slow to compile beyond."""

CAPACITY_COLUMNS: Final[dict[str, str]] = {
    **dict.fromkeys(("viewers", "nodes"), "bigint"),
    **dict.fromkeys(("busy", "busy_p95", "busy_low", "busy_high", "p99_ms"), "double"),
    "memory_bytes": "bigint",
    "fits": "boolean",
}
"""Contract of ``capacity``. Grain: one size of a node. `busy_low`, `busy_high`: `busy_p95` -+ two residuals."""
NODE_COLUMNS: Final[dict[str, str]] = {
    "node": "string",
    "carries_viewers": "bigint",
    "carries_from": "string",
    "carries_at_least": "boolean",
    **dict.fromkeys(("viewers_peak", "load_peak"), "double"),
    "peak_at": "timestamp",
    **dict.fromkeys(
        ("viewers_mean", "recorded_s", "bit_rate", "peak_bit_rate", "busy_peak", "trouble_share"), "double"
    ),
}
"""Contract of ``capacity_nodes``. Grain: one node. `load_peak`: `viewers_peak` of `carries_viewers`. `bit_rate`: of one
viewer; `peak_bit_rate`: of all in the busiest window. `recorded_s`: of windows with viewers."""
STREAM_COLUMNS: Final[dict[str, str]] = {
    **dict.fromkeys(("app", "stream", "node"), "string"),
    **dict.fromkeys(("viewers_peak", "viewers_mean", "watched_s", "bit_rate", "follower_viewers"), "double"),
    "worth_following": "boolean",
    "saved_bit_rate": "double",
}
"""Contract of ``capacity_streams``. Grain: one stream at one node. `viewers_mean`: while anybody watched. Worth
following: on average more viewers than a follower costs. `saved_bit_rate`: what an origin sends less then."""
PLACE_COLUMNS: Final[dict[str, str]] = {
    **dict.fromkeys(("place", "place_from", "node"), "string"),
    "nodes": "bigint",
    **dict.fromkeys(("viewers_peak", "viewers_share", "trouble_share", "rtt_ms"), "double"),
    **dict.fromkeys(("viewers_wanted", "edges_filled"), "double"),
    "own_edges": "bigint",
}
"""Contract of ``capacity_places``. Grain: one region, network or ``unknown``. `node`: that served most of it.
`viewers_peak`: in its minute with most. `viewers_wanted`: its part of the wanted crowd; `edges_filled`: edges that this
takes, `own_edges`: the whole ones of these; null where nothing is planned. `rtt_ms`: of viewers in trouble."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityOptions:
    """What crowd, and what a node may be asked.

    Args:
        viewers: of the whole crowd.
        bit_rate: of the stream, bits per second. None: as recorded, else 2.5 Mbit/s.
        slow_share: share of viewers whose link does not carry the stream. None: as recorded, else 5 %.
        busy: share of a thread that may be used, at 95 % of the nodes.
        p99_ms: delay that healthy viewers may have.
        memory_bytes: that a node has. None: not asked.
        measurements: text of a file of measurements, which goes before what was recorded. None: there is none.
        measurements_name: its name, for errors.
        seed: of the simulated crowd.
        headroom: share of each node of a fleet that is kept free while all nodes live.
        regions: (network, region), the narrowest first: where networks are, which records do not know.

    Raises:
        ConfigError: a value is out of range.
    """

    viewers: int = 1_000_000
    bit_rate: float | None = None
    slow_share: float | None = None
    busy: float = 0.7
    p99_ms: float = 100.0
    memory_bytes: int | None = None
    measurements: str | None = None
    measurements_name: str = "measurements"
    seed: int = 1
    headroom: float = 0.2
    regions: tuple[tuple[Network, str], ...] = ()

    def __post_init__(self) -> None:
        bounds: dict[str, tuple[float, float]] = {
            "viewers": (1, 1e8),
            "bit_rate": (1_000, 1e9),
            "slow_share": (0, 1),
            "busy": (0.01, 1),
            "p99_ms": (1, 60_000),
            "memory_bytes": (1, 1e15),
            "headroom": (0, 0.9),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} is {value}, it must be {least:g} to {most:g}")


def parse_regions(text: str, where: str) -> tuple[tuple[Network, str], ...]:
    """Return (network, region) of each line ``NETWORK REGION`` of a file, the narrowest network first.

    Raises:
        ConfigError: a line is none of that, or there are none or too many.
    """
    found: list[tuple[Network, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split(maxsplit=1)
        if words and (len(words) != 2 or len(words[1].strip()) > 60):
            raise ConfigError(
                f"{where}, line {number}: {line[:80]!r} is no region",
                hint="write NETWORK REGION, like 192.0.2.0/24 eu-west; a name has at most 60 letters",
            )
        if words:
            found.append((parse_network(words[0], f"{where}, line {number}", exact=True), words[1].strip()))
    if not 1 <= len(found) <= MOST_REGIONS:
        raise ConfigError(f"{where}: there are {len(found)} networks in it, 1 to {MOST_REGIONS} are allowed")
    return tuple(sorted(found, key=lambda item: -item[0].prefixlen))


# -- one node


@dataclass(frozen=True, slots=True)
class Basis:
    """What an answer rests on.

    Args:
        source: ``measurements``, ``records`` or ``reference``.
        points: what the model was fitted to.
        model: fitted to them.
        weak: why the records could not carry the answer; empty where they were not asked or could.
        recorded: the largest recorded crowd. None: there is none.
    """

    source: str
    points: list[Measurement]
    model: NodeModel
    weak: str = ""
    recorded: Measurement | None = None


def basis_of(points: list[Measurement], options: CapacityOptions) -> Basis:
    """Return what to fit to: what was told, else the records where they carry it, else the reference machine.

    Raises:
        ConfigError: the file of measurements is wrong, or tells nothing.
    """
    largest = max(points, key=lambda point: point.viewers, default=None)
    if options.measurements is not None:  # of whole servers from outside: more than a thread's own meter knows
        told = parse_measurements(options.measurements, options.measurements_name)
        return Basis("measurements", told, fit(told), recorded=largest)
    weak = why_weak(points)
    source, used = ("reference", reference()) if weak else ("records", points)
    return Basis(source, used, fit(used), weak, largest)


def carried(model: NodeModel, options: CapacityOptions) -> float:
    """Return the viewers that the model alone gives a node, without noise among them: at least 1."""
    rate, busy = options.bit_rate or 0.0, options.busy
    if model.p99 is not None and model.p99[1] > 0:
        busy = min(busy, max((options.p99_ms - model.p99[0]) / model.p99[1], 0.01))
    most = (busy * 1e6 - model.cpu_us[0]) / model.viewer_us(rate, options.slow_share or 0.0)
    if options.memory_bytes is not None and model.memory is not None and (one := model.one_memory_bytes(rate)):
        most = min(most, (options.memory_bytes - model.memory[0]) / one)
    return max(most, 1.0)


def simulated(model: NodeModel, options: CapacityOptions) -> list[dict[str, Any]]:
    """Return the rows of ``capacity``: up to two million viewers per size, dealt to nodes, each with a cost of its own.

    A viewer is slow by chance, and costs a tenth more or less than the next (congestion, acknowledgements).
    """
    reach, middle = MOST_REACH * model.largest, carried(model, options)
    rate, spread = options.bit_rate or 0.0, 2 * model.residual
    rows = []
    for size in sorted({min(max(round(min(middle, reach) * share), 1), reach) for share in SHARES}):
        nodes = min(max(math.ceil(options.viewers / size), 1), MOST_NODES, max(MOST_SIMULATED // size, 1))
        random = np.random.default_rng([options.seed, size])
        slow = random.random((nodes, size), np.float32) < (options.slow_share or 0.0)
        noise = random.triangular(0.8, 1.0, 1.2, (nodes, size))
        busy = (model.cpu_us[0] + ((1 + slow * SLOW_MORE) * noise).sum(1) * model.viewer_us(rate)) / 1e6
        median, high = (float(np.quantile(busy, share)) for share in (0.5, 0.95))
        known, p99 = model.memory_bytes(size, rate), model.p99_ms(high)
        memory = None if known is None else round(known + slow.any() * rate / 8 * QUEUE_S)
        fits = high <= options.busy and (p99 is None or p99 <= options.p99_ms)
        fits = fits and (options.memory_bytes is None or (memory is not None and memory <= options.memory_bytes))
        rows.append(
            {
                "viewers": size,
                "nodes": math.ceil(options.viewers / size),
                "busy": median,
                "busy_p95": high,
                "busy_low": high * (1 - spread),
                "busy_high": high * (1 + spread),
                "p99_ms": p99,
                "memory_bytes": memory,
                "fits": fits,
            }
        )
    return rows


def summary_of(rows: list[dict[str, Any]], basis: Basis, options: CapacityOptions) -> dict[str, Any]:
    """Return the answer, what it rests on, and how far a real crowd was from what the model says."""
    model, rate, seen = basis.model, options.bit_rate or 0.0, basis.recorded
    best = max((row for row in rows if row["fits"]), key=lambda row: row["viewers"], default=None)
    held_out, one_bytes = held_out_error(basis.points), model.one_memory_bytes(rate)
    over = None
    # A thread that served fewer viewers than any measured crowd is none to hold beside the model.
    if seen is not None and basis.source != "records" and seen.viewers >= min(point.viewers for point in basis.points):
        over = round(1 / (1 + model.error(seen)), 3)
    summary: dict[str, Any] = {
        "viewers_per_node": best and best["viewers"],
        "at_least": best is not None and best["viewers"] >= MOST_REACH * model.largest,
        "viewers_per_node_low": max((row["viewers"] for row in rows if row["busy_high"] <= options.busy), default=None),
        "viewers_per_node_high": max((row["viewers"] for row in rows if row["busy_low"] <= options.busy), default=None),
        "memory_bytes_per_node": best and best["memory_bytes"],
        "nodes": best and best["nodes"],
        "p99_ms": best and best["p99_ms"],
        "cpu_us_per_viewer_s": round(model.viewer_us(rate), 1),
        "memory_bytes_per_viewer": None if one_bytes is None else round(one_bytes),
        "bit_rate": options.bit_rate,
        "slow_share": options.slow_share,
        "fitted_to": basis.source,
        "measured_crowds": model.points,
        "largest_measured_viewers": model.largest,
        "largest_recorded_viewers": seen and seen.viewers,
        "recorded_over_model": over,
        "residual_share": round(model.residual, 4),
        "error_share": None if held_out is None else round(held_out[0], 4),
    }
    said = " ".join(_answer(summary, basis, options))
    return {"answer": said[0].upper() + said[1:], **summary}


def _answer(summary: Mapping[str, Any], basis: Basis, options: CapacityOptions) -> Iterator[str]:
    """Yield the sentences of the answer: on what it rests first where that is not the user's own machine."""
    model, viewers, rate = basis.model, summary["viewers_per_node"], format_bit_rate(options.bit_rate or 0.0)
    asked = f"at {options.busy:.0%} of a thread" + ("" if model.p99 is None else f", {options.p99_ms:g} ms p99")
    if basis.source == "reference":
        yield f"REFERENCE MACHINE, NOT YOURS ({MACHINE}):"
    if viewers is None:
        yield f"no size of a node that was tried keeps what was asked for: {asked}, {rate}."
    elif summary["at_least"]:
        yield f"a node carries AT LEAST {viewers} viewers of {rate}, {asked}: NOT KNOWN BEYOND, measured up to"
        yield f"{model.largest} viewers, and no more than {MOST_REACH} times that is answered for."
    else:
        low, high = summary["viewers_per_node_low"], summary["viewers_per_node_high"]
        between = "" if low is None or high is None else f" ({low} to {high} by the residual of the fit)"
        yield f"a node carries {viewers} viewers{between} of {rate}, {asked}."
    if viewers is not None:
        memory = summary["memory_bytes_per_node"]
        yield "Memory not measured;" if memory is None else f"{format_size(memory)} of memory;"
        if model.p99 is None:
            yield "delay not measured;"
        yield f"{options.viewers} viewers need {'at most ' if summary['at_least'] else ''}{summary['nodes']} nodes."
    yield f"Fitted to {model.points} crowds of up to {model.largest} viewers, residual {model.residual:.1%}."
    rates = [point.bit_rate for point in basis.points]
    if not min(rates) / 2 <= (options.bit_rate or 0.0) <= max(rates) * 2:
        yield f"NO CROWD NEAR {rate} was measured: {format_bit_rate(min(rates))} to {format_bit_rate(max(rates))} were."
    if (held_out := held_out_error(basis.points)) is not None:
        error, largest = held_out
        yield f"A real load of {largest.viewers} viewers, predicted from the smaller ones, was missed by {error:+.1%};"
        yield f"with it in the fit the model is {model.error(largest):+.1%} off there."
    if basis.weak:
        yield f"Your records do not carry an answer: {basis.weak}."
    if summary["recorded_over_model"] is not None and basis.recorded is not None:
        yield f"At {basis.recorded.viewers} viewers your thread was recorded to be {summary['recorded_over_model']:.2f}"
        yield "times as busy as this model says."
    if basis.source == "reference":
        yield "Measure yours: flowctl load --viewers N --server-pid PID --json > FILE, then --measurements FILE."


# -- the fleet


def measured(nodes: pd.DataFrame) -> list[Measurement]:
    """Return what was recorded as crowds, one for each step of a tenth more viewers."""
    sums = nodes[nodes["step"] >= 0].groupby("step")[["windows", "ms", "accepted", "trouble_ms", "busy_ppm"]].sum()
    return [
        Measurement(
            viewers=round(row.ms / row.windows / (WINDOW_S * 1000)),
            bit_rate=row.accepted * 8000 / row.ms,
            cpu_us_per_s=row.busy_ppm / row.windows,
            slow_share=min(row.trouble_ms / row.ms, 1.0),
        )
        for row in sums.itertuples()
    ]


def nodes_for(viewers: float, carries: float, headroom: float) -> int:
    """Return how many nodes serve `viewers` with `headroom` kept free, and without it when one has died; 0 for 0."""
    if viewers <= 0:
        return 0
    return max(math.ceil(viewers / (carries * (1 - headroom))), math.ceil(viewers / carries) + 1)


def plan_of(viewers: int, carries: int, headroom: float, shares: Sequence[float]) -> Plan:
    """Return the nodes that a crowd takes.

    Args:
        viewers: 1 and more.
        carries: viewers that one node carries, 1 and more.
        headroom: share of each node that is kept free while all live, 0 to less than 1.
        shares: of the recorded viewers, by stream; together at most 1. What is missing to 1 is not followed.

    Returns:
        viewers, carries_viewers; origins, edges (0: the origins carry all); streams, streams_followed, edge_viewers,
        origin_viewers (edges among them); edge_load and origin_load, with one dead too (`_one_down`): of what a node
        carries. None: there are no edges.
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

    def edge_load(nodes: int) -> float | None:
        return None if not edges else round((edge_viewers / nodes + len(followed)) / carries, 4)

    return {
        "viewers": viewers,
        "carries_viewers": carries,
        "origins": origins,
        "edges": edges,
        "streams": len(shares),
        "streams_followed": len(followed),
        "edge_viewers": edge_viewers,
        "origin_viewers": origin_viewers,
        "edge_load": edge_load(edges),
        "edge_load_one_down": edge_load(edges - 1),
        "origin_load": round(origin_viewers / origins / carries, 4),
        "origin_load_one_down": round(origin_viewers / (origins - 1) / carries, 4),
    }


def _sums(frame: pd.DataFrame, *keys: str) -> pd.DataFrame:
    """Return hours added up: sums, largest figures, and what is said of both for nodes and streams alike."""
    whole = dict.fromkeys(("windows", "ms", "accepted", "trouble_ms", "rtt_us", "rtts"), "sum")
    largest = dict.fromkeys(("peak_ms", "peak_accepted", "peak_busy_ppm"), "max")
    found = frame.groupby(list(keys), dropna=False).agg({**whole, **largest}).reset_index()
    found["viewers_peak"] = found["peak_ms"] / (WINDOW_S * 1000)
    found["viewers_mean"] = found["ms"] / found["windows"] / (WINDOW_S * 1000)
    found["recorded_s"] = found["watched_s"] = found["windows"] * float(WINDOW_S)
    found["bit_rate"] = found["accepted"] * 8000 / found["ms"]
    found["trouble_share"] = found["trouble_ms"] / found["ms"]
    return found


def nodes_table(loads: pd.DataFrame, best: int | None, basis: Basis, options: CapacityOptions) -> pd.DataFrame:
    """Return ``capacity_nodes``; what a node carries is fitted to its own windows where they carry an answer."""
    found = _sums(loads, "node")
    found["peak_bit_rate"] = found["peak_accepted"] * 8 / WINDOW_S
    found["busy_peak"] = found["peak_busy_ppm"] / 1e6
    peaks = loads.sort_values(["peak_ms", "peak_at"], ascending=[False, True]).drop_duplicates("node")
    found = found.merge(peaks[["node", "peak_at"]], on="node")
    of_all = (best, basis.source, best is not None and best >= MOST_REACH * basis.model.largest)
    told = [of_all] * len(found)
    if best is not None and basis.source != "measurements":
        told = [_own(measured(loads[loads["node"] == node]), of_all, options) for node in found["node"]]
    found[["carries_viewers", "carries_from", "carries_at_least"]] = told
    found["load_peak"] = found["viewers_peak"] / found["carries_viewers"].astype("Float64")
    return found


def _own(points: list[Measurement], of_all: tuple[Any, ...], options: CapacityOptions) -> tuple[Any, ...]:
    """Return what a node carries, from what, and whether it may be more: by its own crowds if they carry an answer."""
    if why_weak(points):
        return of_all
    model = fit(points)
    most, reach = carried(model, options), MOST_REACH * model.largest
    return max(1, int(min(most, reach))), "own records", most >= reach


def streams_table(loads: pd.DataFrame) -> pd.DataFrame:
    """Return ``capacity_streams``."""
    found = _sums(loads, "app", "stream", "node")
    found["follower_viewers"] = FOLLOWER_VIEWERS
    found["worth_following"] = found["viewers_mean"] > FOLLOWER_VIEWERS
    found["saved_bit_rate"] = (found["viewers_mean"] - 1).clip(lower=0) * found["bit_rate"]
    return found


def places_table(loads: pd.DataFrame, peak: float, plan: Plan | None, options: CapacityOptions) -> pd.DataFrame:
    """Return ``capacity_places``, the largest first."""
    served = loads.groupby(["place", "node"])["ms"].sum().reset_index().sort_values(["ms", "node"], ascending=False)
    found = _sums(loads, "place", "place_from").merge(served.drop_duplicates("place")[["place", "node"]], on="place")
    found["nodes"] = found["place"].map(served.groupby("place").size())
    found["viewers_peak"] = found["peak_ms"] / 60_000
    found["viewers_share"] = found["ms"] / found["ms"].sum()
    found["rtt_ms"] = found["rtt_us"] / found["rtts"].where(found["rtts"] > 0) / 1000
    found["viewers_wanted"] = options.viewers * found["viewers_peak"] / peak
    found["edges_filled"], found["own_edges"] = None, None
    if plan is not None and plan["edges"]:
        room = (plan["carries_viewers"] - plan["streams_followed"]) * (1 - options.headroom)
        found["edges_filled"] = found["viewers_wanted"] * plan["edge_viewers"] / plan["viewers"] / room
        found["own_edges"] = found["edges_filled"].astype(int).clip(upper=plan["edges"])
    return found.sort_values(["viewers_peak", "place"], ascending=[False, True]).head(MOST_PLACES)


def fleet_of(parts: Parts, loads: pd.DataFrame, best: int | None, basis: Basis, options: CapacityOptions) -> Plan:
    """Write the tables of the fleet, and return its answer in words, plan, what is there, and what was seen."""
    kinds = {kind: loads[loads["kind"] == kind] for kind in ("fleet", "node", "stream", "place")}
    busiest = kinds["fleet"].sort_values(["peak_ms", "peak_at"], ascending=[False, True]).iloc[0]
    peak = busiest["peak_ms"] / (WINDOW_S * 1000)
    hour = kinds["stream"][(kinds["stream"]["date"] == busiest["date"]) & (kinds["stream"]["hour"] == busiest["hour"])]
    shares = sorted(hour.groupby(["app", "stream"], dropna=False)["ms"].sum() / hour["ms"].sum(), reverse=True)
    plan = None if best is None else plan_of(options.viewers, best, options.headroom, shares)
    nodes, streams = nodes_table(kinds["node"], best, basis, options), streams_table(kinds["stream"])
    places = places_table(kinds["place"], peak, plan, options)
    parts.write("capacity_nodes", nodes[list(NODE_COLUMNS)], NODE_COLUMNS)
    parts.write("capacity_streams", streams[list(STREAM_COLUMNS)], STREAM_COLUMNS)
    parts.write("capacity_places", places[list(PLACE_COLUMNS)], PLACE_COLUMNS)
    seen = {
        "viewers_peak": round(peak, 1),
        "watched_hours": round(kinds["fleet"]["ms"].sum() / 3.6e6, 3),
        "recorded_s": float(nodes["recorded_s"].max()),
        "assumed_share": round(max(0.0, 1 - peak / options.viewers), 4),
        "streams_worth_following": int(streams["worth_following"].sum()),
        "carries_from": basis.source,
    }
    present = present_of(nodes, options.viewers)
    said = " ".join(words_of_fleet(plan, seen, present, places))
    return {"answer": said, "plan": plan, "present": present, "seen": seen}


def present_of(nodes: pd.DataFrame, viewers: int) -> dict[str, Any]:
    """Return what the recorded nodes carry together, and whether that is enough for `viewers` when the largest dies."""
    carry = sorted(int(number) for number in nodes["carries_viewers"].dropna())
    if not carry:
        return {"nodes": len(nodes)}
    fullest = nodes.sort_values(["load_peak", "node"]).iloc[-1]
    return {
        "nodes": len(nodes),
        "carry_viewers": sum(carry),
        "carry_viewers_one_down": sum(carry[:-1]),
        "enough_with_one_down": sum(carry[:-1]) >= viewers,
        "short_viewers": max(0, viewers - sum(carry[:-1])),
        "fullest_node": fullest["node"],
        "fullest_load": round(float(fullest["load_peak"]), 4),
    }


def words_of_fleet(plan: Plan | None, seen: Plan, present: Plan, places: pd.DataFrame) -> Iterator[str]:
    """Yield the sentences of the answer for a fleet: how many nodes, where, what is there, how sure that is."""
    if plan is None:
        yield "How many nodes is not known: no size of a node that was tried keeps what was asked for."
    elif not plan["edges"]:
        more = plan["origins"] > LEAST_ORIGINS
        why = " (no stream has viewers enough to be worth following)" if more else ""
        yield f"{plan['viewers']} viewers need {plan['origins']} origins and no edge{why}, any one of which may die:"
        yield f"they are {plan['origin_load']:.0%} full, {plan['origin_load_one_down']:.0%} with one dead."
    else:
        yield f"{plan['viewers']} viewers need {plan['edges']} edges and {plan['origins']} origins, any one of which"
        yield f"may die: edges are {plan['edge_load']:.0%} full, {plan['edge_load_one_down']:.0%} with one dead;"
        yield f"origins {plan['origin_load']:.0%} and {plan['origin_load_one_down']:.0%}. Edges follow"
        few = "" if plan["streams_followed"] == plan["streams"] else "; the others have too few per edge to be worth it"
        yield f"{plan['streams_followed']} of {plan['streams']} streams, with {plan['edge_viewers']} viewers{few}."
        own = places[(places["place_from"] != UNKNOWN) & (places["own_edges"] > 0)]
        told = ", ".join(f"{row.own_edges} at {row.place}" for row in own.head(3).itertuples())
        more = f", and {len(own) - 3} more places" if len(own) > 3 else ""
        yield (
            f"Where: {told}{more}; the rest anywhere."
            if told
            else "Where: no network or region fills an edge by itself."
        )
        if told and not (places["place_from"] == "region").any():
            yield "Records know networks, not where these are: name them with --regions."
    if plan is not None:
        enough = "enough" if present["enough_with_one_down"] else f"{present['short_viewers']} viewers short"
        yield f"The {present['nodes']} recorded {'node' if present['nodes'] == 1 else 'nodes'} carry"
        yield f"{present['carry_viewers']} viewers, {present['carry_viewers_one_down']} with the largest dead:"
        yield f"{enough}; {present['fullest_node']} was the fullest at {present['fullest_load']:.0%} of its own."
    yield f"SEEN: {seen['viewers_peak']:g} viewers at once, {seen['watched_hours']:g} hours watched in"
    yield f"{seen['recorded_s']:.0f} s. ASSUMED: {seen['assumed_share']:.1%} of the crowd, to be like them; what a node"
    yield f"carries is from {_FROM[seen['carries_from']]}."


_FROM: Final = {
    "records": "these records",
    "measurements": "the measurements given",
    "reference": "the REFERENCE MACHINE, NOT YOURS",
}


# -- the job


def estimate(points: list[Measurement], options: CapacityOptions) -> tuple[list[dict[str, Any]], dict[str, Any], Basis]:
    """Return the rows of ``capacity``, the summary, and what both rest on.

    Raises:
        ConfigError: the measurements tell nothing, or memory is asked for but was not measured.
    """
    basis = basis_of(points, options)
    if options.memory_bytes is not None and basis.model.memory is None:
        raise ConfigError(
            "a node's memory is to be kept, but what a viewer takes of it was not measured",
            hint="give --measurements of crowds of several sizes with memory (python bench capacity), or no --memory",
        )
    rows = simulated(basis.model, options)
    return rows, summary_of(rows, basis, options), basis


def answer(parts: Parts, options: CapacityOptions) -> Answer:
    """Fit, simulate, answer; write ``capacity``, and of records with viewers the tables of the fleet."""
    loads = parts.pandas(LOADS.name) if parts.small else parts.table(LOADS.name).toArrow().to_pandas()
    whole = loads[loads["kind"] == "fleet"][["ms", "accepted", "trouble_ms"]].sum()
    known = (
        (whole["accepted"] * 8000 / whole["ms"], whole["trouble_ms"] / whole["ms"]) if whole["ms"] else (2.5e6, 0.05)
    )
    rate, slow = (
        given if given is not None else seen
        for given, seen in zip((options.bit_rate, options.slow_share), known, strict=True)
    )
    options = replace(options, bit_rate=max(rate, 1000.0), slow_share=slow)
    rows, summary, basis = estimate(measured(loads[loads["kind"] == "node"]), options)
    parts.write("capacity", pd.DataFrame(rows), CAPACITY_COLUMNS)
    fleet = fleet_of(parts, loads, summary["viewers_per_node"], basis, options) if whole["ms"] else None
    return Answer(summary={"answer": summary.pop("answer"), "fleet": fleet, **summary})


JOB: Final = Job(
    name="capacity",
    parts=(LOADS,),
    results=("capacity", "capacity_nodes", "capacity_streams", "capacity_places"),
    answer=answer,
    options=CapacityOptions,
)
