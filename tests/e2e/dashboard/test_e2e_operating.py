"""The page on operating is true: its file and its commands do, in their order, what it says."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from e2e_kit import wait_until

PAGE = (Path(__file__).parents[3] / "docs" / "operating.md").read_text("utf-8")
FENCE = re.compile(r"^```(console|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLOWCTL = [sys.executable, "-c", "import sys; from flowctl.cli import main; sys.exit(main())"]
ABUSER = "127.0.0.77"
"""Stands for 203.0.113.7, from where nobody connects to the loopback."""
NOT_RUN = {"pip"}
"""The environment of these tests is what it makes."""


class Walk:
    """Runs the commands of the page, with ports, key and numbers of its own."""

    def __init__(self, folder):
        self.folder = folder
        ports = []
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                sock = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                ports.append(sock.getsockname()[1])
        self.port, self.http, self.admin = ports
        self.key, self.number = "KEY", "7"
        self.running = []
        self.environment = os.environ | {"FLOWCTL_SERVER": str(self.port), "NO_COLOR": "1", "COLUMNS": "200"}

    def mine(self, text):
        for theirs, ours in ((1935, self.port), (8080, self.http), (8936, self.admin)):
            text = re.sub(rf"\b{theirs}\b", str(ours), text)
        text = text.replace("0.0.0.0:", "127.0.0.1:").replace('"0.0.0.0"', '"127.0.0.1"').replace("203.0.113.7", ABUSER)
        return re.sub(r"(connections|limits|kick) 7\b", rf"\1 {self.number}", text).replace("=KEY", f"={self.key}")

    def run(self, command):
        """Run one command to its end, or in the background; return what it said."""
        background = command.endswith("&")
        program, *arguments = shlex.split(self.mine(command.rstrip("& ")))
        words = [*(FLOWCTL if program == "flowctl" else [program]), *arguments]
        if background:
            with (self.folder / f"{len(self.running)}.log").open("wb") as log:
                started = subprocess.Popen(
                    words, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            self.running.append(started)
            return ""
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def rows(self, **asked):
        """Return connections, by the API that the page names."""
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"http://127.0.0.1:{self.admin}/api/v1/connections", params=asked)
            return answer.json()["connections"]
        return []

    def end(self):
        """End what is still running, by its id."""
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(10)


def let_in(port):
    """Return whether the abuser is let in: who is not has the connection closed at once."""
    try:  # the reset may be there before connect() has returned
        with socket.create_connection(("127.0.0.1", port), 20, source_address=(ABUSER, 0)) as sock:
            sock.settimeout(0.5)
            return sock.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


@pytest.mark.timeout(120)  # a dozen processes, one after the other
def test_commands_when_run_in_their_order_lead_from_a_file_to_a_banned_abuser(tmp_path):
    walk = Walk(tmp_path)
    said = {}
    with contextlib.ExitStack() as stack:
        stack.callback(walk.end)
        for kind, block in FENCE.findall(PAGE):
            if kind == "toml":
                (tmp_path / "flowctl.toml").write_text(walk.mine(block))
                continue
            for command in (line[2:] for line in block.splitlines() if line.startswith("$ ")):
                program, *words = shlex.split(command)
                if program in NOT_RUN or not (program == "flowctl" or shutil.which(program)):
                    continue
                if words[0] == "ban":
                    abuser = stack.enter_context(
                        socket.create_connection(("127.0.0.1", walk.port), 20, source_address=(ABUSER, 0))
                    )
                    wait_until(lambda: walk.rows(peer=ABUSER), "the abuser is there")
                if words[:2] == ["connections", "--state"]:
                    wait_until(lambda: walk.rows(state="slow", role="viewer"), "the viewer is slow")
                said[" ".join(words[:2])] = text = walk.run(command)
                if words[0] == "key":
                    walk.key = text.strip()
                if words[0] == "serve":
                    wait_until(lambda: _listens(walk.admin), "the server listens")
                if words[0] == "publish":
                    wait_until(lambda: walk.rows(role="publisher"), "the publisher is let in")
                if words[:2] == ["connections", "--state"]:
                    walk.number = str(walk.rows(state="slow", role="viewer")[0]["connection"])
                if words[0] == "ban":
                    abuser.settimeout(20)
                    assert _closed(abuser)
                    assert not let_in(walk.port)
                if words[0] == "unban":
                    assert let_in(walk.port)
        assert "limit" in said["connections 7"]
        assert walk.running[0].wait(20) == 0
    assert ABUSER in said["bans"]
    assert json.loads(said.get("-s http://127.0.0.1:8936/healthz", '{"status": "ok"}')) == {"status": "ok"}


def _listens(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _closed(sock):
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True
