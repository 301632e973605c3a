"""A viewer's place in a log with keys: one that is behind gets the newest value of each key, and no other (pure).

How it works. In the cohort a viewer stands at an entry of the log as any other, and gets every message. Out of it, it
stands at two places: at an entry of the log's list of messages without a key, which are queued, refused and thinned as
in any log; and at the number of a message, from which on the values of the log wait for it. A value that is superseded
is in the log no more, and so in no queue. So what a stalled viewer holds is what has no key, and a number, and nothing
is done for it while values come.

Both parts are handed over in the order in which they were published. Where control messages or a long queue of which
little is left are copied out of the log, those come first.

The newest value of a key is as good as the state of what it stands for: no policy refuses it and none thins it. It is
dropped where the application asks for that (`Sender.thin`), or the viewer leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import add, sub
from typing import Final, TypeVar, cast

from flowctl.core.flow.counts import Balance, add_by_reason
from flowctl.core.flow.policy import Headroom
from flowctl.core.flow.state import CLASS_COUNT, MessageClass
from flowctl.core.flow.timing import Timing
from flowctl.core.outgoing.backlog import Item
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.latest import LatestValues, Value
from flowctl.core.outgoing.streamlog import Entry, KeyedEntry, Place, StreamLog
from flowctl.reasons import DropReason

_DATA: Final = MessageClass.DATA
_T = TypeVar("_T")
Amount = tuple[int, int]
"""(messages, wire bytes) of values."""


class ConflatingCursor(LogCursor):
    """One viewer's position in one log with keys. Not thread-safe: its Sender's lock guards it.

    Args:
        latest: whether it gets the newest value of each key first; `start` is the log's end then.
    """

    __slots__ = ("_before", "_end", "_gone", "_handed", "_joined", "_latest", "_next")

    def __init__(
        self,
        log: StreamLog,
        *,
        now: float,
        start: Entry | None = None,
        prefix: tuple[bytes, ...] = (),
        latest: bool = False,
    ) -> None:
        self._latest = cast("LatestValues", log.latest)
        values = (0, 0)
        if latest:
            start, values = log.look(partial(self._latest.figures, 0))
        super().__init__(log, now=now, start=start, prefix=prefix)
        self._joined = self.place.entry.sequence  # values from before are what joining gave
        self._next: int | None = None  # message number from which on values wait; None: they are not told apart
        self._before: Amount = (0, 0)  # values of the log before it stood alone
        self._gone: Amount = (0, 0)  # values since then that were handed over or dropped
        self._handed: list[tuple[int, Value]] = []  # values among the messages of the last `peek`
        self._end: Entry | None = None  # of the messages without a key, at the moment that is looked at
        self.stand_alone()
        if latest:
            self._next = 0
            self._before = self._before[0] - values[0], self._before[1] - values[1]
            self.cached_bytes += values[1]

    # -- in the cohort and out of it

    def stands_at(self, entry: Entry) -> bool:
        if self._next is None or not isinstance(entry, KeyedEntry):
            return super().stands_at(entry)
        self._settle()
        if self.place.entry is not entry.loose or self._copies is not None:
            return False
        _, values = self.log.look(partial(self._latest.values, self._next))
        return not values or values[0].sequence >= entry.sequence

    def enter(self, place: Place) -> None:
        entry = place.entry
        self._settle_values(cast("KeyedEntry", entry), (0, 0))
        accepted = map(sub, self.place.entry.counts + self.place.entry.sizes, self._base_counts + self._base_sizes)
        self._stand_in(self.log, place, tuple(accepted))

    def stand_alone(self) -> None:
        entry = cast("KeyedEntry", self.place.entry)
        passed = map(sub, entry.counts + entry.sizes, self._base_counts + self._base_sizes)
        self._stand_in(cast("StreamLog", self.log.loose), Place(entry.loose), tuple(passed))
        self._before, self._gone, self._next = _values_before(entry), (0, 0), entry.sequence
        if isinstance(self.joining_to, KeyedEntry):
            self.joining_to = self.joining_to.loose

    def _stand_in(self, chain: StreamLog, place: Place, accepted: tuple[int, ...]) -> None:
        """Go on at `place` of `chain`, up to which so much was accepted."""
        entry = place.entry
        base = tuple(map(sub, entry.counts + entry.sizes, accepted))
        self._base_counts, self._base_sizes = base[:CLASS_COUNT], base[CLASS_COUNT:]
        self.chain, self.place = chain, place

    def _settle_values(self, end: KeyedEntry, kept: Amount) -> None:
        """Count the values up to `end` as those of any message, but for `kept`, which wait on; the rest is gone."""
        messages, size = map(sub, _values_before(end), self._before)
        base = [*self._base_counts], [*self._base_sizes]
        base[0][_DATA] -= messages
        base[1][_DATA] -= size
        self._base_counts, self._base_sizes = tuple(base[0]), tuple(base[1])
        self._add_dropped(DropReason.SUPERSEDED, self._superseded(end, kept))
        self._next = None

    # -- the queue

    def load(self) -> tuple[int, int]:
        if self._next is None:
            return super().load()
        with self._moment(self._latest.figures) as (_, (messages, size)):
            return cast("tuple[int, int]", tuple(map(add, super().load(), (size, messages))))

    def oldest_at(self) -> float | None:
        since = super().oldest_at()
        if self._next is None:
            return since
        value = self._latest.first(self._next)
        if value is None:
            return since
        waiting = max(value.since, self.joined_at)
        return waiting if since is None else min(since, waiting)

    def allowance(self) -> tuple[int, int]:
        size, messages = super().allowance()
        if self.joining_to is not None and self._next is not None and self._next < self._joined:
            (all_messages, all_bytes), (more_messages, more_bytes) = map(
                self._latest.figures, (self._next, self._joined)
            )
            return size + all_bytes - more_bytes, messages + all_messages - more_messages
        return size, messages

    def oldest_counted_at(self) -> float | None:
        since = super().oldest_counted_at()
        value = None if self._next is None else self._latest.first(max(self._next, self._joined))
        if self.joining_to is None or value is None:
            return since
        waiting = max(value.since, self.joined_at)
        return waiting if since is None else min(since, waiting)

    @property
    def cache_taken(self) -> bool:
        if not super().cache_taken or self.joining_to is None or self._next is None:
            return super().cache_taken
        value = self._latest.first(self._next)
        return value is None or value.sequence >= self._joined

    @property
    def caught_up(self) -> bool:
        return super().caught_up and (self._next is None or self._latest.first(self._next) is None)

    # -- handing over

    def peek(self, most: int, budget_bytes: int, timing: Timing | None = None) -> list[Item]:
        self._handed = []
        if self._next is None:
            return super().peek(most, budget_bytes, timing)
        with self._moment(self._latest.values) as (_, values):
            return self._peek_beside(iter(values), self._handed, most, budget_bytes, timing)

    def pass_messages(self, count: int) -> None:
        passed = [value for index, value in self._handed if index < count]
        self._handed = []
        super().pass_messages(count - len(passed))
        if passed:
            self._next = passed[-1].sequence + 1
            messages, size = self._gone
            self._gone = messages + len(passed), size + sum(len(value.wire) for value in passed)

    # -- accounts

    def balance(self) -> Balance:
        if self._next is None:
            return super().balance()
        with self._moment(self._latest.figures) as (tail, waiting):
            accepted, dropped, queued = super().balance()
        superseded = self._superseded(tail, waiting)
        add_by_reason(dropped, {DropReason.SUPERSEDED: _as_figures(superseded)} if superseded[0] else {})
        published = _as_figures(cast("Amount", tuple(map(sub, _values_before(tail), self._before))))
        return tuple(map(add, accepted, published)), dropped, tuple(map(add, queued, _as_figures(waiting)))

    def _superseded(self, end: KeyedEntry, waiting: Amount) -> Amount:
        """Return how much was superseded before `end`, if so much is `waiting`."""
        return cast(
            "Amount",
            tuple(
                after - before - gone - left
                for after, before, gone, left in zip(
                    _values_before(end), self._before, self._gone, waiting, strict=True
                )
            ),
        )

    # -- dropping, and the end

    def thin_to_key_frame(self, room: Headroom, now: float, reason: DropReason = DropReason.THINNED) -> None:
        super().thin_to_key_frame(self._beside_values(room), now, reason)

    def skip_to_live(self, room: Headroom, now: float) -> bool:
        return super().skip_to_live(self._beside_values(room), now)

    def drop_droppable(self, reason: DropReason, now: float) -> None:
        if self._next is not None and reason is DropReason.REQUESTED:
            tail, waiting = self._look(self._latest.figures)
            self._add_dropped(reason, waiting)
            self._gone = self._gone[0] + waiting[0], self._gone[1] + waiting[1]
            self._next = tail.sequence
        super().drop_droppable(reason, now)

    def finish(self, now: float) -> None:
        if self._next is not None:
            tail, values = self._look(self._latest.values)
            for value in values:
                self._copy_out(value.after)
                self._push_copy(_DATA, value.wire, value.since)
            self._settle_values(tail, _amount(values))
        super().finish(now)

    def drop_everything(self, reason: DropReason) -> None:
        if self._next is not None:
            tail, waiting = self._look(self._latest.figures)
            self._add_dropped(reason, waiting)
            self._settle_values(tail, waiting)
        super().drop_everything(reason)

    # -- inside

    def _tail(self) -> Entry:
        return self._stop or self._end or self.chain.tail

    def _look(self, read: Callable[[int], _T]) -> tuple[KeyedEntry, _T]:
        """Return the log's tail, and what `read` says of the values that wait, at one moment."""
        return cast("tuple[KeyedEntry, _T]", self.log.look(partial(read, self._next or 0)))

    @contextmanager
    def _moment(self, read: Callable[[int], _T]) -> Iterator[tuple[KeyedEntry, _T]]:
        """Look as `_look` does; within, the messages without a key end at the same moment."""
        tail, found = self._look(read)
        self._end = tail.loose
        try:
            yield tail, found
        finally:
            self._end = None

    def _beside_values(self, room: Headroom) -> Headroom:
        """Return what is left of `room` for messages without a key."""
        if self._next is None:
            return room
        messages, size = self._latest.figures(self._next)
        return room._replace(
            size_bytes=room.size_bytes - size - messages * room.overhead_bytes, messages=room.messages - messages
        )

    def _add_dropped(self, reason: DropReason, amount: Amount) -> None:
        if amount[0]:
            self._tally(reason).add_figures(_as_figures(amount))


def _values_before(entry: KeyedEntry) -> Amount:
    """Return how many messages before `entry` had a key."""
    loose = entry.loose
    return entry.counts[_DATA] - loose.counts[_DATA], entry.sizes[_DATA] - loose.sizes[_DATA]


def _amount(values: list[Value]) -> Amount:
    return len(values), sum(len(value.wire) for value in values)


def _as_figures(amount: Amount) -> tuple[int, ...]:
    figures = [0] * (2 * CLASS_COUNT)
    figures[_DATA], figures[_DATA + CLASS_COUNT] = amount
    return tuple(figures)
