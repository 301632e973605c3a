"""The messages of the mini-protocol, and the protocol as a table: who may send what in which state.

The *client* is the inbound side, which fetches; the *server* is the outbound side, which has the objects.

Theory of operation. At any time one side has *agency*: it may send, and the other may only wait. The client has it in
INIT and IDLE; each request gives it to the server, and its reply gives it back. A client that pipelines sends requests
ahead of the replies it waits for; the server still sees one after the other, and the client takes the replies in the
order of its requests, so each side goes through the same states.

A client that is waited for in `State.IDS_BLOCKING` may say there what it wants to be told of (`Subscribe`) and tell of
itself (`Tell`), and nothing else; nothing is replied to that.

A server that waits in `State.IDS_BLOCKING` has nothing that its client lacks. Either may leave then by ending its
stream, and nothing is lost: that is a graceful end, and no error.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, NamedTuple

from flowctl.errors import RemoteProtocolError


class Announced(NamedTuple):
    """What a server says about an object that it has: its id, and its size where it tells that."""

    object_id: bytes
    size_bytes: int | None = None  #: size of the object as it is sent. None: unknown.


@dataclass(frozen=True, slots=True)
class Init:
    """The client begins. ``[0]``."""


@dataclass(frozen=True, slots=True)
class Prove:
    """The client says who it is, before it asks for anything. ``[7, proof]``."""

    proof: bytes  #: octets that server and client agree on, 1 to `MAX_ID_BYTES`


@dataclass(frozen=True, slots=True)
class Subscribe:
    """The client says what it wants to be told of. ``[6, wanted, topic]``.

    Until the first one it is told of everything, from then on of the topics that it wants. A client
    may send it while the server waits until it has something: that may be what it waits for.
    """

    wanted: bool  #: whether it is to be told of the topic from now on, or no more
    topic: bytes  #: a pattern, as of `fnmatch`, in UTF-8; 1 to `MAX_ID_BYTES` octets


@dataclass(frozen=True, slots=True)
class Tell:
    """The client tells of itself, also while the server waits, as with `Subscribe`. ``[8, words]``."""

    words: bytes  #: octets that client and server agree on, 1 to `MAX_ID_BYTES`


@dataclass(frozen=True, slots=True)
class RequestIds:
    """The client wants to know of more objects. ``[1, blocking, ack, req]``."""

    blocking: bool  #: whether the server waits until it has at least one; exactly where no id is left unacknowledged
    ack_count: int  #: ids, oldest first, that the client needs no more; 0 to 65,535
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


Message = Init | Prove | Subscribe | Tell | RequestIds | ReplyIds | RequestObjects | ReplyObjects | Done


class State(enum.Enum):
    """Where a conversation is."""

    INIT = "Init"
    IDLE = "Idle"
    IDS_BLOCKING = "ObjectIdsBlocking"
    IDS_NONBLOCKING = "ObjectIdsNonBlocking"
    OBJECTS = "Objects"
    DONE = "Done"


class Input(enum.Enum):
    """What is sent; asking for ids in two ways leads to two states."""

    INIT = "Init"
    PROVE = "Prove"
    SUBSCRIBE = "Subscribe"
    TELL = "Tell"
    REQUEST_IDS_BLOCKING = "RequestIds (blocking)"
    REQUEST_IDS_NONBLOCKING = "RequestIds (non-blocking)"
    REPLY_IDS = "ReplyIds"
    REQUEST_OBJECTS = "RequestObjects"
    REPLY_OBJECTS = "ReplyObjects"
    DONE = "Done"


TABLE: Final = {
    (State.INIT, Input.INIT): State.IDLE,
    (State.IDLE, Input.PROVE): State.IDLE,
    (State.IDLE, Input.SUBSCRIBE): State.IDLE,
    (State.IDLE, Input.TELL): State.IDLE,
    (State.IDLE, Input.REQUEST_IDS_BLOCKING): State.IDS_BLOCKING,
    (State.IDLE, Input.REQUEST_IDS_NONBLOCKING): State.IDS_NONBLOCKING,
    (State.IDLE, Input.REQUEST_OBJECTS): State.OBJECTS,
    (State.IDLE, Input.DONE): State.DONE,
    (State.IDS_BLOCKING, Input.SUBSCRIBE): State.IDS_BLOCKING,
    (State.IDS_BLOCKING, Input.TELL): State.IDS_BLOCKING,
    (State.IDS_BLOCKING, Input.REPLY_IDS): State.IDLE,
    (State.IDS_NONBLOCKING, Input.REPLY_IDS): State.IDLE,
    (State.OBJECTS, Input.REPLY_OBJECTS): State.IDLE,
}
"""What may be sent in which state, and the state after it; a missing pair is an error of the side that sent it."""

SIZE_LIMIT_BYTES: Final = {
    State.INIT: 65_535,
    State.IDLE: 65_535,
    State.IDS_BLOCKING: 2_500_000,
    State.IDS_NONBLOCKING: 2_500_000,
    State.OBJECTS: 2_500_000,
    State.DONE: 0,
}
"""Largest message, in bytes, that is accepted in each state (Cardano `ObjectDiffusion/Codec.hs`)."""

TIME_LIMIT_S: Final = {
    State.INIT: 10.0,
    State.IDLE: None,
    State.IDS_BLOCKING: None,
    State.IDS_NONBLOCKING: 10.0,
    State.OBJECTS: 10.0,
    State.DONE: None,
}
"""Time that the side with agency has in each state, in seconds (same source, but for Init, the client's first word: a
connection that never speaks would keep its place for ever). None: no limit while the connection is alive."""

MAX_COUNT: Final = 0xFFFF
"""Largest count, whose field is 16 bits wide."""

_KINDS: Final = {
    Init: Input.INIT,
    Prove: Input.PROVE,
    Subscribe: Input.SUBSCRIBE,
    Tell: Input.TELL,
    ReplyIds: Input.REPLY_IDS,
    RequestObjects: Input.REQUEST_OBJECTS,
    ReplyObjects: Input.REPLY_OBJECTS,
    Done: Input.DONE,
}


def input_of(message: Message) -> Input:
    if isinstance(message, RequestIds):
        return Input.REQUEST_IDS_BLOCKING if message.blocking else Input.REQUEST_IDS_NONBLOCKING
    return _KINDS[type(message)]


def after(state: State, message: Message) -> State:
    following = TABLE.get((state, input_of(message)))
    if following is None:
        raise RemoteProtocolError(
            f"{input_of(message).value} is not allowed in state {state.value}", code="UnexpectedMessage"
        )
    return following
