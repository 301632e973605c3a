"""The inbound side: the client of one peer, which carries out what is decided for it.

Theory of operation. Two coroutines share a conversation. One reads: each reply is taken as soon as it is complete, in
the order of the requests, and checked against the request it answers (`_collect`). The other acts, and goes round in
this order: read a decision; collect what has come; request objects; request ids, which acknowledges others; complete
the decision. Requests are pipelined: none waits for the reply to the one before.

Whether a request for ids blocks is decided when it is sent: exactly where nothing stays unacknowledged. A reply with
ids that is still to come could change that; so where the FIFO would be emptied, it is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from flowctl.errors import BrokenError, ClosedError, RemoteProtocolError
from flowctl.nodes.diffusion.decision import PeerDecision
from flowctl.nodes.diffusion.errors import NoReplyError, ObjectInvalidError
from flowctl.nodes.diffusion.gate import RequestEnd, RequestGate
from flowctl.nodes.diffusion.inbox import Inbox, PeerStream
from flowctl.nodes.diffusion.objects import ObjectId
from flowctl.nodes.diffusion.registry import PeerStateAPI, Registry
from flowctl.nodes.diffusion.wire.codec import MAX_ITEMS, encode, reply_bytes
from flowctl.nodes.diffusion.wire.protocol import (
    SIZE_LIMIT_BYTES,
    TIME_LIMIT_S,
    Done,
    Init,
    Message,
    ReplyIds,
    ReplyObjects,
    RequestIds,
    RequestObjects,
    State,
    Subscribe,
    Tell,
    after,
)

_REPLY_BYTES: Final = 256 * 1024
"""Size that a reply of several objects should have. A reply is of use only as a whole and has 10 s, so this is far
below the largest one, which would take 20 s on a link of 1 Mbit/s."""
_ID_OVERHEAD_BYTES: Final = 9
"""Octets of the three heads of an announcement: of an id of up to 64 KiB, of its size, and of both."""
_SLACK_BYTES: Final = 64 * 1024
"""Octets by which a reply may exceed what was asked for and announced, so that an honest mistake gets its own error. A
peer that announces little and sends much cannot make us keep more than that."""
_MOST_INPUT_BYTES: Final = 2 * SIZE_LIMIT_BYTES[State.OBJECTS]
"""Octets of input kept at most: one reply, which is taken when it is complete; more was not asked for."""


@dataclass(frozen=True, slots=True)
class _SentRequest:
    state: State  # in which the reply comes
    most_bytes: int  # of the reply
    req_count: int = 0
    object_ids: tuple[ObjectId, ...] = ()
    ended: Callable[[RequestEnd], object] | None = None  # of its gate


class Inbound:
    def __init__(
        self,
        stream: PeerStream,
        api: PeerStateAPI,
        registry: Registry,
        gate: RequestGate,
        begins: Callable[[], list[Message]] | None = None,
    ) -> None:
        self._begins = begins
        self._begun = False
        self._writing = asyncio.Lock()
        self._stream = stream
        self._api = api
        api.on_fault = self.fail
        self._registry = registry
        self._gate = gate
        self._inbox = Inbox(stream, _MOST_INPUT_BYTES, self._input)
        self._sent: deque[_SentRequest] = deque()  # waiting for their replies, in order
        self._output: list[bytes] = []  # requests that were entered and not written yet
        self._replied = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None  # of the first of `_sent`, which is:
        self._timed: _SentRequest | None = None
        self._main: asyncio.Task[None] | None = None
        self._error: Exception | None = None  # why the peer is being ended
        self._finished = False  # the peer has ended where it may
        self._leaving = False

    async def run(self) -> None:
        self._main = asyncio.current_task()
        reading = asyncio.get_running_loop().create_task(self._inbox.run())
        try:
            await self._act()
        except asyncio.CancelledError:
            if self._main is not None and self._main.uncancel() > 0:
                raise  # cancelled from outside as well
            if self._error is not None:
                raise self._error from None
            if not self._finished:
                raise
        finally:
            self._main = None
            reading.cancel()
            if self._timer is not None:
                self._timer.cancel()
            for sent in self._sent:
                if sent.ended is not None:
                    sent.ended(RequestEnd.LOST)
            self._sent.clear()
            self._stream.close("" if self._error is None else str(self._error))

    async def subscribe(self, topic: str, *, wanted: bool) -> None:
        """Have the peer tell of a topic from now on, or no more; one that is lost meanwhile tells nothing."""
        if self._begun and self._error is None:
            with contextlib.suppress(BrokenError, ClosedError):
                await self._write(Subscribe(wanted=wanted, topic=topic.encode()))

    async def tell(self, *words: bytes) -> None:
        """Tell the peer of this node; see `subscribe`."""
        if self._begun and self._error is None and not self._leaving:
            with contextlib.suppress(BrokenError, ClosedError):
                await self._write(*map(Tell, words))

    def leave(self) -> None:
        """Finish: no new decision is read, replies that are under way are waited for and ignored, then comes Done.

        Where the peer waits until it has something new, nothing is under way: the stream is ended at once.
        """
        self._leaving = True
        self._api.leave()
        self._replied.set()

    def fail(self, error: Exception) -> None:
        if self._error is None and not self._finished:
            self._error = error
            self._interrupt()

    def _interrupt(self) -> None:
        if self._main is not None:
            self._main.cancel()

    # -- acting

    async def _act(self) -> None:
        self._begun = True  # what is subscribed to from now on goes out behind it
        await self._write(*([Init()] if self._begins is None else self._begins()))
        while (decision := await self._api.read_decision()) is not None:
            self._collect()
            self._request_objects(decision)
            await self._request_ids(decision)
            await self._flush()
            self._api.on_decision_completed()
        await self._drain()

    async def _write(self, *messages: Message) -> None:
        async with self._writing:
            await self._stream.write(b"".join(map(encode, messages)))

    async def _flush(self) -> None:
        if self._output:
            async with self._writing:
                output, self._output = self._output, []
                await self._stream.write(b"".join(output))

    def _request_objects(self, decision: PeerDecision) -> None:
        for object_ids, size_bytes in self._batches(decision.objects_to_req_ids):
            send = partial(self._send_objects, object_ids)
            self._api.held = True  # a gate that opens while it is asked releases it
            ended = self._gate.begin(self._api.peer, object_ids, size_bytes, send)
            if ended is None:
                return
            self._api.held = False
            most_bytes = reply_bytes(len(object_ids), size_bytes) + _SLACK_BYTES
            self._sent.append(_SentRequest(State.OBJECTS, most_bytes, object_ids=object_ids, ended=ended))
            self._arm()

    def _send_objects(self, object_ids: tuple[ObjectId, ...]) -> None:
        self._api.on_request_objects(object_ids)
        self._output.append(encode(RequestObjects(object_ids)))

    def _batches(self, wanted: frozenset[ObjectId]) -> Iterator[tuple[tuple[ObjectId, ...], int]]:
        policy, state, has_object = self._registry.state.policy, self._api.state, self._registry.pool.has_object
        batch: list[ObjectId] = []
        size_bytes = request_bytes = 0
        for object_id in state.fifo if wanted else ():
            if object_id not in wanted or has_object(object_id):  # it may have come since it was decided on
                continue
            room = policy.room_for(state.available[object_id])
            own = len(object_id) + _ID_OVERHEAD_BYTES
            if batch and (
                len(batch) == MAX_ITEMS
                or size_bytes + room > _REPLY_BYTES
                or request_bytes + own > SIZE_LIMIT_BYTES[State.IDLE] - 4
            ):
                yield tuple(batch), size_bytes
                batch, size_bytes, request_bytes = [], 0, 0
            batch.append(object_id)
            size_bytes += room
            request_bytes += own
        if batch:
            yield tuple(batch), size_bytes

    async def _request_ids(self, decision: PeerDecision) -> None:
        req, ack = min(decision.ids_to_req, MAX_ITEMS), decision.ids_to_ack
        if not req:
            return
        fifo = self._api.state.fifo
        while ack == len(fifo) and self._api.state.ids_in_flight:
            await self._flush()
            self._replied.clear()
            await self._replied.wait()
            if self._leaving:
                return
        blocking = ack == len(fifo)
        self._api.on_request_ids(ack, req, blocking=blocking)
        self._output.append(encode(RequestIds(blocking, ack, req)))
        most_bytes = req * (self._registry.state.policy.max_object_id_bytes + _ID_OVERHEAD_BYTES) + _SLACK_BYTES
        self._sent.append(
            _SentRequest(State.IDS_BLOCKING if blocking else State.IDS_NONBLOCKING, most_bytes, req_count=req)
        )
        self._arm()

    async def _drain(self) -> None:
        while self._sent and self._sent[0].state is not State.IDS_BLOCKING:
            self._replied.clear()
            await self._replied.wait()
        if not self._sent:
            await self._write(Done())

    # -- replies

    def _input(self) -> None:
        if self._error is not None or self._finished:
            return
        try:
            self._collect()
        except Exception as error:  # noqa: BLE001 - the peer's fault, or a pool's that cannot tell an id: it ends the peer
            self.fail(error)
            return
        inbox = self._inbox
        if inbox.failure is not None:
            self.fail(inbox.failure)
        elif inbox.ended:
            waits_for = self._sent[0].state if self._sent else State.IDLE
            open_ids = 0 if self._leaving else len(self._api.state.fifo)
            if waits_for in {State.IDLE, State.IDS_BLOCKING} and not (open_ids or inbox.decoder.buffered_bytes):
                self._finished = True
                self._interrupt()
            else:
                self.fail(BrokenError(f"the peer ended its stream in state {waits_for.value}, {open_ids} ids are open"))

    def _collect(self) -> None:
        decoder = self._inbox.decoder
        while decoder.buffered_bytes and self._error is None:
            if not self._sent:
                raise RemoteProtocolError(
                    f"{decoder.buffered_bytes} bytes came in state {State.IDLE.value}, where the peer may not send",
                    code="UnexpectedMessage",
                )
            message = decoder.next(self._sent[0].state, self._sent[0].most_bytes)
            if message is None:
                return
            sent = self._sent.popleft()
            self._take(sent, message)
            self._arm()
            self._replied.set()

    def _take(self, sent: _SentRequest, message: Message) -> None:
        end = RequestEnd.LOST
        try:
            after(sent.state, message)
            if not isinstance(message, (ReplyIds, ReplyObjects)):
                raise RemoteProtocolError("a request came from the side that replies", code="UnexpectedMessage")
            if not self._leaving:
                self._use(sent, message)
            end = RequestEnd.REPLIED
        finally:
            if sent.ended is not None:
                sent.ended(end)
                self._registry.release(self._api.peer)

    def _use(self, sent: _SentRequest, message: Message) -> None:
        if isinstance(message, ReplyIds):
            self._api.on_receive_ids(sent.req_count, message.announced)
        elif isinstance(message, ReplyObjects):
            identify = self._registry.pool.object_id
            try:
                objects = [(identify(data), data) for data in message.objects]
            except ValueError as error:
                raise ObjectInvalidError(error) from error
            self._api.on_receive_objects(sent.object_ids, objects)

    def _arm(self) -> None:
        """Let the time of the first request that waits for its reply run: from when it became the first."""
        first = self._sent[0] if self._sent else None
        if first is self._timed:
            return
        self._timed = first
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        limit_s = None if first is None else TIME_LIMIT_S[first.state]
        if first is not None and limit_s is not None:
            self._timer = asyncio.get_running_loop().call_later(limit_s, self._too_late, first.state, limit_s)

    def _too_late(self, state: State, limit_s: float) -> None:
        self.fail(NoReplyError(f"no reply within {limit_s:g} s in state {state.value}"))
