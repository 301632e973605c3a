"""The runner of `make test`: adds up what its runs of pytest report, and fails when one of them does."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest
import run_all
from outcomes import SUFFIX

PLAIN = ("-p", "no:schemathesis")
"""Its plugin takes a second of every process."""
CUT = """
import os, pytest, signal, time
@pytest.mark.parametrize("number", range(9))
def test_one(number):
    if number == 5: {}
"""
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


def test_counts_when_read_from_a_run_are_those_of_pytest(tmp_path, runs):
    (tmp_path / "test_mixed.py").write_text(MIXED)
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name")
    runs("real time")
    report = run_all.report_of("real time", tmp_path)
    command = run_all.command("real time", tmp_path, ["--continue-on-collection-errors", str(tmp_path)])
    subprocess.run(command, capture_output=True, check=False, timeout=60, cwd=run_all.ROOT)
    assert run_all.counts_in(report) == Counter(passed=1, failed=1, skipped=1, errors=2)
    suite = next(ET.parse(report).getroot().iter("testsuite"))
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["5", "1", "2", "1"]


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


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Return a function: names of runs, and options of all of them; each is a stage with the tests in `tmp_path`."""

    def make(*names, options=()):
        monkeypatch.setattr(run_all, "RUNS", {name: [*PLAIN, "--rootdir", str(tmp_path), *options] for name in names})
        monkeypatch.setattr(run_all, "STAGES", tuple((name,) for name in names))
        monkeypatch.setattr(run_all, "keep", lambda reports: None)

    return make


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("how", "workers", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 0, 9),
        ("os.kill(os.getpid(), signal.SIGTERM)", 0, 15),
        ("os._exit(0)", 0, 1),
        ("pytest.exit('enough')", 0, 2),
        ("os.kill(os.getppid(), signal.SIGKILL)", 1, 9),
    ],
)
def test_runner_when_pytest_is_killed_says_how_many_tests_never_ran(tmp_path, runs, capfd, how, workers, status):
    (tmp_path / "test_cut.py").write_text(CUT.format(how))
    runs("real time", options=["-n", str(workers)])
    assert run_all.main([str(tmp_path)]) == status
    line = capfd.readouterr().out.splitlines()[-1]
    passed, never = map(int, re.fullmatch(r"(\d+) passed, (\d+) never ran in [\d.]+s", line).groups())
    assert passed + never == 9
    assert never >= 4, "the workers' last words may be lost"


@pytest.mark.realtime
def test_runner_when_interrupted_says_what_never_ran(tmp_path, runs, capfd):
    (tmp_path / "test_cut.py").write_text(CUT.format("os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"))
    runs("one", "two")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run_all.main([str(tmp_path)]) == run_all.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    line = capfd.readouterr().out.splitlines()[-1]
    assert line.startswith("5 passed, 4 never ran, 1 of 2 runs collected nothing in")


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
            again = "--last-failed" in command
            words = ["passed"] * (sum(bad.values()) - lost if again else passed)
            words += [word for word, number in bad.items() if first for _ in range(number)]
            lines = [f"collected {len(words)}", *(f"{word} test-{number}" for number, word in enumerate(words))]
            report = run_all.report_of(name, folder)
            report.touch()
            report.with_suffix(SUFFIX).write_text("\n".join(lines))
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
        ({"failed": 2}, 0, "6 passed, 2 rerun in", 0),
        ({"failed": 1, "errors": 1}, 1, "6 passed, 2 rerun in", 1),
        ({"failed": 3, "lost": 1}, 0, "6 passed, 3 rerun in", 1),
        ({"failed": 2, "lost": 2}, 5, "4 passed, 2 rerun in", 1),
        ({"failed": run_all.MOST_AGAIN + 1}, None, f"{run_all.MOST_AGAIN + 1} failed, 4 passed in", 1),
    ],
)
def test_runner_when_real_time_tests_fail_runs_them_again_alone(monkeypatch, capsys, bad, second, line, expected):
    started = staged(monkeypatch, [0, 0, 0, 1] + ([] if second is None else [second]), **bad)
    assert run_all.main([]) == expected
    assert capsys.readouterr().out.splitlines()[-1].startswith(line)
    assert ["--last-failed" in command for command in started] == [False] * 4 + [True] * (second is not None)


def test_again_when_a_test_failed_runs_only_that_one(tmp_path, capfd, runs):
    (tmp_path / "test_twice.py").write_text(
        "from pathlib import Path\nmark = Path(__file__).with_name('mark')\n"
        "def test_once():\n    seen = mark.exists(); mark.touch(); assert seen\n"
        "def test_good(): assert not mark.exists() or mark.read_text() == ''\n"
    )
    runs("real time", options=["-n", "1", *run_all.BY_FILE])
    assert run_all.main([str(tmp_path)]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("2 passed, 1 rerun in")


def test_again_when_all_tests_of_one_file_failed_runs_them(tmp_path, capfd, runs):
    count = run_all.MOST_AGAIN + 1
    (tmp_path / "test_shared.py").write_text(
        "from pathlib import Path\nimport pytest\nmark = Path(__file__).with_name('mark')\n"
        "@pytest.fixture(scope='module')\ndef crowd():\n    seen = mark.exists(); mark.touch(); return seen\n"
        f"@pytest.mark.parametrize('number', range({count}))\ndef test_one(crowd, number): assert crowd\n"
    )
    runs("real time", options=["-n", "1", *run_all.BY_FILE])
    assert run_all.main([str(tmp_path)]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith(f"{count} passed, {count} rerun in")


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
