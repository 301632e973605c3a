"""The flow core (pure): what happened to a peer's queue goes in, at most one edge between send states comes out.

Theory of operation. Two facts make the state: `would_block` (a write met EAGAIN and not everything has been taken by
the kernel since) and the *level* (none, soft, hard) that the load has reached. The state is the higher of the two, so
leaving SOFT_LIMIT leads back to OVERLOADED or READY correctly. A level is entered when ANY axis is at or above its
mark and left when ALL axes are at or below their low mark; between the marks it stays what it was (hysteresis).
HARD_LIMIT is final unless the limits say hold.

There is no clock, no queue and no I/O here: each input carries the load after the event and the time. The same inputs
therefore always give the same edges, which is what recording and replaying a connection rests on.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from flowctl.core.flow.limits import OFF_MARK, Axis, HardPolicy, Limits


class MessageClass(enum.IntEnum):
    """What a message is to the drop policy; the value is a column index in every per-class count.

    CONTROL is never dropped. HEADER is codec configuration and metadata, sent again at a restart. KEY and INTER are
    video frames; DISPOSABLE is a video frame that no other frame refers to.
    """

    CONTROL = 0
    HEADER = 1
    KEY = 2
    INTER = 3
    DISPOSABLE = 4
    AUDIO = 5
    DATA = 6


CLASS_COUNT: Final = len(MessageClass)
VIDEO_CLASSES: Final = frozenset({MessageClass.KEY, MessageClass.INTER, MessageClass.DISPOSABLE})
"""The classes of messages that hold pictures."""


class SendState(enum.IntEnum):
    """How much a peer's connection can take, from best to worst."""

    READY = 0
    OVERLOADED = 1
    SOFT_LIMIT = 2
    HARD_LIMIT = 3


class Cause(enum.Enum):
    """The input of the flow core that caused an edge."""

    QUEUED = "queued"
    SENT = "sent"
    WOULD_BLOCK = "would_block"
    DRAINED = "drained"
    DROPPED = "dropped"
    LIMITS_SET = "limits_set"
    TICK = "tick"


class Load(NamedTuple):
    """What is queued for a peer and not yet taken by the kernel.

    Attributes:
        size_bytes: payload plus the overhead per message.
        messages: queued messages; one whose first byte is out counts until its last byte is.
        age_ms: wall-clock age of the oldest queued message, 0 for an empty queue.
    """

    size_bytes: int = 0
    messages: int = 0
    age_ms: float = 0.0


EMPTY_LOAD: Final = Load()


@dataclass(frozen=True, slots=True)
class StateChange:
    """One edge of a Sender's state.

    Args:
        sequence: 1 for the first edge of the connection, then counting up without a gap.
        old: state before. READY before the first edge, which itself is never announced.
        new: state after, never equal to `old`.
        cause: the input that caused it.
        axis: the axis that decided, None where the EAGAIN bit did.
        value: load on that axis, in its unit. None without an axis.
        limit: the mark that was crossed. None without an axis.
        at: time of the event in seconds, on the clock of the caller.
    """

    sequence: int
    old: SendState
    new: SendState
    cause: Cause
    axis: Axis | None
    value: float | None
    limit: int | None
    at: float


_NO_LEVEL, _SOFT, _HARD = 0, 1, 2
_STATE_OF: Final = (
    (SendState.READY, SendState.OVERLOADED),
    (SendState.SOFT_LIMIT, SendState.SOFT_LIMIT),
    (SendState.HARD_LIMIT, SendState.HARD_LIMIT),
)
"""The table of states: row = level, column = would_block."""


