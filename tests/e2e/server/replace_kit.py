"""What the tests of servers that take the place of others share: where operators find them, and their processes."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

HELLO = b"\3" + bytes(1536)
"""What an RTMP client says first; the server answers with the same octet."""


@pytest.fixture
def runtime(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="f-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder) / "flowctl"


@contextlib.contextmanager
def started(words):
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        errors = []
        reader = threading.Thread(target=lambda: errors.extend(process.stderr))
        reader.start()
        try:
            line = process.stdout.readline()
            if not line:
                process.wait(20)
                reader.join()
            assert line, "".join(errors)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            finally:
                process.kill()
                reader.join()
