"""Rows back into flights: what is read, and what is wrong with damaged ones."""

from __future__ import annotations

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flight_kit import NODE, Rows, changed, slow_history

from flowctl.errors import ConfigError, DamagedFlightError
from flowctl.reasons import CloseReason
from flowctl.records.flight.reading import read_flights
from flowctl.records.flight.replay import compare, read_flight, replay
from flowctl.records.flight.tape import Identity, Tape
from flowctl.records.flight.whatif.types import REFUSED, TAKEN
from flowctl.records.flight.whatif.viewing import stream_and_link
from flowctl.records.telemetry import flightfiles
from flowctl.records.telemetry.flightfiles import flight_files, list_flights
from flowctl.records.telemetry.schema import FLIGHT


@pytest.fixture(scope="module")
def rows() -> Rows:
    viewer = slow_history(seconds=8)
    viewer.sender.close(CloseReason.KICKED)
    return viewer.rows


def cell(name):
    return FLIGHT.names.index(name)


def with_cell(row, name, value):
    return (*row[: cell(name)], value, *row[cell(name) + 1 :])


# -- rows


def test_flight_when_rows_come_as_mappings_or_sequences_in_any_order_is_the_same(rows):
    expected = read_flights(rows)
    mappings = [dict(zip(FLIGHT.names, row, strict=True)) for row in rows]
    assert read_flights(mappings) == expected
    assert read_flights(reversed(rows)) == expected
    assert (expected.node, expected.conn_id, expected.complete) == (NODE, 7, True)
    assert len(expected.rows) == len(rows)


def test_flight_when_rows_come_through_pandas_is_the_same(rows):
    records = rows.table().to_pandas().to_dict("records")
    flight = read_flights(records)
    assert compare(flight, replay(flight)).identical


def test_flight_when_a_row_is_missing_says_which(rows):
    with pytest.raises(DamagedFlightError, match=r"connection 7: row 40 is missing"):
        read_flights([*rows[:40], *rows[41:]])
    with pytest.raises(DamagedFlightError, match=r"row 0 is missing"):
        read_flights(rows[1:])


def test_flight_when_a_row_is_there_twice_says_which(rows):
    with pytest.raises(DamagedFlightError, match=r"row 12 is there twice"):
        read_flights([*rows, rows[12]])


@pytest.mark.parametrize(
    ("number", "name", "value", "words"),
    [
        (5, "kind", "pushed", "row 5 is of the unknown kind 'pushed'"),
        (9, "offset_us", -1, "us before the one before it"),
        (3, "kind", "begin", "begin is the first row and no other"),
        (3, "kind", "end", "row 3 is the end, but"),
        (0, "detail", "{", "what begin says cannot be read"),
        (0, "detail", "{}", "what begin says cannot be read: KeyError"),
    ],
)
def test_flight_when_a_row_says_what_nobody_wrote_is_refused(rows, number, name, value, words):
    damaged = list(rows)
    damaged[number] = with_cell(damaged[number], name, value)
    with pytest.raises(DamagedFlightError) as caught:
        read_flights(damaged)
    assert words in str(caught.value)


def test_flight_when_of_another_format_says_so(rows):
    begin = json.loads(rows[0][cell("detail")])
    first = with_cell(rows[0], "detail", json.dumps({**begin, "format": 99}))
    with pytest.raises(DamagedFlightError, match=r"of format 99, this flowctl reads 1"):
        read_flights([first, *rows[1:]])


def test_flight_when_there_are_no_rows_or_rows_of_something_else_is_refused():
    with pytest.raises(DamagedFlightError, match="without rows"):
        read_flights([])
    with pytest.raises(DamagedFlightError, match="without offset_us or kind"):
        read_flights([{"event": "conn_opened"}])


# -- replays that diverge


def test_replay_when_any_output_was_changed_diverges(rows):
    flight = read_flights(rows)
    result = replay(flight)
    for row in flight.outputs:
        for name in ("state_to", "cause", "value", "limit", "dropped_messages", "reason", "queued_bytes"):
            value = getattr(row, name)
            if value is None:
                continue
            other = changed(flight, row.number, **{name: value + "!" if isinstance(value, str) else value + 1})
            comparison = compare(other, result)
            assert not comparison.identical
            assert comparison.number == row.number
            assert name in comparison.difference


