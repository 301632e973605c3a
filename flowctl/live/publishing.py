"""A publication, whatever its protocol: messages pass on to the stream, and silence has a limit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog

from flowctl.connection import Connection
from flowctl.core.flow.state import SendState
from flowctl.errors import LimitExceededError
from flowctl.live.access.request import LiveRequest
from flowctl.live.config import LiveConfig
from flowctl.live.hub import Hub, Publisher, Right, line_fields
from flowctl.live.judging.shares import ViewerShares
from flowctl.live.oversight.signals import EVENT_NAME, ShareSubscription, message_values, publisher_settings
from flowctl.live.records.ingest import Ingest
from flowctl.live.settings.levels import Role
from flowctl.live.stream import MEDIA_TYPES, Stream
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.wire import Message

_log: Final = structlog.get_logger("flowctl.live")


class PublishWords:
    """Messages of a publication to its publisher in its protocol; this base sends none."""

    __slots__ = ()

    def fail(self, why: str) -> None:
        """Tell the publisher why the connection is about to end."""

    def data(self, name: str, values: dict[str, Any]) -> None:
        """Send the publisher the data that it has asked for."""


class Publishing:
    """A publication of the peer under one name. Its connection's thread."""

    __slots__ = (
        *("_began_at", "_connection", "_discarded", "_hub", "_ingest", "_limits_told", "_media_at", "_messages"),
        *("_publisher", "_signal", "_words", "look_at", "query", "request", "stream"),
    )

    def __init__(
        self,
        publisher: Publisher,
        connection: Connection,
        words: PublishWords,
        hub: Hub,
        stream: Stream,
        now: float,
        ingest: Ingest,
    ) -> None:
        self._ingest = ingest
        self._publisher = publisher
        self._connection = connection
        self._words = words
        self._hub = hub
        self._began_at = now
        self._media_at: float | None = None  # when its last audio or video message came; None: none has come
        self._messages = 0
        self._discarded = 0  # messages not passed on because another publisher counts
        self._limits_told: frozenset[str] = frozenset()  # limits on what is kept of its headers that were logged
        self._signal: ShareSubscription | None = None  # tells it how its viewers are doing; None: it has not asked
        self.stream = stream
        # when it is looked at whether it has fallen silent. None: it may be.
        self.look_at = self._next_look(now, self._settings.rtmp.limits.first_media_s, now)
        self.request: LiveRequest | None = None  # what it asked for. None: no hook wants to know.
        self.query: Mapping[str, str] = {}  # what it was asked for with

    @property
    def _settings(self) -> LiveConfig:
        return self._hub.config.at(self.stream.name, Role.PUBLISHER)

    @property
    def standby(self) -> bool:
        return self.stream.publisher is not self._publisher

    def publish(self, message: Message, now: float) -> None:
        self._messages += 1
        type_id, timestamp, payload = message.type_id, message.timestamp, message.payload
        info = inspect(type_id, payload)
        if type_id in MEDIA_TYPES:
            self._media_at = now
            self._ingest.count_message(info.message_class, timestamp, len(payload), now)
        try:
            if not self.stream.publish(self._publisher, type_id, timestamp, payload, now, info):
                self._discarded += 1
        except LimitExceededError as error:
            self._header_refused(error)

    def _header_refused(self, error: LimitExceededError) -> None:
        """Count a header that is not kept for those who come later; log it once per limit."""
        if error.limit in self._limits_told:
            self._hub.limit_hit(error.limit)
            return
        self._limits_told |= {error.limit}
        self._hub.refused("header not kept", self._connection, self.stream.name, error)

    # -- silence

    def settings_changed(self, now: float) -> None:
        self.look_at = now

    def check_silence(self, now: float) -> None:
        """Cut a publisher that sends neither audio nor video, and see to it that it is looked at again.

        The wire session has a limit on the time to the first media as well, but of the connection: one that begins
        another publication now and then would keep the names of those before it.
        """
        if self.look_at is None or now < self.look_at:
            return
        limit, allowed_s, since = "media_silence_s", self._settings.media_silence_s, self._media_at
        if since is None:
            limit, allowed_s = "first_media_s", self._settings.rtmp.limits.first_media_s
            since = self._began_at
        if self._connection.receiver.paused:
            since = now  # what is not read cannot be late
        if allowed_s and now - since >= allowed_s:
            error = LimitExceededError(limit, round(now - since, 3), allowed_s)
            self._words.fail(str(error))
            raise error
        self.look_at = self._next_look(since, allowed_s, now)

    def _next_look(self, since: float, allowed_s: float, now: float) -> float | None:
        """Return when a publisher is to be looked at that may be silent for `allowed_s`; None: never.

        Never later than `media_silence_s` from `now`: media may come at once, and the silence begin behind it.
        """
        silence_s = self._settings.media_silence_s
        times = [start + limit for start, limit in ((since, allowed_s), (now, silence_s)) if limit]
        return min(times, default=None)

    # -- what it is told of its viewers

    def signal(self, asked: str) -> None:
        """Tell the publisher how its viewers are doing, from now on; `asked`: how, in its own words."""
        self._signal = self._hub.oversight.signals.subscribe(
            lambda shares: self._publisher.on_thread(self._tell_shares, shares),
            stream=self.stream.name,
            settings=publisher_settings(asked),
        )

    def _tell_shares(self, shares: ViewerShares) -> None:
        if self._signal is None or self.standby:
            return
        if self._connection.sender.state is SendState.READY:  # one that does not read what it asked for is not told
            self._words.data(EVENT_NAME, message_values(shares))

    # -- end

    def end(self, *, grace: bool, why: str) -> None:
        if self._signal is not None:
            self._signal.cancel()
            self._signal = None
        self._ingest.pause(self._connection.now())
        media = self.stream.media
        self._hub.unpublish(self.stream, self._publisher, grace=grace)
        if self.request is not None:
            self._hub.gate.note_end(self.request, why)
            self._hub.gate.note_face_end(self.request)
        _log.info(
            "publish ended",
            **line_fields(self._connection, self.stream.name),
            why=why,
            after_s=round(self._connection.now() - self._began_at, 1),
            messages=self._messages,
            discarded=self._discarded,
            media=media,
        )


