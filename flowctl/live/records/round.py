"""One round of samples: which connections share a record's figures, and which have to be asked for their own.

See `flowctl.live.records.sampler` for how it works; here are also the books that a sampler keeps from round to round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import add, attrgetter
from typing import Any, Final

from flowctl.connection import Connection, connection_of
from flowctl.core.fanout.cohort import Squad
from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.counts import NO_FIGURES, Figures, total
from flowctl.core.flow.state import SendState
from flowctl.core.flow.timing import target_s
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.blame import Blame
from flowctl.core.sending.figures import SenderStatistics
from flowctl.records.telemetry.events import ConnectionEvents
from flowctl.records.telemetry.felt import NO_SAMPLE_SUMS, SampleSums, shows_trouble
from flowctl.records.telemetry.sampling import (
    NOTHING,
    Identities,
    Mark,
    SampleBlock,
    SampledCondition,
    SharedRows,
    following,
    minus,
    sums,
)
from flowctl.records.telemetry.schema import VIEWING, Row
from flowctl.sender import Sender

KERNEL_ROUNDS: Final = 60
"""Rounds between two looks into the kernel for a viewer that keeps up: each takes two system calls."""

_NUMBER: Final = attrgetter("number")

_Thread = tuple[float | None, bool | None]
"""Load of a poll group, 0 to 1, and whether it had no room; None for a connection without a group."""

_Sums = tuple[int, Figures, Figures, Figures]
"""Wire bytes sent, and by class what was accepted, sent and dropped, since a connection was opened."""


@dataclass(slots=True, eq=False)
class SampledSquad:
    """A squad, or one viewer, where it stood when it was sampled last."""

    members: list[Sender]
    pulses: list[int | None]
    mark: Mark
    round: int
    at: float
    # members that stand, or stood, for themselves, by index: they are looked at one by one
    odd: frozenset[int] = frozenset()
    connections: list[Connection] = field(default_factory=list)  # of the others, all of which stood at `mark`
    # identities of the others by use: (role, application, stream, rendition)
    crowds: dict[tuple[str | None, ...], Identities] = field(default_factory=dict)

    def settle(self, odd: frozenset[int], records: Mapping[int, ConnectionEvents]) -> None:
        self.odd = odd
        self.crowds = {}
        self.connections = []
        for index, member in enumerate(self.members):
            connection = connection_of(member)
            if index in odd or connection is None:
                continue
            record = records.get(connection.number)
            if record is not None:
                address, port, *_ = record.who
                use = _use(connection, record)
                crowd = self.crowds.get(use)
                if crowd is None:
                    crowd = self.crowds[use] = Identities()
                crowd.add(record.conn_id, address, port)
                self.connections.append(connection)


@dataclass(slots=True, eq=False)
class SampleBook:
    """Totals that the samples of one connection have recorded so far. The sampler's thread."""

    at: float  # when it was sampled last by itself, in seconds; with its squad, at `seen.at`
    first: int = 0
    felt: SampleSums | None = None  # what its samples say, where they tell anything. None: it kept up.
    target_ms: float = 0.0  # target delay of its stream, in ms, when it was asked last; 0: none
    accepted: Figures = NO_FIGURES  # totals in the records, less those at `seen.mark` where that is set
    sent: Figures = NO_FIGURES
    dropped: Figures = NO_FIGURES  # totals of what was dropped; a mark has none
    sent_bytes: int = 0
    pulse: int | None = None
    # where it stood then; its mark moves while the squad is unchanged. None: it followed no log as others do.
    seen: SampledSquad | None = None
    round: int = -1  # the last round in which it was sampled by itself
    still: bool = False  # whether nothing was queued then and no log followed

    @property
    def since(self) -> float:
        return self.at if self.seen is None else max(self.at, self.seen.at)

    @property
    def count(self) -> int:
        last = self.round if self.seen is None else max(self.round, self.seen.round)
        return last - self.first + 1 if self.round >= 0 else 0

    def target_ms_of(self, sender: Sender, record: ConnectionEvents, log: StreamLog | None) -> float:
        """Return the target delay in force, in ms, 0 for none; `log`: the log that it follows, if that is known."""
        if record.role.value in VIEWING and (log is not None or not self.target_ms):
            gop_s = 0.0 if log is None else log.gop_duration_s
            self.target_ms = target_s(sender.limits.target_delay_ms, gop_s) * 1000
        return self.target_ms

    def columns(self, sampled_ms: float, count: int) -> dict[str, Any]:
        felt = NO_SAMPLE_SUMS if self.felt is None else self.felt.columns(sampled_ms)
        return felt | {
            "samples_count": count,
            "sampled_ms": sampled_ms,
            "target_delay_ms": self.target_ms or None,
        }


