"""Does what the README shows work, pasted as it stands? Run by .ci/run: README CHECKOUT.

Each installation of the README begins a chapter. It is made in a fresh environment, in a copy of the checkout, and each
block of commands that follows it is pasted whole into a shell of its own, comments and `&` included; one that ends in a
server is left running for the blocks behind it, as in another terminal. All this happens beside a busy core. Only the
port is another one, because 1935 may be taken here.

What a newcomer leaves running is watched as long as the rest takes, and `STAY_S` at least: ``flowctl demo --stay``.

Nothing may say ``error:`` or ask for an extra, but for the demo: it does without a dashboard, and beside a busy core it
may miss what it is to show.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from smoke_framework import free_port
from smoke_wheel import require, say

CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INSTALL = re.compile(r"^pip install '\.\[([\w,]+)\]'", re.MULTILINE)
AMISS = ("error: ", "pip install '.[", "bug of flowctl", "Traceback", "command not found", "received nothing")
MAY_BE = ("no dashboard: ", "error: the demo did not go as it should")
PASTE_S = 600
"""For one block: only a hang takes that long."""
STAY_S = 120
"""Two minutes: longer than any time limit of a server on peers that have nothing to do."""
COPIED = ("pyproject.toml", "README.md", "LICENSE", "flowctl", "servers")
"""What a package is built of."""
CHILDREN_OF_CHILDREN = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): what a shell leaves behind is waited for here."""
BUSY = "import os\nwhile os.getppid() > 1:\n    pass"


def chapters(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the extras of each installation in a document, and the blocks of commands from it to the next one."""
    found: list[tuple[list[str], list[str]]] = []
    for block in CONSOLE.findall(text):
        lines = [line for line in block.replace("\\\n", "\\\n$ ").splitlines() if line.startswith("$ ")]
        pasted = "\n".join(line[2:] for line in lines) + "\n"
        if installed := INSTALL.search(pasted):
            found.append((installed[1].split(","), []))
        if found:
            found[-1][1].append(pasted)
    yield from found


class Terminal:
    """A shell in which a block is pasted, with all that it starts."""

    def __init__(self, pasted: str, environment: dict[str, str], folder: Path) -> None:
        self.pasted = pasted
        self.said = Path(tempfile.mkstemp(dir=environment["XDG_RUNTIME_DIR"])[1])
        with self.said.open("wb") as output, tempfile.TemporaryFile() as typed:
            typed.write(pasted.encode())
            typed.seek(0)
            self.shell = subprocess.Popen(
                ["bash"], stdin=typed, stdout=output, stderr=output, cwd=folder, env=environment, start_new_session=True
            )

    def run(self) -> None:
        """Wait until all is done, then end what stays in the background, as closing a terminal does."""
        try:
            self.shell.wait(PASTE_S)
        except subprocess.TimeoutExpired:
            require(None, f"not done in {PASTE_S} s:\n{self.pasted}\n{self.text}")
        finally:
            self.close(signal.SIGTERM)
        self.check()

    def close(self, number: signal.Signals) -> None:
        """Send a signal to all that it started, and wait until that has ended."""
        until = time.monotonic() + PASTE_S
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.killpg(self.shell.pid, number)
            while time.monotonic() < until:
                if os.waitpid(-self.shell.pid, os.WNOHANG) == (0, 0):
                    time.sleep(0.1)
            os.killpg(self.shell.pid, signal.SIGKILL)

    @property
    def text(self) -> str:
        return self.said.read_text("utf-8", "replace")

    def require_running(self) -> None:
        require(self.shell.poll() is None, f"it ended:\n{self.pasted}\n{self.text}")

    def check(self) -> None:
        told = self.text
        lines = "\n".join(line for line in told.splitlines() if not line.startswith(MAY_BE))
        require(not [item for item in AMISS if item in lines], f"{self.pasted}\n{told}")
        say(f"pasted: {' / '.join(self.pasted.splitlines())[:100]}")


def serves(pasted: str) -> bool:
    """Return whether a block ends in a server, which stays until somebody ends it."""
    last = pasted.strip().splitlines()[-1].partition("#")[0].split()
    return last[:2] == ["flowctl", "serve"] and last[-1] != "&"


def paste_chapter(extras: list[str], blocks: list[str], checkout: Path, home: Path, *, stay: bool) -> None:
    port = free_port()
    subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
    own = {"FLOWCTL_PORT": str(port), "FLOWCTL_CACHE": str(home), "XDG_RUNTIME_DIR": str(home)}
    own["PIP_NO_COMPILE"] = "1"  # compiling takes half of the time of an installation
    environment = {**os.environ, **own, "PATH": f"{home}/venv/bin:{os.environ['PATH']}"}
    folder = home / "flowctl"
    folder.mkdir()
    subprocess.run(["cp", "-r", *(checkout / name for name in COPIED), folder], check=True)
    left: list[Terminal] = []
    stays_until = 0.0
    try:
        for block in blocks:
            terminal = Terminal(block.replace("//127.0.0.1/", f"//127.0.0.1:{port}/"), environment, folder)
            if not serves(block):
                terminal.run()
                continue
            left.append(terminal)
            while terminal.text.count("] serving ") < block.count("flowctl serve"):
                terminal.require_running()
                time.sleep(0.1)
            if stay and not stays_until:
                stays_until = time.monotonic() + STAY_S
                left.append(Terminal("flowctl demo --stay\n", environment, folder))
        while time.monotonic() < stays_until:
            time.sleep(1)
        for terminal in left:
            terminal.require_running()
    finally:
        for terminal in left:
            terminal.close(signal.SIGINT)
    for terminal in left:
        terminal.check()
    say(f"with {','.join(extras)}: all blocks")


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(CHILDREN_OF_CHILDREN, 1, 0, 0, 0)
    busy = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        for number, (extras, blocks) in enumerate(chapters(Path(sys.argv[1]).read_text("utf-8"))):
            with tempfile.TemporaryDirectory(dir=".") as home:
                paste_chapter(extras, blocks, Path(sys.argv[2]).resolve(), Path(home).resolve(), stay=not number)
    finally:
        busy.kill()
