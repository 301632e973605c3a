"""Progress of Spark's work on standard error: a bar on a terminal, a line now and then elsewhere, or nothing.

Spark tells which stages run and how many of their tasks are done; how many stages are still to come it does not know,
as adaptive execution plans the next when it has seen the last. So a bar is that of the stages that run, with the name
of the job.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from flowctl.text.output import say

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_S: Final = 0.5
LINE_EVERY_S: Final = 10.0
"""Between lines where nobody watches a bar: a log of an hour has 360 of them at most."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What runs now.

    Args:
        stages: how many stages run.
        done: tasks of them that are done.
        tasks: tasks of them.
    """

    stages: int
    done: int
    tasks: int


class Progress:
    """Watches a session from a thread of its own and shows what runs; a context manager.

    Args:
        spark: session.
        title: what is being done; may be changed meanwhile with `say`.
        quiet: show nothing.
    """

    def __init__(self, spark: SparkSession, title: str, *, quiet: bool = False) -> None:
        self._tracker: Any = spark.sparkContext.statusTracker()
        self._title = title  # replaced whole, read by the thread
        self._quiet = quiet
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> Self:
        """Begin to watch."""
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread before the session ends, which it asks."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def say(self, title: str) -> None:
        """Change what is said to be done."""
        self._title = title

    def read(self) -> Reading:
        """Return what runs now."""
        infos = [self._tracker.getStageInfo(number) for number in self._tracker.getActiveStageIds()]
        known = [info for info in infos if info is not None]
        return Reading(len(known), sum(info.numCompletedTasks for info in known), sum(info.numTasks for info in known))

    def _watch(self) -> None:
        # The session may end at any moment, by an error elsewhere: then there is nothing more to show.
        with contextlib.suppress(Exception):
            if sys.stderr.isatty():
                self._bar()
            else:
                self._lines()

    def _readings(self) -> Iterator[Reading]:
        while not self._stop.wait(POLL_S):
            yield self.read()

    def _bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        )  # fmt: skip
        with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
            bar = bars.add_task(self._title, total=None)
            for reading in self._readings():
                bars.update(bar, description=self._title, completed=reading.done, total=reading.tasks or None)

    def _lines(self) -> None:
        begun = last = time.monotonic()
        for reading in self._readings():
            now = time.monotonic()
            if now - last >= LINE_EVERY_S:
                last = now
                say(f"{self._title}: {now - begun:.0f} s, tasks {reading.done} of {reading.tasks}", to_stderr=True)
