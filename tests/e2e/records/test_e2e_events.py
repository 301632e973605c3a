"""A real server with --events: what real clients did is in the files, and what the files say adds up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pyarrow as pa
from pyarrow import parquet

from flowctl.telemetry.schema import CLASS_NAMES


def read(folder, table):
    paths = sorted(folder.glob(f"{table}/date=*/hour=*/[!._]*.parquet"))
    tables = [parquet.read_table(path, partitioning=None) for path in paths]
    return pa.concat_tables(tables).to_pylist() if tables else []


def test_events_when_viewers_come_and_go_add_up_to_their_totals(tmp_path):
    """Viewers of a load run, healthy, slow and hostile, are recorded from open to close; samples sum up to totals."""
    folder = tmp_path / "events"
    flowctl = [sys.executable, "-m", "flowctl", "--log-level", "error"]
    serve = [*flowctl, "serve", "live", "--port", "0", "--json", "--events", str(folder), "--set", "events_rotate=1s"]
    with subprocess.Popen([*serve, "--set", "events_streams=plain"], stdout=subprocess.PIPE, text=True) as server:
        try:
            url = json.loads(server.stdout.readline())["url"]
            load = [*flowctl, "load", f"{url}live/room?token=s3cret", "--publishers", "1", "--viewers", "12"]
            load += ["--profile", "slow@600k:20%", "--duration", "5s", "--json"]
            ran = subprocess.run(load, capture_output=True, text=True, timeout=90, check=False)
            assert ran.returncode == 0, ran.stderr
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
    events, samples = read(folder, "flow_events"), read(folder, "flow_samples")
    assert (events[0]["event"], {item["event"] for item in events} >= {"play_started", "publish_started"}) == (
        "server_started",
        True,
    )
    opened = {item["conn_id"] for item in events if item["event"] == "conn_opened"}
    closed = {item["conn_id"]: item for item in events if item["event"] == "conn_closed"}
    assert opened == set(closed)
    assert len({item["seq"] for item in samples}) == len(samples)
    for conn_id, item in closed.items():
        mine = [row for row in samples if row["conn_id"] == conn_id]
        assert sum(row["sent_bytes"] for row in mine) == item["sent_bytes"]
        detail = json.loads(item["detail"])
        for what in ("accepted", "sent"):
            sums = {name: sum(row[f"{what}_messages_{name}"] for row in mine) for name in CLASS_NAMES}
            assert {name: count for name, count in sums.items() if count} == detail[what]
    assert {item["stream"] for item in events if item["event"] == "play_started"} == {"room"}
    assert not any(b"s3cret" in path.read_bytes() for path in folder.rglob("*.parquet"))
    assert "s3cret" not in json.dumps([events, samples], default=str)
    assert not [path for path in folder.rglob("*") if path.is_file() and path.name.startswith(".")]
