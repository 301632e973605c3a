"""Calls as an application makes them: what wraps them, items that go along, and how they end.

Theory of operation. Each call, with all that may be said of it, is one `RpcCall`, which goes through what was added
around calls to `_call` or `_stream`. They run on the loop of the caller, which may be another one than the node's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from flowctl.errors import ClosedError, LocalProtocolError
from flowctl.nodes.rpc.asking import Asking, RpcCall, failure_of
from flowctl.nodes.rpc.commands import kind_of
from flowctl.nodes.rpc.message import parts_of, weight_of
from flowctl.nodes.rpc.nodecalls import NodeCalls
from flowctl.nodes.rpc.peers.peer import PendingCall
from flowctl.nodes.rpc.streams import Credit, IncomingStream, closing
from flowctl.nodes.rpc.wire.frames import MOST_TAG_CREDIT

_CLOSE_S: Final = 1.0
"""How long a call that has ended waits for what makes its items."""

_POSTED_BYTES: Final = 1 << 18
"""Bytes of items from another loop that are handed over before one waits until the peer has taken them."""

Caller: TypeAlias = "Callable[[RpcCall], Any]"
"""Makes a call: a coroutine function that returns the parts of the reply, or an asynchronous generator of items."""


def check_credit(credit: Any) -> None:
    if not (isinstance(credit, int) and 1 <= credit <= MOST_TAG_CREDIT):
        raise LocalProtocolError(f"credit is {credit!r}, it must be 1 to {MOST_TAG_CREDIT}")


@dataclass(eq=False)
class Calling:
    """Makes calls; on any loop."""

    _calls: NodeCalls
    _asking: Asking
    _middleware: list[Callable[[Caller], Caller]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.call: Caller = self._call
        self.stream: Caller = self._stream

    def add_middleware(self, wrap: Callable[[Caller], Caller]) -> None:
        self._middleware.append(wrap)
        self.call, self.stream = self.wrapped(self._call), self.wrapped(self._stream)

    def wrapped(self, make: Caller) -> Caller:
        """Return what makes a call by `make`, with all that was added around it, the first outermost."""
        kind = kind_of(make)
        for wrap in reversed(self._middleware):
            make = wrap(make)
            if kind_of(make) is not kind:
                told = f"{wrap!r} has made a {kind_of(make).value} of a {kind.value}"
                raise LocalProtocolError(told, hint="wrap a coroutine function in one, and a generator in one")
        return make

    async def _call(self, call: RpcCall) -> list[bytes]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[bool, list[bytes]]] = loop.create_future()
        here = self._calls.group.in_thread()

        def settle(ok: bool, data: list[bytes]) -> None:  # noqa: FBT001  (see `Settle`)
            if here:
                set_result(future, (ok, data))
            else:
                with suppress(RuntimeError):  # the caller's loop is closed
                    loop.call_soon_threadsafe(set_result, future, (ok, data))

        room = _room_for(call, loop, here=here)
        asked = self._asking.ask(call, settle, room=room)
        upload = self._upload(call, asked, room, partial(_set_exception, future))
        try:
            ok, data = await future
        except BaseException:
            self._withdraw(asked)
            raise
        finally:
            await _ended(upload)
        if ok:
            return data
        raise failure_of(call.command, data)

    async def _stream(self, call: RpcCall) -> AsyncIterator[list[bytes]]:
        loop, here = asyncio.get_running_loop(), self._calls.group.in_thread()
        incoming = IncomingStream(loop, here, window=call.credit)
        room = _room_for(call, loop, here=here)
        asked = self._asking.ask(call, incoming.end, incoming.put, room, incoming.credit)
        upload = self._upload(call, asked, room, incoming.fail)
        try:
            async for item in incoming.items(
                lambda more: self._calls.do(self._asking.give_credit, asked, more, incoming)
            ):
                yield item
        finally:
            if not incoming.ended or isinstance(incoming.failure, BaseException):
                self._withdraw(asked)
            await _ended(upload)
        if isinstance(incoming.failure, list):
            raise failure_of(call.command, incoming.failure)

    def _withdraw(self, asked: PendingCall) -> None:
        with suppress(ClosedError):
            self._calls.do(self._asking.withdraw, asked)

    def _upload(
        self, call: RpcCall, asked: PendingCall, room: Credit | None, failed: Callable[[BaseException], object]
    ) -> asyncio.Task[None] | None:
        """Stream items to the handler, as it gives credit, until the call ends; None: there are none."""
        if room is None:
            return None
        task = asyncio.get_running_loop().create_task(self._send_items(call, asked, room))

        def ended(task: asyncio.Task[None]) -> None:
            cancelled = LocalProtocolError(f"the items of {call.command} were cancelled")  # or the call is over
            error = cancelled if task.cancelled() else task.exception()
            if error is not None:
                failed(error)

        task.add_done_callback(ended)
        return task

    async def _send_items(self, call: RpcCall, asked: PendingCall, room: Credit) -> None:
        items: AsyncIterator[Any] = aiter(call.items)  # type: ignore[arg-type]  # there are some
        await room.take()  # an item that would only wait is not even made
        call.used_up = items is call.items
        posted_bytes = 0
        async with closing(items):
            while True:
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    await self._on_node(room, self._asking.send_item(asked, None))
                    return
                most_bytes = asked.peer.conn.most_part_bytes  # type: ignore[union-attr]  # it gave credit
                parts = parts_of(item, most_bytes, f"an item of {call.command}")
                posted_bytes += weight_of(parts)
                if room.here or posted_bytes >= _POSTED_BYTES:
                    posted_bytes = 0
                    await self._on_node(room, self._asking.send_item(asked, parts))
                else:
                    self._calls.do(self._asking.post_item, asked, parts)
                await room.take()

    async def _on_node(self, room: Credit, step: Coroutine[Any, Any, None]) -> None:
        if room.here:
            await step
            return
        try:
            done = asyncio.run_coroutine_threadsafe(step, self._calls.group.loop)
        except RuntimeError as error:  # its loop is closed
            step.close()
            raise ClosedError("the node was stopped") from error
        await asyncio.wrap_future(done)


def _room_for(call: RpcCall, loop: asyncio.AbstractEventLoop, *, here: bool) -> Credit | None:
    if call.items is None:
        return None
    if not hasattr(call.items, "__aiter__"):
        told = f"items is of type {type(call.items).__name__}, it must be an asynchronous iterator"
        raise LocalProtocolError(told, hint="an async def with yield makes one")
    if call.used_up:
        told = f"the items of {call.command} were used by the call that was made before with them"
        raise LocalProtocolError(told, hint="give an object whose __aiter__ begins anew")
    return Credit(loop, here)


async def _ended(upload: asyncio.Task[None] | None) -> None:
    """Have an upload end, with what makes its items, unless that takes its time."""
    if upload is not None:
        upload.cancel()
        await asyncio.wait([upload], timeout=_CLOSE_S)


def set_result(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
