"""Connections in a line each, cut to the terminal: what `top` and lists show of them (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from flowctl.core.text.printable import foreign, printable
from flowctl.units import format_duration, format_size

_STATES: Final = {"READY": "ready", "OVERLOADED": "over", "SOFT_LIMIT": "SOFT", "HARD_LIMIT": "HARD"}
_COLUMNS: Final[tuple[tuple[str, int], ...]] = (
    *(("conn", 7), ("peer", 21), ("stream", 20), ("state", 5)),
    *(("delay", 7), ("pict", 4), ("queue", 8), ("drops", 6)),
)

_LEAST_WHY: Final = 14
"""Room for why: a name of a stream is cut for it."""
_BLAMES: Final = {"peer's line": "link", "our loop": "loop", "publisher burst": "burst"}
"""Short words for the cause of trouble, where there is little room."""


def connection_lines(rows: Sequence[Mapping[str, Any]], columns: int, *, widest: bool = False) -> list[str]:
    """Return a head and a line for each row; `widest`: so that all that may come has room, and no names of streams."""
    table = [_cells(row) for row in rows]
    if widest:
        widths = {name: most for name, most in _COLUMNS if name != "stream"}
    else:
        widths = {name: max(len(name), *(len(cells[name]) for cells in table)) for name, _ in _COLUMNS}
        over = sum(widths.values()) + len(widths) + _LEAST_WHY - columns
        widths["stream"] = max(len("stream"), widths["stream"] - max(0, over))
    lines = [" ".join([*(f"{name:<{width}}" for name, width in widths.items()), "why"])]
    for row, cells in zip(rows, table, strict=True):
        line = " ".join(f"{foreign(cells[name], width):<{width}}" for name, width in widths.items())
        lines.append(f"{line} {_why_of(row, columns - len(line) - 1)}")
    return [line[:columns].rstrip() for line in lines]


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "conn": str(row["connection"]),
        "peer": foreign(row["peer"], dict(_COLUMNS)["peer"]),
        "stream": foreign(row.get("stream") or "-", dict(_COLUMNS)["stream"]),
        "state": _STATES.get(row["state"], "?"),
        "delay": format_duration(round(row["delay_ms"] / 1000, 1)),
        "pict": f"{row['pictures']:.0%}",
        "queue": format_size(row["queued_bytes"]) if row["queued_bytes"] else "-",
        "drops": str(row["dropped"]),
    }


def _why_of(row: Mapping[str, Any], columns: int) -> str:
    """Return what matters of a connection: of one that keeps up in a rendition of a set, which, and why that one."""
    if row["state"] == "READY" and row.get("role") == "publisher":
        return "publishes"
    if row["state"] == "READY" and row.get("rendition"):
        name = foreign(row["rendition"], 20)
        text = printable(f"{name}: {row['renditions']['why']}")
        return text if len(text) <= columns else name
    return _why(printable(str(row["why"])), columns)


def _why(text: str, columns: int) -> str:
    """Return as much of a connection's `why` as fits: the blame and the first reason first.

    Its state, which stands first in it, has a column of its own.
    """
    _, *reasons = text.split("; ")
    if len(text) <= columns or not reasons:
        return text
    blames = [item.removeprefix("to blame: ") for item in reasons if item.startswith("to blame: ")]
    others = [item for item in reasons if not item.startswith("to blame: ")] or [""]
    lead = f"{_BLAMES.get(blames[0], blames[0])}: " if blames else ""
    axis = others[0].rpartition(": ")[2]  # "queued: 9 B, limit 8 B": what was done, and which axis did it
    for reason in ("; ".join(others), others[0], axis, axis.partition(",")[0], axis.partition(" in ")[0]):
        if len(lead + reason) <= columns:
            return lead + reason
    return lead.rstrip(": ") or axis.partition(" ")[0]  # half a figure would be a wrong one
