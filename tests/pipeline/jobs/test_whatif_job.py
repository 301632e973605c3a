"""The job whatif on Spark: samples of slow viewers become choices, a recommendation, and a limits file."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow")

import itertools
import json

import pyarrow as pa
from record_kit import event, sample, write, write_samples

from flowctl.errors import ConfigError
from flowctl.flight.words import limits_as_dict
from flowctl.flow.limits import target_marks
from flowctl.flow.limitsfile import parse_limits_file
from flowctl.pipeline.whatif.grid import DEFAULT_IN_FORCE, default_grid
from flowctl.pipeline.whatif.viewers import ALL_CHOICES, sample_viewer

pytestmark = pytest.mark.timeout(600)  # a job starts some forty tasks, which take long beside other tests

GRID = 'soft = ["64KiB,0", "2MiB,2048,4s"]\nhard = ["2x"]\ntarget_delay = ["auto", "off"]\n'


def second(number, conn_id, *, sent, state="READY", queued=0):
    """Return a sample of one second of a stream of 2.1 Mbit/s: a key frame, 24 others, 25 sounds."""
    columns = {"accepted_messages_key": 1, "accepted_bytes_key": 50_000, "accepted_messages_inter": 24}
    columns |= {"accepted_bytes_inter": 200_000, "accepted_messages_audio": 25, "accepted_bytes_audio": 10_000}
    return sample(number, conn_id, sent_bytes=sent, state=state, queued_bytes=queued, **columns)


def crowd(seconds=20):
    """Return samples of two healthy viewers, one with half the rate, and one that stands still."""
    rows = []
    for number in range(seconds):
        rows += [second(number, conn_id, sent=260_000) for conn_id in (1, 2)]
        rows.append(second(number, 3, sent=130_000, state="OVERLOADED", queued=130_000 * (number + 1)))
        rows.append(second(number, 4, sent=0, state="SOFT_LIMIT", queued=260_000 * (number + 1)))
    return rows


def test_sample_viewer_when_made_up_has_all_messages_and_bytes():
    """Spreading a second over its length loses and adds no message and no byte, of the stream and of the link."""
    rows = [row for row in crowd(5) if row["conn_id"] == 3]
    viewer = sample_viewer(rows, 0.0)
    assert sum(what >= 0 for _, what, _ in viewer.events) == 5 * 50
    assert sum(size for _, what, size in viewer.events if what >= 0) == 5 * 260_000
    assert sum(size for _, what, size in viewer.events if what < 0) == 5 * 130_000


def test_run_when_viewers_are_slow_writes_choices_and_a_limits_file(spark, tmp_path):
    """Of a crowd with slow viewers every choice has a row, one is recommended, and the server can read the file."""
    from flowctl.pipeline.jobs.whatif import WhatifOptions, run

    write_samples(tmp_path / "events", crowd())
    out = str(tmp_path / "out")
    result = run(spark, str(tmp_path / "events"), out, WhatifOptions(grid=GRID, objective="disconnects, delay_p95"))
    result.check()
    rows = {row["choice_id"]: row for row in spark.read.parquet(f"{out}/whatif_choices").collect()}
    assert set(range(len(rows))) == set(rows)
    assert {4} == {row["viewers"] for row in rows.values()}
    assert [row["recommended"] for row in rows.values() if row["recommended"]] == [True]
    assert any(row["on_front"] for row in rows.values())
    chosen = next(row for row in rows.values() if row["recommended"])
    assert chosen["disconnected"] == min(row["disconnected"] for row in rows.values())
    text = (tmp_path / "out/limits.toml").read_text("utf-8")
    assert chosen["target_delay"] == target_marks(parse_limits_file(text, "limits.toml").limits)
    assert "Against the limits in force" in text
    viewers = spark.read.parquet(f"{out}/whatif_viewers").collect()
    assert {1, 2} == {row["conn_id"] for row in viewers if row["choice_id"] == ALL_CHOICES}
    assert 2 * len(rows) + 2 == len(viewers)
    assert {False} == {row["honest"] for row in viewers if row["conn_id"] == 4}


def test_run_when_viewers_attack_or_are_there_for_a_moment_leaves_them_out(spark, tmp_path):
    """What limits do to an attacker is no reason for other limits; a second's visit is no viewer."""
    from flowctl.pipeline.jobs.whatif import WhatifOptions, run

    rows = [row | {"peer_ip": f"198.51.100.{row['conn_id']}"} for row in crowd(6)]
    rows += [
        second(number, 5, sent=0, state="SOFT_LIMIT", queued=9) | {"peer_ip": "198.51.100.9"} for number in range(6)
    ]
    rows += [second(0, 6, sent=1_000, state="OVERLOADED", queued=1_000), second(0, 7, sent=260_000)]
    write_samples(tmp_path / "events", rows)
    # Connection 4 breaks a limit itself; 5 only reads nothing, at an address whose other connection is a proof.
    hits = [(3, 4, "198.51.100.4"), (4, 8, "198.51.100.9")]
    events = [event(at, number, "limit_hit", axis="amf_depth", peer_ip=who, role="play") for at, number, who in hits]
    events.append(event(0, 5, "play_started", peer_ip="198.51.100.9", role="play"))
    write(tmp_path / "events", events)
    result = run(spark, str(tmp_path / "events"), str(tmp_path / "out"), WhatifOptions(grid=GRID))
    summary = result.summary
    assert (summary["viewers"], summary["connections_of_attackers"], summary["connections_not_viewers"]) == (3, 2, 2)


