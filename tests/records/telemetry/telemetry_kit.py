"""What the tests of records share: a recorder without its thread, and the reading of what it wrote."""

from __future__ import annotations

import pyarrow as pa
from pyarrow import parquet

from flowctl.records.telemetry.options import EventsOptions
from flowctl.records.telemetry.recorder import Recorder
from flowctl.records.telemetry.schema import FLOW_EVENTS

WALL_NS = 1_795_279_807_000_000_000
NAMES = tuple(name for name in FLOW_EVENTS.names if name not in {"node", "seq"})


def options(folder, **values) -> EventsOptions:
    return EventsOptions(**{"folder": str(folder), "node": "n1", "key": b"k" * 16, **values})


def recorder(folder, clock=lambda: 0.0, **values) -> Recorder:
    """Return a recorder that writes when a test says so; it is not started."""
    made = Recorder(options(folder, **values), clock, lambda: WALL_NS)
    made._files.prepare()
    return made


def queued(made: Recorder, table=FLOW_EVENTS) -> list[dict]:
    rows, _ = made.lane(table).drain()
    names = [name for name in table.names if name not in {"node", "seq"}]
    return [dict(zip(names, row, strict=True)) for row in rows]


def files(folder, table="*") -> list:
    return sorted(folder.glob(f"{table}/date=*/hour=*/[!._]*.parquet"))


def everything(folder) -> list:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read(folder, table="flow_events") -> list[dict]:
    tables = [parquet.read_table(path, partitioning=None) for path in files(folder, table)]
    return sorted(pa.concat_tables(tables).to_pylist(), key=lambda row: row["seq"]) if tables else []
