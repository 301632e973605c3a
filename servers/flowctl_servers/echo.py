"""Line broadcast: whatever line a peer sends goes to all peers. The smallest useful server on flowctl.

A peer that does not read fast enough is refused lines from its soft limit on, and disconnected when what it was sent
before has become older than its hard limit (or is stuck for too long); nobody else notices.
"""

from __future__ import annotations

from flowctl.connection import Session
from flowctl.core.flow.policy import DropDroppable
from flowctl.core.flow.state import SendState
from flowctl.core.server.program import ServeOptions, ServerProgram
from flowctl.core.server.server import Server
from flowctl.errors import LimitExceededError

LINE_BYTES = 8 * 1024
"""Longest line taken."""


class Room:
    """The peers that hear each other. Peers may live on several threads: iterate over a copy."""

    def __init__(self) -> None:
        self.peers: set[Peer] = set()

    def enter(self) -> Peer:
        """Return the session of a new peer."""
        return Peer(self)

    def broadcast(self, line: bytes) -> None:
        """Send `line` to everybody in the room."""
        for peer in list(self.peers):
            peer.send(line)


class Peer(Session):
    """One peer of the room."""

    __slots__ = ("room",)

    def __init__(self, room: Room) -> None:
        self.room = room

    def opened(self) -> None:
        """Let the peer hear the others."""
        self.room.peers.add(self)

    def received(self, data: memoryview) -> int:
        """Broadcast the whole lines in `data`; return their length, so that the rest is offered again with more."""
        lines = bytes(data)
        end = lines.rfind(b"\n") + 1
        if not end and len(lines) > LINE_BYTES:
            raise LimitExceededError("line_bytes", len(lines), LINE_BYTES)
        if end:
            self.room.broadcast(lines[:end])
        return end

    def closed(self, reason: object, details: str) -> None:
        """Take the peer out of the room."""
        self.room.peers.discard(self)


def build(options: ServeOptions) -> Server:
    """Return an echo server; its peers share one room."""
    return Server(
        Room().enter,
        options.host,
        options.port,
        limits=options.limits,
        policy=DropDroppable(refuse_from=SendState.SOFT_LIMIT, thin_from=SendState.HARD_LIMIT),
        settings=options.settings,
        options=options.socket_options,
        admission=options.admission,
        trusted_proxies=options.trusted_proxies,
        group_count=options.group_count,
        loop_factory=options.loop_factory,
        on_error=options.on_error,
        listen_fd=options.listen_fd,
    )


SERVER = ServerProgram(
    name="echo",
    summary="Line broadcast: each line goes to all peers, slow ones are refused and then cut.",
    default_port=7000,
    build=build,
    has_streams=False,
)
