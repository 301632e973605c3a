"""A scheduler with a manual clock, and peers, senders and receivers that write down what happens to them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from flowctl.nodes.scheduler.offer import FailureCode
from flowctl.nodes.scheduler.policy import SchedulerPolicy
from flowctl.nodes.scheduler.scheduler import MessageScheduler
from flowctl.testing import ManualClock

TIMEOUT_S = 5.0


@dataclass
class Response:
    request_id: int
    value: str = ""


class FakePeer:
    """Keeps what it is sent; `takes` is what its send returns, or an exception that it raises."""

    def __init__(self, peer_id, takes=None):
        self.peer_id = peer_id
        self.takes = takes
        self.sent = []  # (request id, message)

    def send(self, request_id, message):
        self.sent.append((request_id, message))
        if isinstance(self.takes, BaseException):
            raise self.takes
        return self.takes


class World:
    """One scheduler and all that happens, in `events`, as tuples."""

    def __init__(self, policy: SchedulerPolicy | None = None, **options):
        self.clock = ManualClock()
        self.errors = []
        self.scheduler = MessageScheduler(
            self.clock, Random(1), policy, on_error=lambda where, error: self.errors.append((where, error)), **options
        )
        self.peers = {}
        self.events = []
        self.requests = []  # request ids in order of sending
        self.asked = {}  # request id: peer id

    def connect(self, peer_id, channels=1, **options):
        peer = self.peers[peer_id] = FakePeer(peer_id, **options)
        self.scheduler.connect(peer, channels)
        return peer

    def schedule(self, name, want=1, priority=0, **options):
        sender = FakeSender(self, name, want, **options)
        assert self.scheduler.schedule(sender, priority)
        return sender

    def answer(self, request_id, peer_id=None, value=""):
        peer = self.peers[self.asked[request_id] if peer_id is None else peer_id]
        return self.scheduler.receive(peer, Response(request_id, value))

    def advance(self, seconds):
        self.clock.advance(seconds)
        self.scheduler.expire()

    def open_and_closed(self):
        figures = self.scheduler.statistics()
        return figures.open_channels, figures.closed_channels

    def take_events(self):
        events, self.events = self.events, []
        return events


class FakeSender:
    """Sends on up to `want` fresh channels of peers that it `accepts`; `then` is called at the end of each offer."""

    def __init__(self, world, name, want=1, accepts=None, then=None, receiver=None, full=False, discarded=None):
        self.world = world
        self.name = name
        self.want = want
        self.accepts = accepts
        self.then = then
        self.receiver = receiver or FakeReceiver(world, name)
        self.full = full
        self.discarded = discarded

    def on_offer(self, offer):
        size, sent = offer.size, []
        for channel in offer.full() if self.full else offer:
            if len(sent) == self.want:
                break
            if self.accepts is None or channel.peer_id in self.accepts:
                request_id = offer.send(channel, self.name, self.receiver, TIMEOUT_S)
                if request_id is not None:
                    self.world.requests.append(request_id)
                    self.world.asked[request_id] = channel.peer_id
                    sent.append(channel.peer_id)
        self.world.events.append((self.name, size, sent))
        if self.then is not None:
            self.then(offer)

    def on_discard(self):
        self.world.events.append((self.name, "discard"))
        if self.discarded is not None:
            self.discarded()


class FakeReceiver:
    """Writes down each outcome; `then` is called with the request id and the code, None for a success."""

    def __init__(self, world, name, then=None):
        self.world = world
        self.name = name
        self.then = then

    def on_success(self, request_id, response):
        self.world.events.append((self.name, request_id, "success"))
        if self.then is not None:
            self.then(request_id, None)

    def on_failure(self, request_id, code):
        assert isinstance(code, FailureCode)
        self.world.events.append((self.name, request_id, code.value))
        if self.then is not None:
            self.then(request_id, code)


class CallingSender:
    """A sender whose `on_offer` is the function that it is made with."""

    def __init__(self, on_offer, on_discard=lambda: None):
        self.on_offer = on_offer
        self.on_discard = on_discard


class StillLoop:
    """What a scheduler asks of a loop: nothing is ever called, the test calls `expire` itself."""

    def __init__(self):
        self.posted = 0

    def is_closed(self):
        return False

    def call_soon_threadsafe(self, callback, *args):
        self.posted += 1


class Script:
    """Plays scenarios: a line has steps, with ``|`` between them, and behind ``->`` all that happens by them.

    An offer is shown as ``name/size:peers sent to``, the end of a request as ``name#request outcome``; ``no`` is what a
    call returns that has no effect. What stands in brackets is done at the end of an offer, or of a request.
    """

    def __init__(self, world):
        self.world = world
        self.senders = {}

    def check(self, script):
        for line in filter(None, map(str.strip, script.splitlines())):
            steps, _, expected = line.partition("->")
            for step in steps.split("|"):
                self.do(step)
            shown = ", ".join(map(self.shown, self.world.take_events()))
            assert shown == expected.strip(), line

    def do(self, step):
        hooks = dict(re.findall(r"(\w+)\[([^\]]*)\]", step))
        verb, *words = re.sub(r"\w+\[[^\]]*\]", "", step).split()
        made = getattr(self, verb)(*words, **{name: lambda *_, act=act: self.do(act) for name, act in hooks.items()})
        if made is False:
            self.world.events.append("no")

    def shown(self, event):
        match event:
            case (name, int(size), [*peers]):
                return f"{name}/{size}:{' '.join(map(str, peers)) or '-'}"
            case (name, request_id, str(code)):
                return f"{name}#{self.world.requests.index(request_id) + 1} {code}"
            case (name, "discard"):
                return f"{name} discard"
        return str(event)

    def connect(self, *peers):
        for peer in peers:
            peer_id, _, channels = peer.partition("*")
            self.world.connect(int(peer_id), int(channels or 1))

    def die(self, peer_id):
        del self.world.peers[int(peer_id)]

    def disconnect(self, peer_id):
        return self.world.scheduler.disconnect(int(peer_id))

    def schedule(self, name, want="1", accepts=None, offered=None, ended=None, discarded=None):
        sender = self.senders.get(name)
        if sender is None:
            accepted = None if accepts is None else {int(peer) for peer in accepts.split(",") if peer.isdigit()}
            receiver = FakeReceiver(self.world, name, ended)
            sender = FakeSender(self.world, name, int(want), accepted, offered, receiver, discarded=discarded)
            self.senders[name] = sender
        return self.world.scheduler.schedule(sender)

    def both(self, *names):
        for name in names:
            self.schedule(name, "9")

    def answer(self, number, peer_id=None):
        return self.world.answer(self.world.requests[int(number) - 1], None if peer_id is None else int(peer_id))

    def impostor(self, number):
        request_id = self.world.requests[int(number) - 1]
        return self.world.scheduler.receive(FakePeer(self.world.asked[request_id]), Response(request_id))

    def keep(self, peer_id):
        self.kept = self.world.peers[int(peer_id)]

    def late(self, number):
        return self.world.scheduler.receive(self.kept, Response(self.world.requests[int(number) - 1]))

    def again_and_stop(self, name):
        self.schedule(name)
        self.stop()

    def withdraw(self, what):
        requests = self.world.requests
        return self.world.scheduler.withdraw(requests[int(what) - 1] if what.isdigit() else self.senders[what])

    def advance(self, seconds):
        self.world.advance(float(seconds))

    def sleep(self, seconds):
        self.world.clock.advance(float(seconds))

    def stop(self):
        self.world.scheduler.stop()

    def figures(self, *names):
        figures = self.world.scheduler.statistics()
        self.world.events += [f"{getattr(figures, name)} {name}" for name in names]
