"""The runner: what is read again, what is remembered, and what a run leaves."""

from __future__ import annotations

import datetime as dt
import json
import random
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import functions as f
from record_kit import at, event, write

from flowctl.errors import ConfigError, FlowctlError
from flowctl.pipeline.job import Answer, Job, Part
from flowctl.pipeline.records.window import Window
from flowctl.pipeline.report.gather import Tables
from flowctl.pipeline.run import JOBS, run

pytestmark = pytest.mark.timeout(600)  # Spark on a busy machine takes its time
COLUMNS = {"ts": "timestamp", "node": "string", "conn_id": "bigint", "event": "string"}


@dataclass(frozen=True)
class Options:
    """What is planted: where it breaks, what the part depends on, and whether there is a text."""

    broken: str = ""
    mark: str = ""
    silent: bool = False


def made(records, options):
    """Return the events of a part."""
    if options.broken == "part":
        raise FlowctlError("this part is broken", hint="mend it")
    return records.table("flow_events").select(*COLUMNS, "date", "hour")


def answered(parts, options):
    """Count events by name, on Spark and in this process, and write both tables and a text."""
    if options.broken == "answer":
        parts.write_text("note.txt", "half")
        raise ValueError("no\nanswer")
    sums = {"event": "string", "rows": "bigint"}
    parts.write("sums", parts.table("seen").groupBy("event").agg(f.count("*").alias("rows")), sums)
    small = parts.pandas("seen")
    parts.write("small", small.groupby("event", as_index=False).agg(rows=("ts", "size")), sums)
    rows = {row["event"]: row["rows"] for row in parts.result("sums").collect()}
    assert rows == {row["event"]: row["rows"] for row in parts.result("small").collect()}
    if not options.silent:
        parts.write_text("note.txt", json.dumps(rows, sort_keys=True))
    return Answer(summary=rows | {"newest": parts.newest.isoformat()}, warnings=["this is a toy"])


SEEN = Part("seen", COLUMNS, made, ("flow_events",), depends=lambda options: options.mark)
JOB = Job(name="seen", parts=(SEEN,), results=("sums", "small", "note.txt"), answer=answered, options=Options)
USER = Job(
    name="user",
    parts=(),
    uses=("seen",),
    results=(),
    answer=lambda parts, _: Answer(summary={"rows": parts.table("seen").count()}),
)


def events_of(root, *moments, name="a", event_name="returned"):
    """Write a file with an event at each of these seconds after noon, in the folder of the hour of the first."""
    hour = f"{12 + int(moments[0] // 3600):02}"
    return write(root, [event(moment, 1, event_name) for moment in moments], name, hour=hour)


@pytest.fixture
def go(spark, tmp_path):
    """Give a function that runs the toy job, or others, on ``events`` into ``out``."""

    def call(*jobs, options=None, window=None, out="out"):
        given = None if options is None else {"seen": options}
        return run(spark, str(tmp_path / "events"), str(tmp_path / out), jobs or [JOB], given, window)

    return call


def test_run_when_files_come_reads_their_hours_again_and_no_others(go, tmp_path):
    """Old hours are not opened again, late files count, and what went away is remembered."""
    first = events_of(tmp_path / "events", 1, 2)
    result = go()
    assert (result.failed, result.hours, result.hours_read) == ([], 1, 1)
    assert result.jobs["seen"].summary == {"returned": 2, "newest": at(2).isoformat()}
    assert [(item["table"], item["rows_in"], item["rows_out"]) for item in result.accounts] == [("flow_events", 2, 2)]

    events_of(tmp_path / "events", 3601)
    octets = first.read_bytes()
    first.write_bytes(b"x" * len(octets))  # who opened it would notice
    result = go()
    assert (result.failed, result.hours, result.hours_read) == ([], 2, 1)
    assert result.jobs["seen"].summary["returned"] == 3
    first.write_bytes(octets)

    events_of(tmp_path / "events", 3, name="late", event_name="dropped")  # into the first hour
    result = go()
    assert (result.hours_read, result.jobs["seen"].summary["returned"], result.jobs["seen"].summary["dropped"]) == (
        1,
        3,
        1,
    )

    for path in (tmp_path / "events").rglob("hour=12/*"):
        path.unlink()
    result = go()
    assert (result.hours, result.hours_read, result.jobs["seen"].summary["returned"]) == (2, 0, 3)
    (rows,) = {item["rows_in"] for item in result.accounts}
    assert rows == 4

    result = go(options={"mark": "other"})  # the first hour cannot be made again, and that is said
    assert result.hours_read == 1
    assert any("seen" in line and "1 of 2 hours" in line for line in result.jobs["seen"].warnings)


