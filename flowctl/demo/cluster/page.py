"""The page of the demonstration of a cluster: who fetched from whom, and when; how late viewers were (pure)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

from flowctl.charts.network import Arrow, Box, Network, Span, Spans
from flowctl.charts.page import Figure, page
from flowctl.charts.pictures import Lines, Series
from flowctl.demo.cluster.report import BIT_RATE, EDGES, LIAR, ORIGIN_A, ORIGIN_B, ORIGINS, SLOW, ClusterReport, Fetched
from flowctl.units import format_size

_PAINTS: Final = {ORIGIN_A: "var(--s6)", ORIGIN_B: "var(--s1)", SLOW: "var(--s4)", LIAR: "var(--s8)"}


def render(report: ClusterReport, delays: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    network = Figure(_network(report), note="What was asked for over each link, which is also the width of its arrow.")
    return page(
        "demo/cluster/page.html",
        title="A cluster that lost an origin",
        report=report,
        tiles=_tiles(report),
        figures=[network, Figure(_timeline(report)), _delays(report, delays)],
        heads=_HEADS,
        viewers=_viewers(report),
    )


def _tiles(report: ClusterReport) -> list[tuple[str, str]]:
    figures = report.as_dict()
    ratios = [ratio for ratio in report.per_segment.values() if ratio is not None]
    return [
        ("frames lost by viewers", str(figures["frames_lost"])),
        ("after the kill, until viewers were as before", f"{max(figures['recovered_s'].values(), default=0.0):.2f} s"),
        ("fetched for each byte of a segment", f"{max(ratios):.2f}" if ratios else "-"),
        ("viewers", str(len(report.watched))),
    ]


def _gone(report: ClusterReport, origin: str) -> str:
    if origin == report.killed:
        return f"killed at {report.killed_s:.1f} s"
    ends = [item for edge in EDGES if (item := report.last(edge, origin)) is not None]
    return "disconnected" if ends and not any(item.connected for item in ends) else ""


def _network(report: ClusterReport) -> Network:
    boxes = [Box("encoder", 0)]
    arrows = []
    for origin in ORIGINS:
        gone = _gone(report, origin)
        boxes.append(Box(origin, 1, gone, _PAINTS[origin], bool(gone)))
        arrows.append(Arrow("encoder", origin, 1.0, paint="var(--quiet)", dashed=origin == report.killed))
    for edge in EDGES:
        boxes.append(Box(edge, 2))
        for origin in ORIGINS:
            item = report.last(edge, origin)
            if item is None:
                continue
            history = [fetched for fetched in report.fetched if (fetched.edge, fetched.origin) == (edge, origin)]
            followed = sum(fetched.followed for fetched in history) / len(history)
            label = format_size(item.size_bytes) if item.size_bytes else "followed" if followed else ""
            label = "lied" if item.faults else label
            # What is followed goes over the link as a whole, for as long as it is.
            weight = item.size_bytes + followed * report.duration_s * BIT_RATE / 8
            arrows.append(Arrow(origin, edge, weight, label, _PAINTS[origin], dashed=not item.connected))
        viewers = f"{edge[:6]}: {len(report.of(edge))} viewers"  # fits into a box
        boxes.append(Box(viewers, 3, f"{sum(one.lost for one in report.of(edge))} lost", "var(--s3)"))
        arrows.append(Arrow(edge, viewers, 1.0, paint="var(--s3)"))
    return Network(
        name="network",
        title="Who fetched from whom?",
        description=". ".join(f"{arrow.source} to {arrow.target}: {arrow.text}" for arrow in arrows if arrow.text),
        boxes=boxes,
        arrows=arrows,
    )


def _timeline(report: ClusterReport) -> Spans:
    rows: list[str] = [report.killed]
    spans = [Span(0, 0.0, report.killed_s, f"{report.killed} alive", "var(--s3)")]
    moments = [(report.killed_s, f"{report.killed} killed")]
    end_s = max([report.duration_s, *(item.at_s for item in report.fetched)])
    for edge in EDGES:
        for origin in ORIGINS:
            history = [item for item in report.fetched if (item.edge, item.origin) == (edge, origin)]
            if not history:
                continue
            rows.append(f"{edge[:6]} from {origin.removeprefix('origin ')}")
            spans += _fetches(len(rows) - 1, history, _PAINTS[origin])
            lied = next((item for item in history if item.faults), None)
            if lied is not None:
                spans.append(Span(len(rows) - 1, lied.at_s, lied.at_s + 0.1, "wrong hash", "var(--bad)"))
    return Spans(
        name="timeline",
        title="Who did what when?",
        description=f"{report.killed} was killed at {report.killed_s:.1f} s; bars are times of requests.",
        rows=rows,
        spans=spans,
        x_end=end_s,
        x_label="seconds since the first frame",
        moments=moments,
    )


def _fetches(row: int, history: Sequence[Fetched], paint: str) -> list[Span]:
    """Return a bar for each stretch in which segments were asked for, or a stream was followed."""
    spans = []
    for before, after in itertools.pairwise(history):
        count = after.requests - before.requests
        if count > 0:
            label = f"{count} requests, {format_size(after.size_bytes - before.size_bytes)}"
            spans.append(Span(row, before.at_s, after.at_s, label, paint))
        elif before.followed and after.followed:
            spans.append(Span(row, before.at_s, after.at_s, "followed frame by frame", paint))
    return spans


def _delays(report: ClusterReport, delays: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    series = [Series(node, points, place + 1) for place, (node, points) in enumerate(delays.items())]
    top = max((y for item in series for _, y in item.points), default=1.0)
    series.append(Series(f"{report.killed} killed", [(report.killed_s, 0.0), (report.killed_s, top)], 8))
    chart = Lines(
        name="delays",
        title="How late were viewers?",
        description=". ".join(
            f"{item.label}: {max((y for _, y in item.points), default=0):.0f} ms at most" for item in series[:-1]
        ),
        series=series,
        x_label="seconds since the first frame",
        y_label="from when a frame was due to when it came, ms; the latest of each fifth of a second",
    )
    note = (
        "An edge by segments is behind by the length of a segment: it fetches what is complete. It asks the slow origin"
        " now and then, which may have become quick; if not, another one is asked too, soon, and viewers wait so long."
    )
    return Figure(chart, note=note)


_HEADS: Final = (
    *("viewer", "at", "frames", "lost", "doubled", "out of order", "changed"),
    *("delay p50", "p99", "pause", "recovered"),
)


def _viewers(report: ClusterReport) -> list[list[str]]:
    return [
        [
            one.label,
            one.node,
            *(str(value) for value in (one.frames, one.lost, one.doubled, one.disordered, one.changed)),
            "-" if one.delay_p50_ms is None else f"{one.delay_p50_ms:.0f} ms",
            "-" if one.delay_p99_ms is None else f"{one.delay_p99_ms:.0f} ms",
            f"{one.longest_pause_s:.2f} s",
            "-" if one.recovered_s is None else f"{one.recovered_s:.2f} s",
        ]
        for one in report.watched
    ]
