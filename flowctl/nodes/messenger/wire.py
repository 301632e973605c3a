"""The wire of a messenger (pure): text header, acknowledgements, and the extension that only those who know it see.

A message is ``{message id}-{source callback}-{destination callback}-{body}`` in one frame: ids in decimal, 0 to
2^64 - 1, and the body is everything after the third ``-``. A DEALER sends ``['', message]``; a ROUTER sends
``[destination, own identity, '', message]``, of which the DEALER at the other end receives the last three. Frames after
these are payload. An acknowledgement of message 7 is ``7-0-2-``.

The extension. A peer that understands it says so in its ZMTP handshake, as the property `ANNOUNCEMENT` with its
incarnation, which a peer that does not ask never sees. To such a peer

- a message has one frame more, behind the header's: incarnation of the sender, number of the message among those to
  this peer, and what is needed to keep an order (`Extension`);
- one acknowledgement speaks of many messages: its body is ``{incarnation}:{first}-{last},...`` in hexadecimal;
- the acknowledgement of message 0 with the body ``{incarnation}:taken-over`` says that another messenger has come under
  the identity of this one, and that this one is not heard any more.

A sender with a store goes on with the outbox of its earlier lives, under a new incarnation. Which those were, and which
of their numbers it has taken over, it says in a second property, `EARLIER`. A peer that does not ask for that takes it
for a sender that begins anew: it may handle again what it handled and did not get to acknowledge.

Source of the header and the envelopes: NoisePage, ``src/messenger/messenger.cpp``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from flowctl.errors import RemoteProtocolError

NOOP: Final = 0
"""Callback id: do nothing."""
ECHO: Final = 1
"""Callback id: send the message back, to its source callback."""
ACK: Final = 2
"""Callback id: the message says that another was received."""
FIRST_CALLBACK: Final = 4
"""The first id of a callback that is not built in; 3 is reserved."""
MAX_ID: Final = 2**64 - 1
MAX_NUMBER: Final = 2**63 - 1
"""Largest incarnation or sequence: what a store can keep."""
MAX_IDENTITY_BYTES: Final = 255
"""Longest routing id (RFC 28)."""
ANNOUNCEMENT: Final = "X-Flowctl-Messenger"
"""Property of the ZMTP handshake: ``1:{incarnation in hexadecimal}``."""
EARLIER: Final = "X-Flowctl-Messenger-Earlier"
"""Property of the handshake: ``{incarnation}-{end},...`` in hexadecimal, one for each earlier life (`Life.earlier`)."""
MAX_EARLIER: Final = 32
"""Earlier lives that are named: as often may a sender start and end before a receiver hears of it, with the same
messages still in its outbox; what that receiver handled before and did not acknowledge it then handles again."""
MAX_RANGES: Final = 4096
"""Ranges in one acknowledgement: some more than the messages that are read before acknowledgements leave."""

_HEADER_BYTES: Final = 3 * 20 + 3
_EXTENSION: Final = struct.Struct(">8sQQQQQ")
_MAGIC: Final = b"\x00flowct\x01"


@dataclass(frozen=True, slots=True)
class Life:
    """A life of a messenger, from its start to its end.

    Args:
        incarnation: its number, 1 to 2^63 - 1.
        earlier: the lives before, by incarnation, that its outbox comes from; each with the message id from which on
            messages are of a later one. Sequences up to that id are of that life and those before, others are not.
    """

    incarnation: int
    earlier: Mapping[int, int] = field(default_factory=dict)


class Header(NamedTuple):
    message_id: int
    source_callback: int
    destination_callback: int
    body: bytes


class Extension(NamedTuple):
    """What travels with a message between peers that both announce it; all numbers are 0 to 2^63 - 1.

    Args:
        sequence: counts the messages of this incarnation to this peer up, from any number on, without a gap.
        floor: all messages of lower sequence have their outcome: they will not come any more.
        after: sequence of the message that has to be handled before this one; its own: it waits for none, but has its
            place in the order. 0: it has none.
        target: incarnation of the receiver whose callback is answered. 0: not known.
    """

    incarnation: int
    sequence: int
    floor: int = 0
    after: int = 0
    target: int = 0

    def encode(self) -> bytes:
        return _EXTENSION.pack(_MAGIC, *self)

    @classmethod
    def decode(cls, frame: bytes) -> Extension | None:
        """Return what a frame says. None: it is no extension, but payload."""
        if len(frame) != _EXTENSION.size or not frame.startswith(_MAGIC):
            return None
        numbers = _EXTENSION.unpack(frame)[1:]
        if max(numbers) > MAX_NUMBER:
            raise RemoteProtocolError(
                f"an extension says {max(numbers)}, the most is 2^63 - 1", code="messenger-number"
            )
        return cls(*numbers)


def encode_message(message_id: int, source_callback: int, destination_callback: int, body: bytes) -> bytes:
    return b"%d-%d-%d-%b" % (message_id, source_callback, destination_callback, body)


def parse_message(frame: bytes) -> Header:
    parts = frame.split(b"-", 3)
    if len(parts) == 4:
        first, second, third, body = parts
        if first.isdigit() and second.isdigit() and third.isdigit() and len(frame) - len(body) <= _HEADER_BYTES:
            header = Header(int(first), int(second), int(third), body)
            if header[0] <= MAX_ID and header[1] <= MAX_ID and header[2] <= MAX_ID:
                return header
    raise RemoteProtocolError(
        f"a message begins with {frame[:_HEADER_BYTES]!r}, not with three ids of 0 to 2^64 - 1 and a '-' after each",
        code="messenger-header",
    )


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last of each run without a gap, in order."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number <= runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def encode_ack(message_id: int) -> bytes:
    """Return the acknowledgement of one message, which every peer understands."""
    return b"%d-0-2-" % message_id


def encode_acks(incarnation: int, message_ids: Iterable[int]) -> list[bytes]:
    """Return acknowledgements of many messages, for a peer that announced the extension."""
    ranges = runs_of(message_ids)
    return [
        b"%d-0-2-%x:%b" % (part[0][0], incarnation, b",".join(b"%x-%x" % item for item in part))
        for part in (ranges[at : at + MAX_RANGES] for at in range(0, len(ranges), MAX_RANGES))
    ]


def parse_acks(header: Header, incarnation: int) -> list[tuple[int, int]]:
    """Return which messages an acknowledgement speaks of, as ranges: first and last of each."""
    message_id, _, _, body = header
    if not body:
        return [(message_id, message_id)]
    try:
        whose, _, text = body.partition(b":")
        parts = text.split(b",", MAX_RANGES)
        if len(parts) <= MAX_RANGES and len(whose) <= 16:
            if int(whose, 16) != incarnation:
                return []
            pairs = [part.split(b"-") for part in parts]
            return [(int(first, 16), int(last, 16)) for first, last in pairs if len(first) <= 16 and len(last) <= 16]
    except ValueError:
        pass
    raise RemoteProtocolError(f"an acknowledgement says {body[:64]!r}", code="messenger-ack")


def encode_announcement(incarnation: int) -> bytes:
    return b"%b:1:%x" % (ANNOUNCEMENT.encode(), incarnation)


def encode_taken_over(incarnation: int) -> bytes:
    return b"0-0-2-%x:taken-over" % incarnation


def parse_announcement(text: str | None) -> int | None:
    """Return the incarnation that a peer announced. None: it announced nothing, or nothing that we know."""
    version, _, incarnation = (text or "").partition(":")
    if version != "1" or not 0 < len(incarnation) <= 16:
        return None
    try:
        number = int(incarnation, 16)
    except ValueError:
        return None
    return number if 0 <= number <= MAX_NUMBER else None


def encode_earlier(earlier: Mapping[int, int]) -> bytes:
    return b"%b:%b" % (EARLIER.encode(), b",".join(b"%x-%x" % item for item in earlier.items()))


def parse_earlier(text: str) -> dict[int, int]:
    """Return what a peer said of its earlier lives. Empty: nothing that we know, so it begins anew."""
    found: dict[int, int] = {}
    for part in text.split(",", MAX_EARLIER)[:MAX_EARLIER]:
        incarnation, _, end = part.partition("-")
        if not (0 < len(incarnation) <= 16 and 0 < len(end) <= 16):
            return {}
        try:
            found[int(incarnation, 16)] = int(end, 16)
        except ValueError:
            return {}
    return found


def as_identity(identity: str | bytes) -> bytes:
    return identity.encode() if isinstance(identity, str) else identity
