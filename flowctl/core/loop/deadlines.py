"""Deadlines: thousands of "tell me when it is t" on one loop timer.

Each connection watches several clocks (age of its oldest message, stuck, close after flush, handshake), and moves them
forward all the time without ever letting them strike. A loop timer for each costs an allocation and a cancelled entry
per move. Here an owner has one entry, and moving it to a later time is one assignment: its place in the heap stays
where it was, and when that comes up, the entry is put back at the time it is really wanted ("lazy"). Only moving to
an earlier time adds to the heap; the old place is then dead, and dead places are swept out when they outnumber the
living, so the heap never holds more than twice the owners plus a constant.

Not thread-safe: it belongs to one loop thread, which `PollGroup` sees to. There is no loop in here: `arm` asks for a
call of `run_due` at a time, so that tests turn a clock by hand.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf, isfinite
from threading import get_ident
from typing import TYPE_CHECKING, Final, Protocol

from flowctl.core.loop.faults import ErrorHook, log_error, report
from flowctl.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

#: Most places looked at in one call of `run_due`. When 4000 connections were set to the same instant, input and
#: output get their turn in between; 32 looks at slow viewers, of 60 us and sometimes
#: 300, are 2 to 10 ms. With 256, 500 viewers that stalled together kept the healthy ones waiting for 90 ms.
MAX_PLACES_PER_RUN: Final = 32

#: How much later an owner is called again that sets a time that has passed while it is called: what could do nothing
#: about it now can do nothing in the next turn, and one such connection would keep a whole core busy.
AGAIN_S: Final = 0.01

#: Dead places that are not worth a sweep.
_DEAD_ALLOWANCE: Final = 64


class DeadlineOwner(Protocol):
    """Sets deadlines for itself; it has one at a time, so an object with several clocks sets the earliest."""

    def deadline_due(self, now: float) -> None:
        """Act on the deadline: `now` is at or after it. It is not set any more; set the next one here if there is."""


class _Entry:
    __slots__ = ("number", "owner", "place", "when")

    def __init__(self, owner: DeadlineOwner, when: float) -> None:
        self.owner: DeadlineOwner | None = owner  # None once removed: a dead place must not keep a connection alive
        self.when = when  # what the owner wants
        self.place = inf  # when its living place in the heap comes up; inf without one
        self.number = 0  # number of that place; 0 without one: the entry is in the batch that is being run


class Deadlines:
    __slots__ = (
        *("_arm", "_armed_at", "_called", "_dead", "_entries", "_heap", "_now", "_number", "_on_error", "thread_id"),
    )

    def __init__(self, arm: Callable[[float], None], on_error: ErrorHook | None = None) -> None:
        self._arm: Final = arm
        self._on_error: Final = log_error if on_error is None else on_error
        self._heap: list[tuple[float, int, _Entry]] = []
        self._entries: dict[int, _Entry] = {}  # by id(owner): owners need no hash, and the entry keeps the id taken
        self._number = 0
        self._dead = 0  # places in the heap that no entry owns
        #: The only thread that may set and remove; None: not checked.
        self.thread_id: int | None = None
        self._armed_at = inf  # what `arm` was last asked for; inf: nothing
        self._called: DeadlineOwner | None = None  # whose deadline is being called, and the time it was told
        self._now = -inf

    def set(self, owner: DeadlineOwner, when: float) -> None:
        """Have ``owner.deadline_due(now)`` called at `when`, instead of at any time set before.

        O(1) when moved to the same or a later time, O(log n) otherwise; it may be called any number of times.
        """
        self._check_thread()
        if not isfinite(when):
            raise LocalProtocolError(f"a deadline must be a finite time, not {when}")
        if owner is self._called and when <= self._now:
            when = self._now + AGAIN_S
        entry = self._entries.get(id(owner))
        if entry is None:
            entry = self._entries[id(owner)] = _Entry(owner, when)
        else:
            entry.when = when
            if when >= entry.place:
                return
            if entry.number:
                self._dead += 1
        self._push(entry)
        self._tidy()
        if when < self._armed_at:
            self._armed_at = when
            self._arm(when)

    def remove(self, owner: DeadlineOwner) -> bool:
        """Forget the deadline of `owner`; on return it will not be called, not even by a run in progress."""
        self._check_thread()
        entry = self._entries.pop(id(owner), None)
        if entry is None:
            return False
        entry.owner = None
        if entry.number:
            self._dead += 1
            entry.number = 0
            self._tidy()
        return True

    def run_due(self, now: float) -> int:
        """Call the owners whose time has come, earliest first, and ask to be called for the next.

        A deadline that is set during the run is not called by it, whatever its time: an owner that always sets the
        present time cannot hold up the loop, nor keep it busy, for that waits for `AGAIN_S`. At most
        `MAX_PLACES_PER_RUN` places are looked at; the rest is asked for at once.
        """
        self._armed_at = inf
        called = 0
        for entry in self._take_due(now):
            owner = entry.owner
            # Removed, or set anew, by an owner called before it.
            if owner is None or entry.number:
                continue
            del self._entries[id(owner)]
            called += 1
            self._called, self._now = owner, now
            try:
                owner.deadline_due(now)
            except BaseException as error:  # noqa: BLE001  (one owner's fault must not cost the others their deadline)
                report(self._on_error, f"deadline of {type(owner).__name__}", error)
        self._called = None
        self._tidy()
        if self._heap and self._heap[0][0] < self._armed_at:
            self._armed_at = self._heap[0][0]
            self._arm(self._armed_at)
        return called

    @property
    def count(self) -> int:
        return len(self._entries)

    def _check_thread(self) -> None:
        # Two threads in the heap would corrupt it without a sign; the check is 60 ns.
        if self.thread_id is not None and get_ident() != self.thread_id:
            raise LocalProtocolError("deadlines were touched from outside their group's thread")

    def _push(self, entry: _Entry) -> None:
        self._number += 1
        entry.number = self._number
        entry.place = entry.when
        heappush(self._heap, (entry.when, self._number, entry))

    def _take_due(self, now: float) -> list[_Entry]:
        """Take up to the limit of places that have come up; return the entries that are really due."""
        due: list[_Entry] = []
        heap = self._heap
        for _ in range(MAX_PLACES_PER_RUN):
            if not heap or heap[0][0] > now:
                break
            _, number, entry = heappop(heap)
            if entry.number != number:
                self._dead -= 1
            elif entry.when > now:
                self._push(entry)  # it was moved to a later time: here is where the laziness is paid
            else:
                entry.number = 0
                entry.place = inf
                due.append(entry)
        return due

    def _tidy(self) -> None:
        """Sweep out the dead places when they outnumber the living; O(n) after n moves, so O(1) per move."""
        if self._dead <= _DEAD_ALLOWANCE or self._dead <= len(self._entries):
            return
        self._heap = [place for place in self._heap if place[2].number == place[1]]
        heapify(self._heap)
        self._dead = 0
