"""All jobs in one run: one that fails costs the others nothing, and results replace earlier ones whole or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flowctl.errors import ConfigError, InternalError
from flowctl.pipeline.jobs import everything
from flowctl.pipeline.jobs.everything import STEPS, AllOptions, Step
from flowctl.pipeline.report import job as report
from flowctl.pipeline.report.data import JobState
from flowctl.pipeline.tables.accounts import Accounts, JobResult
from flowctl.pipeline.tables.place import Place

pytestmark = pytest.mark.timeout(600)  # Spark on a busy machine takes its time; a hang is still found


@dataclass(frozen=True, slots=True)
class Scripted(Step):
    """A job that does what a test says."""

    work: Callable[..., Any] | None = None

    def runner(self):
        return self.work


def job(name, *outputs, error=None, rows=5, accounts=None):
    """Return a job that writes a table of `rows` numbers and a file per output, then fails with `error` if any."""

    def work(spark, events, out, options):
        found = {}
        for output in outputs:
            path = f"{out}/{output}"
            if "." in output:
                Path(path).write_text(f"{name} {rows}\n")
            else:
                spark.range(rows).write.parquet(path)
            found[output] = path
        if error is not None:
            raise error
        return JobResult(
            name=name, accounts=accounts or [], outputs=found, summary={"made": f"{out}/x", "given": options}
        )

    return Scripted(name, "", tuple(outputs), work)


BAN = '{"cidr": "192.0.2.1/32", "score": 1.0, "evidence": {}, "expires": null}\n'


def test_run_when_there_is_a_ban_list_adds_to_it(spark, tmp_path):
    """Bans that a watch or a person has put on the list stay on it beside those of the run."""

    def judging(spark, events, out, options):
        Path(out, "bans.jsonl").write_text(BAN.replace("192.0.2.1", "192.0.2.2"))
        (tmp_path / "out/bans.jsonl").write_text(BAN)  # while the run goes on
        return JobResult(name="abuse", outputs={"bans.jsonl": f"{out}/bans.jsonl"})

    found = run(spark, tmp_path, Scripted("abuse", "", ("bans.jsonl",), judging))
    assert found.failed == []
    assert (tmp_path / "out/bans.jsonl").read_text() == BAN + BAN.replace("192.0.2.1", "192.0.2.2")


def test_run_when_the_ban_list_cannot_be_read_does_nothing(spark, tmp_path):
    """A list with a typing error is an error before any work, and is left as it is."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/bans.jsonl").write_text("{broken")
    with pytest.raises(ConfigError, match=r"bans\.jsonl"):
        run(spark, tmp_path, job("abuse", "bans.jsonl"))
    assert (tmp_path / "out/bans.jsonl").read_text() == "{broken"


def rows_of(spark, path):
    return spark.read.parquet(str(path)).count()


def run(spark, tmp_path, *steps, **values):
    return everything.run(spark, "/data/events", str(tmp_path / "out"), AllOptions(steps=steps, **values))


def test_run_when_one_job_fails_does_the_others_and_says_so(spark, tmp_path):
    """The failed one has its error and hint, the others their tables; the page and the summary tell of both."""
    wrong = ConfigError("there are no flights", hint="record some")
    found = run(spark, tmp_path, job("a", "ta"), job("b", "tb", error=wrong), job("c", "tc"))
    assert found.failed == ["b"]
    assert (found.jobs["b"].message, found.jobs["b"].hint) == ("there are no flights", "record some")
    assert {"ta", "tc", "report.html", "summary.json"} == {path.name for path in (tmp_path / "out").iterdir()}
    assert "there are no flights" in (tmp_path / "out/report.html").read_text()
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert {name: note["state"] for name, note in summary["jobs"].items()} == {
        "a": "done",
        "b": "failed",
        "c": "done",
        "report": "done",
    }
    assert found.as_dict()["jobs"] == summary["jobs"]


def test_run_when_repeated_replaces_what_there_was(spark, tmp_path):
    """New tables take the place of old ones, outputs that a job no longer has go, and what is not ours stays."""
    run(spark, tmp_path, job("a", "ta", "limits.toml"), job("b", "quarantine"))
    (tmp_path / "out/mine.txt").write_text("keep")
    again = Scripted("a", "", ("ta", "limits.toml"), job("a", "ta", rows=9).work)
    found = run(spark, tmp_path, again, job("b"))
    assert rows_of(spark, tmp_path / "out/ta") == 9
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"ta", "mine.txt", "report.html", "summary.json"} == names
    assert str(tmp_path / "out/ta") == found.outputs["ta"]
    assert str(tmp_path / "out/x") == found.jobs["a"].summary["made"]


