"""The table of a fleet: what merging is, what is remembered, what is forgotten. Pure."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.control.fleet.stamp import MOST_AHEAD_S, Clock, Stamp
from flowctl.control.fleet.table import BUCKETS, MEMORY_S, Entry, Table, version

KEYS = [f"ban 203.0.113.{number}/32" for number in range(5)]
NOW = 1_000_000.0

STAMPS = st.builds(Stamp, st.integers(0, 4), st.integers(0, 1), st.sampled_from("abc"))


@st.composite
def entries(draw):
    """One version of an entry: equal stamps with different contents occur, as after a member lost its memory."""
    ends_s = draw(st.sampled_from([NOW + 5, NOW + 9, inf]))
    value = draw(st.sampled_from([None, f"one {ends_s}", f"two {ends_s}"]))
    kept_s = draw(st.sampled_from([NOW + 9, inf]))
    return Entry(draw(STAMPS), value, 0.0 if value is None else ends_s, max(ends_s, kept_s))


CHANGES = st.lists(st.tuples(st.sampled_from(KEYS), entries()), max_size=12)


def table(changes, most=100) -> Table:
    made = Table(most=most)
    made.merge(changes, NOW)
    return made


def merged(*tables: Table, most=100) -> Table:
    made = Table(most=most)
    for item in tables:
        made.merge(item.items(), NOW)
    return made


def contents(item: Table) -> dict[str, Entry]:
    return dict(item.items())


@given(CHANGES, CHANGES, CHANGES, st.integers(1, 6))
def test_merging_when_in_any_order_and_grouping_gives_the_same(one, two, three, most):
    """Merging commutes and associates, also where the table is too small for all: the latest stay."""
    a, b, c = (table(item, most) for item in (one, two, three))
    left = merged(merged(a, b, most=most), c, most=most)
    right = merged(a, merged(c, b, most=most), most=most)
    assert contents(left) == contents(right) == contents(table([*three, *one, *two], most))
    assert left.sums == right.sums


@given(CHANGES, st.integers(1, 6))
def test_merging_when_repeated_changes_nothing(changes, most):
    """What a table holds already changes nothing, and no key is named as changed."""
    one = table(changes, most)
    before = contents(one)
    assert one.merge(list(one.items()), NOW) == []
    assert one.merge(changes, NOW) == []
    assert before == contents(one)


@given(CHANGES, CHANGES)
def test_sums_when_compared_are_equal_exactly_where_the_entries_are(one, two):
    """Equal tables have equal sums however they came about; what differs is found in a bucket that differs."""
    a, b = table(one), table(two)
    differing = {key for key in KEYS if a.get(key) != b.get(key)}
    assert (contents(a) == contents(b)) == (a.sums == b.sums) == (a.root() == b.root())
    numbers = a.differing(b.sums)
    sent = [[item for number in numbers for item in side.bucket(number)] for side in (a, b)]
    assert differing <= {key for side in sent for key, _ in side}
    a.merge(sent[1], NOW)
    b.merge(sent[0], NOW)
    assert contents(a) == contents(b)


@given(CHANGES)
def test_sums_when_all_entries_have_gone_are_those_of_an_empty_table(changes):
    item = table(changes)
    item.merge([(key, version(Stamp(9, 0, "a"), None, 0, item.get(key), NOW)) for key in list(item)], NOW)
    item.forget(inf)
    assert item.sums == [0] * BUCKETS
    assert len(item) == 0


def ban(stamp: Stamp, ends_s: float, before: Entry | None = None, now_s: float = NOW) -> Entry:
    return version(stamp, f"until {ends_s}", ends_s, before, now_s)


A, B, C = Stamp(1, 0, "a"), Stamp(2, 0, "b"), Stamp(3, 0, "c")


def test_ban_when_lifted_does_not_come_back_from_a_member_that_missed_it():
    """A lifted entry stays, without a value, for as long as the ban would have lasted."""
    old = ban(A, NOW + 600)
    lifted = version(B, None, inf, old, NOW)
    assert lifted.kept_until_s == NOW + 600
    item = Table([(KEYS[0], lifted)])
    assert item.merge([(KEYS[0], old)], NOW + 1) == []
    assert list(item.in_force(NOW + 1)) == []
    assert [KEYS[0]] == item.forget(NOW + 600)
    assert item.merge([(KEYS[0], old)], NOW + 600) == []  # it has ended by itself


def test_ban_when_shortened_does_not_come_back_in_its_long_form():
    """A version that ends sooner than the one before is remembered beyond its end."""
    short = ban(B, NOW + 60, ban(A, inf))
    item = Table([(KEYS[0], short)])
    assert list(item.in_force(NOW + 60)) == []
    assert item.merge([(KEYS[0], ban(A, inf))], NOW + 61) == []
    assert short.kept_until_s == NOW + MEMORY_S


def test_ban_when_it_ends_by_itself_takes_no_room_any_more():
    """Short bans by the thousand do not push out what stays."""
    item = Table([(KEYS[0], ban(A, NOW + 60))])
    assert item.forget(NOW + 59) == []
    assert [KEYS[0]] == item.forget(NOW + 60)


def test_memory_when_a_ban_without_end_is_lifted_is_bounded():
    assert version(B, None, inf, ban(A, inf), NOW).kept_until_s == NOW + MEMORY_S
    again = ban(C, inf, version(B, None, inf, ban(A, inf), NOW))
    assert again.kept_until_s == inf


def test_table_when_full_keeps_the_latest_and_counts():
    """More entries than a table may have: the oldest go, whichever came first."""
    item = table([(KEYS[0], ban(C, inf)), (KEYS[1], ban(A, inf)), (KEYS[2], ban(B, inf))], most=2)
    assert {KEYS[0], KEYS[2]} == set(item)
    assert [KEYS[2], KEYS[3]] == sorted(item.merge([(KEYS[3], ban(Stamp(4, 0, "a"), inf))], NOW))
    assert item.evicted_count == 1


def test_stamps_when_the_clock_is_put_back_go_on():
    """A change after a change is later, whatever the clock says, and so is one after another member's."""
    clock = Clock("a")
    given_ = [clock.next(100.0), clock.next(100.0), clock.next(50.0)]
    clock.saw(Stamp(200_000, 7, "b"))
    given_ += [clock.next(50.0), Clock("a", clock.last).next(1.0), clock.next(201.0)]
    assert [*given_[:4], given_[5]] == sorted({*given_[:4], given_[5]})
    assert given_[4] > given_[3] > Stamp(200_000, 7, "b")


@settings(max_examples=50)
@given(st.lists(st.one_of(st.floats(0, 9e9), STAMPS), max_size=20))
def test_stamps_when_given_are_later_than_all_before(events):
    clock, seen = Clock("m"), [Stamp(-1, 0, "")]
    for event in events:
        if isinstance(event, Stamp):
            clock.saw(event)
            seen.append(event)
        else:
            stamp = clock.next(event)
            assert stamp > max(seen)
            seen.append(stamp)


@pytest.mark.parametrize(("ahead_s", "refused"), [(0, False), (MOST_AHEAD_S - 1, False), (MOST_AHEAD_S + 1, True)])
def test_stamps_when_far_ahead_are_known_for_it(ahead_s, refused):
    """A stamp more than a day ahead of our clock is no sound clock's."""
    assert Stamp(int((NOW + ahead_s) * 1000), 0, "a").ahead(NOW) is refused
