"""The job whatif on Spark: viewers of several hours become choices, a recommendation, and a limits file."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest
from record_kit import at, close, event, opened, sample, second, write, write_closes, write_opens, write_samples

from flowctl.analyze.options import WhatifOptions
from flowctl.analyze.records.window import Window
from flowctl.analyze.run import run
from flowctl.analyze.whatif.grid import DEFAULT_IN_FORCE, default_grid
from flowctl.analyze.whatif.job import JOB, SET_WORDS, Sample, _in_force
from flowctl.analyze.whatif.stretches import SERVER
from flowctl.core.flow.limits import target_marks
from flowctl.core.flow.limitsfile import LimitsFile, parse_limits_file, render
from flowctl.records.flight.words import limits_as_dict
from flowctl.records.telemetry.schema import FLIGHT
from tests.analyze.flight_files import write_flights

pytestmark = pytest.mark.timeout(600)

GRID = 'soft = ["64KiB,0", "2MiB,2048,4s"]\nhard = ["2x"]\ntarget_delay = ["auto", "off"]\n'


def crowd(events, seconds=20):
    """Write two healthy viewers, one with half the rate, one that stands still, and one whose visit is short.

    The kernel refused the second healthy one something as it joined, as it does to most.
    """
    rows = [second(0, 2, sent=258_000, state="OVERLOADED", queued=2_000), second(1, 2, sent=262_000)]
    rows += [second(number, 2, sent=260_000) for number in range(2, seconds)]
    for number in range(seconds):
        rows.append(second(number, 3, sent=130_000, state="OVERLOADED", queued=130_000 * (number + 1)))
        rows.append(second(number, 4, sent=0, state="SOFT_LIMIT", queued=260_000 * (number + 1)))
    write_samples(events, rows)
    calm = {"accepted_messages_key": 20, "accepted_messages_inter": 480, "sent_bytes": 5_000_000}
    ends = [close(seconds, conn_id, seconds, episodes_overloaded=conn_id - 1, **calm) for conn_id in (1, 2)]
    ends.append(close(seconds, 3, seconds, episodes_overloaded=1))
    ends.append(close(3, 5, 1.0))
    write_closes(events, ends)
    write_opens(events, [opened(10, 4, 10.0, episodes_overloaded=1), opened(10, 1, 10.0)])


def job(either, tmp_path, options, out="out"):
    result = run(either, str(tmp_path / "events"), str(tmp_path / out), [JOB], {"whatif": options})
    assert result.failed == [], result.jobs["whatif"].message
    note = result.jobs["whatif"]
    rows = either.read.parquet(str(tmp_path / out / "whatif_choices")).collect()
    return note.summary, note.warnings, {row["choice_id"]: row for row in rows}, tmp_path / out / "limits.toml"


def test_run_when_viewers_are_slow_writes_choices_and_a_limits_file(either, tmp_path, monkeypatch):
    levels = "talk/*=800ms audio-first"
    detail = {"marks": limits_as_dict(DEFAULT_IN_FORCE.limits), "policy": "pictures-first", "levels": levels}
    crowd(tmp_path / "events")
    write(tmp_path / "events", [event(0, 0, "server_started", detail=json.dumps(detail))])
    grid = GRID + 'policy = ["all-or-cut", "pictures-first"]\n'
    options = WhatifOptions(grid=grid, objective="disconnects, delay_p95")
    summary, warnings, rows, file = job(either, tmp_path, options)
    assert set(range(len(rows))) == set(rows)
    assert {4} == {row["viewers"] for row in rows.values()}
    assert (summary["viewers"], summary["viewers_refused"], summary["source"]) == (4, 2, "samples")
    (chosen,) = [row for row in rows.values() if row["recommended"]]
    assert any(row["on_front"] for row in rows.values())
    # A limits file cannot say another policy, so what is recommended is a choice with the one that the server has.
    assert {row["policy"] for row in rows.values() if row["in_force"] or row["recommended"]} == {"pictures-first"}
    same = [row for row in rows.values() if row["policy"] == "pictures-first"]
    assert chosen["disconnected"] == min(row["disconnected"] for row in same)
    text = file.read_text("utf-8")
    assert chosen["target_delay"] == target_marks(parse_limits_file(text, "limits.toml").limits)
    assert "Against the limits in force" in text
    # Levels have a target delay of their own, which is no choice's, and it is said wherever one is named.
    assert summary["levels"] == levels
    assert levels in text
    assert any(levels in line for line in warnings)
    assert any("only 2 of 4 viewers were ever in trouble" in line for line in warnings)
    # Other questions of the same parts are answered without Spark.
    other = {"whatif": WhatifOptions(grid=GRID)}
    again = run(pytest.fail, str(tmp_path / "events"), str(tmp_path / "out"), [JOB], other)
    assert (again.failed, again.hours_read) == ([], 0)
    # Where parts are large Spark takes the sample, and finds the same.
    monkeypatch.setattr("flowctl.analyze.run.SMALL_BYTES", -1)
    assert job(either, tmp_path, options, "large")[2] == rows


def test_run_when_viewers_attack_leaves_them_out(either, tmp_path):
    calm = [close(20, number, 20.0, peer_ip=f"198.51.100.{min(number, 9)}") for number in (3, 4, 5, 9)]
    # Connection 4 breaks a limit itself; 9 does nothing, at an address whose other connection is a proof.
    hits = [(3, 4, "198.51.100.4"), (4, 10, "198.51.100.9")]
    events = [event(at, number, "limit_hit", axis="amf_depth", peer_ip=who, role="play") for at, number, who in hits]
    write_closes(tmp_path / "events", calm)
    write(tmp_path / "events", events)
    summary, _, rows, _ = job(either, tmp_path, WhatifOptions(grid=GRID))
    assert {row["viewers"] for row in rows.values()} == {summary["viewers"]} == {2}
    assert summary["connections_of_attackers"] == 2


def test_run_when_hours_are_cut_otherwise_takes_the_same_viewers(either, tmp_path):
    for name, hours in (("one", ("12",)), ("two", ("12", "13"))):
        for number, hour in enumerate(hours):
            rows = [close(3600 * number + 20 + at, at, 10.0) for at in range(1, 41) if at % len(hours) == number]
            write_closes(tmp_path / name / "events", rows, hour=hour)
    picked = []
    for name in ("one", "two"):
        summary, warnings, rows, _ = job(either, tmp_path / name, WhatifOptions(most=7))
        assert {row["viewers"] for row in rows.values()} == {7}
        assert any("of 7 of about" in line and "a random sample" in line for line in warnings)
        table = either.read.parquet(str(tmp_path / name / "out/parts/whatif_stretches"))
        found = table.orderBy("picked").limit(7).collect()
        picked.append([(row["conn_id"], row["picked"]) for row in found])
    assert picked[0] == picked[1]
    assert 20 < summary["viewers_recorded"] < 80


def test_run_when_flights_were_recorded_finds_what_was_done(either, tmp_path):
    recorded = write_flights(tmp_path / "events")
    source = next((tmp_path / "events").rglob("n-1-100.parquet"))
    import pyarrow as pa
    import pyarrow.parquet as pq

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
    assert by_force[True]["edges"] == sum(edges for _, edges, _ in recorded.values())
    assert (summary["source"], summary["connections_not_evaluated"]) == ("flight", 1)
    assert any("row 3 is missing" in line for line in warnings)


def test_run_when_a_grid_has_sets_tries_them_on_flights_and_recommends_limits_alone(either, tmp_path):
    write_flights(tmp_path / "events")
    grid = 'renditions = ["7k,14k"]\nsoft = ["0,0,20s"]\nhard = ["0,0,60s"]\n'
    _, warnings, rows, _ = job(either, tmp_path, WhatifOptions(grid=grid, extend_s=0))
    (tried,) = [row for row in rows.values() if "renditions of 7 kbit/s and 14 kbit/s" in row["choice"]]
    assert 0 < tried["sent_bytes"] < rows[0]["sent_bytes"]
    assert not tried["recommended"]
    assert any(SET_WORDS in line for line in warnings)


def test_run_when_a_grid_has_sets_and_there_are_samples_only_says_what_is_missing(either, tmp_path):
    crowd(tmp_path / "events")
    options = {"whatif": WhatifOptions(grid='renditions = ["500k,1M"]')}
    result = run(either, str(tmp_path / "events"), str(tmp_path / "out"), [JOB], options)
    assert "renditions are tried on flights" in result.jobs["whatif"].message


@pytest.mark.parametrize("quiet", [close(3605, 9, 5.0, episodes_overloaded=1), close(3900, 9, 300.0, role="publish")])
def test_run_when_there_is_no_viewer_keeps_the_limits_file_and_says_so(either, tmp_path, quiet):
    events, options = tmp_path / "events", WhatifOptions(grid=GRID)
    write_closes(events, [quiet], hour="13")
    write_samples(events, [sample(3601, 9, role=quiet["role"])], hour="13")
    result = run(either, str(events), str(tmp_path / "out"), [JOB], {"whatif": options})
    assert (result.failed, {*result.outputs}) == ([], set())
    assert "whatif: there is no viewer to try other limits on" in result.jobs["whatif"].warnings

    crowd(events)
    text = job(either, tmp_path, options)[3].read_text("utf-8")
    window = Window(at(3600), at(7200))
    result = run(either, str(events), str(tmp_path / "out"), [JOB], {"whatif": options}, window)
    assert (result.failed, {*result.outputs}) == ([], {"limits.toml"})
    assert (tmp_path / "out/limits.toml").read_text("utf-8") == text
    told = "whatif: there is no viewer to try other limits on; limits.toml is that of an earlier run"
    assert told in result.jobs["whatif"].warnings


def test_run_when_another_hour_has_flights_keeps_the_samples_of_this_one(either, tmp_path):
    write_flights(tmp_path / "events")
    crowd(tmp_path / "events")
    options = WhatifOptions(grid=GRID)
    assert job(either, tmp_path, options)[0]["source"] == "flight"
    window = Window(at(0), at(3600))
    result = run(either, str(tmp_path / "events"), str(tmp_path / "out"), [JOB], {"whatif": options}, window)
    assert [result.jobs["whatif"].summary[name] for name in ("viewers", "source")] == [4, "samples"]


def said(target_delay_ms, **more):
    limits = replace(DEFAULT_IN_FORCE.limits, target_delay_ms=target_delay_ms)
    return json.dumps({"marks": limits_as_dict(limits), "policy": "live", **more})


def test_run_when_limits_changed_in_an_earlier_hour_knows_those_in_force(either, tmp_path):
    changed = event(30, 0, "config_changed", reason="limits file", detail=said(700))
    others = [
        event(40, 0, "config_changed", reason="bans file", detail='{"bans": 1}'),
        event(50, 0, "config_changed", reason="another"),
        event(3700, 0, "conn_opened"),
    ]
    write(
        tmp_path / "events",
        [event(0, 0, "server_started", detail=said(None, levels="a/*=1s")), changed, *others[:2]],
    )
    write(tmp_path / "events", others[2:], hour="13")
    write_closes(tmp_path / "events", [close(3720, 1, 20.0)], hour="13")
    for hour in (0, 1):
        window = Window(at(3600 * hour), at(3600 * (hour + 1)))
        result = run(either, str(tmp_path / "events"), str(tmp_path / "out"), [JOB], {}, window)
        assert result.failed == []
    summary = result.jobs["whatif"].summary
    assert (summary["viewers"], summary["in_force"], summary["levels"]) == (1, "of the records", "a/*=1s")
    rows = either.read.parquet(str(tmp_path / "out/whatif_choices")).collect()
    rows = [row for row in rows if row["in_force"]]
    assert [row["target_delay"] for row in rows] == ["700ms"]


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
    found = _in_force(Sample(heads, told, 1, 1.0, 0, heads, {}))
    assert target_delay == (found and found.limits.target_delay_ms)


def test_default_grid_when_evaluated_from_the_present_is_all_readable_by_the_server():
    for choice in default_grid(DEFAULT_IN_FORCE):
        if choice.policy == "all-or-cut":
            file = LimitsFile(limits=choice.limits, stuck_s=choice.stuck_s)
            assert choice.limits == parse_limits_file(render(file), "x").limits
