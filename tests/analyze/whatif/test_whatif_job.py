"""The job whatif on Spark: viewers of several hours become choices, a recommendation, and a limits file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from record_kit import at, close, event, write, write_closes

from flowctl.analyze.options import WhatifOptions
from flowctl.analyze.records.window import Window
from flowctl.analyze.run import run
from flowctl.analyze.whatif.grid import DEFAULT_IN_FORCE, default_grid
from flowctl.analyze.whatif.job import JOB, SET_WORDS, Sample, _in_force, advise
from flowctl.analyze.whatif.stretches import SERVER
from flowctl.core.flow.limits import target_marks
from flowctl.core.flow.limitsfile import LimitsFile, parse_limits_file, render
from flowctl.records.flight.words import limits_as_dict
from flowctl.records.telemetry.schema import FLIGHT
from tests.analyze.flight_files import write_flights

pytestmark = pytest.mark.timeout(600)

GRID = 'soft = ["64KiB,0", "2MiB,2048,4s"]\nhard = ["2x"]\ntarget_delay = ["auto", "off"]\n'


def job(either, tmp_path, options, out="out"):
    result = run(
        either, str(tmp_path / "events"), str(tmp_path / out), [JOB], {"whatif": replace(options, thorough=True)}
    )
    assert result.failed == [], result.jobs["whatif"].message
    note = result.jobs["whatif"]
    rows = either.read.parquet(str(tmp_path / out / "whatif_choices")).collect()
    return note.summary, note.warnings, {row["choice_id"]: row for row in rows}, tmp_path / out / "limits.toml"


def test_run_when_viewers_are_slow_writes_choices_and_a_limits_file(either, tmp_path):
    levels = "talk/*=800ms audio-first"
    detail = {"marks": limits_as_dict(DEFAULT_IN_FORCE.limits), "policy": "pictures-first", "levels": levels}
    write_flights(tmp_path / "events")
    write(tmp_path / "events", [event(0, 0, "server_started", detail=json.dumps(detail))])
    grid = GRID + 'policy = ["all-or-cut", "pictures-first"]\n'
    options = WhatifOptions(grid=grid, objective="disconnects, delay_p95")
    summary, warnings, rows, file = job(either, tmp_path, options)
    assert set(range(len(rows))) == set(rows)
    assert {5} == {row["viewers"] for row in rows.values()}
    assert (summary["viewers"], summary["trials"], summary["viewers_tried"]) == (5, summary["trials_wanted"], 5)
    (chosen,) = [row for row in rows.values() if row["recommended"]]
    assert any(row["on_front"] for row in rows.values())
    # A limits file cannot say another policy, so what is recommended is a choice with the one that the server has.
    assert {row["policy"] for row in rows.values() if row["in_force"] or row["recommended"]} == {"pictures-first"}
    assert all(row["disconnected_low"] <= row["disconnected"] <= row["disconnected_high"] for row in rows.values())
    text = file.read_text("utf-8")
    assert chosen["target_delay"] == target_marks(parse_limits_file(text, "limits.toml").limits)
    assert "Against the limits in force" in text
    # Levels have a target delay of their own, which is no choice's, and it is said wherever one is named.
    assert summary["levels"] == levels
    assert levels in text
    assert any(levels in line for line in warnings)
    assert any("of 5 recorded viewers were ever in trouble" in line for line in warnings)
    # Other questions of the same parts are answered without Spark.
    other = {"whatif": WhatifOptions(grid=GRID)}
    again = run(pytest.fail, str(tmp_path / "events"), str(tmp_path / "out"), [JOB], other)
    assert (again.failed, again.hours_read) == ([], 0)


def test_run_when_viewers_attack_leaves_them_out(either, tmp_path):
    write_flights(tmp_path / "events")
    hit = event(3, 100, "limit_hit", axis="amf_depth", peer_ip="198.51.100.10", role="play", node="node-100")
    write(tmp_path / "events", [hit])
    summary, _, rows, _ = job(either, tmp_path, WhatifOptions(grid=GRID))
    assert {row["viewers"] for row in rows.values()} == {summary["viewers"]} == {4}
    assert summary["connections_of_attackers"] == 1


def test_run_when_there_are_more_viewers_than_it_may_take_takes_a_sample_and_says_so(either, tmp_path):
    write_flights(tmp_path / "events")
    summary, warnings, rows, _ = job(either, tmp_path, WhatifOptions(grid=GRID, most=3))
    assert {row["viewers"] for row in rows.values()} == {3}
    assert summary["viewers_recorded"] >= 3
    assert summary["sampled_share"] == 1 or any("a random sample" in line for line in warnings)


def test_run_when_no_viewer_was_recorded_says_how_many_were_cut_and_what_is_missing(either, tmp_path):
    ends = [close(20, 1, 20.0), close(20, 2, 20.0, reason="hard limit"), close(20, 3, 20.0, reason="stuck")]
    ends += [close(3, 4, 1.0), close(20, 5, 20.0, reason="stuck")]
    write_closes(tmp_path / "events", ends)
    result = run(either, str(tmp_path / "events"), str(tmp_path / "out"), [JOB], {})
    assert (result.failed, {*result.outputs}) == ([], set())
    summary = result.jobs["whatif"].summary
    assert (summary["viewers"], summary["viewers_cut"]) == (4, 3)
    assert summary["why"] == (
        "of 4 viewers 3 were cut for being slow (1 by hard limit, 2 by stuck); what other limits would have done is "
        "not known: no viewer has a flight (flowctl serve live --events FOLDER records them, but with --flights 0)"
    )


def test_run_when_flights_were_recorded_finds_what_was_done(either, tmp_path):
    recorded = write_flights(tmp_path / "events")
    source = next((tmp_path / "events").rglob("n-1-100.parquet"))
    table = pq.read_table(source)
    names = {"node": "node-9", "conn_id": 9}
    torn = [{**row, **names} for row in table.to_pylist() if row["number"] != 3]
    write(tmp_path / "events", torn, "torn", table=FLIGHT, schema=table.schema, date="2023-11-14", hour="22")
    assert isinstance(table, pa.Table)
    grid = 'soft = ["0,0,20s"]\nhard = ["0,0,60s"]\ntarget_delay = "off"\n'
    summary, warnings, rows, _ = job(either, tmp_path, WhatifOptions(grid=grid, extend_s=0))
    by_force = {row["in_force"]: row for row in rows.values()}
    cut = sum(closed for closed, _, _ in recorded.values())
    assert (by_force[True]["viewers"], by_force[True]["disconnected"]) == (len(recorded), cut)
    assert 0 < cut < len(recorded)
    assert by_force[False]["disconnected"] == 0
    assert summary["connections_not_evaluated"] == 1
    assert any("row 3 is missing" in line for line in warnings)


def test_run_when_flights_were_written_hour_by_hour_takes_each_as_one(either, tmp_path):
    """So did recorders before, and what came after the hour was lost: who was cut then was told to have kept up."""
    recorded = write_flights(tmp_path / "events")
    began, later = (tmp_path / "events" / "flight" / f"date=2023-11-14/hour={hour}" for hour in (22, 23))
    later.mkdir()
    hour = timedelta(hours=1)
    for path in began.iterdir():
        table = pq.read_table(path, partitioning=None)
        turn = table["ts"][table.num_rows // 2].as_py()
        times = [ts + hour if ts > turn else ts for ts in table["ts"].to_pylist()]
        moved = table.set_column(
            table.schema.get_field_index("ts"), "ts", pa.array(times, table.schema.field("ts").type)
        )
        after = [ts > turn for ts in table["ts"].to_pylist()]
        for folder, kept in ((began, [not one for one in after]), (later, after)):
            part = moved.filter(pa.array(kept)).replace_schema_metadata(
                table.schema.metadata | {b"flowctl.uid": f"{folder.name} {path.name}".encode()}
            )
            pq.write_table(part, folder / path.name)
    _, _, rows, _ = job(either, tmp_path, WhatifOptions(grid=GRID))
    (present,) = [row for row in rows.values() if row["in_force"]]
    assert present["disconnected"] == sum(closed for closed, _, _ in recorded.values())


def test_run_when_a_grid_has_sets_tries_them_on_flights_and_recommends_limits_alone(either, tmp_path):
    write_flights(tmp_path / "events")
    grid = 'renditions = ["7k,14k"]\nsoft = ["0,0,20s"]\nhard = ["0,0,60s"]\n'
    _, warnings, rows, _ = job(either, tmp_path, WhatifOptions(grid=grid, extend_s=0))
    (tried,) = [row for row in rows.values() if "renditions of 7 kbit/s and 14 kbit/s" in row["choice"]]
    assert 0 < tried["sent_bytes"] < rows[0]["sent_bytes"]
    assert not tried["recommended"]
    assert any(SET_WORDS in line for line in warnings)


def test_run_when_trials_take_time_has_the_page_of_what_was_counted_before_them(either, tmp_path, monkeypatch):
    write_flights(tmp_path / "events")
    out, seen = tmp_path / "out", []
    page = out / "report.html"

    def advised(*given, **more):
        seen.append(page.read_text("utf-8"))
        return advise(*given, **more)

    monkeypatch.setattr("flowctl.analyze.whatif.job.advise", advised)
    result = run(either, str(tmp_path / "events"), str(out), ["whatif", "report"], {"whatif": WhatifOptions(grid=GRID)})
    assert result.failed == []
    (before,) = seen
    assert "it is being tried; this page will tell" in before
    after = page.read_text("utf-8")
    assert "it is being tried" not in after
    assert result.jobs["whatif"].summary["why"]


def test_run_when_there_is_no_viewer_keeps_the_limits_file_and_says_so(either, tmp_path):
    events, options = tmp_path / "events", WhatifOptions(grid=GRID)
    write_closes(events, [close(3900, 9, 300.0, role="publish")], hour="13")
    result = run(either, str(events), str(tmp_path / "out"), [JOB], {"whatif": options})
    assert (result.failed, {*result.outputs}) == ([], set())
    assert "whatif: there is no viewer to try other limits on" in result.jobs["whatif"].warnings

    write_flights(events)
    text = job(either, tmp_path, options)[3].read_text("utf-8")
    window = Window(at(3600), at(7200))
    result = run(either, str(events), str(tmp_path / "out"), [JOB], {"whatif": options}, window)
    assert (result.failed, {*result.outputs}) == ([], {"limits.toml"})
    assert (tmp_path / "out/limits.toml").read_text("utf-8") == text
    told = "whatif: there is no viewer to try other limits on; limits.toml is that of an earlier run"
    assert told in result.jobs["whatif"].warnings


def said(target_delay_ms):
    limits = replace(DEFAULT_IN_FORCE.limits, target_delay_ms=target_delay_ms)
    return json.dumps({"marks": limits_as_dict(limits), "policy": "live"})


@pytest.mark.parametrize(
    ("flights", "servers", "target_delay"),
    [
        ({5: 100}, {1: 200}, 100),
        ({5: 100}, {1: 200, 6: 300}, 300),
        ({5: 100, 7: 400}, {1: 200, 6: 300}, 400),
        ({}, {1: 200, 6: None}, None),  # of a version that did not record the marks
    ],
)
def test_in_force_when_several_tell_takes_the_newest(flights, servers, target_delay):
    texts = {at(second): said(ms) if ms is not None else '{"limits": "off"}' for second, ms in servers.items()}
    rows = [("n1", number, at(second), "flight", said(ms)) for number, (second, ms) in enumerate(flights.items())]
    rows += [(node, number, at(60), source, text) for node, number, _, source, text in rows]  # a later stretch
    heads = pd.DataFrame(rows, columns=["node", "conn_id", "at", "source", "settings"])
    told = [(when, SERVER, text) for when, text in texts.items()]
    found = _in_force(Sample([], heads, told, Counter(), 1, 1.0, 0))
    assert target_delay == (found and found.limits.target_delay_ms)


def test_default_grid_when_evaluated_from_the_present_is_all_readable_by_the_server():
    for choice in default_grid(DEFAULT_IN_FORCE):
        if choice.policy == "all-or-cut":
            file = LimitsFile(limits=choice.limits, stuck_s=choice.stuck_s)
            assert choice.limits == parse_limits_file(render(file), "x").limits
