"""The state of object diffusion: the four changes, what a peer may do wrong, and what is left when it has gone."""

from __future__ import annotations

import pytest
from diffusion_kit import check_index, decide, ids, numbers, peer, state_of

from flowctl.errors import ConfigError, LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.nodes.diffusion import errors
from flowctl.nodes.diffusion.objects import short_id
from flowctl.nodes.diffusion.policy import Policy


def announced(*sizes):
    return list(zip(ids(*range(1, len(sizes) + 1)), sizes, strict=True))


def image(state, name="A"):
    item = state.peers[name]
    sets = (list(item.fifo), dict(item.available), dict(item.inflight), dict(item.owt))
    return (*sets, item.ids_in_flight, item.inflight_bytes, item.owt_bytes, state.inflight_count, state.held_bytes)


def test_on_request_ids_when_ids_are_acknowledged_drops_a_prefix():
    """Acknowledged ids leave the FIFO and what is available, those asked for are in flight (OD-29)."""
    state = state_of({"A": peer([1, 2, 3], available=[1, 3])})
    state.on_request_ids("A", 2, 3)
    item = state.peers["A"]
    assert (numbers(item.fifo), numbers(item.available), item.ids_in_flight) == ([3], [3], 3)
    check_index(state)


@pytest.mark.parametrize(("ack", "req"), [(4, 1), (0, 0), (-1, 2), (2, -1), (0, 98), (1, 99)])
def test_on_request_ids_when_the_request_breaks_a_rule_changes_nothing(ack, req):
    state = state_of({"A": peer([1, 2, 3])})
    before = image(state)
    with pytest.raises(LocalProtocolError):
        state.on_request_ids("A", ack, req)
    assert image(state) == before


def test_on_receive_ids_when_fewer_come_frees_all_that_were_asked_for():
    state = state_of({"A": peer(ids_in_flight=13)})
    state.on_receive_ids("A", 10, announced(7, None))
    item = state.peers["A"]
    assert (item.ids_in_flight, numbers(item.fifo), list(item.available.values())) == (3, [1, 2], [7, None])
    check_index(state)


def test_on_receive_ids_when_more_come_than_asked_for_is_a_fault():
    """A reply with more ids than its request asked for is an error of the peer (OD-24)."""
    state = state_of({"A": peer(ids_in_flight=10)})
    before = image(state)
    with pytest.raises(errors.ObjectIdsNotRequestedError, match="2 ids came where 1 were asked for") as caught:
        state.on_receive_ids("A", 1, announced(1, 1))
    assert caught.value.code == "ObjectIdsNotRequested"
    assert isinstance(caught.value, RemoteProtocolError)
    assert image(state) == before


@pytest.mark.parametrize(
    "known",
    [
        peer([1], ids_in_flight=5),
        peer([1], available=[], ids_in_flight=5),
        peer(inflight=[1], ids_in_flight=5),
        peer(owt=[1], ids_in_flight=5),
    ],
    ids=["available", "in the FIFO", "in flight", "on the way"],
)
def test_on_receive_ids_when_an_id_is_open_is_a_fault(known):
    """An id that is in the FIFO, in flight or on its way is not announced again (OD-26)."""
    state = state_of({"A": known})
    before = image(state)
    with pytest.raises(errors.ObjectIdAlreadyKnownError, match="id 00000001 was announced a second time"):
        state.on_receive_ids("A", 5, [(ids(2)[0], 1), (ids(1)[0], 1)])
    assert image(state) == before
    check_index(state)


def test_on_receive_ids_when_an_id_comes_twice_in_one_reply_is_a_fault():
    state = state_of({"A": peer(ids_in_flight=5)})
    with pytest.raises(errors.ObjectIdAlreadyKnownError):
        state.on_receive_ids("A", 5, announced(1) * 2)


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


@pytest.mark.parametrize(
    ("object_id", "size_bytes", "limit"),
    [
        (b"", 1, "max_object_id_bytes"),
        (b"x" * 65, 1, "max_object_id_bytes"),
        (b"x", 2_000_001, "max_object_size_bytes"),
        (b"x", -1, "max_object_size_bytes"),
    ],
)
def test_on_receive_ids_when_an_announcement_is_out_of_bounds_is_a_fault(object_id, size_bytes, limit):
    state = state_of({"A": peer(ids_in_flight=2)})
    before = image(state)
    with pytest.raises(LimitExceededError) as caught:
        state.on_receive_ids("A", 2, [(object_id, size_bytes)])
    assert caught.value.limit == limit
    assert image(state) == before


