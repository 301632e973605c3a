"""Many publishers in one process, for the benches: the same synthetic stream under numbered names, evenly staggered.

Every video frame is stamped with the monotonic clock when it is sent. ``python bench/publishers.py URL --streams 100``
publishes to URL-0, URL-1 and so on, and stops by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import socket
import time

from flowctl.media.stamp import has_slot, stamp
from flowctl.media.synthetic import SyntheticSource
from flowctl.rtmp.client_session import ClientSession
from flowctl.rtmp.events import PublishStarted
from flowctl.rtmp.session_config import ClientSessionConfig
from flowctl.rtmp.wire import TYPE_AUDIO, TYPE_VIDEO

_AUDIO_BIT_RATE = 64_000
_LISTEN_EVERY = 7
"""Messages after which one publisher reads what the server says: acknowledgements, and pings some seconds apart. No
divisor of the usual numbers of streams, so that each has its turn."""


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


def main() -> None:
    """Publish until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=10)
    parser.add_argument("--bit-rate", type=int, default=300_000)
    parser.add_argument("--fps", type=float, default=15.0)
    parser.add_argument("--duration", type=float, default=60.0)
    arguments = parser.parse_args()
    source = SyntheticSource(
        video_bit_rate=arguments.bit_rate - _AUDIO_BIT_RATE, fps=arguments.fps, audio_bit_rate=_AUDIO_BIT_RATE
    )
    ends = [connect(f"{arguments.url}-{number}", f"127.2.0.{1 + number % 250}") for number in range(arguments.streams)]
    began = time.monotonic()
    due = []
    for number in range(arguments.streams):
        tags = iter(source)
        offset_s = number / arguments.streams * 2.0  # key frames, two seconds apart, come one after the other
        due.append((began + offset_s, number, offset_s, next(tags), tags))
    heapq.heapify(due)
    numbers = [0] * arguments.streams
    sent = 0
    while due[0][0] - began < arguments.duration:
        when, number, offset_s, tag, tags = heapq.heappop(due)
        time.sleep(max(0.0, when - time.monotonic()))
        sock, session = ends[number]
        payload = tag.payload
        if tag.type_id == TYPE_VIDEO and has_slot(payload):
            payload = stamp(payload, numbers[number], time.monotonic_ns() // 1000)
            numbers[number] += 1
        send = {TYPE_VIDEO: session.send_video, TYPE_AUDIO: session.send_audio}.get(tag.type_id, session.send_data)
        wire = send(tag.timestamp, payload)
        sock.sendall(wire)
        sent += 1
        if sent % _LISTEN_EVERY == 0:
            with contextlib.suppress(BlockingIOError):
                session.receive(sock.recv(65536, socket.MSG_DONTWAIT), time.monotonic())
                sock.sendall(session.data_to_send())
        following = next(tags)
        heapq.heappush(due, (began + offset_s + following.timestamp / 1000, number, offset_s, following, tags))


if __name__ == "__main__":
    main()
