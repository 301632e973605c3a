"""A message as a store keeps it (pure): all that is needed to send it again in another life."""

from __future__ import annotations

import struct
from typing import Final

from flowctl.errors import RemoteProtocolError
from flowctl.nodes.messenger.delivery import Outgoing

_HEAD: Final = struct.Struct(">BBQQQQdI")
_LENGTH: Final = struct.Struct(">I")
_VERSION: Final = 1


def encode_record(message: Outgoing, deadline_at: float | None) -> bytes:
    """Return a message in octets."""
    head = _HEAD.pack(
        _VERSION,
        message.ordered | (4 if message.plain is None else message.plain << 1),
        message.source_callback,
        message.destination_callback,
        message.target,
        message.after,
        deadline_at or 0.0,
        len(message.payload),
    )
    parts = [head, _LENGTH.pack(len(message.body)), message.body]
    for frame in message.payload:
        parts += [_LENGTH.pack(len(frame)), frame]
    return b"".join(parts)


def decode_record(message_id: int, record: bytes) -> tuple[Outgoing, int, float | None]:
    """Return the message, the sequence that it is ordered after, and its deadline on the wall clock."""
    try:
        version, flags, source, destination, target, after, deadline_at, count = _HEAD.unpack_from(record)
        frames, at = [], _HEAD.size
        for _ in range(count + 1):
            (length,) = _LENGTH.unpack_from(record, at)
            at += _LENGTH.size
            frames.append(record[at : at + length])
            at += length
    except struct.error as error:
        raise RemoteProtocolError(f"the stored message {message_id} is damaged", code="messenger-record") from error
    if version != _VERSION or at != len(record):
        raise RemoteProtocolError(f"the stored message {message_id} is of another version", code="messenger-record")
    message = Outgoing(message_id, source, destination, frames[0], tuple(frames[1:]), bool(flags & 1), target=target)
    message.plain = None if flags & 4 else bool(flags & 2)
    return message, after, deadline_at or None
