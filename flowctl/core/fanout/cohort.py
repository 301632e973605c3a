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
from collections.abc import Callable
from typing import Final

from flowctl.core.fanout.piece import FILE_BYTES, Piece, socket_behind
from flowctl.core.outgoing.outbox import would_block
from flowctl.core.outgoing.streamlog import Entry, Place
from flowctl.sender import Sender

SQUAD_SIZE: Final = 64
"""Members of a squad, at most: 0.6 ms of usual flushes, 5 ms of key frames of 500 kB. What a squad costs itself, about
1.5 us, is a quarter of one per cent of that."""

Slow = list[tuple[Sender, int, Exception | None]]
"""Members who did not take all: who, the bytes that were taken, and the error that ended the connection or None.

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

    def write(self, piece: Piece, *, as_file: bool) -> Slow:
        """Write a piece to every member once, and return the members that did not take all of it."""
        if as_file and len(piece.data) >= FILE_BYTES and (descriptor := piece.descriptor()) >= 0:
            return self._write_file(piece.data, descriptor)
        return self.write_bytes(piece.data)

    def write_bytes(self, data: bytes) -> Slow:
        """Write `data` to every member once, and return the members that did not take all of it."""
        size = len(data)
        slow: Slow = []
        members = self.members
        for index, send in enumerate(self.sends):
            try:
                count = send(data)
            except BlockingIOError:
                slow.append((members[index], 0, None))
            except Exception as error:  # noqa: BLE001 - see `Slow`
                slow.append((members[index], 0, _failure(error)))
            else:
                if count != size:
                    slow.append((members[index], count, None))
        return slow

    def _write_file(self, data: bytes, descriptor: int) -> Slow:
        """Do the same by reference; bytes to those whose transport has to see them."""
        size = len(data)
        slow: Slow = []
        for member, send in zip(self.members, self.sends, strict=True):
            sock = socket_behind(send)
            try:
                # The number is asked for each time: one that was kept could belong to another connection by now.
                count = send(data) if sock is None else os.sendfile(sock.fileno(), descriptor, 0, size)
            except BlockingIOError:
                slow.append((member, 0, None))
            except Exception as error:  # noqa: BLE001 - see `Slow`
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
        """Return the squads of this moment, oldest first."""
        return list(self._squads.values())

    def only(self) -> Squad | None:
        if len(self._squads) == 1:
            for squad in self._squads.values():
                return squad
        return None

    def admit(self, sender: Sender, entry: Entry) -> Place:
        """Take in `sender`, who stands at `entry`, and return the place it shares from now on."""
        squad = self._squad_at(entry)
        sender.slot = squad.number * self.squad_size + len(squad.members)
        squad.members.append(sender)
        squad.sends.append(sender.transport_send)
        self.count += 1
        return squad

    def forget(self, sender: Sender) -> None:
        """Let a member go; the last one of its squad takes its slot."""
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
        """Pour small squads at the same place together when there are more squads than the members need.

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

    def _squad_at(self, entry: Entry) -> Squad:
        """Return a squad with room at `entry`, made if needed."""
        squad = self._open
        if squad is None or squad.entry is not entry or len(squad.members) >= self.squad_size:
            for squad in self._squads.values():
                if squad.entry is entry and len(squad.members) < self.squad_size:
                    break
            else:
                squad = self._squads[self._next_number] = Squad(self._next_number, entry)
                self._next_number += 1
            self._open = squad
        return squad


def _failure(error: Exception) -> Exception | None:
    """Return why a write failed; None: it may be tried again. Of a socket it has no traceback, see `gather_write`."""
    if would_block(error):
        return None
    return error.with_traceback(None) if isinstance(error, OSError) else error
