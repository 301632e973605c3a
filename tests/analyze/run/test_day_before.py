"""The day before: figures of the same hours a day earlier, where the results have them, and the page beside them."""

from __future__ import annotations

import datetime as dt

import pyarrow.parquet as pq
import pytest
from page_kit import Page
from record_kit import at, close, write_closes

from flowctl.cli import main

DAY_S = 86400


@pytest.fixture
def analyzed(tmp_path):
    """Return a function that analyzes a window, given in days since the first, and returns the folder of results."""
    for day, (viewers, troubled) in enumerate(((40, 4), (60, 24), (50, 25))):
        bad = {"time_ready_ms": 2e3, "time_hard_ms": 8e3, "episodes_hard": 1, "lag_ms": 8e3}
        rows = [close(day * DAY_S + 60, 1 + number, **(bad if number < troubled else {})) for number in range(viewers)]
        write_closes(tmp_path / "events", rows, date=f"2026-03-{day + 1:02}")

    def analyze(first, end):
        window = [f"{at(day * DAY_S) - dt.timedelta(hours=12):%Y-%m-%dT%H:%M}" for day in (first, end)]
        words = ["analyze", "all", str(tmp_path / "events"), "--out", str(tmp_path / "out"), "--engine", "duckdb"]
        assert main([*words, "--from", window[0], "--to", window[1]]) == 0
        return tmp_path / "out"

    return analyze


def test_day_before_when_the_results_have_it_stands_beside_each_figure(analyzed):
    out = analyzed(0, 1)
    assert not (out / "experience_before").exists()
    assert "the day before" not in (out / "report.html").read_text("utf-8")
    words = Page((analyzed(1, 2) / "report.html").read_text("utf-8")).words
    rows = {row["by"]: row for row in pq.read_table(out / "experience_before").to_pylist() if row["by"] != "role"}
    assert {name: (row["viewers"], row["troubled"]) for name, row in rows.items()} == dict.fromkeys(rows, (40, 4))
    assert "viewers60the day before: 40" in words
    assert "viewers in trouble40 %the day before: 10 %" in words
    assert "live/s6040" in words.replace("\n", "")


def test_day_before_when_the_window_is_longer_or_that_day_is_not_there_is_nothing(analyzed):
    analyzed(0, 1)
    assert (analyzed(1, 2) / "experience_before").exists()
    assert not (analyzed(1, 3) / "experience_before").exists()
    assert "the day before" not in (analyzed(0, 3) / "report.html").read_text("utf-8")
