"""A plugin of pytest that writes down what becomes of each test as soon as that is known, for `run_all`.

The JUnit report is written when pytest ends by itself. One that is killed leaves none, and one that ends before its
last test says nothing of those that never ran. So beside the report stands a file of lines: ``collected N``, then a
word and the test for each outcome (of what is no test, such as a file that cannot be imported, only the word).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

SUFFIX = ".outcomes"
COLLECTED = "collected"
WORDS = ("failed", "passed", "skipped", "errors")


class Outcomes:
    """Writes for the process that reports: with workers, that is the one that has them run the tests."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", encoding="utf-8", buffering=1)  # a line is out before the next test begins
        self.collected = False

    def write(self, word: str, what: object) -> None:
        self.file.write(f"{word} {what}\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.note_collected(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.note_collected(len(ids))

    def note_collected(self, count: int) -> None:
        """Note it once: each worker collects the same."""
        if not self.collected:
            self.collected = True
            self.write(COLLECTED, count)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.write("errors" if report.failed else report.outcome, "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.write("errors" if report.failed and report.when != "call" else report.outcome, report.nodeid)

    def pytest_internalerror(self) -> None:
        self.write("errors", "")


def pytest_configure(config: pytest.Config) -> None:
    report = config.getoption("xmlpath")
    if report and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(report).with_suffix(SUFFIX)))


def read_outcomes(report: Path) -> tuple[Counter[str], int | None]:
    """Return how many tests had which outcome, and how many of those collected never ran; None: not known.

    Args:
        report: path of the JUnit report, which need not be there.
    """
    counts: Counter[str] = Counter()
    collected, ran = None, set()
    path = report.with_suffix(SUFFIX)
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        word, _, what = line.partition(" ")
        if word == COLLECTED:
            collected = int(what)
        elif word in WORDS:  # not the half of a line
            counts[word] += 1
            ran.add(what)
    return counts, None if collected is None else collected - len(ran - {""})


def failed_files(report: Path) -> set[str]:
    """Return the files that have a failure or an error; those of no test, such as what is not imported, are ""."""
    path = report.with_suffix(SUFFIX)
    lines = (line.partition(" ") for line in (path.read_text("utf-8").splitlines() if path.exists() else ()))
    return {what.partition("::")[0] for word, _, what in lines if word in {"failed", "errors"}}
