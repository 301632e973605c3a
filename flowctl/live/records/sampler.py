"""Samples every connection of a live server once per interval, at next to no cost for viewers that keep up.

Theory of operation. What a member of a cohort is sent is the distance that its squad's place has moved, so the sampler
reads one place per squad, and of each member only its *pulse* (`Sender.pulse`): a number that stands still while
nothing but the log is written to it and nothing is wrong with it. A squad with the members and the pulses of the last
round is one `SharedRows` of the `SampleBlock`: nothing is done per viewer but comparing two lists. Where members came
or went, each is looked at by itself; where a pulse has moved, or there is none, that one Sender is asked
(`Sender.account`), and the difference to the books of the last sample is the record. So sums over a connection's
records are its totals, whatever way each was made.

The kernel (round-trip time, unacknowledged bytes) is asked for those in trouble, and for others once in
`KERNEL_ROUNDS` rounds. Samples only read: they feed no meter and cause no edge.

Asking a viewer costs ten times as much as sharing a record. Where a thousand are in trouble at a time, rounds come less
often (`interval_ms` tells): what records take is bound to a share of what the process uses (`CpuShare`), for recording
may not take from an overloaded server what it needs.

Threads: a round runs on the sampler's own thread and rests after each fraction of a millisecond
(`flowctl.live.oversight.pace`), so that no poll group waits for the interpreter. `ended` may be called from any.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from operator import sub
from typing import Any, Final

import structlog

from flowctl.connection import Connection
from flowctl.core.fanout.cohort import Squad
from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.state import SendState
from flowctl.core.sending.figures import SenderStatistics
from flowctl.live.oversight.pace import CpuShare, RestingPace
from flowctl.live.records.round import Book, Round, SampledSquad
from flowctl.records.telemetry.events import ConnectionEvents, Events
from flowctl.records.telemetry.schema import FLOW_CLOSES, FLOW_OPENS, FLOW_SAMPLES, OPENS_EVERY_S, OPENS_FIRST_S

_log: Final = structlog.get_logger("flowctl.live")

_SHARE: Final = 0.03
"""Records may take so much of the processor time of the whole process: the target of telemetry, T2. What the recorder
uses for columns and files counts as well, and events before samples: it is the samples that come less often."""
_LEAST: Final = 0.005
"""And so much of a core in any case: five milliseconds a second, for which a hundred viewers in trouble are sampled."""
_CREDIT_S: Final = 20.0
"""Files are made in lumps, two intervals of rotation apart at most: joins, which cost most, are in the first."""
_MOST_ENDED: Final = 65_536
"""Connections that ended since the last round: as many as can be open at a time."""
_TELL_S: Final = 1.0
"""A connection that has ended is told of within this time, however long samples are apart."""
_TOGETHER_S: Final = 60.0
"""Records of open connections are made together once in this time: a file of a hundred columns takes 8 ms, and with
each of them at a moment of its own there would be one in every interval of rotation."""
_JOIN_S: Final = 5.0
_SAY_S: Final = 60.0
"""A fault is logged at most once in this time: it would come back with each round."""


_Ended = tuple[Connection, ConnectionEvents, SenderStatistics, float, dict[str, Any]]
"""A connection that has ended: what tells of it, its last statistics, when, and what its session said then."""


class Sampler:
    """Samples the connections of a server."""

    def __init__(
        self,
        fanouts: Callable[[], Iterable[Fanout]],
        connections: Callable[[], list[Connection]],
        events: Events,
        clock: Callable[[], float],
    ) -> None:
        self._fanouts = fanouts
        self._connections = connections
        self._clock = clock
        self._open = events.open
        self._recorder = recorder = events.recorder
        self._wall = recorder.wall
        self._closes, self._opens = recorder.lane(FLOW_CLOSES), recorder.lane(FLOW_OPENS)
        self._begun: dict[int, Connection] = {}  # that play or publish; any thread
        # When they are due, in seconds, for their first record of `flow_opens`, and for the others; the first is
        # appended to by any thread.
        self._first: deque[tuple[float, int, bool]] = deque()
        self._told: set[int] = set()  # of those, who has had a record; any thread
        self._again: deque[tuple[float, int]] = deque()
        self._lane = recorder.lane(FLOW_SAMPLES)
        self._interval_s = recorder.options.interval_s
        self._rows = recorder.options.samples
        # With samples the events of those who are merely overloaded would say everything twice.
        self._told_from = SendState.SOFT_LIMIT if self._rows else SendState.OVERLOADED
        self._books: dict[int, Book] = {}  # by number of the connection; the sampler's thread
        self._squads: dict[Squad, SampledSquad] = {}  # the same
        self._ended: deque[_Ended] = deque()  # any thread
        self._said_at = float("-inf")
        self.rounds = 0
        self.cpu_s = 0.0  # processor time that they took, in seconds
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # -- life

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="flowctl-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Sample once more, so that all that was sent is in a record, and end."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_JOIN_S)

    def _run(self) -> None:
        cpu_share = CpuShare(share=_SHARE, least=_LEAST, credit_s=_CREDIT_S)
        due, before = self._clock() + self._interval_s, self._used()
        while not self._stop.wait(max(min(due - self._clock(), _TELL_S), 0.0)):
            if self._clock() < due:
                self._guarded(self.tell)
                continue
            self._guarded(self.round)
            after = self._used()
            rest_s = cpu_share.rest_s(*map(sub, after, before))
            before = after
            due = max(due + self._interval_s, self._clock() + rest_s)
        self._guarded(self.round)

    def _used(self) -> tuple[float, float, float]:
        """Return the processor time of events and samples, that of the process, and the time, in seconds."""
        recorder = self._recorder
        return self.cpu_s + recorder.cpu_s - recorder.flight_cpu_s, time.process_time(), self._clock()

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
            self.cpu_s = time.thread_time()
        except Exception as error:  # noqa: BLE001 - a fault in here must cost a round at most
            now = self._clock()
            if now - self._said_at >= _SAY_S:
                self._said_at = now
                _log.error("sampling failed", error=f"{type(error).__name__}: {error}")

    def ended(self, connection: Connection, record: ConnectionEvents, statistics: SenderStatistics, at: float) -> None:
        """Note a connection's end: what it was sent since its last sample gets a record as well. Any thread."""
        self._begun.pop(connection.number, None)
        self._told.discard(connection.number)
        if len(self._ended) >= _MOST_ENDED:  # nobody takes them: rather without what samples say than not at all
            self._closes.put(record.whole(at, statistics, _told_by(connection, at)))
        else:
            self._ended.append((connection, record, statistics, at, _told_by(connection, at)))

    def began(self, connection: Connection, at: float) -> None:
        """Note that a connection waits for media, is given it or publishes: it is told of while it is open. Any thread.

        It is told of once more at each of these.
        """
        number = connection.number
        again = number not in self._begun
        self._begun[number] = connection
        if again or number in self._told:  # else the first record is to come, and tells both
            self._first.append((at + OPENS_FIRST_S, number, again))

    # -- a round

    def round(self) -> None:
        self.rounds += 1
        work = self._work()
        pace = RestingPace().over
        squads: dict[Squad, SampledSquad] = {}
        for fanout in self._fanouts() if self._rows else ():
            for squad in pace(fanout.squads):
                seen = work.squad(fanout, squad, self._squads.get(squad))
                if seen is not None:
                    squads[squad] = seen
        self._squads = squads
        connections = self._connections()
        if self._rows:
            connections = work.left(connections, squads.values())
        else:
            connections = [item for item in connections if item.sender.pulse is None]  # in trouble
        for connection in pace(connections):
            work.connection(connection)
        self._tell(work)

    def tell(self) -> None:
        """Tell of those that have ended, and of those that are open for long, between two rounds."""
        if self._ended or self._first or self._again:
            self._tell(self._work())

    def _work(self) -> Round:
        return Round(self._books, self._open, self._wall.us, self.rounds, self._clock(), self._told_from)

    def _tell(self, work: Round) -> None:
        """Record connections that ended, and open ones that are due; queue the samples of `work`."""
        pace = RestingPace().over
        for _ in pace(range(len(self._ended))):
            connection, record, statistics, at, more = self._ended.popleft()
            felt = work.end(connection, record, statistics, at)
            self._closes.put(record.whole(at, statistics, felt | more if self._rows else more))
        for connection in pace(self._due()):
            known, now = self._open.get(connection.number), self._clock()
            if known is not None:
                felt, more = work.so_far(connection, known), _told_by(connection, now)
                found = known.whole(now, connection.sender.statistics(), felt | more if self._rows else more)
                self._opens.put(found)
        block = work.block()
        if self._rows and block.rows:
            self._lane.put_block(block)

    def _due(self) -> Iterable[Connection]:
        """Iterate over the open connections for whose record it is time, and say when it is again."""
        now = self._clock()
        due = []
        while self._first and self._first[0][0] <= now:
            due.append(self._first.popleft()[1:])
        while self._again and self._again[0][0] <= now:
            due.append((self._again.popleft()[1], True))
        for number, again in due:
            connection = self._begun.get(number)
            if connection is not None:
                self._told.add(number)
                if number not in self._begun:  # it has ended meanwhile
                    self._told.discard(number)
                if again:
                    self._again.append((now - now % _TOGETHER_S + OPENS_EVERY_S, number))
                yield connection


def line_columns(connection: Connection) -> dict[str, int]:
    """Return the columns that the kernel knows of the line, by name; none once the socket is closed."""
    line = connection.line_figures()
    return {} if line is None else line._asdict()


def _told_by(connection: Connection, now: float) -> dict[str, Any]:
    """Return the columns that the session of a connection knows, and while it is open its kernel, by name."""
    return connection.session.record_columns(now) | line_columns(connection)
