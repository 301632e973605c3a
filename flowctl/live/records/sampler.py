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
from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.state import SendState
from flowctl.core.sending.figures import SenderStatistics
from flowctl.live.oversight.pace import CpuShare, RestingPace
from flowctl.live.records.round import Round, SampleBook, SampledSquad
from flowctl.records.telemetry.events import ConnectionEvents, Events
from flowctl.records.telemetry.schema import FLOW_CLOSES, FLOW_OPENS, FLOW_SAMPLES, OPENS_EVERY_S, OPENS_FIRST_S
from flowctl.records.telemetry.whole import rendition_columns

_log: Final = structlog.get_logger("flowctl.live")

_PROCESS_SHARE: Final = 0.03
"""Share of the processor time of the whole process that records may take: the target of telemetry, T2. Columns, files
and events count as well, and come first: it is the samples that come less often."""
_LEAST_CORE_SHARE: Final = 0.005
"""Samples may always take this share of one core: five milliseconds a second, for a hundred viewers in trouble."""
_CREDIT_S: Final = 20.0
"""Time over which the share is averaged: files are made at once, every two rotation intervals at most."""
_MOST_ENDED: Final = 65_536
"""Most ended connections that wait for a round: as many as can be open at a time."""
_RECORD_ENDS_S: Final = 1.0
"""Longest time until the end of a connection is recorded, however far apart samples are."""
_OPENS_TOGETHER_S: Final = 60.0
"""Open connections are recorded together once in this time: a file of a hundred columns takes 8 ms, and would be made
in every rotation interval if each had a moment of its own."""
_JOIN_S: Final = 5.0
_LOG_EVERY_S: Final = 60.0
"""Least time between two log lines about a fault, which would come back with each round."""


