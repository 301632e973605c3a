"""Reading records with Spark: what is used, what is put aside, and that all of it is accounted for."""

from __future__ import annotations

import json
import math
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from record_kit import (
    at,
    close,
    event,
    folder,
    identities,
    opened,
    read_hours,
    sample,
    schema_of,
    write,
    write_closes,
    write_opens,
)

from flowctl.analyze.records.listing import list_records
from flowctl.analyze.records.read import Read, judged, look
from flowctl.analyze.records.window import ODD_HOUR
from flowctl.errors import ConfigError
from flowctl.records.telemetry.schema import FLOW_CLOSES, FLOW_SAMPLES, TABLES

NOW_US = int(at(7200).timestamp() * 1e6)


def test_read_hours_when_all_is_well_gives_every_row_with_its_hour(either, tmp_path):
    write_closes(tmp_path, [close(10, 1), close(20, 2)])
    write_closes(tmp_path, [close(-12 * 3600 + 5 * 3600 + 10, 3)], hour="05")
    write_opens(tmp_path, [opened(30, 4)])
    write(tmp_path, [event(5, 1, "input_paused")])
    listing = list_records(str(tmp_path))
    read = read_hours(either, listing, listing.hours(), now_us=NOW_US)
    closes = read.table("flow_closes")
    assert closes is read.table("flow_closes")
    assert closes.columns == [*TABLES["flow_closes"].names, "date", "hour"]
    assert sorted((row.conn_id, row.date, row.hour) for row in closes.collect()) == [
        (1, "2026-03-01", "12"),
        (2, "2026-03-01", "12"),
        (3, "2026-03-01", "05"),
    ]
    assert [read.has(name) for name in TABLES] == [True, True, True, False, False]
    assert read.table("flight").collect() == []
    assert max(read.newest.values()) == at(30)
    assert {key: item.rows_out for key, item in read.accounts.items()} == {
        (("2026-03-01", "05"), "flow_closes"): 1,
        (("2026-03-01", "12"), "flow_closes"): 2,
        (("2026-03-01", "12"), "flow_opens"): 1,
        (("2026-03-01", "12"), "flow_events"): 1,
    }
    assert read.quarantine == {}


def read_all(either, root):
    listing = list_records(str(root))
    return read_hours(either, listing, listing.hours(), now_us=NOW_US)


def rows_in(read, table):
    return [item.rows_in for (_, name), item in read.accounts.items() if name == table]


