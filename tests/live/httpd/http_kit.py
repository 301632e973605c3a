"""A live server with an HTTP listener on loopback, streams put into its hub by hand, and raw clients."""

from __future__ import annotations

import socket
import time

from connection_kit import WAIT_S
from live_kit import AAC_HEADER, AVC_HEADER, audio, ends_of, inter, key
from loopback_kit import LOOPBACK
from wsproto import ConnectionType, WSConnection
from wsproto.events import BytesMessage, Request

from flowctl import flv
from flowctl.connection import Connection
from flowctl.core.server.admission import AdmissionLimits
from flowctl.flv import FlvReader
from flowctl.live.config import LiveConfig
from flowctl.live.httpd.exchange import Routes
from flowctl.live.httpd.formats import CHUNKS, FRAMES
from flowctl.live.httpd.serving import listen_http
from flowctl.live.httpd.session import FlvRoute, HttpSessions
from flowctl.live.server import build_live_server
from flowctl.testing.driving import MemoryWire
from flowctl.wire.rtmp.amf.amf0 import encode
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_DATA_AMF0, TYPE_VIDEO

FREE = AdmissionLimits(connections_per_address=0, new_per_address_and_s=0.0)
METADATA = encode("onMetaData") + encode({"width": 640.0})
HOST = "Host: example.test\r\n"
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
UPGRADE = f"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {KEY}\r\n"


class Publisher:
    """Publishes a stream of a server in the same process."""

    peer = ("192.0.2.7", 7)
    number = 7

    def __init__(self, server, name="live/room", *, headers=True) -> None:
        self.hub, self.clock = server.hub, server.clock
        self.stream = self.hub.publish(name, self)
        self.at = 0
        if headers:
            self.send(TYPE_DATA_AMF0, METADATA)
            self.send(TYPE_VIDEO, AVC_HEADER)
            self.send(TYPE_AUDIO, AAC_HEADER)

    def on_thread(self, callback, *args):
        callback(*args)

    def publish_replaced(self, stream):
        pass

    def send(self, type_id, payload, timestamp=None):
        self.stream.publish(self, type_id, self.at if timestamp is None else timestamp, payload, self.clock())

    def group(self, tag=b"", size=0):
        """Send a key frame, sound, and a picture."""
        self.send(TYPE_VIDEO, key(tag, size))
        self.send(TYPE_AUDIO, audio(tag))
        self.at += 40
        self.send(TYPE_VIDEO, inter(tag, size))
        self.at += 40

    def end(self):
        self.hub.unpublish(self.stream, self, grace=False)


class Client:
    """A raw HTTP client."""

    def __init__(self, address) -> None:
        self.host = HOST
        self.sock = socket.create_connection(address, WAIT_S)
        self.sock.settimeout(WAIT_S)
        self.rest = b""
        self.chunked = False

    def send(self, data) -> None:
        self.sock.sendall(data.encode() if isinstance(data, str) else data)

    def get(self, path="/live/room.flv", headers="", method="GET"):
        self.send(f"{method} {path} HTTP/1.1\r\n{self.host}{headers}\r\n")
        return self.answer(body=method != "HEAD")

    def read(self) -> bool:
        data = self.sock.recv(65536)
        self.rest += data
        return bool(data)

    def answer(self, *, body=True):
        """Return status, headers and body of the next answer; the body of a stream stays in `rest`."""
        while b"\r\n\r\n" not in self.rest:
            assert self.read(), self.rest
        head, _, self.rest = self.rest.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        self.chunked = headers.get("transfer-encoding") == "chunked"
        size = int(headers.get("content-length", 0)) if body else 0
        while len(self.rest) < size:
            assert self.read()
        found, self.rest = self.rest[:size], self.rest[size:]
        return int(status.split()[1]), headers, found

    def tags(self, count):
        reader, tags = FlvReader(check_back_pointers=True), []
        while True:
            data = self.body()
            tags += reader.feed(data) if data else []
            if len(tags) >= count:
                return reader.header, tags
            assert self.read(), f"ended after {len(tags)} tags"

    def body(self):
        """Return what has come of a body."""
        if not self.chunked:
            data, self.rest = self.rest, b""
            return data
        whole = b""
        while b"\r\n" in self.rest:
            size, _, behind = self.rest.partition(b"\r\n")
            if len(behind) < int(size, 16) + 2:
                break
            whole += behind[: int(size, 16)]
            self.rest = behind[int(size, 16) + 2 :]
        return whole

    def body_to_end(self):
        self.rest = self.to_end()
        ended = self.rest.endswith(b"\r\n0\r\n\r\n")
        return self.body(), ended

    def to_end(self) -> bytes:
        try:
            while self.read():
                pass
        except ConnectionResetError:
            pass
        found, self.rest = self.rest, b""
        return found

    def close(self) -> None:
        self.sock.close()


