"""Accounts: every row of every file is used, or put aside with a reason."""

from __future__ import annotations

import datetime as dt

import hypothesis.strategies as st
import pytest
from hypothesis import given
from record_kit import event, write, write_closes

from flowctl.analyze.records.accounts import Accounts
from flowctl.analyze.records.listing import list_records
from flowctl.analyze.records.window import ODD_HOUR, Window, begin_of, hour_of, parse_window
from flowctl.errors import ConfigError

FILES = st.lists(
    st.tuples(
        st.sampled_from([None, "empty file", "wrong types"]),
        st.integers(0, 1000) | st.none(),
        st.dictionaries(st.sampled_from(["a: null", "b: negative"]), st.integers(0, 5)),
    ),
    max_size=30,
)


@given(FILES)
def test_accounts_when_files_are_entered_have_every_row_once(files):
    accounts = Accounts(table="flow_events")
    rows_in = 0
    for problem, found, bad in files:
        rows = found if problem is not None else max(found or 0, sum(bad.values()))
        accounts.enter(problem, rows, bad if problem is None else {})
        rows_in += rows or 0
    assert accounts.rows_in == rows_in == accounts.rows_out + accounts.rows_quarantined
    assert accounts.files_in == len(files)
    assert accounts.files_quarantined == sum(accounts.files_by_reason.values())
    assert accounts.files_unknown_rows == sum(problem is not None and rows is None for problem, rows, _ in files)


def test_line_when_files_cannot_be_read_says_that_their_rows_are_unknown():
    accounts = Accounts(table="t")
    accounts.enter(None, 3, {})
    accounts.enter("empty file", None, {})
    line = accounts.line()
    assert line.startswith("t: 2 files, rows in 3 = out 3 + quarantined 0; files put aside: empty file 1")
    assert "unreadable: 1 file, whose rows are unknown" in line


NOW = dt.datetime(2026, 3, 1, 12, 30, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("since", "length"),
    [
        ("2h", {"hours": 2}),
        ("90m", {"minutes": 90}),
        ("7d", {"days": 7}),
        (" 1.5 h ", {"hours": 1.5}),
        ("4w", {"weeks": 4}),
        ("30s", {"seconds": 30}),
    ],
)
def test_window_when_since_is_given_begins_so_long_ago(since, length):
    assert parse_window(NOW, since=since) == Window(NOW - dt.timedelta(**length), None)


@pytest.mark.parametrize(
    ("text", "hour"),
    [
        ("2026-03-01", 0),
        ("2026-03-01T11", 11),
        ("2026-03-01 11:00", 11),
        ("2026-03-01T11:00:00Z", 11),
        ("2026-03-01T13:00:00+02:00", 11),
        ("20260301T110000", 11),
    ],
)
def test_window_when_moments_are_given_takes_them_as_utc(text, hour):
    moment = dt.datetime(2026, 3, 1, hour, tzinfo=dt.UTC)
    assert parse_window(NOW, begin=text) == Window(moment, None)
    assert parse_window(NOW, end=text) == Window(None, moment)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"since": "soon"}, "--since: 'soon' is no length of time"),
        ({"since": "2"}, "--since"),
        ({"since": "0h"}, "--since"),
        ({"since": "-2h"}, "--since"),
        ({"since": "999999999w"}, "longer than 100 years"),
        ({"since": "2h", "begin": "2026-03-01"}, "--since and --from"),
        ({"begin": "yesterday"}, "--from: 'yesterday' is no date or time"),
        ({"end": "2026-13-01"}, "--to"),
        ({"end": "0001-01-01T00:00:00+14:00"}, "--to"),
        ({"begin": "2026-03-02", "end": "2026-03-01"}, "the window is empty"),
        ({"since": "1h", "end": "2026-03-01T11:30"}, "the window is empty"),
        ({"begin": "x" * 5000}, "--from"),
    ],
)
def test_window_when_an_option_is_wrong_names_it(options, words):
    with pytest.raises(ConfigError) as caught:
        parse_window(NOW, **options)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300
    assert caught.value.hint


