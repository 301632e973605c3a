"""The report's answers in words: one short paragraph per question, made from the figures alone (pure).

A reader who looks at nothing else knows what happened. Nothing is said that the tables do not hold: where a figure is
missing its sentence is left out, and where a job was not run the section says so.
"""

from __future__ import annotations

from typing import Final

from flowctl.pipeline.report.data import LEAST_STAY_S, Cut, JobState, ReportData, Row, number, whole_number
from flowctl.pipeline.report.pictures import BLAME_WORDS, count, ms, percent, size, words
from flowctl.units import format_duration

JOB_QUESTIONS: Final = {
    "sessions": "who was slow, and why",
    "fleet": "streams and subnets over time",
    "abuse": "whom to keep out",
    "whatif": "which limits would be better",
    "capacity": "how many viewers a node carries, and how many nodes a crowd takes",
}
"""The jobs that the report reads, in the order in which they run, with what each of them answers."""


def plural(found: object, one: str, many: str | None = None) -> str:
    """Return a count with its noun, like ``1 viewer`` or ``2,000 viewers``."""
    return f"{count(found)} {one if number(found) == 1 else many or one + 's'}"


def missing(data: ReportData, job: str) -> str:
    """Return why a section has no figures: its job failed, was not run, or left nothing to show."""
    note = data.job(job)
    if note.state is JobState.FAILED:
        return f"The job {job} failed: {words(note.message, 400)}"
    unread = data.unreadable.get(job)
    if unread:
        return f"The tables of the job {job} could not be read: {words(unread, 400)}"
    if note.state is JobState.DONE:
        return f"The job {job} was run and left nothing to show here."
    return f"Not known: the job {job} was not run. `flowctl analyze {job}` runs it."


def happened(data: ReportData) -> str:
    """Return what happened, in some sentences."""
    whole = data.whole
    if whole is None:
        return missing(data, "sessions")
    viewers = whole_number(whole.get("viewers"))
    said = [f"{plural(whole.get('connections'), 'connection')} to {plural(data.node_count, 'node')}{_when(data)}."]
    if not viewers:
        return f"{said[0]} None of them was a viewer."
    troubled = whole_number(whole.get("troubled"))
    watched = format_duration((number(whole.get("play_ms")) or 0.0) / 1000)
    said.append(f"{plural(viewers, 'viewer')} watched for {watched} all together.")
    if not troubled:
        said.append("All of them kept up all the time.")
        return " ".join(said)
    said.append(
        f"{percent((viewers - troubled) / viewers)} of them kept up all the time; {count(troubled)} did not, "
        f"and {count(whole.get('cut_slow'))} of those were disconnected for it."
    )
    said.append(_dropped(whole))
    return " ".join(part for part in said if part)


def _when(data: ReportData) -> str:
    if data.began_at is None or data.ended_at is None:
        return ""
    lasted = format_duration((data.ended_at - data.began_at).total_seconds())
    return f", from {data.began_at:%Y-%m-%d %H:%M:%S} UTC on, for {lasted}"


def _dropped(whole: Row) -> str:
    dropped, accepted = whole_number(whole.get("dropped_messages")), whole_number(whole.get("accepted_messages"))
    if not dropped:
        return "Nothing was dropped."
    share = f", {percent(dropped / accepted)} of what was published for them" if accepted else ""
    return f"Dropped for them: {plural(dropped, 'message')}{share}."


def slow(data: ReportData) -> str:
    """Return who was slow, whose fault it was, and what was done about it."""
    whole = data.whole
    if whole is None:
        return missing(data, "sessions")
    troubled = whole_number(whole.get("troubled"))
    if not troubled:
        return "Nobody: no viewer was in trouble."
    said = [
        (
            f"{plural(troubled, 'viewer')} in trouble: {count(whole.get('worst_hard'))} reached the hard "
            f"limit, {count(whole.get('worst_soft'))} no more than the soft limit, "
            f"{count(whole.get('worst_overloaded'))} were overloaded only."
        )
    ]
    blames = [row for row in data.blames if whole_number(row.get("viewers"))]
    if blames:
        main = max(blames, key=lambda row: whole_number(row.get("viewers")))
        share = whole_number(main.get("viewers")) / sum(whole_number(row.get("viewers")) for row in blames)
        said.append(
            f"Mostly to blame, for {percent(share)} of them: {BLAME_WORDS.get(str(main.get('blame')), 'unknown')}."
        )
    pictures, line = number(whole.get("troubled_picture_share")), number(whole.get("troubled_line_of_stream"))
    if pictures is not None:
        carried = "" if line is None else f"; the line of the median one carried {percent(line)} of the stream"
        said.append(f"They got {percent(pictures)} of the pictures on average{carried}.")
    said.append(_recovered(whole))
    return " ".join(part for part in said if part)


