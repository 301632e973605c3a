"""What runs for requests of others, and how it ends: with a reply, a failure, or cancelled.

Theory of operation. A coroutine takes its first step within the call; only one that waits becomes a task, and is
entered here: by its deadline, which came with the request, and at its peer, by whose end it is cancelled. A request is
answered once: what comes after that, or after nobody wants it any more, is not sent.

A stream is an asynchronous generator whose items go out one by one, each against one credit that its caller has given;
without credit it stands still. A handler that takes items of its caller gives credit in the same way; what has come and
was not taken counts as what its message holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from inspect import iscoroutine
from math import inf
from typing import Any, Final

from flowctl.core.loop.faults import as_exception
from flowctl.core.outcomes.pending import Pending
from flowctl.errors import ClosedError, LocalProtocolError, RpcError
from flowctl.nodes.rpc.commands import Category, HandlerKind, RpcCommand
from flowctl.nodes.rpc.jobs.begin import begin
from flowctl.nodes.rpc.jobs.dispatcher import Dispatcher
from flowctl.nodes.rpc.jobs.slots import NotStarted, NotStartedError, SlotVerdict, WorkerJob
from flowctl.nodes.rpc.message import SERVED_MESSAGE, RpcMessage, parts_of, weight_of
from flowctl.nodes.rpc.nodecalls import NodeCalls
from flowctl.nodes.rpc.peers.peer import Cancellable, RpcPeer
from flowctl.nodes.rpc.peers.reaching import Reaching
from flowctl.nodes.rpc.streams import Credit, IncomingStream
from flowctl.nodes.rpc.wire import frames as wire

MOST_RUNNING: Final = 10_000
"""Handlers of one category that may wait on the loop; each holds some kilobytes."""
MOST_RUNNING_BYTES: Final = 256 << 20
"""Octets of the messages that these handlers were given."""
LEAST_ITEM_BYTES: Final = 1 << 20
"""Bytes that a peer may have waiting here, as messages and items, whatever others have, before an item is refused."""
ITEM_BYTES: Final = 128
"""Memory that an item takes beside its parts."""
RETRY_S: Final = 0.1
"""Time between two tries to send an item of a stream to a service node that has gone and may come again."""

_CODES: Final = {
    NotStarted.STOPPED: wire.SHUTTING_DOWN,
    NotStarted.LATE: wire.TIMEOUT,
    NotStarted.DISPLACED: wire.QUEUE_FULL,
}
_WRONG: Final = wire.WRONG_ARGUMENT.decode()
_RESERVED_CODES: Final = frozenset(
    {
        *(wire.UNKNOWN_COMMAND, wire.FORBIDDEN, wire.FORBIDDEN_SN, wire.NOT_A_SERVICE_NODE, wire.NO_REPLY_TAG),
        *(wire.QUEUE_FULL, wire.SHUTTING_DOWN, wire.TIMEOUT, wire.DISCONNECTED),
        *(wire.REPLY, wire.HI, wire.HELLO, wire.BYE, *wire.STREAM_WORDS),
    }
)
"""Codes by which the node speaks of itself, and which a handler that fails cannot claim."""


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that runs or waits, and can be cancelled."""

    message: RpcMessage
    category: Category
    credit: Credit | None = None  #: for items of a stream that go out; None: it is none
    task: asyncio.Task[None] | None = None  #: task of a coroutine that waits
    held_bytes: int = 0  #: what it counts for while it waits: its message, and items that were not taken

    def hold(self, size_bytes: int) -> None:
        """Count for so much more, or with a negative number less."""
        self.held_bytes += size_bytes
        self.category.running_bytes += size_bytes
        self.message.peer.waiting_bytes += size_bytes

    def take_item(self, frames: list[bytes]) -> bytes | None:
        """Take an item that its caller streams, or their end; return the code of why it may not come."""
        incoming, parts = self.message.incoming, frames[2:]
        if incoming is None or incoming.ended:
            return None  # it was sent before its caller could know that its handler takes no more
        if frames[0] == wire.UP_END:
            incoming.end(True, [])
        elif self.message.peer.waiting_bytes >= max(LEAST_ITEM_BYTES, MOST_RUNNING_BYTES - self.category.running_bytes):
            return wire.QUEUE_FULL
        elif not incoming.put(parts):
            return wire.CREDIT_EXCEEDED
        else:
            self.hold(ITEM_BYTES + weight_of(parts))
        return None

    def cancel(self) -> None:
        if not self.message.withdrawn:  # once: a second time would cancel the cleaning up
            self.message.withdrawn = True
            if self.task is not None:
                self.task.cancel()

    def add_credit(self, count: int) -> None:
        if self.credit is not None:
            self.credit.add(count)


