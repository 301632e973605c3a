"""The recordings of a folder: which there are of a stream, when each began, how long it is, and parts of them by time.

How it works. A server calls a recording by the time at which it began, so names in order are times in order: a question
about a time is one about names, and of files only those are opened that the answer has. How long one is, is read from
its end, and remembered for as long as it does not change. A part by time is planned first (`Span`): from a key frame in
one file, over those behind it that go on with the same codecs, to a time in the last. So its size is known before
anything of it is read.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Final

from flowctl.core.folders.folders import opened_folder
from flowctl.live.playback.flvfile import FlvFile, Stretch, moved_tags
from flowctl.live.playback.mp4file import Mp4File, moved_fragments, mp4_length_s
from flowctl.live.remux.files import PART, NameTemplate
from flowctl.live.remux.flvform import SUFFIX, whole_mp4_bytes
from flowctl.live.remux.retention import RECORDING, TEMPLATE

_STAMP: Final = "%Y%m%dT%H%M%S"
_STAMP_CHARS: Final = 20
_ROUNDING_S: Final = 1e-5
_BATCH: Final = 1024
"""Names that are put in order at a time."""
_MOST_KNOWN: Final = 8192
"""Files whose length is remembered: 2 MB."""
LATEST_S: Final = 253_370_764_800.0
"""The year 9999: names are in the order of time up to it."""
DAMAGED: Final = (OSError, ValueError, LookupError, ArithmeticError, struct.error)
"""What reading a file that is not there any more, or no recording, may raise."""
MOST_FILES: Final = 200
"""Files that one part by time goes over: eight days of an hour each."""
MOST_LOOK_S: Final = 1.0
"""Time of a processor to look for what a part by time has; with more files it is not put together."""
GAP_S: Final = 2.0
"""Time between two files that go on in one part: names tell when the first frames were written, not when they came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    name: str  # of its file, once it is finished
    start_s: float
    length_s: float | None  # of what can be played by now. None: that cannot be read.
    size_bytes: int
    being_written: bool

    @property
    def end_s(self) -> float:
        return self.start_s + (self.length_s or 0.0)

    def row(self) -> dict[str, Any]:
        """Return it in words, for JSON."""
        return {
            "file": self.name,
            "start": time_text(self.start_s),
            "duration_s": self.length_s,
            "bytes": self.size_bytes,
            "format": self.name.rpartition(".")[2],
            "being_written": self.being_written,
        }


