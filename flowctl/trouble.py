"""What a Sender keeps about a peer that does not keep up; made at its first EAGAIN, so that healthy peers cost nothing.

The two meters are fed with one sample at a time, about twice a second. What the samples lead to (a step of the
ladder, a return to live, a higher age) is decided in `flowctl._steering`.
"""

from __future__ import annotations

from typing import Final

from flowctl.drain import LEAST_SAMPLE_S, DelayMeter, DrainMeter
from flowctl.ladder import Ladder, LadderSettings

HEALTHY_MS: Final = 500.0
"""A peer that is less than this behind is not measured any further unless something else is wrong."""
_SMOOTHING: Final = 0.3
"""Weight of the newest fill rate."""


class Trouble:
    """Meters, ladder and counts of one peer. Not thread-safe: its Sender's lock guards it.

    Args:
        ladder: times of the ladder. None: none is kept.
        now: time in seconds.

    Attributes:
        delay: how far behind the peer is.
        drain: what it takes.
        ladder: where it stands.
        delay_ms: the delay at the last sample.
        drained: everything was taken at some moment since the last sample of the drain rate.
        emptied: the same since the last reading of the ladder; of the samples before, `drained` adds the rest.
        refused: the kernel refused something since the last reading of the ladder.
        soft: the soft limit was entered since the last reading of the ladder.
        returns: times old media were skipped.
        delay_removed_ms: what skipping and thinning took off the age of the queue.
        sampled_at: time of the last sample in seconds, whoever took it.
        acted_at: time of the last sample that was acted on, in seconds: its timer counts from here, so that statistics
            of another thread, which only measure, cannot keep the ladder from being read.
        fill_bytes_per_s: what is added to the queue and kept, for a peer that follows no log.
    """

    __slots__ = (
        "_before_ms",
        "_kept_bytes",
        "acted_at",
        "delay",
        "delay_ms",
        "delay_removed_ms",
        "drain",
        "drained",
        "emptied",
        "fill_bytes_per_s",
        "ladder",
        "refused",
        "returns",
        "sampled_at",
        "soft",
    )

    def __init__(self, ladder: LadderSettings | None, now: float) -> None:
        self.delay = DelayMeter()
        self.drain = DrainMeter()
        self.ladder = None if ladder is None else Ladder(ladder, now)
        self.delay_ms = 0.0
        self.drained = self.emptied = False
        self.refused = False
        self.soft = False
        self.returns = 0
        self.delay_removed_ms = 0.0
        self.sampled_at = self.acted_at = float("-inf")
        self.fill_bytes_per_s = 0.0
        self._before_ms = 0.0  # the delay at the sample before
        self._kept_bytes = 0  # what was written or is queued, at the last sample

    def sample(self, now: float, queued_bytes: int, written_bytes: int, kernel_bytes: int, *, full: bool) -> None:
        """Take one sample; arguments as of the meters."""
        kept, seconds = queued_bytes + written_bytes, now - self.sampled_at
        if kept >= self._kept_bytes and seconds > 0:  # else something was thrown away
            self.fill_bytes_per_s += _SMOOTHING * ((kept - self._kept_bytes) / seconds - self.fill_bytes_per_s)
        self._kept_bytes = kept
        if seconds >= LEAST_SAMPLE_S:  # else both would be of the same moment
            self._before_ms = self.delay_ms
        self.delay_ms = self.delay.sample(now, queued_bytes, written_bytes, kernel_bytes)
        self.sample_drain(now, written_bytes - kernel_bytes, kernel_bytes, full=full)
        self.sampled_at = now

    def sample_drain(self, now: float, acknowledged_bytes: int, kernel_bytes: int, *, full: bool) -> None:
        """Take a sample of the drain rate alone; arguments as of `DrainMeter.sample`."""
        self.drain.sample(now, acknowledged_bytes, kernel_bytes, full=full and not self.drained)
        # Read or not: where no ladder is, nobody else would ever clear it, and the kernel would never count as full.
        self.emptied, self.drained = self.emptied or self.drained, False

    @property
    def age_ms(self) -> float:
        """The delay as an age: the smaller of the last two samples, so that one big frame under way is no trouble."""
        return min(self.delay_ms, self._before_ms)

    @property
    def mask(self) -> int:
        """Classes that the ladder's step refuses."""
        return 0 if self.ladder is None else self.ladder.mask

    @property
    def watching(self) -> bool:
        """Whether the ladder wants to be read again although nothing happens."""
        return self.ladder is not None and not self.ladder.idle

    @property
    def blank(self) -> bool:
        """Whether nothing would be lost by forgetting all this."""
        return self.harmless and not self.watching

    @property
    def harmless(self) -> bool:
        """Whether nothing was done to the peer: nothing skipped or thinned, and no step taken."""
        moved = self.ladder is not None and self.ladder.changes
        return not (self.returns or self.delay_removed_ms or moved)
