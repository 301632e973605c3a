"""Where sockets of ZeroMQ are bound and connected, as far as ZeroMQ takes it for something else (pure)."""

from __future__ import annotations

from typing import Final

from flowctl.core.text.printable import short
from flowctl.errors import ConfigError

MAX_PORT: Final = 65_535


def check_port(endpoint: str) -> None:
    """See that the port of a TCP endpoint is one: ZeroMQ takes the last 16 bits of any number, 99999 for 34463."""
    scheme, _, rest = endpoint.partition("://")
    port = rest.rpartition(":")[2]
    if scheme == "tcp" and port.isdecimal() and (len(port) > len(str(MAX_PORT)) or int(port) > MAX_PORT):
        raise ConfigError(
            f"{short(endpoint)}: port is {port[:20]}, it must be 0 to {MAX_PORT}", hint="0 or * is any that is free"
        )
