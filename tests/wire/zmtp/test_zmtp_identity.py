"""Who has an identity that several claim."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from flowctl.wire.zmtp.identity import MOST_OUSTED, DuplicateLog, IdentityHolder

CUT: list[str] = []


@dataclass(frozen=True)
class Line:
    """A connection whose end is noted."""

    address: str

    def cut(self) -> None:
        CUT.append(self.address)


@pytest.fixture
def holder():
    CUT.clear()
    return IdentityHolder()


def line(address: str) -> Line:
    return Line(address)


def test_identity_when_a_life_that_was_taken_over_comes_again_stays_with_the_newest(holder):
    """The connection that was taken over is ended, so that its peer comes and is told."""
    assert holder.came(1, line("a"))
    assert holder.came(1, line("a2"))
    assert CUT == []
    assert holder.came(2, line("b"))
    assert CUT == ["a2"]
    assert not holder.came(1, line("a3"))
    assert holder.note_return(line("a3"))
    assert CUT == ["a2"]
    holder.bring_back()
    assert CUT == ["a2", "b"]
    assert not holder.came(1, line("a3"))
    assert not holder.note_return(line("a3"))
    assert holder.came(2, line("b2"))
    assert holder.count == 1
    assert CUT == ["a2", "b"]


def test_identity_when_found_with_two_is_told_once_a_minute_with_both_addresses_and_the_count(holder):
    for life in (1, 2):
        holder.came(life, line(f"of {life}"))
    told = []
    for second in range(90):
        holder.note_return(line(f"again {second}"))
        told.append(holder.told(100.0 + second))
    assert [item for item in told if item] == [
        "again 0 and of 2 (1 so far)",
        "again 60 and of 2 (61 so far)",
    ]


def test_log_when_many_identities_are_found_with_two_stays_short():
    """Where there are no keys, anybody may claim one after the other."""
    log = DuplicateLog()
    lines = [log.note(IdentityHolder(), now=number / 10) for number in range(1000)]
    assert (log.count, sum(map(bool, lines))) == (1000, 40)


def test_identity_when_the_next_life_has_the_same_connection_does_not_end_it(holder):
    """The last word of a life was read when the next one had the number of its descriptor already."""
    holder.came(1, line("a"))
    assert holder.came(2, line("a"))
    assert CUT == []


@pytest.mark.parametrize("unknown", [0, ""])
def test_identity_when_lives_are_not_told_ends_no_connection(holder, unknown):
    """Peers that name no life connect again as soon as they are cut off: they would take turns for ever."""
    assert all(holder.came(life, line("x")) for life in (unknown, 7, unknown, 7, unknown))
    assert CUT == []


def test_identity_when_many_lives_have_had_it_remembers_the_last_ones(holder):
    assert all(holder.came(life, line("x")) for life in range(1, 20))
    assert not any(holder.came(life, None) for life in range(19 - MOST_OUSTED, 19))
    assert holder.came(18 - MOST_OUSTED, None)
