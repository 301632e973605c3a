"""WebSockets that an ASGI application lets in, and flowctl serves: FastAPI or Starlette under uvicorn.

The application does what it is good at: routing, cookies, dependencies, authentication. Then it hands the socket over,
and poll groups, Senders, limits and topics serve it from then on:

    bridge = Bridge(policy=DropDroppable())
    app = FastAPI(lifespan=bridge.lifespan)

    @app.websocket("/prices")
    async def prices_socket(websocket: WebSocket, user: User = Depends(current_user)):
        await bridge.hand_over(websocket, Browser(user))

    uvicorn.run(app, ws="flowctl.asgi:WebSocketProtocol")

Theory of operation. uvicorn makes a `WebSocketProtocol` for each upgrade; it is uvicorn's own, and WebSockets that are
not handed over are served as ever. It keeps the request's head. `Bridge.hand_over` leaves an order with it and accepts
through the application's own `send`, so that middleware sees the accept and may add headers. Instead of answering, the
protocol then duplicates the descriptor, gives the duplicate to the bridge's server with the request's head as its first
input, and closes uvicorn's descriptor, which ends nothing while the other is open. The session reads the request as if
it had come by its own listener: there is one handshake, one negotiation of compression, one place for checks.

`hand_over` returns then; it does not wait for the end of the connection. uvicorn ends the lifespan, and with it the
bridge, only when all tasks of requests have ended, so a task that waited for a connection would hold the end up for
good, and with it everything that its request depends upon, such as a database session. What a session needs for as long
as it lives, it is given when it is made, and gives back in `closed`.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from flowctl.connection import Connection, Session
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import DropPolicy
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.loop.work import WorkLimits
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.admission import BANNED, AdmissionLimits
from flowctl.core.server.server import RefusalHook, Server
from flowctl.core.text.extras import missing_extra
from flowctl.core.text.printable import printable
from flowctl.errors import ClosedError, ConfigError, LimitExceededError, LocalProtocolError
from flowctl.websocket import WebSocketSession
from flowctl.wire.websocket.handshake import Headers, switching_head

try:
    from uvicorn.protocols.utils import ClientDisconnected, get_client_addr, get_path_with_query_string
    from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
except ModuleNotFoundError as error:
    raise missing_extra(error, "flowctl.asgi", "asgi") or error from error

if TYPE_CHECKING:  # not needed to run
    from starlette.websockets import WebSocket

__all__ = ["Bridge", "WebSocketProtocol"]

_EXTENSION: Final = "flowctl"
"""Name of the extension in the scope of a WebSocket."""
_ADDRESS_CHARS: Final = 64
"""Most characters of a client's address: IPv6 with a zone has up to 61. One that uvicorn took from ``X-Forwarded-For``
is whatever the proxy lets through, and goes into logs and the accounts of addresses."""
_OF_HANDSHAKE: Final = re.compile(rb"(?i:connection|upgrade|content-length|transfer-encoding|sec-websocket-.*)")
"""Headers of the answer that only the handshake itself sets."""


class _Order(NamedTuple):
    """A hand-over that was asked for."""

    server: Server
    session: WebSocketSession
    peer: tuple[str, int] | None


class WebSocketProtocol(WSProtocol):
    """uvicorn's protocol of a WebSocket, and how it is handed over; for uvicorn's setting ``ws``."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._head = b""  # of the request, as uvicorn's HTTP side passes it on: whole, and first
        self._early = b""  # what the client sent behind it, without waiting for the answer
        self._order: _Order | None = None
        self._answered = False  # by the application, or for it
        self._handed_over = self._gone = False
        self.connection: Connection | None = None  # what it was handed over to

    def data_received(self, data: bytes) -> None:
        if not self._head:
            self._head = data
        elif not self.handshake_complete:
            # A client has to wait for the answer (RFC 6455 section 4.1). What comes all the same is for what answers.
            self._early += data
            self.transport.pause_reading()
            return
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        super().connection_lost(exc)
        self.writable.set()  # uvicorn 0.36 leaves who waits for it waiting for good

    def shutdown(self) -> None:
        if not (self._handed_over or self._gone):  # else the transport is about to tell that it has closed
            super().shutdown()

    async def run_asgi(self) -> None:
        self.scope["extensions"][_EXTENSION] = {"protocol": self}
        await super().run_asgi()

    async def receive(self) -> Any:
        self._check_ours()
        return await super().receive()

    async def send(self, message: Any) -> None:
        self._check_ours()
        if self._order is not None and message["type"] == "websocket.accept":
            await self._hand_over(self._order, message)
            return
        self._answered = True
        await super().send(message)
        if self._early and message["type"] == "websocket.accept":
            early, self._early = self._early, b""
            self.transport.resume_reading()
            super().data_received(early)

    def order_hand_over(self, order: _Order) -> bool:
        """Have the next ``websocket.accept`` hand the socket over; return whether there is a client to hand over."""
        if self._order is not None or self._handed_over:
            raise LocalProtocolError("this WebSocket was handed over before", hint="call hand_over once for each")
        if self._answered:
            raise LocalProtocolError(
                "this WebSocket was accepted, or refused, by the application",
                hint="call hand_over instead of websocket.accept(): it accepts",
            )
        if self.scheme == "wss":
            raise ConfigError(
                "this WebSocket speaks TLS with uvicorn, whose keys cannot be handed over",
                hint="end TLS in front of uvicorn (nginx, a load balancer), or serve it with flowctl.Server(tls=...)",
            )
        if self._note_gone(gone=self._gone or self.transport.is_closing()):
            return False
        self._order = order
        return True

    def forget_order(self) -> None:
        """Hand nothing over with the next ``websocket.accept``: the call that was to has ended."""
        self._order = None

    def _note_gone(self, *, gone: bool) -> bool:
        """Where the client has gone, see to it that its request is no fault of the application's; return `gone`."""
        if gone:
            self._gone = self.handshake_complete = True  # uvicorn misses no answer then
            self._log("gone before it was handed over")
        return gone

    def _log(self, what: str) -> None:
        client, path = get_client_addr(self.scope), get_path_with_query_string(self.scope)
        self.logger.info('%s - "WebSocket %s" [%s]', client, path, what)

    def _check_ours(self) -> None:
        if self._handed_over:
            raise LocalProtocolError(
                "this WebSocket was handed over: the application can neither send nor receive",
                hint="send with the session's send_message, receive in its received_message",
            )

    async def _hand_over(self, order: _Order, message: Any) -> None:
        self._order = None
        session = order.session
        headers = [*self.default_headers, *session.accept_headers, *message.get("headers", ())]
        switching_head(b"", headers)  # raises if there is a line break in one
        if wrong := [name for name, _ in headers if _OF_HANDSHAKE.fullmatch(name)]:
            raise LocalProtocolError(f"{wrong[0]!r} is a header of the handshake itself", hint="leave it out")
        # The transport may hold the rest of a response, if the client pipelined its upgrade behind another request.
        if not self.transport.is_closing():  # uvloop's takes nothing after that
            self.transport.set_write_buffer_limits(0)
            await self.writable.wait()
        if self._note_gone(gone=self.transport.is_closing() or bool(self.transport.get_write_buffer_size())):
            return
        session.subprotocol, session.accept_headers = message.get("subprotocol") or session.subprotocol, headers
        self.transport.pause_reading()  # what comes from now on is read by the poll group
        try:
            sock = socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))
            self.connection = order.server.add_socket(
                sock, session, peer=order.peer, first_input=self._head + self._early, admit=True
            )
        except (LimitExceededError, ClosedError, OSError) as error:  # the last: no descriptor left, or the client gone
            await self._refuse(error)
            return
        self._handed_over = self.handshake_complete = True
        self._log("handed over")
        self.transport.close()

    async def _refuse(self, error: Exception) -> None:
        """Answer for the server that did not let the connection in."""
        limit = error.limit if isinstance(error, LimitExceededError) else "connections"
        status = {BANNED: 403, "connections": 503}.get(limit, 429)
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        self._answered = True
        with suppress(ClientDisconnected):
            await super().send({"type": "websocket.http.response.start", "status": status, "headers": headers})
            await super().send({"type": "websocket.http.response.body", "body": b"Try again later.\n"})


