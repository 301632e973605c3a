"""One question, asked of one peer after another until one has the answer: sender, receiver and future in one.

Theory of operation. A requester waits for an offer, asks a peer that it has not tried, and waits for the outcome. An
answer that is of no use, a timeout and a disconnect make it wait for the next offer; when all peers were tried it
begins anew with all of them. A timer ends the whole. Its future has the outcome, once, and whatever ends the future (an
answer, the time, its cancellation) takes back what is under way: the place in the queue, the timers, the requests.

With `Hedging`, it does not wait for the outcome before it asks the next.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from flowctl.errors import ClosedError, ConfigError, ExhaustedError, LocalProtocolError
from flowctl.nodes.scheduler.offer import Channel, FailureCode, Offer, PeerId, ResponseType, check_response_type
from flowctl.nodes.scheduler.policies.budget import RetryBudget
from flowctl.nodes.scheduler.requests.hedging import Hedging
from flowctl.nodes.scheduler.scheduler import MessageScheduler

T = TypeVar("T")

TIMEOUT_S: Final = 30.0
"""Timeout of all tries together; rippled's."""
LEAST_TRY_S: Final = 1.0
MOST_TRY_S: Final = 4.0
"""Upper bound of the timeout of one try: the time left, divided among the peers not tried yet; rippled's."""
LOOK_AGAIN_S: Final = 1.0
"""Time between two checks whether a busy, untried peer is still there: a sender does not learn that a peer has left,
and the peers that were tried may stay open, so that it gets no offer either."""


