"""Outlier ejection: who is left out, for how long, and never more than a share."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.errors import ConfigError
from flowctl.outcomes.backoff import Backoff
from flowctl.scheduler.policies.ejection import EjectionSettings, OutlierEjection, Standing

AWAY = Backoff(first_s=10.0, factor=2.0, most_s=60.0, jitter=0.0)


def ejection_of(peers: int, **settings) -> OutlierEjection:
    ejection = OutlierEjection(EjectionSettings(away=AWAY, **settings), Random(1))
    for peer_id in range(peers):
        ejection.joined(peer_id, 0.0)
    return ejection


def fail(ejection, peer_id, times, now) -> list[bool]:
    return [ejection.ended(peer_id, now, good=False) for _ in range(times)]


def test_ejection_when_failures_follow_each_other_leaves_the_peer_out():
    """The fifth failure in a row ejects; a good answer in between begins anew."""
    ejection = ejection_of(10)
    fail(ejection, 1, 4, 0.0)
    ejection.ended(1, 0.0, good=True)
    assert fail(ejection, 1, 5, 0.0) == [False] * 4 + [True]
    assert ejection.standing(1) is Standing.EJECTED
    assert (len(ejection), ejection.next_deadline()) == (1, 10.0)


def test_ejection_when_the_success_rate_is_low_leaves_the_peer_out():
    """Failures between good answers eject by their rate, once there are enough."""
    ejection = ejection_of(10)
    for number in range(19):
        assert not ejection.ended(1, 1.0, good=number % 3 == 0)
    assert ejection.ended(1, 1.0, good=False)


def test_ejection_when_time_is_over_probes_and_then_restores():
    """A peer comes back on probation, and one good answer restores it."""
    ejection = ejection_of(10)
    fail(ejection, 1, 5, 0.0)
    assert ejection.take_due(9.9) == []
    assert ejection.take_due(10.0) == [1]
    assert ejection.standing(1) is Standing.PROBATION
    assert ejection.ended(1, 11.0, good=True)
    assert ejection.standing(1) is Standing.GOOD


def test_ejection_when_the_probe_fails_lasts_twice_as_long_up_to_the_most():
    """10, 20, 40, 60, 60 seconds; one failure on probation is enough."""
    ejection, now, lasted = ejection_of(10), 0.0, []
    fail(ejection, 1, 4, now)
    for _ in range(5):
        fail(ejection, 1, 1, now)
        lasted.append(ejection.next_deadline() - now)
        now = ejection.next_deadline()
        assert ejection.take_due(now) == [1]
    assert lasted == [10.0, 20.0, 40.0, 60.0, 60.0]


def test_ejection_when_a_peer_stays_good_begins_anew():
    """After as long without failure as it was away, the next ejection is a first one again."""
    ejection = ejection_of(10)
    fail(ejection, 1, 5, 0.0)
    ejection.take_due(10.0)
    fail(ejection, 1, 1, 10.0)
    ejection.take_due(30.0)
    ejection.ended(1, 30.0, good=True)
    ejection.ended(1, 51.0, good=True)
    fail(ejection, 1, 5, 51.0)
    assert ejection.next_deadline() == 61.0


def test_ejection_when_all_fail_stops_at_its_share():
    """Of ten peers that all fail, three are left out; those that fail on are looked at again when there is room."""
    ejection = ejection_of(10)
    for peer_id in range(10):
        fail(ejection, peer_id, 6, 0.0)
    assert len(ejection) == 3
    assert ejection.left(9) == [0]  # of nine, two
    assert ejection.standing(0) is Standing.PROBATION


def test_ejection_when_an_old_failure_arrives_late_does_not_count_again():
    """What was sent before the ejection has been judged by it."""
    ejection = ejection_of(10)
    fail(ejection, 1, 5, 0.0)
    assert fail(ejection, 1, 5, 1.0) == [False] * 5
    assert ejection.next_deadline() == 10.0


STEPS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "good", "bad", "bad", "bad", "wait"]), st.integers(0, 12)), max_size=300
)


@given(STEPS, st.floats(0.0, 1.0))
def test_ejection_when_anything_happens_never_exceeds_its_share(steps, share):
    """At most the share of those that are there is ejected, each has a time of return, and none is ejected for ever."""
    ejection = OutlierEjection(EjectionSettings(consecutive=1, away=AWAY, most_share=share), Random(1))
    there, now = set(), 0.0
    for kind, peer_id in steps:
        if kind == "join":
            ejection.joined(peer_id, now)
            there.add(peer_id)
        elif kind == "leave":
            ejection.left(peer_id)
            there.discard(peer_id)
        elif kind == "wait":
            now += peer_id
            ejection.take_due(now)
        else:
            ejection.ended(peer_id, now, good=kind == "good")
        ejected = {peer_id for peer_id in there if ejection.standing(peer_id) is Standing.EJECTED}
        assert len(ejected) == len(ejection) <= share * len(there)
        assert (ejection.next_deadline() is None) == (not ejected)
    ejection.take_due(now + 61)
    assert len(ejection) == 0


@pytest.mark.parametrize("wrong", [{"consecutive": 0}, {"window_s": 0.0}, {"least_outcomes": 0}, {"most_share": 2.0}])
def test_settings_of_ejection_when_out_of_range_are_refused(wrong):
    """An error names the field and the value."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EjectionSettings(**wrong)
