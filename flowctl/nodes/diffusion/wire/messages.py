"""The messages of the mini-protocol.

The *client* is the inbound side, which fetches; the *server* is the outbound side, which has the objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Announced(NamedTuple):
    """What a server says about an object that it has: its id, and its size where it tells that.

    Attributes:
        size_bytes: of the object as it is sent. None: not told.
    """

    object_id: bytes
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Init:
    """The client begins. ``[0]``."""


@dataclass(frozen=True, slots=True)
class Prove:
    """The client says who it is, before it asks for anything. ``[7, proof]``.

    Attributes:
        proof: octets that server and client agree on, 1 to `MAX_ID_BYTES`.
    """

    proof: bytes


@dataclass(frozen=True, slots=True)
class Subscribe:
    """The client says what it wants to be told of. ``[6, wanted, topic]``.

    Until the first one it is told of everything, from then on of the topics that it wants. The one message that a
    client may send while the server waits until it has something: that may be what it waits for.

    Attributes:
        wanted: whether it is to be told of the topic from now on, or no more.
        topic: a pattern, as of `fnmatch`, in UTF-8; 1 to `MAX_ID_BYTES` octets.
    """

    wanted: bool
    topic: bytes


@dataclass(frozen=True, slots=True)
class RequestIds:
    """The client wants to know of more objects. ``[1, blocking, ack, req]``.

    Attributes:
        blocking: whether the server waits until it has at least one; exactly where no id is left unacknowledged.
        ack_count: ids, oldest first, that the client needs no more; 0 to 65,535.
    """

    blocking: bool
    ack_count: int
    req_count: int


@dataclass(frozen=True, slots=True)
class ReplyIds:
    """The server tells of objects, in the order in which they will be acknowledged. ``[2, [*announced]]``."""

    announced: tuple[Announced, ...]


@dataclass(frozen=True, slots=True)
class RequestObjects:
    """The client wants objects, each at most once. ``[3, [*ids]]``."""

    object_ids: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ReplyObjects:
    """The server sends exactly what was asked for, in the order of its announcements. ``[4, [*objects]]``."""

    objects: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The client ends. ``[5]``."""


Message = Init | Prove | Subscribe | RequestIds | ReplyIds | RequestObjects | ReplyObjects | Done
