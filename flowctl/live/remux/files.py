"""Files of recordings: their names, their room on the disk, and how they are finished whole or found again.

A file is written as ``NAME.part``, locked, and takes its name when it is finished and on the disk. What was appended is
whole units of its format (tags, fragments): an append that fails is cut off again, so what was there stays readable.
After a crash, `recover` cuts off what is not whole, and gives the file its name. It leaves alone what another process
has locked, that is: still writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import Final, NamedTuple
from urllib.parse import quote

from flowctl.core.folders.folders import opened_folder, sync_folder
from flowctl.errors import ConfigError
from flowctl.units import format_size

PART: Final = ".part"
DEFAULT_NAME: Final = "{app}-{stream}-{time}"
_FIELDS: Final = frozenset({"app", "stream", "time"})
_NAME_BYTES: Final = 200
"""Length of one part of a path; file systems have 255, of which ``.flv.part`` and a number need some."""
_END_CHARS, _DIGEST_CHARS = 88, 24  # of a name that is longer
_TRIES: Final = 1000
_YOUNG_S: Final = 60.0
_ROOM_AGAIN_SHARE: Final = 20
_ROOM_AGAIN_BYTES: Final = 64 << 20
"""Free space from which a disk that was full has room again, if it is less than a 20th of the disk."""
_HLS_END: Final = re.compile(
    rf"(?:-(\d{{1,20}})(?:\.ts|(?:\.\d{{1,20}})?\.m4s|-init\.mp4)|\.m3u8)(?:{re.escape(PART)})?\Z"
)
"""What names of HLS's files end with, whole and being written; before it stands the stream, encoded."""
VARIANT: Final = "%2b"
"""Stands between the stream and the rendition in names of files of a variant: `encoded` writes escapes in capitals, and
names of streams have none, so neither files nor addresses of a stream have it."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9 ._=@+-]*\Z")


def hls_file(name: str) -> tuple[str, int] | None:
    """Return whose file of HLS that is, encoded, and its number; 0 where it has none. None: it is no such file."""
    end = _HLS_END.search(name)
    return None if end is None or not end.start() else (name[: end.start()], int(end[1] or 0))


class NameTemplate:
    """How files are called: ``{app}-{stream}-{time}``, where a ``/`` makes folders.

    Names of streams are the publishers' words. They are percent-encoded, so whatever they are they stay one part of
    a path, and none of them begins with a dot.
    """

    def __init__(self, template: str = DEFAULT_NAME) -> None:
        hint = "write it like {app}/{stream}-{time}"
        try:
            parts = list(Formatter().parse(template))
        except ValueError as error:
            raise ConfigError(f"name {template!r}: {error}", hint=hint) from error
        for text, field, spec, conversion in parts:
            if field is not None and (field not in _FIELDS or spec or conversion):
                raise ConfigError(f"name {template!r}: {{{field}}} is none of {{app}}, {{stream}}, {{time}}", hint=hint)
            if not all(_PLAIN.match(piece) for piece in text.split("/")):
                raise ConfigError(f"name {template!r} has letters that are not for names of files", hint=hint)
        if any(not piece or piece.startswith(".") for piece in template.split("/")):
            raise ConfigError(f"name {template!r}: a part of the path is empty or begins with a dot", hint=hint)
        self._template: Final = template

    def path(self, app: str, stream: str, wall_s: float) -> Path:
        """Return the path below the folder of recordings, without a suffix."""
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(wall_s)) + f".{int(wall_s * 1000) % 1000:03d}Z"
        made = self._template.format(app=encoded(app), stream=encoded(stream), time=stamp)
        return Path(*(_shortened(piece) for piece in made.split("/")))


def encoded(name: str) -> str:
    """Return any name as one safe part of a path."""
    text = quote(name, safe="") or "_"
    return "%2E" + text[1:] if text.startswith(".") else text


def _shortened(piece: str) -> str:
    """Return a name that is short enough: one that is cut has a digest in it, and is longer than any that is not."""
    if len(piece) <= _NAME_BYTES:
        return piece
    digest = hashlib.sha256(piece.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{piece[:_END_CHARS]}~{digest}~{piece[-_END_CHARS:]}"


class DiskUsage(NamedTuple):
    """What is free on a disk, and how much it is."""

    free_bytes: int
    size_bytes: int
    free_inodes: int = 0
    inodes: int = 0  # 0: it has as many as its room allows


class DiskRoom:
    """Whether a folder's disk has room: octets, and of its inodes the same share, since each small file takes one."""

    def __init__(
        self, folder: Path, keep_free_bytes: int, usage: Callable[[Path], tuple[int, ...]] | None = None
    ) -> None:
        self._folder: Final = folder
        self._keep_free_bytes: Final = keep_free_bytes
        self._usage: Final = usage or _usage

    def check(self, *, again: bool = False) -> None:
        if not (self._keep_free_bytes or again):
            return
        found = DiskUsage(*self._usage(self._folder))
        least_bytes = self._keep_free_bytes
        if again:
            least_bytes += min(found.size_bytes // _ROOM_AGAIN_SHARE, _ROOM_AGAIN_BYTES)
        least_inodes = found.inodes * least_bytes // max(found.size_bytes, 1)
        if not found.size_bytes and least_bytes:  # /proc and its like, and mounts that tell nothing
            what = "the file system says that it has no room at all, of which keep_free leaves some"
        elif found.free_bytes < least_bytes:
            what = f"{format_size(found.free_bytes)} are free, less than {format_size(least_bytes)}"
        elif found.free_inodes < least_inodes:
            what = f"{found.free_inodes} inodes are free, less than {least_inodes}"
        else:
            return
        raise OSError(errno.ENOSPC, f"{what} (in {self._folder})")  # the cause first: it is cut off where it is long


def _usage(folder: Path) -> DiskUsage:
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    usage = os.statvfs(there)  # where somebody removed the folder it is made again
    size = usage.f_frsize
    return DiskUsage(usage.f_bavail * size, usage.f_blocks * size, usage.f_favail, usage.f_files)


def lock_file(path: Path) -> int:
    """Make the file, lock it and return its descriptor: while that is open, no other process can."""
    with opened_folder(path.parent) as folder:
        return lock_below(folder, path.name)


def lock_below(folder: int, name: str) -> int:
    # A pipe that another user has put there must not be waited for.
    flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    number = os.open(name, flags, 0o644, dir_fd=folder)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        raise
    except OSError:
        pass  # some file systems have no locks
    return number


class PartFile:
    """A file that is being written.

    Attributes:
        path: its name when it is finished.
    """

    def __init__(self, path: Path) -> None:
        with opened_folder(path.parent) as folder:
            self.path, self._part, self._number = _made(folder, path)
        self.size_bytes = 0  # size of the content so far
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(self._number, fcntl.LOCK_EX)  # `recover` may be looking at it: it lets go of an empty file

    def append(self, data: bytes) -> None:
        """Write all of `data` at the end, or nothing."""
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._number, left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._number, self.size_bytes)
                os.lseek(self._number, self.size_bytes, os.SEEK_SET)
            raise
        self.size_bytes += len(data)

    def finish(self, changes: Mapping[int, bytes] = MappingProxyType({})) -> Path | None:
        """Make the changes, by where they are; have it on the disk, then under its name.

        None: nothing was appended, and nothing is left of it.
        """
        try:
            if not self.size_bytes:
                with contextlib.suppress(FileNotFoundError), opened_folder(self._part.parent, None) as folder:
                    os.unlink(self._part.name, dir_fd=folder)
                return None
            for at, data in changes.items():
                os.pwrite(self._number, data, at)
            os.fsync(self._number)
            with opened_folder(self._part.parent, None) as folder:
                self.path = _renamed(folder, self._part, self.path)
            return self.path
        finally:
            os.close(self._number)


