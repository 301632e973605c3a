"""What a handler is given: the parts of a command or request, who sent it, and ways to answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Final, Protocol

from flowctl.core.text.printable import short
from flowctl.errors import LocalProtocolError, RpcError
from flowctl.nodes.rpc.access.access import AuthLevel
from flowctl.nodes.rpc.arguments import as_json
from flowctl.nodes.rpc.peers.peer import MAX_MESSAGE_BYTES, MAX_PART_BYTES, ConnectionID, RpcPeer
from flowctl.nodes.rpc.streams import STREAM_CREDIT, IncomingStream
from flowctl.nodes.rpc.wire.frames import MOST_METADATA_BYTES, WRONG_ARGUMENT

SERVED_MESSAGE: Final[ContextVar[RpcMessage | None]] = ContextVar("flowctl-rpc-served", default=None)
"""The message that the handler running here was given: its own requests have the deadline of that message."""
FRAME_BYTES: Final = 64
"""Memory that a part takes beside its octets: it may have none, and there may be a thousand parts."""
MOST_PARTS_BYTES: Final = MAX_MESSAGE_BYTES - 1024
"""Bytes of all parts of one message: what goes in front of them has room beside."""
MOST_PARTS: Final = 1000
"""Parts of one message: a node accepts at most `MOST_FRAMES` parts."""


class Dataclass(Protocol):
    """A value of a dataclass, as type checkers know it."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class Model(Protocol):
    """A value of a model of Pydantic."""

    def model_dump_json(self) -> str: ...


Part = str | bytes | bytearray | memoryview | Dataclass | Model
"""One part of a message: text, sent as UTF-8, octets, or a dataclass or a model of Pydantic, sent as JSON."""


def octets(part: Part) -> bytes:
    if isinstance(part, bytes):
        return part
    if isinstance(part, str):
        return part.encode()
    if isinstance(part, (bytearray, memoryview)):
        return bytes(part)
    text = as_json(part)
    if text is None:
        raise LocalProtocolError(
            f"a part of a message is text or bytes, or a dataclass or model, not {type(part).__name__}",
            hint="give each part by itself: *parts" if isinstance(part, (list, tuple)) else None,
        )
    return text


def parts_of(value: object, most_bytes: int = MAX_PART_BYTES, what: str = "a reply") -> list[bytes]:
    """Return what a handler returned as parts: a `Part` is one, of lists, tuples and the like each element is."""
    part = octets(value) if isinstance(value, (str, bytes, bytearray, memoryview)) else as_json(value)
    if part is not None:
        if len(part) > most_bytes:  # it would cost the caller its connection, and all that waits there
            raise LocalProtocolError(
                f"a part of {what} has {len(part)} bytes, the limit is {most_bytes}", hint="yield it in pieces"
            )
        return [part]
    if isinstance(value, dict) or not hasattr(value, "__iter__"):
        raise LocalProtocolError(
            f"{what} is text, bytes, or a list of them, not {type(value).__name__}",
            hint="encode it, for example with json.dumps",
        )
    parts = [part for item in value for part in parts_of(item, most_bytes, what)]
    if len(parts) > MOST_PARTS:  # it would be thrown away where it arrives, and the caller wait in vain
        raise LocalProtocolError(
            f"{what} has {len(parts)} parts, at most {MOST_PARTS} are allowed", hint="join them, or yield them"
        )
    check_size(what, parts)
    return parts


def own_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of the metadata of a call, which what wraps calls may change."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise LocalProtocolError(
            f"metadata is of type {type(metadata).__name__}, it must be a mapping of texts to texts"
        )
    return dict(metadata)


def metadata_octets(metadata: Mapping[str, str]) -> bytes:
    """Return the metadata of a request as it is sent."""
    if not metadata:
        return b""
    wrong = next((pair for pair in metadata.items() if not all(isinstance(text, str) for text in pair)), None)
    if wrong is not None:
        raise LocalProtocolError(f"metadata {short(wrong[0])} is {short(wrong[1])}, both must be text")
    try:
        written = json.dumps(metadata, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"metadata has half a character: {error}") from error
    if len(written) > MOST_METADATA_BYTES:
        raise LocalProtocolError(f"metadata has {len(written)} bytes, the limit is {MOST_METADATA_BYTES}")
    return written


def served_message() -> RpcMessage | None:
    """Return the message that the handler was given which calls this, such as a method of a service; else None."""
    return SERVED_MESSAGE.get()


def weight_of(parts: Sequence[bytes]) -> int:
    """Return the bytes that parts take in memory."""
    return sum(map(len, parts)) + FRAME_BYTES * len(parts)


def check_size(what: str, frames: Sequence[bytes]) -> None:
    """See that a message is none that would end its connection, and with it all that waits there."""
    size_bytes = sum(map(len, frames))
    if size_bytes > MOST_PARTS_BYTES:
        raise LocalProtocolError(
            f"{what} has {size_bytes} bytes in all, the limit is {MOST_PARTS_BYTES}", hint="send it in pieces"
        )


