"""The units of packaging/systemd, started by systemd itself in a machine of their own."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from certificate_kit import Pair
from machine_kit import WAIT_S, Machine, no_machine
from source_kit import ROOT

UNITS = ROOT / "packaging" / "systemd"
SETTINGS = """
host = "127.0.0.1"
rtmps = "127.0.0.1:1943"
tls_certificate = "tls.pem"
http = "127.0.0.1:8080"
admin = "127.0.0.1:8936"
ban_store = "/var/lib/flowctl/bans.sqlite"
play_auth = "token"
token_secret_file = "secret"
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A machine with the service as docs/operating.md says; one secret is root's alone, the other a group's."""
    if missing := no_machine():
        pytest.skip(missing)
    pair = Pair(tmp_path_factory.mktemp("tls"))
    made = Machine()
    try:
        made.run("useradd", "--system", "--user-group", "flowctl")
        for name in ("flowctl.service", "flowctl.socket"):
            made.write(f"/etc/systemd/system/{name}", (UNITS / name).read_text())
        drop_in = (UNITS / "secrets.conf").read_text()
        made.write("/etc/systemd/system/flowctl.service.d/secrets.conf", drop_in)
        made.write("/etc/flowctl/flowctl.toml", SETTINGS)
        made.write("/etc/flowctl/tls.pem", pair.certificate.read_text())
        made.write("/etc/flowctl/tls.key", pair.key.read_text(), mode="600")
        made.write("/etc/flowctl/secret", "x" * 32, mode="640", owner="root:flowctl")
        made.run("systemctl", "daemon-reload")
        made.run("systemctl", "start", "flowctl")
        yield made
    finally:
        made.close()


def stats(machine):
    return json.loads(machine.run("flowctl", "stats", "--json").stdout)


def entries(machine, *words):
    found = machine.run("journalctl", "--no-pager", "-o", "json", "-u", "flowctl", *words).stdout
    return [json.loads(line) for line in found.splitlines()]


def wait_for(condition):
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)
    return found


def test_service_when_started_serves_with_its_secrets_and_root_finds_it(machine):
    """The key of TLS is handed over by LoadCredential, that of tokens is a group's file of mode 640."""
    found = stats(machine)["server"]
    assert [item["name"] for item in found["listeners"]] == ["rtmp", "rtmps", "http"]
    assert "127.0.0.1:1943" in machine.run("systemctl", "status", "flowctl").stdout  # what it tells systemd of itself
    pid = machine.run("systemctl", "show", "-P", "MainPID", "flowctl").stdout.strip()
    assert found["pid"] == int(pid)
    assert machine.run("ps", "-o", "user=", "-p", pid).stdout.strip() == "flowctl"
    machine.run("flowctl", "ban", "203.0.113.7", "--duration", "1h", "--reason", "test")
    assert "203.0.113.7" in machine.run("flowctl", "bans").stdout
    assert machine.run("test", "-s", "/var/lib/flowctl/bans.sqlite").returncode == 0
    got = machine.run("curl", "-s", "http://127.0.0.1:8936/healthz", check=False)
    assert got.returncode == 127 or "ok" in got.stdout


def test_journal_when_the_service_logs_has_priorities_and_fields(machine):
    (started,) = entries(machine, "FLOWCTL_LOGGER=flowctl.live", "--grep=live server started")
    assert started["PRIORITY"] == "6"
    assert started["FLOWCTL_URL"] == "rtmp://127.0.0.1:1935/"
    assert started["_SYSTEMD_UNIT"] == "flowctl.service"
    assert "timestamp" not in started["MESSAGE"]
    assert {entry["PRIORITY"] for entry in entries(machine, "-p", "warning")} <= {"4", "3"}


def test_service_when_reloaded_takes_other_settings(machine):
    pid = stats(machine)["server"]["pid"]
    machine.write("/etc/flowctl/flowctl.toml", SETTINGS + 'soft = "1MiB,512,2s"\n')
    machine.run("systemctl", "reload", "flowctl")
    found = wait_for(lambda: (now := stats(machine)["server"])["limits"].startswith("soft 1.0 MiB") and now)
    assert found["pid"] == pid


def test_service_when_a_secret_is_for_everybody_to_read_does_not_start_and_says_why(machine):
    machine.run("chmod", "644", "/etc/flowctl/secret")
    assert machine.run("systemctl", "restart", "flowctl", check=False).returncode == 1
    said = "/etc/flowctl/secret has mode 0644: others than its owner may use it"
    wait_for(lambda: any(said in entry["MESSAGE"] for entry in entries(machine)))
    machine.run("chmod", "640", "/etc/flowctl/secret")
    machine.run("systemctl", "restart", "flowctl")
    assert stats(machine)["server"]["bans"] == 1  # the restart kept it


def test_service_when_it_logs_to_a_file_opens_it_again_on_sigusr1(machine):
    """Its folder is made by systemd; its two workers write to the same file, under the same limits of the unit."""
    path = "/var/log/flowctl/flowctl.log"
    machine.write("/etc/flowctl/flowctl.toml", f'{SETTINGS}log_file = "{path}"\nworkers = 2\n')
    machine.run("systemctl", "restart", "flowctl")
    machine.run("mv", path, f"{path}.1")
    machine.run("systemctl", "kill", "--kill-whom=main", "--signal=USR1", "flowctl")
    wait_for(lambda: machine.run("test", "-e", path, check=False).returncode == 0)
    machine.run("systemctl", "stop", "flowctl")
    before, after = (machine.run("cat", item).stdout for item in (f"{path}.1", path))
    assert before.count("live server started ") == 2
    assert [f"worker={number}" in after for number in "12"] == [True, True]
    assert "stopped" in after


def test_service_when_a_second_instance_takes_its_place_loses_no_viewer(machine):
    """As docs/operating.md says: flowctl@2 has the sockets and streams of flowctl@1, which drains and ends."""
    machine.run("systemctl", "stop", "flowctl")
    machine.write("/etc/flowctl/flowctl.toml", SETTINGS.replace('play_auth = "token"', ""))
    machine.write("/etc/systemd/system/flowctl@.service", (UNITS / "flowctl.service").read_text())
    for name in ("secrets", "replace"):
        machine.write(f"/etc/systemd/system/flowctl@.service.d/{name}.conf", (UNITS / f"{name}.conf").read_text())
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "flowctl@1")
    address = "rtmp://127.0.0.1/live/a"
    machine.run("systemd-run", "--unit=publisher", "/opt/flowctl/bin/flowctl", "publish", "synthetic", address)
    wait_for(lambda: machine.run("flowctl", "streams", "--json").stdout.count('"live/a"'))
    play = ("flowctl", "play", address, "--json", "--duration")
    with ThreadPoolExecutor(1) as executor:
        viewer = executor.submit(machine.run, *play, "6s")
        machine.run("systemctl", "start", "flowctl@2")
        late = machine.run(*play, "1s")
        for found in (json.loads(done.stdout) for done in (viewer.result(), late)):
            assert (found["end"]["reason"], found["missing"]["video"], found["video_gaps"]) == ("finished", 0, 0)
            assert found["received"]["inter"] > 0
    machine.run("systemctl", "stop", "publisher")
    wait_for(lambda: machine.run("systemctl", "is-active", "flowctl@1", check=False).stdout == "inactive\n")
    assert machine.run("systemctl", "is-active", "flowctl@2").stdout == "active\n"
    pid = machine.run("systemctl", "show", "-P", "MainPID", "flowctl@2").stdout.strip()
    assert stats(machine)["server"]["pid"] == int(pid)
