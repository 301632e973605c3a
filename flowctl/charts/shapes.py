"""Stacked areas, bars and dots as SVG text: what a page about many viewers needs beside the lines of `svg` (pure).

They share paper, colours and manners with `flowctl.charts.svg`: colours are CSS variables of the page, a pointer
finds its figures in the ``<title>`` of invisible rectangles, and a reader without eyes in the title and description.
Every text is escaped here, since names of streams, agents and reasons come from peers.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from flowctl.charts.svg import linear_ticks, log_ticks, plain

WIDTH: Final = 640
HEIGHT: Final = 264
LEFT: Final = 58
RIGHT: Final = 24
TOP: Final = 26
BOTTOM: Final = 40

_BAR: Final = 26
"""Height of a bar with its gap, in units of the paper: a line of text and some air."""

_BAR_LEFT: Final = 190
"""Room for the names of bars: some 28 characters."""

_NAME_CHARS: Final = 28

MOST_BARS: Final = 16
"""More bars than that are a table."""

MOST_BANDS: Final = 200
"""Places along x of a stack: each is three pixels wide on a wide screen."""

_NEAR: Final = 34.0
"""Labels of dots that are closer than this on the paper are put on different sides."""


_FAR: Final = 20.0
"""From this ratio on, the small ones would all lie on the axis."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a stack.

    Args:
        label: its name.
        paint: CSS colour.
        values: one per place along x, 0 or more.
    """

    label: str
    paint: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Areas on top of each other over time: each place along x lasts until the next.

    Args:
        name: for ids, unique on the page; letters and hyphens.
        title: what question it answers.
        description: what is to be seen, in words.
        xs: where each place begins, rising.
        x_end: where the last one ends.
        layers: from the bottom up.
        y_top: upper end of the y axis; what is above is not drawn.
        x_label: of the axis, with its unit.
        y_label: likewise.
        y_text: writes a value of y.
        x_text: writes a value of x.
        more: what a tooltip says beside the layers, one text per place; empty: nothing.
    """

    name: str
    title: str
    description: str
    xs: Sequence[float]
    x_end: float
    layers: Sequence[Layer]
    y_top: float
    x_label: str
    y_label: str
    y_text: Callable[[float], str] = plain
    x_text: Callable[[float], str] = plain
    more: Sequence[str] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not self.xs


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Args:
        label: its name, of any length.
        value: its length, 0 or more.
        text: what stands at its end.
        paint: CSS colour.
    """

    label: str
    value: float
    text: str
    paint: str = "var(--s1)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars from the same edge.

    Args:
        name: see `Stack`.
        title: see `Stack`.
        description: see `Stack`.
        bars: from the top down; at most `MOST_BARS` are drawn.
    """

    name: str
    title: str
    description: str
    bars: Sequence[Bar]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not self.bars


@dataclass(frozen=True, slots=True)
class Dot:
    """One dot.

    Args:
        x: where.
        y: where.
        size: area, in any unit, 0 or more.
        title: tooltip.
        paint: CSS colour.
        label: stands beside it; "": nothing does, and the dot is a quiet one.
        front: whether it is drawn over those that are not.
    """

    x: float
    y: float
    size: float
    title: str
    paint: str = "var(--quiet)"
    label: str = ""
    front: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dots:
    """Dots over a pair of axes; the size of a dot is a third figure. x begins at 0.

    Args:
        name: see `Stack`.
        title: see `Stack`.
        description: see `Stack`.
        dots: those with a label are drawn last, so that nothing hides them.
        x_label: of the axis, with its unit.
        y_label: likewise.
        y_least: below this, y is drawn there. y is logarithmic if the largest is far above it, else it begins at 0.
        x_text: writes a value of x.
        y_text: writes a value of y.
    """

    name: str
    title: str
    description: str
    dots: Sequence[Dot]
    x_label: str
    y_label: str
    y_least: float = 1.0
    x_text: Callable[[float], str] = plain
    y_text: Callable[[float], str] = plain

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not self.dots


Shape = Stack | Bars | Dots


