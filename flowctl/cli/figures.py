"""One line of figures about a running server, for ``flowctl serve --stats``."""

from __future__ import annotations

from typing import Any

from flowctl.flow import SendState
from flowctl.live import LiveServer
from flowctl.server import Server


def summary(server: Server) -> dict[str, Any]:
    """Return the figures by name, in the order to be shown; any thread."""
    groups = [group.statistics() for group in server.groups.groups]
    figures: dict[str, Any] = {
        "connections": len(server.connections()),
        "accepted": server.accepted_count,
        "closed": {reason.value: count for reason, count in list(server.closed_by_reason.items())},
        "busy": f"{max(group.busy_fraction for group in groups):.0%}",
        "in_bytes": sum(group.bytes_in for group in groups),
    }
    if isinstance(server, LiveServer):
        streams = server.hub.snapshot().streams.values()
        figures["streams"] = sum(stream.publisher is not None for stream in streams)
        states = [sum(stream.states[state] for stream in streams) for state in SendState]
        figures["viewers"] = {state.name.lower(): states[state] for state in SendState if states[state]}
        figures["dropped"] = sum(viewer.sender.dropped_messages for stream in streams for viewer in stream.viewers)
    return figures
