"""From result tables to the figures of the report: one pass over each in this process, batch by batch, by pyarrow.

No query of Spark: every figure is a sum over batches (counts, sums, squares, histograms) or the first rows of a table,
so memory is that of a batch whatever the table holds, and little data costs nothing. Columns that a table does not have
are taken as null: a table of another version costs less of the page, not all of it. Quantiles come from histograms
whose steps are 2 %, and are off by 1 % at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from flowctl.charts.words import number
from flowctl.pipeline.records.place import Place
from flowctl.pipeline.report.found import STATES, Cut, Measure, Row, json_of
from flowctl.reasons import SLOW_ENDS
from flowctl.telemetry.schema import CLASS_NAMES, VIEWING

MOST_ROWS: Final = 20
"""Rows of a table on the page: what a person reads. The whole table lies beside as Parquet."""
MOST_MOMENTS: Final = 120
"""Places along time: each is five pixels of a wide picture."""
LEAST_STAY_S: Final = 2.0
"""Viewers who were there for less are in no distribution over viewers: that is a sample or two, of a join."""
PICTURE_MARKS: Final = (1.0, 0.95, 0.8, 0.5, 0.0)
"""Least shares of the pictures by which viewers are told apart."""
_BATCH_ROWS: Final = 131_072
_STEP: Final = math.log(1.02)
_LEAST: Final = 0.1
_MOST: Final = 1e15
"""Beyond, a figure is none: the checks of records have put such rows aside."""
_STEPS_S: Final = (60, 120, 300, 600, 900, 1800, *(3600 * hours for hours in (1, 2, 4, 6, 12, 24, 48, 168, 720, 8760)))
"""Lengths of a place along time: round ones, so that ticks fall between places."""
_TEXTS: Final = (
    *("node", "peer_ip", "role", "app", "stream", "agent", "close_reason", "closed_by", "worst_state", "blame"),
    "start_failure",
)
_MEANS: Final = ["picture_share", "stall_ratio", "late_share", "bit_rate", "frames_per_s"]
_CURVES: Final = ["delay_p50_ms", "delay_p95_ms", "delay_p99_ms", "first_frame_ms"]
_DROPS: Final = [f"{what}_messages_{name}" for what in ("accepted", "dropped") for name in CLASS_NAMES]
_NUMBERS: Final = (
    *("duration_s", "play_s", "asked_ms", "trouble_ms", "sent_bytes", "line_of_stream"),
    *(*_MEANS, *_CURVES, *_DROPS),
)
_TIES: Final = ("node", "conn_id", "cidr", "address", "choice_id", "key", "app", "stream", "place")


class Tables:
    """The results in some folders; of two with the same name that in the first folder counts."""

    def __init__(self, *folders: str, since: datetime | None = None, until: datetime | None = None) -> None:
        self._places = [Place(folder) for folder in folders]
        self._bounds = since, until

    def has(self, name: str) -> bool:
        """Return whether there is a result of that name."""
        return any(place.exists(name) for place in self._places)

    def text(self, name: str) -> str | None:
        """Return a text file; None: there is none."""
        return next((place.read_text(name) for place in self._places if place.exists(name)), None)

    def batches(self, name: str, columns: Sequence[str] = (), at: str = "") -> Iterator[pd.DataFrame]:
        """Yield a table in pieces: these columns, or all; `at`: the column with the time by which the window cuts."""
        place = next((place for place in self._places if place.exists(name)), None)
        if place is None:
            return
        source = ds.dataset(place.storage.path(name), format="parquet", filesystem=place.storage.system)
        there = [column for column in columns or source.schema.names if column in source.schema.names]
        bounds = [(ds.field(at) >= pa.scalar(low)) for low in self._bounds[:1] if at in there and low]
        bounds += [(ds.field(at) < pa.scalar(high)) for high in self._bounds[1:] if at in there and high]
        wanted = None if not bounds else bounds[0] if len(bounds) == 1 else bounds[0] & bounds[1]
        waiting: list[pa.RecordBatch] = []  # an hour is a file, and a file at least a batch: small ones are joined
        rows = 0
        for batch in source.to_batches(columns=there, filter=wanted, batch_size=_BATCH_ROWS):
            waiting.append(batch)
            rows += batch.num_rows
            if rows >= _BATCH_ROWS:
                yield pa.Table.from_batches(waiting).to_pandas().reindex(columns=list(columns or there))
                waiting, rows = [], 0
        if rows:
            yield pa.Table.from_batches(waiting).to_pandas().reindex(columns=list(columns or there))

    def top(
        self, name: str, order: Sequence[str], most: int = MOST_ROWS, where: str = "", by: str = ""
    ) -> dict[str, Cut]:
        """Return the first rows of a table, the largest first, those without a value last.

        Args:
            name: of the table.
            order: columns, the one that counts most first.
            most: rows.
            where: column that must be above 0 for a row to count; "": all do.
            by: column of which each value has first rows of its own; "": the whole table has, under "".
        """
        kept: dict[str, tuple[pd.DataFrame, int]] = {}
        for frame in self.batches(name):
            used = frame[pd.to_numeric(frame[where], errors="coerce") > 0] if where in frame else frame
            for value, rows in used.groupby(by) if by else [("", used)]:
                before, total = kept.get(str(value), (rows.head(0), 0))
                kept[str(value)] = first(before, rows, order, most), total + len(rows)
        return {value: Cut(rows_of(rows), total) for value, (rows, total) in kept.items()}


def first(before: pd.DataFrame, more: pd.DataFrame, order: Sequence[str], most: int) -> pd.DataFrame:
    """Return the first of two sets of rows; ties are broken by names, so that the same tables give the same page."""
    both = pd.concat([before, more]) if len(before) else more
    down, up = ([name for name in names if name in both] for names in (order, _TIES))
    keys = [*down, *(name for name in up if name not in down)]
    return (both.sort_values(keys, ascending=[name not in down for name in keys]) if keys else both).head(most)


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """Return a small frame as plain rows, null as None."""

    def plain(value: Any) -> Any:
        value = value.item() if isinstance(value, np.generic) else value
        return None if value is pd.NaT or (isinstance(value, float) and math.isnan(value)) else value

    return [{str(key): plain(value) for key, value in row.items()} for row in frame.to_dict("records")]


# ------------------------------------------------------------------------------------------------ viewers

Sums = dict[str, "pd.Series[float]"]


class Sessions:
    """Adds up sessions, batch by batch; what it came to are attributes of `Found`."""

    def __init__(self) -> None:
        self.sums: Sums = {}
        self.began: Any = pd.NaT
        self.ended: Any = pd.NaT
        self.worst = pd.DataFrame()

    def add(self, frame: pd.DataFrame) -> None:
        """Take a batch of sessions."""
        values = frame[list(_NUMBERS)].apply(pd.to_numeric, errors="coerce")
        frame[list(_NUMBERS)] = values.where(values.abs() <= _MOST)
        ends = frame[["closed_at", "seen_at", "opened_at"]].apply(pd.to_datetime, utc=True, errors="coerce")
        self.began = min(filter(pd.notna, (self.began, ends["opened_at"].min())), default=pd.NaT)
        self.ended = max(filter(pd.notna, (self.ended, ends.max(axis=1).max())), default=pd.NaT)
        frame["cut_slow"] = frame["close_reason"].isin(SLOW_ENDS)
        frame["blame"] = frame["blame"].fillna("none")
        for name, sums in _sums(frame).items():
            self.sums[name] = self.sums[name].add(sums, fill_value=0) if name in self.sums else sums
        troubled = frame[frame["role"].isin(VIEWING) & (frame["blame"] != "none")]
        self.worst = first(self.worst, troubled, ("cut_slow", "trouble_ms", "delay_p99_ms"), MOST_ROWS)

    def totals(self) -> dict[str, Any]:
        """Return the sums over all."""
        whole = {str(name): float(value) for name, value in self.sums["totals"].items()}
        return {**whole, "span_s": (self.ended - self.began).total_seconds() if pd.notna(self.began) else None}

    def tables(self) -> dict[str, Cut]:
        """Return what was counted, as rows."""
        told = {name: self.sums[name].sort_values(ascending=False).reset_index(name="count") for name in _TALLIES}
        told["pictures"] = told["pictures"].sort_values("picture_share", ascending=False)  # from all to none
        troubled = int(self.sums["totals"]["troubled"])
        drops = self.sums["drops"]
        classes = [
            {"class": name, **{what: drops[f"{what}_messages_{name}"] for what in ("accepted", "dropped")}}
            for name in CLASS_NAMES
        ]
        found = {name: Cut(rows_of(rows.head(200)), len(rows)) for name, rows in told.items()}
        return {**found, "drops": Cut(classes, len(classes)), "worst": Cut(rows_of(self.worst), troubled)}

    def measures(self) -> dict[str, Measure]:
        """Return the figures over viewers."""
        total = self.sums["totals"]
        found = {}
        for name, of in _SHARES.items():
            n, part = int(total[of]), int(total[name])
            if n:
                found[name] = Measure(n, part / n, math.sqrt(part / n * (1 - part / n) / n), part)
        for name in _MEANS:
            n, mean = int(self.sums["n"][name]), self.sums["sum"][name] / max(self.sums["n"][name], 1)
            spread = max(0.0, self.sums["squares"][name] - n * mean**2)
            if n:
                found[name] = Measure(n, float(mean), math.sqrt(spread / (n - 1) / n) if n > 1 else None)
        for name, column, share in _QUANTILES:
            if len(self.sums[column]):
                found[name] = _quantile(self.sums[column], share)
        return found

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Return how the quantiles of viewers' delays are spread."""
        told: dict[str, list[tuple[float, float]]] = {}
        for name in _CURVES[:3]:
            steps = self.sums[name].sort_index()
            shares = steps.cumsum() / max(steps.sum(), 1)
            points = [(_value(step), float(share)) for step, share in shares.items()]
            told |= {name: [(points[0][0], 0.0), *points]} if points else {}
        return told


