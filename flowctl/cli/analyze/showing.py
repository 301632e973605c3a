"""What a run did, for people: each job's answer in a line or two, what was read, and last where the report is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from string import Formatter
from typing import TYPE_CHECKING, Any, Final

from flowctl.text.output import say

if TYPE_CHECKING:
    from flowctl.pipeline.run import AllResult

_SAID: Final = {
    "sessions": "{sessions:n} connections closed, {open:n} open; {in_trouble:n} in trouble, by cause: {blame:causes}",
    "experience": "{viewers:n} viewers, {peak_viewers:n} at once; {start_failures:n} of {attempts:n} attempts failed "
    "to start; first frame {first_frame_p50_ms:ms}, delay p95 {delay_p95_ms:ms}, {picture_share:%} of the pictures",
    "fleet": "at most {most_viewers:n} viewers at once",
    "abuse": "{bans:n} to be banned and {limits:n} to be limited",
    "whatif": "{choices:n} choices tried on {viewers:n} viewers; recommended: {recommended:text}\n  {why:text}",
    "capacity": "a node carries {viewers_per_node:n} viewers of {bit_rate:bps}, known from: {fitted_to:text}; "
    "the crowd takes {nodes:n} nodes",
    "report": "what to do\n{answers:answers}",
}
"""Name of a job -> its answer: figures of its summary, each with its kind (`_Words`)."""


class _Words(Formatter):
    """Fills figures into a text, each written as its kind is; one that is not there is a dash."""

    def get_value(self, key: int | str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        del args
        return kwargs.get(str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        from flowctl.charts import words

        kinds = {"n": words.figure, "ms": words.ms, "%": words.percent, "bps": words.rate}
        if format_spec in kinds:
            return kinds[format_spec](value)
        if format_spec == "causes":
            causes = {name: count for name, count in (value or {}).items() if name != "none"}
            return text(causes).replace("_", " ") or "-"
        if format_spec == "answers":
            return "\n".join(f"  {words.words(item.get('do'), 600)}" for item in value or [])
        return words.words(value, 400)


def show(result: AllResult, *, as_json: bool) -> None:
    """Write what a run did: data to standard output, warnings and failures to standard error."""
    from flowctl.cli.common import print_json
    from flowctl.cli.errors import complain

    warnings = [*result.warnings, *(line for note in result.jobs.values() for line in note.warnings)]
    for line in dict.fromkeys(warnings):
        say(f"warning: {line}", to_stderr=True)
    for name in result.failed:
        complain(f"{name}: {result.jobs[name].message}", result.jobs[name].hint or None)
    if as_json:
        print_json(result.as_dict())
    else:
        say("\n".join(lines(result)))


def lines(result: AllResult) -> Iterator[str]:
    """Yield what each job answers, the accounts, and where the results are, the report last."""
    from flowctl.pipeline.records.accounts import Accounts

    for name, note in result.jobs.items():
        said = _Words().format(_SAID[name], **note.summary) if note.summary else note.state.value
        yield f"{name}: {said}"
        if "truth" in note.summary:
            yield f"  planted: {text(note.summary['truth'])}"
    yield f"records of {result.hours} hours, read now: {result.hours_read}"
    yield from (f"  {Accounts(**account).line()}" for account in result.accounts)
    for name, path in sorted(result.outputs.items(), key=lambda item: item[0] == "report.html"):
        yield f"{name}: {path}"


def text(value: Any) -> str:
    """Return a figure, or figures by name, as people read them."""
    if isinstance(value, Mapping):
        parts = ((key, text(item), isinstance(item, Mapping)) for key, item in value.items())
        return ", ".join(f"{key} ({item})" if nested else f"{key} {item}" for key, item, nested in parts)
    return f"{value:g}" if isinstance(value, float) else str(value)
