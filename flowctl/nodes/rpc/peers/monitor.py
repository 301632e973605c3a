"""What happens to the connections of a socket, as ZeroMQ tells it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from struct import Struct
from typing import Any, Final

import zmq

from flowctl.pollgroup import PollGroup
from flowctl.wire.zeromq.socket import ZmqSocket

_EVENT: Final = Struct("=Hi")
_NUMBERS: Final = count()


class Monitor:
    """Tells of events of a socket, in their order; on the group's thread.

    ZeroMQ writes an event before anything that follows from it: before the number of a descriptor is free for another
    connection, the end of the one that had it can be read here.
    """

    def __init__(
        self, group: PollGroup, raw: zmq.Socket[bytes], happened: Callable[[int, int], object], events: int
    ) -> None:
        self._happened: Final = happened
        self._watched: Final = raw
        address = f"inproc://flowctl-monitor-{next(_NUMBERS)}"
        raw.monitor(address, events)
        end: zmq.Socket[bytes] = raw.context.socket(zmq.PAIR)
        # No limit: ZeroMQ waits where the queue of events is full, and nothing of the whole context is read or written
        # meanwhile. A crowd that comes and goes while a handler holds up the loop would stop all others.
        end.set(zmq.RCVHWM, 0)
        end.connect(address)
        self._socket: Final = ZmqSocket(group, end, self._received)
        self._socket.start()

    def read_all(self) -> None:
        """Tell of all that has happened until now."""
        raw = self._socket.raw
        get: Callable[[int], Any] = raw.get
        while not self._socket.closed and get(zmq.EVENTS) & zmq.POLLIN:
            self._received(raw.recv_multipart(zmq.NOBLOCK))
        if not self._socket.closed:
            self._socket.look()

    def close(self) -> None:
        if not self._socket.closed:
            self._watched.disable_monitor()
            self._socket.close()

    def _received(self, frames: list[bytes]) -> None:
        event, value = _EVENT.unpack(frames[0])
        self._happened(event, value)
