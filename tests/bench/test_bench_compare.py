"""The comparison of servers: its order, its resumption, its doubts, its chart and table; and that it runs at all."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from compare import measure, plan, render, rivals
from flowctl.testing import ManualClock
from kit import charts
from whole import compare as bench_compare
from whole import soak as bench_soak

PLAN = plan.Plan(contenders=("flowctl", "bare loop"), viewers=(10, 20), lazy_viewers=(20,), bit_rates=(1000,), repeat=2)
SOUND = {
    "cpu_us_per_viewer_s": 100.0,
    "delay_p50_ms": 20.0,
    "delay_p99_ms": 40.0,
    "lag_p99_ms": 1.0,
    "memory_kb_per_viewer": 10.0,
    "missing": 0,
    "lost": 0,
    "idle_share": 0.5,
    "crowd_cpu_share": 0.2,
    "server_cpu_share": 0.2,
    "delivered_share": 1.0,
    "delay_drift_ms": 0.0,
    "rounds_per_s": 50.0,
    "doubts": [],
}


@pytest.fixture
def measured(monkeypatch):
    """Stand in for measuring: a list of what was measured, in order; the fourth measurement can be interrupted."""
    calls = []

    def pretend(contender, settings, *, window_s, measured):
        calls.append((contender.name, settings))
        if len(calls) == calls_left[0]:
            raise KeyboardInterrupt
        return {**SOUND, "cpu_us_per_viewer_s": 100.0 if contender.name == "flowctl" else 80.0}

    calls_left = [0]
    calls_of = type("Calls", (), {"made": calls, "interrupt_at": lambda self, count: calls_left.__setitem__(0, count)})
    monkeypatch.setattr(measure, "measure", pretend)
    monkeypatch.setattr(bench_compare, "commit", lambda: "abc")
    return calls_of()


def test_plan_when_carried_out_alternates_contenders():
    items = list(PLAN.items())
    assert len(items) == 2 * 2 * 3
    assert [item.name for item in items[:4]] == ["flowctl", "bare loop", "flowctl", "bare loop"]
    assert [item.name for item in items[6:8]] == ["bare loop", "flowctl"]
    assert [(item.viewers, item.nap_s) for item in items[:6:2]] == [(10, 0.0), (20, 0.0), (20, plan.LAZY_S)]
    assert len(set(items)) == len(items)


def test_comparison_when_interrupted_goes_on(tmp_path, measured, capsys):
    path = tmp_path / "compare.jsonl"
    measured.interrupt_at(4)
    with pytest.raises(KeyboardInterrupt):
        bench_compare.carry_out(PLAN, path)
    assert len(path.read_text().splitlines()) == 3
    rows = bench_compare.carry_out(PLAN, path)
    assert len(measured.made) == 12 + 1
    assert "goes on with 3 of 12" in capsys.readouterr().err
    assert [(row["name"], row["repetitions"]) for row in rows[:2]] == [("flowctl", 2), ("bare loop", 2)]
    assert [row["flowctl_ratio"] for row in rows[:2]] == [1.0, 1.25]
    bench_compare.carry_out(PLAN, path)
    assert len(measured.made) == 12 + 1


def test_comparison_when_a_line_was_cut_short_measures_that_again(tmp_path, measured):
    path = tmp_path / "compare.jsonl"
    bench_compare.carry_out(PLAN, path)
    path.write_text(path.read_text()[:-20])
    bench_compare.carry_out(PLAN, path)
    assert len(measured.made) == 12 + 1
    bench_compare.carry_out(PLAN, path)
    assert len(measured.made) == 12 + 1


def test_comparison_when_settings_or_code_differ_begins_anew(tmp_path, measured):
    path = tmp_path / "compare.jsonl"
    bench_compare.carry_out(PLAN, path)
    bench_compare.carry_out(dataclasses.replace(PLAN, window_s=1.0), path)
    assert len(measured.made) == 2 * 12


def test_comparison_when_flowctl_was_measured_runs_the_loop_at_its_interval(tmp_path, measured):
    bench_compare.carry_out(PLAN, tmp_path / "compare.jsonl")
    assert {settings.interval_s for name, settings in measured.made if name == "bare loop"} == {0.02}


def test_comparison_when_one_measurement_fails_keeps_the_others(tmp_path, monkeypatch, capsys):
    def fail(contender, settings, *, window_s, measured):
        if contender.name == "bare loop":
            raise RuntimeError("it did not start")
        return dict(SOUND)

    monkeypatch.setattr(measure, "measure", fail)
    rows = bench_compare.carry_out(PLAN, tmp_path / "compare.jsonl")
    loop = [row for row in rows if row["name"] == "bare loop"]
    assert [row["doubts"] for row in loop] == [["failed: RuntimeError: it did not start"]] * 3
    assert all(row["cpu_us_per_viewer_s"] for row in rows if row["name"] == "flowctl")
    assert "it did not start" in capsys.readouterr().err


def test_comparison_when_a_rival_is_absent_says_so(tmp_path, measured, monkeypatch, capsys):
    nginx = dataclasses.replace(rivals.CONTENDERS["nginx-rtmp"], absent=lambda: "install it like so")
    monkeypatch.setitem(rivals.CONTENDERS, "nginx-rtmp", nginx)
    rows = bench_compare.carry_out(dataclasses.replace(PLAN, contenders=("flowctl", "nginx-rtmp")), tmp_path / "c")
    assert "nginx-rtmp is left out: install it like so" in capsys.readouterr().err
    assert {name for name, _ in measured.made} == {"flowctl"}
    text = render.document(rows, tmp_path)
    assert "left out: install it like so" in text


def test_rivals_when_programs_are_missing_tell_how_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("FLOWCTL_CACHE", str(tmp_path))
    monkeypatch.setattr(rivals.shutil, "which", lambda program: None)
    assert "libnginx-mod-rtmp" in rivals.no_nginx()
    assert "nodejs" in rivals.install_node()
    monkeypatch.setattr(rivals.shutil, "which", lambda program: program if program == "node" else None)
    assert "--install" in rivals.no_node()
    assert "npm" in rivals.install_node()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"idle_share": 0.01}, "machine: 1% idle"),
        ({"crowd_cpu_share": 0.99}, "machine: the crowd"),
        ({"lag_p99_ms": 30.0}, "machine: the reader lagged 30 ms"),
        ({"server_cpu_share": 0.99}, "server: filled a core"),
        ({"missing": 1}, "server: frames missing"),
        ({"lost": 1}, "server: viewers lost"),
        ({"delay_drift_ms": 500.0}, "server: delay grew by 500 ms"),
        ({"delivered_share": 0.6}, "server: delivered 60%"),
        ({"delivered_share": 1.2}, "server: delivered 120%"),
    ],
)
def test_doubts_when_something_was_full_name_it(change, words):
    assert measure.doubts(SOUND) == []
    (doubt,) = measure.doubts({**SOUND, **change})
    assert doubt.startswith(words)


def test_ratio_when_something_was_full_is_in_brackets():
    item = plan.Item(name="flowctl", viewers=10, bit_rate=1000, repetition=0)
    found = {
        item: SOUND,
        dataclasses.replace(item, name="nginx-rtmp"): {**SOUND, "doubts": ["server: delivered 50%"]},
        dataclasses.replace(item, name="bare loop"): {**SOUND, "cpu_us_per_viewer_s": 80.0},
    }
    ratios = {row["server"]: row["flowctl / it"] for row in render.shown(render.rows(found, {}))}
    assert ratios == {"flowctl": "", "nginx-rtmp": "(1.00)", "bare loop": "1.25"}


def test_rows_when_repetitions_differ_hide_no_loss():
    item = plan.Item(name="flowctl", viewers=10, bit_rate=1000, repetition=0)
    runs = [
        {**SOUND, "cpu_us_per_viewer_s": 100.0, "missing": 7, "doubts": ["machine: 1% idle"]},
        {**SOUND, "cpu_us_per_viewer_s": 900.0, "doubts": ["machine: 2% idle", "server: frames missing"]},
        {**SOUND, "cpu_us_per_viewer_s": 110.0},
    ]
    found = {dataclasses.replace(item, repetition=number): figures for number, figures in enumerate(runs)}
    (row,) = render.rows(found, {})
    assert (row["cpu_us_per_viewer_s"], row["missing"], row["cpu_most"]) == (110.0, 7, 900.0)
    assert row["doubts"] == ["machine: 1% idle"]


def test_chart_when_drawn_twice_is_the_same_small_file(tmp_path):
    items = plan.Plan(contenders=rivals.USUAL).items()
    costs = itertools.cycle((100.0, 120.0, 90.0, 300.0, 250.0, 80.0, 170.0))
    found = {item: {**SOUND, "cpu_us_per_viewer_s": cost} for item, cost in zip(items, costs, strict=False)}
    rows = render.rows(found, {})
    texts = [render.document(rows, tmp_path / folder) for folder in ("a", "b")]
    first, second = ((tmp_path / folder / render.CHART).read_bytes() for folder in ("a", "b"))
    assert texts[0] == texts[1]
    assert first == second
    assert len(first) <= charts.MOST_BYTES
    assert b"<title>Processor time" in first
    assert b"prefers-color-scheme: dark" in first


def test_progress_when_measurements_are_slow_estimates_more():
    clock = ManualClock()
    items = list(PLAN.items())
    progress = plan.Progress(items, PLAN.window_s, clock)
    before = progress.left_s
    clock.advance(2 * items[0].estimate_s(PLAN.window_s))
    progress.done(items[0])
    assert progress.left_s == pytest.approx(2 * (before - items[0].estimate_s(PLAN.window_s)))


def test_soak_when_its_samples_are_drawn_says_what_rose(tmp_path):
    samples = [
        {
            "at_s": float(second),
            "connections": 1000,
            "rss_bytes": 50e6 + second * 1e5,
            "fds": 1010,
            "queue_bytes": 1e6 * (second % 3),
            "cache_bytes": 2e5,
            "blocks": 3e5,
            "closed": {"stuck": 3},
        }
        for second in range(600)
    ]
    source = tmp_path / "samples.json"
    healthy = {"connections": 800, "missing": 0.0, "p99_ms": 41.0}
    source.write_text(json.dumps({"samples": samples, "load": {"profiles": {"healthy": healthy}}}))
    rows = bench_soak.rows_of(samples)
    assert {row["figure"]: row["flat"] for row in rows if row["flat"] != "yes"} == {"resident memory, MB": "NO"}
    text = bench_soak.document(rows, tmp_path, source)
    assert "3 stuck" in text
    assert "missed 0 frames" in text
    assert len((tmp_path / bench_soak.CHART).read_bytes()) <= charts.MOST_BYTES


@pytest.mark.realtime
def test_comparison_when_run_measures_server_and_loop(tmp_path):
    tiny = plan.Plan(
        contenders=("flowctl", "bare loop"),
        viewers=(12,),
        bit_rates=(600_000,),
        repeat=1,
        window_s=1.0,
        settle_s=0.5,
        measured=4,
    )
    ours, loop = bench_compare.carry_out(tiny, tmp_path / "compare.jsonl")
    assert not any(doubt.startswith("failed") for doubt in [*ours["doubts"], *loop["doubts"]])
    assert ours["missing"] == 0
    assert ours["delay_p99_ms"] > 0
    assert ours["cpu_us_per_viewer_s"] > 0
    assert loop["cpu_us_per_viewer_s"] > 0
    assert loop["delay_p99_ms"] is None


@pytest.mark.realtime
def test_soak_when_quick_samples_the_server(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_soak, "RESULTS", tmp_path)
    found = bench_soak.soak(bench_soak.SHORT)
    assert max(sample["connections"] for sample in found["samples"]) > bench_soak.SHORT.viewers / 2
    assert found["load"]["profiles"]["healthy"]["missing"] == 0
    assert len(bench_soak.rows_of(found["samples"])) == len(bench_soak.FIGURES)
