"""A load run as one HTML page: what failed, the few figures one looks for first, the plots, and who was worst off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flowctl.charts.page import page
from flowctl.core.text.printable import foreign
from flowctl.load.results.failon import ConditionResult
from flowctl.load.results.figures import FIGURES, RunFigures, format_value
from flowctl.load.results.plots import plots_of
from flowctl.load.results.result import PeerEnd, PeerKind, PeerResult, RunResult
from flowctl.load.results.summary import (
    RENDITION_HEADS,
    cell,
    cut_groups,
    end_words,
    hostile_ends,
    hostile_rows,
    reading_notes,
    rendition_rows,
    what_failed,
)
from flowctl.units import format_duration

_WORST_ROWS: Final = 20
"""Rows in the table of the viewers with the most trouble."""
_WORST_HEADS: Final = (
    *("peer", "profile", "address", "missing", "broken", "stalls", "delay p99", "first frame", "there for"),
    *("end", "in words"),
)

_PROFILE_FIGURES: Final = (
    ("peers", "connections"),
    ("failed", "failed"),
    ("cut", "cut"),
    ("pictures", "picture_share"),
    ("of the line", "line_share"),
    ("longest freeze", "longest_freeze_s"),
    ("frames missing", "missing"),
    ("broken restarts", "broken_restarts"),
    ("stalls", "stalls"),
    ("delay p50", "p50_ms"),
    ("delay p95", "p95_ms"),
    ("delay p99", "p99_ms"),
    ("connect p99", "connect_p99_ms"),
    ("handshake p99", "handshake_p99_ms"),
    ("first frame p99", "first_frame_p99_ms"),
    ("rate", "kbit_s"),
)


def render(result: RunResult, verdicts: Sequence[ConditionResult] = ()) -> str:
    figures, problem, troubled = RunFigures(result), what_failed(result), _troubled(result)
    failed = problem is not None or any(verdict.failed for verdict in verdicts)
    return page(
        "load/results/report.html",
        title=f"Load test of {result.url}",
        result=result,
        duration=format_duration(result.duration_s),
        verdict="Interrupted" if result.interrupted else "Failed" if failed else "Passed",
        problem=problem,
        verdicts=verdicts,
        tiles=_tiles(figures),
        plots=plots_of(figures),
        profile_heads=["profile", *(head for head, _ in _PROFILE_FIGURES)],
        profiles=[[name, *(cell(figures, of, name) for _, of in _PROFILE_FIGURES)] for name in figures.kinds],
        notes=reading_notes(figures),
        rendition_heads=RENDITION_HEADS,
        renditions=rendition_rows(figures),
        hostile=[
            row | {"ends": hostile_ends(row), "seen": [line for line in (*row["forms"], row["notes"]) if line]}
            for row in hostile_rows(result)
        ],
        cuts=_cuts(result),
        troubled=len(troubled or ()),
        worst_heads=_WORST_HEADS,
        worst=troubled and _worst(troubled),
    )


def _tiles(figures: RunFigures) -> list[tuple[str, str]]:
    """Return the few figures that one looks for first."""
    scope = "healthy" if any(kind is PeerKind.HEALTHY for kind in figures.kinds.values()) else "viewers"
    viewers = figures.crowd("viewers").peers
    played = sum(peer.first_frame_s is not None for peer in viewers)
    shown = [("connections of viewers that got frames", f"{played:,} of {len(viewers):,}")] if viewers else []
    tiles = [
        (f"delay of {scope} ones, median", "p50_ms", scope),
        (f"delay of {scope} ones, p99", "p99_ms", scope),
        (f"frames {scope} ones miss", "missing", scope),
        ("pictures that slow ones see", "picture_share", "slow"),
        ("viewers cut by the server", "cut", "viewers"),
        ("server processor per viewer and second", "cpu_us_per_viewer_s", None),
        ("server memory per viewer", "rss_kb_per_viewer", None),
    ]
    for label, name, where in tiles:
        value = figures.value(name, where)
        if value is not None:
            shown.append((label, format_value(value, FIGURES[name].unit)))
    hostile = hostile_rows(figures.result)
    if hostile:
        judged = [row for row in hostile if row["failed"] or row["met"]]
        held = sum(not row["failed"] for row in judged)
        withstood = f"{held} of {len(judged)}" if judged else "none judged"
        if judged and len(hostile) > len(judged):
            withstood += f", {len(hostile) - len(judged)} without a verdict"
        shown.append(("hostile profiles withstood", withstood))
    return shown


def _cuts(result: RunResult) -> list[list[str]]:
    return [
        [
            group["profile"],
            f"{group['count']:,}",
            "other ways" if group["end"] is None else end_words(PeerEnd(group["end"])),
            _seconds(group["after_s"]["median"]),
            foreign(group["code"] or "-", 80),
            group["details"] or "-",
        ]
        for group in cut_groups(result.peers)
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_duration(value)


def _trouble(peer: PeerResult) -> tuple[bool, int, int, float]:
    """Return how bad a viewer was off, for comparison: healthy ones first, since nothing bad is meant for them."""
    missing = peer.missing_video + peer.missing_audio
    lost = 10**9 if peer.cut or peer.first_frame_s is None else 0
    return peer.kind is PeerKind.HEALTHY, lost + missing, peer.stalls, peer.delay_p99_ms or 0.0


def _troubled(result: RunResult) -> list[PeerResult] | None:
    """Return the viewers that lost frames, waited or were cut, the worst first; None: there were no viewers."""
    viewers = [peer for peer in result.peers if peer.kind in (PeerKind.HEALTHY, PeerKind.SLOW)]
    troubled = [
        peer
        for peer in viewers
        if peer.cut or peer.first_frame_s is None or peer.missing_video + peer.missing_audio + peer.stalls
    ]
    return sorted(troubled, key=_trouble, reverse=True) if viewers else None


def _worst(troubled: Sequence[PeerResult]) -> list[list[str]]:
    return [
        [
            f"{peer.number}",
            foreign(peer.profile, 40),
            foreign(peer.address or "-", 60),
            f"{peer.missing_video + peer.missing_audio:,}",
            f"{peer.broken_restarts:,}",
            f"{peer.stalls:,}",
            format_value(peer.delay_p99_ms, "ms"),
            _seconds(peer.first_frame_s),
            _seconds(None if peer.ended_s is None else peer.ended_s - peer.started_s),
            end_words(peer.end),
            foreign(peer.end_details or "-", 120),
        ]
        for peer in troubled[:_WORST_ROWS]
    ]
