"""The Sender: what goes to one peer, in what state its connection is, and what was done about a slow one.

Deferred mode: `send` queues and asks the owning thread for a flush. Immediate mode: the caller's thread writes when
nothing is queued. Both share everything else. At the soft mark `send` itself writes, in either mode, on any thread:
before a mark is judged on it, what waits is offered to the kernel.

Here is what applications call. How a peer is served, which connection and fan-out see to, is in the base class: see
`flowctl.core.sending.serving`, also for threads and the life of a Sender.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, Final

from flowctl.core.flow.ledger import LedgerEntry, LedgerKind
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import DropPolicy, Thin
from flowctl.core.flow.state import Load, MessageClass, SendState
from flowctl.core.flow.timing import Forecast
from flowctl.core.loop.locks import HANDLERS
from flowctl.core.outgoing.backlog import NEEDED, refuse_frame
from flowctl.core.outgoing.conflation import ConflatingCursor
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.outbox import write_one
from flowctl.core.outgoing.streamlog import Entry, StreamLog, Wire, owned_bytes
from flowctl.core.sending.contract import (
    CohortLike,
    FlushResult,
    SendOutcome,
    SendResult,
    Standing,
)
from flowctl.core.sending.figures import SenderStatistics, statistics_of
from flowctl.core.sending.serving import Serving
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import LocalProtocolError
from flowctl.reasons import CloseReason, DropReason

__all__ = ["FlushResult", "Sender"]

# By state: made once, and found without hashing.
ACCEPTED: Final = tuple(SendResult(SendOutcome.ACCEPTED, state) for state in SendState)
DROPPED: Final = tuple(SendResult(SendOutcome.DROPPED, state) for state in SendState)
CLOSED: Final = tuple(SendResult(SendOutcome.CLOSED, state) for state in SendState)
_GONE: Final = Standing.GONE


class Sender(Serving):
    """Everything that is sent to one peer goes through its Sender.

    Args:
        host: the thread and the connection it lives on.
        transport: what it writes to.
        limits: soft and hard limits; `set_limits` changes them.
        policy: what to drop for a slow peer. None: nothing.
        frontend: told of every edge of the state. None: there is none.
        settings: times and budgets.
        deferred: whether `send` leaves writing to the owning thread; see the module.
    """

    __slots__ = ()

    # -- sending

    def send(
        self,
        data: Wire,
        message_class: MessageClass = MessageClass.DATA,
        *,
        droppable: bool | None = None,
    ) -> SendResult:
        """Send one message, or queue it, or drop it as the policy says. Any thread.

        Frames that others refer to (KEY, INTER) and may be dropped go through a `StreamLog` that this peer follows,
        also where they are for it alone: after a loss the log sees to it that nothing comes that cannot be decoded.

        Args:
            data: the message as it goes to the socket, not empty. What is no `bytes` is copied: it is the caller's, who
                may change it before it is sent.
            message_class: what it is to the drop policy; CONTROL goes first and is never dropped.
            droppable: whether the policy may drop it. None: all classes but CONTROL and HEADER. KEY and INTER need a
                False: then only a hard limit that is held refuses them, and what comes after such a loss is the
                caller's decision.

        Returns:
            What became of it, and the state after it.

        Raises:
            ReentryError: called from `send_state_changed` or a policy, of this or another Sender.
            LocalProtocolError: the message is empty, no bytes, or a KEY or INTER frame that might be dropped.
        """
        if HANDLERS:
            self._refuse_reentry("send")
        if message_class in NEEDED and droppable is not False:
            refuse_frame(message_class)
        if type(data) is not bytes:
            data = owned_bytes(data)
        if not data:
            raise LocalProtocolError("an empty message cannot be sent", hint="leave the call out")
        try:
            with self._lock:
                judgement = self._judgement
                if judgement.closing:
                    self._sends_after_close += 1
                    return CLOSED[self._core.state]
                now = self._host.now()
                plain = not (judgement.mask or judgement.held or judgement.blocked)
                if not self.deferred and plain and self._outbox.idle:
                    return self._send_now_locked(data, message_class, now)
                if plain or judgement.blocked or not self._core.would_block or self._foreign_thread_locked():
                    return self._queue_locked(data, message_class, now, droppable=droppable)
                self._offer_locked(now)  # before it is refused for what was left over
                if self._close_reason is not None:
                    return CLOSED[self._core.state]
                return self._queue_locked(data, message_class, now, droppable=droppable)
        finally:
            if self._lock.calls:
                self._lock.make_calls()

    @property
    def drained(self) -> bool:
        """Whether nothing that was sent to this peer alone waits for the kernel. Any thread."""
        return self._outbox.own_taken

    def when_drained(self, callback: Callable[[bool], object]) -> None:
        """Call `callback` once nothing that was sent to this peer alone waits, or the Sender is over. Any thread.

        It is called once, on whatever thread that happens, with no lock held, and must not block; before this returns
        where there is nothing to wait for. What is read from a followed log is not waited for.

        Args:
            callback: given True if nothing waits, False if the Sender ended before.
        """
        with self._guarded("when_drained"), self._lock:
            if self._close_reason is not None:
                self._lock.postpone(partial(callback, self._close_reason is CloseReason.FINISHED))
                return
            self._waiters = [*(self._waiters or ()), callback]
            self._wake_waiters_locked()

    def forget_drained(self, callback: Callable[[bool], object]) -> None:
        """Take back a call of `when_drained`; harmless where it was called already. Any thread."""
        with self._guarded("forget_drained"), self._lock:
            self._waiters = [waiter for waiter in self._waiters or () if waiter is not callback] or None

    def _queue_locked(
        self, data: bytes, message_class: MessageClass, now: float, *, droppable: bool | None
    ) -> SendResult:
        """Queue a message, unless the policy refuses it; before a mark is judged, offer what waits."""
        self._lock.assert_owned()
        core, backlog, judgement = self._core, self._outbox.backlog, self._judgement
        foreign = judgement.stands is not _GONE and self._foreign_thread_locked()
        full = foreign and core.reaches_hard(backlog.size_bytes, len(backlog))
        mask, held = judgement.mask, judgement.held is not None
        reason = backlog.offer(data, message_class, now, mask=mask, held=held, full=full, droppable=droppable)
        if reason is not None:
            self._open_episode_locked(now)
            return DROPPED[core.state]
        if foreign:
            return self._sent_from_afar_locked(message_class, full=full)
        control = message_class is MessageClass.CONTROL
        if control or core.would_block or core.reaches_soft(backlog.size_bytes, len(backlog)):
            self._judge_own_locked(now)
            if self._close_reason is not None:
                return CLOSED[core.state]
        if not judgement.blocked:
            self._host.request_flush()
        elif len(backlog) == 1:
            self._arm_locked(now)  # the first message to wait behind EAGAIN starts the clocks
        return ACCEPTED[core.state]

    def _judge_own_locked(self, now: float) -> None:
        """Judge what `send` has queued. Before a mark is judged on it, it is offered to the kernel."""
        self._lock.assert_owned()
        core, backlog = self._core, self._outbox.backlog
        due = self._judgement.control_over() is not None
        if not due and core.would_block:
            due = core.rises_to(self._counted_locked(now))
        elif not due:
            due = core.reaches_soft(backlog.size_bytes, len(backlog))
        if due:
            self._offer_locked(now)
        self._check_control_locked()
        if self._close_reason is None:
            self._settle_locked(core.queued(self._counted_locked(now), now), now)
            self._check_held_locked()

    def _sent_from_afar_locked(self, message_class: MessageClass, *, full: bool) -> SendResult:
        """Go on with a message that another thread has queued while a log is followed: the flush judges it.

        Until then nothing may be written, and nothing tells a slow peer from a busy thread of ours. Memory is bounded
        all the same: beyond the hard marks what may be dropped was refused, and the rest ends the connection.
        """
        self._lock.assert_owned()
        end: tuple[CloseReason, str] | None = None
        if message_class is not MessageClass.CONTROL:
            if full:
                end = CloseReason.HARD_LIMIT, "another thread queued what may not be dropped beyond the hard limit"
        elif (over := self._judgement.control_over()) is not None:
            end = CloseReason.LIMIT_HIT, over
        if end is not None:
            self._judgement.closes()
            self._leave_to_owner_locked(lambda _: self._fail_locked(*end))
            return CLOSED[self._core.state]
        self._host.request_flush()
        return ACCEPTED[self._core.state]

    def _send_now_locked(self, data: bytes, message_class: MessageClass, now: float) -> SendResult:
        """Immediate mode with nothing queued: write in the caller's thread."""
        self._lock.assert_owned()
        written, blocked, failure = write_one(self._transport, data)
        self._outbox.put_in_flight(data, message_class, now, written)
        if written == len(data) and self._core.state is SendState.READY and self._episode is None:
            # Nothing was wrong and nothing is: what follows from a drained queue is known without looking.
            self._judgement.taken_at_once(now)
            self._host.wrote(written)
            return ACCEPTED[SendState.READY]
        result = self._account_write_locked(written, now, failure, blocked=blocked)
        if result is FlushResult.BLOCKED:
            self._judgement.meet_kernel_anew()  # on the owning thread, which watches the socket
            self._host.request_flush()
        return (CLOSED if result is FlushResult.CLOSED else ACCEPTED)[self._core.state]

    # -- following a stream log: the owning thread

    def follow(
        self,
        cohort: CohortLike[Any],
        *,
        start: Entry | None = None,
        prefix: tuple[Wire, ...] = (),
        wait_for_key: bool = False,
        latest: bool = False,
    ) -> None:
        """Follow the log of `cohort`: everything from `start` on is for this peer. Owning thread.

        Args:
            cohort: the fan-out of the owning thread for that log.
            start: the first entry. None: what is published next.
            prefix: wire messages to send first; what is no `bytes` is copied.
            wait_for_key: begin with the next key frame.
            latest: send the newest value of each key first, of a log with keys; `start` is None then.

        Raises:
            LocalProtocolError: a log is followed already.
            Exception: what `cohort` raised; no log is followed then.
        """
        first = tuple(map(owned_bytes, prefix))
        with self._guarded("follow"), self._lock:
            if self._judgement.stands is not _GONE:
                raise LocalProtocolError("this Sender follows a stream log already", hint="call unfollow() first")
            if self._judgement.closing:
                return
            self._learn_patience_locked()
            log, now = cohort.log, self._host.now()
            if log.latest is None:
                cursor = LogCursor(log, now=now, start=start, prefix=first, wait_for_key=wait_for_key)
            else:  # it has no pictures, so that nothing waits for a key frame
                cursor = ConflatingCursor(log, now=now, start=start, prefix=first, latest=latest)
            cursor.mask = self._judgement.mask
            if wait_for_key and log.latest is None:
                self._open_episode_locked(now)
            self._outbox.follow(cursor)
            self._judgement.joined()
            try:
                self._enter_fanout_locked(cohort)
            except BaseException:
                self._unfollow_locked(DropReason.UNFOLLOWED)
                raise

    def unfollow(self) -> None:
        """Stop following: what is queued of the log is dropped, but a message in flight is finished. Owning thread."""
        with self._guarded("unfollow"), self._lock:
            self._unfollow_locked(DropReason.UNFOLLOWED)
            now = self._host.now()
            if self._close_reason is None:
                self._settle_locked(self._core.dropped(self._counted_locked(now), now), now)
            if self._is_open_locked():
                self._apply_mask_locked(now)  # without a log there is no lateness: the state decides
                own = not self._outbox.empty(with_log=False)
                if not self._judgement.blocked and (self._core.would_block or own):
                    self._host.request_flush()  # it may have had a turn of the fan-out to come
                self._arm_locked(now)

    @property
    def following(self) -> StreamLog | None:
        """The stream log that is followed, or None."""
        cohort = self._cohort
        return None if cohort is None else cohort.log

    # -- limits and policy

    def set_limits(self, limits: Limits) -> None:
        """Put `limits` in force at once; may change the state, and even close the connection. Any thread."""
        self._perform("set_limits", lambda now: self._set_limits_locked(limits, now))

    def set_policy(self, policy: DropPolicy) -> None:
        """Decide by `policy` from the next message on. Any thread."""
        self._perform("set_policy", lambda now: self._set_policy_locked(policy, now))

    def set_settings(self, settings: SenderSettings) -> None:
        """Put other times and budgets in force, but for how a slow peer is measured. Any thread.

        What is measured with (`age_from`, `sample_s`, `return_delay_s`) stays as it was made with.
        """
        self._perform("set_settings", lambda now: self._set_settings_locked(settings, now))

    def thin(self, mode: Thin = Thin.DROPPABLE) -> None:
        """Throw away what may be dropped of what is queued; statistics and ledger say how much it was. Any thread."""
        self._perform("thin", lambda now: self._thin_request_locked(mode, now))

    def relieve(self, cause: str) -> None:
        """Give up what is queued of the followed log before its newest key frame, to free memory. Any thread.

        Where that frees nothing, everything goes that may be dropped.

        Args:
            cause: for the ledger.
        """
        self._perform("relieve", lambda now: self._relieve_locked(now, cause))

    def _perform(self, method: str, action: Callable[[float], None]) -> None:
        """Run an action under the lock; on the owning thread where a log is followed."""
        with self._guarded(method), self._lock:
            if self._close_reason is not None:
                return
            if self._foreign_thread_locked():
                self._leave_to_owner_locked(action)
            else:
                now = self._host.now()
                self._run_pending_locked(now)  # what was asked for first comes first
                if self._close_reason is None:
                    action(now)

    def _set_limits_locked(self, limits: Limits, now: float) -> None:
        self._lock.assert_owned()
        self._add_to_ledger_locked(LedgerEntry(LedgerKind.LIMITS, now, str(limits)))
        core = self._core
        if not (self._judgement.blocked or self._outbox.empty(with_log=False)):
            self._offer_locked(now)
            if self._close_reason is not None:
                return
        self._settle_locked(core.limits_set(limits, self._counted_locked(now, limits), now), now)
        if self._is_open_locked():
            self._apply_mask_locked(now)  # there may be a target delay now, or none any more
        if core.final:  # without an edge where a held hard limit was made a final one; the first reason counts
            self._fail_locked(CloseReason.HARD_LIMIT, "the hard limit is reached and no longer held")
        self._arm_locked(now)
        if self._cohort is not None:
            self._cohort.limits_changed(self)

    def _set_policy_locked(self, policy: DropPolicy, now: float) -> None:
        self._lock.assert_owned()
        self._policy = policy
        self._learn_patience_locked()
        self._apply_mask_locked(now)
        self._arm_locked(now)

    def _set_settings_locked(self, settings: SenderSettings, now: float) -> None:
        self._lock.assert_owned()
        self._judgement.settings_set(settings)
        self._arm_locked(now)

    def _thin_request_locked(self, mode: Thin, now: float, reason: DropReason = DropReason.REQUESTED) -> None:
        self._lock.assert_owned()
        self._thin_locked(mode, now, reason)
        self._settle_locked(self._core.dropped(self._counted_locked(now), now), now)
        self._close_episode_locked(now)
        self._arm_locked(now)  # a wait for a key frame may have begun without an edge

    def _relieve_locked(self, now: float, cause: str) -> None:
        """Skip to the newest key frame of the followed log; where that frees nothing, drop what may be dropped."""
        self._lock.assert_owned()
        cursor = self._outbox.cursor
        if cursor is None or self._judgement.stands is Standing.COHORT or self._judgement.closing:
            return
        before = cursor.entry
        self._return_locked(now, cause)
        if self._close_reason is None and cursor.entry is before:
            self._thin_request_locked(Thin.DROPPABLE, now, DropReason.THINNED)  # values are shared: no one's to give up

    # -- what it is

    @property
    def limits(self) -> Limits:
        """The limits in force."""
        return self._core.limits

    @property
    def policy(self) -> DropPolicy:
        """The policy in force."""
        with self._lock:
            return self._policy

    @property
    def settings(self) -> SenderSettings:
        """The times and budgets in force."""
        return self._judgement.settings

    @property
    def state(self) -> SendState:
        """The present state."""
        return self._core.state

    @property
    def closed(self) -> bool:
        """Whether nothing more is accepted."""
        return self._judgement.closing

    def why(self) -> str:
        """Explain the present state in one line: axis, value, limit, since when, and who is to blame. Any thread."""
        with self._guarded("why"), self._lock:
            now = self._now_locked()
            counted, kernel_bytes = self._counted_locked(now), self._kernel_bytes_locked()
            span = self._host.shared_stall()
            return self._judgement.why(now, counted, kernel_bytes, span, self._close_reason, self._close_details)

    def statistics(self) -> SenderStatistics:
        """Return a snapshot; O(1) work under the lock whatever is queued. Any thread."""
        self._refuse_reentry("statistics")
        with self._lock:
            now = self._now_locked()
            return statistics_of(
                self._judgement,
                now,
                self._counted_locked(now),
                self._kernel_bytes_locked(),
                sends_after_close=self._sends_after_close,
                close_reason=self._close_reason,
            )

    def load(self) -> Load:
        """Return what is queued and not yet taken by the kernel, on three axes. Any thread."""
        self._refuse_reentry("load")
        with self._lock:
            return self._judgement.load(self._host.now())

    def forecast(self) -> Forecast | None:
        """Return when the hard limit will be reached if filling and draining go on as now. Any thread.

        Returns:
            Seconds and axis. None: never, as for a viewer for which pictures are left out (`flowctl.core.flow.timing`)
            while it takes something; or the rate of the peer is not known yet.
        """
        self._refuse_reentry("forecast")
        with self._lock:
            now = self._now_locked()
            return self._judgement.forecast(now, self._counted_locked(now))

    def ledger(self) -> tuple[LedgerEntry, ...]:
        """Return the last changes of state, episodes of drops, and the close, oldest first. Any thread."""
        self._refuse_reentry("ledger")
        with self._lock:
            return self._ledger.entries() if self._ledger else ()

    def note(self, kind: LedgerKind, why: str, *, duration_s: float = 0.0) -> None:
        """Add an entry to the ledger: a pause of input, a switch. Any thread, also from this Sender's own handler."""
        if not self._lock.owned():
            self._refuse_reentry("note")
        with self._lock:
            self._add_to_ledger_locked(LedgerEntry(kind, self._host.now(), why, duration_s=duration_s))

    # -- closing

    def close_after_flush(self) -> None:
        """Accept nothing more, send what is queued, then end the connection; give up after the deadline. Any thread."""
        with self._guarded("close_after_flush"), self._lock:
            if self._judgement.closing:
                return
            deadline_s = self._judgement.settings.close_deadline_s
            closes_at = self._host.now() + deadline_s if deadline_s else inf
            self._judgement.closes(closes_at)
            if deadline_s:
                self._host.set_deadline(closes_at)
            self._leave_to_owner_locked(self._stop_following_locked)

    def close(self, reason: CloseReason, details: str = "") -> None:
        """End now: what is queued is dropped and counted. The first reason counts. Any thread."""
        with self._guarded("close"), self._lock:
            self._judgement.closes()
            if self._close_reason is not None:
                return
            if self._cohort is not None and self._foreign_thread_locked():
                self._leave_to_owner_locked(lambda _: self._fail_locked(reason, details))
            else:  # between two fan-outs too: the next one may never come
                self._fail_locked(reason, details)

    def _stop_following_locked(self, now: float) -> None:
        self._lock.assert_owned()
        cursor = self._outbox.cursor
        if cursor is not None:
            self._leave_cohort_locked()
            self._guide = None
            cursor.finish(now)
