"""Stalls that most viewers have at once: what makes one, who has it, and when it is over."""

from __future__ import annotations

import pytest

from flowctl.core.flow.sharedstall import LEAST_VIEWERS, MOST_S, SURE_S, SharedStall, StallSpan


class Room:
    """A group of viewers, and what it says in the log."""

    def __init__(self, served):
        self.said, self.due = [], []
        self.stall = SharedStall(lambda *said: self.said.append(said))
        self.viewers = served
        self.stall.crowds[self] = None

    def served(self, now):
        return self.viewers

    def span(self, now):
        """Let time pass up to `now`, and return the stall of most."""
        while self.due and self.due[0] <= now:
            self.stall.confirm(self.due[0], self.due.pop(0) - 0.001)  # as early as a timer may be
        return self.stall.span(now)

    def stop(self, viewers, at, *, apart_s=0.0):
        for number, viewer in enumerate(viewers):
            when = at + number * apart_s
            self.span(when)
            if (sure_at := self.stall.stopped(viewer, when)) is not None:
                self.due.append(sure_at)
        return self

    def go_on(self, viewers, at, *, gone=False):
        self.span(at)
        for viewer in viewers:
            self.stall.went_on(viewer, at, gone=gone)
        return self


@pytest.mark.parametrize(
    ("served", "count", "apart_s", "is_shared"),
    [
        (20, 20, 0.0, True),
        (20, 10, 0.2, True),
        (20, 9, 0.0, False),
        (20, 20, 3.0, False),
        (20, 20, 0.54, True),
        (20, 20, 0.56, False),
        (4, 4, 0.0, False),
        (LEAST_VIEWERS, LEAST_VIEWERS, 0.0, True),
        (LEAST_VIEWERS - 1, LEAST_VIEWERS - 1, 0.0, False),
    ],
)
def test_stall_when_most_of_enough_viewers_stop_within_a_second_is_shared(served, count, apart_s, is_shared):
    room = Room(served).stop(range(count), 100.0, apart_s=apart_s)
    assert (room.span(200.0) is not None) is is_shared
    assert len(room.said) == is_shared


def test_stall_when_it_is_over_is_remembered_and_said_once_each_way():
    room = Room(20).stop(range(20), 100.0)
    assert room.span(110.0) == StallSpan(100.0, 110.0)
    room.go_on(range(12), 119.0)
    assert room.span(121.0) == StallSpan(100.0, 121.0), "as many as make one still have it"
    room.go_on(range(12, 20), 122.0)
    assert room.span(130.0) == StallSpan(100.0, 122.0)
    assert room.said == [(False, 20, 20, pytest.approx(SURE_S, abs=0.01)), (True, 20, 20, 22.0)]


def test_stall_when_there_was_one_just_before_is_none():
    room = Room(20).stop(range(20), 100.0).go_on(range(20), 122.0)
    room.stop(range(20), 140.0).go_on(range(20), 143.0)
    assert room.span(145.0) == StallSpan(100.0, 122.0)
    room.stop(range(20), 145.0)
    assert room.span(150.0) == StallSpan(145.0, 150.0)


def test_stall_when_some_never_go_on_hides_not_the_next_one():
    room = Room(20).stop(range(20), 100.0).go_on(range(12), 110.0)
    room.stop(range(12), 100.0 + 3 * MOST_S)
    assert room.span(110.0 + 3 * MOST_S) == StallSpan(100.0 + 3 * MOST_S, 110.0 + 3 * MOST_S)


def test_stalls_when_they_come_often_are_said_once_a_minute():
    room = Room(20)
    for number in range(20):
        room.stop(range(20), 100.0 + 10 * number).go_on(range(20), 104.0 + 10 * number)
    assert [over for over, *_ in room.said] == [False, True] * 4


def test_stall_when_a_stream_is_silent_counts_not_its_viewers():
    room, idle = Room(20), Room(0)
    idle.viewers = 0  # as a fan-out says where nothing was published
    room.stall.crowds[idle] = None
    assert room.stop(range(20), 100.0).span(110.0) is not None


def test_stall_when_it_does_not_end_excuses_nobody_for_longer_than_a_minute():
    room = Room(20).stop(range(20), 100.0)
    assert room.span(110.0 + MOST_S) == StallSpan(100.0, 100.0 + MOST_S)
    room.go_on(range(20), 300.0)
    assert room.span(301.0) == StallSpan(100.0, 100.0 + MOST_S)


def test_stall_when_viewers_stop_and_go_on_all_the_time_is_none():
    room = Room(20)
    for number in range(100):
        room.stop(range(20), 100.0 + number / 5)
        room.go_on(range(20), 100.1 + number / 5)
    assert room.span(120.0) is None
    assert not room.said


def test_stall_when_viewers_leave_goes_on_for_the_others():
    room = Room(20).stop(range(20), 100.0).go_on(range(15), 110.0, gone=True)
    assert room.span(112.0) == StallSpan(100.0, 112.0)
    room.go_on(range(15, 20), 113.0, gone=True)
    assert room.span(114.0) == StallSpan(100.0, 113.0)


def test_stall_when_it_is_not_sure_yet_counts_for_nothing():
    room = Room(20).stop(range(20), 100.0)
    room.stall.confirm(99.0 + SURE_S, 99.0 + SURE_S)  # of stops before, which came to nothing
    assert room.span(100.0 + SURE_S * 0.9) is None
    assert room.span(100.0 + SURE_S) is not None
