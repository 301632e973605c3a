"""What is removed of the files that a server has written: old recordings, and HLS of streams that have ended.

Only names that a server's own files have, at the depth where they are, are looked at, and no link is followed. So what
else lies in these folders stays, and what `flowctl record` writes under other names.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from flowctl.core.folders.folders import opened_folder
from flowctl.live.remux.files import VARIANT, hls_file, lock_below

TEMPLATE: Final = "{app}/{stream}/{time}"
"""Names of a server's recordings."""
RECORDING: Final = re.compile(r"\d{8}T\d{6}\.\d{3}Z(?:-\d{1,4})?\.(?:flv|mp4)")
_DEPTH_HLS: Final = 1
_DEPTH_RECORD: Final = 2
"""How many folders lie between that of all and the files: application, and stream."""
ENDED_S: Final = 60.0
"""Time for which the HLS of a stream that has ended stays: players read to the end of what is listed."""


def remove_old(folder: Path, keep_s: float, now: float) -> list[Path]:
    """Remove recordings that were finished before `keep_s`, and folders of streams that have none any more."""
    removed: list[Path] = []
    for way, names, at in _walk(folder):
        if len(way.parts) != _DEPTH_RECORD:
            continue
        before = len(removed)
        for name, written_at in _files(at, names):
            if RECORDING.fullmatch(name) and now - written_at > keep_s:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=at)
                    removed.append(folder / way / name)
        if len(removed) > before:
            _remove_empty(folder, way)
    return removed


def remove_ended(folder: Path, ours: Callable[[str], bool], now: float) -> list[str]:
    """Remove the HLS of streams for which nothing was written for `ENDED_S`; return their names.

    A stream is its lock file; that of another process, or of a stream that goes on, is locked.
    """
    removed: list[str] = []
    for way, names, at in _walk(folder):
        if len(way.parts) != _DEPTH_HLS:
            continue
        before = len(removed)
        files = dict(_files(at, names))
        of_stem: dict[str, list[str]] = {}
        for name in files:
            if found := hls_file(name):
                of_stem.setdefault(found[0], []).append(name)
        for lock in [name for name in files if re.fullmatch(r"\..+\.lock", name)]:
            stem = lock.removeprefix(".").removesuffix(".lock")
            stream = f"{unquote(way.name)}/{unquote(stem.partition(VARIANT)[0])}"
            its = of_stem.get(stem, [])
            if not ours(stream) or now - max(files[name] for name in (lock, *its)) < ENDED_S:
                continue
            with contextlib.suppress(OSError):  # BlockingIOError: it is being written
                number = lock_below(at, lock)
                try:
                    for name in (*its, lock):
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=at)
                finally:
                    os.close(number)
                removed.append(stream)
        if len(removed) > before:
            _remove_empty(folder, way)
    return removed


def _walk(folder: Path) -> Iterator[tuple[Path, list[str], int]]:
    """Yield the folders below one: where they are from there, the names in them, and a descriptor."""
    with contextlib.suppress(OSError), opened_folder(folder, None) as top:
        for way, folders, names, at in os.fwalk(".", dir_fd=top):
            below = Path(way)
            if len(below.parts) >= _DEPTH_RECORD:
                folders.clear()  # what lies deeper is not ours
            folders.sort()
            yield below, names, at


def _files(folder: int, names: list[str]) -> Iterator[tuple[str, float]]:
    """Yield the files of a folder, and when each was written last."""
    for name in names:
        with contextlib.suppress(OSError):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(found.st_mode):
                yield name, found.st_mtime


def _remove_empty(folder: Path, way: Path) -> None:
    """Remove the folder of a stream, or an application, and those above it, that have nothing in them."""
    with contextlib.suppress(OSError):  # something is there, or comes just now
        for below in (way, *way.parents[:-1]):
            with opened_folder((folder / below).parent, None) as at:
                os.rmdir(below.name, dir_fd=at)
