"""Timelines of the viewers that were worst off: what their records say, how much is read, and the page of it."""

from __future__ import annotations

import shlex

import pytest
from page_kit import Page
from record_kit import at, event, sample, write, write_samples
from report_kit import NASTY, found_of, session

from flowctl.analyze.report import timelines
from flowctl.analyze.report.evidence import histories
from flowctl.analyze.report.found import Timeline
from flowctl.analyze.report.job import render
from flowctl.records.telemetry.schema import FLIGHT


def viewer(conn_id, began_s=0.0, ended_s=40.0, **more):
    times = {"opened_at": at(began_s).isoformat(), "until": at(ended_s).isoformat()}
    return (
        {"node": "n1", "conn_id": conn_id, "peer_ip": "192.0.2.1", "stream": "s", "blame": "viewer_link"} | times | more
    )


@pytest.fixture
def events(tmp_path):
    root = tmp_path / "the events"
    rows = [
        sample(second, conn_id, state="HARD_LIMIT" if second >= 20 else "READY", queued_bytes=1000 * second,
               sent_bytes=250_000, dropped_messages_inter=second // 20, dropped_messages_audio=1)
        for second in range(1, 41) for conn_id in (1, 2, 3)
    ]  # fmt: skip
    write_samples(root, rows)
    changes = [("OVERLOADED", 19.5), ("HARD_LIMIT", 19.75)]
    write(root, [event(second, 1, "state_changed", state_to=state, queued_bytes=7) for state, second in changes])
    flight = {"offset_us": 0, "kind": "begin"}
    write(root, [event(0, conn_id, "x") | flight for conn_id in (2, 1, 1)], table=FLIGHT)
    return root


def test_timelines_when_made_tell_state_queue_line_drops_and_how_to_replay(events):
    one, three = timelines.timelines(str(events), [viewer(1), viewer(3), viewer(99)])
    assert [line.viewer["conn_id"] for line in (one, three)] == [1, 3]
    assert one.points["queue"].tolist() == [1000.0 * second for second in range(1, 41)]
    assert set(one.points["line"]) == {2e6}
    assert one.points["drops"].sum() == 40 + 20 + 2
    assert [(state, since - at(0).timestamp()) for since, state in one.states] == [
        ("READY", 1.0), ("OVERLOADED", 19.5), ("HARD_LIMIT", 19.75),
    ]  # fmt: skip
    assert shlex.split(one.command) == ["flowctl", "replay", str(events), "--conn", "1", "--node", "n1"]
    assert three.command == ""


def test_timelines_when_there_are_no_samples_are_of_events(tmp_path):
    rows = [event(second, 5, "dropped", state_to="READY", queued_bytes=9, dropped_messages=3) for second in (1, 2)]
    write(tmp_path, rows)
    (line,) = timelines.timelines(str(tmp_path), [viewer(5)])
    assert (line.points["drops"].tolist(), line.points["queue"].tolist()) == ([3.0, 3.0], [9.0, 9.0])
    assert line.points["line"].isna().all()


def test_points_when_rows_are_many_keep_the_worst_queue_the_mean_line_and_all_drops(tmp_path, monkeypatch):
    monkeypatch.setattr(timelines, "MOST_POINTS", 4)
    rows = [
        sample(second, 1, queued_bytes=second, sent_bytes=125 * (second % 2), dropped_messages_key=1)
        for second in range(1, 41)
    ]
    write_samples(tmp_path, rows)
    (line,) = timelines.timelines(str(tmp_path), [viewer(1)])
    assert line.points["queue"].tolist() == [10.0, 20.0, 30.0, 40.0]
    assert line.points["line"].tolist() == [500.0] * 4
    assert line.points["drops"].tolist() == [10.0] * 4


def test_timelines_when_files_are_odd_or_too_many_pass_over_them(events, tmp_path, monkeypatch):
    folder = events / "flow_samples" / "date=2026-03-01" / "hour=12"
    whole = timelines.timelines(str(events), [viewer(1)])
    (folder / "b.parquet").write_bytes(b"PAR1 is not enough")
    outside = write_samples(tmp_path / "other", [sample(3.5, 1, queued_bytes=10**9)])
    (folder / "c.parquet").symlink_to(outside)
    again = timelines.timelines(str(events), [viewer(1)])
    assert again[0].points.equals(whole[0].points)
    assert timelines.timelines(str(events), [viewer(1, -86_400, -80_000)]) == []
    assert timelines.timelines(str(tmp_path / "nowhere"), [viewer(1)]) == []
    assert timelines.timelines("s3a://bucket/events", [viewer(1)]) == []
    for bound, value in (("MOST_ROWS", dict.fromkeys(timelines.MOST_ROWS, 1)), ("MOST_BYTES", 10)):
        with monkeypatch.context() as patched:
            patched.setattr(timelines, bound, value)
            assert timelines.timelines(str(events), [viewer(1)]) == []


def test_hours_when_a_viewer_was_there_for_long_are_its_last():
    assert timelines._hours(viewer(1, -86_400, 7200)) == [("2026-03-01", hour) for hour in ("14", "13", "12")]
    assert timelines._hours(viewer(1, 0, 4000)) == [("2026-03-01", "13"), ("2026-03-01", "12")]
    assert timelines._hours({"opened_at": None, "until": None}) == []


def test_page_when_it_has_timelines_shows_them_with_the_command(events, tmp_path):
    found = found_of(tmp_path / "r", {"sessions": [session(0, NASTY, peer_ip="192.0.2.77")]}, {})
    (line,) = timelines.timelines(str(events), [viewer(1, stream=NASTY, close_reason=NASTY)])
    odd = Timeline(line.viewer, line.points, [*line.states, (line.states[-1][0] + 1, NASTY)], line.command + NASTY)
    object.__setattr__(found, "timelines", [line, odd])
    shown = Page(render(found))
    assert (shown.crossed, shown.open, shown.tags.count("script")) == ([], [], 3)
    assert line.command in shown.words
    assert "12:00:19 OVERLOADED" in shown.words
    assert [shot.plot.strip[-1][2] for shot in histories(found)] == ["s6", "calm"]
    assert [name for _, name, _ in shown.attributes if name.startswith("on")] == []


def test_rows_of_the_worst_when_read_have_what_a_timeline_looks_for(tmp_path):
    found = found_of(tmp_path / "r", {"sessions": [session(0, conn_id=1928461784298029063)]}, {})
    (row,) = found.rows("worst")
    assert row["conn_id"] == 1928461784298029063
    assert timelines._hours(row) == [("2026-11-21", "16")]
