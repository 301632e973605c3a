"""Where other workers follow the streams of this one: a Unix socket in a folder that is the user's alone.

What connects there is one of us: it passes no admission, is no viewer to anybody who looks at figures, and nothing is
left out for it. Instead it may fall behind by `LINK_LIMITS`, half a minute of a stream of 8 Mbit/s; then it is cut,
which both sides say, and goes on with the GOP cache as after any break.
"""

from __future__ import annotations

import dataclasses
import socket
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from flowctl.connection import Connection, Session
from flowctl.core.fanout.following import FollowPlace
from flowctl.core.flow.limits import AxisLimits, Limits
from flowctl.core.flow.policy import KeepAll
from flowctl.core.flow.state import MessageClass
from flowctl.errors import ClosedError, LimitExceededError, LocalProtocolError
from flowctl.live.cluster.media.order import RENDITION
from flowctl.live.hub import Hub
from flowctl.live.server import LiveServer
from flowctl.live.stream import Stream
from flowctl.pollgroup import PollGroup
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp import events as rtmp_events
from flowctl.wire.rtmp.server.session import ServerSession
from flowctl.wire.rtmp.session_config import ServerSessionConfig
from flowctl.wire.rtmp.states import StreamState
from flowctl.wire.rtmp.wire import Message
from flowctl.wire.streams.wirelog import WireLog

_log: Final = structlog.get_logger("flowctl.cluster")
_MIB: Final = 1024 * 1024
LINK_LIMITS: Final = Limits(
    size=AxisLimits(soft=16 * _MIB, hard=32 * _MIB, name="bytes"), messages=AxisLimits(hard=65536), target_delay_ms=0
)
"""Limits of what may wait for a worker that follows a stream."""
_POLICY: Final = KeepAll()
_MSID: Final = 1
"""Message stream id of a link: the first that createStream gives."""
_BACKLOG: Final = 1024


class LinkSession(Session):
    """Another worker that follows one stream of ours."""

    __slots__ = ("_hub", "_own_streams", "_rtmp", "_source", "_stream", "_wire")

    def __init__(self, hub: Hub, rtmp: ServerSessionConfig, now: float, *, own_streams: bool = False) -> None:
        self._hub = hub
        self._own_streams = own_streams
        self._rtmp = ServerSession(rtmp, now=now)
        self._stream: Stream | None = None
        self._source: Stream | None = None  # that stream, or the rendition of it that is asked for
        self._wire: WireLog | None = None  # joined with `_source`

    def opened(self) -> None:
        self._arm()

    def received(self, data: memoryview) -> None:
        now = self.connection.now()
        events = self._rtmp.receive(data, now)
        while True:
            for event in events:
                if type(event) is not Message:
                    self._treat(event)
            if not self._rtmp.backlog:
                break
            events = self._rtmp.resume(now)
        self._reply()
        self._arm()

    def timer(self, now: float) -> None:
        self._rtmp.tick(now)
        self._reply()
        self._arm()

    def closed(self, reason: CloseReason, details: str) -> None:
        if self._stream is not None and reason not in (CloseReason.PEER_CLOSED, CloseReason.SHUTDOWN):
            _log.warning("link of a worker ended", stream=self._stream.name, reason=reason.value, details=details)
        self._leave()

    def _treat(self, event: rtmp_events.ServerEvent) -> None:
        match event:
            case rtmp_events.ConnectRequested():
                self._rtmp.accept_connect()
            case rtmp_events.PublishRequested():
                self._rtmp.reject_publish(event.stream_id, commands.PUBLISH_BAD_NAME, "Nobody publishes here.")
            case rtmp_events.PlayRequested():
                if self._rtmp.stream_state(event.stream_id) is StreamState.PLAY_DECIDING:
                    self._play(event)
            case rtmp_events.StreamClosed():
                self._leave()
            case _:
                pass

    def _play(self, event: rtmp_events.PlayRequested) -> None:
        if self._stream is not None or event.stream_id != _MSID:
            self._rtmp.reject_play(event.stream_id, commands.PLAY_FAILED, "One link follows one stream.")
            return
        if self._own_streams and not self._hub.has_publisher(event.url.path):
            self._rtmp.reject_play(event.stream_id, commands.PLAY_FAILED, "Nobody publishes it here.")
            return
        try:
            stream = self._stream = self._hub.link(event.url.path, self)
        except LimitExceededError as error:
            self._rtmp.reject_play(event.stream_id, commands.PLAY_FAILED, str(error))
            return
        source = stream if (name := event.query.get(RENDITION)) is None else stream.find_rendition(name)
        if source is None:
            self._leave()
            self._rtmp.reject_play(event.stream_id, commands.PLAY_FAILED, f"There is no rendition {name}.")
            return
        wire = self._wire = source.join_link()
        self._source = source
        # In this order: what ends the stream after the look stands in the log that is then followed.
        start, prefix, wait = source.start_place(wire)
        self._rtmp.accept_play(event.stream_id)
        self._reply()  # it goes first: the log follows behind it
        FollowPlace(self.connection, wire.fanouts, start=start, prefix=prefix, wait_for_key=wait)

    def _leave(self) -> None:
        stream, self._stream = self._stream, None
        source, self._source = self._source, None
        wire, self._wire = self._wire, None
        if self.connection.place is not None:
            self.connection.place.end()
        if source is not None and wire is not None:
            source.leave(wire)
        if stream is not None:
            self._hub.unlink(stream, self)

    def _reply(self) -> None:
        data = self._rtmp.data_to_send()
        if data:
            self.connection.sender.send(data, MessageClass.CONTROL)

    def _arm(self) -> None:
        if self.connection.ended is None:
            self.connection.set_timer(self._rtmp.next_deadline(self.connection.now()))


class Links:
    """Listens for other workers; a companion of its server."""

    def __init__(self, server: LiveServer, path: Path, *, own_streams: bool = False) -> None:
        self.path: Final = path
        self._own_streams: Final = own_streams  # whether only what has its publisher here may be followed
        self._server: Final = server
        self._rtmp: Final = dataclasses.replace(server.config.rtmp, credentials=None)
        self._listener: socket.socket | None = None
        self._connections: set[Connection] = set()  # the first group's thread

    @property
    def count(self) -> int:
        return len(self._connections)

    def start(self) -> None:
        listener = self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path.unlink(missing_ok=True)
        listener.bind(str(self.path))
        self.path.chmod(0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        group = self._server.groups.groups[0]
        group.call_soon(group.watch_input, listener, partial(self._accept, group, listener))

    def stop(self, deadline_s: float = 1.0) -> None:
        """Take no more links; those that are there end with the server's groups."""
        del deadline_s
        listener, self._listener = self._listener, None
        if listener is None:
            return
        group = self._server.groups.groups[0]
        try:
            group.call_soon(group.unwatch_input, listener)
            group.call_soon(listener.close)
        except (ClosedError, LocalProtocolError):  # its follower has gone
            listener.close()
        self.path.unlink(missing_ok=True)

    def _accept(self, group: PollGroup, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            server = self._server
            connection = Connection(
                sock,
                LinkSession(server.hub, self._rtmp, server.clock(), own_streams=self._own_streams),
                limits=LINK_LIMITS,
                policy=_POLICY,
                settings=server.config.settings,
                options=server.config.socket_options,
                clock=server.clock,
                peer=("worker", 0),
                on_closed=self._connections.discard,
            )
            self._connections.add(connection)
            try:
                connection.live_on(group)
            except ClosedError:
                self._connections.discard(connection)
                sock.close()
