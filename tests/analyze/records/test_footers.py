"""What is known of a file of records before Spark reads it: hostile files and rows of every kind, without Spark."""

from __future__ import annotations

import datetime as dt
import math
import os
import shutil
from types import SimpleNamespace

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from pyarrow.fs import LocalFileSystem
from record_kit import at, close, event, folder, sample, schema_of, write, write_closes

from flowctl.analyze.records import footers
from flowctl.analyze.records.checks import MOST_BY_COLUMN, MOST_COUNT, MOST_S, checks_of
from flowctl.analyze.records.footers import Facts, facts_of
from flowctl.analyze.records.listing import list_records
from flowctl.analyze.records.read import judged, look, meeting
from flowctl.records.telemetry.schema import FLIGHT, FLOW_CLOSES, FLOW_EVENTS, FLOW_SAMPLES, TABLES
from flowctl.records.telemetry.writer import arrow_schema

HOUR = ("2026-03-01", "12")
NOW_US = int(at(7200).timestamp() * 1e6)
DAY = dt.timedelta(days=1)


def facts(path, table="flow_events", hour=HOUR):
    return facts_of(LocalFileSystem(), str(path), table, hour, NOW_US)


def good(count=3):
    return [event(number, 7, "dropped", queued_bytes=number) for number in range(count)]


def test_facts_when_all_is_well_have_rows_span_and_newest(tmp_path):
    rows = good(5)
    found = facts(write(tmp_path, rows, uid="one"))
    assert (found.problem, found.reasons, found.rows, found.node, found.recorded) == (None, {}, 5, "n1", True)
    assert (found.first_seq, found.last_seq) == (rows[0]["seq"], rows[-1]["seq"])
    assert found.newest_us == int(at(4).timestamp() * 1e6)
    assert found.identity == f"uid one, 5 rows, seq {rows[0]['seq']} to {rows[-1]['seq']}"


def test_facts_when_statistics_prove_a_column_do_not_read_it(tmp_path, monkeypatch):
    """Of a healthy file only the words are read, since no statistics tell what lies between two of them."""
    read = []
    reasons = footers.reasons
    monkeypatch.setattr(footers, "reasons", lambda *args: read.extend(args[1]) or reasons(*args))
    facts(write(tmp_path, [*good(2), event(1, 7, "limit_hit", axis="bytes")]))
    assert {check.column for check in read} == {"event"}
    read.clear()
    facts(write_closes(tmp_path, [close(1, 1), close(2, 2)]), "flow_closes")
    assert {check.what for check in read} == {"no number"}


BAD_FILES = [
    (lambda path: path.write_bytes(path.read_bytes()[:-100]), "not Parquet or damaged"),
    (lambda path: path.write_bytes(b"PAR1 this is not what it says" + b"\x08\0\0\0PAR1"), "not Parquet or damaged"),
    (lambda path: path.write_bytes(path.read_bytes()[400:]), "not Parquet or damaged"),
    (lambda path: path.write_bytes(b"x"), "not Parquet or damaged"),
    (lambda path: path.write_bytes(b""), "empty file"),
    (lambda path: path.unlink(), "unreadable file"),
]


def test_files_when_they_are_links_out_pipes_or_devices_are_put_aside_unopened(tmp_path):
    """A pipe would be waited for and a device never ends; a link within the folder is a copy, one out of it is none."""
    path = write(tmp_path / "records", good())
    outside = write(tmp_path / "other", good(5))
    links = {"in": path.name, "out": outside, "zero": "/dev/zero", "nowhere": "nowhere", "loop": "loop.parquet"}
    for name, target in links.items():
        (path.parent / f"{name}.parquet").symlink_to(target)
    os.mkfifo(path.parent / "pipe.parquet")
    far = write(tmp_path / "far", good(7))
    far.rename(far.with_name("linked.parquet"))
    (tmp_path / "records" / "flow_closes").symlink_to(tmp_path / "far" / "flow_events")
    listing = list_records(str(tmp_path / "records"))
    read = SimpleNamespace(listing=listing, now_us=NOW_US)
    found = {
        file.path.rpartition("/")[2]: facts.detail for file, facts in judged(look(read, listing.files)) if facts.problem
    }
    assert found.pop("in.parquet").startswith("the same as another file") or found.pop(path.name)
    assert found == {
        **dict.fromkeys(("out.parquet", "linked.parquet"), "it is behind a link that leads out of the folder"),
        **dict.fromkeys(("zero.parquet", "nowhere.parquet", "loop.parquet", "pipe.parquet"), "it is no regular file"),
    }


