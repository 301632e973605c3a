"""Every benchmark can be run by `make bench`, and what it finds is written into the document.

What measures for minutes is checked on its text, and run in its quick form: the figures are of no interest here, only
that there are some.
"""

from __future__ import annotations

import ast
import json

import pytest
from source_kit import ROOT, functions_of, tree_of

import run as bench_run
from flowctl.analyze.capacity.node import parse_measurements
from flowctl.flv import TAG_VIDEO, FlvWriter
from kit import documents
from kit.tables import table
from kit.trend import trend

BENCHES = sorted(path for room in bench_run.ROOMS for path in (ROOT / "bench" / room).glob("[a-z]*.py"))
COMPUTING = ["amf", "bans", "chunk", "deferred", "profile", "scheduler", "sender", "whatif"]
"""Those without servers and clients, and without a test of their own; the others are run in real time."""


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_benchmark_when_listed_is_a_program_whose_run_needs_no_arguments(path):
    body = tree_of(path).body
    run = next((item for item in body if isinstance(item, ast.FunctionDef) and item.name == "run"), None)
    assert run is not None, f"{path.name} has no run()"
    assert any(item.name == "main" for item in functions_of(path))
    assert "__main__" in path.read_text("utf-8")
    assert len(run.args.posonlyargs + run.args.args) == len(run.args.defaults)
    assert None not in run.args.kw_defaults
    assert run.returns is not None
    assert ast.get_docstring(run)
    quick = next(item.value for item in body if isinstance(item, ast.AnnAssign) and ast.unparse(item.target) == "QUICK")
    names = {argument.arg for argument in run.args.args + run.args.kwonlyargs}
    assert {key.value for key in quick.keys} <= names


@pytest.mark.parametrize("name", COMPUTING)
def test_benchmark_when_quick_returns_rows_of_figures(name):
    module = bench_run.load(name)
    rows = module.run(**module.QUICK)
    assert len(rows) > 1
    assert {frozenset(rows[0])} == {frozenset(row) for row in rows}
    numbers = [value for row in rows for value in row.values() if isinstance(value, int | float)]
    assert max(numbers) > 0
    assert min(numbers) >= 0


def test_scheduler_simulation_when_run_twice_gives_the_same_figures_and_picture(tmp_path):
    module = bench_run.load("scheduler_simulation")
    rows = module.run(**module.QUICK)
    assert rows == module.run(**module.QUICK)
    assert all(row["good_per_s"] > 0 for row in rows)
    assert "| all together |" in module.document(rows, tmp_path)
    assert (tmp_path / module.CHART).exists()


def test_edge_simulation_when_nodes_die_misses_no_segment_and_places_every_viewer(tmp_path):
    module = bench_run.load("edge_simulation")
    rows, again = (module.run(**module.QUICK) for _ in range(2))
    *periods, moved = rows
    assert "placed" in module.document(rows, tmp_path)
    assert min(moved.pop("choice_us"), again[-1].pop("choice_us")) > 0  # real time, which differs
    assert rows == again
    assert periods[-1]["missing"] == 0
    for row in periods:
        assert row["segments"] > 100
        # Three crossings of 40 ms, three of 8 ms, and the time that ports take.
        assert 144 <= row["delay_p50_ms"] < row["delay_max_ms"] < 400
    assert moved["placed"] == moved["viewers_who_came_back"] == 1000
    assert moved["found_no_edge"] == 0
    assert moved["fullest_edge_percent"] < moved["emptiest_edge_percent"] + 1


def test_rendition_simulation_gives_each_steady_line_what_fits_and_every_picture(tmp_path):
    module = bench_run.load("rendition_simulation")
    rows = module.run(worlds=({},), lines=["0.3", "0.5", "0.85", "1.2"])
    for row in rows:
        assert row["pictures_percent"] == 100
        assert row["delay_p95_s"] <= row["target_s"]
        assert row["fitting_percent"] >= 85
        assert (row["switches"] <= 2, row["failed"], row["closed"]) == (True, 0, "")
    assert "| 50 %  |" in module.document(rows, tmp_path)


