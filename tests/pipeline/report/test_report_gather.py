"""From tables to the report: figures are those of the tables, and tables that are odd, empty or large stay harmless."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_kit import Page
from report_kit import NASTY

from flowctl.errors import ConfigError
from flowctl.pipeline.report import gather, outcomes
from flowctl.pipeline.report import job as report
from flowctl.pipeline.report.data import JobNote, JobState
from flowctl.pipeline.tables.place import Place
from flowctl.telemetry.schema import CLASS_NAMES

T0 = datetime(2026, 11, 21, 16, tzinfo=UTC)

pytestmark = pytest.mark.timeout(600)  # Spark on a busy machine takes its time; a hang is still found


def session_row(number, **values):
    """A viewer that kept up, unless `values` say otherwise."""
    row = {
        "node": "edge-1",
        "conn_id": number,
        "peer_ip": f"127.0.3.{number % 250}",
        "role": "play",
        "app": "live",
        "stream": "test",
        "user_agent": NASTY,
        "opened_at": T0 + timedelta(seconds=number),
        "closed_at": T0 + timedelta(seconds=number + 100),
        "duration_s": 100.0,
        "close_reason": "peer closed",
        "closed_by": "peer",
        "worst_state": "READY",
        "blame": "none",
        "time_ready_ms": 100_000.0,
        "time_overloaded_ms": 0.0,
        "time_soft_ms": 0.0,
        "time_hard_ms": 0.0,
        "recoveries": 0,
        "recover_mean_ms": None,
        "returns_to_live": 0,
        "input_pauses": 0,
        "limit_hits": 0,
        "sent_bytes": 1000,
        "dropped_messages": 0,
        "dropped_bytes": 0,
        "delay_p50_ms": 10.0 + number,
        "delay_p95_ms": 100.0 + number,
        "delay_p99_ms": 200.0 + number,
        "stall_count": 0,
        "stall_ms": 0.0,
        "startup_ms": 50.0,
        "exit_before_start": False,
        "picture_share": 1.0,
        "line_of_stream": None,
        **{f"accepted_messages_{name}": 100 for name in CLASS_NAMES},
        **{f"dropped_messages_{name}": 0 for name in CLASS_NAMES},
    }
    return row | values


def slow_row(number, **values):
    bad = {
        "worst_state": "SOFT_LIMIT",
        "blame": "viewer_link",
        "time_overloaded_ms": 1000.0,
        "time_soft_ms": 2000.0 + number,
        "recoveries": 2,
        "recover_mean_ms": 1500.0,
        "dropped_messages": 30,
        "dropped_messages_inter": 30,
        "picture_share": 0.6 if number % 2 else None,
        "line_of_stream": 0.55,
        "stall_count": 1,
        "stall_ms": 500.0,
    }
    return session_row(number, **(bad | values))


def write(folder, table, rows):
    (Path(folder) / table).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), Path(folder) / table / "part.parquet")


def data_of(spark, folder, jobs=None):
    return report.collect_data(spark, Place(spark, str(folder)), "/data/events", jobs or {})


def some_sessions():
    rows = [session_row(number) for number in range(80)]
    rows += [slow_row(number) for number in range(80, 105)]
    rows += [slow_row(105, worst_state="HARD_LIMIT", close_reason="hard limit", closed_by="server", time_hard_ms=1.0)]
    rows += [session_row(106, role="publish", sent_bytes=7)]
    return rows


def test_figures_when_gathered_are_those_of_the_table(spark, tmp_path):
    """Counts, sums and quantiles are what one gets by adding up the rows by hand."""
    write(tmp_path, "sessions", some_sessions())
    data = data_of(spark, tmp_path)
    whole = data.whole
    wanted = {
        "connections": 107,
        "viewers": 106,
        "troubled": 26,
        "worst_soft": 25,
        "worst_hard": 1,
        "cut_slow": 1,
        "play_ms": 106 * 100_000,
        "recoveries": 52,
        "recover_mean_ms": 1500,
        "accepted_messages": 106 * 700,
        "dropped_messages": 26 * 30,
        "stall_count": 26,
        "sent_bytes": 106 * 1000 + 7,
        "startup_p50_ms": 50,
        "troubled_picture_share": pytest.approx(0.6),
        "troubled_line_of_stream": 0.55,
    }
    assert wanted == {name: whole[name] for name in wanted}
    assert whole["stall_ratio"] == pytest.approx(26 * 500 / (106 * 100_000))
    assert (T0, T0 + timedelta(seconds=206)) == (data.began_at, data.ended_at)
    assert (data.node_count, data.nodes[0]["viewers"]) == (1, 106)
    assert [{name: row[name] for name in ("blame", "viewers")} for row in data.blames] == [
        {"blame": "viewer_link", "viewers": 26}
    ]
    dropped = {row["class"]: row["dropped_messages"] for row in data.drops}
    assert {name: count for name, count in dropped.items() if count} == {"inter": 26 * 30}
    curve = data.delay_curves["delay_p50_ms"]
    assert (len(curve), curve[0], curve[100]) == (101, 10.0, 115.0)
    assert [(row["least"], row["viewers"]) for row in data.picture_shares] == [(1.0, 80), (0.5, 13), (None, 13)]
    assert [(row["reason"], row["connections"]) for row in data.closes] == [("peer closed", 106), ("hard limit", 1)]


def test_delays_when_a_viewer_was_there_for_a_moment_leave_it_out(spark):
    """A second of a join says nothing of how late viewers are, and would be the end of the curve."""
    rows = [("play", 60.0, 50.0), ("play", 1.9, 90_000.0)]
    frame = spark.createDataFrame(rows, "role string, duration_s double, delay_p50_ms double")
    assert set(gather.delay_curves(frame)["delay_p50_ms"]) == {50.0}


def test_worst_viewers_when_chosen_are_the_worst(spark, tmp_path):
    """Who was disconnected for it comes first, then who was in trouble longest; the rest is counted."""
    write(tmp_path, "sessions", some_sessions())
    cut = data_of(spark, tmp_path).worst
    numbers = [row["conn_id"] for row in cut.rows]
    assert [105, *range(104, 85, -1)] == numbers
    assert (cut.total, cut.left_out) == (26, 6)


def test_page_when_made_of_tables_has_their_figures(spark, tmp_path):
    """What the page says is what the tables hold; peers' words in them are text."""
    write(tmp_path, "sessions", some_sessions())
    found = report.run(spark, "/data/events", str(tmp_path))
    page = Page((tmp_path / "report.html").read_text("utf-8"))
    assert found.summary["sections"] == ["sessions"]
    assert (
        "107 connections to 1 node, from 2026-11-21 16:00:00 UTC on, for 3 min 26 s. 106 viewers watched" in page.words
    )
    assert "75.5 % of them kept up all the time; 26 did not, and 1 of those were disconnected" in page.words
    assert "They got 60.0 % of the pictures on average; the line of the median one carried 55.0 %" in page.words
    assert "Dropped for them: 780 messages, 1.1 % of what was published" in page.words
    assert "script" not in page.tags


