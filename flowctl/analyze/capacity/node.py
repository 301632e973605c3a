"""What a node needs for its viewers: lines fitted to measurements, and how far they are off (pure).

Microseconds of processor time per second: ``idle + viewers * (each + bytes_per_s * byte) * (1 + slow_share *
SLOW_MORE)``; memory is a line of the same form. Both are least squares of relative errors with nothing below 0. Where
all measurements are of one bit rate, `BYTE_US` is taken for `byte`. What was not measured is None, never a figure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import numpy as np

from flowctl.charts.words import plural
from flowctl.errors import ConfigError

BYTE_US: Final = 3.4e-5
"""Processor time per byte, in us: docs/benchmarks.md, 1000 viewers, 8 us more for 237 kB more."""
SLOW_MORE: Final = 0.5
"""Extra cost, as a share, of a viewer that is served by itself; assumed."""
SATURATED_MS: Final = 500.0
"""Delay of healthy viewers that were not served in time: their crowd says nothing of what it would need."""
LEAST_RECORDED_VIEWERS: Final = 200
"""Least viewers of the largest recorded crowd for a fit: with fewer, most of the load is the thread's own."""
LEAST_RECORDED_BUSY: Final = 0.1
"""Least busy share of the thread for a fit: below, waking up costs more than writing."""
LEAST_VIEWER_US: Final = 12.5
"""Least cost of a viewer that is believed: system calls alone, one per 40 ms (the longest flush interval), take it."""

MEASURE: Final = (
    "not known for your machine: measure it (flowctl load rtmp://127.0.0.1/live/test --publishers 1 --viewers 500 "
    "--server-pid PID --json > FILE, then flowctl analyze capacity EVENTS --out DIR --measurements FILE)"
)
"""Advice for a node that was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One crowd on one node; `ConfigError` where a value is out of range."""

    viewers: int
    bit_rate: float  # of the stream, bits per second
    cpu_us_per_s: float  # processor time of the server per second, microseconds
    memory_bytes: int | None = None  # resident memory; None here and below: not measured
    idle_memory_bytes: int | None = None  # the same before the first viewer
    p99_ms: float | None = None  # delay of healthy viewers
    slow_share: float = 0.0  # share of viewers that did not keep up

    def __post_init__(self) -> None:
        if not 0 <= self.slow_share <= 1:
            raise ConfigError(f"slow_share of a measurement is {self.slow_share}, it must be 0 to 1")
        for item in fields(self)[:-1]:
            value, optional = getattr(self, item.name), item.default is None
            if not (optional if value is None else 0 < value < math.inf):
                allowed = "more than 0, or null: not measured" if optional else "more than 0"
                raise ConfigError(f"{item.name} of a measurement is {value}, it must be {allowed}")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def saturated(self) -> bool:
        return self.p99_ms is not None and self.p99_ms > SATURATED_MS

    @property
    def served(self) -> float:
        """The healthy viewers that would have cost as much."""
        return self.viewers * (1 + self.slow_share * SLOW_MORE)


@dataclass(frozen=True, slots=True)
class FittedLine:
    """What a node takes: `idle`, `each` viewer, and for `byte` a second of a viewer; one unit for all."""

    idle: float
    each: float
    byte: float

    def one(self, bit_rate: float) -> float:
        return self.each + self.byte * bit_rate / 8

    def of(self, viewers: float, bit_rate: float) -> float:
        return self.idle + viewers * self.one(bit_rate)


