"""Any history of a scheduler agrees with a simple model, written from the rules; and threads change nothing.

The model has lists and plain loops: each walk goes through a sorted queue, each sum is counted anew. It predicts every
callback, its order, the size of each offer and the channels that are taken.
"""

from __future__ import annotations

import math
import threading
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler_kit import TIMEOUT_S, FakePeer, FakeReceiver, FakeSender, Response, StillLoop, World

from flowctl.core.outcomes.pending import QUANTUM_S
from flowctl.nodes.scheduler import core
from flowctl.nodes.scheduler.policy import FirstComeFirstServed, SchedulerPolicy
from flowctl.nodes.scheduler.scheduler import MessageScheduler

PLACES = 3
PEERS = st.integers(0, 4)
WANTS = st.fixed_dictionaries(
    {
        "want": st.integers(0, 4),
        "accepts": st.none() | st.sets(PEERS),
        "full": st.booleans(),
        "again": st.booleans(),
        "notify": st.booleans(),
        "only": st.none() | st.sets(PEERS, max_size=2),
    }
)


class Model:
    """The rules, without any cleverness."""

    def __init__(self):
        self.now = 1000.0
        self.counts = {}  # peer id: channels
        self.sent = {}  # number of a message: (peer id, sender's name, wants, deadline, told, notice)
        self.queue = []  # (place, number, name, wants)
        self.arrivals = []
        self.scheduled = 0
        self.messages = 0
        self.events = []

    def open_of(self, peer_id):
        closed = sum(entry[0] == peer_id for entry in self.sent.values())
        return max(0, self.counts.get(peer_id, 0) - closed)

    def open(self):
        return sum(self.open_of(peer_id) for peer_id in self.counts)

    def schedule(self, name, wants, priority):
        self.arrivals.append((self.scheduled - PLACES * priority, self.scheduled, name, wants))
        self.scheduled += 1

    def offer(self, waiting, fresh, size):
        _, _, name, wants = waiting
        took = []
        only = self.counts.keys() if wants["only"] is None else self.counts.keys() & wants["only"]
        whose = sorted(self.counts) if wants["full"] else sorted(only) if fresh is None else [fresh]
        for peer_id in whose:
            for _ in range(self.open_of(peer_id)):
                if len(took) < min(size, wants["want"]) and (wants["accepts"] is None or peer_id in wants["accepts"]):
                    self.sent[self.messages] = (peer_id, name, wants, self.now + TIMEOUT_S, True, wants["notify"])
                    self.messages += 1
                    took.append(peer_id)
        self.events.append((name, size, took))
        return bool(took)

    def walk(self, line, fresh):
        left = []
        line = sorted(line, key=lambda waiting: waiting[:2])
        for index, waiting in enumerate(line):
            if (self.open() if fresh is None else self.open_of(fresh)) == 0:
                return left + line[index:]
            only = waiting[3]["only"]
            if only is not None and not any(self.open_of(peer) for peer in only if fresh in {None, peer}):
                left.append(waiting)
                continue
            behind = [other[3]["only"] for other in line[index + 1 :]]
            last = not [other for other in behind if fresh is None or other is None or fresh in other]
            if not self.offer(waiting, fresh, self.open() if last else 1):
                left.append(waiting)
        return left

    def freed(self, fresh):
        if fresh is not None and self.open_of(fresh):
            self.queue = self.walk(self.queue, fresh)
        self.settle()

    def settle(self):
        while self.arrivals:
            line, self.arrivals = self.arrivals, []
            self.queue += self.walk(line, None)

    def told(self, name, number, end, wants):
        self.events.append((name, number, end))
        if wants["again"]:
            self.schedule(f"{name}+{number}", {**wants, "again": False}, 0)

    def end(self, number, end):
        peer_id, name, wants, _, told, notice = self.sent.pop(number)
        if told and not notice:
            self.told(name, number, end, wants)
        self.freed(peer_id)

    def expire(self):
        due = [(math.ceil(entry[3] / QUANTUM_S), number) for number, entry in self.sent.items()]
        for bucket, number in sorted(due):
            if bucket * QUANTUM_S <= self.now:
                self.end(number, "timeout")

    def disconnect(self, peer_id):
        del self.counts[peer_id]
        for number, entry in list(self.sent.items()):
            if entry[0] == peer_id:
                del self.sent[number]
                if entry[4] and not entry[5]:
                    self.told(entry[1], number, "disconnect", entry[2])
        self.settle()


