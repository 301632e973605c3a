"""A client without a thread, for the end-to-end tests: what the test does not read is not read by anybody."""

from __future__ import annotations

import contextlib
import time

from e2e_kit import NAME, PATIENCE_S, address_of

from flowctl.wire.client.address import parse_address
from flowctl.wire.client.connect import connect_socket
from flowctl.wire.rtmp.client.session import ClientSession
from flowctl.wire.rtmp.events import PlayStarted, Pong, StatusReceived
from flowctl.wire.rtmp.messages import Acknowledgement, encode_control
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.wire import Message


class RawPlayer:
    """A player on a blocking socket with a small receive buffer, which reads only when it is told to.

    Attributes:
        events: what the protocol told, media left out.
        pongs: timestamps of the pings that the server answered.
    """

    def __init__(self, server, *, name=NAME, receive_buffer_bytes=16 * 1024):
        self.sock = connect_socket(parse_address(address_of(server, name)), receive_buffer_bytes=receive_buffer_bytes)
        self.sock.settimeout(PATIENCE_S)
        self.local_port = self.sock.getsockname()[1]
        self.session = ClientSession(ClientSessionConfig(acknowledge=False), now=time.monotonic())
        self.events = []
        self.pongs = []
        self.session.play()
        self.session.connect(parse_address(address_of(server, name)))

    def __enter__(self):
        self.read_until(lambda: any(isinstance(event, (PlayStarted, StatusReceived)) for event in self.events))
        return self

    def __exit__(self, *exc_info):
        self.sock.close()

    def read(self):
        self.flush()
        data = self.sock.recv(65536)
        for event in self.session.receive(data, time.monotonic()) if data else ():
            if isinstance(event, Pong):
                self.pongs.append(event.timestamp)
            elif not isinstance(event, Message):
                self.events.append(event)
        self.flush()
        return bool(data)

    def read_until(self, condition):
        """Read until `condition()` holds, which may need no more than time."""
        end = time.monotonic() + PATIENCE_S
        self.sock.settimeout(0.05)
        while not condition():
            assert time.monotonic() < end, "not in time"
            with contextlib.suppress(TimeoutError):
                assert self.read(), "the server ended the connection"
        self.sock.settimeout(PATIENCE_S)

    def read_to_end(self):
        """Read until the server's end of the stream; a reset raises."""
        while self.sock.recv(65536):
            pass

    def flush(self):
        self.sock.sendall(self.session.data_to_send())

    def send_control(self, value):
        self.sock.sendall(self.session.send_message(encode_control(value)))

    def send_acknowledgement(self, count):
        self.sock.sendall(self.session.send_message(encode_control(Acknowledgement(count))))
