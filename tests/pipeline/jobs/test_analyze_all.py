"""``flowctl analyze all`` and ``report``: what they print, how they end, and what they leave behind.

As a process `all` is run by tests/e2e/records/test_e2e_loop.py, and `sessions` by test_analyze_cli.py.
"""

from __future__ import annotations

import json

import pytest
from page_kit import Page
from record_kit import event, sample, write, write_samples

pytestmark = pytest.mark.timeout(600)  # Spark on a busy machine takes its time


@pytest.fixture
def records(tmp_path):
    """Give records of two viewers, of which one was slow and cut, and of one row that is wrong."""
    who = {"role": "play", "app": "live", "stream": "<b>s</b>"}
    rows = []
    for number in (1, 2):
        peer = who | {"peer_ip": f"192.0.2.{number}", "peer_port": 1}
        rows += [event(0, number, "conn_opened", **peer), event(1, number, "play_started", **peer)]
        if number == 2:
            edge = {"state_from": "READY", "state_to": "HARD_LIMIT", "state_ms": 5000.0, "axis": "age"}
            rows.append(event(5, 2, "state_changed", **peer, **edge))
        last = {"state_from": "HARD_LIMIT" if number == 2 else "READY", "state_ms": 1000.0, "sent_bytes": 5000}
        rows.append(
            event(6, number, "conn_closed", reason="hard limit" if number == 2 else "peer closed", **peer, **last)
        )
    write(tmp_path / "events", [*rows, event(7, 3, "nonsense")])
    write_samples(tmp_path / "events", [sample(second, 1, viewer_delay_ms=5.0) for second in range(2, 6)])
    return tmp_path / "events"


def test_all_when_run_as_a_command_reports_and_tells_its_accounts(analyze, records, tmp_path):
    """Page, summary and accounts are there, and a later report from the same folder tells the same."""
    status, output, errors = analyze(
        "all", records, "--out", tmp_path / "out", "--skip", "whatif", "--skip", "capacity"
    )
    assert status == 0, errors
    assert "flow_events: 1 files, rows in 8 = out 7 + quarantined 1" in output
    assert output.splitlines()[-1] == f"report: {tmp_path / 'out' / 'report.html'}"
    assert "Exception" not in errors
    words = Page((tmp_path / "out/report.html").read_text("utf-8")).words
    assert "2 viewers watched for 12.0 s all together. 50.0 % of them kept up all the time" in words
    assert "1 row and 0 files were set aside" in words
    assert "<b>s</b>" in words
    jobs = json.loads((tmp_path / "out/summary.json").read_text("utf-8"))["jobs"]
    assert [jobs[name]["state"] for name in ("sessions", "fleet", "abuse", "report")] == ["done"] * 4
    status, output, errors = analyze("report", records, "--out", tmp_path / "out", "--json")
    assert status == 0, errors
    assert json.loads(output)["summary"]["sections"] == ["sessions", "fleet", "abuse"]


def test_all_when_there_are_no_records_is_wrong_use(analyze, tmp_path):
    """A folder without records is an error with a hint and status 2, and nothing is written."""
    status, _, errors = analyze("all", tmp_path / "nothing", "--out", tmp_path / "out")
    assert status == 2
    assert "nothing does not exist, so there is no flow_events" in errors
    assert "hint: give the folder that a server wrote with --events" in errors
    assert not (tmp_path / "out").exists()


def test_all_when_a_job_to_skip_does_not_exist_names_those_that_do(analyze, monkeypatch, tmp_path):
    """A slip of the pen is told before Java is started."""
    monkeypatch.setattr("flowctl.pipeline.spark.session.session", lambda _: pytest.fail("Java is started"))
    status, _, errors = analyze("all", "x", "--out", tmp_path / "out", "--skip", "abuze")
    assert status == 2
    assert "--skip abuze: there is no such job" in errors
    assert "hint: the jobs are sessions, fleet, abuse, whatif, capacity" in errors
