"""How requests and senders end: once each, by a response, a timeout, a disconnect, a stop, or taken back."""

from __future__ import annotations

from random import Random

import pytest
from scheduler_kit import TIMEOUT_S, CallingSender, FakePeer, FakeReceiver, FakeSender, Response, Script, World

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


SCENARIOS = {
    "a second response to a request is unknown, and changes nothing (MS-07)": """
        connect 1 | schedule a -> a/1:1
        answer 1 -> a#1 success
        answer 1 -> no
        figures responses unknown open_channels -> 1 responses, 1 unknown, 1 open_channels""",
    "only the peer that was asked can answer, whoever else knows the id (MS-13)": """
        connect 1 2 | schedule a 2 -> a/2:1 2
        answer 1 2 -> no
        impostor 1 -> no
        figures foreign outstanding -> 2 foreign, 2 outstanding
        answer 2 | answer 1 -> a#2 success, a#1 success""",
    "a receiver of three requests is told each id once (MS-38)": """
        connect 1*3 | schedule a 3 -> a/3:1 1 1
        answer 3 | answer 2 | answer 1 -> a#3 success, a#2 success, a#1 success""",
    "at a timeout the receiver is told, the queue is shown that peer, newcomers all that is open (MS-14)": """
        connect 1 2 | schedule a ended[schedule new 9] -> a/2:1
        schedule declines 1 none | schedule takes 1 1 -> declines/1:-, takes/1:-
        advance 4
        advance 1.03125 -> a#1 timeout, declines/1:-, takes/2:1, new/1:2
        advance 0
        figures timeouts -> 1 timeouts""",
    "a reply after the timeout is unknown, and what was sent since keeps its channel": """
        connect 1 | schedule a -> a/1:1
        advance 6 | schedule b -> a#1 timeout, b/1:1
        answer 1 -> no
        figures open_channels closed_channels -> 0 open_channels, 1 closed_channels
        answer 2 -> b#2 success""",
    "a peer that died without a disconnect is offered to nobody when its request has ended": """
        connect 1 | schedule a -> a/1:1
        die 1 | schedule b | advance 6 -> a#1 timeout
        figures open_channels closed_channels -> 0 open_channels, 0 closed_channels""",
    "a response that comes before the timeout of the same moment ends it (MS-16)": """
        connect 1 | schedule a -> a/1:1
        sleep 6 | answer 1 -> a#1 success
        advance 0
        figures open_channels closed_channels -> 1 open_channels, 0 closed_channels""",
    "a response that comes behind the timeout of the same moment does not (MS-16)": """
        connect 1 | schedule a -> a/1:1
        sleep 6 | advance 0 -> a#1 timeout
        answer 1 -> no
        figures open_channels closed_channels -> 1 open_channels, 0 closed_channels""",
    "each receiver of a peer that goes is told once, the peer has gone by then, and no timeout follows (MS-17)": """
        connect 1*3 | schedule a 3 -> a/3:1 1 1
        connect 2*2 | schedule b 2 ended[figures peers open_channels] -> b/2:2 2
        disconnect 1 -> a#1 disconnect, a#2 disconnect, a#3 disconnect
        disconnect 2 -> b#4 disconnect, 0 peers, 0 open_channels, b#5 disconnect, 0 peers, 0 open_channels
        advance 6
        figures disconnects closed_channels -> 5 disconnects, 0 closed_channels""",
    "one that its receiver schedules when a peer goes is offered others at once (MS-18)": """
        connect 1 2 | schedule a ended[schedule b 9] -> a/2:1
        disconnect 1 -> a#1 disconnect, b/1:2""",
    "a peer that is unknown, or gone, is not disconnected (MS-19)": """
        connect 1 | disconnect 9 -> no
        disconnect 1
        disconnect 1 -> no""",
    "answers to an earlier connection of an id count for nothing": """
        connect 1 | schedule a -> a/1:1
        keep 1 | disconnect 1 | connect 1 -> a#1 disconnect
        late 1 -> no
        figures open_channels closed_channels -> 1 open_channels, 0 closed_channels""",
    "a stop ends requests first, each once, and leaves nothing (MS-23)": """
        connect 1*2 | schedule a 2 -> a/2:1 1
        schedule b | schedule c | stop -> a#1 shutdown, a#2 shutdown, b discard, c discard
        figures waiting_senders outstanding peers -> 0 waiting_senders, 0 outstanding, 0 peers
        advance 6""",
    "callbacks of a stop that schedule are refused, and nobody is called twice (MS-24)": """
        connect 1 | schedule a ended[schedule x] | schedule b discarded[schedule x] -> a/1:1
        stop -> a#1 shutdown, no, b discard, no""",
    "one that stops in its offer, having sent, is told of its request": """
        connect 1*2 | schedule a offered[stop] -> a/2:1, a#1 shutdown""",
    "one that stops in its offer, not having sent, is discarded": """
        connect 1 | schedule b 0 offered[stop] -> b/1:-, b discard""",
    "one that was scheduled again in the offer of the stop is discarded after its request": """
        connect 1 | schedule a offered[again_and_stop a] -> a/1:1, a#1 shutdown, a discard""",
    "nobody is told of a withdrawn request, but its peer is busy until it has answered (MS-36)": """
        connect 1 | schedule a -> a/1:1
        withdraw 1
        withdraw 1 -> no
        schedule next
        answer 1 -> next/1:1, no
        figures withdrawn_requests late timeouts -> 1 withdrawn_requests, 1 late, 0 timeouts""",
    "nor before the time of a withdrawn request is over (MS-36)": """
        connect 1 | schedule a -> a/1:1
        withdraw 1 | schedule next
        advance 6 -> next/1:1
        figures withdrawn_requests late timeouts -> 1 withdrawn_requests, 0 late, 0 timeouts""",
    "a withdrawn request ends in silence with its peer (MS-36)": """
        connect 1 | schedule a -> a/1:1
        withdraw 1 | disconnect 1
        figures outstanding closed_channels disconnects -> 0 outstanding, 0 closed_channels, 0 disconnects""",
    "a withdrawn request ends in silence with the scheduler (MS-36)": """
        connect 1 | schedule a -> a/1:1
        withdraw 1 | stop
        figures outstanding closed_channels shutdowns -> 0 outstanding, 0 closed_channels, 0 shutdowns""",
    "a sender that is withdrawn and scheduled again stands last": """
        schedule a | schedule b | withdraw a | schedule a
        connect 1*2 -> b/1:1, a/1:1""",
    "a sender that is withdrawn is not called": """
        schedule a | withdraw a
        withdraw a -> no
        connect 1 | stop""",
    "a sender that one before it withdraws is not called": """
        schedule a offered[withdraw b] | schedule b
        connect 1*2 -> a/1:1""",
}


@pytest.mark.parametrize("script", SCENARIOS.values(), ids=SCENARIOS)
def test_scenario_when_played_goes_as_written(script):
    Script(World()).check(script)


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ("connect 1 | schedule a | answer 1 | answer 1", ["unknown request"]),
        ("disconnect 9 | connect 1 | disconnect 1 | disconnect 1", ["not connected"] * 2),
    ],
)
def test_call_that_has_no_effect_is_a_line_of_the_log(script, lines, caplog):
    made = Script(World())
    for step in script.split("|"):
        made.do(step)
    assert len(caplog.records) == len(lines)
    assert all(line in record.getMessage() for line, record in zip(lines, caplog.records, strict=True))


# --- responses -------------------------------------------------------------------------------------------------------


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


# --- timeouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 86_401])
def test_timeout_when_out_of_range_is_refused(timeout):
    world = World()
    world.connect(1)
    world.scheduler.schedule(CallingSender(lambda offer: next(iter(offer)).send("m", None, timeout)))
    ((_, error),) = world.errors
    assert isinstance(error, ConfigError)
    assert world.open_and_closed() == (1, 0)


# --- disconnects -----------------------------------------------------------------------------------------------------


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
