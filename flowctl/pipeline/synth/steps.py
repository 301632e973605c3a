"""The steps of synthetic connections: one place in time per event, with states that follow each other (pure).

`flowctl.pipeline.synth.plan` explains what for. Edges are consistent by construction: a step knows the place of the
edge before it, so that `state_ms` is the difference of two times of the same connection, and their sum with that of
`conn_closed` is how long it was connected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from flowctl.errors import ConfigError
from flowctl.reasons import CloseReason
from flowctl.telemetry.schema import EventName

SLOTS: Final = 16
"""Variants per kind: a visit takes one of them with equal chance, so one that is rarer than 1/16 does not exist."""
HEAD_MS: Final = 1000.0
"""The time of the first steps of a connection, up to the beginning of play; shares of the connection begin after it."""
READY, OVERLOADED, SOFT, HARD = "READY", "OVERLOADED", "SOFT_LIMIT", "HARD_LIMIT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One event of one connection of a visit.

    Args:
        event: value of `EventName`.
        head_ms: offset from the connection's begin, ms. None: `place` counts.
        place: share of the connection's time after `HEAD_MS`, 0 to 1. None: `head_ms` counts.
        before: `place` of the edge before it; -1: the state has lasted since the connection was opened. None: no edge.
        old: state before.
        new: state after.
        cause: input of the flow core.
        axis: axis, or name of a limit.
        reason: close reason, command, or why.
        value: value on the axis; -1: from `fill`.
        limit: mark, in the same unit; -1: from the axis.
        fill: how full the queue is, as a share of the hard limit.
        since: of an edge back to READY, and of an end that is not READY: `place` at which READY was left.
            None: it was READY.
        drops: episodes of drops that the event tells of.
        taken: whether the kernel is asked (rtt, unsent, delay).
        connection: number of the connection in the visit; set when a variant is laid out.
    """

    event: str
    head_ms: float | None = None
    place: float | None = None
    before: float | None = None
    since: float | None = None
    old: str | None = None
    new: str | None = None
    cause: str | None = None
    axis: str | None = None
    reason: str | None = None
    value: float | None = None
    limit: float | None = None
    fill: float = 0.0
    drops: int = 0
    taken: bool = False
    connection: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What may happen during a visit.

    Args:
        steps: of one connection.
        connections: how often it connects.
        least_s: shortest connection, seconds.
        most_s: longest one.
        gap_s: pause between two connections.
        link: share of the stream's rate that the peer takes; 0: it takes nothing but what fits into buffers.
        role: as recorded.
        slots: how many of the kind's `SLOTS` it takes.
    """

    steps: tuple[Step, ...]
    connections: int = 1
    least_s: float = 60.0
    most_s: float = 3600.0
    gap_s: float = 2.0
    link: float = 1.0
    role: str = "play"
    slots: int = SLOTS

    @property
    def events(self) -> int:
        """Events of a visit."""
        return len(self.steps) * self.connections


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of client.

    Args:
        name: as written beside the data.
        abuser: whether it is to be found.
        share: of its group, see `GROUPS`.
        variants: their slots add up to `SLOTS`.
        many: whether hundreds of these share one address.
    """

    name: str
    abuser: bool
    share: float
    variants: tuple[Variant, ...]
    many: bool = False

    def __post_init__(self) -> None:
        if sum(item.slots for item in self.variants) != SLOTS:
            raise ConfigError(f"kind {self.name}: its variants have not {SLOTS} slots together")

    @property
    def mean_events(self) -> float:
        """Events of a visit on average."""
        return sum(item.events * item.slots for item in self.variants) / SLOTS


# -- what connections are made of

_OPEN: Final = Step(event=EventName.CONN_OPENED.value, head_ms=0.0)
_HELLO: Final = Step(event=EventName.HANDSHAKE_DONE.value, head_ms=24.0, value=24.0)
_CONNECT: Final = Step(event=EventName.COMMAND.value, head_ms=31.0, reason="connect")
_HEAD: Final = (
    _OPEN,
    _HELLO,
    _CONNECT,
    Step(event=EventName.COMMAND.value, head_ms=48.0, reason="play"),
    Step(event=EventName.PLAY_STARTED.value, head_ms=55.0),
)


def _edge(
    place: float, before: float, old: str, new: str, cause: str, axis: str | None = None, fill: float = 0
) -> Step:
    return Step(
        event=EventName.STATE_CHANGED.value,
        place=place,
        before=before,
        old=old,
        new=new,
        cause=cause,
        axis=axis,
        value=None if axis is None else -1.0,
        limit=None if axis is None else -1.0,
        fill=fill,
    )


def _end(reason: CloseReason, before: float, old: str = READY, drops: int = 0, since: float | None = None) -> Step:
    closed, text = EventName.CONN_CLOSED.value, reason.value
    return Step(event=closed, place=1.0, before=before, old=old, reason=text, drops=drops, since=since)


SLOW: Final = ((0.05, OVERLOADED), (0.15, SOFT), (0.8, OVERLOADED), (0.9, READY))
"""A link that is too slow for the stream: it is behind nearly all the time, and caught up now and then by drops."""
SAW: Final = ((0.4, OVERLOADED), (0.5, SOFT), (0.65, READY))
"""A link that is good and bad in turns."""
STALL: Final = ((0.6, OVERLOADED), (0.7, SOFT), (0.9, READY))
"""Nothing for seconds, then all at once."""
MILD: Final = ((0.5, OVERLOADED), (0.52, READY))
"""A hiccup that nobody sees."""
_AXES: Final = {SLOW: "age", SAW: "bytes", STALL: "age", MILD: None}
_RANK: Final = {READY: 0, OVERLOADED: 1, SOFT: 2, HARD: 3}


