"""A line that carries only so much in one direction: between a publisher and its server, in benches and tests.

Whoever connects to it is connected to a server. What it sends is read at the rate of the line, evenly, with next to
nothing in the receive buffer, and handed on at once; so what waits for the line waits where it would without us, in the
sender and its kernel. What the server says comes back at once. ``thinline.py PORT STEPS [PERIOD_S]``, with the steps as
JSON of (second, bit/s), prints a JSON line with its own port and ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
import threading
import time
from typing import Final, Self

from flowctl.load.peers.paces import Trace
from flowctl.wire.client.throttle import SLOW_SEGMENT_BYTES, Constant, Rate, RatePace, receive_buffer

_READ_MOST: Final = 256 * 1024
_LOOK_S: Final = 0.2
FAST: Final = 1e9


class ThinLine:
    """A listener on loopback; use it as a context. Each connection has the whole rate for itself.

    Args:
        port: of the server on loopback.
        rate: bits per second, or what they change by.
        least: the rate for which the receive buffer is made, where `set_rate` will set a lower one. None: `rate`.
    """

    def __init__(self, port: int, rate: Rate | float, *, least: float | None = None) -> None:
        self._to = "127.0.0.1", port
        self._paces: list[RatePace] = []  # of all connections so far
        self._socks: list[socket.socket] = []
        self.rate = Constant(rate) if isinstance(rate, int | float) else rate
        self._listener = socket.socket()
        mean = self.rate.carried_bits(60.0) / 60.0 if least is None else least
        # What comes over loopback comes in large lumps otherwise, see `receive_buffer`.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer(round(mean)))
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SLOW_SEGMENT_BYTES)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.port = int(self._listener.getsockname()[1])
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    @property
    def connections(self) -> int:
        """How many have come."""
        return len(self._paces)

    def set_rate(self, rate: float) -> None:
        """Carry `rate` bits per second from now on, for those who are there too; 0: nothing."""
        self.rate = Constant(rate)
        self._paces[:] = [RatePace(self.rate, time.monotonic()) for _ in self._paces]

    def _accept(self) -> None:
        self._listener.settimeout(_LOOK_S)
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                near = self._listener.accept()[0]
                self._paces.append(RatePace(self.rate, time.monotonic()))
                self._threads.append(threading.Thread(target=self._carry, args=(near, len(self._paces) - 1)))
                self._threads[-1].start()

    def _carry(self, near: socket.socket, number: int) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(self._to, 5.0) as far:
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self._over.is_set():
                pace, now = self._paces[number], time.monotonic()
                allowed = pace.allowance(now)
                wake_at = now + _LOOK_S if allowed else min(pace.wake_at(now), now + _LOOK_S)
                waited = [far, near] if allowed else [far]
                ready, _, _ = select.select(waited, [], [], max(wake_at - now, 0.0))
                if far in ready:
                    if not (data := far.recv(_READ_MOST)):
                        return
                    near.sendall(data)
                if near in ready:
                    data = near.recv(min(allowed, _READ_MOST))
                    pace.note_read(len(data), time.monotonic())
                    if not data:
                        far.shutdown(socket.SHUT_WR)
                        while answer := far.recv(_READ_MOST):
                            near.sendall(answer)
                        return
                    far.sendall(data)
                elif allowed:
                    pace.note_read(0, time.monotonic())


def main() -> None:
    """Carry until the end of input."""
    steps = [(at_s, rate) for at_s, rate in json.loads(sys.argv[2])]
    rate: Rate = Trace(steps, float(sys.argv[3])) if len(steps) > 1 else Constant(steps[0][1])
    with ThinLine(int(sys.argv[1]), rate) as line:
        print(json.dumps({"port": line.port}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
