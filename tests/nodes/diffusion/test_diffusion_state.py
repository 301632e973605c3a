"""The state of object diffusion: the four changes, what a peer may do wrong, and what is left when it has gone."""

from __future__ import annotations

import copy
import re

import pytest
from diffusion_kit import check_index, decide, ids, numbers, peer, state_of

from flowctl.errors import ConfigError, FlowctlError, LimitExceededError, LocalProtocolError
from flowctl.nodes.diffusion import errors
from flowctl.nodes.diffusion.objects import short_id
from flowctl.nodes.diffusion.policy import Policy


def announced(*sizes):
    return list(zip(ids(*range(1, len(sizes) + 1)), sizes, strict=True))


def image(state, name="A"):
    item = state.peers[name]
    sets = (list(item.fifo), dict(item.available), dict(item.inflight), dict(item.owt))
    return (*sets, item.ids_in_flight, item.inflight_bytes, item.owt_bytes, state.inflight_count, state.held_bytes)


LIMITS = Policy(max_num_objects_inflight_per_peer=2, max_object_size_bytes=9, max_bytes_inflight_per_peer=9)
ASKED = peer([1, 2, 3], available=[], inflight=[1, 2, 3])


def sent(*keys, data=b"x"):
    return [(key, data) for key in ids(*keys)]


FAULTS = {
    "on_request_ids": [
        (peer([1]), (2, 1), "LocalProtocolError: .* 1 are open"),
        (peer([1]), (0, 0), "LocalProtocolError: .* asks for 0"),
        (peer([1]), (-1, 2), "LocalProtocolError: .* acknowledges -1"),
        (peer([1, 2]), (2, -1), "LocalProtocolError: .* asks for -1"),
        (peer([1, 2, 3]), (0, 98), "LocalProtocolError: 101 ids"),
        (peer([1, 2, 3]), (1, 99), "LocalProtocolError: 101 ids"),
    ],
    "on_receive_ids": [  # OD-24, then OD-26: available, in the FIFO, in flight, on the way, twice in one reply
        (peer(ids_in_flight=10), (1, announced(1, 1)), "ObjectIdsNotRequestedError: 2 ids came where 1 were asked for"),
        (
            peer([1], ids_in_flight=5),
            (5, announced(1)),
            "ObjectIdAlreadyKnownError: id 00000001 was announced a second",
        ),
        (peer([1], available=[], ids_in_flight=5), (5, announced(1)), "ObjectIdAlreadyKnownError: id 00000001"),
        (peer(inflight=[1], ids_in_flight=5), (5, announced(1)), "ObjectIdAlreadyKnownError: id 00000001"),
        (peer(owt=[1], ids_in_flight=5), (5, announced(1)), "ObjectIdAlreadyKnownError: id 00000001"),
        (peer(ids_in_flight=5), (5, announced(1) * 2), "ObjectIdAlreadyKnownError: id 00000001"),
        (peer(ids_in_flight=2), (2, [(b"", 1)]), "LimitExceededError: max_object_id_bytes"),
        (peer(ids_in_flight=2), (2, [(b"x" * 65, 1)]), "LimitExceededError: max_object_id_bytes"),
        (peer(ids_in_flight=2), (2, [(b"x", 10)]), "LimitExceededError: max_object_size_bytes"),
        (peer(ids_in_flight=2), (2, [(b"x", -1)]), "LimitExceededError: max_object_size_bytes"),
        (peer(ids_in_flight=2), (3, []), "LocalProtocolError: .* 2 are in flight"),
        (peer(ids_in_flight=2), (-1, []), "LocalProtocolError: .* 2 are in flight"),
    ],
    "on_request_objects": [  # OD-31
        (peer([1]), (ids(1, 9),), "LocalProtocolError: object 00000009 is not available"),
        (peer([1]), (ids(1, 1),), "LocalProtocolError: .* named twice"),
        (peer([1]), ([],), "LocalProtocolError: .* names none"),
        (peer([1, 2, 3]), (ids(1, 2, 3),), "LocalProtocolError: .* max_num_objects_inflight_per_peer"),
        (peer([1, 2], size=6), (ids(1, 2),), "LocalProtocolError: .* max_bytes_inflight_per_peer"),
    ],
    "on_receive_objects": [  # OD-28
        (ASKED, (ids(1, 2), sent(1)), "ObjectMissingError: object 00000002"),
        (ASKED, (ids(1, 2), []), "ObjectMissingError: object 00000001"),
        (ASKED, (ids(1, 2), sent(1, 2, 3)), "ObjectNotRequestedError: object 00000003"),
        (ASKED, (ids(1, 2), sent(1, 3)), "ObjectNotRequestedError: object 00000003"),
        (ASKED, (ids(1, 2), sent(1, 2, 2)), "ObjectNotRequestedError: object 00000002"),
        (ASKED, (ids(1), sent(1, data=b"")), "ObjectSizeWrongError: object 00000001 has 0 bytes, 1 were announced"),
        (ASKED, (ids(1), sent(1, data=b"xx")), "ObjectSizeWrongError: object 00000001 has 2 bytes, 1 were announced"),
        (peer([1]), (ids(1), sent(1)), "LocalProtocolError: object 00000001 is not in flight"),
    ],
}