@pytest.mark.parametrize(
    ("since", "until", "meets"),
    [
        (None, None, True),
        (NOW, None, True),
        (NOW + dt.timedelta(minutes=30), None, False),
        (None, NOW - dt.timedelta(minutes=30), False),
        (None, NOW - dt.timedelta(minutes=29), True),
        (NOW, NOW + dt.timedelta(minutes=1), True),
    ],
)
def test_window_when_it_meets_an_hour_has_some_of_it(since, until, meets):
    assert Window(since, until).meets(("2026-03-01", "12")) is meets
    for hour in (("2026-03-01", "12"), ("0999-01-01", "00"), ("0001-01-01", "03")):
        assert hour_of(begin_of(hour)) == hour


@pytest.mark.parametrize(
    ("asked", "whole"),
    [((None, None), (None, None)), ((0, 3600), (0, 3600)), ((1, 3601), (0, 7200)), ((3599, None), (0, None))],
)
def test_window_when_made_whole_is_widened_to_the_hour(asked, whole):
    asked, whole = (
        [None if x is None else begin_of(("2026-03-01", "12")) + dt.timedelta(seconds=x) for x in pair]
        for pair in (asked, whole)
    )
    assert Window(*asked).whole() == Window(*whole)


def test_listing_when_files_lie_in_hours_has_them_in_order(tmp_path):
    late = write(tmp_path, [event(3600, 1, "dropped")], "b", hour="13")
    first = write_closes(tmp_path, [], "a")
    listing = list_records(str(tmp_path))
    assert [(item.table, item.hour[1], item.path) for item in listing.files] == [
        ("flow_closes", "12", str(first)),
        ("flow_events", "13", str(late)),
    ]
    assert listing.files[1].size_bytes == late.stat().st_size
    assert listing.files[1].mtime_ns == late.stat().st_mtime_ns
    assert listing.hours() == [("2026-03-01", "12"), ("2026-03-01", "13")]
    assert listing.of([("2026-03-01", "13")]) == [listing.files[1]]
    window = Window(dt.datetime(2026, 3, 1, 13, 10, tzinfo=dt.UTC))
    assert list_records(f"file://{tmp_path}/", window).hours() == [("2026-03-01", "13")]


def test_listing_when_names_are_hidden_or_foreign_leaves_them_out(tmp_path):
    path = write(tmp_path, [event(1, 1, "dropped")])
    for name in (".a.parquet", "_a.parquet", "a.parquet.tmp", "a.crc"):
        (path.parent / name).write_bytes(path.read_bytes())
    hidden = path.parent / "_temporary"
    hidden.mkdir()
    (hidden / "a.parquet").write_bytes(path.read_bytes())
    assert [item.path for item in list_records(str(tmp_path)).files] == [str(path)]


@pytest.mark.parametrize("place", ["", "node=n1/date=2026-03-01/hour=13", "date=2026-03-01", "date=2026-02-31/hour=x"])
def test_listing_when_a_file_lies_elsewhere_keeps_it_under_the_odd_hour(tmp_path, place):
    path = write(tmp_path, [event(100, 1, "dropped")])
    other = tmp_path / "flow_events" / place / "b.parquet"
    other.parent.mkdir(parents=True, exist_ok=True)
    path.rename(other)
    assert [(item.hour, item.path) for item in list_records(str(tmp_path)).files] == [(ODD_HOUR, str(other))]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: None, "does not exist"),
        (lambda root: root.mkdir(), "has no records"),
        (lambda root: (root / "flow_samples_").mkdir(parents=True), "has no records"),
        (lambda root: root.write_text("x"), "is no folder"),
    ],
)
def test_listing_when_there_is_nothing_says_what_is_missing(tmp_path, make, words):
    make(tmp_path / "ev")
    with pytest.raises(ConfigError, match=words) as caught:
        list_records(str(tmp_path / "ev"))
    assert "--events" in caught.value.hint


def test_listing_when_the_folder_is_that_of_a_table_says_which_one_to_give(tmp_path):
    write(tmp_path, [event(1, 1, "dropped")])
    with pytest.raises(ConfigError, match="is the folder of one table") as caught:
        list_records(str(tmp_path / "flow_events"))
    assert caught.value.hint == "give the folder it is in"
