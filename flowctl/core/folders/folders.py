"""Folders that a server writes to for as long as it runs: no link leads it out of them.

Where a folder is, is found once, at the start (`resolve_folder`): a link of the user that runs this, or of root, is
followed, as the operator has made it. From then on a folder is opened step by step, and no step is a link: who may
write beside it, as a web server may beside HLS, puts none in its place by which root's files are written over.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from flowctl.errors import ConfigError

MOST_LINKS: Final = 40
"""Longest chain of links that is followed, as long as Linux follows."""
LINK_HINT: Final = "put a folder in its place, or name the one that it leads to and start again"
_STEP: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def planted(path: Path) -> bool:
    """Return whether there is a link or a named pipe of another user than this one and root."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (stat.S_ISLNK(status.st_mode) or stat.S_ISFIFO(status.st_mode)) and status.st_uid not in (0, os.geteuid())


def check_way(folder: Path) -> None:
    """See to it that nothing on the way to a folder was put by another user where everybody may, as in /tmp.

    Who owns a folder, or a link to one, can put anything in the place of what is written, and by links have files of
    this user overwritten. Linux refuses such links by itself (``fs.protected_symlinks``), folders it does not.
    """
    ways = (folder.absolute(), Path(os.path.realpath(folder)))
    for at in dict.fromkeys(part for way in ways for part in (way, *way.parents)):
        _check_part(at)


def _check_part(at: Path) -> None:
    """See to it that another user has not put it there, where everybody may."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        owner, above = at.lstat().st_uid, at.parent.stat()
        if above.st_mode & stat.S_IWOTH and owner not in (0, os.geteuid(), above.st_uid):
            raise PermissionError(errno.EACCES, f"{at} is another user's, in a folder where everybody may write")


def resolve_folder(folder: Path, field: str) -> Path:
    """Return where a folder is, links resolved; it need not be there yet.

    Raises:
        ConfigError: another user has put a link on the way to it, or a folder where everybody may.
    """
    try:
        return _resolved(folder.absolute())
    except OSError as error:
        raise ConfigError(
            f"{field} {folder}: {error.strerror}",
            hint="make it a folder of the user that runs this, or name the one that it is to be",
        ) from error


def found_folder(folder: Path) -> Path:
    """Return where a folder is; as it was named where it must not be used, which is told once it is written to."""
    try:
        return resolve_folder(folder, "folder")
    except ConfigError:
        return folder


def _resolved(folder: Path) -> Path:
    at, left, links = Path("/"), list(reversed(folder.parts[1:])), 0
    while left:
        step = at / left.pop()
        _check_part(step)
        if planted(step):
            raise PermissionError(errno.EACCES, f"{step} is a link of another user")
        if not step.is_symlink():
            at = at.parent if step.name == ".." else step
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, "too many links")
        target = step.readlink()
        if target.is_absolute():
            at = Path("/")
        left += reversed([part for part in target.parts if part != "/"])
    return at


def check_folder(folder: Path, field: str) -> None:
    """See to it that files can be written in a folder, or that it can be made."""
    at = resolve_folder(folder, field)
    try:
        there = next(part for part in (at, *at.parents) if part.exists())
        writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        if writable and not os.statvfs(there).f_blocks:  # as in /proc, where root may write and nothing can be made
            Path(tempfile.mkdtemp(dir=there)).rmdir()
    except OSError:  # what is in a folder that may not be looked into
        writable = False
    if not writable:
        raise ConfigError(f"{field} {folder}: nothing can be written there", hint="name a folder of your own")


@contextlib.contextmanager
def opened_folder(folder: Path, mode: int | None = 0o777) -> Iterator[int]:
    """Give a descriptor of a folder, for `dir_fd`; `folder` is one that was resolved, or below it.

    `mode`: of folders that are made since they are not there. None: then it is an error.

    Raises:
        OSError: it cannot be opened or made; ELOOP: a link is on the way to it, see `LINK_HINT`.
    """
    at, way = os.open("/", _STEP), Path("/")
    try:
        for part in folder.absolute().parts[1:]:
            way /= part
            below = _opened_step(at, part, way, mode)
            os.close(at)
            at = below
        yield at
    finally:
        os.close(at)


def _opened_step(at: int, part: str, way: Path, mode: int | None) -> int:
    try:
        return os.open(part, _STEP, dir_fd=at)
    except FileNotFoundError:
        if mode is None:
            raise
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISLNK(os.stat(part, dir_fd=at, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, f"{way} is a link, and none is followed since the start") from None
        raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(part, mode, dir_fd=at)
    return os.open(part, _STEP, dir_fd=at)


@contextlib.contextmanager
def replacing_below(folder: int, name: str, temporary: str, mode: int, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Give a new file of a folder to write to; it takes its name at the end, and nothing is left after an error."""
    try:
        with contextlib.suppress(FileNotFoundError):  # left behind, or a link or a pipe that another user has put there
            os.unlink(temporary, dir_fd=folder)
        with os.fdopen(os.open(temporary, _NEW, mode, dir_fd=folder), "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def names_below(folder: int) -> list[str]:
    """Return the names of what is in a folder."""
    with _readable(folder) as number, os.scandir(number) as entries:
        return [entry.name for entry in entries]


def sync_folder(folder: int) -> None:
    """Have the names of a folder outlive a crash of the machine."""
    with contextlib.suppress(OSError), _readable(folder) as number:  # not every file system can, nor may all be read
        os.fsync(number)


@contextlib.contextmanager
def _readable(folder: int) -> Iterator[int]:
    """Give a descriptor of a folder for more than its names: that of a step is for these alone."""
    number = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield number
    finally:
        os.close(number)
