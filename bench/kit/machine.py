"""What figures were measured on, and where they are kept."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parents[1]
"""The folder of the benches."""
PROGRAMS: Final = HERE / "programs"
RESULTS: Final = HERE / "results"
"""The last run of each benchmark; no part of what is committed."""


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text("utf-8").splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "commit": commit(),
    }


def commit() -> str:
    """Return the commit that is measured, with a plus sign where files were changed; empty outside of a checkout."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