@pytest.mark.parametrize("shaper_bytes", [2_000, 6_000, 16_000, 64_000, 256_000])
def test_rendition_simulation_tries_in_vain_at_most_once_behind_a_shaper(shaper_bytes):
    """Key frames of 7 kB pass through its bucket as on a fast line."""
    module = bench_run.load("rendition_simulation")
    world = {"shaper_bytes": shaper_bytes, "key_share": 0.07, "round_trip_s": 0.03}
    for row in module.run(worlds=(world,), lines=["0.28", "0.36", "0.52", "1.1"], seconds=300.0):
        assert row["pictures_percent"] > 99
        assert row["freeze_s"] <= 0.5
        assert (row["failed"] <= 1, row["closed"]) == (True, "")


def test_rendition_simulation_of_changing_lines_fails_at_most_once_a_minute_and_is_repeatable():
    module = bench_run.load("rendition_simulation")
    jump, wave = rows = module.run(worlds=({},), lines=["jump", "wave"])
    assert rows == module.run(worlds=({},), lines=["jump", "wave"])
    assert jump["pictures_percent"] >= 98
    assert (jump["failed"] <= 1, wave["failed"] <= 2) == (True, True)


@pytest.mark.realtime
def test_sendfile_when_quick_returns_rows_of_figures():
    module = bench_run.load("sendfile")
    assert len(module.run(**module.QUICK)) > 1


@pytest.mark.realtime
def test_lowat_when_quick_shows_a_stalled_viewer():
    module = bench_run.load("lowat")
    (row,) = module.run(**module.QUICK)
    assert row["stalled_noticed_after_s"] is not None


@pytest.mark.realtime
def test_beside_when_quick_compares_with_and_without_slow_viewers():
    module = bench_run.load("beside")
    alone, beside = module.run(**module.QUICK)
    assert (alone["slow"], beside["slow"]) == (0, module.QUICK["slow"])
    for row in (alone, beside):
        assert (row["failed"], row["missing"]) == (0, 0)
        assert row["p99_ms"] > 0
    assert alone["slow_per_healthy"] is None
    assert alone["healthy_us_per_s"] == beside["healthy_us_per_s"] > 0
    assert isinstance(beside["slow_us_per_s"], int)


@pytest.mark.realtime
def test_asgi_when_quick_has_every_message_of_every_client(monkeypatch, tmp_path):
    module = bench_run.load("asgi")
    monkeypatch.delitem(module.SERVERS, "uvicorn, websockets")
    rows = module.run(**module.QUICK)
    assert [row["complete"] for row in rows] == [module.QUICK["clients"]] * 4
    assert "handed over to flowctl" in module.document(rows, tmp_path)


@pytest.mark.realtime
def test_websockets_when_short_has_every_message_of_each_server_and_says_what_it_cost():
    module = bench_run.load("websockets")
    load = module.Load(size=1000, burst=5, count=10)
    for deflate, servers in ((False, ("websockets", "aiohttp")), (True, ("flowctl",))):
        rows = [row for server in servers for row in module.measure_cost(server, 10, [load], deflate=deflate)]
        assert [(row["server"], row["complete_percent"]) for row in rows] == [(server, 100) for server in servers]
        assert all(row["core_percent"] > 0 and row["delay_p99_ms"] > 0 for row in rows)
        assert all((row["bytes_per_message"] < 900) == deflate for row in rows)
        assert "| clients | server " in module.document(rows, None)


