"""A live server without sockets, threads and sleeps: real connections, sessions and hub on a hand-made poll group.

`World` holds the clock, the group and the hub. `World.connect` makes a `Peer`: a `ClientSession` whose octets reach
the server's `Connection` through a `Wire`, an in-memory socket that can be slow, full or gone. `World.run` carries
octets and time until everything is quiet.
"""

from __future__ import annotations

import errno
import socket

from flowctl._processor import DeferredProcessor
from flowctl.connection import Connection
from flowctl.deadlines import Deadlines
from flowctl.limits import NO_LIMITS
from flowctl.live.config import LiveConfig
from flowctl.live.hub import Hub
from flowctl.live.session import LiveSession
from flowctl.policy import LivePolicy
from flowctl.pollgroup import GroupState
from flowctl.rtmp import commands
from flowctl.rtmp import events as rtmp_events
from flowctl.rtmp.client_session import ClientSession
from flowctl.rtmp.limits import WireLimits
from flowctl.rtmp.session_config import ClientSessionConfig, ServerSessionConfig
from flowctl.rtmp.wire import Message
from flowctl.sender_types import SenderSettings
from flowctl.testing import ManualClock, ManualGroup
from flowctl.work import WorkBook

AVC_HEADER = b"\x17\x00\x00\x00\x00\x01\x64\x00\x1f\xff\xe1\x00\x00"
AAC_HEADER = b"\xaf\x00\x12\x10"
STEP_S = 0.02
MOST_TURNS = 5000


def key(tag: bytes = b"", size: int = 0) -> bytes:
    """Return a key frame of H.264 (one IDR slice) that carries `tag`."""
    nal = b"\x65\x88" + tag.ljust(size, b".")
    return b"\x17\x01\x00\x00\x00" + len(nal).to_bytes(4, "big") + nal


def inter(tag: bytes = b"", size: int = 0) -> bytes:
    """Return a frame that others refer to."""
    nal = b"\x41\x9a" + tag.ljust(size, b".")
    return b"\x27\x01\x00\x00\x00" + len(nal).to_bytes(4, "big") + nal


def disposable(tag: bytes = b"") -> bytes:
    """Return a frame that no other refers to."""
    nal = b"\x01\x9e" + tag
    return b"\x27\x01\x00\x00\x00" + len(nal).to_bytes(4, "big") + nal


def audio(tag: bytes = b"") -> bytes:
    """Return a frame of AAC."""
    return b"\xaf\x01" + tag.ljust(4, b".")


def config(*, wire: dict | None = None, rtmp: dict | None = None, **fields) -> LiveConfig:
    """Return live settings; `wire` and `rtmp` are fields of the wire limits and of the RTMP sessions."""
    return LiveConfig(rtmp=ServerSessionConfig(limits=WireLimits(**(wire or {})), **(rtmp or {})), **fields)


class Wire:
    """Both directions of a connection in memory; the server's socket, as far as a connection uses one.

    Attributes:
        up: octets on their way to the server.
        down: octets on their way to the client.
        room: octets that `down` takes before it says EAGAIN. None: any number.
        piece: octets that one read returns at most.
        ended: the client has ended its stream.
        broken: the error of the next read or write. None: none.
        closed: the server has closed it.
    """

    family = socket.AF_UNIX
    numbers = iter(range(1000, 1_000_000))

    def __init__(self, peer) -> None:
        self.peer = peer
        self.number = next(self.numbers)
        self.up, self.down = bytearray(), bytearray()
        self.room = None
        self.piece = 1 << 20
        self.ended = self.closed = self.reset = False
        self.broken = None

    def setblocking(self, flag) -> None:
        assert flag is False

    def setsockopt(self, level, option, value) -> None:
        self.reset = self.reset or option == socket.SO_LINGER

    def getpeername(self):
        return self.peer

    def getsockopt(self, level, option, size=None):
        if (level, option) == (socket.SOL_SOCKET, socket.SO_ERROR):
            return errno.ECONNRESET if self.broken is not None else 0
        raise OSError(errno.EOPNOTSUPP, "this is no TCP socket")

    def fileno(self) -> int:
        return -1 if self.closed else self.number

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def recv_into(self, memory) -> int:
        self._check()
        count = min(len(memory), len(self.up), self.piece)
        if not count:
            if self.ended:
                return 0
            raise BlockingIOError(errno.EAGAIN, "nothing there")
        memory[:count] = self.up[:count]
        del self.up[:count]
        return count

    def recv(self, most, flags) -> bytes:
        self._check()
        data = bytes(self.up[:most])
        del self.up[:most]
        if not data and not self.ended:
            raise BlockingIOError(errno.EAGAIN, "nothing there")
        return data

    def send(self, data) -> int:
        self._check()
        count = len(data) if self.room is None else min(len(data), max(self.room - len(self.down), 0))
        if not count:
            raise BlockingIOError(errno.EAGAIN, "full")
        self.down += data[:count]
        return count

    def sendmsg(self, buffers) -> int:
        return self.send(b"".join(buffers))

    def shutdown(self, how) -> None:
        self._check()

    def close(self) -> None:
        self.closed = True


