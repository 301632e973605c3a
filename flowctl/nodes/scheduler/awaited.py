"""The scheduler for coroutines: a request that is awaited, and channels that are iterated over.

Theory of operation. What waits is a sender like any other. Its callbacks run where the scheduler's turn is, on any
thread; they hand over to the loop of the coroutine. A coroutine that is cancelled takes back what it waits for. A
channel that is handed to a coroutine is held, closed without a message, until the coroutine has sent on it, passed it
over, or asked for the next.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from flowctl.core.text.printable import short
from flowctl.errors import BrokenError, ClosedError
from flowctl.nodes.scheduler.core import SentMessage
from flowctl.nodes.scheduler.offer import (
    Channel,
    FailureCode,
    Offer,
    PeerId,
    ResponseReceiver,
    ResponseType,
    WaitingSender,
    check_response_type,
    check_timeout,
)

HOLD_S: Final = 60.0
"""Time for which a coroutine may keep a channel unused: longer than anything it should do in between."""


@dataclass(frozen=True, slots=True)
class SchedulerServices:
    """The scheduler's methods that coroutines use; the last three act on channels kept beyond an offer."""

    schedule: Callable[..., bool]
    withdraw: Callable[[WaitingSender | int], bool]
    call_later: Callable[[float, Callable[[], None]], int]
    cancel_call: Callable[[int], bool]
    now: Callable[[], float]
    hold: Callable[[Offer, Channel, float], SentMessage | None]
    use: Callable[[SentMessage, Any, ResponseReceiver | None, float, ResponseType], int | None]
    free: Callable[[SentMessage], None]


class _OutcomeFuture:
    """A future that may be set from any thread, once; what comes later, or to a closed loop, is dropped."""

    __slots__ = ("_loop", "_thread", "future")

    def __init__(self) -> None:
        self._loop: Final = asyncio.get_running_loop()
        self._thread: Final = threading.get_ident()
        self.future: Final[asyncio.Future[Any]] = self._loop.create_future()

    @property
    def lost(self) -> bool:
        """Whether its loop is closed, so that it cannot be awaited any more."""
        return self._loop.is_closed()

    def set(self, value: Any) -> None:
        self._post(self._set, value)

    def fail(self, error: Exception) -> None:
        self._post(self._fail, error)

    def _post(self, call: Callable[[Any], None], value: Any) -> None:
        if self.lost:
            return
        if threading.get_ident() == self._thread:
            call(value)
        else:
            with suppress(RuntimeError):  # the loop is closed: no coroutine awaits it any more
                self._loop.call_soon_threadsafe(call, value)

    def _set(self, value: Any) -> None:
        if not self.future.done():
            self.future.set_result(value)

    def _fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _AwaitedAnswer:
    """The receiver of a request that a coroutine awaits."""

    __slots__ = ("outcome", "peer_id", "request_id")

    def __init__(self, outcome: _OutcomeFuture) -> None:
        self.outcome: Final = outcome
        self.request_id: int | None = None
        self.peer_id: PeerId = None

    def on_success(self, request_id: int, response: Any) -> None:
        self.outcome.set(response)

    def on_failure(self, request_id: int, code: FailureCode) -> None:
        what = f"request {request_id} to peer {short(self.peer_id)}"
        if code is FailureCode.TIMEOUT:
            self.outcome.fail(TimeoutError(f"{what} had no response in time"))
        elif code is FailureCode.DISCONNECT:
            self.outcome.fail(BrokenError(f"{what} ended, because the peer has disconnected"))
        else:
            self.outcome.fail(_stopped())


def _stopped() -> ClosedError:
    return ClosedError("the scheduler was stopped")


