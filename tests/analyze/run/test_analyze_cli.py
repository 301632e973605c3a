"""``flowctl analyze``: help without Spark, errors in words, and a run as a process that leaves none behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from record_kit import close, event, write, write_closes
from report_kit import run_in

from flowctl.analyze import run, said
from flowctl.analyze.capacity.node import MEASURE
from flowctl.analyze.job import JobNote, JobState
from flowctl.analyze.record import RECORD_FORMAT
from flowctl.analyze.spark import progress
from flowctl.charts.words import fill_template
from flowctl.cli import main
from flowctl.cli.analyze.app import app
from flowctl.cli.analyze.common import check_apart, show
from flowctl.cli.errors import TerminatedError
from flowctl.errors import ConfigError


def flowctl(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "flowctl", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, **environment},
    )


def test_help_when_asked_for_lists_the_jobs_without_loading_spark():
    code = (
        "import sys; from flowctl.cli import main; status = main(['analyze', '--help']); "
        "print(status, sorted({'pyspark', 'pandas', 'numpy', 'pyarrow', 'matplotlib', 'py4j'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "0 []"
    for command in app.registered_commands:
        assert f" {command.name} " in done.stdout
    assert "..." not in done.stdout.partition("Commands:")[2]


def test_answers_when_a_figure_is_one_are_in_the_singular():
    summaries = {"fleet": {"minutes": 1, "networks": 1}, "experience": {"viewers": 1, "attempts": 2}}
    summaries["experience"] |= {"peak_viewers": 1, "start_failures": 0, "exits_before_start": 1}
    notes = {name: JobNote(name, JobState.DONE, summary=summary) for name, summary in summaries.items()}
    result = run.AllResult(
        jobs=notes, outputs={}, accounts=[], hours=1, hours_read=0, window={}, warnings=[], errors={}
    )
    told = list(said.lines(result))
    assert told[0] == "fleet: 1 minute of streams on nodes, 1 network"
    assert told[1].startswith("experience: 1 viewer, 1 at once at most. Of 2 attempts 0 failed to start, 1 left ")
    assert told[2] == "records of 1 hour, read now: 0"


def test_import_when_of_all_but_the_pipeline_loads_no_package_of_its_extra():
    code = (
        "import sys, pkgutil, importlib, flowctl\n"
        "for item in pkgutil.walk_packages(flowctl.__path__, 'flowctl.'):\n"
        "    if not item.name.startswith(('flowctl.analyze', 'flowctl.__main__')):\n"
        "        importlib.import_module(item.name)\n"
        "print(sorted({'pyspark', 'pandas', 'numpy', 'matplotlib', 'py4j', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.fixture
def needs_java():
    from flowctl.analyze.spark.java import find_java
    from flowctl.errors import ConfigError

    try:
        find_java()
    except ConfigError as error:
        pytest.skip(f"{error}; {error.hint}")


def test_sessions_when_run_as_a_command_prints_accounts_as_json_and_leaves_no_process(needs_java, tmp_path):
    write_closes(tmp_path / "ev", [close(20, 1), close(21, 2)])
    write(tmp_path / "ev", [event(1, 1, "nonsense")])
    with modes_of(tmp_path, "flowctl-spark-*/tmp/blockmgr-*/../..") as of_blocks:
        done = flowctl(
            "analyze", "sessions", tmp_path / "ev", "--out", tmp_path / "out", "--master", "local[1]", "--json",
            "--driver-memory", "512m", TMPDIR=str(tmp_path),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert of_blocks == {0o700}, "nobody else looks at what Spark writes in between"
    assert {path.stat().st_mode & 0o007 for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]} == {0}
    result = json.loads(done.stdout)
    assert result["jobs"]["sessions"]["summary"]["sessions"] == 2
    accounts = {item["table"]: item for item in result["accounts"]}
    assert (accounts["flow_closes"]["rows_in"], accounts["flow_closes"]["rows_out"]) == (2, 2)
    assert "at org." not in done.stderr
    marker = b"TMPDIR=" + str(tmp_path).encode()
    begun = time.monotonic()
    while left := [path for path in Path("/proc").glob("[0-9]*") if marker in environment_of(path)]:
        assert time.monotonic() - begun < 20, left
        time.sleep(0.05)
    assert not [*tmp_path.glob("flowctl-spark-*")]


@contextlib.contextmanager
def modes_of(folder, pattern):
    seen, over = set(), threading.Event()

    def look():
        while not over.wait(0.05):
            with contextlib.suppress(OSError):
                seen.update(path.stat().st_mode & 0o777 for path in folder.glob(pattern))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("end", [KeyboardInterrupt, TerminatedError])
def test_run_when_a_signal_ends_it_says_what_is_left(monkeypatch, tmp_path, capsys, end):
    pytest.importorskip("pyspark")

    def ended(_):
        raise end

    monkeypatch.setattr("flowctl.analyze.spark.session.session", ended)
    write_closes(tmp_path / "ev", [close(20, 1)])
    words = ["analyze", "sessions", str(tmp_path / "ev"), "--out", str(tmp_path / "out"), "--engine", "spark"]
    assert main(words) in (130, 143)
    assert f"stopped: what is in {tmp_path / 'out'} is whole" in capsys.readouterr().err


def test_progress_when_no_task_runs_tells_of_none(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.01)
    monkeypatch.setattr(progress.sys, "stderr", stream)
    with progress.Progress("starting Java") as shown:
        while "starting Java: 0 s\n" not in stream.getvalue():
            time.sleep(0.01)
        monkeypatch.setattr(shown, "read", lambda: (1, 3))
        while ", tasks 1 of 3\n" not in stream.getvalue():
            time.sleep(0.01)
    assert ", tasks 0 of 0" not in stream.getvalue()


def environment_of(process):
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


def test_sessions_when_there_are_no_events_fails_in_words(needs_java, tmp_path):
    done = flowctl("analyze", "sessions", tmp_path, "--out", f"{tmp_path}-out", "--master", "local[1]")
    assert done.returncode == 2
    assert f"error: {tmp_path} has no records" in done.stderr
    assert "hint: give the folder that a server wrote with --events" in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["all", "x", "--out", "y", "--skip", "abuze"],
            ["--skip abuze: there is no such job", "the jobs are sessions,"],
        ),
        (["fleet", "x", "--out", "y", "--since", "soon"], ["--since: 'soon' is no length of time", "90m, 2h"]),
        (["fleet", "x", "--out", "y", "--since", "2h", "--from", "2026-03-01"], ["--since and --from both say"]),
        (["fleet", "x", "--out", "y", "--from", "2026-03-02", "--to", "2026-03-01"], ["the window is empty"]),
        (["abuse", "x"], ["Missing option '--out'"]),
        (["abuse", "x", "--out", "y", "--weights", "nowhere"], ["--weights nowhere cannot be read"]),
        (["capacity", "x", "--out", "y", "--viewers", "many"], ["--viewers is 'many', allowed is a number", "10M"]),
        (["whatif", "x", "--out", "y", "--most", "-1"], ["--most is '-1', allowed is a number"]),
        (["abuse", "x", "--out", "y", "--max-bans", "0"], ["--max-bans is 0, allowed is 1 to"]),
        (
            ["sessions", "x", "--out", "y", "--conf", "foo"],
            ["--conf is 'foo', it must be a setting of Spark and its value", "--conf spark.executor.memory=4g"],
        ),
        (["sessions", __file__, "--out", "y"], [f"{__file__} is no folder, so there are no records"]),
        (["abuse", "x", "--out", "y", "--now", "foo"], ["--now is 'foo', it must be a time", "2026-11-21T17:00:00Z"]),
        (["watch", "x", "--out", f"{__file__}/y"], ["cannot write to"]),
        (["sessions", "x", "--out", "y", "--driver-memory", "lots"], ["allowed is a size as Java has it"]),
        (["report", "x", "--out", "y"], ["unexpected extra argument"]),
        (["report", "--out", "y"], ["y has no results", "flowctl analyze all EVENTS --out y"]),
    ],
)
def test_command_when_used_wrongly_says_so_before_java_is_started(monkeypatch, capsys, words, told):
    pytest.importorskip("pyspark")
    monkeypatch.setattr("flowctl.analyze.spark.session.session", lambda _: pytest.fail("Java is started"))
    assert main(["analyze", *words]) == 2
    errors = capsys.readouterr().err
    assert [item for item in told if item not in errors] == []


def test_run_when_shown_to_people_says_each_answer_in_a_line_or_two(tmp_path, monkeypatch, capsys):
    from flowctl.analyze.records import listing

    listed = []
    monkeypatch.setattr(listing, "_tables", lambda *given, real=listing._tables: listed.append(given) or real(*given))
    write_closes(tmp_path / "ev", [close(20, 1), close(21, 2)])
    skipped = (word for job in ("experience", "fleet", "abuse", "whatif") for word in ("--skip", job))
    status = main(["analyze", "all", str(tmp_path / "ev"), "--out", str(tmp_path / "out"), *skipped])
    shown, errors = capsys.readouterr()
    assert (status, len(listed)) == (0, 1), errors
    lines = shown.splitlines()
    assert lines[0] == "sessions: 2 connections, 0 still open; none in trouble"
    assert lines[1] == f"capacity: {MEASURE}"
    assert lines[2:4] == [
        "report: what to do",
        "  Not known: the job whatif was not run. `flowctl analyze whatif` runs it.",
    ]
    assert "  flow_closes: 1 file, rows in 2 = out 2 + quarantined 0" in lines
    assert lines[-1] == f"report: {tmp_path / 'out' / 'report.html'}"
    assert "{" not in shown


def test_report_when_run_alone_reads_results_and_names_their_records(monkeypatch, tmp_path):
    pytest.importorskip("pyspark")
    monkeypatch.setattr("flowctl.analyze.spark.session.session", lambda _: pytest.fail("Java is started"))
    out = Path(run_in(tmp_path / "out"))
    (out / "record.json").write_text(json.dumps({"format": RECORD_FORMAT, "events": "/data/of-servers", "hours": {}}))
    assert main(["analyze", "report", "--out", str(out)]) == 0
    assert "Records of <code>/data/of-servers</code>" in (out / "report.html").read_text("utf-8")
    figures = json.loads((out / "summary.json").read_text("utf-8"))["jobs"]["report"]["summary"]["figures"]
    assert (figures["events"], figures["totals"]["viewers"]) == ("/data/of-servers", 400)


FELT = "Of 1 attempt 1 failed to start, 0 left before the first frame."
SHARES = (
    "The median viewer's first frame was ready to be sent 40 ms after its request. 95 % of viewers had at most 2.0 s "
    "of delay for half of their time. Of their pictures 98 % were sent."
)


@pytest.mark.parametrize(
    ("viewers", "shown"),
    [
        (0, f"0 viewers, 0 at once at most. {FELT} 0 cut for being slow."),
        (1, f"1 viewer, 1 at once at most. {FELT} 0 cut for being slow."),
        (19, f"19 viewers, 19 at once at most. {FELT} 0 cut for being slow."),
        (400, f"400 viewers, 400 at once at most. {FELT} {SHARES} 0 cut for being slow."),
    ],
)
def test_experience_when_said_tells_no_share_of_few_viewers(viewers, shown):
    summary = {"viewers": viewers, "peak_viewers": viewers, "attempts": 1, "start_failures": 1, "exits_before_start": 0}
    summary |= {"first_frame_p50_ms": 40.0, "delay_p95_ms": 2000.0, "picture_share": 0.98, "cut_slow": 0}
    note = JobNote("experience", JobState.DONE, summary=summary)
    result = run.AllResult(
        jobs={"experience": note}, outputs={}, accounts=(), hours=1, hours_read=1, window={}, warnings=(), errors={}
    )
    assert next(said.lines(result)) == f"experience: {shown}"


def test_whatif_when_said_without_a_choice_tells_why_alone():
    why = "what other limits would have done is not known: " + "record flights " * 12
    note = JobNote("whatif", JobState.DONE, summary={"viewers": 160, "viewers_cut": 0, "why": why})
    result = run.AllResult(
        jobs={"whatif": note}, outputs={}, accounts=(), hours=1, hours_read=1, window={}, warnings=(), errors={}
    )
    assert list(said.lines(result))[:2] == [f"whatif: {why.strip()}", "records of 1 hour, read now: 1"]


def test_answers_when_said_name_figures_that_jobs_have():
    assert set(said.ANSWERS) == set(run.JOBS) - {"capacity"}  # which words its own
    for name, words in said.ANSWERS.items():
        assert "{" not in fill_template(words, {}), name


@pytest.mark.parametrize("job", ["sessions", "all", "watch"])
def test_job_when_results_would_lie_among_the_records_is_wrong_use(tmp_path, job):
    pytest.importorskip("pyspark")
    (tmp_path / "events" / "flow_events").mkdir(parents=True)
    done = flowctl("analyze", job, tmp_path / "events", "--out", tmp_path / "events")
    assert done.returncode == 2
    assert "results would get among the records" in done.stderr
    assert "hint: name a folder beside" in done.stderr
    assert [path.name for path in (tmp_path / "events").rglob("*")] == ["flow_events"]


@pytest.mark.parametrize(
    ("events", "out", "fits"),
    [
        ("events", "./events/", False),
        ("events", "results/../events", False),
        ("events", "events/flow_samples/mine", False),
        ("s3a://bucket/events", "s3a://bucket/events/", False),
        ("s3a://bucket/events", "s3a://bucket/events/flight", False),
        ("events", "events/results", False),
        ("data/ingest", "data", False),
        ("data/parts", "data/", False),
        ("s3a://bucket/data/events", "s3a://bucket/data", False),
        ("events", "/", False),
        ("events", "events-results", True),
        ("s3a://bucket/events", "events", True),
    ],
)
def test_check_apart_when_folders_meet_is_an_error(monkeypatch, tmp_path, events, out, fits):
    pytest.importorskip("pyspark")
    monkeypatch.chdir(tmp_path)
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="lie in each other"):
        check_apart(events, out)


def test_command_when_pyspark_is_missing_says_what_to_install(tmp_path):
    code = (
        "import sys, importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *a: None if name == 'pyspark' else find(name, *a); "
        "from flowctl.cli import main; sys.exit(main(['analyze', 'sessions', 'x', '--out', 'y', '--engine', 'spark']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "the pipeline needs the extra 'pipeline': pyspark is not installed" in done.stderr
    assert "hint: in flowctl's source folder: pip install '.[pipeline]'" in done.stderr


def test_show_when_a_warning_has_line_breaks_is_one_line(capsys):
    nothing = {"jobs": {}, "outputs": {}, "accounts": [], "hours": 0, "hours_read": 0, "window": {}, "errors": {}}
    show(run.AllResult(warnings=["a file\nerror: \x1b[2Jforged"], **nothing), as_json=True)
    assert capsys.readouterr().err == "warning: a file error: \\u001b[2Jforged\n"
