"""Flights that nobody recorded: whatever stands in them, reading is bounded and what is wrong is damage."""

from __future__ import annotations

import dataclasses
import json

import pytest
from flight_kit import slow_history

from flowctl.core.flow.limits import Limits
from flowctl.errors import DamagedFlightError
from flowctl.reasons import CloseReason
from flowctl.records.flight import replay as replaying
from flowctl.records.flight.reading import read_flights
from flowctl.records.flight.replay import compare, replay
from flowctl.records.flight.whatif import engine
from flowctl.records.flight.whatif.engine import evaluate, recorded_viewer
from flowctl.records.flight.whatif.types import Choice
from flowctl.records.flight.whatif.viewing import stream_and_link
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


# -- work in proportion to bytes


def row_of(begin, number, offset_us, kind, **cells):
    values = dict.fromkeys(FLIGHT.names)
    own = {name: begin[FLIGHT.names.index(name)] for name in ("ts", "node", "conn_id")}
    values |= own | {"seq": number, "number": number, "offset_us": offset_us, "kind": kind} | cells
    return tuple(values.values())


LOG = {"has_video": True, "largest_bytes": 1, "gop_duration_us": 0, "gop_bytes": 0, "rates": []}


def foreign_flight(*rows):
    """Return a flight of a log that is followed, and of these rows behind that: (offset_us, kind, cells)."""
    begin = slow_history(seconds=1).rows[0]
    first = [
        (0, "call", {"reason": "log", "detail": json.dumps(LOG)}),
        (0, "call", {"reason": "follow", "detail": '{"prefix":[],"wait_for_key":false}'}),
    ]
    return read_flights(
        [begin, *(row_of(begin, n, at, kind, **cells) for n, (at, kind, cells) in enumerate([*first, *rows], 1))]
    )


def message(at_us, message_class, size_bytes=1, **cells):
    return at_us, "queued", {"reason": "log", "message_class": message_class, "size_bytes": size_bytes, **cells}


def refused(at_us, size_bytes=1):
    return at_us, "would_block", {"size_bytes": size_bytes}


def tried(flight):
    viewer = recorded_viewer(**stream_and_link(flight)._asdict())
    choice = Choice(
        limits=Limits.parse("1,1,50ms", "1GiB,1000000,900h"), policy="audio-first", soft_too_long_s=0, stuck_s=0,
        return_after_s=0,
    )  # fmt: skip
    return viewer, evaluate(viewer, [choice])


def test_file_when_many_rows_are_alike_is_not_read(tmp_path):
    """A file of some kB can hold millions of rows; each takes its time to replay."""
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    rows = slow_history(seconds=1).rows.table()
    parquet.write_table(pa.concat_tables([rows.slice(5, 1)] * 300_000).combine_chunks(), path, compression="zstd")
    size_bytes = path.stat().st_size
    assert size_bytes < 100_000
    with pytest.raises(DamagedFlightError, match=rf"{path} has 300000 rows in {size_bytes} bytes.* are read") as caught:
        flightfiles.flight_files(path)
    assert caught.value.hint


def test_file_when_its_text_is_out_of_proportion_is_not_read(tmp_path):
    path = tmp_path / "a.parquet"
    detail = json.dumps({"restart": [1] * 100_000})
    write_foreign(path, lambda table, pa: with_column(table, "detail", pa.array([detail] * len(table))))
    with pytest.raises(DamagedFlightError, match=rf"{path} .*bytes of text up to row .* are read at most"):
        read_whole(path)


def test_headers_when_a_foreign_flight_has_thousands_are_damage():
    flight = foreign_flight(message(1, "key", detail=json.dumps({"restart": [1] * 5000})))
    with pytest.raises(DamagedFlightError, match="5000 messages go before a key frame, 1024 at most"):
        replay(flight)


SWITCHED = {"log": LOG, "wait_for_key": False, "left": 0}


@pytest.mark.parametrize("count", [300, 5000])
def test_headers_when_those_of_a_foreign_flight_are_large_are_damage(monkeypatch, count):
    """Each size takes memory of its own: a few hundred kB of text could say gigabytes."""
    monkeypatch.setattr(replaying, "MOST_QUEUED_BYTES", 1_000_000)
    sizes = [1000 + number for number in range(count)]
    keys = (message(at, "key", detail=json.dumps({"restart": sizes[at : at + 10]})) for at in range(1, 290))
    prefix = [("header", size, 0) for size in sizes]
    switch = [
        (1, "call", {"reason": "switch"}),
        (1, "call", {"reason": "switched", "detail": json.dumps(SWITCHED | {"prefix": prefix})}),
    ]
    replay(foreign_flight(message(1, "key", detail=json.dumps({"restart": sizes[:300]}))))
    for rows in (keys, [*switch, *switch, *switch, *switch]):
        with pytest.raises(DamagedFlightError, match=r"\d+ (bytes|messages) go before"):
            replay(foreign_flight(*rows))


def test_trial_when_years_pass_without_anything_is_damage():
    """A choice in trouble is looked at twice a second: a year in four rows was an hour's work."""
    year_us = 365 * 86_400 * 1_000_000
    flight = foreign_flight(message(1, "key"), refused(2), message(3, "inter"), message(year_us, "key"))
    with pytest.raises(DamagedFlightError, match="nothing comes for a viewer in trouble") as caught:
        tried(flight)
    assert "most for its 4 events" in str(caught.value)


def test_trial_when_a_flight_lasted_for_microseconds_is_not_repeated_for_minutes():
    """Also where nothing of what is repeated is used."""
    looks = 0

    class Looked(tuple):
        __slots__ = ()

        def __iter__(self):
            nonlocal looks
            looks += 1
            assert looks < 10_000
            return super().__iter__()

    flight = foreign_flight(message(1, "key"), refused(2), refused(4), (5, "close", {"reason": "hard_limit"}))
    viewer, _ = tried(flight)
    assert len(viewer.events) < 2_000
    short = dataclasses.replace(viewer, events=[Looked(event) for event in viewer.events[:3]], ended_at=5e-6)
    engine.extended(short, 60.0)


def test_message_when_it_is_larger_than_any_is_damage_for_a_trial_too():
    flight = foreign_flight(message(1, "key"), refused(2), message(3, "key", 10**14))
    with pytest.raises(DamagedFlightError, match="is no size"):
        tried(flight)
