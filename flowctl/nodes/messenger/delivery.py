"""Delivery to one peer (pure): pending until acknowledged, tried again with backoff, given up at last; and its credit.

Theory of operation. A message is *unacknowledged* from `submit` to its outcome: acknowledged, or given up because its
deadline passed or its attempts are used up. In that time it is in one of three places: *ready* (to be sent by
`take_ready`), *under way* (with a time for the next attempt), or *waiting* for an ordered one before it.

Order. Where the peer understands the extension, each ordered message names the one before it, and the peer holds it
back until that was handled. Without the extension one ordered message is under way at a time. Before the peer's first
word the first ordered message goes so, and those behind it are *undecided*: that word, its acknowledgement, decides.

Attempts. A peer that works through a long queue acknowledges its messages one after the other; those at the end of it
are not lost. So a message is tried again only when one that went after it was acknowledged, or when nothing that went
before it was for the time of its backoff.

Credit. At most `window` messages, and `window_bytes`, are unacknowledged; beyond, `submit` refuses. The same load
drives the four states of a Sender (`flowctl.core.flow.state`): OVERLOADED while messages are refused (nobody is
connected, or its queue is full), SOFT_LIMIT from half of the window on or once the oldest has waited for `slow_age_s`,
HARD_LIMIT where the window is used up. HARD_LIMIT is held, never final.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import accumulate
from random import Random
from typing import Final

from flowctl.core.flow.limits import AxisLimits, HardPolicy, Limits
from flowctl.core.flow.state import FlowCore, Load, SendState, StateChange
from flowctl.core.outcomes.backoff import Backoff
from flowctl.core.outcomes.pending import Outcome, Pending
from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import BusyError, ConfigError, RemoteProtocolError

_RECORD: Final = struct.Struct(">BBQQQQdI")
_LENGTH: Final = struct.Struct(">I")
_RECORD_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliverySettings:
    """How messages to one peer are delivered.

    Args:
        window: unacknowledged messages at a time, 1 or more.
        window_bytes: octets of them, with 96 for each message, 1 or more; one message alone is always taken.
        slow_age_s: SOFT_LIMIT once the oldest has waited so long, 0.001 or more. 0: at no age.
        retry: times between attempts.
        max_attempts: attempts after which a message is given up, 1 or more. None: it is tried for ever.

    Raises:
        ConfigError: a value is out of range.
    """

    window: int = 4096
    window_bytes: int = 64 << 20
    slow_age_s: float = 10.0
    retry: Backoff = field(default_factory=lambda: Backoff(first_s=0.5, factor=2.0, most_s=10.0))
    max_attempts: int | None = 12

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("window", "window_bytes", "max_attempts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, it must be 1 or more")
        if not (self.slow_age_s == 0 or self.slow_age_s >= 0.001):
            raise ConfigError(f"slow_age_s is {self.slow_age_s}, it must be 0.001 or more, or 0 (at no age)")

    def limits(self) -> Limits:
        """Return the marks of the states."""
        return Limits(
            size=AxisLimits(soft=max(1, self.window_bytes // 2), hard=self.window_bytes, name="bytes"),
            messages=AxisLimits(soft=max(1, self.window // 2), hard=self.window, name="messages"),
            age_ms=AxisLimits(soft=round(self.slow_age_s * 1000), hard=0, name="age (ms)"),
            hard_policy=HardPolicy.HOLD,
        )


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message on its way.

    Args:
        source_callback: id of our callback for the response; 0: none.
        ordered: whether it is handled after all earlier ordered ones to this peer.
        deadline: seconds on the caller's clock at which it is given up; None: by attempts alone.
        target: incarnation of the peer whose callback is meant; 0: not known.
        ticket: the owner's, handed back with the outcome.

    Attributes:
        plain: it goes without the extension, now and at each attempt: the peer had not announced it. None: that is
            decided at its first attempt. A message that went now with its sequence and now without would be two to
            the peer.
    """

    message_id: int
    source_callback: int
    destination_callback: int
    body: bytes
    payload: tuple[bytes, ...] = ()
    ordered: bool = False
    deadline: float | None = None
    target: int = 0
    ticket: object = None
    plain: bool | None = field(default=True, init=False)
    sequence: int = field(default=0, init=False)
    after: int = field(default=0, init=False)
    attempts: int = field(default=0, init=False)
    turn: int = field(default=0, init=False)
    since: float = field(default=0.0, init=False)
    size_bytes: int = field(default=0, init=False)
    settled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.size_bytes = len(self.body) + sum(map(len, self.payload))


