"""Several servers of one service, and which of them is asked: connections of RPC as the peers of a `MessageScheduler`.

Each server has so many calls to work on at a time as it has channels; who calls meanwhile waits its turn here, where a
deadline costs nothing, and not in a queue of a server that is slow. Of two that have room the quicker one is asked; one
whose calls fail is left out for a while. A call that its server has not begun (its queue is full, it is not connected)
goes to another; one whose connection broke, or whose server stopped, may have been carried out, so it goes to another
only where that does no harm.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf
from random import Random
from typing import Any, Final, TypeVar, cast

from flowctl.errors import BrokenError, ClosedError, FlowctlError, LocalProtocolError, RpcTimeoutError
from flowctl.nodes.rpc.asking import RpcCall, failure_of
from flowctl.nodes.rpc.calling import Caller
from flowctl.nodes.rpc.message import SERVED_MESSAGE, Part, own_metadata
from flowctl.nodes.rpc.peers.peer import ConnectionID
from flowctl.nodes.rpc.peers.reaching import check_timeout
from flowctl.nodes.rpc.services import WRONG_REPLY, Form, stub_of
from flowctl.nodes.rpc.wire import frames as wire
from flowctl.nodes.scheduler.policies.choice import TwoChoices
from flowctl.nodes.scheduler.policies.ejection import EjectionSettings, OutlierEjection
from flowctl.nodes.scheduler.policy import SchedulerPolicy
from flowctl.nodes.scheduler.scheduler import MessageScheduler

_S = TypeVar("_S")
MOST_TIMEOUT_S: Final = 86_400.0
"""Longest time of one call: one without end would wait for a server for ever."""
CHANNELS: Final = 32
"""Calls that one server works on at a time."""
_NOT_SENT: Final = b"NOT_SENT"
"""Our own word for a server that is not connected now."""
_NOT_BEGUN: Final = frozenset({wire.QUEUE_FULL, _NOT_SENT})
_MAY_BE_REPEATED: Final = _NOT_BEGUN | {wire.DISCONNECTED, wire.SHUTTING_DOWN}
"""Codes of calls that a server, or another, may have carried out. A handler that runs when its node stops was begun."""
_MOST_LEFT_OUT: Final = 0.5
"""Share of the servers that may be left out at a time: one of two."""
_Outcome = tuple[int, bool, "list[bytes] | FlowctlError"]
"""Which server it was, whether it replied, and the parts of reply or failure; or why it could not be asked at all."""
Ask = Callable[[RpcCall, Callable[[bool, list[bytes]], object]], object]
Follow = Callable[..., AsyncIterator[list[bytes]]]


@dataclass(slots=True, eq=False)
class _Question:
    call: RpcCall
    deadline: float
    given_up: bool = False
    #: Has its server cancel it; taken by its caller or by the thread that sends it, the one that comes last.
    withdraws: list[Callable[[], None]] = field(default_factory=list)

    def give_up(self) -> None:
        """Have its server cancel it, once, if one was asked."""
        self.given_up = True
        with suppress(IndexError):
            self.withdraws.pop()()


@dataclass(eq=False)
class _Server:
    """One server; a peer of the scheduler."""

    peer_id: int
    conn: ConnectionID
    pool: RpcPool
    streams: int = 0  #: that are open
    asked_count: int = 0
    open: dict[int | None, _Question] = field(default_factory=dict)

    def send(self, request_id: int | None, message: Any) -> bool | None:
        question: _Question = message
        if not self.pool.is_open(self.conn):  # it would wait until the server is there again
            self._settled(request_id, False, [_NOT_SENT])
            return None
        self.asked_count += 1
        self.open[request_id] = question
        call = replace(question.call, conn=self.conn, timeout_s=max(question.deadline - self.pool.now(), 0.0))
        settle = partial(self._settled, request_id)
        try:
            # Not in the context of the call that has the scheduler's turn: the time of its caller is not ours.
            asked = Context().run(self.pool.ask, call, settle)
        except FlowctlError as error:
            self._settled(request_id, True, error)
            return None
        question.withdraws.append(partial(self._withdraw, request_id, asked))
        if question.given_up:
            question.give_up()
        return None

    def give_up_all(self) -> None:
        """Have it cancel what it was asked."""
        for question in list(self.open.values()):
            question.give_up()

    def _withdraw(self, request_id: int | None, call: object) -> None:
        """Have the server cancel a call that nobody waits for any more: its channel is free then."""
        with suppress(ClosedError):
            self.pool.withdraw(call)
        self._settled(request_id, True, [])

    def _settled(self, request_id: int | None, ok: bool, parts: list[bytes] | FlowctlError) -> None:  # noqa: FBT001  (see `Settle`)
        self.open.pop(request_id, None)
        self.pool.scheduler.receive(self, (self.peer_id, ok, parts), request_id)


def _is_useful(outcome: _Outcome) -> bool:
    """Return whether an outcome speaks for its server: what a handler answers does, be it an error of its own."""
    _, ok, parts = outcome
    return ok or isinstance(parts, FlowctlError) or parts[0] not in {wire.TIMEOUT, *_MAY_BE_REPEATED}


@dataclass(eq=False)
class RpcPool:
    """Several servers as one; made by `RpcNode.pool`. Its methods are for any thread, coroutines for any loop."""

    ask: Ask
    withdraw: Callable[[Any], object]
    is_open: Callable[[ConnectionID], bool]
    #: Calls one server, and has one answer many times, as the methods of a node do.
    ask_one: Callable[..., Awaitable[Any]]
    follow: Follow
    wrapped: Callable[[Caller], Caller]
    now: Callable[[], float]
    timeout_s: float
    scheduler: MessageScheduler = field(init=False)
    _servers: dict[int, _Server] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))
    _closed: bool = False

    def __post_init__(self) -> None:
        ejection = OutlierEjection(Random(), EjectionSettings(most_share=_MOST_LEFT_OUT))
        policy = SchedulerPolicy(choice=TwoChoices(Random()), ejection=ejection, useful=_is_useful)
        self.scheduler = MessageScheduler(self.now, policy=policy)
        self._make = self.wrapped(self._call)

    def add(self, conn: ConnectionID, channels: int = CHANNELS) -> None:
        """Ask that server too, with up to `channels` calls at a time, 1 or more."""
        if channels < 1:
            raise LocalProtocolError(f"channels is {channels}, it must be 1 or more")
        number = next(self._numbers)
        server = self._servers[number] = _Server(number, conn, self)
        self.scheduler.connect(server, channels)

    def remove(self, conn: ConnectionID) -> None:
        """Ask that server no more; calls that it has end with `DISCONNECTED` for their callers, and are cancelled."""
        for server in [item for item in self._there() if item.conn == conn]:
            self._servers.pop(server.peer_id, None)
            self.scheduler.disconnect(server.peer_id)
            server.give_up_all()

    def close(self) -> None:
        """End what waits, with `ClosedError`, and have servers cancel what they were asked; connections stay."""
        self._closed = True
        self.scheduler.stop()
        for server in self._there():
            server.give_up_all()

    def _there(self) -> list[_Server]:
        return list(self._servers.values())

    @property
    def asked_counts(self) -> dict[ConnectionID, int]:
        """How many calls each server was asked."""
        counts: Counter[ConnectionID] = Counter()
        for server in self._there():
            counts[server.conn] += server.asked_count
        return dict(counts)

    async def call(
        self,
        command: str,
        *parts: Part,
        returns: Any = None,
        timeout_s: float | None = None,
        repeatable: bool = False,
        metadata: Mapping[str, str] | None = None,
        items: AsyncIterable[Any] | None = None,
    ) -> Any:
        """Ask one of the servers, once one has room; see `RpcNode.call`.

        Args:
            command: ``category.command``.
            parts: see `RpcNode.call`.
            returns: see `RpcNode.call`.
            timeout_s: how long it may take, with the wait for a server. None: what the pool was made with.
            repeatable: whether it does no harm if two servers carry it out: then it goes to another one if the
                connection breaks.
            metadata: see `RpcNode.call`.
            items: see `RpcNode.call`; such a call goes to a server as `stream` does.

        Raises:
            RpcTimeoutError: the deadline passed.
            RpcError: it failed; its `code` says how.
            ClosedError: the pool was closed.
        """
        form = None if returns is None else Form(returns)
        left_s = self.timeout_s if timeout_s is None else timeout_s
        check_timeout(left_s)
        if items is not None:
            with self._busy_with(command) as server:
                options = {"returns": returns, "timeout_s": left_s, "metadata": metadata, "items": items}
                return await self.ask_one(server.conn, command, *parts, **options)
        call = RpcCall(
            command=command,
            parts=parts,
            conn=None,
            timeout_s=left_s,
            metadata=own_metadata(metadata),
            repeatable=repeatable,
        )
        data = await self._make(call)
        return data if form is None else form.value(data, f"the reply to {command}", WRONG_REPLY)

    async def _call(self, call: RpcCall) -> list[bytes]:
        command, served = call.command, SERVED_MESSAGE.get()
        left_s = min(call.timeout_s, MOST_TIMEOUT_S, inf if served is None else served.left_s())
        deadline = self.now() + left_s
        tried: set[int] = set()
        again = _MAY_BE_REPEATED if call.repeatable else _NOT_BEGUN
        while True:
            question = _Question(call, deadline)
            try:
                outcome: _Outcome = await self.scheduler.request(
                    question, timeout=max(deadline - self.now(), 1e-3), exclude=tried
                )
            except TimeoutError:
                question.give_up()
                told = f"request {command}: none of {len(self._servers)} servers has answered in time"
                raise RpcTimeoutError(told, code=wire.TIMEOUT.decode()) from None
            except asyncio.CancelledError:
                question.give_up()
                raise
            except BrokenError:  # it was removed meanwhile
                outcome = 0, False, [wire.DISCONNECTED]
            number, ok, data = outcome
            if isinstance(data, FlowctlError):
                raise data
            if ok:
                return data
            tried.add(number)
            if data[0] not in again or tried >= {server.peer_id for server in self._there()}:
                raise failure_of(command, [wire.DISCONNECTED] if data == [_NOT_SENT] else data)

    async def stream(self, command: str, *parts: Part, **options: Any) -> AsyncIterator[list[bytes]]:
        """Have the server with the fewest open streams, of those that are connected, answer many times.

        See `RpcNode.stream`. Nothing is begun anew elsewhere when its connection breaks.
        """
        with self._busy_with(command) as server:
            async with aclosing(self.follow(server.conn, command, *parts, **options)) as items:  # type: ignore[type-var]
                async for item in items:
                    yield item

    @contextmanager
    def _busy_with(self, command: str) -> Iterator[_Server]:
        """Choose the server with the fewest open streams, and count one more meanwhile."""
        if self._closed:
            raise ClosedError("the pool was closed")
        there = [server for server in self._there() if self.is_open(server.conn)]
        if not there:
            raise failure_of(command, [wire.DISCONNECTED])
        server = min(there, key=lambda item: (item.streams, item.asked_count))
        server.streams += 1
        server.asked_count += 1
        try:
            yield server
        finally:
            server.streams -= 1

    def service(self, service: type[_S], category: str, *, repeatable: bool = False) -> _S:
        """Return a stub of a service that any of the servers answers; see `RpcNode.service`."""
        return cast("_S", stub_of(service, category, partial(self.call, repeatable=repeatable), self.stream))
