"""Events by hand for tests of abuse and watch: rows with few words, files as a recorder names and finishes them."""

from __future__ import annotations

import datetime as dt
import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flowctl.telemetry.schema import ARROW_TYPES, FLOW_EVENTS, Kind

BEGIN_S = 1_790_000_000
"""A second of 2026; tests that need bans to last use the present instead."""
_numbers = itertools.count(1)


def at(seconds: float) -> dt.datetime:
    """Return a time in seconds since the epoch as a ban has it."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC)


def schema() -> pa.Schema:
    types = {
        Kind.TIMESTAMP: pa.timestamp("us", tz="UTC"),
        Kind.INT: pa.int64(),
        Kind.REAL: pa.float64(),
        Kind.TEXT: pa.string(),
        Kind.FLAG: pa.bool_(),
    }
    assert set(types) == set(ARROW_TYPES)
    return pa.schema([pa.field(column.name, types[column.kind]) for column in FLOW_EVENTS.columns])


def event(address: str, name: str, at_s: float = BEGIN_S, **columns: Any) -> dict[str, Any]:
    """Return a row; `detail` may be a dict."""
    detail = columns.pop("detail", None)
    row = dict.fromkeys(FLOW_EVENTS.names) | {
        "ts": dt.datetime.fromtimestamp(at_s, dt.UTC),
        "node": "node-1",
        "seq": next(_numbers),
        "conn_id": 1,
        "peer_ip": address,
        "role": "unknown",
        "event": name,
        "detail": None if detail is None else json.dumps(detail),
    }
    return row | columns


def closed(address: str, reason: str, at_s: float = BEGIN_S, *, role: str = "play", **totals: Any) -> dict[str, Any]:
    """Return the end of a connection with these totals."""
    return event(address, "conn_closed", at_s, reason=reason, role=role, detail={"connected_s": 60.0} | totals)


def hits(address: str, axis: str, count: int, at_s: float = BEGIN_S, step_s: float = 1.0) -> list[dict[str, Any]]:
    """Return `count` hits of a limit, `step_s` apart."""
    return [event(address, "limit_hit", at_s + number * step_s, axis=axis) for number in range(count)]


def write(events: Path, rows: list[dict[str, Any]], name: str = "node-1-1-1", at_s: float = BEGIN_S) -> Path:
    """Write a file of events below `events`, under a hidden name first, as a recorder does."""
    begin = dt.datetime.fromtimestamp(at_s, dt.UTC)
    folder = events / "flow_events" / f"date={begin:%Y-%m-%d}" / f"hour={begin:%H}"
    folder.mkdir(parents=True, exist_ok=True)
    hidden, path = folder / f".{name}.tmp", folder / f"{name}.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema()), hidden, compression="zstd")
    hidden.rename(path)
    return path
