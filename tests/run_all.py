"""Run all tests: those that compute and those on Spark side by side, then those that live in real time.

The pipeline's (marker ``pipeline``) share one Spark session; those that start programs with a Java of their own (both
markers) are a run of theirs. Whatever of two cores one of them leaves idle the others take. The last (marker
``realtime`` alone, see conftest.py) run servers, players and FFmpeg and let seconds pass: they mostly wait, so several
wait side by side, but not beside workers that compute. What fails in real time is run once more, alone: what fails
twice has failed, what fails once is named, and counted as ``rerun``.
The ten slowest tests are named, and the reports with the time of each are kept in ``build/test-reports``.
The last line printed is pytest's closing line with the counts of all runs added, those tests that never ran among them:
a run may be killed, or break off. Exit status: 0 if all ran and passed.
Arguments go to all runs: ``python tests/run_all.py -k echo``.
"""

from __future__ import annotations

import heapq
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from outcomes import WORDS, failed_files, read_outcomes

ROOT = Path(__file__).resolve().parents[1]
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
PIPELINE = "analyze"
"""Folder whose tests are on Spark, marked so by conftest.py."""
REALTIME = ("cli", "demo", "e2e", "packaging", "servers", "wire/client")
"""Folders whose tests run servers and clients in real time, marked so by conftest.py."""
OTHERS = sorted(
    path.name
    for path in Path(__file__).parent.iterdir()
    if path.is_dir() and path.name not in {PIPELINE, *REALTIME, "__pycache__"}
)
"""Folders none of whose tests is on Spark."""


def without(*folders: str) -> list[str]:
    """Return the options by which pytest passes over folders that have no test for a run.

    Each process of each run would import them, which takes longer than most tests.
    """
    return [f"--ignore=tests/{name}" for name in folders]


RUNS = {
    # More than 8 workers spend their time on start-up.
    "computing": [
        *("-m", "not realtime and not pipeline", "-n", "auto", "--maxprocesses=8"),
        *without(PIPELINE, *REALTIME),
    ],
    # One process, so that all of them share one Java, whose start costs more than most of these tests.
    "pipeline": ["-m", "pipeline and not realtime", "-n", "0", *without(*REALTIME, *OTHERS)],
    # Each of their files has a Java, or a cluster of them.
    "programs on Spark": ["-m", "pipeline and realtime", "-n", "2", *BY_FILE, *without(*OTHERS)],
    # What they assert of time leaves room for the others beside them. Tests of a file share servers.
    "real time": ["-m", "realtime and not pipeline", "-n", "4", *BY_FILE, *without(PIPELINE)],
}
YIELDING = ("computing",)
"""The runs that take what is left of the cores: short tests in many processes fill any gap, and none of them asserts
time; those beside them come one after the other, and the last of them would have a core idle."""
STAGES = (("computing", "pipeline", "programs on Spark"), ("real time",))
"""Which runs go on at the same time, and in which order."""
AGAIN = ("programs on Spark", "real time")
"""The runs whose failures get a second try, alone."""
ALONE = ("-n", "0", "--last-failed", "--last-failed-no-failures", "none")
"""What is added to the options of a run for that."""
MOST_AGAIN = 10
"""Failures in more files than this are no accident of a busy machine: they get no second try. Tests of one file share
what they look at, such as one crowd, and so fail together."""
MOST_SLOW = 10
NEVER_RAN = "never ran"
UNKNOWN = "unknown"
"""Names of what is counted beside the outcomes."""
REPORTS = ROOT / "build" / "test-reports"
TESTS_FAILED = 1
"""Exit status of pytest when it ran to its end and a test failed."""
INTERRUPTED = 128 + signal.SIGINT
NO_TESTS_SELECTED = 5
"""Exit status of pytest when nothing was selected, for example by ``-k``: no failure of one run of several."""


def counts_in(report: Path) -> Counter[str]:
    """Return the outcomes of a run, and how many tests never ran; that is not known of one that collected nothing."""
    counts, never = read_outcomes(report)
    return counts + Counter({UNKNOWN: 1} if never is None else {NEVER_RAN: never})


def closing_line(counts: Counter[str], seconds: float) -> str:
    parts = [f"{counts[name]} {name.removesuffix('s')}" for name in (*WORDS, "rerun", NEVER_RAN) if counts[name]]
    if counts[UNKNOWN]:
        parts.append(f"{counts[UNKNOWN]} of {len(RUNS)} runs collected nothing")
    return f"{', '.join(parts) or 'no tests ran'} in {seconds:.2f}s"


