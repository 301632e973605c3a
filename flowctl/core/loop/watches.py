"""Which descriptors a loop thread watches, and protection against the oldest traps of readiness.

Theory of operation. Where the system has epoll, a thread has one of its own, which its loop watches as a single
descriptor: when it is ready, `FdWatches` asks it which of ours are, at most `MOST_PER_TURN` at a time, and calls their
callbacks. Registering each descriptor with the loop instead costs a handle, a context, a poll object of Cython's and
one of libuv's: 650 bytes per connection on uvloop that no connection needs, and 5 us to set up. Elsewhere the loop
watches each descriptor, as loops do.

A descriptor number outlives its socket. If a socket is closed while it is watched, the kernel forgets the watch and
the loop does not. What follows was tried on asyncio (CPython 3.11) and uvloop 0.23, without an epoll of our own:

- The next socket with the same number inherits the watch: asyncio modifies a registration that does not exist, uvloop
  believes that it is polling already. On either loop the new connection never hears of input, without any error.
- If the close comes before the loop has polled once, uvloop's libuv calls ``abort()``: epoll_ctl fails with an error
  that it does not expect, and the process with all its connections is gone.

A connection that is not read may lose its peer all the same. It is then watched for that alone (`FdWatches.watch_end`):
epoll tells of a reset (EPOLLERR, EPOLLHUP) whatever it was asked for, and of the end of the peer's stream (EPOLLRDHUP)
when it is asked. It goes on telling, so each is heard once. Loops know neither: where the system has no epoll, a peer's
end is noticed when the connection is read or written to again.

Input that may wait is *gathered*: it has an epoll of its own, which is not asked again for up to `GATHER_S` after
something was found. Messages that are that close together then share a wake-up of the thread, a read, a publication
and a write, which for a stream with few viewers is most of what a message costs. The pause follows the share of the
thread's time that such reading takes: a few streams are read at once.

A watch for output that is taken up again with nearly every write *rests* in between: a system call to end it is made
only where the kernel tells of room meanwhile.

Against the first, what a number stood for is remembered, and a watch left behind is removed, and reported as the bug
it is, before the number is watched anew. Against the second helps only that the number stays open: uvloop puts off the
close of a *socket object* that it watches until it is unwatched. So callers hand in the socket itself; a bare number is
accepted for pipes and the like, at the caller's own risk.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from flowctl.core.loop.loadmeter import LoadMeter
from flowctl.errors import ClosedError, InternalError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from flowctl.core.loop.faults import ErrorHook

#: Descriptors served before the loop gets its turn; the kernel goes on with the others next time.
MOST_PER_TURN: Final = 256

#: Longest pause between two looks at gathered input: with what reading and writing take no more than the 40 ms at
#: which a fan-out of many viewers flushes.
GATHER_S: Final = 0.036

#: Up to the first share of the thread's time gathered input is read at once, from the second on after the whole pause.
#: Between them more reading makes a longer pause, which makes less reading, so it settles.
_GATHER_FROM: Final = 0.02
_GATHER_FULLY: Final = 0.06

#: A shorter pause is none: loops count in whole milliseconds.
_LEAST_PAUSE_S: Final = 0.001

#: Gathered descriptors read before what they published is written, and everything else gets its turn.
GATHERED_PER_TURN: Final = 32

_HAS_EPOLL: Final = hasattr(select, "epoll")

# What is watched of a descriptor, and what was found.
_INPUT: Final = 1
_OUTPUT: Final = 2
_BOTH: Final = _INPUT | _OUTPUT
_GATHERED: Final = 4
"""Flag of input that may wait."""
_ENDED: Final = 8
"""Flag of the end of the peer's stream."""
_BROKEN: Final = 16
"""Flag of a broken connection: nothing passes any more in either direction."""
_EVERYTHING: Final = _BOTH | _BROKEN

_Ready: TypeAlias = "Callable[[int, int], object]"


class HasFileno(Protocol):
    """A socket, or anything else with a descriptor."""

    def fileno(self) -> int:
        """Return the descriptor's number, -1 when closed."""


class _Poller(Protocol):
    """Finds out which descriptors are ready; raises OSError or ValueError for what cannot be watched."""

    @property
    def gather_pause_s(self) -> float:
        """For how long input that may wait does, in seconds."""

    def change(self, fd: int, source: int | HasFileno, before: int, after: int) -> None:
        """Watch `source`, whose number is `fd`, for `after` instead of `before`; 0: not at all."""

    def close(self) -> None:
        """Stop watching; idempotent."""


