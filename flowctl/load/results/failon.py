"""Conditions that make a load run fail: ``--fail-on 'p99_ms>200'``, ``--fail-on 'healthy.missing>0'`` (pure).

Grammar: ``[scope.]figure OP number[unit]``, with OP one of ``> >= < <= == !=``. Figures and scopes are those of
`flowctl.load.results.figures`. A wrong condition is refused before the run. A figure that was not measured fails its
condition: a check that nobody could make must not look like one that was passed.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flowctl.errors import ConfigError
from flowctl.load.results.figures import FIGURES, OF_SERVER, SCOPES, RunFigure, RunFigures, format_value, in_scope
from flowctl.load.results.result import PeerKind
from flowctl.units import SIZE_UNITS, TIME_UNITS

MAX_CONDITIONS: Final = 100
"""Most conditions of a run, which it works out at its end; more than anybody reads."""

_OPERATORS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_OPPOSITES: Final = {">": "<=", "<": ">=", ">=": "<", "<=": ">", "==": "!=", "!=": "=="}
_TIME: Final = {unit: TIME_UNITS[unit] for unit in ("us", "ms", "s", "min")}
_SIZE: Final = {unit: SIZE_UNITS[unit.lower()] for unit in ("B", "kB", "MB", "GB", "KiB", "MiB", "GiB")}
_UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "ms": {unit: seconds / 1e-3 for unit, seconds in _TIME.items()},
    "us": {unit: seconds / 1e-6 for unit, seconds in _TIME.items()},
    "s": _TIME,
    "kB": {unit: size / 1e3 for unit, size in _SIZE.items()},
    "kbit/s": {"k": 1.0, "kbit/s": 1.0, "M": 1e3, "Mbit/s": 1e3},
    "share": {"%": 0.01},
    "percent": {"%": 1.0},
    "count": {},
}
"""Units that a number may carry, by the unit of the figure, with the factor to convert into that."""

_CONDITION = re.compile(
    r"\s*+(?:(?P<scope>[^<>=!\s]+)\.)?(?P<figure>[a-z0-9_]++)\s*+(?P<op>>=|<=|==|!=|>|<)"
    r"\s*+(?P<number>\d{1,15}(?:\.\d{1,15})?)\s*+(?P<unit>[A-Za-z/%]*)\s*",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class FailCondition:
    """A condition under which a run fails."""

    text: str
    scope: str | None  # the peers it is about. None: those that the figure is about by itself.
    figure: RunFigure
    op: str
    bound: float

    @property
    def wanted(self) -> str:
        """The opposite, as it is shown beside a verdict: two negations are hard to read."""
        return self.text.replace(self.op, f" {_OPPOSITES[self.op]} ", 1)

    def judge(self, figures: RunFigures) -> ConditionResult:
        """Return whether the condition holds, after the run.

        Of a run that was interrupted nothing is judged; of one that broke off, only what failed by then: the rest of
        the run could have been different.
        """
        value, result = figures.value(self.figure.name, self.scope), figures.result
        if result.interrupted:
            return ConditionResult(self, value, failed=False, not_judged="interrupted")
        if value is None:
            return ConditionResult(self, None, failed=True)
        failed = _OPERATORS[self.op](value, self.bound)
        not_judged = "" if failed or not result.failure else "the run went wrong"
        return ConditionResult(self, value, failed=failed, not_judged=not_judged)

    @property
    def where(self) -> str:
        """The figure with its scope, as it can be given on the command line."""
        return self.figure.name if self.scope is None else f"{self.scope}.{self.figure.name}"


@dataclass(frozen=True, slots=True)
class ConditionResult:
    """The verdict on a condition."""

    condition: FailCondition
    value: float | None  # what was measured, in the unit of the figure. None: it was not measured.
    failed: bool
    not_judged: str = ""  # why it has neither failed nor passed. "": it has.

    @property
    def measured(self) -> str:
        """What was measured, for people; why nothing was."""
        if self.value is None and self.not_judged:
            return "not measured"
        if self.value is not None:
            return f"measured {format_value(self.value, self.condition.figure.unit)}"
        return f"not measured: {why_not_measured(self.condition.figure)}"

    def __str__(self) -> str:
        word = "FAIL" if self.failed else "not judged" if self.not_judged else "pass"
        why = f"{self.not_judged}; " if self.not_judged else ""
        return f"{word}  {self.condition.wanted}  ({why}{self.measured})"

    def as_dict(self) -> dict[str, Any]:
        return {
            "condition": self.condition.text,
            "figure": self.condition.where,
            "measured": self.value,
            "unit": self.condition.figure.unit,
            "failed": None if self.not_judged else self.failed,
            "not_judged": self.not_judged or None,
            "words": self.measured,
        }


def why_not_measured(figure: RunFigure) -> str:
    """Return the likely reason why a figure has no value, in words."""
    if figure.of_run is not None:
        return "no second of the run has it; figures of the server need --server-pid"
    if figure.name == "expectation_failed":
        return "there were no hostile peers that came to a verdict"
    if figure.unit == "ms" and figure.name.count("_") == 1:
        return "no frame with a known delay came"
    if figure.name in {"connections", "cut", "failed", "errors"} or figure.unit == "share":
        return "there were no such peers, or they got nothing"
    return "no such peer got that far"


def parse_condition(text: str) -> FailCondition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--fail-on {text!r} is no condition: [profile or kind.]figure, one of > >= < <= == !=, number[unit]",
            hint="write it like 'p99_ms>200' or 'healthy.missing>0'",
        )
    figure, scope = FIGURES.get(match["figure"].lower()), match["scope"]
    if figure is None:
        near = difflib.get_close_matches(match["figure"], FIGURES, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"--fail-on {text!r}: there is no figure {match['figure']!r}",
            hint=f"{hint}figures: {', '.join(FIGURES)}",
        )
    if scope is not None and figure.of_run is not None:
        raise ConfigError(
            f"--fail-on {text!r}: {figure.name} is a figure of the whole run", hint=f"leave out {scope + '.'!r}"
        )
    units = _UNITS[figure.unit]
    factors = {unit: factor for unit, factor in units.items() if unit.lower() == match["unit"].lower()}
    if match["unit"] and not factors:
        allowed = ", ".join(units) or "none"
        raise ConfigError(
            f"--fail-on {text!r}: {match['unit']!r} is no unit of {figure.name}",
            hint=f"units that it may have: {allowed}; without one the number means {figure.unit}",
        )
    factor = factors.get(match["unit"], next(iter(factors.values()), 1.0))
    return FailCondition(text.strip(), scope, figure, match["op"], float(match["number"]) * factor)


def parse_conditions(
    texts: Iterable[str], crowd: Mapping[str, PeerKind], *, server_watched: bool = True
) -> list[FailCondition]:
    conditions = [parse_condition(text) for text in texts]
    blind = next((item for item in conditions if not server_watched and item.figure.name in OF_SERVER), None)
    if blind is not None:
        raise ConfigError(
            f"--fail-on {blind.text!r} is about the server's process, which is not watched",
            hint="give the process id of the server, on this machine, as --server-pid",
        )
    if len(conditions) > MAX_CONDITIONS:
        raise ConfigError(f"--fail-on is given {len(conditions)} times, at most {MAX_CONDITIONS} are taken")
    for condition in conditions:
        scope = condition.figure.scope if condition.scope is None else condition.scope
        if condition.figure.of_run is None and not any(
            in_scope(scope, profile, kind, crowd) for profile, kind in crowd.items()
        ):
            others = [name for name in SCOPES if any(in_scope(name, item, kind, crowd) for item, kind in crowd.items())]
            others = [name for name in others if name not in crowd]
            raise ConfigError(
                f"--fail-on {condition.text!r}: no peer of this run is {scope!r}",
                hint=f"profiles of this run: {', '.join(crowd)}; all of a kind: {', '.join(others)}",
            )
    return conditions
