"""The state of a scheduler and its rules, without lock, clock and callbacks.

Theory of operation. A peer's closed channels are the requests and notifications that it has not finished, so the two
cannot disagree; its open ones are what is left of its count. All that have an end in time stand in one `Pending`.
A request is *claimed* when its outcome is known, which takes it out of that table, and *released* when its turn comes:
then its channel opens. So its outcome is decided at once, and offers follow in order.

Senders stand in one of two lines: the queue, of those that have seen all that is open, and the arrivals, of those that
have seen nothing. A walk asks the senders of one line, in order: the queue about one peer that has become free, the
arrivals about all that is open. Who declines stands in the queue afterwards, in the place that he was given first.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from random import Random
from typing import Any, Final, TypeAlias, TypeVar
from weakref import ref

from flowctl.core.outcomes.pending import Outcome, Pending
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError, LocalProtocolError
from flowctl.nodes.scheduler.offer import (
    FIRST_ID,
    LAST_ID,
    Channel,
    ConnectedPeer,
    FailureCode,
    Offer,
    OfferActions,
    PeerId,
    QueuedSender,
    ResponseReceiver,
    ResponseType,
    WaitingSender,
)
from flowctl.nodes.scheduler.policy import MAX_PRIORITY, ById, FirstComeFirstServed, PeerChannels, SchedulerPolicy

_T = TypeVar("_T")
_MOST_STALE_PEERS: Final = 64
"""Entries of disconnected peers in the pool, beyond the number of peers, before it is cleared."""
ASKED_PER_JOB: Final = 1000
"""Senders that are asked for each channel that opens, before other jobs have their turn: some 3 ms. The rest of a
longer queue is asked when the next channel opens, or when `expire` is called, which is requested at once."""
PEERS_PER_WALK: Final = 64
"""Peers that became free during a long walk and that the next walk is about: a sender that wants none of them looks at
each."""


class ResponseFault(enum.Enum):
    """Why a response ends no request."""

    WITHOUT_ID = "has no request id"
    UNKNOWN = "is for an unknown request"
    FOREIGN = "comes from another peer than was asked"
    WRONG_TYPE = "is of another type than was asked for"


@dataclass(slots=True, eq=False)
class SentMessage:
    """A message that keeps a channel closed: a request, or, without receiver, a notification or a withdrawn request."""

    key: int  # the request id; of notifications a negative number, which no peer can answer
    peer: PeerChannels
    receiver: ResponseReceiver | None  # None: there is no callback
    response_type: ResponseType
    sent_at: float
    # Set when it is claimed:
    ended_at: float = 0.0
    code: FailureCode | None = None
    outcome: Outcome = Outcome.RESPONSE
    response: Any = None


class PolicyFault:
    """Raises the error of a policy when called, so that it is reported as the error of a callback is."""

    __slots__ = ("_error",)

    def __init__(self, error: Exception) -> None:
        self._error: Final = error

    def __call__(self) -> None:
        raise self._error


Call: TypeAlias = Callable[[], None]
Job: TypeAlias = SentMessage | PeerChannels | list[SentMessage] | list[QueuedSender] | Call
"""An event to act on: a request has ended, a peer has open channels, requests or senders have ended, or a call is
due."""
Step: TypeAlias = Offer | SentMessage | QueuedSender | Call
"""A callback to make: an offer, the end of a request, the discarding of a sender, or a call at its time."""


class SenderLine:
    """Senders in order of their places; those that are withdrawn leave at once, and their places are passed over.

    Most come in order, and stand in a deque, where nothing has to move; the others stand in a heap beside it.
    """

    __slots__ = ("_fifo", "_heap", "alone", "live_count")

    def __init__(self) -> None:
        self._fifo: deque[QueuedSender] = deque()
        self._heap: list[tuple[float, int, QueuedSender]] = []
        #: The lines of a sender that stands only here.
        self.alone: Final[tuple[SenderLine, ...]] = (self,)
        self.live_count = 0

    def push(self, entry: QueuedSender) -> None:
        """Put `entry`, whose `lines` have this one, in its place; O(1) at either end, else O(log n)."""
        self.live_count += 1
        fifo = self._fifo
        if not fifo or _is_before(fifo[-1], entry):
            fifo.append(entry)
        elif _is_before(entry, fifo[0]):
            fifo.appendleft(entry)
        else:
            heappush(self._heap, (entry.place, entry.number, entry))

    def first(self) -> QueuedSender | None:
        """Return the first sender, which stays in line; None: the line is empty. O(log n), for places left empty."""
        fifo, heap = self._fifo, self._heap
        while fifo and self not in fifo[0].lines:
            fifo.popleft()
        while heap and self not in heap[0][2].lines:
            heappop(heap)
        if not heap:
            return fifo[0] if fifo else None
        return fifo[0] if fifo and _is_before(fifo[0], heap[0][2]) else heap[0][2]

    def remove(self, first: QueuedSender) -> None:
        if self._fifo and self._fifo[0] is first:
            self._fifo.popleft()
        else:
            heappop(self._heap)

    def pop(self) -> QueuedSender | None:
        """Take out the first of the senders that stand only here; None: there is none. O(log n)."""
        if self._heap:
            entry = self.first()
            if entry is None:
                return None
            self.remove(entry)
        else:
            fifo = self._fifo
            while True:
                if not fifo:
                    return None
                entry = fifo.popleft()
                if entry.lines is self.alone:
                    break
        entry.lines = ()
        self.live_count -= 1
        return entry

    def note_withdrawn(self) -> None:
        self.live_count -= 1
        if len(self._fifo) + len(self._heap) > 2 * self.live_count + 64:
            # A sender in several lines that was asked in one of them and declined has a second place in the others.
            standing = {entry for entry in self._fifo if self in entry.lines}
            standing.update(place[2] for place in self._heap if self in place[2].lines)
            self._heap = []
            self._fifo = deque(sorted(standing, key=_place_of))


def _place_of(entry: QueuedSender) -> tuple[float, int]:
    return entry.place, entry.number


def _is_before(entry: QueuedSender, other: QueuedSender) -> bool:
    return entry.place < other.place or (entry.place == other.place and entry.number < other.number)


@dataclass(slots=True, eq=False)
class Walk:
    """A walk over waiting senders: the one to ask next, the channels in question, and the senders that declined."""

    lines: tuple[SenderLine, ...]
    fresh: tuple[PeerChannels, ...] | None  # peers with channels not offered yet, by id; None: all that is open
    asked: list[QueuedSender] = field(default_factory=list)  # they have declined, and stand in no line


@dataclass(slots=True)
class SchedulerCounters:
    scheduled: int = 0  #: senders taken up
    offers: int = 0  #: calls of `WaitingSender.on_offer`
    declined: int = 0  #: offers of which nothing was used
    discarded: int = 0  #: senders told that the scheduler has stopped
    withdrawn_senders: int = 0
    requests: int = 0  #: sent
    notifications: int = 0  #: sent
    refused: int = 0  #: sends that came to nothing
    responses: int = 0  #: that ended their request
    timeouts: int = 0  #: requests told TIMEOUT
    disconnects: int = 0  #: requests told DISCONNECT
    shutdowns: int = 0  #: requests told SHUTDOWN
    withdrawn_requests: int = 0
    late: int = 0  #: responses to withdrawn requests
    without_id: int = 0  #: responses without request id
    unknown: int = 0  #: responses to no request of ours, or to one that has ended
    foreign: int = 0  #: responses of peers that were not asked
    wrong_type: int = 0  #: responses of a type that was not asked for
    ejections: int = 0


class SchedulerCore:
    """Decides which sender is offered which peer next; its owner holds the lock and makes the callbacks."""

    __slots__ = (
        *("_arrivals", "_budget", "_choice", "_ejected", "_ejection", "_fairness", "_freed", "_hands"),
        *("_last_id", "_later", "_learns", "_limits", "_notice_key", "_offer", "_peer_number", "_resuming", "_served"),
        *("_spare", "_stale_count", "_untold", "_walk", "_wanting", "bounded", "calls", "closed_count", "counters"),
        *("jobs", "open_count", "peers", "queue", "stopped", "suspended", "table", "waiting"),
    )

    def __init__(self, policy: SchedulerPolicy, rng: Random, hands: OfferActions) -> None:
        self._hands: Final = hands
        self._fairness: Final = policy.fairness
        places_stay = type(policy.fairness) is FirstComeFirstServed  # a subclass may learn something
        self._served: Final = None if places_stay else policy.fairness.served
        self._choice: Final = policy.choice
        self._limits: Final = policy.limits
        self._ejection: Final = policy.ejection
        choice_learns = type(policy.choice) is not ById
        self._learns: Final = choice_learns or policy.limits is not None or policy.ejection is not None
        self._last_id = rng.randint(FIRST_ID, LAST_ID)
        self._notice_key = 0
        self.calls: Final[Pending[int, Call]] = Pending()  # to be made at their time
        self._peer_number = 0
        self._stale_count = 0  # peers that have gone and may still be in the pool
        self._ejected: Final[Pending[int, PeerChannels]] = Pending()
        self.peers: Final[dict[PeerId, PeerChannels]] = {}
        self.open_count = 0  # of all peers
        self.closed_count = 0
        self.table: Final[Pending[int, SentMessage]] = Pending()
        self.waiting: Final[dict[int, QueuedSender]] = {}  # by id(sender): it needs no hash, and cannot be another's
        self.queue: Final = SenderLine()
        self._arrivals = SenderLine()
        self._spare = SenderLine()  # the arrivals of the next walk, once this one has them
        self.jobs: Final[deque[Job]] = deque()  # what has happened and was not acted on
        self._untold: Final[deque[SentMessage | QueuedSender | Call]] = deque()  # of the job that is being done
        self._freed: PeerChannels | None = None  # by that job: the queue is to be asked about it
        self._walk: Walk | None = None  # the one in progress
        self._budget = 0  # how many senders it may still ask
        #: Whether `expire` is called when it is time, so that long walks can be made in parts.
        self.bounded = False
        self.suspended: Walk | None = None  # one that has asked enough for now; its peers are reserved
        self._resuming = False  # it is to go on
        self._later: Final[dict[int, PeerChannels]] = {}  # by number: what has become free since, for the walk after it
        self._wanting: Final[dict[PeerId, SenderLine]] = {}  # senders that want certain peers only
        self._offer: Offer | None = None  # the one whose callback runs
        self.stopped = False
        self.counters: Final = SchedulerCounters()

    # --- peers ---------------------------------------------------------------------------------------------------

    def connect(self, peer: ConnectedPeer, peer_id: PeerId, channels: int, now: float) -> bool:
        previous = self.peers.get(peer_id)
        if previous is not None and previous.reference() is not None:
            return False
        self._check_order(peer_id)
        try:
            reference = ref(peer)
        except TypeError as error:
            raise LocalProtocolError(
                f"peer {peer_id!r} of {type(peer).__name__} cannot be held weakly",
                hint="a class with __slots__ names __weakref__ among them",
            ) from error
        if previous is not None:
            self.disconnect(peer_id, now)
        state = PeerChannels(peer_id, reference, self._peer_number, channels)
        self._peer_number += 1
        self.peers[peer_id] = state
        self.jobs.append(state)
        if self._limits is not None:
            state.channel_count = max(1, self._ask_policy(channels, self._limits.connected, state, now))
        if self._ejection is not None:
            self._ask_policy(None, self._ejection.connected, state, now)
        return True

    def _check_order(self, peer_id: PeerId) -> None:
        other = next(iter(self.peers), peer_id)
        try:
            peer_id < other  # noqa: B015  (whether it raises is all)
        except TypeError as error:
            raise LocalProtocolError(
                f"peer id {short(peer_id)} of {type(peer_id).__name__} cannot be ordered beside {short(other)}",
                hint="give all peers of a scheduler ids of one type",
            ) from error

    def _ask_policy(self, otherwise: _T, question: Callable[..., _T], *args: Any) -> _T:
        """Ask a policy; where it raises, that is reported, and it goes on with another answer."""
        try:
            return question(*args)
        except Exception as error:  # noqa: BLE001  (a policy's)
            self._report_fault(error)
            return otherwise

    def _report_fault(self, error: Exception) -> None:
        self.jobs.append(PolicyFault(error))

    def _pool_peer(self, peer: PeerChannels) -> None:
        peer.pooled = True
        try:
            self._choice.add(peer)
        except Exception as error:  # noqa: BLE001  (a policy's)
            peer.pooled = False
            self._report_fault(error)

    def _take_peer(self) -> PeerChannels | None:
        try:
            return self._choice.take()
        except Exception as error:  # noqa: BLE001  (a policy's)
            self._report_fault(error)
            return None

    def _open_channels(self, peer: PeerChannels) -> bool:
        """Count the channels of `peer` that are not closed as open. Returns whether there are any."""
        if peer.gone or peer.ejected:
            return False
        count = max(0, (1 if peer.probation else peer.channel_count) - len(peer.pending))
        self.open_count += count - peer.open_count
        peer.open_count = count
        if count and not peer.pooled and not peer.reserved:
            self._pool_peer(peer)
        return count > 0

    def _shut_channels(self, peer: PeerChannels) -> None:
        self.open_count -= peer.open_count
        peer.open_count = 0

    def retire(self, peer: PeerChannels) -> None:
        """Never offer `peer` again, whose object is gone; its requests wait for their end."""
        self._shut_channels(peer)
        if not peer.gone and peer.pooled:
            self._stale_count += 1
        peer.gone = True
        if self._stale_count > len(self.peers) + _MOST_STALE_PEERS:
            self._clear_pool()

    def _clear_pool(self) -> None:
        """Take disconnected peers out of the pool: peers may come and go for days while none is offered."""
        self._stale_count = 0
        kept = []
        while (peer := self._take_peer()) is not None:
            peer.pooled = peer.open_count > 0
            if peer.pooled:
                kept.append(peer)
        for peer in kept:
            self._pool_peer(peer)

    def disconnect(self, peer_id: PeerId, now: float) -> bool:
        peer = self.peers.pop(peer_id, None)
        if peer is None:
            return False
        self.retire(peer)
        claimed = [request for key in peer.pending if (request := self._claim(key)) is not None]
        self.closed_count -= len(peer.pending)
        peer.pending.clear()
        if self._learns:
            for request in claimed:
                self._learn(request, Outcome.DISCONNECTED, now)
        if self._ejection is not None:
            self._ask_policy(None, self._ejection.left, peer)
        self.counters.disconnects += self._fail(claimed, FailureCode.DISCONNECT)
        return True

    def _fail(self, claimed: list[SentMessage], code: FailureCode) -> int:
        failed = [request for request in claimed if request.receiver is not None]
        for request in failed:
            request.code = code
        if failed:
            self.jobs.append(failed)
        return len(failed)

    # --- senders -------------------------------------------------------------------------------------------------

    def enter(self, sender: WaitingSender, priority: int, peers: Collection[PeerId] | None) -> bool:
        if self.stopped:
            return False
        entry = self.waiting.get(id(sender))
        if entry is not None and (entry.offer is None or entry.successor is not None):
            return True
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise ConfigError(f"priority is {priority}; it must be from -{MAX_PRIORITY} to {MAX_PRIORITY}")
        if not (hasattr(sender, "on_offer") and hasattr(sender, "on_discard")) or isinstance(sender, type):
            kind = f"the class {sender.__name__}" if isinstance(sender, type) else f"a {type(sender).__name__}"
            raise ConfigError(f"{kind} is no sender", hint="give an object with the methods on_offer and on_discard")
        number = self.counters.scheduled
        place = self._fairness.place(sender, priority, number)
        arrival = QueuedSender(sender, number, place, None if peers is None else frozenset(peers))
        self.counters.scheduled += 1
        if entry is not None:
            entry.successor = arrival  # it enters if what it is being offered ends its present stay
        else:
            self._arrive(arrival)
        return True

    def withdraw_sender(self, sender: WaitingSender) -> bool:
        """Take `sender` out; it is not called any more. False: it does not wait."""
        entry = self.waiting.get(id(sender))
        if entry is None:
            return False
        if entry.offer is not None and entry.offer.sent_count > 0:  # it leaves anyway
            if entry.successor is None:
                return False
            entry.successor = None
        else:
            self._leave(entry)
        self.counters.withdrawn_senders += 1
        return True

    def _leave(self, entry: QueuedSender) -> None:
        entry.done = True
        del self.waiting[id(entry.sender)]
        if entry.lines:
            self._unstand(entry)

    def _arrive(self, entry: QueuedSender) -> None:
        self.waiting[id(entry.sender)] = entry
        entry.lines = self._arrivals.alone
        self._arrivals.push(entry)

    # --- steps ---------------------------------------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """End the offer that was made last, and return the callback that is to be made now; None: there is none."""
        if self._offer is not None:
            self._settle(self._offer)
        untold = self._untold
        while True:
            if untold:
                return untold.popleft()
            walk = self._walk
            if walk is not None:
                offer = self._next_offer(walk)
                if offer is not None:
                    return offer
                self._end_walk(walk)
            elif self._freed is not None:
                self._begin_walk(self._freed)
            elif self._arrivals.live_count:
                if self.open_count > 0:
                    self._walk = Walk(self._arrivals.alone, None)
                    self._arrivals, self._spare = self._spare, self._arrivals
                else:
                    self._let_stand(self._arrivals)
            elif self.jobs:
                self._begin(self.jobs.popleft())
            elif self._resuming and self.suspended is not None:
                self._resume(self.suspended)
            else:
                return None

    def _begin_walk(self, freed: PeerChannels) -> None:
        """Have the queue asked about a peer that has become free, or asked further, and about it in the next walk."""
        self._freed = None
        self._budget = ASKED_PER_JOB
        if self.suspended is not None:
            freed.reserved = True
            self._later[freed.number] = freed
            self._resume(self.suspended)
        else:
            self._ask_about((freed,))

    def _ask_about(self, fresh: tuple[PeerChannels, ...]) -> None:
        lines = self._lines_about(fresh) if self._wanting else self.queue.alone
        if fresh and (len(lines) > 1 or self.queue.live_count):
            self._walk = Walk(lines, fresh)

    def _lines_about(self, fresh: tuple[PeerChannels, ...]) -> tuple[SenderLine, ...]:
        wanting = self._wanting
        if not wanting:
            return self.queue.alone
        return (self.queue, *(wanting[peer.peer_id] for peer in fresh if peer.peer_id in wanting))

    def _resume(self, walk: Walk) -> None:
        self._budget = ASKED_PER_JOB
        self._resuming = False
        self.suspended = None
        self._walk = walk
        walk.lines = self._lines_about(walk.fresh or ())  # others may have come meanwhile

    def _begin(self, job: Job) -> None:
        if isinstance(job, SentMessage):
            freed = self._release(job, job.outcome, job.ended_at)
            if self.queue.live_count or self._wanting or self.suspended is not None:
                self._freed = freed
            if job.receiver is not None:
                self._untold.append(job)
        elif isinstance(job, PeerChannels):
            self._freed = job if self._open_channels(job) else None
        elif isinstance(job, list):
            self._untold.extend(job)
        else:
            self._untold.append(job)

    def _next_offer(self, walk: Walk) -> Offer | None:
        while self.open_count > 0:
            fresh = walk.fresh
            if fresh is not None:
                if not self._is_open(fresh[0]) and not any(map(self._is_open, fresh)):
                    return None
                if self._budget <= 0 and self.bounded:
                    self.suspended = walk
                    return None
                self._budget -= 1
            if len(walk.lines) == 1:
                entry, behind_count = walk.lines[0].pop(), walk.lines[0].live_count
            else:
                entry, behind_count = self._next_of(walk)
            if entry is None:
                return None
            if entry.peers is not None:
                fresh = self._wanted_by(entry, fresh)
                if not fresh:
                    walk.asked.append(entry)
                    continue
            open_count = self.open_count
            try:
                size = self._fairness.size(open_count, behind_count)
                if not 0 < size <= open_count:
                    size = min(max(1, size), open_count)
            except Exception as error:  # noqa: BLE001  (a policy's)
                size = 1
                self._report_fault(error)
            offer = Offer(self._hands, entry, fresh, size)
            if fresh is None and self.pull(offer) is None:  # all that were open have died, or are shown to others first
                walk.asked.append(entry)
                return None
            entry.offer = self._offer = offer
            self.counters.offers += 1
            return offer
        return None

    def _is_open(self, peer: PeerChannels) -> bool:
        if peer.open_count > 0 and peer.reference() is None:
            self.retire(peer)
        return peer.open_count > 0

    def _next_of(self, walk: Walk) -> tuple[QueuedSender | None, int]:
        lines = walk.lines
        where = lines[0]
        found, behind_count = None, -1
        for line in lines:
            behind_count += line.live_count
            entry = line.first()
            if entry is not None and (found is None or _is_before(entry, found)):
                found, where = entry, line
        if found is not None:
            where.remove(found)
            self._unstand(found)
        return found, behind_count

    def _wanted_by(self, entry: QueuedSender, fresh: tuple[PeerChannels, ...] | None) -> tuple[PeerChannels, ...]:
        peer_ids = entry.peers or ()
        if fresh is not None:
            return tuple(peer for peer in fresh if peer.peer_id in peer_ids and self._is_open(peer))
        peers = (self.peers.get(peer_id) for peer_id in peer_ids)
        open_peers = [peer for peer in peers if peer is not None and not peer.reserved and self._is_open(peer)]
        open_peers.sort(key=lambda peer: peer.peer_id)
        return tuple(open_peers)

    def _stand(self, entry: QueuedSender) -> None:
        if entry.peers is None:
            entry.lines = self.queue.alone
            self.queue.push(entry)
            return
        lines = []
        for peer_id in entry.peers:
            line = self._wanting.get(peer_id)
            if line is None:
                line = self._wanting[peer_id] = SenderLine()
            lines.append(line)
        entry.lines = tuple(lines)
        for line in lines:
            line.push(entry)

    def _unstand(self, entry: QueuedSender) -> None:
        lines, entry.lines = entry.lines, ()
        for line in lines:
            line.note_withdrawn()
        if entry.peers is not None:
            for peer_id in entry.peers:
                if peer_id in self._wanting and not self._wanting[peer_id].live_count:
                    del self._wanting[peer_id]

    def _settle(self, offer: Offer) -> None:
        self._offer = None
        offer.active = False
        for peer in offer.pulled:
            if peer.open_count > 0 and not peer.reserved:
                self._pool_peer(peer)
            else:
                peer.pooled = False
        entry = offer.entry
        entry.offer = None
        if not offer.sent_count:
            self.counters.declined += 1
            if not self.stopped and not entry.done:
                entry.successor = None
                if self._walk is not None:
                    self._walk.asked.append(entry)
                return
        if entry.done:
            return
        if self._served is not None and offer.sent_count:
            self._ask_policy(None, self._served, entry.sender, entry.place, offer.sent_count)
        self._leave(entry)
        successor = entry.successor
        if not self.stopped:
            if successor is not None:
                self._arrive(successor)
        elif successor is not None or not offer.sent_count:
            self.counters.discarded += 1
            self.jobs.append([entry])  # behind the requests that fail

    def _end_walk(self, walk: Walk) -> None:
        """Let all that still wait stand where they did; or leave it so, if the walk goes on later."""
        self._walk = None
        if walk is self.suspended:
            for peer in walk.fresh or ():
                peer.reserved = True
            return
        if walk.asked:
            for entry in reversed(walk.asked):
                if not entry.done:
                    self._stand(entry)
        if walk.fresh is None:
            if walk.lines[0].live_count:
                self._let_stand(walk.lines[0])
            return
        for peer in walk.fresh:
            if peer.reserved:
                peer.reserved = False
                self._open_channels(peer)
        if self._later:
            self._ask_about_later()

    def _let_stand(self, arrivals: SenderLine) -> None:
        while (entry := arrivals.pop()) is not None:
            self._stand(entry)

    def _ask_about_later(self) -> None:
        """Have the queue asked about peers that became free during a walk that was made in parts."""
        while self._later and self._walk is None:
            next_ones = list(islice(self._later.values(), PEERS_PER_WALK))
            for peer in next_ones:
                del self._later[peer.number]
                peer.reserved = False
                self._open_channels(peer)
            next_ones.sort(key=lambda peer: peer.peer_id)
            self._ask_about(tuple(peer for peer in next_ones if peer.open_count > 0))
        for peer in self._later.values():
            peer.reserved = True

    def pull(self, offer: Offer) -> PeerChannels | None:
        while offer.active:
            peer = self._take_peer()
            if peer is None:
                break
            if peer.open_count > 0 and not peer.reserved:
                if peer.reference() is not None:
                    offer.pulled.append(peer)
                    return peer
                self.retire(peer)
            peer.pooled = False
        return None

    def choose(self, offer: Offer, peer_id: PeerId) -> PeerChannels | None:
        peer = self.peers.get(peer_id)
        if peer is None or peer.open_count <= 0 or offer.size <= 0 or not offer.active:
            return None
        if peer.reserved and peer not in (offer.fresh or ()):
            return None  # it is shown to those that wait, in their order
        return peer

    # --- messages ------------------------------------------------------------------------------------------------

    def close(
        self,
        offer: Offer,
        channel: Channel,
        receiver: ResponseReceiver | None,
        response_type: ResponseType,
        now: float,
        deadline: float,
    ) -> SentMessage | None:
        peer = channel.state
        if (
            offer.size <= 0
            or not offer.active
            or channel.used
            or channel.offer is not offer
            or peer.open_count <= 0
            or self.stopped
        ):
            self.counters.refused += 1
            return None
        channel.used = True
        peer.open_count -= 1
        self.open_count -= 1
        offer.size -= 1
        offer.sent_count += 1
        return self._put(peer, receiver, response_type, now, deadline)

    def _put(
        self,
        peer: PeerChannels,
        receiver: ResponseReceiver | None,
        response_type: ResponseType,
        now: float,
        deadline: float,
    ) -> SentMessage:
        if receiver is None:
            self._notice_key -= 1
            key = self._notice_key
        else:
            key = self._last_id
            while True:
                key = key + 1 if key < LAST_ID else FIRST_ID
                if key not in self.table:
                    break
            self._last_id = key
            self.counters.requests += 1
        request = SentMessage(key, peer, receiver, response_type, now)
        self.table.add(key, request, deadline)
        peer.pending[key] = None
        self.closed_count += 1
        return request

    def use_held(
        self,
        held: SentMessage,
        receiver: ResponseReceiver | None,
        response_type: ResponseType,
        now: float,
        deadline: float,
    ) -> SentMessage | None:
        """Use the channel that `held` keeps closed for a message. None: it is not kept any more."""
        if self._claim(held.key) is None:
            self.counters.refused += 1
            return None
        del held.peer.pending[held.key]
        self.closed_count -= 1
        return self._put(held.peer, receiver, response_type, now, deadline)

    def free(self, held: SentMessage, outcome: Outcome, now: float) -> None:
        if self._claim(held.key) is not None:
            if outcome is Outcome.REJECTED:
                self.counters.requests -= held.key > 0
                self.counters.refused += 1
            held.receiver = None
            held.outcome = outcome
            held.ended_at = now
            self.jobs.append(held)

    def reopen(self, offer: Offer, channel: Channel, request: SentMessage, now: float) -> bool:
        """Open the channel again: the peer did not take the message. False: it has ended meanwhile."""
        if self._claim(request.key) is None:
            return False
        self.counters.requests -= request.key > 0
        self.counters.refused += 1
        channel.used = False
        offer.size += 1
        offer.sent_count -= 1
        self._release(request, Outcome.REJECTED, now)
        return True

    def claim_answered(
        self, peer: ConnectedPeer, request_id: object, response: Any, outcome: Outcome, now: float
    ) -> SentMessage | ResponseFault:
        """Claim the request that `response` of `peer` ends, and enter its end, as `outcome` for the policies."""
        counters = self.counters
        if type(request_id) is not int:
            counters.without_id += 1
            return ResponseFault.WITHOUT_ID
        request = self.table.get(request_id) if request_id >= FIRST_ID else None
        if request is None:
            counters.unknown += 1
            return ResponseFault.UNKNOWN
        if request.peer.reference() is not peer:
            counters.foreign += 1
            return ResponseFault.FOREIGN
        if request.response_type is not None and not isinstance(response, request.response_type):
            counters.wrong_type += 1
            return ResponseFault.WRONG_TYPE
        self.table.take(request_id)
        if request.receiver is None:
            counters.late += 1
        else:
            counters.responses += 1
        request.response = response
        request.outcome = outcome
        request.ended_at = now
        self.jobs.append(request)
        return request

    def expire(self, now: float) -> None:
        for _, request in self.table.take_due(now):
            self.counters.timeouts += request.receiver is not None
            request.code = FailureCode.TIMEOUT
            request.outcome = Outcome.TIMEOUT
            request.ended_at = now
            self.jobs.append(request)
        for _, peer in self._ejected.take_due(now):
            if not peer.gone:
                peer.ejected, peer.probation = False, True
                self.jobs.append(peer)
                if self._ejection is not None:
                    self._ask_policy(None, self._ejection.returned, peer, now)
        self.jobs.extend(callback for _, callback in self.calls.take_due(now))
        self._resuming = self.suspended is not None

    def next_deadline(self) -> float | None:
        """Return when `expire` next has something to do, 0.0: at once; None: never."""
        if self.suspended is not None:
            return 0.0
        deadlines = (self.table.next_deadline(), self._ejected.next_deadline(), self.calls.next_deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def add_call(self, key: int, callback: Call, when: float) -> None:
        if not self.stopped:
            self.calls.add(key, callback, when)

    def has_other(self, tried: Collection[PeerId]) -> bool:
        return any(
            peer_id not in tried and not peer.ejected and peer.reference() is not None
            for peer_id, peer in self.peers.items()
        )

    def _release(self, request: SentMessage, outcome: Outcome, now: float) -> PeerChannels | None:
        peer = request.peer
        if request.key not in peer.pending:
            return None  # its peer was disconnected since
        del peer.pending[request.key]
        self.closed_count -= 1
        if self._learns and not peer.gone and (request.key > 0 or outcome is Outcome.REJECTED):
            self._learn(request, outcome, now)
        return peer if self._open_channels(peer) else None

    @property
    def learns(self) -> bool:
        return self._learns

    def _learn(self, request: SentMessage, outcome: Outcome, now: float) -> None:
        peer = request.peer
        latency_s = now - request.sent_at
        if outcome is Outcome.RESPONSE:
            peer.probation = False
        try:
            self._choice.ended(peer, outcome, latency_s, now)
            if self._limits is not None:
                peer.channel_count = max(1, self._limits.ended(peer, outcome, latency_s, now))
        except Exception as error:  # noqa: BLE001  (a policy's)
            self._report_fault(error)
        if self._ejection is not None:
            seconds = self._ask_policy(0.0, self._ejection.ended, peer, outcome, latency_s, now)
            if seconds > 0 and not peer.gone and not peer.ejected:
                self.counters.ejections += 1
                self._shut_channels(peer)
                peer.ejected = True
                self._ejected.add(peer.number, peer, now + seconds)

    def _claim(self, key: int) -> SentMessage | None:
        return self.table.take(key) if key in self.table else None

    def withdraw_request(self, request_id: int) -> bool:
        """Make no callback when `request_id` ends; its channel stays closed until then. False: it does not wait."""
        request = self.table.get(request_id) if request_id >= FIRST_ID else None
        if request is None or request.receiver is None:
            return False
        request.receiver = None
        self.counters.withdrawn_requests += 1
        return True

    # --- end -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Accept nothing any more, and enter the end of everything: of the requests, then of the senders."""
        self.stopped = True
        self.counters.shutdowns += self._fail([request for _, request in self.table.take_all()], FailureCode.SHUTDOWN)
        self._ejected.take_all()
        self.calls.take_all()
        self.suspended = None
        self._later.clear()
        waiting = [entry for entry in self.waiting.values() if entry.offer is None]
        waiting.sort(key=lambda entry: (entry.place, entry.number))
        for entry in waiting:
            self._leave(entry)
        self.counters.discarded += len(waiting)
        if waiting:
            self.jobs.append(waiting)
        for peer in self.peers.values():
            self.retire(peer)
            peer.pending.clear()
        self.closed_count = 0
        self.peers.clear()
