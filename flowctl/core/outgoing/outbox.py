"""What is on its way to one peer, in the order in which it goes out (pure).

First the message in flight: its first byte is out, so it is finished whatever happens. Then the `Backlog` (control
queue, then messages for this peer alone). Then the stream log that is followed, through a `LogCursor`. The outbox
gathers from the three, keeps what a partial write left, and knows the load and the accounts of all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import inf
from operator import add
from typing import Final, Protocol

from flowctl.core.flow.counts import NO_FIGURES, Balance, Counts, Figures, Tally, add_by_reason, as_counts
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.meters import Trail
from flowctl.core.flow.policy import Headroom, Thin
from flowctl.core.flow.state import Load, MessageClass
from flowctl.core.flow.timing import Timing
from flowctl.core.outgoing.backlog import Backlog, Item, OwnItem
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.lateness import cut_behind, peek_in_time
from flowctl.core.outgoing.thinning import drop_droppable, skip_to_key, thin_to_key_frame
from flowctl.reasons import DropReason

_GAP_S: Final = 0.05
_KEY: Final = MessageClass.KEY
_TLS_WOULD_BLOCK: Final = frozenset({"SSLWantReadError", "SSLWantWriteError"})


class Transport(Protocol):
    """Where a Sender writes: a non-blocking socket, or something that acts like one."""

    def send(self, data: bytes, /) -> int:
        """Write as much of `data` as goes at once; otherwise as `sendmsg`."""

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        """Write as much of `buffers` as goes at once and return the number of bytes.

        Raises:
            BlockingIOError: nothing can be written now; `ssl.SSLWantWriteError` and `ssl.SSLWantReadError` are as good.
            OSError: the connection is gone.
        """


class _InFlight:
    __slots__ = ("given", "message_class", "own", "rest", "since", "size_bytes")

    def __init__(self, item: Item | OwnItem, written: int, *, given: bool = False, own: bool = False) -> None:
        self.message_class = item[0]
        self.rest = memoryview(item[1])[written:]
        self.size_bytes = len(item[1])
        self.since = item[2]
        self.given = given
        self.own = own


class _PastAccounts:
    """Accounts of logs that are no longer followed, and of the message in flight when the connection ended."""

    __slots__ = ("accepted", "dropped", "key_waits_expired", "restarts")

    def __init__(self) -> None:
        self.accepted = Tally()
        self.dropped: dict[DropReason, Figures] = {}
        self.restarts = self.key_waits_expired = 0


class Outbox:
    """Everything queued for one peer. Not thread-safe: its Sender's lock guards it.

    Attributes:
        backlog: control lane and own messages.
        cursor: place in the followed log. None: no log is followed.
        bytes_sent: wire bytes that the kernel took from here.
        unfinished: rest of the message that was in flight when all was dropped.
    """

    __slots__ = ("_inflight", "_past", "backlog", "bytes_sent", "cursor", "unfinished")

    def __init__(self) -> None:
        self.backlog = Backlog()
        self.cursor: LogCursor | None = None
        self.bytes_sent = 0
        self.unfinished: bytes | memoryview = b""
        self._inflight: _InFlight | None = None
        self._past: _PastAccounts | None = None

    # -- writing

    @property
    def idle(self) -> bool:
        """Whether nothing is queued and no log is followed: a message may go straight to the kernel."""
        return self.cursor is None and self._inflight is None and not len(self.backlog)

    def empty(self, *, with_log: bool) -> bool:
        cursor = self.cursor
        done = self._inflight is None and not len(self.backlog)
        return done and (not with_log or cursor is None or cursor.caught_up)

    @property
    def own_taken(self) -> bool:
        """Whether nothing is left of what was sent to this peer alone; a message in flight may be one of a log."""
        inflight = self._inflight
        return not len(self.backlog) and (inflight is None or not inflight.own)

    @property
    def waits_at_crossroads(self) -> bool:
        """Whether all that is left waits at crossroads, to go on in this log or in another."""
        crossroads = None if self.cursor is None else self.cursor.crossroads
        return crossroads is not None and crossroads.waits and self._inflight is None and not len(self.backlog)

    def put_in_flight(self, wire: bytes, message_class: MessageClass, now: float, written: int) -> None:
        """Take a message, of which the kernel has taken `written` bytes, past the backlog; only while `idle`."""
        self.backlog.accepted.add(message_class, len(wire))
        self.bytes_sent += written
        if written < len(wire):
            self._inflight = _InFlight((message_class, wire, now), written, own=True)

    def write(
        self,
        transport: Transport,
        most: int,
        budget_bytes: int,
        *,
        with_log: bool,
        timing: Timing | None = None,
        trail: Trail | None = None,
    ) -> tuple[int, bool, OSError | None]:
        """Write until the turn's budget is used, everything is taken, or the kernel is full."""
        inflight, cursor, backlog = self._inflight, self.cursor, self.backlog
        ahead = 0
        if inflight is not None:
            ahead = len(inflight.rest)
            most -= 1  # it takes one of the parts that a system call can hold
        own: list[Item | OwnItem] = []
        if len(backlog):
            own = backlog.peek(most, budget_bytes)
            most -= len(own)
            size = sum(len(item[1]) for item in own)
            budget_bytes -= size
            ahead += size
        items: Sequence[Item | OwnItem] = own
        if cursor is not None and with_log and (timing is not None or (budget_bytes > 0 and most > 0)):
            if timing is None:
                followed = cursor.peek(most, budget_bytes)
            else:
                timing.held_bytes += ahead
                followed = peek_in_time(cursor, most, budget_bytes, timing)
            items = [*own, *followed] if own else followed
        buffers: list[bytes | memoryview] = [item[1] for item in items]
        if inflight is not None:
            buffers.insert(0, inflight.rest)
        if not buffers:
            return 0, False, None
        written, blocked, failure = gather_write(transport, buffers)
        if written:
            if trail is not None:
                self._note_trail(trail, items, self.bytes_sent + written)
            self.bytes_sent += written
            if blocked or failure is not None:
                since = self._consume(items, len(own), written)
            else:
                self._inflight = None
                self._pass(len(own), len(items) - len(own))
                since = items[-1][2] if items or inflight is None else inflight.since
            if trail is not None:
                trail.note(self.bytes_sent, since)
        return written, blocked, failure

    def _note_trail(self, trail: Trail, items: Sequence[Item | OwnItem], until: int) -> None:
        """Note since when what goes up to `until` has waited: the first message, key frames, and both ends of a gap.

        Between two marks time runs with the bytes, which a key frame is many of at one moment, and a gap none.
        """
        place, noted, before = self.bytes_sent, True, inf
        if self._inflight is not None:
            before = self._inflight.since
            trail.note(place, before)
            place += len(self._inflight.rest)
        for item in items:
            since, is_key = item[2], item[0] is _KEY
            if noted or is_key or since - before > _GAP_S:
                if place >= until:
                    break
                if since - before > _GAP_S:
                    trail.note(place, before)
                trail.note(place, since)
                noted = is_key
            place += len(item[1])
            before = since

    def consume_followed(self, written: int, trail: Trail | None = None) -> None:
        """The cohort wrote `written` bytes of the followed log for us."""
        if written and self.cursor is not None:
            items = self.cursor.peek(len(MessageClass) + written, written)  # a message has a byte at least
            if trail is not None:
                self._note_trail(trail, items, self.bytes_sent + written)
            self.bytes_sent += written
            self._consume(items, 0, written)
            if trail is not None and self._inflight is not None:
                trail.note(self.bytes_sent, self._inflight.since)

    def _consume(self, items: Sequence[Item | OwnItem], own: int, written: int) -> float:
        """Move past what was written, and return since when the last of it had waited.

        What is left of a message written in part is in flight.
        """
        inflight, since = self._inflight, -inf
        if inflight is not None:
            since = inflight.since
            if written < len(inflight.rest):
                inflight.rest = inflight.rest[written:]
                return since
            written -= len(inflight.rest)
            self._inflight = None
        taken = 0
        for item in items:
            if not written:
                break
            taken += 1
            size = len(item[1])
            if written < size:
                self._inflight = _InFlight(item, written, own=taken <= own)
                break
            written -= size
        self._pass(min(taken, own), max(taken - own, 0))
        cursor, inflight = self.cursor, self._inflight
        if inflight is not None and taken > own and cursor is not None:
            end = cursor.joining_to
            inflight.given = end is not None and cursor.entry.sequence <= end.sequence
        return items[taken - 1][2] if taken else since

    def _pass(self, own: int, followed: int) -> None:
        """Move past messages that are sent, or in flight: the peer's own first."""
        if own:
            self.backlog.pass_messages(own)
        if followed and self.cursor is not None:
            self.cursor.pass_messages(followed)

    # -- the load

    @property
    def own(self) -> tuple[int, int]:
        """(bytes, messages) that are queued for this peer alone: all that is not read from the followed log."""
        copied_bytes, copied_messages = self.cursor.copied if self.cursor is not None else (0, 0)
        messages = len(self.backlog) + (self._inflight is not None) + copied_messages
        return self.backlog.size_bytes + self.inflight_bytes + copied_bytes, messages

    def counted(self, now: float, limits: Limits, *, log: bool, progress_at: float) -> Load:
        """Return what counts against `limits` of what is queued, all of which was offered to the kernel.

        Not what joining gave, nor values of keys (`core.outgoing.conflation`); and not the bytes of a message in flight
        that is as large as the soft mark: however fast the peer, its kernel cannot take that at once, and what is in
        flight is finished anyway. Its age counts.

        Args:
            now: time in seconds.
            limits: for their overhead and soft mark.
            log: whether what is queued of the followed log counts.
            progress_at: since when the kernel has taken nothing: so long do values wait, and what is in flight of them.
        """
        cursor, inflight, began = self.cursor, self._inflight, None
        if inflight is not None and not (inflight.given and cursor is not None and cursor.joining_to is not None):
            began = inflight.since
            if cursor is not None and cursor.log.latest is not None and not inflight.own:
                began = max(began, progress_at)  # a large value is no queue either
        followed = cursor.counted(progress_at) if cursor is not None and log else (0, 0, None)
        load = self._load(now, limits.overhead_bytes, began, *followed)
        if inflight is None or inflight.size_bytes < limits.size.marks[1]:
            return load
        return Load(load.size_bytes - len(inflight.rest), load.messages, load.age_ms)

    def load(self, now: float, overhead_bytes: int, *, values: bool = True) -> Load:
        """Return what is queued; with or without the `values` of keys."""
        cursor, inflight = self.cursor, self._inflight
        size, messages, since = 0, 0, None
        if cursor is not None:
            since = cursor.oldest_at()  # first: it moves past what is refused
            size, messages = cursor.load() if values else cursor.bounded()
        return self._load(now, overhead_bytes, None if inflight is None else inflight.since, size, messages, since)

    def _load(
        self, now: float, overhead_bytes: int, began: float | None, size: int, messages: int, since: float | None
    ) -> Load:
        """Return what is queued of the log with the rest; of what is in flight, if that `began` to wait some time."""
        backlog, inflight = self.backlog, self._inflight
        own_messages = len(backlog)
        if own_messages and (oldest := backlog.oldest_at) is not None:
            size += backlog.size_bytes
            messages += own_messages
            since = oldest if since is None else min(oldest, since)
        if inflight is not None and began is not None:
            size += len(inflight.rest)
            messages += 1
            since = began if since is None else min(began, since)
        age_ms = 0.0 if since is None else max(0.0, (now - since) * 1000)
        return Load(size + messages * overhead_bytes, messages, age_ms)

    @property
    def joining_load_bytes(self) -> int:
        """Bytes left of everything queued: what falls while a joiner catches up."""
        return self.inflight_bytes + (self.cursor.load()[0] if self.cursor is not None else 0)

    @property
    def cache_taken(self) -> bool:
        """Whether nothing is left of what joining gave, the message in flight included."""
        given = self._inflight is not None and self._inflight.given
        return not given and (self.cursor is None or self.cursor.cache_taken)

    # -- thinning and ending

    def thin(self, mode: Thin, limits: Limits, now: float, reason: DropReason) -> None:
        cursor, backlog = self.cursor, self.backlog
        if mode is Thin.DROPPABLE:
            backlog.drop_droppable(reason)
            if cursor is not None:
                drop_droppable(cursor, reason, now)
        elif mode is Thin.TO_KEY_FRAME:
            if cursor is not None:
                room = self._room(limits, now, *backlog.own_load)
                thin_to_key_frame(cursor, room, now, reason)
            size, messages = cursor.bounded() if cursor is not None else (0, 0)
            backlog.drop_oldest(self._room(limits, now, size, messages), reason)

    def cut_behind(self, timing: Timing) -> bool:
        """Leave out what of the followed log would be late behind all that goes before it; return whether any."""
        timing.held_bytes += self.backlog.size_bytes + self.inflight_bytes
        return self.cursor is not None and cut_behind(self.cursor, timing)

    def skip_to_key(self, limits: Limits, now: float) -> bool:
        """Go to the newest key frame of the log, or thin sound to `limits`; return whether that was ahead."""
        cursor, backlog = self.cursor, self.backlog
        return cursor is not None and skip_to_key(cursor, self._room(limits, now, *backlog.own_load), now)

    def _room(self, limits: Limits, now: float, more_bytes: int, more_messages: int) -> Headroom:
        """Return what a part of the queue may hold for the whole to be at the low marks; `more_...` is in the rest."""
        backlog, overhead = self.backlog, limits.overhead_bytes
        rest = self.inflight_bytes
        fixed = len(backlog.control) + (1 if rest else 0) + more_messages
        size = limits.size.marks[0] - rest - backlog.control.size_bytes - more_bytes - fixed * overhead
        return Headroom(size, limits.messages.marks[0] - fixed, now - limits.age_ms.marks[0] / 1000, overhead)

    def follow(self, cursor: LogCursor) -> None:
        self.cursor = cursor

    def unfollow(self, reason: DropReason) -> None:
        """Drop what is queued from the followed log and keep its accounts; a message in flight stays."""
        cursor = self.cursor
        if cursor is None:
            return
        cursor.drop_everything(reason)
        accepted, dropped, _ = cursor.balance()
        past = self._past = self._past or _PastAccounts()
        past.accepted.add_figures(accepted)
        add_by_reason(past.dropped, dropped)
        past.restarts += cursor.restarts
        past.key_waits_expired += cursor.key_waits_expired
        self.cursor = None

    def drop_everything(self, reason: DropReason) -> None:
        """Drop all there is, the message in flight too: the connection is over."""
        self.unfollow(reason)
        self.backlog.drop_everything(reason)
        if self._inflight is not None:
            past = self._past = self._past or _PastAccounts()
            add_by_reason(past.dropped, {DropReason.CLOSED: self._inflight_figures()})
            self.unfinished = self._inflight.rest
            self._inflight = None

    # -- accounts

    def accounts(self) -> tuple[Counts, dict[DropReason, Counts], Counts]:
        """Return (accepted, dropped by reason, queued) by class; what is in none of the last two was sent.

        A message in flight counts as queued until its last byte is out.
        """
        return as_counts(self._balance())

    def figures(self) -> tuple[Figures, Figures, Figures]:
        """Return (accepted, dropped, queued) as `accounts` does, as figures and for all reasons together."""
        accepted, dropped, queued = self._balance()
        lost = NO_FIGURES
        for figures in dropped.values():
            lost = tuple(map(add, lost, figures))
        return accepted, lost, queued

    def _balance(self) -> Balance:
        backlog, past = self.backlog, self._past
        accepted, dropped, queued = self.cursor.balance() if self.cursor is not None else (NO_FIGURES, {}, NO_FIGURES)
        accepted = tuple(map(add, accepted, backlog.accepted))
        if backlog.dropped:
            add_by_reason(dropped, backlog.dropped)
        if len(backlog):
            for queue in backlog.queues:
                queued = tuple(map(add, queued, queue.tally))
        if self._inflight is not None:
            queued = tuple(map(add, queued, self._inflight_figures()))
        if past is not None:
            accepted = tuple(map(add, accepted, past.accepted))
            add_by_reason(dropped, past.dropped)
        return accepted, dropped, queued

    def dropped(self) -> dict[DropReason, Counts]:
        return self.accounts()[1]

    @property
    def restarts(self) -> int:
        return sum(part.restarts for part in (self._past, self.cursor) if part is not None)

    @property
    def key_waits_expired(self) -> int:
        return sum(part.key_waits_expired for part in (self._past, self.cursor) if part is not None)

    @property
    def waiting_for_key(self) -> bool:
        return self.cursor is not None and self.cursor.waiting_for_key

    @property
    def inflight_bytes(self) -> int:
        return 0 if self._inflight is None else len(self._inflight.rest)

    def _inflight_figures(self) -> Tally:
        figures = Tally()
        if self._inflight is not None:
            figures.add(self._inflight.message_class, self._inflight.size_bytes)
        return figures


