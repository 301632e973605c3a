"""Viewers behind lines, for the benches: each reads one stream at the pace of its line, records and measures it.

Run in a process of its own: ``bench/programs/lines.py`` reads one JSON line with what is to be done (see `Plan`), and
prints one with a row per viewer when it is done. A line paces everything from the first octet on. What counts is the
window at the end of the run; delays are those against the moment at which a message was due at the publisher.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import select
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from flowctl.core.flow.state import MessageClass
from flowctl.flv import FlvWriter
from flowctl.load.peers.paces import Trace
from flowctl.wire.client.throttle import SLOW_SEGMENT_BYTES, Constant, Rate, RatePace, receive_buffer
from flowctl.wire.rtmp.client.session import ClientSession
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.media.size import read_size
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_VIDEO, Message

_CONFIG: Final = ClientSessionConfig(limits=WireLimits())
_UNLIMITED: Final = 1 << 30
_READ_MOST: Final = 256 * 1024
PICTURE_CLASSES: Final = frozenset({MessageClass.KEY, MessageClass.INTER, MessageClass.DISPOSABLE})


@dataclass(frozen=True, kw_only=True)
class Order:
    """One viewer.

    Args:
        line: name of the line, for the row; "" reads as fast as it comes.
        steps: (second, bit/s) of the line, from 0 on; one is a constant rate. Empty: no limit.
        period_s: after which several steps begin again.
        path: what it gets, as FLV. "" records nothing.
    """

    stream: str
    line: str
    steps: list[list[float]]
    period_s: float = 0.0
    path: str = ""
    source: str = ""  # address to come from; then the line is a router's, and what it brings is read at once


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be done.

    Args:
        began: moment of the monotonic clock at which timestamp 0 was due.
        each: whether a row has every message of the whole run too: pictures as (arrival, due, size, whether it is a key
            frame), sound as (arrival, due), in seconds since `began`.
    """

    port: int
    began: float
    warm_s: float
    window_s: float
    orders: list[Order]
    each: bool = False
    host: str = "127.0.0.1"


class LineViewer:
    """One connection that plays behind its line."""

    def __init__(self, order: Order, plan: Plan, number: int) -> None:
        self.order = order
        self._plan = plan
        steps = [(at_s, rate) for at_s, rate in order.steps]
        self.rate: Rate = Trace(steps, order.period_s) if len(steps) > 1 else Constant(steps[0][1] if steps else 0.0)
        self.sock = sock = socket.socket()
        paced = bool(order.steps) and not order.source
        if paced:
            mean = self.rate.carried_bits(60.0) / 60.0
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer(round(mean)))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SLOW_SEGMENT_BYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((order.source or f"127.0.{4 + number // 250}.{1 + number % 250}", 0))
        sock.connect((plan.host, plan.port))
        self._session = ClientSession(_CONFIG)
        self._session.connect(f"rtmp://{plan.host}:{plan.port}/live/{order.stream}")
        self._session.play()
        sock.sendall(self._session.data_to_send())
        sock.setblocking(False)
        self.started = time.monotonic()
        self.pace = RatePace(self.rate, self.started) if paced else None
        self._file: IO[bytes] | None = Path(order.path).open("wb") if order.path else None  # noqa: SIM115 - `end` closes it
        self._writer = FlvWriter(self._file) if self._file is not None else None
        self.closed = ""
        self.bytes = 0
        self.read_at_window = 0
        self.size = ""  # of the pictures, by the last sequence header
        self.pictures: list[tuple[float, float, str, bool]] = []  # as in `Plan.each`
        self.audio: list[tuple[float, float]] = []

    def read(self, now: float) -> bool:
        """Read what the line allows; return whether there may be more at once."""
        pace = self.pace
        allowed = pace.allowance(now) if pace is not None else _UNLIMITED
        if not allowed:
            return False
        try:
            data = self.sock.recv(min(allowed, _READ_MOST))
        except BlockingIOError:
            if pace is not None:
                pace.note_read(0, now)
            return True
        if not data:
            raise ConnectionError("the server closed the connection")
        self.bytes += len(data)
        for event in self._session.receive(data, now):
            if isinstance(event, Message):
                self._take(event, now)
        reply = self._session.data_to_send()
        if reply:
            self.sock.send(reply)  # some octets now and then: they always fit
        if pace is None:
            return True
        pace.note_read(len(data), now)
        return bool(pace.allowance(now))

    def _take(self, message: Message, now: float) -> None:
        if self._writer is not None and message.type_id in (TYPE_AUDIO, TYPE_VIDEO):
            self._writer.write(message.type_id, message.timestamp, message.payload)
        info = inspect(message.type_id, message.payload)
        kind, since, due_s = info.message_class, now - self._plan.began, message.timestamp / 1000
        if kind in PICTURE_CLASSES:
            self.pictures.append((since, due_s, self.size, kind is MessageClass.KEY))
        elif kind is MessageClass.AUDIO:
            self.audio.append((since, due_s))
        elif info.kind == "video" and info.packet == "sequence_header":
            size = read_size(message.payload)
            self.size = "x".join(map(str, size)) if size else ""

    def end(self) -> None:
        """Close socket and file."""
        self.sock.close()
        if self._file is not None:
            self._file.close()

    def row(self, begin: float, end: float) -> dict[str, Any]:
        begin_s, end_s = begin - self._plan.began, end - self._plan.began
        seen = [(at, due_s) for at, due_s, _, _ in self.pictures if begin_s <= at < end_s]
        arrivals = [begin_s, *(at for at, _ in seen), end_s]
        delays = sorted(at - due_s for at, due_s in seen)
        carried = self.rate.carried_bits
        could = carried(end - self.started) - carried(begin - self.started) if self.order.steps else 0.0
        row = {
            "stream": self.order.stream,
            "line": self.order.line,
            "path": self.order.path,
            "bytes": self.bytes - self.read_at_window,
            "line_bytes": could / 8,
            "pictures": len(seen),
            "audio": sum(begin_s <= at < end_s for at, _ in self.audio),
            "delay_p50_s": _part(delays, 0.5),
            "delay_p95_s": _part(delays, 0.95),
            "freeze_s": max(later - earlier for earlier, later in itertools.pairwise(arrivals)),
            "closed": self.closed,
        }
        if self._plan.each:
            row |= {
                "each_picture": self.pictures,
                "each_sound": self.audio,
                "started_s": self.started - self._plan.began,
            }
        return row


