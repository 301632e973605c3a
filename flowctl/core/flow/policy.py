"""Drop policies: what an application does with messages for a peer that cannot take them all.

A policy decides by state and message class alone: `decide` says what happens to a message that is offered, `thin`
what is done to the queue when a state is entered, and `patience` how long a lagging viewer of a log waits for a class
of messages before it is left out (`flowctl.core.flow.timing`). That it is a pure function is what makes it cheap (the
decisions of a state are worked out once and become a bit mask), what lets one viewer of a shared log be thinned without
walking the log, and what lets recorded sessions be judged again under another policy.
`flowctl.testing.check_drop_policy` tests one's own.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from math import inf
from typing import ClassVar, Final, NamedTuple, Protocol

from flowctl.core.flow.state import MessageClass, SendState
from flowctl.errors import ConfigError


class Verdict(enum.Enum):
    """What happens to an offered message."""

    KEEP = "keep"
    DROP = "drop"


class Thin(enum.Enum):
    """What is done to the queue when a state is entered.

    DROPPABLE throws away everything that may be dropped. TO_KEY_FRAME skips to a key frame: the first from which on
    the load is at or below the low mark; else the newest with its audio only; else the next one to be published.
    Where there is no video, and of what was sent to one peer alone, the oldest goes until the low mark is reached.
    """

    NOTHING = "nothing"
    DROPPABLE = "droppable"
    TO_KEY_FRAME = "to_key_frame"


class DropPolicy(Protocol):
    """The application's choice of what to drop; its methods must be pure functions of their arguments."""

    def decide(self, state: SendState, message_class: MessageClass) -> Verdict:
        """Return what happens to a droppable message of `message_class` offered in `state`.

        Never asked for CONTROL.
        """

    def thin(self, state: SendState) -> Thin:
        """Return what is done to the queue when `state` is entered from a better one."""

    def patience(self, message_class: MessageClass) -> float:
        """Return within which multiple of the target delay a message must arrive to be handed over; inf: it always is.

        Asked for the messages of a followed log, while the viewer lags and where its limits set a target delay. Where
        INTER has an end, that takes the place of what `decide` says of pictures in OVERLOADED and SOFT_LIMIT. A late
        DISPOSABLE frame is left out alone; a late INTER frame with the rest of its group of pictures. A KEY frame is
        left out where a newer one waits and INTER would be; with inf it goes where none waits, unless sound that goes
        last would be late behind it. AUDIO and DATA that are waited for as long as INTER or longer go last: only while
        pictures are left out. Nothing is waited for longer than the hard limits hold, but for inf. Below HARD_LIMIT
        `thin` is not asked then, unless the peer has stalled; at SOFT_LIMIT what will be late is left out at once.
        """


class KeepAll:
    """Drop nothing: for peers whose every message counts; only the limits protect the server."""

    def decide(self, state: SendState, message_class: MessageClass) -> Verdict:
        """Keep every message."""
        return Verdict.KEEP

    def thin(self, state: SendState) -> Thin:
        """Leave the queue alone."""
        return Thin.NOTHING

    def patience(self, message_class: MessageClass) -> float:
        """Wait for everything."""
        return inf


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

    def patience(self, message_class: MessageClass) -> float:
        """Wait for everything: only the state decides."""
        return inf


