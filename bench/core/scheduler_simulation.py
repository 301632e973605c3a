"""What policies of a scheduler are worth: a real `MessageScheduler` and 1000 simulated peers, in virtual time.

Run ``python bench scheduler_simulation``. Peers work on a few messages at a time, the rest wait there; most are quick,
some slow, some answer at once with errors, some do not answer half of the time, and now and then one leaves for three
seconds. Three classes of senders share them: *questions*, which come at random and are each asked until answered,
*urgent* ones, a tenth of them, of a higher priority, and *bulk* senders, which always want as many messages under way
as they may have, some four times as many as others.

Beside each other stand the policies, under half of the load that the peers could carry and under more than all of it.
Virtual time and seeded dice: the same figures on any machine, to the last digit.
"""

from __future__ import annotations

import argparse
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

from flowctl.charts import page
from flowctl.charts.pictures import Lines, Series
from flowctl.core.outcomes.backoff import Backoff
from flowctl.nodes.scheduler.offer import FailureCode, Offer
from flowctl.nodes.scheduler.policies.adaptive import AdaptiveChannels, AdaptiveSettings
from flowctl.nodes.scheduler.policies.choice import TwoChoices
from flowctl.nodes.scheduler.policies.ejection import EjectionSettings, OutlierEjection
from flowctl.nodes.scheduler.policy import SchedulerPolicy
from flowctl.nodes.scheduler.requests.hedging import Hedging
from flowctl.nodes.scheduler.requests.requester import Requester
from flowctl.nodes.scheduler.scheduler import MessageScheduler
from kit import charts
from kit.tables import print_rows, table

SEED: Final = 14
CHANNELS: Final = 2
"""Of a peer at the beginning; rippled's."""
TICK_S: Final = 1 / 64
"""How often what has come to its time is looked for: as fine as the scheduler's deadlines are."""
TRY_S: Final = 4.0
"""Timeout of a message of a bulk sender; that of a question is up to the requester."""
URGENT: Final = 5
"""Priority of urgent questions."""
AWAY_S: Final = 3.0
LEAVE_EVERY_S: Final = 0.25
STALLS: Final = 0.02
"""Share of messages that take a peer `STALL` times as long: a garbage collection, a full disk."""
STALL: Final = 8.0
ERROR: Final = "error"
ANSWER: Final = "answer"
PLACES: Final = (*range(500, 990, 10), *range(990, 1000))
"""Of the answers, in thousandths: where the picture has points."""
CHART: Final = "scheduler.svg"
HEADS: Final = {
    "load": "load",
    "policy": "policy",
    "good_per_s": "good answers per s",
    "wasted": "work for nothing %",
    "duplicates": "duplicate work %",
    "jain": "Jain",
    "wait_p99_ms": "wait p99 ms",
    "answer_p50_ms": "answer p50 ms",
    "answer_p99_ms": "answer p99 ms",
    "urgent_p99_ms": "urgent p99 ms",
    "failed": "failed %",
    "channels": "channels per peer",
}
"""Columns of the document."""
QUICK: Final[dict[str, Any]] = {"peers": 60, "seconds": 4.0, "warm_s": 1.0}
"""Arguments of `run` for a look at whether it works, in seconds."""


@dataclass(frozen=True)
class Kind:
    """A kind of peer.

    Args:
        mean_s: of the time that a message takes it (gamma distribution of shape 4), but for stalls.
        fails: share of messages that it never answers.
    """

    name: str
    share: float
    mean_s: float
    fails: float = 0.0
    error: bool = False


KINDS: Final = (
    Kind("quick", 0.60, 0.2),
    Kind("ordinary", 0.23, 0.6),
    Kind("slow", 0.10, 2.0),
    Kind("silent", 0.04, 0.3, fails=0.5),
    Kind("erring", 0.03, 0.02, error=True),
)
CASES: Final = ("first come", "two choices", "adaptive", "ejection", "hedged", "all together")


@dataclass(frozen=True)
class Load:
    """How much is asked, per peer: questions a second, and messages that bulk senders want under way."""

    name: str
    questions_per_s: float
    bulk_window: float


