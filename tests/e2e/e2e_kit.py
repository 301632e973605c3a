"""What the end-to-end tests use: a live server, players and publishers of ours, FFmpeg processes, and waiting.

Nothing here asserts a time. `wait_until` looks for a condition until it holds and fails, naming it, when it does not
within a time that is far longer than any machine needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import subprocess
import time
from pathlib import Path
from traceback import format_exception

import av

from flowctl.admission import AdmissionLimits
from flowctl.client.connect import connect_socket, parse_address, start_client
from flowctl.client.player import HEALTHY, RtmpPlayer
from flowctl.client.publisher import RtmpPublisher
from flowctl.flow import MessageClass
from flowctl.flv import TAG_AUDIO, TAG_VIDEO, FlvReader, FlvTag, FlvWriter
from flowctl.live.config import LiveConfig
from flowctl.live.server import LiveServer
from flowctl.pollgroup import PollGroup
from flowctl.rtmp import commands
from flowctl.rtmp.client_session import ClientSession
from flowctl.rtmp.events import PlayStarted, Pong, StatusReceived
from flowctl.rtmp.limits import WireLimits
from flowctl.rtmp.media import inspect
from flowctl.rtmp.messages import encode_control
from flowctl.rtmp.session_config import ClientSessionConfig, ServerSessionConfig
from flowctl.rtmp.wire import Message
from flowctl.serving import ServeOptions

PATIENCE_S = 20.0
NAME = "live/stream"
MEDIA = frozenset({TAG_AUDIO, TAG_VIDEO})
PICTURES = frozenset({MessageClass.KEY, MessageClass.INTER, MessageClass.DISPOSABLE})
CLOCK = 1 << 32


def wait_until(condition, what, timeout_s=PATIENCE_S):
    """Return the first true value of `condition()`; fail when none came in time."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.005)


# -- the server


@contextlib.contextmanager
def open_live_server(*, limits=None, wire=None, rtmp=None, config=None, **options):
    """Run a live server; fail if one of its handlers raised.

    Args:
        limits: of the viewers. None: the server's defaults.
        wire: fields of `WireLimits`.
        rtmp: fields of `ServerSessionConfig`.
        config: fields of `LiveConfig`.
        options: fields of `ServeOptions`.
    """
    failures = []
    if limits is not None:
        options["limits"] = limits
    # Twenty healthy players, several bad ones and a publisher all come from one address within a moment.
    options.setdefault("admission", AdmissionLimits(connections_per_address=64, burst_per_address=64))
    session = ServerSessionConfig(limits=WireLimits(**(wire or {})), **(rtmp or {}))
    server = LiveServer(
        ServeOptions(
            on_error=lambda where, error: failures.append((where, "".join(format_exception(error)))), **options
        ),
        LiveConfig(rtmp=session, **(config or {})),
    )
    with server:
        yield server
    assert failures == [], failures


def address_of(server, name=NAME):
    """Return the URL of a stream."""
    return f"rtmp://127.0.0.1:{server.address[1]}/{name}"


def figures(server, name=NAME):
    """Return the statistics of a stream. None: there is no such stream."""
    return server.hub.snapshot().streams.get(name)


def wait_for_viewers(server, count, name=NAME):
    """Wait until `count` viewers follow the stream, or wait for it."""
    wait_until(lambda: (stream := figures(server, name)) and len(stream.viewers) == count, f"{count} viewers")


def wait_for_keys(server, count, name=NAME):
    """Wait until at least `count` key frames were published."""
    return wait_until(
        lambda: (stream := figures(server, name)) and stream.messages_in[MessageClass.KEY] >= count,
        f"{count} key frames published",
    )


def wait_for_states(server, number, *states, name=NAME):
    """Wait until the viewer with this connection number has been in all of `states`."""

    def been():
        viewer = viewer_of(server, number, name)
        return viewer and all(viewer.sender.time_in_states_s[state] > 0 for state in states)

    wait_until(been, f"viewer in states {[state.name for state in states]}")


def viewer_of(server, number, name=NAME):
    """Return the figures of the viewer with this connection number. None: it is not there."""
    stream = figures(server, name)
    return next((viewer for viewer in stream.viewers if viewer.number == number), None) if stream else None


def ended_viewer(server, number):
    """Return the last figures of a viewer that has gone. None: it has not."""
    return next((viewer for viewer in server.hub.snapshot().ended if viewer.number == number), None)


