"""Worker processes: what they run, wherever they are started."""

from __future__ import annotations

import queue
import time

import pytest

from flowctl.load.plan import LoadPlan
from flowctl.load.process import WorkerProcess
from flowctl.load.worker import Orders

pytestmark = pytest.mark.realtime

HIJACKED = "import pathlib; pathlib.Path('hijacked').touch(); raise SystemExit('a file of this folder was run')"


def nobody():
    url = "rtmp://127.0.0.1:9/live/room"
    return Orders(
        role="viewers", family=2, address=["127.0.0.1", 9], urls=[url], queries=[], peers=[], plan=LoadPlan(url=url)
    )


def listen_until(worker, inbox, wanted):
    end = time.monotonic() + 30
    while not wanted() and time.monotonic() < end:
        worker.note_message(inbox.get(timeout=30)[1])


def test_worker_when_told_to_stop_before_it_listens_ends_in_order():
    inbox = queue.Queue()
    worker = WorkerProcess(nobody(), inbox)
    try:
        worker.tell({"stop": 0.0})
        listen_until(worker, inbox, lambda: worker.over)
        assert (worker.ready, worker.died, worker.done is None) == (True, False, False), worker.last_words()
    finally:
        worker.close()


@pytest.mark.parametrize("name", ["queue", "json", "flowctl"])
def test_worker_when_the_folder_has_modules_of_its_own_runs_none_of_them(tmp_path, monkeypatch, name):
    (tmp_path / f"{name}.py").write_text(HIJACKED)
    monkeypatch.chdir(tmp_path)
    inbox = queue.Queue()
    worker = WorkerProcess(nobody(), inbox)
    try:
        listen_until(worker, inbox, lambda: worker.ready or worker.over)
        assert (worker.ready, worker.died) == (True, False), worker.last_words()
    finally:
        worker.close()
    assert not (tmp_path / "hijacked").exists()
