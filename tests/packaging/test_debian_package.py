"""The Debian package: made of the wheel, installed by apt on a copy of this machine, run as its unit says, removed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from machine_kit import Machine, no_machine
from sandbox_kit import no_sandbox, run_in_sandbox, said_in
from source_kit import ROOT

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
WAIT_S = 240
pytestmark = pytest.mark.timeout(2 * WAIT_S)


def why_not() -> str:
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return "no Debian is here"
    if not Path("/usr/bin", PYTHON).exists() and "\nPackage: " not in "\n" + apt_says("show", PYTHON):
        return f"this release has no {PYTHON}"
    return no_sandbox()


def apt_says(*words: str) -> str:
    return subprocess.run(["apt-cache", *words], capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deb")
    reason = why_not()
    if reason:
        pytest.skip(reason)
    subprocess.run(
        ["nice", sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        capture_output=True,
        timeout=WAIT_S,
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    built = subprocess.run(
        ["nice", ROOT / "packaging" / "debian" / "build", wheel, folder],
        env={**os.environ, "PYTHON": sys.executable, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    wheel.unlink()
    return Path(built.stdout.strip())


LIVES = r"""
touch /mnt/begun
say() { echo "== $1"; }
apt-get install --yes --quiet --no-install-recommends /mnt/given/*.deb >/mnt/apt 2>&1 || { cat /mnt/apt; exit 1; }
say version; flowctl version
say enabled; systemctl is-enabled flowctl.service
say user; id -un flowctl; id -gn flowctl
touch /mnt/installed

sed -i 's/^#port = .*/port = 0/' /etc/flowctl/flowctl.toml
install -d -o flowctl -g flowctl -m 700 /run/flowctl /var/lib/flowctl
cd /var/lib/flowctl
unit=/usr/lib/systemd/system/flowctl.service
command=$(sed -n 's/^ExecStart=//p' $unit)
env $(sed -n 's/^Environment=\(XDG_RUNTIME_DIR=.*\)/\1/p' $unit) \
    setpriv --reuid flowctl --regid flowctl --init-groups --no-new-privs $command --log-json 2>/mnt/log &
until grep -qs '"serving"' /mnt/log; do kill -0 $! || { cat /mnt/log; exit 1; }; sleep 0.1; done
port=$(sed -n 's/.*"port": *\([0-9]*\).*"serving".*/\1/p' /mnt/log)
flowctl publish synthetic rtmp://127.0.0.1:$port/live/room --duration 4s --json >/mnt/published 2>&1 &
say played; flowctl play rtmp://127.0.0.1:$port/live/room --duration 2s --json
say stats; flowctl stats --json
pid=$(pgrep -o -u flowctl)
kill -TERM "$pid"
status=0; wait %1 || status=$?
say ended; echo $status
say made; find /opt/flowctl -newer /mnt/installed -type f

# Once more, as an upgrade would: what the operator wrote stays.
dpkg --install --force-confold /mnt/given/*.deb >/mnt/dpkg 2>&1 || { cat /mnt/dpkg; exit 1; }
say port; sed -n 's/^port = //p' /etc/flowctl/flowctl.toml
systemctl disable flowctl.service 2>/dev/null
dpkg --install /mnt/given/*.deb >/mnt/dpkg 2>&1
say still; systemctl is-enabled flowctl.service || true
apt-get remove --yes --quiet flowctl >/mnt/apt 2>&1
say removed; ls -d /opt/flowctl /usr/bin/flowctl /etc/flowctl/* 2>/dev/null || true
apt-get purge --yes --quiet flowctl >/mnt/apt 2>&1
say purged; find /etc /opt /usr /var -path /var/tmp -prune -o -path '*flowctl*' -newer /mnt/begun -print
"""


def test_package_when_installed_by_apt_serves_is_kept_by_upgrades_and_goes_when_purged(package, tmp_path):
    done = run_in_sandbox(tmp_path, LIVES, given=package.parent, timeout_s=WAIT_S)
    said = said_in(done.stdout)
    assert said["version"].startswith("flowctl ")
    assert f"(Python {PYTHON.removeprefix('python')}" in said["version"]
    assert said["enabled"] == "enabled"
    assert said["user"].split() == ["flowctl", "flowctl"]
    played = json.loads(said["played"].splitlines()[-1])
    assert played["received"]["key"] + played["received"]["inter"] > 0
    assert played["missing"]["video"] == 0
    assert json.loads(said["stats"])["server"]["accepted"] == 2
    assert (said["ended"], said["made"], said["port"]) == ("0", "", "0")
    assert said["still"] == "disabled"
    assert said["removed"] == "/etc/flowctl/flowctl.toml"
    assert said["purged"] == ""


def test_package_when_systemd_is_here_runs_as_a_service_until_it_is_removed(package):
    """Started when it is installed, as its user, with its state; started anew by an upgrade; stopped and forgotten."""
    if reason := no_machine():
        pytest.skip(reason)
    machine = Machine()
    try:
        machine.run("rm", "-f", "/usr/sbin/policy-rc.d")  # of a container, where no package starts a service
        machine.run("sh", "-c", "base64 -d >/tmp/flowctl.deb", given=base64.b64encode(package.read_bytes()).decode())
        pids = []
        for _ in range(2):
            machine.run("dpkg", "--install", "/tmp/flowctl.deb", timeout_s=WAIT_S)
            shown = machine.run("systemctl", "show", "flowctl", "--property=ActiveState,UnitFileState,User,MainPID")
            said = dict(line.split("=", 1) for line in shown.stdout.splitlines())
            pids.append(said.pop("MainPID"))
            assert said == {"ActiveState": "active", "UnitFileState": "enabled", "User": "flowctl"}
            assert json.loads(machine.run("flowctl", "stats", "--json").stdout)["server"]["pid"] == int(pids[-1])
        assert pids[0] != pids[1]
        user = machine.run("id", "--user", "flowctl").stdout
        assert machine.run("stat", "--format=%u", f"/proc/{pids[1]}", "/var/lib/flowctl/").stdout == user * 2
        machine.run("dpkg", "--purge", "flowctl", timeout_s=WAIT_S)
        assert machine.run("systemctl", "is-active", "flowctl", check=False).stdout == "inactive\n"
        assert not machine.run("sh", "-c", "ls -d /var/lib/flowctl /var/lib/private/flowctl || true").stdout
    finally:
        machine.close()
