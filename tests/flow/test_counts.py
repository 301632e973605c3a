"""Figures and counts: a flat row inside, messages and sizes by class outside, and what leads from one to the other."""

from __future__ import annotations

from flow_kit import AUDIO, CLASS_OF, DATA, KEY

from flowctl.core.flow.counts import NO_COUNTS, NO_FIGURES, Counts, Tally, add_by_reason, as_counts, total
from flowctl.reasons import DropReason


def tally(text, size=10):
    """Return a tally of a message per letter."""
    result = Tally()
    for letter in text:
        result.add(CLASS_OF[letter], size)
    return result


def test_tally_when_messages_are_counted_and_taken_back_is_what_is_left():
    running = tally("KIIA")
    running.take_back(KEY, 10)
    running.add_figures(tally("AA", 5))
    running.take_figures(tally("II"))
    assert running.frozen() == Counts((0, 0, 0, 0, 0, 3, 0), (0, 0, 0, 0, 0, 20, 0))
    assert running.frozen().by_name() == {"audio": 3}


def test_figures_when_they_become_counts_and_back_are_the_same():
    counts = tally("KIIAX", 7).frozen()
    assert Counts.of_figures(counts.figures) == counts
    assert (counts.of(KEY), counts.total_messages, counts.total_bytes) == (1, 5, 35)
    assert Counts.of_figures(NO_FIGURES) is NO_COUNTS


def test_counts_when_added_and_subtracted_go_class_by_class():
    one, two = tally("KX").frozen(), tally("XX", 3).frozen()
    assert (one + two).of(DATA) == 3
    assert (one + two) - two == one
    assert total([one, two, NO_COUNTS]) == one + two
    assert total([]) is NO_COUNTS


def test_books_when_told_leave_out_reasons_without_losses():
    dropped = {DropReason.LATE: tuple(tally("A"))}
    add_by_reason(dropped, {DropReason.LATE: tally("AX"), DropReason.HELD: Tally()})
    accepted, lost, queued = as_counts((tuple(tally("AAX")), dropped, NO_FIGURES))
    assert accepted.total_messages == 3
    assert {reason: counts.by_name() for reason, counts in lost.items()} == {DropReason.LATE: {"audio": 2, "data": 1}}
    assert lost[DropReason.LATE].of(AUDIO) == 2
    assert queued is NO_COUNTS
