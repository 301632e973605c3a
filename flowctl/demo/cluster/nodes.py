"""Servers of a cluster as processes of this machine: started, asked for figures, killed; never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from flowctl.control.client import call_operation
from flowctl.errors import FlowctlError

_READY_S: Final = 120.0
"""Six interpreters that start at once take 2 s on two idle cores, and 20 s were too short where others used them."""
_TERM_S: Final = 5.0
_STATS_S: Final = 5.0


class Node:
    """One server process.

    Attributes:
        ready: what the server said of itself when it was ready; of `wait_until_ready`.
    """

    ready: dict[str, Any]

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name: Final = name
        self._log_path = folder / f"{name.replace(' ', '-')}.log"
        command = [sys.executable, "-m", "flowctl", *arguments, "--port", "0", "--json"]
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this Python, and flowctl itself
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=_environment()
            )

    def wait_until_ready(self) -> None:
        """Wait for what it says of itself."""
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
        """Of its process."""
        return self._process.pid

    @property
    def port(self) -> int:
        """Where viewers and publishers connect."""
        return int(self.ready["port"])

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """What it has logged."""
        return self._log_path.read_text("utf-8", errors="replace")

    def url(self, stream: str) -> str:
        """Return the address of a stream at this server."""
        return f"rtmp://127.0.0.1:{self.port}/{stream}"

    @property
    def segments_port(self) -> int:
        """Where edges fetch segments, of an origin or of an edge that is one."""
        return int(str(self.ready["origin"]).rpartition(":")[2])

    def stats(self) -> dict[str, Any]:
        """Return what the server says of itself."""
        return call_operation(self.ready["control"][0], "stats", {}, timeout_s=_STATS_S)

    def kill(self) -> None:
        """End it as a crash would."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait(_TERM_S)

    def end(self) -> None:
        """Ask it to end in order."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End it in order, or as a crash would where it does not."""
        if self.alive:
            self.end()
            try:
                self._process.wait(_TERM_S)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _environment() -> dict[str, str]:
    """Return the environment without settings of the user: a server of a demonstration is as the demonstration says."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FLOWCTL_")}


class Nodes:
    """The processes of a cluster; a context that leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: list[Node] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self._nodes:
            node.end()  # all of them at once, before any is waited for
        for node in self._nodes:
            node.stop()

    def start(self, name: str, *arguments: str) -> Node:
        """Start a server and wait until it is ready; arguments as of `Node`."""
        node = Node(name, arguments, self._folder)
        self._nodes.append(node)  # before it is ready: who is interrupted meanwhile ends it too
        node.wait_until_ready()
        return node

    def start_all(self, wanted: Mapping[str, Sequence[str]]) -> dict[str, Node]:
        """Start servers side by side; return them by name."""
        with ThreadPoolExecutor(len(wanted)) as pool:
            started = {name: pool.submit(self.start, name, *arguments) for name, arguments in wanted.items()}
        return {name: future.result() for name, future in started.items()}
