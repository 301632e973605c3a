"""Answers of servers as people read them: tables that fit the terminal."""

from __future__ import annotations

import pytest

from flowctl.cli.control.showing import show

VIEWER = {
    "connection": 3,
    "peer": "[2001:db8::1234]:56954",
    "stream": "live/some-stream",
    "state": "SOFT_LIMIT",
    "delay_ms": 713,
    "pictures": 0.1,
    "queued_bytes": 24_000,
    "dropped": 338,
    "open_s": 6.5,
    "agent": "LNX 9,0,124,2 flowctl play",
    "why": "takes less than it is sent " * 5,
}


@pytest.mark.parametrize("columns", [40, 80, 100, 300])
def test_table_when_wider_than_the_terminal_has_its_last_columns_under_the_row(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    show({"viewers": [VIEWER, VIEWER | {"connection": 4}]})
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    words = " ".join(shown.split())
    for text in ("713 ms", "10%", "23.4 KiB", "338", "6.5 s", "LNX 9,0,124,2 flowctl play", "takes less than it is"):
        assert words.count(text) >= 2
    assert ("agent LNX" in words) is (columns < 300)


def test_streams_when_one_is_a_set_have_each_rendition_under_its_row(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    small = {"rendition": "360", "bit_rate": 500_000, "size": "640x360", "viewers": 0, "remark": ""}
    large = {"rendition": "720", "bit_rate": 1_200_000, "size": None, "viewers": 2, "remark": "as those of 360"}
    rows = [{"stream": "live/show", "viewers": 2, "renditions": [small, large]}]
    show({"streams": [*rows, {"stream": "live/plain", "viewers": 0, "renditions": []}]})
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[2:5] == [
        "live/show         2",
        "rendition 360, bit rate 500 kbit/s, size 640x360",
        "rendition 720, bit rate 1.20 Mbit/s, viewers 2, remark as those of 360",
    ]
    assert lines[5:] == ["live/plain        0"]


def test_shares_when_of_renditions_are_percent(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    show({"connection": {"renditions": {"of": 2, "for_s": 41.0, "shares": {"360": 0.08, "720": 0.92}}}})
    assert "of 2; for 41.0 s; shares 360 8%, 720 92%" in capsys.readouterr().out


def test_rate_when_shown_is_bytes_in_a_second(monkeypatch, capsys):
    """It is no duration, though its name ends as those of durations do."""
    monkeypatch.setenv("COLUMNS", "80")
    show({"connections": [{"connection": 3, "rate_bytes_per_s": 37_325, "since_s": 4.0}]})
    shown = capsys.readouterr().out
    assert "36.5 KiB/s" in shown
    assert "min" not in shown


def test_lists_when_in_a_change_have_their_units(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    show({"changes": [{"version": 1, "detail": {"age_ms": [1000, 500], "hard_policy": "close"}}]})
    assert "age 1.0 s, 500 ms; hard policy close" in capsys.readouterr().out


AXES = {
    "bytes": {"value": 176_679, "low": 1 << 20, "soft": 2 << 20, "hard": 4 << 20},
    "messages": {"value": 43, "low": 0, "soft": 0, "hard": 0},
    "age_ms": {"value": 632, "low": 2000, "soft": 4000, "hard": 0},
}


def test_connection_when_shown_has_its_axes_with_units_and_marks(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    show({"connection": {"connection": 3, "axes": AXES}})
    expected = "bytes 173 KiB (soft 2.0 MiB, hard 4.0 MiB); messages 43 (no limit); age 632 ms (soft 4.0 s)"
    assert expected in capsys.readouterr().out


def test_table_when_rows_have_nothing_to_say_does_not_say_it(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    healthy = VIEWER | {"state": "READY", "dropped": 0, "why": "READY for 6 s", "axes": AXES, "drops": {}}
    show({"connections": [healthy], "found": {"connections": 3, "offset": 1, "limit": 1}})
    shown = " ".join(capsys.readouterr().out.split())
    assert "dropped" not in shown
    assert "READY for" not in shown
    assert "axes" not in shown
    assert "waiting" not in shown
    assert shown.endswith("connections 2 to 2 of 3; the next ones: --offset 2")