_TALLIES: Final = ("closes", "blames", "nodes", "pictures")
_SHARES: Final = {
    **dict.fromkeys(("start_failures", "exits_before_start"), "attempts"),
    **dict.fromkeys(("troubled", "cut_slow", "stalled"), "viewers"),
}
"""Part -> of what."""
_QUANTILES: Final = (
    ("first_frame_p50_ms", "first_frame_ms", 0.5),
    ("first_frame_p95_ms", "first_frame_ms", 0.95),
    ("delay_p50_ms", "delay_p50_ms", 0.5),
    ("delay_p95_ms", "delay_p95_ms", 0.95),
)


def _sums(frame: pd.DataFrame) -> Sums:
    """Return all that is added up of a batch."""
    viewers = frame[frame["role"].isin(VIEWING)]
    stayed = viewers[viewers["duration_s"] >= LEAST_STAY_S]
    asked = viewers[viewers["asked_ms"].notna()]
    totals = {
        "connections": len(frame),
        "viewers": len(viewers),
        "troubled": (viewers["blame"] != "none").sum(),
        "cut_slow": viewers["cut_slow"].sum(),
        "stalled": (viewers["stall_ratio"] > 0).sum(),
        "attempts": len(asked),
        "start_failures": asked["start_failure"].notna().sum(),
        "exits_before_start": (asked["exit_before_start"] == True).sum(),  # noqa: E712 - null is neither
        "play_s": viewers["play_s"].fillna(viewers["duration_s"]).sum(),
        "sent_bytes": frame["sent_bytes"].sum(),
    }
    marks = stayed["picture_share"].map(lambda share: next((m for m in PICTURE_MARKS if share >= m), -1.0))
    ends = frame[["close_reason", "closed_by"]].fillna({"close_reason": "still open", "closed_by": "open"})
    histograms = {name: _steps((viewers if name == "first_frame_ms" else stayed)[name]) for name in _CURVES}
    return {
        **histograms,
        "totals": pd.Series(totals, dtype="float64"),
        "closes": ends.value_counts().astype("float64"),
        "blames": viewers["blame"][viewers["blame"] != "none"].value_counts().astype("float64"),
        "nodes": viewers.fillna({"node": "-"})[["node", "blame"]].value_counts().astype("float64"),
        "pictures": marks.value_counts().astype("float64"),
        "drops": viewers[_DROPS].sum(),
        "n": stayed[_MEANS].count().astype("float64"),
        "sum": stayed[_MEANS].sum(),
        "squares": (stayed[_MEANS] ** 2).sum(),
    }


