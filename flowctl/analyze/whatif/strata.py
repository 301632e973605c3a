"""Which viewers are tried, how much each counts, and how far off shares may be: a stratified sample (pure).

What a choice does to a viewer that always kept up is known: these are all counted. Of those in trouble, who was cut and
who was not are strata, and of each those with the smallest hashes are tried, as many as its mean cost allows. Errors
are those of double sampling (Cochran, "Sampling Techniques", 3rd ed., 1977, 12.2), with one more of each outcome where
not all were tried (Agresti and Min, 2005).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from flowctl.analyze.whatif.trials import ALL_CHOICES, PEAK, Sums
from flowctl.reasons import SLOW_ENDS

if TYPE_CHECKING:
    import pandas as pd

CALM: Final = 0
CUT: Final = 1
"""Cut for being slow while recorded: what would have followed is assumed."""
TROUBLED: Final = 2
LEAST_TRIED: Final = 2
"""Of each stratum: a standard error takes two."""
VIEWER: Final = ["picked", "node", "conn_id"]


class Stratum(NamedTuple):
    """How many viewers of the sample are in it, and how many of these are tried."""

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
