"""One RTMP connection of the live server: reads, asks hooks, passes messages to its message streams, and ends.

What is done on a message stream is the business of `Publishing` and `Playing`. Path of a frame: `received` ->
`ServerSession.receive` -> the message itself in the list of events -> `Publishing.publish` -> `Stream.publish` ->
stream log -> fan-outs of the viewers' threads. Path of trouble: the viewer's Sender changes state -> input is paused
at SOFT_LIMIT (`send_state_changed`, under the Sender's lock), the drop policy thins -> the ledger -> one log line per
episode. Who else wants to know what happens, records for one, is an `Observer` of the hub.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import structlog

from flowctl.connection import Connection
from flowctl.core.flow.ledger import LedgerEntry
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.state import MessageClass
from flowctl.core.loop.sockets import acknowledge
from flowctl.core.text.addresses import address_key, address_of
from flowctl.errors import BusyError, LimitExceededError, RemoteProtocolError
from flowctl.live.access.request import TOO_SLOW, LiveRequest, Question, Refusal, RequestKind, Why
from flowctl.live.config import LiveConfig, Redirect
from flowctl.live.hub import Claim, Hub, Right
from flowctl.live.inputrate import FULL_BYTES, SINGLE_MESSAGES, InputRate, weight_of
from flowctl.live.namebook import Owner
from flowctl.live.observer import Observer
from flowctl.live.oversight.signals import PARAMETER
from flowctl.live.playing import Playing, PlayWords, ViewerSession, Wants, refusal_word, track_of
from flowctl.live.publishing import Publishing, PublishWords
from flowctl.live.records.ingest import Ingest
from flowctl.live.settings.levels import Role
from flowctl.live.stream import Stream
from flowctl.log import redact_text
from flowctl.reasons import CloseReason
from flowctl.receiver import DONE, InputResult, InputVerdict
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp import events as rtmp_events
from flowctl.wire.rtmp.handshake import is_stun
from flowctl.wire.rtmp.messages import Acknowledgement
from flowctl.wire.rtmp.server.session import ServerSession
from flowctl.wire.rtmp.states import ConnectionState, StreamState
from flowctl.wire.rtmp.url import DEFAULT_APP, parse_url
from flowctl.wire.rtmp.wire import Message

_log: Final = structlog.get_logger("flowctl.live")
_RATE_LIMIT: Final = "messages_per_second"
_NOTHING: Final = memoryview(b"")
_REFUSED_S: Final = 2.0
"""Time in which a client whose publish was refused may ask for another name. Most leave by themselves; librtmp, like
OBS, does not know the code for a bad name and waits for our close, which of SRS and nginx-rtmp comes at once."""
MESSAGES_PER_TURN: Final = 256
"""Messages of one connection that are treated before the others on its thread get their turn: some 1.5 ms of work. A
publisher of tiny messages is slowed down by that, others are not."""
_SMALLEST_PIECE: Final = 512
_LARGEST_PIECE: Final = 4096
"""Octets parsed at a time. A message takes one octet at least and some 6 us, so the first piece of a flood costs 25 ms
at most and the following ones 3 ms, while a publisher of 10 Mbit/s pays 300 calls per second, 0.3 % of a core."""
_GROWTH_DIVISOR: Final = 4
"""Part of a turn's messages, one in this many, up to which a piece of input lets the next one be twice as large."""
_FOREIGN: Final = frozenset({"not-rtmp", "tls-on-plain-port"})
_WEB_OPENINGS: Final = (b"\x16", b"\x80\x46\x01", b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"DELE", b"PATC")
"""First bytes of a browser, wherever a page sends it: TLS, the hello of SSL 2 (ICE over ``ssltcp``), or a request."""
_NODES: Final = re.compile(r"flowctl (follow|relay)\b")
"""What flowctl's servers call themselves where they play or publish at another one."""
_HOOK: Final = "hook"
_DECIDING: Final = frozenset({StreamState.PUBLISH_DECIDING, StreamState.PLAY_DECIDING})
_WATCHING: Final = frozenset({StreamState.PLAYING, StreamState.WAITING})
_StreamRequest = rtmp_events.PublishRequested | rtmp_events.PlayRequested
_Request = rtmp_events.ConnectRequested | _StreamRequest
_Step = Callable[[memoryview, float], list[rtmp_events.ServerEvent]]
_NO_PUBLISHING: Final[dict[int, Publishing]] = {}
"""Publications of a peer that has none, as nearly all peers: shared, and never changed."""
_NAME_WAIT_S: Final = 3.0
"""Time that a publish waits for its name where that is decided elsewhere; then it is refused: two publishers under one
name would be worse."""
_GRACEFUL: Final = frozenset({CloseReason.FINISHED, CloseReason.KICKED, CloseReason.BANNED, CloseReason.SHUTDOWN})


