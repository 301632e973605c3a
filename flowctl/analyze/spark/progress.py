"""Progress of Spark's work on standard error: a bar on a terminal, a line now and then elsewhere.

Spark tells which stages run and how many of their tasks are done, not how many stages are still to come. So a bar is
that of the stages that run, with the name of what is being done; while Java starts it has no length.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Self, TextIO, cast

from flowctl.core.text.output import say

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_S: Final = 0.25
LINE_EVERY_S: Final = 10.0
"""Time between two lines where no bar is shown: a log of an hour has 360 of them at most."""


class Progress:
    """Watches from a thread of its own and shows what runs; a context manager, for before a session begins on."""

    def __init__(self, title: str) -> None:
        self._title = title  # replaced whole, read by the thread, as is the tracker
        self._tracker: Any = None
        self._remote: dict[Any, Any] = {}  # stages by operation, as Spark Connect tells them, which has no tracker
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)
        self._stream: TextIO = sys.stderr

    def __enter__(self) -> Self:
        """Begin to watch; standard error as it is now is written to, wherever Java's is sent to later."""
        with contextlib.suppress(OSError, ValueError):  # one without a file, in a test
            self._stream = os.fdopen(os.dup(sys.stderr.fileno()), "w")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5)
        if self._stream is not sys.stderr:
            self._stream.close()

    def watch(self, spark: SparkSession, title: str) -> None:
        """Show the tasks of a session, which may end at any moment."""
        context = getattr(spark, "sparkContext", None)
        if context is None:
            spark.registerProgressHandler(cast(Any, self._note))
        else:
            self._tracker = context.statusTracker()
        self._title = title

    def say(self, title: str) -> None:
        self._title = title

    def _note(self, stages: Any, operation_id: Any = None, *, done: bool = False, **_: Any) -> None:
        self._remote[operation_id] = () if done else tuple(stages or ())

    def read(self) -> tuple[int, int]:
        """Return how many tasks of the stages that run are done, and how many they are."""
        remote = [stage for stages in tuple(self._remote.values()) for stage in stages if not stage.done]
        if remote:
            return sum(stage.num_completed_tasks for stage in remote), sum(stage.num_tasks for stage in remote)
        stages = self._tracker.getActiveStageIds() if self._tracker else ()
        infos = [info for number in stages if (info := self._tracker.getStageInfo(number)) is not None]
        return sum(info.numCompletedTasks for info in infos), sum(info.numTasks for info in infos)

    def _show(self) -> None:
        with contextlib.suppress(Exception):  # the session ended, by an error elsewhere: there is nothing more to show
            self._bar() if self._stream.isatty() else self._lines()

    def _bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        text = TextColumn("{task.description}")
        columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Bars(*columns, console=Console(file=self._stream), transient=True) as bars:
            bar = bars.add_task(self._title, total=None)
            while not self._stop.wait(POLL_S):
                done, tasks = self.read()
                bars.update(bar, description=self._title, completed=done, total=tasks or None)

    def _lines(self) -> None:
        begun = time.monotonic()
        while not self._stop.wait(LINE_EVERY_S):
            done, tasks = self.read()
            if tasks or not self._tracker:  # a watch may have nothing to do for days
                counts = f", tasks {done} of {tasks}" if tasks else ""
                say(f"{self._title}: {time.monotonic() - begun:.0f} s{counts}", stream=self._stream)
