"""The node model: fitted to measurements, it gives them back, predicts others, and says how far off it is."""

from __future__ import annotations

import json

import pytest
from capacity_kit import MEASURED
from hypothesis import given
from hypothesis import strategies as st

from flowctl.analyze.capacity.node import (
    BYTE_US,
    Measurement,
    NodeModel,
    fit,
    held_out_error,
    least_squares,
    parse_measurements,
    why_weak,
)
from flowctl.errors import ConfigError


def crowd(viewers, bit_rate=2_500_000.0, *, idle_us=5_000.0, write_us=9.0, byte_us=BYTE_US, **more):
    cpu = idle_us + viewers * (25 * write_us + bit_rate / 8 * byte_us)
    memory = 50_000_000 + 9_000 * viewers
    return Measurement(viewers=viewers, bit_rate=bit_rate, cpu_us_per_s=cpu, memory_bytes=memory, **more)


def test_fit_when_measurements_follow_the_model_finds_its_costs():
    model = fit([crowd(200), crowd(400), crowd(1000)])
    assert model.cpu.each == pytest.approx(25 * 9.0)
    assert model.cpu.idle == pytest.approx(5_000.0)
    assert model.memory.each == pytest.approx(9_000)
    assert model.residual == pytest.approx(0.0, abs=1e-9)


def test_fit_when_bit_rates_differ_tells_bytes_from_writes():
    model = fit([crowd(400, rate, idle_us=0.0, byte_us=1e-4) for rate in (500_000.0, 5_000_000.0)])
    assert model.cpu.byte == pytest.approx(1e-4)


def test_held_out_error_when_the_largest_crowd_costs_more_says_by_how_much():
    expected = crowd(800)
    measured = Measurement(viewers=800, bit_rate=expected.bit_rate, cpu_us_per_s=expected.cpu_us_per_s * 1.1)
    found = held_out_error([crowd(200), crowd(400), measured])
    assert found is not None
    assert found[0] == pytest.approx(1 / 1.1 - 1)
    assert found[1] is measured
    assert held_out_error([crowd(200)]) is None
    idling = [busy_thread(10, 0.09), busy_thread(50, 0.08), busy_thread(1_000, 0.3)]
    assert held_out_error(idling) is None  # what is left when the largest goes says nothing of it


def test_cpu_when_viewers_are_slow_is_more():
    model = fit([crowd(200), crowd(400)])
    healthy = crowd(100)
    slow = Measurement(viewers=100, bit_rate=2.5e6, cpu_us_per_s=healthy.cpu_us_per_s, slow_share=0.5)
    assert model.error(healthy) == pytest.approx(0.0)
    assert model.error(slow) == pytest.approx(0.25 * (1 - 5_000 / healthy.cpu_us_per_s))


def test_parse_when_the_file_is_of_the_bench_or_of_a_load_run_gives_points():
    text = json.dumps({"rows": [crowd(200).as_dict(), crowd(400).as_dict()]})
    assert [point.viewers for point in parse_measurements(text, "a")] == [200, 400]
    run = {
        "viewers": {"connections": 100},
        "run": {"cpu_us_per_viewer_s": 300.0, "rss_kb": 50_000},
        "profiles": {"healthy": {"connections": 90, "kbit_s": 2500.0, "p99_ms": 50.0}},
    }
    point = parse_measurements(json.dumps(run), "b")[0]
    assert point.cpu_us_per_s == 30_000
    assert point.slow_share == pytest.approx(0.1)
    run["run"]["cpu_us_per_viewer_s"] = None
    with pytest.raises(ConfigError, match="b: the load run does not know"):
        parse_measurements(json.dumps(run), "b")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"viewers": 1}]}', '{"rows": 3}'])
def test_parse_when_it_is_no_measurement_says_where(text):
    with pytest.raises(ConfigError, match=r"^file\.json: "):
        parse_measurements(text, "file.json")


def test_fit_when_a_crowd_was_saturated_leaves_it_out():
    late = Measurement(viewers=800, bit_rate=2_500_000, cpu_us_per_s=1_000, p99_ms=8_000.0)
    assert fit([crowd(200), crowd(400)]) == fit([crowd(200), crowd(400), late])
    with pytest.raises(ConfigError, match="0 measurements"):
        fit([late])


def test_fit_when_there_is_nothing_refuses():
    with pytest.raises(ConfigError, match="0 measurements"):
        fit([])
    assert fit([crowd(300)]).error(crowd(300)) == pytest.approx(0.0)


# -- what was not measured, and what does not carry a fit


def busy_thread(viewers, busy):
    return Measurement(viewers=viewers, bit_rate=2_500_000, cpu_us_per_s=busy * 1e6)


