"""Reading tables: files and rows that do not fit are put aside with their reason, and every row is accounted for."""

from __future__ import annotations

import datetime as dt
import json
import os

import pyarrow as pa
import pytest
from record_kit import NOON, at, event, folder, numbers, schema_of, write

from flowctl.errors import ConfigError, InternalError
from flowctl.pipeline.tables import io
from flowctl.pipeline.tables.io import read_table, write_quarantine
from flowctl.telemetry.schema import FLOW_EVENTS, FORMAT

NOW_US = int(NOON.timestamp() * 1e6) + 3_600_000_000


def read(spark, root, **more):
    return read_table(spark, str(root), "flow_events", now_us=NOW_US, **more)


def good(count=3):
    return [event(number, 7, "sample", queued_bytes=number) for number in range(count)]


def reasons(source):
    return source.accounts.by_reason


def test_read_when_all_is_well_gives_all_rows_and_needs_no_check_of_numbers(spark, tmp_path):
    """Rows in = rows out; statistics answered everything but the words."""
    write(tmp_path, good(5))
    source = read(spark, tmp_path)
    accounts = source.accounts
    assert (accounts.files_in, accounts.rows_in, accounts.rows_out, accounts.rows_quarantined) == (1, 5, 5, 0)
    assert [row["queued_bytes"] for row in source.frame.orderBy("seq").collect()] == [0, 1, 2, 3, 4]
    assert "queued_bytes" not in plan_of(source.frame.select("node"))
    assert source.frame.columns == list(FLOW_EVENTS.names)


def plan_of(frame):
    return frame._jdf.queryExecution().executedPlan().toString()


BAD_FILES = {
    "truncated or not Parquet": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "not Parquet or damaged": lambda path: path.write_bytes(b"PAR1 this is not what it says" + b"\x08\0\0\0PAR1"),
    "empty file": lambda path: path.write_bytes(b""),
    "damaged": lambda path: path.write_bytes(path.read_bytes()[400:]),
}


@pytest.mark.parametrize("problem", BAD_FILES)
def test_read_when_a_file_is_broken_puts_it_aside_and_reads_the_rest(spark, tmp_path, problem):
    """A broken file is named with its reason and is not opened by the job; the rows of others are all there."""
    write(tmp_path, good(3), "a")
    BAD_FILES[problem](write(tmp_path, good(200), "b"))
    source = read(spark, tmp_path)
    assert source.accounts.files_by_reason == {problem: 1}
    assert source.accounts.rows_out == source.frame.count() == 3
    ((path, reason, _, rows, _),) = source.bad_files
    assert path.endswith("b.parquet")
    assert reason == problem
    assert source.accounts.files_unknown_rows == (rows is None)
    assert source.accounts.rows_in == 3 + (rows or 0)
    source.accounts.check()


def test_read_when_a_file_has_another_schema_puts_it_aside_with_its_rows_counted(spark, tmp_path):
    """A Parquet file of something else is quarantined; how many rows it has is known."""
    write(tmp_path, good(3), "a")
    write(tmp_path, [{"x": 1}] * 9, "b", schema=pa.schema([("x", pa.int64())]), metadata={})
    source = read(spark, tmp_path)
    assert source.accounts.files_by_reason == {"foreign schema": 1}
    assert reasons(source) == {"file: foreign schema": 9}
    assert (source.accounts.rows_in, source.accounts.rows_out) == (12, 3)
    assert "no column ts, node, seq, conn_id, event" in source.bad_files[0][2]


def test_read_when_a_column_has_another_type_puts_the_file_aside(spark, tmp_path):
    """A file whose queued_bytes are texts is quarantined and says so, instead of failing in the middle of a job."""
    write(tmp_path, good(3), "a")
    position = FLOW_EVENTS.names.index("queued_bytes")
    schema = schema_of(FLOW_EVENTS).set(position, pa.field("queued_bytes", pa.string()))
    write(tmp_path, [event(1, 7, "sample", queued_bytes="many")], "b", schema=schema)
    source = read(spark, tmp_path)
    assert source.accounts.files_by_reason == {"wrong types": 1}
    assert source.bad_files[0][2] == "queued_bytes is string"
    assert source.frame.count() == 3


