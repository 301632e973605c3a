"""The recorder: takes records from the threads of a server without ever making them wait, and sees to their writing.

Theory of operation. Each table has a `Lane`: a bounded queue to which any thread appends a tuple, in one step of the
interpreter. One thread empties the lanes a few times a second, hands batches to the `TableWriter` of each table, and
shows the events to the `Feed`, so that what is counted live is what stands in the files. What finds a lane full, or no
room on the disk for too long, is lost: counted, logged once a minute, and told by an event of its own (`OVERFLOW`).
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from flowctl.core.loop.locks import OwnedLock
from flowctl.core.text.extras import require_extra
from flowctl.records.telemetry.options import EventsOptions
from flowctl.records.telemetry.schema import FLIGHT, FLOW_EVENTS, RECORDED, TABLES, EventName, Row, Table
from flowctl.records.telemetry.writer import Block, Books, RecordFiles, TableWriter

_EVENT, _AXIS = map(FLOW_EVENTS.row_names.index, ("event", "axis"))
_MOST_KINDS: Final = 1024
"""Most different names that are counted of one kind; they are our own, so more would be a fault of ours."""
_OTHERS: Final = "(others)"


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedSnapshot:
    """Running counters since the recorder began, by name."""

    events: Mapping[str, int] = field(default_factory=dict)
    limit_hits: Mapping[str, int] = field(default_factory=dict)


class Feed:
    """The counters; the recorder shows it every event. `snapshot`: any thread."""

    def __init__(self) -> None:
        self._lock = OwnedLock()
        self._events: Counter[str] = Counter()  # guarded by _lock
        self._limit_hits: Counter[str] = Counter()  # guarded by _lock

    def count_rows(self, rows: list[Row]) -> None:
        """Count these events. The recorder's thread."""
        with self._lock:
            for row in rows:
                _add(self._events, row[_EVENT])
                if row[_EVENT] == EventName.LIMIT_HIT.value:
                    _add(self._limit_hits, row[_AXIS])

    def snapshot(self) -> FeedSnapshot:
        with self._lock:
            return FeedSnapshot(events=dict(self._events), limit_hits=dict(self._limit_hits))


def _add(counter: Counter[str], name: str | None) -> None:
    key = name or _OTHERS
    counter[key if key in counter or len(counter) < _MOST_KINDS else _OTHERS] += 1


_log: Final = structlog.get_logger("flowctl.telemetry")

_DRAIN_S: Final = 0.25
"""Time between two turns that empty the lanes: live surfaces lag by it at most; its wake-ups cost less than 0.1 % of a
core."""
_SECOND_STEP_S: Final = 1.0
"""Time between two calls of the steps given to `each_second`."""
_LOG_EVERY_S: Final = 60.0
"""Least time between two log lines, and records, about losses."""
_SWEEP_S: Final = 300.0
"""Time between two looks for files of crashed processes and at the wall clock."""
_CLOCK_OFF_US: Final = 50_000
"""Least move of the wall clock that is followed: less is the jitter of reading it."""
_STOP_S: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecorderStatistics:
    """A snapshot of the recorder."""

    taken: dict[str, int] = field(default_factory=dict)  # records taken off the lanes so far, by table
    waiting: dict[str, int] = field(default_factory=dict)  # records in the lanes now, by table
    lost: dict[str, int] = field(default_factory=dict)  # records lost so far because a lane was full, by table
    # Records that a fault of ours has cost on their way from a lane to its file, by table
    broken: dict[str, int] = field(default_factory=dict)
    unfed_rows: int = 0  # events that are in the files and not in the counters of the feed, because of such a fault
    books: dict[str, Books] = field(default_factory=dict)
    last_error: str = ""  # the last reason why a file could not be written; "" for none
    cpu_s: float = 0.0  # processor time that the recorder's thread has used, in seconds

    @property
    def lost_rows(self) -> int:
        """Records lost in all, for whatever reason."""
        given_up = sum(item.lost_rows + item.refused_rows for item in self.books.values())
        return sum(self.lost.values()) + sum(self.broken.values()) + given_up

    @property
    def unwritten_rows(self) -> int:
        """Records that are in no file yet; once the recorder has ended, those that never will be."""
        return sum(self.waiting.values()) + sum(item.waiting_rows for item in self.books.values())