def test_fit_when_memory_was_not_measured_does_not_know_it():
    model = fit([busy_thread(200, 0.06), busy_thread(800, 0.2)])
    assert model.memory is None
    assert fit([crowd(400)]).memory is None  # one size says what all took, and nothing of a viewer
    idle = fit([crowd(400, idle_memory_bytes=50_000_000)])
    assert idle.memory.one(2.5e6) == pytest.approx(9_000)


@pytest.mark.parametrize("name", ["memory_bytes", "idle_memory_bytes", "p99_ms"])
def test_measurement_when_a_figure_is_0_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} of a measurement is 0, it must be more than 0, or null"):
        Measurement(viewers=1, bit_rate=1e6, cpu_us_per_s=1.0, **{name: 0})


def test_fit_when_processor_time_does_not_grow_with_the_crowd_refuses():
    idling = [busy_thread(10, 0.081), busy_thread(25, 0.085), busy_thread(57, 0.08)]
    with pytest.raises(ConfigError, match="do not tell what a viewer costs"):
        fit(idling)


@pytest.mark.parametrize(
    ("points", "most", "why"),
    [
        ([], 0, "no seconds with viewers"),
        ([], 1, "the largest recorded crowd is 1 viewer, 200 are needed"),
        ([], 300, "threads were full, or how busy they were was not recorded"),
        ([busy_thread(10, 0.05), busy_thread(57, 0.08)], 57, "is 57 viewers, 200 are needed"),
        ([busy_thread(100, 0.02), busy_thread(300, 0.04)], 300, "busy for 4.0% at most"),
        ([busy_thread(100, 0.3), busy_thread(300, 0.2)], 300, "do not tell what a viewer costs"),
    ],
)
def test_records_when_weak_say_why(points, most, why):
    assert why in why_weak(points, most)


def test_records_when_crowds_are_large_and_the_thread_is_busy_carry_a_fit():
    assert why_weak([busy_thread(100, 0.05), busy_thread(300, 0.12)]) == ""


def test_fit_when_of_a_real_machine_gives_what_a_viewer_costs_by_bit_rate():
    model = fit(MEASURED)
    assert isinstance(model, NodeModel)
    assert max(abs(model.error(point)) for point in MEASURED) < 0.1
    assert 170 < model.cpu.one(600_000) < model.cpu.one(2_500_000) < 210
    assert model.memory.one(600_000) == pytest.approx(6_900, rel=0.03)
    assert model.memory.one(2_500_000) == pytest.approx(9_400, rel=0.03)


def test_parse_when_several_results_stand_one_after_the_other_reads_all():
    run = {
        "viewers": {"connections": 100},
        "run": {"cpu_us_per_viewer_s": 300.0, "rss_kb": None},
        "profiles": {"healthy": {"connections": 100, "kbit_s": 2500.0, "p99_ms": 50.0}},
    }
    text = f"{json.dumps(run)}\n{json.dumps([run])}\n"
    found = parse_measurements(text, "a")
    assert [(point.viewers, point.memory_bytes) for point in found] == [(100, None)] * 2
    rows = [{**crowd(200).as_dict(), "error_share": None, "full": False}]
    assert parse_measurements(json.dumps({"rows": rows}), "c") == [crowd(200)]


@given(
    factors=st.lists(st.floats(0, 1e3), min_size=3, max_size=3),
    columns=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=4, max_size=9, unique=True),
)
def test_least_squares_when_values_follow_the_columns_reproduces_them(factors, columns):
    rows = [(1.0, float(x), float(y)) for x, y in columns]
    values = [factors[0] + factors[1] * x + factors[2] * y for _, x, y in rows]
    found = least_squares(rows, values)
    assert min(found) >= 0
    for xs, value in zip(rows, values, strict=True):
        assert sum(a * b for a, b in zip(xs, found, strict=True)) == pytest.approx(value, abs=1e-3 * max(values) + 1e-9)


@pytest.mark.parametrize(
    ("name", "value"), [("connections", 0), ("kbit_s", float("nan")), ("kbit_s", float("inf")), ("p99_ms", "late")]
)
def test_parse_when_a_load_run_has_no_number_says_where(name, value):
    run = {
        "viewers": {"connections": 100},
        "run": {"cpu_us_per_viewer_s": 300.0, "rss_kb": None},
        "profiles": {"healthy": {"connections": 90, "kbit_s": 2500.0, "p99_ms": 50.0}},
    }
    (run["viewers"] if name == "connections" else run["profiles"]["healthy"])[name] = value
    with pytest.raises(ConfigError, match=r"^file\.json: "):
        parse_measurements(json.dumps(run), "file.json")


def test_parse_when_lists_lie_too_deep_says_where():
    with pytest.raises(ConfigError, match=r"^file\.json: "):
        parse_measurements("[" * 100_000, "file.json")
