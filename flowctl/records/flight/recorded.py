"""A Sender whose every entrance is noted on a tape before it happens.

Each public method that can change anything takes the Sender's lock and opens a *call*: time stands still, the private
log is filled up to the end of the stream's log, and one row says what is called. Calls that the Sender makes of itself
are part of the outer one. Methods that only look are noted where looking moves something. Tape and private log are
guarded by the Sender's lock. What it costs is measured in docs/flight.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil
from threading import get_ident
from typing import Any, Final, TypeVar

from flowctl.core.flow.ledger import LedgerEntry, LedgerKind
from flowctl.core.flow.limits import NO_LIMITS, Limits
from flowctl.core.flow.policy import DropPolicy
from flowctl.core.flow.sharedstall import StallSpan
from flowctl.core.flow.state import Load, MessageClass
from flowctl.core.loop.locks import HANDLERS
from flowctl.core.outgoing.backlog import NEEDED
from flowctl.core.outgoing.outbox import Transport
from flowctl.core.outgoing.streamlog import Entry, StreamLog, Wire, owned_bytes
from flowctl.core.sending.contract import CohortLike, Frontend, Guide, Hop, SenderHost, SendResult, Standing
from flowctl.core.sending.figures import Account
from flowctl.core.sending.settings import SenderSettings
from flowctl.records.flight.feed import LogFeed, PrivateCohort, seed_of
from flowctl.records.flight.tape import Tape
from flowctl.records.flight.words import (
    CALLS,
    FLIGHT_FORMAT,
    MICROSECONDS,
    OWN_LANE,
    SWITCH_LANE,
    FlightRow,
    TablePolicy,
    dump,
    error_as_dict,
    figures_of,
    limits_as_dict,
    output_row,
    settings_as_dict,
)
from flowctl.records.telemetry.schema import CLASS_NAMES, FlightKind
from flowctl.sender import Sender

_Data = TypeVar("_Data")

END_CLOSED: Final = "closed"
"""Reason of END: the Sender is over."""
END_LIMIT: Final = "limit"
"""Reason of END: the flight has reached its bounds, or recording was switched off; the Sender goes on."""
END_KEYS: Final = "keys"
"""Reason of END: a log with keys is followed, of which it cannot be told again what was superseded by when."""


class TapedHost:
    """A Sender's host, whose answers are noted; everything else is passed on. See `SenderHost`."""

    __slots__ = (
        "_ask_kernel",
        "_ask_stall",
        "_ask_strained",
        "_now",
        "_tape",
        "handler_failed",
        "ledger_grew",
        "limit_unsent",
        "request_flush",
        "set_deadline",
        "terminate",
        "want_writable",
        "wrote",
    )

    def __init__(self, host: SenderHost, tape: Tape) -> None:
        self._tape = tape
        self._now = host.now
        self._ask_kernel = host.kernel_bytes
        self._ask_strained = host.strained
        self._ask_stall = host.shared_stall
        self.wrote: Final = host.wrote
        self.request_flush: Final = host.request_flush
        self.want_writable: Final = host.want_writable
        self.set_deadline: Final = host.set_deadline
        self.terminate: Final = host.terminate
        self.handler_failed: Final = host.handler_failed
        self.ledger_grew: Final = host.ledger_grew
        self.limit_unsent: Final = host.limit_unsent

    def now(self) -> float:
        return self._tape.time_s(self._now())

    def in_thread(self) -> bool:
        """Return what was noted with the call in progress."""
        return not self._tape.foreign

    def kernel_bytes(self) -> int:
        return self._tape.kernel_bytes(self._ask_kernel)

    def strained(self) -> bool:
        return self._tape.strained(self._ask_strained)

    def shared_stall(self) -> StallSpan | None:
        return self._tape.shared_stall(self._ask_stall)


class TapedTransport:
    """A transport, of which is noted what each write was offered and took. See `Transport`."""

    __slots__ = ("_tape", "_transport")

    def __init__(self, transport: Transport, tape: Tape) -> None:
        self._transport = transport
        self._tape = tape

    def send(self, data: bytes, /) -> int:
        return self._write(self._transport.send, data, len(data))

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        return self._write(self._transport.sendmsg, buffers, sum(map(len, buffers)))

    def _write(self, write: Callable[[_Data], int], data: _Data, offered_bytes: int) -> int:
        try:
            count = write(data)
        except Exception as error:
            self._tape.write_failed(offered_bytes, error)
            raise
        self._tape.wrote(offered_bytes, count)
        return count


