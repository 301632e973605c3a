"""Stray connections: those of probes and scanners, which come for nothing that is here, told of once an episode.

A balancer connects to each port every few seconds, day and night, and leaves; a scanner asks for a hundred pages that
are not there. The first of a kind from a network is told of as any connection is, those behind it are counted, and the
count is told when none has come for `QUIET_S`, or each `TOLD_EACH_S`. Records and metrics have all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import structlog

from flowctl.core.loop.locks import OwnedLock
from flowctl.core.text.addresses import network_of
from flowctl.reasons import CloseReason

_log: Final = structlog.get_logger("flowctl.live")
SILENT: Final = "nothing was sent"
STRAY_ENDS: Final = frozenset(
    {
        CloseReason.PEER_CLOSED,
        CloseReason.PEER_RESET,
        CloseReason.PROTOCOL_ERROR,
        CloseReason.IDLE,
        CloseReason.FINISHED,
    }
)
"""Reasons for which a stray connection ends, of its own or for what it says; other ends are told of, each."""
QUIET_S: Final = 600.0
"""Time without another one after which an episode is over: the slowest checks of balancers come every five minutes."""
TOLD_EACH_S: Final = 3600.0
_LOOK_S: Final = 60.0
_MOST_EPISODES: Final = 1024
"""Most episodes that are remembered: where more run at once, the one that is silent longest is told and forgotten."""


class Kind(NamedTuple):
    """What an episode has in common."""

    network: str
    protocol: str
    why: str  # what makes its connections stray ones


@dataclass(slots=True)
class _Episode:
    told_at: float
    last_at: float
    untold: int = 0


class Strays:
    """The stray connections of a server. Any thread may call its methods.

    `tell` is told of connections that were counted, their kind and number, on the threads of its callers.
    """

    def __init__(self, clock: Callable[[], float], call_later: Callable[..., Any]) -> None:
        self._clock: Final = clock
        self._call_later: Final = call_later
        self._lock: Final = OwnedLock()
        self._episodes: OrderedDict[Kind, _Episode] = OrderedDict()  # silent longest first; guarded by _lock
        self._looking = False  # guarded by _lock
        self.tell: Callable[[Kind, int], None] | None = None  # set before the first connection

    def is_first(self, host: str, protocol: str, why: str) -> bool:
        """Count a stray connection that has ended; return whether it begins an episode, and is to be told of."""
        kind, now, gone = Kind(network_of(host), protocol, why), self._clock(), None
        with self._lock:
            episode = self._episodes.get(kind)
            if first := episode is None:
                if len(self._episodes) >= _MOST_EPISODES:
                    gone = self._episodes.popitem(last=False)
                self._episodes[kind] = _Episode(now, now)
            else:
                episode.last_at, episode.untold = now, episode.untold + 1
                self._episodes.move_to_end(kind)
            look, self._looking = not self._looking, True
        if gone is not None:
            self._say(gone[0], gone[1].untold)
        if look:
            self._call_later(_LOOK_S, self._look)
        return first

    def _look(self) -> None:
        now = self._clock()
        with self._lock:
            told = []
            for kind, episode in list(self._episodes.items()):
                over = now - episode.last_at >= QUIET_S
                if over:
                    del self._episodes[kind]
                if over or now - episode.told_at >= TOLD_EACH_S:
                    told.append((kind, episode.untold))
                    episode.told_at, episode.untold = now, 0
            again = self._looking = bool(self._episodes)
        for kind, count in told:
            self._say(kind, count)
        if again:
            self._call_later(_LOOK_S, self._look)

    def stop(self) -> None:
        """Tell of what has been counted: the server stops."""
        with self._lock:
            told = [(kind, episode.untold) for kind, episode in self._episodes.items()]
            self._episodes.clear()
        for kind, count in told:
            self._say(kind, count)

    def _say(self, kind: Kind, count: int) -> None:
        if count:
            _log.info(
                "stray connections closed",
                peer=kind.network,
                count=count,
                protocol=kind.protocol,
                why=kind.why,
            )
            if self.tell is not None:
                self.tell(kind, count)
