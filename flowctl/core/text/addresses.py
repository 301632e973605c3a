"""Addresses, networks and origins (pure): how they are written and compared, and what counts as one address.

An IPv6 network of 64 bits is what one subscriber is given, and every address in it is his: a limit on single ones would
be none. An IPv6 address that stands for an IPv4 address (`EMBEDDED`) is that one: mapped by a listener on ``::``; made
by a translator, of which one /64 is all of IPv4; or of a tunnel, whose holder has 2^16 networks for one address.

An origin is scheme, host and port (RFC 6454): ``https://example.com`` and a Host ``example.com:443``, which proxies
write, are one; so are names in capitals, those with the dot of the root behind them, and all texts of one IPv6 address.
Which scheme a request came by is not known behind a proxy that ends TLS: a Host without a port has that of the origin.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import Final, NamedTuple, TypeAlias

from flowctl.core.text.printable import short
from flowctl.errors import ConfigError

LAST_PORT: Final = 65535
"""Largest port number of TCP."""

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


UNIT_BITS: Final = {4: 32, 6: 64}
"""Prefix length, by version of IP, of what counts as one address."""
NETWORK_BITS: Final = {4: 24, 6: 48}
"""Prefix length, by version of IP, of the network that a site is given: of IPv4 some hundred machines."""


class Embedding(NamedTuple):
    """Addresses of IPv6 that hold an IPv4 address; written as digits, so that columns of text are read by it too."""

    prefix: str  # hexadecimal digits with which the 32 of the address begin
    begin: int  # number of digits before the IPv4 address
    inverted: bool = False  # every bit of it


EMBEDDED: Final = (
    Embedding("0" * 20 + "ffff", 24),  # ::ffff:0:0/96, IPv4-mapped: RFC 4291 section 2.5.5.2
    Embedding("0" * 16 + "ffff0000", 24),  # ::ffff:0:0:0/96, IPv4-translated: RFC 2765 section 2.1
    Embedding("0064ff9b" + "0" * 16, 24),  # 64:ff9b::/96, NAT64 and SIIT: RFC 6052 section 2.1
    Embedding("2002", 4),  # 2002::/16, 6to4: RFC 3056 section 2
    Embedding("20010000", 24, inverted=True),  # 2001::/32, Teredo, the client behind its NAT: RFC 4380 section 4
)
"""Networks whose addresses hold one of IPv4; Bitcoin Core, for the same reason, calls them linked (``HasLinkedIPv4`` in
netaddress.cpp). Local prefixes of NAT64 (64:ff9b:1::/48, RFC 8215) are not among them: where in it the address stands
is up to each network."""
_BITS: Final = tuple(
    (int(prefix, 16), 128 - 4 * len(prefix), 96 - 4 * begin, 0xFFFFFFFF if inverted else 0)
    for prefix, begin, inverted in EMBEDDED
)


_MAPPED: Final = re.compile(r"::ffff:([0-9.]{7,15})", re.IGNORECASE)


def parse_network(text: str, field: str, *, exact: bool = False) -> Network:
    """Return the network that `text` (``10.0.0.0/8``, ``2001:db8::/32``) names; an address is a network of one."""
    try:
        return ipaddress.ip_network(text.strip(), strict=exact)
    except ValueError as error:
        reason = f": {error}" if exact else ""
        raise ConfigError(
            f"{field}: {short(text)} is no address and no network{reason}", hint="write it like 192.0.2.7 or 10.0.0.0/8"
        ) from error


def plain_address(address: str) -> str:
    """Return `address`; of one of IPv4 that is written as IPv6 without what stands before it."""
    mapped = _MAPPED.fullmatch(address)
    return address if mapped is None else mapped[1]


def address_key(address: str) -> str:
    """Return what counts as one address: an IPv4 address, the /64 of an IPv6 one; what is neither stays as it is."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    four = embedded_ipv4(parsed)
    return str(ipaddress.IPv6Address(int(parsed) >> 64 << 64)) + "/64" if four is None else str(four)


