"""The job capacity on Spark: what a fleet was loaded with and what a crowd takes, by hand, from planted records."""

from __future__ import annotations

import json

import pytest
from record_kit import sample, write_samples

from flowctl.pipeline.capacity.fleet import NODE_COLUMNS, STREAM_COLUMNS
from flowctl.pipeline.capacity.job import JOB, CapacityOptions
from flowctl.pipeline.run import run

pytestmark = pytest.mark.timeout(600)


def watched(window, node, conn_id, stream, peer_ip, **columns):
    """Return ten seconds of a viewer of 2 Mbit/s."""
    whole = {"interval_ms": 10_000.0, "accepted_bytes_inter": 2_500_000, "node": node, "stream": stream}
    return sample(window * 10 + 5, conn_id, peer_ip=peer_ip, **whole | columns)


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


def answered(spark, tmp_path, options):
    """Return the summary of a run, and its tables by name."""
    result = run(spark, str(tmp_path / "events"), str(tmp_path / "out"), [JOB], {"capacity": options})
    assert result.failed == [], result.jobs["capacity"].message
    tables = {}
    for name in JOB.results:
        frame = spark.read.parquet(str(tmp_path / "out" / name))
        tables[name] = (frame.dtypes, [row.asDict() for row in frame.collect()])
    return result.jobs["capacity"].summary, tables


def test_run_when_records_are_of_a_fleet_answers_as_computed_by_hand(spark, tmp_path):
    """Nodes and streams have their planted loads, and 910 viewers take 6 edges and 2 origins."""
    write_samples(tmp_path / "events", planted())
    # No node of more than four times the largest measured crowd is answered for: each carries 200.
    crowd = {"viewers": 50, "bit_rate": 2e6, "cpu_us_per_s": 12_000}
    options = CapacityOptions(viewers=910, measurements=json.dumps({"rows": [crowd]}))
    summary, tables = answered(spark, tmp_path, options)
    found = summary["fleet"]
    assert next(iter(summary)) == "answer"
    assert found["plan"] == {
        "viewers": 910, "carries_viewers": 200, "origins": 2, "edges": 6, "streams": 2, "streams_followed": 1,
        "edge_viewers": 903, "origin_viewers": 13, "edge_load": 0.7575, "edge_load_one_down": 0.908,
        "origin_load": 0.0325, "origin_load_one_down": 0.065,
    }  # fmt: skip
    assert found["seen"] == {
        "viewers_peak": 9.1, "watched_hours": 0.034, "recorded_s": 20.0, "assumed_share": 0.99,
        "streams_worth_following": 1, "carries_from": "measurements",
    }  # fmt: skip
    assert (found["present"]["carry_viewers_one_down"], found["present"]["short_viewers"]) == (200, 710)
    assert found["answer"].startswith("910 viewers need 6 edges and 2 origins")

    kinds, rows = tables["capacity_nodes"]
    assert kinds == list(NODE_COLUMNS.items())
    one, two = sorted(rows, key=lambda row: row["node"])
    assert (one["viewers_peak"], one["viewers_mean"], one["recorded_s"]) == (6.0, 4.0, 20.0)
    assert (one["carries_viewers"], one["carries_from"], one["carries_at_least"]) == (200, "measurements", True)
    assert (one["load_peak"], one["bit_rate"]) == (0.03, 2e6)
    assert (two["viewers_peak"], two["viewers_mean"]) == (3.1, pytest.approx(2.05))
    assert two["trouble_share"] == pytest.approx(10 / 41)

    kinds, rows = tables["capacity_streams"]
    assert kinds == list(STREAM_COLUMNS.items())
    streams = {(row["stream"], row["node"]): row for row in rows}
    big, even, small = (streams[key] for key in (("big", "n1"), ("big", "n2"), ("small", "n2")))
    assert (big["viewers_mean"], big["watched_s"], big["worth_following"], big["saved_bit_rate"]) == (4, 20, True, 6e6)
    # Two viewers are what a follower costs: no more than that is not worth it.
    assert (even["viewers_mean"], even["worth_following"]) == (2.0, False)
    assert (small["viewers_peak"], small["worth_following"], small["saved_bit_rate"]) == (0.1, False, 0.0)


def test_run_when_records_are_of_few_viewers_is_of_the_reference_machine(spark, tmp_path):
    """Six viewers on an idle thread are no ground for an answer, which is then told to be of another machine."""
    columns = {"accepted_bytes_inter": 260_000, "thread_busy": 0.08}
    write_samples(tmp_path / "events", [sample(at, number, **columns) for at in range(20) for number in range(6)])
    options = CapacityOptions(viewers=10_000, memory_bytes=4 << 30)
    found, _ = answered(spark, tmp_path, options)
    assert (found["fitted_to"], found["largest_recorded_viewers"]) == ("reference", 6)
    assert found["bit_rate"] == pytest.approx(260_000 * 8)  # of the crowd the records do tell
    assert 2_000 < found["viewers_per_node"] < 4_500
    assert found["answer"].startswith("REFERENCE MACHINE, NOT YOURS")