class HandGroup(ManualGroup):
    """A poll group that is turned by hand: what a connection needs of one, and `turn`."""

    state = GroupState.RUNNING
    name = "hand"

    def __init__(self, clock) -> None:
        super().__init__(clock)
        self.processor = DeferredProcessor(lambda: None, self.report)
        self.deadlines = Deadlines(self._arm, self.report)
        self.scratch = memoryview(bytearray(256 * 1024))
        self.bytes_in = self.bytes_out = 0
        self.failures: list[tuple[str, Exception]] = []
        self.inputs, self.outputs, self.ends = {}, {}, {}
        self.work = WorkBook(self.call_soon)
        self.gathered = {}

    def report(self, where, error) -> None:
        self.failures.append((where, error))

    def _arm(self, when) -> None:
        self.call_later(max(0.0, when - self.clock()), lambda: self.deadlines.run_due(self.clock()))

    def add(self, connection) -> None:
        connection.registration.bind(self.processor, hold=True)
        connection.attached(self)
        connection.registration.activate()

    def remove_pollable(self, connection) -> None:
        connection.detached(self)
        connection.registration.unbind()

    def watch_input(self, wire, callback, *, gather=False) -> None:
        self.ends.pop(wire, None)
        self.inputs[wire] = callback
        self.gathered[wire] = gather

    def watch_end(self, wire, callback) -> None:
        self.inputs.pop(wire, None)
        self.ends[wire] = callback

    def unwatch_input(self, wire) -> None:
        self.inputs.pop(wire, None)
        self.ends.pop(wire, None)

    def watch_output(self, wire, callback) -> None:
        self.outputs[wire] = callback

    def unwatch_output(self, wire) -> None:
        self.outputs.pop(wire, None)

    def turn(self) -> bool:
        """Do what a turn of the loop would; return whether there was anything to do."""
        busy = False
        for wire, callback in list(self.inputs.items()):
            if wire in self.inputs and (wire.up or wire.ended or wire.broken):
                callback()
                busy = True
        for wire, callback in list(self.outputs.items()):
            if wire in self.outputs and (wire.broken or wire.room is None or wire.room > len(wire.down)):
                callback()
                busy = True
        for wire, callback in list(self.ends.items()):
            if wire in self.ends and wire.broken:
                del self.ends[wire]
                callback(True)
                busy = True
        pending = self.processor.statistics().pending
        self.processor.run_round()
        self.run()
        return busy or bool(pending) or bool(self.processor.statistics().pending)


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
        self.wire = Wire(address)
        self.events, self.media = [], []
        self.reads = True
        self.live = world.session(world.hub, world.config, world.policy, world.clock())
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
        world.group.add(self.connection)

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
        """Send any command on the peer's message stream."""
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
        """Send metadata and the sequence headers of both tracks."""
        self.send(self.session.send_metadata({"width": 640.0}))
        self.send(self.session.send_video(0, AVC_HEADER))
        self.send(self.session.send_audio(0, AAC_HEADER))

    def video(self, timestamp, payload) -> None:
        self.send(self.session.send_video(timestamp, payload))

    def audio(self, timestamp, payload) -> None:
        self.send(self.session.send_audio(timestamp, payload))

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
        """Bodies of the audio and video messages received."""
        return [message.payload for message in self.media if message.type_id in {8, 9}]

    @property
    def times(self) -> list[tuple[bytes, int]]:
        """(body, timestamp) of the audio and video messages received."""
        return [(message.payload, message.timestamp) for message in self.media if message.type_id in {8, 9}]

    def has(self, kind, **values) -> bool:
        """Return whether an event of that kind, with those values, has happened."""
        return any(
            isinstance(event, kind) and all(getattr(event, name) == value for name, value in values.items())
            for event in self.events
        )

    @property
    def codes(self) -> list[str]:
        """Status codes that came, in order."""
        found = []
        for event in self.events:
            if isinstance(event, rtmp_events.StatusReceived | rtmp_events.Rejected):
                found.append(event.code)
            elif isinstance(event, rtmp_events.StreamEnded):
                found.append(event.reason)
        return found

    def forget(self) -> None:
        """Forget what came so far."""
        self.media.clear()
        self.events.clear()

    @property
    def state(self):
        return self.connection.sender.state

    @property
    def ended(self):
        return self.connection.ended

    def vanish(self) -> None:
        """End without a word: the connection breaks."""
        self.wire.broken = ConnectionResetError(errno.ECONNRESET, "reset by peer")
        self.world.run()

    def leave(self) -> None:
        """End the stream of octets in order."""
        self.wire.ended = True
        self.world.run()


class World:
    """A live server, its clients and the time.

    Args:
        settings: of the live server. None: the defaults.
        limits: of every connection's Sender.
        piece: octets that the server reads at a time, at most.
        sender: of every connection's Sender.
    """

    def __init__(self, settings=None, *, limits=NO_LIMITS, piece=None, sender=None) -> None:
        self.clock = ManualClock()
        self.group = HandGroup(self.clock)
        self.config = settings or LiveConfig()
        self.policy = LivePolicy()
        self.limits, self.settings = limits, sender or SenderSettings()
        self.hub = Hub(self.config, self.clock, self.group.call_later)
        self.peers, self.gone = [], []
        self.session = LiveSession  # makes the session of a connection
        self.piece = piece
        self._ports = iter(range(40_000, 60_000))

    def connect(self, address="192.0.2.1", settings=None, **options) -> Peer:
        """Return a new client that has said nothing yet."""
        peer = Peer(self, (address, next(self._ports)), settings, **options)
        if self.piece is not None:
            peer.wire.piece = self.piece
        return peer

    def publisher(self, name="live/room", **options) -> Peer:
        """Return a client that publishes and has sent its headers."""
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
        """Return the figures of a stream."""
        return self.hub.snapshot().streams[name]
