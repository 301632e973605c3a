"""What counts as one address, wherever something is limited or weighed per address (pure).

An IPv6 network of 64 bits is what one subscriber is given, and every address in it is his: a limit on single ones would
be none. An IPv4 address that comes mapped into IPv6 (a listener on ``::``) is that IPv4 address.
"""

from __future__ import annotations

import ipaddress


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
