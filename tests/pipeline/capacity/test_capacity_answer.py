"""The answer of the job capacity: on what it rests, how far it reaches, and what nobody measured."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("pyspark")

from flowctl.pipeline.capacity.answer import CapacityOptions, basis_of, summary_of
from flowctl.pipeline.capacity.model import MOST_REACH, Measurement
from flowctl.pipeline.jobs.capacity import carried, sizes_to_try

OPTIONS = CapacityOptions(bit_rate=2.5e6, slow_share=0.05, session_s=600.0)


def thread(viewers, busy):
    """Return a crowd as records tell it."""
    return Measurement(viewers=viewers, bit_rate=2_500_000, cpu_us_per_s=busy * 1e6)


def rows_of(basis, options=OPTIONS):
    """Return the table of the job as the model alone gives it, without noise among viewers."""
    rows = []
    for size in sizes_to_try(basis.model, options):
        busy = basis.model.cpu_us_per_s(size, options.bit_rate, options.slow_share) / 1e6
        p99, memory = basis.model.p99_ms(busy), basis.model.memory_bytes(size, options.bit_rate)
        spread = 2 * basis.model.residual
        rows.append(
            {
                "viewers": size,
                "nodes": -(-options.viewers // size),
                "busy_low": busy * (1 - spread),
                "busy_high": busy * (1 + spread),
                "p99_ms": p99,
                "memory_bytes": memory,
                "fits": busy <= options.busy,
            }
        )
    return rows


def test_answer_when_records_are_of_57_viewers_is_that_of_the_reference_machine_and_says_so():
    """A small crowd on an idle thread gives thousands of viewers of another machine, loudly, and not fifty thousand."""
    basis = basis_of([thread(10, 0.081), thread(25, 0.085), thread(57, 0.08)], OPTIONS)
    found = summary_of(rows_of(basis), basis, OPTIONS)
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
    basis = basis_of([thread(150, 0.146)], OPTIONS)
    found = summary_of(rows_of(basis), basis, OPTIONS)
    assert found["recorded_over_model"] == pytest.approx(2.0, abs=0.1)
    assert "At 150 viewers your thread was recorded to be" in found["answer"]


def test_answer_when_records_carry_it_ends_at_four_times_the_largest_crowd():
    """A fit to 250 viewers says nothing of 3000: the answer is at least 1000, and memory and delay are null."""
    basis = basis_of([thread(100, 0.05), thread(250, 0.11)], OPTIONS)
    found = summary_of(rows_of(basis), basis, OPTIONS)
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
    options = CapacityOptions(
        bit_rate=2.5e6, slow_share=0.0, session_s=600.0, measurements=json.dumps({"points": measured})
    )
    basis = basis_of([thread(400, 0.5)], options)
    found = summary_of(rows_of(basis, options), basis, options)
    assert (found["fitted_to"], found["at_least"]) == ("measurements", False)
    assert 2_700 < found["viewers_per_node"] < 2_950
    assert found["answer"].startswith("A node carries 2")
    assert found["recorded_over_model"] == pytest.approx(0.5e6 / (5_000 + 240 * 400), abs=0.01)


def test_answer_when_the_bit_rate_is_far_from_all_crowds_warns():
    """No crowd of 20 Mbit/s was measured on the reference machine, so its answer there is a guess, and says so."""
    options = CapacityOptions(bit_rate=20e6, slow_share=0.0, session_s=600.0)
    basis = basis_of([], options)
    assert "NO CROWD NEAR 20" in summary_of(rows_of(basis, options), basis, options)["answer"]
    assert "NO CROWD NEAR" not in summary_of(rows_of(basis), basis, OPTIONS)["answer"]


def test_answer_when_nothing_fits_is_null_and_not_0():
    """Where no size keeps what was asked for, there is no number of viewers; 0 would be one."""
    basis = basis_of([], OPTIONS)
    rows = [{**row, "fits": False} for row in rows_of(basis)]
    found = summary_of(rows, basis, OPTIONS)
    assert (found["viewers_per_node"], found["nodes"], found["memory_bytes_per_node"]) == (None, None, None)
    assert "no size of a node that was tried keeps what was asked for" in found["answer"]
