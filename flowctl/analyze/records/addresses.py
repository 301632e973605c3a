"""Addresses of rows: who each stands for, and its subnet; ``addresses.sql`` is the model.

The networks that nobody is banned in are here too.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final

from flowctl.analyze.models import query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PRIVATE: Final = "127.0.0.0/8 10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 169.254.0.0/16 100.64.0.0/10"
PRIVATE: Final = tuple(map(ipaddress.ip_network, (*_PRIVATE.split(), "::1/128", "fe80::/10", "fc00::/7")))
"""Loopback and networks of one's own: monitors, load balancers and proxies are there, and no stranger. Of 100.64.0.0/10
(RFC 6598) are the balancers of some clouds."""


def with_unit(frame: DataFrame) -> DataFrame:
    """Add ``address`` and ``subnet`` of column ``peer_ip``, as text."""
    return query("records/addresses", {"rows": frame})
