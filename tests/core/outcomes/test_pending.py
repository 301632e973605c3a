"""The table of what waits for its outcome, and the waits between tries."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.core.outcomes.backoff import STEADY_S, Backoff, Redial
from flowctl.core.outcomes.pending import QUANTUM_S, Pending
from flowctl.errors import ConfigError, LocalProtocolError


def test_take_when_repeated_gives_the_entry_once_and_counts_the_rest():
    pending: Pending[bytes, str] = Pending()
    pending.add(b"a", "first", 10.0)
    assert (pending.take(b"a"), pending.take(b"a"), pending.take(b"b"), pending.late_count) == ("first", None, None, 2)


def test_add_when_the_key_waits_already_is_refused():
    pending: Pending[int, str] = Pending()
    pending.add(1, "one")
    with pytest.raises(LocalProtocolError, match="1 waits for its outcome already"):
        pending.add(1, "other")


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "take", "due", "where", "all"]), st.integers(0, 9), st.integers(0, 100)),
        max_size=80,
    ),
    st.sampled_from([0.0, -2.0]),
)
def test_table_when_used_in_any_order_agrees_with_a_plain_dict(steps, now):
    pending: Pending[int, int] = Pending()
    model: dict[int, float | None] = {}
    for what, key, tick in steps:
        if what == "add" and key not in model:
            deadline = None if tick > 90 else now + tick / 10
            pending.add(key, key, deadline)
            model[key] = deadline
        elif what == "take":
            assert pending.take(key) == (key if key in model else None)
            model.pop(key, None)
        elif what == "due":
            now += tick / 20
            due = [found for found, _ in pending.take_due(now)]
            must = {item for item, at in model.items() if at is not None and at + QUANTUM_S <= now}
            may = {item for item, at in model.items() if at is not None and at <= now}
            assert must <= set(due) <= may
            assert len(due) == len(set(due))
            for item in due:
                del model[item]
        elif what == "where":
            assert [item for item, _ in pending.take_where(lambda k, _, least=key: k >= least)] == [
                item for item in model if item >= key
            ]
            model = {item: at for item, at in model.items() if item < key}
        elif what == "all" and tick > 80:
            assert [item for item, _ in pending.take_all()] == list(model)
            model = {}
        assert len(pending) == len(model)
        assert list(pending) == list(model)
        times = [at for at in model.values() if at is not None]
        expected = min(times, default=None)
        found = pending.next_deadline()
        assert (found is None) == (expected is None)
        assert expected is None or expected <= found < expected + QUANTUM_S


def test_table_when_a_million_requests_were_answered_keeps_nothing_of_them():
    pending: Pending[int, int] = Pending()
    for number in range(20_000):
        pending.add(number, 0, number / 7)
        pending.take(number)
    assert (len(pending._entries), len(pending._buckets)) == (0, 0)
    assert len(pending._order) <= 65


def test_backoff_when_tries_go_on_doubles_up_to_its_limit_with_jitter():
    backoff, rng = Backoff(first_s=1, factor=2, most_s=10, jitter=0.5), Random(1)
    for tries, full in [(1, 1), (2, 2), (3, 4), (4, 8), (5, 10), (1000, 10)]:
        waits = [backoff.delay_s(tries, rng) for _ in range(50)]
        assert min(waits) >= full / 2
        assert max(waits) <= full
        assert len(set(waits)) > 40


@pytest.mark.parametrize(
    "wrong", [{"first_s": 0.0}, {"factor": 0.5}, {"most_s": 0.1}, {"jitter": 1.5}, {"jitter": float("nan")}]
)
def test_backoff_when_a_value_is_out_of_range_names_it(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Backoff(**wrong)


def test_redial_when_a_connection_lasted_starts_over_from_the_shortest_wait():
    redial = Redial(Backoff(first_s=1, factor=2, most_s=10, jitter=0))
    waits = []
    for lasted_s in [0, 0, STEADY_S, 0, 0, STEADY_S]:
        redial.begin()
        waits.append(redial.delay_s(lasted_s))
    assert waits == [1, 2, 1, 1, 2, 1]


def test_redial_when_a_connection_did_not_last_waits_longer_than_after_a_failed_try():
    redial = Redial(Backoff(first_s=1, factor=2, most_s=10, jitter=0))
    waits = []
    for lasted_s in [1, STEADY_S - 1, 0, 1]:
        redial.begin()
        waits.append(redial.delay_s(lasted_s))
    assert waits == [2, 4, 4, 10]