def test_run_when_a_policy_is_in_force_recommends_for_that_one(spark, tmp_path):
    """A limits file cannot say another policy, so what is recommended is a choice with the one that the server has."""
    from flowctl.pipeline.jobs.whatif import WhatifOptions, run

    audiences = "talk/*=800ms audio-first"
    detail = {"marks": limits_as_dict(DEFAULT_IN_FORCE.limits), "policy": "pictures-first", "audiences": audiences}
    write_samples(tmp_path / "events", crowd(6))
    write(tmp_path / "events", [event(0, 0, "server_started", detail=json.dumps(detail))])
    grid = GRID + 'policy = ["all-or-cut", "pictures-first"]\n'
    result = run(spark, str(tmp_path / "events"), str(tmp_path / "out"), WhatifOptions(grid=grid))
    rows = spark.read.parquet(str(tmp_path / "out" / "whatif_choices")).collect()
    assert {row["policy"] for row in rows} == {"all-or-cut", "pictures-first"}
    # Nor is a choice one of audiences with a target delay of their own, and it is said wherever one is named.
    assert result.summary["audiences"] == audiences
    assert any(audiences in warning for warning in result.accounts[0].warnings)
    assert audiences in (tmp_path / "out" / "limits.toml").read_text("utf-8")
    assert {row["policy"] for row in rows if row["in_force"] or row["recommended"]} == {"pictures-first"}


def test_run_when_there_are_no_viewers_says_how_to_record_some(spark, tmp_path):
    """A folder with neither flights nor samples is an error with a hint."""
    from flowctl.pipeline.jobs.whatif import run

    (tmp_path / "events").mkdir()
    with pytest.raises(ConfigError, match="no flight and no flow_samples"):
        run(spark, str(tmp_path / "events"), str(tmp_path / "out"))


def test_run_when_there_are_more_viewers_than_most_takes_the_same_random_ones(spark, tmp_path):
    """Of four viewers two are evaluated, the same two each time, and the share of it stands in every answer.

    The job is a function of its input: choices and limits file are the same the second time.
    """
    from flowctl.pipeline.jobs.whatif import WhatifOptions, run

    write_samples(tmp_path / "events", crowd(4))
    picked, made = [], []
    for name in ("a", "b"):
        result = run(spark, str(tmp_path / "events"), str(tmp_path / name), WhatifOptions(grid=GRID, most=2))
        rows = spark.read.parquet(str(tmp_path / name / "whatif_choices")).orderBy("choice_id").collect()
        assert {(row["viewers"], row["sampled_share"]) for row in rows} == {(2, 0.5)}
        made.append((rows, (tmp_path / name / "limits.toml").read_text("utf-8")))
        table = spark.read.parquet(str(tmp_path / name / "whatif_viewers"))
        picked.append({row["conn_id"] for row in table.select("conn_id").distinct().collect()})
    assert picked[0] == picked[1]
    assert made[0] == made[1]
    assert (result.summary["viewers"], result.summary["viewers_recorded"]) == (2, 4)
    warnings = result.accounts[0].warnings
    assert "only 1 of 2 viewers were ever refused" in warnings[0]
    assert "a simple random sample of 2 of 4 viewers" in warnings[1]
    assert "a random sample of 50.00% of them" in (tmp_path / "a/limits.toml").read_text("utf-8")


def test_connections_when_used_for_something_else_are_no_viewers(spark):
    """A flight counts as one of a viewer if any of its rows says so, or if none says anything."""
    from flowctl.pipeline.whatif.sample import bounded

    roles = [(1, "unknown"), (1, "play"), (2, "publish"), (3, None), (4, "unknown"), (5, "http_flv"), (2, None)]
    rows = spark.createDataFrame([("n", *pair) for pair in roles], "node string, conn_id bigint, role string")
    kept, recorded, others = bounded(rows, 0)
    assert (recorded, others) == (3, 2)
    assert {row["conn_id"] for row in kept.collect()} == {1, 3, 5}
    assert bounded(rows, 1)[0].select("conn_id").distinct().count() == 1


def test_evaluated_when_nothing_was_followed_is_no_viewer_and_not_damaged():
    """A connection that was sent nothing has a row of its own kind, which no figure counts."""
    from flowctl.pipeline.whatif.viewers import NO_VIEWER, evaluated

    rows = [sample(number, 7, state="OVERLOADED", queued_bytes=5) for number in range(2)]
    found = evaluated(pa.Table.from_pylist(rows), default_grid(DEFAULT_IN_FORCE)[:2], "samples", 0.0, 1.0).to_pylist()
    assert [(row["choice_id"], row["reason"]) for row in found] == [(NO_VIEWER, "it followed no stream")]


