"""Charts that a script of ours draws with uPlot (``assets/plots.js``), as data (pure).

A plot has one x for all its curves; what a curve has not there is None. Texts are made printable before.
Colours are names of the page's variables, so that a plot follows the reader's light or dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve of a plot."""

    label: str
    paint: str  # variable of the page without its dashes: s1 to s8, calm, quiet
    values: Values
    unit: str  # count, share, ms, bytes or bits (a second); the first two units have an axis
    draw: str = "steps"  # line, steps (a value lasts until the next), area, bars or points


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Curves over one x."""

    x_label: str
    x_unit: str  # as of a curve, or time (Unix time, seconds, shown as UTC)
    xs: Values
    curves: Sequence[Curve]
    x_log: bool = False
    stacked: bool = False
    height: int = 250
    tops: Mapping[str, float] | None = None  # unit -> upper end of its axis, where the values do not say it
    marks: Sequence[tuple[str, float, str]] = ()  # lines at values that matter: x or a unit, where, label
    strip: Sequence[tuple[float, float, str]] = ()  # stretches below the curves: from, to, colour

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        x = {name: found.pop(f"x_{name}") for name in ("label", "unit", "log")} | {"values": found.pop("xs")}
        marks = [{"scale": scale, "at": at, "label": label} for scale, at, label in self.marks]
        curves = [curve | {"as": curve.pop("draw"), "stacked": self.stacked} for curve in found.pop("curves")]
        return found | {"x": x, "marks": marks, "series": curves}


def joined(curves: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[list[float], dict[str, list[float | None]]]:
    """Return one x for curves that each have their own, and what each has there."""
    xs = sorted({x for points in curves.values() for x, _ in points})
    found = {name: dict(points) for name, points in curves.items()}
    return xs, {name: [points.get(x) for x in xs] for name, points in found.items()}