@pytest.mark.parametrize(("change", "row"), [(change, row) for change, rows in FAULTS.items() for row in rows])
def test_change_when_it_breaks_a_rule_changes_nothing(change, row):
    known, arguments, fault = row
    state = state_of({"A": copy.deepcopy(known)}, LIMITS)
    before = image(state)
    with pytest.raises(FlowctlError) as caught:
        getattr(state, change)("A", *arguments)
    assert re.match(fault, f"{type(caught.value).__name__}: {caught.value}")
    assert image(state) == before
    check_index(state)


def test_on_request_ids_when_ids_are_acknowledged_drops_a_prefix():
    """Acknowledged ids leave the FIFO and what is available, those asked for are in flight (OD-29)."""
    state = state_of({"A": peer([1, 2, 3], available=[1, 3])})
    state.on_request_ids("A", 2, 3)
    item = state.peers["A"]
    assert (numbers(item.fifo), numbers(item.available), item.ids_in_flight) == ([3], [3], 3)
    check_index(state)


def test_on_receive_ids_when_fewer_come_frees_all_that_were_asked_for():
    state = state_of({"A": peer(ids_in_flight=13)})
    state.on_receive_ids("A", 10, announced(7, None))
    item = state.peers["A"]
    assert (item.ids_in_flight, numbers(item.fifo), list(item.available.values())) == (3, [1, 2], [7, None])
    check_index(state)


def test_on_receive_ids_when_another_peer_has_announced_the_same_is_right():
    state = state_of({"A": peer([1]), "B": peer(ids_in_flight=1)})
    state.on_receive_ids("B", 1, announced(1))
    assert numbers(state.peers["B"].available) == [1]
    check_index(state)


def test_on_receive_ids_when_the_pool_has_an_object_accepts_its_id_and_never_fetches_it():
    """An id that another peer's object has brought to the pool is acknowledged in its turn, not fetched (OD-27)."""
    state = state_of({"A": peer(ids_in_flight=3)})
    state.on_receive_ids("A", 3, announced(1, 1, 1))
    made = decide(state, pool=[1, 3])["A"]
    assert (made.ids_to_ack, numbers(made.objects_to_req_ids)) == (1, [2])
    state.on_request_objects("A", ids(2))
    state.on_receive_objects("A", ids(2), [(ids(2)[0], b"2")])
    made = decide(state, pool=[1, 3])["A"]
    assert (made.ids_to_ack, made.objects_to_req_ids, made.can_pipeline_ids_req) == (3, frozenset(), False)


def test_on_request_objects_when_they_are_available_puts_them_in_flight():
    """Objects asked for are available no longer, but in flight, with their octets (OD-31)."""
    state = state_of({"A": peer([1, 2, 3], size=5)})
    state.on_request_objects("A", ids(1, 2), now=7.0)
    item = state.peers["A"]
    assert (numbers(item.available), numbers(item.inflight)) == ([3], [1, 2])
    assert [entry.since for entry in item.inflight.values()] == [7.0, 7.0]
    assert (item.inflight_bytes, state.held_bytes, state.inflight_count) == (10, 10, 2)
    check_index(state)


def test_on_receive_objects_when_they_are_those_asked_for_puts_them_on_the_way():
    state = state_of({"A": peer([1, 2], available=[], inflight=[1, 2])})
    state.on_receive_objects("A", ids(1, 2), [(ids(2)[0], b"b"), (ids(1)[0], b"a")])
    item = state.peers["A"]
    assert (item.inflight, item.owt, state.inflight_count) == ({}, dict(zip(ids(2, 1), [b"b", b"a"], strict=True)), 0)
    assert (item.inflight_bytes, item.owt_bytes, state.held_bytes) == (0, 2, 2)
    check_index(state)
    state.on_pool_done("A", ids(1))
    assert (numbers(item.owt), item.owt_bytes, state.held_bytes) == ([2], 1, 1)
    state.on_pool_done("A", ids(1, 2))
    assert (item.owt, item.owt_bytes, state.held_bytes, state.objects) == ({}, 0, 0, {})


def test_on_receive_objects_when_two_requests_are_under_way_checks_the_one_it_answers():
    """A reply is checked against the ids of its own request, whatever was asked for since (OD-51)."""
    state = state_of({"A": peer([1, 2])})
    state.on_request_objects("A", ids(1))
    state.on_request_objects("A", ids(2))
    with pytest.raises(errors.ObjectNotRequestedError):
        state.on_receive_objects("A", ids(1), [(ids(2)[0], b"x")])
    state.on_receive_objects("A", ids(1), [(ids(1)[0], b"x")])
    assert (numbers(state.peers["A"].inflight), numbers(state.peers["A"].owt)) == ([2], [1])


