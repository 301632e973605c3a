"""A connection on which a stream of this server is published at another one: to the stream, a viewer like any other.

How it works. The session speaks RTMP as a publisher does; once the other server lets it in, it follows the log of its
stream in a format of its own (`PublishChunks`), through the Sender of its connection. So a target that takes less than
is published is a slow viewer: late pictures are left out for it, and `flowctl stats` says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from flowctl.core.flow.limits import Limits
from flowctl.core.flow.state import MessageClass, SendState, StateChange
from flowctl.core.sending.episodes import LINE_SHORT
from flowctl.errors import LimitExceededError
from flowctl.live.hub import Hub
from flowctl.live.playing import Playing, PlayWords, ViewerSession, Wants
from flowctl.live.settings.relays import place_of
from flowctl.live.stream import Stream
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp.client.session import ClientSession
from flowctl.wire.rtmp.events import ClientEvent, PublishStarted, Rejected, StreamEnded
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.url import RtmpUrl
from flowctl.wire.rtmp.wire import Message
from flowctl.wire.streams.wirelog import PublishChunks

_log: Final = structlog.get_logger("flowctl.relay")


class PushWords(PlayWords):
    """A push has its own words in the log alone: the other server is told nothing."""

    trouble = LINE_SHORT
    __slots__ = ("place",)

    def __init__(self, place: str) -> None:
        self.place = place


class PushSession(ViewerSession):
    __slots__ = ("_leaving", "_limits_of", "_on_end", "_rtmp", "_stream_name", "_url", "accepted", "rejected")

    def __init__(
        self,
        hub: Hub,
        stream: str,
        url: RtmpUrl,
        *,
        agent: str,
        parameters: str = "",
        limits_of: Callable[[Limits], Limits] = lambda limits: limits,
        on_end: Callable[[PushSession, str], None],
    ) -> None:
        super().__init__(hub)
        chunk_size = hub.config.rtmp.out_chunk_size
        self._rtmp: Final = ClientSession(
            ClientSessionConfig(flash_version=agent, out_chunk_size=chunk_size, multitrack=True)
        )
        self._rtmp.publish()
        self._rtmp.connect(url, parameters=parameters)
        self._stream_name: Final = stream
        self._url: Final = url
        self._limits_of: Final = limits_of
        self._on_end: Final = on_end
        self._leaving = False
        self.user_agent = f"push to {place_of(url)}"
        self.rejected: Rejected | None = None  # what the other server refused us with. None: it did not.
        self.accepted = False

    @property
    def protocol(self) -> str:
        return "rtmp-push"

    @property
    def is_node(self) -> bool:
        return True

    def behaves(self) -> bool:
        return True

    def send_state_changed(self, state: SendState, change: StateChange) -> None:
        """Read on, whatever its state: what the other server says is little, and we asked for it."""

    def put_settings(self, limits: Limits | None = None, *, changed: bool = False) -> None:
        """Put in force what is set for viewers of the stream, with what its rule says of the target delay."""
        ViewerSession.put_settings(self, limits, changed=changed)
        sender = self.connection.sender
        wanted = self._limits_of(sender.limits)
        if wanted != sender.limits:
            sender.set_limits(wanted)

    # -- the connection's calls

    def opened(self) -> None:
        for observer in self._hub.observers:
            observer.opened(self.connection)
        self._reply()

    def received(self, data: memoryview) -> None:
        for event in self._rtmp.receive(data, self.connection.now()):
            if not isinstance(event, Message):
                self._take(event)
        self._reply()

    def timer(self, now: float) -> None:
        if self._playing is not None:
            self._playing.check_quiet(now)
        self._rtmp.tick(now)
        self._reply()

    def stream_ended(self, stream: Stream) -> None:
        """The publisher here has gone: the log says so there, behind everything that it sent."""
        super().stream_ended(stream)
        if self._playing is not None and not self._leaving:
            self._leaving = True
            self.connection.close_after_flush("the publisher has gone")

    def closed(self, reason: CloseReason, details: str) -> None:
        details = self.masked(details)
        super().closed(reason, details)
        self._on_end(self, f"{reason.value}: {details}" if details else reason.value)

    # -- inner steps

    def masked(self, text: str) -> str:
        """Return a text with the names of streams masked: at other servers they are keys."""
        return self._url.masked(text, self._url.stream, self._url.instance)

    def _take(self, event: ClientEvent) -> None:
        if isinstance(event, PublishStarted):
            self._begin(event.stream_id)
        elif isinstance(event, Rejected):
            self.rejected = event
            self.connection.close_after_flush(self.masked(f"{event.code}: {event.description}"))
        elif isinstance(event, StreamEnded):
            self._leave(f"the other server ended it: {event.reason}")

    def _begin(self, stream_id: int) -> None:
        if self._playing is not None or self._leaving:
            return
        self._reply()
        try:
            stream = self._hub.view(self._stream_name, self)
        except LimitExceededError as error:
            self._leave(str(error))
            return
        self.accepted = True
        wire = stream.join_format(PublishChunks(stream_id, self._hub.config.rtmp.out_chunk_size))
        self._playing = Playing(self, PushWords(place_of(self._url)), self._hub, stream, wire, Wants(tracks=True))
        place = self._playing.begin()
        if stream.ended:
            self._leave("the publisher has gone")
            return
        self._playing.follow(place)
        _log.info("push began", stream=self._stream_name, to=place_of(self._url), connection=self.number)

    def _leave(self, why: str) -> None:
        if self._leaving:
            return
        self._leaving = True
        if self._rtmp.stream_id:
            self._rtmp.close_stream()
            data = self._rtmp.data_to_send()
            if data:
                self.connection.sender.send(data, MessageClass.DATA, droppable=False)
        self.connection.close_after_flush(self.masked(why))

    def _reply(self) -> None:
        data = b"" if self._leaving else self._rtmp.data_to_send()
        if data:
            self.connection.sender.send(data, MessageClass.CONTROL)
        if self.connection.ended is None:
            now = self.connection.now()
            times = [self._rtmp.next_deadline(now), None if self._playing is None else self._playing.quiet_at]
            due = [when for when in times if when is not None]
            self.connection.set_timer(min(due) if due else None)
