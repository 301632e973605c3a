"""The arena of the hostile tests: server, healthy crowd and attacker, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from e2e_kit import wait_until

from flowctl.load.hostile.attacks import HOSTILE
from flowctl.load.hostile.base import AttackContext

HERE = Path(__file__).parent
APP, STREAM = "live", "arena"
VIEWERS = 50
ATTACKER = "127.0.9.{}"
"""Each attack has an address of its own, as attackers have one: limits per address are not those of the healthy ones,
and what the attack before has used up of them is not missing."""
_numbers = itertools.count(1)


class Program:
    """A Python program that answers each line of its input with a line of JSON."""

    def __init__(self, script, *arguments, log=None):
        self.log = log
        with (log or Path(os.devnull)).open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, HERE / script, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.pid = self._process.pid
        self.ready = self._read()

    def _read(self):
        line = self._process.stdout.readline()
        assert line, f"{self._process.args[1]} has ended"
        return json.loads(line)

    def ask(self, word=""):
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self._read()

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._process.stdout.close()

    # -- what the kernel knows of it

    @property
    def rss_bytes(self):
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def forget_peak(self):
        """Let `peak_rss_bytes` begin anew, at what is resident now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    @property
    def peak_rss_bytes(self):
        """Most resident memory since `forget_peak`: what was taken and given back at once counts as well."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

    @property
    def cpu_s(self):
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def descriptors(self):
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())


class Arena:
    """A server, 50 healthy viewers of a live stream, and room for one attack after the other."""

    def __init__(self, folder, *arguments, viewers=VIEWERS):
        self.server = Program("hostile_server.py", *arguments, log=folder / "server.log")
        self.crowd = None
        try:
            url = f"rtmp://127.0.0.1:{self.server.ready['port']}/{APP}/{STREAM}"
            self.crowd = Program("hostile_crowd.py", url, str(viewers))
        except BaseException:
            self.server.close()
            raise
        self.viewers = viewers

    def close(self):
        if self.crowd is not None:
            self.crowd.close()
        self.server.close()

    def attack(self, profile_id, *, duration_s=8.0, forms=None, watch_s=0.4):
        """Carry out an attack; return what it says, and what the server and the crowd looked like before and after."""
        return Bout(self, profile_id, duration_s=duration_s, forms=forms, watch_s=watch_s)

    def log_text(self):
        return self.server.log.read_text()


class Bout:
    """One attack: the verdict, and the differences that it made.

    Attributes:
        closed: connections that ended meanwhile, by reason.
        limits: limits that were hit meanwhile, by name.
        refused: connections refused meanwhile, by limit.
        cpu_s: processor time of the server meanwhile, the crowd's share included.
        crowd: what the healthy viewers have got, and their delays in this time.
    """

    def __init__(self, arena, profile_id, *, duration_s, forms, watch_s):
        server = arena.server
        before = wait_until(lambda: quiet(arena), "a quiet server")
        crowd = arena.crowd.ask("reset")
        written = len(arena.log_text())
        context = AttackContext(
            host="127.0.0.1",
            port=server.ready["port"],
            app=APP,
            stream=STREAM,
            source=ATTACKER.format(next(_numbers) % 250 + 1),
            number=random.randrange(10**6),
            duration_s=duration_s,
            watch_s=watch_s,
            forms=forms,
        )
        server.forget_peak()
        rss, cpu, descriptors, began = server.rss_bytes, server.cpu_s, server.descriptors, time.monotonic()
        self.verdict = asyncio.run(HOSTILE[profile_id].attack(context))
        self.took_s = time.monotonic() - began
        self.cpu_s = server.cpu_s - cpu
        self.rss_growth_bytes = server.peak_rss_bytes - rss
        self.crowd = wait_until(lambda: moved_on(arena, crowd), "more frames for everybody")
        after = wait_until(lambda: quiet(arena), "the attacker's connections gone")
        self.closed = difference(after["closed"], before["closed"])
        self.limits = difference(after["limits_hit"], before["limits_hit"])
        self.refused = difference(after["refused"], before["refused"])
        self.failures = after["failures"]
        self.streams = after["streams"]
        wait_until(lambda: server.descriptors <= descriptors, "the attacker's descriptors gone")
        self.log = arena.log_text()[written:]


def quiet(arena):
    """Return the server's figures if only the crowd is connected. None: others are."""
    found = arena.server.ask()
    return found if found["connections"] == arena.viewers + 1 and len(found["streams"]) == 1 else None


def moved_on(arena, before):
    """Return the crowd's figures if every viewer has got more frames since `before`. None: not yet."""
    found = arena.crowd.ask()
    return found if found["ended"] or found["frames"] > before["frames"] + 5 else None


def difference(after, before):
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}


@contextlib.contextmanager
def opened_arena(folder):
    """Give an arena; fail if a handler of the server raised."""
    arena = Arena(folder)
    try:
        yield arena
        assert arena.server.ask()["failures"] == []
    finally:
        arena.close()
