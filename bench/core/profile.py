"""Profile: where the microseconds of Python go, per viewer and flush, in a fan-out whose transports do nothing.

Run ``python bench profile``. First the plain time of publishing a message and flushing it to a cohort, beside
a bare loop over the same ``send``; then the same under cProfile, by function. cProfile makes every call dearer, so its
shares are scaled to the plain time: they say where to look, the plain time says what it costs. Viewers that lag, each
at a place of its own in the log, are profiled apart from those that keep up.
"""

from __future__ import annotations

import argparse
import cProfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, Final

from core.sender import GROUP, LIMITS, MESSAGE, NullTransport
from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.policy import LivePolicy
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.sender import Sender
from flowctl.testing import ManualGroup, ManualHost
from kit.tables import table

VIEWERS: Final = 1000
MESSAGES_PER_FLUSH: Final = 3
"""Video at 30 and audio at 47 frames per second, flushed every 40 ms."""
_LEAST_SHARE: Final = 0.02
"""Functions below this share are summed up in one row."""


class Stalling(NullTransport):
    """A kernel that refuses every other write whole, so that its viewer never gets into the cohort for long."""

    def __init__(self) -> None:
        self._refuse = False

    def send(self, data: bytes, /) -> int:
        """Take all of it, or nothing."""
        self._turn()
        return super().send(data)

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        """Take all of them, or nothing."""
        self._turn()
        return super().sendmsg(buffers)

    def _turn(self) -> None:
        self._refuse = not self._refuse
        if self._refuse:
            raise BlockingIOError


class Stage:
    """A log and its viewers."""

    def __init__(self, viewers: int, transport: type[NullTransport]) -> None:
        self.group = ManualGroup()
        self.log = StreamLog()
        self.fanout = Fanout(self.log, self.group, flush_interval_s=0.04)
        self.hosts: list[ManualHost] = []
        self._number = 0
        for _ in range(viewers):
            host = ManualHost(self.group)
            host.sender = Sender(host, transport(), limits=LIMITS, policy=LivePolicy(), deferred=True)
            host.sender.follow(self.fanout)
            self.hosts.append(host)
        self.group.run(1.0)

    def flush(self) -> None:
        """Publish what comes in 40 ms, and let the group do what it has to."""
        for _ in range(MESSAGES_PER_FLUSH):
            kind = MessageClass.INTER if self._number % GROUP else MessageClass.KEY
            self.log.append(MESSAGE, kind, self.group.now())
            self._number += 1
        self.group.run(0.04)

    def refused(self) -> None:
        """Do the same where every other write is refused: those that wait are told that they may write again."""
        self.flush()
        for host in self.hosts:
            host.poll_writable()
        self.group.run(0.0)


def bare(viewers: int, flushes: int) -> float:
    """Return seconds per viewer and flush of a bare loop over the sends."""
    sends = [NullTransport().send for _ in range(viewers)]
    data = MESSAGE * MESSAGES_PER_FLUSH
    began = time.perf_counter()
    for _ in range(flushes):
        for send in sends:
            if send(data) < len(data):
                raise AssertionError("a null transport takes everything")
    return (time.perf_counter() - began) / flushes / viewers


def timed(step: Callable[[], None], flushes: int, repeat: int) -> float:
    """Return seconds per flush, the least of several measurements."""
    best = float("inf")
    for _ in range(repeat):
        began = time.perf_counter()
        for _ in range(flushes):
            step()
        best = min(best, (time.perf_counter() - began) / flushes)
    return best


def shares(step: Callable[[], None], flushes: int) -> list[tuple[str, float, float]]:
    """Profile flushes and return (function, calls per flush, share of the time in itself), largest first."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(flushes):
        step()
    profile.disable()
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for entry in profile.getstats():
        where = found[_place(entry.code)]
        where[0] += entry.callcount / flushes
        where[1] += entry.inlinetime
    total = sum(itself for _, itself in found.values())
    rows = [(name, calls, itself / total) for name, (calls, itself) in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def _place(code: CodeType | str) -> str:
    """Return a function as a reader looks for it: module and name."""
    if isinstance(code, str):
        return code.strip("<>").replace("built-in method ", "").replace("method ", "")
    return f"{Path(code.co_filename).stem}.{code.co_name}"


def rows_of(case: str, step: Callable[[], None], viewers: int, flushes: int, repeat: int) -> list[dict[str, Any]]:
    """Return the rows of one case: the whole, then function by function."""
    whole = timed(step, flushes, repeat) / viewers
    loop = min(bare(viewers, flushes) for _ in range(repeat))
    rows: list[dict[str, Any]] = [
        {
            "case": case,
            "function": "all",
            "calls per flush": None,
            "share": 1.0,
            "us per viewer and flush": whole * 1e6,
        },
        {
            "case": case,
            "function": "bare loop of sends beside it",
            "calls per flush": viewers,
            "share": loop / whole,
            "us per viewer and flush": loop * 1e6,
        },
    ]
    rest = 0.0
    for function, calls, share in shares(step, max(flushes // 4, 1)):
        if share < _LEAST_SHARE:
            rest += share
            continue
        rows.append(_row(case, function, calls, share, whole))
    return [*rows, _row(case, "the rest", None, rest, whole)]


def _row(case: str, function: str, calls: float | None, share: float, whole_s: float) -> dict[str, Any]:
    cost = round(share * whole_s * 1e6, 4)
    return {
        "case": case,
        "function": function,
        "calls per flush": calls,
        "share": share,
        "us per viewer and flush": cost,
    }


QUICK: Final[dict[str, Any]] = {"quick": True}
"""Arguments of `run` for a look at whether it works, in a second or so."""


def run(*, quick: bool = False, viewers: int = VIEWERS) -> list[dict[str, Any]]:
    """Profile viewers that keep up, and viewers that are refused every other write."""
    flushes, repeat = (20, 1) if quick else (200, 5)
    rows = []
    for case, transport, kind in (("keeps up", NullTransport, "flush"), ("refused", Stalling, "refused")):
        stage = Stage(viewers, transport)
        step = getattr(stage, kind)
        rows += rows_of(case, step, viewers, flushes if kind == "flush" else max(flushes // 10, 4), repeat)
    return rows


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with shares as percentages."""
    return [{**row, "share": f"{row['share']:.0%}"} for row in rows]


def document(rows: list[dict[str, Any]], images: Path) -> str:
    """Return the part of the document: the table."""
    del images
    return table(shown(rows))


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--viewers", type=int, default=VIEWERS)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    print(table(shown(run(quick=arguments.quick, viewers=max(arguments.viewers, 1)))))


if __name__ == "__main__":
    main()
