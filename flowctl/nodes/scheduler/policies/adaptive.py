"""How many channels a peer should have: more while it answers as fast as when idle, fewer when it does not (pure).

Theory of operation. Answers are counted in *rounds* of at least `ROUND_ANSWERS`. A round with a mean latency
within `tolerance` of the baseline, and in which all channels were in use at once, earns channels: twice as many until
the first cut, then the square root more. One beyond it loses as many as its latency says (the *gradient*), at most
half; a message that fails loses half. So a peer that works on c messages at a time settles near ``tolerance * c``:
always busy, its queue short. Sources: Netflix concurrency-limits (Gradient2), TCP Vegas.

The baseline is what the peer takes when it is not pressed. It falls by itself when answers come faster; that it has
risen for good can only be seen with less pressure, so every `PROBE_ROUNDS` rounds one is made with half the channels,
and its mean is the new baseline. At the floor there is no less pressure, so each round there is one.

Answers to what was sent before a change say nothing about it: as many as were in flight are passed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Final

from flowctl.core.outcomes.pending import Outcome
from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError
from flowctl.nodes.scheduler.policy import PeerChannels

ROUND_ANSWERS: Final = 16
"""Answers in a round: the mean of even the most uneven latencies (exponential) is right to within a quarter."""
PROBE_ROUNDS: Final = 32
"""Rounds between two probes, which then cost less than a fiftieth of the throughput."""
_BASELINE_STEP: Final = 0.25
"""Share of the way that a faster round moves the baseline down: all of it would make the luckiest round the rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveSettings:
    """Bounds of an adaptive count of channels."""

    floor: int = 1
    ceiling: int = 64
    #: latency, as a multiple of the baseline, up to which a peer counts as unhindered; more than 1
    tolerance: float = 1.5

    def __post_init__(self) -> None:
        check_fields(self)
        if self.floor < 1:
            raise ConfigError(f"floor is {self.floor}, it must be 1 or more")
        if self.ceiling < self.floor:
            raise ConfigError(f"ceiling is {self.ceiling}, it must be floor ({self.floor}) or more")
        if not 1 < self.tolerance < float("inf"):
            raise ConfigError(f"tolerance is {self.tolerance}, it must be more than 1 and finite")


class ChannelCount:
    """The count of one peer's channels, and why it is what it is."""

    __slots__ = (
        *("_answers", "_baseline_s", "_full", "_held", "_rounds", "_rush", "_settings", "_skip", "_sum_s"),
        *("count", "reason"),
    )

    def __init__(self, settings: AdaptiveSettings, count: int = 1) -> None:
        self._settings = settings
        self.count = max(settings.floor, min(settings.ceiling, count))
        #: why it changed last: ``"start"``, ``"room"``, ``"latency"``, ``"failure"``, ``"probe"``
        self.reason = "start"
        self._baseline_s: float | None = None
        self._rush = True  # doubling: nothing has gone wrong yet
        self._held: int | None = None  # while probing: the count to go back to
        self._rounds = 0  # since the last probe
        self._skip = 0  # outcomes still to come for what was sent before the last change
        self._answers = 0
        self._sum_s = 0.0
        self._full = False  # whether all channels were in use in this round

    @property
    def baseline_s(self) -> float | None:
        """Mean latency of the peer when not pressed, in seconds. None: no round has ended yet."""
        return self._baseline_s

    def answered(self, latency_s: float, in_flight: int) -> bool:
        if self._skip:
            self._skip -= 1
            return False
        self._answers += 1
        self._sum_s += latency_s
        self._full = self._full or in_flight >= self.count
        if self._answers < max(ROUND_ANSWERS, self.count):
            return False
        mean_s = self._sum_s / self._answers
        return self._round_ended(mean_s, in_flight - 1)

    def failed(self, in_flight: int) -> bool:
        if self._skip:
            self._skip -= 1
            return False
        self._rush = False
        held, self._held = self._held or self.count, None
        return self._change(held // 2, "failure", in_flight - 1)

    def _round_ended(self, mean_s: float, in_flight: int) -> bool:
        self._rounds += 1
        if self._held is not None:
            self._baseline_s, self._rounds = mean_s, 0
            held, self._held = self._held, None
            return self._change(held, "probe", in_flight)
        baseline_s = self._baseline_s
        if baseline_s is None or self.count == self._settings.floor:
            baseline_s = mean_s
        elif mean_s < baseline_s:
            baseline_s += (mean_s - baseline_s) * _BASELINE_STEP
        self._baseline_s = baseline_s
        limit_s = baseline_s * self._settings.tolerance
        if mean_s > limit_s:
            self._rush = False
            return self._change(int(self.count * max(0.5, limit_s / mean_s)), "latency", in_flight)
        if self._rounds >= PROBE_ROUNDS and self.count > self._settings.floor:
            self._held = self.count
            return self._change(self.count // 2, "probe", in_flight)
        if self._full:
            more = self.count if self._rush else max(1, isqrt(self.count))
            return self._change(self.count + more, "room", in_flight)
        self._begin_round()
        return False

    def _begin_round(self) -> None:
        self._answers, self._sum_s, self._full = 0, 0.0, False

    def _change(self, count: int, reason: str, in_flight: int) -> bool:
        self._begin_round()
        count = max(self._settings.floor, min(self._settings.ceiling, count))
        if count == self.count:
            return False
        self.count, self.reason, self._skip = count, reason, in_flight
        return True


class AdaptiveChannels:
    """`ChannelLimits` by latency and failures: a `ChannelCount` for each peer."""

    def __init__(self, settings: AdaptiveSettings | None = None) -> None:
        self._settings = settings or AdaptiveSettings()

    def connected(self, peer: PeerChannels, now: float) -> int:
        count = peer.limits_state = ChannelCount(self._settings, peer.channel_count)
        return count.count

    def ended(self, peer: PeerChannels, outcome: Outcome, latency_s: float, now: float) -> int:
        count: ChannelCount = peer.limits_state
        in_flight = peer.closed_count + 1  # the one that ended is no longer counted
        if outcome is Outcome.RESPONSE:
            count.answered(latency_s, in_flight)
        elif outcome in (Outcome.TIMEOUT, Outcome.REJECTED):
            count.failed(in_flight)
        return count.count
