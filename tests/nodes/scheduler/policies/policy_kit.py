"""Peers as policies see them, without a scheduler."""

from __future__ import annotations

from weakref import ref

from flowctl.nodes.scheduler.policy import PeerChannels


class Anything:
    """An object that can be held weakly."""


ANYTHING = Anything()


def peer_of(peer_id: int, channels: int = 1, in_flight: int = 0) -> PeerChannels:
    peer = PeerChannels(peer_id, ref(ANYTHING), peer_id, channels)
    peer.pending.update(dict.fromkeys(range(in_flight)))
    return peer
