"""The cohort: viewers of a log who keep up, written to together, in squads.

Theory of operation. A *squad* is a place in the log that up to `SQUAD_SIZE` viewers share: it is kept once, and
moving it moves all of them. Writing to a squad is a loop over its members' `socket.send` with the same bytes, and
nothing else is done per viewer: no lock, no queue, no counter.

The cohort is not one squad, because a round of a thousand viewers and a large key frame takes a tenth of a second,
and everything else on the thread would wait for it. Between two squads the thread can turn to something else; those
that were written to then stand further on than the others, and every one of them knows where it stands.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from types import BuiltinMethodType
from typing import Any, Final

from flowctl.core.outgoing.outbox import would_block
from flowctl.core.outgoing.streamlog import Entry, Place
from flowctl.sender import Sender

FILE_BYTES: Final = 24 * 1024
"""Least size for which `sendfile` is used. Below, filling the pipe inside of it costs more than copying."""

FILE_VIEWERS: Final = 64
"""Least number of viewers for which a file is made. Making one costs as much as two to four sends of its bytes, and a
sixth of a send is what it saves: for 20 viewers that is nothing."""

_NO_FILE: Final = -1
_HAS_FILES: Final = hasattr(os, "memfd_create") and hasattr(os, "sendfile")


class Piece:
    """The wire bytes from one entry of a log up to, not including, another one; large ones in a file too.

    `sendfile` from an anonymous memory file lets the kernel reference the file's pages in each viewer's send queue,
    where `send` copies the bytes into each: less work from `FILE_BYTES` on (docs/benchmarks.md), and a piece that a
    thousand viewers have not acknowledged yet is in memory once. Such pages must never be written again, so each piece
    has a file of its own, which is closed after its last viewer: the kernel keeps the pages that are on their way.
    """

    __slots__ = ("_descriptor", "data", "end", "start")

    def __init__(self, start: Entry, end: Entry) -> None:
        self._descriptor: int | None = None  # of the file; None: not asked for yet, -1: there is none
        self.start = start
        self.end = end
        self.data: Final = gather(start, end)  # may raise; `__del__` comes after that too, and needs the descriptor

    def descriptor(self) -> int:
        """Return the descriptor of the file, made when first asked for; -1 if that does not work."""
        if self._descriptor is None:
            self._descriptor = _memory_file(self.data) if _HAS_FILES else _NO_FILE
        return self._descriptor

    def close(self) -> None:
        """Close the file; what the kernel still has to send of it stays until it is sent. Idempotent."""
        descriptor, self._descriptor = self._descriptor, _NO_FILE
        if descriptor is not None and descriptor != _NO_FILE:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def _memory_file(data: bytes) -> int:
    """Return the descriptor of a file with `data`; -1 where there are no descriptors or memory left."""
    try:
        descriptor = os.memfd_create("flowctl-piece")
    except OSError:
        return _NO_FILE
    try:
        if os.write(descriptor, data) == len(data):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return _NO_FILE


def socket_behind(send: Callable[[bytes], int]) -> socket.socket | None:
    """Return the socket whose plain `send` this is. None: the bytes pass through something else first, such as TLS."""
    if isinstance(send, BuiltinMethodType):
        owner: Any = send.__self__
        if isinstance(owner, socket.socket):
            return owner
    return None


def gather(start: Entry, end: Entry) -> bytes:
    parts: list[bytes] = []
    entry = start
    while entry is not end and entry.next is not None:
        parts.append(entry.wire)
        entry = entry.next
    return parts[0] if len(parts) == 1 else b"".join(parts)


SQUAD_SIZE: Final = 64
"""Most members of a squad: 0.6 ms of usual flushes, 5 ms of key frames of 500 kB. What a squad costs itself, about 1.5
us, is a quarter of one per cent of that."""

ShortWrites = list[tuple[Sender, int, Exception | None]]
"""Members that did not take all of a write: the Sender, the bytes taken, and the error that ended the connection.

