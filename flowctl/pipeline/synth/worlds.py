"""What is planted in synthetic records: worlds as they are met in the field, each a declaration of its clients (pure).

A *world* is a part of the clients, with streams, addresses and perhaps a node of its own, so that what is wrong in one
says nothing of another. A *kind* is what a client is: how often it connects, for how long, and how each connection
goes. A connection is cut into `episodes` of equal length; each begins READY and ends with `trouble` (a share of it),
first OVERLOADED and then, for the share `soft` of the trouble, SOFT_LIMIT. What follows from that, `people`, `whole`
and `between` compute; there is no code for any world.

Hard cases on purpose: half of the abusers share an address with honest viewers, attackers rotate through the /64 they
have, and the honest look bad: health checks, phones in tunnels, zapping, links that are too slow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from flowctl.reasons import CloseReason
from flowctl.telemetry.schema import EventName

READY, OVERLOADED, SOFT, HARD = "READY", "OVERLOADED", "SOFT_LIMIT", "HARD_LIMIT"
LEAVES, SOFTENS, DROPS, RETURNS, HARDENS, HITS = range(6)
"""Where an event lies: READY is left, soft marks are crossed, drops and trouble end, hard marks, a limit is hit."""
Step = tuple[str, int, int, str | None, str | None, str | None, str | None]
"""Of a connection's script: event, episode, where, state_from, state_to, cause, axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a client is.

    Args:
        name: in the truth.
        share: weight among the kinds of its world that are not `placed`.
        placed: so many of them are in each crowd, whatever the shares.
        plain: ordinary, so that the truth has no row of it.
        abuser: whether it is to be found.
        blame: whose fault its trouble is; "none": it has none.
        connections: per visit. gap_s: seconds between them. least_s, most_s: their length; it ends with the wave.
        role: as in records; "unknown": it never plays. refused: whether it is refused at accept, each time.
        end: close reason. code: of a protocol error. limits: (name, value, limit), one of which a visit goes over.
        episodes: of trouble. trouble: their share of the time. soft: share of the trouble in SOFT_LIMIT.
        loss: share of the pictures that are dropped in trouble. cut: whether the last episode never ends.
        hard: whether it ends through HARD_LIMIT; of one without episodes that is at once, from READY.
        deaf: whether nothing at all is taken in trouble. stalls: whether nothing is taken in SOFT_LIMIT.
        strained: whether its thread had no room when READY was left. burst: times the rate, around each trouble.
        moves: whether each connection comes from another address: of IPv6 another in its /64.
        gaps: pauses of a publisher. gap_each_s: their length. key_s: distance of key frames. jitter_ms: of arrival.
    """

    name: str
    share: float = 1.0
    placed: int = 0
    plain: bool = False
    abuser: bool = False
    blame: str = "none"
    connections: int = 1
    gap_s: float = 2.0
    least_s: float = 20.0
    most_s: float = 1800.0
    role: str = "play"
    refused: bool = False
    end: str = CloseReason.PEER_CLOSED.value
    code: str | None = None
    limits: tuple[tuple[str, float, float], ...] = ()
    episodes: int = 0
    trouble: float = 0.0
    soft: float = 0.0
    loss: float = 0.0
    cut: bool = False
    hard: bool = False
    deaf: bool = False
    stalls: bool = False
    strained: bool = False
    burst: float = 1.0
    moves: bool = False
    gaps: int = 0
    gap_each_s: float = 0.0
    key_s: float = 2.0
    jitter_ms: float = 3.0

    @property
    def script(self) -> tuple[Step, ...]:
        """Its events of one connection, in the order of time."""
        steps: list[Step] = []
        edge, state = EventName.STATE_CHANGED.value, READY
        for number in range(self.episodes):
            steps.append((edge, number, LEAVES, READY, OVERLOADED, "would_block", None))
            state = OVERLOADED
            if self.soft:
                steps.append((edge, number, SOFTENS, OVERLOADED, SOFT, "queued", "age"))
                state = SOFT
            if self.loss:
                steps.append((EventName.DROPPED.value, number, DROPS, None, None, None, None))
            if not (self.cut and number == self.episodes - 1):
                steps.append((edge, number, RETURNS, state, READY, "drained", None))
                state = READY
        if self.hard:
            steps.append((edge, max(0, self.episodes - 1), HARDENS, state, HARD, "queued", "bytes"))
        if self.limits:
            steps.append((EventName.LIMIT_HIT.value, 0, HITS, None, None, None, None))
        return tuple(steps)

    @property
    def rows(self) -> int:
        """Closes and events of a visit."""
        return self.connections * (1 + len(self.script))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Who comes together.

    Args:
        name: as ``--worlds`` takes it; begin of the names of its streams.
        weight: its part of all rows.
        kinds: who watches, or worse. publishers: who publishes its streams, in turn.
        crowd: clients that share an IPv4 address, or are in one /48 of IPv6, each with its /64.
        ipv6: whether it has IPv6.
        node: which no other world uses. "": spread over all the ordinary ones.
        step_s: by how much the clock of the node is set ahead in the middle; below 0 back.
        dies: whether the server ends in the middle without a word, and starts anew half a minute later.
        peak: share of the wave in which all come; 1: evenly.
    """

    name: str
    weight: float
    kinds: tuple[Kind, ...]
    publishers: tuple[Kind, ...] = ()
    crowd: int = 1
    ipv6: bool = False
    node: str = ""
    step_s: float = 0.0
    dies: bool = False
    peak: float = 1.0

    @property
    def placed(self) -> int:
        """How many of each crowd have their kind by place."""
        return sum(kind.placed for kind in self.kinds)


