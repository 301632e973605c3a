"""A disk that is full when it is: for tests of what keeps files."""

from __future__ import annotations

import contextlib
import subprocess

import pytest


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
