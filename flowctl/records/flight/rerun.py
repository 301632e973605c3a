"""The calls of a flight, made of another Sender, in surroundings that answer what was recorded (pure).

See `records.flight.replay`, which drives it. Whatever the Sender asks that was not asked then is a divergence: the
code, or the row, is another.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from flowctl.core.flow.ledger import LedgerEntry
from flowctl.core.flow.state import Load, MessageClass
from flowctl.core.outgoing.streamlog import Entry, StreamLog
from flowctl.errors import DamagedFlightError, LocalProtocolError
from flowctl.records.flight.feed import new_private_log
from flowctl.records.flight.reading import Flight
from flowctl.records.flight.recorded import NotingSender
from flowctl.records.flight.words import (
    CALLS,
    LOG_LANE,
    MICROSECONDS,
    OUTPUT_KINDS,
    FlightRow,
    ReplayedError,
    detail_of,
    error_from,
    output_row,
)
from flowctl.records.telemetry.schema import CLASS_NAMES, FlightKind

_CLASSES: Final = {name: item for item, name in zip(MessageClass, CLASS_NAMES, strict=True)}
_ANSWERS: Final = frozenset({FlightKind.SENT.value, FlightKind.WOULD_BLOCK.value})
_ANSWER_CALLS: Final = frozenset({"kernel", "strained"})
_CALL: Final = FlightKind.CALL.value
_ZEROS: Final = bytes(64 * 1024)
MOST_WIRE_BYTES: Final = 32 * 1024 * 1024
"""Of one message: RTMP has 16 MiB and the headers of its chunks."""
MOST_QUEUED_BYTES: Final = 1024 * 1024 * 1024
"""What may wait in a replay: a server allows a viewer a few MiB, and other servers some hundred."""
_CHECK_EVERY_BYTES: Final = 256 * 1024 * 1024
"""Stands for the payload of messages up to this size: what they say is of no consequence, and was not recorded."""


class DivergedError(Exception):
    """The Sender asked for something that was not recorded."""


class CutError(Exception):
    """The flight was cut off in the middle of a call."""


class _Surroundings:
    """Host, transport and fan-out of a replayed Sender: they answer what was recorded.

    Attributes:
        now_us: time of the call on the Sender's clock.
        foreign: the call came from another thread.
        answers: rows of the call that are answers, oldest first.
        last: this is the last call of a flight that was cut off.
    """

    def __init__(self) -> None:
        self.now_us = 0
        self.foreign = False
        self.answers: deque[FlightRow] = deque()
        self.kernel: int | None = None
        self.is_strained = False
        self.last = False
        self.log = StreamLog("unfollowed")

    # -- the transport

    def send(self, data: bytes, /) -> int:
        return self._write(len(data))

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        return self._write(sum(map(len, buffers)))

    def _write(self, offered: int) -> int:
        if not self.answers:
            if self.last:
                raise CutError
            raise DivergedError(f"a write of {offered} bytes that was not recorded")
        row = self.answers[0]
        if row.size_bytes != offered:
            raise DivergedError(f"a write of {offered} bytes, recorded is one of {row.size_bytes}")
        self.answers.popleft()
        if row.kind == FlightKind.WOULD_BLOCK.value:
            raise BlockingIOError
        if row.taken_bytes is None:
            raise error_from(detail_of(row.detail))
        return row.taken_bytes

    # -- the host

    def now(self) -> float:
        return self.now_us / MICROSECONDS

    def in_thread(self) -> bool:
        return not self.foreign

    def kernel_bytes(self) -> int:
        if self.kernel is None:
            if self.last:
                raise CutError
            raise DivergedError("asked what the kernel holds, which was not recorded")
        return self.kernel

    def strained(self) -> bool:
        return self.is_strained

    def nothing(self, *args: object) -> None:
        """Do nothing: what follows from it was recorded as a call of its own."""

    wrote = request_flush = want_writable = set_deadline = terminate = handler_failed = ledger_grew = limit_unsent = (
        nothing
    )

    # -- the fan-out

    add = left = runnable = remove = limits_changed = nothing


class Rerun:
    """One replay: the Sender, its surroundings, and the calls by name."""

    def __init__(self, flight: Flight) -> None:
        self.flight = flight
        self.around = around = _Surroundings()
        around.now_us = flight.clock_us
        self.outputs: list[FlightRow] = []
        self._offset_us = 0  # of the call in progress, since the beginning
        self.sender = NotingSender(
            around,
            around,
            noted=self._collect,
            limits=flight.limits,
            policy=flight.policy,
            settings=flight.settings,
            deferred=flight.deferred,
        )
        self.calls = 0
        self._unchecked_bytes = 0  # queued since the last look at how much waits
        self.first: Entry | None = None

    # -- one call

    def call(self, row: FlightRow, answers: Iterable[FlightRow], *, last: bool) -> None:
        """Make the call that `row` stands for; `answers` follow it in the flight."""
        around, sender = self.around, self.sender
        around.now_us = self.flight.clock_us + row.offset_us
        values = detail_of(row.detail)
        around.foreign = bool(values.pop("foreign", False))
        around.last, around.kernel, around.is_strained = last, None, False
        around.answers = deque()
        for answer in answers:
            if answer.reason == "kernel":
                around.kernel = answer.size_bytes
            elif answer.reason == "strained":
                around.is_strained = True
            else:
                around.answers.append(answer)
        self._offset_us = row.offset_us
        blocked = sender.refused
        try:
            self.make(row, values)
        except LocalProtocolError:
            pass  # the caller was told then, too: it asked for what the state does not allow
        except OSError as error:
            raise DivergedError(f"{error!r} came out of {row.reason}") from error
        except ReplayedError:
            pass  # a transport's own kind of error, which nobody but the fan-out catches
        if blocked and not sender.refused:
            self.outputs.append(FlightRow(row.offset_us, FlightKind.DRAINED.value))
        if around.answers and not last:
            raise DivergedError(f"{len(around.answers)} recorded writes were not made")
        self.calls += 1

    def _collect(self, entry: LedgerEntry, load: Load | None) -> None:
        row = output_row(entry, load, self._offset_us)
        if row is not None:
            self.outputs.append(row)

    def make(self, row: FlightRow, values: dict[str, Any]) -> None:
        if row.kind == FlightKind.QUEUED.value:
            self.queued(row, values)
            return
        match row.reason:
            case "look":
                self.sender.load()
            case "log":
                self.around.log = new_private_log("replayed", values, self.flight.clock_us)
                self.first = self.around.log.tail
            case "restart":
                self.around.log.headers = _wires(values["restart"])
            case "follow":
                prefix = _wires(values["prefix"])
                self.sender.follow(self.around, start=self.first, prefix=prefix, wait_for_key=values["wait_for_key"])
            case "resume_following":
                self.sender.resume_following(self.around)
            case str(name) if name in CALLS:
                getattr(self.sender, name)(*CALLS[name].read(values))
            case name:
                raise DamagedFlightError(f"{self.flight}: row {row.number} is the unknown call {name!r}")

    # -- messages and logs

    def queued(self, row: FlightRow, values: dict[str, Any]) -> None:
        """Publish a message, or send one."""
        wire, item = _wire(row.size_bytes or 0), _CLASSES[row.message_class or ""]
        self._unchecked_bytes += len(wire)
        if self._unchecked_bytes > _CHECK_EVERY_BYTES:
            self._unchecked_bytes = self.sender.statistics().load.size_bytes
            if self._unchecked_bytes > MOST_QUEUED_BYTES:
                raise DamagedFlightError(
                    f"{self.flight}: {self._unchecked_bytes} bytes wait at row {row.number}, which is more than a "
                    f"replay holds ({MOST_QUEUED_BYTES})"
                )
        if row.reason == LOG_LANE:
            at_us = self.around.now_us - round((row.queued_age_ms or 0.0) * 1000)
            self.around.log.append(
                wire,
                item,
                at_us / MICROSECONDS,
                restart=_wires(values.get("restart", ())),
                leading=values.get("leading") is True,
            )
        else:
            self.sender.send(wire, item, droppable=values.get("droppable"))


def belongs_to_call(row: FlightRow) -> bool:
    """Whether a row belongs to the call before it: an answer, or what came out."""
    return row.kind in _ANSWERS or row.kind in OUTPUT_KINDS or (row.kind == _CALL and row.reason in _ANSWER_CALLS)


@functools.lru_cache(maxsize=4096)
def _wire(size: int) -> bytes:
    """Return a message of `size` bytes, of which there is one for all messages of the size that are alike."""
    if not 0 <= size <= MOST_WIRE_BYTES:
        raise ValueError(f"{size} is no size of a message")
    return _ZEROS[:size] if size <= len(_ZEROS) else bytes(size)


def _wires(sizes: Iterable[int]) -> tuple[bytes, ...]:
    return tuple(map(_wire, sizes))
