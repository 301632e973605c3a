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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import zmq

from flowctl.core.text.addresses import join_host_port
from flowctl.errors import InternalError
from flowctl.wire.zeromq.zap import plain_address

METADATA_OPTION: Final = 95
"""``ZMQ_METADATA``, which pyzmq names only where libzmq was built with its drafts; libzmq has it since 4.3."""
MOST_OUSTED: Final = 4
"""Lives whose identity was taken over that are remembered, for each identity."""
DUPLICATE_HINT: Final = "give each an identity of its own; the one that started last keeps this one"
_TOLD_EVERY_S: Final = 60.0
"""Time between two lines in the log on one identity: those who share it may not heed what they are told."""
_PEER: Final = struct.Struct("iII")
"""Process, user and group of a peer, as Linux tells them (``struct ucred``)."""
_MOST_TOLD: Final = 20
"""Lines in that time on all identities: where there are no keys, anybody may take one after the other."""


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


@dataclass(slots=True, eq=False)
class IdentityHolder:
    """Who has an identity at a listener: the life (a process, from its start to its end) that came last.

    A life that was taken over and comes again is alive, so there are two of that identity. It is refused, and the one
    that has the identity comes back by itself, as its connection is ended: the two do not take over from each other.
    """

    count: int = 0  #: times that a life was found that had been taken over
    _life: object = None  #: None, "" and 0: it has not said which
    _line: PeerLine | None = None
    _returned: PeerLine | None = None
    _returned_key: object = None
    _ousted: dict[object, None] = field(default_factory=dict)
    _told_at: float = -_TOLD_EVERY_S

    @property
    def is_contested(self) -> bool:
        """Whether a life was taken over, which may come again."""
        return bool(self._ousted)

    def came(self, life: object, line: PeerLine | None) -> bool:
        """Note a connection under the identity. False: its life was taken over before."""
        if life in self._ousted:
            return False
        if life != self._life and life and self._life and line != self._line:
            self.bring_back()
        self.accept(life, line)
        return True

    def accept(self, life: object, line: PeerLine | None) -> None:
        if life != self._life and life and self._life:
            self._ousted[self._life] = None
            self._ousted.pop(life, None)
            if len(self._ousted) > MOST_OUSTED:
                del self._ousted[next(iter(self._ousted))]
        self._life, self._line = life, line

    def note_return(self, line: PeerLine | None, key: object = None) -> bool:
        """Note a connection of a life that was taken over, by its key where it has one; False: it was noted before."""
        key = line if key is None else key
        if key is not None and key == self._returned_key:
            return False
        self._returned, self._returned_key = line, key
        self.count += 1
        self.bring_back()
        return True

    def bring_back(self) -> None:
        """Have the one that has the identity connect again: another connection has its route."""
        if self._line is not None:
            self._line.cut()

    def told(self, now: float) -> str:
        """Return what the log has to say of it, at most once a minute; else nothing."""
        if now - self._told_at < _TOLD_EVERY_S:
            return ""
        self._told_at = now
        first, second = (line.address if line else "this process" for line in (self._returned, self._line))
        return f"{first} and {second} ({self.count} so far)"


@dataclass(slots=True, eq=False)
class DuplicateLog:
    """How often two were found under one identity, of all identities, and what is logged of it."""

    count: int = 0
    _since: float = -_TOLD_EVERY_S
    _line_count: int = 0

    def note(self, holder: IdentityHolder, now: float) -> str:
        """Count it; return what the log has to say, or nothing."""
        self.count += 1
        if now - self._since >= _TOLD_EVERY_S:
            self._since, self._line_count = now, 0
        told = holder.told(now) if self._line_count < _MOST_TOLD else ""
        self._line_count += bool(told)
        return told
