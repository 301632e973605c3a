-- Samples by the windows of time that they cover: a row for each, with how much of the sample lies in it (us).
--
-- Input: samples (rows of flow_samples, of viewers). Windows are numbered from the epoch on; `last` is that in which a
-- sample ends, `first` the first of its hour. What lies more than a window before the hour stays in the one before it
-- (number < first): the rest of that hour is not here.

WITH timed AS (
  SELECT
    *,
    unix_micros(ts) AS until,
    unix_micros(ts) - CAST(round(interval_ms * 1e3) AS BIGINT) AS began,
    floor(unix_micros(date_trunc('hour', ts)) / :window_us) AS first
  FROM samples
  WHERE role IN (:viewing)
),
ended AS (
  SELECT *, greatest(floor((until - 1) / :window_us), floor(began / :window_us)) AS last FROM timed
),
spread AS (
  SELECT *, explode(sequence(greatest(floor(began / :window_us), first - 1), last)) AS number FROM ended
)
SELECT
  *,
  least(until, (number + 1) * :window_us)
    - CASE WHEN number < first THEN began ELSE greatest(began, number * :window_us) END AS us
FROM spread
