"""The table of `sessions` in DuckDB's SQL: the same result from the same files, written as one would write it there.

It is made by hand from what the columns mean (docs/pipeline.md), not translated from the job: DuckDB takes the telling
record with `arg_max` where Spark needs a join, parses the totals of each close once, and takes
quantiles with `quantile_disc` where Spark counts buckets. It is for events without samples, as `synth` makes them by
default, and it checks no row: what is put aside has to be none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

from flowctl.pipeline.jobs.blame import NEEDED, NO_LOSS, TROUBLE_MS, TROUBLE_SHARE
from flowctl.pipeline.jobs.session_parts import RANK_BITS, TELLING, picture_share_sql, pictures_not_missed_sql
from flowctl.pipeline.jobs.sessions import BY_PEER
from flowctl.pipeline.tables.delays import BUCKETS, PER_OCTAVE
from flowctl.reasons import RECORDED_DROPS, SLOW_ENDS
from flowctl.telemetry.schema import CLASS_NAMES

_STATES: Final = (("READY", "ready"), ("OVERLOADED", "overloaded"), ("SOFT_LIMIT", "soft"), ("HARD_LIMIT", "hard"))
_SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_LOSSES: Final = tuple(reason for reason in RECORDED_DROPS if reason not in NO_LOSS)
_RANK: Final = "case state_to when 'OVERLOADED' then 1 when 'SOFT_LIMIT' then 2 when 'HARD_LIMIT' then 3 else 0 end"


_NOT_MISSED: Final = pictures_not_missed_sql('told.dropped."{reason}".{name}')


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
    back = f"state_to = 'READY' and {changed}"
    return [
        "count(*) as row_count",
        "min(ts) as first_ts",
        "max(ts) as last_ts",
        f"arg_max({told}, {best}) filter (event in ({_words(TELLING)})) as t",
        "min(ts) filter (event = 'conn_opened') as opened_ts",
        "max(ts) filter (event = 'conn_closed') as closed_ts",
        "min(ts) filter (event = 'play_started') as play_ts",
        "min(value) filter (event = 'play_started') as play_value_ms",
        "max(value) filter (event = 'handshake_done') as handshake_ms",
        *(f"sum(state_ms) filter (state_from = '{state}') as {name}_ms" for state, name in _STATES),
        "count(*) filter (state_to = 'OVERLOADED' and state_from = 'READY') as episodes_overloaded",
        "count(*) filter (state_to = 'SOFT_LIMIT' and state_from <> 'HARD_LIMIT') as episodes_soft",
        "count(*) filter (state_to = 'HARD_LIMIT') as episodes_hard",
        "count(*) filter (state_to = 'HARD_LIMIT' and state_from = 'READY') as hard_at_once",
        "count(*) filter (state_to = 'READY') as recoveries",
        f"avg(value) filter ({back}) as recover_mean_ms",
        f"max(value) filter ({back}) as recover_max_ms",
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
        "count(*) filter (event = 'pictures_late') as episodes_late",
        "max(viewer_delay_ms) as delay_max_ms",
        f"quantile_disc(viewer_delay_ms, {list(_SHARES.values())}) as quantiles",
    ]


def _shape() -> str:
    """Return what is read of `detail` of a close, as DuckDB's ``from_json`` takes it: parsed once per connection."""
    counts = dict.fromkeys(CLASS_NAMES, "BIGINT")
    dropped = dict.fromkeys(RECORDED_DROPS, counts)
    states = {state: "DOUBLE" for state, _ in _STATES}
    return json.dumps(
        {"accepted": counts, "dropped": dropped, "states_ms": states, "agent": "VARCHAR", "connected_s": "DOUBLE"}
    )


def _dropped(name: str, reasons: Iterable[str] = RECORDED_DROPS) -> str:
    """Return the messages of a class dropped for any of these reasons, as the close tells."""
    return " + ".join(f'coalesce(told.dropped."{reason}".{name}, 0)' for reason in reasons)


def _quantile(name: str) -> str:
    """Return the middle of the bucket in which the quantile lies, and never more than the largest."""
    bucket = f"least({BUCKETS - 1}, floor(log2(greatest({name}, 1.0)) * {PER_OCTAVE}))"
    middle = f"case when {bucket} = 0 then 0.5 else pow(2.0, ({bucket} + 0.5) / {PER_OCTAVE}) end"
    return f"case when {name} is not null then least(delay_max_ms, {middle}) end"


