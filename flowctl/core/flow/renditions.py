"""Which rendition of a set one viewer is to follow: the largest that its line carries (pure).

*Down*, at the next key frame, where the viewer is behind by more than half of the target delay, or will be after a
further group, which is reckoned where the line carries far less than the rendition; or where pictures are left out.

*Up* only with evidence that the line carries more, and never as a trial. A small rendition says nothing about a line
by its rate; the evidence is how fast a burst went (a key frame, the group that is cached for those who join). What
counts is how fast the acknowledgements moved within the burst: where it began, a round trip passes in silence, and a
receive buffer or a queue on the way swallows a part at once. A burst that was gone between two looks sets a bound from
below. One that the peer's receive buffer swallows goes as fast as its program reads, which the receive window tells. Of
the last 20 s the slowest counts, but for an outlier: a line that is fast now and then is not fast. A viewer who has
just come has no such past: for the first 10 s the line has to carry twice the next size.

What no sender can see: a shaper that lets a burst pass and then holds the line to its rate, a queue that swallows a
burst, a line that is slow only between key frames. There a step up fails. So it is one size at a time, and a *trial*
for half a minute: where a key frame comes while what the kernel holds is late by a quarter of the target, beside the
round trip that it held before, the way back is taken at once, and nothing is left out. What failed, and all above, is
not tried again for ten minutes; for one, then two, where it went well for ten seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from flowctl.units import format_bit_rate

_EVIDENCE_S: Final = 20.0
"""How long evidence counts: longer than most lines stay fast between two slow times."""
_LEAST_BURST_BYTES: Final = 5000
"""Smallest burst: with less, one delayed acknowledgement more or less decides."""
_MOST_NOTES: Final = 128
"""Evidence that is kept: nobody asks for that of a viewer in the smallest rendition that cannot keep up with it."""
_BURST_SHARE: Final = 3.0
"""A burst is so many times what is written in that time on average."""
_MEAN_S: Final = 2.0
"""Time over which that average is taken."""
_LEAST_LOOK_S: Final = 0.01
"""Shortest time that a burst is taken to have lasted: timers are hardly more exact."""
_LEAST_RUN_BYTES: Final = 40_000
"""Bytes of bursts in a row that tell a speed: several times what one acknowledgement more or less makes of it."""
_PER_OUTLIER: Final = 5
"""Runs of which the slowest does not count: a thread that is late, here or at the peer, makes one. Two bursts a run."""
_LEAST_SLOPE_S: Final = 0.015
"""Shortest time within a burst over which its speed is taken."""
_FULL_DELAY_S: Final = 0.25
"""Delay from which the line is full: with less, what waits may be an acknowledgement that is held back."""
_HELD_BACK_BYTES: Final = 3000
"""Two segments, whose acknowledgement may be held back by 40 ms and more where nothing follows."""
_WINDOW_NEWS_S: Final = 0.02
"""How late it is known that a burst was read: a receive window is told of with every second packet or so that comes."""
_DRAIN_NOTE_S: Final = 1.0
"""Time between two notes of the drain rate, which is a mean over a second."""

_SETTLING_S: Final = 10.0
"""Time after the join in which a viewer's line has no past."""
_SETTLING_MARGIN: Final = 2.0
"""How many times the next rendition the line has to carry for a step up meanwhile."""
_UP_SHARE: Final = 0.95
"""Share of a rendition's rate that the line has to carry: what is measured is a little less than it does."""
_LEAST_STEP: Final = 1.1
"""How many times the present rendition the next one is at least: what is measured of two of one rate differs less, now
for one and now for the other."""
_LEAST_STAY_S: Final = 20.0
"""Shortest time between a switch and a step up, but for one that follows on another: a group is enough for that."""
_MOST_DELAY_SHARE: Final = 0.5
"""Share of the target delay that may be used up before a key frame comes: that key frame takes the rest."""
_MOST_DELAY_IF_CARRIED: Final = 0.8
"""The same where the line carries the rendition: then the delay shrinks, if slowly."""
_FAR_SHARE: Final = 0.75
"""Share of a rendition's rate below which what a further group adds is reckoned; above, it is in the noise."""
_RECOVERY_S: Final = 20.0
"""Time in which a viewer that went down is to catch up with what it is behind."""
_FAILED_WITHIN_S: Final = 30.0
"""Time for which a step up is a trial. It has failed where the line sends the viewer down within it."""
_TRIAL_DELAY_S: Final = 0.375
"""Delay before a key frame that ends a trial where the line is not known to carry it. With 0.25 s lines of 1.02 times a
rendition fail too; with 0.5 s the next key frame finds the bucket of a shaper empty more often."""
_STEADY_S: Final = 10.0
"""Time within which a trial fails where the line does not carry it: the bucket of a shaper is empty by then."""
_LEAST_BACK_OFF_S: Final = 60.0
"""Time for which nothing is tried after a trial that failed later; twice as long each time."""
_BACK_OFF_S: Final = 600.0
"""Time for which nothing is tried above what the line carried in a trial that has failed, at most."""


