"""The loop side of a poll group: calls, descriptors, the deadline timer, rounds of deferred jobs, and their timing.

The loop is asyncio's or uvloop's and is used for three things: readiness of descriptors (no transports: they hide
EAGAIN), `call_soon`, and one timer for all deadlines. A round of deferred jobs is a `call_soon` callback; when it
leaves work, the next one is queued at once, so that the loop polls without sleeping, and descriptors that became
ready get their turn in between.

Every handler is run through `_guarded`: it is timed, and whatever it raises is reported and contained.
"""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from flowctl.errors import ClosedError, InternalError, LocalProtocolError
from flowctl.loop.deadlines import Deadlines
from flowctl.loop.faults import report
from flowctl.loop.loadmeter import LoadMeter
from flowctl.loop.locks import OwnedLock
from flowctl.loop.processor import MAX_JOBS_PER_ROUND, DeferredProcessor
from flowctl.loop.watches import FdWatches

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from flowctl.loop.faults import ErrorHook
    from flowctl.loop.watches import HasFileno

ROUND_S: Final = 0.008
"""How long a round of jobs may go on before descriptors and timers get their turn: jobs are of some 60 us, but one that
goes on with the input of a peer that sends nothing but work takes 4 ms."""


class LoopCore:
    """What runs on one loop thread; `PollGroup` adds the life of the thread and the pollables.

    Args:
        name: of the group, for reports.
        clock: monotonic seconds.
        on_error: told of every exception of a handler; see `flowctl.loop.faults`.
    """

    __slots__ = (
        "_depth",
        "_error_count",
        "_lock",
        "_loop",
        "_meter",
        "_on_error",
        "_timer",
        "_watches",
        "clock",
        "deadlines",
        "name",
        "processor",
        "thread_id",
    )

    def __init__(self, name: str, clock: Callable[[], float], on_error: ErrorHook) -> None:
        self.name: Final = name
        self.clock: Final = clock
        self._on_error: Final = on_error
        self._lock: Final = OwnedLock()  # a leaf: nothing else is locked or called under it
        self._error_count = 0  # guarded by _lock
        #: Runs the jobs of the registrations placed here.
        self.processor: Final = DeferredProcessor(self._wake, self._report)
        #: One deadline per owner; this group's thread only.
        self.deadlines: Final = Deadlines(self._arm_timer, self._report)
        #: Identifier of the group's thread; None until its loop runs.
        self.thread_id: int | None = None
        # Set once, before any other thread is let in:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watches: FdWatches | None = None
        # Only for the group's thread:
        self._meter: Final = LoadMeter(clock())
        self._timer: asyncio.TimerHandle | None = None  # the one timer, for `deadlines`
        self._depth = 0  # handlers on the stack

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop.

        Raises:
            LocalProtocolError: the group was not started.
        """
        if self._loop is None:
            raise LocalProtocolError(f"poll group {self.name!r} was not started")
        return self._loop

    def in_thread(self) -> bool:
        """Tell whether the caller is on the group's thread."""
        return threading.get_ident() == self.thread_id

    def now(self) -> float:
        """Return the time on the group's clock, in seconds; any thread."""
        return self.clock()

    def processor_share(self) -> float:
        """Return the processor time of the thread over the time its handlers took, 0 to 1, of late; any thread.

        Time on the group's clock times this is about the processor time that was used in it, without a system call.
        """
        return self._meter.processor_share

    def busy_fraction(self) -> float:
        """Return the share of time, 0 to 1, that handlers ran in the last seconds; any thread."""
        return self._meter.busy_fraction(self.clock())

    def gather_pause_s(self) -> float:
        """Return for how long input that may wait does at present, in seconds; any thread."""
        return 0.0 if self._watches is None else self._watches.gather_pause_s

    def strained(self) -> bool:
        """Return whether the thread had no room a moment ago: what is late may be late by its fault; any thread."""
        return self._meter.strained(self.clock())

    def report(self, where: str, error: BaseException) -> None:
        """Count and report an exception that a handler raised; any thread, never raises.

        Args:
            where: what was being done, for example ``"received of connection 7"``.
            error: what it raised; what is no `Exception` is handed to the hook as one.
        """
        self._report(where, error)

    # --- work on the group's thread ------------------------------------------------------------------------------

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call `callback` with `args` on the group's thread, soon, in the order of the calls; any thread.

        Raises:
            LocalProtocolError: the group was not started.
            ClosedError: its loop is closed.
        """
        self._post(self._guarded, callback, *args)

    def call_later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Call `callback` with `args` after `delay_s` seconds; group's thread only.

        For the few timers of a group (a flush interval); connections use `deadlines`.

        Returns:
            A handle with ``cancel()``.

        Raises:
            LocalProtocolError: called on another thread.
        """
        self._check_thread("call_later")
        return self.loop.call_later(delay_s, self._guarded, callback, *args)

    def watch_input(self, source: int | HasFileno, callback: Callable[[], Any], *, gather: bool = False) -> None:
        """Call `callback` on each turn while `source` is readable; group's thread only. Replaces an earlier callback.

        Args:
            source: the socket itself: uvloop then keeps its number open until it is unwatched. Given a bare number
                that is closed too early, uvloop aborts the process.
            callback: run with no lock held.
            gather: whether input may wait for up to 36 ms where the thread is busy with such input, so that messages
                which are that close together are read at once.

        Raises:
            LocalProtocolError: called on another thread.
            ClosedError: `source` is closed.
        """
        self._watches_here("watch_input").watch_input(source, callback, gather=gather)

    def watch_end(self, source: int | HasFileno, callback: Callable[[bool], Any]) -> None:
        """Watch `source`, which is not read at present, for the end of its peer instead of for input.

        Costs nothing until it comes. Else as `watch_input`, which replaces it, and `unwatch_input`, which ends it.
        Where the system has no epoll nothing is ever told.

        Args:
            source: see `watch_input`.
            callback: called once with False when the peer has ended its stream, and once with True when nothing
                passes any more in either direction.
        """
        self._watches_here("watch_end").watch_end(source, callback)

    def watch_output(self, source: int | HasFileno, callback: Callable[[], Any]) -> None:
        """Call `callback` on each turn while `source` is writable; else as `watch_input`."""
        self._watches_here("watch_output").watch_output(source, callback)

    def unwatch_input(self, source: int | HasFileno) -> bool:
        """Stop watching `source` for input or the peer's end; no callback runs any more. Group's thread only.

        Call it before the socket is closed, for its number may belong to another socket the moment after. What is
        not watched, or closed already, is no error.

        Returns:
            True if it was watched.
        """
        return self._watches_here("unwatch_input").unwatch_input(source)

    def unwatch_output(self, source: int | HasFileno) -> bool:
        """Stop watching `source` for output; else as `unwatch_input`."""
        return self._watches_here("unwatch_output").unwatch_output(source)

    # --- inner steps ---------------------------------------------------------------------------------------------

    def _use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watches = FdWatches(
            loop, self._guarded, self._report, clock=self.clock, processor_share=self.processor_share
        )

    def _enter(self) -> None:
        """First step on the group's thread; a job scheduled before it was not heard by `_wake`."""
        self.thread_id = self.deadlines.thread_id = threading.get_ident()
        self.loop.call_soon(self._round)

    def _post(self, callback: Callable[..., Any], *args: Any) -> None:
        """Queue a callback on the loop; the loop keeps the order of all calls, from whatever thread."""
        loop = self._loop or self.loop  # the property says what is wrong where there is none
        try:
            if threading.get_ident() == self.thread_id:
                loop.call_soon(callback, *args)  # spares the write to the wake-up pipe
            else:
                loop.call_soon_threadsafe(callback, *args)
        except RuntimeError as error:
            raise ClosedError(f"the loop of poll group {self.name!r} is closed") from error

    def _guarded(self, callback: Callable[..., Any], *args: Any) -> bool:
        """Run a handler: time it, report and contain what it raises; True if that is nothing."""
        began = self.clock()
        self._depth += 1
        try:
            callback(*args)
        except BaseException as error:  # noqa: BLE001  (one connection's fault must not cost the others their thread)
            self._report(getattr(callback, "__qualname__", "handler"), error)
            return False
        else:
            return True
        finally:
            self._depth -= 1
            if not self._depth:
                self._meter.turn(began, self.clock())

    def _report(self, where: str, error: BaseException) -> None:
        with self._lock:
            self._error_count += 1
        report(self._on_error, f"{self.name}: {where}", error)
        if isinstance(error, KeyboardInterrupt) and self._loop is not None and _is_main_thread():
            # Ctrl-C where a group runs on the main thread: it ends his loop, but between two handlers.
            with suppress(RuntimeError):
                self._loop.call_soon(_raise, error)

    def _loop_exception(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take what asyncio would log: failures of tasks and of callbacks that are not ours."""
        error = context.get("exception")
        message = context.get("message", "event loop")
        self._report(message, error if isinstance(error, BaseException) else RuntimeError(message))

    def _wake(self) -> None:
        if self._loop is None:
            return  # not started: `_enter` begins with a round
        with suppress(ClosedError):  # stopped: the jobs stay pending with their registrations
            self._post(self._round)

    def _round(self) -> None:
        self._guarded(self._run_round)

    def _run_round(self) -> None:
        ends_at = self.clock() + ROUND_S
        if self.processor.run_round(MAX_JOBS_PER_ROUND, lambda: self.clock() >= ends_at):
            self.loop.call_soon(self._round)  # the poll in between does not sleep, because this is queued

    def _arm_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Rounded up to the next millisecond, the resolution of uvloop and epoll: rounded down it would strike too
        # early and spin until the time has really come.
        delay_s = math.ceil(max(0.0, when - self.clock()) * 1000) / 1000
        self._timer = self.loop.call_later(delay_s, self._deadlines_due)

    def _deadlines_due(self) -> None:
        self._timer = None
        self._guarded(self.deadlines.run_due, self.clock())

    def _watches_here(self, what: str) -> FdWatches:
        self._check_thread(what)
        if self._watches is None:  # thread_id is set after it, so this thread would not have come so far
            raise InternalError("a loop thread without a loop")
        return self._watches

    def _check_thread(self, what: str) -> None:
        if threading.get_ident() != self.thread_id:
            raise LocalProtocolError(f"{what} of poll group {self.name!r} was called on another thread")


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _raise(error: BaseException) -> None:
    raise error
