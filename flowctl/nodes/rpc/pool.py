"""Several servers of one service, and which of them is asked: connections of RPC as the peers of a `MessageScheduler`.

Each server has so many calls to work on at a time as it has channels; who calls meanwhile waits its turn here, where a
deadline costs nothing, and not in a queue of a server that is slow. Of two that have room the quicker one is asked; one
whose calls fail is left out for a while. A call that no server has begun (its queue is full, it stops) goes to another;
one whose connection broke may have been carried out, so it goes to another only where that does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final, TypeVar, cast

from flowctl.errors import BrokenError, ClosedError, LocalProtocolError, RpcTimeoutError
from flowctl.nodes.rpc.asking import failure_of
from flowctl.nodes.rpc.message import Part
from flowctl.nodes.rpc.peers.peer import ConnectionID
from flowctl.nodes.rpc.services import Form, stub_of
from flowctl.nodes.rpc.wire import frames as wire
from flowctl.nodes.scheduler.policies.choice import TwoChoices
from flowctl.nodes.scheduler.policies.ejection import OutlierEjection
from flowctl.nodes.scheduler.policy import SchedulerPolicy
from flowctl.nodes.scheduler.scheduler import MessageScheduler

_S = TypeVar("_S")
CHANNELS: Final = 32
"""Calls that one server works on at a time."""
_NOT_SENT: Final = b"NOT_SENT"
"""Our own word for a server that is not connected now."""
_NOT_BEGUN: Final = frozenset({wire.QUEUE_FULL, wire.SHUTTING_DOWN, _NOT_SENT})
_NOT_CARRIED_OUT: Final = _NOT_BEGUN | {wire.DISCONNECTED}
_Outcome = tuple[int, bool, list[bytes]]
"""Which server it was, whether it replied, and the parts of reply or failure."""
Ask = Callable[[ConnectionID, str, tuple[Part, ...], Callable[[bool, list[bytes]], object], float], object]
Follow = Callable[..., AsyncIterator[list[bytes]]]


@dataclass(slots=True, eq=False)
class _Question:
    command: str
    parts: tuple[Part, ...]
    deadline: float
    withdraw: Callable[[], None] | None = None  #: has its server cancel it. None: it was asked nobody yet


@dataclass(eq=False)
class _Server:
    """One server; a peer of the scheduler."""

    peer_id: int
    conn: ConnectionID
    pool: RpcPool
    streams: int = 0  #: that are open
    asked_count: int = 0

    def send(self, request_id: int | None, message: Any) -> bool | None:
        if not self.pool.is_open(self.conn):  # it would wait until the server is there again
            self._settled(request_id, False, [_NOT_SENT])
            return None
        self.asked_count += 1
        left_s = max(message.deadline - self.pool.now(), 0.0)
        call = self.pool.ask(self.conn, message.command, message.parts, partial(self._settled, request_id), left_s)
        message.withdraw = partial(self._withdraw, request_id, call)
        return None

    def _withdraw(self, request_id: int | None, call: object) -> None:
        """Have the server cancel a call that nobody waits for any more: its channel is free then."""
        with suppress(ClosedError):
            self.pool.withdraw(call)
        self._settled(request_id, True, [])

    def _settled(self, request_id: int | None, ok: bool, parts: list[bytes]) -> None:  # noqa: FBT001  (see `Settle`)
        self.pool.scheduler.receive(self, (self.peer_id, ok, parts), request_id)


def _is_useful(outcome: _Outcome) -> bool:
    """Return whether an outcome speaks for its server: what a handler answers does, be it an error of its own."""
    _, ok, parts = outcome
    return ok or parts[:1] not in ([wire.TIMEOUT], *([code] for code in _NOT_CARRIED_OUT))


@dataclass(eq=False)
class RpcPool:
    """Several servers as one; made by `RpcNode.pool`. Its methods are for any thread, coroutines for any loop."""

    ask: Ask
    withdraw: Callable[[Any], object]
    is_open: Callable[[ConnectionID], bool]
    follow: Follow
    now: Callable[[], float]
    timeout_s: float
    scheduler: MessageScheduler = field(init=False)
    _servers: dict[int, _Server] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        policy = SchedulerPolicy(choice=TwoChoices(Random()), ejection=OutlierEjection(Random()), useful=_is_useful)
        self.scheduler = MessageScheduler(self.now, policy=policy)

    def add(self, conn: ConnectionID, channels: int = CHANNELS) -> None:
        """Ask that server too, with up to `channels` calls at a time, 1 or more."""
        if channels < 1:
            raise LocalProtocolError(f"channels is {channels}, it must be 1 or more")
        self._count += 1
        server = self._servers[self._count] = _Server(self._count, conn, self)
        self.scheduler.connect(server, channels)

    def remove(self, conn: ConnectionID) -> None:
        """Ask that server no more; calls that it has end with `DISCONNECTED` for their callers."""
        for server in [item for item in self._servers.values() if item.conn == conn]:
            del self._servers[server.peer_id]
            self.scheduler.disconnect(server.peer_id)

    def close(self) -> None:
        """End what waits, with `ClosedError`; connections stay."""
        self.scheduler.stop()

    @property
    def asked_counts(self) -> dict[ConnectionID, int]:
        """How many calls each server was asked."""
        return {server.conn: server.asked_count for server in self._servers.values()}

    async def call(
        self,
        command: str,
        *parts: Part,
        returns: Any = None,
        timeout_s: float | None = None,
        repeatable: bool = False,
    ) -> Any:
        """Ask one of the servers, once one has room; see `RpcNode.call`.

        Args:
            command: ``category.command``.
            parts: see `RpcNode.call`.
            returns: see `RpcNode.call`.
            timeout_s: how long it may take, with the wait for a server. None: what the pool was made with.
            repeatable: whether it does no harm if two servers carry it out: then it goes to another one if the
                connection breaks.

        Raises:
            RpcTimeoutError: the deadline passed.
            RpcError: it failed; its `code` says how.
            ClosedError: the pool was closed.
        """
        form = None if returns is None else Form(returns)
        left_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = self.now() + left_s
        tried: set[int] = set()
        again = _NOT_CARRIED_OUT if repeatable else _NOT_BEGUN
        while True:
            question = _Question(command, parts, deadline)
            try:
                outcome: _Outcome = await self.scheduler.request(
                    question, timeout=max(deadline - self.now(), 1e-3), exclude=tried
                )
            except TimeoutError:
                told = f"request {command}: none of {len(self._servers)} servers has answered in time"
                raise RpcTimeoutError(told, code=wire.TIMEOUT.decode()) from None
            except asyncio.CancelledError:
                if question.withdraw is not None:
                    question.withdraw()
                raise
            except BrokenError:  # it was removed meanwhile
                outcome = 0, False, [wire.DISCONNECTED]
            number, ok, data = outcome
            if ok:
                return data if form is None else form.value(data, f"the reply to {command}", "WRONG_REPLY")
            tried.add(number)
            if data[0] not in again or len(tried & self._servers.keys()) >= len(self._servers):
                raise failure_of(command, [wire.DISCONNECTED] if data == [_NOT_SENT] else data)

    def stream(self, command: str, *parts: Part, **options: Any) -> AsyncIterator[list[bytes]]:
        """Have the server with the fewest open streams answer many times; see `RpcNode.stream`."""
        return self._stream(command, parts, options)

    async def _stream(self, command: str, parts: Sequence[Part], options: dict[str, Any]) -> AsyncIterator[list[bytes]]:
        if not self._servers:
            raise failure_of(command, [wire.DISCONNECTED])
        server = min(self._servers.values(), key=lambda item: (item.streams, item.asked_count))
        server.streams += 1
        server.asked_count += 1
        try:
            async for item in self.follow(server.conn, command, *parts, **options):
                yield item
        finally:
            server.streams -= 1

    def service(self, service: type[_S], category: str, *, repeatable: bool = False) -> _S:
        """Return a stub of a service that any of the servers answers; see `RpcNode.service`."""
        return cast("_S", stub_of(service, category, partial(self.call, repeatable=repeatable), self.stream))
