"""Uvicorn as the admin surface runs it: its limits, no log of requests, and an end for heads that never come whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowctl.addresses import address_key
from flowctl.admin.guard import HEAD_BYTES

MOST_CONNECTIONS: Final = 128
"""Open at a time, with those that listen to events: people, scrapers and their retries; more are closed at once."""
MOST_PER_ADDRESS: Final = MOST_CONNECTIONS // 2
"""Of one address: a stranger, who needs no token to connect, must not keep out who operates the server."""
HEAD_S: Final = 10.0
"""How long a peer may take for the head of its first request; uvicorn itself waits for ever."""
KEEP_ALIVE_S: Final = 10
GRACE_S: Final = 1


class _Timed(H11Protocol):
    """HTTP/1.1 of uvicorn; a connection without a whole head in time is closed, and one too many is at once."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._head: asyncio.TimerHandle | None = None
        self._arm_head()
        own = address_key(self.client[0]) if self.client else ""
        same = sum(item.client is not None and address_key(item.client[0]) == own for item in self._others())
        if len(self.connections) > MOST_CONNECTIONS or same > MOST_PER_ADDRESS:
            transport.abort()

    def _others(self) -> Iterator[_Timed]:
        """Yield the open connections, this one too."""
        return (item for item in self.connections if isinstance(item, _Timed))

    def _arm_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_S, self._late)

    def _late(self) -> None:
        self._head = None
        if self._idle():
            self.transport.abort()

    def _idle(self) -> bool:
        """Return whether no request is being answered."""
        cycle: Any = self.cycle  # None at first, whatever its type says
        return cycle is None or bool(cycle.response_complete)

    def data_received(self, data: bytes) -> None:
        """Take input; between two requests a new head has its time too."""
        before = self.cycle
        if self._idle():
            self._arm_head()
        super().data_received(data)
        if self.cycle is not before:
            self._disarm_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._disarm_head()
        super().connection_lost(exc)

    def _disarm_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


def make_server(app: Any) -> uvicorn.Server:
    """Return uvicorn for an ASGI application; `uvicorn.Server.run` serves on the calling thread."""
    config = uvicorn.Config(
        app,
        http=_Timed,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    return uvicorn.Server(config)
