"""What a node asks of others: its requests, until each has its outcome, once.

Theory of operation. A request of ours waits in the table of the peer that was asked, so what another peer says about it
does not count; it leaves the table before its caller is told.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from random import SystemRandom
from typing import Any, Final, TypeAlias

from flowctl.core.text.printable import printable, short
from flowctl.errors import LocalProtocolError, RpcError, RpcTimeoutError
from flowctl.nodes.rpc.commands import check_name
from flowctl.nodes.rpc.jobs.dispatcher import Dispatcher
from flowctl.nodes.rpc.message import MOST_PARTS, SERVED_MESSAGE, Part, check_size, metadata_octets, octets
from flowctl.nodes.rpc.nodecalls import NodeCalls
from flowctl.nodes.rpc.peers.peer import ConnectionID, PendingCall, PendingCalls, RpcPeer
from flowctl.nodes.rpc.peers.reaching import NO_CONNECTION, Reaching, check_timeout
from flowctl.nodes.rpc.streams import Credit, IncomingStream
from flowctl.nodes.rpc.wire import frames as wire

_log: Final = logging.getLogger("flowctl.rpc")

LATE_EVERY_S: Final = 10.0
"""Least time between two warnings of answers that come too late: a peer can cause any number of them."""
MOST_CALLS: Final = 100_000
"""Requests that may wait for one peer; each takes some 700 octets."""

Settle: TypeAlias = Callable[[bool, list[bytes]], object]


@dataclass(slots=True, eq=False, kw_only=True)
class RpcCall:
    """A call that is about to be made; what wraps calls may change it."""

    command: str  #: ``category.command``
    parts: tuple[Part, ...]
    conn: ConnectionID | None  #: to whom; None: a pool chooses one of its servers
    timeout_s: float
    metadata: dict[str, str]  #: what travels beside the parts
    items: AsyncIterable[Any] | None = None  #: what is streamed to the handler
    credit: int = 0  #: items of the answer that may wait here; 0: it is one reply
    repeatable: bool = False  #: of a pool: whether it does no harm if two servers carry it out
    used_up: bool = field(default=False, init=False)  #: `items` were begun, and cannot be begun anew


@dataclass(eq=False)
class Asking:
    """Sends commands and requests, and reports their outcome; on the node's thread, except `ask`."""

    _calls: NodeCalls
    _reaching: Reaching
    _jobs: Dispatcher
    _clock: Callable[[], float]
    asked_count: int = 0
    late_count: int = 0  #: answers that nothing waited for
    malformed_count: int = 0  #: answers that no peer should send
    _numbers: Iterator[int] = field(default_factory=lambda: count(SystemRandom().randrange(wire.NUMBER_MODULUS)))
    _late_told_at: float = -inf

    def ask(
        self,
        call: RpcCall,
        settle: Settle,
        item: Callable[[list[bytes]], bool] | None = None,
        room: Credit | None = None,
        credit: int = 0,
    ) -> PendingCall:
        """Send a request, on any thread; of a handler, with at most the time that its own caller still waits."""
        conn, timeout_s = call.conn, call.timeout_s
        if conn is None:
            raise LocalProtocolError("conn is None, a call has a connection that it goes to")
        check_timeout(timeout_s)
        served = SERVED_MESSAGE.get()
        if served is not None:
            timeout_s = min(timeout_s, served.left_s())
        number, metadata = next(self._numbers) % wire.NUMBER_MODULUS, metadata_octets(call.metadata)
        tag = wire.make_tag(number, timeout_s, credit, metadata)
        name, *checked = checked_frames(conn, call.command, call.parts)
        if metadata:
            check_size(short(call.command), [name, tag, *checked])
        asked = PendingCall(tag[: wire.TAG_BYTES], name, settle, item, room)
        self._calls.do_or_fail(self._request, conn, [name, tag, *checked], asked, timeout_s)
        return asked

    def send(
        self,
        conn: ConnectionID,
        frames: list[bytes],
        queue_full: Callable[[], object] | None,
        queue_failure: Callable[[str], object] | None,
    ) -> None:
        peer = self._reaching.find(conn)
        problem = NO_CONNECTION if peer is None else self._reaching.try_to_send(peer, frames)
        if problem is wire.QUEUE_FULL and queue_full is not None:
            self.call_back(queue_full)
        elif problem is NO_CONNECTION and queue_failure is not None:
            self.call_back(queue_failure, "there is no such connection")

    def _request(self, conn: ConnectionID, frames: list[bytes], call: PendingCall, timeout_s: float) -> None:
        if self._calls.stopping:
            self._calls.make(call.settle, False, [wire.SHUTTING_DOWN])
            return
        peer = self._reaching.find(conn)
        if peer is None:
            # To a service node OxenMQ says TIMEOUT, at once.
            self._calls.make(call.settle, False, [wire.TIMEOUT if conn.service_node else wire.DISCONNECTED])
            return
        calls = peer.calls
        if calls is None:
            calls = peer.calls = PendingCalls(self._calls_due)
        if len(calls) >= MOST_CALLS:
            self._calls.make(call.settle, False, [wire.QUEUE_FULL])
            return
        problem = self._reaching.try_to_send(peer, frames)
        if problem is not None:
            self._calls.make(call.settle, False, [problem])
            return
        self.asked_count += 1
        deadline = self._clock() + timeout_s
        call.peer = peer
        calls.add(call.tag, call, deadline)
        if deadline < calls.due_at:
            calls.due_at = deadline
            self._calls.group.deadlines.set(calls, deadline)

    def withdraw(self, call: PendingCall) -> None:
        """Give up a request: have its handler cancelled."""
        peer = call.peer
        if peer is not None and peer.calls is not None and peer.calls.take(call.tag) is not None:
            self._reaching.send_to(peer, [wire.CANCEL, call.tag])

    def give_credit(self, call: PendingCall, count: int, incoming: IncomingStream) -> None:
        peer = call.peer
        if peer is not None and peer.calls is not None and call.tag in peer.calls:
            incoming.allow(count)
            self._reaching.send_surely(peer, [wire.CREDIT, call.tag, b"%d" % count])

    def received_credit(self, peer: RpcPeer, frames: list[bytes]) -> None:
        """Have items of a call go out; where there are none to come, say so at once, and that a call is over."""
        call, count = None if peer.calls is None else peer.calls.get(frames[1]), wire.credit_of(frames)
        if count is None:
            self.malformed_count += 1
        elif call is None:  # that its items have an end would be taken for all of them
            self._reaching.send_surely(peer, [wire.CANCEL, frames[1]])
        elif call.room is None:
            self._reaching.send_surely(peer, [wire.UP_END, frames[1]])
        else:
            call.room.add(count)

    async def send_item(self, call: PendingCall, parts: list[bytes] | None) -> None:
        """Send an item of a call, or their end (None), once its peer has taken what was sent before."""
        peer = call.peer
        if peer is None or peer.calls is None:
            return
        if not peer.is_reading:
            self._reaching.unsent_count += 1
            await peer.reads()
        self.post_item(call, parts)

    def post_item(self, call: PendingCall, parts: list[bytes] | None) -> None:
        """Send an item of a call, or their end (None)."""
        peer = call.peer
        if peer is not None and peer.calls is not None and call.tag in peer.calls:
            frames = [wire.UP_END, call.tag] if parts is None else [wire.UP, call.tag, *parts]
            self._reaching.send_surely(peer, frames)

    def _calls_due(self, calls: PendingCalls) -> None:
        calls.due_at = inf
        for call in calls.take_due(self._clock()):
            self._calls.make(call.settle, False, [wire.TIMEOUT])
        following = calls.next_deadline()
        if following is not None:
            calls.due_at = min(calls.due_at, following)
            self._calls.group.deadlines.set(calls, calls.due_at)

    def received_reply(self, peer: RpcPeer, frames: list[bytes]) -> None:
        if len(frames) < 2:
            self.malformed_count += 1
            return
        self._settle(peer, frames[1][: wire.TAG_BYTES], True, frames[2:])

    def received_failure(self, peer: RpcPeer, code: bytes, tag: bytes, more: list[bytes]) -> None:
        self._settle(peer, tag[: wire.TAG_BYTES], False, [code, *more])

    def _settle(self, peer: RpcPeer, tag: bytes, ok: bool, data: list[bytes]) -> None:  # noqa: FBT001  (see `Settle`)
        call = None if peer.calls is None else peer.calls.take(tag)
        if call is None:
            self._note_late()
        else:
            self._calls.make(call.settle, ok, data)

    def received_item(self, peer: RpcPeer, frames: list[bytes]) -> None:
        call = None if peer.calls is None else peer.calls.get(frames[1])
        if call is None:
            self._note_late()
        elif call.item is None or not call.item(frames[2:]):
            self.malformed_count += 1
            self.received_failure(peer, wire.CREDIT_EXCEEDED, frames[1], [])
            self._reaching.send_to(peer, [wire.CANCEL, frames[1]])

    def received_unknown(self, peer: RpcPeer, frames: list[bytes]) -> None:
        """Fail the oldest request with the command that the peer does not know: it does not say which."""
        calls = peer.calls
        if calls is None or len(frames) < 2:
            return
        call = calls.take_oldest(frames[1])
        if call is not None:
            self._calls.make(call.settle, False, [wire.UNKNOWN_COMMAND])

    def _note_late(self) -> None:
        """Count an answer that nothing waits for, any more or at all; warn, but not of each of a flood."""
        self.late_count += 1
        now = self._clock()
        if now - self._late_told_at >= LATE_EVERY_S:
            self._late_told_at = now
            _log.warning("dropped an answer that no request waits for; %d so far", self.late_count)

    def call_back(self, callback: Callable[..., object], *args: Any) -> None:
        self._jobs.reply(partial(callback, *args), getattr(callback, "__qualname__", "callback"))


