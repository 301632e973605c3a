"""What is told of viewers of a set: to operators, in records and in sums, over pauses and after the end."""

from __future__ import annotations

import json

import pytest
from rendition_kit import SetWorld, choose

from flowctl.live.records.meters import Meters
from flowctl.live.rows import connection_row
from flowctl.reasons import CloseReason
from flowctl.records.telemetry.whole import rendition_columns


def test_viewer_of_a_set_when_it_switches_pauses_and_leaves_has_all_its_renditions_told(monkeypatch):
    world = SetWorld()
    world.all_members()
    world.send(30)
    viewer = world.player("live/show")
    connection, meters = viewer.connection, Meters(lambda _: None)
    world.send(25)
    row = connection_row(connection)
    assert (row["rendition"], row["renditions"]["of"], row["renditions"]["ups"]) == ("360", 3, 0)
    assert "rendition 360 of 3 for " in row["why"]

    choose(monkeypatch, "1080")
    world.send(50)
    row = connection_row(connection)
    assert (row["rendition"], row["renditions"]["why"], row["renditions"]["ups"]) == ("1080", "asked for", 1)
    assert list(row["renditions"]["shares"]) == ["360", "1080"]
    (sums,) = meters.figures(lambda: [connection], ())["rows"]
    assert (sums["renditions"], sums["switches"]) == ({"1080": 1}, {"up": 1, "down": 0, "failed": 0})

    viewer.command("pause", None, True, 0.0)
    world.send(25)
    row = connection_row(connection)
    assert (row["rendition"], row["renditions"]["ups"]) == (None, 1)
    assert "rendition" not in row["why"]
    paused = connection.renditions.seconds(world.clock())
    viewer.command("pause", None, False, 0.0)
    world.send(25)
    now = world.clock()
    assert sum(connection.renditions.seconds(now).values()) == pytest.approx(sum(paused.values()) + 1.0, abs=0.1)

    viewer.leave()
    meters.closed(connection, CloseReason.PEER_CLOSED, "", None)
    columns = rendition_columns(connection.renditions, world.clock() + 60.0)
    told = json.loads(columns["renditions"])
    assert list(told) == ["360", "1080"]
    assert sum(told.values()) == pytest.approx(sum(paused.values()) + 1.0, abs=0.1)
    assert columns["switches"] >= 1
    assert columns["smaller_ms"] == pytest.approx(told["360"] * 1000, abs=1.0)
    (sums,) = meters.figures(list, ())["rows"]
    assert (sums["renditions"], sums["switches"]["up"]) == ({}, columns["switches"])
    assert world.group.failures == []