def embedded_ipv4(address: Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that an IPv6 address holds, see `EMBEDDED`; None: none, or it is of IPv4."""
    if address.version == 4:
        return None
    value = int(address)
    for prefix, shift, below, flips in _BITS:
        if value >> shift == prefix:
            return ipaddress.IPv4Address(value >> below & 0xFFFFFFFF ^ flips)
    return None


def meanings(address: str) -> tuple[Address, ...]:
    """Return the addresses by which one is found in networks: itself, then the IPv4 address that it holds.

    Of a mapped one the latter alone; of what is no address none. This is for whom to keep out or to spare: a peer is
    trusted by its own address only.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ()
    four = embedded_ipv4(parsed)
    if four is None:
        return (parsed,)
    return (four,) if getattr(parsed, "ipv4_mapped", None) else (parsed, four)


def network_of(address: str) -> str:
    """Return the network that a site is given, and the address is in; what is no address stays as it is."""
    found = meanings(address)
    if not found:
        return address
    return str(ipaddress.ip_network((found[-1], NETWORK_BITS[found[-1].version]), strict=False))


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine alone: a loopback address, ``localhost`` or below it (RFC 6761, 6.3)."""
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def bracketed(host: str) -> str:
    """Return a host as it stands in a URL and before a port: one of IPv6 in brackets (RFC 3986 section 3.2.2)."""
    return f"[{host}]" if ":" in host and host[0] != "[" else host


def join_host_port(host: str, port: int) -> str:
    """Return an address as it is written in settings, URLs and messages: the one place where that is composed."""
    return f"{bracketed(host)}:{port}"


def address_of(peer: tuple[str, int]) -> str:
    """Return address and port; for a connection of the server to another, the address it follows, and no port."""
    return join_host_port(*peer) if peer[1] else peer[0]


def listen_addresses(text: str, field: str) -> tuple[tuple[str, int], ...]:
    """Return the (host, port) of addresses to listen on, ``host:port`` with commas between; IPv6 stands in brackets."""
    addresses = []
    for part in map(str.strip, filter(str.strip, text.split(","))):
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^/,:\[\]\s]+)):([0-9]{1,5})", part)
        if match is None or int(match[3]) > LAST_PORT:
            raise ConfigError(
                f"{field}: {short(part)} is no address to listen on",
                hint="write host:port, for example 0.0.0.0:1936 or [::]:1936",
            )
        addresses.append((match[1] or match[2], int(match[3])))
    return tuple(dict.fromkeys(addresses))


def listen_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of ``host[,host]``, each once; one of IPv6 may stand in brackets."""
    return tuple(dict.fromkeys(part.strip().removeprefix("[").removesuffix("]") for part in text.split(",")))


ANY_ORIGIN: Final = "*"
_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]@/?#\s]*))(?::([0-9]{1,5}))?")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")
_PORTS: Final = {"http": 80, "https": 443, "ws": 80, "wss": 443}


def parse_host(text: str) -> tuple[str, int | None] | None:
    """Return host, in its one form and without brackets, and port of a Host header; None: it is no host and port."""
    found = _HOST.fullmatch(text)
    if found is None or (found[3] and not 0 < int(found[3]) <= LAST_PORT):
        return None
    host = found[2]
    if found[1]:
        try:
            host = str(ipaddress.IPv6Address(found[1]))
        except ValueError:
            return None
    return host.lower().removesuffix("."), int(found[3]) if found[3] else None


def origin_key(text: str) -> str | None:
    """Return the one form of an origin, in which it is compared; None: it is no scheme, host and port."""
    scheme, separator, rest = text.strip().lower().partition("://")
    found = parse_host(rest.removesuffix("/")) if separator and _SCHEME.fullmatch(scheme) else None
    if found is None or not found[0]:
        return None
    host, port = found
    usual = port is None or port == _PORTS.get(scheme)
    return f"{scheme}://{bracketed(host)}" + ("" if usual else f":{port}")


def is_own_origin(origin: str, host: str) -> bool:
    """Return whether a page is of the server that it asks, by the Host that it asks for."""
    key = origin_key(origin)
    return key is not None and key == origin_key(f"{key.partition('://')[0]}://{host}")


def is_among(origin: str, origins: Collection[str]) -> bool:
    """Return whether an origin is one of those that are named, or all are; of `origins` none has to be in its form."""
    if ANY_ORIGIN in origins or origin in origins:
        return True
    key = origin_key(origin)
    return key is not None and any(key == origin_key(item) for item in origins)


def is_host_among(host: str, origins: Collection[str]) -> bool:
    """Return whether a Host is that of an origin that is named, whatever the ports: or all are."""
    found = parse_host(host)
    named = [parse_host((origin_key(item) or "").partition("://")[2]) for item in origins]
    return ANY_ORIGIN in origins or (found is not None and any(item and item[0] == found[0] != "" for item in named))


def is_rebound(host: str, listens_at: tuple[str, int] | None, peer: str, *, secure: bool) -> bool:
    """Return whether a server that only this machine reaches was asked for by a name that anybody may have.

    The page of evil.example whose name suddenly means 127.0.0.1 (DNS rebinding) is of the same origin as what it asks
    there. Its browser says in the Host which port it has connected to: that of a Host with another port was a proxy's
    in front of the server, as was one that says for another machine that it asks.
    """
    if listens_at is None or not (is_loopback(listens_at[0]) and is_loopback(peer)):
        return False
    found = parse_host(host)
    if found is None or is_loopback(found[0]):
        return False
    return (found[1] or _PORTS["https" if secure else "http"]) == listens_at[1]
