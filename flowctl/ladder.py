"""The step-down ladder: how much of a stream one slow viewer is given, so that its picture settles (pure).

Theory of operation. A viewer stands on a step: everything; no frames that nobody needs; key frames and audio; audio
alone; and below that the connection ends. Readings come in, about twice a second while the viewer is in trouble, and
at most one `Move` comes out of each.

*Pressure* leads down: the soft limit was entered, the load has stayed above its low mark, or the kernel refuses most
of the time while the measured rate is below what the step needs. Each step has a dwell time before the next one down,
unless the measured rate says that the step cannot be held: then the best step that fits is taken at once.

*Calm* leads up, one step at a time: at once where the measured rate promises that the step fits, else as a probe
after `probe_s`. What failed before, promised or not, is tried again after a wait that doubles with each failure. That
is what ends flapping: a viewer at 80 % of the stream's rate is not promoted and punished for ever.

A peer that takes nothing at all cannot be helped by any step: the ladder stands still, and the time limits decide.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Final, NamedTuple

from flowctl.errors import ConfigError
from flowctl.fieldtypes import check_fields
from flowctl.flow import MessageClass
from flowctl.units import format_size


class LadderStep(enum.IntEnum):
    """What a viewer is given, from everything to nothing."""

    FULL = 0
    NO_DISPOSABLE = 1
    KEY_FRAMES = 2
    AUDIO_ONLY = 3
    CLOSE = 4


_DISPOSABLE: Final = 1 << MessageClass.DISPOSABLE
_INTER: Final = 1 << MessageClass.INTER
_KEY: Final = 1 << MessageClass.KEY
STEP_MASKS: Final = (0, _DISPOSABLE, _DISPOSABLE | _INTER, _DISPOSABLE | _INTER | _KEY, 0)
"""Classes refused on each step, as bits by `MessageClass`; CLOSE ends the connection instead."""
HELD_STEPS: Final = (LadderStep.FULL, LadderStep.NO_DISPOSABLE, LadderStep.KEY_FRAMES, LadderStep.AUDIO_ONLY)
"""Steps on which a viewer can stay."""

_STRAIN_S: Final = 5.0
"""Time constant of the share of time in which the kernel refused: longer than the burst of one key frame."""
_LONGEST_S: Final = 1.0
"""A reading speaks for no more time than this: the one before it may be long ago."""
_STRAINED: Final = 0.5
"""From this share on, a rate below what is needed is pressure; a key frame now and then stays below it."""
_CALM_MS: Final = 1000.0
"""A viewer that is further behind is not calm, whatever its queue."""
_FRESH_S: Final = 10.0
"""A rate that is older leads nobody down; it is still what a step up is weighed against."""
_PATIENCE: Final = 4.0
"""Where the measured rate says that the step can be held, its dwell time is this much longer: the queue is falling."""
_WORTH: Final = 0.97
"""A step that needs more than this share of the one above it brings nothing and is passed over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderSettings:
    """Times of the ladder in seconds, and its lowest step.

    Args:
        dwell_full_s: least time on FULL before a step down that no measured rate demands.
        dwell_no_disposable_s: the same for NO_DISPOSABLE.
        dwell_key_frames_s: the same for KEY_FRAMES.
        dwell_audio_only_s: how long pressure may last on the lowest step before CLOSE; 0: for ever.
        pressure_s: a load above its low mark for so long is pressure.
        up_s: calm before a step up that the measured rate promises.
        probe_s: calm before a step up that it does not promise; doubles with each failure.
        probe_max_s: longest such wait.
        headroom: a step fits where the measured rate is at least this many times what the step needs.
        lowest: lowest step to be taken. CLOSE: all of them, and who cannot hold the last one is closed.

    Raises:
        ConfigError: a time is negative, the headroom below 1, or `probe_max_s` below `probe_s`.
    """

    dwell_full_s: float = 1.0
    dwell_no_disposable_s: float = 3.0
    dwell_key_frames_s: float = 5.0
    dwell_audio_only_s: float = 30.0
    pressure_s: float = 2.0
    up_s: float = 5.0
    probe_s: float = 30.0
    probe_max_s: float = 300.0
    headroom: float = 1.1
    lowest: LadderStep = LadderStep.CLOSE

    def __post_init__(self) -> None:
        check_fields(self)
        for name in (
            "dwell_full_s",
            "dwell_no_disposable_s",
            "dwell_key_frames_s",
            "dwell_audio_only_s",
            "pressure_s",
            "up_s",
            "probe_s",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} of the ladder is {getattr(self, name)}, it must be 0 or more seconds")
        if not self.probe_max_s >= self.probe_s:
            raise ConfigError(f"probe_max_s of the ladder is {self.probe_max_s}, it must be at least {self.probe_s:g}")
        if not self.headroom >= 1:
            raise ConfigError(f"headroom of the ladder is {self.headroom}, it must be 1 or more")

    @property
    def dwells_s(self) -> tuple[float, float, float, float]:
        """Dwell times of FULL, NO_DISPOSABLE, KEY_FRAMES and AUDIO_ONLY."""
        return self.dwell_full_s, self.dwell_no_disposable_s, self.dwell_key_frames_s, self.dwell_audio_only_s


