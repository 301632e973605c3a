"""Follows one stream of another server: plays it there over RTMP, and hands each message on, untouched and once.

How it works. A `StreamFollower` has one client connection at a time, on a poll group, to a TCP address or Unix socket.
What comes goes through a `Seam`, which leaves out what another connection brought already, to a `Sink`; `HubSink` is
the one that publishes it in the local hub. When the connection is lost, the sink keeps the stream for `hold_s`, so that
viewers see a pause, and the source is tried again, sooner at first. Everything runs on the group's thread, but for
looking up and connecting to a TCP address, which has a thread of its own for as long as it takes.

A source that sends nothing is asked for a sign of life: a machine that has gone says nothing either.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final, Protocol

import structlog

from flowctl.core.outcomes.backoff import Backoff, Redial
from flowctl.core.text.addresses import join_host_port
from flowctl.errors import BusyError, ClosedError, FlowctlError, LimitExceededError, LocalProtocolError
from flowctl.live.cluster.seam import Seam, SeamVerdict
from flowctl.live.observer import Observer
from flowctl.live.records.ingest import Ingest
from flowctl.pollgroup import PollGroup
from flowctl.reasons import CloseReason
from flowctl.wire.client.address import MOST_REDIRECTS, redirected
from flowctl.wire.client.base import ClientEnd, RtmpClient
from flowctl.wire.client.connect import connect_socket, place_client
from flowctl.wire.rtmp.events import ClientEvent, StreamEnded
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.messages import EVENT_PING_REQUEST, UserControl, encode_control
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.url import RtmpUrl
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_VIDEO, Message

_log: Final = structlog.get_logger("flowctl.cluster")
FOLLOW_BACKOFF: Final = Backoff(first_s=0.1, factor=2.0, most_s=3.0)
"""Pause between tries to reach a source: short, for viewers wait for it."""
_SILENCE_S: Final = 5.0
"""Silence after which a source is sent a ping; after as much silence again it is given up."""
_MEDIA: Final = frozenset({TYPE_AUDIO, TYPE_VIDEO})
_FOREIGN_PREFIXES: Final = (b"\x02\x00\x11|RtmpSampleAccess", b"\x02\x00\x08onStatus")
"""First octets of data messages that servers put before a stream, and that are not part of it (nginx-rtmp, SRS)."""
_CONFIG: Final = ClientSessionConfig(flash_version="flowctl follow", buffer_ms=0, multitrack=True)


@dataclass(frozen=True, slots=True)
class Inflow:
    """The observer of a follow's connections that bring something, which are reported like those of publishers."""

    observer: Observer
    name: str


class FollowState(enum.Enum):
    CONNECTING = "connecting"
    WAITING = "waiting"  #: connected, and nothing has come yet
    RUNNING = "running"
    RESTING = "resting"  #: until the next try
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a stream is followed from."""

    url: RtmpUrl  #: its address; where `path` is given, only the name of the stream counts
    path: str = ""  #: path of a Unix socket. Empty: host and port of the address.
    node: str = ""  #: name of the server for logs and statistics. Empty: its host and port.
    host: str = ""  #: where the server is that `url` names. Empty: as DNS says.
    #: reads its address before each connection: keys in files are renewed. None: it is always the same.
    read: Callable[[], RtmpUrl] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.node or self.path or join_host_port(self.host or self.url.host, self.url.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowStatistics:
    """A snapshot of a follow."""

    state: FollowState
    source: str
    why: str = ""
    messages: int = 0
    payload_bytes: int = 0
    repeated: int = 0
    gaps: int = 0  #: times that something was missing between two connections, or may have been
    restarts: int = 0  #: times that another timeline began
    connections: int = 0
    tries: int = 0


class Sink(Protocol):
    """Receives a stream that is followed. The follow's thread."""

    def begin(self, now: float) -> None:
        """Begin a timeline, perhaps behind another one. A BusyError says that the stream is not wanted."""

    def take(self, type_id: int, timestamp: int, payload: bytes, now: float) -> None:
        """Accept one message."""

    def end(self, why: str) -> None:
        """End the stream, which has ended, or stayed away for too long."""


