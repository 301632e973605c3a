"""``sessions``: one row per connection, with what it was, how long it was in which state, what it lost, and why.

Theory of operation. Events are summed up per connection in one hash aggregation of numbers (`session_parts`); samples
likewise, where there are any. The sums are joined with the one record that names the connection best, its close as a
rule, whose `detail` has the totals by class. Times in states are plain sums, because a change of state says how long
the state before had lasted. All of it is built-in functions: no window, no Python, nothing collected.

What a session cannot know: of a connection that was open before the records begin, what came before; of one that is
still open, its close and the time since its last change of state (`closed_by` is ``open``, times end with the last
event). A connection of which only events in the middle are there has no address.

What a viewer got is told in shares: `picture_share` is of the pictures that were published for it, without those that
were queued when it left or that it had muted; `line_of_stream` is what its line carries, of the rate of the stream,
over the samples in which it was in trouble and always had something waiting. Both are null where the records do not
say, which is not 100 %.

Words of quality of experience as in CTA-2066: startup_ms is its video startup time, stall_ratio its rebuffering
ratio (stalled time over play time), exit_before_start its exits before video start. What is called a stall here is seen
from the server: the peer takes nothing while something waits. A player that plays from its buffer meanwhile shows none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.errors import ConfigError
from flowctl.pipeline.jobs import blame
from flowctl.pipeline.jobs.session_parts import (
    KEYS,
    NOTHING_DROPPED,
    STATE_WORDS,
    detail_ddl,
    dropped_sql,
    event_sums,
    leaving_sums,
    picture_share_sql,
    pictures_not_missed_sql,
    sample_sums,
    telling_records,
)
from flowctl.pipeline.spark.session import partitions_for
from flowctl.pipeline.tables import delays
from flowctl.pipeline.tables.accounts import JobResult
from flowctl.pipeline.tables.io import Input, read_optional, read_table, write_quarantine, write_table
from flowctl.pipeline.tables.overlaps import TWICE, TWICE_HINT
from flowctl.telemetry.schema import CLASS_NAMES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BY_PEER: Final = ("peer closed", "peer reset")
"""Reasons of a close that was the peer's doing; all others are ours."""

