"""Many messages over one offer: its peers shuffled once, then one after the other, round and round."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection
from random import Random
from typing import Any

from flowctl.nodes.scheduler.offer import Channel, Offer, PeerId, ResponseReceiver, ResponseType


class BlastResult(enum.Enum):
    """What became of a message."""

    SENT = "sent"  #: a peer has it
    #: None of this offer can have it now, but one that is connected may later: keep waiting. Should that one leave, no
    #: offer says so: who waits for an answer sets a time (`MessageScheduler.call_later`).
    RETRY = "retry"
    FAILED = "failed"  #: every connected peer is on the blacklist: who waits for another, waits for ever


class Blaster:
    """Sends messages to the peers of one offer, round robin from a random order.

    For the time of one `WaitingSender.on_offer`. It looks at all open channels of the offer, not only the
    fresh ones: O(n).
    """

    def __init__(self, offer: Offer, others: Callable[[Collection[PeerId]], bool], rng: Random) -> None:
        self._offer = offer
        self._others = others
        channels: dict[PeerId, list[Channel]] = {}
        for channel in offer.full():
            channels.setdefault(channel.peer_id, []).append(channel)
        order = list(channels)
        rng.shuffle(order)
        self._turns = deque((peer_id, channels[peer_id]) for peer_id in order)

    def send(
        self,
        blacklist: set[PeerId],
        message: Any,
        receiver: ResponseReceiver,
        timeout: float,
        *,
        response_type: ResponseType = None,
    ) -> BlastResult:
        """Send a message to the next peer that is not on the blacklist, and put that one on it."""
        for _ in range(len(self._turns)):
            if self._offer.size <= 0:
                break
            peer_id, channels = self._turns[0]
            self._turns.rotate(-1)
            if peer_id in blacklist or not channels:
                continue
            if self._offer.send(channels.pop(), message, receiver, timeout, response_type=response_type) is not None:
                blacklist.add(peer_id)
                return BlastResult.SENT
        return BlastResult.RETRY if self._others(blacklist) else BlastResult.FAILED
