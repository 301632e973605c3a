"""``capacity``: how many viewers a node carries, by which resource, and how many nodes a crowd takes.

Theory of operation. A node model (`flowctl.analyze.capacity.node`) is fitted to a file of measurements, else to what
was recorded of the servers' threads; where neither says enough the answer is that it is not known. A node carries so
many viewers as keep the wanted busy share of a thread, and memory below its bound. Beside it stand the model's
residual, and the error at the largest crowd, predicted from the others. A crowd takes so many nodes that each has
`headroom` free, and that any one may die.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from flowctl.analyze.capacity import node
from flowctl.analyze.capacity.node import MEASURE, Measurement, NodeModel, fit, why_weak
from flowctl.analyze.job import AnalysisJob, JobAnswer, JobPart, Parts
from flowctl.analyze.models import query
from flowctl.analyze.options import CapacityOptions
from flowctl.charts.words import figure, percent, plural, sentences, size, value_text
from flowctl.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

    from flowctl.analyze.job import Records

WINDOW_S: Final = 10
LEAST_WINDOW_VIEWERS: Final = 5
"""Least viewers of a window: one with fewer says more about the idle server; its `step` is -1."""
MOST_BUSY: Final = 0.95
"""Busy share from which a thread is full: it does less than its viewers need."""

_SUMS: Final = ("ms", "accepted", "trouble_ms")
LOAD_COLUMNS: Final[dict[str, str]] = {
    "node": "string",  # null: all of them together
    "step": "int",  # of a node: logarithm of its viewers to the base of 1.1; -1: nothing to fit to
    **dict.fromkeys(("windows", *_SUMS, "busy_ppm", "peak_ms", "peak_busy_ppm"), "bigint"),
}
"""Contract of the part. Grain: an hour and a node and size of its crowd, or all nodes. `ms`: watched by all viewers;
`peak_ms`: in the window with most; `busy_ppm`: of the busiest thread, sum over windows."""


def loads(records: Records, _: Any = None) -> DataFrame:
    window_us = WINDOW_S * 1_000_000
    covered = query("records/covered", {"samples": records.table("flow_samples")}, window_us=window_us)
    marks = {"window_us": window_us, "least_viewers": LEAST_WINDOW_VIEWERS, "most_busy": MOST_BUSY}
    return query("capacity/loads", {"covered": covered}, **marks)


LOADS: Final = JobPart("loads", LOAD_COLUMNS, loads, ("flow_samples",), version=4)


MOST_REACH: Final = 4
"""Largest node that is answered for, in multiples of the largest measured crowd: a viewer's cost on one machine
changes by a fifth from 1000 to 4000 viewers."""
NODE_COLUMNS: Final[dict[str, str]] = {
    "node": "string", "carries_viewers": "bigint", "carries_from": "string", "carries_at_least": "boolean",
    **dict.fromkeys(("viewers_peak", "load_peak", "viewers_mean", "recorded_s", "bit_rate", "busy_peak"), "double"),
    "trouble_share": "double",
}  # fmt: skip
"""Contract of ``capacity_nodes``. Grain: one node. `load_peak`: `viewers_peak` of `carries_viewers`. `bit_rate`: of one
viewer. `recorded_s`: of windows with viewers."""


def carried(model: NodeModel, options: CapacityOptions, error: float = 0.0) -> tuple[int, str]:
    """Return the viewers that a node carries where they cost `error` more than the model says, and what ends it."""
    rate, mean = options.bit_rate or 0.0, 1 + (options.slow_share or 0.0) * node.SLOW_MORE
    ends = {"processor": (options.busy * 1e6 / (1 + error) - model.cpu.idle) / (model.cpu.one(rate) * mean)}
    if options.memory_bytes is not None and model.memory is not None:
        ends["memory"] = (options.memory_bytes - model.memory.idle) / model.memory.one(rate)
    ends["measured"] = MOST_REACH * model.largest
    limit = min(ends, key=lambda name: ends[name])
    return max(0, int(ends[limit])), limit


def nodes_for(viewers: float, carries: float, headroom: float) -> int:
    """Return how many nodes serve `viewers` (1 and more) with `headroom` free, and without it with one dead."""
    return max(math.ceil(viewers / (carries * (1 - headroom))), math.ceil(viewers / carries) + 1)


def estimate(points: list[Measurement], options: CapacityOptions, most: int = 0) -> dict[str, Any]:
    source, used, rate = "records", points, options.bit_rate or 0.0
    recorded = {
        "headroom_share": options.headroom,
        "bit_rate": rate,
        "largest_recorded_viewers": max((point.viewers for point in points), default=most or None),
    }
    if options.measurements is not None:  # of whole servers from outside: more than a thread's own meter knows
        source, used = "measurements", node.parse_measurements(options.measurements, options.measurements_name)
    elif weak := why_weak(points, most):
        unknown = {"viewers_per_node": None, "fitted_to": "", "at_least": False, "records_weak": weak}
        return {"answer": f"{MEASURE[0].upper()}{MEASURE[1:]}: {weak}.", **recorded, **unknown}
    model = fit(used)
    memory, held_out, off = model.memory, node.held_out_error(used), min(2 * model.residual, 0.9)
    if options.memory_bytes is not None and memory is None:
        raise ConfigError(
            "a node's memory is to be kept, but what a viewer takes of it was not measured",
            hint="give --measurements of crowds of several sizes with memory (python bench capacity), or no --memory",
        )
    viewers, ended_by = carried(model, options)
    figures = recorded | {
        "viewers_per_node": viewers or None,
        "ended_by": ended_by,
        "at_least": ended_by == "measured",
        "viewers_per_node_low": carried(model, options, off)[0],
        "viewers_per_node_high": carried(model, options, -off)[0],
        "memory_bytes_per_node": round(memory.of(viewers, rate)) if memory and viewers else None,
        "nodes": nodes_for(options.viewers, viewers, options.headroom) if viewers else None,
        "cpu_us_per_viewer_s": round(model.cpu.one(rate), 1),
        "memory_bytes_per_viewer": round(memory.one(rate)) if memory else None,
        "fitted_to": source,
        "records_weak": "",
        "measured_crowds": model.points,
        "measured_bit_rates": [pick(point.bit_rate for point in used) for pick in (min, max)],
        "largest_measured_viewers": model.largest,
        "residual_share": round(model.residual, 4),
        "error_share": round(held_out[0], 4) if held_out else None,
    }
    return {"answer": answer_text(figures, options), **figures}


MOST_NAMED: Final = 5
"""Most nodes named in a sentence; the table has all."""
_HEADLINE: Final = """
Nodes carry {each} (viewers of {rate}).
{one?}A node carries {one} viewers of {rate}.
{nodes?}{crowd} viewers take {nodes}.
"""
_SAID: Final = """
{each?}Node by node: {each}.
{none?}A node carries no {asked} as was asked for, and how many nodes the crowd takes is not known.
{at_least?}{a_node} carries AT LEAST {viewers_per_node} {asked}: NOT KNOWN BEYOND, that is {reach} times the largest \
measured crowd.
{resource?}{a_node} carries {viewers_per_node} {asked}, {low} to {high} by the residual of the \
fit; what ends it is its {resource}.
{viewers_per_node?}{memory}. {crowd} viewers need {most} nodes, any one of which may die, with {free} of \
each free while all live.
Fitted to {measured_crowds} crowds of up to {largest_measured_viewers} viewers, residual {residual}.
NO CROWD NEAR {bit_rate} was measured: {far} were.
The largest of them, predicted from the smaller ones, was missed by {error}.
RECORDED: nodes that together carry {carry_viewers} viewers, and {carry_viewers_one_down} with the largest dead; at \
most {viewers_peak} viewers at once, {watched_s} of watching. ASSUMED: {assumed} of the crowd, to be like them.
"""
"""The answer, where the machine was measured."""


def answer_text(figures: dict[str, Any], options: CapacityOptions) -> str:
    if not figures["fitted_to"]:
        return str(figures["answer"])
    (low, high), rate, viewers = figures["measured_bit_rates"], figures["bit_rate"], figures["viewers_per_node"]
    beyond, memory, error = figures["at_least"], figures["memory_bytes_per_node"], figures["error_share"]
    facts = figures | {
        "asked": f"viewers of {value_text('bit_rate', rate)} at {percent(options.busy)} of a thread",
        "far": "" if low / 2 <= rate <= high * 2 else " to ".join(value_text("bit_rate", one) for one in (low, high)),
        "a_node": "One like all of them together" if figures.get("nodes_recorded", 0) > 1 else "A node",
        "none": not viewers,
        "reach": MOST_REACH,
        "low": figure(figures["viewers_per_node_low"]),
        "high": figure(figures["viewers_per_node_high"]),
        "resource": "" if beyond else figures["ended_by"],
        "memory": "Memory not measured" if memory is None else f"{size(memory)} of memory",
        "crowd": options.viewers,
        "most": f"{'at most ' if beyond else ''}{figure(figures['nodes'])}",
        "residual": percent(figures["residual_share"]),
        "free": percent(figures["headroom_share"]),
        "error": "" if error is None else f"{error:+.1%}",
        "assumed": percent(max(0.0, 1 - figures.get("viewers_peak", 0.0) / options.viewers)),
    }
    return sentences(facts, _SAID)


def headline(figures: dict[str, Any], options: CapacityOptions) -> str:
    """Return the answer in a line: what each node carries, where nodes were recorded."""
    if not figures["fitted_to"]:
        return MEASURE
    least, viewers = "at least " if figures["at_least"] else "", figures["viewers_per_node"]
    facts = {
        "each": figures.get("each"),
        "one": not figures.get("each") and f"{least}{figure(viewers)}" if viewers else "no",
        "rate": value_text("bit_rate", figures["bit_rate"]),
        "crowd": figure(options.viewers),
        "nodes": figures["nodes"] and plural(figures["nodes"], "node"),
    }
    return sentences(facts, _HEADLINE).removesuffix(".")


def _each(nodes: Sequence[str], carries: Sequence[tuple[int | None, str, bool]]) -> str:
    """Return what each of these nodes carries, the first by name alone; "": that is known of none."""
    texts = [
        f"{name} {'at least ' if least else ''}{viewers:,}" if viewers else f"{name}: not known"
        for name, (viewers, _, least) in zip(nodes, carries, strict=True)
    ]
    more = [f"{len(texts) - MOST_NAMED:,} more in capacity_nodes"] if texts[MOST_NAMED:] else []
    return ", ".join(texts[:MOST_NAMED] + more) if any(viewers for viewers, _, _ in carries) else ""


def measured(loads: pd.DataFrame) -> list[Measurement]:
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


def nodes_table(loads: pd.DataFrame, carries: Sequence[tuple[int | None, str, bool]]) -> pd.DataFrame:
    """Return ``capacity_nodes``; `carries` are its columns of what each node carries, nodes by name."""
    add = dict.fromkeys(("windows", "ms", "accepted", "trouble_ms"), "sum")
    table = loads.groupby("node").agg({**add, "peak_ms": "max", "peak_busy_ppm": "max"}).reset_index()
    table[["carries_viewers", "carries_from", "carries_at_least"]] = carries
    table["viewers_peak"] = table["peak_ms"] / (WINDOW_S * 1000)
    return table.assign(
        load_peak=table["viewers_peak"] / table["carries_viewers"].astype("Float64"),
        viewers_mean=table["ms"] / table["windows"] / (WINDOW_S * 1000),
        recorded_s=table["windows"] * float(WINDOW_S),
        bit_rate=table["accepted"] * 8000 / table["ms"],
        trouble_share=table["trouble_ms"] / table["ms"],
        busy_peak=table["peak_busy_ppm"] / 1e6,
    )


def answer(parts: Parts, options: CapacityOptions) -> JobAnswer:
    loads = parts.pandas(LOADS.name) if parts.small else parts.table(LOADS.name).toArrow().to_pandas()
    whole = loads[loads["node"].isna()]
    ms, rate, slow = float(whole["ms"].sum()), 2.5e6, 0.05
    if ms:
        rate, slow = max(whole["accepted"].sum() * 8000 / ms, 1000.0), whole["trouble_ms"].sum() / ms
    options = replace(
        options,
        bit_rate=float(rate) if options.bit_rate is None else options.bit_rate,
        slow_share=float(slow) if options.slow_share is None else options.slow_share,
    )
    points = measured(loads)
    most_ms = loads["peak_ms"][loads["node"].notna()].max()
    figures = estimate(points, options, max(round(most_ms / (WINDOW_S * 1000)), 1) if ms else 0)
    if not ms:
        return JobAnswer(summary=figures | {"headline": headline(figures, options)})
    names = [str(name) for name, _ in loads.groupby("node")]
    of_all, carries = (figures["viewers_per_node"], figures["fitted_to"], figures["at_least"]), []
    for _, rows in loads.groupby("node"):
        own = measured(rows)
        if of_all[1] == "measurements" or why_weak(own):
            carries.append(of_all)
        else:
            viewers, ended_by = carried(fit(own), options)
            carries.append((viewers or None, "own records", ended_by == "measured"))
    parts.write("capacity_nodes", nodes_table(loads, carries), NODE_COLUMNS)
    carry = [viewers or 0 for viewers, _, _ in carries]
    figures |= {
        "nodes_recorded": len(carry),
        "carry_viewers": sum(carry),
        "carry_viewers_one_down": sum(carry) - max(carry),
        "viewers_peak": round(float(whole["peak_ms"].max()) / (WINDOW_S * 1000), 1),
        "watched_s": round(ms / 1000, 1),
        "each": _each(names, carries),
    }
    figures |= {"answer": answer_text(figures, options), "headline": headline(figures, options)}
    return JobAnswer(summary=figures)


JOB: Final = AnalysisJob(
    name="capacity", parts=(LOADS,), results=("capacity_nodes",), answer=answer, options=CapacityOptions
)
