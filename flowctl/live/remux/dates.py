"""The time of day at which each segment of a stream came, for `EXT-X-PROGRAM-DATE-TIME` (pure).

The date of a segment is its place on the publisher's clock, mapped. The mapping follows what came soonest of late, and
our own clock when it is set. Behind a segment that is followed without a break a date must not be before its end, for
players would see time run backwards, nor much later. So the mapping moves on in small steps, and where it is off by
more it jumps, which the playlist tells as a discontinuity. It goes back by a jump alone. A hole that was taken out of
the clock is in the dates, and is no discontinuity: the pictures behind it may need those before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flowctl.core.outcomes.offsets import LeastOffset

_WINDOW_S: Final = 3.0
"""Half of the time in which what came soonest counts: a connection that stalls has sent what waited by then. It is also
how long a clock that stopped, as that of an encoder does which pauses, gives dates from before."""
_ON_SHARE: Final = 1 / 8
"""Part of a segment by which the next one may be dated later: enough for a clock that is slow by a tenth."""
_BACK_S: Final = 0.001
"""What the next one may be dated earlier: the last digit of a date. It is enough for a crystal that runs fast, by a
ten-thousandth in segments of up to 10 s."""
JUMP_S: Final = 1.0
"""What a mapping may be off: less is caught up in small steps. What it is off for holes stays: Shaka Player places
media by its dates, and each step may cost it the pictures until the next key frame."""
_JUMP_EVERY_S: Final = 10.0
"""Least time between two jumps: what is sent faster or slower than it plays would have one at each segment."""
_YOUNG_S: Final = 1.0
"""Time from a jump in which all dates since then are mended where they prove to be late, by more than `_BURST_S`: what
a server has kept it sends in one go, and the last of it has waited least."""
_BURST_S: Final = 0.05


class ProgramDates:
    """The dates of one stream. Not locked: its owner has one thread."""

    __slots__ = (
        *("_agree", "_came_at", "_date", "_hole", "_offset", "_set_at", "_set_date", "_set_ms", "_step_s", "_wall_s"),
        "holes_s",
    )

    def __init__(self, agree: Callable[[int, float], float] = lambda _, due: due) -> None:
        self._agree = agree  # gives the date that a segment should have, for its place and the one that it would have
        self._offset = LeastOffset(_WINDOW_S)  # of our clock to the publisher's
        self.restart()

    def restart(self) -> None:
        """Forget everything: another clock of a publisher begins."""
        self._offset.restart()
        self._came_at = self._wall_s = 0.0  # when media came last, and what the time of day is ahead of our clock
        self._date: float | None = None  # of the last segment. None: there is none.
        self._step_s = 0.0  # how long it is
        self._set_at, self._set_ms = 0.0, 0  # when the mapping was set, on our clock and on the publisher's
        self._set_date = 0.0  # and for which date
        self.holes_s = 0.0  # what dates are behind for holes, `JUMP_S` at most
        self._hole = False  # the next segment makes up for them

    def note_unit(self, at_ms: int, now: float, wall: float) -> None:
        """Note that media of `at_ms` came, at `now` of a clock that is never set and at `wall`, the time of day."""
        self._offset.add(now - at_ms / 1000, now)
        self._came_at, self._wall_s = now, wall - now

    def note_hole(self, hole_s: float) -> None:
        """Note that a hole was taken out of the clock here; where they come to `JUMP_S` a segment begins."""
        self.holes_s += hole_s
        if self.holes_s >= JUMP_S:
            self._offset.restart()
            self._hole, self.holes_s = True, 0.0

    def begin_segment(self, at_ms: int, *, apart: bool, may_jump: bool = True) -> tuple[float, bool]:
        """Return the date of a segment that begins at `at_ms`, and whether it is `apart` from those before it."""
        due, date = self._agree(at_ms, self._due(at_ms)), None if self._date is None else self._date + self._step_s
        may_jump = may_jump and self._came_at - self._set_at >= _JUMP_EVERY_S
        off_s = 0.0 if date is None else due - date
        off_s = max(off_s - self.holes_s, min(off_s, 0.0))
        hole, self._hole = self._hole, False
        if date is None or apart or (may_jump and not hole and abs(off_s) >= JUMP_S):
            apart = apart or date is not None
            date = self._set_date = due
            self._set_at, self._set_ms, self.holes_s = self._came_at, at_ms, 0.0
        elif hole:
            date = max(date, due)
        else:
            date += min(max(off_s, -_BACK_S), self._step_s * _ON_SHARE)
        self._date, self._step_s = date, 0.0
        return date, apart

    def end_segment(self, duration_s: float) -> None:
        self._step_s = duration_s

    def mend(self) -> float:
        """Return by how many seconds all dates since the last jump prove to have been too late; they no longer are."""
        own = self._due(self._set_ms)
        due = self._agree(self._set_ms, own)
        young_s = _YOUNG_S if due == own else 2 * _YOUNG_S  # where others agreed they have mended theirs until then
        if self._date is None or self._came_at - self._set_at > young_s:
            return 0.0
        late_s = self._set_date - due
        if late_s <= _BURST_S:
            return 0.0
        self._date -= late_s
        self._set_date = due
        return late_s

    def _due(self, at_ms: int) -> float:
        return self._offset.least + self._wall_s + at_ms / 1000
