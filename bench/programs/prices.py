"""A price list over WebSockets, served by flowctl, websockets, aiohttp or a bare loop: one of them in a process.

Prints one JSON line with its port. For each JSON line of its input (``count``, ``rate``, ``size``, ``burst``) it
publishes so many messages and answers with one. At the end of its input it stops. websockets and aiohttp run on uvloop
and as their documents say: ``websockets.broadcast``; for aiohttp a loop that awaits each client, or (``--tasks``) a
task for each. The bare loop sends to one socket after the other, and does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, Final, TypeAlias

import uvloop
from aiohttp import web
from websockets.asyncio.connection import broadcast
from websockets.asyncio.server import ServerConnection, serve

from flowctl import Server, Topic, WebSocketSession
from flowctl.core.flow.limits import NO_LIMITS
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.admission import AdmissionLimits

_KEYS: Final = 100
_LEVEL: Final = 14
"""Octets of a level of the order book: price, amount and comma."""
_BACKLOG: Final = 1024
_GENERATOR: Final = random.Random(29)

Publisher: TypeAlias = tuple[int, Callable[[str], Awaitable[None]]]
"""The port of a server, and what sends a text to all its clients."""


def price(number: int, size: int) -> tuple[str, str]:
    """Return the key and the text of an update of `size` octets: when it was made, and levels of an order book."""
    key = f"K{number % _KEYS:03d}"
    head = f'{{"at":{time.monotonic_ns():<20},"key":"{key}","number":{number:<6},"levels":['
    count = (size - len(head) - 2) // _LEVEL
    levels = [f"[{_GENERATOR.uniform(100, 200):6.2f},{_GENERATOR.randrange(1000, 10000)}]" for _ in range(count)]
    return key, (head + ",".join(levels) + "]}").ljust(size)


def due(count: int, rate: float, size: int, burst: int) -> Iterator[tuple[float, int, int]]:
    """Yield how long to wait before each message, its number and size; `burst` come at once, with less than 0."""
    began = time.monotonic()
    for number in range(count):
        yield -1.0 if number % burst else max(0.0, began + number / rate - time.monotonic()), number, size


@asynccontextmanager
async def websockets_server(arguments: argparse.Namespace) -> AsyncIterator[Publisher]:
    """Run the package websockets."""
    clients: set[ServerConnection] = set()

    async def handler(connection: ServerConnection) -> None:
        clients.add(connection)
        try:
            await connection.wait_closed()
        finally:
            clients.discard(connection)

    async def publish(text: str) -> None:
        broadcast(clients, text)

    options: dict[str, Any] = {} if arguments.ping else {"ping_interval": None}
    compression = "deflate" if arguments.deflate else None
    async with serve(handler, "127.0.0.1", 0, compression=compression, backlog=_BACKLOG, **options) as server:
        yield next(iter(server.sockets)).getsockname()[1], publish


@asynccontextmanager
async def aiohttp_server(arguments: argparse.Namespace) -> AsyncIterator[Publisher]:
    """Run aiohttp."""
    clients: set[web.WebSocketResponse] = set()
    tasks: set[asyncio.Task[None]] = set()

    async def handler(request: web.Request) -> web.WebSocketResponse:
        response = web.WebSocketResponse(compress=arguments.deflate)
        await response.prepare(request)
        clients.add(response)
        try:
            async for _ in response:
                pass
        finally:
            clients.discard(response)
        return response

    async def publish(text: str) -> None:
        if not arguments.tasks:
            for client in list(clients):
                await client.send_str(text)
            return
        for client in clients:
            task = asyncio.create_task(client.send_str(text))
            tasks.add(task)
            task.add_done_callback(over)

    def over(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        task.exception()  # of a client that has gone; asked for, or it would be logged

    application = web.Application()
    application.router.add_get("/", handler)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=_BACKLOG).start()
    yield runner.addresses[0][1], publish


async def serve_on_uvloop(server: AbstractAsyncContextManager[Publisher], patience_s: float) -> None:
    """Run a server, and publish as told."""
    async with server as (port, publish):

        async def publish_all(asked: dict[str, Any]) -> None:
            for wait_s, number, size in due(**asked):
                if wait_s >= 0:
                    await asyncio.sleep(wait_s)
                await publish(price(number, size)[1])

        print(json.dumps({"port": port}), flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            task = asyncio.create_task(publish_all(json.loads(line)))
            done, _ = await asyncio.wait([task], timeout=patience_s)
            print(json.dumps({"finished": task in done}), flush=True)


@contextmanager
def flowctl_server(arguments: argparse.Namespace) -> Iterator[tuple[int, Callable[[str, str], None]]]:
    """Run flowctl."""
    prices = Topic("prices", flush_interval_s=arguments.flush)

    class Browser(WebSocketSession):
        def accepted(self) -> None:
            self.follow(prices)

    def publish(key: str, text: str) -> None:
        prices.publish(text, key=None if arguments.no_keys else key)

    admission = AdmissionLimits(connections_per_address=0, new_per_address_and_s=0)
    patience: dict[str, Any] = {}
    if arguments.patient:
        patience = {"limits": NO_LIMITS, "settings": SenderSettings(stuck_s=0, soft_too_long_s=0)}
    with Server(Browser, "127.0.0.1", 0, admission=admission, **patience) as server:
        yield server.address[1], publish


@contextmanager
def bare_server(_arguments: argparse.Namespace) -> Iterator[tuple[int, Callable[[str, str], None]]]:
    """Accept whatever comes, and send to all of them."""
    clients: list[socket.socket] = []

    def accept_all(listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            sock.recv(4096)
            sock.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            clients.append(sock)

    def publish(_key: str, text: str) -> None:
        short = len(text) < 126
        frame = (bytes((0x81, len(text))) if short else b"\x81\x7e" + len(text).to_bytes(2)) + text.encode()
        for client in clients:
            client.send(frame)

    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener:
        threading.Thread(target=accept_all, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1], publish


def serve_on_threads(arguments: argparse.Namespace) -> None:
    """Run one of these two, and publish as told on this thread."""
    makers = {"flowctl": flowctl_server, "bare": bare_server}
    with makers[arguments.server](arguments) as (port, publish):
        print(json.dumps({"port": port}), flush=True)
        for line in sys.stdin:
            for wait_s, number, size in due(**json.loads(line)):
                time.sleep(max(wait_s, 0.0))
                publish(*price(number, size))
            print(json.dumps({"finished": True}), flush=True)


def main() -> None:
    """Serve until the end of input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("server", choices=["flowctl", "websockets", "aiohttp", "bare"])
    parser.add_argument("--flush", type=float, default=0.02, help="flush interval of flowctl in seconds")
    parser.add_argument("--no-keys", action="store_true", help="flowctl: every message counts, limits close who lags")
    parser.add_argument("--patient", action="store_true", help="flowctl: without limits, nobody is closed")
    parser.add_argument("--deflate", action="store_true", help="the others: accept permessage-deflate")
    parser.add_argument("--ping", action="store_true", help="websockets: with its pings")
    parser.add_argument("--tasks", action="store_true", help="aiohttp: a task for each client and message")
    parser.add_argument("--patience", type=float, default=120.0, help="longest time for what one line asks for")
    arguments = parser.parse_args()
    if arguments.server in {"flowctl", "bare"}:
        serve_on_threads(arguments)
    else:
        makers = {"websockets": websockets_server, "aiohttp": aiohttp_server}
        uvloop.run(serve_on_uvloop(makers[arguments.server](arguments), arguments.patience))


if __name__ == "__main__":
    main()
