"""Processes that tests start: they begin with default signals, and none of them outlives the tests; and small disks.

A shell that starts a job in the background has it ignore SIGINT and SIGQUIT, and what is ignored is inherited by every
program started from there. A signal that has a handler is not: `exec` resets it to the default.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from pathlib import Path

import pytest

_RESET = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM)
_PR_SET_CHILD_SUBREAPER = 36
_SERVANTS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "pyspark")
"""Words in the command line of processes that serve this one until it ends: Python's own, and the shared Java."""


def use_default_signals() -> None:
    """Take signals that this process was started to ignore for what they are."""
    for number in _RESET:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent, started from here, is gone (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> dict[int, str]:
    """Return the command line of every child that is still running, servants aside, by its id."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if int(parent) == os.getpid() and state != "Z" and not any(name in command for name in _SERVANTS):
                found[int(entry.name)] = command
    return found


def end_children() -> list[str]:
    """Kill every child that is still running; return their command lines."""
    ended = []
    for number, command in children().items():
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
            ended.append(command[:200])
    return ended


@contextlib.contextmanager
def small_disk(folder, size="1m"):
    """Mount a disk of `size` at a new folder for the time of the block; skip where none can be made."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
