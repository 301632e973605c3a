"""The figures of a load run, by name: what each one means, and how it is worked out of a `RunResult` (pure).

One table serves the conditions of ``--fail-on``, the summary, the JSON and the report, so that a name means the same
everywhere. A figure that was not measured is None, never 0: a percentile of no frames, the memory of a server whose
process was not named, the missing frames of peers that were never sent any.

A figure is about some peers, the viewers unless others are named. Its scope is a profile as on the command line
(``slow@200k``), a kind of peer (``healthy``, ``slow``, ``hostile``, ``publisher``), ``viewers`` for healthy and slow
ones, ``all``, or the name of a profile without its parameters (``sawtooth``), looked for in this order.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from flowctl.load.results.result import PeerEnd, PeerKind, PeerResult, RunResult

VIEWERS: Final = frozenset({PeerKind.HEALTHY, PeerKind.SLOW})
"""Kinds of peers that play as one should, however slowly."""

EVERYBODY: Final = "all"
BOTH: Final = "viewers"
"""Scope of healthy and slow viewers together."""

SCOPES: Final = (*(kind.value for kind in PeerKind), BOTH, EVERYBODY)
"""Scopes that are no profile."""


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the smallest of the `ordered` values that at least `share` (0 to 1) of them do not exceed.

    No interpolation: the value is one that occurred, and never more favourable than what did. None: there are none.
    """
    if not ordered:
        return None
    place = min(len(ordered) - 1, max(0, -int(-len(ordered) * share // 1) - 1))
    return ordered[place]


def weighted_quantiles(samples: Iterable[tuple[Sequence[float], float]], shares: Sequence[float]) -> list[float]:
    pairs = sorted((value, weight) for values, weight in samples for value in values)
    if not pairs:
        return []
    sums = list(itertools.accumulate(weight for _, weight in pairs))
    # A hair less than the share: sums of weights such as 0.1 are not exact.
    places = (bisect.bisect_left(sums, sums[-1] * share * (1 - 1e-12)) for share in shares)
    return [pairs[min(place, len(pairs) - 1)][0] for place in places]


def in_scope(scope: str, profile: str, kind: PeerKind, profiles: Iterable[str]) -> bool:
    scope_name, name = scope.lower(), profile.lower()
    if any(scope_name == other.lower() for other in profiles):
        return scope_name == name
    if scope_name == EVERYBODY:
        return True
    if scope_name == BOTH:
        return kind in VIEWERS
    if any(scope_name == other.value for other in PeerKind):
        return kind.value == scope_name
    return name.partition("@")[0] == scope_name


class ScopedPeers:
    """The peers that a figure is about."""

    def __init__(self, result: RunResult, peers: list[PeerResult]) -> None:
        self.result = result
        self.peers = peers

    @cached_property
    def receivers(self) -> list[PeerResult]:
        """Peers whose frames were counted and that got any; what publishers count is what they sent."""
        return [
            peer
            for peer in self.peers
            if peer.parsed and peer.video + peer.audio and peer.kind is not PeerKind.PUBLISHER
        ]

    def total(self, name: str) -> int:
        return sum(getattr(peer, name) for peer in self.peers)

    def frames(self, name: str) -> float | None:
        """Return the sum of a field over those whose frames were counted; None: there were none."""
        return float(sum(getattr(peer, name) for peer in self.receivers)) if self.receivers else None

    def count(self, condition: Callable[[PeerResult], bool]) -> float | None:
        return float(sum(map(condition, self.peers))) if self.peers else None

    def share(self, condition: Callable[[PeerResult], bool]) -> float | None:
        count = self.count(condition)
        return None if count is None else count / len(self.peers)

    @cached_property
    def _cuts(self) -> list[bool]:
        """Whether each peer was cut, without those that cannot tell: a peer that vanished sees no end."""
        return [peer.cut for peer in self.peers if peer.cut is not None]

    @property
    def cut(self) -> float | None:
        """Peers that the server cut; None: it cannot be told."""
        return float(sum(self._cuts)) if self._cuts else None

    @property
    def cut_share(self) -> float | None:
        """Those, as a share of the peers that can tell."""
        return sum(self._cuts) / len(self._cuts) if self._cuts else None

    def times_ms(self, name: str, share: float) -> float | None:
        times = sorted(value for peer in self.peers if (value := getattr(peer, name)) is not None)
        time_s = quantile(times, share)
        return None if time_s is None else time_s * 1000

    @cached_property
    def delays(self) -> list[tuple[list[float], float]]:
        """Delays of frames with the weight of each, for `weighted_quantile`."""
        counts: dict[str, int] = {}
        for peer in self.peers:
            counts[peer.profile] = counts.get(peer.profile, 0) + peer.delays
        return [
            (values, max(counts[name], 1) / len(values))
            for name, values in self.result.delays_ms.items()
            if values and name in counts
        ]

    def delay_ms(self, share: float) -> float | None:
        quantiles = weighted_quantiles(self.delays, (share,))
        return quantiles[0] if quantiles else None

    def largest(self, name: str) -> float | None:
        """Return the largest value of a field; None: it was not measured."""
        return max((value for peer in self.peers if (value := getattr(peer, name)) is not None), default=None)

    @cached_property
    def seconds(self) -> float:
        """Seconds that the peers were connected, all together; a peer that stays counts until the end."""
        end = self.result.duration_s
        return sum(
            max(0.0, (end if peer.ended_s is None else peer.ended_s) - peer.started_s)
            for peer in self.peers
            if peer.connect_s is not None
        )

    @property
    def missing(self) -> float | None:
        """Frames of all tracks that never came although later ones did."""
        video, audio = self.frames("missing_video"), self.frames("missing_audio")
        return None if video is None or audio is None else video + audio

    @property
    def missing_share(self) -> float | None:
        """Missing frames as a share of those that should have come."""
        missing, video, audio = self.missing, self.frames("video"), self.frames("audio")
        if missing is None or video is None or audio is None:
            return None
        return missing / (missing + video + audio)

    @property
    def picture_share(self) -> float | None:
        """Share of the pictures that came, of those up to the last picture or piece of sound of each peer."""
        seen, missing, after = (self.frames(name) for name in ("video", "missing_video", "missed_at_end"))
        return None if not seen or missing is None or after is None else seen / (seen + missing + after)

    @property
    def renditions(self) -> dict[str, float]:
        """Shares of the time in each rendition, the longest first."""
        sums = Counter[str]()
        for peer in self.receivers:
            sums.update(peer.renditions_s)
        whole_s = sum(sums.values())
        return {name: round(seconds / whole_s, 4) for name, seconds in sums.most_common() if whole_s}

    @property
    def line_share(self) -> float | None:
        """Share of what their lines could carry that came; None: no profile of theirs sets a rate."""
        lines = [(peer.line_used_bytes, peer.line_bytes) for peer in self.peers if peer.line_bytes]
        could = sum(line_bytes for _, line_bytes in lines)
        return sum(used for used, _ in lines) / could if could else None

    @property
    def kbit_s(self) -> float | None:
        """Kilobits per second that a peer received while it was connected, on average.

        None: they were there for less than a second each, in which the burst at the begin is all there is.
        """
        there = sum(peer.connect_s is not None for peer in self.peers)
        return self.total("wire_bytes") * 8 / 1000 / self.seconds if there and self.seconds >= there else None


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
        peers = self._crowds.get(scope)
        if peers is None:
            names = {name for name, kind in self.kinds.items() if in_scope(scope, name, kind, self.kinds)}
            peers = ScopedPeers(self.result, [peer for peer in self.result.peers if peer.profile in names])
            self._crowds[scope] = peers
        return peers

    def value(self, name: str, scope: str | None = None) -> float | None:
        figure = FIGURES[name]
        if figure.of_crowd is not None:
            return figure.of_crowd(self.crowd(figure.scope if scope is None else scope))
        return None if figure.of_run is None else figure.of_run(self)

    def as_dict(self, scope: str | None) -> dict[str, Any]:
        """Return the figures of a crowd (None: of the whole run), rounded to what they are worth, for JSON."""
        return {
            name: None if (value := self.value(name, scope)) is None else round(value, 4)
            for name, figure in FIGURES.items()
            if (figure.of_crowd is None) is (scope is None) and name != "expectation_failed"
        }

    def samples(self, name: str) -> list[float]:
        """Return one value of all samples, without those that did not measure it."""
        values = (getattr(sample, name) for sample in self.result.samples)
        return [float(value) for value in values if value is not None]

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
        """Return the largest value of all samples, divided by `scale`; None: none measured it."""
        values = self.samples(name)
        return max(values) / scale if values else None


@dataclass(frozen=True, slots=True)
class RunFigure:
    """One figure: its name, what it means, and how to get it; of a crowd or of the whole run."""

    name: str
    unit: str  # ``ms``, ``s``, ``us``, ``kB``, ``kbit/s``, ``percent``, ``share`` or ``count``
    meaning: str
    of_crowd: Callable[[ScopedPeers], float | None] | None = None
    scope: str = BOTH  # the peers it is about where none are named
    of_run: Callable[[RunFigures], float | None] | None = None


def _played(peer: PeerResult) -> bool:
    return peer.first_frame_s is not None


def _times(name: str, field: str, meaning: str) -> list[RunFigure]:
    def make(share: float) -> Callable[[ScopedPeers], float | None]:
        return lambda crowd: crowd.times_ms(field, share)

    words = {"p50": "median", "p95": "95th percentile", "p99": "99th percentile", "max": "largest"}
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return [
        RunFigure(f"{name}_{key}_ms", "ms", f"{meaning}: {words[key]}", make(share)) for key, share in shares.items()
    ]


_ALL: Final = (
    RunFigure("p50_ms", "ms", "delay of frames: median", lambda crowd: crowd.delay_ms(0.5)),
    RunFigure("p95_ms", "ms", "delay of frames: 95th percentile", lambda crowd: crowd.delay_ms(0.95)),
    RunFigure("p99_ms", "ms", "delay of frames: 99th percentile", lambda crowd: crowd.delay_ms(0.99)),
    RunFigure("max_ms", "ms", "delay of frames: largest", lambda crowd: crowd.largest("delay_max_ms")),
    RunFigure("missing", "count", "frames that never came although later ones did", lambda crowd: crowd.missing),
    RunFigure("missing_share", "share", "those, of all that should have come", lambda crowd: crowd.missing_share),
    RunFigure("missing_video", "count", "missing video frames", lambda crowd: crowd.frames("missing_video")),
    RunFigure("missing_audio", "count", "missing audio frames", lambda crowd: crowd.frames("missing_audio")),
    RunFigure(
        "picture_share",
        "share",
        "share of the pictures that came, up to the last picture or piece of sound of each peer",
        lambda crowd: crowd.picture_share,
    ),
    RunFigure(
        "line_share",
        "share",
        "share of what their lines could carry that came, where the profile sets a rate; a line that is faster than "
        "the stream is never full",
        lambda crowd: crowd.line_share,
    ),
    RunFigure("freezes", "count", "times that no new picture came for 0.2 s", lambda crowd: crowd.frames("freezes")),
    RunFigure(
        "longest_freeze_s",
        "s",
        "the longest time without a new picture",
        lambda crowd: crowd.largest("longest_freeze_s"),
    ),
    RunFigure("switches", "count", "times that the rendition changed", lambda crowd: crowd.frames("switches")),
    RunFigure("gaps", "count", "times that frames were missing", lambda crowd: crowd.frames("gaps")),
    RunFigure(
        "broken_restarts",
        "count",
        "gaps in video that did not end with a key frame: the picture was broken",
        lambda crowd: crowd.frames("broken_restarts"),
    ),
    RunFigure(
        "started_without_key",
        "count",
        "peers whose first video frame was no key frame",
        lambda crowd: crowd.count(lambda peer: peer.started_on_key is False) if crowd.receivers else None,
    ),
    RunFigure(
        "stalls",
        "count",
        "times that nothing came for over a second while a peer was reading",
        lambda crowd: float(crowd.total("stalls")) if crowd.count(_played) else None,
    ),
    RunFigure(
        "longest_stall_s",
        "s",
        "the longest of them",
        lambda crowd: crowd.largest("longest_stall_s") if crowd.count(_played) else None,
    ),
    *_times("connect", "connect_s", "time for TCP to connect"),
    *_times("handshake", "handshake_s", "time from there to the end of the RTMP handshake"),
    *_times("first_frame", "first_frame_s", "time from the begin of connecting to the first frame"),
    RunFigure("connections", "count", "connections tried", lambda crowd: len(crowd.peers)),
    RunFigure("playing_share", "share", "share of them that got a frame", lambda crowd: crowd.share(_played)),
    RunFigure("cut", "count", "connections that the server ended, as far as peers can tell", lambda crowd: crowd.cut),
    RunFigure("cut_share", "share", "those, of all that can tell", lambda crowd: crowd.cut_share),
    RunFigure(
        "failed",
        "count",
        "connections that were refused or not made at all",
        lambda crowd: crowd.count(lambda peer: peer.end in _FAILED),
    ),
    RunFigure("failed_share", "share", "those, of all", lambda crowd: crowd.share(lambda peer: peer.end in _FAILED)),
    RunFigure(
        "errors",
        "count",
        "connections on which the server broke the protocol",
        lambda crowd: crowd.count(lambda peer: peer.end is PeerEnd.ERROR),
    ),
    RunFigure("kbit_s", "kbit/s", "received per peer while it was connected, on average", lambda crowd: crowd.kbit_s),
    RunFigure(
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
    RunFigure(
        "cpu_us_per_viewer_s",
        "us",
        "processor time of the server, user and system, per viewer and second",
        of_run=lambda run: run.cpu_us_per_viewer_s,
    ),
    RunFigure(
        "server_cpu_percent",
        "percent",
        "processor time of the server, of one core: largest in a second",
        of_run=lambda run: run.peak("server_cpu_percent"),
    ),
    RunFigure(
        "rss_kb", "kB", "resident memory of the server: peak", of_run=lambda run: run.peak("server_rss_bytes", 1000)
    ),
    RunFigure("rss_growth_kb", "kB", "that, less what it had before the run", of_run=lambda run: run.rss_growth_kb),
    RunFigure(
        "rss_kb_per_viewer",
        "kB",
        "that growth per viewer connected at a time",
        of_run=lambda run: run.rss_kb_per_viewer,
    ),
    RunFigure("fds", "count", "open descriptors of the server: most", of_run=lambda run: run.peak("server_fds")),
    RunFigure(
        "load_cpu_percent",
        "percent",
        "processor time of the load tester, of one core: largest in a second",
        of_run=lambda run: run.peak("load_cpu_percent"),
    ),
    RunFigure(
        "warnings", "count", "doubts of the tester about its figures", of_run=lambda run: len(run.result.warnings)
    ),
    RunFigure("duration_s", "s", "how long the run took", of_run=lambda run: run.result.duration_s),
)
OF_SERVER: Final = frozenset(
    {"cpu_us_per_viewer_s", "server_cpu_percent", "rss_kb", "rss_growth_kb", "rss_kb_per_viewer", "fds"}
)
"""Figures that are measured only where the server's process is watched."""
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
