"""What the report is made of: bounded rows of the result tables, and figures over all viewers (pure).

The report of a hundred million viewers holds no more than that of ten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

Row = Mapping[str, Any]

FORMAT: Final = 3
"""Of the figures over viewers in a summary, counted up when one changes its meaning: such runs cannot be compared."""
STATES: Final = ("ready", "overloaded", "soft", "hard")
"""As in the names of columns, from good to bad."""


class Known(NamedTuple):
    """What a figure over viewers is.

    Args:
        words: what it is called.
        better: whether more of it is better (1), worse (-1) or neither (0).
        of: of a share: the total that it is a part of; of a quantile: the column of the sessions; of a ratio of sums:
            the column of the sessions that each viewer weighs by.
        at: of a quantile: which.
    """

    words: str
    better: int
    of: str
    at: float = 0.0


SHARES: Final[Mapping[str, Known]] = {
    "start_failures": Known("attempts that failed to start", -1, "attempts"),
    "exits_before_start": Known("left before the first frame", -1, "attempts"),
    "troubled": Known("viewers in trouble", -1, "plays"),
    "cut_slow": Known("disconnected for being slow", -1, "plays"),
}
QUANTILES: Final[Mapping[str, Known]] = {
    "first_frame_p50_ms": Known("first frame (median)", -1, "first_frame_ms", 0.5),
    "first_frame_p95_ms": Known("first frame (p95)", -1, "first_frame_ms", 0.95),
    "delay_p50_ms": Known("delay (median of medians)", -1, "delay_p50_ms", 0.5),
    "delay_p95_ms": Known("delay (p95 of medians)", -1, "delay_p50_ms", 0.95),
}
RATIOS: Final[Mapping[str, Known]] = {
    "stall_ratio": Known("time stalled", -1, "play_s"),
    "picture_share": Known("pictures delivered", 1, "pictures_wanted"),
    "late_share": Known("time beyond the target delay", -1, "sampled_ms"),
    "bit_rate": Known("bit rate", 0, "play_s"),
    "frames_per_s": Known("frames per second", 0, "play_s"),
}
MEASURES: Final[Mapping[str, Known]] = {**SHARES, **QUANTILES, **RATIOS}
"""Figures over viewers: name in the row of all of `experience` -> what it is. The page and compare tell them."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure over viewers, and what it takes to say how sure it is.

    Args:
        n: viewers of whom it is known.
        value: ratio, share or quantile.
        error: its standard error, viewers taken as independent. None: unknown.
        part: of a share: how many of the `n`. None: it is no share.
    """

    n: int
    value: float
    error: float | None = None
    part: int | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """The first rows of a table, and how many it has."""

    rows: Sequence[Row] = ()
    total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All that a report shows.

    Args:
        events: folder that was analyzed.
        made_at: when, UTC.
        window: what was asked for, in words; "": all there is.
        jobs: name -> what became of it, as in ``summary.json``.
        totals: connections, span_s and drawn_share of all sessions; viewers, plays, troubled, play_s and sent_bytes of
            the row of all of `experience`. None: no sessions.
        measures: name (see `MEASURES`) -> figure over viewers.
        curves: name of a quantile of each viewer's delay -> points (ms, share of viewers for whom it is at most that).
        tables: name (see `flowctl.pipeline.report.evidence`) -> its first rows.
        moments: rows over time: at_s, shares of the states, viewers.
        moments_from: where the first of them begins.
        moment_s: length of such a place, seconds.
        peaks: days since the first -> most viewers at once on that day.
        missing: name of a table -> why it could not be read.
    """

    events: str
    made_at: datetime
    window: str = ""
    jobs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    totals: Mapping[str, Any] | None = None
    measures: Mapping[str, Measure] = field(default_factory=dict)
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    tables: Mapping[str, Cut] = field(default_factory=dict)
    moments: Sequence[Row] = ()
    moments_from: datetime | None = None
    moment_s: float = 60.0
    peaks: Mapping[int, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def rows(self, table: str) -> Sequence[Row]:
        """Return the first rows of a table."""
        return self.tables.get(table, Cut()).rows

    def summary(self, job: str) -> Mapping[str, Any]:
        """Return the summary of a job; {}: it has none."""
        found = self.jobs.get(job, {}).get("summary")
        return found if isinstance(found, Mapping) else {}

    def why_not(self, job: str) -> str:
        """Return why there are no figures of a job."""
        note = self.jobs.get(job, {})
        if note.get("state") == "failed":
            return f"Not known: the job {job} failed: {str(note.get('message'))[:400]}"
        if self.missing:
            told = "; ".join(f"{name}: {why}" for name, why in self.missing.items())
            return f"Not known: a table could not be read ({told[:400]})."
        if note.get("state") == "done":
            return f"Not known: the job {job} found nothing to say."
        return f"Not known: the job {job} was not run. `flowctl analyze {job}` runs it."


def json_of(text: str | None) -> dict[str, Any]:
    """Return a JSON object; {}: the text is none."""
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
