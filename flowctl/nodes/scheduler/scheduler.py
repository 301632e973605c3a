"""The scheduler: a message broker that decides who may ask which peer now.

Theory of operation. The state and its rules are a `SchedulerCore`, guarded by one lock that is never held while a
callback runs. A call changes the state at once (a response claims its request, a disconnected peer has gone), and
enters what is to be told, and which walk is to be made, in a list of jobs. The first thread that finds no other at it
carries the jobs out, callbacks included, until the list is empty: it has the *turn*. Calls from other threads, and from
callbacks, only enter theirs. So no two callbacks of one scheduler run at the same time, none within another, and any
method may be called from any of them.

A peer's, sender's or receiver's own ``__del__`` may call the scheduler too, and the garbage collector runs it wherever
it likes: also on the thread that has the lock just then. Such a call is put off: entered as a job that is a call.

A job that opens channels is followed by a walk over the queue, which sees the peer that has become free, and that by
one over the senders that were scheduled meanwhile, which see all that is open.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from random import Random, SystemRandom
from typing import Any, Final

from flowctl.core.loop.faults import ErrorHook, as_exception, report
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.outcomes.pending import Outcome
from flowctl.core.text.printable import short
from flowctl.errors import ClosedError, ConfigError
from flowctl.nodes.scheduler.awaited import AwaitedRequest, ChannelWait, HeldChannel, SchedulerServices
from flowctl.nodes.scheduler.core import Call, Job, PolicyFault, ResponseFault, SchedulerCore, SentMessage, Step
from flowctl.nodes.scheduler.offer import (
    MAX_TIMEOUT_S,
    Channel,
    ConnectedPeer,
    Offer,
    OfferActions,
    PeerId,
    QueuedSender,
    ResponseReceiver,
    ResponseType,
    WaitingSender,
    check_response_type,
    check_timeout,
)
from flowctl.nodes.scheduler.policy import PeerChannels, SchedulerPolicy
from flowctl.pollgroup import PollGroup

_log: Final = logging.getLogger("flowctl.scheduler")

WARNINGS_PER_PERIOD: Final = 10
WARNING_PERIOD_S: Final = 10.0
"""Least time between two warnings that peers cause; the others are only counted in `statistics`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatistics:
    """A scheduler at one moment, and what has happened since its start."""

    peers: int  #: connected
    open_channels: int  #: open channels of all peers
    closed_channels: int  #: closed channels of all peers
    waiting_senders: int
    outstanding: int  #: messages whose channel is closed
    scheduled: int  #: senders taken up
    offers: int  #: made
    declined: int  #: offers of which nothing was used
    discarded: int  #: senders told that the scheduler has stopped
    withdrawn_senders: int
    requests: int  #: sent
    notifications: int  #: sent
    refused: int  #: sends that came to nothing
    responses: int  #: that ended their request
    timeouts: int
    disconnects: int
    shutdowns: int
    withdrawn_requests: int
    late: int  #: responses to withdrawn requests
    without_id: int  #: responses without request id
    unknown: int  #: responses to no request of ours, or to one that has ended
    foreign: int  #: responses of peers that were not asked
    wrong_type: int  #: responses of a type that was not asked for
    ejections: int
    errors: int  #: exceptions of callbacks, contained


class _Driver:
    """Calls a scheduler when it is time: one timer on the loop of a poll group, or on any loop of asyncio."""

    __slots__ = ("_clock", "_disarmed", "_due", "_handle", "_runner")

    def __init__(
        self, runner: PollGroup | asyncio.AbstractEventLoop, clock: Callable[[], float], due: Callable[[], None]
    ) -> None:
        if not (isinstance(runner, PollGroup) or hasattr(runner, "call_soon_threadsafe")):
            raise ConfigError(
                f"a {type(runner).__name__} cannot drive a scheduler",
                hint="give a PollGroup that was started, or a loop of asyncio",
            )
        self._runner: Final = runner
        self._clock: Final = clock
        self._due: Final = due
        self._disarmed = False
        self._handle: asyncio.TimerHandle | None = None  # only on the loop's thread

    @property
    def ended(self) -> bool:
        runner = self._runner
        return (runner.loop if isinstance(runner, PollGroup) else runner).is_closed()

    def arm(self, when: float) -> None:
        """Have `due` called at `when`, seconds on the clock, instead of at the time asked for before; any thread."""
        self._post(self._set, when)

    def disarm(self) -> None:
        self._disarmed = True
        self._post(self._cancel)

    def _post(self, callback: Callable[..., object], *args: Any) -> None:
        if isinstance(self._runner, PollGroup):
            self._runner.call_soon(callback, *args)
        else:
            self._runner.call_soon_threadsafe(callback, *args)

    def _cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _set(self, when: float) -> None:
        self._cancel()
        if not self._disarmed:
            # Rounded up to the resolution of loops, or it would come too early and be set again.
            delay_s = math.ceil(max(0.0, when - self._clock()) * 1000) / 1000
            self._handle = self._runner.call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._handle = None
        if not self._disarmed:
            self._due()


