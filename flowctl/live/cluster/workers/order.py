"""What a supervisor hands to a worker: its place among the workers and all settings, in memory that has no name.

It holds the credentials of the server, so it is in no file, no argument and no variable. The worker is a fresh
interpreter of the same program: a fork of a process with threads would begin with locks that nobody lets go of.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from flowctl.core.server.program import ServerProgram
from flowctl.errors import ConfigError
from flowctl.live.config import LiveConfig
from flowctl.records.telemetry.schema import CONN_NUMBERS

BOOT: Final = (
    "import json,sys;f=open(int(sys.argv[1]),'rb');b=json.loads(f.readline());sys.path[:]=b['path'];"
    "from flowctl.live.cluster.workers.process import main;main(b['pid'],f)"
)
"""First lines of a worker's program: it finds its modules where the supervisor does."""
SOCKET: Final = "supervisor.sock"
WORKERS: Final = "workers"
"""Category of requests from workers to their supervisor."""
WORKER: Final = "worker"
"""Category of requests from the supervisor to a worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """All that a worker's process needs to know to start."""

    number: int  #: number of the worker, 1 to `count`; its successor has the same
    serial: int  #: number of the process, 1 for the first: no two have the same
    count: int
    folder: Path  #: folder of the sockets to the supervisor, the user's alone
    listen_fds: dict[str, tuple[int, ...]]
    words_fd: int  #: where its last words go, should it end in disorder
    counts_fd: int  #: memory of `flowctl.live.cluster.workers.counts.WorkerCounts`
    counts_key: bytes
    program: ServerProgram
    options: LiveConfig
    log_level: str | int = "info"
    log_json: bool = False

    @property
    def supervisor(self) -> str:
        return f"ipc://{self.folder / SOCKET}"

    @property
    def first_connection(self) -> int:
        """The number of its first connection: it begins with that of its process, so that no two have the same."""
        return self.serial * CONN_NUMBERS + 1

    def write(self) -> int:
        try:
            body = pickle.dumps(self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"server {self.program.name!r} cannot be started in another process: {error}",
                hint="its build function and its settings must be importable by name; or serve with one worker",
            ) from error
        number = os.memfd_create("flowctl-order", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(number), "wb") as file:
            file.write(json.dumps({"path": sys.path, "pid": os.getpid()}).encode() + b"\n" + body)
        os.lseek(number, 0, os.SEEK_SET)
        return number


def read_order(file: BinaryIO) -> WorkerConfig:
    order: WorkerConfig = pickle.load(file)  # noqa: S301 - from the process that started this one, in memory without a name
    return order
