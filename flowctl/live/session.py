"""One RTMP connection of the live server: the wire session's events become publications, players and flow control.

Path of a frame: `received` -> `ServerSession.receive` -> the message itself in the list of events -> `Stream.publish`
-> stream log -> fan-outs of the viewers' threads. Path of trouble: the viewer's Sender changes state -> input is
paused at SOFT_LIMIT (`send_state_changed`, under the Sender's lock), the drop policy thins -> the ledger -> one log
line per episode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import structlog

from flowctl.addresses import address_key
from flowctl.errors import BusyError, LimitExceededError, RemoteProtocolError
from flowctl.fanout.following import FollowPlace
from flowctl.flow.counts import NO_COUNTS, Counts, total
from flowctl.flow.ledger import LedgerEntry, LedgerKind
from flowctl.flow.limits import Limits
from flowctl.flow.policy import LIVE_POLICIES, DropPolicy
from flowctl.flow.state import MessageClass, SendState, StateChange
from flowctl.judging.shares import ViewerShares
from flowctl.live.config import LiveConfig
from flowctl.live.hooks import TOO_SLOW, Kind, LiveRequest, Question
from flowctl.live.hub import Hub
from flowctl.live.inputrate import SINGLE_MESSAGES, InputRate
from flowctl.live.muting import Muted
from flowctl.live.oversight.episodes import Episode
from flowctl.live.oversight.signals import EVENT_NAME, PARAMETER, message_values, publisher_settings
from flowctl.live.owner import Owner
from flowctl.live.roles import Playing, Publishing
from flowctl.live.statistics import EndedViewer, ViewerStatistics
from flowctl.live.stream import MEDIA_TYPES, StartPlace, Stream
from flowctl.log import redact_text
from flowctl.reasons import CloseReason, DropReason
from flowctl.receiver import DONE, InputResult, Verdict
from flowctl.rtmp import commands
from flowctl.rtmp import events as rtmp_events
from flowctl.rtmp.messages import Acknowledgement
from flowctl.rtmp.server.session import ServerSession
from flowctl.rtmp.server.states import StreamState
from flowctl.rtmp.wire import Message
from flowctl.server.totals import NO_FLOW, FlowTotals, totals_of
from flowctl.session import Session

_log: Final = structlog.get_logger("flowctl.live")
_FLOW: Final = "flow control"
_RATE: Final = "message rate"
_RATE_LIMIT: Final = "messages_per_second"
_NOTHING: Final = memoryview(b"")
_REFUSED_S: Final = 2.0
"""How long a client whose publish was refused may take to ask for another name. Most leave by themselves; librtmp, like
OBS, does not know the code for a bad name and waits for our close, which of SRS and nginx-rtmp comes at once."""
_SMALLEST_PIECE: Final = 512
_LARGEST_PIECE: Final = 4096
"""Octets parsed at a time. A message takes one octet at least and some 6 us, so the first piece of a flood costs 25 ms
at most and the following ones 3 ms, while a publisher of 10 Mbit/s pays 300 calls per second, 0.3 % of a core."""
_FEW: Final = 4
"""A piece of input with no more than this share of a turn's messages lets the next one be twice as large."""
_HOOK: Final = "hook"
_DECIDING: Final = frozenset({StreamState.PUBLISH_DECIDING, StreamState.PLAY_DECIDING})
_Request = rtmp_events.PublishRequested | rtmp_events.PlayRequested
_Step = Callable[[memoryview, float], list[rtmp_events.ServerEvent]]
_GRACEFUL: Final = frozenset({CloseReason.FINISHED, CloseReason.KICKED, CloseReason.BANNED, CloseReason.SHUTDOWN})


class _Asked(NamedTuple):
    """A publish or play that a hook decides, until when."""

    question: Question
    event: _Request
    request: LiveRequest
    until: float


