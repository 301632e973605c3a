"""The answer of the job capacity: on what it rests, how far it reaches, and what nobody measured."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("pyspark")

from flowctl.errors import ConfigError
from flowctl.pipeline.capacity.job import CapacityOptions, carried, estimate, summary_of
from flowctl.pipeline.capacity.node import MOST_REACH, Measurement, held_out_error, reference

OPTIONS = CapacityOptions(bit_rate=2.5e6, slow_share=0.05)


def thread(viewers, busy):
    """Return a crowd as records tell it."""
    return Measurement(viewers=viewers, bit_rate=2_500_000, cpu_us_per_s=busy * 1e6)


def test_answer_when_records_are_of_57_viewers_is_that_of_the_reference_machine_and_says_so():
    """A small crowd on an idle thread gives thousands of viewers of another machine, loudly, and not fifty thousand."""
    _, found, basis = estimate([thread(10, 0.081), thread(25, 0.085), thread(57, 0.08)], OPTIONS)
    assert basis.source == found["fitted_to"] == "reference"
    assert 2_000 < found["viewers_per_node"] < 4_500
    assert 170 < found["cpu_us_per_viewer_s"] < 260
    assert 9_000 < found["memory_bytes_per_viewer"] < 10_000
    assert found["answer"].startswith("REFERENCE MACHINE, NOT YOURS (")
    assert "Your records do not carry an answer: the largest recorded crowd is 57 viewers" in found["answer"]
    assert found["largest_recorded_viewers"] == 57
    assert found["recorded_over_model"] is None  # no crowd of the reference machine is so small


def test_answer_when_records_are_of_150_viewers_holds_them_beside_the_reference():
    """Records too weak to fit to are still a check: how busy the thread was beside what the model says of them."""
    _, found, _ = estimate([thread(150, 0.146)], OPTIONS)
    assert found["recorded_over_model"] == pytest.approx(2.0, abs=0.1)
    assert "At 150 viewers your thread was recorded to be" in found["answer"]


def test_answer_when_records_carry_it_ends_at_four_times_the_largest_crowd():
    """A fit to 250 viewers says nothing of 3000: the answer is at least 1000, and memory and delay are null."""
    _, found, basis = estimate([thread(100, 0.05), thread(250, 0.11)], OPTIONS)
    assert carried(basis.model, OPTIONS) > MOST_REACH * 250
    assert (found["fitted_to"], found["viewers_per_node"], found["at_least"]) == ("records", MOST_REACH * 250, True)
    assert "AT LEAST 1000 viewers" in found["answer"]
    assert "NOT KNOWN BEYOND, measured up to 250 viewers" in found["answer"]
    assert (found["memory_bytes_per_node"], found["memory_bytes_per_viewer"], found["p99_ms"]) == (None, None, None)
    assert "Memory not measured; delay not measured; 1000000 viewers need at most 1000 nodes." in found["answer"]


def test_answer_when_measurements_are_given_goes_before_the_records():
    """Servers measured from outside know more than a thread's own meter; an answer within their reach is no bound."""
    measured = [
        {"viewers": viewers, "bit_rate": 2.5e6, "cpu_us_per_s": 5_000 + 240 * viewers, "p99_ms": 45.0}
        for viewers in (200, 400, 800)
    ]
    options = CapacityOptions(bit_rate=2.5e6, slow_share=0.0, measurements=json.dumps({"points": measured}))
    _, found, _ = estimate([thread(400, 0.5)], options)
    assert (found["fitted_to"], found["at_least"]) == ("measurements", False)
    assert 2_700 < found["viewers_per_node"] < 2_950
    assert found["answer"].startswith("A node carries 2")
    assert found["recorded_over_model"] == pytest.approx(0.5e6 / (5_000 + 240 * 400), abs=0.01)


def test_answer_when_the_bit_rate_is_far_from_all_crowds_warns():
    """No crowd of 20 Mbit/s was measured on the reference machine, so its answer there is a guess, and says so."""
    options = CapacityOptions(bit_rate=20e6, slow_share=0.0)
    assert "NO CROWD NEAR 20" in estimate([], options)[1]["answer"]
    assert "NO CROWD NEAR" not in estimate([], OPTIONS)[1]["answer"]


def test_answer_when_nothing_fits_is_null_and_not_0():
    """Where no size keeps what was asked for, there is no number of viewers; 0 would be one."""
    rows, _, basis = estimate([], OPTIONS)
    found = summary_of([{**row, "fits": False} for row in rows], basis, OPTIONS)
    assert (found["viewers_per_node"], found["nodes"], found["memory_bytes_per_node"]) == (None, None, None)
    assert "no size of a node that was tried keeps what was asked for" in found["answer"]


def test_answer_when_crowds_were_measured_tells_the_error_at_the_largest():
    """Predicted from the smaller ones, a crowd that took a twentieth more is missed by that."""

    def point(viewers, more=1.0):
        cpu = (5_000 + 240 * viewers) * more
        measured = {"p99_ms": 45.0, "memory_bytes": 50_000_000 + 9_000 * viewers}
        return Measurement(viewers=viewers, bit_rate=2_500_000, cpu_us_per_s=cpu, **measured).as_dict()

    text = json.dumps({"points": [point(200), point(400), point(800, 1.05)]})
    options = CapacityOptions(measurements=text, viewers=20_000, slow_share=0.05, bit_rate=2.5e6)
    rows, found, _ = estimate([], options)
    assert (rows, found) == estimate([], options)[:2]
    assert found["error_share"] == pytest.approx(1 / 1.05 - 1, abs=1e-3)
    assert 2_300 < found["viewers_per_node"] < 2_900
    assert found["viewers_per_node_low"] <= found["viewers_per_node"] <= found["viewers_per_node_high"]
    assert "was missed by -4.8%" in found["answer"]


def test_answer_when_memory_was_not_measured_cannot_keep_it():
    """Null, never a figure; and a node's memory cannot be asked for then."""
    points = [{"viewers": count, "bit_rate": 2.5e6, "cpu_us_per_s": 5_000 + 240 * count} for count in (100, 200)]
    text = json.dumps({"points": points})
    rows, found, _ = estimate([], CapacityOptions(measurements=text, slow_share=0.05, bit_rate=2.5e6))
    assert {(None, None)} == {(row["memory_bytes"], row["p99_ms"]) for row in rows}
    assert (found["viewers_per_node"], found["at_least"]) == (800, True)
    with pytest.raises(ConfigError, match="memory is to be kept, but what a viewer takes of it was not measured"):
        estimate([], CapacityOptions(measurements=text, memory_bytes=1 << 30))


def test_answer_when_the_recorded_load_test_is_held_out_is_within_a_third():
    """Of the crowds of 4000 that were measured beside rivals, each is predicted from those of 100 and 1000 viewers."""
    for bit_rate in (600_000, 2_500_000):
        points = [point for point in reference() if point.bit_rate == bit_rate]
        error, largest = held_out_error(points)
        assert largest.viewers == 4_000
        assert abs(error) < 0.33
