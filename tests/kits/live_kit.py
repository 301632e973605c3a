"""A live server without sockets, threads and sleeps: real connections, sessions and hub on a hand-made poll group.

`World` holds the clock, the group and the hub. `World.connect` makes a `Peer`: a `ClientSession` whose octets reach
the server's `Connection` through a `Wire`, an in-memory socket that can be slow, full or gone. `World.run` carries
octets and time until everything is quiet.
"""

from __future__ import annotations

import errno
from types import SimpleNamespace

from flowctl.connection import Connection
from flowctl.control import operations
from flowctl.core.flow.limits import NO_LIMITS
from flowctl.core.flow.policy import LIVE_POLICIES
from flowctl.core.sending.settings import SenderSettings
from flowctl.live.config import LiveConfig
from flowctl.live.hub import Hub
from flowctl.live.session import LiveSession
from flowctl.reasons import CloseReason
from flowctl.testing import ManualClock
from flowctl.testing.driving import HandGroup, MemoryWire
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp import events as rtmp_events
from flowctl.wire.rtmp.amf.amf0 import encode
from flowctl.wire.rtmp.client.session import ClientSession
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.session_config import ClientSessionConfig, ServerSessionConfig
from flowctl.wire.rtmp.wire import Message

AVC_HEADER = b"\x17\x00\x00\x00\x00\x01\x64\x00\x1f\xff\xe1\x00\x00"
AAC_HEADER = b"\xaf\x00\x12\x10"
STEP_S = 0.02
MOST_TURNS = 5000


def key(tag: bytes = b"", size: int = 0) -> bytes:
    """Return a key frame of H.264 (one IDR slice) that carries `tag`."""
    nal = b"\x65\x88" + tag.ljust(size, b".")
    return b"\x17\x01\x00\x00\x00" + len(nal).to_bytes(4, "big") + nal


def inter(tag: bytes = b"", size: int = 0) -> bytes:
    nal = b"\x41\x9a" + tag.ljust(size, b".")
    return b"\x27\x01\x00\x00\x00" + len(nal).to_bytes(4, "big") + nal


def disposable(tag: bytes = b"") -> bytes:
    nal = b"\x01\x9e" + tag
    return b"\x27\x01\x00\x00\x00" + len(nal).to_bytes(4, "big") + nal


def audio(tag: bytes = b"") -> bytes:
    return b"\xaf\x01" + tag.ljust(4, b".")


def perform(server, name: str, given: dict) -> dict:
    return operations.perform(server, name, given, operations.Permission.ADMIN)


def config(*, wire: dict | None = None, rtmp: dict | None = None, **fields) -> LiveConfig:
    """Return live settings; `wire` and `rtmp` are fields of the wire limits and of the RTMP sessions."""
    return LiveConfig(rtmp=ServerSessionConfig(limits=WireLimits(**(wire or {})), **(rtmp or {})), **fields)


def viewer_figures(viewer):
    connection = viewer.connection
    sender = connection.sender.statistics()
    pauses = dict(connection.receiver.statistics().pauses)
    return SimpleNamespace(
        number=viewer.number, peer=viewer.peer, state=sender.state, sender=sender, input_pauses=pauses
    )


def ends_of(server):
    """Return the connections of a server that have ended, oldest first: number, reason and details."""
    return [
        SimpleNamespace(number=event["connection"], reason=CloseReason(event["reason"]), details=event["why"])
        for event in server.recent.since(None, 1000)[0]
        if event["what"] == "close"
    ]


