"""The record of what was read: what is remembered of each part of each hour, and what follows for its next run.

``OUT/record.json`` alone says what counts. It is written whole, before parts take their places, and names where each
has to go (`settle`): a run that is killed before has changed nothing, one that is killed after is ended by the next.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from flowctl.analyze.job import digest
from flowctl.analyze.records.footers import DAMAGED, Facts, spans_of
from flowctl.analyze.records.seen import Content, Span, apart, holds, joined, refined
from flowctl.errors import ConfigError

if TYPE_CHECKING:
    from flowctl.analyze.records.listing import File, Listing
    from flowctl.analyze.records.place import Place
    from flowctl.analyze.records.window import Hour

RECORD_FILE: Final = "record.json"
RECORD_FORMAT: Final = 3
"""Of the record; counted up when a key goes or changes its meaning."""
ALL: Final = ""
"""Stands among the parts of an hour for accounts and what is put aside: what it was made of is all that was read."""
DOUBTED: Final = "? "
"""Stands before with what a part was made that is to be made again, as what was put aside may be used now."""


@dataclass(slots=True)
class Made:
    """What is remembered of a part of an hour."""

    made_with: str  # see `Part.made_with`
    size_bytes: int  # as it lies there; 0: it has no rows, and no folder
    content: str  # name of what it was made of, in `Known.contents`
    listed: str  # digest of the files of the hour when it was looked at last


@dataclass(slots=True)
class Known:
    """What is remembered of an hour."""

    contents: dict[str, dict[str, list[Span]]] = field(default_factory=dict)  # by name; parts share them
    parts: dict[str, Made] = field(default_factory=dict)  # by name; `ALL` is of accounts and of what is put aside
    accounts: dict[str, dict[str, Any]] = field(default_factory=dict)  # by table
    newest: str = ""  # time of the newest record that can be used, ISO 8601; "": there is none

    def __post_init__(self) -> None:
        found: Mapping[str, Any] = self.parts  # as JSON has it, too
        self.parts = {name: made if isinstance(made, Made) else Made(**made) for name, made in found.items()}

    def content(self, name: str) -> Content:
        """Return what a part was made of; nothing where it was not made."""
        return self.contents[self.parts[name].content] if name in self.parts else {}

    def size_bytes(self, name: str) -> int:
        """Return how large a part is; 0: it has no rows."""
        return self.parts[name].size_bytes if name in self.parts else 0

    def enter(self, name: str, made: Made, content: dict[str, list[Span]]) -> None:
        """Remember a part, and what it was made of."""
        self.contents[made.content] = content
        self.parts[name] = made
        self.contents = {key: self.contents[key] for key in sorted({item.content for item in self.parts.values()})}


class Found(NamedTuple):
    """A file of an hour that was looked at."""

    file: File
    facts: Facts
    contents: tuple[dict[str, list[Span]], ...]  # what is in it; by its footer and, where that was asked for, exactly


class Plan(NamedTuple):
    """What is to be done for a part of an hour."""

    add: bool  # beside what is there, instead of in its place
    made_with: str  # that is remembered
    found: tuple[Found, ...]  # the files to read
    content: dict[str, list[Span]]  # what it is made of then
    listed: str

    def beside(self) -> list[str]:
        """Return the usable files that are added; what is made whole takes all that there are."""
        return [found.file.path for found in self.found if self.add and found.facts.problem is None]


def plans_of(
    known: Known, listing: Listing, wanted: Mapping[str, str], looked: Sequence[tuple[File, Facts]], listed: str
) -> tuple[dict[str, Plan], list[str]]:
    """Return what is to be done for parts of an hour, by name, without those that need nothing; and what to tell of it.

    A part is made again whole as long as all that it was made of is still there. Else what is new is put beside it,
    if that is certainly new: a file that holds some of what is known, or may, and more, is left out.
    """
    ever = known.content(ALL)
    found = [Found(file, facts, (refined(content_of(file, facts), ever),)) for file, facts in looked]
    # One that was put aside, and has been written anew, is there; so are records that are known, and damaged now.
    names: list[Content] = [{(name := _aside(file)): ever.get(name, ())} for file, _ in looked]
    # And records of a file of which none can be used by these checks: by others some were.
    names += [refined(content_of(x, facts._replace(reasons={})), ever) for x, facts in looked if facts.problem is None]
    damaged = [content_of(file, facts._replace(problem=None)) for file, facts in looked if facts.problem == DAMAGED]
    there = joined([*names, *(x.contents[0] for x in found)])
    if lost := not holds(there, ever):
        found = [x._replace(contents=(*x.contents, *_exactly(listing, x, ever))) for x in found]
        there = joined([*names, *(content for x in found for content in x.contents)])
        lost = not holds(there, ever)
    plans: dict[str, Plan] = {}
    added, left, without = set(), set(), []
    for name, made_with in wanted.items():
        made, before = known.parts.get(name), known.content(name)
        mine = [x for x in found if name == ALL or x.facts.problem is None]
        new = [x for x in mine if not any(holds(before, content) for content in x.contents)]
        if made is not None and made.made_with == made_with and not new:
            made.listed = listed
        elif holds(joined([there, *damaged]) if name == ALL else there, before):
            content = joined(x.contents[-1] for x in mine)
            plans[name] = Plan(False, made_with, tuple(mine), content, listed)
            without += [name] if lost and name != ALL else []
        elif made is not None:
            # What is gone cannot be checked again: to doubt it would be to look in each run.
            made.made_with = made_with if name == ALL else made.made_with.removeprefix(DOUBTED)
            gone = {source for source in before if not holds(there, {source: before[source]})}
            sure = [x for x in new if _is_new(x, before, gone)]
            added |= {x.file.path for x in sure}
            left |= {x.file.path for x in new} - added
            if sure:
                content = joined([before, *(x.contents[-1] for x in sure)])
                plans[name] = Plan(True, made.made_with, tuple(sure), content, listed)
            else:
                made.listed = listed
    told = [f"{', '.join(without)} made without records that are there no more"] if without else []
    if added or left:
        told.append(
            "some of its records are there no more, and what was learnt of them stays; "
            f"{len(added)} new files are added, {len(left)} that hold some of it, or may, and more are left out"
        )
    return plans, told


def read_record(place: Place) -> tuple[dict[str, Any], dict[Hour, Known]]:
    """Return the record of what was read, and its hours; empty where there is none."""
    found = read_json(place, RECORD_FILE, RECORD_FORMAT)
    with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
        if found or not place.exists(RECORD_FILE):
            listed = found["hours"] if found else {}
            hours = {(text[:10], text[11:]): Known(**item) for text, item in listed.items()}
            _ = [known.content(name) for known in hours.values() for name in known.parts]  # none is missing
            if not (pending := found.get("pending")) or pending.keys() >= {"staging", "whole", "more", "gone"}:
                return found, hours
    hint = "name another folder with --out, or remove that file: what only it knows of, records gone, is lost then"
    told = "damaged, or of another version of flowctl"
    raise ConfigError(f"{place.path(RECORD_FILE)}, the record of what was read, is {told}", hint=hint)


def settle(place: Place, pending: Mapping[str, Any]) -> None:
    """Give what lies in a staging folder the places that the record says; what has its place already is well."""
    if not pending or not place.storage.is_folder(pending["staging"]):
        return
    staging = place.inner(pending["staging"])
    for name in (*pending["whole"], *pending["more"]):
        if staging.exists(name):
            place.adopt(staging, name)
    for name in pending["gone"]:
        place.delete(name)


def _aside(file: File) -> str:
    """Return the name of a file as the source of what is put aside."""
    return f"{file.table} !{digest(file.path.rpartition('/')[2])}"


def content_of(file: File, facts: Facts) -> dict[str, list[Span]]:
    """Return what is in a file, as its footer tells."""
    if facts.problem is not None or (
        facts.rows and not facts.usable
    ):  # what is damaged was well, and is when it is written anew: known by its time
        moment = file.mtime_ns if facts.problem == DAMAGED else 1
        return {_aside(file): [[moment, moment, 1]]}
    rows = facts.rows or 0
    # Only of a recorder it is known that no two records have the same `seq`.
    if not facts.recorded or facts.node is None or facts.first_seq is None or facts.last_seq is None:
        return {f"{file.table} ?{digest(facts.identity)}": [[1, rows, rows]]} if rows else {}
    return {f"{file.table} {facts.node}": [[facts.first_seq, facts.last_seq, rows]]}


def _exactly(listing: Listing, found: Found, ever: Content) -> list[dict[str, list[Span]]]:
    """Return what is in a file of which its footer does not tell, as its rows do; nothing where they do not either."""
    file, facts, (content,) = found
    if not any(" ?" in source for source in content):
        return []
    spans: list[tuple[str, int, int, int]] = []
    with contextlib.suppress(OSError, ValueError):
        spans = spans_of(listing.storage.system, facts.path, file.table)
    if sum(rows for *_, rows in spans) != facts.rows:
        return []
    return [refined({f"{file.table} {node}": [[low, high, rows]] for node, low, high, rows in spans}, ever)]


def _is_new(found: Found, before: Content, gone: Iterable[str]) -> bool:
    """Return whether no record of a file is among those known, of some sources of which there are some no more."""
    content = found.contents[-1]
    unknown = any(" ?" in source for source in content) or any(x.startswith(f"{found.file.table} ?") for x in gone)
    return apart(before, content) and (found.facts.problem is not None or not unknown)


def read_json(place: Place, name: str, number: int) -> dict[str, Any]:
    """Return an object of ours; empty where there is none, or one of another format."""
    try:
        with place.storage.system.open_input_stream(place.storage.path(name)) as stream:
            found = json.loads(stream.read())
        return found if found["format"] == number else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
