"""The message streams of one connection: which there are, and what each is used for (Adobe RTMP 1.0, 7.2.1.3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from flowctl.errors import LimitExceededError
from flowctl.wire.rtmp.states import STREAM_TABLE, StreamInput, StreamState, next_state
from flowctl.wire.rtmp.wire import Message

_OVERHEAD_BYTES: Final = 96
"""Octets charged for a held message on top of its payload, as in a Sender's queue."""


class HeldMessages:
    """Messages in the order in which they are to be treated."""

    __slots__ = ("_messages", "size_bytes")

    def __init__(self) -> None:
        self._messages: deque[Message] | None = None  # nearly no connection holds any
        self.size_bytes = 0  # their payloads, and an overhead for each; above 0 as long as there is a message

    def __len__(self) -> int:
        return 0 if self._messages is None else len(self._messages)

    def append(self, message: Message) -> None:
        if self._messages is None:
            self._messages = deque()
        self._messages.append(message)
        self.size_bytes += _charge(message)

    def put_first(self, messages: Sequence[Message]) -> None:
        """Put the parts of an aggregate before the other messages, which costs nothing for those."""
        if messages:
            if self._messages is None:
                self._messages = deque()
            self._messages.extendleft(reversed(messages))
            self.size_bytes += sum(map(_charge, messages))

    def pop(self) -> Message:
        """Remove and return the first message; there is one."""
        messages = self._messages or deque()
        message = messages.popleft()
        self.size_bytes -= _charge(message)
        if not messages:
            self._messages = None
        return message

    def drop_stream(self, stream_id: int) -> int:
        before = len(self)
        kept = [message for message in self._messages or () if message.msid != stream_id]
        self._messages = deque(kept) if kept else None
        self.size_bytes = sum(map(_charge, kept))
        return before - len(kept)


def _charge(message: Message) -> int:
    return len(message.payload) + _OVERHEAD_BYTES


PLAYING_STATES: Final = frozenset({StreamState.PLAYING, StreamState.WAITING})
"""States of a stream that plays; a player that waits for a publisher has been told that it plays."""

PLAYER_STATES: Final = frozenset({StreamState.PLAY_DECIDING, StreamState.PLAYING, StreamState.WAITING})
"""States of a stream that a player uses or asks for."""

# Frozen sets, replaced as a whole: nearly all connections are players, and an empty set of their own is 216 bytes.
_NONE: Final[frozenset[int]] = frozenset()

_DECIDING: Final = frozenset({StreamState.PUBLISH_DECIDING, StreamState.PLAY_DECIDING})
_ACTIVE: Final = frozenset({StreamState.PUBLISHING, StreamState.PLAYING, StreamState.WAITING})


class MessageStream:
    __slots__ = (
        "path",  # str: what was requested last, see `RtmpUrl.path`; "" before any request
        "paused",  # bool: the player paused it
        "reset",  # bool: the play request wants NetStream.Play.Reset
        "state",  # StreamState: assigned by MessageStreams.move only
        "stream_id",
    )

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.state = StreamState.IDLE
        self.path = ""
        self.paused = False
        self.reset = True


class MessageStreams:
    __slots__ = (
        "_streams",  # tuple[MessageStream, ...]: nearly always one, for which a dict is 170 octets more
        "awaiting",
        "publishing",
    )

    def __init__(self) -> None:
        self._streams: tuple[MessageStream, ...] = ()
        self.awaiting = _NONE  # those of them that have sent no media yet
        self.publishing = _NONE  # ids of the streams in PUBLISHING, for the hot path

    def __iter__(self) -> Iterator[MessageStream]:
        return iter(self._streams)

    def find(self, stream_id: int) -> MessageStream | None:
        return next((stream for stream in self._streams if stream.stream_id == stream_id), None)

    def open(self, stream_id: int, maximum: int) -> MessageStream:
        """Return a stream, made on the spot if there was none."""
        stream = self.find(stream_id)
        if stream is None:
            if len(self._streams) >= maximum:
                raise LimitExceededError("message_streams", len(self._streams) + 1, maximum)
            stream = MessageStream(stream_id)
            self._streams = (*self._streams, stream)
        return stream

    def free_id(self) -> int:
        """Return the lowest id that is free, so the first one is 1, which some clients take for granted."""
        taken = {stream.stream_id for stream in self._streams}
        return next(number for number in range(1, len(taken) + 2) if number not in taken)

    def move(self, stream: MessageStream, event: StreamInput) -> bool:
        """Change the state of a stream; the only place that does. Return whether it is another one now."""
        before = stream.state
        stream.state = next_state(STREAM_TABLE, before, event, f"message stream {stream.stream_id}")
        if stream.state is before:
            return False
        if stream.state is StreamState.DELETED:
            self._streams = tuple(other for other in self._streams if other is not stream)
        if stream.state is StreamState.PUBLISHING:
            self.publishing |= {stream.stream_id}
            self.awaiting |= {stream.stream_id}
        elif before is StreamState.PUBLISHING:  # otherwise it is in neither, and what is left would be a set of its own
            self.publishing = (self.publishing - {stream.stream_id}) or _NONE
            self.awaiting = (self.awaiting - {stream.stream_id}) or _NONE
        stream.paused = False
        return True

    def has_sent(self, stream_id: int) -> None:
        self.awaiting = (self.awaiting - {stream_id}) or _NONE

    @property
    def deciding(self) -> bool:
        return any(stream.state in _DECIDING for stream in self._streams)

    @property
    def active(self) -> bool:
        return any(stream.state in _ACTIVE for stream in self._streams)

    def publishing_as(self, name: str, app: str) -> list[MessageStream]:
        """Return the streams that are published as `name`, as encoders state it when they stop."""
        streams = [stream for stream in self._streams if stream.stream_id in self.publishing]
        if len(streams) > 1:  # with one there is no doubt, whatever name the encoder gives
            streams = [stream for stream in streams if f"/{stream.path}".endswith(f"/{name}")]
        if len(streams) > 1:  # a/room and b/room both end in what was named
            streams = [stream for stream in streams if stream.path == f"{app}/{name}"]
        return streams
