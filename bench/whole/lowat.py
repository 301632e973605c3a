"""TCP_NOTSENT_LOWAT: does a viewer that keeps up ever meet EAGAIN, and how soon is a stalled one noticed?

For each value: 20 viewers of a 10 Mbit/s stream with key frames of 400 kB read as fast as they can; counted are the
viewers that met EAGAIN, and the times it happened, after they had joined. And one viewer of a 2.5 Mbit/s stream stops
reading; measured is how long it takes until its Sender is OVERLOADED. ``python bench lowat``.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import structlog

from flowctl.core.flow.state import SendState
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.sending.figures import SenderStatistics
from flowctl.core.server.admission import AdmissionLimits
from flowctl.live import LiveConfig, LiveServer
from kit import processes
from kit.machine import PROGRAMS

VALUES: Final = (16 * 1024, 32 * 1024, 64 * 1024, 128 * 1024, 256 * 1024, 512 * 1024, 0)


def build(lowat_bytes: int) -> LiveServer:
    """Return a live server with one value of the option."""
    admission = AdmissionLimits(connections_per_address=0, new_per_address_and_s=0)
    options = SocketOptions(notsent_lowat_bytes=lowat_bytes)
    return LiveServer(LiveConfig(admission=admission, socket_options=options))


def viewers(server: LiveServer) -> dict[int, SenderStatistics]:
    """Return the figures of all viewers, by the numbers of their connections."""
    return {viewer.number: viewer.connection.sender.statistics() for _, viewer in server.hub.viewing()}


def start(name: str, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run one of the helper scripts for the time of a block."""
    command = [sys.executable, str(PROGRAMS / name), *arguments]
    return processes.process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def healthy(lowat_bytes: int, seconds: float, settle_s: float) -> tuple[int, int, float]:
    """Return (viewers that met EAGAIN, how often in all, longest time in OVERLOADED) of 20 viewers at 10 Mbit/s."""
    with build(lowat_bytes) as server:
        port = str(server.address[1])
        url = f"rtmp://127.0.0.1:{port}/live/bench"
        stream = ("--bit-rate", "10000000", "--key-frame-bytes", "400000", "--duration", "60")
        crowd = ("--port", port, "--viewers", "20", "--window", str(seconds), "--settle", str(settle_s / 2))
        with start("publisher.py", url, *stream):
            time.sleep(1)
            with start("crowd.py", *crowd) as reading:
                processes.read_json(reading)
                before = viewers(server)
                processes.tell(reading, "go")
                time.sleep(seconds)
                after = viewers(server)
        edges = [
            found.transitions - (before[number].transitions if number in before else 0)
            for number, found in after.items()
        ]
        longest = max((found.longest_stall_s for found in after.values()), default=0.0)
        return sum(1 for item in edges if item), sum(edges) // 2, longest


def stalled(lowat_bytes: int, receive_buffer_bytes: int, settle_s: float) -> tuple[float | None, float]:
    """Return (seconds until OVERLOADED, bytes sent until then) for a viewer at 2.5 Mbit/s that stops reading.

    What the peer's own kernel takes in, nobody can see from here: with a receive buffer that the kernel has tuned up
    to megabytes while the viewer was fast, most of the time passes there. A small fixed buffer shows our own share.
    """
    with build(lowat_bytes) as server:
        port = str(server.address[1])
        url = f"rtmp://127.0.0.1:{port}/live/bench"
        crowd = ("--port", port, "--viewers", "1", "--settle", str(settle_s))
        with start("publisher.py", url, "--duration", "60"):
            time.sleep(1)
            with start("crowd.py", *crowd, "--receive-buffer", str(receive_buffer_bytes)) as reading:
                processes.read_json(reading)  # from here on it waits for a line that does not come, and does not read
                return _until_overloaded(server)


def _until_overloaded(server: LiveServer) -> tuple[float | None, float]:
    """Wait for the one viewer to be noticed, 20 s at most."""
    began = time.monotonic()
    (number,) = viewers(server)
    sent = viewers(server)[number].bytes_sent
    while time.monotonic() - began < 20:
        viewer = viewers(server)[number]
        if viewer.state >= SendState.OVERLOADED:
            return time.monotonic() - began, viewer.bytes_sent - sent
        time.sleep(0.01)
    return None, sent


QUICK: Final[dict[str, Any]] = {"seconds": 0.5, "values": (16 * 1024,), "settle_s": 0.5, "tuned": False}
"""Arguments of `run` for a look at whether it works."""


def run(
    seconds: float = 10.0, values: Sequence[int] = VALUES, settle_s: float = 4.0, *, tuned: bool = True
) -> list[dict[str, Any]]:
    """Measure values of TCP_NOTSENT_LOWAT."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    rows = []
    for value in values:
        met, times, longest = healthy(value, seconds, settle_s)
        took, sent = stalled(value, 32 * 1024, settle_s)
        tuned_took, tuned_sent = stalled(value, 0, settle_s) if tuned else (None, 0.0)
        rows.append(
            {
                "notsent_lowat_kib": value // 1024 or "kernel's",
                "healthy_viewers_that_met_eagain": f"{met}/20",
                "times": times,
                "longest_ms": round(longest * 1000),
                "stalled_noticed_after_s": None if took is None else round(took, 2),
                "stalled_bytes_hidden": round(sent),
                "noticed_after_s_if_peer_buffer_is_tuned": None if tuned_took is None else round(tuned_took, 2),
                "bytes_hidden_then": round(tuned_sent),
            }
        )
        print(f"# {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = run(arguments.seconds)
    if arguments.json:
        print(json.dumps(rows))
        return
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(str(value) for value in row.values()))


if __name__ == "__main__":
    main()
