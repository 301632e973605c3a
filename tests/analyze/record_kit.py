"""Hand-made record files for the tests of the pipeline: rows as dictionaries, written as a recorder would."""

from __future__ import annotations

import datetime as dt
import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from flowctl.records.telemetry.schema import FLOW_CLOSES, FLOW_EVENTS, FLOW_OPENS, FLOW_SAMPLES, FORMAT, Kind, Table

NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
TYPES = {
    Kind.TIMESTAMP: pa.timestamp("us", tz="UTC"),
    Kind.INT: pa.int64(),
    Kind.REAL: pa.float64(),
    Kind.TEXT: pa.string(),
    Kind.FLAG: pa.bool_(),
}
numbers = itertools.count(1)


def schema_of(table: Table) -> pa.Schema:
    """Return the schema of a table; everything may be null, so that wrong rows can be written."""
    return pa.schema([pa.field(column.name, TYPES[column.kind]) for column in table.columns])


def at(seconds: float) -> dt.datetime:
    return NOON + dt.timedelta(seconds=seconds)


def event(seconds: float, conn_id: int, name: str, **columns) -> dict:
    return {"ts": at(seconds), "node": "n1", "seq": next(numbers), "conn_id": conn_id, "event": name, **columns}


def sample(seconds: float, conn_id: int, **columns) -> dict:
    """Return a sample of a viewer in READY, with nothing accepted, sent or dropped unless `columns` say so."""
    counts = {name: 0 for name in FLOW_SAMPLES.names if name.startswith(("accepted_", "sent_", "dropped_"))}
    who = {"ts": at(seconds), "node": "n1", "seq": next(numbers), "conn_id": conn_id, "role": "play"}
    state = {"interval_ms": 1000.0, "state": "READY", "picture_share": 1.0, "stalled_ms": 0.0}
    return who | state | counts | {"peer_ip": "192.0.2.1", "app": "live", "stream": "s"} | columns


def second(number: int, conn_id: int, *, sent: int, state: str = "READY", queued: int = 0, **more) -> dict:
    """Return a sample of one second of a stream of 2.1 Mbit/s: a key frame, 24 others, 25 sounds."""
    columns = {"accepted_messages_key": 1, "accepted_bytes_key": 50_000, "accepted_messages_inter": 24}
    columns |= {"accepted_bytes_inter": 200_000, "accepted_messages_audio": 25, "accepted_bytes_audio": 10_000}
    return sample(number, conn_id, sent_bytes=sent, state=state, queued_bytes=queued, **columns, **more)


def folder(root: Path, table: Table = FLOW_EVENTS, date: str = "2026-03-01", hour: str = "12") -> Path:
    path = root / table.name / f"date={date}" / f"hour={hour}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def write(
    root: Path, rows: list[dict], name: str = "a", *, table: Table = FLOW_EVENTS, uid: str | None = None, **more
) -> Path:
    metadata = more.pop("metadata", None)
    schema = more.pop("schema", None) or schema_of(table)
    if metadata is None:
        metadata = {
            "flowctl.table": table.name,
            "flowctl.format": str(FORMAT),
            "flowctl.uid": uid or f"uid {next(numbers)}",
        }
    path = folder(root, table, **more) / f"{name}.parquet"
    data = pa.Table.from_pylist(rows, schema=schema).replace_schema_metadata(metadata)
    pq.write_table(data, path, compression="zstd", write_page_checksum=True)
    return path


def write_samples(root: Path, rows: list[dict], name: str = "a", **more) -> Path:
    return write(root, rows, name, table=FLOW_SAMPLES, **more)


_NUMBERS = frozenset(
    column.name
    for column in FLOW_CLOSES.columns
    if column.kind is Kind.INT and column.name.startswith(("accepted_", "sent_", "dropped_", "episodes_"))
)


def close(ended_s: float, conn_id: int, duration_s: float = 10.0, **columns) -> dict:
    """Return the close of a viewer of node n1 that ended at second `ended_s` and was READY all the time."""
    return opened(ended_s, conn_id, duration_s) | {"reason": "peer closed"} | columns


def opened(seen_s: float, conn_id: int, duration_s: float = 10.0, **columns) -> dict:
    """Return a row of a viewer of node n1 that is open at second `seen_s`; see `close`."""
    who = {"ts": at(seen_s), "node": "n1", "seq": next(numbers), "conn_id": conn_id, "role": "play", "agent": "player"}
    peer = {"peer_ip": "192.0.2.1", "peer_port": 40_000, "app": "live", "stream": "s"}
    times = {"opened_at": at(seen_s - duration_s), "duration_s": duration_s, "time_ready_ms": duration_s * 1e3}
    begin = {"handshake_ms": 20.0, "asked_ms": 40.0, "startup_ms": 50.0}
    rest = {"time_overloaded_ms": 0.0, "time_soft_ms": 0.0, "time_hard_ms": 0.0, "recoveries": 0, "events_count": 0}
    return dict.fromkeys(_NUMBERS, 0) | who | peer | times | begin | rest | columns


def write_closes(root: Path, rows: list[dict], name: str = "a", **more) -> Path:
    """Write a file of closes; they must lie in the hour that `more` names (date, hour), noon unless it does."""
    return write(root, rows, name, table=FLOW_CLOSES, **more)


def write_opens(root: Path, rows: list[dict], name: str = "a", **more) -> Path:
    return write(root, rows, name, table=FLOW_OPENS, **more)


def read_hours(spark, listing, hours, *, now_us: int):
    from flowctl.analyze.records.read import Read, check_any, judged, look

    read = Read(lambda: spark, listing, now_us)
    looked = judged(look(read, listing.of(hours)))
    check_any(listing, looked)
    read.enter(looked)
    return read


def identities(read) -> dict[str, str]:
    return {file.path: facts.identity for goods in read._good.values() for file, facts in goods}
