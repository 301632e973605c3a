"""All that runs beside the loop of a node: takes jobs, keeps to the slots, hands them to threads, tells their outcome.

Theory of operation. Threads are touched on the node's thread only, and slots as well but for one thing: a worker may
give the slot of its job to the next one, see `workers.py`. What other threads submit (batches, single
jobs, injected tasks) goes through one queue, which keeps their order, in portions, so that a batch of a hundred
thousand jobs does not hold up connections. Commands and callbacks of replies come from the node itself, on its thread.

A timer is due at multiples of its interval after it was begun. What was missed, because the machine was busy or asleep,
is not made up for: the next time is the next multiple, so there are no bursts. By default a timer is squelched: it is
passed over while its last job waits or runs.

A job that ends gives its slot to the next ones before anybody is told of its outcome. At the close nothing new starts:
what waits is told so, what runs goes on, and `closed` is called once nothing runs any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from math import inf
from typing import Any, Final, NewType

from flowctl.core.loop.deadlines import Deadlines
from flowctl.core.loop.faults import as_exception
from flowctl.core.loop.locks import OwnedLock
from flowctl.errors import BusyError, ClosedError, ConfigError
from flowctl.nodes.rpc.jobs.batch import Batch, NodeThread, TaggedThread
from flowctl.nodes.rpc.jobs.slots import (
    CategoryLane,
    LaneKind,
    LaneStatistics,
    NotStarted,
    NotStartedError,
    Slots,
    SlotVerdict,
    WorkerJob,
)
from flowctl.nodes.rpc.jobs.workers import Workers
from flowctl.nodes.rpc.nodecalls import NodeCalls

MOST_JOBS: Final = 1_000_000
"""Unended jobs of the program's own (batches, single ones, injected tasks): some 400 MB. A program that submits more
than it can do would otherwise use up the memory unnoticed."""

MOST_TIMERS: Final = 100_000
"""Timers of a node, each some 500 octets: a program that needs more probably leaks them."""

MOST_TAGGED: Final = 1024
"""Tagged threads of a node: each is a thread of the system with its stack."""

JOBS_PER_TURN: Final = 512
"""Jobs accepted in one turn of the loop: some 2 ms of work."""

FULL_REPORT_S: Final = 10.0
"""Time between two reports that commands of a category are dropped: a flood must not fill the log too."""

EXPIRY_S: Final = 0.25
"""Time between two searches of the queues for expired jobs, if they may hold any: OxenMQ's for connections."""

SHORTEST_S: Final = 0.001
"""Shortest interval of a timer: the resolution of the loop's own timers."""

LONGEST_S: Final = 366 * 86_400.0
"""Longest interval of a timer, a year: a loop does not accept any number."""

TimerID = NewType("TimerID", int)
"""Names a timer of one node; never used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatistics:
    general: int  #: general threads
    max_workers: int  #: most jobs that run at once on workers
    active: int  #: jobs that run on workers
    most_active: int  #: the most there ever were
    waiting: int  #: jobs that wait for a slot
    threads: int  #: threads started
    timers: int  #: timers
    lanes: tuple[LaneStatistics, ...]  #: batch jobs, replies, categories, tagged threads


class Timer:
    """One timer. All methods on the node's thread, but for `run` and `cancel`."""

    def __init__(
        self, job: Callable[[], object], interval_s: float, *, squelch: bool, submit: Callable[[Timer], bool]
    ) -> None:
        if not SHORTEST_S <= interval_s <= LONGEST_S:
            raise ConfigError(f"interval_s is {interval_s}, it must be {SHORTEST_S:g} to {LONGEST_S:.0f} s")
        self._job: Callable[[], object] | None = job  # None once it is cancelled
        self._interval_s: Final = interval_s
        self._squelch: Final = squelch
        self._submit: Final = submit
        self._outstanding = 0  # jobs that were submitted and have not ended
        self._when = 0.0
        self._deadlines: Deadlines | None = None  # from `begin` on

    def begin(self, deadlines: Deadlines, now: float) -> None:
        """Be due after one interval; no effect once it is cancelled."""
        if self._job is not None:
            self._deadlines = deadlines
            self._when = now + self._interval_s
            deadlines.set(self, self._when)

    def deadline_due(self, now: float) -> None:
        if self._job is None or self._deadlines is None:
            return
        missed = int((now - self._when) / self._interval_s)
        self._when += (missed + 1) * self._interval_s
        self._deadlines.set(self, self._when)
        if not (self._squelch and self._outstanding):
            self._outstanding += 1
            if not self._submit(self):
                self._outstanding -= 1

    def end(self) -> None:
        if self._deadlines is not None:
            self._deadlines.remove(self)

    def run(self) -> None:
        """Do the job, on whatever thread; nothing if it was cancelled since it was submitted."""
        job = self._job
        if job is not None:
            job()

    def ended(self) -> None:
        self._outstanding -= 1

    def cancel(self) -> None:
        """Do nothing any more, and keep nothing of the job; any thread, idempotent. A job that runs goes on."""
        self._job = None