def slowest(reports: Iterable[Path], count: int = MOST_SLOW) -> list[tuple[float, str]]:
    cases = [case for report in reports for case in ET.parse(report).getroot().iter("testcase")]
    took = ((float(case.get("time", "0")), f"{case.get('classname')}.{case.get('name')}") for case in cases)
    return heapq.nlargest(count, took)


def keep(reports: Sequence[Path]) -> None:
    """Keep the JUnit reports, which have the time of each test, and name the slowest."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    for report in reports:
        shutil.copy(report, REPORTS)
    say(f"-- tests: the slowest {MOST_SLOW}; the time of each is in {REPORTS.relative_to(ROOT)}/")
    for seconds, name in slowest(reports):
        say(f"{seconds:8.1f} s  {name}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def report_of(name: str, folder: Path) -> Path:
    return folder / f"{name}.xml"


def command(name: str, folder: Path, added: Sequence[str]) -> list[str]:
    """Return the command of the run called `name`; what failed in it is remembered in `folder` alone."""
    own = ["-p", "tests.outcomes", f"--junitxml={report_of(name, folder)}", "-o", f"cache_dir={folder / name}"]
    politely = ["nice", "-n", "10"] if name in YIELDING else []
    return [*politely, sys.executable, "-m", "pytest", "-q", *RUNS[name], *own, *added]


def environment() -> dict[str, str]:
    """Return the variables of the runs: Python keeps what it has compiled, also where it is told not to.

    Hundreds of processes import the same modules, and to compile those takes each of them longer than most tests.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run_at_once(commands: dict[str, list[str]], folder: Path) -> dict[str, int]:
    """Run commands side by side; return the exit status of each.

    The first prints as it goes. What the others print, into a file of `folder` each, is shown when they have ended.
    """
    running: dict[str, subprocess.Popen[bytes]] = {}
    shown: dict[str, Path] = {}
    try:
        for name, words in commands.items():
            if not running:
                say(f"-- tests: {name}")
                running[name] = subprocess.Popen(words, cwd=ROOT, env=environment())
                continue
            shown[name] = folder / f"{name}.log"
            with shown[name].open("wb") as log:
                running[name] = subprocess.Popen(
                    words, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT
                )
        for name, process in running.items():
            if name in shown:
                say(f"-- tests: {name} (at the same time, shown when it has ended)")
            process.wait()
            if name in shown:
                say(shown[name].read_text(errors="replace").rstrip("\n"))
    finally:
        for process in running.values():
            if process.poll() is None:
                process.terminate()
                process.wait()
    return {name: process.returncode for name, process in running.items()}


def main(arguments: list[str]) -> int:
    counts: Counter[str] = Counter()
    statuses: dict[str, int] = {}
    begun = time.monotonic()
    left = set(RUNS)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)

        def run(names: Sequence[str], added: Sequence[str] = ()) -> Counter[str]:
            left.difference_update(names)
            found: Counter[str] = Counter()
            try:
                commands = {name: command(name, folder, [*added, *arguments]) for name in names}
                statuses.update(run_at_once(commands, folder))
            finally:
                found.update(sum((counts_in(report_of(name, folder)) for name in names), Counter()))
                counts.update(found)
            return found

        try:
            for stage in STAGES:
                run(stage)
            for name in AGAIN:
                first = counts_in(report_of(name, folder)) if statuses.get(name) == TESTS_FAILED else Counter()
                failed = first["failed"] + first["errors"]
                if failed and len(failed_files(report_of(name, folder))) <= MOST_AGAIN:
                    say(f"-- tests: {name}, those that failed once more and alone")
                    report_of(name, folder).unlink()
                    counts.subtract({"failed": first["failed"], "errors": first["errors"]})
                    counts["rerun"] += failed
                    if run([name], ALONE).total() != failed:
                        statuses[name] = TESTS_FAILED  # not each of them had its second try
        except KeyboardInterrupt:
            statuses["interrupted"] = INTERRUPTED
            counts[UNKNOWN] += len(left)
        if counts[NEVER_RAN]:
            say("")  # what was cut was in the middle of a line
        keep([report for name in RUNS if (report := report_of(name, folder)).exists()])
    say(closing_line(counts, time.monotonic() - begun))
    if counts[NEVER_RAN] or counts[UNKNOWN] or not counts["passed"]:
        statuses["cut"] = TESTS_FAILED
    return max(0 if status == NO_TESTS_SELECTED else abs(status) for status in statuses.values())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
