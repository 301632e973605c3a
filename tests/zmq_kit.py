"""Raw ZeroMQ peers of tests."""

from __future__ import annotations

import zmq

from flowctl.wire.zmtp.keys import KeyPair

METADATA_OPTION = 95
"""``ZMQ_METADATA``, which pyzmq names only where libzmq was built with its drafts; libzmq has it since 4.3."""
NEVER_MS = 600_000
"""Interval of reconnecting for a peer that is not to come back. With -1, which says so, libzmq 4.3 sometimes never ends
the context of a socket that is closed while its connection breaks."""


def ask(dealer: zmq.Socket[bytes], *frames: bytes) -> list[bytes]:
    """Send a message, and return the next one that comes."""
    dealer.send_multipart(frames)
    return dealer.recv_multipart()


def serve_curve(raw: zmq.Socket[bytes], keys: KeyPair) -> None:
    """Have a socket that listens take encrypted connections only."""
    raw.curve_server, raw.curve_publickey, raw.curve_secretkey = True, keys.public, keys.secret


def dial_curve(raw: zmq.Socket[bytes], keys: KeyPair, pubkey: bytes) -> None:
    """Have a socket that dials prove its key, and talk only to the peer with the key `pubkey`."""
    raw.curve_serverkey, raw.curve_publickey, raw.curve_secretkey = pubkey, keys.public, keys.secret
