"""``flowctl load`` as a process: against our own server, with files, conditions, exit statuses, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from cli_kit import finish, run, served, start

from flowctl.cli import main
from flowctl.load.profiles import as_dicts, profiles
from flowctl.wire.client import connect

STREAM = ["--publishers", "1", "--bit-rate", "600k", "--key-interval", "500ms", "--ramp", "200ms"]


def test_load_when_all_goes_well(tmp_path):
    report, parquet, whole = (tmp_path / name for name in ("run.html", "run.parquet", "run.json"))
    with served("live") as server:
        status, output, errors = run(
            *("load", server.url() + "?token=S3CRET", "--viewers", "12", *STREAM, "--duration", "3s"),
            *("--profile", "slow@100k:2", "--profile", "stall@500ms:1", "--profile", "B19:1"),
            *("--server-pid", str(server.process.pid), "--json", "--report", str(report), "--parquet", str(parquet)),
            *("--json-file", str(whole), "--fail-on", "healthy.missing>0", "--fail-on", "fds>500"),
            *("--fail-on", "playing_share<100%", "--fail-on", "healthy.p99_ms>5s", "--fail-on", "failed>0"),
        )
    assert status == 0, errors
    found = json.loads(output)
    assert found["passed"] is True
    assert [item["failed"] for item in found["conditions"]] == [False] * 5
    assert found["asked_for"] == {"slow@100k": 2, "stall@500ms": 1, "B19": 1, "healthy": 8}
    healthy = found["profiles"]["healthy"]
    assert (healthy["connections"], healthy["missing"], healthy["ends"]) == (8, 0, {"run_ended": 8})
    assert healthy["p50_ms"] > 0
    assert healthy["kbit_s"] > 300
    assert found["run"]["cpu_us_per_viewer_s"] > 0
    assert found["run"]["fds"] > 12
    assert found["hostile"][0]["profile"] == "B19"
    rows = json.loads(whole.read_text())
    assert sum(row["kind"] == "healthy" for row in rows["peers"]) == 8
    assert len(rows["samples"]) >= 2
    assert "healthy.missing&gt;0" in report.read_text()
    assert "connected" in errors  # the lines of progress
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "run.json", "run.parquet"]
    assert "S3CRET" not in output + errors + report.read_text() + whole.read_text()
    columns = pytest.importorskip("pyarrow.parquet").read_table(parquet)
    assert columns.num_rows == len(rows["peers"])
    assert b"S3CRET" not in parquet.read_bytes()


def test_load_when_a_condition_fails():
    with served("live") as server:
        status, output, errors = run(
            *("load", server.url(), "--viewers", "2", *STREAM, "--duration", "1500ms"),
            *("--fail-on", "connections>1", "--fail-on", "missing>0"),
            *("--profile", "never-read:1", "--fail-on", "never-read.p99_ms>1"),
        )
    assert status == 1, errors
    lines = output.splitlines()
    assert "FAIL  connections <= 1  (measured 2)" in lines
    assert any(line.startswith("FAIL  never-read.p99_ms <= 1  (not measured") for line in lines)
    assert "pass  missing <= 0  (measured 0)" in lines


def test_load_when_there_is_no_stream():
    with served("live") as server:
        status, output, _ = run("load", server.url(), "--viewers", "2", "--duration", "1s", "--ramp", "0")
    assert status == 1
    assert "FAIL  no healthy viewer got a frame: is there a publisher on that stream?" in output


@pytest.fixture
def nobody_starts(monkeypatch):
    """No server is about to listen: there is nothing to wait for."""
    monkeypatch.setattr(connect, "STARTING_S", 0.0)


@pytest.mark.usefixtures("nobody_starts")
def test_load_when_nobody_listens(capsys):
    assert main(["load", "rtmp://127.0.0.1:1/live/room", "--viewers", "1", "--duration", "1s"]) == 1
    assert "FAIL  nobody could connect: Connection refused" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_load_when_ended_by_a_signal(number, expected, tmp_path):
    report = tmp_path / "run.html"
    with served("live") as server:
        began = time.monotonic()
        arguments = ("load", server.url(), "--viewers", "3", *STREAM, "--duration", "20s", "--report", str(report))
        arguments += ("--fail-on", "missing>0")
        process = start(*arguments, stderr=subprocess.PIPE, bufsize=1)
        assert "connected" in process.stderr.readline()
        process.send_signal(number)
        status, output, errors = finish(process)
    assert (status, "Traceback" in errors) == (expected, False)
    assert "not judged  missing <= 0  (interrupted; measured 0)" in output.splitlines()
    assert any(line.startswith(f"{server.url()}: ") and line.endswith(", interrupted") for line in output.splitlines())
    assert "<strong>interrupted</strong>" in report.read_text()
    assert time.monotonic() - began < 18


@pytest.mark.parametrize("delay_s", [0.5, 0.9])
def test_load_when_interrupted_in_the_first_second_ends_without_complaint(delay_s):
    with served("live") as server:
        process = start("load", server.url(), "--viewers", "2", *STREAM, "--duration", "20s", start_new_session=True)
        time.sleep(delay_s)
        os.killpg(process.pid, signal.SIGINT)
        status, output, errors = finish(process)
    assert status == 130, errors
    for word in ("worker process", "protocol", "FAIL", "Traceback"):
        assert word not in output + errors


INTERRUPTED_IMPORT = """
import sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from flowctl.cli import main
sys.exit(main())
"""


def test_command_when_interrupted_while_it_is_imported_ends_in_silence():
    found = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, timeout=30, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (130, b"", b"")


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ([], "URL is missing", "rtmp://"),
        (["rtmp://192.0.2.1/live/room"], "192.0.2.1", "--allow-remote"),
        (["rtmp://127.0.0.1/"], "names no stream", ""),
        (["URL", "--profile", "healthly:90%"], "no profile 'healthly'", "--list-profiles"),
        (["URL", "--profile", "stall:300"], "make", "--viewers"),
        (["URL", "--fail-on", "p9_ms>1"], "no figure 'p9_ms'", "did you mean p99_ms?"),
        (["URL", "--fail-on", "stall.missing>0"], "no peer of this run is 'stall'", "healthy"),
        (["URL", "--viewers", "30000"], "--viewers is 30000", "20000"),
        (["URL", "--source", "a.flv"], "--source is for publishing", "--publishers 1"),
        (["URL", "--source", "a.flv", "--publishers", "1"], "no file a.flv", "FLV"),
        (["URL", "--measure", "some"], "--measure is 'some'", ""),
        (["URL", "--duration", "soon"], "--duration", "8s"),
        (["URL", "--report", "/nowhere/at/all.html"], "/nowhere/at", "make it first"),
        (["URL", "--server-pid", "4194304"], "4194304", ""),
        (["URL", "--publishers", "1", "--key-frame-size", "100MiB"], "--key-frame-size is '100MiB'", ""),
        (["URL", "--fail-on", "hostile.missing>0"], "no peer of this run is 'hostile'", "of a kind: viewers, all"),
        (["URL", "--fail-on", "fds>500"], "'fds>500' is about the server's process", "--server-pid"),
    ],
)
def test_load_when_used_wrongly_is_refused_before_anything_starts(arguments, error, hint, capsys):
    given = ["rtmp://127.0.0.1:1/live/room" if item == "URL" else item for item in arguments]
    assert main(["load", *given]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert error in shown.err.splitlines()[0]
    assert hint in shown.err


@pytest.mark.usefixtures("nobody_starts")
def test_load_when_a_share_is_nobody_says_so(capsys):
    given = ["load", "rtmp://127.0.0.1:1/live/room", "--viewers", "2", "--duration", "1s", "--profile", "stall:0%"]
    assert main(given) == 1
    assert "warning: of 2 viewers nobody is left for --profile stall" in capsys.readouterr().err


def test_load_when_profiles_are_listed(capsys):
    assert main(["load", "--list-profiles"]) == 0
    text = capsys.readouterr().out
    assert main(["load", "--list-profiles", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed == as_dicts()
    assert {item["name"] for item in listed} == profiles().keys()
    assert len(listed) == len(profiles())
    assert {"healthy", "slow", "sawtooth", "trace", "pause", "stall", "vanish", "B01", "B33"} <= profiles().keys()
    for item in listed:
        assert item["explanation"]
        assert item["expectation"]
        assert f"  {item['usage']}" in text
