"""Record files: whole or not there, within their bounds, and readable by anybody."""

from __future__ import annotations

import datetime as dt
import os
import stat
import uuid

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from telemetry_kit import WALL_NS, everything, files, options, read, recorder

from flowctl.errors import ConfigError
from flowctl.records.telemetry import writer as writing
from flowctl.records.telemetry.events import event_row
from flowctl.records.telemetry.recorder import Recorder
from flowctl.records.telemetry.schema import FLIGHT, FLOW_EVENTS, FLOW_SAMPLES, TABLES, EventName
from flowctl.records.telemetry.writer import RecordFiles, TableWriter, arrow_schema

START_US = WALL_NS // 1000


def row(number=0, **values):
    return event_row(START_US + number, 0, EventName.LIMIT_HIT, value=float(number), **values)


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_schema_when_made_for_arrow_has_the_columns_of_the_contract(table):
    schema = arrow_schema(table, {"uid": "1"})
    assert tuple(schema.names) == table.names
    assert [field.nullable for field in schema] == [column.nullable for column in table.columns]
    assert schema.metadata == {b"flowctl.uid": b"1"}
    assert str(schema.field("ts").type) == "timestamp[us, tz=UTC]"


def test_file_when_finished_stands_where_its_first_row_says(tmp_path):
    made = recorder(tmp_path)
    table = made._writers["flow_events"]
    table.add_rows([row(0), row(1)])
    assert table.finish()
    (path,) = files(tmp_path)
    when = dt.datetime.fromtimestamp(START_US / 1e6, dt.UTC)
    folder = f"flow_events/date={when:%Y-%m-%d}/hour={when:%H}"
    assert str(path.relative_to(tmp_path)) == f"{folder}/n1-{START_US}-0.parquet"
    metadata = parquet.read_schema(path).metadata
    assert metadata[b"flowctl.table"] == b"flow_events"
    assert metadata[b"flowctl.format"] == b"3"
    assert metadata[b"flowctl.node"] == b"n1"
    assert len(metadata[b"flowctl.uid"]) == 32
    assert parquet.read_metadata(path).row_group(0).column(0).compression == "ZSTD"
    assert everything(tmp_path) == [path]


def test_rows_when_written_over_several_files_have_growing_numbers(tmp_path):
    made = recorder(tmp_path)
    table = made._writers["flow_events"]
    for number in range(3):
        table.add_rows([row(2 * number), row(2 * number + 1)])
        table.finish()
    found = read(tmp_path)
    assert [item["seq"] for item in found] == list(range(START_US, START_US + 6))
    assert [item["value"] for item in found] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert {item["node"] for item in found} == {"n1"}
    uids = {parquet.read_schema(path).metadata[b"flowctl.uid"] for path in files(tmp_path)}
    assert len(uids) == 3


def test_row_when_it_does_not_fit_is_left_out_and_counted(tmp_path):
    made = recorder(tmp_path)
    table = made._writers["flow_events"]
    table.add_rows([row(0), (1, 2), row(1, sent_bytes="many"), row(2)[:3] + (None,) * 21 + (1, 2, 3), row(3)])
    table.add_rows([(None,)])
    table.finish()
    assert [item["value"] for item in read(tmp_path)] == [0.0, 3.0]
    assert table.books.refused_rows == 4


def test_files_when_due_by_time_or_by_size_are_finished(tmp_path):
    made = recorder(tmp_path, rotate_s=10.0, file_bytes=20_000)
    table = made._writers["flow_events"]
    table.add_rows([row()])
    since = table._first_at
    table.finish_if_due(since + 9.9)
    assert files(tmp_path) == []
    table.finish_if_due(since + 10.0)
    assert len(files(tmp_path)) == 1
    table.add_rows([row(number, detail="x" * 100) for number in range(300)])
    table.finish_if_due(table._first_at)
    assert len(files(tmp_path)) == 2