@pytest.mark.realtime
def test_capacity_when_quick_measures_crowds_that_the_job_reads():
    module = bench_run.load("capacity")
    rows = module.run(**module.QUICK)
    assert [row["viewers"] for row in rows] == list(module.QUICK["counts"])
    points = parse_measurements(json.dumps({"rows": rows}), "capacity.json")
    assert [point.cpu_us_per_s for point in points] == [row["cpu_us_per_s"] for row in rows]
    assert all(point.memory_bytes > point.idle_memory_bytes for point in points)
    assert "viewers" in module.document(rows, None)


@pytest.mark.realtime
def test_smooth_when_short_counts_the_rounds_of_many_streams(monkeypatch):
    module = bench_run.load("smooth")
    monkeypatch.setattr(module, "_START_S", 1.0)
    monkeypatch.setattr(module, "_SETTLE_S", 1.0)
    row = module.measure(module.CASES[-1], 0.002, 1.0, 1)
    assert row["playing"] == row["viewers"] >= 20
    assert (row["lost"], row["missing"]) == (0, 0)
    assert row["rounds"] > 0


@pytest.mark.realtime
def test_slow_when_quick_shows_what_lines_carry(monkeypatch, tmp_path):
    module = bench_run.load("slow")
    monkeypatch.setattr(module, "CACHE", tmp_path)
    quick = {**module.QUICK, "window_s": 3.0, "warm_s": 1.0, "shares": (0.5,)}
    rows = module.run(**quick, servers=("flowctl", "all sent"))
    assert [(row["server"], row["line"]) for row in rows] == [
        (server, line) for server in ("flowctl", "all sent") for line in ("50%", "wifi")
    ]
    assert [(row["broken"], row["decode_errors"], row["closed"]) for row in rows] == [(0, 0, "")] * 4
    assert all(row["pictures_percent"] > 0 for row in rows if row["server"] == "all sent")
    assert "50%" in module.document(rows, tmp_path / "images")
    assert (tmp_path / "images" / module.CHART).exists()


def test_slow_when_a_viewer_has_used_half_of_what_its_line_could_carry_says_so():
    module = bench_run.load("slow")
    case = module.Case(bit_rate=1_500_000, gop_s=2.0, b_frames=0)
    whole = {"line": "", "bytes": 1000, "pictures": 200, "audio": 40}
    item = {"line": "50%", "bytes": 250, "line_bytes": 500, "pictures": 50, "audio": 40, "delay_p50_s": 1.0}
    item |= {"delay_p95_s": 1.5, "freeze_s": 0.5, "closed": ""}
    row = module._row("flowctl", case, item, [whole, item], 0.01) | {"broken": 3, "decode_errors": 0}
    assert (row["used_percent"], row["pictures_percent"], row["audio_percent"]) == (50.0, 25.0, 100.0)
    assert (row["broken"], row["reader_late_ms"]) == (3, 0)
    assert module._row("flowctl", case, item | {"line_bytes": 9000}, [whole, item], 0.0)["used_percent"] == 25.0
    assert "50 %, 25 %, 1.0 / 1.5 s, 0.5 s, 100 %, 3 broken" in str(module.shown([row]))
    assert len(module.missed(row)) == 3, "line, pictures, and what FFmpeg found; not the delay"
    good = row | {"used_percent": 96.0, "pictures_percent": 30.0, "broken": 0}
    assert module.missed(good) == []
    assert len(module.missed(good | {"delay_p95_s": 2.1, "closed": "reset"})) == 2


@pytest.mark.realtime
def test_renditions_when_quick_tell_what_came_of_the_set(monkeypatch, tmp_path):
    module = bench_run.load("renditions")
    monkeypatch.setattr(module, "CACHE", tmp_path)
    rows = module.run(**module.QUICK | {"window_s": 4.0}, kinds=("renditions", "cutting"))
    kinds = [(row["viewer"], row["line"]) for row in rows]
    assert kinds == [(viewer, line) for viewer in ("renditions", "cutting") for line in ("50%", "drop")]
    faults = [(row["broken"], row["decode_errors"], row["repeated"], row["closed"]) for row in rows]
    assert faults == [(0, 0, 0, "")] * 4
    of_set, cutting = rows[:2], rows[2:]
    assert all(row["in_360_percent"] > 0 for row in of_set)
    assert of_set[0]["pictures_percent"] > cutting[0]["pictures_percent"]
    assert all(0 < row["in_720_percent"] == row["pictures_percent"] < 100 for row in cutting)
    assert "| 50% " in module.document(rows, tmp_path)


