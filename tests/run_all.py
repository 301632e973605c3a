"""Run all tests: those that only compute, side by side, those of the pipeline, and those that live in real time.

The second kind (marker ``pipeline``) shares one Spark session, which uses every core by itself. The last (marker
``realtime``, see conftest.py) runs servers, players and FFmpeg and lets seconds pass: it mostly waits, so several wait
side by side, but not beside workers that compute on every core.
The last line printed is pytest's closing line with the counts of all runs added. Exit status: 0 if all passed.
Arguments go to all runs: ``python tests/run_all.py -k echo``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = {
    # More than 8 workers spend their time on start-up.
    "computing": ["-m", "not realtime and not pipeline", "-n", "auto", "--maxprocesses=8"],
    # One process, so that all of them share one Java, whose start costs more than most of these tests.
    "pipeline": ["-m", "pipeline and not realtime", "-n", "0"],
    # None of them asserts a time, so they may disturb each other. Tests of a file share servers, or a cluster; that
    # one takes longest, so conftest.py puts it first.
    "real time": ["-m", "realtime", "-n", "4", "--dist", "loadfile", "--no-loadscope-reorder"],
}
OUTCOMES = {"failed": "failures", "errors": "errors", "skipped": "skipped"}
"""pytest's words and those of its JUnit report."""
NO_TESTS_SELECTED = 5
"""Exit status of pytest when nothing was selected, for example by ``-k``: no failure of one run of several."""


def counts_in(report: Path) -> Counter[str]:
    """Return how many tests had which outcome, by the JUnit report that pytest wrote."""
    counts: Counter[str] = Counter()
    for suite in ET.parse(report).getroot().iter("testsuite"):
        bad = {name: int(suite.get(attribute, "0")) for name, attribute in OUTCOMES.items()}
        counts.update(bad)
        counts["passed"] += int(suite.get("tests", "0")) - sum(bad.values())
    return counts


def closing_line(counts: Counter[str], seconds: float) -> str:
    """Return what pytest would print at the end of a single run with these counts."""
    names = {"failed": "failed", "passed": "passed", "skipped": "skipped", "errors": "error"}
    parts = [f"{counts[name]} {word}" for name, word in names.items() if counts[name]]
    return f"{', '.join(parts) or 'no tests ran'} in {seconds:.2f}s"


def say(line: str) -> None:
    """Print a line before anything the next run prints."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Run all parts, print the sum, return the exit status."""
    counts: Counter[str] = Counter()
    begun = time.monotonic()
    statuses = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, options) in enumerate(RUNS.items()):
            report = Path(folder) / f"{number}.xml"
            say(f"-- tests: {name}")
            command = [sys.executable, "-m", "pytest", "-q", *options, f"--junitxml={report}", *arguments]
            statuses.append(subprocess.run(command, cwd=ROOT, check=False).returncode)
            if report.exists():
                counts.update(counts_in(report))
    say(closing_line(counts, time.monotonic() - begun))
    if counts["passed"] == 0:
        return 1
    return max(0 if status == NO_TESTS_SELECTED else abs(status) for status in statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
