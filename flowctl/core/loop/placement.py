"""Who lives on a poll group: the placements of its pollables, and the sum of their loads.

What a pollable is, and when it is told of a placement, is for `flowctl.pollgroup` to say; here it is any object that
may have a method ``load``, and may have a method ``movable``.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from flowctl.core.loop.faults import report
from flowctl.core.loop.locks import OwnedLock
from flowctl.errors import ClosedError, LocalProtocolError

if TYPE_CHECKING:
    from flowctl.core.loop.faults import ErrorHook
    from flowctl.deferred import Registration

#: Load of a pollable that does not say, or says nonsense: one connection.
DEFAULT_LOAD: Final = 1.0

_P = TypeVar("_P")


class Placement(Generic[_P]):
    """A pollable's place on one group; made anew for each group it lives on."""

    __slots__ = ("attached", "gone", "placed_at", "pollable", "registration", "weight")

    def __init__(self, pollable: _P, registration: Registration, weight: float, placed_at: float) -> None:
        self.pollable: Final = pollable
        self.registration: Final = registration
        self.weight = weight  # its load when last asked; changes under the lock of `Placements`
        self.placed_at: Final = placed_at  # seconds on the group's clock
        self.attached = False  # `attached` was called; the group's thread only
        self.gone = False  # removed or moved away: a queued attach must not happen; set under that lock


class Placements(Generic[_P]):
    """The placements on one group, from when it runs until it stops. Any thread."""

    __slots__ = ("_by_id", "_closed", "_group", "_lock", "_weight")

    def __init__(self, group: str) -> None:
        self._group: Final = group
        self._lock: Final = OwnedLock()  # a leaf: nothing else is locked or called under it
        self._by_id: dict[int, Placement[_P]] = {}  # by id(pollable)  # guarded by _lock
        self._weight = 0.0  # sum of the weights  # guarded by _lock
        self._closed = False  # guarded by _lock

    def enter(self, placement: Placement[_P]) -> None:
        """Enter `placement`, so that it counts for placing others before it is attached."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"poll group {self._group!r} is stopping: nothing is placed on it any more")
            if id(placement.pollable) in self._by_id:
                raise LocalProtocolError(f"the pollable is on poll group {self._group!r} already")
            self._by_id[id(placement.pollable)] = placement
            self._weight += placement.weight

    def find(self, pollable: _P) -> Placement[_P] | None:
        with self._lock:
            return self._by_id.get(id(pollable))

    def remove(self, placement: Placement[_P]) -> bool:
        """Strike out `placement`; False if that was done before."""
        with self._lock:
            if placement.gone:
                return False
            placement.gone = True
            del self._by_id[id(placement.pollable)]
            # Starts from a clean zero when empty: sums of floats drift.
            self._weight = self._weight - placement.weight if self._by_id else 0.0
            return True

    def close(self) -> list[Placement[_P]]:
        """Strike out all and return them; none can be entered any more."""
        with self._lock:
            self._closed = True
            placements = list(self._by_id.values())
            self._by_id.clear()
            self._weight = 0.0
            for placement in placements:
                placement.gone = True
            return placements

    def all(self) -> list[Placement[_P]]:
        with self._lock:
            return list(self._by_id.values())

    def figures(self) -> tuple[int, float]:
        """Return how many there are, and the sum of their loads when last asked; O(1)."""
        with self._lock:
            return len(self._by_id), self._weight

    def refresh_weight(self, on_error: ErrorHook) -> float:
        """Ask every pollable for its load, with no lock held, and return the sum; O(n)."""
        loads = [(placement, load_of(placement.pollable, on_error)) for placement in self.all()]
        with self._lock:
            for placement, load in loads:
                if not placement.gone:
                    self._weight += load - placement.weight
                    placement.weight = load
            return self._weight


def load_of(pollable: object, on_error: ErrorHook) -> float:
    """Return what `pollable` says its load is; `DEFAULT_LOAD` if it does not, or raises, or says nonsense."""
    load = getattr(pollable, "load", None)
    if load is None:
        return DEFAULT_LOAD
    try:
        value = float(load())
    except BaseException as error:  # noqa: BLE001  (a wrong figure must not cost a connection its place)
        report(on_error, f"load of {type(pollable).__name__}", error)
        return DEFAULT_LOAD
    return value if isfinite(value) and value >= 0 else DEFAULT_LOAD


def is_movable(pollable: object, on_error: ErrorHook) -> bool:
    """Return whether `pollable` may go to another group; False if it raises."""
    movable = getattr(pollable, "movable", None)
    if movable is None:
        return True
    try:
        return bool(movable())
    except BaseException as error:  # noqa: BLE001  (as for the load)
        report(on_error, f"movable of {type(pollable).__name__}", error)
        return False
