"""Runs the command line in processes of its own, with bounds on every wait."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from loopback_kit import LOOPBACK, SETTINGS, loopback

COMMAND = [sys.executable, "-c", "import sys; from flowctl.cli import main; sys.exit(main())"]
PATIENCE_S = 30.0


def start(*arguments, **settings):
    """Start ``flowctl arguments`` and return the process; its output is text unless `settings` say otherwise."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | SETTINGS | {"NO_COLOR": "1", "COLUMNS": "200"} | settings.pop("env", {})
    return subprocess.Popen([*COMMAND, *arguments], env=environment, **(streams | settings))


def finish(process):
    """Wait for a process; return its exit status, output and errors."""
    try:
        output, errors = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, output, errors


def run(*arguments, **settings):
    return finish(start(*arguments, **settings))


class Served:
    """A server process that is ready.

    Attributes:
        log: standard error, when it was stopped.
    """

    def __init__(self, process):
        self.process = process
        self.status = None
        self.log = ""
        self._errors = []
        # Read all the time, so that a server that logs much never waits for us.
        self._reader = threading.Thread(target=lambda: self._errors.extend(process.stderr), daemon=True)
        self._reader.start()
        self.ready = json.loads(process.stdout.readline())

    def url(self, stream="live/room"):
        return f"rtmp://{loopback(self.ready['port'])}/{stream}"

    def wait_logged(self, text):
        end = time.monotonic() + PATIENCE_S
        while not any(text in line for line in list(self._errors)):
            assert time.monotonic() < end, f"not logged: {text}"
            time.sleep(0.01)

    def stop(self, number=signal.SIGTERM):
        if self.status is None:
            self.process.send_signal(number)
            self.status = self.process.wait(PATIENCE_S)
            self._reader.join(PATIENCE_S)
            self.log = "".join(self._errors)
            self.process.stdout.close()
            self.process.stderr.close()


@contextlib.contextmanager
def served(*arguments):
    process = start("serve", *arguments, "--port", "0", "--json")
    try:
        server = Served(process)
    except BaseException:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
        raise
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def connected(server, count):
    with contextlib.ExitStack() as stack:
        peers = []
        for _ in range(count):
            peer = stack.enter_context(socket.create_connection((LOOPBACK, server.ready["port"]), 20))
            with contextlib.suppress(ConnectionError):  # refused already
                peer.sendall(b"\3" + bytes(1536))
            peers.append(peer)
        yield peers
