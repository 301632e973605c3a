"""What the job ``capacity`` rests its answer on, and the answer in figures and words (pure).

An answer is only as good as the crowds behind it, so it says which these are. Three sources, in this order: a file of
measurements; the records, where their crowds carry an answer (`flowctl.pipeline.capacity.model.why_weak`); the
reference machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from flowctl.addresses import Network
from flowctl.errors import ConfigError
from flowctl.pipeline.capacity.model import (
    MOST_REACH,
    Measurement,
    NodeModel,
    error_of,
    fit,
    held_out_error,
    parse_measurements,
    why_weak,
)
from flowctl.pipeline.capacity.reference import MACHINE, reference
from flowctl.units import format_bit_rate, format_size

JOIN_WRITES: Final = 12.0
"""What a join costs, in writes: handshake, commands, and the GOP cache in several of them; about 110 us."""
_MOST_VIEWERS: Final = 100_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityOptions:
    """What crowd, and what a node may be asked.

    Args:
        viewers: of the whole crowd.
        bit_rate: of the stream, bits per second. None: as recorded, else 2.5 Mbit/s.
        slow_share: share of viewers whose link does not carry the stream. None: as recorded, else 5 %.
        session_s: mean length of a session, for the rate of joins. None: as recorded, else 600 s.
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
    session_s: float | None = None
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
            "viewers": (1, _MOST_VIEWERS),
            "bit_rate": (1_000, 1e9),
            "slow_share": (0, 1),
            "session_s": (1, 604_800),
            "busy": (0.01, 1),
            "p99_ms": (1, 60_000),
            "memory_bytes": (1, 1e15),
            "headroom": (0, 0.9),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} is {value}, it must be {least:g} to {most:g}")


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

    Whole servers measured from outside know more than a thread's own meter, so they go first where there are any.

    Raises:
        ConfigError: the file of measurements is wrong, or tells nothing.
    """
    largest = max(points, key=lambda point: point.viewers, default=None)
    if options.measurements is not None:
        told = parse_measurements(options.measurements, options.measurements_name)
        return Basis("measurements", told, fit(told), recorded=largest)
    weak = why_weak(points)
    if not weak:
        return Basis("records", points, fit(points), recorded=largest)
    return Basis("reference", reference(), fit(reference()), weak, largest)


def summary_of(rows: list[dict[str, Any]], basis: Basis, options: CapacityOptions) -> dict[str, Any]:
    """Return the answer, what it rests on, and how far a real crowd was from what the model says."""
    model, bit_rate = basis.model, options.bit_rate or 0.0
    best = max((row for row in rows if row["fits"]), key=lambda row: row["viewers"], default=None)
    held_out = held_out_error(basis.points)
    one_bytes = model.one_memory_bytes(bit_rate)
    summary: dict[str, Any] = {
        "viewers_per_node": best["viewers"] if best else None,
        "at_least": _at_reach(best, model),
        "viewers_per_node_low": max((row["viewers"] for row in rows if row["busy_high"] <= options.busy), default=None),
        "viewers_per_node_high": max((row["viewers"] for row in rows if row["busy_low"] <= options.busy), default=None),
        "memory_bytes_per_node": best["memory_bytes"] if best else None,
        "nodes": best["nodes"] if best else None,
        "p99_ms": best["p99_ms"] if best else None,
        "cpu_us_per_viewer_s": round(model.viewer_us(bit_rate), 1),
        "memory_bytes_per_viewer": None if one_bytes is None else round(one_bytes),
        "bit_rate": options.bit_rate,
        "slow_share": options.slow_share,
        "session_s": options.session_s,
        "fitted_to": basis.source,
        "measured_crowds": model.points,
        "largest_measured_viewers": model.largest,
        "largest_recorded_viewers": basis.recorded.viewers if basis.recorded else None,
        "recorded_over_model": _recorded_over(basis),
        "residual_share": round(model.residual, 4),
        "error_share": None if held_out is None else round(held_out[0], 4),
    }
    answer = " ".join(_answer(best, summary, basis, options))
    return {"answer": answer[0].upper() + answer[1:], **summary}


def carried(model: NodeModel, options: CapacityOptions) -> float:
    """Return the viewers that the model alone gives a node, without noise among them: at least 1."""
    bit_rate, slow = options.bit_rate or 0.0, options.slow_share or 0.0
    one = model.viewer_us(bit_rate) * (1 + slow * model.slow_more) + JOIN_WRITES * model.write_us / (
        options.session_s or 1.0
    )
    busy = options.busy
    if model.p99_at_idle_ms is not None and model.p99_per_busy_ms > 0:
        busy = min(busy, max((options.p99_ms - model.p99_at_idle_ms) / model.p99_per_busy_ms, 0.01))
    most = (busy * 1e6 - model.idle_us) / one
    memory = model.one_memory_bytes(bit_rate)
    if options.memory_bytes is not None and memory and model.idle_memory_bytes is not None:
        most = min(most, (options.memory_bytes - model.idle_memory_bytes) / memory)
    return max(most, 1.0)


def _at_reach(best: dict[str, Any] | None, model: NodeModel) -> bool:
    """Return whether a node may carry more than the answer, only that nothing is known of it."""
    return best is not None and best["viewers"] >= MOST_REACH * model.largest


def _recorded_over(basis: Basis) -> float | None:
    """Return the recorded busy share at the largest recorded crowd over that of the model; None: not to be compared.

    A thread that served fewer viewers than any measured crowd is none to hold beside the model.
    """
    seen = basis.recorded
    if seen is None or basis.source == "records" or seen.viewers < min(point.viewers for point in basis.points):
        return None
    return round(seen.cpu_us_per_s / basis.model.cpu_us_per_s(seen.viewers, seen.bit_rate, seen.slow_share), 3)


def _answer(
    best: dict[str, Any] | None, summary: dict[str, Any], basis: Basis, options: CapacityOptions
) -> Iterator[str]:
    """Yield the sentences of the answer: on what it rests first where that is not the user's own machine."""
    model = basis.model
    if basis.source == "reference":
        yield f"REFERENCE MACHINE, NOT YOURS ({MACHINE}):"
    rate = format_bit_rate(options.bit_rate or 0.0)
    asked = f"at {options.busy:.0%} of a thread" + (
        "" if model.p99_at_idle_ms is None else f", {options.p99_ms:g} ms p99"
    )
    if best is None:
        yield f"no size of a node that was tried keeps what was asked for: {asked}, {rate}."
    else:
        yield _sizes(best, summary, model, f"{rate}, {asked}")
        yield (
            "Memory not measured;"
            if best["memory_bytes"] is None
            else f"{format_size(best['memory_bytes'])} of memory;"
        )
        if model.p99_at_idle_ms is None:
            yield "delay not measured;"
        yield f"{options.viewers} viewers need {'at most ' if summary['at_least'] else ''}{best['nodes']} nodes."
    yield f"Fitted to {model.points} crowds of up to {model.largest} viewers, residual {model.residual:.1%}."
    rates = [point.bit_rate for point in basis.points]
    if not min(rates) / 2 <= (options.bit_rate or 0.0) <= max(rates) * 2:
        yield f"NO CROWD NEAR {rate} was measured: {format_bit_rate(min(rates))} to {format_bit_rate(max(rates))} were."
    yield from _checks(summary, basis)


