"""WebSocket: sessions of browsers and other clients, and topics that any number of them follow.

Theory of operation. A server's frames are not masked (RFC 6455 section 5.1), so a message is the same octets for every
client: a `Topic` frames it once, appends it to a stream log, and the clients that keep up are a cohort, one system call
each and flush. Where clients have agreed to permessage-deflate, a twin of the log has the same messages deflated, once
each, and those from before when the first of them is sent them: no window is kept between messages, neither here nor
for what clients send, so a deflated message is the same octets for every client, and an idle client costs no window.

A `WebSocketSession` begins as HTTP: the head of a request is read, judged and answered; behind that there are frames.
What the application sends, and the topic that a client follows, are queued and limited by its Sender as everything is.
Frames are never cut: a message is one frame, and one Sender message. So a ping, a pong or the close frame is never in
the middle of another; at the end the message in flight is finished before the close frame (`Session.last_words`).

The close handshake is short: behind our close frame our end of the stream follows at once, and the client's answer is
read and thrown away while the socket lingers (`flowctl.core.loop.lingering`): nothing that a client says there counts.
"""

from __future__ import annotations

import enum
import inspect
import itertools
import time
from collections.abc import Awaitable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from threading import get_ident
from typing import Any, ClassVar, Final, NamedTuple, Self, cast
from urllib.parse import parse_qsl, unquote

import h11
from wsproto.events import Ping

from flowctl.connection import Connection, Session
from flowctl.core.fanout.following import Fanouts, FollowPlace
from flowctl.core.fanout.pacing import DEFAULT_FLUSH_INTERVAL_S, MOST_FLUSH_INTERVAL_S
from flowctl.core.flow.state import MessageClass
from flowctl.core.loop.locks import HANDLERS, OwnedLock
from flowctl.core.outgoing.streamlog import MAX_VALUE_BYTES, StreamLog
from flowctl.core.sending.contract import SendResult
from flowctl.core.text.addresses import is_among, is_own_origin, is_rebound
from flowctl.core.text.fieldtypes import check_arguments
from flowctl.core.text.printable import printable
from flowctl.errors import ConfigError, LocalProtocolError, ReentryError, RemoteProtocolError
from flowctl.reasons import CloseReason
from flowctl.receiver import DONE, InputResult, InputVerdict
from flowctl.wire.websocket.frames import (
    PING,
    PONG,
    Octets,
    close_frame,
    deflated_frame,
    frame,
    may_be_sent,
    message_frame,
)
from flowctl.wire.websocket.handshake import (
    REFUSALS,
    VERSION,
    Headers,
    HeadReader,
    accept_key,
    agrees_to_deflate,
    check_request,
    header,
    phrase,
    switching_head,
    tokens,
    wants_websocket,
    whole_answer,
)
from flowctl.wire.websocket.reading import FrameReader, PeerClose

_HEAD_BYTES: Final = 16 * 1024
"""Request line and headers together (h11 and uvicorn: 64 KiB, nginx: 4 x 8 KiB); more is answered with 431."""
_PIECE_BYTES: Final = 4096
"""Octets that are parsed before another look at the clock."""
_AGENT_CHARS: Final = 256
_GATHER_S: Final = 0.002
"""Time that the first message of a burst waits for the others, so that all are one write for each client: one that is
published by another thread comes message by message."""
_SERVED: Final = (("Allow", "GET"), ("Sec-WebSocket-Version", VERSION))
_TEXT: Final = (b"Content-Type", b"text/plain; charset=utf-8")

