"""One ZeroMQ socket, watched by a poll group: what comes in is handed on, sending never waits.

Theory of operation. A ZeroMQ socket has no descriptor of its own kind: `zmq.FD` is that of its mailbox, and it becomes
readable when something *may* have changed. It says so once (it is edge-triggered by nature): after it woke us, and also
after each send, which reads the mailbox too, one has to look until there is nothing (libzmq issue 3641), or a message
waits for ever. So

- `_ready` reads until EAGAIN, or until its budget is used up; then it goes on in the next turn of the loop, and other
  descriptors get theirs;
- after a send outside of `_ready` one look is queued for this turn, however many sends there are.

The `zmq.asyncio` socket does the same with a future per message, which costs four times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import zmq

if TYPE_CHECKING:
    from flowctl.pollgroup import PollGroup

MESSAGES_PER_TURN: Final = 256
"""Messages read of one socket before others get their turn: some 2 ms of work."""

MOST_FRAMES: Final = 1024
"""Most frames of one message. ZeroMQ has no limit, and each is an object."""

_MORE_WAIT: Final = zmq.NOBLOCK | zmq.SNDMORE


class ZmqSocket:
    """A ZeroMQ socket on a poll group; all methods on the group's thread only.

    Args:
        group: runs it.
        socket: raw (`zmq.Context.socket`), bound and connected by the caller; from `start` to `close` it is ours.
        received: called with the frames of each message, in order. Exceptions are reported and contained.
        wants_metadata: asked with the first frame of each message of two or more (of a ROUTER: the routing id). Where
            it says yes, the second frame is kept in `frame` while the message is handed on: what ZeroMQ knows of the
            peer (``frame.get("User-Id")``, ``"Peer-Address"``) costs a microsecond that most messages need not pay.

    Attributes:
        raw: the socket.
        frame: see `wants_metadata`; None for other messages.
        too_long_count: messages of more than `MOST_FRAMES` frames, thrown away.
    """

    __slots__ = (
        "_closed",
        "_group",
        "_look_queued",
        "_raw_send",
        "_reading",
        "_received",
        "_wants_metadata",
        "frame",
        "raw",
        "too_long_count",
    )

    def __init__(
        self,
        group: PollGroup,
        socket: zmq.Socket[bytes],
        received: Callable[[list[bytes]], object],
        wants_metadata: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._group: Final = group
        self.raw: Final = socket
        self._received: Final = received
        # Past the Python layer of pyzmq, which only looks at arguments that we never give.
        self._raw_send: Final = super(zmq.Socket, socket).send
        self._wants_metadata: Final = wants_metadata
        self._look_queued = False
        self._reading = False
        self._closed = False
        self.frame: zmq.Frame | None = None
        self.too_long_count = 0

    def start(self) -> None:
        """Begin to receive."""
        self._group.watch_input(self.raw, self._ready)
        self._look_soon()

    def send(self, frames: Sequence[bytes]) -> None:
        """Hand a message to ZeroMQ; it is copied, and sent by a thread of ZeroMQ's.

        Args:
            frames: one or more. Of a ROUTER the first is the routing id.

        Raises:
            zmq.Again: the queue to the peer (`SNDHWM`) is full, or there is no peer yet (`IMMEDIATE`). Nothing of the
                message was taken.
            zmq.ZMQError: with `EHOSTUNREACH`, of a ROUTER with `ROUTER_MANDATORY`: no such peer. Nothing was taken.
        """
        send = self._raw_send
        last = len(frames) - 1
        for index in range(last):
            send(frames[index], _MORE_WAIT)
        send(frames[last], zmq.NOBLOCK)
        if not (self._reading or self._look_queued):
            self._look_soon()

    def look(self) -> None:
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
        """Whether it was closed."""
        return self._closed

    def _look_soon(self) -> None:
        self._look_queued = True
        self._group.call_soon(self._ready)

    def _ready(self) -> None:
        """Read what is there, up to the budget."""
        self._look_queued = False
        if self._closed or self._reading:
            return
        self._reading = True
        recv, received, wants = self.raw.recv, self._received, self._wants_metadata
        try:
            for _ in range(MESSAGES_PER_TURN):
                try:
                    frames = [recv(zmq.NOBLOCK)]
                except zmq.Again:
                    return
                if wants is not None and wants(frames[0]):
                    self._read_frame(frames)
                self._read_rest(frames)
                if len(frames) > MOST_FRAMES:
                    self.too_long_count += 1
                    continue
                try:
                    received(frames)
                except BaseException as error:  # noqa: BLE001  (one message's fault must not cost the next ones)
                    self._group.report("a message of a ZeroMQ socket", error)
                self.frame = None
                if self.closed:  # by what was received
                    return
            self._look_soon()
        finally:
            self._reading = False

    def _read_frame(self, frames: list[bytes]) -> None:
        """Read the second frame, and keep it with its metadata."""
        if self.raw.get(zmq.RCVMORE):
            self.frame = self.raw.recv(zmq.NOBLOCK, copy=False)
            frames.append(self.frame.bytes)

    def _read_rest(self, frames: list[bytes]) -> None:
        """Read the frames that are left of a message; of one that is too long they are thrown away as they come."""
        get, recv = self.raw.get, self.raw.recv
        while get(zmq.RCVMORE):
            octets = recv(zmq.NOBLOCK)
            if len(frames) <= MOST_FRAMES:
                frames.append(octets)
