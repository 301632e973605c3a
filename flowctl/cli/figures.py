"""One line of figures about a running server, for ``flowctl serve --stats``."""

from __future__ import annotations

from typing import Any

from flowctl.flow.state import SendState
from flowctl.judging.shadow import ShadowReport
from flowctl.live import LiveServer
from flowctl.live.records.recording import Recording
from flowctl.server.server import Server
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
    if refused := server.admission.refused:
        figures["refused"] = refused
    if isinstance(server, LiveServer):
        for name, status in server.reload.status.items():
            figures[f"{name}_file"] = status.fault or status.state
        found = server.hub.summary()
        figures["streams"] = found.streams
        figures["viewers"] = {state.name.lower(): found.states[state] for state in SendState if found.states[state]}
        figures["missing_pictures"] = found.missing_pictures
        if found.missing_pictures:
            figures["least_pictures"] = f"{found.least_picture_share:.0%}"
        figures["worst_delay_s"] = round(found.worst_delay_ms / 1000, 1)
        figures["dropped"] = found.dropped_messages
        figures["returns"] = found.returns
        budget = found.budget
        figures["held"] = format_size(budget.held.total_bytes)
        if budget.limit_bytes:
            figures["gave_way"] = {"thinned": budget.thinned, "closed": budget.closed}
        if server.recording is not None:
            figures |= _recorded(server.recording)
        if server.config.shadow is not None:
            figures["shadow"] = _shadow(found.shadow)
    return figures


def _recorded(recording: Recording) -> dict[str, Any]:
    """Return what the records tell: the counters of the feed, which are sums over what stands in the files."""
    found = recording.recorder.feed.snapshot()
    return {
        "events": dict(sorted(found.events.items())),
        "limit_hits": dict(sorted(found.limit_hits.items())),
        "records_lost": recording.recorder.statistics().lost_rows,
    }


def _shadow(report: ShadowReport) -> dict[str, Any]:
    """Return what the candidate would have done otherwise, in few words."""
    return {
        "agrees": f"{report.agreement:.0%}",
        "more_dropped": report.dropped.total_messages - report.live_dropped.total_messages,
        "would_close": report.would_have_closed,
        "would_keep": report.would_have_kept,
    }
