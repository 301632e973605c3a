-- The viewers whose flights began in the hour: of each hour those with the :most smallest hashes (picked), or all for 0.
-- One whose use nobody said is among them.
--
-- Input: flight.

WITH began AS (
  SELECT date, hour, node, conn_id, max(peer_ip) AS peer_ip,
    CAST(conv(substring(md5(concat(node, ' ', conn_id)), 1, 15), 16, 10) AS BIGINT) AS picked  -- of 60 bits
  FROM flight
  GROUP BY date, hour, node, conn_id
  HAVING coalesce(max(role IN (:viewing)), true) AND min(number) = 0
)
SELECT * EXCEPT (place)
FROM (SELECT *, row_number() OVER (PARTITION BY date, hour ORDER BY picked, node, conn_id) AS place FROM began)
WHERE :most = 0 OR place <= :most