def test_facts_when_a_file_has_more_rows_or_footer_than_any_recorder_writes_are_of_a_bad_file(tmp_path, monkeypatch):
    path, flights = write(tmp_path, good(50)), arrow_schema(FLIGHT)
    flights = pa.schema([field.with_nullable(True) for field in flights])
    monkeypatch.setattr(footers, "MOST_ROWS", 49)
    assert facts(path).problem == "too many rows"
    monkeypatch.setattr(footers, "MOST_ROWS", 10**8)
    alike = tmp_path / "alike.parquet"
    pq.write_table(pa.table([pa.nulls(100_000, field.type) for field in flights], schema=flights), alike)
    assert facts(alike, "flight").problem == "too many rows"  # as for replay: a few octets say so much
    monkeypatch.setattr(footers, "MOST_FOOTER_BYTES", 1000)
    assert (facts(path).problem, "1000 are read at most" in facts(path).detail) == ("not Parquet or damaged", True)


@pytest.mark.parametrize(("spoil", "problem"), BAD_FILES)
def test_facts_when_a_file_is_broken_say_how(tmp_path, spoil, problem):
    path = write(tmp_path, good(200))
    spoil(path)
    found = facts(path)
    assert (found.problem, found.rows is None or found.rows == 200) == (problem, True)
    assert found.detail


def test_facts_when_a_footer_announces_more_than_there_is_are_of_a_broken_file(tmp_path):
    path = tmp_path / "x.parquet"
    for length in (10_000, 0x7FFFFFFF):
        path.write_bytes(b"PAR1" + b"x" * 100 + length.to_bytes(4, "little") + b"PAR1")
        assert facts(path).problem == "not Parquet or damaged"


def test_facts_when_pages_are_overwritten_put_the_file_aside(tmp_path):
    path = write(tmp_path, [*good(500), event(1, 7, "limit_hit")])
    octets = bytearray(path.read_bytes())
    end = -int.from_bytes(octets[-8:-4], "little") - 8
    octets[4:end] = b"\xff" * len(octets[4:end])
    path.write_bytes(octets)
    assert facts(path).problem == "not Parquet or damaged"


def test_facts_when_each_row_has_the_same_long_text_take_it_once(tmp_path):
    path = write(tmp_path, good(1))
    data, count = pq.read_table(path, partitioning=None), 5_000
    of = {name: pa.repeat(data[name][0], count) for name in data.column_names}
    of["seq"] = pa.array(range(count))
    of["role"] = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), count), ["x" * 100_000])
    pq.write_table(pa.table(of, metadata=data.schema.metadata), path, store_schema=False)
    before = pa.total_allocated_bytes()
    peak = []
    reasons = footers.reasons
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(footers, "reasons", lambda *args: peak.append(pa.total_allocated_bytes()) or reasons(*args))
        assert facts(path).reasons == {"role: unknown word": count}
    assert max(peak) - before < 50_000_000


def test_facts_when_a_column_unpacks_to_much_put_the_file_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(footers, "MOST_UNPACKED_BYTES", 1 << 20)
    rows = [event(1, 7, "dropped", role=f"{number:0100}") for number in range(20_000)]
    found = facts(write(tmp_path, rows))
    assert (found.problem, found.rows) == ("too large unpacked", 20_000)
    assert found.detail == "role unpacks to more than 1 MiB"


def of_schema(**types):
    schema = schema_of(FLOW_EVENTS)
    return pa.schema([field.with_type(types[field.name]) if field.name in types else field for field in schema])


WHOLE = {
    "of another table": {"metadata": {"flowctl.table": "flow_samples"}},
    "other format": {"metadata": {"flowctl.table": "flow_events", "flowctl.format": "4"}},
    "foreign schema": {"schema": pa.schema([("animal", pa.string())])},
    "wrong types": {"schema": of_schema(queued_bytes=pa.string())},
}


@pytest.mark.parametrize("problem", WHOLE)
def test_facts_when_a_whole_file_does_not_fit_say_why_and_count_its_rows(tmp_path, problem):
    rows = [{"animal": "cat"}] * 3 if problem == "foreign schema" else [event(1, 7, "dropped")] * 3
    found = facts(write(tmp_path, rows, **WHOLE[problem]))
    assert (found.problem, found.rows) == (problem, 3)


