"""What was read, told by spans of `seq`: against sets of records, whatever files they come in."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowctl.analyze.records.seen import apart, holds, joined, refined

at_ease = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
RECORDS = st.frozensets(st.integers(0, 40), min_size=1)


def content_of(records, source="t n1"):
    """Return what the footer of a file of these records tells."""
    return {source: [[min(records), max(records), len(records)]]}


@at_ease
@given(st.lists(RECORDS, max_size=6))
def test_joined_when_files_are_dense_is_the_set_of_their_records(files):
    """Files without a gap are told exactly, whatever their order, and neighbours are one span."""
    files = [set(range(min(records), max(records) + 1)) for records in files]
    known = joined(map(content_of, files))
    union = set().union(*files)
    assert union == {number for spans in known.values() for low, high, _ in spans for number in range(low, high + 1)}
    assert known == joined(map(content_of, reversed(files))) == joined([known, known])
    for low in range(0, 41, 5):
        for high in range(low, 41, 7):
            piece = set(range(low, high + 1))
            assert (piece <= union) == holds(known, content_of(piece))
            assert apart(known, content_of(piece)) == (not piece & union)


@at_ease
@given(st.lists(RECORDS, max_size=5), RECORDS)
def test_apart_when_files_have_gaps_never_says_so_of_files_that_meet(files, other):
    """A file is added to others only if none of its records can be known, and each file itself is known."""
    known = joined(map(content_of, files))
    if apart(known, content_of(other)):
        assert not other & set().union(*files)
    assert all(holds(known, content_of(records)) for records in files)


@at_ease
@given(st.lists(RECORDS, min_size=1, max_size=5), st.data())
def test_holds_when_files_that_follow_each_other_are_joined_knows_them(files, data):
    """A recorder's files follow each other; whichever neighbours are joined, and again, nothing of them is new."""
    begin, laid = 0, []
    for records in files:
        laid.append({begin + number - min(records) for number in records})
        begin = max(laid[-1]) + data.draw(st.integers(1, 3))
    known = joined(map(content_of, laid))
    first = data.draw(st.integers(0, len(laid) - 1))
    last = data.draw(st.integers(first, len(laid) - 1))
    one = set().union(*laid[first : last + 1])
    assert holds(known, content_of(one))
    rest = [content_of(records) for records in (*laid[:first], *laid[last + 1 :])]
    assert joined([refined(content_of(one), known), *rest]) == known
    more = one | {max(one) + 1}
    assert holds(known, content_of(more)) <= (more <= set().union(*laid))


def test_joined_when_a_month_was_read_is_a_line():
    """A settled hour costs the same however many files it had; nodes and tables are apart."""
    files = [content_of(range(number * 400, number * 400 + 400), f"t n{number % 2}") for number in range(720)]
    assert sum(map(len, joined(files).values())) == 720
    files = [content_of(range(number * 400, number * 400 + 400)) for number in range(720)]
    assert joined(files) == {"t n1": [[0, 720 * 400 - 1, 720 * 400]]}
    assert apart(joined(files), {"t n2": [[0, 5, 6]]})