@pytest.mark.parametrize("rows", [[session_row(1)], [session_row(1, role="publish")], []])
def test_report_when_there_is_hardly_anything_is_a_page(spark, tmp_path, rows):
    """One viewer, no viewer, and a table without a row all make a page."""
    schema = pa.Table.from_pylist([slow_row(1)]).schema
    (tmp_path / "sessions").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "sessions/part.parquet")
    report.run(spark, "/data/events", str(tmp_path))
    page = Page((tmp_path / "report.html").read_text("utf-8"))
    assert (page.crossed, page.open) == ([], [])
    assert f"{len(rows)} connection" in page.words


def test_report_when_columns_are_missing_shows_the_rest(spark, tmp_path):
    """A table of another version, with few columns, costs only the figures of those it lacks."""
    write(
        tmp_path,
        "sessions",
        [{"node": "n", "conn_id": 1, "role": "play", "worst_state": "SOFT_LIMIT", "duration_s": 5.0}],
    )
    data = data_of(spark, tmp_path)
    assert (data.whole["viewers"], data.whole["troubled"], data.whole["stall_ratio"]) == (1, 1, None)
    assert data.began_at is None
    assert data.unreadable == {}
    report.run(spark, "/data/events", str(tmp_path))


def test_report_when_a_table_is_broken_names_it_and_shows_the_others(spark, tmp_path):
    """A file that is no Parquet costs its own section only."""
    write(tmp_path, "sessions", some_sessions())
    (tmp_path / "capacity").mkdir()
    (tmp_path / "capacity/part.parquet").write_bytes(b"not a table at all")
    data = data_of(spark, tmp_path)
    assert data.whole["connections"] == 107
    assert {"capacity"} == set(data.unreadable)
    assert "\n" not in data.unreadable["capacity"]