def _rendition(connection: Connection) -> str | None:
    return None if connection.renditions is None else connection.renditions.name or None


def _use(connection: Connection, record: ConnectionEvents) -> tuple[str | None, ...]:
    return (*record.who[2:], _rendition(connection))


@lru_cache(1024)
def _shared(figures: Figures) -> Figures:
    """Return one object for all equal `figures`: most viewers have the same ones, at 0.5 kB each."""
    return figures


class Round:
    """One round of samples."""

    def __init__(
        self,
        books: dict[int, SampleBook],
        records: Mapping[int, ConnectionEvents],
        wall_us: Callable[[float], int],
        number: int,
        now: float,
        events_from: SendState,
    ) -> None:
        self._books = books  # what the records so far say, by number of the connection
        self._records = records
        self._wall_us = wall_us
        self._events_from = events_from
        self._now = now
        self._number = number
        self._block = SampleBlock(wall_us(now))
        self._runs: dict[Any, SharedRows] = {}
        self._threads: dict[Any, _Thread] = {}  # how busy each poll group is

    def _book(self, connection: Connection) -> SampleBook:
        number = connection.number
        book = self._books.get(number)
        if book is None:
            book = self._books[number] = SampleBook(connection.opened_at)
        return book

    def unsampled(self, connections: Iterable[Connection], squads: Iterable[SampledSquad]) -> list[Connection]:
        """Return the connections without a sample in this round: few, as most are members of a squad."""
        number, unsampled = self._number, []
        others = set(connections).difference(*[seen.connections for seen in squads])
        for connection in sorted(others, key=_NUMBER):
            book = self._books.get(connection.number)
            if book is None or not (book.round == number or (book.seen is not None and book.seen.round == number)):
                unsampled.append(connection)
        return unsampled

    def block(self) -> SampleBlock:
        for run in self._runs.values():
            self._block.add_run(run)
        return self._block

    # -- viewers that keep up

    def sample_squad(self, fanout: Fanout, squad: Squad, before: SampledSquad | None) -> SampledSquad | None:
        """Sample the members of a squad; return its state for the next round. None: it has no members."""
        log = fanout.log
        mark = Mark.of(log, squad.entry, log.tail)  # the place first: the log does not end before it
        members = list(squad.members)
        pulses = [member.pulse for member in members]
        thread = self._thread(fanout.host)
        if before is None or before.members != members or before.mark.log is not log:
            before = SampledSquad(members, pulses, mark, self._number, self._now)
            apart = frozenset(range(len(members)))
        elif before.pulses == pulses:
            apart = before.odd
        else:
            moved = (index for index, pair in enumerate(zip(pulses, before.pulses, strict=True)) if pair[0] != pair[1])
            apart = before.odd.union(moved)
        if apart:
            self._sample_apart(before, pulses, mark, thread, apart)
        else:
            self._sample_together(before, mark, thread)
        before.pulses, before.mark, before.round, before.at = pulses, mark, self._number, self._now
        return before if members else None

    def _sample_apart(
        self, seen: SampledSquad, pulses: list[int | None], mark: Mark, thread: _Thread, indices: frozenset[int]
    ) -> None:
        """Sample these members of a squad one by one, and count those at its mark as part of it from now on."""
        # Members that moved by themselves are asked before the mark of `seen` moves: their books refer to it.
        odd = frozenset(
            index for index in indices if not self._sample_one(seen.members[index], pulses[index], seen, mark, thread)
        )
        if not seen.odd >= indices:
            seen.settle(seen.odd | indices, self._records)
        self._sample_together(seen, mark, thread)
        if odd != seen.odd:
            seen.settle(odd, self._records)

    def _sample_one(self, sender: Sender, pulse: int | None, seen: SampledSquad, mark: Mark, thread: _Thread) -> bool:
        """Sample one member of a squad; return whether it stands at `mark` with the others now."""
        connection = connection_of(sender)
        if connection is None or (record := self._records.get(connection.number)) is None:
            return False
        book = self._book(connection)
        if book.round == self._number:
            return False  # it came from another squad during this round
        old = book.seen
        if pulse is None or pulse != book.pulse or old is None or old.mark.log is not mark.log:
            self._sample_sender(connection, record, book)
            return False
        if old.round == self._number or mark.sequence < old.mark.sequence:
            return False  # it came with all of its squad
        run = self._shared_rows(_use(connection, record), old, mark, thread)
        run.add(record.conn_id, *record.who[:2])
        book.seen = seen
        return True

    def _sample_together(self, seen: SampledSquad, mark: Mark, thread: _Thread) -> None:
        """Sample, all at once, the members of a squad that moved from mark to mark with it."""
        for use, crowd in seen.crowds.items():
            run = self._shared_rows(use, seen, mark, thread)
            first = run.size
            run.add_crowd(crowd)
            if len(seen.crowds) == 1:  # else the order of connections is another
                for index in range(self._number % KERNEL_ROUNDS, len(crowd), KERNEL_ROUNDS):
                    host = seen.connections[index].core.host
                    line = host.line_figures()
                    run.kernel[first + index] = (line and line.rtt_us, host.kernel_bytes())

    def _shared_rows(self, use: tuple[str | None, ...], old: SampledSquad, mark: Mark, thread: _Thread) -> SharedRows:
        """Return the shared rows of members that moved from the mark of `old` to `mark`."""
        was = old.mark
        key = (id(mark.log), was.sequence, was.end_sequence, mark.sequence, mark.end_sequence, old.at, use, thread)
        run = self._runs.get(key)
        if run is None:
            condition = self._keeping_up(mark, thread, (self._now - old.at) * 1000, use[3])
            run = self._runs[key] = SharedRows((self._block.ts_us, *use[:3], *condition, *following(was, mark)))
        return run

    def _keeping_up(self, mark: Mark, thread: _Thread, interval_ms: float, rendition: str | None) -> SampledCondition:
        """Return the condition of viewers that have taken everything but what the next flush brings."""
        waiting = mark.end_sequence - mark.sequence
        age_ms = max(self._now - mark.since, 0.0) * 1000 if waiting and mark.since else 0.0
        return SampledCondition(
            interval_ms,
            queued_bytes=mark.end_offset - mark.offset,
            queued_messages=waiting,
            queued_age_ms=age_ms,
            thread_busy=thread[0],
            strained=thread[1],
            viewer_delay_ms=age_ms,
            rendition=rendition,
        )

    # -- all others

    def sample_connection(self, connection: Connection) -> None:
        record = self._records.get(connection.number)
        if record is None:
            return
        book = self._book(connection)
        sender = connection.sender
        if book.still and sender.pulse == book.pulse and sender.following is None and not connection.receiver.paused:
            use = record.who[2:]
            run = self._runs.get(("still", book.at, use))
            if run is None:
                condition = SampledCondition((self._now - book.at) * 1000)
                run = self._runs["still", book.at, use] = SharedRows((self._block.ts_us, *use, *condition, *NOTHING))
            run.add(record.conn_id, *record.who[:2])
            book.at, book.round = self._now, self._number
            return
        self._sample_sender(connection, record, book)

    def _sample_sender(self, connection: Connection, record: ConnectionEvents, book: SampleBook) -> None:
        sender = connection.sender
        account = sender.account()
        pulse, mark = account.pulse, None
        if pulse is not None and account.cohort is not None:
            mark = Mark.of(*account.cohort)  # without one it is asked again at the next sample
        troubled = account.lagging or pulse is None
        line = connection.core.host.line_figures() if troubled else None
        unsent_bytes = connection.core.host.kernel_bytes() if troubled else None
        busy, strained = self._thread(connection.group)
        load = account.load
        cached_bytes = account.cached_bytes if account.joined_at >= book.since else 0
        condition = SampledCondition(
            max(self._now - book.since, 0.0) * 1000,
            account.state.name,
            account.picture_share,
            load.size_bytes,
            load.messages,
            load.age_ms,
            account.stalled_s * 1000,
            account.drain_bytes_per_s,
            busy,
            strained,
            connection.receiver.paused,
            unsent_bytes=unsent_bytes,
            viewer_delay_ms=max(account.delay_ms, load.age_ms),
            rendition=_rendition(connection),
            **({} if line is None else line._asdict()),
        )
        who = (record.conn_id, *record.who)
        sums_now = (account.bytes_sent, account.accepted, account.sent, account.dropped)
        happened = self._settle(book, sums_now, mark, pulse)
        self._block.add_row(who, condition, happened)
        target_ms = book.target_ms_of(sender, record, sender.following)
        self._add_to_sums(book, condition, happened, target_ms, cached_bytes, account.blamed)
        book.still = mark is None and pulse is not None and account.idle
        if unsent_bytes is not None and account.state >= self._events_from:
            record.sample(self._now, account, line and line.rtt_us, unsent_bytes)

    def _add_to_sums(
        self,
        book: SampleBook,
        condition: SampledCondition,
        happened: Row,
        target_ms: float,
        cached_bytes: int = 0,
        blamed: Blame = Blame.NOBODY,
    ) -> None:
        """Add a sample to the sums for the connection's row in `flow_closes`, if there is any trouble."""
        if book.felt is None and shows_trouble(condition, happened):
            book.felt = SampleSums()
        if book.felt is not None:
            book.felt.add_sample(condition, happened, target_ms, cached_bytes, blamed)

    def _settle(self, book: SampleBook, so_far: _Sums, mark: Mark | None, pulse: int | None) -> Row:
        """Return the figures since the last sample, and enter the new totals in the book."""
        sent_bytes, accepted, sent, dropped = so_far
        accepted_before, sent_before, bytes_before = book.accepted, book.sent, book.sent_bytes
        if book.seen is not None:
            old = book.seen.mark
            accepted_before = tuple(map(add, accepted_before, old.end))
            sent_before = tuple(map(add, sent_before, old.place))
            bytes_before += old.offset
        happened = sums(
            sent_bytes - bytes_before,
            minus(accepted, accepted_before),
            minus(sent, sent_before),
            NO_FIGURES if dropped == book.dropped else minus(dropped, book.dropped),
        )
        book.seen = None if mark is None else SampledSquad([], [], mark, self._number, self._now)
        # Less the mark, viewers who came at one place have the same books, and keep one object of them.
        book.accepted = accepted if mark is None else _shared(minus(accepted, mark.end))
        book.sent = sent if mark is None else _shared(minus(sent, mark.place))
        book.sent_bytes = sent_bytes - (0 if mark is None else mark.offset)
        book.dropped = dropped if any(dropped) else NO_FIGURES
        if book.round < 0:
            book.first = self._number
        book.pulse, book.at, book.round = pulse, self._now, self._number
        return happened

    def record_end(
        self, connection: Connection, record: ConnectionEvents, statistics: SenderStatistics, at: float
    ) -> dict[str, Any]:
        """Record the last sample of an ended connection; return the columns that sum up all its samples."""
        book = self._book(connection)
        count, log = book.count + 1, None if book.seen is None else book.seen.mark.log
        condition = SampledCondition(
            max(at - book.since, 0.0) * 1000,
            statistics.state.name,
            picture_share=statistics.picture_share,
            viewer_delay_ms=statistics.delay_ms,
        )
        accepted, sent = statistics.accepted.figures, statistics.sent.figures
        dropped = total(statistics.dropped.values()).figures
        happened = self._settle(book, (statistics.bytes_sent, accepted, sent, dropped), None, None)
        del self._books[connection.number]
        who = (record.conn_id, *record.who)
        self._block.add_row(who, condition, happened, self._wall_us(at))
        target_ms = book.target_ms_of(connection.sender, record, log)
        self._add_to_sums(book, condition, happened, target_ms, blamed=connection.sender.account().blamed)
        return book.columns(max(at - connection.opened_at, 0.0) * 1000, count)

    def columns_so_far(self, connection: Connection, record: ConnectionEvents) -> dict[str, Any]:
        book = self._book(connection)
        book.target_ms_of(connection.sender, record, connection.sender.following)
        sampled_ms = max(book.since - connection.opened_at, 0.0) * 1000
        return book.columns(sampled_ms, book.count)

    def _thread(self, group: Any) -> _Thread:
        if group is None:
            return None, None
        thread = self._threads.get(group)
        if thread is None:
            thread = self._threads[group] = (round(group.busy_fraction(), 4), group.strained())
        return thread
