"""The tables of `sessions` in DuckDB's SQL: the same results from the same files, written as one would write it there.

It is made by hand from what the columns mean (docs/pipeline.md), not translated from the job. Rows are checked first,
in a pass of their own, by the same checks: there has to be none that fails one.
"""

from __future__ import annotations

import time
from typing import Final

from flowctl.analyze.models import BY_PEER
from flowctl.analyze.records.checks import Check, checks_of
from flowctl.analyze.viewers.sessions import LEAST_PLAY_S, TROUBLE_MS, TROUBLE_SHARE
from flowctl.reasons import SLOW_ENDS
from flowctl.records.telemetry.schema import CLASS_NAMES

_STATES: Final = {"hard": "HARD_LIMIT", "soft": "SOFT_LIMIT", "overloaded": "OVERLOADED"}


def _words(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _share(part: str, whole: str) -> str:
    """Return a share, 1 at most; null where either is not known (`least` passes over nulls)."""
    return f"case when {part} / nullif({whole}, 0) > 1 then 1.0 else {part} / nullif({whole}, 0) end"


def _named() -> list[str]:
    """Return the columns that follow from one column or two."""
    peer, never = f"coalesce(reason in ({_words(BY_PEER)}), false)", "(asked_ms is not null and startup_ms is null)"
    failed = f"{never} and (refusal is not null or (reason is not null and not {peer}))"
    not_ready = " + ".join(f"coalesce(time_{name}_ms, 0)" for name in _STATES)
    worst = " ".join(f"when episodes_{name} > 0 then '{state}'" for name, state in _STATES.items())
    return [
        "ts as seen_at, case when reason is not null then ts end as closed_at, reason as close_reason",
        f"case when reason is null then 'open' when {peer} then 'peer' else 'server' end as closed_by",
        "case when startup_ms is not null then greatest(0, duration_s - startup_ms / 1e3) end as play_s",
        "case when startup_ms - asked_ms is not null then greatest(0, startup_ms - asked_ms) end as first_frame_ms",
        f"case when {failed} then coalesce(refusal, code, reason) end as start_failure",
        f"{never} and not ({failed}) and reason is not null as exit_before_start",
        "recover_ms / nullif(recoveries, 0) as recover_mean_ms",
        *(
            f"{' + '.join(f'coalesce({what}_messages_{name}, 0)' for name in CLASS_NAMES)} as {what}_messages"
            for what in ("dropped", "accepted")
        ),
        f"{_share('pictures_sent', 'pictures_wanted')} as picture_share",
        "line_bytes / nullif(line_stream_bytes, 0) as line_of_stream",
        f"case when target_delay_ms is not null then {_share('late_ms', 'sampled_ms')} end as late_share",
        f"case {worst} else 'READY' end as worst_state",
        f"greatest({not_ready}, coalesce(trouble_ms, 0)) as trouble_ms",
        *(f"coalesce({_share(f'lag_{name}_ms', 'lag_ms')}, 0) as b_{name}" for name in ("server", "burst")),
    ]


def _shares() -> list[str]:
    """Return what blame is made of."""
    unwanted = " + ".join(f"coalesce(dropped_by_{name}, 0)" for name in ("closed", "unfollowed", "requested"))
    unforced = _share("coalesce(unforced_drops, 0)", f"greatest(0, dropped_messages - ({unwanted}))")
    long = f"greatest({TROUBLE_MS}, {TROUBLE_SHARE} * duration_s * 1e3)"
    return [
        (
            f"(worst_state in ('SOFT_LIMIT', 'HARD_LIMIT') or greatest(trouble_ms, coalesce(stall_ms, 0)) > {long}"
            f" or (worst_state <> 'READY' and coalesce(lost_messages, 0) > 0)"
            f" or coalesce(close_reason in ({_words(SLOW_ENDS)}), false))::int::double as b_any"
        ),
        f"case when coalesce(hard_at_once, 0) > 0 then 1 else coalesce({unforced}, 0) end as b_unforced",
        f"case when play_s >= {LEAST_PLAY_S} then play_s end as rated_s",
        "least(duration_s, greatest(0, list_sum(map_values(renditions::json::map(varchar, double))))) as told_s",
        "case when renditions is not null then told_s end as set_s",
    ]


def _fails(check: Check) -> str:
    """Return whether a row fails a check, of a value that is not null."""
    name = f'"{check.column}"'  # `limit` is a word of SQL
    return {
        "null": f"{name} is null",
        "negative": f"{name} < 0",
        "too large": f"{name} > {check.high}",
        "no number": f"not abs({name}) <= {check.high}",
        "too old": f"epoch_us({name}) < {check.low}",
        "in the future": f"epoch_us({name}) > {check.high}",
        "not its hour": f"strftime({name}, '%Y-%m-%d %H') <> date || ' ' || hour",
        "unknown word": f"{name} not in ({_words(check.words)})",
    }[check.what]


def rows_of(events: str, table: str) -> str:
    """Return a table, as it stands in the clause ``from``."""
    return f"read_parquet('{events}/{table}/**/*.parquet', hive_partitioning = true, hive_types_autocast = false)"


def checks_sql(events: str, table: str) -> str:
    """Return the query for how many rows there are, and how many of them fail a check."""
    checks = (*checks_of(table, None, time.time_ns() // 1_000), Check("ts", "not its hour"))
    fails = " or ".join(f"coalesce({_fails(check)}, false)" for check in checks)
    return f"select count(*), countif({fails}) from {rows_of(events, table)}"


def open_rows(events: str) -> str:
    """Return the latest row of each connection and hour that did not close in it, as a query in brackets."""
    keys, opens, closes = "node, conn_id, date, hour", rows_of(events, "flow_opens"), rows_of(events, "flow_closes")
    newest = f"(select {keys}, max(seq) as seq from {opens} group by all)"
    wanted = f"(select * from {newest} anti join (select {keys} from {closes}) using ({keys}))"
    return f"(select * from {opens} semi join {wanted} using ({keys}, seq))"


def still_open(out: str, columns: tuple[str, ...]) -> str:
    """Return the latest of the sessions that were open and have not closed; `out` has both tables."""
    opens, closed = (f"read_parquet('{out}/{name}/**/*.parquet')" for name in ("open_sessions", "sessions"))
    last = "row_number() over (partition by node, conn_id order by seen_at desc) = 1"
    left = f"(select * from {opens} anti join (select node, conn_id from {closed}) using (node, conn_id))"
    return f"select {', '.join(columns)} from {left} qualify {last}"


def sessions_sql(rows: str, columns: tuple[str, ...]) -> str:
    """Return the query."""
    rest = "greatest(1 - b_server - b_burst, 0)"
    parts = {
        "viewer_link": f"b_any * {rest} * (1 - b_unforced)",
        "server_loop": "b_any * b_server",
        "publisher_burst": "b_any * b_burst",
        "policy": f"b_any * {rest} * b_unforced",
    }
    told = ", ".join(f"{text} as blame_share_{name}" for name, text in parts.items())
    most = f"greatest({', '.join(f'blame_share_{name}' for name in parts)})"
    blame = " ".join(f"when blame_share_{name} = {most} then '{name}'" for name in parts)
    publishes = "coalesce(role = 'publish', false)"
    return f"""
with named as (
  select * exclude (trouble_ms, ts, reason),
    {", ".join(_named())}
  from {rows} where conn_id <> 0
), shared as (select *, {", ".join(_shares())} from named
), blamed as (
  select *, {told},
    case when {publishes} then ingest_bytes else sent_bytes end * 8 / nullif(rated_s, 0) as bit_rate,
    case when {publishes} then ingest_pictures else pictures_sent end / nullif(rated_s, 0) as frames_per_s,
    {_share("stall_ms", "(play_s * 1e3)")} as stall_ratio,
    {_share("smaller_ms", "(set_s * 1e3)")} as smaller_rendition_share
  from shared
), ended as (select *, case when b_any = 0 then 'none' {blame} end as blame from blamed)
select {", ".join(f'"{name}"' for name in columns)}, date, hour from ended"""
