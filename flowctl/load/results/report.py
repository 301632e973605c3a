"""A load run as one HTML page: what failed, the few figures one looks for first, the plots, and who was worst off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flowctl.charts.page import Html, page, table, text, tiles
from flowctl.charts.page import figures as figure_boxes
from flowctl.load.results.failon import ConditionResult
from flowctl.load.results.figures import FIGURES, RunFigures, format_value
from flowctl.load.results.plots import plots_of
from flowctl.load.results.result import PeerEnd, PeerKind, PeerResult, RunResult
from flowctl.load.results.summary import (
    cell,
    cut_groups,
    end_words,
    hostile_ends,
    hostile_rows,
    reading_notes,
    what_failed,
)
from flowctl.units import format_duration

_WORST: Final = 20
"""Peers in the table of the worst."""

_FOOTER: Final = (
    "Delays, losses and stalls are what the peers measured; processor time and memory are what the operating system "
    "counted. Made by <code>flowctl load</code>."
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
    figures = RunFigures(result)
    body = [
        _header(result),
        _verdicts(result, verdicts),
        _tiles(figures),
        figure_boxes(plots_of(figures)),
        _profiles(figures),
        _hostile(result),
        _cuts(result),
        _worst(result),
        f"<footer><p>{_FOOTER}{_clock(result)}</p></footer>",
    ]
    return page(f"Load test of {result.url}", body)


def _section(title: str, *parts: str, kind: str = "") -> str:
    """Return parts in a box under a heading; "" if there are none. Parts are HTML already."""
    inner = "".join(parts)
    return f'<section class="{kind}"><h2>{text(title)}</h2>{inner}</section>' if inner else ""


def _clock(result: RunResult) -> str:
    return f" Delays are against: {text(result.delay_source)}." if result.delay_source else ""


def _header(result: RunResult) -> str:
    crowd = ", ".join(f"{count:,} {text(name, 40)}" for name, count in result.profiles.items()) or "nobody"
    began = f", begun at {text(result.began_at)[:19].replace('T', ' ')} UTC" if result.began_at else ""
    interrupted = ", <strong>interrupted</strong>" if result.interrupted else ""
    command = f'<p class="command"><code>{text(result.command, 2000)}</code></p>' if result.command else ""
    title = f"<h1>Load test of {text(result.url)}</h1>"
    return f"<header>{title}<p>{crowd}; {format_duration(result.duration_s)}{began}{interrupted}</p>{command}</header>"


def _verdicts(result: RunResult, verdicts: Sequence[ConditionResult]) -> str:
    """Return what failed and what held, and the tester's own doubts, before any figure."""
    problem = what_failed(result)
    items = [f"<li>{_FAILS} {text(f'The run failed: {problem}')}</li>"] if problem else []
    for verdict in verdicts:
        sign = _FAILS if verdict.failed else _PASSES
        if verdict.not_judged:
            sign = f"<b>not judged: {text(verdict.not_judged)}</b>"
        said = f" <span>{text(verdict.measured)}</span>" if verdict.measured else ""
        items.append(f"<li>{sign} <code>{text(verdict.condition.wanted)}</code>{said}</li>")
    failed = problem is not None or any(verdict.failed for verdict in verdicts)
    title = "Interrupted" if result.interrupted else "Failed" if failed else "Passed"
    shown = f'<ul class="verdicts">{"".join(items)}</ul>' if items else ""
    doubts = "".join(f"<li>{text(warning, 600)}</li>" for warning in result.warnings)
    return _section(title, shown, kind="bad" if failed or result.interrupted else "good") + _section(
        "Read the figures with care", f"<ul>{doubts}</ul>" if doubts else "", kind="doubt"
    )


# A word beside the sign: neither the colour nor the shape carries it alone.
_FAILS: Final = '<b class="no">✕ fails</b>'
_PASSES: Final = '<b class="yes">✓ passes</b>'


