"""Outlier ejection: peers that fail are left out for a while, longer each time, and never more than a share (pure).

Theory of operation. A peer is *ejected* when its last `consecutive` outcomes were failures, or when within
`window_s` at least `least_outcomes` came and fewer than `least_success` of them were good. The scheduler offers it
again after that time, one channel until it has answered; a failure before the first good answer ejects it again at
once, for twice as long. A peer that stays good for as long as it was ejected last begins anew. Sources: Envoy's outlier
detection, gRPC's (gRFC A50).

No peer is ejected that would make it more than a share of all: when most of them fail it is we, or the network, that is
broken, and sending to nobody helps nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from flowctl.core.outcomes.backoff import Backoff
from flowctl.core.outcomes.pending import Outcome
from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError
from flowctl.nodes.scheduler.policy import PeerChannels

_EJECTION_BACKOFF: Final = Backoff(first_s=10.0, factor=2.0, most_s=300.0, jitter=0.2)
"""Time for which a peer is ejected: at first a little less than Envoy's 30 s, since a probe here is a single message;
the most is Envoy's."""

_HEALTH_OUTCOMES: Final = frozenset({Outcome.RESPONSE, Outcome.TIMEOUT, Outcome.REJECTED})
"""Outcomes that say something about the peer's health."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EjectionSettings:
    """When peers are left out, for how long, and how many at most."""

    consecutive: int = 5  #: failures in a row that eject, 1 or more. Envoy's is 5.
    window_s: float = 10.0  #: in which the success rate is looked at, more than 0. Envoy's is 10.
    #: in a window before its success rate says anything, 1 or more. gRPC's is 50, for more traffic.
    least_outcomes: int = 20
    least_success: float = 0.5  #: success rate of a window below which a peer is ejected, 0 to 1; 0: never for that
    away: Backoff = _EJECTION_BACKOFF
    most_share: float = 0.3  #: of the peers that may be ejected at a time, 0 to 1. Envoy's is 0.1, and less forgiving.

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


@dataclass(slots=True, eq=False)
class _PeerHistory:
    since: float  # beginning of the window
    away: bool = False
    proving: bool = False  # has returned, and not answered well since
    failures_in_row: int = 0
    outcomes: int = 0  # in the window
    good_in_window: int = 0
    times: int = 0  # ejections in a row
    away_s: float = 0.0  # duration of the last ejection
    until: float = 0.0  # it begins anew when it was good until then


class OutlierEjection:
    """An `Ejection` by failures in a row and by success rate."""

    def __init__(self, rng: Random, settings: EjectionSettings | None = None) -> None:
        self._settings = settings or EjectionSettings()
        self._rng = rng
        self.peers_count = 0
        self.ejected_count = 0

    def connected(self, peer: PeerChannels, now: float) -> None:
        self.peers_count += 1
        peer.ejection_state = _PeerHistory(now)

    def left(self, peer: PeerChannels) -> None:
        self.peers_count -= 1
        self.ejected_count -= peer.ejection_state.away

    def returned(self, peer: PeerChannels, now: float) -> None:
        record: _PeerHistory = peer.ejection_state
        self.ejected_count -= record.away
        record.away, record.proving = False, True
        record.failures_in_row = 0
        record.since, record.outcomes, record.good_in_window = now, 0, 0

    def ended(self, peer: PeerChannels, outcome: Outcome, latency_s: float, now: float) -> float:
        record: _PeerHistory = peer.ejection_state
        if record.away or outcome not in _HEALTH_OUTCOMES:
            return 0.0  # away: sent before that, and judged with it
        settings = self._settings
        if now - record.since >= settings.window_s:
            record.since, record.outcomes, record.good_in_window = now, 0, 0
        record.outcomes += 1
        if outcome is not Outcome.RESPONSE:
            record.failures_in_row += 1
        else:
            record.good_in_window += 1
            record.failures_in_row = 0
            if record.proving:
                record.proving = False
                record.until = now + record.away_s
            elif record.times and now >= record.until:
                record.times = 0
        room = self.ejected_count + 1 <= settings.most_share * self.peers_count
        return self._eject(record, now) if room and self._is_outlier(record) else 0.0

    def _is_outlier(self, record: _PeerHistory) -> bool:
        settings = self._settings
        if record.proving or record.failures_in_row >= settings.consecutive:
            return record.failures_in_row > 0
        enough = record.outcomes >= settings.least_outcomes
        return enough and record.good_in_window < settings.least_success * record.outcomes

    def _eject(self, record: _PeerHistory, now: float) -> float:
        record.away = True
        record.times += 1
        record.away_s = self._settings.away.delay_s(record.times, self._rng)
        record.until = now + record.away_s
        self.ejected_count += 1
        return record.away_s
