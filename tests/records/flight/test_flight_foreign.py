"""Flights that nobody recorded: whatever stands in them, reading is bounded and what is wrong is damage."""

from __future__ import annotations

import pytest
from flight_kit import slow_history

from flowctl.errors import DamagedFlightError
from flowctl.reasons import CloseReason
from flowctl.records.flight import replay as replaying
from flowctl.records.flight.reading import read_flights
from flowctl.records.flight.replay import compare, replay
from flowctl.records.telemetry import flightfiles
from flowctl.records.telemetry.schema import FLIGHT


def again(rows):
    flight = read_flights(rows)
    return compare(flight, replay(flight))


def read_whole(path):
    files = flightfiles.flight_files(path)
    return [rows for _, rows in flightfiles.flights_rows(files, flightfiles.list_flights(files))]


NESTED = "[" * 100_000
LONG = '{"a":"' + "x" * 2_000_000 + '"}'


@pytest.mark.parametrize("detail", [NESTED, '{"a":' * 50_000, LONG, "[]", "3", "{", '{"a":' + "9" * 5000 + "}"])
@pytest.mark.parametrize("place", ["begin", "call", "end"])
def test_detail_when_it_is_foreign_is_damage(detail, place):
    viewer = slow_history(seconds=2)
    viewer.sender.close(CloseReason.KICKED)
    rows = [list(row) for row in viewer.rows]
    detail_at = FLIGHT.names.index("detail")
    number = {"begin": 0, "call": next(at for at, row in enumerate(rows) if at and row[detail_at]), "end": -1}[place]
    rows[number][detail_at] = detail
    with pytest.raises(DamagedFlightError):
        again(rows)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("offset_us", None), ("offset_us", -1), ("offset_us", 10**30), ("offset_us", "5"), ("kind", None), ("kind", 7),
        ("number", None), ("number", "0"), ("size_bytes", -5), ("size_bytes", 10**15), ("size_bytes", "many"),
        ("message_class", "nonsense"), ("message_class", 5), ("reason", 7), ("queued_age_ms", float("inf")),
        ("queued_age_ms", float("nan")), ("taken_bytes", 10**18), ("taken_bytes", -1),
    ],
)  # fmt: skip
def test_cell_when_it_is_foreign_is_damage_or_a_divergence(column, value):
    rows = [list(row) for row in slow_history(seconds=1).rows]
    at = FLIGHT.names.index(column)
    for number in range(0, len(rows), max(1, len(rows) // 40)):
        changed = [list(row) for row in rows]
        changed[number][at] = value
        try:
            found = again(changed)
        except DamagedFlightError:
            continue
        assert found.identical is (found.difference is None)


def test_queue_when_a_foreign_flight_lets_it_grow_is_bounded(monkeypatch):
    monkeypatch.setattr(replaying, "MOST_QUEUED_BYTES", 1000)
    monkeypatch.setattr(replaying, "_CHECK_EVERY_BYTES", 100)
    rows = slow_history(seconds=2).rows
    with pytest.raises(DamagedFlightError, match="more than a replay holds"):
        replay(read_flights(rows))


def write_foreign(path, change):
    import pyarrow as pa
    from pyarrow import parquet

    slow_history(seconds=1).rows.write(path, uid="a")
    parquet.write_table(change(parquet.read_table(path), pa), path)


def with_column(table, name, column):
    return table.set_column(table.schema.get_field_index(name), name, column)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda table, pa: with_column(table, "offset_us", table.column("offset_us").cast("string")), "type string"),
        (lambda table, pa: with_column(table, "detail", pa.array([[["x"]]] * len(table))), "no column 'detail'"),
        (lambda table, pa: with_column(table, "offset_us", pa.nulls(len(table), pa.int64())), "empty places"),
        (lambda table, pa: with_column(table, "detail", pa.array(["x" * 1_000_000] * len(table))), "bytes of text"),
    ],
    ids=["another type", "nested", "empty", "texts"],
)
def test_file_when_it_is_foreign_is_damage(tmp_path, monkeypatch, change, word):
    monkeypatch.setattr(flightfiles, "_MOST_TEXT_BYTES", 20_000_000)
    path = tmp_path / "a.parquet"
    write_foreign(path, change)
    with pytest.raises(DamagedFlightError, match=word):
        read_whole(path)


def test_flight_when_it_has_too_many_rows_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(flightfiles, "_MOST_ROWS", 20)
    path = tmp_path / "a.parquet"
    slow_history(seconds=1).rows.write(path, uid="a")
    files = flightfiles.flight_files(path)
    (found,) = flightfiles.list_flights(files)
    assert found.rows > 20
    assert [len(rows) for _, rows in flightfiles.flights_rows(files, [found])] == [20]
