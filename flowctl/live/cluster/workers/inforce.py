"""What commands and penalties have put in force: for workers that are started later and, with a store, later lives."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from flowctl.control.effects import KEPT_IN_STORE, NOT_STORED
from flowctl.core.server.bans import Ban, BanAction, parse_utc
from flowctl.errors import FlowctlError
from flowctl.live.bans.kept import KeptBans

Json: TypeAlias = dict[str, Any]
MOST_PAGE: Final = 500
"""Bans told to a worker at a time: half a megabyte with their evidence."""
_MARKS: Final = ("soft", "hard", "low", "target_delay")


class InForce:
    """Limits and bans of a whole server, as its workers are given them. One thread, or a lock around it.

    Limits last until the limits file says something new, as they do in the workers; bans that are in the ban file are
    read from there.
    """

    def __init__(
        self,
        limits_file: Path | None = None,
        kept: KeptBans | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._kept: Final = KeptBans(wall=wall) if kept is None else kept
        self._limits_file: Final = limits_file
        self._limits: Json | None = None
        self._limits_digest = b""

    def note(self, name: str, asked: Mapping[str, Any], result: Mapping[str, Any]) -> Json:
        """Note what an operation has put in force; return what is to be added to its answer."""
        of_all = asked.get("connection") is None and asked.get("stream") is None
        if name == "limits" and of_all and "was" in result:
            self._limits = {mark: result[mark] for mark in _MARKS} | {"connection": None, "origin": asked["origin"]}
            self._limits_digest = self._digest()
        elif name == "ban":
            return self._note_ban(asked, result)
        elif name == "unban":
            return self._note_unban(_network(asked))
        return {}

    def _note_ban(self, asked: Mapping[str, Any], result: Mapping[str, Any]) -> Json:
        key = _network(asked), BanAction(asked["action"])
        if result["in_file"]:
            self._kept.drop([key])
            return {}
        until = result["expires"]
        self._kept.put(
            [
                Ban(  # joined with what there was: of two ends the later one counts
                    cidr=key[0],
                    expires=None if until is None else parse_utc(until),
                    action=key[1],
                    reason=result.get("reason", ""),
                    score=result.get("score", 0.0),
                    evidence=result.get("evidence", {}),
                    source=result.get("source", ""),
                )
            ]
        )
        if not self._kept.stored:
            return {}
        if self._kept.fault:
            return {"warning": NOT_STORED.format(self._kept.fault)}
        return {"in_store": True, "kept": KEPT_IN_STORE}

    def _note_unban(self, cidr: str) -> Json:
        try:
            self._kept.drop([(cidr, action) for action in BanAction])
        except OSError as error:
            return {"warning": f"it is back after a restart: {error.filename}: {error.strerror}"}
        except FlowctlError as error:
            return {"warning": f"it is back after a restart: {error}"}
        return {}

    def punish(self, bans: Iterable[Ban]) -> None:
        """Keep bans of penalties, joined with what there is; raises as `KeptBans.put`."""
        self._kept.put([self._kept.joined(ban) for ban in bans])

    def look(self) -> None:
        """Follow the clock, and write what could not be written; each second."""
        self._kept.look()

    def close(self) -> None:
        """Let go of the store."""
        self._kept.close()

    def page(self, after: str = "", most: int = MOST_PAGE) -> list[Json]:
        """Return bans for a worker, as lines of a ban file have them, in the order of networks and actions."""
        found = sorted((key_of(ban), ban) for ban in self._kept.bans)
        return [ban.as_dict() for key, ban in found if key > after][:most]

    def orders(self) -> list[tuple[str, Json]]:
        """Return the operations, with their values, that give a new worker what is in force beside the bans."""
        found: list[tuple[str, Json]] = []
        if self._limits is not None and self._digest() == self._limits_digest:
            found.append(("limits", self._limits))
        return found

    def _digest(self) -> bytes:
        """Return what tells one version of the limits file from another; empty: there is none."""
        try:
            return b"" if self._limits_file is None else hashlib.blake2b(self._limits_file.read_bytes()).digest()
        except OSError:
            return b""


def _network(asked: Mapping[str, Any]) -> str:
    """Return a network as ban lists write it: one of IPv4 may be asked for in the words of IPv6."""
    return Ban(cidr=asked["network"], expires=None).cidr


def key_of(ban: Ban) -> str:
    """Return what tells a ban from others of a list."""
    return f"{ban.cidr} {ban.action.value}"
