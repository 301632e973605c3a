"""Puts together what the workers of a load run say: rows, samples, percentiles, and what casts doubt on them."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from flowctl.core.flow.histogram import DelayHistogram
from flowctl.load.plan import LoadPlan, PeerOrder
from flowctl.load.procfs import ProcessFigures, figures_of
from flowctl.load.profiles import parse_profile
from flowctl.load.results.result import PeerEnd, PeerKind, PeerResult, RunResult, RunSample
from flowctl.load.worker import Orders
from flowctl.units import format_count
from flowctl.wire.client.measure import FASTEST, ORIGIN

DELAYS_KEPT: Final = 10_000
_REPORT_WAIT_S: Final = 0.5
"""Longest wait for the reports on a second that has passed; then it is closed without those that are missing."""
_BUSY_PERCENT: Final = 90.0
_LAG_MS: Final = 50.0
_PUBLISHER_LAG_S: Final = 0.1
_REFUSED_SHARE: Final = 0.01


@dataclass(eq=False)
class Gathering:
    """The result of a run, as it grows."""

    plan: LoadPlan
    url: str
    on_sample: Callable[[RunSample], None] | None
    result: RunResult = field(init=False)
    closed: int = 0  # the last second that became a sample
    # rows of publishers of ours that ended before they were told to
    lost_publishers: list[PeerResult] = field(default_factory=list)
    server_gone: bool = False  # whether the server's process, where it is watched, has ended
    deserted: bool = False  # whether all have gone and no one is to come, by the last sample
    _began: float = 0.0
    _seconds: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)  # second -> worker -> its report
    _cpu_s: dict[int, float] = field(default_factory=dict)  # processor time of each worker, by its last report
    _cpu_before: float = 0.0
    _busy: set[int] = field(default_factory=set)  # seconds in which a worker had no processor time left
    _lagging: dict[int, float] = field(default_factory=dict)  # second -> worst lag in ms
    _server_before: tuple[float, float] | None = None  # when it was looked at last, and its processor time then
    _server_first: ProcessFigures | None = None
    _server_last: ProcessFigures | None = None
    _publisher_lag_s: float = 0.0
    _orders: dict[int, PeerOrder] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.result = RunResult(
            url=self.url,
            command=self.plan.command,
            began_at=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            profiles=dict(self.plan.profiles),
            server_pid=self.plan.server_pid,
        )

    def warn(self, text: str) -> None:
        if text not in self.result.warnings:
            self.result.warnings.append(text)

    def expect_peers(self, orders: Iterable[PeerOrder], every: int) -> None:
        """Note the peers that are to come, and that only every n-th viewer is parsed."""
        self._orders = {order.number: order for order in orders}
        self.result.measured_every = every
        if every > 1:
            self.warn(f"frames and delays are of every {_ordinal(every)} viewer; the others read and discard")
        if self.plan.server_pid is not None:
            self._server_first = self._server_last = figures_of(self.plan.server_pid)
            if self._server_first is not None:
                self.result.server_base_rss_bytes = self._server_first.rss_bytes

    def begin(self, began: float) -> None:
        """Note the start of the run, on `time.monotonic`."""
        self._began = began
        self.result.began_at = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        self._cpu_before = sum(self._cpu_s.values()) + time.process_time()
        if self._server_last is not None:
            self._look_at_server(began)

    # -- what workers say

    def note_start(self, worker: int, cpu_s: float) -> None:
        """Note the processor time that a worker took to start: it is not that of the run."""
        self._cpu_s[worker] = cpu_s

    def add_row(self, values: dict[str, Any]) -> None:
        result = PeerResult(**{**values, "kind": PeerKind(values["kind"]), "end": PeerEnd(values["end"])})
        self.result.peers.append(result)
        if result.kind is not PeerKind.PUBLISHER:
            self._orders.pop(result.number, None)
        elif result.end is not PeerEnd.RUN_ENDED:
            self.lost_publishers.append(result)

    def add_report(self, worker: int, message: dict[str, Any], *, publishing: bool) -> None:
        """Add the figures of a worker; publishers have a clock of their own, so theirs are of the present second."""
        second = self.closed + 1 if publishing else int(message["sample"])
        used_s = message["cpu_s"] - self._cpu_s.get(worker, message["cpu_s"])
        self._cpu_s[worker] = message["cpu_s"]
        if used_s * 100 > _BUSY_PERCENT and self._began:
            self._busy.add(second)
        lag_ms = message["lag_s"] * 1000
        if lag_ms > _LAG_MS and self._began:
            self._lagging[second] = max(lag_ms, self._lagging.get(second, 0.0))
        if not publishing and second > self.closed:
            self._seconds.setdefault(second, {})[worker] = message

    def note_publisher_lag(self, lag_s: float) -> None:
        self._publisher_lag_s = max(self._publisher_lag_s, lag_s)

    def note_death(self, orders: Orders, words: str) -> None:
        if orders.role == "publishers":
            self.warn(f"the process of the publishers died: {words}")
            return
        numbers = [int(peer[0]) for peer in orders.peers]
        lost = [self._orders.pop(number) for number in numbers if number in self._orders]
        self.warn(f"a worker process died, {format_count(len(lost), 'peer')} with it: {words}")
        for order in lost:
            kind = parse_profile(order.profile).profile.kind
            self.result.peers.append(
                PeerResult(
                    number=order.number,
                    profile=order.profile,
                    kind=kind,
                    url=self.result.url,
                    end=PeerEnd.TESTER_FAILED,
                    end_details="its worker process died",
                    ended_s=round(time.monotonic() - self._began, 3) if self._began else 0.0,
                )
            )

    @property
    def healthy_cut(self) -> int:
        """How many healthy viewers there were, if the server has ended the connections of all of them; else 0."""
        if any(parse_profile(order.profile).profile.kind is PeerKind.HEALTHY for order in self._orders.values()):
            return 0
        rows = [row for row in self.result.peers if row.kind is PeerKind.HEALTHY]
        return len(rows) if all(row.cut and row.first_frame_s is not None for row in rows) else 0

    # -- samples

    def close_second(self, now: float, workers: int) -> None:
        second = self.closed + 1
        due = self._began + second
        reports = self._seconds.get(second, {})
        complete = bool(reports) and len(reports) >= workers
        if now < due or not (complete or now >= due + _REPORT_WAIT_S):
            return
        self.closed = second
        self._seconds.pop(second, None)
        sample = self._sample(float(second), list(reports.values()))
        self.deserted = complete and not any(report["alive"] for report in reports.values())
        self._add_processes(sample, now)
        self.result.samples.append(sample)
        if self.on_sample is not None:
            self.on_sample(sample)

    def _sample(self, at_s: float, reports: list[dict[str, Any]]) -> RunSample:
        sample = RunSample(at_s=at_s)
        recent = DelayHistogram()
        for report in reports:
            for profile, figures in report["profiles"].items():
                for name in ("connected", "playing", "missing", "pictures", "missing_pictures", "cut", "failed"):
                    into: dict[str, int] = getattr(sample, name)
                    into[profile] = into.get(profile, 0) + figures.get(name, 0)
            sample.received_bytes_per_s += report["bytes"]
            sample.frames_per_s += report["frames"]
            recent.merge(DelayHistogram.from_list(report["recent"]))
        sample.delay_p50_ms = recent.percentile_ms(0.5)
        sample.delay_p99_ms = recent.percentile_ms(0.99)
        return sample

    def _add_processes(self, sample: RunSample, now: float) -> None:
        used_s = sum(self._cpu_s.values()) + time.process_time()
        sample.load_cpu_percent = round((used_s - self._cpu_before) * 100, 1)
        self._cpu_before = used_s
        before = self._server_before
        figures = self._look_at_server(now)
        if figures is None:
            return
        sample.server_rss_bytes = figures.rss_bytes
        sample.server_fds = figures.fds
        if before is not None and now > before[0]:
            sample.server_cpu_percent = round((figures.cpu_s - before[1]) / (now - before[0]) * 100, 1)

    def _look_at_server(self, now: float) -> ProcessFigures | None:
        pid = self.plan.server_pid
        if pid is None:
            return None
        figures = figures_of(pid)
        if figures is None:
            self.server_gone = True
            return None
        self._server_before = (now, figures.cpu_s)
        self._server_last = figures
        return figures

    # -- the end

    def finish(self, done: list[dict[str, Any]]) -> RunResult:
        result = self.result
        if self._began:
            result.duration_s = round(max(time.monotonic() - self._began, 0.0), 3)
        result.peers.sort(key=lambda peer: (peer.kind is PeerKind.PUBLISHER, peer.number, peer.started_s))
        merged: dict[str, DelayHistogram] = {}
        sources: set[str] = set()
        for words in done:
            sources.update(words["sources"])
            for name, flat in words["delays"].items():
                merged.setdefault(name, DelayHistogram()).merge(DelayHistogram.from_list(flat))
        result.delays_ms = {name: delays.sample_ms(DELAYS_KEPT) for name, delays in merged.items()}
        result.delay_source = ", ".join(sorted(sources))
        if self._server_first is not None and self._server_last is not None:
            result.server_cpu_s = round(self._server_last.cpu_s - self._server_first.cpu_s, 3)
        self._warn_of_doubts(sources)
        return result

    def _warn_of_doubts(self, sources: set[str]) -> None:
        """Say what the figures should not be trusted for."""
        if self._busy:
            self.warn(
                f"a process of the load tester had no processor time left in {len(self._busy)} s of the run: "
                "delays are partly its own (more --workers, fewer viewers, or --measure for a sample of them)"
            )
        if self._lagging:
            self.warn(
                f"the load tester was late by up to {max(self._lagging.values()):.0f} ms in {len(self._lagging)} s of "
                "the run: delays are partly its own"
            )
        if self._publisher_lag_s > _PUBLISHER_LAG_S:
            self.warn(f"a publisher of the load tester was late by up to {self._publisher_lag_s * 1000:.0f} ms")
        for peer in self.result.peers:
            if peer.kind is PeerKind.PUBLISHER and peer.end is not PeerEnd.RUN_ENDED:
                self.warn(
                    f"publisher {peer.number + 1} was lost {peer.ended_s or 0:.1f} s after it began: {peer.end_details}"
                )
        lost = [peer for peer in self.result.peers if peer.end is PeerEnd.TESTER_FAILED]
        if lost:
            self.warn(
                f"the load tester itself failed for {format_count(len(lost), 'peer')} ({lost[0].end_details}): that "
                "says nothing about the server; see `ulimit -n`, --workers and --spread-addresses"
            )
        if FASTEST in sources:
            self.warn("delays are against the fastest viewer: the frames carry no time of their own")
        elif ORIGIN in sources:
            self.warn("delays are against the time at which our publisher was to send a frame")
        viewers = [peer for peer in self.result.peers if peer.kind in (PeerKind.HEALTHY, PeerKind.SLOW)]
        refused = [peer for peer in viewers if peer.end is PeerEnd.REFUSED]
        if len(refused) > _REFUSED_SHARE * len(viewers):
            self.warn(
                f"{len(refused)} of {len(viewers)} viewers were refused ({refused[0].end_details}): servers limit "
                "connections per address, see --spread-addresses"
            )


def _ordinal(number: int) -> str:
    last = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"
