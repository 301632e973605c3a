-- What is kept of an hour beside flights: how many viewers ended, by why (source 'closes'), and what servers said of their
-- limits when they started and when these changed ('server'). Contract: STRETCH_COLUMNS in stretches.py.
--
-- Inputs: flow_closes, flow_events. Numbers that all rows have are 0: with a null pandas would make floats of them.

WITH told AS (
  SELECT date, hour, max(ts) AS at, max(node) AS node, 'closes' AS source, reason AS close_reason,
    CAST(NULL AS STRING) AS settings, count(*) AS ended
  FROM flow_closes
  WHERE role IN (:viewing) AND (duration_s >= :least_stay_s OR reason IN (:slow_ends))
  GROUP BY date, hour, reason
  UNION ALL
  SELECT date, hour, ts, node, 'server', NULL, detail, NULL
  FROM flow_events
  WHERE event = 'server_started'
    OR (event = 'config_changed' AND (reason IN ('limits file', 'limits') OR contains(detail, '"marks"')))
)
SELECT date, hour, at, node, 0 AS conn_id, 0 AS picked, NULL AS address, source, NULL AS reason, close_reason, settings,
  CASE WHEN ended IS NOT NULL THEN map('viewers', ended) END AS calm, NULL AS recorded, NULL AS given,
  NULL AS restart_bytes, 0 AS ended_us, NULL AS at_us, NULL AS what, NULL AS bytes, NULL AS switched_us, NULL AS stalls,
  NULL AS stay_us
FROM told
