"""One episode of drops: from the first message that is refused until everything is accepted again (pure)."""

from __future__ import annotations

from dataclasses import replace
from operator import add, sub

from flowctl.core.flow.counts import Counts
from flowctl.core.flow.ledger import LedgerEntry, LedgerKind, difference
from flowctl.core.sending.slowpeer import SlowPeer
from flowctl.reasons import DropReason

Pictures = tuple[int, int]
"""Pictures of the followed log up to the viewer's place, and those of them that were not sent: `LogCursor.pictures`."""


class DropEpisode:
    """What there was when an episode of drops began. Not thread-safe: its Sender's lock guards it."""

    __slots__ = ("_at", "_delay_removed_ms", "_dropped", "_pictures", "_waited_s")

    def __init__(
        self, now: float, dropped: dict[DropReason, Counts], pictures: Pictures, slow: SlowPeer | None
    ) -> None:
        self._at = now
        self._dropped = dropped
        self._pictures = pictures  # less those of the logs that were followed since and are not any more
        self._delay_removed_ms = self._waited_s = 0.0
        if slow is not None:
            self._delay_removed_ms, self._waited_s = slow.delay_removed_ms, slow.drain.waited_s
            slow.behind_max_ms = slow.behind_ms

    def leave_log(self, pictures: Pictures) -> None:
        """Keep the pictures of a log that is about to be left; the next one counts from 0."""
        published, lost = map(sub, self._pictures, pictures)
        self._pictures = published, lost

    def skip(self, before: Pictures, after: Pictures) -> None:
        """Leave out the step that the counts make where a viewer wants no pictures, or wants them again."""
        published, lost = map(add, self._pictures, map(sub, after, before))
        self._pictures = published, lost

    def end(
        self, now: float, dropped: dict[DropReason, Counts], pictures: Pictures, slow: SlowPeer | None
    ) -> LedgerEntry | None:
        """Return the one entry of the ledger for all of it; arguments as of now. None: nothing was dropped."""
        lost = difference(dropped, self._dropped)
        if not lost:
            return None
        duration_s = now - self._at
        published, missed = map(sub, pictures, self._pictures)
        share = 1 - missed / published if published > 0 else 1.0
        entry = LedgerEntry(LedgerKind.DROPS, now, "", dropped=lost, duration_s=duration_s, picture_share=share)
        if slow is None:
            return entry
        line = (slow.drain.waited_s - self._waited_s) / duration_s if duration_s > 0 else 0.0
        return replace(
            entry,
            delay_removed_ms=slow.delay_removed_ms - self._delay_removed_ms,
            delay_max_ms=slow.behind_max_ms,
            line_share=min(line, 1.0),
        )
