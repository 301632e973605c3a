"""What a node asks of others: its requests, until each has its outcome, once.

Theory of operation. A request of ours waits in the table of the peer that was asked, so what another peer says about it
does not count; it leaves the table before its caller is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from random import SystemRandom
from typing import Any, Final, TypeAlias

from flowctl.core.text.printable import short
from flowctl.errors import LocalProtocolError, RpcError, RpcTimeoutError
from flowctl.nodes.rpc.commands import check_name
from flowctl.nodes.rpc.jobs.dispatcher import Dispatcher
from flowctl.nodes.rpc.message import MOST_PARTS, SERVED_MESSAGE, Part, check_size, octets
from flowctl.nodes.rpc.nodecalls import NodeCalls
from flowctl.nodes.rpc.peers.peer import ConnectionID, PendingCall, PendingCalls, RpcPeer
from flowctl.nodes.rpc.peers.reaching import NO_CONNECTION, Reaching, check_timeout
from flowctl.nodes.rpc.wire import frames as wire

_log: Final = logging.getLogger("flowctl.rpc")

LATE_EVERY_S: Final = 10.0
"""Least time between two warnings of answers that come too late: a peer can cause any number of them."""
MOST_CALLS: Final = 100_000
"""Requests that may wait for one peer; each takes some 700 octets."""
NOT_ALLOWED: Final = b"CREDIT_EXCEEDED"
"""Error code of a stream whose server has sent more items than it may."""

Settle: TypeAlias = Callable[[bool, list[bytes]], object]


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
        conn: ConnectionID,
        command: str,
        parts: tuple[Part, ...],
        settle: Settle,
        timeout_s: float,
        credit: int = 0,
        item: Callable[[list[bytes]], bool] | None = None,
    ) -> PendingCall:
        """Send a request, on any thread; of a handler, with at most the time that its own caller still waits."""
        check_timeout(timeout_s)
        served = SERVED_MESSAGE.get()
        if served is not None:
            timeout_s = min(timeout_s, served.left_s())
        tag = wire.make_tag(next(self._numbers) % wire.NUMBER_MODULUS, timeout_s, credit)
        name, *checked = checked_frames(conn, command, parts)
        frames = [name, tag, *checked]
        call = PendingCall(tag, name, settle, item)
        self._calls.do_or_fail(self._request, conn, frames, call, timeout_s)
        return call

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
            self._reaching.send_to(peer, [wire.CREDIT, call.tag, b"%d" % count])

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
        self._settle(peer, frames[1], True, frames[2:])

    def received_failure(self, peer: RpcPeer, code: bytes, tag: bytes, more: list[bytes]) -> None:
        self._settle(peer, tag, False, [code, *more])

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
            self.received_failure(peer, NOT_ALLOWED, frames[1], [])
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


@dataclass(eq=False)
class IncomingStream:
    """What has come of a stream and was not taken yet; the taker is on the node's own loop (`here`), or on another one.

    `allow`, `put` and `end` on the node's thread, `take` on the taker's loop.
    """

    _loop: asyncio.AbstractEventLoop
    here: bool = field(kw_only=True)
    credit: int = field(kw_only=True)  #: items that may still come; the node's thread only
    failure: list[bytes] | None = None  #: code and text, once it has failed
    ended: bool = False  #: nothing comes any more
    _items: deque[list[bytes]] = field(default_factory=deque)  #: any thread: each operation is one of a deque
    _wake: asyncio.Future[None] | None = None  #: the taker's loop only

    def allow(self, count: int) -> None:
        self.credit += count

    def put(self, parts: list[bytes]) -> bool:
        """Take an item; False: it was not allowed to come."""
        if not self.credit:
            return False
        self.credit -= 1
        self._items.append(parts)
        self._do(self._notify)
        return True

    def end(self, ok: bool, data: list[bytes]) -> None:  # noqa: FBT001  (as the callback of a reply)
        """Take the end: parts of a last item, or code and text of a failure."""
        if ok and data:
            self._items.append(data)
        self._do(self._end, None if ok else data)

    async def take(self) -> list[bytes] | None:
        """Return the next item, when there is one; None: it has ended, and `failure` says how."""
        while not self._items:
            if self.ended:
                return None
            self._wake = self._loop.create_future()
            await self._wake
        return self._items.popleft()

    def _end(self, failure: list[bytes] | None) -> None:
        self.failure = failure
        self.ended = True
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _do(self, what: Callable[..., object], *args: object) -> None:
        if self.here:
            what(*args)
        else:
            with suppress(RuntimeError):  # the taker's loop is closed
                self._loop.call_soon_threadsafe(what, *args)


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
    """Return the exception for what a request failed with: its code, and maybe a text."""
    code = data[0].decode(errors="replace")
    text = f": {data[1].decode(errors='replace')}" if len(data) > 1 else ""
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
