"""Events to browsers and scripts as Server-Sent Events: one reader of the server's events, many listeners, all bounded.

The table of operations is asked for events a few times a second while anybody listens. Each event gets a number, and
the last ones are kept, so that a listener that comes back with ``Last-Event-ID`` goes on where it was. A listener that
does not take them fast enough loses the oldest, and is told how many. All on the loop of the admin surface.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from flowctl.control.operations import Permission
from flowctl.live.admin.asking import CallRefused, OperationAsker
from flowctl.live.admin.guard import Receive, Scope, Send

_log: Final = structlog.get_logger("flowctl.admin")
POLL_S: Final = 0.25
"""Time between two reads of what has happened: a page shows it within half a second."""
HEARTBEAT_S: Final = 15.0
"""Silence after which a comment is sent: proxies cut a connection that is silent for a minute."""
KEPT: Final = 1024
MOST_QUEUED: Final = 256
"""Events that may wait for one listener."""
MOST_LISTENERS: Final = 32
"""Listeners of all callers. One caller may have as many as it leaves free, half of them at most: others find room."""
CHANGE: Final = "change"
"""Name of the event of a change; only callers who may list changes get it: it has the addresses that were banned."""
_ASKED: Final = 500


@dataclass(eq=False, kw_only=True, slots=True)
class _Listener:
    """A listener: its caller, the events that wait for it, how many it has lost, and whether it may get changes."""

    caller: str
    changes: bool
    queue: deque[bytes] = field(default_factory=deque)
    lost: int = 0
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def may_get(self, what: str) -> bool:
        return self.changes or what != CHANGE

    def put(self, data: bytes) -> None:
        if len(self.queue) >= MOST_QUEUED:
            self.queue.popleft()
            self.lost += 1
        self.queue.append(data)
        self.woken.set()


class EventStreams:
    """The listeners to events of a server."""

    def __init__(self, asking: OperationAsker) -> None:
        self._asking: Final = asking
        self._run: Final = secrets.token_hex(4)
        self._count = 0
        self._kept: Final[deque[tuple[int, str, bytes]]] = deque(maxlen=KEPT)
        self._listeners: Final[set[_Listener]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._cursor = ""
        self._version: tuple[str, int] | None = None  # run and version of the last change that was told
        self._ends = False

    @property
    def count(self) -> int:
        return len(self._listeners)

    def has_room(self, caller: str) -> bool:
        """Return whether a caller may have one more listener: no more than are left for others."""
        own = sum(listener.caller == caller for listener in self._listeners)
        return own < MOST_LISTENERS - self.count

    def end(self) -> None:
        self._ends = True
        if self._reader is not None:
            self._reader.cancel()
        for listener in self._listeners:
            listener.woken.set()

    # -- reading

    async def _read(self) -> None:
        """Ask for events while there are listeners."""
        while self._listeners:
            try:
                await self._read_events()
                await self._read_changes()
            except CallRefused as error:  # the server is busy or ends: ask again
                _log.debug("no events", why=str(error))
            await asyncio.sleep(POLL_S)
        self._reader = None

    async def _read_events(self) -> None:
        answer = json.loads(await self._asking.ask("events", {"since": self._cursor, "limit": _ASKED}))
        first, self._cursor = not self._cursor, answer["cursor"]
        if answer["lost"] and not first:
            self._broadcast("lost", {"count": answer["lost"], "where": "server"})
        for event in answer["events"]:
            self._broadcast(event["what"], event)

    async def _read_changes(self) -> None:
        since = 0 if self._version is None else self._version[1]
        answer = json.loads(await self._asking.ask("changes", {"since": since, "limit": _ASKED}, Permission.ADMIN))
        if self._version is not None and self._version[0] == answer["run"]:
            for change in answer["changes"]:
                self._broadcast(CHANGE, change)
        version = answer["changes"][-1]["version"] if answer["changes"] and self._version else answer["version"]
        self._version = answer["run"], version

    def _broadcast(self, what: str, event: MutableMapping[str, Any]) -> None:
        self._count += 1
        # Where names are of peers, JSON writes what would end the line as an escape.
        data = f"id: {self._run}-{self._count}\nevent: {what}\ndata: {json.dumps(event)}\n\n".encode()
        self._kept.append((self._count, what, data))
        for listener in self._listeners:
            if listener.may_get(what):
                listener.put(data)

    # -- telling

    def _add_listener(self, last_id: str, caller: str, *, changes: bool) -> _Listener:
        """Return a new listener of a caller, with what it has missed since `last_id`."""
        listener = _Listener(caller=caller, changes=changes)
        run, _, number = last_id.partition("-")
        if last_id and (run != self._run or not number.isdecimal()):
            listener.queue.append(_lost_event(None, "another run of the server"))
        elif last_id:
            missed = [data for count, what, data in self._kept if count > int(number) and listener.may_get(what)]
            gone = self._count - len(self._kept) - int(number)
            if gone > 0:
                listener.queue.append(_lost_event(gone, "no longer kept"))
            listener.queue.extend(missed[-MOST_QUEUED:])
            listener.lost += max(0, len(missed) - MOST_QUEUED)
        self._listeners.add(listener)
        if self._reader is None or self._reader.done():
            self._reader = asyncio.get_running_loop().create_task(self._read())
        return listener

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        last_id = dict(scope["headers"]).get(b"last-event-id", b"").decode("latin-1")
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        state = scope.get("state", {})
        changes = state.get("permission", Permission.NONE) >= Permission.ADMIN
        # Before anything is awaited: `has_room` was asked just now.
        listener = self._add_listener(last_id[:40], state.get("caller", ""), changes=changes)
        leaves = asyncio.get_running_loop().create_task(_await_disconnect(receive, listener.woken.set))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send(_body(b"retry: 2000\n: flowctl\n\n"))
            while not (self._ends or leaves.done()):
                if listener.queue or listener.lost:
                    await send(_body(self._pop_queued(listener)))
                    continue
                listener.woken.clear()
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await listener.woken.wait()
                except TimeoutError:
                    await send(_body(b": heartbeat\n\n"))
            if not leaves.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            leaves.cancel()
            self._listeners.discard(listener)

    def _pop_queued(self, listener: _Listener) -> bytes:
        parts = []
        if listener.lost:
            parts.append(_lost_event(listener.lost, "this listener is too slow"))
            listener.lost = 0
        parts += listener.queue
        listener.queue.clear()
        return b"".join(parts)


async def _await_disconnect(receive: Receive, then: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    then()


def _lost_event(count: int | None, why: str) -> bytes:
    """Return the event, without an id, that tells how many events were lost; None: their number is not known."""
    return f"event: lost\ndata: {json.dumps({'count': count, 'why': why})}\n\n".encode()


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
