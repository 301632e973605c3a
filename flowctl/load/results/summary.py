"""The summary of a load run: for machines as plain values, for people as lines with tables (pure).

Texts that came from a server pass through `printable`: they may hold anything.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from flowctl.core.text.printable import foreign
from flowctl.load.results.failon import ConditionResult
from flowctl.load.results.figures import FIGURES, RunFigures, format_value, quantile
from flowctl.load.results.result import PeerEnd, PeerKind, PeerResult, RunResult
from flowctl.units import format_duration

_MOST_GROUPS: Final = 50
"""Most ways to be cut that are listed; the others are counted in one line."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_UNIT = re.compile(" (?:ms|kbit/s)")

_COUNTS: Final = (
    ("profile", None),
    ("peers", "connections"),
    ("played", None),
    ("failed", "failed"),
    ("cut", "cut"),
    ("missing", "missing"),
    ("broken", "broken_restarts"),
    ("stalls", "stalls"),
    ("kbit/s", "kbit_s"),
)
_SEEN: Final = (
    ("profile", None),
    ("pictures", "picture_share"),
    ("of line", "line_share"),
    ("longest freeze", "longest_freeze_s"),
    ("delay p50", "p50_ms"),
    ("p95", "p95_ms"),
    ("p99", "p99_ms"),
)
_TIMES: Final = (
    ("profile", None),
    ("connect p99", "connect_p99_ms"),
    ("first frame p50", "first_frame_p50_ms"),
    ("p99", "first_frame_p99_ms"),
)
RENDITION_HEADS: Final = ("profile", "switches", "in which rendition")
_WIDTH: Final = 80
"""Columns of a terminal of usual size: two tables fit there, one of all figures is twice as wide."""

_ENDS: Final = {
    PeerEnd.RUN_ENDED: "stayed to the end",
    PeerEnd.LEFT: "left by itself",
    PeerEnd.SERVER_CLOSED: "closed",
    PeerEnd.SERVER_RESET: "reset",
    PeerEnd.REFUSED: "refused",
    PeerEnd.NOT_CONNECTED: "not connected",
    PeerEnd.ERROR: "broke the protocol",
    PeerEnd.TESTER_FAILED: "lost by the load tester",
}
"""How a peer ended, in words; the middle four are said of the server."""


def end_words(end: PeerEnd) -> str:
    return _ENDS[end]


def cut_groups(peers: Iterable[PeerResult]) -> list[dict[str, Any]]:
    """Return how and when the server ended connections: one entry per profile, way, code and wording; most first.

    Wordings that differ only in their numbers are one; the first of them is shown.
    """
    groups: dict[tuple[Any, ...], list[PeerResult]] = {}
    for peer in peers:
        if peer.cut or peer.end in (PeerEnd.REFUSED, PeerEnd.NOT_CONNECTED, PeerEnd.ERROR):
            words = _NUMBER.sub("#", foreign(peer.end_details))
            groups.setdefault((peer.profile, peer.end, peer.end_code, words), []).append(peer)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    shown = [_group(key, members) for key, members in ordered[:_MOST_GROUPS]]
    rest = [members for _, members in ordered[_MOST_GROUPS:]]
    if rest:
        shown.append(_group(("others", None, None, ""), [peer for members in rest for peer in members]))
    return shown


def _group(key: tuple[Any, ...], members: Sequence[PeerResult]) -> dict[str, Any]:
    profile, end, code, _ = key
    # A server that gives a code says it in its words as well, more often than not.
    words = members[0].end_details.replace(f"{code}: ", "") if code else members[0].end_details
    lives = sorted(peer.ended_s - peer.started_s for peer in members if peer.ended_s is not None)
    middle = quantile(lives, 0.5)
    return {
        "profile": profile,
        "end": None if end is None else end.value,
        "code": None if code is None else foreign(code, 80),
        "details": foreign(words) if end is not None else "",
        "count": len(members),
        "after_s": {
            "first": round(lives[0], 2) if lives else None,
            "median": None if middle is None else round(middle, 2),
            "last": round(lives[-1], 2) if lives else None,
        },
    }


