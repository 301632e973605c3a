"""What a load run is: the crowd, the streams it plays, when peers join, how long it lasts, and its bounds (pure).

Everything is bounded before anything is started: peers by `MAX_PEERS`, time by `MAX_SECONDS`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Final, Literal

from flowctl.errors import ConfigError
from flowctl.load.profiles import HEALTHY, MAX_SECONDS, parse_profile
from flowctl.load.results.result import PeerKind
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.url import TLS_SCHEMES

MAX_PEERS: Final = 20_000
MAX_PUBLISHERS: Final = 1000
MAX_WORKERS: Final = 64
VIEWERS_PER_WORKER: Final = 1500

_AUDIO_BIT_RATE: Final = 128_000

READ_COST: Final = 200e-6
"""Share of a core that a viewer takes who reads 2.5 Mbit/s in pieces of 40 ms and discards it: 150 to 210 us per second
were measured, nearly all of it the kernel's."""

PARSE_COST: Final = 280e-6
"""Share of a core that it costs more to copy and skim those 77 messages per second: 420 to 510 us in all."""

TLS_COST: Final = 600e-6
"""Share of a core that it costs more to decrypt the same, parsed or not."""

_BUDGET: Final = 0.7
"""Share of the cores beside the server that the crowd may take: with more, delays would be those of the tester."""

