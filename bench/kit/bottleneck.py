"""A router between a server and its viewers, each of whom is behind a line of its own: with real queues and losses.

Three network namespaces in a row: the server's, the router's and the viewers'. In the router each viewer has a class of
htb, which is its line, with a queue that drops what does not fit. A shaper on the server's own interface would be
another thing: the kernel tells its TCP instead of losing packets. Segments leave one by one (no GSO), as on a wire.

The thread that enters a `Bottleneck` is in the server's namespace meanwhile, and so is all that it starts: servers and
publishers need to know nothing of it but to listen at every address. Takes root; nothing outside of the namespaces is
changed, and they end with the block.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

SERVER: Final = "198.18.1.1"
"""Address of the server; 198.18.0.0/15 is for benchmarks (RFC 2544)."""
_CLONE_NEWNET: Final = 0x40000000
_LEAST_QUEUE_BYTES: Final = 4000
_NAMES: Final = ("server", "router", "viewers")
_OURS: Final = re.compile(rf"flowctl-bench-(\d+)-(?:{'|'.join(_NAMES)})")
_TIMEOUT_S: Final = 20.0


class Shape(NamedTuple):
    """What all lines of a router have in common."""

    queue_ms: int = 400  # of the line's rate: what waits in the router before it drops
    congestion: str = "cubic"  # control of the server's TCP
    bucket_bytes: int = 6000  # what the shaper lets pass at once


class Line(NamedTuple):
    """What passes to one viewer: (second, bit/s), the first at 0, and after how long it begins again."""

    steps: Sequence[tuple[float, float]]
    period_s: float


def absent() -> str:
    """Return why there can be no bottleneck here. "" means that there can."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return "lines of a real router take root, and ip and tc (Debian: iproute2)"
    try:
        with Bottleneck([Line([(0.0, 1e6)], 60.0)], Shape()):
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        return f"the kernel makes no network namespaces or shapers here: {said.strip():.200}"


class Bottleneck:
    """The lines, for the time of a block. One thread.

    Args:
        lines: of each viewer, in the order of `source`; 200 at most.
    """

    def __init__(self, lines: Sequence[Line], shape: Shape) -> None:
        self._lines = lines
        self._shape = shape
        self._names = [f"flowctl-bench-{os.getpid()}-{name}" for name in _NAMES]
        self._home = -1
        self._ended = threading.Event()
        self._changing: threading.Thread | None = None

    @property
    def viewers(self) -> list[str]:
        """What a command of a viewer begins with."""
        return ["ip", "netns", "exec", self._names[2]]

    @staticmethod
    def source(number: int) -> str:
        """Return the address that a viewer binds, which makes the line its own."""
        return f"198.18.2.{10 + number}"

    def __enter__(self) -> Self:
        _remove_left()
        try:
            self._build()
            self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            with Path("/run/netns", self._names[0]).open("rb") as namespace:
                _enter(namespace.fileno())
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._changing is not None:
            self._changing.join()
        _enter(self._home)
        self._remove()

    def begin(self) -> None:
        """Let the lines change as they say, from now on."""
        self._changing = threading.Thread(target=self._change, daemon=True)
        self._changing.start()

    def _build(self) -> None:
        server, router, viewers = self._names
        for name in self._names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _join(server, "to-router", f"{SERVER}/24", router, "to-server", "198.18.1.2/24")
        _join(router, "to-viewers", "198.18.2.1/24", viewers, "to-router", "198.18.2.2/24")
        # By the route: as the default of a namespace the kernel takes only what its administrator allows everybody.
        to_viewers = ["198.18.2.0/24", "via", "198.18.1.2", "congctl", self._shape.congestion]
        _run("ip", "-n", server, "route", "add", *to_viewers)
        _run("ip", "-n", viewers, "route", "add", "default", "via", "198.18.2.1")
        _run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        self._tc("qdisc", "add", "root", "handle", "1:", "htb", "default", "0")
        for number, line in enumerate(self._lines):
            source = self.source(number)
            _run("ip", "-n", viewers, "address", "add", f"{source}/24", "dev", "to-router")
            self._shape_line(number, line.steps[0][1], "add")
            match = ["parent", "1:", "protocol", "ip", "prio", "1", "u32", "match", "ip", "dst", f"{source}/32"]
            self._tc("filter", "add", *match, "flowid", f"1:{number + 10}")

    def _shape_line(self, number: int, rate: float, how: str) -> None:
        shape, place = self._shape, number + 10
        bits, bucket = f"{rate:.0f}bit", str(shape.bucket_bytes)
        self._tc(
            *("class", how, "parent", "1:", "classid", f"1:{place}", "htb"),
            *("rate", bits, "ceil", bits, "burst", bucket, "cburst", bucket),
        )
        limit = max(int(rate / 8 * shape.queue_ms / 1000), _LEAST_QUEUE_BYTES)
        self._tc("qdisc", how, "parent", f"1:{place}", "handle", f"{place + 1000}:", "bfifo", "limit", str(limit))

    def _tc(self, kind: str, how: str, *words: str) -> None:
        _run("ip", "netns", "exec", self._names[1], "tc", kind, how, "dev", "to-viewers", *words)

    def _change(self) -> None:
        began = time.monotonic()
        due = [
            (at_s, number, rate)
            for number, line in enumerate(self._lines)
            for at_s, rate in line.steps
            if len(line.steps) > 1
        ]
        while due:
            at_s, number, rate = due.pop(due.index(min(due)))
            if self._ended.wait(max(began + at_s - time.monotonic(), 0.0)):
                return
            self._shape_line(number, rate, "change")
            due.append((at_s + self._lines[number].period_s, number, rate))

    def _remove(self) -> None:
        if self._home >= 0:
            os.close(self._home)
            self._home = -1
        for name in self._names:
            with contextlib.suppress(subprocess.CalledProcessError):  # it was not made
                _run("ip", "netns", "delete", name)


def _join(one: str, end: str, address: str, other: str, other_end: str, other_address: str) -> None:
    """Lay a wire between two namespaces."""
    _run("ip", "-n", one, "link", "add", end, "type", "veth", "peer", "name", other_end, "netns", other)
    for name, interface, ip in ((one, end, address), (other, other_end, other_address)):
        _run("ip", "-n", name, "address", "add", ip, "dev", interface)
        _run("ip", "-n", name, "link", "set", interface, "gso_max_segs", "1", "up")


def _remove_left() -> None:
    """Remove the namespaces of benches that were killed."""
    folder = Path("/run/netns")
    for path in folder.iterdir() if folder.is_dir() else ():
        if (ours := _OURS.fullmatch(path.name)) and not Path("/proc", ours[1]).exists():
            with contextlib.suppress(subprocess.CalledProcessError):  # another bench has just done so
                _run("ip", "netns", "delete", path.name)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
