"""The closed loop in one command: load, records, analysis, new limits and bans for the same server, the same load.

1. A server with limits that are too tight; a crowd of healthy, honest slow and abusive peers; everything is recorded.
2. ``flowctl analyze all``, in a process of its own, makes of the records a report, a limits file and a ban list.
3. Both are copied to where the server watches, whole and by rename. It takes them while it runs.
4. The same crowd again; and what was better.

Everything is on the loopback interface, in one folder, and bounded in time.

The crowd is one of the load tester, each peer with an address of its own of 127.0.0.0/8, the same both times; so a
score per address means something, and "the same viewer" does too. It has viewers that keep up, honest viewers on links
that pause or swing, and abusers: who begins messages on chunk streams without end, who floods control messages, who
nests values thousands deep, who sends chunks of one octet.

The limits of the first run are too tight on purpose: a viewer whose oldest frame waits for longer than a second is cut,
and a link that rests for 3 s does just that to it, though it would have caught up. That is the mistake that the
records are to show, and the analysis to mend.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from flowctl.core.flow.limits import Limits
from flowctl.core.flow.limitsfile import LimitsFile, parse_limits_file
from flowctl.core.flow.limitsfile import render as render_limits
from flowctl.core.text.files import write_text
from flowctl.demo.processes import ServerProcess, ServerProcesses
from flowctl.demo.runner import DemoReport, check_bounds, crowd_plan, hand_over, load_page, tell, write_page
from flowctl.errors import FlowctlError
from flowctl.load.crowd import source_address
from flowctl.load.plan import LoadPlan
from flowctl.load.profiles import parse_profile
from flowctl.load.results.figures import RunFigures
from flowctl.load.results.result import PeerKind, RunResult, RunSample
from flowctl.load.run import run_load

BIT_RATE: Final = 2_000_000
RAMP_S: Final = 2.0

TIGHT_SOFT: Final = "512KiB,1024,1s"
TIGHT_HARD: Final = TIGHT_SOFT
"""Limits that are too tight on purpose, see above: equal, so no viewer is thinned before it is cut."""

PAUSING: Final = "pause@4s/3s/64KiB"
"""Profile of a link that rests: longer than the first limits allow, shorter than any sensible ones."""
RESTING: Final = "pause@4s/700ms/64KiB"
"""Profile of a link with shorter rests than the first limits allow: its viewers tell of it for the whole run."""
SWINGING: Final = "sawtooth@500k-6M/6s"
"""Profile of a mobile link."""
ABUSES: Final = ("B05", "B17", "B08", "B02")
"""Profiles of abuse: endless chunk streams, control flood, nesting, chunks of one octet. No sound client does these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopPlan:
    """Settings of the demonstration."""

    duration_s: float = 15.0  # how long the crowd stays each time, 8 to 600 s
    healthy: int = 20
    slow: int = 4  # number of honest viewers of each kind of bad link, 1 to 50
    abusers: int = 1

    def __post_init__(self) -> None:
        check_bounds(self, duration_s=(8, 600), healthy=(2, 500), slow=(1, 50), abusers=(1, 10))

    @property
    def limits(self) -> LimitsFile:
        return LimitsFile(
            limits=Limits.parse(TIGHT_SOFT, TIGHT_HARD),
            objective="none: too tight on purpose, to be found out",
        )

    def load_plan(self, url: str, server_pid: int) -> LoadPlan:
        """Return the load run; the same each time but for what the system chooses."""
        crowd = {"healthy": self.healthy, PAUSING: self.slow, RESTING: self.slow, SWINGING: self.slow}
        crowd |= dict.fromkeys(ABUSES, self.abusers)
        return crowd_plan(
            url,
            crowd,
            bit_rate=BIT_RATE,
            ramp_s=RAMP_S,
            duration_s=self.duration_s,
            server_pid=server_pid,
            command="flowctl demo --pipeline",
        )


