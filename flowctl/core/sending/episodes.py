"""One log line where a peer becomes slow, one where it gets worse, one where it has recovered: never one per packet.

An episode begins with the first edge of the Sender's state and ends when the peer has been READY for a while and
nothing more is dropped for it. A peer that merely meets EAGAIN and recovers, as every peer does now and then, is logged
at debug level only. Drops without an edge are no trouble: the viewer has muted a track, or waits for its first key
frame. Of a peer to which we publish it is our line that is short, and that it still is is told again now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import structlog

from flowctl.core.flow.counts import NO_COUNTS, Counts
from flowctl.core.flow.ledger import LedgerEntry, LedgerKind
from flowctl.core.flow.sharedstall import TOGETHER_S, StallSpan
from flowctl.core.flow.state import SendState
from flowctl.reasons import DropReason

_QUIET_S: Final = 2.0
"""Time in state READY that ends an episode; with less, a viewer at its link's edge would begin one per key frame."""

_log: Final = structlog.get_logger("flowctl.live")
_AGAIN_S: Final = 60.0
"""Time after which a line that is still short is told of again."""


class EpisodeWords(NamedTuple):
    """What the lines of an episode say."""

    slow: str
    recovered: str
    hint: str = ""  # what to do about it. Empty: nothing, and that it goes on is not told again.


VIEWER_SLOW: Final = EpisodeWords("viewer slow", "viewer recovered")
LINE_SHORT: Final = EpisodeWords(
    "line short", "line carries all again", "lower the bit rate of the stream, or find a better line"
)
"""Of a peer to which we publish."""


@dataclass(slots=True, eq=False)
class Episode:
    """The log of one peer's episodes of trouble."""

    fields: dict[str, Any]  # those of each line
    why: Callable[[], str]
    dropped: Callable[[], Counts]
    words: EpisodeWords = VIEWER_SLOW
    # When most viewers stopped: an episode that began with that is told at debug level only, for it was told for all.
    shared_stall: Callable[[], StallSpan | None] = lambda: None
    # when the episode ends if nothing happens until then. None: there is none, or it goes on.
    _quiet_at: float | None = None
    _again_at: float | None = None  # when it is to be told that it goes on. None: it is not.
    _dropped_before: Counts = NO_COUNTS  # when the episode began
    _seen: Counts = NO_COUNTS  # when it was looked at last
    _since: float | None = None  # None: no episode
    _worst: SendState = SendState.READY
    _edges: int = 0
    _shares: dict[str, Any] = field(default_factory=dict)  # what it was given all the same
    _returns: int = 0  # times it was brought back to live
    _removed_ms: float = 0.0  # delay that this took away
    _loud: bool | None = None  # whether the line of this episode is at info level. None: there is none yet

    def note_entry(self, entry: LedgerEntry, *, closed: bool = False) -> None:
        if closed and self._loud:
            return
        if entry.kind is LedgerKind.STATE and entry.change is not None:
            self._note_edge(entry)
        elif entry.kind is LedgerKind.DROPS:
            own = (DropReason.UNFOLLOWED, DropReason.REQUESTED, DropReason.SUPERSEDED)
            if DropReason.LATE in (entry.dropped or ()):
                self._shares = {
                    "pictures": f"{entry.picture_share:.0%}",
                    "line_in_use": f"{entry.line_share:.0%}",
                    "delay_max_s": round(entry.delay_max_ms / 1000, 1),
                }
            if self._since is not None and not all(reason in own for reason in entry.dropped or ()):
                self._say_slow(entry)
        elif entry.kind is LedgerKind.LATE:
            self._begin(entry.at)
            self._say_slow(entry)
        elif entry.kind is LedgerKind.RETURN:
            self._begin(entry.at)
            self._returns += 1
            self._removed_ms += entry.delay_removed_ms
            self._say_slow(entry)
        elif entry.kind is LedgerKind.LIMITS:
            # The server says it once for all of them.
            _log.debug("limits changed", **self.fields, limits=entry.why)

    def _note_edge(self, entry: LedgerEntry) -> None:
        change = entry.change
        if change is None:
            return
        self._begin(entry.at)
        self._edges += 1
        if change.new is SendState.READY:
            self._quiet_at = entry.at + _QUIET_S
        else:
            self._quiet_at = None
        if change.new > self._worst:
            self._worst = change.new
            if change.new >= SendState.SOFT_LIMIT:
                self._say_slow(entry)

    def _begin(self, at: float) -> None:
        if self._since is None:
            self._since = at
            self._worst = SendState.READY
            self._edges = self._returns = 0
            self._shares = {}
            self._removed_ms = 0.0
            self._loud = None
            self._dropped_before = self._seen = self.dropped()

    def _say_slow(self, entry: LedgerEntry) -> None:
        if self._loud is not None and entry.change is None:
            return  # further drops of an episode are summed up at its end
        span = self.shared_stall()
        self._loud = span is None or not span.began - TOGETHER_S <= (self._since or 0.0) <= span.ended
        self._tell(entry.at, cause=entry.why)

    def _tell(self, now: float, **cause: str) -> None:
        if not self._loud:  # most viewers say the same now, and why is a question for them all
            _log.debug(self.words.slow, **self.fields, state=self._worst.name, **cause)
            return
        hint = {"hint": self.words.hint} if self.words.hint else {}
        self._again_at = now + _AGAIN_S if hint else None
        more = self._more() | hint
        _log.info(self.words.slow, **self.fields, state=self._worst.name, **cause, why=self.why(), **more)

    @property
    def due_at(self) -> float | None:
        """Time at which `check` has something to do if nothing happens. None: never."""
        return min(filter(None, (self._quiet_at, self._again_at)), default=None)

    def check(self, now: float) -> None:
        if self._again_at is not None and now >= self._again_at:
            self._tell(now)
        if self._quiet_at is None or now < self._quiet_at:
            return
        dropped = self.dropped()
        if dropped != self._seen:  # READY, but not given all there is
            self._seen = dropped
            self._quiet_at = now + _QUIET_S
        else:
            self.end(now)

    def end(self, now: float, *, silent: bool = False) -> None:
        """End the episode, with a line of its own unless `silent`."""
        since, self._since = self._since, None
        self._quiet_at = self._again_at = None
        if since is None or silent:
            return
        write = _log.info if self._loud else _log.debug
        write(
            self.words.recovered,
            **self.fields,
            after_s=round(now - since, 1),
            worst=self._worst.name,
            changes=self._edges,
            dropped=(self.dropped() - self._dropped_before).by_name() or 0,
            **self._more(),
        )

    def _more(self) -> dict[str, Any]:
        """Return the fields of shares and returns to live, where there were any."""
        more = dict(self._shares)
        if self._returns:
            more |= {"returns_to_live": self._returns, "delay_removed_s": round(self._removed_ms / 1000, 1)}
        return more
