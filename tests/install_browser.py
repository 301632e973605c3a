"""Installs Chromium, its driver and players, for tests in a browser: ``make browser``; what is there is left as it is.

Chromium is a package of the system: where this runs as root beside apt-get it is installed, elsewhere it is said how to
get it. Players of HLS come from npm's registry into a folder of caches. Without them those tests are skipped, and say
so. Exit status: 0 if all are there, 1 otherwise.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

PROGRAMS = {"chromium": "chromium", "chromedriver": "chromium-driver"}
"""What is run, and the packages that have it: Debian's names."""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""With which Chromium shows pages to tests, and asks its maker for as little as it can be told to."""
APT = ("apt-get", "-q", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20")
UPDATE_TIMEOUT_S = 120


PLAYERS = {
    "hls.js": (
        *("1.7.4", "dist/hls.min.js"),
        "3GlxGdPvT2YHvQYOt+yOzT/DEior/qJVNIylHA77kgeoBTdQQqi70GwefNEUmHQeNGyjC8U62+bruqW/Tpm+tg==",
    ),
    "shaka-player": (
        *("5.2.12", "dist/shaka-player.compiled.js"),
        "vEsuVDI3+oLh+yqpjXexQZlg2XMUBI0VrqatDuKWacPaxAud6Uph5uCowUPLhUgNG5XKWCpoM4l1r8qYzWH+zg==",
    ),
}
"""Packages of npm: version, the script in it, and the checksum (SHA-512) that the registry states."""
FETCH_TIMEOUT_S = 60


def player(name):
    """Return where the script of a player is, or would be: in FLOWCTL_CACHE, or beside the tests."""
    named = os.environ.get("FLOWCTL_CACHE")
    version, script, _ = PLAYERS[name]
    return (Path(named) if named else Path(__file__).parent / ".cache") / f"{name}-{version}" / Path(script).name


def no_players() -> str:
    """Return which players are not there. "" means that all are."""
    missing = [name for name in PLAYERS if not player(name).exists()]
    return f"{' and '.join(missing)} not there (make browser)" if missing else ""


def fetch(name) -> str:
    """Fetch a player where it is absent, and return why it is not there. "" means that it is."""
    if player(name).exists():
        return ""
    version, script, checksum = PLAYERS[name]
    try:
        address = f"https://registry.npmjs.org/{name}/-/{name}-{version}.tgz"
        with urllib.request.urlopen(address, timeout=FETCH_TIMEOUT_S) as answer:
            package = answer.read()
    except OSError as error:
        return f"it could not be fetched: {error}"
    if base64.b64encode(hashlib.sha512(package).digest()).decode() != checksum:
        return "the package of the registry is not the one that is expected"
    with tarfile.open(fileobj=io.BytesIO(package)) as files:
        found = files.extractfile(f"package/{script}").read()
    player(name).parent.mkdir(parents=True, exist_ok=True)
    beside = player(name).with_suffix(f".{os.getpid()}")
    beside.write_bytes(found)
    beside.replace(player(name))
    return ""


def no_browser() -> str:
    """Return why no browser can be driven here. "" means that one can."""
    missing = [package for program, package in PROGRAMS.items() if not shutil.which(program)]
    return f"{' and '.join(missing)} not installed (as root: make browser)" if missing else ""


def install() -> str:
    """Install what is absent, and return why no browser can run. "" means that it can."""
    reason = no_browser()
    if not reason or os.geteuid() != 0 or not shutil.which("apt-get"):
        return reason
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # Lists that are old may still do, and a mirror that is away is told by what follows.
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([*APT, "update"], env=environment, capture_output=True, timeout=UPDATE_TIMEOUT_S, check=False)
    # Without a time limit: a package manager that is killed leaves half of a package.
    done = subprocess.run(
        [*APT, "install", "--yes", "--no-install-recommends", *PROGRAMS.values()],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return f"apt-get could not install it: {''.join(done.stderr.strip().splitlines()[-1:]) or done.returncode}"
    return no_browser()


def main() -> int:
    """Install what can be installed, and say what became of it."""
    reasons = {"browser": install(), **{name: fetch(name) for name in PLAYERS}}
    for name, reason in reasons.items():
        sys.stdout.write(f"{name}: {reason or 'is there'}\n")
    return 1 if any(reasons.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
