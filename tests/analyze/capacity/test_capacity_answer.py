"""The answer of the job capacity: on what it rests, how far it reaches, and what nobody measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("pyspark")

from capacity_kit import MEASURED

from flowctl.analyze.capacity.job import MOST_REACH, carried, estimate, headline
from flowctl.analyze.capacity.node import BYTE_US, MEASURE, Measurement, fit, held_out_error
from flowctl.analyze.options import CapacityOptions
from flowctl.errors import ConfigError

OPTIONS = CapacityOptions(bit_rate=2.5e6, slow_share=0.05)


def thread(viewers, busy):
    return Measurement(viewers=viewers, bit_rate=2_500_000, cpu_us_per_s=busy * 1e6)


REFERENCE = json.dumps({"rows": [point.as_dict() for point in MEASURED]})


def test_answer_when_records_are_of_57_viewers_is_not_known_and_how_to_measure_it():
    found = estimate([thread(10, 0.081), thread(25, 0.085), thread(57, 0.08)], OPTIONS)
    assert (found["fitted_to"], found["viewers_per_node"], found["at_least"]) == ("", None, False)
    assert found["answer"].startswith("Not known for your machine: measure it (flowctl load rtmp://")
    assert found["answer"].endswith("): the largest recorded crowd is 57 viewers, 200 are needed.")
    assert headline(found, OPTIONS) == MEASURE
    assert found["largest_recorded_viewers"] == 57


def test_answer_when_records_carry_it_ends_at_four_times_the_largest_crowd():
    crowds = [thread(100, 0.05), thread(250, 0.11)]
    found = estimate(crowds, OPTIONS)
    assert carried(fit(crowds), OPTIONS) == (MOST_REACH * 250, "measured")
    assert (found["fitted_to"], found["viewers_per_node"], found["at_least"]) == ("records", MOST_REACH * 250, True)
    assert "AT LEAST 1,000 viewers" in found["answer"]
    assert "NOT KNOWN BEYOND, that is 4 times the largest" in found["answer"]
    assert (found["memory_bytes_per_node"], found["memory_bytes_per_viewer"]) == (None, None)
    assert "Memory not measured. 1,000,000 viewers need at most 1,250 nodes" in found["answer"]


def test_answer_when_measurements_are_given_goes_before_the_records():
    measured = [
        {"viewers": viewers, "bit_rate": 2.5e6, "cpu_us_per_s": 5_000 + 240 * viewers, "p99_ms": 45.0}
        for viewers in (200, 400, 800)
    ]
    options = CapacityOptions(bit_rate=2.5e6, slow_share=0.0, measurements=json.dumps({"rows": measured}))
    found = estimate([thread(400, 0.5)], options)
    assert (found["fitted_to"], found["at_least"]) == ("measurements", False)
    assert 2_700 < found["viewers_per_node"] < 2_950
    assert found["answer"].startswith("A node carries 2")


def test_answer_when_the_bit_rate_is_far_from_all_crowds_warns():
    options = CapacityOptions(bit_rate=20e6, slow_share=0.0, measurements=REFERENCE)
    assert "NO CROWD NEAR 20" in estimate([], options)["answer"]
    assert "NO CROWD NEAR" not in estimate([], replace(options, bit_rate=2.5e6))["answer"]


def test_answer_when_nothing_fits_is_null_and_not_0():
    """Where no size keeps what was asked for, there is no number of viewers; 0 would be one."""
    # The machine has 46.5 MB without a viewer.
    found = estimate(
        [], CapacityOptions(bit_rate=2.5e6, slow_share=0.05, memory_bytes=40 << 20, measurements=REFERENCE)
    )
    assert (found["viewers_per_node"], found["nodes"], found["memory_bytes_per_node"]) == (None, None, None)
    assert "A node carries no viewers of 2.50 Mbit/s" in found["answer"]


def test_answer_when_crowds_were_measured_tells_the_error_at_the_largest():
    def point(viewers, more=1.0):
        cpu = (5_000 + 240 * viewers) * more
        measured = {"p99_ms": 45.0, "memory_bytes": 50_000_000 + 9_000 * viewers}
        return Measurement(viewers=viewers, bit_rate=2_500_000, cpu_us_per_s=cpu, **measured).as_dict()

    text = json.dumps({"rows": [point(200), point(400), point(800, 1.05)]})
    options = CapacityOptions(measurements=text, viewers=20_000, slow_share=0.05, bit_rate=2.5e6)
    found = estimate([], options)
    assert found["error_share"] == pytest.approx(1 / 1.05 - 1, abs=1e-3)
    assert 2_300 < found["viewers_per_node"] < 2_900
    assert found["viewers_per_node_low"] <= found["viewers_per_node"] <= found["viewers_per_node_high"]
    assert "The largest of them, predicted from the smaller ones, was missed by -4.8%." in found["answer"]


def test_answer_when_memory_was_not_measured_cannot_keep_it():
    points = [{"viewers": count, "bit_rate": 2.5e6, "cpu_us_per_s": 5_000 + 240 * count} for count in (100, 200)]
    text = json.dumps({"rows": points})
    found = estimate([], CapacityOptions(measurements=text, slow_share=0.05, bit_rate=2.5e6))
    assert (found["memory_bytes_per_node"], found["memory_bytes_per_viewer"]) == (None, None)
    assert (found["viewers_per_node"], found["at_least"]) == (800, True)
    with pytest.raises(ConfigError, match="memory is to be kept, but what a viewer takes of it was not measured"):
        estimate([], CapacityOptions(measurements=text, memory_bytes=1 << 30))


def test_answer_when_the_recorded_load_test_is_held_out_is_within_a_third():
    for bit_rate in (600_000, 2_500_000):
        points = [point for point in MEASURED if point.bit_rate == bit_rate]
        error, largest = held_out_error(points)
        assert largest.viewers == 4_000
        assert abs(error) < 0.33


def test_answer_when_measurements_contradict_each_other_has_a_wide_range():
    rows = [{"viewers": 500, "bit_rate": 2.5e6, "cpu_us_per_s": cost} for cost in (3e5, 1e6, 9e6)]
    found = estimate([], CapacityOptions(measurements=json.dumps({"rows": rows}), slow_share=0.05, bit_rate=2.5e6))
    assert found["residual_share"] > 0.5
    assert found["viewers_per_node_low"] < found["viewers_per_node"] <= found["viewers_per_node_high"]


@pytest.mark.parametrize(
    ("slow_share", "memory_bytes", "carries", "ended_by"),
    [
        (0.0, None, 2_758, "processor"),  # (700 - 5) ms / (240 + 12) us
        (0.2, None, 2_507, "processor"),  # of viewers who cost a tenth more
        (0.0, 59_000_000, 1_000, "memory"),  # (59 - 50) MB / 9 kB
        (0.0, 45_000_000, 0, "memory"),
    ],
)
def test_answer_when_a_resource_ends_it_names_which(slow_share, memory_bytes, carries, ended_by):
    def point(viewers):
        memory = {"memory_bytes": 50_000_000 + 9_000 * viewers, "idle_memory_bytes": 50_000_000}
        cpu = 5_000 + viewers * (240 + 2_500_000 / 8 * BYTE_US)
        return Measurement(viewers=viewers, bit_rate=2_500_000, cpu_us_per_s=cpu, **memory)

    options = CapacityOptions(bit_rate=2.5e6, slow_share=slow_share, memory_bytes=memory_bytes)
    assert carried(fit([point(200), point(800)]), options) == (pytest.approx(carries, abs=60), ended_by)
    told = estimate(
        [], CapacityOptions(bit_rate=2.5e6, slow_share=0.0, memory_bytes=55_000_000, measurements=REFERENCE)
    )
    assert told["ended_by"] == "memory"
    assert "what ends it is its memory" in told["answer"]
