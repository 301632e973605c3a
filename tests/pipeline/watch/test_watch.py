"""Watch on a real stream: the same bans as from the same records at once, restarts, late and bad input, clean ends.

What is about processes runs as processes, each with a Java of its own: a watch that is killed, and one that is told to
end. All else runs in the shared session.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from abuse_kit import closed, event, hits, write

from flowctl.pipeline.jobs.evidence import evidence
from flowctl.pipeline.jobs.weights import Weights
from flowctl.pipeline.tables.accounts import JobResult
from flowctl.pipeline.watch.job import run
from flowctl.pipeline.watch.rules import WatchOptions, behaving, candidates, to_ban, windowed
from flowctl.server.bans import BanList
from flowctl.telemetry.schema import METADATA_PREFIX

pytestmark = pytest.mark.timeout(900)
POINTS, THRESHOLD = Weights().points, Weights().threshold
PATIENCE_S = 400.0
"""A Java start and a batch take seconds; on a machine that is busy with everything else, minutes."""
FAST = ("--trigger", "500ms", "--window", "60s", "--watermark", "2min", "--max-files", "3")


@contextlib.contextmanager
def watching(events: Path, out: Path, *options: str):
    """Run ``flowctl analyze watch`` as a process of its own; it is gone at the end, with its Java, however it ended."""
    command = [sys.executable, "-m", "flowctl", "analyze", "watch", str(events), "--out", str(out), *options]
    command += ["--master", "local[2]", "--driver-memory", "512m", "--json"]
    out.mkdir(exist_ok=True)
    with (out / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        kill(process)


def kill(process):
    """Kill the process and its Java, as a power cut would."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def wait_for(condition: Callable[[], bool], what: str, ended: Callable[[], str | None]):
    """Wait until `condition` holds; `ended` says what became of the watch, once it is over."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if condition():
            return
        said = ended()
        assert said is None, f"it ended: {said}"
        time.sleep(0.1)
    raise AssertionError(f"no {what}")


def end_of(process, out: Path) -> Callable[[], str | None]:
    """Return what says how a process ended."""
    return lambda: None if process.poll() is None else (out / "log.txt").read_text()[-2000:]


@dataclasses.dataclass
class Watched:
    """A watch in the shared session, on a thread.

    Attributes:
        told: its lines for people.
        result: of it.
    """

    told: list[str]
    stop: threading.Event
    result: Future[JobResult]

    def ended(self) -> str | None:
        return str(self.result.exception() or "in order") if self.result.done() else None

    def end(self) -> JobResult:
        """End it in order."""
        self.stop.set()
        return self.result.result(PATIENCE_S)


@contextlib.contextmanager
def watching_here(spark, events: Path, out: Path, options: WatchOptions):
    """Run a watch in a session of its own on the shared Java; it has ended at the end."""
    out.mkdir(exist_ok=True)
    told, stop = [], threading.Event()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run, spark.newSession(), str(events), str(out), options, stop=stop, tell=told.append)
        try:
            yield Watched(told, stop, job)
        finally:
            stop.set()


def banned(out: Path) -> set[str]:
    path = out / "bans.jsonl"
    return {ban.cidr for ban in BanList.parse(path.read_text()).bans} if path.exists() else set()


def batches(out: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((out / "watch").glob("batch-*.json"))]


def rows_seen(out: Path) -> int:
    return sum(item["rows_in"] for item in batches(out))


def end(process) -> dict:
    """End it in order, and return its summary."""
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    return json.loads(text)


def crowd(begin_s: float, number: int) -> list[dict]:
    """Return events of the `number`-th ten seconds: abusers of several kinds, slow viewers, and a shared address."""
    at = begin_s + number * 10
    rows = [row for n in range(3) for row in hits(f"192.0.2.{n + 1}", "chunk_size_max_bytes", 1, at + n)]
    rows += hits("192.0.2.200", "amf_depth", 1, at) if number == 3 else []
    rows += [closed("198.51.100.1", "hard limit", at, trouble_s=9.0, trouble_sent_bytes=10**6) for _ in range(5)]
    rows += [closed("198.51.100.2", "peer closed", at, role="unknown", connected_s=0.5) for _ in range(40)]
    if number == 0:  # an hour ago, in no window of the evidence; later than the watermark in any batch but the first
        rows += [event("203.0.113.5", "play_started", at - 3600, role="play", conn_id=100)]
    return rows + hits("203.0.113.5", "amf_depth", 1, at)


def expected_bans(spark, rows_folder: Path) -> dict[str, float]:
    """Return who is banned, and the highest score, if all records are looked at at once."""
    options = WatchOptions()
    frame = spark.read.parquet(str(rows_folder / "flow_events"))
    found: dict[str, float] = {}
    now_us = int(time.time() * 1e6)
    enough = candidates(windowed(evidence(frame, options.weights), options), options, now_us)
    for row in to_ban(enough, behaving(frame, enough, options, now_us), options).collect():
        found[row["cidr"]] = max(found.get(row["cidr"], 0.0), row["score"])
    return found


def test_watch_when_killed_in_the_middle_and_restarted_loses_and_repeats_nothing(spark, tmp_path):
    """Killed with SIGKILL between files, it goes on: each file is in one batch, and the bans are those of one look."""
    events, out = tmp_path / "events", tmp_path / "out"
    begin = time.time() - 150
    for number in range(8):
        write(events, crowd(begin, number), f"node-1-1-{number}", begin)
    with watching(events, out, *FAST) as process:
        wait_for(lambda: len(batches(out)) >= 1, "first batch", end_of(process, out))
        kill(process)
    done = len(batches(out))
    for number in range(8, 12):
        write(events, crowd(begin, number), f"node-1-1-{number}", begin)
    rows = sum(len(crowd(begin, number)) for number in range(12))
    with watching(events, out, *FAST) as process:
        wait_for(lambda: rows_seen(out) >= rows, "all rows", end_of(process, out))
        summary = end(process)
    assert len(batches(out)) > done
    assert sum(item["files"] for item in batches(out)) == 12
    [account] = summary["accounts"]
    assert (account["rows_in"], account["rows_out"], account["rows_quarantined"]) == (rows, rows, 0)
    assert summary["summary"]["late"] == 0
    expected = expected_bans(spark, events)
    assert {"192.0.2.1/32", "192.0.2.200/32", "198.51.100.2/32"} <= set(expected)
    assert banned(out) == set(expected)
    listed = BanList.parse((out / "bans.jsonl").read_text()).bans
    for ban in listed:  # the later a batch is, the more its evidence has aged, and the more standing there is
        assert ban.score == pytest.approx(expected[ban.cidr], rel=0.25)
    actions = {ban.cidr.partition("/")[0]: ban.action.value for ban in listed}
    assert (actions["192.0.2.200"], actions["198.51.100.2"], actions["203.0.113.5"]) == ("ban", "limit", "limit")


def test_watch_when_input_is_late_or_bad_counts_it_and_goes_on(spark, tmp_path):
    """Late evidence counts within the watermark and not beyond; damaged files and rows are named and counted."""
    events, out = tmp_path / "events", tmp_path / "out"
    now = time.time()
    write(events, hits("192.0.2.1", "amf_depth", 1, now), "node-1-1-1", now)
    options = WatchOptions(trigger_s=0.5, window_s=60.0, watermark_s=120.0, most_files=2)
    with watching_here(spark, events, out, options) as watch:

        def wait(condition, what):
            wait_for(condition, what, watch.ended)

        wait(lambda: "192.0.2.1/32" in banned(out), "first ban")
        late = [*hits("192.0.2.2", "amf_depth", 1, now - 60), *hits("192.0.2.3", "amf_depth", 1, now - 3000)]
        # The watermark moves with a batch and holds from the next one on.
        for number in (2, 3):
            write(events, [event("192.0.2.9", "conn_opened", now)], f"node-1-1-{number}", now)
            wait(lambda number=number: rows_seen(out) >= number, "row")
        write(events, late, "node-1-1-4", now)
        wait(lambda: "192.0.2.2/32" in banned(out), "ban of the late one")
        good = write(events, hits("192.0.2.4", "amf_depth", 1, now), "node-1-1-5", now)
        wait(lambda: "192.0.2.4/32" in banned(out), "ban")
        (good.parent / ".torn.tmp").write_bytes(good.read_bytes()[:-100])
        (good.parent / ".torn.tmp").rename(good.parent / "torn.parquet")
        write(events, [event("192.0.2.6", "nonsense", now), *hits("192.0.2.7", "amf_depth", 1, now + 999)], "bad", now)
        write(events, hits("192.0.2.5", "amf_depth", 1, now), "node-1-1-6", now)
        wait(lambda: "192.0.2.5/32" in banned(out), "ban after the damaged file")
        wait(lambda: rows_seen(out) >= 9, "last row")
        result = watch.end()
    assert banned(out) == {f"192.0.2.{n}/32" for n in (1, 2, 4, 5)}
    [account] = result.as_dict()["accounts"]
    assert (account["files_in"], account["files_quarantined"]) == (8, 1)
    assert (account["rows_in"], account["rows_quarantined"]) == (9, 2)
    assert account["by_reason"] == {"event: unknown word": 1, "ts: ahead of the watcher's clock": 1}
    assert result.summary["late"] > 0
    said = "\n".join(watch.told)
    assert "torn.parquet" in said
    assert "Traceback" not in said
    quarantined = spark.read.parquet(str(out / "quarantine" / "flow_events_watch")).collect()
    assert {row["reason"] for row in quarantined} == set(account["by_reason"])


def marked(path: Path, **words: str) -> Path:
    """Write what a recorder says of a file into its metadata."""
    table = pq.read_table(path)
    told = {f"{METADATA_PREFIX}{name}": value for name, value in words.items()}
    pq.write_table(table.replace_schema_metadata(told), path.with_name(".marked"), compression="zstd")
    path.with_name(".marked").rename(path)
    return path


def test_watch_when_files_are_copied_or_foreign_bans_nobody_for_them(analyze, tmp_path):
    """Evidence counts once however often its file comes, in one batch or later; that of quarantined files never.

    With --once it works off what is there and ends with 0; where there is nothing new, it finds nothing.
    """
    events, out = tmp_path / "events", tmp_path / "out"
    now = time.time()
    half = hits("192.0.2.1", "chunk_size_max_bytes", 1, now)
    assert THRESHOLD / 2 < POINTS["limit_hit.chunk_size_max_bytes"] < THRESHOLD
    first = marked(write(events, half, "node-1-1-1", now), uid="one")
    for number in (2, 3):
        shutil.copy(first, first.with_name(f"copy-{number}.parquet"))
    marked(write(events, hits("192.0.2.2", "amf_depth", 1, now), "node-1-1-2", now), uid="two", format="99")
    marked(write(events, hits("192.0.2.3", "amf_depth", 1, now), "node-1-1-3", now), uid="three", table="flow_samples")
    write(events, hits("192.0.2.4", "amf_depth", 1, now), "node-1-1-4", now)
    others = '{"cidr": "203.0.113.1/32", "expires": null}\n'
    out.mkdir()
    (out / "bans.jsonl").write_text(others)

    def look():
        status, text, errors = analyze("watch", events, "--out", out, "--once", "--allow", "198.51.100.0/24", "--json")
        assert (status, "Traceback" in errors) == (0, False), errors
        [account] = json.loads(text)["accounts"]
        return account

    for copies in (2, 3):
        account = look()
        assert banned(out) == {"192.0.2.4/32", "203.0.113.1/32"}
        assert account["files_by_reason"] == {"copy": copies, "newer format": 1, "of another table": 1}
        assert account["rows_out"] == 2
        assert look() == account
        shutil.copy(first, first.with_name(f"later-{copies}.parquet"))  # in a batch and a run of its own
    # The state is not damaged either: one more piece of the address's own evidence bans it.
    write(events, half[:1], "node-1-1-5", now)
    look()
    assert "192.0.2.1/32" in banned(out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--once"], "has no flow_events"),
        (["--trigger", "0s"], "--trigger"),
        (["--window", "2"], "--window"),
        (["--allow", "everybody"], "--allow"),
    ],
)
def test_watch_when_used_wrongly_says_so_in_one_line(analyze, tmp_path, options, words):
    """Wrong use ends with 2 and an error that names it, without a stack trace."""
    given = ["--window", "0.5"] if options[0] == "--window" else options
    (tmp_path / "events").mkdir()
    status, _, errors = analyze("watch", tmp_path / "events", "--out", tmp_path / "out", *given)
    assert (status, words in errors, "Traceback" in errors) == (2, True, False)
