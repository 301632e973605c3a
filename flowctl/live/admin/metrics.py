"""Metrics for Prometheus, made of the sums that each process tells: a registry of their own, none by connection.

Counters never go down: what a process that has ended had counted stays, and the one in its place is added to it. Text
of peers reaches labels without control characters, and few streams have labels (`flowctl.live.records.meters`).
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeHistogramMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from flowctl.core.text.fieldtypes import Json
from flowctl.live.records.meters import DELAY_BOUNDS_S

Counts: TypeAlias = Counter[tuple[str, tuple[str, ...]]]

COUNTERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "flowctl_sent_bytes": ("Wire bytes that the kernel took.", ("stream", "role")),
    "flowctl_received_bytes": ("Wire bytes that were read.", ("stream", "role")),
    "flowctl_dropped_messages": ("Messages that were not sent to a peer.", ("stream", "role", "reason")),
    "flowctl_closed_connections": ("Connections that have ended.", ("stream", "role", "reason")),
    "flowctl_state_seconds": ("Time that connections spent in a state.", ("stream", "role", "state")),
    "flowctl_rendition_switches": ("Times that viewers went on in another rendition.", ("stream", "way")),
    "flowctl_rendition_failures": ("Switches up that a viewer's line did not carry.", ("stream",)),
    "flowctl_limit_hits": ("Times that somebody went over a limit.", ("limit",)),
    "flowctl_accepted_connections": ("Connections that were accepted.", ()),
    "flowctl_refused_connections": ("Connections that were turned away.", ("limit",)),
    "flowctl_flush_rounds": ("Rounds in which streams were written to their viewers.", ()),
    "flowctl_handler_errors": ("Exceptions of handlers, which were contained.", ()),
    "flowctl_media_written_bytes": ("Bytes of recordings and HLS that were written.", ("kind",)),
    "flowctl_media_files": ("Files of recordings, and segments of HLS, that were finished.", ("kind",)),
    "flowctl_media_lost_messages": ("Messages that are in no file: the disk was full or slow.", ("kind",)),
    "flowctl_media_starts": ("Starts of the process that writes recordings and HLS.", ()),
}
"""Counters: what they count, and their labels; the names of their samples end in ``_total``."""
GAUGES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "flowctl_connections": ("Open connections.", ("stream", "role", "state")),
    "flowctl_rendition_viewers": ("Viewers of sets, by the rendition that they are in.", ("stream", "rendition")),
    "flowctl_streams": ("Streams that are published.", ()),
    "flowctl_node_info": ("1; whether this is an origin, an edge, or neither.", ("kind",)),
    "flowctl_bans": ("Bans in force.", ()),
    "flowctl_draining": ("1 while no new connections are taken.", ()),
    "flowctl_thread_busy_ratio": ("Share of its time that a poll group's handlers ran.", ("worker", "thread")),
    "flowctl_thread_longest_turn_seconds": ("Longest that one handler has kept a poll group.", ("worker", "thread")),
    "flowctl_uptime_seconds": ("Time since a process began to serve.", ("worker",)),
    "flowctl_workers": ("Processes that have answered.", ()),
    "flowctl_media_streams": ("Streams that are written, by what becomes of them.", ("kind", "state")),
}
DELAY: Final = "flowctl_viewer_delay_seconds"
"""Histogram of how far the present viewers are behind, by stream."""


class Metrics(Collector):
    """Text of metrics from what processes tell. One thread at a time."""

    def __init__(self, version: str) -> None:
        self._version: Final = version
        self._registry: Final = CollectorRegistry()
        self._parts: list[Json] = []
        self._media: Json = {}
        self._last: dict[int, tuple[int, Counts]] = {}  # process and its counts, by worker
        self._gone: Final[Counts] = Counter()  # counts of processes that have ended
        self._registry.register(self)

    def text(self, said: Json) -> bytes:
        self._parts, self._media = said["parts"], said.get("media", {})
        for part in self._parts:
            worker, pid = part.get("worker", 0), part["pid"]
            known = self._last.get(worker)
            if known is not None and known[0] != pid:
                self._gone.update(known[1])
            self._last[worker] = pid, _counts_of(part)
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        if not self._parts:
            return
        total: Counts = Counter(self._gone)
        for _, counts in self._last.values():
            total.update(counts)
        total.update(_media_counts(self._media))
        families: dict[str, Metric] = {
            name: CounterMetricFamily(name, what, labels=labels) for name, (what, labels) in COUNTERS.items()
        }
        for (name, labels), value in total.items():
            families[name].add_metric(labels, value)  # type: ignore[attr-defined]  # each family has it
        yield from families.values()
        gauges = {name: GaugeMetricFamily(name, what, labels=labels) for name, (what, labels) in GAUGES.items()}
        for (name, labels), value in (_gauges_of(self._parts) | _media_gauges(self._media)).items():
            gauges[name].add_metric(labels, value)
        yield from gauges.values()
        yield self._delays()
        build = InfoMetricFamily("flowctl_build", "Which flowctl this is.")
        build.add_metric([], {"version": self._version, "python": platform.python_version()})
        yield build

    def _delays(self) -> GaugeHistogramMetricFamily:
        histograms: dict[str, tuple[list[int], float]] = {}
        for row in _rows(self._parts):
            if row["role"] == "viewer":
                counts, sum_s = histograms.get(row["stream"], ([0] * len(row["delays"]), 0.0))
                counts = [known + more for known, more in zip(counts, row["delays"], strict=True)]
                histograms[row["stream"]] = counts, sum_s + row["delay_s"]
        family = GaugeHistogramMetricFamily(DELAY, "How far behind viewers are now.", labels=["stream"])
        for stream, (counts, sum_s) in histograms.items():
            buckets, below = [], 0
            for bound, count in zip((*map(str, DELAY_BOUNDS_S), "+Inf"), counts, strict=True):
                below += count
                buckets.append((bound, float(below)))
            family.add_metric([stream], buckets, sum_s)
        return family


def _rows(parts: Iterable[Json]) -> Iterator[Json]:
    for part in parts:
        yield from part["rows"]


def _counts_of(part: Json) -> Counts:
    counts: Counts = Counter()
    for row in part["rows"]:
        whose = row["stream"], row["role"]
        counts["flowctl_sent_bytes", whose] += row["sent_bytes"]
        counts["flowctl_received_bytes", whose] += row["received_bytes"]
        for name, values in (
            ("flowctl_dropped_messages", row["dropped"]),
            ("flowctl_closed_connections", row["closed"]),
            ("flowctl_state_seconds", row["state_s"]),
        ):
            for word, value in values.items():
                counts[name, (*whose, word)] += value
        for way, value in row["switches"].items():
            name, labels = ("failures", ()) if way == "failed" else ("switches", (way,))
            counts[f"flowctl_rendition_{name}", (row["stream"], *labels)] += value
    counts["flowctl_sent_bytes", ("", "node")] += part["segments_sent_bytes"]
    for name, values in (("flowctl_limit_hits", part["limit_hits"]), ("flowctl_refused_connections", part["refused"])):
        for word, value in values.items():
            counts[name, (word,)] += value
    counts["flowctl_accepted_connections", ()] += part["accepted"]
    counts["flowctl_flush_rounds", ()] += part["flush_rounds"]
    counts["flowctl_handler_errors", ()] += sum(thread["errors"] for thread in part["threads"].values())
    return counts


def _media_counts(media: Json) -> Counts:
    """Return the counts of what is written; they outlive the process that writes."""
    counts: Counts = Counter({("flowctl_media_starts", ()): media.get("starts", 0)})
    for kind, found in media.get("totals", {}).items():
        for name in ("written_bytes", "files", "lost_messages"):
            counts[f"flowctl_media_{name}", (kind,)] = found.get(name, 0)
    return counts


def _media_gauges(media: Json) -> Counts:
    return Counter(("flowctl_media_streams", (row["kind"], row["state"])) for row in media.get("streams", ()))


def _gauges_of(parts: Iterable[Json]) -> Counts:
    """Return the gauges of all processes: what is the same in each is the largest, what is shared out is added."""
    sums: Counts = Counter()
    for part in parts:
        worker = str(part.get("worker", 0))
        for row in part["rows"]:
            for state, count in row["states"].items():
                sums["flowctl_connections", (row["stream"], row["role"], state)] += count
            for name, count in row["renditions"].items():
                sums["flowctl_rendition_viewers", (row["stream"], name)] += count
        for name, thread in part["threads"].items():
            sums["flowctl_thread_busy_ratio", (worker, name)] = thread["busy"]
            sums["flowctl_thread_longest_turn_seconds", (worker, name)] = thread["longest_turn_s"]
        sums["flowctl_uptime_seconds", (worker,)] = part["up_s"]
        sums["flowctl_workers", ()] += 1
        sums["flowctl_node_info", (part["kind"],)] = 1
        sums["flowctl_streams", ()] += part["streams"]
        for name in ("bans", "draining"):
            key = f"flowctl_{name}", ()
            sums[key] = max(sums[key], int(part[name]))
    return sums