class ModelledSender(FakeSender):
    """A sender by `wants`; its messages are numbered as the model numbers them."""

    def __init__(self, machine, name, wants):
        self.machine = machine
        self.wants = wants
        super().__init__(machine.world, name, full=wants["full"])

    def on_offer(self, offer):
        took, size = [], offer.size
        for channel in offer.full() if self.full else offer:
            if len(took) == self.wants["want"]:
                break
            if self.wants["accepts"] is None or channel.peer_id in self.wants["accepts"]:
                if self.wants["notify"]:
                    assert offer.notify(channel, self.name, TIMEOUT_S)
                    key = None
                else:
                    key = offer.send(channel, self.name, self, TIMEOUT_S)
                    assert key is not None
                self.machine.keys.append(key)
                took.append(channel.peer_id)
        self.world.events.append((self.name, size, took))

    def on_success(self, request_id, response):
        self.told(request_id, "success")

    def on_failure(self, request_id, code):
        self.told(request_id, code.value)

    def told(self, request_id, end):
        number = self.machine.keys.index(request_id)
        self.world.events.append((self.name, number, end))
        if self.wants["again"]:
            name = f"{self.name}+{number}"
            again = self.machine.senders[name] = ModelledSender(self.machine, name, {**self.wants, "again": False})
            self.world.scheduler.schedule(again, peers=self.wants["only"])


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = World(SchedulerPolicy(fairness=FirstComeFirstServed(PLACES)))
        self.model = Model()
        self.keys = []  # request ids by number; None for notifications
        self.senders = {}

    @rule(peer_id=PEERS, channels=st.integers(0, 3))
    def connect(self, peer_id, channels):
        if peer_id in self.model.counts:
            assert not self.world.scheduler.connect(FakePeer(peer_id), 5)
            return
        self.world.connect(peer_id, channels)
        if channels:
            self.model.counts[peer_id] = channels
            self.model.freed(peer_id)

    @rule(peer_id=PEERS)
    def disconnect(self, peer_id):
        known = peer_id in self.model.counts
        assert self.world.scheduler.disconnect(peer_id) is known
        if known:
            self.model.disconnect(peer_id)

    @rule(wants=WANTS, priority=st.integers(-2, 2))
    def schedule(self, wants, priority):
        name = f"s{self.model.scheduled}"
        self.senders[name] = sender = ModelledSender(self, name, wants)
        assert self.world.scheduler.schedule(sender, priority, peers=wants["only"])
        self.model.schedule(name, wants, priority)
        self.model.settle()

    @precondition(lambda self: self.model.sent)
    @rule(data=st.data())
    def answer(self, data):
        number = data.draw(st.sampled_from(sorted(self.model.sent)))
        peer_id, _, _, _, told, notice = self.model.sent[number]
        if notice:
            return
        wrong = (peer_id + 1) % 5
        if wrong in self.world.peers:
            assert not self.world.scheduler.receive(self.world.peers[wrong], Response(self.keys[number]))
        assert self.world.scheduler.receive(self.world.peers[peer_id], Response(self.keys[number])) is told
        self.model.end(number, "success")

    @rule(seconds=st.sampled_from([0.0, 0.01, 1.0, 2.0, TIMEOUT_S]))
    def advance(self, seconds):
        self.model.now += seconds
        self.world.advance(seconds)
        self.model.expire()

    @precondition(lambda self: self.model.queue)
    @rule(data=st.data())
    def withdraw_sender(self, data):
        waiting = data.draw(st.sampled_from(self.model.queue))
        self.model.queue.remove(waiting)
        assert self.world.scheduler.withdraw(self.senders[waiting[2]])
        assert not self.world.scheduler.withdraw(self.senders[waiting[2]])

    @precondition(lambda self: self.model.sent)
    @rule(data=st.data())
    def withdraw_request(self, data):
        number = data.draw(st.sampled_from(sorted(self.model.sent)))
        peer_id, name, wants, deadline, told, notice = self.model.sent[number]
        if not notice:
            assert self.world.scheduler.withdraw(self.keys[number]) is told
            self.model.sent[number] = (peer_id, name, wants, deadline, False, notice)

    @invariant()
    def agrees(self):
        assert self.world.errors == []
        assert self.world.events == self.model.events
        assert all(size >= 1 for _, size, took in self.model.events if isinstance(took, list))
        figures = self.world.scheduler.statistics()
        peers = {peer.peer_id: peer for peer in self.world.scheduler.peers()}
        assert peers.keys() == self.model.counts.keys()
        for peer_id, count in self.model.counts.items():
            peer = peers[peer_id]
            assert peer.open_count == self.model.open_of(peer_id)
            assert peer.open_count + peer.closed_count == count
        assert figures.open_channels == sum(peer.open_count for peer in peers.values())
        assert figures.closed_channels == len(self.model.sent) == figures.outstanding
        assert figures.waiting_senders == len(self.model.queue)

    def teardown(self):
        told = [entry for entry in self.model.sent.values() if entry[4] and not entry[5]]
        waiting = [entry[2] for entry in sorted(self.model.queue, key=lambda entry: entry[:2])]
        before = len(self.world.events)
        self.world.scheduler.stop()
        rest = self.world.events[before:]
        assert [event[0] for event in rest] == [entry[1] for entry in told] + waiting
        ends = [event[:2] for event in self.world.events if isinstance(event[-1], str)]
        assert len(ends) == len(set(ends))
        figures = self.world.scheduler.statistics()
        assert (figures.outstanding, figures.waiting_senders, figures.closed_channels) == (0, 0, 0)
        ended = figures.responses + figures.timeouts + figures.disconnects + figures.shutdowns
        assert figures.requests == ended + figures.withdrawn_requests
        assert self.world.errors == []


SchedulerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    st.lists(st.integers(-3, 3), min_size=1, max_size=5),
)
@settings(deadline=None)
def test_senders_when_others_keep_coming_are_all_served_within_a_bound(waiting, coming):
    world = World(SchedulerPolicy(fairness=FirstComeFirstServed(PLACES)))
    world.connect(1)
    world.schedule("busy")
    for number, priority in enumerate(waiting):
        world.schedule(number, priority=priority)
    most = len(waiting) + PLACES * (max(coming) - min(waiting)) + 1
    for turn in range(max(len(waiting), most)):
        world.schedule(f"late {turn}", priority=coming[turn % len(coming)])
        world.answer(world.requests[-1])
    served = [event[0] for event in world.events if event[1] == 1]
    assert set(range(len(waiting))) <= set(served)


class Crowd:
    """Threads that do anything to one scheduler, and count how everything ends."""

    def __init__(self, threads, rounds):
        self.scheduler = MessageScheduler()
        self.peers = [CrowdPeer(self, number) for number in range(8)]
        self.lock = threading.Lock()
        self.ends = {}  # request id: how often it ended
        self.inside = 0  # callbacks that run
        self.faults = []
        self.sent = 0
        self.discarded = 0
        self.scheduled = 0
        self.withdrawn = 0
        self.rounds = rounds
        self.threads = [threading.Thread(target=self.work, args=(number,)) for number in range(threads)]

    def work(self, seed):
        rng = Random(seed)
        for _ in range(self.rounds):
            self.act(rng)

    def act(self, rng):
        action = rng.randrange(10)
        peer = rng.choice(self.peers)
        if action < 4:
            sender = CrowdSender(self, rng.random())
            taken = self.scheduler.schedule(sender, rng.randrange(3))
            withdrawn = rng.random() < 0.2 and self.scheduler.withdraw(sender)
            with self.lock:
                self.scheduled += taken
                self.withdrawn += withdrawn
        elif action < 8:
            with self.lock:
                request_id = peer.asked.pop() if peer.asked else None
            if request_id is not None:
                self.scheduler.receive(peer, Response(request_id))
        elif action == 8:
            self.scheduler.connect(peer, rng.randrange(1, 4))
        elif rng.random() < 0.3:
            self.scheduler.disconnect(peer.peer_id)
        else:
            self.scheduler.expire()

    def entered(self, change):
        with self.lock:
            self.inside += change
            if self.inside > 1:
                self.faults.append("two callbacks at a time")

    def ended(self, request_id):
        self.entered(1)
        with self.lock:
            self.ends[request_id] = self.ends.get(request_id, 0) + 1
        self.entered(-1)


