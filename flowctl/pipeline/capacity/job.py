"""``capacity``: how many viewers a node carries, and how many nodes a crowd takes with any one of them dead.

Theory of operation. A node model (`flowctl.pipeline.capacity.node`) is fitted to measurements: a file of them, where
one is given; else what was recorded of the servers' threads, where crowds were large enough to say something; else the
reference machine, and the answer begins with saying so. A node carries so many viewers as leave 95 % of the nodes of a
crowd below the wanted busy share, and memory below its bound. How sure that is: twice the model's residual gives the
range, and the largest measured crowd is predicted from the others, with that error beside the answer. What was not
measured is null. What a fleet takes follows from that (`flowctl.pipeline.capacity.fleet`) and from what nodes and
streams were loaded with (`flowctl.pipeline.capacity.loads`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Final

from flowctl.errors import ConfigError
from flowctl.pipeline.capacity import fleet, node
from flowctl.pipeline.capacity.loads import LOADS
from flowctl.pipeline.capacity.node import Measurement, NodeModel, fit, why_weak
from flowctl.pipeline.job import Answer, Job, Parts
from flowctl.units import format_bit_rate, format_size

MOST_REACH: Final = 4
"""No node of more than so many times the largest measured crowd is answered for: the reference machine's cost per
viewer changes by a fifth from 1000 to 4000 viewers."""
SPREAD: Final = 0.4**2 / 24
"""Variance of what a viewer costs, of its mean: evenly less likely up to a fifth more or less; assumed."""
AT_95: Final = NormalDist().inv_cdf(0.95)
_BOUNDS: Final = {
    "viewers": (1, 1e8), "bit_rate": (1_000, 1e9), "slow_share": (0, 1),
    "busy": (0.01, 1), "memory_bytes": (1, 1e15), "headroom": (0, 0.9),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityOptions:
    """What crowd, and what a node may be asked; `ConfigError` where a value is out of range."""

    viewers: int = 1_000_000  # of the whole crowd
    bit_rate: float | None = None  # of the stream, bits per second; None: as recorded, else 2.5 Mbit/s
    slow_share: float | None = None  # viewers whose link does not carry the stream; None: as recorded, else 5 %
    busy: float = 0.7  # share of a thread that may be used, at 95 % of the nodes
    memory_bytes: int | None = None  # that a node has; None: not asked
    measurements: str | None = None  # text of a file, which goes before what was recorded
    measurements_name: str = "measurements"  # its name, for errors
    headroom: float = 0.2  # share of each node of a fleet that is kept free while all nodes live

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} is {value}, it must be {least:g} to {most:g}")


def carried(model: NodeModel, options: CapacityOptions, error: float = 0.0) -> tuple[int, bool]:
    """Return the viewers that a node carries where they cost `error` more than the model says, and whether it is more.

    A viewer is slow by chance, and costs more or less than the next (`SPREAD`). Of many the sum is normal, so of
    `n` viewers 95 % of the nodes need less than ``n * mean + AT_95 * sqrt(n * variance)``, and this is solved for `n`.
    """
    rate, slow, reach = options.bit_rate or 0.0, options.slow_share or 0.0, MOST_REACH * model.largest
    mean = 1 + slow * node.SLOW_MORE
    variance = (1 + SPREAD) * (1 - slow + slow * (1 + node.SLOW_MORE) ** 2) - mean**2
    room = max(0.0, options.busy * 1e6 / (1 + error) - model.cpu.idle) / model.cpu.one(rate)
    half = AT_95 * math.sqrt(variance) / (2 * mean)
    most = (math.sqrt(half**2 + room / mean) - half) ** 2
    if options.memory_bytes is not None and model.memory is not None:
        most = min(most, max(0.0, options.memory_bytes - model.memory.idle) / model.memory.one(rate))
    return min(int(most), reach), most >= reach


def estimate(points: list[Measurement], options: CapacityOptions) -> dict[str, Any]:
    """Return the answer for one node, what it rests on, and how far that was from a real crowd.

    Args:
        points: crowds that were recorded.
        options: with `bit_rate` and `slow_share`.

    Raises:
        ConfigError: the measurements tell nothing, or memory is asked for but was not measured.
    """
    source, used, weak = "records", points, ""
    if options.measurements is not None:  # of whole servers from outside: more than a thread's own meter knows
        source, used = "measurements", node.parse_measurements(options.measurements, options.measurements_name)
    elif weak := why_weak(points):
        source, used = "reference", node.reference()
    model, rate = fit(used), options.bit_rate or 0.0
    memory, held_out, off = model.memory, node.held_out_error(used), min(2 * model.residual, 0.9)
    if options.memory_bytes is not None and memory is None:
        raise ConfigError(
            "a node's memory is to be kept, but what a viewer takes of it was not measured",
            hint="give --measurements of crowds of several sizes with memory (python bench capacity), or no --memory",
        )
    viewers, at_least = carried(model, options)
    found = {
        "viewers_per_node": viewers or None,
        "at_least": at_least,
        "viewers_per_node_low": carried(model, options, off)[0],
        "viewers_per_node_high": carried(model, options, -off)[0],
        "memory_bytes_per_node": round(memory.of(viewers, rate)) if memory and viewers else None,
        "nodes": math.ceil(options.viewers / viewers) if viewers else None,
        "cpu_us_per_viewer_s": round(model.cpu.one(rate), 1),
        "memory_bytes_per_viewer": round(memory.one(rate)) if memory else None,
        "bit_rate": rate,
        "fitted_to": source,
        "measured_crowds": model.points,
        "largest_measured_viewers": model.largest,
        "largest_recorded_viewers": max((point.viewers for point in points), default=None),
        "residual_share": round(model.residual, 4),
        "error_share": round(held_out[0], 4) if held_out else None,
    }
    rates = [point.bit_rate for point in used]
    return {"answer": " ".join(_words(found, options, weak, (min(rates), max(rates)))), **found}


def _words(found: Mapping[str, Any], options: CapacityOptions, weak: str, rates: tuple[float, float]) -> Iterator[str]:
    """Yield the sentences of the answer: on what it rests first where that is not the user's own machine."""
    viewers, memory, at_least = found["viewers_per_node"], found["memory_bytes_per_node"], found["at_least"]
    rate, low, high = (format_bit_rate(value) for value in (found["bit_rate"], *rates))
    asked = f"viewers of {rate} at {options.busy:.0%} of a thread"
    if found["fitted_to"] == "reference":
        yield f"REFERENCE MACHINE, NOT YOURS ({node.MACHINE})."
    if viewers is None:
        yield f"A node carries no {asked} as was asked for."
    elif at_least:
        yield f"A node carries AT LEAST {viewers} {asked}: NOT KNOWN BEYOND, that is {MOST_REACH} times the largest"
        yield "measured crowd."
    else:
        yield f"A node carries {viewers} {asked}, {found['viewers_per_node_low']} to {found['viewers_per_node_high']}"
        yield "by the residual of the fit."
    if viewers:
        yield f"{format_size(memory)} of memory;" if memory else "Memory not measured;"
        yield f"{options.viewers} viewers need {'at most ' if at_least else ''}{found['nodes']} nodes."
    yield f"Fitted to {found['measured_crowds']} crowds of up to {found['largest_measured_viewers']} viewers, residual"
    yield f"{found['residual_share']:.1%}."
    if not rates[0] / 2 <= found["bit_rate"] <= rates[1] * 2:
        yield f"NO CROWD NEAR {rate} was measured: {low} to {high} were."
    if found["error_share"] is not None:
        yield f"The largest of them, predicted from the smaller ones, was missed by {found['error_share']:+.1%}."
    if weak:
        yield f"Your records do not carry an answer: {weak}."
        yield "Measure yours: flowctl load --viewers N --server-pid PID --json > FILE, then --measurements FILE."


