"""Runs recorded flights again, through the real Sender, flow core and cursor, and compares what comes out.

The rows of a flight are calls, each with the answers that the Sender was given, and what came out. Here the same calls
are made of a `Sender` built from BEGIN, at the same microseconds; its transport gives the answers that were written
down, and complains if it is asked another question. Pure but for `read_flight`.
"""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flowctl.core.flow.ledger import LedgerEntry
from flowctl.core.flow.sharedstall import StallSpan
from flowctl.core.flow.state import Load, MessageClass
from flowctl.core.outgoing.streamlog import Entry, StreamLog
from flowctl.core.sending.contract import Hop
from flowctl.core.sending.figures import SenderStatistics
from flowctl.errors import ConfigError, DamagedFlightError, LocalProtocolError
from flowctl.records.flight.feed import new_private_log
from flowctl.records.flight.reading import Flight, read_flights
from flowctl.records.flight.recorded import NotingSender
from flowctl.records.flight.words import (
    CALLS,
    LOG_LANE,
    MICROSECONDS,
    MOST_WIRE_BYTES,
    OUTPUT_KINDS,
    SWITCH_LANE,
    FlightRow,
    ReplayedError,
    detail_of,
    error_from,
    figures_of,
    output_row,
)
from flowctl.records.telemetry.flightfiles import flight_files, flights_rows, list_flights
from flowctl.records.telemetry.schema import CLASS_NAMES, FlightKind
from flowctl.sender import Sender
from flowctl.units import format_count

_CLASSES: Final = {name: item for item, name in zip(MessageClass, CLASS_NAMES, strict=True)}
_ANSWERS: Final = frozenset({FlightKind.SENT.value, FlightKind.WOULD_BLOCK.value})
_ANSWER_CALLS: Final = frozenset({"kernel", "stall", "strained", "key", "switched"})
_GUIDED: Final = frozenset({"key", "switched"})
_CALL: Final = FlightKind.CALL.value
_ZEROS: Final = bytes(64 * 1024)
"""Stands for the payload of messages up to this size: what they say is of no consequence, and was not recorded."""
MOST_QUEUED_BYTES: Final = 1024 * 1024 * 1024
"""Most that may wait in a replay: a server allows a viewer a few MiB, and other servers some hundred."""
_MOST_HEADERS: Final = 1024
"""Most messages that go before a key frame: a publisher has 64 headers at most."""
_CHECK_EVERY_BYTES: Final = 256 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayResult:
    """Outputs of a replay."""

    # edges, drops, first late messages, returns and the close, in order, as rows (their `number` is 0)
    outputs: tuple[FlightRow, ...]
    statistics: SenderStatistics
    figures: dict[str, Any]
    divergence: str | None = None  # where the Sender asked for something else than was recorded. None: nowhere.
    diverged_at: int | None = None  # number of that row. None: nowhere.


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayComparison:
    """Whether a replay brought what was recorded."""

    identical: bool
    transitions: int
    dropped_messages: int
    complete: bool  # the flight has an end, so that all accounts were compared; if not, outputs only
    difference: str | None = None
    # number of the recorded row at which it is. None: there is none, or it is in the figures of the end.
    number: int | None = None

    def __str__(self) -> str:
        if not self.identical:
            where = "at the end" if self.number is None else f"at row {self.number}"
            return f"diverges {where}: {self.difference}"
        cut = "" if self.complete else " (cut off; replayed up to its last row)"
        edges = format_count(self.transitions, "transition")
        return f"identical: {edges}, {format_count(self.dropped_messages, 'drop')}{cut}"


class DivergedError(Exception):
    """The Sender asked for something that was not recorded."""


class CutError(Exception):
    """The flight was cut off in the middle of a call."""


