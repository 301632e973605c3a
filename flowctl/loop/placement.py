"""What a poll group knows about a connection that lives on it, and what it tells about itself."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Final, Protocol

from flowctl.loop.faults import report

if TYPE_CHECKING:
    from flowctl.deferred import Registration
    from flowctl.loop.faults import ErrorHook
    from flowctl.loop.processor import DeferredStatistics
    from flowctl.pollgroup import PollGroup

#: Load of a pollable that does not say, or says nonsense: one connection.
DEFAULT_LOAD: Final = 1.0


class Pollable(Protocol):
    """A connection, or anything else that lives on the thread of one poll group at a time.

    It may also have a method ``load() -> float``: how much work it is, in units of an ordinary connection (a
    publisher with many viewers is more). It is asked when it is placed and at each rebalancing, from any thread, so
    it must only read counters. Without it every pollable weighs 1.

    And it may have a method ``movable() -> bool``, asked from any thread and again on its own thread: False leaves it
    where it is, because something of it (a coroutine) runs on this thread's loop and cannot be taken along.
    """

    def attached(self, group: PollGroup) -> None:
        """Start living on `group`, on its thread: watch descriptors, set deadlines. Jobs run only after this."""

    def detached(self, group: PollGroup) -> None:
        """Stop living on `group`, on its thread: unwatch descriptors, remove deadlines.

        Called once for each placement, also when ``attached`` was not reached because the pollable was removed or
        the group stopped first, or when ``attached`` raised. If ``group.state`` is not RUNNING the group is
        stopping and nothing else will own the pollable: it should close itself.
        """


class Placement:
    """A pollable's place on one group; made anew for each group it lives on."""

    __slots__ = ("attached", "gone", "placed_at", "pollable", "registration", "weight")

    def __init__(self, pollable: Pollable, registration: Registration, weight: float, placed_at: float) -> None:
        self.pollable: Final = pollable
        self.registration: Final = registration
        self.weight = weight  # its load when last asked; changes under the group's lock
        self.placed_at: Final = placed_at  # seconds on the group's clock
        self.attached = False  # `attached` was called; the group's thread only
        self.gone = False  # removed or moved away: a queued attach must not happen; set under the group's lock


@dataclass(frozen=True, slots=True, kw_only=True)
class PollGroupStatistics:
    """One group at one moment; the figures of the running turn may be a turn apart."""

    name: str
    pollables: int  #: placed here, whether attached yet or not
    weight: float  #: sum of their loads when last asked
    busy_fraction: float  #: share of time, 0 to 1, that handlers ran, smoothed over 5 s
    turns: int  #: handlers run: readiness, rounds of deferred jobs, deadlines, `call_soon`
    longest_turn_s: float  #: the longest of them since the start
    errors: int  #: exceptions of handlers, contained
    bytes_in: int  #: received by its connections
    bytes_out: int  #: sent by its connections
    watched: int  #: file descriptors watched
    deadlines: int  #: owners with a deadline set
    deferred: DeferredStatistics  #: its deferred jobs


def load_of(pollable: Pollable, on_error: ErrorHook) -> float:
    """Return what `pollable` says its load is; `DEFAULT_LOAD` if it does not, or raises, or says nonsense."""
    load = getattr(pollable, "load", None)
    if load is None:
        return DEFAULT_LOAD
    try:
        value = float(load())
    except BaseException as error:  # noqa: BLE001  (a wrong figure must not cost a connection its place)
        report(on_error, f"load of {type(pollable).__name__}", error)
        return DEFAULT_LOAD
    return value if isfinite(value) and value >= 0 else DEFAULT_LOAD


def is_movable(pollable: Pollable, on_error: ErrorHook) -> bool:
    """Return whether `pollable` may go to another group; False if it raises."""
    movable = getattr(pollable, "movable", None)
    if movable is None:
        return True
    try:
        return bool(movable())
    except BaseException as error:  # noqa: BLE001  (as for the load)
        report(on_error, f"movable of {type(pollable).__name__}", error)
        return False
