"""What `flow.metrics` tells: sums and gauges of one process for monitoring, as numbers."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowctl.live.server import LiveServer


def metrics(server: LiveServer, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of this process, as the only part of the answer."""
    del asked
    streams = server.hub.streams()
    return {
        "parts": [
            {
                "pid": os.getpid(),
                "at": round(time.time(), 3),
                "up_s": round(server.clock() - server.started_at, 1),
                **server.meters.figures(server.connections, server.hub.fanouts()),
                "accepted": server.accepted_count,
                "refused": server.admission.refused,
                "threads": {group.name: _thread(group.statistics()) for group in server.groups.groups},
                "streams": sum(stream.publisher is not None for stream in streams),
                "bans": len(server.admission.bans),
                "draining": server.drains_for_s is not None,
            }
        ]
    }


def _thread(found: Any) -> dict[str, Any]:
    return {
        "busy": round(found.busy_fraction, 4),
        "longest_turn_s": round(found.longest_turn_s, 4),
        "turns": found.turns,
        "errors": found.errors,
        "received_bytes": found.bytes_in,
        "sent_bytes": found.bytes_out,
    }
