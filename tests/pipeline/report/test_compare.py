"""Two runs of the pipeline compared: what changed and how sure, from planted results; without Spark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from report_kit import NASTY, felt, found_of, run_in, session, tables_of

from flowctl.errors import ConfigError
from flowctl.pipeline import compare
from flowctl.pipeline.report import job


def a_share(part, n):
    return {"n": n, "value": part / n, "error": 0.0, "part": part}


def a_mean(value, error, n=400):
    return {"n": n, "value": value, "error": error, "part": None}


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
    ],
)
def test_figure_when_changed_is_held_against_its_own_error(name, before, after, verdict):
    """Better or worse is what is more than chance; else these viewers show no difference, or are too few."""
    assert compare.changed(name, before, after).verdict == verdict


def test_figure_when_of_few_viewers_is_counted():
    """A share of fewer than 20 is "3 of 7", without a percentage."""
    change = compare.changed("troubled", a_share(3, 7), a_share(5, 9))
    assert (change.before, change.after) == ("3 of 7", "5 of 9")


def test_figures_when_both_runs_are_of_one_kind_of_viewers_are_rarely_different():
    """Of a thousand pairs of shares that chance made of the same viewers, some ten are called a difference."""
    import random

    dice = random.Random(7)
    made = [sum(dice.random() < 0.1 for _ in range(200)) for _ in range(2000)]
    pairs = zip(made[::2], made[1::2], strict=True)
    different = [
        p
        for p in pairs
        if compare.changed("troubled", a_share(p[0], 200), a_share(p[1], 200)).verdict != "no difference"
    ]
    assert len(different) <= 20


def test_runs_when_the_second_is_better_say_what_and_how_sure(tmp_path):
    """Trouble that went away is told as better, by figure and by network; what stayed is told as no difference."""
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
    """A folder compared with itself has no difference, and the reader is told that both are the same."""
    folder = run_in(tmp_path / "a")
    found = compare.compare(folder, folder)
    assert found.answer == "No difference that these viewers show."
    assert found.warnings == ["both are the same results"]
    assert {change.verdict for change in found.changes} == {"no difference"}
    assert (found.limits, found.bans, found.groups) == ([], [], [])


def test_runs_when_viewers_are_few_say_that_they_show_little(tmp_path):
    """Seven viewers against nine: counts, and no word of better or worse."""
    found = compare.compare(run_in(tmp_path / "a", 7), run_in(tmp_path / "b", 9))
    assert found.answer == "No difference that these viewers show."
    assert all("fewer than 20 show little" in told for told in found.runs)
    assert ("1 of 7", "1 of 9") in {(change.before, change.after) for change in found.changes}


def test_runs_when_limits_and_bans_changed_list_them(tmp_path):
    """What was in force before and after, and who is new or gone on the list."""
    kept, gone, new = (
        json.dumps({"cidr": f"10.0.0.{n}/32", "action": action}) for n, action in ((1, "ban"), (2, "limit"), (3, "ban"))
    )
    before = run_in(tmp_path / "a", texts={"bans.jsonl": f"{kept}\n{gone}\n"}, choose=1)
    after = run_in(tmp_path / "b", texts={"bans.jsonl": f"{kept}\n{new}\n"}, choose=7)
    found = compare.compare(before, after)
    assert found.bans == ["new: 10.0.0.3/32 (ban)", "gone: 10.0.0.2/32 (limit)"]
    assert [line[-8:] for line in found.limits] == ["number=1", "number=7"]


def test_text_when_shown_in_a_terminal_fits_80_columns(tmp_path):
    """No line is longer than the terminal, whatever peers call themselves, and nothing in it is acted upon."""
    found = compare.compare(run_in(tmp_path / "a", text=NASTY), run_in(tmp_path / "b", 40, text=NASTY * 3))
    lines = found.as_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line.isprintable() for line in lines)
    assert lines[0] == found.answer[:80]


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
    """Results of other versions, or without what is compared, are refused with a hint that names the way."""
    before, after = run_in(tmp_path / "a", 7), run_in(tmp_path / "b", 7)
    changed_summary(after, change)
    with pytest.raises(ConfigError, match=said) as error:
        compare.compare(before, after)
    assert f"flowctl analyze all EVENTS --out {after}" in error.value.hint


def test_runs_when_a_folder_is_missing_are_refused_and_it_is_not_made(tmp_path):
    """A name mistyped is an error, and leaves no folder of that name."""
    with pytest.raises(ConfigError, match="there is no folder"):
        compare.compare(run_in(tmp_path / "a", 7), str(tmp_path / "b"))
    assert not (tmp_path / "b").exists()


def test_compare_when_imported_needs_neither_spark_nor_pandas():
    """It starts in a second: what takes seconds to load is not loaded."""
    loaded = "import sys, flowctl.pipeline.compare; print(sorted({'pyspark', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_figures_when_there_is_nothing_can_be_written(tmp_path):
    """A report of nothing has figures too: none."""
    found = found_of(tmp_path / "r", {}, {}, {})
    assert json.loads(json.dumps(job.figures(found)))["measures"] == {}
