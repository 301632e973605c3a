"""The worker's end of its link with the supervisor: RPC over a unix socket in a folder that is the user's alone.

Both ends ask: the worker for what is decided in one place, the supervisor for figures and changes. A link that is lost
means that the supervisor has gone, and the worker ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import structlog

from flowctl.control import effects
from flowctl.control.summary import figures_of
from flowctl.errors import ClosedError
from flowctl.live.bans.penalties import overflow_line
from flowctl.live.changes import Change
from flowctl.live.cluster.media.order import StreamOrder
from flowctl.live.cluster.workers.operating import behaving, carry_out, take_words
from flowctl.live.cluster.workers.order import WORKER, WORKERS, WorkerConfig
from flowctl.live.judging.penalties import Overflow
from flowctl.live.server import LiveServer
from flowctl.nodes.rpc.access.access import AuthLevel
from flowctl.nodes.rpc.message import RpcMessage
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.peers.peer import ConnectionID

_log: Final = structlog.get_logger("flowctl.worker")
FOR_EVER_S: Final = 10 * 365 * 86_400.0
_TOLD_S: Final = 30.0


class SupervisorLink:
    """The link of one worker to its supervisor."""

    conn: ConnectionID  #: the supervisor, for `RpcNode.call` and `request`; once `start` has returned

    def __init__(self, order: WorkerConfig, server: LiveServer, lost: Callable[[], None]) -> None:
        self._order: Final = order
        self._server: Final = server
        self._lost: Final = lost
        self.followed: Callable[[], int] = int  #: returns how many streams of other workers are followed here
        self._told: Final = threading.Event()  # what was in force before is in force here
        self.node: Final = RpcNode(name="flowctl-link", on_error=server.hub.oversight.report)
        self.node.add_category(WORKER, AuthLevel.ADMIN)
        commands = {
            "alive": self._alive,
            "operate": self._operate,
            "figures": self._figures,
            "behaving": lambda message: behaving(server, message.data[0]),
            "words": self._words,
        }
        for name, handler in commands.items():
            self.node.add_request_command(WORKER, name, handler)
        self.node.add_command(WORKER, "unwritten", self._unwritten)

    def start(self) -> None:
        """Reach the supervisor; a ClosedError says that the server ends, and starts nothing any more."""
        self.node.start()
        self.conn = self.node.connect_remote(self._order.supervisor, auth=AuthLevel.ADMIN)
        place = {"number": self._order.number, "serial": self._order.serial}
        reply = self.node.request_future(self.conn, f"{WORKERS}.hello", json.dumps(place)).get()
        try:
            said = json.loads(reply[0])
            if said["ends"]:
                raise ClosedError("the server ends")
            self._take_what_is_in_force(said)
        finally:
            self._told.set()
        self._server.changes.listeners.append(self._changed)
        self._server.penalties.decide = self._tell_verdicts
        self.node.request(self.conn, f"{WORKERS}.stay", on_reply=self._link_lost, timeout_s=FOR_EVER_S)

    def _take_what_is_in_force(self, said: dict[str, Any]) -> None:
        """Take bans, of which this is the first page, and limits that commands have put in force for all workers."""
        self._server.book.words.node = said["node"]
        while True:
            take_words(self._server, said["words"].encode(), told=False)
            if not said["next"]:
                break
            page = self.node.request_future(self.conn, f"{WORKERS}.words", json.dumps(said["next"])).get()
            said = {**said, **json.loads(page[0])}
        if said["limits"] is not None:
            effects.limits(self._server, said["limits"])

    def _tell_verdicts(self, verdicts: list[Overflow]) -> None:
        self.node.send(self.conn, f"{WORKERS}.verdicts", json.dumps([overflow_line(item) for item in verdicts]))

    def tell_media(self, stream: str, order: StreamOrder | None) -> None:
        """Tell what is to be written of a stream here."""
        wanted = None if order is None else asdict(order)
        said = {"serial": self._order.serial, "stream": stream, "order": wanted, "at": time.monotonic()}
        with contextlib.suppress(ClosedError):  # this worker ends
            self.node.send(self.conn, f"{WORKERS}.media", json.dumps(said))

    async def _unwritten(self, message: RpcMessage) -> None:
        stream, why = json.loads(message.data[0])
        self._server.hub.note_unwritten(stream, why)

    def _words(self, message: RpcMessage) -> str:
        self._told.wait(_TOLD_S)
        return str(take_words(self._server, message.data[0]))

    def ready(self) -> None:
        said = {"serial": self._order.serial, "limits": str(self._server.limits)}
        self.node.request_future(self.conn, f"{WORKERS}.ready", json.dumps(said)).get()

    def stop(self, deadline_s: float = 1.0) -> None:
        self.node.stop(deadline_s)

    def _link_lost(self, ok: bool, data: list[bytes]) -> None:  # noqa: FBT001 - as called
        """Act on the end of the request that the supervisor never answers: the link is lost."""
        del ok
        if not self._server.stopping:
            _log.warning("the supervisor has gone, this worker ends", why=b" ".join(data).decode(errors="replace"))
        self._lost()

    async def _alive(self, message: RpcMessage) -> str:
        """Answer once every thread of the server has come to it."""
        del message
        loop = asyncio.get_running_loop()
        for group in self._server.groups.groups:
            passed: asyncio.Future[None] = loop.create_future()
            group.call_soon(loop.call_soon_threadsafe, _settle, passed)
            await passed
        return "yes"

    def _operate(self, message: RpcMessage) -> bytes:
        self._told.wait(_TOLD_S)
        return carry_out(self._server, message.data[0])

    def _figures(self, message: RpcMessage) -> str:
        del message
        figures = figures_of(self._server)
        figures["streams"] -= self.followed()  # another worker counts them
        return json.dumps(figures)

    def _changed(self, change: Change) -> None:
        name, _, kind = change.what.partition(" ")
        if kind == "file":
            said = {"what": change.what, "detail": change.detail, "digest": self._server.reload.digest(name)}
            self.node.send(self.conn, f"{WORKERS}.changed", json.dumps(said))


def _settle(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(None)
