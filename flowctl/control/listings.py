"""Streams and connections of a running server as lists that can be narrowed down, sorted and read page by page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any, Final

from flowctl.control.effects import lies_in
from flowctl.control.figures import TEXT, address_of, is_slow, ledger_rows, paced
from flowctl.control.ranks import CONNECTION_SORTS, STREAM_SORTS
from flowctl.core.flow.counts import Counts
from flowctl.core.flow.limits import Axis, AxisLimits, Limits
from flowctl.core.flow.state import CLASS_COUNT, SendState
from flowctl.core.text.printable import foreign
from flowctl.errors import LocalProtocolError

if TYPE_CHECKING:
    from flowctl.connection import Connection
    from flowctl.core.sending.figures import Account
    from flowctl.live.server import LiveServer
    from flowctl.reasons import DropReason

Json = dict[str, Any]
_COSTLY: Final = frozenset({"queued", "dropped"})
"""Orders for which the queues themselves are looked at."""


def streams(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    """Return a page of the streams, each with its viewers by state."""
    first, end = asked["offset"], asked["offset"] + asked["limit"]
    found = {
        stream.name: _stream(stream, count)
        for stream, count in server.hub.streams().items()
        if fnmatchcase(stream.name, asked["stream"])
    }
    for name, viewer in paced(server.hub.viewing()):
        row = found.get(name)
        if row is not None:
            account = viewer.connection.sender.account(rows=False)
            row["states"][account.state.name] += 1
            row["sent_bytes"] += account.bytes_sent
            row["slow"] += is_slow(account)
    rows = sorted(found.values(), key=STREAM_SORTS[asked["sort"]], reverse=asked["reverse"])
    return {
        "streams": rows[first:end],
        "found": {"streams": len(rows), "offset": first, "limit": asked["limit"]},
    }


def _stream(stream: Any, viewers: int) -> Json:
    publisher = stream.publisher
    follows = publisher is not None and not publisher.peer[1]
    return {
        "stream": foreign(stream.name, TEXT),
        "publisher": None if publisher is None else address_of(publisher.peer),
        "connection": None if publisher is None or follows else publisher.number,
        "media": stream.media,
        "codecs": {kind: foreign(codec, TEXT) for kind, codec in tuple(stream.codecs.items()) if codec},
        "viewers": viewers,
        "states": {state.name: 0 for state in SendState},
        "slow": 0,
        "standby": len(stream.standby),
        "in_bytes": stream.bytes_in,
        "in_messages": sum(stream.messages_in),
        "in_frames": stream.messages_by_type[0],
        "sent_bytes": 0,
    }


def connections(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    """Return a page of the connections that fit what is asked for, or one with its ledger."""
    if asked["connection"] is not None:
        return {"connection": _in_full(find(server, asked["connection"]))}
    first, end, sort = asked["offset"], asked["offset"] + asked["limit"], asked["sort"]
    ranked = [
        (_in_short(item, account), item)
        for item, account in paced(_accounts(_fitting(server.connections(), asked), costly=sort in _COSTLY))
        if asked["state"] is None or fits_state(account, asked["state"])
    ]
    key = CONNECTION_SORTS[sort]
    ranked.sort(key=lambda pair: key(pair[0]), reverse=asked["reverse"])
    return {
        "connections": [row_of(item) for _, item in paced(ranked[first:end])],
        "found": {"connections": len(ranked), "offset": first, "limit": asked["limit"]},
    }


def find(server: LiveServer, number: int) -> Connection:
    found = next((item for item in server.connections() if item.number == number), None)
    if found is None:
        raise LocalProtocolError(f"there is no connection {number}", hint="flowctl connections lists them")
    return found


def streams_of(connection: Connection) -> list[str]:
    """Return the names of the streams that a connection plays or publishes."""
    found: list[str] = getattr(connection.session, "streams", list)()
    return found


def role_of(connection: Connection) -> str:
    """Return ``publisher`` or ``viewer``; empty: neither yet."""
    return str(getattr(connection.session, "role", ""))


def protocol_of(connection: Connection) -> str:
    """Return what the peer speaks, such as ``rtmp``."""
    return str(getattr(connection.session, "protocol", ""))


def _fitting(found: Iterable[Connection], asked: Mapping[str, Any]) -> Iterator[Connection]:
    """Iterate over the connections that fit by what they are; how they stand costs more, and is looked at later."""
    network = None if asked["peer"] is None else ip_network(asked["peer"])
    pattern, role, protocol = asked["stream"], asked["role"], asked["protocol"]
    for item in found:
        if role is not None and (role_of(item) or "none") != role:
            continue
        if protocol is not None and protocol_of(item) != protocol:
            continue
        if network is not None and not lies_in(item.peer[0], network):
            continue
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in streams_of(item)):
            continue
        yield item


def _accounts(found: Iterable[Connection], *, costly: bool) -> Iterator[tuple[Connection, Account]]:
    for item in found:
        yield item, item.sender.account(rows=costly)


def fits_state(account: Account, wanted: str) -> bool:
    """Return whether a connection stands as `wanted` says: a state's name, or ``slow``."""
    return is_slow(account) if wanted == "slow" else account.state.name == wanted