class Bridge:
    """Serves WebSockets that an ASGI application hands over, on poll groups of its own.

    It runs while the application does: between start and end of its lifespan. Each process of ``uvicorn --workers`` has
    its own.

    Args:
        limits: this, and what stands before `stop_s`, as of `Server`.
        policy: of every Sender.
        settings: of every Sender.
        options: set on every socket.
        admission: limits on new connections, by ``scope["client"]``, which uvicorn takes from proxies that it trusts.
        group_count: number of poll groups, that is of threads.
        on_error: told of every exception of a handler.
        on_refused: told of every connection that was refused; on the application's thread.
        work_limits: how much of its thread a client may take.
        stop_s: time that connections are given at the end, see `Server.stop`.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        policy: DropPolicy | None = None,
        settings: SenderSettings | None = None,
        options: SocketOptions | None = None,
        admission: AdmissionLimits | None = None,
        group_count: int = 1,
        on_error: Callable[[str, Exception], None] | None = None,
        on_refused: RefusalHook | None = None,
        work_limits: WorkLimits | None = None,
        stop_s: float = 5.0,
    ) -> None:
        # A server runs once; an application's lifespan begins again with each of its tests.
        self._make_server: Final = partial(
            Server,
            Session,
            None,
            limits=limits,
            policy=policy,
            settings=settings,
            options=options,
            admission=admission,
            group_count=group_count,
            on_error=on_error,
            on_refused=on_refused,
            work_limits=work_limits,
        )
        self._stop_s: Final = stop_s
        self._server: Server | None = None

    @property
    def server(self) -> Server:
        """The server, for statistics, bans and limits; while the application runs.

        Raises:
            LocalProtocolError: the bridge was not started, or has ended.
        """
        if self._server is None:
            raise LocalProtocolError(
                "the bridge is not running",
                hint="FastAPI(lifespan=bridge.lifespan), or 'async with bridge:' in the application's own lifespan; "
                "that of a mounted application is not called",
            )
        return self._server

    async def __aenter__(self) -> Self:
        if self._server is not None:
            raise LocalProtocolError("the bridge is running already", hint="make one for each application")
        server = self._make_server()
        await asyncio.to_thread(server.start)
        self._server = server
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        server, self._server = self.server, None
        await asyncio.to_thread(server.stop, self._stop_s)

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Run while `app` does; for ``FastAPI(lifespan=...)`` and ``Starlette(lifespan=...)``."""
        async with self:
            yield

    async def hand_over(
        self,
        websocket: WebSocket,
        session: WebSocketSession,
        *,
        subprotocol: str | None = None,
        headers: Headers = (),
    ) -> Connection | None:
        """Accept a WebSocket and have `session` serve it from now on; return at once.

        Args:
            websocket: not accepted yet. Starlette's and FastAPI's; elsewhere, Starlette's
                ``WebSocket(scope, receive, send)`` makes one.
            session: a new one.
            subprotocol: one of those that the client offers. None: what the session itself chooses.
            headers: sent with the answer, such as a cookie.

        Returns:
            The connection. None: admission refused it, or the server is ending, and the client was told so with status
            429, 503 or 403; or the client has left meanwhile, which is no error. `session` is not opened then, nor is
            its `closed` called.

        Raises:
            ConfigError: uvicorn was not told to use `WebSocketProtocol`, the application runs under another server, or
                the connection speaks TLS.
            LocalProtocolError: the bridge is not running, the WebSocket was accepted or handed over already, it is
                none, or an argument is wrong.
        """
        scope, server = websocket.scope, self.server
        if scope["type"] != "websocket":
            raise LocalProtocolError(
                f"hand_over was called for a connection of type {scope['type']!r}", hint="call it in a websocket route"
            )
        protocol: WebSocketProtocol | None = scope.get("extensions", {}).get(_EXTENSION, {}).get("protocol")
        if protocol is None:
            raise ConfigError(
                "this WebSocket does not come by flowctl.asgi.WebSocketProtocol",
                hint="run uvicorn with --ws flowctl.asgi:WebSocketProtocol; other servers and TestClient cannot hand "
                "a socket over",
            )
        if not hasattr(session, "subprotocol") or hasattr(session, "connection"):
            raise LocalProtocolError(
                f"session is {session!r}, it must be a new WebSocketSession",
                hint="make one for each WebSocket",
            )
        if subprotocol is not None and subprotocol not in scope["subprotocols"]:
            raise LocalProtocolError(
                f"subprotocol is {subprotocol!r}, the client offers {scope['subprotocols']}", hint="choose one of those"
            )
        client = scope.get("client")
        peer = None if client is None else (printable(client[0][:_ADDRESS_CHARS]), client[1])
        if not protocol.order_hand_over(_Order(server, session, peer)):
            return None
        try:
            await websocket.accept(subprotocol, headers)
        finally:
            protocol.forget_order()  # it is cancelled, or a middleware has raised
        return protocol.connection
