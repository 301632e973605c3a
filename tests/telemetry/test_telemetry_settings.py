"""Settings of the records on the command line of a live server."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flowctl.cli.app import app
from flowctl.errors import ConfigError
from flowctl.live import build_live_server
from flowctl.live.records.telemetry import EVENTS_SETTINGS, events_options, usual_node
from flowctl.server.program import ServeOptions
from flowctl.telemetry.options import Addresses, Streams


def test_settings_when_given_are_those_of_the_recorder(tmp_path):
    """Each setting has its effect, with units."""
    key = tmp_path / "key"
    key.write_bytes(b"0123456789abcdef")
    key.chmod(0o600)
    extra = {
        "events_node": "edge-7",
        "events_samples": "no",
        "events_interval": "500ms",
        "events_rotate": "1min",
        "events_max": "2GiB",
        "events_queue": "5000",
        "events_addresses": "truncated",
        "events_streams": "plain",
        "events_key_file": str(key),
    }
    assert set(extra) == set(EVENTS_SETTINGS)
    found = events_options(ServeOptions(events=tmp_path, extra=extra), 1935)
    assert (found.folder, found.node, found.samples) == (str(tmp_path), "edge-7", False)
    assert (found.interval_s, found.rotate_s, found.max_bytes, found.queue_rows) == (0.5, 60.0, 2 << 30, 5000)
    assert (found.addresses, found.streams, found.key) == (Addresses.TRUNCATED, Streams.PLAIN, b"0123456789abcdef")


def test_settings_when_none_are_given_hide_names_and_keep_addresses(tmp_path):
    """Usually names of streams are hashed with a key of the process, addresses plain, and the node is host and port."""
    found = events_options(ServeOptions(events=tmp_path), 1935)
    assert (found.addresses, found.streams, found.key) == (Addresses.PLAIN, Streams.HASH, None)
    assert found.node == usual_node(1935)
    assert found.node.endswith("-1935")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"events_samples": "maybe"}, "events_samples is 'maybe', it must be yes or no"),
        ({"events_addresses": "none"}, "events_addresses is 'none', it must be plain, truncated or hashed"),
        ({"events_streams": "key"}, "events_streams is 'key', it must be hash or plain"),
        ({"events_interval": "soon"}, "events_interval: 'soon' is not a number"),
        ({"events_rotate": "2h"}, "events_rotate is 7200 s"),
        ({"events_queue": "many"}, "events_queue is 'many'"),
        ({"events_node": "a b"}, "events_node is 'a b'"),
        ({"events_key_file": "absent"}, "cannot read events_key_file absent"),
    ],
)
def test_setting_when_wrong_is_refused_by_name(tmp_path, extra, words):
    """A typing error is no silent default, and nothing is left listening."""
    with pytest.raises(ConfigError) as caught:
        build_live_server(ServeOptions(events=tmp_path, extra=extra))
    assert words in str(caught.value)


def test_setting_when_nothing_is_recorded_is_refused():
    """A setting of records without a folder would do nothing, and says so."""
    with pytest.raises(ConfigError, match="events_node is set, but nothing is recorded") as caught:
        build_live_server(ServeOptions(extra={"events_node": "a"}))
    assert "--events" in caught.value.hint


def test_server_when_nothing_is_recorded_has_no_part_of_it(tmp_path):
    """Without --events nothing observes the sessions; with it the records do."""
    plain = build_live_server(ServeOptions())
    recorded = build_live_server(ServeOptions(events=tmp_path))
    try:
        assert plain.recording is None
        assert plain.hub.observers == ()
        assert recorded.hub.observers == (recorded.recording.sessions,)
    finally:
        plain.stop()
        recorded.stop()


def test_server_when_nothing_is_recorded_loads_no_arrow():
    """Neither the records' modules nor a live server without them load pyarrow, pandas or numpy."""
    code = (
        "import sys, flowctl.telemetry.recorder, flowctl.telemetry.sampling, flowctl.live\n"
        "from flowctl.server.program import ServeOptions\n"
        "flowctl.live.build_live_server(ServeOptions()).stop()\n"
        "print({'pyarrow', 'pandas', 'numpy'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.splitlines()[-1] == "set()"  # before it the log, which nobody has set up here


def test_command_when_the_server_has_no_streams_refuses_to_record(tmp_path):
    """The echo server has nothing to record, and says so instead of making an empty folder."""
    result = CliRunner().invoke(app, ["serve", "echo", "--events", str(tmp_path / "events")])
    assert isinstance(result.exception, ConfigError)
    assert "--events" in str(result.exception)
    assert not (tmp_path / "events").exists()