def test_facts_when_spark_lacks_the_codec_put_the_file_aside(tmp_path):
    """What Arrow can unpack and Spark cannot would end the run: the footer names it."""
    path = write(tmp_path, good(3))
    pq.write_table(pq.read_table(path, partitioning=None), path, compression="brotli")
    found = facts(path)
    assert (found.problem, found.detail, found.rows) == ("unknown codec", "it is compressed by BROTLI", 3)


@pytest.mark.parametrize("said", ["2", "0", "x", "-1", "99999999999999999999"])
def test_facts_when_the_format_is_no_number_that_is_known_do_not_guess(tmp_path, said):
    found = facts(write(tmp_path, good(1), metadata={"flowctl.format": said}))
    assert found.problem == "other format"


FITTING = {
    "narrow numbers": {"queued_bytes": pa.int32(), "value": pa.float32(), "rtt_us": pa.uint16()},
    "milliseconds": {"ts": pa.timestamp("ms", tz="UTC")},
    "another zone": {"ts": pa.timestamp("us", tz="Asia/Tokyo")},
    "large texts": {"reason": pa.large_string()},
    "dictionaries": {"role": pa.dictionary(pa.int32(), pa.string())},
}


@pytest.mark.parametrize("kind", FITTING)
def test_facts_when_types_hold_the_same_take_the_file(tmp_path, kind):
    rows = [event(1, 7, "dropped", role="play", rtt_us=5), event(2, 7, "returned", role="publish", value=1.5)]
    found = facts(write(tmp_path, rows, schema=of_schema(**FITTING[kind])))
    assert (found.problem, found.reasons, found.newest_us) == (None, {}, int(at(2).timestamp() * 1e6))


def test_facts_when_columns_are_missing_or_unknown_take_the_file(tmp_path):
    schema = pa.schema([item for item in schema_of(FLOW_EVENTS) if item.name not in {"reason", "value", "role"}])
    found = facts(write(tmp_path, good(2), schema=schema.append(pa.field("mood", pa.string()))))
    assert (found.problem, found.reasons, found.rows) == (None, {}, 2)


