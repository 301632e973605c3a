-- What each record says about its address: the kind of evidence (null: none), and how often (amount).
--
-- Input: rows of flow_closes (event is null), flow_events, or `open` for flow_opens; other rows are no evidence. The
-- first kind whose condition is true counts.
-- Does a viewer that was cut as slow read? The kernel's buffers are full by then, so one octet more shows that it does.
-- If the record does not tell, only a *stuck* one does not read: there, nothing was taken for seconds. If it was cut
-- within moments, nothing is known: after a picture of some MB viewers are cut before they can have read it. Was its
-- line lost? While there is a line, the peer's kernel closes the window of a program that does not read, and answers
-- probes: one may be under way, or was not answered because kernels answer only two a second. If the record does not
-- tell (there is a proxy in between), the line of a viewer that had read for longer was lost. Had the program read
-- before? It says so itself, as RTMP has it (received 4 MiB, it has: each 2.5 MB at the latest), and cannot have read
-- more than its kernel got (a word of less than a kernel holds proves nothing: it counts as none); or its kernel got
-- more than it holds (256 KiB, unless an owner set more), and too little to be told of. A kernel holds 16 MiB at the very
-- most: one that was sent less, for less than a minute, need not have read. One whose kernel got no more than it holds may
-- have read all, or nothing. But one that reads nothing stands still at once, for the group of pictures that is there
-- comes at once, and a stream of 2.5 Mbit/s fills kernels in a second: who goes on for 2 s may be somebody who paused.
-- Did a protocol error come after the handshake? If the record does not tell, it did not.

WITH judged AS (
  SELECT
    *,
    coalesce(reason IN (:slow_ends), false) AS _slow,
    coalesce(reason IN (:by_peer), false) AS _left,
    coalesce(role = 'unknown', true) AS _unknown,
    duration_s * 1e3 - coalesce(startup_ms, 0e0) - unrecovered_ms AS _before_ms,
    window_bytes < 1460 AND retransmits + probes < 2 AS _stalls,  -- null: not told
    CASE WHEN read_bytes >= 262144 THEN read_bytes <= acked_bytes ELSE acked_bytes BETWEEN 262144 AND 4194304 END
      AS _has_read
  FROM rows
),
named AS (
  SELECT
    * EXCEPT (_slow, _left, _unknown, _before_ms, _stalls, _has_read),
    CASE
      -- A kind in a ban has at most 100 printable characters.
      WHEN event = 'limit_hit'
        THEN concat('limit_hit.', substring(regexp_replace(coalesce(axis, 'unknown'), r'[^\w.-]', '_'), 1, 80))
      WHEN event = 'conn_refused'
        THEN concat('refused.', substring(regexp_replace(coalesce(reason, 'unknown'), r'[^\w.-]', '_'), 1, 80))
      WHEN event IS NOT NULL THEN NULL
      WHEN reason = 'handshake timeout' THEN 'handshake_timeout'
      WHEN reason = 'protocol error' AND _unknown AND handshake_ms IS NULL
        AND coalesce(code IN ('not-rtmp', 'tls-on-plain-port', 'rtmpe', 'real-ip-prefix')
                     OR startswith(code, 'handshake'), true) THEN 'not_rtmp'
      WHEN reason = 'protocol error' THEN 'protocol_error'
      WHEN reason = 'auth refused' THEN 'auth_refused'
      WHEN _slow AND CASE WHEN unrecovered_ms IS NOT NULL AND unrecovered_bytes IS NOT NULL
          THEN unrecovered_bytes >= greatest(unrecovered_ms, 1e3) / 1e3 * :deaf_bytes_per_s
          ELSE reason <> 'stuck' END THEN 'slow_close'
      WHEN _slow AND coalesce(NOT _stalls, _before_ms >= greatest(unrecovered_ms, :short_s * 1e3)) THEN 'lost_line'
      WHEN _slow AND unrecovered_ms < 5e3 THEN 'cut_at_once'
      WHEN _slow AND _stalls
        AND (coalesce(_has_read, false) OR sent_bytes > 16777216 OR _before_ms >= :settled_s * 1e3) THEN 'paused'
      WHEN _slow AND role = 'http_flv' THEN 'deaf_http'
      WHEN _slow AND _stalls AND acked_bytes < 262144 AND _before_ms >= 2e3 THEN 'maybe_paused'
      WHEN _slow AND _before_ms < :short_s * 1e3 THEN 'never_read'
      WHEN _slow THEN 'deaf_close'
      WHEN _left AND _unknown THEN 'fruitless_connection'
      WHEN _left AND duration_s < :short_s THEN 'short_connection'
    END AS kind
  FROM judged
)
SELECT
  *,
  -- One record may sum up many refusals, a million at most.
  CASE WHEN kind IS NOT NULL THEN least(greatest(coalesce(count, 1), 1), 1000000) ELSE 0 END AS amount
FROM named
