"""What a run makes of files that can be read only now, of parts that somebody removed, and of odd folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

pytest.importorskip("pyspark")

import pyarrow.parquet as pq
from pyspark.sql import functions as f
from record_kit import event, write

from flowctl.analyze import run as runner
from flowctl.analyze.job import AnalysisJob, JobAnswer, JobPart
from flowctl.analyze.records import footers, read
from flowctl.analyze.records.place import Storage
from flowctl.analyze.run import run
from flowctl.errors import ConfigError
from flowctl.records.telemetry.schema import FLOW_EVENTS

pytestmark = pytest.mark.timeout(600)  # Spark on a busy machine takes its time
COLUMNS = {"ts": "timestamp", "node": "string", "conn_id": "bigint", "event": "string"}
SEEN = JobPart(
    "seen", COLUMNS, lambda records, _: records.table("flow_events").select(*COLUMNS, "date", "hour"), ("flow_events",)
)
JOB = AnalysisJob(
    name="seen",
    parts=(SEEN,),
    results=(),
    answer=lambda parts, _: JobAnswer(summary={"rows": parts.table("seen").agg(f.count("*")).first()[0]}),
)


@pytest.fixture
def go(spark, tmp_path):
    def call():
        result = run(spark, str(tmp_path / "events"), str(tmp_path / "out"), [JOB])
        assert result.failed == [], result.errors
        return result.jobs["seen"].summary["rows"], sum(item["files_quarantined"] for item in result.accounts)

    return call


def test_run_when_a_file_cannot_be_opened_reads_it_as_soon_as_it_can(go, tmp_path, monkeypatch):
    write(tmp_path / "events", [event(1, 1, "returned")], "a")
    write(tmp_path / "events", [event(2, 1, "returned")], "b")

    def refused(system, path, *others, **options):
        facts = footers.facts_of(system, path, *others, **options)
        return footers.Facts(path, footers.UNREADABLE, "Permission denied") if path.endswith("b.parquet") else facts

    with monkeypatch.context() as patch:
        patch.setattr(read, "facts_of", refused)
        assert [go(), go()] == [(1, 1), (1, 1)]
    assert [go(), go()] == [(2, 0), (2, 0)]


def test_run_when_an_octet_of_a_file_is_another_puts_it_aside(go, tmp_path):
    write(tmp_path / "events", [event(1, 1, "returned")], "a")
    rows = [event(2 + number / 100, 10**6 + number**3, "returned") for number in range(300)]
    path = write(tmp_path / "events", rows, "b")
    whole, column = path.read_bytes(), pq.read_metadata(path).row_group(0).column(FLOW_EVENTS.names.index("conn_id"))

    def other(number):
        at = column.data_page_offset + column.total_compressed_size - 1 - number
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            return pq.read_table(path)["conn_id"].to_pylist()
        except (OSError, ValueError):
            return None

    first = pq.read_table(path)["conn_id"].to_pylist()
    silent = next(number for number in range(column.total_compressed_size) if other(number) not in (None, first))
    assert other(silent) != first
    assert go() == (1, 1)
    path.write_bytes(whole)
    os.utime(path, (time.time() + 5,) * 2)
    assert go() == (301, 0)


def test_run_when_a_damaged_file_is_restored_with_its_size_reads_it(go, tmp_path):
    write(tmp_path / "events", [event(1, 1, "returned")], "a")
    second = write(tmp_path / "events", [event(2, 1, "returned")], "b")
    whole = second.read_bytes()
    second.write_bytes(bytes(len(whole)))
    assert go() == (1, 1)
    second.write_bytes(whole)
    os.utime(second, (time.time() + 5,) * 2)
    assert go() == (2, 0)


def test_run_when_checks_are_others_makes_its_hours_anew(go, tmp_path, monkeypatch):
    write(tmp_path / "events", [event(1, 1, "returned"), event(2, 1, "unheard_of")])
    assert go() == (1, 0)
    monkeypatch.setattr(runner, "_checks", lambda: "others")
    monkeypatch.setattr(read, "checks_of", lambda *_: ())
    monkeypatch.setattr(footers, "checks_of", lambda *_: ())
    assert go() == (2, 0)


def test_run_when_checks_are_others_and_records_gone_keeps_what_it_knows(spark, tmp_path, monkeypatch):
    """What is gone cannot be checked again: no run starts Spark for it, nor says that its parts are missing."""
    write(tmp_path / "events", [event(1, 1, "returned"), event(2, 1, "unheard_of")], "a")
    second = write(tmp_path / "events", [event(3, 1, "returned")], "b")
    run(spark, str(tmp_path / "events"), str(tmp_path / "out"), [JOB])
    second.unlink()
    monkeypatch.setattr(runner, "_checks", lambda: "others")
    for _ in range(2):
        result = run(lambda: pytest.fail("Spark"), str(tmp_path / "events"), str(tmp_path / "out"), [JOB])
        assert (result.jobs["seen"].summary, [*result.jobs["seen"].warnings]) == ({"rows": 2}, [])


def test_run_when_a_copy_lies_in_the_folder_of_another_hour_reads_the_true_file(go, tmp_path):
    true = write(tmp_path / "events", [event(3601, 1, "returned")], hour="13")
    astray = tmp_path / "events" / "flow_events" / "date=2026-03-01" / "hour=12" / "a.parquet"
    astray.parent.mkdir(parents=True)
    shutil.copy(true, astray)
    assert go()[0] == 1


def test_run_when_a_copy_astray_was_read_before_reads_the_true_file(go, tmp_path):
    true = write(tmp_path / "events", [event(3601, 1, "returned")], hour="13")
    kept = true.rename(tmp_path / "kept")
    write(tmp_path / "events", [event(1, 1, "returned")])
    astray = tmp_path / "events" / "flow_events" / "date=2026-03-01" / "hour=12" / "b.parquet"
    shutil.copy(kept, astray)
    assert go()[0] == 1
    shutil.copy(kept, true)
    assert go()[0] == 2


@pytest.mark.parametrize("records", [True, False], ids=["records", "none"])
def test_run_when_somebody_removes_an_hour_of_results_makes_it_again_or_says_so(spark, tmp_path, records):
    first = write(tmp_path / "events", [event(1, 1, "returned")])
    write(tmp_path / "events", [event(3601, 1, "returned")], hour="13")
    out = tmp_path / "out"
    run(spark, str(tmp_path / "events"), str(out), [JOB])
    shutil.rmtree(out / "parts" / "seen" / "date=2026-03-01" / "hour=12")
    if not records:
        first.unlink()
    note = run(spark, str(tmp_path / "events"), str(out), [JOB]).jobs["seen"]
    assert note.summary == {"rows": 2 if records else 1}
    assert [line.startswith("seen is missing") for line in note.warnings] == ([] if records else [True])


@pytest.mark.parametrize("text", ['{"format": 2, "jobs": []}', '{"format": 2, "jobs": {"seen": {"unheard": 1}}}'])
def test_run_when_the_summary_is_odd_does_without_it(go, tmp_path, text):
    write(tmp_path / "events", [event(1, 1, "returned")])
    go()
    (tmp_path / "out" / "summary.json").write_text(text)
    assert go() == (1, 0)
    assert list(json.loads((tmp_path / "out" / "summary.json").read_text())["jobs"]) == ["seen"]


@pytest.mark.parametrize("spoil", ["listed", "parts"])
def test_record_when_its_hours_are_of_another_shape_is_damaged(go, tmp_path, spoil):
    write(tmp_path / "events", [event(1, 1, "returned")])
    go()
    path = tmp_path / "out" / "record.json"
    found = json.loads(path.read_text())
    if spoil == "listed":
        found["hours"]["2026-03-01 12"]["unheard_of"] = ""
    else:
        found["hours"]["2026-03-01 12"]["parts"] = []
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match="is damaged, or of another version"):
        go()


def test_storage_when_a_name_is_not_text_leaves_it_out_or_names_it(tmp_path):
    """What is no data is passed over; data cannot be, for then nobody would know that it is not counted."""
    folder = os.fsencode(tmp_path)
    os.close(os.open(folder + b"/\xff.txt", os.O_CREAT))
    assert list(Storage.of(str(tmp_path)).walk("")) == []
    os.close(os.open(folder + b"/\xff.parquet", os.O_CREAT))
    with pytest.raises(ConfigError, match="no name in UTF-8"):
        list(Storage.of(str(tmp_path)).walk(""))


def test_answers_when_a_signal_ends_one_do_not_hold_the_process():
    script = (
        "import time\n"
        "from flowctl.analyze.run import _each\n"
        "def end(_):\n"
        "    raise SystemExit(3)\n"
        "_each(['soon', 'late'], lambda name: name == 'late' and time.sleep(100), end)\n"
    )
    begun = time.monotonic()
    assert subprocess.run([sys.executable, "-c", script], timeout=90, check=False).returncode == 3
    assert time.monotonic() - begun < 60
