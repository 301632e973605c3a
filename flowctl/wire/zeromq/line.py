"""A connection of a ZeroMQ socket as the system has it, for what ZeroMQ itself neither tells nor does.

Theory of operation. A ROUTER with handover gives the route of an identity to the connection that came last. The one
that had it stays open, is read no more, and is told nothing: its peer sends for ever, in vain. Nor is our side told
when it ends at last. So the owner of the ROUTER ends a connection whose identity another one has taken, by its
descriptor. Then its peer notices, connects again, and can be told.

The number of a descriptor is used again; the connection that had it is known by its peer and by the place that it
comes to, and from then on by its inode. Of two of one host that come to one place only the owner of the listener knows
which has it, by the events of its socket.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import zmq

from flowctl.core.text.addresses import join_host_port, plain_address
from flowctl.errors import InternalError

METADATA_OPTION: Final = 95
"""``ZMQ_METADATA``, which pyzmq names only where libzmq was built with its drafts; libzmq has it since 4.3."""
_PEER: Final = struct.Struct("iII")
"""Process, user and group of a peer, as Linux tells them (``struct ucred``)."""


@dataclass(frozen=True, slots=True)
class PeerLine:
    """One connection; `of` and `cut` on any thread."""

    descriptor: int
    inode: int
    address: str  #: of the peer; of a Unix socket its user, group and process, as ZeroMQ writes them

    @classmethod
    def of(cls, frame: zmq.Frame | None, endpoint: str) -> Self | None:
        """Return the connection that a message came by. None: it came from within the process, or has ended since.

        `endpoint`: what its socket is bound or connected to.
        """
        with suppress(zmq.ZMQError, OSError):
            if frame is not None:
                descriptor = frame.get(zmq.SRCFD)
                if not isinstance(descriptor, int):
                    raise InternalError("a descriptor that is no number")
                with _copy_of(descriptor) as line:
                    address = plain_address(str(frame.get("Peer-Address")))
                    if not (_is_of(line, address) and _is_at(line, endpoint)):
                        return None
                    if line.family != socket.AF_UNIX:
                        address = join_host_port(address, line.getpeername()[1])
                    return cls(descriptor, os.fstat(line.fileno()).st_ino, address)
        return None

    def cut(self) -> None:
        """Have the system end the connection, if it is still there."""
        with suppress(OSError), _copy_of(self.descriptor) as line:
            if os.fstat(line.fileno()).st_ino == self.inode:
                line.shutdown(socket.SHUT_RDWR)


def _copy_of(descriptor: int) -> socket.socket:
    """Return a socket that is not closed by ZeroMQ; the number may be another file's by now."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _is_of(line: socket.socket, address: str) -> bool:
    """Return whether a connection is one of the peer that ZeroMQ names.

    A message may be read after its connection has ended, and any socket of this process, as a viewer's, may have the
    descriptor by then: it would be ended in the place of one that somebody let go.
    """
    if line.family != socket.AF_UNIX:
        return plain_address(line.getpeername()[0]) == address.partition("%")[0]
    pid, uid, gid = _PEER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return address.endswith(f":{uid}:{gid}:{pid}")


def _is_at(line: socket.socket, endpoint: str) -> bool:
    """Return whether a connection is one of a socket that is bound or connected to `endpoint`.

    Behind one address there may be a peer and a viewer.
    """
    ends = line.getsockname(), line.getpeername()
    if line.family == socket.AF_UNIX:
        return Path(endpoint).name in {Path(os.fsdecode(end).replace("\0", "@")).name for end in ends}
    return endpoint.rpartition(":")[2] in {str(end[1]) for end in ends}
