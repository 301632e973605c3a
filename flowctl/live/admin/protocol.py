"""Uvicorn as the admin surface runs it, with limits on connections, on what is read ahead, and on its share of a core.

A stranger needs no token to connect, so what one may hold is bounded here. Those who have shown no token have few
places, of which the oldest is given up for the next connection: whatever they hold, an operator's connection is taken,
and keeps its place once it has shown its token. Of each connection one request is read and answered at a time; what
comes behind it stays in the kernel, but for one read. And the loop rests in proportion to its work, because the threads
of the media share the interpreter's lock with it.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import Counter
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowctl.control.operations import Permission
from flowctl.core.text.addresses import address_key
from flowctl.live.admin.guard import HEAD_BYTES

MOST_CONNECTIONS: Final = 128
"""Connections open at a time, listeners to events included: people, scrapers and their retries."""
MOST_STRANGERS: Final = MOST_CONNECTIONS // 2
"""Of these, connections that have shown no token; one more closes the oldest of them."""
MOST_PER_ADDRESS: Final = 8
"""Connections of one address without a token: a browser opens 6 for a page."""
HEAD_S: Final = 10.0
"""Time that a peer may take for the head of its first request; uvicorn itself waits for ever."""
SEND_S: Final = 20.0
"""Time in which a peer must take `SENT_BYTES` of its answer, or what is left of it, even when it is being closed."""
SENT_BYTES: Final = 16 * 1024
KEEP_ALIVE_S: Final = 10
BACKLOG: Final = 64
"""Connections that wait to be accepted, and that one turn of the loop accepts."""
GRACE_S: Final = 1
_WORK_S: Final = 0.001
_REST_PER_WORK: Final = 3.0
"""Rest of the loop after a millisecond of work or more, as a multiple of that work: a quarter of a core is some 250
requests a second, which no operator needs, and a flood gets no more."""
_MOST_REST_S: Final = 0.1


class _Reading(FlowControl):
    """Flow control that reads no further while a request waits behind the one that is being answered.

    Uvicorn does for each request whose application asks whether its peer is there still: a thousand requests of one
    read would have a thousand more reads kept.
    """

    def __init__(self, transport: asyncio.Transport, conn: h11.Connection) -> None:
        super().__init__(transport)
        self._conn: Final = conn

    def resume_reading(self) -> None:
        if not (self._conn.their_state is h11.DONE and self._conn.trailing_data[0]):
            super().resume_reading()


class _Timed(H11Protocol):
    """HTTP/1.1 of uvicorn in bounds of memory and time; one connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        transport.max_size = HEAD_BYTES  # type: ignore[attr-defined]  # of a read; asyncio's own are 256 KiB
        transport.set_write_buffer_limits(0)  # told of all that the kernel does not take, and of its end
        self.flow = _Reading(transport, self.conn)
        self.place = address_key(self.client[0]) if self.client else ""
        self.since = self.loop.time()
        self.gone = False
        self._unsent = 0
        self._stall: asyncio.TimerHandle | None = None
        self._head: asyncio.TimerHandle | None = None
        self._arm_head()
        self._make_room()

    @property
    def caller(self) -> str:
        """The caller whose token was shown on this connection, as `Guard` names it; empty: a stranger."""
        cycle: Any = self.cycle  # None at first, whatever its type says
        state = {} if cycle is None else cycle.scope["state"]
        return str(state["caller"]) if state.get("permission", Permission.NONE) > Permission.NONE else ""

    @property
    def holder(self) -> str:
        """The owner of the connection: its caller, or the address of a stranger."""
        return self.caller or self.place

    def _make_room(self) -> None:
        """Close a connection of the holder of most if there are too many: one that sent a request, or the oldest."""
        there = [item for item in self.connections if isinstance(item, _Timed) and not item.gone]
        strangers = [item for item in there if not item.caller]
        neighbours = [item for item in strangers if item.place == self.place]
        if len(neighbours) > MOST_PER_ADDRESS:
            there = neighbours
        elif len(strangers) > MOST_STRANGERS:
            there = strangers
        elif len(there) <= MOST_CONNECTIONS:
            return
        held = Counter(item.holder for item in there)
        min(there, key=lambda item: (-held[item.holder], item.cycle is None, item.since)).cut()

    def cut(self) -> None:
        """Close at once, without waiting for unsent bytes."""
        self.gone = True
        self.transport.abort()

    def _arm_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_S, self._late)

    def _late(self) -> None:
        self._head = None
        if self._idle():
            self.cut()

    def _idle(self) -> bool:
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

    def on_response_complete(self) -> None:
        """Go on to the next request, and read when there is none."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        """Begin to check whether the peer still takes the answer."""
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(SEND_S, self._look_stalled)

    def _look_stalled(self) -> None:
        left = self.transport.get_write_buffer_size()
        if left > self._unsent - SENT_BYTES:
            self.cut()
        else:
            self._unsent, self._stall = left, self.loop.call_later(SEND_S, self._look_stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._disarm_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm_head()
        self._disarm_stall()
        super().connection_lost(exc)

    def _disarm_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _disarm_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


class _Resting(selectors.DefaultSelector):
    """The selector of the loop; rests before it looks, as long as the thread has worked since."""

    _rested_at = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        worked_s = time.thread_time() - self._rested_at
        if worked_s >= _WORK_S:
            time.sleep(min(worked_s * _REST_PER_WORK, _MOST_REST_S))
            self._rested_at = time.thread_time()
        return super().select(timeout)


class _Config(uvicorn.Config):
    """With a loop that rests."""

    def get_loop_factory(self) -> Any:
        return lambda: asyncio.SelectorEventLoop(_Resting())


def make_server(app: Any) -> uvicorn.Server:
    config = _Config(
        app,
        http=_Timed,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # its warnings are what strangers send
        backlog=BACKLOG,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    return uvicorn.Server(config)
