"""The admin surface of programs: several workers as one, and what is said where it cannot be had."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import httpx
import pytest
from cli_kit import connected, served
from e2e_kit import wait_until

from flowctl.core.text.extras import packages_by_extra


@pytest.mark.skipif(sys.platform != "linux", reason="workers need Linux")
def test_admin_when_there_are_workers_stands_for_all_of_them(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("run")  # a short one: sockets have short paths
    folder.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with (
        served("live", "--workers", "2", "--control", "off", "--admin", "127.0.0.1:0") as server,
        httpx.Client(base_url=server.ready["control"][0], timeout=20.0) as http,
    ):
        with connected(server, 12) as peers:
            assert [peer.recv(1) for peer in peers] == [b"\3"] * 12
            rows = http.get("/api/v1/connections?sort=number").json()["connections"]
            assert len(rows) == 12
            numbers = [row["connection"] for row in rows]
            assert numbers == sorted(numbers)
            page = http.get("/api/v1/connections?sort=number&limit=5&offset=5").json()
            assert [row["connection"] for row in page["connections"]] == numbers[5:10]
            assert page["found"]["connections"] == 12
            with http.stream("GET", "/api/v1/events") as events:
                lines = events.iter_lines()
                assert next(lines).startswith("retry")
                assert http.post("/api/v1/kick", json={"connection": numbers[-1]}).json()["kicked"] == 1
                told = next(line for line in lines if line.startswith("data: "))
            assert json.loads(told[6:])["connection"] == numbers[-1]
            text = http.get("/metrics").text
            assert "flowctl_workers 2.0" in text
            assert sum(map(float, re.findall(r"^flowctl_connections\{.*\} (\S+)$", text, re.MULTILINE))) == 11
            assert http.post("/api/v1/ban", json={"network": "127.0.0.1"}).json()["ended"] == 11
        wait_until(lambda: not http.get("/api/v1/connections").json()["connections"], "the end of all")
        assert http.get("/readyz").json() == {"status": "ready"}
        server.stop(signal.SIGTERM)
    assert server.status == 0


@pytest.mark.parametrize("package", sorted(packages_by_extra()["admin"] - packages_by_extra()["live"]))
@pytest.mark.parametrize("more", [[], ["--workers", "2"]])
def test_admin_when_a_package_of_it_is_missing_says_what_to_install(package, more):
    words = ["serve", "live", "--port", "0", "--control", "off", "--admin", "127.0.0.1:0", *more]
    code = f"import sys; sys.modules[{package!r}] = None; from flowctl.cli import main; sys.exit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: admin needs the extra 'admin': {package} is not installed\n" in done.stderr
    assert "hint: in flowctl's source folder: pip install '.[admin]'\n" in done.stderr
