"""Callers of a server that echoes: ``python -m rpc.callers KIND ADDRESS SERVER_PID``; a task per line, an answer each.

A task is ``{"callers": 10, "seconds": 1.0}``: so many callers, each of which asks again as soon as it has its reply.
The answer has what was done in the window, after a tenth of it to warm up: requests per second, quantiles of their
time, and the processor time that the server and this process took for each. KIND is one of those of `rpc.server`; all
callers share a connection, but those of RPyC, which are threads with one each.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Final

import zmq
import zmq.asyncio

from flowctl.nodes.rpc.node import RpcNode
from kit.processes import cpu_seconds
from rpc.server import COMMAND, loop_factory

PART: Final = b"x" * 64
TAG_BYTES: Final = 15
WARM: Final = 0.1
"""Share of the window that goes before it."""


def quantile_ms(ordered: list[float], share: float) -> float | None:
    """Return a quantile of times in seconds, in milliseconds; None of nothing."""
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else None


class Window:
    """What is counted: requests that end between its start and its end.

    Attributes:
        ends_at: when callers stop, on `time.perf_counter`.
        failed: requests that got something else than their part.
    """

    def __init__(self, seconds: float, server_pid: int) -> None:
        self._seconds = seconds
        self._server_pid = server_pid
        self._starts_at = time.perf_counter() + WARM * seconds
        self._times: list[float] = []
        self._cpu: tuple[float, float] | None = None
        self.ends_at = self._starts_at + seconds
        self.failed = 0

    def ended(self, began: float, now: float, reply: object) -> None:
        """Count a request."""
        if reply != PART:
            self.failed += 1
        elif now >= self._starts_at:
            if self._cpu is None:
                self._cpu = self._processor_s()
            self._times.append(now - began)

    def _processor_s(self) -> tuple[float, float]:
        return cpu_seconds([self._server_pid]), time.process_time()

    def answer(self) -> dict[str, Any]:
        """Return the figures."""
        now = self._processor_s()
        before = self._cpu or now
        requests = len(self._times)
        self._times.sort()
        return {
            "requests": requests,
            "failed": self.failed,
            "per_s": round(requests / self._seconds),
            "p50_ms": quantile_ms(self._times, 0.5),
            "p99_ms": quantile_ms(self._times, 0.99),
            "server_us": round(1e6 * (now[0] - before[0]) / max(1, requests), 2),
            "client_us": round(1e6 * (now[1] - before[1]) / max(1, requests), 2),
        }


async def call_all(window: Window, callers: int, call: Callable[[bytes], Awaitable[Any]]) -> None:
    """Let coroutines ask until the window ends."""

    async def caller() -> None:
        while (began := time.perf_counter()) < window.ends_at:
            reply = await call(PART)
            window.ended(began, time.perf_counter(), reply)

    await asyncio.gather(*(caller() for _ in range(callers)))


async def serve(call: Callable[[bytes], Awaitable[Any]], server_pid: int) -> None:
    """Do the tasks of the input with coroutines."""
    for line in sys.stdin:  # blocks the loop between windows, when there is nothing for it
        task = json.loads(line)
        window = Window(task["seconds"], server_pid)
        await call_all(window, task["callers"], call)
        print(json.dumps(window.answer()), flush=True)


async def ours(address: str, server_pid: int) -> None:
    """Call by our node, on the running loop."""
    async with RpcNode() as node:
        connection = await node.connect(address)

        async def call(part: bytes) -> bytes:
            reply = await node.call(connection, "bench.echo", part)
            return reply[0]

        await serve(call, server_pid)


async def zmq_asyncio(address: str, server_pid: int) -> None:
    """Call by the sockets that pyzmq has for asyncio: a future per call, found by its tag."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.connect(address)
    waiting: dict[bytes, asyncio.Future[Any]] = {}
    numbers = count()
    loop = asyncio.get_running_loop()

    async def read() -> None:
        while True:
            _, tag, part = await socket.recv_multipart()
            waiting.pop(tag).set_result(part)

    async def call(part: bytes) -> Any:
        tag = next(numbers).to_bytes(TAG_BYTES, "big")
        waiting[tag] = future = loop.create_future()
        await socket.send_multipart([COMMAND, tag, part])
        return await future

    reader = asyncio.ensure_future(read())
    await serve(call, server_pid)
    reader.cancel()


def bare_window(socket: zmq.Socket[bytes], window: Window, callers: int) -> None:
    """Keep as many requests under way as there are callers; replies come in order."""
    tag = bytes(TAG_BYTES)
    began = deque([time.perf_counter()] * callers)
    for _ in range(callers):
        socket.send_multipart([COMMAND, tag, PART])
    while began:
        _, _, part = socket.recv_multipart()
        now = time.perf_counter()
        window.ended(began.popleft(), now, part)
        if now < window.ends_at:
            began.append(now)
            socket.send_multipart([COMMAND, tag, PART])


def bare(address: str, server_pid: int) -> None:
    """Call by a loop that waits in ZeroMQ."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        for line in sys.stdin:
            task = json.loads(line)
            window = Window(task["seconds"], server_pid)
            bare_window(socket, window, task["callers"])
            print(json.dumps(window.answer()), flush=True)


def rpyc_callers(address: str, server_pid: int) -> None:
    """Call by RPyC: a thread and a connection per caller."""
    rpyc = importlib.import_module("rpyc")

    def connect() -> Any:
        if address.startswith("ipc://"):
            return rpyc.utils.factory.unix_connect(address.removeprefix("ipc://"))
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        return rpyc.connect(host, int(port))

    def caller(window: Window, echo: Callable[[bytes], bytes]) -> None:
        while (began := time.perf_counter()) < window.ends_at:
            reply = echo(PART)
            window.ended(began, time.perf_counter(), reply)

    for line in sys.stdin:
        task = json.loads(line)
        connections = [connect() for _ in range(task["callers"])]
        echoes = [connection.root.echo for connection in connections]
        window = Window(task["seconds"], server_pid)
        threads = [threading.Thread(target=caller, args=(window, echo)) for echo in echoes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(json.dumps(window.answer()), flush=True)
        for connection in connections:
            connection.close()


def main(kind: str, address: str, server_pid: int) -> None:
    """Do what the input says until it ends."""
    if kind == "bare":
        bare(address, server_pid)
    elif kind == "rpyc":
        rpyc_callers(address, server_pid)
    else:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run((zmq_asyncio if kind == "zmq.asyncio" else ours)(address, server_pid))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
