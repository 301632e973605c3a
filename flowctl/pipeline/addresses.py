"""Addresses as expressions of Spark: hexadecimal digits, subnets, whether one lies in a network; all built in.

The common form is the address in hexadecimal digits, 8 for IPv4 and 32 for IPv6. A network is a prefix of it. What is
no address, a hash for instance, has no digits (null), and nothing is said of it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from flowctl.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import Column

IPV4_DIGITS: Final = 8
_OCTET: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4: Final = rf"^{_OCTET}(\.{_OCTET}){{3}}$"
"""No leading zeros: some read 010 as eight, so it is no address to Python, nor to the server that takes the bans."""
_IPV6: Final = r"^[0-9a-fA-F]{0,4}(:[0-9a-fA-F]{0,4}){2,8}$"
_NOT_IPV6: Final = r":::|::.*::|^:[^:]|[^:]:$"
"""Two gaps, or a colon at an end that is part of none."""
MOST_NETWORKS: Final = 200
"""Networks that an address may be compared with in one expression; beyond, plans take seconds to compile."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_networks(texts: Sequence[str], option: str) -> list[Network]:
    """Return the networks that `texts` name, an address meaning itself alone.

    Args:
        texts: like ``192.0.2.0/24``, ``2001:db8::/32`` or ``192.0.2.7``; at most `MOST_NETWORKS`.
        option: where they were given, for errors.

    Raises:
        ConfigError: one is no network, or there are too many.
    """
    if len(texts) > MOST_NETWORKS:
        raise ConfigError(f"{option} was given {len(texts)} times, {MOST_NETWORKS} are allowed")
    networks: list[Network] = []
    for text in texts:
        try:
            networks.append(ipaddress.ip_network(text.strip()))
        except ValueError as error:
            raise ConfigError(f"{option} is {text!r}: {error}", hint="write it like 192.0.2.0/24") from error
    return networks


def digits(address: Column) -> Column:
    """Return the hexadecimal digits of an address, 8 or 32; null for what is none."""
    four = f.split(address, r"\.")
    bytes_ = [f.lpad(f.hex(f.element_at(four, number).cast("bigint")), 2, "0") for number in range(1, 5)]
    sides = f.split(address, "::")
    head = f.filter(f.split(f.element_at(sides, 1), ":"), lambda part: part != "")
    tail = f.filter(f.split(f.coalesce(f.get(sides, f.lit(1)), f.lit("")), ":"), lambda part: part != "")
    between = f.array_repeat(f.lit("0"), f.greatest(f.lit(0), 8 - f.size(head) - f.size(tail)))
    groups = f.transform(f.concat(head, between, tail), lambda part: f.lpad(f.lower(part), 4, "0"))
    # A gap stands for one group at least; without a gap all eight are written.
    written = f.size(head) + f.size(tail)
    fits = f.when(address.contains("::"), written <= 7).otherwise(written == 8)
    six = address.rlike(_IPV6) & ~address.rlike(_NOT_IPV6) & fits
    return f.when(address.rlike(_IPV4), f.lower(f.concat(*bytes_))).when(six, f.concat_ws("", groups))


def subnet(address: Column, hexadecimal: Column) -> Column:
    """Return the subnet of an address: its /24 of IPv4, its /48 of IPv6, the smallest that one holder usually has.

    Args:
        address: as recorded.
        hexadecimal: its `digits`.
    """
    groups = [f.regexp_replace(f.substring(hexadecimal, start, 4), "^0{1,3}", "") for start in (1, 5, 9)]
    return f.when(
        f.length(hexadecimal) == IPV4_DIGITS, f.concat(f.substring_index(address, ".", 3), f.lit(".0/24"))
    ).when(hexadecimal.isNotNull(), f.concat(f.concat_ws(":", *groups), f.lit("::/48")))


def cidr(address: Column, hexadecimal: Column) -> Column:
    """Return an address as a network of its own; null for what is no address."""
    length = f.when(f.length(hexadecimal) == IPV4_DIGITS, "/32").otherwise("/128")
    return f.when(hexadecimal.isNotNull(), f.concat(address, length))


def is_cut(address: Column, hexadecimal: Column) -> Column:
    """Return whether an address looks like one of which only the network was recorded (``events_addresses=truncated``).

    Nobody is at the first address of a /24 or /48, as a rule; a ban of it would keep out nobody.
    """
    ends = f.when(f.length(hexadecimal) == IPV4_DIGITS, hexadecimal.endswith("00")).otherwise(address.endswith("::"))
    return f.coalesce(ends, f.lit(False))


def lies_in(hexadecimal: Column, networks: Sequence[Network]) -> Column:
    """Return whether the address lies in one of `networks`; false where it is none, never null.

    Args:
        hexadecimal: its `digits`.
        networks: at most `MOST_NETWORKS`.
    """
    found = f.lit(False)
    for network in networks:
        size = network.max_prefixlen // 4
        text = f"{int(network.network_address):0{size}x}"
        whole, bits = divmod(network.prefixlen, 4)
        same = (f.length(hexadecimal) == size) & (f.substring(hexadecimal, 1, whole) == text[:whole])
        if bits:
            digit = f.conv(f.substring(hexadecimal, whole + 1, 1), 16, 10).cast("int")
            same &= f.shiftright(digit, 4 - bits) == int(text[whole], 16) >> (4 - bits)
        found |= same
    return f.coalesce(found, f.lit(False))
