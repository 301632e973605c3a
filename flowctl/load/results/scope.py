"""The peers that a figure is about, and the sums, shares and percentiles over them (pure).

Which peers those are is the scope of the figure: a profile as on the command line (``slow@200k``), a kind of peer
(``healthy``, ``slow``, ``hostile``, ``publisher``), ``viewers`` for healthy and slow ones, ``all``, or the name of
a profile without its parameters (``sawtooth``), looked for in this order.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Final

from flowctl.load.results.result import PeerKind, PeerResult, RunResult

VIEWERS: Final = frozenset({PeerKind.HEALTHY, PeerKind.SLOW})
"""Kinds of peers that play as one should, however slowly."""

EVERYBODY: Final = "all"
BOTH: Final = "viewers"
"""Scope of healthy and slow viewers together."""

SCOPES: Final = (*(kind.value for kind in PeerKind), BOTH, EVERYBODY)
"""Scopes that are no profile."""


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the smallest of the `ordered` values that at least `share` (0 to 1) of them do not exceed.

    No interpolation: the value is one that occurred, and never more favourable than what did. None: there are none.
    """
    if not ordered:
        return None
    place = min(len(ordered) - 1, max(0, -int(-len(ordered) * share // 1) - 1))
    return ordered[place]


def weighted_quantiles(samples: Iterable[tuple[Sequence[float], float]], shares: Sequence[float]) -> list[float]:
    pairs = sorted((value, weight) for values, weight in samples for value in values)
    if not pairs:
        return []
    sums = list(itertools.accumulate(weight for _, weight in pairs))
    # A hair less than the share: sums of weights such as 0.1 are not exact.
    places = (bisect.bisect_left(sums, sums[-1] * share * (1 - 1e-12)) for share in shares)
    return [pairs[min(place, len(pairs) - 1)][0] for place in places]


def in_scope(scope: str, profile: str, kind: PeerKind, profiles: Iterable[str]) -> bool:
    wanted, name = scope.lower(), profile.lower()
    if any(wanted == other.lower() for other in profiles):
        return wanted == name
    if wanted == EVERYBODY:
        return True
    if wanted == BOTH:
        return kind in VIEWERS
    if any(wanted == other.value for other in PeerKind):
        return kind.value == wanted
    return name.partition("@")[0] == wanted


class ScopedPeers:
    """The peers that a figure is about."""

    def __init__(self, result: RunResult, peers: list[PeerResult]) -> None:
        self.result = result
        self.peers = peers

    @cached_property
    def receivers(self) -> list[PeerResult]:
        """Peers whose frames were counted and that got any; what publishers count is what they sent."""
        return [
            peer
            for peer in self.peers
            if peer.parsed and peer.video + peer.audio and peer.kind is not PeerKind.PUBLISHER
        ]

    def total(self, name: str) -> int:
        return sum(getattr(peer, name) for peer in self.peers)

    def frames(self, name: str) -> float | None:
        """Return the sum of a field over those whose frames were counted; None: there were none."""
        return float(sum(getattr(peer, name) for peer in self.receivers)) if self.receivers else None

    def count(self, wanted: Callable[[PeerResult], bool]) -> float | None:
        return float(sum(map(wanted, self.peers))) if self.peers else None

    def share(self, wanted: Callable[[PeerResult], bool]) -> float | None:
        count = self.count(wanted)
        return None if count is None else count / len(self.peers)

    @cached_property
    def _cuts(self) -> list[bool]:
        """Whether each peer was cut, without those that cannot tell: who has vanished sees no end."""
        return [peer.cut for peer in self.peers if peer.cut is not None]

    @property
    def cut(self) -> float | None:
        """Peers that the server cut; None: it cannot be told."""
        return float(sum(self._cuts)) if self._cuts else None

    @property
    def cut_share(self) -> float | None:
        """Those, as a share of the peers that can tell."""
        return sum(self._cuts) / len(self._cuts) if self._cuts else None

    def times_ms(self, name: str, share: float) -> float | None:
        times = sorted(value for peer in self.peers if (value := getattr(peer, name)) is not None)
        found = quantile(times, share)
        return None if found is None else found * 1000

    @cached_property
    def delays(self) -> list[tuple[list[float], float]]:
        """Delays of frames with the weight of each, for `weighted_quantile`."""
        counts: dict[str, int] = {}
        for peer in self.peers:
            counts[peer.profile] = counts.get(peer.profile, 0) + peer.delays
        return [
            (values, max(counts[name], 1) / len(values))
            for name, values in self.result.delays_ms.items()
            if values and name in counts
        ]

    def delay_ms(self, share: float) -> float | None:
        found = weighted_quantiles(self.delays, (share,))
        return found[0] if found else None

    def largest(self, name: str) -> float | None:
        """Return the largest value of a field; None: it was not measured."""
        return max((value for peer in self.peers if (value := getattr(peer, name)) is not None), default=None)

    @cached_property
    def seconds(self) -> float:
        """Seconds that the peers were connected, all together; a peer that stays counts until the end."""
        end = self.result.duration_s
        return sum(
            max(0.0, (end if peer.ended_s is None else peer.ended_s) - peer.started_s)
            for peer in self.peers
            if peer.connect_s is not None
        )

    @property
    def missing(self) -> float | None:
        """Frames of all tracks that never came although later ones did."""
        video, audio = self.frames("missing_video"), self.frames("missing_audio")
        return None if video is None or audio is None else video + audio

    @property
    def missing_share(self) -> float | None:
        """Missing frames as a share of those that should have come."""
        missing, video, audio = self.missing, self.frames("video"), self.frames("audio")
        if missing is None or video is None or audio is None:
            return None
        return missing / (missing + video + audio)

    @property
    def picture_share(self) -> float | None:
        """Share of the pictures that came, of those up to the last picture or piece of sound of each peer."""
        seen, missing, after = (self.frames(name) for name in ("video", "missing_video", "missed_at_end"))
        return None if not seen or missing is None or after is None else seen / (seen + missing + after)

    @property
    def line_share(self) -> float | None:
        """Share of what their lines could carry that came; None: no profile of theirs sets a rate."""
        lines = [(peer.line_used_bytes, peer.line_bytes) for peer in self.peers if peer.line_bytes]
        could = sum(line_bytes for _, line_bytes in lines)
        return sum(used for used, _ in lines) / could if could else None

    @property
    def kbit_s(self) -> float | None:
        """Kilobits per second that a peer received while it was connected, on average.

        None: they were there for less than a second each, in which the burst at the begin is all there is.
        """
        there = sum(peer.connect_s is not None for peer in self.peers)
        return self.total("wire_bytes") * 8 / 1000 / self.seconds if there and self.seconds >= there else None
