"""The node model: fitted to measurements, it gives them back, predicts others, and says how far off it is."""

from __future__ import annotations

import json

import pytest

from flowctl.capacitymodel import (
    BYTE_US,
    Measurement,
    error_of,
    fit,
    held_out_error,
    parse_measurements,
)
from flowctl.errors import ConfigError


def crowd(viewers, bit_rate=2_500_000.0, *, idle_us=5_000.0, write_us=9.0, byte_us=BYTE_US, **more):
    """Return what a node of known costs would have measured."""
    cpu = idle_us + viewers * (25 * write_us + bit_rate / 8 * byte_us)
    memory = 50_000_000 + 9_000 * viewers
    return Measurement(viewers=viewers, bit_rate=bit_rate, cpu_us_per_s=cpu, memory_bytes=memory, **more)


def test_fit_when_measurements_follow_the_model_finds_its_costs():
    """Crowds of a node of known costs lead back to these costs, with no residual."""
    model = fit([crowd(200), crowd(400), crowd(1000)])
    assert model.write_us == pytest.approx(9.0)
    assert model.idle_us == pytest.approx(5_000.0)
    assert model.viewer_memory_bytes == pytest.approx(9_000)
    assert model.residual == pytest.approx(0.0, abs=1e-9)


def test_fit_when_bit_rates_differ_tells_bytes_from_writes():
    """With crowds of far apart bit rates the cost of a byte is measured, not taken from the documents."""
    model = fit([crowd(400, rate, idle_us=0.0, byte_us=1e-4) for rate in (500_000.0, 5_000_000.0)])
    assert model.byte_us == pytest.approx(1e-4)


def test_held_out_error_when_the_largest_crowd_costs_more_says_by_how_much():
    """The largest crowd is predicted without being in the fit: a tenth more than predicted is an error of -1/11."""
    expected = crowd(800)
    measured = Measurement(viewers=800, bit_rate=expected.bit_rate, cpu_us_per_s=expected.cpu_us_per_s * 1.1)
    found = held_out_error([crowd(200), crowd(400), measured])
    assert found is not None
    assert found[0] == pytest.approx(1 / 1.1 - 1)
    assert found[1] is measured
    assert held_out_error([crowd(200)]) is None


def test_cpu_when_viewers_are_slow_is_more():
    """Who is served alone costs more; nobody costs less than nothing."""
    model = fit([crowd(200), crowd(400)])
    assert model.cpu_us_per_s(100, 1e6, 0.5) > model.cpu_us_per_s(100, 1e6, 0.0) > model.idle_us >= 0


def test_parse_when_the_file_is_of_the_bench_or_of_a_load_run_gives_points():
    """Both forms of measurements are read; a load run that does not know the server's cost is refused."""
    text = json.dumps({"points": [crowd(200).as_dict(), crowd(400).as_dict()]})
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


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"points": [{"viewers": 1}]}', '{"points": 3}'])
def test_parse_when_it_is_no_measurement_says_where(text):
    """What is no file of measurements is a clear error with the file's name."""
    with pytest.raises(ConfigError, match=r"^file\.json: "):
        parse_measurements(text, "file.json")


def test_fit_when_a_crowd_was_saturated_leaves_it_out():
    """A crowd whose healthy viewers were seconds late shows a full machine, not a cheap one."""
    late = Measurement(viewers=800, bit_rate=2_500_000, cpu_us_per_s=1_000, p99_ms=8_000.0)
    assert fit([crowd(200), crowd(400)]) == fit([crowd(200), crowd(400), late])
    with pytest.raises(ConfigError, match="0 measurements"):
        fit([late])


def test_fit_when_there_is_nothing_refuses():
    """No measurements, no model."""
    with pytest.raises(ConfigError, match="0 measurements"):
        fit([])
    assert error_of(fit([crowd(300)]), crowd(300)) == pytest.approx(0.0)
