-- How many watched at once, of all, each stream and each node (peak_viewers), and when first (peak_at).
--
-- Inputs: sessions that have closed, still (of still_open.sql): who is there until `until`.

WITH stays AS (
  SELECT role, asked_ms, app, stream, node, play_s, closed_at AS seen_at, closed_at AS until FROM sessions
  UNION ALL
  SELECT role, asked_ms, app, stream, node, play_s, seen_at, until FROM still
),
seconds AS (
  SELECT
    app,
    stream,
    node,
    greatest(CAST(floor(unix_micros(seen_at) / 1e6 - play_s) AS BIGINT), :since_s) AS began,
    CAST(floor(unix_micros(until) / 1e6) AS BIGINT) + 1 AS gone
  FROM stays
  WHERE play_s IS NOT NULL
    AND (role IN (:viewing) OR (coalesce(role, 'unknown') = 'unknown' AND asked_ms IS NOT NULL))
),
keyed AS (
  SELECT began, gone, dimension, value FROM seconds LATERAL VIEW inline(array(
    named_struct('dimension', 'all', 'value', 'all'),
    named_struct('dimension', 'stream', 'value', concat_ws('/', app, stream)),
    named_struct('dimension', 'node', 'value', coalesce(node, ''))
  )) each AS dimension, value
),
moves AS (
  SELECT dimension, value, second, try_sum(step) AS step
  FROM (
    SELECT dimension, value, began AS second, 1 AS step FROM keyed
    UNION ALL
    SELECT dimension, value, gone AS second, -1 AS step FROM keyed
  )
  GROUP BY dimension, value, second
),
present AS (
  SELECT *, sum(step) OVER (PARTITION BY dimension, value ORDER BY second) AS present FROM moves
)
SELECT
  dimension AS `by`,
  value AS key,
  max(present) AS peak_viewers,
  timestamp_seconds(max_by(second, named_struct('present', present, 'earlier', -second))) AS peak_at
FROM present
GROUP BY dimension, value
