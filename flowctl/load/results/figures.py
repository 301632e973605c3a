"""The figures of a load run, by name: what each one means, and how it is worked out of a `RunResult` (pure).

One table serves the conditions of ``--fail-on``, the summary, the JSON and the report, so that a name means the same
everywhere. A figure that was not measured is None, never 0: a percentile of no frames, the memory of a server whose
process was not named, the missing frames of peers that were never sent any.

A figure is about the viewers, healthy and slow, unless a scope is named: see `flowctl.load.results.scope`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flowctl.errors import InternalError
from flowctl.load.results.result import PeerEnd, PeerKind, PeerResult, RunResult
from flowctl.load.results.scope import BOTH, VIEWERS, ScopedPeers, in_scope

_FAILED: Final = frozenset({PeerEnd.NOT_CONNECTED, PeerEnd.REFUSED})


class RunFigures:
    """Works out the figures of one run; looks at each peer once per scope."""

    def __init__(self, result: RunResult) -> None:
        self.result = result
        kinds: dict[str, PeerKind] = {}
        for peer in result.peers:
            kinds.setdefault(peer.profile, peer.kind)
        order = list(PeerKind)
        # of each profile; healthy ones first, publishers last
        self.kinds = dict(sorted(kinds.items(), key=lambda item: order.index(item[1])))
        self._crowds: dict[str, ScopedPeers] = {}

    def crowd(self, scope: str) -> ScopedPeers:
        """Return the peers in a scope; none is in an unknown scope."""
        found = self._crowds.get(scope)
        if found is None:
            wanted = {name for name, kind in self.kinds.items() if in_scope(scope, name, kind, self.kinds)}
            found = ScopedPeers(self.result, [peer for peer in self.result.peers if peer.profile in wanted])
            self._crowds[scope] = found
        return found

    def value(self, name: str, scope: str | None = None) -> float | None:
        figure = FIGURES[name]
        if figure.of_run is not None:
            return figure.of_run(self)
        if figure.of_crowd is not None:
            return figure.of_crowd(self.crowd(figure.scope if scope is None else scope))
        raise InternalError(f"nothing works out the figure {name}")

    def samples(self, name: str) -> list[float]:
        """Return what the samples say of one thing, without those that did not measure it."""
        found = (getattr(sample, name) for sample in self.result.samples)
        return [float(value) for value in found if value is not None]

    @property
    def most_viewers(self) -> int:
        names = [name for name, kind in self.kinds.items() if kind in VIEWERS]
        return max((sum(sample.connected.get(name, 0) for name in names) for sample in self.result.samples), default=0)

    @property
    def cpu_us_per_viewer_s(self) -> float | None:
        used, seconds = self.result.server_cpu_s, self.crowd(BOTH).seconds
        return used * 1e6 / seconds if used is not None and seconds > 0 else None

    @property
    def rss_growth_kb(self) -> float | None:
        base, sizes = self.result.server_base_rss_bytes, self.samples("server_rss_bytes")
        return (max(sizes) - base) / 1000 if base is not None and sizes else None

    @property
    def rss_kb_per_viewer(self) -> float | None:
        growth, viewers = self.rss_growth_kb, self.most_viewers
        return growth / viewers if growth is not None and viewers else None

    def peak(self, name: str, scale: float = 1.0) -> float | None:
        """Return the largest sample of one thing, divided by `scale`; None: none measured it."""
        values = self.samples(name)
        return max(values) / scale if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigure:
    """One figure: its name, what it means, and how to get it; of a crowd or of the whole run."""

    name: str
    unit: str  # ``ms``, ``s``, ``us``, ``kB``, ``kbit/s``, ``percent``, ``share`` or ``count``
    meaning: str
    scope: str = BOTH  # the peers it is about where none are named
    of_crowd: Callable[[ScopedPeers], float | None] | None = None
    of_run: Callable[[RunFigures], float | None] | None = None

    @property
    def of_server(self) -> bool:
        """Whether it is measured only where the server's process is watched."""
        return self.name in _OF_SERVER


