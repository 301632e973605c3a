"""What is kept of a viewer: stretches around trouble and sums of the rest say what the whole recording says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.analyze.options import WhatifOptions
from flowctl.analyze.whatif.job import advise
from flowctl.analyze.whatif.stretches import (
    AFTER_S,
    BEFORE_S,
    STRETCH_COLUMNS,
    cuts,
    of_events,
    stall_columns,
)
from flowctl.analyze.whatif.trials import DELAY, LIVED, TROUBLED, Draw, Viewer, try_viewer, viewer_of
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import DropDroppable
from flowctl.core.flow.state import MessageClass
from flowctl.core.sending.settings import SenderSettings
from flowctl.records.flight.recorded import begin_detail
from flowctl.records.flight.whatif.engine import evaluate
from flowctl.records.flight.whatif.types import REFUSED, TAKEN, Choice, RecordedViewer, on_grid
from flowctl.records.flight.whatif.viewing import StreamAndLink
from flowctl.records.flight.words import TablePolicy

KEY, INTER, AUDIO = int(MessageClass.KEY), int(MessageClass.INTER), int(MessageClass.AUDIO)
CHOICES = [
    Choice(limits=Limits.parse("0,0,2s", "0,0,4s", target_delay_ms=0), policy="keep", return_after_s=0),
    Choice(limits=Limits.parse("0,0,8s", "0,0,20s", target_delay_ms=0), policy="keep", return_after_s=0),
    Choice(limits=Limits.parse("64KiB,0"), policy="keep"),
    Choice(limits=Limits.parse("256KiB,0", "2MiB,0")),
]
SETTINGS = SenderSettings(return_after_s=0)
DROPPING = [
    Choice(limits=Limits.parse(f"{size},0", "8MiB,0", target_delay_ms=0), policy="drop", return_after_s=0)
    for size in ("32KiB", "64KiB")
]


def stream(seconds, stalls):
    """Return a viewer of 10 frames a second, with a key frame each two, that took nothing within `stalls`."""
    events, queued = [], 0
    for number in range(seconds * 10):
        at = number / 10
        size = 20_000 if number % 20 == 0 else 4_000
        events.append((at, KEY if number % 20 == 0 else INTER, size))
        queued += size
        if any(begin <= at < end for begin, end in stalls):
            events.append((at + 0.05, REFUSED, 0))
        else:
            events.append((at + 0.05, TAKEN, queued))
            queued = 0
    return [(on_grid(at), what, size) for at, what, size in events]


EMPTY = dict.fromkeys(STRETCH_COLUMNS) | {"ended_us": 0}


def rows_of(events, reason=None, trouble_s=1e6):
    found = StreamAndLink(events, 0, 64, events[-1][0], reason)
    return [EMPTY | row for row in of_events(found, trouble_s)]


def tried(rows, choices, rest_s=0.0, stays_s=0.0):
    return try_viewer(rows, choices, Draw((rest_s, rest_s), stays_s, 0.0)).ends[0]


def test_trial_when_trouble_is_rare_says_what_the_whole_recording_says():
    events = stream(220, [(60, 63), (150, 156)])
    rows = rows_of(events)
    kept = sum(len(row["at_us"] or ()) for row in rows)
    assert kept < 0.65 * len(events)
    sums = tried(rows, CHOICES)
    whole = evaluate(RecordedViewer(events=events, ended_at=events[-1][0], restart_bytes=64), CHOICES)
    for number, outcome in enumerate(whole):
        total = sums[number]
        assert total["disconnected"] == (outcome.closed is not None)
        assert total["watched_us"] == pytest.approx(outcome.watched_s * 1e6, abs=200_000)
        assert total["offered_messages"] == sum(outcome.offered_messages)
        assert total.get("edges", 0) == outcome.edges
        assert total["memory_peak_bytes"] == outcome.memory_peak_bytes
        assert total.get("stall_us", 0) == pytest.approx(outcome.stall_s * 1e6, abs=2)
        dropped = sum(value for measure, value in total.items() if measure.startswith("dropped"))
        assert dropped == sum(outcome.dropped_messages)
        delay = sum(value for measure, value in total.items() if measure.startswith(DELAY))
        assert delay == pytest.approx(sum(seconds for _, seconds in outcome.delay) * 1e6, abs=500_000)
    assert [outcome.closed is None for outcome in whole] == [False, True, False, True]


@pytest.mark.parametrize("wrong", [False, True])
def test_trial_when_it_is_known_what_was_done_says_so_of_what_was_in_force(wrong):
    detail = begin_detail(
        0.0, DROPPING[0].limits, SETTINGS, TablePolicy.of(DropDroppable(), pytest.fail), deferred=True
    )
    rows = rows_of(stream(30, [(10, 15)]))
    plain = tried(rows, DROPPING)
    told = [plain[number]["dropped_messages_inter"] for number in (0, 1)]
    assert [plain[number]["disconnected"] for number in (0, 1)] == [0, 0]
    rows[-1]["recorded"] = [("disconnected", int(wrong)), ("dropped_messages_inter", told[0] + 5)]
    rows = [row | {"settings": detail} for row in rows]
    sums = tried(rows, DROPPING)
    more = 0 if wrong else 5
    for number, dropped in ((0, told[0] + 5), (1, told[1] + more)):
        assert sums[number]["disconnected"] == int(wrong)
        assert sums[number]["dropped_messages_inter"] == dropped


def test_trial_when_a_choice_has_cut_a_viewer_counts_what_comes_later_as_missed():
    rows = rows_of(stream(200, [(30, 36), (150, 151)]))
    assert sum(bool(row["at_us"]) for row in rows) == 2
    cut, patient = tried(rows, CHOICES[:2])
    assert cut["watched_us"] < 40e6
    assert patient["watched_us"] > 190e6
    assert cut["disconnected"] == 1
    assert cut["wanted"] == patient["wanted"] == 2000
    assert cut["missed"] > 1600
    assert patient["missed"] < 100
    lived = [sum(us for name, us in one.items() if name.startswith(LIVED)) for one in (cut, patient)]
    assert lived[0] == pytest.approx(lived[1], rel=0.01)


def test_trial_when_a_stall_was_cut_has_both_ends_of_how_it_goes_on():
    events = stream(20, [(12, 99)])
    rows = rows_of([event for event in events if event[0] <= 14.0], "hard limit")
    low, high = try_viewer(rows, CHOICES[:2], Draw((0.5, math.inf), 30.0, 0.0)).ends
    assert [one["disconnected"] for one in (low[1], high[0], high[1])] == [0, 1, 1]
    assert low[1]["assumed_us"] > 25e6
    # Whom nothing would bring back is lost to every choice, and no delay of it is judged.
    assert [one["honest_lost"] for one in (low[1], high[0], high[1])] == [0, 1, 1]
    assert [any(name.startswith(LIVED) for name in one) for one in (low[1], high[0], high[1])] == [True, False, False]


def test_stretches_when_a_line_stood_still_say_how_long_and_whether_that_ended():
    link = StreamAndLink(stream(30, [(10, 13), (28, 40)]), 0, 64, 30.0, "hard limit")
    told = stall_columns(link)
    assert [us / 1e6 for us in told["stalls"]] == pytest.approx([3.0, -2.0], abs=0.2)
    assert told["stay_us"] == -30_000_000
    assert stall_columns(link._replace(close_reason="peer closed"))["stay_us"] == 30_000_000


def test_stretches_when_the_viewer_switched_keep_when():
    found = StreamAndLink(stream(220, [(60, 63)]), 0, 64, 220.0, None, switched=[5.0, 62.0, 200.0])
    (row,) = [EMPTY | row for row in of_events(found, 1e6) if "what" in row]
    (switched,) = viewer_of(row, 0.0, 0.0, 0.0).switched
    assert row["at"] + switched == pytest.approx(62.0, abs=0.001)


def test_trials_when_events_make_no_viewer_count_it_and_go_on():
    good, bad = rows_of(stream(10, [(5, 6)])), rows_of(stream(10, [(5, 6)]))
    bad[0]["at_us"] = bad[0]["at_us"][::-1]
    viewers = [Viewer(TROUBLED, rows) for rows in (bad, good)]
    found = advise(viewers, CHOICES, WhatifOptions(), trials=100)
    assert (found.damaged, found.tried, found.rows[0]["viewers"]) == (1, 1, 1)


@given(
    bad=st.lists(st.booleans(), min_size=1, max_size=80),
    step=st.sampled_from([1.0, 7.0, 31.0]),
    trouble_s=st.sampled_from([10.0, 60.0, 1e9]),
)
def test_cuts_when_trouble_is_anywhere_are_whole_and_in_order(bad, step, trouble_s):
    times = [number * step for number in range(len(bad))]
    found = list(cuts(times, bad, [not one for one in bad], trouble_s))
    place = 0
    for troubled, first, last in found:
        assert first == place < last
        place = last
        if not troubled:
            assert not any(bad[first:last])
        elif first and not any(bad[:first]):
            assert times[bad.index(True)] - times[first - 1] >= BEFORE_S
    if trouble_s == 1e9:
        assert place == len(bad)
    elif any(bad) and bad.index(True) * step < 1e9:
        assert sum(times[last - 1] - times[first] for troubled, first, last in found if troubled) <= (
            trouble_s + 2 * (BEFORE_S + AFTER_S) + 2 * step
        )