class CrowdPeer(FakePeer):
    def __init__(self, crowd, peer_id):
        super().__init__(peer_id)
        self.crowd = crowd
        self.asked = []

    def send(self, request_id, message):
        with self.crowd.lock:
            self.asked.append(request_id)
            self.crowd.sent += 1


class CrowdSender:
    def __init__(self, crowd, chance):
        self.crowd = crowd
        self.want = 1 + int(chance * 3)
        self.accepts = chance < 0.7  # at once; others at the second offer

    def on_offer(self, offer):
        self.crowd.entered(1)
        wants, self.accepts = self.accepts, True
        for channel in offer:
            if self.want and wants and offer.send(channel, "m", self, 30.0) is not None:
                self.want -= 1
        self.crowd.entered(-1)

    def on_discard(self):
        self.crowd.entered(1)
        with self.crowd.lock:
            self.crowd.discarded += 1
        self.crowd.entered(-1)

    def on_success(self, request_id, response):
        self.crowd.ended(request_id)

    def on_failure(self, request_id, code):
        self.crowd.ended(request_id)


@pytest.mark.parametrize("in_parts", [False, True])
def test_scheduler_when_many_threads_use_it_ends_everything_once(in_parts, monkeypatch):
    crowd = Crowd(threads=6, rounds=400)
    if in_parts:  # each walk goes on with the next call
        monkeypatch.setattr(core, "ASKED_PER_JOB", 1)
        crowd.scheduler.run_on(StillLoop())
    for thread in crowd.threads:
        thread.start()
    for thread in crowd.threads:
        thread.join(20.0)
        assert not thread.is_alive()
    roomy = [CrowdPeer(crowd, 100), CrowdPeer(crowd, 101)]
    for peer in roomy:  # who is left has declined once at most
        crowd.scheduler.connect(peer, 10_000)
        while crowd.scheduler.next_deadline() == 0.0:
            crowd.scheduler.expire()
    figures = crowd.scheduler.statistics()
    assert figures.waiting_senders == 0
    peers = crowd.scheduler.peers()
    assert figures.open_channels == sum(peer.open_count for peer in peers)
    assert figures.closed_channels == sum(peer.closed_count for peer in peers) == figures.outstanding
    assert all(peer.open_count + peer.closed_count == peer.channel_count for peer in peers)
    crowd.scheduler.stop()
    figures = crowd.scheduler.statistics()
    assert crowd.faults == []
    assert figures.errors == 0
    assert len(crowd.ends) == crowd.sent == figures.requests
    assert set(crowd.ends.values()) == {1}
    assert crowd.discarded == figures.discarded
    assert crowd.withdrawn == figures.withdrawn_senders
    assert figures.scheduled == crowd.scheduled


def test_receiver_when_used_by_another_scheduler_too_is_told_by_each():
    """Schedulers share nothing: the same peer objects and receivers may serve several."""
    worlds = [World(), World()]
    receiver = FakeReceiver(worlds[0], "shared")
    for world in worlds:
        world.connect(1)
        world.schedule("a", receiver=receiver)
        world.answer(world.requests[0])
    assert [event[0] for event in worlds[0].events] == ["a", "shared", "shared"]
