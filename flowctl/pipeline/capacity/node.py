"""What a node needs for its viewers: a line fitted to measurements, and how far it is off (pure).

Processor time per second of a node that serves live viewers, in microseconds::

    idle + viewers * (25 * write_us + bytes_per_s * byte_us) * (1 + slow_share * SLOW_MORE)

A write is what a viewer costs however little it carries (a system call and the kernel's work), 25 times a second; a
byte is copying. Where all measurements are of one bit rate both cannot be told apart, and `BYTE_US` is taken. Memory is
what the idle server has, so much per viewer, and so much per viewer and byte a second; delay (p99) is a straight line
in the busy share of the thread, which holds below saturation. All are least squares with nothing below 0. What was not
measured is None, never a figure.

Crowds of a few viewers on a thread that idles say nothing, because it spends its time on itself (`why_weak`);
and no node of more than `MOST_REACH` times the largest measured crowd is answered for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from flowctl.errors import ConfigError

WRITES_PER_S: Final = 25.0
"""One per flush interval of the live server, at its ceiling of 40 ms."""
BYTE_US: Final = 3.4e-5
"""Of one byte: docs/benchmarks.md, 1000 viewers, 8 us more for 237 kB more."""
SLOW_MORE: Final = 0.5
"""A viewer that is served by itself costs so much more; assumed."""
SATURATED_MS: Final = 500.0
"""Healthy viewers that are so late were not served in time: such a crowd says nothing of what it would need."""
MOST_POINTS: Final = 10_000
MOST_REACH: Final = 4
"""The reference machine's cost per viewer changes by a fifth from 1000 to 4000 viewers."""
LEAST_RECORDED_VIEWERS: Final = 200
"""Largest recorded crowd from which on records are fitted to: below, what a thread does for itself is most of it."""
LEAST_RECORDED_BUSY: Final = 0.1
"""The same for the share of time that the thread was busy: below, waking up costs more than writing."""
LEAST_WRITE_US: Final = 0.5
"""A fit below this is none: a system call alone takes as long."""

