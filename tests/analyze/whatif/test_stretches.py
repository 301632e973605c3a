"""What is kept of a viewer: stretches around trouble and sums of the rest say what the whole recording says."""

from __future__ import annotations

import tracemalloc
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_kit import second

from flowctl.analyze.whatif.intervals import begin_s, made_up, packed
from flowctl.analyze.whatif.job import choice_rows
from flowctl.analyze.whatif.recommend import recommend
from flowctl.analyze.whatif.stretches import (
    AFTER_S,
    BEFORE_S,
    STRETCH_COLUMNS,
    cuts,
    of_events,
    of_samples,
    of_viewer,
)
from flowctl.analyze.whatif.trials import ALL_CHOICES, DELAY, tally, viewer_of
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import DropDroppable
from flowctl.core.flow.state import MessageClass
from flowctl.core.sending.settings import SenderSettings
from flowctl.records.flight.recorded import begin_detail
from flowctl.records.flight.whatif.engine import evaluate
from flowctl.records.flight.whatif.types import REFUSED, TAKEN, Choice, RecordedViewer, on_grid
from flowctl.records.flight.whatif.viewing import StreamAndLink
from flowctl.records.flight.words import TablePolicy
from flowctl.records.telemetry.schema import CLASS_NAMES

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


def test_tally_when_trouble_is_rare_says_what_the_whole_recording_says():
    events = stream(220, [(60, 63), (150, 156)])
    rows = rows_of(events)
    kept = sum(len(row["at_us"] or ()) for row in rows)
    assert kept < 0.65 * len(events)
    sums = tally([rows], CHOICES, 0.0)
    whole = evaluate(RecordedViewer(events=events, ended_at=events[-1][0], restart_bytes=64), CHOICES)
    for number, outcome in enumerate(whole):
        total = {measure: value for (choice, measure), value in sums.items() if choice == number}
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
def test_tally_when_it_is_known_what_was_done_says_so_of_what_was_in_force(wrong):
    detail = begin_detail(
        0.0, DROPPING[0].limits, SETTINGS, TablePolicy.of(DropDroppable(), pytest.fail), deferred=True
    )
    rows = rows_of(stream(30, [(10, 15)]))
    plain = tally([rows], DROPPING, 0.0)
    told = [plain[number, "dropped_messages_inter"] for number in (0, 1)]
    assert [plain.get((number, "disconnected"), 0) for number in (0, 1)] == [0, 0]
    rows[-1]["recorded"] = [("disconnected", int(wrong)), ("dropped_messages_inter", told[0] + 5)]
    rows = [row | {"settings": detail} for row in rows]
    sums = tally([rows], DROPPING, 0.0)
    more = 0 if wrong else 5
    for number, dropped in ((0, told[0] + 5), (1, told[1] + more)):
        assert sums.get((number, "disconnected"), 0) == int(wrong)
        assert sums[number, "dropped_messages_inter"] == dropped
    assert tally([rows], DROPPING, 0.0, repeat=1)[0, "dropped_messages_inter"] != told[0] + 5


def test_tally_when_a_choice_is_known_to_be_best_has_it_win():
    viewers = [rows_of(stream(40, [(20 + number % 3, 26 + number % 3)])) for number in range(9)]
    rows = choice_rows(CHOICES[:2], tally(viewers, CHOICES[:2], 0.0), 1.0)
    assert [(row["viewers"], row["disconnected"]) for row in rows] == [(9, 9), (9, 0)]
    assert recommend(rows, "balanced").row["choice_id"] == 1
    assert recommend(rows, "disconnects<=1% then delay_p95").row["choice_id"] == 1


def test_tally_when_a_choice_has_cut_a_viewer_counts_nothing_behind_it():
    rows = rows_of(stream(200, [(30, 36), (150, 151)]))
    assert sum(bool(row["at_us"]) for row in rows) == 2
    sums = tally([rows], CHOICES[:2], 0.0)
    assert sums[0, "watched_us"] < 40e6
    assert sums[1, "watched_us"] > 190e6
    assert sums[0, "disconnected"] == 1


def test_stretches_when_the_viewer_switched_keep_when():
    found = StreamAndLink(stream(220, [(60, 63)]), 0, 64, 220.0, None, switched=[5.0, 62.0, 200.0])
    (row,) = [EMPTY | row for row in of_events(found, 1e6) if "what" in row]
    (switched,) = viewer_of(row, 0.0).switched
    assert row["at"] + switched == pytest.approx(62.0, abs=0.001)


