"""What systemd hands over and is told: sockets that listen, readiness, reloading, the watchdog; units."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from source_kit import ROOT

from flowctl.control.place import SERVICE_FOLDER
from flowctl.core.server.systemd import Notifier, ThreadProbe, handed_sockets
from flowctl.errors import ConfigError

UNITS = ROOT / "packaging" / "systemd"
WAIT_S = 20
MOST_EXPOSED = 20
"""`systemd-analyze security` in tenths: what is left is that it has a network."""


@pytest.fixture
def told(tmp_path):
    """A socket that hears what systemd would, and its address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(WAIT_S)
        yield sock


@pytest.fixture
def short_folder():
    with tempfile.TemporaryDirectory(prefix="f-") as folder:
        yield folder


def hear(sock):
    return dict(line.split("=", 1) for line in sock.recv(4096).decode().splitlines())


def test_notifier_when_there_is_no_systemd_does_nothing():
    notifier = Notifier({"WATCHDOG_USEC": "1000000"})
    notifier.ready("serving")
    notifier.stopping()
    assert (notifier.active, notifier.watchdog_s) == (False, None)


def test_notifier_when_there_is_one_tells_in_its_words(told):
    environment = {"NOTIFY_SOCKET": told.getsockname(), "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier(environment)
    assert (environment, notifier.watchdog_s) == ({}, 1.5)
    notifier.ready("two\nlines")
    assert hear(told) == {"READY": "1", "STATUS": "two lines"}
    notifier.reloading()
    found = hear(told)
    assert found["RELOADING"] == "1"
    assert int(found["MONOTONIC_USEC"]) > 0
    notifier.alive()
    assert hear(told) == {"WATCHDOG": "1"}
    notifier.stopping()
    assert hear(told) == {"STOPPING": "1"}


def test_notifier_when_the_address_is_abstract_reaches_it():
    name = f"flowctl-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name)
        sock.settimeout(WAIT_S)
        Notifier({"NOTIFY_SOCKET": "@" + name}).alive()
        assert hear(sock) == {"WATCHDOG": "1"}


def test_watchdog_when_it_is_meant_for_another_process_is_none_of_ours(told):
    environment = {"NOTIFY_SOCKET": told.getsockname(), "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}
    assert Notifier(environment).watchdog_s is None


def test_pulse_when_a_thread_does_not_answer_has_stopped():
    asked = []
    probe = ThreadProbe([asked.append, asked.append])
    assert probe.probe_threads()
    first, _ = asked
    first()
    assert not probe.probe_threads()
    for callback in asked:
        callback()
    assert probe.probe_threads()


@pytest.mark.parametrize("pid", ["1", "", "x"])
def test_handed_sockets_when_they_are_anothers_are_none(pid):
    assert handed_sockets({"LISTEN_PID": pid, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "rtmp"}) == {}


def test_handed_sockets_when_their_name_says_nothing_are_refused():
    """A socket without a purpose would serve nobody, or the wrong protocol."""
    environment = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "flowctl.socket"}
    with pytest.raises(ConfigError, match=r"'flowctl.socket'") as caught:
        handed_sockets(environment)
    assert "FileDescriptorName=rtmp|rtmps|http|https" in caught.value.hint
    assert environment == {}


@pytest.mark.skipif(sys.platform != "linux", reason="as systemd starts it")
@pytest.mark.parametrize("workers", ["1", "2"])
def test_serve_when_started_by_systemd_uses_its_sockets_and_tells_it(told, workers, tmp_path, short_folder):
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    number, http = (sock.fileno() for sock in listeners)
    serve = ["-m", "flowctl", "serve", "live", "--control", "off", "--workers", workers, "--port", "1"]
    begin = f"""if True:
        import os, sys
        os.dup2({number}, 3), os.dup2({http}, 4)
        os.environ |= {{"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "rtmp:http"}}
        os.execv(sys.executable, [sys.executable, *{serve!r}])
    """
    environment = os.environ | {
        "NOTIFY_SOCKET": told.getsockname(),
        "WATCHDOG_USEC": "400000",
        "XDG_RUNTIME_DIR": str(short_folder),
    }
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-c", begin], env=environment, pass_fds=(number, http), stdout=log, stderr=log
    )
    try:
        ready = hear(told)
        assert ready["READY"] == "1", (tmp_path / "log").read_text()
        for sock, says, answer in (
            (listeners[0], b"\3" + bytes(1536), b"\3"),
            (listeners[1], b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"H"),
        ):
            with socket.create_connection(sock.getsockname(), WAIT_S) as peer:
                peer.sendall(says)
                assert peer.recv(1) == answer
        while "WATCHDOG" not in hear(told):
            pass
        process.send_signal(signal.SIGTERM)
        while "STOPPING" not in hear(told):
            pass
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
        log.close()
        for sock in listeners:
            sock.close()


def test_units_when_verified_by_systemd_are_right(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not here")
    drop_ins = tmp_path / "flowctl.service.d"
    drop_ins.mkdir()
    shutil.copy(UNITS / "secrets.conf", drop_ins)
    for unit in UNITS.glob("flowctl.*"):
        program = str(Path(sys.executable).with_name("flowctl"))
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/flowctl/bin/flowctl", program))
    units = sorted(map(str, tmp_path.glob("flowctl.[!.]*[!d]")))
    found = subprocess.run(
        [analyze, "verify", "--man=no", *units], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
    words = [analyze, "security", "--offline=yes", f"--threshold={MOST_EXPOSED}", units[0]]
    judged = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert judged.returncode == 0, judged.stdout


def test_unit_when_read_notifies_reloads_and_is_no_root():
    lines = (UNITS / "flowctl.service").read_text().splitlines()
    wanted = {"Type=notify", "ExecReload=/bin/kill -HUP $MAINPID", "WatchdogSec=30", "DynamicUser=yes"}
    assert wanted <= set(lines)
    runtime = {line.partition("=")[2] for line in lines if "RUNTIME_DIR=" in line}
    assert runtime == {f"XDG_RUNTIME_DIR={SERVICE_FOLDER.parent}"}  # where root's commands look for its server
