"""One stream that is written, on a thread of its own: what a recorder and a writer of HLS share.

How it works. What comes waits in an `Intake`; the thread hands it over until the intake is closed, and then has the
rest written. A disk that takes no more is told once, and looked at again every `RETRY_S`; what comes meanwhile is
counted as lost, and nobody but this stream is disturbed. The same where the process has no memory for it.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import structlog

from flowctl.core.folders.folders import LINK_HINT
from flowctl.live.remux.course import FileTimeline, Unit
from flowctl.live.remux.files import DiskRoom
from flowctl.live.remux.intake import Intake, Item, MessageTaken, PublicationBegan, PublicationEnded, QueueCut

_log: Final = structlog.get_logger("flowctl.remux")
_LOOK_S: Final = 0.2
RETRY_S: Final = 2.0
"""Time between looks for room on a disk that had none: each try costs the files of a recording one more beginning."""
_CUT_S: Final = 10.0
"""Time for which a stream that was cut is not begun again: what it held was too much, and its owner is to be told."""
_HINTS: Final = {
    errno.ENOMEM: "it goes on by itself; memory_budget says how much all streams may hold",
    errno.ELOOP: LINK_HINT,
}


class RecorderState(enum.Enum):
    WAITING = "waiting"  #: for the stream
    RECORDING = "recording"
    NO_ROOM = "no room"  #: the disk takes nothing, or there is no memory for it
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRecorderStatistics:
    state: RecorderState
    path: Path | None  # the file that is being written. None: there is none.
    why: str
    files: int
    written_bytes: int
    media_s: float
    lost_messages: int
    lost_bytes: int


class StreamWriter(abc.ABC):
    """Writes one stream; derived classes say into which files."""

    what: ClassVar[str]  # how it is called in the log
    hint: ClassVar[str]  # what to do about a full disk

    def __init__(
        self, name: str, intake: Intake, room: DiskRoom, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self.intake: Final = intake  # takes what comes; a `flowctl.live.cluster.follow.Sink`
        self.stream_ended: Final = threading.Event()  # set when a publication has ended
        self.spent_s, self.taken_bytes = 0.0, 0  # processor time of its thread, and for what; assigned by that thread
        self.goes_on = False  # another process goes on with the stream when this one has ended; assigned once
        self.given_up = False  # what it holds at its end is not written; assigned once
        self._name = name
        self._room = room
        self._clock, self._wall = clock, wall
        self._timeline = FileTimeline()
        self._thread: threading.Thread | None = None
        self._written_all = False
        self._no_room_until: float | None = None
        self._why = ""
        self._state = RecorderState.WAITING
        self._files = self._written_bytes = self._lost_messages = self._lost_bytes = 0

    # -- any thread

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="flowctl-remux", daemon=True)
        self._thread.start()

    def stop(self, deadline_s: float) -> bool:
        """Have the rest written, and the files finished; return whether that was done in time."""
        self.intake.close()
        if self._thread is not None:
            self._thread.join(deadline_s)
        return self._written_all

    def statistics(self) -> StreamRecorderStatistics:
        """Return a snapshot. Figures of the writer's thread may be a step apart."""
        return StreamRecorderStatistics(
            state=self._state,
            path=self._path(),
            why=self._why,
            files=self._files,
            written_bytes=self._written_bytes,
            media_s=self._media_ms() / 1000,
            lost_messages=self._lost_messages,
            lost_bytes=self._lost_bytes,
        )

    # -- the writer's thread

    def work(self, items: Sequence[Item]) -> None:
        for item in items:
            if isinstance(item, MessageTaken):
                self.taken_bytes += len(item.payload)
                unit = self._timeline.add_message(item.type_id, item.timestamp, item.payload)
                if unit is not None:
                    self._write_unit(unit)
            elif isinstance(item, PublicationBegan):
                self._end_publication("another publication begins", gone=False)
                self._timeline.restart()
            elif isinstance(item, PublicationEnded):
                self._end_publication(item.why or "the stream ended", gone=True)
                self._timeline.restart()
                self.stream_ended.set()
            elif isinstance(item, QueueCut):
                self._give_way(OSError(errno.ENOMEM, item.why))
            else:
                self._lost_messages += item.message_count
                self._lost_bytes += item.size_bytes
                self._timeline.note_gap(item.why)
                _log.warning(f"{self.what} lost a part: {item.why}", stream=self._name, messages=item.message_count)
        self._write_out()

    def _run(self) -> None:
        try:
            while (items := self.intake.get(_LOOK_S)) is not None:
                self.work(items)
                self.spent_s = time.thread_time()
        except Exception:  # noqa: BLE001 - the end of a thread that nobody waits for has to be told
            _log.exception("writing failed", stream=self._name)
        finally:
            with contextlib.suppress(Exception):
                self._finish_all()
            self._state = RecorderState.ENDED
            self.stream_ended.set()
            self._written_all = True

    def _note_no_room(self, error: OSError) -> None:
        """The disk takes no more: say so once, and look again later."""
        now, why, cut = self._clock(), error.strerror or str(error), error.errno == errno.ENOMEM
        if self._no_room_until is None:
            hint = _HINTS.get(error.errno or 0, self.hint)
            _log.error(f"{self.what} is interrupted", stream=self._name, why=why, hint=hint)
        if cut or self._no_room_until is None or now >= self._no_room_until:
            self._no_room_until = now + (_CUT_S if cut else RETRY_S)
        self._why, self._state = why, RecorderState.NO_ROOM

    def _note_written(self) -> None:
        if self._no_room_until is not None:
            _log.warning(f"{self.what} goes on", stream=self._name, lost_messages=self._lost_messages)
        self._no_room_until, self._why, self._state = None, "", RecorderState.RECORDING

    def _note_unwritable(self, error: Exception, units: Sequence[Unit]) -> None:
        """Note that a message has no place in files of this form; say so once for each reason."""
        if str(error) != self._why:
            _log.warning(f"{self.what} lost a part", stream=self._name, why=str(error), messages=len(units))
        self._why = str(error)

    def _lose(self, units: Sequence[Unit]) -> None:
        self._lost_messages += len(units)
        self._lost_bytes += sum(len(unit.payload) for unit in units)

    # -- for derived classes

    @property
    @abc.abstractmethod
    def held_bytes(self) -> tuple[int, int]:
        """What is held and not written: messages as they came, and what was made of them. Any thread."""

    @abc.abstractmethod
    def _give_way(self, error: OSError) -> None:
        """Let go of all that is held, as where a disk takes no more."""

    @abc.abstractmethod
    def _path(self) -> Path | None:
        """Return the path of the file that is being written. Any thread."""

    @abc.abstractmethod
    def _media_ms(self) -> int:
        """Return how much was written. Any thread."""

    @abc.abstractmethod
    def _write_unit(self, unit: Unit) -> None:
        """Write a message, now or with those that follow."""

    @abc.abstractmethod
    def _end_publication(self, why: str, *, gone: bool) -> None:
        """End what belongs to the publication that has been written: it has gone, or another one begins."""

    @abc.abstractmethod
    def _finish_all(self) -> None:
        """Finish the files: nothing comes any more."""

    @abc.abstractmethod
    def _write_out(self) -> None:
        """Look at the clock, or write what should not wait: all that has come was handed over."""
