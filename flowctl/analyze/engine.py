"""The engine of a run, Spark or DuckDB: which one it is, and why.

Spark is the reference, whose meaning the other one gives (`flowctl.analyze.duck`), and the engine of the types. One
process runs one engine at a time (`using`); pyspark is loaded where Spark runs, and only there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

from flowctl.core.text.extras import install_hint, require_extra
from flowctl.errors import ConfigError, FlowctlError
from flowctl.units import format_size

SPARK: Final = "spark"
DUCKDB: Final = "duckdb"
_running: list[str] = [SPARK]


class EngineError(FlowctlError):
    """An engine could not do what it was asked; the message has the cause in one line."""


MEMORY_BYTES: Final = 1 << 30
"""Most memory of DuckDB's queries, half of the machine's or of the container's at most; beyond, they use the disk. With
Python and what DuckDB does not count a run of 342 MB of closes took 1.5 GB, and with a bound of 4 GiB 1.9 in the same
time."""
BESIDE_BYTES: Final = 700 << 20
"""What Python, Arrow and the engine itself take beside the memory of its queries, measured at 1 M events."""
SPARK_BYTES: Final = 3 << 30
"""Least memory of a machine on which Spark is chosen for size: the 2 GiB of its driver, Java itself and Python."""
_PACKAGES: Final = {SPARK: "pyspark", DUCKDB: "duckdb"}


class EngineChoice(NamedTuple):
    """An engine, and why it runs."""

    name: str
    why: str

    def line(self) -> str:
        return f"engine: {self.name} ({self.why})"


def machine_bytes(root: Path = Path("/")) -> int:
    """Return the memory of this machine, or what a container, a service or a batch system leaves of it."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(KeyError, ValueError):  # https://slurm.schedmd.com/sbatch.html; in MiB
        found.append(int(os.environ["SLURM_MEM_PER_NODE"]) << 20)
    with contextlib.suppress(OSError):  # not Linux
        for line in (root / "proc/self/cgroup").read_text("ascii").splitlines():
            _, kinds, group = line.split(":", 2)
            base = root / "sys/fs/cgroup" / kinds
            # Above them are others, whose limits hold too; a container sees its own in place of all.
            above = [base / group.lstrip("/"), *(base / group.lstrip("/")).parents]
            for folder in above[: above.index(base) + 1] if kinds in ("", "memory") else ():
                with contextlib.suppress(OSError, ValueError):  # there is none, or it is `max`
                    found.append(int((folder / ("memory.limit_in_bytes" if kinds else "memory.max")).read_text()))
    return min(found)


def duckdb_bytes(memory_bytes: int) -> int:
    """Return how much memory DuckDB's queries take of so much: `MEMORY_BYTES`, or half of it, or what Python leaves.

    It is chosen for records of up to half of that. It is faster at every size that was measured, but exact quantiles
    are of lists that cannot go to the disk: `experience` of 1.4 GB did not fit into 1 GiB.
    """
    return min(MEMORY_BYTES, memory_bytes // 2, max(memory_bytes - BESIDE_BYTES, 128 << 20))


def choose(
    asked: str | None,
    *,
    size_bytes: int | None,
    local: bool,
    of_spark: Sequence[str],
    earlier: str = "",
    memory_bytes: int | None = None,
) -> EngineChoice:
    """Return the engine of a run, or raise `ConfigError` where it cannot be the one that was `asked` for.

    `size_bytes` are of the records, None where none are read; `local`: records and results are on this machine;
    `of_spark`: what was said that only Spark knows; `earlier`: the engine that made the results so far, for Spark goes
    on: DuckDB would make those parts again that have sketches, of which the records may be gone; `memory_bytes`: of the
    machine, None: of this one.
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
    if reason:
        return EngineChoice(SPARK, reason)
    memory_bytes = machine_bytes() if memory_bytes is None else memory_bytes
    bound_bytes = duckdb_bytes(memory_bytes)
    held = f"{format_size(bound_bytes)} of {format_size(memory_bytes)} of memory for its queries"
    if (size_bytes or 0) < bound_bytes // 2:
        return EngineChoice(DUCKDB, f"{size}, on this machine; it takes up to {held}")
    if memory_bytes < SPARK_BYTES:
        least = format_size(SPARK_BYTES)
        return EngineChoice(DUCKDB, f"{size}; beyond {held} it uses the disk, and Spark would take {least}")
    return EngineChoice(SPARK, f"{size}; up to {format_size(bound_bytes // 2)} it would be {DUCKDB}, with {held}")


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