def _steps(values: pd.Series[float]) -> pd.Series[float]:
    known = values[np.isfinite(values)].clip(lower=_LEAST)
    return (np.log(known / _LEAST) / _STEP).round().value_counts().astype("float64")


def _value(step: Any) -> float:
    return _LEAST * math.exp(float(step) * _STEP)


def _quantile(histogram: pd.Series[float], share: float) -> Measure:
    """Return a quantile; its error is half the distance of the values a standard error of the rank away from it."""
    steps = histogram.sort_index()
    n, below = int(steps.sum()), steps.cumsum()
    off = math.sqrt(share * (1 - share) / n)
    ranks = (min(max(rank, 0.0), 1.0) * n for rank in (share - off, share, share + off))
    low, value, high = (_value(below.index[min(int((below < rank).sum()), len(below) - 1)]) for rank in ranks)
    return Measure(n, value, max((high - low) / 2, value * _STEP / 2))


def sessions_of(tables: Tables) -> Sessions | None:
    """Return the sums over all sessions, closed and open; None: there are none."""
    sums = Sessions()
    columns = (*_TEXTS, *_NUMBERS, "conn_id", "exit_before_start", "opened_at", "closed_at", "seen_at")
    for name, at in (("sessions", "closed_at"), ("sessions_open", "")):
        for frame in tables.batches(name, columns, at):
            sums.add(frame)
    return sums if sums.sums else None


