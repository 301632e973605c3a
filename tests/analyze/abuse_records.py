"""Records of format 3 by hand for tests of abuse and watch: rows with few words, by table, and files of them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from record_kit import numbers, schema_of

from flowctl.records.telemetry.schema import FORMAT, METADATA_PREFIX, OPENS_EVERY_S, OPENS_FIRST_S, TABLES

BEGIN_S = 1_790_000_000
"""A second of 2026; tests that need bans to last use the present instead."""
Row = tuple[str, dict[str, Any]]
"""Table and columns; those that are left out are null."""


def at(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)


def row(table: str, address: str | None, at_s: float, **columns: Any) -> Row:
    who = {"ts": at(at_s), "node": "node-1", "seq": next(numbers), "conn_id": 1, "peer_ip": address}
    return table, who | columns


def event(address: str | None, name: str, at_s: float = BEGIN_S, **columns: Any) -> Row:
    return row("flow_events", address, at_s, **{"event": name, "role": "unknown"} | columns)


def hits(address: str, axis: str, count: int, at_s: float = BEGIN_S, step_s: float = 1.0, **columns: Any) -> list[Row]:
    return [event(address, "limit_hit", at_s + number * step_s, axis=axis, **columns) for number in range(count)]


def closed(address: str, reason: str, at_s: float = BEGIN_S, **columns: Any) -> Row:
    """Return the end of a connection that lasted for a minute and was served at once, if nothing else is said."""
    ended = {"role": "play", "duration_s": 60.0, "reason": reason} | columns
    ended = {"startup_ms": None if ended["role"] == "unknown" else 0.0} | ended
    return row("flow_closes", address, at_s, **ended, opened_at=at(at_s - ended["duration_s"]))


def there(address: str, since_s: float, until_s: float, **columns: Any) -> list[Row]:
    now_s, rows = since_s + OPENS_FIRST_S, []
    while now_s <= until_s:
        told = {"role": "play", "opened_at": at(since_s - 1), "duration_s": now_s - since_s + 1, "startup_ms": 1e3}
        rows.append(row("flow_opens", address, now_s, **told | columns))
        now_s += OPENS_EVERY_S
    return rows


def write(root: Path, rows: Iterable[Row], name: str = "node-1-1-1", **metadata: str) -> list[Path]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for table, columns in rows:
        groups.setdefault((table, f"date={columns['ts']:%Y-%m-%d}/hour={columns['ts']:%H}"), []).append(columns)
    paths = []
    for (table, hour), found in groups.items():
        folder = root / table / hour
        folder.mkdir(parents=True, exist_ok=True)
        words = {"table": table, "format": str(FORMAT), "uid": f"{name} {table} {hour}"} | metadata
        data = pa.Table.from_pylist(found, schema_of(TABLES[table]))
        data = data.replace_schema_metadata({f"{METADATA_PREFIX}{key}": value for key, value in words.items()})
        pq.write_table(data, folder / f".{name}.tmp", compression="zstd")
        (folder / f".{name}.tmp").rename(folder / f"{name}.parquet")
        paths.append(folder / f"{name}.parquet")
    return paths