class Reading(NamedTuple):
    """What the ladder is shown of a viewer.

    Attributes:
        refused: the kernel refuses, or has refused since the last reading.
        above_low: the load is above its low mark on some axis.
        soft: the soft limit was entered since the last reading, or is in force.
        drained: the kernel has taken everything at some moment since the last reading.
        stalled: the kernel has taken nothing for so long that there is no rate to speak of.
        rate: bytes per second that the peer takes when there is always something to take. None: not measured.
        rate_at: when that was last measured, in seconds.
        needed: bytes per second of the stream on FULL, NO_DISPOSABLE, KEY_FRAMES and AUDIO_ONLY. Empty: not known.
        delay_ms: how far behind the viewer is, what waits in the kernel included.
    """

    refused: bool = False
    above_low: bool = False
    soft: bool = False
    drained: bool = False
    stalled: bool = False
    rate: float | None = None
    rate_at: float = 0.0
    needed: tuple[float, ...] = ()
    delay_ms: float = 0.0


class Move(NamedTuple):
    """One change of step.

    Attributes:
        old: step before.
        new: step after.
        why: cause, measured rate and needed rate, in one line.
    """

    old: LadderStep
    new: LadderStep
    why: str


def step_rates(sizes_per_s: Sequence[float]) -> tuple[float, float, float, float]:
    """Return what each step needs of a stream, in bytes per second, from its rates by class."""
    return (
        sum(sizes_per_s),
        *(sum(rate for item, rate in enumerate(sizes_per_s) if not mask >> item & 1) for mask in STEP_MASKS[1:4]),
    )  # type: ignore[return-value]  # four sums


def useful_steps(needed: Sequence[float], lowest: LadderStep = LadderStep.CLOSE) -> list[LadderStep]:
    """Return the steps that make a difference for a stream, best first; all of them where its rates are not known.

    A stream without disposable frames has no NO_DISPOSABLE, one without sound no AUDIO_ONLY (it would be nothing), and
    one that is all sound only FULL.
    """
    if not needed:
        return [step for step in HELD_STEPS if step <= lowest]
    steps = [LadderStep.FULL]
    for step in HELD_STEPS[1:]:
        if step <= lowest and 0 < needed[step] < _WORTH * needed[steps[-1]]:
            steps.append(step)
    return steps