class _Surroundings:
    """Host, transport and fan-out of a replayed Sender: they answer what was recorded."""

    def __init__(self) -> None:
        self.now_us = 0  # time of the call on the Sender's clock
        self.foreign = False  # the call came from another thread
        self.answers: deque[FlightRow] = deque()  # writes of the call, oldest first
        self.guided: deque[FlightRow] = deque()  # likewise what was said at key frames, and the messages of new logs
        self.kernel: int | None = None
        self.is_strained = False
        self.stall: StallSpan | None = None
        self.last = False  # this is the last call of a flight that was cut off

    # -- the transport

    def send(self, data: bytes, /) -> int:
        return self._write(len(data))

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        return self._write(sum(map(len, buffers)))

    def _write(self, offered: int) -> int:
        if not self.answers:
            raise self.lacks(f"a write of {offered} bytes")
        row = self.answers[0]
        if row.size_bytes != offered:
            raise DivergedError(f"a write of {offered} bytes, recorded is one of {row.size_bytes}")
        self.answers.popleft()
        if row.kind == FlightKind.WOULD_BLOCK.value:
            raise BlockingIOError
        if row.taken_bytes is None:
            raise error_from(detail_of(row.detail))
        return row.taken_bytes

    def lacks(self, what: str) -> Exception:
        """Return what to raise where the Sender wants `what`, of which there is no row."""
        return CutError() if self.last else DivergedError(f"{what} that was not recorded")

    # -- the host

    def now(self) -> float:
        return self.now_us / MICROSECONDS

    def in_thread(self) -> bool:
        return not self.foreign

    def kernel_bytes(self) -> int:
        if self.kernel is None:
            raise self.lacks("a look at what the kernel holds")
        return self.kernel

    def strained(self) -> bool:
        return self.is_strained

    def shared_stall(self) -> StallSpan | None:
        return self.stall

    def nothing(self, *args: object) -> None:
        """Do nothing: what follows from it was recorded as a call of its own."""

    wrote = request_flush = want_writable = set_deadline = terminate = handler_failed = ledger_grew = limit_unsent = (
        nothing
    )


