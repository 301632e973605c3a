-- Figures of what viewers felt: of each dimension the values with the most viewers, and all others in one row.
--
-- Inputs: felt (of felt.sql), several rows of a value. Contract: FIGURES in experience.py, and by, key (null: of all
-- others), keys. Figures are quotients of sums, and quantiles of sketches.

WITH ranked AS (
  SELECT `by`, key, count(*) OVER (PARTITION BY `by`) AS known,
    row_number() OVER (PARTITION BY `by` ORDER BY viewers DESC, attempts DESC, key) AS place
  FROM (SELECT `by`, key, try_sum(nvl(viewers, 0)) AS viewers, try_sum(nvl(attempts, 0)) AS attempts FROM felt GROUP BY `by`, key)
),
kept AS (
  SELECT felt.* EXCEPT (key), CASE WHEN place <= :most_values THEN felt.key END AS key,
    CASE WHEN place <= :most_values THEN 1 ELSE known - :most_values END AS keys
  FROM felt JOIN ranked ON felt.`by` = ranked.`by` AND felt.key = ranked.key
),
summed AS (
  SELECT
    `by`,
    key,
    max(keys) AS keys,
    nvl(try_sum(nvl(viewers, 0)), :most) AS viewers,
    nvl(try_sum(nvl(attempts, 0)), :most) AS attempts,
    nvl(try_sum(nvl(plays, 0)), :most) AS plays,
    nvl(try_sum(nvl(start_failures, 0)), :most) AS start_failures,
    nvl(try_sum(nvl(exits_before_start, 0)), :most) AS exits_before_start,
    nvl(try_sum(nvl(troubled, 0)), :most) AS troubled,
    nvl(try_sum(nvl(cut_slow, 0)), :most) AS cut_slow,
    nvl(try_sum(nvl(play_ms, 0)), :most) AS play_ms,
    nvl(try_sum(nvl(stall_count, 0)), :most) AS stall_count,
    nvl(try_sum(nvl(stall_ms, 0)), :most) AS stall_ms,
    nvl(try_sum(nvl(stall_play_ms, 0)), :most) AS stall_play_ms,
    nvl(try_sum(nvl(late_ms, 0)), :most) AS late_ms,
    nvl(try_sum(nvl(target_ms, 0)), :most) AS target_ms,
    nvl(try_sum(nvl(pictures_wanted, 0)), :most) AS pictures_wanted,
    nvl(try_sum(nvl(pictures_sent, 0)), :most) AS pictures_sent,
    nvl(try_sum(nvl(switches, 0)), :most) AS switches,
    nvl(try_sum(nvl(set_ms, 0)), :most) AS set_ms,
    nvl(try_sum(nvl(smaller_ms, 0)), :most) AS smaller_ms,
    nvl(try_sum(nvl(sent_bytes, 0)), :most) AS sent_bytes,
    nvl(try_sum(nvl(rated_bytes, 0)), :most) AS rated_bytes,
    nvl(try_sum(nvl(rated_ms, 0)), :most) AS rated_ms,
    nvl(try_sum(nvl(framed_pictures, 0)), :most) AS framed_pictures,
    nvl(try_sum(nvl(framed_ms, 0)), :most) AS framed_ms,
    nvl(try_sum(nvl(accepted_messages, 0)), :most) AS accepted_messages,
    nvl(try_sum(nvl(dropped_messages, 0)), :most) AS dropped_messages,
    nvl(try_sum(nvl(ready_ms, 0)), :most) AS ready_ms,
    nvl(try_sum(nvl(overloaded_ms, 0)), :most) AS overloaded_ms,
    nvl(try_sum(nvl(soft_ms, 0)), :most) AS soft_ms,
    nvl(try_sum(nvl(hard_ms, 0)), :most) AS hard_ms,
    kll_merge_agg_float(first_frames) AS first_frames,
    kll_merge_agg_float(delays) AS delays
  FROM kept
  GROUP BY `by`, key
)
SELECT
  `by`,
  key,
  keys,
  viewers,
  attempts,
  plays,
  start_failures,
  exits_before_start,
  stall_count,
  troubled,
  cut_slow,
  switches,
  accepted_messages,
  dropped_messages,
  sent_bytes,
  viewers < :few AS few,
  CASE WHEN viewers > :sketch_k THEN :rank_error ELSE 0e0 END AS rank_error,
  CAST(CASE WHEN kll_sketch_get_n_float(first_frames) > 0 THEN kll_sketch_get_quantile_float(first_frames, 5e-1) END AS DOUBLE) AS first_frame_p50_ms,
  CAST(CASE WHEN kll_sketch_get_n_float(first_frames) > 0 THEN kll_sketch_get_quantile_float(first_frames, 95e-2) END AS DOUBLE) AS first_frame_p95_ms,
  CAST(CASE WHEN kll_sketch_get_n_float(delays) > 0 THEN kll_sketch_get_quantile_float(delays, 5e-1) END AS DOUBLE) AS delay_p50_ms,
  CAST(CASE WHEN kll_sketch_get_n_float(delays) > 0 THEN kll_sketch_get_quantile_float(delays, 95e-2) END AS DOUBLE) AS delay_p95_ms,
  CAST(CASE WHEN kll_sketch_get_n_float(delays) > 0 THEN kll_sketch_get_quantile_float(delays, 99e-2) END AS DOUBLE) AS delay_p99_ms,
  try_divide(pictures_sent, pictures_wanted) AS picture_share,
  try_divide(late_ms, target_ms) AS late_share,
  try_divide(stall_ms, stall_play_ms) AS stall_ratio,
  try_divide(rated_bytes * 8e3, rated_ms) AS bit_rate,
  try_divide(framed_pictures * 1e3, framed_ms) AS frames_per_s,
  play_ms / 3.6e6 AS play_hours,
  try_divide(dropped_messages, accepted_messages) AS drop_ratio,
  try_divide(smaller_ms, set_ms) AS smaller_rendition_share,
  try_divide(ready_ms, ready_ms + overloaded_ms + soft_ms + hard_ms) AS share_ready,
  try_divide(overloaded_ms, ready_ms + overloaded_ms + soft_ms + hard_ms) AS share_overloaded,
  try_divide(soft_ms, ready_ms + overloaded_ms + soft_ms + hard_ms) AS share_soft,
  try_divide(hard_ms, ready_ms + overloaded_ms + soft_ms + hard_ms) AS share_hard
FROM summed
