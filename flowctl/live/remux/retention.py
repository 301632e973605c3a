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

from flowctl.live.remux.files import hls_file, lock_file

TEMPLATE: Final = "{app}/{stream}/{time}"
"""Names of a server's recordings."""
RECORDING: Final = re.compile(r"\d{8}T\d{6}\.\d{3}Z(?:-\d{1,4})?\.(?:flv|mp4)")
ENDED_S: Final = 60.0
"""Time for which the HLS of a stream that has ended stays: players read to the end of what is listed."""


def remove_old(folder: Path, keep_s: float, now: float) -> list[Path]:
    """Remove recordings that were finished before `keep_s`, and folders of streams that have none any more."""
    removed = []
    for below in _folders(folder):
        for of_stream in _folders(below):
            old = [path for path, at in _files(of_stream) if RECORDING.fullmatch(path.name) and now - at > keep_s]
            for path in old:
                with contextlib.suppress(OSError):
                    path.unlink()
                    removed.append(path)
            if old:
                with contextlib.suppress(OSError):  # something is there, or comes just now
                    of_stream.rmdir()
                    below.rmdir()
    return removed


def remove_ended(folder: Path, ours: Callable[[str], bool], now: float) -> list[str]:
    """Remove the HLS of streams for which nothing was written for `ENDED_S`; return their names.

    A stream is its lock file; that of another process, or of a stream that goes on, is locked.
    """
    removed: list[str] = []
    for below in _folders(folder):
        before = len(removed)
        files = dict(_files(below))
        of_stem: dict[str, list[Path]] = {}
        for path in files:
            if found := hls_file(path.name):
                of_stem.setdefault(found[0], []).append(path)
        for lock in [path for path in files if re.fullmatch(r"\..+\.lock", path.name)]:
            stem = lock.name.removeprefix(".").removesuffix(".lock")
            name = f"{unquote(below.name)}/{unquote(stem)}"
            its = of_stem.get(stem, [])
            if not ours(name) or now - max(files[path] for path in (lock, *its)) < ENDED_S:
                continue
            with contextlib.suppress(OSError):  # BlockingIOError: it is being written
                number = lock_file(lock)
                try:
                    for path in (*its, lock):
                        path.unlink(missing_ok=True)
                finally:
                    os.close(number)
                removed.append(name)
        if len(removed) > before:
            with contextlib.suppress(OSError):  # others are there
                below.rmdir()
    return removed


def _folders(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (path for path in sorted(folder.iterdir()) if stat.S_ISDIR(path.lstat().st_mode))


def _files(folder: Path) -> Iterator[tuple[Path, float]]:
    """Yield the files of a folder, and when each was written last."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode):
                    yield path, found.st_mtime
