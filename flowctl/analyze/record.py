"""The record of what was read, ``OUT/record.json``: of which files each hour was made, and with what each of its parts.

An hour is a set of files. As long as all files that it was made of are there, it is made anew whole when others come.
When one of them is gone (a recorder removes its oldest), what was made of the hour stays as it is, and files that come
later are left out: to make it anew would forget records, and to add to it would count some twice.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from flowctl.errors import ConfigError

if TYPE_CHECKING:
    from flowctl.analyze.records.listing import File
    from flowctl.analyze.records.place import RecordPlace
    from flowctl.analyze.records.window import Hour

RECORD_FILE: Final = "record.json"
RECORD_FORMAT: Final = 4
"""Format of the record, raised when a key goes or changes its meaning."""
_RECORDED: Final = re.compile(r"(.+-\d{16}-)(0|[1-9]\d{0,15})\.parquet")
"""Name of a recorder's file: node, microsecond of its start, and number, which counts over all tables."""

Names = dict[str, list[list[int]]]
"""Names of files: prefix of a recorder's files -> ranges (first, last) of their numbers."""


@dataclass(slots=True)
class MadePart:
    """Entry of a part of an hour in the record."""

    made_with: str  # see `Part.made_with`
    made_of: str  # digest of the files of the hour
    size_bytes: int  # as it lies there; 0: it has no rows, and no folder


@dataclass(slots=True)
class KnownHour:
    """Entry of an hour in the record."""

    listed: str = ""  # digest of its files when they were listed last; "": it is to be made anew
    made_of: str = ""  # digest of those that it was made of; another than `listed`: some of these are gone
    files: Names = field(default_factory=dict)  # those that it was made of and that could be used
    damaged: list[str] = field(default_factory=list)  # marks of files whose pages cannot be read
    accounts: dict[str, dict[str, Any]] = field(default_factory=dict)  # by table
    newest: str = ""  # time of the newest record that can be used, ISO 8601; "": there is none
    heard: dict[str, str] = field(default_factory=dict)  # the same by node, where files tell
    parts: dict[str, MadePart] = field(default_factory=dict)  # by name

    def size_bytes(self, name: str) -> int:
        """Return how large a part is; 0: it has no rows."""
        return self.parts[name].size_bytes if name in self.parts else 0

    def is_stale(self, name: str, made_with: str) -> bool:
        """Return whether a part is to be made (again) of the files that were listed last."""
        made = self.parts.get(name)
        return made is None or (self.made_of == self.listed and made_of_other(made, self.made_of, made_with))


def made_of_other(made: MadePart | None, made_of: str, made_with: str) -> bool:
    """Return whether a part is not there, or was made of other files or with other options."""
    return made is None or (made.made_of, made.made_with) != (made_of, made_with)


def packed(files: Iterable[File]) -> Names:
    """Return the names of files, those of a recorder by the numbers that follow each other."""
    found: Names = {}
    for begin, number in sorted(map(_numbered, files)):
        runs = found.setdefault(begin, [])
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return found


def compared(names: Names, files: Iterable[File]) -> tuple[int, int]:
    """Return how many of the named files are not among `files`, and how many of `files` are not named."""
    known = {(begin, number) for begin, runs in names.items() for low, high in runs for number in range(low, high + 1)}
    there = set(map(_numbered, files))
    return len(known - there), len(there - known)


def _numbered(file: File) -> tuple[str, int]:
    name = file.path.rpartition("/")[2]
    found = _RECORDED.fullmatch(name)
    return (found[1], int(found[2])) if found else (f"{file.table}/{name}", 0)


def read_record(place: RecordPlace) -> tuple[str | None, dict[Hour, KnownHour]]:
    """Return where the records lie, and the hours that were read; None and empty where there is no record."""
    found = read_json(place, RECORD_FILE, RECORD_FORMAT)
    with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
        if found:
            return found["events"], {
                (text[:10], text[11:]): KnownHour(
                    **item | {"parts": {name: MadePart(**made) for name, made in item["parts"].items()}}
                )
                for text, item in found["hours"].items()
            }
        if not place.exists(RECORD_FILE):
            return None, {}
    hint = "name another folder with --out, or remove that file: what only it knows of, records gone, is lost then"
    told = "damaged, or of another version of flowctl"
    raise ConfigError(f"{place.path(RECORD_FILE)}, the record of what was read, is {told}", hint=hint)


def read_json(place: RecordPlace, name: str, number: int) -> dict[str, Any]:
    """Return an object of ours; empty where there is none, or one of another format."""
    try:
        with place.storage.system.open_input_stream(place.storage.path(name)) as stream:
            found = json.loads(stream.read())
        return found if found["format"] == number else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