@dataclass(frozen=True, slots=True)
class NodeModel:
    """The fitted model."""

    cpu: FittedLine  # microseconds per second
    memory: FittedLine | None  # bytes; None: not measured, or of one size of crowd
    points: int  # to which it was fitted
    largest: int  # viewers of the largest of them
    residual: float = 0.0  # root mean square of the relative errors of processor time at these points

    def error(self, point: Measurement) -> float:
        """Return by what share the predicted processor time is above (or, less than 0, below) the measured."""
        return self.cpu.of(point.served, point.bit_rate) / point.cpu_us_per_s - 1


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return factors, none below 0, with which the columns of `rows` come near their values."""
    table, wanted = np.asarray(rows, float), np.asarray(values, float)
    scales = np.sqrt((table**2).sum(axis=0))
    chosen, factors = np.flatnonzero(scales), np.zeros(len(scales))
    while chosen.size:
        found = np.linalg.lstsq(table[:, chosen] / scales[chosen], wanted, rcond=None)[0]
        if found.min() >= 0:
            factors[chosen] = found / scales[chosen]
            break
        chosen = np.delete(chosen, found.argmin())
    return [float(factor) for factor in factors]


def line_of(points: Sequence[tuple[float, float, float]], byte: float = 0.0) -> FittedLine:
    viewers, rates, values = np.asarray(points, float).T
    several, apart = viewers.max() > 1.1 * viewers.min(), rates.max() >= 2 * rates[viewers > 0].min()
    octets = viewers * rates / 8
    rows = np.column_stack([np.full(len(points), several), viewers, octets * apart]) / values[:, None]
    line = FittedLine(*least_squares(rows.tolist(), (1 - (not apart) * octets * byte / values).tolist()))
    return line if apart else replace(line, byte=byte)


def fit(points: Sequence[Measurement]) -> NodeModel:
    points = [point for point in points if not point.saturated]
    if not points:
        raise ConfigError(
            "there are 0 measurements without saturation",
            hint=f"crowds with a p99 above {SATURATED_MS:g} ms do not count: measure smaller ones",
        )
    cpu = line_of([(at.served, at.bit_rate, at.cpu_us_per_s) for at in points], BYTE_US)
    if cpu.each < LEAST_VIEWER_US:
        raise ConfigError(
            f"the measurements do not tell what a viewer costs: {cpu.each:.1f} us, less than its system calls alone",
            hint="processor time has to grow with the crowd: measure larger crowds, or crowds further apart",
        )
    known = [(at.viewers, at.bit_rate, at.memory_bytes) for at in points if at.memory_bytes]
    known += [(0, 0.0, at.idle_memory_bytes) for at in points if at.idle_memory_bytes]
    memory = line_of(known) if len({viewers for viewers, _, _ in known}) > 1 else None
    if memory and not (memory.each or memory.byte):
        memory = None  # no viewer costs nothing: that is noise
    model = NodeModel(cpu, memory, len(points), max(point.viewers for point in points))
    return replace(model, residual=math.sqrt(sum(model.error(point) ** 2 for point in points) / len(points)))


def why_weak(points: Sequence[Measurement], most: int = 0) -> str:
    """Return why recorded crowds, whose cost is the busy share of a thread, say nothing of larger ones; or nothing.

    `most` is the largest of those to which nothing can be fitted.
    """
    if not (points or most):
        return "there are no seconds with viewers in the records"
    largest = max(points, key=lambda point: point.viewers, default=None)
    if (viewers := largest.viewers if largest else most) < LEAST_RECORDED_VIEWERS:
        return f"the largest recorded crowd is {plural(viewers, 'viewer')}, {LEAST_RECORDED_VIEWERS} are needed"
    if not largest:
        return "threads were full, or how busy they were was not recorded"
    if (busy := largest.cpu_us_per_s / 1e6) < LEAST_RECORDED_BUSY:
        return f"the thread was busy for {busy:.1%} at most, {LEAST_RECORDED_BUSY:.0%} are needed"
    try:
        fit(points)
    except ConfigError as error:
        return str(error)
    return ""


def held_out_error(points: Sequence[Measurement]) -> tuple[float, Measurement] | None:
    """Return the error at the largest crowd when the model is fitted without it, and that crowd."""
    points = [point for point in points if not point.saturated]
    largest = max(points, key=lambda point: (point.viewers, point.bit_rate))
    try:
        return fit([point for point in points if point.viewers < largest.viewers]).error(largest), largest
    except ConfigError:
        return None


def parse_measurements(text: str, where: str) -> list[Measurement]:
    points, rest = list[Measurement](), text.lstrip()
    try:
        while rest:
            value, end = json.JSONDecoder().raw_decode(rest)
            points += _points_of(value)
            rest = rest[end:].lstrip()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", hint=error.hint) from error
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        hint = "give what python bench capacity left, or what flowctl load --json --server-pid PID wrote"
        raise ConfigError(f"{where}: no measurements: {error!r}", hint=hint) from error
    if not points:
        raise ConfigError(f"{where}: there are no measurements in it")
    return points


def _points_of(value: Any) -> Iterator[Measurement]:
    if isinstance(value, Mapping) and "rows" in value:
        value = value["rows"]
    if isinstance(value, list):
        for item in value:
            yield from _points_of(item)
    elif isinstance(value["viewers"], Mapping):  # a load run
        viewers, healthy, run = value["viewers"]["connections"], value["profiles"]["healthy"], value["run"]
        if run["cpu_us_per_viewer_s"] is None:
            raise ConfigError("the load run does not know the server's processor time", hint="give it --server-pid PID")
        yield Measurement(
            viewers=viewers,
            bit_rate=healthy["kbit_s"] * 1000,
            cpu_us_per_s=run["cpu_us_per_viewer_s"] * viewers,
            memory_bytes=int(run["rss_kb"] * 1024) if run["rss_kb"] else None,
            p99_ms=healthy["p99_ms"],
            slow_share=1 - healthy["connections"] / viewers,
        )
    else:
        yield Measurement(**{item.name: value[item.name] for item in fields(Measurement) if item.name in value})
