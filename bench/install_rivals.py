"""Installs the servers that are compared: ``make rivals``. What is there already is left as it is.

Node-Media-Server comes from npm into a folder of caches (see `compare.rivals`), for which no rights are needed.
nginx-rtmp is a package of the system, and so is the module that speaks TLS in front of it: where this runs as root
beside apt-get, and no nginx is there that could be somebody's web server, Debian's packages are installed; elsewhere it
is said how to get them. No nginx is left running, and none begins with the machine: the benches start their own, with a
configuration of their own.

Exit status: 0 if all of them can run, 1 otherwise.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from compare import rivals

PACKAGES: Final = ("nginx", "libnginx-mod-rtmp", "libnginx-mod-stream")
POLICY: Final = Path("/usr/sbin/policy-rc.d")
"""What Debian's packages ask before they start a service (see invoke-rc.d(8)); 101 means no."""
NGINX_PID: Final = Path("/run/nginx.pid")
_UPDATE_TIMEOUT_S: Final = 120
_APT: Final = ("apt-get", "-q", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20")


@contextlib.contextmanager
def services_stay_off() -> Iterator[None]:
    """Keep packages from starting services meanwhile; a policy that is there already is left alone."""
    try:
        with POLICY.open("x", encoding="ascii") as file:
            file.write("#!/bin/sh\nexit 101\n")
    except FileExistsError:
        yield
        return
    try:
        POLICY.chmod(0o755)
        yield
    finally:
        POLICY.unlink(missing_ok=True)


def install_nginx() -> str:
    """Install nginx with its RTMP module where it is absent, and return why it cannot run. "" means that it can."""
    reason = rivals.no_nginx()
    if not reason or os.geteuid() != 0 or not shutil.which("apt-get"):
        return reason
    if shutil.which("nginx"):
        # A module is loaded by restarting nginx: whose it is may decide when.
        return f"{reason}; an nginx is there, which is left alone"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # Lists that are old may still do, and a mirror that is away is told by what follows.
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([*_APT, "update"], env=environment, capture_output=True, timeout=_UPDATE_TIMEOUT_S, check=False)
    with services_stay_off():
        # Without a time limit: a package manager that is killed leaves half of a package.
        done = subprocess.run(
            [*_APT, "install", "--yes", "--no-install-recommends", *PACKAGES],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    _leave_off()
    if done.returncode:
        return f"apt-get could not install it: {''.join(done.stderr.strip().splitlines()[-1:]) or done.returncode}"
    return rivals.no_nginx()


def _leave_off() -> None:
    """Stop the nginx that was just installed, if a policy of somebody's let it start, and take it out of the boot."""
    commands = [["nginx", "-s", "stop"]] if NGINX_PID.exists() else []
    commands.append(["systemctl", "disable", "--quiet", "nginx"])
    for command in commands:
        if shutil.which(command[0]):
            subprocess.run(command, capture_output=True, check=False)


def main() -> int:
    """Install what can be installed, and say what became of each."""
    reasons = {"node-media-server": rivals.install_node(), "nginx-rtmp": install_nginx()}
    for name, reason in reasons.items():
        sys.stdout.write(f"{name}: {reason or 'can run'}\n")
    return 1 if any(reasons.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