def has_too_much(category: Category, peer: RpcPeer) -> bool:
    """Return whether too much waits already for more of a peer's.

    A peer that has many that wait leaves as many places again to others: one alone gets half of them.
    """
    return (
        peer.waiting_count >= MOST_RUNNING - category.running_count
        or peer.waiting_bytes >= MOST_RUNNING_BYTES - category.running_bytes
    )


@dataclass(eq=False)
class Serving:
    """Runs the handlers of requests and commands; on the node's thread only."""

    _calls: NodeCalls
    _jobs: Dispatcher
    _reaching: Reaching
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  #: coroutines that wait
    failed_count: int = 0
    wrong_count: int = 0  #: requests and commands whose arguments were wrong, as their handlers say
    full_count: int = 0  #: requests and commands refused since too much runs or waits already
    cancelled_count: int = 0  #: requests whose answer was not wanted any more
    _due: Pending[RunningRequest, None] = field(default_factory=Pending)
    _stopping: bool = False

    def run(self, command: RpcCommand, message: RpcMessage, credit: int = 0) -> None:
        if self._stopping:
            self.fail(message, wire.SHUTTING_DOWN)
            return
        category = command.category
        if command.kind is HandlerKind.PLAIN:
            self._submit(command, message)
        elif has_too_much(category, message.peer):
            self._full(message)
        elif command.kind is HandlerKind.COROUTINE:
            task = begin(self._calls.group.loop, self._serve(command, message))
            if task is not None:
                self._keep(RunningRequest(message, category), task)
        elif not credit:
            self.fail(message, wire.HANDLER_FAILED, b"it streams: call it with stream()")
        else:
            room = Credit(self._calls.group.loop, here=True, count=credit)
            task = begin(self._calls.group.loop, self._stream(command, message, room))
            if task is not None:
                self._keep(RunningRequest(message, category, room), task)

    def fail(self, message: RpcMessage, code: bytes, text: bytes = b"") -> None:
        """Tell the sender of a request why it gets no reply, unless it was answered."""
        if message.tag is not None and message.answer_once():
            self._reaching.send_to(message.peer, wire.failure(code, message.tag, text))

    def deadline_due(self, now: float) -> None:
        for running, _ in self._due.take_due(now):
            running.cancel()
        following = self._due.next_deadline()
        if following is not None:
            self._calls.group.deadlines.set(self, following)

    def stop(self) -> None:
        """Cancel what waits, and start nothing any more: callers are told."""
        self._stopping = True
        for task in list(self.tasks):
            task.cancel()

    def items_of(self, message: RpcMessage, credit: int) -> AsyncIterator[list[bytes]]:
        """Return what the caller of a request streams; see `RpcMessage.items`."""
        tag = message.tag
        if tag is None or message.incoming is not None:
            raise LocalProtocolError(
                "a request has items, and once" if tag is None else "its items were asked for already"
            )
        if not self._calls.group.in_thread():
            raise LocalProtocolError(
                "a plain function takes no items: it runs on a thread of its own", hint="make the handler an async def"
            )
        if message.over:
            raise ClosedError("the handler has ended, and its items with it")
        if message.deadline is None:
            raise RpcError("its caller cannot stream items: its tag is none of ours", code=_WRONG)
        incoming = message.incoming = IncomingStream(self._calls.group.loop, here=True, window=credit)
        return self._taken(message, tag, incoming)

    async def _taken(self, message: RpcMessage, tag: bytes, incoming: IncomingStream) -> AsyncIterator[list[bytes]]:
        def allow(count: int) -> None:
            incoming.allow(count)
            self._reaching.send_surely(message.peer, [wire.UP_CREDIT, tag, b"%d" % count])

        self._reaching.send_surely(message.peer, [wire.UP_CREDIT, tag, b"%d" % incoming.credit])
        async for parts in incoming.items(allow):
            running = message.peer.running.get(tag)
            if isinstance(running, RunningRequest) and running.message is message:
                running.hold(-ITEM_BYTES - weight_of(parts))
            yield parts

    def received_item(self, running: Cancellable | None, frames: list[bytes]) -> None:
        """Take what a caller streams to its handler; more than it may costs it the request."""
        if isinstance(running, RunningRequest) and (code := running.take_item(frames)) is not None:
            self.fail(running.message, code)
            running.cancel()

    # --- inner steps ---------------------------------------------------------------------------------------------

    def _full(self, message: RpcMessage) -> None:
        self.full_count += 1
        self.fail(message, wire.QUEUE_FULL)

    def _submit(self, command: RpcCommand, message: RpcMessage) -> None:
        running = RunningRequest(message, command.category)
        job = WorkerJob(
            command.category.lane,
            partial(_handle, command, message),
            partial(self._handled, running),
            deadline=inf if message.deadline is None else message.deadline,
            size_bytes=message.size_bytes,
            name=message.command.decode(errors="replace"),
            sender=message.peer,
        )
        if self._jobs.submit(job) is SlotVerdict.DROP:
            self._full(message)
        else:
            self._enter(running)

    def _handled(self, running: RunningRequest, parts: Any, error: BaseException | None) -> None:
        self._leave(running)
        message = running.message
        if error is None:
            self._answer(message, parts)
        elif isinstance(error, NotStartedError):
            self.fail(message, _CODES[error.why])
        else:
            self._failed(message, as_exception(error))

    async def _serve(self, command: RpcCommand, message: RpcMessage) -> None:
        SERVED_MESSAGE.set(message)  # in the context of this coroutine alone, see `begin`
        try:
            value = await command.handler(message)
            if value is not None and message.tag is not None:
                self._answer(message, parts_of(value, message.peer.conn.most_part_bytes))
        except BaseException as error:  # noqa: BLE001  (a handler's fault costs its request, and nothing else)
            self._failed(message, error)
        finally:
            message.end_items()

    async def _stream(self, command: RpcCommand, message: RpcMessage, room: Credit) -> None:
        """Send the items of a stream as its caller takes them; a reply without parts is its end."""
        SERVED_MESSAGE.set(message)
        items: AsyncIterator[Any] | None = None
        try:
            items = command.handler(message)
            await self._peer_reads(message.peer)
            async for item in items:
                await room.take()
                parts = parts_of(item, message.peer.conn.most_part_bytes)
                await self._deliver(message, [wire.ITEM, message.tag or b"", *parts])
                del parts
                del item
                await self._peer_reads(message.peer)
            if message.answer_once():
                await self._deliver(message, [wire.REPLY, message.tag or b""])
        except BaseException as error:  # noqa: BLE001  (a handler's fault costs its request, and nothing else)
            self._failed(message, error)
        finally:
            message.end_items()
            if items is not None:
                close: Callable[[], Coroutine[Any, Any, None]] = items.aclose  # type: ignore[attr-defined]  # a generator
                await close()

    async def _deliver(self, message: RpcMessage, frames: list[bytes]) -> None:
        """Send what must not be missing."""
        await self._peer_reads(message.peer)
        while not self._reaching.send_to(message.peer, frames):  # noqa: ASYNC110  (it has gone, and may come again)
            await asyncio.sleep(RETRY_S)  # cancelled when the peer has gone

    async def _peer_reads(self, peer: RpcPeer) -> None:
        """Wait until the peer has taken what was sent before: an item that would only wait is not even made."""
        if not peer.is_reading:
            self._reaching.unsent_count += 1
            await peer.reads()

    def _answer(self, message: RpcMessage, parts: list[bytes] | None) -> None:
        if parts is not None and message.tag is not None and message.answer_once():
            self._reaching.send_to(message.peer, [wire.REPLY, message.tag, *parts])

    def _failed(self, message: RpcMessage, error: BaseException) -> None:
        """Tell of what a handler raised: the caller that it failed, the application what it was."""
        if message.cancelled:
            self.cancelled_count += 1
            message.answer_once()
            return
        if isinstance(error, asyncio.CancelledError) and self._stopping:
            self.fail(message, wire.SHUTTING_DOWN)
            return
        if isinstance(error, RpcError) and (message.tag is not None or error.code == _WRONG):
            code = error.code.encode(errors="replace")
            self.wrong_count += code == wire.WRONG_ARGUMENT
            if code not in _RESERVED_CODES and b"." not in code and len(code) <= wire.MOST_CODE_BYTES:
                self.fail(message, code, str(error).encode(errors="replace")[: wire.MOST_TEXT_BYTES])
                return
        self.failed_count += 1
        self._calls.group.report(f"handler of {message.command.decode(errors='replace')}", error)
        self.fail(message, wire.HANDLER_FAILED)

    def _keep(self, running: RunningRequest, task: asyncio.Task[None]) -> None:
        category, peer = running.category, running.message.peer
        category.running_count += 1
        peer.waiting_count += 1
        running.hold(running.message.size_bytes)
        running.task = task
        self.tasks.add(task)
        self._enter(running)
        deadline = running.message.deadline
        if deadline is not None:
            before = self._due.next_deadline()
            self._due.add(running, None, deadline)
            if before is None or deadline < before:
                self._calls.group.deadlines.set(self, deadline)

        def ended(_: asyncio.Task[None]) -> None:
            category.running_count -= 1
            peer.waiting_count -= 1
            self.tasks.discard(task)
            if running in self._due:
                self._due.take(running)
            self._leave(running)

        task.add_done_callback(ended)

    def _enter(self, running: RunningRequest) -> None:
        """Have a request cancelled by its caller, and by the end of its peer."""
        message = running.message
        if message.tag is None:
            return  # no caller waits for a command: it runs to its end
        peer = message.peer
        # Of a tag that is used twice at once only the first can be named by its caller.
        peer.running[message if message.tag in peer.running else message.tag] = running

    def _leave(self, running: RunningRequest) -> None:
        message = running.message
        running.hold(-running.held_bytes)
        message.end_items()
        for key in (message.tag, message):
            if key is not None and message.peer.running.get(key) is running:
                del message.peer.running[key]


def _handle(command: RpcCommand, message: RpcMessage) -> list[bytes] | None:
    """Run a plain handler, on a worker thread, and return the parts of the reply; None: there is none."""
    if message.cancelled:
        return None  # while it waited for the thread
    before = SERVED_MESSAGE.set(message)
    try:
        value = command.handler(message)
    finally:
        SERVED_MESSAGE.reset(before)
    if iscoroutine(value):
        value.close()
        raise LocalProtocolError(
            "the handler is a plain function that returned a coroutine, which would never run",
            hint="add a coroutine function, or in middleware wrap it in one",
        )
    return None if value is None or message.tag is None else parts_of(value, message.peer.conn.most_part_bytes)
