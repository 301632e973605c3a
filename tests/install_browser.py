"""Installs Chromium and its driver, for the tests of the dashboard: ``make browser``; what is there is left as it is.

They are packages of the system: where this runs as root beside apt-get they are installed, elsewhere it is said how to
get them. Without them those tests are skipped, and say so. Exit status: 0 if both can run, 1 otherwise.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys

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
    reason = install()
    sys.stdout.write(f"browser: {reason or 'can run'}\n")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