def gather_pause_s(share: float) -> float:
    """Return the pause between two looks at gathered input that takes this share of a thread's time, 0 to 1."""
    pause_s = GATHER_S * (share - _GATHER_FROM) / (_GATHER_FULLY - _GATHER_FROM)
    return 0.0 if pause_s < _LEAST_PAUSE_S else min(pause_s, GATHER_S)


class _Gatherer:
    """The epoll for input that may wait: watched by the loop while there is nothing, asked after a pause otherwise."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ready: _Ready,
        clock: Callable[[], float],
        processor_share: Callable[[], float],
    ) -> None:
        self._loop: Final = loop
        self._ready: Final = ready
        self._clock: Final = clock
        self._share: Final = processor_share
        self._meter: Final = LoadMeter(clock())  # its handlers are the looks
        self._epoll: Final = select.epoll()
        self._count = 0  # descriptors
        self._left = 0  # looks go on without a pause until so many were read, each once; 0: between two pauses
        self._since = 0.0  # when the first of these looks began
        self._timer: asyncio.TimerHandle | None = None
        self._watched = False
        self.pause_s = 0.0  # between two looks, now; any thread
        self._watch(wanted=True)

    def change(self, fd: int, *, watched: bool) -> None:
        if watched:
            self._epoll.register(fd, select.EPOLLIN)
            self._count += 1
        else:
            self._count -= 1
            self._epoll.unregister(fd)

    def close(self) -> None:
        if not self._epoll.closed:
            self._watch(wanted=False)
            if self._timer is not None:
                self._timer.cancel()
            self._epoll.close()

    def _watch(self, *, wanted: bool) -> None:
        if wanted is not self._watched:
            self._watched = wanted
            if wanted:
                self._loop.add_reader(self._epoll.fileno(), self._read_gathered)
            else:
                self._loop.remove_reader(self._epoll.fileno())

    def _read_gathered(self) -> None:
        """Have read what has come, and look again at once, after a pause, or when the loop says so."""
        self._timer = None
        began = self._clock()
        if self._left <= 0:
            self._left, self._since = self._count, began
        ready = self._epoll.poll(0, GATHERED_PER_TURN)
        for fd, _ in ready:
            self._ready(fd, _INPUT)
        if self._epoll.closed:
            return  # by a handler
        now = self._clock()
        self._meter.count_turn(began, now)
        self.pause_s = gather_pause_s(self._meter.busy_fraction(now) * self._share())
        # A peer that was read a moment ago may have more already: without a count there would be no end, and no pause.
        self._left = self._left - len(ready) if len(ready) == GATHERED_PER_TURN else 0
        rest_s = self._since + self.pause_s - now if ready and self._left <= 0 else 0.0
        self._watch(wanted=rest_s < _LEAST_PAUSE_S)
        if not self._watched:
            self._timer = self._loop.call_later(rest_s, self._read_gathered)


class _EpollPoller:
    """An epoll of our own, watched by the loop, and one for input that may wait, made for the first."""

    __slots__ = ("_clock", "_epoll", "_gatherer", "_loop", "_masks", "_ready", "_share")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ready: _Ready,
        clock: Callable[[], float],
        processor_share: Callable[[], float],
    ) -> None:
        self._loop: Final = loop
        self._ready: Final = ready
        self._clock: Final = clock
        self._share: Final = processor_share
        self._gatherer: _Gatherer | None = None
        events = ((_INPUT, select.EPOLLIN), (_OUTPUT, select.EPOLLOUT), (_ENDED, select.EPOLLRDHUP))
        self._masks: Final = [sum(event for bit, event in events if wanted & bit) for wanted in range(2 * _BROKEN)]
        self._epoll: Final = select.epoll()
        loop.add_reader(self._epoll.fileno(), self._poll)

    @property
    def gather_pause_s(self) -> float:
        return 0.0 if self._gatherer is None else self._gatherer.pause_s

    def change(self, fd: int, source: int | HasFileno, before: int, after: int) -> None:
        del source
        if (before ^ after) & _GATHERED:
            if self._gatherer is None:
                self._gatherer = _Gatherer(self._loop, self._ready, self._clock, self._share)
            self._gatherer.change(fd, watched=bool(after & _GATHERED))
        before, after = before & ~_GATHERED, after & ~_GATHERED
        if before == after:
            return
        if not after:
            self._epoll.unregister(fd)
        elif before:
            self._epoll.modify(fd, self._masks[after])
        else:
            self._epoll.register(fd, self._masks[after])

    def close(self) -> None:
        if self._gatherer is not None:
            self._gatherer.close()
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    def _poll(self) -> None:
        ready = self._ready
        for fd, events in self._epoll.poll(0, MOST_PER_TURN):
            if events & ~(select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP):
                ready(fd, _EVERYTHING)  # hung up, or an error: reading or writing tells
            elif events & select.EPOLLRDHUP:
                ready(fd, _ENDED | (events & select.EPOLLOUT and _OUTPUT))
            else:
                ready(fd, (events & select.EPOLLIN and _INPUT) | (events & select.EPOLLOUT and _OUTPUT))


class _LoopPoller:
    """The loop itself, where the system has no epoll."""

    __slots__ = ("_loop", "_ready")

    def __init__(self, loop: asyncio.AbstractEventLoop, ready: _Ready) -> None:
        self._loop: Final = loop
        self._ready: Final = ready

    @property
    def gather_pause_s(self) -> float:
        return 0.0

    def change(self, fd: int, source: int | HasFileno, before: int, after: int) -> None:
        loop = self._loop
        # Loops have no pause to offer: what may wait is read at once.
        before, after = (mask & _BOTH | (mask & _GATHERED and _INPUT) for mask in (before, after))
        if after & ~before & _INPUT:
            loop.add_reader(source, self._ready, fd, _INPUT)
        if after & ~before & _OUTPUT:
            loop.add_writer(source, self._ready, fd, _OUTPUT)
        if before & ~after & _INPUT:
            loop.remove_reader(fd)
        if before & ~after & _OUTPUT:
            loop.remove_writer(fd)

    def close(self) -> None:
        pass


class _Watch:
    __slots__ = ("inode", "input", "output", "reads", "rests", "source")

    def __init__(self, source: int | HasFileno, inode: int) -> None:
        self.source: Final = source
        self.inode: Final = inode
        self.input: Callable[..., Any] | None = None
        self.reads = _INPUT  # or input that may wait, or the peer's end. Only one of them: reading shows the end
        self.output: Callable[[], Any] | None = None
        self.rests = False  # output is watched, but nobody is told

    @property
    def wanted(self) -> int:
        flags = 0 if self.input is None else self.reads
        return flags if self.output is None else flags | _OUTPUT

    def left_behind(self, fd: int) -> bool:
        """Return whether number `fd` stands for something else by now."""
        source = self.source
        return os.fstat(fd).st_ino != self.inode if isinstance(source, int) else source.fileno() != fd


class FdWatches:
    """The descriptors watched on one loop; only for that loop's thread."""

    __slots__ = ("_on_error", "_poller", "_run", "_watches")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        run: Callable[..., Any],
        on_error: ErrorHook,
        *,
        clock: Callable[[], float],
        processor_share: Callable[[], float],
    ) -> None:
        self._run: Final = run
        self._on_error: Final = on_error
        self._watches: dict[int, _Watch] = {}
        self._poller: Final[_Poller] = (
            _EpollPoller(loop, self._ready, clock, processor_share) if _HAS_EPOLL else _LoopPoller(loop, self._ready)
        )

    def watch_input(self, source: int | HasFileno, callback: Callable[[], Any], *, gather: bool = False) -> None:
        """Call `callback` while `source` is readable (level-triggered); see `PollGroup.watch_input`."""
        self._read(source, callback, _GATHERED if gather else _INPUT)

    def watch_end(self, source: int | HasFileno, callback: Callable[[bool], Any]) -> None:
        self._read(source, callback, _ENDED | _BROKEN)

    def _read(self, source: int | HasFileno, callback: Callable[..., Any], reads: int) -> None:
        fd, watch = self._watch(source)
        before, watch.input, watch.reads = watch.wanted, callback, reads
        self._want(fd, source, before, watch.wanted)

    def watch_output(self, source: int | HasFileno, callback: Callable[[], Any]) -> None:
        watch = self._watches.get(self._number(source))
        if watch is not None and watch.rests and watch.source is source:
            watch.output, watch.rests = callback, False
            return
        fd, watch = self._watch(source)
        before, watch.output, watch.rests = watch.wanted, callback, False
        self._want(fd, source, before, watch.wanted)

    def rest_output(self, source: int | HasFileno) -> None:
        """Call nobody until `watch_output` is called again; the kernel hears of it when it tells of room meanwhile."""
        watch = self._watches.get(self._number(source))
        if watch is not None and watch.output is not None:
            watch.rests = True

    def unwatch_input(self, source: int | HasFileno) -> bool:
        fd = self._number(source)
        watch = self._watches.get(fd)
        if watch is None or watch.input is None:
            return False
        before, watch.input = watch.wanted, None
        self._release(fd, watch, before)
        return True

    def unwatch_output(self, source: int | HasFileno) -> bool:
        fd = self._number(source)
        watch = self._watches.get(fd)
        if watch is None or watch.output is None:
            return False
        before, watch.output, watch.rests = watch.wanted, None, False
        self._release(fd, watch, before)
        return True

    @property
    def gather_pause_s(self) -> float:
        return self._poller.gather_pause_s

    def clear(self) -> None:
        for fd in list(self._watches):
            self._drop(fd)
        self._poller.close()

    def __len__(self) -> int:
        return len(self._watches)

    def _ready(self, fd: int, flags: int) -> None:
        """Call the callbacks that watch `fd`; looked up for each, because the callback before may have unwatched it."""
        watch = self._watches.get(fd)
        if watch is not None and watch.input is not None:
            if not watch.reads & (_ENDED | _BROKEN):
                if flags & _INPUT:
                    self._run(watch.input)
            elif flags & watch.reads:
                self._end_found(fd, watch, watch.input, broken=bool(flags & _BROKEN))
            watch = self._watches.get(fd)
        if watch is not None and watch.output is not None and flags & _OUTPUT:
            if watch.rests:
                self.unwatch_output(watch.source)
            else:
                self._run(watch.output)

    def _end_found(self, fd: int, watch: _Watch, callback: Callable[[bool], Any], *, broken: bool) -> None:
        """Tell of an end once: the kernel would say it again with each poll."""
        before = watch.wanted
        if broken:
            watch.input = None
            self._release(fd, watch, before)
        else:
            watch.reads = _BROKEN
            self._lessen(fd, watch, before)
        self._run(callback, broken)

    def _number(self, source: int | HasFileno) -> int:
        """Return the number of `source`, also of a socket that was closed while it was watched."""
        if isinstance(source, int):
            return source
        fd = source.fileno()
        if fd >= 0:
            return fd
        # Closed too early, a bug of the caller: here it may cost a search.
        return next((number for number, watch in self._watches.items() if watch.source is source), -1)

    def _watch(self, source: int | HasFileno) -> tuple[int, _Watch]:
        """Return number and record of `source`, after removing what a socket closed before has left behind."""
        fd = self._number(source)
        watch = self._watches.get(fd)
        try:
            closed = not isinstance(source, int) and source.fileno() < 0
            inode = os.fstat(fd).st_ino if isinstance(source, int) else 0
            stale = watch is not None and not closed and watch.left_behind(fd)
        except (OSError, OverflowError) as error:
            self._drop(fd)
            raise ClosedError(f"cannot watch descriptor {fd}: {error}") from error
        if closed:
            self._drop(fd)
            raise ClosedError(f"cannot watch descriptor {fd}: it is closed")
        if stale:
            self._drop(fd)
            self._on_error(
                f"watch of descriptor {fd}", InternalError("the socket was closed while it was still watched")
            )
            watch = None
        if watch is None:
            watch = self._watches[fd] = _Watch(source, inode)
        return fd, watch

    def _want(self, fd: int, source: int | HasFileno, before: int, after: int) -> None:
        if before == after:
            return
        try:
            self._poller.change(fd, source, before, after)
        except (OSError, ValueError) as error:
            self._drop(fd)
            raise ClosedError(f"cannot watch descriptor {fd}: {error}") from error

    def _release(self, fd: int, watch: _Watch, before: int) -> None:
        if not watch.wanted:
            del self._watches[fd]
        self._lessen(fd, watch, before)

    def _drop(self, fd: int) -> None:
        watch = self._watches.pop(fd, None)
        if watch is not None:
            before, watch.input, watch.output = watch.wanted, None, None
            self._lessen(fd, watch, before)

    def _lessen(self, fd: int, watch: _Watch, before: int) -> None:
        # OSError, when the socket is closed already: the kernel has forgotten it, and with it what was watched.
        # ValueError: the epoll is closed, the group has stopped.
        with suppress(OSError, ValueError):
            self._poller.change(fd, watch.source, before, watch.wanted)
