"""The receiving half of a connection: reads what it may, hands it on, and keeps what the handler cannot take yet.

Theory of operation. The connection tells the Receiver that its socket is readable (`input_ready`); the Receiver reads
into the group's scratch buffer and hands that memory straight to its handler. The handler says how far it got and what
it wants: DONE, NEED_MORE, BLOCK or ERROR. Only what is left over is copied into a buffer of the connection's own, at
most `capacity_bytes`, so a connection with nothing half-read owns no buffer at all.

Reading goes on unless something holds it:

- *holders*: `pause(owner, reason)` and `resume(owner)` form a set; input is read as bulk only while it is empty. If
  every holder grants `control_bytes`, so much per interval is still read and handed on with ``control_only=True``:
  a viewer at its soft limit must be able to acknowledge, answer pings and close, but not to make us work. One holder
  that grants nothing stops reading altogether.
- *block*: the handler answered BLOCK. `trigger_input` or a change of the holders lifts it.
- *end*: the end of the stream is kept while input is held, and delivered, once, when it is not. A read error
  is delivered at once: a peer that has reset the connection waits for nothing.

`pause`, `resume` and `trigger_input` may be called from any thread and from under the Sender's lock: they only note
what is wanted and schedule one job; what follows from it happens on the owning thread, in that job, never inside the
call and never inside a running `process_input`. No socket is known here: reading is a function that is handed in.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from flowctl.core.loop.jobs import Purpose
from flowctl.core.loop.locks import OwnedLock
from flowctl.errors import FlowctlError, InternalError, LimitExceededError, LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from flowctl.core.loop.deadlines import Deadlines
    from flowctl.deferred import Registration

#: Default bound of what is kept for a handler that needs more: the limit of a command message, the largest thing
#: that a handler may want whole (chunk readers keep their own unfinished messages).
DEFAULT_CAPACITY_BYTES: Final = 64 * 1024

#: What one connection may read per turn of its loop before the others are served: at 10 Mbit/s that is
#: 200 ms of media, so a publisher needs more than one turn only after a stall.
TURN_BUDGET_BYTES: Final = 256 * 1024

#: Interval for which `control_bytes` are granted.
CONTROL_INTERVAL_S: Final = 1.0

#: Holders at a time. They are parts of the program (sender, policy, publication), so more is a leak of owners.
MAX_HOLDERS: Final = 64

#: Reasons counted by name, and the name under which further ones are counted: a reason with a number in it must not
#: grow the table for ever.
MAX_REASONS: Final = 16
OTHER_REASONS: Final = "other"

#: `InputResult.consumed_bytes` for "everything that was offered".
ALL: Final = -1


class InputVerdict(Enum):
    """What a handler wants after `InputHandler.process_input`."""

    DONE = "done"  #: took `consumed_bytes`; offer the rest, if any, again at once (it must have taken some)
    NEED_MORE = "need more"  #: took `consumed_bytes`; offer the rest again together with what comes next
    BLOCK = "block"  #: took `consumed_bytes`; read nothing and offer nothing until `Receiver.trigger_input`
    ERROR = "error"  #: the input is wrong: deliver `error` to `process_error`, read no more


class InputResult(NamedTuple):
    """The answer of `InputHandler.process_input`."""

    verdict: InputVerdict
    consumed_bytes: int = ALL  #: 0 to the length offered; `ALL` for all of it
    error: Exception | None = None  #: for ERROR; None: a `RemoteProtocolError` is made


#: The usual answers, made once.
DONE: Final = InputResult(InputVerdict.DONE)
NEED_MORE: Final = InputResult(InputVerdict.NEED_MORE)
BLOCK: Final = InputResult(InputVerdict.BLOCK)


class InputHandler(Protocol):
    """Makes sense of the input; always called on the owning thread, with no lock held, never re-entered."""

    def process_input(self, data: memoryview, *, control_only: bool) -> InputResult:
        """Take what can be taken from `data` and say what is wanted.

        An exception counts as ERROR with that exception; one that is not flowctl's own is wrapped in `InternalError`.
        """

    def reading_changed(self, wanted: bool) -> None:  # noqa: FBT001 - one argument, and the only one
        """Watch (True) or do not watch (False) the descriptor for input from now on."""

    def process_eof(self) -> None:
        """Learn that the peer ended the stream; what NEED_MORE left over never became complete. Called once."""

    def process_error(self, error: Exception) -> None:
        """Learn that reading failed (OSError) or the input was wrong. Called once; nothing is called after it."""


class ReceiverHost(Protocol):
    """What a Receiver uses of its `PollGroup`."""

    bytes_in: int

    @property
    def scratch(self) -> memoryview:
        """Memory to read into, shared by everybody on the thread."""

    @property
    def deadlines(self) -> Deadlines:
        """Deadlines of the thread, on the Receiver's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverStatistics:
    """One Receiver at one moment."""

    bytes_in: int  #: read in total
    control_bytes_in: int  #: of those, read while only control was
    reads: int  #: reads that returned bytes
    kept_bytes: int  #: read, not yet consumed by the handler
    reading: bool  #: the descriptor is to be watched
    blocked: bool  #: the handler answered BLOCK
    held_by: Mapping[str, int]  #: reasons of the present holders and how many give each
    pauses: Mapping[str, int]  #: pauses since the start, by reason
    paused_s: float  #: time that anybody held input, the present pause included
    longest_pause_s: float  #: the longest such time, the present one included