MACHINE: Final = "AMD EPYC, 2 cores with the crowd on them, Python 3.11, loopback; docs/benchmarks.md of 2026-11-21"
"""What `FIGURES` are of: absolute figures moved by a third between hours on that very machine."""
IDLE_MEMORY_BYTES: Final = 46_500_000
"""Of the server without viewers: of the 53.7 MB of the soak with 1000 viewers of 600 kbit/s, 7.2 MB are theirs."""
FIGURES: Final = (
    # viewers, bit rate, us per viewer and second, delay p99 in ms, bytes of memory per viewer
    (100, 600_000, 635, 26, 7_800),
    (1_000, 600_000, 234, 42, 7_200),
    (4_000, 600_000, 183, 42, 6_900),
    (100, 2_500_000, 605, 31, 11_200),
    (1_000, 2_500_000, 242, 40, 9_500),
    (4_000, 2_500_000, 207, 92, 9_400),
)
"""Of viewers that all keep up, from table *Comparison* of that document. Few cost more: they are flushed sooner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One crowd on one node.

    Args:
        viewers: how many.
        bit_rate: of the stream, bits per second.
        cpu_us_per_s: processor time of the server per second, microseconds.
        memory_bytes: resident memory, more than 0. None: not measured.
        idle_memory_bytes: the same before the first viewer. None: not measured.
        p99_ms: delay of healthy viewers. None: not measured.
        slow_share: share of viewers that did not keep up, 0 to 1.

    Raises:
        ConfigError: a value is out of range.
    """

    viewers: int
    bit_rate: float
    cpu_us_per_s: float
    memory_bytes: int | None = None
    idle_memory_bytes: int | None = None
    p99_ms: float | None = None
    slow_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("viewers", "bit_rate", "cpu_us_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of a measurement is {getattr(self, name)}, it must be more than 0")
        for name in ("memory_bytes", "idle_memory_bytes", "p99_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} of a measurement is {value}, it must be more than 0, or null: not measured")
        if not 0 <= self.slow_share <= 1:
            raise ConfigError(f"slow_share of a measurement is {self.slow_share}, it must be 0 to 1")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON takes them."""
        return asdict(self)

    @property
    def saturated(self) -> bool:
        """Whether the machine had no room for this crowd."""
        return self.p99_ms is not None and self.p99_ms > SATURATED_MS


def reference() -> list[Measurement]:
    """Return the figures of the reference machine: for a node that nobody measured."""
    return [
        Measurement(
            viewers=viewers,
            bit_rate=bit_rate,
            cpu_us_per_s=us * viewers,
            memory_bytes=IDLE_MEMORY_BYTES + each_bytes * viewers,
            idle_memory_bytes=IDLE_MEMORY_BYTES,
            p99_ms=p99_ms,
        )
        for viewers, bit_rate, us, p99_ms, each_bytes in FIGURES
    ]


@dataclass(frozen=True, slots=True)
class NodeModel:
    """The fitted model.

    Args:
        cpu_us: of (an idle second, a write, a byte).
        memory: bytes (idle, per viewer, per viewer and byte a second). None: not measured, or of one size of crowd.
        p99: ms (at no load, added up to a busy thread). None: not measured.
        points: how many measurements it was fitted to.
        largest: viewers of the largest of them.
        residual: root mean square of the relative errors of processor time at the measured points.
    """

    cpu_us: tuple[float, float, float]
    memory: tuple[float, float, float] | None
    p99: tuple[float, float] | None
    points: int
    largest: int
    residual: float = 0.0

    def viewer_us(self, bit_rate: float, slow_share: float = 0.0) -> float:
        """Return microseconds per second for one viewer; a slow one costs `SLOW_MORE` more."""
        return (WRITES_PER_S * self.cpu_us[1] + bit_rate / 8 * self.cpu_us[2]) * (1 + slow_share * SLOW_MORE)

    def cpu_us_per_s(self, viewers: float, bit_rate: float, slow_share: float = 0.0) -> float:
        """Return the processor time per second, microseconds."""
        return self.cpu_us[0] + viewers * self.viewer_us(bit_rate, slow_share)

    def one_memory_bytes(self, bit_rate: float) -> float | None:
        """Return the memory of one viewer; None: not measured."""
        return None if self.memory is None else self.memory[1] + self.memory[2] * bit_rate / 8

    def memory_bytes(self, viewers: float, bit_rate: float) -> float | None:
        """Return the resident memory; None: not measured."""
        one = self.one_memory_bytes(bit_rate)
        return None if one is None or self.memory is None else self.memory[0] + viewers * one

    def p99_ms(self, busy: float) -> float | None:
        """Return the delay at a busy share of 0 to 1; None: not measured."""
        return None if self.p99 is None else self.p99[0] + self.p99[1] * busy

    def error(self, point: Measurement) -> float:
        """Return by what share the predicted processor time is above (or, less than 0, below) the measured."""
        return self.cpu_us_per_s(point.viewers, point.bit_rate, point.slow_share) / point.cpu_us_per_s - 1


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return factors, none below 0, with which the columns of `rows` come near their values.

    Columns with a negative factor are left out one by one, the most negative first; one of zeros has the factor 0.
    """
    import numpy as np

    table, wanted = np.asarray(rows, float), np.asarray(values, float)
    scales = np.sqrt((table**2).sum(axis=0))
    chosen = [column for column in range(table.shape[1]) if scales[column] > 0]
    factors = np.zeros(table.shape[1])
    while chosen:
        found = np.linalg.lstsq(table[:, chosen] / scales[chosen], wanted, rcond=None)[0]
        worst = int(np.argmin(found))
        if found[worst] >= 0:
            factors[chosen] = found / scales[chosen]
            break
        del chosen[worst]
    return [float(factor) for factor in factors]