class _Asked(NamedTuple):
    """A connect, publish or play that a hook decides, or a publish whose name is asked for, until when."""

    question: Question | Claim
    event: _Request
    request: LiveRequest
    until: float
    of_face: bool = False  # whether it is asked about the set of which the stream would be a rendition


_KINDS: Final[dict[type[_Request], RequestKind]] = {
    rtmp_events.ConnectRequested: "connect",
    rtmp_events.PublishRequested: "publish",
    rtmp_events.PlayRequested: "play",
}


class RtmpPlayWords(PlayWords):
    """Messages of a play to its player in RTMP; none to a message stream that has been closed."""

    __slots__ = ("_rtmp", "stream_id")

    def __init__(self, rtmp: ServerSession, stream_id: int) -> None:
        self._rtmp = rtmp
        self.stream_id = stream_id

    def begin(self, *, send: bool) -> None:
        match self._rtmp.stream_state(self.stream_id):
            case StreamState.PLAY_DECIDING:
                self._rtmp.accept_play(self.stream_id)
            case StreamState.WAITING:
                self._rtmp.publish_notify(self.stream_id, send=send)

    def wait(self, *, send: bool) -> None:
        match self._rtmp.stream_state(self.stream_id):
            case StreamState.PLAY_DECIDING:
                self._rtmp.play_waiting(self.stream_id)
            case StreamState.PLAYING:
                self._rtmp.unpublish_notify(self.stream_id, send=send)

    def repeat(self) -> None:
        if self._rtmp.stream_state(self.stream_id) in _WATCHING:
            self._rtmp.repeat_notify(self.stream_id)

    def fail(self, why: str) -> None:
        self._rtmp.failure_status(self.stream_id, why)


class RtmpPublishWords(PublishWords):
    """Messages of a publication to its publisher in RTMP."""

    __slots__ = ("_rtmp", "_stream_id")

    def __init__(self, rtmp: ServerSession, stream_id: int) -> None:
        self._rtmp = rtmp
        self._stream_id = stream_id

    def fail(self, why: str) -> None:
        self._rtmp.failure_status(self._stream_id, why)

    def data(self, name: str, values: dict[str, Any]) -> None:
        self._rtmp.send_data(self._stream_id, name, values)


