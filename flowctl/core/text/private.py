"""Files of secrets: which users may read them.

A secret is its owner's alone (mode 600), or it was given to a service: it belongs to root and to a group of this
process, which may read it (mode 640), or systemd handed it over (``LoadCredential=``).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from flowctl.errors import ConfigError

_ROOT = 0


def check_private(path: Path, name: str = "") -> None:
    """See that only the user of this process may use a file of secrets."""
    status = path.stat()
    what = f"{name}: {path}" if name else str(path)
    if stat.S_ISDIR(status.st_mode):  # with mode 600 the files in it could not be reached
        raise ConfigError(f"{what} is a folder, it must be a file", hint="name a file in it")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077 and not _given_to_us(status) and not _is_credential(path):
        raise ConfigError(
            f"{what} has mode {mode:04o}: others than its owner may use it",
            hint=f"chmod 600 {path}; for a service, root's with its group and mode 640, or LoadCredential= of systemd",
        )


def _given_to_us(status: os.stat_result) -> bool:
    """Return whether root gave a file to the group of a service: this process is in it, or is root and checks it."""
    ours = status.st_gid in {os.getegid(), *os.getgroups()} or os.geteuid() == _ROOT
    return status.st_uid == _ROOT != status.st_gid and ours and not stat.S_IMODE(status.st_mode) & 0o037


def _is_credential(path: Path) -> bool:
    """Return whether systemd handed a file over, whose mode then shows a list of rights (systemd.exec(5))."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    return bool(folder) and path.absolute().parent == Path(folder)
