"""A memory budget for what waits for slow peers, and which of them give way when it is exceeded (pure).

What is counted. A stream log holds everything from the oldest place at which a viewer stands, or from its GOP cache
if that begins earlier, up to its tail, and the headers that newcomers need. Those bytes are shared: they are counted
once, however many viewers stand there. What a viewer has queued for itself alone (control messages, own messages, what
was copied out of the log for it) is its own. Both are charged with what a message costs beside its bytes.

Which viewer holds what? Of a log's bytes, those between the place of the viewer furthest behind and that of the next
one are held for the first alone; the following stretch for two, and so on. Relieving any other one frees nothing.
Viewers that stand inside the GOP cache hold nothing: the cache is there for newcomers, and has bounds of its own.

Which viewers give way? On every log the furthest behind go first, as many as it takes, and of all logs those whose
going frees most per viewer. They are
thinned first: what is queued for them is dropped up to a key frame. One that is chosen again in the same episode is
closed. An episode begins above the limit and ends at the low mark. A viewer that holds nothing is never chosen. Where
the GOP caches take more than half of the limit they give way first, the largest before the others: otherwise a
publisher of large ones could have the viewers of other streams closed.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from flowctl.units import format_size

_Key = TypeVar("_Key", bound=Hashable)

ENTRY_OVERHEAD_BYTES: Final = 480
"""Memory of one message of a log beside its bytes: the entry, its two tuples of totals with their numbers, and the
header of the bytes object. Measured with tracemalloc on CPython 3.11: 471 to 480 bytes."""
MESSAGE_OVERHEAD_BYTES: Final = 130
"""Memory of one message of a viewer's own queue beside its bytes: a tuple, a time, the header of the bytes object."""
_SETTLE_S: Final = 0.5
"""Time for which a viewer that was told to thin is not judged again: its own thread does it, in its next flush."""
_LOW_SHARE: Final = 0.8


