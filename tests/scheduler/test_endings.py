"""How requests and senders end: once each, by a response, a timeout, a disconnect, a stop, or taken back."""

from __future__ import annotations

from random import Random

import pytest
from scheduler_kit import TIMEOUT_S, CallingSender, FakePeer, FakeReceiver, FakeSender, Response, World

from flowctl.errors import ConfigError, LocalProtocolError
from flowctl.nodes.scheduler.offer import FIRST_ID, LAST_ID
from flowctl.nodes.scheduler.scheduler import MessageScheduler
from flowctl.testing import ManualClock


def sent_world(peers=1, channels=1):
    """Return a world in which sender "a" has used every channel, and what happened is forgotten."""
    world = World()
    for peer_id in range(1, peers + 1):
        world.connect(peer_id, channels)
    world.schedule("a", want=peers * channels)
    world.take_events()
    return world


# --- responses -------------------------------------------------------------------------------------------------------


def test_response_when_repeated_counts_once(caplog):
    """The second response to a request is unknown, and changes nothing (MS-07)."""
    world = sent_world()
    (request_id,) = world.requests
    assert (world.answer(request_id), world.answer(request_id)) == (True, False)
    assert world.take_events() == [("a", request_id, "success")]
    assert "unknown request" in caplog.text
    figures = world.scheduler.statistics()
    assert (figures.responses, figures.unknown, figures.open_channels) == (1, 1, 1)


@pytest.mark.parametrize(
    ("response", "warning", "counted"),
    [
        (Response(FIRST_ID - 1), "unknown request", "unknown"),
        (Response(-1), "unknown request", "unknown"),
        (object(), "no request id", "without_id"),
        (Response([]), "no request id", "without_id"),
        (Response("16777216"), "no request id", "without_id"),
    ],
)
def test_response_when_its_id_is_no_request_is_dropped(caplog, response, warning, counted):
    """A response that names no request of ours, or none at all, is counted and logged (MS-11)."""
    world = sent_world()
    assert world.scheduler.receive(world.peers[1], response) is False
    assert world.take_events() == []
    assert warning in caplog.text
    assert getattr(world.scheduler.statistics(), counted) == 1
    assert world.open_and_closed() == (0, 1)


def test_response_when_many_are_unknown_fills_no_log(caplog):
    world = sent_world()
    for number in range(100):
        world.scheduler.receive(world.peers[1], Response(number))
    assert world.scheduler.statistics().unknown == 100
    assert len(caplog.records) == 10


@pytest.mark.parametrize("then", ["right", "none"])
def test_response_when_of_another_type_leaves_the_request_outstanding(then):
    """It is ignored: the right one may come later, or the time runs out (MS-12)."""
    world = World()
    peer = world.connect(1)
    receiver = FakeReceiver(world, "a")
    world.scheduler.schedule(
        CallingSender(lambda offer: next(iter(offer)).send("m", receiver, TIMEOUT_S, response_type=Response))
    )
    request_id = peer.sent[0][0]
    assert world.scheduler.receive(peer, "wrong", request_id) is False
    figures = world.scheduler.statistics()
    assert (world.take_events(), figures.wrong_type, figures.outstanding) == ([], 1, 1)
    if then == "right":
        assert world.scheduler.receive(peer, Response(request_id))
    else:
        world.advance(TIMEOUT_S + 1)
    assert world.take_events() == [("a", request_id, "success" if then == "right" else "timeout")]


@pytest.mark.parametrize("end", ["disconnect", "stop"])
def test_response_when_of_another_type_leaves_the_end_to_others(end):
    """A request that had a response of the wrong type still ends once when its peer goes (MS-12, MS-17)."""
    world = World()
    peer = world.connect(1)
    receiver = FakeReceiver(world, "a")
    world.scheduler.schedule(
        CallingSender(lambda offer: next(iter(offer)).send("m", receiver, TIMEOUT_S, response_type=Response))
    )
    request_id = peer.sent[0][0]
    world.scheduler.receive(peer, "wrong", request_id)
    if end == "stop":
        world.scheduler.stop()
    world.scheduler.disconnect(1)
    assert world.take_events() == [("a", request_id, "shutdown" if end == "stop" else "disconnect")]
    assert world.open_and_closed() == (0, 0)


