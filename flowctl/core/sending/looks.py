"""When a viewer of a set is looked at, and what its rule is told: see `flowctl.core.flow.renditions` (pure).

The evidence is how fast the burst of a key frame goes. So looks are close together from just before one is due until
it has gone, and after the join, when the first burst goes; else a few each second do. Of a viewer that lags the Sender
measures the rate itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from flowctl.core.flow.renditions import Choice, RenditionRule
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.figures import LineLook

LOOK_S: Final = 0.25
"""Time between two looks."""
_BURST_LOOK_S: Final = 0.025
"""Time between two looks at a burst: a key frame at several times the rate of the stream takes ten of them."""
_BEFORE_KEY_S: Final = 0.05
"""How long before a key frame is due the close looks begin."""
_BURST_S: Final = 0.2
"""How long they last, and longer while much of the burst waits."""
_LEAST_GROUP_S: Final = 2 * _BURST_S
"""Shortest group whose burst is looked at: in shorter ones all looks would be close together, without end."""
_MUCH_BYTES: Final = 8000
_READ_S: Final = 1.0
"""How long a peer's program is watched while it reads a burst."""
_DECIDE_S: Final = 0.2
"""Shortest time between two decisions."""


@dataclass(eq=False, slots=True)
class RenditionLooks:
    """What one viewer's rule was told, and what it chose.

    Attributes:
        choice: what to go on in at the next key frame. None: the present rendition.
        next_at: when to look again, in seconds.
    """

    rule: RenditionRule
    choice: Choice | None = None
    next_at: float = 0.0
    _decided_at: float = -inf
    _key_sequence: int = -1
    _lost: int = 0  # pictures lost at the last look
    _lost_before: int = 0  # and before the group in which it stands

    def look(
        self,
        now: float,
        seen: LineLook,
        rates: Mapping[str, float],
        present: str,
        log: StreamLog,
        window_bytes: int | None = None,
    ) -> None:
        """Take a look at the viewer, and have the rule choose.

        Args:
            now: in seconds.
            seen: `Sender.line_look`.
            rates: of the set, bytes per second, smallest first.
            present: the rendition that is followed; empty: it has ended.
            log: the log that is followed.
            window_bytes: the peer's receive window. None: not known.
        """
        self.rule.sample(now, seen.written_bytes, seen.waiting_bytes, log.gop.started_at, window_bytes)
        if seen.key_sequence != self._key_sequence:
            self._key_sequence, self._lost_before = seen.key_sequence, self._lost
        self._lost = seen.lost_pictures
        due = now - self._decided_at >= _DECIDE_S or _is_due(log, now)
        if due and (not present or present in rates):
            self._decided_at = now
            self.choice = self.rule.decide(
                now,
                rates,
                present,
                lagging=seen.lagging,
                drain=seen.drain,
                delay_s=seen.delay_s,
                left_out=self._lost > self._lost_before,
                target_s=seen.target_s,
                group_s=log.gop_duration_s,
            )
        self.next_at = now + self._pause_s(now, seen, log)

    def _pause_s(self, now: float, seen: LineLook, log: StreamLog) -> float:
        """Return the time up to the next look."""
        began_s, due_s = now - log.gop.started_at, log.gop.started_at + log.gop_duration_s - now
        joins = now - self.rule.began_at < _BURST_S
        if seen.lagging or (0 < log.gop_duration_s < _LEAST_GROUP_S and not joins):
            return LOOK_S
        going = seen.waiting_bytes >= _MUCH_BYTES or (self.rule.line.being_read and began_s < _READ_S)
        if joins or going or began_s < _BURST_S or _is_due(log, now):
            return _BURST_LOOK_S
        return min(LOOK_S, due_s - _BEFORE_KEY_S) if due_s > _BEFORE_KEY_S else LOOK_S


def _is_due(log: StreamLog, now: float) -> bool:
    """Return whether a key frame is about to come, or a little late."""
    due_s = log.gop.started_at + log.gop_duration_s - now
    return log.gop_duration_s > 0 and -_BURST_S < due_s <= _BEFORE_KEY_S