def answer(parts: Parts, options: CapacityOptions) -> Answer:
    """Fit and answer; of records with viewers write the tables of the fleet."""
    loads = parts.pandas(LOADS.name) if parts.small else parts.table(LOADS.name).toArrow().to_pandas()
    whole = loads[loads["kind"] == "fleet"][["ms", "accepted", "trouble_ms"]].sum()
    rate, slow = 2.5e6, 0.05
    if whole["ms"]:
        rate, slow = (
            max(float(whole["accepted"] * 8000 / whole["ms"]), 1000.0),
            float(whole["trouble_ms"] / whole["ms"]),
        )
    options = replace(
        options,
        bit_rate=rate if options.bit_rate is None else options.bit_rate,
        slow_share=slow if options.slow_share is None else options.slow_share,
    )
    summary = estimate(fleet.measured(loads), options)
    of_all = (summary["viewers_per_node"], summary["fitted_to"], summary["at_least"])

    def carries(points: list[Measurement]) -> fleet.Carries:
        """Return what a node carries: by its own crowds where they carry an answer."""
        if of_all[1] == "measurements" or why_weak(points):
            return of_all
        viewers, more = carried(fit(points), options)
        return viewers or None, "own records", more

    if whole["ms"]:
        nodes, streams = fleet.nodes_table(loads, carries), fleet.streams_table(loads)
        parts.write("capacity_nodes", nodes, fleet.NODE_COLUMNS)
        parts.write("capacity_streams", streams, fleet.STREAM_COLUMNS)
        summary["fleet"] = fleet.fleet_of(loads, nodes, streams, of_all, options.viewers, options.headroom)
    return Answer(summary=summary)


JOB: Final = Job(
    name="capacity",
    parts=(LOADS,),
    results=("capacity_nodes", "capacity_streams"),
    answer=answer,
    options=CapacityOptions,
)
