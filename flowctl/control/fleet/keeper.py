"""Keeps one server as the fleet's table says, and finds what was changed at it: calls in, calls out, no sockets here.

Each step goes through the server's changes first, and only then tells it what it lacks; what it was told is looked at
again after its changes have shown it. So whatever happens between two steps (a command of somebody else, an end of the
server) is met by the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog

from flowctl.control.fleet.mirror import Mirror, Order
from flowctl.control.fleet.replica import Outcome, Replica
from flowctl.control.fleet.values import limits_value
from flowctl.errors import ConfigError, FlowctlError, RemoteProtocolError

_log: Final = structlog.get_logger("flowctl.fleet")
PAGE: Final = 1000
"""Changes, or bans, asked for at a time: the longest page of the operations."""
ORDERS_PER_STEP: Final = 16
"""Orders between two looks at the server's changes."""
_AT_ONCE: Final = 8
"""Orders of a step that are given one right after the other; each of the others is followed by a rest."""
_REST: Final = 4.0
"""How long a rest is, in times of how long the order took: a server takes bans one by one, and each costs it time in
proportion to its list. A new one that is told of thousands is left four fifths of a core."""
_MOST_REST_S: Final = 0.5
_TRIES: Final = 3
"""How often an order is given that is carried out and has no effect, or is refused, before it waits for `RETRY_S`."""
RETRY_S: Final = 60.0
"""After that long an order that failed is given once more: a ban file may have been mended."""
_LISTINGS: Final = 4
"""How often the bans are listed anew because they changed meanwhile; what that misses, the changes show."""


