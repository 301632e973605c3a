"""What happened to the viewers that were worst off, by their samples and events: state, queue, line and drops.

The records themselves are read, those on this machine, of the last hours of each of these viewers and up to so many
octets; files that cannot be used are passed over, as the jobs do.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from flowctl.analyze.records.footers import facts_of, opened, pieces
from flowctl.analyze.records.place import Storage, local_path
from flowctl.analyze.records.window import Hour, hour_of
from flowctl.analyze.report.found import Row, Timeline
from flowctl.records.telemetry.schema import CLASS_NAMES

MOST_VIEWERS: Final = 12
MOST_HOURS: Final = 3
"""Most hours of a viewer that are read, its last: what became of it is there."""
MOST_BYTES: Final = 64 << 20
"""Most octets of files of a table that are read, a second's work."""
MOST_ROWS: Final = {"flow_samples": 4_000_000, "flow_events": 4_000_000, "flight": 16_000_000}
"""Most rows of these files, for a few octets may say very many; of flights only whose they are is kept."""
MOST_POINTS: Final = 150
"""Most points of a timeline: each is four pixels of half a page."""
_DROPS: Final = tuple(f"dropped_messages_{name}" for name in CLASS_NAMES)
_WHO: Final = ("node", "conn_id")
_COLUMNS: Final = {
    "flow_samples": (*_WHO, "ts", "state", "interval_ms", "queued_bytes", "sent_bytes", *_DROPS),
    "flow_events": (*_WHO, "ts", "state_to", "queued_bytes", "dropped_messages"),
    "flight": _WHO,
}


def timelines(events: str, worst: Sequence[Row]) -> list[Timeline]:
    if not worst or (there := local_path(events)) is None or not there.is_dir():
        return []
    viewers, storage = worst[:MOST_VIEWERS], Storage.of(events)
    hours = sorted({hour for viewer in viewers for hour in _hours(viewer)}, reverse=True)
    read = {table: _read(storage, table, hours, viewers) for table in _COLUMNS}
    found = []
    for viewer in viewers:
        own = {table: frame[(frame["node"] == viewer["node"]) & (frame["conn_id"] == viewer["conn_id"])]
               for table, frame in read.items()}  # fmt: skip
        samples, told = (
            own[table].drop_duplicates("ts").sort_values("ts") for table in ("flow_samples", "flow_events")
        )
        rows = samples if len(samples) else told
        if rows.empty:
            continue
        moments = pd.concat([samples[["ts", "state"]], told.rename(columns={"state_to": "state"})[["ts", "state"]]])
        moments = moments.dropna().sort_values("ts")
        states = [(at.timestamp(), str(state)) for at, state in moments.itertuples(index=False)]
        changes = [item for place, item in enumerate(states) if not place or item[1] != states[place - 1][1]]
        who = ["--conn", str(viewer["conn_id"]), "--node", str(viewer["node"])]
        command = shlex.join(["flowctl", "replay", events, *who]) if len(own["flight"]) else ""
        found.append(Timeline(viewer, _points(rows), changes, command))
    return found


def _hours(viewer: Row) -> list[Hour]:
    """Return the last hours in which a viewer was there."""
    first, last = (
        datetime.fromisoformat(str(viewer[name])) if viewer.get(name) else None for name in ("opened_at", "until")
    )
    if (end := last or first) is None:
        return []
    hours = [hour_of(end - timedelta(hours=back)) for back in range(MOST_HOURS)]
    return [hour for hour in hours if first is None or hour >= hour_of(first)]


def _read(storage: Storage, table: str, hours: Sequence[Hour], viewers: Sequence[Row]) -> pd.DataFrame:
    """Return the rows of these viewers; the newest hours first, for as many octets as are read."""
    kept = [pa.table({name: [] for name in _COLUMNS[table]})]
    numbers = pa.array([viewer["conn_id"] for viewer in viewers], pa.int64())
    folders = {f"{table}/date={date}/hour={hour}": (date, hour) for date, hour in hours}
    files = [
        (info, of) for folder, of in folders.items() if storage.is_folder(folder) for _, info in storage.walk(folder)
    ]
    left, rows_left, now_us = MOST_BYTES, MOST_ROWS[table], int(time.time() * 1e6)
    for info, hour in files:
        left -= info.size or 0
        if left < 0:
            break
        name, bad = info.base_name, storage.strange(info)
        if not name.endswith(".parquet") or name.startswith((".", "_")) or bad:
            continue
        facts = facts_of(storage.system, info.path, table, hour, now_us)
        rows_left -= facts.rows or 0
        if facts.usable and rows_left >= 0:
            with storage.system.open_input_file(info.path) as source:
                for piece in pieces(opened(source, table), table, _COLUMNS[table]):
                    rows = piece.filter(pc.is_in(piece["conn_id"], numbers))
                    kept.append(rows.group_by([*_WHO]).aggregate([]) if table == "flight" else rows)
    return pa.concat_tables(kept, promote_options="permissive").to_pandas()


def _points(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows as few points: of queues the longest, of lines the mean, of drops the sum."""
    nothing = pd.Series(np.nan, rows.index)
    number: Mapping[str, Any] = {
        "at": rows["ts"].map(datetime.timestamp),
        "queue": rows["queued_bytes"],
        "bits": rows.get("sent_bytes", nothing) * 8,
        "seconds": rows.get("interval_ms", nothing) / 1000,
        "drops": rows[list(_DROPS)].sum(axis=1) if _DROPS[0] in rows else rows["dropped_messages"],
    }
    frame = pd.DataFrame({name: values.astype(float) for name, values in number.items()}).clip(0.0, 1e15)
    groups = frame.groupby(np.arange(len(frame)) * min(MOST_POINTS, len(frame)) // len(frame))
    sums = {"at": "last", "queue": "max", "bits": "sum", "seconds": "sum", "drops": "sum"}
    found = groups.agg(sums)
    return found.assign(line=(found["bits"] / found["seconds"]).where(found["seconds"] > 0))
