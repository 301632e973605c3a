"""Two kinds of picture of machines that talk to each other: who with whom, and who did what when (pure).

`Network` has boxes in columns and arrows from column to column, as wide as what went over them. `Spans` has a row for
each machine or link and bars along a common time, with moments marked across all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from flowctl.charts.axes import (
    HEIGHT,
    RIGHT,
    WIDTH,
    ChartAxis,
    DrawnMark,
    Picture,
    Scale,
    grid,
    linear_ticks,
    plain,
    rectangle,
    text_mark,
    tick_texts,
)
from flowctl.charts.pictures import short

_BOX_WIDTH: Final = 118
_BOX_HEIGHT: Final = 40
_ROW: Final = 70
_EDGE: Final = 6
_MOST_BOX_CHARS: Final = 19
"""Most characters that fit into a box."""
_WIDE_GAP_RATIO: Final = 4.0
"""Width of a gap with texts at its arrows, in those of one without."""
_MOST_STROKE: Final = 7.0
_TEXT_PLACES: Final = (0.5, 0.35, 0.65, 0.2, 0.8, 0.08, 0.92)
"""Places along an arrow where its text may stand, as shares of its length; the first free one is taken."""
_CHAR_WIDTH: Final = 6.8
_LINE: Final = 13
_HEAD: Final = 10

_LABEL_RIGHT: Final = 150
_SPAN_ROW: Final = 24
_SPAN_TOP: Final = 22
_AXIS: Final = 40
_LABEL_CHARS: Final = 24


@dataclass(frozen=True, slots=True)
class Box:
    """One machine."""

    name: str
    column: int
    text: str = ""
    paint: str = "var(--s1)"
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Arrow:
    """A flow from one box to another."""

    source: str
    target: str  # name of one in a column further to the right
    weight: float
    text: str = ""
    paint: str = "var(--s1)"
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Network(Picture):
    """Boxes in columns, and arrows between them."""

    boxes: Sequence[Box]
    arrows: Sequence[Arrow]

    @property
    def empty(self) -> bool:
        return not self.boxes

    @property
    def height(self) -> int:
        return max(_ROW * max(len(column) for column in self._columns()), HEIGHT // 2)

    def _columns(self) -> list[list[Box]]:
        count = max((box.column for box in self.boxes), default=0) + 1
        return [[box for box in self.boxes if box.column == number] for number in range(count)]

    def marks(self) -> list[DrawnMark]:
        """Return what is drawn: arrows first, so that boxes lie over their ends."""
        places = self._places()
        most = max((arrow.weight for arrow in self.arrows), default=0.0) or 1.0
        arrows = [arrow for arrow in self.arrows if arrow.source in places and arrow.target in places]
        lines = [mark for arrow in arrows for mark in _arrow(arrow, places, most)]
        taken: list[tuple[float, float, float]] = []
        texts = [_arrow_text(arrow, places, taken) for arrow in arrows if arrow.text]
        return [*lines, *(mark for box in self.boxes for mark in _box(box, *places[box.name])), *texts]

    def _places(self) -> dict[str, tuple[float, float]]:
        """Return the upper left corner of each box."""
        columns = self._columns()
        told = {box.column for arrow in self.arrows if arrow.text for box in self.boxes if box.name == arrow.source}
        gaps = [_WIDE_GAP_RATIO if number in told else 1.0 for number in range(len(columns) - 1)]
        unit = (WIDTH - len(columns) * _BOX_WIDTH - 2 * _EDGE) / max(sum(gaps), 1.0)
        places, x = {}, float(_EDGE)
        for number, boxes in enumerate(columns):
            room = self.height / max(len(boxes), 1)
            for place, box in enumerate(boxes):
                places[box.name] = (x, room * (place + 0.5) - _BOX_HEIGHT / 2)
            x += _BOX_WIDTH + unit * (gaps[number] if number < len(gaps) else 0.0)
        return places


def _box(one: Box, x: float, y: float) -> list[DrawnMark]:
    dashes = "stroke-dasharray:4 3;" if one.gone else ""
    style = f"fill:var(--card);stroke:{one.paint};stroke-width:1.5;{dashes}"
    middle = x + _BOX_WIDTH / 2
    found = [
        rectangle(x, y, _BOX_WIDTH, _BOX_HEIGHT, style, title=f"{one.name}\n{one.text}", rx=5),
        text_mark(middle, y + (17 if one.text else 24), short(one.name, _MOST_BOX_CHARS), anchor="middle", strong=True),
    ]
    if one.text:
        found.append(text_mark(middle, y + 32, short(one.text, _MOST_BOX_CHARS + 2), anchor="middle"))
    return found


def _ends(arrow: Arrow, places: dict[str, tuple[float, float]]) -> tuple[float, float, float, float]:
    (from_x, from_y), (to_x, to_y) = places[arrow.source], places[arrow.target]
    return from_x + _BOX_WIDTH, from_y + _BOX_HEIGHT / 2, to_x, to_y + _BOX_HEIGHT / 2


def _arrow(arrow: Arrow, places: dict[str, tuple[float, float]], most: float) -> list[DrawnMark]:
    x, y, to_x, to_y = _ends(arrow, places)
    width = max(1.0, _MOST_STROKE * math.sqrt(max(arrow.weight, 0.0) / most))
    bend = (to_x - x) / 2
    dashes = "stroke-dasharray:6 4;" if arrow.dashed else ""
    style = f"fill:none;stroke:{arrow.paint};stroke-width:{width:.1f};stroke-opacity:.55;{dashes}"
    path = f"M{x:.1f} {y:.1f}C{x + bend:.1f} {y:.1f} {to_x - bend:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
    head = f"M{to_x - 8:.1f} {to_y - 5:.1f}L{to_x:.1f} {to_y:.1f}L{to_x - 8:.1f} {to_y + 5:.1f}Z"
    told = f"{arrow.source} to {arrow.target}\n{arrow.text}"
    line = DrawnMark("path", {"style": style, "d": path}, title=told)
    return [line, DrawnMark("path", {"style": f"fill:{arrow.paint}", "d": head})]


def _arrow_text(
    arrow: Arrow, places: dict[str, tuple[float, float]], taken: list[tuple[float, float, float]]
) -> DrawnMark:
    """Return the text of an arrow, where its way is free of others; `taken` has (left, right, y) of these."""
    x, y, to_x, to_y = _ends(arrow, places)
    half = len(arrow.text) * _CHAR_WIDTH / 2
    tried: list[tuple[float, float, float]] = []
    for share in _TEXT_PLACES:
        # The curve of `_arrow` at that share of its way: with both its bends in the middle, y follows 3 s^2 - 2 s^3.
        at_y = y + (to_y - y) * (3 * share**2 - 2 * share**3)
        at_x = x + (to_x - x) * (1.5 * share * (1 - share) + share**3)
        at_x = min(max(at_x, x + half), max(to_x - half - _HEAD, x + half))
        tried.append((at_x - half, at_x + half, at_y))
    free = (place for place in tried if not any(_meet(place, other) for other in taken))
    found = next(free, tried[0])
    taken.append(found)
    halo = "paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round"
    return text_mark((found[0] + found[1]) / 2, found[2] + 4, arrow.text, anchor="middle", style=halo)


def _meet(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
    return one[0] < other[1] and other[0] < one[1] and abs(one[2] - other[2]) < _LINE


@dataclass(frozen=True, slots=True)
class Span:
    """A bar along time."""

    row: int
    start: float
    end: float
    text: str
    paint: str = "var(--s1)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans(Picture):
    """Bars along time: who did what, and when."""

    rows: Sequence[str]
    spans: Sequence[Span]
    x_end: float
    x_label: str
    moments: Sequence[tuple[float, str]] = ()
    x_text: Callable[[float], str] = plain

    @property
    def empty(self) -> bool:
        return not self.rows

    @property
    def height(self) -> int:
        return _SPAN_TOP + _SPAN_ROW * len(self.rows) + _AXIS

    def marks(self) -> list[DrawnMark]:
        scale = Scale(0.0, max(self.x_end, 1e-9), _LABEL_RIGHT, RIGHT)
        bottom = _SPAN_TOP + _SPAN_ROW * len(self.rows)
        ticks = [tick for tick in linear_ticks(self.x_end, 8) if tick <= self.x_end * 1.0001]
        parts = []
        axis = ChartAxis(scale, ticks, self.x_label, self.x_text)
        for tick, written in zip(ticks, tick_texts(ticks, axis.write), strict=True):
            parts.append(grid(f"M{scale(tick):.1f} {_SPAN_TOP}V{bottom}"))
            parts.append(text_mark(scale(tick), bottom + 17, written, anchor="middle"))
        parts.append(text_mark((_LABEL_RIGHT + RIGHT) / 2, bottom + 34, self.x_label, anchor="middle"))
        for place, row in enumerate(self.rows):
            y = _SPAN_TOP + place * _SPAN_ROW
            parts.append(grid(f"M{_LABEL_RIGHT} {y + _SPAN_ROW}H{RIGHT}"))
            parts.append(text_mark(_LABEL_RIGHT - 8, y + 16, short(row, _LABEL_CHARS), anchor="end"))
        parts += [_span(span, scale) for span in self.spans]
        return [*parts, *(mark for moment in self.moments for mark in _moment(moment, scale, bottom))]


def _span(span: Span, scale: Scale) -> DrawnMark:
    first, width = scale(span.start), max(scale(span.end) - scale(span.start), 2.0)
    y = _SPAN_TOP + span.row * _SPAN_ROW + 4
    return rectangle(first, y, width, _SPAN_ROW - 8, f"fill:{span.paint}", title=span.text, rx=2)


def _moment(moment: tuple[float, str], scale: Scale, bottom: float) -> list[DrawnMark]:
    at = scale(moment[0])
    left = at > (_LABEL_RIGHT + RIGHT) / 2  # beyond the middle a text grows to the left, or it would leave the paper
    style = "stroke:var(--bad);stroke-dasharray:4 3;fill:none"
    return [
        DrawnMark("path", {"style": style, "d": f"M{at:.1f} {_SPAN_TOP - 6}V{bottom}"}),
        text_mark(at + (-6 if left else 6), 13, moment[1], anchor="end" if left else "start", strong=True),
    ]
