"""A clock that moves only when told; stand-ins for a connection and its thread, turned by hand."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from math import inf
from typing import Any, Final, TypeVar

from flowctl.core.flow.sharedstall import SharedStall, StallSpan
from flowctl.errors import LocalProtocolError
from flowctl.reasons import CloseReason
from flowctl.sender import FlushResult, Sender

_T = TypeVar("_T")
MOST_CALLS: Final = 100_000
"""Calls in one run of a group: more is an endless loop, and a test that reports it is better than one that hangs."""


class ManualClock:
    """Time for tests, in seconds; call it to read it.

    Args:
        start: first reading.
    """

    __slots__ = ("_now",)

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward and return the new time.

        Raises:
            LocalProtocolError: `seconds` is negative; time never runs backwards.
        """
        if seconds < 0:
            raise LocalProtocolError(f"a clock cannot be advanced by {seconds} s")
        self._now += seconds
        return self._now


class ManualGroup:
    """A poll group without thread and loop: what is asked for is done by `run`.

    Args:
        clock: the time.

    Attributes:
        busy: how busy the thread claims to be, 0 to 1.
        gather_s: for how long the input of publishers claims to have waited, in seconds.
        is_strained: pretend that the thread had no room a moment ago.
        stalls_said: what `flowctl.core.flow.sharedstall` had to say.
    """

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self._calls: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self.bytes_out = 0
        self.busy = 0.0
        self.gather_s = 0.0
        self.is_strained = False
        self.stalls_said: list[tuple[bool, int, int, float]] = []
        self.stall = SharedStall(lambda *said: self.stalls_said.append(said))

    def now(self) -> float:
        return self.clock()

    def in_thread(self) -> bool:
        return True

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        self.call_later(0.0, callback, *args)

    def call_later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> None:
        heapq.heappush(self._calls, (self.clock() + delay_s, next(self._numbers), callback, args))

    def processor_share(self) -> float:
        return 1.0

    def gather_pause_s(self) -> float:
        return self.gather_s

    def busy_fraction(self) -> float:
        return self.busy

    def strained(self) -> bool:
        return self.is_strained

    def run(self, seconds: float = 0.0) -> None:
        """Advance the time, stopping at each call that is due on the way.

        Raises:
            AssertionError: there are always more calls due.
        """
        end = self.clock() + seconds
        for _ in range(MOST_CALLS):
            if not self._calls or self._calls[0][0] > end:
                break
            when, _number, callback, args = heapq.heappop(self._calls)
            self.clock.advance(max(0.0, when - self.clock()))
            callback(*args)
        else:
            raise AssertionError(f"{MOST_CALLS} calls without an end in sight: something always asks for another")
        self.clock.advance(max(0.0, end - self.clock()))


class ManualHost:
    """What a Sender needs of its connection, on a `ManualGroup`.

    Attributes:
        group: the group.
        sender: the Sender; set it after making it.
        wants_writable: whether the Sender asked to be called when the kernel can take more.
        closed: every (reason, details) that the Sender ended with.
        failures: every (where, exception) of the application's handlers.
        ledger_notes: how often the ledger grew.
        foreign: pretend that calls come from another thread.
        unsent_limit_bytes: what the kernel shall take ahead, as the Sender asked; 0 is as usual.
        unacknowledged: tells what the kernel has taken and the peer has not acknowledged. None: nothing is.
    """

    def __init__(self, group: ManualGroup | None = None) -> None:
        self.group = group or ManualGroup()
        self.sender: Sender | None = None
        self.wants_writable = False
        self.closed: list[tuple[CloseReason, str]] = []
        self.failures: list[tuple[str, BaseException]] = []
        self.ledger_notes = 0
        self.foreign = False
        self.unsent_limit_bytes = 0
        self.unacknowledged: Callable[[], int] | None = None
        self._flush_requested = False
        self._due = inf  # the earliest time for which a tick is on its way

    def now(self) -> float:
        return self.group.now()

    def in_thread(self) -> bool:
        return not self.foreign

    def wrote(self, size_bytes: int) -> None:
        self.group.bytes_out += size_bytes

    def kernel_bytes(self) -> int:
        return self.unacknowledged() if self.unacknowledged is not None else 0

    def limit_unsent(self, size_bytes: int) -> None:
        self.unsent_limit_bytes = size_bytes

    def strained(self) -> bool:
        return self.group.strained()

    def shared_stall(self) -> StallSpan | None:
        return self.group.stall.span(self.group.now())

    def request_flush(self) -> None:
        """Flush in the group's next run."""
        if not self._flush_requested:
            self._flush_requested = True
            self.group.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_requested = False
        if self.sender is not None:
            self._in_thread(self.sender.flush)

    def _in_thread(self, call: Callable[[], _T]) -> _T:
        foreign, self.foreign = self.foreign, False  # this is the owning thread, in any case
        try:
            return call()
        finally:
            self.foreign = foreign

    def want_writable(self, wanted: bool) -> None:  # noqa: FBT001 - the signature of the protocol
        self.wants_writable = wanted

    def set_deadline(self, when: float) -> None:
        """Tick in the group's run when the time has come, unless a tick is due before."""
        if when < self._due:
            self._due = when
            self.group.call_later(max(0.0, when - self.group.now()), self._tick, when)

    def _tick(self, when: float) -> None:
        if when != self._due:
            return  # an earlier time was asked for since
        self._due = inf
        if self.sender is not None:
            self._in_thread(self.sender.tick)

    def terminate(self, reason: CloseReason, details: str) -> None:
        self.closed.append((reason, details))

    def ledger_grew(self) -> None:
        self.ledger_notes += 1

    def handler_failed(self, where: str, error: BaseException) -> None:
        self.failures.append((where, error))

    def poll_writable(self) -> FlushResult | None:
        """Tell the Sender that the kernel can take more, if it asked to be told."""
        if not self.wants_writable or self.sender is None:
            return None
        return self._in_thread(self.sender.writable)