def test_read_when_a_file_is_newer_or_of_another_table_puts_it_aside(spark, tmp_path):
    """A format that is not known yet is not guessed at, and samples among events are no events."""
    write(tmp_path, good(3), "a")
    write(tmp_path, good(1), "b", metadata={"flowctl.table": "flow_events", "flowctl.format": str(FORMAT + 1)})
    write(tmp_path, good(2), "c", metadata={"flowctl.table": "flow_samples", "flowctl.format": "1"})
    source = read(spark, tmp_path)
    assert source.accounts.files_by_reason == {"newer format": 1, "of another table": 1}
    assert source.accounts.rows_out == 3


def test_read_when_columns_are_missing_or_unknown_fills_and_ignores_them(spark, tmp_path):
    """A file of an older writer lacks columns that may be null, one of a newer has more: both are read."""
    old = pa.schema([field for field in schema_of(FLOW_EVENTS) if field.name not in {"reason", "viewer_delay_ms"}])
    write(tmp_path, [event(1, 7, "sample")], "old", schema=old)
    new = schema_of(FLOW_EVENTS).append(pa.field("mood", pa.string()))
    write(tmp_path, [event(2, 7, "sample", reason="r", mood="good")], "new", schema=new)
    rows = read(spark, tmp_path).frame.orderBy("ts").collect()
    assert [(row["reason"], row["viewer_delay_ms"]) for row in rows] == [(None, None), ("r", None)]


def test_read_when_types_are_narrower_takes_them(spark, tmp_path):
    """32 bit numbers and milliseconds are read as what they are, since nothing is lost."""
    schema = schema_of(FLOW_EVENTS)
    for name, kind in (("queued_bytes", pa.int32()), ("value", pa.float32()), ("ts", pa.timestamp("ms", tz="UTC"))):
        schema = schema.set(schema.get_field_index(name), pa.field(name, kind))
    write(tmp_path, [event(1, 7, "sample", queued_bytes=5, value=0.5)], schema=schema)
    (row,) = read(spark, tmp_path).frame.collect()
    assert (row["queued_bytes"], row["value"]) == (5, 0.5)


@pytest.mark.parametrize("same_uid", [True, False])
def test_read_when_a_file_is_there_twice_counts_it_once(spark, tmp_path, same_uid):
    """Copies are known by the uid of their writer, or, without one, by size and footer; the first by name is kept."""
    path = write(tmp_path, good(4), "b", metadata=None if same_uid else {})
    copy = folder(tmp_path, hour="13") / "a.parquet"
    copy.write_bytes(path.read_bytes())
    source = read(spark, tmp_path)
    assert source.accounts.files_by_reason == {"copy": 1}
    assert (source.accounts.rows_in, source.accounts.rows_out) == (8, 4)
    assert source.bad_files[0][0].endswith("hour=13/a.parquet")


BAD_ROWS = {
    "node: null": {"node": None},
    "seq: null": {"seq": None},
    "event: null": {"event": None},
    "ts: too old": {"ts": dt.datetime(2019, 12, 31, tzinfo=dt.UTC)},
    "ts: in the future": {"ts": at(0) + dt.timedelta(days=3)},
    "ts: not its date": {"ts": at(0) - dt.timedelta(days=2)},
    "queued_bytes: negative": {"queued_bytes": -1},
    "state_ms: negative": {"state_ms": -0.5},
    "event: unknown word": {"event": "went for a walk"},
    "role: unknown word": {"role": "conductor"},
    "state_to: unknown word": {"state_to": "TIRED"},
}


