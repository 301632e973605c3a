"""RTMP aggregate messages: several audio, video and data messages in one, laid out like an FLV file.

Flash Media Server sends them to save chunk headers; a receiver has to take them apart before anything else looks at
the messages inside. Source: Adobe RTMP 1.0 section 7.1.6.
"""

from __future__ import annotations

from typing import Final

from flowctl.errors import LimitExceededError, RemoteProtocolError
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.wire import CLOCK_MASK, TYPE_AUDIO, TYPE_DATA_AMF0, TYPE_DATA_AMF3, TYPE_VIDEO, Message

_HEADER: Final = 11
_BACK_POINTER: Final = 4
_TYPES: Final = frozenset({TYPE_AUDIO, TYPE_VIDEO, TYPE_DATA_AMF0, TYPE_DATA_AMF3})
"""What an aggregate may carry: the tag types of FLV. Commands and control inside one would bypass their own limits."""

_DEFAULT_LIMITS: Final = WireLimits()


def split_aggregate(message: Message, limits: WireLimits = _DEFAULT_LIMITS) -> list[Message]:
    """Return the audio, video and data messages inside an aggregate (7.1.6), on its chunk and message stream.

    The timestamps inside count from any origin: the first one becomes the aggregate's own timestamp, the others keep
    their distance from it. Anything that is not audio, video or data is left out.

    Byte layout, repeated: type (1), length (3), timestamp low 24 bits (3) and high 8 bits (1), stream id (3, unused),
    payload, back pointer (4, unused, and missing after the last one in what some servers send): an FLV tag.
    """
    body = message.payload
    found: list[Message] = []
    first = None
    at = count = 0
    while at < len(body):
        start = at + _HEADER
        end = start + int.from_bytes(body[at + 1 : at + 4], "big")
        if end > len(body):
            raise RemoteProtocolError(
                f"aggregate of {len(body)} bytes ends inside the message at {at}", code="aggregate-truncated"
            )
        count += 1
        if count > limits.aggregate_messages:
            raise LimitExceededError("aggregate_messages", count, limits.aggregate_messages)
        timestamp = int.from_bytes(body[at + 4 : at + 7], "big") | body[at + 7] << 24
        if first is None:
            first = timestamp
        if body[at] in _TYPES:
            rebased = (message.timestamp + timestamp - first) & CLOCK_MASK
            found.append(Message(message.csid, rebased, body[at], message.msid, body[start:end]))
        at = end + _BACK_POINTER
    return found
