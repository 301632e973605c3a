"""What AMF0 and AMF3 have in common: how a message is read and written from end to end, whatever its values are.

How it works: each format has a reader and a writer, which hold the octets (or parts) and the tables of one message, and
a table of functions, indexed by marker for reading and by Python type for writing. An index or an `unpack_from` beyond
the end of the octets raises, and this is the check for truncation; it is mapped to `RemoteProtocolError` here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from flowctl.errors import LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp.amf.limits import Meter
from flowctl.wire.rtmp.amf.values import AmfValue

_MARKERS: Final = 256
"""Markers are one octet."""

EntryT = TypeVar("EntryT")


class Reader(Protocol):
    """Reads one message."""

    @property
    def end(self) -> int:
        """How many octets there are."""

    @property
    def meter(self) -> Meter:
        """The account of the message."""

    def value(self, pos: int, depth: int) -> tuple[AmfValue, int]:
        """Read the value at `pos`, whose own node has been paid for; return it and the position after it."""


class Writer(Protocol):
    """Writes one message."""

    @property
    def parts(self) -> list[bytes]:
        """What was written, joined at the end: a list takes a part in less time than a bytearray."""

    def value(self, value: AmfValue, depth: int) -> None:
        """Write `value`, which is in a container of level `depth` (0 for none)."""


def read_all(reader: Reader, what: str) -> list[AmfValue]:
    """Return all values of a message; `what` names the format in errors."""
    values = []
    pos = 0
    try:
        while pos < reader.end:
            reader.meter.take(1)
            value, pos = reader.value(pos, 0)
            values.append(value)
    except (IndexError, struct.error):
        raise truncated(what) from None
    return values


def read_one(reader: Reader, offset: int, what: str) -> tuple[AmfValue, int]:
    check_offset(offset)
    reader.meter.take(1)
    try:
        return reader.value(offset, 0)
    except (IndexError, struct.error):
        raise truncated(what) from None


def write_all(writer: Writer, values: Sequence[AmfValue], what: str) -> bytes:
    """Return `values` as written; `what` names the format in errors."""
    try:
        for value in values:
            writer.value(value, 0)
    except (struct.error, OverflowError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"not encodable as {what}: {error}") from error
    return b"".join(writer.parts)


def by_marker(entries: Mapping[int, EntryT], other: EntryT) -> tuple[EntryT, ...]:
    """Return `entries` as a table of all markers, so that a lookup cannot fail: an IndexError means the end of data."""
    return tuple(entries.get(marker, other) for marker in range(_MARKERS))


def constant(value: AmfValue) -> Callable[[object, int, int], tuple[AmfValue, int]]:
    """Return what reads the body of a marker that has none: `value`, and the position as it is."""
    return lambda _reader, pos, _depth: (value, pos)


def inherited(entries: Mapping[type, EntryT], value: AmfValue, what: str) -> EntryT:
    """Return the entry of the nearest base class of `value`'s type; an IntEnum, say, is written as a number."""
    for base in type(value).__mro__:
        if base in entries:
            return entries[base]
    raise LocalProtocolError(f"{type(value).__name__} has no {what} form")


def check_offset(offset: int) -> None:
    """Refuse an offset of a caller that is negative."""
    if offset < 0:
        raise LocalProtocolError(f"offset is {offset}, allowed is 0 or more")


def as_bytes(data: bytes | bytearray | memoryview) -> bytes:
    """Return `data` as bytes: itself when it is bytes, else a copy. Indexing and slicing bytes is what is fast."""
    return data if type(data) is bytes else bytes(data)


def truncated(what: str) -> RemoteProtocolError:
    """Return the error for data that ends inside a value; `what` names the format, ``"AMF0"`` or ``"AMF3"``."""
    return RemoteProtocolError(f"{what} data ends inside a value", code="amf-truncated")
