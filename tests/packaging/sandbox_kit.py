"""A copy of this machine that a test may change: its files under an overlay, in namespaces of its own.

What is installed, started and removed in it is gone with it. It takes root and the kernel's overlay file system.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_ENTER = """
set -e
mount -t tmpfs sandbox "$1"
mkdir "$1/changed" "$1/work" "$1/root"
mount -t overlay sandbox -o "lowerdir=/,upperdir=$1/changed,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs -o mode=755 sandbox run
mount -t tmpfs -o mode=755 sandbox mnt
mkdir mnt/given
mount --bind "$2" mnt/given
exec chroot . sh -ec "$3"
"""


def run_in_sandbox(
    folder: Path, script: str, *, given: Path, timeout_s: float, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a shell script as root on a copy of this machine that is mounted on `folder`; `given` is /mnt/given there.

    What the script began ends with it.
    """
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _ENTER, "sh", folder, given, script]
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    environment |= {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    environment |= {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [*map(str, words)], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert not check or done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done


@functools.cache
def no_sandbox() -> str:
    """Return why there can be no such copy here. "" means that there can be one."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return "a copy of this machine takes root, and unshare"
    with tempfile.TemporaryDirectory() as folder:
        touch = "touch /usr/bin/flowctl-sandbox"
        done = run_in_sandbox(Path(folder), touch, given=Path(folder), timeout_s=20, check=False)
    assert not Path("/usr/bin/flowctl-sandbox").exists()
    return f"no copy of this machine can be made: {done.stderr.strip()[-200:]}" if done.returncode else ""


def said_in(output: str) -> dict[str, str]:
    """Return what a script wrote, by the names in its lines ``== NAME``."""
    parts = (part.partition("\n") for part in output.split("== ")[1:])
    return {name: rest.strip() for name, _, rest in parts}