class HubSink:
    """Publishes in the hub a stream of another server, and gives way to a publisher of this one.

    Any ingest may use it: one that has a connection of its own for its publisher is a `Publishing`. A copy of what an
    origin of ours shows is no member of a set (`alone`): what sets there are is decided where streams are published.
    """

    def __init__(
        self,
        hub: Hub,
        name: str,
        source: object,
        on_replaced: Callable[[], None] | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self._face = "" if alone else None
        self._hub = hub
        self._name = name
        self._stream: Stream | None = None
        self._on_replaced = on_replaced
        self.peer: tuple[str, int] = (f"follows {source}", 0)
        self.number: Final = 0

    def on_thread(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call at once: what the hub tells is harmless on any thread."""
        callback(*args)

    def publish_replaced(self, stream: Stream) -> None:
        """A publisher of this server's own has taken the name."""
        if self._stream is stream:
            self._stream = None
            self._hub.unpublish(stream, self, grace=False)  # out of the books
            if self._on_replaced is not None:
                self._on_replaced()

    def begin(self, now: float) -> None:
        del now
        if self._stream is None:
            self._stream = self._hub.publish(self._name, self, right=Right.FOLLOWS, face=self._face)
        else:
            self._hub.restart(self._stream, self)

    def take(self, type_id: int, timestamp: int, payload: bytes, now: float) -> None:
        if self._stream is not None:
            with contextlib.suppress(LimitExceededError):  # a header that is not kept, as of any publisher
                self._stream.publish(self, type_id, timestamp, payload, now)

    def end(self, why: str) -> None:
        del why
        stream, self._stream = self._stream, None
        if stream is not None:
            self._hub.unpublish(stream, self, grace=False)
