"""Workers: several processes on one port, and the supervisor above them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from certificate_kit import Pair
from cli_kit import PATIENCE_S, connected, run, served
from e2e_kit import Clients, frames_of, wait_for_end, wait_until

from flowctl.cli.servers import load_server
from flowctl.control.client import call_operation
from flowctl.flv import TAG_VIDEO
from flowctl.live.cluster.workers import restarts
from flowctl.live.cluster.workers.supervisor import Supervisor
from flowctl.live.config import LiveConfig
from flowctl.load.hostile.attacks import HOSTILE
from flowctl.load.hostile.base import AttackContext
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.session_config import ClientSessionConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers need Linux")


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path_factory):
    """The sockets of the workers are in a folder of the test's own."""
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def until(true):
    wait_until(true, "it has come true", PATIENCE_S)


def alive(pid):
    """Return whether a process runs: one that has ended and waits for its parent does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    return False


def test_workers_when_one_is_killed_serve_on_and_it_is_started_again(own_folder):
    with served("live", "--workers", "2", "--control", "off") as server:
        first, second = server.ready["workers"]
        os.kill(first, signal.SIGKILL)
        server.wait_logged("worker has ended, it is started again")
        with connected(server, 16) as peers:  # some wait in the socket of the one that was killed
            assert [peer.recv(1) for peer in peers] == [b"\3"] * 16
        assert alive(second)
        server.stop(signal.SIGTERM)
    assert server.status == 0
    assert "ended=SIGKILL" in server.log
    assert list(own_folder.rglob("workers-*")) == []


def test_workers_when_their_supervisor_is_killed_end():
    with served("live", "--workers", "2", "--control", "off") as server:
        pids = server.ready["workers"]
        assert all(map(alive, pids))
        server.process.kill()
        until(lambda: not any(map(alive, pids)))


def test_workers_when_they_cannot_begin_are_an_error_with_their_words():
    status, _, errors = run("serve", "live", "--port", "0", "--workers", "2", "--hooks", "no_such_module:Hooks")
    assert status == 2
    assert "no_such_module" in errors


def test_workers_when_there_are_several_listeners_serve_each(tmp_path):
    pair = Pair(tmp_path)
    secured = ("--rtmps", "127.0.0.1:0", "--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key))
    hosts = ("--host", "127.0.0.1,127.0.0.2", "--http", "127.0.0.1:0")
    with served("live", "--workers", "2", "--control", "off", *hosts, *secured) as server:
        os.kill(server.ready["workers"][0], signal.SIGKILL)
        server.wait_logged("worker has ended, it is started again")
        plain, secure, other = (server.ready[name] for name in ("rtmp", "rtmps", "http"))
        assert [address.rpartition(":")[0] for address in plain] == ["127.0.0.1", "127.0.0.2"]
        for address in (*plain, *secure, *other):
            for _ in range(6):
                with reached(address, pair.client() if address in secure else None) as peer:
                    peer.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" if address in other else b"\3" + bytes(1536))
                    assert peer.recv(1) == (b"H" if address in other else b"\3")


def reached(address, context):
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), 20)
    return sock if context is None else context.wrap_socket(sock, server_hostname="localhost")


def test_workers_when_the_port_is_in_use_are_refused():
    with served("live", "--workers", "2", "--control", "off") as server:
        port = str(server.ready["port"])
        status, _, errors = run("serve", "live", "--port", port, "--workers", "2")
    assert status == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in errors
    assert "hint: choose another port" in errors


def test_workers_when_the_file_of_settings_changes_all_take_it(tmp_path):
    path = tmp_path / "flowctl.toml"
    path.write_text('soft = "1MiB,100,1s"\n', "utf-8")
    with served("live", "--workers", "2", "--config", str(path)) as server:
        beside = tmp_path / "beside"
        beside.write_text('soft = "2MiB,100,1s"\ngroups = 2\n[role.viewer]\npolicy = "audio-first"\n', "utf-8")
        beside.replace(path)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: asked(server, "limits")["soft"] == "2MiB,100,1s")
        until(lambda: "limits_of_workers" not in asked(server, "stats")["server"])
        beside.write_text('soft = "3MiB,100,1s"\nstuck = "soon"\n', "utf-8")
        beside.replace(path)
        found = asked(server, "reload")["config"]
        assert found["fault"] == f"{path}, line 2: stuck: 'soon' is not a number with a unit"
        assert found["waits_for_restart"] == ["groups"]
        assert asked(server, "limits")["soft"] == "2MiB,100,1s"
    assert server.log.count("settings changed") == 2


def test_workers_when_levels_change_who_has_a_name_say_that_it_waits(tmp_path):
    path, beside = tmp_path / "flowctl.toml", tmp_path / "beside"
    path.write_text('[application.talk]\nreturn_grace = "1s"\n', "utf-8")
    waits = ['[application."talk"].return_grace', '[application."talk"].second_publisher', "publishers_per_address"]
    with served("live", "--workers", "2", "--config", str(path)) as server:
        names = 'return_grace = "9s"\nsecond_publisher = "replace"\n'
        for text, waiting in (
            (f"publishers_per_address = 3\n[application.talk]\n{names}", waits),
            (f'[application.talk]\n{names}policy = "audio-first"\n', waits[:2]),
            ('[application.talk]\nreturn_grace = "1s"\npolicy = "audio-first"\n', []),
        ):
            beside.write_text(text, "utf-8")
            beside.replace(path)
            found = asked(server, "reload")["config"]
            assert (found.get("fault"), sorted(found.get("waits_for_restart", []))) == (None, waiting), found
    changes = [line for line in server.log.splitlines() if "settings changed" in line and "changed=" in line]
    assert len(changes) == 2  # the policy, in each worker
    assert all("changed=['[application.\"talk\"]']" in line for line in changes), changes


def asked(server, operation, **given):
    return call_operation(server.ready["control"][0], operation, given)


def test_operations_when_there_are_workers_are_of_all_of_them(tmp_path):
    bans = tmp_path / "bans"
    bans.write_text('{"cidr": "203.0.113.9", "expires": null}\n')
    with served("live", "--workers", "2", "--bans", str(bans)) as server:
        assert [item["cidr"] for item in asked(server, "unban", network="203.0.113.9")["lifted"]] == ["203.0.113.9/32"]
        asked(server, "limits", soft="1MiB,100,2s")
        banned = asked(server, "ban", network="203.0.113.7", duration="10min", reason="test")
        assert banned["kept"] == "until the server ends"
        os.kill(server.ready["workers"][0], signal.SIGKILL)
        server.wait_logged("worker has ended")
        until(lambda: all(row["state"] == "serving" for row in asked(server, "stats")["server"]["workers"]))
        found = asked(server, "stats", viewers="all")["server"]
        assert [row["worker"] for row in found["workers"]] == [1, 2]
        assert (found["bans"], found["limits_from"], found["pid"]) == (1, "command", server.process.pid)
        assert "limits_of_workers" not in found  # the one that came later has the same
        changes = asked(server, "changes")
        assert [item["what"] for item in changes["changes"]][-3:] == ["unban", "limits", "ban"]
        assert asked(server, "drain", within="1s")["draining"]
        assert server.process.wait(PATIENCE_S) == 0


def test_bans_when_there_are_workers_and_a_store_outlive_a_kill_of_all(tmp_path):
    store = str(tmp_path / "bans.sqlite")
    with served("live", "--workers", "2", "--ban-store", store) as server:
        banned = asked(server, "ban", network="203.0.113.7", duration="10min", reason="test")
        assert (banned["in_store"], banned["kept"]) == (True, "in the ban store, and after a restart too")
        asked(server, "ban", network="203.0.113.8")
        asked(server, "unban", network="203.0.113.8")
        context = AttackContext(
            host="127.0.0.1", port=server.ready["port"], source="127.0.9.1", watch_s=0.05, probe=False
        )
        bomb = HOSTILE["B08"]
        one = replace(bomb, forms=bomb.forms[:1])  # the others go over other limits, maybe first

        def is_judged():
            asyncio.run(one.attack(context))
            return len(asked(server, "bans")["bans"]) >= 2

        until(is_judged)  # workers saw it, the supervisor has decided
        pids = server.ready["workers"]
        server.process.kill()
        until(lambda: not any(map(alive, pids)))
    with served("live", "--workers", "2", "--ban-store", store) as server:
        found = {item["cidr"]: item for item in asked(server, "bans")["bans"]}
        assert found.keys() == {"203.0.113.7/32", "127.0.9.1/32"}
        assert found["203.0.113.7/32"]["reason"] == "test"
        assert found["203.0.113.7/32"]["source"].startswith("command")
        assert found["127.0.9.1/32"]["source"] == "penalty"
        assert "amf_depth" in found["127.0.9.1/32"]["evidence"]
        assert asked(server, "stats")["server"]["bans"] >= 2
        server.stop()
    assert server.status == 0


HOOKS = """
import pathlib
from flowctl.live.hooks import LiveHooks
if pathlib.Path({flag!r}).exists():
    raise RuntimeError("the license has ended")