def test_run_when_a_job_fails_now_keeps_what_it_left_before(spark, tmp_path):
    """A ban list in use is not taken away by a failed run, and half of a table is not put in its place."""
    run(spark, tmp_path, job("a", "limits.toml", "ta"))
    (tmp_path / "out/bans.jsonl").write_text(BAN)
    run(spark, tmp_path, job("a", "limits.toml", "bans.jsonl", "ta", rows=9, error=RuntimeError("broken")))
    assert (tmp_path / "out/limits.toml").read_text() == "a 5\n"
    assert (tmp_path / "out/bans.jsonl").read_text() == BAN
    assert rows_of(spark, tmp_path / "out/ta") == 5


def test_run_when_interrupted_leaves_the_earlier_results(spark, tmp_path):
    """Ctrl-C in the middle changes nothing of what there was, and leaves nothing half made."""
    run(spark, tmp_path, job("a", "ta"))
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    with pytest.raises(KeyboardInterrupt):
        run(spark, tmp_path, job("a", "ta", rows=9), job("b", "tb", error=KeyboardInterrupt()))
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert rows_of(spark, tmp_path / "out/ta") == 5


def test_run_when_rows_are_missing_in_the_accounts_has_failed(spark, tmp_path):
    """A job whose rows do not add up is a failed one, and its table is not put in place."""
    wrong = Accounts(table="flow_events", rows_in=10, rows_out=9)
    found = run(spark, tmp_path, job("a", "ta", accounts=[wrong]))
    assert found.failed == ["a"]
    assert "10 rows in, but 9 out" in found.jobs["a"].message
    assert not (tmp_path / "out/ta").exists()


def test_run_when_jobs_end_badly_in_other_ways_says_it_in_a_line(spark, tmp_path):
    """Errors of Spark, of us and of anybody are one line each, without a stack trace."""

    def bad_column(spark, events, out, options):
        spark.range(1).select("nothing").collect()

    found = run(
        spark,
        tmp_path,
        Scripted("spark", "", (), bad_column),
        job("ours", error=InternalError("a bug")),
        job("any", error=ZeroDivisionError("division\nby zero")),
        Step("gone", "flowctl.pipeline.no_such_module", ()),
    )
    messages = {name: note.message for name, note in found.jobs.items()}
    assert {"spark", "ours", "any", "gone"} == set(found.failed)
    assert "nothing" in messages["spark"]
    assert "a bug" in messages["ours"]
    assert "ZeroDivisionError" in messages["any"]
    assert "no_such_module" in messages["gone"]
    assert all("\n" not in text and "\tat " not in text for text in messages.values())


def test_run_when_options_are_given_hands_them_to_their_job(spark, tmp_path):
    """Each job gets its own options, None where nobody gave any; skipped jobs are not run and not named."""
    told = []
    found = everything.run(
        spark,
        "/data/events",
        str(tmp_path / "out"),
        AllOptions(steps=[job("a"), job("b"), job("c")], options={"a": "its own"}, skip=frozenset({"c"})),
        lambda name, note: told.append((name, note and note.state)),
    )
    assert found.jobs["a"].summary["given"] == "its own"
    assert found.jobs["b"].summary["given"] is None
    assert list(found.jobs) == ["a", "b", "report"]
    done = JobState.DONE
    assert [("a", None), ("a", done), ("b", None), ("b", done), ("report", None), ("report", done)] == told


def test_report_when_run_later_knows_of_jobs_run_by_themselves(spark, tmp_path):
    """A job that was run alone is entered into the summary, with its accounts, beside what is there."""
    out = str(tmp_path / "out")
    run(spark, tmp_path, job("a", "ta", error=ConfigError("at first")))
    report.keep_note(spark, "/data/events", out, JobResult(name="a", accounts=[Accounts(table="flow_events")]), 2.0)
    notes = report.read_notes(Place(spark, out))
    assert (notes["a"].state, notes["a"].took_s, notes["a"].accounts[0]["table"]) == (JobState.DONE, 2.0, "flow_events")
    assert notes["report"].state is JobState.DONE
    (tmp_path / "out/summary.json").write_text('{"jobs": [1, 2')
    assert report.read_notes(Place(spark, out)) == {}


def test_steps_when_listed_name_every_output_once():
    """No two jobs write the same name, so that who fails cannot take another's table along."""
    names = [name for step in STEPS for name in step.outputs]
    assert len(names) == len(set(names))
    assert [step.name for step in STEPS] == ["sessions", "fleet", "abuse", "whatif", "capacity"]