@pytest.mark.parametrize("name", ["size_bytes", "taken_bytes", "message_class", "queued_age_ms"])
def test_replay_when_an_input_was_changed_diverges(rows, name):
    flight = read_flights(rows)
    inputs = [row for row in flight.rows if row.kind in {"queued", "sent"} and getattr(row, name) is not None]
    found = 0
    for row in inputs[::3]:
        value = getattr(row, name)
        other = changed(
            flight,
            row.number,
            **{name: ("audio" if value != "audio" else "key") if name == "message_class" else value + 40},
        )
        found += not compare(other, replay(other)).identical
    # An age only matters where it is the oldest of the queue at a look; a size or class always does.
    assert found == len(inputs[::3]) or (name == "queued_age_ms" and found > 0)


def test_replay_when_a_figure_of_the_end_was_changed_diverges(rows):
    flight = read_flights(rows)
    end = flight.rows[-1]
    figures = json.loads(end.detail)
    figures["recoveries"] += 1
    other = changed(flight, end.number, detail=json.dumps(figures))
    comparison = compare(other, replay(other))
    assert not comparison.identical
    assert comparison.number is None
    assert "recoveries is" in str(comparison)


def test_replay_when_an_output_is_missing_diverges(rows):
    flight = read_flights(rows)
    close = next(row for row in flight.rows if row.kind == "close")
    rest = tuple(
        row._replace(number=row.number - (row.number > close.number)) for row in flight.rows if row is not close
    )
    fewer = type(flight)(**{name: getattr(flight, name) for name in flight.__slots__} | {"rows": rest})
    comparison = compare(fewer, replay(fewer))
    assert "close at" in str(comparison)
    assert "was not recorded" in str(comparison)


def test_replay_when_a_call_is_unknown_says_so(rows):
    flight = read_flights(rows)
    number = next(row.number for row in flight.rows if row.reason == "take_turn")
    with pytest.raises(DamagedFlightError, match=f"row {number} is the unknown call 'fly'"):
        replay(changed(flight, number, reason="fly"))
    with pytest.raises(DamagedFlightError, match="cannot be read"):
        replay(changed(flight, number, detail="[]", reason="thin"))


# -- stream and link


def test_stream_and_link_when_taken_from_a_flight_add_up(rows):
    flight = read_flights(rows)
    events, given, restart_bytes, ended_s, close_reason, switched = stream_and_link(flight)
    assert (ended_s, close_reason, switched) == (flight.duration_s, "kicked", [])
    published = [row for row in flight.rows if row.kind == "queued" and row.reason == "log"]
    assert (given, restart_bytes) == (6, 31)
    assert [size for _, item, size in events if item >= 0] == [row.size_bytes for row in published]
    taken = sum(size for _, item, size in events if item in {TAKEN, REFUSED})
    assert taken == flight.figures["bytes_sent"]
    assert sum(item == REFUSED for _, item, _ in events) == sum(row.kind == "would_block" for row in flight.rows)
    assert [at for at, _, _ in events] == sorted(at for at, _, _ in events)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"detail": '{"restart":5}'}, "not iterable"),
        ({"detail": '{"restart":["a"]}'}, "'a' is no size"),
        ({"detail": '{"restart":[-5]}'}, "-5 is no size"),
        ({"detail": "[1]"}, "no JSON object"),
        ({"detail": "{oops"}, "Expecting property name"),
        ({"message_class": "film"}, "'film'"),
    ],
)
def test_stream_and_link_when_a_row_says_what_nobody_wrote_names_it(rows, values, words):
    flight = read_flights(rows)
    number = next(row.number for row in flight.rows if row.message_class == "key")
    with pytest.raises(DamagedFlightError, match=f"row {number} cannot be read") as caught:
        stream_and_link(changed(flight, number, **values))
    assert words in str(caught.value)


# -- files


def test_files_when_a_flight_is_spread_over_several_is_whole(rows, tmp_path):
    folder = tmp_path / "flight" / "date=2026-01-01" / "hour=00"
    folder.mkdir(parents=True)
    for number, start in enumerate(range(0, len(rows), 100)):
        part = Rows()
        part.extend(rows[start : start + 100])
        part.write(folder / f"n-1-{number}.parquet", uid=f"u{number}")
    part.write(folder / "copy.parquet", uid=f"u{number}")
    (folder / ".half.parquet").write_bytes(b"PAR1")
    assert len(flight_files(tmp_path)) == number + 1
    flight = read_flight(tmp_path)
    assert compare(flight, replay(flight)).identical
    (summary,) = list_flights(flight_files(tmp_path))
    assert (summary.node, summary.conn_id, summary.rows, summary.close_reason) == (NODE, 7, len(rows), "kicked")
    assert summary.transitions == len([row for row in flight.rows if row.kind == "state"])
    assert summary.began_at.startswith("2023-11-14T22:13:20")
    assert read_flight(tmp_path, 7, NODE) == flight


