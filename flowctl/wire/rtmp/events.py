"""What the RTMP sessions tell their caller: one small frozen object per thing that happened.

`ServerSession.receive` and `ClientSession.receive` return these in the order of the wire. Audio, video and plain data
messages are not wrapped: the `wire.rtmp.wire.Message` itself stands in the list, because a publisher sends a hundred
of them per second and everything else a few per hour. So a caller tests for `Message` first.

No ``repr`` of an event shows a secret of an address (see `wire.rtmp.url`), so events can be logged as they are. A
stream *name* is shown: where names are secret keys, log a digest of them instead.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from flowctl.wire.rtmp.commands import CAPS_MULTITRACK
from flowctl.wire.rtmp.url import Query, RtmpUrl
from flowctl.wire.rtmp.wire import Message

PublishKind: TypeAlias = Literal["live", "record", "append"]
"""How a publisher wants to be stored (Adobe RTMP 1.0 section 7.2.2.6)."""


@dataclasses.dataclass(frozen=True, slots=True)
class HandshakeDone:
    style: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConnectRequested:
    """A client asks to connect; answer with `accept_connect` or `reject_connect`."""

    # ``tcUrl`` as sent, without authentication; "" when the client sent none. May hold secrets.
    tc_url: str = dataclasses.field(repr=False)
    url: RtmpUrl  # the address, without a stream name yet
    flash_ver: str  # what the client calls itself, at most 256 characters; "" when it does not say
    object_encoding: int
    page_url: str = dataclasses.field(repr=False)  # page of a Flash player, "" for none. May hold secrets.
    user: str | None  # user name that passed Adobe authentication. None: no authentication took place.
    enhanced: bool  # whether it tells codecs or capabilities of Enhanced RTMP
    caps_ex: int  # Enhanced RTMP v2 capability bits, 0 for none: 1 reconnect, 2 multitrack, 4 ModEx, 8 nanoseconds
    video_codecs: frozenset[str] = frozenset()  # that it says it decodes, by FourCC, of those that Enhanced RTMP has

    @property
    def multitrack(self) -> bool:
        """Whether the client says that it reads several tracks of a kind."""
        return bool(self.caps_ex & CAPS_MULTITRACK)


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectRefused:
    """The session itself refused a connect; close the connection once `data_to_send` has been flushed."""

    reason: str  # ``"need-auth"``, ``"challenged"`` (both are steps of Adobe authentication) or ``"auth-failed"``
    user: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PublishRequested:
    """A client asks to publish; answer with `accept_publish` or `reject_publish`."""

    stream_id: int
    name: str  # stream name without application and query
    query: Query
    kind: PublishKind
    url: RtmpUrl  # the whole address; `RtmpUrl.path` is the one name of the stream


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlayRequested:
    """A client asks to play; answer with `accept_play`, `play_waiting` or `reject_play`."""

    stream_id: int
    name: str  # stream name without application and query
    query: Query
    # position to start at; negative is live (-1000 live only, -2000 live or recorded, as librtmp and FFmpeg send them).
    start_ms: int
    duration_ms: int | None
    reset: bool
    url: RtmpUrl


@dataclasses.dataclass(frozen=True, slots=True)
class MetadataReceived:
    """A publisher sent ``onMetaData``, wrapped in ``@setDataFrame`` or not."""

    stream_id: int
    message: Message  # what players are to get: an AMF0 data message that starts with ``onMetaData``


@dataclasses.dataclass(frozen=True, slots=True)
class StreamClosed:
    """A stream that was publishing, playing or asking for it has stopped at the client's word."""

    stream_id: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class PauseRequested:
    """A player paused or resumed; the session has answered. Delivery stops while paused."""

    stream_id: int
    pause: bool


@dataclasses.dataclass(frozen=True, slots=True)
class SeekRefused:
    """A player asked to seek in a live stream; the session has answered ``NetStream.Seek.Failed``."""

    stream_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class ReceiveAudio:
    stream_id: int
    enabled: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ReceiveVideo:
    stream_id: int
    enabled: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Acknowledged:
    sequence_number: int  # octets it has received, modulo 2^32; whatever the peer claims


@dataclasses.dataclass(frozen=True, slots=True)
class Pong:
    timestamp: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ignored:
    """The session ignored something for the first time; `counters` counts each time."""

    what: str  # the name of the counter, for example ``"unknown-message-type"``
    detail: str  # the type id, event number or command name, in a form fit for a log


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Client: the server refused our connect, createStream, publish or play."""

    what: str  # ``"connect"``, ``"createStream"``, ``"publish"`` or ``"play"``
    code: str  # for example ``NetConnection.Connect.Rejected``; "" when the server gave none
    description: str  # the server's words; may hold an authentication challenge, never the password
    # to log in, close and connect again with these (`ClientSession.connect`). None: refused for good.
    retry_parameters: str | None = dataclasses.field(default=None, repr=False)
    # where to go instead, as the server wrote it; may hold a key. None: it named no other server.
    redirect: str | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class PublishStarted:
    """Client: ``NetStream.Publish.Start``; media may be sent."""

    stream_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class PlayStarted:
    """Client: ``NetStream.Play.Start``; media will come."""

    stream_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class StatusReceived:
    """Client: an ``onStatus`` that has no event of its own."""

    stream_id: int
    level: str
    code: str  # for example ``NetStream.Play.PublishNotify``
    description: str


@dataclasses.dataclass(frozen=True, slots=True)
class StreamEnded:
    """Client: the stream is over, or was taken from us."""

    stream_id: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReconnectRequested:
    """Client: the server asks us to connect again at the next key frame (Enhanced RTMP v2, "Reconnect Request")."""

    # where to; may be relative to the present one. None: the same address.
    tc_url: str | None = dataclasses.field(repr=False)
    description: str


ControlEvent: TypeAlias = Acknowledged | Pong | Ignored
"""Events of the protocol control that both ends have in common."""

ServerEvent: TypeAlias = (
    Message
    | HandshakeDone
    | ConnectRequested
    | ConnectRefused
    | PublishRequested
    | PlayRequested
    | MetadataReceived
    | StreamClosed
    | PauseRequested
    | SeekRefused
    | ReceiveAudio
    | ReceiveVideo
    | ControlEvent
)
"""What `ServerSession.receive` returns."""

ClientEvent: TypeAlias = (
    Message
    | HandshakeDone
    | Rejected
    | PublishStarted
    | PlayStarted
    | StatusReceived
    | StreamEnded
    | ReconnectRequested
    | ControlEvent
)
"""What `ClientSession.receive` returns."""
