"""A stream in one wire format: its log, its fan-outs, and how a message is serialised for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from flowctl.fanouts import Fanouts
from flowctl.flow import MessageClass
from flowctl.rtmp import commands
from flowctl.rtmp.chunk import serialise
from flowctl.rtmp.wire import TYPE_AUDIO, TYPE_VIDEO
from flowctl.streamlog import CacheLimits, StreamLog

_CSID: Final = {TYPE_AUDIO: 4, TYPE_VIDEO: 6}
_DATA_CSID: Final = 7
"""Chunk streams of the log: others than those of the sessions' own replies (2, 3, 5), which stand between messages."""

_MSID_AT: Final = 8
"""Where the message stream id stands behind a basic header of one octet (Adobe RTMP 1.0 section 5.3.1.2.1)."""

Body = tuple[int, bytes]
"""A message that is kept: type id and payload."""


class WireLog:
    """RTMP chunks for players on one message stream id.

    Every message has a full header with an absolute timestamp, so that a viewer can start at any of them.

    Args:
        name: of the stream.
        msid: message stream id that the players play on; nearly always 1.
        chunk_size: chunk size announced to the players.
        cache: bounds of the GOP cache.
        flush_interval_s: of the fan-outs.
        flush_adaptive: whether the fan-outs may flush sooner where that costs little.
    """

    __slots__ = ("chunk_size", "fanouts", "log", "msid", "published", "viewers")

    def __init__(
        self,
        name: str,
        msid: int,
        *,
        chunk_size: int,
        cache: CacheLimits,
        flush_interval_s: float,
        flush_adaptive: bool = True,
    ) -> None:
        self.msid = msid
        self.published = True  # what the log last told its players
        self.viewers = 0  # who has it; guarded by the stream's lock
        self.chunk_size = chunk_size
        self.log = StreamLog(f"{name}#{msid}", cache=cache)
        self.fanouts = Fanouts(self.log, flush_interval_s=flush_interval_s, adaptive=flush_adaptive)

    def serialise(self, type_id: int, timestamp: int, payload: bytes) -> bytes:
        """Return one message as it goes to the players' sockets."""
        csid = _CSID.get(type_id, _DATA_CSID)
        return serialise(type_id, self.msid, timestamp, payload, csid, self.chunk_size)

    def headers(self, bodies: Iterable[Body], timestamp: int) -> tuple[bytes, ...]:
        """Return the headers in `bodies` with the timestamp of the message that they go before.

        Metadata has timestamp 0: FFmpeg opens a stray data stream for any other.
        """
        return tuple(
            self.serialise(type_id, timestamp if type_id in _CSID else 0, payload) for type_id, payload in bodies
        )

    def append(
        self, type_id: int, timestamp: int, payload: bytes, message_class: MessageClass, now: float, headers: list[Body]
    ) -> None:
        """Publish one message.

        `headers`, those up to this message, go before it for viewers who start here, if it is a key frame.
        """
        wire = self.serialise(type_id, timestamp, payload)
        restart = self.headers(headers, timestamp) if message_class is MessageClass.KEY else ()
        self.log.append(wire, message_class, now, restart=restart)
        if message_class is MessageClass.HEADER and self.log.gop.key_sequence < 0:
            # A stream that refreshes without key frames: who has waited for one in vain gets the headers all the same.
            self.log.gop.restart = self.headers(headers, timestamp)

    def seed(self, other: WireLog) -> None:
        """Begin with the GOP cache of the same stream's log for another message stream id, which it is rewritten for.

        A message of a log is one type 0 chunk, the only one that names the message stream id, and type 3 chunks.
        """
        entry = other.log.cached
        while entry is not None and entry.next is not None:
            restart: tuple[bytes, ...] = ()
            if entry.message_class is MessageClass.KEY:
                restart = tuple(self._readdressed(wire) for wire in entry.gop.restart)
            self.log.append(self._readdressed(entry.wire), entry.message_class, entry.enqueued_at, restart=restart)
            entry = entry.next

    def _readdressed(self, wire: bytes) -> bytes:
        return wire[:_MSID_AT] + self.msid.to_bytes(4, "little") + wire[_MSID_AT + 4 :]

    def append_header(self, type_id: int, timestamp: int, payload: bytes, now: float) -> None:
        """Publish a header that its publisher sent before it counted; timestamp as for `headers`."""
        for wire in self.headers([(type_id, payload)], timestamp):
            self.log.append(wire, MessageClass.HEADER, now)

    def begin(self, timestamp: int, now: float) -> None:
        """Tell the players, who wait, that the stream is published: behind the word that it had ended."""
        wire = commands.start_of_stream_bytes(self.msid, chunk_size=self.chunk_size, timestamp=timestamp)
        self.published = True
        self.log.append(wire, MessageClass.CONTROL, now)

    def end(self, timestamp: int, now: float) -> None:
        """Tell the players, after everything that was published, that the publisher has gone."""
        self.published = False
        wire = commands.end_of_stream_bytes(self.msid, chunk_size=self.chunk_size, timestamp=timestamp)
        self.log.append(wire, MessageClass.CONTROL, now)
        self.log.drop_cache()