def _sizes(best: dict[str, Any], summary: dict[str, Any], model: NodeModel, asked: str) -> str:
    if summary["at_least"]:
        return (
            f"a node carries AT LEAST {best['viewers']} viewers of {asked}: NOT KNOWN BEYOND, measured up to"
            f" {model.largest} viewers, and no more than {MOST_REACH} times that is answered for."
        )
    low, high = summary["viewers_per_node_low"], summary["viewers_per_node_high"]
    between = "" if low is None or high is None else f" ({low} to {high} by the residual of the fit)"
    return f"a node carries {best['viewers']} viewers{between} of {asked}."


def _checks(summary: dict[str, Any], basis: Basis) -> Iterator[str]:
    """Yield what speaks for or against the answer: a crowd that was held out, and what was recorded."""
    held_out = held_out_error(basis.points)
    if held_out is not None:
        error, largest = held_out
        yield (
            f"A real load of {largest.viewers} viewers, predicted from the smaller ones, was missed by {error:+.1%};"
            f" with it in the fit the model is {error_of(basis.model, largest):+.1%} off there."
        )
    if basis.weak:
        yield f"Your records do not carry an answer: {basis.weak}."
    if summary["recorded_over_model"] is not None and basis.recorded is not None:
        yield (
            f"At {basis.recorded.viewers} viewers your thread was recorded to be"
            f" {summary['recorded_over_model']:.2f} times as busy as this model says."
        )
    if basis.source == "reference":
        yield "Measure yours: flowctl load --viewers N --server-pid PID --json > FILE, then --measurements FILE."
