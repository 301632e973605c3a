"""Addresses as expressions of Spark: hexadecimal digits and subnets; all built in.

The common form is the address in hexadecimal digits, 8 for IPv4 and 32 for IPv6. A network is a prefix of it. A text
that is not an address, such as a hash, has no digits (null).
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final

from flowctl.analyze.engine import functions as f
from flowctl.core.text.addresses import EMBEDDED, NETWORK_BITS, UNIT_BITS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

IPV4_DIGITS: Final = 8
_DIGITS: Final = "0123456789abcdef"
# Patterns end with \z: the $ of Java also stands before a line break at the end of a text.
_OCTET: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4: Final = rf"^{_OCTET}(\.{_OCTET}){{3}}\z"
"""Pattern without leading zeros: some read 010 as eight, so neither Python nor the server accepts it in an address."""
_IPV6: Final = r"^[0-9a-fA-F]{0,4}(:[0-9a-fA-F]{0,4}){2,8}\z"
_NOT_IPV6: Final = r":::|::.*::|^:[^:]|[^:]:\z"
"""Pattern of two gaps, or of a single colon at an end."""
_MAPPED: Final = r"(?i)^::ffff:([0-9.]+)\z"
_TRUNCATED: Final = r"^([0-9.]+/24|[0-9a-fA-F:]+/48)\z"
"""Pattern of what is recorded with ``events_addresses=truncated``."""
_PRIVATE: Final = "127.0.0.0/8 10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 169.254.0.0/16 100.64.0.0/10"
PRIVATE: Final = tuple(map(ipaddress.ip_network, (*_PRIVATE.split(), "::1/128", "fe80::/10", "fc00::/7")))
"""Loopback and networks of one's own: monitors, load balancers and proxies are there, and no stranger. Of 100.64.0.0/10
(RFC 6598) are the balancers of some clouds."""


def digits(address: Column) -> Column:
    """Return the hexadecimal digits of an address, 8 or 32; null for other text."""
    octets = f.transform(f.split(address, r"\."), lambda octet: f.lpad(f.hex(octet.cast("bigint")), 2, "0"))
    return f.when(address.rlike(_IPV4), f.lower(f.concat_ws("", octets))).otherwise(_digits6(address))


def _digits6(address: Column) -> Column:
    """Return the 32 digits of an IPv6 address; null for other text."""
    sides = f.split(address, "::")
    head, tail = (
        f.filter(f.split(f.coalesce(f.get(sides, f.lit(side)), f.lit("")), ":"), lambda part: part != "")
        for side in (0, 1)
    )
    written = f.size(head) + f.size(tail)
    between = f.array_repeat(f.lit("0"), f.greatest(f.lit(0), 8 - written))
    groups = f.transform(f.concat(head, between, tail), lambda part: f.lpad(f.lower(part), 4, "0"))
    # A gap stands for one group at least; without a gap all eight are written.
    fits = f.when(address.contains("::"), written <= 7).otherwise(written == 8)
    return f.when(address.rlike(_IPV6) & ~address.rlike(_NOT_IPV6) & fits, f.concat_ws("", groups))


def with_unit(frame: DataFrame, name: str) -> DataFrame:
    """Add ``address``: who the address in column `name` stands for, as text.

    An IPv4 address stands for itself, also within an IPv6 address; another IPv6 address for its /64, the smallest
    network that a holder of IPv6 has; other text stays as it is.
    """
    text, six = f.col(name), f.col("_six")
    # In steps: the digits are a long expression, which Spark would compile once per use.
    frame = frame.withColumn("_six", f.when(text.contains(":") & ~text.contains("."), _digits6(text)))
    frame = frame.withColumn("_four", f.coalesce(*(_embedded(six, *item) for item in EMBEDDED)))
    parts = [f.conv(f.substring("_four", start, 2), 16, 10) for start in (1, 3, 5, 7)]
    four = f.when(f.col("_four").isNotNull(), f.concat_ws(".", *parts))
    found = f.coalesce(four, _network6(six, UNIT_BITS[6]), f.regexp_replace(text, _MAPPED, "$1"))
    return frame.withColumn("address", f.when(text.contains(":"), found).otherwise(text)).drop("_six", "_four")


def _embedded(six: Column, prefix: str, begin: int, inverted: bool) -> Column:  # noqa: FBT001 - an `Embedding`
    """Return the digits of the IPv4 address in the digits of an IPv6 address; null where it is not of this kind."""
    four = f.substring(six, begin + 1, IPV4_DIGITS)
    return f.when(six.startswith(prefix), f.translate(four, _DIGITS, _DIGITS[::-1]) if inverted else four)


def unit_digits(who: Column) -> Column:
    """Return the `digits` of a unit, as of `with_unit`: of a /64 those of its first address; null for other text."""
    return digits(f.regexp_replace(who, r"::/64\z", "::"))


def subnet(who: Column, hexadecimal: Column) -> Column:
    """Return the /24 of IPv4 or the /48 of IPv6, which one holder often has, of a unit with its digits."""
    four = f.concat(f.substring_index(who, ".", 3), f.lit(f".0/{NETWORK_BITS[4]}"))
    found = f.when(f.length(hexadecimal) == IPV4_DIGITS, four).otherwise(_network6(hexadecimal, NETWORK_BITS[6]))
    return f.coalesce(found, f.when(who.rlike(_TRUNCATED), who))


def _network6(hexadecimal: Column, length: int) -> Column:
    """Return the network of `length` bits, a multiple of 16, of an IPv6 address, as text; null for null."""
    starts = range(1, length // 4 + 1, 4)
    groups = [f.regexp_replace(f.substring(hexadecimal, start, 4), "^0{1,3}", "") for start in starts]
    text = f.concat(f.regexp_replace(f.concat_ws(":", *groups), "(^0)?(:0){1,7}$", ""), f.lit(f"::/{length}"))
    return f.when(hexadecimal.isNotNull(), text)
