-- Who the address of a row stands for (address), and the network that one holder often has (subnet).
--
-- Input: rows, any, with peer_ip. An IPv4 address stands for itself, also within an IPv6 address; another IPv6 address
-- for its /64, the smallest network that a holder of IPv6 has; other text, such as a hash, stays as it is, and has no
-- subnet. Subnets are a /24 of IPv4 and a /48 of IPv6, or the network that was recorded with events_addresses=truncated.
-- The addresses that hold one of IPv4 are those of flowctl.core.text.addresses.

WITH sided AS (  -- of an IPv6 address: what is written before and behind its gap
  SELECT *, CASE WHEN contains(peer_ip, ':') AND NOT contains(peer_ip, '.')
      AND regexp_replace(peer_ip, r'::/64\z', '::') RLIKE r'^[0-9a-fA-F]{0,4}(:[0-9a-fA-F]{0,4}){2,8}\z'
      AND NOT regexp_replace(peer_ip, r'::/64\z', '::') RLIKE r':::|::.*::|^:[^:]|[^:]:\z'
    THEN split(regexp_replace(peer_ip, r'::/64\z', '::'), '::') END AS sides
  FROM rows
),
grouped AS (
  SELECT *,
    filter(split(coalesce(get(sides, 0), ''), ':'), part -> part <> '') AS head,
    filter(split(coalesce(get(sides, 1), ''), ':'), part -> part <> '') AS tail
  FROM sided
),
known AS (  -- its 32 digits; a gap stands for one group at least, and without a gap all eight are written
  SELECT * EXCEPT (sides, head, tail),
    CASE WHEN size(sides) = 2 AND size(head) + size(tail) <= 7 OR size(sides) = 1 AND size(head) = 8
      THEN concat_ws('', transform(concat(head, array_repeat('0', greatest(0, 8 - size(head) - size(tail))), tail),
                                   part -> lpad(lower(part), 4, '0'))) END AS six
  FROM grouped
),
embedded AS (  -- the 8 digits of the IPv4 address in it
  SELECT *, CASE
      WHEN startswith(six, '00000000000000000000ffff') OR startswith(six, '0000000000000000ffff0000')
        OR startswith(six, '0064ff9b0000000000000000') THEN substring(six, 25, 8)
      WHEN startswith(six, '2002') THEN substring(six, 5, 8)
      WHEN startswith(six, '20010000') THEN translate(substring(six, 25, 8), '0123456789abcdef', 'fedcba9876543210')
    END AS four
  FROM known
),
named AS (
  SELECT * EXCEPT (four, six),
    CASE WHEN four IS NULL THEN concat_ws(':', regexp_replace(substring(six, 1, 4), '^0{1,3}', ''),
      regexp_replace(substring(six, 5, 4), '^0{1,3}', ''), regexp_replace(substring(six, 9, 4), '^0{1,3}', '')) END AS site,
    regexp_replace(substring(six, 13, 4), '^0{1,3}', '') AS host_network,
    CASE WHEN four IS NOT NULL THEN concat_ws('.', conv(substring(four, 1, 2), 16, 10),
      conv(substring(four, 3, 2), 16, 10), conv(substring(four, 5, 2), 16, 10), conv(substring(four, 7, 2), 16, 10))
      WHEN contains(peer_ip, ':') THEN regexp_replace(peer_ip, r'(?i)^::ffff:([0-9.]+)\z', '$1')
      ELSE peer_ip END AS text,
    six IS NOT NULL AND four IS NULL AS is_six
  FROM embedded
)
SELECT * EXCEPT (site, host_network, text, is_six),
  CASE WHEN is_six THEN concat(regexp_replace(concat(site, ':', host_network), '(^0)?(:0){1,7}$', ''), '::/64')
    ELSE text END AS address,
  CASE WHEN is_six THEN concat(regexp_replace(site, '(^0)?(:0){1,7}$', ''), '::/48')
    -- Without leading zeros: some read 010 as eight, so neither Python nor the server accepts it in an address.
    WHEN text RLIKE r'^(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])(\.(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])){3}\z'
    THEN concat(substring_index(text, '.', 3), '.0/24')
    WHEN text RLIKE r'^([0-9.]+/24|[0-9a-fA-F:]+/48)\z' THEN text END AS subnet
FROM named