class Peer:
    """A client of the world's server.

    Attributes:
        events: what happened, media and acknowledgements left out.
        media: audio, video and data messages received.
        reads: whether it takes what comes; False is a client that has stopped reading.
    """

    def __init__(self, world, address, settings, **options) -> None:
        self.world = world
        self.session = ClientSession(settings or ClientSessionConfig(), now=world.clock())
        self.wire = MemoryWire(address)
        self.events, self.media = [], []
        self.reads = True
        self.live = LiveSession(world.hub, world.clock())
        self.connection = Connection(
            self.wire,
            self.live,
            policy=world.policy,
            clock=world.clock,
            limits=options.get("limits", world.limits),
            settings=options.get("settings", world.settings),
            on_closed=world.gone.append,
            work_limits=world.config.work,
        )
        world.peers.append(self)
        world.group.add_pollable(self.connection.core, self.connection.core.host.registration)

    # -- asking

    def publish(self, name="live/room", kind="live"):
        self.session.publish(kind=kind)
        return self._connect(name)

    def play(self, name="live/room"):
        self.session.play()
        return self._connect(name)

    def _connect(self, name):
        self.session.connect(f"rtmp://example.com/{name}")
        self.world.run()
        return self

    def command(self, name, *values, stream_id=None, transaction_id=0) -> None:
        msid = self.session.stream_id if stream_id is None else stream_id
        self.send(self.session.send_message(commands.command(name, transaction_id, *values, stream_id=msid)))

    def message(self, message) -> None:
        self.send(self.session.send_message(message))

    def send(self, octets, *, run=True) -> None:
        self.wire.up += octets
        if run:
            self.world.run()

    # -- publishing

    def headers(self) -> None:
        self.send(self.session.send_tag(18, 0, encode("onMetaData", {"width": 640.0})))
        self.send(self.session.send_tag(9, 0, AVC_HEADER))
        self.send(self.session.send_tag(8, 0, AAC_HEADER))

    def video(self, timestamp, payload) -> None:
        self.send(self.session.send_tag(9, timestamp, payload))

    def audio(self, timestamp, payload) -> None:
        self.send(self.session.send_tag(8, timestamp, payload))

    # -- what came

    def carry(self) -> bool:
        """Carry octets between client and wire; return whether there were any."""
        out = self.session.data_to_send()
        self.wire.up += out
        if not self.reads or not self.wire.down:
            return bool(out)
        data = bytes(self.wire.down)
        self.wire.down.clear()
        for event in self.session.receive(data, self.world.clock()):
            if isinstance(event, Message):
                self.media.append(event)
            elif not isinstance(event, rtmp_events.Acknowledged):
                self.events.append(event)
        return True

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.media if message.type_id in {8, 9}]

    @property
    def times(self) -> list[tuple[bytes, int]]:
        return [(message.payload, message.timestamp) for message in self.media if message.type_id in {8, 9}]

    def has(self, kind, **values) -> bool:
        return any(
            isinstance(event, kind) and all(getattr(event, name) == value for name, value in values.items())
            for event in self.events
        )

    @property
    def codes(self) -> list[str]:
        found = []
        for event in self.events:
            if isinstance(event, rtmp_events.StatusReceived | rtmp_events.Rejected):
                found.append(event.code)
            elif isinstance(event, rtmp_events.StreamEnded):
                found.append(event.reason)
        return found

    def forget(self) -> None:
        self.media.clear()
        self.events.clear()

    @property
    def state(self):
        return self.connection.sender.state

    @property
    def ended(self):
        return self.connection.ended

    @property
    def reason(self):
        return None if self.ended is None else self.ended[0]

    def vanish(self) -> None:
        """End without a word: the connection breaks."""
        self.wire.broken = ConnectionResetError(errno.ECONNRESET, "reset by peer")
        self.world.run()

    def leave(self) -> None:
        """End the stream of octets in order."""
        self.wire.ended = True
        self.world.run()


class World:
    """A live server, its clients and the time."""

    def __init__(self, settings=None, *, limits=NO_LIMITS, piece=None, sender=None) -> None:
        self.clock = ManualClock()
        self.group = HandGroup(self.clock)
        self.config = settings or LiveConfig()
        self.policy = LIVE_POLICIES[self.config.policy]
        self.limits, self.settings = limits, sender or SenderSettings()
        self.hub = Hub(self.config, self.clock, self.group.call_later)
        self.peers, self.gone = [], []
        self.piece = piece
        self._ports = iter(range(40_000, 60_000))

    def connect(self, address="192.0.2.1", settings=None, **options) -> Peer:
        peer = Peer(self, (address, next(self._ports)), settings, **options)
        if self.piece is not None:
            peer.wire.piece = self.piece
        return peer

    def publisher(self, name="live/room", **options) -> Peer:
        peer = self.connect(**options).publish(name)
        if peer.session.stream_id and peer.ended is None and not peer.codes:
            peer.headers()
        return peer

    def player(self, name="live/room", **options) -> Peer:
        """Return a client that plays, or waits."""
        return self.connect(**options).play(name)

    def run(self, seconds=STEP_S * 3) -> None:
        """Carry octets, and time, in steps until `seconds` have passed and everything is quiet."""
        step = max(STEP_S, seconds / 500)
        passed = 0.0
        self._settle()
        while passed < seconds:
            self.group.run(min(step, seconds - passed))
            passed += step
            self._settle()

    def _settle(self) -> None:
        for _ in range(MOST_TURNS):
            busy = self.group.turn()
            for peer in self.peers:
                busy = peer.carry() or busy
            if not busy:
                return
        raise AssertionError("the world does not come to rest")

    def stream(self, name="live/room"):
        return self.hub.find_stream(name)
