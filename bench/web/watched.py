"""Watching: what metrics, lists of connections and events over HTTP cost the fan-out of a server, beside nobody asking.

Run ``python bench watched``. One stream of 500 kbit/s, one poll group, the admin surface on a thread of the same
process. *watched* is a scrape of ``/metrics`` and a page of 100 connections each second, and one listener to events:
fifteen times what Prometheus asks for. The two ways take turns for some seconds each while the viewers stay, so that
whatever else the machine does meets both. What counts is how long rounds of the fan-out take, from the first viewer to
the last.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, Final

from flowctl.core.fanout.pacing import RoundMeter
from flowctl.core.server.admission import AdmissionLimits
from flowctl.live.admin.listener import admin_of
from flowctl.live.config import LiveConfig
from flowctl.live.server import LiveServer
from kit.machine import PROGRAMS
from kit.processes import process, raise_open_files, read_json, tell
from kit.tables import table

COUNTS: Final = (1000, 3000)
QUICK: Final[dict[str, Any]] = {"quick": True}
_BIT_RATE: Final = 500_000
_EVERY_S: Final = 1.0
_METRICS: Final = "/metrics"
_LIST: Final = "/api/v1/connections?limit=100"


class _Rounds:
    """How long rounds took, in ms, noted where the fan-out measures them itself."""

    def __init__(self) -> None:
        self.took_ms: list[float] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note all rounds within this context."""
        usual = RoundMeter.count_round, RoundMeter.count_short_round
        for name, method in zip(("count_round", "count_short_round"), usual, strict=True):

            def noting(meter: RoundMeter, took_s: float, method: Any = method) -> None:
                self.took_ms.append(took_s * 1000)
                method(meter, took_s)

            setattr(RoundMeter, name, noting)
        try:
            yield
        finally:
            RoundMeter.count_round, RoundMeter.count_short_round = usual  # type: ignore[method-assign]  # as they were

    def taken(self) -> list[float]:
        """Return what was noted since the last call."""
        found, self.took_ms = self.took_ms, []
        return found


class _Watch:
    """Asks each second within a context; keeps how long the answers took."""

    def __init__(self, base: str) -> None:
        self.took_ms: dict[str, list[float]] = {_METRICS: [], _LIST: []}
        self._base = base.rstrip("/")
        self._over = threading.Event()

    def _ask(self) -> None:
        with urllib.request.urlopen(f"{self._base}/api/v1/events", timeout=60):
            while not self._over.wait(_EVERY_S):
                for path, took_ms in self.took_ms.items():
                    began = time.perf_counter()
                    with urllib.request.urlopen(self._base + path, timeout=60) as answer:
                        answer.read()
                    took_ms.append((time.perf_counter() - began) * 1000)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Ask within this context."""
        self._over.clear()
        thread = threading.Thread(target=self._ask, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()


def measure(viewers: int, window_s: float, turns: int) -> list[dict[str, Any]]:
    """Return the figures of both ways."""
    config = LiveConfig(
        admission=AdmissionLimits(connections_per_address=0, new_per_address_and_s=0), admin="127.0.0.1:0"
    )
    rounds, pipes = _Rounds(), {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    found: dict[str, list[float]] = {"nobody asks": [], "watched": []}
    used_s: dict[str, float] = dict.fromkeys(found, 0.0)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(LiveServer(config))
        listener = admin_of(server)
        listener.start()
        stack.callback(listener.stop, 5.0)
        stack.enter_context(rounds.noted())
        port, whole_s = server.address[1], (window_s * len(found) * turns)
        publish = [sys.executable, str(PROGRAMS / "publisher.py"), f"rtmp://127.0.0.1:{port}/live/bench"]
        publish += ["--bit-rate", str(_BIT_RATE), "--duration", str(whole_s + 120)]
        stack.enter_context(process(publish, stderr=subprocess.DEVNULL))
        time.sleep(1.0)
        crowd = [sys.executable, str(PROGRAMS / "crowd.py"), "--port", str(port), "--viewers", str(viewers)]
        crowd += ["--window", str(whole_s + 20), "--measure-every", str(viewers)]
        readers: Any = stack.enter_context(process(crowd, **pipes))
        read_json(readers)
        tell(readers, "go")
        watch = _Watch(listener.bound[0])
        time.sleep(2.0)
        for _ in range(turns):
            for way, times in found.items():
                rounds.taken()
                began_s = time.process_time()
                with watch.watching() if way == "watched" else contextlib.nullcontext():
                    time.sleep(window_s)
                used_s[way] += time.process_time() - began_s
                times.extend(rounds.taken())
    rows = []
    for way, times in found.items():
        cut = statistics.quantiles(times, n=100)
        row = {"viewers": viewers, "way": way, "rounds": len(times), "round p50 ms": cut[49], "round p99 ms": cut[98]}
        row |= {"longest ms": max(times), "core %": used_s[way] / (window_s * turns) * 100}
        took = watch.took_ms if way == "watched" else {_METRICS: [0.0], _LIST: [0.0]}
        row |= {"metrics ms": statistics.median(took[_METRICS]), "list ms": statistics.median(took[_LIST])}
        rows.append({name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()})
    return rows


def run(
    *, quick: bool = False, counts: tuple[int, ...] = COUNTS, window_s: float = 5.0, turns: int = 6
) -> list[dict[str, Any]]:
    """Measure all counts of viewers."""
    raise_open_files()
    counts, window_s, turns = ((20,), 2.5, 1) if quick else (counts, window_s, turns)
    return [row for viewers in counts for row in measure(viewers, window_s, turns)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--window", type=float, default=5.0, help="measured seconds per turn")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--viewers", type=int, nargs="*", default=COUNTS)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    print(table(run(quick=given.quick, counts=tuple(given.viewers), window_s=given.window, turns=given.turns)))


if __name__ == "__main__":
    main()
