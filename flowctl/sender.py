"""The Sender: what goes to one peer, in what state its connection is, and what was done about a slow one.

Theory of operation. What is queued lives in the `Outbox`: the message in flight, the control lane, own messages, and
the stream log that is followed. Every event (queued, sent, EAGAIN, drained, time passed) is shown to the `FlowCore`;
an edge that comes out is announced to the frontend under the lock, then the drop policy is applied, which may cause
the next edge.

Deferred mode: `send` queues and asks the owning thread for a flush. Immediate mode: the caller's thread writes when
nothing is queued. Both share everything else. What was queued since the last write says nothing about the peer, so it
is *offered* before a mark is judged on it: at the soft mark `send` itself writes, in either mode, on any thread, and
only what EAGAIN leaves counts. A viewer that follows a log and keeps up is a member of a *cohort*: the
fan-out writes the log to all members without touching their Senders (see `flowctl.fanout.fanout`). A member that meets
EAGAIN, or reaches a limit, leaves the cohort and is served from its own cursor until it has caught up.

Threads: `flush`, `writable`, `tick`, `log_grew`, `follow`, `unfollow` and the methods for the fan-out belong to the
owning thread; everything else may be called from any. While a log is followed, edges happen on the owning thread
only: what another thread asks for (limits, policy, close) is queued and done in the next flush, which is requested at
once. What another thread sends then cannot be offered before the flush: it is bounded by the hard mark instead. The
lock is held while writing; the sockets are non-blocking, so nobody waits for a peer under it. Reports of handlers that
failed, and callbacks of `when_drained`, are put off until it is released.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident

from flowctl.errors import LocalProtocolError
from flowctl.flow.counts import total
from flowctl.flow.forecast import Forecast
from flowctl.flow.ledger import LedgerEntry, LedgerKind
from flowctl.flow.limits import OFF_MARK, Limits
from flowctl.flow.policy import DropPolicy, Thin
from flowctl.flow.state import Load, MessageClass, SendState
from flowctl.flow.trouble import Trouble
from flowctl.loop.locks import HANDLERS
from flowctl.outgoing.backlog import NEEDED, refuse_frame
from flowctl.outgoing.cursor import LogCursor
from flowctl.outgoing.streamlog import Entry, Place, StreamLog, Wire, owned_bytes
from flowctl.reasons import CloseReason, DropReason
from flowctl.sending.core import CLOSED, FlushResult
from flowctl.sending.explain import explain
from flowctl.sending.state import NoHost
from flowctl.sending.steering import Steering
from flowctl.sending.types import CohortLike, Glance, SenderHost, SenderSettings, SenderStatistics, SendResult

__all__ = ["FlushResult", "Sender"]


class Sender(Steering):
    """Everything that is sent to one peer goes through its Sender.

    Args:
        host: the thread and the connection it lives on.
        transport: what it writes to.
        limits: soft and hard limits; `set_limits` changes them.
        policy: what to drop for a slow peer. None: nothing.
        frontend: told of every edge of the state. None: nobody.
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
                if self._closing:
                    self._sends_after_close += 1
                    return CLOSED[self._core.state]
                now = self._host.now()
                plain = not (self._mask or self._held or self._blocked)
                if not self.deferred and plain and self._outbox.idle:
                    return self._send_now_locked(data, message_class, now)
                if plain or self._blocked or not self._core.would_block or self._foreign_locked():
                    return self._queue_locked(data, message_class, now, droppable=droppable)
                self._offer_locked(now)  # before it is refused for what was left over
                if self._close_reason is not None:
                    return CLOSED[self._core.state]
                return self._queue_locked(data, message_class, now, droppable=droppable)
        finally:
            if self._after:
                self._run_after()

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
        self._refuse_reentry("when_drained")
        try:
            with self._lock:
                if self._close_reason is not None:
                    self._later_locked(partial(callback, self._close_reason is CloseReason.FINISHED))
                    return
                self._waiters = [*(self._waiters or ()), callback]
                self._wake_locked()
        finally:
            if self._after:
                self._run_after()

    def forget_drained(self, callback: Callable[[bool], object]) -> None:
        """Take back a call of `when_drained`; harmless where it was called already. Any thread."""
        self._refuse_reentry("forget_drained")
        with self._lock:
            self._waiters = [waiter for waiter in self._waiters or () if waiter is not callback] or None

    # -- following a stream log: the owning thread

    def follow(
        self,
        cohort: CohortLike,
        *,
        start: Entry | None = None,
        prefix: tuple[Wire, ...] = (),
        wait_for_key: bool = False,
    ) -> None:
        """Follow the log of `cohort`: everything from `start` on is for this peer. Owning thread.

        Args:
            cohort: the fan-out of the owning thread for that log.
            start: the first entry. None: what is published next.
            prefix: wire messages to send first; what is no `bytes` is copied.
            wait_for_key: begin with the next key frame.

        Raises:
            LocalProtocolError: a log is followed already.
        """
        self._refuse_reentry("follow")
        first = tuple(map(owned_bytes, prefix))
        with self._lock:
            if self._cohort is not None:
                raise LocalProtocolError("this Sender follows a stream log already", hint="call unfollow() first")
            if self._closing:
                return
            cursor = LogCursor(cohort.log, now=self._host.now(), start=start, prefix=first, wait_for_key=wait_for_key)
            cursor.mask = self._mask
            if wait_for_key:
                self._open_episode_locked(cursor.joined_at)
            self._outbox.follow(cursor)
            self._joined_check = None
            self._cohort = cohort
            cohort.add(self)

    def unfollow(self) -> None:
        """Stop following: what is queued of the log is dropped, but a message in flight is finished. Owning thread."""
        self._refuse_reentry("unfollow")
        try:
            with self._lock:
                self._unfollow_locked(DropReason.UNFOLLOWED)
                if self._close_reason is None:
                    now = self._host.now()
                    self._settle_locked(self._core.dropped(self._counted_locked(now), now), now)
                    self._apply_mask_locked(now)  # without a log there is no lateness: the state decides
                    if not self._blocked and (self._core.would_block or not self._outbox.empty(with_log=False)):
                        self._host.request_flush()  # it may have had a turn of the fan-out to come
        finally:
            if self._after:
                self._run_after()

    def suspend_following(self) -> None:
        """Leave the fan-out but keep the place in the log, to go on from there with another. Owning thread."""
        self._refuse_reentry("suspend_following")
        with self._lock:
            cohort = self._cohort
            if cohort is not None:
                self._leave_locked()
                cohort.remove(self)
                self._cohort = None

    def resume_following(self, cohort: CohortLike) -> None:
        """Go on where `suspend_following` left off, served by `cohort`. New owning thread.

        Raises:
            LocalProtocolError: `cohort` is for another log than the one that was followed, or none was.
        """
        self._refuse_reentry("resume_following")
        with self._lock:
            cursor = self._outbox.cursor
            if self._close_reason is not None or (self._closing and cursor is None):
                return  # over, or it was closing already when it was to follow
            if cursor is None or self._cohort is not None or cohort.log is not cursor.log:
                raise LocalProtocolError("a viewer can only be moved between fan-outs of the log it follows")
            self._cohort = cohort
            cohort.add(self)

    def move_to(self, cohort: CohortLike) -> None:
        """Be served by another fan-out of the same log from the same byte on. The owning thread of both.

        Raises:
            LocalProtocolError: another log, or none, is followed.
        """
        self._refuse_reentry("move_to")
        if cohort.log is not self.following:
            raise LocalProtocolError("a viewer can only be moved between fan-outs of the log it follows")
        self.suspend_following()
        self.resume_following(cohort)

    # -- limits and policy

    def set_limits(self, limits: Limits) -> None:
        """Put `limits` in force at once; may change the state, and even close the connection. Any thread."""
        self._do("set_limits", lambda now: self._set_limits_locked(limits, now))

    def set_policy(self, policy: DropPolicy) -> None:
        """Decide by `policy` from the next message on. Any thread."""
        self._do("set_policy", lambda now: self._set_policy_locked(policy, now))

    def thin(self, mode: Thin = Thin.DROPPABLE) -> None:
        """Throw away what may be dropped of what is queued; statistics and ledger say how much it was. Any thread."""
        self._do("thin", lambda now: self._thin_request_locked(mode, now))

    def relieve(self, cause: str) -> None:
        """Give up what is queued of the followed log before its newest key frame, to free memory. Any thread.

        Where that frees nothing, everything goes that may be dropped.

        Args:
            cause: for the ledger.
        """
        self._do("relieve", lambda now: self._relieve_locked(now, cause))

    def _do(self, method: str, action: Callable[[float], None]) -> None:
        """Do something under the lock; on the owning thread where a log is followed."""
        self._refuse_reentry(method)
        try:
            with self._lock:
                if self._close_reason is not None:
                    return
                if self._foreign_locked():
                    self._pending = [*(self._pending or ()), action]
                    self._host.request_flush()
                else:
                    now = self._host.now()
                    self._run_pending_locked(now)  # what was asked for first comes first
                    if self._close_reason is None:
                        action(now)
        finally:
            if self._after:
                self._run_after()

    def _run_pending_locked(self, now: float) -> None:
        """Do what other threads have asked for; after the end of the Sender there is nothing to do it to."""
        pending, self._pending = self._pending, None
        for action in pending or ():
            if self._close_reason is None:
                action(now)

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
        """The times and budgets that it was made with."""
        return self._settings

    @property
    def state(self) -> SendState:
        """The present state."""
        return self._core.state

    @property
    def closed(self) -> bool:
        """Whether nothing more is accepted."""
        return self._closing

    @property
    def blocked(self) -> bool:
        """Whether the last write met EAGAIN and the kernel has not called back since."""
        return self._blocked

    @property
    def following(self) -> StreamLog | None:
        """The stream log that is followed, or None."""
        cohort = self._cohort
        return None if cohort is None else cohort.log

    def why(self) -> str:
        """Explain the present state in one line: axis, value, limit, since when, and who is to blame. Any thread."""
        self._refuse_reentry("why")
        with self._lock:
            now = self._now_locked()
            cursor = self._outbox.cursor
            return explain(
                self._core,
                self._load_locked(now),
                now,
                largest_bytes=cursor.log.largest_bytes if cursor else 0,
                joining=self._joining_locked(),
                waiting_for_key=self._outbox.waiting_for_key,
                stalled_s=self._stalled_s_locked(now),
                remarks=self._remarks_locked(now),
                close_reason=self._close_reason,
                details=self._close_details,
            )

    def statistics(self) -> SenderStatistics:
        """Return a snapshot; O(1) work under the lock whatever is queued. Any thread."""
        self._refuse_reentry("statistics")
        with self._lock:
            now = self._now_locked()
            outbox, core = self._outbox, self._core
            load = self._load_locked(now)  # first: it moves the cursor past what is refused
            accepted, dropped, queued = outbox.accounts()
            return SenderStatistics(
                state=core.state,
                since=core.since,
                load=load,
                accepted=accepted,
                sent=accepted - queued - total(dropped.values()),
                dropped=dropped,
                queued=queued,
                time_in_states_s=core.time_in_states(now),
                transitions=core.transitions,
                recoveries=core.recoveries,
                stalled_s=self._stalled_s_locked(now),
                longest_stall_s=max(self._longest_stall_s, self._stalled_s_locked(now)),
                sends_after_close=self._sends_after_close,
                restarts=outbox.restarts,
                key_waits_expired=outbox.key_waits_expired,
                bytes_sent=self._bytes_sent_locked(),
                close_reason=self._close_reason,
                **self._figures_locked(now),
            )

    def load(self) -> Load:
        """Return what is queued and not yet taken by the kernel, on three axes. Any thread."""
        self._refuse_reentry("load")
        with self._lock:
            return self._load_locked(self._host.now())

    def glance(self) -> Glance:
        """Return what is cheap to tell, for who looks at many Senders a few times a second. Any thread."""
        self._refuse_reentry("glance")
        with self._lock:
            return self._glance_locked()

    @property
    def host(self) -> SenderHost:
        """The thread and the connection it lives on."""
        return self._host

    def ledger(self) -> tuple[LedgerEntry, ...]:
        """Return the last changes of state, episodes of drops, and the close, oldest first. Any thread."""
        self._refuse_reentry("ledger")
        with self._lock:
            return self._ledger.entries() if self._ledger else ()

    def unread_ledger(self) -> tuple[LedgerEntry, ...]:
        """Return the entries of the ledger since the last call. Any thread."""
        self._refuse_reentry("unread_ledger")
        with self._lock:
            return self._ledger.unread() if self._ledger else ()

    def note(self, kind: LedgerKind, why: str, *, duration_s: float = 0.0) -> None:
        """Add an entry to the ledger, for pauses of input. Any thread, also from this Sender's own handler."""
        if not self._lock.owned():
            self._refuse_reentry("note")
        with self._lock:
            self._note_locked(LedgerEntry(kind, self._host.now(), why, duration_s=duration_s))

    # -- how far behind the peer is

    def sample_delay(self, kernel_bytes: int | None = None) -> float:
        """Take a sample of how far behind the peer is, and do on the owning thread what follows from it. Any thread.

        A peer in trouble is sampled by its own timer; this is for statistics, and for a sweep over healthy peers
        where the delay is the age axis. For a healthy one it costs next to nothing and keeps nothing.

        Args:
            kernel_bytes: what the kernel has taken and the peer has not acknowledged. None: ask the host.

        Returns:
            The delay in ms: what waits here and in the kernel over the rate at which the peer takes.
        """
        self._refuse_reentry("sample_delay")
        try:
            with self._lock:
                if self._close_reason is not None:
                    return 0.0
                now = self._host.now()
                waiting = self._host.kernel_bytes() if kernel_bytes is None else kernel_bytes
                if self._trouble is None and (self._member or not self._outbox.cursor):
                    return self._sample_healthy_locked(now, waiting)
                if self._trouble is None:
                    self._trouble = Trouble()
                trouble = self._trouble
                self._sample_locked(now, waiting)
                if self._aged_by_delay and not self._foreign_locked() and self._close_reason is None:
                    self._look_locked(now)
                    self._arm_locked(now)
                return trouble.delay_ms
        finally:
            if self._after:
                self._run_after()

    def peer_acknowledged(self, total_bytes: int) -> None:
        """The peer's application says it has read `total_bytes` of all that was sent. Any thread.

        It makes the delay true for peers whose kernel takes far more than they read. Reports in steps of any size do;
        what is used is how far the newest lags behind what was sent, less the largest step lately, and less the share
        of up to 2 % that a peer counts too little. Once reports stop, for longer than twice the usual time between two
        of them, they are believed no more. A number that is higher than what was sent means all of it.
        """
        self._refuse_reentry("peer_acknowledged")
        with self._lock:
            if self._trouble is None and self._aged_by_delay:
                self._trouble = Trouble()
            if self._trouble is not None:
                self._trouble.delay.peer_acknowledged(self._host.now(), total_bytes, self._bytes_sent_locked())

    def forecast(self) -> Forecast | None:
        """Return when the hard limit will be reached if filling and draining go on as now. Any thread.

        Returns:
            Seconds and axis. None: never, as for a viewer for which pictures are left out (`flowctl.flow.timing`)
            while it takes something; or the rate of the peer is not known yet.
        """
        self._refuse_reentry("forecast")
        with self._lock:
            return self._forecast_locked(self._now_locked())

    # -- writing: the owning thread

    def flush(self) -> FlushResult:
        """Write what is queued, up to the budget of one turn. Owning thread.

        Returns:
            DRAINED, MORE (another flush was requested), BLOCKED (the host was asked to watch), or CLOSED.
        """
        self._refuse_reentry("flush")
        try:
            with self._lock:
                now = self._host.now()
                self._run_pending_locked(now)
                if self._close_reason is not None:
                    return FlushResult.CLOSED
                self._look_locked(now, queued=True)
                result = self._flush_locked(now)
                self._check_control_locked()
                return result if self._open_locked() else FlushResult.CLOSED
        finally:
            if self._after:
                self._run_after()

    def _flush_locked(self, now: float) -> FlushResult:
        if self._blocked or self._close_reason is not None:
            return FlushResult.BLOCKED if self._close_reason is None else FlushResult.CLOSED
        result = self._write_locked(now)
        if result is FlushResult.BLOCKED:
            self._host.want_writable(True)
            if self._sample_due_locked(now):
                self._sample_locked(now)
            self._arm_locked(now)
            return FlushResult.BLOCKED if self._open_locked() else FlushResult.CLOSED
        if result is FlushResult.MORE:
            if self._cohort is None or self._member:
                self._host.request_flush()
            else:
                self._cohort.runnable(self)  # in turn with the other viewers
        if result is FlushResult.DRAINED and self._closing:
            self._fail_locked(CloseReason.FINISHED, "everything was sent")
            return FlushResult.CLOSED
        return result

    def writable(self) -> FlushResult:
        """Go on writing: the kernel can take more. Owning thread."""
        self._refuse_reentry("writable")
        with self._lock:
            self._blocked = False
            if self._trouble is not None:
                self._trouble.allowed_bytes = self._trouble.ahead_bytes
            if self._settings.return_after_s:
                self._return_after_stall_locked(self._host.now())
            alone = self._cohort is not None and not self._member
        self._host.want_writable(False)
        if not alone or self._cohort is None:
            return self.flush()
        # In turn with the other viewers: when a large key frame has filled the kernel's buffers for all of them, they
        # become writable together.
        self._cohort.runnable(self)
        return FlushResult.MORE

    def log_grew(self) -> tuple[int, int]:
        """Judge the load again because the followed log has grown. Owning thread, for the fan-out.

        Returns:
            (offset, sequence) of the log before which asking again is of no use.
        """
        if HANDLERS and get_ident() in HANDLERS:
            return 0, 0  # application code that a Sender calls has published something: look with the next message
        try:
            with self._lock:
                cursor = self._outbox.cursor
                if self._close_reason is not None or cursor is None:
                    return OFF_MARK, OFF_MARK
                now = self._host.now()
                self._look_locked(now, queued=True)
                self._arm_locked(now)
                return self._next_crossing_locked(now)
        finally:
            if self._after:
                self._run_after()

    def tick(self) -> None:
        """Judge age, stall and deadlines: time has passed. Owning thread."""
        self._refuse_reentry("tick")
        try:
            with self._lock:
                if self._close_reason is None:
                    now = self._host.now()
                    self._run_pending_locked(now)
                    self._look_locked(now)
                    if self._sample_due_locked(now):
                        self._sample_locked(now)
                    self._check_times_locked(now)
                    self._arm_locked(now)
                    if not self._blocked and (
                        self._core.would_block or not self._outbox.empty(with_log=not self._member)
                    ):
                        # Looking has queued something, the headers of a key frame, say; or it keeps up again.
                        self._host.request_flush()
        finally:
            if self._after:
                self._run_after()

    # -- closing

    def close_after_flush(self) -> None:
        """Accept nothing more, send what is queued, then end the connection; give up after the deadline. Any thread."""
        self._refuse_reentry("close_after_flush")
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if self._settings.close_deadline_s:
                self._close_deadline = self._host.now() + self._settings.close_deadline_s
                self._host.set_deadline(self._close_deadline)
            self._pending = [*(self._pending or ()), self._stop_following_locked]
            self._host.request_flush()

    def close(self, reason: CloseReason, details: str = "") -> None:
        """End now: what is queued is dropped and counted. The first reason counts. Any thread."""
        self._refuse_reentry("close")
        try:
            with self._lock:
                self._closing = True
                if self._close_reason is not None:
                    return
                if self._foreign_locked():
                    self._pending = [*(self._pending or ()), lambda _: self._fail_locked(reason, details)]
                    self._host.request_flush()
                else:
                    self._fail_locked(reason, details)
        finally:
            if self._after:
                self._run_after()

    def let_go(self) -> None:
        """Forget host and frontend, for they hold this Sender: it is over, and its memory shall go with them.

        Everything may still be asked of it, and what is sent is refused as before. Owning thread, after `close`.
        """
        with self._lock:
            if self._close_reason is not None:
                self._host = NoHost(self._progress_at)
                self._frontend = self._pending = None

    # -- membership in a cohort: the owning thread, for the fan-out

    @property
    def transport_send(self) -> Callable[[bytes], int]:
        """How the cohort writes to this viewer."""
        return self._transport.send

    def ready_for_cohort(self, at: Entry) -> bool:
        """Return whether this viewer has caught up with `at` and takes everything from there on."""
        with self._lock:
            cursor = self._outbox.cursor
            return (
                cursor is not None
                and self._close_reason is None
                and not self._blocked
                and not self._closing
                and cursor.caught_up
                and cursor.entry is at
                and not self._member
                and not self._core.would_block
                and cursor.plain
                and self._outbox.empty(with_log=False)
            )

    def enter_cohort(self, place: Place) -> None:
        """The cohort writes the log for this viewer from now on; it shares `place`, which is where it stands."""
        with self._lock:
            cohort, cursor = self._cohort, self._outbox.cursor
            if cohort is not None and cursor is not None:
                self._member = True
                cursor.place = place  # its own would hold the log from here on
                self._outbox.bytes_sent -= cursor.entry.offset  # added back when it is left, or asked for

    def move_in_cohort(self, place: Place) -> None:
        """Share another place of the cohort at the same entry."""
        with self._lock:
            cursor = self._outbox.cursor
            if cursor is not None and self._member:
                cursor.place = place

    def leave_cohort(self, written: int) -> None:
        """Go on alone from where the cohort stands and `written` bytes on, which the kernel took."""
        with self._lock:
            self._leave_locked()
            if written:
                self._progress_locked(self._host.now())
                self._outbox.consume_followed(written)

    def broken(self, error: Exception) -> None:
        """A write of the cohort failed, or a flush raised, which is a fault of ours: the connection is over."""
        if not isinstance(error, OSError):
            self._host.handler_failed("flush", error)
        try:
            with self._lock:
                self._broken_locked(error)
        finally:
            if self._after:
                self._run_after()
