"""What a fleet was loaded with and what nodes a crowd takes, from planted records of two nodes, computed by hand."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from record_kit import NOON, sample, write_samples

from flowctl.pipeline.jobs.loads import NODE_COLUMNS, PLACE_COLUMNS, STREAM_COLUMNS


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


@pytest.fixture
def fleet(analyze, spark, tmp_path):
    """Give the result of the command over the planted records, and its tables."""
    write_samples(tmp_path / "events", planted())
    # No node of more than four times the largest measured crowd is answered for: each carries 200.
    crowd = {"viewers": 50, "bit_rate": 2e6, "cpu_us_per_s": 12_000}
    (tmp_path / "measured.json").write_text(json.dumps({"points": [crowd]}))
    (tmp_path / "regions").write_text("10.1.0.0/16 west\n10.1.0.1 office\n")
    options = ("--viewers", 910, "--measurements", tmp_path / "measured.json", "--regions", tmp_path / "regions")
    status, shown, _ = analyze("capacity", tmp_path / "events", "--out", tmp_path / "out", *options, "--json")
    assert status == 0
    tables = {}
    for name, columns in (("nodes", NODE_COLUMNS), ("streams", STREAM_COLUMNS), ("places", PLACE_COLUMNS)):
        frame = spark.read.parquet(str(tmp_path / f"out/capacity_{name}"))
        assert frame.dtypes == list(columns.items())
        tables[name] = [row.asDict() for row in frame.collect()]
    return json.loads(shown)["summary"], tables


def test_capacity_when_records_are_of_a_fleet_answers_as_computed_by_hand(fleet):
    """Nodes, streams and places have their planted loads, and 910 viewers take 6 edges and 2 origins."""
    summary, tables = fleet
    assert next(iter(summary)) == "answer"
    found = summary["fleet"]
    assert found["plan"] == {
        "viewers": 910, "carries_viewers": 200, "origins": 2, "edges": 6, "streams": 2, "streams_followed": 1,
        "edge_viewers": 900, "origin_viewers": 16, "edge_load": 0.755, "edge_load_one_down": 0.905,
        "origin_load": 0.04, "origin_load_one_down": 0.08,
    }  # fmt: skip
    assert found["seen"] == {
        "viewers_recorded": 10, "viewers_peak": 9.1, "recorded_s": 20.0, "assumed_share": 0.99,
        "streams_worth_following": 1, "carries_from": "measurements",
    }  # fmt: skip
    assert (found["present"]["carry_viewers_one_down"], found["present"]["short_viewers"]) == (200, 710)
    assert found["answer"].startswith("910 viewers need 6 edges and 2 origins")
    assert "Where: 3 at west, 1 at 192.0.0.0/16; the rest anywhere." in found["answer"]

    one, two = sorted(tables["nodes"], key=lambda row: row["node"])
    assert (one["viewers_peak"], one["viewers_mean"], one["viewers_recorded"], one["streams"]) == (6.0, 4.0, 6, 1)
    assert (one["carries_viewers"], one["carries_from"], one["carries_at_least"]) == (200, "measurements", True)
    assert (one["load_peak"], one["bit_rate"], one["peak_bit_rate"]) == (0.03, 2e6, 12e6)
    assert one["peak_at"] == datetime.fromtimestamp(NOON.timestamp())  # noqa: DTZ006 - Spark collects in local time
    assert (two["viewers_peak"], two["viewers_mean"], two["streams"]) == (3.1, pytest.approx(2.05), 2)
    assert two["trouble_share"] == pytest.approx(10 / 41)

    streams = {(row["stream"], row["node"]): row for row in tables["streams"]}
    big, even, small = (streams[key] for key in (("big", "n1"), ("big", "n2"), ("small", "n2")))
    assert (big["viewers_mean"], big["watched_s"], big["worth_following"], big["saved_bit_rate"]) == (4, 20, True, 6e6)
    # Two viewers are what a follower costs: no more than that is not worth it.
    assert (even["viewers_mean"], even["follower_viewers"], even["worth_following"]) == (2.0, 2.0, False)
    assert (small["viewers_peak"], small["worth_following"], small["saved_bit_rate"]) == (0.1, False, 0.0)

    places = {row["place"]: row for row in tables["places"]}
    assert sorted(places) == ["192.0.0.0/16", "2001:db8::/32", "office", "unknown", "west"]
    west, wide, unknown = places["west"], places["192.0.0.0/16"], places["unknown"]
    assert (west["place_from"], west["node"], west["addresses"], west["viewers_peak"]) == ("region", "n1", 5, 5.0)
    assert west["viewers_wanted"] == pytest.approx(500)
    assert west["edges_filled"] == pytest.approx(500 * 900 / 910 / (199 * 0.8))
    assert (west["own_edges"], wide["own_edges"], places["office"]["own_edges"]) == (3, 1, 0)
    assert (wide["place_from"], wide["addresses"], wide["nodes"], wide["rtt_ms"]) == ("network", 2, 1, 80.0)
    assert (wide["trouble_share"], west["rtt_ms"]) == (pytest.approx(1 / 3), None)
    assert (unknown["place_from"], unknown["viewers_peak"]) == ("unknown", 0.1)
    assert sum(row["viewers_share"] for row in tables["places"]) == pytest.approx(1)
