"""The server of the closed loop: ``flowctl serve live`` as a process of its own, and what its log says.

It is another process because that is what is to be shown: nothing but two files tells it of new limits and bans, and it
goes on running. What it does is read from its log, which has one JSON object per line.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from flowctl.errors import FlowctlError

EVENTS_ROTATE_S: Final = 2.0
"""Time after which a file of records is complete; short, since the analysis follows at once."""
_START_S: Final = 90.0
"""Beside other busy processes and a busy disk half a minute was not enough, though a second is usual."""
_STOP_S: Final = 10.0
_LOOK_S: Final = 0.1
_READY_BYTES: Final = 64 * 1024


class LoopServer:
    """A live server on a free port of the loopback interface, for as long as the context lasts.

    Attributes:
        url: of the server, ``rtmp://127.0.0.1:PORT/``.
        pid: of the process.
    """

    def __init__(self, folder: Path, limits: Path, bans: Path, events: Path | None) -> None:
        self.log: Final = folder / "server.log"
        self._command = [sys.executable, "-m", "flowctl", "serve", "live", "--port", "0", "--json", "--log-json"]
        self._command += ["--stats", "1s", "--limits", str(limits), "--bans", str(bans)]
        if events is not None:
            # Every connection is recorded in full: with a crowd of tens, what-if has then the whole truth.
            self._command += ["--events", str(events), "--flights", "100%"]
            self._command += ["--set", f"events_rotate={EVENTS_ROTATE_S:g}s"]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.pid = 0

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, and arguments of ours
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=os.environ.copy()
            )
        try:
            ready = self._wait_ready(self._process)
        except BaseException:
            self._end()
            raise
        self.url, self.pid = str(ready["url"]), self._process.pid
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Return the line that the server writes when it is ready."""
        if process.stdout is None:  # asked for above
            raise FlowctlError("the server has no output")
        readable, _, _ = select.select([process.stdout], [], [], _START_S)
        line = process.stdout.readline(_READY_BYTES) if readable else b""
        if not line:
            raise FlowctlError(f"the server did not start: {self._last_words()}", hint=f"its log is {self.log}")
        ready: dict[str, Any] = json.loads(line)
        return ready

    def _last_words(self) -> str:
        lines = self.log.read_text("utf-8", "replace").strip().splitlines()
        return " ".join(lines[-2:])[:500] if lines else "it said nothing"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def check(self) -> None:
        """Do nothing while the process that was started first still runs."""
        if self._process is None or self._process.poll() is not None:
            raise FlowctlError(f"the server has ended: {self._last_words()}", hint=f"its log is {self.log}")

    def lines(self) -> list[dict[str, Any]]:
        """Return what it has logged so far; a line that is not complete yet is left for the next time."""
        whole, _, _ = self.log.read_text("utf-8", "replace").rpartition("\n")
        found = []
        for line in whole.splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue  # not from our log, for example a warning of the interpreter
            if isinstance(value, dict):
                found.append(value)
        return found

    def wait_line(self, what: str, wanted: Callable[[dict[str, Any]], bool], after: int, timeout_s: float) -> Any:
        end = time.monotonic() + timeout_s
        while True:
            line = next((line for line in self.lines()[after:] if wanted(line)), None)
            if line is not None:
                return line
            self.check()
            if time.monotonic() >= end:
                raise FlowctlError(
                    f"the server did not say within {timeout_s:g} s: {what}", hint=f"its log is {self.log}"
                )
            time.sleep(_LOOK_S)

    def refused_addresses(self, after: int) -> set[str]:
        """Return the addresses of which it logged, after so many lines, that they were refused as banned.

        It logs the first refusal of an address, and then one in ten seconds; so each address is there once at least.
        """
        return {
            str(line.get("peer"))
            for line in self.lines()[after:]
            if line.get("event") == "connection refused" and line.get("limit") == "banned"
        }

    def banned_count(self) -> int:
        """Return how many connections it has refused as banned, by its last line of figures."""
        figures = [line for line in self.lines() if line.get("event") == "figures"]
        refused = figures[-1].get("refused", {}) if figures else {}
        return int(refused.get("banned", 0))
