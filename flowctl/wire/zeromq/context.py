"""Contexts of ZeroMQ: one per node, and one that nodes of a process share to reach each other in it (``inproc://``)."""

from __future__ import annotations

import functools
from typing import Final

import zmq

MAX_SOCKETS: Final = 10_000
"""Sockets of one context: each outgoing connection is one. ZeroMQ's own 1023 is less than a server has peers."""


class _Context(zmq.Context[zmq.Socket[bytes]]):
    """A context that does not wait for its sockets when it is collected without having been ended.

    pyzmq's own ends itself then, for ever: in a node that was never stopped, sockets are collected with it, so it no
    longer finds them to close them. Here they close themselves, and no more than a thread of ZeroMQ is left.
    """

    def __del__(self) -> None:
        """Do nothing."""


@functools.cache
def shared_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return the context in which nodes of this process reach each other by ``inproc://``; it is never ended."""
    return new_context()


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context; its owner ends it with ``destroy(linger=...)``."""
    context = _Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context
