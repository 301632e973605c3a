"""The file of a store: one SQLite database with what was sent and not acknowledged, and what was received.

Theory of operation. One thread uses it. Everything of one turn is written in one transaction (`StoreFile.write`), and
who asked for it is told when it is on the disk, not before.

- Write-ahead log, ``synchronous=FULL``: what was committed survives the end of the process (``kill -9``) and a power
  cut. NORMAL would leave out the `fsync` of each commit and survive the former only; after the latter a sender would
  give sequence numbers a second time, which its receivers take for messages that they have, and lose. Commits are
  shared by all that waits, so it costs little: with 100 messages a commit 178 000 rows/s against 313 000.
- Each opening is a new life, with an incarnation of its own: the file may be an old copy, whose numbers were given to
  other messages since. While the outbox has messages of earlier lives, those are remembered with the number at which
  each ended, for receivers know these messages by them (`flowctl.nodes.messenger.wire.Life`).
- What was received is kept as intervals, a row for each run without a gap: rows grow with gaps, not with messages.
- An *effect* is a function of the application that is run inside the transaction, so that what it writes into tables
  of its own in this file and the note that the message was seen (or is to be sent) are both there, or both not.
- Size is bounded: rows by the callers, pages by ``max_page_count``, the log by a checkpoint every 1000 pages (4 MiB)
  and ``journal_size_limit``, unused pages are given back.
- A file beside it, ``NAME-lock``, is locked for as long as it is open: two processes on one outbox would send under
  the same numbers. SQLite's own exclusive mode would do, but nobody could read the application's tables meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import randbits
from typing import Any, Final

from flowctl.core.text.printable import short
from flowctl.core.text.sqlitefile import SqliteForm, open_sqlite, room_for, sqlite_code, store_error
from flowctl.errors import BusyError, LocalProtocolError, StoreError
from flowctl.nodes.messenger.wire import MAX_EARLIER, Life, runs_of

Done = Callable[[Exception | None], object]
"""Called with None once something is on the disk, else with the error."""
Effect = Callable[["Transaction"], object]
"""Run inside the transaction, on the store's thread, which it must not block."""
SEQUENCES: Final = b"s"
"""Prefix of a sender's identity for numbers that are sequences of this pair of peers."""
IDS: Final = b"i"
"""Prefix for numbers that are message ids: of messages sent before the sender knew that we understand the extension."""
OLD: Final = b"o"
"""Prefix for ids that are too low to be told apart: seen or not, they are not accepted any more."""
ANNOUNCES: Final = b"a"
"""Prefix of a destination that is known to understand the extension."""

_TRANSACTIONAL: Final = ("BEGIN", "COMMIT", "END", "ROLLBACK", "SAVEPOINT", "RELEASE")

MAX_INTEGER: Final = 2**63 - 1
"""The largest integer that SQLite keeps."""

_LOG_BYTES: Final = 8 << 20
"""Size to which the log is cut when it begins anew: twice what is written between two checkpoints."""
_SPARE_PAGES: Final = 2048
"""Unused pages that are kept for later messages: 8 MiB, so that a queue that grows and shrinks moves no pages."""
_PAGE_BYTES: Final = 4096
_ROW_BYTES: Final = 128
"""What a message takes beside its record, in which a page may be left half empty."""
_VACUUM_PAGES: Final = 256
"""Pages that one commit gives back: 1 MiB, a few milliseconds."""

