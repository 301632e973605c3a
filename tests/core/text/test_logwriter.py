"""Lines on their way out: never waited for, dropped only where counted and told, limited per address."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from flowctl.core.text import logwriter
from flowctl.core.text.logwriter import DescriptorTarget, LineLimiter, LineWriter

PATIENCE_S = 30.0


def writer_to(descriptor: int, idle=list) -> LineWriter:
    return LineWriter(DescriptorTarget(descriptor), lambda count: f"{count} dropped\n".encode(), idle)


def read_all(descriptor: int) -> bytes:
    found = b""
    while octets := os.read(descriptor, 1 << 16):
        found += octets
    return found


def test_put_when_nobody_reads_returns_and_drops_are_told_once_somebody_does():
    reader, descriptor = os.pipe()
    pipe_bytes = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
    writer = writer_to(descriptor)
    line = b"x" * 999 + b"\n"
    count = 2 * logwriter.MOST_QUEUED_BYTES // len(line)
    for _ in range(count):
        writer.put(line)
    assert not writer.flush(0.01)
    assert writer.error is None
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(read_all(reader)))
    thread.start()
    while not writer.flush(PATIENCE_S):
        pass
    writer.put(b"later\n")
    writer.close(PATIENCE_S)
    os.close(descriptor)
    thread.join(PATIENCE_S)
    os.close(reader)
    lines = found[0].decode().splitlines()
    told = [line for line in lines if "dropped" in line]  # more than once where the thread of the writer began late
    written = sum(len(line) == 999 for line in lines)
    assert told
    assert written + sum(int(line.split()[0]) for line in told) == count
    assert written * len(line) <= logwriter.MOST_QUEUED_BYTES + pipe_bytes
    assert lines[-1] == "later"


def test_put_when_the_descriptor_takes_nothing_keeps_the_error_until_it_does(tmp_path):
    descriptor = os.open("/dev/full", os.O_WRONLY)
    writer = writer_to(descriptor)
    writer.put(b"one\n")
    assert not writer.flush(PATIENCE_S)
    assert "No space" in str(writer.error)
    target = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(target, descriptor)
    writer.put(b"two\n")
    assert writer.flush(PATIENCE_S)
    assert writer.error is None
    assert (tmp_path / "log").read_text() == "two\n1 dropped\n"
    writer.close(PATIENCE_S)
    os.close(target)
    os.close(descriptor)


def test_put_when_the_descriptor_does_not_block_writes_all():
    reader, descriptor = os.pipe()
    os.set_blocking(descriptor, False)
    writer = writer_to(descriptor)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(read_all(reader)))
    for number in range(200):
        writer.put(b"%d " % number + b"x" * 2000 + b"\n")
    thread.start()
    assert writer.flush(PATIENCE_S)
    writer.close(PATIENCE_S)
    os.close(descriptor)
    thread.join(PATIENCE_S)
    os.close(reader)
    assert [int(line.split()[0]) for line in found[0].splitlines()] == list(range(200))


def test_fork_when_lines_wait_gives_the_child_an_empty_queue_of_its_own():
    """A child writes its own lines and none of its parent's, whatever the parent's thread was doing."""
    script = """
        import os, select, time
        from flowctl.core.text.logwriter import DescriptorTarget, LineWriter
        reader, blocked = os.pipe()
        writer = LineWriter(DescriptorTarget(blocked), lambda count: b"", lambda: [])
        for _ in range(300):
            writer.put(b"p" * 1000)
        select.select([reader], [], [])  # a line of the parent's stands there without its end
        time.sleep(0.1)
        if child := os.fork():
            status = os.waitpid(child, 0)[1]
            print("child ended with", status, "parent waits", not writer.flush(0.0), flush=True)
            os._exit(0)
        os.dup2(1, blocked)
        writer.put(b"of the child\\n")
        os._exit(0 if writer.flush(10.0) else 1)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.stdout == "of the child\nchild ended with 0 parent waits True\n"


