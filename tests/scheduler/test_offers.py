"""Who is offered what: the order of the queue, the size of offers, fresh channels and all of them."""

from __future__ import annotations

from scheduler_kit import World


def test_queue_when_a_peer_connects_is_offered_one_channel_each():
    """Waiting senders get one channel each, in order, until the new peer has none left (MS-01)."""
    world = World()
    for name in "abc":
        world.schedule(name)
    world.connect(1, 2)
    assert world.take_events() == [("a", 1, [1]), ("b", 1, [1])]
    figures = world.scheduler.statistics()
    assert (figures.waiting_senders, figures.open_channels, figures.closed_channels) == (1, 0, 2)
    world.answer(world.requests[0])
    assert [event[0] for event in world.take_events()] == ["a", "c"]


def test_schedule_when_all_is_open_offers_all_at_once():
    """The only sender is called within `schedule`, with all open channels, peer by peer (MS-02)."""
    world = World()
    world.connect(1, 2)
    world.connect(2, 2)
    world.schedule("a", want=9)
    assert world.take_events() == [("a", 4, [1, 1, 2, 2])]
    assert world.scheduler.statistics().waiting_senders == 0


def test_offer_when_the_sender_is_the_last_has_all_open_channels():
    """Those before the last one get one channel, the last one what is left (MS-03)."""
    world = World()
    world.schedule("a", want=9)
    world.schedule("b", want=9)
    world.connect(1, 3)
    assert world.take_events() == [("a", 1, [1]), ("b", 2, [1, 1])]
    assert world.open_and_closed() == (0, 3)


def test_sender_when_it_declines_keeps_its_place():
    """Who waits for one peer is asked first about each, and gets it when it comes (MS-04)."""
    world = World()
    world.schedule("a", accepts={7})
    world.schedule("b")
    world.connect(1)
    assert world.take_events() == [("a", 1, []), ("b", 1, [1])]
    world.schedule("c")
    assert world.take_events() == []
    world.connect(7)
    assert world.take_events() == [("a", 1, [7])]


def test_channels_when_offered_come_in_the_order_of_ids():
    """The order in which peers connected does not matter (MS-06)."""
    world = World()
    for peer_id in (5, 3, 4):
        world.connect(peer_id)
    world.schedule("a", want=3)
    assert world.take_events() == [("a", 3, [3, 4, 5])]
