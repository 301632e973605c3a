r"""Messages as CBOR: written in one exact form, and read from pieces of any size in bounded memory.

======================  ==========================  =====================================
message                 CBOR                        example
======================  ==========================  =====================================
Init                    ``[0]``                     ``81 00``
RequestIds              ``[1, blocking, ack, req]`` ``84 01 F5 02 03``
ReplyIds                ``[2, [_ *announced]]``     ``82 02 9F FF``
RequestObjects          ``[3, [_ *ids]]``           ``82 03 9F 41 61 FF``
ReplyObjects            ``[4, [_ *objects]]``       ``82 04 9F FF``
Done                    ``[5]``                     ``81 05``
Subscribe               ``[6, wanted, topic]``      ``83 06 F5 41 2A``
Prove                   ``[7, proof]``              ``82 07 41 78``
Tell                    ``[8, words]``              ``82 08 41 78``
======================  ==========================  =====================================

``announced`` is an id or ``[id, size]``. Ids and objects are byte strings of definite length. The lists of ids and
objects are of indefinite length, and no other array is. Every head is in its shortest form; tags, maps, text and
floats do not occur. Whatever differs is refused: one message has one form, so two readers never disagree about it.

Theory of operation. `Decoder.feed` takes what has come; `Decoder.next` walks over the heads of one message, and stops
where octets are missing: it never begins anew, so a message costs the same in one piece and in single octets. The
walk refuses what is too large as soon as a head says so, before it has come. Only what is well-formed and complete is
given to cbor2.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

import cbor2

from flowctl.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.nodes.diffusion.wire.protocol import (
    MAX_COUNT,
    SIZE_LIMIT_BYTES,
    Announced,
    Done,
    Init,
    Message,
    Prove,
    ReplyIds,
    ReplyObjects,
    RequestIds,
    RequestObjects,
    State,
    Subscribe,
    Tell,
)

MAX_ID_BYTES: Final = 1024
"""Longest id that the encoding allows; the policy of the receiving side may allow less."""

MAX_ITEMS: Final = 4096
"""Most ids or objects in one message: 40 times what may be outstanding by default, and some milliseconds of work.
By its bytes alone, a reply could hold 2.5 million."""

MAX_OBJECT_BYTES: Final = SIZE_LIMIT_BYTES[State.OBJECTS] - 16
"""Largest object that fits in a reply: 3 octets come before its list, 5 before the object, 1 behind."""

_OVERHEAD_BYTES: Final = 5
"""Octets of the head of a byte string of 64 KiB or more."""
_MAX_DEPTH: Final = 3
"""Nesting of arrays: the message, its list, and an announcement with its size."""
_LONGEST_ARRAY: Final = 4
_COMPACT_BYTES: Final = 64 * 1024
"""Used octets at which the buffer is cut: cutting it after each message would be quadratic."""
_ARRAY_INDEFINITE: Final = 0x9F
_BREAK: Final = 0xFF
_BOOLEANS: Final = frozenset({0xF4, 0xF5})
_WIDTHS: Final = {24: 1, 25: 2, 26: 4, 27: 8}
_LEAST_VALUES: Final = {24: 24, 25: 1 << 8, 26: 1 << 16, 27: 1 << 32}
"""Least value that needs a head of each kind: a smaller one must use a shorter head."""

_LENGTHS: Final = {0: 1, 1: 4, 2: 2, 3: 2, 4: 2, 5: 1, 6: 3, 7: 2, 8: 2}
"""Length of a message's array, by the message's key."""
_LISTS: Final = frozenset({2, 3, 4})
"""Keys of messages that hold a list of ids or objects."""
_ALLOWED: Final = {
    State.INIT: frozenset({0}),
    State.IDLE: frozenset({1, 3, 5, 6, 7, 8}),
    State.IDS_BLOCKING: frozenset({2, 6, 8}),
    State.IDS_NONBLOCKING: frozenset({2}),
    State.OBJECTS: frozenset({4}),
    State.DONE: frozenset[int](),
}
"""Keys of the messages that each state allows."""


def encode(message: Message) -> bytes:
    match message:
        case Init():
            return b"\x81\x00"
        case RequestIds(blocking, ack, req):
            if not (0 <= ack <= MAX_COUNT and 0 <= req <= MAX_COUNT):
                raise LocalProtocolError(f"counts {ack} and {req} must be between 0 and {MAX_COUNT}")
            return cbor2.dumps([1, blocking, ack, req])
        case ReplyIds(announced):
            return _list(2, [_check_id(item.object_id) and _announcement(item) for item in announced])
        case RequestObjects(object_ids):
            return _list(3, [cbor2.dumps(_check_id(object_id)) for object_id in object_ids])
        case ReplyObjects(objects):
            return _list(4, [cbor2.dumps(item) for item in objects])
        case Done():
            return b"\x81\x05"
        case Subscribe(wanted, topic):
            return cbor2.dumps([6, wanted, _check_id(topic)])
        case Prove(proof):
            return cbor2.dumps([7, _check_id(proof)])
        case Tell(words):
            return cbor2.dumps([8, _check_id(words)])


def _announcement(item: Announced) -> bytes:
    return cbor2.dumps(item.object_id if item.size_bytes is None else [item.object_id, item.size_bytes])


def _check_id(object_id: bytes) -> bytes:
    if not 1 <= len(object_id) <= MAX_ID_BYTES:
        raise LocalProtocolError(f"an object id has 1 to {MAX_ID_BYTES} bytes, not {len(object_id)}")
    return object_id


def _list(key: int, items: list[bytes]) -> bytes:
    if len(items) > MAX_ITEMS:
        raise LocalProtocolError(f"{len(items)} items do not fit into one message, the limit is {MAX_ITEMS}")
    return b"".join([bytes((0x82, key, _ARRAY_INDEFINITE)), *items, b"\xff"])


def reply_bytes(object_count: int, size_bytes: int) -> int:
    """Return an upper bound, in bytes, of the reply with so many objects of `size_bytes` together."""
    return 4 + size_bytes + _OVERHEAD_BYTES * object_count


class Decoder:
    """Turns octets into messages. One for each direction of a conversation; not for several threads."""

    __slots__ = ("_buffer", "_start", "_walk")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._start = 0  # where the message that is being read begins
        self._walk: Generator[None, None, int] | None = None  # over that message; None: between two

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer) - self._start

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take octets as they came. The caller reads only while `next` has nothing: that bounds what is kept."""
        self._buffer += data

    def next(self, state: State, most_bytes: int | None = None) -> Message | None:
        if self._walk is None:
            if not self.buffered_bytes:
                return None
            self._walk = self._walk_message(state, most_bytes)
        try:
            next(self._walk)
        except StopIteration as finished:
            end: int = finished.value
        else:
            return None
        self._walk = None
        raw = bytes(memoryview(self._buffer)[self._start : end])
        self._start = end
        if self._start >= min(_COMPACT_BYTES, len(self._buffer)):
            del self._buffer[: self._start]
            self._start = 0
        return _message(cbor2.loads(raw), state)

    def _walk_message(self, state: State, most_bytes: int | None) -> Generator[None, None, int]:
        limit = SIZE_LIMIT_BYTES[state]
        if most_bytes is not None:
            limit = min(limit, most_bytes)
        yield from self._need(self._start + 1, limit)
        first = self._buffer[self._start]
        if first >> 5 != 4 or not 1 <= (first & 31) <= _LONGEST_ARRAY:
            raise _malformed(f"a message of byte {first:#04x} in state {state.value}: it is no array of 1 to 4")
        yield from self._need(self._start + 2, limit)
        key, length = self._buffer[self._start + 1], first & 31
        if key not in _ALLOWED[state] or _LENGTHS[key] != length:
            raise RemoteProtocolError(
                f"state {state.value}: unexpected message with key {key} and length {length}", code="UnexpectedMessage"
            )
        if key in _LISTS:
            yield from self._need(self._start + 3, limit)
            if self._buffer[self._start + 2] != _ARRAY_INDEFINITE:
                raise _malformed(f"state {state.value}, key {key}: its list is not of indefinite length")
        return (yield from self._walk_items(limit))

    def _walk_items(self, limit: int) -> Generator[None, None, int]:
        position, items = self._start, 0
        open_: list[int] = [1]  # items that each open array still wants; -1: until its end is marked
        while open_:
            if not open_[-1]:
                open_.pop()
                continue
            yield from self._need(position + 1, limit)
            initial = self._buffer[position]
            if initial == _BREAK and open_[-1] < 0:
                open_.pop()
                position += 1
                continue
            if open_[-1] > 0:
                open_[-1] -= 1
            else:
                items += 1
                if items > MAX_ITEMS:
                    raise LimitExceededError("items", items, MAX_ITEMS)
            major, kind = initial >> 5, initial & 31
            position += 1
            value = kind
            if kind in _WIDTHS:
                width = _WIDTHS[kind]
                yield from self._need(position + width, limit)
                value = int.from_bytes(self._buffer[position : position + width], "big")
                position += width
                if value < _LEAST_VALUES[kind]:
                    raise _malformed(f"the value {value} is not in its shortest form")
            if major == 2 and kind < 28:
                yield from self._need(position + value, limit)
                position += value
            elif initial == _ARRAY_INDEFINITE and len(open_) == 2:
                open_.append(-1)
            elif major == 4 and value <= _LONGEST_ARRAY and len(open_) <= _MAX_DEPTH:
                open_.append(value)
            elif not (initial in _BOOLEANS or (major == 0 and kind < 28)):
                raise _malformed(f"byte {initial:#04x} does not belong into a message")
        return position

    def _need(self, end: int, limit: int) -> Generator[None, None, None]:
        if end - self._start > limit:
            raise LimitExceededError("message_size_bytes", end - self._start, limit)
        while len(self._buffer) < end:
            yield


