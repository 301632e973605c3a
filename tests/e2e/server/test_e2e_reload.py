"""A live server that runs takes limits and bans from files: over real sockets, for open connections and new ones."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from e2e_kit import NAME, connection_to, put, wait_for_viewers, wait_until

from flowctl.core.flow.ledger import LedgerKind
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.limitsfile import LimitsFile
from flowctl.core.flow.limitsfile import render as render_limits
from flowctl.core.server.bans import Ban, render
from flowctl.live.settings.levels import Level, Role
from flowctl.reasons import CloseReason

FAR = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def limits_text(soft, **fields):
    return render_limits(LimitsFile(limits=Limits.parse(soft), **fields))


def bans_text(*cidrs):
    return render([Ban(cidr=cidr, expires=FAR, score=1.0) for cidr in cidrs])


@contextlib.contextmanager
def visitor(server, source):
    with socket.create_connection(server.address, timeout=20, source_address=(source, 0)) as sock:
        yield sock


def turned_away(server, source):
    """Return whether a connection from `source` is ended at once: with its first octet, or while it is being made."""
    before = server.accepted_count
    with contextlib.suppress(ConnectionResetError), visitor(server, source) as sock:
        assert sock.recv(1) == b""
    return server.accepted_count == before


def test_limits_when_the_file_changes_are_those_of_open_and_new_connections(live, clients, tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text(limits_text("1MiB,1000,4s", stuck_s=15.0), "utf-8")
    server = live(limits_file=path)
    old = clients.play(server)
    wait_for_viewers(server, 1)
    assert str(server.limits) == str(Limits.parse("1MiB,1000,4s"))
    new_limits = Limits.parse("3MiB,3000,9s")
    put(path, limits_text("3MiB,3000,9s", stuck_s=20.0))
    server.reload.look_now()
    wait_until(lambda: server.limits == new_limits, "the new limits")
    wait_until(lambda: connection_to(server, old).sender.limits == new_limits, "the limits of the viewer that is there")
    new = clients.play(server)
    wait_for_viewers(server, 2)
    assert connection_to(server, new).sender.limits == new_limits
    assert connection_to(server, new).sender.settings.stuck_s == 20.0
    wait_until(
        lambda: connection_to(server, old).sender.settings.stuck_s == 20.0, "the times of the viewer that is there"
    )


def test_limits_when_the_file_changes_reach_a_viewer_with_a_target_delay_of_its_stream_once(live, clients, tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text(limits_text("1MiB,1000,4s"), "utf-8")
    level = Level(stream=NAME, role=Role.VIEWER, values={"limits.target_delay_ms": 800})
    server = live(limits_file=path, levels=(level,))
    viewer, other = clients.play(server), clients.play(server, name="live/other")
    wait_for_viewers(server, 1)
    wait_for_viewers(server, 1, name="live/other")
    senders = [connection_to(server, item).sender for item in (viewer, other)]
    wait_until(lambda: senders[0].limits.target_delay_ms == 800, "the target delay of the stream")
    before = senders[0].limits
    put(path, limits_text("3MiB,3000,9s"))
    server.reload.look_now()
    expected = Limits.parse("3MiB,3000,9s")
    wait_until(lambda: senders[1].limits == expected, "the new limits of who plays another stream")
    wait_until(lambda: senders[0].limits == replace(expected, target_delay_ms=800), "those of the viewer")
    changes = [entry.why for entry in senders[0].ledger() if entry.kind is LedgerKind.LIMITS]
    assert changes == [str(before), str(senders[0].limits)]


def test_bans_when_the_file_comes_end_open_connections_and_refuse_new_ones(live, clients, tmp_path):
    path = tmp_path / "bans.jsonl"
    server = live(bans_file=path)
    clients.play(server)
    wait_for_viewers(server, 1)
    with visitor(server, "127.0.0.9") as bad, visitor(server, "127.0.0.10") as good:
        wait_until(lambda: len(server.connections()) == 3, "three connections")
        put(path, bans_text("127.0.0.9/32"))
        with contextlib.suppress(ConnectionResetError):  # without a word: the server looks by itself
            assert bad.recv(1) == b""
        wait_until(lambda: server.closed_by_reason.get(CloseReason.BANNED) == 1, "the end of the banned one")
        assert turned_away(server, "127.0.0.9")
        assert server.admission.refused == {"banned": 1}
        assert server.statistics().refused == {"banned": 1}
        put(path, bans_text("127.0.0.9/32") + "no JSON\n")
        server.reload.look_now()
        wait_until(lambda: server.reload.status["bans"].fault, "the fault")
        assert "line 2: not valid JSON" in server.reload.status["bans"].fault
        assert turned_away(server, "127.0.0.9")
        assert {connection.peer[0] for connection in server.connections()} == {"127.0.0.1", "127.0.0.10"}
        good.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            good.recv(1)
    put(path, "")
    server.reload.look_now()
    wait_until(lambda: not len(server.admission.bans), "the empty list")
    with visitor(server, "127.0.0.9"):
        wait_until(
            lambda: "127.0.0.9" in {connection.peer[0] for connection in server.connections()}, "who was banned before"
        )


def test_bans_when_a_viewer_of_the_address_behaves_leave_it_alone(live, clients, tmp_path):
    """An open connection that plays stays, though nobody new of its address comes in."""
    path = tmp_path / "bans.jsonl"
    server = live(bans_file=path)
    clients.play(server)
    wait_for_viewers(server, 1)
    with visitor(server, "127.0.0.1"):
        wait_until(lambda: len(server.connections()) == 2, "the one that only connects")
        put(path, bans_text("127.0.0.0/24"))
        server.reload.look_now()
        wait_until(lambda: server.closed_by_reason.get(CloseReason.BANNED) == 1, "the end of the one that does nothing")
    assert turned_away(server, "127.0.0.1")
    [viewer] = server.connections()
    assert viewer.session.behaves()


@pytest.mark.parametrize("name", ["--limits", "--bans"])
def test_serve_when_a_file_is_wrong_at_the_start_ends_with_status_2_and_says_where(tmp_path, name):
    path = tmp_path / "file"
    path.write_text("version = 1\nlimit = 3\n", "utf-8")
    command = [sys.executable, "-m", "flowctl", "serve", "live", "--port", "0", name, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{path}, line " in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_when_hung_up_reads_the_files_and_goes_on(tmp_path):
    limits = tmp_path / "limits.toml"
    limits.write_text(limits_text("1MiB,1000,4s"), "utf-8")
    command = [sys.executable, "-m", "flowctl", "serve", "live", "--port", "0", "--json", "--limits", str(limits)]
    log = tmp_path / "log"
    with log.open("wb") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file) as process:
        try:
            assert b"1.0 MiB" in process.stdout.readline()
            put(limits, limits_text("3MiB,1000,4s"))
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: "soft 3.0 MiB" in log.read_text("utf-8"), "the new limits in the log")
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