# ------------------------------------------------------------------------------------------------ over time


def over_time(tables: Tables) -> dict[str, Any]:
    """Return `fleet_streams` over time: the fields of `Found` from `moments` to `peaks`; {}: there is nothing."""
    columns = [*(f"share_{state}" for state in STATES), *_CURVES[:3]]
    sums = pd.DataFrame()
    for frame in tables.batches("fleet_streams", ("minute", "viewers", *columns), "minute"):
        values = frame[["viewers", *columns]].apply(pd.to_numeric, errors="coerce")
        values = values.where(values.abs() <= _MOST)
        weight = values.pop("viewers").fillna(0.0)
        known = values.notna().mul(weight, axis=0).add_suffix("_of")
        part = pd.concat([values.mul(weight, axis=0), known, weight.rename("viewers")], axis=1)
        part = part.groupby(pd.to_datetime(frame["minute"], utc=True, errors="coerce")).sum()
        sums = part if sums.empty else sums.add(part, fill_value=0.0)
    if sums.empty:
        return {}
    ages_s = pd.Index((sums.index - sums.index.min()).total_seconds())
    moment_s = next((step for step in _STEPS_S if (ages_s.max() + 60) / step <= MOST_MOMENTS), _STEPS_S[-1])
    placed = sums.groupby(ages_s // moment_s)
    rows = []
    for (place, one), minutes in zip(placed.sum().head(MOST_MOMENTS).iterrows(), placed.size(), strict=False):
        shares = {name.removeprefix("share_"): number(one[name] / (one[f"{name}_of"] or math.nan)) for name in columns}
        rows.append({"at_s": float(str(place)) * moment_s, "viewers": one["viewers"] / minutes, **shares})
    days = sums["viewers"].groupby((sums.index.floor("D") - sums.index.min().floor("D")).days).max()
    began = sums.index.min().to_pydatetime().astimezone(UTC)
    peaks = {int(str(day)): float(most) for day, most in days.items()}
    return {"moments": rows, "moments_from": began, "moment_s": float(moment_s), "peaks": peaks}


def bans_of(text: str) -> Cut:
    """Return the first lines of a ban list, the highest scores first; what is no JSON object counts as left out."""
    lines = [line for line in text.splitlines() if line.strip()]
    rows = [value for line in lines if (value := json_of(line))]
    return Cut(sorted(rows, key=lambda row: -(number(row.get("score")) or 0.0))[:MOST_ROWS], len(lines))
