"""A machine with systemd as its first process, in which tests install the units of packaging/systemd and start them.

It is a copy of this one whose changes are in memory, with processes, mounts, network and control groups of its own
(machine.sh). It takes root, systemd, and a kernel that lets it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

from sandbox_kit import no_sandbox
from source_kit import ROOT

WAIT_S = 30
_BOOT = Path(__file__).with_name("machine.sh")
_GROUPS = Path("/sys/fs/cgroup/systemd")
_MANAGER = Path("/lib/systemd/systemd")


def no_machine():
    """Return why there can be none here. "" means that it may be tried."""
    if not _MANAGER.exists() or not shutil.which("nsenter"):
        return "systemd or nsenter is not here"
    if not os.path.ismount(_GROUPS):
        return f"{_GROUPS} is not mounted"
    return no_sandbox()


class Machine:
    """One such machine, running. `run` executes a command in it as root, `write` makes a file."""

    def __init__(self):
        self._folder = Path(tempfile.mkdtemp(prefix="flowctl-machine-"))
        self._group = _GROUPS / self._folder.name
        self._group.mkdir()
        # However the tests end, the machine ends with them.
        words = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "--fork",
            "--pid",
            "--mount",
            "--uts",
            "--ipc",
            "--cgroup",
            "--net",
            "--kill-child",
        ]
        words += ["sh", str(_BOOT), str(self._folder), sys.base_prefix, sysconfig.get_path("purelib"), str(ROOT)]
        join = f'echo $$ >{self._group}/cgroup.procs && exec "$@"'
        self._process = subprocess.Popen(
            ["sh", "-c", join, "sh", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._enter = []
        self._init = None  # the process that is the first one in there
        try:
            self._wait_for_boot()
        except BaseException:
            self.close()
            raise

    def _wait_for_boot(self):
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            threading.Event().wait(0.05)
            pid = children.read_text().strip()
            self._init = int(pid) if pid else None
            if pid and Path(f"/proc/{pid}/comm").read_text() == "systemd\n":
                self._enter = ["nsenter", "--target", pid, "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]
                if self.run("systemctl", "is-active", "machine.target", check=False).stdout == "active\n":
                    return
        why = self._process.stderr.read().decode() if self._process.poll() is not None else "it takes too long"
        raise RuntimeError(f"systemd did not start: {why}")

    def run(self, *words, check=True, timeout_s=WAIT_S, given=None):
        done = subprocess.run(
            [*self._enter, *map(str, words)],
            env={"PATH": "/opt/flowctl/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
            cwd="/",
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}{self.log()}"
        return done

    def write(self, path, text, mode="644", owner="root:root"):
        folder = Path(path).parent
        self.run(
            "sh", "-c", f"mkdir -p {folder} && cat >{path} && chown {owner} {path} && chmod {mode} {path}", given=text
        )

    def log(self):
        words = [*self._enter, "journalctl", "--no-pager", "-n", "40"]
        return subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=WAIT_S, check=False).stdout

    def close(self):
        if self._init is None:
            self._process.kill()
        elif self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGKILL)  # with it the kernel ends all others, and `unshare` ends then
        self._process.communicate()
        deadline = time.monotonic() + WAIT_S
        while self._group.exists() and time.monotonic() < deadline:
            for folder in sorted(self._group.glob("**/"), reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
        self._folder.rmdir()
