"""A crowd of viewers in one process: play one stream over RTMP, HTTP or WebSocket (or read bare TCP), measure a few.

Run by `whole/fanout.py` and `web/http.py` in a process of its own. Most viewers are read with MSG_TRUNC, which lets
the kernel discard what arrived without copying it; every n-th one is parsed, for its delay and its missing frames.
Prints one JSON line when all have connected, and one with the results at the end.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import ssl
import sys
import time
from typing import Any

from wsproto import ConnectionType, WSConnection
from wsproto.events import BytesMessage, Request

from flowctl.flv import FlvReader
from flowctl.wire.media.stamp import read_stamp
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.client.session import ClientSession
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.wire import Message

_TRUNCATED = socket.MSG_TRUNC
_WIDE = 1 << 20


class Viewer:
    """One connection of the crowd."""

    def __init__(self, sock: socket.socket, url: str | None, *, measured: bool) -> None:
        self.sock = sock
        self.measured = measured
        self.bytes = 0
        self.delays_us: list[int] = []
        self.sequences: list[int] = []
        self.playing = url is None
        self.session: ClientSession | None = None
        self._reader: ChunkReader | None = None
        self._flv: FlvBody | None = None
        if url is not None and not url.startswith("rtmp:"):
            self._flv = FlvBody(url)
            sock.sendall(self._flv.request())
        elif url is not None:
            self.session = ClientSession(ClientSessionConfig(limits=WireLimits()))
            self.session.connect(url)
            self.session.play()
            sock.sendall(self.session.data_to_send())

    def readable(self) -> None:
        """Read what there is."""
        if self._flv is not None:
            self._take_flv(self._flv)
            return
        if self.session is not None:
            self._take_messages()
            return
        count = socket.socket.recv_into(self.sock, _SINK, _WIDE, _TRUNCATED)  # encrypted, where it is TLS
        if not count:
            raise ConnectionError("the server closed the connection")
        self.bytes += count

    def _take_messages(self) -> None:
        while self.session is not None:
            try:
                data = self.sock.recv(_WIDE)
            except ssl.SSLWantReadError:  # a part of a record
                return
            if not data:
                raise ConnectionError("the server closed the connection")
            self.bytes += len(data)
            self._take(data)
            if not isinstance(self.sock, ssl.SSLSocket) or not self.sock.pending():
                return

    def _take_flv(self, body: FlvBody) -> None:
        data = self.sock.recv(_WIDE)
        if not data:
            raise ConnectionError("the server closed the connection")
        self.bytes += len(data)
        for payload in body.frames(data):
            self.playing = True
            self._note(payload)
        if self.playing and not self.measured:
            self._flv = None

    def _note(self, payload: bytes) -> None:
        found = read_stamp(payload)
        if found is not None:
            self.sequences.append(found[0])
            self.delays_us.append(time.monotonic_ns() // 1000 - found[1])

    def _take(self, data: bytes) -> None:
        session = self.session
        if session is None:
            return
        events = session.receive(data, time.monotonic())
        reply = session.data_to_send()
        if reply:
            self.sock.sendall(reply)
        for event in events:
            if isinstance(event, Message):
                self.playing = True
                if event.type_id == 9:
                    self._note(event.payload)
        if self.playing and not self.measured:
            self.session = None  # from here on the kernel may throw it away


class FlvBody:
    """What a player over HTTP or WebSocket asks for, and the pictures in what it gets."""

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        self._host, _, self._path = rest.partition("/")
        self._websocket = WSConnection(ConnectionType.CLIENT) if scheme == "ws" else None
        self._reader = FlvReader()
        self._head: bytes | None = b""

    def request(self) -> bytes:
        if self._websocket is not None:
            return self._websocket.send(Request(host=self._host, target=f"/{self._path}"))
        return f"GET /{self._path} HTTP/1.0\r\nHost: {self._host}\r\n\r\n".encode()

    def frames(self, data: bytes) -> list[bytes]:
        """Return the pictures that `data` completes."""
        if self._websocket is not None:
            self._websocket.receive_data(data)
            data = b"".join(bytes(item.data) for item in self._websocket.events() if isinstance(item, BytesMessage))
        elif self._head is not None:
            self._head, _, data = (self._head + data).partition(b"\r\n\r\n")
            if not data:
                return []
            if not self._head.startswith(b"HTTP/1.1 200 "):
                raise ConnectionError(f"refused: {self._head[:40]!r}")
            self._head = None
        return [tag.payload for tag in self._reader.feed(data) if tag.type_id == 9]


_SINK = bytearray(_WIDE)


def connect(
    address: tuple[str, int], source: str, receive_buffer_bytes: int, context: ssl.SSLContext | None
) -> socket.socket:
    """Connect from `source`, an address of 127.0.0.0/8; a receive buffer of 0 bytes leaves the kernel's autotuning."""
    sock = socket.socket()
    if receive_buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.bind((source, 0))
    sock.connect(address)
    if context is not None:
        sock = context.wrap_socket(sock, server_hostname="localhost")
        sock.setblocking(False)
    return sock


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Connect, wait for the window to pass, and return the figures of the measured window."""
    address = (arguments.host, arguments.port)
    context = ssl.create_default_context(cafile=arguments.ca_file) if arguments.ca_file else None

    def url_of(index: int) -> str | None:
        if arguments.bare:
            return None
        name = f"{arguments.stream}-{index % arguments.streams}" if arguments.streams else arguments.stream
        suffix = "" if arguments.scheme == "rtmp" else ".flv"
        return f"{arguments.scheme}://{arguments.host}:{arguments.port}/{name}{suffix}"

    poll = select.epoll()
    viewers: dict[int, Viewer] = {}
    lost = 0
    nap_s = 0.0  # while connecting, each handshake is answered at once

    def pump(until: float) -> int:
        failed = 0
        while (left := until - time.monotonic()) > 0:
            if nap_s:
                time.sleep(min(left, nap_s))
            for fd, _ in poll.poll(min(left, 0.05)):
                viewer = viewers.get(fd)
                if viewer is None:
                    continue
                try:
                    viewer.readable()
                except OSError:
                    poll.unregister(fd)
                    viewer.sock.close()
                    del viewers[fd]
                    failed += 1
        return failed

    pumped_at = time.monotonic()
    for index in range(arguments.viewers):
        source = f"127.0.{1 + index // 250}.{1 + index % 250}"
        sock = connect(address, source, arguments.receive_buffer, context)
        viewer = Viewer(sock, url_of(index), measured=index % arguments.measure_every == 0)
        viewers[sock.fileno()] = viewer
        poll.register(sock, select.EPOLLIN)
        if index % 20 == 19 and not arguments.burst:
            now = time.monotonic()  # with TLS connecting takes as long as reading, and those before are not to wait
            lost += pump(now + max(0.01, now - pumped_at))
            pumped_at = time.monotonic()
    nap_s = arguments.nap
    lost += pump(time.monotonic() + arguments.settle)
    playing = sum(viewer.playing for viewer in viewers.values())
    print(json.dumps({"connected": len(viewers), "playing": playing}), flush=True)
    sys.stdin.readline()  # the bench says when the window begins
    for viewer in viewers.values():
        viewer.bytes = 0
        viewer.delays_us.clear()
        viewer.sequences.clear()
    began = time.monotonic()
    lost += pump(began + arguments.window)
    took = time.monotonic() - began
    delays = sorted(delay for viewer in viewers.values() for delay in viewer.delays_us)
    missing = 0
    for viewer in viewers.values():
        numbers = viewer.sequences
        if numbers:
            missing += numbers[-1] - numbers[0] + 1 - len(numbers)
    return {
        "viewers": len(viewers),
        "lost": lost,
        "bytes_per_viewer_and_s": sum(viewer.bytes for viewer in viewers.values()) / max(len(viewers), 1) / took,
        "least_bytes": min((viewer.bytes for viewer in viewers.values()), default=0),
        "measured": sum(1 for viewer in viewers.values() if viewer.sequences),
        "frames": len(delays),
        "missing": missing,
        "delay_p50_ms": delays[len(delays) // 2] / 1000 if delays else None,
        "delay_p99_ms": delays[len(delays) * 99 // 100] / 1000 if delays else None,
    }


def main() -> None:
    """Parse the arguments, run, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--scheme", choices=["rtmp", "http", "ws"], default="rtmp")
    parser.add_argument("--stream", default="live/bench")
    parser.add_argument("--streams", type=int, default=0, help="spread over NAME-0 to NAME-n instead of NAME")
    parser.add_argument("--burst", action="store_true", help="connect all at once")
    parser.add_argument("--viewers", type=int, default=1000)
    parser.add_argument("--measure-every", type=int, default=50)
    parser.add_argument("--settle", type=float, default=2.0)
    parser.add_argument("--window", type=float, default=10.0)
    parser.add_argument("--receive-buffer", type=int, default=0)
    parser.add_argument("--nap", type=float, default=0.0, help="pause between two rounds of reading, in seconds")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--ca-file", default="", help="speak TLS, and trust who this file says")
    print(json.dumps(run(parser.parse_args())), flush=True)


if __name__ == "__main__":
    main()
