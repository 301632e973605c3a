"""Child processes of the benches, and what Linux says of them: processor time, memory, descriptors, idle time.

Every child is ended by its id when its block ends, whatever happened inside; nothing is ever looked for by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

from kit.machine import HERE

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_NANOSECONDS: Final = Path("/proc/thread-self/schedstat").exists()
_TERM_WAIT_S: Final = 10.0
"""A server with thousands of viewers needs a moment to close them; then it is killed."""


def environment() -> dict[str, str]:
    """Return the environment in which Python finds the rooms of the benches, as here."""
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return user and system time of the processes so far: of their running threads where the scheduler says so.

    In nanoseconds where the scheduler counts them (schedstat). Elsewhere in ticks of 10 ms, which are a tenth of what a
    crowd of a hundred costs in a short window.
    """
    if not _NANOSECONDS:
        return sum(_ticks(pid) for pid in pids) / _TICKS
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends just now
                total += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return total / 1e9


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def resident_bytes(pids: Sequence[int]) -> int:
    """Return the resident memory of the processes."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE for pid in pids)


def descriptors(pid: int) -> int:
    """Return the number of open descriptors of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def idle_seconds() -> float:
    """Return the idle time of all cores together since the machine started, waiting for a disk included."""
    fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    return (int(fields[4]) + int(fields[5])) / _TICKS


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
    return found


def wait_for_children(pid: int, timeout_s: float = 10.0) -> list[int]:
    """Return the direct children of a process as soon as there are any: a server may listen before it has workers."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if found := children_of(pid):
            return found
        time.sleep(0.05)
    raise RuntimeError(f"process {pid} has no workers after {timeout_s:g} s")


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def wait_for_port(port: int, child: subprocess.Popen[str], timeout_s: float = 20.0) -> None:
    """Return once somebody listens on `port` of loopback."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if child.poll() is not None:
            raise RuntimeError(f"the server ended at once with status {child.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nobody listens on port {port} after {timeout_s:g} s")


def raise_open_files() -> None:
    """Let this process and its children open as many files as the system allows, at most 65536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a process for the time of the block; it is ended by its id. Python finds the rooms of the benches there."""
    options.setdefault("env", environment())
    with subprocess.Popen(list(command), text=True, **options) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
                try:
                    child.wait(_TERM_WAIT_S)
                except subprocess.TimeoutExpired:
                    child.kill()


def stream_of(stream: IO[str] | None) -> IO[str]:
    """Return a pipe of a child, which is there because the child was started with one."""
    if stream is None:
        raise RuntimeError("the process was started without this pipe")
    return stream


def read_json(child: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next JSON line of a child's output."""
    line = stream_of(child.stdout).readline()
    if not line:
        raise RuntimeError(f"{child.args!r} ended without an answer, status {child.wait(10)}")
    found: dict[str, Any] = json.loads(line)
    return found


def tell(child: subprocess.Popen[str], line: str) -> None:
    """Write a line to a child's input."""
    pipe = stream_of(child.stdin)
    pipe.write(line + "\n")
    pipe.flush()