@dataclass(slots=True, eq=False)
class Delivery:
    """The unacknowledged messages to one peer. Not locked: its owner does that."""

    _settings: DeliverySettings
    _rng: Random
    now: InitVar[float]
    next_sequence: int = 1
    durable: bool = field(default=False, kw_only=True)
    announced: bool | None = None  #: the peer understands the extension; None: it has said nothing yet
    size_bytes: int = 0
    retry_count: int = 0  #: attempts after the first, of all messages
    late_count: int = 0  #: acknowledgements of messages that were not (any more) unacknowledged
    _core: FlowCore = field(init=False)
    _unacknowledged: dict[int, Outgoing] = field(default_factory=dict)  #: by message id, in order of sequence
    _timers: Pending[int, Outgoing] = field(default_factory=Pending)  #: next attempt, or deadline
    ready: deque[Outgoing] = field(default_factory=deque)  #: what `take_ready` looks at
    _refused: dict[int, Outgoing] = field(default_factory=dict)  #: they were not taken at their last attempt
    _waiting: deque[Outgoing] = field(default_factory=deque)  #: ordered ones, for the end of `_plain_ordered`
    _plain_ordered: Outgoing | None = None  #: the ordered one that is under way without the extension
    _decided: list[Outgoing] = field(default_factory=list)  #: see `take_decided`
    _last_ordered: int = 0
    _ordered: dict[int, None] = field(default_factory=dict)  #: sequences of unacknowledged ordered ones, ascending
    edges: list[StateChange] = field(default_factory=list)  #: see `take_edges`
    _has_retried: bool = False  #: since the last attempts that a timer made
    _turn: int = 0  #: counts attempts, of all messages
    _acknowledged_turn: int = 0  #: the latest attempt of those whose message was acknowledged
    _progress_at: float = field(init=False)  #: when that was

    def __post_init__(self, now: float) -> None:
        self._core = FlowCore(self._settings.limits(), now)
        self._progress_at = now

    # --- inputs --------------------------------------------------------------------------------------------------

    def submit(self, message: Outgoing, now: float) -> None:
        if self.full(message.size_bytes):
            size_bytes, count, age_ms = self.load(now)  # with this one it would be above the mark
            size_bytes += message.size_bytes + self._core.limits.overhead_bytes
            self._note(self._core.queued(Load(size_bytes, count + 1, age_ms), now))
            raise BusyError(
                f"{len(self._unacknowledged)} messages of {self.size_bytes} bytes to this peer are unacknowledged; "
                f"its window is {self._settings.window} messages, {self._settings.window_bytes} bytes",
                hint="wait for room: wait_s, or `await send(...)`",
            )
        undecided = self.announced is None and message.ordered and self._ordered
        message.plain = None if undecided else not self.announced
        message.sequence = self.next_sequence
        self.next_sequence += 1
        if message.ordered:
            message.after, self._last_ordered = self._last_ordered or message.sequence, message.sequence
        self._enter(message, now)
        if not self.durable:
            self.ready.append(message)
        core, count = self._core, len(self._unacknowledged)
        reaches = core.reaches_soft if core.state < SendState.SOFT_LIMIT else core.reaches_hard
        if core.state < SendState.HARD_LIMIT and reaches(self.size_bytes, count):
            self._note(core.queued(self.load(now), now))

    def restore(self, message: Outgoing, sequence: int, after: int, now: float) -> None:
        """Take a message of an earlier life under its old number; in order of their sequences, before any other."""
        message.sequence, message.after = sequence, after
        if message.ordered:
            self._last_ordered = sequence
        self._enter(message, now)
        self.ready.append(message)

    def release(self, message: Outgoing) -> None:
        if not message.settled:
            self.ready.append(message)

    def take_ready(self, now: float, most: int) -> list[Outgoing]:
        """Return up to `most` messages that are to be sent now; each counts as an attempt."""
        taken: list[Outgoing] = []
        ready = self.ready
        retry, rng, timers = self._settings.retry, self._rng, self._timers
        while ready and len(taken) < most:
            message = ready.popleft()
            if message.settled or (message.ordered and self._must_wait(message)):
                continue
            if message.after and message.after not in self._ordered:
                message.after = self._ordered_before(message.sequence)  # what it waited for has its outcome
            self._turn += 1
            message.turn = self._turn
            message.attempts += 1
            if message.attempts > 1:
                self.retry_count += 1
            message_id = message.message_id
            if message_id in timers:
                timers.take(message_id)
            due = now + retry.delay_s(message.attempts, rng)
            if message.deadline is not None and message.deadline < due:
                due = message.deadline
            timers.add(message_id, message, due)
            taken.append(message)
        return taken

    def take_decided(self) -> list[Outgoing]:
        """Return messages stored as undecided that go without the extension; send them after the next `release`.

        What went so in an earlier life has to go so in the next one, whatever the peer says by then.
        """
        decided, self._decided = self._decided, []
        return decided

    def note_taken(self, messages: Sequence[Outgoing], now: float) -> None:
        """Note that these messages were taken."""
        if messages and self._core.would_block:
            for message in messages:
                self._refused.pop(message.message_id, None)
            self._has_retried = False
            self._unblock(now)

    def put_back(self, messages: Sequence[Outgoing], now: float) -> None:
        """Take back, in their order, what found no room in its connection: that was no attempt, and has no time."""
        for message in reversed(messages):
            message.attempts -= 1
            self.retry_count -= message.attempts > 0
            self._timers.take(message.message_id)
            if message.deadline is not None:
                self._timers.add(message.message_id, message, max(0.0, message.deadline))
            self.ready.appendleft(message)
        self._block(now)

    def connected_anew(self) -> None:
        """Make ready what went by a connection before and is not acknowledged, in its order: it may be lost.

        Later ones alone would find no room where the first is missing. It counts as the attempt that it was.
        """
        sent = {number: message for number, message in self._unacknowledged.items() if message.attempts}
        if sent:
            for message in sent.values():
                message.attempts -= 1
            self._refused.clear()
            self.ready = deque([*sent.values(), *(item for item in self.ready if item.message_id not in sent)])

    def note_refused(self, messages: Iterable[Outgoing], now: float) -> None:
        """Note that these were refused, for there is no connection. They wait for their next attempt."""
        for message in messages:
            if not message.settled:
                self._refused[message.message_id] = message
        if self._refused:
            self._block(now)

    def retry_refused(self) -> bool:
        """Make ready what was refused, for the peer showed life; return whether there is any.

        Once between two attempts: a peer that speaks and cannot be reached must not make us try at each of its words.
        """
        if self._has_retried or not self._refused:
            return False
        self._has_retried = True
        self.ready.extend(self._refused.values())
        return True

    def note_acknowledged(self, first: int, last: int, now: float) -> list[Outgoing]:
        """Message ids `first` to `last` were received; return those that were unacknowledged until now."""
        return self.note_acknowledged_ranges([(first, last)], now)

    def note_acknowledged_ranges(self, ranges: Sequence[tuple[int, int]], now: float) -> list[Outgoing]:
        """Do the same for several ranges; O(messages), however many and vast the ranges are."""
        unacknowledged = self._unacknowledged
        messages = [unacknowledged[number] for number in _within(unacknowledged, ranges)]
        for message in messages:
            self._settle(message)
            if message.turn > self._acknowledged_turn:
                self._acknowledged_turn, self._progress_at = message.turn, now
        if not messages:
            self.late_count += 1
        elif self._core.state:
            self._settled(now)
        return messages

    def take_due(self, now: float, *, held: bool = False) -> list[tuple[Outgoing, Outcome]]:
        """Make ready what is to be tried again, and return what is given up: TIMEOUT, or REJECTED after all attempts.

        To be called at `next_deadline`. `held`: what was sent waits still in its connection, so none of it is lost.
        """
        given_up: list[tuple[Outgoing, Outcome]] = []
        most = self._settings.max_attempts
        self._has_retried = False
        for _, message in self._timers.take_due(now):
            if message.deadline is not None and now >= message.deadline:
                given_up.append((message, Outcome.TIMEOUT))
            elif self._is_in_line(message, now, held=held):
                continue
            elif most is not None and message.attempts >= most:
                given_up.append((message, Outcome.REJECTED))
            else:
                self.ready.append(message)
        for message, _ in given_up:
            self._settle(message)
        if any(message.ordered for message, _ in given_up):
            self._nudge()
        if given_up:
            self._settled(now)
        elif self._unacknowledged:
            self._note(self._core.ticked(self.load(now), now))
        return given_up

    def withdraw(self, message: Outgoing, now: float) -> bool:
        """Give up a message; False: it has its outcome already."""
        if message.settled:
            return False
        self._settle(message)
        if message.ordered:
            self._nudge()
        self._settled(now)
        return True

    # --- what it is ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> SendState:
        return self._core.state

    @property
    def floor(self) -> int:
        """The lowest sequence that is unacknowledged; the next one where none is."""
        for message in self._unacknowledged.values():
            return message.sequence
        return self.next_sequence

    def full(self, size_bytes: int) -> bool:
        """Return whether a message of this size is refused."""
        count = len(self._unacknowledged)
        if not count:
            return False
        overhead = self._core.limits.overhead_bytes * (count + 1)
        settings = self._settings
        return count >= settings.window or self.size_bytes + size_bytes + overhead > settings.window_bytes

    def next_deadline(self) -> float | None:
        return self._timers.next_deadline()

    def take_edges(self) -> list[StateChange]:
        edges, self.edges = self.edges, []
        return edges

    def __len__(self) -> int:
        return len(self._unacknowledged)

    def __iter__(self) -> Iterator[Outgoing]:
        """Yield the unacknowledged messages, oldest first; they may be withdrawn meanwhile."""
        return iter(list(self._unacknowledged.values()))

    # --- inner steps ---------------------------------------------------------------------------------------------

    def _block(self, now: float) -> None:
        if not self._core.would_block:
            self._note(self._core.blocked(self.load(now), now))

    def _enter(self, message: Outgoing, now: float) -> None:
        message.since = now
        if message.ordered:
            self._ordered[message.sequence] = None
        self._unacknowledged[message.message_id] = message
        self.size_bytes += message.size_bytes
        if message.deadline is not None:
            self._timers.add(message.message_id, message, max(0.0, message.deadline))

    def _is_in_line(self, message: Outgoing, now: float, *, held: bool) -> bool:
        """Put off the next attempt of a message while the peer is busy with those that went before it."""
        if not message.attempts or message.message_id in self._refused:
            return False
        if message.turn < self._acknowledged_turn and not held:
            return False
        since = now if held else self._progress_at
        until = since + self._settings.retry.delay_s(message.attempts, self._rng)
        if until <= now:
            return False
        if message.deadline is not None:
            until = min(until, message.deadline)
        self._timers.add(message.message_id, message, until)
        return True

    def _ordered_before(self, sequence: int) -> int:
        """Return the last unacknowledged ordered one before `sequence`, which is one itself; if none is, that."""
        if next(iter(self._ordered)) == sequence:
            return sequence
        return max(number for number in self._ordered if number < sequence)

    def _must_wait(self, message: Outgoing) -> bool:
        """Put an ordered message aside while one is under way to a peer that keeps no order by itself."""
        if self._plain_ordered is message:
            return False
        if self._plain_ordered is not None:
            self._waiting.append(message)
            return True
        undecided, message.plain = message.plain is None, self._goes_plain(message)
        if message.plain:
            self._plain_ordered = message
        if undecided and message.plain and self.durable:
            self._decided.append(message)
            return True
        return False

    def _goes_plain(self, message: Outgoing) -> bool:
        return not self.announced if message.plain is None else message.plain

    def _settle(self, message: Outgoing) -> None:
        message.settled = True
        if message.ordered:
            self._ordered.pop(message.sequence, None)
        message_id = message.message_id
        del self._unacknowledged[message_id]
        if message_id in self._timers:
            self._timers.take(message_id)
        self.size_bytes -= message.size_bytes
        self._refused.pop(message_id, None)
        if message is self._plain_ordered:
            self._plain_ordered = None
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Let the next ordered message go, and those behind it too where the peer keeps the order itself."""
        while self._waiting:
            message = self._waiting.popleft()
            if message.settled:
                continue
            if not self._goes_plain(message):  # nor do those behind it
                self.ready.extendleft(reversed(self._waiting))
                self._waiting.clear()
            self.ready.appendleft(message)
            return

    def _nudge(self) -> None:
        """An ordered message was given up: send the next one again, which says so, for it is held back at the peer."""
        for message in self._unacknowledged.values():
            if message.ordered and message.attempts:
                self.ready.append(message)
                return

    def load(self, now: float) -> Load:
        """Return what is unacknowledged."""
        count = len(self._unacknowledged)
        since = next(iter(self._unacknowledged.values())).since if count else now
        size_bytes = self.size_bytes + count * self._core.limits.overhead_bytes
        return Load(size_bytes, count, max(0.0, now - since) * 1000)

    def _settled(self, now: float) -> None:
        self._note(self._core.sent(self.load(now), now))
        self._unblock(now)

    def _unblock(self, now: float) -> None:
        if self._core.would_block and not self._refused:
            self._note(self._core.drained(now, self.load(now)))

    def _note(self, change: StateChange | None) -> None:
        if change is not None:
            self.edges.append(change)


def _within(numbers: Collection[int], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return those of `numbers`, a dict's keys, that are in a range."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        number = ranges[0][0]
        return [number] if number in numbers else []
    if sum(max(0, last - first) + 1 for first, last in ranges) <= len(numbers):
        return list(dict.fromkeys(n for first, last in ranges for n in range(first, last + 1) if n in numbers))
    ordered = sorted(ranges)
    firsts = [first for first, _ in ordered]
    reach = list(accumulate((last for _, last in ordered), max))  # by the ranges up to each
    places = ((number, bisect_right(firsts, number) - 1) for number in numbers)
    return [number for number, place in places if place >= 0 and number <= reach[place]]


def encode_record(message: Outgoing, deadline_at: float | None) -> bytes:
    head = _RECORD.pack(
        _RECORD_VERSION,
        message.ordered | (4 if message.plain is None else message.plain << 1),
        message.source_callback,
        message.destination_callback,
        message.target,
        message.after,
        deadline_at or 0.0,
        len(message.payload),
    )
    parts = [head, _LENGTH.pack(len(message.body)), message.body]
    for frame in message.payload:
        parts += [_LENGTH.pack(len(frame)), frame]
    return b"".join(parts)


def decode_record(message_id: int, record: bytes) -> tuple[Outgoing, int, float | None]:
    """Return the message, the sequence that it is ordered after, and its deadline on the wall clock."""
    try:
        version, flags, source, destination, target, after, deadline_at, count = _RECORD.unpack_from(record)
        frames, at = [], _RECORD.size
        for _ in range(count + 1):
            (length,) = _LENGTH.unpack_from(record, at)
            at += _LENGTH.size
            frames.append(record[at : at + length])
            at += length
    except struct.error as error:
        raise RemoteProtocolError(f"the stored message {message_id} is damaged", code="messenger-record") from error
    if version != _RECORD_VERSION or at != len(record):
        raise RemoteProtocolError(f"the stored message {message_id} is of another version", code="messenger-record")
    message = Outgoing(message_id, source, destination, frames[0], tuple(frames[1:]), bool(flags & 1), target=target)
    message.plain = None if flags & 4 else bool(flags & 2)
    return message, after, deadline_at or None