class AwaitedRequest(_AwaitedAnswer):
    """One message, sent on the first channel that suits, and its response; see `MessageScheduler.request`."""

    __slots__ = ("_deadline", "_desk", "_exclude", "_message", "_over", "_prefer", "_response_type")

    def __init__(
        self,
        desk: SchedulerServices,
        message: Any,
        prefer: Iterable[PeerId],
        exclude: Collection[PeerId],
        response_type: ResponseType,
    ) -> None:
        super().__init__(_OutcomeFuture())
        self._desk: Final = desk
        self._message: Final = message
        self._prefer: Final = tuple(prefer)
        self._exclude: Final = frozenset(exclude)
        self._response_type: Final = response_type
        self._deadline = 0.0
        self._over = False  # the coroutine does not wait any more

    async def run(self, timeout_s: float, priority: int) -> Any:
        check_timeout(timeout_s)
        check_response_type(self._response_type)
        self._deadline = self._desk.now() + timeout_s
        if not self._desk.schedule(self, priority):
            raise _stopped()
        call = None
        if self.request_id is None and not self.outcome.future.done():
            call = self._desk.call_later(timeout_s, self._expired)
        try:
            return await self.outcome.future
        finally:
            self._over = True
            if call is not None:
                self._desk.cancel_call(call)
            if not self._desk.withdraw(self) and self.request_id is not None:
                self._desk.withdraw(self.request_id)

    def on_offer(self, offer: Offer) -> None:
        """Send on the first channel that suits: of the peers that are preferred, else of any not excluded."""
        left_s = self._deadline - self._desk.now()
        if self._over or left_s <= 0 or self.outcome.lost:
            offer.withdraw()
            self._expired()
            return
        for channel in self._suiting(offer):
            self.peer_id = channel.peer_id
            self.request_id = offer.send(channel, self._message, self, left_s, response_type=self._response_type)
            if self.request_id is not None:
                self._withdraw_if_over(self.request_id)
                return

    def _withdraw_if_over(self, request_id: int) -> None:
        if self._over:  # it gave up while this ran on another thread
            self._desk.withdraw(request_id)

    def _suiting(self, offer: Offer) -> Iterator[Channel]:
        for peer_id in self._prefer:
            channel = None if peer_id in self._exclude else offer.channel(peer_id)
            if channel is not None:
                yield channel
        for channel in offer:
            if channel.peer_id not in self._exclude:
                yield channel

    def on_discard(self) -> None:
        self.outcome.fail(_stopped())

    def _expired(self) -> None:
        if self.request_id is None:
            self.outcome.fail(TimeoutError("no channel that suits was open in time"))


class HeldChannel:
    """A channel that a coroutine may use once, before it asks for the next."""

    __slots__ = ("_desk", "_held", "peer_id")

    def __init__(self, desk: SchedulerServices, held: SentMessage) -> None:
        self._desk: Final = desk
        self._held: SentMessage | None = held
        #: Which peer it leads to.
        self.peer_id: Final[PeerId] = held.peer.peer_id

    async def request(
        self,
        message: Any,
        timeout: float,  # noqa: ASYNC109  (a deadline of the request, for which its channel stays closed)
        *,
        response_type: ResponseType = None,
    ) -> Any:
        answer = _AwaitedAnswer(_OutcomeFuture())
        answer.peer_id = self.peer_id
        answer.request_id = self._send(message, answer, timeout, response_type)
        try:
            return await answer.outcome.future
        finally:
            self._desk.withdraw(answer.request_id)

    def notify(self, message: Any, timeout: float) -> None:
        """Send a notification, which keeps the channel closed for `timeout` seconds."""
        self._send(message, None, timeout, None)

    def _send(
        self, message: Any, receiver: ResponseReceiver | None, timeout: float, response_type: ResponseType
    ) -> int:
        check_timeout(timeout)
        held, self._held = self._held, None
        key = None if held is None else self._desk.use(held, message, receiver, timeout, response_type)
        if key is None:
            raise BrokenError(
                "nothing was sent: the channel was used, or kept for too long, or its peer has gone",
                hint="ask for the next channel",
            )
        return key

    def skip(self) -> bool:
        """Open it again, for others, unless it was used. Returns whether it was unused until now."""
        held, self._held = self._held, None
        if held is not None:
            self._desk.free(held)
        return held is not None


class ChannelWait:
    """Waits for one channel after the other; see `MessageScheduler.offers`."""

    __slots__ = ("_desk", "_outcome", "_over", "_passed")

    def __init__(self, desk: SchedulerServices) -> None:
        self._desk: Final = desk
        self._passed: Final[set[PeerId]] = set()  # peers with open channels that did not suit
        self._outcome = _OutcomeFuture()
        self._over = False

    async def run(self, size: int | None, priority: int) -> AsyncGenerator[HeldChannel, None]:
        count = 0
        while size is None or count < size:
            channel = await self._next(priority)
            if channel is None:
                return
            try:
                yield channel
            finally:
                if channel.skip():
                    self._passed.add(channel.peer_id)
            count += 1

    async def _next(self, priority: int) -> HeldChannel | None:
        self._outcome = outcome = _OutcomeFuture()
        self._over = False
        if not self._desk.schedule(self, priority):
            return None
        try:
            held: SentMessage | None = await asyncio.shield(outcome.future)
        except asyncio.CancelledError:
            self._over = True
            self._desk.withdraw(self)
            outcome.future.add_done_callback(self._give_back)
            raise
        return None if held is None else HeldChannel(self._desk, held)

    def _give_back(self, future: asyncio.Future[SentMessage | None]) -> None:
        held = future.result()
        if held is not None:
            self._desk.free(held)

    def on_offer(self, offer: Offer) -> None:
        if self._over or self._outcome.lost:
            offer.withdraw()
            return
        self._passed.difference_update(peer.peer_id for peer in offer.fresh or ())
        for channel in offer:
            if channel.peer_id not in self._passed:
                held = self._desk.hold(offer, channel, HOLD_S)
                if held is not None:
                    self._outcome.set(held)
                    return

    def on_discard(self) -> None:
        self._outcome.set(None)