def test_rows_when_the_disk_refuses_are_kept_and_written_later(tmp_path, monkeypatch):
    made = recorder(tmp_path)
    table = made._writers["flow_events"]
    table.add_rows([row(0)])

    def full(number):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(writing.os, "fsync", full)
        assert not table.finish()
        assert everything(tmp_path) == []
        table.finish_if_due(table._retry_at - 0.1)  # the disk is left alone for a while
        assert table.books.failures == 1
    assert "No space left" in made.statistics().last_error
    table.add_rows([row(1)])
    assert table.finish()
    assert [item["value"] for item in read(tmp_path)] == [0.0, 1.0]
    assert made.statistics().last_error == ""
    assert table.books.lost_rows == 0


def test_rows_when_the_disk_refuses_for_too_long_are_lost_from_the_oldest(tmp_path):
    made = recorder(tmp_path / "events", queue_rows=100)
    table = made._writers["flow_events"]
    (tmp_path / "events").rename(tmp_path / "away")
    (tmp_path / "events").write_text("not a folder")
    table.add_rows([row(number) for number in range(60)])
    assert not table.finish()
    table.add_rows([row(number) for number in range(60, 120)])
    assert table.books.lost_rows == 60
    (tmp_path / "events").unlink()
    assert table.finish()
    assert [item["value"] for item in read(tmp_path / "events")] == [float(number) for number in range(60, 120)]


HOUR_US = 3_600_000_000


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(-3 * HOUR_US, 3 * HOUR_US), min_size=1, max_size=5), min_size=1, max_size=6))
def test_rows_when_of_several_hours_stand_in_the_folders_of_each(tmp_path, batches):
    folder = tmp_path / uuid.uuid4().hex
    made = recorder(folder)
    table = made._writers["flow_events"]
    for number, batch in enumerate(batches):
        table.add_rows([row(us) for us in batch])
        if number % 2:
            assert table.finish()
    assert table.finish()
    paths = files(folder)
    assert len({path.name for path in paths}) == len(paths) == table.books.files
    for path in paths:
        for item in parquet.read_table(path, partitioning=None).to_pylist():
            assert path.parent == folder / f"flow_events/date={item['ts']:%Y-%m-%d}/hour={item['ts']:%H}"
    told = sorted(item["value"] for item in read(folder))
    assert told == sorted(float(us) for batch in batches for us in batch)
    books = table.books
    assert (books.written_rows, books.waiting_rows, table._bytes) == (len(told), 0, 0)


def test_rows_of_a_flight_when_the_hour_turns_stay_in_the_folder_of_its_begin(tmp_path):
    began_us = START_US // HOUR_US * HOUR_US + HOUR_US - 1_000_000
    rows = [dict.fromkeys(FLIGHT.names) | {"ts": began_us + us, "offset_us": us} for us in (0, 999_999, 5_000_000)]
    rows = [row | {"conn_id": 1, "number": number, "kind": "queued"} for number, row in enumerate(rows)]
    made = recorder(tmp_path)
    table = made._writers["flight"]
    table.add_rows([tuple(row[name] for name in FLIGHT.names if name not in ("node", "seq")) for row in rows])
    assert table.finish()
    (path,) = files(tmp_path, "flight")
    when = dt.datetime.fromtimestamp(began_us / 1e6, dt.UTC)
    assert path.parent == tmp_path / f"flight/date={when:%Y-%m-%d}/hour={when:%H}"


def test_rows_when_one_hour_cannot_be_written_are_kept_alone(tmp_path):
    made = recorder(tmp_path)
    table = made._writers["flow_events"]
    table.add_rows([row(0), row(HOUR_US), row(1)])
    when = dt.datetime.fromtimestamp(START_US / 1e6, dt.UTC) + dt.timedelta(hours=1)
    in_the_way = tmp_path / f"flow_events/date={when:%Y-%m-%d}/hour={when:%H}"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("not a folder")
    assert not table.finish()
    assert [item["value"] for item in read(tmp_path)] == [0.0, 1.0]
    assert table.books.waiting_rows == 1
    in_the_way.unlink()
    assert table.finish()
    assert sorted(item["value"] for item in read(tmp_path)) == [0.0, 1.0, float(HOUR_US)]


