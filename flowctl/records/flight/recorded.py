"""A Sender whose every entrance is noted on a tape before it happens.

How. Each public method that can change anything takes the Sender's lock, which is re-entrant, and opens a *call*: time
stands still, the private log is filled up to the end of the stream's log, and one row says what is called. Calls that
the Sender makes of itself inside are part of the outer one. Methods that only look are noted where looking moves
something: where messages are refused, a look steps over them.

What it costs is measured in docs/flight.md. A Sender that is not recorded has none of this: it is of another class.

Threads: as of `Sender`. The tape and the private log are guarded by the Sender's lock; who writes to the tape is in a
call, so that the rows of two threads never mix.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from types import TracebackType
from typing import Any, Final

from flowctl.core.flow.forecast import Forecast
from flowctl.core.flow.ledger import LedgerEntry, LedgerKind
from flowctl.core.flow.limits import NO_LIMITS, Limits
from flowctl.core.flow.policy import DropPolicy, Thin
from flowctl.core.flow.state import Load, MessageClass
from flowctl.core.outgoing.backlog import NEEDED
from flowctl.core.outgoing.streamlog import Entry, StreamLog, Wire, owned_bytes
from flowctl.core.outgoing.transport import Transport
from flowctl.core.sending.contract import CohortLike, FlushResult, Frontend, SenderHost, SendResult
from flowctl.core.sending.figures import Account, SenderStatistics
from flowctl.core.sending.settings import SenderSettings
from flowctl.reasons import CloseReason
from flowctl.records.flight.feed import LogFeed, PrivateCohort
from flowctl.records.flight.surroundings import TapedHost, TapedTransport
from flowctl.records.flight.tape import Tape, error_as_dict
from flowctl.records.flight.words import (
    FLIGHT_FORMAT,
    MICROSECONDS,
    OWN_LANE,
    FlightRow,
    TablePolicy,
    dump,
    figures_of,
    limits_as_dict,
    output_row,
    settings_as_dict,
)
from flowctl.records.telemetry.schema import CLASS_NAMES, FlightKind
from flowctl.sender import Sender

END_CLOSED: Final = "closed"
"""Reason of END: the Sender is over."""
END_LIMIT: Final = "limit"
"""Reason of END: the flight has reached its bounds, or recording was switched off; the Sender goes on."""


class NotingSender(Sender):
    """A Sender that tells of what it notes in its ledger, without the ledger's bounds: what came out of a flight."""

    __slots__ = ("_noted",)

    def __init__(self, *others: Any, noted: Callable[[LedgerEntry, Load | None], None], **options: Any) -> None:
        self._noted: Final = noted
        super().__init__(*others, **options)

    def _note_locked(self, entry: LedgerEntry) -> None:
        super()._note_locked(entry)
        # The edge was decided on the load of this moment, so that looking once more changes nothing.
        self._noted(entry, self._load_locked(entry.at) if entry.kind is LedgerKind.STATE else None)

    @property
    def refused(self) -> bool:
        """Whether a write met EAGAIN and not everything has been taken since: the flow core's own bit. Any thread."""
        with self._lock:
            return self._core.would_block


class _Inner:
    """A call inside of another one: part of that."""

    __slots__ = ()

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""


_INNER: Final = _Inner()


