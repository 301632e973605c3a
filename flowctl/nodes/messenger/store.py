"""A store: what outlives the process, written by a thread of its own, a turn of the loop at a time.

Theory of operation. What a turn of the loop changes is collected and handed to the thread at the end of the turn; it
writes all of it in one transaction. While it does, the next is collected: the slower the disk, the more share a
commit, and the loop never waits for it. Who has to know that something is on the disk (a message may be sent, an
acknowledgement may leave) is called back on the loop's thread afterwards, in the order of the calls.

The rules, on the sender's side:

- A message is sent only after `MessageStore.add` has said that it is on the disk. It is removed when it is
  acknowledged, or given up. What is `pending` at the start is sent again, under its old number.
- Message ids go on where they were, and sequences begin above all ids. The incarnation is a new one at each opening:
  the file may be an old copy, and the numbers after it were given to other messages. The peers are told which earlier
  lives the outbox comes from, so that they know what they have of it.

On the receiver's side:

- An acknowledgement leaves only after `mark` has said that the message is noted as received, which happens after its
  handler has run. What the handler wants to be kept together with that note it hands over as an *effect*
  (`ReceivedMessage.apply`): both are there after a crash, or neither. If the effect raises, neither is, there is no
  acknowledgement, and the sender tries again.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

from flowctl.errors import ClosedError, ConfigError, LocalProtocolError
from flowctl.nodes.messenger.storefile import (
    MAX_INTEGER,
    AddMessage,
    Change,
    Done,
    Effect,
    ForgetSeen,
    MarkSeen,
    RemoveMessage,
    StoredMessage,
    StoreFile,
    TakeOverSeen,
    Told,
)

Post = Callable[..., object]
"""Calls a function on the messenger's thread, soon and in order (`PollGroup.call_soon`)."""

MIN_STORE_BYTES: Final = 1 << 20
"""Smallest limit that a store may be given: SQLite's tables with a few hundred messages."""
DEFAULT_STORE_BYTES: Final = 1 << 30
"""Default limit of a store: an hour of 250 messages of 1 KiB a second to peers that are gone."""

_COMMIT_CHANGES: Final = 2048
"""Changes in one transaction at most: some 10 ms, after which the waiting callers get their outcome."""
_COMMIT_BYTES: Final = 4 << 20
"""Octets in one transaction at most: a copy of them stays in the log until the next checkpoint."""