def fit(points: Sequence[Measurement]) -> NodeModel:
    """Fit the model.

    Args:
        points: 1 to 10,000 measurements; saturated ones are left out. From one size of crowd the idle time is 0.

    Raises:
        ConfigError: there are none, too many, or they do not tell what a viewer costs.
    """
    points = [point for point in points if not point.saturated]
    if not 1 <= len(points) <= MOST_POINTS:
        raise ConfigError(
            f"there are {len(points)} measurements without saturation, the model needs 1 to {MOST_POINTS}",
            hint=f"crowds with a p99 above {SATURATED_MS:g} ms do not count: measure smaller ones",
        )
    idle_us, write_us, byte_us = _costs(points)
    if write_us < LEAST_WRITE_US:
        raise ConfigError(
            f"the measurements do not tell what a viewer costs: {write_us:.2f} us per write, which no system call is",
            hint="processor time has to grow with the crowd: measure larger crowds, or crowds further apart",
        )
    delays = [(point.cpu_us_per_s / 1e6, point.p99_ms) for point in points if point.p99_ms is not None]
    p99 = None
    if delays:
        start, slope = least_squares([(1.0, busy) for busy, _ in delays], [ms for _, ms in delays])
        p99 = (
            (start, slope)
            if len({busy for busy, _ in delays}) > 1
            else (sum(ms for _, ms in delays) / len(delays), 0.0)
        )
    largest = max(point.viewers for point in points)
    model = NodeModel((idle_us, write_us, byte_us), _memory(points), p99, len(points), largest)
    return replace(model, residual=math.sqrt(sum(model.error(point) ** 2 for point in points) / len(points)))


def _rates_differ(points: Sequence[Measurement]) -> bool:
    """Return whether bit rates are twice apart: closer ones tell noise, and no byte from a write."""
    return bool(points) and max(point.bit_rate for point in points) >= 2 * min(point.bit_rate for point in points)


def _costs(points: Sequence[Measurement]) -> tuple[float, float, float]:
    """Return microseconds of (an idle second, a write, a byte), by least squares of relative errors."""
    rates, alone = _rates_differ(points), len({point.viewers for point in points}) == 1
    rows, values = [], []
    for point in points:
        served, cost = point.viewers * (1 + point.slow_share * SLOW_MORE), point.cpu_us_per_s
        copied = served * point.bit_rate / 8
        rows.append((0.0 if alone else 1 / cost, served * WRITES_PER_S / cost, copied / cost if rates else 0.0))
        values.append(1.0 if rates else 1 - copied * BYTE_US / cost)
    idle_us, write_us, byte_us = least_squares(rows, values)
    return idle_us, write_us, byte_us if rates else BYTE_US


def _memory(points: Sequence[Measurement]) -> tuple[float, float, float] | None:
    known = [point for point in points if point.memory_bytes is not None]
    rates = _rates_differ(known)
    rows = [(1.0, float(point.viewers), point.viewers * point.bit_rate / 8 * rates) for point in known]
    values = [float(point.memory_bytes or 0) for point in known]
    idle = [float(point.idle_memory_bytes) for point in points if point.idle_memory_bytes is not None]
    rows, values = rows + [(1.0, 0.0, 0.0)] * len(idle), values + idle
    if len({row[1] for row in rows}) < 2:
        return None
    start, one, held_s = least_squares(rows, values)
    return (start, one, held_s) if one or held_s else None  # no viewer costs nothing: that is noise


