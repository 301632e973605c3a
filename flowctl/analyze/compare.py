"""``flowctl analyze compare``: what got better or worse from one run of the pipeline to another, and how sure that is.

It reads results only: no record, no Spark. A difference is held against the bounds of both figures (Zou and Donner,
2008): below `SURE_OF_DIFFERENCE` standard errors these viewers do not show it, and one smaller than `Measure.least` is
too small to matter. Means and quantiles of fewer than `FEW` say nothing. Viewers are taken as independent.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from flowctl.analyze.records.place import RecordPlace, Storage
from flowctl.analyze.report.found import FORMAT, MEASURES, SURE_OF_DIFFERENCE, Measure, json_of, measured
from flowctl.charts.words import FEW, count_of, figure, span, standard_errors_between, words
from flowctl.errors import ConfigError

SURE_OF_MANY: Final = 3.3
"""`SURE_OF_DIFFERENCE` for streams, networks and nodes, of which there are dozens: chance once in a thousand."""
MOST_LISTED: Final = 20


@dataclass(frozen=True, slots=True)
class FigureChange:
    """One figure of both runs, in words."""

    what: str
    before: str
    after: str
    # "better", "worse", "changed" (neither), "too small" (sure, and less than what matters), "no difference" or "too
    # few"
    verdict: str
    errors: float | None = None  # how far apart, in standard errors. None: not known.

    def cells(self) -> tuple[str, str, str, str]:
        certain = self.errors is not None and self.verdict in ("better", "worse", "changed")
        sure = f" ({abs(self.errors or 0.0):.1f} errors)" if certain else ""
        return self.what, self.before, self.after, self.verdict + sure


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What changed between two runs."""

    runs: Sequence[str]
    changes: Sequence[FigureChange]
    groups: Sequence[FigureChange]  # streams, networks and nodes whose share of trouble changed, the clearest first
    limits: Sequence[str]
    bans: Sequence[str]
    warnings: Sequence[str]

    @property
    def known(self) -> bool:
        return any(change.verdict != "too few" for change in self.changes)

    @property
    def answer(self) -> str:
        lists = {verdict: [c.what for c in self.changes if c.verdict == verdict] for verdict in ("better", "worse")}
        named = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in lists.items() if names)
        if named:
            return f"{named[0].upper()}{named[1:]}."
        none = "No difference that these viewers show."
        return none if self.known else "Not known: no figure is known of enough viewers in both runs."

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"answer": self.answer}

    def as_text(self, width: int | None = None) -> str:
        """Return it as lines, none of them cut: whole, or wrapped for a terminal of `width` columns."""
        rows = [("", "before", "after", ""), *(change.cells() for change in (*self.changes, *self.groups))]
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [f"{row[0]:{wide[0]}}  {row[1]:>{wide[1]}}  {row[2]:>{wide[2]}}  {row[3]}".rstrip() for row in rows]
        lines = [self.answer, *self.runs, *(f"warning: {line}" for line in self.warnings), "", *table]
        lines += ["", *(f"limits: {line}" for line in self.limits), *(f"bans: {line}" for line in self.bans)]
        if width is not None:
            lines = [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="  ") or [""]]
        return "\n".join(lines).rstrip()


def compare(before: str, after: str) -> Comparison:
    places = [_place(folder) for folder in (before, after)]
    jobs = [_jobs(place) for place in places]
    was, now = (_figures(place, notes) for place, notes in zip(places, jobs, strict=True))
    both = {name: (was["measures"].get(name), now["measures"].get(name)) for name in MEASURES}
    limits = was.get("in_force"), now.get("in_force")
    judged = [notes.get("abuse", {}).get("state") == "done" for notes in jobs]  # else the list is of an earlier run
    return Comparison(
        runs=[_run("Before", was), _run("After", now)],
        changes=[changed(name, *pair) for name, pair in both.items() if any(pair)],
        groups=_groups(was, now),
        limits=[f"before {words(limits[0], 400)}", f"after {words(limits[1], 400)}"]
        if all(limits) and limits[0] != limits[1]
        else [],
        bans=_bans(*(place.read_text("bans.jsonl") for place in places)) if all(judged) else [],
        warnings=[*_missing(*jobs), *_warnings(was, now)],
    )


def _missing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    states = [
        (word, name, notes.get(name, {}).get("state", "missing"))
        for word, notes in (("before", before), ("after", after))
        for name in ("sessions", "experience", "whatif", "abuse")
    ]
    missing = [row for row in states if row[2] != "done"]
    return [f"{word}, the job {name}: {state}; what it tells is not compared" for word, name, state in missing]


def _place(folder: str) -> RecordPlace:
    if not Storage.of(folder).is_folder(""):
        raise ConfigError(f"there is no folder {folder}", hint="name two folders that `analyze all` wrote with --out")
    return RecordPlace(folder, make=False)


def _jobs(place: RecordPlace) -> Mapping[str, Any]:
    jobs = json_of(place.read_text("summary.json")).get("jobs")
    return {name: note for name, note in jobs.items() if isinstance(note, dict)} if isinstance(jobs, dict) else {}