def test_renditions_when_a_viewer_switches_are_told_apart():
    """Two seconds in the smallest one, then the next one with its key frame; a picture and two pieces of sound lack."""
    module = bench_run.load("renditions")
    pictures = [number / 30 for number in range(120)]
    sound = [number * 1024 / 48_000 for number in range(187)]
    sent = module.Published({}, {"720": 2.5e6, "480": 1.2e6, "360": 0.5e6}, pictures, sound)
    each = [
        (due_s + 0.1, due_s, "640x360" if due_s < 2 else "854x480", number in (0, 60))
        for number, due_s in enumerate(pictures)
        if number != 90
    ]
    heard = [(due_s + 0.1, due_s) for number, due_s in enumerate(sound) if number not in (50, 51)]
    item = {"started_s": 1.0, "each_picture": each, "each_sound": heard}
    row = module.figures(item, sent, module.Line([(0.0, 0.5)], 240.0), 4.0)
    assert (row["pictures_percent"], row["sound_percent"], row["sound_gap_s"]) == (99.2, 98.9, 0.064)
    assert (row["in_720_percent"], row["in_480_percent"], row["in_360_percent"]) == (0.0, 49.2, 50.0)
    assert (row["fitting_percent"], row["switches"], row["first_switch_s"]) == (49.2, 1, 1.1)
    assert (row["delay_p95_s"], row["freeze_s"], row["broken"], row["repeated"]) == (0.1, 0.067, 29, 0)
    assert module.missed(row | {"line": "50%", "decode_errors": 0, "closed": ""}) == [
        "in the largest that fits % 49.2, wanted 85",
        "29 broken",
    ]


@pytest.mark.parametrize(
    ("left_out", "broken"),
    [((), 0), ((5,), 0), ((4,), 5), ((4, 5, 6, 7, 8, 9), 0), ((0,), 9), ((0, 10), 18), (tuple(range(2, 20)), 0)],
)
def test_slow_when_a_picture_is_missing_counts_those_that_need_it(tmp_path, left_out, broken):
    heads = {
        "K": b"\x17\x01\0\0\0\0\0\0\x03\x65\0",
        "P": b"\x27\x01\0\0\0\0\0\0\x03\x41\0",
        "B": b"\x27\x01\0\0\0\0\0\0\x03\x01\0",
    }
    paths = tmp_path / "all.flv", tmp_path / "some.flv"
    for path, out in zip(paths, ((), left_out), strict=True):
        with path.open("wb") as file:
            writer = FlvWriter(file)
            for number, kind in enumerate("KPPPPBPPPP" * 2):
                if number not in out:
                    writer.write(TAG_VIDEO, 40 * number, heads[kind] + bytes([number]))
    assert bench_run.load("slow").broken_pictures(*paths) == broken


def record_of(name: str, rows: list[dict]) -> dict:
    machine = {"cpu": "Some CPU", "cores": 2, "system": "Linux 6", "python": "CPython 3", "commit": "abc"}
    return {"name": name, "at": "2026-01-02T03:04:05+00:00", "machine": machine, "rows": rows}