class LiveSession(ViewerSession):
    """Server side of one RTMP connection."""

    __slots__ = (
        "_application",
        "_connected",
        "_control_waited",
        "_leaves_at",
        "_message_bytes",
        "_node",
        "_piece_bytes",
        "_publishing",
        "_question",
        "_rate",
        "_rtmp",
        "_seen_bytes",
        "_user",
        "_words",
        "ingest",
    )

    def __init__(self, hub: Hub, now: float) -> None:
        super().__init__(hub)
        self._rtmp = ServerSession(hub.config.rtmp, now=now)
        self._publishing = _NO_PUBLISHING  # by message stream id
        self._seen_bytes, self._control_waited = 0, False  # at the last look at the time: sent, and what waited
        self._leaves_at: float | None = None  # when it is closed, unless it publishes or plays: its publish was refused
        self._piece_bytes = _SMALLEST_PIECE
        self._question: _Asked | None = None  # a publish or play that a hook decides
        self._message_bytes = 0  # read, of messages that are not counted yet: parts of an aggregate are later
        self._rate: InputRate | None = None  # made for a peer that sends several messages at a time
        self._user: str | None = None  # who logged in
        self._words: RtmpPlayWords | None = None  # words of its play, or its last one
        self.ingest: Ingest | None = None  # how well its media comes in. None: it has never published.
        self._application = ""  # that it was let into
        self._node = False  # the peer is another server
        self._connected: LiveRequest | None = None  # the request that let it in. None: no hook is told of its end

    def behaves(self) -> bool:
        return bool(self._publishing) or super().behaves()

    @property
    def protocol(self) -> str:
        return "rtmp"

    @property
    def stray(self) -> str:
        return super().stray or ("" if self._rtmp.command_total else "nothing was asked for")

    def streams(self) -> list[str]:
        names = [publishing.stream.name for publishing in tuple(self._publishing.values())]
        return [*names, *super().streams()]

    @property
    def role(self) -> str:
        return "publisher" if self._publishing else super().role

    @property
    def is_node(self) -> bool:
        return self._node

    @property
    def asked_count(self) -> tuple[int, int]:
        return self._rtmp.command_total, self._rtmp.control_total

    def record_columns(self, now: float) -> dict[str, Any]:
        columns = super().record_columns(now) | ({} if self.ingest is None else self.ingest.columns(now))
        return columns | {"read_bytes": self._rtmp.last_acknowledged_bytes or None}

    def query_of(self, stream: Stream) -> Mapping[str, str]:
        """Return with what the stream was asked for, to be published. Any thread."""
        return next((item.query for item in tuple(self._publishing.values()) if item.stream is stream), {})

    # -- what the hub asks for

    def on_thread(self, callback: Callable[..., Any], *args: Any) -> None:
        super().on_thread(self._answer, callback, args)

    def _answer(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        callback(*args)
        self._send_replies()

    def stream_ended(self, stream: Stream) -> None:
        super().stream_ended(stream)
        self._arm()

    def stream_published(self, stream: Stream) -> None:
        super().stream_published(stream)
        self._arm()

    def publish_replaced(self, stream: Stream) -> None:
        for stream_id, publishing in tuple(self._publishing.items()):
            if publishing.stream is stream:
                self._rtmp.reject_publish(stream_id, description="Another publisher has taken the stream.")
                self._end_publishing(stream_id, grace=False, why="replaced by another publisher")
        self._send_replies()
        self.connection.close_after_flush("replaced by another publisher", reason=CloseReason.KICKED)

    def ask_to_reconnect(self) -> None:
        """Ask the client to connect again, if it understands that: the server is going down."""
        if not self._rtmp.closed:
            self._rtmp.request_reconnect()

    # -- input

    def opened(self) -> None:
        for observer in self._hub.observers:
            observer.opened(self.connection)
        self._arm()

    def received(self, data: memoryview) -> InputResult:
        """Take input, at most `MESSAGES_PER_TURN` and for one turn: unfinished messages are the wire session's.

        How many messages a piece holds shows when it is parsed, so pieces are small, and smaller while messages are.
        """
        most, size, rtmp = MESSAGES_PER_TURN, len(data), self._rtmp
        if self._playing is None and not self._publishing:
            # A peer that leaves Nagle's algorithm on, as FFmpeg and librtmp do, keeps each small write until the one
            # before is acknowledged, for which the kernel takes 40 ms where no answer is due.
            acknowledge(self.connection.core.host.sock)
        done = count = 0
        backlog = rtmp.backlog
        if backlog:  # what came before goes first
            count = self._take(lambda _, now: rtmp.resume(now))
            backlog = rtmp.backlog
        while done < size and count < most and not (backlog or ((done or count) and self.connection.turn_over())):
            end = min(done + self._piece_bytes, size)
            # Parts of an aggregate are events and no messages; what is sent to no publication is no event.
            found = max(self._take(rtmp.receive, data[done:end], lazy=True), rtmp.piece_messages)
            count += found
            few = found * _GROWTH_DIVISOR <= most
            self._piece_bytes = min(self._piece_bytes * 2, _LARGEST_PIECE) if few else _SMALLEST_PIECE
            done, backlog = end, rtmp.backlog
            if self.connection.ended is not None:
                return DONE
        self._message_bytes += done
        if count > SINGLE_MESSAGES or self._rate is not None:
            self._count_input(weight_of(count, self._message_bytes))
        if count:
            self._message_bytes = max(0, self._message_bytes - count * FULL_BYTES) if backlog else 0
        if done == size and not backlog:
            return DONE
        self.connection.receiver.trigger_input()  # at the tail: the others on this thread come first
        return InputResult(InputVerdict.BLOCK, done)

    def _count_input(self, messages: float) -> None:
        """Count messages, by `weight_of`, against `messages_per_second`; hold input while it is too many."""
        maximum = self._config.rtmp.limits.messages_per_second
        if not maximum:
            return
        connection, now = self.connection, self.connection.now()
        if self._rate is None:
            self._rate = InputRate(_RATE_LIMIT, maximum, connection.work.limits.cut_after_s, now)
        overrun = self._rate.count(messages, now)
        if overrun is not None:
            connection.core.slow(overrun, "messages per second")
            self._arm()

    def received_control(self, data: memoryview) -> None:
        """Take input while the output is overloaded: protocol control only, the rest is held."""
        self._take(self._receive_control, data, resume=False)

    def _receive_control(self, data: memoryview, now: float) -> list[rtmp_events.ServerEvent]:
        return self._rtmp.receive(data, now, control_only=True)

    def input_resumed(self) -> None:
        if not (self._rtmp.closed or self.connection.receiver.paused):
            self._take(lambda _, now: self._rtmp.resume(now))

    def timer(self, now: float) -> None:
        if self._playing is not None:
            self._playing.check_quiet(now)
        if self._question is not None and now >= self._question.until:
            self._answered(self._question.question, TOO_SLOW, "decide_s")
            self._send_replies()
        if self._leaves_at is not None and now >= self._leaves_at:
            self._leaves_at = None
            if not (self._publishing or self._playing or self._question):
                self.connection.close_after_flush("refused, and asked for nothing else")
        if self._playing is not None:
            self._check(self._playing.check_wait, now)
        if self.connection.receiver.paused:
            # A tick would let out what is held. Whether the peer is there is the Sender's to find out meanwhile.
            self._arm()
        else:
            self._tick(now)
        if self._publishing:
            for publishing in tuple(self._publishing.values()):
                self._check(publishing.check_silence, now)
            self._arm()

    def _tick(self, now: float) -> None:
        """Look at limits of time; a ping that waited behind what the peer still takes is answered later."""
        sender = self.connection.sender
        sent_bytes, waits = sender.account(rows=False).bytes_sent, sender.control_waits
        if (waits or self._control_waited) and sent_bytes != self._seen_bytes:
            self._rtmp.ping_waits(now)
        self._seen_bytes, self._control_waited = sent_bytes, waits
        self._take(lambda _, now: self._rtmp.tick(now))

    def _check(self, check: Callable[[float], None], now: float) -> None:
        try:
            check(now)
        except LimitExceededError as error:
            self._send_replies()
            self._ended_by(error)
            raise

    def _take(self, step: _Step, data: memoryview = _NOTHING, *, resume: bool = True, lazy: bool = False) -> int:
        """Run a step of the wire session and treat its events, until none are held back; return their number.

        Where that takes longer than a turn of this connection, the rest is for the next one.

        With `lazy` the timer stays as it is where nothing but media came, which puts off what is due and nothing else:
        it strikes too early then, once in several hundred messages, and is set anew.
        """
        connection = self.connection
        now, count = connection.now(), 0
        try:
            events = step(data, now)
            while events or (resume and self._rtmp.backlog):
                count += len(events)
                for event in events:
                    if type(event) is Message:
                        if (publishing := self._publishing.get(event.msid)) is not None:
                            publishing.publish(event, now)
                    else:
                        lazy = False
                        for observer in self._hub.observers:
                            _tell(observer, connection, event, now)
                        self._treat(event, now)
                if not (resume and self._rtmp.backlog) or connection.ended is not None:
                    break
                if connection.turn_over():
                    connection.receiver.trigger_input()
                    break
                events = self._rtmp.resume(now)
        except RemoteProtocolError as error:
            if isinstance(error, LimitExceededError):
                self._ended_by(error)
            elif error.code in _FOREIGN and (bytes(data[:4]).startswith(_WEB_OPENINGS) or is_stun(bytes(data[:10]))):
                self.harmless = True
            raise
        finally:
            self._send_replies()
        if not (lazy and count):
            self._arm()
        return count

    def _send_replies(self) -> None:
        data = self._rtmp.data_to_send()
        if data:
            self.connection.sender.send(data, MessageClass.CONTROL)

    def _treat(self, event: rtmp_events.ServerEvent, now: float) -> None:
        """Answer one event of the wire session; those that only inform need nothing."""
        match event:
            case rtmp_events.ConnectRequested():
                self.user_agent = redact_text(event.flash_ver)
                self._node = _NODES.search(self.user_agent) is not None
                self._user = event.user
                self._ask(event, now)
            case rtmp_events.ConnectRefused():
                refused = event.reason == "auth-failed"
                self.refusal = "auth" if refused else None
                self.harmless = not refused  # it was challenged: with Adobe's, each client is refused twice
                reason = CloseReason.AUTH_REFUSED if refused else CloseReason.FINISHED
                self._send_replies()
                self.connection.close_after_flush(f"authentication: {event.reason}", reason=reason)
            case rtmp_events.PublishRequested() | rtmp_events.PlayRequested():
                if self._decides(event):  # else it was withdrawn in the same breath, by a deleteStream
                    self._ask(event, now)
            case rtmp_events.MetadataReceived():
                if (publishing := self._publishing.get(event.message.msid)) is not None:
                    publishing.publish(event.message, now)
            case rtmp_events.StreamClosed():
                self._stream_closed(event)
            case rtmp_events.PauseRequested() if playing := self._playing_on(event.stream_id):
                playing.pause(pause=event.pause)
            case rtmp_events.ReceiveAudio() if playing := self._playing_on(event.stream_id):
                playing.mute(audio=event.enabled)
            case rtmp_events.ReceiveVideo() if playing := self._playing_on(event.stream_id):
                playing.mute(video=event.enabled)
            case rtmp_events.Acknowledged():
                self._acknowledged(event.sequence_number)
            case rtmp_events.Ignored():
                self._ignored(event, now)

    def _playing_on(self, stream_id: int) -> Playing | None:
        words = self._words
        return self._playing if words is not None and words.stream_id == stream_id else None

    def _ignored(self, event: rtmp_events.Ignored, now: float) -> None:
        """Log messages that are ignored, once per kind and connection; at debug level, since real clients are odd."""
        if event.what == "bad-name":
            self._leaves_at = now + _REFUSED_S
        peer = address_of(self.connection.peer)
        _log.debug("message ignored", peer=peer, what=event.what, detail=redact_text(event.detail))

    # -- hooks

    def _ask(self, event: _Request, now: float) -> None:
        """Connect, publish or play as `event` asks for, if the gate allows it."""
        request = LiveRequest(
            kind=_KINDS[type(event)],
            connection=self.number,
            peer=self.peer,
            url=event.url,
            connected=self._application,
            user=self._user,
            user_agent=self.user_agent,
            page_url=event.page_url if isinstance(event, rtmp_events.ConnectRequested) else "",
            face=self._hub.renditions.face_of(event.url.path)
            if isinstance(event, rtmp_events.PublishRequested)
            else "",
        )
        gate = self._hub.gate
        answer = gate.ask(request, lambda question, refusal: self.on_thread(self._answered, question, refusal))
        if answer is None:
            self._start(event, now, request)
        elif isinstance(answer, Refusal):
            self._refuse(event, request, answer, "access")
        else:
            self._question = _Asked(answer, event, request, now + gate.decide_s)
            # The wire session holds what was read already, but no more than `paused_input_bytes`.
            self.connection.receiver.pause(_HOOK, "a hook decides")

    def _answered(self, question: Question | Claim, refusal: Refusal | None, limit: str | None = None) -> None:
        asked = self._question
        if asked is None or asked.question is not question or self._rtmp.closed:
            return
        self._withdraw()
        event, now = asked.event, self.connection.now()
        if not self._decides(event):
            return
        if asked.of_face and isinstance(event, rtmp_events.PublishRequested):
            self._claim(event, now, asked.request, refusal)
        elif refusal is None:
            self._start(event, now, asked.request)
        else:
            if limit is not None:
                self._hub.limit_hit(limit)
            self._refuse(event, asked.request, refusal, "hook" if isinstance(question, Question) else "name taken")
        self._arm()

    def _decides(self, event: _Request) -> bool:
        """Return whether the client still wants what it asked for."""
        if isinstance(event, rtmp_events.ConnectRequested):
            return self._rtmp.state is ConnectionState.DECIDING
        return self._rtmp.stream_state(event.stream_id) in _DECIDING

    def _refuse(self, event: _Request, request: LiveRequest, refusal: Refusal, by: str) -> None:
        """Refuse a request, and log it; `by`: the rule or hook that forbids it, for records."""
        self.refusal = refusal_word(refusal.why, by)
        kind, why = _KINDS[type(event)], refusal.why
        _log.info(f"{kind} refused", **self._fields(event.url.path), reason=refusal.text, why=why.name.lower())
        if why.denies:
            for observer in self._hub.observers:
                observer.denied(self.connection, request, self.connection.now(), guess=refusal.guess)
        else:
            self.harmless = True
        self._say_no(event, refusal)

    def _say_no(self, event: _Request, refusal: Refusal) -> None:
        if isinstance(event, rtmp_events.ConnectRequested):
            self._rtmp.reject_connect(refusal.text)
            self._send_replies()
            # That we could not decide is no evidence against the client.
            reason = CloseReason.FINISHED if refusal.why is Why.UNAVAILABLE else CloseReason.AUTH_REFUSED
            self.connection.close_after_flush("connect refused", reason=reason)
        elif isinstance(event, rtmp_events.PublishRequested):
            code = commands.PUBLISH_UNAUTHORIZED if refusal.why is Why.UNAUTHORIZED else commands.PUBLISH_BAD_NAME
            self._rtmp.reject_publish(event.stream_id, code, refusal.text)
            self._leaves_at = self.connection.now() + _REFUSED_S
        else:
            code = commands.PLAY_NOT_FOUND if refusal.why is Why.NOT_FOUND else commands.PLAY_FAILED
            self._rtmp.reject_play(event.stream_id, code, refusal.text)

    def _withdraw(self) -> None:
        asked, self._question = self._question, None
        if asked is not None:
            asked.question.cancel()
            self.connection.receiver.resume(_HOOK)

    def _start(self, event: _Request, now: float, request: LiveRequest) -> None:
        if isinstance(event, rtmp_events.ConnectRequested):
            self._rtmp.accept_connect()
            self.harmless = True
            self._application = request.stream.partition("/")[0]
            if self._hub.gate.tells_of("connect"):
                self._connected = request
            self._hub.gate.note_begin(request)
            return
        if isinstance(event, rtmp_events.PlayRequested):
            self._start_playing(event, request)
            return
        try:
            self._hub.gate.check_news(request)
        except LimitExceededError as error:
            self._say_no(event, Refusal(str(error), Why.UNAVAILABLE))
            self._refused("publish refused", event.url.path, error)
            return
        gate = self._hub.gate
        answer = gate.ask_face(request, lambda question, refusal: self.on_thread(self._answered, question, refusal))
        if isinstance(answer, Question):
            self._question = _Asked(answer, event, request, now + gate.decide_s, of_face=True)
            self.connection.receiver.pause(_HOOK, "a hook decides")
        else:
            self._claim(event, now, request, answer)

    def _claim(
        self, event: rtmp_events.PublishRequested, now: float, request: LiveRequest, alone: Refusal | None
    ) -> None:
        """Publish, once the name is given to us where others decide that; `alone`: why not as a rendition of a set."""
        if alone is not None:
            _log.info(
                "published alone", **self._fields(event.url.path), no_rendition_of=request.face, reason=alone.text
            )
            request = dataclasses.replace(request, face="")
        names = self._hub.names
        if names is None:
            self._start_publishing(event, now, request)
            return
        claim = names.claim(
            event.url.path,
            self.number,
            self._owner(request),
            lambda refusal: self.on_thread(self._named, event, refusal and Refusal(refusal)),
        )
        self._question = _Asked(claim, event, request, now + _NAME_WAIT_S)
        self.connection.receiver.pause(_HOOK, "a name is asked for")

    def _named(self, event: rtmp_events.PublishRequested, refusal: Refusal | None) -> None:
        """Publish, if the name was given to us and is still wanted; who withdrew has given it back."""
        asked = self._question
        if asked is None or asked.event is not event:
            return
        deciding = not self._rtmp.closed and self._rtmp.stream_state(event.stream_id) in _DECIDING
        if refusal is not None or not deciding:
            self._answered(asked.question, refusal)
            return
        self._question = None
        self.connection.receiver.resume(_HOOK)
        self._start_publishing(event, self.connection.now(), asked.request)
        self._arm()

    def _owner(self, request: LiveRequest) -> Owner:
        command_of = self._hub.gate.passes.source(request)
        if command_of is not None:
            return Owner(f"command of {command_of}")  # what it publishes counts for no address
        identity = self._hub.gate.identity(request)
        query = request.query if identity is None else {"token": identity}
        return Owner.of(address_key(self.peer[0]), self._user, query)

    # -- publishing

    def _start_publishing(self, event: rtmp_events.PublishRequested, now: float, request: LiveRequest) -> None:
        name, names = event.url.path, self._hub.names
        try:
            right = Right.ASKS if names is None else names.right(name, self.number)
            if self._hub.gate.passes.source(request) is not None:
                right = Right.GRANTED
            stream = self._hub.publish(name, self, self._owner(request), right=right, face=request.face)
        except (BusyError, LimitExceededError) as error:
            if names is not None:
                names.left(name, self.number, grace=False)
            self._not_published(event, error)
            return
        if not self._publishing:
            self._publishing = {}
        self.ingest = ingest = self.ingest or Ingest()
        words = RtmpPublishWords(self._rtmp, event.stream_id)
        publishing = Publishing(self, self.connection, words, self._hub, stream, now, ingest)
        publishing.query = request.query
        self._publishing[event.stream_id] = publishing
        if self._hub.config.has_levels:
            self.put_settings()
        self._rtmp.accept_publish(event.stream_id)
        self.connection.gather_input(wanted=True)
        asked = event.query.get(PARAMETER)
        if asked is not None:
            publishing.signal(asked)
        standby = publishing.standby
        _log.info("publish started", **self._fields(name), kind=event.kind, standby=standby, agent=self.user_agent)
        for observer in self._hub.observers:
            observer.publish_started(self.connection, name, now, standby=standby)
        if self._hub.gate.tells_of("publish"):
            publishing.request = request
            self._hub.gate.note_begin(request)
        if names is not None:
            names.entered(name, self.number)

    def _not_published(self, event: rtmp_events.PublishRequested, error: BusyError | LimitExceededError) -> None:
        name = event.url.path
        self._say_no(event, Refusal(str(error)))
        self.refusal = "name taken"
        if isinstance(error, LimitExceededError):
            self._refused("publish refused", name, error)
            return
        has_it = self._hub.publisher_of(name)  # for the operator; a stranger is not told
        by = None if has_it is None else address_of(has_it)
        _log.info("publish refused", **self._fields(name), reason=str(error), publisher=by)

    def _end_publishing(self, stream_id: int, *, grace: bool, why: str) -> None:
        publishing = self._publishing.pop(stream_id)
        self.put_settings()
        self.connection.gather_input(bool(self._publishing))
        publishing.end(grace=grace, why=why)

    # -- playing

    def _acknowledged(self, sequence_number: int) -> None:
        if self._playing is not None:
            sent = self.connection.sender.account(rows=False).bytes_sent
            self.connection.sender.peer_acknowledged(sent - Acknowledgement(sequence_number).behind(sent))

    def _start_playing(self, event: rtmp_events.PlayRequested, request: LiveRequest) -> None:
        name = event.url.path
        gate = self._hub.gate
        self._node |= gate.access(request).is_edge(request) or gate.passes.source(request) is not None
        if self._playing is not None:
            self.refusal = "plays already"
            self._rtmp.reject_play(
                event.stream_id, commands.PLAY_FAILED, "One connection plays one stream; close the other one first."
            )
            return
        if not self._hub.config.at(name, Role.VIEWER).players_may_wait and not self._hub.is_published(name):
            self.refusal = "no stream"
            self._rtmp.reject_play(event.stream_id, description=f"Nobody publishes {name}.")
            _log.info("play refused", **self._fields(name), reason="nobody publishes it")
            return
        if self._redirect(event):
            return
        try:
            stream = self._hub.view(name, self)
            try:
                wire = stream.join(event.stream_id)
            except LimitExceededError:
                self._hub.leave(stream, self)
                raise
        except LimitExceededError as error:
            self._rtmp.reject_play(event.stream_id, commands.PLAY_FAILED, str(error))
            self._refused("play refused", name, error)
            return
        self._words = RtmpPlayWords(self._rtmp, event.stream_id)
        tracks = bool(self._rtmp.client_caps_ex & commands.CAPS_MULTITRACK) or gate.passes.source(request) is not None
        wants = Wants(tracks=tracks, track=track_of(event.query), codecs=self._rtmp.client_codecs)
        playing = self._playing = Playing(self, self._words, self._hub, stream, wire, wants)
        place = playing.begin()
        self._send_replies()  # they go first: the log follows behind them
        playing.follow(place)
        _log.info("play started", **self._fields(name), waiting=playing.waiting, agent=self.user_agent)
        if self._hub.gate.tells_of("play"):
            self._played = request
            self._hub.gate.note_begin(request)

    def _redirect(self, event: rtmp_events.PlayRequested) -> bool:
        """Send a player to an edge, if there is one for it; another server is none."""
        url, hub = event.url, self._hub
        if self._node or hub.edge_for is None or hub.config.redirect is not Redirect.ALL:
            return False
        scheme = "rtmps" if self.connection.secure or url.scheme == "rtmps" else "rtmp"
        base = hub.edge_for(scheme, None, address_key(self.peer[0]))
        if base is None:
            return False
        edge = parse_url(base)
        target = dataclasses.replace(url, scheme=scheme, host=edge.host, port=edge.port)
        self._rtmp.redirect_play(event.stream_id, target)
        self._send_replies()
        _log.info("viewer redirected", **self._fields(url.path), to=base)
        self.refusal = "redirected"
        self.connection.close_after_flush("redirected")
        return True

    def put_settings(self, limits: Limits | None = None, *, changed: bool = False) -> None:
        super().put_settings(limits, changed=changed)
        if changed:
            for publishing in self._publishing.values():
                publishing.settings_changed(self.connection.now())
            self._arm()

    @property
    def _settings(self) -> LiveConfig:
        """Return the settings of its play, or of its first publication."""
        first = next(iter(self._publishing.values()), None)
        if first is None or self._playing is not None:
            return super()._settings
        return self._hub.config.at(first.stream.name, Role.PUBLISHER)

    def _stream_closed(self, event: rtmp_events.StreamClosed) -> None:
        asked = None if self._question is None else self._question.event
        if not isinstance(asked, rtmp_events.ConnectRequested | None) and asked.stream_id == event.stream_id:
            self._withdraw()
        if event.stream_id in self._publishing:
            self._end_publishing(event.stream_id, grace=False, why=event.reason)
        if self._playing_on(event.stream_id) is not None:
            self._end_playing(event.reason)

    # -- flow control and the end

    def ledger_entry(self, entry: LedgerEntry) -> None:
        super().ledger_entry(entry)
        self._arm()

    def last_words(self, reason: CloseReason, details: str) -> bytes:
        """Tell who plays or publishes that it is kicked, and why."""
        if reason is not CloseReason.KICKED or self._rtmp.closed or self.is_node:
            return b""  # a server takes up again what it was cut off from, not what it was told has ended
        told = [*self._publishing, *([self._words.stream_id] if self._playing and self._words else [])]
        for stream_id in told:
            self._rtmp.failure_status(stream_id, f"{reason.value} {details}")
        return self._rtmp.data_to_send()

    def closed(self, reason: CloseReason, details: str) -> None:
        self._withdraw()
        for stream_id in tuple(self._publishing):
            self._end_publishing(stream_id, grace=reason not in _GRACEFUL, why=reason.value)
        super().closed(reason, details)
        if self._connected is not None:
            details = redact_text(details)
            why = f"{reason.value}: {details}" if details else reason.value
            sent, received = self.connection.sender.account(rows=False).bytes_sent, self._rtmp.bytes_received
            self._hub.gate.note_end(self._connected, why, sent_bytes=sent, received_bytes=received)

    def _arm(self) -> None:
        connection = self.connection
        if connection.ended is not None:
            return
        times = [] if connection.receiver.paused else [self._rtmp.next_deadline(connection.now())]
        if self._playing is not None:
            times += [self._playing.waits_until, self._playing.quiet_at]
        if self._question is not None:
            times.append(self._question.until)
        if self._leaves_at is not None:
            times.append(self._leaves_at)
        if self._publishing:
            times += [publishing.look_at for publishing in self._publishing.values()]
        connection.set_timer(min((when for when in times if when is not None), default=None))


def _tell(observer: Observer, connection: Connection, event: rtmp_events.ServerEvent, now: float) -> None:
    match event:
        case rtmp_events.HandshakeDone():
            observer.greeted(connection, now, style=event.style)
        case rtmp_events.ConnectRequested():
            named = event.url.app != DEFAULT_APP
            observer.connected(connection, now, agent=redact_text(event.flash_ver), app_named=named)
        case rtmp_events.ConnectRefused():
            observer.command(connection, "connect", {"refused": event.reason}, now)
            if event.reason == "auth-failed":
                observer.login_failed(connection, now)
        case rtmp_events.PublishRequested() | rtmp_events.PlayRequested():
            observer.asked(connection, _KINDS[type(event)], event.url.path, now)
        case rtmp_events.PauseRequested():
            observer.command(connection, "pause" if event.pause else "unpause", {}, now)
        case rtmp_events.SeekRefused():
            observer.command(connection, "seek", {}, now)
        case rtmp_events.ReceiveAudio():
            observer.command(connection, "receiveAudio", {}, now)
        case rtmp_events.ReceiveVideo():
            observer.command(connection, "receiveVideo", {}, now)
        case rtmp_events.StreamClosed():
            observer.command(connection, event.reason, {}, now)
        case rtmp_events.Ignored():  # once per kind and connection
            observer.command(connection, "ignored", {"what": event.what}, now)
