"""The folder of the sockets between a supervisor and its workers: the user's alone, and gone with the supervisor."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from flowctl.control.place import check_private, runtime_folder
from flowctl.errors import ConfigError

_PREFIX: Final = "workers-"
_MOST_BYTES: Final = 80
"""Of the folder's path, which leaves a socket in it some 25 octets of the 107 that its path may have (unix(7))."""


def make_folder() -> Path:
    """Return a new folder; those that killed supervisors have left go."""
    base = runtime_folder()
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        check_private(base)
        for old in base.glob(f"{_PREFIX}*"):
            if not _lives(old.name.removeprefix(_PREFIX).partition("-")[0]):
                shutil.rmtree(old, ignore_errors=True)
        made = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
    except OSError as error:
        raise ConfigError(
            f"cannot make a folder for the workers in {base}: {error.strerror or error}",
            hint="set XDG_RUNTIME_DIR to a folder of your own",
        ) from error
    if len(os.fsencode(made)) > _MOST_BYTES:
        made.rmdir()
        raise ConfigError(
            f"the path {made} is too long for sockets in it", hint="set XDG_RUNTIME_DIR or TMPDIR to a shorter one"
        )
    return made


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