class Socket:
    """A WebSocket player by wsproto."""

    def __init__(self, web, target="/live/room.flv") -> None:
        self.client = web.client()
        self.wire = WSConnection(ConnectionType.CLIENT)
        self.send(Request(host="example.test", target=target))
        self.events = []

    def send(self, event) -> None:
        self.client.send(self.wire.send(event))

    def until(self, kind):
        while True:
            for event in self.wire.events():
                self.events.append(event)
                if isinstance(event, kind):
                    return event
            data = self.client.sock.recv(65536)
            self.wire.receive_data(data or None)

    def tags(self, count):
        """Return header and tags of the first frames, each of which is one of them."""
        reader = FlvReader(check_back_pointers=True)
        found = []
        while len(found) < count:
            whole = b""
            while True:
                message = self.until(BytesMessage)
                whole += bytes(message.data)
                if message.message_finished:
                    break
            tags = reader.feed(whole)
            assert len(tags) == 1 or (not found and len(whole) == flv.HEADER_BYTES + flv.BACK_POINTER_BYTES)
            found += tags
        return reader.header, found


class Web:
    """A live server with one HTTP listener."""

    def __init__(
        self, loop_factory, *, limits=None, handlers=None, hooks=None, limits_of=None, host=LOOPBACK, **config
    ) -> None:
        config.setdefault("admission", FREE)
        if limits_of is not None:
            config["limits"] = limits_of
        self.server = build_live_server(LiveConfig(port=0, loop_factory=loop_factory, **config), hooks)
        self.errors = []
        self.address = listen_http(self.server, host, 0, limits=limits, handlers=handlers)
        self.server.start()
        self.clients = []

    def client(self) -> Client:
        self.clients.append(Client(self.address))
        return self.clients[-1]

    def get(self, path="/live/room.flv", headers="", method="GET"):
        return self.client().get(path, headers, method)

    def publisher(self, name="live/room", **options) -> Publisher:
        return Publisher(self.server, name, **options)

    def viewers(self):
        return [viewer for _, viewer in self.server.hub.viewing()]

    def ended(self):
        return ends_of(self.server)

    def stop(self) -> None:
        for client in self.clients:
            client.close()
        assert self.server.stop(2.0)


class MemoryPlayer:
    """A player of FLV in a `World`: no sockets, no time that passes."""

    def __init__(self, world, headers="", name="live/room") -> None:
        self.wire = MemoryWire(("192.0.2.9", 9))
        self.session = HttpSessions(world.hub, Routes({".flv": FlvRoute()}), frozenset())()
        self.connection = Connection(self.wire, self.session, clock=world.clock, limits=world.limits)
        self.form = FRAMES if headers else CHUNKS
        self.wire.up += f"GET /{name}.flv HTTP/1.1\r\n{HOST}{headers}\r\n".encode()
        world.group.add_pollable(self.connection.core, self.connection.core.host.registration)
        world.run()

    @property
    def flags(self):
        """Return what the header tells of. None: it has not come."""
        return self._read()[0]

    @property
    def payloads(self):
        return [tag.payload for tag in self._read()[1] if tag.type_id != 18]

    def _read(self):
        reader, tags = FlvReader(check_back_pointers=True), []
        _, _, rest = bytes(self.wire.down).partition(b"\r\n\r\n")
        while rest and not rest.startswith((b"0\r\n", b"\x88")):
            inside = self.form.unwrapped(rest[: self._length(rest)])
            tags += reader.feed(rest[inside])
            rest = rest[self._length(rest) :]
        header = reader.header
        return header and {kind for kind in ("audio", "video") if getattr(header, kind)}, tags

    def _length(self, data):
        """Return the length of the first chunk or frame."""
        if self.form is CHUNKS:
            size, _, _ = data.partition(b"\r\n")
            return len(size) + int(size, 16) + 4
        at, size = {126: (4, data[2:4]), 127: (10, data[2:10])}.get(data[1], (2, data[1:2]))
        return at + int.from_bytes(size, "big")


def send_frames(world, publisher, count, make=key, type_id=TYPE_VIDEO, size=0):
    """Publish that many frames, ten a second; return them."""
    sent = []
    for number in range(count):
        publisher.at += 100
        publisher.send(type_id, frame := make(b"%d" % number) + b"." * size)
        sent.append(frame)
        world.run(0.1)
    return sent


def wait_for(condition):
    until = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)
    return found
