"""Files of settings in TOML (pure): their tables, the line of each key, and errors that name line and key.

The standard library's reader gives values without their places, so the lines are found by reading the text once more,
statement by statement, with the same reader: whatever way a key is written in, it is found.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from flowctl.errors import ConfigError

MOST_BYTES: Final = 1024 * 1024
"""Longest file of settings: a thousand times what all keys and a page of comments need."""
_MOST_LINES: Final = 200
"""Lines of the longest value whose line is looked for: each of its lines is read again with those before it."""
_OPENS: Final = re.compile(r"[\[{]|\"\"\"|'''")


class _Statement(NamedTuple):
    """A header or a key with its value: where it begins, and the place that it names."""

    line: int
    path: tuple[str, ...]
    header: bool
    repeats: bool  # a header of one of several tables


class TomlText:
    """A file of settings: its `table`, and the line of each key."""

    def __init__(self, text: str, where: str, sample: str = "docs/how-to/change-limits-and-bans.md") -> None:
        self.where: Final = where
        self._text: Final = text
        self._lines: dict[tuple[str, ...], int] | None = None  # made when they are asked for: most files are right
        if len(text.encode(errors="replace")) > MOST_BYTES:
            raise ConfigError(f"{where}: it has more than {MOST_BYTES} bytes, settings are a page at most")
        try:
            self.table: Final[dict[str, Any]] = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError; so is a number of 5000 digits
            if (twice := _twice(text)) is not None:
                name, first, second = twice
                raise ConfigError(
                    f"{where}, line {second}: {name} is there twice, line {first} has it already",
                    hint="leave one of the two out",
                ) from error
            said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            said = said.replace("at end of document", f"at line {len(text.rstrip().splitlines())}, the end")
            raise ConfigError(f"{where}: not valid TOML: {said}", hint=f"see {sample} for an example") from error

    def line(self, *path: str) -> int | None:
        """Return the line of a key, or of the nearest table around it that has one. None: there is none."""
        if self._lines is None:
            self._lines = {}
            for statement in _statements(self._text):
                for count in range(1, len(statement.path) + 1):
                    self._lines.setdefault(statement.path[:count], statement.line)
        for count in range(len(path), 0, -1):
            if (found := self._lines.get(path[:count])) is not None:
                return found
        return None

    def place(self, *path: str) -> str:
        """Return file and line of a key, for errors; of its table where it is missing."""
        line = self.line(*path)
        return self.where if line is None else f"{self.where}, line {line}"


def dotted(path: tuple[str, ...]) -> str:
    """Return a place as TOML writes it, with quotes where they are needed."""
    return ".".join(
        name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
        for name in path
    )


def _twice(text: str) -> tuple[str, int, int] | None:
    """Return what stands in a file twice, with both lines. None: nothing does."""
    seen: dict[tuple[str, ...], int] = {}
    section: tuple[str, ...] = ()
    for line, path, header, repeats in _statements(text):
        if repeats:
            seen = {key: value for key, value in seen.items() if key[: len(path)] != path}
            continue
        if path in seen:
            section = () if header or not path[:-1] else path[:-1]
            name = f"[{dotted(path)}]" if header else dotted(path[-1:])
            return name + (f" of [{dotted(section)}]" if section else ""), seen[path], line
        seen[path] = line
    return None


def _statements(text: str) -> Iterator[_Statement]:
    """Yield the statements of a text; what cannot be read is passed over."""
    lines = text.split("\n")
    section: tuple[str, ...] = ()
    number = 0
    while number < len(lines):
        first, chunk = number, lines[number]
        number += 1
        if not chunk.strip() or chunk.lstrip().startswith("#"):
            continue
        found, goes_on = _read(chunk)
        if goes_on and _OPENS.search(chunk):
            for after in range(number, min(len(lines), number + _MOST_LINES)):
                chunk = f"{chunk}\n{lines[after]}"
                found, goes_on = _read(chunk)
                if found is not None:
                    number = after + 1
                if not goes_on:
                    break
        if found is None:
            continue
        path, value = _chain(found)
        if lines[first].lstrip().startswith("["):
            section = path
            yield _Statement(first + 1, path, header=True, repeats=isinstance(value, list))
        else:
            yield _Statement(first + 1, section + path, header=False, repeats=False)


def _read(text: str) -> tuple[dict[str, Any] | None, bool]:
    """Return what a text says, None if it is not valid, and whether more lines could make it so."""
    try:
        return tomllib.loads(text), False
    except (ValueError, RecursionError) as error:
        return None, "at end of document" in str(error)


def _chain(table: dict[str, Any]) -> tuple[tuple[str, ...], Any]:
    """Return the place that a statement names, and what stands there."""
    path: tuple[str, ...] = ()
    value: Any = table
    while isinstance(value, dict) and len(value) == 1:
        name, value = next(iter(value.items()))
        path += (name,)
    return path, value
