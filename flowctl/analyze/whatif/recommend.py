"""Which choice to take, if any (pure).

``balanced`` advises another choice only where that makes nothing worse: honest viewers cut, pictures missed, delay and
time to the first picture, over the same time of the same viewers, at both ends of what is not known. It has to bring
more than the error of what it brings. Where fewer are cut, a delay within the target counts for nothing: what arrives
in it is on time for the server as well. Nor does one beyond it keep from a look whether fewer would be cut. Of several,
the one that cuts fewest is taken, then the one by which least is missed, then the one with the least delay; memory
decides between equals only. What brings something at one end alone is not known: then to widen the limits for an hour
shows how stalls go on that are cut now.

Another objective is a list of parts, joined by ``then``: ``disconnects<=1% then delay_p95``. A part with ``<=`` or
``>=`` is a bound; one without is an order. Where no choice keeps all bounds, those that break them least are left, and
the reason says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from flowctl.analyze.viewers.experience import FEW
from flowctl.analyze.whatif.estimates import Change, Estimate
from flowctl.errors import ConfigError
from flowctl.units import format_size, parse_duration, parse_share, parse_size

MEASURES: Final = {
    "disconnects": "disconnected_share",
    "honest_disconnects": "honest_disconnected_share",
    "delay_p50": "delay_p50_ms",
    "delay_p95": "delay_p95_ms",
    "delay_p99": "delay_p99_ms",
    "delay_max": "delay_max_ms",
    "memory_peak": "memory_peak_bytes",
    "memory_mean": "memory_mean_bytes",
    "stalls": "stall_share",
    "drops": "dropped_share",
    "key_share": "key_share",
}
"""Words of an objective, and the columns that they stand for."""
LARGER_IS_BETTER: Final = frozenset({"key_share"})
FRONT: Final = ("disconnected_share", "delay_p95_ms", "memory_peak_bytes", "dropped_share")
"""Columns of the Pareto front: a choice on it is not beaten in all four at once; smaller is better in each."""
LEAST: Final = {"cut": 0.01, "missed": 0.01, "late": 0.13, "delay": 0.1, "join": 0.25}
"""Least change that is one, whatever its error: delays are known to an eighth, and lines of two real runs differ."""
WORDS: Final = {
    "cut": "honest viewers cut",
    "missed": "pictures and sound missed",
    "late": "p95 of the delay",
    "delay": "the mean delay",
    "join": "the time to the first picture",
}
LEAST_TRIED: Final = 4
"""Viewers in trouble below which nothing is known: three that all gain may be chance, once in eight."""
BALANCED_WORDS: Final = " (nothing worse; then the fewest honest viewers cut, the least missed, the least delay)"
"""Meaning of ``balanced``, for the comment of a limits file."""
_PART: Final = re.compile(r"([a-z0-9_]+)\s*(?:(<=|>=)\s*(\S+))?$")
Row = Mapping[str, Any]


class Part(NamedTuple):
    """One part of an objective: a bound in the unit of the column, or an order, without operator and bound."""

    measure: str
    operator: str | None
    bound: float
    text: str


class Pick(NamedTuple):
    """What is advised."""

    row: Row
    why: str  # one line
    kept: bool = True  # whether all bounds of the objective are kept
    known: bool = True  # False: only a try would tell whether it brings anything


def parse_objective(text: str) -> list[Part]:
    """Return the parts of an objective; none for ``balanced``."""
    if text.strip() == "balanced":
        return []
    parts = []
    for piece in map(str.strip, re.split(r"\bthen\b|,", text)):
        match = _PART.match(piece)
        if match is None or match[1] not in MEASURES:
            raise ConfigError(
                f"objective: {piece!r} is not understood",
                hint=f"write it like disconnects<=1% then delay_p95; words: {', '.join(MEASURES)}, or balanced",
            )
        bound = 0.0 if match[3] is None else _bound(match[1], match[3])
        parts.append(Part(match[1], match[2], bound, piece))
    return parts


def _bound(measure: str, text: str) -> float:
    where = f"objective, {measure}"
    if measure.startswith("memory"):
        return float(parse_size(text, where))
    if measure.startswith("delay"):
        return parse_duration(text, where) * 1000
    return parse_share(text, where)


def mark_front(rows: Sequence[Row]) -> list[bool]:
    """Return for each choice whether no other is as good in all of `FRONT` and better in one."""
    points = [tuple(float(row[name]) for name in FRONT) for row in rows]
    return [
        not any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points)
        for point in points
    ]


def recommend(rows: Sequence[Row], found: Sequence[Estimate], objective: str, tried: int) -> Pick:
    """Return what is advised of `rows`, of which the first is in force; `found` are the estimates of the same.

    `tried` is of how many viewers in trouble.
    """
    parts = parse_objective(objective)
    if parts:
        return _asked_for(rows, parts)
    if tried < LEAST_TRIED and (tried or rows[0]["viewers"] < FEW):
        seen = f"{tried or 'none'} of {rows[0]['viewers']} recorded viewers in trouble could be tried"
        why = f"not known whether other limits are better: {seen}, and {LEAST_TRIED} are needed; keep what is in force"
        return Pick(rows[0], why, known=False)
    return _balanced(rows, found)


def _asked_for(rows: Sequence[Row], parts: Sequence[Part]) -> Pick:
    bounds, orders = ([part for part in parts if bool(part.operator) is bound] for bound in (True, False))
    excess = {row["choice_id"]: tuple(_excess(row, part) for part in bounds) for row in rows}
    least = min(excess.values())
    kept = not any(least)
    left = [row for row in rows if excess[row["choice_id"]] == least]
    best = min(left, key=lambda row: (tuple(_order(row, part) for part in orders), *_last(row)))
    why = f"{len(left)} of {len(rows)} choices {'keep' if kept else 'come closest to'} the bounds"
    if not bounds:
        why = f"of {len(rows)} choices"
    if orders:
        why += f"; this one is best in {', then '.join(part.text for part in orders)}"
    return Pick(best, why if kept or not bounds else f"NO choice keeps all bounds: {why}", kept)


def _last(row: Row) -> tuple[Any, ...]:
    """What decides where nothing that was asked for does."""
    return not row.get("in_force"), float(row["memory_peak_bytes"]), row["choice_id"]


def _order(row: Row, part: Part) -> float:
    value = float(row[MEASURES[part.measure]])
    return -value if part.measure in LARGER_IS_BETTER else value


def _excess(row: Row, part: Part) -> float:
    over = (float(row[MEASURES[part.measure]]) - part.bound) * (1 if part.operator == "<=" else -1)
    return max(over, 0.0) / (abs(part.bound) or 1.0)


def gains(change: Change) -> list[str]:
    """Return what is better by more than its error."""
    return [name for name, (more, error) in change.items() if -more > max(error, LEAST[name])]


def _worse(change: Change, but: Collection[str]) -> bool:
    return any(more > LEAST[name] / 2 for name, (more, _) in change.items() if name not in but)


def _balanced(rows: Sequence[Row], found: Sequence[Estimate]) -> Pick:
    known, open_ = [], []
    for row, one in zip(rows[1:], found[1:], strict=True):
        low, high = (gains(change) for change in one.changes)
        cuts = ["cut" in some for some in (low, high)]
        if any(
            _worse(change, ("late", "delay") if any(cuts) and (on_time or not all(cuts)) else ())
            for change, on_time in zip(one.changes, one.on_time, strict=True)
        ):
            continue
        if low and high and cuts[0] == cuts[1]:
            known.append((row, one, [name for name in low if name in high]))
        elif low or high:
            open_.append((row, one, low or high))
    for some, sure in ((known, True), (open_, False)):
        if some:
            row, one, better = min(some, key=lambda item: _rank(item[0], item[1], sure=sure))
            said = " and ".join(WORDS[name] for name in better)
            if sure:
                return Pick(row, f"better in {said}, by more than may be chance, and worse in nothing that is judged")
            said = f"whether {said} would be less hangs on how stalls go on that were cut, which nobody has seen"
            return Pick(row, f"not known: {said}; widen the limits to these for an hour, and look again", known=False)
    why = f"none of {len(rows) - 1} other choices brings more than its error without making something worse"
    return Pick(rows[0], f"keep what is in force: {why}")


def _rank(row: Row, one: Estimate, *, sure: bool) -> tuple[Any, ...]:
    """Order by the worse end where something is known, and by the better where a try is to show it."""
    change = (max if sure else min)(one.changes, key=lambda change: change["cut"][0])
    steps = (round(change[name][0] / LEAST[name]) for name in ("cut", "missed", "delay"))
    return (*steps, float(row["memory_peak_bytes"]), row["choice_id"])


_COSTS: Final = {
    "disconnected_share": "viewers disconnected",
    "honest_disconnected_share": "honest viewers disconnected",
    "dropped_share": "messages dropped",
    "missed_share": "missed, after cuts too",
    "key_share": "key frames delivered",
    "stall_share": "time with a delay above a player's buffer",
    "delay_p50_ms": "delay p50",
    "delay_p95_ms": "delay p95",
    "delay_p99_ms": "delay p99",
    "join_ms": "first picture after",
    "memory_peak_bytes": "memory of one viewer, at most",
    "memory_mean_bytes": "memory, mean",
}


def costs(chosen: Row, present: Row) -> list[str]:
    shown: dict[str, Callable[[float], str]] = {
        "share": "{:.2%}".format,
        "ms": "{:.0f} ms".format,
        "bytes": format_size,
    }
    return [f"of {present['viewers']} viewers, as the middle between what is known and what is not:"] + [
        f"{word}: {show(float(present[name]))} -> {show(float(chosen[name]))}"
        for name, word in _COSTS.items()
        for show in (shown[name.rpartition("_")[2]],)
    ]
