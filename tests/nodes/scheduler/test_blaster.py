"""Many messages over one offer: round robin from a shuffled order, with a blacklist of the caller's."""

from __future__ import annotations

from random import Random

import pytest
from chance_kit import seeds
from scheduler_kit import FakeReceiver, World

from flowctl.nodes.scheduler.requests.blaster import Blaster, BlastResult


class Blasting:
    """A sender that calls `work` with a blaster."""

    def __init__(self, world, work, seed=1):
        self.world, self.work, self.seed = world, work, seed

    def on_offer(self, offer):
        self.work(Blaster(offer, self.world.scheduler.has_other, Random(self.seed)), offer)

    def on_discard(self):
        pass


def blast(world, work, seed=1):
    world.scheduler.schedule(Blasting(world, work, seed))


def send(world, blaster, blacklist):
    return blaster.send(blacklist, "message", FakeReceiver(world, "r"), 5.0)


def test_blaster_when_each_peer_had_the_message_fails():
    """A peer that was sent to is on the blacklist, then the other, then nobody is left (MS-39)."""
    world, blacklist, results = World(), set(), []
    world.connect(1)
    world.connect(2)

    def work(blaster, offer):
        results.extend((send(world, blaster, blacklist), len(blacklist)) for _ in range(3))

    blast(world, work)
    assert results == [(BlastResult.SENT, 1), (BlastResult.SENT, 2), (BlastResult.FAILED, 2)]
    assert [len(world.peers[peer_id].sent) for peer_id in (1, 2)] == [1, 1]


@pytest.mark.parametrize("seed", seeds(4))
def test_blaster_when_peers_have_several_channels_alternates(seed):
    """Four messages go to two peers in turn, two each (MS-41)."""
    world = World()
    world.connect(1, 2)
    world.connect(2, 2)

    def work(blaster, offer):
        assert [send(world, blaster, set()) for _ in range(4)] == [BlastResult.SENT] * 4
        assert send(world, blaster, set()) is BlastResult.RETRY, "the size is used up, and peers are there"

    blast(world, work, seed)
    ids = {peer_id: [request_id for request_id, _ in peer.sent] for peer_id, peer in world.peers.items()}
    order = [peer_id for _, peer_id in sorted((number, peer_id) for peer_id in ids for number in ids[peer_id])]
    assert order in ([1, 2, 1, 2], [2, 1, 2, 1])


def test_blaster_when_the_offer_is_for_one_message_sends_one():
    world = World()
    results, blacklist = [], set()

    def both(blaster, _):
        results.extend(send(world, blaster, blacklist) for _ in range(2))

    world.connect(1)
    world.schedule("busy")
    blast(world, both)
    world.schedule("behind", accepts=())
    world.connect(2)
    assert results == [BlastResult.SENT, BlastResult.RETRY]
    assert blacklist == {2}


def test_blaster_when_the_peer_that_is_left_is_no_more_fails():
    world = World()
    results = []

    def both(blaster, _):
        del world.peers[2]
        results.append(send(world, blaster, {1}))

    world.connect(1)
    world.connect(2)
    blast(world, both)
    assert results == [BlastResult.FAILED]


def test_blaster_when_begun_with_other_dice_begins_with_other_peers():
    firsts = set()
    for seed in range(20):
        world = World()
        for peer_id in (1, 2, 3):
            world.connect(peer_id)
        blacklist = set()
        blast(world, lambda blaster, offer, world=world, first=blacklist: send(world, blaster, first), seed)
        firsts |= blacklist
    assert firsts == {1, 2, 3}


def test_blaster_when_the_peer_that_is_left_is_busy_says_retry():
    world, blacklist, results = World(), {1}, []
    world.connect(1)
    world.connect(2)
    world.schedule("other", accepts={2})
    blast(world, lambda blaster, offer: results.append(send(world, blaster, blacklist)))
    assert results == [BlastResult.RETRY]
    world.answer(world.requests[0])
    assert results == [BlastResult.RETRY, BlastResult.SENT]
    assert blacklist == {1, 2}


def test_blaster_when_a_peer_does_not_take_the_message_goes_on_to_the_next():
    world, blacklist = World(), set()
    world.connect(1, takes=False)
    world.connect(2)
    blast(world, lambda blaster, offer: send(world, blaster, blacklist))
    assert blacklist == {2}
