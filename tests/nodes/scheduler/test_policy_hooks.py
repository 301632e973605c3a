"""Policies in a scheduler: what it asks them, tells them, and does with what they say."""

from __future__ import annotations

from random import Random

import pytest
from scheduler_kit import World

from flowctl.core.outcomes.backoff import Backoff
from flowctl.errors import ConfigError
from flowctl.nodes.scheduler.policies.adaptive import AdaptiveChannels, AdaptiveSettings
from flowctl.nodes.scheduler.policies.choice import TwoChoices
from flowctl.nodes.scheduler.policies.ejection import EjectionSettings, OutlierEjection
from flowctl.nodes.scheduler.policies.fairness import WeightedFair
from flowctl.nodes.scheduler.policy import ById, SchedulerPolicy

AWAY = Backoff(first_s=10.0, jitter=0.0, most_s=60.0)


def ejecting(**options) -> SchedulerPolicy:
    return SchedulerPolicy(
        ejection=OutlierEjection(Random(1), EjectionSettings(consecutive=2, away=AWAY, most_share=0.5)), **options
    )


@pytest.mark.parametrize("name", ["fairness", "choice"])
def test_policy_when_a_question_has_nobody_to_answer_it_says_so(name):
    with pytest.raises(ConfigError, match=f"{name} is None, which has no"):
        SchedulerPolicy(**{name: None})


def test_ejection_when_a_peer_returns_gives_it_one_channel_until_it_has_answered():
    world = World(ejecting())
    world.connect(1, 3)
    world.connect(2, 3)
    for _ in range(2):
        world.schedule("a", accepts={1})
    world.advance(6.0)
    assert world.open_and_closed() == (3, 0)
    world.schedule("b", accepts={1}, want=9)
    world.take_events()
    world.advance(10.1)
    assert world.take_events() == [("b", 4, [1])]
    assert world.open_and_closed() == (3, 1)
    world.answer(world.requests[-1])
    assert world.open_and_closed() == (6, 0)


def test_useful_when_a_response_is_of_none_counts_against_its_peer():
    world = World(ejecting(useful=lambda response: response.value != "error"))
    world.connect(1)
    world.connect(2)
    for _ in range(2):
        world.schedule("a", accepts={1})
        assert world.answer(world.requests[-1], value="error")
    assert [event[-1] for event in world.take_events()].count("success") == 2
    assert world.open_and_closed() == (1, 0)
    assert world.scheduler.statistics().ejections == 1


def test_useful_when_it_raises_is_reported_and_counts_as_no():
    def useful(response):
        raise ValueError(response.value)

    world = World(ejecting(useful=useful))
    world.connect(1)
    world.schedule("a")
    world.answer(world.requests[0], value="x")
    assert world.take_events()[-1][-1] == "success"
    assert [where for where, _ in world.errors] == ["useful"]


def test_adaptive_when_a_peer_times_out_lowers_its_channels():
    world = World(SchedulerPolicy(limits=AdaptiveChannels(AdaptiveSettings(ceiling=8))))
    world.connect(1, 8)
    world.schedule("a", want=8)
    assert world.open_and_closed() == (0, 8)
    world.advance(5.1)
    assert world.open_and_closed() == (4, 0)


def test_weighted_fair_when_in_a_scheduler_charges_for_what_is_sent():
    world = World(SchedulerPolicy(fairness=WeightedFair(lambda sender: sender.name, {"a": 3.0, "b": 1.0})))
    for _ in range(40):
        world.schedule("b")
        world.schedule("a")
    world.connect(1)
    for _ in range(39):
        world.answer(world.requests[-1])
    served = [event[0] for event in world.take_events() if isinstance(event[-1], list)]
    assert served.count("a") == pytest.approx(30, abs=1)


@pytest.mark.parametrize("choice", [ById, lambda: TwoChoices(Random(1))])
def test_pool_when_peers_come_and_go_forgets_those_that_have_gone(choice):
    pool = choice()
    world = World(SchedulerPolicy(choice=pool))
    world.connect(0)
    for number in range(1, 1000):
        world.connect(number)
        world.scheduler.disconnect(number)
    assert len(getattr(pool, "_heap", None) or pool._peers) < 100
    world.schedule("a", want=9)
    assert world.take_events() == [("a", 1, [0])]


def test_two_choices_when_in_a_scheduler_avoid_the_slow_peer():
    world = World(SchedulerPolicy(choice=TwoChoices(Random(1))))
    world.connect(1)
    world.connect(2)
    for peer_id, seconds in ((1, 2.0), (2, 0.1)):
        world.schedule("a", accepts={peer_id}, full=True)
        world.clock.advance(seconds)
        world.answer(world.requests[-1])
    world.take_events()
    for _ in range(20):
        world.schedule("a")
        assert world.asked[world.requests[-1]] == 2
        world.clock.advance(0.1)
        world.answer(world.requests[-1])


def test_calls_when_their_time_comes_are_made_once_and_contained():
    world, made = World(), []
    scheduler = world.scheduler
    scheduler.call_later(1.0, lambda: made.append(scheduler.now()))
    cancelled = scheduler.call_later(1.0, lambda: made.append("cancelled"))
    scheduler.call_later(2.0, lambda: {}["wrong"])
    assert scheduler.next_deadline() == pytest.approx(world.clock() + 1.0, abs=0.02)
    assert scheduler.cancel_call(cancelled)
    assert not scheduler.cancel_call(cancelled)
    world.advance(0.9)
    assert made == []
    world.advance(0.2)
    assert len(made) == 1
    world.advance(5.0)
    assert len(made) == 1
    assert [type(error) for _, error in world.errors] == [KeyError]
    scheduler.stop()
    scheduler.call_later(0.0, lambda: made.append("after the stop"))
    world.advance(1.0)
    assert len(made) == 1


def test_has_other_when_peers_are_ejected_or_tried_says_whether_one_is_left():
    world = World(ejecting())
    assert not world.scheduler.has_other(())
    world.connect(1)
    world.connect(2)
    assert world.scheduler.has_other({1})
    assert not world.scheduler.has_other({1, 2})
    for _ in range(2):
        world.schedule("a", accepts={2}, full=True)
        world.advance(5.1)
    assert world.scheduler.peer_count == 2
    assert not world.scheduler.has_other({1})
