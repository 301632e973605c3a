"""One HTTP connection of the live server: requests one after the other, each answered, until one of them is a stream.

How it works. h11 parses requests, in pieces; a request is answered when it has come whole, and nothing behind it is
looked at before that is done: what a client asks for ahead waits in its kernel. Who answers is said by a table of
suffixes (`Routes`), whether the client may is said by the gate that RTMP asks as well. A request for a stream makes the
connection a viewer's (`ViewerSession`): the head of the response goes out, then everything comes from the stream's log
in FLV through the connection's Sender, and h11 is done. Limits, steps, records and operations are any viewer's.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
from http import HTTPStatus
from typing import ClassVar, Final, NamedTuple
from urllib.parse import quote, unquote

import h11
import structlog
from wsproto.events import Ping

from flowctl.core.flow.ledger import LedgerEntry
from flowctl.core.flow.state import MessageClass
from flowctl.core.text.addresses import (
    ANY_ORIGIN,
    address_key,
    is_among,
    is_host_among,
    is_own_origin,
    is_rebound,
    parse_host,
)
from flowctl.core.text.printable import printable
from flowctl.errors import LimitExceededError, RemoteProtocolError
from flowctl.live.access.request import TOO_SLOW, LiveRequest, Question, Refusal
from flowctl.live.config import Redirect
from flowctl.live.httpd.exchange import (
    DIRECTIVE,
    Exchange,
    Handler,
    HeaderFields,
    HttpLimits,
    Request,
    Routes,
    usual_headers,
)
from flowctl.live.httpd.formats import CHUNKS, FLV_TYPE, FRAMES, GOING_AWAY, SILENT_S, TAGS, FlvPlay, settled_tracks
from flowctl.live.hub import Hub
from flowctl.live.inputrate import InputRate
from flowctl.live.playing import Playing, PlayWords, ViewerSession, Wants, refusal_word, track_of
from flowctl.live.settings.levels import Role
from flowctl.live.stream import Stream
from flowctl.log import redact_text
from flowctl.reasons import CloseReason
from flowctl.receiver import DONE, InputResult, InputVerdict
from flowctl.wire.rtmp.handshake import is_stun
from flowctl.wire.rtmp.url import Query, RtmpUrl, canonical
from flowctl.wire.websocket.frames import PING, PONG, close_frame, frame
from flowctl.wire.websocket.handshake import REFUSALS, VERSION, accept_key
from flowctl.wire.websocket.reading import FrameReader, PeerClose

_log: Final = structlog.get_logger("flowctl.live")
_PIECE_BYTES: Final = 4096
"""Octets that h11 is given at a time: they count against `header_bytes` before they are parsed."""
_FRAMES_PIECE_BYTES: Final = 512
"""Octets of a WebSocket player parsed at a time: some 85 of the smallest frames, 2 ms of work."""
_MESSAGE_BYTES: Final = 64 * 1024
"""Longest message of a WebSocket player, which is dropped: none has anything to say."""
_PLAYLIST: Final = ".m3u8"
_PIPELINED: Final = 16
"""Answers that may wait for a client before the next of its requests is looked at."""
_PIPELINED_BYTES: Final = 64 * 1024
"""Size of these answers, without the last one: sixteen parts of files would be megabytes for a read of 2 kB."""
CONNECTION_COST: Final = 0.125
"""Part of its address's rate of new ones that a connection takes: browsers and proxies open one per few requests."""
_TLS: Final = b"\x16"
_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_VERSIONS: Final = frozenset({b"1.0", b"1.1"})
_ALLOW: Final = "GET, HEAD, OPTIONS"
_PREFLIGHT_S: Final = 86_400
_AGENT_CHARS: Final = 256


class _AskedOverHttp(NamedTuple):
    """A request that a hook decides about, until when."""

    question: Question
    exchange: Exchange
    handler: Handler
    until: float


def _basic(text: str) -> tuple[str | None, str | None]:
    """Return user and password of the text behind ``Basic`` in an Authorization header. None: it is not valid."""
    try:
        user, colon, password = base64.b64decode(text.strip(), validate=True).decode("utf-8").partition(":")
    except ValueError:
        return None, None
    return (user, password) if colon else (None, None)


class Phase(enum.Enum):
    """Phases of a connection."""

    IDLE = "idle"  #: nothing of the next request has come
    READING = "reading"  #: a part of a request has come
    ANSWERING = "answering"  #: a request is decided about, answered, or waits for its stream
    PLAYING = "playing"  #: the answer is a stream, and has begun
    OVER = "over"  #: nothing that comes is looked at any more