def _figures(place: RecordPlace, jobs: Mapping[str, Any]) -> Mapping[str, Any]:
    summary = jobs.get("report", {}).get("summary")
    figures = summary.get("figures") if isinstance(summary, dict) else None
    hint = f"make them with this version: flowctl analyze all EVENTS --out {place.folder}"
    if not isinstance(figures, dict):
        raise ConfigError(f"{place.folder} has no report, whose figures are compared", hint=hint)
    if figures.get("format") != FORMAT:
        of = words(figures.get("format"), 12)
        raise ConfigError(f"the figures of {place.folder} mean something else: format {of}, not {FORMAT}", hint=hint)
    return figures


def _run(word: str, found: Mapping[str, Any]) -> str:
    totals = found.get("totals") or {}
    window = f", {found['window']}" if found.get("window") else ""
    few = f"; fewer than {FEW} show little" if count_of(totals.get("viewers")) < FEW else ""
    return f"{word}: {figure(totals.get('viewers'))} viewers in {span(totals.get('span_s'))}{window}{few}."


def changed(
    name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, sure: float = SURE_OF_DIFFERENCE
) -> FigureChange:
    """Return how a figure changed, and whether that is more than chance."""
    measure, (was, now) = MEASURES[name], (measured(name, one) if one else "-" for one in (before, after))
    few = FigureChange(measure.words, was, now, "too few")
    if not before or not after or not count_of(before.get("n")) or not count_of(after.get("n")):
        return few
    if before.get("part") is not None and after.get("part") is not None:
        errors = standard_errors_between(after["part"], after["n"], before["part"], before["n"])
    elif min(before["n"], after["n"]) < FEW:
        return few
    else:
        errors = _errors(before, after, even=measure.kind == "ratio")
    gained = "better" if (errors > 0) == (measure.better > 0) else "worse"
    verdict = gained if measure.better else "changed"
    if abs(errors) < sure:
        verdict = "no difference"
    elif not _matters(measure, before["value"], after["value"]):
        verdict = "too small"
    return FigureChange(measure.words, was, now, verdict, errors)


def _errors(before: Mapping[str, Any], after: Mapping[str, Any], *, even: bool) -> float:
    """Return how far apart two figures are, in standard errors of the sides that face each other."""
    off = after["value"] - before["value"]
    lower, higher = (before, after) if off > 0 else (after, before)
    if lower.get("high") is None or higher.get("low") is None:
        return 0.0
    bounds = [max(lower["high"] - lower["value"], 0.0), max(higher["value"] - higher["low"], 0.0)]
    if even:  # a handful that happens to be alike does not know how viewers differ: what the others know counts too
        sizes = [math.sqrt(one["n"]) for one in (lower, higher)]
        spread = max(bound * size for bound, size in zip(bounds, sizes, strict=True))
        bounds = [spread / size for size in sizes]
    error = math.hypot(*bounds) / SURE_OF_DIFFERENCE
    return off / error if error else math.copysign(math.inf, off) if off else 0.0


def _matters(measure: Measure, before: float, after: float) -> bool:
    most = max(measure.least, measure.step * min(before, after))
    return abs(after - before) > most * (1 + 1e-9)


def _groups(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[FigureChange]:
    """Return the streams, networks and nodes whose share of trouble changed, the clearest first."""
    changes = []
    for kind, rows in after["groups"].items():
        for key, counts in rows.items():
            both = (before["groups"].get(kind, {}).get(key), counts)
            was, now = (_share(min(map(count_of, one)), count_of(one[1])) if one else None for one in both)
            change = changed("troubled", was, now, SURE_OF_MANY)
            if change.verdict in ("better", "worse"):
                changes.append(replace(change, what=f"{kind} {words(key, 40)}"))
    return sorted(changes, key=lambda change: -abs(change.errors or 0.0))[:MOST_LISTED]


def _share(part: int, n: int) -> dict[str, Any]:
    return {"n": n, "value": part / max(n, 1), "part": part}


def _bans(before: str | None, after: str | None) -> list[str]:
    rows = [[json_of(line) for line in (text or "").splitlines()] for text in (before, after)]
    was, now = (
        {f"{words(row.get('cidr'))} ({words(row.get('action') or 'ban', 10)})" for row in one if row} for one in rows
    )
    lines = []
    for what, names in (("new", now - was), ("gone", was - now)):
        lines += [f"{what}: {name}" for name in sorted(names)[:MOST_LISTED]]
        lines += [f"{what}: {len(names) - MOST_LISTED:,} more"] if len(names) > MOST_LISTED else []
    return lines


def _warnings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    lines = ["both are the same results"] if before == after else []
    few, many = sorted(count_of((found.get("totals") or {}).get("viewers")) for found in (before, after))
    if 0 < few * 10 < many:
        lines.append("one run has more than ten times the viewers of the other: other viewers, maybe at other hours")
    return lines