def _in_short(connection: Connection, account: Account) -> Json:
    """Return what a connection is sorted by."""
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


def row_of(connection: Connection) -> Json:
    """Return one connection as lists show it."""
    sender, names, now = connection.sender, streams_of(connection), connection.now()
    found, limits = sender.statistics(), sender.limits
    return {
        "connection": connection.number,
        "peer": address_of(connection.peer),
        "protocol": protocol_of(connection),
        "role": role_of(connection) or "none",
        "stream": foreign(names[0], TEXT) if names else None,
        "state": found.state.name,
        "since_s": round(max(0.0, now - found.since), 1),
        "axes": _axes(limits, found.load),
        "delay_ms": round(sender.sample_delay()),
        "pictures": round(found.picture_share, 3),
        "rate_bytes_per_s": None if found.drain_bytes_per_s is None else round(found.drain_bytes_per_s),
        "stalled_s": round(found.stalled_s, 1),
        "queued_bytes": found.load.size_bytes,
        "sent_bytes": found.bytes_sent,
        "received_bytes": connection.receiver.statistics().bytes_in,
        "dropped": found.dropped_messages,
        "drops": _drops(found.dropped),
        "open_s": round(now - connection.opened_at, 1),
        "agent": foreign(getattr(connection.session, "user_agent", ""), TEXT),
        "why": connection.why(),
    }


def _axes(limits: Limits, load: Any) -> Json:
    """Return what waits on each axis beside its marks; a mark of 0 is off."""
    return {
        Axis.BYTES.value: _axis(load.size_bytes, limits.size),
        Axis.MESSAGES.value: _axis(load.messages, limits.messages),
        Axis.AGE.value: _axis(round(load.age_ms), limits.age_ms),
    }


def _axis(value: int, marks: AxisLimits) -> Json:
    return {"value": value, "low": marks.low or 0, "soft": marks.soft, "hard": marks.hard or 0}


def _drops(dropped: Mapping[DropReason, Counts]) -> Json:
    """Return the numbers of messages that were dropped, by reason and class."""
    return {reason.value: counts.by_name() for reason, counts in dropped.items() if counts.total_messages}


def _in_full(connection: Connection) -> Json:
    """Return all that is known of one connection: figures, limits, and its ledger in words."""
    sender = connection.sender
    found = sender.statistics()
    return row_of(connection) | {
        "streams": [foreign(name, TEXT) for name in streams_of(connection)],
        "limits": str(sender.limits),
        "time_in_states_s": {state.name: round(found.time_in_states_s[state], 1) for state in SendState},
        "longest_stall_s": round(found.longest_stall_s, 1),
        "returns": found.returns,
        "ledger": ledger_rows(connection),
    }
