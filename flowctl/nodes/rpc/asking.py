"""What a node asks of others: its requests, until each has its outcome, once.

Theory of operation. A request of ours waits in the table of the peer that was asked, so what another peer says about it
does not count; it leaves the table before its caller is told. All but `send`, `request`, `future`, `call` and `stream`
is for the node's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial, wraps
from itertools import count
from math import inf
from random import SystemRandom
from typing import Any, Final, TypeAlias

from flowctl.core.text.printable import short
from flowctl.errors import ClosedError, LocalProtocolError, RpcError, RpcTimeoutError
from flowctl.nodes.rpc.incoming import Incoming
from flowctl.nodes.rpc.jobs.dispatcher import Dispatcher
from flowctl.nodes.rpc.message import MOST_PARTS, SERVED, Part, octets
from flowctl.nodes.rpc.nodecalls import NodeCalls
from flowctl.nodes.rpc.peers.peer import ConnectionID, PendingCall, PendingCalls, RpcPeer
from flowctl.nodes.rpc.peers.reaching import NO_CONNECTION, Reaching, check_timeout
from flowctl.nodes.rpc.wire import frames as wire
from flowctl.nodes.rpc.wire.tag import MOST_CREDIT, NUMBERS, make_tag

_log: Final = logging.getLogger("flowctl.rpc")

LATE_EVERY_S: Final = 10.0
"""Least time between two warnings of answers that come too late: a peer causes them."""
MOST_CALLS: Final = 100_000
"""Requests that wait for one peer; each is some 700 octets."""
NOT_ALLOWED: Final = b"CREDIT_EXCEEDED"
"""Code of a stream whose server has sent more than it may."""

Settle: TypeAlias = Callable[[bool, list[bytes]], object]


class Asking:
    """Sends commands and requests, and tells what became of them.

    Attributes:
        asked_count: requests that were sent.
        late_count: answers that nothing waited for.
        malformed_count: answers that no peer should send.
    """

    __slots__ = (
        *("_calls", "_clock", "_jobs", "_late_told_at", "_numbers", "_reaching"),
        *("asked_count", "late_count", "malformed_count"),
    )

    def __init__(self, calls: NodeCalls, reaching: Reaching, jobs: Dispatcher, clock: Callable[[], float]) -> None:
        self._calls: Final = calls
        self._reaching: Final = reaching
        self._jobs: Final = jobs
        self._clock: Final = clock
        self._numbers: Final = count(SystemRandom().randrange(NUMBERS))
        self._late_told_at = -inf
        self.asked_count = 0
        self.late_count = 0
        self.malformed_count = 0

    # --- any thread ----------------------------------------------------------------------------------------------

    def send(
        self,
        conn: ConnectionID,
        command: str,
        parts: tuple[Part, ...],
        queue_full: Callable[[], object] | None,
        queue_failure: Callable[[str], object] | None,
    ) -> None:
        self._calls.do(self._send, conn, _checked(conn, command, parts), queue_full, queue_failure)

    def request(
        self, conn: ConnectionID, command: str, parts: tuple[Part, ...], on_reply: Settle, timeout_s: float
    ) -> None:
        self._ask(conn, command, parts, partial(self.call_back, _served(on_reply)), timeout_s)

    def future(self, conn: ConnectionID, command: str, parts: tuple[Part, ...], timeout_s: float) -> RequestFuture:
        future = RequestFuture(self._calls.group.in_thread)
        self._ask(conn, command, parts, partial(_settle, future, command), timeout_s)
        return future

    async def call(self, conn: ConnectionID, command: str, parts: tuple[Part, ...], timeout_s: float) -> list[bytes]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[bool, list[bytes]]] = loop.create_future()
        here = self._calls.group.in_thread()

        def settle(ok: bool, data: list[bytes]) -> None:  # noqa: FBT001  (see `Settle`)
            if here:
                if not future.done():
                    future.set_result((ok, data))
            else:
                with suppress(RuntimeError):  # the caller's loop is closed
                    loop.call_soon_threadsafe(_set_result, future, (ok, data))

        asked = self._ask(conn, command, parts, settle, timeout_s)
        try:
            ok, data = await future
        except asyncio.CancelledError:
            with suppress(ClosedError):
                self._calls.do(self._withdraw, asked)
            raise
        if ok:
            return data
        raise failure_of(command, data)

    async def stream(
        self,
        conn: ConnectionID,
        command: str,
        parts: tuple[Part, ...],
        timeout_s: float,
        credit: int,
    ) -> AsyncIterator[list[bytes]]:
        if not 1 <= credit <= MOST_CREDIT:
            raise LocalProtocolError(f"credit is {credit}, it must be 1 to {MOST_CREDIT}")
        incoming = Incoming(asyncio.get_running_loop(), here=self._calls.group.in_thread(), credit=credit)
        asked = self._ask(conn, command, parts, incoming.end, timeout_s, credit, incoming.put)
        taken = 0
        try:
            while (item := await incoming.take()) is not None:
                yield item
                taken += 1
                if 2 * taken >= credit and not incoming.ended:
                    self._calls.do(self._give_credit, asked, taken, incoming)
                    taken = 0
        finally:
            if not incoming.ended:
                with suppress(ClosedError):
                    self._calls.do(self._withdraw, asked)
        if incoming.failure is not None:
            raise failure_of(command, incoming.failure)

    def _ask(
        self,
        conn: ConnectionID,
        command: str,
        parts: tuple[Part, ...],
        settle: Settle,
        timeout_s: float,
        credit: int = 0,
        item: Callable[[list[bytes]], bool] | None = None,
    ) -> PendingCall:
        """Send a request, on whatever thread; of a handler, with at most the time that its own caller still waits."""
        check_timeout(timeout_s)
        served = SERVED.get()
        if served is not None:
            timeout_s = min(timeout_s, served.left_s())
        tag = make_tag(next(self._numbers) % NUMBERS, timeout_s, credit)
        name, *checked = _checked(conn, command, parts)
        frames = [name, tag, *checked]
        call = PendingCall(tag, name, settle, item)
        self._calls.do_or_fail(self._request, conn, frames, call, timeout_s)
        return call

    # --- the node's thread ---------------------------------------------------------------------------------------

    def _send(
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
            calls = peer.calls = PendingCalls()
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
        if deadline < peer.due:
            peer.due = deadline
            self._calls.group.deadlines.set(peer, deadline)

    def _withdraw(self, call: PendingCall) -> None:
        """Give up a request: have its handler cancelled."""
        peer = call.peer
        if peer is not None and peer.calls is not None and peer.calls.take(call.tag) is not None:
            self._reaching.send_to(peer, [wire.CANCEL, call.tag])

    def _give_credit(self, call: PendingCall, count: int, incoming: Incoming) -> None:
        """Let more items of a stream come."""
        peer = call.peer
        if peer is not None and peer.calls is not None and call.tag in peer.calls:
            incoming.allow(count)
            self._reaching.send_to(peer, [wire.CREDIT, call.tag, b"%d" % count])

    def calls_due(self, peer: RpcPeer) -> None:
        """Tell the requests to a peer whose time is up."""
        calls = peer.calls
        peer.due = inf
        if calls is None:
            return
        for call in calls.take_due(self._clock()):
            self._calls.make(call.settle, False, [wire.TIMEOUT])
        following = calls.next_deadline()
        if following is not None and not peer.closed:
            peer.due = min(peer.due, following)
            self._calls.group.deadlines.set(peer, peer.due)

    def received_reply(self, peer: RpcPeer, frames: list[bytes]) -> None:
        """End a request with its reply."""
        if len(frames) < 2:
            self.malformed_count += 1
            return
        call = None if peer.calls is None else peer.calls.take(frames[1])
        if call is None:
            self._note_late()
        else:
            self._calls.make(call.settle, True, frames[2:])

    def received_failure(self, peer: RpcPeer, code: bytes, tag: bytes, more: list[bytes]) -> None:
        """End a request with the code of its failure."""
        call = None if peer.calls is None else peer.calls.take(tag)
        if call is None:
            self._note_late()
        else:
            self._calls.make(call.settle, False, [code, *more])

    def received_item(self, peer: RpcPeer, frames: list[bytes]) -> None:
        """Hand on an item of a stream."""
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
        """Have a callback of the application run on a worker thread, as the callback of a reply."""
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
    """Return the exception for what a request failed with: its code, and maybe a text."""
    code = data[0].decode(errors="replace")
    text = f": {data[1].decode(errors='replace')}" if len(data) > 1 else ""
    kind = RpcTimeoutError if data[0] == wire.TIMEOUT else RpcError
    return kind(f"request {command} failed with {code}{text}", code=code)


def _settle(future: RequestFuture, command: str, ok: bool, data: list[bytes]) -> None:  # noqa: FBT001  (see `Settle`)
    if not future.set_running_or_notify_cancel():
        return
    if ok:
        future.set_result(data)
    else:
        future.set_exception(failure_of(command, data))


def _served(callback: Settle) -> Settle:
    """Have a callback of a handler run for that one's caller too: what it asks in turn has no more time."""
    if SERVED.get() is None:
        return callback
    context = copy_context()
    return wraps(callback)(lambda ok, data: context.run(callback, ok, data))


def _set_result(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _checked(conn: ConnectionID, command: str, parts: tuple[Part, ...]) -> list[bytes]:
    """Return command and parts as they are sent; more than a node takes is refused here, where their sender is told."""
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
    return frames
