"""What the report is made of: figures over viewers, bounded rows of the result tables, and what they are (pure).

The report of a hundred million viewers holds no more than that of ten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from flowctl.charts.words import share, value_text

Row = Mapping[str, Any]

FORMAT: Final = 4
"""Format of the figures over viewers, raised when one changes its meaning: runs of two formats are not compared."""
SURE_OF_DIFFERENCE: Final = 2.6
"""Standard errors of a sure difference: chance makes one in a hundred, and a dozen figures are looked at."""
STEP: Final = 0.032
"""Width of a delay bucket: a viewer's delay is the middle of one, so 1.6 % off at most, up or down."""
STATES: Final = ("ready", "overloaded", "soft", "hard")
"""States as in the names of columns, from good to bad."""


class Measure(NamedTuple):
    """What a figure over viewers is; its unit is the end of its name (`flowctl.charts.words.value_text`)."""

    kind: str  # "share" of a total, "quantile" over viewers, or "ratio" of sums
    words: str
    better: int
    least: float  # change that matters, in its unit; a smaller one does not, however sure
    # Of a share: the total; of a quantile: the column of the sessions; of a ratio: the column of the sessions that each
    # viewer weighs by
    of: str
    at: float = 0.0
    step: float = 0.0  # share of it by which it is measured in steps: a change of one step may be chance
    tile: bool = False  # whether it is one of the few figures that one looks for first


MEASURES: Final[Mapping[str, Measure]] = {
    "start_failures": Measure("share", "attempts that failed to start", -1, 0.002, "attempts", tile=True),
    "exits_before_start": Measure("share", "left before the first frame", -1, 0.002, "attempts"),
    "troubled": Measure("share", "viewers in trouble", -1, 0.005, "plays", tile=True),
    "cut_slow": Measure("share", "disconnected for being slow", -1, 0.002, "plays", tile=True),
    "first_frame_p50_ms": Measure("quantile", "first frame, median viewer", -1, 50, "first_frame_ms", 0.5, tile=True),
    "first_frame_p95_ms": Measure("quantile", "first frame, 95 % of viewers", -1, 50, "first_frame_ms", 0.95),
    "delay_p50_ms": Measure("quantile", "delay of the median viewer", -1, 50, "delay_p50_ms", 0.5, STEP),
    "delay_p95_ms": Measure(
        "quantile", "most delay of 95 % of viewers, half of their time", -1, 50, "delay_p50_ms", 0.95, STEP, tile=True
    ),
    "stall_ratio": Measure("ratio", "time stalled", -1, 0.001, "play_s", tile=True),
    "picture_share": Measure("ratio", "pictures delivered", 1, 0.002, "pictures_wanted", tile=True),
    "late_share": Measure("ratio", "time beyond the target delay", -1, 0.005, "sampled_ms"),
    "smaller_rendition_share": Measure("ratio", "time in a smaller rendition", -1, 0.005, "set_s"),
    "bit_rate": Measure("ratio", "bit rate", 0, 10e3, "play_s"),
    "frames_per_s": Measure("ratio", "frames per second", 0, 0.2, "play_s"),
}
"""Figures over viewers: name in the row of all of `experience` -> what it is. Tiles, tables and compare follow."""


def measured(name: str, one: Row) -> str:
    return value_text(name, one["value"]) if one.get("part") is None else share(one["part"], one["n"], brief=True)


class CutTable(NamedTuple):
    """The first rows of a table, and how many it has."""

    rows: Sequence[Row] = ()
    total: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """One viewer over time."""

    viewer: Row
    points: Any  # frame of pandas with the columns at (Unix time), queue (bytes), line (bits a second) and drops
    states: Sequence[tuple[float, str]]  # since when it was in which; the last one ends with the points
    command: str  # that replays its flight; "": none was recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFindings:
    """All that a report shows."""

    events: str
    made_at: datetime
    window: str = ""
    jobs: Mapping[str, Row] = field(default_factory=dict)  # name -> what became of it, as in ``summary.json``
    # Connections, span_s and drawn_share of all sessions, and of how many viewers the address is `listed` in bans;
    # the usual target_delay_ms; viewers, plays, troubled, play_s and sent_bytes of the row of all of `experience`.
    # None: no sessions.
    totals: Row | None = None
    # Name (see `MEASURES`) -> figure over viewers (see `measured`)
    measures: Mapping[str, Row] = field(default_factory=dict)
    # Name of a quantile of each viewer's delay -> points (ms, share of viewers for whom it is at most that)
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    # Name (see `flowctl.analyze.report.evidence`) -> its first rows
    tables: Mapping[str, CutTable] = field(default_factory=dict)
    moments: Sequence[Row] = ()  # rows over time: from_s (Unix time), length_s, shares of the states, viewers
    streams: Mapping[str, Sequence[float]] = field(default_factory=dict)  # name -> its viewers in each of these rows
    # (Dimension, key) -> its row of `experience` a day earlier; where the results do not have that day, nothing
    before: Mapping[tuple[str, str], Row] = field(default_factory=dict)
    timelines: Sequence[Timeline] = ()  # of the viewers that were worst off
    # Whole days since the first record -> most viewers at once on that day
    peaks: Mapping[int, float] = field(default_factory=dict)
    # Name of a job -> which of its tables could not be read, and why
    missing: Mapping[str, str] = field(default_factory=dict)

    def rows(self, table: str) -> Sequence[Row]:
        return self.tables.get(table, CutTable()).rows

    def summary(self, job: str) -> Row:
        summary = self.jobs.get(job, {}).get("summary")
        return summary if isinstance(summary, Mapping) else {}

    def why_not(self, job: str) -> str:
        note = self.jobs.get(job, {})
        if note.get("state") == "failed":
            return f"Not known: the job {job} failed: {str(note.get('message'))[:400]}"
        if job in self.missing:
            return f"Not known: a table could not be read ({self.missing[job][:400]})."
        if note.get("state") == "done":
            return f"Not known: the job {job} found nothing to say."
        return f"Not known: the job {job} was not run. `flowctl analyze {job}` runs it."


def json_of(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
