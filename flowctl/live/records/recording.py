"""Records of a live server: what observes its sessions, and the recorder, events and sampler that make them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import structlog

from flowctl.connection import Connection
from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.ledger import LedgerEntry, LedgerKind
from flowctl.core.flow.limits import Limits, target_marks
from flowctl.core.server.admission import BANNED
from flowctl.errors import LimitExceededError
from flowctl.live.access.request import RequestKind
from flowctl.live.config import LiveConfig
from flowctl.live.observer import Observer
from flowctl.live.records.sampler import Sampler, line_columns
from flowctl.live.settings.levels import Role
from flowctl.reasons import CloseReason
from flowctl.records.flight.flights import Flights
from flowctl.records.flight.options import FlightOptions
from flowctl.records.flight.recorded import RecordedSender
from flowctl.records.flight.tape import Identity
from flowctl.records.flight.words import limits_as_dict
from flowctl.records.telemetry.events import ConnectionEvents, Events
from flowctl.records.telemetry.options import Addresses, EventsOptions, RecordedStreams
from flowctl.records.telemetry.privacy import Privacy
from flowctl.records.telemetry.recorder import Recorder
from flowctl.records.telemetry.schema import FLIGHT, RecordedRole
from flowctl.sender import Sender

_log: Final = structlog.get_logger("flowctl.live")

_UNFIT: Final = re.compile(r"[^A-Za-z0-9._-]")


def usual_node(port: int) -> str:
    """Return the name of a server that was given none: host and port, so that two on a machine are two."""
    name = _UNFIT.sub("-", socket.gethostname()).strip("-._")[:48] or "node"
    return f"{name}-{port}"


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


class Recording:
    """Everything that a live server records with."""

    def __init__(
        self,
        options: EventsOptions,
        fanouts: Callable[[], Iterable[Fanout]],
        connections: Callable[[], list[Connection]],
        clock: Callable[[], float],
    ) -> None:
        self.recorder: Final = Recorder(options, clock)  # queues and files; other records (flights) have a lane of it
        self.events: Final = Events(self.recorder, Privacy(options.addresses, options.streams, options.key))
        self.sampler: Final = Sampler(fanouts, connections, self.events, clock)
        self.sessions: Final = SessionRecords(self.events, self.sampler)
        self._clock = clock
        self._began = False
        if options.key is None and (options.streams is RecordedStreams.HASH or options.addresses is Addresses.HASHED):
            _log.info("hashes of names in the records will be others after a restart", set="events_key_file")

    def start(self, config: LiveConfig) -> None:
        self.recorder.start()
        self._began = True
        detail = _described(replace(config, events=self.recorder.options), self._pattern)
        self.events.server_started(self._clock(), detail)
        self.sampler.start()

    def refused(self, peer: tuple[str, int], error: LimitExceededError) -> None:
        value, maximum = (0.0, 0.0) if error.limit == BANNED else (error.value, error.maximum)
        self.events.conn_refused(self._clock(), peer, error.limit, value, maximum)

    def _pattern(self, streams: str) -> str:
        """Return what is stored of a pattern of streams: one that says more than the application may hold a key."""
        whole = streams == "*" or streams.partition("/")[2] == "*"
        return streams if whole else "/".join(filter(None, self.events.privacy.stream(streams)))

    def stop(self, connections: int, deadline_s: float) -> None:
        """Record the end, and write everything; after the connections have ended."""
        if not self._began:
            return
        self._began = False
        self.sampler.stop()
        self.events.tell_refused()
        self.events.server_stopped(self._clock(), connections)
        written = self.recorder.stop(deadline_s)
        found = self.recorder.statistics()
        # Written, or never: the process ends now, and takes along what a slow disk has not taken.
        left = 0 if written else found.unwritten_rows
        if left:
            _log.warning("records not written at the stop", rows=left, why=found.last_error or "the disk was too slow")
        books = found.books.values()
        _log.info(
            "records written",
            rows=sum(item.written_rows for item in books),
            files=sum(item.files for item in books),
            written_bytes=sum(item.written_bytes for item in books),
            lost=found.lost_rows + left,
            recorder_cpu_s=round(found.cpu_s, 3),
            sampler_cpu_s=round(self.sampler.cpu_s, 3),
        )


def in_force(config: LiveConfig) -> dict[str, Any]:
    """Return what records say of limits, policy and times: at the start, and of each change of them."""
    settings = config.sender
    return {
        "limits": str(config.limits),
        "marks": limits_as_dict(config.limits),
        "policy": config.policy,
        "stuck_s": settings.stuck_s,
        "soft_too_long_s": settings.soft_too_long_s,
        "return_after_s": settings.return_after_s,
    }


def _viewer_levels(config: LiveConfig, pattern: Callable[[str], str]) -> str:
    """Return what levels say of viewers, like ``talk/*=800ms audio-first; *=off``: what-if judges them all alike."""
    found = []
    for level in config.levels:
        words = []
        if "limits.target_delay_ms" in level.values:
            words.append(target_marks(Limits(target_delay_ms=level.values["limits.target_delay_ms"])))
        if "policy" in level.values:
            words.append(level.values["policy"])
        if words and level.role is not Role.PUBLISHER:
            streams = level.stream or (f"{level.application}/*" if level.application else "*")
            found.append(f"{pattern(streams)}={' '.join(words)}")
    return "; ".join(found)


def _described(config: LiveConfig, pattern: Callable[[str], str] = str) -> dict[str, Any]:
    version = "unknown"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("flowctl")
    settings, events = config.sender, config.events
    return {
        "version": version,
        **in_force(config),
        "levels": _viewer_levels(config, pattern),
        "age_from": settings.age_from.value,
        "flush_interval_s": config.flush_interval_s,
        "groups": config.group_count,
        "memory_budget_bytes": config.memory_budget_bytes,
        "samples": events.samples,
        "interval_s": events.interval_s,
        "addresses": events.addresses.value,
        "streams": events.streams.value,
        "hashes_join": events.key is not None,
    }


def make_flights(options: FlightOptions, events: Events) -> Flights:
    def identity(number: int, peer: tuple[str, int], now: float) -> Identity:
        return Identity(
            conn_id=events.conn_id(number),
            began_at_us=events.wall.us(now),
            peer_ip=events.privacy.address(peer[0]),
            peer_port=peer[1],
        )

    put: Callable[[tuple[object, ...]], bool] = events.recorder.lane(FLIGHT).put
    return Flights(options, put, identity)


def name_flight(sender: Sender, who: tuple[str | None, int | None, str | None, str | None, str | None]) -> None:
    if isinstance(sender, RecordedSender):
        sender.describe(who[2], who[3], who[4])
