"""A crowd of WebSocket clients in one process that costs little: it reads frame headers, and a few clients whole.

Run by `web/websockets.py`. A hundred clients are measured: they are read as soon as something comes, and the time in
each message gives its delay. The others are read four times a second in turn, so that the crowd takes no more of the
machine than it must. Stalled clients have small receive buffers and read nothing. Prints a JSON line when all are
accepted; for each line of its input (``count``, ``within_s``) it reads until every healthy client has that many
messages more, or the time is over, and prints the figures.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import select
import socket
import sys
import time
import zlib
from collections import Counter
from typing import Any, Final

from kit.processes import raise_open_files

_MEASURED: Final = 100
_SWEEP_S: Final = 0.25
_BATCH: Final = 50
_WIDE: Final = 1 << 18
_WAKE_S: Final = 2.0
_EMPTY_BLOCK: Final = b"\0\0\xff\xff"  # what permessage-deflate leaves off (RFC 7692)


class Client:
    """One connection."""

    __slots__ = ("closed", "delays_us", "inflater", "keys", "messages", "received", "rest", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.messages = 0
        self.received = 0
        self.delays_us: list[int] | None = None  # of those that are measured
        self.inflater: Any = None
        self.keys: list[bytes] | None = None  # of those that wake up
        self.rest = b""
        self.closed = ""

    def read(self) -> None:
        """Read what there is, and count the messages in it."""
        try:
            data = self.sock.recv(_WIDE)
        except BlockingIOError:
            return
        except OSError as error:
            self.end(type(error).__name__)
            return
        if not data:
            self.end("end of stream")
            return
        self.received += len(data)
        data = self.rest + data if self.rest else data
        at, end = 0, len(data)
        while end - at >= 2:
            head, size, body = data[at], data[at + 1], at + 2
            if size > 125:  # no masks: it is a server
                width = 2 if size == 126 else 8
                size, body = int.from_bytes(data[body : body + width]), body + width
            if body + size > end:
                break
            if head & 8:
                self.control(head & 15, data[body : body + size])
            else:
                self.messages += 1
                if self.delays_us is not None:
                    self.delays_us.append(time.monotonic_ns() // 1000 - self.stamp(head, data[body : body + size]))
                if self.keys is not None:
                    self.keys.append(data[body + 34 : body + 38])
            at = body + size
        self.rest = data[at:]

    def stamp(self, head: int, payload: bytes) -> int:
        """Return when a message was made, in microseconds."""
        if head & 0x40:
            payload = self.inflater.decompress(payload + _EMPTY_BLOCK)
        return int(payload[6:26]) // 1000

    def control(self, opcode: int, payload: bytes) -> None:
        """Answer a ping; note why the server closes."""
        if opcode == 9:
            self.sock.send(bytes((0x8A, 0x80 | len(payload), 0, 0, 0, 0)) + payload)
        elif opcode == 8:
            self.closed = f"{int.from_bytes(payload[:2])} {payload[2:].decode()}"

    def end(self, why: str) -> None:
        """Count it as closed, once."""
        self.closed = self.closed or why
        self.sock.close()


def request(port: int, *, deflate: bool) -> bytes:
    """Return the handshake of a browser."""
    key = base64.b64encode(os.urandom(16)).decode()
    lines = ["GET / HTTP/1.1", f"Host: 127.0.0.1:{port}", "Upgrade: websocket", "Connection: Upgrade"]
    lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13"]
    lines += ["Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits"] if deflate else []
    return "\r\n".join([*lines, "", ""]).encode()


def connect(arguments: argparse.Namespace) -> list[Client]:
    """Connect all clients, some at a time, the stalled ones spread among them."""
    clients: list[Client] = []
    for begin in range(0, arguments.clients, _BATCH):
        batch = []
        for index in range(begin, min(begin + _BATCH, arguments.clients)):
            sock = socket.socket()
            if is_stalled(index, arguments):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.bind((f"127.0.{1 + index // 250}.{1 + index % 250}", 0))
            sock.settimeout(30)
            sock.connect(("127.0.0.1", arguments.port))
            sock.sendall(request(arguments.port, deflate=arguments.deflate))
            batch.append(Client(sock))
        for client in batch:
            head = b""
            while b"\r\n\r\n" not in head:
                if not (data := client.sock.recv(4096)):
                    raise ConnectionError(f"refused: {head!r}")
                head += data
            head, _, client.rest = head.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 101") or (b"permessage-deflate" in head) != arguments.deflate:
                raise ConnectionError(f"not as asked: {head!r}")
            client.sock.setblocking(False)
        clients += batch
    return clients


def is_stalled(index: int, arguments: argparse.Namespace) -> bool:
    """Say whether a client is one that does not read."""
    return bool(arguments.stalled) and index % (arguments.clients // arguments.stalled) == 1


class Crowd:
    """The healthy clients."""

    def __init__(self, clients: list[Client]) -> None:
        self.clients = clients
        self.measured = clients[:: max(len(clients) // _MEASURED, 1)]
        self.poll = select.epoll()
        self.by_fd = {client.sock.fileno(): client for client in self.measured}
        for client in self.measured:
            client.inflater = zlib.decompressobj(-15)
            client.delays_us = []
            self.poll.register(client.sock, select.EPOLLIN)
        chosen = set(self.by_fd)
        self.others = [client for client in clients if client.sock.fileno() not in chosen]

    def read(self, count: int, within_s: float) -> dict[str, Any]:
        """Read until all have `count` messages more or the time is over; return the figures."""
        for client in self.clients:
            client.messages = client.received = 0
        for client in self.measured:
            client.delays_us = []
        began, place = time.monotonic(), 0
        swept = began
        while (now := time.monotonic()) < began + within_s:
            for fd, _ in self.poll.poll(0.002):
                self.by_fd[fd].read()
            share = min((now - swept) / _SWEEP_S, 1.0) * len(self.others)
            if share >= 1:
                swept = now
                for _ in range(int(share)):
                    place = (place + 1) % len(self.others)
                    client = self.others[place]
                    if client.sock.fileno() >= 0:
                        client.read()
            if place < 10 and all(client.messages >= count or client.closed for client in self.clients):
                break
        delays = sorted(delay for client in self.measured for delay in client.delays_us or ())
        counts = [client.messages for client in self.clients]
        return {
            "complete": sum(found == count for found in counts),
            "least": min(counts),
            "most": max(counts),
            "bytes_per_client": sum(client.received for client in self.clients) / len(self.clients),
            "delay_p50_ms": delays[len(delays) // 2] / 1000 if delays else None,
            "delay_p99_ms": delays[len(delays) * 99 // 100] / 1000 if delays else None,
            "crowd_cpu_s": time.process_time(),
            "closed": sum(bool(client.closed) for client in self.clients),
        }


def main() -> None:
    """Connect, read as told."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--stalled", type=int, default=0, help="how many of them read nothing")
    parser.add_argument("--deflate", action="store_true", help="offer permessage-deflate, and have it")
    arguments = parser.parse_args()
    raise_open_files()
    clients = connect(arguments)
    stalled = [client for index, client in enumerate(clients) if is_stalled(index, arguments)]
    crowd = Crowd([client for index, client in enumerate(clients) if not is_stalled(index, arguments)])
    print(json.dumps({"connected": len(clients)}), flush=True)
    for line in sys.stdin:
        print(json.dumps(crowd.read(**json.loads(line))), flush=True)
    print(json.dumps(wake(stalled)), flush=True)


def wake(clients: list[Client]) -> dict[str, Any]:
    """Let those that were stalled read; return what they were told, and how many outdated prices each got."""
    for client in clients:
        client.keys = []
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    end = time.monotonic() + _WAKE_S
    while time.monotonic() < end:
        time.sleep(0.01)
        for client in clients:
            if client.sock.fileno() >= 0:
                client.read()
    outdated = sum(len(client.keys or ()) - len(set(client.keys or ())) for client in clients)
    said = Counter(client.closed or "open" for client in clients)
    return {"said": dict(said), "outdated": outdated / max(len(clients), 1)}


if __name__ == "__main__":
    main()
