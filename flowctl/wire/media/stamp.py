"""Sequence number and time inside a frame, so that a receiver can measure loss and delay of exactly that frame.

How it works: synthetic frames have a slot at a fixed place, in video the first NAL unit (user data, which decoders
skip), in audio the first element (a data stream element, which decoders skip). `stamp` overwrites it just before the
frame is sent; `read_stamp` finds it again after any number of servers, since none of them changes frames. What a server
may do is to put parameter sets in front of a key frame: there it is looked for behind them.

Numbers are written as septets with the high bit set. No octet of the slot is then 0, so that the slot needs no
escaping in H.264 and never moves.

Shape of the slot: `MAGIC` (16 octets), sequence number (5 septets), time in microseconds (9 septets).
"""

from __future__ import annotations

from typing import Final

from flowctl.errors import LocalProtocolError
from flowctl.wire.media import tiny_aac, tiny_h264

MAGIC: Final = b"flowctl.stamp.v1"  # as long as the identifier of an unregistered user data message has to be
_SEQUENCE_SEPTETS: Final = 5
_TIME_SEPTETS: Final = 9
MAX_SEQUENCE: Final = (1 << 32) - 1
MAX_TIME_US: Final = (1 << 7 * _TIME_SEPTETS) - 1

_VIDEO_MAGIC_AT: Final = 5 + 4 + 3  # FLV video header, NAL unit length, NAL and message header
_AUDIO_MAGIC_AT: Final = 2 + 2  # FLV audio header, element header
_KEY_FRAME: Final = b"\x17\x01"  # H.264 in FLV, as the synthetic source makes it
STAMPED_HEAD_BYTES: Final = 96
"""Octets from the begin of a frame in which its stamp is: 42, and some forty of parameter sets in front of it."""


def _septets(value: int, count: int) -> bytes:
    return bytes(0x80 | value >> 7 * place & 0x7F for place in range(count - 1, -1, -1))


def _number(septets: bytes | memoryview) -> int:
    value = 0
    for septet in septets:
        value = value << 7 | septet & 0x7F
    return value


_EMPTY_SLOT: Final = MAGIC + _septets(0, _SEQUENCE_SEPTETS) + _septets(0, _TIME_SEPTETS)

VIDEO_SLOT: Final = tiny_h264.user_data(_EMPTY_SLOT)
"""NAL unit with an empty slot, to be the first one of a frame."""

AUDIO_SLOT: Final = tiny_aac.data_element(_EMPTY_SLOT)
"""Data stream element with an empty slot, to be the first one of a frame."""


def _numbers_at(payload: bytes | memoryview) -> int:
    """Return the offset of the sequence number, 0 when `payload` has no slot."""
    for at in (_VIDEO_MAGIC_AT, _AUDIO_MAGIC_AT):
        if payload[at : at + len(MAGIC)] == MAGIC and len(payload) >= at + len(_EMPTY_SLOT):
            return at + len(MAGIC)
    at = bytes(payload[:STAMPED_HEAD_BYTES]).find(MAGIC) if payload[:2] == _KEY_FRAME else -1
    return at + len(MAGIC) if 0 <= at <= len(payload) - len(_EMPTY_SLOT) else 0


def has_slot(payload: bytes | memoryview) -> bool:
    return _numbers_at(payload) != 0


def stamp(payload: bytes | memoryview, sequence: int, time_us: int) -> bytes:
    """Return `payload` with this sequence number and time in its slot, otherwise the same octets."""
    at = _numbers_at(payload)
    if not at:
        raise LocalProtocolError("payload has no slot for a stamp: only synthetic audio and video frames have one")
    if not 0 <= sequence <= MAX_SEQUENCE:
        raise LocalProtocolError(f"sequence {sequence} is not in 0..{MAX_SEQUENCE}")
    if not 0 <= time_us <= MAX_TIME_US:
        raise LocalProtocolError(f"time_us {time_us} is not in 0..{MAX_TIME_US}")
    numbers = _septets(sequence, _SEQUENCE_SEPTETS) + _septets(time_us, _TIME_SEPTETS)
    return b"".join((payload[:at], numbers, payload[at + len(numbers) :]))


class Stamper:
    """Stamps the frames of one publisher as they are sent, each track with numbers of its own that go on over loops."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # track -> number of its next stamped frame

    def stamped(self, track: int, payload: bytes, time_us: int) -> bytes:
        """Return `payload` with the track's next number and this time; one without a slot as it is."""
        if not has_slot(payload):
            return payload
        number = self._numbers.get(track, 0)
        self._numbers[track] = number + 1 & MAX_SEQUENCE
        return stamp(payload, number, time_us)


def read_stamp(payload: bytes | memoryview) -> tuple[int, int] | None:
    """Return (sequence, time_us) of a stamped frame, or None for every other payload. Never raises."""
    at = _numbers_at(payload)
    if not at:
        return None
    middle = at + _SEQUENCE_SEPTETS
    return (_number(payload[at:middle]) & MAX_SEQUENCE, _number(payload[middle : middle + _TIME_SEPTETS]))
