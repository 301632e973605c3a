-- The records that may say something about an address, in one form: closes, opens (event `open`), and some events.
--
-- Inputs: flow_closes, flow_opens, flow_events.

SELECT date, hour, ts, node, conn_id, peer_ip, role, CAST(NULL AS STRING) AS event, reason, CAST(NULL AS STRING) AS axis,
  CAST(NULL AS BIGINT) AS count, code, limit_name, handshake_ms, duration_s, startup_ms, unrecovered_ms,
  unrecovered_bytes, sent_bytes, acked_bytes, read_bytes, window_bytes, retransmits, probes
FROM flow_closes
WHERE peer_ip <> ''
UNION ALL
SELECT date, hour, ts, node, conn_id, peer_ip, role, 'open', NULL, NULL, NULL, NULL, NULL, NULL, duration_s, startup_ms,
  NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM flow_opens
WHERE peer_ip <> '' AND (startup_ms IS NOT NULL OR role IN (:viewing))
UNION ALL
SELECT date, hour, ts, node, conn_id, peer_ip, role, event, reason, axis, count, NULL, NULL, NULL, NULL, NULL, NULL,
  NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM flow_events
WHERE event = 'server_started' OR (event IN ('limit_hit', 'conn_refused') AND peer_ip <> '')