class _Fanout:
    """The fan-out of one log, as a replayed Sender sees it."""

    def __init__(self, log: StreamLog) -> None:
        self.log = log

    def nothing(self, sender: Sender) -> None:
        """Do nothing: a recorded viewer is served by calls that were recorded."""

    add = serve_alone = serve_in_turn = remove = limits_changed = guide_changed = nothing

    def brings_on(self, start: Entry) -> bool:
        """Return False, as where it was recorded."""
        del start
        return False


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
        self._unchecked_bytes = 0  # queued since the last look at how much waits
        self._header_bytes = 0  # before key frames so far
        self.fanout = _Fanout(StreamLog("unfollowed"))
        self._start: Entry | None = None  # of a log that is about to be followed: its head would hold all of it
        self._fault: Exception | None = None  # what went wrong at a key frame: a Sender contains what a guide raises

    # -- one call

    def call(self, row: FlightRow, answers: Iterable[FlightRow], *, last: bool) -> None:
        around, sender = self.around, self.sender
        around.now_us = self.flight.clock_us + row.offset_us
        values = detail_of(row.detail)
        around.foreign = bool(values.pop("foreign", False))
        around.last, around.kernel, around.is_strained, around.stall = last, None, False, None
        around.answers, around.guided = deque(), deque()
        for answer in answers:
            if answer.reason == "kernel":
                around.kernel = answer.size_bytes
            elif answer.reason == "strained":
                around.is_strained = True
            elif answer.reason == "stall":
                began_us, ended_us = (detail_of(answer.detail)[name] for name in ("began_us", "ended_us"))
                clock_us = self.flight.clock_us
                around.stall = StallSpan((clock_us + began_us) / MICROSECONDS, (clock_us + ended_us) / MICROSECONDS)
            elif answer.reason in _GUIDED or answer.kind == FlightKind.QUEUED.value:
                around.guided.append(answer)
            elif answer.kind in _ANSWERS:
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
        if self._fault is not None:
            raise self._fault
        if blocked and not sender.refused:
            self.outputs.append(FlightRow(row.offset_us, FlightKind.DRAINED.value))
        if around.answers and not last:
            raise DivergedError(f"{len(around.answers)} recorded writes were not made")
        if around.guided and not last:
            raise DivergedError(f"the answer in row {around.guided[0].number} was not asked for")

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
                self._start = self._begin_log(values)
            case "restart":
                self.fanout.log.headers = self._wires(values["restart"])
            case "follow":
                prefix, start, self._start = self._wires(values["prefix"]), self._start, None
                self.sender.follow(self.fanout, start=start, prefix=prefix, wait_for_key=values["wait_for_key"])
            case "resume_following":
                self.sender.resume_following(self.fanout)
            case "set_guide":
                self.sender.set_guide(self if values.pop("on") else None, **values)
            case "switch":
                self.sender.switch(self._hop())
            case str(name) if name in CALLS:
                getattr(self.sender, name)(*CALLS[name].read(values))
            case name:
                raise DamagedFlightError(f"{self.flight}: row {row.number} is the unknown call {name!r}")

    # -- messages and logs

    def queued(self, row: FlightRow, values: dict[str, Any]) -> None:
        if self._unchecked_bytes > _CHECK_EVERY_BYTES:
            self._unchecked_bytes = self.sender.statistics().load.size_bytes
            if self._unchecked_bytes > MOST_QUEUED_BYTES:
                raise DamagedFlightError(
                    f"{self.flight}: {self._unchecked_bytes} bytes wait at row {row.number}, which is more than a "
                    f"replay holds ({MOST_QUEUED_BYTES})"
                )
        if row.reason == LOG_LANE:
            self._publish(row, values)
        else:
            self._unchecked_bytes += row.size_bytes or 0
            message_class = _CLASSES[row.message_class or ""]
            self.sender.send(_wire(row.size_bytes or 0), message_class, droppable=values.get("droppable"))

    def _begin_log(self, seed: Mapping[str, Any]) -> Entry:
        self.fanout = _Fanout(new_private_log("replayed", seed, self.flight.clock_us))
        return self.fanout.log.tail

    def _publish(self, row: FlightRow, values: Mapping[str, Any]) -> None:
        self._unchecked_bytes += row.size_bytes or 0
        at_us = self.around.now_us - round((row.queued_age_ms or 0.0) * 1000)
        self.fanout.log.append(
            _wire(row.size_bytes or 0),
            _CLASSES[row.message_class or ""],
            at_us / MICROSECONDS,
            restart=self._wires(values.get("restart", ())),
            leading=values.get("leading") is True,
        )

    def _wires(self, sizes: Sequence[int]) -> tuple[bytes, ...]:
        """Return messages that go before a key frame, which stay as long as that, however many there are."""
        if len(sizes) > _MOST_HEADERS:  # they stand before each key frame that follows a loss
            raise ValueError(f"{len(sizes)} messages go before a key frame, {_MOST_HEADERS} at most")
        self._header_bytes += sum(sizes)
        if self._header_bytes > MOST_QUEUED_BYTES:
            raise ValueError(f"{self._header_bytes} bytes go before key frames so far, {MOST_QUEUED_BYTES} at most")
        return tuple(map(_wire, sizes))

    # -- other logs

    def choose_log(self, key: Entry) -> Hop | float | None:
        """Answer what the guide answered."""
        if self._fault is not None:
            return None
        try:
            return self._said_at(key)
        except Exception as error:  # noqa: BLE001 - raised by `call`
            self._fault = error
            return None

    def _said_at(self, key: Entry) -> Hop | float | None:
        guided = self.around.guided
        row = next((item for item in guided if item.reason != SWITCH_LANE), None)
        if row is None or row.size_bytes != len(key.wire):
            raise self.around.lacks(f"a question at a key frame of {len(key.wire)} bytes")
        if row is not guided[0] or row.reason == "switched":
            return self._hop()
        guided.popleft()
        until_us = detail_of(row.detail).get("until_us")
        return None if until_us is None else (self.flight.clock_us + until_us) / MICROSECONDS

    def _hop(self) -> Hop:
        """Make the log that the viewer went on in: of the rows before the one that tells of it."""
        guided, messages = self.around.guided, []
        while guided and guided[0].reason == SWITCH_LANE:
            messages.append(guided.popleft())
        if not guided:
            raise self.around.lacks("a switch")
        values = detail_of(guided.popleft().detail)
        start = self._begin_log(values["log"])
        for row in messages:
            self._publish(row, detail_of(row.detail))
        if "restart" in values:
            self.fanout.log.headers = self._wires(values["restart"])
        told = [
            (_CLASSES[name], size, (self.around.now_us - age_us) / MICROSECONDS)
            for name, size, age_us in values["prefix"]
        ]
        wires = self._wires([size for _, size, _ in told])
        prefix = tuple((name, wire, at) for (name, _, at), wire in zip(told, wires, strict=True))
        return Hop(self.fanout, start, prefix, wait_for_key=values["wait_for_key"])


