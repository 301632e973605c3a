"""``fleet``: how each stream fared on each node, minute by minute, and how each network did over the whole time.

Theory of operation. Two aggregations follow each other. The first makes *viewer minutes*: one row per viewer and
minute, of its samples. The second sums them up by stream, node and minute, so that a quantile of delay is one over
viewers (each counts once with its mean) and not over samples. A minute lies in one hour, so rows of hours add up.

A viewer that was never sampled has viewer minutes of its session instead, which is spread evenly over the time in which
it played: right over that time, and blurred within it. So has one that was, in hours whose samples are not there. The
minutes of an hour that such a session fills have all the same of it: up to the answer, that hour is one row.
`source` says which it was. Joins are plays that began in the minute, leaves are viewers whose connection ended in it.
Networks are those of `experience`, all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from flowctl.analyze.job import AnalysisJob, JobAnswer, JobPart
from flowctl.analyze.models import query, run_text
from flowctl.analyze.records.window import begin_of
from flowctl.analyze.viewers import experience
from flowctl.analyze.viewers.experience import SKETCH_K
from flowctl.analyze.viewers.sessions import lasting, seen_sessions
from flowctl.records.telemetry.schema import STATE_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from flowctl.analyze.job import Parts, Records

MINUTE_US: Final = 60_000_000
KEYS: Final = ("app", "stream", "node", "minute")
_SUMS: Final = (
    *("viewers_seen", "joins", "leaves", "us", "sampled_us", "known_us", "shown_us"),
    *(f"{name}_us" for name in STATE_NAMES),
    *("accepted_messages", "dropped_messages", "sent_bytes", "missed"),
)
_OF_STREAM: Final = {"app": "string", "stream": "string", "node": "string", "minute": "timestamp"}
PART_COLUMNS: Final[dict[str, str]] = {
    **_OF_STREAM, "span": "int", **dict.fromkeys((*_SUMS, "first_us", "last_us"), "bigint"), "delays": "binary",
}  # fmt: skip
"""A row is of one minute, or stands for each of `span` minutes from `minute` on."""
STREAM_COLUMNS: Final[dict[str, str]] = {
    **_OF_STREAM,
    **dict.fromkeys(("viewers", "first_s", "last_s"), "double"),
    "viewers_seen": "bigint",
    **{f"share_{name}": "double" for name in STATE_NAMES},
    **{f"delay_{name}_ms": "double" for name in ("p50", "p95", "p99")},
    **dict.fromkeys(("accepted_messages", "dropped_messages"), "bigint"),
    **dict.fromkeys(("drop_ratio", "picture_share"), "double"),
    **dict.fromkeys(("sent_bytes", "joins", "leaves"), "bigint"),
    "source": "string",
}
"""Contract of ``fleet_streams``. Grain: one stream, node and minute. `viewers`: mean by time; `first_s`, `last_s`: from
when until when in the minute anybody watched."""
SUBNET_COLUMNS: Final[dict[str, str]] = {"subnet": "string", **experience.FIGURES}
"""Contract of ``fleet_subnets``. Grain: one /24 or /48; "": addresses that are hashes."""


def viewer_minutes(sessions: DataFrame, hours: Sequence[int], *, sampled: bool = False) -> DataFrame:
    """Return the viewer minutes of sessions: those without samples, which are there of these hours, or of all."""
    values = {"hours": hours or (-1,), "sampled": sampled, "minute_us": MINUTE_US}
    return query("viewers/session_minutes", {"sessions": sessions}, **values)


def minutes(records: Records, _: Any = None) -> DataFrame:
    hours = [int(begin_of(hour).timestamp()) // 3600 for hour in records.hours("flow_samples")]
    rows = viewer_minutes(seen_sessions(records), hours)
    if hours:
        covered = query("records/covered", {"samples": records.table("flow_samples")}, window_us=MINUTE_US)
        sampled = query("viewers/sampled_minutes", {"covered": covered}, minute_us=MINUTE_US)
        rows = run_text("SELECT * FROM rows UNION ALL SELECT * FROM sampled", {"rows": rows, "sampled": sampled})
    return query("viewers/minutes", {"viewer_minutes": rows}, sketch_k=SKETCH_K)


def streams(parts: Parts) -> DataFrame:
    """Return the table ``fleet_streams``: `STREAM_COLUMNS`, and `missed`, viewers whose samples are not there."""
    sampled = any(account["table"] == "flow_samples" and account["rows_out"] for account in parts.accounts)
    still = run_text("SELECT *, '' AS date, '' AS hour FROM still", {"still": lasting(parts)})
    there = viewer_minutes(still, (), sampled=sampled)
    still = query("viewers/minutes", {"viewer_minutes": there}, sketch_k=SKETCH_K)
    columns = ", ".join(PART_COLUMNS)
    text = f"SELECT {columns} FROM kept UNION ALL SELECT {columns} FROM still"
    kept = run_text(text, {"kept": parts.table("minutes"), "still": still})
    return query("viewers/fleet_streams", {"minutes": kept}, minute_us=MINUTE_US)


def answer(parts: Parts, _: Any = None) -> JobAnswer:
    networks = {"networks": experience.by_value(parts, ["network"])}
    minutes = streams(parts).persist()
    parts.write("fleet_streams", minutes, STREAM_COLUMNS)
    parts.write("fleet_subnets", run_text("SELECT *, key AS subnet FROM networks", networks), SUBNET_COLUMNS)
    inputs = {"minutes": minutes, "networks": parts.result("fleet_subnets")}
    text = """SELECT * FROM (SELECT count(*) AS minutes, sum(missed) AS missed FROM minutes)
        CROSS JOIN (SELECT count(*) AS networks FROM networks)"""
    (told,) = run_text(text, inputs).collect()
    summary = {name: told[name] for name in inputs}
    if not (lost := told["missed"]):
        return JobAnswer(summary=summary)
    line = f"samples of {lost} viewers are not there: their minutes are their sessions', spread evenly"
    return JobAnswer(summary=summary, warnings=[line])


JOB: Final = AnalysisJob(
    name="fleet",
    parts=(JobPart("minutes", PART_COLUMNS, minutes, ("flow_closes", "flow_samples"), version=4),),
    uses=("sessions", "open_sessions", "felt"),
    results=("fleet_streams", "fleet_subnets"),
    answer=answer,
)
