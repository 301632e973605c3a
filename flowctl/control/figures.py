"""What `flow.stats` tells: the server, its streams, and the viewers that are slow, with the reasons."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

from flowctl.core.flow.state import SendState
from flowctl.core.text.printable import foreign
from flowctl.errors import LocalProtocolError

if TYPE_CHECKING:
    from flowctl.connection import Connection
    from flowctl.core.sending.figures import Account
    from flowctl.live.hub import Viewer
    from flowctl.live.server import LiveServer
    from flowctl.live.statistics import ViewerStatistics

Json = dict[str, Any]
_T = TypeVar("_T")


@runtime_checkable
class Described(Protocol):
    """A companion of a server that has figures of its own."""

    title: str

    def figures(self) -> Json:
        """Return them, as JSON. Any thread."""


_WORK_S: Final = 0.0003
_REST_S: Final = 0.001
"""As those who gather figures of thousands of viewers rest (`flowctl.live.oversight.pace`)."""
TEXT: Final = 100
"""Longest name of a player or stream that is told, characters."""


def stats(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    """Return figures of the server, and a page of its streams and of its viewers."""
    number = asked["connection"]
    if number is not None:
        return {"connection": _connection(server, number)}
    first, end = asked["offset"], asked["offset"] + asked["limit"]
    streams = _streams(server, asked["stream"])
    viewers = _viewers(server, asked["stream"], asked["viewers"])
    return {
        "server": _server(server),
        "streams": streams[first:end],
        "viewers": [_viewer(name, viewer.viewer_statistics()) for name, viewer in paced(viewers[first:end])],
        "found": {"streams": len(streams), "viewers": len(viewers), "offset": first, "limit": asked["limit"]},
    } | _companions(server)


def _companions(server: LiveServer) -> Json:
    """Return the figures of what runs beside the server and has some: of an origin, or of an edge."""
    return {item.title: item.figures() for item in server.companions if isinstance(item, Described)}


def paced(items: Iterable[_T]) -> Iterator[_T]:
    """Iterate with rests, so that the poll groups get the interpreter in between."""
    since = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - since >= _WORK_S:
            time.sleep(_REST_S)
            since = time.perf_counter()


def _server(server: LiveServer) -> Json:
    groups = [group.statistics() for group in server.groups.groups]
    drains_for_s = server.drains_for_s
    figures: Json = {
        "url": f"rtmp://{server.address[0]}:{server.address[1]}/",
        "listeners": [{"name": item.name or "rtmp", "address": address_of(item.address)} for item in server.listeners],
        "pid": os.getpid(),
        "up_s": round(server.clock() - server.started_at, 1),
        "busy": round(max(group.busy_fraction for group in groups), 3),
        "connections": len(server.connections()),
        "accepted": server.accepted_count,
        "refused": server.admission.refused,
        "closed": {reason.value: count for reason, count in server.closed_by_reason.items()},
        "limits": str(server.limits),
        "limits_from": server.limits_from,
        "bans": len(server.admission.bans),
        "change": server.changes.version,
    }
    for name, status in server.reload.status.items():
        figures[f"{name}_file"] = status.fault or status.state
    if drains_for_s is not None:
        figures["drains_for_s"] = round(drains_for_s, 1)
    return figures


def _streams(server: LiveServer, pattern: str) -> list[Json]:
    """Return the streams whose names fit, those with most viewers first."""
    found = []
    for stream, count in server.hub.streams().items():
        if fnmatchcase(stream.name, pattern):
            publisher = stream.publisher
            found.append(
                {
                    "stream": foreign(stream.name, TEXT),
                    "publisher": None if publisher is None else address_of(publisher.peer),
                    "media": stream.media,
                    "viewers": count,
                    "standby": len(stream.standby),
                    "in_bytes": stream.bytes_in,
                }
            )
    return sorted(found, key=lambda item: (-item["viewers"], item["stream"]))


def _viewers(server: LiveServer, pattern: str, which: str) -> list[tuple[str, Viewer]]:
    """Return the viewers of streams whose names fit, the worst first."""
    if which == "none":
        return []
    ranked = []
    for name, viewer in paced(server.hub.viewing()):
        if not fnmatchcase(name, pattern):
            continue
        account = viewer.connection.sender.account(rows=False)
        if which == "all" or is_slow(account):
            ranked.append(
                (-account.state, account.picture_share, -account.delay_ms, viewer.connection.number, name, viewer)
            )
    return [(name, viewer) for *_, name, viewer in sorted(ranked, key=lambda item: item[:4])]


def _viewer(stream: str, found: ViewerStatistics) -> Json:
    return {
        "connection": found.number,
        "peer": address_of(found.peer),
        "protocol": found.protocol,
        "stream": foreign(stream, TEXT),
        "state": found.state.name,
        "delay_ms": round(found.viewer_delay_ms),
        "pictures": round(found.sender.picture_share, 3),
        "queued_bytes": found.sender.load.size_bytes,
        "dropped": found.sender.dropped_messages,
        "open_s": round(found.connected_s, 1),
        "agent": foreign(found.user_agent, TEXT),
        "why": found.why,
    }


def _connection(server: LiveServer, number: int) -> Json:
    """Return all that is known of one connection: figures, limits, and its ledger in words."""
    connection = next((item for item in server.connections() if item.number == number), None)
    if connection is None:
        raise LocalProtocolError(f"there is no connection {number}", hint="flowctl connections lists them")
    sender, session, now = connection.sender, connection.session, connection.now()
    found = sender.statistics()
    streams: list[str] = getattr(session, "streams", list)()
    return {
        "connection": number,
        "peer": address_of(connection.peer),
        "protocol": getattr(session, "protocol", ""),
        "streams": [foreign(name, TEXT) for name in streams],
        "agent": foreign(getattr(session, "user_agent", ""), TEXT),
        "state": found.state.name,
        "why": connection.why(),
        "delay_ms": round(sender.sample_delay()),
        "pictures": round(found.picture_share, 3),
        "queued_bytes": found.load.size_bytes,
        "sent_bytes": found.bytes_sent,
        "dropped": found.dropped_messages,
        "open_s": round(now - connection.opened_at, 1),
        "limits": str(sender.limits),
        "ledger": ledger_rows(connection),
    }


def ledger_rows(connection: Connection) -> list[Json]:
    now = connection.now()
    return [
        {
            "ago_s": round(now - entry.at, 1),
            "what": entry.kind.value,
            "state": None if entry.change is None else entry.change.new.name,
            "why": entry.why,
        }
        for entry in connection.sender.ledger()
    ]


def is_slow(account: Account) -> bool:
    """Return whether a viewer is in trouble, has something left over, or does not get all of the pictures."""
    return account.state is not SendState.READY or account.lagging or account.picture_share < 1


def address_of(peer: tuple[str, int]) -> str:
    """Return address and port; a peer that is this server itself says whom it follows, and has no port."""
    host = f"[{peer[0]}]" if ":" in peer[0] else peer[0]
    return f"{host}:{peer[1]}" if peer[1] else peer[0]
