"""The observer that records what happens to live sessions; a server without records has none, and pays nothing."""

from __future__ import annotations

from typing import Final

from flowctl.connection import Connection
from flowctl.core.flow.ledger import LedgerEntry, LedgerKind
from flowctl.live.observer import Observer
from flowctl.live.records.flights import name_flight
from flowctl.live.records.sampler import Sampler, line_columns
from flowctl.log import redact_text
from flowctl.reasons import CloseReason
from flowctl.records.telemetry.events import ConnectionEvents, Events
from flowctl.records.telemetry.schema import Role
from flowctl.wire.rtmp import events as rtmp_events
from flowctl.wire.rtmp.url import DEFAULT_APP


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

    def asked(self, connection: Connection, event: rtmp_events.ServerEvent, now: float) -> None:
        """Record a command of the peer, and whose stream the connection is about from now on."""
        record = self._record(connection)
        match event:
            case rtmp_events.HandshakeDone():
                record.handshake_done(now, event.style)
            case rtmp_events.ConnectRequested():
                record.connected(now, redact_text(event.flash_ver), app_named=event.url.app != DEFAULT_APP)
            case rtmp_events.ConnectRefused():
                record.command(now, "connect", {"refused": event.reason})
            case rtmp_events.PublishRequested():
                record.asked(now, Role.PUBLISH, event.url.path, agent_of(connection))
                name_flight(connection.sender, record.who)
            case rtmp_events.PlayRequested():
                over_http = getattr(connection.session, "protocol", "rtmp").startswith("http")
                role = Role.HTTP_FLV if over_http else Role.PLAY
                record.asked(now, role, event.url.path, agent_of(connection))
                name_flight(connection.sender, record.who)
                if not record.served:
                    self._sampler.began(connection, now)
            case rtmp_events.PauseRequested():
                record.command(now, "pause" if event.pause else "unpause")
            case rtmp_events.SeekRefused():
                record.command(now, "seek")
            case rtmp_events.ReceiveAudio():
                record.command(now, "receiveAudio")
            case rtmp_events.ReceiveVideo():
                record.command(now, "receiveVideo")
            case rtmp_events.StreamClosed():
                record.command(now, event.reason)
            case rtmp_events.Ignored():  # once per kind and connection
                record.command(now, "ignored", {"what": event.what})
            case _:
                pass

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
        """Record a limit, at the time of the end where that is known."""
        record = self._record(connection)
        record.limit_hit(now if record.ended_at is None else record.ended_at, limit, value, maximum)

    def ledger_entry(self, connection: Connection, entry: LedgerEntry) -> None:
        record = self._record(connection)
        if entry.kind is LedgerKind.CLOSE:
            record.ended_at = entry.at
            record.line = line_columns(connection)  # before its socket is closed
            return
        record.ledger_entry(entry, connection.sender.account())

    def closed(self, connection: Connection, reason: CloseReason, details: str, limit: str | None, agent: str) -> None:
        record = self._record(connection)
        at = connection.now() if record.ended_at is None else record.ended_at
        statistics = connection.sender.statistics()
        record.closed(at, reason, details, statistics, limit, agent)
        self._sampler.ended(connection, record, statistics, at)
        del self._events.open[connection.number]


def agent_of(connection: Connection) -> str:
    """Return what the peer calls itself; "": it has not said yet."""
    agent: str = getattr(connection.session, "user_agent", "")
    return agent
