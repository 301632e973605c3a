"""When a worker that has ended is started again, and when one that does not answer counts as hung (pure)."""

from __future__ import annotations

from random import Random
from typing import Final

from flowctl.core.outcomes.backoff import Backoff

STEADY_S: Final = 10.0
"""Life after which a process has begun well: its successor is started at once."""
BACKOFF: Final = Backoff(first_s=0.5, factor=2.0, most_s=10.0, jitter=0.2)
"""Pause before the successor of a process that ended soon. At the most a port is served by one worker less for ten
seconds at a time, and starting takes a tenth of a core."""
HUNG_S: Final = 30.0
"""Time without an answer after which a worker hangs: gunicorn's timeout. A busy one answers within milliseconds."""
START_S: Final = 60.0
"""The same time for a worker that has not answered yet: it may load much, as may all others at the same time."""
ASKED_EVERY_S: Final = 2.0
_LEAST_UNANSWERED: Final = 4
"""Unanswered questions before a worker counts as hung: a machine that slept has passed the time with one."""


class WorkerRestarts:
    """Counts the starts of one worker's processes, and says when the next one may be."""

    def __init__(self, rng: Random, backoff: Backoff = BACKOFF) -> None:
        self._rng: Final = rng
        self._backoff: Final = backoff
        self.soon_ended = 0

    def pause_after(self, lived_s: float) -> float:
        """Return the pause in seconds before the next process starts, given the life of the one that ended."""
        if lived_s >= STEADY_S:
            self.soon_ended = 0
            return 0.0
        self.soon_ended += 1
        # Once may be chance, or a user's kill.
        return 0.0 if self.soon_ended == 1 else self._backoff.delay_s(self.soon_ended - 1, self._rng)


class WorkerPulse:
    """Questions to one process whether it is alive, and its answers."""

    def __init__(self, now: float) -> None:
        self._heard_at = now
        self._asked_at = now
        self._unanswered = 0
        self._began = False

    def should_ask(self, now: float) -> bool:
        """Return whether to ask now, and count the question if so."""
        if now - self._asked_at < ASKED_EVERY_S:
            return False
        self._asked_at = now
        self._unanswered += 1
        return True

    def note_answer(self, now: float) -> None:
        self._began = True
        self._heard_at = now
        self._unanswered = 0

    def silent_s(self, now: float) -> float:
        return now - self._heard_at

    def is_hung(self, now: float) -> bool:
        """Return whether it was silent for too long, to questions too."""
        patience_s = HUNG_S if self._began else START_S
        return now - self._heard_at >= patience_s and self._unanswered >= _LEAST_UNANSWERED