@pytest.mark.parametrize("requested", [-1, 3])
def test_on_receive_ids_when_no_such_request_is_under_way_is_our_fault(requested):
    with pytest.raises(LocalProtocolError, match="2 are in flight"):
        state_of({"A": peer(ids_in_flight=2)}).on_receive_ids("A", requested, [])


def test_on_request_objects_when_they_are_available_puts_them_in_flight():
    """Objects asked for are available no longer, but in flight, with their octets (OD-31)."""
    state = state_of({"A": peer([1, 2, 3], size=5)})
    state.on_request_objects("A", ids(1, 2), now=7.0)
    item = state.peers["A"]
    assert (numbers(item.available), numbers(item.inflight)) == ([3], [1, 2])
    assert [entry.since for entry in item.inflight.values()] == [7.0, 7.0]
    assert (item.inflight_bytes, state.held_bytes, state.inflight_count) == (10, 10, 2)
    check_index(state)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ([1, 9], "00000009 is not available"),
        ([1, 1], "named twice"),
        ([], "names none"),
        ([1, 2, 3], "max_num_objects_inflight_per_peer"),
        ([1, 2], "max_bytes_inflight_per_peer"),
    ],
)
def test_on_request_objects_when_the_request_breaks_a_rule_changes_nothing(wanted, text):
    """Only what is available is asked for, once, and within the limits of the peer (OD-31)."""
    limits = Policy(max_num_objects_inflight_per_peer=2, max_object_size_bytes=9, max_bytes_inflight_per_peer=9)
    state = state_of({"A": peer([1, 2, 3], size=6)}, limits)
    before = image(state)
    with pytest.raises(LocalProtocolError, match=text):
        state.on_request_objects("A", ids(*wanted))
    assert image(state) == before
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


@pytest.mark.parametrize(
    ("came", "error"),
    [
        ([1], errors.ObjectMissingError),
        ([1, 2, 3], errors.ObjectNotRequestedError),
        ([1, 3], errors.ObjectNotRequestedError),
        ([1, 2, 2], errors.ObjectNotRequestedError),
        ([], errors.ObjectMissingError),
    ],
)
def test_on_receive_objects_when_they_are_others_is_a_fault(came, error):
    """A reply has exactly the objects of its request: none missing, none besides, none twice (OD-28)."""
    state = state_of({"A": peer([1, 2, 3], available=[], inflight=[1, 2, 3])})
    before = image(state)
    with pytest.raises(error):
        state.on_receive_objects("A", ids(1, 2), [(key, b"x") for key in ids(*came)])
    assert image(state) == before
    check_index(state)


def test_on_receive_objects_when_two_requests_are_under_way_checks_the_one_it_answers():
    """A reply is checked against the ids of its own request, whatever was asked for since (OD-51)."""
    state = state_of({"A": peer([1, 2])})
    state.on_request_objects("A", ids(1))
    state.on_request_objects("A", ids(2))
    with pytest.raises(errors.ObjectNotRequestedError):
        state.on_receive_objects("A", ids(1), [(ids(2)[0], b"x")])
    state.on_receive_objects("A", ids(1), [(ids(1)[0], b"x")])
    assert (numbers(state.peers["A"].inflight), numbers(state.peers["A"].owt)) == ([2], [1])


@pytest.mark.parametrize("data", [b"", b"123", b"12345"])
def test_on_receive_objects_when_the_size_differs_from_what_was_announced_is_a_fault(data):
    state = state_of({"A": peer([1], available=[], inflight=[1], size=4)})
    with pytest.raises(errors.ObjectSizeWrongError, match=f"has {len(data)} bytes, 4 were announced"):
        state.on_receive_objects("A", ids(1), [(ids(1)[0], data)])


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


def test_on_receive_objects_when_the_request_is_not_under_way_is_our_fault():
    state = state_of({"A": peer([1])})
    with pytest.raises(LocalProtocolError, match="00000001 is not in flight"):
        state.on_receive_objects("A", ids(1), [(ids(1)[0], b"x")])


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
