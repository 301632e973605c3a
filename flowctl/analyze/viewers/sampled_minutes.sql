-- Viewer minutes of samples: a row of each viewer and minute. The time of an interval counts in the minutes that it
-- covers, messages and bytes in that in which it ends.
--
-- Input: covered (of records/covered.sql, by minutes). The columns are those of session_minutes.sql.

SELECT
  app,
  stream,
  node,
  timestamp_micros(number * :minute_us) AS minute,
  date,
  hour,
  1 AS span,
  max(CASE WHEN number < first THEN 0 ELSE 1 END) AS viewers_seen,
  0 AS joins,
  0 AS leaves,
  nvl(try_sum(us), :most) AS us,
  nvl(try_sum(us), :most) AS sampled_us,
  nvl(try_sum(CASE WHEN picture_share IS NOT NULL THEN us ELSE 0 END), :most) AS known_us,
  nvl(try_sum(CAST(round(coalesce(picture_share, 0e0) * us) AS BIGINT)), :most) AS shown_us,
  nvl(try_sum(CASE WHEN state = 'READY' THEN us ELSE 0 END), :most) AS ready_us,
  nvl(try_sum(CASE WHEN state = 'OVERLOADED' THEN us ELSE 0 END), :most) AS overloaded_us,
  nvl(try_sum(CASE WHEN state = 'SOFT_LIMIT' THEN us ELSE 0 END), :most) AS soft_us,
  nvl(try_sum(CASE WHEN state = 'HARD_LIMIT' THEN us ELSE 0 END), :most) AS hard_us,
  nvl(try_sum(CASE WHEN number = last THEN coalesce(accepted_messages_control, 0) + coalesce(accepted_messages_header, 0)
    + coalesce(accepted_messages_key, 0) + coalesce(accepted_messages_inter, 0)
    + coalesce(accepted_messages_disposable, 0) + coalesce(accepted_messages_audio, 0)
    + coalesce(accepted_messages_data, 0) ELSE 0 END), :most) AS accepted_messages,
  nvl(try_sum(CASE WHEN number = last THEN coalesce(dropped_messages_control, 0) + coalesce(dropped_messages_header, 0)
    + coalesce(dropped_messages_key, 0) + coalesce(dropped_messages_inter, 0)
    + coalesce(dropped_messages_disposable, 0) + coalesce(dropped_messages_audio, 0)
    + coalesce(dropped_messages_data, 0) ELSE 0 END), :most) AS dropped_messages,
  nvl(try_sum(CASE WHEN number = last THEN coalesce(sent_bytes, 0) ELSE 0 END), :most) AS sent_bytes,
  0 AS missed,
  CAST(try_divide(sum(viewer_delay_ms * us), sum(CASE WHEN viewer_delay_ms IS NOT NULL THEN us * 1e0 END)) AS FLOAT)
    AS delay_ms,
  min(greatest(began - number * :minute_us, 0)) AS first_us,
  max(least(until - number * :minute_us, :minute_us)) AS last_us
FROM covered
GROUP BY app, stream, node, number, conn_id, date, hour
