"""One round of samples: which connections share a record's figures, and which have to be asked for their own.

See `flowctl.live.sampler` for how it works; here are the books that a sampler keeps from round to round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from flowctl.cohort import Squad
from flowctl.connection import Connection
from flowctl.counts import total
from flowctl.fanout import Fanout
from flowctl.flow import SendState
from flowctl.sender import Sender
from flowctl.sender_types import SenderStatistics
from flowctl.telemetry.events import ConnectionEvents, Sight
from flowctl.telemetry.sampling import (
    NO_TOTALS,
    NOTHING,
    Condition,
    Mark,
    Row,
    Run,
    SampleBlock,
    following,
    minus,
    sums,
    totals_of,
)

if TYPE_CHECKING:
    from flowctl.live.recorded import RecordedSession

KERNEL_ROUNDS: Final = 30
"""A viewer that keeps up is asked about by two system calls once in so many rounds."""

_Thread = tuple[float | None, bool | None]
"""How busy a poll group is, 0 to 1, and whether it had no room; None where a connection is on none."""


class Seen:
    """A squad, or a part of a crowd, as it was at the last round it was unchanged in.

    Attributes:
        members: its members.
        pulses: of each.
        mark: where all of them stood.
        groups: identities by use: (role, application, stream) -> conn_ids, addresses, ports.
        round: the last round in which it was sampled.
        at: when that was, in seconds.
    """

    __slots__ = ("at", "groups", "mark", "members", "pulses", "round")

    def __init__(self, members: list[Sender], pulses: list[int | None], mark: Mark, number: int, at: float) -> None:
        self.members = members
        self.pulses = pulses
        self.mark = mark
        self.round = number
        self.at = at
        self.groups: dict[tuple[str | None, ...], tuple[list[int], list[Any], list[Any]]] = {}

    def add(self, record: ConnectionEvents) -> None:
        """Keep the identity of a member."""
        address, port, *use = record.who
        ids, addresses, ports = self.groups.setdefault(tuple(use), ([], [], []))
        ids.append(record.conn_id)
        addresses.append(address)
        ports.append(port)


class Book:
    """What the records so far say of one connection. The sampler's thread.

    Attributes:
        accepted: totals in the records, less those at `seen.mark` where that is set.
        sent: the same.
        dropped: the same; the mark has none.
        sent_bytes: the same as `sent`, in wire bytes.
        pulse: at the last sample.
        seen: where it stood then; its mark moves while the squad is unchanged. None: it followed no log as others do.
        round: the last round in which it was sampled by itself.
        at: when it was sampled last by itself, in seconds; with its squad, at `seen.at`.
        still: whether nothing was queued then and no log followed.
    """

    __slots__ = ("accepted", "at", "dropped", "pulse", "round", "seen", "sent", "sent_bytes", "still")

    def __init__(self, at: float) -> None:
        self.accepted = self.sent = self.dropped = NO_TOTALS
        self.sent_bytes = 0
        self.pulse: int | None = None
        self.seen: Seen | None = None
        self.round = -1
        self.at = at
        self.still = False

    @property
    def since(self) -> float:
        """When it was sampled last, in seconds."""
        return self.at if self.seen is None else max(self.at, self.seen.at)


class Books:
    """The books of all connections, from round to round. The sampler's thread."""

    __slots__ = ("_books",)

    def __init__(self) -> None:
        self._books: dict[int, Book] = {}  # by number of the connection

    def __len__(self) -> int:
        return len(self._books)

    def book(self, number: int, at: float) -> Book:
        """Return the books of a connection, made if needed with `at` as its first moment."""
        book = self._books.get(number)
        if book is None:
            book = self._books[number] = Book(at)
        return book

    def forget(self, number: int) -> None:
        """Let go of the books of a connection that has ended."""
        self._books.pop(number, None)

    def left(self, connections: Iterable[Connection], number: int) -> list[Connection]:
        """Return those that have not been in round `number`: few, where most are members of a squad."""
        books = self._books
        left = []
        for connection in connections:
            book = books.get(connection.number)
            if book is None or not (book.round == number or (book.seen is not None and book.seen.round == number)):
                left.append(connection)
        return left


def session_of(connection: Connection) -> RecordedSession | None:
    """Return the session of a connection if it keeps records and has been opened."""
    session: Any = connection.session
    return session if getattr(session, "record", None) is not None else None


