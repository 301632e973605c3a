"""Flights of viewers of sets: they replay, and what-if with a set does what the set did, or would have done."""

from __future__ import annotations

import functools

import pytest
from flight_kit import check_flight
from flow_kit import AUDIO, KEY
from slow_kit import LIVE_LIMITS

from flowctl.errors import ConfigError
from flowctl.records.flight.reading import read_flights
from flowctl.records.flight.whatif.engine import evaluate, not_known, recorded_viewer
from flowctl.records.flight.whatif.sets import stretches
from flowctl.records.flight.whatif.types import REFUSED, TAKEN, Choice, parse_renditions
from flowctl.records.flight.whatif.viewing import stream_and_link
from flowctl.records.telemetry.schema import FlightKind
from tests.records.flight.flight_set_kit import LARGE, LINES, MIDDLE, SET, SMALL, STAY_S, SetScene


@functools.cache
def watched(line, rates=SET, round_trip_s=0.0):
    """Return (its seconds in each rendition, share of its pictures, the flight's rows) of a viewer on a line."""
    scene = SetScene(LINES[line], rates, round_trip_s=round_trip_s)
    seconds = scene.renditions.seconds(scene.group.now())
    figures = scene.sender.statistics()
    share = 1 - figures.dropped_messages / figures.accepted.total_messages
    scene.sender.end_flight()
    return [seconds.get(str(rate), 0.0) for rate in rates], share, scene.viewer.rows


def viewer_of(rows):
    return recorded_viewer(**stream_and_link(read_flights(rows.stored()))._asdict())


def tried(line, renditions, *, recorded=SET, round_trip_s=0.0):
    viewer = viewer_of(watched(line, recorded, round_trip_s)[2])
    (outcome,) = evaluate(viewer, [Choice(limits=LIVE_LIMITS, renditions=renditions)])
    return outcome


def share_of(outcome):
    return 1 - sum(outcome.dropped_messages) / sum(outcome.offered_messages)


def overlap(one, other):
    """Return the share of the stay that two viewers spent alike in each rendition."""
    return sum(map(min, one, other)) / STAY_S


@pytest.mark.parametrize("line", LINES)
def test_flight_when_of_a_viewer_of_a_set_replays_and_the_set_tried_on_it_does_the_same_again(line):
    seconds, share, rows = watched(line)
    flight, _, _ = check_flight(rows)
    switches = [row for row in flight.rows if row.reason == "switched"]
    assert [row.kind for row in switches] == [FlightKind.CALL.value] * len(switches)
    outcome = tried(line, SET)
    assert outcome.switches == len(switches)
    assert bool(switches) is (line != "30%")
    assert overlap(outcome.rendition_s, seconds) > 0.9
    assert share_of(outcome) == pytest.approx(share, abs=0.02)
    assert outcome.sent_bytes == pytest.approx(flight.figures["bytes_sent"], rel=0.12)


@pytest.mark.parametrize("round_trip_s", [0.0, 0.1])
@pytest.mark.parametrize("line", LINES)
def test_evaluate_when_there_is_no_set_does_what_the_line_does_to_the_one_stream(line, round_trip_s):
    _, share, _ = watched(line, (LARGE,), round_trip_s)
    outcome = tried(line, (LARGE,), round_trip_s=round_trip_s)
    assert outcome.switches == 0
    assert share_of(outcome) == pytest.approx(share, abs=0.05)
    assert (share_of(outcome) > 0.97) is (line == "120%")


def test_evaluate_when_there_is_a_rendition_more_has_the_viewer_in_it():
    rates = (SMALL, 700_000, MIDDLE)
    seconds, share, _ = watched("30%", rates)
    outcome = tried("30%", rates, recorded=SET)
    assert share == share_of(outcome) == 1.0
    assert overlap(outcome.rendition_s, seconds) > 0.9
    assert outcome.rendition_s[1] > STAY_S / 2


def test_evaluate_when_limits_are_tried_over_switches_has_them_as_they_were_made():
    viewer = viewer_of(watched("drop")[2])
    switched, choice = viewer.switched, Choice(limits=LIVE_LIMITS)
    (outcome,) = evaluate(viewer, [choice])
    assert share_of(outcome) == pytest.approx(watched("drop")[1], abs=0.01)
    rates = [8 * (pictures + others) for _, pictures, others in stretches(viewer)]
    assert rates == pytest.approx([SMALL, MIDDLE, LARGE, SMALL], rel=0.08)
    assert sorted(switched) == list(switched)
    assert "renditions" in not_known(viewer, choice)


def test_stream_and_link_when_a_viewer_switched_has_each_message_once_and_in_order():
    viewer = viewer_of(watched("drop")[2])
    assert [at for at, _, _ in viewer.events] == sorted(at for at, _, _ in viewer.events)
    sound = [at for at, what, _ in viewer.events if what == AUDIO]
    assert len(sound) == pytest.approx(43 * (STAY_S + 1), rel=0.02)
    pictures = sum(what in (2, 3) for _, what, _ in viewer.events)
    assert pictures == pytest.approx(30 * (STAY_S + 1), rel=0.02)


def test_not_known_when_a_line_was_never_full_says_so():
    events = [(0.0, int(KEY), 1000), (0.01, TAKEN, 1000), (1.0, int(KEY), 1000), (1.01, TAKEN, 1000)]
    calm = recorded_viewer(events, given=0, restart_bytes=0, ended_s=2.0, close_reason=None)
    full = recorded_viewer([*events, (1.5, REFUSED, 0)], given=0, restart_bytes=0, ended_s=2.0, close_reason=None)
    choice = Choice(limits=LIVE_LIMITS, renditions=(LARGE,))
    assert "never seen full" in not_known(calm, choice)
    assert "never seen full" not in not_known(full, choice)
    assert not_known(calm, Choice(limits=LIVE_LIMITS)) is None
    (outcome,) = evaluate(calm, [choice])
    assert sum(outcome.dropped_messages) == 0


@pytest.mark.parametrize("text", ["0", "1M,1M", ",".join(f"{number}k" for number in range(1, 10))])
def test_choice_when_its_renditions_are_wrong_says_so(text):
    with pytest.raises(ConfigError, match="renditions are of"):
        Choice(limits=LIVE_LIMITS, renditions=parse_renditions(text))
