-- How each stream fared on each node, minute by minute.
--
-- Input: minutes (of minutes.sql, of closed and of open sessions). Contract: STREAM_COLUMNS in fleet.py; `missed` beside.

WITH each AS (
  SELECT *, explode(sequence(CAST(0 AS BIGINT), CAST(span AS BIGINT) - 1)) AS later FROM minutes
),
summed AS (
  SELECT
    app,
    stream,
    node,
    timestamp_micros(unix_micros(minute) + later * :minute_us) AS minute,
    nvl(try_sum(viewers_seen), :most) AS viewers_seen,
    nvl(try_sum(joins), :most) AS joins,
    nvl(try_sum(leaves), :most) AS leaves,
    nvl(try_sum(us), :most) AS us,
    nvl(try_sum(sampled_us), :most) AS sampled_us,
    nvl(try_sum(known_us), :most) AS known_us,
    nvl(try_sum(shown_us), :most) AS shown_us,
    nvl(try_sum(ready_us), :most) AS ready_us,
    nvl(try_sum(overloaded_us), :most) AS overloaded_us,
    nvl(try_sum(soft_us), :most) AS soft_us,
    nvl(try_sum(hard_us), :most) AS hard_us,
    nvl(try_sum(accepted_messages), :most) AS accepted_messages,
    nvl(try_sum(dropped_messages), :most) AS dropped_messages,
    nvl(try_sum(sent_bytes), :most) AS sent_bytes,
    nvl(try_sum(missed), :most) AS missed,
    min(first_us) AS first_us,
    max(last_us) AS last_us,
    kll_merge_agg_float(delays) AS delays
  FROM each
  GROUP BY app, stream, node, timestamp_micros(unix_micros(minute) + later * :minute_us)
),
known AS (
  SELECT
    *,
    ready_us + overloaded_us + soft_us + hard_us AS states_us,
    kll_sketch_get_n_float(delays) > 0 AS has_delay
  FROM summed
)
SELECT
  app,
  stream,
  node,
  minute,
  us / :minute_us AS viewers,
  first_us / 1e6 AS first_s,
  last_us / 1e6 AS last_s,
  viewers_seen,
  try_divide(ready_us, states_us) AS share_ready,
  try_divide(overloaded_us, states_us) AS share_overloaded,
  try_divide(soft_us, states_us) AS share_soft,
  try_divide(hard_us, states_us) AS share_hard,
  CASE WHEN has_delay THEN kll_sketch_get_quantile_float(delays, 0.5e0) END AS delay_p50_ms,
  CASE WHEN has_delay THEN kll_sketch_get_quantile_float(delays, 0.95e0) END AS delay_p95_ms,
  CASE WHEN has_delay THEN kll_sketch_get_quantile_float(delays, 0.99e0) END AS delay_p99_ms,
  accepted_messages,
  dropped_messages,
  try_divide(dropped_messages, accepted_messages) AS drop_ratio,
  try_divide(shown_us, known_us) AS picture_share,
  sent_bytes,
  joins,
  leaves,
  CASE WHEN sampled_us = 0 THEN 'sessions' WHEN sampled_us = us THEN 'samples' ELSE 'both' END AS source,
  missed
FROM known
