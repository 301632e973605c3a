"""In which renditions of a set a viewer was, since when and why: what is told of it (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flowctl.units import format_duration


@dataclass(slots=True, eq=False)
class RenditionBook:
    """The renditions of one connection, over all the time in which it followed a set.

    Changed on the connection's thread, read by any. A rendition counts as smaller where it was not the largest of its
    set when it was left, or, of one that the set has lost by then, when its stay began.
    """

    name: str = ""  # of the one that is followed; empty: none is now
    since: float = 0.0  # when that began, in seconds
    why: str = ""
    before: str = ""  # name of the one that the last switch left
    ups: int = 0
    downs: int = 0
    failed: int = 0  # switches up that the line did not carry
    _order: Callable[[], Sequence[str]] = tuple  # names of the set, smallest first
    _entered: Sequence[str] = ()  # names of the set when the present stay began, smallest first
    _seconds: dict[str, float] = field(default_factory=dict)  # by name, without the present stay
    _smaller_s: float = 0.0  # likewise
    _smaller_stay: tuple[float, str] = (0.0, "")  # the longest such stay, in seconds, and why it was

    def enter(self, now: float, name: str, why: str, order: Callable[[], Sequence[str]]) -> None:
        """A set is followed from now on, in the rendition `name`; `order`: the names in the set, smallest first."""
        self.name, self.since, self.why, self._order = name, now, why, order
        self._entered = order()

    def switch(self, now: float, name: str, why: str, *, failed: bool = False) -> str:
        """Go on in another rendition; return the words for the ledger. `failed`: the line did not carry the last."""
        order = self._order()
        up = name in order and self.name in order[: order.index(name)]
        self._settle(now)
        self.before, self.name, self.since, self.why, self._entered = self.name, name, now, why, order
        self.ups += up
        self.downs += not up
        self.failed += failed
        return f"rendition {self.before} to {name}: {why}"

    def leave(self, now: float) -> None:
        """No set is followed any more."""
        self._settle(now)
        order = self._order()
        self.name, self.why, self._order = "", "", lambda: order  # not the set, which may go

    def _settle(self, now: float) -> None:
        self._seconds, (self._smaller_s, self._smaller_stay) = self.seconds(now), self._smaller(now)

    @property
    def count(self) -> int:
        """How many renditions the set has now."""
        return len(self._order())

    def seconds(self, now: float) -> dict[str, float]:
        """Return the time in each rendition, smallest first."""
        name, found = self.name, dict(self._seconds)
        if name:
            found[name] = found.get(name, 0.0) + max(now - self.since, 0.0)
        order = {known: place for place, known in enumerate(self._order())}
        return dict(sorted(found.items(), key=lambda item: order.get(item[0], -1)))

    def smaller_s(self, now: float) -> float:
        """Return the time in renditions below the largest, in seconds."""
        return self._smaller(now)[0]

    def why_smaller(self, now: float) -> str:
        """Return why the longest stay in a rendition below the largest was; empty: there was none."""
        return self._smaller(now)[1][1]

    def _smaller(self, now: float) -> tuple[float, tuple[float, str]]:
        name, stay_s = self.name, max(now - self.since, 0.0)
        order = self._order()
        if not name or name in (order if name in order else self._entered)[-1:]:
            return self._smaller_s, self._smaller_stay
        return self._smaller_s + stay_s, max(self._smaller_stay, (stay_s, self.why))

    def describe(self, now: float) -> str:
        """Return ``rendition 720 of 3 for 41.0 s: the line takes 1.25 of 2.5 Mbit/s``; empty: none is followed."""
        name = self.name
        return f"rendition {name} of {self.count} for {format_duration(now - self.since)}: {self.why}" if name else ""
