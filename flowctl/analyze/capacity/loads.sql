-- Loads: how much each node served in windows of ten seconds, and how busy its busiest thread was.
--
-- Input: covered (of records/covered.sql). Contract: LOAD_COLUMNS in job.py. A row of node null is of all nodes together.
-- A sample counts in each window that it covers, for as long as it does; its busy share in that in which it ends. What
-- it has of the hour before is `ms` of no window (number < first).
-- A sum that does not fit 64 bits is 2^63 - 1: false rows end no job.

WITH windows AS (
  SELECT
    date,
    hour,
    number,
    first,
    node,
    nvl(try_sum(CAST(round(us / 1e3) AS BIGINT)), :most) AS ms,
    nvl(try_sum(CAST(round(coalesce(
      accepted_bytes_control + accepted_bytes_header + accepted_bytes_key + accepted_bytes_inter
      + accepted_bytes_disposable + accepted_bytes_audio + accepted_bytes_data, 0) * (us / (until - began))) AS BIGINT)),
      :most) AS accepted,
    nvl(try_sum(CASE WHEN state <> 'READY' THEN CAST(round(us / 1e3) AS BIGINT) ELSE 0 END), :most) AS trouble_ms,
    max(CASE WHEN number = last THEN CAST(round(thread_busy * 1e6) AS BIGINT) END) AS busy_ppm
  FROM covered
  WHERE interval_ms >= 1e-3
  GROUP BY date, hour, number, first, node
),
both AS (
  SELECT * FROM windows
  UNION ALL
  SELECT date, hour, number, first, NULL, nvl(try_sum(ms), :most), nvl(try_sum(accepted), :most),
    nvl(try_sum(trouble_ms), :most), max(busy_ppm)
  FROM windows
  GROUP BY date, hour, number, first
),
placed AS (
  SELECT
    *,
    number >= first AS within,
    -- The logarithm of its viewers to the base of 1.1; -1: nothing to fit a line to. What the last two windows of an
    -- hour served is told in the next hour too.
    CASE
      WHEN node IS NOT NULL AND number >= first AND (number + 2 - first) * :window_us < 3600000000
        AND ms * 1e3 / :window_us >= :least_viewers AND accepted > 0
        AND busy_ppm > 0 AND busy_ppm <= :most_busy * 1e6
      THEN CAST(floor(ln(ms * 1e3 / :window_us) / ln(1.1e0)) AS INT)
      ELSE -1
    END AS step
  FROM both
)
SELECT
  date,
  hour,
  node,
  step,
  count_if(within) AS windows,
  nvl(try_sum(ms), :most) AS ms,
  nvl(try_sum(accepted), :most) AS accepted,
  nvl(try_sum(trouble_ms), :most) AS trouble_ms,
  nvl(try_sum(coalesce(busy_ppm, 0)), :most) AS busy_ppm,
  max(CASE WHEN within THEN ms ELSE 0 END) AS peak_ms,
  max(busy_ppm) AS peak_busy_ppm
FROM placed
GROUP BY date, hour, node, step