def why_weak(points: Sequence[Measurement]) -> str:
    """Return why recorded crowds, whose cost is the busy share of a thread, say nothing of larger ones; or nothing."""
    if not points:
        return "there are no seconds with viewers in the records"
    largest = max(points, key=lambda point: point.viewers)
    if largest.viewers < LEAST_RECORDED_VIEWERS:
        return f"the largest recorded crowd is {largest.viewers} viewers, {LEAST_RECORDED_VIEWERS} are needed"
    if (busy := largest.cpu_us_per_s / 1e6) < LEAST_RECORDED_BUSY:
        return f"the thread was busy for {busy:.1%} at most, {LEAST_RECORDED_BUSY:.0%} are needed"
    try:
        fit(points)
    except ConfigError as error:
        return str(error)
    return ""


def held_out_error(points: Sequence[Measurement]) -> tuple[float, Measurement] | None:
    """Return the error at the largest crowd when the model is fitted without it, and that crowd; None: too few."""
    points = [point for point in points if not point.saturated]
    largest = max(points, key=lambda point: (point.viewers, point.bit_rate), default=None)
    rest = [point for point in points if largest is not None and point.viewers < largest.viewers]
    return None if largest is None or not rest else (fit(rest).error(largest), largest)


# -- files of measurements


def parse_measurements(text: str, where: str) -> list[Measurement]:
    """Return the points of a file of measurements.

    Args:
        text: one or several JSON values, one after the other: results of ``flowctl load --json --server-pid PID``, what
            a bench left in bench/results/capacity.json, fanout.json or compare.json (of that, the lines of flowctl), or
            an object with a list ``points`` of the fields of `Measurement`.
        where: name of the file, for errors.

    Raises:
        ConfigError: it is none of these, or a value is wrong.
    """
    try:
        points = [point for values in _values(text) for point in _points_of(values)]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", hint=error.hint) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{where}: no measurements: {type(error).__name__}: {error}",
            hint="give what python bench capacity left, or what flowctl load --json --server-pid PID wrote",
        ) from error
    if not points:
        raise ConfigError(f"{where}: there are no measurements in it")
    return points


def _values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, which may stand one after the other (``cat a.json b.json``)."""
    decoder, rest = json.JSONDecoder(), text.lstrip()
    while rest:
        value, end = decoder.raw_decode(rest)
        yield value
        rest = rest[end:].lstrip()


def _points_of(values: Any) -> Iterator[Measurement]:
    if isinstance(values, list):
        for value in values:
            yield from _points_of(value)
    elif "points" in values:
        yield from (Measurement(**point) for point in values["points"])
    elif "rows" in values:
        yield from (_of_row(row) for row in values["rows"] if row.get("name", "flowctl") == "flowctl")
    else:
        yield _of_load(values)


def _of_row(row: Mapping[str, Any]) -> Measurement:
    """Return the point of a row of a bench; of a machine that was full the delay says so too, if it was measured."""
    if "cpu_us_per_s" in row:
        names = {item.name for item in fields(Measurement)}
        return Measurement(**{name: value for name, value in row.items() if name in names})
    p99_ms = SATURATED_MS + 1 if row.get("doubts") else row["delay_p99_ms"]
    cost = row["cpu_us_per_viewer_s"] * row["viewers"]
    return Measurement(viewers=row["viewers"], bit_rate=row["bit_rate"], cpu_us_per_s=cost, p99_ms=p99_ms)


def _of_load(values: Mapping[str, Any]) -> Measurement:
    """Return the point that a load run is; it must have been given the server's process."""
    viewers, healthy = values["viewers"]["connections"], values["profiles"]["healthy"]
    cost, rss_kb = values["run"]["cpu_us_per_viewer_s"], values["run"]["rss_kb"]
    if cost is None:
        raise ConfigError("the load run does not know the server's processor time", hint="give it --server-pid PID")
    return Measurement(
        viewers=viewers,
        bit_rate=healthy["kbit_s"] * 1000,
        cpu_us_per_s=cost * viewers,
        memory_bytes=int(rss_kb * 1024) if rss_kb else None,
        p99_ms=healthy["p99_ms"],
        slow_share=1 - healthy["connections"] / viewers,
    )
