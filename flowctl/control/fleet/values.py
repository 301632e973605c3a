"""What stands in a fleet's table (pure): keys and values of bans and limits, made here, checked when others send them.

A ban has the key ``ban 203.0.113.7/32``, or ``limit 203.0.113.0/24`` where the network is limited; its value is its
line in a ban file. The limits have the key ``limits``; their value is what ``flow.limits`` takes, as JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from math import inf
from typing import Any, Final

from flowctl.core.server.bans import Ban, BanAction, BanList
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError

LIMITS: Final = "limits"
"""Key of the limits."""
MOST_VALUE_BYTES: Final = 1024
"""Longest value: a ban with its reason always fits. Evidence that does not is left out: it is in the records of the
server that made the ban. It bounds a full table to 100 MB."""


def ban_key(cidr: str, action: BanAction) -> str:
    return f"{action.value} {cidr}"


def cidr_of(key: str) -> str | None:
    """Return the network that a key is about. None: it is that of the limits."""
    return None if key == LIMITS else key.partition(" ")[2]


def ban_value(ban: Ban) -> str:
    """Return the value of a ban; without its evidence where that would be too long, and without who made it where."""
    ban = dataclasses.replace(ban, source="")
    line = _short_line(ban)
    return _short_line(dataclasses.replace(ban, evidence={})) if len(line.encode()) > MOST_VALUE_BYTES else line


def _short_line(ban: Ban) -> str:
    return json.dumps(json.loads(ban.line()), ensure_ascii=False, separators=(",", ":"))


def ban_of(value: str) -> Ban:
    bans = BanList.parse(value, "the value").bans
    if len(bans) != 1:
        raise ConfigError(f"the value is {short(value)}, it must be one ban")
    return bans[0]


def limits_value(limits: Mapping[str, Any]) -> str:
    """Return the value of limits, which are written as ``flow.limits`` takes them."""
    text = json.dumps(dict(limits), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    if len(text.encode()) > MOST_VALUE_BYTES:
        raise ConfigError(f"the limits have more than {MOST_VALUE_BYTES} bytes")
    return text


def limits_of(value: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the limits are {short(value)}, they must be JSON") from error
    plain = (str, int, float, bool, type(None))
    if not isinstance(found, dict) or not all(isinstance(item, plain) for item in found.values()):
        raise ConfigError(f"the limits are {short(value)}, they must be an object of plain values")
    return found


def ends_s(key: str, value: str | None) -> float:
    """Check that `value` may stand under `key`; return when it ends by itself, seconds since the epoch."""
    if value is None:
        action, _, cidr = key.partition(" ")
        actions = [item.value for item in BanAction]
        if action not in actions or Ban(cidr=cidr, expires=None).cidr != cidr:
            raise ConfigError(f"the key is {short(key)}, it must be that of a ban")
        return 0.0
    if len(value.encode(errors="replace")) > MOST_VALUE_BYTES:
        raise ConfigError(f"the value of {short(key)} has more than {MOST_VALUE_BYTES} bytes")
    if key == LIMITS:
        limits_of(value)
        return inf
    ban = ban_of(value)
    if ban_key(ban.cidr, ban.action) != key:
        raise ConfigError(f"the key is {short(key)}, it must be that of the ban, {ban_key(ban.cidr, ban.action)}")
    return inf if ban.expires is None else ban.expires.timestamp()
