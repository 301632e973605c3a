"""What a Sender holds, and what follows from it without changing anything but the ledger; under the lock.

The rules are in `flowctl.sending.core`, the public methods in `flowctl.sender`. Every method whose name ends in
``_locked`` needs the lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import add, sub
from threading import get_ident
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, cast

from flowctl.errors import ReentryError
from flowctl.flow.counts import Counts
from flowctl.flow.ledger import Ledger, LedgerEntry, LedgerKind, difference
from flowctl.flow.limits import NO_LIMITS, Limits
from flowctl.flow.policy import DropPolicy, KeepAll, refused_mask
from flowctl.flow.state import EMPTY_LOAD, FlowCore, Load, MessageClass, SendState
from flowctl.flow.trouble import Trouble
from flowctl.loop.faults import as_exception, log_error, report
from flowctl.loop.locks import HANDLERS, OwnedLock
from flowctl.outgoing.outbox import Outbox
from flowctl.outgoing.streamlog import Entry
from flowctl.outgoing.transport import Transport
from flowctl.reasons import CloseReason, DropReason
from flowctl.sending.types import Account, AgeSource, CohortLike, Frontend, SenderHost, SenderSettings

if TYPE_CHECKING:
    from flowctl.sender import Sender

_DEFAULT_SETTINGS: Final = SenderSettings()
_KEEP_ALL: Final = KeepAll()
_T = TypeVar("_T")


class Before(NamedTuple):
    """What there was when an episode of drops began.

    Attributes:
        at: when it began, in seconds.
        dropped: what had been dropped, by reason.
        delay_removed_ms: see `Trouble`.
        waited_s: see `DrainMeter`.
        pictures: see `LogCursor.pictures`; less those of the logs that were followed since and are not any more.
    """

    at: float
    dropped: dict[DropReason, Counts]
    delay_removed_ms: float
    waited_s: float
    pictures: tuple[int, int]


class NoHost:
    """Stands in for the host of a Sender that is over, whose connection is gone: there is nobody left to ask or tell.

    Args:
        ended_at: time at which the Sender ended, in seconds on its clock; it stands still there.
    """

    __slots__ = ("_ended_at",)

    def __init__(self, ended_at: float) -> None:
        self._ended_at = ended_at

    def now(self) -> float:
        """Return when the Sender ended."""
        return self._ended_at

    def in_thread(self) -> bool:
        """Return True: any thread is as good."""
        return True

    def kernel_bytes(self) -> int:
        """Return 0: the socket is closed."""
        return 0

    def strained(self) -> bool:
        """Return False: there is no thread."""
        return False

    def handler_failed(self, where: str, error: BaseException) -> None:
        """Log it."""
        log_error(where, as_exception(error))

    def _nothing(self, *args: object) -> None:
        """Do nothing."""

    wrote = request_flush = want_writable = set_deadline = terminate = ledger_grew = limit_unsent = _nothing


class SenderState:
    """State of a Sender and the reading of it. Arguments as of `flowctl.sender.Sender`."""

    __slots__ = (
        "_after",
        "_after_by",
        "_blocked",
        "_close_deadline",
        "_close_details",
        "_close_reason",
        "_closing",
        "_cohort",
        "_core",
        "_episode",
        "_frontend",
        "_held",
        "_host",
        "_joined_check",
        "_lagging",
        "_ledger",
        "_lock",
        "_longest_stall_s",
        "_mask",
        "_member",
        "_outbox",
        "_patience",
        "_pending",
        "_policy",
        "_progress_at",
        "_sends_after_close",
        "_settings",
        "_transport",
        "_trouble",
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
        self._lock = OwnedLock()
        self._host: SenderHost = host
        self._transport = transport
        self._frontend = frontend
        self._settings = settings or _DEFAULT_SETTINGS
        self.deferred = deferred
        self.slot = -1  # index among the members of a cohort; owned by the fan-out
        self._core = FlowCore(limits, now)  # guarded by _lock
        self._policy = policy or _KEEP_ALL  # guarded by _lock
        self._patience: tuple[float, ...] | None = None  # the policy's, once asked for; guarded by _lock
        self._mask = 0  # classes refused in the present state; guarded by _lock
        # All but control and headers are refused, for the hard limit is held; then (messages, wire bytes) of these that
        # were queued when that began.
        self._held: tuple[int, int] | None = None  # guarded by _lock
        self._outbox = Outbox()  # guarded by _lock
        self._cohort: CohortLike | None = None  # the fan-out of the followed log; guarded by _lock
        self._member = False  # the cohort writes the log for us; guarded by _lock
        self._pending: list[Callable[[float], None]] | None = None  # for the owning thread; guarded by _lock
        self._blocked = False  # the last write met EAGAIN and the kernel has not called back; guarded by _lock
        self._lagging = False  # the last write left something; guarded by _lock
        # When the kernel last took something, or began to refuse; when the Sender ended, once it has.
        self._progress_at = now  # guarded by _lock
        self._longest_stall_s = 0.0  # guarded by _lock
        self._joined_check: tuple[float, int] | None = None  # (time, load) of a joiner's last check; guarded by _lock
        self._closing = False  # no more sends are taken; guarded by _lock
        self._close_reason: CloseReason | None = None  # set once, when the Sender is over; guarded by _lock
        self._close_details = ""  # guarded by _lock
        self._close_deadline: float | None = None  # guarded by _lock
        self._sends_after_close = 0  # guarded by _lock
        self._waiters: list[Callable[[bool], object]] | None = None  # see `when_drained`; guarded by _lock
        # What is to be called once the lock is released: reports of handlers that failed, and waiters.
        self._after: list[Callable[[], object]] | None = None  # guarded by _lock
        self._after_by: int | None = None  # the thread that does these; guarded by _lock
        self._ledger: Ledger | None = None  # guarded by _lock
        self._episode: Before | None = None  # what there was before the open episode of drops; guarded by _lock
        self._trouble: Trouble | None = None  # what is known of a slow peer; guarded by _lock
        if policy is not None:
            self._mask = self._refused_locked(SendState.READY)

    # -- for who looks at thousands of Senders a second

    @property
    def pulse(self) -> int | None:
        """A number that stands still while nothing but the followed log is written to this peer, and all of that.

        None: the peer is, or was lately, in trouble, and nothing can be told without asking. Any thread, no lock.
        """
        return self._outbox.bytes_sent if self._trouble is None else None

    @property
    def standing(self) -> tuple[Entry, Entry] | None:
        """(where it stands, the end of the log), of a member of a cohort. None: it is none. Any thread."""
        self._refuse_reentry("standing")
        with self._lock:
            cursor = self._outbox.cursor
            return (cursor.entry, cursor.log.tail) if self._member and cursor is not None else None

    def account(self) -> Account:
        """Return what a sample of this peer is made of. Any thread; half of what `statistics` costs."""
        self._refuse_reentry("account")
        with self._lock:
            now = self._host.now()
            outbox, core, trouble, member = self._outbox, self._core, self._trouble, self._member
            load = self._load_locked(now)  # first: it moves the cursor past what is refused
            cursor = outbox.cursor
            # A cohort moves its members without our lock: before the accounts, and again after them.
            entry = cursor.entry if cursor is not None and member else None
            tail = cursor.log.tail if cursor is not None and entry is not None else None
            accepted, dropped, queued = outbox.figures()
            sent_bytes = self._bytes_sent_locked()
            still = cursor is not None and cursor.entry is entry and cursor.log.tail is tail
            idle = not any(queued)
            return Account(
                now,
                accepted,
                tuple(map(sub, map(sub, accepted, queued), dropped)),
                dropped,
                sent_bytes,
                idle,
                core.state,
                self._picture_share_locked(),
                load,
                self._stalled_s_locked(now),
                None if trouble is None else trouble.drain.rate,
                0.0 if trouble is None else trouble.delay_ms,
                self._lagging and not member,
                (entry, tail) if still and entry is not None and tail is not None else None,
                cursor.log if cursor is not None and member else None,
                outbox.bytes_sent if trouble is None else None,
            )

    # -- what to do where

    @property
    def _sender(self) -> Sender:
        return cast("Sender", self)  # the class is split for its length only: it has one subclass

    def _refuse_reentry(self, method: str) -> None:
        if HANDLERS and (where := HANDLERS.get(get_ident())) is not None:
            raise ReentryError(
                f"Sender.{method}() was called from {where}(), which may call no Sender",
                hint="schedule it on the connection's registration instead",
            )

    def _foreign_locked(self) -> bool:
        """Whether this thread must leave edges to the owning one."""
        return self._cohort is not None and not self._host.in_thread()

    def _now_locked(self) -> float:
        """Return the time for those who look; it stands still when the Sender has ended."""
        return self._host.now() if self._close_reason is None else self._progress_at

    def _stalled_s_locked(self, now: float) -> float:
        """Return for how long the kernel has taken nothing while something is queued."""
        return now - self._stalled_since_locked(now) if self._core.would_block else 0.0

    def _load_locked(self, now: float) -> Load:
        """Return all that is queued."""
        return self._outbox.load(now, self._core.limits.overhead_bytes)

    def _counted_locked(self, now: float, limits: Limits | None = None, *, refused: bool | None = None) -> Load:
        """Return the load that counts against the limits.

        What was queued or published since the last write has not been offered to the kernel yet: it is no sign of a
        slow peer and does not count, or a burst would cost a peer messages that its link has room for. What EAGAIN
        has left behind does, with all that follows, until everything is taken. What joining gave does not.

        Args:
            now: time in seconds.
            limits: None: those in force.
            refused: whether the kernel has refused something since it had last taken everything. None: as the core
                knows; it is told of a write after this.
        """
        if self._core.would_block if refused is None else refused:
            load = self._outbox.counted(now, limits or self._core.limits, log=not self._member)
        else:
            load = EMPTY_LOAD
        trouble = self._trouble
        if trouble is None or self._settings.age_from is AgeSource.QUEUE or trouble.age_ms <= load.age_ms:
            return load
        return load if self._joining_locked() else Load(load.size_bytes, load.messages, trouble.age_ms)

    def _bytes_sent_locked(self) -> int:
        """Return the wire bytes that the kernel has taken, those that the cohort wrote for us included."""
        cursor = self._outbox.cursor
        return self._outbox.bytes_sent + (cursor.entry.offset if self._member and cursor is not None else 0)

    def _picture_share_locked(self) -> float:
        """Return the share of the pictures of the last 20 s that were sent, 0 to 1; of who has ended, at its end."""
        trouble, cursor = self._trouble, self._outbox.cursor
        if trouble is None or cursor is None:
            return trouble.last_share if trouble is not None and self._close_reason is not None else 1.0
        return trouble.picture_share(self._now_locked(), *cursor.pictures())

    def _note_pictures_locked(self, trouble: Trouble, now: float) -> None:
        cursor = self._outbox.cursor
        if cursor is not None:
            trouble.note_pictures(now, *cursor.pictures(), cursor.joined_at)

    def _oldest_locked(self, now: float) -> float:
        """Return since when the oldest message that is not in flight waits; `now` where none does."""
        cursor, since = self._outbox.cursor, self._outbox.backlog.oldest_at
        oldest = cursor.oldest_at() if cursor is not None else None
        return min(now if oldest is None else oldest, now if since is None else since)

    def _joining_locked(self) -> bool:
        cursor = self._outbox.cursor
        return cursor is not None and not self._member and cursor.joining_to is not None

    def _waits_locked(self) -> bool:
        """Whether the kernel owes us progress: something waits, here or with it, that it did not take.

        Not for a viewer that counts as one that lags because pictures were left out lately, and has taken all.
        """
        trouble = self._trouble
        return self._core.would_block and (self._blocked or trouble is None or trouble.waited)

    def _progress_locked(self, now: float) -> None:
        if self._waits_locked():
            self._longest_stall_s = max(self._longest_stall_s, now - self._progress_at)
        self._progress_at = now

    def _stalled_since_locked(self, now: float) -> float:
        """Return since when the kernel has taken nothing while something was queued, in seconds; `now` for not at all.

        No longer than the oldest queued message has waited: before that there was nothing to take. But while a log is
        followed there always is: thinning may empty our queue, and the kernel still holds what it was given.
        """
        cursor = self._outbox.cursor
        if self._core.would_block and cursor is not None:
            if not self._waits_locked():
                return now
            since = max(self._progress_at, cursor.joined_at)  # a stall from before does not count against a new log
            trouble = self._trouble
            # A kernel that was told to take less ahead may take nothing for as long as it sends what it has.
            return max(since, trouble.drain.taken_at) if trouble is not None and trouble.ahead_bytes else since
        load = self._load_locked(now)
        return max(self._progress_at, now - load.age_ms / 1000) if load.messages else now

    # -- the application's code: its handler and its policy

    def _ask_locked(self, where: str, default: _T, call: Callable[[], _T]) -> _T:
        """Call the application's code; `default` where it raises, which is reported when the lock is released.

        Whatever it raises, CancelledError and SystemExit too: half of an edge is worse than an exit that comes later.
        Meanwhile this thread may call no Sender.
        """
        thread = get_ident()
        HANDLERS[thread] = where
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - see above
            self._later_locked(partial(self._host.handler_failed, where, error))
            return default
        finally:
            HANDLERS.pop(thread, None)

    def _refused_locked(self, state: SendState) -> int:
        """Ask the policy which classes it refuses in `state`; one that fails refuses nothing."""
        return self._ask_locked("decide", 0, partial(refused_mask, self._policy, state))

    # -- what is done when the lock is released: hooks and logs are the application's code as well, and may block

    def _later_locked(self, call: Callable[[], object]) -> None:
        if self._after is None:
            self._after = []
        self._after.append(call)

    def _wake_locked(self) -> None:
        """Have the waiters called if there is nothing left to wait for; after what may have emptied the queue."""
        taken = self._outbox.own_taken
        if self._waiters and (taken or self._close_reason is not None):
            waiters, self._waiters = self._waiters, None
            for waiter in waiters:
                self._later_locked(partial(waiter, taken))

    def _run_after(self) -> None:
        """Do what was put off; at the end of each public method that may have put something off."""
        if self._lock.owned():
            return  # a call inside of another one, whose end does it
        me = get_ident()
        with self._lock:
            if self._after_by == me:
                return  # a call from one of these, which are done one after the other and not one inside of another
            self._after_by = me
        while after := self._next_after(me):
            for call in after:
                try:
                    call()
                except BaseException as error:  # noqa: BLE001 - a hook that raises must not cost the caller its turn
                    report(log_error, "a hook of the application", error)

    def _next_after(self, me: int) -> list[Callable[[], object]] | None:
        with self._lock:
            after, self._after = self._after, None
            if after is None and self._after_by == me:
                self._after_by = None
            return after

    def _undroppable_locked(self) -> tuple[int, int]:
        """Return (messages, wire bytes) of what is queued and not refused by anything: control and headers."""
        queued = self._outbox.accounts()[2]
        kept = (MessageClass.CONTROL, MessageClass.HEADER)
        return sum(queued.messages[item] for item in kept), sum(queued.sizes_bytes[item] for item in kept)

    # -- the ledger and episodes of drops

    def _note_locked(self, entry: LedgerEntry) -> None:
        if self._ledger is None:
            self._ledger = Ledger()
        self._ledger.add(entry)
        self._host.ledger_grew()

    def _open_episode_locked(self, now: float) -> None:
        if self._episode is None:
            trouble, cursor = self._trouble, self._outbox.cursor
            removed_ms, waited_s = (0.0, 0.0) if trouble is None else (trouble.delay_removed_ms, trouble.drain.waited_s)
            if trouble is not None:
                trouble.delay_max_ms = trouble.delay_ms
            pictures = (0, 0) if cursor is None else cursor.pictures()
            self._episode = Before(now, self._outbox.dropped(), removed_ms, waited_s, pictures)

    def _keep_pictures_locked(self) -> None:
        """Let an open episode keep the pictures of a log that is about to be left; the next one counts from 0."""
        episode, cursor = self._episode, self._outbox.cursor
        if episode is not None and cursor is not None:
            (before, missed_before), (published, missed) = episode.pictures, cursor.pictures()
            self._episode = episode._replace(pictures=(before - published, missed_before - missed))

    def _pictures_wanted_locked(self, before: tuple[int, int], after: tuple[int, int]) -> None:
        """Keep out of all shares the step that counts of pictures make where a viewer wants none, or some again."""
        if before == after:
            return
        if self._trouble is not None:
            self._trouble.forget_pictures()
        if (episode := self._episode) is not None:
            published, missed = map(add, episode.pictures, map(sub, after, before))
            self._episode = episode._replace(pictures=(published, missed))

    def _close_episode_locked(self, now: float, *, force: bool = False) -> None:
        """End the episode of drops once everything is accepted again; one entry of the ledger for all of it."""
        episode = self._episode
        if episode is None or ((self._mask or self._outbox.waiting_for_key) and not force):
            return
        self._episode = None
        lost = difference(self._outbox.dropped(), episode.dropped)
        if not lost:
            return
        trouble, cursor, duration_s = self._trouble, self._outbox.cursor, now - episode.at
        entry = LedgerEntry(LedgerKind.DROPS, now, "", dropped=lost, duration_s=duration_s)
        if trouble is not None:
            line = (trouble.drain.waited_s - episode.waited_s) / duration_s if duration_s > 0 else 0.0
            removed_ms = trouble.delay_removed_ms - episode.delay_removed_ms
            longest_ms = trouble.delay_max_ms
            entry = replace(entry, delay_removed_ms=removed_ms, delay_max_ms=longest_ms, line_share=min(line, 1.0))
        published, missed = map(sub, (0, 0) if cursor is None else cursor.pictures(), episode.pictures)
        self._note_locked(replace(entry, picture_share=1 - missed / published if published > 0 else 1.0))
