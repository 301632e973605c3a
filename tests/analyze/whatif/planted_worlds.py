"""Worlds of which everything is known: a crowd whose lines stand still now and then, as it was planted.

A viewer of a world has a line, which carries so many times the stream and stands still at moments and for lengths that
are drawn. What limits do to it is what the server's Sender does over that line in virtual time; what is recorded of it
under limits is the same, up to where these cut it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from flowctl.analyze.whatif.job import grouped
from flowctl.analyze.whatif.stretches import STRETCH_COLUMNS, of_events, stall_columns
from flowctl.analyze.whatif.trials import DROPS
from flowctl.core.flow.state import MessageClass
from flowctl.records.flight.whatif.engine import evaluate
from flowctl.records.flight.whatif.types import (
    HELD,
    REFUSED,
    TAKEN,
    Choice,
    RecordedViewer,
    delay_bucket,
    on_grid,
    quantile_ms,
)
from flowctl.records.flight.whatif.viewing import StreamAndLink
from flowctl.records.flight.words import limits_as_dict

KEY, INTER, AUDIO = int(MessageClass.KEY), int(MessageClass.INTER), int(MessageClass.AUDIO)
FRAMES_PER_S, GOP_S, RATE, KERNEL_BYTES, SECONDS = 5, 2, 20_000.0, 6_000, 40.0
EMPTY = dict.fromkeys(STRETCH_COLUMNS)


class World(NamedTuple):
    """A kind of crowd."""

    name: str
    stall_s: Callable[[random.Random], float]  # how long a line stands still
    every_s: float  # how long it runs in between, on average
    share: float  # of viewers whose lines ever do
    rate: float = 3.0  # what lines carry otherwise, in rates of the stream


def viewer(world: World, chance: random.Random, seconds: float = SECONDS) -> RecordedViewer:
    """Return a viewer of a world as it would be recorded without any limits."""
    still, at = [], chance.expovariate(1 / world.every_s) if chance.random() < world.share else seconds
    while at < seconds:
        still.append((at, at := at + world.stall_s(chance)))
        at += chance.expovariate(1 / world.every_s)
    events: list[tuple[float, int, int]] = []
    queued, held, blocked = 0, 0.0, False
    inter = RATE / FRAMES_PER_S
    for step in range(int(seconds * FRAMES_PER_S)):
        now = on_grid((step + 1) / FRAMES_PER_S)
        size = round(inter * (2.8 if step % (FRAMES_PER_S * GOP_S) == 0 else 0.8))
        events.append((on_grid(step / FRAMES_PER_S), INTER if step % (FRAMES_PER_S * GOP_S) else KEY, size))
        queued += size
        stands = any(begin <= now < end for begin, end in still)
        held = max(held - (0.0 if stands else world.rate * inter), 0.0)
        if blocked or step % 5 == 0:
            events.append((now, HELD, round(held)))
        if blocked and held > KERNEL_BYTES / 2:
            continue
        taken = min(queued, max(round(KERNEL_BYTES + 8_000 - held), 0))
        queued, held = queued - taken, held + taken
        blocked = queued > 0
        events.append((now, REFUSED if blocked else TAKEN, taken))
    return RecordedViewer(events=events, ended_at=seconds, close_reason="peer closed")


def recorded(crowd: list[RecordedViewer], choice: Choice):
    """Return what a server under `choice` records of the crowd."""
    times = {name: getattr(choice, name) for name in ("stuck_s", "soft_too_long_s", "return_after_s")}
    settings = json.dumps({"limits": limits_as_dict(choice.limits), "policy": choice.policy, **times})
    rows = []
    for number, one in enumerate(crowd):
        (outcome,) = evaluate(one, [choice])
        ended = on_grid(outcome.watched_s)
        reason = "peer closed" if outcome.closed is None else outcome.closed.value
        link = StreamAndLink([event for event in one.events if event[0] <= ended], 0, 0, ended, reason)
        found = list(of_events(link, 1e9))
        found[0] |= stall_columns(link)
        drops = dict(zip(DROPS, outcome.dropped_messages, strict=True))
        found[-1]["recorded"] = [*(drops | {"disconnected": int(outcome.closed is not None)}).items()]
        head = {"node": "n", "conn_id": number, "picked": random.Random(number).getrandbits(62), "at": 0}
        head["settings"] = settings
        rows += [EMPTY | {"ended_us": 0} | head | {k: v for k, v in row.items() if k != "whole"} for row in found]
    return grouped(sorted(rows, key=lambda row: (row["picked"], row["conn_id"], row["at"])))


class Truth(NamedTuple):
    """What really becomes of a crowd."""

    cut: int
    missed_share: float
    dropped_share: float
    delay_p95_ms: float
    late_p95_ms: float  # with the time after a cut as the longest delay


def truth(crowd: list[RecordedViewer], choice: Choice) -> Truth:
    outcomes = [evaluate(one, [choice])[0] for one in crowd]
    delay: Counter[int] = Counter()
    gone = offered = dropped = wanted = 0
    for one, outcome in zip(crowd, outcomes, strict=True):
        delay.update(dict(outcome.delay))
        gone += one.ended_at - outcome.watched_s
        offered += sum(outcome.offered_messages)
        dropped += sum(outcome.dropped_messages)
        wanted += sum(what >= 0 for _, what, _ in one.events)
    return Truth(
        sum(outcome.closed is not None for outcome in outcomes),
        1 - (offered - dropped) / wanted,
        dropped / offered,
        quantile_ms(delay.items(), 0.95),
        quantile_ms([*delay.items(), (delay_bucket(10_000), gone)], 0.95),
    )
