"""A server that is to take the place of another one and does not come so far: the other one goes on with all it had."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from e2e_kit import wait_until
from replace_kit import HELLO, runtime, started

from flowctl.control.client import call_operation
from flowctl.control.effects import KEPT_IN_STORE
from flowctl.control.place import find_server, servers_here
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.zmtp.keys import KeyPair

__all__ = ["runtime"]  # a fixture

WAIT_S = 60
pytestmark = pytest.mark.timeout(3 * WAIT_S)  # some processes begin, one after the other
ASK = b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
KILLED = """
import os, signal, sys
from flowctl.cli import main
from flowctl.core.server.handover import Successor
from flowctl.live.cluster.workers.supervisor import Supervisor
from flowctl.live.server import LiveServer
owner, method = sys.argv.pop(1).split(".")
setattr(globals()[owner], method, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
sys.exit(main())
"""
"""A server that is killed when it calls a method of its own."""


def answers(port, says=HELLO):
    """Return what a server says first to a new client."""
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as peer:
        peer.sendall(says)
        return peer.recv(12)


class Scene:
    """A server, as its processes and operators are seen from outside, with a publisher and a viewer."""

    def __init__(self, process, words, ports, clients, runtime, *, alone):
        self.alone = alone  # without workers
        self.process, self.words, self.ports, self.runtime = process, words, ports, runtime
        self.banned = []
        server = SimpleNamespace(address=("127.0.0.1", ports.rtmp))
        self.publishing = clients.publish(server, SyntheticSource(), pace=1.0)
        wait_until(lambda: self.publishing.messages, "a publisher")
        self.viewer = clients.play(server)
        wait_until(lambda: self.viewer.messages, "its viewer")

    def goes_on(self):
        """Check that it listens everywhere, loses its viewer nothing, and has its name and its store of bans again."""
        name = f"live-127.0.0.1-{self.ports.rtmp}.sock"
        wait_until(lambda: [path.name for path in servers_here()] == [name], "its name for operators")
        assert "drains_for_s" not in call_operation(find_server(None), "stats", {})["server"]
        self.banned.append(f"192.0.2.{len(self.banned)}/32")
        assert call_operation(find_server(None), "ban", {"network": self.banned[-1]})["kept"] == KEPT_IN_STORE
        self.listens()
        seen = len(self.viewer.messages)
        wait_until(lambda: len(self.viewer.messages) > seen + 20, "pictures")
        assert self.viewer.end is self.publishing.end is None
        assert self.viewer.player.statistics().missing_video == 0
        assert "NetConnection.Connect.ReconnectRequest" not in self.viewer.codes
        assert self.process.poll() is None
        assert not list(self.runtime.glob("*-draining-*"))

    def listens(self):
        assert [answers(self.ports.rtmp)[:1] for _ in range(8)] == [HELLO[:1]] * 8
        wait_until(lambda: is_ready(self.ports.admin), "its page for operators")
        for port in (self.ports.far, self.ports.origin):
            wait_until(lambda there=port: listens(there), f"port {port}")

    def fails(self, *more, kill=""):
        """Run a server that is to take its place, and has other settings or is killed; return what it said."""
        program = [sys.executable, *(("-c", KILLED, kill) if kill else ("-m", "flowctl"))]
        ended = subprocess.run(
            [*program, *self.words, "--replace", "20s", *more],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert ended.returncode == -signal.SIGKILL if kill else ended.returncode > 0, ended.stderr
        return ended.stderr


@pytest.fixture(params=[1, 2], ids=["alone", "workers"])
def scene(request, clients, runtime, tmp_path):
    """Return a server; at the end of the test, one that is as it should be takes its place."""
    names = ("rtmp", "admin", "far", "origin")
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in names]
    ports = SimpleNamespace(**dict(zip(names, free, strict=True)))
    keys = KeyPair.generate()
    keys.write(tmp_path / "server.key")
    (tmp_path / "clients").write_text(f"{keys.public.hex()} admin\n")
    (tmp_path / "clients").chmod(0o600)
    words = ["serve", "live", "--port", str(ports.rtmp), "--workers", str(request.param), "--json"]
    words += ["--admin", f"127.0.0.1:{ports.admin}", "--control", f"ipc,tcp://127.0.0.1:{ports.far}"]
    words += ["--control-keys", str(tmp_path / "server.key"), "--control-clients", str(tmp_path / "clients")]
    words += ["--ban-store", str(tmp_path / "bans.sqlite")]
    alone = request.param == 1
    if alone:
        words += ["--origin", f"127.0.0.1:{ports.origin}"]
    else:
        ports.origin = ports.rtmp
    with started([sys.executable, "-m", "flowctl", *words]) as process:
        scene = Scene(process, words, ports, clients, runtime, alone=alone)
        yield scene
        with started([sys.executable, "-m", "flowctl", *words, "--replace", "1s"]) as second:
            assert process.wait(WAIT_S) == 0
            scene.listens()
            bans = call_operation(find_server(None), "bans", {})["bans"]
            assert sorted(ban["cidr"] for ban in bans) == sorted(scene.banned)
            assert second.poll() is None
    assert not list(runtime.glob("successor-*"))


def test_server_when_its_successor_is_killed_goes_on(scene):
    start = "LiveServer.start" if scene.alone else "Supervisor.start"
    for point in ("Successor.receive_sockets", start, "Successor.take_over"):
        scene.fails(kill=point)
        scene.goes_on()


def test_server_when_its_successor_cannot_start_goes_on(scene):
    """A port is in use, or a file or folder cannot be written: some of it is found out before it asks, some after."""
    for option in ("--admin", *(("--http", "--origin") if scene.alone else ())):
        with socket.create_server(("127.0.0.1", 0)) as busy:
            said = scene.fails(option, f"127.0.0.1:{busy.getsockname()[1]}")
        assert "Address already in use" in said
        scene.goes_on()
    for option in ("--events", "--record-folder", "--ban-store") if scene.alone else ():
        said = scene.fails("--record", "live/*", option, "/dev/null/there")
        assert "/dev/null" in said
    scene.goes_on()


def is_ready(admin):
    try:
        return answers(admin, ASK) == b"HTTP/1.1 200"
    except OSError:  # it is starting again
        return False


def listens(port):
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))