Whatever a transport raises is its member's error: raised further, it would leave the squad's place where it was, and
those who were written to before would be sent the same bytes again."""


class Squad(Place):
    """Viewers that stand at one place of the log.

    Attributes:
        sends: how each is written to, in the same order: the hot loop's only data.
    """

    __slots__ = ("members", "number", "sends")

    def __init__(self, number: int, entry: Entry) -> None:
        super().__init__(entry)
        self.number = number
        self.members: list[Sender] = []
        self.sends: list[Callable[[bytes], int]] = []

    def write(self, piece: Piece, *, as_file: bool) -> ShortWrites:
        if as_file and len(piece.data) >= FILE_BYTES and (descriptor := piece.descriptor()) >= 0:
            return self._write_file(piece.data, descriptor)
        return self.write_bytes(piece.data)

    def write_bytes(self, data: bytes) -> ShortWrites:
        """Write `data` to every member once, and return the members that did not take all of it."""
        size = len(data)
        slow: ShortWrites = []
        members = self.members
        for index, send in enumerate(self.sends):
            try:
                count = send(data)
            except BlockingIOError:
                slow.append((members[index], 0, None))
            except Exception as error:  # noqa: BLE001 - see `ShortWrites`
                slow.append((members[index], 0, _failure(error)))
            else:
                if count != size:
                    slow.append((members[index], count, None))
        return slow

    def _write_file(self, data: bytes, descriptor: int) -> ShortWrites:
        """Write `data` to every member by reference; as bytes to those whose transport has to see them."""
        size = len(data)
        slow: ShortWrites = []
        for member, send in zip(self.members, self.sends, strict=True):
            sock = socket_behind(send)
            try:
                # The number is asked for each time: one that was kept could belong to another connection by now.
                count = send(data) if sock is None else os.sendfile(sock.fileno(), descriptor, 0, size)
            except BlockingIOError:
                slow.append((member, 0, None))
            except Exception as error:  # noqa: BLE001 - see `ShortWrites`
                slow.append((member, 0, _failure(error)))
            else:
                if count != size:
                    slow.append((member, count, None))
        return slow


class Cohort:
    """The squads of one fan-out. Not thread-safe: its group's thread only."""

    __slots__ = ("_next_number", "_open", "_squads", "count", "squad_size")

    def __init__(self, squad_size: int = SQUAD_SIZE) -> None:
        self.squad_size: Final = squad_size
        self.count = 0  # members of all squads
        self._squads: dict[int, Squad] = {}  # by number; a member's slot is number * squad_size + index
        self._open: Squad | None = None  # which the last one came into
        self._next_number = 0

    def squads(self) -> list[Squad]:
        return list(self._squads.values())

    def only(self) -> Squad | None:
        if len(self._squads) == 1:
            for squad in self._squads.values():
                return squad
        return None

    def admit(self, sender: Sender, entry: Entry) -> Place:
        """Take in `sender`, which stands at `entry`, and return the place it shares from now on."""
        squad = self._open
        if squad is None or squad.entry is not entry or len(squad.members) >= self.squad_size:
            for squad in self._squads.values():
                if squad.entry is entry and len(squad.members) < self.squad_size:
                    break
            else:
                squad = self._squads[self._next_number] = Squad(self._next_number, entry)
                self._next_number += 1
            self._open = squad
        sender.slot = squad.number * self.squad_size + len(squad.members)
        squad.members.append(sender)
        squad.sends.append(sender.transport_send)
        self.count += 1
        return squad

    def forget(self, sender: Sender) -> None:
        """Remove a member; the last one of its squad takes its slot."""
        number, index = divmod(sender.slot, self.squad_size)
        squad = self._squads[number]
        last, last_send = squad.members.pop(), squad.sends.pop()
        if last is not sender:
            squad.members[index], squad.sends[index] = last, last_send
            last.slot = sender.slot
        sender.slot = -1
        self.count -= 1
        if not squad.members:
            del self._squads[number]  # its place would hold the log
            if self._open is squad:
                self._open = None

    def tidy(self) -> None:
        """Merge small squads at the same place when there are more squads than the members need.

        Who joins between two rounds stands at a place of its own, and after the next round at that of all others:
        without this, a stream with much coming and going would end with a squad for each.
        """
        if len(self._squads) <= 4 + 2 * self.count // self.squad_size:
            return
        small = [squad for squad in self._squads.values() if 2 * len(squad.members) <= self.squad_size]
        for squad in small:
            del self._squads[squad.number]
        self._open = None
        for squad in small:
            self.count -= len(squad.members)
            for sender in squad.members:
                sender.move_in_cohort(self.admit(sender, squad.entry))


def _failure(error: Exception) -> Exception | None:
    """Return why a write failed; None: it may be tried again. Of a socket it has no traceback, see `gather_write`."""
    if would_block(error):
        return None
    return error.with_traceback(None) if isinstance(error, OSError) else error
