"""Installing the servers that are compared: what is run as whom, and that nothing is left running."""

from __future__ import annotations

import subprocess

import pytest

import install_rivals
from compare import rivals


@pytest.fixture
def system(monkeypatch, tmp_path):
    """A system with apt-get and without nginx, as root; keeps the commands, and the policy during each of them."""
    programs = {"apt-get", "systemctl"}
    ran = []

    def run(command, **_):
        policy = install_rivals.POLICY
        ran.append((list(command), policy.read_text() if policy.exists() else None))
        if "install" in command:
            programs.add("nginx")
            (tmp_path / "module.so").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(install_rivals, "POLICY", tmp_path / "policy-rc.d")
    monkeypatch.setattr(install_rivals, "NGINX_PID", tmp_path / "nginx.pid")
    monkeypatch.setattr(rivals, "NGINX_MODULE", tmp_path / "module.so")
    monkeypatch.setattr(install_rivals.os, "geteuid", lambda: 0)
    monkeypatch.setattr(rivals.shutil, "which", lambda program: program if program in programs else None)
    monkeypatch.setattr(install_rivals.subprocess, "run", run)
    return programs, ran


def test_nginx_when_absent_is_installed_and_not_started(system, tmp_path):
    _, ran = system
    assert install_rivals.install_nginx() == ""
    ((command, policy),) = [item for item in ran if "install" in item[0]]
    assert list(install_rivals.PACKAGES) == command[-len(install_rivals.PACKAGES) :]
    assert "exit 101" in policy
    assert not (tmp_path / "policy-rc.d").exists()
    assert ran[-1][0] == ["systemctl", "disable", "--quiet", "nginx"]


def test_nginx_when_a_policy_let_it_start_is_stopped(system, tmp_path):
    _, ran = system
    (tmp_path / "policy-rc.d").write_text("theirs")
    (tmp_path / "nginx.pid").touch()
    assert install_rivals.install_nginx() == ""
    assert (tmp_path / "policy-rc.d").read_text() == "theirs"
    assert ["nginx", "-s", "stop"] in [command for command, _ in ran]


@pytest.mark.parametrize("hindrance", ["not root", "no apt-get", "an nginx"])
def test_nginx_when_it_cannot_be_installed_is_left_to_the_user(system, monkeypatch, hindrance):
    programs, ran = system
    if hindrance == "not root":
        monkeypatch.setattr(install_rivals.os, "geteuid", lambda: 1000)
    elif hindrance == "no apt-get":
        programs.remove("apt-get")
    else:
        programs.add("nginx")
    assert "libnginx-mod-rtmp" in install_rivals.install_nginx()
    assert ran == []


def test_nginx_when_apt_fails_says_why_and_leaves_no_policy(system, monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 100, "", "E: noise\nE: Unable to locate package nginx\n")
    monkeypatch.setattr(install_rivals.subprocess, "run", lambda *_, **__: failed)
    assert "Unable to locate package nginx" in install_rivals.install_nginx()
    assert not (tmp_path / "policy-rc.d").exists()


@pytest.mark.parametrize(("reason", "status"), [("", 0), ("nginx is not installed", 1)])
def test_main_when_done_says_what_became_of_each(monkeypatch, capsys, reason, status):
    monkeypatch.setattr(rivals, "install_node", lambda: "")
    monkeypatch.setattr(install_rivals, "install_nginx", lambda: reason)
    assert status == install_rivals.main()
    assert capsys.readouterr().out == f"node-media-server: can run\nnginx-rtmp: {reason or 'can run'}\n"
