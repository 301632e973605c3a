"""Crowds of the benches: they read what they are told and nothing else, and what they got is summed up as it is.

The benches themselves run with ten viewers: what counts is that there are figures, and that nobody was closed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

import run as bench_run
from crowds import quota, scene
from crowds.readers import Readers


@contextlib.contextmanager
def pouring(body=bytes(65536), *, ends=False):
    """Serve whoever asks with as much as it takes, or end the connection after the answer; yield the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def pour(sock):
        with sock, contextlib.suppress(OSError):
            sock.recv(4096)
            sock.sendall(body)
            while not ends and not stop.is_set():
                sock.sendall(body)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                sock = listener.accept()[0]
                threads.append(threading.Thread(target=pour, args=(sock,)))
                threads[-1].start()

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in threads:
            thread.join(10)


def test_readers_when_held_read_nothing_until_they_are_told():
    with pouring() as port, Readers(3, "http") as readers:
        readers.join(port, 0.0, holds=True)
        assert readers.take() == [0, 0, 0]
        readers.read(0.2)
        assert min(readers.take()) > 0
        assert (readers.take(), readers.closed) == ([0, 0, 0], 0)


def test_readers_on_lines_get_what_the_line_carries_and_save_nothing_up():
    with pouring() as port, Readers(3, "http") as readers:
        readers.join(port, 0.0, holds=True)
        began = time.monotonic()
        readers.read(0.5, slow=2, line=10_000)
        took_s = time.monotonic() - began
        *slow, fast = readers.take()
        assert 0 < min(slow) <= max(slow) <= 10_000 * took_s < fast
        readers.read(0.2)  # off the line again
        assert min(readers.take()) > 65536


def test_readers_when_the_server_ends_or_refuses_count_as_closed():
    with Readers(3, "http") as readers:
        with pouring(b"x", ends=True) as port:
            readers.join(port, 0.0)
            readers.read(0.5)
            assert readers.take() == [1, 1, 1]
            assert readers.closed == 3
        readers.join(port, 0.0)
        assert (readers.closed, readers.take()) == (3, [0, 0, 0])


def test_readers_when_nobody_answers_give_up():
    with socket.create_server(("127.0.0.1", 0)) as silent, Readers(3) as readers:
        readers.join(silent.getsockname()[1], 0.0, timeout_s=0.1)
        assert readers.closed == 3


@pytest.mark.parametrize(
    ("medians", "back_s", "lost_again"),
    [
        ([1.0, 1.0, 1.0, 1.0], 0, 0),
        ([6.0, 0.9, 0.9, 0.9], None, None),
        ([0.0, 0.5, 0.97, 0.96, 1.04], 2, 0),
        ([0.3, 1.0, 1.0, 1.0, 0.2, 1.0], 1, 2),
        ([0.93, 1.07, 0.94, 1.05], 0, 0),
    ],
)
def test_back_when_all_is_as_before_says_since_when_and_whether_it_stays(medians, back_s, lost_again):
    assert scene.back(medians) == {"back_s": back_s, "lost_again": lost_again}


def test_second_when_summed_up_names_the_median_the_slowest_tenth_and_the_price():
    second = scene.Second(took_s=2.0, shares=[0.1, *[0.5] * 10, *[1.0] * 9], cpu_s=0.004)
    assert (second.median, second.tenth, second.us) == (0.5, 0.5, pytest.approx(100))
    assert second.per_cpu_s == pytest.approx(14.1 * 2 / 0.004)


def test_squeeze_when_there_is_no_control_group_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(quota, "_ROOT", tmp_path / "absent")
    with pytest.raises(SystemExit, match="no quota of processor time can be set here"):
        bench_run.load("squeeze").run(**bench_run.load("squeeze").QUICK)


@pytest.mark.skipif(quota.why_not() != "", reason=quota.why_not())
def test_quota_when_left_moves_its_processes_back():
    before = quota._home()
    with quota.limited([os.getpid()]) as limit:
        limit(0.5)
        inside = quota._home()
        limit(None)
    assert inside != before == quota._home()
    assert not inside.exists()


@pytest.fixture
def _short(monkeypatch):
    monkeypatch.setattr(scene, "HEAD_S", 1.0)
    monkeypatch.setattr(scene, "_SETTLE_S", 1.0)


def quick(name, **changes):
    module = bench_run.load(name)
    return module.run(**module.QUICK | {"servers": ("flowctl",)} | changes)


@pytest.mark.realtime
@pytest.mark.usefixtures("_short")
def test_laggards_when_quick_use_their_lines():
    rows = quick("laggards", many=0)
    assert [(row["server"], row["lagging"], row["closed"]) for row in rows] == [
        ("flowctl", 10, 0),
        ("flowctl, HTTP-FLV", 10, 0),
    ]
    for row in rows:
        assert 0 < row["line_used_p10_percent"] <= row["line_used_median_percent"] <= 105
        assert min(row["before_percent"], row["before_us"]) > 0


@pytest.mark.realtime
@pytest.mark.usefixtures("_short")
def test_hiccup_when_quick_closes_nobody_and_says_what_came_second_by_second():
    (row,) = quick("hiccup")
    assert (row["viewers"], row["pause_s"], row["closed"]) == (10, 1.0, 0)
    for key in ("median_percent", "us_per_viewer"):
        assert len(row[key].split()) == bench_run.load("hiccup").QUICK["after_s"]
    assert sum(map(int, row["median_percent"].split())) > 0


def test_hiccup_when_asked_for_all_has_each_size_and_pause_and_what_is_special():
    module = bench_run.load("hiccup")
    found = module.cases((10, 20), (1.0, 2.0), 20.0, ("flowctl",))
    assert [(case.viewers, pause) for case, pause in found[:4]] == [(10, 1.0), (10, 2.0), (20, 1.0), (20, 2.0)]
    assert [(case.label, pause) for case, pause in found[4:]] == [
        ("flowctl", 20.0),
        ("flowctl, busy", 5.0),
        ("flowctl, flush 350 ms", 5.0),
    ]


@pytest.mark.realtime
@pytest.mark.usefixtures("_short")
def test_crowd_when_small_comes_and_comes_again_and_gets_the_stream():
    module = bench_run.load("crowd")
    rows = [
        module.join(scene.Case(server="flowctl", viewers=10, scheme="http"), 2),
        module.restart(scene.Case(server="flowctl", viewers=10), 2),
    ]
    assert [(row["crowd"], row["server"]) for row in rows] == [("join", "flowctl, HTTP-FLV"), ("restart", "flowctl")]
    assert all(row["closed"] == 0 and sum(map(int, row["median_percent"].split())) > 0 for row in rows)


@pytest.mark.realtime
@pytest.mark.usefixtures("_short")
@pytest.mark.skipif(quota.why_not() != "", reason=quota.why_not())
def test_squeeze_when_quick_holds_a_server_down_and_lets_it_go():
    (row,) = quick("squeeze")
    assert (row["processor_percent"], row["closed"]) == (30, 0)
    assert row["per_processor_s_of_before"] > 0
    assert sum(map(int, row["median_after_percent"].split())) > 0
