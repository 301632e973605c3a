"""The runner of `make test`: adds up what its runs of pytest report, and fails when one of them does."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

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
    (tmp_path / "test_mixed.py").write_text(MIXED)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", tmp_path, f"--junitxml={report}", tmp_path]
    subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert run_all.counts_in(report) == Counter(passed=1, failed=1, skipped=1, errors=1)


def test_reports_when_kept_name_the_slowest_tests_of_all_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    monkeypatch.setattr(run_all, "REPORTS", tmp_path / "kept")
    for name, times in ("one", (3.0, 0.1)), ("two", (7.5, *[0.01] * 20)):
        cases = "".join(f'<testcase classname="{name}" name="t{at}" time="{took}"/>' for at, took in enumerate(times))
        (tmp_path / f"{name}.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    run_all.keep([tmp_path / "one.xml", tmp_path / "two.xml"])
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["one.xml", "two.xml"]
    head, *named = capsys.readouterr().out.splitlines()
    assert head.endswith("in kept/")
    assert [line.split()[::2] for line in named[:3]] == [["7.5", "two.t0"], ["3.0", "one.t0"], ["0.1", "one.t1"]]
    assert len(named) == run_all.MOST_SLOW


def staged(monkeypatch, statuses, passed=1, lost=0, **bad):
    """Let every run end with the next of `statuses` and have `passed` tests; the first real-time one also `bad`.

    Its second try has as many tests as `bad`, but for those that `lost` says.
    """
    left = list(statuses)
    started = []

    def run_at_once(commands, folder):
        for name, command in commands.items():
            first = name == "real time" and command not in started and "--last-failed" not in command
            started.append(command)
            numbers = dict.fromkeys(run_all.OUTCOMES.values(), 0) | (bad if first else {})
            again = "--last-failed" in command
            numbers["tests"] = (sum(bad.values()) - lost if again else passed) + sum(numbers.values())
            attributes = " ".join(f'{key}="{number}"' for key, number in numbers.items())
            run_all.report_of(name, folder).write_text(f"<suites><testsuite {attributes}/></suites>")
        return {name: left.pop(0) for name in commands}

    monkeypatch.setattr(run_all, "run_at_once", run_at_once)
    monkeypatch.setattr(run_all, "keep", lambda reports: None)
    return started


@pytest.mark.parametrize(
    ("statuses", "passed", "expected"),
    [
        ([0, 0, 0, 0], 1, 0),
        ([0, 5, 5, 0], 1, 0),
        ([1, 0, 0, 0], 1, 1),
        ([0, 1, 0, 0], 1, 1),
        ([0, 0, 0, -9], 1, 9),
        ([5, 5, 5, 5], 0, 1),
    ],
)
def test_runner_when_one_run_fails_fails(monkeypatch, capsys, statuses, passed, expected):
    started = staged(monkeypatch, statuses, passed)
    assert run_all.main(["-k", "anything"]) == expected
    assert [command[-2:] for command in started] == [["-k", "anything"]] * 4
    assert capsys.readouterr().out.splitlines()[-1].split()[-2] == "in"


@pytest.mark.parametrize(
    ("bad", "second", "line", "expected"),
    [
        ({"failures": 2}, 0, "6 passed, 2 rerun in", 0),
        ({"failures": 1, "errors": 1}, 1, "6 passed, 2 rerun in", 1),
        ({"failures": 3, "lost": 1}, 0, "6 passed, 3 rerun in", 1),
        ({"failures": 2, "lost": 2}, 5, "4 passed, 2 rerun in", 1),
        ({"failures": run_all.MOST_AGAIN + 1}, None, f"{run_all.MOST_AGAIN + 1} failed, 4 passed in", 1),
    ],
)
def test_runner_when_real_time_tests_fail_runs_them_again_alone(monkeypatch, capsys, bad, second, line, expected):
    started = staged(monkeypatch, [0, 0, 0, 1] + ([] if second is None else [second]), **bad)
    assert run_all.main([]) == expected
    assert capsys.readouterr().out.splitlines()[-1].startswith(line)
    assert ["--last-failed" in command for command in started] == [False] * 4 + [True] * (second is not None)


def test_again_when_a_test_failed_runs_only_that_one(tmp_path, capfd, monkeypatch):
    (tmp_path / "test_twice.py").write_text(
        "from pathlib import Path\nmark = Path(__file__).with_name('mark')\n"
        "def test_once():\n    seen = mark.exists(); mark.touch(); assert seen\n"
        "def test_good(): assert not mark.exists() or mark.read_text() == ''\n"
    )
    monkeypatch.setattr(run_all, "RUNS", {"real time": ["-n", "1", *run_all.BY_FILE, "--rootdir", str(tmp_path)]})
    monkeypatch.setattr(run_all, "STAGES", (("real time",),))
    assert run_all.main([str(tmp_path)]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("2 passed, 1 rerun in")


def test_run_at_once_when_two_run_shows_one_after_the_other(tmp_path, capfd):
    meet = "import pathlib, sys, time; a, b = map(pathlib.Path, sys.argv[1:3]); a.touch(); "
    meet += (
        "[time.sleep(0.01) for _ in range(3000) if not b.exists()]; print(a.name, b.exists()); sys.exit(len(a.name))"
    )
    marks = [str(tmp_path / "one"), str(tmp_path / "three")]
    commands = {"first": [sys.executable, "-c", meet, *marks], "second": [sys.executable, "-c", meet, *marks[::-1]]}
    assert run_all.run_at_once(commands, tmp_path) == {"first": 3, "second": 5}
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("--")] == ["one True", "three True"]


def test_runs_when_they_pass_over_folders_miss_no_test():
    here = Path(__file__).parents[1]
    files = list(here.rglob("test_*.py"))
    assert len(files) > 200
    assert set() == {path for path in files if path.parent == here}
    for path in files:
        by_folder = {
            "realtime": any(path.is_relative_to(here / name) for name in run_all.REALTIME),
            "pipeline": path.is_relative_to(here / run_all.PIPELINE),
        }
        text = path.read_text("utf-8")
        choices = [{given, given or f"mark.{name}" in text} for name, given in by_folder.items()]
        for realtime, pipeline in itertools.product(*choices):
            markers = {"realtime": realtime, "pipeline": pipeline}
            [options] = (run for run in run_all.RUNS.values() if eval(run[run.index("-m") + 1], {}, markers))
            ignored = [here.parent / option.partition("=")[2] for option in options if option.startswith("--ignore=")]
            assert not any(path.is_relative_to(folder) for folder in ignored), path
