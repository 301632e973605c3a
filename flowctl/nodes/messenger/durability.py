"""What a messenger asks of a store that outlives the process: the seam between delivery and the disk.

The rules, on the sender's side:

- A message is handed to ZeroMQ only after `DurableStore.add` has said that it is on the disk. It is removed when it is
  acknowledged, or given up. What is `pending` at the start is sent again, under its old number.
- Message ids and incarnation go on where they were, and sequences begin above all ids: a messenger that comes back with
  its store is the same sender as before, not a new life of it.

On the receiver's side:

- An acknowledgement leaves only after `mark` has said that the message is noted as received, which happens after its
  handler has run. What the handler wants to be kept together with that note it hands over as an *effect*
  (`Message.apply`): both are there after a crash, or neither. If the effect raises, neither is, there is no
  acknowledgement, and the sender tries again.

All of a turn of the loop is one transaction; answers come on the loop's thread, in order.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from flowctl.core.text.printable import short
from flowctl.errors import LocalProtocolError

Done = Callable[[Exception | None], object]
"""Told None once something is on the disk, else why it is not."""
Effect = Callable[["Transaction"], object]
"""Run inside the transaction, on the store's thread, which it must not block."""
Post = Callable[..., object]
"""Calls its arguments on the messenger's thread, soon, in order (`PollGroup.call_soon`)."""

SEQUENCES: Final = b"s"
"""Prefix of a sender's identity where what was seen of it is kept: numbers are sequences of this pair of peers."""
IDS: Final = b"i"
"""The same where numbers are message ids: of messages that came before the sender knew that we understand more."""
OLD: Final = b"o"
"""The same where ids are marked that are too low to be told apart: seen or not, they are not taken any more."""
ANNOUNCES: Final = b"a"
"""Prefix of a destination that is marked once it is known to understand the extension."""


_TRANSACTIONAL: Final = ("BEGIN", "COMMIT", "END", "ROLLBACK", "SAVEPOINT", "RELEASE")


class Transaction:
    """What an effect may do with the file: statements, on tables of its own; the store commits.

    Valid while the effect runs. Names of tables that begin with ``messenger_`` are the store's.
    """

    __slots__ = ("_connection",)

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection: Final = connection

    def execute(self, statement: str, values: Iterable[Any] = ()) -> sqlite3.Cursor:
        """Run one statement; see `sqlite3.Connection.execute`."""
        if statement.lstrip()[:9].upper().startswith(_TRANSACTIONAL):
            raise LocalProtocolError(f"{short(statement)} in an effect: the store begins and ends transactions")
        return self._connection.execute(statement, tuple(values))

    def executemany(self, statement: str, rows: Iterable[Iterable[Any]]) -> sqlite3.Cursor:
        """Run one statement for each row of values; see `sqlite3.Connection.executemany`."""
        return self._connection.executemany(statement, (tuple(row) for row in rows))


class StoredMessage(Protocol):
    """A message of the outbox, as it was added."""

    @property
    def message_id(self) -> int:
        """Its id."""

    @property
    def peer(self) -> bytes:
        """Its destination, as the messenger names it."""

    @property
    def sequence(self) -> int:
        """Its number among those to `peer`."""

    @property
    def record(self) -> bytes:
        """All that is needed to send it again."""


class DurableStore(Protocol):
    """Outbox and seen-set in one; all methods on the messenger's thread."""

    @property
    def incarnation(self) -> int:
        """Of the outbox: the same for the life of the file, 0 to 2^63 - 1."""

    def next_message_id(self) -> int:
        """Return the lowest message id that was never added; before the first change only."""

    def pending(self) -> Iterable[StoredMessage]:
        """Yield the messages of the outbox, oldest first; before the first change only."""

    def seen(self) -> Sequence[tuple[bytes, int, int, int]]:
        """Return what was marked: peer, incarnation, first and last of each run; before the first change only."""

    def add(
        self, message_id: int, peer: bytes, sequence: int, record: bytes, done: Done, effect: Effect | None = None
    ) -> None:
        """Keep a message that is to be sent, in place of what was kept of it; `done` is told once it may be."""

    def remove(self, message_id: int) -> None:
        """Forget a message of the outbox: it has its outcome."""

    def mark(self, peer: bytes, incarnation: int, sequence: int, done: Done, effect: Effect | None = None) -> None:
        """Note that a message was received, with its effect; `done` is told once it may be acknowledged."""

    def mark_run(self, peer: bytes, incarnation: int, first: int, last: int, done: Done) -> None:
        """Note that messages `first` to `last` are done with, received or given up."""

    def forget(self, peer: bytes, incarnation: int | None) -> None:
        """Forget what was seen of a peer's incarnations other than this one; None: of all of them."""

    def run(self, effect: Effect, done: Done) -> None:
        """Run an effect in a transaction, in order with the other changes."""

    def close(self, deadline_s: float = 5.0) -> bool:
        """Write what waits, then close the file; no callback runs any more. False: it still writes."""


OpenStore = Callable[[Post], DurableStore]
"""Opens the store of a messenger that starts."""
