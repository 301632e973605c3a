"""Servers of a demonstration as processes of this machine: started, asked, read by their logs, killed.

A process that the context ends leaves nothing behind. What a server does is learnt from its control socket and from its
log, which has one JSON object per line.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self

from flowctl.control.client import call_operation
from flowctl.errors import FlowctlError

_READY_S: Final = 120.0
"""Longest start: six interpreters at once take 2 s on two idle cores, and 20 s were too short on busy ones."""
_TERM_S: Final = 10.0
_STATS_S: Final = 5.0
_LOOK_S: Final = 0.1


class ServerProcess:
    """One server process."""

    ready: dict[str, Any]  # what the server said of itself when it was ready; of `wait_until_ready`

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name: Final = name
        self.log_path: Final = folder / f"{name.replace(' ', '-')}.log"
        command = [sys.executable, "-m", "flowctl", *arguments, "--port", "0", "--json"]
        # A server of a demonstration is as the demonstration says, whatever the user has set.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FLOWCTL_")}
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this Python, and flowctl itself
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment
            )

    def wait_until_ready(self) -> None:
        begun = time.monotonic()
        timer = threading.Timer(_READY_S, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline() if self._process.stdout is not None else b""
        finally:
            timer.cancel()
        try:
            self.ready = json.loads(line)
        except ValueError as error:
            self.kill()
            log = self.log[-600:].strip() or "nothing"
            if time.monotonic() - begun >= _READY_S:
                hint = f"try again when this machine is less busy; it has logged: {log}"
                raise FlowctlError(f"{self.name} was not ready after {_READY_S:g} s", hint=hint) from error
            ended = f"{self.name} ended with status {self._process.returncode} before it was ready"
            raise FlowctlError(ended, hint=f"it has logged: {log}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def port(self) -> int:
        return int(self.ready["port"])

    @property
    def segments_port(self) -> int:
        """Where edges fetch segments, of an origin or of an edge that is one."""
        return int(str(self.ready["origin"]).rpartition(":")[2])

    def url(self, stream: str) -> str:
        return f"rtmp://127.0.0.1:{self.port}/{stream}"

    def stats(self) -> dict[str, Any]:
        return call_operation(self.ready["control"][0], "stats", {}, timeout_s=_STATS_S)

    # -- the log

    @property
    def log(self) -> str:
        return self.log_path.read_text("utf-8", errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """Return the records of its log so far; a line that is not complete yet is left for the next time."""
        records = []
        for line in self.log.rpartition("\n")[0].splitlines():
            with contextlib.suppress(ValueError):  # not from our log, for example a warning of the interpreter
                records.append(json.loads(line))
        return [value for value in records if isinstance(value, dict)]

    def wait_line(self, what: str, fits: Callable[[dict[str, Any]], bool], after: int, timeout_s: float) -> Any:
        """Return the first record that is `wanted` behind the first `after` ones."""
        end = time.monotonic() + timeout_s
        while True:
            line = next((line for line in self.lines()[after:] if fits(line)), None)
            if line is not None:
                return line
            self.check()
            if time.monotonic() >= end:
                raise FlowctlError(
                    f"{self.name} did not say within {timeout_s:g} s: {what}", hint=f"its log is {self.log_path}"
                )
            time.sleep(_LOOK_S)

    # -- its end

    def check(self) -> None:
        if self._process.poll() is not None:
            raise FlowctlError(f"{self.name} has ended", hint=f"it has logged: {self.log[-600:].strip() or 'nothing'}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(_TERM_S)

    def end(self) -> None:
        self._process.terminate()

    def stop(self) -> None:
        """Wait for its end, and force it where it does not come."""
        try:
            self._process.wait(_TERM_S)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()


class ServerProcesses:
    """Server processes with their logs in one folder; a context that leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: list[ServerProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for node in self._nodes:
            node.end()  # all of them at once, before any is waited for
        for node in self._nodes:
            node.stop()

    def start(self, name: str, *arguments: str) -> ServerProcess:
        """Start a server and wait until it is ready; arguments as of `ServerProcess`."""
        node = ServerProcess(name, arguments, self._folder)
        self._nodes.append(node)  # before it is ready: who is interrupted meanwhile ends it too
        node.wait_until_ready()
        return node

    def start_all(self, arguments_by_name: Mapping[str, Sequence[str]]) -> dict[str, ServerProcess]:
        """Start servers side by side; return them by name."""
        with ThreadPoolExecutor(len(arguments_by_name)) as pool:
            started = {name: pool.submit(self.start, name, *arguments) for name, arguments in arguments_by_name.items()}
        return {name: future.result() for name, future in started.items()}
