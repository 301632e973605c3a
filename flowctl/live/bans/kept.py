"""Bans that commands and penalties have made: in memory, and in a store where there is one; and a clock that jumps.

A ban is made for a time and ends at a time of day. When the system's clock is set, the end of each ban moves with it,
so that the ban lasts as long as it was to: it neither becomes one for ever nor ends early. That is told. A clock that
was set back while the server was not running shows in the store, which knows when it was written last.

What the store does not take (a full disk) is in force all the same, told of once, and tried again.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Final, Protocol

import structlog

from flowctl.core.server.bans import MOST_BANS, Ban, BanAction, merge_bans
from flowctl.errors import ConfigError, LocalProtocolError

_log: Final = structlog.get_logger("flowctl.live")
STEP_S: Final = 2.0
"""Difference between two clocks that is no drift: a clock that is corrected little by little moves by 1 in 2000."""
_SEEN_S: Final = 300.0
"""How often the store is told the time, when nothing else is written: so much longer may a ban last if the clock is set
back while the server is not running."""
_RETRY_S: Final = 10.0

Key = tuple[str, BanAction]


def steady_s() -> float:
    """Return seconds that nobody can set, sleep of the machine included where the system says so."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class Store(Protocol):
    """Where bans are kept: `flowctl.live.bans.store.BanStore`, which is loaded only where there is one."""

    @property
    def path(self) -> Path:
        """Of the file."""

    def read(self) -> tuple[list[Ban], float]:
        """Return all bans, and when they were written last, in seconds since the epoch."""

    def write(self, put: Iterable[Ban], drop: Iterable[Key], seen: float) -> None:
        """Enter bans and take others out, all of it or nothing."""

    def replace(self, bans: Iterable[Ban], seen: float) -> None:
        """Have the file say just this."""

    def whole(self) -> bool:
        """Return whether the file is the one that was written last."""

    def mend(self) -> None:
        """Put the file, which is damaged or another, aside, and begin a new one."""

    def close(self) -> None:
        """Let go of the file."""


class ClockWatch:
    """Sees when the time of day jumps (pure)."""

    def __init__(self, wall: Callable[[], float], steady: Callable[[], float]) -> None:
        self._wall: Final = wall
        self._steady: Final = steady
        self._apart_s = wall() - steady()

    def step_s(self) -> float:
        """Return by how much the time of day has jumped since the last call, seconds; 0: it has not."""
        apart_s = self._wall() - self._steady()
        step_s, self._apart_s = apart_s - self._apart_s, apart_s
        return step_s if abs(step_s) >= STEP_S else 0.0


