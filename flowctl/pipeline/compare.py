"""``flowctl analyze compare``: what got better or worse from one run of the pipeline to another, and how sure that is.

It reads results only, ``summary.json`` and the lists beside it: no record, no Spark. Each figure over viewers has its
standard error, so a difference is held against its own: below `SURE` of them it is *no difference that these
viewers show*. Shares of few viewers are corrected (`flowctl.charts.words.apart`); means and quantiles of fewer than
`FEW` say nothing. Viewers are taken as independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from flowctl.charts.words import FEW, apart, figure, joined, number, share, span, whole, words
from flowctl.errors import ConfigError
from flowctl.pipeline.records.place import Place, Storage
from flowctl.pipeline.report.answers import Advice
from flowctl.pipeline.report.found import MEASURES, json_of
from flowctl.pipeline.report.page import measured

FORMATS: Final = (2, 2)
"""Of a summary and of the figures in it, that are understood: `flowctl.pipeline.run.FORMAT`, `report.job.FIGURES`."""
SURE: Final = 2.6
"""Standard errors: chance alone does that once in a hundred times, and a dozen figures are looked at."""
SURE_OF_MANY: Final = 3.3
"""The same for streams, networks and nodes, of which there are dozens: once in a thousand."""
MOST_LISTED: Final = 20
_HEADS: Final = ("", "before", "after", "")


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
        rows = [_HEADS, *((c.what, c.before, c.after, _verdict(c)) for c in (*self.changes, *self.groups))]
        for what, before, after, verdict in rows:
            lines.append(f"{_cut(what, 30):30}  {_cut(before, 13):>13}  {_cut(after, 13):>13}  {verdict}".rstrip())
        more = [("limits", line) for line in self.limits] + [("bans", line) for line in self.bans]
        return "\n".join(
            _cut(line, width) for line in [*lines, "", *(f"{what}: {line}" for what, line in more)]
        ).rstrip()


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _verdict(change: Change) -> str:
    told = change.errors is not None and change.verdict in ("better", "worse", "changed")
    return change.verdict + (f" ({abs(change.errors or 0.0):.1f} errors)" if told else "")


def compare(before: str, after: str) -> Comparison:
    """Compare two folders of results.

    Raises:
        ConfigError: one has no results, or results of another version or meaning.
    """
    places = [_place(folder) for folder in (before, after)]
    was, now = (_figures(place) for place in places)
    both = {name: (was["measures"].get(name), now["measures"].get(name)) for name in MEASURES}
    return Comparison(
        before=before,
        after=after,
        runs=[_run("Before", was), _run("After", now)],
        changes=[changed(name, *pair) for name, pair in both.items() if any(pair)],
        groups=_groups(was, now),
        limits=_limits(was.get("in_force"), now.get("in_force")),
        bans=_bans(*(place.read_text("bans.jsonl") for place in places)),
        warnings=_warnings(was, now),
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
    found: Any = json_of(place.read_text("summary.json"))
    of = words(found.get("format"), 12)
    wrong = "" if found else f"{folder} has no results: there is no summary.json"
    if found and found.get("format") != FORMATS[0]:
        wrong = f"{folder} has results of another version: format {of}, not {FORMATS[0]}"
    for name in ("jobs", "report", "summary", "figures"):
        found = found.get(name) if isinstance(found, dict) else None
    if not wrong and not isinstance(found, dict):
        wrong = f"{folder} has no report, whose figures are compared"
    elif not wrong and found.get("format") != FORMATS[1]:
        of = words(found.get("format"), 12)
        wrong = f"the figures of {folder} mean something else: format {of}, not {FORMATS[1]}"
    if wrong:
        raise ConfigError(wrong, hint=f"make them with this version: flowctl analyze all EVENTS --out {folder}")
    figures: Mapping[str, Any] = found
    return figures


def _run(word: str, found: Mapping[str, Any]) -> str:
    totals = found.get("totals") or {}
    window = f", {found['window']}" if found.get("window") else ""
    few = f"; fewer than {FEW} show little" if whole(totals.get("viewers")) < FEW else ""
    return f"{word}: {figure(totals.get('viewers'))} viewers in {span(totals.get('span_s'))}{window}{few}."


def changed(name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Change:
    """Return what became of a figure, and whether that is more than chance."""
    known, (was, now) = MEASURES[name], (measured(name, one) if one else "-" for one in (before, after))
    few = Change(known.words, was, now, "too few")
    if not before or not after or not whole(before.get("n")) or not whole(after.get("n")):
        return few
    if before.get("part") is not None and after.get("part") is not None:
        errors = apart(after["part"], after["n"], before["part"], before["n"])
    elif min(before["n"], after["n"]) < FEW:
        return few
    else:
        error = math.hypot(before.get("error") or 0.0, after.get("error") or 0.0)
        off = after["value"] - before["value"]
        errors = off / error if error else math.copysign(math.inf, off) if off else 0.0
    gained = "better" if (errors > 0) == (known.better > 0) else "worse"
    verdict = "no difference" if abs(errors) < SURE else gained if known.better else "changed"
    return Change(known.words, was, now, verdict, errors)


def _groups(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return the streams, networks and nodes whose share of trouble changed, the clearest first."""
    told = []
    for kind, rows in (after.get("groups") or {}).items():
        for key, now in rows.items():
            was = (before.get("groups") or {}).get(kind, {}).get(key)
            if not was or not whole(now[1]) or not whole(was[1]):
                continue
            (part, of), (was_part, was_of) = ((min(whole(one[0]), whole(one[1])), whole(one[1])) for one in (now, was))
            errors = apart(part, of, was_part, was_of)
            if abs(errors) >= SURE_OF_MANY:
                shares = share(was_part, was_of, brief=True), share(part, of, brief=True)
                told.append(Change(f"{kind} {words(key, 40)}", *shares, "worse" if errors > 0 else "better", errors))
    return sorted(told, key=lambda change: -abs(change.errors or 0.0))[:MOST_LISTED]


def _limits(before: Any, after: Any) -> list[str]:
    return [] if before == after else [f"before {words(before, 160)}", f"after {words(after, 160)}"]


def _bans(before: str | None, after: str | None) -> list[str]:
    """Return what is new and what is gone on the list, in words."""
    rows = [[json_of(line) for line in (text or "").splitlines()] for text in (before, after)]
    was, now = (
        {f"{words(row.get('cidr'))} ({words(row.get('action') or 'ban', 10)})" for row in one if row} for one in rows
    )
    lines = []
    for what, found in (("new", now - was), ("gone", was - now)):
        lines += [f"{what}: {name}" for name in sorted(found)[:MOST_LISTED]]
        lines += [f"{what}: {len(found) - MOST_LISTED:,} more"] if len(found) > MOST_LISTED else []
    return lines


def _warnings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    lines = ["both are the same results"] if before == after else []
    sizes = [number((found.get("totals") or {}).get("viewers")) or 0.0 for found in (before, after)]
    if min(sizes) * 10 < max(sizes):
        lines.append("one run has more than ten times the viewers of the other: other viewers, maybe at other hours")
    return lines