def test_capacity_when_crowds_were_measured_answers_with_the_error_beside_it(spark, tmp_path):
    """From a file of measurements: viewers per node, memory, and how far the largest crowd was from the prediction."""
    import json

    from flowctl.pipeline.capacity.answer import CapacityOptions
    from flowctl.pipeline.capacity.model import Measurement
    from flowctl.pipeline.jobs.capacity import run

    def point(viewers, more=1.0):
        cpu = (5_000 + 240 * viewers) * more
        measured = {"p99_ms": 45.0, "memory_bytes": 50_000_000 + 9_000 * viewers}
        return Measurement(viewers=viewers, bit_rate=2_500_000, cpu_us_per_s=cpu, **measured).as_dict()

    text = json.dumps({"points": [point(200), point(400), point(800, 1.05)]})
    options = CapacityOptions(measurements=text, viewers=20_000, slow_share=0.05, bit_rate=2.5e6, session_s=600)
    results = [run(spark, None, str(tmp_path / name), options).summary for name in ("a", "b")]
    assert results[0] == results[1]
    found = results[0]
    assert found["error_share"] == pytest.approx(1 / 1.05 - 1, abs=1e-3)
    assert 2_300 < found["viewers_per_node"] < 2_900
    assert found["viewers_per_node_low"] <= found["viewers_per_node"] <= found["viewers_per_node_high"]
    assert "was missed by -4.8%" in found["answer"]
    rows = spark.read.parquet(str(tmp_path / "a/capacity")).orderBy("viewers").collect()
    assert all(one["busy_p95"] < two["busy_p95"] for one, two in itertools.pairwise(rows))


def test_capacity_when_records_are_of_few_viewers_is_of_the_reference_machine(spark, tmp_path):
    """Six viewers on an idle thread are no ground for an answer, which is then told to be of another machine."""
    from flowctl.pipeline.capacity.answer import CapacityOptions
    from flowctl.pipeline.jobs.capacity import run

    rows = [second(at, conn_id, sent=260_000) | {"thread_busy": 0.08} for at in range(20) for conn_id in range(6)]
    write_samples(tmp_path / "events", rows)
    options = CapacityOptions(viewers=10_000, memory_bytes=4 << 30)
    found = run(spark, str(tmp_path / "events"), str(tmp_path / "out"), options).summary
    assert (found["fitted_to"], found["largest_recorded_viewers"]) == ("reference", 6)
    assert found["bit_rate"] == pytest.approx(260_000 * 8)  # of the crowd the records do tell
    assert 2_000 < found["viewers_per_node"] < 4_500
    assert found["answer"].startswith("REFERENCE MACHINE, NOT YOURS")


def test_capacity_when_memory_and_delay_were_not_measured_leaves_them_null(spark, tmp_path):
    """Null in the table and in the summary, never a figure; and a node's memory cannot be asked for then."""
    import json

    from flowctl.pipeline.capacity.answer import CapacityOptions
    from flowctl.pipeline.jobs.capacity import run

    points = [{"viewers": count, "bit_rate": 2.5e6, "cpu_us_per_s": 5_000 + 240 * count} for count in (100, 200)]
    text = json.dumps({"points": points})
    options = CapacityOptions(measurements=text, viewers=5_000, slow_share=0.05, bit_rate=2.5e6, session_s=600)
    found = run(spark, None, str(tmp_path), options).summary
    rows = spark.read.parquet(str(tmp_path / "capacity")).collect()
    assert {(None, None)} == {(row["memory_bytes"], row["p99_ms"]) for row in rows}
    assert (found["memory_bytes_per_node"], found["memory_bytes_per_viewer"], found["p99_ms"]) == (None, None, None)
    assert (found["viewers_per_node"], found["at_least"]) == (800, True)
    assert max(row["viewers"] for row in rows) == 800
    with pytest.raises(ConfigError, match="memory is to be kept, but what a viewer takes of it was not measured"):
        run(spark, None, str(tmp_path), CapacityOptions(measurements=text, memory_bytes=1 << 30))


def test_capacity_when_the_folder_has_no_samples_says_so(spark, tmp_path):
    """A folder without samples is a slip, not a wish for the figures of another machine."""
    from flowctl.pipeline.jobs.capacity import run

    (tmp_path / "events").mkdir()
    with pytest.raises(ConfigError, match="has no flow_samples"):
        run(spark, str(tmp_path / "events"), str(tmp_path / "out"))


def test_default_grid_when_evaluated_from_the_present_is_all_readable_by_the_server():
    """Every choice with the server's own policy can be written as a limits file and read back."""
    from flowctl.flow.limitsfile import LimitsFile, render

    for choice in default_grid(DEFAULT_IN_FORCE):
        if choice.policy == "all-or-cut":
            file = LimitsFile(limits=choice.limits, stuck_s=choice.stuck_s)
            assert choice.limits == parse_limits_file(render(file), "x").limits
