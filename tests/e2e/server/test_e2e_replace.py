"""A rolling restart: a server takes the place of another one on its port, no client is refused, no viewer lost."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from ipaddress import ip_network
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from e2e_kit import NAME, frames_of, wait_for_viewers, wait_until
from replace_kit import HELLO, runtime, started

from flowctl.cli.serve import take_place
from flowctl.control.client import call_operation
from flowctl.control.place import find_server
from flowctl.core.server.handover import Successor
from flowctl.errors import ConfigError, FlowctlError
from flowctl.flv import TAG_VIDEO
from flowctl.live import LiveConfig
from flowctl.live.access.rules import StreamAccess
from flowctl.live.cluster.media.watch import MediaWatch
from flowctl.live.cluster.succession import precede, share_streams
from flowctl.live.settings.media import MediaOptions, StreamPatterns
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl_servers.live import SERVER, build

__all__ = ["runtime"]  # a fixture


def path_of(runtime):
    return runtime / "successor-1.hand"


@pytest.fixture
def replaced(live, runtime):
    """Return a function that has a server take the place of another one, as `flowctl serve --replace` does."""
    with contextlib.ExitStack() as stack:

        def replace(first, **settings):
            successor = stack.enter_context(Successor(path_of(runtime)))
            call_operation(find_server(None), "drain", {"within": "30s", "successor": str(successor.path)})

            def make(config):
                server = build(config)
                share_streams(server, successor)
                return server

            server = live(make=make, port=first.address[1], listen_fds=successor.receive_sockets(), **settings)
            successor.take_over()
            return server

        yield replace


def pictures(client):
    return [payload for _, payload in frames_of(client.messages, TAG_VIDEO)]


def watched(server):
    """Return what the process that writes recordings and HLS is told: whether it is to write the stream."""
    told = []
    MediaWatch(server, lambda name, order: told.append(order is not None and order.writes), copies=True)
    return told


def finish(clients, publishing):
    clients.group.call_soon(publishing.publisher.finish, "moves")
    wait_until(lambda: publishing.end is not None, "the end of the publisher")


def test_streams_when_a_server_is_replaced_are_at_both_wherever_their_publisher_is(live, clients, replaced, runtime):
    """Viewers of both see each picture of the publisher that is with the old one, and of its next, with the new one."""
    ours = {"access": StreamAccess(allow_publish=(ip_network("127.0.0.0/8"),))}  # what is not open to everybody
    ours |= {"media": MediaOptions(hls=StreamPatterns(("live/*",))), "media_here": False}
    first = live(make=build, **ours)
    written_by_first = watched(first)
    before = clients.publish(first, SyntheticSource(), pace=1.0)
    old = clients.play(first)
    wait_for_viewers(first, 1)
    second = replaced(first, **ours)
    written_by_second = watched(second)
    assert second.address == first.address
    new = clients.play(second)
    wait_until(lambda: len(pictures(new)) > 20, "the pictures of the old server at the new one")
    assert pictures(new)[0] in pictures(old)  # who moves there misses none
    assert "NetConnection.Connect.ReconnectRequest" in old.codes
    assert (written_by_first, written_by_second) == ([True], [])  # recordings and HLS: by the one of its publisher
    finish(clients, before)
    for viewer in (old, new):
        wait_until(lambda seen=viewer: pictures(seen)[-1] == pictures(before)[-1], "the last picture")
    after = clients.publish(second, SyntheticSource(seed=2), pace=1.0)
    count = len(pictures(old))
    wait_until(lambda: len(pictures(old)) > count + 20, "the pictures of the new server at the old one")
    sent = pictures(before) + pictures(after)
    for viewer in (old, new):
        seen = pictures(viewer)
        assert seen == sent[sent.index(seen[0]) :][: len(seen)]
        assert viewer.player.statistics().missing_video == 0
        assert viewer.end is None
    assert "NetStream.Play.UnpublishNotify" not in old.codes
    assert (written_by_first, written_by_second) == ([True, False], [True])
    first.stop(1.0)
    count = len(pictures(new))
    wait_until(lambda: len(pictures(new)) > count + 10, "the new server to go on alone")
    wait_until(lambda: second.hub.demand is None, "the new one to look for streams nowhere else")
    wait_until(
        lambda: {item.suffix for item in runtime.iterdir()} == {".sock"}, "what was being written to be in place"
    )


def test_name_when_its_publisher_is_with_the_old_server_is_taken_by_nobody_at_the_new_one(live, clients, replaced):
    """The copy gives way once the publisher has fallen silent, and not before: another one is refused."""
    first = live(make=build)
    before = clients.publish(first, SyntheticSource(), pace=1.0)
    wait_until(lambda: before.messages, "a publisher")
    second = replaced(first)
    new = clients.play(second)
    wait_until(lambda: pictures(new), "its pictures at the new server")
    rival = clients.publish(second, SyntheticSource(), pace=1.0)
    wait_until(lambda: rival.end is not None, "the end of another publisher of the name")
    assert "NetStream.Publish.BadName" in [status.code for status in rival.publisher.statuses]
    assert before.end is None
    first.stop(1.0)
    wait_until(lambda: before.end is not None, "the end of the publisher")
    wait_until(lambda: second.hub.silent(NAME), "silence")
    again = clients.publish(second, SyntheticSource(seed=2), pace=1.0)
    wait_until(lambda: pictures(new)[-1:] == pictures(again)[-1:], "its pictures, once it has come to the new server")
    assert "NetStream.Play.UnpublishNotify" not in new.codes


def test_server_when_nobody_waits_for_its_sockets_does_not_drain(live, runtime):
    """A path that is not there, or without somebody who listens, costs the old server nothing; so do wrong settings."""
    first = live(make=build)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path_of(runtime)))
    for path in (runtime / "nothing", path_of(runtime)):
        with pytest.raises(FlowctlError, match=r"nobody waits|cannot hand the sockets"):
            call_operation(find_server(None), "drain", {"successor": str(path)})
    options = LiveConfig(port=first.address[1], limits_file=Path("/nothing"))
    with pytest.raises(ConfigError, match="cannot read the limits"):
        take_place(None, SERVER, options, "10s")
    assert first.drains_for_s is None


def test_server_when_a_port_of_its_successor_is_in_use_does_not_drain(live, runtime):
    """It would be gone, and the other one could not start: nobody would listen."""
    first = live(make=build)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        options = LiveConfig(port=first.address[1], http=f"127.0.0.1:{busy.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"\(http\): Address already in use"):
            take_place(MagicMock(), SERVER, options, "10s")
    assert first.drains_for_s is None


def test_edge_that_offers_its_segments_when_it_is_replaced_keeps_their_port(runtime):
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, offers = free.getsockname()[1], other.getsockname()[1]
    words = [sys.executable, "-m", "flowctl", "edge", "127.0.0.1:1", "--port", str(port), "--json"]
    words += ["--origin", f"127.0.0.1:{offers}"]
    with started(words) as first, started([*words, "--replace", "5s"]):
        assert first.wait(30) == 0
        for there in (port, offers):
            socket.create_connection(("127.0.0.1", there), 20).close()


def test_streams_when_a_server_finds_them_elsewhere_are_looked_for_there_alone(live, clients, runtime):
    """An edge, or a server that pulls, asks neither its successor nor its predecessor for what it has not."""
    first, asked = live(make=build), []
    first.hub.demand = asked.append
    clients.play(first)
    wait_for_viewers(first, 1)
    precede(first, path_of(runtime))
    clients.play(first, name="live/other")
    wait_for_viewers(first, 1, name="live/other")
    assert asked == [NAME, "live/other"]
    assert first.companions[-1].statistics() == {}


def test_server_when_there_is_none_to_replace_starts(runtime):
    assert take_place(None, SERVER, LiveConfig(port=1), "10s") == (LiveConfig(port=1), None)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_clients_when_a_server_is_replaced_are_all_accepted(workers, runtime, tmp_path):
    """Of clients that connect all the while, none is refused or reset; admin and operators reach the new server."""
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, admin = free.getsockname()[1], other.getsockname()[1]
    words = [sys.executable, "-m", "flowctl", "serve", "live", "--port", str(port), "--workers", workers, "--json"]
    words += ["--ban-store", str(tmp_path / "bans.sqlite"), "--per-address", "0", "--new-per-address", "0"]
    words += ["--admin", f"127.0.0.1:{admin}"] if workers == "1" else []
    wrong, count, ended = [], [0], threading.Event()

    def connect():
        while not ended.wait(0.01):
            try:
                with socket.create_connection(("127.0.0.1", port), 20) as peer:
                    peer.sendall(HELLO)
                    if peer.recv(1) != b"\3":
                        wrong.append("closed without an answer")
            except OSError as error:
                wrong.append(str(error))
            count[0] += 1

    thread = threading.Thread(target=connect)
    with started(words) as first:
        call_operation(find_server(None), "ban", {"network": "192.0.2.0/24"})
        thread.start()
        with started([*words, "--replace", "5s"]):
            ended_at = count[0]
            assert first.wait(30) == 0
            wait_until(lambda: count[0] > ended_at + 20, "clients of the new server")
            ended.set()
            thread.join()
            found = call_operation(find_server(None), "stats", {})
            bans = call_operation(find_server(None), "bans", {})["bans"]
            if workers == "1":
                with socket.create_connection(("127.0.0.1", admin), 20) as peer:
                    peer.sendall(b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                    assert peer.recv(64).startswith(b"HTTP/1.1 200")
    assert wrong == []
    assert found["server"]["accepted"] >= 20
    assert [ban["cidr"] for ban in bans] == ["192.0.2.0/24"]
    assert not list(runtime.glob("successor-*"))
