"""Worker threads: they run jobs that are handed to them, and post what came of them back to the node's thread.

Theory of operation. How many jobs run at once is decided before (`slots.py`); a job that comes here has a slot. All
workers take from one queue, which costs one hand-over and no thought about who is idle; a thread is started when more
jobs run than there are threads. A tagged thread has a queue of its own. Outcomes go into one mailbox, which the node's
thread empties in one turn however many there are: only the first of them wakes it.

A hand-over from thread to thread costs more than a short job, so a worker whose job has ended goes on with the one that
comes next by the rule of the slots, and the node's thread learns of both at once. But it holds the interpreter
meanwhile, which the node's thread would get every 5 ms only (`sys.getswitchinterval`): all connections would answer
that late. So once an outcome has waited for `BURST_S`, all workers leave the next job to the node's thread, and wait.

Whatever a job raises is its outcome, SystemExit and CancelledError as well. Threads are daemons: one whose job never
ends does not keep the process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

from flowctl.errors import ClosedError
from flowctl.nodes.rpc.jobs.slots import CategoryLane, WorkerJob
from flowctl.nodes.rpc.nodecalls import NodeCalls

OUTCOMES_PER_TURN: Final = 256
"""Outcomes handled in one turn of the loop: some 2 ms of work, as for messages of a socket."""


BURST_S: Final = 0.00025
"""How long workers go on by themselves while the node's thread has outcomes to take: some ten short jobs.
With twice as much a flood is served 8 % faster, and others wait for it twice as long; with half, a fifth slower."""


@dataclass(eq=False)
class Workers:
    """The threads of a node. All methods on the node's thread, but for `join`, `in_worker` and `unfinished`."""

    _name: str
    _calls: NodeCalls
    #: Gives the slot of a job that has ended to what comes next, if anything does; any thread.
    _next: Callable[[CategoryLane], list[WorkerJob]]
    #: Told of the end of a job, and what of the next has its slot: the first of them runs already.
    _ended: Callable[[WorkerJob, object, BaseException | None, list[WorkerJob]], object]
    _turn_ended: Callable[[], object]
    _inbox: SimpleQueue[WorkerJob | None] = field(default_factory=SimpleQueue)
    _threads: list[_Worker] = field(default_factory=list)
    _tagged: dict[str, tuple[_Worker, SimpleQueue[WorkerJob | None]]] = field(default_factory=dict)
    _mailbox: deque[tuple[WorkerJob, object, BaseException | None, list[WorkerJob]]] = field(default_factory=deque)
    _finishing: bool = False  #: threads may have ended
    _posted: bool = False  #: the node's thread will look into the mailbox
    _posted_at: float = 0.0  #: since when it is to

    def __len__(self) -> int:
        return len(self._threads) + len(self._tagged)

    def run(self, job: WorkerJob, active: int) -> None:
        self._inbox.put(job)
        if len(self._threads) < active or self._finishing:
            self._start_one()

    def add_tagged(self, name: str, start: Callable[[], object] | None) -> None:
        inbox: SimpleQueue[WorkerJob | None] = SimpleQueue()
        worker = _Worker(f"{self._name} {name}", inbox, self._post, start, self._calls.group.report)
        worker.start()
        self._tagged[name] = (worker, inbox)

    def run_tagged(self, job: WorkerJob) -> None:
        self._tagged[job.lane.name][1].put(job)

    def finish(self) -> None:
        """Have each thread end once it has nothing to do; no job is handed over any more."""
        self._finishing = True
        self._inbox.put(None)
        for _, inbox in self._tagged.values():
            inbox.put(None)

    def join(self, deadline_s: float) -> bool:
        """Wait for the threads to end, other than the caller's; after `finish`, any thread. True if all have."""
        ends_at = time.monotonic() + deadline_s
        for worker in self._all():
            if worker is not threading.current_thread():
                worker.join(max(0.0, ends_at - time.monotonic()))
        return not self.unfinished()

    def in_worker(self) -> bool:
        here = threading.current_thread()
        return isinstance(here, _Worker) and here in self._all()

    def unfinished(self) -> list[str]:
        """Return which threads live, and what they are busy with; any thread."""
        return [f"{worker.name}: {worker.doing or 'idle'}" for worker in self._all() if worker.is_alive()]

    def _all(self) -> list[_Worker]:
        return [*self._threads, *(worker for worker, _ in list(self._tagged.values()))]

    def _start_one(self) -> None:
        worker = _Worker(f"{self._name} worker {len(self._threads) + 1}", self._inbox, self._post)
        self._threads.append(worker)  # before its first job asks who is there
        try:
            worker.start()
        except RuntimeError as error:  # the system gives no more threads
            self._threads.pop()
            self._calls.group.report("starting a worker thread", error)
            if not self._threads:
                job = self._inbox.get()
                while job is not None:
                    job = self._post(job, None, error)
            # Else one of the others runs it when it has time.

    def _post(self, job: WorkerJob, value: object, error: BaseException | None) -> WorkerJob | None:
        """Tell the node's thread of the end of a job, and return what its thread runs next; any thread."""
        now = self._calls.group.now()
        following = [] if self._posted and now - self._posted_at >= BURST_S else self._next(job.lane)
        self._mailbox.append((job, value, error, following))
        # A thread that finds it set has put its outcome there before it is unset, so before the mailbox is emptied.
        if not self._posted:
            self._posted, self._posted_at = True, now
            with suppress(ClosedError):  # the node did not wait for this job, and has gone
                self._calls.group.call_soon(self._empty)
        return following[0] if following else None

    def _empty(self) -> None:
        self._posted = False
        self._calls.group.many_follow = len(self._mailbox) > 1
        try:
            for _ in range(min(len(self._mailbox), OUTCOMES_PER_TURN)):
                self._ended(*self._mailbox.popleft())
        finally:
            self._calls.group.many_follow = False
            if self._mailbox and not self._posted:
                self._posted, self._posted_at = True, self._calls.group.now()
                self._calls.group.call_soon(self._empty)
            self._turn_ended()


class _Worker(threading.Thread):
    def __init__(
        self,
        name: str,
        inbox: SimpleQueue[WorkerJob | None],
        post: Callable[[WorkerJob, object, BaseException | None], WorkerJob | None],
        first: Callable[[], object] | None = None,
        report: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._inbox: Final = inbox
        self._post: Final = post
        self._first = first
        self._report = report
        self.doing = "" if first is None else "its start function"  #: what runs at present; read by any thread

    def run(self) -> None:
        if self._first is not None:
            self._begin(self._first)
        inbox, post = self._inbox, self._post
        while (job := inbox.get()) is not None or not inbox.empty():
            if job is None:
                inbox.put(None)  # behind what has a slot already
            while job is not None:
                self.doing = job.name
                value: object = None
                error: BaseException | None = None
                try:
                    value = job.call()
                except BaseException as raised:  # noqa: BLE001  (whatever it is, it is the job's, not the thread's end)
                    error = raised
                self.doing = ""
                job = post(job, value, error)
                del value, error  # an idle thread must keep nothing of its last job
                if job is not None and not inbox.empty():  # what waits for a thread without the interpreter is first
                    inbox.put(job)
                    job = None
        inbox.put(None)  # for the others

    def _begin(self, first: Callable[[], object]) -> None:
        try:
            first()
        except BaseException as raised:  # noqa: BLE001  (the thread is there all the same)
            if self._report is not None:
                self._report(f"start of thread {self.name}", raised)
        self._first, self.doing = None, ""