_FORM: Final = SqliteForm(
    title="store",
    application=0x666C4D73,  # "flMs" in ASCII
    version=1,
    schema="""
        CREATE TABLE messenger_meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
        CREATE TABLE messenger_outbox (
            message_id INTEGER PRIMARY KEY, peer BLOB NOT NULL, sequence INTEGER NOT NULL, record BLOB NOT NULL
        );
        CREATE TABLE messenger_seen (
            peer BLOB, incarnation INTEGER, first INTEGER, last INTEGER NOT NULL, PRIMARY KEY (peer, incarnation, first)
        ) WITHOUT ROWID;
        INSERT INTO messenger_meta VALUES ('next_message_id', 0);
        INSERT INTO messenger_meta VALUES ('incarnation', 1 + (random() & 0x3FFFFFFFFFFFFFFF))
    """,
    made_with=("auto_vacuum = INCREMENTAL",),
    settings=(
        "wal_autocheckpoint = 1000",
        "secure_delete = OFF",  # some systems have it on: each removal would be written out
        f"journal_size_limit = {_LOG_BYTES}",
    ),
    hints={
        "full": "nothing that was kept is lost: free space on the disk, or allow more with max_store_bytes",
        "damaged": "nothing was changed: keep a copy; `sqlite3 FILE .recover` gets out what is left",
        "busy": "another program holds a lock on the file; the store tries again with the next message",
        "path": "name a file in a folder of your own; check that the disk is there, and the file writable",
        "foreign": "name another file; the store makes it",
        "version": "use the flowctl that wrote it until its outbox is empty, then delete it",
    },
)
_ADD: Final = "INSERT OR REPLACE INTO messenger_outbox VALUES (?, ?, ?, ?)"
_REMOVE: Final = "DELETE FROM messenger_outbox WHERE message_id = ?"
_RAISE_ID: Final = "UPDATE messenger_meta SET value = ? WHERE name = 'next_message_id' AND value < ?"
_TOUCHING: Final = (
    "SELECT first, last FROM messenger_seen "
    "WHERE peer = ? AND incarnation = ? AND first <= ? AND last >= ? ORDER BY first"
)
_LATEST: Final = (
    "SELECT last FROM messenger_seen WHERE peer = ? AND incarnation = ? AND first <= ? ORDER BY first DESC LIMIT 1"
)
_DROP: Final = "DELETE FROM messenger_seen WHERE peer = ? AND incarnation = ? AND first = ?"
_SEEN: Final = "INSERT OR REPLACE INTO messenger_seen VALUES (?, ?, ?, ?)"
_FORGET_FROM: Final = "DELETE FROM messenger_seen WHERE peer = ? AND first >= ?"
_TAKE_OVER: Final = "UPDATE messenger_seen SET incarnation = ?, last = min(last, ?) WHERE peer = ?"
_LIVES: Final = "SELECT name, value FROM messenger_meta WHERE name GLOB 'life *' ORDER BY name"
_FORGET: Final = "DELETE FROM messenger_seen WHERE peer = ? AND incarnation IS NOT ?"


@dataclass(frozen=True, slots=True)
class Transaction:
    """What an effect may do with the file: statements, on tables of its own; the store commits.

    Valid while the effect runs. Names of tables that begin with ``messenger_`` are the store's.
    """

    _connection: sqlite3.Connection

    def execute(self, statement: str, values: Iterable[Any] = ()) -> sqlite3.Cursor:
        """Run one statement; see `sqlite3.Connection.execute`."""
        if statement.lstrip()[:9].upper().startswith(_TRANSACTIONAL):
            raise LocalProtocolError(f"{short(statement)} in an effect: the store begins and ends transactions")
        return self._connection.execute(statement, tuple(values))

    def executemany(self, statement: str, rows: Iterable[Iterable[Any]]) -> sqlite3.Cursor:
        """Run one statement for each row of values; see `sqlite3.Connection.executemany`."""
        return self._connection.executemany(statement, (tuple(row) for row in rows))


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of the outbox that was not acknowledged when the file was last closed."""

    message_id: int
    peer: bytes
    sequence: int
    record: bytes  #: as it was given to `AddMessage`


@dataclass(slots=True)
class AddMessage:
    """Keep a message that is to be sent, and never give its id to another."""

    message_id: int
    peer: bytes
    sequence: int
    record: bytes
    done: Done
    effect: Effect | None = None


@dataclass(slots=True)
class RemoveMessage:
    message_id: int


@dataclass(slots=True)
class MarkSeen:
    """Note that the messages `first` to `last` of a peer's incarnation are done with.

    With an effect, `first` and `last` are one message: it is run, unless that message is marked already.
    """

    peer: bytes
    incarnation: int
    first: int
    last: int
    done: Done
    effect: Effect | None = None


@dataclass(slots=True)
class ForgetSeen:
    """Forget what was seen of a peer's incarnations other than this one. None: of all."""

    peer: bytes
    incarnation: int | None


