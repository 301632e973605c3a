"""Who is written where not all can be: an address that has many gives way to one that has fewer."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from flowctl.errors import LimitExceededError
from flowctl.live.remux.shares import Places


def taken(places, names, address, most):
    return [places.take(name, address, most) for name in names]


def test_places_when_there_are_any_go_to_who_comes():
    places = Places()
    assert taken(places, "abcdef", "192.0.2.1", 6) == [None] * 6
    with pytest.raises(LimitExceededError, match="no address has more"):
        places.take("g", "192.0.2.1", 6)
    places.free("b")
    assert places.take("g", "192.0.2.1", 6) is None


def test_places_when_none_is_left_go_from_who_has_most_to_who_has_fewer_and_never_back():
    places = Places()
    taken(places, "abcd", "192.0.2.1", 6)
    taken(places, "ef", "198.51.100.1", 6)
    assert places.take("x", "203.0.113.1", 6) == "d"
    assert places.take("y", "203.0.113.1", 6) == "c"
    for address in ("192.0.2.1", "198.51.100.1", "203.0.113.1"):  # all have two
        with pytest.raises(LimitExceededError):
            places.take("z", address, 6)
    assert places.take("z", "100.64.0.1", 6) in {"b", "f", "y"}  # the newest of any that has most


def test_places_when_a_network_has_many_addresses_are_shared_with_it():
    """Each /64 of a /48 has one place, and together they are one that has many."""
    places = Places()
    for number in range(40):
        places.take(number, f"2001:db8:1:{number:x}::1", 40)
    assert places.take("x", "192.0.2.1", 40) in range(40)
    assert places.take("y", "192.0.2.1", 40) in range(40)
    assert len(places) == 40


def test_places_when_an_abuser_is_a_neighbour_go_from_him_first():
    """His addresses have two each, one behind the other; a neighbour of theirs is the newest, and has one."""
    places = Places()
    for number in range(20):
        taken(places, [(number, "a"), (number, "b")], f"192.0.2.{number}", 40)
    for name in ("neighbour", "another"):  # of the same network: they get what he has too much of
        assert places.take(name, f"192.0.2.2{len(name)}", 40)[1] == "b"
    assert all(places.take(number, "203.0.113.1", 40)[1] == "b" for number in range(4))
    with pytest.raises(LimitExceededError):  # it would have as many as any other address of its network
        places.take("more", "192.0.2.29", 40)


def test_places_when_all_of_a_network_have_one_do_not_always_go_from_the_newest():
    def loses():
        places = Places(rng=draw)
        for number in range(20):
            places.take(number, f"192.0.2.{number}", 20)
        return places.take("x", "203.0.113.1", 20)

    draw = random.Random(7)
    assert len({loses() for _ in range(60)}) > 10


def test_places_when_a_stream_comes_from_another_server_are_its_own():
    places = Places()
    taken(places, "abc", "", 3)
    with pytest.raises(LimitExceededError):
        places.take("x", "192.0.2.1", 3)


def test_places_when_many_come_and_go_are_as_even_as_they_can_be():
    draw, places, owners = random.Random(7), Places(), {}
    addresses = [f"192.0.{number}.1" for number in range(6)]
    for number in range(2000):
        address = draw.choice(addresses[: draw.randint(1, 6)])
        before = Counter(owners.values())
        try:
            victim = places.take(number, address, 20)
        except LimitExceededError:
            assert len(owners) == 20
            assert max(before.values()) <= before[address] + 1
        else:
            if victim is not None:
                assert before[owners.pop(victim)] == max(before.values()) > before[address] + 1
            owners[number] = address
        if draw.random() < 0.2:
            gone = draw.choice(sorted(owners))
            del owners[gone]
            places.free(gone)
        assert len(places) == len(owners) <= 20
