"""Plays that are fetched file by file, as HLS is: who was allowed one goes on with it for as long as it asks.

A player of HLS makes a request for each segment and, every few seconds, for the playlist. Were each of them a play,
hooks would be asked about thousands, and a token that expires would end a viewer in the middle. So the first request
begins a visit, which is one play for the gate: the same client that brings the same proof for the same stream is not
asked about again, until it has asked for nothing for a while. Networks that may not play are refused at each request.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import structlog

from flowctl.core.text.addresses import address_key
from flowctl.core.text.printable import printable
from flowctl.live.access.request import LiveRequest

_log: Final = structlog.get_logger("flowctl.live")
IDLE_S: Final = 60.0
"""After so long without a request a visit is over: players ask for the playlist once per segment, 30 s at most."""
_LOOK_S: Final = 5.0
_MOST: Final = 16_384
_MOST_PER_ADDRESS: Final = 256
"""Beyond that each request is asked about on its own: who invents queries pays for it, and pushes nobody out."""

_Key = tuple[str, str, bytes]


class Hears(Protocol):
    """The gate of a server, as far as visits ask and tell it."""

    def minds(self, request: LiveRequest) -> bool:
        """Return whether anybody decides about a request, or hears of it."""

    def began(self, request: LiveRequest) -> None:
        """What was asked for has begun."""

    def over(self, request: LiveRequest, why: str) -> None:
        """It is over."""


class _Visit(NamedTuple):
    request: LiveRequest
    asked_at: float


class Visits:
    """The visits of a server. Any thread may call its methods."""

    def __init__(self, gate: Hears, clock: Callable[[], float], call_later: Callable[..., Any]) -> None:
        self._gate: Final = gate
        self._clock: Final = clock
        self._call_later: Final = call_later
        self._lock = threading.Lock()
        self._visits: OrderedDict[_Key, _Visit] = OrderedDict()  # who asked longest ago first; guarded by _lock
        self._counts: dict[str, int] = {}  # by address or network; guarded by _lock
        self._looking = False  # guarded by _lock
        self._stopped = False  # guarded by _lock

    def __len__(self) -> int:
        with self._lock:
            return len(self._visits)

    def goes_on(self, request: LiveRequest) -> bool:
        """Return whether a request belongs to a visit, which it prolongs; then the gate need not be asked."""
        key, now = _key(request), self._clock()
        with self._lock:
            visit = self._visits.get(key)
            if visit is None or now - visit.asked_at >= IDLE_S:
                return False
            self._visits[key] = visit._replace(asked_at=now)
            self._visits.move_to_end(key)
        return True

    def begin(self, request: LiveRequest) -> None:
        """A request was allowed: a visit begins with it, unless it belongs to one, or nobody decides or hears of it."""
        if not self._gate.minds(request):
            return
        self._end_idle()
        key, network = _key(request), address_key(request.peer[0])
        with self._lock:
            count = self._counts.get(network, 0)
            full = count >= _MOST_PER_ADDRESS or len(self._visits) >= _MOST
            if self._stopped or full or key in self._visits:
                return
            self._counts[network] = count + 1
            self._visits[key] = _Visit(request, self._clock())
            look, self._looking = not self._looking, True
        _log.info("play started", **_fields(request), agent=request.user_agent)
        self._gate.began(request)
        if look:
            self._call_later(_LOOK_S, self._look)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            gone = [self._forget_locked(key) for key in tuple(self._visits)]
        self._tell(gone, "the server stops")

    def _look(self) -> None:
        self._end_idle()
        with self._lock:
            look = self._looking = bool(self._visits)
        if look:
            self._call_later(_LOOK_S, self._look)

    def _end_idle(self) -> None:
        now, gone = self._clock(), []
        with self._lock:
            while self._visits:
                key, visit = next(iter(self._visits.items()))
                if now - visit.asked_at < IDLE_S:
                    break
                gone.append(self._forget_locked(key))
        self._tell(gone, f"it asked for nothing for {IDLE_S:g} s")

    def _forget_locked(self, key: _Key) -> LiveRequest:
        request = self._visits.pop(key).request
        network = address_key(request.peer[0])
        count = self._counts.pop(network) - 1
        if count:
            self._counts[network] = count
        return request

    def _tell(self, gone: list[LiveRequest], why: str) -> None:
        for request in gone:
            _log.info("play ended", **_fields(request), reason=why)
            self._gate.over(request, why)


def _fields(request: LiveRequest) -> dict[str, Any]:
    peer = f"{request.peer[0]}:{request.peer[1]}"
    stream = printable(request.stream)
    return {"stream": stream, "peer": peer, "connection": request.connection, "protocol": "hls"}


def _key(request: LiveRequest) -> _Key:
    """Return what all requests of a visit have in common: client, stream, and all that it may be let in for."""
    url, digest = request.url, hashlib.sha256()
    for text in (url.raw_query, url.user, url.password, request.bearer, request.user_agent):
        octets = (text or "").encode("utf-8", "surrogatepass")
        digest.update(len(octets).to_bytes(4, "big") + octets)
    return request.peer[0], request.stream, digest.digest()