@pytest.mark.parametrize(
    ("receiver", "response_type", "error"),
    [(None, None, "no receiver"), ("any", "text", "response_type is 'text'"), ("any", (int, 1), "response_type is")],
)
def test_request_when_nothing_could_end_it_is_refused(receiver, response_type, error):
    world = World()
    peer = world.connect(1)
    world.scheduler.schedule(
        CallingSender(lambda offer: next(iter(offer)).send("m", receiver, TIMEOUT_S, response_type=response_type))
    )
    ((_, raised),) = world.errors
    assert isinstance(raised, ConfigError)
    assert error in str(raised)
    assert (peer.sent, world.open_and_closed()) == ([], (1, 0))


def test_response_when_of_another_peer_is_ignored():
    """Only the peer that was asked can answer, whoever else knows the id (MS-13)."""
    world = sent_world(peers=2)
    first, second = world.requests
    assert world.answer(first, peer_id=2) is False
    impostor = FakePeer(1)
    assert world.scheduler.receive(impostor, Response(first)) is False
    figures = world.scheduler.statistics()
    assert (world.take_events(), figures.foreign, figures.outstanding) == ([], 2, 2)
    assert world.answer(first)
    assert world.answer(second)


def test_response_when_it_comes_from_within_the_send_is_told_afterwards():
    world = World()

    class Prompt(FakePeer):
        def send(self, request_id, message):
            assert world.scheduler.receive(self, Response(request_id))

    peer = Prompt(1)
    world.scheduler.connect(peer)
    world.schedule("a")
    assert world.take_events() == [("a", 1, [1]), ("a", world.requests[0], "success")]
    assert world.open_and_closed() == (1, 0)


def test_receiver_when_used_for_three_requests_is_told_of_each():
    """One object may wait for many: it is told each id once (MS-38)."""
    world = World()
    receiver = FakeReceiver(world, "r")
    world.connect(1, 3)
    world.schedule("a", want=3, receiver=receiver)
    world.take_events()
    for request_id in reversed(world.requests):
        world.answer(request_id)
    assert world.take_events() == [("r", request_id, "success") for request_id in reversed(world.requests)]


# --- timeouts --------------------------------------------------------------------------------------------------------


def test_timeout_when_passed_opens_the_channel_for_those_that_wait():
    """The receiver is told, then the queue is shown that peer, then newcomers all that is open (MS-14)."""
    world = World()
    world.connect(1)
    world.connect(2)
    again = FakeReceiver(world, "a", then=lambda *_: world.schedule("new", want=9))
    world.schedule("a", receiver=again)
    world.schedule("declines", accepts=())
    world.schedule("takes", accepts={1})
    world.take_events()
    world.advance(TIMEOUT_S - 1)
    assert world.take_events() == []
    world.advance(1 + 1 / 32)
    assert world.take_events() == [
        ("a", world.requests[0], "timeout"),
        ("declines", 1, []),
        ("takes", 2, [1]),
        ("new", 1, [2]),
    ]
    world.advance(0)
    assert world.take_events() == []
    assert world.scheduler.statistics().timeouts == 1


def test_timeout_when_the_reply_comes_later_leaves_the_next_request_alone():
    world = sent_world()
    world.advance(TIMEOUT_S + 1)
    world.schedule("b")
    world.take_events()
    late, second = world.requests
    assert world.answer(late) is False
    assert (world.take_events(), world.open_and_closed()) == ([], (0, 1))
    assert world.answer(second)
    assert (world.take_events(), world.open_and_closed()) == ([("b", second, "success")], (1, 0))


def test_timeout_when_the_peer_object_is_no_more_opens_nothing():
    world = sent_world()
    del world.peers[1]
    world.schedule("b")
    world.advance(TIMEOUT_S + 1)
    assert world.take_events() == [("a", world.requests[0], "timeout")]
    assert world.open_and_closed() == (0, 0)


@pytest.mark.parametrize("response_first", [True, False])
def test_timeout_when_a_response_comes_in_the_same_moment_ends_it_once(response_first):
    """Whichever is first decides, and the channel opens once (MS-16)."""
    world = sent_world()
    (request_id,) = world.requests
    world.clock.advance(TIMEOUT_S + 1)
    if response_first:
        world.answer(request_id)
        world.scheduler.expire()
    else:
        world.scheduler.expire()
        world.answer(request_id)
    assert world.take_events() == [("a", request_id, "success" if response_first else "timeout")]
    assert world.open_and_closed() == (1, 0)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 86_401])
def test_timeout_when_out_of_range_is_refused(timeout):
    world = World()
    world.connect(1)
    world.scheduler.schedule(CallingSender(lambda offer: next(iter(offer)).send("m", None, timeout)))
    ((_, error),) = world.errors
    assert isinstance(error, ConfigError)
    assert world.open_and_closed() == (1, 0)


# --- disconnects -----------------------------------------------------------------------------------------------------


