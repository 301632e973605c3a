"""One measurement: a server, a publisher, a crowd, the viewers that measure, and what the machine did meanwhile.

The window begins when everybody plays. The server's processor time is user and system time of its processes; its
memory is what it grew by from when the publisher had filled its GOP cache to the end of the window.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any, Final

from compare.rivals import Contender, Running, Settings
from kit import processes
from kit.machine import PROGRAMS

IDLE_SHARE: Final = 0.03
"""Below this share of idle time the cores were full, and whose delay it was cannot be told."""
BUSY_SHARE: Final = 0.95
"""Above this share of one core a process of one thread could not do more."""
LAG_MS: Final = 20.0
"""A reader that is later than this measures itself."""
DRIFT_MS: Final = 20.0
"""A delay that grows by more than this within the window has no limit."""
DELIVERED_SHARE: Final = 0.97
"""Less than this share of the stream's bytes in the window is too little, key frames at its edges considered."""
CAUGHT_UP_SHARE: Final = 1.08
"""More than this share is work that was left from before the window."""


def doubts(figures: dict[str, Any]) -> list[str]:
    """Return why a measurement shows what was full rather than what the server costs; empty for a sound one."""
    found = []
    if figures["idle_share"] < IDLE_SHARE:
        found.append(f"machine: {figures['idle_share']:.0%} idle")
    if figures["crowd_cpu_share"] > BUSY_SHARE:
        found.append("machine: the crowd filled a core")
    if (figures.get("lag_p99_ms") or 0) > LAG_MS:
        found.append(f"machine: the reader lagged {figures['lag_p99_ms']:.0f} ms")
    if figures["server_cpu_share"] > BUSY_SHARE:
        found.append("server: filled a core")
    if figures.get("missing"):
        found.append("server: frames missing")
    if figures.get("lost"):
        found.append("server: viewers lost")
    if (figures.get("delay_drift_ms") or 0) > DRIFT_MS:
        found.append(f"server: delay grew by {figures['delay_drift_ms']:.0f} ms")
    if not DELIVERED_SHARE <= figures["delivered_share"] <= CAUGHT_UP_SHARE:
        found.append(f"server: delivered {figures['delivered_share']:.0%}")
    return found


def measure(contender: Contender, settings: Settings, *, window_s: float, measured: int) -> dict[str, Any]:
    """Run `contender` once and return its figures."""
    with contender.start(settings) as running:
        if contender.bare:
            return _watch(running, settings, window_s, 0)
        publish = [sys.executable, str(PROGRAMS / "publisher.py"), _url(running)]
        publish += ["--bit-rate", str(settings.bit_rate), "--duration", str(settings.duration_s)]
        with processes.process(publish, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            time.sleep(settings.settle_s)
            return _watch(running, settings, window_s, min(measured, settings.viewers - 1))


def _url(running: Running) -> str:
    return f"rtmp://127.0.0.1:{running.port}/live/bench"


def _watch(running: Running, settings: Settings, window_s: float, measured: int) -> dict[str, Any]:
    """Send the viewers to a server and measure it meanwhile."""
    base = processes.resident_bytes(running.pids)
    crowd = [sys.executable, str(PROGRAMS / "crowd.py"), "--port", str(running.port), "--window", str(window_s)]
    crowd += ["--viewers", str(settings.viewers - measured), "--measure-every", str(settings.viewers)]
    crowd += ["--nap", str(settings.nap_s), "--settle", str(settings.settle_s)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    if not measured:
        with processes.process([*crowd, "--bare"], **pipes) as child:
            processes.read_json(child)
            return _window(running, settings, window_s, base, [child])
    reader = [sys.executable, "-m", "compare.reader", _url(running), "--viewers", str(measured)]
    reader += ["--window", str(window_s)]
    with processes.process(reader, **pipes) as measuring:
        playing = processes.read_json(measuring)["playing"]
        with processes.process(crowd, **pipes) as child:
            playing += processes.read_json(child)["playing"]
            return {"playing": playing, **_window(running, settings, window_s, base, [child, measuring])}


def _window(
    running: Running, settings: Settings, window_s: float, base: int, children: list[subprocess.Popen[str]]
) -> dict[str, Any]:
    """Let the window pass and put the figures of all processes together. The first child is the crowd."""
    crowd_pid = children[0].pid
    for child in children:
        processes.tell(child, "go")
    rounds = running.ask() if running.ask else {}
    cpu, crowd_cpu = processes.cpu_seconds(running.pids), processes.cpu_seconds([crowd_pid])
    idle, began = processes.idle_seconds(), time.monotonic()
    time.sleep(max(window_s - 0.5, window_s / 2))
    used, crowd_used = processes.cpu_seconds(running.pids) - cpu, processes.cpu_seconds([crowd_pid]) - crowd_cpu
    idled, took = processes.idle_seconds() - idle, time.monotonic() - began
    memory = processes.resident_bytes(running.pids) - base
    rounds_after = running.ask() if running.ask else {}
    crowd, *readers = [processes.read_json(child) for child in children]
    read = readers[0] if readers else {"viewers": 0, "lost": 0}
    viewers = crowd["viewers"] + read["viewers"]
    if not viewers:
        raise RuntimeError("the server has lost all its viewers")
    figures = {
        "viewers_left": viewers,
        "lost": crowd["lost"] + read["lost"],
        "cpu_us_per_viewer_s": used / took / viewers * 1e6,
        "memory_kb_per_viewer": memory / viewers / 1000,
        "missing": read.get("missing"),
        "delivered_share": crowd["bytes_per_viewer_and_s"] * 8 / settings.bit_rate,
        "server_cpu_share": used / took,
        "crowd_cpu_share": crowd_used / took,
        "idle_share": idled / took / (os.cpu_count() or 1),
        "rounds_per_s": _rounds_per_s(rounds, rounds_after),
        "longest_round_s": rounds_after.get("longest_round_s"),
    }
    delays = ("delay_p50_ms", "delay_p99_ms", "delay_max_ms", "delay_drift_ms", "lag_p50_ms", "lag_p99_ms", "frames")
    figures |= {name: read.get(name) for name in delays}
    return {**figures, "doubts": doubts(figures)}


def _rounds_per_s(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """Return flush rounds per second of all fan-outs, None for a server that does not say."""
    if "rounds" not in before or "rounds" not in after:
        return None
    return float((after["rounds"] - before["rounds"]) / max(after["at_s"] - before["at_s"], 1e-9))
