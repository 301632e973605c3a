"""Processes of commands, real ones: what they have of the server, what they may, and that nothing of them outlives it.

Nothing waits for a time: a condition is looked for until it holds.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowctl.live.run.process import CommandProcess, Guard

pytestmark = pytest.mark.realtime
PATIENCE_S = 30.0
TELL = """
import json, os, resource, signal, sys
print(json.dumps({
    "words": sys.argv[1:], "environment": dict(os.environ), "nice": os.nice(0), "group": os.getpgrp() == os.getpid(),
    "memory": resource.getrlimit(resource.RLIMIT_AS)[0], "input": sys.stdin.read(),
    "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "ignored": [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_IGN],
}))
"""
FAMILY = "sleep 1000 & sleep 1000 & echo $!; wait"
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 1; done"


@pytest.fixture
def guard():
    guard = Guard()
    yield guard
    guard.close()


def start(guard, *words, nice=0, memory_bytes=0, **values):
    return CommandProcess(words, values, nice=nice, memory_bytes=memory_bytes, guard=guard)


def wait_until(condition, what):
    end = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.01)
    return value


def lines_of(process, least=1):
    lines = []
    wait_until(lambda: lines.extend(process.lines()) or len(lines) >= least or process.silent, "its lines")
    return lines


def lives(pid):
    """Return whether a process is there; one that nobody has reaped yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def test_command_when_started_has_its_words_and_variables_and_nothing_of_the_server(guard, monkeypatch):
    monkeypatch.setenv("FLOWCTL_KEY", "SECRET")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    own = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(own, True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(
            guard, sys.executable, "-c", TELL, "a b", "$HOME", "-x", nice=7, memory_bytes=1 << 31, name="l/a"
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGHUP, old)
        os.close(own)
    (line,) = lines_of(process)
    assert "SECRET" not in line
    found = json.loads(line)
    assert found["words"] == ["a b", "$HOME", "-x"]
    assert found["environment"]["FLOWCTL_STREAM_NAME"] == "l/a"
    assert found["environment"]["PATH"] == os.environ["PATH"]
    usual = {"PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LOGNAME", "FLOWCTL_STREAM_NAME"}
    assert found["environment"].keys() <= usual
    assert (found["nice"], found["memory"], found["group"]) == (min(os.nice(0) + 7, 19), 1 << 31, True)
    assert (found["input"], found["descriptors"], found["blocked"], found["ignored"]) == ("", [0, 1, 2], [], [])
    wait_until(lambda: process.ended, "its end")
    assert process.finish() == 0


def test_command_when_asked_to_end_ends_with_all_that_it_started(guard):
    process = start(guard, "/bin/sh", "-c", FAMILY)
    (child,) = lines_of(process)
    assert lives(child)
    process.ask_to_end()
    wait_until(lambda: (process.lines() or True) and process.ended and process.silent, "the end of all")
    assert process.finish() == -signal.SIGTERM
    assert not lives(child)


def test_command_when_it_leaves_something_behind_takes_that_with_it(guard):
    process = start(guard, "/bin/sh", "-c", "sleep 1000 & echo $!; exit 3")
    (child,) = lines_of(process)
    wait_until(lambda: process.ended, "the end of the command itself")
    assert not process.silent
    assert process.finish() == 3
    wait_until(lambda: not lives(child), "the end of what it left behind")


def test_command_when_it_does_not_listen_is_killed(guard):
    process = start(guard, "/bin/sh", "-c", STUBBORN)
    assert lines_of(process) == ["ready"]
    process.ask_to_end()
    assert not process.ended
    assert process.finish() == -signal.SIGKILL


def test_command_when_its_program_is_gone_says_so(guard):
    process = start(guard, "/nowhere/program")
    assert lines_of(process) == ["cannot be started: No such file or directory"]
    wait_until(lambda: process.ended, "its end")
    assert process.finish() == 1


def test_command_when_it_takes_more_memory_than_it_may_fails(guard):
    code = "import sys\ntry:\n    bytearray(1 << 30)\nexcept MemoryError:\n    sys.exit(9)"
    process = start(guard, sys.executable, "-c", code, memory_bytes=512 << 20)
    wait_until(lambda: (process.lines() or True) and process.ended, "its end")
    assert process.finish() == 9


def test_output_when_it_has_carriage_returns_and_no_end_is_lines(guard):
    process = start(guard, "/bin/sh", "-c", r"printf 'one\rtwo\r\nthree\n\n'; printf '\377end'")
    assert lines_of(process, 4) == ["one", "two", "three", "\ufffdend"]
    wait_until(lambda: process.ended, "its end")
    process.finish()


def test_line_when_it_is_too_long_is_shown_to_where_it_was_read_and_its_rest_is_not(guard):
    """In the rest might stand the second half of a pass, which would not be known for one."""
    code = "import sys; print('x' * 5000, end='', flush=True); input(); print('HALF\\nnext')"
    process = start(guard, "/bin/sh", "-c", f'(sleep 0.2; echo) | {sys.executable} -c "{code}"')
    lines = []
    wait_until(lambda: lines.extend(process.lines()) or process.silent, "its end")
    assert lines == ["x" * 5000, "next"]
    wait_until(lambda: process.ended, "its end")
    process.finish()


def test_command_when_the_server_was_started_with_children_ignored_is_seen_to_end(guard):
    old = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = start(guard, sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGCHLD).name)")
        assert lines_of(process) == ["SIG_DFL"]
        wait_until(lambda: process.ended, "its end")
        assert process.finish() is not None
    finally:
        signal.signal(signal.SIGCHLD, old)


