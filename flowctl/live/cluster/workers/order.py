"""What a supervisor hands to a worker: its place among the workers and all settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flowctl.core.server.program import ServerProgram
from flowctl.live.config import LiveConfig
from flowctl.records.telemetry.schema import CONN_NUMBERS

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
