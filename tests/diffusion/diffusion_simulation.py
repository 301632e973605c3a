"""A node that fetches objects from simulated peers, in virtual time, with the pure part of object diffusion alone.

Each peer has a FIFO of its own and checks what it is asked as the outbound side does. What each request costs and when
replies come is decided by the peer's kind. The node carries out decisions as an inbound loop does: objects first, then
ids; a request that blocks waits until all replies have come; a decision is completed some time after it was read.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random

from diffusion_kit import check_index

from flowctl.nodes.diffusion.decision import DecisionContext
from flowctl.nodes.diffusion.state import DecisionGlobalState

MIN_INTERVAL_S = 0.005
REPLY_LIMIT_S = 10.0
RETRY_IDS_S = 0.1


@dataclass
class Remote:
    """A peer: what it offers and how it behaves.

    Args:
        offers: ids and objects, in the order in which it announces them.
        stalls: it never replies to a request for objects.
        leaves_at: when it goes away, in seconds. None: never.
        busy_s: how long the node takes to carry out a decision for it.
    """

    name: str
    offers: dict[bytes, bytes]
    latency_s: float = 0.01
    lies: bool = False
    stalls: bool = False
    leaves_at: float | None = None
    busy_s: float = 0.0
    more: dict[bytes, bytes] = field(default_factory=dict)
    fifo: list[bytes] = field(default_factory=list)
    sent: int = 0

    @property
    def is_honest(self) -> bool:
        return not (self.lies or self.stalls) and self.leaves_at is None


class Simulation:
    """The node.

    Attributes:
        requests: how often each object was asked for.
        freed: how often a copy of it was given up: it was overdue, or its peer went with it.
        delivered: how many objects each peer has sent.
    """

    def __init__(self, remotes, policy, planner, seed):
        self.remotes = {remote.name: remote for remote in remotes}
        self.policy = policy
        self.planner = planner
        self.state = DecisionGlobalState(policy)
        self.rng = Random(seed)
        self.pool = {}
        self.now = 0.0
        self.requests, self.freed, self.received = Counter(), Counter(), Counter()
        self.delivered = Counter()
        self._overdue = set()
        self._events = []
        self._numbers = itertools.count()
        self._busy = {}
        self._replies = {}
        self._waiting = set()
        self._blocked = {}
        self._retry_at = Counter()
        self._round_at = None
        self._rested_at = 0.0
        for remote in remotes:
            self.state.register(remote.name)
            self._replies[remote.name] = deque()
            if remote.leaves_at is not None:
                self._at(remote.leaves_at, self._leave, remote.name)
            if remote.more:
                self._at(1.0, self._offer_more, remote)
        self._poke(0.0)

    def run(self, until_s):
        while self._events and self._events[0][0] <= until_s:
            when, _, event, arguments = heapq.heappop(self._events)
            self._note_overdue(when)
            self.now = when
            event(*arguments)
            self._check()

    def end(self):
        for name in list(self.state.peers):
            self._leave(name)

    def _at(self, when, event, *arguments):
        heapq.heappush(self._events, (when, next(self._numbers), event, arguments))

    def _poke(self, when):
        when = max(when, self._rested_at)
        if self._round_at is None or when < self._round_at:
            self._round_at = when
            self._at(when, self._round, when)

    def _note_overdue(self, now):
        if self.policy.inflight_timeout_s:
            for name, item in self.state.peers.items():
                for key in item.overdue(now - self.policy.inflight_timeout_s):
                    if (name, key) not in self._overdue:
                        self._overdue.add((name, key))
                        self.freed[key] += 1

    def _check(self):
        policy, count, size_bytes = self.policy, 0, 0
        for name, item in self.state.peers.items():
            late = item.overdue(self.now - policy.inflight_timeout_s) if policy.inflight_timeout_s else []
            count += len(item.inflight) - len(late)
            size_bytes += item.inflight_bytes - sum(item.inflight[key].size_bytes for key in late)
            assert len(item.inflight) <= policy.max_num_objects_inflight_per_peer
            assert item.inflight_bytes + item.owt_bytes <= policy.max_bytes_inflight_per_peer
            assert len(item.fifo) + item.ids_in_flight <= policy.max_num_objects_outstanding
            assert len(self.remotes[name].fifo) <= policy.max_num_objects_outstanding
        assert count <= policy.max_num_objects_inflight_total
        assert size_bytes <= policy.max_bytes_inflight_total
        assert all(asked <= policy.target_object_redundancy + self.freed[key] for key, asked in self.requests.items())

    def _round(self, when):
        if when != self._round_at:
            return
        self._round_at = None
        self._rested_at = self.now + MIN_INTERVAL_S
        context = DecisionContext(
            state=self.state,
            has_object=self.pool.__contains__,
            busy=dict(self._busy),
            now=self.now,
            seed=self.rng.getrandbits(32),
        )
        for name, decision in self.planner.decide(context).items():
            if not decision.is_empty:
                self._busy[name] = decision
                self._at(self.now + self.remotes[name].busy_s * self.rng.random(), self._act, name, decision)
        due = self.planner.next_round_at(context)
        if due is not None:
            self._poke(due)

    def _act(self, name, decision):
        if self._busy.get(name) is not decision:
            return
        remote = self.remotes[name]
        if decision.objects_to_req_ids:
            wanted = sorted(decision.objects_to_req_ids)
            self.state.on_request_objects(name, wanted, now=self.now)
            self.requests.update(wanted)
            assert set(wanted) <= set(remote.fifo), "asked for what is not on offer"
            self._expect(name, self._objects, wanted, stalls=remote.stalls)
        self._ask_ids(name, decision)

    def _ask_ids(self, name, decision):
        remote, item = self.remotes[name], self.state.peers[name]
        blocking = len(item.fifo) == decision.ids_to_ack
        useless = not decision.ids_to_ack and self.now < self._retry_at[name]
        if decision.ids_to_req and not useless and name not in self._blocked:
            if blocking and self._replies[name]:
                self._waiting.add(name)  # stays busy until all replies have come
                return
            self.state.on_request_ids(name, decision.ids_to_ack, decision.ids_to_req)
            assert decision.ids_to_ack <= len(remote.fifo)
            del remote.fifo[: decision.ids_to_ack]
            assert len(remote.fifo) + decision.ids_to_req <= self.policy.max_num_objects_outstanding
            assert blocking == (not remote.fifo)
            if blocking and remote.sent == len(remote.offers):
                self._blocked[name] = decision.ids_to_req
            else:
                self._tell_ids(remote, decision.ids_to_req)
        elif useless:
            self._poke(self._retry_at[name])
        del self._busy[name]
        if name not in self._blocked:
            self._poke(self.now)

    def _tell_ids(self, remote, requested):
        new = list(remote.offers)[remote.sent : remote.sent + requested]
        remote.sent += len(new)
        remote.fifo += new
        self._expect(remote.name, self._ids, requested, new)

    def _offer_more(self, remote):
        remote.offers |= remote.more
        if remote.name in self._blocked:
            self._tell_ids(remote, self._blocked.pop(remote.name))

    def _expect(self, name, event, *arguments, stalls=False):
        """Enter a reply: replies come in the order of their requests, and one that stalls holds up the others."""
        replies = self._replies[name]
        replies.append((event, arguments, stalls))
        if len(replies) == 1:
            self._start(name)

    def _start(self, name):
        _, _, stalls = self._replies[name][0]
        if stalls:
            self._at(self.now + REPLY_LIMIT_S, self._leave, name)
        else:
            self._at(self.now + self.remotes[name].latency_s, self._next, name)

    def _next(self, name):
        if name not in self.state.peers:
            return
        event, arguments, _ = self._replies[name].popleft()
        event(name, *arguments)
        if name not in self.state.peers:
            return
        if self._replies[name]:
            self._start(name)
        elif name in self._waiting:
            self._waiting.remove(name)
            self._ask_ids(name, self._busy[name])
        self._poke(self.now)

    def _ids(self, name, requested, new):
        offers = self.remotes[name].offers
        self.state.on_receive_ids(name, requested, [(key, len(offers[key])) for key in new], now=self.now)
        if len(new) < requested:
            self._retry_at[name] = self.now + RETRY_IDS_S

    def _objects(self, name, wanted):
        came = [(key, self.remotes[name].offers[key]) for key in wanted]
        self.state.on_receive_objects(name, wanted, came, now=self.now)
        self.received.update(wanted)
        self.delivered[name] += len(wanted)
        self._at(self.now + 0.001, self._to_pool, name, came)

    def _to_pool(self, name, came):
        if name not in self.state.peers:
            return
        if self.remotes[name].lies:
            self._leave(name)
            return
        self.pool.update(came)
        self.state.on_pool_done(name, [key for key, _ in came])
        self._poke(self.now)

    def _leave(self, name):
        item = self.state.peers.get(name)
        if item is None:
            return
        for key in [*item.inflight, *item.owt]:
            if (name, key) not in self._overdue:
                self.freed[key] += 1
        self.state.unregister(name)
        self._busy.pop(name, None)
        self._waiting.discard(name)
        check_index(self.state)
        self._poke(self.now)
