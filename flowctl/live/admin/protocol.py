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
import ssl
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowctl.control.operations import Permission
from flowctl.core.text.addresses import address_key
from flowctl.live.admin.guard import HEAD_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

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
_MOST_ANSWERS_BYTES: Final = 64 * 1024
"""Most output that waits for a peer whose records hold no data: each may want an answer (new keys of TLS 1.3)."""
_PLAIN: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: 32\r\n\r\n"
    b"This port speaks TLS: https://.\n"
)
"""Answer to HTTP without TLS, as nginx has one: browsers try that first where no scheme is typed."""


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


class _TlsTransport(asyncio.Transport):
    """Writes through TLS to the transport of a socket."""

    def __init__(self, socket_transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        super().__init__()
        self.under: Final = socket_transport
        self.came: Final = ssl.MemoryBIO()  # encrypted, from the peer
        self._goes: Final = ssl.MemoryBIO()  # encrypted, for the peer; empty between two calls
        self.tls: Final = context.wrap_bio(self.came, self._goes, server_side=True)
        self.established = False
        for name in (
            *("abort", "is_closing", "is_reading", "pause_reading", "resume_reading"),
            *("set_write_buffer_limits", "get_write_buffer_size"),
        ):
            setattr(self, name, getattr(socket_transport, name))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.tls.context if name == "sslcontext" else self.under.get_extra_info(name, default)

    def write(self, data: Buffer) -> None:
        left = memoryview(data)
        try:
            while left and not self.under.is_closing():
                left = left[self.tls.write(left) :]
        except ssl.SSLError:
            self.under.abort()
        self.flush()

    def flush(self) -> None:
        if encrypted := self._goes.read():
            self.under.write(encrypted)

    def close(self) -> None:
        """Say the end to the peer's TLS, and close when all has gone."""
        if self.established and not self.under.is_closing():
            with suppress(ssl.SSLError):  # what the peer says to that is not waited for
                self.tls.unwrap()
            self.flush()
        self.under.close()


class _Secured(asyncio.Protocol):
    """TLS below a connection, which is there, and counted, from before the handshake."""

    def __init__(self, timed: _Timed, context: ssl.SSLContext) -> None:
        self._timed: Final = timed
        self._context: Final = context
        self._transport: _TlsTransport  # set when the connection is made
        self._looked = False  # at the first octet

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with the handshake, in the time that the head of the first request has."""
        transport.max_size = HEAD_BYTES  # type: ignore[attr-defined]  # of a read, as above
        self._transport = _TlsTransport(transport, self._context)  # type: ignore[arg-type]  # it is that of a socket
        self._timed.connection_made(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timed.connection_lost(exc)

    def pause_writing(self) -> None:
        self._timed.pause_writing()

    def resume_writing(self) -> None:
        self._timed.resume_writing()

    def data_received(self, data: bytes) -> None:
        """Pass on what was encrypted, all of it at once: it is no more than a read of the kernel's."""
        transport, plain = self._transport, bytearray()
        if not self._looked and data[:1].isalpha():
            transport.under.write(_PLAIN)
            transport.under.close()
            return
        self._looked = True
        transport.came.write(data)
        try:
            if not transport.established:
                transport.tls.do_handshake()
                transport.established = True
            while part := transport.tls.read(HEAD_BYTES):
                plain += part
            transport.close()  # the peer has ended its stream
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            transport.flush()  # an alert says why
            transport.under.close()
        transport.flush()
        if plain:
            self._timed.data_received(bytes(plain))
        elif transport.get_write_buffer_size() > _MOST_ANSWERS_BYTES:
            transport.abort()


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


def make_server(app: Any, tls_context: Callable[[], ssl.SSLContext] | None = None) -> uvicorn.Server:
    """Return the server of an application; `tls_context` is asked for each connection. None: there is no TLS."""

    def protocol(**given: Any) -> asyncio.Protocol:
        timed = _Timed(**given)
        return timed if tls_context is None else _Secured(timed, tls_context())

    config = _Config(
        app,
        http=protocol,  # type: ignore[arg-type]  # it is called as the class would be
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