def test_folder_when_removed_while_recording_is_made_again(tmp_path):
    made = recorder(tmp_path / "events")
    (tmp_path / "events").rmdir()
    table = made._writers["flow_events"]
    table.add_rows([row()])
    assert table.finish()
    assert len(read(tmp_path / "events")) == 1


def test_leftovers_when_a_process_crashed_are_removed_if_they_are_ours_and_old(tmp_path):
    folder = tmp_path / "flow_events" / "date=2026-01-01" / "hour=00"
    folder.mkdir(parents=True)
    old = folder / ".n1-1-0.parquet.part"
    kept = [
        folder / ".n1-1-1.parquet.part",
        folder / ".n1-b-1-1.parquet.part",
        folder / ".x-n1-1-1.parquet.part",
        folder / ".n1-1-1.parquet",
        folder / "n1-1-2.parquet",
    ]
    for path in [old, *kept]:
        path.write_bytes(b"half")
        os.utime(path, (1, 1))
    os.utime(kept[0])
    recorder(tmp_path)
    assert not old.exists()
    assert all(path.exists() for path in kept)


def test_disk_when_the_share_is_used_up_loses_the_oldest_files_of_this_node(tmp_path):
    folder = tmp_path / "flow_events" / "date=2026-01-01" / "hour=00"
    folder.mkdir(parents=True)
    earlier, other = folder / "n1-1-0.parquet", folder / "n2-1-0.parquet"
    for path in (earlier, other):
        path.write_bytes(b"x" * 50_000)
        os.utime(path, (1, 1))
    made = recorder(tmp_path, max_bytes=60_000)
    table = made._writers["flow_events"]
    for number in range(4):
        table.add_rows([row(number, detail=os.urandom(4000).hex())])
        table.finish()
    assert not earlier.exists()
    assert other.exists()
    assert sum(path.stat().st_size for path in files(tmp_path) if path.name.startswith("n1-")) <= 60_000
    assert [item["value"] for item in read_own(tmp_path)][-1] == 3.0


def left_of(folder):
    return sorted(int(path.stem.rsplit("-", 1)[1]) for path in files(folder) if path.name.startswith("n1-"))


def fill(made, count, hours=1):
    """Write files of 8 kB and more, each of the hour after that of the one before, round and round."""
    table = made._writers["flow_events"]
    for number in range(count):
        table.add_rows([row(number % hours * HOUR_US, detail=os.urandom(4000).hex())])
        assert table.finish()


@pytest.mark.parametrize("hours", [1, 3])
def test_disk_when_the_clock_is_set_back_loses_those_that_were_written_first(tmp_path, hours):
    fill(recorder(tmp_path), 8, hours)
    ahead = START_US / 1e6 + 86_400
    for path in files(tmp_path):
        os.utime(path, (ahead, ahead))
        path.rename(path.with_name(path.name.replace(str(START_US), str(START_US + 86_400_000_000))))
    made = recorder(tmp_path, max_bytes=60_000)
    assert left_of(tmp_path) == list(range(8))
    fill(made, 4, hours)
    left = left_of(tmp_path)
    assert left == list(range(left[0], 12))
    assert 3 < left[0] < 9
    assert made._files.removed_files == left[0]


def test_disk_when_others_have_removed_files_is_counted_as_it_is(tmp_path):
    """Files that went otherwise take no room: none of the others goes for them."""
    made = recorder(tmp_path, max_bytes=100_000)
    fill(made, 6, 2)
    for path in files(tmp_path):
        if path.stem.endswith(("-0", "-1")):
            path.unlink()
    fill(made, 2, 2)
    assert left_of(tmp_path) == [2, 3, 4, 5, 6, 7]


def test_sweep_when_there_are_many_files_looks_at_none_of_them(tmp_path, monkeypatch):
    fill(recorder(tmp_path), 3)
    made = recorder(tmp_path, max_bytes=1_000_000)
    looked = []
    monkeypatch.setattr(made._files, "_files", looked.append)
    monkeypatch.setattr(writing.Path, "glob", looked.append)
    made._files.sweep()
    assert looked == []
    monkeypatch.undo()
    assert left_of(tmp_path) == [0, 1, 2]


