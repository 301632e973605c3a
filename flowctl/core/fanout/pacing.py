"""How often a stream is flushed, how long its rounds take, and how much of it one writes (pure).

Few viewers cost next to nothing, so they get what was published at once; many are flushed together, because each
flush costs a system call per viewer. What decides is not their number but what a round of theirs was measured to
cost in processor time: the interval is the one at which rounds take `ROUND_SHARE` of a core, less where the thread is
busy with other things, and never above the ceiling that was configured.

So that it does not swing: costs are smoothed, the interval moves on a ladder of seven steps, goes up at once but down
by one step only after `_CALM_S` in which a shorter one would have been right with room to spare. The busy fraction,
which the rounds themselves raise, is an average over seconds (`flowctl.core.loop.loadmeter`).
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from typing import Final

DEFAULT_FLUSH_INTERVAL_S: Final = 0.040
"""Longest flush interval by default, two and a half frames at 60 fps: a delay that no viewer notices, at a third of the
cost of writing each message. Few viewers are served sooner."""
MOST_FLUSH_INTERVAL_S: Final = 10.0
"""Largest allowed ceiling of the flush interval: beyond, a stream is no longer live."""
ROUND_SHARE: Final = 0.05
"""Share of a thread's time that the rounds of one stream may take before it is flushed less often than each message:
at 10 us a viewer that is some 10 viewers at 2 ms and 200 at the usual ceiling of 40 ms."""

_STEPS: Final = (0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0)
"""Intervals as shares of the ceiling. The first writes each message at once."""
_AT_ONCE_S: Final = 0.002
"""Computed interval that is too short to join messages: those of a stream are 10 ms or more apart."""
_AT_ONCE_COST_S: Final = ROUND_SHARE * _AT_ONCE_S
_IDLE_BUSY: Final = 0.25
_FULL_BUSY: Final = 0.75
"""Busy fractions of the thread: up to the first a stream has its whole share, from the second on none."""
_SMOOTHING: Final = 0.1
"""Weight of the newest round: a key frame, which costs several times a usual round, must not move the interval."""
_CALM_S: Final = 2.0
"""Time for which a shorter interval would do before it is tried: most groups of pictures are shorter."""
_DOWN_SHARE: Final = 0.7
"""Share of a step that the computed interval may fill at most before that shorter step is tried."""

LONGEST_ROUND_S: Final = 0.4
"""Length of a round from which the next one writes less: each viewer is written to twice a second and more."""
_LEAST_S: Final = 0.15
"""Seconds of the stream below which coming to a viewer costs more than what is written to it."""
_ALL_BYTES: Final = 4 * 1024 * 1024
"""What is no less than all there is: no kernel takes so much at once."""


class Pacing:
    """The flush interval of one stream on one thread. Not thread-safe: its fan-out's.

    Attributes:
        interval_s: least time between the beginnings of two rounds, in seconds, now.
    """

    __slots__ = ("_calm_since", "_cost_s", "_step", "adaptive", "ceiling_s", "interval_s")

    def __init__(self, ceiling_s: float, *, adaptive: bool = True) -> None:
        self.ceiling_s = ceiling_s
        self.adaptive = adaptive
        self._cost_s = 0.0
        self._calm_since: float | None = None  # since when a step down would have been right
        self._step = 0 if adaptive else len(_STEPS) - 1
        self.interval_s = ceiling_s * _STEPS[self._step]

    def round_ended(self, cost_s: float, busy: float, now: float) -> None:
        """Note a round and settle the interval up to the next one."""
        if not self.adaptive or not self.ceiling_s:
            return
        self._cost_s += _SMOOTHING * (cost_s - self._cost_s)
        if not self._step and self._cost_s <= _AT_ONCE_COST_S and busy <= _IDLE_BUSY:
            return  # what follows would come to the same
        wanted_s = self.wanted_s(busy)
        # The shortest step that is not below the computed interval.
        step = 0 if wanted_s <= _AT_ONCE_S else min(bisect_left(_STEPS, wanted_s / self.ceiling_s), len(_STEPS) - 1)
        if step > self._step:
            self._move(step)
        elif self._step and wanted_s <= _DOWN_SHARE * max(self.ceiling_s * _STEPS[self._step - 1], _AT_ONCE_S):
            if self._calm_since is None:
                self._calm_since = now
            elif now - self._calm_since >= _CALM_S:
                self._move(self._step - 1)
        else:
            self._calm_since = None

    def set_ceiling(self, ceiling_s: float) -> None:
        """Let `ceiling_s` be the longest interval from now on, in seconds, 0 or more.

        Any thread: the next round ends with an interval of it, whatever a round in progress does meanwhile.
        """
        self.ceiling_s = ceiling_s
        self.interval_s = ceiling_s * _STEPS[self._step]

    def wanted_s(self, busy: float) -> float:
        """Return the interval in seconds at which rounds take their share of a thread that is `busy` (0 to 1)."""
        room = min(max((_FULL_BUSY - busy) / (_FULL_BUSY - _IDLE_BUSY), 0.0), 1.0)
        if not room:
            return self.ceiling_s
        return min(self._cost_s / (ROUND_SHARE * room), self.ceiling_s)

    def _move(self, step: int) -> None:
        self._step = step
        self._calm_since = None
        self.interval_s = self.ceiling_s * _STEPS[step]


class RoundSpan:
    """How much of the stream a round may write to each viewer. Not thread-safe: its fan-out's.

    A thread without room would have rounds of many seconds, the larger the more cheaply, in which some viewers get all
    of it and the others nothing. Rounds that take too long write less; what is late then is left out for all at once.

    Attributes:
        size_bytes: of the stream, at most, but for one message; inf: all there is.
        since: when it last became less than all there is, in seconds.
    """

    __slots__ = ("since", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = self.since = inf

    def round_ended(self, wrote_bytes: int, took_s: float, bytes_per_s: float, now: float) -> None:
        """Note a round that wrote `wrote_bytes`, of a stream of `bytes_per_s`, to each viewer and took `took_s`."""
        if took_s > LONGEST_ROUND_S:
            if self.size_bytes == inf:
                self.since = now
            most_bytes = min(self.size_bytes, wrote_bytes) * LONGEST_ROUND_S / took_s
            self.size_bytes = max(most_bytes, _LEAST_S * bytes_per_s, 1)
        elif took_s < LONGEST_ROUND_S / 2:
            self.size_bytes = 2 * self.size_bytes if self.size_bytes < _ALL_BYTES else inf


ROUND_BOUNDS_MS: Final = (1, 2, 5, 10, 20, 50, 100)
"""Upper bounds of the classes in which rounds are counted, in milliseconds; the last class has none."""


class RoundMeter:
    """Times of turns, and of rounds from beginning to last write, turns of others in between included."""

    def __init__(self) -> None:
        self.rounds = 0
        self.turns = 0
        self.longest_round_s = 0.0
        self.longest_turn_s = 0.0
        self.by_duration = [0] * (len(ROUND_BOUNDS_MS) + 1)

    def count_round(self, took_s: float) -> None:
        self.rounds += 1
        self.longest_round_s = max(self.longest_round_s, took_s)
        self.by_duration[bisect_left(ROUND_BOUNDS_MS, took_s * 1000)] += 1

    def count_short_round(self, took_s: float) -> None:
        """Count a round of `took_s` seconds that was one turn."""
        self.rounds += 1
        self.turns += 1
        if took_s > self.longest_round_s or took_s > self.longest_turn_s:
            self.longest_round_s = max(self.longest_round_s, took_s)
            self.longest_turn_s = max(self.longest_turn_s, took_s)
        self.by_duration[bisect_left(ROUND_BOUNDS_MS, took_s * 1000)] += 1

    def count_turn(self, took_s: float) -> None:
        self.turns += 1
        self.longest_turn_s = max(self.longest_turn_s, took_s)