def test_report_when_a_job_failed_shows_none_of_its_old_figures(spark, tmp_path):
    """Tables that an earlier run has left of a job that failed now are not shown beside new figures."""
    write(tmp_path, "sessions", some_sessions())
    assert data_of(spark, tmp_path, {"sessions": JobNote("sessions", JobState.FAILED, "no room")}).whole is None


def test_report_when_there_is_nothing_at_all_is_an_error(spark, tmp_path):
    """A folder without a table is an error that says what to run."""
    with pytest.raises(ConfigError, match="nothing to report on") as error:
        report.run(spark, "/data/events", str(tmp_path))
    assert "flowctl analyze all" in error.value.hint


def test_moments_when_no_calendar_holds_them_are_none():
    """Microseconds of any size are a moment or none, never an error."""
    assert datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC) == gather.moment_of(1_000_000)
    assert gather.moment_of(2**62) is None
    assert gather.moment_of(None) is None


# ------------------------------------------------------------------------------------------------ fleet


def fleet_minute(minute, stream="test", **values):
    row = {
        "app": "live",
        "stream": stream,
        "node": "edge-1",
        "minute": T0 + timedelta(minutes=minute),
        "viewers": 10.0,
        "share_ready": 0.8,
        "share_overloaded": 0.1,
        "share_soft": 0.1,
        "share_hard": 0.0,
        "delay_p50_ms": 20.0,
        "delay_p95_ms": 200.0,
        "delay_p99_ms": 900.0,
        "accepted_messages": 1000,
        "dropped_messages": 10,
    }
    return row | values


def test_moments_when_made_of_minutes_weigh_viewers(spark, tmp_path):
    """A stream of thirty viewers counts three times as much as one of ten, in shares and in delays."""
    rows = [fleet_minute(0), fleet_minute(0, "big", viewers=30.0, share_ready=0.4, share_hard=0.4, delay_p50_ms=60.0)]
    write(tmp_path, "fleet_streams", [*rows, fleet_minute(2)])
    began_at, moment_s, moments = outcomes.moments_of_fleet(gather.read(spark, str(tmp_path / "fleet_streams")))
    assert (began_at, moment_s) == (T0, 60.0)
    assert [row["at_s"] for row in moments] == [0.0, 120.0]
    assert moments[0]["ready"] == pytest.approx((10 * 0.8 + 30 * 0.4) / 40)
    assert moments[0]["hard"] == pytest.approx(30 * 0.4 / 40)
    assert (moments[0]["viewers"], moments[0]["delay_p50_ms"]) == (40.0, 60.0)


