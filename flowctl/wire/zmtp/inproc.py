"""Connections within the process: each end hands its messages to the other one's thread, and nothing is encrypted."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from flowctl.core.flow.state import SendState
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.sending.contract import SendResult
from flowctl.errors import ClosedError, LocalProtocolError
from flowctl.pollgroup import PollGroup
from flowctl.sender import ACCEPTED, CLOSED, DROPPED
from flowctl.wire.zmtp.mechanism import Properties

MOST_BETWEEN_BYTES: Final = 16 << 20
"""Bytes that may be on their way from one end to the other."""
_ROOM_BYTES: Final = 64 * 1024
"""Bytes on their way up to which a stream goes on."""
_PER_TURN: Final = 256
"""Messages that are taken before others on the thread get their turn."""


class DirectEnd:
    """One end; its methods on its own group's thread. Figures that the other end reads too are written by one thread.

    Args:
        group: on whose thread it is.
        said: what the other end says of itself, by names in small letters.
    """

    __slots__ = (
        *("_group", "_held", "_inbox", "_over", "_sent_bytes", "_woken"),
        *("gone", "message", "other", "said", "taken_bytes", "waiters"),
    )
    address: Final = "this process"
    key: Final = b""
    odd_count: Final = 0
    other: DirectEnd
    message: Callable[[list[bytes]], object]  #: called with each message
    gone: Callable[[], object]  #: called once it has ended

    def __init__(self, group: PollGroup, said: Properties) -> None:
        self._group: Final = group
        self.said: Final = {name.lower(): value for name, value in said.items()}
        self._inbox: Final[deque[list[bytes] | None]] = deque()
        self._woken = self._over = self._held = False
        self._sent_bytes = self.taken_bytes = 0
        self.waiters: list[Callable[[bool], object]] = []
        self.message = self.gone = _ignore

    # --- Link ----------------------------------------------------------------------------------------------------

    @property
    def waiting_bytes(self) -> int:
        return self._sent_bytes - self.other.taken_bytes

    @property
    def state(self) -> SendState:
        if self.waiting_bytes > MOST_BETWEEN_BYTES:
            return SendState.HARD_LIMIT
        return SendState.READY if self.drained else SendState.OVERLOADED

    @property
    def drained(self) -> bool:
        return self.waiting_bytes <= _ROOM_BYTES

    def send_message(self, frames: Sequence[bytes], *, droppable: bool = False) -> SendResult:
        del droppable
        if self._over:
            return CLOSED[SendState.READY]
        if self.waiting_bytes > MOST_BETWEEN_BYTES:
            return DROPPED[SendState.HARD_LIMIT]
        self._sent_bytes += _size_of(frames)
        self.other.put(list(frames))
        return ACCEPTED[self.state]

    def when_drained(self, callback: Callable[[bool], object]) -> None:
        self.waiters.append(callback)
        self.tell_waiters()

    def hold(self, why: str) -> None:
        del why
        self._held = True

    def end(self, why: str, linger_s: float = 0.0) -> None:
        del why, linger_s
        if not self._over:
            self._over = True
            self.other.put(None)
            self.tell_waiters()
            self.soon(self._tell_gone)

    def cut(self) -> None:
        self.end("")

    def why(self) -> str:
        return f"{self.waiting_bytes} bytes are on their way within the process"

    # --- inner steps ---------------------------------------------------------------------------------------------

    def put(self, item: list[bytes] | None) -> None:
        """Take what the other end sends; on that one's thread."""
        self._inbox.append(item)
        if not self._woken:
            self._woken = True
            self.soon(self._take)

    def _take(self) -> None:
        self._woken = False
        for _ in range(_PER_TURN):
            try:
                frames = self._inbox.popleft()
            except IndexError:
                break
            if frames is None:
                self._end_by_other()
            elif not (self._over or self._held):
                self._hand_on(frames)
        else:
            self._woken = True
            self.soon(self._take)
        if self.other.waiters:
            self.other.soon(self.other.tell_waiters)

    def _hand_on(self, frames: list[bytes]) -> None:
        try:
            self.message(frames)
        except BaseException as error:  # noqa: BLE001  (one message's fault must not cost the next ones)
            self._group.report("a message within the process", error)
        self.taken_bytes += _size_of(frames)

    def _tell_gone(self) -> None:
        self.gone()

    def _end_by_other(self) -> None:
        if not self._over:
            self._over = True
            self.tell_waiters()
            self.gone()

    def tell_waiters(self) -> None:
        if self.waiters and (self._over or self.drained):
            waiters, self.waiters = self.waiters, []
            for waiter in waiters:
                waiter(not self._over)

    def soon(self, what: Callable[[], object]) -> None:
        with suppress(ClosedError, LocalProtocolError):  # its loop has ended, and it with that
            self._group.call_soon(what)


class InprocNames:
    """The names of listeners within a process, and those that dial one which is not there yet. Any thread."""

    def __init__(self) -> None:
        self._lock: Final = OwnedLock()  # a leaf
        self._accepts: Final[dict[str, Callable[[Dial], object]]] = {}  # guarded by _lock
        self._waiting: Final[dict[str, dict[Dial, None]]] = {}  # guarded by _lock

    def bind(self, name: str, accept: Callable[[Dial], object]) -> None:
        """Have `accept` called for each that dials `name`, on any thread.

        Raises:
            OSError: another one listens there.
        """
        with self._lock:
            if name in self._accepts:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            self._accepts[name] = accept
            waiting = self._waiting.pop(name, {})
        for dial in waiting:
            accept(dial)

    def unbind(self, name: str, accept: Callable[[Dial], object]) -> None:
        """End the listening at `name`, unless another one listens there by now."""
        with self._lock:
            if self._accepts.get(name) == accept:
                del self._accepts[name]

    def dial(self, name: str, dial: Dial) -> None:
        """Have the listener at `name` accept, now or once there is one."""
        with self._lock:
            accept = self._accepts.get(name)
            if accept is None:
                self._waiting.setdefault(name, {})[dial] = None
        if accept is not None:
            accept(dial)

    def withdraw(self, name: str, dial: Dial) -> None:
        with self._lock:
            waiting = self._waiting.get(name, {})
            waiting.pop(dial, None)
            if not waiting:
                self._waiting.pop(name, None)


class Dial:
    """One that dials: `up` is called with its end, on its group's thread.

    Args:
        said: what it says of itself.
    """

    __slots__ = ("group", "said", "up")

    def __init__(self, group: PollGroup, said: Properties, up: Callable[[DirectEnd], object]) -> None:
        self.group: Final = group
        self.said: Final = said
        self.up: Final = up

    def accept(self, group: PollGroup, said: Properties) -> DirectEnd:
        """Return the end of the one that accepts, on whose thread this is, and who says that of itself."""
        near, far = DirectEnd(self.group, said), DirectEnd(group, self.said)
        near.other, far.other = far, near
        near.soon(lambda: self.up(near))
        return far


SHARED_NAMES: Final = InprocNames()
"""Those of the process."""


def _ignore(*_: object) -> None:
    """Do nothing."""


def _size_of(frames: Sequence[bytes]) -> int:
    return sum(map(len, frames)) + 100 * len(frames)