class Answerer(Protocol):
    """What a message calls on its node to be answered; any thread."""

    def send_reply(self, message: RpcMessage, parts: tuple[Part, ...]) -> None: ...
    def now(self) -> float: ...
    def items_of(self, message: RpcMessage, credit: int) -> AsyncIterator[list[bytes]]: ...
    def name_of(self, peer: RpcPeer) -> ConnectionID: ...
    def send(self, conn: ConnectionID, command: str, *parts: Part) -> None: ...
    def request(
        self,
        conn: ConnectionID,
        command: str,
        *parts: Part,
        on_reply: Callable[[bool, list[bytes]], object],
        timeout_s: float = ...,
    ) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class RpcMessage:
    """A command or request as its handler sees it; any thread."""

    _node: Answerer
    peer: RpcPeer
    command: bytes
    tag: bytes | None
    data: list[bytes]
    deadline: float | None
    metadata_octets: bytes = b""  #: see `metadata`
    incoming: IncomingStream | None = None  #: what the caller streams, once it was asked for; the node's thread
    over: bool = False  #: its handler has ended
    withdrawn: bool = False  #: its caller has gone or has given up
    _answered: bool = False
    _replied: bool = False  #: its handler has; noted at once on whatever thread

    @property
    def conn(self) -> ConnectionID:
        """Names the connection it came by, for sending to it now or later; of an active service node that one."""
        return self._node.name_of(self.peer)

    @property
    def auth(self) -> AuthLevel:
        """What the sender may call."""
        return self.peer.identity.auth

    @property
    def remote(self) -> str:
        """IP address of the sender; empty where there is none."""
        return self.peer.identity.address

    @property
    def metadata(self) -> dict[str, str]:
        """What its caller says beside the parts, by name.

        Raises:
            RpcError: it is none; to the caller, unless it is caught.
        """
        try:
            found = json.loads(self.metadata_octets) if self.metadata_octets else {}
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
            raise RpcError("metadata is no JSON object of texts", code=WRONG_ARGUMENT.decode())
        return found

    def items(self, credit: int = STREAM_CREDIT) -> AsyncIterator[list[bytes]]:
        """Return what the caller streams, the parts of each item; once, by a coroutine or a handler that yields.

        They end with the handler: taken later, they raise `ClosedError`. Where the caller streams none there are none.

        Args:
            credit: items that may wait here, 1 to 255.

        Raises:
            LocalProtocolError: it came as a command, was asked for before, or `credit` is out of range.
            RpcError: the caller is no node of flowctl; to the caller, unless it is caught.
        """
        return self._node.items_of(self, credit)

    def end_items(self) -> None:
        """Take no more of what the caller streams: its handler has ended. For the node."""
        self.over = True
        if self.incoming is not None:
            self.incoming.close()

    @property
    def cancelled(self) -> bool:
        """Whether the answer is not wanted any more: the caller has gone, has given up, or is out of time.

        A coroutine is cancelled then; a function on a worker thread may look.
        """
        return self.withdrawn or (self.deadline is not None and self.deadline <= self._node.now())

    @property
    def size_bytes(self) -> int:
        """Octets that it keeps: its tag, its parts, and the objects that hold them."""
        tag_bytes = 0 if self.tag is None else len(self.tag)  # a foreign one may have as many as a part
        return tag_bytes + len(self.metadata_octets) + weight_of(self.data)

    def left_s(self) -> float:
        """Return the time that the caller still waits, in seconds; infinite: it has not said, or has its answer."""
        if self.deadline is None or self._answered or self._replied:
            return inf
        return max(0.0, self.deadline - self._node.now())

    def answer_once(self) -> bool:
        """Note that the request is answered; False: it was before, or the answer is not wanted any more."""
        if self._answered:
            return False
        self._answered = True
        return not self.cancelled

    def reply(self, *parts: Part) -> None:
        """Answer the request. The first answer counts: a second one, or what the handler returns later, is dropped."""
        if self.tag is None:
            raise LocalProtocolError(
                f"{self.command.decode(errors='replace')} came as a command, which has no reply", hint="use back()"
            )
        self._node.send_reply(self, parts)
        self._replied = True

    def back(self, command: str, *parts: Part) -> None:
        """Send a command to the sender."""
        self._node.send(self.peer.conn, command, *parts)

    def send_request(
        self, command: str, *parts: Part, on_reply: Callable[[bool, list[bytes]], object], timeout_s: float = 15.0
    ) -> None:
        """Send a request to the sender; see `RpcNode.request`."""
        self._node.request(self.peer.conn, command, *parts, on_reply=on_reply, timeout_s=timeout_s)

    def later(self) -> DeferredSend:
        """Return what answers later, on any thread; the handler then returns None."""
        return DeferredSend(self)


class DeferredSend:
    """An answer that is given later, once, on any thread: a reply to a request, else a command back.

    Call it with the parts of the reply, or with the command and its parts.
    """

    __slots__ = ("_is_request", "_message")

    def __init__(self, message: RpcMessage) -> None:
        self._message: list[RpcMessage] = [message]
        self._is_request: Final = message.tag is not None

    def __call__(self, *parts: Part) -> None:
        frames = [octets(part) for part in parts]
        if not (frames or self._is_request):
            raise LocalProtocolError("it answers a command, and takes a command and its parts")
        try:
            message = self._message.pop()  # atomic: of two threads one gets it
        except IndexError:
            raise LocalProtocolError("this deferred answer was given already") from None
        if self._is_request:
            message.reply(*frames)
        else:
            message.back(frames[0].decode(), *frames[1:])