def test_moments_when_the_run_was_short_are_of_the_samples(spark):
    """A sample counts in each place of some seconds for what it has of it; publishers are no viewers."""
    sample = {
        "ts": T0 + timedelta(seconds=1), "node": "n", "conn_id": 1, "role": "play", "state": "READY",
        "interval_ms": 1000.0, "viewer_delay_ms": 5.0,
    }  # fmt: skip
    rows = [
        sample,
        sample | {"ts": T0 + timedelta(seconds=1.5), "state": "SOFT_LIMIT", "interval_ms": 3000.0, "conn_id": 2},
        sample | {"ts": T0 + timedelta(seconds=9), "viewer_delay_ms": 50.0},
        sample | {"ts": T0 + timedelta(seconds=9), "role": "publish", "state": "HARD_LIMIT"},
        sample | {"ts": T0 - timedelta(days=9)},
        sample | {"ts": T0 + timedelta(seconds=11), "state": "HARD_LIMIT", "interval_ms": 4000.0, "conn_id": 2},
    ]
    frame = spark.createDataFrame(pa.Table.from_pylist(rows).to_pandas())
    _, moment_s, moments = outcomes.moments_of_samples(frame, T0, 5)
    assert moment_s == 5.0
    assert [(row["at_s"], row["ready"], row["soft"], row["hard"], row["viewers"]) for row in moments] == [
        (0.0, 0.4, 0.6, 0.0, 2),
        (5.0, 0.25, 0.0, 0.75, 2),
        (10.0, 0.0, 0.0, 1.0, 1),
    ]
    assert moments[1]["delay_p99_ms"] == 50.0


@given(st.floats(0, 1e9))
def test_moments_when_time_is_of_any_length_are_few(span_s):
    """Whatever the time, there are at most so many places, and they are whole seconds."""
    length = outcomes.moment_length_s(span_s)
    assert length >= 2
    assert span_s / length <= gather.MOST_MOMENTS


def test_streams_and_networks_when_gathered_are_summed_up(spark, tmp_path):
    """A stream is summed over its minutes and nodes; networks in trouble come first, and hashes have no network."""
    rows = [fleet_minute(0), fleet_minute(0, node="edge-2"), fleet_minute(1), fleet_minute(0, None, viewers=1.0)]
    write(tmp_path, "fleet_streams", rows)
    network = {"viewers_seen": 5, "share_ready": 1.0, "drop_ratio": 0.0, "delay_p50_ms": 1.0}
    write(
        tmp_path,
        "fleet_subnets",
        [network | {"subnet": "10.0.0.0/24"}, network | {"subnet": None, "share_ready": 0.5}],
    )
    data = data_of(spark, tmp_path)
    test, unnamed = data.streams.rows
    assert (test["stream"], test["viewers"], test["viewer_ms"], test["drop_share"]) == ("test", 20.0, 1_800_000.0, 0.01)
    assert (unnamed["stream"], unnamed["viewers"]) == (None, 1.0)
    assert test["trouble_share"] == pytest.approx(0.2)
    assert [row["subnet"] for row in data.subnets.rows] == ["addresses not recorded", "10.0.0.0/24"]


def test_scores_when_gathered_have_bans_first_and_the_innocent_left_out(spark, tmp_path):
    """Banned ones come first, then the highest; who did nothing is not counted."""
    row = {
        "cidr": "10.0.0.1/32",
        "address": "10.0.0.1",
        "points": 20.0,
        "score": 12.0,
        "banned": True,
        "evidence": "{}",
    }
    rows = [
        row,
        row | {"cidr": "10.0.0.2/32", "score": 99.0, "banned": False},
        row | {"cidr": "10.0.0.3/32", "points": 0.0},
    ]
    write(tmp_path, "abuse_scores", rows)
    cut = data_of(spark, tmp_path).scores
    assert ([row["cidr"] for row in cut.rows], cut.total) == (["10.0.0.1/32", "10.0.0.2/32"], 2)
    lines = '{"cidr": "10.0.0.1/32", "score": 1}\n\n{"cidr": "10.0.0.2/32", "score": 5}\nnot JSON\n[1]\n'
    bans = outcomes.bans(lines)
    assert ([row["score"] for row in bans.rows], bans.total) == ([5, 1], 4)
