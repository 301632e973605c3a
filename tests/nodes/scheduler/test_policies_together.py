"""All policies at once in one scheduler, under any history: channels add up, shares and bounds hold, all ends once."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler_kit import FakePeer, Response, World

from flowctl.core.outcomes.backoff import Backoff
from flowctl.nodes.scheduler.policies.adaptive import AdaptiveChannels, AdaptiveSettings
from flowctl.nodes.scheduler.policies.budget import RetryBudget
from flowctl.nodes.scheduler.policies.choice import TwoChoices
from flowctl.nodes.scheduler.policies.ejection import EjectionSettings, OutlierEjection
from flowctl.nodes.scheduler.policies.fairness import WeightedFair
from flowctl.nodes.scheduler.policy import SchedulerPolicy
from flowctl.nodes.scheduler.requests.hedging import Hedging
from flowctl.nodes.scheduler.requests.requester import Requester

IDS = st.integers(0, 7)
SHARE = 0.5
CEILING = 5


class Together(RuleBasedStateMachine):
    """Peers come, go, answer well, badly and not at all; senders and hedged requesters come and are withdrawn."""

    def __init__(self):
        super().__init__()
        self.ejection = OutlierEjection(
            Random(2),
            EjectionSettings(consecutive=2, away=Backoff(first_s=2.0, jitter=0.5, most_s=9.0), most_share=SHARE),
        )
        policy = SchedulerPolicy(
            fairness=WeightedFair(lambda sender: type(sender).__name__, {"Requester": 2.0}),
            choice=TwoChoices(Random(1)),
            limits=AdaptiveChannels(AdaptiveSettings(ceiling=CEILING)),
            ejection=self.ejection,
            useful=lambda response: response.value != "error",
        )
        self.world = World(policy)
        self.hedging = Hedging(0.5, at_once=1, most=3, budget=RetryBudget(0.5, 0.1, 5.0))
        for _ in range(30):
            self.hedging.latencies.observe(0.5)
        self.there = {}
        self.sent = []  # peer and request id
        self.futures = []
        self.ends = Counter()

    @rule(peer_id=IDS, channels=st.integers(1, 4))
    def connect(self, peer_id, channels):
        if peer_id not in self.there:
            peer = self.there[peer_id] = FakePeer(peer_id)
            peer.send = lambda request_id, message: self.sent.append((peer, request_id))
            self.world.scheduler.connect(peer, channels)

    @rule(peer_id=IDS)
    def disconnect(self, peer_id):
        if self.there.pop(peer_id, None) is not None:
            self.world.scheduler.disconnect(peer_id)

    @rule(number=st.integers(0, 99), value=st.sampled_from(["good", "good", "error"]))
    @precondition(lambda self: self.sent)
    def answer(self, number, value):
        peer, request_id = self.sent[number % len(self.sent)]
        self.world.scheduler.receive(peer, Response(request_id, value))

    @rule(seconds=st.floats(0.01, 6.0))
    def wait(self, seconds):
        self.world.advance(seconds)

    @rule(want=st.integers(1, 5), priority=st.integers(-2, 2))
    def schedule(self, want, priority):
        self.world.schedule("plain", want, priority)

    @rule()
    def ask(self):
        future = Requester(
            self.world.scheduler,
            "question",
            lambda response: response.value if response.value == "good" else None,
            timeout_s=8.0,
            hedging=self.hedging,
        ).start()
        self.futures.append(future)
        future.add_done_callback(lambda done: self.ends.update([id(done)]))

    @rule(number=st.integers(0, 99))
    @precondition(lambda self: self.futures)
    def cancel(self, number):
        self.futures[number % len(self.futures)].cancel()

    @invariant()
    def channels_add_up(self):
        peers = self.world.scheduler.peers()
        for peer in peers:
            count = 1 if peer.probation else peer.channel_count
            assert 1 <= peer.channel_count <= CEILING
            assert peer.open_count == (0 if peer.ejected else max(0, count - peer.closed_count))
        figures = self.world.scheduler.statistics()
        assert figures.open_channels == sum(peer.open_count for peer in peers)
        assert figures.closed_channels == sum(peer.closed_count for peer in peers)

    @invariant()
    def ejection_counts(self):
        peers = self.world.scheduler.peers()
        assert self.ejection.peers_count == len(peers)
        assert self.ejection.ejected_count == sum(peer.ejected for peer in peers)

    @invariant()
    def nothing_open_is_withheld(self):
        """A plain sender, which takes whatever it is offered, never waits while a channel is open."""
        figures = self.world.scheduler.statistics()
        waiting = [entry.sender for entry in self.world.scheduler._core.waiting.values()]
        assert not figures.open_channels or all(isinstance(sender, Requester) for sender in waiting)

    @invariant()
    def no_errors(self):
        assert self.world.errors == []

    def teardown(self):
        self.world.scheduler.stop()
        assert all(future.done() for future in self.futures)
        assert self.ends == Counter({id(future): 1 for future in self.futures})
        assert self.hedging.further_count <= self.hedging.budget.taken_count


TestTogether = Together.TestCase
TestTogether.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