def _recovered(whole: Row) -> str:
    """Return how often viewers came back by themselves or were brought back, in one sentence; "" if never."""
    parts = []
    recoveries, returns = whole_number(whole.get("recoveries")), whole_number(whole.get("returns_to_live"))
    paused = whole_number(whole.get("paused"))
    if recoveries:
        mean = ms(whole.get("recover_mean_ms"))
        parts.append(
            f"they recovered {plural(recoveries, 'time')}{'' if mean == '-' else f', after {mean} on average'}"
        )
    if returns:
        parts.append(f"they were brought back to live {plural(returns, 'time')}")
    if paused:
        parts.append(f"the input of {plural(paused, 'connection')} was paused at least once")
    return f"All together {'; '.join(parts)}." if parts else ""


def late(data: ReportData) -> str:
    """Return how late viewers were, and how long they waited."""
    whole = data.whole
    if whole is None:
        return missing(data, "sessions")
    median, high = number(whole.get("delay_p50_of_p50_ms")), number(whole.get("delay_p95_of_p95_ms"))
    if median is None:
        said = ["Nobody's delay was measured: it is asked for viewers in trouble, and in samples."]
    else:
        said = [
            (
                f"The median viewer was behind by {ms(median)} in its median moment; for 5 % of the viewers it was "
                f"more than {ms(high)} in 5 % of their time."
            )
        ]
    short = whole_number(whole.get("too_short"))
    if median is not None and short:
        said.append(f"{plural(short, 'viewer')} there for less than {LEAST_STAY_S:g} s: not in these figures.")
    ratio = number(whole.get("stall_ratio"))
    if ratio is not None:
        said.append(
            f"Pictures stood still for {percent(ratio)} of the play time ({plural(whole.get('stall_count'), 'stall')})."
        )
    start = number(whole.get("startup_p50_ms"))
    if start is not None:
        said.append(
            f"Play began {ms(start)} after connecting in the median, {ms(whole.get('startup_p95_ms'))} at p95; "
            f"{plural(whole.get('exits_before_start'), 'viewer')} left before that."
        )
    return " ".join(said)


def keep_out(data: ReportData) -> str:
    """Return whom to keep out, and what is known about them."""
    if data.scores is None and data.bans is None:
        return missing(data, "abuse")
    scored = 0 if data.scores is None else data.scores.total
    banned = 0 if data.bans is None else data.bans.total
    if not banned:
        return f"Nobody: of {plural(scored, 'address', 'addresses')} and subnets with a score none is high enough."
    return (
        f"{plural(banned, 'address or subnet', 'addresses and subnets')} of {count(scored)} with a score: banned, or, "
        "where others behave at the same address, limited in new connections. The list is ready for the server, which "
        "reads it again whenever it changes: flowctl serve live --bans bans.jsonl."
    )


def unused(data: ReportData) -> str:
    """Return what could not be used."""
    accounts = data.accounts()
    if not accounts:
        return "Not known: no job has said what it read."
    rows, files = (
        sum(whole_number(item.get(name)) for item in accounts) for name in ("rows_quarantined", "files_quarantined")
    )
    if not rows and not files:
        return "Nothing: every file and every row was used."
    unknown = sum(whole_number(item.get("files_unknown_rows")) for item in accounts)
    more = f" How many rows {plural(unknown, 'file')} held is not known: they cannot be read." if unknown else ""
    return f"{plural(rows, 'row')} and {plural(files, 'file')} were set aside, with the reason of each.{more}"


def left_out(cut: Cut, what: str) -> str:
    """Return how much of a table is not shown; "" if all of it is."""
    if not cut.left_out:
        return ""
    return f"The first {count(len(cut.rows))} of {count(cut.total)} {what}; {count(cut.left_out)} are left out here."


def viewer_done(row: Row) -> str:
    """Return what was done about a slow viewer, in words."""
    parts = []
    dropped = whole_number(row.get("dropped_messages"))
    if dropped:
        parts.append(f"dropped {plural(dropped, 'message')} ({size(row.get('dropped_bytes'))})")
    returns = whole_number(row.get("returns_to_live"))
    if returns:
        parts.append(f"brought back to live {plural(returns, 'time')}")
    pauses = whole_number(row.get("input_pauses"))
    if pauses:
        parts.append(f"its input paused {plural(pauses, 'time')}")
    if row.get("closed_by") == "server":
        parts.append(f"disconnected: {words(row.get('close_reason'), 60)}")
    return ", ".join(parts) or "nothing was needed"