class Lane:
    """The bounded queue of one table. `put` and `put_block` may be called from any thread."""

    __slots__ = ("_blocks", "_limit", "_lock", "_lost", "_queue", "table")

    def __init__(self, table: Table, limit_rows: int) -> None:
        self.table: Final = table
        self._limit: Final = limit_rows
        self._queue: Final[deque[Row]] = deque()
        self._blocks: Final[deque[Block]] = deque()
        self._lock: Final = OwnedLock()
        self._lost = 0  # guarded by _lock

    def put(self, row: Row) -> bool:
        """Append one record; return False where the lane is full and it is lost."""
        if len(self._queue) < self._limit:
            self._queue.append(row)
            return True
        self._lose(1)
        return False

    def put_block(self, block: Block) -> bool:
        """Append many records; return False where the lane is full and they are lost."""
        if sum(item.rows for item in tuple(self._blocks)) + block.rows <= self._limit or not self._blocks:
            self._blocks.append(block)
            return True
        self._lose(block.rows)
        return False

    def _lose(self, rows: int) -> None:
        with self._lock:  # only who loses something comes here, and nobody waits under this lock
            self._lost += rows

    @property
    def lost(self) -> int:
        with self._lock:
            return self._lost

    @property
    def waiting(self) -> int:
        return len(self._queue) + sum(item.rows for item in tuple(self._blocks))

    @property
    def empty(self) -> bool:
        return not (self._queue or self._blocks)

    def drain(self) -> tuple[list[Row], list[Block]]:
        """Take off what waits at this moment. The recorder's thread."""
        queue, blocks = self._queue, self._blocks
        # Not until it is empty: who appends without a pause would keep us here.
        return [queue.popleft() for _ in range(len(queue))], [blocks.popleft() for _ in range(len(blocks))]


