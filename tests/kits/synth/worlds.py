"""What is planted in synthetic records: worlds as they are met in the field, each a declaration of its clients (pure).

A *world* is a part of the clients, with streams and addresses of its own. A *kind* is what a client is: how often it
connects, for how long, and how each connection goes. A connection is cut into `episodes` of equal length; each begins
READY and ends with `trouble` (a share of it), first OVERLOADED and then, for the share `soft` of it, SOFT_LIMIT.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Final

from flowctl.reasons import CloseReason
from flowctl.records.telemetry.schema import EventName

READY, OVERLOADED, SOFT = "READY", "OVERLOADED", "SOFT_LIMIT"


_STEP: Final = ("episode", "place", "event", "state_from", "state_to", "cause", "axis")


def _step(*values: object) -> dict[str, object]:
    """Return a step of a connection's script: where it is (see `tables.event_at`), and what changes there."""
    return dict(zip_longest(_STEP, values))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedKind:
    """Kind of a client: what it does, and how often."""

    name: str
    share: float = 1.0  # weight among the kinds of its world that are not `placed`, in tenths
    placed: int = 0  # so many of them are in each crowd, whatever the shares
    plain: bool = False  # ordinary, so that the truth has no row of it
    abuser: bool = False  # to be found
    connections: int = 1  # per visit; a visit ends with the wave
    gap_s: float = 2.0  # between them
    least_s: float = 20.0  # length of one
    most_s: float = 1800.0
    moves: bool = False  # each comes from another address: of IPv6 another in its /64
    role: str = "play"  # as in records; "unknown": it never plays
    refused: bool = False  # at accept, each time
    end: str = CloseReason.PEER_CLOSED.value
    limits: tuple[tuple[str, float, float], ...] = ()  # name, value, limit: a visit goes over one of them
    episodes: int = 0  # of trouble
    trouble: float = 0.0  # their share of the time
    soft: float = 0.0  # share of the trouble in SOFT_LIMIT
    loss: float = 0.0  # share of the pictures that are dropped in trouble; 1: of everything, nothing is taken
    cut: bool = False  # the last episode never ends
    hard: bool = False  # it ends through HARD_LIMIT; without episodes that is at once, from READY
    stalls: bool = False  # nothing is taken in SOFT_LIMIT
    lost: bool = False  # its line has gone when it is cut: its kernel answers nothing more

    @property
    def script(self) -> list[dict[str, object]]:
        """Its events of one connection, in the order of time."""
        edge = EventName.STATE_CHANGED.value
        worst = READY if not self.episodes else SOFT if self.soft else OVERLOADED
        last, steps = max(0, self.episodes - 1), []
        for number in range(self.episodes):
            steps.append(_step(number, "leaves", edge, READY, OVERLOADED, "would_block"))
            if self.soft:
                steps.append(_step(number, "softens", edge, OVERLOADED, SOFT, "queued", "age"))
            if self.loss:
                steps.append(_step(number, "drops", EventName.DROPPED.value))
            if number < last or not self.cut:
                steps.append(_step(number, "returns", edge, worst, READY, "drained"))
        if self.hard:
            steps.append(_step(last, "hardens", edge, worst, "HARD_LIMIT", "queued", "bytes"))
        return [*steps, _step(0, "hits", EventName.LIMIT_HIT.value)] if self.limits else steps

    @property
    def rows(self) -> int:
        return self.connections * (1 + len(self.script))


