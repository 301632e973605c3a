"""Who may connect: limits in all, per address and per second, and that every place is free again in the end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.server import admission as admission_module
from flowctl.core.server.admission import Admission, AdmissionLimits, descriptor_limit
from flowctl.core.server.bans import LIMITED_BURST, LIMITED_NEW_PER_S, Ban, BanAction, BanList
from flowctl.core.server.proxyheader import TrustedProxies
from flowctl.errors import ConfigError, LimitExceededError

OPEN = {"connections_per_address": 0, "new_per_address_and_s": 0.0}


def refused(admission, address, now):
    try:
        admission.enter(address, now)
    except LimitExceededError as error:
        return error
    return None


def test_enter_when_the_total_is_reached_is_refused_until_one_leaves():
    admission = Admission(AdmissionLimits(connections=1000, **OPEN))
    for _ in range(3):
        for number in range(1000):
            admission.enter(f"a{number % 7}", 0.0)
        error = refused(admission, "b", 0.0)
        assert (error.limit, error.value, error.maximum) == ("connections", 1001, 1000)
        for number in range(1000):
            admission.leave(f"a{number % 7}")
        assert admission.connections == 0
    assert admission.refused == {"connections": 3}


@pytest.mark.parametrize(
    ("one", "two", "three", "other"),
    [
        ("a", "a", "a", "b"),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::2%eth0", "2001:db8:1:2:3:4:5:6", "2001:db8:1:3::1"),
        ("::ffff:192.0.2.1", "192.0.2.1", "192.0.2.1", "192.0.2.2"),
    ],
)
def test_enter_when_the_address_is_full_concerns_that_address_only(one, two, three, other):
    admission = Admission(AdmissionLimits(connections_per_address=2, new_per_address_and_s=0.0))
    admission.enter(one, 0.0)
    admission.enter(two, 0.0)
    error = refused(admission, three, 0.0)
    assert (error.limit, error.value, error.maximum) == ("connections_per_address", 3, 2)
    assert refused(admission, other, 0.0) is None
    admission.leave(one)
    assert refused(admission, three, 0.0) is None


def test_enter_when_too_fast_is_refused_after_the_burst_and_recovers_with_time():
    admission = Admission(AdmissionLimits(connections_per_address=0, new_per_address_and_s=10.0, burst_per_address=5))
    assert [refused(admission, "a", 1.0) is None for _ in range(7)] == [True] * 5 + [False] * 2
    error = refused(admission, "a", 1.0)
    assert (error.limit, error.value, error.maximum) == ("new_per_address_and_s", 8, 10.0)
    assert "8 attempts in this second, the limit is 10 after a burst of 5" in str(error)
    assert [refused(admission, "a", 1.25) is None for _ in range(3)] == [True, True, False]
    assert [refused(admission, "a", 100.0) is None for _ in range(6)] == [True] * 5 + [False]
    assert refused(admission, "b", 100.0) is None


def test_enter_when_it_costs_less_or_gives_back_leaves_room_for_more():
    """Connections of HTTP cost an eighth, and nothing once they have borne fruit; no more than a burst is saved up."""
    admission = Admission(AdmissionLimits(connections_per_address=0, new_per_address_and_s=1.0, burst_per_address=2))
    for _ in range(16):
        admission.enter("a", 0.0, 0.125)
    with pytest.raises(LimitExceededError):
        admission.enter("a", 0.0, 0.125)
    for _ in range(100):
        admission.give_back("a", 0.125)
        admission.enter("a", 0.0, 0.125)
    for _ in range(100):
        admission.give_back("a", 0.125)
    assert [refused(admission, "a", 0.0) for _ in range(3)][:2] == [None, None]
    assert refused(admission, "a", 0.0) is not None
    admission.give_back("never seen", 0.125)


def test_enter_when_refused_counts_nothing_but_the_refusal():
    admission = Admission(AdmissionLimits(connections=1, **OPEN))
    admission.enter("a", 0.0)
    for _ in range(10):
        assert refused(admission, "b", 0.0) is not None
    admission.leave("b")
    assert admission.connections == 1
    admission.leave("a")
    assert refused(admission, "b", 0.0) is None


def test_enter_when_the_network_is_limited_has_one_slow_bucket_for_all_its_addresses():
    admission = Admission(AdmissionLimits(**OPEN), wall=lambda: 0.0)
    admission.bans = BanList([Ban(cidr="2001:db8:0:1::/64", expires=None, action=BanAction.LIMIT)])
    came = [refused(admission, f"2001:db8:0:1::{number:x}", 0.0) for number in range(LIMITED_BURST + 3)]
    assert [error is None for error in came] == [True] * LIMITED_BURST + [False] * 3
    assert (came[-1].limit, came[-1].maximum) == ("limited", LIMITED_NEW_PER_S)
    assert refused(admission, "2001:db8:0:2::1", 0.0) is None
    later = [refused(admission, "2001:db8:0:1::99", 1.0) is None for _ in range(4)]
    assert sum(later) == LIMITED_NEW_PER_S
    assert admission.refused == {"limited": 5}


def test_enter_when_the_address_is_banned_is_refused_whatever_a_limit_says():
    admission = Admission(AdmissionLimits(**OPEN), wall=lambda: 0.0)
    limit = Ban(cidr="192.0.2.7", expires=None, action=BanAction.LIMIT)
    admission.bans = BanList([limit, Ban(cidr="192.0.2.0/24", expires=None, reason="by hand")])
    error = refused(admission, "192.0.2.7", 0.0)
    assert (error.limit, str(error)) == ("banned", "banned: 192.0.2.0/24, score 0, by hand, until it is lifted")


def test_enter_when_a_trusted_proxy_is_on_the_list_lets_it_in():
    """Everybody comes through a proxy, so no list keeps it out or slows it down."""
    admission = Admission(AdmissionLimits(**OPEN), wall=lambda: 0.0, trusted=TrustedProxies(["192.0.2.0/24"]))
    admission.bans = BanList([Ban(cidr="192.0.2.7", expires=None), Ban(cidr="198.51.100.7", expires=None)])
    assert refused(admission, "192.0.2.7", 0.0) is None
    assert refused(admission, "198.51.100.7", 0.0).limit == "banned"


def test_leave_when_it_never_entered_changes_nothing():
    admission = Admission(AdmissionLimits(connections=2, **OPEN))
    admission.enter("a", 0.0)
    for address in ("x", "a", "a", "a"):
        admission.leave(address)
    assert admission.connections == 0


def test_addresses_when_too_many_forget_those_seen_longest_ago(monkeypatch):
    monkeypatch.setattr(admission_module, "_MOST_ADDRESSES", 100)
    admission = Admission(AdmissionLimits(connections=50, connections_per_address=1, new_per_address_and_s=0.0))
    admission.enter("stays", 0.0)
    for number in range(5000):
        admission.enter(f"a{number}", float(number))
        admission.leave(f"a{number}")
    assert len(admission._addresses) == 100
    assert refused(admission, "stays", 5000.0).limit == "connections_per_address"
    assert "a4999" in admission._addresses


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.floats(0, 0.2)), max_size=80))
def test_counts_when_anything_happens_are_those_of_a_simple_model(steps):
    limits = AdmissionLimits(connections=5, connections_per_address=3, new_per_address_and_s=20.0, burst_per_address=2)
    admission, inside, now = Admission(limits), [], 0.0
    for enters, address, pause in steps:
        now += pause
        if enters:
            error = refused(admission, address, now)
            if error is None:
                inside.append(address)
            elif error.limit == "connections":
                assert len(inside) == 5
            elif error.limit == "connections_per_address":
                assert inside.count(address) == 3
        elif address in inside:
            inside.remove(address)
            admission.leave(address)
        assert admission.connections == len(inside) <= 5
        assert all(inside.count(item) <= 3 for item in "abc")


@pytest.mark.parametrize(
    "name", ["connections", "connections_per_address", "new_per_address_and_s", "burst_per_address"]
)
def test_limits_when_negative_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"{name} is -1, it must be 0"):
        AdmissionLimits(**{name: -1})
    assert AdmissionLimits(**{name: 0})


def test_connections_when_zero_follow_the_limit_of_open_files():
    assert Admission(AdmissionLimits())._most == descriptor_limit() >= 16
