"""A member's agent: its table, its server and its file put together; sockets and time are its owner's.

What changes is stored first and told to the others then: what a crash takes in between they find when they compare.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import structlog

from flowctl.control.fleet.keeper import Call, Keeper
from flowctl.control.fleet.mirror import Mirror
from flowctl.control.fleet.replica import Letter, Outcome, Replica
from flowctl.control.fleet.stamp import Clock
from flowctl.control.fleet.store import Store, stamp_of
from flowctl.control.fleet.table import Table
from flowctl.control.fleet.values import LIMITS
from flowctl.errors import FlowctlError

_log: Final = structlog.get_logger("flowctl.fleet")
ORIGIN: Final = "fleet"
"""Under which the changes of an agent are made at its server; its name follows."""
FIRST_S: Final = 3.0
"""How long an agent that begins listens before it tells its server anything, unless all others have the same sooner: a
ban that was lifted meanwhile is not to be made for a moment."""
_HEARD_S: Final = 3600.0
"""How exactly it is stored when another member was heard of: what depends on it is a matter of weeks."""


class Agent:
    """One member of a fleet. One thread."""

    def __init__(
        self,
        name: str,
        others: Iterable[str],
        store: Store,
        call: Call,
        send: Callable[[Letter], object],
        wall: Callable[[], float] = time.time,
    ) -> None:
        notes, heard = store.notes(), None
        heard_stamp = stamp_of(notes.get("heard_stamp"))
        if heard_stamp is not None:
            heard = float(notes.get("heard_s", 0.0)), heard_stamp
        self.replica: Final = Replica(
            name, others, Table(store.entries()), Clock(name, stamp_of(notes.get("clock"))), heard
        )
        self.mirror: Final = Mirror(
            f"{ORIGIN} {name}",
            run=str(notes.get("run", "")),
            version=int(notes.get("version", 0)),
            known=store.known(),
            limits_stamp=stamp_of(notes.get("limits_stamp")),
        )
        self.keeper: Final = Keeper(call, self.mirror, self.replica, self._note, self._flush, wall)
        self._store: Final = store
        self._send: Final = send
        self._wall: Final = wall
        self._keys: dict[str, None] = {}  # of entries that are not stored yet
        self._letters: list[Letter] = []  # that are not sent yet
        self._notes: Mapping[str, Any] = {}  # as they are stored
        self._tell_from_s = wall() + FIRST_S
        self._tells = False
        self.server_fault: str | None = "it was not reached yet"
        """Why the server cannot be reached. None: it can."""

    def received(self, sender: str, octets: bytes) -> None:
        """Take a message of another member; when this returns, what it changed is stored."""
        self._note(self.replica.received(sender, octets, self._wall()))
        self._flush()

    def tick(self) -> None:
        """Do what is due every `replica.COMPARE_S`."""
        now_s = self._wall()
        self.keeper.forget(now_s)
        self._note(self.replica.tick(now_s))
        self._flush()

    async def step(self) -> bool:
        """Look at the server once, and tell it what it lacks; return whether there is more to do at once.

        What goes wrong with the server is logged once, and in `server_fault` until it is over.
        """
        try:
            more = await self.keeper.step(tell=self._has_listened())
        except FlowctlError as error:
            self._server_is(str(error))
            return False
        finally:
            self._flush()
        self._server_is(None)
        return more

    def _has_listened(self) -> bool:
        if not self._tells:
            same = all(member.equal for member in self.replica.members.values())
            # A clock that was put back meanwhile does not make the time longer.
            self._tells = same or not 0 < self._tell_from_s - self._wall() <= FIRST_S
        return self._tells

    def _server_is(self, fault: str | None) -> None:
        if fault is None and self.server_fault is not None:
            _log.info("the server is reached", run=self.mirror.run)
        elif fault is not None and self.server_fault != fault:
            _log.warning("the server cannot be reached, it is tried again", fault=fault)
        self.server_fault = fault

    def _note(self, outcome: Outcome) -> None:
        self._keys.update(dict.fromkeys(outcome.changed))
        self._letters += outcome.letters
        self.keeper.look_at(outcome.changed)

    def _flush(self) -> None:
        """Store what has changed, then send."""
        keys, touched, mirror = list(self._keys), list(self.mirror.touched), self.mirror
        heard = self.replica.heard
        notes = {
            "clock": list(self.replica.clock.last),
            "heard_s": None if heard is None else heard[0] // _HEARD_S * _HEARD_S,
            "heard_stamp": None if heard is None else list(heard[1]),
            "run": mirror.run,
            "version": mirror.version,
            "limits_stamp": None if mirror.limits_stamp is None else list(mirror.limits_stamp),
        }
        if keys or touched or notes != self._notes:
            self._store.save(self.replica.table, keys, mirror.known, touched, notes)
            self._notes = notes
        self._keys.clear()
        mirror.touched.clear()
        letters, self._letters = self._letters, []
        for letter in letters:
            self._send(letter)

    def status(self, pending: Callable[[str], int]) -> dict[str, Any]:
        """Return how it stands, as JSON has it."""
        now_s, table = self._wall(), self.replica.table
        in_force = [key for key, _ in table.in_force(now_s)]
        limits = LIMITS in in_force
        waits = {name: pending(name) for name in self.replica.members}
        return {
            "member": self.replica.name,
            "server": {"reached": self.server_fault is None, "fault": self.server_fault, "waiting": self.waiting},
            "entries": {"bans": len(in_force) - limits, "limits": limits, "remembered": len(table) - len(in_force)},
            "applied": _figures(self.keeper.applied),
            "stale": self.replica.stale,
            "evicted": table.evicted_count,
            "foreign": self.replica.foreign_count,
            "members": {
                name: {
                    "heard_s_ago": None if member.heard_s is None else round(max(0.0, now_s - member.heard_s), 1),
                    "same": member.equal and not waits[name],  # as it said last, and nothing is on its way since
                    "pending": waits[name],
                    "entries": member.count,
                    "parts_differing": member.differing,
                    "dropped": dict(member.dropped),
                }
                for name, member in self.replica.members.items()
            },
        }

    @property
    def waiting(self) -> int:
        """Entries that the server has still to be told of, or that are to be looked at."""
        return len(self.keeper.waiting)


def _figures(applied: Any) -> Mapping[str, Any]:
    return {name: getattr(applied, name) for name in applied.__slots__}