def test_disconnect_when_requests_are_outstanding_fails_them_all():
    """Each receiver is told once, the peer has gone by then, and no timeout follows (MS-17)."""
    world = sent_world(channels=3)
    seen = []
    peers = world.scheduler.peers
    world.take_events()
    receiver = FakeReceiver(world, "r", then=lambda *_: seen.append((peers(), world.open_and_closed())))
    world.connect(2, 2)
    world.schedule("b", want=2, receiver=receiver)
    world.scheduler.disconnect(1)
    world.take_events()
    world.scheduler.disconnect(2)
    assert world.take_events() == [("r", request_id, "disconnect") for request_id in world.requests[3:]]
    assert seen == [([], (0, 0))] * 2
    world.advance(TIMEOUT_S + 1)
    assert world.take_events() == []
    assert world.scheduler.statistics().disconnects == 5


def test_disconnect_when_the_receiver_schedules_again_offers_others_only():
    """A sender scheduled by `on_failure` is offered other peers at once, never the one that has gone (MS-18)."""
    world = World()
    world.connect(1)
    world.connect(2)
    world.schedule("a", receiver=FakeReceiver(world, "a", then=lambda *_: world.schedule("b", want=9)))
    world.take_events()
    world.scheduler.disconnect(1)
    assert world.take_events() == [("a", world.requests[0], "disconnect"), ("b", 1, [2])]


def test_disconnect_when_from_within_an_offer_takes_the_peer_out_of_it():
    world = World()
    peer = world.connect(1, 3)
    world.connect(2)
    receiver = FakeReceiver(world, "a")

    def look(offer):
        channels = iter(offer)
        offer.send(next(channels), "m", receiver, TIMEOUT_S)
        second = next(channels)
        world.scheduler.disconnect(1)
        refused = offer.send(second, "m", receiver, TIMEOUT_S)
        world.events.append((refused, offer.channel(1), [channel.peer_id for channel in channels]))

    world.scheduler.schedule(CallingSender(look))
    assert world.take_events() == [(None, None, [2]), ("a", peer.sent[0][0], "disconnect")]
    figures = world.scheduler.statistics()
    assert (figures.waiting_senders, figures.open_channels, figures.outstanding, len(peer.sent)) == (0, 1, 0, 1)


def test_peer_when_connected_again_from_within_an_offer_is_offered_afterwards():
    world = World()
    world.connect(1)
    seen = []

    def look(offer):
        channels = list(offer)
        seen.append(len(channels))
        if len(seen) == 1:
            world.scheduler.disconnect(1)
            again = world.connect(1, 2)
            seen.extend([offer.send(channels[0], "m", FakeReceiver(world, "a"), TIMEOUT_S), again.sent])

    world.scheduler.schedule(CallingSender(look))
    assert seen == [1, None, [], 2]


def test_disconnect_when_repeated_or_unknown_warns(caplog):
    """Nothing happens but a line in the log (MS-19)."""
    world = sent_world()
    assert world.scheduler.disconnect(9) is False
    assert world.scheduler.disconnect(1) is True
    world.take_events()
    assert world.scheduler.disconnect(1) is False
    assert world.take_events() == []
    assert len(caplog.records) == 2


def test_peer_when_connected_again_begins_anew():
    world = sent_world()
    old, (request_id,) = world.peers[1], world.requests
    world.scheduler.disconnect(1)
    world.connect(1)
    world.take_events()
    assert world.scheduler.receive(old, Response(request_id)) is False
    assert world.open_and_closed() == (1, 0)


def test_connect_when_the_peer_cannot_be_held_weakly_is_refused():
    with pytest.raises(LocalProtocolError, match="cannot be held weakly"):
        MessageScheduler().connect(type("Slotted", (), {"__slots__": (), "peer_id": 1})())


# --- stop ------------------------------------------------------------------------------------------------------------


def test_schedule_when_stopped_is_refused():
    """Before a stop it is True, afterwards False, and nothing is called any more (MS-09)."""
    world = World()
    world.schedule("a")
    world.scheduler.stop()
    world.take_events()
    late = CallingSender(lambda _: world.events.append("called"), lambda: world.events.append("discarded"))
    assert world.scheduler.schedule(late) is False
    assert world.scheduler.connect(FakePeer(1)) is False
    world.scheduler.stop()
    assert world.take_events() == []


