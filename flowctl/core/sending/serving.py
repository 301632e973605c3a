"""How one peer is served: written to, judged, thinned, brought back, ended. It is the inside of its Sender.

Who calls what. An application has a `Sender` (`flowctl.sender`) and its methods. What stands here is for connection,
fan-out and samplers: turns and flushes, times, the place with a fan-out, accounts. Both are one object, under one lock,
and this class is made for no other subclass.

Theory of operation. What is queued lives in the `Outbox`: the message in flight, the control lane, own messages, and
the stream log that is followed. Every event (queued, sent, EAGAIN, drained, time passed) is shown to the `FlowCore`;
an edge that comes out is announced to the frontend under the lock, then the drop policy is applied, which may cause
the next edge. What was queued since the last write says nothing about the peer, so it is *offered* before a mark is
judged on it, and only what EAGAIN leaves counts. A viewer that follows a log and keeps up is a member of a *cohort*:
the fan-out writes the log to all members without touching their Senders (see `core.fanout.fanout`). A member that meets
EAGAIN, or reaches a limit, leaves the cohort and is served from its own cursor until it has caught up.

What counts as load, whether the peer lags, what is late and when to look again is told by the `Judgement`
(`flowctl.core.sending.judgement`), which is pure: it is told what happened and what the host says, and what it decides
is done here. Here is what is not pure: lock, thread, host, fan-out, and the end.

Life. Beside the state of the `FlowCore` a Sender and its judgement have a few leftovers, each legal only beside others;
the tests look after each step of random histories (`check_life`).

- ``closing`` (no more is accepted) stays once it is set, and so does ``_close_reason`` (it is over), only beside it.
  A Sender that is over follows nothing, and has nothing queued, no open episode of drops and no waiters.
- ``closing`` with nothing queued is over, whatever emptied it, once ``_pending`` is done (`_goes_on_locked`).
- ``stands`` (where its fan-out has it, see `core.sending.contract`) is GONE exactly without a cursor in the outbox, and
  SUSPENDED exactly with a cursor and without ``_cohort`` (the fan-out). It is COHORT (that writes the log for us) only
  while nothing is refused or left over: not with ``mask``, ``blocked``, or the core's EAGAIN bit.
- ``blocked`` (EAGAIN, and the kernel has not called back) only with the core's EAGAIN bit, ``lagging``, ``slow``.
- ``lagging`` (the last write left something) ends when all is taken. Dropping does not end it: the next flush does.
- ``held`` (the hard limit closes nothing) exactly in HARD_LIMIT, until it is over.

Threads: `flush`, `writable`, `tick`, `log_grew`, `follow`, `unfollow`, `set_guide`, `switch` and the methods for the
fan-out belong to the owning thread; everything else may be called from any. While a log is followed, edges happen on
the owning thread only: what another thread asks for (limits, policy, close) is queued and done in the next flush, which
is requested at once. Between two fan-outs no thread is that, and only a close is done at once. What another thread
sends then cannot be offered before the flush: it is bounded by the hard mark instead. The lock is held while writing;
the sockets are non-blocking, so no peer is waited for under it. Reports of handlers that failed, and callbacks of
`when_drained`, are put off until it is released.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from threading import get_ident
from typing import Any, Final, TypeVar

from flowctl.core.flow.counts import Tally
from flowctl.core.flow.ledger import Ledger, LedgerEntry, LedgerKind, describe_change
from flowctl.core.flow.limits import NO_LIMITS, OFF_MARK, Limits
from flowctl.core.flow.policy import BROKEN_MASK, DROPPABLE_MASK, DropPolicy, KeepAll, Thin, patience_of, refused_mask
from flowctl.core.flow.sharedstall import SURE_S
from flowctl.core.flow.state import CLASS_COUNT, FlowCore, Load, SendState, StateChange
from flowctl.core.flow.timing import ENDLESS, Timing
from flowctl.core.loop.locks import HANDLERS, PostponingLock
from flowctl.core.outgoing.cursor import Crossroads, LogCursor
from flowctl.core.outgoing.outbox import Outbox, Transport
from flowctl.core.outgoing.splice import go_on_in
from flowctl.core.outgoing.streamlog import Entry, Place
from flowctl.core.sending.contract import (
    CohortLike,
    FlushResult,
    Frontend,
    Guide,
    Hop,
    NoHost,
    SenderHost,
    Standing,
)
from flowctl.core.sending.figures import Account, LineLook, account_of, line_look_of
from flowctl.core.sending.judgement import Clocks, Judgement
from flowctl.core.sending.settings import AgeSource, SenderSettings
from flowctl.core.sending.slowpeer import DropEpisode, SlowPeer
from flowctl.errors import LocalProtocolError, ReentryError
from flowctl.reasons import CloseReason, DropReason

_COHORT: Final = Standing.COHORT
_TURN_COMES: Final = frozenset({Standing.QUEUED, Standing.PACED})
_RESET_ERRORS: Final = frozenset({errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED, errno.ETIMEDOUT})
_SURE_MS: Final = SURE_S * 1000
"""Age from which it is asked whether most viewers had stopped."""
_DEFAULT_SETTINGS: Final = SenderSettings()
_KEEP_ALL: Final = KeepAll()
_T = TypeVar("_T")


class Serving:
    """The inside of a Sender: arguments as of `flowctl.sender.Sender`."""

    __slots__ = (
        "_close_details",
        "_close_reason",
        "_cohort",
        "_core",
        "_episode",
        "_frontend",
        "_guide",
        "_host",
        "_judgement",
        "_ledger",
        "_lock",
        "_outbox",
        "_pending",
        "_policy",
        "_sends_after_close",
        "_transport",
        "_waiters",
        "deferred",
        "slot",
    )

    def __init__(
        self,
        host: SenderHost,
        transport: Transport,
        *,
        limits: Limits = NO_LIMITS,
        policy: DropPolicy | None = None,
        frontend: Frontend | None = None,
        settings: SenderSettings | None = None,
        deferred: bool = True,
    ) -> None:
        now = host.now()
        self._lock = PostponingLock()  # what is put off are reports of handlers that failed, and waiters
        self._host: SenderHost = host
        self._transport = transport
        self._frontend = frontend
        self.deferred = deferred
        self.slot = -1  # which one of the cohort's members it is, there; owned by the fan-out
        self._core = FlowCore(limits, now)  # guarded by _lock
        self._policy = policy or _KEEP_ALL  # guarded by _lock
        self._outbox = Outbox()  # guarded by _lock
        settings = settings or _DEFAULT_SETTINGS
        self._judgement = Judgement(self._core, self._outbox, settings, now)  # guarded by _lock
        self._cohort: CohortLike[Any] | None = None  # the fan-out of the followed log; guarded by _lock
        self._guide: Guide | None = None  # asked at each key frame in which log to go on; guarded by _lock
        self._pending: list[Callable[[float], None]] | None = None  # for the owning thread; guarded by _lock
        self._close_reason: CloseReason | None = None  # set once, when the Sender is over; guarded by _lock
        self._close_details = ""  # guarded by _lock
        self._sends_after_close = 0  # guarded by _lock
        self._waiters: list[Callable[[bool], object]] | None = None  # see `when_drained`; guarded by _lock
        self._ledger: Ledger | None = None  # guarded by _lock
        self._episode: DropEpisode | None = None  # guarded by _lock
        if policy is not None:
            self._judgement.refuses(self._refused_locked(SendState.READY))

    # -- writing: the owning thread

    def flush(self) -> FlushResult:
        """Write what is queued, up to the budget of one turn. MORE: another flush was requested."""
        self._refuse_reentry("flush")
        try:
            with self._lock:
                now = self._host.now()
                self._run_pending_locked(now)
                if self._close_reason is not None:
                    return FlushResult.CLOSED
                self._review_locked(now, queued=True)
                result = self._flush_locked(now)
                self._check_control_locked()
                return result if self._is_open_locked() else FlushResult.CLOSED
        finally:
            if self._lock.calls:
                self._lock.make_calls()

    def take_turn(self) -> float:
        """Have a turn of the fan-out: write what is queued, also where the kernel has not asked for more.

        Return when the next turn is to come, in seconds; 0: with the next round; inf: when the kernel asks for more.
        """
        if HANDLERS:
            self._refuse_reentry("take_turn")
        try:
            with self._lock:
                now = self._host.now()
                if self._pending is not None:
                    self._run_pending_locked(now)
                if self._close_reason is not None:
                    return 0.0
                judgement = self._judgement
                judgement.meet_kernel_anew()
                if (plainly := self._turn_plainly_locked(now)) is not None:
                    return plainly
                self._review_locked(now, queued=True)
                result = self._flush_locked(now, in_turn=True)
                if self._outbox.backlog.control:
                    self._check_control_locked()
                if judgement.closing or self._core.slow_since is not None:
                    self._check_times_locked(now)
                next_at = judgement.turn_at(now)
                if next_at == inf and result is FlushResult.BLOCKED:
                    self._await_room_locked(now)
                return next_at
        finally:
            if self._lock.calls:
                self._lock.make_calls()

    def _turn_plainly_locked(self, now: float) -> float | None:
        """Give a viewer that lags what its kernel has room for, if that is all there is to be done.

        Most turns are such: it lagged before and lags on, far from its limits, and what comes next would be in time.
        Return as `take_turn`. None: there is more to be done than that, which `_flush_locked` does.
        """
        judgement, outbox, core = self._judgement, self._outbox, self._core
        slow, cursor = judgement.slow, outbox.cursor
        if slow is None or cursor is None or self._guide is not None or len(outbox.backlog):
            return None
        if cursor.joining_to is not None or cursor.values is not None or cursor.waited_too_long(now):
            return None
        if core.state is not SendState.OVERLOADED or judgement.far_load(now) is None:
            return None
        timing, settings = self._timing_locked(slow, now), judgement.settings
        if not slow.ahead_bytes or (slow.dry and self._host.strained()):
            return None
        full = taken = False
        while not (full or taken):
            budget = slow.budget_bytes(settings.turn_bytes)
            if not budget:  # it was given a turn for a key frame, and has all that it is to have
                taken = outbox.empty(with_log=True)
                break
            budget -= outbox.inflight_bytes
            written, refused, failure = outbox.write(
                self._transport, settings.turn_messages, budget, with_log=True, timing=timing, trail=slow.trail
            )
            if failure is not None:  # a socket tells it once, and EPIPE from then on
                self._account_write_locked(written, now, failure, blocked=False)
                return 0.0
            self._note_taken_locked(written, now)
            full, taken = slow.note_given(written, full=refused), outbox.empty(with_log=True)
            if not (written or full or taken):
                return None
            if not (full or taken):
                self._note_waiting_locked(slow, now)
                timing = self._timing_locked(slow, now)
        self._note_late_locked(slow, now)
        if taken and now >= judgement.held_until(slow):
            return None
        judgement.turned_plainly(refused=not taken)
        if not taken and slow.due(now, in_turn=True):
            self._sample_locked(now)
        next_at = judgement.turn_at(now)
        if next_at == inf:
            self._host.want_writable(True)
            if judgement.armed_at <= now:
                self._arm_locked(now)
        return next_at

    def _flush_locked(self, now: float, *, in_turn: bool = False) -> FlushResult:
        if self._judgement.blocked:
            return FlushResult.BLOCKED if self._goes_on_locked() else FlushResult.CLOSED
        result = FlushResult.CLOSED if self._close_reason is not None else self._write_locked(now)
        if result is FlushResult.BLOCKED:
            slow = self._judgement.slow
            if slow is not None and slow.due(now, in_turn=in_turn and self._judgement.lags()):
                self._sample_locked(now)
            if not in_turn:
                self._await_room_locked(now)
            return FlushResult.BLOCKED if self._is_open_locked() else FlushResult.CLOSED
        if result is FlushResult.MORE:
            if self._cohort is None or self._judgement.stands is _COHORT:
                self._host.request_flush()
            else:
                self._cohort.serve_in_turn(self)  # in turn with the other viewers
        return result if result is not FlushResult.DRAINED or self._goes_on_locked() else FlushResult.CLOSED

    def _await_room_locked(self, now: float) -> None:
        """Have the kernel tell when it takes more, and time what may come before; a turn to come sees to both."""
        if self._judgement.stands not in _TURN_COMES:
            self._host.want_writable(True)
            self._arm_locked(now)

    def writable(self) -> FlushResult:
        """Go on writing: the kernel can take more. Owning thread."""
        self._refuse_reentry("writable")
        with self._lock:
            now = self._host.now()
            self._judgement.kernel_asked(now)
            self._return_after_stall_locked(now)
            alone = self._cohort is not None and self._judgement.stands is not _COHORT
        self._host.want_writable(False)
        if not alone or self._cohort is None:
            return self.flush()
        # In turn with the other viewers: when a large key frame has filled the kernel's buffers for all of them, they
        # become writable together.
        self._cohort.serve_in_turn(self)
        return FlushResult.MORE

    def _write_locked(self, now: float) -> FlushResult:
        """Write until all is taken, EAGAIN, or the end of the turn; account, and tell the core."""
        self._lock.assert_owned()
        written, blocked, failure = self._write_turn_locked(now)
        return self._account_write_locked(written, now, failure, blocked=blocked)

    def _write_turn_locked(self, now: float) -> tuple[int, bool, OSError | None]:
        """Write for one turn; return as `Outbox.write`. For a viewer that lags, what is late is left out.

        It is given no more ahead than the kernel was told to take: that takes up to a segment of 64 KiB beyond.
        """
        if self._guide is not None:
            self._ask_guide_locked(self._guide, now)
        settings, outbox, slow = self._judgement.settings, self._outbox, self._judgement.slow
        if outbox.cursor is not None:
            self._judgement.note_offer(now)
        budget, with_log = settings.turn_bytes, self._judgement.stands is not _COHORT
        trail = slow.trail if slow is not None and with_log else None  # with a cohort, places are not all in the outbox
        if slow is None or not self._judgement.lags():
            return outbox.write(self._transport, settings.turn_messages, budget, with_log=with_log, trail=trail)
        timing = self._timing_locked(slow, now)
        cursor, cohort = outbox.cursor, self._cohort
        if slow.dry and cursor is not None and cohort is not None and self._host.strained():
            if self._judgement.far_behind(now):
                self._return_locked(now, "its turns came late, for this thread had no room")
            # One with a guide leaves the cohort at each key frame: rounds would bring it no further than to that.
            if self._guide is None and cohort.brings_on(cursor.entry) and self._takes_all_locked(cursor):
                own = min(outbox.own[0] - outbox.inflight_bytes, budget)
                return outbox.write(self._transport, settings.turn_messages, own, with_log=with_log, trail=trail)
        budget = slow.budget_bytes(budget)
        if not budget:
            return 0, not outbox.empty(with_log=with_log), None
        budget -= outbox.inflight_bytes
        written, blocked, failure = outbox.write(
            self._transport, settings.turn_messages, budget, with_log=with_log, timing=timing, trail=trail
        )
        self._note_late_locked(slow, now)  # without a rate too: a cut goes on through sound, so that nothing waits
        if slow.note_given(written, full=blocked) and failure is None and not outbox.empty(with_log=with_log):
            blocked = True  # for now; the kernel tells when it has sent half of it
        return written, blocked, failure

    def _note_late_locked(self, slow: SlowPeer, now: float) -> None:
        """Note what was left out for being late up to here, and of the pictures of late."""
        cursor = self._outbox.cursor
        if cursor is not None:
            self._judgement.note_pictures(slow, now)
            if (entry := slow.note_late(now, cursor.account.late)) is not None:
                self._add_to_ledger_locked(entry)

    def _offer_locked(self, now: float) -> None:
        """Write what waits for this peer alone until all of it is taken or EAGAIN, and go on as after a flush.

        The caller is on the owning thread, or no log is followed: then no other thread writes without this lock.
        """
        watched = self._judgement.blocked
        written, blocked, failure = self._write_turn_locked(now)
        if watched and blocked and not written:
            return  # as before: the owning thread watches the socket
        self._judgement.meet_kernel_anew()
        result = self._account_write_locked(written, now, failure, blocked=blocked)
        while result is FlushResult.MORE and len(self._outbox.backlog):
            result = self._write_locked(now)
        if result is FlushResult.BLOCKED:
            if self._host.in_thread():
                self._await_room_locked(now)
            elif not watched:
                self._judgement.meet_kernel_anew()  # on the owning thread, which watches the socket
                self._host.request_flush()
                self._arm_locked(now)
        elif result is not FlushResult.CLOSED:
            self._host.request_flush()

    def _note_taken_locked(self, written: int, now: float) -> None:
        if written:
            self._judgement.progress(now)
            self._host.wrote(written)
            if self._waiters:
                self._wake_waiters_locked()

    def _account_write_locked(self, written: int, now: float, failure: OSError | None, *, blocked: bool) -> FlushResult:
        """Account for a write that took `written` bytes and ended in EAGAIN, in `failure`, or in neither."""
        self._note_taken_locked(written, now)
        if failure is not None:
            self._broken_locked(failure)
            return FlushResult.CLOSED
        core, judgement = self._core, self._judgement
        if blocked:
            judgement.refused(now, written=written)
            self._leave_cohort_locked()
            self._note_waiting_locked(judgement.known_slow(now), now)
            if self._outbox.cursor is not None and self._outbox.cursor.log.latest is not None:
                self._open_episode_locked(now)  # values will be superseded meanwhile
            if not core.would_block or judgement.far_load(now) is None:
                load = self._uncrowded_locked(self._counted_locked(now, refused=True), now)
                if self._is_open_locked():
                    self._settle_locked(core.blocked(load, now), now)
            return FlushResult.CLOSED if self._close_reason is not None else FlushResult.BLOCKED
        if not judgement.empty:
            if self._outbox.waits_at_crossroads:
                return self._wait_at_crossroads_locked(now)
            judgement.left_over()
            if judgement.slow is not None:
                self._note_waiting_locked(judgement.slow, now)
            load = self._counted_locked(now)
            if not core.rises_to(load):  # what is left may never have been offered
                self._settle_locked(core.sent(load, now), now)
            return FlushResult.MORE if self._close_reason is None else FlushResult.CLOSED
        return self._all_taken_locked(now)

    def _all_taken_locked(self, now: float) -> FlushResult:
        core, judgement, cursor = self._core, self._judgement, self._outbox.cursor
        if judgement.counts_as_lagging(now):
            if judgement.far_load(now) is None:
                self._settle_locked(core.sent(self._counted_locked(now), now), now)
            if judgement.stands is _COHORT:  # else a turn is to come
                self._arm_locked(now)
            return FlushResult.DRAINED if self._close_reason is None else FlushResult.CLOSED
        if cursor is not None and judgement.joining:
            cursor.end_joining(DropReason.REFUSED, now)
        if judgement.keeps_up():
            self._host.limit_unsent(0 if cursor is None else cursor.log.fill_bytes)
        self._settle_locked(core.drained(now, self._counted_locked(now, refused=False)), now)
        self._close_episode_locked(now)
        return FlushResult.DRAINED

    # -- time and growth of the log: the owning thread

    def tick(self) -> None:
        """Judge age, stall and deadlines: time has passed. Owning thread."""
        with self._guarded("tick"), self._lock:
            if self._close_reason is not None:
                return
            now, judgement = self._host.now(), self._judgement
            judgement.armed(0.0)
            self._run_pending_locked(now)
            self._review_locked(now)
            if judgement.slow is not None and judgement.slow.due(now):
                self._sample_locked(now)
            self._check_times_locked(now)
            waits = judgement.blocked or judgement.stands in _TURN_COMES
            if not waits and (self._core.would_block or not judgement.empty):
                # Looking has queued something, the headers of a key frame, say; or it keeps up again.
                self._host.request_flush()

    def log_grew(self) -> tuple[int, int]:
        """Judge the load again because the followed log has grown, and return `next_crossing`. Owning thread."""
        if HANDLERS and get_ident() in HANDLERS:
            return 0, 0  # application code that a Sender calls has published something: look with the next message
        try:
            with self._lock:
                cursor = self._outbox.cursor
                if self._close_reason is not None or cursor is None:
                    return OFF_MARK, OFF_MARK
                now = self._host.now()
                self._review_locked(now, queued=True)
                self._arm_locked(now)
                return self._next_crossing_locked(now)
        finally:
            if self._lock.calls:
                self._lock.make_calls()

    def next_crossing(self) -> tuple[int, int]:
        """Return (offset, sequence) of the log before which to look is of no use. Owning thread, for the fan-out."""
        with self._lock:
            return self._next_crossing_locked(self._host.now())

    def _next_crossing_locked(self, now: float) -> tuple[int, int]:
        reach = self._judgement.reach
        if reach is None:
            return OFF_MARK, OFF_MARK
        far = self._judgement.far_load(now)
        return self._judgement.crossing_from(reach, Load(*far) if far else self._counted_locked(now))

    def _review_locked(self, now: float, *, queued: bool = False) -> None:
        """Act on what time and the growth of the log (`queued`) have changed since the last review."""
        cursor, judgement = self._outbox.cursor, self._judgement
        if cursor is not None and judgement.stands is not _COHORT:
            if cursor.poll(now, replace=self._core.state >= SendState.SOFT_LIMIT):
                self._open_episode_locked(now)
                load = self._uncrowded_locked(self._counted_locked(now), now)
                if self._is_open_locked():
                    self._settle_locked(self._core.dropped(load, now), now)
            if judgement.ends_joining(now):
                self._end_joining_locked(cursor, now)
            cursor.compact()
        if self._close_reason is not None or not (judgement.blocked or judgement.empty):
            return  # the kernel is about to be offered what waits: the write judges it
        core, load = self._core, self._counted_locked(now)
        if judgement.blocked and core.rises_to(load):
            self._offer_locked(now)  # it may take more by now and our thread be late to hear of it
            if not self._is_open_locked():
                return
            load = self._counted_locked(now)
        load = self._uncrowded_locked(load, now)
        if self._is_open_locked():
            self._settle_locked(core.queued(load, now) if queued else core.ticked(load, now), now)
        self._check_held_locked()

    def _check_times_locked(self, now: float) -> None:
        """End the connection where something has taken too long, else ask for the next tick, which is never now.

        Before the end, the kernel is asked once more. Our thread may have been held for as long, by a handler or a
        stopped process: a deadline is then looked at before the loop tells that there is room, or before a flush that
        was asked for.
        """
        if not self._goes_on_locked():
            return
        clocks = self._clocks_locked(now)
        overdue = self._judgement.overdue(clocks, now)
        if overdue is not None and not self._judgement.empty:
            self._offer_locked(now)
            if not self._goes_on_locked():
                return
            clocks = self._clocks_locked(now)
            overdue = self._judgement.overdue(clocks, now) if self._judgement.blocked else None
        if overdue is not None:
            self._fail_locked(*overdue)
            return
        # One that has passed, and ended nothing, is for the flush to go on from.
        when = min((when for when in clocks if when > now), default=inf)
        if when < inf and self._judgement.stands not in _TURN_COMES:
            self._host.set_deadline(when)

    def _arm_locked(self, now: float) -> None:
        """Ask for a tick at the earliest time at which something could change by time alone."""
        if self._goes_on_locked() and (when := self._clocks_locked(now).next_at) < inf:
            self._judgement.armed(when)
            self._host.set_deadline(when)

    def _end_joining_locked(self, cursor: LogCursor, now: float) -> None:
        """Treat a joiner as any other viewer from now on."""
        self._open_episode_locked(now)
        cursor.end_joining(DropReason.REFUSED, now)
        if self._cohort is not None:
            self._cohort.limits_changed(self)  # the cache counts as well, so that the next limit is nearer
        self._apply_mask_locked(now)  # from now on it is judged by the picture
        if self._core.state >= SendState.SOFT_LIMIT:
            self._thin_for_locked(self._core.state, now)

    # -- the fan-out: the owning thread

    @property
    def stands(self) -> Standing:
        """Where the viewer stands with its fan-out: see `flowctl.core.sending.contract`."""
        return self._judgement.stands

    def change_standing(self, new: Standing) -> None:
        """Take a step: see `flowctl.core.sending.contract`. Into the cohort and out of it under the lock.

        Those with which it comes and goes are taken here, those of its turns by the fan-out.
        """
        self._judgement.stand_at(new)

    @property
    def blocked(self) -> bool:
        """Whether the last write met EAGAIN and the kernel has not called back since."""
        return self._judgement.blocked

    @property
    def transport_send(self) -> Callable[[bytes], int]:
        """How the cohort writes to this viewer."""
        return self._transport.send

    def joins_cohort_at(self, tail: Entry) -> Entry | None:
        """Return from where on the cohort may serve this viewer, which is given all else. None: nowhere yet.

        That is `tail`, when it has caught up with that, or where it stands, if rounds bring it on from there.
        """
        with self._lock:
            cursor, outbox = self._outbox.cursor, self._outbox
            if cursor is None or self._judgement.blocked or not outbox.empty(with_log=False):
                return None
            cursor.settle()  # what it takes all of begins where it stands
            if not self._takes_all_locked(cursor):
                return None
            if cursor.stands_at(tail):
                return tail
            at, cohort = cursor.entry, self._cohort
            return at if cohort is not None and not cursor.copies and cohort.brings_on(at) else None

    def _takes_all_locked(self, cursor: LogCursor) -> bool:
        """Return whether it takes all from where it stands, and is not one to be cut again at once."""
        judgement = self._judgement
        return (
            cursor.plain
            and self._close_reason is None
            and not judgement.closing
            and judgement.stands is not _COHORT
            and not (self._core.would_block and judgement.cut_lately(self._host.now()))
        )

    def enter_cohort(self, place: Place) -> None:
        """The cohort writes the log for this viewer from now on; it shares `place`, which is where it stands."""
        with self._lock:
            cursor = self._outbox.cursor
            if cursor is not None:
                self.change_standing(_COHORT)
                cursor.enter(place)
                self._outbox.bytes_sent -= cursor.entry.offset  # added back when it is left, or asked for
                if self._core.would_block:
                    now = self._host.now()
                    self._judgement.progress(now)  # it had taken all that it was given
                    self._judgement.waits_for_us()
                    self._arm_locked(now)  # it counts as one that lags for a while

    def move_in_cohort(self, place: Place) -> None:
        """Share another place of the cohort at the same entry."""
        with self._lock:
            cursor = self._outbox.cursor
            if cursor is not None and self._judgement.stands is _COHORT:
                cursor.place = place

    def skip_in_cohort(self, place: Place, skipped: Tally, now: float, late_s: float) -> bool:
        """Go on at `place` and count `skipped` as left out; False: this viewer is to have it, late."""
        with self._lock:
            cursor, judgement = self._outbox.cursor, self._judgement
            if cursor is None or judgement.closing or not judgement.too_late(late_s):
                return False
            judgement.note_pictures(judgement.known_slow(now), now)  # what is left out from here on is in the share
            cursor.account.lost(DropReason.RETURNED).add_figures(skipped)
            cursor.place = place
            cursor.restarts += 1
            self._outbox.bytes_sent -= sum(skipped[CLASS_COUNT:])  # the place moves, and nothing is sent
            judgement.skipped(now, late_s)
            return True

    def leave_cohort(self, written: int) -> None:
        """Go on alone from where the cohort stands and `written` bytes on, which the kernel took. For the fan-out."""
        with self._lock:
            self._stand_alone_locked(written)

    def fill_as_log(self) -> None:
        """Have the kernel take as much ahead as the followed log says by now. For the fan-out."""
        with self._lock:
            if self._cohort is not None:
                self._set_fill_locked(self._cohort.log.fill_bytes)

    def suspend_following(self) -> None:
        """Leave the fan-out but keep the place in the log, to go on from there with another. Owning thread."""
        with self._guarded("suspend_following"), self._lock:
            self._exit_fanout_locked()

    def resume_following(self, cohort: CohortLike[Any]) -> None:
        """Go on where `suspend_following` left off; where `cohort` raises, another may be tried. New owning thread."""
        with self._guarded("resume_following"), self._lock:
            cursor = self._outbox.cursor
            if self._close_reason is not None or (self._judgement.closing and cursor is None):
                return  # over, or it was closing already when it was to follow
            if cursor is None or self._cohort is not None or cohort.log is not cursor.log:
                raise LocalProtocolError("a viewer can only be moved between fan-outs of the log it follows")
            self._enter_fanout_locked(cohort)

    def _enter_fanout_locked(self, cohort: CohortLike[Any]) -> None:
        """Be served by `cohort`; it is SUSPENDED where that raises."""
        self._cohort = cohort
        self.change_standing(Standing.QUEUED)
        if cohort.log.fill_bytes:
            self._set_fill_locked(cohort.log.fill_bytes)
        try:
            cohort.add(self)
        except BaseException:
            self._leave_fanout_locked()
            raise

    def _leave_fanout_locked(self) -> None:
        cohort = self._cohort
        if cohort is not None:
            self._leave_cohort_locked()
            cohort.remove(self)
            self._cohort = None
            self.change_standing(Standing.SUSPENDED)

    def _exit_fanout_locked(self) -> None:
        cohort = self._cohort
        if cohort is not None:
            self._leave_fanout_locked()
            self._judgement.meet_kernel_anew()
            if cohort.log.fill_bytes:
                self._set_fill_locked(0)

    def _leave_cohort_locked(self) -> None:
        """Leave the cohort, if in one, for reasons of our own."""
        if self._judgement.stands is _COHORT and self._cohort is not None:
            self._stand_alone_locked()
            self._cohort.serve_alone(self)

    def _stand_alone_locked(self, written: int = 0) -> None:
        """Go on with a cursor of our own, where the cohort stands, and `written` bytes on."""
        cursor, slow = self._outbox.cursor, self._judgement.slow
        if cursor is not None:
            if slow is not None:
                self._judgement.note_key(slow)
            cursor.place = Place(cursor.entry)
            self._outbox.bytes_sent += cursor.entry.offset
            self.change_standing(Standing.QUEUED)
            if written:
                now = self._host.now()
                self._judgement.note_offer(now)
                self._judgement.progress(now)
                self._outbox.consume_followed(written, None if slow is None else slow.trail)
            cursor.stand_alone()

    def _unfollow_locked(self, reason: DropReason) -> None:
        self._lock.assert_owned()
        self._exit_fanout_locked()
        self._judgement.leaves_log(self._now_locked())
        if self._episode is not None:
            self._episode.leave_log(self._judgement.pictures())
        self._guide = None
        self._outbox.unfollow(reason)
        if self._judgement.stands is Standing.SUSPENDED:
            self.change_standing(Standing.GONE)

    def _set_fill_locked(self, size_bytes: int) -> None:
        """Set how much the kernel takes ahead, unless it takes less because this peer lags, or nothing is late."""
        slow = self._judgement.slow
        judged = self._core.limits.target_delay_ms != 0 and self._judgement.patience != ENDLESS
        if judged and (slow is None or not slow.ahead_bytes):
            self._host.limit_unsent(size_bytes)

    # -- another log in place of the followed one: the owning thread

    @property
    def guided(self) -> bool:
        """Whether it may leave the followed log for another at the next key frame."""
        with self._lock:
            return self._guide is not None

    def set_guide(self, guide: Guide | None, *, everywhere: bool = False) -> None:
        """Ask `guide` at each key frame to come whether to go on in another log there; None: stay. Owning thread.

        It is forgotten once that has been done, and where no log is followed any more.

        Args:
            guide: see `flowctl.core.sending.contract`.
            everywhere: ask it at each picture instead; the viewer is in no cohort meanwhile.
        """
        with self._guarded("set_guide"), self._lock:
            cursor = self._outbox.cursor
            if cursor is None or self._judgement.closing:
                return
            waits, self._guide = self._outbox.waits_at_crossroads, guide
            cursor.crossroads = None if guide is None else cursor.crossroads or Crossroads()
            if cursor.crossroads is not None:
                cursor.crossroads.everywhere = everywhere
            if everywhere:
                self._leave_cohort_locked()
            if self._judgement.stands is _COHORT and self._cohort is not None:
                self._cohort.guide_changed(self)
            elif waits:
                self._host.request_flush()

    def switch(self, hop: Hop) -> None:
        """Go on in another log at once, instead of with what is queued of the followed one. Owning thread.

        A message in flight is finished, and nothing counts as dropped or as joining: accounts, age and what is known
        of a slow peer go on. Harmless where no log is followed, and between two fan-outs.

        Raises:
            LocalProtocolError: one of the two logs has keys.
            Exception: what the other fan-out raised; the connection is over then.
        """
        with self._guarded("switch"), self._lock:
            if self._cohort is not None and not self._judgement.closing:
                self._refuse_keys_locked(hop)
                now = self._host.now()
                self._hop_locked(hop, now)
                self._settle_locked(self._core.dropped(self._counted_locked(now), now), now)

    def _ask_guide_locked(self, guide: Guide, now: float) -> None:
        """Ask the guide where the cursor stands at crossroads."""
        cursor = self._outbox.cursor
        if cursor is None or cursor.crossroads is None or self._judgement.stands is _COHORT:
            return
        key, crossroads = cursor.at_crossroads(), cursor.crossroads
        if key is None:
            crossroads.waits = False  # what it waited before was left out meanwhile
            return
        answer = self._call_app_locked("choose_log", None, partial(self._answer_locked, guide, key))
        crossroads.waits = isinstance(answer, float)
        if isinstance(answer, float):
            self._host.set_deadline(answer)
        elif answer is None:
            crossroads.passed = key.sequence
        elif self._cohort is not None:
            self._hop_locked(answer, now)

    def _answer_locked(self, guide: Guide, key: Entry) -> Hop | float | None:
        self._lock.assert_owned()
        answer = guide.choose_log(key)
        if isinstance(answer, Hop):
            self._refuse_keys_locked(answer)
        return answer

    def _refuse_keys_locked(self, hop: Hop) -> None:
        if any(cohort is not None and cohort.log.latest is not None for cohort in (self._cohort, hop.cohort)):
            raise LocalProtocolError(
                "nobody is switched to a log with keys, or from one", hint="unfollow it, then follow the other"
            )

    def _hop_locked(self, hop: Hop, now: float) -> None:
        cursor = self._outbox.cursor
        if cursor is None or self._cohort is None:
            return
        self._guide = cursor.crossroads = None
        self._leave_fanout_locked()
        if hop.wait_for_key:
            self._open_episode_locked(now)
        try:
            go_on_in(cursor, hop.cohort.log, hop.start, hop.prefix, now, wait_for_key=hop.wait_for_key)
            self._add_to_ledger_locked(LedgerEntry(LedgerKind.SWITCH, now, hop.why, duration_s=hop.stayed_s))
            self._enter_fanout_locked(hop.cohort)
        except Exception as error:
            self._broken_locked(error)  # nothing would serve it
            raise

    def _wait_at_crossroads_locked(self, now: float) -> FlushResult:
        """Wait at crossroads until the guide decides; it is asked again in the next round, or when time is up.

        What waits is no sign of a slow peer, nor does the time say at what rate the peer takes.
        """
        self._judgement.waits_for_us()
        if self._core.would_block:
            self._settle_locked(self._core.sent(self._counted_locked(now), now), now)
        return FlushResult.DRAINED if self._close_reason is None else FlushResult.CLOSED

    # -- how the peer stands, for connection and samplers

    @property
    def host(self) -> SenderHost:
        """The thread and the connection it lives on."""
        return self._host

    @property
    def control_waits(self) -> bool:
        """Whether control messages wait: for the end of a message in flight, or for room in the kernel."""
        with self._lock:
            return bool(self._outbox.backlog.control)

    @property
    def pulse(self) -> int | None:
        """A number that stands still while nothing but the followed log is written to this peer, and all of that.

        None: the peer is, or was lately, in trouble, and nothing can be told without asking. Any thread, no lock.
        """
        return self._outbox.bytes_sent if self._judgement.slow is None else None

    def account(self, *, rows: bool = True) -> Account:
        """Return how it stands, at half of what `statistics` costs. Any thread.

        Args:
            rows: whether load, figures by class and place in the cohort are wanted too; without them it is a third.
        """
        if HANDLERS:
            self._refuse_reentry("account")
        with self._lock:
            judgement, now, kernel_bytes = self._judgement, 0.0, 0
            if rows or judgement.slow is not None:
                now, kernel_bytes = self._now_locked(), self._kernel_bytes_locked()
            return account_of(judgement, now, kernel_bytes, noted=self._ledger is not None, rows=rows)

    def behind_ms(self) -> float:
        """Return how old the oldest is that a slow peer has not taken, in ms, without a sample; else 0. Any thread."""
        self._refuse_reentry("behind_ms")
        with self._lock:
            return self._judgement.behind_ms(self._now_locked(), self._kernel_bytes_locked())

    def line_look(self) -> LineLook:
        """Return what is known now of the line to the peer, for the choice of what to follow. Any thread."""
        self._refuse_reentry("line_look")
        with self._lock:
            return line_look_of(self._judgement, self._now_locked(), self._host.kernel_bytes())

    def sample_delay(self, kernel_bytes: int | None = None) -> float:
        """Return how far behind the peer is, in ms, by a new sample; do on the owning thread what follows. Any thread.

        A slow peer is sampled by its own timer; this is for statistics, and for a sweep over healthy peers where the
        delay is the age axis. For a healthy one it costs next to nothing and keeps nothing: its delay is what its
        kernel holds over the rate of the stream. `kernel_bytes`: what the kernel holds. None: ask the host.
        """
        self._refuse_reentry("sample_delay")
        try:
            with self._lock:
                if self._close_reason is not None:
                    return 0.0
                now, judgement = self._host.now(), self._judgement
                waiting = self._host.kernel_bytes() if kernel_bytes is None else kernel_bytes
                if judgement.slow is None and (judgement.stands is _COHORT or not self._outbox.cursor):
                    return judgement.sample_healthy(now, waiting)
                slow = judgement.known_slow(now)
                self._sample_locked(now, waiting)
                if slow.by_delay and not self._foreign_thread_locked() and self._close_reason is None:
                    self._review_locked(now)
                    self._arm_locked(now)
                return slow.behind_ms
        finally:
            if self._lock.calls:
                self._lock.make_calls()

    def peer_acknowledged(self, total_bytes: int) -> None:
        """The peer's application says it has read `total_bytes` of all that was sent. Any thread.

        It makes the delay true for peers whose kernel takes far more than they read: see `DelayMeter`. A number that
        is higher than what was sent means all of it.
        """
        self._refuse_reentry("peer_acknowledged")
        with self._lock:
            judgement, now = self._judgement, self._host.now()
            if judgement.slow is not None or judgement.settings.age_from is AgeSource.DELAY:
                judgement.known_slow(now).delay.peer_acknowledged(now, total_bytes, judgement.bytes_sent)

    def unread_ledger(self) -> tuple[LedgerEntry, ...]:
        """Return the entries of the ledger since the last call. Any thread."""
        self._refuse_reentry("unread_ledger")
        with self._lock:
            return self._ledger.unread() if self._ledger else ()

    # -- the end

    def broken(self, error: Exception) -> None:
        """A write of the cohort failed, or a flush raised, which is a fault of ours: the connection is over."""
        if not isinstance(error, OSError):
            self._host.handler_failed("flush", error)
        with self._guarded("broken"), self._lock:
            self._broken_locked(error)

    @property
    def unfinished(self) -> bytes | memoryview:
        """What is left, at the end, of a message that the peer has begun to get; counted as dropped all the same."""
        with self._lock:
            return self._outbox.unfinished

    def let_go(self) -> None:
        """Forget host and frontend, for they hold this Sender: it is over, and its memory shall go with them.

        Everything may still be asked of it, and what is sent is refused as before. Owning thread, after `close`.
        """
        with self._lock:
            if self._close_reason is not None:
                self._host = NoHost(self._judgement.ended_at)
                self._frontend = self._pending = None
                self._outbox.unfinished = b""

    def _goes_on_locked(self) -> bool:
        """End a closing Sender that has nothing left to write, whatever emptied it; return whether it is open still.

        Asked wherever a Sender looks what comes next: after a write that drained it, on each tick, in `_arm_locked`,
        with which everything ends that drops something. What other threads have asked for is done before.
        """
        if self._judgement.closing and not self._pending and self._outbox.empty(with_log=True):
            self._fail_locked(CloseReason.FINISHED, "everything was sent")
        return self._close_reason is None

    def _check_control_locked(self) -> None:
        """End the connection for a control lane over its limit, if that is the peer's doing: the kernel refuses."""
        if self._core.would_block and (over := self._judgement.control_over()) is not None:
            self._fail_locked(CloseReason.LIMIT_HIT, over)

    def _check_held_locked(self) -> None:
        """End the connection where a held hard limit has let in more headers than the control lane may hold."""
        if self._close_reason is None and (over := self._judgement.held_over()) is not None:
            self._fail_locked(CloseReason.LIMIT_HIT, over)

    def _broken_locked(self, error: Exception) -> None:
        reset = isinstance(error, OSError) and error.errno in _RESET_ERRORS
        details = f"write failed: {error}" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        self._fail_locked(CloseReason.PEER_RESET if reset else CloseReason.INTERNAL, details)

    def _fail_locked(self, reason: CloseReason, details: str) -> None:
        """The one place where a Sender ends."""
        self._lock.assert_owned()
        if self._close_reason is not None:
            return
        now = self._host.now()
        self._close_reason, self._close_details = reason, details
        self._judgement.ended(now)
        self._open_episode_locked(now)
        self._unfollow_locked(DropReason.CLOSED)
        self._wake_waiters_locked()
        self._outbox.drop_everything(DropReason.CLOSED)
        self._close_episode_locked(now, force=True)
        self._add_to_ledger_locked(LedgerEntry(LedgerKind.CLOSE, now, details, reason=reason))
        self._host.terminate(reason, details)

    # -- edges and what follows from them

    def _settle_locked(self, change: StateChange | None, now: float) -> None:
        """Announce an edge, apply the policy, and go on until no further edge follows."""
        if change is None:
            return
        following: StateChange | None = change
        while following is not None:
            edge, following = following, None
            self._add_to_ledger_locked(LedgerEntry(LedgerKind.STATE, edge.at, "", change=edge))
            if (frontend := self._frontend) is not None:
                self._call_app_locked("send_state_changed", None, partial(frontend.send_state_changed, edge.new, edge))
            if self._core.final:
                self._fail_locked(CloseReason.HARD_LIMIT, describe_change(edge))
                return
            if edge.new > edge.old and not self._judgement.joining:
                thinned = self._thin_for_locked(edge.new, now)
                if self._close_reason is not None:
                    return  # what it dropped causes no edge any more
                if thinned:
                    following = self._core.dropped(self._counted_locked(now), now)
        self._apply_mask_locked(now)
        self._arm_locked(now)

    def _apply_mask_locked(self, now: float) -> None:
        """Put in force what the policy refuses in the present state."""
        held, judgement = self._core.state is SendState.HARD_LIMIT, self._judgement
        mask = DROPPABLE_MASK if held else self._refused_locked(self._core.state)
        if mask & BROKEN_MASK and not held and judgement.judges_pictures(mask):
            mask &= ~BROKEN_MASK | self._refused_locked(SendState.READY)  # what is late is judged by the picture
        if not judgement.refuses(mask):
            return
        if mask:
            self._open_episode_locked(now)
        cursor = self._outbox.cursor
        if cursor is not None:
            self._leave_cohort_locked()
            before = cursor.pictures()
            cursor.refuse(mask, DropReason.HELD if held else DropReason.REFUSED, now)
            after = cursor.pictures()
            if before != after:  # no share has the step that the counts make where none are wanted, or some again
                if judgement.slow is not None:
                    judgement.slow.pictures.forget()
                if self._episode is not None:
                    self._episode.skip(before, after)

    def _thin_for_locked(self, state: SendState, now: float) -> bool:
        """Thin the queue as the policy wants it in `state`; return whether that was tried.

        Up to SOFT_LIMIT the policy is not asked while what is late is left out by the picture: the sound in the queue
        is in time. At SOFT_LIMIT the queue gives up at once what will be late.
        """
        slow = self._judgement.lagging_peer(now) if state < SendState.HARD_LIMIT else None
        if slow is not None and self._judgement.judges_pictures(self._refused_locked(state)):
            if state < SendState.SOFT_LIMIT:
                return False
            timing = self._timing_locked(slow, now)
            if timing is not None:
                return self._outbox.cut_behind(timing)
            if slow.drain.takes(now):
                return False  # its rate is known soon, and the next sample asks again
        return self._thin_by_policy_locked(state, now)

    def _thin_by_policy_locked(self, state: SendState, now: float) -> bool:
        mode = self._call_app_locked("thin", Thin.NOTHING, partial(self._policy.thin, state))
        if mode is not Thin.NOTHING:
            self._thin_locked(mode, now, DropReason.THINNED)
        return mode is not Thin.NOTHING

    def _thin_locked(self, mode: Thin, now: float, reason: DropReason) -> None:
        self._open_episode_locked(now)
        self._leave_cohort_locked()
        before = self._judgement.oldest(now)
        self._outbox.thin(mode, self._core.limits, now, reason)
        self._wake_waiters_locked()
        self._judgement.thinned(now, before)

    def _uncrowded_locked(self, load: Load, now: float) -> Load:
        """Thin a queue that nears its hard marks though what is late is left out; return what counts then.

        Without this a burst of the publisher (see `timing.crowded`) would end the connections of its slow viewers.
        """
        judgement = self._judgement
        if not judgement.nears_hard(load, now) or not judgement.judges_pictures(
            self._refused_locked(SendState.SOFT_LIMIT)
        ):
            return load
        if self._thin_by_policy_locked(SendState.SOFT_LIMIT, now):
            load = self._counted_locked(now)
            self._settle_locked(self._core.dropped(load, now), now)
        return load

    # -- a peer that lags

    def _timing_locked(self, slow: SlowPeer, now: float) -> Timing | None:
        """Return by what messages are late, and have the kernel take as much ahead as follows from the peer's rate."""
        before, kernel_bytes = slow.ahead_bytes, self._host.kernel_bytes()
        strained = not kernel_bytes and self._host.strained()
        timing = self._judgement.timing(slow, now, kernel_bytes, strained=strained)
        if slow.ahead_bytes != before:
            self._host.limit_unsent(slow.ahead_bytes)
        if slow.ahead_bytes:
            self._open_episode_locked(now)
        return timing

    def _sample_locked(self, now: float, kernel_bytes: int | None = None) -> None:
        """Take a sample of a peer in trouble and do what follows from it."""
        judgement = self._judgement
        slow = judgement.slow
        if slow is None or self._close_reason is not None:
            return
        foreign = self._foreign_thread_locked()
        if foreign and slow.asked_too_soon(now):
            return
        judgement.sample(slow, now, self._host.kernel_bytes() if kernel_bytes is None else kernel_bytes)
        if not foreign:  # what follows happens on the owning thread
            cause = slow.why_return(now, max(now - judgement.oldest(now), 0.0) * 1000)
            if cause is not None and self._core.would_block:
                self._return_locked(now, cause)
            soft = self._core.state is SendState.SOFT_LIMIT and judgement.judges_pictures(judgement.mask)
            if soft and self._thin_for_locked(SendState.SOFT_LIMIT, now):
                # It has stalled since it got there, or more has come.
                self._settle_locked(self._core.dropped(self._counted_locked(now), now), now)
        judgement.forget_slow()

    def _return_after_stall_locked(self, now: float) -> None:
        """Skip what became old while the kernel took nothing, if that was for long; it takes something again."""
        limit_s = self._judgement.settings.return_after_s
        if limit_s and self._close_reason is None and (stalled_s := self._judgement.stalled_s(now)) >= limit_s:
            self._return_locked(now, f"it had taken nothing for {stalled_s:.1f} s")

    def _return_locked(self, now: float, cause: str) -> None:
        """Go to the newest key frame of the followed log, if there is one ahead, and say what that brought."""
        cursor = self._outbox.cursor
        if cursor is None or self._judgement.stands is _COHORT or self._judgement.closing:
            return
        before = self._judgement.oldest(now)
        self._open_episode_locked(now)
        skipped = self._outbox.skip_to_key(self._core.limits, now)
        self._apply_mask_locked(now)  # joining is over: from now on it is judged by the picture
        if not skipped:
            return
        removed_ms = max(self._judgement.oldest(now) - before, 0.0) * 1000
        self._add_to_ledger_locked(self._judgement.known_slow(now).note_return(now, removed_ms, cause))
        self._settle_locked(self._core.dropped(self._counted_locked(now), now), now)

    # -- what the judgement is told, and what it needs of the host

    def _counted_locked(self, now: float, limits: Limits | None = None, *, refused: bool | None = None) -> Load:
        """Return the load that counts against the limits."""
        load = self._judgement.counted(now, limits, refused=refused)
        return load if load.age_ms < _SURE_MS else self._judgement.excused(load, now, self._host.shared_stall())

    def _clocks_locked(self, now: float) -> Clocks:
        load = self._counted_locked(now)
        clocks = self._judgement.clocks(now, load)
        return self._judgement.clocks(now, load, self._host.shared_stall()) if clocks.run_out(now) else clocks

    def _kernel_bytes_locked(self) -> int:
        """Ask what the kernel holds, if anything depends on it."""
        return self._host.kernel_bytes() if self._judgement.measured else 0

    def _note_waiting_locked(self, slow: SlowPeer, now: float) -> None:
        if not slow.waited:
            self._judgement.note_waiting(slow, now, self._host.kernel_bytes(), strained=self._host.strained())
        self._judgement.note_pictures(slow, now)

    # -- who may call, and when

    @contextmanager
    def _guarded(self, method: str) -> Iterator[None]:
        """Refuse `method` within a handler; do what it put off once it has released the lock. Not for hot paths."""
        self._refuse_reentry(method)
        try:
            yield
        finally:
            if self._lock.calls:
                self._lock.make_calls()

    def _refuse_reentry(self, method: str) -> None:
        if HANDLERS and (where := HANDLERS.get(get_ident())) is not None:
            raise ReentryError(
                f"Sender.{method}() was called from {where}(), which may call no Sender",
                hint="schedule it on the connection's registration instead",
            )

    def _is_open_locked(self) -> bool:
        return self._close_reason is None

    def _foreign_thread_locked(self) -> bool:
        """Whether this thread must leave edges to the owning one."""
        return self._judgement.stands is not Standing.GONE and not self._host.in_thread()

    def _now_locked(self) -> float:
        """Return the time for what only looks; it stands still when the Sender has ended."""
        return min(self._host.now(), self._judgement.ended_at)

    def _leave_to_owner_locked(self, action: Callable[[float], None]) -> None:
        """Have `action` done by the owning thread, in the flush that it is asked for."""
        self._pending = [*(self._pending or ()), action]
        self._host.request_flush()

    def _run_pending_locked(self, now: float) -> None:
        """Run what other threads have asked for; after the end of the Sender there is nothing to run it on."""
        while self._pending and self._close_reason is None:
            action, *rest = self._pending
            self._pending = rest or None  # what is left of it keeps a closing Sender from its end
            action(now)
        self._pending = None

    # -- the application's code: its handler and its policy

    def _call_app_locked(self, where: str, default: _T, call: Callable[[], _T]) -> _T:
        """Call the application's code; `default` where it raises, which is reported when the lock is released.

        Whatever it raises, CancelledError and SystemExit too: half of an edge is worse than an exit that comes later.
        Meanwhile this thread may call no Sender.
        """
        thread = get_ident()
        HANDLERS[thread] = where
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - see above
            self._lock.postpone(partial(self._host.handler_failed, where, error))
            return default
        finally:
            HANDLERS.pop(thread, None)

    def _learn_patience_locked(self) -> None:
        """Ask the policy how long what is late is waited for; one that fails waits for everything."""
        self._judgement.policy_set(self._call_app_locked("patience", ENDLESS, partial(patience_of, self._policy)))

    def _refused_locked(self, state: SendState) -> int:
        """Ask the policy which classes it refuses in `state`; one that fails refuses nothing."""
        return self._call_app_locked("decide", 0, partial(refused_mask, self._policy, state))

    def _wake_waiters_locked(self) -> None:
        """Have the waiters called if there is nothing left to wait for; after what may have emptied the queue."""
        taken = self._outbox.own_taken
        if self._waiters and (taken or self._close_reason is not None):
            waiters, self._waiters = self._waiters, None
            for waiter in waiters:
                self._lock.postpone(partial(waiter, taken))

    # -- the ledger and episodes of drops

    def _add_to_ledger_locked(self, entry: LedgerEntry) -> None:
        if self._ledger is None:
            self._ledger = Ledger()
        self._ledger.add(entry)
        self._host.ledger_grew()

    def _open_episode_locked(self, now: float) -> None:
        if self._episode is None:
            self._episode = DropEpisode(now, self._outbox.dropped(), self._judgement.pictures(), self._judgement.slow)

    def _close_episode_locked(self, now: float, *, force: bool = False) -> None:
        """End the episode of drops once everything is accepted again; one entry of the ledger for all of it."""
        episode = self._episode
        if episode is None or ((self._judgement.mask or self._outbox.waiting_for_key) and not force):
            return
        self._episode = None
        entry = episode.end(now, self._outbox.dropped(), self._judgement.pictures(), self._judgement.slow)
        if entry is not None:
            self._add_to_ledger_locked(entry)
