"""Publishes FLV files in real time, several at once, for the benches: ``recordings.py PORT NAME=FILE...``.

All begin at the same moment, which is printed as one JSON line (``began``, of the monotonic clock): a message is due
at that moment plus its timestamp. Ends with the files, or with the last of several times that each is published.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time

from flowctl.wire.client.source import FlvFile
from flowctl.wire.rtmp.chunk.writer import serialise
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_DATA_AMF0, TYPE_VIDEO
from programs.publishers import connect

_PER_ADDRESS = 8
"""Streams of one address: a set of renditions is of one, and a live server lets one publish so many."""
_CHUNK_SIZE = 65536
"""As the client session announces it."""
_FRAME_MS = 33
"""From the last picture of a file to the first when it is published again."""
_CSID = {TYPE_AUDIO: 4, TYPE_VIDEO: 6, TYPE_DATA_AMF0: 5}


def main() -> None:
    """Publish until the files end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("streams", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--times", type=int, default=1, help="publish each file so often, one after the other")
    arguments = parser.parse_args()
    peers, due = [], []
    for number, text in enumerate(arguments.streams):
        name, _, path = text.partition("=")
        peers.append(connect(f"rtmp://127.0.0.1:{arguments.port}/live/{name}", f"127.0.3.{1 + number // _PER_ADDRESS}"))
        tags = [tag for tag in FlvFile(path) if tag.type_id in _CSID]
        length_ms = max(tag.timestamp for tag in tags) + _FRAME_MS
        for begin_ms in range(0, arguments.times * length_ms, length_ms):
            for tag in tags:
                at_ms, csid = begin_ms + tag.timestamp, _CSID[tag.type_id]
                due.append((at_ms / 1000, number, serialise(tag.type_id, 1, at_ms, tag.payload, csid, _CHUNK_SIZE)))
    due.sort(key=lambda item: item[:2])  # stable: the order of one file is kept
    began = time.monotonic() + 0.1
    print(json.dumps({"began": began}), flush=True)
    for at_s, number, octets in due:
        wait_s = began + at_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        sock, session = peers[number]
        sock.setblocking(True)
        sock.sendall(octets)
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # what the server says meanwhile: acknowledgements and pings
            session.receive(sock.recv(65536), time.monotonic())
            sock.setblocking(True)
            sock.sendall(session.data_to_send())


if __name__ == "__main__":
    main()