class Ladder:
    """Where one viewer stands. Not thread-safe: its Sender's lock guards it.

    Args:
        settings: times.
        now: time in seconds.

    Attributes:
        settings: times; may be replaced at any time.
        step: the present step.
        since: since when, in seconds.
        changes: number of moves.
    """

    __slots__ = (
        "_above_since",
        "_at",
        "_calm_since",
        "_climbed",
        "_disproved_at",
        "_failures",
        "_pressed_since",
        "_strain",
        "_times",
        "changes",
        "settings",
        "since",
        "step",
    )

    def __init__(self, settings: LadderSettings, now: float) -> None:
        self.settings = settings
        self.step = LadderStep.FULL
        self.since = now
        self.changes = 0
        self._at = now  # of the last reading
        self._strain = 0.0  # share of the last seconds in which the kernel refused
        self._above_since: float | None = None
        self._pressed_since: float | None = None
        self._calm_since: float | None = None
        self._climbed = False  # the present step was reached from below
        self._failures = [0, 0, 0, 0]  # by step: how often climbing to it has failed lately
        self._disproved_at = -1.0  # a rate measured before is too low: the viewer has held a step that needs more
        self._times = [0.0, 0.0, 0.0, 0.0]

    @property
    def mask(self) -> int:
        """Classes that the present step refuses, as bits by `MessageClass`."""
        return STEP_MASKS[self.step]

    @property
    def idle(self) -> bool:
        """Whether nothing is going on: no step is taken, and no pressure to take one builds up."""
        return self.step is LadderStep.FULL and self._strain < 0.05 and self._above_since is None

    def time_in_steps(self, now: float) -> tuple[float, float, float, float]:
        """Return the seconds spent on FULL, NO_DISPOSABLE, KEY_FRAMES and AUDIO_ONLY up to `now`."""
        times = list(self._times)
        if self.step < LadderStep.CLOSE:
            times[self.step] += now - self.since
        return times[0], times[1], times[2], times[3]

    def read(self, now: float, reading: Reading) -> Move | None:
        """Take one reading; return the move that follows from it, or None.

        Args:
            now: time in seconds.
            reading: what the viewer is like.
        """
        weight = 1 - exp(-min(now - self._at, _LONGEST_S) / _STRAIN_S)
        self._strain += weight * (float(reading.refused) - self._strain)
        self._at = now
        if self.step is LadderStep.CLOSE or reading.stalled:
            self._calm_since = None
            return None
        if not reading.above_low:
            self._above_since = None
        elif self._above_since is None:
            self._above_since = now
        cause = self._pressure(now, reading)
        if cause:
            self._calm_since = None
            if self._pressed_since is None:
                self._pressed_since = now
            return self._down(now, reading, cause)
        if reading.delay_ms >= _CALM_MS:
            self._calm_since = None  # a kernel's buffer hides for seconds that a step is too much
        elif not reading.above_low and (reading.drained or not reading.refused):
            self._pressed_since = None
            if self._calm_since is None:
                self._calm_since = now
        return self._up(now, reading) if self._calm_since is not None else None

    # -- down

    def _pressure(self, now: float, reading: Reading) -> str:
        """Return what presses, in words; empty: nothing does."""
        if reading.soft:
            return "soft limit"
        if self._above_since is not None and now - self._above_since >= self.settings.pressure_s:
            return f"above the low mark for {now - self._above_since:.1f} s"
        if self._strain > _STRAINED and self._cannot(now, reading, self.step):
            return f"the kernel refused {self._strain:.0%} of the time"
        return ""

    def _known(self, reading: Reading) -> float | None:
        """Return the measured rate, unless the viewer has proved since that it can take more."""
        return reading.rate if reading.rate_at > self._disproved_at else None

    def _short_of(self, reading: Reading, step: LadderStep) -> bool:
        """Whether the measured rate says that `step` cannot be held."""
        rate = self._known(reading)
        return rate is not None and bool(reading.needed) and rate < reading.needed[step]

    def _cannot(self, now: float, reading: Reading, step: LadderStep) -> bool:
        """Whether the rate that was measured lately says that `step` cannot be held."""
        return now - reading.rate_at <= _FRESH_S and self._short_of(reading, step)

    def _down(self, now: float, reading: Reading, cause: str) -> Move | None:
        steps = [step for step in useful_steps(reading.needed, self.settings.lowest) if step > self.step]
        known = now - reading.rate_at <= _FRESH_S and self._known(reading) is not None and bool(reading.needed)
        patience = _PATIENCE if known and not self._short_of(reading, self.step) else 1.0
        if not steps:
            return self._give_up(now, reading, cause, patience)
        cannot = self._cannot(now, reading, self.step)
        if not cannot and now - self.since < self.settings.dwells_s[self.step] * patience:
            return None
        target = steps[0]
        while cannot and self._short_of(reading, target) and target is not steps[-1]:
            target = steps[steps.index(target) + 1]
        if self._climbed:
            for step in range(self.step, target):
                self._failures[step] += 1
        return self._move(target, now, reading, cause, climbed=False)

    def _give_up(self, now: float, reading: Reading, cause: str, patience: float) -> Move | None:
        """Close, if pressure has lasted for the dwell time of the lowest step."""
        dwell_s = self.settings.dwell_audio_only_s
        since = max(self.since, self._pressed_since or now)
        if not dwell_s or now - since < dwell_s * patience or self.settings.lowest < LadderStep.CLOSE:
            return None
        cause = f"{cause}, on the lowest step for {dwell_s:g} s"
        return self._move(LadderStep.CLOSE, now, reading, cause, climbed=False)

    # -- up

    def _up(self, now: float, reading: Reading) -> Move | None:
        settings, step = self.settings, self.step
        calm_s = now - (self._calm_since if self._calm_since is not None else now)
        if self._climbed and now - self.since > 2 * self._wait_s(self._failures[step]):
            self._failures[step] = 0  # it has held for long: what failed before was another link
        if self._strain <= _STRAINED and calm_s >= 2 * settings.up_s and self._short_of(reading, step):
            self._disproved_at = reading.rate_at
        above = [item for item in useful_steps(reading.needed, settings.lowest) if item < step]
        if not above:
            return None
        target = above[-1]
        rate, failures = self._known(reading), self._failures[target]
        fits = rate is None or not reading.needed or rate >= settings.headroom * reading.needed[target]
        wait_s = settings.up_s if fits and not failures else self._wait_s(failures)
        if calm_s < wait_s:
            return None
        return self._move(target, now, reading, f"calm for {calm_s:.0f} s{'' if fits else ', a probe'}", climbed=True)

    def _wait_s(self, failures: int) -> float:
        settings = self.settings
        return min(settings.probe_s * 2.0**failures, settings.probe_max_s)

    # -- the one place that changes the step

    def _move(self, new: LadderStep, now: float, reading: Reading, cause: str, *, climbed: bool) -> Move:
        old = self.step
        self._times[old] += now - self.since
        self.step, self.since, self._climbed = new, now, climbed
        self.changes += 1
        self._above_since = self._calm_since = None
        rate = "rate not measured" if reading.rate is None else f"takes {format_size(int(reading.rate))}/s"
        needs = f", {new.name} needs {format_size(int(reading.needed[new]))}/s" if new < len(reading.needed) else ""
        return Move(old, new, f"{old.name} -> {new.name}: {cause}; {rate}{needs}")
