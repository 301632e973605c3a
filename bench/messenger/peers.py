"""Many peers of a server that acknowledges, as raw sockets: ``python -m messenger.peers ADDRESS SERVER_PID``.

A task per line: ``{"do": "connect", "count": 1000}`` opens connections, sends a message on each, and answers with the
memory that the server took for them. ``{"do": "round", "seconds": 1.0}`` keeps `UNDER_WAY` messages unacknowledged,
each on the next connection. They speak the wire of a messenger without its extension: one acknowledgement each.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import Any, Final

import zmq

from kit.processes import resident_bytes
from rpc.callers import PART, Window
from rpc.server import MAX_SOCKETS

UNDER_WAY: Final = 10
LIMIT_MS: Final = 5000
"""An acknowledgement that has not come by then does not come."""
SETTLE_S: Final = 0.2


class Peers:
    """Connections of one process to one server."""

    def __init__(self, address: str, server_pid: int) -> None:
        self._address = address
        self._server_pid = server_pid
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._number = 0

    def connect(self, count: int) -> dict[str, Any]:
        """Open connections, and wait until a message on each is acknowledged."""
        before = resident_bytes([self._server_pid])
        for number in range(count):
            socket = self._context.socket(zmq.DEALER)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVTIMEO, LIMIT_MS)
            socket.set(zmq.ROUTING_ID, b"peer-%d" % number)
            socket.connect(self._address)
            self._sockets.append(socket)
        for number in [self._send(socket) for socket in self._sockets]:
            if self._acknowledged(self._sockets[number], number) is None:
                raise RuntimeError(f"connection {number} of {count} got no acknowledgement")
        time.sleep(SETTLE_S)
        return {"kb_each": round((resident_bytes([self._server_pid]) - before) / 1024 / count, 1)}

    def round(self, seconds: float) -> dict[str, Any]:
        """Send on one connection after another."""
        window = Window(seconds, self._server_pid)
        under_way: deque[tuple[zmq.Socket[bytes], int, float]] = deque()
        while True:
            if time.perf_counter() < window.ends_at:
                while len(under_way) < UNDER_WAY:
                    socket = self._sockets[self._number % len(self._sockets)]
                    under_way.append((socket, self._send(socket), time.perf_counter()))
            if not under_way:
                return window.answer()
            socket, number, began = under_way.popleft()
            window.ended(began, time.perf_counter(), self._acknowledged(socket, number))

    def _send(self, socket: zmq.Socket[bytes]) -> int:
        number = self._number
        self._number += 1
        socket.send_multipart([b"", b"%d-0-0-%b" % (number, PART)])
        return number

    @staticmethod
    def _acknowledged(socket: zmq.Socket[bytes], number: int) -> bytes | None:
        """Return what a window counts: the part, or None where no acknowledgement came."""
        try:
            return PART if socket.recv_multipart()[-1] == b"%d-0-2-" % number else None
        except zmq.Again:
            return None


def main(address: str, server_pid: int) -> None:
    """Do what the input says until it ends."""
    peers = Peers(address, server_pid)
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(getattr(peers, task.pop("do"))(**task)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
