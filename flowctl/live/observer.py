"""Who is told what happens to live sessions: records are one such observer, and a server may have several."""

from __future__ import annotations

from flowctl.connection import Connection
from flowctl.core.flow.ledger import LedgerEntry
from flowctl.live.access.request import LiveRequest
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp import events as rtmp_events


class Observer:
    """Told what happens to the live sessions of a server; it decides nothing, and here it does nothing.

    Each method is called on the connection's thread. `closed` is the last call for a connection, and may be the only
    one: a connection may end before its thread has seen it.
    """

    def opened(self, connection: Connection) -> None:
        """Note a new connection."""

    def asked(self, connection: Connection, event: rtmp_events.ServerEvent, now: float) -> None:
        """Note an event of the wire session that is no media, before it is answered."""

    def publish_started(self, connection: Connection, stream: str, now: float, *, standby: bool) -> None:
        """It publishes `stream`, or stands by for it."""

    def play_started(self, connection: Connection, stream: str, now: float) -> None:
        """It is given media of `stream` from now on; again after each wait for a publisher."""

    def limit_hit(
        self, connection: Connection, limit: str, value: float | None, maximum: float | None, now: float
    ) -> None:
        """It went over `limit`; None: how far, or what is allowed, is not known."""

    def denied(self, connection: Connection, request: LiveRequest, now: float, *, guess: bool) -> None:
        """It was not allowed to do what it asked for."""

    def ledger_entry(self, connection: Connection, entry: LedgerEntry) -> None:
        """Note what its Sender did."""

    def closed(self, connection: Connection, reason: CloseReason, details: str, limit: str | None, agent: str) -> None:
        """Note the end."""
