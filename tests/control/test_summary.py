"""The line of figures that ``flowctl serve --stats`` logs."""

from __future__ import annotations

import asyncio

import pytest
from live_kit import World, inter, key, viewer_figures

from flowctl.connection import Session
from flowctl.control.summary import _of_viewers, summary
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.state import SendState
from flowctl.core.server.server import Server
from flowctl.live import LiveConfig, LiveServer
from flowctl.records.telemetry.options import EventsOptions
from flowctl.sender import Sender


def test_figures_when_of_a_live_server_tell_of_slow_viewers_and_memory():
    server = LiveServer(LiveConfig(memory_budget_bytes=1 << 30))
    try:
        figures = summary(server)
    finally:
        server.stop()
    assert (figures["streams"], figures["viewers"], figures["missing_pictures"], figures["returns"]) == (0, {}, 0, 0)
    assert "cut" not in figures  # which is what a connection is that the server has ended
    assert (figures["worst_delay_s"], figures["held"]) == (0.0, "0 B")
    assert figures["gave_way"] == {"thinned": 0, "closed": 0}


def test_figures_when_records_are_kept_are_those_of_the_files(tmp_path):
    server = LiveServer(LiveConfig(events=EventsOptions(folder=str(tmp_path))))
    try:
        recorder, events = server.recording.recorder, server.recording.events
        recorder._files.prepare()
        events.connection(1, ("192.0.2.1", 1), 1.0).limit_hit(1.0, "chunk_streams", 9, 8)
        events.server_stopped(2.0, 1)
        before = summary(server)
        recorder.turn()
        figures = summary(server)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(recorder._writers["flow_events"], "add_rows", lambda rows: 1 / 0)
            events.server_stopped(2.0, 1)
            recorder.turn()
        after = summary(server)
    finally:
        server.stop()
    assert (before["events"], before["limit_hits"], before["records_lost"]) == ({}, {}, 0)
    assert figures["events"] == {"limit_hit": 1, "server_stopped": 1}
    assert (figures["limit_hits"], figures["records_lost"]) == ({"chunk_streams": 1}, 0)
    assert after["records_lost"] == 1


def test_figures_when_of_another_server_are_those_of_connections():
    server = Server(Session)
    try:
        assert {"connections", "accepted", "closed", "busy", "in_bytes"} == set(summary(server))
    finally:
        server.stop()


def lossy():
    """Return a world with a viewer that lost frames, one that lags, and five that always kept up."""
    world = World(limits=Limits.parse("8KiB,0", "32KiB,0", target_delay_ms=0))
    publisher = world.publisher()
    lost, lagging, *healthy = [world.player() for _ in range(7)]
    for viewer in (lost, lagging):
        viewer.reads, viewer.wire.room = False, len(viewer.wire.down) + 10
    for number in range(12):
        publisher.video(40 * number, inter(b"i", 1000) if number else key(b"k", 1000))
    lost.reads, lost.wire.room = True, None
    world.run(1.0)
    for number in range(12, 14):
        publisher.video(40 * number, key(b"k", 1000))
    world.hub.oversight.look()
    return world, healthy


def test_figures_when_some_have_lost_frames_agree_with_those_of_every_viewer():
    world, _ = lossy()
    figures, viewers = _of_viewers(world.hub), [viewer_figures(viewer) for _, viewer in world.hub.viewing()]
    assert figures["viewers"]["ready"] == sum(viewer.state is SendState.READY for viewer in viewers) == 6
    assert figures["missing_pictures"] == sum(viewer.sender.picture_share < 1 for viewer in viewers)
    dropped = [viewer.sender.dropped_messages for viewer in viewers]
    assert figures["dropped"] == sum(dropped)
    assert sorted(map(bool, dropped)) == [False] * 5 + [True] * 2
    assert figures["worst_delay_s"] > 0
    assert figures["least_pictures"] == min(viewer.sender.picture_share for viewer in viewers)


def test_figures_when_viewers_always_kept_up_ask_them_for_no_statistics(monkeypatch):
    """A figure for each second must not cost what all statistics do: only who was slow once is asked."""
    world, healthy = lossy()
    asked = []
    statistics = Sender.statistics
    monkeypatch.setattr(Sender, "statistics", lambda sender: asked.append(sender) or statistics(sender))
    _of_viewers(world.hub)
    assert len(asked) == 2
    assert not {viewer.connection.sender for viewer in healthy} & set(asked)


def test_figures_when_asked_for_by_a_thread_of_its_own_rest_in_between(monkeypatch):
    """A thread that gathers figures lets the loops go on every few viewers; the thread of a loop does not rest."""
    world, _ = lossy()
    rests, passed = [], iter(range(1000))
    monkeypatch.setattr("flowctl.live.oversight.pace.time.sleep", rests.append)
    monkeypatch.setattr("flowctl.live.oversight.pace.time.perf_counter", lambda: next(passed) * 0.0002)
    _of_viewers(world.hub)
    assert len(rests) == 3  # 7 viewers, two at a time
    assert set(rests) == {0.001}

    async def ask():
        _of_viewers(world.hub)

    asyncio.run(ask())
    assert len(rests) == 3
