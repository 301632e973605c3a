"""A stream in one wire format: its log, its fan-outs, the headers newcomers need, and how a message is serialised.

A message is serialised once. A header (codec configuration, metadata) goes into the log as the message that it is, and
the same octets are kept for those who start at a later key frame, as long as no other takes its place. So a key frame
costs its own octets, however many headers there are and however often it comes. The headers keep the time at which
they came, which no player goes by; metadata has none.

Of several tracks viewers start at the key frames of the main one. Those of the others come just before it or just
behind it; the ones before it go out with the headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Generic, Protocol, TypeVar

from flowctl.core.fanout.following import Fanouts
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.streamlog import CacheLimits, StreamLog
from flowctl.errors import LimitExceededError
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.chunk.writer import deserialise, serialise
from flowctl.wire.rtmp.media.composition import with_composition
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.wire import CLOCK_MASK, EXTENDED, TYPE_AUDIO, TYPE_DATA_AMF0, TYPE_VIDEO, signed_difference

_CSID: Final = {TYPE_AUDIO: 4, TYPE_VIDEO: 6}
_DATA_CSID: Final = 7
"""Chunk streams of the log: others than those of the sessions' own replies (2, 3, 5), which stand between messages."""

HEADER_BYTES: Final = 64 * 1024
"""Largest header that is kept: parameter sets take less than 1 KiB, and metadata 2; a longer one is the key frame index
of a file of hours, which a viewer of a live stream has no use for."""
HEADERS_BYTES: Final = 1024 * 1024
"""Size of all headers of a publisher: 64 tracks with parameter sets of 16 KiB."""
HEADERS: Final = 64
"""Headers kept of a publisher: one per track and kind, so that one that invents tracks gets no further."""

# Bound once: an attribute of an Enum class is looked up by code in Python, for each message.
_KEY, _HEADER = MessageClass.KEY, MessageClass.HEADER

_T = TypeVar("_T")


class KeptHeaders(Generic[_T]):
    """The headers of one publisher that newcomers need, in the order in which they came; bounded (pure)."""

    __slots__ = ("_kept", "_values", "size_bytes")

    def __init__(self) -> None:
        self._kept: dict[object, tuple[int, _T]] = {}  # by sticky key: octets of the payload, and what is kept
        self._values: tuple[_T, ...] | None = ()  # None: to be made anew
        self.size_bytes = 0

    def keep(self, key: object, size_bytes: int, value: _T) -> None:
        """Keep a header in place of the one with the same `key`, which is out of date."""
        before = self._kept.pop(key, None)
        self.size_bytes -= 0 if before is None else before[0]
        self._values = None
        if size_bytes > HEADER_BYTES:
            raise LimitExceededError("header_bytes", size_bytes, HEADER_BYTES)
        if self.size_bytes + size_bytes > HEADERS_BYTES:
            raise LimitExceededError("headers_bytes", self.size_bytes + size_bytes, HEADERS_BYTES)
        if len(self._kept) >= HEADERS:
            raise LimitExceededError("headers", len(self._kept) + 1, HEADERS)
        self._kept[key] = (size_bytes, value)
        self.size_bytes += size_bytes

    def items(self) -> list[tuple[object, int, _T]]:
        """Return (key, octets of the payload, header) of each, oldest first."""
        return [(key, size, value) for key, (size, value) in self._kept.items()]

    @property
    def values(self) -> tuple[_T, ...]:
        """The headers, oldest first; the same tuple until a header comes."""
        if self._values is None:
            self._values = tuple(value for _, value in self._kept.values())
        return self._values