def _brief(name: str, **given: object) -> Kind:
    """Return a kind that connects and never plays."""
    settings: dict[str, object] = {"least_s": 0.3, "most_s": 3.0, "role": "unknown"}
    return Kind(name=name, **(settings | given))  # type: ignore[arg-type]  # keywords of a dataclass


VIEWER: Final = Kind(name="viewer", plain=True)
MILD: Final = replace(VIEWER, name="hiccup", share=0.2, episodes=1, trouble=0.0005)
PUBLISHER: Final = Kind(name="publisher", plain=True, role="publish", least_s=1e6, most_s=1e6)
SLOW: Final = Kind(name="slow_link", episodes=3, trouble=0.8, soft=0.7, loss=0.4, blame="viewer_link")
STALLS: Final = replace(SLOW, name="stalls", episodes=2, trouble=0.3, soft=0.8, loss=0.3, stalls=True)
CUT: Final = replace(
    SLOW, name="cut_often", episodes=1, connections=8, least_s=15.0, most_s=60.0, cut=True, hard=True, end="hard limit"
)
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
    "limit_liar", abuser=True, connections=8, limits=LIES, end="limit hit", least_s=0.5, most_s=2.0, gap_s=30.0
)
FLOOD: Final = replace(LIAR, name="control_flood", limits=(("control_messages_per_second", 201.0, 200.0),))
DEAF: Final = Kind(
    name="deaf", abuser=True, blame="viewer_link", connections=24, least_s=12.0, most_s=30.0, episodes=1, trouble=0.9,
    soft=0.8, loss=1.0, deaf=True, stalls=True, cut=True, end="stuck",
)  # fmt: skip
SLOWLORIS: Final = _brief(
    "slowloris", abuser=True, connections=60, end="handshake timeout", least_s=5.0, most_s=5.1, gap_s=1.0
)
STORM: Final = _brief("reconnect_storm", abuser=True, connections=120, gap_s=0.5)

