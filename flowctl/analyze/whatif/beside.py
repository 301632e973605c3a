"""Trials in processes beside this one: Python runs on one core per process.

A process takes its viewers from standard input and writes each trial to standard output as soon as it is done, both as
pickles; it ends when its input does, so none is left behind. None begins a trial after the time that it was given.
"""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any, Final

from flowctl.analyze.whatif.trials import Draw, Rows, Trial, try_viewer
from flowctl.errors import FlowctlError
from flowctl.records.flight.whatif.types import Choice

LEAST_BESIDE_S: Final = 2_000.0
"""Seconds to be tried, times choices, a millisecond each at most, that are worth processes of 0.3 s."""
Work = tuple[int, Rows, Draw]
"""(number, stretches of a viewer, what follows)."""


def try_beside(
    work: Sequence[Work], choices: Sequence[Choice], budget_s: float, told: Callable[[int], None]
) -> dict[int, Trial | None]:
    """Return trials by number, as many as were done in the time; None: the viewer is damaged.

    They are made in order, in as many processes as there are cores, if that is worth it; at least the first is made.
    `told` is called with how many are done.
    """
    cores = len(os.sched_getaffinity(0))
    cost_s = sum(row["ended_us"] / 1e6 for _, rows, _ in work for row in rows if row["at_us"])
    shares = [work[number::cores] for number in range(cores)] if cost_s * len(choices) > LEAST_BESIDE_S else [work]
    found: dict[int, Trial | None] = {}

    def gather(share: Sequence[Work]) -> None:
        with_time = _beside if len(shares) > 1 else _tried
        for number, trial in with_time((share, choices, budget_s)):
            found[number] = trial
            told(len(found))

    with ThreadPoolExecutor(len(shares)) as pool:
        for _ in pool.map(gather, shares):
            pass
    return found


def _tried(work: tuple[Sequence[Work], Sequence[Choice], float]) -> Iterator[tuple[int, Trial | None]]:
    share, choices, budget_s = work
    until = time.monotonic() + budget_s
    for number, rows, draw in share:
        try:
            yield number, try_viewer(rows, choices, draw)
        except FlowctlError:
            yield number, None
        if until < inf and time.monotonic() >= until:
            return


def _beside(work: Any) -> Iterator[tuple[int, Trial | None]]:
    command = [sys.executable, "-m", "flowctl.analyze.whatif.beside"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: S603 - ours
        try:
            pickle.dump(work, process.stdin)  # type: ignore[arg-type]  # a pipe was asked for
            process.stdin.flush()  # type: ignore[union-attr]
            while (found := pickle.load(process.stdout)) is not None:  # type: ignore[arg-type]  # noqa: S301 - of ours
                yield found
        except (EOFError, OSError) as error:
            raise FlowctlError("a process that tries limits beside this one has ended") from error


def main() -> None:
    work = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the process that began this one
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(1)), daemon=True).start()
    for found in itertools.chain(_tried(work), (None,)):
        sys.stdout.buffer.write(pickle.dumps(found))
        sys.stdout.buffer.flush()
    os._exit(0)  # whatever standard input does


if __name__ == "__main__":
    main()
