"""Who is offered what: the order of the queue, the size of offers, fresh channels and all of them."""

from __future__ import annotations

import pytest
from scheduler_kit import TIMEOUT_S, CallingSender, FakePeer, FakeReceiver, FakeSender, World

from flowctl.errors import ConfigError
from flowctl.nodes.scheduler.policy import MAX_PRIORITY, PLACES_PER_PRIORITY
from flowctl.nodes.scheduler.scheduler import MessageScheduler


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


def test_greedy_senders_when_they_schedule_again_are_served_in_turn():
    """Three that always want more get one channel after the other, in the same order (MS-08)."""
    world = World()
    for name in "abc":
        sender = FakeSender(world, name, want=9)
        sender.then = lambda offer, sender=sender: world.scheduler.schedule(sender)
        world.scheduler.schedule(sender)
    world.connect(1)
    for turn in range(5):
        world.answer(world.requests[turn])
    assert [event[0] for event in world.events if event[1] == 1] == list("abcabc")


def test_greedy_senders_when_they_schedule_again_after_an_answer_are_served_in_turn():
    """Scheduling from `on_success` puts a sender behind those that wait (MS-08)."""
    world = World()
    for name in "abc":
        sender = FakeSender(world, name, want=9)
        sender.receiver.then = lambda _, __, sender=sender: world.scheduler.schedule(sender)
        world.scheduler.schedule(sender)
    world.connect(1)
    for turn in range(5):
        world.answer(world.requests[turn])
    assert [event[0] for event in world.events if event[1] == 1] == list("abcabc")


def test_sender_when_it_wants_more_than_its_share_continues_behind_those_that_wait():
    world = World()
    sender = world.schedule("a", want=9)
    sender.then = lambda _: world.scheduler.schedule(sender)
    world.schedule("b")
    world.connect(1, 4)
    assert world.take_events() == [("a", 1, [1]), ("b", 3, [1]), ("a", 2, [1, 1])]
    assert world.scheduler.statistics().waiting_senders == 1


@pytest.mark.parametrize("where", ["success", "timeout", "offer"])
def test_peer_when_connected_from_within_a_callback_is_fresh_for_those_that_wait(where):
    world = World()
    world.connect(1)
    receiver = FakeReceiver(world, "a", then=lambda *_: world.connect(2))
    world.schedule("a", receiver=None if where == "offer" else receiver)
    world.schedule("declines", accepts={2})
    world.take_events()
    if where == "offer":
        world.schedule("b", then=lambda _: world.connect(2))
    if where == "timeout":
        world.advance(TIMEOUT_S + 1)
    else:
        world.answer(world.requests[0])
    offers = [event for event in world.take_events() if event[0] in ("b", "declines")]
    between = [("b", 1, [1])] if where == "offer" else []
    assert offers == [("declines", 1, []), *between, ("declines", 1 if where == "offer" else 2, [2])]


def test_send_when_the_peer_object_is_gone_closes_nothing():
    """A peer that died while it was offered takes no message, and the sender keeps its place (MS-21)."""
    world = World()
    world.connect(1)
    results = []

    def dies_meanwhile(offer):
        (channel,) = offer
        del world.peers[1]
        results.append(offer.send(channel, "m", FakeReceiver(world, "a"), TIMEOUT_S))

    world.scheduler.schedule(CallingSender(dies_meanwhile))
    figures = world.scheduler.statistics()
    assert results == [None]
    assert (figures.waiting_senders, figures.closed_channels, figures.requests) == (1, 0, 0)
    assert world.scheduler.disconnect(1)


def test_offer_when_all_peers_have_died_is_not_made():
    """Dead peers are passed over, and where there are no others the sender waits (MS-22)."""
    world = World()
    for peer_id in (1, 2):
        world.connect(peer_id)
    del world.peers[1]
    world.schedule("a")
    assert world.take_events() == [("a", 2, [2])]
    world.answer(world.requests[0])
    world.take_events()
    del world.peers[2]
    world.schedule("b")
    assert world.take_events() == []
    assert world.scheduler.statistics().waiting_senders == 1
    world.connect(3)
    assert world.take_events() == [("b", 1, [3])]