def test_document_when_written_twice_is_the_same(tmp_path):
    document = tmp_path / "benchmarks.md"
    text = (
        "A\n\n<!-- measured: machine -->\n<!-- /measured -->\n\n<!-- measured: amf -->\nold\n<!-- /measured -->\n\nB\n"
    )
    document.write_text(text)
    record = record_of("amf", [{"what": "decode", "mb_per_s": 12.5}])
    assert bench_run.write(record, document, tmp_path)
    once = document.read_text()
    assert bench_run.write(record, document, tmp_path)
    assert document.read_text() == once
    assert "old" not in once
    assert "12.5" in documents.parts(once)["amf"]
    assert "2026-01-02" in documents.parts(once)["amf"]
    assert "Some CPU" in documents.parts(once)["machine"]
    emptied = once
    for part in documents.parts(once).values():
        emptied = emptied.replace(part, "")
    assert emptied == text.replace("old\n", "")


def test_document_when_it_has_no_place_for_a_record_stays_as_it_is(tmp_path):
    document = tmp_path / "benchmarks.md"
    document.write_text("<!-- measured: machine -->\n<!-- /measured -->\n")
    assert not bench_run.write(record_of("amf", [{"what": 1}]), document, tmp_path)
    assert document.read_text() == "<!-- measured: machine -->\n<!-- /measured -->\n"
    with pytest.raises(KeyError, match="amf"):
        documents.written(document.read_text(), "amf", "x")


def test_document_when_read_has_parts_for_benchmarks_only():
    parts = documents.parts(documents.DOCUMENT.read_text("utf-8"))
    assert parts.keys() - {bench_run.MACHINE_PART} == set(bench_run.names()) - bench_run.ON_REQUEST
    assert documents.DOCUMENT.read_text("utf-8").count("<!-- measured:") == len(parts)


def test_table_when_rows_lack_values_leaves_cells_empty():
    lines = table([{"name": "a", "ms": 12.34, "note": None}, {"name": "b", "ms": None}]).splitlines()
    assert lines == [
        "| name |   ms | note |",
        "| ---- | ---: | ---- |",
        "| a    | 12.3 |      |",
        "| b    |      |      |",
    ]


SECONDS = [float(second) for second in range(600)]


def swinging(second: float) -> float:
    return 50 + 5 * (-1) ** int(second / 7)


def test_trend_when_a_figure_swings_is_flat():
    assert trend(SECONDS, [swinging(second) for second in SECONDS], share=0.0001, least=0.001).flat


def test_trend_when_a_figure_leaks_is_not_flat():
    line = trend(SECONDS, [swinging(second) + second / 60 for second in SECONDS], share=0.002, least=0.1)
    assert not line.flat
    assert line.slope_per_min == pytest.approx(1.0, abs=0.1)


def test_trend_when_growth_ends_in_the_first_half_is_flat():
    assert trend(SECONDS, [min(second, 290.0) for second in SECONDS], share=0.0, least=0.0).flat


def test_trend_when_growth_is_allowed_is_flat():
    values = [50 + second / 600 for second in SECONDS]  # 0.1 per minute
    assert trend(SECONDS, values, share=0.003, least=0.0).flat
    assert trend(SECONDS, values, share=0.0, least=0.11).flat
    assert not trend(SECONDS, values, share=0.001, least=0.05).flat


def test_trend_when_there_are_too_few_samples_refuses():
    with pytest.raises(ValueError, match="3 samples"):
        trend([0.0, 1.0, 2.0, 3.0, 4.0], [1.0] * 5, share=0.1, least=0.1)


@pytest.mark.parametrize("name", ["flow_closes", "flow_events", "flow_samples"])
def test_checks_when_put_in_sql_count_rows_as_the_job_does(tmp_path, name):
    duckdb = pytest.importorskip("duckdb")
    from record_kit import close, event, sample, write

    from flowctl.records.telemetry.schema import TABLES
    from pipeline.sql import checks_sql

    row = {"flow_closes": close, "flow_samples": sample}.get(name, lambda *args: event(*args, "limit_hit"))
    rows = [row(1, 1), row(2, 1) | {"node": None}]
    write(tmp_path, rows, table=TABLES[name])
    assert duckdb.sql("set timezone='UTC'; " + checks_sql(str(tmp_path), name)).fetchall() == [(2, 1)]