def parse_time(text: str) -> float | None:
    """Return the time that a text of ISO 8601 is, of UTC where it names no zone. None: it is none in range."""
    try:
        found = datetime.fromisoformat(text)
        time_s = (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
    return time_s if 0 <= time_s < LATEST_S else None


def time_text(time_s: float) -> str:
    return datetime.fromtimestamp(min(time_s, LATEST_S), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def start_of(name: str) -> float | None:
    """Return when a recording began, by the name of its file. None: it is no time."""
    try:
        found = datetime.strptime(name[: _STAMP_CHARS - 5], _STAMP).replace(tzinfo=UTC)
        return found.timestamp() + int(name[_STAMP_CHARS - 4 : _STAMP_CHARS - 1]) / 1000
    except ValueError:
        return None


def stamp_of(time_s: float) -> str:
    """Return what the name of a recording begins with that began at a time."""
    made: Path = NameTemplate("{time}").path("", "", time_s + _ROUNDING_S)
    return made.name


def is_recording(name: str) -> bool:
    return RECORDING.fullmatch(name) is not None and start_of(name) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A part of the recordings of a stream, as one stream of their format whose times begin at 0."""

    start_s: float
    length_s: float
    head: bytes
    pieces: tuple[Stretch, ...]

    @property
    def size_bytes(self) -> int:
        return len(self.head) + sum(piece.end - piece.begin for piece in self.pieces)


class OpenedFile:
    """The descriptor of a recording, which is closed with this unless somebody has taken it.

    Attributes:
        whole_bytes: how much of it can be played.
    """

    __slots__ = ("_number", "being_written", "whole_bytes")

    def __init__(self, name: str, number: int, being_written: bool) -> None:  # noqa: FBT001 - what `_open` returns
        self._number, self.being_written = number, being_written
        if not being_written:
            self.whole_bytes = os.fstat(number).st_size
        else:
            self.whole_bytes = FlvFile(number).end if name.endswith(SUFFIX) else whole_mp4_bytes(number)

    def take(self) -> int:
        number, self._number = self._number, -1
        return number

    def __del__(self) -> None:
        if self._number >= 0:
            os.close(self._number)


class Library:
    """The recordings of one folder. Any thread may call its methods.

    It has a folder per stream, or, where application and stream are empty, the files of one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder: Final = folder
        self._lock = threading.Lock()
        # Length by file, as it is; who asked longest ago first. Guarded by _lock.
        self._lengths: OrderedDict[tuple[int, int, int, int], float | None] = OrderedDict()

    def recordings(
        self, app: str, stream: str, from_s: float | None, to_s: float | None, before: str, most: int
    ) -> tuple[list[Recording], bool]:
        """Return the recordings with something of a time, the latest first, and whether there are more.

        `before`: those that are older than the one of that name alone; empty: all.
        """
        with self._opened(app, stream) as folder:
            if folder is None:
                return [], False
            found: list[Recording] = []
            for name in _names(folder, from_s, to_s, before, latest=True):
                recording = self._look(folder, name) if is_recording(name) else None
                # The first one may have ended before the time.
                if recording is None or (from_s is not None and max(recording.start_s, recording.end_s) < from_s):
                    continue
                if len(found) == most:
                    return found, True
                found.append(recording)
            return found, False

    def open(self, app: str, stream: str, name: str) -> OpenedFile:
        with self._opened(app, stream) as folder:
            if folder is None:
                raise FileNotFoundError(name)
            return OpenedFile(name, *_open(folder, name))

    def span(self, app: str, stream: str, from_s: float, to_s: float, suffix: str = SUFFIX) -> Span | None:
        """Return the part from the key frame at or before a time, or what comes next, to another. None: there is none.

        It ends sooner where nothing was recorded, the codec changes, or what follows has another format.
        """
        with self._opened(app, stream) as folder:
            names = iter(()) if folder is None else _names(folder, from_s, to_s, latest=False)
            plan, began_s = None, time.thread_time()
            for name, following in pairwise(chain(names, ("",))):
                if following.startswith(stamp_of(from_s)):
                    continue  # this one may end behind that, as names tell it
                if time.thread_time() - began_s > MOST_LOOK_S:
                    break
                if folder is None or not is_recording(name):
                    continue
                if not name.endswith(suffix):
                    if plan is None:
                        continue
                    break
                try:
                    number, _ = _open(folder, name)
                except OSError:
                    continue
                try:
                    file = _timed(number, name)
                    if plan is None:
                        plan = _Plan.begun(file, name, from_s, to_s)
                    elif len(plan.pieces) >= MOST_FILES or not plan.goes_on(file, name, to_s):
                        break
                except DAMAGED:  # nothing is in it yet
                    if plan is not None:
                        break
                finally:
                    os.close(number)
            return None if plan is None else plan.span()

    def parts(self, app: str, stream: str, span: Span) -> Generator[bytes]:
        """Read a span in parts; it ends early where a file has gone."""
        yield span.head
        for piece in span.pieces:
            move = moved_tags if piece.name.endswith(SUFFIX) else moved_fragments
            try:
                with self._opened(app, stream) as folder:
                    if folder is None:
                        return
                    number, _ = _open(folder, piece.name)
                with contextlib.closing(os.fdopen(number, "rb", buffering=0)):
                    yield from move(number, piece, span.length_s, span.size_bytes)
            except DAMAGED:
                return

    @contextlib.contextmanager
    def _opened(self, app: str, stream: str) -> Iterator[int | None]:
        """Give a descriptor of a stream's folder, never through a link. None: there is none."""
        way = NameTemplate(TEMPLATE).path(app, stream, 0).parent if app or stream else ""
        with contextlib.ExitStack() as stack:
            try:
                place = stack.enter_context(opened_folder(self._folder / way, None))
                folder: int | None = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
            except OSError:
                folder = None
            try:
                yield folder
            finally:
                if folder is not None:
                    os.close(folder)

    def _look(self, folder: int, name: str) -> Recording | None:
        start_s = start_of(name)
        try:
            number, being_written = _open(folder, name)
        except OSError:
            return None
        try:
            found = os.fstat(number)
            key = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
            with self._lock:
                known = key in self._lengths
                length_s = self._lengths.get(key)
                if known:
                    self._lengths.move_to_end(key)
            if not known:
                length_s = _length_s(number, name)
                with self._lock:
                    self._lengths[key] = length_s
                    while len(self._lengths) > _MOST_KNOWN:
                        self._lengths.popitem(last=False)
        finally:
            os.close(number)
        return Recording(
            name=name,
            start_s=start_s or 0.0,
            length_s=length_s,
            size_bytes=found.st_size,
            being_written=being_written,
        )


class _Plan:
    """A span as it is put together, file by file."""

    def __init__(self, file: FlvFile | Mp4File, piece: Stretch, start_s: float) -> None:
        self._first: Final = file
        self.pieces = [piece]
        self.start_s: Final = start_s
        self._note_end(file, piece, start_s - piece.from_ms / 1000)

    @classmethod
    def begun(cls, file: FlvFile | Mp4File, name: str, from_s: float, to_s: float) -> _Plan | None:
        """Return the beginning of a span; None: the file has nothing of that time."""
        file_s = start_of(name) or 0.0
        if from_s > file_s + file.length_ms / 1000:
            return None
        cut = file.cut_before(max(round((from_s - file_s) * 1000), 0))
        if cut is None:
            return None
        piece = Stretch(name, cut.at, _end_at(file, to_s - file_s), cut.time_ms, 0)
        return cls(file, piece, file_s + cut.time_ms / 1000) if piece.end > piece.begin else None

    def goes_on(self, file: FlvFile | Mp4File, name: str, to_s: float) -> bool:
        """Add what a file has of it; return whether it was the one that follows."""
        file_s = start_of(name) or 0.0
        if abs(file_s - self._end_s) > GAP_S or file.kind != self._first.kind:
            return False
        piece = Stretch(name, file.first, _end_at(file, to_s - file_s), 0, self._length_ms + file.step_ms)
        if piece.end <= piece.begin:
            return False
        self.pieces.append(piece)
        self._note_end(file, piece, file_s)
        return True

    def _note_end(self, file: FlvFile | Mp4File, piece: Stretch, file_s: float) -> None:
        last_ms = file.time_before(piece.end)
        self._length_ms = piece.at_ms + max(last_ms - piece.from_ms, 0)
        self._end_s = file_s + last_ms / 1000

    def span(self) -> Span:
        length_s, rest_bytes = self._length_ms / 1000, sum(piece.end - piece.begin for piece in self.pieces)
        head = self._first.head(length_s, rest_bytes)
        return Span(start_s=self.start_s, length_s=length_s, head=head, pieces=tuple(self.pieces))


def _end_at(file: FlvFile | Mp4File, time_s: float) -> int:
    time_ms = round(time_s * 1000)
    return file.end if time_ms > file.length_ms else file.place_of(time_ms)


def _names(folder: int, from_s: float | None, to_s: float | None, before: str = "", *, latest: bool) -> Iterator[str]:
    """Yield the names of what began in a time, and of the last recording before it, in order or the latest first.

    There may be a hundred thousand, of which few are wanted, so which are recordings is left to see for those.
    """
    every, low = os.listdir(folder), "" if from_s is None else stamp_of(from_s)
    ends = [name for name in (before, "" if to_s is None else stamp_of(to_s)) if name]
    if ends:
        end = min(ends)
        every = [name for name in every if name < end]
    earlier = _in_order([name for name in every if name < low], latest=True)
    earlier = islice((name for name in earlier if is_recording(name.removesuffix(PART))), 1)
    found = _in_order([name for name in every if name >= low], latest=latest)
    last = ""
    for name in chain(found, earlier) if latest else chain(earlier, found):
        if (named := name.removesuffix(PART)) != last:
            yield named
        last = named


def _in_order(names: list[str], *, latest: bool) -> Iterator[str]:
    """Yield names in order, a batch at a time: no thread of the process goes on while a hundred thousand are sorted."""
    pick = heapq.nlargest if latest else heapq.nsmallest
    while names:
        batch = pick(_BATCH, names)
        yield from batch
        end = batch[-1]
        names = [name for name in names if (name < end if latest else name > end)]


def _open(folder: int, name: str) -> tuple[int, bool]:
    """Return a descriptor of a recording, never through a link, and whether it is being written."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    being_written = False
    try:
        number = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        try:
            number = os.open(name + PART, flags, dir_fd=folder)
            being_written = True
        except FileNotFoundError:
            number = os.open(name, flags, dir_fd=folder)  # it was finished meanwhile
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise FileNotFoundError(name)
    return number, being_written


def _length_s(number: int, name: str) -> float | None:
    try:
        return FlvFile(number).length_ms / 1000 if name.endswith(SUFFIX) else mp4_length_s(number)
    except DAMAGED:
        return None


def _timed(number: int, name: str) -> FlvFile | Mp4File:
    return FlvFile(number) if name.endswith(SUFFIX) else Mp4File(number)
