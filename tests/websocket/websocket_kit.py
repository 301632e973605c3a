"""What the tests of WebSocket share: a session that notes everything, and a client that may break the rules."""

from __future__ import annotations

import base64
import socket
import struct
import threading

from connection_kit import WAIT_S, wait_until
from loopback_kit import LOOPBACK

from flowctl import Server, WebSocketSession

TEXT, BINARY, CLOSE, PING, PONG = 0x1, 0x2, 0x8, 0x9, 0xA
KEY = base64.b64encode(bytes(range(16))).decode()
DEFLATE = "permessage-deflate"


def masked(opcode, payload=b"", *, fin=True, rsv=0, mask=True):
    """Return a client's frame; `mask` False breaks RFC 6455."""
    payload = payload.encode() if isinstance(payload, str) else payload
    size, bit = len(payload), 0x80 if mask else 0
    head = bytes([(0x80 if fin else 0) | rsv << 4 | opcode])
    if size < 126:
        head += bytes([bit | size])
    elif size < 65536:
        head += struct.pack(">BH", bit | 126, size)
    else:
        head += struct.pack(">BQ", bit | 127, size)
    if not mask:
        return head + payload
    key = b"\x9a\x3c\x51\xe7"
    return head + key + bytes(octet ^ key[at % 4] for at, octet in enumerate(payload))


def close_payload(code, reason=""):
    return struct.pack(">H", code) + (reason.encode() if isinstance(reason, str) else reason)


def handshake(path="/", **headers):
    """Return a request; an argument of None leaves its header out, further ones are added."""
    fields = {
        "Host": "example.test",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": KEY,
        "Sec-WebSocket-Version": "13",
    }
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode()


class RawClient:
    """A client on a socket of its own."""

    def __init__(self, address, request=None, *, receive_bytes=None, then=b"", **headers) -> None:
        self.sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        if receive_bytes is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(address)
        self.kept = b""
        self.head = ""
        request = handshake(**headers) if request is None else request
        if request:
            self.sock.sendall(request + then)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info) -> None:
        self.sock.close()

    def send(self, opcode, payload=b"", **how):
        self.sock.sendall(masked(opcode, payload, **how))

    def _fill(self) -> bool:
        data = self.sock.recv(65536)
        self.kept += data
        return bool(data)

    def read(self, size):
        while len(self.kept) < size:
            assert self._fill(), f"the server ended behind {self.kept!r}"
        data, self.kept = self.kept[:size], self.kept[size:]
        return data

    def read_head(self):
        """Return the status of the answer; `head` has all of it."""
        while b"\r\n\r\n" not in self.kept:
            assert self._fill(), f"the server ended behind {self.kept!r}"
        head, _, self.kept = self.kept.partition(b"\r\n\r\n")
        self.head = head.decode()
        return int(self.head.split()[1])

    def opened(self):
        assert self.read_head() == 101, self.head
        return self

    def read_to_end(self):
        """Return all that comes up to the end of the stream."""
        while self._fill():
            pass
        data, self.kept = self.kept, b""
        return data

    def read_frame(self):
        """Return (first octet, payload) of one frame, which must not be masked."""
        first, size = self.read(2)
        assert size < 128, "a server masks nothing"
        if size == 126:
            size = struct.unpack(">H", self.read(2))[0]
        elif size == 127:
            size = struct.unpack(">Q", self.read(8))[0]
        return first, self.read(size)

    def read_text(self):
        first, payload = self.read_frame()
        assert first == 0x80 | TEXT, (hex(first), payload)
        return payload.decode()

    def read_close(self):
        """Return (code, reason) of the next frame, a close frame, behind which the stream ends."""
        first, payload = self.read_frame()
        assert first == 0x80 | CLOSE, (hex(first), payload)
        assert self.read_to_end() == b"", "something goes behind the close frame"
        return (int.from_bytes(payload[:2], "big"), payload[2:].decode()) if payload else (None, "")


class Talk(WebSocketSession):
    """Sends back what it is sent, and notes what it is told."""

    made: list

    def __init__(self) -> None:
        super().__init__()
        self.got, self.ends = [], []
        self.request = None
        self.is_open, self.over = threading.Event(), threading.Event()
        self.made.append(self)

    def requested(self, request):
        self.request = request

    def accepted(self):
        self.is_open.set()

    def received_message(self, message):
        self.got.append(message)
        self.send_message(message)

    def closed(self, reason, details):
        self.ends.append((reason, details))
        self.over.set()

    def wait_end(self):
        assert self.over.wait(WAIT_S)
        return self.ends[0]


class Served:
    """A server of one class of sessions, which is given by its attributes over those of `base`."""

    def __init__(self, base=Talk, *, server=None, **attributes) -> None:
        self.sessions = []
        self.factory = type("Asked", (base,), {"made": self.sessions, **attributes})
        self.errors = []
        options = {
            "host": LOOPBACK,
            "on_error": lambda what, error: self.errors.append((what, error)),
            **(server or {}),
        }
        self.server = Server(self.factory, **options)
        self.server.start()
        self.address = self.server.address

    def __enter__(self):
        return self

    def __exit__(self, *exc_info) -> None:
        self.server.stop(2.0)

    def open(self, **how):
        """Return an open client and its session."""
        before = len(self.sessions)
        client = RawClient(self.address, **how).opened()
        session = wait_until(lambda: self.sessions[before:], "a session")[0]
        assert session.is_open.wait(WAIT_S)
        return client, session