def test_stop_when_requests_and_senders_wait_ends_requests_first():
    """Each is told once, and nothing is left (MS-23)."""
    world = sent_world(channels=2)
    world.schedule("b")
    world.schedule("c")
    world.scheduler.stop()
    first, second = world.requests
    assert world.take_events() == [
        ("a", first, "shutdown"),
        ("a", second, "shutdown"),
        ("b", "discard"),
        ("c", "discard"),
    ]
    figures = world.scheduler.statistics()
    assert (figures.waiting_senders, figures.outstanding, figures.peers, figures.closed_channels) == (0, 0, 0, 0)
    assert world.answer(first) is False
    world.advance(TIMEOUT_S + 1)
    assert world.take_events() == []


def test_schedule_when_within_the_stop_is_refused():
    """Callbacks of a stop may schedule: it returns False, and nobody is called twice (MS-24)."""
    world = World()
    answers = []

    def again(*_):
        answers.append(world.scheduler.schedule(CallingSender(lambda _: world.events.append("called"))))

    world.connect(1)
    world.schedule("a", receiver=FakeReceiver(world, "a", then=again))
    world.schedule("b", discarded=again)
    world.take_events()
    world.scheduler.stop()
    assert world.take_events() == [("a", world.requests[0], "shutdown"), ("b", "discard")]
    assert answers == [False, False]


@pytest.mark.parametrize("where", ["success", "failure", "shutdown", "discard", "call", "send"])
def test_stop_when_from_within_any_callback_ends_each_once(where):
    world = World()

    def stop(*_):
        world.scheduler.stop()

    class Stopping(FakePeer):
        def send(self, request_id, message):
            world.requests.append(request_id)
            if where == "send":
                world.scheduler.stop()

    peers = [Stopping(1), Stopping(2)]
    by_receiver = where in ("success", "failure", "shutdown")
    for peer in peers:
        world.scheduler.connect(peer)
    senders = [
        FakeSender(world, "a", receiver=FakeReceiver(world, "a", then=stop if by_receiver else None)),
        FakeSender(world, "b"),
        FakeSender(world, "c", discarded=stop if where == "discard" else None),
        FakeSender(world, "d"),
    ]
    taken = [world.scheduler.schedule(sender) for sender in senders]
    first = world.requests[0]
    if where == "success":
        world.scheduler.receive(peers[0], Response(first))
    elif where == "failure":
        world.scheduler.disconnect(1)
    elif where == "call":
        world.scheduler.call_later(1.0, stop)
        world.advance(2.0)
    else:
        world.scheduler.stop()
    ends = [(event[0], event[-1]) for event in world.take_events() if not isinstance(event[-1], list)]
    code = {"success": "success", "failure": "disconnect"}.get(where, "shutdown")
    others = [] if where == "send" else [("b", "shutdown"), ("c", "discard"), ("d", "discard")]
    assert ends == [("a", code), *others]
    assert taken == [True, *[where != "send"] * 3]
    figures = world.scheduler.statistics()
    assert (figures.outstanding, figures.waiting_senders, figures.open_channels, figures.errors) == (0, 0, 0, 0)


def test_stop_when_from_within_an_offer_discards_those_that_have_not_sent():
    world = World()
    world.connect(1, 2)
    refused = []

    def stop(offer):
        world.scheduler.stop()
        refused.append(offer.channel(1))

    world.schedule("a", then=stop)
    assert world.take_events() == [("a", 2, [1]), ("a", world.requests[0], "shutdown")]
    assert refused == [None]
    world = World()
    world.connect(1)
    world.schedule("b", want=0, then=lambda _: world.scheduler.stop())
    assert world.take_events() == [("b", 1, []), ("b", "discard")]


def test_stop_when_a_sender_was_scheduled_again_in_its_offer_discards_it():
    world = World()
    world.connect(1)

    def again(_):
        assert world.scheduler.schedule(sender)
        world.scheduler.stop()

    sender = world.schedule("never", want=0, accepts=())
    world.scheduler.withdraw(sender)
    world.take_events()
    sender.want, sender.accepts, sender.then = 1, None, again
    world.scheduler.schedule(sender)
    assert world.take_events() == [("never", 1, [1]), ("never", world.requests[0], "shutdown"), ("never", "discard")]


# --- notifications and withdrawal ------------------------------------------------------------------------------------


def test_notification_when_sent_closes_its_channel_for_its_time():
    """No answer is expected: the channel opens after the time, and is offered (MS-34)."""
    world = World()
    peer = world.connect(1)
    sent = []
    world.scheduler.schedule(CallingSender(lambda offer: sent.append(next(iter(offer)).notify("note", TIMEOUT_S))))
    assert (sent, peer.sent, world.open_and_closed()) == ([True], [(None, "note")], (0, 1))
    world.schedule("next")
    world.advance(TIMEOUT_S - 1)
    assert world.take_events() == []
    world.advance(1 + 1 / 32)
    assert world.take_events() == [("next", 1, [1])]