COLUMNS: Final[dict[str, str]] = {
    "node": "string",
    "conn_id": "bigint",
    "peer_ip": "string",
    "peer_port": "bigint",
    "role": "string",
    "app": "string",
    "stream": "string",
    "user_agent": "string",
    "opened_at": "timestamp",
    "closed_at": "timestamp",
    "duration_s": "double",
    "close_reason": "string",
    "closed_by": "string",
    "handshake_ms": "double",
    **{f"time_{name}_ms": "double" for name in ("ready", "overloaded", "soft", "hard")},
    **{f"episodes_{name}": "bigint" for name in ("overloaded", "soft", "hard")},
    "recoveries": "bigint",
    "recover_mean_ms": "double",
    "recover_max_ms": "double",
    "sent_bytes": "bigint",
    "dropped_messages": "bigint",
    "dropped_bytes": "bigint",
    **{f"dropped_messages_{name}": "bigint" for name in CLASS_NAMES},
    **{f"accepted_messages_{name}": "bigint" for name in CLASS_NAMES},
    "picture_share": "double",
    "line_of_stream": "double",
    "episodes_late": "bigint",
    **{f"delay_{name}_ms": "double" for name in ("p50", "p95", "p99", "max")},
    "stall_count": "bigint",
    "stall_ms": "double",
    "stall_ratio": "double",
    "startup_ms": "double",
    "exit_before_start": "boolean",
    "input_pauses": "bigint",
    "limit_hits": "bigint",
    "returns_to_live": "bigint",
    "worst_state": "string",
    "blame": "string",
    **{f"blame_share_{name}": "double" for name in blame.BLAMES},
    "events_count": "bigint",
    "samples_count": "bigint",
}
"""The contract of the table: columns and their types of Spark, in order. Grain: one connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsOptions:
    """Options of the job.

    Args:
        samples: whether `flow_samples` are used where there are any; without them delays are those of viewers in
            trouble only, and stalls and two kinds of blame are not seen.
    """

    samples: bool = True


def sessions(events: DataFrame, samples: DataFrame | None = None) -> DataFrame:
    """Make sessions of events.

    Args:
        events: rows of `flow_events` that passed the checks.
        samples: rows of `flow_samples` that did. None: there are none.

    Returns:
        One row per connection, `COLUMNS`.
    """
    sampled = None
    if samples is not None:
        sampled = sample_sums(samples).join(leaving_sums(events, samples), list(KEYS), "left")
    return finished(event_sums(events), telling_records(events), sampled)


def finished(sums: DataFrame, telling: DataFrame, sampled: DataFrame | None) -> DataFrame:
    """Put the parts together.

    Args:
        sums: see `event_sums`.
        telling: see `telling_records`.
        sampled: see `sample_sums` and `leaving_sums`. None: there are none.

    Returns:
        One row per connection, `COLUMNS`.
    """
    frame = sums.filter(f.col("conn_id") != 0).join(telling.hint("shuffle_hash"), [*KEYS, "best"], "left")
    if sampled is None:
        frame = frame.withColumns({name: f.lit(None).cast(kind) for name, kind in _NO_SAMPLES.items()})
    else:
        frame = frame.join(sampled, list(KEYS), "left")
    frame = frame.withColumns(
        {
            "told": f.from_json("detail", detail_ddl()),
            # Most close without a drop: adding up some sixty counts that are not there costs more than to parse.
            "nothing_dropped": f.expr(NOTHING_DROPPED),
        }
    )
    for step in _steps(sampled=sampled is not None):
        frame = frame.withColumns({name: f.expr(text) for name, text in step.items()})
    return frame.select(*(f.col(name).cast(kind).alias(name) for name, kind in COLUMNS.items()))


_NO_SAMPLES: Final = {
    **dict.fromkeys(("s_rows", "s_accepted_bytes", "l_accepted_bytes", "s_stall_count"), "bigint"),
    **dict.fromkeys(("s_dropped_messages", "s_unforced_drops", "s_line", "s_line_stream"), "bigint"),
    **dict.fromkeys(("s_ms", "s_trouble_ms", "l_ms", "l_ours_ms", "s_stall_ms", "s_delay_max_ms"), "double"),
    **{f"s_accepted_{name}": "bigint" for name in CLASS_NAMES},
    **{f"s_dropped_{name}": "bigint" for name in CLASS_NAMES},
}


def _steps(*, sampled: bool) -> list[dict[str, str]]:
    """Return the columns of the result, in steps that build on each other: name -> expression in Spark's SQL."""
    states = [(state, name) for name, state in STATE_WORDS.items()]
    began = "coalesce(opened_ts, first_ts)"
    since = f"coalesce(last_edge, shiftleft(unix_micros({began}), 2))"
    by_peer = ", ".join(f"'{reason}'" for reason in BY_PEER)
    first = {
        "user_agent": "told.agent",
        "opened_at": began,
        "closed_at": "closed_ts",
        # Of the monotonic clock, where it is told: that on the wall can be set back meanwhile.
        "duration_s": (
            f"coalesce(told.connected_s, greatest(0D, (unix_micros(coalesce(closed_ts, last_ts)) "
            f"- unix_micros({began})) / 1e6D))"
        ),
        "closed_by": (
            f"CASE WHEN closed_ts IS NULL THEN 'open' WHEN close_reason IN ({by_peer}) THEN 'peer' ELSE 'server' END"
        ),
        # What the close says is exact also where edges were missed. An open connection is still in its last state.
        **{
            f"time_{name}_ms": "coalesce(CASE WHEN told.states_ms IS NOT NULL "
            f"THEN coalesce(told.states_ms.{state}, 0D) END, "
            f"coalesce({name}_ms, 0D) + CASE WHEN closed_ts IS NULL AND {since} & 3 = {rank}"
            f" THEN greatest(0D, (unix_micros(last_ts) - shiftright({since}, 2)) / 1e3D) ELSE 0D END)"
            for rank, (state, name) in enumerate(states)
        },
        "recover_mean_ms": "CASE WHEN recoveries_timed > 0 THEN recover_sum_ms / recoveries_timed END",
        "dropped_messages": "coalesce(closed_dropped_messages, seen_dropped_messages, 0L)",
        "dropped_bytes": "coalesce(closed_dropped_bytes, seen_dropped_bytes, 0L)",
        "sent_bytes": "coalesce(sent_bytes, 0L)",
        **{
            f"dropped_messages_{name}": f"CASE WHEN told.dropped IS NOT NULL THEN {dropped_sql(name)}"
            f" ELSE s_dropped_{name} END"
            for name in CLASS_NAMES
        },
        **{
            f"accepted_messages_{name}": "CASE WHEN told.accepted IS NOT NULL "
            f"THEN coalesce(told.accepted.`{name}`, 0L) ELSE s_accepted_{name} END"
            for name in CLASS_NAMES
        },
        "startup_ms": "coalesce(play_value_ms, CASE WHEN play_ts IS NOT NULL "
        f"THEN greatest(0D, (unix_micros(play_ts) - unix_micros({began})) / 1e3D) END)",
        "exit_before_start": "CASE WHEN role IN ('play', 'unknown') THEN play_ts IS NULL AND closed_ts IS NOT NULL "
        "ELSE false END",
        "worst_state": "element_at(array('READY', 'OVERLOADED', 'SOFT_LIMIT', 'HARD_LIMIT'), coalesce(worst, 0) + 1)",
        "stall_count": "s_stall_count",
        "events_count": "row_count",
        "samples_count": "s_rows",
        "stall_ms": "CASE WHEN s_rows IS NOT NULL THEN coalesce(s_stall_ms, 0D) END",
        **delays.totals("e", "e_delay_max_ms IS NOT NULL"),
        **(delays.totals("s", "s_delay_max_ms IS NOT NULL") if sampled else {}),
    }
    second = {
        "picture_share": picture_share_sql(f"CASE WHEN nothing_dropped THEN 0 ELSE {pictures_not_missed_sql()} END"),
        "line_of_stream": "CASE WHEN s_line_stream > 0 THEN s_line / 1e3D / s_line_stream END",
        "stall_ratio": "CASE WHEN duration_s * 1e3D > coalesce(startup_ms, 0D) AND stall_ms IS NOT NULL "
        "THEN least(1D, stall_ms / (duration_s * 1e3D - coalesce(startup_ms, 0D))) END",
        "lost_messages": blame.lost_sql(),
        "trouble_ms": "greatest(time_overloaded_ms + time_soft_ms + time_hard_ms, coalesce(s_trouble_ms, 0D))",
        **{f"delay_{name}_ms": _quantile(share, sampled=sampled) for name, share in _SHARES.items()},
        "delay_max_ms": "coalesce(s_delay_max_ms, e_delay_max_ms)",
    }
    return [first, second, *blame.shares_sql()]


_SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def _quantile(share: float, *, sampled: bool) -> str:
    """Return a quantile of the samples, or, for a connection without them, of the events."""
    own = delays.quantile_sql("e", share, "e_delay_max_ms")
    return f"coalesce({delays.quantile_sql('s', share, 's_delay_max_ms')}, {own})" if sampled else own


def run(spark: SparkSession, events: str, out: str, options: SessionsOptions | None = None) -> JobResult:
    """Read events and samples, and write the table ``sessions`` and what was put aside.

    Args:
        spark: session.
        events: folder that ``--events`` named.
        out: folder of the results.
        options: see `SessionsOptions`. None: all defaults.

    Raises:
        ConfigError: there are no events.
    """
    options = options or SessionsOptions()
    source = read_table(spark, events, "flow_events", count="later")
    sampled = read_optional(spark, events, "flow_samples", count="later") if options.samples else None
    usable = None if sampled is None or sampled.absent else sampled
    result = JobResult(name="sessions", accounts=[item.accounts for item in (source, sampled) if item is not None])
    with partitions_for(spark, sum(item.size_bytes for item in (source, sampled) if item is not None)):
        frame = sessions(source.frame, None if usable is None else usable.frame)
        path = result.outputs["sessions"] = write_table(frame, f"{out.rstrip('/')}/sessions", options=_PARQUET)
        written = spark.read.schema(_ddl()).parquet(path)
        counted = written.groupBy("blame").agg(  # five rows at most, and all figures in one pass
            f.count("*").alias("sessions"),
            f.sum("events_count").alias("events"),
            f.sum("samples_count").alias("samples"),
            f.count_if(f.col("closed_by") == "open").alias("open"),
            f.count_if(f.col("peer_ip").isNull() & f.col("close_reason").isNull()).alias("nameless"),
        )
        by_blame = {row["blame"]: row.asDict() for row in counted.collect()}
        whole = {name: sum(row[name] or 0 for row in by_blame.values()) for name in _COUNTED}
        _settle(source, whole["events"])
        if usable is not None:
            _settle_samples(usable, whole["samples"])
    for item in (source, sampled):
        if item is not None:
            result.outputs |= write_quarantine(spark, item, out)
    result.summary = {
        "sessions": whole["sessions"],
        "open": whole["open"],
        "in_trouble": sum(row["sessions"] for blamed, row in by_blame.items() if blamed != "none"),
        "blame": {blamed: by_blame[blamed]["sessions"] for blamed in sorted(by_blame)},
        "without_address": whole["nameless"],
    }
    return result


_COUNTED: Final = ("sessions", "events", "samples", "open", "nameless")
_PARQUET: Final = {"parquet.enable.dictionary": "false", "parquet.compression.codec.zstd.level": "1"}
"""Nearly every value of the table is another one: trying a dictionary for sixty columns took half of the time to write,
and zstd makes up for it (17 MB instead of 16 for 300,000 sessions)."""


def _ddl() -> str:
    return ", ".join(f"`{name}` {kind}" for name, kind in COLUMNS.items())


def _settle(source: Input, in_sessions: int) -> None:
    """Complete the accounts of events: those of sessions, counted by the job itself, and those of the server.

    Raises:
        ConfigError: the same records are there twice.
    """
    of_server = source.frame.filter(f.col("conn_id") == 0).count()
    if in_sessions + of_server > source.accounts.rows_in - source.accounts.rows_quarantined:
        # A close that is there twice makes its session twice, with all of its events each time.
        raise ConfigError(f"flow_events: {TWICE}", hint=TWICE_HINT)
    source.settle(in_sessions + of_server)


def _settle_samples(source: Input, in_sessions: int) -> None:
    """Complete the accounts of samples: those of connections without any event belong to no session, but were read."""
    known = source.accounts.rows_in - source.accounts.rows_quarantined
    source.settle(known if in_sessions == known else source.frame.count())