def play(
    pattern: Sequence[tuple[float, str]] = (),
    episodes: int = 0,
    end: CloseReason = CloseReason.PEER_CLOSED,
    *,
    cut: bool = False,
) -> tuple[Step, ...]:
    """Return a connection that plays: `pattern` of edges `episodes` times over, then the end.

    Args:
        pattern: edges of an episode: share of its time, state after.
        episodes: how often.
        end: why it ends.
        cut: whether it ends in the middle of the last episode, when it is worst, through HARD_LIMIT for that reason.
    """
    steps, state, before, drops = list(_HEAD), READY, -1.0, 0
    since: float | None = None
    axis = _AXES[tuple(pattern)] if pattern else None
    for number in range(episodes):
        for share, new in pattern:
            place = (number + share) / episodes
            last = cut and number == episodes - 1
            if last and _RANK[new] < _RANK[state]:
                break
            up = _RANK[new] > _RANK[state]
            cause = (
                "would_block"
                if new == OVERLOADED and up
                else "queued"
                if up
                else "dropped"
                if new != READY
                else "drained"
            )
            edge = _edge(place, before, state, new, cause, axis if new == SOFT else None, 0.5 if up else 0.2)
            steps.append(replace(edge, since=since) if new == READY else edge)
            if new == SOFT:
                drops += 1
                steps.append(_sample((number + share + 0.05) / episodes))
                steps.append(_dropped((number + share + 0.1) / episodes))
            since = None if new == READY else place if state == READY else since
            state, before = new, place
    if cut and end is CloseReason.HARD_LIMIT:
        steps.append(_edge(0.9999, before, state, HARD, "queued", axis or "age", 1.0))
        state, before = HARD, 0.9999
    return (*steps, _end(end, before, state, drops, since))


def _sample(place: float) -> Step:
    return Step(event=EventName.SAMPLE.value, place=place, fill=0.6, taken=True)


def _dropped(place: float) -> Step:
    return Step(event=EventName.DROPPED.value, place=place, reason="thinned from the queue", drops=1, fill=0.3)


def deaf(end: CloseReason) -> tuple[Step, ...]:
    """Return a connection that plays and reads nothing, until the server has had enough."""
    steps = [
        *_HEAD,
        _edge(0.1, -1.0, READY, OVERLOADED, "would_block", fill=0.2),
        _edge(0.3, 0.1, OVERLOADED, SOFT, "queued", "age", 0.5),
        _sample(0.5),
        _dropped(0.6),
    ]
    if end is CloseReason.HARD_LIMIT:
        return (*steps, _edge(0.9999, 0.3, SOFT, HARD, "queued", "age", 1.0), _end(end, 0.9999, HARD, 1, 0.1))
    return (*steps, _end(end, 0.3, SOFT, 1, 0.1))


def hit(axis: str, value: float, limit: float) -> tuple[Step, ...]:
    """Return a connection that goes over the limit `axis` right after its handshake and is ended for it."""
    hit = Step(event=EventName.LIMIT_HIT.value, place=0.5, axis=axis, value=value, limit=limit)
    return (_OPEN, _HELLO, _CONNECT, hit, _end(CloseReason.LIMIT_HIT, -1.0))


LATE: Final = (
    _OPEN,
    Step(event=EventName.LIMIT_HIT.value, place=0.999, axis="handshake_time_s", value=5.0, limit=5.0),
    _end(CloseReason.HANDSHAKE_TIMEOUT, -1.0),
)
LEFT: Final = (_OPEN, _HELLO, _end(CloseReason.PEER_CLOSED, -1.0))
NONSENSE: Final = (_OPEN, _HELLO, _CONNECT, _end(CloseReason.PROTOCOL_ERROR, -1.0))
REFUSED: Final = (
    Step(
        event=EventName.CONN_REFUSED.value, head_ms=0.0, axis="connections_per_address",
        reason="connections_per_address", value=65.0, limit=64.0,
    ),
)  # fmt: skip
PUBLISH: Final = (
    _OPEN,
    _HELLO,
    _CONNECT,
    Step(event=EventName.COMMAND.value, head_ms=44.0, reason="publish"),
    Step(event=EventName.PUBLISH_STARTED.value, head_ms=52.0),
    Step(event=EventName.INPUT_PAUSED.value, place=0.5, reason="viewers"),
    Step(event=EventName.INPUT_RESUMED.value, place=0.51, reason="viewers", value=100.0),
    _end(CloseReason.PEER_CLOSED, -1.0),
)
LIES: Final = (
    ("chunk_size_max_bytes", 2147483647.0, 1048576.0),
    ("chunk_size_min_bytes", 1.0, 128.0),
    ("amf_depth", 33.0, 32.0),
    ("amf_nodes", 4097.0, 4096.0),
    ("command_message_bytes", 16777215.0, 65536.0),
    ("media_message_bytes", 16777215.0, 10485760.0),
    ("chunk_streams", 65.0, 64.0),
    ("unpublished_bytes", 300000.0, 262144.0),
)