def test_on_receive_objects_when_no_size_was_announced_keeps_room_for_the_largest():
    limits = Policy(max_object_size_bytes=100, max_bytes_inflight_per_peer=150)
    state = state_of({"A": peer([1, 2], size=None)}, limits)
    assert numbers(decide(state)["A"].objects_to_req_ids) == [1]
    state.on_request_objects("A", ids(1))
    assert state.held_bytes == 100
    with pytest.raises(LimitExceededError, match="max_object_size_bytes is 101, the limit is 100"):
        state.on_receive_objects("A", ids(1), [(ids(1)[0], bytes(101))])
    state.on_receive_objects("A", ids(1), [(ids(1)[0], bytes(3))])
    assert state.held_bytes == 3
    check_index(state)


def test_changes_when_the_peer_is_gone_are_our_fault_but_for_the_pool():
    state = state_of({})
    for change in (
        lambda: state.on_request_ids("A", 0, 1),
        lambda: state.on_receive_ids("A", 0, []),
        lambda: state.on_request_objects("A", ids(1)),
        lambda: state.on_receive_objects("A", [], []),
    ):
        with pytest.raises(LocalProtocolError, match="peer 'A' is not registered"):
            change()
    state.on_pool_done("A", ids(1))
    assert state.peers == {}


def test_register_when_the_peer_is_there_is_refused():
    state = state_of({"A": peer()})
    with pytest.raises(LocalProtocolError, match="registered already"):
        state.register("A")
    state.unregister("A")
    state.unregister("A")
    assert state.register("A").slot == 0


def test_unregister_when_work_is_under_way_leaves_nothing_behind():
    state = state_of({"A": peer([1, 2], inflight=[3], owt=[4], size=9), "B": peer([2])})
    assert (state.inflight_count, state.held_bytes) == (1, 18)
    state.unregister("A")
    assert (numbers(state.objects), state.inflight_count, state.held_bytes) == ([2], 0, 0)
    check_index(state)
    assert state.register("C").slot == 0
    state.unregister("B")
    state.unregister("C")
    assert (state.objects, state.peers) == ({}, {})


def test_penalty_when_objects_come_late_grows_and_is_forgotten():
    state = state_of({"A": peer([1, 2, 3])}, Policy(inflight_timeout_s=2.0))
    state.on_request_objects("A", ids(1, 2), now=10.0)
    state.on_request_objects("A", ids(3), now=11.0)
    state.on_receive_objects("A", ids(1, 2), [(key, b"x") for key in ids(1, 2)], now=12.0)
    state.on_receive_objects("A", ids(3), [(ids(3)[0], b"x")], now=12.9)
    item = state.peers["A"]
    assert [item.penalty_now(now) for now in (12.0, 17.0, 32.0, 99.0)] == [1.0, 0.5, 0.0, 0.0]


def test_next_timeout_when_objects_are_in_flight_is_the_first_to_come():
    state = state_of({"A": peer([1, 2]), "B": peer([1])}, Policy(inflight_timeout_s=2.0))
    assert state.next_timeout(0.0) is None
    state.on_request_objects("A", ids(1), now=1.0)
    state.on_request_objects("B", ids(1), now=2.0)
    state.on_request_objects("A", ids(2), now=2.5)
    assert [state.next_timeout(now) for now in (2.5, 3.0, 4.0, 4.5)] == [3.0, 4.0, 4.5, None]
    never = state_of({"A": peer([1], available=[], inflight=[1])}, Policy(inflight_timeout_s=0.0))
    assert never.next_timeout(0.0) is None


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_num_objects_outstanding": 0}, "max_num_objects_outstanding is 0, it must be 1 to 65535"),
        ({"max_num_ids_req": 65_536}, "max_num_ids_req is 65536, it must be 1 to 65535"),
        ({"target_object_redundancy": 0}, "target_object_redundancy is 0"),
        ({"max_object_id_bytes": 1025}, "it must be 1 to 1024"),
        ({"max_bytes_inflight_per_peer": 1}, "it must be max_object_size_bytes"),
        ({"max_bytes_inflight_total": 1_999_999}, "larger objects could never be fetched"),
        ({"inflight_timeout_s": -1.0}, "0.001 or more, or 0"),
        ({"rarest_first": 1}, "rarest_first is 1"),
    ],
)
def test_policy_when_a_value_is_out_of_range_names_it(settings, text):
    with pytest.raises(ConfigError, match=text):
        Policy(**settings)


def test_short_id_when_a_peer_sends_a_long_id_stays_short():
    assert [short_id(key) for key in (b"", b"\x00\xff", b"\n" * 1000)] == ["(empty)", "00ff", "0a" * 8 + "..."]
