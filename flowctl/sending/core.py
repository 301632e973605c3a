"""Inside of a Sender: what follows from an event, under the lock.

An event is shown to the `FlowCore`; the edge that comes out is announced, then the drop policy is applied, which may
cause the next edge. Here are also the writing itself, the timers, the ledger, and the one place where a Sender ends.
See `flowctl.sender` for the whole picture. Every method whose name ends in ``_locked`` needs the lock.
"""

from __future__ import annotations

import enum
import errno
from functools import partial
from math import inf
from operator import sub
from typing import Final

from flowctl.flow.ledger import LedgerEntry, LedgerKind, describe_change
from flowctl.flow.limits import OFF_MARK, Limits
from flowctl.flow.policy import BROKEN_MASK, DROPPABLE_MASK, DropPolicy, Thin, patience_of
from flowctl.flow.state import EMPTY_LOAD, Load, MessageClass, SendState, StateChange
from flowctl.flow.timing import ENDLESS, MOST_TARGET_S, Timing, crowded
from flowctl.flow.trouble import HEALTHY_MS, Trouble
from flowctl.outgoing.cursor import LogCursor
from flowctl.outgoing.outbox import write_one
from flowctl.outgoing.streamlog import Place
from flowctl.reasons import CloseReason, DropReason
from flowctl.sending.state import SenderState
from flowctl.sending.types import (
    AgeSource,
    SendOutcome,
    SendResult,
)
from flowctl.units import format_size


class FlushResult(enum.Enum):
    """How a flush ended: all taken, turn used up, kernel full, or connection over."""

    DRAINED = "drained"
    MORE = "more"
    BLOCKED = "blocked"
    CLOSED = "closed"


# By state: made once, and found without hashing.
ACCEPTED: Final = tuple(SendResult(SendOutcome.ACCEPTED, state) for state in SendState)
DROPPED: Final = tuple(SendResult(SendOutcome.DROPPED, state) for state in SendState)
CLOSED: Final = tuple(SendResult(SendOutcome.CLOSED, state) for state in SendState)
_RESET_ERRORS: Final = frozenset({errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED, errno.ETIMEDOUT})
_JOIN_CHECK_S: Final = 0.5
"""How often a joiner's load is compared: shorter than any group of pictures, longer than several flushes."""
_HOLD_S: Final = 2.0
"""So long after a picture was left out, and for two groups of pictures, a peer that has taken all is no healthy one."""
_KEY_POLL_S: Final = 0.25
"""How often a blocked viewer that waits for a key frame is looked after; the log's growth does it sooner."""


_LOOK_BYTES: Final = 512 * 1024
_LOOK_MESSAGES: Final = 1024
"""How much a log may grow before a lagging viewer is looked at even where it can reach no limit: what it holds of the
log is to be copied out in time (`LogCursor.compact`), and without limits, timers and video nothing else would come."""