class Requester(Generic[T]):
    """Asks until it has an answer of use.

    Attributes:
        future: the answer. Fails with `ExhaustedError` when time or budget are used up, with `ClosedError` when the
            scheduler is stopped, and with what `accept` or `message` raise. Its cancellation takes everything back.
    """

    def __init__(
        self,
        scheduler: MessageScheduler,
        message: Any,
        accept: Callable[[Any], T | None] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        priority: int = 0,
        response_type: ResponseType = None,
        hedging: Hedging | None = None,
        budget: RetryBudget | None = None,
    ) -> None:
        if not 0 < timeout_s < float("inf"):
            raise ConfigError(f"timeout_s is {timeout_s}, it must be more than 0 and finite")
        check_response_type(response_type)
        self.future: Future[T] = Future()
        self._scheduler = scheduler
        self._message = message
        self._accept = accept
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._priority = priority
        self._response_type = response_type
        self._hedging = hedging
        self._budget = budget if budget is not None or hedging is None else hedging.budget
        self._level = 1 if hedging is None else hedging.at_once  # peers that should be working on it
        self._tries = 0
        self._tried: set[PeerId] = set()  # since all were tried
        self._ever: set[PeerId] = set()
        self._asked: dict[int, float] = {}  # request id: when it was sent
        self._timers: list[int] = []
        self._look: int | None = None  # the timer after which it looks again

    def start(self) -> Future[T]:
        if self._timers:
            raise LocalProtocolError("this requester was started before", hint="make another: it is one question")
        self.future.add_done_callback(self._take_back)
        self._deadline = self._scheduler.now() + self._timeout_s
        self._timers.append(self._scheduler.call_later(self._timeout_s, self._time_up))
        self._wait()
        return self.future

    # --- sender --------------------------------------------------------------------------------------------------

    def on_offer(self, offer: Offer) -> None:
        """Ask peers that were not tried; with none of those open, keep the place or begin anew with all."""
        if self._scheduler.now() >= self._deadline:
            self._time_up()
        missing = 0 if self.future.done() else self._level - len(self._asked)
        if missing <= 0:
            offer.withdraw()
            return
        tried_before = bool(self._tried)
        missing = self._ask(offer, missing)
        if missing and not self._asked and tried_before and not self._scheduler.has_other(self._tried):
            self._tried.clear()
            missing = self._ask(offer, missing)
        if missing and offer.sent_count:
            self._wait()  # for the others
        elif missing and not self._asked:
            self._look_later()

    def on_discard(self) -> None:
        self._fail(ClosedError("the scheduler was stopped"))

    def _ask(self, offer: Offer, wanted: int) -> int:
        now = self._scheduler.now()
        for channel in offer.full():
            if not wanted or self.future.done():
                break
            if channel.peer_id in self._tried:
                continue
            if self._tries and self._budget is not None and not self._budget.take(now):
                if not self._asked:
                    self._fail(ExhaustedError(f"{self._exhausted()}: the retry budget is spent"))
                else:
                    self._level = len(self._asked)
                    offer.withdraw()
                return 0
            wanted -= self._send(channel, now)
        return wanted

    def _send(self, channel: Channel, now: float) -> bool:
        peer_id = channel.peer_id
        try:
            message = self._message() if callable(self._message) else self._message
        except Exception as error:  # noqa: BLE001 - it is the owner of the future who asked for it
            self._fail(error)
            return False
        self._tried.add(peer_id)
        request_id = channel.send(message, self, self._try_s(now), response_type=self._response_type)
        if request_id is None:
            return False
        self._ever.add(peer_id)
        self._asked[request_id] = now
        self._count_try()
        if self.future.done():  # cancelled by another thread meanwhile
            self._scheduler.withdraw(request_id)
        return True

    def _count_try(self) -> None:
        hedging = self._hedging
        if not self._tries and self._budget is not None:
            self._budget.first_try()
        self._tries += 1
        if hedging is None:
            return
        if self._tries == 1:
            hedging.first_count += 1
        else:
            hedging.further_count += 1
        delay_s = hedging.delay_s()
        if delay_s is not None and self._level < hedging.most:
            self._timers.append(self._scheduler.call_later(delay_s, self._hedge))

    def _try_s(self, now: float) -> float:
        left = max(1, self._scheduler.peer_count - len(self._tried) + 1)
        return max(LEAST_TRY_S, min(MOST_TRY_S, (self._deadline - now) / left))

    # --- receiver ------------------------------------------------------------------------------------------------

    def on_success(self, request_id: int, response: Any) -> None:
        sent_at = self._asked.pop(request_id)
        try:
            value = response if self._accept is None else self._accept(response)
        except Exception as error:  # noqa: BLE001 - it is the owner of the future who asked for it
            self._fail(error)
            return
        if value is None:
            self._wait()
            return
        if self._hedging is not None:  # only of what was waited for: errors come sooner, and would hasten hedges
            self._hedging.latencies.observe(self._scheduler.now() - sent_at)
        with suppress(InvalidStateError):  # cancelled meanwhile
            self.future.set_result(value)

    def on_failure(self, request_id: int, code: FailureCode) -> None:
        self._asked.pop(request_id)
        if code is FailureCode.SHUTDOWN:
            self.on_discard()
        else:
            self._wait()

    # --- timers and the end --------------------------------------------------------------------------------------

    def _wait(self) -> None:
        if not self.future.done() and not self._scheduler.schedule(self, self._priority):
            self.on_discard()

    def _look_later(self) -> None:
        if self._look is None and not self.future.done():
            self._look = self._scheduler.call_later(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        if self._asked or self.future.done():
            return
        if self._scheduler.has_other(self._tried):
            self._look_later()
        elif self._scheduler.withdraw(self):
            self._wait()  # as a newcomer it is shown all that is open

    def _hedge(self) -> None:
        if self._hedging is not None and self._asked and self._level < self._hedging.most:
            self._level += 1
            self._wait()

    def _time_up(self) -> None:
        self._fail(ExhaustedError(f"{self._exhausted()} in {self._timeout_s:g} s"))

    def _exhausted(self) -> str:
        return f"exhausted {len(self._ever)} of {max(len(self._ever), self._scheduler.peer_count)} peers"

    def _fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    def _take_back(self, _: Future[T]) -> None:
        scheduler = self._scheduler
        scheduler.withdraw(self)
        for timer in (*self._timers, self._look):
            if timer is not None:
                scheduler.cancel_call(timer)
        for request_id in list(self._asked):
            if scheduler.withdraw(request_id) and self._hedging is not None:
                self._hedging.duplicate_count += 1