class TapedGuide:
    """A guide whose answers are noted. It is shown the key frame as one of the stream's log. See `Guide`."""

    __slots__ = ("_guide", "_sender")

    def __init__(self, sender: RecordedSender, guide: Guide) -> None:
        self._sender = sender
        self._guide = guide

    def choose_log(self, key: Entry) -> Hop | float | None:
        return self._sender.ask_locked(self._guide, key)


class NotingSender(Sender):
    """A Sender that tells of what it notes in its ledger, without the ledger's bounds: what came out of a flight."""

    __slots__ = ("_noted",)

    def __init__(self, *others: Any, noted: Callable[[LedgerEntry, Load | None], None], **options: Any) -> None:
        self._noted: Final = noted
        super().__init__(*others, **options)

    def _add_to_ledger_locked(self, entry: LedgerEntry) -> None:
        super()._add_to_ledger_locked(entry)
        # The edge was decided on the load of this moment, so that looking once more changes nothing.
        self._noted(entry, self._judgement.load(entry.at) if entry.kind is LedgerKind.STATE else None)

    @property
    def refused(self) -> bool:
        """Whether a write met EAGAIN and not everything has been taken since: the flow core's own bit. Any thread."""
        with self._lock:
            return self._core.would_block


class RecordedSender(NotingSender):
    """A Sender that is recorded. Arguments as of `Sender`."""

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
        self.tape = tape  # guarded by the Sender's lock
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

    @contextmanager
    def _entered(self, name: str) -> Iterator[bool]:
        """Begin and end a call. Yields False for one inside of another call, which is part of that."""
        with self._guarded(name), self._lock:
            if self.tape.depth:
                yield False
                return
            self._begin_call_locked()
            try:
                yield True
            finally:
                self._end_call_locked()

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Make the call of `Sender` that has this name in `CALLS`, after a row for it."""
        with self._entered(name) as outermost:
            if outermost:
                call = CALLS[name]
                self.tape.call(name, call.write(*arguments, **options), call.kind)
            return getattr(super(), name)(*arguments, **options)

    def _begin_call_locked(self) -> None:
        """Stop the time, and fill the private log."""
        self._lock.assert_owned()
        host, tape = self._real_host, self.tape
        tape.enter(host.now(), foreign=not host.in_thread())
        self._blocked_before = self._core.would_block
        if self._feed is not None and not self.closed:  # who is leaving takes nothing that is published from now on
            self._feed.run()

    def _end_call_locked(self) -> None:
        """Note what the flight ends with, and forget what the Sender has left."""
        self._lock.assert_owned()
        tape = self.tape
        if tape.on:
            if self._blocked_before and not self._core.would_block:
                tape.write(FlightRow(tape.offset_us, FlightKind.DRAINED.value))
            if self._close_reason is not None or tape.full:
                self._end_flight_locked(END_CLOSED if self._close_reason is not None else END_LIMIT)
        if self._feed is not None and self.closed:
            self._feed.end()
        if self._outbox.cursor is None:
            self._feed = None  # it would hold the stream's log
        tape.leave()

    def _end_flight_locked(self, reason: str) -> None:
        tape = self.tape
        figures = figures_of(super().statistics())
        tape.write(FlightRow(tape.offset_us, FlightKind.END.value, reason=reason, detail=dump(figures)))
        tape.on = False

    def _look(self, name: str) -> Any:
        """Make a call that only looks. Where something is refused, looking steps over it: that is noted."""
        with self._guarded(name), self._lock:
            tape, cursor = self.tape, self._outbox.cursor
            if not tape.depth:
                self._begin_call_locked()
                if cursor is not None and cursor.refusals is not None and tape.on and self._close_reason is None:
                    tape.call("look")
                    self._judgement.load(tape.time_s(0.0))
                tape.leave()
            return getattr(super(), name)()

    # -- the recording

    @property
    def recording(self) -> bool:
        return self.tape.on

    def describe(self, role: str | None, app: str | None, stream: str | None) -> None:
        """Say in the rows from now on what the connection is used for, as records may show it. Any thread."""
        with self._lock:
            self.tape.describe(role=role, app=app, stream=stream)

    def end_flight(self) -> None:
        """End the recording; the connection goes on. Any thread; harmless when it has ended."""
        with self._entered("end_flight"), self._lock:
            self.tape.call("look")
            self._judgement.load(self.tape.now_us / MICROSECONDS)
            if self.tape.on:
                self._end_flight_locked(END_LIMIT)

    # -- calls that are not noted as they come; the others are made of `CALLS`

    def send(
        self,
        data: Wire,
        message_class: MessageClass = MessageClass.DATA,
        *,
        droppable: bool | None = None,
    ) -> SendResult:
        data = owned_bytes(data)
        with self._entered("send") as outermost, self._lock:
            refused = self.closed or not data or (message_class in NEEDED and droppable is not False)
            if outermost and not refused:  # what is refused never reaches the core
                detail = {} if droppable is None else {"droppable": droppable}
                tape = self.tape
                tape.queued(CLASS_NAMES[message_class], len(data), OWN_LANE, 0.0, tape.arguments(detail))
            return super().send(data, message_class, droppable=droppable)

    def follow(
        self,
        cohort: CohortLike[Sender],
        *,
        start: Entry | None = None,
        prefix: tuple[Wire, ...] = (),
        wait_for_key: bool = False,
        latest: bool = False,
    ) -> None:
        with self._entered("follow"), self._lock:
            keyed = cohort.log.latest is not None
            if keyed and self.tape.on:
                self._end_flight_locked(END_KEYS)
            if self.stands is Standing.GONE and not self.closed and not keyed:
                first = start or cohort.log.tail
                seed = seed_of(cohort.log, first, self.tape.began_us)
                self.tape.call("log", seed)
                feed = self._feed = LogFeed(cohort.log, first, self.tape, seed)
                cohort, start = PrivateCohort(cohort, feed.private), feed.private.tail
                feed.run()
                self.tape.call("follow", {"prefix": [len(part) for part in prefix], "wait_for_key": wait_for_key})
            super().follow(cohort, start=start, prefix=prefix, wait_for_key=wait_for_key, latest=latest)

    def switch(self, hop: Hop) -> None:
        with self._entered("switch") as outermost, self._lock:
            cursor = self._outbox.cursor
            if outermost and self._cohort is not None and cursor is not None and not self.closed:
                self._refuse_keys_locked(hop)
                self.tape.call("switch")
                hop = self._change_log_locked(hop, cursor.entry)
            super().switch(hop)

    def set_guide(self, guide: Guide | None, **options: bool) -> None:
        self._call("set_guide", None if guide is None else TapedGuide(self, guide), **options)

    def ask_locked(self, guide: Guide, key: Entry) -> Hop | float | None:
        """Ask `guide` what to do at `key`, and note the answer. For `TapedGuide`."""
        self._lock.assert_owned()
        tape, feed = self.tape, self._feed
        answer = None
        try:
            answer = guide.choose_log(key if feed is None else feed.entry_in_stream(key))
        finally:
            if answer is None:
                tape.answered("key", len(key.wire))
        if isinstance(answer, Hop):
            self._refuse_keys_locked(answer)
            return self._change_log_locked(answer, key)
        if answer is not None:
            until_us = ceil(answer * MICROSECONDS)
            tape.answered("key", len(key.wire), {"until_us": until_us - tape.began_us})
            answer = until_us / MICROSECONDS
        return answer

    def _change_log_locked(self, hop: Hop, left: Entry) -> Hop:
        """Copy another log from now on; return `hop` into the copy. `left`: what would have come next of the first."""
        self._lock.assert_owned()
        tape = self.tape
        seed = seed_of(hop.cohort.log, hop.start, tape.began_us)
        feed = self._feed = LogFeed(hop.cohort.log, hop.start, tape, seed)
        start = feed.private.tail
        headers = feed.copy(SWITCH_LANE)
        items, prefix = [], []
        for item, wire, since in hop.prefix:
            age_us = tape.age_us(since)
            items.append((item, wire, (tape.now_us - age_us) / MICROSECONDS))
            prefix.append((CLASS_NAMES[item], len(wire), age_us))
        values = {
            "log": seed,
            "prefix": prefix,
            "left": left.sequence,
            "wait_for_key": hop.wait_for_key,
            "why": hop.why,
        }
        tape.answered("switched", len(left.wire), values if headers is None else values | {"restart": headers})
        return hop._replace(cohort=PrivateCohort(hop.cohort, feed.private), start=start, prefix=tuple(items))

    def resume_following(self, cohort: CohortLike[Sender]) -> None:
        try:
            with self._lock:
                feed = self._feed
                mine = feed is not None and cohort.log is feed.log
                self._call("resume_following", PrivateCohort(cohort, feed.private) if feed and mine else cohort)
        finally:
            self._lock.make_calls()

    def set_policy(self, policy: DropPolicy) -> None:
        """Decide by the table of `policy`."""
        self._call("set_policy", TablePolicy.of(policy, self._real_host.handler_failed))

    def take_turn(self) -> float:
        """Have a turn; noted with it is whether the write before left something, which needs no EAGAIN to do so."""
        with self._entered("take_turn") as outermost, self._lock:
            if outermost:
                self.tape.call("take_turn", {"left": True} if self._judgement.blocked else None)
            return super().take_turn()

    def next_crossing(self) -> tuple[int, int]:
        return self._place_in_stream(lambda: self._look("next_crossing"))

    def log_grew(self) -> tuple[int, int]:
        """Judge the load again; the places that are returned are those of the stream's log."""
        if HANDLERS and get_ident() in HANDLERS:
            return 0, 0  # as `Sender.log_grew`, which looks at nothing then
        return self._place_in_stream(lambda: self._call("log_grew"))

    def _place_in_stream(self, ask: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        try:
            with self._lock:
                place = ask()
                return place if self._feed is None else self._feed.to_stream(*place)
        finally:
            self._lock.make_calls()

    def let_go(self) -> None:
        with self._lock:
            super().let_go()
            self._real_host = self._host

    def broken(self, error: Exception) -> None:
        if not isinstance(error, OSError):
            self._real_host.handler_failed("flush", error)  # not under the lock
        with self._entered("broken") as outermost, self._lock:
            if outermost:
                self.tape.call("broken", error_as_dict(error))
            self._broken_locked(error)

    def account(self, *, rows: bool = True) -> Account:
        """Return how it stands; its place is one of the stream's log."""
        try:
            with self._lock:
                account: Account = self._look("account") if rows else super().account(rows=False)
                feed = self._feed
                if feed is None or account.entry is None:
                    return account
                return account._replace(entry=feed.entry_in_stream(account.entry))
        finally:
            self._lock.make_calls()

    # -- what is another with a private log

    @property
    def host(self) -> SenderHost:
        """The thread and the connection it lives on: the real one."""
        return self._real_host

    @property
    def following(self) -> StreamLog | None:
        feed = self._feed
        return super().following if feed is None or self._cohort is None else feed.log

    def joins_cohort_at(self, tail: Entry) -> Entry | None:
        """Return None while a log is noted: what a cohort writes for its members could not be."""
        with self._lock:
            return super().joins_cohort_at(tail) if self._feed is None else None


def _called(name: str) -> Callable[..., Any]:
    def call(sender: RecordedSender, *arguments: Any, **options: Any) -> Any:
        return sender._call(name, *arguments, **options)  # noqa: SLF001 - a method of it

    return call


def _looked(name: str) -> Callable[[RecordedSender], Any]:
    return lambda sender: sender._look(name)  # noqa: SLF001 - a method of it


for _name in CALLS:
    if _name not in vars(RecordedSender):
        setattr(RecordedSender, _name, _called(_name))
for _name in ("why", "statistics", "load", "forecast"):
    setattr(RecordedSender, _name, _looked(_name))


def _write_output(tape: Tape, entry: LedgerEntry, load: Load | None) -> None:
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
