"""A real server with --events: what real clients did is in the files, and what the files say adds up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

from flowctl.records.telemetry.schema import CLASS_NAMES, RECORDED


def read(folder, table):
    paths = folder.glob(f"{table}/date=*/hour=*/[!._]*.parquet")
    tables = [parquet.read_table(path, partitioning=None) for path in paths]
    return pa.concat_tables(tables).sort_by("seq").to_pylist() if tables else []


def test_events_when_viewers_come_and_go_add_up_to_their_totals(tmp_path):
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
    events, samples, closes = (read(folder, f"flow_{table}") for table in ("events", "samples", "closes"))
    assert events[0]["event"] == "server_started"
    assert {item["event"] for item in events} <= RECORDED
    assert events[-1]["value"] == len(closes) == len({item["conn_id"] for item in closes})  # of server_stopped
    assert {item["conn_id"] for item in events} <= {0, *(item["conn_id"] for item in closes)}
    assert len({item["seq"] for item in samples}) == len(samples)
    for item in closes:
        mine = [row for row in samples if row["conn_id"] == item["conn_id"]]
        names = [f"{what}_messages_{name}" for what in ("accepted", "sent", "dropped") for name in CLASS_NAMES]
        for name in (*names, "sent_bytes"):
            assert sum(row[name] for row in mine) == item[name]
        assert item["samples_count"] == len(mine)
        for name in CLASS_NAMES:  # nothing is queued any more
            count = {what: item[f"{what}_messages_{name}"] for what in ("accepted", "sent", "dropped")}
            assert count["accepted"] == count["sent"] + count["dropped"]
    assert {(item["role"], item["stream"]) for item in closes if item["startup_ms"]} == {
        ("play", "room"),
        ("publish", "room"),
    }
    (publisher,) = (item for item in closes if item["role"] == "publish")
    assert publisher["ingest_pictures"] > publisher["ingest_key_frames"] > 1
    assert publisher["key_interval_ms"] <= publisher["key_interval_max_ms"]
    viewers = [item for item in closes if item["role"] == "play"]
    slow = max(viewers, key=lambda item: item["delay_max_ms"])  # of a line of 600 kbit/s
    assert slow["trouble_ms"] > 0
    assert min(item["delay_max_ms"] for item in viewers) < slow["delay_max_ms"]
    assert not any(b"s3cret" in path.read_bytes() for path in folder.rglob("*.parquet"))
    assert "s3cret" not in json.dumps([events, samples, closes], default=str)
    assert not [path for path in folder.rglob("*") if path.is_file() and path.name.startswith(".")]


@pytest.mark.timeout(180)  # twenty seconds of it are the run, and two programs start
def test_delay_of_slow_viewers_is_what_they_measure_themselves(tmp_path):
    """Delays in the records are those of the frames that came, by the load tester's own clock: median, 95 % and worst.

    Records are of time and look once a second, viewers are of frames and count when the last byte has come: so not
    the same, some 10 % less where the machine is quiet. No sample is more than the age of its connection.
    """
    folder = tmp_path / "events"
    flowctl = [sys.executable, "-m", "flowctl", "--log-level", "error"]
    serve = [*flowctl, "serve", "live", "--port", "0", "--json", "--events", str(folder)]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = json.loads(server.stdout.readline())["url"]
            load = [*flowctl, "load", f"{url}live/room", "--publishers", "1", "--viewers", "4", "--bit-rate", "1M"]
            load += ["--profile", "slow@600k:3", "--duration", "20s", "--json"]
            ran = subprocess.run(load, capture_output=True, text=True, timeout=120, check=False)
            assert ran.returncode == 0, ran.stderr
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
    measured = json.loads(ran.stdout)["profiles"]["slow@600k"]
    closes = [item for item in read(folder, "flow_closes") if item["role"] == "play"]
    slow = {item["conn_id"] for item in sorted(closes, key=lambda item: item["delay_mean_ms"])[1:]}
    samples = [item for item in read(folder, "flow_samples") if item["role"] == "play"]
    told = sorted(item["viewer_delay_ms"] for item in samples if item["conn_id"] in slow)
    told = [delay_ms for delay_ms in told if delay_ms > 0]  # else it had not begun
    assert len(slow) == 3
    assert abs(told[len(told) // 2] - measured["p50_ms"]) <= 0.35 * measured["p50_ms"]
    assert abs(told[int(len(told) * 0.95)] - measured["p95_ms"]) <= 0.35 * measured["p95_ms"]
    assert told[-1] <= 1.2 * measured["max_ms"]
    opened_at = {item["conn_id"]: item["opened_at"] for item in closes}
    for item in samples:
        open_ms = (item["ts"] - opened_at[item["conn_id"]]).total_seconds() * 1000
        assert item["viewer_delay_ms"] <= open_ms + 1
