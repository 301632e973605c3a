"""The choice of a rendition: what a line is seen to carry, when to go down, when to go up and when not again."""

from __future__ import annotations

import pytest

from flowctl.core.flow.renditions import Choice, LineMeter, RenditionRule

RATES = {"360": 62_500.0, "720": 150_000.0, "1080": 312_500.0}
LOOK_S = 0.025


def meter_after(line: float, *, bursts: int = 4, burst_bytes: int = 25_000, buffer_bytes: int = 0) -> LineMeter:
    """Return a meter that has seen bursts two seconds apart on a line of so many bytes per second."""
    meter, now, written, taken = LineMeter(), 0.0, 0, 0.0
    for look in range(int(bursts * 2 / LOOK_S)):
        if look % int(2 / LOOK_S) == 1:
            written += burst_bytes
        meter.sample(now, written, max(int(written - taken) - buffer_bytes, 0))
        now += LOOK_S
        taken = min(taken + line * LOOK_S, written)
    return meter


def decide(rule: RenditionRule, now: float, present: str, **changed) -> Choice | None:
    found = {"lagging": False, "drain": None, "delay_s": 0.0, "left_out": False, "target_s": 1.5, "group_s": 2.0}
    return rule.decide(now, RATES, present, **(found | changed))


@pytest.mark.parametrize("line", [60_000.0, 150_000.0, 300_000.0])
@pytest.mark.parametrize("buffer_bytes", [0, 5_000])
def test_evidence_is_the_rate_within_bursts_whatever_a_receive_buffer_swallows(line, buffer_bytes):
    found = meter_after(line, buffer_bytes=buffer_bytes).evidence(8.0)

    assert found == pytest.approx(line, rel=0.05)


def test_evidence_of_bursts_that_are_gone_at_the_next_look_is_a_bound_from_below():
    found = meter_after(10_000_000.0).evidence(8.0)

    assert 25_000 / (2 * LOOK_S) <= found <= 25_000 / LOOK_S


def test_evidence_without_a_burst_is_not_known():
    meter = LineMeter()
    for look in range(400):
        meter.sample(look * LOOK_S, look * 1500, 0)

    assert meter.evidence(10.0) is None


def test_down_is_to_the_largest_that_the_line_carries():
    rule = RenditionRule(0.0)

    found = decide(rule, 5.0, "1080", lagging=True, drain=160_000.0, delay_s=0.5)

    assert found == Choice("720", "the line takes 1.28 of 2.50 Mbit/s")
