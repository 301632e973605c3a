"""What stands on a connection of ZMTP: the greeting, frames, commands and their properties (RFC 37; pure)."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final

from flowctl.errors import RemoteProtocolError

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4
"""Bits of the first octet of a frame: others of the message follow; the length has eight octets; it is a command."""
SHORT_BYTES: Final = 0xFF
"""Longest body whose length is written in one octet."""
GREETING_BYTES: Final = 64
MECHANISM_BYTES: Final = 20
_SIGNATURE: Final = b"\xff\0\0\0\0\0\0\0\0\x7f"
_VERSION: Final = b"\x03\x01"
_LEAST_MAJOR: Final = 3
_LONG_HEADER: Final = struct.Struct(">BQ")
_MOST_NAME_BYTES: Final = 0xFF

PING: Final = b"PING"
PONG: Final = b"PONG"
READY: Final = b"READY"
ERROR: Final = b"ERROR"
SOCKET_TYPE: Final = b"Socket-Type"
IDENTITY: Final = b"Identity"


def greeting(mechanism: bytes, *, as_server: bool) -> bytes:
    """Return the first 64 octets of a side."""
    head = _SIGNATURE + _VERSION + mechanism.ljust(MECHANISM_BYTES, b"\0") + bytes([as_server])
    return head.ljust(GREETING_BYTES, b"\0")


def read_greeting(data: bytes | memoryview) -> tuple[bytes, bool]:
    """Return mechanism and side of a peer, from what has come of its greeting; as soon as it is none, that is told.

    Raises:
        RemoteProtocolError: it speaks something else, or a version before 3.0.
    """
    said = bytes(data[:GREETING_BYTES])
    # The eight octets between are padding, in which old versions have a length.
    if said[:1] != _SIGNATURE[:1] or (len(said) > 9 and not said[9] & 1):
        raise RemoteProtocolError(f"the peer begins with {said[:10].hex()}, which is no ZMTP", code="zmtp-greeting")
    if len(said) > len(_SIGNATURE) and said[10] < _LEAST_MAJOR:
        raise RemoteProtocolError(f"the peer speaks ZMTP {said[10]}, 3.0 is the least", code="zmtp-version")
    name = said[12 : 12 + MECHANISM_BYTES].rstrip(b"\0")
    return name, bool(said[32:33] == b"\x01")


_SHORT_HEADERS: Final = tuple(tuple(bytes((flags, size)) for size in range(SHORT_BYTES + 1)) for flags in (0, MORE))
"""Of parts of a message, the last and those before: what is sent most is not made each time."""


def frame(body: bytes, flags: int = 0) -> bytes:
    size = len(body)
    if size <= SHORT_BYTES:
        return bytes((flags, size)) + body
    return _LONG_HEADER.pack(flags | LONG, size) + body


def message(frames: Sequence[bytes]) -> bytes:
    """Return the frames of one message, as they are without encryption."""
    pieces: list[bytes] = []
    left = len(frames)
    for body in frames:
        left -= 1
        more, size = MORE if left else 0, len(body)
        pieces += (_SHORT_HEADERS[more][size] if size <= SHORT_BYTES else _LONG_HEADER.pack(more | LONG, size), body)
    return b"".join(pieces)


def command_body(name: bytes, data: bytes = b"") -> bytes:
    return bytes([len(name)]) + name + data


def command(name: bytes, data: bytes = b"") -> bytes:
    return frame(command_body(name, data), COMMAND)


def read_command(body: bytes) -> tuple[bytes, bytes]:
    """Return name and data of a command."""
    end = 1 + body[0] if body else 0
    if not 1 < end <= len(body):
        raise RemoteProtocolError("a command has no name", code="zmtp-command")
    return body[1:end], body[end:]


def properties(items: Mapping[bytes, bytes]) -> bytes:
    return b"".join(bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value for name, value in items.items())


def read_properties(data: bytes) -> dict[bytes, bytes]:
    """Return the properties of a handshake by their names, in small letters: case counts for nothing (RFC 23)."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        name_end = at + 1 + data[at]
        value_at = name_end + 4
        value_end = value_at + int.from_bytes(data[name_end:value_at], "big")
        if name_end == at + 1 or value_end > len(data) or value_at > len(data):
            raise RemoteProtocolError("the properties of a handshake end in the middle", code="zmtp-properties")
        found[data[at + 1 : name_end].lower()] = data[value_at:value_end]
        at = value_end
    return found