def draw_shape(shape: Shape) -> str:
    """Return a picture as an ``<svg>`` element; "" if there is nothing to draw."""
    if shape.empty:
        return ""
    height = HEIGHT
    if isinstance(shape, Bars):
        height = _BAR * min(len(shape.bars), MOST_BARS) + 6
        parts = _bars(shape)
    else:
        parts = _stack(shape) if isinstance(shape, Stack) else _dots(shape)
    ids = f"{shape.name}-title {shape.name}-description"
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{ids}">',
            f'<title id="{shape.name}-title">{html.escape(shape.title)}</title>',
            f'<desc id="{shape.name}-description">{html.escape(shape.description)}</desc>',
            *parts,
            "</svg>",
        ]
    )


class _Scale:
    """Where values stand between two ends of the paper."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self._low, self._span = low, max(high - low, 1e-12)
        self._first, self._length = first, last - first

    def __call__(self, value: float) -> float:
        share = min(1.0, max(0.0, (value - self._low) / self._span))
        return self._first + share * self._length


class _LogScale(_Scale):
    """The same, where equal steps are equal factors."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        super().__init__(math.log(low), math.log(high), first, last)
        self._least = low

    def __call__(self, value: float) -> float:
        return super().__call__(math.log(max(value, self._least)))


def _frame(shape: Stack | Dots, x: _Scale, y: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> list[str]:
    """Return grid, ticks and labels of the two axes."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in y_ticks:
        at = y(tick)
        kind = "base" if tick == 0 else "grid"
        parts.append(f'<path class="{kind}" d="M{LEFT} {at:.1f}H{right}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{html.escape(shape.y_text(tick))}</text>'
        )
    for tick in x_ticks:
        at = x(tick)
        parts.append(f'<path class="base" d="M{at:.1f} {bottom}v4"/>')
        text = html.escape(shape.x_text(tick))
        parts.append(f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{LEFT}" y="13">{html.escape(shape.y_label)}</text>')
    middle = (LEFT + right) / 2
    label = html.escape(shape.x_label)
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{label}</text>')
    return parts


def _stack(stack: Stack) -> list[str]:
    ends = [*stack.xs[1:], max(stack.x_end, stack.xs[-1])]
    x = _Scale(stack.xs[0], ends[-1], LEFT, WIDTH - RIGHT)
    y_ticks = [tick for tick in linear_ticks(stack.y_top) if tick <= stack.y_top * 1.0001]
    y = _Scale(0, stack.y_top, HEIGHT - BOTTOM, TOP)
    x_ticks = [tick for tick in linear_ticks(ends[-1], 8) if stack.xs[0] <= tick <= ends[-1] * 1.0001]
    below = [0.0] * len(stack.xs)
    areas = []
    for layer in stack.layers:
        above = [low + value for low, value in zip(below, layer.values, strict=True)]
        if any(layer.values):
            areas.append(_area(stack.xs, ends, below, above, x, y, layer.paint))
        below = above
    # The grid lies over the areas: under a full stack nobody would see it.
    return [*areas, *_frame(stack, x, y, x_ticks, y_ticks), *_places(stack, ends, x)]


def _area(
    xs: Sequence[float],
    ends: Sequence[float],
    below: Sequence[float],
    above: Sequence[float],
    x: _Scale,
    y: _Scale,
    paint: str,
) -> str:
    """Return one layer: along its upper edge to the right, and back along the lower one."""
    upper = [f"{x(start):.1f} {y(value):.1f}H{x(end):.1f}" for start, end, value in zip(xs, ends, above, strict=True)]
    lower = [
        f"{x(end):.1f} {y(value):.1f}H{x(start):.1f}"
        for start, end, value in reversed(list(zip(xs, ends, below, strict=True)))
    ]
    return f'<path class="area" style="fill:{paint}" d="M{"L".join(upper)}L{"L".join(lower)}Z"/>'


def _places(stack: Stack, ends: Sequence[float], x: _Scale) -> list[str]:
    """Return invisible columns with the figures of each place."""
    parts = []
    for place, (start, end) in enumerate(zip(stack.xs, ends, strict=True)):
        said = [f"{stack.x_label}: {stack.x_text(start)}"]
        said += [f"{layer.label}: {stack.y_text(layer.values[place])}" for layer in reversed(stack.layers)]
        said += [stack.more[place]] if stack.more else []
        text = html.escape("\n".join(said))
        box = f'x="{x(start):.1f}" y="{TOP}" width="{max(x(end) - x(start), 0.5):.1f}" height="{HEIGHT - TOP - BOTTOM}"'
        parts.append(f'<rect class="hit" {box}><title>{text}</title></rect>')
    return parts


def _bars(bars: Bars) -> list[str]:
    shown = bars.bars[:MOST_BARS]
    room = WIDTH - _BAR_LEFT - 96
    most = max((bar.value for bar in shown if math.isfinite(bar.value)), default=0.0)
    parts = []
    for place, bar in enumerate(shown):
        top = place * _BAR + 4
        name = bar.label if len(bar.label) <= _NAME_CHARS else bar.label[: _NAME_CHARS - 1] + "\N{HORIZONTAL ELLIPSIS}"
        # A bar of something is never invisible: a pixel says "there is one".
        length = max(bar.value / most * room, 1.5) if most > 0 and bar.value > 0 else 0.0
        parts.append(f'<text x="{_BAR_LEFT - 10}" y="{top + 13}" text-anchor="end">{html.escape(name)}</text>')
        box = f'x="{_BAR_LEFT}" y="{top}" width="{min(length, room):.1f}" height="{_BAR - 8}" rx="2"'
        title = html.escape(f"{bar.label}: {bar.text}")
        parts.append(f'<rect style="fill:{bar.paint}" {box}><title>{title}</title></rect>')
        at = _BAR_LEFT + min(length, room) + 6
        parts.append(f'<text class="strong" x="{at:.1f}" y="{top + 13}">{html.escape(bar.text)}</text>')
    return parts


def _dots(dots: Dots) -> list[str]:
    x_ticks = linear_ticks(max(dot.x for dot in dots.dots), 8)
    x = _Scale(0, x_ticks[-1], LEFT, WIDTH - RIGHT)
    lowest, highest = (max(limit(dot.y for dot in dots.dots), dots.y_least) for limit in (min, max))
    y: _Scale
    if highest > lowest * _FAR:
        y_ticks = log_ticks(lowest, highest)
        y = _LogScale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    else:
        y_ticks = linear_ticks(highest)
        y = _Scale(0, y_ticks[-1], HEIGHT - BOTTOM, TOP)
    largest = max(dot.size for dot in dots.dots) or 1.0
    parts = _frame(dots, x, y, x_ticks, y_ticks)
    for dot in sorted(dots.dots, key=lambda item: (bool(item.label), item.front)):
        # Area, not radius, follows the figure: that is what eyes compare.
        radius = 4 + 7 * math.sqrt(max(dot.size, 0.0) / largest)
        kind = "dot marked" if dot.label else "dot"
        place = f'cx="{x(dot.x):.1f}" cy="{y(dot.y):.1f}" r="{radius:.1f}"'
        title = html.escape(dot.title)
        parts.append(f'<circle class="{kind}" style="fill:{dot.paint}" {place}><title>{title}</title></circle>')
    return [*parts, *_labels([dot for dot in dots.dots if dot.label], x, y)]


def _labels(marked: Sequence[Dot], x: _Scale, y: _Scale) -> list[str]:
    """Return the names of marked dots, on the side where there is room, and not on top of each other."""
    parts: list[str] = []
    used: list[tuple[float, float]] = []
    for dot in sorted(marked, key=lambda item: -item.y):
        at_x, at_y = x(dot.x), y(dot.y)
        # Beyond the middle a text grows to the left, or it would leave the paper.
        left = at_x > (LEFT + WIDTH - RIGHT) / 2
        text_x, text_y = at_x + (-16 if left else 16), at_y - 8
        while any(abs(text_y - other) < 16 and abs(text_x - before) < _NEAR * 4 for before, other in used):
            text_y += 16
        used.append((text_x, text_y))
        anchor = "end" if left else "start"
        parts.append(
            f'<text class="strong" x="{text_x:.1f}" y="{max(text_y, 12):.1f}" text-anchor="{anchor}">'
            f"{html.escape(dot.label)}</text>"
        )
    return parts
