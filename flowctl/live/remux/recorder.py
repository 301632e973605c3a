"""Writes one stream to files, on a thread of its own: begins and finishes them, and goes on after a full disk.

How it works. Messages wait in an `Intake`. A `FileTimeline` says of each where files can be cut; a piece, the messages
that are written at once, is what has come (FLV) or a group of pictures (MP4). A new file begins

- with the first key frame of a publication, or sound before it, and of one that takes its place;
- where the codec changes, the clock jumps, or something was left out because the disk was too slow;
- at the key frame behind the largest size, or the longest time.

A disk that takes no more ends the file with what is whole of it. From then on what comes is counted as lost, until
there is room and a key frame. Nobody but this recording is disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from flowctl.core.flow.state import MessageClass
from flowctl.errors import ConfigError, FlowctlError
from flowctl.live.remux.course import Unit
from flowctl.live.remux.files import DiskRoom, NameTemplate, PartFile
from flowctl.live.remux.intake import MESSAGE_BYTES, Intake
from flowctl.live.remux.writer import RETRY_S, RecorderState, StreamWriter

_log: Final = structlog.get_logger("flowctl.remux")
PIECE_BYTES: Final = 16 << 20
"""Most of a group of pictures that is kept in memory; a longer one is written in parts."""
PIECE_MS: Final = 10_000
"""Longest part of a group that is kept in memory: it is lost when the process is killed."""
_NEED_KEY: Final = frozenset({MessageClass.INTER, MessageClass.DISPOSABLE})


class Form(Protocol):
    """One file of some format: octets out of messages."""

    @property
    def suffix(self) -> str:
        """Suffix of the file's name."""

    @property
    def by_groups(self) -> bool:
        """Whether it takes groups of pictures; otherwise whatever has come."""

    def add(self, headers: Sequence[tuple[int, bytes]], units: Sequence[Unit]) -> bytes | None:
        """Return the octets that `units` are, the first ones with what stands before them; None: another file's."""

    def lengths(self, media_s: float, size_bytes: int) -> dict[int, bytes]:
        """Return what is to be written where in the file, now that it is known how long it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSettings:
    folder: Path
    template: NameTemplate
    max_bytes: int = 0  # a file that is so large ends at the next key frame. 0: size does not end it.
    max_s: float = 0.0  # a file that is so long ends at the next key frame. 0: time does not end it.
    keep_free_bytes: int = 0  # room on the disk that is left to others. 0: none.

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_s", "keep_free_bytes"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedFile:
    path: Path
    size_bytes: int
    media_s: float
    why: str


class StreamRecorder(StreamWriter):
    what = "recording"
    hint = "make room on its disk: recording goes on by itself, in a new file"

    def __init__(
        self,
        app: str,
        stream: str,
        settings: RecordSettings,
        make_form: Callable[[], Form],
        *,
        on_finished: Callable[[FinishedFile], Any] | None = None,
        room: DiskRoom | None = None,
        open_file: Callable[[Path], PartFile] = PartFile,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        room = room or DiskRoom(settings.folder, settings.keep_free_bytes)
        super().__init__(f"{app}/{stream}", Intake(), room, clock, wall)
        self._app, self._stream = app, stream
        self._settings = settings
        self._make_form = make_form
        self._on_finished = on_finished
        self._open_file = open_file
        self._piece: list[Unit] = []  # not written yet
        self._piece_bytes = 0
        self._opening: tuple[tuple[int, bytes], ...] = ()  # headers at the beginning of the piece
        self._form: Form | None = None
        self._groups = make_form().by_groups
        self._file: PartFile | None = None
        self._first_ms, self._last_ms = 0, 0  # media time of the file
        self._written_ms = 0  # length of the finished files
        self._begun = False  # something of this publication was written
        self._has_key = False  # the file has a beginning for decoders
        self._running = False  # a key frame has come, and everything since is written

    def _path(self) -> Path | None:
        file = self._file
        return None if file is None else file.path

    def _media_ms(self) -> int:
        return self._written_ms + (0 if self._file is None else self._last_ms - self._first_ms)

    @property
    def held_bytes(self) -> tuple[int, int]:
        return self._piece_bytes, 0

    # -- the recorder's thread

    def _give_way(self, error: OSError) -> None:
        piece, self._piece, self._piece_bytes = self._piece, [], 0
        self._stop_at(piece, error)

    def _stop_at(self, piece: list[Unit], error: OSError) -> None:
        """Lose what cannot be written, and end the file with what is whole of it."""
        self._lose(piece)
        self._note_no_room(error)
        self._running = False
        self._close_file(self._why)

    def _write_out(self) -> None:
        if not self._groups:
            self._write_piece()

    def finish(self, why: str) -> None:
        self._write_piece()
        self._close_file(why)
        self._running = False

    def _finish_all(self) -> None:
        self.finish("stopped")

    def _end_publication(self, why: str, *, gone: bool) -> None:
        del gone  # a file ends in either case
        self.finish(why)
        self._begun = False
        if self._state is RecorderState.RECORDING:
            self._state = RecorderState.WAITING

    def _write_unit(self, unit: Unit) -> None:
        if unit.broken:
            self.finish(unit.broken)
        if not self._running:
            if unit.message_class is MessageClass.HEADER:
                return  # it stands before what comes next
            # Sound may come a little before the first picture of a publication.
            first = not self._begun and self._no_room_until is None and unit.message_class is MessageClass.AUDIO
            if not (unit.cut or first) or not self._may_begin():
                self._lose([unit])
                return
            self._running, self._has_key = True, unit.cut
        elif not self._has_key:
            if unit.message_class in _NEED_KEY:
                return
            self._has_key = unit.cut
        elif unit.cut:
            due = self._due(unit.at_ms)
            if (due or self._groups) and not self._write_piece():
                self._lose([unit])
                return
            if due:
                self._close_file(due)
        if self._full(unit.at_ms) and not self._write_piece():
            self._lose([unit])
            return
        if not self._piece:
            self._opening = self._timeline.headers
        self._piece.append(unit)
        self._piece_bytes += len(unit.payload) + MESSAGE_BYTES

    def _full(self, now_ms: int) -> bool:
        piece = self._piece
        return bool(piece) and (self._piece_bytes >= PIECE_BYTES or now_ms - piece[0].at_ms >= PIECE_MS)

    def _due(self, now_ms: int) -> str:
        """Return why the file is to end here. Empty: it is not."""
        if self._file is None and not self._piece:
            return ""
        settings = self._settings
        size = self._piece_bytes + (0 if self._file is None else self._file.size_bytes)
        first_ms = self._first_ms if self._file is not None else self._piece[0].at_ms
        if settings.max_bytes and size >= settings.max_bytes:
            return "its size was reached"
        if settings.max_s and now_ms - first_ms >= settings.max_s * 1000:
            return "its time was reached"
        return ""

    def _may_begin(self) -> bool:
        """Whether a file may be begun: not while the disk has no room, and not each moment after it had none."""
        if self._no_room_until is None:
            return True
        if self._clock() < self._no_room_until:
            return False
        try:
            self._room.check(again=self._settings.folder.exists())
        except OSError as error:
            self._why = error.strerror or str(error)
            self._no_room_until = self._clock() + RETRY_S
            return False
        return True

    def _write_piece(self) -> bool:
        """Write what waits; return whether the next message can follow it."""
        piece, self._piece, self._piece_bytes = self._piece, [], 0
        if not piece:
            return True
        try:
            self._write(piece)
        except OSError as error:
            self._stop_at(piece, error)
        except (ValueError, FlowctlError) as error:
            self._lose(piece)
            self._running = False
            self._note_unwritable(error, piece)
        else:
            return True
        return False

    def _write(self, piece: list[Unit]) -> None:
        form = self._form or self._make_form()
        data = form.add(self._opening, piece)
        if data is None:
            self._close_file("its tracks changed")
            form = self._make_form()
            data = form.add(self._opening, piece)
        if not data:
            return
        self._room.check()
        if self._file is None:
            path = self._settings.folder / self._settings.template.path(self._app, self._stream, self._wall())
            self._file = self._open_file(path.with_name(path.name + form.suffix))
            self._first_ms = self._last_ms = piece[0].at_ms
            _log.info("recording begins", stream=self._name, file=str(self._file.path))
        self._form = form
        self._file.append(data)
        self._written_bytes += len(data)
        self._last_ms = max(self._last_ms, piece[-1].at_ms)
        self._note_written()
        self._begun = True

    def _close_file(self, why: str) -> None:
        file, form, self._file, self._form = self._file, self._form, None, None
        if file is None or form is None:
            return
        media_s = (self._last_ms - self._first_ms) / 1000
        try:
            path = file.finish(form.lengths(media_s, file.size_bytes))
        except OSError as error:
            why, hint = error.strerror or str(error), "look for its .part where its folder is now"
            _log.error("a recording could not be finished", file=str(file.path), why=why, hint=hint)
            return
        if path is None:
            return
        self._files += 1
        self._written_ms += self._last_ms - self._first_ms
        _log.info("recording finished", stream=self._name, file=str(path), size_bytes=file.size_bytes, why=why)
        if self._on_finished is not None:
            self._on_finished(FinishedFile(path=path, size_bytes=file.size_bytes, media_s=media_s, why=why))

    def _lose(self, units: Sequence[Unit]) -> None:
        """Count messages that are in no file. Those before the first key frame are of no use, and no loss."""
        if not self._begun and self._no_room_until is None:
            return
        super()._lose(units)
