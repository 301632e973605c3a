"""The line of figures that ``flowctl serve --stats`` logs."""

from __future__ import annotations

import pytest

from flowctl.connection import Session
from flowctl.control.summary import summary
from flowctl.core.server.server import Server
from flowctl.live import LiveConfig, LiveServer
from flowctl.records.telemetry.options import EventsOptions


def test_figures_when_of_a_live_server_tell_of_slow_viewers_and_memory():
    """What was asked for is in the line: viewers without all pictures, delay, memory held, who gave way."""
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
    """Events by name, limits that were hit and records lost are in the line, as the recorder's feed counts them."""
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
    """A server without streams has no figures of viewers."""
    server = Server(Session)
    try:
        assert {"connections", "accepted", "closed", "busy", "in_bytes"} == set(summary(server))
    finally:
        server.stop()
