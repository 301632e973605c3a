"""The viewers that measure: a few of them in a process of their own, so that the crowd's work does not delay them.

The delay of a frame is the time from the stamp in it to its arrival at the receiving socket, as the kernel noted it
(SO_TIMESTAMPNS): a reader that is late itself does not make the server look late. How late it was, from the arrival to
the moment at which it read, is its lag, and is reported beside the delay. One read may return several segments and has
the arrival of the last of them, so a lagging reader makes delays look longer, never shorter.

Prints one JSON line when all play, waits for a line on its standard input, and prints its figures after the window.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import struct
import sys
import time
from typing import Any, Final

from flowctl.wire.media.stamp import read_stamp
from flowctl.wire.rtmp.client.session import ClientSession
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.wire import TYPE_VIDEO, Message

_TIMESTAMPS: Final = 35
"""SO_TIMESTAMPNS of Linux, which the socket module has no name for; its control message has the same number."""
_TIMESPEC: Final = struct.Struct("@qq")
_READ_BYTES: Final = 1 << 20
_CONTROL_BYTES: Final = socket.CMSG_SPACE(_TIMESPEC.size)
_NICENESS: Final = -5
"""Where the system allows it: twenty viewers cost little, and should not wait for the crowd."""


class MeasuringViewer:
    """One connection whose frames are counted and timed."""

    def __init__(self, url: str, source: str) -> None:
        self.session = ClientSession(ClientSessionConfig())
        self.session.connect(url)
        self.session.play()
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, _TIMESTAMPS, 1)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.bind((source, 0))
        self.sock.connect((self.session.url.host, self.session.url.port))
        self.sock.sendall(self.session.data_to_send())
        self.frames: list[tuple[int, float]] = []  # number and delay in ms
        self.lags_ms: list[float] = []
        self.bytes = 0

    def readable(self) -> None:
        """Read what there is."""
        data, control, _, _ = self.sock.recvmsg(_READ_BYTES, _CONTROL_BYTES)
        monotonic_ns, wall_ns = time.monotonic_ns(), time.time_ns()
        if not data:
            raise ConnectionError("the server closed the connection")
        self.bytes += len(data)
        lag_ns = 0
        for level, kind, value in control:
            if level == socket.SOL_SOCKET and kind == _TIMESTAMPS and len(value) >= _TIMESPEC.size:
                seconds, nanoseconds = _TIMESPEC.unpack(value[: _TIMESPEC.size])
                lag_ns = max(wall_ns - seconds * 1_000_000_000 - nanoseconds, 0)
                self.lags_ms.append(lag_ns / 1e6)
        arrived_us = (monotonic_ns - lag_ns) // 1000  # the publisher stamps with the monotonic clock
        for event in self.session.receive(data, time.monotonic()):
            if isinstance(event, Message) and event.type_id == TYPE_VIDEO:
                found = read_stamp(event.payload)
                if found is not None:
                    self.frames.append((found[0], (arrived_us - found[1]) / 1000))
        reply = self.session.data_to_send()
        if reply:
            self.sock.sendall(reply)

    def begin(self) -> None:
        """Forget what came before the window."""
        self.frames.clear()
        self.lags_ms.clear()
        self.bytes = 0

    @property
    def missing(self) -> int:
        """Frames of the stream between the first and the last that came, and did not come."""
        return self.frames[-1][0] - self.frames[0][0] + 1 - len(self.frames) if self.frames else 0


class Readers:
    """All of them, on one epoll."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self.viewers: dict[int, MeasuringViewer] = {}
        self.lost = 0

    def add(self, viewer: MeasuringViewer) -> None:
        """Read from `viewer` from now on."""
        self.viewers[viewer.sock.fileno()] = viewer
        self._poll.register(viewer.sock, select.EPOLLIN)

    def run(self, until: float) -> None:
        """Read until this monotonic time."""
        while (left := until - time.monotonic()) > 0:
            for fd, _ in self._poll.poll(left):
                viewer = self.viewers[fd]
                try:
                    viewer.readable()
                except OSError:
                    self._poll.unregister(fd)
                    viewer.sock.close()
                    del self.viewers[fd]
                    self.lost += 1


def percentile(ordered: list[float], share: float) -> float | None:
    """Return the value below which this share of a sorted list lies. None: it is empty."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else None


def drift_ms(viewers: list[MeasuringViewer]) -> float:
    """Return by how much the median delay of the last third of the window is above that of the first."""
    firsts: list[float] = []
    lasts: list[float] = []
    for viewer in viewers:
        third = len(viewer.frames) // 3
        firsts += [delay for _, delay in viewer.frames[:third]]
        lasts += [delay for _, delay in viewer.frames[-third:]] if third else []
    first, last = percentile(sorted(firsts), 0.5), percentile(sorted(lasts), 0.5)
    return last - first if first is not None and last is not None else 0.0


def figures(readers: Readers, took_s: float) -> dict[str, Any]:
    """Return what was measured."""
    viewers = list(readers.viewers.values())
    delays = sorted(delay for viewer in viewers for _, delay in viewer.frames)
    lags = sorted(lag for viewer in viewers for lag in viewer.lags_ms)
    return {
        "viewers": len(viewers),
        "lost": readers.lost,
        "frames": len(delays),
        "missing": sum(viewer.missing for viewer in viewers),
        "silent": sum(not viewer.frames for viewer in viewers),
        "bytes_per_s": sum(viewer.bytes for viewer in viewers) / max(len(viewers), 1) / took_s,
        "delay_p50_ms": percentile(delays, 0.5),
        "delay_p99_ms": percentile(delays, 0.99),
        "delay_max_ms": percentile(delays, 1.0),
        "delay_drift_ms": drift_ms(viewers),
        "lag_p50_ms": percentile(lags, 0.5),
        "lag_p99_ms": percentile(lags, 0.99),
    }


def main() -> None:
    """Connect, wait for the word, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--streams", type=int, default=0, help="spread over URL-0 to URL-n instead of URL")
    parser.add_argument("--window", type=float, default=8.0)
    parser.add_argument("--ready-within", type=float, default=20.0, help="seconds to wait for the first frames")
    arguments = parser.parse_args()
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    readers = Readers()
    for index in range(arguments.viewers):
        url = (
            f"{arguments.url}-{index * arguments.streams // arguments.viewers}" if arguments.streams else arguments.url
        )
        readers.add(MeasuringViewer(url, f"127.0.200.{1 + index % 250}"))
    end = time.monotonic() + arguments.ready_within
    while time.monotonic() < end and not all(viewer.frames for viewer in readers.viewers.values()):
        readers.run(time.monotonic() + 0.1)
    print(json.dumps({"playing": sum(bool(viewer.frames) for viewer in readers.viewers.values())}), flush=True)
    word = select.poll()
    word.register(sys.stdin, select.POLLIN)
    while not word.poll(0):  # go on reading: a viewer that waits would be a slow one
        readers.run(time.monotonic() + 0.02)
    for viewer in readers.viewers.values():
        viewer.begin()
    began = time.monotonic()
    readers.run(began + arguments.window)
    print(json.dumps(figures(readers, time.monotonic() - began)), flush=True)


if __name__ == "__main__":
    main()
