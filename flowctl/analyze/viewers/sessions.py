"""``sessions``: one row per connection, with what it was, how long it was in which state, what it lost, and why.

A session is one row of `flow_closes`, projected: no aggregation, no join. It has who that was, what is computed, and
what jobs read later; the rest of the record is a join away (docs/pipeline.md), and written once. A connection that is
still open has its latest row of `flow_opens` instead (`closed_by` is ``open``), as long as no close of it is there.
What the records do not say is null, not 100 %. Words are those of CTA-2066.

`blame` is what the server found while it lagged, by the whole of each lag (`flowctl.core.sending.blame`): shares are of
that time (`lag_*`). ``server_loop``: its turns came late; ``publisher_burst``: more was published at once than a line
that carries the stream could take;
``policy``: of what is left, the share of drops that nothing forced, or all of it where one message took the viewer from
READY to HARD_LIMIT; ``viewer_link``: the rest. Without samples the first two are 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from flowctl.analyze.job import AnalysisJob, JobAnswer, JobPart
from flowctl.analyze.models import query, run_text
from flowctl.records.telemetry.schema import CONN_NUMBER_BITS, OPENS_EVERY_S, STATE_NAMES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flowctl.analyze.job import Parts, Records

TROUBLE_MS: Final = 1_000.0
"""Trouble shorter than this is covered by the player's buffer and is no trouble."""
TROUBLE_SHARE: Final = 0.01
"""Share of a session that may be trouble all the same: of a long one, flickers of a second in 100 s are none."""
BLAMES: Final = ("viewer_link", "server_loop", "publisher_burst", "policy")
"""Causes of trouble; the first of those with equal shares is blamed."""
KEYS: Final = ("node", "conn_id")
RECORD: Final = (*KEYS, "seq")
"""Columns that identify one row of a table of records."""
MOST_BROADCAST: Final = 500_000
"""Most row names that are broadcast to every task: 130 octets each, of the 2 GiB of the driver."""
_CLOSED: Final = 1 << 62
"""Stands for `seq` in the row of a close: beyond every real one."""
LEAST_PLAY_S: Final = 1.0
"""Shortest play with a rate: a shorter one had little but the group of pictures that everybody is given at once."""

COLUMNS: Final[dict[str, str]] = {
    "node": "string",
    "conn_id": "bigint",
    "opened_at": "timestamp",
    "closed_at": "timestamp",
    **dict.fromkeys(("peer_ip", "role", "app", "stream", "agent", "close_reason", "closed_by"), "string"),
    **dict.fromkeys(("start_failure", "worst_state", "blame"), "string"),
    "exit_before_start": "boolean",
    **dict.fromkeys(("duration_s", "play_s", "asked_ms", "startup_ms", "first_frame_ms"), "double"),
    **dict.fromkeys(("recover_mean_ms", "trouble_ms"), "double"),
    **dict.fromkeys(("accepted_messages", "dropped_messages", "pictures_wanted"), "bigint"),
    **dict.fromkeys(("picture_share", "line_of_stream", "bit_rate", "frames_per_s", "target_delay_ms"), "double"),
    **{f"delay_{name}_ms": "double" for name in ("p50", "p95", "p99")},
    **dict.fromkeys(("sampled_ms", "late_share", "stall_ratio"), "double"),
    **{f"blame_share_{name}": "double" for name in BLAMES},
    **dict.fromkeys(("ingest_bytes", "ingest_pictures", "ingest_key_frames", "ingest_audio", "gap_count"), "bigint"),
    **dict.fromkeys(("key_interval_ms", "key_interval_max_ms", "gap_ms", "gap_max_ms", "jitter_ms"), "double"),
    **dict.fromkeys(("renditions", "why_smaller"), "string"),
    **dict.fromkeys(("set_s", "smaller_rendition_share"), "double"),
    "switches": "bigint",
}
"""The contract of the table: columns and their types of Spark, in order. Grain: one connection."""
OPEN_COLUMNS: Final[dict[str, str]] = {**COLUMNS, "seen_at": "timestamp"}
"""Columns of open connections: the same, `closed_at` and `close_reason` null, and the time of the row."""
MADE_COLUMNS: Final[dict[str, str]] = {
    **OPEN_COLUMNS,
    **{f"time_{name}_ms": "double" for name in STATE_NAMES},
    **dict.fromkeys(("sent_bytes", "pictures_sent", "stall_count", "samples_count"), "bigint"),
}
"""Columns that ``sessions.sql`` gives, kept of those that are open: sums over viewers are made of these too."""


def projected(closes: DataFrame) -> DataFrame:
    """Make sessions (`MADE_COLUMNS`, `date` and `hour`) of closes, or of rows of `flow_opens`, one per connection."""
    marks = {"trouble_ms": TROUBLE_MS, "trouble_share": TROUBLE_SHARE, "least_play_s": LEAST_PLAY_S}
    return query("viewers/sessions", {"closes": closes}, **marks)


