"""Why things end: the reasons for which a connection is closed and for which a message is dropped."""

from __future__ import annotations

import enum
from typing import Final


class CloseReason(enum.Enum):
    """Why a connection ended; given to `closed(reason, details)` exactly once."""

    PEER_CLOSED = "peer closed"
    PEER_RESET = "peer reset"
    HARD_LIMIT = "hard limit"
    STUCK = "stuck"
    SOFT_TOO_LONG = "soft limit too long"
    MEMORY_BUDGET = "memory budget"
    PROTOCOL_ERROR = "protocol error"
    LIMIT_HIT = "limit hit"
    HANDSHAKE_TIMEOUT = "handshake timeout"
    IDLE = "idle"
    AUTH_REFUSED = "auth refused"
    KICKED = "kicked"
    BANNED = "banned"
    SHUTDOWN = "shutdown"
    FINISHED = "finished"
    INTERNAL = "internal"

    @property
    def abortive(self) -> bool:
        """Whether the socket is reset instead of being closed in order.

        A peer that does not read would keep our kernel buffers (megabytes) for minutes after an orderly close,
        because the kernel goes on probing its closed window. A reset frees them at once.
        """
        return self in _ABORTIVE


_ABORTIVE = frozenset(
    {
        CloseReason.HARD_LIMIT,
        CloseReason.STUCK,
        CloseReason.SOFT_TOO_LONG,
        CloseReason.MEMORY_BUDGET,
        CloseReason.PEER_RESET,
        CloseReason.BANNED,
        CloseReason.INTERNAL,
    }
)


SLOW_ENDS: Final = (
    CloseReason.HARD_LIMIT.value,
    CloseReason.STUCK.value,
    CloseReason.SOFT_TOO_LONG.value,
    CloseReason.MEMORY_BUDGET.value,
)
"""Close reasons, as records have them, that mean: it did not keep up."""


class DropReason(enum.Enum):
    """Why a message that the Sender accepted, or was offered, never reached the peer."""

    REFUSED = "refused by policy"
    LATE = "late"
    SUPERSEDED = "superseded by a newer value"
    THINNED = "thinned from the queue"
    RETURNED = "skipped to return to live"
    KEY_WAIT = "waiting for a key frame"
    HELD = "hard limit held"
    REQUESTED = "dropped by the application"
    UNFOLLOWED = "left the stream"
    CLOSED = "queued at close"

    __hash__ = object.__hash__  # each is one object, and accounts are kept by them in each turn: in C, not in `enum`