def test_read_hours_when_files_and_rows_are_bad_puts_them_aside_and_reads_the_rest(either, tmp_path, monkeypatch):
    root = tmp_path / "my [records], 100% {odd} & more"
    good = write(root, [event(1, 1, "dropped"), event(2, 1, "returned")], "a?b*")
    write(root, [event(3, 1, "dropped"), event(4, 1, "dropped", value=math.nan), event(5, 1, "walked")], "b")
    shutil.copy(good, folder(root) / "copy.parquet")
    shutil.copy(good, folder(root, hour="13") / "copy.parquet")
    (folder(root) / "broken.parquet").write_bytes(b"nothing at all")
    far = write(root, [event(6, 1, "limit_hit"), event(7300, 1, "limit_hit")], "far")
    far.rename(root / "flow_events" / "far.parquet")
    write(root, [sample(1, 1) | {"state": "TIRED"}], table=FLOW_SAMPLES)
    (folder(root, FLOW_CLOSES) / "x.parquet").write_bytes(b"")
    found = []
    for files in (256, 0):
        monkeypatch.setattr("flowctl.analyze.records.read.DRIVER_FILES", files)
        read = read_all(either, root)
        found.append({key: item.as_dict() for key, item in read.accounts.items()} | {"identities": identities(read)})
    assert found[0] == found[1]
    noon, one = (read.accounts[("2026-03-01", hour), "flow_events"] for hour in ("12", "13"))
    assert noon.by_reason == {"event: unknown word": 1, "value: no number": 1, "file: copy": 2}
    assert (noon.files_in, noon.rows_in, noon.rows_out, noon.files_unknown_rows) == (4, 7, 3, 1)
    assert (one.files_by_reason, one.by_reason) == ({}, {"ts: not its hour": 2})
    outside = read.accounts[ODD_HOUR, "flow_events"]
    assert (outside.rows_in, outside.by_reason) == (2, {"file: outside of date=/hour= folders": 2})
    events = read.table("flow_events").collect()
    assert sorted((row.event, row.hour, row.ts.hour) for row in events) == [
        ("dropped", "12", 12),
        ("dropped", "12", 12),
        ("returned", "12", 12),
    ]
    assert (read.has("flow_closes"), len(read.table("flow_closes").collect()), read.has("flow_samples")) == (
        False,
        0,
        True,
    )
    assert read.table("flow_samples").collect() == []
    assert any(line.startswith("flow_closes is left out: none of its 1 files can be used") for line in read.warnings)
    aside = read.quarantine
    assert aside.keys() == {"flow_events", "flow_events_files", "flow_samples", "flow_closes_files"}
    rows = {row.reason: row for row in aside["flow_events"].collect()}
    assert rows.keys() == {"event: unknown word", "value: no number", "ts: not its hour"}
    told = json.loads(rows["event: unknown word"].row)
    assert (told["event"], told["ts"]) == ("walked", "2026-03-01T12:00:05Z")
    assert json.loads(rows["value: no number"].row)["value"] == "NaN"  # a bare one is no JSON
    assert rows["event: unknown word"].file.endswith("b.parquet")
    files = {row.reason: row for row in aside["flow_events_files"].collect()}
    assert files.keys() == {"copy", "not Parquet or damaged", "outside of date=/hour= folders"}
    assert (files["copy"].hour, files["copy"].rows, files["copy"].path.endswith("copy.parquet")) == ("12", 2, True)


def test_read_hours_when_times_have_no_date_tells_them_in_microseconds(either, tmp_path):
    moments = [1 << 62, -(1 << 63), int(at(1.5).timestamp() * 1e6)]
    path = write(tmp_path, [event(1, number, "dropped", value=math.nan) for number in range(3)])
    data = pq.read_table(path, partitioning=None)
    pq.write_table(data.set_column(0, "ts", pa.array(moments).cast(pa.timestamp("us", tz="UTC"))), path)
    rows = read_all(either, tmp_path).quarantine["flow_events"].collect()
    told = {"4611686018427387904", "-9223372036854775808", "2026-03-01T12:00:01.5Z"}
    assert {json.loads(row.row)["ts"] for row in rows} == told


@pytest.mark.parametrize("table", ["flow_closes", "flow_events"])
def test_read_hours_when_records_were_joined_beside_their_files_refuses(either, tmp_path, table):
    rows = [close(number, number) for number in range(1, 7)]
    if table == "flow_events":
        rows = [event(number, number, "dropped") for number in range(1, 7)]
    write(tmp_path, rows[:3], "a", table=TABLES[table])
    write(tmp_path, rows[3:], "b", table=TABLES[table])
    read_all(either, tmp_path)
    write(tmp_path, rows[2:5], "joined", table=TABLES[table], metadata={})
    with pytest.raises(ConfigError, match=rf"{table}: some records are there twice .*: 3, the first is") as caught:
        read_all(either, tmp_path)
    assert "joined.parquet" in str(caught.value)
    assert caught.value.hint == "were files joined or rewritten beside the old ones? Take one of the two away"


def test_read_hours_when_two_servers_share_a_name_and_no_record_reads_both(either, tmp_path):
    rows = [event(number, number, "dropped") for number in range(1, 7)]
    write(tmp_path, rows[::2], "a")
    write(tmp_path, rows[1::2], "b")
    assert rows_in(read_all(either, tmp_path), "flow_events") == [6]


def test_read_hours_when_no_file_can_be_used_says_why(either, tmp_path):
    write(tmp_path, [{"animal": "cat"}], schema=pa.schema([("animal", pa.string())]), metadata={})
    with pytest.raises(
        ConfigError, match=r"none of its 1 files can be used \(foreign schema: 1\).*it has no column"
    ) as caught:
        read_all(either, tmp_path)
    assert caught.value.hint == "is it a folder that a server wrote with --events?"


