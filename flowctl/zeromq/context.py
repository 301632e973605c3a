"""Contexts of ZeroMQ: one per node, and one that nodes of a process share to reach each other in it (``inproc://``)."""

from __future__ import annotations

import functools
from typing import Final

import zmq

MAX_SOCKETS: Final = 10_000
"""Sockets of one context: each outgoing connection is one. ZeroMQ's own 1023 is less than a server has peers."""


@functools.cache
def shared_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return the context in which nodes of this process reach each other by ``inproc://``; it is never ended."""
    return new_context()


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context; its owner ends it with ``destroy(linger=...)``."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context
