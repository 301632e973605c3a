"""Finds the Java that Spark runs on: 17 or newer, where it usually is, or says how to get it.

Looked for in this order: ``JAVA_HOME``, ``java`` on the path, the folders where Debian, Fedora, SDKMAN and macOS put
it. The first that is new enough is taken: a ``JAVA_HOME`` that is too old was most likely set for another program.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flowctl.errors import ConfigError

OLDEST: Final = 17
"""Spark 4 is compiled for it (https://spark.apache.org/docs/latest/, "Downloading")."""
PLACES: Final = (
    "/usr/lib/jvm/*",
    "/usr/java/*",
    "/opt/java/*",
    "~/.sdkman/candidates/java/*",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
)
PACKAGE: Final = "openjdk-17-jre-headless"
HINT: Final = (
    "--engine duckdb needs none, for all but watch; make setup-pipeline installs it as root on Debian and "
    f"Ubuntu; by hand: apt-get install {PACKAGE}, or any Java {OLDEST} or newer (https://adoptium.net), with JAVA_HOME "
    "naming its folder"
)
_ASK_TIMEOUT_S: Final = 20
"""A cold start of a Java takes below a second; a broken one must not hold us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Java:
    """A Java that was found: its folder, for ``JAVA_HOME``, and the first number of its version."""

    home: Path
    version: int


def parse_version(text: str) -> int | None:
    """Return the version that ``java -version`` printed, 8 for what called itself 1.8; None if that was no Java."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found[1]) if found else None


def _homes(environment: Mapping[str, str], places: tuple[str, ...]) -> Iterator[Path]:
    """Yield the folders in which a Java may be, the likeliest first."""
    if home := environment.get("JAVA_HOME"):
        yield Path(home)
    if program := shutil.which("java", path=environment.get("PATH")):
        yield Path(program).resolve().parents[1]
    for pattern in places:
        path = Path(pattern).expanduser()
        yield from sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))), reverse=True)


def _ask(home: Path) -> int | None:
    try:
        done = subprocess.run(  # noqa: S603 - a Java of this machine, as its user set it up
            [home / "bin" / "java", "-version"], capture_output=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version((done.stderr + done.stdout).decode(errors="replace"))


def find_java(environment: Mapping[str, str] | None = None, places: tuple[str, ...] = PLACES) -> Java:
    old: dict[Path, str] = {}
    for home in _homes(os.environ if environment is None else environment, places):
        if home.resolve() in old or not os.access(home / "bin" / "java", os.F_OK):
            continue
        version = _ask(home)
        if version is not None and version >= OLDEST:
            return Java(home=home, version=version)
        old[home.resolve()] = f"{home} ({'does not run' if version is None else f'version {version}'})"
    found = f"; found only {', '.join(old.values())}" if old else ""
    raise ConfigError(f"Spark needs Java {OLDEST} or newer, and there is none{found}", hint=HINT)


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