LOADS: Final = (Load("half", 1.0, 0.8), Load("full", 1.0, 24.0))
BULK_SENDERS: Final = 40


class Simulation:
    """Virtual time, and what is to happen in it."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.rng = Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later."""
        heappush(self._events, (self.now + delay_s, next(self._numbers), action))

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, action = heappop(self._events)
            action()
        self.now = end


class SimulatedPeer:
    """Works on up to `workers` messages at a time; the others wait."""

    def __init__(self, world: World, peer_id: int, kind: Kind, workers: int) -> None:
        self.world, self.peer_id, self.kind, self.workers = world, peer_id, kind, workers
        self.waiting: deque[int] = deque()
        self.working = 0
        self.life = 0  # what was sent to an earlier one is not answered

    def send(self, request_id: int | None, _message: object) -> None:
        if request_id is not None:
            self.waiting.append(request_id)
            self._work()

    def _work(self) -> None:
        simulation = self.world.simulation
        while self.waiting and self.working < self.workers:
            self.working += 1
            silent = simulation.rng.random() < self.kind.fails
            service_s = simulation.rng.gammavariate(4.0, self.kind.mean_s / 4)
            if simulation.rng.random() < STALLS:
                service_s *= STALL
            simulation.at(service_s, partial(self._done, self.waiting.popleft(), self.life, silent=silent))

    def _done(self, request_id: int, life: int, *, silent: bool) -> None:
        if life != self.life:
            return
        self.working -= 1
        self._work()
        self.world.worked += 1
        if not silent:
            self.world.scheduler.receive(self, ERROR if self.kind.error else ANSWER, request_id)

    def leave(self) -> None:
        """Drop everything and go; come back later."""
        self.life += 1
        self.waiting.clear()
        self.working = 0
        self.world.scheduler.disconnect(self.peer_id)
        self.world.simulation.at(AWAY_S, self.come)

    def come(self) -> None:
        """Connect."""
        self.world.scheduler.connect(self, CHANNELS)


class BulkSender:
    """Wants `window` messages under way, always."""

    def __init__(self, world: World, window: int) -> None:
        self.world, self.window = world, window
        # Where there is less than all want, each is due the same; where there is enough, what it wants.
        self.wanted = window if world.load.bulk_window < CHANNELS else 1
        self.under_way = 0
        self.answered = 0

    def on_offer(self, offer: Offer) -> None:
        """Send as much as is wanted and allowed, and wait for more."""
        for channel in offer:
            if self.under_way == self.window:
                break
            if channel.send("bulk", self, TRY_S) is not None:
                self.under_way += 1
        if self.under_way < self.window:
            self.world.scheduler.schedule(self)
        elif not offer.sent_count:
            offer.withdraw()

    def on_discard(self) -> None:
        """Stop."""

    def on_success(self, _request_id: int, response: Any) -> None:
        """Count an answer of use; ask for the next."""
        if response == ANSWER:
            self.world.counted()
            self.answered += self.world.measuring
        self._again()

    def on_failure(self, _request_id: int, _code: FailureCode) -> None:
        """Ask for the next."""
        self._again()

    def _again(self) -> None:
        self.under_way -= 1
        self.world.scheduler.schedule(self)


