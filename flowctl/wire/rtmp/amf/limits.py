"""What one AMF message may cost, and the accounts by which readers and writers of both formats stay inside it.

Theory of operation. AMF0 and AMF3 data comes from strangers and can be small and yet expensive in four ways: deep
nesting (which exhausts the stack of the code that walks the value), counts that promise more than follows, very
many tiny values, and references. References are the subtle one: thirty arrays, each holding two references to the one
before, are 300 octets on the wire and 2^30 values for everything that prints, compares or re-encodes the result.

So a decoder keeps a `Meter`, and the meter counts the value *as it will be walked*, not as it was written: a reference
costs the nodes, octets and levels of what it refers to. A value that passes is therefore small for every later reader,
and no later reader needs limits of its own. A reference to a container that is not complete yet would make a value
that contains itself, endless to walk; nothing in RTMP needs one, and it is refused.

A count is compared with the octets that remain before anything is built from it, so memory follows the data received.

Malformed UTF-8 is replaced: each bad sequence becomes U+FFFD. The alternative, surrogateescape, would give back the
exact octets, but yields text that raises when it reaches a log, JSON, a metric label or a Parquet column, far from the
peer that sent it. Text from these decoders can always be encoded. The price: names that differ only in malformed
octets become equal.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final, TypeAlias

from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError, LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp.amf.values import AmfValue

MAX_DEPTH: Final = 128
"""Deepest nesting that may be configured, and that the encoders write. The codecs recurse with at most four frames a
level, and the interpreter allows 1000 frames by default, of which the caller needs some: 512 leave enough."""

MAX_ENCODED_NODES: Final = 1 << 20
"""Values that one encode() writes at most: a caller's structure that shares parts exponentially is refused, not
written for hours. It is far above the largest keyframe index of a recorded file (two numbers per key frame)."""

MAX_NAME_BYTES: Final = 0xFFFF
"""Longest member or class name that AMF0 can write (UTF-8 with a 16-bit length, AMF0 1.3.1). Decoded names are held to
it in AMF3 too, so that what was decoded can be sent on in either format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AmfLimits:
    """How large the values of one message may be. There is no "off": these values come from strangers.

    Attributes:
        depth: levels of containers, 1..128; a number alone has depth 0, an empty object depth 1.
        nodes: values in one message, 1 or more; members of containers count, names do not. A data message may have as
            many as its bytes divided by 8, if that is more: a key frame index of hours is tens of thousands of
            numbers, of 9 bytes each.
        string_bytes: bytes of UTF-8 in one string, name, XML document or ByteArray, 1 or more. 64 KiB is what a
            16-bit length can announce, plus one.
        repeated_bytes: bytes that references may repeat in one message, 1 or more. AMF3 refers to a string in two
            bytes; without this limit 8 KiB of references to one 64 KiB string become 256 MiB when sent on as AMF0.
    """

    depth: int = 32
    nodes: int = 4096
    string_bytes: int = 64 * 1024
    repeated_bytes: int = 1024 * 1024

    def __post_init__(self) -> None:
        check_fields(self)
        for item in fields(self):
            value = getattr(self, item.name)
            maximum = MAX_DEPTH if item.name == "depth" else None
            if type(value) is not int or value < 1 or (maximum is not None and value > maximum):
                allowed = "1 or more" if maximum is None else f"1..{maximum}"
                raise ConfigError(f"AmfLimits.{item.name} is {value!r}, allowed is an int of {allowed}")

    def for_data(self, size_bytes: int) -> AmfLimits:
        """Return the limits of a data message of `size_bytes`: more values than a command may have, if it is long."""
        allowed = size_bytes // _OCTETS_PER_VALUE
        return self if allowed <= self.nodes else replace(self, nodes=allowed)


_OCTETS_PER_VALUE: Final = 8
"""A number takes 9 bytes in AMF0 and AMF3; values that take less, of which there could be more, are rare."""

DEFAULT_LIMITS: Final = AmfLimits()
"""The limits that decoding uses when it is given none."""

Shared: TypeAlias = tuple[AmfValue, int, int, int]
"""An entry of a reference table: the value, its nodes (itself not counted), its bytes, its levels. A plain tuple,
because one is made for every object decoded and a NamedTuple takes six times as long to make."""

