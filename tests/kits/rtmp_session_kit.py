"""What the session tests share: a scripted client for server sessions, a scripted server for client sessions, a pair.

The scripted ends are raw: they write messages with a chunk writer and read replies with a chunk reader, and know
nothing of the session classes' states. `split` says how octets are handed over: whole, one at a time, or at random
places.
"""

import random

from flowctl.errors import RemoteProtocolError
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.limits import AmfLimits
from flowctl.wire.rtmp.amf.values import simplify
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.chunk.writer import ChunkWriter
from flowctl.wire.rtmp.client.session import ClientSession
from flowctl.wire.rtmp.events import ConnectRequested, PlayRequested, PublishRequested
from flowctl.wire.rtmp.handshake import Handshake
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.messages import EVENT_PING_REQUEST, Command, UserControl, decode_message, encode_control
from flowctl.wire.rtmp.server.session import ServerSession
from flowctl.wire.rtmp.session_config import ClientSessionConfig, ServerSessionConfig
from flowctl.wire.rtmp.wire import Message

TC_URL = "rtmp://example.com/live"


AUDIO, VIDEO, DATA = 8, 9, 18


def video(timestamp=0, payload=b"\x17\x01\0\0\0frame", msid=1):
    return Message(6, timestamp, VIDEO, msid, payload)


def ping(timestamp=7):
    return encode_control(UserControl(EVENT_PING_REQUEST, timestamp=timestamp))


def whole(data):
    return [data]


def single(data):
    return [data[at : at + 1] for at in range(len(data))]


def randomly(data):
    """Hand over pieces of 1 to 40 octets; the same ones in every run."""
    rng = random.Random(len(data))
    pieces, at = [], 0
    while at < len(data):
        size = rng.randint(1, 40)
        pieces.append(data[at : at + size])
        at += size
    return pieces


SPLITS = (whole, single, randomly)


class ScriptedClient:
    """A raw client on a server session, with a manual clock."""

    def __init__(self, config=None, *, split=whole, handshake=True):
        self.now = 0.0
        self.session = ServerSession(config or ServerSessionConfig(), now=self.now, rng=random.Random(1))
        self.split = split
        self.writer = ChunkWriter()
        self.reader = ChunkReader(WireLimits())
        self.handshake = Handshake.client(rng=random.Random(2))
        if handshake:
            self.shake()

    def shake(self):
        events = self.octets(self.handshake.start())
        return events + self.octets(self.handshake.receive(self.session.data_to_send()))

    def octets(self, data, *, control_only=False):
        events = []
        for piece in self.split(data):
            events += self.session.receive(piece, self.now, control_only=control_only)
        return events

    def send(self, *messages, control_only=False):
        return self.octets(b"".join(map(self.writer.write, messages)), control_only=control_only)

    def call(self, name, transaction_id, *values, stream_id=0, control_only=False):
        message = commands.command(name, transaction_id, *values, stream_id=stream_id)
        return self.send(message, control_only=control_only)

    def replies(self):
        return [decode_message(message) for message in self.messages()]

    def messages(self):
        return self.reader.feed(self.session.data_to_send())

    def statuses(self):
        """Return (level, code) of the status messages that the session has to send; replies are forgotten."""
        found = [reply for reply in self.replies() if isinstance(reply, Command) and reply.name == "onStatus"]
        return [(status.arguments[0]["level"], status.arguments[0]["code"]) for status in found]

    def connect(self, **members):
        """Send connect, accept it, drop the replies and return the event."""
        values = {"app": "live", "tcUrl": TC_URL} | members
        (event,) = self.call("connect", 1, values)
        self.session.accept_connect()
        self.replies()
        return event

    def create_stream(self):
        """Send createStream and return the stream id of the reply."""
        self.call("createStream", 2, None)
        (reply,) = self.replies()
        return int(reply.arguments[0])

    def publish(self, name="room", *arguments):
        """Connect, create a stream, publish, accept and return the stream id; replies are dropped."""
        self.connect()
        stream_id = self.create_stream()
        self.call("publish", 3, None, name, *arguments, stream_id=stream_id)
        self.session.accept_publish(stream_id)
        self.replies()
        return stream_id

    def play(self, name="room", *arguments):
        """Connect, create a stream, play, accept and return the stream id; replies are dropped."""
        self.connect()
        stream_id = self.create_stream()
        self.call("play", 3, None, name, *arguments, stream_id=stream_id)
        self.session.accept_play(stream_id)
        self.replies()
        return stream_id


