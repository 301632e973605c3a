"""What a scheduler asks its policies: four narrow questions, each with an object of its own that answers (pure).

- `Fairness`: where in the queue does a new sender stand, and how many channels may it take of an offer?
- `PeerChoice`: in which order are the open peers offered?
- `ChannelLimits`: how many channels has a peer, now that this request of it has ended so?
- `Ejection`: is a peer left out for a while, now that this request of it has ended so?

They are called with the scheduler's lock held: they compute, and neither wait nor call the scheduler. What they raise
is reported, and the question counts as not asked; but for `Fairness.place`, which `schedule` passes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Final, Protocol
from weakref import ref

from flowctl.core.outcomes.pending import Outcome
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError

PLACES_PER_PRIORITY: Final = 64
"""How many senders that came before it a sender passes for each level of priority. It bounds how often anybody is
overtaken, whatever comes: a sender waits for those before it and for 64 later ones for each level above its own."""
MAX_PRIORITY: Final = 1_000
"""Largest priority, up or down. It is enough to pass 64,000 that wait; without a bound there is no guarantee."""


@dataclass(slots=True, eq=False)
class PeerChannels:
    """One connected peer, as the scheduler and its policies see it; only the scheduler changes it."""

    peer_id: Any
    reference: ref[Any]  #: calls to the peer's object, or to None once that is gone
    number: int
    channel_count: int  #: its channels, open and closed. After it was lowered more than these may be closed
    open_count: int = 0  #: messages that may be sent to it now; 0 while it is ejected
    #: Keys of what it has been sent and has not finished, oldest first: each is one closed channel.
    pending: dict[int, None] = field(default_factory=dict)
    pooled: bool = False  # the Choice has it, or the running offer does
    ejected: bool = False
    reserved: bool = False  # those that wait are being asked about it: others see it after them
    probation: bool = False  #: whether it was ejected until lately: it has one channel until it has answered
    gone: bool = False  #: whether it was disconnected, or its object is no more
    choice_state: Any = None  #: for the `PeerChoice`, which may keep here what it knows of the peer
    limits_state: Any = None
    ejection_state: Any = None

    @property
    def closed_count(self) -> int:
        return len(self.pending)


class Fairness(Protocol):
    """Decides about the order of the queue and the size of offers."""

    def place(self, sender: Any, priority: int, number: int) -> float:
        """Return the place of a new sender: lower is earlier, equal ones stand in the order of their coming."""

    def size(self, open_count: int, behind_count: int) -> int:
        """Return how many messages the next sender may send."""

    def served(self, sender: Any, place: float, sent_count: int) -> None:
        """Learn that `sender`, which had `place`, has sent `sent_count` messages, 1 or more."""


class PeerChoice(Protocol):
    """Holds the peers that have open channels, and returns them, best first.

    A peer is added once and then taken once; those that lost their channels meanwhile are given out all the same, and
    passed over by the scheduler.
    """

    def add(self, peer: PeerChannels) -> None:
        """Take up `peer`, which is not here."""

    def take(self) -> PeerChannels | None:
        """Remove and return the peer that is to be offered next; None if none is left."""

    def ended(self, peer: PeerChannels, outcome: Outcome, latency_s: float, now: float) -> None:
        """Learn how a request to `peer` ended."""


class ChannelLimits(Protocol):
    """Decides how many channels a peer has."""

    def connected(self, peer: PeerChannels, now: float) -> int:
        """Return with how many channels `peer` begins, 1 or more; it was connected with ``peer.channel_count``."""

    def ended(self, peer: PeerChannels, outcome: Outcome, latency_s: float, now: float) -> int:
        """Return how many channels `peer` has from now on, 1 or more; arguments as of `PeerChoice.ended`."""


class Ejection(Protocol):
    """Decides which peers are left out of offers for a while."""

    def connected(self, peer: PeerChannels, now: float) -> None:
        """Learn that `peer` was connected."""

    def ended(self, peer: PeerChannels, outcome: Outcome, latency_s: float, now: float) -> float:
        """Return for how many seconds `peer` is left out; 0: not. Arguments as of `PeerChoice.ended`."""

    def left(self, peer: PeerChannels) -> None:
        """Learn that `peer` was disconnected."""

    def returned(self, peer: PeerChannels, now: float) -> None:
        """Learn that the time of `peer` is over: it is offered again."""


class FirstComeFirstServed:
    """Each in its turn, one channel at a time while others wait behind it; priorities pass a bounded number."""

    __slots__ = ("_places",)

    def __init__(self, places_per_priority: int = PLACES_PER_PRIORITY) -> None:
        if places_per_priority < 0:
            raise ConfigError(f"places_per_priority is {places_per_priority}; it must be at least 0")
        self._places: Final = places_per_priority

    def place(self, sender: Any, priority: int, number: int) -> float:
        return number - priority * self._places

    def size(self, open_count: int, behind_count: int) -> int:
        return 1 if behind_count else open_count

    def served(self, sender: Any, place: float, sent_count: int) -> None:
        """Learn nothing: places stay as they are."""


class ById:
    """Open peers in the order of their ids.

    The peer that was taken last stays at the top of the heap until something else is added or taken: mostly it comes
    back, and then nothing has to move.
    """

    __slots__ = ("_heap", "_taken")

    def __init__(self) -> None:
        self._heap: Final[list[tuple[Any, int, PeerChannels]]] = []
        self._taken = False  # the one at the top

    def add(self, peer: PeerChannels) -> None:
        heap = self._heap
        try:
            if not self._taken:
                heappush(heap, (peer.peer_id, peer.number, peer))
                return
            self._taken = False
            if heap[0][2] is not peer:
                heapreplace(heap, (peer.peer_id, peer.number, peer))
        except Exception:  # its id has no order beside another: the others keep theirs
            heap[:] = [item for item in heap if item[2] is not peer]
            heapify(heap)
            raise

    def take(self) -> PeerChannels | None:
        heap = self._heap
        if self._taken:
            heappop(heap)
        self._taken = bool(heap)
        return heap[0][2] if heap else None

    def ended(self, peer: PeerChannels, outcome: Outcome, latency_s: float, now: float) -> None:
        """Learn nothing: ids stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPolicy:
    """The policies of one scheduler; objects that keep state belong to one scheduler each."""

    fairness: Fairness = field(default_factory=FirstComeFirstServed)
    choice: PeerChoice = field(default_factory=ById)
    limits: ChannelLimits | None = None  #: None: as many channels as the peer was connected with
    ejection: Ejection | None = None  #: None: no peer is left out
    #: Whether a response is of use; one that is not counts for the others as a request that was REJECTED. Called with
    #: no lock held, by the thread that brings the response. None: each is.
    useful: Callable[[Any], bool] | None = None

    def __post_init__(self) -> None:
        for name, of in (("fairness", FirstComeFirstServed), ("choice", ById)):
            given = getattr(self, name)
            if missing := [method for method in vars(of) if method[0] != "_" and not hasattr(given, method)]:
                raise ConfigError(
                    f"{name} is {short(given)}, which has no {', '.join(missing)}",
                    hint=f"leave it out for the default, {of.__name__}()",
                )