def _made(folder: int, path: Path) -> tuple[Path, Path, int]:
    """Return the first name that is free, its part, and the descriptor of that."""
    for final in _names(path):
        part = final.with_name(final.name + PART)
        if _is_there(folder, final):
            continue
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            # Who serves recordings shares the group.
            return final, part, os.open(part.name, flags, 0o640, dir_fd=folder)
        except FileExistsError:
            continue
    raise FileExistsError(errno.EEXIST, "there are too many files of that name", str(path))


def _names(path: Path) -> Iterator[Path]:
    """Yield the names that a file may have, the wanted one first."""
    yield path
    for count in range(2, _TRIES):
        yield path.with_name(f"{path.stem}-{count}{path.suffix}")


def _is_there(folder: int, path: Path) -> bool:
    try:
        os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _renamed(folder: int, part: Path, path: Path) -> Path:
    """Give a file its name, or the next free one: no existing file is overwritten."""
    for final in _names(path):
        if not _is_there(folder, final):
            os.rename(part.name, final.name, src_dir_fd=folder, dst_dir_fd=folder)
            sync_folder(folder)
            return final
    raise FileExistsError(errno.EEXIST, "there are too many files of that name", str(path))


def recover(
    folder: Path, whole_bytes: Callable[[int, str], int], is_ours: Callable[[str], object] = bool
) -> list[Path]:
    """Finish the files that a process which was killed has left behind, of those whose names are `is_ours`."""
    found: list[Path] = []
    with contextlib.suppress(OSError), opened_folder(folder, None) as top:  # there may be none yet
        for below, _, names, at in os.fwalk(".", dir_fd=top):
            for name in sorted(names):
                if name.endswith(PART) and is_ours(name.removesuffix(PART)):
                    with contextlib.suppress(OSError, ValueError):
                        final = _recovered(at, folder / below / name, whole_bytes)
                        found += [] if final is None else [final]
    return found


def _recovered(folder: int, part: Path, whole_bytes: Callable[[int, str], int]) -> Path | None:
    final = part.with_name(part.name.removesuffix(PART))
    number = os.open(part.name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: somebody writes it
        size = whole_bytes(number, final.suffix)
        if not size:
            if time.time() - os.fstat(number).st_mtime >= _YOUNG_S:  # its maker may be about to lock it
                os.unlink(part.name, dir_fd=folder)
            return None
        os.ftruncate(number, size)
        os.fsync(number)
        return _renamed(folder, part, final)
    finally:
        os.close(number)