def belongs_to_call(row: FlightRow) -> bool:
    """Whether a row belongs to the call before it: an answer, or what came out."""
    if row.kind == FlightKind.QUEUED.value:
        return row.reason == SWITCH_LANE
    return row.kind in _ANSWERS or row.kind in OUTPUT_KINDS or (row.kind == _CALL and row.reason in _ANSWER_CALLS)


@functools.lru_cache(maxsize=4096)
def _wire(size: int) -> bytes:
    """Return a message of `size` bytes, of which there is one for all messages of the size that are alike."""
    if not 0 <= size <= MOST_WIRE_BYTES:
        raise ValueError(f"{size} is no size of a message")
    return _ZEROS[:size] if size <= len(_ZEROS) else bytes(size)


def read_flight(path: Path, conn_id: int | None = None, node: str | None = None) -> Flight:
    files = flight_files(path)
    there = [item for item in list_flights(files) if conn_id in (None, item.conn_id) and node in (None, item.node)]
    if len(there) != 1:
        hint = "name one by its conn_id; flowctl replay lists them"
        raise ConfigError(f"{path} holds {len(there) or 'no'} such flights", hint=hint)
    ((_, rows),) = flights_rows(files, there)
    return read_flights(rows)


def replay(flight: Flight) -> ReplayResult:
    run = Rerun(flight)
    rows = flight.rows
    end = len(rows) - 1 if flight.complete else len(rows)
    index, difference, diverged_at = 1, None, None
    while index < end:
        row = rows[index]
        following = index + 1
        while following < end and belongs_to_call(rows[following]):
            following += 1
        answers = [item for item in rows[index + 1 : following] if item.kind not in OUTPUT_KINDS]
        try:
            run.call(row, answers, last=following == len(rows))
        except DivergedError as error:
            difference, diverged_at = str(error), row.number
            break
        except CutError:
            break
        except (ConfigError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise DamagedFlightError(f"{flight}: row {row.number} cannot be read: {error!r}") from error
        index = following
    if flight.complete and difference is None:
        run.around.now_us = flight.clock_us + rows[-1].offset_us
    if run.around.kernel is None:
        run.around.kernel = 0  # the figures tell how far it is behind, which a flight without an end does not
    statistics = run.sender.statistics()
    return ReplayResult(
        outputs=tuple(run.outputs),
        statistics=statistics,
        figures=figures_of(statistics),
        divergence=difference,
        diverged_at=diverged_at,
    )


def compare(flight: Flight, result: ReplayResult) -> ReplayComparison:
    """Return whether `result`, of a replay of `flight`, is what was recorded; if not, the first difference."""
    recorded, figures = flight.outputs, flight.figures
    difference: str | None = None
    number: int | None = None
    for place, row in enumerate(recorded):
        again = result.outputs[place] if place < len(result.outputs) else None
        if again is None or again != row._replace(number=0):
            difference = _unlike(row, again)
            number = row.number
            break
    if difference is None and len(result.outputs) > len(recorded) and flight.complete:
        more = result.outputs[len(recorded)]
        difference = f"{more.kind} at {more.offset_us} us was not recorded"
    if result.divergence is not None and (number is None or (result.diverged_at or 0) < number):
        difference, number = result.divergence, result.diverged_at
    if difference is None and figures is not None:
        again_figures = json.loads(json.dumps(result.figures))
        names = [name for name in figures if figures[name] != again_figures.get(name)]
        if names:
            name = names[0]
            difference = f"{name} is {again_figures.get(name)}, recorded is {figures[name]}"
    same = recorded if number is None else [row for row in recorded if row.number < number]
    return ReplayComparison(
        identical=difference is None,
        transitions=sum(row.kind == FlightKind.STATE.value for row in same),
        dropped_messages=sum(row.dropped_messages or 0 for row in same),
        complete=flight.complete,
        difference=difference,
        number=number,
    )


def _unlike(row: FlightRow, again: FlightRow | None) -> str:
    if again is None:
        return f"{row.kind} at {row.offset_us} us did not come again"
    fields = [name for name in FlightRow._fields if name != "number" and getattr(row, name) != getattr(again, name)]
    parts = [f"{name} is {getattr(again, name)}, recorded is {getattr(row, name)}" for name in fields]
    return f"{row.kind}: " + "; ".join(parts)
