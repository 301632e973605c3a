"""Clients and servers for tests of a cluster: plain sockets, and waiting for events with a limit."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from live_kit import AAC_HEADER, AVC_HEADER, audio, config, inter, key

from flowctl.live.server import LiveServer
from flowctl.wire.rtmp.client.session import ClientSession
from flowctl.wire.rtmp.events import PlayStarted, PublishStarted
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.url import url_of
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_VIDEO, Message

LIMIT_S = 20.0
CLIENTS = []
"""All clients of a test; `close_clients` ends them."""
METADATA = b"\x02\x00\x0aonMetaData\x08\x00\x00\x00\x01\x00\x05width\x00\x40\x94\x00\x00\x00\x00\x00\x00\x00\x00\x09"


def until(what, said="what was waited for"):
    end = time.monotonic() + LIMIT_S
    while not (found := what()):
        assert time.monotonic() < end, f"{said} did not come within {LIMIT_S:g} s"
        time.sleep(0.002)
    return found


def server(**fields):
    return LiveServer(config(**{"port": 0, "control": "off", **fields}))


class Client:
    """A client on a plain socket, read by a thread of its own.

    Attributes:
        media: (type, timestamp, payload) of what came.
    """

    def __init__(self, address, *, ask, name="live/room", path=""):
        self.session = ClientSession(ClientSessionConfig(), now=time.monotonic())
        self.lock = threading.Lock()
        self.media, self.events, self.over = [], [], False
        getattr(self.session, ask)()
        if path:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.connect(path)
        else:
            self.sock = socket.create_connection(address, LIMIT_S)
        self.sock.settimeout(None)
        self.session.connect(url_of(name, "host"))
        self.flush()
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()
        CLIENTS.append(self)

    def flush(self):
        with self.lock:
            data = self.session.data_to_send()
            if data:
                self.sock.sendall(data)

    def read(self):
        while True:
            try:
                data = self.sock.recv(65536)
            except OSError:
                data = b""
            if not data:
                self.over = True
                return
            for event in self.session.receive(data, time.monotonic()):
                if isinstance(event, Message):
                    self.media.append((event.type_id, event.timestamp, event.payload))
                else:
                    self.events.append(event)
            try:
                self.flush()
            except OSError:
                self.over = True
                return

    def has(self, kind, code=None):
        return [item for item in self.events if isinstance(item, kind) and (code is None or item.code == code)]

    def close(self):
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.thread.join(LIMIT_S)
        self.sock.close()

    # -- publishing

    def put(self, *messages):
        with self.lock:
            for type_id, timestamp, payload in messages:
                self.sock.sendall(self.session.send_tag(type_id, timestamp, payload))


def close_clients():
    while CLIENTS:
        CLIENTS.pop().close()


def publisher(address, name="live/room", **more):
    found = Client(address, ask="publish", name=name, **more)
    until(lambda: found.has(PublishStarted) or found.over, "the start of the publication")
    return found


def player(address, name="live/room", **more):
    return Client(address, ask="play", name=name, **more)


def playing(address, name="live/room", **more):
    found = player(address, name, **more)
    until(lambda: found.has(PlayStarted), "the start of the play")
    return found


HEADERS = [(18, 0, METADATA), (TYPE_VIDEO, 0, AVC_HEADER), (TYPE_AUDIO, 0, AAC_HEADER)]


def pictures(first, last, *, key_every=10, step_ms=40):
    found = []
    for number in range(first, last):
        tag = b"%08d" % number
        frame = key(tag) if number % key_every == 0 else inter(tag)
        found += [(TYPE_VIDEO, number * step_ms, frame), (TYPE_AUDIO, number * step_ms + 1, audio(tag))]
    return found


def numbers(media):
    return [int(payload[-8:]) for type_id, _, payload in media if type_id == TYPE_VIDEO and payload[-8:].isdigit()]
