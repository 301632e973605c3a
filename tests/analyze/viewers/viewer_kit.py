"""Closes for the tests of viewers: rows as dictionaries, random ones, and records that are held in memory."""

from __future__ import annotations

import dataclasses
import datetime as dt
import random
from collections.abc import Sequence
from typing import Any

from record_kit import NOON, at, numbers

from flowctl.analyze.job import typed
from flowctl.analyze.models import run_text
from flowctl.core.flow.state import MessageClass
from flowctl.reasons import CloseReason
from flowctl.records.telemetry.schema import FLOW_CLOSES, TABLES, Kind

OF_SETS = {"smaller_ms", "switches"}
TYPES = {column.name: column.kind for column in FLOW_CLOSES.columns if column.name not in OF_SETS}
PICTURES = tuple(item.name.lower() for item in MessageClass if item.name in {"KEY", "INTER", "DISPOSABLE"})
RENDITIONS = (None, "{}", "no JSON", '{"360":-7}', '{"360":1.5,"720":40.25}', '{"720":1e308}')


def close(seconds: float, conn_id: int, **columns: Any) -> dict[str, Any]:
    row = dict.fromkeys(FLOW_CLOSES.names)
    who = {
        "ts": at(seconds),
        "node": "n1",
        "seq": next(numbers),
        "conn_id": conn_id,
        "role": "play",
        "reason": "peer closed",
    }
    where = {"peer_ip": "192.0.2.1", "app": "live", "stream": "s"}
    duration_s = columns.get("duration_s", 60.0)
    return row | who | where | {"opened_at": at(seconds - duration_s), "duration_s": duration_s} | columns


def random_close(rng: random.Random, conn_id: int) -> dict[str, Any]:
    """Return a close in which each column is null, zero or something, whether that goes together or not."""
    values: dict[str, Any] = {}
    for name, kind in TYPES.items():
        if kind is Kind.INT:
            values[name] = rng.choice((None, 0, 1, rng.randrange(50), rng.randrange(10**7)))
        elif kind is Kind.REAL:
            values[name] = rng.choice((None, 0.0, 0.5, rng.random() * 10.0, rng.random() * 1e5))
    duration_s = rng.choice((0.0, 0.001, 1.5, rng.random() * 4000))
    del values["conn_id"], values["seq"]
    fixed = {
        "node": rng.choice(("n1", "n2")), "duration_s": duration_s,
        "reason": rng.choice([item.value for item in CloseReason]),
        "role": rng.choice((None, "play", "http_flv", "publish", "unknown")),
        "refusal": rng.choice((None, None, "no such stream")), "code": rng.choice((None, None, "bad chunk")),
        "peer_ip": rng.choice((None, "192.0.2.1", "2001:db8::7", "not an address")),
        "app": rng.choice((None, "", "live")), "stream": rng.choice((None, "s", "täst\x00")), "agent": None,
        "limit_name": None, "renditions": RENDITIONS[conn_id % len(RENDITIONS)], "switches": conn_id % 5 or None,
        "smaller_ms": conn_id % 7 * 1000.0 or None,
    }  # fmt: skip
    return close(rng.randrange(3600), conn_id, **(values | fixed))


@dataclasses.dataclass(slots=True)
class Held:
    """Records of any hours, held in memory (`flowctl.analyze.job.Records`)."""

    spark: Any
    rows: dict[str, list[dict[str, Any]]]

    def table(self, name: str):
        table, rows = TABLES[name], self.rows.get(name, [])
        told = [(*(row[item] for item in table.names), f"{row['ts']:%Y-%m-%d}", f"{row['ts']:%H}") for row in rows]
        return self.spark.createDataFrame(told, f"{table.spark_ddl}, date string, hour string")

    def hours(self, name: str) -> list[tuple[str, str]]:
        return sorted({(f"{row['ts']:%Y-%m-%d}", f"{row['ts']:%H}") for row in self.rows.get(name, [])})

    def has(self, name: str) -> bool:
        return bool(self.rows.get(name))


class HeldParts:
    """Parts and results of held records (`flowctl.analyze.job.Parts`), without files."""

    def __init__(
        self,
        records: Held,
        *jobs: Any,
        since: dt.datetime | None = None,
        until: dt.datetime | None = None,
        small: bool = False,
    ) -> None:
        self.spark, self.out, self.since, self.until, self.small = records.spark, "", since, until, small
        told = sorted((row["ts"], row["node"]) for table in records.rows.values() for row in table)
        told = [(at, node) for at, node in told if until is None or at < until]
        self.newest = told[-1][0] if told else None
        self.heard = {node: at for at, node in told}
        self.accounts = [{"table": name, "rows_out": len(rows)} for name, rows in records.rows.items()]
        self.results: dict[str, Any] = {}
        self._parts = {
            part.name: self.spark.createDataFrame(part.make(records, None).toArrow())
            for job in jobs
            for part in job.parts
        }

    def table(self, name: str):
        first, last = (f"{bound:%Y-%m-%d %H}" if bound else "" for bound in (self.since, self.until))
        text = "SELECT * FROM part WHERE concat(date, ' ', hour) >= :first AND concat(date, ' ', hour) < :last"
        return run_text(text, {"part": self._parts[name]}, first=first, last=last or "9")

    def arrow(self, name: str, columns: Sequence[str]):
        return self.table(name).toArrow().select(columns)

    def write(self, name: str, frame: Any, columns: Any) -> str:
        if not hasattr(frame, "toArrow"):
            frame = self.spark.createDataFrame(frame)
        self.results[name] = self.spark.createDataFrame(typed(frame, columns).toArrow())
        return name

    def day_before(self) -> None:
        return None

    def result(self, name: str):
        return self.results[name]

    def rows(self, name: str) -> list[dict[str, Any]]:
        def told(value: Any) -> Any:
            return value.timestamp() - NOON.timestamp() if isinstance(value, dt.datetime) else value

        rows = self.results[name].toArrow().to_pylist()
        return [{item: told(value) for item, value in row.items()} for row in rows]