class WireFormat(Protocol):
    """How the messages of a stream go over the wire; immutable, and complete in each message."""

    # whether nothing can follow what `end` returns, so that each publication has a log of its own
    ends: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Name of the form in the log's key."""

    def serialise(self, type_id: int, timestamp: int, payload: bytes) -> bytes:
        """Return one message (RTMP type, ms, body) as it goes to the players' sockets; empty: not in this format."""

    def deserialise(self, wire: bytes) -> tuple[int, int, bytes]:
        """Return type, timestamp and body of what `serialise` returned."""

    def time_of(self, wire: bytes) -> int:
        """Return the timestamp of what `serialise` returned."""
        return self.deserialise(wire)[1]

    def shown_at(self, wire: bytes) -> int:
        """Return when a picture is shown that `serialise` returned, on the clock of its timestamp."""
        type_id, timestamp, payload = self.deserialise(wire)
        return timestamp + (inspect(type_id, payload).composition_ms or 0)

    def retime(self, wire: bytes, timestamp: int, shown_ms: int) -> bytes:
        """Return a picture that `serialise` returned with another timestamp, shown at another time where it says so."""
        type_id, _, payload = self.deserialise(wire)
        ahead_ms = signed_difference(shown_ms & CLOCK_MASK, timestamp)
        composed = with_composition(payload, inspect(type_id, payload), ahead_ms)
        return self.serialise(type_id, timestamp, composed or payload)

    def is_media(self, wire: bytes) -> bool:
        """Return whether what `serialise` returned is sound or picture, or a header of these, and no metadata."""
        return self.deserialise(wire)[0] in _CSID

    def begin(self, timestamp: int) -> bytes:
        """Return what tells players who wait that the stream is published; empty: nothing does."""
        del timestamp
        return b""

    def end(self, timestamp: int) -> bytes:
        """Return what tells players, after all that was published, that the publisher has gone; empty: nothing."""
        del timestamp
        return b""


@dataclass(frozen=True, slots=True)
class RtmpChunks(WireFormat):
    """RTMP chunks for players on one message stream id.

    Every message has a full header with an absolute timestamp, so that a viewer can start at any of them.
    """

    msid: int
    chunk_size: int

    @property
    def name(self) -> str:
        return str(self.msid)

    def serialise(self, type_id: int, timestamp: int, payload: bytes) -> bytes:
        csid = _CSID.get(type_id, _DATA_CSID)
        return serialise(type_id, self.msid, timestamp, payload, csid, self.chunk_size)

    def deserialise(self, wire: bytes) -> tuple[int, int, bytes]:
        return deserialise(wire, self.chunk_size)

    def time_of(self, wire: bytes) -> int:
        timestamp = int.from_bytes(wire[1:4], "big")  # behind a basic header of one octet
        return timestamp if timestamp != EXTENDED else int.from_bytes(wire[12:16], "big")

    def begin(self, timestamp: int) -> bytes:
        return commands.stream_notice_bytes(self.msid, published=True, chunk_size=self.chunk_size, timestamp=timestamp)

    def end(self, timestamp: int) -> bytes:
        return commands.stream_notice_bytes(self.msid, published=False, chunk_size=self.chunk_size, timestamp=timestamp)


class PublishChunks(RtmpChunks):
    """RTMP chunks of a publisher: metadata is set, and the stream is given back behind the last of its messages."""

    ends: ClassVar[bool] = True
    __slots__ = ()

    @property
    def name(self) -> str:
        return f"push-{self.msid}"

    def serialise(self, type_id: int, timestamp: int, payload: bytes) -> bytes:
        if type_id == TYPE_DATA_AMF0 and payload.startswith(commands.ON_METADATA):
            payload = commands.SET_DATA_FRAME + payload
        return super().serialise(type_id, timestamp, payload)

    def deserialise(self, wire: bytes) -> tuple[int, int, bytes]:
        type_id, timestamp, payload = super().deserialise(wire)
        wrapped = type_id == TYPE_DATA_AMF0
        return type_id, timestamp, payload.removeprefix(commands.SET_DATA_FRAME) if wrapped else payload

    begin = WireFormat.begin

    def end(self, timestamp: int) -> bytes:
        del timestamp
        message = commands.command("deleteStream", 0, None, float(self.msid))
        return serialise(message.type_id, message.msid, 0, message.payload, message.csid, self.chunk_size)


