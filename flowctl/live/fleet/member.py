"""A server as a member of its fleet: sends its words to the others, and enters theirs.

Theory of operation. What is said at a member goes to all others at once. That alone would do, if nothing were ever lost
and no member were ever away. So each member also sends all others the sums of its words every
`COMPARE_S` (`flowctl.live.bans.words`). One that has other sums answers with its words of some buckets that differ, and
gets those of the other; a member that gained by that compares again at once. So a new member, one that was down and the
two halves of a network that was cut in two come to hold the same, a little at a time; merging sees to it that the order
does not matter. A message that is lost needs no repair: the next comparison is made of what is then.

All of it is done where the book is used: on the thread of the files, or in the supervisor under its lock.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import structlog

from flowctl.core.outcomes.backoff import Backoff
from flowctl.errors import BusyError, ClosedError, ConfigError
from flowctl.live.bans.book import BanBook
from flowctl.live.bans.words import BUCKETS, MOST_WORD_BYTES, Word, WordKind
from flowctl.live.fleet.config import FleetConfig, read_config
from flowctl.nodes.messenger.delivery import DeliverySettings
from flowctl.nodes.messenger.message import ReceivedMessage
from flowctl.nodes.messenger.messenger import Messenger

if TYPE_CHECKING:
    from flowctl.live.server import LiveServer

_log: Final = structlog.get_logger("flowctl.fleet")
COMPARE_S: Final = 5.0
"""Time between two comparisons: a lost message is made good within it, for 8 KiB per member."""
_PASSING_S: Final = 2 * COMPARE_S
"""Time for which sending a message is retried: after that, comparisons have carried more."""
_MESSAGE_WINDOW: Final = 64
"""Messages under way to a member: while it is away no more are kept for it."""
PAGE_BYTES: Final = 256 * 1024
"""Size of the words in one message: a member parses it in some 20 ms, a little at a time."""
_MOST_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""Longest message: a bucket of a full list, 400 words of the greatest length; a page is far smaller."""
_MOST_WAITING_BYTES: Final = _MESSAGE_WINDOW * PAGE_BYTES
"""Messages of a member that wait to be read while a disk or workers are slow: a window of full pages."""
_MESSAGE_BYTES: Final = 1024
"""Memory charged for a message that waits, however short it is."""
_ONE_WAY_COUNT: Final = 4
"""Looks, one each `COMPARE_S`, after which it is told that messages go one way: connections are made anew till then."""
_REST_EVERY: Final = 64
"""Words between two rests: a millisecond of work beside a server."""
_REST_S: Final = 0.004


@dataclass(slots=True)
class OtherMember:
    """The state of another member."""

    connection: int = 0  # to it, of the messenger
    heard_at: float | None = None  # when it was heard of last, monotonic seconds. None: not in this life.
    same: bool | None = None  # whether it held the same words when it was heard of last. None: it did not say.
    count: int | None = None  # words that it held then
    dropped: int = 0  # messages of it that could not be read, or came faster than they are
    gained_at: float = -inf  # when it last had words in a comparison that were not here
    heard: bool = False  # since it was looked at last
    taken: bool = False  # it has taken a message of ours since then
    one_way_count: int = 0  # times in a row that it was found to be one of the two
    fault: str | None = None  # what is wrong between it and this member