class ScriptedServer:
    """A raw server under a client session."""

    def __init__(self, config=None, *, split=whole):
        self.now = 0.0
        self.session = ClientSession(config or ClientSessionConfig(), now=self.now, rng=random.Random(3))
        self.split = split
        self.writer = ChunkWriter()
        self.reader = ChunkReader(WireLimits())
        self.handshake = Handshake.server(random.Random(4))

    def shake(self):
        events = self.octets(self.handshake.receive(self.session.data_to_send()))
        self.handshake.receive(self.session.data_to_send())
        self.requests_of(self.handshake.leftover)
        return events

    def octets(self, data):
        events = []
        for piece in self.split(data):
            events += self.session.receive(piece, self.now)
        return events

    def send(self, *messages):
        return self.octets(b"".join(map(self.writer.write, messages)))

    def call(self, name, transaction_id, *values, stream_id=0):
        return self.send(commands.command(name, transaction_id, *values, stream_id=stream_id))

    def status(self, level, code, stream_id=1):
        return self.send(commands.on_status(stream_id, level, code, "words"))

    def requests_of(self, data):
        """Read octets of the session and return them decoded; remembered in `last` as well."""
        self.last = [decode_message(message) for message in self.reader.feed(data)]
        return self.last

    def requests(self):
        return self.requests_of(self.session.data_to_send())

    def named(self):
        return {request.name: request for request in self.requests() if isinstance(request, Command)}

    def connected(self):
        self.shake()
        return self.accept_connect()

    def accept_connect(self, **information):
        values = commands.status("status", commands.CONNECT_SUCCESS, "ok", **information)
        return self.call("_result", 1, {"fmsVer": "FMS/3,0,1,123"}, values)

    def start(self, code):
        """Connect, answer createStream with 1 and publish or play with `code`; return the events of the last."""
        self.connected()
        request = self.named()["createStream"]
        self.call("_result", request.transaction_id, None, 1.0)
        self.requests()
        return self.status("status", code)


class Pair:
    """A server session and a client session that talk to each other; the server says yes to everything."""

    def __init__(self, server=None, client=None, *, split=whole):
        self.now = 0.0
        self.server = ServerSession(server or ServerSessionConfig(), now=0.0, rng=random.Random(5))
        self.client = ClientSession(client or ClientSessionConfig(), now=0.0, rng=random.Random(6))
        self.split = split
        self.server_events = []
        self.client_events = []

    def run(self):
        while True:
            up = self.client.data_to_send()
            for piece in self.split(up):
                self.up(piece)
            down = self.server.data_to_send()
            for piece in self.split(down):
                self.client_events += self.client.receive(piece, self.now)
            if not up and not down:
                return

    def up(self, octets):
        """Carry octets from the client to the server, which answers requests."""
        events = self.server.receive(octets, self.now)
        while events:
            for event in events:
                self.answer(event)
            self.server_events += events
            events = self.server.resume(self.now)

    def answer(self, event):
        if isinstance(event, ConnectRequested):
            self.server.accept_connect()
        elif isinstance(event, PublishRequested):
            self.server.accept_publish(event.stream_id)
        elif isinstance(event, PlayRequested):
            self.server.accept_play(event.stream_id)


def metadata_of(event):
    """Return the properties in a `MetadataReceived`; {} when there are none that can be read."""
    try:
        values = amf0.decode(event.message.payload, AmfLimits(nodes=1 << 20))
    except RemoteProtocolError:
        return {}
    return (simplify(values[1]) if len(values) > 1 else None) or {}
