"""Files of results, written whole or not at all: into a temporary file beside, which then takes the name.

A reader of the file, a CI job that was interrupted for instance, never finds half of a report. A link of one's own (or
root's) keeps leading to the file that it names, so a server's ban list may be one; a device or a pipe (/dev/stdout,
/dev/null) is written to as it is and never replaced by a file. A link or a named pipe of another user is replaced: in a
folder that others may write to, it would lead to any file of the user that runs this, or tell its maker what is
written. Nothing is written to a folder that another user has put into one where everybody may write (`check_way`).

A file that several write, jobs and watches for instance, is read, changed and replaced while it is `held`, and stays
whose it was (`shared`).
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from flowctl.core.folders.folders import MOST_LINKS, check_way, planted
from flowctl.errors import BusyError, ConfigError, FlowctlError

_LOOK_S: Final = 0.02
_HINT: Final = "check that the disk has room and the folder is writable"


def check_target(path: Path, field: str) -> None:
    """See to it that a file can be written there, before a run that may take hours."""
    try:
        _check_target(path, field)
    except OSError as error:  # what is in a folder that may not be looked into
        raise ConfigError(f"{field} {path}: {error.strerror}", hint="name a file in a folder of your own") from error


def _check_target(path: Path, field: str) -> None:
    target = _target(path)
    folder = target.parent
    if target.is_dir():
        raise ConfigError(f"{field} {path} is a folder", hint="name a file in it")
    if _is_special(target):
        if not os.access(path, os.W_OK):
            raise ConfigError(f"{field} {path} is not writable", hint="name a file in a folder of your own")
        return
    if not folder.is_dir():
        raise ConfigError(f"{field} {path}: there is no folder {folder}", hint="make it first")
    if not os.access(folder, os.W_OK):
        raise ConfigError(
            f"{field} {path}: the folder {folder} is not writable", hint="name a file in a folder of your own"
        )


def _is_special(path: Path) -> bool:
    """Return whether something is there that is no file: a device, a pipe, a terminal."""
    return not planted(path) and path.exists() and not path.is_file() and not path.is_dir()


def _target(path: Path) -> Path:
    """Return where links lead, one by one, up to the first of another user; a device as it was named.

    The last step is never taken by name again, so that a link that comes in between is replaced like any other.
    """
    at = path
    for _ in range(MOST_LINKS):
        if planted(at) or not at.is_symlink():
            break
        if _is_special(at):  # /dev/stdout: what it leads to at last has no name
            return path
        at = at.parent / at.readlink()
    check_way(at.parent)
    return Path(os.path.realpath(at.parent)) / at.name


@contextlib.contextmanager
def held(path: Path, patience_s: float = math.inf) -> Iterator[None]:
    """Within this context no other process that uses it changes a file that several write.

    What is locked is the folder that the file lies in, wherever a link leads: so all who write it have one lock.
    """
    try:
        number = os.open(_target(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise FlowctlError(f"cannot lock the folder of {path}: {error.strerror}", hint=_HINT) from error
    try:
        until = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise BusyError(f"another program writes to {path}") from error
                time.sleep(_LOOK_S)
        yield
    finally:
        os.close(number)


@contextlib.contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Give a temporary path to write to; it becomes `path` at the end, and nothing is left of it after an error.

    A device or a pipe is given itself.
    """
    try:
        target = _target(path)
        special = _is_special(target)
    except OSError as error:
        raise FlowctlError(f"cannot write {path}: {error.strerror}", hint=_HINT) from error
    if special:
        try:
            yield path
        except OSError as error:
            raise FlowctlError(f"cannot write {path}: {error.strerror}", hint=_HINT) from error
        return
    try:
        number, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(number)
    except OSError as error:
        raise FlowctlError(f"cannot write {path}: {error.strerror}", hint=_HINT) from error
    temporary = Path(name)
    try:
        yield temporary
        sync(temporary)  # without it a loss of power can leave the name on a file without octets
        _take_rights(temporary, target, shared=shared)
        temporary.replace(target)
    except OSError as error:
        raise FlowctlError(f"cannot write {path}: {error.strerror}", hint=_HINT) from error
    finally:
        temporary.unlink(missing_ok=True)


def _take_rights(temporary: Path, target: Path, *, shared: bool) -> None:
    """Give a file the rights of the one that it replaces, which others may read, else those of a new one.

    The temporary one is its owner's alone; and one of another user is no word on who may read what replaces it, unless
    it is shared.
    """
    with contextlib.suppress(FileNotFoundError):
        there = target.lstat()
        if stat.S_ISREG(there.st_mode) and (shared or there.st_uid == os.geteuid()):
            for owner in (there.st_uid, -1) if shared else ():
                with contextlib.suppress(PermissionError):
                    os.chown(temporary, owner, there.st_gid)
                    break
            temporary.chmod(stat.S_IMODE(there.st_mode) & 0o666)
            return
    temporary.chmod(0o666 & ~umask())


def umask() -> int:
    """Return the mask of rights of new files.

    Linux tells it. Elsewhere it has to be changed to be known, and what another thread makes meanwhile is its owner's.
    """
    try:
        return int(Path("/proc/self/status").read_bytes().partition(b"\nUmask:")[2].split()[0], 8)
    except (OSError, IndexError, ValueError):
        mask = os.umask(0o077)
        os.umask(mask)
        return mask


def sync(path: Path) -> None:
    """Wait until what was written to a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Write a text file in UTF-8, whole or not at all; `shared`: see `replacing`."""
    with replacing(path, shared=shared) as temporary:
        temporary.write_text(text, "utf-8")
