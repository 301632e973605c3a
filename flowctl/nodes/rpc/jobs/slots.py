"""The reservation rule and the queues before it (pure): jobs and time come in, what starts and what is dropped go out.

Theory of operation. Every job belongs to a lane: one per category of commands, one for batch jobs, one for callbacks
of replies, one per tagged thread. A lane reserves a number of worker threads, and all but those of tagged threads
share the general ones. One rule says whether a job may run:

    a lane has a slot if it runs fewer jobs than it reserves, or if fewer than `general` jobs run altogether.

The general slots are used first, by anybody; a job that starts by its reservation counts as running like any other.
So no more than ``general + sum of reserved`` run at once, and while a lane runs fewer than it reserves, nothing that
others do keeps its jobs waiting.

A job without a slot waits in its lane, or is dropped where the lane is full; only categories have limits here: what
the program submits itself is bounded where it comes in (`nodes.rpc.jobs.dispatcher`). When a job ends, the order is:
batch jobs, replies, then commands in the order of their arrival, over all categories, passing by those without a slot.
(A tagged thread has one slot that is its own, and waits for nobody.)

One sender must not keep others waiting (`SenderTurns`). One line holds what waits, oldest first, but at most
`MOST_IN_LINE` of any sender; what it has sent beyond them waits behind it, and each that leaves the line lets the next
one in at its end. So the order is that of arrival as long as nobody sends many at once, and always with one sender; and
one that sends without end keeps another one's waiting for no more than those few. Where a queue is full, a command of a
sender that has less than its share of it displaces the newest of the one that has most.

Cost. Between two events nobody who has a slot waits. The end of a job gives a slot to its own lane, or a general one to
everybody; so only the head of that lane and the head of all commands need to be looked at: O(1) per job, however many
wait and however many categories there are. A command that waits is in two orders, of its lane and of all
commands, and leaves both at once, wherever in them it stands.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from math import inf
from typing import Any, Final

from flowctl.errors import ClosedError, ConfigError, InternalError

DEFAULT_MAX_QUEUE: Final = 200
"""Commands of one category that may wait, as in OxenMQ."""

MOST_RESERVED: Final = 1024
"""Threads that one lane may reserve, and general threads: each is a thread of the system with its stack."""

MOST_WAITING_BYTES: Final = 256 * 1024 * 1024
"""Octets of all messages that wait in bounded lanes: 200 of 1 MiB in each of many categories are too much."""

MOST_IN_LINE: Final = 4
"""Jobs of one sender in line. Each one of a flood is one that others wait for: with 16, the 99th percentile of others'
calls of plain functions was twice that with 4, and with 1 half of it; but then the order of arrival means nothing."""


class SlotVerdict(enum.Enum):
    START = "start"  #: run it now
    WAIT = "wait"  #: it is in the queue; `Slots.free_slot` returns it when its turn has come
    DROP = "drop"  #: the queue is full, or the slots are closed: it will not run


class NotStarted(enum.Enum):
    STOPPED = "the node was stopped"
    LATE = "its deadline passed while it waited"
    DISPLACED = "the queue is full, and others had less than their share of it"


class NotStartedError(ClosedError):
    """The outcome of a job that never ran; it goes no further than to the one that submitted it."""

    def __init__(self, name: str, why: NotStarted) -> None:
        super().__init__(f"{name} was not started: {why.value}")
        self.why: Final = why


class LaneKind(enum.Enum):
    COMMANDS = "commands"  #: a category's, and tasks injected there
    OWN = "own"  #: batch jobs, or callbacks of replies
    TAGGED = "tagged"  #: those of one tagged thread: its one slot is no worker's


@dataclass(slots=True, eq=False)
class WorkerJob:
    """One thing to do on a worker thread, or on a tagged one."""

    lane: CategoryLane
    call: Callable[[], object]  #: does it, on that thread
    #: Told of the outcome on the node's thread, once: the value and None, or None and what was raised. A job that never
    #: ran has failed with `NotStartedError`. None: no callback; what is raised is reported.
    done: Callable[[object, BaseException | None], object] | None = None
    name: str = "job"  #: for reports
    deadline: float = inf  #: seconds on the node's clock from when on it is not worth starting
    size_bytes: int = 0  #: memory that it keeps while it waits
    own: bool = False  #: the program submitted it itself, and it counts against what it may
    sender: Hashable = None  #: who takes turns with others; None: the program
    number: int = 0  #: order of arrival, while it waits


class SenderTurns:
    """What waits, in the order in which its turns come; all is O(1) but `newest_of_most`."""

    __slots__ = ("_count", "_line", "_of_sender")

    def __init__(self) -> None:
        self._line: Final[OrderedDict[int, WorkerJob]] = OrderedDict()
        # All that waits of each sender, none empty, oldest first: the first `MOST_IN_LINE` of them are in the line.
        self._of_sender: Final[dict[Hashable, OrderedDict[int, WorkerJob]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[WorkerJob]:
        for own in self._of_sender.values():
            yield from own.values()

    def __contains__(self, item: WorkerJob) -> bool:
        own = self._of_sender.get(item.sender)
        return own is not None and own.get(item.number) is item

    def head(self) -> WorkerJob | None:
        return next(iter(self._line.values()), None)

    def add(self, item: WorkerJob) -> None:
        own = self._of_sender.get(item.sender)
        if own is None:
            own = self._of_sender[item.sender] = OrderedDict()
        own[item.number] = item
        if len(own) <= MOST_IN_LINE:
            self._line[item.number] = item
        self._count += 1

    def remove(self, item: WorkerJob) -> None:
        """Take `item` out, from wherever it stands; one of its sender's that waits behind the line comes in for it."""
        own = self._of_sender[item.sender]
        del own[item.number]
        self._count -= 1
        if not own:
            del self._of_sender[item.sender]
        if self._line.pop(item.number, None) is not None and len(own) >= MOST_IN_LINE:
            following = next(islice(own.values(), MOST_IN_LINE - 1, None))
            self._line[following.number] = following

    def above_share(self, sender: Hashable) -> bool:
        """Return whether one more of `sender` is above its share, which is the same for all that have some waiting."""
        own, senders = self._of_sender.get(sender), len(self._of_sender)
        mine = 0 if own is None else len(own)
        return (mine + 1) * (senders + (own is None)) > self._count

    def newest_of_most(self) -> WorkerJob:
        """Return the newest of the sender that has most waiting; something must wait. O(senders)."""
        own = max(self._of_sender.values(), key=len)
        return next(reversed(own.values()))


