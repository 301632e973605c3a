"""Many publishers in one process, for the benches: the same synthetic stream under numbered names, evenly staggered.

Every video frame is stamped with the monotonic clock when it is sent. ``publishers.py URL --streams 100``
publishes to URL-0, URL-1 and so on, and stops by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import socket
import time

from flowctl.wire.media.stamp import has_slot, stamp
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.chunk.writer import serialise
from flowctl.wire.rtmp.client.session import ClientSession
from flowctl.wire.rtmp.events import PublishStarted
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_VIDEO

_AUDIO_BIT_RATE = 64_000
_LISTEN_EVERY = 16
"""Messages after which a publisher reads what the server says: acknowledgements, and pings some seconds apart."""
_CHUNK_SIZE = 65536
"""As the client session announces it."""
_CSID = {TYPE_AUDIO: 4, TYPE_VIDEO: 6}


def connect(url: str, source: str) -> tuple[socket.socket, ClientSession]:
    """Connect from `source`, an address of 127.0.0.0/8, publish, and return once the server has accepted."""
    session = ClientSession(ClientSessionConfig())
    session.connect(url)
    session.publish()
    sock = socket.create_connection((session.url.host, session.url.port), source_address=(source, 0))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        sock.sendall(session.data_to_send())
        events = session.receive(sock.recv(65536), time.monotonic())
        if any(isinstance(event, PublishStarted) for event in events):
            sock.sendall(session.data_to_send())
            return sock, session


class Tape:
    """The messages of the stream as they go to every server, made once for all publishers.

    Each has a full header, so that the same octets do for all; in video only the stamp changes.
    """

    def __init__(self, source: SyntheticSource) -> None:
        self._tags = iter(source)
        self._made: list[tuple[float, bytes, bytes]] = []

    def message(self, number: int) -> tuple[float, bytes, bytes]:
        """Return (seconds from the beginning, header, body) of a message; without a stamp the header is in the body."""
        while number >= len(self._made):
            tag = next(self._tags)
            octets = serialise(tag.type_id, 1, tag.timestamp, tag.payload, _CSID.get(tag.type_id, 7), _CHUNK_SIZE)
            at = len(octets) - len(tag.payload)
            stamped = tag.type_id == TYPE_VIDEO and has_slot(tag.payload)
            self._made.append(
                (tag.timestamp / 1000, octets[:at] if stamped else b"", tag.payload if stamped else octets)
            )
        return self._made[number]


def main() -> None:
    """Publish until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=10)
    parser.add_argument("--bit-rate", type=int, default=300_000)
    parser.add_argument("--fps", type=float, default=15.0)
    parser.add_argument("--duration", type=float, default=60.0)
    arguments = parser.parse_args()
    tape = Tape(
        SyntheticSource(
            video_bit_rate=arguments.bit_rate - _AUDIO_BIT_RATE, fps=arguments.fps, audio_bit_rate=_AUDIO_BIT_RATE
        )
    )
    ends = [connect(f"{arguments.url}-{number}", f"127.2.0.{1 + number % 250}") for number in range(arguments.streams)]
    began = time.monotonic()
    # Key frames, two seconds apart, come one after the other.
    due = [(began + number / arguments.streams * 2.0, number, 0) for number in range(arguments.streams)]
    heapq.heapify(due)
    offsets = [when for when, _, _ in sorted(due, key=lambda item: item[1])]
    frames = [0] * arguments.streams
    while due[0][0] - began < arguments.duration:
        when, number, place = due[0]
        time.sleep(max(0.0, when - time.monotonic()))
        sock, session = ends[number]
        _, header, body = tape.message(place)
        if header:
            body = header + stamp(body, frames[number], time.monotonic_ns() // 1000)
            frames[number] += 1
        sock.sendall(body)
        if place % _LISTEN_EVERY == number % _LISTEN_EVERY:
            with contextlib.suppress(BlockingIOError):
                session.receive(sock.recv(65536, socket.MSG_DONTWAIT), time.monotonic())
                sock.sendall(session.data_to_send())
        heapq.heapreplace(due, (offsets[number] + tape.message(place + 1)[0], number, place + 1))


if __name__ == "__main__":
    main()