_Ended = tuple[Connection, ConnectionEvents, SenderStatistics, float, dict[str, Any]]
"""An ended connection, its events, its last statistics, the time of its end, and the columns of its session then."""


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
        self._first_due: deque[tuple[float, int, bool]] = deque()
        self._has_record: set[int] = set()  # those of them that have a record; any thread
        self._next_due: deque[tuple[float, int]] = deque()
        self._lane = recorder.lane(FLOW_SAMPLES)
        self._interval_s = recorder.options.interval_s
        self._rows = recorder.options.samples
        # With samples, events of viewers that are merely overloaded would say everything twice.
        self._events_from = SendState.SOFT_LIMIT if self._rows else SendState.OVERLOADED
        self._books: dict[int, SampleBook] = {}  # by number of the connection; the sampler's thread
        # By fan-out and number: a squad that has no members any more would hold the log. The same thread.
        self._squads: dict[tuple[Fanout, int], SampledSquad] = {}
        self._ended: deque[_Ended] = deque()  # any thread
        self._logged_at = float("-inf")
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
        cpu_share = CpuShare(share=_PROCESS_SHARE, least=_LEAST_CORE_SHARE, credit_s=_CREDIT_S)
        due, before = self._clock() + self._interval_s, self._cpu_times()
        while not self._stop.wait(max(min(due - self._clock(), _RECORD_ENDS_S), 0.0)):
            if self._clock() < due:
                self._guarded(self.tell)
                continue
            self._guarded(self.round)
            after = self._cpu_times()
            rest_s = cpu_share.rest_s(*map(sub, after, before))
            before = after
            due = max(due + self._interval_s, self._clock() + rest_s)
        self._guarded(self.round)

    def _cpu_times(self) -> tuple[float, float, float]:
        """Return the processor time of events and samples, that of the process, and the time, in seconds."""
        recorder = self._recorder
        return self.cpu_s + recorder.cpu_s - recorder.flight_cpu_s, time.process_time(), self._clock()

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
            self.cpu_s = time.thread_time()
        except Exception as error:  # noqa: BLE001 - a fault in here must cost a round at most
            now = self._clock()
            if now - self._logged_at >= _LOG_EVERY_S:
                self._logged_at = now
                _log.error("sampling failed", error=f"{type(error).__name__}: {error}")

    def ended(self, connection: Connection, record: ConnectionEvents, statistics: SenderStatistics, at: float) -> None:
        """Note a connection's end: what it was sent since its last sample gets a record as well. Any thread."""
        self._begun.pop(connection.number, None)
        self._has_record.discard(connection.number)
        if len(self._ended) >= _MOST_ENDED:  # rounds do not come: better a record without samples than none
            self._closes.put(record.whole(at, statistics, _session_columns(connection, at)))
        else:
            self._ended.append((connection, record, statistics, at, _session_columns(connection, at)))

    def began(self, connection: Connection, at: float) -> None:
        """Note that a connection waits for media, is given it or publishes: it is recorded while open. Any thread.

        Each of these makes one more record.
        """
        number = connection.number
        again = number not in self._begun
        self._begun[number] = connection
        if again or number in self._has_record:  # else the first record is to come, and tells both
            self._first_due.append((at + OPENS_FIRST_S, number, again))

    # -- a round

    def round(self) -> None:
        self.rounds += 1
        work = self._new_round()
        pace = RestingPace().over
        squads: dict[tuple[Fanout, int], SampledSquad] = {}
        for fanout in self._fanouts() if self._rows else ():
            for squad in pace(fanout.squads):
                key = fanout, squad.number
                seen = work.sample_squad(fanout, squad, self._squads.get(key))
                if seen is not None:
                    squads[key] = seen
        self._squads = squads
        connections = self._connections()
        if self._rows:
            connections = work.unsampled(connections, squads.values())
        else:
            connections = [one for one in connections if one.sender.pulse is None]  # in trouble
        for connection in pace(connections):
            work.sample_connection(connection)
        self._write_records(work)

    def tell(self) -> None:
        """Record connections that have ended or have been open for long, between two rounds."""
        if self._ended or self._first_due or self._next_due:
            self._write_records(self._new_round())

    def _new_round(self) -> Round:
        return Round(self._books, self._open, self._wall.us, self.rounds, self._clock(), self._events_from)

    def _write_records(self, work: Round) -> None:
        """Record connections that ended, and open ones that are due; queue the samples of `work`."""
        pace = RestingPace().over
        for _ in pace(range(len(self._ended))):
            connection, record, statistics, at, more = self._ended.popleft()
            felt = work.record_end(connection, record, statistics, at)
            self._closes.put(record.whole(at, statistics, felt | more if self._rows else more))
        for connection in pace(self._due_connections()):
            events, now = self._open.get(connection.number), self._clock()
            if events is not None:
                felt, more = work.columns_so_far(connection, events), _session_columns(connection, now)
                columns = felt | more if self._rows else more
                self._opens.put(events.whole(now, connection.sender.statistics(), columns))
        block = work.block()
        if self._rows and block.rows:
            self._lane.put_block(block)

    def _due_connections(self) -> Iterable[Connection]:
        """Yield the open connections whose record is due, and note when the next one is."""
        now = self._clock()
        due = []
        while self._first_due and self._first_due[0][0] <= now:
            due.append(self._first_due.popleft()[1:])
        while self._next_due and self._next_due[0][0] <= now:
            due.append((self._next_due.popleft()[1], True))
        for number, again in due:
            connection = self._begun.get(number)
            if connection is not None:
                self._has_record.add(number)
                if number not in self._begun:  # it has ended meanwhile
                    self._has_record.discard(number)
                if again:
                    self._next_due.append((now - now % _OPENS_TOGETHER_S + OPENS_EVERY_S, number))
                yield connection


def line_columns(connection: Connection) -> dict[str, int]:
    """Return the columns that the kernel knows of the line, by name; none once the socket is closed."""
    line = connection.core.host.line_figures()
    return {} if line is None else line._asdict()


def _session_columns(connection: Connection, now: float) -> dict[str, Any]:
    """Return the columns of its session, of its renditions, and while it is open of its kernel, by name."""
    columns = connection.session.record_columns(now) | line_columns(connection)
    return columns | rendition_columns(connection.renditions, now)
