"""The choice of a rendition: what a line is seen to carry, when to go down, when to go up and when not again."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest

from flowctl.core.flow.renditions import Choice, LineMeter, RenditionRule

RATES = {"360": 62_500.0, "720": 150_000.0, "1080": 312_500.0}
LOOK_S = 0.025
GROUP_S = 2.0
KEEPS_UP = {"lagging": False, "drain": None, "delay_s": 0.0, "left_out": False, "target_s": 1.5, "group_s": GROUP_S}


def watch(rule_or_meter, lines, *, seconds=20.0, burst_bytes=25_000, buffer_bytes=0, round_trip_s=0.0):
    """Let it look at a key frame each two seconds on a line; `lines`: bytes per second by (from when on)."""
    written, carried, acknowledged, key_at = 0, 0.0, [0.0], -inf
    for look in range(round(seconds / LOOK_S)):
        now = look * LOOK_S
        taken = acknowledged[max(len(acknowledged) - 1 - round(round_trip_s / LOOK_S), 0)]
        rule_or_meter.sample(now, written, max(round(written - taken) - buffer_bytes, 0), key_at)
        if now % GROUP_S < LOOK_S / 2:
            written, key_at = written + burst_bytes, now
        line = next(rate for since, rate in reversed(lines.items()) if now >= since)
        carried = min(carried + line * LOOK_S, written)
        acknowledged.append(carried)
    return rule_or_meter


def decide(rule, now, present, **changed):
    """Ask a rule about a viewer that keeps up, but for what is `changed`."""
    return rule.decide(now, RATES, present, **(KEEPS_UP | changed))


def go(rule, now, present, **changed):
    """Decide and switch; return the name, and whether a step up failed with it."""
    choice = decide(rule, now, present, **changed)
    return choice and (choice.name, rule.switched(now, choice.name, RATES))


@pytest.mark.parametrize("line", [60_000.0, 150_000.0, 250_000.0])
@pytest.mark.parametrize("way", [{}, {"buffer_bytes": 5_000}, {"round_trip_s": 0.2}])
def test_evidence_is_the_rate_within_bursts_whatever_lies_on_the_way(line, way):
    found = watch(LineMeter(), {0: line}, **way).evidence(20.0)

    assert found == pytest.approx(line, rel=0.05)


@pytest.mark.parametrize("way", [{}, {"round_trip_s": 0.2}])
def test_evidence_of_bursts_that_are_gone_at_the_next_look_is_a_bound_from_below(way):
    found = watch(LineMeter(), {0: 10_000_000.0}, **way).evidence(20.0)

    assert 0.8 * 25_000 / LOOK_S <= found <= 25_000 / LOOK_S


def test_evidence_is_the_slowest_of_the_last_20_seconds():
    lines = {0: 150_000.0, 8: 80_000.0, 14: 150_000.0}

    assert watch(LineMeter(), lines, seconds=27).evidence(27.0) == pytest.approx(80_000, rel=0.05)
    assert watch(LineMeter(), lines, seconds=34).evidence(34.0) == pytest.approx(150_000, rel=0.05)


def test_evidence_without_bursts_is_not_known():
    found = watch(LineMeter(), {0: 150_000.0}, burst_bytes=4_000)

    assert found.evidence(20.0) is None


@pytest.mark.parametrize(
    ("present", "seen", "chosen"),
    [
        ("1080", {}, None),
        ("1080", {"drain": 160e3, "delay_s": 0.1}, "720"),  # a further group would add two seconds
        ("1080", {"drain": 100e3, "delay_s": 0.1}, "360"),
        ("1080", {"drain": 300e3, "delay_s": 0.4}, None),  # it falls behind, but slowly
        ("1080", {"drain": 300e3, "delay_s": 0.8}, "720"),
        ("720", {"drain": 156e3, "delay_s": 0.9}, None),  # it catches up
        ("720", {"drain": 156e3, "delay_s": 1.3}, "360"),
        ("720", {"drain": 156e3, "delay_s": 0.4, "left_out": True}, "360"),
        ("1080", {"drain": 156e3, "delay_s": 1.4}, "360"),  # 720 would not catch up
        ("1080", {"delay_s": 1.0}, "720"),  # the rate is not known
        ("360", {"drain": 50e3, "delay_s": 1.4, "left_out": True}, None),
    ],
)
def test_down_is_to_the_largest_in_which_the_viewer_catches_up(present, seen, chosen):
    found = decide(RenditionRule(0.0), 30.0, present, lagging=True, **seen)

    assert (found and found.name) == chosen


def test_down_after_pictures_were_left_out_is_decided_although_nothing_waits_any_more():
    assert decide(RenditionRule(0.0), 30.0, "1080", left_out=True).name == "720"


def test_choice_says_why():
    rule = RenditionRule(0.0)

    down = decide(rule, 30.0, "1080", lagging=True, drain=160e3, delay_s=0.5)
    assert down == Choice("720", "the line takes 1.28 of 2.50 Mbit/s")
    assert decide(rule, 30.0, "1080", lagging=True, delay_s=0.8) == Choice("720", "it is 0.8 s behind")
    assert decide(watch(rule, {0: 160e3}), 20.0, "360").why == "the line has carried 1.28 Mbit/s"


@pytest.mark.parametrize(
    ("line", "seconds", "chosen"),
    [
        (75e3, 20, None),
        (156e3, 9, None),  # too short a past
        (156e3, 11, "720"),
        (265e3, 11, "720"),
        (290e3, 3, None),
        (375e3, 3, "720"),  # twice as much as it needs
        (375e3, 11, "720"),
        (5e6, 3, "720"),
    ],
)
def test_up_is_to_the_next_size_if_the_line_has_carried_that(line, seconds, chosen):
    rule = watch(RenditionRule(0.0), {0: line}, seconds=seconds)

    found = decide(rule, seconds, "360")

    assert (found and found.name) == chosen


def test_up_is_never_without_evidence():
    assert decide(RenditionRule(0.0), 100.0, "360") is None


def test_up_is_not_within_20_seconds_of_a_switch():
    rule = watch(RenditionRule(0.0), {0: 375e3})
    assert go(rule, 1.0, "1080", lagging=True, drain=80e3, delay_s=0.2) == ("360", False)

    assert decide(rule, 20.9, "360") is None
    assert decide(rule, 21.1, "360").name == "720"


def test_up_again_is_a_group_after_a_step_up():
    rule = watch(RenditionRule(0.0), {0: 5e6}, seconds=5)
    assert go(rule, 3.0, "360") == ("720", False)

    assert decide(rule, 4.9, "720") is None
    assert decide(rule, 5.0, "720").name == "1080"


def test_two_renditions_of_one_rate_are_not_gone_to_and_fro_between():
    rule, present, switches = watch(RenditionRule(0.0), {0: 375e3}), "720", 0
    for now in range(20, 40, 2):
        rates = {"720": 150e3, "720p60": 150e3 + (5e3 if now % 4 else -5e3), "1080": 900e3}
        choice = rule.decide(now, dict(sorted(rates.items(), key=lambda rate: rate[1])), present, **KEEPS_UP)
        if choice is not None:
            rule.switched(now, choice.name, rates)
            present, switches = choice.name, switches + 1
    assert switches == 0


class Deceived(LineMeter):
    """Sees bursts pass, whatever the line carries when it is full."""

    def evidence(self, now):
        return 375e3


def test_up_after_a_failure_is_tried_again_in_ten_minutes():
    rule, tries = RenditionRule(0.0, line=Deceived()), []
    for now in range(12, 2000, 2):
        if decide(rule, now, "360") is not None:
            tries.append(now)
            go(rule, now, "360")
            assert go(rule, now + 4, "720", lagging=True, drain=80e3, delay_s=1.0) == ("360", True)

    assert len(tries) == 4
    assert all(600 <= after - before <= 610 for before, after in pairwise(tries))


def test_up_after_a_pause_of_a_line_that_carried_it_is_tried_again_in_a_minute_then_in_two():
    rule, tries = RenditionRule(0.0, line=Deceived()), []
    for now in range(12, 600, 2):
        if decide(rule, now, "360") is not None:
            tries.append(now)
            go(rule, now, "360")
            assert go(rule, now + 20, "720", lagging=True, drain=10e3, delay_s=1.0) == ("360", True)

    assert [after - before for before, after in pairwise(tries)] == [80, 140, 260]


def test_up_after_a_failure_is_possible_to_what_the_line_carried_when_it_was_full():
    rule = watch(RenditionRule(0.0), {0: 375e3})
    assert go(rule, 12.0, "360") == ("720", False)
    assert go(rule, 14.0, "720") == ("1080", False)
    assert go(rule, 20.0, "1080", lagging=True, drain=156e3, delay_s=1.2) == ("360", True)
    rule.line = watch(LineMeter(), {0: 375e3}, seconds=42)

    assert go(rule, 42.0, "360") == ("720", False)
    assert decide(rule, 80.0, "720") is None


@pytest.mark.parametrize(("at", "waiting_s", "failed"), [(4.0, 0.3, False), (4.0, 0.5, True), (40.0, 0.5, False)])
def test_step_up_fails_before_the_viewer_lags_where_its_kernel_holds_too_much(at, waiting_s, failed):
    """A shaper has let the first bytes pass: what comes then waits in the kernel, and the next key frame behind it."""
    rule = watch(RenditionRule(0.0), {0: 375e3}, seconds=3)
    assert go(rule, 3.0, "360") == ("720", False)
    rule.line = Deceived()
    rule.sample(3.0 + at, 300_000, round(waiting_s * RATES["720"]), 3.0)

    assert (go(rule, 3.0 + at, "720") == ("360", True)) is failed
    if failed:
        assert decide(rule, 3.0 + at + 590, "360") is None


@pytest.mark.parametrize(("waiting_s", "failed"), [(0.8, False), (0.9, True)])
def test_step_up_on_a_long_way_does_not_fail_for_its_round_trip(waiting_s, failed):
    """What is on its way is not acknowledged, of any rendition: only what comes on top waits for the line."""
    rule = watch(RenditionRule(0.0), {0: 375e3}, seconds=3)
    rule.line = Deceived()
    for now in (2.0, 3.0):
        rule.sample(now, 300_000, round(0.45 * RATES["360"]), now)
        found = decide(rule, now, "360")
    assert (found.name, rule.switched(3.0, "720", RATES)) == ("720", False)
    rule.sample(4.5, 500_000, round(waiting_s * RATES["720"]), 3.0)

    assert (go(rule, 4.5, "720", target_s=4.0) == ("360", True)) is failed


def test_step_up_that_lasted_has_not_failed():
    rule = watch(RenditionRule(0.0), {0: 375e3})
    go(rule, 12.0, "360")

    assert go(rule, 60.0, "720", lagging=True, drain=80e3, delay_s=1.0) == ("360", False)


def test_viewer_whose_rendition_has_ended_goes_on_in_the_nearest():
    rule = RenditionRule(0.0)
    decide(rule, 1.0, "720")

    assert rule.decide(
        2.0,
        {"360": 62_500.0, "1080": 312_500.0},
        "720",
        lagging=False,
        drain=None,
        delay_s=0.0,
        left_out=False,
        target_s=1.5,
        group_s=GROUP_S,
    ) == Choice("360", "its rendition has ended")


def test_viewer_begins_in_the_smallest():
    assert RenditionRule(0.0).first(RATES).name == "360"


def test_evidence_of_a_viewer_that_is_never_asked_for_is_bounded():
    """A viewer in the smallest rendition that cannot keep up goes nowhere: a day of it was 86,400 notes."""
    rule, written = RenditionRule(0.0), 0
    for second in range(2000):
        written += 30_000
        rule.sample(second, written, 20_000, second - 0.5)
        rule.decide(second, {"360": 60_000.0, "720": 120_000.0}, "360", lagging=True, drain=30_000.0, delay_s=2.0,
                    left_out=True, target_s=2.0, group_s=2.0)  # fmt: skip
    assert 20 <= len(rule.line._speeds) <= 128


@pytest.mark.parametrize(("reads", "least", "most"), [(156_000, 130_000, 230_000), (94_000, 80_000, 125_000)])
def test_line_is_no_faster_than_a_program_reads_what_its_kernel_swallows(reads, least, most):
    """Without the receive window the line has carried whatever a large receive buffer takes at once."""
    told = {}
    for window in (True, False):
        meter, written, read, unread = LineMeter(), 0, 0.0, 0
        for step in range(1, 2000):
            now = step * 0.01
            key = step % 200 == 0
            written += 25_000 if key else 1_500 if step % 4 == 0 else 0
            read = min(read + reads * 0.01, written)
            if step % 4 == 0:
                unread = written - int(read)  # as the last acknowledgement says
            if step % 3 == 0:
                meter.sample(now, written, 0, step // 200 * 2.0, 125_000 - unread if window else None)
        told[window] = meter.evidence(now)
    assert least <= told[True] <= most
    assert told[False] > 600_000


def test_viewer_that_stays_in_the_smallest_is_told_why():
    rule = watch(RenditionRule(0.0), {0: 90_000.0})
    assert decide(rule, 20.0, "360") is None
    assert rule.why_not_up == "the line has carried 720 kbit/s, 720 is 1.20 Mbit/s"