class InputMode(IntEnum):
    """What the holders, taken together, allow to be read."""

    BULK = 0  #: everything: there are no holders
    CONTROL = 1  #: control bytes: all holders grant some
    STOPPED = 2  #: nothing: a holder grants none


class Hold(NamedTuple):
    """What one owner holds input for, how much it grants for control all the same, and since when it does."""

    reason: str
    control_bytes: int
    since: float


class InputHolds:
    """The holders of a connection's input, what they allow, and for how long they have held it.

    A set of owners, not a counter: the same owner may say "hold" twice and "let go" once, and nobody can let go of what
    another holds. Nothing here locks; `Receiver` guards it with its own lock, and makes it only when input is held for
    the first time, which for most viewers is never.
    """

    __slots__ = ("_holders", "_longest_s", "_paused_s", "_since", "pauses")

    def __init__(self) -> None:
        self._holders: dict[Hashable, Hold] = {}
        self._since: float | None = None  # when the first of the present holders came
        self._paused_s = 0.0  # time of the pauses that are over
        self._longest_s = 0.0  # the longest of them
        self.pauses: Final[dict[str, int]] = {}  #: how often input was held, by reason

    def add(self, owner: Hashable, reason: str, control_bytes: int, now: float) -> bool:
        """Enter `owner`, or replace its reason and grant; True if it is new."""
        before = self._holders.get(owner)
        if before is None and len(self._holders) >= MAX_HOLDERS:
            raise LocalProtocolError(f"input is held by {MAX_HOLDERS} owners already")
        self._holders[owner] = Hold(reason, control_bytes, now if before is None else before.since)
        if before is None or before.reason != reason:
            key = reason if reason in self.pauses or len(self.pauses) < MAX_REASONS else OTHER_REASONS
            self.pauses[key] = self.pauses.get(key, 0) + 1
        if self._since is None:
            self._since = now
        return before is None

    def discard(self, owner: Hashable, now: float) -> Hold | None:
        """Strike out `owner`; return its hold. None: it held nothing."""
        hold = self._holders.pop(owner, None)
        if hold is not None and not self._holders:
            self._holders = {}  # an emptied table stays as large as it was
            self._close_pause(now)
        return hold

    def clear(self, now: float) -> None:
        """Strike out everybody: the connection is at its end."""
        self._holders.clear()
        self._close_pause(now)

    def verdict(self) -> tuple[InputMode, int]:
        """Return what is allowed, and how many control bytes per interval: the smallest grant."""
        if not self._holders:
            return InputMode.BULK, 0
        cap = min(holder.control_bytes for holder in self._holders.values())
        return (InputMode.CONTROL, cap) if cap else (InputMode.STOPPED, 0)

    def held_by(self) -> dict[str, int]:
        """Return the reasons of the present holders and how many give each."""
        counts: dict[str, int] = {}
        for holder in self._holders.values():
            counts[holder.reason] = counts.get(holder.reason, 0) + 1
        return counts

    def times(self, now: float) -> tuple[float, float]:
        """Return seconds held in total and at the longest, the present pause included."""
        lasting_s = 0.0 if self._since is None else max(0.0, now - self._since)
        return self._paused_s + lasting_s, max(self._longest_s, lasting_s)

    def _close_pause(self, now: float) -> None:
        self._paused_s, self._longest_s = self.times(now)
        self._since = None