@dataclass(slots=True, eq=False)
class CategoryLane:
    """Jobs that share a reservation and a queue. Made by `Slots`, which alone changes it."""

    name: str
    kind: LaneKind
    reserved: int  #: jobs that may run whatever others do
    max_queue: int  #: how many may wait; -1: no limit
    running: int = 0
    waiting: SenderTurns = field(default_factory=SenderTurns)
    earliest: float = inf  #: no deadline in `waiting` is before this one
    started_count: int = 0
    dropped_count: int = 0
    late_count: int = 0  #: jobs not started because their deadline passed while they waited


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStatistics:
    name: str
    reserved: int  #: threads reserved
    max_queue: int  #: how many may wait; -1: no limit
    running: int  #: jobs that run
    waiting: int  #: jobs that wait
    started_count: int  #: jobs started so far
    dropped_count: int  #: jobs for which there was no room
    late_count: int  #: jobs whose deadline passed while they waited


class Slots:
    """The slots of a node and what waits for them; its owner locks it."""

    def __init__(self, general: int = 1, batch: int = -1, reply: int = -1) -> None:
        self.batch: Final = CategoryLane("batch", LaneKind.OWN, 0, -1)
        self.reply: Final = CategoryLane("reply", LaneKind.OWN, 0, -1)
        self._lanes: Final[dict[str, CategoryLane]] = {}  # categories
        self._commands: Final[SenderTurns] = SenderTurns()  # of all categories
        self._number = 0  # of the newest arrival
        self._waiting_bytes = 0  # of bounded lanes
        self._waiting_bytes_of: Final[Counter[Hashable]] = Counter()  # by sender
        self._not_started: list[tuple[WorkerJob, NotStarted]] = []
        self._closed = False
        self.active = 0  #: jobs that run on workers (those of tagged threads are not among them)
        self.most_active = 0
        self.general = 1
        self._batch_set = self._reply_set = -1
        self.set_threads(general=general, batch=batch, reply=reply)

    def set_threads(self, *, general: int | None = None, batch: int | None = None, reply: int | None = None) -> None:
        """Change numbers of threads; None leaves one as it is. Else as for the class. Before any job arrives."""
        general = self.general if general is None else _in_range("general_threads", general, 1)
        batch = self._batch_set if batch is None else _in_range("batch_threads", batch, -1)
        reply = self._reply_set if reply is None else _in_range("reply_threads", reply, -1)
        self.general, self._batch_set, self._reply_set = general, batch, reply
        self.batch.reserved = batch if batch >= 0 else -(-general // 2)
        self.reply.reserved = reply if reply >= 0 else -(-general // 8)

    def add_category(self, name: str, reserved: int = 0, max_queue: int = DEFAULT_MAX_QUEUE) -> CategoryLane:
        _in_range("reserved_threads", reserved, 0)
        _in_range("max_queue", max_queue, -1, inf)
        lane = self._lanes[name] = CategoryLane(name, LaneKind.COMMANDS, reserved, max_queue)
        return lane

    @staticmethod
    def tagged_thread(name: str) -> CategoryLane:
        """Return the lane of a thread of its own, which runs one job at a time, in order."""
        return CategoryLane(name, LaneKind.TAGGED, 1, -1)

    @property
    def max_workers(self) -> int:
        """Most jobs that run at once on workers: general ones and all that are reserved."""
        return self.general + self.batch.reserved + self.reply.reserved + sum(x.reserved for x in self._lanes.values())

    # --- events --------------------------------------------------------------------------------------------------

    def arrived(self, job: WorkerJob, now: float) -> SlotVerdict:
        lane = job.lane
        if not self._closed:
            if lane.running < lane.reserved or (self.active < self.general and lane.kind is not LaneKind.TAGGED):
                self._start(lane)
                return SlotVerdict.START
            if self._has_room(job, now):
                self._keep(job)
                return SlotVerdict.WAIT
        lane.dropped_count += 1
        return SlotVerdict.DROP

    def free_slot(self, lane: CategoryLane, now: float) -> list[WorkerJob]:
        """Take back the slot of a job of `lane` that has ended, however it did; O(1) per job that starts."""
        if not lane.running:
            raise InternalError(f"more jobs of {lane.name!r} ended than ran")
        lane.running -= 1
        if lane.kind is not LaneKind.TAGGED:
            self.active -= 1
        jobs: list[WorkerJob] = []
        while (job := self._next_job(lane)) is not None:
            if job.deadline <= now:
                self._forget_late(job)
            else:
                self._forget(job)
                self._start(job.lane)
                jobs.append(job)
        return jobs

    def pass_on(self, lane: CategoryLane, now: float) -> list[WorkerJob]:
        """As `free_slot`, but if nothing comes next, the slot is not taken back: it stays taken until `free_slot`."""
        if not lane.waiting and not self.waiting:
            return []
        jobs = self.free_slot(lane, now)
        if not jobs:
            lane.running += 1
            self.active += lane.kind is not LaneKind.TAGGED
        return jobs

    def expire(self, now: float) -> None:
        """Remove what waits and is late; `take_not_started` returns it. O(categories) if nothing is."""
        for lane in self._lanes.values():
            if lane.earliest <= now:
                self._sweep(lane, now)

    def take_not_started(self) -> list[tuple[WorkerJob, NotStarted]]:
        """Return the jobs that will not run, each once: their deadline has passed, or others took their places."""
        not_started, self._not_started = self._not_started, []
        return not_started

    def close(self) -> list[WorkerJob]:
        """Start no job any more: return and remove all commands, replies and batch jobs that wait. Idempotent.

        What waits for tagged threads is returned by `close_lane`.
        """
        self._closed = True
        jobs = [*self.batch.waiting, *self.reply.waiting, *self._commands]
        for job in jobs:
            self._forget(job)
        return jobs

    def close_lane(self, lane: CategoryLane) -> list[WorkerJob]:
        jobs = list(lane.waiting)
        for job in jobs:
            self._forget(job)
        return jobs

    # --- figures -------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Jobs that wait, those of tagged threads left out."""
        return len(self._commands) + len(self.batch.waiting) + len(self.reply.waiting)

    def lanes(self) -> Iterator[CategoryLane]:
        yield self.batch
        yield self.reply
        yield from self._lanes.values()

    @staticmethod
    def statistics(lane: CategoryLane) -> LaneStatistics:
        figures = {item.name: getattr(lane, item.name) for item in fields(LaneStatistics)}
        return LaneStatistics(**(figures | {"waiting": len(lane.waiting)}))

    # --- inner steps ---------------------------------------------------------------------------------------------

    def _next_job(self, freed: CategoryLane) -> WorkerJob | None:
        """Return the next to start after a job of `freed` has ended; it waits still."""
        if self.active < self.general and freed.kind is not LaneKind.TAGGED:
            for queue in (self.batch.waiting, self.reply.waiting, self._commands):
                if queue:
                    return queue.head()
        elif freed.running < freed.reserved:
            return freed.waiting.head()
        return None

    def _start(self, lane: CategoryLane) -> None:
        lane.running += 1
        lane.started_count += 1
        if lane.kind is not LaneKind.TAGGED:
            self.active += 1
            self.most_active = max(self.most_active, self.active)

    def _has_room(self, job: WorkerJob, now: float) -> bool:
        lane = job.lane
        if lane.max_queue < 0:
            return True
        if len(lane.waiting) >= lane.max_queue and lane.earliest <= now:
            self._sweep(lane, now)  # what is late must not keep out what is not
        # What a sender has waiting it leaves to others once more: one alone gets half of the octets. The program not.
        own_bytes = 0 if job.sender is None else self._waiting_bytes_of[job.sender]
        if own_bytes + self._waiting_bytes + job.size_bytes > MOST_WAITING_BYTES:
            return False
        return len(lane.waiting) < lane.max_queue or self._displace(job)

    def _displace(self, job: WorkerJob) -> bool:
        """Take the newest of the sender that has most out of a full queue; False: `job` has no right to its place."""
        lane = job.lane
        if lane.waiting.above_share(job.sender):
            return False
        displaced = lane.waiting.newest_of_most()
        self._forget(displaced)
        lane.dropped_count += 1
        self._not_started.append((displaced, NotStarted.DISPLACED))
        return True

    def _keep(self, job: WorkerJob) -> None:
        lane = job.lane
        self._number += 1
        job.number = self._number
        lane.waiting.add(job)
        if lane.kind is LaneKind.COMMANDS:
            self._commands.add(job)
        lane.earliest = min(lane.earliest, job.deadline)
        if lane.max_queue >= 0:
            self._waiting_bytes += job.size_bytes
            self._waiting_bytes_of[job.sender] += job.size_bytes

    def _forget(self, job: WorkerJob) -> None:
        lane = job.lane
        lane.waiting.remove(job)
        if lane.kind is LaneKind.COMMANDS:
            self._commands.remove(job)
        if lane.max_queue >= 0:
            self._waiting_bytes -= job.size_bytes
            self._waiting_bytes_of[job.sender] -= job.size_bytes
            if not self._waiting_bytes_of[job.sender]:
                del self._waiting_bytes_of[job.sender]

    def _forget_late(self, job: WorkerJob) -> None:
        self._forget(job)
        job.lane.late_count += 1
        self._not_started.append((job, NotStarted.LATE))

    def _sweep(self, lane: CategoryLane, now: float) -> None:
        """Remove what is late from a lane; O(n), and not again before the next deadline in it."""
        for job in [job for job in lane.waiting if job.deadline <= now]:
            self._forget_late(job)
        lane.earliest = min((job.deadline for job in lane.waiting), default=inf)


def _in_range(what: str, value: Any, least: int, most: float = MOST_RESERVED) -> int:
    if isinstance(value, int) and least <= value <= most:
        return value
    allowed = f"{least} or more" if most == inf else f"{least} to {most}"
    raise ConfigError(f"{what} is {value!r}, it must be a number, {allowed}")