BAD_EVENTS = {
    "node: null": {"node": None},
    "seq: null": {"seq": None},
    "ts: null": {"ts": None},
    "conn_id: null": {"conn_id": None},
    "event: null": {"event": None},
    "ts: too old": {"ts": dt.datetime(2019, 12, 31, tzinfo=dt.UTC)},
    "ts: in the future": {"ts": at(0) + 3 * DAY},
    "ts: not its hour": {"ts": at(3600)},
    "queued_bytes: negative": {"queued_bytes": -1},
    "queued_bytes: too large": {"queued_bytes": MOST_COUNT},
    "seq: too large": {"seq": MOST_BY_COLUMN["seq"]},
    "conn_id: negative": {"conn_id": -1},
    "state_ms: negative": {"state_ms": -0.5},
    "value: no number": {"value": math.nan},
    "limit: no number": {"limit": -math.inf},
    "queued_age_ms: no number": {"queued_age_ms": 1.1e12},
    "event: unknown word": {"event": "went for a walk"},
    "role: unknown word": {"role": "conductor"},
    "state_to: unknown word": {"state_to": "TIRED"},
}
BAD_CLOSES = {
    "opened_at: null": {"opened_at": None},
    "opened_at: too old": {"opened_at": dt.datetime(1970, 1, 1, tzinfo=dt.UTC)},
    "duration_s: negative": {"duration_s": -1.0},
    "duration_s: no number": {"duration_s": MOST_S + 1},
    "duration_s: null": {"duration_s": None},
    "time_ready_ms: no number": {"time_ready_ms": math.nan},
    "delay_p99_ms: no number": {"delay_p99_ms": math.inf},
    "pictures_wanted: negative": {"pictures_wanted": -1},
    "role: unknown word": {"role": ""},
}
BAD_SAMPLES = {
    "interval_ms: null": {"interval_ms": None},
    "state: unknown word": {"state": "ready"},
    "accepted_bytes_key: negative": {"accepted_bytes_key": -5},
    "viewer_delay_ms: no number": {"viewer_delay_ms": math.nan},
    "picture_share: no number": {"picture_share": 11.0},
}
BAD_ROWS = [
    *((FLOW_EVENTS, event(9, 7, "dropped"), reason, columns) for reason, columns in BAD_EVENTS.items()),
    *((FLOW_CLOSES, close(9, 7), reason, columns) for reason, columns in BAD_CLOSES.items()),
    *((FLOW_SAMPLES, sample(9, 7), reason, columns) for reason, columns in BAD_SAMPLES.items()),
]


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize(
    ("table", "row", "reason", "columns"), BAD_ROWS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_facts_when_a_row_is_wrong_count_that_row_with_its_reason(tmp_path, table, row, reason, columns, statistics):
    path = write(tmp_path, [row, row | columns, row], table=table)
    if not statistics:
        data = pq.read_table(path, partitioning=None)
        pq.write_table(data, path, write_statistics=False)
    found = facts(path, table.name)
    assert (found.problem, found.reasons, found.rows) == (None, {reason: 1}, 3)


def test_facts_when_a_row_fails_twice_name_its_first_reason(tmp_path):
    bad = {"node": None, "queued_bytes": -1, "event": "nonsense", "ts": at(9000)}
    found = facts(write(tmp_path, [*good(1), event(1, 1, "dropped") | bad]))
    assert sum(found.reasons.values()) == 1


def test_facts_when_rows_are_wrong_in_several_ways_count_each(tmp_path):
    rows = [event(1, 1, "walked"), event(2, 1, "dropped", value=math.nan), event(3, 1, "dropped")]
    assert facts(write(tmp_path, rows)).reasons == {"event: unknown word": 1, "value: no number": 1}


def test_facts_when_values_are_at_the_edge_take_them(tmp_path):
    edge = [
        event(0, 0, "dropped", queued_bytes=0, value=-3.0),
        event(3600 - 1e-6, 7, "returned", queued_bytes=MOST_COUNT - 1, limit=1e12),
    ]
    assert facts(write(tmp_path, edge)).reasons == {}


def test_facts_when_times_are_beyond_those_of_python_put_only_the_row_aside(tmp_path):
    path = write(tmp_path, good(2))
    data = pq.read_table(path, partitioning=None)
    ts = pa.array([int(at(1).timestamp() * 1e6), 1 << 62]).cast(pa.timestamp("us", tz="UTC"))
    pq.write_table(data.set_column(0, "ts", ts), path)
    found = facts(path)
    assert (found.problem, found.reasons, found.newest_us) == (
        None,
        {"ts: in the future": 1},
        int(at(1).timestamp() * 1e6),
    )
    assert isinstance(found.newest_us, int)


def test_facts_when_a_file_is_copied_are_of_the_same_identity(tmp_path):
    for metadata in (None, {}):
        path = write(tmp_path, good(4), metadata=metadata)
        copy = folder(tmp_path, hour="13") / "copy.parquet"
        shutil.copy(path, copy)
        assert facts(path).identity == facts(copy, hour=("2026-03-01", "13")).identity
        data = pq.read_table(path, partitioning=None)
        halves = [data.slice(0, 2), data.slice(2)]
        for half, name in zip(halves, ("x", "y"), strict=True):
            pq.write_table(half, tmp_path / f"{name}.parquet")
        assert len({facts(tmp_path / f"{name}.parquet").identity for name in "xy"} | {facts(path).identity}) == 3


def test_facts_when_a_table_of_every_kind_is_checked_name_columns_that_there_are():
    for name, table in TABLES.items():
        checks = checks_of(name, HOUR, NOW_US)
        assert {check.column for check in checks} <= set(table.names)
        assert {check.column for check in checks if check.what == "null"} == {
            column.name for column in table.columns if not column.nullable
        }


SPANS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30), st.integers(0, 6), st.booleans()), max_size=12)


@given(SPANS)
@hypothesis_settings(max_examples=300, deadline=None)
def test_meeting_when_ranges_meet_finds_them(drawn):
    files = [
        Facts(f"f{number}", node=node, first_seq=low, last_seq=low + length, recorded=recorded)
        for number, (node, low, length, recorded) in enumerate(drawn)
    ]
    meet = any(
        one is not other
        and one.node == other.node
        and one.first_seq <= other.last_seq
        and other.first_seq <= one.last_seq
        for one in files
        for other in files
    )
    assert meeting(files) == (meet and any(item.recorded for item in files))


@pytest.mark.parametrize(("span", "found"), [({}, True), ({"node": "n", "first_seq": 10, "last_seq": 12}, False)])
def test_meeting_when_a_file_does_not_tell_looks_at_all(span, found):
    known = Facts("y", node="n", first_seq=5, last_seq=9, recorded=True)
    assert meeting([Facts("x", **span), known]) == found
    assert not meeting([Facts("x", recorded=True)])
