"""Do the README's commands run with exactly the extras that it installs for them? Run by .ci/run: README WHEEL.

The README is read from its beginning. Where it says ``pip install '.[X]'``, that is done, and the commands that follow
are run as they stand there, but for the port and for the duration of those that have one. What stays in the background
is ended, as by `kill`, before the next server and before an analysis. Status 1 is right where
``--fail-on`` judges or the demo was too short; an ``error:`` of another kind, such as a stream that is taken, is not.
Nothing may ask for an extra, but for the demo, which does without a dashboard.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from smoke_framework import connect, free_port
from smoke_wheel import WAIT_S, require, say

from flowctl.core.text.extras import packages_by_extra

CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INSTALL = re.compile(r"pip install '\.\[([\w,]+)\]'")
DURATION = ["--duration", "4s"]  # the shortest demo
HAVE_DURATION = frozenset({"demo", "load", "play", "publish"})
TERMINATED = 143
TOO_SHORT = "error: the demo did not go as it should"
AMISS = ("error: ", "pip install '.[", "bug of flowctl", "Traceback")


def chapters(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield the extras of each installation in a document, and the commands up to the next one, in words."""
    found: list[tuple[list[str], list[list[str]]]] = []
    for line in "".join(CONSOLE.findall(text)).replace("\\\n", " ").splitlines():
        if installed := INSTALL.match(line.removeprefix("$ ")):
            found.append((installed[1].split(","), []))
        elif found and line.startswith("$ "):
            found[-1][1].append(shlex.split(line[2:], comments=True))
    yield from found


def install(wheel: str, extras: list[str], before: set[str]) -> set[str]:
    """Install the wheel with these extras, which bring all that was installed before; return what they bring."""
    brought = set().union(*(packages_by_extra()[extra] for extra in extras))
    require(before <= brought, f"{extras} do not bring {before - brought}: the README has to install less before")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]  # compiling takes half of the time
    subprocess.run([*pip, f"{wheel}[{','.join(extras)}]"], check=True)
    say(f"installed: {','.join(extras)}")
    return brought


class Commands:
    """Runs commands in a folder of their own, and ends those that stay in the background."""

    def __init__(self, folder: str) -> None:
        self.folder, self.port = Path(folder).resolve(), free_port()
        own = {"FLOWCTL_PORT": str(self.port), "FLOWCTL_CACHE": str(self.folder), "XDG_RUNTIME_DIR": str(self.folder)}
        self.environment = os.environ | own
        self.background: list[tuple[list[str], subprocess.Popen[bytes], Path]] = []

    def run(self, words: list[str]) -> None:
        program, name, *rest = [word.replace("//127.0.0.1/", f"//127.0.0.1:{self.port}/") for word in words]
        if name in {"serve", "analyze"}:
            self.end()  # records are whole when their server has ended
        stays = name == "serve" or rest[-1:] == ["&"]
        if rest[-1:] == ["&"]:
            rest.pop()
        elif name in HAVE_DURATION:
            rest += DURATION
        log = self.folder / f"{time.monotonic_ns()}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [Path(sys.executable).with_name(program), name, *rest],
                cwd=self.folder, env=self.environment, stdout=output, stderr=output,
            )  # fmt: skip
        started = (words, process, log)
        if not stays:
            self.settle(*started)
            return
        self.background.append(started)
        if name == "serve":
            connect(self.port).close()

    def settle(self, words: list[str], process: subprocess.Popen[bytes], log: Path) -> None:
        try:
            status = process.wait(WAIT_S)
        finally:
            process.kill()
        told = log.read_text("utf-8", "replace")
        lines = "\n".join(line for line in told.splitlines() if not line.startswith(("no dashboard: ", TOO_SHORT)))
        command = shlex.join(words)
        require(status in {0, 1, TERMINATED}, f"{command}: status {status}\n{told}")
        require(not [amiss for amiss in AMISS if amiss in lines], f"{command}:\n{told}")
        say(f"{command}: status {status}")

    def end(self) -> None:
        """End what stays in the background, what was begun last first."""
        while self.background:
            words, process, log = self.background.pop()
            process.terminate()
            self.settle(words, process, log)


if __name__ == "__main__":
    has: set[str] = set()
    for extras, commands in chapters(Path(sys.argv[1]).read_text("utf-8")):
        has = install(sys.argv[2], extras, has)
        with tempfile.TemporaryDirectory() as folder:
            running = Commands(folder)
            try:
                for words in commands:
                    running.run(words)
                running.end()
            finally:
                for _, process, _ in running.background:
                    process.kill()
