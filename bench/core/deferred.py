"""How many deferred jobs per second one thread schedules and runs, and how many another thread can hand it.

Run ``python bench deferred``. Each way of ours stands beside the plainest thing that a program could do
instead: a `collections.deque` of callbacks on one thread, and ``loop.call_soon_threadsafe`` between two. Neither
knows idempotence, revoking, moving between threads or rounds, so a ratio below 1 is the price of these. Figures of
one machine at one moment mean little by themselves: compare the ratio. The best of several repetitions counts.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from flowctl.deferred import DeferredProcessor, Job, Registration
from flowctl.pollgroup import PollGroup

#: As many connections have a job to run in one round, as after one message of a stream with so many viewers.
CONNECTIONS: Final = 1000
_LIMIT_S: Final = 60.0


def _nothing() -> None:
    """Stand in for a flush that finds nothing to do: the job itself costs a call and no more."""


def _make_jobs(processor: DeferredProcessor, callback: Callable[[], bool | None]) -> list[tuple[Registration, Job]]:
    pairs = []
    for _ in range(CONNECTIONS):
        registration = Registration()
        registration.bind(processor)
        pairs.append((registration, registration.job(callback, "bench")))
    return pairs


def own_thread(rounds: int) -> float:
    """Schedule a job of each connection, run them in one round, again and again; jobs per second."""
    processor = DeferredProcessor(_nothing)
    pairs = _make_jobs(processor, _nothing)
    began = time.perf_counter()
    for _ in range(rounds):
        for registration, job in pairs:
            registration.schedule(job)
        processor.run_round()
    return rounds * CONNECTIONS / (time.perf_counter() - began)


def own_thread_deque(rounds: int) -> float:
    """Do the same with a deque of callbacks."""
    queue: deque[Callable[[], None]] = deque()
    began = time.perf_counter()
    for _ in range(rounds):
        for _ in range(CONNECTIONS):
            queue.append(_nothing)
        for _ in range(len(queue)):
            queue.popleft()()
    return rounds * CONNECTIONS / (time.perf_counter() - began)


def pending(rounds: int) -> float:
    """Schedule jobs that are pending already, as those of viewers marked for a flush; calls per second."""
    pairs = _make_jobs(DeferredProcessor(_nothing), _nothing)
    for registration, job in pairs:
        registration.schedule(job)
    began = time.perf_counter()
    for _ in range(rounds):
        for registration, job in pairs:
            registration.schedule(job)
    return rounds * CONNECTIONS / (time.perf_counter() - began)


def pending_set(rounds: int) -> float:
    """Do the same with a set of connections, the plainest idempotent list."""
    connections = [object() for _ in range(CONNECTIONS)]
    marked = set(connections)
    began = time.perf_counter()
    for _ in range(rounds):
        for connection in connections:
            if connection not in marked:
                marked.add(connection)
    return rounds * CONNECTIONS / (time.perf_counter() - began)


class _Counter:
    """Counts runs on the group's thread and tells when a wave of them is complete."""

    def __init__(self) -> None:
        self.count = 0
        self.complete = threading.Event()

    def run(self) -> None:
        self.count += 1
        if self.count == CONNECTIONS:
            self.count = 0
            self.complete.set()

    def wait(self) -> None:
        if not self.complete.wait(_LIMIT_S):
            raise TimeoutError(f"a wave of {CONNECTIONS} jobs was not run within {_LIMIT_S:g} s")
        self.complete.clear()


def _with_group(loop: str, work: Callable[[PollGroup], float]) -> float:
    group = PollGroup("bench", loop_factory=LOOPS[loop])
    group.start()
    try:
        return work(group)
    finally:
        group.stop()


def _schedule_waves(rounds: int, group: PollGroup) -> float:
    counter = _Counter()
    pairs = _make_jobs(group.processor, counter.run)
    began = time.perf_counter()
    for _ in range(rounds):
        for registration, job in pairs:
            registration.schedule(job)
        counter.wait()
    return rounds * CONNECTIONS / (time.perf_counter() - began)


def _call_waves(rounds: int, group: PollGroup) -> float:
    counter = _Counter()
    call = group.loop.call_soon_threadsafe
    began = time.perf_counter()
    for _ in range(rounds):
        for _ in range(CONNECTIONS):
            call(counter.run)
        counter.wait()
    return rounds * CONNECTIONS / (time.perf_counter() - began)


def other_thread(loop: str, rounds: int) -> float:
    """Schedule a job of each connection from this thread, wait until the group's thread ran them; jobs per second."""
    return _with_group(loop, partial(_schedule_waves, rounds))


def other_thread_call_soon(loop: str, rounds: int) -> float:
    """Do the same with one call_soon_threadsafe per job."""
    return _with_group(loop, partial(_call_waves, rounds))


def _uvloop() -> Any:
    import uvloop  # noqa: PLC0415 - not installed everywhere, and only this way needs it

    return uvloop.new_event_loop()


def _asyncio() -> Any:
    import asyncio  # noqa: PLC0415 - beside its rival

    return asyncio.new_event_loop()


LOOPS: Final[dict[str, Callable[[], Any]]] = {"uvloop": _uvloop, "asyncio": _asyncio}


QUICK: Final[dict[str, Any]] = {"rounds": 5, "repeat": 1}
"""Arguments of `run` for a look at whether it works, in a second or so."""


def run(*, rounds: int = 200, repeat: int = 3) -> list[dict[str, Any]]:
    """Measure every way beside its plain rival."""
    ways: list[tuple[str, Callable[[int], float], str, Callable[[int], float]]] = [
        ("schedule and run, own thread", own_thread, "deque of callbacks", own_thread_deque),
        ("schedule when pending", pending, "set of connections", pending_set),
    ]
    ways += [
        (
            f"schedule and run, from another thread, {loop}",
            partial(other_thread, loop),
            "call_soon_threadsafe",
            partial(other_thread_call_soon, loop),
        )
        for loop in LOOPS
    ]
    rows = []
    for way, ours, rival, theirs in ways:
        pairs = [(ours(rounds), theirs(rounds)) for _ in range(repeat)]  # in turns: a busy machine hurts both
        best, rival_best = (max(figures) for figures in zip(*pairs, strict=True))
        rows.append(
            {
                "way": way,
                "per_second": round(best),
                "rival": rival,
                "rival_per_second": round(rival_best),
                "ratio": round(best / rival_best, 2),
            }
        )
    return rows


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200, help="waves of 1000 jobs per measurement (default 200)")
    parser.add_argument("--repeat", type=int, default=3, help="measurements of each; the fastest counts (default 3)")
    arguments = parser.parse_args()
    print(f"{'way':<48} {'per second':>12}  {'rival':<22} {'per second':>12} {'ratio':>6}")
    for row in run(rounds=max(1, arguments.rounds), repeat=max(1, arguments.repeat)):
        print(
            f"{row['way']:<48} {row['per_second']:>12,}  {row['rival']:<22} {row['rival_per_second']:>12,}"
            f" {row['ratio']:>6.2f}"
        )


if __name__ == "__main__":
    main()
