"""Waiting for the signals that end a server: never in vain, whatever the main thread is doing when they come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flowctl.core.server.signals import EndSignals

PATIENCE_S = 60.0

AT_EACH_STEP = """
import os, signal, sys, threading
from flowctl.core.server.server import Server

class Signaller:
    '''Traces the main thread; sends SIGTERM at one step of the wait in `Server.run`, counted from its beginning.'''

    def __init__(self, step):
        self.left, self.waits = step, False

    def __call__(self, frame, event, argument):
        if frame.f_code.co_name == "wait" and frame.f_back.f_code.co_name == "run":
            self.waits = True
        if self.waits and event in ("call", "line"):
            self.left -= 1
            if self.left == -1:
                os.kill(os.getpid(), signal.SIGTERM)
        return self

step = -1
reached = True
while reached:
    step += 1
    server, signaller = Server(lambda: None), Signaller(step)
    late = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))  # there are fewer steps: it sleeps already
    late.start()
    sys.settrace(signaller)
    server.run()
    sys.settrace(None)
    reached = signaller.left < 0 and late.is_alive()
    late.cancel()
    late.join()
print("steps", step)
"""


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.realtime
def test_run_when_signalled_at_any_step_of_its_wait_ends():
    """There is no moment at which the handler waits for something that the main thread holds."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EACH_STEP], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    word, steps = done.stdout.split()
    assert (done.returncode, done.stderr, word) == (0, "", "steps")
    assert int(steps) >= 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT])
def test_wait_when_the_signal_came_before_it_returns_at_once(number):
    with EndSignals() as ended:
        assert not ended.wait(0.001)
        os.kill(os.getpid(), number)
        assert ended.wait(PATIENCE_S)
        assert ended.wait()


def test_wait_when_another_signal_comes_goes_on():
    came = []
    before = signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
    try:
        with EndSignals() as ended:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not ended.wait(0.01)
            late = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGTERM))
            late.start()
            assert ended.wait()
            late.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert came == [1]


def test_wait_when_nothing_comes_ends_after_its_time():
    """The time given is a bound and not a poll: figures are logged that often."""
    with EndSignals() as ended:
        start = time.monotonic()
        assert not ended.wait(0.02)
        assert time.monotonic() - start >= 0.02


def test_context_when_left_puts_everything_back():
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in watched]
    descriptors = open_descriptors()
    with EndSignals() as ended:
        assert [signal.getsignal(number) for number in watched] != before
    assert [signal.getsignal(number) for number in watched] == before
    assert open_descriptors() <= descriptors
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    assert wakeup == -1
    assert not ended.wait()


def test_context_when_entered_on_another_thread_says_so_and_leaves_nothing_open():
    """The interpreter gives signals to the main thread alone."""
    caught = []
    descriptors = open_descriptors()

    def enter():
        try:
            EndSignals().__enter__()
        except ValueError as error:
            caught.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]
    assert open_descriptors() <= descriptors


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_wait_when_a_signal_has_nothing_to_do_names_it_and_goes_on(number, caplog):
    with caplog.at_level("INFO"), EndSignals() as ended:
        os.kill(os.getpid(), number)
        assert not ended.wait(0.01)
    assert [record.getMessage() for record in caplog.records] == [
        f"{number.name}: there is nothing to do, it is ignored"
    ]


def test_wait_when_a_signal_has_a_call_makes_it_outside_of_the_handler():
    """What is called may take locks, wait and log: it runs in `wait`, on the main thread."""
    called = []
    with EndSignals() as ended:
        ended.calls = {signal.SIGHUP: lambda: called.append(sys._getframe(1).f_code.co_name)}
        os.kill(os.getpid(), signal.SIGHUP)
        assert called == []
        assert not ended.wait(0.01)
    assert called == ["_take"]


def test_wait_when_a_server_has_ended_by_itself_returns():
    with EndSignals() as ended:
        assert not ended.wait(0.01)
        thread = threading.Thread(target=ended.end)
        thread.start()
        assert ended.wait(PATIENCE_S)
        thread.join(PATIENCE_S)
    ended.end()
    assert ended.wait(0.01)
