"""The observer that records what happens to live sessions; a server without records has none, and pays nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flowctl.connection import Connection
from flowctl.core.flow.ledger import LedgerEntry, LedgerKind
from flowctl.live.access.request import RequestKind
from flowctl.live.observer import Observer
from flowctl.live.records.flights import name_flight
from flowctl.live.records.sampler import Sampler, line_columns
from flowctl.reasons import CloseReason
from flowctl.records.telemetry.events import ConnectionEvents, Events
from flowctl.records.telemetry.schema import RecordedRole


class SessionRecords(Observer):
    """Puts a record beside everything that live sessions tell. Of what is denied the end of the connection tells."""

    def __init__(self, events: Events, sampler: Sampler) -> None:
        self._events: Final = events
        self._sampler: Final = sampler

    def opened(self, connection: Connection) -> None:
        self._record(connection)

    def _record(self, connection: Connection) -> ConnectionEvents:
        record = self._events.open.get(connection.number)
        if record is None:  # a connection that ended before its thread had it is opened by its end
            record = self._events.connection(connection.number, connection.peer, connection.opened_at)
            record.opened()
            self._events.open[connection.number] = record
        return record

    def greeted(self, connection: Connection, now: float, *, style: str) -> None:
        self._record(connection).handshake_done(now, style)

    def connected(self, connection: Connection, now: float, *, agent: str, app_named: bool) -> None:
        self._record(connection).connected(now, agent, app_named=app_named)

    def asked(self, connection: Connection, kind: RequestKind, stream: str, now: float) -> None:
        record, session = self._record(connection), connection.session
        role = RecordedRole.PUBLISH if kind == "publish" else RecordedRole.PLAY
        if kind == "play" and session.protocol.startswith("http"):
            role = RecordedRole.HTTP_FLV
        record.asked(now, role, stream, session.user_agent)
        name_flight(connection.sender, record.who)
        if kind == "play" and not record.served:
            self._sampler.began(connection, now)

    def command(self, connection: Connection, name: str, detail: Mapping[str, str], now: float) -> None:
        self._record(connection).command(now, name, detail or None)

    def publish_started(self, connection: Connection, stream: str, now: float, *, standby: bool) -> None:
        record = self._record(connection)
        if not record.served:
            self._sampler.began(connection, now)
        record.publish_started(now, stream, {"standby": True} if standby else {})

    def play_started(self, connection: Connection, stream: str, now: float) -> None:
        """Record that it is given media, the first time."""
        record = self._record(connection)
        if not record.served:
            self._sampler.began(connection, now)
        record.play_started(now, stream)
        name_flight(connection.sender, record.who)

    def limit_hit(
        self, connection: Connection, limit: str, value: float | None, maximum: float | None, now: float
    ) -> None:
        record = self._record(connection)
        record.limit_hit(now if record.ended_at is None else record.ended_at, limit, value, maximum)

    def ledger_entry(self, connection: Connection, entry: LedgerEntry) -> None:
        record = self._record(connection)
        if entry.kind is LedgerKind.CLOSE:
            record.ended_at = entry.at
            record.line = line_columns(connection)  # before its socket is closed
            return
        record.ledger_entry(entry, connection.sender.account())

    def closed(self, connection: Connection, reason: CloseReason, details: str, limit: str | None) -> None:
        record = self._record(connection)
        at = connection.now() if record.ended_at is None else record.ended_at
        statistics = connection.sender.statistics()
        record.closed(at, reason, details, statistics, limit, connection.session.user_agent)
        self._sampler.ended(connection, record, statistics, at)
        del self._events.open[connection.number]
