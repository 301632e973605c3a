"""Drop policies: what an application does with messages for a peer that cannot take them all.

A policy decides by state and message class alone: `decide` says what happens to a message that is offered, `thin`
what is done to the queue when a state is entered. That it is a pure function is what makes it cheap (the decisions of
a state are worked out once and become a bit mask), what lets one viewer of a shared log be thinned without walking
the log, and what lets recorded sessions be judged again under another policy. `flowctl.testing.check_drop_policy`
tests one's own.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple, Protocol

from flowctl.flow import MessageClass, SendState


class Verdict(enum.Enum):
    """What happens to an offered message."""

    KEEP = "keep"
    DROP = "drop"


class Thin(enum.Enum):
    """What is done to the queue when a state is entered.

    DROPPABLE throws away everything that may be dropped. TO_KEY_FRAME skips to a key frame: the first from which on
    the load is at or below the low mark; else the newest with its audio only; else the next one to be published.
    Where there is no video, the oldest audio goes until the low mark is reached.
    """

    NOTHING = "nothing"
    DROPPABLE = "droppable"
    TO_KEY_FRAME = "to_key_frame"


class DropPolicy(Protocol):
    """The application's choice of what to drop; both methods must be pure functions of their arguments."""

    def decide(self, state: SendState, message_class: MessageClass) -> Verdict:
        """Return what happens to a droppable message of `message_class` offered in `state`.

        Never asked for CONTROL.
        """

    def thin(self, state: SendState) -> Thin:
        """Return what is done to the queue when `state` is entered from a better one."""


class KeepAll:
    """Drop nothing: for peers whose every message counts; only the limits protect the server."""

    def decide(self, state: SendState, message_class: MessageClass) -> Verdict:
        """Keep every message."""
        return Verdict.KEEP

    def thin(self, state: SendState) -> Thin:
        """Leave the queue alone."""
        return Thin.NOTHING


class DropDroppable:
    """Refuse droppable messages from a state on, and throw away the queued ones at another.

    Args:
        refuse_from: first state in which droppable messages are refused.
        thin_from: first state whose entry drops what is droppable from the queue.
    """

    def __init__(
        self, refuse_from: SendState = SendState.OVERLOADED, thin_from: SendState = SendState.SOFT_LIMIT
    ) -> None:
        self.refuse_from = refuse_from
        self.thin_from = thin_from

    def decide(self, state: SendState, message_class: MessageClass) -> Verdict:
        """Drop everything but HEADER from `refuse_from` on."""
        refused = state >= self.refuse_from and message_class is not MessageClass.HEADER
        return Verdict.DROP if refused else Verdict.KEEP

    def thin(self, state: SendState) -> Thin:
        """Throw away what is droppable from `thin_from` on."""
        return Thin.DROPPABLE if state >= self.thin_from else Thin.NOTHING


class LivePolicy:
    """The policy for live media: lose pictures, never sound before pictures, never decodability.

    OVERLOADED refuses frames that no other frame needs. SOFT_LIMIT skips to a key frame and takes only key frames and
    audio until the load is at the low mark. HARD_LIMIT takes nothing more.
    """

    _REFUSED: Final = {
        SendState.READY: frozenset[MessageClass](),
        SendState.OVERLOADED: frozenset({MessageClass.DISPOSABLE}),
        SendState.SOFT_LIMIT: frozenset({MessageClass.DISPOSABLE, MessageClass.INTER}),
        SendState.HARD_LIMIT: frozenset(MessageClass) - {MessageClass.CONTROL, MessageClass.HEADER},
    }

    def decide(self, state: SendState, message_class: MessageClass) -> Verdict:
        """Apply the table above."""
        return Verdict.DROP if message_class in self._REFUSED[state] else Verdict.KEEP

    def thin(self, state: SendState) -> Thin:
        """Skip to a key frame at SOFT_LIMIT."""
        return Thin.TO_KEY_FRAME if state is SendState.SOFT_LIMIT else Thin.NOTHING


class Room(NamedTuple):
    """What may stay queued when a queue is thinned: the distance to the low marks.

    Attributes:
        size_bytes: payload plus overhead.
        messages: number of messages.
        oldest_from: enqueue time from which on a message is young enough, in seconds.
        overhead_bytes: charged per message.
    """

    size_bytes: int
    messages: int
    oldest_from: float
    overhead_bytes: int

    def fits(self, wire_bytes: int, messages: int, since: float) -> bool:
        """Return whether `messages` messages of `wire_bytes`, the oldest queued `since`, may stay."""
        size = wire_bytes + messages * self.overhead_bytes
        return size <= self.size_bytes and messages <= self.messages and since >= self.oldest_from


KEY_WAIT_S: Final = 10.0
"""Shortest time after which waiting for a key frame is given up; two groups of pictures, where that is longer."""

_UNDROPPABLE: Final = (MessageClass.CONTROL, MessageClass.HEADER)
DROPPABLE_MASK: Final = sum(1 << item for item in MessageClass if item not in _UNDROPPABLE)
"""Bit per class that a log may drop at all."""
BROKEN_MASK: Final = 1 << MessageClass.INTER | 1 << MessageClass.DISPOSABLE
"""What cannot be decoded between the loss of an inter frame and the next key frame."""


def refused_mask(policy: DropPolicy, state: SendState) -> int:
    """Return the classes that `policy` drops in `state`, as a bit mask by `MessageClass`."""
    return sum(
        1 << item for item in MessageClass if item not in _UNDROPPABLE and policy.decide(state, item) is Verdict.DROP
    )
