"""Processes that get no more than so much processor time: a quota of their control group, version 1 or 2, as root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

_V1: Final = Path("/sys/fs/cgroup/cpu")
_ROOT: Final = _V1 if _V1.is_dir() else Path("/sys/fs/cgroup")
_LIMIT: Final = "cpu.cfs_quota_us" if _V1.is_dir() else "cpu.max"
_LEAST_US: Final = 1000
"""Linux accepts no smaller quota, and no longer period than a second."""
_PERIOD_US: Final = 20_000
"""Short, so that a server is slow rather than on and off."""


def why_not() -> str:
    """Return why there can be no quota here. "" means that there can."""
    try:
        with limited(()) as limit:
            limit(0.5)
    except OSError as error:
        return f"no quota of processor time can be set here ({error}): it takes root, and control groups with `cpu`"
    return ""


@contextlib.contextmanager
def limited(pids: Sequence[int]) -> Iterator[Callable[[float | None], None]]:
    """Put processes into a group for the time of a block; yield what limits them to so many cores (None: to none)."""
    home, group = _home(), _ROOT / f"bench-{os.getpid()}"

    def limit(cores: float | None) -> None:
        period_us = _PERIOD_US if cores is None else min(max(_PERIOD_US, round(_LEAST_US / cores)), 1_000_000)
        quota_us = -1 if cores is None else max(_LEAST_US, round(cores * period_us))
        if _LIMIT == "cpu.max":
            (group / _LIMIT).write_text(f"{'max' if cores is None else quota_us} {period_us}")
            return
        (group / _LIMIT).write_text("-1")  # a period may not become shorter than the quota that is in force
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / _LIMIT).write_text(str(quota_us))

    group.mkdir()
    try:
        _move(pids, group)
        yield limit
    finally:
        _move(pids, home)
        group.rmdir()


def _home() -> Path:
    """Return the group of this process, which its children were in."""
    for line in Path("/proc/self/cgroup").read_text("ascii").splitlines():
        _, names, path = line.split(":", 2)
        if "cpu" in names.split(",") or (not names and _LIMIT == "cpu.max"):
            return _ROOT / path.lstrip("/")
    return _ROOT


def _move(pids: Sequence[int], group: Path) -> None:
    for pid in pids:
        (group / "cgroup.procs").write_text(str(pid))
