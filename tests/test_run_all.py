"""The runner of `make test`: adds up what its runs of pytest report, and fails when one of them does."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import run_all

MIXED = """
import pytest
def test_good(): pass
def test_bad(): assert False
@pytest.fixture
def broken(): raise OSError
def test_error(broken): pass
@pytest.mark.skip(reason="shown")
def test_skipped(): pass
"""


def test_counts_when_read_from_a_report_are_those_of_pytest(tmp_path):
    """Passed, failed, skipped and broken tests are told apart as pytest does."""
    (tmp_path / "test_mixed.py").write_text(MIXED)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", tmp_path, f"--junitxml={report}", tmp_path]
    subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert run_all.counts_in(report) == Counter(passed=1, failed=1, skipped=1, errors=1)


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        (Counter(passed=3), "3 passed in 1.50s"),
        (Counter(passed=3, failed=1, skipped=2, errors=1), "1 failed, 3 passed, 2 skipped, 1 error in 1.50s"),
        (Counter(), "no tests ran in 1.50s"),
    ],
)
def test_closing_line_when_counts_are_added_reads_as_that_of_pytest(counts, line):
    """The last line of `make test` names what happened to how many tests."""
    assert run_all.closing_line(counts, 1.5) == line


@pytest.mark.parametrize(
    ("statuses", "passed", "expected"),
    [([0, 0, 0], 3, 0), ([0, 5, 5], 1, 0), ([1, 0, 0], 2, 1), ([0, 1, 0], 2, 1), ([5, 5, 5], 0, 1)],
)
def test_runner_when_one_run_fails_fails(monkeypatch, capsys, statuses, passed, expected):
    """Nothing selected in some of the runs is no failure; nothing at all, or a failed run, is."""
    left = list(statuses)
    monkeypatch.setattr(run_all.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], left.pop(0)))
    monkeypatch.setattr(run_all.Path, "exists", lambda _: True)
    monkeypatch.setattr(run_all, "counts_in", lambda _: Counter(passed=1) if passed else Counter())
    assert run_all.main(["-k", "anything"]) == expected
    assert capsys.readouterr().out.splitlines()[-1].split()[-2] == "in"


def test_runs_when_put_together_are_all_tests():
    """Whichever of the two markers a test has, exactly one run selects it."""
    selections = [options[options.index("-m") + 1] for options in run_all.RUNS.values()]
    for realtime in (False, True):
        for pipeline in (False, True):
            markers = {"realtime": realtime, "pipeline": pipeline}
            assert [eval(text, {}, markers) for text in selections].count(True) == 1
