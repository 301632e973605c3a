"""The way of log lines out of the process: writing one never waits, and one peer gets no more than is useful.

A log is written to a pipe or a terminal that somebody else reads, or does not. `LineWriter` keeps lines in a bounded
queue and writes them on a thread of its own; what finds the queue full is dropped, and the count is told as soon as
something can be written again. `LineLimiter` (pure) is a token bucket per address, so that one peer can neither fill
the queue nor use up processor time with lines about itself; what it keeps back is counted and told too.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from flowctl.core.outcomes.bucket import TokenBucket

MOST_QUEUED_BYTES: Final = 1024 * 1024
"""Most bytes of lines that wait: some 5,000 lines, seconds of a busy log. A reader slower than that does not read."""
LINES_PER_S: Final = 20.0
"""Lines per second of one address in the long run: more than a person reads, 2 ms of processor time."""
LINES_AT_ONCE: Final = 200
"""Lines of one address at once: what the 64 connections that it may have by default say when they come together."""
RESUME_AFTER: Final = 20.0
"""Lines that an address which was kept back must have saved up, so that the count is told once a second."""
MOST_ADDRESSES: Final = 4096
"""Addresses remembered; the longest silent one is forgotten first, which gives a new address at most its burst."""
_BATCH_BYTES: Final = 64 * 1024
"""Bytes written by one system call: what a pipe holds by default."""
_LINE_BREAK: Final = ord("\n")


@dataclass(eq=False, slots=True)
class _Bucket(TokenBucket):
    kept_back: int = 0


class LineLimiter:
    """Decides which lines are written: a token bucket per key. Not thread-safe.

    The one use is with the address of a peer as the key, or the event where a line is about no peer.
    """

    __slots__ = ("_buckets", "_forgotten")

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._forgotten = 0

    def allows(self, key: str, now: float) -> bool:
        """Return whether a line about `key` is to be written; count it if not."""
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= MOST_ADDRESSES:
                self._forgotten += self._buckets.popitem(last=False)[1].kept_back
            bucket = self._buckets[key] = _Bucket(LINES_AT_ONCE, now)
        else:
            self._buckets.move_to_end(key)
            bucket.fill(LINES_PER_S, LINES_AT_ONCE, now)
        if bucket.tokens < (RESUME_AFTER if bucket.kept_back else 1):
            bucket.kept_back += 1
            return False
        bucket.tokens -= 1
        return True

    def withheld_counts(self, now: float | None) -> list[tuple[str, int]]:
        """Return (key, lines kept back) for keys that have saved up enough for a log line; each count is given once."""
        withheld = [("others", self._forgotten)] if self._forgotten else []
        self._forgotten = 0
        for key, bucket in self._buckets.items():
            if not bucket.kept_back:
                continue
            if now is not None and bucket.fill(LINES_PER_S, LINES_AT_ONCE, now) < RESUME_AFTER:
                continue
            withheld.append((key, bucket.kept_back))
            bucket.kept_back = 0
        return withheld


class LogTarget(Protocol):
    """Where lines go. All is done on the thread of a `LineWriter`, which may wait."""

    def write(self, lines: Sequence[bytes]) -> OSError | None:
        """Write all lines, however long it takes; return what was wrong if that cannot be."""

    def look(self) -> None:
        """See that the target is what it was; called before each batch, and once a second without one."""

    def close(self) -> None:
        """Let go of what was opened here."""


class DescriptorTarget:
    """A descriptor: a pipe, a terminal, or a file that stays where it is."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.torn = False  # the last line was written in part, as where a disk became full
        _descriptor_targets.add(self)

    def write(self, lines: Sequence[bytes]) -> OSError | None:
        left = memoryview(b"".join((b"\n", *lines) if self.torn else lines))
        while left:
            try:
                count = os.write(self.descriptor, left)
            except BlockingIOError:  # another process that shares the descriptor made it so
                poll = select.poll()
                poll.register(self.descriptor, select.POLLOUT)
                poll.poll(1000)
            except OSError as error:
                return error
            else:
                self.torn = left[count - 1] != _LINE_BREAK
                left = left[count:]
        return None

    def look(self) -> None:
        """Do nothing: nobody can move a descriptor."""

    def close(self) -> None:
        """Do nothing: the descriptor is another's."""


