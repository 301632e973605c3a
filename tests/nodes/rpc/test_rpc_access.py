"""Who may do what: the order of refusals, service nodes, new connections; pure, with a manual clock."""

from __future__ import annotations

import itertools

import pytest

from flowctl.errors import ConfigError, LocalProtocolError
from flowctl.nodes.rpc.access.access import (
    Access,
    AuthLevel,
    ServiceNodes,
    checked_keys,
    is_claimed,
    key_route,
    refusal_code,
)
from flowctl.nodes.rpc.access.admission import (
    BURST_PER_ADDRESS,
    MOST_ADDRESSES,
    NEW_PER_ADDRESS_AND_S,
    AddressRates,
    RpcAdmission,
)
from flowctl.wire.zmtp.mechanism import RefusedError

KEY, OTHER = bytes(32), bytes(range(32))
LEVELS = (AuthLevel.NONE, AuthLevel.BASIC, AuthLevel.ADMIN)


def test_command_when_several_things_are_wrong_is_refused_for_the_first_in_order():
    """The level comes before the state of this node, that before the caller's, and the tag last (OX-63)."""
    access = Access(AuthLevel.ADMIN, remote_sn=True, local_sn=True)
    order = [
        (AuthLevel.BASIC, False, False, None, b"FORBIDDEN"),
        (AuthLevel.BASIC, True, True, b"tag", b"FORBIDDEN"),
        (AuthLevel.ADMIN, False, False, None, b"NOT_A_SERVICE_NODE"),
        (AuthLevel.ADMIN, True, False, b"tag", b"NOT_A_SERVICE_NODE"),
        (AuthLevel.ADMIN, False, True, None, b"FORBIDDEN_SN"),
        (AuthLevel.ADMIN, True, True, None, b"NO_REPLY_TAG"),
        (AuthLevel.ADMIN, True, True, b"tag", None),
    ]
    found = [
        refusal_code(access, auth, remote_sn=remote, local_sn=local, is_request=True, tag=tag)
        for auth, remote, local, tag, _ in order
    ]
    assert [code for *_, code in order] == found


@pytest.mark.parametrize(("needed", "has"), list(itertools.product(LEVELS, LEVELS)))
def test_levels_when_compared_include_those_below(needed, has):
    for remote, local, request in itertools.product((False, True), repeat=3):
        code = refusal_code(
            Access(needed), has, remote_sn=remote, local_sn=local, is_request=request, tag=b"" if request else None
        )
        assert code == (None if has >= needed else b"FORBIDDEN")


def test_access_when_it_asks_for_no_level_of_a_connection_is_an_error():
    for wrong in (AuthLevel.DENIED, 1, True, "admin", None):
        with pytest.raises(ConfigError, match="AuthLevel"):
            Access(wrong)


def test_routes_when_they_are_keys_of_others_are_claims():
    assert is_claimed(key_route(OTHER), KEY)
    assert not is_claimed(key_route(KEY), KEY)
    assert not is_claimed(key_route(OTHER), b"")
    assert not is_claimed(b"anything", KEY)
    assert not is_claimed(key_route(OTHER) + b"x", KEY)


def test_service_nodes_when_changed_tell_who_is_gone():
    nodes, keys = ServiceNodes(), [bytes([number]) * 32 for number in range(5)]
    assert nodes.replace(frozenset(keys[:3])) == frozenset()
    assert nodes.update(frozenset(keys[3:4]), frozenset([keys[0], keys[3], keys[4]])) == {keys[0]}
    assert [key in nodes for key in keys] == [False, True, True, True, False]
    assert nodes.replace(frozenset(keys[:2])) == {keys[2], keys[3]}
    assert nodes.active == set(keys[:2])


@pytest.mark.parametrize("wrong", [b"", bytes(31), bytes(33), "00" * 32, None])
def test_service_nodes_when_one_key_is_none_are_refused_as_a_whole(wrong):
    with pytest.raises(ConfigError, match="set_active_sns: a public key"):
        checked_keys([KEY, wrong], "set_active_sns")