@lru_cache(64)
def _marks_of(limits: Limits) -> tuple[tuple[int, int, int], ...]:
    """Return the low, soft and hard marks, and those far from which no load need be shown, each by axis.

    They are the same objects wherever limits are the same.
    """
    low, soft, hard = zip(limits.size.marks, limits.messages.marks, limits.age_ms.marks, strict=True)
    # A queue thins itself from nine tenths of a hard mark on (`timing.crowded`), which may lie below soft.
    return low, soft, hard, (min(soft[0], hard[0] // 2), min(soft[1], hard[1] // 2), soft[2])


class FlowCore:
    """State of one Sender as a pure function of its inputs.

    Every input method returns the edge it caused, or None. Not thread-safe: its Sender's lock guards it.

    Attributes:
        would_block: a write met EAGAIN, and not everything has been taken by the kernel since.
        final: whether HARD_LIMIT was reached and the limits said that it ends the connection; never taken back.
        slow_since: since when the state is SOFT_LIMIT or worse without a break, in seconds. None while it is not.
        last_change: the last edge. None before the first.
        recoveries: edges back to READY.
    """

    __slots__ = (
        "_far_marks",
        "_hard_marks",
        "_level",
        "_low_marks",
        "_overloads",
        "_sequence",
        "_since",
        "_soft_marks",
        "_time_in",
        "final",
        "last_change",
        "limits",
        "recoveries",
        "slow_since",
        "state",
        "would_block",
    )

    def __init__(self, limits: Limits, now: float) -> None:
        self.would_block = False
        self.state = SendState.READY
        self.last_change: StateChange | None = None
        self.final = False
        self.slow_since: float | None = None
        self.recoveries = 0
        self._level = _NO_LEVEL
        self._sequence = 0
        self._since = now
        self._time_in: list[float] | None = None  # seconds per state; made at the first edge, most viewers have none
        self._adopt(limits)

    def _adopt(self, limits: Limits) -> None:
        self.limits = limits
        self._low_marks, self._soft_marks, self._hard_marks, self._far_marks = _marks_of(limits)

    # -- inputs

    def queued(self, load: Load, now: float) -> StateChange | None:
        return self._update(Cause.QUEUED, load, now)

    def sent(self, load: Load, now: float) -> StateChange | None:
        """The kernel took something and something is left."""
        return self._update(Cause.SENT, load, now)

    def blocked(self, load: Load, now: float) -> StateChange | None:
        """A write met EAGAIN."""
        self.would_block = True
        return self._update(Cause.WOULD_BLOCK, load, now)

    def drained(self, now: float, load: Load = EMPTY_LOAD) -> StateChange | None:
        """The kernel has taken everything that was queued; only this clears the EAGAIN bit.

        `load` is not empty where the age axis also counts what waits in the kernel.
        """
        self.would_block = False
        return self._update(Cause.DRAINED, load, now)

    def dropped(self, load: Load, now: float) -> StateChange | None:
        return self._update(Cause.DROPPED, load, now)

    def ticked(self, load: Load, now: float) -> StateChange | None:
        """Time passed (the age axis moves without any event of the queue)."""
        return self._update(Cause.TICK, load, now)

    def limits_set(self, limits: Limits, load: Load, now: float) -> StateChange | None:
        """Put `limits` in force at once.

        A HARD_LIMIT that is final stays: the connection is already being closed for it. One that is held and whose
        mark is no longer reached becomes SOFT_LIMIT, or is left where the load is at or below the new low marks. With
        soft off on all axes there is no SOFT_LIMIT to be in: it is left, and so is a held HARD_LIMIT. One that was
        held, is still reached and is final by the new limits makes no edge: see `final`.
        """
        old_level = self._level
        self._adopt(limits)
        if not self.final:
            # The hard mark, if it is still reached, is found again below.
            self._level = min(old_level, _SOFT if min(self._soft_marks) < OFF_MARK else _NO_LEVEL)
        return self._update(Cause.LIMITS_SET, load, now, old_level)

    # -- what the state is

    @property
    def since(self) -> float:
        return self._since

    @property
    def transitions(self) -> int:
        return self._sequence

    def time_in_states(self, now: float) -> tuple[float, float, float, float]:
        times = list(self._time_in or (0.0, 0.0, 0.0, 0.0))
        times[self.state] += now - self._since
        return times[0], times[1], times[2], times[3]

    def reaches_soft(self, size_bytes: int, messages: int) -> bool:
        """Return whether a load, without the overhead per message, is at a soft mark; cheap, for every message."""
        soft = self._soft_marks
        return messages >= soft[1] or size_bytes + messages * self.limits.overhead_bytes >= soft[0]

    def reaches_hard(self, size_bytes: int, messages: int) -> bool:
        """Return whether a load, without the overhead per message, is at a hard mark."""
        hard = self._hard_marks
        return messages >= hard[1] or size_bytes + messages * self.limits.overhead_bytes >= hard[0]

    def far_from(self, size_bytes: int, messages: int, age_ms: float) -> bool:
        """Return whether no mark is near a load of at most so much, and none was reached: then it need not be shown."""
        far = self._far_marks
        return not self._level and size_bytes < far[0] and messages < far[1] and age_ms < far[2]

    def rises_to(self, load: Load) -> bool:
        """Return whether `load` is at a mark of a level above the present one."""
        if self._level == _HARD or self.final:
            return False
        return _first_reached(load, self._hard_marks if self._level else self._soft_marks) is not None

    def marks_above(self, load: Load) -> tuple[int, int, int]:
        """Return the next mark above `load` per axis (bytes, messages, ms); `OFF_MARK` where there is none.

        A caller that waits for these need not ask in between.
        """
        size, messages, age = load.size_bytes, load.messages, load.age_ms
        soft, hard = self._soft_marks, self._hard_marks
        reached = self._level == _HARD
        return (
            OFF_MARK if reached else soft[0] if size < soft[0] < OFF_MARK and not self._level else hard[0],
            OFF_MARK if reached else soft[1] if messages < soft[1] < OFF_MARK and not self._level else hard[1],
            OFF_MARK if reached else soft[2] if age < soft[2] < OFF_MARK and not self._level else hard[2],
        )

    def room(self, load: Load) -> tuple[int, int]:
        """Return the (bytes, messages) that fit beside `load` before a mark can be reached; `OFF_MARK`: any number.

        It cannot be reached before either of the two has come.
        """
        size_mark, messages_mark, _ = self.marks_above(load)
        size = messages = OFF_MARK
        if size_mark < OFF_MARK:
            # Bytes and overhead add up to the mark, so one of the two has to grow by half of the gap at least.
            size = max((size_mark - load.size_bytes) // 2, 1)
            if self.limits.overhead_bytes:
                messages = max(size // self.limits.overhead_bytes, 1)
        if messages_mark < OFF_MARK:
            messages = min(messages, max(messages_mark - load.messages, 1))
        return size, messages

    # -- the rule

    def _update(self, cause: Cause, load: Load, now: float, old_level: int | None = None) -> StateChange | None:
        """Set level and state; `old_level` is the level before the event where the event itself has changed it."""
        old_level = self._level if old_level is None else old_level
        axis = None if self.final else self._relevel(load)
        if self._level == _HARD and self.limits.hard_policy is HardPolicy.CLOSE:
            self.final = True
        new = _STATE_OF[self._level][self.would_block]
        if new is self.state:
            return None
        value, limit = self._measure(axis, load) if self._level != old_level else (None, None)
        return self._enter(new, cause, axis if value is not None else None, value, limit, now)

    def _relevel(self, load: Load) -> Axis | None:
        """Set the level from `load`; return the axis that decided, None where none did."""
        hard = _first_reached(load, self._hard_marks)
        if hard is not None:
            self._level = _HARD
            return hard
        if self._level:
            above = self._first_above_low(load)
            if above is not None:
                return _first_reached(load, self._soft_marks) or above
            self._level = _NO_LEVEL
            return _largest_share(load, self._low_marks)
        soft = _first_reached(load, self._soft_marks)
        if soft is not None:
            self._level = _SOFT
        return soft

    def _first_above_low(self, load: Load) -> Axis | None:
        low = self._low_marks
        if load.size_bytes > low[0]:
            return Axis.BYTES
        if load.messages > low[1]:
            return Axis.MESSAGES
        return Axis.AGE if load.age_ms > low[2] else None

    def _measure(self, axis: Axis | None, load: Load) -> tuple[float | None, int | None]:
        if axis is None:
            return None, None
        index, value = {
            Axis.BYTES: (0, float(load.size_bytes)),
            Axis.MESSAGES: (1, float(load.messages)),
            Axis.AGE: (2, load.age_ms),
        }[axis]
        marks = {_NO_LEVEL: self._low_marks, _SOFT: self._soft_marks, _HARD: self._hard_marks}[self._level]
        if self._level == _SOFT and value < marks[index]:
            marks = self._low_marks  # a held HARD_LIMIT that other limits made SOFT_LIMIT: this is what keeps it there
        return value, marks[index]

    def _enter(
        self, new: SendState, cause: Cause, axis: Axis | None, value: float | None, limit: int | None, now: float
    ) -> StateChange:
        """The one place that assigns the state."""
        times = self._time_in
        if times is None:
            times = self._time_in = [0.0, 0.0, 0.0, 0.0]
        times[self.state] += now - self._since
        self._since = now
        self._sequence += 1
        if new is SendState.READY:
            self.recoveries += 1
        if new < SendState.SOFT_LIMIT:
            self.slow_since = None
        elif self.slow_since is None:
            self.slow_since = now
        change = StateChange(self._sequence, self.state, new, cause, axis, value, limit, now)
        self.state = new
        self.last_change = change
        return change


def _first_reached(load: Load, marks: tuple[int, int, int]) -> Axis | None:
    if load.size_bytes >= marks[0]:
        return Axis.BYTES
    if load.messages >= marks[1]:
        return Axis.MESSAGES
    return Axis.AGE if load.age_ms >= marks[2] else None


def _largest_share(load: Load, marks: tuple[int, int, int]) -> Axis | None:
    """The axis on which `load` is closest to its mark: the one to name when a level is left."""
    shares = (
        (load.size_bytes / marks[0] if marks[0] else 0.0, Axis.BYTES, marks[0]),
        (load.messages / marks[1] if marks[1] else 0.0, Axis.MESSAGES, marks[1]),
        (load.age_ms / marks[2] if marks[2] else 0.0, Axis.AGE, marks[2]),
    )
    share, axis, mark = max(shares, key=lambda item: (item[2] < OFF_MARK, item[0]))
    del share
    return axis if mark < OFF_MARK else None
