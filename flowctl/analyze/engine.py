"""The engine of a run, Spark or DuckDB: which one it is, and why.

Spark is the reference, whose meaning the other one gives (`flowctl.analyze.duck`), and the engine of the types. One
process runs one engine at a time (`using`); pyspark is loaded where Spark runs, and only there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple

from flowctl.core.text.extras import install_hint, require_extra
from flowctl.errors import ConfigError, FlowctlError
from flowctl.units import format_size

SPARK: Final = "spark"
DUCKDB: Final = "duckdb"
_running: list[str] = [SPARK]


class EngineError(FlowctlError):
    """An engine could not do what it was asked; the message has the cause in one line."""


LARGEST_BYTES: Final = 1 << 30
"""Size of records from which Spark is chosen. DuckDB is faster at every size that was measured; what ends it is memory:
342 MB of closes took 1.5 GB, and beyond `duck.session.MEMORY_BYTES` it works on the disk, on one machine."""
_PACKAGES: Final = {SPARK: "pyspark", DUCKDB: "duckdb"}


class EngineChoice(NamedTuple):
    """An engine, and why it runs."""

    name: str
    why: str

    def line(self) -> str:
        return f"engine: {self.name} ({self.why})"


def choose(
    asked: str | None, *, size_bytes: int | None, local: bool, of_spark: Sequence[str], earlier: str = ""
) -> EngineChoice:
    """Return the engine of a run, or raise `ConfigError` where it cannot be the one that was `asked` for.

    `size_bytes` are of the records, None where none are read; `local`: records and results are on this machine;
    `of_spark`: what was said that only Spark knows; `earlier`: the engine that made the results so far, for Spark goes
    on: DuckDB would make those parts again that have sketches, of which the records may be gone.
    """
    asked = asked or "auto"
    if asked not in ("auto", SPARK, DUCKDB):
        raise ConfigError(f"--engine is {asked!r}, allowed is auto, {SPARK} or {DUCKDB}")
    missing = importlib.util.find_spec(_PACKAGES[DUCKDB]) is None
    against = {
        f"{' and '.join(of_spark)} {'is' if len(of_spark) == 1 else 'are'} of Spark": bool(of_spark),
        "records and results are not both in folders of this machine": not local,
        "the package duckdb is not installed": missing,
    }
    reason = next((why for why, holds in against.items() if holds), "")
    if asked == DUCKDB and reason:
        hint = install_hint("pipeline") if missing and local and not of_spark else "leave --engine out, or say spark"
        raise ConfigError(f"--engine {DUCKDB} cannot run: {reason}", hint=hint)
    size = "no records are read" if size_bytes is None else f"{format_size(size_bytes)} of records"
    if asked != "auto":
        return EngineChoice(asked, "asked for")
    if not reason and earlier == SPARK:
        reason = "the results so far are of Spark"
    if not reason and (size_bytes or 0) >= LARGEST_BYTES:
        reason = f"{size}; up to {format_size(LARGEST_BYTES)} it would be {DUCKDB}"
    return EngineChoice(SPARK, reason) if reason else EngineChoice(DUCKDB, f"{size}, on this machine")


def check_available(engine: str) -> None:
    more = ("sqlglot",) if engine == DUCKDB else ()
    require_extra("pipeline", "the pipeline", _PACKAGES[engine], "pyarrow", "pandas", *more)


def running() -> str:
    return _running[-1]


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Within this context that engine runs, in all threads."""
    _running.append(name)
    try:
        yield
    finally:
        _running.pop()


def mapped_errors() -> AbstractContextManager[None]:
    """Within this context errors of the engine are an `EngineError`."""
    module = "flowctl.analyze.duck.session" if running() == DUCKDB else "flowctl.analyze.spark.session"
    found: AbstractContextManager[None] = importlib.import_module(module).mapped_errors()
    return found
