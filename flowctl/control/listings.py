"""What operations tell that only look: figures, streams and connections page by page, events, sums for monitoring."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from flowctl.control.effects import find_connection, lies_in
from flowctl.control.summary import server_row
from flowctl.control.together import CONNECTION_SORTS, STREAM_SORTS
from flowctl.core.flow.state import CLASS_COUNT
from flowctl.core.text.addresses import address_of, join_host_port
from flowctl.core.text.fieldtypes import Json
from flowctl.live.oversight.pace import RestingPace
from flowctl.live.rows import (
    add_viewer,
    connection_in_full,
    connection_row,
    is_slow,
    rendition_of,
    stream_row,
)

if TYPE_CHECKING:
    from flowctl.connection import Connection
    from flowctl.core.sending.figures import Account
    from flowctl.live.server import LiveServer

_QUEUE_SORTS: Final = frozenset({"queued", "dropped"})
"""Orders of connections that need a look at the queues themselves."""
_VIEWERS: Final = {"role": "viewer", "protocol": None, "peer": None, "sort": "worst", "reverse": False}


@runtime_checkable
class FigureSource(Protocol):
    """A companion of a server that has figures of its own."""

    title: str

    def figures(self) -> Json:
        """Return them, as JSON. Any thread."""


def stats(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    shown = streams(server, {**asked, "sort": "viewers", "reverse": False})
    viewers: Json = {"connections": [], "found": {"connections": 0}}
    if asked["viewers"] != "none":
        state = "slow" if asked["viewers"] == "slow" else None
        viewers = connections(server, {**asked, **_VIEWERS, "connection": None, "state": state})
    return {
        "server": _server(server),
        "streams": shown["streams"],
        "viewers": viewers["connections"],
        "found": shown["found"] | {"viewers": viewers["found"]["connections"]},
        **{item.title: item.figures() for item in server.companions if isinstance(item, FigureSource)},
    }


def _server(server: LiveServer) -> Json:
    drains_for_s = server.drains_for_s
    return server_row(server) | {
        "url": f"rtmp://{join_host_port(*server.address)}/",
        "listeners": [{"name": item.name or "rtmp", "address": address_of(item.address)} for item in server.listeners],
        "pid": os.getpid(),
        "up_s": round(server.clock() - server.started_at, 1),
        "limits": str(server.limits),
        "limits_from": server.limits_from,
        "bans": len(server.admission.bans),
        "change": server.changes.version,
        **({} if drains_for_s is None else {"drains_for_s": round(drains_for_s, 1)}),
    }


def streams(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    first, end = asked["offset"], asked["offset"] + asked["limit"]
    renditions = server.hub.renditions.find
    rows_by_name = {
        stream.name: stream_row(stream, count, [] if (found := renditions(stream)) is None else found.renditions())
        for stream, count in server.hub.streams().items()
        if fnmatchcase(stream.name, asked["stream"])
    }
    for name, viewer in RestingPace().over(server.hub.viewing() if rows_by_name else ()):
        if (row := rows_by_name.get(name)) is not None:
            connection = viewer.connection
            add_viewer(row, connection.sender.account(rows=False), rendition_of(connection))
    rows = sorted(rows_by_name.values(), key=STREAM_SORTS[asked["sort"]], reverse=asked["reverse"])
    return {
        "streams": rows[first:end],
        "found": {"streams": len(rows), "offset": first, "limit": asked["limit"]},
    }


def connections(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    if asked["connection"] is not None:
        return {"connection": connection_in_full(find_connection(server, asked["connection"]))}
    first, end, sort, state = asked["offset"], asked["offset"] + asked["limit"], asked["sort"], asked["state"]
    ranked = []
    for item in RestingPace().over(_fitting(server, asked)):
        account = item.sender.account(rows=sort in _QUEUE_SORTS)
        if state is None or (is_slow(account) if state == "slow" else account.state.name == state):
            ranked.append((_rank_row(item, account), item))
    key = CONNECTION_SORTS[sort]
    ranked.sort(key=lambda pair: key(pair[0]), reverse=asked["reverse"])
    return {
        "connections": [connection_row(item) for _, item in RestingPace().over(ranked[first:end])],
        "found": {"connections": len(ranked), "offset": first, "limit": asked["limit"]},
    }


def _fitting(server: LiveServer, asked: Mapping[str, Any]) -> Iterator[Connection]:
    """Iterate over the connections that fit by what they are; how they stand costs more, and is looked at later."""
    network = None if asked["peer"] is None else ip_network(asked["peer"])
    pattern, role, protocol = asked["stream"], asked["role"], asked["protocol"]
    for item in server.connections():
        session = item.session
        if role is not None and (session.role or "none") != role:
            continue
        if protocol is not None and session.protocol != protocol:
            continue
        if network is not None and not lies_in(item.peer[0], network):
            continue
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in session.streams()):
            continue
        yield item


def _rank_row(connection: Connection, account: Account) -> Json:
    return {
        "connection": connection.number,
        "state": account.state.name,
        "pictures": account.picture_share,
        "delay_ms": account.delay_ms,
        "queued_bytes": account.load.size_bytes,
        "dropped": sum(account.dropped[:CLASS_COUNT]),
        "sent_bytes": account.bytes_sent,
        "open_s": connection.now() - connection.opened_at,
    }


def events(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    """Return the events after a cursor, and the cursor to go on from.

    A cursor has ``run:number`` for each process of the server, with commas between them.
    """
    recent = server.recent
    parts = (part.partition(":") for part in asked["since"].split(","))
    numbers = {run: int(number) for run, _, number in parts if run and number.isascii() and number.isdecimal()}
    # A process that a cursor does not know is new, and has all to tell.
    number = numbers.get(recent.run, 0) if numbers else None
    entries, last, lost = recent.since(number, asked["limit"])
    return {"events": entries, "cursor": f"{recent.run}:{last}", "lost": lost}


def metrics(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    del asked
    sources = {item.title: item for item in server.companions if isinstance(item, FigureSource)}
    kind = next((kind for kind in ("edge", "origin") if kind in sources), "server")
    figures = {
        "pid": os.getpid(),
        "kind": kind,
        "segments_sent_bytes": sources[kind].figures()["sent_bytes"] if kind in sources else 0,
        "at": round(time.time(), 3),
        "up_s": round(server.clock() - server.started_at, 1),
        **server.meters.figures(server.connections, server.hub.fanouts()),
        "accepted": server.accepted_count,
        "refused": server.admission.refused,
        "threads": {group.name: _thread(group.statistics()) for group in server.groups.groups},
        "streams": sum(stream.publisher is not None for stream in server.hub.streams()),
        "bans": len(server.admission.bans),
        "draining": server.drains_for_s is not None,
    }
    media = [item.figures() for item in server.companions if isinstance(item, FigureSource) and item.title == "media"]
    return {"parts": [figures], **({"media": media[0]} if media else {})}


def _thread(figures: Any) -> Json:
    return {
        "busy": round(figures.busy_fraction, 4),
        "longest_turn_s": round(figures.longest_turn_s, 4),
        "turns": figures.turns,
        "errors": figures.errors,
        "received_bytes": figures.bytes_in,
        "sent_bytes": figures.bytes_out,
    }
