"""What the operations on a running server do: each takes the server and the values of its arguments, and returns JSON.

They run on the thread of the surface that serves them, never on one of a poll group. What changes the server is done
by the server, in the order in which it is asked for.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flowctl.control.place import check_path
from flowctl.control.together import KICKED_SHOWN
from flowctl.core.flow.limits import Limits, parse_target_delay, target_marks, write_marks
from flowctl.core.server.bans import Ban, BanAction, parse_utc, utc_text
from flowctl.core.text.addresses import meanings
from flowctl.core.text.fieldtypes import Json
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError, LocalProtocolError

if TYPE_CHECKING:
    from flowctl.connection import Connection
    from flowctl.live.server import LiveServer

_MOST_DETAIL_BYTES: Final = 512 * 1024
"""Most octets of details of changes in one answer: half of what a message may have."""
KEPT_IN_STORE: Final = "in the ban store, and after a restart too"


def kick(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    number, stream, peer = asked["connection"], asked["stream"], asked["peer"]
    if number is None and stream is None and peer is None:
        raise ConfigError("kick: whom is missing", hint="give a connection's number, --stream or --peer")
    network = None if peer is None else ip_network(peer)

    def fits(connection: Connection) -> bool:
        if number is not None and connection.number != number:
            return False
        if stream is not None and stream not in connection.session.streams():
            return False
        return network is None or lies_in(connection.peer[0], network)

    kicked = server.kick(fits, asked["reason"])
    if not kicked and number is not None:
        raise LocalProtocolError(f"there is no such connection {number}", hint="flowctl connections lists them")
    return {"kicked": len(kicked), "connections": [item.number for item in kicked[:KICKED_SHOWN]]}


def find_connection(server: LiveServer, number: int) -> Connection:
    connection = next((item for item in server.connections() if item.number == number), None)
    if connection is None:
        raise LocalProtocolError(f"there is no connection {number}", hint="flowctl connections lists them")
    return connection


def lies_in(address: str, network: Any) -> bool:
    return any(item in network for item in meanings(address))


def limits(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    """Show limits, or set them: those of the server, or of one connection."""
    number = asked["connection"]
    connection = None
    if number is not None and asked.get("stream") is not None:
        raise ConfigError("limits: connection and stream are both given", hint="leave one of the two out")
    if asked.get("stream") is not None:
        return _limits_of_stream(server, asked)
    if number is not None:
        connection = find_connection(server, number)
    now = server.limits if connection is None else connection.sender.limits
    asked_limits = _limits_asked(now, asked)
    if asked_limits is None:
        return _limits_shown(server, now, connection)
    if connection is not None:
        connection.sender.set_limits(asked_limits)
        return _limits_shown(server, asked_limits, connection) | {"was": str(now)}
    count = server.change_limits(asked_limits, origin=asked["origin"])
    shown = _limits_shown(server, asked_limits, None) | {"was": str(now), "connections": count}
    until = "until the limits file changes, or " if "limits" in server.reload.status else ""
    return shown | {"note": f"in force {until}until the server ends"}


def _limits_of_stream(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    """Show the limits of all connections of a stream, or set them; later connections have the usual ones."""
    pattern = asked["stream"]
    connections = [
        item for item in server.connections() if any(fnmatchcase(name, pattern) for name in item.session.streams())
    ]
    if not connections:
        raise LocalProtocolError(f"nobody plays or publishes {pattern}", hint="flowctl streams lists them")
    now = connections[0].sender.limits
    asked_limits = _limits_asked(now, asked)
    shown = _limits_shown(server, asked_limits or now, None) | {"stream": pattern, "connections": len(connections)}
    if asked_limits is None:
        return shown | {"limits_of": dict(Counter(str(item.sender.limits) for item in connections))}
    for item in connections:
        item.sender.set_limits(asked_limits)
    return shown | {"was": str(now), "note": "in force for those who are connected now"}


def _limits_asked(now: Limits, asked: Mapping[str, Any]) -> Limits | None:
    """Return the limits that are asked for; None: only to be shown.

    As on the command line of a server: without `hard` it is twice `soft`, without `low` half of it.
    """
    soft, hard, low, target = (asked[name] for name in ("soft", "hard", "low", "target_delay"))
    if soft is hard is low is target is None:
        return None
    target_ms = now.target_delay_ms if target is None else parse_target_delay(target, "target_delay")
    if soft is hard is low is None:
        return dataclasses.replace(now, target_delay_ms=target_ms)
    return Limits.parse(
        soft or write_marks(now, "soft"),
        hard,
        low,
        overhead_bytes=now.overhead_bytes,
        hard_policy=now.hard_policy,
        target_delay_ms=target_ms,
    )


def _limits_shown(server: LiveServer, values: Limits, connection: Connection | None) -> Json:
    shown: Json = {name: write_marks(values, name) for name in ("soft", "hard", "low")}
    shown |= {"target_delay": target_marks(values), "hard_policy": values.hard_policy.value, "limits": str(values)}
    if connection is not None:
        return shown | {"connection": connection.number, "state": connection.sender.state.name}
    return shown | {"limits_from": server.limits_from, "connections": len(server.connections())}


def ban(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    expires = _ban_ends(asked, datetime.now(UTC))
    origin = asked["origin"]
    asked_ban = Ban(
        cidr=asked["network"],
        expires=expires,
        action=BanAction(asked["action"]),
        reason=asked["reason"],
        source=f"command of {origin}" if origin else "command",
    )
    outcome = server.ban(asked_ban, origin=origin)
    shown = outcome.ban.as_dict() | {"ended": outcome.ended, "in_store": outcome.in_store}
    kept = "until the server ends" if server.fleet is None else "as long as one server of the fleet runs"
    shown["kept"] = KEPT_IN_STORE if outcome.in_store else kept
    return shown | ({"warning": outcome.warning} if outcome.warning else {})


def _ban_ends(asked: Mapping[str, Any], now: datetime) -> datetime | None:
    expires, seconds = asked.get("expires"), asked["duration"]
    if expires is not None and seconds is not None:
        raise ConfigError("ban: duration and expires are both given", hint="leave one of the two out")
    if expires is not None:
        return parse_utc(expires)
    try:
        return None if seconds is None else now + timedelta(seconds=seconds)
    except OverflowError as error:
        raise ConfigError(f"duration is {seconds:g} s, it must end before the year 10000") from error


def unban(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    lifted = server.unban(Ban(cidr=asked["network"], expires=None).cidr, origin=asked["origin"])
    return {"lifted": [item.as_dict() for item in lifted]}


def bans(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    now, address = time.time(), asked["peer"]
    network = None if address is None else ip_network(address)
    matching = [
        item
        for item in server.admission.bans.bans
        if item.lasts(now)
        and (network is None or (item.network.version == network.version and item.network.overlaps(network)))
    ]
    matching.sort(key=lambda item: network is None or item.cidr != str(network))  # what is asked for itself comes first
    first = asked["offset"]
    shown = [
        {
            "cidr": item.cidr,
            "action": item.action.value,
            "expires": utc_text(item.expires),
            "score": item.score,
            "reason": item.reason,
            "source": item.source or "file",
            "evidence": dict(item.evidence),
        }
        for item in matching[first : first + asked["limit"]]
    ]
    return {"bans": shown, "found": {"bans": len(matching), "offset": first, "limit": asked["limit"]}}


def fleet(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    del asked
    if server.fleet is None:
        raise LocalProtocolError("the server is in no fleet", hint="flowctl serve live --fleet FILE; see docs/fleet.md")
    return server.fleet.status()


def drain(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    again = server.drains_for_s is not None
    left_s = server.drain(asked["within"], origin=asked["origin"], successor=successor_of(asked))
    return {
        "draining": server.drains_for_s is not None,  # not before a successor serves
        "again": again,
        "ends_within_s": round(left_s, 1),
        "connections": len(server.connections()),
    }


def successor_of(asked: Mapping[str, Any]) -> Path | None:
    """Return the path at which a server waits that is of this user, and so may be handed the sockets."""
    if not asked["successor"]:
        return None
    path = Path(asked["successor"])
    if not check_path(path):
        raise ConfigError(f"successor is {short(str(path))}, where nobody waits", hint="start it with --replace")
    return path


def reload(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    del asked
    certificate = server.certificate
    if not server.reload.watching and certificate is None:
        raise LocalProtocolError(
            "the server has no file of settings, limits or bans", hint="start it with --config, --limits or --bans"
        )

    def read() -> Json:
        before = server.changes.version
        changed = server.reload.read_now()
        details = {change.what: change.detail for change in server.changes.since(before)[0]}
        files = {
            name: {
                "file": status.path,
                "state": status.state,
                # The file of settings is read again for the files that it names, and may have nothing new.
                "changed": changed[name] and (name != "config" or "config file" in details),
                **({"fault": status.fault} if status.fault else {}),
                **({"hint": status.hint} if status.hint else {}),
                **({"now": details[f"{name} file"]} if f"{name} file" in details else {}),
            }
            for name, status in server.reload.status.items()
        }
        if certificate is not None:
            files["certificate"] = {
                "file": str(certificate.certificate),
                "state": "invalid" if certificate.fault else "valid",
                "changed": "certificate" in details,
                **({"fault": certificate.fault} if certificate.fault else {}),
            }
        if server.waiting:
            files["config"]["waits_for_restart"] = list(server.waiting)
        faults = [item["fault"] for item in files.values() if "fault" in item]
        return files | ({"faults": faults} if faults else {})

    return server.reload.run_job(read)


def changes(server: LiveServer, asked: Mapping[str, Any]) -> Json:
    entries, whole = server.changes.since(asked["since"])
    shown: list[Json] = []
    size = 0
    for change in entries[: asked["limit"]]:
        size += len(json.dumps(change.detail))
        if shown and size > _MOST_DETAIL_BYTES:
            break  # who asks for what came after the last one gets the others
        shown.append(dataclasses.asdict(change))
    return {"run": server.changes.run, "version": server.changes.version, "whole": whole, "changes": shown}