def _part(values: list[float], share: float) -> float | None:
    return values[min(int(len(values) * share), len(values) - 1)] if values else None


class Crowd:
    """All viewers of a process, on one epoll object and one heap of times."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._poll = select.epoll()
        self._viewers: dict[int, LineViewer] = {}
        self._timers: list[tuple[float, int]] = []
        self.late_s = 0.0
        """How late a viewer was woken at most."""

    def run(self) -> list[dict[str, Any]]:
        """Let everybody come, warm up and play; return a row for each."""
        for number, order in enumerate(self._plan.orders):
            viewer = LineViewer(order, self._plan, number)
            self._viewers[viewer.sock.fileno()] = viewer
            self._poll.register(viewer.sock, select.EPOLLIN)
            self._pump(time.monotonic() + 0.02)
        self._pump(time.monotonic() + self._plan.warm_s)
        begin = time.monotonic()
        self.late_s = 0.0
        for viewer in self._viewers.values():
            viewer.read_at_window = viewer.bytes
        self._pump(begin + self._plan.window_s)
        end = time.monotonic()
        for viewer in self._viewers.values():
            viewer.end()
        return [viewer.row(begin, end) for viewer in self._viewers.values()]

    def _pump(self, until: float) -> None:
        timers = self._timers
        while (now := time.monotonic()) < until:
            wake_at = min(timers[0][0], until) if timers else until
            for fd, _ in self._poll.poll(max(wake_at - now, 0.0)):
                self._serve(fd)
            now = time.monotonic()
            while timers and timers[0][0] <= now:
                when, fd = heapq.heappop(timers)
                self.late_s = max(self.late_s, now - when)
                self._serve(fd, resting=True)

    def _serve(self, fd: int, *, resting: bool = False) -> None:
        """Let a viewer read; rest it when its line allows no more."""
        viewer = self._viewers[fd]
        now = time.monotonic()
        try:
            more = viewer.read(now)
        except Exception as error:  # noqa: BLE001 - how one viewer ends is a figure of its row
            viewer.closed = str(error) or type(error).__name__
            if not resting:
                self._poll.unregister(fd)
            return
        if more and resting:
            self._poll.register(fd, select.EPOLLIN)
        elif not more:
            if not resting:
                self._poll.unregister(fd)
            if viewer.pace is not None:
                heapq.heappush(self._timers, (viewer.pace.wake_at(now), fd))


def main() -> None:
    """Do what standard input asks for."""
    found = json.loads(sys.stdin.readline())
    plan = Plan(**{**found, "orders": [Order(**order) for order in found["orders"]]})
    crowd = Crowd(plan)
    rows = crowd.run()
    print(json.dumps({"rows": rows, "late_s": crowd.late_s}), flush=True)


def as_json(plan: Plan) -> str:
    """Return a plan as the line that `main` reads."""
    return json.dumps(dataclasses.asdict(plan))


if __name__ == "__main__":
    main()
