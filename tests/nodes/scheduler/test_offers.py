"""Who is offered what: the order of the queue, the size of offers, fresh channels and all of them."""

from __future__ import annotations

import pytest
from scheduler_kit import TIMEOUT_S, CallingSender, FakePeer, FakeReceiver, Script, World

from flowctl.errors import ConfigError
from flowctl.nodes.scheduler.policy import MAX_PRIORITY, PLACES_PER_PRIORITY
from flowctl.nodes.scheduler.scheduler import MessageScheduler

SCENARIOS = {
    "waiting senders get one channel each, in order, until the new peer has none left (MS-01)": """
        schedule a | schedule b | schedule c
        connect 1*2 -> a/1:1, b/1:1
        figures waiting_senders open_channels closed_channels -> 1 waiting_senders, 0 open_channels, 2 closed_channels
        answer 1 -> a#1 success, c/1:1""",
    "the only sender is called within schedule, with all open channels, peer by peer (MS-02)": """
        connect 1*2 2*2 | schedule a 9 -> a/4:1 1 2 2
        figures waiting_senders -> 0 waiting_senders""",
    "those before the last one get one channel, the last one what is left (MS-03)": """
        schedule a 9 | schedule b 9 | connect 1*3 -> a/1:1, b/2:1 1
        figures open_channels closed_channels -> 0 open_channels, 3 closed_channels""",
    "one that waits for a certain peer is asked first about each, and gets it when it comes (MS-04)": """
        schedule a 1 7 | schedule b
        connect 1 -> a/1:-, b/1:1
        schedule c
        connect 7 -> a/1:7""",
    "channels come in the order of ids, whatever the order of connecting (MS-06)": """
        connect 5 3 4 | schedule a 3 -> a/3:3 4 5""",
    "greedy senders that schedule themselves again are served in turn (MS-08)": """
        schedule a 9 offered[schedule a] | schedule b 9 offered[schedule b] | schedule c 9 offered[schedule c]
        connect 1 -> a/1:1
        answer 1 -> a#1 success, b/1:1
        answer 2 -> b#2 success, c/1:1
        answer 3 -> c#3 success, a/1:1
        answer 4 -> a#4 success, b/1:1
        answer 5 -> b#5 success, c/1:1""",
    "those that schedule themselves again after an answer stand behind those that wait (MS-08)": """
        schedule a 9 ended[schedule a] | schedule b 9 ended[schedule b] | schedule c 9 ended[schedule c]
        connect 1 -> a/1:1
        answer 1 -> a#1 success, b/1:1
        answer 2 -> b#2 success, c/1:1
        answer 3 -> c#3 success, a/1:1""",
    "one that wants more than its share goes on behind those that wait": """
        schedule a 9 offered[schedule a] | schedule b
        connect 1*4 -> a/1:1, b/3:1, a/2:1 1
        figures waiting_senders -> 1 waiting_senders""",
    "a peer that is connected by a receiver is fresh for those that wait": """
        connect 1 | schedule a ended[connect 2] -> a/1:1
        schedule declines 1 2
        answer 1 -> a#1 success, declines/1:-, declines/2:2""",
    "a peer that is connected by a receiver after a timeout is fresh for those that wait": """
        connect 1 | schedule a ended[connect 2] -> a/1:1
        schedule declines 1 2
        advance 6 -> a#1 timeout, declines/1:-, declines/2:2""",
    "a peer that is connected in an offer is offered after what opened before": """
        connect 1 | schedule a -> a/1:1
        schedule declines 1 2 | schedule b offered[connect 2]
        answer 1 -> a#1 success, declines/1:-, b/1:1, declines/1:2""",
    "dead peers are passed over, and where there are no others the sender waits (MS-22)": """
        connect 1 2 | die 1 | schedule a -> a/2:2
        answer 1 -> a#1 success
        die 2 | schedule b
        figures waiting_senders -> 1 waiting_senders
        connect 3 -> b/1:3""",
    "one that is scheduled in an offer is called after it, with all that is open (MS-29)": """
        connect 1*2 | schedule a offered[schedule x 9] -> a/2:1, x/1:1""",
    "those that are scheduled meanwhile share what is open, behind those that wait (MS-29, MS-14)": """
        connect 1 2 3 4 | schedule first ended[both x y] | schedule waiting 1 1 -> first/4:1, waiting/3:-
        answer 1 -> first#1 success, waiting/4:1, x/1:2, y/2:3 4""",
    "one that withdraws in its offer without sending is not called again (MS-31)": """
        connect 1 | schedule a 0 offered[withdraw a] -> a/1:-
        connect 2 | stop""",
    "a sender that is scheduled twice waits once, and one that declines is not called for ever": """
        schedule a 0 offered[schedule a] | schedule a
        connect 1 -> a/1:-
        figures waiting_senders -> 1 waiting_senders""",
    "a peer whose former object is no more takes its place": """
        connect 1 | schedule a -> a/1:1
        die 1 | connect 1*2 -> a#1 disconnect
        figures open_channels closed_channels -> 2 open_channels, 0 closed_channels""",
}


@pytest.mark.parametrize("script", SCENARIOS.values(), ids=SCENARIOS)
def test_scenario_when_played_goes_as_written(script):
    Script(World()).check(script)


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
