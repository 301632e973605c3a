"""What TLS costs a fan-out: processor time of the server per viewer, plain and with TLS side by side.

One server process with one thread sends a stream of 2.5 Mbit/s to viewers of another process, which throw away what
they read without decrypting it. Best of three rounds, taken in turns. Beside it the same bytes in a bare loop: `send`,
and OpenSSL writing to the descriptor itself, which is as fast as the `ssl` module goes. Each measurement has its own
loop, which writes pieces of the size that the server's flushes had: on a busy machine those are fewer and larger.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import multiprocessing
import resource
import selectors
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from flowctl.connection import Session
from flowctl.core.fanout.following import Fanouts, FollowPlace
from flowctl.core.flow.limits import NO_LIMITS
from flowctl.core.flow.state import MessageClass
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.server.admission import AdmissionLimits
from flowctl.core.server.certificate import Certificate
from flowctl.core.server.server import Server
from kit.machine import HERE
from kit.tables import print_rows

sys.path.insert(0, str(HERE.parent / "tests"))

Pair: Final[Any] = importlib.import_module("certificate_kit").Pair  # of the tests

QUICK: Final[dict[str, Any]] = {"count": 50, "length_s": 1.0, "rounds": 1}
FRAMES_PER_S: Final = 30
FRAME: Final = bytes(2_500_000 // 8 // FRAMES_PER_S)
BYTES_PER_S: Final = len(FRAME) * FRAMES_PER_S


class Follower(Session):
    """Follows the one stream of the server as soon as it has said something."""

    fanouts: Fanouts

    def received(self, data: memoryview) -> None:
        """Begin to follow."""
        del data
        if self.connection.place is None:
            FollowPlace(self.connection, self.fanouts)


def watch(address: tuple[str, int], authority: str, count: int, told: Any) -> None:
    """Connect viewers, say so, and throw away what they get until killed."""
    chooser = selectors.DefaultSelector()
    kept = []
    for _ in range(count):
        sock = socket.create_connection(address)
        if authority:
            context = ssl.create_default_context(cafile=authority)
            sock = context.wrap_socket(sock, server_hostname="localhost")
        sock.sendall(b"x")
        plain = socket.socket(fileno=sock.detach())
        plain.setblocking(False)
        kept.append(plain)
        chooser.register(plain, selectors.EVENT_READ)
    told.send(True)
    while True:
        for key, _ in chooser.select():
            with contextlib.suppress(BlockingIOError):
                key.fileobj.recv(1 << 20, socket.MSG_TRUNC)  # type: ignore[union-attr]  # what was registered


def bare(pair: Any, count: int, length_s: float, flush_bytes: int, *, secure: bool) -> float:
    """Return what a viewer costs in a loop that does nothing but flush so many bytes, in us per second."""
    flush, pause_s = bytes(flush_bytes), flush_bytes / BYTES_PER_S
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    authority = str(pair.authority) if secure else ""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=count))
        with viewers_of(listener.getsockname(), authority, count) as ready:
            socks = []
            for _ in range(count):
                sock, _ = listener.accept()
                sock = context.wrap_socket(sock, server_side=True) if secure else sock
                sock.recv(1)
                SocketOptions().apply(sock)
                socks.append(stack.enter_context(sock))
            ready.recv()
            took = []
            for _ in range(round(length_s / pause_s)):
                began = time.thread_time()
                for sock in socks:
                    assert sock.send(flush) == flush_bytes, "the machine is too busy"
                took.append(time.thread_time() - began)
                time.sleep(pause_s)
    return statistics.median(took) / count / pause_s * 1e6


@contextlib.contextmanager
def viewers_of(address: Any, authority: str, count: int) -> Iterator[Any]:
    """Run viewers in another process; the pipe gets True when all have connected."""
    ours, theirs = multiprocessing.Pipe()
    viewers = multiprocessing.get_context("fork").Process(target=watch, args=(address, authority, count, theirs))
    viewers.start()
    try:
        yield ours
    finally:
        viewers.kill()
        viewers.join()


def measured(
    server: Server, log: StreamLog, address: Any, authority: str, count: int, length_s: float
) -> tuple[float, int]:
    """Return the processor time that a viewer costs the server, in us per second, and the bytes of a flush to it."""
    with viewers_of(address, authority, count) as ready:
        ready.recv()
        while sum(item.place is not None for item in server.connections()) < count:
            time.sleep(0.05)
        group = server.groups.groups[0]
        ended = threading.Event()
        due = itertools.count()
        began = group.now()

        def frame() -> None:
            if not ended.is_set():  # by the clock: a machine that is busy elsewhere makes them late, not fewer
                group.call_later(max(0.0, began + next(due) / FRAMES_PER_S - group.now()), frame)
                log.append(FRAME, MessageClass.INTER, group.now())

        group.call_soon(frame)
        time.sleep(2)
        # What was written, not what was published: on a busy machine viewers that did not read in time got less.
        (fanout,) = Follower.fanouts.active
        before, sent, rounds = resource.getrusage(resource.RUSAGE_SELF), group.bytes_out, fanout.statistics().rounds
        time.sleep(length_s)
        after, sent = resource.getrusage(resource.RUSAGE_SELF), group.bytes_out - sent
        rounds = fanout.statistics().rounds - rounds
        ended.set()
        held = sum(not item.sender.blocked for item in server.connections())
        assert held >= 0.95 * count, f"{count - held} viewers are slow: the machine is too busy"
        used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    while server.connections():
        time.sleep(0.05)
    return used_s / sent * BYTES_PER_S * 1e6, sent // count // rounds


def run(count: int = 1000, length_s: float = 8.0, rounds: int = 3) -> list[dict[str, object]]:
    """Measure in turns; return a row for each kind of socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * count + 200)), hard))
    log = StreamLog()
    Follower.fanouts = Fanouts(log)
    free = AdmissionLimits(connections_per_address=0, new_per_address_and_s=0.0)
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Path(folder))
        server = Server(Follower, admission=free, limits=NO_LIMITS)
        secure = server.listen("127.0.0.1", 0, tls=Certificate(pair.certificate, pair.key))
        kinds = {"plain": (server.address, ""), "TLS 1.3": (secure, str(pair.authority))}
        found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in kinds}
        with server:
            for _ in range(rounds):
                for name, (address, authority) in kinds.items():
                    cost_us, flush_bytes = measured(server, log, address, authority, count, length_s)
                    loop_us = bare(pair, count, length_s / 4, flush_bytes, secure=bool(authority))
                    found[name].append((cost_us, flush_bytes, loop_us))
    best = {name: min(values) for name, values in found.items()}
    return [
        {
            "socket": name,
            "viewers": count,
            "flush kB": f"{flush_bytes / 1000:.1f}",
            "us per viewer and s": round(cost_us),
            "of plain": f"{cost_us / best['plain'][0]:.2f} x",
            "bare loop": round(loop_us),
            "of bare plain": f"{loop_us / best['plain'][2]:.2f} x",
            "of its bare loop": f"{statistics.median(cost / loop for cost, _, loop in found[name]):.2f} x",
        }
        for name, (cost_us, flush_bytes, loop_us) in best.items()
    ]


def main() -> None:
    """Print the rows of `run` as a table, or as JSON with ``--json``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--viewers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    arguments = parser.parse_args()
    print_rows(run(arguments.viewers, arguments.seconds, arguments.rounds), as_json=arguments.json)


if __name__ == "__main__":
    main()
