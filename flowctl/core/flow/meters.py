"""How fast a peer takes what it is given, how far behind it is, and what share of the pictures it gets (pure).

Figures from samples that the caller takes. The *drain rate* is what was acknowledged over the last second in
which something waited: at other times the rate is that of the stream and says nothing about the peer. A rate that
nothing has confirmed for 250 ms is no evidence any more; otherwise little would be sent because the rate was low,
nothing would wait because little was sent, and the low rate would never be corrected. The *delay* is everything that
waits, here and in the kernel, over the rate: a forecast, by which limits and policies go. How far *behind* the peer is,
which is told to people, is the age of the oldest byte that it has not taken: a `Trail` remembers since when what was
written had waited. The *picture share* is that of the last 20 s.

What the kernel holds (SIOCOUTQ) ends where the peer's kernel begins: what lies unread in its receive buffer, up to
megabytes of it, is acknowledged. A protocol whose application acknowledges (RTMP) tells of that too.

The kernel's own estimate, `tcpi_delivery_rate`, is of no use here: it is the speed at which a burst into the peer's
receive buffer was acknowledged. For a reader of 60 kB/s on loopback it said 2.5 MB/s to 13 GB/s, with `tcpi_rtt` at 20
to 35 ms whatever the reader did, while acknowledged bytes over time said 71 kB/s.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

LEAST_SAMPLE_S: Final = 0.2
"""Shortest time between two samples: closer ones say more about the flush interval than about the link."""
_SMOOTHING: Final = 0.3
"""Weight of the newest rate: a change shows after three or four samples."""

_WINDOW_S: Final = 1.0
"""Time in which something waited, over which the rate is taken."""
_LEAST_RATE_S: Final = 0.2
"""Shortest time after which the rate is known: then a few packets more or less no longer matter."""
_LONGEST_GAP_S: Final = 0.25
"""If nothing has waited for this long, the rate is no longer known. If the peer takes nothing for longer, the pause
lowers it."""
_PART_S: Final = 0.1
"""Length of a part of the window; shorter times are added up. Ten parts are fine enough, and each costs a tuple."""
_STEADY_S: Final = 8.0
"""Time in which something waited after which the steady rate counts half of it: that is the mean of 4 to 8 s. A loss
on a line with a deep queue holds up what is acknowledged for a second, and then it comes at once."""
STALL_S: Final = 3.0
"""A peer that takes nothing for this long has no rate: it is stalled."""

_LEAST_REPORTS: Final = 3
"""Acknowledgements after which it is known that the application sends them, and how far apart."""
_UNREAD_BYTES: Final = 6 * 1024 * 1024
"""Most that can have left our kernel and not be read: Linux lets receive buffers grow to this size."""
_SILENT_INTERVALS: Final = 2.0
"""Usual times between two reports after which an application that is silent has stopped reporting."""
_LEAST_SILENCE_S: Final = 2.0
"""Shortest silence that counts as the end of reports: programs that report ten times a second pause, too."""
_FADING_PER_REPORT: Final = 0.8
"""Share of an unusually long time or large step that is left with each report that follows."""
_UNREPORTED_SHARE: Final = 0.02
"""An application may report this share less than it has read: it does not count chunk headers."""

_MARKS_PER_TRAIL: Final = 64
"""Marks of a trail: of some 20 turns, which are more than a kernel holds; older times get fewer marks."""

SHARE_WINDOW_S: Final = 20.0
"""Time over which the share of the pictures is taken: several groups of pictures."""
_NOTE_INTERVAL_S: Final = 5.0
"""Time between two notes of pictures."""


@dataclass(eq=False, slots=True)
class DrainMeter:
    """The rate at which a peer takes data while there is always something to take.

    Peers take in lumps, a slow link's receive window opens in steps of up to half a second: a part of the window ends
    when something was taken, and never in between.
    """

    rate: float | None = None  # bytes per second, as last measured, however long ago; None: not measured
    sampled_at: float = float("-inf")  # when the last sample was taken, in seconds
    taken_at: float = float("-inf")  # the last sample at which the peer had taken something since the one before
    waited_s: float = 0.0
    _taken: int = 0  # what the peer had taken at the last sample
    _acknowledged: int = 0  # where the open part began
    _part_at: float = 0.0  # when it began: the peer took something, or something began to wait
    _waits: bool = False  # something waited up to the last sample
    _waited_at: float = float("-inf")  # when something was last seen to wait
    _parts: list[tuple[float, int]] = field(default_factory=list)  # (seconds, bytes taken) of the window
    _seconds: float = 0.0
    _bytes: int = 0
    _steady_s: float = 0.0  # as the window, but longer, and kept while nothing waits
    _steady_bytes: float = 0.0

    def sample(self, now: float, acknowledged_bytes: int, *, waited: bool) -> float | None:
        """Take a sample, and return the rate as `known`."""
        if acknowledged_bytes > self._taken:
            self._taken, self.taken_at = acknowledged_bytes, now
        if not waited or self.sampled_at == float("-inf"):
            self._part_at, self._acknowledged = now, acknowledged_bytes
        else:
            self.waited_s += now - max(self._part_at, self.sampled_at)
            self._waited_at = now
            seconds, taken = now - self._part_at, acknowledged_bytes - self._acknowledged
            if taken > 0 and seconds >= STALL_S:
                self._steady_s = self._steady_bytes = 0.0
                self._forget()  # it had stalled, which says nothing of the rate at which it goes on
                self._part_at, self._acknowledged = now, acknowledged_bytes
            elif taken > 0 and seconds >= _PART_S:
                self._close_part(seconds, taken)
                self._part_at, self._acknowledged = now, acknowledged_bytes
        self._waits, self.sampled_at = waited, now
        rate = self.known(now)
        if rate is not None:
            self.rate = rate
        return rate

    def _close_part(self, seconds: float, taken: int) -> None:
        parts = self._parts
        parts.append((seconds, taken))
        self._seconds += seconds
        self._bytes += taken
        self._steady_s += seconds
        self._steady_bytes += taken
        if self._steady_s >= _STEADY_S:
            self._steady_s /= 2
            self._steady_bytes /= 2
        while self._seconds - parts[0][0] >= _WINDOW_S:
            oldest = parts.pop(0)
            self._seconds -= oldest[0]
            self._bytes -= oldest[1]

    def _forget(self) -> None:
        self._parts.clear()
        self._seconds, self._bytes = 0.0, 0

    def known(self, now: float) -> float | None:
        """Return the rate in bytes per second, more than 0, if it is known at this time. None: it is not."""
        if now - self._waited_at > _LONGEST_GAP_S and self._parts:
            self._forget()
        if self._seconds < _LEAST_RATE_S:
            return None
        pause_s = now - self._part_at if self._waits else 0.0
        return self._bytes / (self._seconds + (pause_s if pause_s > _LONGEST_GAP_S else 0.0))

    @property
    def steady(self) -> float:
        """The rate over the last 4 to 8 s in which something waited, in bytes per second. 0: not known."""
        return self._steady_bytes / self._steady_s if self._steady_s >= _WINDOW_S else 0.0

    def takes(self, now: float) -> bool:
        """Return whether the peer has taken something within the last 250 ms, by the samples."""
        return now - self.taken_at <= _LONGEST_GAP_S

    def stalled(self, now: float) -> bool:
        """Return whether the peer has taken nothing for `STALL_S` although something waited."""
        return self._waits and now - self._part_at >= STALL_S

    def waits_since(self, now: float) -> float:
        """Return since when something has waited and the peer took nothing, in seconds; `now` if nothing waits."""
        return self._part_at if self._waits else now

    def flows(self, now: float) -> bool:
        """Return whether no pause in the rate is as long as its window: such a pause lets it fall to a hundredth."""
        return now - self.waits_since(now) < _WINDOW_S and all(seconds < _WINDOW_S for seconds, _ in self._parts)


@dataclass(eq=False, slots=True)
class DelayMeter:
    """Delay of one peer, from samples of what was written and what is left; pure but for the caller's figures."""

    _at: float | None = None  # time of the last sample that counted
    _untaken: int = 0  # what had not been taken at the last sample
    _stopped_s: float = 0.0  # how long the peer had taken nothing then
    _acknowledged: int = 0
    _rate: float = 0.0  # bytes per second that the peer's kernel takes while there is something to take
    _since: float | None = None  # when it began to take nothing although there was something
    _read: int = 0  # what the peer's application says that it has read
    _read_at: float = 0.0  # when it last said so
    _reads: int = 0  # how often it has said so
    _step: float = 0.0  # largest distance between two such reports lately, in bytes
    _gap_s: float = 0.0  # longest time between two of them lately
    _short: float = _UNREPORTED_SHARE  # share of what was written that the application does not count, at most

    def peer_acknowledged(self, now: float, total_bytes: int, written_bytes: int) -> None:
        """Note what the peer's application says it has read. Reports in steps of any size do.

        What is used is how far the newest lags behind what was sent, less the largest step lately, and less the share
        of up to 2 % that a peer counts too little. Once reports stop, for longer than twice the usual time between two
        of them, they are believed no more.
        """
        total_bytes = min(total_bytes, written_bytes)
        step = total_bytes - self._read
        if step <= 0:
            return
        if self._reads:
            self._step = max(_FADING_PER_REPORT * self._step, step)
            self._gap_s = max(_FADING_PER_REPORT * self._gap_s, now - self._read_at)
        self._read, self._read_at = total_bytes, now
        self._reads += 1
        # One that counts too little is that share behind even when it has read all; none has ever read more.
        self._short = min(self._short, 1 - total_bytes / written_bytes)

    @property
    def has_reports(self) -> bool:
        return self._reads > 0

    def untaken_bytes(self, now: float, written_bytes: int, kernel_bytes: int) -> int:
        """Return what the peer has surely not taken: what the kernel holds, or its application has not read.

        The application reports in steps, so that one step may have been read and not been reported. Where it has
        stopped reporting, or never did, what the kernel holds is all that is known.
        """
        if self._reads < _LEAST_REPORTS or now - self._read_at > max(_SILENT_INTERVALS * self._gap_s, _LEAST_SILENCE_S):
            return kernel_bytes
        unread = int(written_bytes * (1 - self._short) - self._read - self._step)
        return unread if kernel_bytes < unread <= kernel_bytes + _UNREAD_BYTES else kernel_bytes

    def sample(self, now: float, queued_bytes: int, written_bytes: int, kernel_bytes: int) -> float:
        untaken_bytes = self.untaken_bytes(now, written_bytes, kernel_bytes)
        waiting = queued_bytes + untaken_bytes
        acknowledged = written_bytes - kernel_bytes  # reports come in steps and may stop: they tell of no rate
        last = self._at
        if last is None or now - last >= LEAST_SAMPLE_S:
            taken = acknowledged - self._acknowledged
            if last is not None and taken > 0:
                rate = taken / (now - last)
                self._rate = rate if not self._rate else self._rate + _SMOOTHING * (rate - self._rate)
            if taken > 0 or not waiting:
                self._since = None
            elif self._since is None:
                self._since = last if last is not None else now
            self._at, self._acknowledged = now, acknowledged
        self._untaken = untaken_bytes
        self._stopped_s = 0.0 if self._since is None else now - self._since
        return self.with_queue(queued_bytes)

    def with_queue(self, queued_bytes: int) -> float:
        """Return the delay in ms that the last sample would have found with `queued_bytes` in our own queue."""
        waiting = queued_bytes + self._untaken
        if not waiting:
            return 0.0
        return (waiting / self._rate + self._stopped_s if self._rate else self._stopped_s) * 1000


