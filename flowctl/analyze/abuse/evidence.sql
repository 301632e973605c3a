-- Evidence against addresses, and good standing: of each address, minute and kind, and of single connections that play,
-- publish or do harm. Contract: COLUMNS in evidence.py, and date and hour.
--
-- Input: told (of records.sql, with address, and kind and amount of kinds.sql).

WITH judged AS (
  SELECT
    *,
    coalesce(event = 'open', false) AS is_open,
    event IS NULL AS is_close,
    -- An end that counts as good standing.
    event IS NULL AND startup_ms IS NOT NULL AND NOT coalesce(kind IN (
      'deaf_close', 'never_read', 'deaf_http', 'maybe_paused', 'cut_at_once', 'protocol_error', 'short_connection'),
      false) AS is_good,
    coalesce(NOT kind IN (:before_playing) AND NOT startswith(kind, 'refused.'), false) AS is_serious,
    -- It waits for a stream, or did until we ended that.
    coalesce(role IN (:viewing) AND startup_ms IS NULL AND (event = 'open' OR (event IS NULL
      AND (coalesce(reason = 'shutdown', false) OR coalesce(limit_name = 'player_wait_s', false)))), false) AS waits,
    greatest(duration_s * 1e3 - startup_ms, 0e0) AS served_ms
  FROM told
),
rows AS (
  SELECT
    date, hour, ts, address, kind, amount,
    date_trunc('minute', ts) AS of_minute,
    CASE WHEN kind IS NOT NULL THEN date_trunc('minute', ts) END AS within,
    CASE WHEN coalesce(event = 'server_started', false) OR is_open OR is_good OR is_serious OR waits THEN node END AS node,
    CASE WHEN coalesce(event = 'server_started', false) OR is_open OR is_good OR is_serious OR waits THEN conn_id ELSE 0 END
      AS conn_id,
    CASE WHEN is_close THEN 1 ELSE 0 END AS opened,
    CASE WHEN is_good THEN CAST(served_ms AS BIGINT) ELSE 0 END AS good_ms,
    CASE WHEN is_open AND startup_ms IS NOT NULL
      THEN timestamp_micros(unix_micros(ts) - CAST(served_ms * 1e3 AS BIGINT)) END AS begun,
    CASE WHEN waits THEN 1 ELSE 0 END AS waits
  FROM judged
)
SELECT
  date, hour, address, kind, node, conn_id,
  max(of_minute) AS minute,
  try_sum(amount) AS amount,
  try_sum(opened) AS opened,
  try_sum(good_ms) AS good_ms,
  max(waits) AS waits,
  min(begun) AS begun,
  min(ts) AS first_seen,
  max(ts) AS last_seen
FROM rows
GROUP BY date, hour, address, kind, node, conn_id, within
