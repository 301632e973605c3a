"""Every limit that one RTMP connection is held to: name, unit, default, precedent, and what happens when it is hit.

An RTMP peer announces sizes and opens streams as it likes; nothing in the protocol bounds them. So each thing a peer
can make us hold, compute or wait for has a named limit here. Sizes and counts are enforced where the bytes are
parsed (`wire.rtmp.chunk.reader`, `wire.rtmp.amf.amf0`, `wire.rtmp.messages`), times and rates by the
`wire.rtmp.endpoint.Endpoint`, which is handed the clock. A hit is a `flowctl.errors.LimitExceededError` that carries
the field's name, the value and the limit.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError, LimitExceededError
from flowctl.wire.rtmp.amf.limits import AmfLimits
from flowctl.wire.rtmp.wire import (
    LENGTH_MAX,
    TYPE_AGGREGATE,
    TYPE_AUDIO,
    TYPE_DATA_AMF0,
    TYPE_DATA_AMF3,
    TYPE_PEER_BANDWIDTH,
    TYPE_SET_CHUNK_SIZE,
    TYPE_VIDEO,
)

_KIB: Final = 1024
_MIB: Final = 1024 * 1024

_MEDIA: Final = frozenset({TYPE_AUDIO, TYPE_VIDEO, TYPE_AGGREGATE})
_DATA: Final = frozenset({TYPE_DATA_AMF0, TYPE_DATA_AMF3})

CHUNK_SIZE_CEILING: Final = 0x7FFFFFFF
"""Largest value of a Set Chunk Size: the first of its 32 bits must be zero (Adobe RTMP 1.0 section 5.4.1)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WireLimits:
    """Limits of one RTMP connection; immutable, so one object serves all connections of a server.

    Every time and rate may be 0, which turns it off. Sizes and counts cannot be turned off: without them a peer
    decides how much memory we use. Unless a field says otherwise, going over ends the connection.
    """

    chunk_size_min_bytes: int = 128
    """Smallest chunk size a peer may set, 1..chunk_size_max_bytes. 128 is the protocol's own default and the floor
    that nginx-rtmp and Red5 settled on: at chunk size 1 each payload byte costs a header and a turn of the parser.
    Smaller values are refused, unless `trusted`."""

    chunk_size_max_bytes: int = _MIB
    """Largest chunk size a peer may set. Servers announce 4096 to 65536 (SRS 60000) and some clients more; values
    such as 0x7FFFFFFF are seen from broken and hostile peers only. Larger values are refused."""

    trusted: bool = False
    """True lets the peer set chunk sizes 1..chunk_size_min_bytes-1: for conformance tests and peers of our own."""

    media_message_bytes: int = 10 * _MIB
    """Largest audio, video or aggregate message. A 4K key frame at 80 Mbit/s stays below 4 MiB."""

    data_message_bytes: int = _MIB
    """Largest AMF data message. ``onMetaData`` of a long file carries its key frame index (18 bytes a key frame),
    which passes 64 KiB after two hours; 1 MiB is nginx-rtmp's ``max_message`` for everything."""

    command_message_bytes: int = 64 * _KIB
    """Largest command, shared object or message of unknown type. A ``connect`` takes less than 1 KiB."""

    control_message_bytes: int = 512
    """Largest protocol or user control message (types 1 to 6). The defined ones take at most 10 bytes."""

    chunk_streams: int = 64
    """Chunk streams a peer may open in the life of a connection, 1..65598. Publishers use 4 to 6; nginx-rtmp allows
    32 (``max_streams``). Each costs a state that cannot be forgotten, because later headers refer to it."""

    unfinished_bytes: int = 16 * _MIB
    """Bytes held in messages that have begun and not ended, all chunk streams together."""

    unpublished_bytes: int = 256 * _KIB
    """Bytes held in unfinished messages of a peer that is not publishing, looked at after each piece of input; also
    what is held back of its messages while input is paused. Such a peer has nothing long to say, and anybody can be
    one: without this, each connection of a stranger could hold `unfinished_bytes` and ``paused_input_bytes``."""

    aggregate_messages: int = 4096
    """Messages in one aggregate. An aggregate of 10 MiB could otherwise hold 700,000 empty ones."""

    message_streams: int = 8
    """Message streams (createStream) open at one time. Publishers use one, Flash-era players up to four."""

    commands_per_second: float = 50.0
    """Commands a peer may send per second, averaged by the session. A publisher sends about six in all."""

    messages_per_second: float = 10_000.0
    """Messages of any kind that a peer may send per second, after a burst of two seconds' worth. A peer above
    it is not read until the rate is kept again, so TCP slows it down; one that goes on all the same is cut after
    `cut_after_s` of `WorkLimits`. An encoder sends 30 to 300. Messages of fewer than 120 bytes with
    their headers count more often, in proportion, up to ten times: one is as much work as any other. 0: off."""

    handshake_time_s: float = 5.0
    """Time from accept to the end of the handshake (Red5: 5 s, MediaMTX: 10 s, nginx-rtmp: 60 s). 0: off."""

    first_command_s: float = 10.0
    """Time from the end of the handshake to the first command. 0: off."""

    first_media_s: float = 20.0
    """Time from an accepted publish to the first audio or video (SRS ``firstpkt_timeout``: 20 s). 0: off."""

    player_wait_s: float = 60.0
    """Time that a player may wait on a stream without a publisher. 0: off."""

    ping_after_s: float = 60.0
    """Silence after which the peer is sent a ping request (nginx-rtmp ``ping``: 60 s). 0: off."""

    ping_timeout_s: float = 30.0
    """Time that a pinged peer has for any sign of life (nginx-rtmp ``ping_timeout``: 30 s). 0: off."""

    amf: AmfLimits = dataclasses.field(default_factory=AmfLimits)
    """Depth, node count and string length of AMF values in commands and data."""

    def __post_init__(self) -> None:
        check_fields(self)
        self._check("chunk_size_min_bytes", 1, CHUNK_SIZE_CEILING)
        self._check("chunk_size_max_bytes", self.chunk_size_min_bytes, CHUNK_SIZE_CEILING)
        # The floor leaves room for the longest control message the protocol defines (10 bytes). The other limits are
        # not below it, so that the reader looks up the type only of messages longer than that.
        self._check("control_message_bytes", 10, LENGTH_MAX)
        for name in ("media_message_bytes", "data_message_bytes", "command_message_bytes"):
            self._check(name, self.control_message_bytes, LENGTH_MAX)
        self._check("chunk_streams", 1, 65598)
        for name in ("unfinished_bytes", "unpublished_bytes", "aggregate_messages", "message_streams"):
            self._check(name, 1, 2**40)
        for field in dataclasses.fields(self):
            if field.name.endswith(("_s", "_per_second")):
                self._check(field.name, 0, 2**31, (int, float))

    def _check(self, name: str, low: int, high: int, kinds: tuple[type, ...] = (int,)) -> None:
        value = getattr(self, name)
        # The type itself, because True is an int; a comparison with NaN is false, so NaN is refused as well.
        if type(value) not in kinds or not low <= value <= high:
            what = "a whole number from" if float not in kinds else "a number from"
            raise ConfigError(f"{name} is {value!r}, allowed is {what} {low} to {high}")

    def message_limit(self, type_id: int) -> tuple[str, int]:
        """Return the name and the value (bytes) of the limit on messages of type `type_id` (0..255).

        Unknown types are held to the limit of commands: they are read only to be ignored.
        """
        if type_id in _MEDIA:
            return "media_message_bytes", self.media_message_bytes
        if type_id in _DATA:
            return "data_message_bytes", self.data_message_bytes
        if TYPE_SET_CHUNK_SIZE <= type_id <= TYPE_PEER_BANDWIDTH:
            return "control_message_bytes", self.control_message_bytes
        return "command_message_bytes", self.command_message_bytes

    def check_message(self, type_id: int, length: int) -> None:
        """Refuse a message by the length that its header announces, before any of its payload is read."""
        name, maximum = self.message_limit(type_id)
        if length > maximum:
            message = f"message of type {type_id} announces {length} bytes, {name} is {maximum}"
            raise LimitExceededError(name, length, maximum, message)

    def check_chunk_size(self, size: int) -> None:
        if size > self.chunk_size_max_bytes:
            raise LimitExceededError("chunk_size_max_bytes", size, self.chunk_size_max_bytes)
        if size < self.chunk_size_min_bytes and not self.trusted:
            minimum = self.chunk_size_min_bytes
            message = f"Set Chunk Size says {size}, the least is {minimum}"
            raise LimitExceededError("chunk_size_min_bytes", size, minimum, message)