class World:
    """One scheduler, its peers and senders, and what became of their questions."""

    def __init__(self, case: str, load: Load, peers: int, seed: int) -> None:
        self.simulation = simulation = Simulation(seed)
        together = case == "all together"
        self.hedging = Hedging() if together or case == "hedged" else None
        self.scheduler = MessageScheduler(
            lambda: simulation.now, Random(seed), policy_of(case, Random(seed + 1)), on_error=raise_error
        )
        self.load, self.peers_count = load, peers
        self.peers = made_peers(self, peers)
        self.bulk = [
            BulkSender(self, max(1, round(load.bulk_window * peers / BULK_SENDERS * (1.6 if number % 2 else 0.4))))
            for number in range(BULK_SENDERS)
        ]
        self.measuring = False
        self.worked = 0  # messages that peers have worked on
        self.good = 0  # answers of use
        self.waits_s: list[float] = []  # of questions: from their beginning to their first sending
        self.answers_s: list[float] = []  # and to their answer
        self.urgent_s: list[float] = []
        self.failed = 0
        self.good_by_second: list[int] = []
        self._begin()

    def _begin(self) -> None:
        for peer in self.peers:
            peer.come()
        for sender in self.bulk:
            self.scheduler.schedule(sender)
        for action in (self._tick, self._ask, self._leave, self._second):
            action()

    def _tick(self) -> None:
        self.scheduler.expire()
        self.simulation.at(TICK_S, self._tick)

    def _second(self) -> None:
        self.good_by_second.append(self.good)
        self.simulation.at(1.0, self._second)

    def _leave(self) -> None:
        peer = self.peers[self.simulation.rng.randrange(self.peers_count)]
        peer.leave()
        self.simulation.at(LEAVE_EVERY_S * 1000 / self.peers_count, self._leave)

    def _ask(self) -> None:
        rng = self.simulation.rng
        Question(self, urgent=rng.random() < 0.1)
        self.simulation.at(rng.expovariate(self.load.questions_per_s * self.peers_count), self._ask)

    def counted(self) -> None:
        """Count an answer of use."""
        self.good += 1


class Question:
    """One question, and when its message was first sent."""

    def __init__(self, world: World, *, urgent: bool) -> None:
        self.world, self.urgent = world, urgent
        self.begun = world.simulation.now
        self.measured = world.measuring
        self.sent_at: float | None = None
        requester = Requester(
            world.scheduler,
            self._message,
            lambda response: response if response == ANSWER else None,
            priority=URGENT if urgent else 0,
            timeout_s=20.0,
            hedging=world.hedging,
        )
        requester.future.add_done_callback(self._ended)
        requester.start()

    def _message(self) -> str:
        if self.sent_at is None:
            self.sent_at = self.world.simulation.now
        return "question"

    def _ended(self, future: Any) -> None:
        world = self.world
        if future.exception() is not None:
            world.failed += self.measured
            return
        world.counted()
        if self.measured and self.sent_at is not None:
            world.waits_s.append(self.sent_at - self.begun)
            world.answers_s.append(world.simulation.now - self.begun)
            if self.urgent:
                world.urgent_s.append(world.simulation.now - self.begun)


def raise_error(where: str, error: Exception) -> None:
    """Stop: a mistake in a callback would spoil the figures."""
    raise SystemExit(f"error: {where}: {error!r}")


def policy_of(case: str, rng: Random) -> SchedulerPolicy:
    together = case == "all together"
    options: dict[str, Any] = {"useful": lambda response: response == ANSWER}
    if together or case == "two choices":
        options["choice"] = TwoChoices(rng)
    if together or case == "adaptive":
        options["limits"] = AdaptiveChannels(AdaptiveSettings(ceiling=16))
    if together or case == "ejection":
        away = Backoff(first_s=5.0, factor=2.0, most_s=60.0, jitter=0.2)
        options["ejection"] = OutlierEjection(rng, EjectionSettings(away=away))
    return SchedulerPolicy(**options)


def made_peers(world: World, peers: int) -> list[SimulatedPeer]:
    """Return peers of all kinds, in random order, with 2 to 8 workers each."""
    rng = Random(SEED)
    kinds = [kind for kind in KINDS for _ in range(round(kind.share * peers))]
    kinds += [KINDS[0]] * (peers - len(kinds))
    rng.shuffle(kinds)
    return [SimulatedPeer(world, peer_id, kind, rng.randint(2, 8)) for peer_id, kind in enumerate(kinds[:peers])]


