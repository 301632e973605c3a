"""Watch on a real stream: the same bans as from the same records at once, restarts, late and bad input, clean ends.

What is about processes runs as a process with a Java of its own: a watch that is killed. All else runs in the shared
session.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from abuse_records import at, closed, event, hits, there, write
from test_abuse import WORLD

from flowctl.analyze.abuse import watch as watching
from flowctl.analyze.abuse.job import JOB
from flowctl.analyze.abuse.watch import merge_into
from flowctl.analyze.abuse.weights import Weights
from flowctl.analyze.options import AbuseOptions, WatchOptions
from flowctl.analyze.record import RECORD_FORMAT
from flowctl.analyze.records.place import RecordPlace
from flowctl.analyze.run import locked
from flowctl.analyze.run import run as run_jobs
from flowctl.core.server.bans import Ban, BanList, render
from flowctl.errors import ConfigError, FlowctlError

pytestmark = pytest.mark.timeout(900)
PATIENCE_S = 400.0
"""A Java start and a batch take seconds; on a machine that is busy with everything else, minutes."""


def banned(out: Path) -> dict[str, str]:
    path = out / "bans.jsonl"
    return {ban.cidr: ban.action.value for ban in BanList.parse(path.read_text()).bans} if path.exists() else {}


def wait_for(condition, what):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"no {what}"
        time.sleep(0.1)


@pytest.fixture
def look(spark, tmp_path):
    """Give a function that works off what is there, in a session of its own, -> summary, what was told."""

    def once(**options):
        values = WatchOptions(**{"once": True} | options)
        told: list[str] = []
        note = watching.run(
            spark.newSession(), str(tmp_path / "events [1]"), str(tmp_path / "out"), values, tell=told.append
        )
        return note.summary, "\n".join(told)

    return once


def test_watch_when_all_records_are_there_bans_whom_abuse_bans(spark, look, tmp_path):
    now = time.time()
    rows = [row for _, _, make in WORLD.values() for row in make_now(make, now)]
    write(tmp_path / "events [1]", rows)
    options = AbuseOptions(now_s=now)
    run_jobs(spark, str(tmp_path / "events [1]"), str(tmp_path / "job"), [JOB], {"abuse": options})
    look()
    expected = banned(tmp_path / "job")
    assert len(expected) >= 20
    assert banned(tmp_path / "out") == expected


def make_now(make, now):
    from test_abuse import NOW_S

    address = next(address for _, address, other in WORLD.values() if other is make)
    for table, columns in make(address):
        shift = at(now) - at(NOW_S)
        yield table, {key: value + shift if key in ("ts", "opened_at") else value for key, value in columns.items()}


def test_watch_when_input_is_late_bad_or_copied_counts_it_and_goes_on(look, tmp_path):
    """Evidence counts once however often its file comes, in one batch or later; that of unusable files never.

    Late evidence counts within the watermark and not beyond, that of a server whose clock is ahead as of now. Each look
    goes on where the one before ended.
    """
    events, out, now = tmp_path / "events [1]", tmp_path / "out", time.time()
    assert 5 < Weights().of("limit_hit.pending_output_bytes") < Weights().threshold
    half = hits("192.0.2.1", "pending_output_bytes", 1, now)
    [first] = write(events, half, "node-1-1-1")
    for number in (2, 3):
        shutil.copy(first, first.with_name(f"copy-{number}.parquet"))
    write(events, hits("192.0.2.2", "amf_depth", 1, now), "newer", format="99")
    write(events, hits("192.0.2.3", "amf_depth", 1, now), "other", table="flow_samples")
    write(events, [*hits("192.0.2.4", "amf_depth", 1, now), *hits("192.0.2.7", "amf_depth", 1, now + 999)], "good")
    first.with_name("torn.parquet").write_bytes(first.read_bytes()[:-100])
    first.with_name("empty.parquet").write_bytes(b"")
    first.with_name(".hidden.parquet").write_bytes(b"")
    least = pq.read_table(first)
    moment = pa.array([-(2**63)] * len(least)).cast(least.schema.field("ts").type)
    least = least.set_column(least.schema.get_field_index("ts"), least.schema.field("ts"), moment)
    words = least.schema.metadata | {b"flowctl.uid": b"least"}
    pq.write_table(least.replace_schema_metadata(words), first.with_name("least.parquet"))
    odd = [{"ts": "today", "node": "node-1", "seq": "x", "peer_ip": "192.0.2.9", "event": "limit_hit"}]
    pq.write_table(pa.Table.from_pylist(odd), first.with_name("types.parquet"))
    out.mkdir()
    (out / "bans.jsonl").write_text(render([Ban(cidr="203.0.113.1/32", expires=None)]))
    summary, _ = look()
    known = {"192.0.2.4/32", "192.0.2.7/32", "203.0.113.1/32"}
    assert set(banned(out)) == known
    [account] = (item for item in summary["accounts"] if item["table"] == "flow_events")
    assert account["files_by_reason"] == {
        "copy": 2,
        "other format": 1,
        "of another table": 1,
        "not Parquet or damaged": 1,
        "empty file": 1,
        "foreign schema": 1,
    }
    assert account["rows_out"] == 3
    shutil.copy(first, first.with_name("later.parquet"))  # in a batch and a run of its own
    look()
    assert set(banned(out)) == known
    late = [*hits("192.0.2.5", "amf_depth", 1, now - 30), *hits("192.0.2.6", "amf_depth", 1, now - 3000)]
    write(events, [*late, *hits("192.0.2.1", "pending_output_bytes", 1, now)], "node-1-1-5")
    summary, _ = look()
    assert set(banned(out)) == known | {"192.0.2.1/32", "192.0.2.5/32"}
    assert summary["late"] == 2, "one record, in two windows"
    summary, _ = look()
    assert (summary["batches"], summary["judgements"]) == (0, 0)


def test_watch_when_the_judge_cannot_use_the_records_goes_on(look, tmp_path):
    events, now = tmp_path / "events [1]", time.time()
    [path] = write(events, hits("192.0.2.1", "amf_depth", 9, now))
    path.rename(events / "flow_events" / "moved.parquet")
    summary, told = look()
    assert f"warning: nobody is banned for this alarm: {events} has no records in the window" in told
    assert (summary["batches"], summary["judgements"], banned(tmp_path / "out")) == (1, 0, {})
    write(events, hits("192.0.2.2", "amf_depth", 9, now - 27 * 3600), "old")
    summary, told = look()
    assert "warning" not in told
    assert (summary["batches"], banned(tmp_path / "out")) == (1, {})
    write(events, hits("192.0.2.3", "amf_depth", 9, now), "good")
    look()
    assert banned(tmp_path / "out") == {"192.0.2.3/32": "ban"}


def test_watch_when_the_judge_cannot_work_tries_the_alarm_again(spark, look, tmp_path, monkeypatch):
    events, out, stop, told, tries = tmp_path / "events [1]", tmp_path / "out", threading.Event(), [], []
    write(events, hits("192.0.2.1", "amf_depth", 1, time.time()))

    def tried(*values):
        tries.append(values)
        return run_jobs(*values)

    monkeypatch.setattr(watching, "run_jobs", tried)
    options = WatchOptions(trigger_s=0.2)
    args = (spark.newSession(), str(events), str(out), options)
    judge = RecordPlace(str(out / "_watch"))
    record = out / "_watch" / "record.json"
    with locked(judge):
        with pytest.raises(ConfigError, match="another run is at work"):
            look()
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(watching.run, *args, stop=stop, tell=told.append)
            try:
                wait_for(lambda: len(tries) > 3 or job.done(), "second try")
                assert [line for line in told if "another run is at work" in line] == told
                assert len(told) == 1
            finally:
                stop.set()
            assert job.result(PATIENCE_S).summary["judgements"] == 0
    assert banned(out) == {}
    record.write_text(json.dumps({"format": RECORD_FORMAT, "events": "/elsewhere", "pending": {}, "hours": {}}))
    told.clear()
    stop.clear()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(watching.run, *args, stop=stop, tell=told.append)
        try:
            wait_for(lambda: told or job.done(), "word of the other records")
            assert "has the results of other records" in told[0]
            record.unlink()
            wait_for(lambda: banned(out) or job.done(), "ban")
        finally:
            stop.set()
        assert job.result(PATIENCE_S).summary["judgements"] == 1
    assert banned(out) == {"192.0.2.1/32": "ban"}


def test_watch_when_it_ends_around_the_list_counts_the_batch_once(look, tmp_path, monkeypatch):
    events, out, now = tmp_path / "events [1]", tmp_path / "out", time.time()
    write(events, hits("192.0.2.1", "amf_depth", 1, now) + hits("192.0.2.2", "pending_output_bytes", 1, now))

    def broken(place, bans, judge, *, written, **more):
        if written or not bans:
            merge_into(place, bans, judge, **more)
        if bans:
            raise FlowctlError("a power cut")

    for written, listed in ((False, {}), (True, {"192.0.2.1/32": "ban"})):
        with monkeypatch.context() as patch:
            patch.setattr(watching, "merge_into", functools.partial(broken, written=written))
            with pytest.raises(FlowctlError, match="a power cut"):
                look()
        assert banned(out) == listed
    write(events, hits("198.51.100.1", "amf_depth", 1, now), "node-1-1-2")
    summary, _ = look()
    assert banned(out) == {"192.0.2.1/32": "ban", "198.51.100.1/32": "ban"}, "half of what is enough was counted once"
    assert summary["batches"] == 2


def test_watch_when_records_come_bans_within_a_trigger_and_ends_in_order(spark, tmp_path):
    events, out, stop, told = tmp_path / "events [1]", tmp_path / "out", threading.Event(), []
    options = WatchOptions(trigger_s=0.5)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(watching.run, spark.newSession(), str(events), str(out), options, stop=stop, tell=told.append)
        try:
            wait_for(lambda: told or job.done(), "word that it waits")
            assert told == [f"{events} has no flow_closes and no flow_events yet: waiting for them"]
            now = time.time()
            write(events, [*there("192.0.2.2", now - 300, now, conn_id=7), event(None, "server_started", now - 999)])
            write(events, [closed("192.0.2.9", "peer closed", now)], "node-1-1-2")
            wait_for(lambda: len(told) > 1 or job.done(), "batch")
            number = len(told)
            write(events, hits("192.0.2.1", "amf_depth", 1, now) + hits("192.0.2.2", "amf_depth", 1, now), "node-1-1-3")
            wait_for(lambda: len(told) > number or job.done(), "batch")
            assert banned(out) == {"192.0.2.1/32": "ban", "192.0.2.2/32": "limit"}
        finally:
            stop.set()
        assert job.result(PATIENCE_S).summary["bans"] == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_watch_when_ended_in_the_middle_and_restarted_loses_and_repeats_nothing(look, tmp_path, number):
    events, out, now = tmp_path / "events [1]", tmp_path / "out", time.time()
    for n in range(4):
        rows = hits(f"192.0.2.{n}", "amf_depth", 1, now) + hits("198.51.100.1", "unpublished_bytes", 3, now)
        rows += hits(f"198.51.100.{2 + n // 2}", "pending_output_bytes", 1, now)
        write(events, rows, f"node-1-1-{n}")
    command = [sys.executable, "-m", "flowctl", "analyze", "watch", str(events), "--out", str(out), "--max-files", "2"]
    command += ["--trigger", "100ms", "--master", "local[2]", "--driver-memory", "512m"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        wait_for(lambda: banned(out) or process.poll() is not None, "ban")
        os.killpg(process.pid, number)
        told, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if number == signal.SIGTERM:
        assert process.returncode == 0, errors
        assert re.fullmatch(rf"watch: .* alarms judged, .* [1-9]\d* bans and limits of it in {out}/bans.jsonl\n", told)
        assert "tasks 0 of 0" not in errors
        assert not re.search("Traceback|error:", errors), errors
    else:
        assert process.returncode == -number, errors
    look()
    expected = {f"192.0.2.{n}/32": "ban" for n in range(4)} | {f"198.51.100.{n}/32": "ban" for n in (2, 3)}
    assert banned(out) == expected | {"198.51.100.1/32": "limit"}


def test_watch_when_there_is_nothing_to_read_says_so(look, tmp_path):
    (tmp_path / "events [1]").mkdir()
    with pytest.raises(ConfigError, match="has no flow_closes") as caught:
        look()
    assert "--events" in caught.value.hint
