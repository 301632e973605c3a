"""Which viewers are tried, and from their stretches to sums by choice, with how far off these may be (pure).

Sums are whole numbers in rows (choice, measure, value), so that adding them up in any order, on any cluster, gives the
same. What a choice does to a viewer that always kept up is known: these are all counted. Of those in trouble, who was
cut and who was not are strata, and of each those with the smallest hashes are tried, as many as its mean cost allows.
Errors are those of double sampling (Cochran, "Sampling Techniques", 3rd ed., 1977, 12.2), with one more of each outcome
where not all were tried (Agresti and Min, 2005).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from flowctl.analyze.whatif.grid import in_force
from flowctl.analyze.whatif.intervals import made_up
from flowctl.core.flow.state import MessageClass
from flowctl.errors import FlowctlError
from flowctl.reasons import SLOW_ENDS
from flowctl.records.flight.whatif.engine import evaluate, recorded_viewer
from flowctl.records.flight.whatif.types import REFUSED, TAKEN, Choice, ChoiceOutcome, RecordedViewer
from flowctl.records.telemetry.schema import CLASS_NAMES

if TYPE_CHECKING:
    import pandas as pd

ALL_CHOICES: Final = -1
"""Stands for all choices, in sums that are the same for each."""
HONEST_SHARE: Final = 0.05
"""Least share of the stream that a viewer takes: with less it stands still or pretends to read."""
PEAK: Final = "memory_peak_bytes"
"""Measure of which the largest value counts, not the sum."""
DELAY: Final = "delay."
"""Prefix of the measures of time per delay bucket, in microseconds."""

_KEY: Final = int(MessageClass.KEY)
_DROPS: Final = tuple(f"dropped_messages_{name}" for name in CLASS_NAMES)
Sums = dict[tuple[int, str], int]
"""(choice, measure) -> value; choices are numbered as in the grid."""


def tally(
    viewers: Iterable[Sequence[Mapping[str, Any]]], choices: Sequence[Choice], extend_s: float, repeat: int = 0
) -> Sums:
    sums: Sums = Counter()
    for rows in viewers:
        try:
            for choice, measure, value in _tried(rows, choices, extend_s, repeat):
                key = (choice, measure)
                sums[key] = max(sums[key], value) if measure == PEAK else sums[key] + value
        except FlowctlError:
            sums[ALL_CHOICES, "damaged"] += 1
    return sums


def viewer_of(row: Mapping[str, Any], extend_s: float, repeat: int = 0) -> RecordedViewer | None:
    """Return a stretch as the engine takes it; None: it was calm."""
    if row["intervals"]:
        events = made_up(row["intervals"])
    elif row["at_us"]:
        events = list(zip((at / 1e6 for at in row["at_us"]), row["what"], row["bytes"], strict=True))
    else:
        return None
    return recorded_viewer(
        events,
        given=row["given"] or 0,
        restart_bytes=row["restart_bytes"] or 0,
        ended_s=max(row["ended_us"] / 1e6, events[-1][0]),
        close_reason=row["close_reason"],
        switched=[at / 1e6 for at in row.get("switched_us") or ()],
        extend_s=extend_s,
        repeat=repeat,
    )


def _tried(
    rows: Sequence[Mapping[str, Any]], choices: Sequence[Choice], extend_s: float, repeat: int
) -> Iterator[tuple[int, str, int]]:
    """Yield the sums of one viewer. Once a choice has closed it, what comes later is nothing to that choice."""
    recorded = [viewer_of(row, extend_s, repeat) for row in rows]
    refused = any(viewer is not None and viewer.refused for viewer in recorded)
    honest = not refused or _honest(rows, recorded)
    totals = [Counter[str]() for _ in (choices if refused else choices[:1])]
    for row, viewer in zip(rows, recorded, strict=True):
        left = [number for number, total in enumerate(totals) if not total["disconnected"]]
        for number in left:
            totals[number].update(dict(row["calm"] or ()))
        if viewer is not None and left:
            outcomes = evaluate(viewer, [choices[number] for number in left])
            for number, outcome in zip(left, outcomes, strict=True):
                total = totals[number]
                peak = max(total[PEAK], outcome.memory_peak_bytes)
                total.update(of_outcome(outcome))
                total["assumed_us"] += max(_us(outcome.watched_s) - int(row["ended_us"]), 0)
                total[PEAK] = peak
    if not repeat and in_force(rows[0].get("settings")) == choices[0]:
        _calibrate(rows[-1].get("recorded"), totals)
    present = totals[0]["disconnected"]
    # The kernel refuses something to most viewers as they join: in trouble is who then loses messages or is cut.
    troubled = any(totals[0][name] for name in ("disconnected", *_DROPS))
    for number, total in enumerate(totals):
        watched_s, closed = total["watched_us"] / 1e6, total["disconnected"]
        mean_bytes = round(total.pop("held_byte_ms", 0) / 1000 / watched_s) if watched_s else 0
        total.update(viewers=1, honest=honest, honest_disconnected=closed and honest, memory_mean_bytes=mean_bytes)
        total.update(saved=present > closed, lost=closed > present, troubled=troubled)
        for measure, value in total.items():
            yield number if refused else ALL_CHOICES, measure, int(value)


def _calibrate(recorded: Any, totals: Sequence[Counter[str]]) -> None:
    """Have the choice in force do what was recorded, and the others so much more or less than that as when tried.

    Where the trial is wrong about the cut itself, it says nothing of this viewer: what was recorded counts for all.
    """
    if not recorded:
        return
    known, tried = dict(recorded), Counter(totals[0])
    wrong = tried["disconnected"] != known["disconnected"]
    for number, total in enumerate(totals):
        if wrong:
            total["disconnected"] = known["disconnected"]
        for name in _DROPS if not (wrong and number) else ():
            total[name] = max(total[name] + known.get(name, 0) - tried[name], 0)


def of_outcome(outcome: ChoiceOutcome) -> dict[str, int]:
    return {
        "disconnected": int(outcome.closed is not None),
        "watched_us": _us(outcome.watched_s),
        "ready_us": _us(outcome.time_in_states_s[0]),
        "stall_us": _us(outcome.stall_s),
        "held_byte_ms": round(outcome.memory_byte_s * 1000),
        "offered_messages": sum(outcome.offered_messages),
        **dict(zip(_DROPS, outcome.dropped_messages, strict=True)),
        "key_offered": outcome.offered_messages[_KEY],
        "key_sent": outcome.sent_messages[_KEY],
        "sent_bytes": outcome.sent_bytes,
        "edges": outcome.edges,
        "returns": outcome.returns,
        **{f"{DELAY}{bucket}": _us(seconds) for bucket, seconds in outcome.delay},
    }


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _honest(rows: Sequence[Mapping[str, Any]], recorded: Sequence[RecordedViewer | None]) -> bool:
    calm = sum(int(dict(row["calm"] or ()).get("sent_bytes", 0)) for row in rows)
    events = [event for viewer in recorded if viewer is not None for event in viewer.events]
    offered = calm + sum(size for _, what, size in events if what >= 0)
    return calm + sum(size for _, what, size in events if what in (TAKEN, REFUSED)) >= HONEST_SHARE * offered


CALM: Final = 0
CUT: Final = 1
"""Cut for being slow while recorded: what would have followed is assumed."""
TROUBLED: Final = 2
LEAST_TRIED: Final = 2
"""Least viewers tried per stratum: a standard error takes two."""
VIEWER: Final = ["picked", "node", "conn_id"]


class Stratum(NamedTuple):
    """Viewers of the sample in one stratum, and those of them that are tried."""

    size: int
    tried: int


def drawn(heads: pd.DataFrame, extend_s: float, most_s: float) -> tuple[pd.DataFrame, dict[int, Stratum]]:
    """Return the viewers to be tried (`VIEWER`, `stratum`, `cost_s`), and the strata by number."""
    slow = heads["close_reason"].isin(SLOW_ENDS) & (heads["ended_us"] > 0)
    cost = heads.assign(slow=slow, cost_s=heads["ended_us"] / 1e6 + slow * extend_s)
    viewers = cost.groupby(VIEWER, as_index=False).agg(cost_s=("cost_s", "sum"), slow=("slow", "max"))
    viewers["stratum"] = [
        (CUT if slow else TROUBLED) if cost_s else CALM
        for cost_s, slow in zip(viewers["cost_s"], viewers["slow"], strict=True)
    ]
    found, strata = [], {}
    groups = sorted(viewers.groupby("stratum"), key=lambda item: float(item[1]["cost_s"].sum()))
    for left, (number, group) in zip(range(len(groups), 0, -1), groups, strict=True):
        size, cost_s = len(group), float(group["cost_s"].sum())
        part_s = most_s / left if number else math.inf
        tried = size if cost_s <= part_s else min(size, max(int(part_s * size / cost_s), LEAST_TRIED))
        most_s -= cost_s * tried / size
        found.append(group.sort_values(VIEWER).head(tried)[[*VIEWER, "stratum", "cost_s"]])
        strata[int(number)] = Stratum(size, tried)
    import pandas as pd

    return pd.concat(found) if found else viewers, strata


def weighted(sums: Mapping[int, Sums], strata: Mapping[int, Stratum]) -> Sums:
    """Return sums of all viewers from those of the ones that were tried, by stratum."""
    totals: dict[tuple[int, str], float] = {}
    for number, part in sums.items():
        weight = strata[number].size / strata[number].tried
        for key, value in part.items():
            so_far = totals.get(key, 0)
            totals[key] = max(so_far, value) if key[1] == PEAK else so_far + value * weight
    return {key: round(value) for key, value in totals.items()}


def errors(choice: int, sums: Mapping[int, Sums], strata: Mapping[int, Stratum], recorded: int) -> tuple[float, float]:
    """Return standard errors: of the share that a choice cuts, and of the difference to what is in force."""
    cut, moved = [], []
    for number, stratum in strata.items():
        part = sums.get(number, {})
        tried = sum(part.get((key, "viewers"), 0) for key in {choice, ALL_CHOICES}) or stratum.tried
        known = Stratum(stratum.size, min(tried, stratum.size))
        cut.append((known, part.get((choice, "disconnected"), 0), 0))
        moved.append((known, part.get((choice, "lost"), 0), part.get((choice, "saved"), 0)))
    return _error(cut, (1.0, 0.0), recorded), _error(moved, (0.5, 0.5), math.inf)


def _error(parts: Sequence[tuple[Stratum, int, int]], more: tuple[float, float], of: float) -> float:
    total = sum(stratum.size for stratum, _, _ in parts)
    mean = square = within = 0.0
    for (size, tried), above, below in parts:
        share, up, down = size / total, above, below
        mean, square = mean + share * (up - down) / tried, square + share * (up + down) / tried
        if tried < size:
            up_share, down_share = (up + more[0]) / (tried + 2), (down + more[1]) / (tried + 2)
            spread = up_share + down_share - (up_share - down_share) ** 2
            within += share**2 * (1 - tried / size) * spread / max(tried - 1, 1)
    between = (square - mean**2) * max(1 / total - 1 / of, 0.0) if total else 0.0
    return math.sqrt(within + between)
