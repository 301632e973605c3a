"""What operators have put in force by command, for workers that are started later."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from flowctl.server.bans import Ban, parse_utc

Json: TypeAlias = dict[str, Any]
_MARKS: Final = ("soft", "hard", "low", "target_delay")


class InForce:
    """Limits and bans by command, as arguments of the operations that set them. One thread, or a lock around it.

    Limits last until the limits file says something new, as they do in the workers; bans that are in the ban file are
    read from there.

    Args:
        limits_file: of the server. None: it has none.
        wall: seconds since the epoch.
    """

    def __init__(self, limits_file: Path | None = None, wall: Callable[[], float] = time.time) -> None:
        self._wall: Final = wall
        self._limits_file: Final = limits_file
        self._limits: Json | None = None
        self._limits_digest = b""
        self._bans: dict[tuple[str, str], Json] = {}

    def note(self, name: str, asked: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Note what an operation has put in force.

        Args:
            name: of the operation.
            asked: the values of its arguments, as the workers were given them.
            result: what came of it.
        """
        of_all = asked.get("connection") is None and asked.get("stream") is None
        if name == "limits" and of_all and "was" in result:
            self._limits = {mark: result[mark] for mark in _MARKS} | {"connection": None, "origin": asked["origin"]}
            self._limits_digest = self._digest()
        elif name == "ban":
            now = self._wall()
            self._bans = {key: ban for key, ban in self._bans.items() if _lasts(ban["until"], now)}
            key = _network(asked), asked["action"]
            self._bans.pop(key, None)
            if not result["in_file"]:
                # Joined with what there was: of two ends the later one counts.
                end = {"until": result["expires"], "duration": None}
                self._bans[key] = {**asked, **end, "reason": result.get("reason", "")}
        elif name == "unban":
            self._bans = {key: ban for key, ban in self._bans.items() if key[0] != _network(asked)}

    def orders(self) -> list[tuple[str, Json]]:
        """Return the operations, with their values, that give a new worker what is in force."""
        found: list[tuple[str, Json]] = [("ban", ban) for ban in self._bans.values()]
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


def _lasts(until: str | None, now: float) -> bool:
    return until is None or parse_utc(until).timestamp() > now
