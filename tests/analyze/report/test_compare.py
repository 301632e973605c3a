"""Two runs of the pipeline compared: what changed and how sure, from planted results; without Spark."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from report_kit import NASTY, felt, found_of, run_in, session, tables_of

from flowctl.analyze import compare
from flowctl.analyze.report import gather, job
from flowctl.analyze.report.found import MEASURES
from flowctl.cli import main
from flowctl.errors import ConfigError

NOT_KNOWN = "Not known: no figure is known of enough viewers in both runs."


def a_share(part, n):
    return {"n": n, "value": part / n, "low": None, "high": None, "part": part}


def a_mean(value, error, n=400):
    off = 2.6 * error
    return {"n": n, "value": value, "low": value - off, "high": value + off, "part": None}


@pytest.mark.parametrize(
    ("name", "before", "after", "verdict"),
    [
        ("troubled", a_share(60, 400), a_share(20, 400), "better"),
        ("troubled", a_share(20, 400), a_share(60, 400), "worse"),
        ("troubled", a_share(20, 400), a_share(28, 400), "no difference"),
        ("troubled", a_share(3, 7), a_share(1, 7), "no difference"),
        ("troubled", a_share(0, 7), a_share(7, 7), "worse"),
        ("picture_share", a_mean(0.90, 0.005), a_mean(0.95, 0.005), "better"),
        ("delay_p95_ms", a_mean(900, 40), a_mean(2000, 90), "worse"),
        ("delay_p95_ms", a_mean(900, 40), a_mean(960, 40), "no difference"),
        ("delay_p95_ms", a_mean(900, 1, 19), a_mean(2000, 1), "too few"),
        ("bit_rate", a_mean(2e6, 1e3), a_mean(3e6, 1e3), "changed"),
        ("stall_ratio", a_mean(0, 0), a_mean(0, 0), "no difference"),
        ("stall_ratio", None, a_mean(0.1, 0.01), "too few"),
        ("first_frame_p50_ms", a_mean(0.3, 0.01), a_mean(0.5, 0.01), "too small"),
        ("first_frame_p50_ms", a_mean(300, 5), a_mean(400, 5), "worse"),
        ("delay_p95_ms", a_mean(400, 1), a_mean(440, 1), "too small"),  # less than 50 ms
        ("delay_p95_ms", a_mean(2000, 1), a_mean(2060, 1), "too small"),  # less than 3.2 %
        ("delay_p95_ms", a_mean(2000, 1), a_mean(2070, 1), "worse"),
        ("troubled", a_share(40_000, 400_000), a_share(41_000, 400_000), "too small"),
    ],
)
def test_figure_when_changed_is_held_against_its_own_error(name, before, after, verdict):
    assert compare.changed(name, before, after).verdict == verdict


def test_figure_when_of_few_viewers_is_counted():
    change = compare.changed("troubled", a_share(3, 7), a_share(5, 9))
    assert (change.before, change.after) == ("3 of 7", "5 of 9")


def drawn(name, dice, n):
    """A figure over viewers of one kind, as the report makes it: delays in buckets, some stalls, odd weights."""
    known, some = MEASURES[name], dice.random(n) < 0.1
    if known.kind == "share":
        return gather._measure(name, {known.of: n, name: int(some.sum())}, pd.DataFrame(), pd.DataFrame())
    if known.kind == "quantile":
        slow = dice.lognormal(7, 0.6, n) * some if known.at > 0.9 else dice.lognormal(5, 1, n)
        delays = np.exp2((np.floor(np.log2(slow + 1) * 3) + 0.5) / 3)
        value = {name: float(np.quantile(delays, known.at, method="inverted_cdf"))}
        return gather._measure(name, value, pd.DataFrame(), pd.DataFrame({known.of: delays}))
    values = dice.beta(1, 8, n) * some if name == "stall_ratio" else dice.lognormal(14, 0.3, n)
    weights = dice.lognormal(4, 1.2, n)
    rows = pd.DataFrame({name: values, known.of: weights})
    return gather._measure(name, {name: float((values * weights).sum() / weights.sum())}, rows, pd.DataFrame())


@pytest.mark.parametrize(
    "name", ["troubled", "first_frame_p50_ms", "first_frame_p95_ms", "delay_p95_ms", "stall_ratio", "bit_rate"]
)
@pytest.mark.parametrize("sizes", [(22, 22), (40, 40), (100, 100), (1000, 1000), (22, 400)])
def test_figures_when_both_runs_are_of_one_kind_of_viewers_are_rarely_different(name, sizes):
    dice = np.random.default_rng(7)
    one, other = ([drawn(name, dice, n) for _ in range(300 if name == "troubled" else 40)] for n in sizes)
    pairs = [(a, b) for place, a in enumerate(one) for b in other[place:]]
    different = [pair for pair in pairs if compare.changed(name, *pair).verdict != "no difference"]
    assert len(different) <= 0.015 * len(pairs)


def test_quantile_when_viewers_are_too_few_for_a_bound_differs_from_nothing():
    few = gather._measure(
        "delay_p95_ms", {"delay_p95_ms": 36.0}, pd.DataFrame(), pd.DataFrame({"delay_p50_ms": [36.0] * 22})
    )
    many = {**a_mean(2900, 10), "n": 400}
    assert (few["low"], few["high"]) == (36.0, None)
    assert compare.changed("delay_p95_ms", many, few).verdict == "no difference"
    assert compare.changed("delay_p95_ms", few, {**few, "value": 2900.0, "low": 2500.0}).verdict == "no difference"


@pytest.mark.parametrize(("n", "at"), [(40, 0.5), (22, 0.95), (1000, 0.95)])
def test_ranks_when_counted_by_binomials_leave_out_what_chance_does(n, at):
    first, last = gather.ranks(n, at)

    def at_most(k):
        return sum(math.comb(n, i) * at**i * (1 - at) ** (n - i) for i in range(k + 1))

    chance = 0.00933 / 2
    assert at_most(first - 1) <= chance < at_most(first)
    assert 1 - at_most(last - 1) <= chance or last == n + 1
    assert 1 - at_most(last - 2) > chance
    assert gather.ranks(n, at, 0.01) == (max(first - math.ceil(n / 100), 0), min(last + math.ceil(n / 100), n + 1))


def test_runs_when_the_second_is_better_say_what_and_how_sure(tmp_path):
    before = run_in(tmp_path / "a")
    content = [session(number, **{**session(1), "conn_id": number}) for number in range(400)]
    felt_now = [felt("all", "all", 400, picture_share=1.0), felt("network", "127.0.0.0/24", 133, 0)]
    tables = tables_of() | {"sessions": content, "experience": felt_now}
    found = compare.compare(before, run_in(tmp_path / "b", tables=tables))
    verdicts = {change.what: change.verdict for change in found.changes}
    assert verdicts["viewers in trouble"] == verdicts["pictures delivered"] == "better"
    assert verdicts["attempts that failed to start"] == "no difference"
    assert found.answer.startswith("Better: ")
    assert "worse" not in found.answer
    assert "After: 400 viewers in 10 min 0 s." in found.runs
    assert [(group.what, group.before, group.after) for group in found.groups] == [
        ("network 127.0.0.0/24", "30.1 %", "0 %")
    ]


def test_runs_when_they_are_the_same_show_no_difference(tmp_path):
    folder = run_in(tmp_path / "a")
    found = compare.compare(folder, folder)
    assert found.answer == "No difference that these viewers show."
    assert found.warnings == ["both are the same results"]
    assert {change.verdict for change in found.changes} == {"no difference"}
    assert (found.limits, found.bans, found.groups) == ([], [], [])


def test_runs_when_viewers_are_few_say_that_they_show_little(tmp_path):
    found = compare.compare(run_in(tmp_path / "a", 7), run_in(tmp_path / "b", 9))
    assert found.answer == "No difference that these viewers show."
    assert all("fewer than 20 show little" in told for told in found.runs)
    assert ("1 of 7", "1 of 9") in {(change.before, change.after) for change in found.changes}


def test_runs_when_limits_and_bans_changed_list_them(tmp_path):
    kept, gone, new = (
        json.dumps({"cidr": f"10.0.0.{n}/32", "action": action}) for n, action in ((1, "ban"), (2, "limit"), (3, "ban"))
    )
    before = run_in(tmp_path / "a", texts={"bans.jsonl": f"{kept}\n{gone}\n"}, choose=1)
    after = run_in(tmp_path / "b", texts={"bans.jsonl": f"{kept}\n{new}\n"}, choose=7)
    found = compare.compare(before, after)
    assert found.bans == ["new: 10.0.0.3/32 (ban)", "gone: 10.0.0.2/32 (limit)"]
    assert [line[-8:] for line in found.limits] == ["number=1", "number=7"]


def test_runs_when_a_job_failed_compare_nothing_that_an_earlier_run_has_left(tmp_path):
    failed = {name: {"state": "failed", "message": "no"} for name in ("abuse", "whatif", "experience")}
    before = run_in(tmp_path / "a", texts={"bans.jsonl": json.dumps({"cidr": "10.9.9.9/32"})}, failed=failed)
    found = compare.compare(before, run_in(tmp_path / "b"))
    assert (found.limits, found.bans) == ([], [])
    assert found.warnings == [
        f"before, the job {name}: failed; what it tells is not compared" for name in reversed(failed)
    ]
    assert found.answer == NOT_KNOWN


@pytest.mark.parametrize("as_json", [(), ("--json",)])
@pytest.mark.parametrize(
    "empty",
    [
        {"viewers": 0},
        {"tables": {}, "texts": {}},
        {"failed": {name: {"state": "failed", "message": "no"} for name in ("sessions", "experience")}},
    ],
)
def test_command_when_nothing_can_be_compared_fails_and_tells_what_it_has(tmp_path, capsys, empty, as_json):
    """Status 2 and one sentence, so that no script takes it for "no difference"; what there is, is written too."""
    folders = [run_in(tmp_path / "a", choose=1), run_in(tmp_path / "b", **{"choose": 7, **empty})]
    assert main(["analyze", "compare", *folders, *as_json]) == 2
    shown = capsys.readouterr()
    assert "cannot be compared: no figure is known of enough viewers in both" in shown.err
    assert NOT_KNOWN in (json.loads(shown.out)["answer"] if as_json else shown.out.splitlines()[0])
    assert main(["analyze", "compare", folders[0], folders[0], *as_json]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("viewers", [0, 2, 5, 20])
def test_runs_when_one_side_has_few_viewers_claim_nothing(tmp_path, viewers):
    found = compare.compare(run_in(tmp_path / "a"), run_in(tmp_path / "b", viewers))
    assert {"better", "worse"}.isdisjoint(change.verdict for change in found.changes)
    assert found.answer == ("No difference that these viewers show." if viewers else NOT_KNOWN)
    assert ("fewer than 20 show little" in found.runs[1]) == (viewers < 20)


def test_text_when_shown_in_a_terminal_fits_80_columns(tmp_path):
    found = compare.compare(run_in(tmp_path / "a", text=NASTY), run_in(tmp_path / "b", 40, text=NASTY * 3))
    lines = found.as_text(80).splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line.isprintable() for line in lines)
    assert "".join(found.as_text().split()) == "".join("".join(lines).split())


def test_text_when_it_goes_to_a_file_is_whole_lines(tmp_path):
    before, after = run_in(tmp_path / "a", choose=1), run_in(tmp_path / "b", choose=7)
    found = replace(
        compare.compare(before, after),
        limits=["before " + "soft " * 40, "after x"],
        groups=[
            compare.FigureChange(
                "network 2001:db8:ffff:ffff::/48 and more", "957 kbit/s", "2.12 Mbit/s", "better", 18.3
            )
        ],
    )
    done = subprocess.run(
        [sys.executable, "-m", "flowctl", "analyze", "compare", before, after],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert any(line.endswith(f"number={number}") for line in done.stdout.splitlines() for number in (1, 7))
    assert ("limits: before " + "soft " * 40) in found.as_text()
    (row,) = [line for line in found.as_text().splitlines() if "2001:db8" in line]
    assert " ".join(row.split()).endswith(
        "2001:db8:ffff:ffff::/48 and more 957 kbit/s 2.12 Mbit/s better (18.3 errors)"
    )
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.stdout + found.as_text()


def test_runs_when_they_may_only_be_read_are_compared(tmp_path, monkeypatch):
    before, after = run_in(tmp_path / "a"), run_in(tmp_path / "b", 40)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert compare.compare(before, after).changes


def changed_summary(folder, change):
    path = Path(folder) / "summary.json"
    summary = json.loads(path.read_text("utf-8"))
    change(summary)
    path.write_text(json.dumps(summary), "utf-8")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda summary: summary["jobs"].clear(), "has no report"),
        (lambda summary: summary["jobs"]["report"]["summary"]["figures"].update(format=9), "mean something else"),
        (lambda summary: summary["jobs"]["report"]["summary"].update(figures=[1]), "has no report"),
        (lambda summary: summary.update(jobs=[]), "has no report"),
        (lambda summary: summary.clear(), "has no report"),
    ],
)
def test_runs_when_results_are_of_another_meaning_are_refused(tmp_path, change, said):
    before, after = run_in(tmp_path / "a", 7), run_in(tmp_path / "b", 7)
    changed_summary(after, change)
    with pytest.raises(ConfigError, match=said) as error:
        compare.compare(before, after)
    assert f"flowctl analyze all EVENTS --out {after}" in error.value.hint


def test_runs_when_a_folder_is_missing_are_refused_and_it_is_not_made(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        compare.compare(run_in(tmp_path / "a", 7), str(tmp_path / "b"))
    assert not (tmp_path / "b").exists()


def test_compare_when_imported_needs_neither_spark_nor_pandas():
    loaded = "import sys, flowctl.analyze.compare; print(sorted({'pyspark', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_figures_when_there_is_nothing_can_be_written(tmp_path):
    found = found_of(tmp_path / "r", {}, {}, {})
    assert json.loads(json.dumps(job.figures(found)))["measures"] == {}
