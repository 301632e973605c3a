-- Viewer minutes of sessions: comings and goings of all, and the minutes of those without samples, spread evenly.
--
-- Input: sessions (MADE_COLUMNS, `date` and `hour`). :sampled says that samples are there of all hours, :hours of which
-- (since 1970). Whole hours within a session without samples are a row each, which stands for `span` minutes.

WITH watched AS (
  SELECT
    app,
    stream,
    node,
    date,
    hour,
    closed_at,
    delay_p50_ms,
    picture_share,
    coalesce(time_ready_ms, 0e0) AS time_ready_ms,
    coalesce(time_overloaded_ms, 0e0) AS time_overloaded_ms,
    coalesce(time_soft_ms, 0e0) AS time_soft_ms,
    coalesce(time_hard_ms, 0e0) AS time_hard_ms,
    coalesce(accepted_messages, 0) AS accepted_messages,
    coalesce(dropped_messages, 0) AS dropped_messages,
    coalesce(sent_bytes, 0) AS sent_bytes,
    unix_micros(seen_at) AS until,
    unix_micros(seen_at) - CAST(play_s * 1e6 AS BIGINT) AS began,
    coalesce(samples_count, 0) = 0 AS never
  FROM sessions
  WHERE play_s IS NOT NULL
    AND (coalesce(role IN (:viewing), false) OR (coalesce(role, 'unknown') = 'unknown' AND asked_ms IS NOT NULL))
),
placed AS (
  SELECT
    *,
    floor(began / :minute_us) AS first,
    floor(until / :minute_us) AS last,
    floor(floor(began / :minute_us) / 60) AS begin_hour,
    floor(floor(until / :minute_us) / 60) AS end_hour
  FROM watched
),
spread AS (
  SELECT
    *,
    explode(CASE
      WHEN NOT (never OR last - first >= 60
          OR NOT (:sampled OR begin_hour IN (:hours)) OR NOT (:sampled OR end_hour IN (:hours)))
        THEN array_distinct(array(first, last))
      WHEN end_hour - begin_hour < 2 THEN sequence(first, last)
      ELSE concat(
        sequence(first, begin_hour * 60 + 59),
        sequence(end_hour * 60, last),
        sequence((begin_hour + 1) * 60, (end_hour - 1) * 60, 60)
      )
    END) AS number
  FROM placed
),
known AS (
  SELECT
    *,
    never OR NOT (:sampled OR floor(number / 60) IN (:hours)) AS alone,
    least(until, (number + 1) * :minute_us) - greatest(began, number * :minute_us) AS within_us
  FROM spread
),
parts AS (
  SELECT
    *,
    CASE WHEN alone THEN within_us ELSE 0 END AS us,
    CASE WHEN alone THEN coalesce(try_divide(within_us, until - began), 0e0) ELSE 0e0 END AS part
  FROM known
  WHERE alone OR number IN (first, last)
)
SELECT
  app,
  stream,
  node,
  timestamp_micros(number * :minute_us) AS minute,
  date,
  hour,
  CASE WHEN floor(number / 60) > begin_hour AND floor(number / 60) < end_hour THEN 60 ELSE 1 END AS span,
  CASE WHEN alone THEN 1 ELSE 0 END AS viewers_seen,
  CASE WHEN number = first THEN 1 ELSE 0 END AS joins,
  CASE WHEN number = last AND closed_at IS NOT NULL THEN 1 ELSE 0 END AS leaves,
  us,
  0 AS sampled_us,
  CASE WHEN picture_share IS NOT NULL THEN us ELSE 0 END AS known_us,
  CAST(round(coalesce(picture_share, 0e0) * us) AS BIGINT) AS shown_us,
  CAST(round(time_ready_ms * 1e3 * part) AS BIGINT) AS ready_us,
  CAST(round(time_overloaded_ms * 1e3 * part) AS BIGINT) AS overloaded_us,
  CAST(round(time_soft_ms * 1e3 * part) AS BIGINT) AS soft_us,
  CAST(round(time_hard_ms * 1e3 * part) AS BIGINT) AS hard_us,
  CAST(round(accepted_messages * part) AS BIGINT) AS accepted_messages,
  CAST(round(dropped_messages * part) AS BIGINT) AS dropped_messages,
  CAST(round(sent_bytes * part) AS BIGINT) AS sent_bytes,
  CASE WHEN NOT never AND number = first
      AND NOT ((:sampled OR begin_hour IN (:hours)) AND (:sampled OR end_hour IN (:hours)))
    THEN 1 ELSE 0 END AS missed,
  CASE WHEN alone THEN CAST(delay_p50_ms AS FLOAT) END AS delay_ms,
  CASE WHEN alone THEN greatest(began - number * :minute_us, 0) END AS first_us,
  CASE WHEN alone THEN least(until - number * :minute_us, :minute_us) END AS last_us
FROM parts
