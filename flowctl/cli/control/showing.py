"""Answers of servers for people: lines and tables of any JSON object, in plain text that fits a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, Final

from flowctl.cli.control.rowlines import connection_lines
from flowctl.core.text.output import say
from flowctl.core.text.printable import printable
from flowctl.units import format_bit_rate, format_duration, format_size

_OWN_LINE: Final = frozenset({"why", "detail", "what it does"})
"""Columns of tables that are sentences: they stand under their row."""
_OF_CONNECTIONS: Final = frozenset({"connection", "state", "delay_ms", "pictures", "queued_bytes", "dropped", "why"})
_OF_STREAMS: Final = ("stream", "connection", "viewers", "slow", "in_bytes", "media", "sent_bytes", "publisher")
"""What is shown of a connection and of a stream; what else they have is in ``--json``, or in the answer about one."""
_SILENT: Final = frozenset({"faults", "warning", "found", "cursor", "lost"})
"""Parts of an answer that are not shown in it: they go to standard error, or are for programs (``--json``)."""


_UNITS: Final[Mapping[str, Callable[[float], str]]] = {
    "bit_rate": format_bit_rate,
    "_bytes_per_s": lambda value: f"{format_size(value)}/s",
    "_bytes": format_size,
    "_ms": lambda value: format_duration(value / 1000),
    "_s": format_duration,
}
"""End of a name -> function that writes its value; the first that fits counts."""


def show(result: Mapping[str, Any]) -> None:
    """Write an answer to standard output: what is one value as a line, a list of objects as a table.

    What only programs need is in ``--json``.
    """
    plain = {name: value for name, value in result.items() if name not in _SILENT and not _nested(value)}
    _lines(plain, "")
    first = not plain
    for name, value in result.items():
        if name in _SILENT or not _nested(value) or value == {}:
            continue
        if not first:
            say("")
        first = False
        if isinstance(value, Mapping):
            say(f"{_word(name)}:")
            _lines({key: item for key, item in value.items() if not _is_table(item)}, "  ")
            for key, item in value.items():
                if _is_table(item):
                    say(f"  {_word(key)}:")
                    _table(item, "    ")
        else:
            say(f"{_word(name)}:" + ("" if value else " none"))
            _table(value, "  ")
    for line in _pages(result.get("found") or {}):
        say(line)


def show_rows(rows: Sequence[Mapping[str, Any]], *, heads: bool) -> None:
    """Write rows of a table that goes on, with its heads or without."""
    _table(rows, "", heads=heads)


def _pages(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield which rows of a long list were shown, where those were not all."""
    first, most = counts.get("offset", 0), counts.get("limit", 0)
    for name, count in counts.items():
        if name not in {"offset", "limit"} and (first or count > most):
            last = min(first + most, count)
            more = f"; the next ones: --offset {last}" if last < count else ""
            yield f"\n{name} {first + 1} to {last} of {count}{more}" if last > first else f"\n{name}: only {count}"


def _nested(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and (not value or isinstance(value[0], Mapping)))


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _lines(values: Mapping[str, Any], indent: str) -> None:
    width = max((len(_word(name)) for name in values), default=0) + 2
    room = max(40, shutil.get_terminal_size().columns)
    for name, value in values.items():
        head = f"{indent}{_word(name) + ':':{width}}"
        text = _text(name, value)
        say(
            textwrap.fill(text, room, initial_indent=head, subsequent_indent=" " * len(head)) if text else head.rstrip()
        )


