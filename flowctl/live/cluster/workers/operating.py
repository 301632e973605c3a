"""Operations on all workers: asked of each over its link, and their answers put together.

How each operation is carried out by several processes stands in the table of operations (`Operation.who`). What
changes the server is asked for by one thread of the listener, one after the other; before it is called done, workers
that came meanwhile are asked as well, so that none misses it. Limits set by command are kept for workers that are
started later, and every change is entered in one list of changes, whichever worker it was seen at first.

Bans are kept here: what is said of them is entered in the book of the supervisor, and told to the workers as one
server of a fleet tells another; a worker that is started later is told all that the book has.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast

from flowctl.control.effects import successor_of
from flowctl.control.operations import BY_NAME, Operation, Permission, answer_with, error_dict, error_of
from flowctl.control.together import Processes, WorkerAnswer, combine
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.server.bans import Ban, parse_ban
from flowctl.core.text.fieldtypes import Json
from flowctl.errors import ClosedError, FlowctlError, RpcError
from flowctl.live.bans.book import PENALTY, BanBook
from flowctl.live.bans.penalties import bans_of, overflow_line, overflow_of
from flowctl.live.bans.words import BUCKETS, LIMITS, Word, WordKind
from flowctl.live.changes import Change, Changes
from flowctl.live.cluster.workers.order import WORKER
from flowctl.live.judging.penalties import Overflow
from flowctl.live.server import BanOutcome, Fleet, LiveServer, not_stored
from flowctl.log import redact_text
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.peers.peer import ConnectionID

ASK_S: Final = 10.0
"""Time that a worker has to answer: less than callers wait, so that they learn which worker did not answer."""
MOST_PAGE_WORDS: Final = 500
"""Words sent to a worker in one message, if they are short."""
MOST_PAGE_BYTES: Final = 256 * 1024
"""Octets of their lines: with a bucket more, and quotes in quotes, they fit the megabyte of a message."""
_BANS_SEARCHED: Final = 100
"""Bans that are searched for the one to be lifted, which comes first."""
_COMMANDS: Final = frozenset({"limits", "drain"})
"""Changes that a command makes at a worker; the others come from files."""
_DOWN: Final = "being started"


class LinkedWorker(Protocol):
    """What `WorkerOperations` needs of a worker's process that has a link."""

    @property
    def number(self) -> int:
        """Of the worker."""

    @property
    def serial(self) -> int:
        """Of the process."""

    @property
    def conn(self) -> ConnectionID | None:
        """Its link."""


class WorkerReply(NamedTuple):
    """A worker's reply: octets, or the reason for none. Neither: the worker has ended, and takes no part any more."""

    worker: int
    octets: bytes | None = None
    missing: str = ""


