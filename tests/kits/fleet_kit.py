"""A server as an agent of a fleet sees it: bans, limits and numbered changes, as the operations make them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import count
from typing import Any

from flowctl.control.fleet.keeper import RefusedError
from flowctl.core.server.bans import Ban, BanAction, merge_bans, parse_utc, utc_text

_RUNS = count(1)


class FakeServer:
    """Carries out the operations that an agent calls; `log` has each that changed something."""

    def __init__(self, now: float, file: list[Ban] | None = None) -> None:
        self.now = now
        self.run = f"run {next(_RUNS)}"
        self.file = file  # None: there is none; else bans outlive `restarted`
        self.bans: dict[tuple[str, BanAction], Ban] = {(ban.cidr, ban.action): ban for ban in file or ()}
        self.limits = {"soft": "2MiB,0,0", "hard": "4MiB,0,0", "low": "1MiB,0,0", "target_delay": "auto"}
        self.changes: list[dict[str, Any]] = []
        self.kept = 1024
        self.log: list[tuple[str, str, str]] = []
        self.refuses = ""
        self.down: Exception | None = None
        self.after: dict[str, Callable[[], object]] = {}  # what happens right after an operation, once

    def restarted(self) -> FakeServer:
        """Return the server's next life."""
        return FakeServer(self.now, None if self.file is None else list(self.bans.values()))

    async def call(self, operation: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.down is not None:
            raise self.down
        if operation == self.refuses:
            raise RefusedError("it will not", code="FAILED")
        found = getattr(self, f"do_{operation}")(**arguments)
        self.after.pop(operation, lambda: None)()
        return found

    def do_changes(self, since: int, limit: int) -> Mapping[str, Any]:
        kept = self.changes[-self.kept :]
        found = [item for item in kept if item["version"] > since]
        whole = len(found) == len(self.changes) - since
        return {"run": self.run, "version": len(self.changes), "whole": whole, "changes": found[:limit]}

    def do_bans(self, offset: int, limit: int) -> Mapping[str, Any]:
        found = [
            {"cidr": ban.cidr, "action": ban.action.value, "expires": utc_text(ban.expires)}
            | {"score": ban.score, "reason": ban.reason}
            for ban in self.bans.values()
            if ban.lasts(self.now)
        ]
        return {"bans": found[offset : offset + limit]}

    def do_limits(self, origin: str = "", **wanted: str) -> Mapping[str, Any]:
        if wanted:
            self.limits |= wanted
            self.note("limits", dict(self.limits), origin, str(wanted))
        return dict(self.limits)

    def do_ban(
        self,
        network: str,
        duration: float | None = None,
        reason: str = "",
        action: str = "ban",
        origin: str = "",
        expires: str | None = None,
    ) -> Mapping[str, Any]:
        ends = None if duration is None else datetime.fromtimestamp(self.now + duration, tz=UTC)
        ends = ends if expires is None else parse_utc(expires)
        ban = Ban(cidr=network, expires=ends, action=BanAction(action), reason=reason)
        there = [item for key, item in self.bans.items() if key == (ban.cidr, ban.action)]
        (joined,) = merge_bans(there, [ban], self.now)
        self.bans[joined.cidr, joined.action] = joined
        self.note("ban", json.loads(joined.line()), origin, joined.cidr)
        return json.loads(joined.line())

    def do_unban(self, network: str, origin: str = "") -> Mapping[str, Any]:
        keys = [key for key, ban in self.bans.items() if ban.cidr == network and ban.lasts(self.now)]
        if not keys:
            raise RefusedError(f"{network} is not banned", code="NOT_POSSIBLE")
        for key in keys:
            del self.bans[key]
        self.note("unban", {"cidr": network}, origin, network)
        return {}

    def write_file(self, bans: list[Ban]) -> None:
        self.bans = {(ban.cidr, ban.action): ban for ban in bans}
        self.note("bans file", {}, "", "")

    def note(self, what: str, detail: Mapping[str, Any], origin: str, subject: str) -> None:
        self.log.append((what, subject, origin))
        self.changes.append({"version": len(self.changes) + 1, "what": what, "origin": origin, "detail": detail})

    def count(self, what: str, subject: str) -> int:
        return sum(item[:2] == (what, subject) for item in self.log)

    def banned(self) -> set[str]:
        return {cidr for (cidr, _), ban in self.bans.items() if ban.lasts(self.now)}
