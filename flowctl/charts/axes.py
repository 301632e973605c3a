"""The paper of all pictures: its size, scales, ticks, the frame of two axes, and the marks on it (pure).

A picture is a list of marks, elements of SVG as data; `flowctl.charts.page.draw` makes text of them. Colours are CSS
variables of the page, so that one picture serves light and dark.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 640
HEIGHT: Final = 264
LEFT: Final = 58
RIGHT: Final = WIDTH - 24
TOP: Final = 26
BOTTOM: Final = HEIGHT - 40
"""Size of the paper, and the places of the axes on it."""


def plain(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


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


class Scale:
    """Maps values to places between two ends of the paper; values beyond an end stand at it."""

    def __init__(self, low: float, high: float, first: float, last: float, *, log: bool = False) -> None:
        self._log, self._least = log, low
        self._low = math.log(low) if log else low
        self._span = max((math.log(high) if log else high) - self._low, 1e-12)
        self._first, self._length = first, last - first

    def __call__(self, value: float) -> float:
        found = math.log(max(value, self._least)) if self._log else value
        return self._first + min(1.0, max(0.0, (found - self._low) / self._span)) * self._length

    def value_at(self, place: float) -> float:
        """Return the value that stands at a place of the paper."""
        found = self._low + (place - self._first) / self._length * self._span
        return math.exp(found) if self._log else found


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """One axis."""

    scale: Scale
    ticks: Sequence[float]  # the values that are marked
    label: str  # with its unit
    write: Callable[[float], str] = plain


def x_axis(low: float, high: float, label: str, write: Callable[[float], str], *, log: bool = False) -> ChartAxis:
    """Return the axis along the paper: from `low`, or a round number below it, to `high`."""
    if log:
        ticks = log_ticks(low, high)
        return ChartAxis(Scale(ticks[0], ticks[-1], LEFT, RIGHT, log=True), ticks, label, write)
    # A run of 60.2 s ends at 60.2, not at the next round number.
    ticks = [tick for tick in linear_ticks(high, 8) if low <= tick <= high * 1.0001]
    return ChartAxis(Scale(low, max(high, 1e-9), LEFT, RIGHT), ticks, label, write)


def y_axis(top: float, label: str, write: Callable[[float], str], *, low: float | None = None) -> ChartAxis:
    """Return the axis up the paper, to a round number above `top`."""
    if low is not None:
        ticks = log_ticks(low, top)
        return ChartAxis(Scale(ticks[0], ticks[-1], BOTTOM, TOP, log=True), ticks, label, write)
    ticks = linear_ticks(top)
    return ChartAxis(Scale(0, ticks[-1], BOTTOM, TOP), ticks, label, write)


@dataclass(frozen=True, slots=True)
class DrawnMark:
    """One element of a picture."""

    tag: str
    attributes: Mapping[str, object]
    text: str = ""
    title: str = ""  # its tooltip, which every browser shows where a pointer rests; may have several lines


def frame(x: ChartAxis, y: ChartAxis) -> list[DrawnMark]:
    parts = []
    for tick, written in zip(y.ticks, tick_texts(y.ticks, y.write), strict=True):
        at = y.scale(tick)
        parts += [grid(f"M{LEFT} {at:.1f}H{RIGHT}", base=tick == 0), text_mark(LEFT - 8, at + 4, written, anchor="end")]
    for tick, written in zip(x.ticks, tick_texts(x.ticks, x.write), strict=True):
        at = x.scale(tick)
        parts += [grid(f"M{at:.1f} {BOTTOM}v4", base=True), text_mark(at, BOTTOM + 17, written, anchor="middle")]
    label = text_mark((LEFT + RIGHT) / 2, HEIGHT - 6, x.label, anchor="middle")
    return [*parts, text_mark(LEFT, 13, y.label), label]


def grid(path: str, *, base: bool = False) -> DrawnMark:
    """Return a thin line, of the grid or of an axis."""
    return DrawnMark("path", {"class": "base" if base else "grid", "d": path})


def text_mark(
    x: float, y: float, text: str, *, anchor: str = "start", strong: bool = False, style: str | None = None
) -> DrawnMark:
    """Return a text on the paper; `anchor`: which end of it stands at `x` (start, middle, end)."""
    kind = "strong" if strong else None
    place = {"x": round(x, 1), "y": round(y, 1), "text-anchor": anchor}
    return DrawnMark("text", {"class": kind, "style": style, **place}, text)


def rectangle(
    x: float, y: float, width: float, height: float, style: str | None = None, *, title: str = "", **more: object
) -> DrawnMark:
    sizes = {name: round(value, 1) for name, value in {"x": x, "y": y, "width": width, "height": height}.items()}
    return DrawnMark("rect", {"style": style, **sizes, **more}, title=title)


def column(first: float, last: float, lines: Iterable[str]) -> DrawnMark:
    """Return an invisible column between two places along the paper, whose tooltip says `lines`."""
    return rectangle(first, TOP, max(last - first, 0.5), BOTTOM - TOP, title="\n".join(lines), **{"class": "hit"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture(ABC):
    """Something to draw; derive from it."""

    name: str  # for ids, unique on the page; letters and hyphens
    title: str
    description: str  # what is to be seen, in words, for readers who cannot see it

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Whether there is nothing to draw."""

    @property
    def height(self) -> int:
        return HEIGHT

    @property
    def legend(self) -> Sequence[tuple[str, str]]:
        """Label and colour of what is drawn, where a picture says it itself."""
        return ()

    @abstractmethod
    def marks(self) -> list[DrawnMark]:
        """Return what is drawn."""