def connection_to(server, client):
    """Return the server's end of the connection of a player or publisher of ours."""
    return wait_until(
        lambda: next((item for item in server.connections() if item.peer[1] == client.local_port), None),
        "the server's end",
    )


def resident_bytes():
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


# -- our own clients


class Play:
    """A player of ours and everything it got.

    Attributes:
        player: the client.
        connection: its connection.
        messages: (type, timestamp, payload) of each audio and video message, in order.
        classes: of each of them.
    """

    def __init__(self, group, url, profile, keep, **settings):
        self.messages = []
        self.classes = []
        self.player = RtmpPlayer(
            parse_address(url), profile, on_message=self._take if keep is None else keep, **settings
        )
        self.connection = start_client(
            group,
            self.player,
            receive_buffer_bytes=profile.receive_buffer_bytes,
            capacity_bytes=profile.capacity_bytes,
        )
        self.local_port = self.connection._sock.getsockname()[1]

    def _take(self, message, message_class):
        self.messages.append((message.type_id, message.timestamp, message.payload))
        self.classes.append(message_class)

    @property
    def codes(self):
        """Codes of what the server said."""
        return [status.code for status in self.player.statuses]

    @property
    def end(self):
        """How the connection ended. None: it has not."""
        return self.player.end


class Publish:
    """A publisher of ours and everything it sent: (type, timestamp, payload) of audio and video, and the classes."""

    def __init__(self, group, url, source, **settings):
        self.messages = []
        self.classes = []
        self.publisher = RtmpPublisher(parse_address(url), source, on_sent=self._take, **settings)
        self.connection = start_client(group, self.publisher)
        self.local_port = self.connection._sock.getsockname()[1]

    def _take(self, tag, message_class):
        if tag.type_id in MEDIA:
            self.messages.append((tag.type_id, tag.timestamp, tag.payload))
            self.classes.append(message_class)

    @property
    def end(self):
        """How the connection ended. None: it has not."""
        return self.publisher.end


class Clients:
    """A thread for players and publishers of ours, beside the server's threads."""

    def __init__(self):
        self.failures = []
        self.group = PollGroup("e2e-clients", on_error=lambda where, error: self.failures.append((where, repr(error))))

    def __enter__(self):
        self.group.start()
        return self

    def __exit__(self, *exc_info):
        self.group.stop(5.0)
        assert self.failures == []

    def play(self, server, profile=HEALTHY, *, name=NAME, keep=None, **settings):
        """Play; returns when connected."""
        return Play(self.group, address_of(server, name), profile, keep, **settings)

    def publish(self, server, source, *, name=NAME, **settings):
        """Publish; returns when connected."""
        return Publish(self.group, address_of(server, name), source, **settings)


def wait_for_end(*clients):
    """Wait until the clients' connections are over."""
    wait_until(lambda: all(client.end is not None for client in clients), "the clients' connections over")


def keys_in(classes):
    """Return where key frames are in a list of classes."""
    return [index for index, item in enumerate(classes) if item is MessageClass.KEY]


def frames_of(messages, type_id):
    """Return (timestamp, payload) of the frames of one track: no headers, and nothing that marks an end."""
    wanted = PICTURES if type_id == TAG_VIDEO else {MessageClass.AUDIO}
    return [
        (timestamp, payload)
        for kind, timestamp, payload in messages
        if kind == type_id and inspect(kind, payload).message_class in wanted
    ]


def read_flv(path):
    """Return (type, timestamp, payload) of the audio and video tags of a file."""
    return [tuple(tag) for tag in FlvReader().feed(Path(path).read_bytes()) if tag.type_id in MEDIA]


# -- FFmpeg

_STREAM_OUTPUT = ("-f", "flv", "-flvflags", "no_duration_filesize")
"""A stream has no beginning to go back to; without the flag FFmpeg complains about it at the end."""


