"""What a run did, for people: each answer in a line or two, what was read, and last where the report is (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from flowctl.analyze.records.accounts import Accounts
from flowctl.charts.words import FEW, count_of, figure, fill_template, plural, sentences, words

if TYPE_CHECKING:
    from flowctl.analyze.run import AllResult

ANSWERS: Final = {
    "sessions": "{sessions}, {open} still open; {troubled}",
    "experience": """
{viewers}, {peak_viewers} at once at most.
Of {attempts} {start_failures} failed to start, {exits_before_start} left before the first frame.
The median viewer's first frame was ready to be sent {first_frame_p50_ms} after its request.
95 % of viewers had at most {delay_p95_ms} of delay for half of their time.
Of their pictures {picture_share} were sent.
{cut_slow} cut for being slow.
""",
    "fleet": "{minutes} of streams on nodes, {networks}",
    "abuse": "{bans} to be banned and {limits} to be limited",
    "whatif": "{choices} tried on {viewers}:\n  {recommended}\n  {why}",
    "report": "what to do",
}
"""Name of a job -> its answer, of figures of its summary; the job capacity words its own (`headline`).

A line of `experience` that lacks a figure is left out; of fewer than `FEW` viewers a share or percentile is none.
"""
_COUNTED: Final = {
    "sessions": "connection",
    "viewers": "viewer",
    "attempts": "attempt",
    "choices": "choice",
    "minutes": "minute",
    "networks": "network",
}
"""Figures that are told with what they count."""
_REPORT: Final = "report.html"


def lines(result: AllResult) -> Iterator[str]:
    """Yield what each job answers, the accounts, and where the results are, the report last."""
    for name, note in result.jobs.items():
        summary = note.summary
        causes = figures({cause: count for cause, count in summary.get("blame", {}).items() if cause != "none"})
        counted = {of: plural(summary[of], noun) for of, noun in _COUNTED.items() if of in summary}
        trouble = count_of(summary.get("in_trouble"))
        told = f"{trouble:,} in trouble" + (f", by cause: {causes.replace('_', ' ')}" if causes else "")
        facts = {**summary, **counted, "troubled": told if trouble else "none in trouble"}
        template = ANSWERS.get(name, "")
        alone = summary.get("headline") or ("recommended" not in summary and summary.get("why"))
        answer = words(alone, 600) if alone else fill_template(template, facts)
        if name == "experience":
            answer = sentences(_felt(summary) | counted, template)
        yield f"{name}: {answer if summary else note.state.value}"
        yield from (f"  {words(item['do'], 600)}" for item in summary.get("answers", ()))
    yield f"records of {plural(result.hours, 'hour')}, read now: {result.hours_read}"
    yield from (f"  {Accounts(**account).line()}" for account in result.accounts)
    others = [name for name in result.outputs if name != _REPORT]
    if others:
        folder = result.outputs[others[0]].removesuffix(others[0])
        yield f"in {folder}: {', '.join(others)}"
    if _REPORT in result.outputs:
        yield f"report: {result.outputs[_REPORT]}"


def _felt(summary: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: figure(value) if isinstance(value, int) else value for name, value in summary.items()}
    few = count_of(summary.get("viewers")) < FEW
    return told | (dict.fromkeys(("first_frame_p50_ms", "delay_p95_ms", "picture_share")) if few else {})


def figures(value: Any) -> str:
    if not isinstance(value, Mapping):
        return f"{value:g}" if isinstance(value, float) else str(value)
    texts = ((name, figures(item), isinstance(item, Mapping)) for name, item in value.items())
    return ", ".join(f"{name} ({item})" if nested else f"{name} {item}" for name, item, nested in texts)
