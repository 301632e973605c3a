"""One line of figures about a running server, for ``flowctl serve --stats``; of several processes, their sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from flowctl.core.flow.state import SendState
from flowctl.core.server.server import Server
from flowctl.live.hub import Hub
from flowctl.live.oversight.pace import RestingPace
from flowctl.live.records.recording import Recording
from flowctl.live.rows import rendition_of
from flowctl.live.server import LiveServer
from flowctl.units import format_size


def summary(server: Server) -> dict[str, Any]:
    """Return the figures by name, in the order and as text to be shown; any thread."""
    return shown(figures_of(server))


def figures_of(server: Server) -> dict[str, Any]:
    """Return the figures by name as numbers, as JSON has them; any thread."""
    figures = server_row(server)
    figures["in_bytes"] = sum(group.statistics().bytes_in for group in server.groups.groups)
    if not figures["refused"]:
        del figures["refused"]
    if isinstance(server, LiveServer):
        figures["streams"] = sum(
            stream.publisher is not None and stream.publisher.peer[1] > 0 for stream in server.hub.streams()
        )
        figures |= _of_viewers(server.hub)
        budget = server.hub.oversight.statistics().budget
        figures["held"] = budget.held.total_bytes
        if budget.limit_bytes:
            figures["gave_way"] = {"thinned": budget.thinned, "closed": budget.closed}
        if server.recording is not None:
            figures |= _recorded(server.recording)
    return figures


def server_row(server: Server) -> dict[str, Any]:
    """Return what every account of a server begins with."""
    row = {
        "connections": len(server.connections()),
        "accepted": server.accepted_count,
        "refused": server.admission.refused,
        "closed": {reason.value: count for reason, count in server.closed_by_reason.items()},
        "busy": round(max(group.statistics().busy_fraction for group in server.groups.groups), 3),
    }
    if isinstance(server, LiveServer):
        row |= {f"{name}_file": status.fault or status.state for name, status in server.reload.status.items()}
    return row


def _of_viewers(hub: Hub) -> dict[str, Any]:
    """Return sums over all viewers, cheap enough for each second: those that always kept up cost some 3 us each."""
    states: Counter[SendState] = Counter()
    renditions: Counter[str] = Counter()
    least_share, worst_ms, missing, dropped, returns = 1.0, 0.0, 0, 0, 0
    for _, viewer in RestingPace().over(hub.viewing()):
        sender = viewer.connection.sender
        account = sender.account(rows=False)
        states[account.state] += 1
        if name := rendition_of(viewer.connection):
            renditions[name] += 1
        if not (account.lagging or account.noted):
            continue  # what was dropped is in the ledger, and so is that it was asked for
        statistics = sender.statistics()
        missing += account.picture_share < 1
        least_share = min(least_share, account.picture_share)
        worst_ms = max(worst_ms, account.delay_ms)
        dropped += statistics.dropped_messages
        returns += statistics.returns
    return {
        "viewers": {state.name.lower(): states[state] for state in SendState if states[state]},
        **({"renditions": dict(renditions)} if renditions else {}),
        "missing_pictures": missing,
        **({"least_pictures": least_share} if missing else {}),
        "worst_delay_s": worst_ms / 1000,
        "dropped": dropped,
        "returns": returns,
    }


def _recorded(recording: Recording) -> dict[str, Any]:
    """Return what the records tell: the counters of the feed, which are sums over what stands in the files."""
    counters = recording.recorder.feed.snapshot()
    return {
        "events": dict(sorted(counters.events.items())),
        "limit_hits": dict(sorted(counters.limit_hits.items())),
        "records_lost": recording.recorder.statistics().lost_rows,
    }


def shown(figures: Mapping[str, Any]) -> dict[str, Any]:
    texts = dict(figures)
    texts["busy"] = f"{texts['busy']:.0%}"
    if "least_pictures" in texts:
        texts["least_pictures"] = f"{texts['least_pictures']:.0%}"
    if "worst_delay_s" in texts:
        texts["worst_delay_s"] = round(texts["worst_delay_s"], 1)
    if "held" in texts:
        texts["held"] = format_size(texts["held"])
    return texts
