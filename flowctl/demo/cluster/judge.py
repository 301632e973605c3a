"""What a viewer got, held against what was published: lost, doubled, disordered, changed; how late it came (pure).

A viewer is judged from its first frame on: what was published before is not its own. The time to *recover* from an
event is the time until it has a frame that was published after it, beyond its usual delay; or, where later frames are
later than the latest of the seconds before the event, the time until the last of these has come.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from flowctl.demo.cluster.encoder import FrameKey
from flowctl.demo.cluster.viewer import SeenFrame

_USUAL_US: Final = 5_000_000
"""Before an event: what is usual."""
_SLACK_US: Final = 100_000
"""By which a frame may be later than the latest before an event, and the viewer still count as recovered."""
_APART_US: Final = 2_000_000
_BEGINNING_US: Final = 2_000_000
"""Frames that were due before a viewer came are older than late: the server's cache held them. So much of its begin is
left out of delays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One viewer."""

    label: str
    frames: int
    lost: int  # frames published after its first one that it never got
    doubled: int
    disordered: int  # frames that came behind a later one of their track
    changed: int  # frames with other octets than were published
    delay_p50_ms: float | None  # from when a frame was due to when it came, median. None: too short a play.
    delay_p99_ms: float | None
    longest_pause_s: float
    recovered_s: float | None

    @property
    def whole(self) -> bool:
        return self.frames > 0 and not (self.lost or self.doubled or self.disordered or self.changed)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    label: str, seen: Sequence[SeenFrame], published: Mapping[FrameKey, int], event_us: int | None = None
) -> Judged:
    counts = Counter((item.type_id, item.number) for item in seen)
    first: dict[int, int] = {}
    latest: dict[int, int] = {}
    disordered = 0
    for item in seen:
        first.setdefault(item.type_id, item.number)
        disordered += item.number < latest.get(item.type_id, -1)
        latest[item.type_id] = max(item.number, latest.get(item.type_id, -1))
    wanted = [key for key in published if key[0] in first and key[1] >= first[key[0]]]
    delays = sorted(delay_us for _, delay_us in delays_of(seen))
    return Judged(
        label=label,
        frames=len(counts),
        # A track of which nothing came at all is lost from its begin.
        lost=sum(key not in counts for key in wanted) + sum(bool(seen) and key[0] not in first for key in published),
        doubled=sum(count - 1 for count in counts.values()),
        disordered=disordered,
        changed=sum(published.get((item.type_id, item.number)) != item.checksum for item in seen),
        delay_p50_ms=_quantile(delays, 0.5),
        delay_p99_ms=_quantile(delays, 0.99),
        longest_pause_s=_longest_pause_s(seen, event_us),
        recovered_s=None if event_us is None else recovered_s(seen, event_us),
    )


def delays_of(seen: Sequence[SeenFrame]) -> list[tuple[int, int]]:
    """Return (when it came, delay) of each frame in microseconds, without those of the viewer's begin."""
    begun_us = seen[0].came_us if seen else 0
    return [(item.came_us, item.came_us - item.due_us) for item in seen if item.came_us >= begun_us + _BEGINNING_US]


def _quantile(ordered: Sequence[int], share: float) -> float | None:
    return round(ordered[min(int(len(ordered) * share), len(ordered) - 1)] / 1000, 1) if ordered else None


def _longest_pause_s(seen: Sequence[SeenFrame], event_us: int | None) -> float:
    times = [item.came_us for item in seen]
    pauses = [
        later - max(sooner, event_us or 0)
        for sooner, later in itertools.pairwise(times)
        if event_us is None or later >= event_us
    ]
    return round(max(pauses, default=0) / 1e6, 3)


def recovered_s(seen: Sequence[SeenFrame], event_us: int) -> float:
    """Return how long after an event frames came as before."""
    delays = delays_of(seen)
    before = sorted(delay_us for came_us, delay_us in delays if event_us - _USUAL_US <= came_us < event_us) or [0]
    late_us = event_us
    for came_us, delay_us in delays:
        # What is late seconds after all was well again is of something else.
        if delay_us > before[-1] + _SLACK_US and late_us <= came_us <= late_us + _APART_US:
            late_us = came_us
    first_us = min((item.came_us for item in seen if item.due_us >= event_us), default=event_us)
    beyond_us = first_us - event_us - before[len(before) // 2]
    return round(max(late_us - event_us, beyond_us, 0) / 1e6, 3)


def delay_line(seen: Iterable[SeenFrame], begun_us: int, step_s: float = 0.2) -> list[tuple[float, float]]:
    """Return (seconds since `begun_us`, largest delay in ms) for each step in which a frame came."""
    most: dict[int, int] = {}
    for came_us, delay_us in delays_of(list(seen)):
        step = int((came_us - begun_us) / 1e6 / step_s)
        most[step] = max(most.get(step, 0), delay_us)
    return [(round(step * step_s, 3), delay_us / 1000) for step, delay_us in sorted(most.items())]