def test_read_hours_when_there_are_many_files_names_their_folders(either, tmp_path, monkeypatch):
    monkeypatch.setattr("flowctl.analyze.records.read.MOST_NAMED", 3)
    for number in range(4):
        write(tmp_path, [event(number, 1, "dropped")], str(number))
    write(tmp_path, [event(3601, 2, "dropped")], hour="13")
    live = write(tmp_path, [event(7201, 3, "dropped")], hour="14")
    for path in {*tmp_path.rglob("*.parquet")} - {live}:
        os.utime(path, (0, 0))
    (live.parents[1] / "hour=12/notes.txt").write_text("not data")
    read = read_all(either, tmp_path)
    names = read._named("flow_events", read.listing.files)
    assert [name.rpartition("=")[2] for name in names] == ["12", "13", "14/a.parquet"]
    rows = read.table("flow_events").collect()
    assert sorted((row.conn_id, row.hour) for row in rows) == [(1, "12")] * 4 + [(2, "13"), (3, "14")]


def test_read_hours_when_a_name_differs_in_case_alone_is_of_another_column(either, tmp_path):
    """A column that is spelt otherwise is one that is not known, beside ours or in its place."""
    schema = schema_of(TABLES["flow_events"])
    beside = schema.append(pa.field("Axis", pa.string()))
    write(tmp_path, [event(1, 1, "limit_hit", axis="bytes", Axis="x")], "a", schema=beside)
    place = schema.set(schema.get_field_index("axis"), pa.field("AXIS", pa.int64()))
    write(tmp_path, [event(2, 1, "limit_hit", AXIS=-5)], "b", schema=place)
    rows = sorted(read_all(either, tmp_path).table("flow_events").collect(), key=lambda row: row["ts"])
    assert [row.axis for row in rows] == ["bytes", None]


def test_read_hours_when_types_are_narrower_gives_the_same_values(either, tmp_path):
    types = {
        "queued_bytes": pa.int32(),
        "value": pa.float32(),
        "ts": pa.timestamp("ms", tz="UTC"),
        "rtt_us": pa.uint16(),
    }
    schema = schema_of(TABLES["flow_events"])
    schema = pa.schema([f.with_type(types.get(f.name, f.type)) for f in schema if f.name != "reason"])
    write(tmp_path, [event(1.5, 1, "dropped", queued_bytes=7, value=0.5, rtt_us=60_000)], schema=schema)
    (row,) = read_all(either, tmp_path).table("flow_events").collect()
    assert (row.queued_bytes, row.value, row.rtt_us, row.reason) == (7, 0.5, 60_000, None)
    assert row.ts == at(1.5).replace(tzinfo=None)


def test_read_hours_when_files_of_a_table_are_left_out_knows_that_they_are_there(either, tmp_path):
    write_closes(tmp_path, [close(10, 1)])
    write(tmp_path, [sample(1, 1)], table=FLOW_SAMPLES)
    (folder(tmp_path, FLOW_SAMPLES, hour="13") / "x.parquet").write_bytes(b"")
    listing = list_records(str(tmp_path))
    (samples,) = (file for file in listing.files if file.path.endswith("a.parquet") and file.table == "flow_samples")
    read = Read(lambda: either, listing, NOW_US)
    read.enter((file, facts) for file, facts in judged(look(read, listing.files)) if file != samples)
    assert (read.hours("flow_samples"), read.has("flow_samples")) == ([("2026-03-01", "12")], False)


def test_read_hours_when_a_name_has_line_breaks_tells_it_on_one_line(either, tmp_path):
    """The name of a file is text of anybody: a line break in it must not begin a line of the command."""
    write_closes(tmp_path, [close(10, 1)])
    (folder(tmp_path, FLOW_SAMPLES) / "x\nerror: \x1b[2Jforged.parquet").write_bytes(b"")
    (line,) = read_all(either, tmp_path).warnings
    assert line.startswith("flow_samples is left out")
    assert line.isprintable()
