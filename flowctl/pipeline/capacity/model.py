"""What a node needs for its viewers: a model of processor time, delay and memory, fitted to measurements (pure).

Processor time per second of a node that serves live viewers, in microseconds::

    idle + viewers * (writes_per_s * write_us + bytes_per_s * byte_us) * (1 + slow_share * slow_more)

A write is what a viewer costs however little it carries (a system call and the kernel's work); a byte is copying. Where
the measurements are all of one bit rate, both cannot be told apart, and `BYTE_US` is taken; `idle` is what is left, and
0 where all crowds are of one size. The fit is by least squares of relative errors with nothing below 0, and its
residuals are stated with it.

Memory is what the idle server has, so much per viewer, and, where crowds of several bit rates were measured, so much
per viewer and byte a second. Delay (p99) is a straight line in the busy share of the thread, which holds below
saturation and is used nowhere else. What was not measured is None, never a figure.

A model says nothing of crowds far larger than those it was fitted to: `MOST_REACH` bounds how far it is asked. Crowds
of a few viewers on a thread that idles say nothing at all, because such a thread spends its time on itself; `why_weak`
says so of crowds from records.

Source of the prior figures: docs/benchmarks.md, 1000 viewers on one thread, 600 kbit/s against 2.5 Mbit/s at 40 ms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from flowctl.errors import ConfigError
from flowctl.pipeline.capacity.leastsquares import least_squares

FLUSH_S: Final = 0.04
"""Flush interval of the live server, at its ceiling: 25 writes a second for each viewer that keeps up."""
WRITE_US: Final = 9.3
"""Of one write to one viewer, kernel included."""
BYTE_US: Final = 3.4e-5
"""Of one byte: 8 us more for 237 kB more."""
SLOW_MORE: Final = 0.5
"""A viewer that is served by itself costs so much more; assumed, unless crowds with and without slow ones are given."""
SATURATED_MS: Final = 500.0
"""Healthy viewers that are so late were not served in time: ten flush intervals and more."""
MOST_POINTS: Final = 10_000
MOST_REACH: Final = 4
"""Largest node that a model is asked about, in times of the largest crowd it was fitted to: the reference machine's
cost per viewer changes by a fifth from 1000 to 4000 viewers, and by 2.5 times from 100 to 1000."""
LEAST_RECORDED_VIEWERS: Final = 200
"""Largest recorded crowd from which on records are fitted to: below, what a thread does for itself is most of it."""
LEAST_RECORDED_BUSY: Final = 0.1
"""The same for the share of time that the thread was busy: below, waking up costs more than writing."""
LEAST_WRITE_US: Final = 0.5
"""A fit below this is none: a system call alone takes as long."""
RATES_APART: Final = 2.0
"""Bit rates that differ by this factor tell a byte from a write; closer ones tell noise."""


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
        """Whether the machine had no room for this crowd: what it did then says nothing about what it would need."""
        return self.p99_ms is not None and self.p99_ms > SATURATED_MS

    @property
    def bytes_per_s(self) -> float:
        """What each viewer is sent."""
        return self.bit_rate / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeModel:
    """The fitted model.

    Args:
        idle_us: per second without viewers.
        write_us: per write and viewer.
        byte_us: per byte.
        slow_more: how much more a slow viewer costs, as a share.
        idle_memory_bytes: without viewers. None: memory was not measured, or only of one size of crowd.
        viewer_memory_bytes: per viewer, whatever the bit rate.
        held_s: memory per viewer and byte a second.
        p99_at_idle_ms: delay at no load. None: not measured.
        p99_per_busy_ms: added from an idle to a busy thread.
        residual: root mean square of the relative errors at the measured points.
        points: how many there were.
        largest: viewers of the largest of them.
        writes_per_s: per viewer.
    """

    idle_us: float
    write_us: float
    byte_us: float
    slow_more: float
    idle_memory_bytes: float | None
    viewer_memory_bytes: float
    held_s: float
    p99_at_idle_ms: float | None
    p99_per_busy_ms: float
    residual: float
    points: int
    largest: int
    writes_per_s: float = 1 / FLUSH_S

    def viewer_us(self, bit_rate: float) -> float:
        """Return microseconds per second for one viewer that keeps up."""
        return self.writes_per_s * self.write_us + bit_rate / 8 * self.byte_us

    def cpu_us_per_s(self, viewers: float, bit_rate: float, slow_share: float = 0.0) -> float:
        """Return the processor time per second, microseconds."""
        return self.idle_us + viewers * self.viewer_us(bit_rate) * (1 + slow_share * self.slow_more)

    def one_memory_bytes(self, bit_rate: float) -> float | None:
        """Return the memory of one viewer; None: not measured."""
        return None if self.idle_memory_bytes is None else self.viewer_memory_bytes + self.held_s * bit_rate / 8

    def memory_bytes(self, viewers: float, bit_rate: float) -> float | None:
        """Return the resident memory; None: not measured."""
        one = self.one_memory_bytes(bit_rate)
        return None if one is None or self.idle_memory_bytes is None else self.idle_memory_bytes + viewers * one

    def p99_ms(self, busy: float) -> float | None:
        """Return the delay at a busy share of 0 to 1; None: not measured."""
        return None if self.p99_at_idle_ms is None else self.p99_at_idle_ms + self.p99_per_busy_ms * busy


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (at 0, slope) of the straight line through `points` by least squares, neither below 0."""
    mean = sum(y for _, y in points) / len(points)
    if len({x for x, _ in points}) < 2:
        return mean, 0.0
    start, slope = least_squares([([1.0, x], y) for x, y in points])
    return start, slope


