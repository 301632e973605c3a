"""The ledger of a connection, packed and worded, and the counts that its entries have."""

from __future__ import annotations

import pytest
from flow_kit import AUDIO, CLASS_OF, KEY
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.counts import NO_COUNTS, NO_FIGURES, Counts, Tally, add_by_reason, as_counts, total
from flowctl.core.flow.ledger import (
    LEDGER_ENTRIES,
    LEDGER_WORDS_BYTES,
    Ledger,
    LedgerEntry,
    LedgerKind,
    describe_change,
    describe_drops,
    difference,
)
from flowctl.core.flow.limits import OFF_MARK, Axis
from flowctl.core.flow.state import Cause, MessageClass, SendState, StateChange
from flowctl.reasons import CloseReason, DropReason


def counts(**messages):
    """Return counts from names of classes in lower case; ten bytes a message."""
    tally = Tally()
    for name, count in messages.items():
        for _ in range(count):
            tally.add(MessageClass[name.upper()], 10)
    return tally.frozen()


def entry(number):
    return LedgerEntry(LedgerKind.DROPS, float(number), f"entry {number}")


def numbers(entries):
    return [int(item.at) for item in entries]


def edge(number, old, new):
    """Return the entry of an edge, as a Sender makes it."""
    change = StateChange(number, old, new, Cause.WOULD_BLOCK, None, None, None, float(number))
    return LedgerEntry(LedgerKind.STATE, float(number), "", change=change)


def test_ledger_when_a_viewer_flaps_keeps_what_else_happened():
    ledger, ready, overloaded = Ledger(), SendState.READY, SendState.OVERLOADED
    ledger.add(entry(0))
    ledger.add(edge(1, overloaded, SendState.SOFT_LIMIT))
    for number in range(2, 200, 2):
        ledger.add(edge(number, ready, overloaded))
        ledger.add(edge(number + 1, overloaded, ready))
    assert numbers(ledger.entries()) == [0, 1, *range(200 - LEDGER_ENTRIES + 2, 200)]
    assert ledger.unread() == ledger.entries()
    for number in range(200, 200 + LEDGER_ENTRIES - 2):
        ledger.add(entry(number))
    assert numbers(ledger.entries()) == [0, 1, *range(200, 200 + LEDGER_ENTRIES - 2)], "the flaps went first"
    assert numbers(ledger.unread()) == list(range(200, 200 + LEDGER_ENTRIES - 2))


finite = st.floats(0, 1e12)
lost_counts = st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 2**60)), min_size=7, max_size=7)
drops = st.dictionaries(st.sampled_from(DropReason), lost_counts.filter(lambda items: any(count for count, _ in items)))
axes = st.one_of(
    st.tuples(st.none(), st.none(), st.none()), st.tuples(st.sampled_from(Axis), finite, st.integers(0, OFF_MARK))
)
states = st.sampled_from(SendState)


