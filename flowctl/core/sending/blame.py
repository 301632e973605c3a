"""Whose fault it is that a peer lags: the one rule of it, for words, log and records; and `why()` in one line (pure).

A *lag* lasts from the first refusal of the kernel until the peer has taken everything. Its whole length decides, not
its first moment: what the line took while it was in use, against the rate of the stream, says how much the line fell
short; the time in which the kernel had run dry though there was more to send, and what lay here before it was offered,
says how much we came late. The one that cost more is to blame. A line that took as much as the stream has, from a
thread that came in time, is behind by what its publisher sent at once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flowctl.core.flow.ledger import describe_change
from flowctl.core.flow.limits import OFF_MARK
from flowctl.core.flow.state import Cause, FlowCore, Load, SendState
from flowctl.reasons import CloseReason
from flowctl.units import format_count, format_duration, format_size

BURST_S: Final = 1.0
"""Time after the kernel last had nothing to send in which a queue still counts as one burst of the publisher."""
LATE_S: Final = 0.25
"""Time after which a queue that the kernel was not offered is our loop's: several flush intervals."""
_SHORT_S: Final = 0.1
"""Least seconds of the stream that a line, or we, must have cost: less is the rhythm of packets and turns."""
_MEAN_S: Final = 12.0
"""Age of a lag up to which the stream's rate is that from before it: the later one has the burst in it."""


class Blame(enum.Enum):
    NOBODY = "nobody"
    PEER_LINE = "peer's line"
    SERVER_LOOP = "our loop"
    PUBLISHER_BURST = "publisher burst"
    POLICY = "policy"


@dataclass(eq=False, slots=True)
class Lag:
    """What one lag was made of, in seconds. Not thread-safe: its Sender's lock guards it."""

    used_s: float = 0.0  # the line was in use
    used_bytes: int = 0  # what it took in that time
    ours_s: float = 0.0  # the kernel had run dry though there was more, or had not been offered it
    short_s: float = 0.0  # how many seconds of the stream the line was short of, at worst
    began_at: float | None = None  # None: it has not begun
    # Our thread had no room then: what came at once had waited for it, with the publisher's input.
    strained: bool = False
    _rate: float = 0.0  # of the stream before it, bytes per second
    _at: float = 0.0  # when it was last noted
    _acknowledged: int = 0  # what the peer had taken then

    def begin(
        self, now: float, acknowledged: int, stream_bytes_per_s: float, waited_s: float, *, strained: bool
    ) -> None:
        """Begin with the kernel's first refusal, of what had waited here for `waited_s`."""
        self.began_at, self._at, self.strained = now, now, strained
        self._rate, self._acknowledged = stream_bytes_per_s, acknowledged
        self.ours_s = waited_s if waited_s >= LATE_S else 0.0

    def note(self, now: float, acknowledged: int, stream_bytes_per_s: float, *, waited: bool, dry: bool) -> None:
        """Account for the time since the last note.

        Args:
            now: in seconds.
            acknowledged: bytes that the peer has taken in all.
            stream_bytes_per_s: rate of the followed log. 0: not known.
            waited: something has waited for the peer since then.
            dry: the kernel had run dry meanwhile, by our lateness.
        """
        if self.began_at is None:
            return
        seconds, taken = now - self._at, acknowledged - self._acknowledged
        self._at, self._acknowledged = now, acknowledged
        if not waited or seconds <= 0:
            return
        used_s = seconds
        if dry:  # all that it had is taken, in the time that its line needs for it
            used_s = min(taken * self.used_s / self.used_bytes, seconds) if self.used_bytes else 0.0
            self.ours_s += seconds - used_s
        if used_s:
            self.used_s += used_s
            self.used_bytes += taken
        rate = stream_bytes_per_s
        if self._rate and now - self.began_at < _MEAN_S:
            rate = min(rate, self._rate)
        if rate:
            self.short_s = max(self.short_s, self.used_s - self.used_bytes / rate)

    @property
    def blamed(self) -> Blame:
        if self.ours_s >= _SHORT_S and self.ours_s > self.short_s:
            return Blame.SERVER_LOOP
        carried = self.used_s >= LATE_S and self._rate > 0 and self.short_s < _SHORT_S
        if not carried:
            return Blame.PEER_LINE
        return Blame.SERVER_LOOP if self.strained else Blame.PUBLISHER_BURST


def blame(
    core: FlowCore,
    load: Load,
    lag: Lag | None = None,
    *,
    largest_bytes: int,
    stalled_s: float,
    skipped: bool = False,
) -> Blame:
    """Return who is to blame for the present load; also of one that takes all, but was `skipped` something of late.

    A kernel that refuses is judged by the lag, unless what is queued is one oversized message that came less than a
    second ago. A queue that the kernel was not even offered is our loop if it is old, else a burst.
    """
    change = core.last_change
    if core.state is SendState.READY:
        return Blame.SERVER_LOOP if skipped else Blame.NOBODY
    if change is not None and change.cause is Cause.LIMITS_SET:
        return Blame.POLICY
    if not core.would_block:
        return Blame.SERVER_LOOP if load.age_ms > LATE_S * 1000 else Blame.PUBLISHER_BURST
    soft = core.limits.size.marks[1]
    if soft < OFF_MARK and largest_bytes * 2 > soft and stalled_s < BURST_S:
        return Blame.PUBLISHER_BURST
    return Blame.PEER_LINE if lag is None else lag.blamed


def explain(
    core: FlowCore,
    load: Load,
    now: float,
    lag: Lag | None = None,
    *,
    largest_bytes: int = 0,
    joining: bool = False,
    waiting_for_key: bool = False,
    stalled_s: float = 0.0,
    skipped: bool = False,
    remarks: Sequence[str] = (),
    close_reason: CloseReason | None = None,
    details: str = "",
) -> str:
    """Say in one line why a peer is in its state, and who is to blame."""
    if close_reason is not None:
        return f"closed: {close_reason.value}" + (f" ({details})" if details else "")
    parts = [f"{core.state.name} for {format_duration(now - core.since)}"]
    change = core.last_change
    if change is not None and core.state is not SendState.READY:
        parts.append(describe_change(change))
    queue = f"queued {format_size(load.size_bytes)} in {format_count(load.messages, 'message')}"
    parts.append(f"{queue}, oldest {format_duration(load.age_ms / 1000)}" if load.messages else "nothing queued")
    if stalled_s:
        parts.append(f"it has taken nothing for {format_duration(stalled_s)}")
    if joining:
        parts.append("still taking the GOP cache")
    if waiting_for_key:
        parts.append("waiting for a key frame")
    if skipped:
        parts.append("went on at a key frame, for the thread had no room")
    parts.extend(remarks)
    who = blame(core, load, lag, largest_bytes=largest_bytes, stalled_s=stalled_s, skipped=skipped)
    if who is not Blame.NOBODY:
        parts.append(f"to blame: {who.value}")
    soft = core.limits.size.marks[1]
    if largest_bytes * 2 > soft:
        parts.append(f"the soft limit is below twice the largest message, {format_size(largest_bytes)}")
    return "; ".join(parts)
