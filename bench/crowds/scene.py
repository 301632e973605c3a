"""A server of a contender, a publisher and a crowd for the time of a block, and what a second of them is worth.

The stream is a real one, 2.5 Mbit/s of H.264 and AAC with a key frame every 2 s. All shares are of its mean rate. Each
scene has a server of its own: what one did to it is no part of the next.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from compare import rivals
from compare.rivals import Running, Settings
from crowds.readers import STREAM, Readers, Scheme
from flowctl.wire.client.source import FlvFile
from kit import processes
from kit.machine import HERE, PROGRAMS
from kit.sample import ensure_sample, rendition_recipes

SERVERS: Final = ("flowctl", "nginx-rtmp")
FLUSH_S: Final = 0.04
"""flowctl's default."""
_RECORDED_S: Final = 20.0
HEAD_S: Final = 2.5
"""Head start of the publisher, in which it fills a cache with the longest group of pictures."""
_JOIN_PER_S: Final = 400
_SETTLE_S: Final = 4.0
_BACK: Final = 0.95
_BACK_S: Final = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured: a server and its crowd.

    Args:
        busy: whether a process that only computes shares the machine.
    """

    server: str
    viewers: int
    scheme: Scheme = "rtmp"
    flush_s: float = FLUSH_S
    busy: bool = False

    @property
    def label(self) -> str:
        """The server, with what is unusual of it and around it."""
        flush = f"flush {self.flush_s * 1000:g} ms" if self.flush_s != FLUSH_S else ""
        return ", ".join(filter(None, (self.server, "HTTP-FLV" * (self.scheme == "http"), flush, "busy" * self.busy)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Second:
    """What a crowd got in a second, or another time.

    Args:
        shares: of the stream's rate, of each viewer.
        cpu_s: processor time of the server.
    """

    took_s: float
    shares: Sequence[float]
    cpu_s: float

    @property
    def median(self) -> float:
        return statistics.median(self.shares)

    @property
    def tenth(self) -> float:
        """What the best of the slowest tenth got."""
        return sorted(self.shares)[len(self.shares) // 10]

    @property
    def us(self) -> float:
        """Processor time of the server per viewer and second."""
        return self.cpu_s / self.took_s / len(self.shares) * 1e6

    @property
    def per_cpu_s(self) -> float:
        """Viewers' seconds of the stream that a second of the server's processor time delivered."""
        return sum(self.shares) * self.took_s / max(self.cpu_s, 1e-9)


class Scene:
    """A server that runs, with its stream and its crowd."""

    def __init__(self, running: Running, readers: Readers, rate: float) -> None:
        self.running, self.readers, self.rate = running, readers, rate

    def second(self, seconds: float = 1.0, *, slow: int = 0, share: float = 0.0) -> Second:
        """Let the crowd read for a time, the first `slow` viewers on lines of a share of the stream's rate."""
        self.readers.take()
        cpu_s, began = processes.cpu_seconds(self.running.pids), time.monotonic()
        self.readers.read(seconds, slow=slow, line=share * self.rate)
        took = time.monotonic() - began
        used = processes.cpu_seconds(self.running.pids) - cpu_s
        return Second(took_s=took, shares=[got / took / self.rate for got in self.readers.take()], cpu_s=used)

    def seconds(self, count: int) -> list[Second]:
        """Let the crowd read all that comes, second by second."""
        return [self.second() for _ in range(count)]

    def healthy(self, seconds: float) -> tuple[Second, dict[str, Any]]:
        """Let the crowd read all that comes, and return what a row says of it: also whether the readers were full."""
        reading_s = time.process_time()
        found = self.second(seconds)
        reading = (time.process_time() - reading_s) / found.took_s
        return found, {
            "before_percent": round(100 * found.median),
            "before_us": round(found.us),
            "readers_core_percent": round(100 * reading),
        }


