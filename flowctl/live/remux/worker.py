"""The thread on which one stream is written."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from flowctl.live.remux.intake import Intake, Item

_log: Final = structlog.get_logger("flowctl.remux")
LOOK_S: Final = 0.2


class RemuxWorker:
    """Hands what comes to `work`, until the intake is closed; then calls `finish`."""

    __slots__ = ("_finish", "_intake", "_name", "_thread", "_work", "ended")

    def __init__(
        self, name: str, intake: Intake, work: Callable[[Sequence[Item]], None], finish: Callable[[str], None]
    ) -> None:
        self._name = name
        self._intake = intake
        self._work = work
        self._finish = finish
        self._thread: threading.Thread | None = None
        self.ended = False
        """Everything is written. Any thread."""

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="flowctl-remux", daemon=True)
        self._thread.start()

    def stop(self, deadline_s: float) -> bool:
        """Have the rest written; return whether that was done in time."""
        self._intake.close()
        if self._thread is not None:
            self._thread.join(deadline_s)
        return self.ended

    def _run(self) -> None:
        try:
            while (items := self._intake.get(LOOK_S)) is not None:
                self._work(items)
        except Exception:  # noqa: BLE001 - the end of a thread that nobody waits for has to be told
            _log.exception("writing failed", stream=self._name)
        finally:
            with contextlib.suppress(Exception):
                self._finish("stopped")
            self.ended = True