class LineWriter:
    """Writes lines to a target on a thread of its own. `put` may be called on any thread, and in signal handlers.

    A child made by `os.fork` begins with an empty queue: what waited is the parent's, and so is its thread.
    """

    def __init__(
        self, target: LogTarget, dropped_line: Callable[[int], bytes], idle: Callable[[], list[bytes]]
    ) -> None:
        self._target = target
        self._dropped_line = dropped_line
        self._idle = idle
        self._begin()
        _writers.add(self)

    def _begin(self) -> None:
        # Reentrant: a signal handler that logs may run while its thread is in `put`.
        self._ready = threading.Condition(threading.RLock())
        self._lines: deque[bytes] = deque()  # guarded by _ready
        self._queued_bytes = 0  # guarded by _ready; those of lines that are being written too
        self._dropped = 0  # guarded by _ready; dropped lines that were not reported yet
        self._error: OSError | None = None  # guarded by _ready; why the last write failed
        self._thread: threading.Thread | None = None  # guarded by _ready
        self._ending = False  # guarded by _ready

    def put(self, line: bytes) -> None:
        """Have `line`, with its line break, written soon; where too much waits, it is dropped and counted.

        An empty line has the target looked at now.
        """
        with self._ready:
            if self._queued_bytes + len(line) > MOST_QUEUED_BYTES:
                self._dropped += 1
                return
            self._lines.append(line)
            self._queued_bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="flowctl-log", daemon=True)
                self._thread.start()
            self._ready.notify_all()

    def flush(self, deadline_s: float) -> bool:
        """Wait until all is written, or the deadline has passed; return whether all was."""
        end = time.monotonic() + deadline_s
        with self._ready:
            while self._queued_bytes:
                left_s = end - time.monotonic()
                if left_s <= 0:
                    return False
                self._ready.wait(left_s)
            return self._dropped == 0

    def close(self, deadline_s: float) -> None:
        """Write what waits, within the deadline, and end the thread; nothing may be put any more."""
        self.flush(deadline_s)
        with self._ready:
            self._ending = True
            self._ready.notify_all()
            if self._thread is None:
                self._target.close()

    @property
    def error(self) -> OSError | None:
        """Why lines could not be written; None: they could, or nothing reads them."""
        with self._ready:
            return self._error if self._dropped else None

    def _run(self) -> None:
        while True:
            with self._ready:
                if not self._lines and not self._ending:
                    self._ready.wait(1.0)
                idle = not self._lines
                if idle and self._ending:
                    self._target.close()
                    return
                size = 0
                batch = []
                while self._lines and size < _BATCH_BYTES:
                    batch.append(self._lines.popleft())
                    size += len(batch[-1])
                dropped, self._dropped = self._dropped, 0
            self._target.look()
            if idle:
                batch = self._idle()
            if dropped:
                # What was dropped came after what is in the batch.
                batch.append(self._dropped_line(dropped))
            error = self._target.write(batch)
            with self._ready:
                self._queued_bytes -= size
                self._error = error
                if error is not None:
                    self._dropped += dropped + len(batch) - bool(dropped)
                self._ready.notify_all()


_writers: Final[weakref.WeakSet[LineWriter]] = weakref.WeakSet()


_descriptor_targets: Final[weakref.WeakSet[DescriptorTarget]] = weakref.WeakSet()


def _after_fork() -> None:
    for target in list(_descriptor_targets):
        target.torn = False  # the line is the parent's, who goes on with it
    for writer in list(_writers):
        with contextlib.suppress(AttributeError):  # one that is being made
            writer._begin()  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_after_fork)
