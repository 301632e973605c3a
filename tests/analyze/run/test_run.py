"""The runner: what is read again, what is remembered, and what a run leaves."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyarrow.parquet as pq
from record_kit import at, close, event, sample, write, write_closes, write_samples

from flowctl.analyze.abuse.evidence import EVIDENCE
from flowctl.analyze.abuse.scores import SCORE_COLUMNS
from flowctl.analyze.capacity.job import LOADS
from flowctl.analyze.job import BY_HOUR, AnalysisJob, JobAnswer, JobPart, arrow_schema
from flowctl.analyze.models import run_text
from flowctl.analyze.record import compared, packed
from flowctl.analyze.records.listing import File
from flowctl.analyze.records.place import RecordPlace
from flowctl.analyze.records.window import Window
from flowctl.analyze.report.gather import Tables
from flowctl.analyze.run import JOBS, run
from flowctl.errors import ConfigError, FlowctlError

pytestmark = pytest.mark.timeout(600)  # Spark on a busy machine takes its time
SUMS = {"event": "string", "rows": "bigint"}
COLUMNS = {"ts": "timestamp", "node": "string", "conn_id": "bigint", "event": "string"}


@dataclass(frozen=True)
class Options:
    """What is planted: where it breaks, what the part depends on, and whether there is a text."""

    broken: str = ""
    mark: str = ""
    silent: bool = False


def seen_of(records):
    return run_text(f"SELECT {', '.join(COLUMNS | BY_HOUR)} FROM events", {"events": records.table("flow_events")})


def made(records, options):
    if options.broken == "part":
        raise FlowctlError("this part is broken", hint="mend it")
    return seen_of(records)


def answered(parts, options):
    if options.broken == "answer":
        parts.write_text("note.txt", "half")
        raise ValueError("no\nanswer")
    text = "SELECT event, count(*) AS rows FROM seen GROUP BY event"
    parts.write("sums", run_text(text, {"seen": parts.table("seen")}), SUMS)
    small = parts.pandas("seen")
    parts.write("small", small.groupby("event", as_index=False).agg(rows=("ts", "size")), SUMS)
    rows = {row["event"]: row["rows"] for row in parts.result("sums").collect()}
    assert rows == {row["event"]: row["rows"] for row in parts.result("small").collect()}
    if not options.silent:
        parts.write_text("note.txt", json.dumps(rows, sort_keys=True))
    return JobAnswer(summary=rows | {"newest": parts.newest.isoformat()}, warnings=["this is a toy"])


SEEN = JobPart("seen", COLUMNS, made, ("flow_events",), depends=lambda options: options.mark)
JOB = AnalysisJob(name="seen", parts=(SEEN,), results=("sums", "small", "note.txt"), answer=answered, options=Options)
USER = AnalysisJob(
    name="user",
    parts=(),
    uses=("seen",),
    results=(),
    answer=lambda parts, _: JobAnswer(summary={"rows": len(parts.table("seen").collect())}),
)


def events_of(root, *moments, name="a", event_name="returned"):
    """Write a file with an event at each of these seconds after noon, in the folder of the hour of the first."""
    hour = f"{12 + int(moments[0] // 3600):02}"
    return write(root, [event(moment, 1, event_name) for moment in moments], name, hour=hour)


@pytest.fixture
def go(either, tmp_path):
    def call(*jobs, options=None, window=None, out="out"):
        given = None if options is None else {"seen": options}
        return run(either, str(tmp_path / "events"), str(tmp_path / out), jobs or [JOB], given, window)

    return call


def test_run_when_files_come_reads_their_hours_again_and_no_others(go, tmp_path):
    first = events_of(tmp_path / "events", 1, 2)
    result = go()
    assert (result.failed, result.hours, result.hours_read) == ([], 1, 1)
    assert result.jobs["seen"].summary == {"returned": 2, "newest": at(2).isoformat()}
    assert [(item["table"], item["rows_in"], item["rows_out"]) for item in result.accounts] == [("flow_events", 2, 2)]

    events_of(tmp_path / "events", 3601)
    octets, time_ns = first.read_bytes(), first.stat().st_mtime_ns
    first.write_bytes(b"x" * len(octets))  # who opened it would notice
    os.utime(first, ns=(time_ns, time_ns))
    result = go()
    assert (result.failed, result.hours, result.hours_read) == ([], 2, 1)
    assert result.jobs["seen"].summary["returned"] == 3
    first.write_bytes(octets)  # another time and nothing new: looked at, and not read

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
    def counted(parts, _):
        return JobAnswer(summary={"rows": sum(map(len, Tables(parts.place).batches("kept")))})

    kept = JobPart("kept", COLUMNS, made, ("flow_events",), result=True)
    events_of(tmp_path / "events", 1, 2)
    result = go(AnalysisJob(name="kept", parts=(kept,), results=("kept",), answer=counted, options=Options))
    assert result.jobs["kept"].summary == {"rows": 2}


def test_run_when_files_come_one_by_one_gives_what_one_run_gives(go, tmp_path, either):
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
        sorted(map(tuple, either.read.parquet(str(tmp_path / out / "parts/seen")).collect()))
        for out in ("split", "whole")
    ]
    assert len(rows[0]) == len(moments)
    assert rows[0] == rows[1]


def test_run_when_a_window_is_given_takes_its_whole_hours_and_forgets_nothing(go, tmp_path):
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


def test_run_when_results_of_other_hours_lie_beside_says_so(go, tmp_path):
    def told(parts, _):
        return JobAnswer(summary={name: list(note.warnings) for name, note in parts.notes.items()})

    def counted(parts, _):
        return JobAnswer(summary={"rows": len(parts.pandas("seen"))})

    job = AnalysisJob(name="seen", parts=(SEEN,), results=(), answer=counted, options=Options)
    user = AnalysisJob(name="user", parts=(), uses=("seen",), results=(), answer=counted)
    report = AnalysisJob(name="told", parts=(), results=(), answer=told)
    for begin in (0, 3600):
        events_of(tmp_path / "events", begin, begin + 1)
    late = Window(at(3600), None)
    for jobs, window in (([job, user, report], None), ([report], None), ([job, user, report], late)):
        result = go(*jobs, window=window)
        assert (result.warnings, result.jobs["told"].summary) == ([], {"seen": [], "user": []})
    spans = json.loads((tmp_path / "out/summary.json").read_text())["jobs"]
    assert {name: (note["hours"], *note["window"].values()) for name, note in spans.items()} == dict.fromkeys(
        ("seen", "user", "told"), (1, at(3600).isoformat(), at(7200).isoformat())
    )

    result = go(report)
    bounds = f"1, from {at(3600).isoformat()} to {at(7200).isoformat()}"
    lines = [f"the results of {name} are of other hours: {bounds}" for name in ("seen", "user")]
    assert result.warnings == [*result.jobs["told"].warnings] == lines
    assert result.jobs["told"].summary == {"seen": lines[:1], "user": lines[1:]}
    result = go(job)
    assert (result.warnings, result.jobs["seen"].warnings) == (lines[1:], ())
    result = go(report)
    assert result.jobs["told"].summary == {"seen": [], "user": lines[1:]}
    assert go(job, user).warnings == go(report).warnings == []


def test_run_when_a_job_fails_costs_only_those_that_need_it(go, tmp_path):
    events_of(tmp_path / "events", 1)
    other = AnalysisJob(
        name="other",
        parts=(),
        results=("o.txt",),
        answer=lambda parts, _: (parts.write_text("o.txt", "o"), JobAnswer())[1],
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


def test_run_when_nothing_changed_keeps_answers_and_starts_no_spark(go, either, tmp_path):
    asked, started = [], []

    def counted(parts, options):
        asked.append(parts.newest)
        parts.write("small", parts.pandas("seen").groupby("event", as_index=False).agg(rows=("ts", "size")), SUMS)
        if not options.silent:
            parts.write_text("note.txt", str(len(asked)))
        return JobAnswer(summary={"rows": len(parts.pandas("seen"))}, warnings=["this is a toy"])

    def told(parts, _):
        return JobAnswer(summary={name: note.summary["rows"] for name, note in parts.notes.items() if name == "seen"})

    job = AnalysisJob(name="seen", parts=(SEEN,), results=("small", "note.txt"), answer=counted, options=Options)
    teller = AnalysisJob(name="told", parts=(), results=(), answer=told)

    def again(options=None, window=None, out="out"):
        before = len(asked), len(started)
        given = {"seen": options or {}}

        def start():
            started.append(1)
            return either

        result = run(start, str(tmp_path / "events"), str(tmp_path / out), [job, teller], given, window)
        note, other = result.jobs["seen"], result.jobs["told"]
        assert (result.failed, other.summary) == ([], {"seen": note.summary["rows"]})
        assert (list(note.warnings), note.summary["rows"]) == (["this is a toy"], rows)
        assert list(note.outputs) == [name for name in job.results if (tmp_path / out / name).exists()]
        assert all(path.startswith(str(tmp_path / out)) for path in note.outputs.values())
        return len(asked) - before[0], len(started) - before[1]

    rows = 2
    events_of(tmp_path / "events", 1, 2)
    assert again() == (1, 1)
    assert again() == (0, 0)
    assert again({"silent": True}) == (1, 0)
    assert not (tmp_path / "out/note.txt").exists()
    assert again() == (1, 0)
    (tmp_path / "out/note.txt").write_text("3")  # as it was, but by another
    assert again() == (1, 0)
    (tmp_path / "out/small/part-00000.zstd.parquet").unlink()
    assert again() == (1, 0)
    assert again(window=Window(at(0), None)) == (1, 0)
    assert again() == (1, 0)
    (tmp_path / "out").rename(tmp_path / "moved")
    assert again(out="moved") == (0, 0)
    rows = 3
    events_of(tmp_path / "events", 3, name="late")
    assert again(out="moved") == (1, 1)
    assert again({"mark": "other"}, out="moved") == (1, 1)  # its part is made again


def test_schema_when_types_are_plain_is_that_of_spark_and_needs_no_java(spark, monkeypatch):
    from pyspark.sql.types import StructType

    tables = [EVIDENCE.columns, SCORE_COLUMNS, LOADS.columns, SUMS, COLUMNS]
    expected = [arrow_schema(columns | {"more": "binary"}).remove(len(columns)) for columns in tables]
    monkeypatch.setattr(StructType, "fromDDL", lambda _: pytest.fail("Spark's parser is asked"))
    assert [arrow_schema(columns) for columns in tables] == expected


def test_run_when_flowctl_changes_makes_answers_again(go, tmp_path, monkeypatch):
    """What another version made of the same parts is not taken for what this one would make."""
    events_of(tmp_path / "events", 1)
    made = [go().jobs["seen"].took_s for _ in range(2)]
    assert made[0] > made[1] == 0
    monkeypatch.setattr("flowctl.analyze.run._code", lambda: "another")
    assert go().jobs["seen"].took_s > 0


def test_run_when_a_text_has_other_writers_merges_it(go, tmp_path):
    def merged(there, new, options, warn):
        if "typo" in there:
            raise ConfigError("the list cannot be read")
        return there + new

    job = AnalysisJob(
        name="list",
        parts=(SEEN,),
        options=Options,
        results=("list.txt",),
        answer=lambda parts, _: (parts.write_text("list.txt", "new\n"), JobAnswer())[1],
        merge={"list.txt": merged},
    )
    events_of(tmp_path / "events", 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/list.txt").write_text("by hand\n")
    assert go(job).failed == []
    assert (tmp_path / "out/list.txt").read_text() == "by hand\nnew\n"
    go(job)
    assert (tmp_path / "out/list.txt").read_text() == "by hand\nnew\nnew\n"  # never kept: others write it
    (tmp_path / "out/list.txt").write_text("typo")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    with pytest.raises(ConfigError, match="cannot be read"):
        go(job)
    assert (tmp_path / "out/list.txt").read_text() == "typo"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


def test_run_when_an_hour_has_lost_files_leaves_it_as_it_is_and_says_what_is_left_out(go, tmp_path):
    """To make it anew would forget records; what comes later is told once, and counts when the lost file is back."""
    first = events_of(tmp_path / "events", 1, 2)
    events_of(tmp_path / "events", 3, name="b", event_name="dropped")
    go()
    kept = first.rename(tmp_path / "kept")
    result = go()
    told = {"returned": 2, "dropped": 1, "newest": at(3).isoformat()}
    assert (result.warnings, result.hours_read, result.jobs["seen"].summary) == ([], 0, told)
    events_of(tmp_path / "events", 10, name="late", event_name="limit_hit")
    result = go()
    assert (result.failed, result.hours_read, result.jobs["seen"].summary) == ([], 0, told)
    assert [item["rows_in"] for item in result.accounts] == [3]
    why = "1 of the files that it was made of are there no more, so it stays as it is"
    assert result.warnings == [f"2026-03-01 12: {why}; 1 others are left out"]
    assert go().warnings == []
    result = go(JOB, OTHERS, options={"mark": "other"})  # of what is new, what is left; what there is stays
    assert (result.hours_read, result.jobs["seen"].summary["returned"], result.jobs["others"].summary["rows"]) == (
        1,
        2,
        2,
    )
    assert all("1 of 1 hours" in result.jobs[name].warnings[0] for name in ("seen", "others"))
    kept.rename(first)
    result = go(JOB, OTHERS)
    assert (result.warnings, result.hours_read, result.jobs["others"].summary["rows"]) == ([], 1, 4)
    assert result.jobs["seen"].summary["limit_hit"] == 1


def test_names_when_a_recorder_counts_its_files_on_are_told_by_first_and_last():
    def files(*names, table="flow_events"):
        return [File(table, ("2026-03-01", "12"), f"/e/{name}.parquet", 1, 1) for name in names]

    start = "n-1-1767225600000000"
    recorded = [*files(f"{start}-0", f"{start}-2"), *files(f"{start}-1", f"{start}-7", table="flow_closes")]
    others = [*files("a-1", "a-2"), *files("a-1", table="flow_closes")]
    names = packed([*recorded, *others])
    assert names == {
        f"{start}-": [[0, 2], [7, 7]],
        **{f"flow_{name}.parquet": [[0, 0]] for name in ("closes/a-1", "events/a-1", "events/a-2")},
    }
    assert compared(names, [*recorded, *others]) == (0, 0)
    assert compared(names, [*recorded[1:], *others[:2], *files("b")]) == (2, 1)


def damage(path, column):
    """Overwrite 16 octets of the pages of a column: its footer, size and all other columns stay as they are."""
    octets, chunk = bytearray(path.read_bytes()), pq.read_metadata(path).row_group(0)
    (at_byte,) = {
        chunk.column(number).dictionary_page_offset or chunk.column(number).data_page_offset
        for number in range(chunk.num_columns)
        if chunk.column(number).path_in_schema == column
    }
    octets[at_byte : at_byte + 16] = b"\xff" * 16
    path.write_bytes(octets)


@pytest.mark.parametrize("checked", [False, True])
def test_run_when_a_file_is_damaged_inside_puts_it_aside_and_reads_the_rest(go, tmp_path, checked):
    events_of(tmp_path / "events", 1, 2, name="good")
    rows = [event(number, 7, "dropped") for number in (3, 4, 5)]
    if checked:  # Arrow in the workers reads those of which not every row can be used
        rows.append(event(6, -7, "dropped"))
    path = write(tmp_path / "events", rows, "bad")
    healthy = path.read_bytes()
    damage(path, "node")
    result = go()
    told = {"returned": 2, "newest": at(2).isoformat()}
    assert (result.failed, result.jobs["seen"].summary) == ([], told)
    (line,) = result.warnings
    assert line.startswith(f"a damaged file is put aside: {path}: ")

    def books(result):
        (item,) = result.accounts
        aside = pq.read_table(tmp_path / "out/quarantine/flow_events_files").to_pylist()
        counts = item["files_in"], item["rows_in"], item["rows_out"], item["rows_quarantined"]
        return counts, item["files_by_reason"], [(row["path"], row["reason"], row["rows"]) for row in aside]

    aside = [(str(path), "damaged", len(rows))]
    assert books(result) == ((2, 2 + len(rows), 2, len(rows)), {"damaged": 1}, aside)
    assert (again := go()).hours_read == 0
    assert books(again) == books(result)
    events_of(tmp_path / "events", 10, name="late", event_name="returned")
    result = go()
    assert (result.hours_read, result.warnings, result.jobs["seen"].summary["returned"]) == (1, [], 3)
    assert books(result) == ((3, 3 + len(rows), 3, len(rows)), {"damaged": 1}, aside)
    path.write_bytes(healthy)
    result = go()
    assert (result.failed, result.hours_read, result.warnings) == ([], 1, [])
    assert (result.jobs["seen"].summary["returned"], result.jobs["seen"].summary["dropped"]) == (3, 3)
    (item,) = result.accounts
    assert (item["files_in"], item["rows_in"], item["files_by_reason"]) == (3, 3 + len(rows), {})
    assert item["rows_out"] == 6


def test_run_when_a_job_tries_makes_its_parts_behind_what_is_counted(go, tmp_path):
    """What only it reads may be much; a file of that which is damaged is in the books all the same."""
    said = []

    def closed_of(records, _):
        said.append("part")
        text = f"SELECT {', '.join({'ts': 0, 'node': 0, 'conn_id': 0} | BY_HOUR)} FROM closes"
        return run_text(text, {"closes": records.table("flow_closes")})

    def told(parts, _):
        said.append("page")
        return JobAnswer(summary={"others": sorted(parts.notes)})

    part = JobPart("closed", {"ts": "timestamp", "node": "string", "conn_id": "bigint"}, closed_of, ("flow_closes",))
    trying = AnalysisJob(
        name="trying", tries=True, parts=(part,), results=(),
        answer=lambda parts, _: JobAnswer(summary={"rows": len(parts.table("closed").collect())}),
    )  # fmt: skip
    page = AnalysisJob(name="page", parts=(), results=(), answer=told)
    events_of(tmp_path / "events", 1, 2)
    write_closes(tmp_path / "events", [close(3, 1)])
    damage(write_closes(tmp_path / "events", [close(4, 2), close(5, 3)], name="bad"), "node")
    result = go(JOB, trying, page)
    assert result.failed == []
    assert (said[0], said[-1]) == ("page", "page")
    assert "part" in said
    assert (result.jobs["trying"].summary, result.jobs["seen"].summary["returned"]) == ({"rows": 1}, 2)
    books = {item["table"]: (item["rows_out"], item["files_by_reason"]) for item in result.accounts}
    assert books == {"flow_closes": (1, {"damaged": 1}), "flow_events": (2, {})}
    said.clear()
    again = go(JOB, trying, page)
    assert (again.hours_read, again.jobs["trying"].summary, "part" in said) == (0, {"rows": 1}, False)


def test_run_when_what_was_read_is_damaged_later_goes_on_without_it_and_names_it(go, tmp_path):
    path = events_of(tmp_path / "events", 1, 2)
    events_of(tmp_path / "events", 3, name="b")
    go()
    damage(path, "node")
    events_of(tmp_path / "events", 5, name="late")
    result = go()
    assert (result.failed, result.jobs["seen"].summary["returned"]) == ([], 2)
    assert any(str(path) in line for line in result.warnings)
    (item,) = result.accounts
    assert (item["files_in"], item["rows_in"], item["rows_out"], item["rows_quarantined"]) == (3, 4, 2, 2)
    assert go().hours_read == 0


def test_run_when_a_copy_of_a_damaged_file_is_there_reads_that(go, tmp_path):
    path = events_of(tmp_path / "events", 1, 2)
    (path.parent / "z.parquet").write_bytes(path.read_bytes())
    damage(path, "conn_id")
    result = go()
    assert (result.failed, result.jobs["seen"].summary["returned"]) == ([], 2)
    (item,) = result.accounts
    assert (item["rows_out"], item["files_by_reason"]) == (2, {"damaged": 1})


def test_run_when_many_files_are_damaged_says_so(go, tmp_path):
    for number in range(10):
        path = events_of(tmp_path / "events", number, name=f"f{number}")
        if number:
            damage(path, "node")
    with pytest.raises(FlowctlError, match=r"9 files of records are damaged.* 8 at most; the first is .*/f1.parquet: "):
        go()
    path.unlink()
    assert go().jobs["seen"].summary["returned"] == 1


OTHER = JobPart("other", COLUMNS, made, ("flow_events",), depends=lambda options: options.mark)
OTHERS = AnalysisJob(
    name="others",
    parts=(OTHER,),
    results=(),
    answer=lambda parts, _: JobAnswer(summary={"rows": len(parts.table("other").collect())}),
    options=Options,
)


def test_run_when_files_of_no_recorder_number_alike_reads_each(go, tmp_path):
    for hour in range(2):
        row = event(hour * 3600, 1, "returned", seq=1)
        write(tmp_path / "events", [row], f"h{hour}", hour=f"{12 + hour}", metadata={})
        assert go().jobs["seen"].summary["returned"] == hour + 1


@pytest.mark.parametrize("broken", [False, True])
def test_run_when_a_job_runs_not_or_fails_makes_its_part_when_it_runs_next(go, either, tmp_path, broken):
    events_of(tmp_path / "events", 1, 2)
    go(JOB, OTHERS)
    events_of(tmp_path / "events", 5, 6, name="late")
    jobs, given = ([JOB, OTHERS], {"others": {"broken": "part"}}) if broken else ([JOB], {})
    run(either, str(tmp_path / "events"), str(tmp_path / "out"), jobs, given)
    result = go(JOB, OTHERS)
    assert (result.jobs["seen"].summary["returned"], result.jobs["others"].summary["rows"]) == (4, 4)
    assert [item["rows_in"] for item in result.accounts] == [4]
    assert result.jobs["others"].warnings == ()


def test_run_when_a_bad_row_or_a_stray_file_is_of_another_time_knows_the_newest_record(go, tmp_path):
    events_of(tmp_path / "events", 1, 600)
    wanted = go()
    write(tmp_path / "events", [event(30, 1, "returned"), event(3700, 1, "returned")], "b")
    for day, octets in (("2026-03-02", b""), ("9999-12-31", b"no")):
        stray = tmp_path / f"events/flow_events/date={day}/hour=23/x.parquet"
        stray.parent.mkdir(parents=True)
        stray.write_bytes(octets)
    result = go()
    assert result.jobs["seen"].summary["newest"] == wanted.jobs["seen"].summary["newest"] == at(600).isoformat()
    assert (result.window, result.hours) == (wanted.window, 1)
    (account,) = result.accounts
    assert (account["rows_quarantined"], account["files_quarantined"]) == (1, 2)


@pytest.mark.parametrize("name", ["old", "x=1"])
def test_run_when_an_hour_has_folders_reads_none_of_their_files(go, tmp_path, monkeypatch, name):
    """They are put aside, also where Spark is given the folder of an hour because its files are many."""
    monkeypatch.setattr("flowctl.analyze.records.read.MOST_NAMED", 2)
    for number in range(4):
        path = events_of(tmp_path / "events", number, name=f"f{number}")
    (path.parent / name).mkdir()
    path.rename(path.parent / name / path.name)
    for file in path.parent.rglob("*.parquet"):
        os.utime(file, (1.77e9, 1.77e9))
    for window in (None, Window(at(0), None)):
        result = go(window=window, out=f"out{window}")
        assert (result.failed, result.jobs["seen"].summary["returned"]) == ([], 3)


def test_run_when_samples_are_gone_that_were_read_counts_no_minute_twice(either, tmp_path):
    events, out = tmp_path / "events", tmp_path / "out"

    def viewers():
        result = run(either, str(events), str(out), ["fleet"])
        assert (result.failed, [*result.jobs["fleet"].warnings]) == ([], [])
        rows = either.read.parquet(str(out / "fleet_streams")).collect()
        return {int(row["minute"].timestamp() - at(0).timestamp()): (row["viewers"], row["source"]) for row in rows}

    def samples(conn_id, *moments):
        return [sample(moment, conn_id, interval_ms=30_000.0) for moment in moments]

    def closed(ended_s, conn_id, duration_s):
        rows = [close(ended_s, conn_id, duration_s, samples_count=3, startup_ms=0.0, asked_ms=0.0)]
        return write_closes(events, rows, f"close{conn_id}", hour="13")

    first = write_samples(events, samples(1, 3510, 3540, 3570))
    told = {3480: (1.0, "samples"), 3540: (0.5, "samples")}
    assert viewers() == told
    first.unlink()
    second = write_samples(events, [*samples(1, 3600, 3630, 3659), *samples(2, 3600, 3630, 3659)], "b", hour="13")
    closed(3659, 1, 179.0)
    told |= {3540: (1.5, "samples"), 3600: (2.0, "samples")}
    assert viewers() == told
    second.unlink()
    closed(3659.5, 2, 59.0)
    assert viewers() == told


def test_run_when_a_window_is_widened_tells_what_one_run_would(either, tmp_path):
    events = tmp_path / "events"
    for hour, moments in (("12", (3510, 3540, 3570)), ("13", (3600, 3630, 3659))):
        write_samples(events, [sample(moment, 1, interval_ms=30_000.0) for moment in moments], hour=hour)
    row = close(3659, 1, 179.0, samples_count=6, startup_ms=0.0, asked_ms=0.0)
    write_closes(events, [row], hour="13")

    def minutes(out, window=None):
        result = run(either, str(events), str(tmp_path / out), ["fleet"], window=window)
        assert (result.failed, result.jobs["fleet"].warnings) == ([], ())
        rows = either.read.parquet(str(tmp_path / out / "fleet_streams")).collect()
        return sorted((row["minute"].minute, row["viewers"], row["source"]) for row in rows if row["viewers"])

    assert minutes("out", Window(at(3600), None)) == [(0, 1.0, "samples"), (59, 0.5, "samples")]
    assert minutes("out") == minutes("whole") == [(minute, 1.0, "samples") for minute in (0, 58, 59)]


class Killed(BaseException):
    """The process is killed: it does nothing any more."""


class Deadly:
    """Kills a run before its n-th change of what lies in OUT."""

    def __init__(self, monkeypatch):
        self.left = -1
        for name in ("_move", "delete", "write_text"):
            monkeypatch.setattr(RecordPlace, name, self.wrapped(getattr(RecordPlace, name)))

    def wrapped(self, method):
        def step(*arguments):
            if self.left == 0:
                raise Killed
            self.left -= 1
            return method(*arguments)

        return step


def test_run_when_killed_at_any_step_leaves_a_summary_of_what_is_there(go, tmp_path, monkeypatch):
    def written(parts, options):
        parts.write("small", parts.pandas("seen").groupby("event", as_index=False).agg(rows=("ts", "size")), SUMS)
        if not options.silent:
            parts.write_text("note.txt", "there")
        return JobAnswer()

    def kept_as_it_is(parts, _):
        parts.write_text("kept.txt", "kept")
        return JobAnswer()

    job = AnalysisJob(name="seen", parts=(SEEN,), results=("small", "note.txt"), answer=written, options=Options)
    kept = AnalysisJob(name="kept", parts=(), uses=("seen",), results=("kept.txt",), answer=kept_as_it_is)
    deadly, file = Deadly(monkeypatch), tmp_path / "out/summary.json"
    events_of(tmp_path / "events", 1)
    go(job, kept)
    states = set()
    for step in range(100):
        deadly.left = step
        with contextlib.suppress(Killed):
            go(job, kept, options={"silent": True})
        killed, deadly.left = deadly.left == 0, -1
        summary = json.loads(file.read_text())
        named = [summary["outputs"], *(note["outputs"] for note in summary["jobs"].values())]
        assert [path for outputs in named for path in outputs.values() if not Path(path).exists()] == []
        assert "kept.txt" in summary["outputs"]
        if not killed:
            break
        states.add(summary["jobs"]["seen"]["state"])
        assert summary["passed"] == (summary["failed"] == []) == (summary["jobs"]["seen"]["state"] == "done")
        assert go(job, kept).failed == []
        assert json.loads(file.read_text())["outputs"].keys() == {"small", "note.txt", "kept.txt"}
    assert step > 5
    assert states == {"done", "failed"}  # before and after its results begin to change
    assert summary["outputs"].keys() == {"small", "kept.txt"}


@pytest.mark.parametrize("seed", range(3))
def test_run_whatever_comes_goes_and_kills_it_knows_each_record_once(go, tmp_path, monkeypatch, seed):
    """Files come, go and are copied, options change, runs are killed at each step and jobs left out.

    After each, results of an hour are those of all its files, or as they were since it lost one.
    """
    chance, deadly = random.Random(seed), Deadly(monkeypatch)
    files, mark = {}, ""  # path -> uid, word and number of its records
    known = {"12": {}, "13": {}}  # the files that an hour was made of
    for number in range(10):
        for step in range(chance.randint(1, 3)):
            what = chance.choice(["new", "new", "new", "gone", "copy", "options"])
            if what == "new" or not files:
                begin, word = chance.choice([0, 3600]), chance.choice(["returned", "dropped"])
                moments = [begin + chance.randrange(3600) for _ in range(chance.randint(1, 3))]
                path = events_of(tmp_path / "events", *moments, name=f"f{number}-{step}", event_name=word)
                files[path] = (path.name, word, len(moments))
            elif what == "options":
                mark = chance.choice(["", "other"])
            else:
                path = chance.choice(sorted(files))
                if what == "copy":
                    target = path.with_name(f"zcopy{number}-{step}{path.name}")
                    target.write_bytes(path.read_bytes())
                    files[target] = files[path]
                else:
                    path.unlink()
                    del files[path]
        for hour, made_of in known.items():
            there = {path: item for path, item in files.items() if path.parent.name == f"hour={hour}"}
            if made_of.keys() <= there.keys():
                used = {item[0]: path for path, item in sorted(there.items(), reverse=True)}  # copies count once
                known[hour] = {path: there[path] for path in used.values()}
        told = Counter()
        for made_of in known.values():
            for _, word, rows in made_of.values():
                told[word] += rows
        jobs = chance.choice([[JOB], [JOB, OTHERS]])
        deadly.left = chance.randrange(12)
        with contextlib.suppress(Killed):
            go(*jobs, options={"mark": mark})
        deadly.left = -1
        if not told:
            continue
        result = go(JOB, OTHERS, options={"mark": mark})
        assert result.failed == []
        summary = result.jobs["seen"].summary
        assert told == {name: count for name, count in summary.items() if name != "newest"}
        assert result.jobs["others"].summary["rows"] == sum(told.values())
        assert [item["rows_out"] for item in result.accounts] == [sum(told.values())]
        assert not list((tmp_path / "out").glob("_new-*"))


KILLED = """
import os, sys, signal
sys.path[:0] = {path!r}
import test_run
from flowctl.analyze import run as runner
from flowctl.analyze.spark.session import SessionOptions, session

