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


def test_table_when_wider_than_the_terminal_has_its_last_columns_under_the_row(monkeypatch, capsys):
    """Events differ in what they have: all of it is shown."""
    monkeypatch.setenv("COLUMNS", "40")
    show({"events": [{"what": "publish", "peer": "x" * 25}, {"what": "close", "peer": "y", "reason": "idle"}]})
    assert capsys.readouterr().out.splitlines()[2:] == [f"  publish  {'x' * 25}", "  close    y", "      reason idle"]


@pytest.mark.parametrize("columns", [80, 100, 300])
@pytest.mark.parametrize("name", ["viewers", "connections"])
def test_connections_when_listed_have_a_line_each_that_fits(name, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    slow = VIEWER | {"peer": "192.0.2.1:56954", "why": "SOFT_LIMIT for 2 s; queued: 2 MiB; " + VIEWER["why"]}
    show({name: [slow, slow | {"connection": 4, "role": "publisher", "state": "READY"}]})
    title, head, first, second, more = capsys.readouterr().out.splitlines()
    assert max(map(len, (head, first, second, more))) <= columns
    assert head.split() == ["conn", "peer", "stream", "state", "delay", "pict", "queue", "drops", "why"]
    conn, peer, _stream, state, *figures = first.split()  # a long name is cut, so that why has room
    assert (conn, peer, state) == ("3", "192.0.2.1:56954", "SOFT")
    assert figures[:6] == ["700", "ms", "10%", "23.4", "KiB", "338"]
    assert figures[6:]
    assert second.split()[-1] == "publishes"
    assert (title, more.strip()) == (f"{name}:", "flowctl connections NUMBER shows all of one")


def test_streams_when_listed_have_a_line_each_that_fits(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    row = {"stream": "live/room", "publisher": "192.0.2.1:50000", "connection": 3, "media": "video avc1, audio mp4a"}
    row |= {"viewers": 2, "slow": 1, "in_bytes": 1, "in_messages": 9, "in_frames": 9, "sent_bytes": 1, "renditions": []}
    show({"streams": [row]})
    _, head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["stream", "connection", "viewers", "slow", "in", "media", "sent"]
    assert max(len(head), len(line)) <= 80


def test_ban_when_it_has_no_end_never_expires(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    show({"bans": [{"cidr": "192.0.2.1/32", "expires": None}]})
    assert capsys.readouterr().out.splitlines()[-1].split() == ["192.0.2.1/32", "never"]


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