WORLDS: Final = (
    World(name="ordinary", weight=0.45, kinds=(VIEWER, MILD)),
    World(name="slow", weight=0.1, kinds=(replace(VIEWER, share=2.0), SLOW, STALLS, CUT)),
    World(name="attackers", weight=0.05, kinds=(replace(VIEWER, share=6.0), LIAR, FLOOD, DEAF, SLOWLORIS, STORM)),
    World(name="nat", weight=0.06, crowd=300, kinds=(replace(LIAR, placed=1), VIEWER, MILD)),
    World(name="subnets", weight=0.03, crowd=200, ipv6=True, kinds=(replace(FLOOD, placed=1, moves=True), VIEWER)),
    World(name="proxy", weight=0.04, crowd=500, kinds=(replace(DEAF, placed=1), VIEWER, replace(SLOW, share=0.1))),
    World(name="neighbours", weight=0.03, crowd=8, kinds=(replace(FLOOD, placed=1), VIEWER)),
    World(
        name="health",
        weight=0.02,
        kinds=(
            VIEWER,
            _brief("health_check", share=0.2, connections=120, least_s=0.02, most_s=0.2, gap_s=4.8),
            _brief("probe", share=0.1, connections=60, end="protocol error", code="not-rtmp", least_s=0.02, most_s=0.2),
            _brief("wrong_key", share=0.1, connections=60, end="auth refused", least_s=0.1, most_s=0.4, gap_s=3.0),
        ),
    ),
    World(
        name="commuters",
        weight=0.05,
        crowd=100,
        kinds=(
            replace(TUNNEL, end="peer reset"),
            replace(TUNNEL, name="tunnel_stuck", end="stuck", share=0.3, connections=2),
            replace(VIEWER, moves=True, connections=3, most_s=600.0),
            _brief("half_open", share=0.1, moves=True, end="handshake timeout", least_s=5.0, most_s=5.1),
            _brief("office_back", share=0.1, refused=True, connections=10, gap_s=0.2,
                   limits=(("connections_per_address", 65.0, 64.0),)),
        ),
    ),
    World(
        name="zapping",
        weight=0.04,
        kinds=(Kind(name="zapper", connections=12, gap_s=0.2, least_s=1.5, most_s=8.0), VIEWER),
    ),
    World(
        name="hang",
        weight=0.02,
        node="node-hangs",
        kinds=(
            VIEWER,
            replace(STALLS, name="hung", share=3.0, least_s=200.0, stalls=False, strained=True, blame="server_loop"),
        ),
    ),
    World(
        name="burst",
        weight=0.02,
        publishers=(replace(PUBLISHER, name="bursting_publisher", plain=False, jitter_ms=400.0, burst=8.0),),
        kinds=(
            Kind(name="flooded", episodes=3, trouble=0.08, soft=0.5, loss=0.3, burst=8.0, blame="publisher_burst",
                 least_s=300.0),
        ),
    ),
    World(
        name="ingest",
        weight=0.02,
        publishers=(
            replace(PUBLISHER, name="gaps", plain=False, gaps=6, gap_each_s=4.0),
            replace(PUBLISHER, name="odd_keys", plain=False, key_s=14.0),
            replace(PUBLISHER, name="jittery", plain=False, jitter_ms=180.0),
            PUBLISHER,
        ),
        kinds=(VIEWER,),
    ),
    World(
        name="tight",
        weight=0.02,
        kinds=(VIEWER, Kind(name="limits_too_small", share=0.5, most_s=600.0, hard=True, end="hard limit",
                            blame="policy")),
    ),
    World(name="clock_ahead", weight=0.01, node="node-ahead", step_s=900.0, kinds=(VIEWER, SLOW)),
    World(name="clock_back", weight=0.01, node="node-back", step_s=-1800.0, kinds=(VIEWER, SLOW)),
    World(name="death", weight=0.02, node="node-dies", dies=True, kinds=(VIEWER, SLOW)),
    World(name="peak", weight=0.05, node="node-peak", peak=0.02, kinds=(VIEWER, MILD)),
)  # fmt: skip
BY_NAME: Final = {world.name: world for world in WORLDS}