_LEAST_FOR_PARSING: Final = 0.05
"""Cores for parsing that every crowd gets: 250 parsed viewers, enough for percentiles."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """One load run."""

    url: str  # ``rtmp://host[:port]/app/stream``, or ``http://`` and ``ws://`` with ``.flv``; or with TLS
    # how many viewers of each profile, as `parse_crowd` returns it
    profiles: Mapping[str, int] = dataclasses.field(default_factory=lambda: {HEALTHY: 1})
    publishers: int = 0  # how many of our own publishers, 0 to `MAX_PUBLISHERS`; 0 plays what is there
    # file with what each viewer brings behind the name, a query in a line; they are taken in turn. None: nothing more.
    query_file: str | None = None
    # number of streams that the viewers are spread over. None: as many as publishers, at least 1. With more than one
    # they are named ``stream-1``, ``stream-2`` and so on.
    streams: int | None = None
    # FLV file to publish, again and again. None: a synthetic stream with numbered and stamped frames.
    source: str | None = None
    bit_rate: int = 2_500_000  # rate of the synthetic stream, bits per second, audio included
    fps: float = 30.0
    key_interval_s: float = 2.0
    key_frame_bytes: int | None = None  # size of its key frames. None: by the bit rate.
    disposable_every: int = 0
    ramp_s: float = 0.0  # time over which the viewers join, evenly
    duration_s: float = 10.0  # time from the end of the ramp to the end of the run
    # ``duration``, or ``stream-end``: the run ends sooner when all viewers are gone
    until: Literal["duration", "stream-end"] = "duration"
    # whether each viewer has its own source address of 127.0.0.0/8, for servers that limit connections per address.
    # Loopback only. None: where the address that the server's name stands for allows it.
    spread_addresses: bool | None = False
    workers: int | None = None  # processes for viewers. None: by number of viewers and cores.
    # every n-th viewer of a profile is parsed, 1 all of them. None: as many as the processors of this machine can take
    # beside the server.
    measure_every: int | None = None
    # process of the server, on this machine, to be watched with its children. None: none.
    server_pid: int | None = None
    allow_remote: bool = False
    connect_timeout_s: float = 10.0
    command: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("publishers", 0, MAX_PUBLISHERS),
            ("streams", 1, MAX_PUBLISHERS),
            ("ramp_s", 0, MAX_SECONDS),
            ("duration_s", 0.1, MAX_SECONDS),
            ("workers", 1, MAX_WORKERS),
            ("measure_every", 1, MAX_PEERS),
            ("connect_timeout_s", 0.1, 600),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} is {value:g}, allowed is {low:g} to {high:g}")
        if self.length_s > MAX_SECONDS:
            raise ConfigError(f"ramp_s and duration_s are more than {MAX_SECONDS:g} s together")
        if self.until not in ("duration", "stream-end"):
            raise ConfigError(f"until is {self.until!r}, allowed is 'duration' or 'stream-end'")
        if self.publishers and self.streams is not None and self.streams != self.publishers:
            raise ConfigError(f"streams is {self.streams} and publishers is {self.publishers}: one each")
        self._check_crowd()

    def _check_crowd(self) -> None:
        for name, count in self.profiles.items():
            choice = parse_profile(name)
            if (choice.manner.join_at_s or 0.0) >= self.length_s:
                raise ConfigError(f"profile {name!r} comes when the run is over", hint="raise duration_s")
            if count < 0:
                raise ConfigError(f"profile {name!r} has {count} viewers")
        if not 1 <= self.peers <= MAX_PEERS:
            raise ConfigError(
                f"there are {self.peers} viewers, allowed is 1 to {MAX_PEERS}", hint="use several runs side by side"
            )

    @property
    def length_s(self) -> float:
        return self.ramp_s + self.duration_s

    def synthetic(self, seed: int) -> SyntheticSource:
        """Return the synthetic source; low rates leave less for sound."""
        audio = min(_AUDIO_BIT_RATE, self.bit_rate // 8)
        return SyntheticSource(
            video_bit_rate=self.bit_rate - audio,
            audio_bit_rate=audio,
            fps=self.fps,
            key_interval_s=self.key_interval_s,
            key_frame_bytes=self.key_frame_bytes,
            disposable_every=self.disposable_every,
            seed=seed,
        )

    @property
    def peers(self) -> int:
        return sum(self.profiles.values())

    @property
    def stream_count(self) -> int:
        return self.streams or max(self.publishers, 1)

    def stream_name(self, name: str, index: int) -> str:
        return name if self.stream_count == 1 else f"{name}-{index + 1}"

    def worker_count(self, cores: int) -> int:
        if self.workers is not None:
            return min(self.workers, self.peers)
        return max(1, min(cores, math.ceil(self.peers / VIEWERS_PER_WORKER)))

    def parsed_every(self, cores: int) -> int:
        """Return which part of the viewers is parsed: every n-th of each profile."""
        if self.measure_every is not None:
            return self.measure_every
        budget = max(cores - 1, 0.5) * _BUDGET  # one for the server
        read_cost = READ_COST + (TLS_COST if self.url.partition(":")[0].lower() in TLS_SCHEMES else 0.0)
        left = max(budget - self.peers * read_cost, _LEAST_FOR_PARSING)
        return max(1, math.ceil(self.peers * PARSE_COST / left))

    def assignments(self, cores: int) -> list[PeerOrder]:
        """Return all peers in the order in which they join: profiles are mixed evenly, streams taken in turn."""
        every = self.parsed_every(cores)
        orders: list[PeerOrder] = []
        waiting: list[tuple[float, int, str, int]] = []  # place in the crowd, profile, its name, number within it
        for place, (name, count) in enumerate(self.profiles.items()):
            waiting += (((index + 0.5) / count, place, name, index) for index in range(count))
        for number, (_, _, name, index) in enumerate(sorted(waiting)):
            choice = parse_profile(name)
            join_s = self.ramp_s * number / self.peers
            if choice.manner.join_at_s is not None:
                join_s = choice.manner.join_at_s
            parsed = choice.profile.kind is PeerKind.HOSTILE or index % every == 0
            orders.append(PeerOrder(number, name, number % self.stream_count, join_s, parsed, index))
        return orders


@dataclasses.dataclass(frozen=True, slots=True)
class PeerOrder:
    """What a worker is told about one peer."""

    number: int
    profile: str
    stream: int
    join_s: float
    parsed: bool
    index: int
