"""Connections and streams as rows: of figures, lists, the API and events; plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from flowctl.core.flow.limits import Axis, AxisLimits
from flowctl.core.flow.state import SendState
from flowctl.core.text.addresses import address_of
from flowctl.core.text.fieldtypes import Json
from flowctl.core.text.printable import foreign

if TYPE_CHECKING:
    from flowctl.connection import Connection
    from flowctl.core.flow.renditionbook import RenditionBook
    from flowctl.core.sending.figures import Account
    from flowctl.live.renditions.renditionset import RenditionFacts
    from flowctl.live.stream import Stream

NAME_CHARS: Final = 100
"""Longest name of a player or stream in a row, characters."""


def is_slow(account: Account) -> bool:
    """Return whether a viewer is in trouble, has something left over, or does not get all of the pictures."""
    return account.state is not SendState.READY or account.lagging or account.picture_share < 1


def identity_row(connection: Connection) -> Json:
    streams = connection.session.streams()
    return {
        "connection": connection.number,
        "peer": address_of(connection.peer),
        "role": connection.session.role or "none",
        "stream": foreign(streams[0], NAME_CHARS) if streams else None,
    }


def connection_row(connection: Connection) -> Json:
    sender, now = connection.sender, connection.now()
    found, limits = sender.statistics(), sender.limits
    return identity_row(connection) | {
        "protocol": connection.session.protocol,
        "state": found.state.name,
        "since_s": round(max(0.0, now - found.since), 1),
        "axes": {
            Axis.BYTES.value: _axis(found.load.size_bytes, limits.size),
            Axis.MESSAGES.value: _axis(found.load.messages, limits.messages),
            Axis.AGE.value: _axis(round(found.load.age_ms), limits.age_ms),
        },
        "delay_ms": round(sender.sample_delay()),
        "pictures": round(found.picture_share, 3),
        "rendition": rendition_of(connection) or None,
        "renditions": None if connection.renditions is None else _renditions(connection.renditions, now),
        "rate_bytes_per_s": None if found.drain_bytes_per_s is None else round(found.drain_bytes_per_s),
        "stalled_s": round(found.stalled_s, 1),
        "queued_bytes": found.load.size_bytes,
        "sent_bytes": found.bytes_sent,
        "received_bytes": connection.receiver.statistics().bytes_in,
        "dropped": found.dropped_messages,
        "drops": {reason.value: counts.by_name() for reason, counts in found.dropped.items() if counts.total_messages},
        "open_s": round(now - connection.opened_at, 1),
        "agent": foreign(connection.session.user_agent, NAME_CHARS),
        "why": connection.why(),
    }


def rendition_of(connection: Connection) -> str:
    """Return the name of the rendition that a viewer of a set is in; empty: it follows none."""
    return "" if connection.renditions is None else connection.renditions.name


def _renditions(book: RenditionBook, now: float) -> Json:
    seconds = book.seconds(now)
    total_s = sum(seconds.values()) or 1.0
    return {
        "of": book.count,
        "for_s": round(now - book.since, 1) if book.name else 0.0,
        "why": book.why,
        "ups": book.ups,
        "downs": book.downs,
        "failed": book.failed,
        "shares": {name: round(stay_s / total_s, 3) for name, stay_s in seconds.items()},
    }


def _axis(value: int, marks: AxisLimits) -> Mapping[str, int]:
    """Return what waits on an axis beside its marks; a mark of 0 is off."""
    return {"value": value, "low": marks.low or 0, "soft": marks.soft, "hard": marks.hard or 0}


def connection_in_full(connection: Connection) -> Json:
    found, now = connection.sender.statistics(), connection.now()
    return connection_row(connection) | {
        "streams": [foreign(name, NAME_CHARS) for name in connection.session.streams()],
        "limits": str(connection.sender.limits),
        "time_in_states_s": {state.name: round(found.time_in_states_s[state], 1) for state in SendState},
        "longest_stall_s": round(found.longest_stall_s, 1),
        "returns": found.returns,
        "ledger": [
            {
                "ago_s": round(now - entry.at, 1),
                "what": entry.kind.value,
                "state": None if entry.change is None else entry.change.new.name,
                "why": entry.why,
            }
            for entry in connection.sender.ledger()
        ],
    }


def stream_row(stream: Stream, viewers: int, renditions: Iterable[RenditionFacts] = ()) -> Json:
    """Return one stream, to whose states and renditions its viewers are still to be added (`add_viewer`)."""
    publisher = stream.publisher
    follows = publisher is not None and not publisher.peer[1]
    return {
        "stream": foreign(stream.name, NAME_CHARS),
        "publisher": None if publisher is None else address_of(publisher.peer),
        "connection": None if publisher is None or follows else publisher.number,
        "media": stream.media,
        "codecs": {kind: foreign(codec, NAME_CHARS) for kind, codec in tuple(stream.codecs.items()) if codec},
        "viewers": viewers,
        "states": {state.name: 0 for state in SendState},
        "slow": 0,
        "standby": len(stream.standby),
        "commands": [dict(item) for item in stream.commands],
        "unwritten": {kind: foreign(why, NAME_CHARS) for kind, why in stream.unwritten.items()},
        "in_bytes": stream.bytes_in,
        "in_messages": sum(stream.messages_in),
        "in_frames": stream.messages_by_type[0],
        "sent_bytes": 0,
        "renditions": [_rendition_row(item) for item in renditions],
    }


def _rendition_row(facts: RenditionFacts) -> Json:
    clock = "" if facts.clock in {"", "as they are"} else f"times {facts.clock}"
    return {
        "rendition": foreign(facts.name, NAME_CHARS),
        "bit_rate": round(facts.bytes_per_s * 8) or None,
        "codec": foreign(facts.codec, NAME_CHARS) or None,
        "size": None if facts.size is None else "{}x{}".format(*facts.size),
        "viewers": 0,
        "remark": "; ".join(filter(None, ("" if facts.joined else "no viewer may be in it yet", clock))),
    }


def add_viewer(row: Json, account: Account, rendition: str) -> None:
    for item in row["renditions"] if rendition else ():
        item["viewers"] += item["rendition"] == rendition
    row["states"][account.state.name] += 1
    row["sent_bytes"] += account.bytes_sent
    row["slow"] += is_slow(account)
