"""Whose pictures the stream of a set itself shows, and that its time never goes back."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flowctl.live.renditions.lead import Lead


class Screen:
    """Offers a picture of each member every 40 ms, a key frame every second, and notes what is shown."""

    def __init__(self, *ranks) -> None:
        self.lead, self.ranks, self.now, self.shown = Lead(), list(ranks), 0.0, []

    def run(self, seconds, *, late_ms=(0, 0, 0), keys=(0, 1, 2)) -> None:
        for _ in range(round(seconds * 25)):
            self.now = round(self.now + 0.04, 2)
            for rank in self.ranks:
                timestamp = round(self.now * 1000) - late_ms[rank]
                is_key = timestamp % 1000 == 0 and rank in keys
                if timestamp >= 0 and self.lead.offer(rank, timestamp, self.now, key=is_key):
                    self.shown.append((rank, timestamp, is_key))

    def check(self, missing=0):
        """See that times go on, but for `missing` pictures, and that changes are at key frames; return the members."""
        times = [timestamp for _, timestamp, _ in self.shown]
        assert times == sorted(set(times))
        assert (times[-1] - times[0]) // 40 + 1 - len(times) == missing
        for (before, _, _), (after, _, is_key) in pairwise(self.shown):
            assert before == after or is_key
        members = [rank for rank, _, _ in self.shown]
        return [rank for number, rank in enumerate(members) if number == 0 or rank != members[number - 1]]


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("late_ms", "missing"), [((0, 0), 0), ((200, 0), 0), ((0, 200), 5)])
def test_lead_when_a_larger_member_comes_changes_at_its_key_frame(ranks, late_ms, missing):
    """One that is ahead begins at once: the pictures between the two are missing, none comes twice."""
    screen = Screen(1)
    screen.run(2.5, late_ms=late_ms)
    screen.ranks = list(ranks)
    screen.run(4, late_ms=late_ms)
    assert screen.check(missing - (missing > 0 and ranks == (1, 0))) == [1, 0]


@pytest.mark.parametrize("withdrawn", [True, False])
def test_lead_when_it_goes_or_falls_silent_the_next_one_begins_at_a_key_frame(withdrawn):
    screen = Screen(0, 1, 2)
    screen.run(2.48)
    screen.ranks = [1, 2]
    if withdrawn:
        screen.lead.withdraw(0)
    screen.run(4)
    missing = 12 if withdrawn else 62  # up to the next key frame; one that falls silent is waited for for 2 s
    assert screen.check(missing) == [0, 1]


def test_lead_when_the_larger_member_has_no_more_key_frames_goes_on_a_group_later():
    screen = Screen(1)
    screen.run(1.48)
    screen.lead._seen_at[0] = screen.now  # it has had one
    screen.ranks = [0, 1]
    screen.run(3, keys=(1,))
    assert screen.check(25) == [1]