@st.composite
def any_entry(draw):
    """An entry of any kind, with words that fit."""
    at, words = draw(finite), draw(st.text(max_size=LEDGER_WORDS_BYTES // 4, alphabet="abcé√ 日").filter(bool))
    if draw(st.booleans()):
        axis, value, limit = draw(axes)
        sequence, cause = draw(st.integers(1, 2**32 - 1)), draw(st.sampled_from(Cause))
        change = StateChange(sequence, draw(states), draw(states), cause, axis, value, limit, at)
        return LedgerEntry(LedgerKind.STATE, at, draw(st.sampled_from([words, describe_change(change)])), change=change)
    lost = draw(st.one_of(st.none(), drops))
    dropped = lost and {
        reason: Counts(tuple(count for count, _ in items), tuple(size if count else 0 for count, size in items))
        for reason, items in lost.items()
    }
    return LedgerEntry(
        draw(st.sampled_from(LedgerKind)),
        at,
        words,
        dropped=dropped,
        duration_s=draw(finite),
        reason=draw(st.one_of(st.none(), st.sampled_from(CloseReason))),
        delay_removed_ms=draw(finite),
        picture_share=draw(st.floats(0, 1)),
        line_share=draw(st.floats(0, 1)),
        delay_max_ms=draw(finite),
    )


@given(any_entry())
@settings(max_examples=300, deadline=None)
def test_entry_for_any_figures_is_read_as_it_was_written(item):
    ledger = Ledger()
    ledger.add(item)
    assert ledger.entries() == ledger.unread() == (item,)


def test_entry_when_it_has_no_words_is_worded_from_its_figures():
    ledger = Ledger()
    ledger.add(edge(1, SendState.READY, SendState.OVERLOADED))
    ledger.add(
        LedgerEntry(LedgerKind.DROPS, 2.0, "", dropped={DropReason.THINNED: counts(audio=1)}, delay_removed_ms=1500.0)
    )
    ledger.add(LedgerEntry(LedgerKind.PAUSE, 3.0, ""))
    expected = ["blocked", "thinned from the queue: 1 audio; 1.5 s of delay removed", ""]
    assert [item.why for item in ledger.entries()] == expected


def test_entry_when_its_words_are_long_keeps_their_beginning():
    ledger = Ledger()
    ledger.add(LedgerEntry(LedgerKind.CLOSE, 1.0, "x" + "é" * 1000, reason=CloseReason.KICKED))
    (item,) = ledger.entries()
    assert item.why == "x" + "é" * ((LEDGER_WORDS_BYTES - 1) // 2)
    assert item.reason is CloseReason.KICKED


@given(st.lists(st.one_of(st.just(0), st.integers(1, 150)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_unread_for_any_rhythm_gives_the_newest_in_order_and_none_twice(rhythm):
    ledger, added, read = Ledger(), 0, 0
    for count in rhythm:
        for _ in range(count):
            ledger.add(entry(added))
            added += 1
        assert numbers(ledger.unread()) == list(range(max(read, added - LEDGER_ENTRIES), added))
        read = added
        assert numbers(ledger.entries()) == list(range(max(0, added - LEDGER_ENTRIES), added))


@pytest.mark.parametrize(
    ("cause", "axis", "value", "limit", "line"),
    [
        (Cause.QUEUED, Axis.BYTES, 2097152.0, 2097152, "queued: 2.0 MiB, limit 2.0 MiB"),
        (Cause.TICK, Axis.AGE, 4000.4, 4000, "waited: oldest 4.0 s, limit 4.0 s"),
        (Cause.LIMITS_SET, Axis.MESSAGES, 7.0, 5, "limits set: 7 messages, limit 5 messages"),
        (Cause.WOULD_BLOCK, None, None, None, "blocked"),
        (Cause.DRAINED, None, None, None, "drained"),
    ],
)
def test_describe_change_when_an_axis_decided_names_it_with_value_and_limit(cause, axis, value, limit, line):
    change = StateChange(1, SendState.READY, SendState.SOFT_LIMIT, cause, axis, value, limit, 0.0)
    assert describe_change(change) == line


def test_describe_drops_when_several_reasons_applied_lists_each_with_its_classes():
    lost = {
        DropReason.REFUSED: counts(disposable=3, inter=12),
        DropReason.THINNED: counts(audio=1),
    }
    assert describe_drops(lost) == "refused by policy: 12 inter, 3 disposable; thinned from the queue: 1 audio"
    assert describe_drops({}) == ""


def test_difference_when_accounts_grew_has_what_came_between():
    before = {DropReason.REFUSED: counts(inter=2), DropReason.HELD: counts(data=1)}
    after = {
        DropReason.REFUSED: counts(inter=5, audio=1),
        DropReason.HELD: counts(data=1),
        DropReason.CLOSED: counts(key=1),
    }
    expected = {DropReason.REFUSED: counts(inter=3, audio=1), DropReason.CLOSED: counts(key=1)}
    assert difference(after, before) == expected
    assert difference(after, after) == {}
    assert difference(before, {}) == before


messages = st.lists(st.tuples(st.sampled_from(MessageClass), st.integers(0, 1000)), max_size=30)


@given(messages, messages)
@settings(max_examples=100, deadline=None)
def test_counts_for_any_messages_add_up_by_class(first, second):
    tallies = [Tally(), Tally(), Tally()]
    for index, lot in ((0, first), (1, second), (2, first + second)):
        for item, size in lot:
            tallies[index].add(item, size)
    one, two, both = (tally.frozen() for tally in tallies)
    assert one + two == both == total([one, two])
    assert both - two == one
    assert both - both == NO_COUNTS
    assert both.total_messages == len(first) + len(second)
    assert both.total_bytes == sum(size for _, size in first + second)
    tallies[0].add_figures(two.figures)
    assert tallies[0].frozen() == both
    assert one + two == both, "a frozen count does not change with its tally"
    for item, size in second:
        tallies[2].subtract(item, size)
    assert tallies[2].frozen() == one


def test_counts_when_asked_by_name_leave_out_zeros():
    some = counts(audio=2, key=1)
    assert list(some.by_name().items()) == [("key", 1), ("audio", 2)]
    assert (some.of(MessageClass.AUDIO), some.of(MessageClass.DATA)) == (2, 0)
    assert Counts() == NO_COUNTS


def tally(text, size=10):
    """Return a tally of a message per letter."""
    result = Tally()
    for letter in text:
        result.add(CLASS_OF[letter], size)
    return result


def test_tally_when_messages_are_counted_and_taken_back_is_what_is_left():
    running = tally("KIIA")
    running.subtract(KEY, 10)
    running.add_figures(tally("AA", 5))
    running.subtract_figures(tally("II"))
    assert running.frozen() == Counts((0, 0, 0, 0, 0, 3, 0), (0, 0, 0, 0, 0, 20, 0))
    assert running.frozen().by_name() == {"audio": 3}


def test_figures_when_they_become_counts_and_back_are_the_same():
    counts = tally("KIIAX", 7).frozen()
    assert Counts.of_figures(counts.figures) == counts
    assert (counts.of(KEY), counts.total_messages, counts.total_bytes) == (1, 5, 35)
    assert Counts.of_figures(NO_FIGURES) is NO_COUNTS


def test_books_when_told_leave_out_reasons_without_losses():
    dropped = {DropReason.LATE: tuple(tally("A"))}
    add_by_reason(dropped, {DropReason.LATE: tally("AX"), DropReason.HELD: Tally()})
    accepted, lost, queued = as_counts((tuple(tally("AAX")), dropped, NO_FIGURES))
    assert accepted.total_messages == 3
    assert {reason: counts.by_name() for reason, counts in lost.items()} == {DropReason.LATE: {"audio": 2, "data": 1}}
    assert lost[DropReason.LATE].of(AUDIO) == 2
    assert queued is NO_COUNTS