class LivePolicy:
    """The policy for live media, *all or cut*: a viewer gets all, or the first pictures of each group while it lags.

    A viewer that lags behind a log is served as far as its line carries (see `patience` and `core.flow.timing`).
    Without a target delay, OVERLOADED refuses frames that no other frame needs, and SOFT_LIMIT skips to a key frame and
    takes only key frames and audio until the load is at the low mark; with one, it skips where the viewer has stalled.
    HARD_LIMIT takes nothing more: the states protect the server.
    """

    _REFUSED: Final = {
        SendState.READY: frozenset[MessageClass](),
        SendState.OVERLOADED: frozenset({MessageClass.DISPOSABLE}),
        SendState.SOFT_LIMIT: frozenset({MessageClass.DISPOSABLE, MessageClass.INTER}),
        SendState.HARD_LIMIT: frozenset(MessageClass) - {MessageClass.CONTROL, MessageClass.HEADER},
    }
    _PATIENCE: ClassVar[Mapping[MessageClass, float]] = {
        MessageClass.DISPOSABLE: 0.5,
        MessageClass.INTER: 1.0,
        MessageClass.AUDIO: 2.0,
        MessageClass.DATA: 2.0,
    }

    def decide(self, state: SendState, message_class: MessageClass) -> Verdict:
        """Apply the table above."""
        return Verdict.DROP if message_class in self._REFUSED[state] else Verdict.KEEP

    def thin(self, state: SendState) -> Thin:
        """Skip to a key frame at SOFT_LIMIT."""
        return Thin.TO_KEY_FRAME if state is SendState.SOFT_LIMIT else Thin.NOTHING

    def patience(self, message_class: MessageClass) -> float:
        """Leave out disposable frames first, then the rest of groups, key frames that delay sound, and sound last."""
        return self._PATIENCE.get(message_class, inf)


class AudioFirst(LivePolicy):
    """As `LivePolicy`, but no picture delays the sound: a late key frame is left out too, and sound never is."""

    _PATIENCE = {MessageClass.DISPOSABLE: 0.5, MessageClass.INTER: 1.0, MessageClass.KEY: 1.0}  # noqa: RUF012 - declared above


class PicturesFirst(LivePolicy):
    """As `LivePolicy`, but sound gives way first: for cameras and screens whose sound says little."""

    _PATIENCE = {  # noqa: RUF012 - declared above
        MessageClass.DISPOSABLE: 0.5,
        MessageClass.INTER: 1.0,
        MessageClass.AUDIO: 0.5,
        MessageClass.DATA: 0.5,
    }


LIVE_POLICIES: Final[dict[str, DropPolicy]] = {
    "all-or-cut": LivePolicy(),
    "audio-first": AudioFirst(),
    "pictures-first": PicturesFirst(),
}
"""Policies for live media, by the names that settings have for them."""
POLICIES: Final[dict[str, DropPolicy]] = LIVE_POLICIES | {"keep": KeepAll(), "drop": DropDroppable()}
"""All policies with which recorded viewers can be tried."""


class Headroom(NamedTuple):
    """The load that may stay queued when a queue is thinned: the distance to the low marks.

    Attributes:
        size_bytes: payload plus overhead.
        oldest_from: enqueue time from which on a message is young enough, in seconds.
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

_ENDLESS_FROM: Final = 1e9
"""Multiple of the target delay that never ends: longer than anything is queued, and the product stays a number."""
_UNDROPPABLE: Final = (MessageClass.CONTROL, MessageClass.HEADER)
DROPPABLE_MASK: Final = sum(1 << item for item in MessageClass if item not in _UNDROPPABLE)
"""Bit mask of the classes that a log may drop at all."""
BROKEN_MASK: Final = 1 << MessageClass.INTER | 1 << MessageClass.DISPOSABLE
"""Bit mask of the classes that cannot be decoded between the loss of an inter frame and the next key frame."""


def refused_mask(policy: DropPolicy, state: SendState) -> int:
    """Return the classes that `policy` drops in `state`, as a bit mask by `MessageClass`."""
    return sum(
        1 << item for item in MessageClass if item not in _UNDROPPABLE and policy.decide(state, item) is Verdict.DROP
    )


def patience_of(policy: DropPolicy) -> tuple[float, ...]:
    """Return the patience of `policy` by `MessageClass`; control messages and headers always go."""
    return tuple(inf if item in _UNDROPPABLE else _patience(policy, item) for item in MessageClass)


def _patience(policy: DropPolicy, message_class: MessageClass) -> float:
    wait: object = policy.patience(message_class)
    if not isinstance(wait, int | float) or isinstance(wait, bool) or not wait > 0:
        raise ConfigError(
            f"{type(policy).__name__}.patience({message_class.name}) is {wait!r:.40}, it must be a number above 0",
            hint="it is a multiple of the target delay, math.inf for no end",
        )
    return float(wait) if wait < _ENDLESS_FROM else inf