class _FollowClient(RtmpClient):
    """The RTMP client connection of a follow."""

    __slots__ = ("_follow", "_inflow", "_looked_bytes", "_pinged", "_told", "ingest")
    pinned = True  # to the thread of its follow

    def __init__(
        self,
        follow: StreamFollower,
        url: RtmpUrl,
        parameters: str,
        on_end: Callable[[Any], None],
        inflow: Inflow | None,
    ) -> None:
        super().__init__(url, config=_CONFIG, parameters=parameters, on_end=on_end)
        self._protocol.play()
        self._follow = follow
        self._inflow = inflow
        self._told = False
        self.ingest: Final = Ingest()  #: counts what comes, for the observer
        self._looked_bytes = -1  # received when it was looked at last
        self._pinged = False

    def opened(self) -> None:
        super().opened()
        self.connection.gather_input(wanted=True)  # as that of a publisher
        self.wake_at(self.connection.now() + _SILENCE_S)

    def media(self, message: Message, now: float) -> None:
        if self._inflow is not None and message.type_id in _MEDIA:
            if not self._told:
                self._tell(self._inflow, now)
            self.ingest.count_message(
                inspect(message.type_id, message.payload).message_class, message.timestamp, len(message.payload), now
            )
        self._follow.received(self, message, now)

    def _tell(self, inflow: Inflow, now: float) -> None:
        """Report that it brings the stream: not before, for a connection that never does is not a publisher's."""
        self._told = True
        inflow.observer.asked(self.connection, "publish", inflow.name, now)
        inflow.observer.publish_started(self.connection, inflow.name, now, standby=False)

    def record_columns(self, now: float) -> dict[str, Any]:
        return self.ingest.columns(now)

    def closed(self, reason: CloseReason, details: str) -> None:
        if self._told and self._inflow is not None:
            self._inflow.observer.closed(self.connection, reason, self.url.masked(details), None)
        super().closed(reason, details)

    def event(self, event: ClientEvent, now: float) -> None:
        if isinstance(event, StreamEnded):
            self.ingest.pause(now)
            self._follow.stream_ended(self, event.reason, now)

    def due(self, now: float) -> None:
        received = self._protocol.bytes_received
        if received != self._looked_bytes:
            self._looked_bytes, self._pinged = received, False
        elif self._pinged:
            self.connection.close(CloseReason.IDLE, f"nothing came for {2 * _SILENCE_S:g} s")
            return
        else:
            self._pinged = True
            ping = UserControl(EVENT_PING_REQUEST, timestamp=round(now * 1000) & 0xFFFFFFFF)
            self.connection.sender.send(self._protocol.send_message(encode_control(ping)), droppable=False)
        self.wake_at(now + _SILENCE_S)