def test_run_when_a_part_is_a_result_has_it_where_the_report_looks(go, tmp_path):
    """In the first run too: no folder that is left of its making is taken for the table."""

    def counted(parts, _):
        return Answer(summary={"rows": sum(map(len, Tables(parts.staging.folder, parts.place.folder).batches("kept")))})

    kept = Part("kept", COLUMNS, made, ("flow_events",), result=True)
    events_of(tmp_path / "events", 1, 2)
    result = go(Job(name="kept", parts=(kept,), results=("kept",), answer=counted, options=Options))
    assert result.jobs["kept"].summary == {"rows": 2}


def test_run_when_files_come_one_by_one_gives_what_one_run_gives(go, tmp_path, spark):
    """Whatever the order and the split of files over runs, tables and accounts are those of a single run."""
    chance = random.Random(5)
    moments = [chance.randrange(3 * 3600) for _ in range(12)]
    for number, moment in enumerate(moments):
        split = tmp_path / ("events" if number % 3 == chance.randrange(3) else "later")
        events_of(split, moment, name=f"f{number}", event_name=chance.choice(["returned", "dropped"]))
    go(out="split")
    for path in sorted((tmp_path / "later").rglob("*.parquet")):
        target = tmp_path / "events" / path.relative_to(tmp_path / "later")
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    split, whole = go(out="split"), go(out="whole")
    assert split.accounts == whole.accounts
    assert split.jobs["seen"].summary == whole.jobs["seen"].summary
    rows = [
        sorted(map(tuple, spark.read.parquet(str(tmp_path / out / "parts/seen")).collect()))
        for out in ("split", "whole")
    ]
    assert len(rows[0]) == len(moments)
    assert rows[0] == rows[1]


def test_run_when_a_window_is_given_takes_its_whole_hours_and_forgets_nothing(go, tmp_path):
    """An hour of which some is in it counts whole, which is said; others are not read, and stay remembered."""
    for begin in (0, 3600, 7200):
        events_of(tmp_path / "events", begin, begin + 1800, begin + 3599)
    window = Window(at(1800), at(3600 + 1800))
    result = go(window=window)
    assert (result.jobs["seen"].summary["returned"], result.hours, result.hours_read) == (6, 2, 2)
    assert result.window == {"since": at(0).isoformat(), "until": at(7200).isoformat()}
    assert result.warnings == [
        "a window is of whole hours: this one goes from 2026-03-01 12:00 to 2026-03-01 14:00 UTC"
    ]
    result = go()
    assert (result.jobs["seen"].summary["returned"], result.hours, result.hours_read) == (9, 3, 1)
    result = go(window=Window(at(7200), None))
    assert (result.jobs["seen"].summary["returned"], result.hours_read, result.warnings) == (3, 0, [])
    assert result.window == {"since": at(7200).isoformat(), "until": at(10_800).isoformat()}
    with pytest.raises(ConfigError, match="no records in the window"):
        go(window=Window(at(0) + dt.timedelta(days=2), None))


