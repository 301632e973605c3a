"""Which choices do the same so far, and where they may part (pure).

Theory of operation. Limits do nothing before they are reached. So choices that have the rest in common (`kind_of`) are
run as one, by the tightest mark of any of them on each axis and the shortest of each time, until what is queued may
reach one in which they differ: a mark, nine tenths of a hard one (`flowctl.flow.timing.crowded`), a time, or the
longest wait that the hard marks allow. Then those go on together that are reached in the same, and those that are not.
Whoever has reached a soft mark needs the same low marks too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from flowctl.flight.whatif.types import POLICIES, Choice
from flowctl.flow.limits import OFF_MARK, AxisLimits, Limits
from flowctl.flow.policy import patience_of
from flowctl.flow.timing import CROWDED, most_wait_s, target_s
from flowctl.sending.settings import SenderSettings

_AXES: Final = 3


class Bounds:
    """What choices that have done the same so far go by: the tightest of all of them, and where they differ.

    Args:
        choices: with their numbers; of one kind (`kind_of`).

    Attributes:
        limits: the tightest marks of any of them.
        settings: the shortest times.
        guard: where the first of those that differ in it is reached: see `_reach`.
        waits: how long the longest wait is, in target delays; 0: nothing is left out for being late.
    """

    __slots__ = ("_rows", "choices", "guard", "hards_differ", "limits", "settings", "waits")

    def __init__(self, choices: Mapping[int, Choice]) -> None:
        self.choices = dict(choices)
        every = list(choices.values())
        first = every[0]
        self._rows = {number: _reach(choice) for number, choice in choices.items()}
        columns = list(zip(*self._rows.values(), strict=True))
        lows = len({marks_of(choice.limits, 0) for choice in every}) > 1
        self.guard = tuple(
            min(column) if len(set(column)) > 1 or (lows and place < _AXES) else inf
            for place, column in enumerate(columns)
        )
        self.hards_differ = len({marks_of(choice.limits, 2) for choice in every}) > 1
        self.limits = first.limits if len(every) == 1 else _tightest([choice.limits for choice in every])
        times = ("soft_too_long_s", "stuck_s", "return_after_s")
        soft_s, stuck_s, return_s = (
            min((t for one in every if (t := getattr(one, name))), default=0.0) for name in times
        )
        self.settings = SenderSettings(soft_too_long_s=soft_s, stuck_s=stuck_s, return_after_s=return_s)
        patience = patience_of(POLICIES[first.policy]) if first.limits.target_delay_ms != 0 else ()
        self.waits = max((item for item in patience if item < inf), default=0.0)

    def parts(self, reached: Sequence[float], most_s: float, waits_s: float, rates: Sequence[float]) -> list[Bounds]:
        """Return those that go on together once so much of each may be reached."""
        found: dict[object, dict[int, Choice]] = {}
        for number, choice in self.choices.items():
            row = self._rows[number]
            key: list[object] = [mark if value >= mark else None for mark, value in zip(row, reached, strict=True)]
            if any(mark is not None for mark in key[:_AXES]):
                key.append(marks_of(choice.limits, 0))
            if most_s < waits_s and (wait_s := most_wait_s(choice.limits, *rates)) < waits_s:
                key.append(wait_s)
            found.setdefault(tuple(key), {})[number] = choice
        return [Bounds(choices) for choices in found.values()] if len(found) > 1 else [self]


def marks_of(limits: Limits, level: int) -> tuple[int, int, int]:
    """Return the marks of one level (0 low, 1 soft, 2 hard) by axis."""
    size, messages, age = (axis.marks[level] for axis in (limits.size, limits.messages, limits.age_ms))
    return size, messages, age


def _reach(choice: Choice) -> tuple[float, ...]:
    """Return from where on each setting of a choice matters: soft marks, hard ones, times."""
    hard = marks_of(choice.limits, 2)
    times = (choice.soft_too_long_s or inf, choice.stuck_s or inf, choice.return_after_s or inf)
    return *marks_of(choice.limits, 1), CROWDED * hard[0], CROWDED * hard[1], hard[2], *times


def _tightest(every: Sequence[Limits]) -> Limits:
    """Return limits with the smallest mark of each axis and level; they are on for all or for none."""

    def axis(name: str) -> AxisLimits:
        marks = [min(column) for column in zip(*(getattr(one, name).marks for one in every), strict=True)]
        low, soft, hard = (mark if mark < OFF_MARK else 0 for mark in marks)
        return AxisLimits(soft=soft, hard=hard, low=low)

    return replace(every[0], size=axis("size"), messages=axis("messages"), age_ms=axis("age_ms"))


def kind_of(choice: Choice, gop_s: float) -> object:
    """Return what choices must have in common to do the same as long as nothing is reached.

    Args:
        choice: the choice.
        gop_s: longest time between key frames of the stream.
    """
    limits = choice.limits
    targets = tuple(target_s(limits.target_delay_ms, seconds) for seconds in (0.0, gop_s))
    on = tuple(mark < OFF_MARK for level in (1, 2) for mark in marks_of(limits, level))
    return choice.policy, limits.hard_policy, limits.overhead_bytes, targets, on