class MessageScheduler:
    """Offers the channels of peers to senders that wait for them, and tells receivers how their requests end.

    All methods may be called from any thread and from any callback. Callbacks run one at a time, with no lock held, on
    the thread of the call that caused them or of one that came just before it. They should be short: others wait for
    them. What they raise is reported and contained.

    Args:
        clock: monotonic seconds.
        rng: gives the first request id and whatever is left to chance. None: seeded by the system.
        policy: None: first come, first served, in the order of peers' ids.
        on_error: told of every exception of a callback. None: they are logged.
    """

    __slots__ = (
        "__weakref__",
        "_call_keys",
        "_clock",
        "_core",
        "_driver",
        "_error_count",
        "_jobs",
        "_lock",
        "_on_error",
        "_timed",
        "_turning",
        "_useful",
        "_wake_at",
        "_warned_at",
        "_warning_count",
    )

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
        policy: SchedulerPolicy | None = None,
        *,
        on_error: ErrorHook | None = None,
    ) -> None:
        self._clock: Final = clock
        self._on_error: Final = _log_error if on_error is None else on_error
        self._lock: Final = OwnedLock()  # a leaf: policies are asked under it, nothing else is called
        policy = SchedulerPolicy() if policy is None else policy
        self._useful: Final = policy.useful
        hands = OfferActions(self._post, self._pull, self._choose, self._leave)
        self._core: Final = SchedulerCore(  # guarded by _lock
            policy, SystemRandom() if rng is None else rng, hands
        )
        self._jobs: Final[deque[Job]] = self._core.jobs  # appended to anywhere; taken from under the lock
        self._timed: Final = self._core.learns  # whether it matters when a response came
        self._call_keys: Final = count(1)
        self._turning = False  # a thread carries out jobs  # guarded by _lock
        self._driver: _Driver | None = None  # guarded by _lock
        self._wake_at = inf  # what the driver was last asked for  # guarded by _lock
        self._error_count = 0  # guarded by _lock
        self._warned_at = -inf  # when the present period of warnings began  # guarded by _lock
        self._warning_count = 0  # in that period  # guarded by _lock

    @property
    def _desk(self) -> SchedulerServices:
        return SchedulerServices(
            self.schedule,
            self.withdraw,
            self.call_later,
            self.cancel_call,
            self._clock,
            self._hold,
            self._use,
            self._free,
        )

    # --- peers ---------------------------------------------------------------------------------------------------

    def connect(self, peer: ConnectedPeer, channels: int = 1) -> bool:
        """Add `peer`, and offer its channels.

        Args:
            peer: held weakly.
            channels: how many messages it may have at a time. Less than 1: it is not added.

        Returns:
            Whether it was added. A peer of the same id is left as it is: disconnect it first, unless its object is no
            more, and so it was.

        Raises:
            LocalProtocolError: weak references to `peer` cannot be made, or its id has no order among the others.
        """
        if channels < 1:
            return False
        if self._lock.owned():
            return self._put_off(self.connect, peer, channels)
        peer_id = peer.peer_id  # code of the peer, which the lock is not held for
        now = self._clock()
        with self._lock:
            stopped = self._core.stopped
            added = not stopped and self._core.connect(peer, peer_id, channels, now)
            step = self._take_turn_locked()
        if not added and not stopped:
            self._warn("peer %s is connected already", peer_id)
        self._run(step)
        return added

    def disconnect(self, peer_id: PeerId) -> bool:
        """Remove a peer: its requests fail with DISCONNECT, and it is offered no more.

        Returns:
            Whether it was there.
        """
        if self._lock.owned():
            return self._put_off(self.disconnect, peer_id)
        now = self._clock()
        with self._lock:
            was_connected = self._core.disconnect(peer_id, now)
            step = self._take_turn_locked()
        if not was_connected:
            self._warn("peer %s, which is to be disconnected, is not connected", peer_id)
        self._run(step)
        return was_connected

    # --- senders and responses -----------------------------------------------------------------------------------

    def schedule(self, sender: WaitingSender, priority: int = 0, *, peers: Collection[PeerId] | None = None) -> bool:
        """Let `sender` wait for an offer, which may come from within this call.

        A sender waits once: scheduled again while it waits, it keeps its place.

        Args:
            sender: kept until it has sent, is withdrawn or discarded.
            priority: how urgent it is, higher is more, within `MAX_PRIORITY` either way. Each level lets it pass a
                number of senders that came before it (`PLACES_PER_PRIORITY`), so that nobody waits for ever.
            peers: ids of the only peers that it wants: it is asked about no others, which costs nothing however many
                such senders wait. None: any.

        Returns:
            False: the scheduler was stopped; `sender` is not called.

        Raises:
            ConfigError: `priority` is not in its range, or `sender` has not the methods of one.
        """
        if self._lock.owned():
            return self._put_off(self.schedule, sender, priority, peers=peers)
        with self._lock:
            if not self._core.enter(sender, priority, peers):
                return False
            if self._turning:
                return True
            step = self._core.next_step()
            self._turning = step is not None
        self._run(step)
        return True

    def receive(self, peer: ConnectedPeer, response: Any, request_id: int | None = None) -> bool:
        """Take a response that `peer` has sent.

        Args:
            peer: the one that it came from: the same object that was connected.
            response: handed to the receiver.
            request_id: which request it answers. None: its attribute ``request_id``.

        Returns:
            Whether it ends a request. If not it is dropped and counted.
        """
        if self._lock.owned():
            return self._put_off(self.receive, peer, response, request_id)
        if request_id is None:
            request_id = getattr(response, "request_id", None)
        outcome = Outcome.RESPONSE if self._useful is None or self._is_useful(response) else Outcome.REJECTED
        now = self._clock() if self._timed else 0.0
        with self._lock:
            request = self._core.claim_answered(peer, request_id, response, outcome, now)
            step = self._take_turn_locked()
        if isinstance(request, ResponseFault):
            self._warn(f"response of peer %s {request.value} (id %s)", peer.peer_id, request_id)
        self._run(step)
        return not isinstance(request, ResponseFault) and request.receiver is not None

    def withdraw(self, what: WaitingSender | int) -> bool:
        """Take back a sender, or a request by its id: it is not called any more.

        The channel of a request stays closed until its response or its timeout, because its peer is still busy.

        Returns:
            True: no callback of it begins from now on. False: it does not wait (any more).
        """
        if self._lock.owned():
            return not self._put_off(self.withdraw, what)
        with self._lock:
            core = self._core
            was_waiting = core.withdraw_request(what) if isinstance(what, int) else core.withdraw_sender(what)
        self._catch_up()
        return was_waiting

    def stop(self) -> None:
        """End everything: requests fail with SHUTDOWN, then waiting senders are discarded; idempotent."""
        if self._lock.owned():
            self._put_off(self.stop)
            return
        with self._lock:
            if self._core.stopped:
                return
            self._core.stop()
            driver, self._driver = self._driver, None
            step = self._take_turn_locked()
        if driver is not None:
            _disarm(driver)
        self._run(step)

    def statistics(self) -> SchedulerStatistics:
        """Return a snapshot; O(1)."""
        with self._lock:
            core = self._core
            counters = core.counters
            snapshot = SchedulerStatistics(
                peers=len(core.peers),
                open_channels=core.open_count,
                closed_channels=core.closed_count,
                waiting_senders=len(core.waiting),
                outstanding=len(core.table),
                errors=self._error_count,
                **{name: getattr(counters, name) for name in counters.__slots__},
            )
        self._catch_up()
        return snapshot

    def peers(self) -> list[PeerChannels]:
        """Return the connected peers, as policies see them: for looking at; O(n)."""
        with self._lock:
            peers = list(self._core.peers.values())
        self._catch_up()
        return peers

    @property
    def peer_count(self) -> int:
        """How many peers are connected."""
        with self._lock:
            return len(self._core.peers)

    def has_other(self, tried: Collection[PeerId]) -> bool:
        """Return whether a peer is connected, lives, and is not left out by ejection, that is not in `tried`.

        Args:
            tried: such that ``in`` is quick; O(its length and the number of peers that are ejected or no more).
        """
        with self._lock:
            has_other = self._core.has_other(tried)
        self._catch_up()
        return has_other

    # --- time ----------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the time of the scheduler's clock, in seconds."""
        return self._clock()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> int:
        """Call `callback` once, as other callbacks are called: one at a time, with no lock held.

        Args:
            delay_s: seconds from now, 0 or more.
            callback: not called any more after `stop`.

        Returns:
            Its key, for `cancel_call`.
        """
        when = self._clock() + delay_s
        key = next(self._call_keys)
        if self._lock.owned():
            self._put_off(self._enter_call, key, callback, when)
        else:
            self._enter_call(key, callback, when)
        return key

    def _enter_call(self, key: int, callback: Call, when: float) -> None:
        with self._lock:
            self._core.add_call(key, callback, when)
            early = when < self._wake_at and self._driver is not None
        if early:
            self._rearm()
        self._catch_up()

    def cancel_call(self, key: int) -> bool:
        """Forget a call. Returns whether it was still to come; one whose time has come may be under way."""
        if self._lock.owned():
            return not self._put_off(self.cancel_call, key)
        with self._lock:
            was_waiting = key in self._core.calls and self._core.calls.take(key) is not None
        self._catch_up()
        return was_waiting

    def expire(self, now: float | None = None) -> None:
        """End what has come to its time: requests fail with TIMEOUT, channels open again.

        Args:
            now: seconds on the scheduler's clock. None: the clock is read.
        """
        if self._lock.owned():
            self._put_off(self.expire, now)
            return
        if now is None:
            now = self._clock()
        with self._lock:
            self._core.expire(now)
            step = self._take_turn_locked()
        self._run(step)
        self._rearm()

    def next_deadline(self) -> float | None:
        """Return when `expire` next has something to do, in seconds on the clock. None: at no time that is known."""
        if self._lock.owned():
            return 0.0  # asked in the middle of a change: at once is never too late
        with self._lock:
            when = self._core.next_deadline()
        self._catch_up()
        return when

    def run_on(self, runner: PollGroup | asyncio.AbstractEventLoop) -> None:
        """Have `expire` called when it is time, on the thread of `runner`, instead of where it was before.

        Without it `expire` is for the caller to call; `request` and `offers` use the loop of their coroutine where
        there is nothing else.

        Args:
            runner: a poll group that was started, or a loop of asyncio.

        Raises:
            ConfigError: `runner` is neither.
        """
        if self._lock.owned():
            self._put_off(self.run_on, runner)
            return
        driver = _Driver(runner, self._clock, self._fired)
        with self._lock:
            if self._core.stopped:
                return
            former, self._driver = self._driver, driver
            self._core.bounded = True
            self._wake_at = inf
        if former is not None:
            _disarm(former)
        self._rearm()

    def _run_here(self) -> None:
        """See to it that time is driven, by the running loop where nothing else does."""
        with self._lock:
            driver = self._driver
        if driver is None or driver.ended:
            self.run_on(asyncio.get_running_loop())

    def _fired(self) -> None:
        with self._lock:
            self._wake_at = inf
        self.expire()

    def _rearm(self) -> None:
        with self._lock:
            driver = self._driver
            when = None if driver is None else self._core.next_deadline()
            early = driver is not None and when is not None and when < self._wake_at
            if when is not None and early:
                self._wake_at = when
        if self._jobs:
            self._catch_up()
        if driver is None or when is None or not early:
            return
        try:
            driver.arm(when)
        except (ClosedError, RuntimeError):  # its loop has ended: time stands still until there is another
            with self._lock:
                if self._driver is driver:
                    self._driver = None
                    self._core.bounded = False

    # --- for coroutines ------------------------------------------------------------------------------------------

    async def request(
        self,
        message: Any,
        *,
        timeout: float,  # noqa: ASYNC109  (a deadline of the request, which the peer's channel keeps too)
        prefer: Iterable[PeerId] = (),
        exclude: Collection[PeerId] = (),
        priority: int = 0,
        response_type: ResponseType = None,
    ) -> Any:
        """Send `message` on the first channel that suits, and return the response.

        Cancelled, it leaves the queue, or withdraws the request.

        Args:
            message: handed to the peer's ``send``.
            timeout: seconds, more than 0, for all of it: the wait for a channel and that for the response.
            prefer: ids of peers that are tried first, in this order; others are, where none of these has an open
                channel.
            exclude: ids of peers that it is not sent to.
            priority: see `schedule`.
            response_type: what the response must be an instance of.

        Raises:
            TimeoutError: no channel, or no response, in time.
            BrokenError: the peer that was asked has disconnected.
            ClosedError: the scheduler was stopped.
            ConfigError: `timeout`, `priority` or `response_type` is not what it may be.
        """
        self._run_here()
        return await AwaitedRequest(self._desk, message, prefer, exclude, response_type).run(timeout, priority)

    def offers(self, *, size: int | None = None, priority: int = 0) -> AsyncGenerator[HeldChannel, None]:
        """Iterate over open channels, as they come: ``async for channel in scheduler.offers(size=3)``.

        Each is held for the body of the loop, which may use it once; unused it goes to others, and its peer comes
        again when it has become free anew. Each is a demand of its own in the queue. The iteration ends after `size`
        channels, or when the scheduler is stopped.

        Args:
            size: how many channels. None: no end.
            priority: see `schedule`.
        """
        self._run_here()
        return ChannelWait(self._desk).run(size, priority)

    # --- the turn ------------------------------------------------------------------------------------------------

    def _put_off(self, call: Callable[..., object], *args: object, **named: object) -> bool:
        """Have `call` made later: this thread has the lock, and runs a destructor. Returns True."""

        def put_off() -> None:
            call(*args, **named)

        self._jobs.append(put_off)
        return True

    def _catch_up(self) -> None:
        """Make the calls that were put off while the lock was held."""
        while self._jobs and not self._lock.owned():
            with self._lock:
                step = self._take_turn_locked()
            if step is None:
                return
            self._carry_out(step)

    def _take_turn_locked(self) -> Step | None:
        """Take the turn if it is free and there is something to do: returns the first step, for `_run`."""
        if self._turning:
            return None
        step = self._core.next_step()
        self._turning = step is not None
        return step

    def _run(self, step: Step | None) -> None:
        """Make callbacks, `step` first, until none is left; the caller has the turn. None: it has not."""
        if step is not None:
            self._carry_out(step)
        if self._jobs and not self._turning:
            self._catch_up()

    def _carry_out(self, step: Step | None) -> None:
        rest = False
        try:
            while step is not None:
                if isinstance(step, Offer):
                    try:
                        step.entry.sender.on_offer(step)
                    except BaseException as error:  # noqa: BLE001  (it is others' turn that it would end)
                        self._report("on_offer", error)
                else:
                    self._tell(step)
                with self._lock:
                    following = self._core.next_step()
                    if following is None:
                        self._turning = False
                        rest = self._core.suspended is not None
                step = following  # out of the lock: the one before may be the last that knows of its owner
            if rest:
                self._rearm()
        except BaseException:  # a bug, or Ctrl-C between two lines: others can go on
            with self._lock:
                self._turning = False
            raise

    def _tell(self, ended: SentMessage | QueuedSender | Call) -> None:
        try:
            if isinstance(ended, QueuedSender):
                ended.sender.on_discard()
            elif not isinstance(ended, SentMessage):
                ended()
            elif ended.receiver is None:
                return  # withdrawn since
            elif ended.code is None:
                ended.receiver.on_success(ended.key, ended.response)
            else:
                ended.receiver.on_failure(ended.key, ended.code)
        except BaseException as error:  # noqa: BLE001  (it is others' turn that it would end)
            named = (
                f"receiver of request {ended.key}" if isinstance(ended, SentMessage) else "on_discard, or a timed call"
            )
            self._report("policy" if isinstance(ended, PolicyFault) else named, error)

    def _is_useful(self, response: Any) -> bool:
        try:
            return self._useful is None or self._useful(response)
        except BaseException as error:  # noqa: BLE001  (what it cannot judge is of no use)
            self._report("useful", error)
            return False

    # --- what an offer asks for ----------------------------------------------------------------------------------

    def _pull(self, offer: Offer) -> PeerChannels | None:
        if self._lock.owned():
            return None
        with self._lock:
            return self._core.pull(offer)

    def _choose(self, offer: Offer, peer_id: PeerId) -> PeerChannels | None:
        if self._lock.owned():
            return None
        with self._lock:
            return self._core.choose(offer, peer_id)

    def _leave(self, offer: Offer) -> bool:
        if self._lock.owned():
            return not self._put_off(self._leave, offer)
        with self._lock:
            return offer.active and self._core.withdraw_sender(offer.entry.sender)

    def _post(
        self,
        offer: Offer,
        channel: Channel,
        message: Any,
        receiver: ResponseReceiver | None,
        timeout: float,
        response_type: ResponseType,
    ) -> int | None:
        """Send a message on a channel of an offer; returns its key, None if it was not sent."""
        if not 0 < timeout <= MAX_TIMEOUT_S:
            check_timeout(timeout)
        if response_type is not None:
            check_response_type(response_type)
        if self._lock.owned():
            return None
        peer = channel.state.reference()
        now = self._clock()
        deadline = now + timeout
        with self._lock:
            if peer is None:
                self._core.retire(channel.state)
            request = self._core.close(offer, channel, receiver, response_type, now, deadline)
            early = deadline < self._wake_at and self._driver is not None
        if request is None or peer is None:
            return None
        if not self._send(peer, request, message):
            with self._lock:
                if self._core.reopen(offer, channel, request, now):
                    return None
        if early:
            self._rearm()
        return request.key

    def _send(self, peer: ConnectedPeer, request: SentMessage, message: Any) -> bool:
        try:
            sent = peer.send(None if request.key < 0 else request.key, message) is not False
        except BaseException as error:  # noqa: BLE001  (the peer's fault is not the sender's)
            self._report(f"send of peer {short(request.peer.peer_id)}", error)
            return False
        if request.key < 0 and sent:
            with self._lock:
                self._core.counters.notifications += 1
        return sent

    # --- channels that are kept beyond an offer ------------------------------------------------------------------

    def _hold(self, offer: Offer, channel: Channel, timeout: float) -> SentMessage | None:
        """Close `channel` without a message, for `timeout` seconds at most."""
        if self._lock.owned():
            return None
        now = self._clock()
        with self._lock:
            held = self._core.close(offer, channel, None, None, now, now + timeout)
        self._rearm()
        return held

    def _use(
        self,
        held: SentMessage,
        message: Any,
        receiver: ResponseReceiver | None,
        timeout: float,
        response_type: ResponseType,
    ) -> int | None:
        """Send a message on a channel that is held; returns its key, None if it was not sent."""
        check_timeout(timeout)
        check_response_type(response_type)
        if self._lock.owned():
            return None
        peer = held.peer.reference()
        now = self._clock()
        with self._lock:
            request = None
            if peer is not None:
                request = self._core.use_held(held, receiver, response_type, now, now + timeout)
        if peer is None or request is None:
            return None
        if not self._send(peer, request, message):
            self._free(request, Outcome.REJECTED)
            return None
        self._rearm()
        return request.key

    def _free(self, held: SentMessage, outcome: Outcome = Outcome.WITHDRAWN) -> None:
        """Open the channel that `held` keeps closed, if it does."""
        if self._lock.owned():
            self._put_off(self._free, held, outcome)
            return
        now = self._clock()
        with self._lock:
            self._core.free(held, outcome, now)
            step = self._take_turn_locked()
        self._run(step)

    # --- faults --------------------------------------------------------------------------------------------------

    def _report(self, where: str, error: BaseException) -> None:
        with self._lock:
            self._error_count += 1
        report(self._on_error, where, error)

    def _warn(self, text: str, *values: object) -> None:
        now = self._clock()
        with self._lock:
            if now - self._warned_at >= WARNING_PERIOD_S:
                self._warned_at = now
                self._warning_count = 0
            self._warning_count += 1
            if self._warning_count > WARNINGS_PER_PERIOD:
                return
        with suppress(Exception):
            _log.warning(text, *map(short, values))


def _disarm(driver: _Driver) -> None:
    with suppress(ClosedError, RuntimeError):  # its loop has ended, and its timer with it
        driver.disarm()


def _log_error(where: str, error: Exception) -> None:
    _log.error("%s failed", where, exc_info=as_exception(error))