class Dispatcher:
    """Jobs of one node. Methods on the node's thread, unless they say that any thread may call them."""

    def __init__(self, name: str, general: int, calls: NodeCalls) -> None:
        self._calls: Final = calls
        #: The rule; for adding categories and setting numbers of threads before the start.
        self.slots: Final = Slots(general)  # from the start on changed under _lock
        self.workers: Final = Workers(name, calls, self._next, self._ended, self._turn_ended)
        self._tagged: Final[dict[str, tuple[TaggedThread, Callable[[], object] | None]]] = {}
        self._timers: Final[dict[TimerID, Timer]] = {}  # any thread: each operation is one of a dict
        self._ids: Final = count(1)  # any thread: `next` is atomic
        self._arriving: Final[deque[Iterator[WorkerJob]]] = deque()  # submitted by any thread, not yet looked at
        self._feeding = False  # the node's thread will look at `_arriving`
        self._lock: Final = OwnedLock()  # a leaf: nothing else is locked or called under it
        self._own_count = 0  # jobs of the program's own that have not ended  # guarded by _lock
        self._started = False
        self._expiring = False  # `deadline_due` is set
        self._full_at: Final[dict[str, float]] = {}  # when it was last reported that a category drops commands
        self._closed: Callable[[], object] | None = None  # called once nothing runs, after `close`

    # --- life ----------------------------------------------------------------------------------------------------

    def add_tagged_thread(self, name: str, start: Callable[[], object] | None = None) -> TaggedThread:
        """Return a thread that runs its jobs one at a time, in order; before the start."""
        if not name or name in self._tagged:
            raise ConfigError(f"name is {name!r}, it must not be empty, nor of another tagged thread")
        if len(self._tagged) >= MOST_TAGGED:
            raise ConfigError(f"there are {MOST_TAGGED} tagged threads already")
        thread = TaggedThread(name, Slots.tagged_thread(name))
        self._tagged[name] = (thread, start)
        return thread

    def start(self) -> None:
        for name, (_, start) in self._tagged.items():
            self.workers.add_tagged(name, start)
        self._started = True
        self._calls.group.call_soon(self._feed)
        for timer in list(self._timers.values()):
            self._calls.group.call_soon(self._begin, timer)

    def close(self, closed: Callable[[], object]) -> None:
        """Start nothing any more; what waits is told `NotStartedError`, what runs goes on."""
        self._closed = closed
        for timer_id in list(self._timers):
            self.cancel_timer(timer_id)
        with self._lock:
            waiting = self.slots.close()
            for thread, _ in self._tagged.values():
                waiting += self.slots.close_lane(thread.lane)
        if self._expiring:
            self._calls.group.deadlines.remove(self)
        for job in chain(waiting, chain.from_iterable(self._fronts())):
            self._tell(job, None, NotStartedError(job.name, NotStarted.STOPPED))
        self.workers.finish()
        self._turn_ended()

    # --- jobs of the node ----------------------------------------------------------------------------------------

    def submit(self, job: WorkerJob) -> SlotVerdict:
        """Run `job` if it has a slot, else queue or refuse it; where it is refused, `job.done` is not called."""
        group = self._calls.group
        now = group.now()
        with self._lock:
            verdict = self.slots.arrived(job, now)
        if verdict is SlotVerdict.START:
            self._run(job)
            return verdict
        if verdict is SlotVerdict.WAIT and job.deadline != inf and not self._expiring:
            self._expiring = True
            group.deadlines.set(self, now + EXPIRY_S)
        if verdict is SlotVerdict.DROP and not job.own and self._closed is None:
            self._report_full(job.lane, now)
        self._tell_not_started()
        return verdict

    def reply(self, call: Callable[[], object], name: str = "reply") -> None:
        """Run the callback of a reply; what it raises is reported.

        It is called even if nothing starts any more, then on this thread: outcomes are not lost by a stop.
        """
        job = WorkerJob(self.slots.reply, call, partial(self._replied, call, name), name=name)
        if self.submit(job) is SlotVerdict.DROP:
            self._call(name, call)

    def deadline_due(self, now: float) -> None:
        with self._lock:
            self.slots.expire(now)
        self._expiring = self.slots.waiting > 0
        if self._expiring:
            self._calls.group.deadlines.set(self, now + EXPIRY_S)
        self._tell_not_started()

    def inject(self, lane: CategoryLane, call: Callable[[], object], name: str = "task") -> None:
        """Queue a task as if it were a command of the category of `lane`; any thread.

        It is dropped, which is reported, where a command would be. What it raises is reported.
        """
        self._admit(1)
        self._arrive(iter((WorkerJob(lane, call, name=name, own=True),)))

    # --- jobs of the program, any thread -------------------------------------------------------------------------

    def job(self, call: Callable[[], object], thread: TaggedThread | None = None) -> None:
        batch: Batch[object] = Batch()
        batch.add_job(call, thread)
        self.batch(batch)

    def batch(self, batch: Batch[Any]) -> None:
        for thread in batch.threads():
            self._check_thread(thread)
        count = len(batch)
        self._admit(count)
        try:
            jobs = batch.start()
        except BaseException:
            self._admit(-count)
            raise
        self._arrive(self._jobs_of(batch, jobs))

    def add_timer(
        self,
        call: Callable[[], object],
        interval_s: float,
        *,
        squelch: bool = True,
        thread: TaggedThread | NodeThread | None = None,
    ) -> TimerID:
        self._check_thread(thread)
        if self._closed is not None:
            raise ClosedError("the node was stopped")
        if len(self._timers) >= MOST_TIMERS:
            raise BusyError(f"there are {MOST_TIMERS} timers already", hint="cancel those that are not needed any more")
        timer = Timer(call, interval_s, squelch=squelch, submit=partial(self._timer_due, thread))
        timer_id = TimerID(next(self._ids))
        self._timers[timer_id] = timer
        if self._started:
            self._post(self._begin, timer)
        return timer_id

    def cancel_timer(self, timer_id: TimerID) -> bool:
        timer = self._timers.pop(timer_id, None)
        if timer is None:
            return False
        timer.cancel()
        if self._started:
            self._post(timer.end)
        return True

    def statistics(self) -> JobStatistics:
        slots = self.slots
        lanes = [*slots.lanes(), *(thread.lane for thread, _ in list(self._tagged.values()))]
        return JobStatistics(
            general=slots.general,
            max_workers=slots.max_workers,
            active=slots.active,
            most_active=slots.most_active,
            waiting=slots.waiting,
            threads=len(self.workers),
            timers=len(self._timers),
            lanes=tuple(map(slots.statistics, lanes)),
        )

    # --- inner steps ---------------------------------------------------------------------------------------------

    def _check_thread(self, thread: TaggedThread | NodeThread | None) -> None:
        if isinstance(thread, TaggedThread) and self._tagged.get(thread.name, (None,))[0] is not thread:
            raise ConfigError(f"tagged thread {thread.name!r} is another node's")

    def _admit(self, count: int) -> None:
        """Count jobs of the program's own that come, or with a negative number those that have gone."""
        if count > 0 and self._closed is not None:
            raise ClosedError("the node was stopped")
        with self._lock:
            if count > 0 and self._own_count + count > MOST_JOBS:
                raise BusyError(
                    f"{self._own_count} jobs have not ended, and {MOST_JOBS} may be submitted: no room for {count} more"
                )
            self._own_count += count

    def _arrive(self, jobs: Iterator[WorkerJob]) -> None:
        """Have the node's thread take `jobs` in portions, behind what came before; any thread."""
        self._arriving.append(jobs)
        if self._started and not self._feeding:
            self._feeding = True
            self._post(self._feed)

    def _post(self, call: Callable[..., object], *args: Any) -> None:
        """Call on the node's thread; not at all once its loop is closed."""
        with suppress(ClosedError):
            self._calls.group.call_soon(call, *args)

    def _feed(self) -> None:
        self._feeding = False
        portion = islice(chain.from_iterable(self._fronts()), JOBS_PER_TURN)
        for job in portion:
            self._submit_own(job)
        if self._arriving and not self._feeding:
            self._feeding = True
            self._post(self._feed)

    def _fronts(self) -> Iterator[Iterator[WorkerJob]]:
        """Yield what arrives, the oldest until it is used up."""
        while self._arriving:
            yield self._arriving[0]
            self._arriving.popleft()

    def _submit_own(self, job: WorkerJob) -> None:
        """Run or queue a job; a refusal of it is told to the caller alone."""
        if self.submit(job) is SlotVerdict.DROP:
            full = BusyError(f"the queue of {job.lane.name!r} is full")
            self._tell(job, None, full if self._closed is None else NotStartedError(job.name, NotStarted.STOPPED))

    def _jobs_of(
        self, batch: Batch[Any], jobs: list[tuple[Callable[[], Any], TaggedThread | None]]
    ) -> Iterator[WorkerJob]:
        for index, (call, thread) in enumerate(jobs):
            lane = self.slots.batch if thread is None else thread.lane
            yield WorkerJob(lane, call, partial(self._batch_job_ended, batch, index), lane.name, own=True)

    def _batch_job_ended(self, batch: Batch[Any], index: int, value: object, error: BaseException | None) -> None:
        if error is not None and not batch.has_completion:
            self._report(f"a job of {type(batch).__name__}", error)
        if not batch.note_outcome(index, value, error):
            return
        completion = batch.complete()
        if completion is None:
            return
        call, thread = completion
        if isinstance(thread, NodeThread):
            self._call("completion of a batch", call)
        else:
            lane = self.slots.batch if thread is None else thread.lane
            self._submit_own(WorkerJob(lane, call, name="completion of a batch"))

    def _begin(self, timer: Timer) -> None:
        if self._closed is None:
            timer.begin(self._calls.group.deadlines, self._calls.group.now())

    def _timer_due(self, thread: TaggedThread | NodeThread | None, timer: Timer) -> bool:
        if isinstance(thread, NodeThread):
            timer.ended()
            self._call("a timer", timer.run)
            return True
        lane = self.slots.batch if thread is None else thread.lane
        if len(lane.waiting) >= MOST_JOBS:
            return False
        return (
            self.submit(WorkerJob(lane, timer.run, partial(self._timer_ended, timer), name="timer"))
            is not SlotVerdict.DROP
        )

    def _replied(self, call: Callable[[], object], name: str, _: object, error: BaseException | None) -> None:
        if isinstance(error, NotStartedError):
            self._call(name, call)
        elif error is not None:
            self._report(name, error)

    def _report_full(self, lane: CategoryLane, now: float) -> None:
        if self._full_at.get(lane.name, -inf) + FULL_REPORT_S <= now:
            self._full_at[lane.name] = now
            full = BusyError(
                f"{len(lane.waiting)} commands of {lane.name!r} wait, {lane.max_queue} may: others are dropped",
                hint="raise max_queue, or reserve threads for the category",
            )
            self._report(f"queue of {lane.name}", full)

    def _timer_ended(self, timer: Timer, _: object, error: BaseException | None) -> None:
        timer.ended()
        if error is not None and not isinstance(error, NotStartedError):
            self._report("a timer", error)

    def _run(self, job: WorkerJob) -> None:
        if job.lane.kind is LaneKind.TAGGED:
            self.workers.run_tagged(job)
        else:
            with self._lock:  # a worker may be about to pass its slot on
                active = self.slots.active
            self.workers.run(job, active)

    def _next(self, lane: CategoryLane) -> list[WorkerJob]:
        with self._lock:
            return self.slots.pass_on(lane, self._calls.group.now())

    def _ended(self, job: WorkerJob, value: object, error: BaseException | None, following: list[WorkerJob]) -> None:
        """Take a job that has ended: first the next ones start, then its outcome is told."""
        if following:
            following = following[1:]
        else:
            with self._lock:
                following = self.slots.free_slot(job.lane, self._calls.group.now())
        for each in following:
            self._run(each)
        self._tell(job, value, error)

    def _turn_ended(self) -> None:
        self._tell_not_started()
        closed = self._closed
        if closed is None or self.slots.active or any(thread.lane.running for thread, _ in self._tagged.values()):
            return
        self._closed = lambda: None
        closed()

    def _tell_not_started(self) -> None:
        with self._lock:
            not_started = self.slots.take_not_started()
        for job, why in not_started:
            self._tell(job, None, NotStartedError(job.name, why))

    def _tell(self, job: WorkerJob, value: object, error: BaseException | None) -> None:
        if job.own:
            self._admit(-1)
        if job.done is not None:
            self._call(f"outcome of {job.name}", job.done, value, error)
        elif error is not None:
            self._report(job.name, error)

    def _call(self, where: str, call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except BaseException as error:  # noqa: BLE001  (one job's fault must not cost the others their outcome)
            self._calls.group.report(where, error)

    def _report(self, where: str, error: BaseException) -> None:
        """Report what a job raised on its thread: a KeyboardInterrupt made there is not the one of Ctrl-C."""
        self._calls.group.report(where, as_exception(error))
