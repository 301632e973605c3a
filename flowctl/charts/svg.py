"""Line charts as SVG text, for a page that stands alone: no script, no font, no library (pure).

Colours are CSS variables of the page (``--s1`` to ``--s8`` for the series, ``--grid``, ``--muted``), so that one chart
serves light and dark. What a pointer would want to know is in the ``<title>`` of invisible columns over the chart,
which every browser shows as a tooltip; what a reader without eyes wants is in its title and description.
"""

from __future__ import annotations

import bisect
import html
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

Point = tuple[float, float]

_WIDTH: Final = 640
_HEIGHT: Final = 264
_LEFT: Final = 58
_RIGHT: Final = 24
_TOP: Final = 26
_BOTTOM: Final = 40
_COLUMNS: Final = 60
"""Columns with a tooltip: narrower ones are hard to hit, wider ones say too little."""

COLOURS: Final = 8
"""Colours there are; a chart has no more series than that."""

MOST_POINTS: Final = 300
"""Points of a line: about two per pixel of a wide screen are all that can be seen."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line.

    Args:
        label: its name.
        points: in the order of x.
        colour: 1 to `COLOURS`; 0 is a quiet one, for what is there to be compared with.
        steps: whether a value lasts until the next one; else points are joined.
    """

    label: str
    points: Sequence[Point]
    colour: int
    steps: bool = False


def plain(value: float) -> str:
    """Return a number for an axis: short, without an exponent."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of lines over one pair of axes.

    Args:
        name: for ids, unique on the page; letters and hyphens.
        title: what question it answers.
        description: what is to be seen, in words, for readers who cannot see it.
        series: at most `COLOURS`; drawn in this order.
        x_label: of the axis, with its unit.
        y_label: likewise.
        x_log: whether x is logarithmic; its points must be above 0 then.
        y_top: least upper end of the y axis.
        y_text: writes a value of y.
        x_text: writes a value of x.
    """

    name: str
    title: str
    description: str
    series: Sequence[Series]
    x_label: str
    y_label: str
    x_log: bool = False
    y_top: float = 0.0
    y_text: Callable[[float], str] = plain
    x_text: Callable[[float], str] = plain

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(series.points for series in self.series)


def tick_texts(ticks: Sequence[float], write: Callable[[float], str]) -> list[str]:
    """Return the labels of an axis: as `write` has them, with more digits where two would be the same."""
    texts = [write(tick) for tick in ticks]
    if len(set(texts)) == len(set(ticks)):
        return texts
    unit = "".join(char for char in texts[-1] if not (char.isdigit() or char in ".,-"))
    for digits in range(1, 10):
        found = [f"{tick:,.{digits}f}" for tick in ticks]
        # What `write` scales, into percent for instance, it scales for each tick alike.
        if unit.strip() == "%" and write(1.0).startswith("100"):
            found = [f"{tick * 100:,.{digits}f}" for tick in ticks]
        if len(set(found)) == len(set(ticks)):
            return [f"{text}{unit}" for text in found]
    return texts