class KeptBans:
    """The bans of commands and penalties. One thread at a time.

    Attributes:
        fault: why the store does not have all of them; empty: it has.
    """

    def __init__(
        self,
        store: Store | None = None,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = steady_s,
    ) -> None:
        self._store = store
        self._wall: Final = wall
        self._steady: Final = steady
        self._clock: Final = ClockWatch(wall, steady)
        self._bans: dict[Key, Ban] = {}
        self._left: frozenset[Key] = frozenset()  # what a store has that was let go of
        self._written_at = steady()  # when the store was written last, or tried
        self.fault = ""
        if store is not None:
            self._load(store)

    @property
    def stored(self) -> bool:
        return self._store is not None

    @property
    def bans(self) -> list[Ban]:
        """Those that count now."""
        now = self._wall()
        return [ban for ban in self._bans.values() if ban.lasts(now)]

    def joined(self, ban: Ban) -> Ban:
        """Return `ban` with what is kept for its network and action: of two ends the later one counts."""
        self.look()
        there = self._bans.get((ban.cidr, ban.action))
        return ban if there is None else merge_bans([there], [ban], 0.0)[0]

    def put(self, bans: Iterable[Ban]) -> None:
        """Keep bans, each in place of one for the same network and action; `fault` says whether the store has them."""
        self.look()
        new = {(ban.cidr, ban.action): ban for ban in bans}
        if len(self._bans.keys() | new.keys()) > MOST_BANS:
            raise ConfigError(f"there are more than {MOST_BANS} bans", hint="ban networks instead of addresses")
        self._bans |= new
        self._write(new.values(), ())

    def drop(self, keys: Iterable[Key]) -> None:
        """Keep these no longer."""
        self.look()
        gone = self._bans.keys() & set(keys)
        if not gone:
            return
        if gone & self._left:
            raise LocalProtocolError(
                "the ban store has been left to the server that takes this one's place",
                hint="flowctl unban lifts it there, once that server has started",
            )
        if self._store is not None:
            rest = [ban for key, ban in self._bans.items() if key not in gone]
            self._replace(self._store, rest)  # or a ban that was lifted would be back after a restart
            self.fault = ""
        for key in gone:
            del self._bans[key]

    def look(self) -> bool:
        """Follow the clock, forget what is over, write what could not be written; return whether the clock was set."""
        step_s = self._clock.step_s()
        if step_s:
            moved = self._move_ends(step_s)
            _log.warning(
                "the clock was set, bans of commands and penalties last as long as they were to",
                by_s=round(step_s, 1),
                bans=moved,
                hint="bans of a ban file end at the time that it says, by the new clock",
            )
            self._write_all()
            return True  # also where none is left: the list in force has those that have ended, and knows one clock
        now = self._wall()
        over = [key for key, ban in self._bans.items() if not ban.lasts(now)]
        for key in over:
            del self._bans[key]
        if self.fault:
            if self._steady() - self._written_at >= _RETRY_S:
                self._write_all()
        elif self._store is not None and not self._store.whole():
            self._write_all()
        elif over or (self.stored and self._steady() - self._written_at >= _SEEN_S):
            self._write((), over)
        return False

    def close(self) -> None:
        """Let go of the store, for another process to take it; bans of later calls last as long as this process."""
        store = self._store
        if store is not None:
            self._write_all() if self.fault else self._write((), ())
            self._store, self.fault, self._left = None, "", frozenset(self._bans)
            store.close()

    def _move_ends(self, by_s: float) -> int:
        moved = 0
        for key, ban in self._bans.items():
            if ban.expires is not None:
                self._bans[key] = _moved(ban, by_s)
                moved += 1
        return moved

    def _load(self, store: Store) -> None:
        try:
            found, seen = store.read()
        except OSError as error:
            raise ConfigError(f"ban_store: {error.filename}: {error.strerror}", hint="check the disk") from error
        now = self._wall()
        self._bans = {(ban.cidr, ban.action): ban for ban in found}
        if seen - now >= STEP_S:
            moved = self._move_ends(now - seen)
            _log.warning(
                "the clock was set back while the server did not run, bans last as long as they had left",
                by_s=round(now - seen, 1),
                bans=moved,
            )
        ended = sum(not ban.lasts(now) for ban in self._bans.values())
        self._bans = {key: ban for key, ban in self._bans.items() if ban.lasts(now)}
        self._write_all()
        _log.info("ban store read", file=str(store.path), bans=len(self._bans), ended_meanwhile=ended)

    def _write_all(self) -> None:
        if self._store is not None:
            store, bans = self._store, list(self._bans.values())
            self._try(lambda: self._replace(store, bans))

    def _replace(self, store: Store, bans: list[Ban]) -> None:
        """Have the store say just this, in a new file where its own is damaged or another; raises as it does."""
        try:
            store.replace(bans, self._wall())
        except OSError as error:
            if error.errno != errno.EUCLEAN:
                raise
            store.mend()
            store.replace(bans, self._wall())

    def _write(self, put: Iterable[Ban], drop: Iterable[Key]) -> None:
        if self._store is None:
            return
        if self.fault:
            self._write_all()
        else:
            store = self._store
            self._try(lambda: store.write(put, drop, self._wall()))

    def _try(self, write: Callable[[], None]) -> None:
        """Write, and note and tell whether that was done."""
        self._written_at = self._steady()
        try:
            try:
                write()
            except OSError as error:
                if error.errno != errno.EUCLEAN or self._store is None:
                    raise
                self._replace(self._store, list(self._bans.values()))
        except (OSError, ConfigError) as error:
            fault = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            if not self.fault:
                hint = "they are in force and are lost when the server ends; make room, it is tried again by itself"
                _log.error("ban store cannot be written to", fault=fault, hint=hint)
            self.fault = fault
        else:
            if self.fault:
                _log.info("ban store is written to again", bans=len(self._bans))
            self.fault = ""


def _moved(ban: Ban, by_s: float) -> Ban:
    """Return `ban` with its end moved; one that leaves what a time can say lasts as it did."""
    if ban.expires is None:
        return ban
    try:
        return replace(ban, expires=ban.expires + timedelta(seconds=by_s))
    except (OverflowError, ConfigError):
        return ban
