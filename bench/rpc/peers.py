"""Many peers of a server that echoes, as raw sockets: ``python -m rpc.peers ADDRESS SERVER_PID``; a task per line.

``{"do": "connect", "count": 1000}`` opens connections, asks once on each, and answers with the memory that the server
took for them. ``{"do": "round", "seconds": 1.0}`` keeps `UNDER_WAY` requests under way, each on the next connection.
``{"do": "calm", "seconds": 2.0}`` asks one request at a time, a millisecond apart, each on the next connection: what
somebody sees who wants little. ``{"do": "close"}`` closes all. The answers are those of `rpc.callers`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import Any, Final

import zmq

from kit.processes import resident_bytes
from rpc.callers import PART, TAG_BYTES, Window
from rpc.server import COMMAND, MAX_SOCKETS, REPLY

UNDER_WAY: Final = 10
CALM_PAUSE_S: Final = 0.001
LIMIT_MS: Final = 5000
"""A reply that has not come by then does not come."""
SETTLE_S: Final = 0.2

_TAG: Final = bytes(TAG_BYTES)


class Peers:
    """Connections of one process to one server."""

    def __init__(self, address: str, server_pid: int) -> None:
        self._address = address
        self._server_pid = server_pid
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._sockets: list[zmq.Socket[bytes]] = []

    def connect(self, count: int) -> dict[str, Any]:
        """Open connections, and wait until each has had a reply."""
        before = resident_bytes([self._server_pid])
        for _ in range(count):
            socket = self._context.socket(zmq.DEALER)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVTIMEO, LIMIT_MS)
            socket.connect(self._address)
            self._sockets.append(socket)
        for socket in self._sockets:
            self._ask(socket)
        for socket in self._sockets:
            self._reply(socket)
        time.sleep(SETTLE_S)
        return {"kb_each": round((resident_bytes([self._server_pid]) - before) / 1024 / count, 1)}

    def round(self, seconds: float) -> dict[str, Any]:
        """Ask on one connection after another, some requests under way."""
        window = Window(seconds, self._server_pid)
        under_way: deque[tuple[zmq.Socket[bytes], float]] = deque()
        index = 0
        while True:
            now = time.perf_counter()
            if now < window.ends_at:
                while len(under_way) < UNDER_WAY:
                    socket = self._sockets[index % len(self._sockets)]
                    index += 1
                    self._ask(socket)
                    under_way.append((socket, time.perf_counter()))
            if not under_way:
                return window.answer()
            socket, began = under_way.popleft()
            reply = self._reply(socket)
            window.ended(began, time.perf_counter(), reply)

    def calm(self, seconds: float) -> dict[str, Any]:
        """Ask one request at a time."""
        window = Window(seconds, self._server_pid)
        index = 0
        while (began := time.perf_counter()) < window.ends_at:
            socket = self._sockets[index % len(self._sockets)]
            index += 1
            self._ask(socket)
            reply = self._reply(socket)
            window.ended(began, time.perf_counter(), reply)
            time.sleep(CALM_PAUSE_S)
        return window.answer()

    def close(self) -> dict[str, Any]:
        """Close all connections."""
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()
        return {}

    @staticmethod
    def _ask(socket: zmq.Socket[bytes]) -> None:
        socket.send_multipart([COMMAND, _TAG, PART])

    @staticmethod
    def _reply(socket: zmq.Socket[bytes]) -> bytes | None:
        """Return the part of the next reply; None for an error, or where none came."""
        try:
            frames = socket.recv_multipart()
        except zmq.Again:
            return None
        return frames[2] if len(frames) == 3 and frames[0] == REPLY else None


def main(address: str, server_pid: int) -> None:
    """Do what the input says until it ends."""
    peers = Peers(address, server_pid)
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(getattr(peers, task.pop("do"))(**task)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