def would_block(error: Exception) -> bool:
    """Return whether a write that raised `error` may be tried again later: EAGAIN, or what TLS says in its place.

    Those two of `ssl` are no BlockingIOError. They are known by their names, for importing `ssl` takes
    20 ms, which nobody needs whose transports are plain sockets.
    """
    return isinstance(error, BlockingIOError) or type(error).__name__ in _TLS_WOULD_BLOCK


def gather_write(transport: Transport, buffers: list[bytes | memoryview]) -> tuple[int, bool, OSError | None]:
    """Write all of `buffers` with as many calls as it takes, until done or EAGAIN.

    A call that takes only a part is followed by another: only EAGAIN itself is proof that the kernel is full.
    """
    left = sum(map(len, buffers))
    written = 0
    while left:
        try:
            count = transport.sendmsg(buffers)
        except BlockingIOError:
            return written, True, None
        except OSError as error:
            blocked = would_block(error)
            return written, blocked, None if blocked else error.with_traceback(None)
        if not count:  # no socket does this; a transport that does must not spin us
            return written, True, None
        written += count
        left -= count
        if left:
            buffers = _unwritten(buffers, count)
    return written, False, None


def write_one(transport: Transport, data: bytes) -> tuple[int, bool, OSError | None]:
    """Do what `gather_write` does for one message, which the kernel nearly always takes whole."""
    try:
        written = transport.send(data)
    except BlockingIOError:
        return 0, True, None
    except OSError as error:
        blocked = would_block(error)
        return 0, blocked, None if blocked else error.with_traceback(None)
    if written == len(data):
        return written, False, None
    more, blocked, failure = gather_write(transport, [memoryview(data)[written:]]) if written else (0, True, None)
    return written + more, blocked, failure


def _unwritten(buffers: list[bytes | memoryview], count: int) -> list[bytes | memoryview]:
    """Return what is left of `buffers` after their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [memoryview(buffer)[count:], *islice(buffers, index + 1, None)]
        count -= len(buffer)
    return []