def thin(points: Sequence[Point], pick: Callable[[Sequence[Point]], Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most `most` points: one for each stretch of equally many, chosen by `pick`."""
    if len(points) <= most:
        return list(points)
    ends = [round(place * len(points) / most) for place in range(most + 1)]
    return [pick(points[first:stop]) for first, stop in itertools.pairwise(ends) if first < stop]


def highest(points: Sequence[Point]) -> Point:
    """Return the point with the largest y: of delays and loads the worst is what counts."""
    return max(points, key=lambda point: point[1])


def last(points: Sequence[Point]) -> Point:
    """Return the last point: of counts the newest is right."""
    return points[-1]


def linear_ticks(top: float, about: int = 5) -> list[float]:
    """Return round numbers from 0 up to the first that is not below `top`."""
    if top <= 0:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(top / about))
    step = next(step * factor for factor in (1, 2, 5, 10) if step * factor * about >= top * 0.999)
    return [step * place for place in range(math.ceil(top / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 5 and their tenfolds from the last not above `low` to the first not below `high`."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
    first = max(place for place, step in enumerate(steps) if step <= low * 1.0001)
    final = min(place for place, step in enumerate(steps) if step >= high * 0.9999)
    chosen = steps[first : max(final, first + 1) + 1]
    # Over many decades only the powers of ten find room.
    return chosen if len(chosen) <= 10 else [chosen[0], *(s for s in chosen[1:-1] if _is_power(s)), chosen[-1]]


def _is_power(value: float) -> bool:
    return abs(math.log10(value) - round(math.log10(value))) < 1e-9


class _Axes:
    """Where values stand on the paper."""

    def __init__(self, chart: Chart) -> None:
        xs = [x for series in chart.series for x, _ in series.points]
        ys = [y for series in chart.series for _, y in series.points]
        self._log = chart.x_log
        self.x_ticks = log_ticks(min(xs), max(xs)) if chart.x_log else linear_ticks(max(xs), 8)
        self.y_ticks = linear_ticks(max(*ys, chart.y_top))
        # A run of 60.2 s ends at 60.2, not at the next round number.
        self.low, self.high = self.x_ticks[0], self.x_ticks[-1] if chart.x_log else max(*xs, 1e-9)
        self.x_ticks = [tick for tick in self.x_ticks if tick <= self.high * 1.0001]

    def x(self, value: float) -> float:
        if self._log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def value_at(self, x: float) -> float:
        share = (x - _LEFT) / (_WIDTH - _LEFT - _RIGHT)
        return self.low * (self.high / self.low) ** share if self._log else self.low + share * (self.high - self.low)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self.y_ticks[-1] * (_HEIGHT - _TOP - _BOTTOM)


def draw(chart: Chart) -> str:
    """Return a chart as an ``<svg>`` element; "" if there is nothing to draw."""
    if chart.empty:
        return ""
    axes = _Axes(chart)
    ids = f"{chart.name}-title {chart.name}-description"
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="{ids}">',
        f'<title id="{chart.name}-title">{html.escape(chart.title)}</title>',
        f'<desc id="{chart.name}-description">{html.escape(chart.description)}</desc>',
        *_grid(chart, axes),
        *(_line(series, axes) for series in chart.series if series.points),
        *_columns(chart, axes),
        "</svg>",
    ]
    return "\n".join(parts)


def _grid(chart: Chart, axes: _Axes) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for tick, written in zip(axes.y_ticks, tick_texts(axes.y_ticks, chart.y_text), strict=True):
        y = axes.y(tick)
        kind = "base" if tick == 0 else "grid"
        parts.append(f'<path class="{kind}" d="M{_LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{html.escape(written)}</text>')
    for tick, written in zip(axes.x_ticks, tick_texts(axes.x_ticks, chart.x_text), strict=True):
        x = axes.x(tick)
        parts.append(f'<path class="base" d="M{x:.1f} {bottom}v4"/>')
        text = html.escape(written)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{_LEFT}" y="13">{html.escape(chart.y_label)}</text>')
    middle = (_LEFT + right) / 2
    label = html.escape(chart.x_label)
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{label}</text>')
    return parts


def _line(series: Series, axes: _Axes) -> str:
    points = [(axes.x(x), axes.y(y)) for x, y in series.points]
    path = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    if len(points) == 1:
        path.append("h.01")  # a dot: the ends of lines are round
    for x, y in points[1:]:
        path.append(f"H{x:.1f}V{y:.1f}" if series.steps else f"L{x:.1f} {y:.1f}")
    return f'<path class="line" style="stroke:{colour(series.colour)}" d="{"".join(path)}"/>'


def colour(number: int) -> str:
    """Return the CSS colour of a series."""
    return f"var(--s{number})" if number else "var(--quiet)"


def _columns(chart: Chart, axes: _Axes) -> list[str]:
    """Return invisible columns whose tooltips say the value of every line there."""
    width = (_WIDTH - _LEFT - _RIGHT) / _COLUMNS
    height = _HEIGHT - _TOP - _BOTTOM
    parts = []
    for place in range(_COLUMNS):
        at = axes.value_at(_LEFT + (place + 0.5) * width)
        said = [
            f"{series.label}: {chart.y_text(value)}"
            for series in chart.series
            if (value := _at(series, at)) is not None
        ]
        if said:
            text = html.escape("\n".join([f"{chart.x_label}: {chart.x_text(at)}", *said]))
            x = _LEFT + place * width
            place_of = f'x="{x:.1f}" y="{_TOP}" width="{width:.1f}" height="{height}"'
            parts.append(f'<rect class="hit" {place_of}><title>{text}</title></rect>')
    return parts


def _at(series: Series, x: float) -> float | None:
    """Return the value of a line at the last of its points that is not after `x`; None: it has not begun."""
    place = bisect.bisect_right(series.points, (x, math.inf)) - 1
    return series.points[place][1] if place >= 0 else None