def test_tally_when_events_make_no_viewer_counts_it_and_goes_on():
    good, bad = rows_of(stream(10, [(5, 6)])), rows_of(stream(10, [(5, 6)]))
    bad[0]["at_us"] = bad[0]["at_us"][::-1]
    sums = tally([bad, good], CHOICES, 0.0)
    assert (sums[ALL_CHOICES, "damaged"], sums[0, "viewers"]) == (1, 1)


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


of_seven = partial(second, conn_id=7, close_reason=None)


def test_samples_when_made_up_have_all_messages_and_bytes():
    rows = [of_seven(number, sent=130_000, state="OVERLOADED", queued=130_000 * (number + 1)) for number in range(5)]
    (found,) = of_samples(rows, 120.0)
    sizes = [(what, size) for _, what, size in made_up(found["intervals"])]
    assert sum(what >= 0 for what, _ in sizes) == 5 * 50
    assert sum(size for what, size in sizes if what >= 0) == 5 * 260_000
    assert sum(size for what, size in sizes if what < 0) == 5 * 130_000


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(40, 60_000)), min_size=1, max_size=3))
def test_intervals_when_their_first_event_is_asked_for_name_that_of_those_made_up(drawn):
    rows, lengths = [], [ms / 1000 for *_, ms in drawn]
    for classes, ready, _ in drawn:
        state = "READY" if ready else "SOFT_LIMIT"
        none = {f"accepted_messages_{name}": 0 for name in CLASS_NAMES[classes:]}
        rows.append(of_seven(0, sent=1_000, state=state) | none)
    intervals = packed(rows, lengths)
    began = begin_s(intervals)
    if began is None:
        assert all(what < 0 for _, what, _ in made_up(intervals))
    else:
        last = made_up(intervals)[-1][0]
        assert last + began == pytest.approx(sum(lengths), abs=1e-5)


def test_samples_when_most_are_calm_keep_messages_of_trouble_only():
    rows = [of_seven(number, sent=260_000) for number in range(3600)]
    rows[1800] = of_seven(1800, sent=100_000, state="SOFT_LIMIT", queued=160_000)
    found = list(of_samples(rows, 120.0))
    assert [bool(row.get("intervals")) for row in found] == [False, True, False]
    assert found[1]["ended_us"] <= (BEFORE_S + AFTER_S + 3) * 1e6
    calm = [dict(row["calm"]) for row in (found[0], found[2])]
    assert sum(sums["watched_us"] for sums in calm) + found[1]["ended_us"] == 3600 * 1_000_000
    nobody = [row | dict.fromkeys((name for name in row if name.startswith("accepted")), 0) for row in rows[:2]]
    assert [row["reason"] for row in of_samples(nobody, 120.0)] == ["it followed no stream"]
    assert [row["reason"] for row in of_samples(rows[:1], 120.0)] == ["it was there for less than 2 s"]


def test_tally_when_a_viewer_was_cut_has_the_delay_of_its_line_in_what_is_assumed():
    rows = [of_seven(number, sent=130_000, state="SOFT_LIMIT") | {"close_reason": "hard limit"} for number in range(6)]
    (found,) = of_samples(rows, 120.0)
    sums = tally([[EMPTY | found]], CHOICES[:2], 30.0)
    late = {
        number: max(int(name[6:]) for key, name in sums if key == number and name.startswith(DELAY))
        for number in (0, 1)
    }
    assert sums[0, "disconnected"] == 1
    assert sums[1, "assumed_us"] > 10e6
    assert sums[1, "watched_us"] > sums[1, "assumed_us"]
    assert late[1] > late[0]


@pytest.mark.parametrize(("column", "value"), [("sent_bytes", 1 << 47), ("accepted_bytes_key", 1 << 47)])
def test_stretches_when_a_count_is_huge_are_tried_like_others(column, value):
    pa = pytest.importorskip("pyarrow")
    rows = [of_seven(number, sent=130_000, state="SOFT_LIMIT") for number in range(60)]
    rows[2] |= {column: value}
    head = {"picked": 1, "address": "192.0.2.1", "date": "2026-03-01", "hour": "12"}
    found = of_viewer(pa.Table.from_pylist([row | head for row in rows]), "samples", 120.0).to_pylist()
    assert tally([found], CHOICES, 0.0)[0, "viewers"] == 1


def test_tally_when_a_false_row_has_many_of_the_largest_messages_shares_their_memory():
    rows = [of_seven(number, sent=130_000, state="SOFT_LIMIT") for number in range(6)]
    rows[2] |= {"accepted_bytes_inter": 1 << 47, "accepted_messages_inter": 500}  # 8 GB of 16 MiB each
    (found,) = of_samples(rows, 120.0)
    tracemalloc.start()
    try:
        assert tally([[EMPTY | found]], CHOICES, 0.0)[0, "viewers"] == 1
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 500 << 20
