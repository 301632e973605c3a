"""A publisher for the benches: a synthetic stream in real time, each frame stamped with the monotonic clock."""

from __future__ import annotations

import argparse
import socket
import time

from flowctl.wire.media.stamp import has_slot, stamp
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.client.session import ClientSession
from flowctl.wire.rtmp.events import PublishStarted
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.wire import TYPE_VIDEO

_AUDIO_BIT_RATE = 128_000


def connect(url: str) -> tuple[socket.socket, ClientSession]:
    """Connect and publish; return once the server has accepted."""
    session = ClientSession(ClientSessionConfig())
    session.connect(url)
    session.publish()
    sock = socket.create_connection((session.url.host, session.url.port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        sock.sendall(session.data_to_send())
        events = session.receive(sock.recv(65536), time.monotonic())
        if any(isinstance(event, PublishStarted) for event in events):
            sock.sendall(session.data_to_send())
            sock.setblocking(False)
            return sock, session


def main() -> None:
    """Publish until the time is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--bit-rate", type=int, default=2_500_000)
    parser.add_argument("--fps", type=float, default=30.0)
    parser.add_argument("--key-interval", type=float, default=2.0)
    parser.add_argument("--key-frame-bytes", type=int, default=0)
    parser.add_argument("--duration", type=float, default=60.0)
    arguments = parser.parse_args()
    sock, session = connect(arguments.url)
    source = SyntheticSource(
        video_bit_rate=arguments.bit_rate - _AUDIO_BIT_RATE,
        fps=arguments.fps,
        key_interval_s=arguments.key_interval,
        key_frame_bytes=arguments.key_frame_bytes or None,
        audio_bit_rate=_AUDIO_BIT_RATE,
    )
    began = time.monotonic()
    number = 0
    for tag in source:
        now = time.monotonic() - began
        if now >= arguments.duration:
            return
        time.sleep(max(0.0, tag.timestamp / 1000 - now))
        payload = tag.payload
        if tag.type_id == TYPE_VIDEO and has_slot(payload):
            payload = stamp(payload, number, time.monotonic_ns() // 1000)
            number += 1
        sock.setblocking(True)
        sock.sendall(session.send_tag(tag.type_id, tag.timestamp, payload))
        sock.setblocking(False)
        try:
            session.receive(sock.recv(65536), time.monotonic())
            sock.sendall(session.data_to_send())
        except BlockingIOError:
            continue


if __name__ == "__main__":
    main()
