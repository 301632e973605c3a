"""Figures of several pictures as one SVG file for a document: the same octets for the same figures, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from flowctl.charts.axes import HEIGHT, WIDTH, DrawnMark, rectangle, text_mark
from flowctl.charts.page import Figure, page

MOST_BYTES: Final = 150_000
"""Of one file: these are in the repository."""
_HEAD: Final = 44
"""Above each picture: its title, and its legend."""
_CHAR: Final = 7.0
"""Width of a letter of a legend, about."""


def save(figures: Sequence[Figure], path: Path, alt: str, *, columns: int = 2, note: str = "") -> None:
    """Write figures, side by side and then below each other, as one SVG file."""
    rows = -(-len(figures) // columns)
    width, height = WIDTH * min(columns, len(figures)), rows * (HEIGHT + _HEAD) + (24 if note else 0)
    places = [(place % columns * WIDTH, place // columns * (HEIGHT + _HEAD)) for place in range(len(figures))]
    marks = [mark for figure, place in zip(figures, places, strict=True) for mark in _head(figure, *place)]
    marks += [text_mark(10, height - 8, note)] if note else []
    panels = [
        (figure.picture, {"x": x, "y": y + _HEAD, "width": WIDTH, "height": figure.picture.height})
        for figure, (x, y) in zip(figures, places, strict=True)
    ]
    sizes = {"whole_width": width, "whole_height": height}
    text = page("charts/sheet.svg", title=alt, marks=marks, panels=panels, **sizes)
    if len(text.encode()) > MOST_BYTES:
        raise ValueError(f"{path.name} has {len(text.encode())} bytes, it may have {MOST_BYTES}: draw fewer points")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def _head(figure: Figure, left: int, top: int) -> list[DrawnMark]:
    """Return the title and the legend of a figure."""
    title = {"class": "strong head", "x": left + 10, "y": top + 18}
    parts, at = [DrawnMark("text", title, figure.picture.title)], left + 10.0
    for label, paint in figure.keys:
        parts += [rectangle(at, top + 28, 14, 4, f"fill:{paint}", rx=2), text_mark(at + 20, top + 34, label)]
        at += 36 + len(label) * _CHAR
    return parts