def test_offer_when_its_peers_die_before_it_is_read_yields_nothing():
    """A sender that finds no living peer in its offer stays in the queue (MS-22)."""
    world = World()
    world.connect(1, 2)
    seen = []

    def look(offer):
        world.peers.clear()
        seen.extend(offer)

    world.scheduler.schedule(CallingSender(look))
    assert (seen, world.scheduler.statistics().waiting_senders) == ([], 1)


def test_schedule_when_within_an_offer_is_served_after_the_pass_with_all_that_is_open():
    """A sender scheduled by a callback is not called in it, and sees what those that waited have left (MS-29)."""
    world = World()
    world.connect(1, 2)
    inner = FakeSender(world, "x", want=9)

    def schedule_inner(offer):
        assert world.scheduler.schedule(inner)
        world.events.append("returned")

    world.schedule("a", then=schedule_inner)
    assert world.take_events() == [("a", 2, [1]), "returned", ("x", 1, [1])]


def test_senders_when_scheduled_by_one_callback_share_what_is_open():
    """Of those scheduled meanwhile, all but the last may send once, after those that were waiting (MS-29, MS-14)."""
    world = World()
    for peer_id in (1, 2, 3):
        world.connect(peer_id)
    world.connect(4)

    def schedule_two(_request_id, _code):
        world.schedule("x", want=9)
        world.schedule("y", want=9)

    world.schedule("first", receiver=FakeReceiver(world, "first", then=schedule_two))
    world.schedule("waiting", accepts={1})
    world.take_events()
    world.answer(world.requests[0])
    assert world.take_events()[1:] == [("waiting", 4, [1]), ("x", 1, [2]), ("y", 2, [3, 4])]


def test_withdraw_when_from_within_the_offer_ends_the_wait():
    """A sender that withdraws without sending is not called again (MS-31)."""
    world = World()
    world.connect(1)
    world.schedule("a", want=0, then=lambda offer: world.events.append(offer.withdraw()))
    world.connect(2)
    world.scheduler.stop()
    assert world.take_events() == [("a", 1, []), True]


def test_send_when_the_size_is_used_up_is_refused():
    """One message more than the size says is not sent (MS-32)."""
    world = World()
    results = []

    def greedy(offer):
        channels = [*offer]
        results.extend(offer.send(channel, "m", FakeReceiver(world, "a"), TIMEOUT_S) for channel in channels)

    world.scheduler.schedule(CallingSender(greedy))
    world.schedule("behind", accepts=())
    peer = world.connect(1, 3)
    assert [result is not None for result in results] == [True, False, False]
    assert len(peer.sent) == 1


def test_send_when_the_peer_has_no_open_channel_is_refused():
    """A channel is good for one message, and a closed peer learns of no request id (MS-33)."""
    world = World()
    peer = world.connect(1)
    world.connect(2)
    results = []

    def twice(offer):
        channel = next(iter(offer))
        spare = offer.channel(1)
        tried = (channel, channel, spare)
        results.extend(offer.send(each, "m", FakeReceiver(world, "a"), TIMEOUT_S) for each in tried)
        assert offer.channel(1) is None

    world.scheduler.schedule(CallingSender(twice))
    assert results[1:] == [None, None]
    assert peer.sent == [(results[0], "m")]


def test_offer_when_over_sends_nothing():
    world = World()
    peer = world.connect(1)
    kept = []
    world.scheduler.schedule(CallingSender(lambda offer: kept.extend([offer, *offer])))
    offer, channel = kept
    assert offer.send(channel, "m", FakeReceiver(world, "a"), TIMEOUT_S) is None
    assert (offer.channel(1), list(offer), offer.withdraw(), peer.sent) == (None, [], False, [])


def test_skip_when_a_channel_does_not_suit_leaves_it_for_the_next():
    """What is passed over stays open, the size counts sent messages, and at 0 the iteration ends (MS-43)."""
    world = World()
    sizes = []

    def second_only(offer):
        for channel in offer:
            if channel.peer_id == 1:
                offer.skip()
                continue
            offer.send(channel, "m", FakeReceiver(world, "a"), TIMEOUT_S)
            sizes.append(offer.size)

    for peer_id in (1, 2, 3):
        world.connect(peer_id)
    world.scheduler.schedule(CallingSender(second_only))
    assert sizes == [2, 1]
    world.schedule("next", want=9)
    assert world.take_events() == [("next", 1, [1])]


