"""The last things that happened to the sessions of a server, kept in memory for operators.

Edges between READY and OVERLOADED are left out: they come with every large key frame at the edge of a link, from
thousands of viewers, and say little (`flowctl.core.flow.ledger.Ledger` treats them so too). So is the first switch of a
viewer: nearly each that joins a set goes up soon.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from flowctl.connection import Connection
from flowctl.core.flow.ledger import LedgerEntry, LedgerKind
from flowctl.core.flow.state import SendState
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.text.printable import foreign
from flowctl.live.access.request import LiveRequest
from flowctl.live.observer import Observer
from flowctl.live.rows import identity_row
from flowctl.live.strays import Kind
from flowctl.reasons import CloseReason

MOST_KEPT_EVENTS: Final = 1024
"""Most events that are kept: seconds of the worst trouble, hours of usual days, and half a megabyte."""
_MOST_TEXT_CHARS: Final = 200
"""Longest text of an event."""
_TOLD: Final = frozenset({LedgerKind.DROPS, LedgerKind.LATE, LedgerKind.RETURN, LedgerKind.SWITCH})
_FLAP: Final = max(SendState.READY, SendState.OVERLOADED)


def _switches(connection: Connection) -> int:
    book = connection.renditions
    return 0 if book is None else book.ups + book.downs


class RecentEvents(Observer):
    """The last events of a server. That a viewer plays is none of them: they come by the thousand."""

    hears_of_strays = False

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        # differs from one start of a server to the next: numbers begin anew then
        self.run: Final = secrets.token_hex(4)
        self._wall: Final = wall
        self._lock: Final = OwnedLock()
        self._kept: deque[dict[str, Any]] = deque(maxlen=MOST_KEPT_EVENTS)  # guarded by _lock
        self._count = 0  # number of the last one; guarded by _lock

    def since(self, number: int | None, most: int) -> tuple[list[dict[str, Any]], int, int]:
        with self._lock:
            kept, count = list(self._kept), self._count
        oldest = count - len(kept)  # number of the last one that is gone
        if number is None:
            begin = max(oldest, count - most)
            return kept[begin - oldest :], count, 0
        begin = min(max(number, oldest), count)
        found = kept[begin - oldest :][:most]
        return found, begin + len(found), max(0, oldest - number)

    def _note(self, what: str, connection: Connection, **more: Any) -> None:
        self._keep(what, identity_row(connection), **more)

    def _keep(self, what: str, who: dict[str, Any], **more: Any) -> None:
        event = {"at": round(self._wall(), 3), "what": what, **who, **more}
        with self._lock:
            self._count += 1
            self._kept.append(event)

    # -- as an observer

    def publish_started(self, connection: Connection, stream: str, now: float, *, standby: bool) -> None:
        self._note("publish", connection, why="stands by" if standby else "")

    def limit_hit(
        self, connection: Connection, limit: str, value: float | None, maximum: float | None, now: float
    ) -> None:
        self._note("limit", connection, limit=limit, value=value, maximum=maximum)

    def denied(self, connection: Connection, request: LiveRequest, now: float, *, guess: bool) -> None:
        self._note("denied", connection, why=f"{request.kind} is not allowed")

    def ledger_entry(self, connection: Connection, entry: LedgerEntry) -> None:
        change = entry.change
        why = foreign(entry.why, _MOST_TEXT_CHARS)
        if change is not None and max(change.old, change.new) > _FLAP:
            self._note("state", connection, old=change.old.name, state=change.new.name, why=why)
        elif entry.kind in _TOLD and not (entry.kind is LedgerKind.SWITCH and _switches(connection) == 1):
            lost = sum(counts.total_messages for counts in (entry.dropped or {}).values())
            self._note(entry.kind.value, connection, dropped=lost, why=why)

    def closed(self, connection: Connection, reason: CloseReason, details: str, limit: str | None) -> None:
        self._note("close", connection, reason=reason.value, why=foreign(details, _MOST_TEXT_CHARS), limit=limit)

    def strays_closed(self, kind: Kind, count: int) -> None:
        """Note connections of probes or scanners that have ended since the first one that was told of."""
        who = {"connection": None, "peer": kind.network, "role": "none", "stream": None}
        why = f"{kind.why}, {kind.protocol}"
        self._keep("close", who, reason=f"{count} stray connections", why=why, limit=None)
