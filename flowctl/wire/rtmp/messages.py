"""RTMP messages as values: from the octets of a `Message` to what it says, and back.

`decode_message` turns control messages and commands into the small frozen classes below. All else stays a `Message`:
audio, video and data are passed on as they came, `split_aggregate` takes an aggregate apart, and what is unknown is
ignored; how many of those a peer may send is for the session to say.

Sources: Adobe RTMP 1.0 sections 5.4 (protocol control), 6.2 and 7.1.7 (user control), 7.1.1 to 7.1.6 (the rest).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

from flowctl.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.values import AmfValue, simplify
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.wire import (
    CLOCK_MASK,
    CONTROL_CSID,
    TYPE_ABORT,
    TYPE_ACK,
    TYPE_AUDIO,
    TYPE_COMMAND_AMF0,
    TYPE_COMMAND_AMF3,
    TYPE_DATA_AMF0,
    TYPE_DATA_AMF3,
    TYPE_PEER_BANDWIDTH,
    TYPE_SET_CHUNK_SIZE,
    TYPE_USER_CONTROL,
    TYPE_VIDEO,
    TYPE_WINDOW_ACK_SIZE,
    Message,
)

EVENT_STREAM_BEGIN: Final = 0
EVENT_STREAM_EOF: Final = 1
EVENT_STREAM_DRY: Final = 2
EVENT_SET_BUFFER_LENGTH: Final = 3
EVENT_STREAM_IS_RECORDED: Final = 4
EVENT_PING_REQUEST: Final = 6
EVENT_PING_RESPONSE: Final = 7

STREAM_EVENTS: Final = frozenset({EVENT_STREAM_BEGIN, EVENT_STREAM_EOF, EVENT_STREAM_DRY, EVENT_STREAM_IS_RECORDED})
_PING_EVENTS: Final = frozenset({EVENT_PING_REQUEST, EVENT_PING_RESPONSE})

LIMIT_DYNAMIC: Final = 2

_ACK_WRAP: Final = 0xF0000000
"""Where the acknowledged octet count starts again. FMLE disconnects when it passes 2^32; nginx-rtmp resets here."""

_SHORT_STRING: Final = b"\x02\0"
"""First octets of an AMF0 string of less than 256 octets."""

_DEFAULT_LIMITS: Final = WireLimits()


@dataclass(frozen=True, slots=True)
class SetChunkSize:
    """The sender's chunks have up to `size` octets of payload from here on, 1..2^31-1 (5.4.1)."""

    size: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The sender will not finish the message in progress on chunk stream `csid` (5.4.2)."""

    csid: int


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The sender has received so many octets, `sequence_number`, 0..2^32-1 (5.4.3)."""

    sequence_number: int

    @classmethod
    def of(cls, bytes_received: int) -> Acknowledgement:
        return cls(bytes_received % _ACK_WRAP)

    def behind(self, bytes_sent: int) -> int:
        """Return how many of `bytes_sent` octets in all are not acknowledged; 0 for a number that is too high.

        A peer that claims more than it was sent has at least read everything: to ignore it would leave the last true
        number standing, and what is sent from then on would look unread for ever.

        Up to 0xF0000000 octets no peer has started its count again, and the number is what it says. After that it is
        read in two ways, since most peers count modulo 2^32, nginx-rtmp and we start again earlier: the reading
        nearer to `bytes_sent` counts. The other one is off by multiples of 2^28, far more than is ever under way.
        """
        distance = bytes_sent - self.sequence_number
        if bytes_sent >= _ACK_WRAP:
            # Signed, as serial numbers are compared (RFC 1982): below 0 is ahead of us.
            distance = min(((distance + wrap // 2) % wrap - wrap // 2 for wrap in (1 << 32, _ACK_WRAP)), key=abs)
        return max(distance, 0)


@dataclass(frozen=True, slots=True)
class WindowAckSize:
    """The sender expects an acknowledgement every `size` octets, 0..2^32-1 (5.4.4). 0 and 1 do occur."""

    size: int


@dataclass(frozen=True, slots=True)
class PeerBandwidth:
    """The sender asks for at most `size` unacknowledged octets (5.4.5); everybody ignores it."""

    size: int
    limit_type: int = LIMIT_DYNAMIC  # 0 hard, 1 soft, or `LIMIT_DYNAMIC`; other values are kept as they came


@dataclass(frozen=True, slots=True)
class UserControl:
    """A user control event (6.2, 7.1.7)."""

    event: int
    stream_id: int = 0  # message stream id, for stream begin, end, dry, is recorded and set buffer length
    buffer_ms: int = 0  # the player's buffer, for set buffer length
    timestamp: int = 0  # ms of the sender's clock, for ping request; the same again in the ping response
    raw: bytes = b""  # octets after the event, for every other event


@dataclass(frozen=True, slots=True)
class Command:
    """A remote procedure call or its answer (7.1.1)."""

    name: str  # ``connect``, ``publish``, ``_result`` ..
    transaction_id: float  # number of the call; 0 when none is stated or it is no finite number
    object: AmfValue = None  # the command object, mostly a `dict` or None
    arguments: tuple[AmfValue, ...] = ()


Control: TypeAlias = SetChunkSize | Abort | Acknowledgement | UserControl | WindowAckSize | PeerBandwidth
Decoded: TypeAlias = Control | Command | Message

_OF_ONE_WORD: Final[dict[int, type[SetChunkSize | Abort | Acknowledgement | WindowAckSize]]] = {
    TYPE_SET_CHUNK_SIZE: SetChunkSize,
    TYPE_ABORT: Abort,
    TYPE_ACK: Acknowledgement,
    TYPE_WINDOW_ACK_SIZE: WindowAckSize,
}
_TYPE_OF: Final[dict[type, int]] = {one_word: type_id for type_id, one_word in _OF_ONE_WORD.items()}


def decode_message(message: Message, limits: WireLimits = _DEFAULT_LIMITS) -> Decoded:
    """Return what `message` says, or `message` itself if its body is not for us to read.

    Octets after the end of a control message's fields are ignored.
    """
    type_id = message.type_id
    if type_id in (TYPE_COMMAND_AMF0, TYPE_COMMAND_AMF3):
        return decode_command(message, limits)
    if type_id == TYPE_USER_CONTROL:
        return _decode_user_control(message)
    if type_id == TYPE_PEER_BANDWIDTH:
        size = _word(message, 0)
        # The fifth octet is missing in what some peers send, and nothing depends on it.
        return PeerBandwidth(size, message.payload[4] if len(message.payload) > 4 else LIMIT_DYNAMIC)
    one_word = _OF_ONE_WORD.get(type_id)
    return message if one_word is None else one_word(_word(message, 0))


def encode_control(value: Control) -> Message:
    """Return a protocol or user control message: chunk stream 2, message stream 0, timestamp 0 (5.4, 6.2).

    Byte layout of the bodies, all big-endian: size, csid or sequence number (4); peer bandwidth: size (4) and type (1);
    user control: event (2) and stream id or timestamp (4), and buffer length (4).
    """
    try:
        type_id, body = _control_body(value)
    except OverflowError as error:
        raise LocalProtocolError(f"a field is out of range in {value}") from error
    return Message(CONTROL_CSID, 0, type_id, 0, body)


def amf0_body(message: Message) -> bytes:
    """Return the AMF0 values of a command or data message, without the format octet of types 15 and 17.

    The octet is 0 by the book, and says that AMF0 follows, in which each AMF3 value has a marker. Some leave it out,
    and others put another number there, which librtmp and SRS never look at. The first value is a name, a string of
    less than 256 octets, so 02 00 shows where it begins.
    """
    body = message.payload
    if message.type_id not in (TYPE_COMMAND_AMF3, TYPE_DATA_AMF3):
        return body
    return body[1:] if body[:1] == b"\0" or body[1:3] == _SHORT_STRING else body


def decode_command(message: Message, limits: WireLimits = _DEFAULT_LIMITS) -> Command:
    values = amf0.decode(amf0_body(message), limits.amf)
    if message.type_id == TYPE_COMMAND_AMF3:
        values = [simplify(item) for item in values]
    if not values or not isinstance(values[0], str):
        kind = type(values[0]).__name__ if values else "nothing"
        raise RemoteProtocolError(f"command begins with {kind}, it needs a string", code="command-name")
    return Command(
        name=values[0],
        transaction_id=_transaction_id(values),
        object=values[2] if len(values) > 2 else None,
        arguments=tuple(values[3:]),
    )


def _transaction_id(values: list[AmfValue]) -> float:
    """Return the second value of a command; 0 for what cannot be echoed in an answer."""
    value = values[1] if len(values) > 1 else None
    # bool is an int to Python, but no number to ActionScript.
    if isinstance(value, bool) or not isinstance(value, float | int) or not math.isfinite(value):
        return 0.0
    return float(value)


def _decode_user_control(message: Message) -> UserControl:
    if len(message.payload) < 2:
        raise _short(message)
    event = int.from_bytes(message.payload[:2], "big")
    if event in STREAM_EVENTS:
        return UserControl(event, stream_id=_word(message, 2))
    if event in _PING_EVENTS:
        return UserControl(event, timestamp=_word(message, 2))
    if event == EVENT_SET_BUFFER_LENGTH:
        return UserControl(event, stream_id=_word(message, 2), buffer_ms=_word(message, 6))
    return UserControl(event, raw=message.payload[2:])


def _word(message: Message, at: int) -> int:
    octets = message.payload[at : at + 4]
    if len(octets) < 4:
        raise _short(message)
    return int.from_bytes(octets, "big")


def _short(message: Message) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"control message of type {message.type_id} is too short: {len(message.payload)} bytes", code="control-body"
    )


def _control_body(value: Control) -> tuple[int, bytes]:
    match value:
        case SetChunkSize(number) | Abort(number) | Acknowledgement(number) | WindowAckSize(number):
            return _TYPE_OF[type(value)], number.to_bytes(4, "big")
        case PeerBandwidth(number, limit_type):
            return TYPE_PEER_BANDWIDTH, number.to_bytes(4, "big") + limit_type.to_bytes(1, "big")
    body = value.event.to_bytes(2, "big")
    if value.event in STREAM_EVENTS:
        body += value.stream_id.to_bytes(4, "big")
    elif value.event in _PING_EVENTS:
        body += value.timestamp.to_bytes(4, "big")
    elif value.event == EVENT_SET_BUFFER_LENGTH:
        body += value.stream_id.to_bytes(4, "big") + value.buffer_ms.to_bytes(4, "big")
    else:
        body += value.raw
    return TYPE_USER_CONTROL, body


_HEADER: Final = 11
_BACK_POINTER: Final = 4
_TYPES: Final = frozenset({TYPE_AUDIO, TYPE_VIDEO, TYPE_DATA_AMF0, TYPE_DATA_AMF3})
"""What an aggregate may carry: the tag types of FLV. Commands and control inside one would bypass their own limits."""


def split_aggregate(message: Message, limits: WireLimits = _DEFAULT_LIMITS) -> list[Message]:
    """Return the audio, video and data messages inside an aggregate (7.1.6), on its chunk and message stream.

    The timestamps inside count from any origin: the first one becomes the aggregate's own timestamp, the others keep
    their distance from it. Anything that is not audio, video or data is left out.

    Byte layout, repeated: type (1), length (3), timestamp low 24 bits (3) and high 8 bits (1), stream id (3, unused),
    payload, back pointer (4, unused, and missing after the last one in what some servers send): an FLV tag.
    """
    body = message.payload
    messages: list[Message] = []
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
            messages.append(Message(message.csid, rebased, body[at], message.msid, body[start:end]))
        at = end + _BACK_POINTER
    return messages