def _table(rows: Sequence[Mapping[str, Any]], indent: str, *, heads: bool = True) -> None:
    """Write rows under their heads; sentences, and columns that do not fit beside the others, stand under their row.

    Under a row stands only what says something: no zero, and no sentence about a peer that keeps up. So does each item
    of a list of objects; what is an object itself is left to the answer about that one row.
    """
    if not rows:
        return
    room = max(40, shutil.get_terminal_size().columns)
    if rows[0].keys() >= _OF_CONNECTIONS:
        for text in [*connection_lines(rows, room - len(indent)), "flowctl connections NUMBER shows all of one"]:
            say(indent + text)
        return
    objects = {name for row in rows for name, value in row.items() if _nested(value)} - {"detail"}
    every = dict.fromkeys(name for row in rows for name in row)  # events differ in what they have
    names = [name for name in every if name not in _OWN_LINE | objects]
    if streams := "viewers" in rows[0] and "renditions" in objects:
        names = [name for name in _OF_STREAMS if name in rows[0]]
    cells = [[_text(name, row.get(name)) for name in names] for row in rows]
    widths = [max(len(_word(name)), *(len(line[at]) for line in cells)) for at, name in enumerate(names)]
    ends = accumulate(widths, lambda end, width: end + 2 + width, initial=len(indent) - 2)
    fits = max(1, sum(end <= room for end in ends) - 1)
    names, further = names[:fits], () if streams else names[fits:]
    right = [all(isinstance(row.get(name), int | float) for row in rows) for name in names]
    titles = (
        _word(name).rjust(width) if is_right else _word(name).ljust(width)
        for name, width, is_right in zip(names, widths[:fits], right, strict=True)
    )
    if heads:
        say((indent + "  ".join(titles)).rstrip())
    deeper = indent + "    "
    for row, line in zip(rows, cells, strict=True):
        shown = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line[:fits], widths[:fits], right, strict=True)
        )
        say((indent + "  ".join(shown)).rstrip())
        told = (f"{_word(name)} {cell}" for name, cell in zip(further, line[fits:], strict=False) if row.get(name))
        items = (item for name in row if name in objects and _is_table(row[name]) for item in row[name])
        under = [", ".join(told)]
        under += [", ".join(f"{_word(key)} {_text(key, cell)}" for key, cell in item.items() if cell) for item in items]
        under += [_text(name, row[name]) for name in sorted(_OWN_LINE & row.keys()) if row.get("state") != "READY"]
        for text in filter(None, under):
            say(textwrap.fill(text, room, initial_indent=deeper, subsequent_indent=deeper))


def _axis(name: str, axis: Mapping[str, Any]) -> str:
    """Return what waits beside its marks, of which 0 is off, as ``173 KiB (soft 2.0 MiB, hard 4.0 MiB)``."""
    unit = "_bytes" if name == "bytes" else name
    marks = ", ".join(f"{mark} {_text(unit, axis[mark])}" for mark in ("soft", "hard") if axis.get(mark))
    return f"{_text(unit, axis['value'])} ({marks or 'no limit'})"


def _word(name: str) -> str:
    if name == "axes":
        return "waiting"
    for unit in _UNITS:
        name = name.removesuffix(unit) or name
    return name.replace("_", " ")


def _text(name: str, value: Any) -> str:
    if value is None:
        return "never" if name == "expires" else "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        if "value" in value and "soft" in value:
            return _axis(name, value)
        between = "; " if any(isinstance(item, list | Mapping) for item in value.values()) else ", "
        if name == "shares":
            return ", ".join(f"{printable(str(key))} {share:.0%}" for key, share in value.items())
        counts = name == "evidence"  # by names of limits, which end as units do
        items = ((printable(str(key)), item) for key, item in value.items())
        parts = (f"{key} {_text('', item)}" if counts else f"{_word(key)} {_text(key, item)}" for key, item in items)
        return between.join(parts) or "none"
    if isinstance(value, list):
        return ", ".join(_text(name, item) for item in value) or "none"
    if isinstance(value, int | float):
        if (write := next((write for end, write in _UNITS.items() if name.endswith(end)), None)) is not None:
            return write(value)
        if name in {"busy", "pictures"}:
            return f"{value:.0%}"
        if name == "at":
            return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return f"{value:g}" if isinstance(value, float) else str(value)
    return printable(str(value))
