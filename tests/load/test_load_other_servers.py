"""The load tester against servers that are not ours: nginx-rtmp and Node-Media-Server, where they are installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from compare import rivals

pytestmark = pytest.mark.realtime

PROFILES = ("healthy:60%", "slow@200k:20%", "stall@1s:20%")
OTHERS = ("nginx-rtmp", "node-media-server")
SETTINGS = rivals.Settings(viewers=100, bit_rate=600_000)


@pytest.mark.parametrize("name", OTHERS)
def test_load_when_the_server_is_another_measures_it(name):
    contender = rivals.CONTENDERS[name]
    if reason := contender.absent():
        pytest.skip(reason)
    with contender.start(SETTINGS) as running:
        summary = load(running.port, running.pids[-1])
    healthy, slow, stalled = (summary["profiles"][profile.partition(":")[0]] for profile in PROFILES)
    assert summary["asked_for"] == {"healthy": 12, "slow@200k": 4, "stall@1s": 4}
    for crowd in (healthy, slow, stalled):
        assert (crowd["playing_share"], crowd["failed"], crowd["errors"]) == (1.0, 0.0, 0.0)
        assert (crowd["broken_restarts"], crowd["started_without_key"]) == (0.0, 0.0)
    assert healthy["missing"] == 0
    assert healthy["p99_ms"] > 0
    assert slow["p50_ms"] > healthy["p50_ms"]
    assert slow["kbit_s"] < healthy["kbit_s"]
    assert stalled["kbit_s"] < healthy["kbit_s"]
    assert summary["run"]["rss_kb"] > 0
    assert summary["run"]["fds"] >= 20


def load(port: int, pid: int) -> dict:
    command = [sys.executable, "-m", "flowctl", "load", f"rtmp://127.0.0.1:{port}/live/test", "--json"]
    command += ["--viewers", "20", "--publishers", "1", "--bit-rate", "600k", "--ramp", "0.2s", "--duration", "4s"]
    command += ["--server-pid", str(pid), "--measure", "all"]
    command += [item for profile in PROFILES for item in ("--profile", profile)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
