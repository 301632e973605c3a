"""What a flight says of stream and link alone, for trying other limits on it (pure).

Of the calls two things remain: messages as they were published, and writes with what the kernel took of them. Times do
not fall: what a write has not met was published after it.

Of a viewer that switched between renditions the messages are those of the one that it was in: from the key frame at
which it left a log on, what that log had published is not there, and what the other one had is, from when it was
published. So other limits are tried with the switches as they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from flowctl.core.flow.limits import Limits
from flowctl.core.flow.state import MessageClass
from flowctl.errors import ConfigError, DamagedFlightError
from flowctl.records.flight.reading import Flight
from flowctl.records.flight.whatif.types import HELD, REFUSED, TAKEN
from flowctl.records.flight.words import (
    LOG_LANE,
    MOST_WIRE_BYTES,
    SWITCH_LANE,
    FlightRow,
    TablePolicy,
    detail_of,
    limits_from,
)
from flowctl.records.telemetry.schema import CLASS_NAMES, FlightKind

_CLASSES: Final = {name: int(item) for item, name in zip(MessageClass, CLASS_NAMES, strict=True)}


class StreamAndLink(NamedTuple):
    """Stream and link of a flight."""

    # (seconds since BEGIN, `MessageClass`, TAKEN, REFUSED or HELD, bytes); times do not fall
    events: list[tuple[float, int, int]]
    given: int  # number of messages of the GOP cache, the first of `events`
    restart_bytes: int  # of the metadata and configuration in front of a key frame after a loss. 0: not known.
    ended_s: float  # when it ended: with the flight, or with the first log that was left, seconds since BEGIN
    close_reason: str | None  # why the connection ended then. None: it did not, or it is not known.
    # when the first message of each other rendition was published that it switched to, seconds since BEGIN; in order
    switched: Sequence[float] = ()


def stream_and_link(flight: Flight) -> StreamAndLink:
    """Return the events of the first log that is followed, and of the link meanwhile.

    What comes after that log was left is not used: a cache that is joined later counts against other limits.
    """
    reader = _FlightReader(flight.settings.turn_bytes)
    ended_us, reason = round(flight.duration_s * 1e6), None
    for row in flight.rows:
        try:
            if not reader.read_row(row):
                ended_us, reason = row.offset_us, None
                break
            reason = row.reason if row.kind == FlightKind.CLOSE.value else reason
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise DamagedFlightError(f"{flight}: row {row.number} cannot be read: {error!r}") from error
    reader.settle(turn_is_over=True)
    ended_s = max(ended_us, reader.last_us) / 1e6
    events, given = reader.spliced()
    return StreamAndLink(events, given, reader.restart_bytes, ended_s, reason, reader.switched)


def in_force(flight: Flight) -> tuple[Limits, TablePolicy]:
    """Return limits and policy as they were set last while the first log was followed; what came after is not tried."""
    limits, policy, followed = flight.limits, flight.policy, False
    for row in flight.rows:
        try:
            if row.kind == FlightKind.LIMITS_SET.value:
                limits = limits_from(detail_of(row.detail)["limits"])
            elif row.kind == FlightKind.CALL.value and row.reason == "set_policy":
                policy = TablePolicy.from_dict(detail_of(row.detail)["policy"])
            elif row.reason == "unfollow" and followed:
                break
            followed = followed or row.reason == "follow"
        except (ValueError, TypeError, AttributeError, KeyError, ConfigError) as error:
            raise DamagedFlightError(f"{flight}: row {row.number} cannot be read: {error!r}") from error
    return limits, policy


class _FlightReader:
    """Makes events of rows; a write is one as soon as it is known that it does not go on."""

    def __init__(self, turn_bytes: int) -> None:
        self.events: list[tuple[float, int, int]] = []
        self.given = self.restart_bytes = 0
        self.last_us = 0  # of the events so far
        self._turn_bytes = turn_bytes
        self._joining = self._followed = self._full = False
        self._taken, self._wrote_us, self._turn = 0, -1, 0
        self._wrote_at = -1  # where the last write is among the events
        self.switched: list[float] = []
        self._of_log: list[int] = []  # where the messages of the log that is followed are among the events
        self._ahead: list[tuple[float, int, int]] = []  # what the log had that is about to be switched to
        self._left: set[int] = set()  # messages among the events of logs that were left before they came

    def read_row(self, row: FlightRow) -> bool:
        """Read the next row; return whether the log is still followed, or not yet."""
        kind = row.kind
        if kind == FlightKind.QUEUED.value:
            self.settle(turn_is_over=False)
            self._message(row)
        elif kind == FlightKind.SENT.value and row.taken_bytes is not None:
            self._taken += row.taken_bytes
            self._turn += row.taken_bytes
            self._wrote_us = row.offset_us
        elif kind == FlightKind.WOULD_BLOCK.value:
            self._put(row.offset_us, REFUSED)
        elif row.reason in ("flush", "take_turn"):
            self._turn = 0
            if row.detail and detail_of(row.detail).get("left"):
                self._was_refused()
        elif row.reason == "kernel":
            self._hold(row.offset_us, row.size_bytes or 0)
        elif row.reason == "writable":
            self._was_refused()
        elif row.reason == "switched":
            self._switch(row)
        elif row.reason == "log":
            self.settle(turn_is_over=True)  # what was written before is of replies, whatever comes of the log
            self._joining, self._of_log = True, []
        elif row.reason == "follow":
            self._joining, self._followed = False, True
            if self._full:  # by replies, before there was a stream: this one cannot be written at once
                self._put(row.offset_us, REFUSED)
        elif row.reason == "unfollow" and self._followed:
            return False
        return True

    def settle(self, *, turn_is_over: bool) -> None:
        """Note that the kernel took everything that was offered so far."""
        if self._wrote_us >= 0 and (turn_is_over or self._turn < self._turn_bytes):
            self._put(self._wrote_us, TAKEN)

    def _put(self, at_us: int, what: int) -> None:
        if self.events or self._followed:  # before there is anything of a stream, a write tells nothing of one
            self.last_us = max(self.last_us, at_us)
            self._wrote_at = len(self.events)
            self.events.append((self.last_us / 1e6, what, self._taken))
        self._full = what == REFUSED
        self._taken, self._turn, self._wrote_us = 0, 0, -1

    def _hold(self, at_us: int, held_bytes: int) -> None:
        """Note what the kernel holds, without a write that is no event yet."""
        if self.events:
            self.last_us = max(self.last_us, at_us)
            self.events.append((self.last_us / 1e6, HELD, max(held_bytes - self._taken, 0)))

    def _was_refused(self) -> None:
        """Call the last write refused: the kernel had got all that it was to have for then, which is no EAGAIN."""
        if self._wrote_us >= 0:
            self._put(self._wrote_us, REFUSED)
        elif self._wrote_at >= 0:
            at, _, size = self.events[self._wrote_at]
            self.events[self._wrote_at] = (at, REFUSED, size)

    def _switch(self, row: FlightRow) -> None:
        """Go on with what another log had, before which its headers go, instead of what the first one still had."""
        values, began_s = detail_of(row.detail), self.events[0][0]
        self._left.update(self._of_log[_size(values["left"]) :])
        messages = [(max(at, began_s), what, size) for at, what, size in self._ahead]
        at = messages[0][0] if messages else row.offset_us / 1e6
        self.switched.append(at)
        self.events += ((at, _CLASSES[name], _size(size)) for name, size, _ in values["prefix"])
        self._of_log = [*range(len(self.events), len(self.events) + len(messages))]
        self.events += messages
        self._ahead = []

    def spliced(self) -> tuple[list[tuple[float, int, int]], int]:
        """Return the events in order, and how many of the first were given."""
        if not self.switched:
            return self.events, self.given
        left = self._left
        events = [event for place, event in enumerate(self.events) if place not in left]
        return sorted(events, key=itemgetter(0)), self.given - sum(place < self.given for place in left)

    def _message(self, row: FlightRow) -> None:
        what, size = _CLASSES[row.message_class or ""], _size(row.size_bytes or 0)
        lay_us = 0 if self._joining else round((row.queued_age_ms or 0.0) * 1000)  # a cache is given when it is joined
        if row.reason == SWITCH_LANE:
            self._ahead.append(((row.offset_us - lay_us) / 1e6, what, size))
        if row.reason != LOG_LANE:
            return
        self.last_us = max(self.last_us, row.offset_us - lay_us)
        self._of_log.append(len(self.events))
        self.events.append((self.last_us / 1e6, what, size))
        self.given += self._joining
        if row.detail and not self.restart_bytes:
            self.restart_bytes = _size(sum(map(_size, detail_of(row.detail).get("restart", ()))))


def _size(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= MOST_WIRE_BYTES:
        raise ValueError(f"{value!r} is no size")
    return value
