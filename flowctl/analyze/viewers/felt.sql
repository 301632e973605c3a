-- What viewers felt, summed up by the values of each dimension; sums are of whole numbers.
--
-- Input: sessions (of sessions.sql; play_s of an open one may be longer than its row knows). Contract: PART_COLUMNS in
-- experience.py, and date and hour.
-- A stall counts for at most as long as it was played: ratios of sums are shares, as those of sessions are.

WITH viewers AS (
  SELECT
    date, hour, app, stream, agent, node, role, subnet,
    CASE WHEN play_s IS NOT NULL AND duration_s >= :least_stay_s THEN 1 END AS viewers,
    CASE WHEN asked_ms IS NOT NULL OR startup_ms IS NOT NULL THEN 1 END AS attempts,
    CASE WHEN startup_ms IS NOT NULL THEN 1 END AS plays,
    CASE WHEN start_failure IS NOT NULL THEN 1 END AS start_failures,
    CASE WHEN exit_before_start THEN 1 END AS exits_before_start,
    CASE WHEN blame <> 'none' THEN 1 END AS troubled,
    CASE WHEN close_reason IN (:slow_ends) THEN 1 END AS cut_slow,
    CAST(round(play_s * 1e3) AS BIGINT) AS play_ms,
    stall_count,
    CAST(round(stall_ratio * round(play_s * 1e3)) AS BIGINT) AS stall_ms,
    CASE WHEN stall_ratio IS NOT NULL THEN CAST(round(play_s * 1e3) AS BIGINT) END AS stall_play_ms,
    CAST(round(late_share * sampled_ms) AS BIGINT) AS late_ms,
    CASE WHEN late_share IS NOT NULL THEN CAST(round(sampled_ms) AS BIGINT) END AS target_ms,
    CASE WHEN picture_share IS NOT NULL THEN pictures_wanted END AS pictures_wanted,
    CAST(round(picture_share * pictures_wanted) AS BIGINT) AS pictures_sent,
    switches,
    CASE WHEN smaller_rendition_share IS NOT NULL THEN CAST(round(set_s * 1e3) AS BIGINT) END AS set_ms,
    CAST(round(smaller_rendition_share * set_s * 1e3) AS BIGINT) AS smaller_ms,
    sent_bytes,
    CAST(round(bit_rate * play_s / 8) AS BIGINT) AS rated_bytes,
    CASE WHEN bit_rate IS NOT NULL THEN CAST(round(play_s * 1e3) AS BIGINT) END AS rated_ms,
    CAST(round(frames_per_s * play_s) AS BIGINT) AS framed_pictures,
    CASE WHEN frames_per_s IS NOT NULL THEN CAST(round(play_s * 1e3) AS BIGINT) END AS framed_ms,
    accepted_messages,
    dropped_messages,
    CAST(round(time_ready_ms) AS BIGINT) AS ready_ms,
    CAST(round(time_overloaded_ms) AS BIGINT) AS overloaded_ms,
    CAST(round(time_soft_ms) AS BIGINT) AS soft_ms,
    CAST(round(time_hard_ms) AS BIGINT) AS hard_ms,
    CASE WHEN duration_s >= :least_stay_s THEN CAST(first_frame_ms AS FLOAT) END AS first_frame_ms,
    CASE WHEN duration_s >= :least_stay_s THEN CAST(delay_p50_ms AS FLOAT) END AS delay_ms,
    -- Its family: the first that is named, for browsers name each other, else the first word of its name.
    CASE
      WHEN contains(lower(agent), 'obs') THEN 'OBS'
      WHEN contains(lower(agent), 'lavf') OR contains(lower(agent), 'ffmpeg') THEN 'FFmpeg'
      WHEN contains(lower(agent), 'vlc') THEN 'VLC'
      WHEN contains(lower(agent), 'mpv') THEN 'mpv'
      WHEN contains(lower(agent), 'gstreamer') THEN 'GStreamer'
      WHEN contains(lower(agent), 'edg') THEN 'Edge'
      WHEN contains(lower(agent), 'opr/') THEN 'Opera'
      WHEN contains(lower(agent), 'firefox/') THEN 'Firefox'
      WHEN contains(lower(agent), 'chrome/') THEN 'Chrome'
      WHEN contains(lower(agent), 'safari/') THEN 'Safari'
      WHEN contains(lower(agent), 'curl') THEN 'curl'
      ELSE regexp_extract(agent, '^[A-Za-z][A-Za-z0-9._-]{0,23}', 0) END AS family
  FROM sessions
  -- One that watches, or asked and was given nothing.
  WHERE role IN (:viewing) OR (coalesce(role, 'unknown') = 'unknown' AND asked_ms IS NOT NULL)
),
keyed AS (
  SELECT * FROM viewers LATERAL VIEW inline(array(
    named_struct('dimension', 'all', 'value', 'all'),
    named_struct('dimension', 'stream', 'value', concat_ws('/', app, stream)),
    named_struct('dimension', 'application', 'value', coalesce(app, '')),
    named_struct('dimension', 'network', 'value', coalesce(subnet, '')),
    named_struct('dimension', 'agent', 'value', coalesce(family, '')),
    named_struct('dimension', 'node', 'value', coalesce(node, '')),
    named_struct('dimension', 'role', 'value', coalesce(role, ''))
  )) each AS dimension, value
)
SELECT
  dimension AS `by`,
  value AS key,
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
  kll_sketch_agg_float(first_frame_ms, :sketch_k) AS first_frames,
  kll_sketch_agg_float(delay_ms, :sketch_k) AS delays,
  date,
  hour
FROM keyed
GROUP BY dimension, value, date, hour
