"""Whose pictures the stream of a set itself shows (pure): those of the largest member that is there.

Other servers that follow the stream, recorders and relays know nothing of renditions: they get one of them. It changes
at key frames. Where a larger one has come, the one that is shown stops before a key frame of its own, so that the
larger one's twin of that is no step back; where none comes, it goes on a group later.
"""

from __future__ import annotations

from typing import Final

from flowctl.wire.rtmp.wire import signed_difference

_SILENT_S: Final = 2.0
"""Time without a picture after which another member is shown."""
_THERE_S: Final = 0.5
"""Time without a picture up to which a larger member is waited for."""
_JUMP_MS: Final = 5000


class Lead:
    """Chooses the member that is shown; members are known by rank, 0 for the largest."""

    def __init__(self) -> None:
        self.rank: int | None = None  # that is shown. None: none.
        self._seen_at: dict[int, float] = {}  # when the last picture of a member came that has had a key frame
        self._shown_ms = 0  # timestamp of the last picture that was shown
        self._waits = False  # whether it has stopped, so that a larger one may begin

    def offer(self, rank: int, timestamp: int, now: float, *, key: bool) -> bool:
        """Return whether a picture of a member is shown; the first one of another member is a key frame."""
        before = self._seen_at.get(rank)
        if key or before is not None:
            self._seen_at[rank] = now
        if rank == self.rank:
            if key:
                self._waits = not self._waits and any(
                    other < rank and now - at <= _THERE_S for other, at in self._seen_at.items()
                )
        elif key and self._may_begin(rank, timestamp, now):
            self.rank, self._waits = rank, False
        else:
            return False
        if not self._waits:
            self._shown_ms = timestamp
        return not self._waits

    def withdraw(self, rank: int) -> None:
        self._seen_at.pop(rank, None)

    def _may_begin(self, rank: int, timestamp: int, now: float) -> bool:
        if self.rank is None:
            return True
        silent = now - self._seen_at.get(self.rank, float("-inf")) > _SILENT_S
        ahead_ms = signed_difference(timestamp, self._shown_ms)
        return (silent or rank < self.rank) and (ahead_ms > 0 or ahead_ms < -_JUMP_MS)
