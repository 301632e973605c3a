"""Outlier ejection: who is left out, for how long, and never more than a share."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_kit import peer_of

from flowctl.core.outcomes.backoff import Backoff
from flowctl.core.outcomes.pending import Outcome
from flowctl.errors import ConfigError
from flowctl.nodes.scheduler.policies.ejection import EjectionSettings, OutlierEjection

AWAY = Backoff(first_s=10.0, factor=2.0, most_s=60.0, jitter=0.0)
GOOD, BAD = Outcome.RESPONSE, Outcome.TIMEOUT


def ejection_of(count: int, **settings):
    ejection = OutlierEjection(Random(1), EjectionSettings(away=AWAY, **settings))
    peers = [peer_of(number) for number in range(count)]
    for peer in peers:
        ejection.connected(peer, 0.0)
    return ejection, peers


def end(ejection, peer, outcome, times, now) -> list[float]:
    return [ejection.ended(peer, outcome, 0.1, now) for _ in range(times)]


@pytest.mark.parametrize("bad", [Outcome.TIMEOUT, Outcome.REJECTED])
def test_ejection_when_failures_follow_each_other_leaves_the_peer_out(bad):
    ejection, peers = ejection_of(10)
    end(ejection, peers[1], bad, 4, 0.0)
    end(ejection, peers[1], GOOD, 1, 0.0)
    assert end(ejection, peers[1], bad, 5, 0.0) == [0, 0, 0, 0, 10.0]
    assert (ejection.ejected_count, ejection.peers_count) == (1, 10)


def test_ejection_when_the_success_rate_is_low_leaves_the_peer_out():
    ejection, peers = ejection_of(10)
    for number in range(19):
        assert not ejection.ended(peers[1], GOOD if number % 3 == 0 else BAD, 0.1, 1.0)
    assert ejection.ended(peers[1], BAD, 0.1, 1.0) == 10.0


def test_ejection_when_a_window_ends_counts_anew():
    ejection, peers = ejection_of(10)
    for number in range(19):
        ejection.ended(peers[1], GOOD if number % 3 == 0 else BAD, 0.1, 1.0)
    assert end(ejection, peers[1], BAD, 2, 11.5) == [0, 0]


def test_ejection_when_the_probe_fails_lasts_twice_as_long_up_to_the_most():
    ejection, peers = ejection_of(10)
    now, lasted = 0.0, []
    end(ejection, peers[1], BAD, 4, now)
    for _ in range(5):
        lasted += end(ejection, peers[1], BAD, 1, now)
        now += lasted[-1]
        ejection.returned(peers[1], now)
    assert lasted == [10.0, 20.0, 40.0, 60.0, 60.0]


def test_ejection_when_the_probe_is_answered_takes_several_failures_again():
    ejection, peers = ejection_of(10)
    end(ejection, peers[1], BAD, 5, 0.0)
    ejection.returned(peers[1], 10.0)
    end(ejection, peers[1], GOOD, 1, 10.0)
    assert end(ejection, peers[1], BAD, 5, 11.0) == [0, 0, 0, 0, 20.0]


def test_ejection_when_a_peer_stays_good_begins_anew():
    ejection, peers = ejection_of(10)
    end(ejection, peers[1], BAD, 5, 0.0)
    ejection.returned(peers[1], 10.0)
    end(ejection, peers[1], GOOD, 1, 10.0)
    end(ejection, peers[1], GOOD, 1, 20.1)
    assert end(ejection, peers[1], BAD, 5, 51.0)[-1] == 10.0


def test_ejection_when_all_fail_stops_at_its_share():
    ejection, peers = ejection_of(10)
    for peer in peers:
        end(ejection, peer, BAD, 6, 0.0)
    assert ejection.ejected_count == 3
    ejection.left(peers[0])
    assert (ejection.ejected_count, ejection.peers_count) == (2, 9)
    assert end(ejection, peers[5], BAD, 1, 0.0) == [0], "three of nine would be more than three tenths"


def test_ejection_when_an_old_failure_arrives_late_does_not_count_again():
    ejection, peers = ejection_of(10)
    end(ejection, peers[1], BAD, 5, 0.0)
    assert end(ejection, peers[1], BAD, 5, 1.0) == [0] * 5
    assert end(ejection, peers[2], Outcome.DISCONNECTED, 9, 1.0) == [0] * 9


STEPS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "good", "bad", "bad", "bad", "wait"]), st.integers(0, 12)), max_size=300
)


@settings(deadline=None)
@given(STEPS, st.floats(0.0, 1.0))
def test_ejection_when_anything_happens_never_makes_it_more_than_the_share(steps, share):
    ejection = OutlierEjection(Random(1), EjectionSettings(consecutive=1, away=AWAY, most_share=share))
    there, away, now = {}, {}, 0.0
    for kind, number in steps:
        if kind == "wait":
            now += number
            for peer_id in [peer_id for peer_id, until in away.items() if until <= now]:
                ejection.returned(there[peer_id], now)
                del away[peer_id]
        elif kind == "join":
            if number not in there:
                there[number] = peer_of(number)
                ejection.connected(there[number], now)
        elif number not in there:
            continue
        elif kind == "leave":
            ejection.left(there.pop(number))
            away.pop(number, None)
        elif seconds := ejection.ended(there[number], GOOD if kind == "good" else BAD, 0.1, now):
            assert number not in away
            assert kind == "bad"
            away[number] = now + seconds
            assert len(away) <= share * len(there)
        assert (ejection.ejected_count, ejection.peers_count) == (len(away), len(there))


@pytest.mark.parametrize("wrong", [{"consecutive": 0}, {"window_s": 0.0}, {"least_outcomes": 0}, {"most_share": 2.0}])
def test_settings_of_ejection_when_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EjectionSettings(**wrong)
