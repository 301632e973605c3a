"""What the three demonstrations share: plans within bounds, their one crowd, and how a report is handed over."""

from __future__ import annotations

import abc
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flowctl.core.text.files import write_text
from flowctl.core.text.output import say
from flowctl.errors import ConfigError, FlowctlError
from flowctl.load.plan import LoadPlan
from flowctl.load.results.failon import parse_condition
from flowctl.load.results.figures import RunFigures
from flowctl.load.results.report import render
from flowctl.load.results.result import RunResult

FPS: Final = 30.0
KEY_INTERVAL_S: Final = 2.0
DISPOSABLE_EVERY: Final = 3
"""Distance of frames that may be left out without harm to others, as B-frames may. All are numbered: so it is known
exactly which were lost, and whether the rest could be decoded."""
CACHE_VARIABLE: Final = "FLOWCTL_CACHE"


class DemoReport(abc.ABC):
    """The result of a demonstration, and its faults."""

    @property
    @abc.abstractmethod
    def faults(self) -> list[str]: ...

    @abc.abstractmethod
    def lines(self) -> list[str]:
        """Return it for people."""

    @abc.abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""

    @property
    def passed(self) -> bool:
        return not self.faults

    def verdict(self) -> dict[str, Any]:
        return {"passed": self.passed, "faults": self.faults}


def check_bounds(plan: object, **bounds: tuple[float, float]) -> None:
    for name, (low, high) in bounds.items():
        value = getattr(plan, name)
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value:g}, it must be {low} to {high}")


def crowd_plan(url: str, profiles: Mapping[str, int], **fields: Any) -> LoadPlan:
    """Return the load run of a crowd, measured whole, each peer with an address of its own, and its publisher."""
    return LoadPlan(
        url=url,
        profiles=profiles,
        publishers=1,
        fps=FPS,
        key_interval_s=KEY_INTERVAL_S,
        disposable_every=DISPOSABLE_EVERY,
        spread_addresses=True,
        measure_every=1,
        workers=1,
        **fields,
    )


def cache_directory() -> Path:
    """Return where files are kept: FLOWCTL_CACHE, or the user's cache, or ``.demo`` here if there is no home."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        directory = Path(base) if base else Path.home() / ".cache"
        (directory / "flowctl").mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return Path(".demo")
    return directory / "flowctl"


def tell(line: str) -> None:
    """Write a line of progress to standard error; standard output is for the result."""
    say(line, to_stderr=True)


def write_page(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlowctlError(f"cannot make the folder {path.parent}: {error.strerror}") from error
    write_text(path, text)


def load_page(result: RunResult, conditions: tuple[str, ...]) -> str:
    figures = RunFigures(result)
    return render(result, [parse_condition(text).judge(figures) for text in conditions])


def hand_over(report: DemoReport, *, as_json: bool, files: Mapping[str, str], last: tuple[str, ...] = ()) -> bool:
    """Write a report to standard output; return whether all is as it should be."""
    say(json.dumps({**report.as_dict(), **files}) if as_json else "\n".join([*report.lines(), *last]))
    return report.passed
