"""A sender whose messages are acknowledged: ``python -m messenger.sender KIND ADDRESS SERVER_PID [STORE]``.

A task per line: ``{"seconds": 1.0}`` keeps `WINDOW` messages unacknowledged for that time; the answer is that of
`rpc.callers`: acknowledged messages per second, how long that took, processor time of both ends for each. KIND is one
of those of `messenger.server`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Final

import zmq
import zmq.asyncio

from flowctl.nodes.messenger.delivery import DeliverySettings
from flowctl.nodes.messenger.message import Destination
from flowctl.nodes.messenger.messenger import Messenger
from flowctl.nodes.messenger.store import open_store
from rpc.callers import PART, Window
from rpc.server import loop_factory

WINDOW: Final = 1000
"""Unacknowledged messages at a time: enough that both ends always have work, little enough that none has a queue."""


async def zmq_asyncio(address: str, server_pid: int) -> None:
    """Send by the sockets that pyzmq has for asyncio."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(address)
        room = asyncio.Semaphore(WINDOW)
        began: dict[bytes, float] = {}
        window = Window(0, server_pid)
        idle = asyncio.Event()

        async def read() -> None:
            while True:
                frames = await socket.recv_multipart()
                number = frames[-1].partition(b"-")[0]
                window.ended(began.pop(number), time.perf_counter(), PART)
                room.release()
                if not began:
                    idle.set()

        reader = asyncio.ensure_future(read())
        number = 0
        for line in sys.stdin:
            window = Window(json.loads(line)["seconds"], server_pid)
            while time.perf_counter() < window.ends_at:
                await room.acquire()
                name = b"%d" % number
                began[name] = time.perf_counter()
                number += 1
                idle.clear()
                await socket.send_multipart([b"", b"%b-0-0-%b" % (name, PART)])
            await idle.wait()
            print(json.dumps(window.answer()), flush=True)
        reader.cancel()


async def ours(address: str, server_pid: int, store: str | None) -> None:
    """Send by our messenger, on the running loop."""
    opens = open_store(store) if store else None
    settings = DeliverySettings(window=WINDOW)
    async with Messenger(None, "sender", settings=settings, open_store=opens) as messenger:
        to = messenger.make_connection(Destination("server", address))
        began: dict[int, float] = {}
        idle = asyncio.Event()
        for line in sys.stdin:
            window = Window(json.loads(line)["seconds"], server_pid)

            def acknowledged(_: Messenger, number: int, window: Window = window) -> None:
                window.ended(began.pop(number), time.perf_counter(), PART)
                if not began:
                    idle.set()

            while (now := time.perf_counter()) < window.ends_at:
                began[await messenger.send(to, PART, on_ack=acknowledged)] = now
                idle.clear()
            await idle.wait()
            print(json.dumps(window.answer()), flush=True)


def main(kind: str, address: str, server_pid: str, store: str | None = None) -> None:
    """Do the tasks of the input."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        if kind == "zmq.asyncio":
            runner.run(zmq_asyncio(address, int(server_pid)))
        else:
            runner.run(ours(address, int(server_pid), store))


if __name__ == "__main__":
    main(*sys.argv[1:])
