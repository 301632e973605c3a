"""The job capacity on Spark: what a fleet was loaded with and what a crowd takes, by hand, from planted records."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from pyarrow.dataset import dataset
from pyspark.sql import functions as f
from record_kit import sample, write_samples

from flowctl.analyze.capacity.job import JOB, NODE_COLUMNS, loads
from flowctl.analyze.capacity.node import MEASURE
from flowctl.analyze.job import arrow_schema
from flowctl.analyze.options import CapacityOptions
from flowctl.analyze.run import run
from flowctl.records.telemetry.schema import CLASS_NAMES

pytestmark = pytest.mark.timeout(600)


def watched(window, node, conn_id, stream, peer_ip, **columns):
    whole = {"interval_ms": 10_000.0, "accepted_bytes_inter": 2_500_000, "node": node, "stream": stream}
    return sample(window * 10 + 10, conn_id, peer_ip=peer_ip, **whole | columns)


def planted():
    """Two windows: 6 viewers at n1 and 3.1 at n2, then 2 and 1."""
    west = [f"10.1.0.{number}" for number in range(1, 7)]
    rows = [watched(0, "n1", number, "big", address) for number, address in enumerate(west)]
    rows += [watched(1, "n1", number, "big", west[number]) for number in (2, 3)]
    slow = {"state": "SOFT_LIMIT", "rtt_us": 80_000}
    rows += [watched(0, "n2", 0, "big", "192.0.2.1", **slow), watched(0, "n2", 1, "big", "192.0.3.1")]
    rows += [watched(0, "n2", 2, "big", "2001:db8:5::1"), watched(1, "n2", 1, "big", "192.0.3.1")]
    # There for a second: a tenth of a viewer. Its address was recorded as a hash.
    rows += [watched(0, "n2", 3, "small", "h3f2a", interval_ms=1_000.0, accepted_bytes_inter=250_000)]
    return rows


def answered(either, tmp_path, options):
    result = run(either, str(tmp_path / "events"), str(tmp_path / "out"), [JOB], {"capacity": options})
    assert result.failed == [], result.jobs["capacity"].message
    tables = {}
    for name in JOB.results:
        frame = either.read.parquet(str(tmp_path / "out" / name))
        tables[name] = (dataset(tmp_path / "out" / name).schema, [row.asDict() for row in frame.collect()])
    return result.jobs["capacity"].summary, tables


def test_run_when_records_are_of_a_fleet_answers_as_computed_by_hand(either, tmp_path):
    write_samples(tmp_path / "events", planted())
    # No node of more than four times the largest measured crowd is answered for: each carries 200.
    crowd = {"viewers": 50, "bit_rate": 2e6, "cpu_us_per_s": 12_000}
    options = CapacityOptions(viewers=910, measurements=json.dumps({"rows": [crowd]}))
    found, tables = answered(either, tmp_path, options)
    assert next(iter(found)) == "answer"
    assert (found["viewers_per_node"], found["ended_by"], found["nodes"]) == (200, "measured", 6)
    assert (found["nodes_recorded"], found["carry_viewers"], found["carry_viewers_one_down"]) == (2, 400, 200)
    assert (found["viewers_peak"], found["watched_s"]) == (9.1, 121.0)
    assert found["answer"].startswith("Node by node: n1 at least 200, n2 at least 200. One like all of them together ")
    assert found["headline"] == (
        "Nodes carry n1 at least 200, n2 at least 200 (viewers of 2.00 Mbit/s). 910 viewers take 6 nodes"
    )
    assert "910 viewers need at most 6 nodes, any one of which may die, with 20 % of each free" in found["answer"]
    assert found["answer"].endswith(
        "RECORDED: nodes that together carry 400 viewers, and 200 with the largest dead; at most 9.1 viewers at once, "
        "2 min 1 s of watching. ASSUMED: 99 % of the crowd, to be like them."
    )

    kinds, rows = tables["capacity_nodes"]
    assert kinds.equals(arrow_schema(NODE_COLUMNS))
    one, two = sorted(rows, key=lambda row: row["node"])
    assert (one["viewers_peak"], one["viewers_mean"], one["recorded_s"]) == (6.0, 4.0, 20.0)
    assert (one["carries_viewers"], one["carries_from"], one["carries_at_least"]) == (200, "measurements", True)
    assert (one["load_peak"], one["bit_rate"]) == (0.03, 2e6)
    assert (two["viewers_peak"], two["viewers_mean"]) == (3.1, pytest.approx(2.05))
    assert two["trouble_share"] == pytest.approx(10 / 41)


def test_run_when_records_are_of_few_viewers_is_not_known(either, tmp_path):
    columns = {"accepted_bytes_inter": 260_000, "thread_busy": 0.08}
    write_samples(tmp_path / "events", [sample(at, number, **columns) for at in range(20) for number in range(6)])
    options = CapacityOptions(viewers=10_000, memory_bytes=4 << 30)
    found, tables = answered(either, tmp_path, options)
    assert (found["fitted_to"], found["largest_recorded_viewers"]) == ("", 6)
    assert found["bit_rate"] == pytest.approx(260_000 * 8)  # of the crowd the records do tell
    assert found["viewers_per_node"] is None
    assert found["answer"].startswith("Not known for your machine: measure it (")
    assert found["headline"] == MEASURE
    (node,) = tables["capacity_nodes"][1]
    assert (node["carries_viewers"], node["load_peak"], node["viewers_peak"]) == (None, None, 6.0)


@pytest.mark.parametrize("viewers", [1, 3])
def test_run_when_records_are_of_fewer_than_are_fitted_to_tells_how_many(either, tmp_path, viewers):
    rows = [sample(at, number, thread_busy=0.08) for at in range(1, 12) for number in range(viewers)]
    write_samples(tmp_path / "events", rows)
    found, _ = answered(either, tmp_path, CapacityOptions())
    assert found["records_weak"].startswith(f"the largest recorded crowd is {viewers} viewer")
    assert found["largest_recorded_viewers"] == viewers


def test_run_when_samples_are_longer_than_windows_counts_each_viewer_once(either, tmp_path):
    """A calm server takes samples of 6 to 12 s: 50 viewers are 50 in each window, over the end of an hour too."""
    rounds = {-48: 12, -36: 12, -30: 6, -18: 12, -7: 11, 5: 12, 14: 9, 20: 6, 32: 12, 38: 6, 50: 12, 60: 10}
    for hour, ends in (("11", [at for at in rounds if at < 0]), ("12", [at for at in rounds if at > 0])):
        columns = {"accepted_bytes_inter": 250_000, "thread_busy": 0.08}
        rows = [
            sample(end, number, interval_ms=rounds[end] * 1e3, **columns) for end in ends for number in range(1, 51)
        ]
        write_samples(tmp_path / "events", rows, hour=hour)
    found, tables = answered(either, tmp_path, CapacityOptions())
    assert (found["viewers_peak"], found["largest_recorded_viewers"], found["watched_s"]) == (50.0, 50, 6000.0)
    (node,) = tables["capacity_nodes"][1]
    assert (node["viewers_peak"], node["viewers_mean"], node["recorded_s"]) == (50.0, 50.0, 120.0)
    assert node["bit_rate"] == pytest.approx(12 * 250_000 * 8 / 120)


def test_loads_when_counts_are_beyond_64_bits_end_there(spark):
    most, last = (1 << 48) - 1, (1 << 63) - 1
    accepted = {f"accepted_bytes_{name}": f.lit(most) for name in CLASS_NAMES}
    told = {"role": "play", "state": "READY", "node": "n1", "date": "2026-03-01", "hour": "12"}
    samples = spark.range(40_000).select(
        *(f.lit(value).alias(name) for name, value in told.items()),
        *(value.alias(name) for name, value in accepted.items()),
        f.lit(10_000.0).alias("interval_ms"),
        f.lit(0.5).alias("thread_busy"),
        f.timestamp_seconds(f.lit(1_772_366_410)).alias("ts"),
    )
    rows = loads(SimpleNamespace(table=lambda _: samples)).collect()
    assert {(row.node, row.accepted, row.ms) for row in rows} == {(node, last, 400_000_000) for node in (None, "n1")}
