"""The script of synthetic events: who comes, what happens to each of them, and how often (pure).

Theory of operation. Time is cut into *waves* of equal length; in each wave each *client* comes once, and that is a
*visit*. What a client is, its `Kind`, is fixed; what happens during a visit is one of 16 variants of that kind. A
variant is a list of `Step`: every event of every connection of the visit, with its place in time as a share of the
connection. So the whole data set is one join, visits with steps, and every figure of a row is arithmetic on hashes of
the visit's number: nothing depends on how Spark cuts the work into tasks. Edges of states are consistent by
construction: a step knows the place of the edge before it, so that `state_ms` is the difference of two times of the
same connection, and their sum with that of `conn_closed` is how long it was connected.

Planted are honest viewers who look bad (links that are too slow, that stall, many phones behind one address) and
abusers who look as innocent as they can, half of them behind addresses that honest ones use too: NAT, a /64 of IPv6,
proxies. So the set is a fair test of `flowctl analyze abuse`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from flowctl.errors import ConfigError
from flowctl.pipeline.synth.kinds import FIRST_ABUSER, FIRST_SLOW, KINDS
from flowctl.pipeline.synth.steps import SLOTS, Step, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthOptions:
    """What to make.

    Args:
        events: about how many events; at most `MOST_EVENTS`. The number made differs by a few per cent.
        seed: of everything that is random.
        viewers: clients. None: so many that each comes `WAVES` times.
        days: time that the events span.
        start_s: when they begin, seconds since the epoch (UTC).
        slow: share of clients that are honest and slow, 0 to 1.
        abusers: share of clients that are abusers, 0 to 1.
        streams: number of streams. None: one for 200 clients, 5 at least.
        nodes: number of servers.
        samples_s: interval of `flow_samples`, seconds. None: that table is not made.
        truth: whether the planted addresses are written beside.
        replace: whether what was made in the folder before is replaced. False: it is an error.
    """

    events: int = 100_000
    seed: int = 1
    viewers: int | None = None
    days: float = 1.0
    start_s: int = 1_767_225_600
    slow: float = 0.05
    abusers: float = 0.01
    streams: int | None = None
    nodes: int = 4
    samples_s: float | None = None
    truth: bool = True
    replace: bool = False

    def __post_init__(self) -> None:
        _within("--events", self.events, 1, MOST_EVENTS)
        _within("--days", self.days, 0.001, 366)
        _within("--slow", self.slow, 0, 1)
        _within("--abusers", self.abusers, 0, 1 - self.slow)
        _within("--nodes", self.nodes, 1, 1000)
        if self.viewers is not None:
            _within("--viewers", self.viewers, 1, MOST_VIEWERS)
        if self.streams is not None:
            _within("--streams", self.streams, 1, 1_000_000)
        if self.samples_s is not None:
            _within("--samples", self.samples_s, 0.1, 3600)


MOST_EVENTS: Final = 100_000_000_000
"""A terabyte or so; beyond, the numbers of connections would no longer fit beside their second."""
MOST_VIEWERS: Final = 16_000_000
"""Addresses of 240.0.0.0/8, one for each."""
WAVES: Final = 8


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value:g}, allowed is {low:g} to {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """How many come, and who they are: all that follows from `SynthOptions`.

    Args:
        clients: how many.
        waves: how often each comes.
        wave_s: length of a wave.
        streams: number of streams.
        addresses: addresses that phones share.
        proxies: addresses that one in twenty ordinary clients comes from.
        shares: upper end of each kind's part of the clients, rising to 1.
    """

    clients: int
    waves: int
    wave_s: float
    streams: int
    addresses: int
    proxies: int
    shares: tuple[float, ...] = field(default_factory=tuple)

    @property
    def visits(self) -> int:
        """Visits in all."""
        return self.clients * self.waves


def shares_of(options: SynthOptions) -> list[float]:
    """Return which part of the clients each of `KINDS` is."""
    ordinary = 1.0 - options.slow - options.abusers
    return [
        kind.share * (ordinary if number < FIRST_SLOW else options.slow if number < FIRST_ABUSER else options.abusers)
        for number, kind in enumerate(KINDS)
    ]


def plan(options: SynthOptions) -> Cast:
    """Return how many clients come how often, so that about `options.events` events are the result."""
    shares = shares_of(options)
    mean = sum(share * kind.mean_events for share, kind in zip(shares, KINDS, strict=True))
    visits = max(1.0, options.events / mean)
    clients = options.viewers or min(MOST_VIEWERS, max(1, round(visits / WAVES)))
    waves = max(1, round(visits / clients))
    ends, total = [], 0.0
    for share in shares:
        total += share
        ends.append(total)
    ends[-1] = 1.0
    return Cast(
        clients=clients,
        waves=waves,
        wave_s=options.days * 86400 / waves,
        streams=options.streams or max(5, clients // 200),
        addresses=max(1, round(clients * shares[2] / 200)),
        proxies=max(1, clients // 2000),
        shares=tuple(ends),
    )


def steps_by_key() -> Iterator[tuple[int, Variant, Step]]:
    """Yield every step of every connection of every variant, with its key: number of the kind * `SLOTS` + slot."""
    for number, kind in enumerate(KINDS):
        slot = 0
        for variant in kind.variants:
            for _ in range(variant.slots):
                for connection in range(variant.connections):
                    for step in variant.steps:
                        yield number * SLOTS + slot, variant, replace(step, connection=connection)
                slot += 1
