"""Limits of one HTTP connection: what a request may take, in octets, in number and in time."""

from __future__ import annotations

from dataclasses import dataclass, fields

from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """Limits of one connection; immutable, one object for all."""

    header_bytes: int = 16 * 1024
    """Request line and headers together (h11, uvicorn: 16 KiB or 64; nginx: 4 x 8 KiB). More is answered with 431."""

    header_count: int = 64
    """Headers; browsers send some 15 (Apache: 100). More is answered with 431."""

    target_bytes: int = 8 * 1024
    """Path and query, with room for a signed token of 4 KiB (nginx: 8 KiB). More is answered with 414."""

    body_bytes: int = 64 * 1024
    """Body of a request; what is served here needs none. It is read and left. More is answered with 413."""

    request_time_s: float = 10.0
    """From accept, or the first octet of a request, to its end: headers and body (nginx: 60 s). Then comes 408."""

    idle_s: float = 60.0
    """Between two requests (nginx ``keepalive_timeout``: 75 s). The connection is closed then."""

    requests: int = 1000
    """Requests on one connection (nginx ``keepalive_requests``: 1000); the last answer says that it closes."""

    wait_s: float = 60.0
    """How long a player may wait for a stream that nobody publishes, where it may at all, if `player_wait_s` of RTMP
    does not end it earlier: clients and proxies give up after about that. Then comes 404."""

    frames_per_second: float = 50.0
    """WebSocket frames that a player may send, after a burst of two seconds' worth. More is read later;
    who goes on for `cut_after_s` of `WorkLimits` is cut."""

    def __post_init__(self) -> None:
        check_fields(self)
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(f"{field.name} is {getattr(self, field.name)}, it must be more than 0")
