"""What callbacks raise: it is told, and costs the others nothing."""

from __future__ import annotations

import asyncio

import pytest
from scheduler_kit import TIMEOUT_S, CallingSender, FakeReceiver, World

from flowctl.errors import LocalProtocolError
from flowctl.nodes.scheduler.policy import ById, FirstComeFirstServed, SchedulerPolicy
from flowctl.nodes.scheduler.scheduler import MessageScheduler

FAULTS = [ValueError("fault"), asyncio.CancelledError(), SystemExit(1)]


def raiser(error):
    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize("error", FAULTS, ids=repr)
def test_offer_when_its_callback_raises_before_sending_leaves_the_sender_in_place(error):
    """The next ones are asked all the same, and it is asked again before them (MS-26)."""
    world = World()
    failing = world.schedule("a", want=0, then=raiser(error))
    world.schedule("b")
    world.connect(1)
    assert world.take_events() == [("a", 1, []), ("b", 1, [1])]
    assert [where for where, _ in world.errors] == ["on_offer"]
    failing.want, failing.then = 1, None
    world.schedule("c")
    world.connect(2)
    assert world.take_events() == [("a", 1, [2])]


def test_offer_when_its_callback_raises_after_sending_keeps_the_request():
    """The sender has closed a channel, so it is done, and its request lives (MS-27)."""
    world = World()
    world.connect(1)
    world.schedule("a", then=raiser(ValueError()))
    assert world.scheduler.statistics().waiting_senders == 0
    world.take_events()
    assert world.answer(world.requests[0])
    assert world.take_events() == [("a", world.requests[0], "success")]
    assert len(world.errors) == 1


@pytest.mark.parametrize("error", FAULTS, ids=repr)
@pytest.mark.parametrize("end", ["success", "timeout", "disconnect", "shutdown"])
def test_receivers_when_they_raise_cost_the_others_nothing(end, error):
    """Channels open again, and the remaining receivers and senders are told (MS-28)."""
    world = World()
    world.connect(1, 2)
    world.schedule("a", want=2, receiver=FakeReceiver(world, "r", then=raiser(error)))
    world.schedule("next", accepts=())
    world.scheduler.schedule(CallingSender(lambda _: None, raiser(error)))
    world.schedule("last", accepts=())
    world.take_events()
    if end == "success":
        for request_id in world.requests:
            world.answer(request_id)
    elif end == "timeout":
        world.advance(TIMEOUT_S + 1)
    elif end == "disconnect":
        world.scheduler.disconnect(1)
    else:
        world.scheduler.stop()
    told = [event for event in world.take_events() if event[0] == "r"]
    assert told == [("r", request_id, end) for request_id in world.requests]
    if end in ("success", "timeout"):
        assert world.open_and_closed() == (2, 0)
    world.scheduler.stop()
    assert world.scheduler.statistics().discarded == 3
    assert len(world.errors) == 3
    assert world.scheduler.statistics().errors == 3


def test_error_hook_when_absent_logs(caplog):
    scheduler = MessageScheduler()
    scheduler.schedule(CallingSender(lambda _: None, raiser(ValueError("fault"))))
    scheduler.stop()
    (record,) = caplog.records
    assert (record.name, record.exc_info[0]) == ("flowctl.scheduler", ValueError)


@pytest.mark.parametrize("takes", [False, OSError("gone")])
def test_send_when_the_peer_does_not_take_it_closes_nothing(takes):
    world = World()
    world.connect(1, takes=takes)
    world.schedule("a")
    assert world.take_events() == [("a", 1, [])]
    assert world.requests == []
    figures = world.scheduler.statistics()
    assert (figures.requests, figures.refused, figures.waiting_senders, figures.outstanding) == (0, 1, 1, 0)
    assert world.open_and_closed() == (1, 0)
    world.connect(2)
    assert world.take_events() == [("a", 2, [2])]
    assert len(world.errors) == isinstance(takes, OSError)


class Moody:
    """A policy of all four kinds, of which one question at a time is answered by an exception."""

    def __init__(self, question):
        self.question = question
        self.fairness, self.choice = FirstComeFirstServed(), ById()

    def policy(self):
        return SchedulerPolicy(
            fairness=_Part(self, place=self.fairness.place, size=self.fairness.size, served=lambda *_: None),
            choice=_Part(self, add=self.choice.add, take=self.choice.take, ended=lambda *_: None),
            limits=_Part(self, connected=lambda peer, _: peer.channel_count, ended=lambda *_: 1),
            ejection=_Part(
                self, connected=lambda *_: None, ended=lambda *_: 1.0, left=lambda _: None, returned=lambda *_: None
            ),
        )


class _Part:
    def __init__(self, moody, **answers):
        def asked(name):
            def answer(*args):
                if moody.question == name:
                    raise ValueError(name)
                return answers[name](*args)

            return answer

        for name in answers:
            setattr(self, name, asked(name))


@pytest.mark.parametrize(
    "question", ["size", "served", "add", "take", "connected", "ended", "left", "returned", "nothing"]
)
def test_policy_when_it_raises_costs_no_request_its_end_and_no_sender_its_turn(question):
    moody = Moody(question)
    world = World(moody.policy())
    world.connect(1)
    world.connect(2)
    for name in "abcdef":
        world.schedule(name)
    for request_id in list(world.requests):
        world.answer(request_id)
    world.advance(TIMEOUT_S * 2)
    world.scheduler.disconnect(1)
    assert {str(error) for _, error in world.errors} == ({question} - {"nothing"})
    assert {where for where, _ in world.errors} <= {"policy"}
    moody.question = "nothing"
    world.connect(3)
    for _ in range(20):
        world.advance(TIMEOUT_S * 2)
    assert sorted(name for name, _, sent in world.events if isinstance(sent, list) and sent) == list("abcdef")
    ended = [event for event in world.events if not isinstance(event[2], list)]
    assert len(ended) == len(world.requests) == 6
    figures = world.scheduler.statistics()
    assert (figures.waiting_senders, figures.closed_channels, figures.open_channels) == (0, 0, 2)


def test_connect_when_its_id_has_no_order_among_the_others_is_refused_and_harms_nobody():
    world = World()
    world.connect(1)
    with pytest.raises(LocalProtocolError, match="cannot be ordered beside 1"):
        world.connect("x")
    world.connect(2)
    for name in "abc":
        world.schedule(name)
    assert world.take_events() == [("a", 2, [1]), ("b", 1, [2])]


def test_policy_that_is_a_subclass_of_a_default_one_is_asked_all_the_same():
    learned = []

    class Choice(ById):
        def ended(self, peer, outcome, latency_s, now):
            learned.append(peer.peer_id)

    class Fairness(FirstComeFirstServed):
        def served(self, sender, place, sent_count):
            learned.append(sender.name)

    world = World(SchedulerPolicy(fairness=Fairness(), choice=Choice()))
    world.connect(1)
    world.schedule("a")
    world.answer(world.requests[0])
    assert learned == ["a", 1]
