"""The streams of all workers as one: names are decided in the supervisor, and streams followed where they have viewers.

Two parts: `WorkerStreams` in each worker, with its claims, its links and what it follows; `SupervisorNames` with the
desk. Between them go messages of JSON over the link of `flowctl.live.cluster.workers.link`.
"""

from __future__ import annotations

import contextlib
import json
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Final

from flowctl.errors import ClosedError
from flowctl.live.cluster.follow import FollowStatistics, Source
from flowctl.live.cluster.links import Links
from flowctl.live.cluster.names.claims import NameClaims
from flowctl.live.cluster.names.desk import NamesDesk, Values
from flowctl.live.cluster.names.directory import NoticeKind
from flowctl.live.cluster.names.following import Following
from flowctl.live.cluster.workers.link import SupervisorLink
from flowctl.live.cluster.workers.order import WORKER, WORKERS
from flowctl.live.config import LiveConfig
from flowctl.live.server import LiveServer
from flowctl.nodes.rpc.jobs.batch import NODE_THREAD
from flowctl.nodes.rpc.message import RpcMessage
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.peers.peer import ConnectionID
from flowctl.wire.rtmp.url import url_of

_TICK_S: Final = 0.25
"""Time between two checks by the supervisor of what is due, and of workers that have ended."""
_EXTRA_GRACE_S: Final = 2.0
"""Time beyond the grace time for which a followed stream is kept: it ends when the supervisor says so."""


def link_path(folder: Path, serial: int) -> Path:
    return folder / f"link-{serial}.sock"


def _longest_grace_s(config: LiveConfig) -> float:
    """Return the longest time for which the name of any stream may be kept."""
    of_levels = [float(level.values.get("return_grace_s", 0.0)) for level in config.levels]
    return max([config.return_grace_s, *of_levels])


class WorkerStreams:
    """The claims, the links and the follows of one worker, on behalf of its hub."""

    def __init__(self, server: LiveServer, serial: int, folder: Path, send: Callable[[Values], None]) -> None:
        self._server: Final = server
        self._serial: Final = serial
        self._folder: Final = folder
        self._send: Final = send
        self._links: Final = Links(server, link_path(folder, serial))
        self._claims: Final = NameClaims(server.hub, send)
        self._following: Final = Following(
            server.hub, server.groups.groups[0], self._find, hold_s=_longest_grace_s(server.config) + _EXTRA_GRACE_S
        )
        server.hub.names = self._claims
        server.hub.demand = self._following.demand
        server.companions.append(self)
        self.bound: list[str] = []  # what operators may reach: nothing

    def start(self) -> None:
        """Let other workers follow; the server's groups run."""
        self._links.start()

    def stop(self, deadline_s: float) -> None:
        del deadline_s
        self._following.stop()
        self._links.stop()

    def handle_notice(self, values: Values) -> None:
        """Handle a message of the desk. One thread."""
        if values["tell"] != NoticeKind.WHERE.value:
            self._claims.handle_notice(values)
            return
        name, where = values["name"], values["value"]
        if where == self._serial:
            self._following.here(name)
        else:
            self._following.found(name, self._source(name, where) if where else None, keep=values["keep"])

    def statistics(self) -> dict[str, FollowStatistics]:
        """Return figures of what is followed, by name. Any thread."""
        return self._following.statistics()

    def _find(self, name: str, wanted: bool) -> None:  # noqa: FBT001 - as `Following` calls it
        self._send({"ask": "view" if wanted else "unview", "name": name})

    def _source(self, name: str, serial: int) -> Source:
        return Source(url_of(name, "worker"), str(link_path(self._folder, serial)), f"worker {serial}")


def join_streams(server: LiveServer, link: SupervisorLink, serial: int, folder: Path) -> WorkerStreams:
    def send(values: Values) -> None:
        with contextlib.suppress(ClosedError):  # the worker ends
            link.node.send(link.conn, f"{WORKERS}.names", json.dumps(values))

    streams = WorkerStreams(server, serial, folder, send)

    async def told(message: RpcMessage) -> None:
        streams.handle_notice(json.loads(message.data[0]))

    link.node.add_command(WORKER, "names", told)
    return streams


class SupervisorNames:
    """The desk in the supervisor, on the thread of its node, which has not begun yet."""

    def __init__(self, config: LiveConfig, node: RpcNode) -> None:
        self.desk: Final = NamesDesk(config, self._send)
        self._node: Final = node
        self._conns: Final[dict[int, ConnectionID]] = {}  # by process
        self._serials: Final[dict[ConnectionID, int]] = {}
        self._gone: Final[queue.SimpleQueue[int]] = queue.SimpleQueue()
        node.add_command(WORKERS, "names", self._asked)
        node.add_timer(self._tick, _TICK_S, thread=NODE_THREAD)

    def worker_came(self, serial: int, conn: ConnectionID) -> None:
        """Note that a process is linked. The node's thread."""
        self._conns[serial] = conn
        self._serials[conn] = serial

    def worker_gone(self, serial: int) -> None:
        """Note that a process has ended. Any thread."""
        self._gone.put(serial)

    async def _asked(self, message: RpcMessage) -> None:
        serial = self._serials.get(message.conn)
        if serial is not None:
            self.desk.asked(serial, json.loads(message.data[0]))

    def _tick(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                serial = self._gone.get_nowait()
                conn = self._conns.pop(serial, None)
                if conn is not None:
                    del self._serials[conn]
                self.desk.gone(serial)
        self.desk.tick()

    def _send(self, serial: int, values: Values) -> None:
        conn = self._conns.get(serial)
        if conn is not None:
            with contextlib.suppress(ClosedError):  # the supervisor ends
                self._node.send(conn, f"{WORKER}.names", json.dumps(values))