@pytest.mark.parametrize("reason", BAD_ROWS)
def test_read_when_a_row_is_wrong_puts_that_row_aside(spark, tmp_path, reason):
    """One row goes to quarantine with the reason and all its columns; its neighbours stay."""
    write(tmp_path, [*good(2), event(9, 7, "sample", axis="x") | BAD_ROWS[reason]])
    source = read(spark, tmp_path)
    assert reasons(source) == {reason: 1}
    assert (source.accounts.rows_in, source.accounts.rows_out) == (3, 2)
    assert source.frame.count() == 2
    (row,) = source.quarantined_frame.collect()
    assert row["reason"] == reason
    assert json.loads(row["row"])["axis"] == "x"
    assert row["file"].endswith("a.parquet")


def test_read_when_values_are_at_the_edge_takes_them(spark, tmp_path):
    """Zero is not negative, a value may be below zero, and a day beside the folder's is a matter of zones."""
    write(
        tmp_path,
        [
            event(0, 7, "sample", queued_bytes=0, value=-3.0),
            event(-86_400, 7, "sample"),
            event(86_400, 7, "sample"),
            event(1, 7, "step_changed", state_from="FULL", state_to="KEY_FRAMES"),
        ],
    )
    assert read(spark, tmp_path).accounts.by_reason == {}


def test_read_when_a_column_has_no_statistics_checks_its_rows(spark, tmp_path):
    """A file without statistics proves nothing, so its rows are looked at one by one."""
    import pyarrow.parquet as pq

    data = pa.Table.from_pylist([*good(2), event(1, 7, "sample", rtt_us=-1)], schema=schema_of(FLOW_EVENTS))
    pq.write_table(data, folder(tmp_path) / "a.parquet", write_statistics=False)
    assert reasons(read(spark, tmp_path)) == {"rtt_us: negative": 1}


def test_read_when_the_job_counts_by_itself_settles_to_the_same_accounts(spark, tmp_path):
    """`later` leaves the accounts open until the job says how many rows it used; a wrong number is an error."""
    write(tmp_path, [*good(3), event(1, 7, "nonsense")])
    source = read(spark, tmp_path, count="later")
    assert not source.accounts.settled
    source.settle(3)
    assert source.accounts.as_dict() == read(spark, tmp_path).accounts.as_dict()
    with pytest.raises(InternalError, match="4 rows in, but 2 out and 1 quarantined"):
        read(spark, tmp_path, count="later").settle(2)


@pytest.mark.parametrize("large", [False, True])
def test_preflight_when_on_the_workers_says_what_it_says_in_the_driver(spark, tmp_path, monkeypatch, large):
    """Few and many files are looked at in different places, by the same rules."""
    rows = good(3)
    write(tmp_path, rows, "a", uid="one")
    write(tmp_path, rows, "b", uid="one")
    write(tmp_path, [event(1, 7, "sample", rtt_us=-1)], "c")
    (folder(tmp_path) / "d.parquet").write_bytes(b"nothing")
    monkeypatch.setattr(io, "DRIVER_FILES", 0 if large else 256)
    source = read(spark, tmp_path)
    assert source.accounts.as_dict() == {
        "table": "flow_events",
        "files_in": 4,
        "files_quarantined": 2,
        "files_by_reason": {"copy": 1, "truncated or not Parquet": 1},
        "files_unknown_rows": 1,
        "rows_in": 7,
        "rows_out": 3,
        "rows_quarantined": 4,
        "by_reason": {"file: copy": 3, "rtt_us: negative": 1},
    }
    assert [row[1] for row in source.bad_files] == ["copy", "truncated or not Parquet"]


def test_read_when_files_are_unfinished_or_hidden_leaves_them_alone(spark, tmp_path):
    """A name that begins with a dot or an underscore is not data yet, and other endings are none at all."""
    path = write(tmp_path, good(3))
    for name in (".b.parquet", "_c.parquet", "notes.txt"):
        (folder(tmp_path) / name).write_bytes(path.read_bytes()[:50])
    assert read(spark, tmp_path).accounts.files_in == 1


