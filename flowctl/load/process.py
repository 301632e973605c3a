"""Worker processes as seen from their parent: started, told what to do, listened to, and never left behind.

Each worker has a thread that reads its lines and puts them, with the worker, into one queue; so the run is a single
loop over that queue. A worker whose output ends before it has said ``done`` has died: that is one more message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Final, TypeAlias

from flowctl.errors import InternalError
from flowctl.load.worker import Orders

_KILL_AFTER_S: Final = 2.0
_REAP_S: Final = 0.2
"""Longest wait for an exit status: a process that dies closes its output a moment before it has one."""
_WORDS_MAX: Final = 300

_START: Final = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "import sys; sys.path.append(sys.argv.pop()); from flowctl.load.worker import main; sys.exit(main())"
)
"""Program of a worker. It ignores Ctrl-C before its long imports begin: the run tells it when to end. Not ``-m``: that
puts the current folder before the standard library, and a ``queue.py`` there would be run instead of Python's. The
folder of this package comes last, for a checkout that is not installed."""

_PACKAGES: Final = str(Path(__file__).resolve().parents[2])

WorkerMessage: TypeAlias = "tuple[WorkerProcess, dict[str, Any]]"


class WorkerProcess:
    """One process."""

    def __init__(self, orders: Orders, inbox: queue.Queue[WorkerMessage]) -> None:
        self.orders: Final = orders
        self._inbox = inbox
        self.ready = False
        self.done: dict[str, Any] | None = None  # its last message. None: it has not said it.
        self.died = False
        self.cpu_s = 0.0  # its processor time, by its last word
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and package
            [sys.executable, "-P", "-c", _START, _PACKAGES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # Ctrl-C is for us: we tell the workers, and they end in order.
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._listen, name="load worker", daemon=True)
        self._thread.start()
        self.tell(dataclasses.asdict(orders))

    @property
    def over(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.died or self.done is not None

    def tell(self, order: dict[str, Any]) -> None:
        """Send one line; a worker that has died hears nothing."""
        pipe = self._process.stdin
        if pipe is None:
            raise InternalError("a worker has no input")
        with contextlib.suppress(OSError, ValueError):
            pipe.write(json.dumps(order).encode() + b"\n")
            pipe.flush()

    def _listen(self) -> None:
        pipe = self._process.stdout
        if pipe is None:
            raise InternalError("a worker has no output")
        for line in pipe:
            with contextlib.suppress(ValueError):  # the half line of one that died
                self._inbox.put((self, json.loads(line)))
        self._inbox.put((self, {"ended": True}))

    def note_message(self, message: dict[str, Any]) -> None:
        """Note what a message says about the worker itself."""
        self.ready = self.ready or "ready" in message
        self.cpu_s = float(message.get("cpu_s", self.cpu_s))
        if "done" in message:
            self.done = message
        elif "ended" in message and self.done is None:
            self.died = True

    def last_words(self) -> str:
        """Return why it died, as far as it could say."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_REAP_S)
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return (lines[-1][:_WORDS_MAX] if lines else "") or f"exit status {code}"

    def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(_KILL_AFTER_S)
        if self._process.stdout is not None and not self._thread.is_alive():
            self._process.stdout.close()
        self._errors.close()