class Programs:
    """Starts FFmpeg processes and ends, by their ids, those that a test has left running."""

    def __init__(self, path, folder):
        self.path = path
        self.folder = folder
        self._running = []

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        for program in self._running:
            if program.process.poll() is None:
                program.process.kill()
            program.process.wait(10)

    def start(self, *arguments):
        """Start FFmpeg."""
        program = Program(
            [str(self.path), "-hide_banner", "-nostdin", "-loglevel", "warning", *map(str, arguments)],
            self.folder / f"ffmpeg-{len(self._running)}.log",
        )
        self._running.append(program)
        return program

    def publish(self, server, path, *options, rate=1.0, name=NAME):
        """Publish a file with its own timestamps, `rate` times as fast as real time."""
        output = ("-c", "copy", *_STREAM_OUTPUT, address_of(server, name))
        return self.start("-readrate", rate, "-i", path, *options, *output)

    def play(self, server, target, *, name=NAME):
        """Record a stream to an FLV file; it ends when the stream does."""
        return self.start("-i", address_of(server, name), "-c", "copy", "-copyts", "-f", "flv", "-y", target)

    def decode(self, path):
        """Decode a file; return what FFmpeg had to complain about. Any error ends it with a status that is not 0."""
        # Pictures keep their own times: a constant frame rate would be made of those that a thinned viewer got.
        output = ("-fps_mode", "passthrough", "-enc_time_base:v", "demux", "-f", "null", "-")
        program = self.start("-xerror", "-err_detect", "explode", "-i", path, *output)
        status = program.wait()
        return status, program.log


class Program:
    """One FFmpeg process; its words go to a file, so that it never waits for a reader."""

    def __init__(self, command, log_path):
        self._log_path = log_path
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)

    @property
    def log(self):
        """What it has said."""
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    def wait(self):
        """Return its exit status."""
        return self.process.wait(PATIENCE_S)

    def kill(self):
        """End it as a crash would."""
        self.process.kill()
        self.process.wait(PATIENCE_S)


# -- PyAV


@dataclasses.dataclass(frozen=True)
class Packet:
    """A demultiplexed packet; times in ms, as FLV has them."""

    kind: str
    pts: int
    dts: int
    key: bool
    data: bytes


@dataclasses.dataclass
class Watched:
    """What PyAV made of a file or stream.

    Attributes:
        packets: in order.
        pictures: digest of each decoded picture, by its time in ms. A decoder hides a missing reference frame and
            goes on without an error; the pixels tell.
        sounds: number of decoded audio frames.
    """

    packets: list[Packet] = dataclasses.field(default_factory=list)
    pictures: dict[int, bytes] = dataclasses.field(default_factory=dict)
    sounds: int = 0

    def of(self, kind):
        """Return the packets of one track."""
        return [packet for packet in self.packets if packet.kind == kind]


def watch(source):
    """Read and decode a file or URL to its end; a decoding error raises."""
    watched = Watched()
    with av.open(str(source), timeout=(PATIENCE_S, PATIENCE_S)) as container:
        for stream in container.streams:
            if stream.type in ("video", "audio"):
                stream.codec_context.options = {"err_detect": "explode"}
                stream.codec_context.thread_count = 1
        for packet in container.demux():
            kind = packet.stream.type
            if packet.dts is not None and packet.size:
                watched.packets.append(Packet(kind, packet.pts, packet.dts, packet.is_keyframe, bytes(packet)))
            for frame in packet.decode() if kind in ("video", "audio") else ():
                assert not frame.is_corrupt
                if kind == "audio":
                    watched.sounds += 1
                else:
                    watched.pictures[frame.pts] = hashlib.md5(b"".join(map(bytes, frame.planes))).digest()
    return watched


def write_flv(path, messages):
    """Write (type, timestamp, payload) to a file."""
    with Path(path).open("wb") as file:
        writer = FlvWriter(file)
        for message in messages:
            writer.write(*message)
    return path


def written_tags(messages):
    """Return messages as a source for a publisher."""
    return [FlvTag(*message) for message in messages]


# -- a client without a thread: what is not read by the test is not read by anybody


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
        """Read once and answer; return whether anything came."""
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
        """Send what the protocol has to say."""
        self.sock.sendall(self.session.data_to_send())

    def send_control(self, value):
        """Send a protocol or user control message."""
        self.sock.sendall(self.session.send_message(encode_control(value)))

    def send_pause(self):
        """Send the command that pauses the stream."""
        message = commands.command("pause", 0.0, None, True, 0.0, stream_id=self.session.stream_id)
        self.sock.sendall(self.session.send_message(message))

    def send_acknowledgement(self, count):
        """Acknowledge any number of octets."""
        self.sock.sendall(self.session.send_acknowledgement(count))
