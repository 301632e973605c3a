"""The bare loop: the same bytes to the same number of sockets at the same interval, and nothing else.

What `whole/fanout.py` compares the server with. Accepts N connections, then every interval sends one slice of a real
serialised stream to each of them with `socket.send`. Prints a JSON line with its port, and stops by itself.
"""

from __future__ import annotations

import argparse
import json
import socket
import time

from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.streams.wirelog import RtmpChunks


def slices(bit_rate: int, interval_s: float, seconds: float) -> list[bytes]:
    """Return what a flush of the live server would send, interval by interval."""
    wire = RtmpChunks(1, 65536)
    parts: list[list[bytes]] = [[] for _ in range(int(seconds / interval_s) + 2)]
    for tag in SyntheticSource(video_bit_rate=bit_rate - 128_000).tags(seconds):
        parts[int(tag.timestamp / 1000 / interval_s)].append(wire.serialise(tag.type_id, tag.timestamp, tag.payload))
    return [b"".join(part) for part in parts]


def main() -> None:
    """Accept, send, stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--viewers", type=int, default=1000)
    parser.add_argument("--bit-rate", type=int, default=2_500_000)
    parser.add_argument("--interval", type=float, default=0.04)
    parser.add_argument("--duration", type=float, default=30.0)
    arguments = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    rounds = slices(arguments.bit_rate, arguments.interval, 10.0)
    socks = []
    for _ in range(arguments.viewers):
        sock, _address = listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        socks.append(sock)
    end = time.monotonic() + arguments.duration
    due = time.monotonic()
    number = 0
    while time.monotonic() < end:
        data = rounds[number % len(rounds)]
        number += 1
        if data:
            for sock in socks:
                try:
                    sock.send(data)
                except BlockingIOError:
                    continue
                except OSError:
                    return
        # One late round may be made up for, not the time that a busy machine took: that would be work of before.
        due = max(due + arguments.interval, time.monotonic() - arguments.interval)
        time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main()
