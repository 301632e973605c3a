"""Whether records are there twice in files that are no copies of each other: joined or rewritten beside the old ones.

(`node`, `seq`) names a record of a table. A recorder's files follow each other, so the ranges of `seq` of a node's
files do not meet; where they do, somebody rewrote files and left the old ones, or two servers have the same name.
Footers tell the ranges, so only the files whose ranges meet are looked at row by row, and as a rule there are none.

Files without the recorder's metadata (of `synth`, or rewritten by a tool that drops it) are compared with files that
have it, not with each other: those of `synth` mix nodes and visits, meet everywhere, and hold nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from flowctl.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flowctl.pipeline.tables.footers import Span

TWICE: Final = "some records are there twice (same node and seq, in files that are no copies of each other)"
TWICE_HINT: Final = "were files joined or rewritten beside the old ones? Take one of the two away"
MOST_NAMED: Final = 5_000
"""More files than these are not named one by one in a plan: then the whole table is looked at."""
_LOWEST: Final = -(1 << 63)
_HIGHEST: Final = (1 << 63) - 1

_Open = tuple[int, str]
"""A file whose range may still meet one: its last seq, its path."""
_Opens = tuple[list[_Open], list[_Open]]
"""Those that no recorder wrote, and those that one did."""


def overlapping(files: Iterable[tuple[str, Span]]) -> list[str]:
    """Return the files that may hold a record that another one holds as well, by path.

    Args:
        files: path and span of the usable files, by `first_seq`, unknown ones first.
    """
    of_node: dict[str, _Opens] = {}
    mixed: _Opens = ([], [])
    found: set[str] = set()
    for path, (first_node, last_node, first_seq, last_seq, recorded) in files:
        low = _LOWEST if first_seq is None else first_seq
        one = first_node if first_node is not None and first_node == last_node else None
        own = mixed if one is None else of_node.setdefault(one, ([], []))
        # A file of several nodes may meet any other; names of nodes between its first and last are not known.
        for theirs in [own, mixed] if own is not mixed else [mixed, *of_node.values()]:
            # Files that no recorder wrote are not held against each other, and not gone through for nothing: there may
            # be a million of them, of which nobody knows where they end.
            for others in theirs if recorded else theirs[1:]:
                others[:] = [item for item in others if item[0] >= low]
                if others:
                    found.update((path, *(item[1] for item in others)))
        own[recorded].append((_HIGHEST if last_seq is None else last_seq, path))
    return sorted(found)


def check_distinct(usable: DataFrame, paths: Sequence[str], table: str) -> None:
    """Look at the records of files that meet.

    Args:
        usable: the table without files that were put aside.
        paths: see `overlapping`; none: nothing is read.
        table: its name, for the error.

    Raises:
        ConfigError: a record is there twice; names it and its files. Which of two rows is right nobody can tell, and
            jobs that add up would count both.
    """
    if not paths:
        return
    from pyspark.sql import functions as f

    frame = usable if len(paths) > MOST_NAMED else usable.filter(f.col("_metadata.file_path").isin(spelt(paths)))
    rows = frame.select("node", "seq", f.col("_metadata.file_path").alias("file")).filter("node IS NOT NULL")
    twice = rows.filter("seq IS NOT NULL").groupBy("node", "seq").count().filter("count > 1")
    told = twice.agg(f.sum(f.col("count") - 1).alias("more"), f.min(f.struct("node", "seq")).alias("first")).first()
    if told is None or not told["more"]:
        return
    node, seq = told["first"]
    where = rows.filter((f.col("node") == node) & (f.col("seq") == seq)).select("file").distinct().limit(3).collect()
    names = ", ".join(sorted(row["file"] for row in where))
    raise ConfigError(
        f"{table}: {TWICE}: {told['more']}, the first is {seq} of node {node} in {names}", hint=TWICE_HINT
    )


def spelt(paths: Iterable[str]) -> list[str]:
    """Return addresses of files in all forms in which Spark spells them: file:///, file:/; a blank as %20."""
    short = {form for path in paths for form in (path, path.replace(":///", ":/", 1))}
    return sorted(short | {unquote(form) for form in short})
