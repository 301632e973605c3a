"""The recorder: queues that never make anybody wait, losses that are told, and counters that agree with the files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from telemetry_kit import WALL_NS, everything, files, options, queued, read, recorder

from flowctl.records.telemetry.recorder import Feed, Lane, Recorder, WallClock
from flowctl.records.telemetry.schema import FLIGHT, FLOW_EVENTS, RECORDED, EventName

START_US = WALL_NS // 1000


def row(number=0, event=EventName.LIMIT_HIT, **values):
    return FLOW_EVENTS.row(ts=START_US + number, conn_id=0, event=event.value, **values)


def test_lane_when_full_refuses_counts_and_never_waits():
    lane = Lane(FLOW_EVENTS, 100)
    assert [lane.put((number,)) for number in range(103)] == [True] * 100 + [False] * 3
    assert (lane.waiting, lane.lost) == (100, 3)
    rows, blocks = lane.drain()
    assert rows == [(number,) for number in range(100)]
    assert blocks == []
    assert lane.put((0,))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 40), st.just(0)), max_size=60))
def test_lane_when_filled_and_drained_in_any_order_conserves_records(steps):
    lane = Lane(FLOW_EVENTS, 50)
    put = taken = 0
    for count in steps:
        for _ in range(count):
            lane.put((put,))
            put += 1
        if not count:
            taken += len(lane.drain()[0])
    assert put == taken + lane.waiting + lane.lost


def test_lane_when_several_threads_put_loses_none():
    lane = Lane(FLOW_EVENTS, 10_000)

    def fill(name):
        for number in range(1000):
            lane.put((name, number))

    threads = [threading.Thread(target=fill, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows, _ = lane.drain()
    assert len(rows) == 4000
    for name in range(4):
        assert [number for owner, number in rows if owner == name] == list(range(1000))


def test_losses_when_told_are_an_event_that_counts_them_once(tmp_path):
    made = recorder(tmp_path, queue_rows=100)
    lane = made.lane(FLOW_EVENTS)
    for number in range(107):
        lane.put(row(number))
    made.turn()
    made._drain()
    made._end()
    overflows = [item for item in read(tmp_path) if item["event"] == "overflow"]
    assert [item["value"] for item in overflows] == [7.0]
    assert '"flow_events"' in overflows[0]["detail"]
    assert made.statistics().lost_rows == 7


def test_clock_when_the_wall_clock_is_set_is_followed():
    wall, mono = [WALL_NS], [100.0]
    clock = WallClock(lambda: mono[0], lambda: wall[0])
    assert clock.us(100.0) == START_US
    assert clock.us(100.25) == START_US + 250_000
    wall[0] += 10_000_000
    assert clock.compare() == 0
    wall[0] += 5_000_000_000
    assert clock.compare() == 5_010_000
    assert clock.us(100.0) == START_US + 5_010_000


def test_feed_when_it_counts_agrees_with_the_files(tmp_path):
    made = recorder(tmp_path)
    lane = made.lane(FLOW_EVENTS)
    lane.put(row(0, EventName.LIMIT_HIT, axis="chunk_streams"))
    lane.put(row(1, EventName.LIMIT_HIT, axis="chunk_streams"))
    lane.put(row(2, EventName.CONN_CLOSED, reason="hard limit"))
    lane.put(row(3, EventName.CONN_REFUSED, reason="banned", count=40))
    lane.put(row(4, EventName.DROPPED, detail='{"dropped": {"thinned from the queue": {"inter": 5, "key": 1}}}'))
    lane.put(row(5, EventName.STATE_CHANGED, state_to="SOFT_LIMIT"))
    made.turn()
    made._end()
    found = made.feed.snapshot()
    written = Counter(item["event"] for item in read(tmp_path))
    assert found.events == {**written, "conn_closed": 1}
    assert set(written) <= RECORDED
    assert found.limit_hits == {"chunk_streams": 2}


def test_feed_when_names_have_no_end_counts_within_bounds():
    feed = Feed()
    feed.count_rows([row(0, EventName.LIMIT_HIT, axis=f"limit-{number}") for number in range(3000)])
    hits = feed.snapshot().limit_hits
    assert len(hits) <= 1025
    assert sum(hits.values()) == 3000


def test_recorder_when_stopped_has_written_everything(tmp_path):
    made = Recorder(options(tmp_path))
    made.start()
    for number in range(5):
        made.lane(FLOW_EVENTS).put(row(number))
    assert made.stop(20.0)
    assert made.stop(20.0)
    assert len(read(tmp_path)) == 5
    books = made.statistics().books["flow_events"]
    assert (books.files, books.written_rows, books.waiting_rows) == (1, 5, 0)


def test_recorder_when_flights_are_written_counts_their_time_apart(tmp_path):
    made = recorder(tmp_path)
    known = {"ts": START_US, "conn_id": 1, "offset_us": 0, "kind": "tick", "number": 0}
    flight = tuple(known.get(column.name) for column in FLIGHT.columns if column.name not in {"node", "seq"})
    shares = {}
    for table, record in ((FLOW_EVENTS, row(0)), (FLIGHT, flight)):
        for _ in range(20_000):
            made.lane(table).put(record)
        used, before = time.thread_time(), made.flight_cpu_s
        made.turn()
        shares[table.name] = (made.flight_cpu_s - before) / (time.thread_time() - used)
    assert shares["flow_events"] < 0.2
    assert shares["flight"] > 0.5


def test_recorder_when_a_step_fails_goes_on(tmp_path, monkeypatch):
    made = recorder(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(made.feed, "count_rows", lambda rows: 1 / 0)
        made.lane(FLOW_EVENTS).put(row(0))
        made.turn()
    with monkeypatch.context() as patched:
        patched.setattr(made._writers["flow_events"], "add_rows", lambda *_: 1 / 0)
        made.lane(FLOW_EVENTS).put(row(1))
        made.lane(FLOW_EVENTS).put(row(2))
        made.turn()
    made.lane(FLOW_EVENTS).put(row(3))
    made.turn()
    made._end()
    found = made.statistics()
    times = [int(item["ts"].timestamp() * 1e6) for item in read(tmp_path) if item["event"] == "limit_hit"]
    assert times == [START_US, START_US + 3]
    assert (found.unfed_rows, found.broken["flow_events"], found.lost_rows) == (1, 2, 2)
    assert [item["value"] for item in read(tmp_path) if item["event"] == "overflow"] == [2.0]
    assert sum(made.feed.snapshot().events.values()) + found.unfed_rows == len(read(tmp_path))
    assert queued(made) == []


def test_steps_when_asked_for_are_done_once_a_second_and_may_fail(tmp_path):
    made = recorder(tmp_path)
    made.each_second(lambda: 1 / 0)
    made.each_second(lambda: made.lane(FLOW_EVENTS).put(row(0)))
    made.turn()
    made.turn()  # within the same second
    made._end()
    assert len(read(tmp_path)) == 1


_WRITER = """
import sys, time
from flowctl.records.telemetry.options import EventsOptions
from flowctl.records.telemetry.events import event_row
from flowctl.records.telemetry.recorder import Recorder
from flowctl.records.telemetry.schema import FLOW_EVENTS, EventName
made = Recorder(EventsOptions(folder=sys.argv[1], node="n1", rotate_s=0.5))
made.start()
print("ready", flush=True)
number = 0
while True:
    for _ in range(200):
        made.lane(FLOW_EVENTS).put(event_row(time.time_ns() // 1000, 0, EventName.LIMIT_HIT, value=float(number)))
        number += 1
    time.sleep(0.002)
"""


@pytest.mark.realtime
def test_process_when_killed_while_it_writes_leaves_only_whole_files(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        end = time.monotonic() + 60
        while len(files(tmp_path)) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        # In the middle of a file: as soon as a hidden one is there, if it can be met.
        soon = time.monotonic() + 3
        while time.monotonic() < soon and len(everything(tmp_path)) == len(files(tmp_path)):
            time.sleep(0.0005)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(10)
        child.stdout.close()
    assert len(files(tmp_path)) >= 3
    numbers = sorted(
        value for path in files(tmp_path) for value in parquet.read_table(path, partitioning=None)["value"].to_pylist()
    )
    assert numbers == [float(number) for number in range(len(numbers))]
    assert all(path.name.startswith(".") for path in set(everything(tmp_path)) - set(files(tmp_path)))
