"""One line of figures about a running server, for ``flowctl serve --stats``."""

from __future__ import annotations

from typing import Any

from flowctl.flow import SendState
from flowctl.ladder import LadderStep
from flowctl.live import LiveServer
from flowctl.server import Server
from flowctl.shadow import ShadowReport
from flowctl.units import format_size


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
        snapshot = server.hub.snapshot()
        streams = snapshot.streams.values()
        figures["streams"] = sum(stream.publisher is not None for stream in streams)
        states = [sum(stream.states[state] for stream in streams) for state in SendState]
        figures["viewers"] = {state.name.lower(): states[state] for state in SendState if states[state]}
        steps = [sum(stream.steps[step] for stream in streams) for step in LadderStep]
        figures["steps"] = {step.name.lower(): steps[step] for step in LadderStep if steps[step]}
        delays = [viewer.viewer_delay_ms for stream in streams for viewer in stream.viewers]
        figures["worst_delay_s"] = round(max(delays, default=0.0) / 1000, 1)
        figures["dropped"] = sum(viewer.sender.dropped_messages for stream in streams for viewer in stream.viewers)
        figures["returns"] = sum(viewer.sender.returns for stream in streams for viewer in stream.viewers)
        budget = snapshot.budget
        figures["held"] = format_size(budget.held.total_bytes)
        if budget.limit_bytes:
            figures["gave_way"] = {"thinned": budget.thinned, "closed": budget.closed}
        if server.config.shadow is not None:
            figures["shadow"] = _shadow(snapshot.shadow)
    return figures


def _shadow(report: ShadowReport) -> dict[str, Any]:
    """Return what the candidate would have done otherwise, in few words."""
    return {
        "agrees": f"{report.agreement:.0%}",
        "more_dropped": report.dropped.total_messages - report.live_dropped.total_messages,
        "would_close": report.would_have_closed,
        "would_keep": report.would_have_kept,
    }