def test_hidden_file_when_young_at_the_start_goes_later(tmp_path):
    folder = tmp_path / "flow_events" / "date=2026-01-01" / "hour=00"
    folder.mkdir(parents=True)
    young = folder / ".n1-1-0.parquet.part"
    young.write_bytes(b"half")
    made = recorder(tmp_path)
    assert young.exists()
    os.utime(young, (1, 1))
    made._files.sweep()
    assert not young.exists()


def read_own(folder):
    tables = [parquet.read_table(path, partitioning=None) for path in files(folder) if path.name.startswith("n1-")]
    return sorted((item for table in tables for item in table.to_pylist()), key=lambda item: item["seq"])


def test_folder_when_it_cannot_be_used_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="--events"):
            RecordFiles(options(folder), START_US).prepare()


def test_file_when_an_octet_is_another_is_known_to_be_damaged(tmp_path):
    made = recorder(tmp_path)
    made._writers["flow_events"].add_rows([row(number) for number in range(100)])
    made._writers["flow_events"].finish()
    (path,) = files(tmp_path)
    whole, column = path.read_bytes(), parquet.read_metadata(path).row_group(0).column(0)
    at = column.data_page_offset + column.total_compressed_size - 2
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(OSError, match="CRC"):
        parquet.read_table(path, page_checksum_verification=True)


def test_pyarrow_when_absent_is_named_with_the_way_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pyarrow") as caught:
        Recorder(options(tmp_path))
    assert ".[telemetry]" in caught.value.hint


def test_writer_when_given_columns_writes_them_as_rows(tmp_path):
    class Columns:
        rows = 2

        def absorb(self, other):
            return False

        def arrays(self):
            table = made._writers["flight"]
            names = [name for name in FLIGHT.names if name not in {"node", "seq"}]
            values = {"ts": START_US, "conn_id": 7, "offset_us": 0, "kind": "tick"}
            return table._arrays([tuple(values.get(name) for name in names)] * 2)

    made = recorder(tmp_path)
    made._writers["flight"].add_block(Columns())
    made._writers["flight"].finish()
    assert [item["conn_id"] for item in read(tmp_path, "flight")] == [7, 7]


def test_tables_when_written_are_all_known_to_the_recorder(tmp_path):
    made = recorder(tmp_path)
    for table in (FLOW_EVENTS, FLOW_SAMPLES, FLIGHT):
        assert made.lane(table).table is table
        assert isinstance(made._writers[table.name], TableWriter)
    assert everything(tmp_path) == []


def test_files_when_written_are_for_owner_and_group_alone(tmp_path):
    """Records say who watched what: files are 0640 and folders 0750, whatever a lax umask would allow."""
    before = os.umask(0)
    try:
        made = recorder(tmp_path / "new" / "events")
        made._files.prepare()
        table = made._writers["flow_events"]
        table.add_rows([row(0)])
        assert table.finish()
    finally:
        os.umask(before)
    found = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in found}
    assert modes == {(True, 0o750), (False, 0o640)}


@pytest.mark.parametrize("name", ["", "flow_events"])
def test_folder_when_a_link_takes_its_place_is_not_followed_and_nothing_is_lost(tmp_path, name, capfd):
    """Rows wait, as for a disk that takes none; a link that was there at the start, an operator's, is one."""
    disk, elsewhere, link = tmp_path / "disk", tmp_path / "elsewhere", tmp_path / "events"
    disk.mkdir()
    elsewhere.mkdir()
    link.symlink_to(disk)
    made = recorder(link)
    table = made._writers["flow_events"]
    table.add_rows([row(0)])
    assert table.finish()
    (disk / name).rename(tmp_path / "moved")
    (disk / name).symlink_to(elsewhere)
    table.add_rows([row(1)])
    assert not table.finish()
    assert f"{disk / name} is a link" in made._files.last_error
    assert "put a folder in its place" in "".join(capfd.readouterr())
    assert everything(elsewhere) == []
    (disk / name).unlink()
    (tmp_path / "moved").rename(disk / name)
    assert table.finish()
    assert len(read(disk)) == 2
