"""The frames of a message, without the routing id that a ROUTER puts in front, and the tag of a request (pure).

=================  ==========================================  =====================================================
what               frames                                      remarks
=================  ==========================================  =====================================================
command            ``[category.command, part...]``
request            ``[category.command, tag, part...]``        whether it is one is known to the server alone
reply              ``[REPLY, tag, part...]``                   the tag is echoed as it came
refused command    ``[CODE, category.command]``                the command as it was sent, not what it is an alias of
refused request    ``[CODE, REPLY, tag]``                      `UNKNOWN_COMMAND` and `NO_REPLY_TAG`: as for a command
handshake          ``[HI]``, answered by ``[HELLO]``
closing            ``[BYE]``                                   the one who dialled closes the connection
=================  ==========================================  =====================================================

These are OxenMQ's. Added to them, in forms that a node which does not know them takes for an unknown command:

=================  ==========================================  =====================================================
failed request     ``[CODE, REPLY, tag, text]``                the text is for people, and may be missing
streamed item      ``[ITEM, tag, part...]``                    only in answer to a tag with credit
more credit        ``[CREDIT, tag, count]``                    decimal digits
item of a caller   ``[UP, tag, part...]``                      only where the handler has given credit
their end          ``[UP_END, tag]``
credit for them    ``[UP_CREDIT, tag, count]``
taken over         ``[BYE, TAKEN_OVER]``                       another node came under the routing id of this one
given up           ``[CANCEL, tag]``                           the caller does not want the answer any more
=================  ==========================================  =====================================================

A tag has 15 octets, which the server echoes, and in which ours carry what travels with a request:

======  =================================================================================
octets  what
======  =================================================================================
0-5     number of the request
6       items of a stream that may come before more credit is given; 0: one reply
7-10    time left until the deadline, in milliseconds
11-14   CRC-32 of the octets before
======  =================================================================================

In the tag of a request metadata may follow, a JSON object of texts, which the checksum covers as well; what answers has
the 15 octets alone, or from a node that does not know this form the whole. To such a node they are arbitrary octets, as
its own are. A tag of a foreign node passes for ours once in four thousand million; it then has some deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final
from zlib import crc32

REPLY: Final = b"REPLY"
HI: Final = b"HI"
HELLO: Final = b"HELLO"
BYE: Final = b"BYE"
TAKEN_OVER: Final = b"TAKEN_OVER"
ITEM: Final = b"ITEM"
CREDIT: Final = b"CREDIT"
CANCEL: Final = b"CANCEL"
UP: Final = b"UP"
UP_END: Final = b"UP_END"
UP_CREDIT: Final = b"UP_CREDIT"

STREAM_WORDS: Final = frozenset({ITEM, CREDIT, CANCEL, UP, UP_END, UP_CREDIT})

UNKNOWN_COMMAND: Final = b"UNKNOWNCOMMAND"
FORBIDDEN: Final = b"FORBIDDEN"
FORBIDDEN_SN: Final = b"FORBIDDEN_SN"
NOT_A_SERVICE_NODE: Final = b"NOT_A_SERVICE_NODE"
NO_REPLY_TAG: Final = b"NO_REPLY_TAG"

HANDLER_FAILED: Final = b"HANDLER_FAILED"
WRONG_ARGUMENT: Final = b"WRONG_ARGUMENT"
QUEUE_FULL: Final = b"QUEUE_FULL"
SHUTTING_DOWN: Final = b"SHUTTING_DOWN"
TIMEOUT: Final = b"TIMEOUT"
DISCONNECTED: Final = b"DISCONNECTED"
CREDIT_EXCEEDED: Final = b"CREDIT_EXCEEDED"

MAX_CATEGORY_BYTES: Final = 50
MAX_COMMAND_BYTES: Final = 200
MAX_NAME_BYTES: Final = MAX_CATEGORY_BYTES + 1 + MAX_COMMAND_BYTES

MOST_CREDIT: Final = 1 << 20
"""Items that one `CREDIT` may add: a number of more digits is not even read."""

TAG_BYTES: Final = 15
MOST_TAG_CREDIT: Final = 255
NUMBER_MODULUS: Final = 1 << 48
"""Modulus of the numbers of requests."""
LONGEST_MS: Final = 0xFFFFFFFF
"""Longest deadline that travels, seven weeks; a longer one travels as this one."""

MOST_METADATA_BYTES: Final = 8192
"""Bytes of the metadata of one request, as written: as many as gRPC allows unless told otherwise."""

MOST_CODE_BYTES: Final = 200
"""Longest error code that a handler may choose."""
MOST_TEXT_BYTES: Final = 500
"""Longest error text of a failure."""

_CREDIT_DIGITS: Final = len(str(MOST_CREDIT))
_TAG_BODY: Final = Struct(">HIBI")
_TAG: Final = Struct(">HIBII")


def refusal(code: bytes, name: bytes, tag: bytes | None) -> list[bytes]:
    """Return the frames that refuse a command, or the request with that tag."""
    return [code, name] if tag is None else [code, REPLY, tag]


def failure(code: bytes, tag: bytes, text: bytes = b"") -> list[bytes]:
    return [code, REPLY, tag, text] if text else [code, REPLY, tag]


def failed_request(frames: Sequence[bytes]) -> tuple[bytes, bytes, list[bytes]] | None:
    """Return code, tag and further parts of what refuses a request; None: it is something else."""
    if len(frames) >= 3 and frames[1] == REPLY and b"." not in frames[0]:
        return frames[0], frames[2], list(frames[3:])
    return None


def credit_of(frames: Sequence[bytes]) -> int | None:
    """Return how many items a `CREDIT` allows beyond those allowed before; None: it is malformed."""
    if len(frames) != 3 or not 0 < len(frames[2]) <= _CREDIT_DIGITS or not frames[2].isdigit():
        return None
    count = int(frames[2])
    return count if 0 < count <= MOST_CREDIT else None


def make_tag(number: int, left_s: float, credit: int = 0, metadata: bytes = b"") -> bytes:
    left_ms = int(left_s * 1000) if left_s * 1000 < LONGEST_MS else LONGEST_MS
    body = _TAG_BODY.pack(number >> 32, number & 0xFFFFFFFF, credit, left_ms)
    return body + crc32(body + metadata).to_bytes(4, "big") + metadata


def read_tag(tag: bytes) -> tuple[float, int] | None:
    """Return time left in seconds and credit of a tag in our form; None: it is a foreign one."""
    if not TAG_BYTES <= len(tag) <= TAG_BYTES + MOST_METADATA_BYTES:
        return None
    _, _, credit, left_ms, check = _TAG.unpack_from(tag)
    return (left_ms / 1000, credit) if crc32(tag[:11] + tag[TAG_BYTES:]) == check else None