class WorkerOperations:
    """Carries out operations on all workers."""

    def __init__(
        self,
        node: RpcNode,
        linked: Callable[[], Iterable[LinkedWorker]],
        expected: Callable[[], Iterable[int]],
        *,
        lock: OwnedLock,
        book: BanBook,
        changes: Changes,
        drains: Callable[[], None],
        hands_over: Callable[[Path, Callable[[], object]], None],
        limits_file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node: Final = node
        self._linked: Final = linked
        self._expected: Final = expected
        self._lock: Final = lock
        #: bans of the server
        self.book: Final = book  # guarded by _lock
        self.media: Callable[[], Json] = dict  #: figures of the media process
        self.fleet: Fleet | None = None  #: the fleet that the server is part of. None: there is none.
        self.changes: Final = changes
        self._drains: Final = drains
        self._hands_over: Final = hands_over
        self._clock: Final = clock
        self._started_at: Final = clock()
        self._files_seen: dict[str, str] = {}  # digest by what changed; guarded by _lock
        self._limits_file: Final = limits_file
        self._limits: Json | None = None  # set by command, for workers to come; guarded by _lock
        self._limits_digest = b""  # of the limits file then; guarded by _lock

    def answer(self, name: str, call: bytes, permission: Permission, caller: str = "") -> bytes:
        return answer_with(self._effect, name, call, permission, caller)

    def punish(self, verdicts: list[Overflow]) -> None:
        """Decide about addresses that have done too much at a worker, by how they behave at all workers.

        Not on the thread of the node.
        """
        totals = [0] * len(verdicts)
        call = json.dumps([overflow_line(item) for item in verdicts])
        for reply in self.request(self._now(), f"{WORKER}.behaving", call):
            for at, count in enumerate(json.loads(reply.octets or b"[]")):
                totals[at] += count
        with self._lock:
            words = self.book.ban(bans_of(verdicts, totals, datetime.now(UTC)))
        self._tell_workers(words, PENALTY)

    # -- bans

    def ban(self, ban: Ban, *, origin: str = "") -> BanOutcome:
        """Keep out, or limit, a network; as `LiveServer.ban`."""
        with self._lock:
            words = self.book.ban([dataclasses.replace(ban, reason=redact_text(ban.reason))])
            stored, warning = self.book.stored, not_stored(self.book)
        ended, missing = self._tell_workers(words, origin)
        return BanOutcome(words[0].ban or ban, ended, stored, "; ".join(filter(None, [warning, missing])))

    def unban(self, cidr: str, *, origin: str = "") -> list[Ban]:
        """Let a network in again; as `LiveServer.unban`."""
        asked = {"peer": cidr, "limit": _BANS_SEARCHED, "offset": 0}  # what a ban file says the workers know
        there = combine(BY_NAME["bans"].merge, asked, self._any("bans", asked))["bans"]
        with self._lock:
            lifted, word = self.book.lift(cidr, map(parse_ban, there), origin)
        self._tell_workers([word], origin)
        return lifted

    def take_words(self, words: Iterable[Word]) -> None:
        """Apply what another server of the fleet has said; not on the thread of the node."""
        with self._lock:
            entered = self.book.merge(words)
        self._tell_workers([word for word in entered if word.kind is not WordKind.LIMITS], None)
        for word in entered:
            if word.kind is WordKind.LIMITS:
                self.take_limits(word)

    def take_limits(self, word: Word) -> None:
        """Give all workers the limits of the fleet."""
        asked = {**word.value, "connection": None, "stream": None, "origin": f"fleet {word.stamp.node}"}
        self._ask_all(BY_NAME["limits"], asked)

    def _tell_workers(self, words: Sequence[Word], origin: str | None) -> tuple[int, str]:
        """Tell all workers, `origin` None: of the fleet; return how many connections that ended, and who is silent."""
        ended, silent = 0, dict[int, str]()
        for page in _pages(words):
            for item in self.request(self._now(), f"{WORKER}.words", words_call(page, origin)):
                ended += int(item.octets or 0)
                silent |= {item.worker: item.missing} if item.missing else {}
        for word in words:
            by = f"fleet {word.stamp.node}" if origin is None else origin
            self.changes.note("unban" if word.ban is None else "ban", word.detail(), by)
        return ended, "; ".join(f"worker {number} {missing}" for number, missing in silent.items())

    def words_page(self, first: int) -> tuple[str, int]:
        """Return words from a bucket on, for a new worker, and the bucket after them; 0: that is all."""
        self._lock.assert_owned()
        words: list[Word] = []
        size = 0
        while first < BUCKETS and len(words) < MOST_PAGE_WORDS and size < MOST_PAGE_BYTES:
            more = [word for word in self.book.words.bucket(first) if word.kind is not WordKind.LIMITS]
            words += more
            size += sum(len(word.line()) for word in more)
            first += 1
        return words_call(words, ""), first % BUCKETS

    def note_file(self, what: str, detail: Mapping[str, Any], digest: str) -> None:
        """Note a change that a worker took from a file: each takes it, and it is one. Any thread."""
        with self._lock:
            if self._files_seen.get(what) == digest:
                return
            self._files_seen[what] = digest
        self.changes.note(what, detail)

    def _effect(self, operation: Operation, asked: Mapping[str, Any]) -> Json:
        if operation.processes is Processes.HERE:
            return operation.effect(cast("LiveServer", self), asked)  # `changes` needs no more of one
        if operation.name == "drain":
            successor = successor_of(asked)
            asked = {**asked, "successor": ""}  # it is the sockets of this process that listen for all
            if successor is not None:
                self._hands_over(successor, lambda: self._effect(operation, asked))
                return {"draining": False, "again": False, "ends_within_s": asked["within"]}
            self._drains()
        if operation.name == "stats":
            return self._stats(operation, asked)
        if operation.name == "metrics":
            return combine(operation.merge, asked, self._ask_views(operation, asked)) | {"media": self.media()}
        if operation.looks and operation.processes is Processes.ALL:
            return combine(operation.merge, asked, self._ask_views(operation, asked))
        if operation.processes is Processes.ONE:
            return combine(operation.merge, asked, self._any(operation.name, asked))
        result = self._ask_all(operation, asked)
        if operation.name == "limits" and self.fleet is not None and _sets_all(asked, result):
            with self._lock:
                self.book.say_limits({name: result[name] for name in LIMITS})
        return result

    # -- who is asked

    def _ask_all(self, operation: Operation, asked: Mapping[str, Any]) -> Json:
        """Ask all, those that come meanwhile too; note what is in force then, and what has changed."""
        done: set[int] = set()
        answers: list[WorkerAnswer] = []
        changed: list[Mapping[str, Any]] = []
        while True:
            with self._lock:
                targets = sorted((item for item in self._linked() if item.serial not in done), key=lambda w: w.number)
                if not targets:
                    result = combine(operation.merge, asked, answers)
                    if operation.name == "limits":
                        self._note_limits_locked(asked, result)
                    break
            done.update(item.serial for item in targets)
            for reply, found in self._ask(targets, operation.name, asked):
                answers.append(reply)
                changed += found
        for change in changed[:1]:
            self.changes.note(change["what"], change["detail"], change["origin"])
        return result

    def _any(self, name: str, asked: Mapping[str, Any]) -> list[WorkerAnswer]:
        answers: list[WorkerAnswer] = []
        for item in self._now():
            answers += [reply for reply, _ in self._ask([item], name, asked)]
            if answers[-1].result is not None:
                return answers[-1:]
        return answers

    def _now(self) -> list[LinkedWorker]:
        with self._lock:
            return sorted(self._linked(), key=lambda item: item.number)

    def _ask(
        self, targets: list[LinkedWorker], name: str, asked: Mapping[str, Any]
    ) -> list[tuple[WorkerAnswer, list[Mapping[str, Any]]]]:
        call = json.dumps({"name": name, "asked": dict(asked)})
        answers: list[tuple[WorkerAnswer, list[Mapping[str, Any]]]] = []
        for number, octets, missing in self.request(targets, f"{WORKER}.operate", call):
            if octets is None:
                if missing:
                    answers.append((WorkerAnswer(number, missing=missing), []))
                continue
            said = json.loads(octets)
            if "error" in said:
                answers.append((WorkerAnswer(number, error=error_of(said["error"])), []))
            else:
                answers.append((WorkerAnswer(number, result=said["result"]), said["changes"]))
        return answers

    def request(
        self, targets: Iterable[LinkedWorker], command: str, call: str = "", timeout_s: float = ASK_S
    ) -> Iterator[WorkerReply]:
        """Ask processes side by side; yield their replies."""
        pending = []
        for item in targets:
            if item.conn is not None:
                try:
                    future = self._node.request_future(item.conn, command, call, timeout_s=timeout_s)
                except ClosedError:
                    continue
                pending.append((item.number, future))
        for number, future in pending:
            try:
                yield WorkerReply(number, future.get()[0])
            except RpcError as error:
                yield WorkerReply(number, missing="" if error.code == "DISCONNECTED" else _why(error))

    # -- limits for workers to come

    def _note_limits_locked(self, asked: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Note limits that a command has set; they last until the limits file says something new."""
        self._lock.assert_owned()
        if _sets_all(asked, result):
            self._limits = {name: result[name] for name in LIMITS} | {"connection": None, "origin": asked["origin"]}
            self._limits_digest = self._digest()

    def limits_in_force(self) -> Json | None:
        """Return the values with which a new worker carries out ``limits``. None: its files say them."""
        self._lock.assert_owned()
        return self._limits if self._digest() == self._limits_digest else None

    def _digest(self) -> bytes:
        """Return what tells one version of the limits file from another; empty: there is none."""
        try:
            return b"" if self._limits_file is None else hashlib.blake2b(self._limits_file.read_bytes()).digest()
        except OSError:
            return b""

    # -- figures

    def _stats(self, operation: Operation, asked: Mapping[str, Any]) -> Json:
        """Ask all for figures, and whole lists up to the end of the page, page by page."""
        answers = self._ask_views(operation, asked)
        made = combine(operation.merge, asked, answers)
        # A worker that has said nothing has no link, or lost it while it was asked, or got it after that.
        down = sorted(set(self._expected()).difference(reply.worker for reply in answers))
        server = made["server"]
        server |= {
            "pid": os.getpid(),
            "up_s": round(self._clock() - self._started_at, 1),
            "change": self.changes.version,
        }
        rows = {row["worker"]: row for row in server["workers"]}
        rows |= {number: {"worker": number, "state": _DOWN} for number in down}
        for reply in answers:
            if reply.result is None:
                rows[reply.worker] = {"worker": reply.worker, "state": reply.missing or "failed"}
        server["workers"] = [rows[number] for number in sorted(rows)]
        made["media"] = self.media()
        if down:
            names = ", ".join(f"worker {number} is {_DOWN}" for number in down)
            made["warning"] = "; ".join(filter(None, [made.get("warning"), names]))
        return made

    def _ask_views(self, operation: Operation, asked: Mapping[str, Any]) -> list[WorkerAnswer]:
        """Ask all, side by side, for what they only look at; lists page by page."""
        if operation.lists and asked.get("connection") is None:
            return self._pages(operation, asked)
        return [reply for reply, _ in self._ask(self._now(), operation.name, asked)]

    def _pages(self, operation: Operation, asked: Mapping[str, Any]) -> list[WorkerAnswer]:
        """Return what each has up to the end of the page: of streams all, since those of several are added."""
        lists, to_end = operation.lists, operation.whole
        need, offset = asked["offset"] + asked["limit"], 0
        whole: dict[int, Json] = {}
        failed: list[WorkerAnswer] = []
        targets = self._now()
        while targets:
            page = {**asked, "offset": offset, "limit": operation.page}
            if offset >= need and "viewers" in asked:
                page["viewers"] = "none"
            answers = [reply for reply, _ in self._ask(targets, operation.name, page)]
            failed += [reply for reply in answers if reply.result is None]
            offset += operation.page
            more = set()
            for number, result in ((reply.worker, reply.result) for reply in answers if reply.result is not None):
                rows = whole.setdefault(number, result)
                if rows is not result:
                    for name in lists:
                        rows[name] += result[name]
                counts = rows["found"]
                if offset < max(counts[name] if name in to_end else min(need, counts[name]) for name in lists):
                    more.add(number)
            targets = [target for target in targets if target.number in more]
        incomplete = {reply.worker for reply in failed}
        return [*failed, *(WorkerAnswer(number, rows) for number, rows in whole.items() if number not in incomplete)]


def _why(error: RpcError) -> str:
    return f"has not answered within {ASK_S:g} s, it may do it yet" if error.code == "TIMEOUT" else f"fails: {error}"


def _sets_all(asked: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Return whether limits of the whole server were set."""
    return asked["connection"] is None and asked["stream"] is None and "was" in result


def carry_out(server: LiveServer, call: bytes) -> bytes:
    """Carry out, in a worker, what the supervisor asks for; return the result or the error, and what it changed."""
    said = json.loads(call)
    operation = BY_NAME[said["name"]]
    before = server.changes.version
    try:
        value: Json = {"result": operation.effect(server, said["asked"])}
    except (FlowctlError, OSError) as error:
        value = {"error": error_dict(error)}
    made: list[Change] = server.changes.since(before)[0]
    value["changes"] = [dataclasses.asdict(change) for change in made if change.what in _COMMANDS]
    return json.dumps(value).encode("utf-8", "backslashreplace")


def behaving(server: LiveServer, call: bytes) -> bytes:
    return json.dumps(server.end_guilty(overflow_of(item) for item in json.loads(call))).encode()


def _pages(words: Sequence[Word]) -> Iterator[Sequence[Word]]:
    """Yield words in groups that go into one message each."""
    first = size = 0
    for at, word in enumerate(words):
        size += len(word.line())
        if at > first and (size > MOST_PAGE_BYTES or at - first == MOST_PAGE_WORDS):
            yield words[first:at]
            first, size = at, len(word.line())
    if words:
        yield words[first:]


def words_call(words: Iterable[Word], origin: str | None) -> str:
    """Return words in the form in which a worker gets them."""
    return json.dumps({"words": [word.line() for word in words], "origin": origin})


def take_words(server: LiveServer, call: bytes, *, told: bool = True) -> int:
    said = json.loads(call)
    words = [Word.read(line) for line in said["words"]]
    return server.reload.run_job(lambda: server.take_words(words, said["origin"], told=told))