def die(*_, **__):
    print("dying", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

runner._AnalysisRun._give_places = die
with session(SessionOptions(master="local[1]", conf={{"spark.driver.memory": "512m"}}, size_bytes=0)) as spark:
    runner.run(spark, {events!r}, {out!r}, [test_run.JOB])
"""


def test_run_when_killed_in_the_middle_is_made_good_by_the_next(go, tmp_path):
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


def test_run_when_the_records_are_others_refuses_them(go, either, tmp_path):
    events_of(tmp_path / "events", 1)
    events_of(tmp_path / "others", 3601)
    go()
    with pytest.raises(ConfigError, match=f"other records, {tmp_path}/events") as caught:
        run(either, str(tmp_path / "others"), str(tmp_path / "out"), [JOB])
    assert "--out" in caught.value.hint
    (tmp_path / "link").symlink_to(tmp_path / "events")
    assert run(either, f"file://{tmp_path}/link/", str(tmp_path / "out"), [JOB]).hours_read == 0


def test_run_when_folders_have_odd_names_takes_them_letter_by_letter(either, tmp_path):
    """Names that Spark would take for patterns are found again; days that never were cost no run."""
    odd = tmp_path / "a[1] {b,c} *"
    events_of(odd / "events", 1)
    for day in ("2026-02-30", "9999-12-31"):
        write(odd / "events", [event(1, 1, "returned")], day, date=day, hour="23")
    result = run(either, str(odd / "events"), str(odd / "out"), [JOB], window=Window(at(0), None))
    assert (result.failed, result.jobs["seen"].summary["returned"]) == ([], 1)
    assert run(either, str(odd / "events"), str(odd / "out"), [JOB]).failed == []


def test_run_when_the_folders_cannot_be_used_says_so(go, tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        go()
    assert not (tmp_path / "out").exists()
    events_of(tmp_path / "events", 1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot write to"):
        go(out="file")
    (tmp_path / "out/sums").mkdir(parents=True)
    (tmp_path / "out/sums/mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="out/sums would be replaced by results"):
        go()
    assert [path.name for path in (tmp_path / "out/sums").iterdir()] == ["mine.txt"]


def test_run_when_the_record_cannot_be_read_says_so_and_leaves_it(go, tmp_path):
    """To take it for none would forget hours whose records are gone; who removes it says that this is well."""
    record, first = tmp_path / "out/record.json", events_of(tmp_path / "events", 1)
    events_of(tmp_path / "events", 3601)
    go()
    first.unlink()
    whole = record.read_text()
    for text in ("nonsense", "[]", "", whole[:-40], whole.replace('"format": ', '"format": 9')):
        record.write_text(text)
        with pytest.raises(ConfigError, match=r"out/record.json, .* damaged, or of another version") as caught:
            go()
        assert "remove that file" in caught.value.hint
        assert record.read_text() == text
    record.write_text(whole)
    assert go().hours == 2
    record.unlink()
    assert go().hours == 1


def test_run_when_an_old_copy_of_the_parts_was_put_back_makes_them_anew_or_says_that_it_cannot(go, tmp_path):
    parts, copy = tmp_path / "out/parts", tmp_path / "copy"
    first = events_of(tmp_path / "events", 1)
    go()
    shutil.copytree(parts, copy)
    events_of(tmp_path / "events", *range(2, 50), name="late")
    assert go().jobs["seen"].summary["returned"] == 49
    shutil.rmtree(parts)
    shutil.copytree(copy, parts)
    events_of(tmp_path / "events", 3601)
    result = go()
    assert (result.hours_read, result.jobs["seen"].summary["returned"]) == (2, 50)

    first.unlink()
    go()
    shutil.rmtree(parts / "seen/date=2026-03-01/hour=12")
    shutil.copytree(copy / "seen/date=2026-03-01/hour=12", parts / "seen/date=2026-03-01/hour=12")
    assert any("old copy" in warning for warning in go().warnings)
    assert go().hours_read == 0


def test_run_when_the_disk_is_full_says_so_and_keeps_what_there_was(go, tmp_path, monkeypatch):
    events_of(tmp_path / "events", 1)
    go()
    before = (tmp_path / "out/note.txt").read_text()
    events_of(tmp_path / "events", 2, name="b")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    result = go()
    assert result.jobs["seen"].message == "[Errno 28] No space left on device"
    assert "room" in result.jobs["seen"].hint
    assert (tmp_path / "out/note.txt").read_text() == before


def test_jobs_when_listed_name_every_part_and_result_once():
    import importlib

    jobs = [importlib.import_module(module).JOB for module in JOBS.values()]
    assert [job.name for job in jobs] == list(JOBS)
    parts = [part.name for job in jobs for part in job.parts]
    results = [name for job in jobs for name in job.results]
    assert len(set(parts)) == len(parts)
    assert len(set(results)) == len(results)
    assert {use for job in jobs for use in job.uses} <= set(parts)
    assert not {"parts", "quarantine", "record.json", "summary.json"} & set(results)


def slow(records, _):
    """Return the events of a part that takes half a minute, and of which files tell how far it is."""
    folder = records.listing.root

    def rest(batches):
        Path(folder, "begun").touch()
        time.sleep(30)
        Path(folder, "done").touch()
        yield from batches

    ddl = ", ".join(f"{name} {kind}" for name, kind in (COLUMNS | BY_HOUR).items())
    return seen_of(records).mapInArrow(rest, ddl)


def test_run_when_answers_are_made_makes_two_at_a_time_and_gives_places_in_one_thread(go, tmp_path):
    write(tmp_path / "events", [event(1, 1, "returned")])
    both, places, adopt = threading.Barrier(2, timeout=60), [], RecordPlace.adopt

    def meeting(name, **made_of):
        def answer(parts, _):
            parts.write_text(f"{name}.txt", str(both.wait()))
            return JobAnswer(summary={"rows": len(parts.pandas("seen"))})

        return AnalysisJob(name=name, results=(f"{name}.txt",), answer=answer, options=Options, **made_of)

    def told(parts, _):
        return JobAnswer(summary={name: note.outputs for name, note in parts.notes.items()})

    def adopted(place, staging, name):
        places.append((name, threading.current_thread() is threading.main_thread()))
        adopt(place, staging, name)

    one, two = meeting("seen", parts=(SEEN,)), meeting("user", parts=(), uses=("seen",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordPlace, "adopt", adopted)
        result = go(AnalysisJob(name="told", parts=(), results=(), answer=told), one, two)
    assert (result.failed, list(result.jobs)) == ([], ["told", "seen", "user"])
    assert result.jobs["told"].summary == {name: result.jobs[name].outputs for name in ("seen", "user")}
    assert places[-2:] == [("seen.txt", True), ("user.txt", True)]


def test_run_when_a_signal_comes_does_not_wait_for_parts_at_work(either, tmp_path):
    write(tmp_path / "events", [event(1, 1, "returned")])
    part = JobPart("seen", COLUMNS, slow, ("flow_events",))
    job = AnalysisJob(name="seen", parts=(part,), results=(), answer=lambda *_: JobAnswer(), options=Options)

    def end():
        while not (tmp_path / "events" / "begun").exists():
            time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(either, str(tmp_path / "events"), str(tmp_path / "out"), [job])
    thread.join()
    assert not (tmp_path / "events" / "done").exists()