class BudgetAction(enum.Enum):
    """How a viewer's queue gives way: THIN it to a key frame, or CLOSE its connection."""

    THIN = "thin"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Holding:
    """Memory that one viewer keeps from being freed."""

    key: Hashable
    log: Hashable | None
    behind_bytes: int  # from its place to the log's tail, overhead included (`span_bytes`)
    own_bytes: int = 0  # what is queued for it alone, overhead included


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Memory held for all viewers."""

    shared_bytes: int = 0
    own_bytes: int = 0
    by_log: Mapping[Hashable, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return self.shared_bytes + self.own_bytes


NOTHING_HELD: Final = HeldMemory()


@dataclass(frozen=True, slots=True)
class Victim:
    """A viewer that has to give way."""

    holding: Holding
    action: BudgetAction
    freed_bytes: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetStatistics:
    """A snapshot of the budget."""

    limit_bytes: int = 0
    low_bytes: int = 0
    held: HeldMemory = NOTHING_HELD
    active: bool = False
    episodes: int = 0
    thinned: int = 0  # viewers thinned so far; one may be counted in several episodes
    closed: int = 0
    freed_bytes: int = 0
    emptied: int = 0


def span_bytes(size_bytes: int, messages: int) -> int:
    """Return what a stretch of a log costs: its wire bytes, and the overhead of its messages."""
    return size_bytes + messages * ENTRY_OVERHEAD_BYTES


def held_by(logs: Mapping[Hashable, int], holdings: Iterable[Holding]) -> HeldMemory:
    by_log = dict(logs)
    own = 0
    for item in holdings:
        own += item.own_bytes
        if item.log is not None:
            by_log[item.log] = max(by_log.get(item.log, 0), item.behind_bytes)
    return HeldMemory(sum(by_log.values()), own, by_log)


def choose(logs: Mapping[Hashable, int], holdings: Iterable[Holding], excess_bytes: int) -> list[tuple[Holding, int]]:
    """Return the viewers that have to give way so that `excess_bytes` are freed, with what each frees; most first."""
    pieces: list[_Piece] = []
    for log, items in _by_log(holdings).items():
        if log is None:
            pieces += [_Piece(item.own_bytes, [(item, item.own_bytes)]) for item in items if item.own_bytes]
        else:
            pieces += _pieces(items, logs.get(log, 0))
    # The pieces of one log become less worthwhile one after the other, so sorting keeps their order.
    pieces.sort(key=lambda piece: piece.per_viewer, reverse=True)
    chosen: list[tuple[Holding, int]] = []
    left = excess_bytes
    for piece in pieces:
        for item, freed in piece.items:
            if left <= 0:
                return _without_ties(chosen)
            chosen.append((item, freed))
            left -= freed
    return _without_ties(chosen)


@dataclass(slots=True)
class _Piece:
    """Viewers of one log that go together: (holding, bytes freed by its going after those before it)."""

    freed_bytes: int
    items: list[tuple[Holding, int]]

    @property
    def per_viewer(self) -> float:
        return self.freed_bytes / len(self.items)


def _by_log(holdings: Iterable[Holding]) -> dict[Hashable | None, list[Holding]]:
    result: dict[Hashable | None, list[Holding]] = {}
    for item in holdings:
        result.setdefault(item.log, []).append(item)
    return result


def _pieces(items: list[Holding], floor: int) -> list[_Piece]:
    """Return the viewers of one log, furthest behind first, in pieces that free less and less per viewer.

    The bytes that the first k of them free, over k, is a curve; its upper hull tells where to stop: of two that stand
    at the same place, the first frees nothing by going alone.
    """
    ordered = sorted(items, key=lambda item: item.behind_bytes, reverse=True)
    ordered = [item for item in ordered if item.behind_bytes > floor or item.own_bytes]
    hull: list[_Piece] = []
    for index, item in enumerate(ordered):
        below = max(ordered[index + 1].behind_bytes, floor) if index + 1 < len(ordered) else floor
        freed = max(item.behind_bytes - below, 0) + item.own_bytes
        piece = _Piece(freed, [(item, freed)])
        while hull and hull[-1].per_viewer <= piece.per_viewer:
            last = hull.pop()
            piece = _Piece(last.freed_bytes + piece.freed_bytes, last.items + piece.items)
        hull.append(piece)
    return [piece for piece in hull if piece.freed_bytes]


def _without_ties(chosen: list[tuple[Holding, int]]) -> list[tuple[Holding, int]]:
    """Leave out viewers at the end that free nothing unless others, which are not chosen, go as well."""
    while chosen and not chosen[-1][1]:
        chosen.pop()
    return chosen


def _low_mark(limit_bytes: int) -> int:
    return int(limit_bytes * _LOW_SHARE)


class MemoryBudget:
    """Keeps the memory held within a limit: chooses viewers to give way. One thread judges; any may set the limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._figures = BudgetStatistics()  # but for the limit; replaced as a whole, by the thread that looks
        self._thinned_at: dict[Hashable, float] = {}  # when viewers were thinned in the present episode

    def statistics(self) -> BudgetStatistics:
        limit_bytes = self._limit_bytes
        return replace(self._figures, limit_bytes=limit_bytes, low_bytes=_low_mark(limit_bytes))

    def set_limit(self, limit_bytes: int) -> None:
        """Take another budget; 0: none. An episode goes on by it."""
        self._limit_bytes = limit_bytes

    def caches_to_empty(
        self, caches: Mapping[_Key, int], logs: Mapping[Hashable, int], holdings: Iterable[Holding]
    ) -> list[_Key]:
        """Return the streams whose GOP caches give way before any viewer does; none below the limit."""
        left, limit_bytes = sum(caches.values()), self._limit_bytes
        most = limit_bytes // 2
        if not limit_bytes or left <= most or held_by(logs, holdings).total_bytes <= limit_bytes:
            return []
        chosen = []
        for key in sorted(caches, key=lambda key: caches[key], reverse=True):
            if left <= most:
                break
            left -= caches[key]
            chosen.append(key)
        self._figures = replace(self._figures, emptied=self._figures.emptied + len(chosen))
        return chosen

    def judge(self, logs: Mapping[Hashable, int], holdings: Iterable[Holding], now: float) -> list[Victim]:
        """Look at what is held; return the viewers that give way now, and how. O(viewers that lag), and sorting."""
        items = list(holdings)
        held, limit_bytes = held_by(logs, items), self._limit_bytes
        active, episodes = self._figures.active, self._figures.episodes
        if not active and limit_bytes and held.total_bytes > limit_bytes:
            active, episodes = True, episodes + 1
        elif active and held.total_bytes <= _low_mark(limit_bytes):
            active = False
            self._thinned_at.clear()
        self._figures = replace(self._figures, held=held, active=active, episodes=episodes)
        if not active:
            return []
        chosen = choose(logs, items, held.total_bytes - _low_mark(limit_bytes))
        return [victim for item, freed in chosen if (victim := self._sentence(item, freed, held, now)) is not None]

    def _sentence(self, item: Holding, freed: int, held: HeldMemory, now: float) -> Victim | None:
        """Decide between thinning and closing; None for a viewer that was told to thin just now."""
        thinned_at = self._thinned_at.get(item.key)
        if thinned_at is not None and now - thinned_at < _SETTLE_S:
            return None
        figures = replace(self._figures, freed_bytes=self._figures.freed_bytes + freed)
        if thinned_at is None:
            action, self._thinned_at[item.key] = BudgetAction.THIN, now
            self._figures = replace(figures, thinned=figures.thinned + 1)
        else:
            del self._thinned_at[item.key]
            action, self._figures = BudgetAction.CLOSE, replace(figures, closed=figures.closed + 1)
        why = (
            f"memory budget: {format_size(held.total_bytes)} held, the limit is {format_size(self._limit_bytes)}; "
            f"{format_size(item.behind_bytes)} of a stream wait for this viewer, "
            f"{format_size(freed)} of it for nobody else"
        )
        return Victim(item, action, freed, why)