class _Call:
    """A call in progress, as a context; its user holds the Sender's lock."""

    __slots__ = ("_sender",)

    def __init__(self, sender: RecordedSender) -> None:
        self._sender = sender

    def __enter__(self) -> None:
        """Do nothing: its maker has begun it."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sender._end_call_locked()  # noqa: SLF001 - the other half of `_call_locked`


class _Public:
    """A public method, around its lock: see `Sender._refuse_reentry` and `_run_after`."""

    __slots__ = ("_method", "_sender")

    def __init__(self, sender: RecordedSender, method: str) -> None:
        self._sender, self._method = sender, method

    def __enter__(self) -> None:
        self._sender._refuse_reentry(self._method)  # noqa: SLF001 - part of it

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sender._run_after()  # noqa: SLF001 - part of it


class RecordedSender(NotingSender):
    """A Sender that is recorded. Arguments as of `Sender`.

    Attributes:
        tape: the same; guarded by the Sender's lock.
    """

    __slots__ = ("__weakref__", "_blocked_before", "_feed", "_real_host", "tape")

    def __init__(
        self,
        host: SenderHost,
        transport: Transport,
        *,
        tape: Tape,
        limits: Limits = NO_LIMITS,
        policy: DropPolicy | None = None,
        frontend: Frontend | None = None,
        settings: SenderSettings | None = None,
        deferred: bool = True,
    ) -> None:
        settings = settings or SenderSettings()
        table = TablePolicy.of(policy, host.handler_failed)
        self._real_host = host
        self.tape = tape
        now_s = host.now()
        tape.begin(now_s, begin_detail(now_s, limits, settings, table, deferred=deferred))
        super().__init__(
            TapedHost(host, tape),
            TapedTransport(transport, tape),
            noted=partial(_write_output, tape),
            limits=limits,
            policy=table,
            frontend=frontend,
            settings=settings,
            deferred=deferred,
        )
        self._feed: LogFeed | None = None  # of the followed log; guarded by _lock
        self._blocked_before = False  # the core's EAGAIN bit when the call in progress began; guarded by _lock
        tape.leave()

    # -- calls

    def _call_locked(
        self,
        name: str,
        detail: dict[str, object] | None = None,
        *,
        kind: FlightKind = FlightKind.CALL,
        size_bytes: int | None = None,
    ) -> _Call | _Inner:
        """Begin a call: stop the time, fill the private log, write the row. Inside of another call: nothing."""
        self._lock.assert_owned()
        tape = self.tape
        if tape.depth:
            return _INNER
        self._begin_call_locked()
        tape.write(FlightRow(tape.offset_us, kind.value, None, size_bytes, reason=name, detail=tape.arguments(detail)))
        return _Call(self)

    def _begin_call_locked(self) -> None:
        host, tape = self._real_host, self.tape
        tape.enter(host.now(), foreign=not host.in_thread())
        self._blocked_before = self._core.would_block
        if self._feed is not None and not self._closing:  # who is leaving takes nothing that is published from now on
            self._feed.run()

    def _end_call_locked(self) -> None:
        """End a call: what the flight ends with, and what the Sender has left."""
        self._lock.assert_owned()
        tape = self.tape
        if tape.on:
            if self._blocked_before and not self._core.would_block:
                tape.write(FlightRow(tape.offset_us, FlightKind.DRAINED.value))
            if self._close_reason is not None or tape.full:
                self._end_flight_locked(END_CLOSED if self._close_reason is not None else END_LIMIT)
        if self._feed is not None and self._outbox.cursor is None:
            self._feed = None  # it would hold the stream's log
        tape.leave()

    def _end_flight_locked(self, reason: str) -> None:
        tape = self.tape
        figures = figures_of(super().statistics())
        tape.write(FlightRow(tape.offset_us, FlightKind.END.value, reason=reason, detail=dump(figures)))
        tape.on = False

    @property
    def recording(self) -> bool:
        """Whether rows are still taken."""
        return self.tape.on

    def describe(self, role: str | None, app: str | None, stream: str | None) -> None:
        """Say in the rows from now on what the connection is used for, as records may show it. Any thread."""
        with _Public(self, "describe"), self._lock:
            self.tape.describe(role=role, app=app, stream=stream)

    def end_flight(self) -> None:
        """End the recording; the connection goes on. Any thread; harmless when it has ended."""
        with _Public(self, "end_flight"), self._lock, self._call_locked("look"):
            self._load_locked(self.tape.now_us / MICROSECONDS)
            if self.tape.on:
                self._end_flight_locked(END_LIMIT)

    def _before_look_locked(self) -> None:
        """Make ready for a look: where something is refused, looking steps over it, and that is noted."""
        self._lock.assert_owned()
        tape = self.tape
        if tape.depth:
            return
        cursor = self._outbox.cursor
        self._begin_call_locked()
        if cursor is not None and cursor.refuses and tape.on and self._close_reason is None:
            tape.call("look")
            self._load_locked(tape.time_s(0.0))
        tape.leave()

    # -- what is noted: see `Sender` for each

    def send(
        self,
        data: Wire,
        message_class: MessageClass = MessageClass.DATA,
        *,
        droppable: bool | None = None,
    ) -> SendResult:
        """Send one message, as `Sender.send`; its class and size are noted."""
        if type(data) is not bytes:
            data = owned_bytes(data)
        with _Public(self, "send"), self._lock:
            frame = message_class in NEEDED and droppable is not False
            if self.tape.depth or self._closing or not data or frame:  # refused: it never reaches the core
                return super().send(data, message_class, droppable=droppable)
            tape = self.tape
            self._begin_call_locked()
            options: dict[str, object] = {} if droppable is None else {"droppable": droppable}
            tape.queued(CLASS_NAMES[message_class], len(data), OWN_LANE, 0.0, tape.arguments(options))
            with _Call(self):
                return super().send(data, message_class, droppable=droppable)

    def follow(
        self,
        cohort: CohortLike[Sender],
        *,
        start: Entry | None = None,
        prefix: tuple[Wire, ...] = (),
        wait_for_key: bool = False,
    ) -> None:
        """Follow the log of `cohort` through a private one, as `Sender.follow`."""
        with _Public(self, "follow"), self._lock:
            if self.tape.depth or self._cohort is not None or self._closing:
                super().follow(cohort, start=start, prefix=prefix, wait_for_key=wait_for_key)
                return
            tape = self.tape
            self._begin_call_locked()
            with _Call(self):
                feed = self._feed = LogFeed(cohort.log, start or cohort.log.tail, tape)
                tape.call("follow", {"prefix": [len(part) for part in prefix], "wait_for_key": wait_for_key})
                super().follow(
                    PrivateCohort(cohort, feed.private), start=feed.first, prefix=prefix, wait_for_key=wait_for_key
                )

    def unfollow(self) -> None:
        """Stop following, as `Sender.unfollow`."""
        with _Public(self, "unfollow"), self._lock, self._call_locked("unfollow"):
            super().unfollow()

    def suspend_following(self) -> None:
        """Leave the fan-out and keep the place, as `Sender.suspend_following`."""
        with _Public(self, "suspend_following"), self._lock, self._call_locked("suspend_following"):
            super().suspend_following()

    def resume_following(self, cohort: CohortLike[Sender]) -> None:
        """Go on with another fan-out, as `Sender.resume_following`."""
        with _Public(self, "resume_following"), self._lock, self._call_locked("resume_following"):
            feed = self._feed
            if feed is not None and cohort.log is feed.log:
                cohort = PrivateCohort(cohort, feed.private)
            super().resume_following(cohort)

    def set_limits(self, limits: Limits) -> None:
        """Put `limits` in force, as `Sender.set_limits`."""
        detail: dict[str, object] = {"limits": limits_as_dict(limits)}
        with (
            _Public(self, "set_limits"),
            self._lock,
            self._call_locked("set_limits", detail, kind=FlightKind.LIMITS_SET),
        ):
            super().set_limits(limits)

    def set_policy(self, policy: DropPolicy) -> None:
        """Decide by `policy`, or rather its table, as `Sender.set_policy`."""
        table = TablePolicy.of(policy, self._real_host.handler_failed)
        with _Public(self, "set_policy"), self._lock, self._call_locked("set_policy", {"policy": table.as_dict()}):
            super().set_policy(table)

    def set_settings(self, settings: SenderSettings) -> None:
        """Put other times in force, as `Sender.set_settings`."""
        detail: dict[str, object] = {"settings": settings_as_dict(settings)}
        with _Public(self, "set_settings"), self._lock, self._call_locked("set_settings", detail):
            super().set_settings(settings)

    def thin(self, mode: Thin = Thin.DROPPABLE) -> None:
        """Throw away what may be dropped, as `Sender.thin`."""
        with _Public(self, "thin"), self._lock, self._call_locked("thin", {"mode": mode.name}):
            super().thin(mode)

    def relieve(self, cause: str) -> None:
        """Free memory, as `Sender.relieve`; the cause is not noted, it may name others."""
        with _Public(self, "relieve"), self._lock, self._call_locked("relieve"):
            super().relieve(cause)

    def sample_delay(self, kernel_bytes: int | None = None) -> float:
        with _Public(self, "sample_delay"), self._lock, self._call_locked("sample_delay", size_bytes=kernel_bytes):
            return super().sample_delay(kernel_bytes)

    def peer_acknowledged(self, total_bytes: int) -> None:
        """Note what the peer has read, as `Sender.peer_acknowledged`."""
        with (
            _Public(self, "peer_acknowledged"),
            self._lock,
            self._call_locked("peer_acknowledged", size_bytes=total_bytes),
        ):
            super().peer_acknowledged(total_bytes)

    def flush(self) -> FlushResult:
        """Write what is queued, as `Sender.flush`."""
        with _Public(self, "flush"), self._lock, self._call_locked("flush"):
            return super().flush()

    def writable(self) -> FlushResult:
        """Go on writing, as `Sender.writable`."""
        with _Public(self, "writable"), self._lock, self._call_locked("writable"):
            return super().writable()

    def log_grew(self) -> tuple[int, int]:
        """Judge the load again, as `Sender.log_grew`; places are those of the stream's log."""
        with self._lock, self._call_locked("log_grew"):
            offset, sequence = super().log_grew()
            return (offset, sequence) if self._feed is None else self._feed.to_stream(offset, sequence)

    def tick(self) -> None:
        """Judge what time has changed, as `Sender.tick`."""
        with _Public(self, "tick"), self._lock, self._call_locked("tick", kind=FlightKind.TICK):
            super().tick()

    def close_after_flush(self) -> None:
        """Send what is queued and end, as `Sender.close_after_flush`."""
        with _Public(self, "close_after_flush"), self._lock, self._call_locked("close_after_flush"):
            super().close_after_flush()

    def close(self, reason: CloseReason, details: str = "") -> None:
        """End now, as `Sender.close`; the details are not noted, they may name a stream."""
        with _Public(self, "close"), self._lock, self._call_locked("close", {"reason": reason.value}):
            super().close(reason, details)

    def let_go(self) -> None:
        """Forget host and frontend, as `Sender.let_go`."""
        with self._lock:
            super().let_go()
            self._real_host = self._host

    def broken(self, error: Exception) -> None:
        """End for an error of a write or flush, as `Sender.broken`."""
        if not isinstance(error, OSError):
            self._real_host.handler_failed("flush", error)  # not under the lock
        with _Public(self, "broken"), self._lock, self._call_locked("broken", error_as_dict(error)):
            self._broken_locked(error)

    # -- what looks

    def why(self) -> str:
        """Explain the state, as `Sender.why`."""
        with _Public(self, "why"), self._lock:
            self._before_look_locked()
            return super().why()

    def statistics(self) -> SenderStatistics:
        with _Public(self, "statistics"), self._lock:
            self._before_look_locked()
            return super().statistics()

    def load(self) -> Load:
        with _Public(self, "load"), self._lock:
            self._before_look_locked()
            return super().load()

    def forecast(self) -> Forecast | None:
        """Return when the hard limit will be reached, as `Sender.forecast`."""
        with _Public(self, "forecast"), self._lock:
            self._before_look_locked()
            return super().forecast()

    def account(self, *, rows: bool = True) -> Account:
        """Return how it stands, as `Sender.account`; its place is one of the stream's log."""
        with _Public(self, "account"), self._lock:
            if rows:
                self._before_look_locked()
            account, feed = super().account(rows=rows), self._feed
            if feed is None or account.entry is None:
                return account
            return account._replace(entry=feed.entry_in_stream(account.entry))

    # -- what is another with a private log

    @property
    def host(self) -> SenderHost:
        """The thread and the connection it lives on: the real one."""
        return self._real_host

    @property
    def following(self) -> StreamLog | None:
        feed = self._feed
        return None if self._cohort is None or feed is None else feed.log

    def ready_for_cohort(self, at: Entry) -> bool:
        """Return False: what a cohort writes for its members, nobody could note."""
        del at
        return False


def _write_output(tape: Tape, entry: LedgerEntry, load: Load | None) -> None:
    if tape.on:
        row = output_row(entry, load, tape.offset_us)
        if row is not None:
            tape.write(row)


def begin_detail(now_s: float, limits: Limits, settings: SenderSettings, policy: TablePolicy, *, deferred: bool) -> str:
    """Return the detail of BEGIN: all that is needed to build the same Sender."""
    values: dict[str, Any] = {
        "format": FLIGHT_FORMAT,
        "clock_us": ceil(now_s * MICROSECONDS),
        "limits": limits_as_dict(limits),
        "settings": settings_as_dict(settings),
        "policy": policy.as_dict(),
        "deferred": deferred,
    }
    return dump(values)
