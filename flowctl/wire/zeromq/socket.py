"""One ZeroMQ socket, watched by a poll group: what comes in is handed on, sending never waits.

Theory of operation. A ZeroMQ socket has no descriptor of its own kind: `zmq.FD` is that of its mailbox, and it becomes
readable when something *may* have changed. It says so once (it is edge-triggered by nature): after it woke us, and also
after each send, which reads the mailbox too, one has to look until there is nothing (libzmq issue 3641), or a message
waits for ever. So

- `_ready` reads until there is nothing, or until its budget is used up; then it goes on in the next turn of the loop,
  and other descriptors get theirs;
- after a send outside of `_ready` one look is queued for this turn, however many sends there are.

The `zmq.asyncio` socket does the same with a future per message, which costs four times as much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import zmq

if TYPE_CHECKING:
    from flowctl.pollgroup import PollGroup

MESSAGES_PER_TURN: Final = 256
"""Messages read of one socket before others get their turn: some 2 ms of work."""

MESSAGES_PER_LOOK: Final = 16
"""Most messages read before ZeroMQ is asked again what there is. Only then it hears of peers that had nothing to say
before: without, one that floods is read 100 times (libzmq's ``inbound_poll_rate``) before another one's first message.
"""

MOST_FRAMES: Final = 1024
"""Most frames of one message. ZeroMQ has no limit, and each is an object."""

MAX_SOCKETS: Final = 10_000
"""Sockets of one context: each outgoing connection is one. ZeroMQ's own 1023 is less than a server has peers."""

_TCP_PROBES: Final = 3
"""TCP probes without an answer after which a peer is dead; they fill the second half of the time it is given."""

_NO_WAIT: Final = int(zmq.NOBLOCK)
_MORE_NO_WAIT: Final = int(zmq.NOBLOCK | zmq.SNDMORE)


class ZmqSocket:
    """A ZeroMQ socket on a poll group; all methods on the group's thread only."""

    __slots__ = (
        "_closed",
        "_group",
        "_look_queued",
        "_raw_send",
        "_reading",
        "_received",
        "_refused",
        "_routed",
        "_writable",
        "frame",
        "raw",
        "too_long_count",
    )

    def __init__(
        self,
        group: PollGroup,
        socket: zmq.Socket[bytes],
        received: Callable[[list[bytes]], object],
        writable: Callable[[], object] | None = None,
    ) -> None:
        self._group: Final = group
        self.raw: Final = socket
        self._received: Final = received
        # Past the Python layer of pyzmq, which only looks at arguments that we never give.
        self._raw_send: Final = super(zmq.Socket, socket).send
        self._routed: Final = socket.get(zmq.TYPE) == zmq.ROUTER
        self._writable: Final = writable
        self._refused = False  # a send was; `_writable` is to be told of the next change
        self._look_queued = False
        self._reading = False
        self._closed = False
        # The last frame, while a message is handed on: it has what ZeroMQ knows of the peer
        # (``frame.get("User-Id")``, ``"Peer-Address"``).
        self.frame: zmq.Frame | None = None
        self.too_long_count = 0  # messages of more than `MOST_FRAMES` frames, thrown away

    def start(self) -> None:
        self._group.watch_input(self.raw, self._ready, alone=True)
        self._look_soon()

    def send(self, frames: Sequence[bytes]) -> None:
        """Hand a message to ZeroMQ; it is copied, and sent by a thread of ZeroMQ's."""
        send = self._raw_send
        last = len(frames) - 1
        try:
            for index in range(last):
                send(frames[index], _MORE_NO_WAIT)
            send(frames[last], _NO_WAIT)
        except zmq.Again:
            self._refused = True
            raise
        finally:  # one that fails has read the mailbox too
            if not (self._reading or self._look_queued):
                self._look_soon()

    def look_for_messages(self) -> None:
        """Look for messages soon: something was done to `raw` that may have read its mailbox (`connect`, `poll`)."""
        if not self._look_queued:
            self._look_soon()

    def close(self, linger_s: float = 0.0) -> None:
        """Stop receiving and close; what was sent goes on being sent for up to `linger_s` seconds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._group.unwatch_input(self.raw)
        self.raw.close(linger=max(0, int(linger_s * 1000)))

    @property
    def closed(self) -> bool:
        return self._closed

    def _look_soon(self) -> None:
        self._look_queued = True
        self._group.call_soon(self._ready)

    def _ready(self) -> None:
        """Read waiting messages, up to the budget."""
        self._look_queued = False
        if self._closed or self._reading:
            return
        self._reading = True
        get: Callable[[int], Any] = self.raw.get
        left, at_once = MESSAGES_PER_TURN, 1
        try:
            # To ask costs less than the exception that says there is nothing, and more than a message: a single one is
            # asked for and asked after, of many ever more are read between.
            while get(zmq.EVENTS) & zmq.POLLIN:
                if left <= 0:
                    self._look_soon()
                    return
                if not self._read_some(at_once):
                    return
                left -= at_once
                at_once = min(2 * at_once, MESSAGES_PER_LOOK)
        finally:
            self._reading = False
            if self._refused and not self._closed:
                self._tell_writable()

    def _read_some(self, count: int) -> bool:
        """Hand on up to `count` messages; False: there are no more, or one of them had the socket closed."""
        received = self._received
        for _ in range(count):
            try:
                frames, frame = self._read()
            except zmq.Again:
                return False
            if len(frames) > MOST_FRAMES:
                self.too_long_count += 1
                continue
            self.frame = frame
            try:
                received(frames)
            except BaseException as error:  # noqa: BLE001  (one message's fault must not cost the next ones)
                self._group.report("a message of a ZeroMQ socket", error)
            self.frame = None
            if self._closed:
                return False
        return True

    def _tell_writable(self) -> None:
        if self._writable is not None and int(self.raw.get(zmq.EVENTS)) & zmq.POLLOUT:
            self._refused = False
            self._group.call_soon(self._writable)

    def _read(self) -> tuple[list[bytes], zmq.Frame]:
        """Read a message; of one that is too long the rest is thrown away as it comes.

        A frame that is not copied knows whether more follow: asking the socket after each costs more than all the rest.
        """
        recv = self.raw.recv
        frames = [recv(_NO_WAIT)] if self._routed else []  # after a routing id there is more
        while True:
            frame = recv(_NO_WAIT, False)
            if len(frames) <= MOST_FRAMES:
                frames.append(frame.bytes)
            if not frame.more:
                return frames, frame


def notice_dead_peers(raw: zmq.Socket[bytes], after_s: int) -> None:
    """Have the system end TCP connections whose other end has not answered for `after_s` seconds.

    Heartbeats of ZeroMQ would do the same, and end our process: where a connection is reset whose messages could not be
    taken at that moment, for the queue is full or another one has its routing id, the next heartbeat fails an assertion
    (libzmq 4.3.5, ``!_io_error``). So any peer could kill us. Those of others it answers as ever.
    """
    raw.set(zmq.TCP_KEEPALIVE, 1)
    raw.set(zmq.TCP_KEEPALIVE_IDLE, after_s // 2)
    raw.set(zmq.TCP_KEEPALIVE_CNT, _TCP_PROBES)
    raw.set(zmq.TCP_KEEPALIVE_INTVL, max(1, after_s // 2 // _TCP_PROBES))
    raw.set(zmq.TCP_MAXRT, after_s * 1000)  # where something was sent, the system does not probe


class _Context(zmq.Context[zmq.Socket[bytes]]):
    """A context that does not wait for its sockets when it is collected without having been ended.

    pyzmq's own ends itself then, for ever: in a node that was never stopped, sockets are collected with it, so it no
    longer finds them to close them. Here they close themselves, and no more than a thread of ZeroMQ is left.
    """

    def __del__(self) -> None:
        """Do nothing."""


@functools.cache
def shared_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return the context in which nodes of this process reach each other by ``inproc://``; it is never ended."""
    return new_context()


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context; its owner ends it with ``destroy(linger=...)``."""
    context = _Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context
