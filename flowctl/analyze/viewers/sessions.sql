-- Sessions: one row of each connection, of its close or of a row that says how it stands while it is open.
--
-- Input: closes (rows of flow_closes or flow_opens, one of each connection). Contract: MADE_COLUMNS in sessions.py, and date and hour.
-- Every quotient is null where there is nothing to divide by; shares are 1 at most.

WITH judged AS (
  SELECT
    *,
    CASE WHEN reason IS NULL THEN 'open' WHEN reason IN (:by_peer) THEN 'peer' ELSE 'server' END AS closed_by,
    CASE WHEN duration_s - startup_ms / 1e3 < 0 THEN 0e0 ELSE duration_s - startup_ms / 1e3 END AS play_s,
    CASE WHEN startup_ms - asked_ms < 0 THEN 0e0 ELSE startup_ms - asked_ms END AS first_frame_ms,
    asked_ms IS NOT NULL AND startup_ms IS NULL AS never_began,
    greatest(coalesce(time_overloaded_ms, 0e0) + coalesce(time_soft_ms, 0e0) + coalesce(time_hard_ms, 0e0),
             coalesce(trouble_ms, 0e0)) AS in_trouble_ms,
    coalesce(dropped_messages_control, 0) + coalesce(dropped_messages_header, 0) + coalesce(dropped_messages_key, 0)
      + coalesce(dropped_messages_inter, 0) + coalesce(dropped_messages_disposable, 0)
      + coalesce(dropped_messages_audio, 0) + coalesce(dropped_messages_data, 0) AS dropped_messages,
    coalesce(accepted_messages_control, 0) + coalesce(accepted_messages_header, 0) + coalesce(accepted_messages_key, 0)
      + coalesce(accepted_messages_inter, 0) + coalesce(accepted_messages_disposable, 0)
      + coalesce(accepted_messages_audio, 0) + coalesce(accepted_messages_data, 0) AS accepted_messages,
    coalesce(dropped_by_closed, 0) + coalesce(dropped_by_unfollowed, 0) + coalesce(dropped_by_requested, 0)
      AS dropped_by_wish,  -- neither slowness nor policy: the peer or the application did not want them
    coalesce(episodes_soft, 0) + coalesce(episodes_hard, 0) AS episodes_limit,
    coalesce(try_divide(CASE WHEN lag_server_ms > lag_ms THEN lag_ms ELSE lag_server_ms END, lag_ms), 0e0) AS b_server,
    coalesce(try_divide(CASE WHEN lag_burst_ms > lag_ms THEN lag_ms ELSE lag_burst_ms END, lag_ms), 0e0) AS b_burst
  FROM closes
  WHERE conn_id <> 0  -- of a server
),
blamed AS (
  SELECT
    *,
    -- Trouble: longer than a player's buffer and than a share of the session, or with losses, or what ended it.
    CASE WHEN episodes_limit > 0
        OR greatest(in_trouble_ms, coalesce(stall_ms, 0e0)) > greatest(:trouble_ms, :trouble_share * 1e3 * duration_s)
        OR (episodes_limit + coalesce(episodes_overloaded, 0) > 0 AND coalesce(lost_messages, 0) > 0)
        OR coalesce(reason IN (:slow_ends), false)
      THEN 1e0 ELSE 0e0 END AS b_any,
    CASE WHEN coalesce(hard_at_once, 0) > 0 THEN 1e0
      ELSE coalesce(try_divide(least(coalesce(unforced_drops, 0), greatest(0, dropped_messages - dropped_by_wish)),
                               greatest(0, dropped_messages - dropped_by_wish)), 0e0)
    END AS b_unforced,
    greatest(1 - b_server - b_burst, 0e0) AS b_rest,
    CASE WHEN play_s >= :least_play_s THEN play_s END AS rated_s,  -- shorter ones had one group of pictures
    aggregate(map_values(from_json(renditions, 'map<string,double>')), 0e0, (so_far, one) -> so_far + one) AS told_s
  FROM judged
),
shared AS (
  SELECT
    *,
    b_any * b_rest * (1 - b_unforced) AS blame_share_viewer_link,
    b_any * b_server AS blame_share_server_loop,
    b_any * b_burst AS blame_share_publisher_burst,
    b_any * b_rest * b_unforced AS blame_share_policy,
    CASE WHEN told_s > duration_s THEN duration_s WHEN told_s < 0 THEN 0e0 ELSE told_s END AS set_s
  FROM blamed
)
SELECT
  node,
  conn_id,
  opened_at,
  CASE WHEN reason IS NOT NULL THEN ts END AS closed_at,
  peer_ip,
  role,
  app,
  stream,
  agent,
  reason AS close_reason,
  closed_by,
  -- Why its request failed, if that was our doing.
  CASE WHEN never_began AND (refusal IS NOT NULL OR closed_by = 'server') THEN coalesce(refusal, code, reason) END
    AS start_failure,
  CASE WHEN episodes_hard > 0 THEN 'HARD_LIMIT' WHEN episodes_soft > 0 THEN 'SOFT_LIMIT'
    WHEN episodes_overloaded > 0 THEN 'OVERLOADED' ELSE 'READY' END AS worst_state,
  CASE WHEN b_any = 0 THEN 'none'
    WHEN blame_share_viewer_link >= greatest(blame_share_server_loop, blame_share_publisher_burst, blame_share_policy)
    THEN 'viewer_link'
    WHEN blame_share_server_loop >= greatest(blame_share_publisher_burst, blame_share_policy) THEN 'server_loop'
    WHEN blame_share_publisher_burst >= blame_share_policy THEN 'publisher_burst'
    ELSE 'policy' END AS blame,
  never_began AND refusal IS NULL AND closed_by = 'peer' AS exit_before_start,
  duration_s,
  play_s,
  asked_ms,
  startup_ms,
  first_frame_ms,
  try_divide(recover_ms, recoveries) AS recover_mean_ms,
  in_trouble_ms AS trouble_ms,
  accepted_messages,
  dropped_messages,
  pictures_wanted,
  try_divide(CASE WHEN pictures_sent > pictures_wanted THEN pictures_wanted ELSE pictures_sent END, pictures_wanted)
    AS picture_share,
  try_divide(line_bytes, line_stream_bytes) AS line_of_stream,
  try_divide(CASE WHEN role = 'publish' THEN ingest_bytes ELSE sent_bytes END * 8, rated_s) AS bit_rate,
  try_divide(CASE WHEN role = 'publish' THEN ingest_pictures ELSE pictures_sent END, rated_s) AS frames_per_s,
  target_delay_ms,
  delay_p50_ms,
  delay_p95_ms,
  delay_p99_ms,
  sampled_ms,
  CASE WHEN target_delay_ms IS NOT NULL
    THEN try_divide(CASE WHEN late_ms > sampled_ms THEN sampled_ms ELSE late_ms END, sampled_ms) END AS late_share,
  try_divide(CASE WHEN stall_ms > play_s * 1e3 THEN play_s * 1e3 ELSE stall_ms END, play_s * 1e3) AS stall_ratio,
  blame_share_viewer_link,
  blame_share_server_loop,
  blame_share_publisher_burst,
  blame_share_policy,
  ingest_bytes,
  ingest_pictures,
  ingest_key_frames,
  ingest_audio,
  gap_count,
  key_interval_ms,
  key_interval_max_ms,
  gap_ms,
  gap_max_ms,
  jitter_ms,
  renditions,
  why_smaller,
  set_s,
  try_divide(CASE WHEN smaller_ms > set_s * 1e3 THEN set_s * 1e3 ELSE smaller_ms END, set_s * 1e3)
    AS smaller_rendition_share,
  switches,
  ts AS seen_at,
  time_ready_ms,
  time_overloaded_ms,
  time_soft_ms,
  time_hard_ms,
  sent_bytes,
  pictures_sent,
  stall_count,
  samples_count,
  date,
  hour
FROM shared
