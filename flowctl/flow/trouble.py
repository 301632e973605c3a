"""What a Sender keeps about a peer that does not keep up; made at its first EAGAIN, so that healthy peers cost nothing.

The two meters are fed with one sample at a time: about twice a second, and of a viewer that is served by the rule of
`flowctl.flow.timing` with each write. What the samples lead to is decided in `flowctl.sending.steering`.
"""

from __future__ import annotations

from typing import Final

from flowctl.flow.drain import LEAST_SAMPLE_S, DelayMeter, DrainMeter

HEALTHY_MS: Final = 500.0
"""A peer that is less than this behind is not measured any further unless something else is wrong."""
_SMOOTHING: Final = 0.3
"""Weight of the newest fill rate."""
_SHARE_S: Final = 20.0
"""A share of the pictures is of so long: several groups of pictures."""
_NOTE_S: Final = 5.0
"""Between two notes of pictures."""


class Trouble:
    """Meters and counts of one peer. Not thread-safe: its Sender's lock guards it.

    Attributes:
        delay: how far behind the peer is.
        drain: what it takes.
        delay_ms: the delay at the last sample.
        delay_max_ms: the largest one since the open episode of drops began.
        waited: whether something has waited for the peer ever since the last sample of the drain rate.
        ahead_bytes: how much the kernel takes ahead, as it was told. 0: as usual.
        allowed_bytes: of that, what it was not given since it last told that it takes more.
        cutting: whether something was left out for being late since the peer last kept up.
        left_out: messages that were left out for being late.
        left_out_at: when that was last seen, in seconds.
        returns: times old media were skipped.
        delay_removed_ms: what skipping and thinning took off the age of the queue.
        sampled_at: time of the last sample in seconds.
        last_share: share of the pictures, of the log that was left last; asked for after the end.
        acted_at: time of the last sample that was acted on, in seconds: its timer counts from here, so that statistics
            of another thread, which only measure, cannot keep the peer from being looked at.
        fill_bytes_per_s: what is added to the queue and kept, for a peer that follows no log.
    """

    __slots__ = (
        "_before",
        "_before_ms",
        "_forgotten",
        "_joined_at",
        "_kept_bytes",
        "_late",
        "_shares",
        "acted_at",
        "ahead_bytes",
        "allowed_bytes",
        "cutting",
        "delay",
        "delay_max_ms",
        "delay_ms",
        "delay_removed_ms",
        "drain",
        "fill_bytes_per_s",
        "last_share",
        "left_out",
        "left_out_at",
        "returns",
        "sampled_at",
        "waited",
    )

    def __init__(self) -> None:
        self.delay = DelayMeter()
        self.drain = DrainMeter()
        self.delay_ms = self.delay_max_ms = 0.0
        self.waited = False
        self.ahead_bytes = self.allowed_bytes = 0
        self.cutting = False
        self.last_share = 1.0
        self.left_out = 0
        self.left_out_at = float("-inf")
        self.returns = 0
        self.delay_removed_ms = 0.0
        self.sampled_at = self.acted_at = float("-inf")
        self.fill_bytes_per_s = 0.0
        self._before_ms = 0.0  # the delay at the sample before
        self._kept_bytes = 0  # what was written or is queued, at the last sample
        self._late = 0  # messages that the followed log has left out, when last looked
        self._shares: list[tuple[float, int, int]] = []  # (time, pictures published, of them not sent), oldest first
        self._before = (0.0, 0.0, 0)  # (time of the first note after it had kept up, seconds and pictures before it)
        self._joined_at, self._forgotten = float("-inf"), False  # of the log; whether pictures of it were not wanted

    def sample(self, now: float, queued_bytes: int, written_bytes: int, kernel_bytes: int) -> None:
        """Take one sample; arguments as of the meters."""
        kept, seconds = queued_bytes + written_bytes, now - self.sampled_at
        if kept >= self._kept_bytes and seconds > 0:  # else something was thrown away
            self.fill_bytes_per_s += _SMOOTHING * ((kept - self._kept_bytes) / seconds - self.fill_bytes_per_s)
        self._kept_bytes = kept
        if seconds >= LEAST_SAMPLE_S:  # else both would be of the same moment
            self._before_ms = self.delay_ms
        self.delay_ms = self.delay.sample(now, queued_bytes, written_bytes, kernel_bytes)
        self.delay_max_ms = max(self.delay_max_ms, self.delay_ms)
        self.drain.sample(now, written_bytes - kernel_bytes, waited=self.waited)
        self.sampled_at = now

    def note_late(self, now: float, late: int) -> bool:
        """Note how many messages of the followed log were left out for being late so far.

        Returns:
            Whether these are the first ones since the peer had kept up.
        """
        first = late > self._late and not self.cutting  # fewer than before: another log is followed
        if late > self._late:
            self.left_out += late - self._late
            self.left_out_at = now
            self.cutting = True
        self._late = late
        return first

    def note_pictures(self, now: float, published: int, lost: int, joined_at: float) -> None:
        """Note pictures of the followed log.

        Args:
            now: time in seconds.
            published: pictures from joining up to the viewer's place.
            lost: those of them that were not sent.
            joined_at: when it began to follow the log, in seconds.
        """
        if joined_at != self._joined_at:  # another log
            self._joined_at, self._forgotten = joined_at, False
        if not published:  # it wants none for now, and what it does not want is not lost
            self.forget_pictures()
        elif not self._shares or now - self._shares[-1][0] >= _NOTE_S - 0.001:
            recent = self._recent(now)
            if not recent:
                self._before = (now, now - joined_at, 0 if self._forgotten else published)
            self._shares = [*recent, (now, published, lost)]

    def forget_pictures(self) -> None:
        """Forget the notes: another log is followed from now on, or none, or what is wanted has changed."""
        self._shares, self._forgotten = [], True

    def picture_share(self, now: float, published: int, lost: int) -> float:
        """Return the share of the pictures of the last 20 s that were sent, 0 to 1; arguments as of now.

        Notes are taken only of a peer that lags. So with none that young, it has kept up in that time: 1. What came
        before the first note was sent as well, as many pictures a second as on average since joining.
        """
        recent = self._recent(now)
        if not recent:
            return 1.0
        first_at, first_published, first_lost = recent[0]
        passed: float = published - first_published
        began_at, before_s, before = self._before
        if first_at == began_at and before_s > 0:
            passed += before * min((_SHARE_S - (now - first_at)) / before_s, 1.0)
        return min(max(1 - (lost - first_lost) / passed, 0.0), 1.0) if passed > 0 else 1.0

    def _recent(self, now: float) -> list[tuple[float, int, int]]:
        return [note for note in self._shares if now - note[0] <= _SHARE_S + 0.001]

    @property
    def age_ms(self) -> float:
        """The delay as an age: the smaller of the last two samples, so that one big frame under way is no trouble."""
        return min(self.delay_ms, self._before_ms)

    @property
    def harmless(self) -> bool:
        """Whether nothing was done to the peer: nothing left out, skipped or thinned."""
        return not (self.returns or self.delay_removed_ms or self.left_out)
