-- The rows of flights, with detail where it is needed: of key frames at which a viewer begins again it has their headers.
--
-- Where a flight was written hour by hour, what is read at once of the later ones belongs to it too.
--
-- Inputs: flight, keys (of flights.sql, with address).

SELECT /*+ BROADCAST(keys) */
  keys.date, keys.hour, node, conn_id, picked, address, ts, seq, flight.peer_ip, role, app, stream, number, offset_us, kind,
  message_class, size_bytes, taken_bytes, reason, queued_age_ms,
  CASE WHEN kind IN ('begin', 'call', 'limits_set', 'end') OR (kind = 'queued' AND message_class = 'key') THEN detail END
    AS detail
FROM flight
JOIN keys USING (node, conn_id)
