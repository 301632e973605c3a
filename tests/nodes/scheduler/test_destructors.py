"""Destructors that call the scheduler: they run wherever an object's last reference goes, also under its lock."""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from random import Random

import pytest
from scheduler_kit import TIMEOUT_S, FakePeer, FakeReceiver, World

from flowctl.nodes.scheduler.scheduler import MessageScheduler
from flowctl.testing import ManualClock

LIMIT_S = 20.0


def finishes(call):
    """Return what `call` returns; fail where it hangs, which no other test can then notice."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it hangs"
    return found[0]


@contextmanager
def eager_collection(threshold):
    """Let the garbage collector run at every turn, over what was made since: all of the process takes for ever."""
    former = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(threshold, 10, 10)
    try:
        yield
        gc.collect()
    finally:
        gc.set_threshold(*former)
        gc.unfreeze()


class LastWords:
    """Makes a call when it goes."""

    def __init__(self, call):
        self.call = call

    def __del__(self):
        self.call()


CALLS = {
    "connect": lambda world: world.scheduler.connect(world.peers[9]),
    "disconnect": lambda world: world.scheduler.disconnect(1),
    "schedule": lambda world: world.schedule("late"),
    "withdraw a sender": lambda world: world.scheduler.withdraw(world.waiting),
    "withdraw a request": lambda world: world.scheduler.withdraw(world.requests[0]),
    "receive": lambda world: world.answer(world.requests[0]),
    "call later": lambda world: world.scheduler.call_later(1.0, lambda: world.events.append("called")),
    "expire": lambda world: world.scheduler.expire(1e6),
    "next deadline": lambda world: world.scheduler.next_deadline(),
    "statistics": lambda world: world.scheduler.statistics(),
    "stop": lambda world: world.scheduler.stop(),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_of_a_destructor_under_the_lock_has_the_effect_that_it_has_elsewhere(name):
    def history(within):
        world = World()
        world.peers[9] = FakePeer(9)
        world.connect(1)
        world.schedule("a")
        world.waiting = world.schedule("b", accepts={9})

        def call():
            CALLS[name](world)

        if within:
            doomed = FakeReceiver(world, "doomed")
            doomed.last_words = LastWords(call)
            world.connect(2)
            world.schedule("c", receiver=doomed)
            request_id = world.requests[-1]
            del doomed
            world.scheduler.withdraw(request_id)  # forgets the receiver, under the lock
            world.answer(request_id)
        else:
            world.connect(2)
            world.schedule("c")
            request_id = world.requests[-1]
            world.scheduler.withdraw(request_id)
            call()
            world.answer(request_id)
        world.advance(TIMEOUT_S * 2)
        return sorted(map(str, world.events)), world.open_and_closed()

    assert finishes(lambda: history(within=True)) == history(within=False)


def test_peer_whose_destructor_disconnects_it_goes_while_the_lock_is_held():
    class Going(FakePeer):
        def __init__(self, scheduler, peer_id):
            super().__init__(peer_id)
            self.scheduler = scheduler
            self.itself = self

        def __del__(self):
            self.scheduler.disconnect(self.peer_id)

    def run():
        world = World()
        for threshold in range(1, 20):  # so that it comes up at other lines
            with eager_collection(threshold):
                for number in range(20):
                    world.scheduler.connect(Going(world.scheduler, number))
                    world.schedule(f"s{number}")
        return world.scheduler.statistics().peers, world.open_and_closed()

    assert finishes(run) == (0, (0, 0))


def test_call_that_was_put_off_is_made_before_the_call_that_put_it_off_returns():
    def run():
        scheduler = MessageScheduler(ManualClock(), Random(1))
        world = World()
        peer = FakePeer(1)
        scheduler.connect(peer)
        receiver = FakeReceiver(world, "r")
        receiver.last_words = LastWords(lambda: scheduler.disconnect(1))
        taken = []

        class Asks:
            def on_offer(self, offer):
                taken.append(offer.send(next(iter(offer)), "m", self.receiver, TIMEOUT_S))
                del self.receiver

            def on_discard(self):
                pass

        sender = Asks()
        sender.receiver = receiver
        del receiver
        scheduler.schedule(sender)
        before = scheduler.statistics().peers
        scheduler.withdraw(taken[0])
        return before, len(scheduler.peers())

    assert finishes(run) == (1, 0)