Table: TypeAlias = list[Shared | None]
"""A reference table. None stands for a container whose end has not been read yet."""

Mark: TypeAlias = tuple[int, int, int, int]
"""What `Meter.begin` remembers for `Meter.finish`: room, position, deepest level so far, level."""


class Meter:
    """The account of one message: what it has cost so far, against its limits.

    The decoders' inner loops read and write `room` themselves, because a call per value would double their cost.

    Attributes:
        room: nodes that may still follow; below 0 is over the limit.
    """

    __slots__ = ("_deepest", "_depth_max", "_nodes_max", "_repeated", "_repeated_max", "name_max", "room", "string_max")

    def __init__(self, limits: AmfLimits) -> None:
        self._depth_max = limits.depth
        self._nodes_max = self.room = limits.nodes
        self._repeated_max = limits.repeated_bytes
        self.string_max = limits.string_bytes  # `AmfLimits.string_bytes`
        # the most octets in a name: `string_max`, but no more than AMF0 can write.
        self.name_max = min(limits.string_bytes, MAX_NAME_BYTES)
        self._repeated = 0  # octets that references have repeated so far
        self._deepest = 0  # deepest level reached within the container that is being read

    def begin(self, pos: int, depth: int) -> Mark:
        self.check_depth(depth)
        mark = (self.room, pos + self._repeated, self._deepest, depth)
        self._deepest = depth
        return mark

    def finish(self, mark: Mark, value: AmfValue, pos: int) -> Shared:
        """Close the account of a container; return what a reference to it will cost."""
        room, start, deepest, depth = mark
        shared = (value, room - self.room, pos + self._repeated - start, self._deepest - depth + 1)
        self._deepest = max(deepest, self._deepest)
        return shared

    def check_depth(self, depth: int) -> None:
        if depth > self._depth_max:
            raise LimitExceededError("amf_depth", depth, self._depth_max)

    def pay_for(self, count: int) -> None:
        """Pay for `count` values before they are read."""
        self.room -= count
        if self.room < 0:
            raise self.nodes_error()

    def nodes_error(self, room: int | None = None) -> LimitExceededError:
        """Return the error for too many nodes; `room` is the caller's own copy where it keeps one."""
        left = self.room if room is None else room
        return LimitExceededError("amf_nodes", self._nodes_max - left, self._nodes_max)

    def pay_repeated(self, octets: int) -> None:
        self._repeated += octets
        if self._repeated > self._repeated_max:
            raise LimitExceededError("amf_repeated_bytes", self._repeated, self._repeated_max)

    def resolve(self, table: Table, index: int, depth: int) -> AmfValue:
        """Return what a reference refers to and pay for it as if it had been written out."""
        if index >= len(table):
            raise RemoteProtocolError(
                f"AMF reference to object {index}, there are {len(table)} so far", code="amf-bad-reference"
            )
        shared = table[index]
        if shared is None:
            raise RemoteProtocolError(
                f"AMF reference to object {index} from within it: a value may not contain itself",
                code="amf-cyclic-reference",
            )
        value, nodes, octets, levels = shared
        self.check_depth(depth + levels)
        self._deepest = max(self._deepest, depth + levels)
        self.pay_for(nodes)
        self.pay_repeated(octets)
        return value

    def check_length(self, length: int, maximum: int) -> None:
        if length > maximum:
            raise LimitExceededError("amf_string_bytes", length, maximum)

    def repair(self, raw: bytes, maximum: int) -> str:
        """Return the text of malformed UTF-8, with U+FFFD in place of its faults."""
        text = raw.decode("utf-8", "replace")
        self.check_length(len(text.encode()), maximum)
        return text


class WriteMeter:
    """The account of one message that is written: AMF0 and the AMF3 values in it together."""

    __slots__ = ("room",)

    def __init__(self) -> None:
        self.room = MAX_ENCODED_NODES  # values that may still be written

    def enter(self, count: int, depth: int) -> None:
        self.room -= count
        if depth > MAX_DEPTH or self.room < 0:
            raise LocalProtocolError(
                f"AMF structure beyond {MAX_DEPTH} levels or {MAX_ENCODED_NODES} values; does it contain itself?"
            )
