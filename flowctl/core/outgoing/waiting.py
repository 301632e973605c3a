"""The newest values of keys that wait for one viewer that stands alone in a log with keys (pure).

They are in the log, and in no queue of the viewer's: what it has is the numbers of the messages from which on they
wait. In what order they are handed over is said in `core.outgoing.conflation`. In a twin, they are brought into its
form then, a few at a time. While they wait they count as they are in the log itself, so that what one viewer is handed
changes nothing in the accounts of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple, TypeVar, cast

from flowctl.core.flow.counts import Figures
from flowctl.core.flow.state import CLASS_COUNT, MessageClass
from flowctl.core.outgoing.backlog import Item
from flowctl.core.outgoing.latest import EVERYTHING, NO_END, Amount, LatestValues, Spans, Value
from flowctl.core.outgoing.streamlog import Entry, KeyedEntry, StreamLog

_DATA: Final = MessageClass.DATA
_TRANSFORMED_BYTES: Final = 64 * 1024
"""Of values that are brought into the form of a twin at a time: zlib takes 2 ms for it. A longer one goes as it is."""
_EACH_BYTES: Final = 128
"""What each costs beside its bytes, in bytes."""
_T = TypeVar("_T")


class HandedValue(NamedTuple):
    """A value among the messages that `peek` returned, without them: the kernel may take none of these for hours."""

    at: int  # its index among the messages
    sequence: int
    size_bytes: int  # as it counts while it waits
    saved_bytes: int  # by which it is shorter in the form of a twin
    key: str


class WaitingValues:
    """The values that wait for one viewer, which stands alone in `log` from `entry` on.

    Args:
        log: has keys.
        entry: all before it is settled; values of keys from there on wait.
        given: values before it, which wait too: what joining gave.
    """

    __slots__ = (
        *("_before", "_entering", "_gone", "_handed", "_joined", "_latest", "_log", "_saved_bytes", "_spans"),
        *("_stopped_behind", "_turn"),
    )

    def __init__(self, log: StreamLog, entry: KeyedEntry, given: Amount | None = None) -> None:
        self._log = log
        self._latest = cast("LatestValues", log.latest)
        self._joined = entry.sequence
        # Where values wait, the next first; the last one has no end.
        self._spans: Spans = ((entry.sequence, NO_END),) if given is None else EVERYTHING
        self._stopped_behind: str | None = None  # key of the last value that it took, when not all were taken
        self._turn: Spans = ()  # the last span, divided by the end of the log as of the last `peek` and by that key
        self._before = _less(_values_before(entry), given or (0, 0))  # values of the log before it stood alone
        self._gone: Amount = (0, 0)  # values since then that were handed over or dropped
        self._saved_bytes = 0  # by which those that were handed over were shorter in the form of a twin
        self._handed: list[HandedValue] = []  # values among the messages of the last `peek`
        # Where the viewer was found to stand, and is to enter the cohort: there it gets every message. None: it is not.
        self._entering: KeyedEntry | None = None

    # -- looking

    def __bool__(self) -> bool:
        """Whether any wait."""
        return bool(self._latest.firsts(self._spans))

    @property
    def given(self) -> bool:
        """Whether some wait of those that joining gave."""
        return bool(self._latest.firsts(tuple((first, self._joined) for first, _ in self._spans)))

    def oldest_at(self, served_at: float, since: float | None) -> float | None:
        """Return since when the oldest waits for a viewer that got something at `served_at`, or `since`, if earlier."""
        times = [max(value.since, served_at) for value in self._latest.firsts(self._spans)]
        return min(times if since is None else [since, *times], default=None)

    def waiting(self) -> tuple[Entry, Amount]:
        """Return the end of what has no key, and how much waits, at one moment."""
        tail, waiting = self._look(self._waiting)
        return tail.loose, waiting

    def balance(self) -> tuple[Entry, Figures, Figures, Figures]:
        """Return the end of what has no key, and of values what was (accepted, superseded, queued), at one moment."""
        tail, waiting = self._look(self._waiting)
        return tail.loose, *self.settled(tail, waiting), as_figures(waiting)

    def settled(self, end: KeyedEntry, kept: Amount) -> tuple[Figures, Figures]:
        """Return what was accepted before `end`, as it was sent, and superseded, if so much is `kept` to wait on."""
        accepted = messages, size = _less(_values_before(end), self._before)
        superseded = _less(_less(accepted, self._gone), kept)
        return as_figures((messages, size - self._saved_bytes)), as_figures(superseded)

    def stand_at(self, entry: KeyedEntry, *, enters: bool) -> bool:
        """Return whether values wait from `entry` on and no others; `enters`: the viewer enters the cohort there."""
        latest = self._latest
        tail, (firsts, waiting) = self._look(lambda spans: (latest.firsts(spans), latest.amount(spans)))
        # Not where a value from there on is superseded already: it counts as dropped, and what is counted never falls.
        stands = all(item.sequence >= entry.sequence for item in firsts) and waiting == _between(entry, tail)
        if stands and enters:
            self._entering = entry
        return stands

    # -- handing over

    def begin(self, most: int) -> tuple[Entry, Iterator[Value], int]:
        """Return the end of what has no key, the next values, and how many messages may be handed over, at one moment.

        Values are `most` at most; messages no more than with what bringing them into the form of a twin has done.
        """
        self._handed, self._entering = [], None
        tail, values = self._look(partial(self._next, most))
        return tail.loose, iter(values), min(most, self._transformed(values))

    def rest(self) -> tuple[KeyedEntry, list[Value]]:
        """Return the end of the log, and all values in the order in which they would be handed over."""
        return self._look(partial(self._next, None))

    def _next(self, most: int | None, spans: Spans) -> list[Value]:
        """Return the next values; those that were published since it stopped from the key on at which it did."""
        latest, begun = self._latest, self._latest.begun
        *stopped, (first, end) = spans
        turn = latest.sequence_of(self._stopped_behind)
        fresh = ((turn + 1, begun), (first, turn + 1)) if turn >= first else ((first, begun),)
        self._turn = *fresh, (begun, end)
        return latest.values((*stopped, *self._turn), most)

    def _transformed(self, values: list[Value]) -> int:
        """Bring values into the form of a twin; return how many messages may be handed over with what that has done."""
        transform, work_bytes = self._log.transform, 0
        for count, value in enumerate(values if transform is not None else ()):
            if value.twin is None and transform is not None:
                size = len(value.wire)
                if work_bytes and work_bytes + size > _TRANSFORMED_BYTES:
                    return count
                value.twin = transform(value.wire) if size <= _TRANSFORMED_BYTES else value.wire
                work_bytes += size + _EACH_BYTES
        return NO_END

    def hand(self, value: Value, index: int, served_at: float) -> Item:
        """Return `value` as message number `index` of those that are handed over."""
        twin = value.twin if self._log.transform is not None else None
        wire, plain_bytes = twin or value.wire, len(value.wire)
        self._handed.append(HandedValue(index, value.sequence, plain_bytes, plain_bytes - len(wire), value.key))
        return _DATA, wire, max(value.since, served_at)

    def pass_messages(self, count: int) -> int:
        """Move past the values among the first `count` messages that were handed over; return how many those are."""
        passed = [value for value in self._handed if value.at < count]
        self._handed = []
        if passed:
            messages, size = self._gone
            self._gone = messages + len(passed), size + sum(value.size_bytes for value in passed)
            self._saved_bytes += sum(value.saved_bytes for value in passed)
            last = passed[-1].sequence
            if last >= self._spans[-1][0]:
                self._spans, self._stopped_behind = self._turn, passed[-1].key  # what waited when it stopped is taken
            while not self._spans[0][0] <= last < self._spans[0][1]:
                self._spans = self._spans[1:]
            (_, end), *others = self._spans
            self._spans = (last + 1, end), *others
            if not self:
                self._spans, self._stopped_behind = self._spans[-1:], None
        return len(passed)

    # -- dropping, and the end

    def drop(self) -> tuple[KeyedEntry, Figures]:
        """Let none wait; return the end of the log, and how much did."""
        tail, waiting = self._look(self._latest.amount)
        self._gone = self._gone[0] + waiting[0], self._gone[1] + waiting[1]
        self._spans, self._stopped_behind, self._entering = ((tail.sequence, NO_END),), None, None
        return tail, as_figures(waiting)

    # -- inside

    def _look(self, read: Callable[[Spans], _T]) -> tuple[KeyedEntry, _T]:
        """Return the log's tail, and what `read` says of the values that wait, at one moment."""
        return cast("tuple[KeyedEntry, _T]", self._log.look(partial(read, self._spans)))

    def _waiting(self, spans: Spans) -> Amount:
        """Return how much waits in `spans`, the present ones: in the cohort, superseded ones too."""
        if self._entering is None:
            return self._latest.amount(spans)
        return _between(self._entering, cast("KeyedEntry", self._log.tail))


def _values_before(entry: KeyedEntry) -> Amount:
    """Return how many messages before `entry` had a key."""
    return entry.counts[_DATA] - entry.loose.counts[_DATA], entry.value_bytes


def _less(amount: Amount, other: Amount) -> Amount:
    return amount[0] - other[0], amount[1] - other[1]


def _between(first: KeyedEntry, end: KeyedEntry) -> Amount:
    return _less(_values_before(end), _values_before(first))


def as_figures(amount: Amount) -> Figures:
    figures = [0] * (2 * CLASS_COUNT)
    figures[_DATA], figures[_DATA + CLASS_COUNT] = amount
    return tuple(figures)
