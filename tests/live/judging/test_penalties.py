"""What addresses may do in a time, and what follows when they do more; by a manual clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.errors import ConfigError
from flowctl.live.judging.penalties import (
    FIRST_PENALTY_S,
    HALF_LIFE_S,
    LONGEST_PENALTY_S,
    MILD_PENALTY_S,
    NETWORK_TIMES,
    Allowance,
    Offence,
    Penalties,
    PenaltyLimits,
    length_of,
    networks_of,
    sentence,
)

TEN = Allowance(10, 100)
FEW = PenaltyLimits(connections=TEN, refused=TEN, commands=TEN, control=TEN, limits=TEN)
ONE = "203.0.113.7"


def overflow(penalties, address, now, offence=Offence.REFUSED):
    """Fill a bucket at one moment until it overflows; return the overflow of the address."""
    for _ in range(11):
        for overflow in penalties.charge(address, offence, 1, now):
            if not overflow.wide:
                return overflow
    raise AssertionError("it did not overflow")


def test_bucket_when_more_is_done_than_allowed_overflows_once():
    penalties = Penalties(FEW)
    for _ in range(10):
        assert penalties.charge(ONE, Offence.REFUSED, 1, 0.0, "login") == []
    (overflow,) = penalties.charge(ONE, Offence.REFUSED, 1, 0.0, "play")
    assert (overflow.cidr, overflow.repeats, overflow.wide) == (f"{ONE}/32", 1, False)
    assert overflow.evidence == {"login": 10.0, "play": 1.0}
    assert penalties.charge(ONE, Offence.REFUSED, 1, 0.0) == []


def test_buckets_when_offences_differ_are_apart():
    penalties = Penalties(FEW)
    assert all(penalties.charge(ONE, offence, 1, 0.0) == [] for offence in Offence for _ in range(9))


def test_sentence_when_it_goes_on_is_a_limit_then_bans_that_grow():
    """First few may come, then nobody, each time for twice as long, and never for more than a day."""
    penalties = Penalties(FEW)
    found = [sentence(overflow(penalties, ONE, float(n)), 0) for n in range(12)]
    assert [item.ban for item in found] == [False] + 11 * [True]
    assert [item.length_s / FIRST_PENALTY_S for item in found[:4]] == [1, 1, 2, 4]
    assert found[-1].length_s == LONGEST_PENALTY_S
    assert "repeat 2" in found[2].reason


def test_sentence_when_it_was_long_ago_is_forgiven():
    penalties = Penalties(FEW)
    for n in range(4):
        overflow(penalties, ONE, float(n))
    assert overflow(penalties, ONE, 4 + HALF_LIFE_S).repeats == 3
    assert overflow(penalties, ONE, 4 + 8 * HALF_LIFE_S).repeats == 1


def test_sentence_when_others_behave_there_is_a_limit_that_says_so():
    """Nobody is banned for a neighbour: the reason has how many there are."""
    penalties = Penalties(FEW)
    overflow(penalties, ONE, 0.0)
    found = sentence(overflow(penalties, ONE, 1.0), 3)
    assert not found.ban
    assert "shared: 3 other connections of it behave" in found.reason
    assert len(found.reason) <= 200


def test_sentence_when_the_offence_is_mild_is_short_and_makes_nothing_a_repeat():
    penalties = Penalties(FEW)
    for n in range(20):
        found = sentence(overflow(penalties, ONE, float(n), Offence.CONNECTIONS), 0)
        assert (found.ban, found.length_s) == (False, MILD_PENALTY_S)
        assert "repeat" not in found.reason
    found = sentence(overflow(penalties, ONE, 30.0), 0)
    assert (found.ban, found.length_s) == (False, FIRST_PENALTY_S)


@pytest.mark.parametrize("block", ["203.0.113.{}", "2001:db8:1:{:x}::9"])
def test_network_when_many_of_its_addresses_offend_a_little_is_found(block):
    penalties = Penalties(FEW)
    wide = [
        overflow
        for n in range(1, 100)
        for overflow in penalties.charge(block.format(n), Offence.REFUSED, 5, 0.0)
        if overflow.wide
    ]
    assert wide[0].cidr == networks_of(block.format(1))[1]
    assert len(wide) == 99 * 5 // (10 * NETWORK_TIMES + 5)


def test_network_when_one_address_offends_for_hours_is_left_alone():
    penalties = Penalties(FEW)
    found = [overflow for n in range(36_000) for overflow in penalties.charge(ONE, Offence.REFUSED, 1, float(n))]
    assert found
    assert not any(overflow.wide for overflow in found)


def test_addresses_when_there_are_more_than_are_remembered_forget_the_least_guilty():
    """Memory is bounded, and a flood of strangers does not wash out who has been punished before."""
    penalties = Penalties(FEW, most=64)
    overflow(penalties, ONE, 0.0)
    for n in range(10_000):
        penalties.charge(f"10.{n >> 8}.{n & 255}.1", Offence.REFUSED, 1, 1.0)
    assert len(penalties._addresses._records) == len(penalties._networks._records) == 64
    assert overflow(penalties, ONE, 2.0).repeats == 2


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("192.0.2.7", ("192.0.2.7/32", "192.0.2.0/24")),
        ("::ffff:192.0.2.7", ("192.0.2.7/32", "192.0.2.0/24")),
        ("64:ff9b::cb00:7105", ("203.0.113.5/32", "203.0.113.0/24")),
        ("2001:db8:1:2:3::4%eth0", ("2001:db8:1:2::/64", "2001:db8:1::/48")),
        ("", None),
        ("/run/socket", None),
    ],
)
def test_networks_when_addresses_are_written_in_any_way_are_those_of_ban_lists(address, expected):
    assert networks_of(address) == expected
    assert (Penalties(FEW).charge(address, Offence.REFUSED, 99, 0.0) == []) == (expected is None)


@pytest.mark.parametrize(("count", "period_s"), [(-1, 1), (float("nan"), 1), (1, 0), (1, float("inf")), (2e9, 1)])
def test_allowance_when_it_is_out_of_range_is_refused(count, period_s):
    with pytest.raises(ConfigError, match="an allowance is"):
        Allowance(count, period_s)


def test_penalties_when_they_are_off_count_nothing():
    assert Offence.COMMANDS not in PenaltyLimits(commands=Allowance(0, 1)).allowances_in_force()
    off = PenaltyLimits(limits=Allowance(0, 1))
    assert Penalties(off).charge(ONE, Offence.LIMITS, 1e9, 0.0) == []


CHARGE = st.tuples(
    st.sampled_from([ONE, "203.0.113.8", "198.51.100.1", "2001:db8::1"]),
    st.sampled_from(list(Offence)),
    st.floats(0.01, 30),
    st.floats(0, 200),
)


@settings(max_examples=150)
@given(st.lists(CHARGE, max_size=60))
def test_penalties_when_anything_happens_punish_only_who_did_more_than_allowed(history):
    penalties, now = Penalties(FEW), 0.0
    done = {}
    for address, offence, amount, passed_s in history:
        now += passed_s
        own, network = networks_of(address)
        for cidr in (own, network):
            done[cidr, offence] = done.get((cidr, offence), 0.0) + amount
        for overflow in penalties.charge(address, offence, amount, now):
            most = 10 * (NETWORK_TIMES if overflow.wide else 1)
            assert done[overflow.cidr, offence] > most
            assert overflow.cidr in {own, network}
            assert FIRST_PENALTY_S <= length_of(overflow.repeats) <= LONGEST_PENALTY_S
            assert sum(overflow.evidence.values()) > 0
            done[overflow.cidr, offence] = 0.0


@settings(max_examples=60)
@given(st.lists(st.floats(0.0, 3600), min_size=1, max_size=200))
def test_penalties_when_tries_come_no_faster_than_the_rate_never_punish(pauses):
    """Whatever the pauses between them, one per tenth of the time is never too many."""
    penalties, now = Penalties(FEW), 0.0
    for pause_s in pauses:
        now += 10.0 + pause_s
        assert penalties.charge(ONE, Offence.REFUSED, 1, now) == []


# -- honest crowds, by the defaults


def obs_tries():
    """Yield when OBS tries again with a wrong key: after 2 s, each pause half as long again, 25 times."""
    now, pause_s = 0.0, 2.0
    for _ in range(25):
        yield now
        now, pause_s = now + pause_s, min(pause_s * 1.5, 900.0)


def test_defaults_when_encoders_have_a_wrong_key_for_hours_punish_nobody():
    """OBS gives up after 25 tries, a shell loop around FFmpeg tries each second: neither is an attack."""
    penalties = Penalties(PenaltyLimits())
    for now in obs_tries():
        assert penalties.charge(ONE, Offence.REFUSED, 1, now) == []
        assert penalties.charge(ONE, Offence.CONNECTIONS, 1, now) == []
    for n in range(7200):
        for offence in (Offence.REFUSED, Offence.CONNECTIONS, Offence.LIMITS):
            assert penalties.charge("198.51.100.8", offence, 1, float(n)) == []


def test_defaults_when_two_hundred_viewers_behind_one_router_come_back_at_once_punish_nobody():
    penalties = Penalties(PenaltyLimits())
    outside, tokens = 200, 40.0
    for second in range(600):
        admitted = min(outside, int(tokens), max(0, 64 - (200 - outside)))
        tokens = min(40.0, tokens - admitted + 20)
        outside -= admitted
        by_rate = outside if 200 - outside < 64 else 0  # then it is their number, which is no offence
        for offence, amount in ((Offence.CONNECTIONS, by_rate), (Offence.COMMANDS, 8 * admitted)):
            if amount:
                assert penalties.charge(ONE, offence, amount, float(second)) == []
        assert penalties.charge(ONE, Offence.CONTROL, 64, float(second)) == []
