"""A viewer's place in a log with keys: one that is behind gets the newest value of each key, and no other (pure).

How it works. In the cohort a viewer stands at an entry of the log as any other, and gets every message. Out of it, it
stands at two places: at an entry of the log's list of messages without a key, which are queued, refused and thinned as
in any log; and at the number of a message, from which on the values of the log wait for it. A value that is superseded
is in the log no more, and so in no queue. So what a stalled viewer holds is what has no key, and a number, and nothing
is done for it while values come.

Both parts are handed over in the order in which they were published: of a key, that is when its newest value was. A
viewer whose line carries less than is published would so get the same keys each time, those that come first in every
round of its publisher. Therefore what waited when it stopped comes before what was published since, and of that, the
keys behind the one at which it stopped come first: all have their turn. Such a viewer has up to three *spans* of
numbers in place of one.

Where control messages or a long queue of which little is left are copied out of the log, those come first.

In a twin, values are brought into its form as they are handed over, a few at a time. While they wait they count as they
are in the log itself, so that what one viewer is handed changes nothing in the accounts of another.

The newest value of a key is as good as the state of what it stands for: no policy refuses it and none thins it. It is
dropped where the application asks for that (`Sender.thin`), or the viewer leaves.

Values that wait are memory of the log, which all viewers share, and no queue of this one's: no limit of bytes or
messages is for them, or a log with more keys than a queue may have messages would lose each viewer that falls behind
for a moment, again and again. Nor are they too old because a key changes rarely: what counts is the time in which the
viewer got nothing though something waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import add, sub
from typing import Final, TypeVar, cast

from flowctl.core.flow.counts import Balance, add_by_reason
from flowctl.core.flow.state import CLASS_COUNT, MessageClass
from flowctl.core.flow.timing import Timing
from flowctl.core.outgoing.backlog import Item
from flowctl.core.outgoing.cursor import Gathered, HandedValue, LogCursor
from flowctl.core.outgoing.latest import EVERYTHING, NO_END, Amount, LatestValues, Spans, Value
from flowctl.core.outgoing.streamlog import Entry, KeyedEntry, Place, StreamLog
from flowctl.reasons import DropReason

_DATA: Final = MessageClass.DATA
_TRANSFORMED_BYTES: Final = 64 * 1024
"""Of values that are brought into the form of a twin at a time: zlib takes 2 ms for it. A longer one goes as it is."""
_EACH_BYTES: Final = 128
"""What each costs beside its bytes, in bytes."""
_T = TypeVar("_T")


class ConflatingCursor(LogCursor):
    """One viewer's position in one log with keys. Not thread-safe: its Sender's lock guards it.

    Args:
        latest: whether it gets the newest value of each key first; `start` is the log's end then.
    """

    __slots__ = (
        *("_before", "_end", "_entering", "_gone", "_handed", "_joined", "_latest", "_spans", "_stopped_behind"),
        "_turn",
    )

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
            start, values = log.look(self._latest.amount)
        super().__init__(log, now=now, start=start, prefix=prefix)
        self._joined = self.place.entry.sequence  # values from before are what joining gave
        # Where values wait, the next first; the last one has no end. Empty: in the cohort, or nothing more is taken.
        self._spans: Spans = ()
        self._stopped_behind: str | None = None  # key of the last value that it took, when not all were taken
        self._turn: Spans = ()  # the last span, divided by the end of the log as of the last `peek` and by that key
        self._before: Amount = (0, 0)  # values of the log before it stood alone
        self._gone: Amount = (0, 0)  # values since then that were handed over or dropped
        self._handed: list[HandedValue] = []  # values among the messages of the last `peek`
        # Where it was found to stand, and is to enter the cohort: from there on it gets every message. None: it is not.
        self._entering: KeyedEntry | None = None
        self._end: Entry | None = None  # of the messages without a key, at the moment that is looked at
        self.stand_alone()
        if latest:
            self._spans = EVERYTHING
            self._before = self._before[0] - values[0], self._before[1] - values[1]
            self.cached_bytes += values[1]

    # -- in the cohort and out of it

    def stands_at(self, entry: Entry) -> bool:
        if not self._spans or not isinstance(entry, KeyedEntry):
            return super().stands_at(entry)
        self._settle()
        if self.place.entry is not entry.loose or self._copies is not None:
            return False
        tail, (firsts, waiting) = self._look(lambda spans: (self._latest.firsts(spans), self._latest.amount(spans)))
        # Not where a value from there on is superseded already: it counts as dropped, and what is counted never falls.
        stands = all(item.sequence >= entry.sequence for item in firsts) and waiting == _values_between(entry, tail)
        if stands and self.plain:
            self._entering = entry
        return stands

    def enter(self, place: Place) -> None:
        self._settle_values(cast("KeyedEntry", place.entry), (0, 0))
        standing = self.place.entry
        accepted = map(sub, standing.counts + standing.sizes, self._base_counts + self._base_sizes)
        self._stand_in(self.log, place, tuple(accepted))

    def stand_alone(self) -> None:
        entry = cast("KeyedEntry", self.place.entry)
        passed = map(sub, entry.counts + entry.sizes, self._base_counts + self._base_sizes)
        self._stand_in(cast("StreamLog", self.log.loose), Place(entry.loose), tuple(passed))
        self._before, self._gone, self._spans = _values_before(entry), (0, 0), ((entry.sequence, NO_END),)
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
        self._spans, self._stopped_behind, self._entering = (), None, None

    # -- the queue

    def load(self) -> tuple[int, int]:
        if not self._spans:
            return super().load()
        with self._moment(self._waiting) as (_, (messages, size)):
            own_size, own_messages = self._load_between(self.place.entry, self._tail())
            return own_size + size, own_messages + messages

    def bounded(self) -> tuple[int, int]:
        # At the end the values are copied, for there may come others; what waits then only becomes less.
        return (0, 0) if self._stop is not None else super().bounded()

    def oldest_at(self) -> float | None:
        since = super().oldest_at()
        times = [max(value.since, self.served_at) for value in self._latest.firsts(self._spans)]
        return min(times if since is None else [since, *times], default=None)

    def oldest_counted_at(self) -> float | None:
        return None if self._stop is not None else super().oldest_counted_at()

    @property
    def values_wait(self) -> bool:
        return self._copies is not None if self._stop is not None else bool(self._latest.firsts(self._spans))

    @property
    def cache_taken(self) -> bool:
        given = tuple((first, self._joined) for first, _ in self._spans if self.joining_to is not None)
        return super().cache_taken and not self._latest.firsts(given)

    @property
    def caught_up(self) -> bool:
        return super().caught_up and not self._latest.firsts(self._spans)

    # -- handing over

    def peek(self, most: int, budget_bytes: int, timing: Timing | None = None) -> list[Item]:
        self._handed, self._entering = [], None
        if not self._spans:
            return super().peek(most, budget_bytes, timing)
        with self._moment(partial(self._next_values, most)) as (_, values):
            most = min(most, self._transformed(values))
            return self._peek_beside(iter(values), self._handed, most, budget_bytes, timing)

    def gather(self, budget_bytes: int, timing: Timing | None, ahead_bytes: int = 0) -> Gathered | None:
        return None if self._spans else super().gather(budget_bytes, timing, ahead_bytes)

    def _next_values(self, most: int | None, spans: Spans) -> list[Value]:
        """Return the next values; those that were published since it stopped from the key on at which it did."""
        latest, begun = self._latest, self._latest.begun
        *stopped, (first, end) = spans
        turn = latest.sequence_of(self._stopped_behind)
        fresh = ((turn + 1, begun), (first, turn + 1)) if turn >= first else ((first, begun),)
        self._turn = *fresh, (begun, end)
        return latest.values((*stopped, *self._turn), most)

    def _transformed(self, values: list[Value]) -> int:
        """Bring values into the form of a twin; return how many messages may be handed over with what that has done."""
        transform, work_bytes = self.log.transform, 0
        for count, value in enumerate(values if transform is not None else ()):
            if value.twin is None and transform is not None:
                size = len(value.wire)
                if work_bytes and work_bytes + size > _TRANSFORMED_BYTES:
                    return count
                value.twin = transform(value.wire) if size <= _TRANSFORMED_BYTES else value.wire
                work_bytes += size + _EACH_BYTES
        return NO_END

    def pass_messages(self, count: int) -> None:
        passed = [value for value in self._handed if value.at < count]
        self._handed = []
        super().pass_messages(count - len(passed))
        if passed:
            self._pass_values(passed)

    def _pass_values(self, passed: list[HandedValue]) -> None:
        messages, size = self._gone
        self._gone = messages + len(passed), size + sum(value.size_bytes for value in passed)
        saved = sum(value.saved_bytes for value in passed)
        if saved:
            sizes = [*self._base_sizes]
            sizes[_DATA] += saved
            self._base_sizes = tuple(sizes)
        last = passed[-1].sequence
        if last >= self._spans[-1][0]:
            self._spans, self._stopped_behind = self._turn, passed[-1].key  # what waited when it stopped is taken
        while not self._spans[0][0] <= last < self._spans[0][1]:
            self._spans = self._spans[1:]
        (_, end), *others = self._spans
        self._spans = (last + 1, end), *others
        if not self._latest.firsts(self._spans):
            self._spans, self._stopped_behind = self._spans[-1:], None

    # -- accounts

    def balance(self) -> Balance:
        if not self._spans:
            return super().balance()
        with self._moment(self._waiting) as (tail, waiting):
            accepted, dropped, queued = super().balance()
        superseded = self._superseded(tail, waiting)
        add_by_reason(dropped, {DropReason.SUPERSEDED: _as_figures(superseded)} if superseded[0] else {})
        messages, size = map(sub, _values_before(tail), self._before)
        accepted = tuple(map(add, accepted, _as_figures((messages, size))))
        return accepted, dropped, tuple(map(add, queued, _as_figures(waiting)))

    def _waiting(self, spans: Spans) -> Amount:
        """Return how much waits in `spans`, the present ones: in the cohort, superseded ones too."""
        if self._entering is None:
            return self._latest.amount(spans)
        return _values_between(self._entering, cast("KeyedEntry", self.log.tail))

    def _superseded(self, end: KeyedEntry, waiting: Amount) -> Amount:
        """Return how much was superseded before `end`, if so much is `waiting`."""
        parts = zip(_values_before(end), self._before, self._gone, waiting, strict=True)
        messages, size = (after - before - gone - left for after, before, gone, left in parts)
        return messages, size

    # -- dropping, and the end

    def drop_droppable(self, reason: DropReason, now: float) -> None:
        if self._spans and reason is DropReason.REQUESTED:
            tail, waiting = self._look(self._latest.amount)
            self._add_dropped(reason, waiting)
            self._gone = self._gone[0] + waiting[0], self._gone[1] + waiting[1]
            self._spans, self._stopped_behind, self._entering = ((tail.sequence, NO_END),), None, None
        super().drop_droppable(reason, now)

    def finish(self, now: float) -> None:
        if self._spans:
            tail, values = self._look(partial(self._next_values, None))
            for value in values:
                self._copy_out(value.after)
                self._push_copy(_DATA, value.wire, max(value.since, self.served_at))
            self._settle_values(tail, (len(values), sum(len(value.wire) for value in values)))
        super().finish(now)

    def drop_everything(self, reason: DropReason) -> None:
        if self._spans:
            tail, waiting = self._look(self._latest.amount)
            self._add_dropped(reason, waiting)
            self._settle_values(tail, waiting)
        super().drop_everything(reason)

    # -- inside

    def _tail(self) -> Entry:
        return self._stop or self._end or self.chain.tail

    def _look(self, read: Callable[[Spans], _T]) -> tuple[KeyedEntry, _T]:
        """Return the log's tail, and what `read` says of the values that wait, at one moment."""
        return cast("tuple[KeyedEntry, _T]", self.log.look(partial(read, self._spans)))

    @contextmanager
    def _moment(self, read: Callable[[Spans], _T]) -> Iterator[tuple[KeyedEntry, _T]]:
        """Look as `_look` does; within, the messages without a key end at the same moment."""
        tail, found = self._look(read)
        self._end = tail.loose
        try:
            yield tail, found
        finally:
            self._end = None

    def _add_dropped(self, reason: DropReason, amount: Amount) -> None:
        if amount[0]:
            self._tally(reason).add_figures(_as_figures(amount))


def _values_before(entry: KeyedEntry) -> Amount:
    """Return how many messages before `entry` had a key."""
    return entry.counts[_DATA] - entry.loose.counts[_DATA], entry.value_bytes


def _values_between(first: KeyedEntry, end: KeyedEntry) -> Amount:
    messages, size = map(sub, _values_before(end), _values_before(first))
    return messages, size


def _as_figures(amount: Amount) -> tuple[int, ...]:
    figures = [0] * (2 * CLASS_COUNT)
    figures[_DATA], figures[_DATA + CLASS_COUNT] = amount
    return tuple(figures)
