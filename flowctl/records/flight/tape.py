"""A tape: the rows of one flight in order, with the time that stands still while one of them happens (pure).

The Sender's clock is cut to whole microseconds, upwards, so that a deadline that has come has come here too, and a
replay computes with the very same numbers. A flight ends after `MOST_ROWS` rows or `MOST_S` seconds with an END row
whose reason is ``limit``; where its sink takes no more it is cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor
from typing import Any, Final, NamedTuple

from flowctl.core.flow.sharedstall import StallSpan
from flowctl.core.outgoing.outbox import would_block
from flowctl.records.flight.words import MICROSECONDS, FlightRow, dump, error_as_dict
from flowctl.records.telemetry.schema import FlightKind

MOST_ROWS: Final = 2_000_000
"""Rows of one flight: an hour of a viewer that keeps up is half a million."""
MOST_S: Final = 3600.0
"""Seconds of one flight: more says nothing new about a link, and a replay has to hold it."""

FlightSink = Callable[[tuple[object, ...]], bool]
"""Takes one row of the table `flight`, its columns in order but for node and seq, as `Lane.put` of the recorder does.
Never waits; returns False where it had no room."""

_SENT: Final = FlightKind.SENT.value
_WOULD_BLOCK: Final = FlightKind.WOULD_BLOCK.value
_QUEUED: Final = FlightKind.QUEUED.value
_CALL: Final = FlightKind.CALL.value


class Identity(NamedTuple):
    """Connection of a flight: the first columns of its rows, as the privacy settings let them through."""

    began_at_us: int  # microseconds since the epoch (UTC) when the flight began
    conn_id: int  # see `flowctl.records.telemetry.schema`
    peer_ip: str | None = None
    peer_port: int | None = None
    role: str | None = None  # what the connection is used for, once that is known
    app: str | None = None
    stream: str | None = None


class Tape:
    """The rows of one flight. Not thread-safe: its Sender's lock guards it."""

    __slots__ = (
        *("_began_at_us", "_kernel", "_most_rows", "_most_us", "_sink", "_stall", "_strained", "_whose"),
        *("began_us", "depth", "foreign", "now_us", "on", "rows"),
    )

    def __init__(
        self, sink: FlightSink, identity: Identity, *, most_rows: int = MOST_ROWS, most_s: float = MOST_S
    ) -> None:
        self._sink = sink
        self._most_rows = most_rows
        self._most_us = round(most_s * MICROSECONDS)
        self.on = True  # whether rows are still taken
        self.depth = 0  # calls in progress, one inside the other; the outermost is the one that is noted
        self.rows = 0
        self.now_us = self.began_us = 0  # time of the call in progress, microseconds on the Sender's clock
        self.foreign = False  # the call in progress is on another thread than the owning one
        self._kernel: int | None = None  # what the kernel holds, as answered in this call
        self._strained: bool | None = None
        self._stall: tuple[StallSpan | None] | None = None
        self._began_at_us, *whose = identity
        self._whose: tuple[object, ...] = tuple(whose)

    def describe(self, *, role: str | None, app: str | None, stream: str | None) -> None:
        self._whose = (*self._whose[:-3], role, app, stream)

    # -- time

    def begin(self, now_s: float, detail: str) -> None:
        """Write BEGIN; time stands still from here until `leave`."""
        self.depth = 1
        self.now_us = self.began_us = ceil(now_s * MICROSECONDS)
        self.write(FlightRow(0, FlightKind.BEGIN.value, detail=detail))

    def enter(self, now_s: float, *, foreign: bool) -> None:
        """Begin the outermost call: time stands still, and what is asked for is answered the same way throughout."""
        self.depth = 1
        self.now_us = max(self.now_us, ceil(now_s * MICROSECONDS))
        self.foreign = foreign
        self._kernel = self._strained = self._stall = None

    def leave(self) -> None:
        self.depth = 0

    def time_s(self, now_s: float) -> float:
        """Return the time for the Sender: that of the call in progress, else `now_s` in whole microseconds."""
        now_us = self.now_us if self.depth else max(self.now_us, ceil(now_s * MICROSECONDS))
        return now_us / MICROSECONDS

    def age_us(self, since_s: float) -> int:
        """Return the age of what has waited since then: of whole microseconds, upwards, as every time of a flight."""
        return self.now_us - min(floor(since_s * MICROSECONDS), self.now_us)

    @property
    def offset_us(self) -> int:
        return self.now_us - self.began_us

    @property
    def full(self) -> bool:
        return self.rows >= self._most_rows or self.offset_us >= self._most_us

    # -- rows

    def write(self, row: FlightRow) -> None:
        """Hand one row on, numbered; nothing where the tape is off. A sink without room ends the flight."""
        if not self.on:
            return
        self.on = self._sink((self._began_at_us + row[0], *self._whose, *row[:-1], self.rows))
        self.rows += 1

    def call(self, name: str, detail: dict[str, Any] | None = None, kind: FlightKind = FlightKind.CALL) -> None:
        """Note a call of the Sender by name, with its arguments."""
        self.write(FlightRow(self.offset_us, kind.value, reason=name, detail=self.arguments(detail)))

    def arguments(self, detail: dict[str, Any] | None) -> str | None:
        """Return the arguments of a call as JSON, and whether it came from another thread. None: nothing to say."""
        if self.foreign:
            detail = {**(detail or {}), "foreign": True}
        return dump(detail) if detail else None

    def queued(self, name: str, size_bytes: int, lane: str, age_ms: float, detail: str | None) -> None:
        """Note one message: its class by `name`, its size, and for how long it has lain in the stream's log."""
        self.write(
            FlightRow(self.offset_us, _QUEUED, name, size_bytes, None, None, None, age_ms, reason=lane, detail=detail)
        )

    # -- answers of the surroundings

    def answered(self, name: str, size_bytes: int | None = None, detail: dict[str, Any] | None = None) -> None:
        """Note an answer by name; None where it has no number, or no more to say."""
        detail_text = dump(detail) if detail else None
        self.write(FlightRow(self.offset_us, _CALL, None, size_bytes, reason=name, detail=detail_text))

    def wrote(self, offered_bytes: int, taken_bytes: int) -> None:
        if self.depth:
            self.write(FlightRow(self.offset_us, _SENT, None, offered_bytes, taken_bytes))

    def write_failed(self, offered_bytes: int, error: Exception) -> None:
        """Note that a write met EAGAIN, or the error that ends the connection, by its number or kind."""
        if not self.depth:
            return
        if would_block(error):
            self.write(FlightRow(self.offset_us, _WOULD_BLOCK, None, offered_bytes, 0))
        else:
            detail = dump(error_as_dict(error))
            self.write(FlightRow(self.offset_us, _SENT, None, offered_bytes, reason="error", detail=detail))

    def kernel_bytes(self, ask: Callable[[], int]) -> int:
        """Return, and note once per call, what the kernel holds."""
        if not self.depth:
            return ask()
        if self._kernel is None:
            self._kernel = ask()
            self.answered("kernel", self._kernel)
        return self._kernel

    def strained(self, ask: Callable[[], bool]) -> bool:
        """Return, and note once per call where it was, whether the thread had no room."""
        if not self.depth:
            return ask()
        if self._strained is None:
            self._strained = ask()
            if self._strained:  # nearly never, so that only this is worth a row
                self.answered("strained")
        return self._strained

    def shared_stall(self, ask: Callable[[], StallSpan | None]) -> StallSpan | None:
        """Return, and note once per call where there was one, when most viewers had stopped: whole microseconds."""
        if not self.depth:
            return ask()
        if self._stall is None:
            span = ask()
            if span is not None:
                began_us, ended_us = (floor(at * MICROSECONDS) for at in span)
                span = StallSpan(began_us / MICROSECONDS, ended_us / MICROSECONDS)
                detail = {"began_us": began_us - self.began_us, "ended_us": ended_us - self.began_us}
                self.answered("stall", detail=detail)
            self._stall = (span,)
        return self._stall[0]