class RefusedError(FlowctlError):
    """The server did not do what it was told."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class Call(Protocol):
    """Calls an operation of the server."""

    def __call__(self, operation: str, arguments: Mapping[str, Any]) -> Awaitable[Mapping[str, Any]]:
        """Return its result."""


@dataclass(slots=True)
class Applied:
    """What the server was told, and did, since the agent began.

    Attributes:
        local: changes found at it, which went to the others.
        fault: why, of the last of them; empty: none was refused.
    """

    bans: int = 0
    lifts: int = 0
    limits: int = 0
    local: int = 0
    refused: int = 0
    fault: str = ""


class Keeper:
    """Keeps one server. One thread; one step at a time.

    Attributes:
        waiting: keys of entries that the server may have to be told of.
    """

    def __init__(
        self,
        call: Call,
        mirror: Mirror,
        replica: Replica,
        changed: Callable[[Outcome], object],
        keep: Callable[[], object],
        wall: Callable[[], float],
    ) -> None:
        self._call: Final = call
        self._mirror: Final = mirror
        self._replica: Final = replica
        self._changed: Final = changed
        self._keep: Final = keep
        self._wall: Final = wall
        self._tries: dict[str, tuple[Order, int]] = {}
        self._later: dict[str, float] = {}  # keys whose order failed, and when it is given once more
        self.applied: Final = Applied()
        self.waiting: dict[str, None] = {}

    def forget(self, now_s: float) -> None:
        """Forget bans of the server that have ended by themselves."""
        self._mirror.forget(now_s)

    def look_at(self, keys: Iterable[str]) -> None:
        """Have the next steps tell the server what it lacks of these entries."""
        self.waiting.update(dict.fromkeys(keys))

    async def step(self, *, tell: bool = True) -> bool:
        """Go through the server's changes, and tell it what it lacks; return whether there is more to do at once."""
        try:
            if await self._follow():
                return True
            if self._mirror.needs_limits:
                await self._read_limits()
            if self._mirror.needs_list:
                await self._list()
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"the server's answer is not understood: {error}", code="answer") from error
        return tell and await self._order()

    async def _follow(self) -> bool:
        """Go through a page of changes; return whether there are more."""
        mirror = self._mirror
        answer = await self._call("changes", {"since": mirror.version, "limit": PAGE})
        if mirror.begin(str(answer["run"])):
            self._tries.clear()
            self._later.clear()
            answer = await self._call("changes", {"since": 0, "limit": PAGE})
            if str(answer["run"]) != mirror.run:  # once more already
                return True
        if not answer["whole"]:
            mirror.needs_list = mirror.needs_limits = True
        for change in answer["changes"]:
            keys = mirror.take(change, self._replica.table, self._wall())
            self._enter(keys)
        self.look_at(mirror.touched)
        if answer["changes"]:
            self._changed(Outcome())  # how far the changes were gone through is to be stored
        return int(answer["version"]) > mirror.version and bool(answer["changes"])

    def _enter(self, changes: Iterable[tuple[str, str | None]]) -> None:
        for key, value in changes:
            self.applied.local += 1
            outcome = self._replica.change(key, value, self._wall())
            self.look_at(outcome.changed)
            self._changed(outcome)

    async def _read_limits(self) -> None:
        found = await self._call("limits", {})
        value = limits_value({name: found[name] for name in ("soft", "hard", "low", "target_delay")})
        self._enter(self._mirror.limits_read(value, self._replica.table))
        entry = self._replica.table.get("limits")
        if entry is not None and entry.value == value:
            self._mirror.limits_stamp = entry.stamp

    async def _list(self) -> None:
        """List all bans of the server; again, where its ban file changed meanwhile, or too much else."""
        for _ in range(_LISTINGS):
            bans: list[Mapping[str, Any]] = []
            while True:
                answer = await self._call("bans", {"offset": len(bans), "limit": PAGE})
                bans += answer["bans"]
                if len(answer["bans"]) < PAGE:
                    break
            answer = await self._call("changes", {"since": self._mirror.version, "limit": PAGE})
            changes = answer["changes"]
            if str(answer["run"]) != self._mirror.run:
                return  # the list of a life that is over; the next step begins anew
            self._mirror.listed(bans, {str(item["detail"]["cidr"]) for item in changes if "cidr" in item["detail"]})
            if len(changes) < PAGE and answer["whole"] and all(item["what"] != "bans file" for item in changes):
                break
        self.look_at([*self._replica.table, *self._mirror.known])

    async def _order(self) -> bool:
        """Tell the server what it lacks; return whether there is more to tell, or to look at."""
        now_s = self._wall()
        for key in [key for key, at in self._later.items() if at <= now_s]:
            del self._later[key]
            self.waiting[key] = None
        orders = self._next_orders()
        for order in orders:
            self._mirror.intend(order, self._replica.table.get(order.key))
        self._keep()
        for number, order in enumerate(orders):
            began = time.perf_counter()
            await self._give(order)
            if number >= _AT_ONCE:
                await asyncio.sleep(min(_REST * (time.perf_counter() - began), _MOST_REST_S))
        return bool(orders)

    def _next_orders(self) -> list[Order]:
        """Return what the server is to be told next; what needs not be told waits no longer."""
        orders: list[Order] = []
        for key in list(reversed(self.waiting)):  # the newest first: somebody may be attacking
            order = None if key in self._later else self._mirror.order(key, self._replica.table, self._wall())
            if order is None:
                self.waiting.pop(key, None)
                self._tries.pop(key, None)
            else:
                orders.append(order)
                if len(orders) == ORDERS_PER_STEP:
                    break
        return orders

    async def _give(self, order: Order) -> None:
        """Give one order; it stays among those that wait until the server's changes show it."""
        before, tries = self._tries.get(order.key, (None, 0))
        same = before is not None and (before.operation, before.stamp) == (order.operation, order.stamp)
        tries = tries + 1 if same else 1
        self._tries[order.key] = order, tries
        if tries > _TRIES:
            self._refused(order, RefusedError("it was carried out and had no effect", code="NO_EFFECT"))
            return
        try:
            await self._call(order.operation, order.arguments)
        except RefusedError as error:
            if order.operation == "unban" and error.code == "NOT_POSSIBLE":
                self._mirror.missing(order.key)  # it has ended, or was lifted a moment ago
                return
            self._refused(order, error)
            return
        self._mirror.told(order)
        self._count(order)

    def _refused(self, order: Order, error: RefusedError) -> None:
        self.applied.refused += 1
        self.applied.fault = str(error)
        self._later[order.key] = self._wall() + RETRY_S
        self._tries.pop(order.key, None)
        _log.warning(
            "the server did not do it, it is told again later",
            operation=order.operation,
            entry=order.key,
            why=str(error),
            again_in_s=RETRY_S,
        )

    def _count(self, order: Order) -> None:
        if order.operation == "ban":
            self.applied.bans += 1
        elif order.operation == "unban":
            self.applied.lifts += 1
        else:
            self.applied.limits += 1
        _log.info("applied", operation=order.operation, entry=order.key, by=order.stamp.node)