class Door:
    """A listener's hook that notes what it was asked."""

    def __init__(self, answer: object) -> None:
        self.answer, self.asked = answer, []

    def __call__(self, address: str, pubkey: bytes, is_sn: bool) -> object:
        self.asked.append((address, pubkey, is_sn))
        return self.answer


def admission(door: Door, *, curve: bool = True, now: list[float] | None = None) -> tuple[RpcAdmission, ServiceNodes]:
    nodes, clock = ServiceNodes(), now or [0.0]
    made = RpcAdmission(nodes, lambda: clock[0])
    made.open(3, curve=curve, allow=door)
    return made, nodes


def told(made: RpcAdmission, *asked: object) -> bytes | None:
    """Return what a connection is told that is refused. None: it is let in."""
    try:
        made.decide(*asked)
    except RefusedError as refusal:
        return refusal.told
    return None


def test_connection_when_allowed_gets_its_level():
    """The hook is told address, key and whether that is an active service node at this moment (OX-68)."""
    door = Door(AuthLevel.ADMIN)
    made, nodes = admission(door)
    nodes.replace(frozenset([OTHER]))
    assert [made.decide(3, "10.0.0.1", key) for key in (KEY, OTHER)] == [AuthLevel.ADMIN] * 2
    assert door.asked == [("10.0.0.1", KEY, False), ("10.0.0.1", OTHER, True)]


@pytest.mark.parametrize("answer", [None, AuthLevel.DENIED])
def test_connection_when_denied_is_not_let_in(answer):
    """Both ways of saying no are no (OX-68)."""
    made, _ = admission(Door(answer))
    assert told(made, 3, "10.0.0.1", KEY) == b"400"


@pytest.mark.parametrize("answer", [True, False, 0, 2, "admin", object()])
def test_connection_when_the_hook_returns_no_level_is_an_error(answer):
    """What is no AuthLevel lets nobody in: True would be BASIC by its number."""
    made, _ = admission(Door(answer))
    with pytest.raises(LocalProtocolError, match="AuthLevel"):
        made.decide(3, "10.0.0.1", KEY)


def test_connection_when_its_listener_is_unknown_closed_or_of_the_other_kind_is_not_let_in():
    door = Door(AuthLevel.ADMIN)
    made, _ = admission(door)
    made.open(4, curve=False, allow=door)
    assert [told(made, 3, "a", b""), told(made, 4, "a", KEY), told(made, 5, "a", KEY)] == [b"400"] * 3
    made.close(3)
    assert told(made, 3, "a", KEY) == b"400"
    assert door.asked == []


def test_connections_when_one_address_floods_are_put_off_and_others_are_not():
    now, door = [0.0], Door(AuthLevel.NONE)
    made, _ = admission(door, now=now)
    answers = [told(made, 3, f"2001:db8::{number:x}", KEY) for number in range(BURST_PER_ADDRESS + 10)]
    assert answers[BURST_PER_ADDRESS:] == [b""] * 10
    assert (made.too_many_count, len(door.asked)) == (10, BURST_PER_ADDRESS)
    assert told(made, 3, "2001:db8:0:1::1", KEY) is None
    now[0] += 1 / NEW_PER_ADDRESS_AND_S
    assert [told(made, 3, "2001:db8::1", KEY) for _ in range(2)] == [None, b""]


def test_rates_when_a_flood_comes_from_everywhere_remember_a_bounded_number():
    rates = AddressRates(1.0, 1)
    assert rates.take("stays", 0.0)
    for number in range(MOST_ADDRESSES + 5):
        rates.take(f"flood {number}", 0.0)
        if number % 1000 == 0:
            assert not rates.take("stays", 0.0)
    assert len(rates) == MOST_ADDRESSES


def test_rates_when_the_clock_goes_back_give_nothing_away():
    rates = AddressRates(1.0, 1)
    assert [rates.take("a", now) for now in (10.0, 5.0, 5.9, 6.0)] == [True, False, False, True]
