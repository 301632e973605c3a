"""Raw ZeroMQ peers of tests."""

from __future__ import annotations

import zmq

NEVER_MS = 600_000
"""Interval of reconnecting for a peer that is not to come back. With -1, which says so, libzmq 4.3 sometimes never ends
the context of a socket that is closed while its connection breaks."""


def ask(dealer: zmq.Socket[bytes], *frames: bytes) -> list[bytes]:
    """Send a message, and return the next one that comes."""
    dealer.send_multipart(frames)
    return dealer.recv_multipart()
