"""Addresses and networks (pure): how networks are written, and what counts as one address where limits are per address.

An IPv6 network of 64 bits is what one subscriber is given, and every address in it is his: a limit on single ones would
be none. An IPv4 address that comes mapped into IPv6 (a listener on ``::``) is that IPv4 address.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final, TypeAlias

from flowctl.errors import ConfigError
from flowctl.printable import short

LAST_PORT: Final = 65535
"""Of TCP."""

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_network(text: str, field: str, *, exact: bool = False) -> Network:
    """Return the network that `text` (``10.0.0.0/8``, ``2001:db8::/32``) names; an address is a network of one.

    Args:
        text: blanks around it do not count.
        field: where it was given, for the error.
        exact: whether bits behind the prefix are an error, as in ``192.0.2.7/24``; if not, they do not count.

    Raises:
        ConfigError: it is neither an address nor a network; names `field`.
    """
    try:
        return ipaddress.ip_network(text.strip(), strict=exact)
    except ValueError as error:
        reason = f": {error}" if exact else ""
        raise ConfigError(
            f"{field}: {short(text)} is no address and no network{reason}", hint="write it like 192.0.2.7 or 10.0.0.0/8"
        ) from error


def address_key(address: str) -> str:
    """Return what counts as one address: an IPv4 address, the /64 of an IPv6 one; what is neither stays as it is."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(parsed) >> 64 << 64)) + "/64"


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine and nobody else: a loopback address, or ``localhost``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_addresses(text: str, field: str) -> tuple[tuple[str, int], ...]:
    """Return the (host, port) of addresses to listen on, ``host:port`` with commas between; IPv6 stands in brackets.

    Args:
        text: empty: there is none.
        field: where it was given, for the error.

    Raises:
        ConfigError: a part is no address; names `field`.
    """
    found = []
    for part in map(str.strip, filter(str.strip, text.split(","))):
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^/,:\[\]\s]+)):([0-9]{1,5})", part)
        if match is None or int(match[3]) > LAST_PORT:
            raise ConfigError(
                f"{field}: {short(part)} is no address to listen on",
                hint="write host:port, for example 0.0.0.0:1936 or [::]:1936",
            )
        found.append((match[1] or match[2], int(match[3])))
    return tuple(found)


def listen_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of ``host[,host]``; one of IPv6 may stand in brackets."""
    return tuple(part.strip().removeprefix("[").removesuffix("]") for part in text.split(","))
