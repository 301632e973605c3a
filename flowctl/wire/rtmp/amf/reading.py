"""What reading AMF0 and AMF3 has in common, whatever the values of a message are.

How it works: each format has a reader, which holds the octets and the tables of one message, and a table of functions
indexed by marker. An index or an `unpack_from` beyond the end of the octets raises, and this is the check for
truncation; it is mapped to `RemoteProtocolError` here. Slices beyond the end do not raise, so what is sliced is
compared with the end.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Final, TypeAlias, TypeVar

from flowctl.errors import RemoteProtocolError
from flowctl.wire.rtmp.amf.limits import Meter
from flowctl.wire.rtmp.amf.values import AmfValue

_MARKERS: Final = 256
"""Markers are one octet."""


class MessageReader(ABC):
    __slots__ = ("data", "end", "meter")
    format: ClassVar[str]  # its name in errors

    def __init__(self, data: bytes, meter: Meter) -> None:
        self.data = data
        self.end = len(data)  # how many octets there are
        self.meter = meter  # the account of the message; the readers of both formats share it

    @abstractmethod
    def value(self, pos: int, depth: int) -> tuple[AmfValue, int]:
        """Read the value at `pos`, whose own node has been paid for; return it and the position after it."""

    def text(self, pos: int, length: int, maximum: int) -> tuple[str, int]:
        """Read `length` octets of UTF-8 at `pos`, at most `maximum`; return the text and the position after it."""
        stop = pos + length
        if stop > self.end:  # first, so that a length without the data is never reported as a limit
            raise truncated(self.format)
        self.meter.check_length(length, maximum)
        raw = self.data[pos:stop]
        try:
            return raw.decode(), stop
        except UnicodeDecodeError:
            return self.meter.repair(raw, maximum), stop


ReaderT = TypeVar("ReaderT", bound=MessageReader)
EntryT = TypeVar("EntryT")

Read: TypeAlias = Callable[[ReaderT, int, int], tuple[AmfValue, int]]
"""Reads the body of one marker: the reader, the position after the marker, the level of the container around it (0 for
none); returns the value and the position after it. The caller has paid for the value's own node."""


def read_all(reader: MessageReader) -> list[AmfValue]:
    values = []
    pos = 0
    try:
        while pos < reader.end:
            reader.meter.pay_for(1)
            value, pos = reader.value(pos, 0)
            values.append(value)
    except (IndexError, struct.error):
        raise truncated(reader.format) from None
    return values


def by_marker(entries: Mapping[int, EntryT], other: EntryT) -> tuple[EntryT, ...]:
    """Return `entries` as a table of all markers, so that a lookup cannot fail: an IndexError means the end of data."""
    return tuple(entries.get(marker, other) for marker in range(_MARKERS))


def constant(value: AmfValue) -> Callable[[object, int, int], tuple[AmfValue, int]]:
    """Return what reads the body of a marker that has none: `value`, and the position as it is."""
    return lambda _reader, pos, _depth: (value, pos)


def as_bytes(data: bytes | bytearray | memoryview) -> bytes:
    """Return `data` as bytes: itself when it is bytes, else a copy. Indexing and slicing bytes is what is fast."""
    return data if type(data) is bytes else bytes(data)


def truncated(what: str) -> RemoteProtocolError:
    """Return the error for data that ends inside a value; `what` names the format, ``"AMF0"`` or ``"AMF3"``."""
    return RemoteProtocolError(f"{what} data ends inside a value", code="amf-truncated")