PUBLISHER: Final = PlantedKind(name="publisher", plain=True, role="publish", least_s=1e6, most_s=1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Clients that are planted together."""

    name: str  # as ``--worlds`` takes it; begin of the names of its streams
    weight: float  # its part of all rows
    kinds: tuple[PlantedKind, ...]  # who watches, or worse
    crowd: int = 1  # clients that share an IPv4 address, or are in one /48 of IPv6, each with its /64
    ipv6: bool = False

    @property
    def placed(self) -> int:
        return sum(kind.placed for kind in self.kinds)

    @property
    def drawn(self) -> list[PlantedKind]:
        return [kind for kind in self.kinds if not kind.placed]


_brief = partial(PlantedKind, least_s=0.3, most_s=3.0, role="unknown")
"""Makes a kind that connects and never plays."""

VIEWER: Final = PlantedKind(name="viewer", plain=True)
MILD: Final = replace(VIEWER, name="hiccup", share=0.2, episodes=1, trouble=0.0005)
SLOW: Final = PlantedKind(name="slow_link", episodes=3, trouble=0.8, soft=0.7, loss=0.4)
STALLS: Final = replace(SLOW, name="stalls", episodes=2, trouble=0.3, soft=0.8, loss=0.3, stalls=True)
CUT: Final = replace(
    SLOW, name="cut_often", episodes=1, connections=8, least_s=15.0, most_s=60.0, cut=True, hard=True, end="hard limit"
)
NO_SIGNAL: Final = replace(
    CUT, name="no_reception", share=0.2, connections=20, least_s=12.0, most_s=30.0, trouble=0.9, loss=1.0, stalls=True,
    lost=True, hard=False, end="stuck",
)  # fmt: skip
TUNNEL: Final = replace(
    STALLS, name="tunnel", episodes=1, cut=True, connections=4, least_s=20.0, most_s=300.0, moves=True, loss=0.2
)
LIES: Final = (
    ("chunk_size_min_bytes", 1.0, 128.0),
    ("amf_depth", 33.0, 32.0),
    ("amf_nodes", 4097.0, 4096.0),
    ("command_message_bytes", 16777215.0, 65536.0),
    ("chunk_streams", 65.0, 64.0),
)
LIAR: Final = _brief(
    name="limit_liar", abuser=True, connections=8, limits=LIES, end="limit hit", least_s=0.5, most_s=2.0, gap_s=30.0
)
FLOOD: Final = replace(LIAR, name="control_flood", limits=(("control_messages_per_second", 201.0, 200.0),))
DEAF: Final = PlantedKind(
    name="deaf", abuser=True, connections=24, least_s=12.0, most_s=30.0, episodes=1, trouble=0.9,
    soft=0.8, loss=1.0, stalls=True, cut=True, end="stuck",
)  # fmt: skip
SLOWLORIS: Final = _brief(
    name="slowloris", abuser=True, connections=60, end="handshake timeout", least_s=5.0, most_s=5.1, gap_s=1.0
)
STORM: Final = _brief(name="reconnect_storm", abuser=True, connections=120, gap_s=0.5)

WORLDS: Final = (
    World(name="ordinary", weight=0.45, kinds=(VIEWER, MILD)),
    World(name="slow", weight=0.1, kinds=(replace(VIEWER, share=2.0), SLOW, STALLS, CUT, NO_SIGNAL)),
    World(name="attackers", weight=0.05, kinds=(replace(VIEWER, share=6.0), LIAR, FLOOD, DEAF, SLOWLORIS, STORM)),
    World(name="nat", weight=0.06, crowd=300, kinds=(replace(LIAR, placed=1), VIEWER, MILD)),
    World(name="subnets", weight=0.03, crowd=200, ipv6=True, kinds=(replace(FLOOD, placed=1, moves=True), VIEWER)),
    World(name="proxy", weight=0.04, crowd=500, kinds=(replace(DEAF, placed=1), VIEWER, replace(SLOW, share=0.1))),
    World(name="neighbours", weight=0.03, crowd=8, kinds=(replace(FLOOD, placed=1), VIEWER)),
    World(name="health", weight=0.02, kinds=(
        VIEWER,
        _brief(name="health_check", share=0.2, connections=120, least_s=0.02, most_s=0.2, gap_s=4.8),
        _brief(name="probe", share=0.1, connections=60, end="protocol error", least_s=0.02, most_s=0.2),
        _brief(name="wrong_key", share=0.1, connections=60, end="auth refused", least_s=0.1, most_s=0.4, gap_s=3.0),
    )),
    World(name="commuters", weight=0.05, crowd=100, kinds=(
        replace(TUNNEL, end="peer reset"),
        replace(TUNNEL, name="tunnel_stuck", end="stuck", share=0.3, connections=2),
        replace(VIEWER, moves=True, connections=3, most_s=600.0),
        _brief(name="half_open", share=0.1, moves=True, end="handshake timeout", least_s=5.0, most_s=5.1),
        _brief(name="office_back", share=0.1, refused=True, connections=10, gap_s=0.2,
               limits=(("connections_per_address", 65.0, 64.0),)),
    )),
    World(name="zapping", weight=0.04, kinds=(
        PlantedKind(name="zapper", connections=12, gap_s=0.2, least_s=1.5, most_s=8.0), VIEWER,
    )),
)  # fmt: skip
BY_NAME: Final = {world.name: world for world in WORLDS}
