"""Which choice to take: the Pareto front of a what-if, and the objectives that pick one of it (pure).

An objective is a list of parts, joined by ``then``: ``disconnects<=1% then delay_p95``. A part with ``<=`` or ``>=`` is
a bound; one without is an order. Where no choice keeps all bounds, those that break them least are left, and the reason
says so. Between equals the one in force wins, then the one with less memory.

``balanced`` leaves choices that cut no more honest viewers than the one in force, and at most `HONEST_TOLERANCE` more
than the best; where they cut no fewer, they may leave out no more by `DROPS_TOLERANCE`. Of these, p95 of the delay,
peak of the memory and key frames lost, each as a share of what is in force, make a sum; the smallest wins, if it is a
tenth less than what is in force has. Limits that leave out twice as much are never recommended where nobody was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple

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
HONEST_TOLERANCE: Final = 0.001
"""Difference in the share of honest viewers cut, one of a thousand, below which the other figures decide."""
DROPS_TOLERANCE: Final = 1.1
"""Most drops of limits that cut no fewer honest viewers, in multiples of those of the limits in force."""
LEAST_GAIN: Final = 0.1
"""Least gain in delay, memory and lost key frames together: real runs of the same limits differ by as much."""
_DOUBLE: Final = 2.0
_FEW_DROPS: Final = 0.001
"""Share of dropped messages, one of a thousand, that counts as none."""
BALANCED_WORDS: Final = " (fewest honest viewers cut, then the least of delay, memory and lost key frames together)"
"""Meaning of ``balanced``, for the comment of a limits file."""
_BALANCED: Final = ("delay_p95_ms", "memory_peak_bytes", "lost")
_PART: Final = re.compile(r"([a-z0-9_]+)\s*(?:(<=|>=)\s*(\S+))?$")
Row = Mapping[str, Any]


class Part(NamedTuple):
    """One part of an objective: a bound in the unit of the column, or an order, without operator and bound."""

    measure: str
    operator: str | None
    bound: float
    text: str


class Pick(NamedTuple):
    """The row that was picked, why (one line), and whether all bounds are kept."""

    row: Row
    why: str
    kept: bool


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


def recommend(rows: Sequence[Row], objective: str) -> Pick:
    parts = parse_objective(objective)
    if not rows:
        raise ConfigError("there is no choice to recommend: none has the policy in force")
    rows = _sparing(rows)
    if not parts:
        return _balanced(rows)
    bounds = [part for part in parts if part.operator]
    excess = {row["choice_id"]: tuple(_excess(row, part) for part in bounds) for row in rows}
    least = min(excess.values())
    kept = not any(least)
    left = [row for row in rows if excess[row["choice_id"]] == least]
    orders = [part for part in parts if not part.operator]
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


def _sparing(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the choices without those that leave out twice as much though nobody was cut."""
    present = next((row for row in rows if row.get("in_force")), None)
    if present is None or present["disconnected_share"]:
        return rows
    most = max(_DOUBLE * float(present["dropped_share"]), _FEW_DROPS)
    return [row for row in rows if row is present or float(row["dropped_share"]) < most]


def without_gain(pick: Pick, present: Row, most_cut: int) -> Pick | None:
    """Return the advice to change nothing, where what was picked may bring nothing; None: it brings something."""
    now = int(present["honest_disconnected"])
    if pick.row is present or pick.row["honest_disconnected"] >= now or most_cut < now:
        return None
    why = f"change nothing: tried again, the best of the others cut {most_cut} honest viewers, as against {now}"
    return Pick(present, why, pick.kept)


def _balanced(rows: Sequence[Row]) -> Pick:
    present = next((row for row in rows if row.get("in_force")), None)
    least = min(map(_honest, rows))
    bound = min(least + HONEST_TOLERANCE, inf if present is None else _honest(present))
    left = [row for row in rows if _honest(row) <= bound]
    if present is not None:
        most = max(DROPS_TOLERANCE * float(present["dropped_share"]), _FEW_DROPS)
        spares = [row for row in left if _honest(row) < _honest(present) or float(row["dropped_share"]) <= most]
        left = spares or left
    sums = _sums(left, present if present in left else None)
    best = min(left, key=lambda row: (sums[row["choice_id"]], _honest(row), *_last(row)))
    if present in left and _honest(best) >= _honest(present):
        gains = sums[best["choice_id"]] <= (1 - LEAST_GAIN) * sums[present["choice_id"]]
        best = best if gains else present
    against = "" if present is None else f" (those in force {_honest(present):.2%})"
    fewer = "fewer" if _honest(best) == least else f"more than {HONEST_TOLERANCE * 100:g} points less"
    why = f"they cut {_honest(best):.2%} of honest viewers{against}, and none of {len(rows)} choices cuts {fewer}"
    why += f"; of the {len(left)} that cut as few they have the least delay, memory and lost key frames, all in all"
    if best is present:
        why += ", and are in force already"
    elif present in left and sums[present["choice_id"]]:
        why += f": {1 - sums[best['choice_id']] / sums[present['choice_id']]:.0%} less than those in force"
    return Pick(best, why, kept=True)


def _honest(row: Row) -> float:
    return float(row["honest_disconnected_share"])


def _sums(rows: Sequence[Row], present: Row | None) -> dict[Any, float]:
    """Return the sum of each choice; figures are shares of those of `present`, else of the largest."""

    def figure(row: Row, name: str) -> float:
        return 1.0 - float(row["key_share"]) if name == "lost" else float(row[name])

    scales = {}
    for name in _BALANCED:
        in_force = figure(present, name) if present is not None else 0.0
        scales[name] = in_force or max(figure(row, name) for row in rows) or 1.0
    return {row["choice_id"]: round(sum(figure(row, name) / scales[name] for name in _BALANCED), 9) for row in rows}


_COSTS: Final = {
    "disconnected_share": "viewers disconnected",
    "honest_disconnected_share": "honest viewers disconnected",
    "dropped_share": "messages dropped",
    "key_share": "key frames delivered",
    "stall_share": "time stalled",
    "delay_p50_ms": "delay p50",
    "delay_p95_ms": "delay p95",
    "delay_p99_ms": "delay p99",
    "memory_peak_bytes": "memory of one viewer, at most",
    "memory_mean_bytes": "memory, mean",
}


def costs(chosen: Row, present: Row) -> list[str]:
    shown: dict[str, Callable[[float], str]] = {
        "share": "{:.2%}".format,
        "ms": "{:.0f} ms".format,
        "bytes": format_size,
    }
    return [
        f"{word}: {show(float(present[name]))} -> {show(float(chosen[name]))}"
        for name, word in _COSTS.items()
        for show in (shown[name.rpartition("_")[2]],)
    ]