_ENDS: Final = {
    CloseReason.HARD_LIMIT: (1013, "too slow: more waits for you than the limit"),
    CloseReason.STUCK: (1013, "too slow: nothing was taken for too long"),
    CloseReason.SOFT_TOO_LONG: (1013, "too slow: behind for too long"),
    CloseReason.MEMORY_BUDGET: (1013, "too slow: the server needs the memory"),
    CloseReason.PROTOCOL_ERROR: (1002, "protocol error"),
    CloseReason.LIMIT_HIT: (1008, "a limit was passed"),
    CloseReason.IDLE: (1011, "no answer to a ping"),
    CloseReason.AUTH_REFUSED: (1008, "not allowed"),
    CloseReason.KICKED: (1008, "ended by the server"),
    CloseReason.SHUTDOWN: (1001, "the server stops"),
    CloseReason.FINISHED: (1000, ""),
    CloseReason.INTERNAL: (1011, "internal error"),
}
"""Code and words of the close frame (RFC 6455 section 7.4.1, and 1013 of its registry). Fixed words: details of an end
may hold addresses and secrets. A banned address is told nothing, nor is a peer that has gone."""
_SILENT: Final = frozenset({CloseReason.BANNED, CloseReason.PEER_RESET})
_REFUSALS: Final = {
    CloseReason.HANDSHAKE_TIMEOUT: HTTPStatus.REQUEST_TIMEOUT,
    CloseReason.AUTH_REFUSED: HTTPStatus.FORBIDDEN,
    CloseReason.KICKED: HTTPStatus.FORBIDDEN,
    CloseReason.SHUTDOWN: HTTPStatus.SERVICE_UNAVAILABLE,
    CloseReason.FINISHED: HTTPStatus.SERVICE_UNAVAILABLE,
    CloseReason.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""The same of what ends before its handshake is answered, as statuses of HTTP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WebSocketRequest:
    """A request that a WebSocket session was asked with: a handshake, or a plain GET.

    Args:
        path: as in the URL, decoded, without the query.
        query: parameters of the query, decoded; of one that is there twice the last.
        headers: names in small letters, and values, in their order.
        peer: address and port of the client, or of what a trusted proxy speaks for.
        secure: whether it came over TLS.
        websocket: whether it asks for WebSocket. A plain GET can be answered with a page; accepted, it gets 426.
    """

    path: str
    query: dict[str, str]
    headers: tuple[tuple[bytes, bytes], ...]
    peer: tuple[str, int]
    secure: bool
    websocket: bool

    def header(self, name: str) -> str:
        """Return the value of a header, several with commas between; empty: it is not there."""
        return header(self.headers, name.lower().encode())

    @property
    def origin(self) -> str:
        """The origin of the page that asks, such as ``https://example.com``; empty: it is no browser's page."""
        return self.header("origin")

    @property
    def subprotocols(self) -> list[str]:
        """The subprotocols that the client offers, the preferred one first."""
        return tokens(self.headers, b"sec-websocket-protocol")


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer of HTTP to a request, instead of a WebSocket.

    Args:
        status: 200 to 599.
        body: text, or octets, for which `headers` should have a ``Content-Type``.
        headers: names and values, as text.
    """

    status: int
    body: str | bytes = ""
    headers: Sequence[tuple[str, str]] = ()

    def wire(self) -> bytes:
        """Return the answer as it goes to the socket.

        Raises:
            LocalProtocolError: the status is none that ends a request, or a header has a line break in it.
        """
        if not HTTPStatus.OK <= self.status <= 599:
            raise LocalProtocolError(f"the status of an HttpAnswer is {self.status}, it must be 200 to 599")
        body = self.body.encode() if isinstance(self.body, str) else self.body
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers]
        if not any(name.lower() == b"content-type" for name, _ in headers):
            headers.append(_TEXT)
        return whole_answer(self.status, body, headers)


class _Phase(enum.Enum):
    """Phases of a session."""

    HEAD = "head"  #: the request is read
    DECIDING = "deciding"  #: a coroutine of the application decides
    OPEN = "open"  #: the handshake is done
    OVER = "over"  #: nothing that comes counts any more


class _Pinged(NamedTuple):
    """A ping, or the last look at a client that has not answered it."""

    at: float
    taken_bytes: int  # that the client's kernel had acknowledged by then


class WebSocketSession(Session):
    """One client over WebSocket. Derive from it, override what is needed, and hand the class to `flowctl.serve`.

    Its methods run as those of `Session` do; each but `send_message` and `close_with` belongs to the connection's
    thread. All of them may be overridden, none has to be called by what overrides it: handshake, pings, limits and
    close go on by themselves. Of those of `Session`, `received`, `received_control`, `input_resumed` and `last_words`
    are not called: octets are the protocol's. `opened` comes before the request, `timer` is for what you ask
    `Connection.set_timer` for. What goes on beside, such as a word every minute, is a coroutine for
    `Connection.run_coroutine`.

    What a handler raises ends the connection with reason INTERNAL, which tells the client 1011. A client that is ended
    at a limit is told why by the code and the words of its close frame, if it takes them in the time in which a socket
    lingers, see `Session.last_words`: 5 s for one that takes nothing. Only then is it reset.

    Attributes:
        origins: origins of pages that may connect, such as ``{"https://example.com"}``; ``{"*"}``: all. None (default):
            those whose host and port are what the request says in ``Host``; where the server listens for this machine
            alone, no Host with its own port and a name that anybody may have, as DNS rebinding makes them. Requests
            without an origin, of programs that are no browser, are always let in. Browsers send cookies along with a
            handshake whatever page asks for it, and ask for no permission first: a server that goes by cookies and
            lets in any page lets that page act as its user (cross-site WebSocket hijacking).
        subprotocols: names this server speaks, the preferred one first.
        max_message_bytes: longest message of a client, inflated; a longer one ends the connection with 1009.
        ping_interval_s: silence of a client, in seconds, after which it is pinged. 0: never.
        ping_timeout_s: time for an answer to a ping; then the connection ends with reason IDLE. A client that is busy
            taking what it is sent, or whose input waits for a handler, has as long again. 0: for ever.
        handshake_s: time in seconds from accept to the answer, the application's decision included: then 408, or 503
            if it is that which takes so long.
        compress: whether permessage-deflate is agreed to where the client offers it. Messages below 256 bytes, and
            those that do not become smaller, go as they are.
        subprotocol: what was agreed on. None: none. Set in `requested`, it replaces the choice from `subprotocols`.
        accept_headers: further headers of the answer that accepts, such as ``Set-Cookie``; set in `requested`.
    """

    __slots__ = ("__protocol__", "accept_headers", "subprotocol", "user_agent")

    __protocol__: _Protocol
    __refusals__: ClassVar[tuple[bytes, bytes]] = REFUSALS
    subprotocol: str | None
    accept_headers: Headers
    origins: ClassVar[Collection[str] | None] = None
    subprotocols: ClassVar[Sequence[str]] = ()
    max_message_bytes: ClassVar[int] = 1024 * 1024
    ping_interval_s: ClassVar[float] = 20.0
    ping_timeout_s: ClassVar[float] = 20.0
    handshake_s: ClassVar[float] = 10.0
    compress: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        for name in ("origins", "subprotocols"):
            if isinstance(getattr(cls, name), str):
                raise ConfigError(f"{name} of {cls.__name__} is a str, it must be several", hint="put it into ( ,)")

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Make a session that speaks, whatever the constructor of a subclass does."""
        del args, kwargs
        self = super().__new__(cls)
        self.__protocol__ = _Protocol()
        self.subprotocol, self.accept_headers, self.user_agent = None, (), ""
        return self

    # -- for the application to override

    def requested(self, request: WebSocketRequest) -> Awaitable[HttpAnswer | int | None] | HttpAnswer | int | None:
        """Decide about a request; may be a coroutine function. The default accepts.

        It is where a client is authenticated: by a cookie, by a parameter of the query, or, where it is no browser,
        which cannot set one, by the header ``Authorization``. Nothing of the request is kept, so keep what you need.

        Args:
            request: a handshake that is valid and of an origin that may connect, or a plain GET, of a load balancer or
                of a browser that wants the page.

        Returns:
            None to accept. A status, such as 404 or 401, or an `HttpAnswer`, which is sent instead.
        """
        del request
        return None

    def accepted(self) -> Awaitable[None] | None:
        """The handshake is done: the client can be sent to; may be a coroutine function."""

    def received_message(self, message: str | bytes) -> Awaitable[None] | None:
        """Take a message of the client, whole; may be a coroutine function.

        While the coroutine runs, nothing more is read of the client: one that sends faster than it is served waits.

        Args:
            message: text as `str`, binary as `bytes`.
        """

    # -- for the application to call

    def send_message(self, message: str | Octets, *, droppable: bool | None = None) -> SendResult:
        """Send one message to this client. Any thread.

        Args:
            message: `str` goes as text, octets go as binary.
            droppable: whether the policy may drop it for a slow client. None: it may, as DATA.

        Returns:
            What became of it, and the state after it.

        Raises:
            LocalProtocolError: the handshake is not done yet, or the message is neither.
            ReentryError: see `Sender.send`.
        """
        if self.__protocol__.phase in _BEFORE_OPEN:
            raise LocalProtocolError("send_message() was called before the handshake", hint="call it from accepted()")
        wire = frame(*message_frame(message))
        if self.__protocol__.deflates:
            wire = deflated_frame(wire)
        return self.connection.sender.send(wire, MessageClass.DATA, droppable=droppable)

    def follow(self, topic: Topic) -> None:
        """Send this client the newest message of each key of `topic`, then all that is published. Connection's thread.

        What is sent to this client alone goes before what waits of the topic.

        Raises:
            LocalProtocolError: it follows a topic already, it is not open, or this is another thread.
        """
        if self.__protocol__.phase is not _Phase.OPEN or not self.connection.core.host.in_thread():
            raise LocalProtocolError(
                "follow() is for an open client, on its thread", hint="call it from accepted(), or by call_soon"
            )
        if self.connection.ended is None:  # else nothing would come after it that gives the place up
            _TopicPlace(self.connection, topic, deflated=self.__protocol__.deflates)

    def unfollow(self) -> None:
        """Stop following: what is queued of the topic is dropped. Harmless where none is. Connection's thread."""
        place = self.connection.place
        if place is not None:
            place.end()

    def close_with(self, code: int = 1000, reason: str = "", *, at_once: bool = False) -> None:
        """End the connection with a close frame. Any thread; the first end counts.

        Args:
            code: 1000 to 1014, but for 1004 to 1006, or 3000 to 4999; 4000 and up are the application's own.
            reason: for the client; cut to 123 bytes of UTF-8.
            at_once: drop what is queued. If not, it goes before the close frame, as `Session.close_after_flush` has it.

        Raises:
            LocalProtocolError: a close frame cannot carry the code.
        """
        if not may_be_sent(code):
            raise LocalProtocolError(f"a close frame cannot carry the code {code}", hint="for example 1000, or 4000")
        details = f"closed with {code} {reason}".rstrip()
        if self.__protocol__.phase is _Phase.OPEN and self.__protocol__.words is None:
            self.__protocol__.words = close_frame(code, reason)
        if at_once:
            self.connection.close(CloseReason.KICKED, details)
        else:
            self.connection.close_after_flush(details)

    # -- what is said about it

    @property
    def protocol(self) -> str:
        """``websocket``, and ``http`` before the handshake is done. Any thread."""
        return "http" if self.__protocol__.phase in _BEFORE_OPEN else "websocket"

    @property
    def role(self) -> str:
        """``follower`` of a topic; empty: of none. Any thread."""
        return "follower" if self.streams() else ""

    def streams(self) -> list[str]:
        """Return the name of the topic that is followed. Any thread."""
        place = self.connection.place
        return [place.topic.name] if isinstance(place, _TopicPlace) else []


class _Protocol(Session):
    """The protocol of one session: it is called about octets, time and the end, and calls the session's hooks.

    Nothing that it needs is a method of the session, which a subclass may have by the same name.
    """

    __slots__ = ("_handling", "_head", "_heard_at", "_listens_at", "_pinged", "_reader", "deflates", "phase", "words")

    def __init__(self) -> None:
        self.phase = _Phase.HEAD
        self._head: HeadReader | None = HeadReader(_HEAD_BYTES)
        self._reader: FrameReader | None = None
        self.deflates = False
        self._handling = False  # a coroutine of the application runs, behind which the next message waits
        self.words: bytes | None = None  # what the client is told at the end, where that is settled
        self._heard_at = 0.0  # when anything came last
        self._listens_at: tuple[str, int] | None = None
        self._pinged: _Pinged | None = None  # the ping that has not been answered

    def __accepted_at__(self, address: tuple[str, int]) -> None:
        self._listens_at = address

    @property
    def _session(self) -> WebSocketSession:
        """The session, by way of the connection, which forgets it at the end: a circle would outlive that."""
        return cast("WebSocketSession", self.connection.session)

    def last_words(self, reason: CloseReason, details: str) -> bytes:
        """Return the close frame, or the answer of HTTP, for an end."""
        del details
        if reason in _SILENT:
            return b""
        if self.words is not None:
            return self.words
        if self.phase in _BEFORE_OPEN:
            status = _REFUSALS.get(reason)
            return b"" if status is None else HttpAnswer(status, f"{status.phrase}\n").wire()
        end = _ENDS.get(reason)
        return b"" if end is None else close_frame(*end)

    # -- the handshake

    def opened(self) -> Awaitable[None] | None:
        """Wait for the request."""
        self.connection.core.set_protocol_timer(self.connection.now() + self._session.handshake_s)
        return self._session.opened()

    def received(self, data: memoryview) -> InputResult:
        """Take the request, then frames."""
        at, size = 0, len(data)
        self._heard_at = self.connection.now()
        while (reader := self._head) is not None and at < size:
            piece = bytes(data[at : at + _PIECE_BYTES])
            at += len(piece)
            try:
                head = reader.feed(piece)
                asked = None if head is None else self._check(head)
            except RemoteProtocolError as error:
                self._refuse(HttpAnswer(int(error.code), f"{error}\n", _SERVED), CloseReason.PROTOCOL_ERROR)
                return DONE
            if asked is not None:
                at -= reader.rest_bytes
                self._head = None
                self._ask(*asked)
        if self.phase is _Phase.DECIDING:
            return InputResult(InputVerdict.BLOCK, at)
        return self._read_frames(data, at) if self.phase is _Phase.OPEN else DONE

    def _check(self, head: h11.Request) -> tuple[WebSocketRequest, bytes]:
        """Return the request and the answer to its key, empty for a plain GET; raise with a status what is refused."""
        headers = tuple(head.headers)
        check_request(head.method, headers)
        raw_path, _, raw_query = head.target.decode("latin-1").partition("?")
        request = WebSocketRequest(
            path=unquote(raw_path, errors="replace"),
            query=dict(parse_qsl(raw_query, keep_blank_values=True)),
            headers=headers,
            peer=self.connection.peer,
            secure=self.connection.secure,
            websocket=wants_websocket(headers, head.http_version),
        )
        self._session.user_agent = printable(request.header("user-agent")[:_AGENT_CHARS])
        key = accept_key(headers) if request.websocket else b""
        if key and not self._origin_allowed(request):
            raise RemoteProtocolError(
                "this server lets in no pages of this origin (WebSocketSession.origins)", code="403"
            )
        return request, key

    def _origin_allowed(self, request: WebSocketRequest) -> bool:
        origin, origins = request.origin, self._session.origins
        if not origin:
            return True
        if origins is None:
            host, connection = request.header("host"), self.connection
            rebound = is_rebound(host, self._listens_at, connection.peer[0], secure=connection.secure)
            return is_own_origin(origin, host) and not rebound
        return is_among(origin, origins)

    def _ask(self, request: WebSocketRequest, key: bytes) -> None:
        """Have the application decide."""
        self.phase, session = _Phase.DECIDING, self._session
        offered = request.subprotocols
        if session.subprotocol is None:
            session.subprotocol = next((name for name in session.subprotocols if name in offered), None)
        answer: Any = session.requested(request)
        if inspect.iscoroutine(answer):
            then = self.connection.receiver.trigger_input
            self.connection.run_coroutine(self._decide_later(answer, request, key), "requested", then)
        else:
            self._decide(answer, request, key)

    async def _decide_later(self, answer: Coroutine[Any, Any, Any], request: WebSocketRequest, key: bytes) -> None:
        self._decide(await answer, request, key)

    def _decide(self, answer: HttpAnswer | int | None, request: WebSocketRequest, key: bytes) -> None:
        if self.phase is not _Phase.DECIDING or self.connection.ended is not None:
            return  # it was too late
        if answer is None and not request.websocket:
            answer = HttpAnswer(426, "this is a WebSocket server\n", [("Upgrade", "websocket"), *_SERVED])
        if isinstance(answer, int):
            answer = HttpAnswer(answer, f"{phrase(answer)}\n")
        if answer is not None:
            self._refuse(answer, CloseReason.FINISHED)
            return
        chosen = self._session.subprotocol
        if chosen is not None and chosen not in request.subprotocols:
            raise LocalProtocolError(f"subprotocol {chosen!r} was not offered by the client")
        self._accept(request.headers, key)

    def _refuse(self, answer: HttpAnswer, reason: CloseReason) -> None:
        self.words, self.phase, self._head = answer.wire(), _Phase.OVER, None
        denied = answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
        self.connection.close(CloseReason.AUTH_REFUSED if denied else reason, f"answered with {answer.status}")

    def _accept(self, headers: Headers, key: bytes) -> None:
        connection, session = self.connection, self._session
        self.deflates = session.compress and agrees_to_deflate(headers)
        head = switching_head(key, session.accept_headers, subprotocol=session.subprotocol, deflates=self.deflates)
        connection.sender.send(head, MessageClass.CONTROL)
        connection.sender.flush()  # whatever ends it now, the close frame goes behind it
        self._reader = FrameReader(session.max_message_bytes, inflates=self.deflates)
        self.phase, session.accept_headers = _Phase.OPEN, ()
        if connection.ended is not None:
            return  # the client has gone meanwhile
        connection.core.set_protocol_timer(
            connection.now() + session.ping_interval_s if session.ping_interval_s else None
        )
        self._handle(session.accepted(), "accepted")

    # -- frames of the client

    def input_resumed(self) -> None:
        """Go on with what was read."""
        if self.phase is _Phase.OPEN:
            self._handle_read()

    def _read_frames(self, data: memoryview, at: int) -> InputResult:
        while self._handle_read():
            if at == len(data) or self._reader is None:
                return DONE
            self._reader.feed(bytes(data[at : at + _PIECE_BYTES]))
            at = min(at + _PIECE_BYTES, len(data))
        return InputResult(InputVerdict.BLOCK, at)

    def _handle_read(self) -> bool:
        """Handle what was read; return whether that is all done."""
        if self._handling:
            return False
        reader, connection = self._reader, self.connection
        for event in () if reader is None else reader.events():
            if self.phase is not _Phase.OPEN or connection.ended is not None:
                self._reader = None
                return True
            if isinstance(event, (str, bytes)):
                if not self._handle(self._session.received_message(event), "received_message"):
                    return False
            elif isinstance(event, Ping):
                connection.sender.send(frame(bytes(event.payload), PONG), MessageClass.CONTROL)
            elif isinstance(event, PeerClose):
                self._peer_closed(event)
                return True
            if connection.turn_over():
                connection.receiver.trigger_input()
                return False
        return True

    def _handle(self, answer: object, where: str) -> bool:
        """Return whether a handler is done: if it is a coroutine, all else that the client sent waits for its end."""
        if not inspect.iscoroutine(answer):
            return True
        self._handling = True
        self.connection.run_coroutine(answer, where, self._go_on)
        return False

    def _go_on(self) -> None:
        self._handling = False
        self._heard_at = self.connection.now()  # its answer to a ping may lie behind what was handled
        self.connection.receiver.trigger_input()

    def _peer_closed(self, close: PeerClose) -> None:
        connection = self.connection
        self._reader, self.phase = None, _Phase.OVER
        said = f"{close.code} {printable(close.reason)}".rstrip()
        if not close.fault:
            self.words = self.words or close.answer
            if connection.place is not None:
                connection.place.end()
            connection.close_after_flush(f"the client closed: {said}", reason=CloseReason.PEER_CLOSED)
            return
        self.words = close.answer
        broken = close.code in {1002, 1007}
        connection.close(CloseReason.PROTOCOL_ERROR if broken else CloseReason.LIMIT_HIT, said)

    # -- time

    def timer(self, now: float) -> None:
        """Give up on a handshake that takes too long, ping a silent client, or end it."""
        connection = self.connection
        if self.phase in _BEFORE_OPEN:
            late = self.phase is _Phase.HEAD and not connection.receiver.paused  # else `opened` takes so long
            status = HTTPStatus.REQUEST_TIMEOUT if late else HTTPStatus.SERVICE_UNAVAILABLE
            text = f"the handshake took more than {self._session.handshake_s:g} s\n"
            self._refuse(HttpAnswer(status, text), CloseReason.HANDSHAKE_TIMEOUT)
        elif self.phase is _Phase.OPEN and self._session.ping_interval_s:
            connection.core.set_protocol_timer(self._look_at_silence(now))

    def _look_at_silence(self, now: float) -> float | None:
        """Ping the client if it is time to; return when to look again."""
        connection, pinged = self.connection, self._pinged
        interval_s, timeout_s = self._session.ping_interval_s, self._session.ping_timeout_s
        if pinged is None or self._heard_at >= pinged.at:
            self._pinged = None
            if self._heard_at + interval_s > now:
                return self._heard_at + interval_s
        elif timeout_s:
            if now < pinged.at + timeout_s:
                return pinged.at + timeout_s
            takes = connection.core.host.taken_bytes() > pinged.taken_bytes + len(_PING)
            if not (takes or self._handling or connection.sender.blocked or connection.receiver.paused):
                connection.close(CloseReason.IDLE, f"no answer to a ping within {timeout_s:g} s")
                return None
            self._pinged = pinged._replace(at=now, taken_bytes=connection.core.host.taken_bytes())
            return now + timeout_s
        self._pinged = _Pinged(now, connection.core.host.taken_bytes())
        connection.sender.send(_PING, MessageClass.CONTROL)
        return now + min(timeout_s or interval_s, interval_s)


_BEFORE_OPEN: Final = frozenset({_Phase.HEAD, _Phase.DECIDING})
_PING: Final = frame(b"", PING)
_topics: Final = itertools.count(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicStatistics:
    """A snapshot of a topic.

    Args:
        messages: published so far.
        bytes: of these, in frames that are not deflated.
        keys: keys that have a newest value.
        followers: clients that follow it.
        deflated_followers: those of them that take messages deflated.
    """

    messages: int
    bytes: int
    keys: int
    followers: int
    deflated_followers: int


class _Form:
    """A topic in one form: plain, or deflated."""

    __slots__ = ("fanouts", "followers", "log")

    def __init__(self, log: StreamLog, interval_s: float) -> None:
        self.log: Final = log
        self.fanouts: Final = Fanouts(log, flush_interval_s=interval_s, gather_s=min(_GATHER_S, interval_s))
        self.followers = 0  # guarded by the topic's lock


class Topic:
    """What any number of `WebSocketSession` follow: each message is framed once, and deflated once, for all of them.

    A message with a key replaces the one before it with the same key: the latest value wins. Who begins to follow gets
    the newest of each key first, and who is behind gets no more than that; so a client that is too slow for a price
    list skips prices, and the others never notice. A message without a key is for those who follow now, is sent to each
    of them in its order, and is what policy and limits are about.

    Args:
        name: for logs and lists. None: a number.
        flush_interval_s: longest time in seconds, 0 to 10, for which messages are gathered before they are written;
            after a pause the first goes at once, but for 2 ms. 0: each is written by itself.
        compress: whether clients that agreed to permessage-deflate get what is worth it deflated; that takes one call
            of zlib a message, while there are such followers, and once for a value that was published before, when the
            first of them gets it.
        max_keys: most keys at a time. 0: there are none.
        max_value_bytes: most bytes of the newest messages of all keys together, in frames, and characters of the keys.
            What of them was deflated for a client is kept beside, and is less.

    Attributes:
        name: as above.
    """

    __slots__ = ("_compress", "_deflated", "_lock", "_plain", "flush_interval_s", "max_keys", "max_value_bytes", "name")

    def __init__(
        self,
        name: str | None = None,
        *,
        flush_interval_s: float = DEFAULT_FLUSH_INTERVAL_S,
        compress: bool = True,
        max_keys: int = 100_000,
        max_value_bytes: int = MAX_VALUE_BYTES,
    ) -> None:
        check_arguments("Topic", Topic.__init__, locals())
        if not 0 <= flush_interval_s <= MOST_FLUSH_INTERVAL_S:
            raise ConfigError(f"flush_interval_s is {flush_interval_s}, it must be 0 to {MOST_FLUSH_INTERVAL_S:g} s")
        self.name: Final = name or f"topic-{next(_topics)}"
        self.flush_interval_s: Final = flush_interval_s
        self.max_keys: Final = max_keys
        self.max_value_bytes: Final = max_value_bytes
        self._compress: Final = compress
        self._lock: Final = OwnedLock()
        self._plain: Final = _Form(
            StreamLog(self.name, max_keys=max_keys, max_value_bytes=max_value_bytes), flush_interval_s
        )
        self._deflated: _Form | None = None  # what clients that agreed to deflate get, while any do; guarded by _lock

    def publish(self, message: str | Octets, *, key: str | None = None, droppable: bool | None = None) -> None:
        """Send a message to all that follow; what that costs here does not grow with their number. Any thread.

        Args:
            message: `str` goes as text, octets go as binary.
            key: what it is the newest value of. None: it is none.
            droppable: whether the policy may leave it out for a slow client. None: it may, as DATA. One with a key may
                always be left out, for a newer one.

        Raises:
            LocalProtocolError: the key is one too many, or its message is too much beside those of the others; or the
                message is neither text nor octets.
            ReentryError: called from `send_state_changed` or a policy.
        """
        if HANDLERS and (where := HANDLERS.get(get_ident())) is not None:
            raise ReentryError(
                f"Topic.publish() was called from {where}(), which may call no Sender",
                hint="do it later, with Connection.call_soon",
            )
        wire, now = frame(*message_frame(message)), time.monotonic()
        with self._lock:
            deflated = None if self._deflated is None else deflated_frame(wire)
            self._plain.log.append(wire, MessageClass.DATA, now, key=key, droppable=droppable, twin_wire=deflated)

    def forget(self, key: str) -> None:
        """Forget the newest message of `key`: nobody is sent it any more. Harmless where there is none. Any thread.

        Followers are not told; publish a message that says so, without a key, where they should be.
        """
        with self._lock:
            self._plain.log.forget(key)

    def statistics(self) -> TopicStatistics:
        """Return figures. Any thread."""
        with self._lock:
            deflated = 0 if self._deflated is None else self._deflated.followers
            tail = self._plain.log.tail
            return TopicStatistics(
                messages=tail.sequence,
                bytes=tail.offset,
                keys=len(self._plain.log.latest or ()),
                followers=self._plain.followers + deflated,
                deflated_followers=deflated,
            )

    def join(self, *, deflated: bool) -> _Form:
        """Count a follower in, and return the form that it gets."""
        with self._lock:
            form = self._plain
            if deflated and self._compress:
                if self._deflated is None:
                    self._deflated = _Form(form.log.begin_twin(deflated_frame), self.flush_interval_s)
                form = self._deflated
            form.followers += 1
            return form

    def left(self, form: _Form) -> None:
        """Count a follower out."""
        with self._lock:
            form.followers -= 1
            if form is self._deflated and not form.followers:
                self._deflated = self._plain.log.twin = None


class _TopicPlace(FollowPlace):
    """A client's place in a topic, which is told when it is given up, also by the end of the connection."""

    __slots__ = ("_form", "topic")
    connection: Connection

    def __init__(self, connection: Connection, topic: Topic, *, deflated: bool) -> None:
        self.topic: Final = topic
        form = topic.join(deflated=deflated)
        self._form: _Form | None = form
        try:
            super().__init__(connection, form.fanouts, latest=form.log.latest is not None)
        except BaseException:
            self._leave_topic()
            raise

    def leave(self) -> None:
        super().leave()
        # Else it moves to another thread; also when it is to end there, where its Sender still looks at the log.
        if self.connection.ended is not None and self.connection.sender.closed:
            self._leave_topic()

    def end(self) -> None:
        super().end()
        self._leave_topic()

    def _leave_topic(self) -> None:
        form, self._form = self._form, None
        if form is not None:
            self.topic.left(form)
