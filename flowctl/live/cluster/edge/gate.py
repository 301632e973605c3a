"""The gate of an edge: each request for segments takes a channel of one scheduler of the node.

Diffusion decides who is to be asked for what; the scheduler says whether that peer has a channel free. How many it has
follows from how fast it answers, so one that is slow is asked for less and the others for more; one that fails again
and again is left out for a while. A request that is not answered in time gives its channel back, and diffusion asks
another peer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from flowctl.nodes.diffusion.gate import RequestEnd
from flowctl.nodes.scheduler.offer import FailureCode, Offer
from flowctl.nodes.scheduler.policies.adaptive import AdaptiveChannels, AdaptiveSettings
from flowctl.nodes.scheduler.policies.ejection import EjectionSettings, OutlierEjection
from flowctl.nodes.scheduler.policy import SchedulerPolicy
from flowctl.nodes.scheduler.scheduler import MessageScheduler

REQUEST_S: Final = 4.0
"""Time after which a request without answer has failed: another peer has been asked after 2 s at most."""
FIRST_CHANNELS: Final = 2
"""Channels with which a peer begins."""
_MOST_CHANNELS: Final = 16
_EJECTION_SETTINGS: Final = EjectionSettings(consecutive=3, most_share=0.5)
"""Settings for the few peers of a node: three failures in a row take 12 s, and half of the peers may be left out."""
_SMOOTHING: Final = 0.2


@dataclass(slots=True)
class PeerMeter:
    """Counts what was asked of one origin, over all of its connections."""

    requests: int = 0
    in_flight: int = 0
    requested_bytes: int = 0
    timeouts: int = 0  #: requests that had no answer in time
    latency_s: float | None = None  #: smoothed time of answers. None: there was no answer.
    asked_at: float = 0.0  #: when the last request was sent, seconds


class _Peer:
    def __init__(self, peer_id: str, meter: PeerMeter) -> None:
        self.peer_id: Final = peer_id
        self.meter: Final = meter

    def send(self, request_id: int | None, message: Any) -> bool:
        del request_id
        message()
        return True


class _Request:
    """A request for segments: a demand, and the handler of its end."""

    def __init__(self, gate: SchedulerGate, peer: _Peer, send: Callable[[], None], now: float) -> None:
        self._gate = gate
        self._send = send
        self.peer: Final = peer
        self.began_at: Final = now
        self.number: int | None = None
        self.failed = False

    def on_offer(self, offer: Offer) -> None:
        channel = offer.channel(self.peer.peer_id)
        if channel is not None:
            self.number = channel.send(self._send, self, REQUEST_S)
        if self.number is None:
            offer.withdraw()

    def on_discard(self) -> None:
        """The node ends."""

    def on_success(self, request_id: int, response: Any) -> None:
        del request_id, response
        self._gate.freed(self.peer.peer_id)

    def on_failure(self, request_id: int, code: FailureCode) -> None:
        del request_id
        self.failed = True
        if code is FailureCode.TIMEOUT:
            self.peer.meter.timeouts += 1
            self._gate.freed(self.peer.peer_id)

    def end(self, how: RequestEnd) -> None:
        self._gate.ended(self, how)


class SchedulerGate:
    """A `RequestGate` with the one scheduler of a node; on the thread of its loop."""

    def __init__(self, clock: Callable[[], float], rng: Random | None = None) -> None:
        rng = rng or Random()
        policy = SchedulerPolicy(
            limits=AdaptiveChannels(AdaptiveSettings(ceiling=_MOST_CHANNELS)),
            ejection=OutlierEjection(rng, _EJECTION_SETTINGS),
        )
        self.scheduler: Final = MessageScheduler(clock, rng, policy)
        #: Called when a peer that was not let through may be tried again.
        self.opened: Callable[[str], None] = lambda _: None
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._held: dict[str, None] = {}

    def connect(self, peer_id: str, meter: PeerMeter) -> None:
        peer = self._peers[peer_id] = _Peer(peer_id, meter)
        self.scheduler.connect(peer, FIRST_CHANNELS)

    def disconnect(self, peer_id: str) -> None:
        if self._peers.pop(peer_id, None) is not None:
            self.scheduler.disconnect(peer_id)
            self._held.pop(peer_id, None)

    def channels(self, peer_id: str) -> int:
        """Return how many requests a peer may have at a time; 0: it is not connected, or left out."""
        found = next((state for state in self.scheduler.peers() if state.peer_id == peer_id), None)
        return 0 if found is None or found.ejected else found.channel_count

    def begin(
        self, peer: Any, object_ids: tuple[bytes, ...], size_bytes: int, send: Callable[[], None]
    ) -> Callable[[RequestEnd], object] | None:
        """Send a request if its peer has a channel free; see `RequestGate`."""
        del object_ids
        peer_state = self._peers.get(peer)
        if peer_state is None:
            return None
        request = _Request(self, peer_state, send, self._clock())
        self.scheduler.schedule(request)
        if request.number is None:
            self.scheduler.withdraw(request)
            self._held[peer] = None
            return None
        meter = peer_state.meter
        meter.requests += 1
        meter.asked_at = request.began_at
        meter.in_flight += 1
        meter.requested_bytes += size_bytes
        return request.end

    def ended(self, request: _Request, how: RequestEnd) -> None:
        meter = request.peer.meter
        meter.in_flight -= 1
        if how is not RequestEnd.REPLIED:
            return
        taken_s = self._clock() - request.began_at
        before = meter.latency_s
        meter.latency_s = taken_s if before is None else before + _SMOOTHING * (taken_s - before)
        if not request.failed and self._peers.get(request.peer.peer_id) is request.peer:
            self.scheduler.receive(request.peer, how, request.number)

    def freed(self, peer_id: str) -> None:
        if peer_id in self._held:
            del self._held[peer_id]
            self.opened(peer_id)

    def tick(self) -> None:
        """Let time pass: requests time out, and peers that were left out return."""
        self.scheduler.expire()
        for peer_id in tuple(self._held):
            if self.channels(peer_id):
                self.freed(peer_id)

    def stop(self) -> None:
        self.scheduler.stop()
