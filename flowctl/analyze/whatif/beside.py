"""Trials in processes beside this one: Python runs on one core per process.

A process takes its viewers from standard input and writes their sums to standard output, both as pickles; it ends when
its input does, so none is left behind.
"""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from flowctl.analyze.whatif.trials import PEAK, Sums, tally
from flowctl.errors import FlowctlError
from flowctl.records.flight.whatif.types import Choice

LEAST_BESIDE_S: Final = 2_000.0
"""Seconds to be tried, times choices, a millisecond each at most, that are worth processes of 0.3 s."""


class Tried(NamedTuple):
    """A viewer that is tried."""

    stratum: int
    cost_s: float  # how many seconds are tried
    rows: Sequence[Mapping[str, Any]]


def tally_beside(
    viewers: Sequence[Tried], choices: Sequence[Choice], extend_s: float, repeat: int = 0
) -> dict[int, Sums]:
    """Return the sums of viewers by stratum, made in as many processes as there are cores, if that is worth it."""
    shares: list[list[Tried]] = [[] for _ in os.sched_getaffinity(0)]
    if sum(viewer.cost_s for viewer in viewers) * len(choices) < LEAST_BESIDE_S:
        shares = shares[:1]
    for viewer in sorted(viewers, key=lambda viewer: -viewer.cost_s):
        min(shares, key=lambda share: sum(other.cost_s for other in share)).append(viewer)
    work = [(share, choices, extend_s, repeat) for share in shares if share]
    if len(work) == 1:
        return _tallied(*work[0])
    sums: dict[int, Sums] = {}
    with ThreadPoolExecutor(max(len(work), 1)) as pool:
        for number, found in itertools.chain.from_iterable(part.items() for part in pool.map(_beside, work)):
            total = sums.setdefault(number, {})
            for key, value in found.items():
                so_far = total.get(key, 0)
                total[key] = max(so_far, value) if key[1] == PEAK else so_far + value
    return sums


def _tallied(viewers: Sequence[Tried], choices: Sequence[Choice], extend_s: float, repeat: int) -> dict[int, Sums]:
    groups = itertools.groupby(sorted(viewers, key=lambda viewer: viewer.stratum), key=lambda viewer: viewer.stratum)
    return {number: tally((viewer.rows for viewer in group), choices, extend_s, repeat) for number, group in groups}


def _beside(work: Any) -> dict[int, Sums]:
    command = [sys.executable, "-m", "flowctl.analyze.whatif.beside"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: S603 - ours
        try:
            pickle.dump(work, process.stdin)  # type: ignore[arg-type]  # a pipe was asked for
            process.stdin.flush()  # type: ignore[union-attr]
            found: dict[int, Sums] = pickle.load(process.stdout)  # type: ignore[arg-type]  # noqa: S301 - of ours
        except (EOFError, OSError) as error:
            raise FlowctlError("a process that tries limits beside this one has ended") from error
    return found


def main() -> None:
    work = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the process that began this one
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(1)), daemon=True).start()
    found = pickle.dumps(_tallied(*work))
    sys.stdout.buffer.write(found)
    sys.stdout.buffer.flush()
    os._exit(0)  # whatever standard input does


if __name__ == "__main__":
    main()
