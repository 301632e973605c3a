-- The connections that were open when last heard of, one row each, and when each ended (until), as far as that is known.
--
-- Inputs: sessions that have closed, open_sessions (one row of a connection and hour), heard (node, heard_at: its newest
-- record in any table; a node that is not there was heard of up to :newest).
-- A connection is there until its next row would have come, but not beyond the last that its node was heard of, and not
-- beside the next life of its server.

WITH ours AS (SELECT DISTINCT node, conn_id FROM open_sessions),
closed AS (SELECT sessions.node, sessions.conn_id FROM sessions LEFT SEMI JOIN ours USING (node, conn_id)),
latest AS (
  SELECT open_sessions.*, row_number() OVER (PARTITION BY node, conn_id ORDER BY seen_at DESC) AS newer
  FROM open_sessions LEFT ANTI JOIN closed USING (node, conn_id)
),
lives AS (  -- when the processes of a node started, in seconds
  SELECT node, life, lead(life) OVER (PARTITION BY node ORDER BY life) AS next_life
  FROM (
    SELECT DISTINCT node, shiftright(conn_id, :number_bits) AS life FROM sessions
    UNION
    SELECT DISTINCT node, shiftright(conn_id, :number_bits) AS life FROM open_sessions
  )
)
SELECT
  latest.* EXCEPT (newer, date, hour),
  greatest(seen_at, least(timestamp_micros(unix_micros(seen_at) + :every_s * 1000000),
    coalesce(heard_at, timestamp_micros(:newest_us)), timestamp_seconds(next_life - 1))) AS until
FROM latest
LEFT JOIN heard ON latest.node = heard.node
LEFT JOIN lives ON latest.node = lives.node AND shiftright(latest.conn_id, :number_bits) = lives.life
WHERE newer = 1