FIRST: Final = "the first, until its line is known"
ENDED: Final = "its rendition has ended"


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
    _key_at: float = float("-inf")  # the key frame of the last burst was published
    _burst: tuple[float, float, int] | None = None  # the open one: (not before, its first byte, the one behind it)
    _first: tuple[float, int] | None = None  # first look at which some of it was acknowledged, and how far
    _last: tuple[float, int] | None = None  # last one at which not all was
    # (when, bytes, seconds) of full times
    _speeds: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_MOST_NOTES))
    # (when, bytes per second at least)
    _bounds: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MOST_NOTES))
    _noted_at: float = float("-inf")
    unread_bytes: int = 0  # what the peer's kernel has and its program has not read, at the last look
    _widest_bytes: int = 0  # the peer's receive window when all was read
    _unread: tuple[float, float, int] | None = None  # a burst that is being read, as `_burst`
    # (when, bytes, seconds) of bursts that were read
    _reads: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_MOST_NOTES))

    def sample(
        self, now: float, written_bytes: int, waiting_bytes: int, key_at: float, window_bytes: int | None = None
    ) -> None:
        """Take a look: what was written to the connection, and what of it the kernel holds (SIOCOUTQ).

        `key_at`: when the last key frame was published. A burst begins with one, or with what a viewer finds cached.
        `window_bytes`: the peer's receive window, if known.
        """
        if window_bytes is not None:
            self._widest_bytes = max(self._widest_bytes, window_bytes)
            self.unread_bytes = self._widest_bytes - window_bytes
        before_at = self._at or now
        self._follow_written(now, written_bytes, waiting_bytes, key_at)
        if self._unread is not None and written_bytes - waiting_bytes - self.unread_bytes >= self._unread[2]:
            since, begin, end = self._unread  # it was read at some time behind the look before
            self._reads.append((now, end - begin, max(before_at - since - _WINDOW_NEWS_S, 0.0)))
            self._unread = None

    @property
    def being_read(self) -> bool:
        """Whether the last burst may still lie in the peer's receive buffer."""
        return self._unread is not None and self.unread_bytes > 0

    def _follow_written(self, now: float, written_bytes: int, waiting_bytes: int, key_at: float) -> None:
        before_at, before = self._at, self._written
        self._at, self._written = now, written_bytes
        if before_at is None or now <= before_at:
            return
        step, since = written_bytes - before, max(before_at, min(key_at, now - _LEAST_LOOK_S))
        usual = self._mean * (since - before_at)
        if (
            self._burst is None
            and key_at > self._key_at
            and step - usual >= max(_LEAST_BURST_BYTES, _BURST_SHARE * self._mean * (now - since))
        ):
            self._burst, self._key_at = (since, before + usual, written_bytes), key_at
            self._unread = None
            self._first = self._last = None
        seconds = now - before_at
        self._mean += min(seconds / _MEAN_S, 1.0) * (step / seconds - self._mean)
        if self._burst is not None:
            self._follow_burst(now, written_bytes - waiting_bytes, *self._burst)

    def _follow_burst(self, now: float, acknowledged: int, since: float, begin: float, end: int) -> None:
        if acknowledged <= begin:
            self._burst = now, begin, end
            return
        if self._unread is None:
            self._unread = since, begin, end
        if acknowledged < end - _HELD_BACK_BYTES:
            if self._first is None:
                self._first = now, acknowledged
            self._last = now, acknowledged
            return
        gone = min(acknowledged, end)
        bound = (gone - _HELD_BACK_BYTES - begin) / (now - since)
        if self._first is not None and self._last is not None:
            (first_at, first), (last_at, last) = self._first, self._last
            size, seconds = gone - first, now - first_at
            if last_at - first_at >= _LEAST_SLOPE_S:
                if (last - first) * seconds > size * (last_at - first_at):
                    size, seconds = last - first, last_at - first_at  # all had gone some time before this look
                if self._bounds:
                    self._speeds.append((now, size, seconds))
            bound = max(bound, size / seconds)  # all that is counted of the first burst: TCP starts slowly
        self._bounds.append((now, bound))
        self._burst = None
        if self.unread_bytes < (end - begin) / 2:
            self._unread = None  # its program reads what comes

    def note_drain(self, now: float, bytes_per_s: float) -> None:
        """Note the drain rate (`flowctl.core.flow.meters.DrainMeter.known`)."""
        if now - self._noted_at >= _DRAIN_NOTE_S:
            self._noted_at = now
            self._speeds.append((now, bytes_per_s * _DRAIN_NOTE_S, _DRAIN_NOTE_S))

    def evidence(self, now: float) -> float | None:
        """Return the bytes per second that the line has been seen to carry of late. None: not known."""
        for found in (self._speeds, self._bounds, self._reads):
            while found and now - found[0][0] > _EVIDENCE_S:
                found.popleft()
        line = self._line()
        seconds = sum(longer for _, _, longer in self._reads)
        return line if line is None or not seconds else min(line, sum(size for _, size, _ in self._reads) / seconds)

    def _line(self) -> float | None:
        """Return what acknowledgements say."""
        if not self._speeds:
            return max((bound for _, bound in self._bounds), default=None)
        # One burst alone is as exact as an acknowledgement is large and a timer is late.
        fastest = sorted((size + _HELD_BACK_BYTES) / (seconds - _LEAST_LOOK_S) for _, size, seconds in self._speeds)
        runs, size, seconds = [], 0.0, 0.0
        for _, more, longer in self._speeds:
            size, seconds = size + more, seconds + longer
            if size >= _LEAST_RUN_BYTES:
                runs.append(size / seconds)
                size, seconds = 0.0, 0.0
        runs.sort()
        slowest = runs[len(runs) // _PER_OUTLIER] if runs else size / seconds
        return min(slowest, fastest[len(fastest) // (2 * _PER_OUTLIER)])


@dataclass(eq=False, slots=True)
class RenditionRule:
    """Chooses for one viewer.

    Args:
        began_at: when the viewer came.

    Attributes:
        ceiling: bytes per second that the line carried when a step up failed.
        not_before: until when nothing above that is tried again.
        why_not_up: what the line was seen to carry when it was too little for a step up, for operators; empty: never.
    """

    began_at: float
    line: LineMeter = field(default_factory=LineMeter)
    ceiling: float = inf
    not_before: float = float("-inf")
    why_not_up: str = ""
    _waiting_bytes: int = 0  # what the kernel held at the last look
    _least_s: float = inf  # the least that it held since the last switch, in seconds of the present rate: a round trip
    _usual_s: float = 0.0  # the same, at the last step up
    _switched_at: float | None = None
    _up_at: float = float("-inf")  # of the last step up
    _back_off_s: float = 0.0  # the last one
    _present_rate: float = 0.0
    _forced: str = ""  # rendition to which the line forces the viewer down, by the last decision
    _carried: float = inf  # bytes per second that the line took when it did

    def first(self, rates: Mapping[str, float]) -> Choice:
        """Choose for a viewer that comes; `rates`: bytes per second by name, smallest first, never empty."""
        return Choice(next(iter(rates)), FIRST)

    def sample(
        self, now: float, written_bytes: int, waiting_bytes: int, key_at: float, window_bytes: int | None = None
    ) -> None:
        """Take a look at the connection, see `LineMeter.sample`."""
        self._waiting_bytes = waiting_bytes
        self.line.sample(now, written_bytes, waiting_bytes, key_at, window_bytes)

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
            delay_s: age of the oldest byte that it has not taken (`SlowPeer.behind`).
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
        self._least_s = min(self._least_s, self._waiting_bytes / rate)
        if drain is not None and lagging and delay_s >= _FULL_DELAY_S:
            self.line.note_drain(now, drain)
        late_s = delay_s
        if drain is not None and drain < _FAR_SHARE * rate and now - self._up_at > group_s:  # else TCP may gain speed
            late_s += group_s * (rate / drain - 1)
        most_s = (_MOST_DELAY_SHARE if drain is None or drain < rate else _MOST_DELAY_IF_CARRIED) * target_s
        full = lagging and delay_s >= _FULL_DELAY_S
        if now - self._up_at <= _FAILED_WITHIN_S and (drain is None or drain < rate):
            delay_s = max(delay_s, self._waiting_bytes / rate)  # of one that does not lag yet, too
            late_s, most_s, lagging = max(late_s, delay_s), min(most_s, _TRIAL_DELAY_S + self._usual_s), True
        if left_out or (lagging and late_s > most_s):
            return self._down(now, rates, rate, drain, delay_s, lowest=left_out)
        return None if full else self._up(now, rates, rate, group_s)

    def _down(
        self, now: float, rates: Mapping[str, float], rate: float, drain: float | None, delay_s: float, *, lowest: bool
    ) -> Choice | None:
        smaller = [name for name, other in rates.items() if other < rate]
        if not smaller:
            return None
        if lowest and (evidence := self.line.evidence(now)) is not None:
            drain = min(drain or inf, evidence)
        self._carried = drain or inf
        if drain is None:
            self._forced = smaller[-1]
            return Choice(smaller[-1], f"it is {delay_s:.1f} s behind")
        carried = drain * (1 - min(delay_s / _RECOVERY_S, 1.0))
        self._forced = next((name for name in reversed(smaller) if rates[name] <= carried), smaller[0])
        return Choice(self._forced, f"the line takes {_megabits(drain)} of {format_bit_rate(8 * rate)}")

    def _up(self, now: float, rates: Mapping[str, float], rate: float, group_s: float) -> Choice | None:
        evidence = self.line.evidence(now)
        stay_s = group_s if self._switched_at == self._up_at else _LEAST_STAY_S
        if evidence is None or (self._switched_at is not None and now - self._switched_at < stay_s):
            return None
        name = next((name for name, other in rates.items() if other > _LEAST_STEP * rate), None)
        if name is None or (now < self.not_before and rates[name] >= self.ceiling):
            return None
        carried = f"the line has carried {format_bit_rate(8 * evidence)}"
        settling = now - self.began_at < _SETTLING_S
        if (_SETTLING_MARGIN if settling else _UP_SHARE) * rates[name] <= evidence:
            return Choice(name, carried)
        if not settling:
            self.why_not_up = f"{carried}, {name} is {format_bit_rate(8 * rates[name])}"
        return None

    def switched(self, now: float, name: str, rates: Mapping[str, float]) -> bool:
        """Note that the viewer goes on in `name`; return whether a step up has failed with it."""
        failed = name == self._forced and now - self._up_at <= _FAILED_WITHIN_S
        if failed and now - self._up_at > _STEADY_S:  # a line that changes: a pause says nothing of what it carries
            self._back_off_s = min(max(2 * self._back_off_s, _LEAST_BACK_OFF_S), _BACK_OFF_S)
            self.ceiling = _FAR_SHARE * self._present_rate
        elif failed:
            self._back_off_s = _BACK_OFF_S
            self.ceiling = min(self._carried, _FAR_SHARE * self._present_rate)
        elif name == self._forced:
            self._back_off_s = 0.0
        if failed:
            self.not_before = now + self._back_off_s
            self._up_at = float("-inf")
        if rates.get(name, 0.0) > self._present_rate:
            self._up_at, self._usual_s = now, self._least_s
        self._switched_at, self._forced, self._least_s = now, "", inf
        self._present_rate = rates.get(name, self._present_rate)
        return failed


def _nearest(rates: Mapping[str, float], rate: float) -> Choice | None:
    name = min(rates, key=lambda name: (rates[name] > rate, abs(rates[name] - rate)), default=None)
    return None if name is None else Choice(name, ENDED)


def _megabits(bytes_per_s: float) -> str:
    return format_bit_rate(8 * bytes_per_s).removesuffix(" Mbit/s")
