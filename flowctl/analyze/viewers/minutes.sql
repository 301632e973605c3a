-- Minutes of streams: viewer minutes, summed up by stream, node and minute. Each viewer counts once in a quantile.
--
-- Input: viewer_minutes (of sampled_minutes.sql and session_minutes.sql). Contract: PART_COLUMNS in fleet.py.

SELECT
  app,
  stream,
  node,
  minute,
  span,
  date,
  hour,
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
  kll_sketch_agg_float(delay_ms, :sketch_k) AS delays
FROM viewer_minutes
GROUP BY app, stream, node, minute, span, date, hour
