"""A server that drains leaves port, bans and socket to the one that takes its place, and its viewers lose nothing."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta

import pytest
from e2e_kit import wait_for_end, wait_for_viewers, wait_until

from flowctl.control.client import call_operation
from flowctl.control.listener import listener_of
from flowctl.control.place import find_server, servers_here
from flowctl.core.server.bans import Ban
from flowctl.live import LiveServer
from flowctl.live.fleet.member import join_fleet
from flowctl.wire.media.synthetic import SyntheticSource


def operated(config):
    """Return a live server with a socket for operations, which is in a fleet."""
    server = LiveServer(config)
    join_fleet(server, config.fleet_file)
    server.companions.append(listener_of(server))
    return server


@pytest.fixture
def runtime(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="f-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield folder


def test_successor_when_a_server_drains_has_its_port_its_bans_and_its_name(live, clients, tmp_path, runtime):
    """A ban outlives the change, the operator reaches the newer server, and a viewer of the older one plays on.

    The newer one is in its place in the fleet as well.
    """
    store = tmp_path / "bans.sqlite"
    for name in "ab":
        members = "".join(f'[members.{item}]\naddress = "ipc://{runtime}/{item}.ipc"\n' for item in "ab")
        (tmp_path / name).write_text(f'name = "{name}"\n{members}')
    first = live(ban_store=store, fleet_file=tmp_path / "a", make=operated)
    port = first.address[1]
    clients.publish(first, SyntheticSource(), pace=1.0)
    viewer = clients.play(first)
    wait_for_viewers(first, 1)
    first.ban(Ban(cidr="192.0.2.0/24", expires=datetime.now(UTC) + timedelta(hours=1), reason="rude"))
    call_operation(find_server(None), "drain", {"within": "20s"})
    second = live(port=port, ban_store=store, fleet_file=tmp_path / "a", make=operated)
    assert [ban["cidr"] for ban in call_operation(find_server(None), "bans", {})["bans"]] == ["192.0.2.0/24"]
    found = {call_operation(f"ipc://{path}", "stats", {})["server"]["connections"] for path in servers_here()}
    assert found == {0, 2}
    other = live(fleet_file=tmp_path / "b", make=operated)
    second.ban(Ban(cidr="198.51.100.7/32", expires=None))
    wait_until(lambda: len(other.admission.bans) == 2, "what the newer one has, at another member")
    late = clients.play(second)
    wait_until(lambda: len(second.connections()) == 1, "a viewer of the newer server")
    before = len(viewer.messages)
    wait_until(lambda: len(viewer.messages) > before, "the stream of the older one to go on")
    assert viewer.end is None
    first.stop(5.0)
    wait_for_end(viewer)
    assert late.end is None