def test_exit_when_nobody_reads_standard_error_comes_after_the_deadline():
    script = """
        from flowctl import log
        log.configure("info")
        for number in range(5000):
            log.get_logger("a").info("line", peer=f"192.0.2.{number % 250}:1", number=number, text="x" * 100)
        print("logged", flush=True)
    """
    reader, descriptor = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=descriptor, text=True
    )
    os.close(descriptor)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "logged\n")
    assert read_all(reader).startswith(b"20")
    os.close(reader)


def test_put_when_a_signal_handler_logs_does_not_deadlock():
    """A handler of the interpreter's runs between any two steps, also while its thread holds the lock of the queue."""
    script = """
        import os, signal, sys
        from flowctl.core.text.logwriter import DescriptorTarget, LineWriter
        writer = LineWriter(DescriptorTarget(os.open(os.devnull, os.O_WRONLY)), lambda count: b"", lambda: [])
        signal.signal(signal.SIGALRM, lambda *_: writer.put(b"from the handler\\n"))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        for _ in range(100_000):
            writer.put(b"x\\n")
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("done", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_idle_when_nothing_is_written_is_asked_for_lines():
    reader, descriptor = os.pipe()
    due = [[b"due\n"]]
    writer = writer_to(descriptor, lambda: due.pop() if due else [])
    writer.put(b"first\n")
    assert os.read(reader, 100) + os.read(reader, 100) == b"first\ndue\n"
    writer.close(PATIENCE_S)
    os.close(descriptor)
    os.close(reader)


# -- the limit


def test_lines_when_one_address_says_too_much_are_kept_back_and_counted():
    limiter = LineLimiter()
    written = sum(limiter.allows("192.0.2.1", now=0.0) for _ in range(1000))
    assert written == logwriter.LINES_AT_ONCE
    assert limiter.allows("192.0.2.2", now=0.0)
    assert limiter.withheld_counts(now=0.5) == []
    assert limiter.withheld_counts(now=1.0) == [("192.0.2.1", 1000 - written)]
    assert limiter.withheld_counts(now=2.0) == []
    assert limiter.allows("192.0.2.1", now=2.0)


def test_lines_when_an_address_never_stops_are_as_many_as_the_rate():
    limiter = LineLimiter()
    written = told = 0
    for step in range(60 * 2000):
        written += limiter.allows("192.0.2.1", step / 2000)
        told += sum(count for _, count in limiter.withheld_counts(step / 2000))
    told += sum(count for _, count in limiter.withheld_counts(None))
    assert written + told == 60 * 2000
    assert written <= logwriter.LINES_AT_ONCE + 60 * logwriter.LINES_PER_S


def test_addresses_when_there_are_too_many_are_forgotten_with_their_count_kept():
    limiter = LineLimiter()
    for _ in range(logwriter.LINES_AT_ONCE + 5):
        limiter.allows("first", 0.0)
    for number in range(logwriter.MOST_ADDRESSES):
        limiter.allows(str(number), 0.0)
    assert limiter.withheld_counts(0.0) == [("others", 5)]


@pytest.mark.realtime
def test_serve_when_nobody_reads_its_log_still_answers():
    import json
    import socket

    reader, descriptor = os.pipe()
    command = [sys.executable, "-m", "flowctl", "--log-level", "debug", "serve", "live", "--port", "0", "--json"]
    options = ["--per-address", "0", "--new-per-address", "0", "--stats", "1ms"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=descriptor, text=True)
    os.close(descriptor)
    try:
        ready = json.loads(process.stdout.readline())
        end = time.monotonic() + 4.0
        while time.monotonic() < end:  # a line of figures each millisecond fills the pipe
            with socket.create_connection((ready["host"], ready["port"]), timeout=PATIENCE_S) as client:
                client.sendall(b"\x03" + bytes(1536))
                assert len(client.recv(100)) > 0
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(reader)
