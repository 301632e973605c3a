"""FFmpeg processes and PyAV, for the end-to-end tests: what other people's clients send, receive and make of it."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import subprocess
from pathlib import Path

import av
from e2e_kit import NAME, PATIENCE_S, address_of

from flowctl.flv import FlvWriter

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
        output = ("-fps_mode", "passthrough", "-enc_time_base:v", "1/1000", "-f", "null", "-")
        program = self.start("-xerror", "-err_detect", "explode", "-i", path, *output)
        status = program.wait()
        return status, program.log


_LATE_READER = re.compile(r"^\[\S+ @ 0x[0-9a-f]+\] Resumed reading at pts .* after a lag of .*\n", re.MULTILINE)


class Program:
    """One FFmpeg process; its words go to a file, so that it never waits for a reader."""

    def __init__(self, command, log_path):
        self._log_path = log_path
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)

    @property
    def log(self):
        """What it has said, but for its words on having been late in reading its own file (``-readrate``)."""
        words = self._log_path.read_text(encoding="utf-8", errors="replace")
        return _LATE_READER.sub("", words)

    def wait(self):
        return self.process.wait(PATIENCE_S)

    def kill(self):
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
        pictures: digest of each decoded picture, by its time in ms. A decoder hides a missing reference frame and
            goes on without an error; the pixels tell.
        sounds: number of decoded audio frames.
    """

    packets: list[Packet] = dataclasses.field(default_factory=list)
    pictures: dict[int, bytes] = dataclasses.field(default_factory=dict)
    sounds: int = 0

    def of(self, kind):
        return [packet for packet in self.packets if packet.kind == kind]


def watch(source):
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
    with Path(path).open("wb") as file:
        writer = FlvWriter(file)
        for message in messages:
            writer.write(*message)
    return path