def hostile_rows(result: RunResult) -> list[dict[str, Any]]:
    """Return one entry per hostile profile: how many peers, how they ended, and whether that was as it should be."""
    by_profile: dict[str, list[PeerResult]] = {}
    for peer in result.peers:
        if peer.kind is PeerKind.HOSTILE:
            by_profile.setdefault(peer.profile, []).append(peer)
    return [
        {
            "profile": name,
            "peers": len(peers),
            "met": sum(peer.expectation_met is True for peer in peers),
            "failed": sum(peer.expectation_met is False for peer in peers),
            "undecided": sum(peer.expectation_met is None for peer in peers),
            "ends": dict(Counter(peer.end.value for peer in peers).most_common()),
            # Of a peer that was not treated as it should be, if there is one: that is what one wants to read.
            "forms": [
                foreign(line, 300)
                for line in next((peer.forms for peer in sorted(peers, key=_by_verdict) if peer.forms), "").splitlines()
            ],
            "notes": next(
                (foreign(peer.notes, 300) for peer in sorted(peers, key=_by_verdict) if peer.notes.strip()), ""
            ),
        }
        for name, peers in sorted(by_profile.items())
    ]


def hostile_ends(row: dict[str, Any]) -> str:
    """Return how the peers of an entry of `hostile_rows` ended, in words.

    Where there are several forms each of them tells its own end; the one of the peer is that of its worst form only.
    """
    if row["forms"]:
        return f"{row['peers']} in several forms"
    return ", ".join(f"{count} {end_words(PeerEnd(end))}" for end, count in row["ends"].items())


def _by_verdict(peer: PeerResult) -> int:
    return {False: 0, None: 1, True: 2}[peer.expectation_met]


def what_failed(result: RunResult) -> str | None:
    """Return why a run has failed as such, whatever its conditions say; None: it has not."""
    # Slow ones may have been told to read nothing at all.
    healthy = [peer for peer in result.peers if peer.kind is PeerKind.HEALTHY]
    if result.interrupted and not any(peer.kind is not PeerKind.PUBLISHER for peer in result.peers):
        return None  # it was over before anybody came
    if not result.peers:
        return "no peer was started"
    lost = [peer for peer in result.peers if peer.end is PeerEnd.TESTER_FAILED]
    if lost:
        return f"the load tester failed for {len(lost)} of its peers: {foreign(lost[0].end_details)}"
    if result.failure:
        return foreign(result.failure, 300)
    if all(peer.connect_s is None for peer in result.peers):
        details = next((foreign(peer.end_details) for peer in result.peers if peer.end_details), "nobody answers")
        return f"nobody could connect: {details}"
    if healthy and not result.interrupted and all(peer.first_frame_s is None for peer in healthy):
        return "no healthy viewer got a frame: is there a publisher on that stream?"
    return None


def summarize(result: RunResult, verdicts: Sequence[ConditionResult] = ()) -> dict[str, Any]:
    """Return the run as plain values: figures by profile, ends, server, verdicts; without the single peers."""
    figures = RunFigures(result)
    problem = what_failed(result)
    return {
        "url": result.url,
        "command": result.command,
        "began_at": result.began_at,
        "duration_s": round(result.duration_s, 3),
        "interrupted": result.interrupted,
        # Of a run that was interrupted nobody knows.
        "passed": None if result.interrupted else problem is None and not any(item.failed for item in verdicts),
        "problem": problem,
        "conditions": [verdict.as_dict() for verdict in verdicts],
        "warnings": list(result.warnings),
        "delay_source": result.delay_source,
        "asked_for": dict(result.profiles),
        "profiles": {
            name: {
                "kind": kind.value,
                **figures.as_dict(name),
                "renditions": figures.crowd(name).renditions,
                "ends": _ends(figures.crowd(name).peers),
            }
            for name, kind in figures.kinds.items()
        },
        "kinds": {kind.value: figures.as_dict(kind.value) for kind in (PeerKind.HEALTHY, PeerKind.SLOW)},
        "viewers": figures.as_dict("viewers"),
        "run": figures.as_dict(None),
        "cuts": cut_groups(result.peers),
        "hostile": hostile_rows(result),
    }