def test_run_when_a_job_fails_costs_only_those_that_need_it(go, tmp_path):
    """Its error and hint are told, its earlier results stay, half of new ones does not, and others are done."""
    events_of(tmp_path / "events", 1)
    other = Job(
        name="other",
        parts=(),
        results=("o.txt",),
        answer=lambda parts, _: (parts.write_text("o.txt", "o"), Answer())[1],
    )
    go(JOB, USER, other)
    before = (tmp_path / "out/note.txt").read_text()
    events_of(tmp_path / "events", 2, name="b")
    result = go(JOB, USER, other, options={"broken": "answer"})
    assert result.failed == ["seen"]
    assert result.jobs["seen"].message == "ValueError: no"
    assert result.jobs["user"].summary == {"rows": 2}
    assert (tmp_path / "out/note.txt").read_text() == before
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert {name: job["state"] for name, job in summary["jobs"].items()} == {
        "seen": "failed", "user": "done", "other": "done",
    }  # fmt: skip
    events_of(tmp_path / "events", 3, name="c")
    result = go(JOB, USER, other, options={"broken": "part"})
    assert result.failed == ["seen", "user"]
    assert result.jobs["user"].message == "no seen: this part is broken"
    assert result.jobs["user"].hint == "mend it"
    result = go(JOB, options={"silent": True})  # a result that it has no longer goes, and other jobs stay on record
    assert result.jobs["seen"].summary["returned"] == 3
    assert not (tmp_path / "out/note.txt").exists()
    assert sorted(json.loads((tmp_path / "out/summary.json").read_text())["jobs"]) == ["other", "seen", "user"]
    assert not list((tmp_path / "out").glob("_new-*"))


