"""What a cycle of the message scheduler costs: schedule, offer, send and response, with callbacks that do nothing.

Run ``python bench scheduler``. Figures are of processor time on one core, for 10 to 10,000 peers of one channel each,
in the fastest fifth of a row's cycles.
In *idle* rows a sender finds channels open and is served within its `schedule`; in *busy* rows all channels are
closed and 100,000 senders wait, so each response is followed by an offer to the next of them, which schedules itself
again; in *half* rows every other peer is closed, and the answered request is the oldest of those that are in flight.
*policies* rows are idle ones with a policy of every kind: weighted fairness, two choices, adaptive channels, ejection.
In *declined* rows 100,000 senders wait that look at each channel that opens and send on none, 1000 of them at a time: a
cycle ends when all have been asked. In *choosy* rows they have named the peers that they want, which are not there.
Beside them stands the least that any such broker does with a request: it enters one in a queue and in a table with
deadlines, and takes it out of both.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Final

from flowctl.core.outcomes.pending import Pending
from flowctl.nodes.scheduler.offer import FailureCode, Offer
from flowctl.nodes.scheduler.policies.adaptive import AdaptiveChannels
from flowctl.nodes.scheduler.policies.choice import TwoChoices
from flowctl.nodes.scheduler.policies.ejection import OutlierEjection
from flowctl.nodes.scheduler.policies.fairness import WeightedFair
from flowctl.nodes.scheduler.policy import SchedulerPolicy
from flowctl.nodes.scheduler.scheduler import MessageScheduler

PEERS: Final = (10, 100, 1000, 10_000)
WAITING: Final = 100_000
TIMEOUT_S: Final = 30.0
PARTS: Final = 5
DECLINED_CYCLES: Final = 10
QUICK: Final[dict[str, Any]] = {"cycles": 2_000, "peers": (10, 1000), "waiting": 1_000}


class Peer:
    """Keeps the ids that it was sent."""

    __slots__ = ("__weakref__", "asked", "peer_id")

    def __init__(self, peer_id: int, asked: deque[tuple[Peer, int]]) -> None:
        self.peer_id = peer_id
        self.asked = asked

    def send(self, request_id: int | None, message: Any) -> None:
        """Note the request."""
        assert request_id is not None
        self.asked.append((self, request_id))


class Demand:
    """Sends on the first channel it is offered, and waits for the answer."""

    __slots__ = ("scheduler",)

    def __init__(self, scheduler: MessageScheduler) -> None:
        self.scheduler = scheduler

    def on_offer(self, offer: Offer) -> None:
        """Send one message."""
        for channel in offer:
            offer.send(channel, None, self, TIMEOUT_S)
            return

    def on_discard(self) -> None:
        """Do nothing."""

    def on_success(self, request_id: int, response: Any) -> None:
        """Do nothing."""

    def on_failure(self, request_id: int, code: FailureCode) -> None:
        """Do nothing."""


class Again(Demand):
    """Schedules itself again, behind the others."""

    __slots__ = ()

    def on_success(self, request_id: int, response: Any) -> None:
        """Wait for the next channel."""
        self.scheduler.schedule(self)


def timed(run: Callable[[int], None], cycles: int) -> float:
    """Return the seconds of processor time of a cycle, in the fastest part of them: others use the caches too."""
    gc.collect()
    part = max(1, cycles // PARTS)
    found = []
    for _ in range(PARTS):
        begun = time.process_time()
        run(part)
        found.append((time.process_time() - begun) / part)
    return min(found)


def bare(cycles: int) -> float:
    """Return the seconds of a cycle of one queue and one table."""
    queue: deque[object] = deque()
    table: Pending[int, object] = Pending()
    demand = object()

    def run(count: int) -> None:
        for number in range(count):
            queue.append(demand)
            table.add(number, queue.popleft(), time.monotonic() + TIMEOUT_S)
            table.take(number)

    return timed(run, cycles)


def all_policies() -> SchedulerPolicy:
    """Return one policy of each kind."""
    rng = Random(1)
    return SchedulerPolicy(
        fairness=WeightedFair(type),
        choice=TwoChoices(rng),
        limits=AdaptiveChannels(),
        ejection=OutlierEjection(rng),
        useful=lambda response: response is None,
    )


def prepared(
    peers: int, policy: SchedulerPolicy | None = None
) -> tuple[MessageScheduler, list[Peer], deque[tuple[Peer, int]]]:
    """Return a scheduler, its peers, and the requests that they were sent and have not answered."""
    scheduler = MessageScheduler(policy=policy)
    asked: deque[tuple[Peer, int]] = deque()
    all_peers = [Peer(number, asked) for number in range(peers)]
    for peer in all_peers:
        scheduler.connect(peer)
    return scheduler, all_peers, asked


def idle(peers: int, cycles: int, closed: int = 0, policy: SchedulerPolicy | None = None) -> float:
    """Return the seconds of a cycle where `closed` peers are busy and the others are free."""
    scheduler, _all_peers, asked = prepared(peers, policy)
    demands = [Demand(scheduler) for _ in range(closed + 1)]
    for demand in demands[:closed]:
        scheduler.schedule(demand)
    last = demands[-1]

    def run(count: int) -> None:
        for _ in range(count):
            scheduler.schedule(last)
            peer, request_id = asked.popleft()
            scheduler.receive(peer, None, request_id)

    return timed(run, cycles)


def busy(peers: int, cycles: int, waiting: int) -> float:
    """Return the seconds of a cycle where all channels are closed and `waiting` senders wait."""
    scheduler, _all_peers, asked = prepared(peers)
    demands = [Again(scheduler) for _ in range(peers + waiting)]
    for demand in demands:
        scheduler.schedule(demand)

    def run(count: int) -> None:
        for _ in range(count):
            peer, request_id = asked.popleft()
            scheduler.receive(peer, None, request_id)

    return timed(run, cycles)


class Declines(Demand):
    """Waits for something better."""

    __slots__ = ()

    def on_offer(self, offer: Offer) -> None:
        """Leave all open."""


def declined(peers: int, cycles: int, waiting: int, wanted: tuple[int, ...] | None) -> float:
    """Return the seconds of a cycle where channels are open and `waiting` senders want others."""
    scheduler, _all_peers, asked = prepared(peers)
    loop = asyncio.new_event_loop()  # never runs: that there is one says that `expire` will be called
    scheduler.run_on(loop)
    demands = [Declines(scheduler) for _ in range(waiting)]
    for demand in demands:
        scheduler.schedule(demand, peers=wanted)
    one = Demand(scheduler)

    def run(count: int) -> None:
        for _ in range(count):
            scheduler.schedule(one)
            peer, request_id = asked.popleft()
            scheduler.receive(peer, None, request_id)
            while scheduler.next_deadline() == 0.0:  # those that were not asked yet
                scheduler.expire()

    seconds = timed(run, cycles)
    scheduler.stop()
    loop.close()
    return seconds


def run(cycles: int = 100_000, peers: tuple[int, ...] = PEERS, waiting: int = WAITING) -> list[dict[str, Any]]:
    """Measure all rows."""
    rows = []
    for count in peers:
        for load, measure in (
            ("idle", partial(idle, count, cycles)),
            ("half", partial(idle, count, cycles, count // 2)),
            ("busy", partial(busy, count, cycles, waiting)),
            ("policies", partial(idle, count, cycles, 0, all_policies())),
            ("declined", partial(declined, count, DECLINED_CYCLES, waiting, None)),
            ("choosy", partial(declined, count, cycles, waiting, (-1,))),
        ):
            beside = bare(cycles)
            seconds = measure()
            rows.append(
                {
                    "peers": count,
                    "load": load,
                    "waiting": waiting if load in ("busy", "declined", "choosy") else 0,
                    "us a cycle": round(seconds * 1e6, 2),
                    "cycles/s": round(1 / seconds),
                    "us of queue and table": round(beside * 1e6, 2),
                    "ratio": round(seconds / beside, 1),
                }
            )
    return rows


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=100_000, help="cycles of each row")
    parser.add_argument("--waiting", type=int, default=WAITING, help="senders that wait in the busy rows")
    options = parser.parse_args()
    for row in run(options.cycles, waiting=options.waiting):
        print("  ".join(f"{name}: {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
