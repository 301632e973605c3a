"""What an origin cuts of what is published at it."""

from __future__ import annotations

from segment_kit import key

from flowctl.core.flow.state import MessageClass
from flowctl.live.cluster.origin import Cutting
from flowctl.testing import ManualClock


class Publisher:
    """Somebody who publishes."""


def made():
    clock, cuts = ManualClock(), []
    cutting = Cutting(cuts.append, lambda: 1_000_000.0, clock)
    cutting.took_over("live/cam", Publisher())
    return clock, cuts, cutting


def put(cutting, timestamp, body=b""):
    frame = key(timestamp, body)
    cutting.message("live/cam", MessageClass.KEY, frame.type_id, timestamp, frame.payload)


def test_small_segments_when_the_clock_leaps_are_ten_a_second():
    """The clock of a publisher says where to cut; how often an origin does it is not for him to say."""
    clock, cuts, cutting = made()
    for number in range(1001):
        put(cutting, number * 1000)
    assert (len(cuts), cutting.refused) == (100, 900)
    clock.advance(1.0)
    for number in range(1001, 1101):
        put(cutting, number % 2 * 60_000)
    assert (len(cuts), cutting.refused) == (110, 990)


def test_segments_when_large_or_in_time_are_all_kept():
    clock, cuts, cutting = made()
    for number in range(1001):
        put(cutting, number * 500)
        clock.advance(0.5)
    for number in range(1001, 1201):
        put(cutting, number * 500, bytes(200_000))
    assert (len(cuts), cutting.refused) == (1200, 0)