class StreamFollower:
    """Plays one stream of another server into a `Sink`, from one source at a time."""

    def __init__(
        self,
        source: Source,
        sink: Sink,
        group: PollGroup,
        *,
        backoff: Backoff = FOLLOW_BACKOFF,
        hold_s: float = 3.0,
        rng: Random | None = None,
        inflow: Inflow | None = None,
    ) -> None:
        self._source = source
        self._inflow = inflow
        self._sink = sink
        self._group = group
        self._hold_s = hold_s
        self._redial = Redial(backoff, rng or Random())
        self._seam = Seam()
        self._state = FollowState.RESTING
        self._why = "not begun"
        self._told = ""  # why connections end that bring nothing, as the log said it last
        self._link: _FollowClient | None = None
        self._before: _FollowClient | None = None  # to the source before, whose last pictures may be under way
        self._number = 0  # of the present try: what belongs to an earlier one is not for us any more
        self._begun = False  # the sink has the stream
        self._refused = False  # the sink does not want what this connection brings
        self._parked = False  # there is no source for now
        self._redirects = 0  # in a row
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._runs_since = 0.0
        self._connections = self._messages = self._payload_bytes = self._gaps = self._restarts = 0

    # -- any thread

    def start(self) -> None:
        self._post(self._try)

    def move(self, source: Source) -> None:
        """Go on from another source; the one before is heard until this one brings something."""
        self._post(self._move, source)

    def park(self, why: str, *, keep: bool) -> None:
        """Look for no source until `move` names one; `keep`: the stream may go on, it does not end for viewers yet."""
        self._post(self._park, why, keep)

    def stop(self, why: str = "") -> None:
        """End for good; the sink is told."""
        self._post(self._stop, why)

    def abandon(self) -> None:
        """End for good; the sink is told nothing any more. The group's thread."""
        self._begun = False
        self._stop("")

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(ClosedError, LocalProtocolError):  # the group has ended, and everything on it
            self._group.call_soon(callback, *args)

    def statistics(self) -> FollowStatistics:
        """Return a snapshot. Figures of the group's thread may be a step apart."""
        return FollowStatistics(
            state=self._state,
            source=str(self._source),
            why="" if self._state is FollowState.RUNNING else self._why,
            messages=self._messages,
            payload_bytes=self._payload_bytes,
            repeated=self._seam.repeated_count,
            gaps=self._gaps,
            restarts=self._restarts,
            connections=self._connections,
            tries=self._redial.tries,
        )

    # -- connecting

    def _try(self, parameters: str = "", url: RtmpUrl | None = None) -> None:
        """Connect to the source, or to where it has sent us."""
        if self._state is FollowState.ENDED:
            return
        self._cancel("again")
        self._number += 1
        self._redial.begin()
        self._set(FollowState.CONNECTING, "connecting")
        number, source = self._number, self._source
        if url is not None and url != source.url:
            source = Source(url)
        if source.path:
            try:
                sock = _connect_local(source.path)
            except OSError as error:
                self._failed(number, f"cannot connect to {source.path}: {error.strerror or error}")
            else:
                self._connected(number, source.url, sock, parameters)
            return
        threading.Thread(
            target=self._connect_remote, args=(number, source, parameters), name="flowctl-follow", daemon=True
        ).start()

    def _connect_remote(self, number: int, source: Source, parameters: str) -> None:
        """Look up and connect; a thread of its own."""
        try:
            url = source.url if source.read is None else source.read()
            sock = connect_socket(url, host=source.host)
        except (FlowctlError, OSError) as error:
            self._post(self._failed, number, error.with_hint if isinstance(error, FlowctlError) else str(error))
            return
        try:
            self._group.call_soon(self._connected, number, url, sock, parameters)
        except FlowctlError:
            sock.close()

    def _connected(self, number: int, url: RtmpUrl, sock: socket.socket, parameters: str) -> None:
        if number != self._number or self._state is FollowState.ENDED:
            sock.close()
            return
        ended = partial(self._post, self._link_ended)
        link = _FollowClient(self, url, parameters, ended, self._inflow)
        try:
            place_client(self._group, link, sock)
        except (ClosedError, OSError) as error:
            self._failed(number, str(error))
            return
        self._link = link
        self._connections += 1
        self._refused = False
        self._set(FollowState.WAITING, "connected, nothing has come yet")

    def _failed(self, number: int, why: str) -> None:
        if number == self._number and self._state is not FollowState.ENDED:
            self._rest(why)

    def _rest(self, why: str, lasted_s: float = 0.0) -> None:
        self._set(FollowState.RESTING, why)
        if not self._parked:
            self._later("again", self._redial.delay_s(lasted_s), self._try)
        self._hold()

    def _link_ended(self, link: _FollowClient) -> None:
        if link is not self._link or self._state is FollowState.ENDED:
            return
        self._link = None
        if "last" in self._timers:
            self._leave("its source has gone")
            return
        end: ClientEnd | None = link.end
        rejected = link.rejected
        url = None if rejected is None else redirected(link.url, rejected)
        if url is not None and self._redirects < MOST_REDIRECTS:
            self._redirects += 1
            self._try("", url)
            return
        if rejected is not None and rejected.retry_parameters is not None:
            self._try(rejected.retry_parameters, link.url)
            return
        self._redirects = 0
        why = link.url.masked(str(end))  # it is logged, and shown in figures
        # Of connections that bring nothing the first may have come too early; what the others say is told once.
        ran = self._state is FollowState.RUNNING
        if ran or (self._redial.tries > 1 and why != self._told):
            self._told = why
            _log.info("follow interrupted", source=str(self._source), stream=self._source.url.path, why=why)
        self._rest(why, self._group.now() - self._runs_since if ran else 0.0)

    def _give_up(self) -> None:
        self._timers.pop("hold", None)
        if self._link is None or self._state is not FollowState.RUNNING:
            self._end_stream(self._why)

    def _move(self, source: Source) -> None:
        lasts = self._cancel("last")  # a link whose end was waited for goes on where its source does
        if self._state is FollowState.ENDED or (source == self._source and (lasts or not self._parked)):
            self._parked = False
            return
        self._source, self._redial.tries, self._parked = source, 0, False
        if self._state is FollowState.RUNNING:
            self._before, self._link = self._link, None
        self._drop_link("another source")
        self._hold()
        self._try()

    def _park(self, why: str, keep: bool) -> None:  # noqa: FBT001 - called by the group
        if self._state is FollowState.ENDED:
            return
        self._parked = True
        self._number += 1  # a connection that is being made comes too late
        self._cancel("again")
        if keep:
            self._drop_link(why)
            self._set(FollowState.RESTING, why)
            self._hold()
        elif self._state is FollowState.RUNNING:  # the last pictures are under way, and behind them it says itself
            self._later("last", _SILENCE_S, partial(self._leave, why))
        else:
            self._leave(why)

    def _leave(self, why: str) -> None:
        """End the stream for viewers, and drop the source."""
        self._cancel("last")
        self._cancel("hold")
        self._drop_link(why)
        self._set(FollowState.RESTING, why)
        self._end_stream(why)

    def _hold(self) -> None:
        if self._begun and "hold" not in self._timers:
            self._later("hold", self._hold_s, self._give_up)

    def _stop(self, why: str) -> None:
        if self._state is FollowState.ENDED:
            return
        self._set(FollowState.ENDED, why or "stopped")
        for name in tuple(self._timers):
            self._cancel(name)
        self._drop_link(self._why)
        self._end_stream(self._why)

    def _drop_link(self, why: str) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.connection.close(CloseReason.FINISHED, why)

    def _drop_before(self, why: str) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.connection.close(CloseReason.FINISHED, why)

    # -- the stream; the connection's thread

    def received(self, link: _FollowClient, message: Message, now: float) -> None:
        if link not in (self._link, self._before) or self._refused:
            return
        type_id, timestamp, payload = message.type_id, message.timestamp, message.payload
        if type_id not in _MEDIA and payload.startswith(_FOREIGN_PREFIXES):
            return
        if link is self._link and self._state is not FollowState.RUNNING:
            self._runs()
        result = self._seam.join(type_id, timestamp, payload, now)
        if result.pieces:
            self._pass_on(result.verdict, result.pieces, now)

    def _runs(self) -> None:
        self._told = ""
        self._runs_since = self._group.now()
        self._cancel("hold")
        self._drop_before("another source")
        self._seam.reconnected()
        self._set(FollowState.RUNNING, "")

    def _pass_on(self, verdict: SeamVerdict, pieces: tuple[tuple[int, int, bytes], ...], now: float) -> None:
        restart = verdict is SeamVerdict.RESTART
        self._gaps += verdict is SeamVerdict.GAP
        self._restarts += restart
        if not self._begun or restart:
            try:
                self._sink.begin(now)
            except (BusyError, LimitExceededError) as error:
                self._refused, self._begun = True, False
                self._seam.forget()
                if self._link is not None:  # looked at again with the next connection
                    self._link.connection.close(CloseReason.FINISHED, f"refused here: {error}")
                return
            self._begun = True
        for type_id, timestamp, payload in pieces:
            self._messages += 1
            self._payload_bytes += len(payload)
            self._sink.take(type_id, timestamp, payload, now)

    def stream_ended(self, link: _FollowClient, reason: str, now: float) -> None:
        del now
        if link is self._link:
            reason = link.url.masked(reason)
            if "last" in self._timers:
                self._leave(reason)
                return
            self._set(FollowState.WAITING, f"the source ended the stream: {reason}")
            self._end_stream(reason)
        elif link is self._before:
            self._drop_before(reason)

    def _end_stream(self, why: str) -> None:
        self._drop_before(why)
        begun, self._begun = self._begun, False
        self._seam.forget()
        if begun:
            self._sink.end(why)

    # -- inner steps

    def _set(self, state: FollowState, why: str) -> None:
        self._state, self._why = state, why

    def _later(self, name: str, delay_s: float, callback: Callable[[], None]) -> None:
        self._cancel(name)
        self._timers[name] = self._group.call_later(delay_s, callback)

    def _cancel(self, name: str) -> bool:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        return timer is not None


def _connect_local(path: str) -> socket.socket:
    """Return a socket connected to the Unix socket at `path`; never waits."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    found = sock.connect_ex(path)
    if found:
        sock.close()
        raise OSError(found, errno.errorcode.get(found, "cannot connect"))
    return sock