class SenderCore(SenderState):
    """The rules of a Sender; `flowctl.sender.Sender` adds the public methods. Arguments as there."""

    __slots__ = ()

    # -- edges and what follows from them

    def _settle_locked(self, change: StateChange | None, now: float) -> None:
        """Announce an edge, apply the policy, and go on until no further edge follows."""
        if change is None:
            return
        following: StateChange | None = change
        while following is not None:
            edge, following = following, None
            self._announce_locked(edge)
            if self._core.final:
                self._fail_locked(CloseReason.HARD_LIMIT, describe_change(edge))
                return
            if edge.new > edge.old and not self._joining_locked():
                thinned = self._thin_for_locked(edge.new, now)
                if self._close_reason is not None:
                    return  # what it dropped is no edge: nobody would be told of it
                if thinned:
                    following = self._core.dropped(self._counted_locked(now), now)
        self._apply_mask_locked(now)
        self._arm_locked(now)

    def _open_locked(self) -> bool:
        return self._close_reason is None

    def _timing_locked(self, trouble: Trouble, now: float) -> Timing | None:
        """Return by what of the followed log is late for a peer that lags; None: nothing is."""
        raise NotImplementedError

    def _announce_locked(self, change: StateChange) -> None:
        self._note_locked(LedgerEntry(LedgerKind.STATE, change.at, "", change=change))
        frontend = self._frontend
        if frontend is not None:
            self._ask_locked("send_state_changed", None, partial(frontend.send_state_changed, change.new, change))

    def _thin_for_locked(self, state: SendState, now: float) -> bool:
        """Thin the queue as the policy wants it in `state`; return whether that was tried.

        Up to SOFT_LIMIT the policy is not asked while what is late is left out by the picture: the sound in the queue
        is in time. At SOFT_LIMIT the queue gives up at once what will be late. A peer that takes nothing is not judged
        by that, nor is anybody while our own thread is late.
        """
        trouble = self._trouble
        if trouble is not None and state < SendState.HARD_LIMIT and self._lags_locked():
            stands = trouble.drain.stalled(now) or self._host.strained()
            if not stands and self._judges_pictures_locked(self._refused_locked(state)):
                if state < SendState.SOFT_LIMIT:
                    return False
                timing = self._timing_locked(trouble, now)
                if timing is not None:
                    return self._outbox.cut_behind(timing)
                if trouble.drain.takes(now):
                    return False  # its rate is known soon, and the next sample asks again
        mode = self._ask_locked("thin", Thin.NOTHING, partial(self._policy.thin, state))
        if mode is Thin.NOTHING:
            return False
        self._thin_locked(mode, now, DropReason.THINNED)
        return True

    def _thin_locked(self, mode: Thin, now: float, reason: DropReason) -> None:
        """Thin what is queued by `mode`."""
        self._open_episode_locked(now)
        self._leave_locked()
        before = self._oldest_locked(now)
        self._outbox.thin(mode, self._core.limits, now, reason)
        self._wake_locked()
        removed_ms = (self._oldest_locked(now) - before) * 1000
        if removed_ms > 0:
            if self._trouble is None:
                self._trouble = Trouble()
            self._trouble.delay_removed_ms += removed_ms

    def _apply_mask_locked(self, now: float) -> None:
        """Put in force what the policy refuses in the present state."""
        held = self._core.state is SendState.HARD_LIMIT
        mask = DROPPABLE_MASK if held else self._refused_locked(self._core.state)
        if mask & BROKEN_MASK and not held and self._judges_pictures_locked(mask):
            mask &= ~BROKEN_MASK | self._refused_locked(SendState.READY)  # what is late is judged by the picture
        if held and self._held is None:
            self._held = self._undroppable_locked()
        elif not held:
            self._held = None
        if mask == self._mask:
            return
        self._mask = mask
        if mask:
            self._open_episode_locked(now)
        cursor = self._outbox.cursor
        if cursor is not None:
            self._leave_locked()
            before = cursor.pictures()
            cursor.refuse(mask, DropReason.HELD if held else DropReason.REFUSED, now)
            self._pictures_wanted_locked(before, cursor.pictures())

    def _look_locked(self, now: float, *, queued: bool = False) -> None:
        """Notice what time and the growth of the log (`queued`) have changed since the last look."""
        cursor = self._outbox.cursor
        if cursor is not None and not self._member:
            if cursor.poll(now, replace=self._core.state >= SendState.SOFT_LIMIT):
                self._open_episode_locked(now)
                self._settle_locked(self._core.dropped(self._counted_locked(now), now), now)
            self._check_joining_locked(cursor, now)
            cursor.compact()
        if self._close_reason is not None or not (self._blocked or self._outbox.empty(with_log=not self._member)):
            return  # the kernel is about to be offered what waits: the write judges it
        core, load = self._core, self._counted_locked(now)
        if self._blocked and core.rises_to(load):
            self._offer_locked(now)  # it may take more by now and our thread be late to hear of it
            if not self._open_locked():
                return
            load = self._counted_locked(now)
        load = self._uncrowded_locked(load, now)
        if self._open_locked():
            self._settle_locked(core.queued(load, now) if queued else core.ticked(load, now), now)
        self._check_held_locked()

    def _uncrowded_locked(self, load: Load, now: float) -> Load:
        """Thin a queue that nears its hard marks though what is late is left out; return what counts then.

        Without this a burst of the publisher (see `timing.crowded`) would end the connections of its slow viewers.
        """
        core, trouble = self._core, self._trouble
        if (
            not crowded(core.limits, load)
            or core.state is SendState.HARD_LIMIT
            or (trouble is not None and trouble.drain.stalled(now))
            or not self._judges_pictures_locked(self._refused_locked(SendState.SOFT_LIMIT))
        ):
            return load
        mode = self._ask_locked("thin", Thin.NOTHING, partial(self._policy.thin, SendState.SOFT_LIMIT))
        if mode is not Thin.NOTHING:
            self._thin_locked(mode, now, DropReason.THINNED)
            load = self._counted_locked(now)
            self._settle_locked(core.dropped(load, now), now)
        return load

    def _queue_locked(
        self, data: bytes, message_class: MessageClass, now: float, *, droppable: bool | None
    ) -> SendResult:
        """Queue a message, unless the policy refuses it; before a mark is judged, offer what waits."""
        self._lock.assert_owned()
        core, backlog = self._core, self._outbox.backlog
        foreign = self._cohort is not None and self._foreign_locked()
        full = foreign and core.reaches_hard(backlog.size_bytes, len(backlog))
        mask, held = self._mask, self._held is not None
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
        if not self._blocked:
            self._host.request_flush()
        elif len(backlog) == 1:
            self._arm_locked(now)  # the first message to wait behind EAGAIN starts the clocks
        return ACCEPTED[core.state]

    def _judge_own_locked(self, now: float) -> None:
        """Judge what `send` has queued. Before a mark is judged on it, it is offered to the kernel."""
        self._lock.assert_owned()
        core, backlog = self._core, self._outbox.backlog
        due = self._control_over_locked()
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
        reason, details = CloseReason.HARD_LIMIT, "another thread queued what may not be dropped beyond the hard limit"
        control = message_class is MessageClass.CONTROL
        if control:
            reason, details = CloseReason.LIMIT_HIT, self._control_words_locked()
        self._host.request_flush()
        if self._control_over_locked() if control else full:
            self._closing = True
            self._pending = [*(self._pending or ()), lambda _: self._fail_locked(reason, details)]
            return CLOSED[self._core.state]
        return ACCEPTED[self._core.state]

    def _offer_locked(self, now: float) -> None:
        """Write what waits for this peer alone until all of it is taken or EAGAIN, and go on as after a flush.

        The caller is on the owning thread, or no log is followed: then nobody writes without this lock.
        """
        watched = self._blocked
        written, blocked, failure = self._put_locked(now)
        if watched and blocked and not written:
            return  # as before: the owning thread watches the socket
        self._blocked = False
        result = self._wrote_locked(written, now, failure, blocked=blocked)
        while result is FlushResult.MORE and len(self._outbox.backlog):
            result = self._write_locked(now)
        if result is FlushResult.BLOCKED:
            if self._host.in_thread():
                self._host.want_writable(True)
            elif not watched:
                self._blocked = False  # the owning thread must meet EAGAIN itself, to watch the socket
                self._host.request_flush()
            self._arm_locked(now)
        elif result is not FlushResult.CLOSED:
            self._host.request_flush()

    def _next_crossing_locked(self, now: float) -> tuple[int, int]:
        """Where in the log to look again, as (offset, sequence): where the next limit can be reached, or before."""
        cursor = self._outbox.cursor
        if cursor is None or not self._lagging:
            return OFF_MARK, OFF_MARK
        tail = cursor.log.tail  # read first: what is published meanwhile makes the answer too early, never too late
        load = self._counted_locked(now)
        size_mark, messages_mark, _ = self._core.marks_above(load)
        offset, sequence = tail.offset + _LOOK_BYTES, tail.sequence + _LOOK_MESSAGES
        if size_mark < OFF_MARK:
            # Bytes and overhead add up to the mark, so one of the two has to grow by half of the gap at least.
            half = max((size_mark - load.size_bytes) // 2, 1)
            overhead = self._core.limits.overhead_bytes
            offset = min(offset, tail.offset + half)
            sequence = min(sequence, tail.sequence + max(half // overhead, 1)) if overhead else sequence
        if messages_mark < OFF_MARK:
            sequence = min(sequence, tail.sequence + max(messages_mark - load.messages, 1))
        return offset, sequence

    # -- writing

    def _write_locked(self, now: float) -> FlushResult:
        """Write until all is taken, EAGAIN, or the end of the turn; account, and tell the core."""
        self._lock.assert_owned()
        written, blocked, failure = self._put_locked(now)
        return self._wrote_locked(written, now, failure, blocked=blocked)

    def _put_locked(self, now: float) -> tuple[int, bool, OSError | None]:
        """Write for one turn; return as `Outbox.write`. For a viewer that lags, what is late is left out.

        It is given no more ahead than the kernel was told to take: that takes up to a segment of 64 KiB beyond.
        """
        settings, outbox, trouble = self._settings, self._outbox, self._trouble
        budget, with_log = settings.turn_bytes, not self._member
        if trouble is None or not self._lags_locked():
            return outbox.write(self._transport, settings.turn_messages, budget, with_log=with_log)
        timing = self._timing_locked(trouble, now)
        paced = trouble.ahead_bytes > 0
        if paced:
            budget = min(budget, max(trouble.allowed_bytes, 1))
        written, blocked, failure = outbox.write(
            self._transport, settings.turn_messages, budget, with_log=with_log, timing=timing
        )
        # Without a rate too: a cut goes on through sound that a line carries with ease, so that nothing waits.
        if outbox.cursor is not None and trouble.note_late(now, outbox.cursor.late):
            rate = format_size(int(trouble.drain.rate or 0))
            self._note_locked(LedgerEntry(LedgerKind.LATE, now, f"pictures would be late; it takes {rate}/s"))
        if paced:
            trouble.allowed_bytes -= written
            if trouble.allowed_bytes <= 0 and failure is None and not outbox.empty(with_log=with_log):
                blocked = True  # for now; the kernel tells when it has sent half of it
        return written, blocked, failure

    def _patience_locked(self) -> tuple[float, ...]:
        """Return the policy's patience, by class; it is asked once."""
        if self._patience is None:
            self._patience = self._ask_locked("patience", ENDLESS, partial(patience_of, self._policy))
        return self._patience

    def _judges_pictures_locked(self, refused: int) -> bool:
        """Whether what is late is left out, by the picture, so that the state need not refuse pictures.

        Not where key frames are among the classes that are `refused`: none would end a cut, so nothing is cut.
        """
        return (
            not refused >> MessageClass.KEY & 1
            and self._lags_locked()
            and self._patience_locked()[MessageClass.INTER] < inf
        )

    def _lags_locked(self) -> bool:
        """Whether this peer lags behind a log that it follows, and its limits and its policy leave out what is late."""
        cursor = self._outbox.cursor
        return (
            self._core.would_block
            and self._core.limits.target_delay_ms != 0
            and cursor is not None
            and not self._member
            and cursor.joining_to is None
            and not self._closing
            and self._patience_locked() != ENDLESS
        )

    def _wrote_locked(self, written: int, now: float, failure: OSError | None, *, blocked: bool) -> FlushResult:
        """Account for a write that took `written` bytes and ended in EAGAIN, in `failure`, or in neither."""
        if written:
            self._progress_locked(now)
            self._host.wrote(written)
            if self._waiters:
                self._wake_locked()
        if failure is not None:
            self._broken_locked(failure)
            return FlushResult.CLOSED
        core, outbox = self._core, self._outbox
        if blocked:
            if not written and not self._waits_locked():
                self._progress_at = now  # a stall begins with the first write that is refused, not with the last taken
            self._blocked = self._lagging = True
            self._leave_locked()
            if self._trouble is None:
                self._trouble = Trouble()
            self._began_to_wait_locked(self._trouble, now)
            load = self._uncrowded_locked(self._counted_locked(now, refused=True), now)
            if self._open_locked():
                self._settle_locked(core.blocked(load, now), now)
            return FlushResult.CLOSED if self._close_reason is not None else FlushResult.BLOCKED
        if not outbox.empty(with_log=not self._member):
            self._lagging = True
            if self._trouble is not None:
                self._began_to_wait_locked(self._trouble, now)
            load = self._counted_locked(now)
            if not core.rises_to(load):  # what is left may never have been offered
                self._settle_locked(core.sent(load, now), now)
            return FlushResult.MORE if self._close_reason is None else FlushResult.CLOSED
        return self._took_all_locked(now)

    def _took_all_locked(self, now: float) -> FlushResult:
        """Go on after a write that left nothing."""
        core, outbox = self._core, self._outbox
        self._progress_locked(now)
        trouble = self._trouble
        if trouble is not None:
            trouble.waited = False
            if now < self._held_until_locked(trouble):
                self._settle_locked(core.sent(self._counted_locked(now), now), now)
                self._arm_locked(now)
                return FlushResult.DRAINED if self._close_reason is None else FlushResult.CLOSED
            trouble.cutting = False
            if trouble.ahead_bytes:
                trouble.ahead_bytes = 0
                self._host.limit_unsent(0)
        self._lagging = False
        cursor = outbox.cursor
        if cursor is not None and not self._member and cursor.joining_to is not None:
            cursor.end_joining(DropReason.REFUSED, now)
        self._forget_joining_locked()
        rest = EMPTY_LOAD
        if trouble is not None:
            if self._settings.age_from is AgeSource.DELAY:
                rest = self._counted_locked(now, refused=False)
            elif trouble.harmless:
                self._trouble = None
        self._settle_locked(core.drained(now, rest), now)
        self._close_episode_locked(now)
        return FlushResult.DRAINED

    def _began_to_wait_locked(self, trouble: Trouble, now: float) -> None:
        """Something is left after a write: from now on, what the peer takes tells its rate."""
        if not trouble.waited:
            if trouble.drain.sampled_at < now:  # else it was before the write
                trouble.drain.sample(now, self._bytes_sent_locked() - self._host.kernel_bytes(), waited=False)
            trouble.waited = True
        self._note_pictures_locked(trouble, now)  # there need be no timer that does

    def _held_until_locked(self, trouble: Trouble) -> float:
        """Return until when this peer counts as one that lags although all is taken: pictures were left out lately.

        It is served whole meanwhile. READY would say that it keeps up, and the cohort gives the kernel too much ahead.
        """
        cursor = self._outbox.cursor
        if cursor is None or self._closing:
            return 0.0
        return trouble.left_out_at + min(max(_HOLD_S, 2 * cursor.log.gop_duration_s), 2 * MOST_TARGET_S)

    def _send_now_locked(self, data: bytes, message_class: MessageClass, now: float) -> SendResult:
        """Immediate mode with nothing queued: write in the caller's thread."""
        self._lock.assert_owned()
        written, blocked, failure = write_one(self._transport, data)
        self._outbox.put_in_flight(data, message_class, now, written)
        if written == len(data) and self._core.state is SendState.READY and self._episode is None:
            # Nothing was wrong and nothing is: what follows from a drained queue is known without looking.
            self._progress_at = now
            self._host.wrote(written)
            return ACCEPTED[SendState.READY]
        result = self._wrote_locked(written, now, failure, blocked=blocked)
        if result is FlushResult.BLOCKED:
            self._blocked = False  # the owning thread must meet EAGAIN itself, to watch the socket
            self._host.request_flush()
        return (CLOSED if result is FlushResult.CLOSED else ACCEPTED)[self._core.state]

    # -- the cohort

    def _leave_locked(self) -> None:
        """Leave the cohort, if in one, with the cursor where the cohort stands."""
        cohort, cursor = self._cohort, self._outbox.cursor
        if cohort is not None and cursor is not None and self._member:
            cursor.place = Place(cursor.entry)
            self._outbox.bytes_sent += cursor.entry.offset
            self._member = False
            cohort.left(self._sender)

    def _unfollow_locked(self, reason: DropReason) -> None:
        self._lock.assert_owned()
        cohort = self._cohort
        if cohort is not None:
            self._leave_locked()
            cohort.remove(self._sender)
            self._cohort = None
        if self._trouble is not None:
            self._trouble.last_share = self._picture_share_locked()
            self._trouble.forget_pictures()
        self._keep_pictures_locked()
        self._outbox.unfollow(reason)

    # -- times

    def _check_joining_locked(self, cursor: LogCursor, now: float) -> None:
        """A joiner stops being one when it has taken the cache, or is old enough and its load no longer falls."""
        if cursor.joining_to is None:
            return
        age_limits = self._core.limits.age_ms
        grace_s = (age_limits.low or 0) / 1000 if age_limits.on else self._settings.join_grace_s
        load = self._outbox.joining_load_bytes
        checked = self._joined_check
        slow = False
        if checked is None or now - cursor.joined_at <= grace_s:
            self._joined_check = (now, load)
        elif now - checked[0] >= _JOIN_CHECK_S:
            self._joined_check = (now, load)
            slow = load >= checked[1]
        if slow or (self._lagging and self._outbox.cache_taken):
            self._open_episode_locked(now)
            cursor.end_joining(DropReason.REFUSED, now)
            self._apply_mask_locked(now)  # from now on it is judged by the picture
            if self._core.state >= SendState.SOFT_LIMIT:
                self._thin_for_locked(self._core.state, now)

    def _forget_joining_locked(self) -> None:
        """Everything is taken: give back what was measured of a joiner while it took the cache, if it went well.

        The kernel refuses nearly every joiner something, as the cache comes at once. That is no sign of a slow link,
        and must not cost a healthy viewer meters and timers.
        """
        joined, self._joined_check = self._joined_check is not None, None
        trouble = self._trouble
        if joined and trouble is not None and trouble.harmless and self._core.state < SendState.SOFT_LIMIT:
            by_delay = self._settings.age_from is AgeSource.DELAY
            if not (by_delay and (trouble.delay.told or trouble.delay_ms >= HEALTHY_MS)):
                self._trouble = None

    def _check_times_locked(self, now: float) -> None:
        """End the connection where something has taken too long. Before that, the kernel is asked once more.

        Our thread may have been held for as long, by a handler or a stopped process: a deadline is then looked at
        before the loop tells that there is room, or before a flush that was asked for.
        """
        overdue = self._overdue_locked(now) if self._close_reason is None else None
        if overdue is not None and not self._outbox.empty(with_log=not self._member):
            self._offer_locked(now)
            overdue = self._overdue_locked(now) if self._open_locked() and self._blocked else None
        if overdue is not None:
            self._fail_locked(*overdue)

    def _overdue_locked(self, now: float) -> tuple[CloseReason, str] | None:
        """Return what has taken too long, as reason and details of the end. None: nothing has."""
        settings, core = self._settings, self._core
        stalled_s = now - self._stalled_since_locked(now)
        soft_s = now - core.slow_since if core.slow_since is not None else 0.0
        if (
            self._close_deadline is not None
            and now >= self._close_deadline
            and (self._blocked or not self._outbox.empty(with_log=not self._member))  # else it is for a flush to end
        ):
            limit = settings.close_deadline_s
            return CloseReason.STUCK, f"not everything was taken within {limit:g} s after closing began"
        if core.would_block and 0 < settings.stuck_s <= stalled_s:
            limit = settings.stuck_s
            return CloseReason.STUCK, f"the kernel took nothing for {stalled_s:.1f} s, the limit is {limit:g} s"
        if core.slow_since is not None and 0 < settings.soft_too_long_s <= soft_s:
            limit = settings.soft_too_long_s
            return CloseReason.SOFT_TOO_LONG, f"at or above SOFT_LIMIT for {soft_s:.1f} s, the limit is {limit:g} s"
        return None

    def _arm_locked(self, now: float) -> None:
        """Ask for a tick at the earliest time at which something could change by time alone."""
        if self._close_reason is not None:
            return
        settings, core, outbox = self._settings, self._core, self._outbox
        times = [self._close_deadline] if self._close_deadline is not None else []
        if core.would_block:
            load = self._counted_locked(now)
            age_mark = core.marks_above(load)[2]
            if age_mark < OFF_MARK and (load.messages or outbox.cursor is not None):
                # Who follows a log also where thinning has emptied the queue: what comes next is as old in that time,
                # and nobody looks at a viewer because a single message came. Without a log, the next message that is
                # queued asks for this by itself. A delay does not grow by waiting, only by the next sample.
                least_ms = 1.0 if settings.age_from is AgeSource.QUEUE else 50.0
                times.append(now + max(age_mark - load.age_ms, least_ms) / 1000)
            if settings.stuck_s and (outbox.cursor is not None or self._load_locked(now).messages):
                times.append(self._stalled_since_locked(now) + settings.stuck_s)
            if self._joining_locked():
                times.append(now + _JOIN_CHECK_S)
            elif outbox.waiting_for_key:
                times.append(now + _KEY_POLL_S)
        if settings.soft_too_long_s and core.slow_since is not None:
            times.append(core.slow_since + settings.soft_too_long_s)
        trouble = self._trouble
        if trouble is not None and core.would_block and (until := self._held_until_locked(trouble)) > now:
            times.append(until)
        if trouble is not None and (
            (core.would_block and (settings.steers or self._lags_locked()))
            or (
                settings.age_from is AgeSource.DELAY
                and (trouble.delay_ms >= HEALTHY_MS or core.state >= SendState.SOFT_LIMIT)
            )
        ):
            times.append(max(trouble.acted_at, now - settings.sample_s) + settings.sample_s)
        if times:
            self._host.set_deadline(min(times))

    # -- limits and the end

    def _control_over_locked(self) -> bool:
        """Whether the control lane holds more than it may."""
        backlog, settings = self._outbox.backlog, self._settings
        return backlog.control_bytes > settings.control_bytes or (
            backlog.control is not None and len(backlog.control) > settings.control_messages
        )

    def _check_control_locked(self) -> None:
        """End the connection for a control lane over its limit, if that is the peer's doing: the kernel refuses."""
        if self._core.would_block and self._control_over_locked():
            self._fail_locked(CloseReason.LIMIT_HIT, self._control_words_locked())

    def _check_held_locked(self) -> None:
        """End the connection where a held hard limit has let in more headers than the control lane may hold.

        Nothing else bounds them then: they are never refused, so that whoever recovers can decode what comes.
        """
        if self._held is None or self._close_reason is not None:
            return
        messages, size_bytes = map(sub, self._undroppable_locked(), self._held)
        settings = self._settings
        if messages > settings.control_messages or size_bytes > settings.control_bytes:
            self._fail_locked(
                CloseReason.LIMIT_HIT,
                f"since the hard limit is held, {size_bytes} bytes in {messages} headers and control messages wait, "
                f"the limit is {settings.control_bytes} bytes, {settings.control_messages} messages",
            )

    def _control_words_locked(self) -> str:
        backlog, settings = self._outbox.backlog, self._settings
        return (
            f"control lane holds {backlog.control_bytes} bytes in {len(backlog.control or ())} messages, "
            f"the limit is {settings.control_bytes} bytes, {settings.control_messages} messages"
        )

    def _set_limits_locked(self, limits: Limits, now: float) -> None:
        self._lock.assert_owned()
        self._note_locked(LedgerEntry(LedgerKind.LIMITS, now, str(limits)))
        core = self._core
        if not (self._blocked or self._outbox.empty(with_log=False)):
            self._offer_locked(now)
            if self._close_reason is not None:
                return
        self._settle_locked(core.limits_set(limits, self._counted_locked(now, limits), now), now)
        if self._open_locked():
            self._apply_mask_locked(now)  # there may be a target delay now, or none any more
        if core.final:  # without an edge where a held hard limit was made a final one; the first reason counts
            self._fail_locked(CloseReason.HARD_LIMIT, "the hard limit is reached and no longer held")
        self._arm_locked(now)
        if self._cohort is not None:
            self._cohort.limits_changed(self._sender)

    def _set_policy_locked(self, policy: DropPolicy, now: float) -> None:
        self._lock.assert_owned()
        self._policy = policy
        self._patience = None
        self._apply_mask_locked(now)
        self._arm_locked(now)

    def _thin_request_locked(self, mode: Thin, now: float) -> None:
        self._lock.assert_owned()
        self._thin_locked(mode, now, DropReason.REQUESTED)
        self._settle_locked(self._core.dropped(self._counted_locked(now), now), now)
        self._close_episode_locked(now)
        self._arm_locked(now)  # a wait for a key frame may have begun without an edge

    def _stop_following_locked(self, now: float) -> None:
        self._lock.assert_owned()
        cursor = self._outbox.cursor
        if cursor is not None:
            self._leave_locked()
            cursor.finish(now)

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
        self._closing = True
        self._close_reason, self._close_details = reason, details
        self._progress_locked(now)  # from here on it says when the Sender ended
        self._open_episode_locked(now)
        self._unfollow_locked(DropReason.CLOSED)
        self._wake_locked()
        self._outbox.drop_everything(DropReason.CLOSED)
        self._close_episode_locked(now, force=True)
        self._note_locked(LedgerEntry(LedgerKind.CLOSE, now, details, reason=reason))
        self._host.terminate(reason, details)
