"""The demonstration of a cluster: what it consists of, its report, and the verdict (pure).

As it should be: every viewer has every frame once, in order and as it was published, although an origin was killed; the
origin that lies was disconnected by both edges, and nothing of it reached a viewer; the slow one was asked for less
than the others; and no edge fetched a segment much more often than it needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from flowctl.demo.cluster.frames import ViewerVerdict
from flowctl.demo.runner import DemoReport, check_bounds
from flowctl.load.results.summary import align
from flowctl.units import format_size

BIT_RATE: Final = 1_600_000
STREAM: Final = "demo/cluster"
KEY_INTERVAL_S: Final = 1.0
"""Time between key frames, and so the length of a segment and the least delay of an edge by segments."""
SLOW_RATE: Final = 100_000.0
"""Bytes per second on the line to the slow origin: half of the stream."""
ORIGIN_A: Final = "origin A"
ORIGIN_B: Final = "origin B"
SLOW: Final = "origin C (slow)"
LIAR: Final = "origin D (lies)"
FOLLOWING: Final = "edge 1 (follows)"
BY_SEGMENTS: Final = "edge 2 (segments)"
DIRECT: Final = "an origin, directly"
"""Place of the viewer that the others are compared with."""
ORIGINS: Final = (ORIGIN_A, ORIGIN_B, SLOW, LIAR)
EDGES: Final = (FOLLOWING, BY_SEGMENTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPlan:
    """Settings of the demonstration."""

    duration_s: float = 24.0
    viewers: int = 4
    kill_share: float = 0.5  # share of the stream after which the origin is killed that the first edge follows

    def __post_init__(self) -> None:
        check_bounds(self, duration_s=(12, 300), viewers=(1, 100), kill_share=(0.2, 0.8))

    @property
    def kill_s(self) -> float:
        """When the origin is killed, from the first frame on."""
        return self.duration_s * self.kill_share


MOST_RECOVERY_S: Final = 10.0
"""Longest time until an edge that has lost one of its origins is as before."""
MOST_PER_SEGMENT: Final = 1.5
"""Most octets fetched per octet of a segment, with redundancy 1: an origin given up half-way leaves some twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Figures of what an edge has fetched from an origin up to a moment."""

    at_s: float
    edge: str
    origin: str
    requests: int
    size_bytes: int
    faults: int = 0  # times that it sent what is no segment, or another one than it named
    connected: bool = True
    followed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport(DemoReport):
    """Results of the demonstration."""

    watched: Sequence[ViewerVerdict]
    fetched: Sequence[Fetched]  # figures of each edge and origin, in the order of time
    per_segment: dict[str, float | None]
    killed: str
    killed_s: float
    duration_s: float
    lies_told: int  # pieces that the line to the liar changed
    sent_all: int

    @property
    def nodes(self) -> list[str]:
        return list(dict.fromkeys(item.node for item in self.watched))

    def of(self, node: str) -> list[ViewerVerdict]:
        return [one for one in self.watched if one.node == node]

    def last(self, edge: str, origin: str) -> Fetched | None:
        """Return what an edge had from an origin at last. None: it was never a source."""
        fetched = [item for item in self.fetched if (item.edge, item.origin) == (edge, origin)]
        return fetched[-1] if fetched else None

    @property
    def faults(self) -> list[str]:
        return [*self._viewer_faults(), *self._origin_faults()]

    def _viewer_faults(self) -> list[str]:
        faults = []
        for one in self.watched:
            wrong = {name: getattr(one, name) for name in ("lost", "doubled", "disordered", "changed")}
            losses = ", ".join(f"{count} {name}" for name, count in wrong.items() if count)
            if not one.frames:
                losses = "nothing came"
            if losses:
                faults.append(f"{one.label} at {one.node}: {losses}")
            elif one.recovered_s is not None and one.recovered_s > MOST_RECOVERY_S:
                faults.append(f"{one.label} at {one.node}: not as before {one.recovered_s:g} s after the kill")
        return faults

    def _origin_faults(self) -> list[str]:
        faults = []
        if not self.sent_all:
            faults.append("the encoder has sent all to no origin")
        if not self.lies_told:
            faults.append(f"{LIAR}: it was asked for nothing, so it has not lied")
        for edge in dict.fromkeys(item.edge for item in self.fetched):
            liar, slow = self.last(edge, LIAR), self.last(edge, SLOW)
            if liar is not None and liar.requests and liar.connected:
                faults.append(f"{edge}: {LIAR} is still connected")
            others = [item.size_bytes for name in (ORIGIN_A, ORIGIN_B) if (item := self.last(edge, name))]
            if slow is not None and others and slow.size_bytes >= max(others) > 0:
                faults.append(f"{edge}: {SLOW} was asked for as much as the others")
            ratio = self.per_segment.get(edge)
            if ratio is not None and ratio > MOST_PER_SEGMENT:
                faults.append(f"{edge}: {ratio:.2f} times the bytes of its segments were fetched")
        return faults

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.verdict(),
            "killed": self.killed,
            "killed_s": round(self.killed_s, 2),
            "frames_lost": sum(one.lost for one in self.watched),
            "recovered_s": {node: max(one.recovered_s or 0.0 for one in self.of(node)) for node in self.nodes},
            "fetched_per_segment": self.per_segment,
            "viewers": [asdict(one) for one in self.watched],
            "fetched": {
                f"{item.edge} from {item.origin}": {
                    "requests": item.requests, "bytes": item.size_bytes, "faults": item.faults,
                    "connected": item.connected,
                }
                for item in {(item.edge, item.origin): item for item in self.fetched}.values()
            },
        }  # fmt: skip

    def lines(self) -> list[str]:
        return [
            "",
            f"{self.killed} was killed {self.killed_s:.1f} s after the first frame of {self.duration_s:.0f} s.",
            "",
            *align(["viewers at", "viewers", "frames", "lost", "doubled", "delay p50", "pause", "recovered"],
                   [self._viewer_row(node) for node in self.nodes]),
            "",
            *align(["asked by", "of", "requests", "bytes", "lies", "at the end"], self._fetch_rows()),
            *(f"{edge} fetched for each byte of a segment: {ratio:.2f}"
              for edge, ratio in self.per_segment.items() if ratio is not None),
            "",
            *([f"WRONG: {fault}" for fault in self.faults] or ["all as it should be"]),
        ]  # fmt: skip

    def _viewer_row(self, node: str) -> list[str]:
        viewers = self.of(node)
        counts = (len(viewers), *(sum(getattr(one, name) for one in viewers) for name in ("frames", "lost", "doubled")))
        delays = sorted(one.delay_p50_ms for one in viewers if one.delay_p50_ms is not None)
        delay = f"{delays[len(delays) // 2]:.0f} ms" if delays else "-"
        pause, recovered = max(one.longest_pause_s for one in viewers), max(one.recovered_s or 0.0 for one in viewers)
        return [node, *map(str, counts), delay, f"{pause:.2f} s", f"{recovered:.2f} s"]

    def _fetch_rows(self) -> list[list[str]]:
        edges = dict.fromkeys(item.edge for item in self.fetched)
        fetched = [self.last(edge, origin) for edge in edges for origin in ORIGINS]
        return [
            [item.edge, item.origin, f"{item.requests}", format_size(item.size_bytes), f"{item.faults}",
             "connected" if item.connected else "disconnected"]
            for item in fetched if item is not None
        ]  # fmt: skip
