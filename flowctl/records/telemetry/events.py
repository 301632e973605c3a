"""What a server says of its connections: one method per event, each of which is one tuple on the recorder's queue.

`Events` belongs to the server, `ConnectionEvents` to one connection, on whose thread it is used. Nothing here reads a
clock or waits. What a connection was in the end is one row of `flow_closes` (`ConnectionEvents.whole`); an event that
says no more than that row is shown to live surfaces and stands in no file (`RECORDED`). Where edges were lost (a ledger
holds 16 between two looks), `state_ms` of the next one is empty; times in states are right anyway.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flowctl.core.flow.counts import Counts, total
from flowctl.core.flow.ledger import LedgerEntry, LedgerKind
from flowctl.core.flow.state import SendState, StateChange
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.sending.figures import Account, SenderStatistics
from flowctl.core.text.addresses import address_key
from flowctl.reasons import CloseReason, DropReason
from flowctl.records.telemetry.privacy import Privacy
from flowctl.records.telemetry.recorder import Lane, Recorder, WallClock
from flowctl.records.telemetry.schema import (
    CLASS_NAMES,
    FLOW_CLOSES,
    FLOW_EVENTS,
    PEER_NAMES,
    RECORDED,
    EventName,
    RecordedRole,
    Row,
    conn_id_of,
)
from flowctl.records.telemetry.whole import NO_COURSE, ConnectionCourse, sender_columns

_REFUSALS_PER_S: Final = 20
"""Most refused connections of an address with a record of their own per second; the others are summed up in one, about
a second later."""
_MOST_REFUSED: Final = 4096
"""Most addresses (see `flowctl.core.text.addresses`) whose refusals are counted."""


_EVENT: Final = FLOW_EVENTS.row_names.index("event")
_STATES: Final = tuple(state.name for state in SendState)
_SERVER: Final = (None, None, None, None, None)


def event_row(
    ts_us: int,
    conn_id: int,
    event: EventName,
    peer: tuple[Any, ...] = _SERVER,
    *,
    value: float | None = None,
    limit: float | None = None,
    account: Account | None = None,
    detail: Mapping[str, Any] | None = None,
    **columns: Any,
) -> Row:
    """Return a record of `flow_events`; `columns` are some of its columns by name."""
    if account is not None:
        load = account.load
        columns["queued_bytes"], columns["queued_messages"] = load.size_bytes, load.messages
        columns["queued_age_ms"] = load.age_ms
        columns["sent_bytes"], columns["viewer_delay_ms"] = account.bytes_sent, account.delay_ms
    if value is not None:  # Arrow makes no real number of a whole one that is beyond 2^53
        columns["value"] = float(value)
    if limit is not None:
        columns["limit"] = float(limit)
    if detail:
        columns["detail"] = json.dumps(detail, separators=(",", ":"))
    return FLOW_EVENTS.row(ts_us, conn_id, *peer, event.value, **columns)  # the schema begins with these


@dataclass(slots=True)
class _Refused:
    """Refusals of one address and limit."""

    second: int
    count: int = 0
    untold: int = 0
    at: float = 0.0
    host: str = ""  # from where it came last; an address of IPv6 is one of many of its /64
    figures: tuple[float, float] = (0.0, 0.0)  # of the last of them: what was reached, and what is allowed
    fresh: bool = True  # whether any came since the recorder looked last


class Events:
    """The events of one server. `connection`, `banned` and `config_changed`: any thread."""

    def __init__(self, recorder: Recorder, privacy: Privacy) -> None:
        self.recorder: Final = recorder
        self.privacy: Final = privacy
        self.wall: Final[WallClock] = recorder.wall  # turns times of connections into those of records
        self.lane: Final[Lane] = recorder.lane(FLOW_EVENTS)
        # what tells of the open connections, by number; changed on the thread of each, read by the sampler's
        self.open: Final[dict[int, ConnectionEvents]] = {}
        self._start_s: Final = recorder.start_us // 1_000_000
        self._lock = OwnedLock()  # held by the listener's thread and by the recorder's, for microseconds
        self._refused: dict[tuple[str, str], _Refused] = {}  # guarded by _lock
        recorder.each_second(self.tell_refused)

    def conn_id(self, number: int) -> int:
        return conn_id_of(self._start_s, number)

    def connection(self, number: int, peer: tuple[str, int], at: float) -> ConnectionEvents:
        who = (self.privacy.address(peer[0]), peer[1], RecordedRole.UNKNOWN.value, None, None)
        return ConnectionEvents(self, self.conn_id(number), who, at)

    # -- of the server

    def server_started(self, at: float, detail: Mapping[str, Any]) -> None:
        self._server(at, EventName.SERVER_STARTED, detail=detail)

    def server_stopped(self, at: float, connections: int) -> None:
        self._server(at, EventName.SERVER_STOPPED, value=float(connections))

    def config_changed(self, at: float, reason: str, detail: Mapping[str, Any]) -> None:
        self._server(at, EventName.CONFIG_CHANGED, reason=reason, detail=self._detail_shown(detail))

    def _detail_shown(self, detail: Mapping[str, Any]) -> dict[str, Any]:
        """Return `detail` with its network as addresses are stored; without it where they are not."""
        shown = dict(detail)
        network = None if "cidr" not in shown else self.privacy.network(shown.pop("cidr"))
        return shown if network is None else {"cidr": network, **shown}

    def _server(self, at: float, event: EventName, **values: Any) -> None:
        self.lane.put(event_row(self.wall.us(at), 0, event, **values))

    # -- of a peer that is no connection, or no longer

    def conn_refused(self, at: float, peer: tuple[str, int], reason: str, value: float, limit: float) -> None:
        """Record that a connection was refused at accept. The listener's thread.

        Of one address and reason the first 20 of a second have a record each; the others are summed up in the next one,
        or in one that `tell_refused` makes: a flood must not fill the recorder's queue.
        """
        key, second = (address_key(peer[0]), reason), int(at)
        with self._lock:
            refused = self._refused.get(key)
            if refused is None:
                if len(self._refused) >= _MOST_REFUSED:
                    self._tell_refused_locked()
                    self._refused.clear()
                refused = self._refused[key] = _Refused(second)
            if refused.second != second:
                refused.second, refused.count = second, 0
            refused.count += 1
            refused.at, refused.host, refused.figures, refused.fresh = at, peer[0], (value, limit), True
            if refused.count > _REFUSALS_PER_S:
                refused.untold += 1
                return
            count, refused.untold = 1 + refused.untold, 0
        self._put_refused(at, peer, reason, (value, limit), count)

    def tell_refused(self) -> None:
        """Record the refusals that were summed up and not told yet, and forget who is refused no longer. Any thread."""
        with self._lock:
            self._tell_refused_locked()
            for key, refused in list(self._refused.items()):
                if not refused.fresh:
                    del self._refused[key]
                refused.fresh = False  # stays for a second, or its next refusals would have 20 more records in this one

    def _tell_refused_locked(self) -> None:
        self._lock.assert_owned()
        for (_, reason), refused in self._refused.items():
            if refused.untold:
                self._put_refused(refused.at, (refused.host, None), reason, refused.figures, refused.untold)
                refused.untold = 0

    def _put_refused(
        self,
        at: float,
        peer: tuple[str, int | None],
        reason: str,
        figures: tuple[float, float],
        count: int,
    ) -> None:
        who = (self.privacy.address(peer[0]), peer[1], RecordedRole.UNKNOWN.value, None, None)
        axis = None if reason == CloseReason.BANNED.value else reason
        value, limit = figures
        columns: dict[str, Any] = {"axis": axis, "value": value, "limit": limit, "reason": reason}
        self.lane.put(
            event_row(self.wall.us(at), 0, EventName.CONN_REFUSED, who, count=count if count > 1 else None, **columns)
        )

    def banned(self, at: float, number: int, peer: tuple[str, int], detail: Mapping[str, Any]) -> None:
        shown = self._detail_shown(detail)
        who = (self.privacy.address(peer[0]), peer[1], RecordedRole.UNKNOWN.value, None, None)
        reason = CloseReason.BANNED.value
        ts_us, conn_id = self.wall.us(at), self.conn_id(number)
        self.lane.put(event_row(ts_us, conn_id, EventName.BANNED, who, reason=reason, detail=shown))


@dataclass(slots=True, eq=False)
class ConnectionEvents:
    """The events of one connection. Its thread."""

    _events: Events
    conn_id: int
    # Address, port, role, application and stream as records show them.
    who: tuple[str | None, int | None, str | None, str | None, str | None]
    _opened_at: float
    _at: float = field(init=False)  # since when the present state lasts
    role: RecordedRole = RecordedRole.UNKNOWN
    ended_at: float | None = None  # when its Sender ended, in seconds; None: it is not known yet
    line: Mapping[str, int] = field(default_factory=dict)  # what the kernel knew of its line at the end, by column
    _state: SendState = SendState.READY
    _sequence: int = 0  # of the last edge
    _seen_edges: int = 0
    _app_named: bool = True
    _agent: str = ""
    _handshake_ms: float | None = None
    _asked_ms: float | None = None  # its first request to play or publish
    _startup_ms: float | None = None  # it has been given media, or publishes
    _course: ConnectionCourse | None = None  # None: nothing has happened to it
    _end: dict[str, Any] = field(default_factory=dict)  # columns of its end
    _events_count: int = 0  # records of it in `flow_events`
    _sampled_events: int = 0  # those that the sampler's thread has made
    _left_ready: tuple[float, int] | None = None  # when it left READY last, and what had been sent by then

    def __post_init__(self) -> None:
        self._at = self._opened_at

    def put(self, at: float, event: EventName, **columns: Any) -> None:
        """Record an event; `columns` as of `event_row`."""
        row = event_row(self._events.wall.us(at), self.conn_id, event, self.who, **columns)
        self._events_count += row[_EVENT] in RECORDED
        self._events.lane.put(row)

    def opened(self) -> None:
        self.put(self._opened_at, EventName.CONN_OPENED)

    def handshake_done(self, at: float, style: str) -> None:
        self._handshake_ms = (at - self._opened_at) * 1000
        self.put(at, EventName.HANDSHAKE_DONE, value=self._handshake_ms, reason=style)

    def command(self, at: float, name: str, detail: Mapping[str, Any] | None = None) -> None:
        self.put(at, EventName.COMMAND, reason=name, detail=detail)

    def connected(self, at: float, agent: str, *, app_named: bool) -> None:
        self._app_named = app_named
        self._agent = self._events.privacy.text(agent)
        self.command(at, "connect", {"agent": self._agent})

    def asked(self, at: float, role: RecordedRole, path: str, agent: str) -> None:
        """Record a request to publish or play `path` (``app/name``); `agent`: what the peer calls itself."""
        if role is RecordedRole.HTTP_FLV:  # nothing was named before, and anybody may ask for any path
            self._app_named = False
        self.name_stream(role, path)
        self._agent = self._events.privacy.text(agent) or self._agent
        if self._asked_ms is None:
            self._asked_ms = (at - self._opened_at) * 1000
        self.command(at, RecordedRole.PUBLISH.value if role is RecordedRole.PUBLISH else RecordedRole.PLAY.value)

    def name_stream(self, role: RecordedRole, path: str) -> None:
        """Let records say from now on what the connection is used for, and for which stream (``app/name``)."""
        app, stream = self._events.privacy.stream(path, app_named=self._app_named)
        self.role = role
        self.who = (self.who[0], self.who[1], role.value, app, stream)

    def publish_started(self, at: float, path: str, detail: Mapping[str, Any]) -> None:
        self.name_stream(RecordedRole.PUBLISH, path)
        since_ms = (at - self._opened_at) * 1000
        if self._startup_ms is None:
            self._startup_ms = since_ms
        self.put(at, EventName.PUBLISH_STARTED, value=since_ms, detail=detail)

    def play_started(self, at: float, path: str) -> None:
        """Record, once per connection, that it is given media of `path`; `value`: ms since it was opened."""
        if self._startup_ms is not None:
            return
        self._startup_ms = (at - self._opened_at) * 1000
        self._app_named |= self.role is RecordedRole.HTTP_FLV  # the stream is there, and so is its application
        self.name_stream(RecordedRole.HTTP_FLV if self.role is RecordedRole.HTTP_FLV else RecordedRole.PLAY, path)
        self.put(at, EventName.PLAY_STARTED, value=self._startup_ms)

    @property
    def served(self) -> bool:
        """Whether it has been given media, or has published."""
        return self._startup_ms is not None

    def limit_hit(self, at: float, limit: str, value: float | None, maximum: float | None) -> None:
        self._course_of().limit_hits += 1
        self.put(at, EventName.LIMIT_HIT, axis=limit, value=value, limit=maximum)

    def sample(self, at: float, account: Account, rtt_us: int | None, unsent_bytes: int) -> None:
        """Record the condition of a viewer in trouble. The sampler's thread."""
        self._sampled_events += 1
        us, state = self._events.wall.us(at), account.state.name
        columns: dict[str, Any] = {"state_to": state, "rtt_us": rtt_us, "unsent_bytes": unsent_bytes}
        self._events.lane.put(event_row(us, self.conn_id, EventName.SAMPLE, self.who, account=account, **columns))

    def _course_of(self) -> ConnectionCourse:
        course = self._course
        if course is None:
            course = self._course = ConnectionCourse()
        return course

    # -- what its Sender did

    def ledger_entry(self, entry: LedgerEntry, account: Account) -> None:
        """Record an entry of the ledger; LIMITS and CLOSE have records of their own."""
        kind, change = entry.kind, entry.change
        if change is not None:
            self._put_state_change(change, account)
        elif kind is LedgerKind.DROPS:
            self._put_drops(entry, account)
        elif kind is LedgerKind.LATE:
            self._course_of().late_episodes += 1
            self.put(entry.at, EventName.PICTURES_LATE, reason=entry.why or None, account=account)
        elif kind is LedgerKind.RETURN:
            self.put(
                entry.at, EventName.RETURNED, value=entry.delay_removed_ms, reason=entry.why or None, account=account
            )
        elif kind is LedgerKind.SWITCH:
            stay_ms = entry.duration_s * 1000
            self.put(entry.at, EventName.RENDITION_SWITCHED, value=stay_ms, reason=entry.why, account=account)
        elif kind is LedgerKind.PAUSE:
            course = self._course_of()
            course.input_pauses, course.paused_at = course.input_pauses + 1, entry.at
            self.put(entry.at, EventName.INPUT_PAUSED, reason=_after_colon(entry.why))
        elif kind is LedgerKind.RESUME:
            course = self._course_of()
            course.input_paused_ms, course.paused_at = course.input_paused_ms + entry.duration_s * 1000, None
            self.put(entry.at, EventName.INPUT_RESUMED, value=entry.duration_s * 1000, reason=_after_colon(entry.why))

    def _put_state_change(self, change: StateChange, account: Account) -> None:
        missed = change.sequence - self._sequence - 1
        self._seen_edges += 1
        if change.old is SendState.READY:
            self._left_ready = change.at, account.bytes_sent
        elif missed:
            self._left_ready = None  # it may have been READY in between
        value = change.value
        if change.new is SendState.READY:  # the whole episode, whatever states it went through
            value = None if self._left_ready is None else (change.at - self._left_ready[0]) * 1000
        self._course_of().edge(change.old, change.new, value if change.new is SendState.READY else None)
        self.put(
            change.at,
            EventName.STATE_CHANGED,
            state_from=_STATES[change.old],
            state_to=_STATES[change.new],
            state_ms=None if missed else (change.at - self._at) * 1000,
            cause=change.cause.value,
            axis=None if change.axis is None else change.axis.value,
            value=value,
            limit=change.limit,
            account=account,
            detail={"edges_missed": missed} if missed else None,
        )
        self._sequence, self._state, self._at = change.sequence, change.new, change.at

    def _put_drops(self, entry: LedgerEntry, account: Account) -> None:
        dropped = entry.dropped or {}
        whole = total(dropped.values())
        detail: dict[str, Any] = {"dropped": by_reason(dropped)}
        if entry.delay_removed_ms:
            detail["delay_removed_ms"] = round(entry.delay_removed_ms, 1)
        if DropReason.LATE in dropped:
            detail["picture_share"] = round(entry.picture_share, 4)
            detail["line_share"] = round(entry.line_share, 4)
            detail["delay_max_ms"] = round(entry.delay_max_ms, 1)
        self.put(
            entry.at,
            EventName.DROPPED,
            value=entry.duration_s * 1000,
            dropped_messages=whole.total_messages,
            dropped_bytes=whole.total_bytes,
            reason=max(dropped, key=lambda item: dropped[item].total_messages).value if dropped else None,
            account=account,
            detail=detail,
        )

    def closed(
        self, at: float, reason: CloseReason, details: str, statistics: SenderStatistics, limit: str | None, agent: str
    ) -> None:
        """Record the end of the connection, which `whole` makes its last row of."""
        self._agent = self._events.privacy.text(agent) or self._agent
        # What follows the code may quote the peer; it is short and ours.
        code = details.partition(":")[0][:64] if reason is CloseReason.PROTOCOL_ERROR else None
        self._end = {"reason": reason.value, "code": code or None, "limit_name": limit}
        whole = total(statistics.dropped.values())
        self.put(
            at,
            EventName.CONN_CLOSED,
            state_from=self._state.name,
            state_ms=(at - self._at) * 1000,
            axis=limit,
            dropped_messages=whole.total_messages,
            dropped_bytes=whole.total_bytes,
            sent_bytes=statistics.bytes_sent,
            reason=reason.value,
        )

    def whole(self, at: float, statistics: SenderStatistics, more: Mapping[str, Any]) -> Row:
        """Return the row of the connection for `flow_closes` or `flow_opens`. Any thread."""
        us, left = self._events.wall.us, self._left_ready
        columns = sender_columns(statistics)
        columns |= NO_COURSE if self._course is None else self._course.columns(at)
        if left is not None and statistics.state is not SendState.READY:
            # These tell a slow link, which drains all the time, from a peer that reads nothing.
            columns |= {"unrecovered_ms": (at - left[0]) * 1000, "unrecovered_bytes": statistics.bytes_sent - left[1]}
        columns |= {
            "ts": us(at),
            "conn_id": self.conn_id,
            **dict(zip(PEER_NAMES, self.who, strict=True)),
            "agent": self._agent or None,
            "opened_at": us(self._opened_at),
            "duration_s": at - self._opened_at,
            "handshake_ms": self._handshake_ms,
            "asked_ms": self._asked_ms,
            "startup_ms": self._startup_ms,
            "edges_missed": statistics.transitions - self._seen_edges,
            "events_count": self._events_count + self._sampled_events,
        }
        return FLOW_CLOSES.row(**{**columns, **self._end, **self.line, **more})


def by_class(counts: Counts) -> dict[str, int]:
    """Return numbers of messages by name of the class, without those that are 0."""
    return {name: counts.messages[index] for index, name in enumerate(CLASS_NAMES) if counts.messages[index]}


def by_reason(dropped: Mapping[DropReason, Counts]) -> dict[str, dict[str, int]]:
    """Return numbers of messages by reason and class, likewise."""
    return {reason.value: by_class(counts) for reason, counts in dropped.items()}


def _after_colon(words: str) -> str | None:
    """Return the reason of a pause: the ledger says "input paused: soft limit"."""
    return words.partition(": ")[2] or None
