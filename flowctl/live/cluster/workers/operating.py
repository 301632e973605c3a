"""Operations on all workers: asked of each over its link, and their answers put together.

How each operation is carried out by several processes stands in the table of operations (`Operation.together`). What
changes the server is asked for by one thread of the listener, one after the other; before it is called done, workers
that came meanwhile are asked as well, so that none misses it. What was set by command is kept for workers that are
started later, and every change is entered in one list of changes, whichever worker it was seen at first.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final, Protocol, TypeAlias, cast

from flowctl.control import effects
from flowctl.control.operations import BY_NAME, Operation, Permission, answer_with, error_dict, error_of
from flowctl.control.together import Answer, Who, combine
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.server.bans import Ban, BanList
from flowctl.errors import ClosedError, FlowctlError, RpcError
from flowctl.live.bans.banning import PENALTY
from flowctl.live.bans.penalties import bans_of, verdict_line, verdict_of
from flowctl.live.changes import Change, Changes
from flowctl.live.cluster.workers.inforce import InForce
from flowctl.live.cluster.workers.order import WORKER
from flowctl.live.judging.penalties import Verdict
from flowctl.live.server import LiveServer
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.peers.peer import ConnectionID

Json: TypeAlias = dict[str, Any]
_FileChange: TypeAlias = tuple[str, Mapping[str, Any], str]
ASK_S: Final = 10.0
"""How long a worker is waited for: less than callers wait, so that they are told which one did not answer."""
_COMMANDS: Final = frozenset({"limits", "ban", "unban", "drain"})
"""Changes that a command makes; the others come from files."""
_DOWN: Final = "being started"


class Linked(Protocol):
    """A process with a link, as this needs it."""

    @property
    def number(self) -> int:
        """Of the worker."""

    @property
    def serial(self) -> int:
        """Of the process."""

    @property
    def conn(self) -> ConnectionID | None:
        """Its link."""


class Operating:
    """Carries operations out on all workers."""

    def __init__(
        self,
        node: RpcNode,
        linked: Callable[[], Iterable[Linked]],
        expected: Callable[[], Iterable[int]],
        *,
        lock: OwnedLock,
        in_force: InForce,
        changes: Changes,
        drains: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node: Final = node
        self._linked: Final = linked
        self._expected: Final = expected
        self._lock: Final = lock
        self._in_force: Final = in_force
        self.changes: Final = changes
        self._drains: Final = drains
        self._clock: Final = clock
        self._started_at: Final = clock()
        self._files_seen: dict[str, str] = {}  # digest by what changed; guarded by _lock
        # Changes of files that are seen while a command is carried out. None: none is.
        self._later: list[_FileChange] | None = None  # guarded by _lock

    def answer(self, name: str, call: bytes, permission: Permission, caller: str = "") -> bytes:
        """Carry out an operation; see `flowctl.control.operations.answer`."""
        return answer_with(self._effect, name, call, permission, caller)

    def punish(self, verdicts: list[Verdict]) -> None:
        """Decide about addresses that have done too much at a worker, by what behaves there at any of them.

        Not on the thread of the node.
        """
        totals = [0] * len(verdicts)
        call = json.dumps([verdict_line(item) for item in verdicts])
        for future in self._requests(f"{WORKER}.behaving", call):
            for at, count in enumerate(json.loads(future)):
                totals[at] += count
        bans = bans_of(verdicts, totals, datetime.now(UTC))
        with self._lock:
            self._in_force.punish(bans)
        told = json.dumps([ban.as_dict() for ban in bans])
        for _ in self._requests(f"{WORKER}.punish", told):
            pass
        for ban in bans:
            self.changes.note("ban", ban.as_dict(), PENALTY)

    def _requests(self, command: str, call: str) -> Iterable[bytes]:
        """Ask all workers side by side; yield the answers of those that do."""
        pending = []
        for item in self._now():
            if item.conn is not None:
                with suppress(ClosedError):
                    pending.append(self._node.request_future(item.conn, command, call, timeout_s=ASK_S))
        for future in pending:
            with suppress(RpcError):
                yield future.get()[0]

    def note_file(self, what: str, detail: Mapping[str, Any], digest: str) -> None:
        """Note a change that a worker took from a file: each takes it, and it is one. Any thread."""
        with self._lock:
            if self._later is not None:  # a worker may have read what another one writes for this change
                self._later.append((what, detail, digest))
                return
            if self._files_seen.get(what) == digest:
                return
            self._files_seen[what] = digest
        self.changes.note(what, detail)

    def _effect(self, operation: Operation, asked: Mapping[str, Any]) -> Json:
        how = operation.together
        if how.who is Who.HERE:
            return operation.effect(cast("LiveServer", self), asked)  # `changes` needs no more of one
        prepared = how.prepare(asked, datetime.now(UTC))
        if operation.name == "drain":
            self._drains()
        if operation.name == "stats":
            return self._stats(operation, prepared)
        if operation.looks and how.who is Who.ALL:
            return combine(how, prepared, self._looked(operation, prepared))
        if how.who is Who.ONE:
            return combine(how, prepared, self._any(operation.name, prepared))
        return self._all(operation, prepared)

    # -- who is asked

    def _all(self, operation: Operation, asked: Mapping[str, Any]) -> Json:
        """Carry out on all; what workers read from files meanwhile is entered after that."""
        with self._lock:
            self._later = []
        try:
            return self._asked_all(operation, asked)
        finally:
            with self._lock:
                later, self._later = self._later or [], None
            for what, detail, digest in later:
                self.note_file(what, detail, digest)

    def _asked_all(self, operation: Operation, asked: Mapping[str, Any]) -> Json:
        """Ask all, those that come meanwhile too; note what is in force then, and what has changed."""
        done: set[int] = set()
        answers: list[Answer] = []
        changed: list[Mapping[str, Any]] = []
        while True:
            with self._lock:
                targets = sorted((item for item in self._linked() if item.serial not in done), key=lambda w: w.number)
                if not targets:
                    result = combine(operation.together, asked, answers)
                    if operation.together.in_force:
                        result |= self._in_force.note(operation.name, asked, result)
                    break
            first = operation.together.who is Who.FIRST and not done
            targets = targets[:1] if first else targets
            done.update(item.serial for item in targets)
            for reply, found in self._ask(targets, operation.name, asked):
                answers.append(reply)
                changed += found
        for change in changed[:1]:
            self.changes.note(change["what"], change["detail"], change["origin"])
        return result

    def _any(self, name: str, asked: Mapping[str, Any]) -> list[Answer]:
        answers: list[Answer] = []
        for item in self._now():
            answers += [reply for reply, _ in self._ask([item], name, asked)]
            if answers[-1].result is not None:
                return answers[-1:]
        return answers

    def _now(self) -> list[Linked]:
        with self._lock:
            return sorted(self._linked(), key=lambda item: item.number)

    def _ask(
        self, targets: list[Linked], name: str, asked: Mapping[str, Any]
    ) -> list[tuple[Answer, list[Mapping[str, Any]]]]:
        """Ask processes side by side; return their answers, with the changes that each has made."""
        call = json.dumps({"name": name, "asked": dict(asked)})
        pending = []
        for item in targets:
            if item.conn is not None:
                try:
                    future = self._node.request_future(item.conn, f"{WORKER}.operate", call, timeout_s=ASK_S)
                except ClosedError:
                    continue
                pending.append((item.number, future))
        found: list[tuple[Answer, list[Mapping[str, Any]]]] = []
        for number, future in pending:
            try:
                said = json.loads(future.get()[0])
            except RpcError as error:
                if error.code != "DISCONNECTED":  # who has ended has no part in it any more
                    found.append((Answer(number, missing=_why(error)), []))
                continue
            if "error" in said:
                found.append((Answer(number, error=error_of(said["error"])), []))
            else:
                found.append((Answer(number, result=said["result"]), said["changes"]))
                if name in {"ban", "unban"}:  # what it wrote to the file is no change of the file by itself
                    with self._lock:
                        self._files_seen["bans file"] = said["bans_digest"]
        return found

    # -- figures

    def _stats(self, operation: Operation, asked: Mapping[str, Any]) -> Json:
        """Ask all for figures: of one connection, or whole lists up to the end of the page, page by page."""
        answers = self._looked(operation, asked)
        if asked["connection"] is not None:
            return combine(operation.together, asked, answers)
        made = combine(operation.together, asked, answers)
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
        if down:
            names = ", ".join(f"worker {number} is {_DOWN}" for number in down)
            made["warning"] = "; ".join(filter(None, [made.get("warning"), names]))
        return made

    def _looked(self, operation: Operation, asked: Mapping[str, Any]) -> list[Answer]:
        """Ask all, side by side, for what they only look at; lists page by page."""
        if operation.together.lists and asked.get("connection") is None:
            return self._pages(operation, asked)
        return [reply for reply, _ in self._ask(self._now(), operation.name, asked)]

    def _pages(self, operation: Operation, asked: Mapping[str, Any]) -> list[Answer]:
        """Return what each has up to the end of the page: of streams all, since those of several are added."""
        how = operation.together
        need, offset = asked["offset"] + asked["limit"], 0
        whole: dict[int, Json] = {}
        failed: list[Answer] = []
        targets = self._now()
        while targets:
            page = {**asked, "offset": offset, "limit": how.page}
            if offset >= need and "viewers" in asked:
                page["viewers"] = "none"
            answers = [reply for reply, _ in self._ask(targets, operation.name, page)]
            failed += [reply for reply in answers if reply.result is None]
            offset += how.page
            more = set()
            for number, found in ((reply.worker, reply.result) for reply in answers if reply.result is not None):
                known = whole.setdefault(number, found)
                if known is not found:
                    for name in how.lists:
                        known[name] += found[name]
                counts = known["found"]
                if offset < max(counts[name] if name in how.whole else min(need, counts[name]) for name in how.lists):
                    more.add(number)
            targets = [item for item in targets if item.number in more]
        incomplete = {reply.worker for reply in failed}
        return [*failed, *(Answer(number, found) for number, found in whole.items() if number not in incomplete)]


def _why(error: RpcError) -> str:
    return f"has not answered within {ASK_S:g} s, it may do it yet" if error.code == "TIMEOUT" else f"fails: {error}"


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
    value["changes"] = [asdict(change) for change in made if change.what in _COMMANDS]
    value["bans_digest"] = server.reload.digest("bans")
    return json.dumps(value).encode("utf-8", "backslashreplace")


def behaving(server: LiveServer, call: bytes) -> bytes:
    """Say, in a worker, how many connections behave of each address of verdicts, and end the guilty ones."""
    return json.dumps(server.end_guilty(verdict_of(item) for item in json.loads(call))).encode()


def punished(server: LiveServer, call: bytes) -> bytes:
    """Put bans of penalties in force in a worker."""
    bans = bans_of_lines(json.loads(call))
    server.reload.do(lambda: server.punish(bans))
    return b"yes"


def bans_of_lines(lines: Iterable[Json]) -> list[Ban]:
    """Return the bans that a supervisor tells a worker."""
    return BanList.parse("\n".join(map(json.dumps, lines)), "the supervisor's bans").bans


def put_in_force(server: LiveServer, orders: Iterable[tuple[str, Json]], bans: list[Ban]) -> None:
    """Give a worker that has been started what was in force before."""
    if bans:
        server.reload.do(lambda: server.punish(bans, told=False))
    for name, asked in orders:
        if name == "limits":
            effects.limits(server, asked)