class Trail:
    """Waiting times of what was written to one peer, by its place among all bytes that were written to it.

    Between two marks time runs with the bytes: so it is where a cohort writes a log, which marks nothing.
    """

    __slots__ = ("_places", "_since")

    def __init__(self, place: float, since: float) -> None:
        self._places = array("d", (place,))  # never falling
        self._since = array("d", (since,))

    def note(self, place: int, since: float) -> None:
        """Note since when the data at `place`, the next to be written, has waited; before the last mark do nothing."""
        places, times = self._places, self._since
        if place < places[-1] or (place == places[-1] and since == times[-1]):
            return
        if len(places) >= _MARKS_PER_TRAIL:
            del places[1::2], times[1::2]
        places.append(place)
        times.append(since)

    def forget(self, place: int) -> None:
        """Let go of the marks before `place`, but for the last of them: what was there is taken."""
        passed = bisect_right(self._places, place) - 1
        if passed > 0:
            del self._places[:passed], self._since[:passed]

    def since(self, place: int, written_bytes: int, now: float) -> float:
        """Return since when what is at `place` had waited before it was written, in seconds."""
        places, times = self._places, self._since
        after = bisect_right(places, place)
        if not after:
            return times[0]
        began, since = places[after - 1], times[after - 1]
        if after < len(places):
            end, until = places[after], times[after]
        else:
            end, until = float(written_bytes), now
        return since + (until - since) * (place - began) / (end - began) if end > began else since