def test_files_when_split_by_a_tool_are_no_copies(rows, tmp_path):
    middle = len(rows) // 2
    for name, part in (("a", rows[:middle]), ("b", rows[middle:])):
        cut = Rows()
        cut.extend(part)
        cut.write(tmp_path / f"{name}.parquet", uid="whole")
        cut.write(tmp_path / f"{name}-copy.parquet", uid="whole")
    assert len(flight_files(tmp_path)) == 2
    flight = read_flight(tmp_path)
    assert compare(flight, replay(flight)).identical


def test_files_when_several_flights_are_there_wants_one_named(rows, tmp_path):
    both = Rows()
    both.extend(rows)
    both.extend(with_cell(row, "conn_id", 8) for row in rows)
    both.write(tmp_path / "two.parquet")
    with pytest.raises(ConfigError, match="holds 2 such flights"):
        read_flight(tmp_path / "two.parquet")
    assert read_flight(tmp_path / "two.parquet", 8).conn_id == 8
    with pytest.raises(ConfigError, match="holds no such flights"):
        read_flight(tmp_path / "two.parquet", 9)
    with pytest.raises(ConfigError, match="holds no such flights"):
        read_flight(tmp_path / "two.parquet", 7, "another")


def test_files_when_they_are_pipes_or_links_out_of_the_folder_are_named_unopened(rows, tmp_path, monkeypatch):
    """A pipe would be waited for, and a link shows what others put elsewhere; rows and footers have a limit."""
    folder = tmp_path / "records"
    folder.mkdir()
    good = folder / "a.parquet"
    rows.write(good, uid="one")
    rows.write(tmp_path / "outside.parquet", uid="two")
    (folder / "in.parquet").symlink_to("a.parquet")
    (folder / "out.parquet").symlink_to(tmp_path / "outside.parquet")
    (folder / "zero.parquet").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.parquet")
    damaged = {}
    assert flight_files(folder, damaged) == [good]
    assert {path.name: str(error).partition(" is ")[2] for path, error in damaged.items()} == {
        "out.parquet": "behind a link that leads out of the folder",
        "pipe.parquet": "no regular file",
        "zero.parquet": "no regular file",
    }
    assert flight_files(tmp_path / "records" / "out.parquet")  # it was named
    (folder / "flight").symlink_to(tmp_path)
    with pytest.raises(DamagedFlightError, match="behind a link that leads out of the folder"):
        flight_files(folder)
    for name, words in ("_MOST_FILE_ROWS", "rows"), ("_MOST_FOOTER_BYTES", "its footer has"):
        monkeypatch.setattr(flightfiles, name, 9)
        with pytest.raises(DamagedFlightError, match=f"{words}.*9 are read at most"):
            flight_files(good)


def test_files_when_damaged_or_foreign_are_named(rows, tmp_path):
    rows.write(tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedFlightError, match=r"a\.parquet is not a whole Parquet file"):
        flight_files(tmp_path)
    pq.write_table(pa.table({"conn_id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DamagedFlightError, match=r"a\.parquet has no column 'ts'"):
        flight_files(tmp_path)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(ConfigError, match="holds no flights"):
        flight_files(tmp_path)
    with pytest.raises(ConfigError, match="is not there"):
        flight_files(tmp_path / "gone")


def test_files_when_bytes_in_the_middle_are_damaged_are_named(rows, tmp_path):
    path = tmp_path / "a.parquet"
    rows.write(path)
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    path.write_bytes(data)
    with pytest.raises(DamagedFlightError, match=r"a\.parquet cannot be read"):
        read_flight(path)


def test_tape_when_named_later_says_so_in_the_rows_from_then_on():
    rows = Rows()
    tape = Tape(rows, Identity(conn_id=3, began_at_us=5, peer_ip="127.0.0.9", peer_port=80))
    tape.begin(1.0, "{}")
    tape.leave()
    tape.describe(role="play", app="live", stream="h:1")
    tape.enter(1.5, foreign=False)
    tape.call("flush")
    first, second = (dict(zip(FLIGHT.names, row, strict=True)) for row in rows)
    assert (first["role"], first["ts"], first["peer_ip"]) == (None, 5, "127.0.0.9")
    assert (second["role"], second["app"], second["stream"], second["ts"]) == ("play", "live", "h:1", 500_005)
