"""What an edge may have at an origin: what its proof allows a player, and an edge's key for more.

An edge says its proof when it connects, in the words of an address: ``key=...``, or another that players bring. Of the
streams that a player with that proof may not play it is told nothing. Who has a key, or a web token, that is made for
edges (``edge``) may have the streams that it is for, and is one of us: while it is connected its address is neither
punished nor held to limits per address, though it plays many streams there. HTTP hooks and those of the application
are not asked: they are asked about viewers, at each node.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import structlog

from flowctl.errors import RemoteProtocolError
from flowctl.live.access.request import LiveRequest
from flowctl.live.access.rules import KEY_PARAMETERS
from flowctl.live.server import LiveServer
from flowctl.wire.rtmp.url import Query, RtmpUrl, parse_query

_log: Final = structlog.get_logger("flowctl.cluster")
_HINT: Final = "make a key: flowctl key make FILE --for edge; give it behind the origin: flowctl edge 'HOST?key=KEY'"


class EdgeGuard:
    """A `Guard` of diffusion for one edge; on the thread of the origin."""

    def __init__(
        self, server: LiveServer, peer: tuple[str, int], number: int, now: Callable[[], float] = time.time
    ) -> None:
        self._server = server
        self._peer = peer
        self._number = number
        self._now = now
        self._raw = ""
        self._query = Query()
        self._refused = False  # which was told
        self._trusted = False

    def prove(self, proof: bytes) -> None:
        try:
            self._raw = proof.decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError("the proof of an edge is no text", code="proof") from error
        self._query = parse_query(self._raw)
        keys, tried = self._server.config.access.keys, [self._query.get(name, "") for name in KEY_PARAMETERS]
        if any(tried):
            uses = set() if keys is None else keys.uses(tried)
            if not uses:
                raise RemoteProtocolError("the key of an edge is none that this server has", code="proof")
            if "edge" in uses:
                self._trust()

    def allows(self, topic: str) -> bool:
        app, _, stream = topic.rpartition("/")
        request = LiveRequest(
            kind="play",
            connection=self._number,
            peer=self._peer,
            url=RtmpUrl(app=app, stream=stream, raw_query=self._raw, query=self._query),
            protocol="segments",
        )
        gate = self._server.hub.gate
        access = gate.access(request)
        if access.is_edge(request):
            self._trust()
            return access.check_network(request) is None
        refusal = gate.check(request)
        if refusal is not None and not self._refused:
            self._refused = True
            _log.warning("edge may not have a stream", peer=self._peer[0], stream=topic, why=str(refusal), hint=_HINT)
        return refusal is None

    def _trust(self) -> None:
        if not self._trusted:
            self._trusted = True
            self._server.nodes.enter(self._peer[0])

    def left(self) -> None:
        if self._trusted:
            self._server.nodes.leave(self._peer[0])