class PictureMeter:
    """The share of the pictures of a followed log that its viewer was sent lately.

    Notes are taken only of a peer that lags. So with none of the last 20 s, it has kept up in that time.
    """

    __slots__ = ("_before", "_forgotten", "_joined_at", "_notes")

    def __init__(self) -> None:
        self._notes: list[tuple[float, int, int]] = []  # (time, pictures published, of them not sent), oldest first
        self._before = (0.0, 0.0, 0)  # (time of the first note after it had kept up, seconds and pictures before it)
        self._joined_at, self._forgotten = float("-inf"), False  # of the log; whether pictures of it were not wanted

    def due(self, now: float, joined_at: float) -> bool:
        """Return whether a note is to be taken: some time after the last, or of another log."""
        return not self._notes or joined_at != self._joined_at or now - self._notes[-1][0] >= _NOTE_INTERVAL_S - 0.001

    def note(self, now: float, published: int, lost: int, joined_at: float) -> None:
        if joined_at != self._joined_at:  # another log
            self._joined_at, self._forgotten = joined_at, False
        if not published:  # it wants none for now, and what it does not want is not lost
            self.forget()
        elif not self._notes or now - self._notes[-1][0] >= _NOTE_INTERVAL_S - 0.001:
            recent = self._recent(now)
            if not recent:
                self._before = (now, now - joined_at, 0 if self._forgotten else published)
            self._notes = [*recent, (now, published, lost)]

    def forget(self) -> None:
        """Forget the notes: another log is followed from now on, or none, or what is wanted has changed."""
        self._notes, self._forgotten = [], True

    def share(self, now: float, published: int, lost: int) -> float:
        """Return the share of the pictures of the last 20 s that were sent, 0 to 1; arguments as of `note`.

        What came before the first note was sent as well, as many pictures a second as on average since joining.
        """
        recent = self._recent(now)
        if not recent:
            return 1.0
        first_at, first_published, first_lost = recent[0]
        passed: float = published - first_published
        began_at, before_s, before = self._before
        if first_at == began_at and before_s > 0:
            passed += before * min((SHARE_WINDOW_S - (now - first_at)) / before_s, 1.0)
        return min(max(1 - (lost - first_lost) / passed, 0.0), 1.0) if passed > 0 else 1.0

    def _recent(self, now: float) -> list[tuple[float, int, int]]:
        return [note for note in self._notes if now - note[0] <= SHARE_WINDOW_S + 0.001]