def _played(peer: PeerResult) -> bool:
    return peer.first_frame_s is not None


def _times(name: str, field: str, meaning: str) -> list[RunFigure]:
    def make(share: float) -> Callable[[ScopedPeers], float | None]:
        return lambda crowd: crowd.times_ms(field, share)

    words = {"p50": "median", "p95": "95th percentile", "p99": "99th percentile", "max": "largest"}
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return [
        RunFigure(name=f"{name}_{key}_ms", unit="ms", meaning=f"{meaning}: {words[key]}", of_crowd=make(share))
        for key, share in shares.items()
    ]


def _of_crowd(
    name: str, unit: str, meaning: str, of_crowd: Callable[[ScopedPeers], float | None], scope: str = BOTH
) -> RunFigure:
    return RunFigure(name=name, unit=unit, meaning=meaning, of_crowd=of_crowd, scope=scope)


def _of_run(name: str, unit: str, meaning: str, of_run: Callable[[RunFigures], float | None]) -> RunFigure:
    return RunFigure(name=name, unit=unit, meaning=meaning, of_run=of_run)


_ALL: Final = (
    _of_crowd("p50_ms", "ms", "delay of frames: median", lambda crowd: crowd.delay_ms(0.5)),
    _of_crowd("p95_ms", "ms", "delay of frames: 95th percentile", lambda crowd: crowd.delay_ms(0.95)),
    _of_crowd("p99_ms", "ms", "delay of frames: 99th percentile", lambda crowd: crowd.delay_ms(0.99)),
    _of_crowd("max_ms", "ms", "delay of frames: largest", lambda crowd: crowd.largest("delay_max_ms")),
    _of_crowd("missing", "count", "frames that never came although later ones did", lambda crowd: crowd.missing),
    _of_crowd("missing_share", "share", "those, of all that should have come", lambda crowd: crowd.missing_share),
    _of_crowd("missing_video", "count", "missing video frames", lambda crowd: crowd.frames("missing_video")),
    _of_crowd("missing_audio", "count", "missing audio frames", lambda crowd: crowd.frames("missing_audio")),
    _of_crowd(
        "picture_share",
        "share",
        "share of the pictures that came, up to the last picture or piece of sound of each peer",
        lambda crowd: crowd.picture_share,
    ),
    _of_crowd(
        "line_share",
        "share",
        "share of what their lines could carry that came, where the profile sets a rate; a line that is faster than "
        "the stream is never full",
        lambda crowd: crowd.line_share,
    ),
    _of_crowd("freezes", "count", "times that no new picture came for 0.2 s", lambda crowd: crowd.frames("freezes")),
    _of_crowd(
        "longest_freeze_s",
        "s",
        "the longest time without a new picture",
        lambda crowd: crowd.largest("longest_freeze_s"),
    ),
    _of_crowd("gaps", "count", "times that frames were missing", lambda crowd: crowd.frames("gaps")),
    _of_crowd(
        "broken_restarts",
        "count",
        "gaps in video that did not end with a key frame: the picture was broken",
        lambda crowd: crowd.frames("broken_restarts"),
    ),
    _of_crowd(
        "started_without_key",
        "count",
        "peers whose first video frame was no key frame",
        lambda crowd: crowd.count(lambda peer: peer.started_on_key is False) if crowd.receivers else None,
    ),
    _of_crowd(
        "stalls",
        "count",
        "times that nothing came for over a second while a peer was reading",
        lambda crowd: float(crowd.total("stalls")) if crowd.count(_played) else None,
    ),
    _of_crowd(
        "longest_stall_s",
        "s",
        "the longest of them",
        lambda crowd: crowd.largest("longest_stall_s") if crowd.count(_played) else None,
    ),
    *_times("connect", "connect_s", "time for TCP to connect"),
    *_times("handshake", "handshake_s", "time from there to the end of the RTMP handshake"),
    *_times("first_frame", "first_frame_s", "time from the begin of connecting to the first frame"),
    _of_crowd("connections", "count", "connections tried", lambda crowd: len(crowd.peers)),
    _of_crowd("playing_share", "share", "share of them that got a frame", lambda crowd: crowd.share(_played)),
    _of_crowd("cut", "count", "connections that the server ended, as far as peers can tell", lambda crowd: crowd.cut),
    _of_crowd("cut_share", "share", "those, of all that can tell", lambda crowd: crowd.cut_share),
    _of_crowd(
        "failed",
        "count",
        "connections that were refused or not made at all",
        lambda crowd: crowd.count(lambda peer: peer.end in _FAILED),
    ),
    _of_crowd("failed_share", "share", "those, of all", lambda crowd: crowd.share(lambda peer: peer.end in _FAILED)),
    _of_crowd(
        "errors",
        "count",
        "connections on which the server broke the protocol",
        lambda crowd: crowd.count(lambda peer: peer.end is PeerEnd.ERROR),
    ),
    _of_crowd("kbit_s", "kbit/s", "received per peer while it was connected, on average", lambda crowd: crowd.kbit_s),
    _of_crowd(
        "expectation_failed",
        "count",
        "hostile peers to whom the server did not do what a sound server may do",
        lambda crowd: (
            crowd.count(lambda peer: peer.expectation_met is False)
            if any(peer.expectation_met is not None for peer in crowd.peers)
            else None
        ),
        scope=PeerKind.HOSTILE.value,
    ),
    _of_run(
        "cpu_us_per_viewer_s",
        "us",
        "processor time of the server, user and system, per viewer and second",
        lambda run: run.cpu_us_per_viewer_s,
    ),
    _of_run(
        "server_cpu_percent",
        "percent",
        "processor time of the server, of one core: largest in a second",
        lambda run: run.peak("server_cpu_percent"),
    ),
    _of_run("rss_kb", "kB", "resident memory of the server: peak", lambda run: run.peak("server_rss_bytes", 1000)),
    _of_run("rss_growth_kb", "kB", "that, less what it had before the run", lambda run: run.rss_growth_kb),
    _of_run("rss_kb_per_viewer", "kB", "that growth per viewer connected at a time", lambda run: run.rss_kb_per_viewer),
    _of_run("fds", "count", "open descriptors of the server: most", lambda run: run.peak("server_fds")),
    _of_run(
        "load_cpu_percent",
        "percent",
        "processor time of the load tester, of one core: largest in a second",
        lambda run: run.peak("load_cpu_percent"),
    ),
    _of_run("warnings", "count", "doubts of the tester about its figures", lambda run: len(run.result.warnings)),
    _of_run("duration_s", "s", "how long the run took", lambda run: run.result.duration_s),
)
_OF_SERVER: Final = frozenset(
    {"cpu_us_per_viewer_s", "server_cpu_percent", "rss_kb", "rss_growth_kb", "rss_kb_per_viewer", "fds"}
)
FIGURES: Final[Mapping[str, RunFigure]] = {figure.name: figure for figure in _ALL}
"""Every figure there is, by name."""


def format_value(value: float | None, unit: str) -> str:
    """Return a figure for people, with its unit; a dash where it was not measured."""
    if value is None:
        return "-"
    if unit == "count":
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    if unit == "share":
        return f"{value:.2%}" if 0 < abs(value) < 0.1 else f"{value:.1%}"
    if unit == "percent":
        return f"{value:.0f} %"
    if unit == "kB" and abs(value) >= 10_000:
        return f"{value / 1000:,.1f} MB"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 1 else 2
    return f"{value:,.{digits}f} {unit}"


def as_dict(figures: RunFigures, scope: str) -> dict[str, Any]:
    """Return the figures of a crowd by name, rounded to what they are worth, for JSON."""
    return {
        name: None if (value := figures.value(name, scope)) is None else round(value, 4)
        for name, figure in FIGURES.items()
        if figure.of_crowd is not None and name != "expectation_failed"
    }


def run_figures(figures: RunFigures) -> dict[str, Any]:
    """Return the figures of the whole run by name, rounded likewise."""
    return {
        name: None if (value := figures.value(name)) is None else round(value, 4)
        for name, figure in FIGURES.items()
        if figure.of_run is not None
    }