def rendition_rows(figures: RunFigures) -> list[list[str]]:
    """Return which renditions the peers of each profile were in, in words; nothing where there was one of them only."""
    shares = {name: figures.crowd(name).renditions for name in figures.kinds}
    if len({rendition for found in shares.values() for rendition in found}) < 2:
        return []
    return [
        [
            foreign(name, 40),
            format_value(figures.value("switches", name), "count"),
            ", ".join(f"{rendition} {share:.0%}" for rendition, share in found.items()),
        ]
        for name, found in shares.items()
        if found
    ]


def whole(result: RunResult, verdicts: Sequence[ConditionResult] = ()) -> dict[str, Any]:
    return {
        **summarize(result, verdicts),
        "samples": [sample.as_dict() for sample in result.samples],
        "peers": [peer.as_dict() for peer in result.peers],
    }


def _ends(peers: Iterable[PeerResult]) -> dict[str, int]:
    return dict(Counter(peer.end.value for peer in peers).most_common())


# ------------------------------------------------------------------------------------------------ for people


def align(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines: the first column to the left, the others to the right."""
    widths = [max(len(line[place]) for line in (heads, *rows)) for place in range(len(heads))]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (heads, *rows)
    ]


def lines(result: RunResult, verdicts: Sequence[ConditionResult] = ()) -> list[str]:
    """Return the summary for people: doubts, what the profiles got, cuts, the server, the verdicts."""
    figures = RunFigures(result)
    shown = [part for text in result.warnings for part in fold(f"warning: {foreign(text, 400)}")]
    if shown:
        shown.append("")
    interrupted = ", interrupted" if result.interrupted else ", gone wrong" if result.failure else ""
    shown += [f"{result.url}: {format_duration(result.duration_s)}{interrupted}", ""]
    shown += _table(figures, _COUNTS)
    seen = _table(figures, _SEEN, [name for name in figures.kinds if figures.crowd(name).receivers])
    shown += ["", "what came: pictures, share of the line in use, freezes; delays in ms", *seen]
    if renditions := rendition_rows(figures):
        shown += ["", "share of the time in each rendition", *align(RENDITION_HEADS, renditions)]
    shown += ["", "milliseconds to connect and to get the first frame, as peers measured", *_table(figures, _TIMES)]
    notes = [*reading_notes(figures), *_cut_lines(cut_groups(result.peers)), *_hostile_lines(hostile_rows(result))]
    shown += [part for line in (*notes, *_server_lines(figures)) for part in fold(line)]
    problem = what_failed(result)
    if verdicts or problem is not None:
        shown.append("")
    shown += [part for verdict in verdicts for part in fold(str(verdict))]
    if problem is not None:
        shown += fold(f"FAIL  {problem}")
    return shown


def fold(line: str) -> list[str]:
    """Return a line in the width of a terminal; what goes on is indented further than its beginning."""
    if len(line) <= _WIDTH:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _table(
    figures: RunFigures, columns: Sequence[tuple[str, str | None]], names: Iterable[str] | None = None
) -> list[str]:
    rows = [_row(figures, columns, name) for name in (figures.kinds if names is None else names)]
    return align([head for head, _ in columns], rows)


def _row(figures: RunFigures, columns: Sequence[tuple[str, str | None]], profile: str) -> list[str]:
    crowd = figures.crowd(profile)
    played = sum(peer.first_frame_s is not None for peer in crowd.peers)
    cells = {"profile": foreign(profile, 40), "played": str(played)}
    # Units are in the heads.
    return [cells[head] if name is None else _UNIT.sub("", cell(figures, name, profile)) for head, name in columns]


_READ_ONLY: Final = frozenset({"stalls", "picture_share", "freezes", "longest_freeze_s", "p50_ms", "p95_ms", "p99_ms"})
"""Figures that a peer measures only while it reads."""


def cell(figures: RunFigures, name: str, profile: str) -> str:
    """Return a figure of a profile for people; with a star where its peers measured it only while they still read."""
    shown = format_value(figures.value(name, profile), FIGURES[name].unit)
    starred = name in _READ_ONLY and any(peer.stopped_reading_s is not None for peer in figures.crowd(profile).peers)
    return f"{shown}*" if starred and shown != "-" else shown


def reading_notes(figures: RunFigures) -> list[str]:
    """Return what the table cannot say: which peers stopped reading, and which cannot see whether they were cut."""
    notes = []
    for name in figures.kinds:
        peers = figures.crowd(name).peers
        shown = foreign(name, 40)
        deaf = [peer for peer in peers if peer.stopped_reading_s is not None]
        if deaf:
            times = [(peer.stopped_reading_s or 0.0, peer.ended_s or 0.0) for peer in deaf]
            since = quantile(sorted(stopped for stopped, _ in times), 0.5) or 0.0
            lasted = quantile(sorted(max(ended - stopped, 0.0) for stopped, ended in times), 0.5) or 0.0
            notes.append(
                f"* {shown}: {len(deaf)} of {len(peers)} not reading since {format_duration(round(since, 1))}, for "
                f"{format_duration(round(lasted, 1))} (medians); figures with a star are of the time before"
            )
        blind = sum(peer.cut is None for peer in peers)
        if blind:
            notes.append(f"{shown}: {blind} of {len(peers)} cannot see whether they were cut; only the server can tell")
    return notes


def _cut_lines(groups: Sequence[dict[str, Any]]) -> list[str]:
    if not groups:
        return []
    shown = ["", "ended by the server, or not begun:"]
    for group in groups:
        times = group["after_s"]
        when = "" if times["median"] is None else f" after {format_duration(times['median'])}"
        if times["first"] is not None and times["last"] - times["first"] > 0.05:
            when += f" ({format_duration(times['first'])} to {format_duration(times['last'])})"
        how = "in other ways" if group["end"] is None else end_words(PeerEnd(group["end"]))
        why = ", ".join(str(part) for part in (group["code"], group["details"]) if part)
        shown.append(f"  {group['count']:>6} {foreign(group['profile'], 40)}: {how}{when}{f': {why}' if why else ''}")
    return shown


def _hostile_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    shown = ["", "hostile peers, and whether the server did what a sound one may do:"]
    for row in rows:
        verdict = "FAIL" if row["failed"] else "ok" if row["met"] else "no verdict"
        notes = f": {row['notes']}" if row["notes"] else ""
        shown.append(f"  {foreign(row['profile'], 40):<24} {verdict:<10} {hostile_ends(row)}{notes}")
        shown += [f"      {line}" for line in row["forms"]]
    return shown


def _server_lines(figures: RunFigures) -> list[str]:
    """Return what the server and the load tester used, if that was measured."""
    parts = [
        ("server", ("cpu_us_per_viewer_s", "server_cpu_percent", "rss_kb", "rss_kb_per_viewer", "fds")),
        ("load tester", ("load_cpu_percent",)),
    ]
    shown = []
    for who, names in parts:
        figures_shown = [
            f"{_SHORT[name]} {format_value(value, FIGURES[name].unit)}"
            for name in names
            if (value := figures.value(name)) is not None
        ]
        if figures_shown:
            shown.append(f"{who}: {', '.join(figures_shown)}")
    return ["", *shown] if shown else []


_SHORT: Final = {
    "cpu_us_per_viewer_s": "processor time per viewer and second",
    "server_cpu_percent": "at most per second",
    "rss_kb": "memory",
    "rss_kb_per_viewer": "grown per viewer by",
    "fds": "descriptors",
    "load_cpu_percent": "processor at most",
}
