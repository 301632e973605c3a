"""``sessions``: one row per connection, with what it was, how long it was in which state, what it lost, and why.

A session is one row of `flow_closes`, projected: no aggregation, no join, no text taken apart. A connection that is
still open has its latest row of `flow_opens` instead (`closed_by` is ``open``), as long as no close of it is there.
What the records do not say is null, not 100 %. Words are those of CTA-2066.

`blame` is what the server found while it lagged, by the whole of each lag (`flowctl.core.sending.blame`): shares are of
that time (`lag_*`). ``server_loop``: its turns came late; ``publisher_burst``: more was published at once than a line
that carries the stream could take;
``policy``: of what is left, the share of drops that nothing forced, or all of it where one message took the viewer from
READY to HARD_LIMIT; ``viewer_link``: the rest. Without samples the first two are 0.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from flowctl.analyze.engine import DUCKDB, Window, running
from flowctl.analyze.engine import functions as f
from flowctl.analyze.job import AnalysisJob, JobAnswer, JobPart
from flowctl.analyze.records.expressions import added, not_negative, share, zero
from flowctl.reasons import SLOW_ENDS, CloseReason
from flowctl.records.telemetry.schema import CLASS_NAMES, STATE_NAMES, VIEWING, RecordedRole

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    from flowctl.analyze.job import Parts, Records

TROUBLE_MS: Final = 1_000.0
"""Trouble shorter than this is covered by the player's buffer and is no trouble."""
TROUBLE_SHARE: Final = 0.01
"""Share of a session that may be trouble all the same: of a long one, flickers of a second in 100 s are none."""
BLAMES: Final = ("viewer_link", "server_loop", "publisher_burst", "policy")
"""Causes of trouble; the first of those with equal shares is blamed."""
UNFORCED_KINDS: Final = ("dropped_by_closed", "dropped_by_unfollowed", "dropped_by_requested")
"""Columns of drops that neither slowness nor policy caused: the peer or the application did not want the messages."""


def troubled(trouble_ms: Column) -> Column:
    """Return whether the connection of a close was in trouble, of which the close tells `trouble_ms`; never null."""
    long = f.greatest(f.lit(TROUBLE_MS), TROUBLE_SHARE * 1e3 * f.col("duration_s"))
    limits = added(("episodes_soft", "episodes_hard"))
    return (
        (limits > 0)
        | (f.greatest(trouble_ms, zero("stall_ms")) > long)
        | ((limits + zero("episodes_overloaded") > 0) & (zero("lost_messages") > 0))
        | f.coalesce(f.col("reason").isin(*SLOW_ENDS), f.lit(False))
    )


def causes(trouble_ms: Column, dropped_messages: Column) -> dict[str, Column]:
    """Return, over a close, the parts of `shares`: whether it was in trouble, and what spoke for each cause."""
    unforced = share(zero("unforced_drops"), f.greatest(f.lit(0), dropped_messages - added(UNFORCED_KINDS)))
    return {
        "b_any": f.when(troubled(trouble_ms), 1.0).otherwise(0.0),
        "b_server": f.coalesce(share(f.col("lag_server_ms"), f.col("lag_ms")), f.lit(0.0)),
        "b_burst": f.coalesce(share(f.col("lag_burst_ms"), f.col("lag_ms")), f.lit(0.0)),
        "b_unforced": f.when(zero("hard_at_once") > 0, 1.0).otherwise(f.coalesce(unforced, f.lit(0.0))),
    }


def shares() -> dict[str, Column]:
    there, server, burst, unforced = map(f.col, ("b_any", "b_server", "b_burst", "b_unforced"))
    rest = there * f.greatest(1 - server - burst, f.lit(0.0))
    parts = (rest * (1 - unforced), there * server, there * burst, rest * unforced)
    largest = f.greatest(*parts)
    named = f.coalesce(*(f.when(part == largest, f.lit(name)) for name, part in zip(BLAMES, parts, strict=True)))
    found = {f"blame_share_{name}": part for name, part in zip(BLAMES, parts, strict=True)}
    return found | {"blame": f.when(there == 0, f.lit("none")).otherwise(named)}


KEYS: Final = ("node", "conn_id")
RECORD: Final = (*KEYS, "seq")
"""Columns that identify one row of a table of records."""
MOST_BROADCAST: Final = 500_000
"""Most row names that are broadcast to every task: 130 octets each, of the 2 GiB of the driver."""
_CLOSED: Final = 1 << 62
"""Stands for `seq` in the row of a close: beyond every real one."""
BY_PEER: Final = (CloseReason.PEER_CLOSED.value, CloseReason.PEER_RESET.value)
"""Reasons of a close that was the peer's doing; all others are ours."""
LEAST_PLAY_S: Final = 1.0
"""Shortest play with a rate: a shorter one had little but the group of pictures that everybody is given at once."""
WORST_STATES: Final = ("READY", "OVERLOADED", "SOFT_LIMIT", "HARD_LIMIT")