def fit(points: Sequence[Measurement]) -> NodeModel:
    """Fit the model.

    Args:
        points: 1 to 10,000 measurements; saturated ones are left out. From one, `idle_us` is 0.

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
    idle_memory, viewer_memory, held_s = _memory(points)
    delays = [(point.cpu_us_per_s / 1e6, point.p99_ms) for point in points if point.p99_ms is not None]
    p99_start, p99_slope = _line(delays) if delays else (None, 0.0)
    model = NodeModel(
        idle_us=idle_us,
        write_us=write_us,
        byte_us=byte_us,
        slow_more=SLOW_MORE,
        idle_memory_bytes=idle_memory,
        viewer_memory_bytes=viewer_memory,
        held_s=held_s,
        p99_at_idle_ms=p99_start,
        p99_per_busy_ms=p99_slope,
        residual=0.0,
        points=len(points),
        largest=max(point.viewers for point in points),
    )
    squares = [error_of(model, point) ** 2 for point in points]
    return replace(model, residual=(sum(squares) / len(squares)) ** 0.5)


def _rates_differ(points: Sequence[Measurement]) -> bool:
    return max(point.bit_rate for point in points) >= RATES_APART * min(point.bit_rate for point in points)


def _costs(points: Sequence[Measurement]) -> tuple[float, float, float]:
    """Return microseconds of (an idle second, a write, a byte), by least squares of relative errors."""
    rates = _rates_differ(points)
    alone = len({point.viewers for point in points}) == 1
    rows = []
    for point in points:
        served = point.viewers * (1 + point.slow_share * SLOW_MORE)
        copied = served * point.bytes_per_s
        value = point.cpu_us_per_s - (0.0 if rates else copied * BYTE_US)
        columns = (0.0 if alone else 1.0, served / FLUSH_S, copied if rates else 0.0)
        rows.append(([column / point.cpu_us_per_s for column in columns], value / point.cpu_us_per_s))
    idle_us, write_us, byte_us = least_squares(rows)
    return idle_us, write_us, byte_us if rates else BYTE_US


def _memory(points: Sequence[Measurement]) -> tuple[float | None, float, float]:
    """Return bytes (idle, per viewer, per viewer and byte a second); None, 0, 0 where they cannot be told."""
    known = [point for point in points if point.memory_bytes is not None]
    rates = bool(known) and _rates_differ(known)
    rows = [
        ([1.0, float(point.viewers), point.viewers * point.bytes_per_s if rates else 0.0], float(point.memory_bytes))
        for point in known
        if point.memory_bytes is not None
    ]
    idle = [point.idle_memory_bytes for point in points if point.idle_memory_bytes is not None]
    rows += [([1.0, 0.0, 0.0], float(size)) for size in idle]
    if len({columns[1] for columns, _ in rows}) < 2:
        return None, 0.0, 0.0
    start, one, held_s = least_squares(rows)
    return (start, one, held_s) if one or held_s else (None, 0.0, 0.0)  # no viewer costs nothing: that is noise


def why_weak(points: Sequence[Measurement]) -> str:
    """Return why crowds from records, whose cost is the busy share of a thread, say nothing of larger ones; or nothing.

    Args:
        points: of `flow_samples`; none is a reason too.
    """
    if not points:
        return "there are no seconds with viewers in the records"
    largest = max(points, key=lambda point: point.viewers)
    if largest.viewers < LEAST_RECORDED_VIEWERS:
        return f"the largest recorded crowd is {largest.viewers} viewers, {LEAST_RECORDED_VIEWERS} are needed"
    busy = largest.cpu_us_per_s / 1e6
    if busy < LEAST_RECORDED_BUSY:
        return f"the thread was busy for {busy:.1%} at most, {LEAST_RECORDED_BUSY:.0%} are needed"
    try:
        fit(points)
    except ConfigError as error:
        return str(error)
    return ""


def error_of(model: NodeModel, point: Measurement) -> float:
    """Return by what share the predicted processor time is above (or, less than 0, below) the measured."""
    return model.cpu_us_per_s(point.viewers, point.bit_rate, point.slow_share) / point.cpu_us_per_s - 1


def held_out_error(points: Sequence[Measurement]) -> tuple[float, Measurement] | None:
    """Return the error at the largest crowd when the model is fitted without it, and that crowd; None: too few."""
    points = [point for point in points if not point.saturated]
    largest = max(points, key=lambda point: (point.viewers, point.bit_rate), default=None)
    rest = [point for point in points if largest is not None and point.viewers < largest.viewers]
    if largest is None or not rest:
        return None
    return error_of(fit(rest), largest), largest


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
    decoder, at = json.JSONDecoder(), 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        value, at = decoder.raw_decode(text, at)
        yield value


def _points_of(values: Any) -> Iterator[Measurement]:
    """Yield the points of one value."""
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
    """Return the point of a row of a bench, which has columns of its own beside those of a measurement."""
    if "cpu_us_per_s" in row:
        names = {item.name for item in fields(Measurement)}
        return Measurement(**{name: value for name, value in row.items() if name in names})
    if row.get("doubts"):  # the machine was full: the delay says so too, if it was measured
        return _row_of_crowd(row, SATURATED_MS + 1)
    return _row_of_crowd(row, row["delay_p99_ms"])


def _row_of_crowd(row: Mapping[str, Any], p99_ms: float | None) -> Measurement:
    """Return the point of a row with figures per viewer. What the idle server had is not in it, so memory is None."""
    cost = row["cpu_us_per_viewer_s"] * row["viewers"]
    return Measurement(viewers=row["viewers"], bit_rate=row["bit_rate"], cpu_us_per_s=cost, p99_ms=p99_ms)


def _of_load(values: Mapping[str, Any]) -> Measurement:
    """Return the point that a load run is; it must have been given the server's process."""
    viewers = values["viewers"]["connections"]
    cost = values["run"]["cpu_us_per_viewer_s"]
    if cost is None:
        raise ConfigError("the load run does not know the server's processor time", hint="give it --server-pid PID")
    healthy = values["profiles"]["healthy"]
    rss_kb = values["run"]["rss_kb"]
    return Measurement(
        viewers=viewers,
        bit_rate=healthy["kbit_s"] * 1000,
        cpu_us_per_s=cost * viewers,
        memory_bytes=int(rss_kb * 1024) if rss_kb else None,
        p99_ms=healthy["p99_ms"],
        slow_share=1 - healthy["connections"] / viewers,
    )
