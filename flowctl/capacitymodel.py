"""What a node needs for its viewers: a model of processor time, delay and memory, fitted to measurements (pure).

Processor time per second of a node that serves live viewers, in microseconds::

    idle + viewers * (writes_per_s * write_us + bytes_per_s * byte_us) * (1 + slow_share * slow_more)

A write is what a viewer costs however little it carries (a system call and the kernel's work); a byte is copying. Where
the measurements are all of one bit rate, both cannot be told apart, and `BYTE_US` is taken; `idle` is what is left. The
fit is by least squares with nothing below 0, and its residuals are stated with it.

Memory is what the idle server has and so much per viewer; delay (p99) is a straight line in the busy share of the
thread, which holds below saturation and is used nowhere else.

Source of the prior figures: docs/benchmarks.md, 1000 viewers on one thread, 600 kbit/s against 2.5 Mbit/s at 40 ms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from flowctl.errors import ConfigError

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One crowd on one node.

    Args:
        viewers: how many.
        bit_rate: of the stream, bits per second.
        cpu_us_per_s: processor time of the server per second, microseconds.
        memory_bytes: resident memory. 0: not measured.
        idle_memory_bytes: the same before the first viewer. 0: not measured.
        p99_ms: delay of healthy viewers. None: not measured.
        slow_share: share of viewers that did not keep up, 0 to 1.

    Raises:
        ConfigError: a value is out of range.
    """

    viewers: int
    bit_rate: float
    cpu_us_per_s: float
    memory_bytes: int = 0
    idle_memory_bytes: int = 0
    p99_ms: float | None = None
    slow_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("viewers", "bit_rate", "cpu_us_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of a measurement is {getattr(self, name)}, it must be more than 0")
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
        idle_memory_bytes: without viewers.
        viewer_memory_bytes: per viewer.
        p99_at_idle_ms: delay at no load.
        p99_per_busy_ms: added from an idle to a busy thread.
        residual: root mean square of the relative errors at the measured points.
        points: how many there were.
        writes_per_s: per viewer.
    """

    idle_us: float
    write_us: float
    byte_us: float
    slow_more: float
    idle_memory_bytes: float
    viewer_memory_bytes: float
    p99_at_idle_ms: float
    p99_per_busy_ms: float
    residual: float
    points: int
    writes_per_s: float = 1 / FLUSH_S

    def viewer_us(self, bit_rate: float) -> float:
        """Return microseconds per second for one viewer that keeps up."""
        return self.writes_per_s * self.write_us + bit_rate / 8 * self.byte_us

    def cpu_us_per_s(self, viewers: float, bit_rate: float, slow_share: float = 0.0) -> float:
        """Return the processor time per second, microseconds."""
        return self.idle_us + viewers * self.viewer_us(bit_rate) * (1 + slow_share * self.slow_more)

    def memory_bytes(self, viewers: float) -> float:
        """Return the resident memory."""
        return self.idle_memory_bytes + viewers * self.viewer_memory_bytes

    def p99_ms(self, busy: float) -> float:
        """Return the delay at a busy share of 0 to 1."""
        return self.p99_at_idle_ms + self.p99_per_busy_ms * busy


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (at 0, slope) of the straight line through `points` by least squares, neither below 0."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    if slope <= 0:
        return mean_y, 0.0
    start = mean_y - slope * mean_x
    if start < 0:  # then the best line is one through the origin
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return start, slope


def fit(points: Sequence[Measurement]) -> NodeModel:
    """Fit the model.

    Args:
        points: 1 to 10,000 measurements; saturated ones are left out. From one, `idle_us` is 0.

    Raises:
        ConfigError: there are none, or too many.
    """
    points = [point for point in points if not point.saturated]
    if not 1 <= len(points) <= MOST_POINTS:
        raise ConfigError(
            f"there are {len(points)} measurements without saturation, the model needs 1 to {MOST_POINTS}",
            hint=f"crowds with a p99 above {SATURATED_MS:g} ms do not count: measure smaller ones",
        )
    byte_us = _byte_us(points)
    slow_more = SLOW_MORE
    writes = 1 / FLUSH_S
    line = [
        (
            writes * point.viewers * (1 + point.slow_share * slow_more),
            point.cpu_us_per_s - point.viewers * point.bytes_per_s * byte_us * (1 + point.slow_share * slow_more),
        )
        for point in points
    ]
    idle_us, write_us = _line(line) if len({x for x, _ in line}) > 1 else (0.0, max(line[0][1], 0.0) / line[0][0])
    idle_memory, viewer_memory = _memory(points)
    delays = [(point.cpu_us_per_s / 1e6, point.p99_ms) for point in points if point.p99_ms is not None]
    p99_start, p99_slope = _line(delays) if delays else (FLUSH_S * 1000, 0.0)
    model = NodeModel(
        idle_us=idle_us,
        write_us=write_us,
        byte_us=byte_us,
        slow_more=slow_more,
        idle_memory_bytes=idle_memory,
        viewer_memory_bytes=viewer_memory,
        p99_at_idle_ms=p99_start,
        p99_per_busy_ms=p99_slope,
        residual=0.0,
        points=len(points),
    )
    squares = [error_of(model, point) ** 2 for point in points]
    values = {name: getattr(model, name) for name in NodeModel.__dataclass_fields__}
    return NodeModel(**{**values, "residual": (sum(squares) / len(squares)) ** 0.5})


def _byte_us(points: Sequence[Measurement]) -> float:
    """Return what a byte costs: from crowds of different bit rates where there are any, else `BYTE_US`."""
    per_viewer = [(point.bytes_per_s, point.cpu_us_per_s / point.viewers) for point in points]
    if len({x for x, _ in per_viewer}) < 2 or max(x for x, _ in per_viewer) < 2 * min(x for x, _ in per_viewer):
        return BYTE_US
    return _line(per_viewer)[1] or BYTE_US


def _memory(points: Sequence[Measurement]) -> tuple[float, float]:
    """Return (idle, per viewer) in bytes; 0, 0 where nobody measured it."""
    known = [(float(point.viewers), float(point.memory_bytes)) for point in points if point.memory_bytes]
    known += [(0.0, float(point.idle_memory_bytes)) for point in points if point.idle_memory_bytes]
    return _line(known) if len({x for x, _ in known}) > 1 else (known[0][1] if known else 0.0, 0.0)


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
    """Return the points of a file of measurements: JSON with a list `points`, or the result of ``flowctl load --json``.

    Raises:
        ConfigError: it is neither, or a value is wrong.
    """
    try:
        values = json.loads(text)
        if isinstance(values, Mapping) and "points" in values:
            return [Measurement(**point) for point in values["points"]]
        return [_of_load(values)]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{where}: no measurements: {error}",
            hint="give the file of bench/bench_capacity.py, or what flowctl load --json --server-pid PID wrote",
        ) from error


def _of_load(values: Mapping[str, Any]) -> Measurement:
    """Return the point that a load run is; it must have been given the server's process."""
    viewers = values["viewers"]["connections"]
    cost = values["run"]["cpu_us_per_viewer_s"]
    if cost is None:
        raise ConfigError("the load run does not know the server's processor time", hint="give it --server-pid PID")
    healthy = values["profiles"]["healthy"]
    return Measurement(
        viewers=viewers,
        bit_rate=healthy["kbit_s"] * 1000,
        cpu_us_per_s=cost * viewers,
        memory_bytes=int((values["run"]["rss_kb"] or 0) * 1024),
        p99_ms=healthy["p99_ms"],
        slow_share=1 - healthy["connections"] / viewers,
    )
