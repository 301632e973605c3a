"""Origins of pages, and hosts of requests, compared by what they mean and not as text (pure).

An origin is scheme, host and port (RFC 6454): ``https://example.com`` and a Host ``example.com:443``, which proxies
write, are one; so are names in capitals, those with the dot of the root behind them, and all texts of one IPv6 address.
Which scheme a request came by is not known behind a proxy that ends TLS: a Host without a port has that of the origin.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import Final

from flowctl.core.text.addresses import LAST_PORT, bracketed, is_loopback

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