class _EndOfStream(Exception):  # noqa: N818  (a mark, never raised)
    """Stands for the end of the stream where otherwise the read error is kept."""


_END_OF_STREAM: Final = _EndOfStream()
_INPUT: Final = Purpose("receiver")
# Bound once: an attribute of an Enum class is looked up by code in Python, for each read.
_BULK, _CONTROL, _STOPPED = InputMode
_DONE: Final = InputVerdict.DONE
_NEVER: Final = float("-inf")
_NOTHING: Final = memoryview(b"")


class _EndedHandler:
    """The handler of a Receiver that is over."""

    __slots__ = ()

    def process_input(self, data: memoryview, *, control_only: bool) -> InputResult:
        del data, control_only
        return DONE

    def _nothing(self, *args: object) -> None: ...

    reading_changed = process_eof = process_error = _nothing


_ENDED_HANDLER: Final = _EndedHandler()


class Receiver:
    """Reads, hands on, keeps the rest, and can be held.

    Args:
        registration: the connection's; one job is made of it.
        handler: gets the input.
        read_into: reads at most as many bytes as the memory handed in has, which is at least one, and returns their
            number, 0 at the end of the stream; raises BlockingIOError when there is nothing and OSError when the
            connection is broken: `socket.recv_into`.
        capacity_bytes: most bytes kept for the handler, 1 or more; also the most read at once.
        clock: monotonic seconds, the clock of the group's deadlines.
        lock: to use instead of one of its own.
        first_input: read from the same stream by another already; the handler is offered it first.
    """

    __slots__ = (
        "_blocked",
        "_bytes_in",
        "_capacity_bytes",
        "_clock",
        "_control_bytes_in",
        "_control_cap",
        "_control_left",
        "_end",
        "_handler",
        "_holds",
        "_host",
        "_in_handler",
        "_kept",
        "_lock",
        "_mode",
        "_more",
        "_offer",
        "_over",
        "_read_count",
        "_read_into",
        "_reading",
        "_registration",
        "_window_ends_at",
    )

    def __init__(
        self,
        registration: Registration,
        handler: InputHandler,
        read_into: Callable[[memoryview], int],
        *,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        clock: Callable[[], float] = time.monotonic,
        lock: OwnedLock | None = None,
        first_input: bytes = b"",
    ) -> None:
        if capacity_bytes < 1:
            raise LocalProtocolError(f"capacity_bytes is {capacity_bytes}; it must be at least 1")
        self._registration: Final = registration
        self._handler = handler
        self._read_into: Final = read_into
        self._capacity_bytes: Final = capacity_bytes
        self._clock: Final = clock

        self._lock: Final = lock or OwnedLock()
        self._holds: InputHolds | None = None  # made by the first pause  # guarded by _lock
        # Written under the lock, read without it by the owning thread, which looks again before every step:
        self._mode = _BULK
        self._control_cap = 0  # smallest grant of the holders, bytes per interval
        self._offer = bool(first_input)  # the handler is to be offered what is kept, even nothing
        self._over = False  # closed, or the end was delivered: nothing more is read or handed on

        # Only for the owning thread:
        self._host: ReceiverHost | None = None  # None while on no group
        self._kept = first_input  # read but not consumed
        self._blocked = False
        self._end: Exception | None = None  # what ended the stream, until it may be delivered
        self._in_handler = False
        self._more = False  # the turn's budget was used up; the job reads on
        self._reading = False  # what the handler was last told
        self._control_left = 0  # of the grant, in this interval
        self._window_ends_at = _NEVER  # when a new grant begins
        self._bytes_in = len(first_input)
        self._control_bytes_in = 0
        self._read_count = 0

    # --- any thread ----------------------------------------------------------------------------------------------

    def pause(self, owner: Hashable, reason: str, *, control_bytes: int = 0) -> bool:
        """Hold input on behalf of `owner`; any thread, also under the Sender's lock.

        Input that the handler has been given already is not taken back. Called from `process_input` it stops reading
        before the next read.

        Args:
            owner: who holds; a second call by the same owner replaces reason and grant.
            reason: short and stable, for the counts, for example ``"soft limit"``.
            control_bytes: how much may be read per control interval all the same, handed on with
                ``control_only=True``; 0: nothing.

        Returns:
            True if `owner` did not hold input before.

        Raises:
            LocalProtocolError: `control_bytes` is negative, or there are `MAX_HOLDERS` holders.
        """
        if control_bytes < 0:
            raise LocalProtocolError(f"control_bytes is {control_bytes}; it must be 0 or more")
        now = self._clock()
        with self._lock:
            if self._over:
                return False
            if self._holds is None:
                self._holds = InputHolds()
            is_new = self._holds.add(owner, reason, control_bytes, now)
            changed = self._holds_changed_locked(self._holds)
        if changed:
            self._run_soon()
        return is_new

    def resume(self, owner: Hashable) -> Hold | None:
        """End the hold of `owner`; any thread, also under the Sender's lock.

        When it was the last, the handler is called soon on the owning thread with what is kept, even if that is
        nothing, and then reading goes on.

        Returns:
            The hold that has ended. None: `owner` held no input.
        """
        now = self._clock()
        with self._lock:
            hold = None if self._over or self._holds is None else self._holds.discard(owner, now)
            if self._holds is None or hold is None:
                return None
            changed = self._holds_changed_locked(self._holds)
        if changed:
            self._run_soon()
        return hold

    def trigger_input(self) -> None:
        """Offer the handler what is kept, even nothing, soon, on the owning thread; lifts BLOCK; any thread.

        Never inside this call, and never inside a running `process_input`. While input is stopped by a holder, the
        offer is made on resumption.
        """
        with self._lock:
            if self._over:
                return
            self._offer = True
        self._run_soon()

    @property
    def paused(self) -> bool:
        """True while anybody holds input, with or without a grant for control."""
        return self._mode is not _BULK

    def statistics(self) -> ReceiverStatistics:
        """Return a frozen snapshot; any thread. Figures of the owning thread may be a step apart."""
        now = self._clock()
        with self._lock:
            holds = self._holds or InputHolds()
            paused_s, longest_pause_s = holds.times(now)
            return ReceiverStatistics(
                bytes_in=self._bytes_in,
                control_bytes_in=self._control_bytes_in,
                reads=self._read_count,
                kept_bytes=len(self._kept),
                reading=self._reading,
                blocked=self._blocked,
                held_by=holds.held_by(),
                pauses=dict(holds.pauses),
                paused_s=paused_s,
                longest_pause_s=longest_pause_s,
            )

    # --- the owning thread ---------------------------------------------------------------------------------------

    def attached(self, host: ReceiverHost) -> None:
        """Begin to read on the thread of `host`; the connection calls it from its own ``attached``.

        Raises:
            LocalProtocolError: on a host already, or its scratch buffer is smaller than `capacity_bytes`.
        """
        if self._host is not None:
            raise LocalProtocolError("the receiver is on a poll group already")
        if len(host.scratch) < self._capacity_bytes:
            raise LocalProtocolError(
                f"capacity_bytes is {self._capacity_bytes}, the group's scratch buffer has {len(host.scratch)}"
            )
        self._host = host
        if self._offer or self._more or self._end is not None:
            self._run_soon()  # a job that ran while there was no host could do nothing
        self._update_reading()

    def detached(self) -> None:
        """Stop reading on this thread; what is kept and noted goes along to the next host. Idempotent."""
        if self._host is None:
            return
        host, self._host = self._host, None
        host.deadlines.remove(self)
        self._update_reading()

    def close(self) -> None:
        """Read no more, call the handler no more, drop what is kept; idempotent."""
        self._finish()
        if self._host is not None:
            self._host.deadlines.remove(self)
        self._update_reading()

    def let_go(self) -> None:
        """Forget the handler, for it holds this Receiver: both are over, and their memory shall go. After `close`."""
        self._handler = _ENDED_HANDLER

    def input_ready(self) -> None:
        """Read and hand on, up to the turn's budget: the descriptor is readable."""
        if self._in_handler or self._more:
            # From inside process_input, or the job at the tail of the loop's queue has this turn already.
            self._more = True
            self._run_soon()
            return
        self._run_turn(read=True)

    def deadline_due(self, now: float) -> None:
        """Go on reading: a new control interval has begun. Called by the group's deadlines."""
        del now  # the clock is asked where the grant is renewed
        self._update_reading()

    @property
    def bytes_in(self) -> int:
        """Bytes read so far; any thread."""
        return self._bytes_in

    @property
    def reading(self) -> bool:
        """True if the descriptor is to be watched, as the handler was told last."""
        return self._reading

    @property
    def over(self) -> bool:
        """True once nothing more is handed on: the end was delivered, or the connection is over."""
        return self._over

    # --- inner steps ---------------------------------------------------------------------------------------------

    def _run_soon(self) -> None:
        self._registration.run_soon(self._run_job, _INPUT)

    def _run_job(self) -> None:
        if self._in_handler:  # a handler ran a round of its own processor
            self._run_soon()
            return
        read, self._more = self._more, False
        self._run_turn(read=read)

    def _run_turn(self, *, read: bool) -> None:
        try:
            if self._host is not None and not self._over:
                if self._offer:
                    self._make_offer()
                if read:
                    self._read_turn(self._host)
                if self._end is not None:
                    self._deliver_end()
        finally:
            # Also when the handler's process_error raised: a broken connection must not be polled for ever.
            self._update_reading()

    def _make_offer(self) -> None:
        """Offer what is kept, as was asked for, unless input is held."""
        if self._mode is _STOPPED:
            return
        with self._lock:
            self._offer = False
        data, self._kept = self._kept, b""
        self._offer_input(memoryview(data) if data else _NOTHING)

    def _read_turn(self, host: ReceiverHost) -> None:
        budget = TURN_BUDGET_BYTES
        scratch = host.scratch
        while self._may_read():
            kept = len(self._kept)
            room = min(self._capacity_bytes - kept, budget)
            control = self._mode is _CONTROL
            if control:
                room = min(room, self._control_left)
            if room <= 0:
                if budget <= 0:
                    self._more = True
                    self._run_soon()
                return
            try:
                count = self._read_into(scratch[kept : kept + room])
            except (BlockingIOError, InterruptedError):
                return
            except (OSError, RemoteProtocolError) as error:  # the latter: TLS that is none
                self._end = error
                return
            if count == 0:
                self._end = _END_OF_STREAM
                return
            budget -= count
            host.bytes_in += count
            self._bytes_in += count
            self._read_count += 1
            if control:
                self._control_left -= count
                self._control_bytes_in += count
            if kept:
                scratch[:kept] = self._kept
                self._kept = b""
            self._offer_input(scratch[: kept + count])
            if count < room:
                return  # the socket is empty, or will say again that it is not: saves the read that meets EAGAIN

    def _may_read(self) -> bool:
        if self._host is None or self._over or self._blocked or self._end is not None:
            return False
        if self._mode is _BULK:
            return True
        return self._mode is _CONTROL and self._control_bytes_left() > 0

    def _control_bytes_left(self) -> int:
        """Return how many control bytes may be read now, after beginning a new interval if it is time."""
        now = self._clock()
        if now >= self._window_ends_at:
            self._window_ends_at = now + CONTROL_INTERVAL_S
            self._control_left = self._control_cap
        else:
            self._control_left = min(self._control_left, self._control_cap)
        return self._control_left

    def _offer_input(self, data: memoryview) -> None:
        """Offer `data` until the handler has it or wants to wait; keep the rest."""
        while True:
            control = self._mode is not _BULK
            try:
                verdict, consumed, error = self._call_handler(data, control_only=control)
            except FlowctlError as failure:
                self._fail(failure)
                return
            if self._over:  # the handler closed us
                return
            if verdict is _DONE and consumed == ALL:
                self._blocked = False
                self._kept = b""
                return
            if consumed == ALL:
                consumed = len(data)
            elif not 0 <= consumed <= len(data):
                self._fail(InternalError(f"the handler says it consumed {consumed} of {len(data)} bytes"))
                return
            rest = data[consumed:]
            if verdict is _DONE and rest and not consumed:
                self._fail(InternalError("the handler answered DONE but consumed nothing"))
                return
            if verdict is InputVerdict.ERROR:
                self._fail(error or RemoteProtocolError("the input was refused"))
                return
            full = verdict is InputVerdict.NEED_MORE and len(rest) >= self._capacity_bytes
            if full and not control:
                self._fail(LimitExceededError("input_buffer_bytes", len(rest), self._capacity_bytes))
                return
            if verdict is not _DONE or not rest or self._mode is _STOPPED:
                # Stopped half-way through with DONE, the rest is offered on resumption: every change of the holders
                # asks for an offer.
                # Full while held, it waits for the end of the hold, as if blocked: that is no fault of the peer's.
                self._blocked = full or verdict is InputVerdict.BLOCK
                self._kept = bytes(rest)
                return
            data = rest

    def _call_handler(self, data: memoryview, *, control_only: bool) -> InputResult:
        self._in_handler = True
        try:
            return self._handler.process_input(data, control_only=control_only)
        except FlowctlError:
            raise
        except BaseException as error:
            raise InternalError(f"the input handler failed: {error!r}") from error
        finally:
            self._in_handler = False

    def _fail(self, error: Exception) -> None:
        """Give up because of the input itself; delivered at once, held or not: it is not the stream that ended."""
        self._finish()
        self._handler.process_error(error)

    def _deliver_end(self) -> None:
        end = self._end
        if end is None or self._over:
            return
        if end is _END_OF_STREAM and (self._mode is not _BULK or self._blocked or self._offer):
            return
        self._finish()
        if end is _END_OF_STREAM:
            self._handler.process_eof()
        else:
            self._handler.process_error(end)

    def _finish(self) -> None:
        """Go over to the state in which nothing is read or handed on any more."""
        now = self._clock()
        with self._lock:
            self._over = True
            self._offer = False
            self._mode = _BULK
            if self._holds is not None:
                self._holds.clear(now)
        self._kept = b""
        self._end = None
        self._more = False

    def _update_reading(self) -> None:
        """Tell the connection whether to watch its descriptor, if that has changed; set the control deadline."""
        wanted = self._may_read()
        if self._mode is _CONTROL and self._host is not None and self._waits_for_grant():
            self._host.deadlines.set(self, self._window_ends_at)
        if wanted is not self._reading:
            self._reading = wanted
            self._handler.reading_changed(wanted)

    def _waits_for_grant(self) -> bool:
        return not (self._control_left or self._over or self._blocked) and self._end is None

    def _holds_changed_locked(self, holds: InputHolds) -> bool:
        """Work out what the holders allow; True if that has changed and the owning thread must act."""
        self._lock.assert_owned()
        mode, cap = holds.verdict()
        if mode is self._mode and cap == self._control_cap:
            return False
        self._mode = mode
        self._control_cap = cap
        self._offer = True
        return True