COLUMNS: Final[dict[str, str]] = {
    "node": "string",
    "conn_id": "bigint",
    "opened_at": "timestamp",
    "closed_at": "timestamp",
    **dict.fromkeys(("peer_ip", "role", "app", "stream", "agent", "close_reason", "closed_by", "limit_name"), "string"),
    **dict.fromkeys(("start_failure", "worst_state", "blame"), "string"),
    "exit_before_start": "boolean",
    **dict.fromkeys(("duration_s", "play_s", "handshake_ms", "asked_ms", "startup_ms", "first_frame_ms"), "double"),
    **{f"time_{name}_ms": "double" for name in STATE_NAMES},
    **{f"episodes_{name}": "bigint" for name in STATE_NAMES[1:]},
    **dict.fromkeys(("recover_mean_ms", "recover_max_ms", "trouble_ms"), "double"),
    **dict.fromkeys(("recoveries", "episodes_late", "returns_to_live", "input_pauses", "limit_hits"), "bigint"),
    **dict.fromkeys(("peer_port", "sent_bytes", "dropped_messages", "dropped_bytes"), "bigint"),
    **{f"{what}_messages_{name}": "bigint" for what in ("dropped", "accepted") for name in CLASS_NAMES},
    **dict.fromkeys(("pictures_wanted", "pictures_sent", "stall_count", "events_count", "samples_count"), "bigint"),
    **dict.fromkeys(("picture_share", "line_of_stream", "bit_rate", "frames_per_s", "target_delay_ms"), "double"),
    **{f"delay_{name}_ms": "double" for name in ("p50", "p95", "p99", "max")},
    **dict.fromkeys(("sampled_ms", "late_ms", "late_share", "stall_ms", "stall_ratio"), "double"),
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


@functools.lru_cache(maxsize=4)
def projected(closes: DataFrame) -> DataFrame:
    """Make sessions (`OPEN_COLUMNS`, `date` and `hour`) of closes, or of rows of `flow_opens`, one per connection.

    Every quotient is null where there is nothing to divide by. Asked for twice, it is the same frame: to describe a
    hundred columns to Java takes as long as small data do.
    """
    judged = closes.filter(f.col("conn_id") != 0).withColumns(_columns())
    return judged.withColumns(shares() | _of_sets()).select(*OPEN_COLUMNS, "date", "hour")


def _columns() -> dict[str, Column]:
    """Return the columns that a close lacks; in one step, as each step copies every column of every row."""
    ended = f.col("reason").isNotNull()
    by_peer = f.col("reason").isin(*BY_PEER)
    never = f.col("asked_ms").isNotNull() & f.col("startup_ms").isNull()
    failed = never & (f.col("refusal").isNotNull() | (ended & ~by_peer))
    publishes = f.col("role") == RecordedRole.PUBLISH.value
    play_s = not_negative(f.col("duration_s") - f.col("startup_ms") / 1e3)
    rated = f.when(play_s >= LEAST_PLAY_S, play_s)
    worst = zip(("episodes_hard", "episodes_soft", "episodes_overloaded"), WORST_STATES[:0:-1], strict=True)
    carried = f.when(publishes, f.col("ingest_bytes")).otherwise(f.col("sent_bytes"))
    pictures = f.when(publishes, f.col("ingest_pictures")).otherwise(f.col("pictures_sent"))
    dropped = added(f"dropped_messages_{name}" for name in CLASS_NAMES)
    trouble_ms = f.greatest(added(f"time_{name}_ms" for name in STATE_NAMES[1:]), zero("trouble_ms"))
    return {
        "seen_at": f.col("ts"),
        "closed_at": f.when(ended, f.col("ts")),
        "close_reason": f.col("reason"),
        "closed_by": f.when(~ended, "open").when(by_peer, "peer").otherwise("server"),
        "play_s": play_s,
        "first_frame_ms": not_negative(f.col("startup_ms") - f.col("asked_ms")),
        # Why its request failed, if that was our doing: the refusal, else the code, else the close reason.
        "start_failure": f.when(failed, f.coalesce("refusal", "code", "reason")),
        "exit_before_start": never & ~failed & ended,
        "recover_mean_ms": f.try_divide("recover_ms", "recoveries"),
        "dropped_messages": dropped,
        "picture_share": share(f.col("pictures_sent"), f.col("pictures_wanted")),
        "line_of_stream": f.try_divide("line_bytes", "line_stream_bytes"),
        "late_share": f.when(f.col("target_delay_ms").isNotNull(), share(f.col("late_ms"), f.col("sampled_ms"))),
        "episodes_late": f.col("late_episodes"),
        "returns_to_live": f.col("returns"),
        "worst_state": f.coalesce(*(f.when(f.col(name) > 0, state) for name, state in worst), f.lit(WORST_STATES[0])),
        "trouble_ms": trouble_ms,
        "bit_rate": f.try_divide(carried * 8, rated),
        "frames_per_s": f.try_divide(pictures, rated),
        "stall_ratio": share(f.col("stall_ms"), play_s * 1e3),
        **causes(trouble_ms, dropped),
    }


def _of_sets() -> dict[str, Column]:
    """Return what follows from the time in each rendition.

    In the last step: Spark makes no method of a whole step with a function such as `aggregate`, and one that writes a
    hundred columns takes Java up to a minute to compile.
    """
    stays = f.map_values(f.from_json("renditions", "map<string,double>"))
    told_s = not_negative(f.aggregate(stays, f.lit(0.0), lambda so_far, one: so_far + one))
    set_s = f.when(told_s > f.col("duration_s"), f.col("duration_s")).otherwise(told_s)
    return {"set_s": set_s, "smaller_rendition_share": share(f.col("smaller_ms"), set_s * 1e3)}


def viewing() -> Column:
    """Return whether a session is that of a viewer: one that watches, or asked and was given nothing."""
    unknown = f.coalesce(f.col("role"), f.lit(RecordedRole.UNKNOWN.value)) == RecordedRole.UNKNOWN.value
    return f.coalesce(f.col("role").isin(*VIEWING), f.lit(False)) | (unknown & f.col("asked_ms").isNotNull())


def seen_sessions(records: Records, _: Any = None) -> DataFrame:
    return projected(records.table("flow_closes"))


def open_sessions(records: Records, _: Any = None) -> DataFrame:
    """Make the sessions that were open in some hours and did not close in the same: one per hour, `OPEN_COLUMNS`."""
    opens = records.table("flow_opens")
    return projected(among(opens, left_open(opens, records.table("flow_closes"))))


def left_open(opens: DataFrame, closes: DataFrame) -> DataFrame:
    """Return `RECORD` of the latest row of each connection and hour that did not close in it."""
    by_hour = (*KEYS, "date", "hour")
    keys = opens.select(*by_hour, "seq").union(closes.select(*by_hour, f.lit(_CLOSED)))
    return keys.groupBy(*by_hour).agg(f.max("seq").alias("seq")).filter(f.col("seq") < _CLOSED).select(*RECORD)


def among(rows: DataFrame, wanted: DataFrame) -> DataFrame:
    """Return the rows whose `RECORD` is in `wanted`; if these are few, no other column of the rest is read."""
    wanted = wanted.persist()
    few = wanted.count() <= MOST_BROADCAST
    found = rows.join(f.broadcast(wanted) if few else wanted, list(RECORD), "left_semi")
    # What is made of them is made behind a shuffle of these few: in one stage with the search it took a third longer.
    return found.repartition("date", "hour") if few else found


def still_open(parts: Parts) -> DataFrame:
    """Return the connections of the window that were open when last heard of, one row each: `OPEN_COLUMNS`.

    Of all that have closed those that were open at the end of an hour, which are few, are looked for first. Where data
    are small they are found here: to plan the search in each query of Spark takes longer.
    """
    if parts.small and running() != DUCKDB:
        return parts.spark.createDataFrame(_still_open(parts))
    last = Window.partitionBy(*KEYS).orderBy(f.desc("seen_at"))
    rows = parts.table("open_sessions").select(*OPEN_COLUMNS)
    closed = parts.table("sessions").select(*KEYS).join(rows.select(*KEYS), list(KEYS), "left_semi")
    rows = rows.join(closed, list(KEYS), "left_anti").withColumn("_rank", f.row_number().over(last))
    return rows.filter(f.col("_rank") == 1).drop("_rank").persist()


def _still_open(parts: Parts) -> pa.Table:
    """Return the rows of `still_open`, without Spark."""
    import pyarrow as pa

    rows = parts.arrow("open_sessions", [*OPEN_COLUMNS]).sort_by("seen_at")
    closed = parts.arrow("sessions", KEYS)
    of_rows, gone = (zip(*(table[name].to_pylist() for name in KEYS), strict=True) for table in (rows, closed))
    latest = {key: place for place, key in enumerate(of_rows)}
    for key in gone:
        latest.pop(key, None)
    return rows.take(pa.array(sorted(latest.values()), pa.int64()))


def answer(parts: Parts, _: Any = None) -> JobAnswer:
    still, columns = still_open(parts), ("blame", "closed_by", "peer_ip")
    parts.write("sessions_open", still, OPEN_COLUMNS)
    both = parts.table("sessions").select(*columns).unionByName(still.select(*columns))
    counted = both.groupBy("blame").agg(  # five rows at most, and all figures in one pass
        f.count("*").alias("sessions"),
        f.count_if(f.col("closed_by") == "open").alias("open"),
        f.count_if(f.col("peer_ip").isNull()).alias("without_address"),
    )
    rows = sorted(counted.collect())
    summary: dict[str, Any] = {name: sum(row[name] for row in rows) for name in counted.columns[1:]}
    summary["in_trouble"] = sum(row["sessions"] for row in rows if row["blame"] != "none")
    return JobAnswer(summary={**summary, "blame": {row["blame"]: row["sessions"] for row in rows}})


JOB: Final = AnalysisJob(
    name="sessions",
    parts=(
        JobPart("sessions", COLUMNS, seen_sessions, ("flow_closes",), result=True),
        JobPart("open_sessions", OPEN_COLUMNS, open_sessions, ("flow_opens", "flow_closes")),
    ),
    results=("sessions", "sessions_open"),
    answer=answer,
)
