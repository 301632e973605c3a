"""Figures of several pictures as one SVG file for a document: the same octets for the same figures, light and dark."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from flowctl.charts.axes import HEIGHT, WIDTH, draw, said
from flowctl.charts.page import MARKS, PALETTE, Figure
from flowctl.charts.pictures import Lines

MOST_BYTES: Final = 150_000
"""Of one file: these are in the repository."""
_HEAD: Final = 44
"""Above each picture: its title, and its legend."""
_STYLE: Final = "svg{font-family:sans-serif}.paper{fill:var(--paper)}.head{font-size:15px;font-weight:600}"
_CHAR: Final = 7.0
"""Width of a letter of a legend, about."""


def save(figures: Sequence[Figure], path: Path, alt: str, *, columns: int = 2, note: str = "") -> None:
    """Write figures, side by side and then below each other, as one SVG file."""
    rows = -(-len(figures) // columns)
    width, height = WIDTH * min(columns, len(figures)), rows * (HEIGHT + _HEAD) + (24 if note else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f"<title>{html.escape(alt)}</title>",
        f"<style>{PALETTE}{MARKS}{_STYLE}</style>",
        '<rect class="paper" width="100%" height="100%"/>',
        *(_panel(figure, index % columns, index // columns) for index, figure in enumerate(figures)),
        said(10, height - 8, note) if note else "",
        "</svg>",
    ]
    text = "\n".join(filter(None, parts)) + "\n"
    if len(text.encode()) > MOST_BYTES:
        raise ValueError(f"{path.name} has {len(text.encode())} bytes, it may have {MOST_BYTES}: draw fewer points")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def _panel(figure: Figure, column: int, row: int) -> str:
    left, top = column * WIDTH, row * (HEIGHT + _HEAD)
    picture = figure.picture
    parts = [f'<text class="strong head" x="{left + 10}" y="{top + 18}">{html.escape(picture.title)}</text>']
    at = left + 10.0
    for label, paint in figure.legend or (picture.legend if isinstance(picture, Lines) else ()):
        parts.append(f'<rect x="{at:.0f}" y="{top + 28}" width="14" height="4" rx="2" style="fill:{paint}"/>')
        parts.append(said(at + 20, top + 34, label))
        at += 36 + len(label) * _CHAR
    place = f' x="{left}" y="{top + _HEAD}" width="{WIDTH}" height="{picture.height}"'
    return "\n".join([*parts, draw(picture, place)])
