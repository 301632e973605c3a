"""The usual settings of the records of a live server, and what a server without records does without."""

from __future__ import annotations

import subprocess
import sys

from typer.testing import CliRunner

from flowctl.cli.app import app
from flowctl.errors import ConfigError
from flowctl.live import LiveConfig, LiveServer
from flowctl.live.records.recording import usual_node
from flowctl.records.telemetry.options import Addresses, EventsOptions, RecordedStreams


def test_settings_when_none_are_given_hide_names_and_keep_addresses(tmp_path):
    server = LiveServer(LiveConfig(events=EventsOptions(folder=str(tmp_path))))
    found, port = server.recording.recorder.options, server.address[1]
    server.stop()
    assert (found.addresses, found.streams, found.key) == (Addresses.PLAIN, RecordedStreams.HASH, None)
    assert found.node == usual_node(port)
    assert found.node.endswith(f"-{port}")


def test_server_when_nothing_is_recorded_has_no_part_of_it(tmp_path):
    plain = LiveServer(LiveConfig())
    recorded = LiveServer(LiveConfig(events=EventsOptions(folder=str(tmp_path))))
    try:
        assert plain.recording is None
        assert recorded.recording.sessions in recorded.hub.observers
        assert len(recorded.hub.observers) == len(plain.hub.observers) + 1
    finally:
        plain.stop()
        recorded.stop()


def test_server_when_nothing_is_recorded_loads_no_libraries():
    code = (
        "import sys, flowctl.records.telemetry.recorder, flowctl.records.telemetry.sampling, flowctl.live\n"
        "flowctl.live.LiveServer(flowctl.live.LiveConfig()).stop()\n"
        "print({'pyarrow', 'pandas', 'numpy', 'pydantic'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.splitlines()[-1] == "set()"  # before it the log, which nobody has set up here


def test_command_when_the_server_has_no_streams_refuses_to_record(tmp_path):
    result = CliRunner().invoke(app, ["serve", "echo", "--events", str(tmp_path / "events")])
    assert isinstance(result.exception, ConfigError)
    assert "--events" in str(result.exception)
    assert not (tmp_path / "events").exists()