class Round:
    """One round of samples.

    Args:
        books: of the connections.
        wall_us: turns the time of a connection into that of a record.
        number: of the round.
        now: when it began, in seconds; the time of its records.
        told_from: state from which a connection has an event of its own, beside its sample.
    """

    def __init__(
        self, books: Books, wall_us: Callable[[float], int], number: int, now: float, told_from: SendState
    ) -> None:
        self._books = books
        self._wall_us = wall_us
        self._told_from = told_from
        self._now = now
        self._number = number
        self._block = SampleBlock(wall_us(now))
        self._runs: dict[Any, Run] = {}
        self._threads: dict[Any, _Thread] = {}  # how busy each poll group is

    def block(self) -> SampleBlock:
        """Return the records of this round."""
        for run in self._runs.values():
            self._block.add_run(run)
        return self._block

    # -- those who keep up

    def squad(self, fanout: Fanout, squad: Squad, before: Seen | None) -> Seen | None:
        """Sample the members of a squad; return what to compare with next time. None: they are not alike."""
        log = fanout.log
        mark = Mark.of(log, squad.entry, log.tail)  # the place first: the log does not end before it
        members = list(squad.members)
        pulses = [member.pulse for member in members]
        thread = self._thread(fanout.host)
        if before is not None and before.members == members and before.pulses == pulses and before.mark.log is log:
            self._add_groups(before, mark, thread, members)
            before.mark, before.round, before.at = mark, self._number, self._now
            return before
        seen = Seen(members, pulses, mark, self._number, self._now)
        alike = None not in pulses
        for member, pulse in zip(members, pulses, strict=True):
            alike = self._member(member, pulse, seen, thread) and alike
        return seen if alike and members else None

    def _member(self, sender: Sender, pulse: int | None, seen: Seen, thread: _Thread) -> bool:
        """Sample a member of a squad that has changed; return whether it stands at the mark of `seen` now."""
        connection = sender.host
        session = session_of(connection) if isinstance(connection, Connection) else None
        if session is None or session.record is None or not isinstance(connection, Connection):
            return False
        book = self._books.book(connection.number, connection.opened_at)
        seen.add(session.record)
        if book.round == self._number:
            return False  # it came from another squad during this round
        mark = seen.mark
        old = book.seen
        if pulse is None or pulse != book.pulse or old is None or old.mark.log is not mark.log:
            self._ask(connection, session, book)
            return False
        if old.round == self._number or mark.sequence < old.mark.sequence:
            return False  # likewise, with all of its squad
        run = self._run(session.record.who[2:], old, mark, thread)
        run.add(session.record.conn_id, *session.record.who[:2])
        book.seen = seen
        return True

    def _add_groups(self, seen: Seen, mark: Mark, thread: _Thread, members: list[Sender]) -> None:
        """Sample a squad that is as it was, all at once."""
        for use, (ids, addresses, ports) in seen.groups.items():
            run = self._run(use, seen, mark, thread)
            first = len(run.conn_ids)
            run.conn_ids += ids
            run.addresses += addresses
            run.ports += ports
            if len(seen.groups) == 1:  # else the order of members is another
                for index in range(self._number % KERNEL_ROUNDS, len(members), KERNEL_ROUNDS):
                    connection = members[index].host
                    if isinstance(connection, Connection):
                        run.kernel[first + index] = (connection.round_trip_us(), connection.kernel_bytes())

    def _run(self, use: tuple[str | None, ...], old: Seen, mark: Mark, thread: _Thread) -> Run:
        """Return the run of those who went from the mark of `old` to another."""
        was = old.mark
        key = (id(mark.log), was.sequence, was.end_sequence, mark.sequence, mark.end_sequence, old.at, use, thread)
        run = self._runs.get(key)
        if run is None:
            condition = self._keeping_up(mark, thread, (self._now - old.at) * 1000)
            run = self._runs[key] = Run(use, condition, following(was, mark))
        return run

    def _keeping_up(self, mark: Mark, thread: _Thread, interval_ms: float) -> Condition:
        """Return how those stand who have taken everything but what the next flush brings them."""
        waiting = mark.end_sequence - mark.sequence
        age_ms = max(self._now - mark.since, 0.0) * 1000 if waiting and mark.since else 0.0
        return Condition(
            interval_ms,
            queued_bytes=mark.end_offset - mark.offset,
            queued_messages=waiting,
            queued_age_ms=age_ms,
            thread_busy=thread[0],
            strained=thread[1],
            viewer_delay_ms=age_ms,
        )

    # -- all others

    def connection(self, connection: Connection) -> None:
        """Sample a connection that is no member of a squad."""
        session = session_of(connection)
        if session is None or session.record is None:
            return
        book = self._books.book(connection.number, connection.opened_at)
        sender = connection.sender
        if book.still and sender.pulse == book.pulse and sender.following is None and not connection.receiver.paused:
            use = session.record.who[2:]
            run = self._runs.get(("still", book.at, use))
            if run is None:
                run = self._runs["still", book.at, use] = Run(use, Condition((self._now - book.at) * 1000), NOTHING)
            run.add(session.record.conn_id, *session.record.who[:2])
            book.at = self._now
            return
        self._ask(connection, session, book)

    def _ask(self, connection: Connection, session: RecordedSession, book: Book) -> None:
        """Sample a connection by its statistics."""
        record, sender = session.record, connection.sender
        if record is None:
            return
        log, pulse = sender.following, sender.pulse
        before = None if pulse is None else sender.standing
        statistics = sender.statistics()
        mark = None
        if before is not None and log is not None and sender.standing == before and sender.pulse == pulse:
            mark = Mark.of(log, *before)  # else it moved meanwhile, and is asked again at the next sample
        glance = sender.glance()
        troubled = glance.lagging or pulse is None
        rtt_us = connection.round_trip_us() if troubled else None
        unsent_bytes = connection.kernel_bytes() if troubled else None
        busy, strained = self._thread(connection.group)
        load = statistics.load
        condition = Condition(
            max(self._now - book.since, 0.0) * 1000,
            statistics.state.name,
            statistics.step.name,
            load.size_bytes,
            load.messages,
            load.age_ms,
            statistics.stalled_s * 1000,
            statistics.drain_bytes_per_s,
            busy,
            strained,
            connection.receiver.paused,
            rtt_us,
            unsent_bytes,
            max(statistics.delay_ms if glance.lagging else 0.0, load.age_ms),
        )
        who = (record.conn_id, *record.who)
        self._block.add_row(who, condition, self._settle(book, statistics, mark, pulse))
        if rtt_us is not None and unsent_bytes is not None and statistics.state >= self._told_from:
            sight = Sight(load.size_bytes, load.messages, load.age_ms, statistics.bytes_sent, statistics.delay_ms)
            session.tell_sample(self._now, sight, (rtt_us, unsent_bytes), statistics.state)

    def _settle(self, book: Book, statistics: SenderStatistics, mark: Mark | None, pulse: int | None) -> Row:
        """Return what happened since the last sample, and enter it in the books."""
        accepted, sent = totals_of(statistics.accepted), totals_of(statistics.sent)
        dropped = totals_of(total(statistics.dropped.values()))
        old = book.seen.mark if book.seen is not None else None
        base_end, base_place = (old.end, old.place) if old is not None else (NO_TOTALS, NO_TOTALS)
        base_bytes = 0 if old is None else old.offset
        happened = sums(
            statistics.bytes_sent - book.sent_bytes - base_bytes,
            minus(minus(accepted, book.accepted), base_end),
            minus(minus(sent, book.sent), base_place),
            minus(dropped, book.dropped),
        )
        book.seen = None if mark is None else Seen([], [], mark, self._number, self._now)
        book.accepted = accepted if mark is None else minus(accepted, mark.end)
        book.sent = sent if mark is None else minus(sent, mark.place)
        book.sent_bytes = statistics.bytes_sent - (0 if mark is None else mark.offset)
        book.dropped = dropped
        book.pulse, book.at, book.round = pulse, self._now, self._number
        book.still = mark is None and pulse is not None and not statistics.queued.total_messages
        return happened

    def end(self, connection: Connection, record: ConnectionEvents, statistics: SenderStatistics, at: float) -> None:
        """Record what a connection that has ended was sent since its last sample."""
        book = self._books.book(connection.number, connection.opened_at)
        condition = Condition(
            max(at - book.since, 0.0) * 1000,
            statistics.state.name,
            statistics.step.name,
            viewer_delay_ms=statistics.delay_ms,
        )
        happened = self._settle(book, statistics, None, None)
        self._books.forget(connection.number)
        who = (record.conn_id, *record.who)
        self._block.add_row(who, condition, happened, self._wall_us(at))

    def _thread(self, group: Any) -> _Thread:
        """Return how busy a poll group is, and whether it had no room."""
        if group is None:
            return None, None
        found = self._threads.get(group)
        if found is None:
            found = self._threads[group] = (round(group.busy_fraction(), 4), group.strained())
        return found
