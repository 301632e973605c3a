"""The gate that requests for objects pass through: where a node shares its peers between several uses."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

from flowctl.nodes.diffusion.objects import ObjectId, PeerId


class RequestEnd(enum.Enum):
    REPLIED = "replied"
    LOST = "lost"  #: its peer is gone, or did wrong


class RequestGate(Protocol):
    """Decides whether a request for objects may be sent now. On the loop's thread.

    With a `nodes.scheduler` a request takes a channel of its peer: `begin` schedules a sender, sends when an offer
    with a channel of that peer comes at once, and otherwise withdraws it.
    """

    def begin(
        self, peer: PeerId, object_ids: tuple[ObjectId, ...], size_bytes: int, send: Callable[[], None]
    ) -> Callable[[RequestEnd], object] | None:
        """Send a request now, or not."""


class OpenGate:
    """Sends every request at once."""

    def begin(
        self, peer: PeerId, object_ids: tuple[ObjectId, ...], size_bytes: int, send: Callable[[], None]
    ) -> Callable[[RequestEnd], object]:
        del peer, object_ids, size_bytes
        send()
        return id  # its end is nothing to us
