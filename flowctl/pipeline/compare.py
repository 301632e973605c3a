"""``flowctl analyze compare``: what got better or worse from one run of the pipeline to another, and how sure that is.

It reads results only, ``summary.json`` and the lists beside it: no record, no Spark. Each figure over viewers has its
standard error, so a difference is held against its own: below `SURE` of them it is *no difference that these
viewers show*. Shares of few viewers are corrected (`flowctl.charts.words.apart`); means and quantiles of fewer than
`FEW` say nothing. Viewers are taken as independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from flowctl.charts.words import FEW, apart, figure, number, span, whole, words
from flowctl.errors import ConfigError
from flowctl.pipeline.records.place import Place, Storage
from flowctl.pipeline.report.found import FORMAT, MEASURES, json_of
from flowctl.pipeline.report.page import measured

SURE: Final = 2.6
"""Standard errors: chance alone does that once in a hundred times, and a dozen figures are looked at."""
SURE_OF_MANY: Final = 3.3
"""The same for streams, networks and nodes, of which there are dozens: once in a thousand."""
MOST_LISTED: Final = 20


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both runs, in words.

    Args:
        what: it is called.
        before: what it was.
        after: what it is.
        verdict: "better", "worse", "changed" (neither), "no difference" or "too few".
        errors: how far apart, in standard errors. None: not to be told.
    """

    what: str
    before: str
    after: str
    verdict: str
    errors: float | None = None

    def as_text(self) -> str:
        """Return it as a line of a table."""
        told = self.errors is not None and self.verdict in ("better", "worse", "changed")
        sure = f" ({abs(self.errors or 0.0):.1f} errors)" if told else ""
        cells = f"{_cut(self.what, 30):30}  {_cut(self.before, 13):>13}  {_cut(self.after, 13):>13}"
        return f"{cells}  {self.verdict}{sure}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What became of what, from one run to another.

    Args:
        runs: what each is made of, in words.
        changes: figures over all viewers.
        groups: streams, networks and nodes whose share of trouble changed, the clearest first.
        limits: in force before and after.
        bans: new and gone on the ban list.
        warnings: what speaks against comparing them.
    """

    runs: Sequence[str]
    changes: Sequence[Change]
    groups: Sequence[Change]
    limits: Sequence[str]
    bans: Sequence[str]
    warnings: Sequence[str]

    @property
    def answer(self) -> str:
        """What got better or worse, in one sentence."""
        told = {verdict: [c.what for c in self.changes if c.verdict == verdict] for verdict in ("better", "worse")}
        named = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in told.items() if names)
        return f"{named.capitalize()}." if named else "No difference that these viewers show."

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        return asdict(self) | {"answer": self.answer}

    def as_text(self, width: int = 80) -> str:
        """Return it for a terminal of `width` columns."""
        lines = [self.answer, *self.runs, *(f"warning: {line}" for line in self.warnings), ""]
        lines += [change.as_text() for change in (_HEADS, *self.changes, *self.groups)]
        lines += ["", *(f"limits: {line}" for line in self.limits), *(f"bans: {line}" for line in self.bans)]
        return "\n".join(_cut(line, width) for line in lines).rstrip()


_HEADS: Final = Change("", "before", "after", "")


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "\N{HORIZONTAL ELLIPSIS}"


def compare(before: str, after: str) -> Comparison:
    """Compare two folders of results.

    Raises:
        ConfigError: one has no results, or results of another version or meaning.
    """
    places = [_place(folder) for folder in (before, after)]
    was, now = (_figures(place) for place in places)
    both = {name: (was["measures"].get(name), now["measures"].get(name)) for name in MEASURES}
    limits = was.get("in_force"), now.get("in_force")
    return Comparison(
        runs=[_run("Before", was), _run("After", now)],
        changes=[changed(name, *pair) for name, pair in both.items() if any(pair)],
        groups=_groups(was, now),
        limits=[f"before {words(limits[0], 160)}", f"after {words(limits[1], 160)}"] if limits[0] != limits[1] else [],
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
    found: Any = json_of(place.read_text("summary.json"))
    for name in ("jobs", "report", "summary", "figures"):
        found = found.get(name) if isinstance(found, dict) else None
    hint = f"make them with this version: flowctl analyze all EVENTS --out {place.folder}"
    if not isinstance(found, dict):
        raise ConfigError(f"{place.folder} has no report, whose figures are compared", hint=hint)
    if found.get("format") != FORMAT:
        of = words(found.get("format"), 12)
        raise ConfigError(f"the figures of {place.folder} mean something else: format {of}, not {FORMAT}", hint=hint)
    figures: Mapping[str, Any] = found
    return figures


def _run(word: str, found: Mapping[str, Any]) -> str:
    totals = found.get("totals") or {}
    window = f", {found['window']}" if found.get("window") else ""
    few = f"; fewer than {FEW} show little" if whole(totals.get("viewers")) < FEW else ""
    return f"{word}: {figure(totals.get('viewers'))} viewers in {span(totals.get('span_s'))}{window}{few}."


def changed(name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, sure: float = SURE) -> Change:
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
    verdict = "no difference" if abs(errors) < sure else gained if known.better else "changed"
    return Change(known.words, was, now, verdict, errors)


def _groups(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return the streams, networks and nodes whose share of trouble changed, the clearest first."""
    told = []
    for kind, rows in after["groups"].items():
        for key, counts in rows.items():
            both = (before["groups"].get(kind, {}).get(key), counts)
            was, now = ({"part": min(map(whole, one)), "n": whole(one[1])} if one else None for one in both)
            change = changed("troubled", was, now, SURE_OF_MANY)
            if change.verdict in ("better", "worse"):
                told.append(replace(change, what=f"{kind} {words(key, 40)}"))
    return sorted(told, key=lambda change: -abs(change.errors or 0.0))[:MOST_LISTED]


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
