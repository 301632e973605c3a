"""A file of regions: which networks are where, since records know addresses and nothing of geography (pure)."""

from __future__ import annotations

from typing import Final

from flowctl.addresses import Network, parse_network
from flowctl.errors import ConfigError

MOST_REGIONS: Final = 200
"""Networks in the file: each is a comparison in one expression of Spark, which takes seconds to compile beyond."""
_MOST_NAME_CHARS: Final = 60


def parse_regions(text: str, where: str) -> tuple[tuple[Network, str], ...]:
    """Return (network, region) of each line ``NETWORK REGION``, the narrowest network first.

    Args:
        text: of the file; empty lines and what follows ``#`` do not count.
        where: name of the file, for errors.

    Raises:
        ConfigError: a line is none of that, or there are none or too many.
    """
    found: list[tuple[Network, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split(maxsplit=1)
        if not words:
            continue
        if len(words) != 2 or len(words[1].strip()) > _MOST_NAME_CHARS:
            raise ConfigError(
                f"{where}, line {number}: {line[:80]!r} is no region",
                hint=f"write NETWORK REGION, like 192.0.2.0/24 eu-west; a name has at most {_MOST_NAME_CHARS} letters",
            )
        found.append((parse_network(words[0], f"{where}, line {number}", exact=True), words[1].strip()))
    if not 1 <= len(found) <= MOST_REGIONS:
        raise ConfigError(f"{where}: there are {len(found)} networks in it, 1 to {MOST_REGIONS} are allowed")
    return tuple(sorted(found, key=lambda item: -item[0].prefixlen))