def test_channels_when_some_were_sent_on_keep_the_order_of_ids():
    """Sending takes a channel out, and moves no other (MS-44)."""
    world = World()
    orders = []

    def look(offer):
        for channel in offer:
            if channel.peer_id in "AC":
                offer.send(channel, "m", FakeReceiver(world, "a"), TIMEOUT_S)
        orders.append([channel.peer_id for channel in offer])

    for peer_id in "DBAC":
        world.connect(peer_id)
    world.scheduler.schedule(CallingSender(look))
    assert orders == [["B", "D"]]


def test_offer_when_a_peer_is_fresh_has_the_others_too():
    world = World()
    world.connect(1)
    seen = []

    def look(offer):
        seen.append(([channel.peer_id for channel in offer], [channel.peer_id for channel in offer.full()]))

    world.scheduler.schedule(CallingSender(look))
    world.connect(2)
    assert seen == [([1], [1]), ([2], [1, 2])]


def test_sender_when_scheduled_twice_waits_once():
    world = World()
    sender = world.schedule("a", want=0)
    assert world.scheduler.schedule(sender)
    sender.then = lambda _: world.scheduler.schedule(sender)
    world.connect(1)
    assert world.take_events() == [("a", 1, [])]
    assert world.scheduler.statistics().waiting_senders == 1


@pytest.mark.parametrize("channels", [0, -1])
def test_connect_when_without_channels_does_nothing(channels):
    world = World()
    assert world.scheduler.connect(FakePeer(1), channels) is False
    assert world.scheduler.statistics().peers == 0


def test_connect_when_the_id_is_taken_leaves_the_first(caplog):
    world = World()
    world.connect(1)
    assert world.scheduler.connect(FakePeer(1), 5) is False
    assert world.open_and_closed() == (1, 0)
    assert "connected already" in caplog.text


def test_connect_when_the_former_peer_of_the_id_is_no_more_takes_its_place():
    world = World()
    world.connect(1)
    world.schedule("a")
    world.take_events()
    del world.peers[1]
    world.connect(1, 2)
    assert world.take_events() == [("a", world.requests[0], "disconnect")]
    assert world.open_and_closed() == (2, 0)


def test_priority_when_higher_goes_first_and_nobody_waits_for_ever():
    world = World()
    world.connect(1)
    world.schedule("busy")
    world.schedule("low")
    turns = 0
    world.schedule("high", priority=2)
    while ("low", 1, [1]) not in world.events:
        turns += 1
        world.schedule(f"high {turns}", priority=2)
        world.answer(world.requests[-1])
    assert world.events.index(("high", 1, [1])) < world.events.index(("low", 1, [1]))
    assert turns == 2 * PLACES_PER_PRIORITY


@pytest.mark.parametrize("priority", [MAX_PRIORITY + 1, -MAX_PRIORITY - 1])
def test_priority_when_out_of_range_is_refused(priority):
    world = World()
    with pytest.raises(ConfigError, match=f"priority is {priority}"):
        world.schedule("a", priority=priority)
    assert world.scheduler.statistics().waiting_senders == 0


@pytest.mark.parametrize("wrong", ["text", None, object(), World])
def test_schedule_when_it_is_given_no_sender_says_so(wrong):
    scheduler = MessageScheduler()
    with pytest.raises(ConfigError, match="is no sender"):
        scheduler.schedule(wrong)
    assert scheduler.statistics().waiting_senders == 0


def test_run_on_when_it_is_given_no_loop_changes_nothing():
    scheduler = MessageScheduler()
    with pytest.raises(ConfigError, match="a NoneType cannot drive a scheduler"):
        scheduler.run_on(None)
    assert scheduler.call_later(1.0, print)
    scheduler.stop()
    assert not scheduler.statistics().peers
