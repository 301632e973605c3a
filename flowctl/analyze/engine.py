"""The engine of a run, Spark or DuckDB: jobs are written once, with the functions of this module.

Jobs take `functions`, `Window` and `Observation` from here and not from pyspark: they are those of the engine that runs
(`using`). Spark is the reference, whose meaning the other one gives (`flowctl.analyze.duck`), and the engine of the
types. One process runs one engine at a time; pyspark is loaded where Spark runs, and only there.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from flowctl.errors import FlowctlError

if TYPE_CHECKING:
    from pyspark.sql import Observation, Window, functions

__all__ = ["DUCKDB", "SPARK", "EngineError", "Observation", "Window", "functions", "mapped_errors", "running", "using"]

SPARK: Final = "spark"
DUCKDB: Final = "duckdb"
_OF_DUCKDB: Final = {"Window": "flowctl.analyze.duck.functions", "Observation": "flowctl.analyze.duck.frame"}
_running: list[str] = [SPARK]


class EngineError(FlowctlError):
    """An engine could not do what it was asked; the message has the cause in one line."""


def running() -> str:
    return _running[-1]


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Within this context what jobs take from here is of that engine, in all threads."""
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


if not TYPE_CHECKING:

    class _OfEngine:
        """A name of ``pyspark.sql`` or what is of that name in the engine that runs."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            return getattr(self._found(), name)

        def __call__(self) -> Any:
            return self._found()()

        def _found(self) -> Any:
            duck = running() == DUCKDB
            if self._name == "functions":
                return importlib.import_module("flowctl.analyze.duck.functions" if duck else "pyspark.sql.functions")
            return getattr(importlib.import_module(_OF_DUCKDB[self._name] if duck else "pyspark.sql"), self._name)

    functions, Window, Observation = map(_OfEngine, ("functions", "Window", "Observation"))
