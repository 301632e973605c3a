"""What the report is made of: bounded figures, taken from the tables by `gather` and shown by `page` (pure).

Everything here is small on purpose: sums, quantiles, at most some hundred places along time, and the first rows of long
tables with the number of those that were left out (`Cut`). So the report of a hundred million viewers costs the driver
no more than that of ten, and the page can be tested without Spark.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

Row = Mapping[str, Any]

STATES: Final = ("ready", "overloaded", "soft", "hard")
"""Short names of the states, as in the columns ``time_<name>_ms`` of `sessions`, from good to bad."""

SHARES: Final = tuple(place / 100 for place in range(101))
"""Of a distribution in a picture: a hundred steps are as many as an eye can follow."""


LEAST_STAY_S: Final = 2.0
"""Viewers who were there for less do not enter distributions over viewers: that is a sample or two, of a join."""
PICTURE_CLASSES: Final = (1.0, 0.95, 0.8, 0.5, 0.0)
"""Least shares of the pictures by which viewers are told apart."""


class JobState(enum.Enum):
    """What became of a job."""

    DONE = "done"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class JobNote:
    """One job, for the first section and the machine's summary.

    Args:
        name: of the job.
        state: what became of it.
        message: why it failed, one line.
        hint: what can be done about that.
        accounts: of each table it read, rows and files in, out and quarantined, as `Accounts.as_dict` has them.
        took_s: how long it ran, seconds. None: unknown.
        summary: its own summary; empty: unknown.
        outputs: name of an output -> path.
    """

    name: str
    state: JobState
    message: str = ""
    hint: str = ""
    accounts: Sequence[Mapping[str, Any]] = ()
    took_s: float | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        return {
            "state": self.state.value,
            "message": self.message,
            "hint": self.hint,
            "accounts": [dict(item) for item in self.accounts],
            "took_s": self.took_s,
            "summary": dict(self.summary),
            "outputs": dict(self.outputs),
        }

    @classmethod
    def from_dict(cls, name: str, values: Mapping[str, Any]) -> JobNote:
        """Return what `as_dict` gave; what is missing or unknown becomes "not run"."""
        words = {state.value: state for state in JobState}
        return cls(
            name,
            words.get(str(values.get("state")), JobState.NOT_RUN),
            str(values.get("message") or ""),
            str(values.get("hint") or ""),
            _mappings(values.get("accounts")),
            number(values.get("took_s")),
            _mapping(values.get("summary")),
            {key: str(path) for key, path in _mapping(values.get("outputs")).items()},
        )


def _mappings(value: Any) -> list[dict[str, Any]]:
    return [_mapping(item) for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def _mapping(value: Any) -> dict[str, Any]:
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


@dataclass(frozen=True, slots=True)
class Cut:
    """The first rows of a table.

    Args:
        rows: column -> value each.
        total: rows of the whole table.
    """

    rows: Sequence[Row] = ()
    total: int = 0

    @property
    def left_out(self) -> int:
        """Rows that are not shown."""
        return max(0, self.total - len(self.rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """All figures of a report; a part that is None has no table, and says so on the page.

    Args:
        events: what was analyzed: the folder.
        made_at: when, UTC.
        jobs: by name.
        whole: one row over all connections (see `gather.WHOLE`): counts, sums and quantiles. None: no sessions.
        began_at: of the first connection. None: unknown.
        ended_at: of the last one.
        nodes: name -> connections; the largest ones.
        node_count: of all of them.
        closes: rows (reason, closed_by, connections).
        blames: rows (blame, viewers, share): viewers in trouble by the blame that weighs most for each.
        drops: rows (class, accepted_messages, dropped_messages).
        picture_shares: rows (least, viewers): viewers by the class of `PICTURE_CLASSES` that their share falls into;
            least None: not known.
        worst: viewers that were worst off, the worst first.
        delay_curves: name of a quantile of each viewer -> its value at each of `SHARES` of the viewers, ms.
        moments: rows over time: at_s, shares ready, overloaded, soft, hard; viewers, delay_p50_ms, _p95_ms, _p99_ms.
        moments_from: where the first of them begins. None: unknown.
        moment_s: length of such a place, seconds.
        streams: of `fleet_streams`, by stream.
        subnets: of `fleet_subnets`.
        choices: of `whatif_choices`.
        limits_toml: the recommendation as a file. None: there is none.
        scores: of `abuse_scores`, the worst first.
        bans: lines of the ban list.
        capacity: rows of `capacity`.
        capacity_nodes: of `capacity_nodes`, the fullest first.
        capacity_streams: of `capacity_streams`, the most watched first.
        capacity_places: of `capacity_places`, the largest first.
        unreadable: name of a table -> why it could not be read.
    """

    events: str
    made_at: datetime
    jobs: Mapping[str, JobNote] = field(default_factory=dict)
    whole: Row | None = None
    began_at: datetime | None = None
    ended_at: datetime | None = None
    nodes: Sequence[Row] = ()
    node_count: int = 0
    closes: Sequence[Row] = ()
    blames: Sequence[Row] = ()
    drops: Sequence[Row] = ()
    picture_shares: Sequence[Row] = ()
    worst: Cut | None = None
    delay_curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    moments: Sequence[Row] | None = None
    moments_from: datetime | None = None
    moment_s: float = 60.0
    streams: Cut | None = None
    subnets: Cut | None = None
    choices: Cut | None = None
    limits_toml: str | None = None
    scores: Cut | None = None
    bans: Cut | None = None
    capacity: Cut | None = None
    capacity_nodes: Cut | None = None
    capacity_streams: Cut | None = None
    capacity_places: Cut | None = None
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def job(self, name: str) -> JobNote:
        """Return what became of a job; one that nobody mentioned was not run."""
        return self.jobs.get(name) or JobNote(name, JobState.NOT_RUN)

    def accounts(self) -> list[Row]:
        """Return the accounts of each table of records once: several jobs read the same one, the fullest counts."""
        found: dict[str, Row] = {}
        for note in self.jobs.values():
            for item in note.accounts:
                table = str(item.get("table"))
                if table not in found or whole_number(item.get("rows_in")) > whole_number(found[table].get("rows_in")):
                    found[table] = item
        return [found[table] for table in sorted(found)]

    def set_aside(self) -> list[Row]:
        """Return what could not be used: rows (table, reason, rows, files), the most first."""
        rows = []
        for item in self.accounts():
            by_row, by_file = _mapping(item.get("by_reason")), _mapping(item.get("files_by_reason"))
            rows += [
                {
                    "table": str(item.get("table")),
                    "reason": reason,
                    "rows": whole_number(by_row.get(reason)),
                    "files": whole_number(by_file.get(reason)),
                }
                for reason in sorted({*by_row, *by_file})
            ]
        return sorted(rows, key=lambda row: (-row["rows"], -row["files"], row["table"], row["reason"]))


def number(value: Any) -> float | None:
    """Return a finite number as one, anything else (text, None, NaN, infinity, a flag) as None."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def whole_number(value: Any) -> int:
    """Return a count; what is none is 0."""
    found = number(value)
    return 0 if found is None else int(found)
