-- How well publishers brought their streams: one row of each connection that began to publish.
--
-- Inputs: sessions that have closed, still (of still_open.sql). Contract: COLUMNS in ingest.py.

WITH published AS (
  SELECT node, conn_id, app, stream, peer_ip, agent, opened_at, duration_s, close_reason, bit_rate, frames_per_s,
    ingest_bytes, ingest_pictures, ingest_key_frames, ingest_audio, key_interval_ms, key_interval_max_ms, gap_count,
    gap_ms, gap_max_ms, jitter_ms, closed_at AS seen_at, startup_ms
  FROM sessions WHERE role = 'publish' AND startup_ms IS NOT NULL
  UNION ALL
  SELECT node, conn_id, app, stream, peer_ip, agent, opened_at, duration_s, close_reason, bit_rate, frames_per_s,
    ingest_bytes, ingest_pictures, ingest_key_frames, ingest_audio, key_interval_ms, key_interval_max_ms, gap_count,
    gap_ms, gap_max_ms, jitter_ms, seen_at, startup_ms
  FROM still WHERE role = 'publish' AND startup_ms IS NOT NULL
),
followed AS (
  SELECT *, (unix_micros(opened_at) - unix_micros(lag(seen_at) OVER (
      PARTITION BY node, app, stream ORDER BY opened_at, conn_id))) / 1e6 AS since_s
  FROM published
),
judged AS (
  SELECT * EXCEPT (since_s),
    CASE WHEN since_s < :back_s AND since_s + startup_ms / 1e3 > -:taken_over_s THEN greatest(0e0, since_s) END AS away_s,
    try_divide(CASE WHEN gap_ms > duration_s * 1e3 THEN duration_s * 1e3 ELSE gap_ms END, duration_s * 1e3) AS gap_share
  FROM followed
)
SELECT * EXCEPT (startup_ms),
  count(away_s) OVER (PARTITION BY node, app, stream ORDER BY opened_at, conn_id
    ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS reconnects,
  CASE WHEN ingest_bytes = 0 THEN 'no media'
    WHEN gap_share > :gap_share OR gap_max_ms > :gap_max_ms THEN 'gaps'
    WHEN away_s IS NOT NULL THEN 'came back'
    WHEN key_interval_max_ms > :key_max_ms THEN 'key frames far apart'
    WHEN jitter_ms > :jitter_ms THEN 'jitter'
    WHEN ingest_bytes IS NOT NULL THEN 'steady' END AS health
FROM judged
