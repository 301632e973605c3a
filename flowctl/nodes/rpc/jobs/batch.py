"""Batches: many jobs of the program's own, and what goes on once all of them have ended (pure).

A batch is filled by its maker, handed over once, and from then on only told of outcomes. Nobody waits for it: a thread
that did could be the one that its jobs need.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, cast

from flowctl.errors import ConfigError, LocalProtocolError
from flowctl.nodes.rpc.jobs.slots import CategoryLane

R = TypeVar("R")


class NodeThread(enum.Enum):
    """Stands for the node's own thread where a tagged thread could be given: for short jobs that never wait."""

    NODE = "node"


NODE_THREAD: Final = NodeThread.NODE
"""The one `NodeThread`, as OxenMQ's ``run_in_proxy``."""


@dataclass(frozen=True, slots=True, eq=False)
class TaggedThread:
    """A thread that runs one job at a time, in order; made by ``add_tagged_thread`` of a node."""

    name: str
    lane: CategoryLane


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class JobResult(Generic[R]):
    """The outcome of a job."""

    _value: R | None
    error: BaseException | None  #: what it raised; None if it returned

    def get(self) -> R:
        """Return what the job returned.

        Raises:
            BaseException: what it raised.
        """
        if self.error is not None:
            raise self.error
        return cast("R", self._value)

    def __repr__(self) -> str:
        return f"JobResult(error={self.error!r})" if self.error else f"JobResult({self._value!r})"


class Batch(Generic[R]):
    """Jobs that may run side by side, and a completion that is called once all have ended.

    Not locked: its maker fills it on one thread, and hands it over.
    """

    __slots__ = ("_completion", "_jobs", "_left", "_results", "_started")

    def __init__(self) -> None:
        self._jobs: list[tuple[Callable[[], R], TaggedThread | None]] = []
        self._completion: tuple[Callable[[list[JobResult[R]]], object], TaggedThread | NodeThread | None] | None = None
        self._results: list[JobResult[R] | None] = []
        self._left = 0  # jobs that have not ended
        self._started = False

    def __len__(self) -> int:
        return len(self._jobs)

    def add_job(self, job: Callable[[], R], thread: TaggedThread | None = None) -> None:
        """Add a job.

        Args:
            job: called on a worker thread; what it returns or raises is its result.
            thread: run it on this thread instead.

        Raises:
            ConfigError: `thread` is the node's own, on which a job would hold up everything.
            LocalProtocolError: the batch was submitted.
        """
        self._check_not_started()
        if thread is not None and not isinstance(thread, TaggedThread):
            raise ConfigError("thread is the node's own: a job there would hold up all connections")
        self._jobs.append((job, thread))

    def completion(
        self, done: Callable[[list[JobResult[R]]], object], thread: TaggedThread | NodeThread | None = None
    ) -> None:
        """Set what is called once all jobs have ended, with their results in the order in which they were added.

        Args:
            done: called as a job: on a worker thread. What it raises is reported.
            thread: run it on this thread instead.

        Raises:
            LocalProtocolError: it is set already, or the batch was submitted.
        """
        self._check_not_started()
        if self._completion is not None:
            raise LocalProtocolError("a batch has one completion, and it is set")
        self._completion = (done, thread)

    # --- for the one who runs it ---------------------------------------------------------------------------------

    def threads(self) -> set[TaggedThread]:
        """Return the tagged threads that are asked for."""
        threads = {thread for _, thread in self._jobs if thread is not None}
        if self._completion is not None and isinstance(self._completion[1], TaggedThread):
            threads.add(self._completion[1])
        return threads

    def start(self) -> list[tuple[Callable[[], R], TaggedThread | None]]:
        """Return the jobs with their threads, in order; the caller runs them and calls `note_outcome` for each.

        Raises:
            LocalProtocolError: it has no jobs, or was submitted before.
        """
        self._check_not_started()
        if not self._jobs:
            raise LocalProtocolError("a batch of no jobs cannot be submitted: its completion would never be called")
        self._started = True
        self._left = len(self._jobs)
        self._results = [None] * self._left
        jobs, self._jobs = self._jobs, []
        return jobs

    @property
    def has_completion(self) -> bool:
        """Whether a completion was set."""
        return self._completion is not None

    def note_outcome(self, index: int, value: R | None, error: BaseException | None) -> bool:
        """Take the outcome of a job; True if it was the last, and `complete` is to be called."""
        self._results[index] = JobResult(value, error)
        self._left -= 1
        return not self._left

    def complete(self) -> tuple[Callable[[], object], TaggedThread | NodeThread | None] | None:
        """Return what to call now that all jobs have ended, and on which thread; None: nothing was set.

        The batch keeps nothing of it.
        """
        results = [result for result in self._results if result is not None]
        completion, self._completion, self._results = self._completion, None, []
        if completion is None:
            return None
        done, thread = completion
        return lambda: done(results), thread

    def _check_not_started(self) -> None:
        if self._started:
            raise LocalProtocolError("the batch was submitted: nothing can be added to it")
