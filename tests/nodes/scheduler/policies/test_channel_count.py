"""Adaptive counts of channels: bounds always, and near the capacity of a simulated peer in the end."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_kit import peer_of

from flowctl.core.outcomes.pending import Outcome
from flowctl.errors import ConfigError
from flowctl.nodes.scheduler.policies.adaptive import ROUND_ANSWERS, AdaptiveChannels, AdaptiveSettings, ChannelCount


def settle(count: ChannelCount, capacity: int, answers: int, service_s=lambda: 0.1) -> list[int]:
    """Keep all channels of a peer busy that works on `capacity` messages at a time; return the counts on the way."""
    now, sent, running, waiting, history = 0.0, 0, [], deque(), []
    in_flight = 0
    for _ in range(answers):
        while in_flight < count.count:
            waiting.append(now)
            in_flight += 1
        while waiting and len(running) < capacity:
            sent += 1
            heappush(running, (now + service_s(), sent, waiting.popleft()))
        now, _, begun = heappop(running)
        count.answered(now - begun, in_flight)
        in_flight -= 1
        history.append(count.count)
    return history


@pytest.mark.parametrize("capacity", [1, 4, 20, 50])
def test_channels_when_a_peer_has_a_capacity_settle_near_it(capacity):
    count = ChannelCount(AdaptiveSettings(ceiling=200))
    history = settle(count, capacity, 12_000)[6_000:]
    probes = [number for number in history if number < capacity]
    assert max(history) <= 1.8 * capacity + 4
    assert len(probes) < len(history) / 10, "only probes go below the capacity"


def test_channels_when_latencies_are_uneven_still_use_the_peer():
    rng = Random(5)
    count = ChannelCount(AdaptiveSettings(ceiling=200))
    history = settle(count, 20, 20_000, lambda: rng.expovariate(10.0))[8_000:]
    assert 14 < sum(history) / len(history) < 45


def test_channels_when_a_peer_becomes_slower_for_good_are_won_back():
    count = ChannelCount(AdaptiveSettings(ceiling=30))
    settle(count, 100, 2_000)
    assert count.count == 30
    history = settle(count, 100, 20_000, lambda: 0.5)
    assert min(history) < 30
    assert max(history[-3000:]) == 30


def test_channels_when_messages_fail_are_halved_once_for_those_in_flight():
    count = ChannelCount(AdaptiveSettings(ceiling=64), 32)
    changed = [count.failed(in_flight) for in_flight in range(32, 0, -1)]
    assert changed == [True] + [False] * 31
    assert (count.count, count.reason) == (16, "failure")


def test_channels_when_they_are_not_all_used_do_not_grow():
    count = ChannelCount(AdaptiveSettings(), 4)
    for _ in range(ROUND_ANSWERS * 5):
        count.answered(0.1, 3)
    assert (count.count, count.reason) == (4, "start")


def test_channels_when_they_change_say_why():
    count = ChannelCount(AdaptiveSettings(), 4)
    for _ in range(ROUND_ANSWERS):
        count.answered(0.1, 4)
    assert (count.count, count.reason, count.baseline_s) == (8, "room", pytest.approx(0.1))
    for _ in range(ROUND_ANSWERS + 3):  # three were in flight at the change
        count.answered(0.3, 8)
    assert (count.count, count.reason) == (4, "latency")


def test_channels_when_outcomes_come_count_answers_and_failures_only():
    limits = AdaptiveChannels(AdaptiveSettings(ceiling=8))
    peer = peer_of(1, channels=20)
    assert limits.connected(peer, 0.0) == 8
    assert limits.ended(peer, Outcome.DISCONNECTED, 0.1, 1.0) == 8
    assert limits.ended(peer, Outcome.TIMEOUT, 0.1, 1.0) == 4
    assert limits.ended(peer, Outcome.REJECTED, 0.1, 1.0) == 2
    for _ in range(ROUND_ANSWERS):
        count = limits.ended(peer_with(peer, 1), Outcome.RESPONSE, 0.1, 2.0)
    assert count == 3


def peer_with(peer, in_flight: int):
    peer.pending.update(dict.fromkeys(range(in_flight)))
    return peer


STEPS = st.lists(
    st.one_of(st.tuples(st.just("answer"), st.floats(0.0, 10.0)), st.tuples(st.just("fail"), st.just(0.0))),
    max_size=400,
)


@settings(deadline=None)
@given(STEPS, st.integers(1, 5), st.integers(0, 40), st.integers(-3, 99))
def test_channels_when_anything_happens_stay_within_their_bounds(steps, floor, more, begin):
    count = ChannelCount(AdaptiveSettings(floor=floor, ceiling=floor + more), begin)
    for kind, latency_s in steps:
        for _ in range(5):
            if kind == "answer":
                count.answered(latency_s, count.count)
            else:
                count.failed(count.count)
            assert floor <= count.count <= floor + more


@pytest.mark.parametrize("wrong", [{"floor": 0}, {"floor": 5, "ceiling": 4}, {"tolerance": 1.0}])
def test_settings_of_channels_when_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        AdaptiveSettings(**wrong)
