"""Which rendition of a set one viewer is to follow: the largest that its line carries (pure).

*Down*, at the next key frame, where the line would fall too far behind: what waits now, and what a further group would
add at the rate at which the viewer takes, is more than half of the target delay, or pictures are being left out.

*Up* only with evidence that the line carries more, and never as a trial. A small rendition says nothing about a line
by its rate; the evidence is how fast a burst went (a key frame, the group that is cached for those who join). What
counts is how fast the acknowledgements moved within the burst: where it began, a round trip passes in silence, and a
receive buffer or a queue on the way swallows a part at once. A burst that was gone between two looks sets a bound from
below. Of the last 20 s the slowest counts, for a line that is fast now and then is not fast. A viewer who has just come
has no such past: for the first 10 s it goes up only to the largest, and only where the line carries several times that.

What no sender can see: a shaper that lets a burst pass and then holds the line to its rate, a queue that swallows a
burst, a line that is slow only between key frames. There a step up fails. It costs a group or two: the way back is the
rule for going down, and what the line carried while it was full is remembered. Nothing above that is tried again for a
minute, then two, up to ten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from flowctl.units import format_bit_rate

_EVIDENCE_S: Final = 20.0
"""How long evidence counts: longer than most lines stay fast between two slow times."""
_LEAST_BURST_BYTES: Final = 8000
"""Smallest burst: with less, one delayed acknowledgement more or less decides."""
_BURST_SHARE: Final = 3.0
"""A burst is what was written within one look, where it is so many times the mean of the stream."""
_MEAN_S: Final = 2.0
"""Time over which that mean is taken."""
_LEAST_SLOPE_S: Final = 0.015
"""Shortest time within a burst over which its speed is taken."""
_DRAIN_NOTE_S: Final = 1.0
"""Time between two notes of the drain rate, which is a mean over a second."""

_SETTLING_S: Final = 10.0
"""Time after the join in which a viewer's line has no past."""
_SETTLING_MARGIN: Final = 4.0
"""How many times the largest rendition the line has to carry for a step up meanwhile: lines that jump do it by this."""
_UP_SHARE: Final = 0.95
"""Share of a rendition's rate that the line has to carry: what is measured is a little less than it does."""
_LEAST_STAY_S: Final = 20.0
"""Shortest time between a switch and a step up."""
_MOST_DELAY_SHARE: Final = 0.5
"""Share of the target delay that may be used up before a key frame comes: that key frame takes the rest."""
_RECOVERY_S: Final = 20.0
"""Time in which a viewer that went down is to catch up with what it is behind."""
_FAILED_WITHIN_S: Final = 30.0
"""A step up after which the line sends the viewer down so soon has failed."""
_LEAST_BACK_OFF_S: Final = 60.0
_MOST_BACK_OFF_S: Final = 600.0


class Choice(NamedTuple):
    """A rendition.

    Attributes:
        why: in plain words, for operators.
    """

    name: str
    why: str


@dataclass(eq=False, slots=True)
class LineMeter:
    """What a line carries, from looks at what was written to a connection and what of it is not acknowledged."""

    _at: float | None = None  # of the last look
    _written: int = 0
    _mean: float = 0.0  # bytes per second that were written lately
    _burst: tuple[float, int, int] | None = None  # the open one: (look before it, its first byte, the one behind it)
    _first: tuple[float, int] | None = None  # first look at which some of it was acknowledged, and how far
    _last: tuple[float, int] | None = None  # last one at which not all was
    _speeds: deque[tuple[float, float, float]] = field(default_factory=deque)  # (when, bytes, seconds) of full times
    _bounds: deque[tuple[float, float]] = field(default_factory=deque)  # (when, bytes per second at least)
    _noted_at: float = float("-inf")

    def sample(self, now: float, written_bytes: int, waiting_bytes: int) -> None:
        before_at, before = self._at, self._written
        self._at, self._written = now, written_bytes
        if before_at is None or now <= before_at:
            return
        step, seconds = written_bytes - before, now - before_at
        if self._burst is None and step >= max(_LEAST_BURST_BYTES, _BURST_SHARE * self._mean * seconds):
            self._burst, self._first, self._last = (before_at, before, written_bytes), None, None
        self._mean += min(seconds / _MEAN_S, 1.0) * (step / seconds - self._mean)
        if self._burst is not None:
            self._follow_burst(now, written_bytes - waiting_bytes, *self._burst)

    def _follow_burst(self, now: float, acknowledged: int, before_at: float, begin: int, end: int) -> None:
        if acknowledged <= begin:
            return
        if acknowledged < end:
            if self._first is None:
                self._first = now, acknowledged
            self._last = now, acknowledged
            return
        first_at, first = self._first or (before_at, begin)
        self._bounds.append((now, (end - first) / (now - first_at)))
        if self._first is not None and self._last is not None and self._last[0] - first_at >= _LEAST_SLOPE_S:
            self._speeds.append((now, self._last[1] - first, self._last[0] - first_at))
        self._burst = None

    def note_drain(self, now: float, bytes_per_s: float) -> None:
        """Note the drain rate (`flowctl.core.flow.meters.DrainMeter.known`)."""
        if now - self._noted_at >= _DRAIN_NOTE_S:
            self._noted_at = now
            self._speeds.append((now, bytes_per_s * _DRAIN_NOTE_S, _DRAIN_NOTE_S))

    def evidence(self, now: float) -> float | None:
        """Return the bytes per second that the line has been seen to carry of late. None: not known."""
        for found in (self._speeds, self._bounds):
            while found and now - found[0][0] > _EVIDENCE_S:
                found.popleft()
        speeds = list(self._speeds)
        if not speeds:
            return max((bound for _, bound in self._bounds), default=None)
        # Two by two: one alone is as exact as an acknowledgement is large.
        pairs = zip(speeds, speeds[1:] or speeds, strict=False)
        return min((one[1] + two[1]) / (one[2] + two[2]) for one, two in pairs)