class Hooks(LiveHooks):
    pass
"""


def test_workers_when_they_end_at_once_wait_and_tell_why(tmp_path, monkeypatch):
    flag = tmp_path / "flag"
    (tmp_path / "broken_hooks.py").write_text(HOOKS.format(flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with served("live", "--workers", "2", "--hooks", "broken_hooks:Hooks", "--log-json") as server:
        flag.touch()
        os.kill(server.ready["workers"][1], signal.SIGKILL)
        server.wait_logged("license has ended")
        server.wait_logged('"in_s": 0.')  # after the first failure it waits
        found = asked(server, "stats")
        assert found["server"]["workers"][0]["state"] == "serving"
        flag.unlink()
        until(lambda: asked(server, "stats")["server"]["workers"][1]["state"] == "serving")
        server.stop()
    assert server.status == 0
    ends = [line for line in map(json.loads, server.log.splitlines()) if line["event"].startswith("worker has ended")]
    assert ends[0]["ended"] == "SIGKILL"
    assert all("the license has ended" in line["error"] for line in ends[1:])


def test_workers_when_one_hangs_kill_it(monkeypatch):
    monkeypatch.setattr(restarts, "HUNG_S", 1.0)
    monkeypatch.setattr(restarts, "ASKED_EVERY_S", 0.1)
    ends = threading.Event()
    supervisor = Supervisor(load_server("live"), LiveConfig(control="off"), 2, wake=ends.set)

    def look(true):
        end = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < end, "it has not come true in time"
            ends.wait(0.05)
            ends.clear()
            supervisor.look()

    try:
        assert supervisor.start(lambda timeout_s: time.sleep(min(timeout_s, 0.05)) or False)
        hung = supervisor.workers()[0]
        os.kill(hung.pid, signal.SIGSTOP)
        look(lambda: hung.serial not in {item.serial for item in supervisor.workers()})
        monkeypatch.setattr(restarts, "HUNG_S", PATIENCE_S)  # a second is too short for a machine that does much else
        look(lambda: len(supervisor.workers()) == 2 and all(item.ready for item in supervisor.workers()))
        assert hung.child.process.returncode == -signal.SIGKILL
    finally:
        assert supervisor.stop()


def test_supervisor_when_a_job_about_bans_fails_does_the_next():
    supervisor = Supervisor(load_server("live"), LiveConfig(control="off", port=0), 2, wake=list)
    done = []
    try:
        for job in (lambda: 1 // 0, lambda: done.append("next"), None):
            supervisor._jobs.put(job)
        supervisor._do_jobs()
        assert done == ["next"]
    finally:
        supervisor.stop()


def test_limits_of_connections_when_there_are_workers_hold_over_all(tmp_path):
    events = tmp_path / "events"
    settings = ("--per-address", "6", "--new-per-address", "0", "--events", str(events))
    with served("live", "--workers", "2", *settings) as server:
        answered = []
        with connected(server, 24) as peers:
            for peer in peers:
                with contextlib.suppress(ConnectionError):
                    answered.append(peer.recv(1))
            found = asked(server, "stats")["server"]
    assert answered.count(b"\3") == 6
    assert (found["connections"], found["refused"]) == (6, {"connections_per_address": 18})
    names = {path.name.rpartition("-")[0].rpartition("-")[0] for path in events.rglob("*.parquet")}
    assert {name.rpartition("-")[2] for name in names} == {"1", "2"}


def test_stream_when_a_worker_is_killed_goes_on_for_the_viewers_of_others():
    settings = ("--new-per-address", "0", "--return-grace", "0")
    with served("live", "--workers", "2", *settings) as server, Clients() as clients:
        there = SimpleNamespace(address=("127.0.0.1", server.ready["port"]))
        source = SyntheticSource(video_bit_rate=300_000, key_interval_s=0.5)
        publishing = clients.publish(there, source)
        until(lambda: [row for row in asked(server, "stats")["streams"] if row["publisher"]])
        plays = [clients.play(there) for _ in range(12)]
        until(lambda: all(len(play.messages) > 5 for play in plays))
        found = asked(server, "stats", viewers="all")
        (stream,) = found["streams"]
        assert (stream["viewers"], stream["publisher"]) == (12, f"127.0.0.1:{publishing.local_port}")
        home = {int(row["peer"].rpartition(":")[2]): row["worker"] for row in found["viewers"]}
        other = 3 - stream["worker"]
        lost = [play for play in plays if home[play.local_port] == other]
        kept = [play for play in plays if home[play.local_port] != other]
        os.kill(server.ready["workers"][other - 1], signal.SIGKILL)
        wait_for_end(*lost)
        assert all(play.end is None for play in kept)
        patient = ClientSessionConfig(limits=WireLimits(handshake_time_s=PATIENCE_S))
        late = [clients.play(there, config=patient) for _ in range(8)]  # some of them wait for the successor
        until(lambda: all(len(play.messages) > 5 for play in late))
        clients.group.call_soon(publishing.publisher.finish, "done")
        wait_for_end(publishing, *kept, *late)
        sent = [payload for _, payload in frames_of(publishing.messages, TAG_VIDEO)]
        for play in [*kept, *late]:
            got = [payload for _, payload in frames_of(play.messages, TAG_VIDEO)]
            assert got == sent[-len(got) :]
    assert server.status == 0