def test_output_when_it_is_without_end_is_read_a_part_at_a_time(guard):
    """Each line costs the server more than it costs the command."""
    process = start(guard, "/bin/sh", "-c", "yes | head -n 50000")
    read = unread = 0
    while not process.silent:
        lines = process.lines()
        assert len(lines) <= 100
        read, unread = read + len(lines), unread + process.take_unread()
    assert read + unread == 50000
    assert unread
    wait_until(lambda: process.ended, "its end")
    process.finish()


SERVER = """
import sys, time
from flowctl.live.run.process import CommandProcess, Guard
guard = Guard()
process = CommandProcess(["/bin/sh", "-c", sys.argv[1]], {}, nice=0, memory_bytes=0, guard=guard)
while True:
    for line in process.lines():
        print(process.pid, guard._process.pid, line, flush=True)
    time.sleep(0.01)
"""


def test_command_when_its_server_is_killed_ends_with_all_that_it_started():
    """Neither the shell's child nor a command that hears no signal outlives the server."""
    server = subprocess.Popen([sys.executable, "-c", SERVER, f"trap '' TERM HUP; {FAMILY}"], stdout=subprocess.PIPE)
    try:
        pids = server.stdout.readline().decode().split()
        assert len(pids) == 3
        assert all(map(lives, pids))
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    wait_until(lambda: not any(map(lives, pids)), "the end of the command, its child and the guard")


def test_command_when_the_guard_was_killed_is_known_to_the_next_one(guard):
    first = start(guard, "/bin/sh", "-c", FAMILY)
    os.kill(guard._process.pid, signal.SIGKILL)
    wait_until(lambda: guard._process.poll() is not None, "the end of the guard")
    second = start(guard, "/bin/sh", "-c", FAMILY)
    children = [line for process in (first, second) for line in lines_of(process)]
    guard.close()  # as the end of the server does
    wait_until(lambda: not any(map(lives, children)), "the end of both")
    assert [process.finish() for process in (first, second)] == [-signal.SIGKILL] * 2


def test_command_when_no_guard_can_be_had_is_none_and_leaves_nothing(guard, monkeypatch):
    """Else a process that has begun would be known to nobody."""
    known = []

    def add(group):
        known.append(group)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(guard, "add", add)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="Too many open files"):
        start(guard, "/bin/sleep", "1000")
    assert not lives(known[0])
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_limits_of_a_server_when_it_starts_commands_stay_its_own(guard):
    before = resource.getrlimit(resource.RLIMIT_AS), os.nice(0)
    start(guard, "/bin/true", nice=5, memory_bytes=1 << 30).finish()
    assert (resource.getrlimit(resource.RLIMIT_AS), os.nice(0)) == before