_LEAST_FEWER: Final = 2.0
"""Least factor by which other limits cut fewer honest slow viewers: one less may be chance, half of them is not."""
_MORE_BY_CHANCE: Final = 1
"""Most cuts of honest slow viewers beyond those before, where the advice was to keep the limits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopRun:
    """Figures of one of the two runs. Delays are over all frames of a kind of viewers, ms; None: no frame came."""

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
class LoopComparison(DemoReport):
    """Both runs, and the verdict."""

    before: LoopRun  # the first run, with limits that are too tight and without bans
    after: LoopRun  # the second run, with what the analysis recommends
    same_process: bool
    files: dict[str, str]

    @property
    def keeps(self) -> bool:
        """Whether the advice was to keep the limits."""
        return self.before.limits == self.after.limits

    @property
    def faults(self) -> list[str]:
        """Faults of the run in words; empty when the loop worked: what was advised, the second crowd confirms."""
        before, after, faults = self.before, self.after, []
        most = before.slow_cut + _MORE_BY_CHANCE if self.keeps else before.slow_cut / _LEAST_FEWER
        if not before.slow_cut:
            faults.append("no honest slow viewer was cut before: there was nothing to mend")
        elif after.slow_cut > most:
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
        cut = "limits kept as was advised" if self.keeps else "fewer honest viewers cut"
        return [*lines, f"passed: {cut}, abusers refused at accept, and the server was never restarted"]

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.verdict(),
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


def side_of(plan: LoopPlan, result: RunResult, refused: set[str], refusals: int, limits: str) -> LoopRun:
    figures = RunFigures(result)

    def count(name: str, scope: str) -> int:
        return round(figures.value(name, scope) or 0)

    honest, abusers = addresses(plan)
    return LoopRun(
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


def _abusers(side: LoopRun) -> str:
    return f"{side.abusers_refused} of {side.abusers}"


def _delays(side: LoopRun, kind: str) -> str:
    values = (getattr(side, f"{kind}_{name}_ms") for name in ("p50", "p99"))
    return " / ".join("-" if value is None else f"{value:.0f} ms" for value in values)


ANALYZE_S: Final = 1200.0
"""Longest analysis: it takes some seconds on two free cores."""
_EVENTS_ROTATE_S: Final = 2.0
"""Time after which a file of records is complete; short, since the analysis follows at once."""
_TAKE_S: Final = 30.0
"""Longest time for the server to take the files; it looks each second."""
_CONDITIONS: Final = ("healthy.missing>0", "healthy.cut>0", "slow.cut>0")
_STREAM: Final = "demo/loop"
_LINE_EVERY_S: Final = 5.0
_STDERR: Final = 2
"""Descriptor of standard error: `sys.stderr` may be something that has none."""

Decide = Callable[[Path, Path], None]
"""Makes ``limits.toml`` and ``bans.jsonl`` in the second folder of the records in the first."""


def analyze(events: Path, out: Path) -> None:
    """Run ``flowctl analyze all`` on the records; its progress goes to standard error, its summary to a file.

    Limits are chosen by the default objective, as for anybody: fewest honest viewers cut, then the rest.
    """
    command = [sys.executable, "-m", "flowctl", "analyze", "all", str(events), "--out", str(out)]
    command.append("--judge-private")  # the whole crowd is on this machine
    command += ["--engine", "duckdb"]
    try:
        done = subprocess.run(command, stdout=_STDERR, check=False, timeout=ANALYZE_S)  # noqa: S603 - ours
    except subprocess.TimeoutExpired as error:
        raise FlowctlError(f"the analysis did not end within {ANALYZE_S:g} s") from error
    if done.returncode:
        raise FlowctlError(
            f"the analysis failed with status {done.returncode}",
            hint="what it says of it stands above",
        )


class _Loop:
    """One demonstration."""

    def __init__(self, plan: LoopPlan, folder: Path, decide: Decide, *, record: bool) -> None:
        self._plan = plan
        self._folder = folder
        self._decide = decide
        self._events: Path | None = folder / "events" if record else None
        self._limits, self._bans = folder / "watched" / "limits.toml", folder / "watched" / "bans.jsonl"
        self._limits.parent.mkdir()

    def run(self) -> LoopComparison:
        write_text(self._limits, render_limits(self._plan.limits))
        arguments = ["serve", "live", "--log-json", "--stats", "1s"]
        arguments += ["--limits", str(self._limits), "--bans", str(self._bans)]
        if self._events is not None:
            # Every connection is recorded in full: of a crowd of hundreds at most, what-if has then the whole truth.
            arguments += ["--events", str(self._events), "--flights-at-once", "1000"]
            arguments += ["--set", f"events_rotate={_EVENTS_ROTATE_S:g}s"]
        with ServerProcesses(self._folder) as nodes:
            server = nodes.start("server", *arguments)
            tell(f"1. the crowd meets limits that are too tight: {self._plan.limits.limits}")
            before = self._load(server, "before", str(self._plan.limits.limits))
            time.sleep(_EVENTS_ROTATE_S * 2)  # the records of the last to leave are complete then
            tell("2. the records are analysed")
            out = self._folder / "out"
            self._decide(self._events or self._folder, out)
            tell("3. the server takes limits and bans, while it runs")
            limits = self._hand_over(server, out)
            tell(f"4. the same crowd again: {limits}")
            after = self._load(server, "after", limits)
            server.check()
            starts = sum(line.get("event") == "live server started" for line in server.lines())
        files = {"load before": "before.html", "load after": "after.html", "analysis": "out/report.html"}
        there = {name: str(self._folder / path) for name, path in files.items() if (self._folder / path).exists()}
        watched = {"limits": str(self._limits), "bans": str(self._bans), "log of the server": str(server.log_path)}
        return LoopComparison(before=before, after=after, same_process=starts == 1, files=there | watched)

    def _load(self, server: ServerProcess, name: str, limits: str) -> LoopRun:
        lines, refused = len(server.lines()), _banned_count(server)
        result = run_load(self._plan.load_plan(server.url(_STREAM), server.pid), _Progress().show_sample)
        if result.interrupted:
            raise KeyboardInterrupt
        if result.failure:
            raise FlowctlError(f"the load run failed: {result.failure}", hint=f"the server's log is {server.log_path}")
        for warning in result.warnings:
            tell(f"   warning: {warning}")
        write_page(self._folder / f"{name}.html", load_page(result, _CONDITIONS))
        # The next line of figures counts all of it: one comes each second.
        server.wait_line("its figures", lambda line: line.get("event") == "figures", len(server.lines()), 10.0)
        # It logs the first refusal of an address, and then one in ten seconds; so each address is there once at least.
        addresses = {
            str(line.get("peer"))
            for line in server.lines()[lines:]
            if line.get("event") == "connection refused" and line.get("limit") == "banned"
        }
        return side_of(self._plan, result, addresses, _banned_count(server) - refused, limits)

    def _hand_over(self, server: ServerProcess, out: Path) -> str:
        """Put both files where the server watches, each by rename; return the limits that it says it has taken."""
        for name in ("limits.toml", "bans.jsonl"):
            if not (out / name).is_file():
                raise FlowctlError(f"the analysis made no {name}", hint=f"see {out}")
        after = len(server.lines())
        text = (out / "limits.toml").read_text("utf-8")
        limits = str(parse_limits_file(text, str(out / "limits.toml")).limits)
        write_text(self._bans, (out / "bans.jsonl").read_text("utf-8"))
        write_text(self._limits, text)
        server.wait_line(
            "that it took the limits",
            lambda line: line.get("event") == "limits changed" and line.get("limits") == limits,
            after,
            _TAKE_S,
        )
        bans = server.wait_line(
            "that it took the bans", lambda line: line.get("event") == "bans changed", after, _TAKE_S
        )
        abusers = len(addresses(self._plan)[1])
        tell(f"   limits: {limits}; bans: {bans.get('bans')} (there are {abusers} abusers)")
        return limits


def _banned_count(server: ServerProcess) -> int:
    """Return how many connections the server has refused as banned, by its last line of figures."""
    figures = [line for line in server.lines() if line.get("event") == "figures"]
    return int(figures[-1].get("refused", {}).get("banned", 0)) if figures else 0


class _Progress:
    """Says now and then how the load run goes."""

    _next_s = 0.0

    def show_sample(self, sample: RunSample) -> None:
        if sample.at_s >= self._next_s:
            self._next_s = sample.at_s + _LINE_EVERY_S
            cut = ", ".join(f"{count} {name}" for name, count in sample.cut.items() if count) or "nobody"
            tell(f"   {sample.at_s:4.0f} s  {sum(sample.connected.values())} connected; cut so far: {cut}")


def run_loop(
    plan: LoopPlan, folder: Path, *, decide: Decide = analyze, record: bool = True, as_json: bool = False
) -> bool:
    """Run the closed loop, and write its result to standard output."""
    _clear(folder)
    comparison = _Loop(plan, folder, decide, record=record).run()
    write_text(folder / "comparison.json", json.dumps(comparison.as_dict(), indent=1) + "\n")
    return hand_over(comparison, as_json=as_json, files={})


_RUN_FILES: Final = ("events", "watched", "out", "before.html", "after.html", "server.log", "comparison.json")
"""Files and folders that a run leaves in its folder; the next run may remove them."""


def _clear(folder: Path) -> None:
    """Make the folder, or take out of it what an earlier run left, and nothing else."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _RUN_FILES:
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.exists() or path.is_symlink():
                path.unlink()
    except OSError as error:
        raise FlowctlError(f"cannot prepare the folder {folder}: {error.strerror}") from error