@contextlib.contextmanager
def publishing(port: int, seconds: float) -> Iterator[float]:
    """Publish the stream for the time of a block, at most so long and some; its rate in bytes per second."""
    path = ensure_sample(HERE / ".cache", rendition_recipes(_RECORDED_S)["720"])
    command = [sys.executable, str(PROGRAMS / "recordings.py"), str(port), f"{STREAM}={path}"]
    command += ["--times", str(int(seconds / _RECORDED_S) + 2)]
    with processes.process(command, stdout=subprocess.PIPE) as child:
        processes.read_json(child)
        yield sum(len(tag.payload) for tag in FlvFile(path)) / _RECORDED_S


@contextlib.contextmanager
def serving(case: Case, seconds: float) -> Iterator[tuple[Running, int, float]]:
    """Run a case's server and publisher for the time of a block; the server, the viewers' port, the stream's rate."""
    settings = Settings(viewers=case.viewers, bit_rate=0, flush_s=case.flush_s)
    http = processes.free_port() if case.scheme == "http" else 0
    listens = f"127.0.0.1:{http}" if http else "off"
    start = rivals.served("--http", listens) if case.server == "flowctl" else rivals.nginx
    with start(settings) as running, publishing(running.port, seconds) as rate:
        yield running, http or running.port, rate


@contextlib.contextmanager
def scene(case: Case, seconds: float, crowd: Readers | None = None) -> Iterator[Scene]:
    """Set up a case with a crowd that plays, a new one unless it is given, for a block that takes at most so long."""
    processes.raise_open_files()
    sys.stderr.write(f"{case.label}: {case.viewers} viewers\n")
    with contextlib.ExitStack() as stack:
        if case.busy:
            stack.enter_context(busy(seconds))
        running, port, rate = stack.enter_context(serving(case, seconds + 30))
        time.sleep(HEAD_S)
        readers = crowd or stack.enter_context(Readers(case.viewers, case.scheme))
        readers.join(port, case.viewers / _JOIN_PER_S)
        readers.read(_SETTLE_S)
        if readers.closed == case.viewers:
            raise RuntimeError(f"{case.label} has let nobody in")
        yield Scene(running, readers, rate)


def busy(seconds: float) -> AbstractContextManager[subprocess.Popen[str]]:
    """Return a process that only computes, for the time of a block and at most some more than `seconds`."""
    text = f"import time\nend = time.monotonic() + {seconds + 60}\nwhile time.monotonic() < end: pass"
    return processes.process([sys.executable, "-c", text], env=dict(os.environ))


def present(servers: Sequence[str]) -> list[str]:
    """Return the servers that can run here; says which cannot, and why."""
    why = rivals.no_nginx()
    if "nginx-rtmp" in servers and why:
        sys.stderr.write(f"nginx-rtmp is left out: {why}\n")
    return [name for name in servers if name != "nginx-rtmp" or not why]


# -- what the benches share


def options(description: str | None, viewers: int) -> argparse.ArgumentParser:
    """Return the options that the benches of crowds share; `viewers` is the usual number."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--viewers", type=int, default=viewers)
    parser.add_argument("--servers", type=lambda text: text.split(","), default=SERVERS, metavar="NAME,...")
    parser.add_argument("--json", action="store_true")
    return parser


def percents(values: Sequence[float]) -> str:
    """Return shares as numbers in percent, one after the other."""
    return " ".join(f"{100 * value:.0f}" for value in values)


def back(medians: Sequence[float]) -> dict[str, Any]:
    """Return after how many seconds viewers had what they had before, and how many seconds later they had not.

    Back means 95 % of the stream's rate over three seconds, none of them counted for more than the rate: a second
    with a large key frame has more than its share, and the next one less. None: not at all.
    """
    capped = [min(value, 1.0) for value in medians]
    means = [statistics.fmean(capped[at : at + _BACK_S]) for at in range(len(capped) - _BACK_S + 1)]
    first = next((at for at, mean in enumerate(means) if mean >= _BACK), None)
    return {"back_s": first, "lost_again": first if first is None else sum(mean < _BACK for mean in means[first:])}
