"""The closed loop, before and after: what each run was like, and whether the loop did what it is for (pure)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from flowctl.demo.loop.plan import LoopPlan
from flowctl.load.crowd import source_address
from flowctl.load.plan import LoadPlan
from flowctl.load.profiles import parse_profile
from flowctl.load.results.figures import RunFigures
from flowctl.load.results.result import PeerKind, RunResult

_LEAST_FEWER: Final = 2.0
"""Cuts of honest slow viewers have to be fewer by this factor: one less may be chance, half of them is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two runs. Delays are over all frames of such viewers, ms; None: no frame came."""

    limits: str
    slow: int
    slow_cut: int
    honest_refused: int  # honest viewers, slow ones or not, that were refused at accept as banned
    healthy: int
    healthy_cut: int
    healthy_missing: int
    healthy_p50_ms: float | None
    healthy_p99_ms: float | None
    slow_p50_ms: float | None
    slow_p99_ms: float | None
    abusers: int
    abusers_refused: int
    refusals: int  # connections refused at accept as banned


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopComparison:
    """Both runs, and the verdict."""

    before: Side  # the first run, with limits that are too tight and without bans
    after: Side  # the second run, with what the analysis recommends
    same_process: bool
    files: dict[str, str]

    @property
    def faults(self) -> list[str]:
        """What is not as it should be, in words; empty when the loop did what it is for."""
        before, after, faults = self.before, self.after, []
        if not before.slow_cut:
            faults.append("no honest slow viewer was cut before: there was nothing to mend")
        elif after.slow_cut * _LEAST_FEWER > before.slow_cut:
            faults.append(f"honest slow viewers cut: {before.slow_cut} before, {after.slow_cut} after")
        if after.abusers_refused < after.abusers:
            faults.append(f"{after.abusers_refused} of {after.abusers} abusers were refused at accept")
        if after.honest_refused:
            faults.append(f"{after.honest_refused} honest viewers were refused at accept")
        if after.healthy_missing > before.healthy_missing or after.healthy_cut > before.healthy_cut:
            faults.append("viewers that keep up were served worse than before")
        if not self.same_process:
            faults.append("the server was started again in between")
        return faults

    def rows(self) -> list[tuple[str, str, str]]:
        before, after = self.before, self.after
        return [
            ("limits", before.limits, after.limits),
            ("honest slow viewers cut", f"{before.slow_cut} of {before.slow}", f"{after.slow_cut} of {after.slow}"),
            ("their delay, median / p99", _delays(before, "slow"), _delays(after, "slow")),
            ("viewers that keep up: frames missing", str(before.healthy_missing), str(after.healthy_missing)),
            ("their delay, median / p99", _delays(before, "healthy"), _delays(after, "healthy")),
            ("abusers refused at accept", _abusers(before), _abusers(after)),
            ("connections of theirs refused", str(before.refusals), str(after.refusals)),
            ("honest viewers refused", str(before.honest_refused), str(after.honest_refused)),
        ]

    def lines(self) -> list[str]:
        rows = [("", "before", "after"), *self.rows()]
        widths = [max(len(row[column]) for row in rows if row[0] != "limits") for column in range(2)]
        lines = [f"limits before: {self.before.limits}", f"limits after:  {self.after.limits}", ""]
        lines += [f"{what:<{widths[0]}}  {old:<{widths[1]}}  {new}" for what, old, new in rows if what != "limits"]
        lines += ["", *(f"{name}: {path}" for name, path in self.files.items()), ""]
        if self.faults:
            return [*lines, "FAILED:", *(f"  {fault}" for fault in self.faults)]
        return [
            *lines,
            "passed: fewer honest viewers cut, abusers refused at accept, and the server was never restarted",
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": not self.faults,
            "faults": self.faults,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "same_process": self.same_process,
            "files": self.files,
        }


def addresses(plan: LoopPlan) -> tuple[set[str], set[str]]:
    """Return the addresses of the crowd: those of honest viewers, those of abusers."""
    load: LoadPlan = plan.load_plan("rtmp://127.0.0.1/x/y", 1)
    honest: set[str] = set()
    abusers: set[str] = set()
    for order in load.assignments(1):
        hostile = parse_profile(order.profile).profile.kind is PeerKind.HOSTILE
        (abusers if hostile else honest).add(source_address(order.number))
    return honest, abusers


def side_of(plan: LoopPlan, result: RunResult, refused: set[str], refusals: int, limits: str) -> Side:
    figures = RunFigures(result)

    def count(name: str, scope: str) -> int:
        return round(figures.value(name, scope) or 0)

    honest, abusers = addresses(plan)
    return Side(
        limits=limits,
        slow=count("connections", "slow"),
        slow_cut=count("cut", "slow"),
        honest_refused=len(honest & refused),
        healthy=count("connections", "healthy"),
        healthy_cut=count("cut", "healthy"),
        healthy_missing=count("missing", "healthy"),
        healthy_p50_ms=figures.value("p50_ms", "healthy"),
        healthy_p99_ms=figures.value("p99_ms", "healthy"),
        slow_p50_ms=figures.value("p50_ms", "slow"),
        slow_p99_ms=figures.value("p99_ms", "slow"),
        abusers=len(abusers),
        abusers_refused=len(abusers & refused),
        refusals=refusals,
    )


def _abusers(side: Side) -> str:
    return f"{side.abusers_refused} of {side.abusers}"


def _delays(side: Side, kind: str) -> str:
    values = (getattr(side, f"{kind}_{name}_ms") for name in ("p50", "p99"))
    return " / ".join("-" if value is None else f"{value:.0f} ms" for value in values)