class LiveSession(Session):
    """Server side of one RTMP connection.

    Args:
        hub: the streams.
        config: of the server.
        policy: what to drop for a slow viewer.
        now: time in seconds.
    """

    __slots__ = (
        "_config",
        "_episode",
        "_hub",
        "_leaves_at",
        "_limit_hit",
        "_piece_bytes",
        "_playing",
        "_policy",
        "_publishing",
        "_question",
        "_rate",
        "_rtmp",
        "_user",
        "_usual_target_ms",
        "user_agent",
    )

    def __init__(self, hub: Hub, config: LiveConfig, policy: DropPolicy, now: float) -> None:
        self._hub = hub
        self._config = config
        self._policy = policy
        self._rtmp = ServerSession(config.rtmp, now=now)
        self._publishing: dict[int, Publishing] | None = None  # by message stream id
        self._playing: Playing | None = None
        self._episode: Episode | None = None
        self._leaves_at: float | None = None  # when it is closed, unless it publishes or plays: its publish was refused
        self._limit_hit: str | None = None
        self._piece_bytes = _SMALLEST_PIECE
        self._question: _Asked | None = None  # a publish or play that a hook decides
        self._rate: InputRate | None = None  # made for who sends several messages at a time
        self._user: str | None = None  # who logged in
        self._usual_target_ms: int | None = None  # target delay of its Sender but for the stream that it plays
        self.user_agent = ""

    def behaves(self) -> bool:
        """Return whether it plays or publishes: what has not begun to in time, or breaks a limit, is ended anyway."""
        return self._playing is not None or bool(self._publishing)

    # -- what the hub asks for

    @property
    def peer(self) -> tuple[str, int]:
        """Address and port of the peer."""
        return self.connection.peer

    @property
    def number(self) -> int:
        """Number of the connection."""
        return self.connection.number

    def on_thread(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call on the connection's thread, soon; not at all once the connection is over."""
        self.connection.call_soon(self._answer, callback, args)

    def _answer(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        callback(*args)
        self._send_replies()

    def stream_ended(self, stream: Stream) -> None:
        """The publisher has gone for good; now the player waits."""
        playing = self._playing
        if playing is None or playing.stream is not stream or not stream.ended:
            return
        self._note_end(playing)
        self._wait_for_publisher(playing)
        self._arm()

    def _note_end(self, playing: Playing) -> None:
        """Let a player wait from now on; one that has left the log, paused, is told here, others by the log."""
        if self._rtmp.stream_state(playing.stream_id) is StreamState.PLAYING:
            self._rtmp.unpublish_notify(playing.stream_id, send=self.connection.place is None)

    def stream_published(self, stream: Stream) -> None:
        """The stream is published (again)."""
        playing = self._playing
        if playing is None or playing.stream is not stream or stream.ended:
            return
        playing.waits_until = None
        self._note_end(playing)  # where the stream was back before `stream_ended` ran: the log has told the player
        self._note_begin(playing)
        self._arm()

    def _note_begin(self, playing: Playing) -> None:
        """Let a player that waits play from now on; it is told as in `_note_end`."""
        if self._rtmp.stream_state(playing.stream_id) is StreamState.WAITING:
            self._rtmp.publish_notify(playing.stream_id, send=self.connection.place is None)

    def publish_replaced(self, stream: Stream) -> None:
        """Another publisher has taken the name: this one is told and closed."""
        for publishing in list((self._publishing or {}).values()):
            if publishing.stream is stream:
                self._rtmp.reject_publish(publishing.stream_id, description="Another publisher has taken the stream.")
                self._end_publishing(publishing, grace=False, why="replaced by another publisher")
        self._send_replies()
        self.connection.close_after_flush("replaced by another publisher", reason=CloseReason.KICKED)

    def ask_to_reconnect(self) -> None:
        """Ask the client to connect again, if it understands that: the server is going down."""
        if not self._rtmp.closed:
            self._rtmp.request_reconnect()

    def viewer_statistics(self) -> ViewerStatistics:
        """Return figures. Any thread."""
        connection = self.connection
        statistics, received = connection.sender.statistics(), connection.receiver.statistics()
        playing = self._playing  # may end meanwhile, on its own thread
        before = NO_FLOW if playing is None else playing.before
        return ViewerStatistics(
            number=connection.number,
            peer=connection.peer,
            user_agent=self.user_agent,
            state=statistics.state,
            why=connection.why(),
            sender=statistics,
            input_pauses=dict(received.pauses),
            connected_s=connection.now() - connection.opened_at,
            totals=totals_of(statistics, received) - before,
            viewer_delay_ms=connection.sender.sample_delay(),
            work_s=connection.work.work_s,
        )

    def _figures(self) -> FlowTotals:
        connection = self.connection
        return totals_of(connection.sender.statistics(), connection.receiver.statistics())

    def _dropped(self) -> Counts:
        """Return what was dropped for this viewer, for its episodes; not what it left itself."""
        dropped = self.connection.sender.statistics().dropped
        return total(counts for reason, counts in dropped.items() if reason is not DropReason.UNFOLLOWED)

    # -- input

    def opened(self) -> None:
        """Start the clock of the handshake."""
        self._arm()

    def received(self, data: memoryview) -> InputResult:
        """Take input, at most `messages_per_turn` and for one turn: unfinished messages are the wire session's.

        How many messages a piece holds shows when it is parsed, so pieces are small, and smaller while messages are.
        """
        most, size, rtmp = self._config.messages_per_turn, len(data), self._rtmp
        done = count = 0
        if rtmp.backlog:  # what came before goes first
            count = self._take(lambda _, now: rtmp.resume(now))
        while done < size and count < most and not (rtmp.backlog or self.connection.turn_over()):
            end = min(done + self._piece_bytes, size)
            # Parts of an aggregate are events and no messages; what is sent to no publication is no event.
            found = max(self._take(rtmp.receive, data[done:end], lazy=True), rtmp.piece_messages)
            count += found
            few = found * _FEW <= most
            self._piece_bytes = min(self._piece_bytes * 2, _LARGEST_PIECE) if few else _SMALLEST_PIECE
            done = end
            if self.connection.ended is not None:
                return DONE
        if count > SINGLE_MESSAGES or self._rate is not None:
            self._count_input(count)
        if done == size and not rtmp.backlog:
            return DONE
        self.connection.receiver.trigger_input()  # at the tail: the others on this thread come first
        return InputResult(Verdict.BLOCK, done)

    def _count_input(self, messages: int) -> None:
        """Count messages against `messages_per_second`, and hold input while there are too many."""
        maximum = self._config.rtmp.limits.messages_per_second
        if not maximum:
            return
        connection, now = self.connection, self.connection.now()
        rate = self._rate = self._rate or InputRate(maximum, now)
        if rate.count(messages, now):
            self._rate_exceeded(messages, maximum)
        if rate.resumes_at is not None:
            connection.receiver.pause(_RATE, "messages per second")  # too often for the ledger
            self._arm()

    def _rate_exceeded(self, messages: int, maximum: float) -> None:
        """Count and log that an episode of too many messages begins with `messages` read at once."""
        self._hub.limit_hit(_RATE_LIMIT)
        peer = f"{self.peer[0]}:{self.peer[1]}"
        _log.warning("input slowed", peer=peer, connection=self.number, limit=_RATE_LIMIT, maximum=maximum)

    def work_exceeded(self, error: LimitExceededError, *, ends: bool) -> None:
        """Count and log that an episode begins in which this peer takes too much of the thread, or note its end."""
        if ends:
            self._limit_hit = error.limit
            return
        self._hub.limit_hit(error.limit)
        peer, work_s = f"{self.peer[0]}:{self.peer[1]}", round(self.connection.work.work_s, 3)
        fields = {"limit": error.limit, "value": round(error.value, 3), "maximum": error.maximum, "work_s": work_s}
        _log.warning("input slowed", peer=peer, connection=self.number, **fields)

    def received_control(self, data: memoryview) -> None:
        """Take input while the output is overloaded: protocol control only, the rest is held."""
        self._take(self._receive_control, data, resume=False)

    def _receive_control(self, data: memoryview, now: float) -> list[rtmp_events.ServerEvent]:
        return self._rtmp.receive(data, now, control_only=True)

    def input_resumed(self) -> None:
        """Take what was held while the output was overloaded."""
        if not (self._rtmp.closed or self.connection.receiver.paused):
            self._take(lambda _, now: self._rtmp.resume(now))

    def timer(self, now: float) -> None:
        """Look at time limits, pings, and the ends of waits and episodes."""
        playing, episode = self._playing, self._episode
        if episode is not None:
            episode.check(now)
        if self._question is not None and now >= self._question.until:
            self._answered(self._question.question, TOO_SLOW, "decide_s")
            self._send_replies()
        if self._rate is not None and self._rate.resume(now):
            self.connection.receiver.resume(_RATE)
        if self._leaves_at is not None and now >= self._leaves_at:
            self._leaves_at = None
            if not (self._publishing or self._playing or self._question):
                self.connection.close_after_flush("refused, and asked for nothing else")
        if playing is not None and playing.waits_until is not None and now >= playing.waits_until:
            limit_s = self._config.rtmp.limits.player_wait_s
            self._limit_hit = "player_wait_s"
            self._rtmp.limit_status(playing.stream_id, "player_wait_s", limit_s, limit_s)
            self._send_replies()
            raise LimitExceededError(
                "player_wait_s", limit_s, limit_s, f"nobody published {playing.stream.name} within {limit_s:g} s"
            )
        if self.connection.receiver.paused:
            # A tick would let out what is held. Whether the peer is there is the Sender's to find out meanwhile.
            self._arm()
        else:
            self._take(lambda _, now: self._rtmp.tick(now))
        for publishing in tuple((self._publishing or {}).values()):
            if publishing.look_at is not None and now >= publishing.look_at:
                self._check_silence(publishing, now)

    def _check_silence(self, publishing: Publishing, now: float) -> None:
        """Cut a publisher that sends neither audio nor video, and see to it that it is looked at again.

        The wire session has a limit on the time to the first media as well, but of the connection: one that begins
        another publication now and then would keep the names of those before it.
        """
        limit, allowed_s, since = "media_silence_s", self._config.media_silence_s, publishing.media_at
        if since is None:
            limit, allowed_s = "first_media_s", self._config.rtmp.limits.first_media_s
            since = publishing.began_at
        if self.connection.receiver.paused:
            since = now  # what is not read cannot be late
        if allowed_s and now - since >= allowed_s:
            self._limit_hit = limit
            self._rtmp.limit_status(publishing.stream_id, limit, now - since, allowed_s)
            self._send_replies()
            raise LimitExceededError(limit, round(now - since, 3), allowed_s)
        publishing.look_at = self._look_at(since, allowed_s, now)
        self._arm()

    def _look_at(self, since: float, allowed_s: float, now: float) -> float | None:
        """Return when a publisher is to be looked at that may be silent for `allowed_s`; None: never.

        Never later than `media_silence_s` from `now`: media may come at once, and the silence begin behind it.
        """
        silence_s = self._config.media_silence_s
        times = [start + limit for start, limit in ((since, allowed_s), (now, silence_s)) if limit]
        return min(times, default=None)

    def _take(self, step: _Step, data: memoryview = _NOTHING, *, resume: bool = True, lazy: bool = False) -> int:
        """Run a step of the wire session and treat its events, until none are held back; return their number.

        Where that takes longer than a turn of this connection, the rest is for the next one.

        With `lazy` the timer stays as it is where nothing but media came, which puts off what is due and nothing else:
        it strikes too early then, once in several hundred messages, and is set anew.
        """
        connection, now = self.connection, self.connection.now()
        count = 0
        try:
            events = step(data, now)
            while events or (resume and self._rtmp.backlog):
                count += len(events)
                for event in events:
                    if type(event) is Message:
                        self._publish(event, now)
                    else:
                        lazy = False
                        self._treat(event, now)
                if not (resume and self._rtmp.backlog) or connection.ended is not None:
                    break
                if connection.turn_over():
                    connection.receiver.trigger_input()
                    break
                events = self._rtmp.resume(now)
        except RemoteProtocolError as error:
            if isinstance(error, LimitExceededError):
                self._limit_hit = error.limit
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

    def _publish(self, message: Message, now: float) -> None:
        publishing = (self._publishing or {}).get(message.msid)
        if publishing is None:
            return
        publishing.messages += 1
        if message.type_id in MEDIA_TYPES:
            publishing.media_at = now
        try:
            if not publishing.stream.publish(self, message.type_id, message.timestamp, message.payload, now):
                publishing.discarded += 1
        except LimitExceededError as error:
            self._header_refused(publishing, error)

    def _header_refused(self, publishing: Publishing, error: LimitExceededError) -> None:
        """Count a header that is not kept for those who come later; log it once per limit."""
        if error.limit in publishing.limits_told:
            self._hub.limit_hit(error.limit)
            return
        publishing.limits_told |= {error.limit}
        self._refused("header not kept", publishing.stream.name, error)

    def _treat(self, event: rtmp_events.ServerEvent, now: float) -> None:
        """Answer one event of the wire session; those that only inform need nothing."""
        match event:
            case rtmp_events.ConnectRequested():
                self.user_agent = redact_text(event.flash_ver)
                self._user = event.user
                self._rtmp.accept_connect()
            case rtmp_events.ConnectRefused():
                refused = event.reason == "auth-failed"
                reason = CloseReason.AUTH_REFUSED if refused else CloseReason.FINISHED
                self._send_replies()
                self.connection.close_after_flush(f"authentication: {event.reason}", reason=reason)
            case rtmp_events.PublishRequested():
                # Withdrawn in the same breath (deleteStream passes while a request is decided): nothing to answer.
                if self._rtmp.stream_state(event.stream_id) is StreamState.PUBLISH_DECIDING:
                    self._ask(event, now)
            case rtmp_events.PlayRequested():
                if self._rtmp.stream_state(event.stream_id) is StreamState.PLAY_DECIDING:
                    self._ask(event, now)
            case rtmp_events.MetadataReceived():
                self._publish(event.message, now)
            case rtmp_events.StreamClosed():
                self._stream_closed(event)
            case rtmp_events.PauseRequested():
                self._pause(event)
            case rtmp_events.Acknowledged():
                self._acknowledged(event.sequence_number)
            case rtmp_events.ReceiveAudio():
                self._mute(event.stream_id, audio=event.enabled)
            case rtmp_events.ReceiveVideo():
                self._mute(event.stream_id, video=event.enabled)
            case rtmp_events.Ignored():
                self._ignored(event, now)
            case _:
                pass

    def _ignored(self, event: rtmp_events.Ignored, now: float) -> None:
        """Log what is not obeyed, once per kind and connection; no more than a hint, since real clients are odd."""
        if event.what == "bad-name":
            self._leaves_at = now + _REFUSED_S
        peer = self.connection.peer
        _log.debug("message ignored", peer=f"{peer[0]}:{peer[1]}", what=event.what, detail=redact_text(event.detail))

    # -- hooks

    def _ask(self, event: _Request, now: float) -> None:
        """Publish or play as `event` asks for, if the application's hook allows it."""
        hooks = self._hub.hooks
        if hooks is None:
            self._start(event, now, None)
            return
        kind: Kind = "publish" if isinstance(event, rtmp_events.PublishRequested) else "play"
        request = LiveRequest(
            kind=kind,
            connection=self.number,
            peer=self.peer,
            url=event.url,
            user=self._user,
            user_agent=self.user_agent,
        )
        if not hooks.decides[kind]:
            self._start(event, now, request)
            return
        question = hooks.ask(request, lambda question, refusal: self.on_thread(self._answered, question, refusal))
        self._question = _Asked(question, event, request, now + hooks.decide_s)
        # The wire session holds what was read already, but no more than `paused_input_bytes`.
        self.connection.receiver.pause(_HOOK, "a hook decides")

    def _answered(self, question: Question, refusal: str | None, limit: str | None = None) -> None:
        """Go on with what a hook has decided, unless the client has withdrawn it."""
        asked = self._question
        if asked is None or asked.question is not question or self._rtmp.closed:
            return
        self._withdraw()
        event, now = asked.event, self.connection.now()
        if self._rtmp.stream_state(event.stream_id) not in _DECIDING:
            return
        if refusal is None:
            self._start(event, now, asked.request)
        else:
            self._refuse(event, refusal)
            if limit is not None:
                self._hub.limit_hit(limit)
            _log.info(f"{asked.request.kind} refused", **self._fields(event.url.path), reason=refusal)
        self._arm()

    def _refuse(self, event: _Request, description: str) -> None:
        if isinstance(event, rtmp_events.PublishRequested):
            self._rtmp.reject_publish(event.stream_id, commands.PUBLISH_BAD_NAME, description)
            self._leaves_at = self.connection.now() + _REFUSED_S
        else:
            self._rtmp.reject_play(event.stream_id, commands.PLAY_FAILED, description)

    def _withdraw(self) -> None:
        """Ask no more, and read on."""
        asked, self._question = self._question, None
        if asked is not None:
            asked.question.cancel()
            self.connection.receiver.resume(_HOOK)

    def _start(self, event: _Request, now: float, request: LiveRequest | None) -> None:
        if isinstance(event, rtmp_events.PlayRequested):
            self._start_playing(event, now)
            return
        hooks = self._hub.hooks if request is not None else None
        try:
            if hooks is not None and request is not None:
                hooks.check_news(request)
        except LimitExceededError as error:
            self._refuse(event, str(error))
            self._refused("publish refused", event.url.path, error)
            return
        self._start_publishing(event, now)
        publishing = (self._publishing or {}).get(event.stream_id)
        if publishing is not None and request is not None and hooks is not None:
            publishing.request = request
            hooks.published(request)

    # -- publishing

    def _start_publishing(self, event: rtmp_events.PublishRequested, now: float) -> None:
        name = event.url.path
        try:
            stream = self._hub.publish(name, self, Owner.of(address_key(self.peer[0]), self._user, event.query))
        except BusyError as error:
            self._refuse(event, str(error))
            has_it = self._hub.publisher_of(name)  # for the operator; a stranger is not told
            by = None if has_it is None else f"{has_it[0]}:{has_it[1]}"
            _log.info("publish refused", **self._fields(name), reason=str(error), publisher=by)
            return
        except LimitExceededError as error:
            self._refuse(event, str(error))
            self._refused("publish refused", name, error)
            return
        if self._publishing is None:
            self._publishing = {}
        publishing = self._publishing[event.stream_id] = Publishing(event.stream_id, stream, now)
        publishing.look_at = self._look_at(now, self._config.rtmp.limits.first_media_s, now)
        self._rtmp.accept_publish(event.stream_id)
        self.connection.gather_input(wanted=True)
        self._signal(publishing, event)
        standby = stream.publisher is not self
        _log.info("publish started", **self._fields(name), kind=event.kind, standby=standby, agent=self.user_agent)

    def _signal(self, publishing: Publishing, event: rtmp_events.PublishRequested) -> None:
        """Tell a publisher that asks for it how its viewers are doing, from now on."""
        asked = event.query.get(PARAMETER)
        if asked is not None:
            publishing.signal = self._hub.oversight.signals.subscribe(
                lambda shares: self.on_thread(self._tell_shares, publishing, shares),
                stream=publishing.stream.name,
                settings=publisher_settings(asked),
            )

    def _tell_shares(self, publishing: Publishing, shares: ViewerShares) -> None:
        if publishing.signal is None or publishing.stream.publisher is not self:
            return
        if self.connection.sender.state is SendState.READY:  # one that does not read what it asked for is not told
            self._rtmp.send_data(publishing.stream_id, EVENT_NAME, message_values(shares))

    def _end_publishing(self, publishing: Publishing, *, grace: bool, why: str) -> None:
        if self._publishing is not None:
            self._publishing.pop(publishing.stream_id, None)
            self.connection.gather_input(bool(self._publishing))
        if publishing.signal is not None:
            publishing.signal.cancel()
            publishing.signal = None
        stream = publishing.stream
        media = stream.media
        self._hub.unpublish(stream, self, grace=grace)
        if publishing.request is not None and self._hub.hooks is not None:
            self._hub.hooks.ended(publishing.request, why)
        _log.info(
            "publish ended",
            **self._fields(stream.name),
            why=why,
            after_s=round(self.connection.now() - publishing.began_at, 1),
            messages=publishing.messages,
            discarded=publishing.discarded,
            media=media,
        )

    # -- playing

    def _acknowledged(self, sequence_number: int) -> None:
        """Tell the Sender what the player's application says it has read: a number of octets modulo 2^32."""
        if self._playing is not None:
            sent = self.connection.sender.glance().bytes_sent
            self.connection.sender.peer_acknowledged(sent - Acknowledgement(sequence_number).behind(sent))

    def _start_playing(self, event: rtmp_events.PlayRequested, now: float) -> None:
        name = event.url.path
        if self._playing is not None:
            self._rtmp.reject_play(
                event.stream_id, commands.PLAY_FAILED, "One connection plays one stream; close the other one first."
            )
            return
        if not self._config.players_may_wait and not self._hub.is_published(name):
            self._rtmp.reject_play(event.stream_id, description=f"Nobody publishes {name}.")
            _log.info("play refused", **self._fields(name), reason="nobody publishes it")
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
        playing = self._playing = Playing(event.stream_id, stream, wire, self._figures().baseline(), now)
        self.set_audience()
        # In this order: what ends the stream after the look stands in the log that the player then follows.
        place = stream.start_place(wire)
        waiting = stream.ended
        if waiting:
            self._rtmp.play_waiting(event.stream_id)
            self._wait_for_publisher(playing)
        else:
            self._rtmp.accept_play(event.stream_id)
        self._send_replies()  # they go first: the log follows behind them
        self._follow(playing, place)
        _log.info("play started", **self._fields(name), waiting=waiting, agent=self.user_agent)

    def _follow(self, playing: Playing, place: StartPlace) -> None:
        """Begin to follow the log, with the GOP cache if there is one."""
        start, prefix, wait = place
        FollowPlace(self.connection, playing.wire.fanouts, start=start, prefix=prefix, wait_for_key=wait)

    def _wait_for_publisher(self, playing: Playing) -> None:
        wait_s = self._config.rtmp.limits.player_wait_s
        playing.waits_until = self.connection.now() + wait_s if wait_s else None

    def _pause(self, event: rtmp_events.PauseRequested) -> None:
        """Stop delivery, or go on at the live edge: a live stream has no place to go back to."""
        playing = self._playing
        if playing is None or playing.stream_id != event.stream_id or playing.paused == event.pause:
            return
        playing.paused = event.pause
        if not event.pause:
            place = playing.stream.start_place(playing.wire)
            if playing.stream.ended:
                self._note_end(playing)  # the log's word about it is before the place
            else:
                self._note_begin(playing)
            self._follow(playing, place)
        elif self.connection.place is not None:
            self._leave_log(playing)

    def _leave_log(self, playing: Playing) -> None:
        """Stop following the log; what it was still to tell the player, the session tells it."""
        place, sender = self.connection.place, self.connection.sender
        if place is None:
            return
        before = sender.statistics().dropped.get(DropReason.UNFOLLOWED, NO_COUNTS).of(MessageClass.CONTROL)
        place.end()
        lost = sender.statistics().dropped.get(DropReason.UNFOLLOWED, NO_COUNTS).of(MessageClass.CONTROL) - before
        # Begin and end take turns, so an even number of lost ones changes nothing. Where the hub's own word has not
        # come yet, it will be sent, for there is no log any more.
        published = self._rtmp.stream_state(playing.stream_id) is StreamState.PLAYING
        if lost % 2 and published is playing.wire.published:
            self._rtmp.repeat_notify(playing.stream_id)

    def _mute(self, stream_id: int, *, audio: bool | None = None, video: bool | None = None) -> None:
        playing = self._playing
        if playing is None or playing.stream_id != stream_id:
            return
        playing.audio = playing.audio if audio is None else audio
        playing.video = playing.video if video is None else video
        policy = self._policy_of(playing)
        if not (playing.audio and playing.video):
            policy = Muted(policy, audio=playing.audio, video=playing.video)
        self.connection.sender.set_policy(policy)

    def _policy_of(self, playing: Playing) -> DropPolicy:
        audience = self._config.audience(playing.stream.name)
        return self._policy if audience is None or audience.policy is None else LIVE_POLICIES[audience.policy]

    def set_audience(self, limits: Limits | None = None) -> None:
        """Put in force what is set for viewers of the stream that it plays.

        Args:
            limits: the server's, which have just been changed. None: its Sender has them already.
        """
        playing, sender = self._playing, self.connection.sender
        audience = None if playing is None else self._config.audience(playing.stream.name)
        usual = limits or sender.limits
        if audience is not None and audience.target_delay_ms != -1:
            self._usual_target_ms = usual.target_delay_ms
            limits = dataclasses.replace(usual, target_delay_ms=audience.target_delay_ms)
        if limits is not None and limits != sender.limits:
            sender.set_limits(limits)
        whole = playing is not None and playing.audio and playing.video  # else the policy is set with what is muted
        if playing is not None and whole and audience is not None and audience.policy is not None:
            sender.set_policy(self._policy_of(playing))

    def _leave_audience(self, playing: Playing) -> None:
        audience, sender = self._config.audience(playing.stream.name), self.connection.sender
        if audience is not None and audience.target_delay_ms != -1:
            sender.set_limits(dataclasses.replace(sender.limits, target_delay_ms=self._usual_target_ms))
        if audience is not None and audience.policy is not None:
            sender.set_policy(self._policy)

    def _end_playing(self, why: str) -> None:
        playing, self._playing = self._playing, None
        if playing is None:
            return
        connection = self.connection
        if connection.place is not None:
            connection.place.end()
        if not (playing.audio and playing.video):
            connection.sender.set_policy(self._policy)  # what this play has muted, the next one has not
        self._leave_audience(playing)
        # Also out of what waits to be sent to it: what it was offered of the stream is settled when it leaves.
        playing.stream.leave(playing.wire)
        self._hub.leave(playing.stream, self, self._figures().settled() - playing.before)
        episode, self._episode = self._episode, None
        if episode is not None:
            episode.end(connection.now(), None)
        statistics = connection.sender.statistics()
        _log.info(
            "play ended",
            **self._fields(playing.stream.name),
            why=why,
            after_s=round(connection.now() - playing.began_at, 1),
            sent=statistics.sent.by_name(),
            dropped={reason.value: counts.by_name() for reason, counts in statistics.dropped.items()} or 0,
            changes=statistics.transitions,
            longest_stall_s=round(statistics.longest_stall_s, 2),
        )

    def _stream_closed(self, event: rtmp_events.StreamClosed) -> None:
        if self._question is not None and self._question.event.stream_id == event.stream_id:
            self._withdraw()
        publishing = (self._publishing or {}).get(event.stream_id)
        if publishing is not None:
            self._end_publishing(publishing, grace=False, why=event.reason)
        if self._playing is not None and self._playing.stream_id == event.stream_id:
            self._end_playing(event.reason)

    # -- flow control and the end

    def send_state_changed(self, state: SendState, change: StateChange) -> None:
        """Pause input at SOFT_LIMIT and above: who does not read is not to make us work. Under the Sender's lock."""
        connection = self.connection
        if state >= SendState.SOFT_LIMIT and change.old < SendState.SOFT_LIMIT:
            connection.pause_input(_FLOW, "soft limit", control_bytes=self._config.control_bytes_per_s)
        elif state < SendState.SOFT_LIMIT <= change.old:
            connection.resume_input(_FLOW)

    def ledger_entry(self, entry: LedgerEntry) -> None:
        """Log trouble, once per episode."""
        playing = self._playing
        if playing is not None and entry.kind is not LedgerKind.CLOSE:
            if self._episode is None:  # most viewers have no trouble at all
                fields = self._fields(playing.stream.name)
                self._episode = Episode(fields, self.connection.sender.why, self._dropped)
            self._episode.take(entry, closed=self.connection.sender.closed)
            self._arm()

    def closed(self, reason: CloseReason, details: str) -> None:
        """Leave all streams, and say why the connection ended."""
        self._withdraw()
        connection = self.connection
        details = redact_text(details)  # the words of an error may quote the peer
        self._hub.connection_ended(reason, self._limit_hit)
        playing = self._playing
        if playing is not None:
            statistics = connection.sender.statistics()
            self._hub.viewer_ended(
                EndedViewer(
                    connection.number,
                    connection.peer,
                    playing.stream.name,
                    reason,
                    details,
                    statistics,
                    connection.now() - connection.opened_at,
                )
            )
            self._end_playing(f"{reason.value}: {details}" if details else reason.value)
        for publishing in list((self._publishing or {}).values()):
            self._end_publishing(publishing, grace=reason not in _GRACEFUL, why=reason.value)
        _log.info(
            "connection closed",
            connection=connection.number,
            peer=f"{connection.peer[0]}:{connection.peer[1]}",
            reason=reason.value,
            details=details,
            **({} if self._limit_hit is None else {"limit": self._limit_hit}),
            after_s=round(connection.now() - connection.opened_at, 1),
            work_s=round(connection.work.work_s, 3),
        )

    def _refused(self, what: str, stream: str, error: LimitExceededError) -> None:
        self._hub.limit_hit(error.limit)
        _log.warning(what, **self._fields(stream), limit=error.limit, value=error.value, maximum=error.maximum)

    def _fields(self, stream: str) -> dict[str, Any]:
        connection = self.connection
        peer = connection.peer
        return {"stream": stream, "peer": f"{peer[0]}:{peer[1]}", "connection": connection.number}

    def _arm(self) -> None:
        """Have `timer` called when the next of several things is due."""
        connection = self.connection
        if connection.ended is not None:
            return
        times = [] if connection.receiver.paused else [self._rtmp.next_deadline(connection.now())]
        if self._playing is not None:
            times.append(self._playing.waits_until)
        if self._episode is not None:
            times.append(self._episode.quiet_at)
        if self._question is not None:
            times.append(self._question.until)
        if self._rate is not None:
            times.append(self._rate.resumes_at)
        if self._leaves_at is not None:
            times.append(self._leaves_at)
        if self._publishing:
            times += [publishing.look_at for publishing in self._publishing.values()]
        connection.set_timer(min((when for when in times if when is not None), default=None))
