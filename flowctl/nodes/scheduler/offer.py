"""The words of the scheduler: peers and their channels, senders that wait for one, and the offers made to them.

A *peer* has one or more *channels*, each the capacity to send it one message: *open* (ready for one) or *closed* (the
peer is given time to read and answer the last one). A `WaitingSender` is a *demand*: it waits for an open channel. An
`Offer` is *capacity* put before a demand: open channels, of which it may use as many as the offer's size says, for as
long as the callback runs. A `ResponseReceiver` is a *reply handler*: it waits for the answer to one request, or to
several. A message that expects an answer is a *request*, one that does not a *notification*; both close their channel,
and both say for how long at most.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from flowctl.errors import ConfigError
from flowctl.nodes.scheduler.policy import PeerChannels

PeerId: TypeAlias = Any
"""Name of a peer: hashable, and ordered among those of one scheduler."""

ResponseType: TypeAlias = type | tuple[type, ...] | None
"""Type that the response to a request must be an instance of. None: any type."""

FIRST_ID: Final = 1 << 24
LAST_ID: Final = (1 << 32) - 1
"""Largest request id: ids fit 32 bits, and small numbers are free for protocols that share the field with other
uses."""

MAX_TIMEOUT_S: Final = 86_400.0
"""Longest timeout, one day: ids begin anew after 4.3e9 requests, so none is used twice while its request waits."""


def check_timeout(timeout: float) -> None:
    if not 0 < timeout <= MAX_TIMEOUT_S:
        raise ConfigError(f"timeout is {timeout} s; it must be more than 0 and at most {MAX_TIMEOUT_S:g}")


def check_response_type(response_type: ResponseType) -> None:
    try:
        if response_type is not None:
            isinstance(None, response_type)
    except TypeError as error:
        raise ConfigError(f"response_type is {response_type!r}; it must be a type, or a tuple of types") from error


class FailureCode(enum.Enum):
    """Why a request ended without its response."""

    TIMEOUT = "timeout"  #: no response came in time
    DISCONNECT = "disconnect"  #: its peer has gone
    SHUTDOWN = "shutdown"  #: the scheduler was stopped


class ConnectedPeer(Protocol):
    """The other end of a connection; held weakly by the scheduler.

    It has an attribute ``peer_id`` (see `PeerId`).
    """

    @property
    def peer_id(self) -> PeerId:
        """What it is known by: the same for as long as it is connected."""

    def send(self, request_id: int | None, message: Any) -> bool | None:
        """Send `message`, with `request_id`, which the peer copies into its response; None in a notification.

        Called with no lock held. False, or an exception, says that it was not sent: the channel stays open.
        """


class WaitingSender(Protocol):
    """A demand for one or more channels, kept until it has had one, is withdrawn, or the scheduler stops."""

    def on_offer(self, offer: Offer) -> None:
        """Send on those channels of `offer` that suit; for as long as this runs, the offer is open.

        Having sent, or called ``offer.withdraw()``, the sender is done: who wants more schedules again. Having done
        neither it keeps its place, and is called again when other channels have opened.
        """

    def on_discard(self) -> None:
        """The scheduler has stopped: no offer comes any more. Called once, instead of further offers."""


class ResponseReceiver(Protocol):
    """Handles how requests end; each request calls one of the two methods, once."""

    def on_success(self, request_id: int, response: Any) -> None:
        """Take the `response` to `request_id`."""

    def on_failure(self, request_id: int, code: FailureCode) -> None:
        """Learn that no response to `request_id` comes, and why."""


@dataclass(slots=True, eq=False)
class QueuedSender:
    sender: WaitingSender
    number: int  # how many were scheduled before it
    place: float
    peers: frozenset[PeerId] | None  # the only ones that it wants; None: any
    done: bool = False
    lines: tuple[Any, ...] = ()  # those that it stands in
    offer: Offer | None = None  # the one that it has before it
    successor: QueuedSender | None = None  # it was scheduled again while it had an offer before it


@dataclass(frozen=True, slots=True)
class OfferActions:
    """The actions of an offer, done by its scheduler, under its lock."""

    #: sends a message, a notification if there is no receiver; returns its key, None if it was not sent
    post: Callable[[Offer, Channel, Any, ResponseReceiver | None, float, ResponseType], int | None]
    pull: Callable[[Offer], PeerChannels | None]  #: returns the next open peer, None if there is none
    choose: Callable[[Offer, PeerId], PeerChannels | None]  #: returns the peer of that id if the offer can send to it
    leave: Callable[[Offer], bool]  #: takes the sender out; whether it was in the queue


class Channel:
    """The capacity to send one message to one peer, as part of one offer."""

    __slots__ = ("offer", "state", "used")

    def __init__(self, offer: Offer, state: PeerChannels) -> None:
        #: The offer that it is part of.
        self.offer: Final = offer
        #: The peer, as the scheduler and its policies see it.
        self.state: Final = state
        #: Whether a message was sent on it.
        self.used = False

    @property
    def peer_id(self) -> PeerId:
        return self.state.peer_id

    def send(
        self, message: Any, receiver: ResponseReceiver, timeout: float, *, response_type: ResponseType = None
    ) -> int | None:
        return self.offer.send(self, message, receiver, timeout, response_type=response_type)

    def notify(self, message: Any, timeout: float) -> bool:
        return self.offer.notify(self, message, timeout)


class Offer:
    """Open channels, put before one sender for as long as its `WaitingSender.on_offer` runs.

    Iterating gives the channels that the sender has not seen: of the peer that has just become free for one that was
    waiting, all open ones for one that has just come. They come in the order of the policy, by default that of the
    peers' ids, and each peer has its channels one after the other; sending does not change that order. The iteration
    ends when the size is used up. Any thread may use an offer, while it is open.
    """

    __slots__ = ("_hands", "active", "entry", "fresh", "pulled", "sent_count", "size")

    def __init__(
        self, hands: OfferActions, entry: QueuedSender, fresh: tuple[PeerChannels, ...] | None, size: int
    ) -> None:
        self._hands: Final = hands
        #: The place in the queue of the sender that it is made to.
        self.entry: Final = entry
        #: The peers that have become free, or the open ones that the sender wants. None: all open ones are new.
        self.fresh: Final = fresh
        #: How many messages may still be sent: counts down.
        self.size = size
        #: How many messages were sent.
        self.sent_count = 0
        #: Whether it can be used: the callback runs.
        self.active = True
        #: Peers taken from those that are open, to be put back; the scheduler's.
        self.pulled: Final[list[PeerChannels]] = []

    def __iter__(self) -> Iterator[Channel]:
        if self.fresh is None:
            return self.full()
        return self._channels_of(self.fresh)

    def full(self) -> Iterator[Channel]:
        """Yield all open channels, also those that the sender has seen before, until the size is used up.

        Where a long queue is asked in parts, the peers that it is asked about come last.
        """
        pulled = self.pulled
        index = 0
        while self.size > 0 and self.active:
            peer = pulled[index] if index < len(pulled) else self._hands.pull(self)
            if peer is None:
                yield from self._channels_of(tuple(peer for peer in self.fresh or () if peer.reserved))
                return
            index += 1
            if peer.reference() is None:
                continue
            for _ in range(peer.open_count):
                yield Channel(self, peer)
                if self.size <= 0 or peer.open_count <= 0:
                    break

    def _channels_of(self, peers: tuple[PeerChannels, ...]) -> Iterator[Channel]:
        for peer in peers:
            if peer.reference() is None:
                continue
            for _ in range(peer.open_count):
                if self.size <= 0 or not self.active:
                    return
                if peer.open_count <= 0:
                    break
                yield Channel(self, peer)

    def channel(self, peer_id: PeerId) -> Channel | None:
        """Return an open channel of the peer `peer_id`, fresh or not; None if it has none. O(1)."""
        peer = self._hands.choose(self, peer_id)
        return None if peer is None else Channel(self, peer)

    def send(
        self,
        channel: Channel,
        message: Any,
        receiver: ResponseReceiver,
        timeout: float,
        *,
        response_type: ResponseType = None,
    ) -> int | None:
        """Send a request on `channel`, which closes it until the request ends."""
        if receiver is None:
            raise ConfigError("a request has no receiver", hint="what expects no answer is sent by notify")
        return self._hands.post(self, channel, message, receiver, timeout, response_type)

    def notify(self, channel: Channel, message: Any, timeout: float) -> bool:
        """Send a notification on `channel`, which closes it for `timeout` seconds.

        Args and Raises: see `send`.
        """
        return self._hands.post(self, channel, message, None, timeout, None) is not None

    def skip(self, channel: Channel | None = None) -> None:
        """Leave `channel`, or the one that the iteration is at, open for the next sender: the same as going on."""

    def withdraw(self) -> bool:
        """Leave the queue without having sent: no callback of the sender follows."""
        return self._hands.leave(self)