def _tiles(figures: RunFigures) -> str:
    """Return the few figures that one looks for first."""
    scope = "healthy" if any(kind is PeerKind.HEALTHY for kind in figures.kinds.values()) else "viewers"
    viewers = figures.crowd("viewers").peers
    played = sum(peer.first_frame_s is not None for peer in viewers)
    shown = [("connections of viewers that got frames", f"{played:,} of {len(viewers):,}")] if viewers else []
    wanted = [
        (f"delay of {scope} ones, median", "p50_ms", scope),
        (f"delay of {scope} ones, p99", "p99_ms", scope),
        (f"frames {scope} ones miss", "missing", scope),
        ("pictures that slow ones see", "picture_share", "slow"),
        ("viewers cut by the server", "cut", "viewers"),
        ("server processor per viewer and second", "cpu_us_per_viewer_s", None),
        ("server memory per viewer", "rss_kb_per_viewer", None),
    ]
    for label, name, where in wanted:
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
    return tiles(shown)


def _profiles(figures: RunFigures) -> str:
    rows = [[profile, *(cell(figures, name, profile) for _, name in _PROFILE_FIGURES)] for profile in figures.kinds]
    if not rows:
        return ""
    notes = "".join(f"<p>{text(note)}</p>" for note in reading_notes(figures))
    return _section("What each profile saw", table(["profile", *(head for head, _ in _PROFILE_FIGURES)], rows), notes)


def _hostile(result: RunResult) -> str:
    rows = []
    for row in hostile_rows(result):
        verdict = Html('<b class="yes">✓ withstood</b>') if row["met"] else text("no verdict")
        if row["failed"]:
            verdict = Html(f'<b class="no">✕ {row["failed"]} of {row["peers"]} not</b>')
        seen = Html("<br>".join(text(line, 300) for line in (*row["forms"], row["notes"]) if line))
        rows.append([row["profile"], verdict, hostile_ends(row), seen])
    heads = ["profile", "the server", "how they ended", "what was seen"]
    return _section("Did the server withstand hostile peers?", table(heads, rows, kind="words") if rows else "")


def _cuts(result: RunResult) -> str:
    rows = [
        [
            group["profile"],
            f"{group['count']:,}",
            "other ways" if group["end"] is None else end_words(PeerEnd(group["end"])),
            _seconds(group["after_s"]["median"]),
            text(group["code"] or "-", 80),
            group["details"] or "-",
        ]
        for group in cut_groups(result.peers)
    ]
    heads = ("profile", "peers", "how", "after (median)", "code", "in words")
    return _section("How did the server end connections?", table(heads, rows, kind="words") if rows else "")


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_duration(value)


def _trouble(peer: PeerResult) -> tuple[bool, int, int, float]:
    """Return how bad a viewer was off, for comparison: healthy ones first, since nothing bad is meant for them."""
    missing = peer.missing_video + peer.missing_audio
    lost = 10**9 if peer.cut or peer.first_frame_s is None else 0
    return peer.kind is PeerKind.HEALTHY, lost + missing, peer.stalls, peer.delay_p99_ms or 0.0


def _worst(result: RunResult) -> str:
    viewers = [peer for peer in result.peers if peer.kind in (PeerKind.HEALTHY, PeerKind.SLOW)]
    troubled = [
        peer
        for peer in viewers
        if peer.cut or peer.first_frame_s is None or peer.missing_video + peer.missing_audio + peer.stalls
    ]
    if not viewers:
        return ""
    title = "Who was worst off?"
    if not troubled:
        return _section(title, "<p>Nobody: no viewer missed a frame, waited for a second, or was cut.</p>")
    rows = [
        [
            f"{peer.number}",
            text(peer.profile, 40),
            text(peer.address or "-", 60),
            f"{peer.missing_video + peer.missing_audio:,}",
            f"{peer.broken_restarts:,}",
            f"{peer.stalls:,}",
            format_value(peer.delay_p99_ms, "ms"),
            _seconds(peer.first_frame_s),
            _seconds(None if peer.ended_s is None else peer.ended_s - peer.started_s),
            end_words(peer.end),
            text(peer.end_details or "-", 120),
        ]
        for peer in sorted(troubled, key=_trouble, reverse=True)[:_WORST]
    ]
    heads = ("peer", "profile", "address", "missing", "broken", "stalls", "delay p99", "first frame", "there for")
    note = f"<p>The {len(rows)} worst of {len(troubled):,} viewers that lost frames, waited, or were cut.</p>"
    return _section(title, note, table([*heads, "end", "in words"], rows, kind="words"))