_READABLE_PHASES: Final = frozenset({Phase.IDLE, Phase.READING})
"""Phases in which the next part of a request may be read."""


class HttpSession(ViewerSession):
    __slots__ = (
        *("_advancing", "_answer_bytes", "_answers", "_asked", "_body_bytes", "_due", "_exchange", "_flv", "_gave"),
        *("_half_closed", "_head", "_http", "_limits", "_listens_at", "_origins", "_phase", "_ping_due", "_pinged"),
        *("_rate", "_requests", "_routes", "_told", "_visit"),
    )

    def __init__(self, hub: Hub, routes: Routes, limits: HttpLimits, origins: frozenset[str]) -> None:
        super().__init__(hub)
        self._routes: Final = routes
        self._limits: Final = limits
        self._origins: Final = origins
        self._listens_at: tuple[str, int] | None = None
        self._http: h11.Connection | None = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.header_bytes)
        self._head: h11.Request | None = None  # head of the request whose body is read
        self._body_bytes = 0  # size of that body so far
        self._requests = 0
        self._answers = self._answer_bytes = 0  # that may wait for the client
        self._exchange: Exchange | None = None  # that is being answered
        self._asked: _AskedOverHttp | None = None
        self._visit: LiveRequest | None = None  # what is answered with files, where hooks are told of its end
        self._told: LiveRequest | None = None  # its play, where hooks are told how much went over the connection
        self._flv: FlvPlay | None = None  # the answer is a stream
        self._gave = False  # it was given something of a stream
        self.harmless = True  # what is no HTTP apart: a page can have a browser ask for anything
        self._phase = Phase.IDLE
        self._advancing = False
        self._half_closed = False  # the client has ended its side; h11 has requests that came before
        self._due: float | None = None  # when it has to be there
        self._rate: InputRate | None = None  # rate of WebSocket frames
        self._ping_due: float | None = None  # when a WebSocket player is asked whether it is there
        self._pinged = False  # it was, and nothing has come since

    def __accepted_at__(self, address: tuple[str, int]) -> None:
        self._listens_at = address

    @property
    def protocol(self) -> str:
        if self._flv is None:
            return "http"
        return (FRAMES if self._flv.accept_key else CHUNKS).name

    @property
    def gives_back(self) -> float:
        return CONNECTION_COST if self._gave else 0.0

    def behaves(self) -> bool:
        return self._gave or super().behaves()

    @property
    def stray(self) -> str:
        return super().stray or ("" if self._gave or self._flv is not None else "nothing was there for it")

    # -- input: requests

    def opened(self) -> None:
        for observer in self._hub.observers:
            observer.opened(self.connection)
        self._due = self.connection.now() + self._limits.request_time_s
        self._arm()

    def received(self, data: memoryview) -> InputResult:
        if self._phase is Phase.OVER:
            return DONE
        if self._flv is not None:
            return self._received_frames(data)
        at, size = 0, len(data)
        while (http := self._http) is not None and self._advance():
            if at == size:
                return DONE
            piece = bytes(data[at : at + _PIECE_BYTES])
            at += len(piece)
            if self._phase is Phase.IDLE:
                self._phase, self._due = Phase.READING, self.connection.now() + self._limits.request_time_s
                self._arm()
            http.receive_data(piece)
        if self._playing is not None and at == size:
            return DONE  # nothing is held, so that it is seen when a player that waits has left
        return InputResult(InputVerdict.BLOCK, at)

    def input_resumed(self) -> None:
        if self._flv is None and self._advance() and self._half_closed:
            self._leave("the client has ended")

    def received_control(self, data: memoryview) -> int:
        """Take what a slow player says; requests wait."""
        if self._flv is None:
            return len(data) if self._phase is Phase.OVER else 0
        result = self._received_frames(data)
        return len(data) if result is DONE else result.consumed_bytes

    def ask_to_reconnect(self) -> None:
        """Accept no request after the one that has begun, if any; a play goes on."""
        self._requests = self._limits.requests
        if self._phase is Phase.IDLE:
            self._leave("the server is going down", CloseReason.SHUTDOWN)

    def peer_ended(self) -> bool:
        """Answer the requests that are complete, and leave; a player that closes its side has left."""
        if self._playing is not None:
            return False
        self._half_closed = True
        needs_more = self._advance()
        if self._flv is not None or (
            self._exchange is None and self.connection.writable and (needs_more or self._phase is Phase.OVER)
        ):
            return False
        if self._exchange is not None and self._http is not None and not self._http.trailing_data[0]:
            self._requests = self._limits.requests  # the answer is the last one
        if needs_more:
            self._leave("the client has ended")
        return True

    def _go_on_soon(self) -> None:
        """Look at the next request soon; what h11 still has is all that there is once the client has ended."""
        if self._half_closed:
            self.connection.call_soon(self.input_resumed)
        else:
            self.connection.receiver.trigger_input()

    def _advance(self) -> bool:
        """Treat what h11 has; return whether it needs more, and not something else first."""
        self._advancing = True
        try:
            while self._may_go_on():
                event = self._http.next_event() if self._http is not None else h11.NEED_DATA
                if event is h11.NEED_DATA:
                    return True
                if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                    return False
                self._treat(event)
        except h11.RemoteProtocolError as error:
            self._malformed(error)
        finally:
            self._advancing = False
        return False

    def _may_go_on(self) -> bool:
        connection = self.connection
        if self._phase not in _READABLE_PHASES or connection.ended is not None:
            return False
        if not self._half_closed and connection.turn_over():
            connection.receiver.trigger_input()
            return False
        if self._answers >= _PIPELINED or self._answer_bytes >= _PIPELINED_BYTES:
            self._answers = self._answer_bytes = 0
            if not connection.writable:
                connection.when_drained(self._go_on_soon)
                return False
            if self._half_closed:  # behind the input there are no turns, so what is left is answered in parts
                self._go_on_soon()
                return False
        return True

    def _treat(self, event: object) -> None:
        limits = self._limits
        match event:
            case h11.Request():
                self._head, self._body_bytes = event, 0
                size = len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers)
                if event.http_version not in _VERSIONS:
                    text = f"HTTP/{event.http_version.decode()} is not served"
                    self._refuse_all(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, text, CloseReason.PROTOCOL_ERROR)
                elif len(event.target) > limits.target_bytes:
                    self._over_limit(HTTPStatus.REQUEST_URI_TOO_LONG, "target_bytes", len(event.target))
                elif len(event.headers) > limits.header_count:
                    self._over_limit(431, "header_count", len(event.headers))
                elif size > limits.header_bytes:
                    self._over_limit(431, "header_bytes", size)
                elif (announced := _length(event)) > limits.body_bytes:
                    self._over_limit(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_bytes", announced)
                elif self._http is not None and self._http.they_are_waiting_for_100_continue:
                    self._send_event(h11.InformationalResponse(status_code=100, headers=[]))
            case h11.Data():
                self._body_bytes += len(event.data)
                if self._body_bytes > limits.body_bytes:
                    self._over_limit(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_bytes", self._body_bytes)
            case h11.EndOfMessage():
                head, self._head = self._head, None
                self._due = None
                self._requests += 1
                if head is not None:
                    self._serve(head)
                self._arm()

    # -- what is wrong with a request

    def _malformed(self, error: h11.RemoteProtocolError) -> None:
        """Answer input that is not a valid request, or longer than one may be."""
        if error.error_status_hint == 431:
            whole_line = self._http is not None and b"\n" in self._http.trailing_data[0]
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if whole_line else HTTPStatus.REQUEST_URI_TOO_LONG
            self._over_limit(status, "header_bytes", self._limits.header_bytes + 1)
            return
        if not self._requests and self._http is not None:  # TLS is what a browser sends for https://
            began = self._http.trailing_data[0]
            self.harmless = began.startswith(_TLS) or is_stun(began)
        self._refuse_all(error.error_status_hint, str(error), CloseReason.PROTOCOL_ERROR)

    def _over_limit(self, status: int, limit: str, value: float) -> None:
        error = LimitExceededError(limit, value, getattr(self._limits, limit))
        self._ended_by(error)
        reason = CloseReason.IDLE if limit == "request_time_s" else CloseReason.LIMIT_HIT
        self._refuse_all(status, str(error), reason)

    def _refuse_all(self, status: int, why: str, reason: CloseReason) -> None:
        """Answer, and end the connection: the input behind cannot be parsed."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:  # else it was answered, or is about to be
            request = Request(method="GET", path="/", raw_query="", headers=())
            self._requests = self._limits.requests
            self._head = None
            self._phase = Phase.ANSWERING
            self._exchange_of(request).respond(status)
        self._leave(why, reason)

    def _leave(self, why: str, reason: CloseReason = CloseReason.FINISHED) -> None:
        self._phase = Phase.OVER
        self.connection.close_after_flush(printable(redact_text(why)), reason=reason)

    # -- answers

    def _exchange_of(self, request: Request) -> Exchange:
        """Return what answers `request`, which is under way from now on."""
        exchange = self._exchange = Exchange(
            request=request,
            connection=self.connection,
            begin=self._begin_response,
            write=self._send_body,
            end=self._end_response,
            play=self.play,
        )
        return exchange

    def _send_event(self, event: h11.Event) -> None:
        data = None if self._http is None else self._http.send(event)
        if data:
            self._answer_bytes += len(data)
            if self._visit is not None:
                self._hub.visits.count(self._visit, len(data))
            self.connection.sender.send(data, MessageClass.DATA, droppable=False)

    def _begin_response(self, status: int, headers: HeaderFields) -> None:
        if status < HTTPStatus.BAD_REQUEST and self._exchange is not None and self._exchange.request.live is not None:
            self._gave = True
        every = [*usual_headers(), *self._cors(), *headers]
        if self._requests >= self._limits.requests:
            every.append(("Connection", "close"))
        encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in every]
        reason = HTTPStatus(status).phrase.encode()
        self._send_event(h11.Response(status_code=status, headers=encoded, reason=reason))

    def _send_body(self, data: bytes) -> None:
        self._send_event(h11.Data(data=data))

    def _end_response(self) -> None:
        self._send_event(h11.EndOfMessage())
        self._exchange = self._visit = None
        self._answers += 1
        http = self._http
        last = self._requests >= self._limits.requests  # it may have become that behind the head of its answer
        if http is None or last or http.our_state is not h11.DONE or http.their_state is not h11.DONE:
            if self._phase is not Phase.OVER:
                self._leave("answered")
            return
        http.start_next_cycle()
        idle, limits = not http.trailing_data[0], self._limits
        self._phase = Phase.IDLE if idle else Phase.READING
        self._due = self.connection.now() + (limits.idle_s if idle else limits.request_time_s)
        self._arm()
        if not self._advancing:
            self._go_on_soon()

    def _cors(self) -> list[tuple[str, str]]:
        if ANY_ORIGIN in self._origins:
            return [("Access-Control-Allow-Origin", "*")]
        if not self._origins:
            return []
        request = None if self._exchange is None else self._exchange.request
        origin = "" if request is None else request.header("origin")
        allowed = [("Access-Control-Allow-Origin", origin)] if is_among(origin, self._origins) else []
        return [*allowed, ("Vary", "Origin")]

    # -- who may, and who answers

    def _serve(self, head: h11.Request) -> None:
        target = head.target.decode("ascii")
        if "://" in target.partition("?")[0]:  # a whole address, the form of requests to proxies
            target = "/" + target.partition("://")[2].partition("/")[2]
        raw_path, _, raw_query = target.partition("?")
        request = Request(
            method=head.method.decode("ascii"),
            path="/",
            raw_query=raw_query,
            headers=tuple(head.headers),
            version=head.http_version.decode("ascii"),
        )
        self.user_agent = printable(redact_text(request.header("user-agent")[:_AGENT_CHARS]))
        exchange = self._exchange_of(request)
        self._phase = Phase.ANSWERING
        if request.method not in _METHODS:
            exchange.respond(HTTPStatus.METHOD_NOT_ALLOWED, headers=[("Allow", _ALLOW)])
            return
        if self._rebound(request.header("host")):
            exchange.respond(HTTPStatus.MISDIRECTED_REQUEST, "The Host is no name of this machine (http_origins).")
            return
        if request.method == "OPTIONS":
            self._tell_options(exchange)
            return
        try:
            path = unquote(raw_path, errors="strict")
        except UnicodeDecodeError:
            exchange.respond(HTTPStatus.BAD_REQUEST)
            return
        handler = self._routes.find(path)
        name = None if handler is None or "?" in path else handler.stream_of(path)
        if handler is None or name is None:
            exchange.respond(HTTPStatus.NOT_FOUND)
            return
        request = dataclasses.replace(request, own=handler.own_parameters)
        try:
            live = self._live_request(request, name)
        except RemoteProtocolError as error:
            exchange.respond(HTTPStatus.BAD_REQUEST, printable(str(error)))
            return
        request = dataclasses.replace(request, path=path, live=live)
        self._ask(self._exchange_of(request), handler, live)

    def _rebound(self, host: str) -> bool:
        """Return whether a page that may not play would be of our own origin by a name of its maker's."""
        connection = self.connection
        rebound = is_rebound(host, self._listens_at, connection.peer[0], secure=connection.secure)
        return rebound and not is_host_among(host, self._origins)

    def _tell_options(self, exchange: Exchange) -> None:
        wanted = exchange.request.header("access-control-request-headers")
        headers = [("Allow", _ALLOW), ("Access-Control-Allow-Methods", _ALLOW)]
        headers += [("Access-Control-Max-Age", str(_PREFLIGHT_S))]
        if wanted:
            headers.append(("Access-Control-Allow-Headers", wanted))
        exchange.respond(HTTPStatus.NO_CONTENT, headers=headers if self._cors() else headers[:1])

    def _live_request(self, request: Request, name: str) -> LiveRequest:
        found = parse_host(request.header("host"))
        if found is None:
            raise RemoteProtocolError("Host is no host and port", code="bad-url")
        host, port = found
        url = RtmpUrl(scheme="http", host=host, vhost=host, port=port or 80, raw_query=request.kept_query)
        url = canonical(url.with_stream(name), decoded=True)
        query = Query({unquote(key): unquote(value) for key, value in url.query.items()})
        scheme, _, bearer = request.header("authorization").partition(" ")
        user, password = _basic(bearer) if scheme.lower() == "basic" else (None, None)
        return LiveRequest(
            kind="play",
            connection=self.number,
            peer=self.peer,
            url=dataclasses.replace(url, query=query, user=user, password=password),
            protocol="http",
            user_agent=self.user_agent,
            bearer=bearer.strip() if scheme.lower() == "bearer" else "",
            page_url=request.header("referer"),
        )

    def _ask(self, exchange: Exchange, handler: Handler, live: LiveRequest) -> None:
        now, gate = self.connection.now(), self._hub.gate
        self._visit = live if handler.in_files and gate.tells_of("play") else None
        if handler.in_files and self._hub.visits.prolong(live):
            refusal = gate.refuses_network(live)
            if refusal is None:
                handler.handle(exchange)
            else:
                self._say_no(exchange, refusal, "access")
            return
        answer = gate.ask(live, lambda question, refusal: self.on_thread(self._answered, question, refusal))
        if isinstance(answer, Refusal):
            self._say_no(exchange, answer, "access")
        elif answer is None:
            self._handle(exchange, handler, live)
        else:
            self._asked = _AskedOverHttp(answer, exchange, handler, now + gate.decide_s)
            self._arm()

    def _answered(self, question: Question, refusal: Refusal | None) -> None:
        asked, self._asked = self._asked, None
        if asked is None or asked.question is not question:
            self._asked = asked
            return
        question.cancel()
        live = asked.exchange.request.live
        if refusal is None and live is not None:
            self._handle(asked.exchange, asked.handler, live)
        elif refusal is not None:
            self._say_no(asked.exchange, refusal, "hook")
        self._arm()

    def _handle(self, exchange: Exchange, handler: Handler, live: LiveRequest) -> None:
        if self._redirect(exchange, handler, live):
            return
        if handler.in_files:
            self._hub.visits.begin(live)
        handler.handle(exchange)

    def _redirect(self, exchange: Exchange, handler: Handler, live: LiveRequest) -> bool:
        """Send a player to an edge, if there is one for it: with a stream, or with the playlist that names files."""
        request, hub, kind = exchange.request, self._hub, self._hub.config.redirect
        websocket = request.wants_websocket
        if hub.edge_for is None or kind is Redirect.OFF or (websocket and kind is not Redirect.ALL):
            return False
        if handler.in_files and not request.path.endswith(_PLAYLIST):
            return False
        secure = self.connection.secure or request.header("x-forwarded-proto") == "https"
        lasting = "&".join(item for item in request.raw_query.split("&") if not item.startswith(DIRECTIVE))
        viewer = "\n".join((live.peer[0], live.stream, live.user_agent, lasting)).encode()
        scheme, network = "https" if secure else "http", address_key(live.peer[0])
        base = hub.edge_for(scheme, viewer if handler.in_files else None, network)
        if base is None:
            return False
        where = (base.replace("http", "ws", 1) if websocket else base) + quote(request.path)
        where += f"?{request.raw_query}" if request.raw_query else ""
        _log.info("viewer redirected", **self._fields(live.stream), to=base)
        self.refusal = "redirected"
        exchange.respond(HTTPStatus.FOUND, headers=[("Location", where), ("Cache-Control", "no-store")])
        return True

    def _say_no(self, exchange: Exchange, refusal: Refusal, by: str) -> None:
        """Refuse a play, and log it; `by`: the rule or hook that forbids it, for records."""
        live = exchange.request.live
        self.refusal = refusal_word(refusal.why, by)
        if live is not None:
            self._tell_observers(live)
            _log.info("play refused", **self._fields(live.stream), reason=refusal.text)
        scheme = "Bearer" if self._hub.config.rtmp.credentials is None else 'Basic realm="live", charset="UTF-8"'
        if live is not None and refusal.why.denies:
            for observer in self._hub.observers:
                observer.denied(self.connection, live, self.connection.now(), guess=refusal.guess)
        challenge = [("WWW-Authenticate", scheme)] if refusal.why.value == HTTPStatus.UNAUTHORIZED else []
        exchange.respond(refusal.why.value, printable(refusal.text), challenge)

    # -- playing

    def play(self) -> None:
        """Answer the request under way with its stream: at once, or when it is published."""
        exchange = self._exchange
        live = None if exchange is None else exchange.request.live
        if exchange is None or live is None:
            return
        name, request = live.stream, exchange.request
        if request.method != "HEAD":
            self._tell_observers(live)
        published = self._hub.is_published(name)
        settings = self._hub.config.at(name, Role.VIEWER)
        if not published and (request.method == "HEAD" or not settings.players_may_wait):
            self.refusal = "no stream"
            _answer_unpublished(exchange)
            return
        if request.method == "HEAD":
            exchange.begin(HTTPStatus.OK, [("Content-Type", FLV_TYPE), ("Cache-Control", "no-store")])
            exchange.end()
            return
        try:
            key = accept_key(request.headers) if request.wants_websocket else b""
        except RemoteProtocolError as error:
            self.refusal = "bad request"
            exchange.respond(int(error.code), printable(str(error)), [("Sec-WebSocket-Version", VERSION)])
            return
        if key and not self._origin_allowed(request):
            self.refusal = "access"
            exchange.respond(HTTPStatus.FORBIDDEN, "Pages of this origin may not play.")
            return
        try:
            stream = self._hub.view(name, self)
        except LimitExceededError as error:
            self._refused("play refused", name, error)
            words = "Too many viewers. Try again later."
            exchange.respond(HTTPStatus.SERVICE_UNAVAILABLE, words, [("Retry-After", "5")])
            return
        now = self.connection.now()
        wire_format = FRAMES if key else TAGS if request.version == "1.0" else CHUNKS
        self._flv = FlvPlay(wire_format, key, now + self._limits.wait_s)
        if key:
            self._flv.reader = FrameReader(_MESSAGE_BYTES)
        wire = stream.join_format(wire_format)
        self._playing = Playing(self, PlayWords(), self._hub, stream, wire, Wants(track=track_of(live.query)))
        self._flv.held = self._playing.begin(), now
        if self._hub.gate.tells_of("play"):
            self._played = self._told = live
            self._hub.gate.note_begin(live)
        if self._playing.waiting:
            _log.info("play started", **self._fields(name), waiting=True, agent=self.user_agent)
        self._begin_if_settled(now)
        self._arm()

    def _origin_allowed(self, request: Request) -> bool:
        """Return whether a page may read frames: what CORS says of answers, browsers do not ask for WebSocket."""
        origin = request.header("origin")
        return not origin or is_among(origin, self._origins) or is_own_origin(origin, request.header("host"))

    def _tell_observers(self, live: LiveRequest) -> None:
        for observer in self._hub.observers:
            observer.asked(self.connection, "play", live.stream, self.connection.now())

    def _begin_if_settled(self, now: float) -> None:
        flv, playing = self._flv, self._playing
        if flv is None or playing is None or flv.held is None or self._phase is not Phase.ANSWERING:
            return
        place, since = flv.held
        ended = playing.log.ended
        if playing.waiting and not ended:
            return
        tracks = settled_tracks(playing.stream, now, playing.log, place[0])
        if not tracks:
            if ended:  # without a frame: the next publication may have some
                flv.held = playing.rejoin(), now
            flv.give_up = flv.give_up or playing.reserve()
            flv.look_later(playing.stream, now)
            return
        is_young = not ended and now - (playing.stream.published_at or 0.0) < SILENT_S
        if is_young and "video" not in tracks and playing.may_find_seat:
            flv.look_later(playing.stream, now)  # nobody sits in sound alone: it is played from the held place
            return
        self._phase, flv.look_at = Phase.PLAYING, None
        head = flv.head(tracks, [*usual_headers(), *self._cors()])
        self.connection.sender.send(head, MessageClass.DATA, droppable=False)
        self._exchange = self._http = None
        playing.follow(place, since)
        flv.let_go()
        _log.info("play started", **self._fields(playing.stream.name), protocol=self.protocol, agent=self.user_agent)
        if flv.accept_key:
            self._put_off_ping(now)
        self.connection.when_drained(self._head_taken, flv)

    def _head_taken(self, flv: FlvPlay) -> None:
        flv.taken = True
        self.connection.receiver.trigger_input()

    def stream_ended(self, stream: Stream) -> None:
        """The publisher has gone for good: a response that has begun or has frames to give ends, another one waits."""
        super().stream_ended(stream)
        self._begin_if_settled(self.connection.now())
        if self._phase is Phase.PLAYING:  # also where it is back already: the log has said that it ended
            self._leave("the publisher has gone")
        self._arm()

    def stream_published(self, stream: Stream) -> None:
        if self._phase is Phase.OVER:  # it gets what is left, and no part of what follows
            return
        super().stream_published(stream)
        self._begin_if_settled(self.connection.now())
        self._arm()

    def renditions_changed(self, stream: Stream) -> None:
        if self._phase is not Phase.OVER:
            super().renditions_changed(stream)

    def server_stops(self) -> None:
        """Tell a WebSocket player that the server goes away, behind the frame it is being sent; what waits is left out.

        A response of HTTP has no word for that: it ends without its last chunk.
        """
        flv, place = self._flv, self.connection.place
        if flv is None or not flv.accept_key or self._phase is not Phase.PLAYING:
            return
        if place is not None:
            place.end()
        self.connection.sender.send(GOING_AWAY, MessageClass.DATA, droppable=False)
        self._leave("server stops", CloseReason.SHUTDOWN)

    def last_words(self, reason: CloseReason, details: str) -> bytes:
        """Tell a WebSocket player that it is kicked, and why; as above, a response of HTTP has no word for it."""
        if reason is not CloseReason.KICKED or self._flv is None or not self._flv.accept_key:
            return b""
        return close_frame(1008, f"{reason.value} {details}") if self._phase is Phase.PLAYING else b""

    def _give_up(self, limit: str, limit_s: float) -> None:
        exchange, playing, flv = self._exchange, self._playing, self._flv
        self._flv = None
        if flv is not None:
            flv.let_go()
        if playing is not None:
            self._hub.limit_hit(limit)
            self._tell_limit(limit, limit_s, limit_s)
        self.refusal = "no stream"
        self._end_playing(f"nobody published it within {limit_s:g} s")
        if exchange is not None:
            _answer_unpublished(exchange)

    # -- input of players

    def _received_frames(self, data: memoryview) -> InputResult:
        """Take what a player says while it plays; over plain HTTP nothing that would be answered."""
        flv, connection = self._flv, self.connection
        if flv is None or not flv.taken:
            return InputResult(InputVerdict.BLOCK, 0) if data else DONE  # behind its request
        reader = flv.reader
        if reader is None:
            return DONE
        at, size, now = 0, len(data), connection.now()
        self._put_off_ping(now)
        while at < size and self._phase is not Phase.OVER:
            if connection.turn_over():
                connection.receiver.trigger_input()
                return InputResult(InputVerdict.BLOCK, at)
            reader.feed(bytes(data[at : at + _FRAMES_PIECE_BYTES]))
            at += min(_FRAMES_PIECE_BYTES, size - at)
            frames = 0
            for event in reader.events():  # messages are dropped
                frames += 1
                if isinstance(event, Ping):
                    connection.sender.send(frame(bytes(event.payload), PONG), MessageClass.CONTROL)
                elif isinstance(event, PeerClose):
                    self._answer_close(event)
                    return DONE
            if frames and self._count_frames(frames, now):
                connection.receiver.trigger_input()
                return InputResult(InputVerdict.BLOCK, at)
        return DONE

    def _answer_close(self, close: PeerClose) -> None:
        self.connection.sender.send(close.answer, MessageClass.CONTROL)
        reason = CloseReason.PROTOCOL_ERROR if close.fault else CloseReason.FINISHED
        self._leave(f"the player closed: {close.code} {close.reason}".rstrip(), reason)

    def _count_frames(self, count: int, now: float) -> bool:
        """Count frames; return whether there are too many for now, and input is held."""
        if self._rate is None:
            cut_after_s = self.connection.work.limits.cut_after_s
            self._rate = InputRate("frames_per_second", self._limits.frames_per_second, cut_after_s, now)
        overrun = self._rate.count(count, now)
        if overrun is not None:
            self.connection.core.slow(overrun, "frames per second")
        return overrun is not None

    def _put_off_ping(self, now: float) -> None:
        after_s = self._config.rtmp.limits.ping_after_s
        self._pinged = False
        self._ping_due = now + after_s if after_s else None

    def _ping(self, now: float) -> None:
        """Ping a silent player, or end one that has not answered the last ping."""
        flv, limits, connection = self._flv, self._config.rtmp.limits, self.connection
        if flv is None or not flv.accept_key or self._phase is not Phase.PLAYING:
            self._ping_due = None
            return
        if connection.sender.blocked or connection.receiver.paused:
            self._put_off_ping(now)  # whether it is there is the Sender's to find out
            return
        if self._pinged:
            self._ended_by(LimitExceededError("ping_silence_s", limits.ping_timeout_s, limits.ping_timeout_s))
            raise LimitExceededError("ping_silence_s", limits.ping_timeout_s, limits.ping_timeout_s)
        self._pinged = True
        self._ping_due = now + limits.ping_timeout_s if limits.ping_timeout_s else None
        connection.sender.send(frame(b"", PING), MessageClass.CONTROL)

    # -- time

    def timer(self, now: float) -> None:
        if self._asked is not None and now >= self._asked.until:
            self._answered(self._asked.question, TOO_SLOW)
            self._hub.limit_hit("decide_s")
        if self._due is not None and now >= self._due:
            self._too_late()
        if self._ping_due is not None and now >= self._ping_due:
            self._ping(now)
        if self._playing is not None:
            self._playing.check_quiet(now)
            self._check_wait(now)
            self._begin_if_settled(now)
        self._arm()

    def _too_late(self) -> None:
        self._due = None
        if self._phase is Phase.OVER:
            return
        if not self.connection.writable:  # it is not read while answers wait, so it cannot be late
            self._due = self.connection.now() + self._limits.request_time_s
            return
        if self._phase is Phase.IDLE:
            self._leave("no request", CloseReason.IDLE)
        else:
            self._over_limit(HTTPStatus.REQUEST_TIMEOUT, "request_time_s", self._limits.request_time_s)

    def _check_wait(self, now: float) -> None:
        flv, playing = self._flv, self._playing
        if flv is None or playing is None or self._phase is not Phase.ANSWERING or not playing.waiting:
            return
        try:
            playing.check_wait(now)
        except LimitExceededError as error:
            self._give_up(error.limit, error.maximum)
        else:
            if now >= flv.gives_up_at:
                self._give_up("wait_s", self._limits.wait_s)

    def ledger_entry(self, entry: LedgerEntry) -> None:
        super().ledger_entry(entry)
        self._arm()

    def closed(self, reason: CloseReason, details: str) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.question.cancel()
        if self._flv is not None:
            self._flv.let_go()
        super().closed(reason, details)
        if self._told is not None:
            sent_bytes = self.connection.sender.account(rows=False).bytes_sent
            self._hub.gate.note_close(self._told, sent_bytes, self.connection.receiver.bytes_in)

    def _arm(self) -> None:
        connection = self.connection
        if connection.ended is not None:
            return
        flv, playing = self._flv, self._playing
        times = [self._due, self._ping_due]
        if self._asked is not None:
            times.append(self._asked.until)
        if playing is not None and flv is not None:
            times.append(playing.quiet_at)
            if self._phase is Phase.ANSWERING:
                times += [playing.waits_until, flv.gives_up_at] if playing.waiting else [flv.look_at]
        connection.set_timer(min((when for when in times if when is not None), default=None))


class FlvRoute:
    suffix: Final = ".flv"
    in_files: Final = False
    own_parameters: Final = ()

    def stream_of(self, path: str) -> str | None:
        return path.removesuffix(self.suffix).strip("/") or None

    def handle(self, exchange: Exchange) -> None:
        exchange.play()


class PlaylistRoute:
    """Playlists of HLS at a server that writes none: it may send their players to edges that do."""

    suffix: Final = _PLAYLIST
    in_files: Final = True
    own_parameters: Final = (DIRECTIVE,)

    def stream_of(self, path: str) -> str | None:
        return path.removesuffix(self.suffix).strip("/") or None

    def handle(self, exchange: Exchange) -> None:
        exchange.respond(HTTPStatus.NOT_FOUND)


def _length(head: h11.Request) -> int:
    """Return the length of the body that a request announces; h11 has seen that it is a number."""
    return next((int(value) for name, value in head.headers if name == b"content-length"), 0)


class HttpSessions:
    """Makes the sessions of a listener."""

    __refusals__: ClassVar[tuple[bytes, bytes]] = REFUSALS

    def __init__(self, hub: Hub, routes: Routes, origins: frozenset[str], limits: HttpLimits | None = None) -> None:
        self._given: Final = (hub, routes, limits or HttpLimits(), origins)

    def __call__(self) -> HttpSession:
        return HttpSession(*self._given)


def _answer_unpublished(exchange: Exchange) -> None:
    exchange.respond(HTTPStatus.NOT_FOUND, "Nobody publishes this stream.")