def _malformed(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(what, code="MalformedMessage")


def _message(value: list[Any], state: State) -> Message:
    match value:
        case [0]:
            return Init()
        case [1, bool(blocking), int(ack), int(req)]:
            if isinstance(ack, bool) or isinstance(req, bool) or max(ack, req) > MAX_COUNT:
                raise _malformed(f"a request of ids with counts {ack} and {req}; they are 0 to {MAX_COUNT}")
            return RequestIds(blocking, ack, req)
        case [2, [*items]]:
            if not items and state is State.IDS_BLOCKING:
                raise _malformed("an empty reply to a blocking request of ids")
            return ReplyIds(tuple([_announced(item) for item in items]))
        case [3, [*items]]:
            return RequestObjects(tuple([_object_id(item) for item in items]))
        case [4, [*items]] if all(isinstance(item, bytes) for item in items):
            return ReplyObjects(tuple(items))
        case [5]:
            return Done()
        case [6, bool(wanted), topic]:
            return Subscribe(wanted, _object_id(topic))
        case [7, proof]:
            return Prove(_object_id(proof))
        case [8, words]:
            return Tell(_object_id(words))
    raise _malformed(f"a message of key {value[0]} with items of the wrong type")


def _object_id(item: object) -> bytes:
    if isinstance(item, bytes) and 1 <= len(item) <= MAX_ID_BYTES:
        return item
    raise _malformed(f"an object id, a topic, a proof and words are byte strings of 1 to {MAX_ID_BYTES} bytes")


def _announced(item: object) -> Announced:
    match item:
        case [object_id, int(size)] if not isinstance(size, bool):
            if size > MAX_OBJECT_BYTES:
                raise LimitExceededError("object_size_bytes", size, MAX_OBJECT_BYTES)
            return Announced(_object_id(object_id), size)
        case [*_]:
            raise _malformed("what is announced is an id, or an array of an id and a size")
    return Announced(_object_id(item))