def _columns() -> list[str]:
    """Return the columns of the result that do not need another one of them."""
    began = "coalesce(opened_ts, first_ts)"
    since = f"coalesce(last_edge, epoch_us({began}) * 4)"
    return [
        "node",
        "conn_id",
        *(f"t.{name} as {name}" for name in ("peer_ip", "peer_port", "role", "app", "stream")),
        "told.agent as user_agent",
        f"{began} as opened_at",
        "closed_ts as closed_at",
        (
            "coalesce(told.connected_s, greatest(0, "
            f"(epoch_us(coalesce(closed_ts, last_ts)) - epoch_us({began})) / 1e6)) as duration_s"
        ),
        "t.close_reason as close_reason",
        (
            f"case when closed_ts is null then 'open' when t.close_reason in ({_words(BY_PEER)}) then 'peer'"
            " else 'server' end as closed_by"
        ),
        "handshake_ms",
        *(
            f"case when told.states_ms is not null then coalesce(told.states_ms.{state}, 0) else "
            f"coalesce({name}_ms, 0) + case when closed_ts is null and {since} & 3 = {rank}"
            f" then greatest(0, (epoch_us(last_ts) - ({since} >> 2)) / 1e3) else 0 end end as time_{name}_ms"
            for rank, (state, name) in enumerate(_STATES)
        ),
        *(f"episodes_{name}" for name in ("overloaded", "soft", "hard")),
        "recoveries",
        "recover_mean_ms",
        "recover_max_ms",
        "coalesce(sent_bytes, 0) as sent_bytes",
        "coalesce(closed_dropped_messages, seen_dropped_messages, 0)::bigint as dropped_messages",
        "coalesce(closed_dropped_bytes, seen_dropped_bytes, 0)::bigint as dropped_bytes",
        *(
            f"case when told.dropped is not null then {_dropped(name)} end as dropped_messages_{name}"
            for name in CLASS_NAMES
        ),
        f"coalesce({' + '.join(_dropped(name, _LOSSES) for name in NEEDED)}, 0) as lost_messages",
        *(
            f"case when told.accepted is not null then coalesce(told.accepted.{name}, 0) end"
            f" as accepted_messages_{name}"
            for name in CLASS_NAMES
        ),
        f"{_NOT_MISSED} as not_missed",
        *(f"{_quantile(f'quantiles[{number + 1}]')} as delay_{name}_ms" for number, name in enumerate(_SHARES)),
        "delay_max_ms",
        "null::bigint as stall_count, null::double as stall_ms, null::double as stall_ratio",
        (
            "coalesce(play_value_ms, case when play_ts is not null "
            f"then greatest(0, (epoch_us(play_ts) - epoch_us({began})) / 1e3) end) as startup_ms"
        ),
        "t.role in ('play', 'unknown') and play_ts is null and closed_ts is not null as exit_before_start",
        "input_pauses, limit_hits, returns_to_live, episodes_late, null::double as line_of_stream",
        "['READY', 'OVERLOADED', 'SOFT_LIMIT', 'HARD_LIMIT'][worst + 1] as worst_state",
        "row_count as events_count, null::bigint as samples_count",
        "worst, hard_at_once",
    ]


def sessions_sql(files: str) -> str:
    """Return the query.

    Args:
        files: glob of the Parquet files of `flow_events`.

    Returns:
        SQL whose result has the columns of `flowctl.pipeline.jobs.sessions.COLUMNS`, in another order.
    """
    ends = _words(SLOW_ENDS)
    troubled = (
        "(coalesce(worst, 0) >= 2 or time_overloaded_ms + time_soft_ms + time_hard_ms"
        f" > greatest({TROUBLE_MS}, {TROUBLE_SHARE} * duration_s * 1e3)"
        f" or (worst >= 1 and lost_messages > 0) or coalesce(close_reason in ({ends}), false))"
    )
    return f"""
with sums as (
  select node, conn_id, {", ".join(_sums())}
  from read_parquet('{files}', hive_partitioning = false)
  where conn_id <> 0 group by node, conn_id
), parsed as (select *, from_json(t.detail, '{_shape()}') as told from sums
), named as (select {", ".join(_columns())} from parsed)
select * exclude (worst, hard_at_once, lost_messages, not_missed), {picture_share_sql("not_missed")} as picture_share,
  case when not ({troubled}) then 'none' when hard_at_once > 0 then 'policy' else 'viewer_link' end as blame,
  case when ({troubled}) and hard_at_once = 0 then 1.0 else 0.0 end as blame_share_viewer_link,
  0.0::double as blame_share_server_loop, 0.0::double as blame_share_publisher_burst,
  case when ({troubled}) and hard_at_once > 0 then 1.0 else 0.0 end as blame_share_policy
from named"""