@dataclass(eq=False, slots=True)
class RenditionRule:
    """Chooses for one viewer.

    Args:
        began_at: when the viewer came.
        fixed: whether its player cannot take a switch.

    Attributes:
        ceiling: bytes per second that the line carried when a step up failed; None: none has.
        not_before: until when nothing above that is tried again.
    """

    began_at: float
    fixed: bool = False
    line: LineMeter = field(default_factory=LineMeter)
    failed_tries: int = 0
    ceiling: float | None = None
    not_before: float = float("-inf")
    _switched_at: float | None = None
    _up_at: float = float("-inf")  # of the last step up
    _present_rate: float = 0.0
    _forced: str = ""  # rendition to which the line forces the viewer down, by the last decision
    _drain: float | None = None  # the last that was known

    def first(self, rates: Mapping[str, float]) -> Choice:
        """Choose for a viewer that comes; `rates`: bytes per second by name, smallest first, never empty."""
        names = list(rates)
        if self.fixed:
            return Choice(names[len(names) // 2], "its player cannot change over")
        return Choice(names[0], "the first, until its line is known")

    def sample(self, now: float, written_bytes: int, waiting_bytes: int) -> None:
        """Take a look: bytes written to the connection, and those of them that its kernel holds (SIOCOUTQ)."""
        self.line.sample(now, written_bytes, waiting_bytes)

    def decide(
        self,
        now: float,
        rates: Mapping[str, float],
        present: str,
        *,
        lagging: bool,
        drain: float | None,
        delay_s: float,
        left_out: bool,
        target_s: float,
        group_s: float,
    ) -> Choice | None:
        """Choose what to go on in at the next key frame; the last decision before it counts.

        Args:
            now: seconds.
            rates: bytes per second of each rendition by name, with sound, smallest first.
            present: the one that is followed; one that is not in `rates` has ended.
            lagging: whether the viewer lags.
            drain: bytes per second at which it takes, if known (`DrainMeter.known`).
            delay_s: what waits, here and in the kernel, over that rate.
            left_out: whether pictures have been left out since the last key frame.
            target_s: target delay.
            group_s: time between key frames.

        Returns:
            Choice | None: the other rendition. None: stay.
        """
        self._forced = ""
        rate = rates.get(present)
        if rate is None:
            return _nearest(rates, self._present_rate)
        self._present_rate = rate
        if drain is not None:
            self._drain = drain
            self.line.note_drain(now, drain)
        if self.fixed:
            return None
        if lagging:
            late_s = delay_s + (group_s * (rate / drain - 1) if drain else 0.0)
            if left_out or late_s > _MOST_DELAY_SHARE * target_s:
                return self._down(rates, rate, drain, delay_s)
        return self._up(now, rates, rate) if delay_s <= _MOST_DELAY_SHARE * target_s else None

    def _down(self, rates: Mapping[str, float], rate: float, drain: float | None, delay_s: float) -> Choice | None:
        smaller = [name for name, other in rates.items() if other < rate]
        if not smaller:
            return None
        if drain is None:
            self._forced = smaller[-1]
            return Choice(smaller[-1], "pictures were late")
        carried = drain * (1 - min(delay_s / _RECOVERY_S, 1.0))
        self._forced = next((name for name in reversed(smaller) if rates[name] <= carried), smaller[0])
        return Choice(self._forced, f"the line takes {_megabits(drain)} of {format_bit_rate(8 * rate)}")

    def _up(self, now: float, rates: Mapping[str, float], rate: float) -> Choice | None:
        evidence = self.line.evidence(now)
        if evidence is None or (self._switched_at is not None and now - self._switched_at < _LEAST_STAY_S):
            return None
        larger = [name for name, other in rates.items() if other > rate]
        if now - self.began_at < _SETTLING_S:
            larger = larger[-1:]
            evidence /= _SETTLING_MARGIN
        if self.ceiling is not None and now < self.not_before:
            evidence = min(evidence, self.ceiling)
        name = next((name for name in reversed(larger) if _UP_SHARE * rates[name] <= evidence), None)
        return None if name is None else Choice(name, f"the line has carried {format_bit_rate(8 * evidence)}")

    def switched(self, now: float, name: str, rates: Mapping[str, float]) -> bool:
        """Note that the viewer goes on in `name`; return whether a step up has failed with it."""
        by_line = name == self._forced
        failed = by_line and now - self._up_at <= _FAILED_WITHIN_S
        if by_line:
            self.failed_tries = self.failed_tries + 1 if failed else 0
        if failed:
            self.not_before = now + min(_LEAST_BACK_OFF_S * 2 ** (self.failed_tries - 1), _MOST_BACK_OFF_S)
            self.ceiling = self._drain if self._drain is not None else rates.get(name)
        if rates.get(name, 0.0) > self._present_rate:
            self._up_at = now
        self._switched_at, self._forced = now, ""
        self._present_rate = rates.get(name, self._present_rate)
        return failed


def _nearest(rates: Mapping[str, float], rate: float) -> Choice | None:
    name = min(rates, key=lambda name: (rates[name] > rate, abs(rates[name] - rate)), default=None)
    return None if name is None else Choice(name, "its rendition has ended")


def _megabits(bytes_per_s: float) -> str:
    return format_bit_rate(8 * bytes_per_s).removesuffix(" Mbit/s")
