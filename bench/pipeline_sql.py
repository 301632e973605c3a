"""The table of `sessions` in DuckDB's SQL: the same result from the same files, written as one would write it there.

It is made by hand from what the columns mean (docs/pipeline.md), not translated from the job: DuckDB takes the telling
record with `arg_max` where Spark needs a join, and quantiles with `quantile_disc` where Spark counts buckets. It is for
events without samples, as `synth` makes them by default, and it checks no row: what is put aside has to be none.
"""

from __future__ import annotations

from typing import Final

from flowctl.pipeline.delays import BUCKETS, PER_OCTAVE
from flowctl.pipeline.session_parts import RANK_BITS, TELLING
from flowctl.pipeline.sessions import BY_PEER
from flowctl.reasons import DropReason
from flowctl.telemetry.schema import CLASS_NAMES

_STATES: Final = (("READY", "ready"), ("OVERLOADED", "overloaded"), ("SOFT_LIMIT", "soft"), ("HARD_LIMIT", "hard"))
_SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_RANK: Final = "case state_to when 'OVERLOADED' then 1 when 'SOFT_LIMIT' then 2 when 'HARD_LIMIT' then 3 else 0 end"


def _words(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _sums() -> list[str]:
    """Return the aggregates over the events of a connection."""
    best = (
        "(case when event = 'conn_closed' then 3 when event in ('publish_started', 'play_started') then 2 "
        f"else 1 end)::bigint * {1 << RANK_BITS} + seq"
    )
    close = "case when event = 'conn_closed' then {0} end"
    told = (
        "{'peer_ip': peer_ip, 'peer_port': peer_port, 'role': role, 'app': app, 'stream': stream, "
        f"'close_reason': {close.format('reason')}, 'detail': {close.format('detail')}}}"
    )
    changed = "event = 'state_changed'"
    left, back = f"state_from = 'READY' and {changed}", "state_to = 'READY'"
    return [
        "count(*) as row_count",
        "min(ts) as first_ts",
        "max(ts) as last_ts",
        f"arg_max({told}, {best}) filter (event in ({_words(TELLING)})) as t",
        "min(ts) filter (event = 'conn_opened') as opened_ts",
        "max(ts) filter (event = 'conn_closed') as closed_ts",
        "min(ts) filter (event = 'play_started') as play_ts",
        "max(value) filter (event = 'handshake_done') as handshake_ms",
        *(f"sum(state_ms) filter (state_from = '{state}') as {name}_ms" for state, name in _STATES),
        "count(*) filter (state_to = 'OVERLOADED' and state_from = 'READY') as episodes_overloaded",
        "count(*) filter (state_to = 'SOFT_LIMIT' and state_from <> 'HARD_LIMIT') as episodes_soft",
        "count(*) filter (state_to = 'HARD_LIMIT') as episodes_hard",
        "count(*) filter (state_to = 'HARD_LIMIT' and state_from = 'READY') as hard_at_once",
        f"count(*) filter ({left}) as leaves",
        f"count(*) filter ({back}) as recoveries",
        f"sum(epoch_us(ts) // 1000) filter ({left}) as left_sum",
        f"max(epoch_us(ts) // 1000) filter ({left}) as left_last",
        f"sum(epoch_us(ts) // 1000) filter ({back}) as back_sum",
        f"max(state_ms) filter ({back}) as recover_max_ms",
        f"max({_RANK}) as worst",
        f"max(epoch_us(ts) * 4 + {_RANK}) filter ({changed}) as last_edge",
        "max(sent_bytes) as sent_bytes",
        "max(dropped_messages) filter (event = 'conn_closed') as closed_dropped_messages",
        "max(dropped_bytes) filter (event = 'conn_closed') as closed_dropped_bytes",
        "sum(dropped_messages) filter (event = 'dropped') as seen_dropped_messages",
        "sum(dropped_bytes) filter (event = 'dropped') as seen_dropped_bytes",
        "count(*) filter (event = 'input_paused') as input_pauses",
        "count(*) filter (event = 'limit_hit') as limit_hits",
        "count(*) filter (event = 'returned') as returns_to_live",
        "max(viewer_delay_ms) as delay_max_ms",
        *(f"quantile_disc(viewer_delay_ms, {share}) as {name}" for name, share in _SHARES.items()),
    ]


def _detail(path: str, kind: str) -> str:
    return f"json_extract(t.detail, '{path}')::{kind}"


def _dropped(name: str) -> str:
    """Return the messages of a class dropped for any reason, as the close tells."""
    parts = [f"""coalesce({_detail(f'$.dropped."{reason.value}".{name}', "bigint")}, 0)""" for reason in DropReason]
    return f"case when json_exists(t.detail, '$.dropped') then {' + '.join(parts)} end"


def _quantile(name: str) -> str:
    """Return the middle of the bucket in which the quantile lies, and never more than the largest."""
    bucket = f"least({BUCKETS - 1}, floor(log2(greatest({name}, 1.0)) * {PER_OCTAVE}))"
    middle = f"case when {bucket} = 0 then 0.5 else pow(2.0, ({bucket} + 0.5) / {PER_OCTAVE}) end"
    return f"case when {name} is not null then least(delay_max_ms, {middle}) end"


def _columns() -> list[str]:
    """Return the columns of the result that do not need another one of them."""
    began = "coalesce(opened_ts, first_ts)"
    since = f"coalesce(last_edge, epoch_us({began}) * 4)"
    completed = "back_sum - (left_sum - case when leaves > recoveries then left_last else 0 end)"
    return [
        "node",
        "conn_id",
        *(f"t.{name} as {name}" for name in ("peer_ip", "peer_port", "role", "app", "stream")),
        "json_extract_string(t.detail, '$.agent') as user_agent",
        f"{began} as opened_at",
        "closed_ts as closed_at",
        f"(epoch_us(coalesce(closed_ts, last_ts)) - epoch_us({began})) / 1e6 as duration_s",
        "t.close_reason as close_reason",
        (
            f"case when closed_ts is null then 'open' when t.close_reason in ({_words(BY_PEER)}) then 'peer'"
            " else 'server' end as closed_by"
        ),
        "handshake_ms",
        *(
            f"coalesce({name}_ms, 0) + case when closed_ts is null and {since} & 3 = {rank}"
            f" then (epoch_us(last_ts) - ({since} >> 2)) / 1e3 else 0 end as time_{name}_ms"
            for rank, (_, name) in enumerate(_STATES)
        ),
        *(f"episodes_{name}" for name in ("overloaded", "soft", "hard")),
        "recoveries",
        f"case when recoveries > 0 and leaves >= recoveries then ({completed}) / recoveries end as recover_mean_ms",
        "recover_max_ms",
        "coalesce(sent_bytes, 0) as sent_bytes",
        "coalesce(closed_dropped_messages, seen_dropped_messages, 0)::bigint as dropped_messages",
        "coalesce(closed_dropped_bytes, seen_dropped_bytes, 0)::bigint as dropped_bytes",
        *(f"{_dropped(name)} as dropped_messages_{name}" for name in CLASS_NAMES),
        *(
            f"case when json_exists(t.detail, '$.accepted') then coalesce({_detail(f'$.accepted.{name}', 'bigint')}, 0)"
            f" end as accepted_messages_{name}"
            for name in CLASS_NAMES
        ),
        *(f"{_quantile(name)} as delay_{name}_ms" for name in _SHARES),
        "delay_max_ms",
        "null::bigint as stall_count, null::double as stall_ms, null::double as stall_ratio",
        f"(epoch_us(play_ts) - epoch_us({began})) / 1e3 as startup_ms",
        "t.role in ('play', 'unknown') and play_ts is null and closed_ts is not null as exit_before_start",
        "input_pauses, limit_hits, returns_to_live",
        "['READY', 'OVERLOADED', 'SOFT_LIMIT', 'HARD_LIMIT'][worst + 1] as worst_state",
        "row_count as events_count, null::bigint as samples_count",
        "worst, hard_at_once",
    ]


def sessions_sql(files: str) -> str:
    """Return the query.

    Args:
        files: glob of the Parquet files of `flow_events`.

    Returns:
        SQL whose result has the columns of `flowctl.pipeline.sessions.COLUMNS`, in another order.
    """
    troubled = "time_overloaded_ms + time_soft_ms + time_hard_ms > 0 or dropped_messages > 0 or worst > 0"
    return f"""
with sums as (
  select node, conn_id, {", ".join(_sums())}
  from read_parquet('{files}', hive_partitioning = false)
  where conn_id <> 0 group by node, conn_id
), named as (select {", ".join(_columns())} from sums)
select * exclude (worst, hard_at_once),
  case when not ({troubled}) then 'none' when hard_at_once > 0 then 'policy' else 'viewer_link' end as blame,
  case when ({troubled}) and hard_at_once = 0 then 1.0 else 0.0 end as blame_share_viewer_link,
  0.0::double as blame_share_server_loop, 0.0::double as blame_share_publisher_burst,
  case when ({troubled}) and hard_at_once > 0 then 1.0 else 0.0 end as blame_share_policy
from named"""
