"""Rows of figures as Markdown tables, which also read well on a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def shown(value: object) -> str:
    """Return a value for a table: three significant digits are all that such figures are good for."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table; numbers to the right."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[shown(row.get(head, "")) for head in heads] for row in rows]
    widths = [max(len(line[index]) for line in [heads, *cells]) for index in range(len(heads))]
    filled = [[value for row in rows if (value := row.get(head)) is not None and value != ""] for head in heads]
    numeric = [bool(values) and all(isinstance(value, int | float) for value in values) for values in filled]

    def line(parts: list[str]) -> str:
        padded = [
            part.rjust(width) if right else part.ljust(width)
            for part, width, right in zip(parts, widths, numeric, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)]
    return "\n".join([line(heads), f"| {' | '.join(rule)} |", *map(line, cells)])


def print_rows(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print what a benchmark measured, as it is: one JSON array, or a line of heads and a line per row."""
    if as_json:
        print(json.dumps(rows))
        return
    keys = list(rows[0])
    print(" | ".join(keys))
    for row in rows:
        print(" | ".join(str(row[key]) for key in keys))


def titled(titles: Mapping[str, str], heads: Mapping[str, Mapping[str, str]], rows: list[dict[str, Any]]) -> str:
    """Return a table with its title for each part of `heads` of which there are rows (key ``part``)."""
    found = []
    for part, columns in heads.items():
        mine = [{head: row[key] for key, head in columns.items()} for row in rows if row["part"] == part]
        if mine:
            found.append(f"{titles[part]}:\n\n{table(mine)}")
    return "\n\n".join(found)