class RequestFuture(Future[list[bytes]]):
    """The outcome of a request, for other threads than the node's."""

    def __init__(self, in_node_thread: Callable[[], bool] = bool) -> None:
        super().__init__()
        self._in_node_thread = in_node_thread

    def get(self, timeout_s: float | None = None) -> list[bytes]:
        """Wait for the reply and return its parts."""
        if not self.done() and self._in_node_thread():
            raise LocalProtocolError("get() would wait on the node's own thread", hint="await call() there")
        return self.result(timeout_s)


def failure_of(command: str, data: Sequence[bytes]) -> RpcError:
    """Return the exception for what a request failed with: its code, and maybe a text, of which little is believed."""
    code = printable(data[0][: wire.MOST_CODE_BYTES].decode(errors="replace"))
    text = f": {printable(data[1][: wire.MOST_TEXT_BYTES].decode(errors='replace'))}" if len(data) > 1 else ""
    kind = RpcTimeoutError if data[0] == wire.TIMEOUT else RpcError
    return kind(f"request {command} failed with {code}{text}", code=code)


def checked_frames(conn: ConnectionID, command: str, parts: tuple[Part, ...]) -> list[bytes]:
    """Return command and parts as they are sent; more than a node takes is refused here, where their sender is told."""
    check_name("command", command)
    if len(parts) > MOST_PARTS:
        raise LocalProtocolError(f"a message has {len(parts)} parts, at most {MOST_PARTS} are allowed")
    frames = [command.encode(), *map(octets, parts)]
    most = conn.most_part_bytes
    if max(map(len, frames)) > most:  # it would end the connection, and with it all other requests there
        number = next(number for number, frame in enumerate(frames) if len(frame) > most)
        what = f"part {number} of {short(command)}" if number else "the name of a command"
        raise LocalProtocolError(
            f"{what} has {len(frames[number])} bytes, the limit of this connection is {most}", hint="send it in pieces"
        )
    check_size(short(command), frames)
    return frames
