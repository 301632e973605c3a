-- Loads: how much each node served in windows of ten seconds, and how busy its busiest thread was.
--
-- Input: samples (rows of flow_samples). Contract: LOAD_COLUMNS in job.py. A row of node null is of all nodes together.
-- A sum that does not fit 64 bits is 2^63 - 1: false rows end no job.

WITH rated AS (
  SELECT
    date,
    hour,
    floor(unix_timestamp(ts) / :window_s) AS moment,
    node,
    CAST(round(interval_ms) AS BIGINT) AS ms,
    accepted_bytes_control + accepted_bytes_header + accepted_bytes_key + accepted_bytes_inter
      + accepted_bytes_disposable + accepted_bytes_audio + accepted_bytes_data AS accepted,
    CASE WHEN state <> 'READY' THEN CAST(round(interval_ms) AS BIGINT) ELSE 0 END AS trouble_ms,
    CAST(round(thread_busy * 1e6) AS BIGINT) AS busy_ppm
  FROM samples
  WHERE role IN (:viewing) AND interval_ms > 0
),
windows AS (
  SELECT
    date,
    hour,
    moment,
    node,
    nvl(try_sum(ms), :most) AS ms,
    nvl(try_sum(coalesce(accepted, 0)), :most) AS accepted,
    nvl(try_sum(trouble_ms), :most) AS trouble_ms,
    max(busy_ppm) AS busy_ppm
  FROM rated
  GROUP BY date, hour, moment, node
),
both AS (
  SELECT * FROM windows
  UNION ALL
  SELECT date, hour, moment, NULL, nvl(try_sum(ms), :most), nvl(try_sum(accepted), :most),
    nvl(try_sum(trouble_ms), :most), max(busy_ppm)
  FROM windows
  GROUP BY date, hour, moment
),
placed AS (
  SELECT
    *,
    -- The logarithm of its viewers to the base of 1.1; -1: nothing to fit a line to.
    CASE
      WHEN node IS NOT NULL AND ms / (:window_s * 1e3) >= :least_viewers AND accepted > 0
        AND busy_ppm > 0 AND busy_ppm <= :most_busy * 1e6
      THEN CAST(floor(ln(ms / (:window_s * 1e3)) / ln(1.1e0)) AS INT)
      ELSE -1
    END AS step
  FROM both
)
SELECT
  date,
  hour,
  node,
  step,
  count(*) AS windows,
  nvl(try_sum(ms), :most) AS ms,
  nvl(try_sum(accepted), :most) AS accepted,
  nvl(try_sum(trouble_ms), :most) AS trouble_ms,
  nvl(try_sum(coalesce(busy_ppm, 0)), :most) AS busy_ppm,
  max(ms) AS peak_ms,
  max(busy_ppm) AS peak_busy_ppm
FROM placed
GROUP BY date, hour, node, step
