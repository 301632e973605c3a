"""The mini-protocol as a table: who may send what in which state, how large it may be, and how long it may take.

Theory of operation. At any time one side has *agency*: it may send, and the other may only wait. The client has it in
INIT and IDLE; each request gives it to the server, and its reply gives it back. A client that pipelines sends requests
ahead of the replies it waits for; the server still sees one after the other, and the client takes the replies in the
order of its requests, so each side goes through the same states.

A client that is waited for in `State.IDS_BLOCKING` may say there what it wants to be told of (`Subscribe`), and nothing
else; nothing is replied to that.

A server that waits in `State.IDS_BLOCKING` has nothing that its client lacks. Either may leave then by ending its
stream, and nothing is lost: that is a graceful end, and no error.
"""

from __future__ import annotations

import enum
from typing import Final

from flowctl.errors import RemoteProtocolError
from flowctl.nodes.diffusion.wire.messages import (
    Done,
    Init,
    Message,
    Prove,
    ReplyIds,
    ReplyObjects,
    RequestIds,
    RequestObjects,
    Subscribe,
)


class Agency(enum.Enum):
    """Who may send."""

    CLIENT = "client"
    SERVER = "server"
    NOBODY = "nobody"


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
    (State.IDLE, Input.REQUEST_IDS_BLOCKING): State.IDS_BLOCKING,
    (State.IDLE, Input.REQUEST_IDS_NONBLOCKING): State.IDS_NONBLOCKING,
    (State.IDLE, Input.REQUEST_OBJECTS): State.OBJECTS,
    (State.IDLE, Input.DONE): State.DONE,
    (State.IDS_BLOCKING, Input.SUBSCRIBE): State.IDS_BLOCKING,
    (State.IDS_BLOCKING, Input.REPLY_IDS): State.IDLE,
    (State.IDS_NONBLOCKING, Input.REPLY_IDS): State.IDLE,
    (State.OBJECTS, Input.REPLY_OBJECTS): State.IDLE,
}
"""What may be sent in which state, and the state after it; a missing pair is an error of the side that sent it."""

AGENCY: Final = {
    State.INIT: Agency.CLIENT,
    State.IDLE: Agency.CLIENT,
    State.IDS_BLOCKING: Agency.SERVER,
    State.IDS_NONBLOCKING: Agency.SERVER,
    State.OBJECTS: Agency.SERVER,
    State.DONE: Agency.NOBODY,
}

SIZE_LIMIT_BYTES: Final = {
    State.INIT: 65_535,
    State.IDLE: 65_535,
    State.IDS_BLOCKING: 2_500_000,
    State.IDS_NONBLOCKING: 2_500_000,
    State.OBJECTS: 2_500_000,
    State.DONE: 0,
}
"""Largest message, in bytes, that is taken in a state (Cardano `ObjectDiffusion/Codec.hs`)."""

TIME_LIMIT_S: Final = {
    State.INIT: 10.0,
    State.IDLE: None,
    State.IDS_BLOCKING: None,
    State.IDS_NONBLOCKING: 10.0,
    State.OBJECTS: 10.0,
    State.DONE: None,
}
"""How long the side with agency may take, in seconds (same source, but for Init, which is a client's first word: what
connects and is none would keep its place for ever). None: for ever, its connection being alive."""

MAX_COUNT: Final = 0xFFFF
"""Counts are 16 bits wide."""

_KINDS: Final = {
    Init: Input.INIT,
    Prove: Input.PROVE,
    Subscribe: Input.SUBSCRIBE,
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
