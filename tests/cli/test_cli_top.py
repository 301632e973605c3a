"""``flowctl top``: what one look shows, on a terminal of any size, and as lines of JSON."""

from __future__ import annotations

import json

import pytest
from e2e_kit import Clients, open_live_server, wait_for_viewers
from typer.testing import CliRunner

from flowctl.cli.app import app
from flowctl.cli.control.top import screen
from flowctl.control.listener import listener_of
from flowctl.wire.media.synthetic import SyntheticSource

LATE = (
    "OVERLOADED for 3.1 s; queued: 2.1 MiB, limit 2.0 MiB; queued 2 MiB in 900 messages, oldest 3.4 s; "
    "it has taken nothing for 3 s; to blame: peer's line"
)


def look(count):
    """Return what a server with `count` connections tells, one of them hostile in its words."""
    rows = [
        {
            "connection": number,
            "peer": "[2001:db8:aaaa:bbbb:cccc:dddd:eeee:ffff]:65535",
            "state": "SOFT_LIMIT",
            "delay_ms": 12_345,
            "pictures": 0.333,
            "queued_bytes": 123_456_789,
            "dropped": 1_234_567_890,
            "why": "\x1b[2Jlate: " + "x" * 300,
        }
        for number in range(count)
    ]
    states = {"READY": 1, "OVERLOADED": 2, "SOFT_LIMIT": 3, "HARD_LIMIT": 4}
    stream = {"stream": "live/" + "n" * 200, "viewers": 12_345, "states": states, "slow": 9}
    server = {"url": "rtmp://127.0.0.1:1935/", "up_s": 5, "busy": 0.25, "connections": count, "accepted": 1, "bans": 0}
    return {"server": server, "streams": [stream] * 9, "connections": rows, "found": {"connections": count}}


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 10), (200, 60), (1, 1)])
def test_screen_when_the_terminal_is_of_any_size_fits_it(columns, rows):
    lines = screen(look(100), columns, rows)
    assert len(lines) <= rows
    assert max(map(len, lines)) <= columns
    assert "\x1b" not in "".join(lines)


def test_screen_when_it_has_80_columns_and_24_lines_shows_figures_streams_and_connections():
    lines = screen(look(100), 80, 24)
    assert "busy 25%" in lines[0]
    assert sum(line.startswith("live/") for line in lines) == 5
    assert sum(" SOFT " in line for line in lines[5:]) >= 10
    assert lines[-1].startswith("and 8")


@pytest.mark.parametrize(("columns", "shown"), [(80, " 720"), (110, " 720: the line takes 1.25 of 2.5 Mbit/s")])
def test_screen_when_a_viewer_of_a_set_keeps_up_shows_its_rendition_and_why_as_far_as_that_fits(columns, shown):
    found = look(1)
    found["connections"][0] |= {
        "state": "READY",
        "rendition": "720",
        "renditions": {"why": "the line takes 1.25 of 2.5 Mbit/s"},
    }
    assert screen(found, columns, 24)[-1].endswith(shown)


@pytest.mark.parametrize(
    ("why", "columns", "shown"),
    [
        (LATE, 80, "link: 2.1 MiB"),
        (LATE, 100, "link: 2.1 MiB, limit 2.0 MiB"),
        (LATE, 116, "link: queued: 2.1 MiB, limit 2.0 MiB"),
        (LATE, 300, LATE),
        (LATE.replace("2.1 MiB, limit 2.0 MiB", "4100 messages, limit 4096 messages"), 80, "link"),
        (LATE.replace("peer's line", "publisher burst"), 80, "burst: 2.1 MiB"),
        (LATE.replace("peer's line", "policy"), 80, "policy: 2.1 MiB"),
        (LATE.replace("queued: 2.1 MiB, limit 2.0 MiB", "blocked"), 80, "link: blocked"),
        ("READY for 5.2 s; nothing queued", 80, "nothing queued"),
        ("READY for 5.2 s; queued 1.2 MiB in 31 messages, oldest 40 ms", 80, "queued 1.2 MiB"),
        ("READY for 5.2 s", 80, "READY for 5.2 s"),
    ],
)
def test_screen_when_why_is_longer_than_its_room_shows_blame_and_reason(why, columns, shown):
    found = look(1)
    found["connections"][0]["why"] = why
    line = screen(found, columns, 24)[-1]
    assert line.endswith(f" {shown}")
    assert len(line) <= columns


def test_top_when_asked_for_json_writes_a_line_for_each_look(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with open_live_server() as server, Clients() as clients:
        listener = listener_of(server)
        listener.start()
        clients.publish(server, SyntheticSource())
        clients.play(server)
        wait_for_viewers(server, 1)
        said = CliRunner().invoke(app, ["top", "--json", "--count", "2", "--every", "100ms", "--sort", "number"])
        plain = CliRunner().invoke(app, ["top", "--count", "1"])
        listener.stop(5.0)
    assert said.exit_code == 0, said.output
    looks = [json.loads(line) for line in said.stdout.splitlines()]
    assert [len(item["connections"]) for item in looks] == [2, 2]
    assert looks[0]["streams"][0]["viewers"] == 1
    assert "live/stream" in plain.stdout
