"""What the tests of the clients share: servers on the loopback interface, a poll group, waiting with a bound."""

from __future__ import annotations

import contextlib
import threading
import time

from flowctl.connection import Session
from flowctl.core.server.server import Server
from flowctl.live import build_live_server
from flowctl.live.config import LiveConfig
from flowctl.pollgroup import PollGroup
from flowctl.wire.client.address import parse_address
from flowctl.wire.client.connect import start_client
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.events import ConnectRefused, ConnectRequested, PlayRequested, PublishRequested
from flowctl.wire.rtmp.server.session import ServerSession
from flowctl.wire.rtmp.session_config import ServerSessionConfig
from flowctl.wire.rtmp.wire import Message

PATIENCE_S = 20.0
"""A bound for what should take a moment, on a machine that has other things to do."""

_nothing = threading.Event()


def wait_until(condition, what="the condition"):
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come true within {PATIENCE_S:g} s")
        _nothing.wait(0.01)
    return found


@contextlib.contextmanager
def live_server(**options):
    with build_live_server(LiveConfig(**options)) as server:
        yield server


@contextlib.contextmanager
def client_group():
    group = PollGroup("test-clients")
    group.start()
    try:
        yield group
    finally:
        group.stop()


def address(server, stream="live/room"):
    return parse_address(f"rtmp://127.0.0.1:{server.address[1]}/{stream}")


def start_player(group, player, profile):
    return start_client(
        group,
        player,
        receive_buffer_bytes=profile.receive_buffer_bytes,
        capacity_bytes=profile.capacity_bytes,
    )


def small_source(**settings):
    """A synthetic source of few bytes: 400 kbit/s of video with two key frames a second, and sound."""
    return SyntheticSource(
        **{"video_bit_rate": 400_000, "audio_bit_rate": 32_000, "key_interval_s": 0.5, "width": 64, "height": 64}
        | settings
    )


class Sink(Session):
    """A server's session that lets anybody publish, keeps the media, and can stop reading."""

    def __init__(self, config=None):
        self.rtmp = ServerSession(config or ServerSessionConfig(), now=time.monotonic())
        self.messages: list[Message] = []
        self.events: list[object] = []
        self.bytes_read = 0
        self.hold_after = None

    def received(self, data):
        self.bytes_read += len(data)
        refused = False
        for event in self.rtmp.receive(data, self.connection.now()):
            if isinstance(event, Message):
                self.messages.append(event)
                continue
            self.events.append(event)
            if isinstance(event, ConnectRequested):
                self.rtmp.accept_connect()
            elif isinstance(event, ConnectRefused):
                refused = True
            elif isinstance(event, PublishRequested):
                self.rtmp.accept_publish(event.stream_id)
            elif isinstance(event, PlayRequested):
                self.rtmp.accept_play(event.stream_id)
        answer = self.rtmp.data_to_send()
        if answer:
            self.send(answer)
        if refused:
            self.connection.close_after_flush("refused")
        if self.hold_after is not None and len(self.messages) >= self.hold_after:
            self.hold_after = None
            self.connection.receiver.pause(self, "test")

    def release(self):
        self.connection.receiver.resume(self)


@contextlib.contextmanager
def sink_server(*sinks, config=None):
    prepared, made = list(sinks), []

    def make():
        made.append(prepared.pop(0) if prepared else Sink(config))
        return made[-1]

    with Server(make) as server:
        yield server, made