class Gossip:
    """The messages between members and their effects; no sockets here."""

    def __init__(
        self,
        book: BanBook,
        others: Iterable[str],
        send: Callable[[str, str], None],
        take: Callable[[list[Word]], object],
        lock: AbstractContextManager[object] | None = None,
        rng: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock: Final = clock
        self._book: Final = book
        self._send: Final = send
        self._take: Final = take
        self._lock: Final = nullcontext() if lock is None else lock
        self._rng: Final = rng or Random()
        self.others: Final = {name: OtherMember() for name in others}  # the other members, by name
        self.strangers = 0  # messages of senders that are no members

    def tell(self, words: Sequence[Word]) -> None:
        for page in _pages([word.line() for word in words]):
            for name in self.others:
                self._send(name, json.dumps({"words": page}))

    def took(self, name: str) -> None:
        """Note that another member has taken a message. Any thread."""
        self.others[name].taken = True

    def compare_all(self) -> None:
        """Compare with all others, but for those that are catching us up: one comparison follows the other there."""
        for name, other in self.others.items():
            if self._clock() - other.gained_at >= COMPARE_S:
                self._compare(name, more=False)

    def _compare(self, name: str, *, more: bool) -> None:
        """Tell another member what stands for the words here; `more`: because there was something to gain."""
        with self._lock:
            sums = "".join(f"{item:016x}" for item in self._book.words.sums)
            said = {"sums": sums, "count": len(self._book.words), "more": more}
        self._send(name, json.dumps(said))

    def received(self, sender: str, octets: bytes) -> None:
        """Enter the words of a message; a message that cannot be read is counted, and changes nothing."""
        other = self.others.get(sender)
        if other is None:
            self.strangers += 1
            return
        try:
            said = json.loads(octets)
            sums = [int(said["sums"][at : at + 16], 16) for at in range(0, 16 * BUCKETS, 16)] if "sums" in said else []
            buckets = list(dict.fromkeys(range(BUCKETS)[number] for number in said.get("buckets", ())))
            words = _read_words(said.get("words", ()))
            count, answer, more = int(said.get("count", 0)), bool(said.get("answer")), bool(said.get("more"))
        except (ValueError, TypeError, OverflowError, LookupError, AttributeError, RecursionError, ConfigError):
            other.dropped += 1
            return
        other.heard_at, other.heard = self._clock(), True
        if sums:
            self._take_sums(sender, other, sums, count, more=more)
            return
        with self._lock:
            before = list(self._book.words.sums)
        self._take(words)
        if buckets:
            with self._lock:
                self._send(sender, self._part(buckets, answer=True))
        if (buckets or answer) and before != self._book.words.sums:
            other.gained_at = self._clock()
            self._compare(sender, more=True)

    def _take_sums(self, sender: str, other: OtherMember, sums: list[int], count: int, *, more: bool) -> None:
        with self._lock:
            numbers = self._book.words.differing(sums)
            other.same, other.count = not numbers, count
            if numbers and (more or self._clock() - other.gained_at >= COMPARE_S):
                # In any order: buckets that no answer makes equal (of a clock that is wrong) must not stop others.
                self._rng.shuffle(numbers)
                self._send(sender, self._part(numbers, answer=False))

    def _part(self, numbers: list[int], *, answer: bool) -> str:
        """Return our words of the first of some buckets, as many as go into one message, at least one."""
        lines: list[str] = []
        part: list[int] = []
        room = PAGE_BYTES
        for number in numbers:
            more = [word.line() for word in self._book.words.bucket(number)]
            if len(more) * MOST_WORD_BYTES > _MOST_MESSAGE_BYTES // 2:
                # More than chance puts there: any of them, others the next time.
                more = self._rng.sample(more, _MOST_MESSAGE_BYTES // 2 // MOST_WORD_BYTES)
            room -= sum(map(len, more))
            if part and room < 0:
                break
            part.append(number)
            lines += more
        return json.dumps({"words": lines, "answer": True} if answer else {"words": lines, "buckets": part})


def look_at(name: str, other: OtherMember) -> None:
    """Tell once of a member with which messages go one way alone.

    Each goes to the address that its sender's file has for a member. So a copy of a member that listens elsewhere has
    its say, hears nothing, and would not know why.
    """
    heard, taken, other.heard, other.taken = other.heard, other.taken, False, False
    if heard and taken:
        other.one_way_count, other.fault = 0, None
    if heard == taken:  # it may be down, which is shown
        return
    other.one_way_count += 1
    if other.one_way_count < _ONE_WAY_COUNT or other.fault:
        return
    other.fault = "not reached" if heard else "not heard"
    if heard:
        what, whose, its = "a member is heard and cannot be reached", "this file has for it", "it is"
    else:
        what, whose, its = "a member takes what this one says and is not heard", "its file has for this one", "this is"
    hint = f"look at the address that {whose}; if {its} a copy of another server, give it a name, a key and an address"
    _log.warning(what, member=name, hint=hint)


def _read_words(lines: Sequence[str]) -> list[Word]:
    words = []
    for number, line in enumerate(lines, 1):
        words.append(Word.read(line))
        if number % _REST_EVERY == 0:
            time.sleep(_REST_S)
    return words


def _pages(lines: list[str]) -> Iterable[list[str]]:
    """Yield lines in groups that go into one message each."""
    most = PAGE_BYTES // MOST_WORD_BYTES
    return (lines[at : at + most] for at in range(0, len(lines), most))


class Member:
    """The part of one server in its fleet, with its sockets; a companion of a live server, and of a supervisor."""

    def __init__(
        self,
        config: FleetConfig,
        book: BanBook,
        soon: Callable[[Callable[[], None]], object],
        take: Callable[[list[Word]], object],
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._config: Final = config
        self._book: Final = book
        self._soon: Final = soon
        self._gossip: Final = Gossip(book, config.others, self._send, take, lock)
        self._messenger = self._new_messenger()
        # In and out of what waits to be read, bytes by member, "" of strangers: each is written on one thread alone.
        self._came: Final = dict.fromkeys(["", *config.others], 0)
        self._read: Final = dict.fromkeys(self._came, 0)
        self._ended = threading.Event()
        self.bound: list[str] = []
        book.join(config.name)

    def _new_messenger(self) -> Messenger:
        config = self._config
        names = {item.pubkey: name for name, item in config.members.items()}
        return Messenger(
            identity=config.name,
            settings=DeliverySettings(
                window=_MESSAGE_WINDOW, max_attempts=None, retry=Backoff(first_s=0.25, factor=2.0, most_s=COMPARE_S)
            ),
            max_message_bytes=_MOST_MESSAGE_BYTES,
            keys=config.keys,
            allow=None if config.keys is None else lambda pubkey: names.get(pubkey, False),
        )

    def start(self) -> None:
        config = self._config
        self._messenger.start()
        for name, item in config.others.items():
            self._gossip.others[name].connection = self._messenger.make_connection(item)
        self._messenger.listen_for_connection(config.listen, config.name, self._received)
        self._book.listeners.append(self._gossip.tell)
        threading.Thread(target=self._compare, args=(self._ended,), name="flowctl-fleet", daemon=True).start()
        _log.info("member of a fleet", member=config.name, at=config.listen.endpoint, others=sorted(config.others))

    def stop(self, deadline_s: float = 1.0) -> None:
        self._ended.set()
        self._messenger.stop(deadline_s)
        with suppress(ValueError):  # it was not started, or has been stopped
            self._book.listeners.remove(self._gossip.tell)

    def lend(self, _: Path) -> Callable[[], None]:
        """Leave the place in the fleet to the server that takes this one's."""
        self.stop()
        return self._take_back

    def _take_back(self) -> None:
        self._ended, self._messenger = threading.Event(), self._new_messenger()
        self.start()

    def _compare(self, ended: threading.Event) -> None:
        while True:
            self._soon(self._look_and_compare)
            if ended.wait(COMPARE_S):
                return

    def _look_and_compare(self) -> None:
        for name, other in self._gossip.others.items():
            if not self._messenger.taken_over(other.connection):  # which is told already
                look_at(name, other)
        self._gossip.compare_all()

    def _received(self, messenger: Messenger, message: ReceivedMessage) -> None:
        del messenger
        sender = message.routing_id.decode("ascii", "replace")
        other = self._gossip.others.get(sender)
        whose = "" if other is None else sender
        size = max(_MESSAGE_BYTES, len(message.message))
        if self._came[whose] - self._read[whose] + size <= _MOST_WAITING_BYTES:
            self._came[whose] += size
            self._soon(partial(self._read_message, sender, whose, message.message))
        elif other is not None:
            other.dropped += 1  # what was in it is found by comparing

    def _read_message(self, sender: str, whose: str, octets: bytes) -> None:
        self._read[whose] += max(_MESSAGE_BYTES, len(octets))
        self._gossip.received(sender, octets)

    def _send(self, name: str, said: str) -> None:
        """Send a message; one that is lost is made good by the next comparison."""
        with suppress(BusyError, ClosedError):
            self._messenger.send_message(
                self._gossip.others[name].connection,
                said,
                deadline=_PASSING_S,
                on_ack=lambda *_: self._gossip.took(name),
            )

    def status(self) -> dict[str, Any]:
        """Return how the fleet stands. Any thread."""
        words, now = list(self._book.words), time.monotonic()
        return {
            "member": self._config.name,
            "bans": sum(word.ban is not None for word in words),
            "lifted": sum(word.kind is WordKind.LIFT for word in words),
            "limits": any(word.kind is WordKind.LIMITS for word in words),
            "strangers": self._gossip.strangers,
            "name_taken": any(self._messenger.taken_over(other.connection) for other in self._gossip.others.values()),
            "members": [
                {
                    "member": name,
                    "heard_s_ago": None if other.heard_at is None else round(now - other.heard_at, 1),
                    "same": other.same,
                    "waiting": self._messenger.pending_count(other.connection),
                    "words": other.count,
                    "dropped": other.dropped,
                    "duplicates": self._messenger.duplicate_count(0, name),
                    "fault": other.fault,
                    "why": self._messenger.why(other.connection),
                }
                for name, other in self._gossip.others.items()
            ],
        }


def join_fleet(server: LiveServer, file: Path) -> None:
    """Have a live server be a member of the fleet that a file names; before it is started."""
    member = Member(read_config(file), server.book, server.reload.run_later, server.take_words)
    server.fleet = member
    server.companions.append(member)
    server.on_drain.append(member.stop)
    server.loans.append(member.lend)
