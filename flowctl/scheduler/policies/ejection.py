"""Outlier ejection: peers that fail are left out for a while, longer each time, and never more than a share (pure).

Theory of operation. A peer is *ejected* when its last `consecutive` outcomes were failures, or when within
`window_s` at least `least_outcomes` came and fewer than `least_success` of them were good. After its time it is on
*probation*: one message at a time. The first good answer ends that, a failure ejects it again at once, for twice as
long. A peer that stays good for as long as it was ejected last begins anew. Sources: Envoy's outlier detection, gRPC's
(gRFC A50).

Never more than a share of all peers is ejected: when most of them fail it is we, or the network, that is broken, and
sending to nobody helps nobody. Where peers leave, so that the rest is fewer, those return early that were due first.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from random import Random
from typing import Final, Generic, TypeVar

from flowctl.errors import ConfigError
from flowctl.fieldtypes import check_fields
from flowctl.outcomes.backoff import Backoff

P = TypeVar("P", bound=Hashable)
_AWAY: Final = Backoff(first_s=10.0, factor=2.0, most_s=300.0, jitter=0.2)
"""A little less at first than Envoy's 30 s, since a probe here is a single message; the most is Envoy's."""


class Standing(enum.Enum):
    """What a peer may be sent."""

    GOOD = "good"  #: as much as it has channels
    PROBATION = "probation"  #: one message at a time, until one is answered well
    EJECTED = "ejected"  #: nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class EjectionSettings:
    """When peers are left out, for how long, and how many at most.

    Args:
        consecutive: failures in a row that eject, 1 or more. Envoy's is 5.
        window_s: in which the success rate is looked at, more than 0. Envoy's is 10.
        least_outcomes: in a window before its success rate says anything, 1 or more. gRPC's is 50, for more traffic.
        least_success: success rate of a window below which a peer is ejected, 0 to 1; 0: never for that.
        away: how long, by the number of times.
        most_share: of the peers that may be ejected at a time, 0 to 1. Envoy's is 0.1, and less forgiving.

    Raises:
        ConfigError: a value is out of range.
    """

    consecutive: int = 5
    window_s: float = 10.0
    least_outcomes: int = 20
    least_success: float = 0.5
    away: Backoff = _AWAY
    most_share: float = 0.3

    def __post_init__(self) -> None:
        check_fields(self)
        if self.consecutive < 1:
            raise ConfigError(f"consecutive is {self.consecutive}, it must be 1 or more")
        if not self.window_s > 0:
            raise ConfigError(f"window_s is {self.window_s}, it must be more than 0")
        if self.least_outcomes < 1:
            raise ConfigError(f"least_outcomes is {self.least_outcomes}, it must be 1 or more")
        if not 0 <= self.least_success <= 1:
            raise ConfigError(f"least_success is {self.least_success}, it must be 0 to 1")
        if not 0 <= self.most_share <= 1:
            raise ConfigError(f"most_share is {self.most_share}, it must be 0 to 1")


class _Record:
    """What is known of one peer."""

    __slots__ = ("away_s", "failures_in_row", "good_in_window", "outcomes", "since", "standing", "times", "until")

    def __init__(self, now: float) -> None:
        self.standing = Standing.GOOD
        self.failures_in_row = 0
        self.since = now  # beginning of the window
        self.outcomes = 0  # in the window
        self.good_in_window = 0
        self.times = 0  # ejections in a row
        self.away_s = 0.0  # the last ejection lasted so long
        self.until = 0.0  # while ejected: when it returns; after: when it begins anew


class OutlierEjection(Generic[P]):
    """Standing of peers, by how what they were sent has ended.

    Args:
        settings: when, how long, how many.
        rng: the dice that keep peers from returning all at once.
    """

    def __init__(self, settings: EjectionSettings, rng: Random) -> None:
        self._settings = settings
        self._rng = rng
        self._records: dict[P, _Record] = {}
        self._ejected: dict[P, float] = {}  # those ejected, and until when; at most a share of all, so rarely many
        self._next = float("inf")  # not later than the first of them returns
        self.ejections_count = 0

    def __len__(self) -> int:
        """Return how many peers are ejected."""
        return len(self._ejected)

    def standing(self, peer_id: P) -> Standing:
        """Return what a peer may be sent; GOOD for one that is not known."""
        record = self._records.get(peer_id)
        return Standing.GOOD if record is None else record.standing

    def joined(self, peer_id: P, now: float) -> None:
        """Enter a peer. One that is known keeps its record."""
        if peer_id not in self._records:
            self._records[peer_id] = _Record(now)

    def left(self, peer_id: P) -> list[P]:
        """Forget a peer, and return those that come back early since fewer may be ejected now."""
        self._records.pop(peer_id, None)
        self._ejected.pop(peer_id, None)
        early = sorted(self._ejected, key=self._ejected.__getitem__)[: max(0, len(self._ejected) - self._most())]
        for returning in early:
            self._return(returning)
        return early

    def ended(self, peer_id: P, now: float, *, good: bool) -> bool:
        """Count an outcome, and return whether the standing of the peer changed.

        Args:
            peer_id: whose; nothing happens for one that is not known.
            now: seconds on the caller's clock, never before those of an earlier call.
            good: whether it was an answer of use.
        """
        record = self._records.get(peer_id)
        if record is None or record.standing is Standing.EJECTED:
            return False  # ejected: sent before that, and counted against it already
        if now - record.since >= self._settings.window_s:
            record.since, record.outcomes, record.good_in_window = now, 0, 0
        record.outcomes += 1
        if good:
            record.good_in_window += 1
            record.failures_in_row = 0
            if record.standing is Standing.PROBATION:
                record.standing = Standing.GOOD
                record.until = now + record.away_s
                record.since, record.outcomes, record.good_in_window = now, 0, 0
                return True
            if record.times and now >= record.until:
                record.times = 0
        else:
            record.failures_in_row += 1
        return self._is_outlier(record) and self._eject(peer_id, record, now)

    def take_due(self, now: float) -> list[P]:
        """Return the peers whose time is over, which are on probation from now on; the first due first."""
        if now < self._next:
            return []
        due = sorted((until, at) for at, (_, until) in enumerate(self._ejected.items()) if until <= now)
        names = list(self._ejected)
        returning = [names[at] for _, at in due]
        for peer_id in returning:
            self._return(peer_id)
        self._next = min(self._ejected.values(), default=float("inf"))
        return returning

    def next_deadline(self) -> float | None:
        """Return when `take_due` may next have something. None: nobody is ejected."""
        return self._next if self._ejected else None

    def _most(self) -> int:
        return int(self._settings.most_share * len(self._records))

    def _is_outlier(self, record: _Record) -> bool:
        settings = self._settings
        if record.standing is Standing.PROBATION:
            return record.failures_in_row > 0
        if record.failures_in_row >= settings.consecutive:
            return True
        enough = record.outcomes >= settings.least_outcomes
        return enough and record.good_in_window < settings.least_success * record.outcomes

    def _eject(self, peer_id: P, record: _Record, now: float) -> bool:
        if len(self._ejected) >= self._most():
            return False  # one on probation stays there: one message at a time costs little
        record.standing = Standing.EJECTED
        record.times += 1
        record.away_s = self._settings.away.delay_s(record.times, self._rng)
        record.until = now + record.away_s
        self._ejected[peer_id] = record.until
        self._next = min(self._next, record.until)
        self.ejections_count += 1
        return True

    def _return(self, peer_id: P) -> None:
        del self._ejected[peer_id]
        record = self._records[peer_id]
        record.standing = Standing.PROBATION
        record.failures_in_row = 0