class MessageStore:
    """An outbox and a seen-set in one file; all methods on the messenger's thread only."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        post: Post,
        *,
        max_bytes: int = DEFAULT_STORE_BYTES,
        prepare: Effect | None = None,
    ) -> None:
        if max_bytes < MIN_STORE_BYTES:
            raise ConfigError(f"max_store_bytes is {max_bytes}, it must be {MIN_STORE_BYTES} or more")
        self._file: Final = StoreFile(path, max_bytes, prepare)
        self._post: Final = post
        self.life: Final = self._file.life
        self._waiting: deque[Change] = deque()
        self._hand_over_queued = False
        self._writing = False  # the thread has changes
        self.closed = False
        self.commit_count = 0
        self.waiting_count = 0  #: changes that are not on the disk yet
        self._to_thread: Final[SimpleQueue[list[Change] | None]] = SimpleQueue()
        self._ended: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._write, name="flowctl-store", daemon=True)
        self._started = False

    # --- what was there when it was opened ----------------------------------------------------------------------

    def next_message_id(self) -> int:
        """Return the lowest message id that was never kept; before the first change only."""
        return self._file.next_message_id()

    def pending(self) -> Iterator[StoredMessage]:
        """Yield the messages of the outbox, oldest first; before the first change only."""
        return self._file.pending()

    def seen(self) -> list[tuple[bytes, int, int, int]]:
        """Return what was received: peer, incarnation, first and last of each run; before the first change only."""
        return self._file.seen()

    # --- changes -------------------------------------------------------------------------------------------------

    def add(
        self, message_id: int, peer: bytes, sequence: int, record: bytes, done: Done, effect: Effect | None = None
    ) -> None:
        self._change(AddMessage(_checked(message_id), peer, _checked(sequence), record, done, effect))

    def remove(self, message_id: int) -> None:
        self._change(RemoveMessage(message_id))

    def mark(self, peer: bytes, incarnation: int, sequence: int, done: Done, effect: Effect | None = None) -> None:
        """Note that a message was received; with an effect, run that in the same transaction."""
        self._change(MarkSeen(peer, _checked(incarnation), _checked(sequence), sequence, done, effect))

    def mark_run(self, peer: bytes, incarnation: int, first: int, last: int, done: Done) -> None:
        """Note that messages `first` to `last` are done with, received or given up; else as `mark`."""
        self._change(MarkSeen(peer, _checked(incarnation), _checked(first), _checked(last), done))

    def forget(self, peer: bytes, incarnation: int | None) -> None:
        """Forget what was seen of a peer's incarnations other than this one: it has begun anew. None: of all."""
        self._change(ForgetSeen(peer, None if incarnation is None else _checked(incarnation)))

    def take_over(self, peer: bytes, before: int, incarnation: int, end: int) -> None:
        """Keep what was seen of a peer's messages below `end` as of its new life, and forget all else of it."""
        self._change(TakeOverSeen(peer, before, _checked(incarnation), min(end, MAX_INTEGER - 1)))

    def close(self, deadline_s: float = 5.0) -> bool:
        """Write what waits, then close the file; idempotent. After it has returned no callback is called any more."""
        if not self.closed:
            self.closed = True
            if not (self._started or self._waiting):
                self._file.close()
                self._ended.set()
                return True
            while self._waiting:
                self._to_thread.put(self._take())
            self._to_thread.put(None)
            self._start()
        return self._ended.wait(deadline_s)

    # --- inner steps, the owner's thread ------------------------------------------------------------------------

    def _change(self, change: Change) -> None:
        if self.closed:
            raise ClosedError("the store is closed")
        self._waiting.append(change)
        self.waiting_count += 1
        if not (self._hand_over_queued or self._writing):
            self._hand_over_queued = True
            self._post(self._hand_over)

    def _hand_over(self) -> None:
        self._hand_over_queued = False
        if self._writing or self.closed or not self._waiting:
            return
        self._writing = True
        self._start()
        self._to_thread.put(self._take())

    def _take(self) -> list[Change]:
        waiting = self._waiting
        changes = [waiting.popleft()]
        octets = 0
        while waiting and len(changes) < _COMMIT_CHANGES and octets < _COMMIT_BYTES:
            change = waiting.popleft()
            if type(change) is AddMessage:
                octets += len(change.record)
            changes.append(change)
        return changes

    def _written(self, told: list[Told], undone: list[Change], count: int) -> None:
        """Hand over what has come meanwhile, then tell those who wait for what was written."""
        self.commit_count += 1
        self.waiting_count -= count
        self._writing = False
        self._hand_over()
        if undone:  # tried again with the next change, and not before: a disk that is full stays so for a while
            self._waiting.extendleft(reversed(undone))
            self.waiting_count += len(undone)
        self._tell(told)

    def _tell(self, told: list[Told]) -> None:
        for index, (done, error) in enumerate(told):
            if self.closed:
                return
            try:
                done(error)
            except BaseException:  # for the loop to report; the others are told all the same
                self._post(self._tell, told[index + 1 :])
                raise

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._thread.start()

    # --- inner steps, the store's thread ------------------------------------------------------------------------

    def _write(self) -> None:
        while (changes := self._to_thread.get()) is not None:
            told, undone = self._file.write(changes)
            with suppress(ClosedError):  # the owner's loop has ended; what was written is there at the next opening
                self._post(self._written, told, undone, len(changes))
        self._file.close()
        self._ended.set()


def _checked(number: int) -> int:
    if not 0 <= number <= MAX_INTEGER:
        raise LocalProtocolError(f"{number} cannot be kept, numbers are 0 to 2^63 - 1")
    return number


OpenStore = Callable[[Post], MessageStore]
"""Opens the store of a messenger that starts."""


def open_store(
    path: str | os.PathLike[str], *, max_bytes: int = DEFAULT_STORE_BYTES, prepare: Effect | None = None
) -> OpenStore:
    """Return what a messenger opens its store with: ``Messenger(..., open_store=open_store("outbox.db"))``.

    Arguments as for `MessageStore`, which raises when the messenger starts.
    """

    def opens(post: Post) -> MessageStore:
        return MessageStore(path, post, max_bytes=max_bytes, prepare=prepare)

    return opens