@dataclass(slots=True)
class TakeOverSeen:
    """Keep what was seen of a peer's messages below `end` as of its new life, and forget all else of it."""

    peer: bytes  #: without a prefix
    before: int
    incarnation: int
    end: int


@dataclass(slots=True)
class RunEffect:
    effect: Effect
    done: Done


_Untold = RemoveMessage | ForgetSeen | TakeOverSeen
Change = AddMessage | MarkSeen | RunEffect | _Untold
Told = tuple[Done, Exception | None]
_Marked = dict[tuple[bytes, int], set[int]]


class StoreFile:
    """The file, open; one thread at a time, and `close` when done."""

    def __init__(self, path: str | os.PathLike[str], max_bytes: int, prepare: Effect | None = None) -> None:
        self.path: Final = Path(os.path.realpath(path))
        with contextlib.ExitStack() as undo:
            self._lock_fd: Final = _lock(self.path)
            undo.callback(os.close, self._lock_fd)
            self._connection: Final = open_sqlite(self.path, _FORM)
            undo.callback(self._connection.close)
            try:
                page_bytes = self._number("PRAGMA page_size")
                self._connection.execute(f"PRAGMA max_page_count = {max(1, max_bytes // page_bytes)}")
                self._lives: list[tuple[str, int]] | None = self._earlier_lives()  # None: the file has them
                earlier = {int(name.split()[2], 16): end for name, end in self._lives}
                self.life: Final = Life(randbits(62) + 1, earlier)
                self._begin_life()
            except sqlite3.Error as error:
                raise _translated(self.path, error) from error
            if prepare is not None:
                for _, failure in self._write_once([RunEffect(prepare, lambda _: None)]):
                    if failure is not None:
                        raise failure
            undo.pop_all()

    # --- what is in it -------------------------------------------------------------------------------------------

    def next_message_id(self) -> int:
        return self._number("SELECT value FROM messenger_meta WHERE name = 'next_message_id'")

    def pending(self) -> Iterator[StoredMessage]:
        rows = self._rows("SELECT message_id, peer, sequence, record FROM messenger_outbox ORDER BY message_id")
        return (StoredMessage(*row) for row in rows)

    def seen(self) -> list[tuple[bytes, int, int, int]]:
        return list(self._rows("SELECT peer, incarnation, first, last FROM messenger_seen ORDER BY 1, 2, 3"))

    # --- changing it ---------------------------------------------------------------------------------------------

    def write(self, changes: Sequence[Change]) -> tuple[list[Told], list[Change]]:
        """Write `changes` in one transaction.

        Where the disk, or the file, has no room for what is to be sent, that is refused and the rest is written: what
        was received and acknowledged needs little room, and gives some back.
        """
        kept, refused = self._fitting(changes)
        told: list[Told] = []
        if refused:
            full = store_error(_FORM, self.path, "cannot grow: its disk is full", "full")
            told = [(change.done, full) for change in refused]
            if not kept:
                return told, []
        try:
            return told + self._write_once(kept), []
        except Exception as error:  # noqa: BLE001  (whatever it is, the callers wait for the outcome)
            refusal = _translated(self.path, error) if isinstance(error, sqlite3.Error) else error
            self._roll_back()
        rest = [change for change in kept if not isinstance(change, AddMessage)]
        if getattr(refusal, "code", None) == "full" and 0 < len(rest) < len(kept):
            more, undone = self.write(rest)
            return told + more + [(change.done, refusal) for change in kept if isinstance(change, AddMessage)], undone
        return (
            told + [(change.done, refusal) for change in kept if not isinstance(change, _Untold)],
            [change for change in kept if isinstance(change, _Untold)],
        )

    def _fitting(self, changes: Sequence[Change]) -> tuple[Sequence[Change], list[AddMessage]]:
        """Return the changes that the disk has room for, and the messages that it has none for: the first fit.

        What an effect writes nobody knows, so before one the log is written into the file wherever room is not ample.
        """
        cost = sum(_cost(item.record) for item in changes if isinstance(item, AddMessage))
        effects = any(getattr(item, "effect", None) is not None for item in changes)
        left = room_for(self._connection, self.path, cost + (_LOG_BYTES if effects else 0))
        if not cost or left >= cost:
            return changes, []
        kept: list[Change] = []
        refused: list[AddMessage] = []
        for change in changes:
            if isinstance(change, AddMessage):
                left -= _cost(change.record)
                if left < 0:
                    refused.append(change)
                    continue
            kept.append(change)
        return kept, refused

    def _write_once(self, changes: Sequence[Change]) -> list[Told]:
        told: list[Told] = []
        added: list[AddMessage] = []
        removed: list[tuple[int]] = []
        marked: _Marked = defaultdict(set)
        execute, executemany = self._connection.execute, self._connection.executemany
        execute("BEGIN IMMEDIATE")
        self._write_life()
        for change in changes:
            if isinstance(change, RemoveMessage):
                removed.append((change.message_id,))
            elif isinstance(change, ForgetSeen):
                execute(_FORGET, (change.peer, change.incarnation))
                for key in [key for key in marked if key[0] == change.peer and key[1] != change.incarnation]:
                    del marked[key]
            elif isinstance(change, TakeOverSeen):
                self._take_over(change, marked)
            else:
                told.append((change.done, error := self._run(change, marked)))
                if error is not None:
                    continue
                if isinstance(change, AddMessage):
                    added.append(change)
                elif isinstance(change, MarkSeen):
                    if change.first == change.last:
                        marked[change.peer, change.incarnation].add(change.first)
                    else:
                        self._merge(change.peer, change.incarnation, [(change.first, change.last)])
        executemany(_ADD, [(item.message_id, item.peer, item.sequence, item.record) for item in added])
        if added:
            next_id = max(item.message_id for item in added) + 1
            execute(_RAISE_ID, (next_id, next_id))
        executemany(_REMOVE, removed)
        for (peer, incarnation), numbers in marked.items():
            self._merge(peer, incarnation, runs_of(numbers))
        spare = self._number("PRAGMA freelist_count")
        execute("COMMIT")
        self._lives = None
        if spare > _SPARE_PAGES:
            with contextlib.suppress(sqlite3.Error):  # what was asked for is on the disk
                # As a script: `execute` takes one step of a statement without columns, which is one page.
                self._connection.executescript(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
        return told

    def close(self) -> None:
        """Write the log into the file and close; whatever fails then has been committed before."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._connection.close()
        os.close(self._lock_fd)

    # --- inner steps ---------------------------------------------------------------------------------------------

    def _earlier_lives(self) -> list[tuple[str, int]]:
        """Return the rows of the lives that the outbox comes from; so few that they need no page of their own."""
        if not self._number("SELECT count(*) FROM (SELECT 1 FROM messenger_outbox LIMIT 1)"):
            return []
        lives = self._connection.execute(_LIVES).fetchall()
        number = int(lives[-1][0].split()[1]) + 1 if lives else 0
        before = self._number("SELECT value FROM messenger_meta WHERE name = 'incarnation'")
        return [*lives, (f"life {number:010d} {before:x}", self.next_message_id())][-MAX_EARLIER:]

    def _begin_life(self) -> None:
        """Write the new life; where that cannot be now, it is written with the first change."""
        self._connection.execute("PRAGMA busy_timeout = 0")
        try:
            self._write_once([])
        except sqlite3.Error as error:
            self._roll_back()
            if sqlite_code(error) not in {"busy", "full"}:
                raise
        finally:
            self._connection.execute(f"PRAGMA busy_timeout = {round(_FORM.busy_s * 1000)}")

    def _write_life(self) -> None:
        if self._lives is not None:
            execute = self._connection.execute
            execute("DELETE FROM messenger_meta WHERE name GLOB 'life *'")
            self._connection.executemany("INSERT INTO messenger_meta VALUES (?, ?)", self._lives)
            execute("UPDATE messenger_meta SET value = ? WHERE name = 'incarnation'", (self.life.incarnation,))

    def _run(self, change: AddMessage | MarkSeen | RunEffect, marked: _Marked) -> Exception | None:
        """Run the effect of a change, if it has one and was not made before."""
        if change.effect is None or (isinstance(change, MarkSeen) and self._has(change, marked)):
            return None
        execute = self._connection.execute
        execute("SAVEPOINT effect")
        try:
            change.effect(Transaction(self._connection))
        except BaseException as error:
            if self._connection.in_transaction:
                execute("ROLLBACK TO effect")
                execute("RELEASE effect")
                return error if isinstance(error, Exception) else LocalProtocolError(f"an effect raised {error!r}")
            if isinstance(error, sqlite3.Error):  # after some, a full disk for one, SQLite has rolled back everything
                raise
        if not self._connection.in_transaction:
            raise StoreError(
                "an effect ended the transaction that it was run in",
                code="effect",
                hint="leave BEGIN, COMMIT and ROLLBACK to the store",
            )
        execute("RELEASE effect")
        return None

    def _has(self, mark: MarkSeen, marked: _Marked) -> bool:
        """Return whether a message is marked, on the disk or by what was already done of this transaction."""
        if mark.first in marked[mark.peer, mark.incarnation]:
            return True
        row = self._connection.execute(_LATEST, (mark.peer, mark.incarnation, mark.first)).fetchone()
        return row is not None and row[0] >= mark.first

    def _take_over(self, change: TakeOverSeen, marked: _Marked) -> None:
        for prefix, end in ((SEQUENCES, change.end + 1), (IDS, change.end), (OLD, change.end)):
            peer = prefix + change.peer
            self._merge(peer, change.before, runs_of(marked[peer, change.before]))
            for key in [key for key in marked if key[0] == peer]:
                del marked[key]
            self._connection.execute(_FORGET, (peer, change.before))
            self._connection.execute(_FORGET_FROM, (peer, end))
            self._connection.execute(_TAKE_OVER, (change.incarnation, end - 1, peer))

    def _merge(self, peer: bytes, incarnation: int, runs: list[tuple[int, int]]) -> None:
        """Add runs to the intervals of a peer; those that touch become one row."""
        execute = self._connection.execute
        for first, last in runs:
            lowest, highest = first, last
            for row in execute(_TOUCHING, (peer, incarnation, last + 1, first - 1)).fetchall():
                if row[0] != first:
                    execute(_DROP, (peer, incarnation, row[0]))
                lowest, highest = min(lowest, row[0]), max(highest, row[1])
            execute(_SEEN, (peer, incarnation, lowest, highest))

    def _roll_back(self) -> None:
        if self._connection.in_transaction:  # SQLite has already rolled back after some errors
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    def _number(self, statement: str) -> int:
        row = self._connection.execute(statement).fetchone()
        return int(row[0])

    def _rows(self, statement: str) -> Iterator[Any]:
        try:
            yield from self._connection.execute(statement)
        except sqlite3.Error as error:
            raise _translated(self.path, error) from error


def _lock(path: Path) -> int:
    """Take the lock beside `path` for this process; it ends with the process, however that ends."""
    name = f"{path}-lock"
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise store_error(_FORM, path, f"has no lock: {name} cannot be made: {error.strerror}", "path") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(fd, 32).decode("ascii", "replace").strip()
        os.close(fd)
        raise BusyError(
            f"store {path} is open already, by process {short(holder)}",
            hint="give each messenger a file of its own",
        ) from None
    os.ftruncate(fd, 0)
    os.write(fd, str(os.getpid()).encode())
    return fd


def _cost(record: bytes) -> int:
    return len(record) + min(len(record), _PAGE_BYTES) + _ROW_BYTES


def _translated(path: Path, error: sqlite3.Error) -> StoreError:
    return store_error(_FORM, path, f"cannot be used: {error}", sqlite_code(error))