def test_read_when_names_have_blanks_and_signs_finds_and_excludes_them(spark, tmp_path):
    """Folders may be called anything; a broken file in such a folder is put aside as elsewhere."""
    root = tmp_path / "my events, 100% & more"
    write(root, good(3), "a")
    write(root, good(3), "b c").write_bytes(b"broken")
    source = read(spark, root)
    assert (source.accounts.rows_out, source.accounts.files_quarantined) == (3, 1)
    assert source.frame.count() == 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: None, "does not exist"),
        (lambda root: root.mkdir(), "has no flow_events"),
        (folder, "has no file"),
        (lambda root: (folder(root) / "a.parquet").write_bytes(b""), "none of its 1 files can be used"),
    ],
)
def test_read_when_there_is_nothing_says_what_is_missing(spark, tmp_path, make, words):
    """Each way of being empty has an error in words, with a hint at --events."""
    make(tmp_path / "ev")
    with pytest.raises(ConfigError, match=words) as caught:
        read(spark, tmp_path / "ev")
    assert "--events" in caught.value.hint


def test_read_when_the_folder_may_not_be_read_says_so(spark, tmp_path, monkeypatch):
    """A folder without permission is not told as one without records. Who runs tests as root may read everything."""
    monkeypatch.setattr(io.os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="permission denied"):
        read(spark, tmp_path)


def test_read_when_the_folder_is_that_of_the_table_says_which_one_to_give(spark, tmp_path):
    """One folder too deep is a slip that has its own hint."""
    write(tmp_path, good(3), "a")
    with pytest.raises(ConfigError, match="flow_events has no flow_events") as caught:
        read(spark, tmp_path / "flow_events")
    assert caught.value.hint == "that is the folder of one table: give the one it is in"


def test_quarantine_when_written_has_files_and_rows(spark, tmp_path):
    """What was put aside lies below OUT/quarantine: rows with their file and reason, files with theirs."""
    write(tmp_path, [*good(2), event(1, 7, "nonsense")], "a")
    write(tmp_path, good(2), "b").write_bytes(b"")
    outputs = write_quarantine(spark, read(spark, tmp_path), str(tmp_path / "out"))
    assert sorted(outputs) == ["quarantine/flow_events", "quarantine/flow_events_files"]
    rows = spark.read.parquet(outputs["quarantine/flow_events"]).collect()
    assert [row["reason"] for row in rows] == ["event: unknown word"]
    files = spark.read.parquet(outputs["quarantine/flow_events_files"]).collect()
    assert [(row["reason"], row["rows"]) for row in files] == [("empty file", None)]


def test_read_when_there_are_many_small_files_reads_all_and_warns(spark, tmp_path, monkeypatch):
    """Hundreds of tiny files are read, counted, and told of."""
    from flowctl.pipeline.tables import preflight

    first = write(tmp_path, good(2), "first", metadata={})
    for number in range(300):
        os.link(first, first.with_name(f"l{number}.parquet"))
    write(tmp_path, [event(1, 8, "sample", axis=str(next(numbers)))], "other")
    monkeypatch.setattr(preflight, "MANY_FILES", 1)
    source = read(spark, tmp_path)
    assert (source.accounts.files_in, source.accounts.files_quarantined) == (302, 300)
    assert (source.accounts.rows_in, source.accounts.rows_out) == (603, 3)
    assert "join them" in source.accounts.warnings[0]


def test_read_when_hopelessly_many_files_are_bad_refuses(spark, tmp_path, monkeypatch):
    """A folder with more bad files than can be named is an error, not an endless plan."""
    from flowctl.pipeline.tables import preflight

    write(tmp_path, good(2))
    for number in range(3):
        (folder(tmp_path) / f"bad{number}.parquet").write_bytes(b"")
    monkeypatch.setattr(preflight, "MAX_BAD_FILES", 2)
    with pytest.raises(ConfigError, match="3 of 4 files cannot be used"):
        read(spark, tmp_path)