def seen_sessions(records: Records, _: Any = None) -> DataFrame:
    return projected(records.table("flow_closes"))


def open_sessions(records: Records, _: Any = None) -> DataFrame:
    """Make the sessions that were open in some hours and did not close in the same: one per hour, `MADE_COLUMNS`."""
    opens = records.table("flow_opens")
    return projected(among(opens, left_open(opens, records.table("flow_closes"))))


def left_open(opens: DataFrame, closes: DataFrame) -> DataFrame:
    """Return `RECORD` of the latest row of each connection and hour that did not close in it."""
    text = """SELECT node, conn_id, max(seq) AS seq FROM (
        SELECT node, conn_id, date, hour, seq FROM opens UNION ALL SELECT node, conn_id, date, hour, :closed FROM closes
    ) GROUP BY node, conn_id, date, hour HAVING max(seq) < :closed"""
    return run_text(text, {"opens": opens, "closes": closes}, closed=_CLOSED)


def among(rows: DataFrame, wanted: DataFrame) -> DataFrame:
    """Return the rows whose `RECORD` is in `wanted`; if these are few, no other column of the rest is read."""
    wanted = wanted.persist()
    ((count,),) = run_text("SELECT count(*) AS count FROM wanted", {"wanted": wanted}).collect()
    # What is made of them is made behind a shuffle of these few: in one stage with the search it took a third longer.
    hints = "/*+ BROADCAST(wanted), REPARTITION(date, hour) */" if count <= MOST_BROADCAST else ""
    text = f"SELECT {hints} * FROM rows LEFT SEMI JOIN wanted USING ({', '.join(RECORD)})"
    return run_text(text, {"rows": rows, "wanted": wanted})


def still_open(parts: Parts) -> DataFrame:
    """Return the connections of the window that were open when last heard of, one row each.

    They have `MADE_COLUMNS`, and `until`: when each ended, as far as that is known. This query says so, and `ended_us`.
    """
    inputs = {name: parts.table(name) for name in ("sessions", "open_sessions")}
    heard = parts.spark.createDataFrame([*parts.heard.items()], "node string, heard_at timestamp")
    newest_us = 0 if parts.newest is None else round(parts.newest.timestamp() * 1e6)
    marks = {"number_bits": CONN_NUMBER_BITS, "every_s": int(OPENS_EVERY_S), "newest_us": newest_us}
    rows = query("viewers/still_open", {**inputs, "heard": heard}, **marks)
    # Few are found here: to plan the search in each query of Spark takes longer.
    if parts.small and (found := rows.toArrow()).num_rows:
        return parts.spark.createDataFrame(found)
    return rows.persist()  # Spark Connect makes no frame of a table without rows


def ended_us(seen_us: Any, heard_us: Any, next_life_us: Any) -> Any:
    """Return `until` of ``still_open.sql`` for arrays, in microseconds, where the rest of that query is no SQL."""
    import numpy as np

    return np.maximum(seen_us, np.minimum(np.minimum(seen_us + OPENS_EVERY_S * 1e6, heard_us), next_life_us))


def lasting(parts: Parts) -> DataFrame:
    """Return `still_open` with `seen_at` and `play_s` as if the last row had come when the connection ended."""
    text = """SELECT * EXCEPT (seen_at, play_s, until), until AS seen_at,
        play_s + (unix_micros(until) - unix_micros(seen_at)) / 1e6 AS play_s FROM still"""
    return run_text(text, {"still": still_open(parts)})


def answer(parts: Parts, _: Any = None) -> JobAnswer:
    still = still_open(parts)
    parts.write("sessions_open", still, OPEN_COLUMNS)
    text = """SELECT blame, count(*) AS sessions, count_if(closed_by = 'open') AS open,
        count_if(peer_ip IS NULL) AS without_address
        FROM (SELECT blame, closed_by, peer_ip FROM sessions UNION ALL SELECT blame, closed_by, peer_ip FROM still)
        GROUP BY blame ORDER BY blame"""
    rows = run_text(text, {"sessions": parts.table("sessions"), "still": still}).collect()  # five at most
    figures = ("sessions", "open", "without_address")
    summary: dict[str, Any] = {name: sum(row[name] for row in rows) for name in figures}
    summary["in_trouble"] = sum(row["sessions"] for row in rows if row["blame"] != "none")
    return JobAnswer(summary={**summary, "blame": {row["blame"]: row["sessions"] for row in rows}})


JOB: Final = AnalysisJob(
    name="sessions",
    parts=(
        JobPart("sessions", COLUMNS, seen_sessions, ("flow_closes",), result=True),
        JobPart("open_sessions", MADE_COLUMNS, open_sessions, ("flow_opens", "flow_closes")),
    ),
    results=("sessions", "sessions_open"),
    answer=answer,
)