def test_run_when_a_text_has_other_writers_merges_it(go, tmp_path):
    """What was made is put on what is there; a text that cannot be read is told before any work, and left alone."""

    def merged(there, new, options):
        if "typo" in there:
            raise ConfigError("the list cannot be read")
        return there + new

    job = Job(
        name="list",
        parts=(SEEN,),
        options=Options,
        results=("list.txt",),
        answer=lambda parts, _: (parts.write_text("list.txt", "new\n"), Answer())[1],
        merge={"list.txt": merged},
    )
    events_of(tmp_path / "events", 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/list.txt").write_text("by hand\n")
    assert go(job).failed == []
    assert (tmp_path / "out/list.txt").read_text() == "by hand\nnew\n"
    (tmp_path / "out/list.txt").write_text("typo")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    with pytest.raises(ConfigError, match="cannot be read"):
        go(job)
    assert (tmp_path / "out/list.txt").read_text() == "typo"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


def test_run_when_files_come_to_an_hour_that_has_lost_some_keeps_what_was_learnt(go, tmp_path):
    """New files are added, once, whatever a killed run has left; with that, rows and accounts are of all files."""
    record, first = tmp_path / "out/record.json", events_of(tmp_path / "events", 1, 2)
    events_of(tmp_path / "events", 3, name="b", event_name="dropped")
    go()
    first.unlink()
    old = record.read_text()
    for number in range(2):  # as if the run were killed before it wrote the record, and another file came
        record.write_text(old)
        events_of(tmp_path / "events", 10 + number, name=f"late{number}", event_name="limit_hit")
        result = go()
        told = {"returned": 2, "dropped": 1, "limit_hit": number + 1, "newest": at(10 + number).isoformat()}
        assert (result.failed, result.hours_read, result.jobs["seen"].summary) == ([], 1, told)
        assert [item["rows_in"] for item in result.accounts] == [number + 4]
        assert (
            f"1 of its files are there no more, and what was learnt of them stays; {number + 1} new"
            in result.warnings[0]
        )
    result = go()
    assert (result.hours_read, result.warnings, result.jobs["seen"].summary) == (0, [], told)
    events_of(tmp_path / "events", 20, name="later", event_name="limit_hit")
    assert go().jobs["seen"].summary["limit_hit"] == 3
    result = go(options={"mark": "other"})  # what was learnt with other options stays, and is told
    assert (result.hours_read, result.jobs["seen"].summary["limit_hit"]) == (0, 3)
    assert "1 of 1 hours" in result.jobs["seen"].warnings[0]
    events_of(tmp_path / "events", 3, 4, 5, name="b", event_name="dropped")  # rewritten: it would count twice
    result = go()
    assert (result.hours_read, result.jobs["seen"].summary["dropped"]) == (0, 1)
    assert "1 that were changed are not read again" in result.warnings[0]


KILLED = """
import os, sys, signal
sys.path[:0] = {path!r}
import test_run
from flowctl.pipeline import run as runner
from flowctl.pipeline.spark.session import SessionOptions, session

def die(*_, **__):
    print("dying", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

runner._Run._remember = die
with session(SessionOptions(master="local[1]", driver_memory="512m", size_bytes=0)) as spark:
    runner.run(spark, {events!r}, {out!r}, [test_run.JOB])
"""


def test_run_when_killed_in_the_middle_is_made_good_by_the_next(go, tmp_path):
    """Parts were written and not yet in place: earlier results are whole, and the next run reads that hour again."""
    events_of(tmp_path / "events", 1)
    go()
    before = (tmp_path / "out/summary.json").read_text()
    events_of(tmp_path / "events", 3601)
    code = KILLED.format(path=sys.path, events=str(tmp_path / "events"), out=str(tmp_path / "out"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (-signal.SIGKILL, "dying"), done.stderr
    assert (tmp_path / "out/summary.json").read_text() == before
    assert list((tmp_path / "out").glob("_new-*"))
    result = go()
    assert (result.hours_read, result.jobs["seen"].summary["returned"]) == (1, 2)
    assert not list((tmp_path / "out").glob("_new-*"))


def test_run_when_another_is_at_work_says_so(go, tmp_path):
    """Two runs into one folder would rename each other's results: the second does nothing."""
    import fcntl

    events_of(tmp_path / "events", 1)
    (tmp_path / "out").mkdir()
    with (tmp_path / "out/_lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another run is at work"):
            go()
    assert go().failed == []


def test_run_when_the_records_are_others_refuses_them(go, spark, tmp_path):
    """What is remembered of one server does not mix with the records of another; a link to the same is the same."""
    events_of(tmp_path / "events", 1)
    events_of(tmp_path / "others", 3601)
    go()
    with pytest.raises(ConfigError, match=f"other records, {tmp_path}/events") as caught:
        run(spark, str(tmp_path / "others"), str(tmp_path / "out"), [JOB])
    assert "--out" in caught.value.hint
    (tmp_path / "link").symlink_to(tmp_path / "events")
    assert run(spark, f"file://{tmp_path}/link/", str(tmp_path / "out"), [JOB]).hours_read == 0


def test_run_when_folders_have_odd_names_takes_them_letter_by_letter(spark, tmp_path):
    """Names that Spark would take for patterns are found again; days that never were cost no run."""
    odd = tmp_path / "a[1] {b,c} *"
    events_of(odd / "events", 1)
    for day in ("2026-02-30", "9999-12-31"):
        write(odd / "events", [event(1, 1, "returned")], day, date=day, hour="23")
    result = run(spark, str(odd / "events"), str(odd / "out"), [JOB], window=Window(at(0), None))
    assert (result.failed, result.jobs["seen"].summary["returned"]) == ([], 1)
    assert run(spark, str(odd / "events"), str(odd / "out"), [JOB]).failed == []


def test_run_when_the_folders_cannot_be_used_says_so(go, tmp_path):
    """No records, a file instead of a folder, and a record of another format: two are errors, one is made anew."""
    with pytest.raises(ConfigError, match="does not exist"):
        go()
    assert not (tmp_path / "out").exists()
    events_of(tmp_path / "events", 1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot write to"):
        go(out="file")
    (tmp_path / "out").mkdir()
    for text in ("nonsense", "[]", '{"format": 1, "hours": {}}'):
        (tmp_path / "out/record.json").write_text(text)
        assert go().hours_read == 1


def test_run_when_the_disk_is_full_says_so_and_keeps_what_there_was(go, tmp_path, monkeypatch):
    """An answer that cannot be written is an error in a line with what to do."""
    events_of(tmp_path / "events", 1)
    go()
    before = (tmp_path / "out/note.txt").read_text()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    result = go()
    assert result.jobs["seen"].message == "[Errno 28] No space left on device"
    assert "room" in result.jobs["seen"].hint
    assert (tmp_path / "out/note.txt").read_text() == before


def test_jobs_when_listed_name_every_part_and_result_once():
    """No two jobs write the same name, and parts that a job uses are made by one of them."""
    import importlib

    jobs = [importlib.import_module(module).JOB for module in JOBS.values()]
    assert [job.name for job in jobs] == list(JOBS)
    parts = [part.name for job in jobs for part in job.parts]
    results = [name for job in jobs for name in job.results]
    assert len(set(parts)) == len(parts)
    assert len(set(results)) == len(results)
    assert {use for job in jobs for use in job.uses} <= set(parts)
    assert not {"parts", "quarantine", "record.json", "summary.json"} & set(results)
