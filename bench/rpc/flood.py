"""A peer that sends as fast as it can until it is ended: ``python -m rpc.flood WHAT ADDRESS``.

WHAT is ``requests``: valid ones, whose replies are read; ``unread``: valid ones, and no reply is ever read; or
``malformed``: unknown commands, commands that are none, missing tags, replies nobody asked for, many frames.

It runs on one core and at the lowest priority, because it stands for a machine elsewhere: the server must not lack what
it takes.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Final

import zmq

from rpc.callers import PART, TAG_BYTES
from rpc.server import COMMAND, REPLY, ready

_TAG: Final = bytes(TAG_BYTES)
REQUEST: Final = [COMMAND, _TAG, PART]
MALFORMED: Final = [
    [b""],
    [b"bench"],
    [b".echo", _TAG],
    [b"bench.none", _TAG, PART],
    [b"none." + b"x" * 300, _TAG],
    [COMMAND],
    [COMMAND, b"short", PART],
    [REPLY, _TAG, PART],
    [REPLY],
    [b"\xff\x00" * 20, PART],
    [b"HELLO"],
    [b"x"] * 50,
]
AT_ONCE: Final = 50
"""Messages sent before the replies are read, where they are."""


def main(what: str, address: str) -> None:
    """Flood until ended."""
    os.nice(19)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    messages = itertools.cycle(MALFORMED if what == "malformed" else [REQUEST])
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(address)
        ready()
        while True:
            for message in itertools.islice(messages, AT_ONCE):
                socket.send_multipart(message)
            while what != "unread" and socket.poll(0):
                socket.recv_multipart()


if __name__ == "__main__":
    main(*sys.argv[1:3])
