"""Pictures for a page that stands alone: lines and dots (pure).

No script, no font, no library. Colours are CSS variables of the page (``--s1`` to ``--s8`` for series, ``--quiet``).
What a pointer would want to know is in the ``<title>`` of invisible columns, which every browser shows as a tooltip;
what a reader without eyes wants is in the title and description of the picture.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from flowctl.charts.axes import (
    LEFT,
    RIGHT,
    ChartAxis,
    DrawnMark,
    Picture,
    Scale,
    column,
    frame,
    linear_ticks,
    plain,
    text_mark,
    x_axis,
    y_axis,
)

Point = tuple[float, float]

_MOST_TOOLTIPS: Final = 60
"""Most columns with a tooltip: narrower ones are hard to hit, wider ones say too little."""

COLOURS: Final = 8
"""Number of colours, and so most series of a picture."""

MOST_POINTS: Final = 300
"""Most points of a line: no more can be seen on a wide screen."""

_NEAR_DOTS: Final = 34.0
"""Distance on the paper below which the labels of two dots are put on different sides."""

_LOG_FROM_RATIO: Final = 20.0
"""Ratio of the largest value to the smallest from which an axis is logarithmic: small ones would lie on it."""


def colour(number: int) -> str:
    """Return the CSS colour of a series: 1 to `COLOURS`, or 0 for a quiet one."""
    return f"var(--s{number})" if number else "var(--quiet)"


def short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


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


@dataclass(frozen=True, slots=True)
class Series:
    """One line."""

    label: str
    points: Sequence[Point]
    colour: int
    steps: bool = False  # whether a value lasts until the next one; else points are joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines(Picture):
    """Lines over one pair of axes."""

    series: Sequence[Series]  # at most `COLOURS`; drawn in this order
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False
    y_top: float = 0.0  # least upper end of the y axis
    y_text: Callable[[float], str] = plain
    x_text: Callable[[float], str] = plain

    @property
    def empty(self) -> bool:
        return not any(series.points for series in self.series)

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Label and colour of each line that is drawn. A single one has them too: the title does not name it."""
        return [(series.label, colour(series.colour)) for series in self.series if series.points]

    def marks(self) -> list[DrawnMark]:
        xs = [x for series in self.series for x, _ in series.points]
        ys = [y for series in self.series for _, y in series.points]
        x = x_axis(min(xs) if self.x_log else 0.0, max(xs), self.x_label, self.x_text, log=self.x_log)
        y = y_axis(max(*ys, self.y_top), self.y_label, self.y_text, low=min(ys) if self.y_log else None)
        lines = [_line(series, x.scale, y.scale) for series in self.series if series.points]
        return [*frame(x, y), *lines, *self._columns(x)]

    def _columns(self, x: ChartAxis) -> list[DrawnMark]:
        """Return invisible columns whose tooltips say the value of every line there."""
        width = (RIGHT - LEFT) / _MOST_TOOLTIPS
        parts = []
        for place in range(_MOST_TOOLTIPS):
            first = LEFT + place * width
            at = x.scale.value_at(first + width / 2)
            values = [
                f"{series.label}: {self.y_text(value)}"
                for series in self.series
                if (value := _at(series, at)) is not None
            ]
            if values:
                parts.append(column(first, first + width, [f"{self.x_label}: {self.x_text(at)}", *values]))
        return parts


def _line(series: Series, x: Scale, y: Scale) -> DrawnMark:
    points = [(x(at), y(value)) for at, value in series.points]
    path = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    if len(points) == 1:
        path.append("h.01")  # a dot: the ends of lines are round
    for at, value in points[1:]:
        path.append(f"H{at:.1f}V{value:.1f}" if series.steps else f"L{at:.1f} {value:.1f}")
    return DrawnMark("path", {"class": "line", "style": f"stroke:{colour(series.colour)}", "d": "".join(path)})


def _at(series: Series, x: float) -> float | None:
    """Return the value of a line at the last of its points that is not after `x`; None: it has not begun."""
    place = bisect.bisect_right(series.points, (x, math.inf)) - 1
    return series.points[place][1] if place >= 0 else None


@dataclass(frozen=True, slots=True)
class Dot:
    """One dot."""

    x: float
    y: float
    size: float
    title: str
    paint: str = "var(--quiet)"
    label: str = ""  # stands beside it; "": nothing does, and the dot is a quiet one
    hollow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dots(Picture):
    """Dots over a pair of axes; the size of a dot is a third figure. x begins at 0."""

    dots: Sequence[Dot]  # those with a label are drawn last, so that nothing hides them
    x_label: str
    y_label: str
    y_least: float = 1.0  # below this, y is drawn there
    x_text: Callable[[float], str] = plain
    y_text: Callable[[float], str] = plain

    @property
    def empty(self) -> bool:
        return not self.dots

    def marks(self) -> list[DrawnMark]:
        x, y = self._axes()
        largest = max(dot.size for dot in self.dots) or 1.0
        parts = frame(x, y)
        for dot in sorted(self.dots, key=lambda item: bool(item.label)):
            # Area, not radius, follows the figure: that is what eyes compare.
            radius = 4 + 7 * math.sqrt(max(dot.size, 0.0) / largest)
            kind = "dot marked" if dot.label else "dot"
            paint = f"fill:{dot.paint}"
            if dot.hollow:
                kind, paint = "dot hollow", f"fill:none;stroke:{dot.paint}"
            place = {"cx": round(x.scale(dot.x), 1), "cy": round(y.scale(dot.y), 1), "r": round(radius, 1)}
            parts.append(DrawnMark("circle", {"class": kind, "style": paint, **place}, title=dot.title))
        return [*parts, *_labels([dot for dot in self.dots if dot.label], x.scale, y.scale)]

    def _axes(self) -> tuple[ChartAxis, ChartAxis]:
        x_ticks = linear_ticks(max(dot.x for dot in self.dots), 8)
        x = ChartAxis(Scale(0, x_ticks[-1], LEFT, RIGHT), x_ticks, self.x_label, self.x_text)
        lowest, highest = (max(limit(dot.y for dot in self.dots), self.y_least) for limit in (min, max))
        return x, y_axis(highest, self.y_label, self.y_text, low=lowest if highest > lowest * _LOG_FROM_RATIO else None)


def _labels(marked: Sequence[Dot], x: Scale, y: Scale) -> list[DrawnMark]:
    """Return the names of marked dots, on the side where there is room, and not on top of each other."""
    parts: list[DrawnMark] = []
    used: list[tuple[float, float]] = []
    for dot in sorted(marked, key=lambda item: -item.y):
        at_x, at_y = x(dot.x), y(dot.y)
        # Beyond the middle a text grows to the left, or it would leave the paper.
        left = at_x > (LEFT + RIGHT) / 2
        text_x, text_y = at_x + (-16 if left else 16), at_y - 8
        while any(abs(text_y - other) < 16 and abs(text_x - before) < _NEAR_DOTS * 4 for before, other in used):
            text_y += 16
        used.append((text_x, text_y))
        parts.append(text_mark(text_x, max(text_y, 12), dot.label, anchor="end" if left else "start", strong=True))
    return parts