def test_notification_when_its_peer_disconnects_ends_in_silence():
    """Nobody waits for it, so nobody is told (MS-34)."""
    world = World()
    world.connect(1)
    world.scheduler.schedule(CallingSender(lambda offer: next(iter(offer)).notify("note", TIMEOUT_S)))
    world.scheduler.disconnect(1)
    world.advance(TIMEOUT_S + 1)
    assert (world.events, world.errors) == ([], [])
    figures = world.scheduler.statistics()
    assert (figures.notifications, figures.closed_channels, figures.outstanding) == (1, 0, 0)


@pytest.mark.parametrize("end", ["reply", "timeout"])
def test_request_when_withdrawn_keeps_its_channel_closed(end):
    """Nobody is told, but the peer is busy until it has answered, or its time is over (MS-36)."""
    world = sent_world()
    (request_id,) = world.requests
    assert world.scheduler.withdraw(request_id) is True
    assert world.scheduler.withdraw(request_id) is False
    world.schedule("next")
    assert world.take_events() == []
    if end == "reply":
        assert world.answer(request_id) is False
    else:
        world.advance(TIMEOUT_S + 1)
    assert world.take_events() == [("next", 1, [1])]
    figures = world.scheduler.statistics()
    assert (figures.withdrawn_requests, figures.late, figures.timeouts) == (1, int(end == "reply"), 0)


@pytest.mark.parametrize("end", ["disconnect", "stop"])
def test_request_when_withdrawn_ends_in_silence_with_its_peer(end):
    """Nobody is told of a withdrawn request, whatever ends it (MS-36)."""
    world = sent_world()
    world.scheduler.withdraw(world.requests[0])
    if end == "stop":
        world.scheduler.stop()
    else:
        world.scheduler.disconnect(1)
    figures = world.scheduler.statistics()
    assert (world.take_events(), figures.outstanding, figures.closed_channels) == ([], 0, 0)
    assert figures.disconnects == figures.shutdowns == 0


def test_sender_when_withdrawn_and_scheduled_again_stands_last():
    world = World()
    sender = world.schedule("a")
    world.schedule("b")
    world.scheduler.withdraw(sender)
    world.scheduler.schedule(sender)
    world.connect(1, 2)
    assert world.take_events() == [("b", 1, [1]), ("a", 1, [1])]


def test_sender_when_withdrawn_is_not_called():
    world = World()
    sender = world.schedule("a")
    assert (world.scheduler.withdraw(sender), world.scheduler.withdraw(sender)) == (True, False)
    world.connect(1)
    world.scheduler.stop()
    assert world.take_events() == []


def test_sender_when_withdrawn_by_one_before_it_is_not_called():
    world = World()
    world.schedule("a", then=lambda _: world.events.append(world.scheduler.withdraw(second)))
    second = world.schedule("b")
    world.connect(1, 2)
    assert world.take_events() == [("a", 1, [1]), True]


# --- ids -------------------------------------------------------------------------------------------------------------


class LastIds(Random):
    def randint(self, a, b):
        assert (a, b) == (FIRST_ID, LAST_ID)
        return b - 2


def test_ids_when_at_the_end_of_their_range_begin_anew():
    """Ids count up within 2**24 and 2**32 - 1, and pass over those that are in flight (MS-37)."""
    assert (FIRST_ID, LAST_ID) == (2**24, 2**32 - 1)
    scheduler = MessageScheduler(ManualClock(), LastIds())
    peer = FakePeer(1)
    scheduler.connect(peer, 4)
    sender = CallingSender(lambda offer: next(iter(offer)).send("m", FakeReceiver(World(), "a"), 60.0))
    for _ in range(4):
        scheduler.schedule(sender)
    ids = [request_id for request_id, _ in peer.sent]
    assert ids == [2**32 - 2, 2**32 - 1, 2**24, 2**24 + 1]
    scheduler._core._last_id = 2**32 - 2
    assert scheduler.receive(peer, None, ids[0])
    assert scheduler.receive(peer, None, ids[3])
    scheduler.schedule(sender)
    assert peer.sent[-1][0] == 2**24 + 1


def test_ids_when_of_two_schedulers_start_differently():
    """Where an id starts is left to the system's chance, so two processes do not share them (MS-37)."""
    starts = {MessageScheduler()._core._last_id for _ in range(4)}
    assert len(starts) > 1
    assert all(FIRST_ID <= start <= LAST_ID for start in starts)
