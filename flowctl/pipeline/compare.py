"""``flowctl analyze compare``: what got better or worse from one run of the pipeline to another, and how sure that is.

It reads results only, ``summary.json`` and the lists beside it: no record, no Spark. Each figure over viewers has its
standard error, so a difference is held against its own: below `SURE` of them it is *no difference that these
viewers show*. Shares of few viewers are corrected (`flowctl.charts.words.apart`); means and quantiles of fewer than
`FEW` say nothing. Viewers are taken as independent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from flowctl.charts.page import Html, page, table, text
from flowctl.charts.words import FEW, apart, figure, joined, ms, number, percent, rate, share, span, whole, words
from flowctl.errors import ConfigError
from flowctl.pipeline.records.place import Place, Storage
from flowctl.pipeline.report.answers import Advice
from flowctl.pipeline.report.found import json_of
from flowctl.pipeline.report.page import STYLE, card

COMPARE_FILE: Final = "compare.html"
FORMATS: Final = (2, 1)
"""Of a summary and of the figures in it, that are understood: `flowctl.pipeline.run.FORMAT`, `report.job.FIGURES`."""
SURE: Final = 2.6
"""Standard errors: chance alone does that once in a hundred times, and a dozen figures are looked at."""
SURE_OF_MANY: Final = 3.3
"""The same for streams, networks and nodes, of which there are dozens: once in a thousand."""
MOST_LISTED: Final = 20

MEASURES: Final[Mapping[str, tuple[str, int, Callable[[Any], str]]]] = {
    "start_failures": ("attempts that failed to start", -1, percent),
    "exits_before_start": ("left before the first frame", -1, percent),
    "first_frame_p50_ms": ("first frame (median)", -1, ms),
    "first_frame_p95_ms": ("first frame (p95)", -1, ms),
    "troubled": ("viewers in trouble", -1, percent),
    "cut_slow": ("disconnected for being slow", -1, percent),
    "stalled": ("viewers with a stall", -1, percent),
    "stall_ratio": ("time stalled", -1, percent),
    "picture_share": ("pictures delivered", 1, percent),
    "delay_p50_ms": ("delay (median of medians)", -1, ms),
    "delay_p95_ms": ("delay (p95 of p95)", -1, ms),
    "late_share": ("time beyond the target delay", -1, percent),
    "bit_rate": ("bit rate", 0, rate),
    "frames_per_s": ("frames per second", 0, figure),
}
"""Figure over viewers -> what it is called, whether more of it is better (1), worse (-1) or neither (0), its words."""


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both runs.

    Args:
        what: it is called.
        before: in words.
        after: in words.
        verdict: "better", "worse", "changed" (neither), "no difference" or "too few".
        errors: how far apart, in standard errors. None: not to be told.
    """

    what: str
    before: str
    after: str
    verdict: str
    errors: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What became of what, from run A to run B.

    Args:
        before: folder of the results of A.
        after: of B.
        runs: what each is made of, in words.
        changes: figures over all viewers.
        groups: streams, networks and nodes whose share of trouble changed, the clearest first.
        limits: in force before and after.
        bans: new and gone on the ban list.
        warnings: what speaks against comparing them.
    """

    before: str
    after: str
    runs: Sequence[str]
    changes: Sequence[Change]
    groups: Sequence[Change] = ()
    limits: Sequence[str] = ()
    bans: Sequence[str] = ()
    warnings: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        return asdict(self) | {"answer": self.answer.do}

    @property
    def answer(self) -> Advice:
        """What got better or worse, in one sentence, and how sure that is."""
        told = {verdict: [c.what for c in self.changes if c.verdict == verdict] for verdict in ("better", "worse")}
        named = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in told.items() if names)
        same = sum(change.verdict in ("no difference", "too few") for change in self.changes)
        do = f"{named.capitalize()}." if named else "No difference that these viewers show."
        kind = "act" if told["worse"] else "fine" if told["better"] else "unknown"
        why = f"{same} of {len(self.changes)} figures show no difference." if named and same else ""
        sure = f"A difference counts from {SURE:g} of its standard errors on; viewers are taken as independent."
        return Advice("compare", kind, do, why, joined(*self.runs, sure))

    def as_text(self, width: int = 80) -> str:
        """Return it for a terminal of `width` columns."""
        lines = [self.answer.do, *self.runs, *(f"warning: {line}" for line in self.warnings), ""]
        rows = [
            ("", "before", "after", ""),
            *((c.what, c.before, c.after, _verdict(c)) for c in [*self.changes, *self.groups]),
        ]
        wide = [min(max(len(row[place]) for row in rows), most) for place, most in enumerate((30, 13, 13))]
        for row in rows:
            cells = [
                f"{_cut(cell, size):{'<' if not place else '>'}{size}}"
                for place, (cell, size) in enumerate(zip(row, wide, strict=False))
            ]
            lines.append(_cut("  ".join([*cells, row[3]]).rstrip(), width))
        more = [("limits", line) for line in self.limits] + [("bans", line) for line in self.bans]
        return "\n".join([*lines, *([""] if more else []), *(_cut(f"{what}: {line}", width) for what, line in more)])

    def as_html(self) -> str:
        """Return it as one page that stands alone."""
        heads = ("", "before", "after", "", "standard errors apart")
        marks = {"better": '<b class="yes">better</b>', "worse": '<b class="no">worse</b>'}

        def rows(changes: Sequence[Change]) -> list[list[Any]]:
            return [
                [
                    c.what,
                    c.before,
                    c.after,
                    Html(marks.get(c.verdict, c.verdict)),
                    "-" if c.errors is None else f"{abs(c.errors):.1f}",
                ]
                for c in changes
            ]

        def listed(title: str, lines: Sequence[str]) -> str:
            items = "".join(f"<li>{text(line)}</li>" for line in lines)
            return f"<section><h3>{title}</h3><ul>{items}</ul></section>" if items else ""

        named = f"Before: <code>{text(self.before, 500)}</code><br>After: <code>{text(self.after, 500)}</code>"
        header = f"<header><h1>Two runs compared</h1><p>{named}</p></header>"
        parts = [
            header,
            f'<div class="part advice">{card("What got better or worse?", self.answer)}</div>',
            listed("What speaks against comparing them", self.warnings),
            f"<section><h3>What viewers felt</h3>{table(heads, rows(self.changes))}</section>",
            f"<section><h3>Whose share of trouble changed</h3>{table(heads, rows(self.groups))}</section>"
            if self.groups
            else "",
            listed("Limits", self.limits),
            listed("Bans", self.bans),
        ]
        return page("Two runs compared", parts, style=STYLE)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _verdict(change: Change) -> str:
    sure = "" if change.errors is None else f" ({abs(change.errors):.1f} errors)"
    return change.verdict + (sure if change.verdict in ("better", "worse", "changed") else "")


def compare(before: str, after: str) -> Comparison:
    """Compare two folders of results.

    Raises:
        ConfigError: one has no results, or results of another version or meaning.
    """
    places = [_place(folder) for folder in (before, after)]
    read = [_figures(place) for place in places]
    changes = [
        changed(name, *(found["measures"].get(name) for found in read))
        for name in MEASURES
        if any(name in found["measures"] for found in read)
    ]
    return Comparison(
        before=before,
        after=after,
        runs=[_run(word, found) for word, found in zip(("Before", "After"), read, strict=True)],
        changes=changes,
        groups=_groups(*read),
        limits=_limits(*(found.get("in_force") for found in read)),
        bans=_bans(*(place.read_text("bans.jsonl") for place in places)),
        warnings=_warnings(*read),
    )


def _place(folder: str) -> Place:
    if not Storage.of(folder).is_folder(""):
        raise ConfigError(f"there is no folder {folder}", hint="name two folders that `analyze all` wrote with --out")
    return Place(folder)


def _figures(place: Place) -> Mapping[str, Any]:
    """Return the figures that the report has left.

    Raises:
        ConfigError: there are none, or their meaning is another one.
    """
    folder = place.folder
    hint = f"make them with this version: flowctl analyze all EVENTS --out {folder}"
    summary = json_of(place.read_text("summary.json"))
    if not summary:
        raise ConfigError(f"{folder} has no results: there is no summary.json", hint=hint)
    if summary.get("format") != FORMATS[0]:
        raise ConfigError(
            f"{folder} has results of another version: format {words(summary.get('format'), 12)}, not {FORMATS[0]}",
            hint=hint,
        )
    found: Any = summary
    for name in ("jobs", "report", "summary", "figures"):
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        raise ConfigError(f"{folder} has no report, whose figures are compared", hint=hint)
    if found.get("format") != FORMATS[1]:
        raise ConfigError(
            f"the figures of {folder} mean something else: format {words(found.get('format'), 12)}, not {FORMATS[1]}",
            hint=hint,
        )
    return found


def _run(word: str, found: Mapping[str, Any]) -> str:
    totals = found.get("totals") or {}
    window = f", {found['window']}" if found.get("window") else ""
    few = f"; fewer than {FEW} show little" if whole(totals.get("viewers")) < FEW else ""
    return f"{word}: {figure(totals.get('viewers'))} viewers in {span(totals.get('span_s'))}{window}{few}."


def changed(name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Change:
    """Return what became of a figure, and whether that is more than chance."""
    what, better, show = MEASURES[name]
    was, now = _told(before, show), _told(after, show)
    if not before or not after or not whole(before.get("n")) or not whole(after.get("n")):
        return Change(what, was, now, "too few")
    if before.get("part") is not None and after.get("part") is not None:
        errors = apart(after["part"], after["n"], before["part"], before["n"])
    elif min(before["n"], after["n"]) < FEW:
        return Change(what, was, now, "too few")
    else:
        error = math.hypot(before.get("error") or 0.0, after.get("error") or 0.0)
        off = after["value"] - before["value"]
        errors = off / error if error else math.copysign(math.inf, off) if off else 0.0
    if abs(errors) < SURE:
        return Change(what, was, now, "no difference", errors)
    gained = "better" if (errors > 0) == (better > 0) else "worse"
    return Change(what, was, now, gained if better else "changed", errors)


def _told(one: Mapping[str, Any] | None, show: Callable[[Any], str]) -> str:
    if not one:
        return "-"
    return show(one.get("value")) if one.get("part") is None else share(one["part"], one["n"], brief=True)


def _groups(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return the streams, networks and nodes whose share of trouble changed, the clearest first."""
    told = []
    for kind, rows in (after.get("groups") or {}).items():
        for key, (part, of) in rows.items():
            was = (before.get("groups") or {}).get(kind, {}).get(key)
            if not was or not whole(of) or not whole(was[1]):
                continue
            errors = apart(min(whole(part), whole(of)), whole(of), min(whole(was[0]), whole(was[1])), whole(was[1]))
            if abs(errors) >= SURE_OF_MANY:
                shares = share(was[0], was[1], brief=True), share(part, of, brief=True)
                told.append(Change(f"{kind} {words(key, 40)}", *shares, "worse" if errors > 0 else "better", errors))
    return sorted(told, key=lambda change: -abs(change.errors or 0.0))[:MOST_LISTED]


def _limits(before: Any, after: Any) -> list[str]:
    if before == after or not (before or after):
        return []
    return [f"before {words(before, 160)}", f"after {words(after, 160)}"]


def _bans(before: str | None, after: str | None) -> list[str]:
    """Return what is new and what is gone on the list, in words."""
    was, now = ({_ban(line) for line in (text or "").splitlines() if _ban(line)} for text in (before, after))
    lines = []
    for what, found in (("new", now - was), ("gone", was - now)):
        named = sorted(found)
        lines += [f"{what}: {name}" for name in named[:MOST_LISTED]]
        lines += [f"{what}: {len(named) - MOST_LISTED:,} more"] if len(named) > MOST_LISTED else []
    return lines


def _ban(line: str) -> str:
    row = json_of(line)
    return f"{words(row.get('cidr'))} ({words(row.get('action') or 'ban', 10)})" if row else ""


def _warnings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    lines = []
    if json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True):
        lines.append("both are the same results")
    sizes = [number((found.get("totals") or {}).get("viewers")) or 0.0 for found in (before, after)]
    if min(sizes) * 10 < max(sizes):
        lines.append("one run has more than ten times the viewers of the other: other viewers, maybe at other hours")
    return lines
