"""How a member's server stands to the fleet's table (pure): what was changed at it, and what it has to be told.

Theory of operation. A server numbers its changes and names who asked for each (`flow.changes`). They are gone through
in that order, ours too: so what the server has is known at each of them, and a change that others made before, between
or after ours is told from ours by its origin, never by comparing. That is why nothing goes round in a circle. A change
by a command of somebody else is one for the fleet.

What a server reads from its own ban file is its own affair: the fleet neither spreads it nor lifts it. So for each ban
it is noted what the fleet, or a command, put there (`known`); what the fleet puts there, before it does. Only while the
server has just this is the ban lifted with the fleet's; else somebody else wants it too. For the same reason a ban is
never ended by a shorter one of the fleet's, unless it is the fleet's own.

A server that was started anew counts from the beginning, and has what its files say: its bans are listed once, and
what is missing is told again. The limits of the fleet are told once per life of a server: a limits file that changes
later counts, until the next command.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from math import inf
from typing import Any, Final, NamedTuple

from flowctl.control.fleet.stamp import Stamp
from flowctl.control.fleet.table import Entry, Table
from flowctl.control.fleet.values import LIMITS, ban_key, ban_of, ban_value, cidr_of, limits_of
from flowctl.core.server.bans import Ban, BanAction, parse_utc, utc_text

_NEAR_S: Final = 1.0
"""A ban ends at a whole second, and what is less than that from its end is over before it would be carried out."""


class Held(NamedTuple):
    """A ban as a server has it."""

    ends_s: float  #: seconds since the epoch; infinite: until it is lifted
    reason: str
    score: float

    def same(self, other: Held | None) -> bool:
        if other is None or (self.reason, self.score) != (other.reason, other.score):
            return False
        return self.ends_s == other.ends_s


def held(ban: Ban) -> Held:
    """Return a ban as a server has it."""
    return Held(inf if ban.expires is None else ban.expires.timestamp(), ban.reason, ban.score)


class Order(NamedTuple):
    """An operation that the server is to carry out.

    Attributes:
        operation: its name, without ``flow.``.
    """

    operation: str
    arguments: Mapping[str, Any]
    key: str
    stamp: Stamp


class Mirror:
    """What one server has, and what of it is the fleet's. One thread.

    Attributes:
        present: by key, all bans that the server has.
        needs_limits: whether the limits have to be asked for: a command changed them.
        touched: keys whose `known` has changed since they were stored.
    """

    def __init__(
        self,
        origin: str,
        *,
        run: str = "",
        version: int = 0,
        known: Mapping[str, Held] | None = None,
        limits_stamp: Stamp | None = None,
    ) -> None:
        self._origin: Final = origin
        self.run = run
        self.version = version
        self.known: Final = dict(known or {})
        self.limits_stamp = limits_stamp
        self.present: dict[str, Held] = {}
        self.needs_list = True
        self.needs_limits = False
        self.touched: set[str] = set()

    def begin(self, run: str) -> bool:
        """Follow the server's life `run`; return whether it is another than before."""
        if run == self.run:
            return False
        self.run, self.version, self.limits_stamp = run, 0, None
        self.present.clear()
        self.needs_list, self.needs_limits = True, False
        return True

    def take(self, change: Mapping[str, Any], table: Table, now_s: float) -> list[tuple[str, str | None]]:
        """Go through one change of the server; return what of it is one for the fleet, as key and value."""
        self.version = int(change["version"])
        what, ours = change["what"], change["origin"] == self._origin
        if what == "ban":
            return self._banned(change["detail"], table, now_s, ours=ours)
        if what == "unban":
            return self._lifted(str(change["detail"]["cidr"]), table, now_s, ours=ours)
        if what == "bans file":
            self.needs_list = True
        elif what == "limits":
            self.needs_limits = not ours
        return []

    def _banned(
        self, detail: Mapping[str, Any], table: Table, now_s: float, *, ours: bool
    ) -> list[tuple[str, str | None]]:
        ban = ban_of(json.dumps(detail))
        key = ban_key(ban.cidr, ban.action)
        before = self.present.get(key)
        foreign = before is not None and not before.same(self.known.get(key))
        self.present[key] = held(ban)
        self._know(key, None if foreign else held(ban))
        if ours:
            return []
        entry = table.get(key)
        value = ban_value(ban)
        same = entry is not None and entry.counts(now_s) and entry.value == value
        return [] if same else [(key, value)]

    def _lifted(self, cidr: str, table: Table, now_s: float, *, ours: bool) -> list[tuple[str, str | None]]:
        found: list[tuple[str, str | None]] = []
        for action in BanAction:
            key = ban_key(cidr, action)
            self.missing(key)
            entry = table.get(key)
            if not ours and entry is not None and entry.counts(now_s):
                found.append((key, None))
        return found

    def listed(self, bans: Iterable[Mapping[str, Any]], changed: Container[str] = ()) -> None:
        before = {key: item for key, item in self.present.items() if cidr_of(key) in changed}
        self.present.clear()
        self.present.update(before)
        for item in bans:
            if (cidr := str(item["cidr"])) in changed:
                continue
            expires = item["expires"]
            ends_s = inf if expires is None else parse_utc(expires).timestamp()
            self.present[ban_key(cidr, BanAction(item["action"]))] = Held(
                ends_s, str(item["reason"]), float(item["score"])
            )
        for key in [key for key, was in self.known.items() if not was.same(self.present.get(key))]:
            self._know(key, None)
        self.needs_list = False

    def forget(self, now_s: float) -> None:
        """Forget bans that have ended by themselves at `now_s`, seconds since the epoch: no change says so."""
        for key in [key for key, item in self.present.items() if item.ends_s <= now_s - _NEAR_S]:
            self.missing(key)

    def limits_read(self, value: str, table: Table) -> list[tuple[str, str | None]]:
        """Take the limits that a command gave the server; return what of it is a change for the fleet."""
        self.needs_limits = False
        entry = table.get(LIMITS)
        if entry is not None and entry.value == value:
            self.limits_stamp = entry.stamp
            return []
        return [(LIMITS, value)]

    def order(self, key: str, table: Table, now_s: float) -> Order | None:
        """Return what the server is to be told because of the entry of `key`. None: nothing."""
        entry = table.get(key)
        if key == LIMITS:
            return self._limits_order(entry)
        wanted = entry if entry is not None and entry.counts(now_s) else None
        here = self.present.get(key)
        ours = here is not None and here.same(self.known.get(key))
        if wanted is None:
            self_ended = here is not None and here.ends_s <= now_s + _NEAR_S
            return self._lift(key, entry) if ours and not self_ended else None
        if here is not None and here.ends_s >= wanted.ends_s:
            # Shortened: lifted first, and told anew once that has been seen.
            return self._lift(key, entry) if ours and here.ends_s > wanted.ends_s else None
        return self._ban_order(key, wanted, now_s)

    def intend(self, order: Order, entry: Entry | None) -> None:
        """Note, before the server is told, what it will have: should we end before we hear that it has it."""
        if order.operation == "ban" and entry is not None and entry.value is not None and order.key not in self.present:
            self._know(order.key, held(ban_of(entry.value))._replace(score=0.0))  # as a command makes it

    def told(self, order: Order) -> None:
        """Note that the server has carried out an order: the limits; bans are seen in its changes."""
        if order.key == LIMITS:
            self.limits_stamp = order.stamp

    def missing(self, key: str) -> None:
        """Note that the server says that it has no such ban."""
        self.present.pop(key, None)
        self._know(key, None)

    def _know(self, key: str, found: Held | None) -> None:
        if self.known.get(key) != found:
            self.touched.add(key)
            if found is None:
                del self.known[key]
            else:
                self.known[key] = found

    def _limits_order(self, entry: Entry | None) -> Order | None:
        if entry is None or entry.value is None or entry.stamp == self.limits_stamp:
            return None
        arguments = {**limits_of(entry.value), "origin": self._origin}
        return Order("limits", arguments, LIMITS, entry.stamp)

    def _ban_order(self, key: str, entry: Entry, now_s: float) -> Order | None:
        if entry.value is None or entry.ends_s <= now_s + _NEAR_S:  # over before it would be in force
            return None
        ban = ban_of(entry.value)
        arguments: dict[str, Any] = {"network": ban.cidr, "action": ban.action.value, "origin": self._origin}
        if ban.reason:
            arguments["reason"] = ban.reason
        if ban.expires is not None:  # a time, and no duration: an order may be carried out late
            arguments["expires"] = utc_text(ban.expires)
        return Order("ban", arguments, key, entry.stamp)

    def _lift(self, key: str, entry: Entry | None) -> Order | None:
        cidr = cidr_of(key)
        others = [ban_key(str(cidr), action) for action in BanAction]
        if any(other in self.present and not self.present[other].same(self.known.get(other)) for other in others):
            return None  # the operation would lift what is not the fleet's as well
        stamp = Stamp(0, 0, "") if entry is None else entry.stamp
        return Order("unban", {"network": cidr, "origin": self._origin}, key, stamp)
