"""A queue of many that decline: what one channel costs is bounded, and nobody is passed over for it."""

from __future__ import annotations

import pytest
from scheduler_kit import CallingSender, FakePeer, StillLoop, World

from flowctl.nodes.scheduler.core import ASKED_PER_JOB


def crowded(decliners):
    """Return a world whose time is driven, in which so many senders decline everything, and the list of their calls."""
    world = World()
    asked = []
    loop = StillLoop()
    world.scheduler.run_on(loop)
    for number in range(decliners):
        world.scheduler.schedule(CallingSender(lambda _, number=number: asked.append(number)))
    return world, asked, loop


def test_queue_when_long_is_asked_in_parts():
    world, asked, loop = crowded(3 * ASKED_PER_JOB)
    world.schedule("last", accepts={7})
    world.connect(7)
    assert (len(asked), world.take_events(), loop.posted) == (ASKED_PER_JOB, [], 1)
    assert world.scheduler.next_deadline() == 0.0
    world.scheduler.expire()
    world.scheduler.expire()
    assert world.take_events() == []
    world.scheduler.expire()
    assert world.take_events() == [("last", 1, [7])]
    assert asked == list(range(3 * ASKED_PER_JOB))
    assert world.scheduler.next_deadline() > 0.0


def test_queue_when_asked_in_parts_goes_before_newcomers():
    world, _, _ = crowded(ASKED_PER_JOB + 5)
    world.schedule("waiting", accepts={7})
    world.connect(7)
    world.schedule("new", accepts={7})
    wanted = []
    world.scheduler.schedule(CallingSender(lambda offer: wanted.append(offer.channel(7))), peers={7})
    world.connect(8)
    assert [event for event in world.take_events() if event[0] == "waiting"] == [("waiting", 1, [7])]
    world.answer(world.requests[0])
    while world.scheduler.next_deadline() == 0.0:
        world.scheduler.expire()
    assert [event for event in world.take_events() if event[0] == "new"][-1] == ("new", 1, [7])
    assert world.open_and_closed() == (1, 1)


def test_queue_when_peers_become_free_meanwhile_is_asked_about_all_of_them():
    world, asked, _ = crowded(2 * ASKED_PER_JOB)
    seen = []

    def look(offer):
        seen.append(sorted(channel.peer_id for channel in offer.full()))
        if seen[-1] == [1, 2, 3]:
            offer.withdraw()

    world.scheduler.schedule(CallingSender(look))
    for peer_id in (3, 1, 2):
        world.connect(peer_id)
    while world.scheduler.next_deadline() == 0.0:
        world.scheduler.expire()
    assert seen[-1] == [1, 2, 3]
    figures = world.scheduler.statistics()
    assert (figures.waiting_senders, figures.open_channels) == (2 * ASKED_PER_JOB, 3)
    assert len(asked) == 4 * ASKED_PER_JOB
    world.schedule("any")
    assert world.take_events() == [("any", 3, [1])]


@pytest.mark.parametrize("end", ["disconnect", "stop"])
def test_queue_when_asked_in_parts_may_end_meanwhile(end):
    world, asked, _ = crowded(ASKED_PER_JOB + 1)
    world.connect(1)
    if end == "disconnect":
        world.scheduler.disconnect(1)
    else:
        world.scheduler.stop()
        assert world.scheduler.statistics().discarded == ASKED_PER_JOB + 1
    world.scheduler.expire()
    assert len(asked) == ASKED_PER_JOB
    assert world.scheduler.next_deadline() is None
    world.connect(2)
    while world.scheduler.next_deadline() == 0.0:
        world.scheduler.expire()
    assert len(asked) == (2 * ASKED_PER_JOB + 1 if end == "disconnect" else ASKED_PER_JOB)


def test_queue_when_all_that_became_free_during_a_long_walk_have_gone_is_asked_about_nobody():
    world, asked, _ = crowded(3 * ASKED_PER_JOB)
    world.connect(1)
    world.connect(2)
    world.scheduler.disconnect(2)
    while world.scheduler.next_deadline() == 0.0:
        world.scheduler.expire()
    assert len(asked) == 3 * ASKED_PER_JOB
    world.schedule("any")
    assert world.take_events() == [("any", 1, [1])]
    assert world.open_and_closed() == (0, 1)


def test_senders_when_they_want_certain_peers_are_asked_about_those_only():
    world = World()
    calls = []
    for number in range(100):
        world.scheduler.schedule(CallingSender(lambda _: calls.append("asked")), peers={1000 + number})
    wants = []
    world.schedule("before", accepts={5})
    world.scheduler.schedule(
        CallingSender(lambda offer: wants.append([channel.peer_id for channel in offer])), peers=[5, 6]
    )
    world.connect(4)
    assert (calls, wants) == ([], [])
    world.connect(6)
    assert wants == [[6]]
    world.connect(5, 2)
    assert world.take_events()[-1] == ("before", 1, [5])
    assert wants == [[6], [5]]
    assert calls == []
    world.connect(1007)
    assert calls == ["asked"]
    world.scheduler.stop()
    assert world.scheduler.statistics().discarded == 101


def test_sender_when_it_wants_certain_peers_is_shown_those_that_are_open():
    world = World()
    for peer_id in (3, 1, 2):
        world.connect(peer_id)
    seen = []
    world.scheduler.schedule(CallingSender(lambda offer: seen.extend(c.peer_id for c in offer)), peers={3, 2, 9})
    assert seen == [2, 3]
    sender = CallingSender(lambda _: seen.append("never"))
    assert world.scheduler.schedule(sender, peers=[9])
    assert world.scheduler.withdraw(sender)
    world.scheduler.connect(keep := FakePeer(9))
    assert keep.sent == []
    assert seen == [2, 3, 9]
    assert world.scheduler._core._wanting.keys() == {2, 3, 9}