class WireLog:
    """The log of a stream in one format, and what belongs to it."""

    __slots__ = (
        *("_ahead", "all_tracks", "fanouts", "for_links", "frozen", "headers", "log", "viewers"),
        "wire_format",
    )

    def __init__(
        self,
        name: str,
        wire_format: WireFormat,
        *,
        rendition: str = "",
        all_tracks: bool = False,
        cache: CacheLimits,
        flush_interval_s: float,
        flush_adaptive: bool = True,
        viewers_log: WireLog | None = None,
    ) -> None:
        self.wire_format: Final = wire_format
        self.for_links = viewers_log is not None
        self.all_tracks = all_tracks or self.for_links  # it is for those who take all tracks of a publication
        # whether nothing but the end is appended: the publication has tracks, which those who follow this cannot play;
        # guarded by the stream's lock
        self.frozen = False
        self.viewers = 0  # who has it; guarded by the stream's lock
        self.log = StreamLog(f"{name}#{wire_format.name}{rendition and ' '}{rendition}", cache=cache)
        self.headers: KeptHeaders[bytes] = KeptHeaders()  # the present publisher's; guarded by the stream's lock
        self._ahead: list[bytes] = []  # what goes before the next key frame too; guarded by the stream's lock
        self.fanouts: Fanouts = Fanouts(
            self.log,
            flush_interval_s=flush_interval_s,
            adaptive=flush_adaptive,
            beside=None if viewers_log is None else viewers_log.fanouts,
        )

    def append(
        self,
        type_id: int,
        timestamp: int,
        payload: bytes,
        message_class: MessageClass,
        now: float,
        *,
        header_key: object = None,
        leading: bool = False,
        ahead: bool | None = None,
    ) -> None:
        wire = b"" if self.frozen else self.wire_format.serialise(type_id, timestamp, payload)
        if not wire:
            return
        key = message_class is _KEY
        if key or leading:
            restart = (*self.headers.values, *self._ahead) if key else ()
            self.log.append(wire, message_class, now, restart=restart, leading=leading)
        else:
            self.log.append(wire, message_class, now)
        if message_class is _HEADER:
            self._keep(header_key, type_id, timestamp, payload, wire)
        elif ahead:
            self._ahead.append(wire)
        elif self._ahead and (key or ahead is False):
            self._ahead.clear()
            self.log.headers = self.headers.values  # who goes on in the middle of a group needs no old pictures

    def _keep(self, key: object, type_id: int, timestamp: int, payload: bytes, wire: bytes) -> None:
        """Keep a header as it was published; metadata without its time, or FFmpeg opens a stray data stream for it."""
        if type_id not in _CSID and timestamp:
            wire = self.wire_format.serialise(type_id, 0, payload)
        try:
            self.headers.keep(key, len(payload), wire)
        finally:
            # Who has waited for a key frame in vain gets the headers all the same, and none that is out of date.
            self.log.headers = self.headers.values

    def forget_headers(self) -> None:
        self.headers = KeptHeaders()
        self._ahead.clear()
        self.log.headers = ()

    def seed(self, other: WireLog) -> None:
        def rewritten(wires: tuple[bytes, ...]) -> tuple[bytes, ...]:
            found = (self.wire_format.serialise(*other.wire_format.deserialise(wire)) for wire in wires)
            return tuple(filter(None, found))

        for key, size, wire in other.headers.items():
            for written in rewritten((wire,)):
                self.headers.keep(key, size, written)
        entry = other.log.cached
        while entry is not None and entry.next is not None:
            restart: tuple[bytes, ...] = ()
            if entry.message_class is MessageClass.KEY:
                restart = self.headers.values
                if entry.gop.restart != other.headers.values:  # a header has come since
                    restart = rewritten(entry.gop.restart)
            for written in rewritten((entry.wire,)):
                self.log.append(written, entry.message_class, entry.enqueued_at, restart=restart, leading=entry.leading)
            entry = entry.next
        self._ahead = list(rewritten(tuple(other._ahead)))
        self.log.headers = self.headers.values  # for viewers that go on without a key frame

    def begin(self, timestamp: int, now: float) -> None:
        """Tell the players, who wait, that the stream is published: behind the word that it had ended."""
        self.log.ended = False
        if wire := self.wire_format.begin(timestamp):
            self.log.append(wire, MessageClass.CONTROL, now)

    def end(self, timestamp: int, now: float) -> None:
        """Tell the players, after everything that was published, that the publisher has gone."""
        self.log.ended = True
        if wire := self.wire_format.end(timestamp):
            self.log.append(wire, MessageClass.CONTROL, now)
        self.log.drop_cache()