class WallClock:
    """Turns monotonic seconds into microseconds since the epoch. Any thread.

    The distance between the clocks is measured again now and then, since the wall clock is set.
    """

    __slots__ = ("_clock", "_offset_us", "_wall_ns")

    def __init__(self, clock: Callable[[], float], wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._wall_ns = wall_ns
        self._offset_us = self._measured()

    def _measured(self) -> int:
        return self._wall_ns() // 1000 - int(self._clock() * 1e6)

    def us(self, at: float) -> int:
        """Return the microseconds since the epoch of `at`, in seconds on the monotonic clock."""
        return int(at * 1e6) + self._offset_us

    def compare(self) -> int:
        """Follow the wall clock if it was set; return by how many microseconds it was, 0 for not."""
        off = self._measured() - self._offset_us
        if abs(off) < _CLOCK_OFF_US:
            return 0
        self._offset_us += off
        return off


class Recorder:
    """Queues, feed and files of one server's records."""

    def __init__(
        self,
        options: EventsOptions,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        require_extra("telemetry", "events", "pyarrow")
        self.options: Final = options  # the settings
        # when it was made, microseconds since the epoch: part of file names, and where `seq` begins
        self.start_us: Final = wall_ns() // 1000
        self.wall: Final = WallClock(clock, wall_ns)  # turns times of the connections into times of records
        self.feed: Final = Feed()  # what live surfaces see of the events
        self._files = RecordFiles(options, self.start_us)
        self._lanes = {name: Lane(table, options.queue_rows) for name, table in TABLES.items()}
        self._writers = {name: TableWriter(table, self._files) for name, table in TABLES.items()}
        self._taken = dict.fromkeys(TABLES, 0)  # the recorder's thread; read by any
        self._broken = dict.fromkeys(TABLES, 0)  # as above
        self._unfed = 0  # as above
        self._steps: list[Callable[[], None]] = []  # complete before the thread starts
        self._told: dict[str, int] = dict.fromkeys(TABLES, 0)  # losses that were told; the recorder's thread
        self._said_at = self._swept_at = self._failed_at = self._stepped_at = float("-inf")
        self._cpu_s = 0.0  # the recorder's thread; read by any
        self._flight_cpu_s = 0.0  # as above
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def cpu_s(self) -> float:
        """Processor time that the recorder's thread has used, in seconds. Any thread."""
        return self._cpu_s

    @property
    def flight_cpu_s(self) -> float:
        """Processor time of it that went into flights, which have a bound of their own, in seconds. Any thread."""
        return self._flight_cpu_s

    # -- for those who have records

    def lane(self, table: Table) -> Lane:
        """Return the queue of a table; keep it, and `Lane.put` costs one append."""
        return self._lanes[table.name]

    def each_second(self, step: Callable[[], None]) -> None:
        """Have `step` called once a second on the recorder's thread, before the lanes are emptied. Before `start`."""
        self._steps.append(step)

    # -- life

    def start(self) -> None:
        """Make the folder, and begin to write; loads pyarrow, some 100 MB, so that it is not loaded later."""
        self._files.prepare()
        for writer in self._writers.values():
            writer.warm_up()
        self._thread = threading.Thread(target=self._run, name="flowctl-recorder", daemon=True)
        self._thread.start()

    def stop(self, deadline_s: float = _STOP_S) -> bool:
        """Write everything that waits, and end; idempotent."""
        self._stop.set()
        thread = self._thread
        if thread is None:
            return True
        thread.join(deadline_s)
        if thread.is_alive():
            _log.warning("records not written in time", deadline_s=deadline_s)
            return False
        return not any(writer.books.waiting_rows for writer in self._writers.values())

    def statistics(self) -> RecorderStatistics:
        """Return a snapshot. Any thread."""
        return RecorderStatistics(
            taken=dict(self._taken),
            waiting={name: lane.waiting for name, lane in self._lanes.items()},
            lost={name: lane.lost for name, lane in self._lanes.items()},
            broken=dict(self._broken),
            unfed_rows=self._unfed,
            books={name: writer.books for name, writer in self._writers.items()},
            last_error=self._files.last_error,
            cpu_s=self._cpu_s,
        )

    # -- the recorder's thread

    def _run(self) -> None:
        while not self._stop.wait(_DRAIN_S):
            self._guarded(self.turn)
        self._guarded(self.turn)  # what came before the stop
        self._guarded(self._end)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Do a step; whatever goes wrong in it, the server and the next step go on."""
        try:
            step()
            self._cpu_s = time.thread_time()
        except Exception as error:  # noqa: BLE001 - a fault here must cost records at most
            self._say_failed(error)

    def _say_failed(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._failed_at >= _LOG_EVERY_S:
            self._failed_at = now
            _log.error("recording failed", error=f"{type(error).__name__}: {error}")

    def turn(self) -> None:
        """Empty the lanes once, and finish the files that are due."""
        now = time.monotonic()
        if now - self._swept_at >= _SWEEP_S:
            self._swept_at = now
            self._files.sweep()
            off_us = self.wall.compare()
            if off_us:
                _log.info("wall clock was set", by_ms=off_us // 1000)
        if now - self._stepped_at >= _SECOND_STEP_S:
            self._stepped_at = now
            for step in self._steps:
                self._guarded(step)
        self._drain()
        if now - self._said_at >= _LOG_EVERY_S:
            self._tell_losses(now)
        for name, writer in self._writers.items():
            if not writer.rows_wait:
                continue
            began = time.thread_time()
            writer.finish_if_due(now)
            if name == FLIGHT.name:
                self._flight_cpu_s += time.thread_time() - began

    def _drain(self) -> None:
        for name, lane in self._lanes.items():
            if lane.empty:  # most are, most of the time
                continue
            rows, blocks = lane.drain()
            writer, began = self._writers[name], time.thread_time()
            events = name == FLOW_EVENTS.name
            kept = [row for row in rows if row[_EVENT] in RECORDED] if events else rows
            well = not kept or self._hand_on(name, len(kept), writer.add_rows, kept)
            if rows and events and well:  # afterwards: a fault of what is live must not cost what is kept
                self._show(rows)
            for block in blocks:
                self._hand_on(name, block.rows, writer.add_block, block)
            if name == FLIGHT.name:
                self._flight_cpu_s += time.thread_time() - began

    def _hand_on(self, name: str, rows: int, add: Callable[[Any], None], given: object) -> bool:
        """Give records to the writer of their table, and return whether it took them without a fault."""
        self._taken[name] += rows
        before = self._known(name)
        try:
            add(given)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong, the other tables and the server go on
            self._broken[name] += rows - (self._known(name) - before)
            self._say_failed(error)
            return False
        return True

    def _known(self, name: str) -> int:
        """Return how many records of a table stand in the books of its writer, whatever became of them."""
        books = self._writers[name].books
        return books.written_rows + books.waiting_rows + books.lost_rows + books.refused_rows

    def _show(self, rows: list[Row]) -> None:
        try:
            self.feed.count_rows(rows)
        except Exception as error:  # noqa: BLE001 - as above
            self._unfed += len(rows)
            self._say_failed(error)

    def _tell_losses(self, now: float) -> None:
        """Log what was lost since the last time, and record it."""
        for name, lane in self._lanes.items():
            whole = lane.lost + self._broken[name] + self._writers[name].given_up_rows
            lost, self._told[name] = whole - self._told[name], whole
            if not lost:
                continue
            self._said_at, books = now, self._writers[name].books
            _log.warning("records lost", table=name, records=lost, why=self._files.last_error or "too many at once")
            lane_of_events = self._lanes[FLOW_EVENTS.name]
            told = {"value": lost, "detail": json.dumps({"table": name, "disk": bool(books.lost_rows)})}
            about = {"ts": self._files.now_us(), "conn_id": 0, "event": EventName.OVERFLOW.value}
            lane_of_events.put(FLOW_EVENTS.row(**about, **told))

    def _end(self) -> None:
        self._tell_losses(time.monotonic())
        self._drain()
        for writer in self._writers.values():
            writer.finish()
