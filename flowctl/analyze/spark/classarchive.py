"""Java's classes of Spark, loaded and checked once and kept in a file: sessions start in half the time.

A Spark session loads some 15,000 classes before its first row: of 16 s on two cores half went there, measured with
Spark 4.3 and Java 17, and of its processor time as much. Java can write what it has loaded to an archive when it ends
(``-XX:ArchiveClassesAtExit``, JEP 350) and map that file when it starts. It checks by itself that the archive fits,
its own build and every jar, and goes on without it otherwise. The file, some 180 MB, belongs to one environment: it
lies in that, and goes with it. ``make setup-pipeline`` makes it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Final

from flowctl.analyze.spark.java import Java

_MAKER: Final = "flowctl.analyze.spark.setup"
MAKE_TIMEOUT_S: Final = 300
"""Making it takes 30 to 60 s; Java writes for most of that."""


def archive_path(java: Java) -> Path:
    """Return where in the Python environment the archive for this Java and the installed Spark is, if there is one."""
    # An update of Java within its version makes another archive: the file ``release`` names the build.
    release = java.home / "release"
    build = zlib.crc32(release.read_bytes()) if release.is_file() else 0
    name = f"spark-{importlib.metadata.version('pyspark')}-java-{java.version}-{build:08x}.jsa"
    return Path(sys.prefix) / "share" / "flowctl" / name


def java_option(java: Java, others: str) -> str:
    """Return the option that has Java use the archive; "" where there is none, or its `others` name one."""
    path = archive_path(java)
    return f" -XX:SharedArchiveFile={path}" if "Archive" not in others and path.is_file() else ""


def make_archive(java: Java) -> str:
    """Make the archive if there is none; return why that could not be done, "" if there is one now."""
    path = archive_path(java)
    if path.is_file():
        return ""
    made = path.with_name(f"{path.name}.{os.getpid()}")
    command = [sys.executable, "-m", _MAKER, str(made)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(  # noqa: S603 - this Python, and a path of ours
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, check=False
        )
        if done.returncode == 0 and made.is_file():
            for old in path.parent.glob("*.jsa"):  # of a Java or Spark that was here before
                old.unlink()
            made.replace(path)
            return ""
        words = done.stderr.strip().splitlines()
        return words[-1] if words else f"Java wrote no archive (exit status {done.returncode})"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)