def jain(values: list[float]) -> float:
    """Return Jain's index of fairness: 1, all have the same; 1/n, one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0


def percentile_ms(values_s: list[float], share: float) -> float:
    """Return a percentile in milliseconds."""
    return sorted(values_s)[min(len(values_s) - 1, int(share * len(values_s)))] * 1000 if values_s else 0.0


def measure(case: str, load: Load, peers: int, seconds: float, warm_s: float, seed: int) -> dict[str, Any]:
    """Run one case and return its row."""
    world = World(case, load, peers, seed)
    world.simulation.run(warm_s)
    world.measuring = True
    good, worked, hedging = world.good, world.worked, world.hedging
    duplicates = hedging.duplicate_count if hedging else 0
    world.simulation.run(seconds - warm_s)
    figures = world.scheduler.statistics()
    span_s = seconds - warm_s
    good, worked = world.good - good, world.worked - worked
    duplicates = (hedging.duplicate_count if hedging else 0) - duplicates
    return {
        "load": load.name,
        "policy": case,
        "good_per_s": round(good / span_s, 1),
        "wasted": round(1 - good / worked, 4),
        "duplicates": round(duplicates / worked, 4),
        "jain": round(jain([sender.answered / sender.wanted for sender in world.bulk]), 3),
        "wait_p99_ms": round(percentile_ms(world.waits_s, 0.99), 1),
        "answer_p50_ms": round(percentile_ms(world.answers_s, 0.5), 1),
        "answer_p99_ms": round(percentile_ms(world.answers_s, 0.99), 1),
        "urgent_p99_ms": round(percentile_ms(world.urgent_s, 0.99), 1),
        "failed": round(world.failed / (world.failed + len(world.answers_s)), 4),
        "channels": round((figures.open_channels + figures.closed_channels) / peers, 2),
        "good_by_second": [after - before for before, after in pairwise(world.good_by_second)],
        "answers_ms": [round(percentile_ms(world.answers_s, place / 1000), 1) for place in PLACES],
    }


def run(*, peers: int = 1000, seconds: float = 12.0, warm_s: float = 4.0, seed: int = SEED) -> list[dict[str, Any]]:
    """Run all cases."""
    log = logging.getLogger("flowctl.scheduler")
    level = log.level
    log.setLevel(logging.ERROR)  # late answers are what is simulated
    try:
        return [measure(case, load, peers, seconds, warm_s, seed) for load in LOADS for case in CASES]
    finally:
        log.setLevel(level)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=12.0, help="of virtual time, for each case")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = run(peers=arguments.peers, seconds=arguments.seconds, warm_s=arguments.seconds / 3, seed=arguments.seed)
    print_rows(rows if arguments.json else shown(rows), as_json=arguments.json)


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without what is for the picture."""
    return [{key: value for key, value in row.items() if not isinstance(value, list)} for row in rows]


def document(rows: list[dict[str, Any]], images: Path) -> str:
    """Draw the picture, and return the part of the document: picture and table."""
    alt = "Time to the answer of questions under half load, and good answers a second under full load, by policy"
    chart(rows, images / CHART, alt)
    shares = ("wasted", "duplicates", "failed")
    written = [{**row, **{key: row[key] * 100 for key in shares}} for row in rows]
    lines = [{head: row[key] for key, head in HEADS.items()} for row in written]
    return f"![{alt}](images/{CHART})\n\n{table(lines)}"


def chart(rows: list[dict[str, Any]], path: Path, alt: str) -> None:
    """Draw answers by their place, and good answers over time."""
    half, full = ([row for row in rows if row["load"] == load.name] for load in LOADS)
    answers = Lines(
        name="answers",
        title="half load: how long questions take",
        description=", ".join(f"{row['policy']}: {row['answer_p99_ms']:.0f} ms at 99 %" for row in half),
        series=[
            Series(row["policy"], [(p / 10, ms) for p, ms in zip(PLACES, row["answers_ms"], strict=True)], place)
            for place, row in enumerate(half, 1)
        ],
        x_label="percentile of questions (from the median on)",
        y_label="ms until the answer",
    )
    good = Lines(
        name="good",
        title="full load: good answers a second",
        description=", ".join(f"{row['policy']}: {row['good_per_s']:.0f} a second" for row in full),
        series=[
            Series(row["policy"], [(second + 1, n) for second, n in enumerate(row["good_by_second"])], place)
            for place, row in enumerate(full, 1)
        ],
        x_label="seconds of virtual time",
        y_label="good answers a second",
    )
    charts.save([page.Figure(answers), page.Figure(good)], path, alt)


if __name__ == "__main__":
    main()
